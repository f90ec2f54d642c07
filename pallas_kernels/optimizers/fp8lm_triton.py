"""FP8-LM's AdamW in one pass: fp16 master weights, FP8 first and fp16 second moments, one scale per layer.

In: gradient (FP8 codes or values), weight, codes, and fp32 scales. Out: the change or new weight, codes in place, fp32
maxima. Hardware: Ada or newer. Reference: `reference` in fp8jax/ops/optimizers/fp8lm.py.

A parameter may also be its own master weight: fp32, bf16 with stochastic rounding, or bf16 with a remainder. New scales
come from bounds, and each program returns the largest stored magnitudes for the bounds of the next step. No extra pass
computes them.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.dispatch import call_triton
from pallas_kernels.optimizers import fp8lm_values_triton as fp8lm_values
from pallas_kernels.optimizers import masters_triton as masters
from pallas_kernels.quantization import codec_triton as codec

PLAIN_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
CODE_DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)
FP8_CAPABILITY = 89
# Contiguous elements of a thread: 16 bytes of fp16. Elements and warps of a program.
VECTOR, TILE, NUM_WARPS = 8, 2048, 4
MAX_ELEMENTS = 2**31

# Limit of a gradient times its scale.
_LARGEST_GRADIENT = tl.constexpr(2.0**126)
_TINY = tl.constexpr(float(np.finfo(np.float32).tiny))
_INF = tl.constexpr(float("inf"))
_HUGE = tl.constexpr(float(np.finfo(np.float32).max))
_FP16_MAX, _FP16_SMALLEST = tl.constexpr(65504.0), tl.constexpr(2.0**-24)


class FP8LMScalars(NamedTuple):
    """The runtime scalars of a step, each a number or a traced scalar, in the order of the kernel.

    With g the gradient times `grad_scale`, the new moments and weight are

        m = one_minus_b1 * g + b1 * mu,  v = one_minus_b2 * g^2 + b2 * nu
        w - rate * (m * correction1 / (sqrt(v * correction2 + eps_root) + eps) + weight_decay * w)

    `dither`, in (0, 1), rounds an m whose decay rounding to nearest would lose. If `apply_if` is 0, nothing is written.
    A step with neither `grad_scale` nor `apply_if` has None for both.
    """

    rate: Any
    weight_decay: Any
    b1: Any
    one_minus_b1: Any
    b2: Any
    one_minus_b2: Any
    correction1: Any
    correction2: Any
    eps: Any
    eps_root: Any
    dither: Any
    grad_scale: Any = None
    apply_if: Any = None

    @property
    def has_gate(self) -> bool:
        """Whether the step has a gradient scale or a condition."""
        return self.grad_scale is not None or self.apply_if is not None

    def to_vector(self) -> Array:
        values = [1.0 if x is None else x for x in self]
        return jnp.stack([jnp.asarray(x).astype(jnp.float32) for x in values])


@triton.jit
def _fp8lm(
    grad_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    master_ptr: tl.tensor,
    mu_ptr: tl.tensor,
    nu_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    scalars_ptr: tl.tensor,
    words_ptr: tl.tensor,
    layers: tl.tensor,
    tiles: tl.tensor,
    vectors: tl.tensor,
    run_length: tl.tensor,
    run_stride: tl.tensor,
    unused1: tl.tensor,
    unused2: tl.tensor,
    unused3: tl.tensor,
    result_ptr: tl.tensor,
    amax_ptr: tl.tensor,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    MASKED: tl.constexpr,
    IS_STEP: tl.constexpr,
    GRAD_IS_CODES: tl.constexpr,
    GATED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HAS_RUNS: tl.constexpr,
    NUM_CODES: tl.constexpr,
    REMAINDER_BITS: tl.constexpr,
    MAX_ROUNDING: tl.constexpr,
    MIN_BINADE: tl.constexpr,
    MU_MAX: tl.constexpr,
    MU_INF: tl.constexpr,
    MU_NORMAL: tl.constexpr,
    MU_MANTISSA: tl.constexpr,
) -> None:
    """Update a tile of one layer in place, except for a change and the maxima.

    The moments are the last of NUM_CODES arrays of codes. With two, `master_ptr` is the remainder.
    """
    WEIGHT_IS_MASTER: tl.constexpr = NUM_CODES == 2
    if GATED:  # noqa: SIM102 (one is known at compile time)
        if tl.load(scalars_ptr + 12) == 0:
            return
    program = tl.program_id(0)
    layer = program // tiles
    tile_start = (program - layer * tiles).to(tl.int64) * TILE
    length = vectors.to(tl.int64) * VECTOR
    base = layer * length + tile_start
    offsets = tl.max_contiguous(tl.arange(0, TILE), VECTOR)
    mask = offsets < length - tile_start

    g = codec.load(grad_ptr + base, offsets, mask, MASKED)
    w = 0.0 if WEIGHT_IS_MASTER and REMAINDER_BITS == 0 else codec.load(master_ptr + base, offsets, mask, MASKED)
    m = codec.load(mu_ptr + base, offsets, mask, MASKED)
    v = codec.load(nu_ptr + base, offsets, mask, MASKED)
    p = codec.load(weight_ptr + base, offsets, mask, MASKED)
    tl.debug_barrier()  # the assembler delays no load past it
    rate, weight_decay = tl.load(scalars_ptr), tl.load(scalars_ptr + 1)
    b1, one_minus_b1 = tl.load(scalars_ptr + 2), tl.load(scalars_ptr + 3)
    b2, one_minus_b2 = tl.load(scalars_ptr + 4), tl.load(scalars_ptr + 5)
    correction1, correction2 = tl.load(scalars_ptr + 6), tl.load(scalars_ptr + 7)
    eps, eps_root = tl.load(scalars_ptr + 8), tl.load(scalars_ptr + 9)
    scales_ptr += layer

    g = codec.to_fp32(g)
    if GRAD_IS_CODES:
        g = g * tl.load(scales_ptr)
    g = codec.scale_and_clip_gradient(
        g, tl.load(scalars_ptr + 11) if GATED else tl.full((), 1.0, tl.float32), _LARGEST_GRADIENT
    )
    if WEIGHT_IS_MASTER:
        w = masters.join_master(p, w, REMAINDER_BITS) if REMAINDER_BITS > 0 else codec.to_fp32(p)
    else:
        w = w.to(tl.float32) * tl.load(scales_ptr + layers)  # type: ignore[union-attr]
        w = fp8lm_values.reconcile_master(w, codec.to_fp32(p), MAX_ROUNDING, MIN_BINADE)
    m = m.to(tl.float32) * tl.load(scales_ptr + (NUM_CODES - 1) * layers)
    codes = v.to(tl.float32)
    v = codes * tl.load(scales_ptr + NUM_CODES * layers)
    m = one_minus_b1 * g + b1 * m
    v = b2 * v
    # A non-zero second moment stays non-zero if it, or its decay, underflows fp32.
    v = tl.where((codes > 0) & (v < _TINY), _TINY, v)
    v = one_minus_b2 * (g * g) + v
    direction = (m * correction1) / (tl.sqrt(v * correction2 + eps_root) + eps)
    change = -rate * (direction + weight_decay * w)
    w = w + change

    program_amax_ptr = amax_ptr + program
    programs = layers * tiles
    element, noise = offsets, offsets
    if STOCHASTIC:
        element = base + offsets
        if HAS_RUNS:
            run = element // run_length
            element = run * run_stride + (element - run * run_length) + tl.load(words_ptr + 2).to(tl.int64)
        noise = codec.pair_noise(element >> 3, element, tl.load(words_ptr), tl.load(words_ptr + 1))
    if WEIGHT_IS_MASTER:
        if REMAINDER_BITS > 0:
            w, remainder = masters.split_master(w, REMAINDER_BITS)
            codec.store(master_ptr + base, offsets, remainder.to(master_ptr.dtype.element_ty), mask, MASKED)
        elif STOCHASTIC:
            w = codec.round_stochastically(w, noise, element, False)
        if IS_STEP:
            codec.store(weight_ptr + base, offsets, w.to(weight_ptr.dtype.element_ty), mask, MASKED)
        else:
            codec.store(result_ptr + base, offsets, change, mask, MASKED)
    else:
        units = fp8lm_values.scaled_magnitudes(w, tl.load(scales_ptr + 7 * layers))
        exceeds_bound = (units > _FP16_MAX) & (tl.abs(w) < _INF)
        y = tl.where(exceeds_bound, _FP16_MAX, units)
        if STOCHASTIC:
            noise = tl.where((element & 1) == 0, noise & 0xFFFF, noise >> 16)
            signed = fp8lm_values.round_fp16_stochastically(fp8lm_values.copy_sign(y, w), noise)
            y = tl.abs(signed)
        else:
            signed = fp8lm_values.copy_sign(y, w)
        code = signed.to(tl.float16)
        codec.store(master_ptr + base, offsets, code, mask, MASKED)
        amax = fp8lm_values.store_amax(
            program_amax_ptr, tl.where(exceeds_bound, tl.minimum(units, _HUGE), y), mask, MASKED
        )
        master = code.to(tl.float32) * tl.load(scales_ptr + 4 * layers)
        # A changed working copy beyond the bound is kept as it is: the next step has a larger bound, and reads it
        # there.
        if amax > _FP16_MAX:
            current_weight = codec.to_fp32(codec.load(weight_ptr + base, offsets, mask, MASKED))
            master = tl.where(exceeds_bound, current_weight, master)
        if IS_STEP:
            codec.store(weight_ptr + base, offsets, master.to(weight_ptr.dtype.element_ty), mask, MASKED)
        else:
            update = master - codec.to_fp32(p)
            codec.store(result_ptr + base, offsets, update.to(result_ptr.dtype.element_ty), mask, MASKED)

    y = fp8lm_values.to_code_units(v, tl.load(scales_ptr + 3 * NUM_CODES * layers), _FP16_MAX, _FP16_SMALLEST)
    codec.store(nu_ptr + base, offsets, fp8lm_values.copy_sign(y, v).to(tl.float16), mask, MASKED)
    fp8lm_values.store_amax(program_amax_ptr + (NUM_CODES - 1) * programs, y, mask, MASKED)

    y = fp8lm_values.to_code_units(m, tl.load(scales_ptr + (3 * NUM_CODES - 1) * layers), MU_MAX, 0.0)
    y = codec.add_dither(y, b1, tl.load(scalars_ptr + 10), MU_NORMAL, MU_MANTISSA)
    codes = fp8lm_values.copy_sign(y, m).to(mu_ptr.dtype.element_ty).to(tl.int8, bitcast=True)
    # The conversion saturates Inf to the largest code.
    infinite = ((codec.float_bits(m) >> 24) & -0x80) | MU_INF
    codes = tl.where(y == _INF, infinite.to(tl.int8), codes)
    codec.store(mu_ptr + base, offsets, codes.to(mu_ptr.dtype.element_ty, bitcast=True), mask, MASKED)
    fp8lm_values.store_amax(program_amax_ptr + (NUM_CODES - 2) * programs, y, mask, MASKED)


def unsupported_reason(shape: tuple[int, ...], grad: Any, weight: Any, mu: Any, stochastic: bool = False) -> str | None:
    """Return why the kernel does not support this shape, and these dtypes of gradient, weight and mu codes, or None."""
    if not shape or math.prod(shape) == 0:
        return f"shape {shape} has no elements"
    if stochastic and math.prod(shape) > MAX_ELEMENTS:
        return f"shape {shape} has more than {MAX_ELEMENTS} elements, the limit of the indices for noise"
    if grad not in (*PLAIN_DTYPES, *CODE_DTYPES):
        return f"the gradient has dtype {jnp.dtype(grad)}, not {call_triton.join_dtypes((*PLAIN_DTYPES, *CODE_DTYPES))}"
    if weight not in PLAIN_DTYPES:
        return f"the weight has dtype {jnp.dtype(weight)}, not {call_triton.join_dtypes(PLAIN_DTYPES)}"
    if mu not in CODE_DTYPES:
        return f"mu is stored in {jnp.dtype(mu)}, not {call_triton.join_dtypes(CODE_DTYPES)}"
    return None


def fp8lm(
    grad: Array,
    weight: Array | tuple[Array, Array],
    codes: tuple[Array, ...],
    scales: Array,
    scalars: FP8LMScalars,
    *,
    in_place: bool,
    seed: Array | None = None,
    run: tuple[int, int] | None = None,
    rounding: tuple[float, float] = (0.0, 0.0),
    compute_capability: int | None = None,
) -> tuple[Array | tuple[Array, Array], tuple[Array, ...], Array]:
    """Return the results of one step of FP8-LM's AdamW on one parameter.

    Args:
        grad: gradient, of any shape, fp32, bf16 or fp16, or FP8 codes.
        weight: the working copy, fp32, bf16 or fp16; if it is not a rounding of the master weight, it replaces it. Or
            the master weight: fp32; in place, bf16 with `seed`, or its bf16 high part and int8 or int16 remainder.
        codes: fp16 codes of the master weight, unless `weight` is it; FP8 codes of the first moment; and fp16 ones of
            the second moment.
        scales: fp32 (1 + 3 n, layers) for n arrays of codes and the layers of the leading axes. In order: scales of the
            gradient's codes, old scales, new scales, and reciprocals of the new ones; powers of two.
        scalars: the scalars of the step. If it is not applied, all stays, and a change and the maxima are undefined.
        in_place: whether the new working copy is returned, otherwise its change.
        seed: two noise words for stochastic rounding of master weights, and the position of the first element in the
            whole array; None rounds to nearest.
        run: for a shard: consecutive elements of the whole, and the distance to the next such run; None if all are
            consecutive.
        rounding: largest rounding error of a working copy over the power of two below its master weight, and the
            smallest such power.
        compute_capability: GPU architecture to compile for, such as 90; None for the present GPU.

    Returns:
        The change or the new weight (with a remainder, both parts); the codes; and the largest finite stored
        magnitudes, in units of the scales and before rounding to nearest, fp32 (n, layers, tiles). Donated inputs are
        updated in place.

    Raises:
        ValueError: the kernel does not support these arrays; the message has the reason.
    """
    weight, remainder = weight if isinstance(weight, tuple) else (weight, None)
    *master, mu, nu = codes
    reason = unsupported_reason(grad.shape, grad.dtype, weight.dtype, mu.dtype, seed is not None)
    if not master and not _is_valid_master(weight, remainder, in_place, seed is not None):
        reason = "a master weight is fp32, or for a step bf16 with a seed, or with a remainder, int8 or int16"
    if reason is not None:
        raise ValueError(f"the fused kernel of fp8lm_adamw cannot run: {reason}")
    layers = scales.shape[1]
    length = grad.size // layers
    vector = VECTOR if length % VECTOR == 0 else 1
    tiles = -(-length // TILE)
    # Codes of the master, or its remainder; otherwise the scalars are a placeholder.
    master_inputs = master or ([] if remainder is None else [remainder])
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*master_inputs, mu, nu, weight)]
    outputs.append(jax.ShapeDtypeStruct((len(codes), layers, tiles), jnp.float32))
    aliased_inputs = [*range(3 - len(master_inputs), 5), *([1] if in_place else [])]
    scalar_vector = scalars.to_vector()
    *master_outputs, mu, nu, result, amax = call_triton.call(
        *(grad, weight, *(master_inputs or [scalar_vector]), mu, nu, scales, scalar_vector),
        scalar_vector if seed is None else seed,
        *(layers, tiles, length // vector),
        *(run or (1, 1)),
        *[1] * (1 - len(master_inputs)),
        kernel=_fp8lm,
        out_shapes=outputs,
        num_programs=layers * tiles,
        num_warps=NUM_WARPS,
        compute_capability=compute_capability,
        aliases={source: i for i, source in enumerate(aliased_inputs)},
        TILE=TILE,
        VECTOR=vector,
        MASKED=length % TILE > 0,
        IS_STEP=in_place,
        GRAD_IS_CODES=grad.dtype in CODE_DTYPES,
        GATED=scalars.has_gate,
        STOCHASTIC=seed is not None,
        HAS_RUNS=run is not None,
        NUM_CODES=len(codes),
        REMAINDER_BITS=0 if remainder is None else 8 * remainder.dtype.itemsize,
        MAX_ROUNDING=rounding[0],
        MIN_BINADE=rounding[1],
        MU_MAX=float(jnp.finfo(mu.dtype).max),
        MU_INF=0x7C if mu.dtype == jnp.float8_e5m2 else 0x7F,
        MU_NORMAL=float(jnp.finfo(mu.dtype).smallest_normal),
        MU_MANTISSA=int(jnp.finfo(mu.dtype).nmant),
    )
    if remainder is not None:
        return (result, master_outputs[0]), (mu, nu), amax
    return result, (*master_outputs, mu, nu), amax


def _is_valid_master(weight: Array, remainder: Array | None, in_place: bool, stochastic: bool) -> bool:
    if remainder is None and not stochastic:
        return weight.dtype == jnp.float32  # type: ignore[no-any-return]
    exact = stochastic if remainder is None else not stochastic and remainder.dtype in (jnp.int8, jnp.int16)
    return in_place and exact and weight.dtype == jnp.bfloat16
