"""AdamW on 8-bit moments in one pass over gradient, weight, codes and scales.

In: gradient (..., n), weight, moments as FP8 codes with fp32 scales and bf16 exponents per group, or as values. Out:
the change or new weight, and both moments, in place. Hardware: Ada or newer. Reference: `reference` in
fp8jax/ops/optimizers/adamw.py.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jax import Array
from jax.typing import ArrayLike

from pallas_kernels.dispatch import call_triton
from pallas_kernels.optimizers import adamw_tiles_triton as tiles
from pallas_kernels.quantization import codec_triton as codec
from pallas_kernels.quantization.codec_triton import Noise as Noise
from pallas_kernels.quantization.codec_triton import Storage as Storage

MIN_GROUP, MAX_GROUP = 16, 1024
PLAIN_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
CODE_DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)
FP8_CAPABILITY = 89
WARP, ELEMENTS_PER_THREAD = 32, 16
# Contiguous elements of a thread, in one layout for codes, gradients and weights; loads have at most 16 bytes.
VECTOR = 8
# Approximates 1 / (1 + x) by 1 - _RECIPROCAL_SLOPE * x, for x up to 1 / 128.
_RECIPROCAL_SLOPE = 0.9935
# Below this bound, quotients by 1 - b2 may overflow fp32.
_MIN_ONE_MINUS_B2 = 2.0**-60
# The bits of 1.0, as a runtime argument: known bits under a mask cost the assembler one more instruction.
_ONE_BITS = 0x3F800000


class AdamWScalars(NamedTuple):
    """The runtime scalars of a step, each a number or a traced scalar.

    change = -rate * (direction + weight_decay * weight), with direction = m / (sqrt(v + eps_root) + eps). Here m and v
    are the moments over `correction1` = 1 - b1^t and `correction2` = 1 - b2^t. Gradients are multiplied by
    `grad_scale`. If `apply_if` is False, nothing is written. A step with neither has None for both. Finite directions
    are limited to `max_direction`; None does not limit them. `dither`, in (0, 1), is for first moments with
    `codec.add_dither`.
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
    grad_scale: Any = None
    apply_if: Any = None
    max_direction: Any = None
    dither: Any = None

    @property
    def has_gate(self) -> bool:
        """Whether the step has a gradient scale or a condition."""
        return self.grad_scale is not None or self.apply_if is not None

    def to_vector(self, seed: Array | None = None) -> Array:
        """Return the scalars as the kernel reads them, fp32, with both corrections factored out of the moments.

        Let c = sqrt(correction2) and r = sqrt(v + eps_root * correction2). Then direction = m / (r + eps * c) * c /
        correction1. Under the root, zero is replaced by the smallest normal number.

        - The first eight are for moments as stored.
        - The next twelve are for moments m / one_minus_b1 and v / one_minus_b2, with both factors times the gradient
          scale.
        - The next restores the previous second moment of an element without gradient.
        - Optional ones follow: gradient scale and condition, two limits of the direction, two noise words, `dither`.
        """
        rate, weight_decay, b1, one_minus_b1, b2, one_minus_b2, correction1, correction2, eps, eps_root = (
            jnp.asarray(x, jnp.float32) for x in self[:10]
        )
        correction = jnp.sqrt(correction2)
        general_scale = correction / correction1
        root_floor = jnp.maximum(eps_root * correction2, np.finfo(np.float32).tiny)
        values = [
            -rate * general_scale,
            weight_decay / general_scale,
            b1,
            one_minus_b1,
            b2,
            one_minus_b2,
            root_floor,
            -eps * correction,
        ]
        # Ratio of the previous second moment to the decayed one; the first step has none.
        b2 = jnp.maximum(b2, np.finfo(np.float32).tiny)
        previous_correction = 1 - (1 - correction2) / b2
        silent_decay = jnp.where(previous_correction > one_minus_b2 / 2, correction2 / previous_correction, 1) / b2

        if self.grad_scale is not None:
            one_minus_b1, one_minus_b2 = one_minus_b1 * self.grad_scale, one_minus_b2 * jnp.square(self.grad_scale)
        fast_scale = general_scale * one_minus_b1 / jnp.sqrt(one_minus_b2)
        eps = eps * correction / jnp.sqrt(one_minus_b2)
        rate, decay = -rate * fast_scale, weight_decay / fast_scale
        # If these can produce NaN from finite numbers, no tile uses the fast path.
        is_safe = (jnp.abs(rate) < 16) & (jnp.abs(decay) < 1) & jnp.isfinite(eps + eps_root)
        is_safe &= (one_minus_b2 > _MIN_ONE_MINUS_B2) & jnp.isfinite(one_minus_b2)
        small_eps_from = jnp.where(eps_root == 0, jnp.square(128 * eps), jnp.inf)
        values += [
            rate,
            decay,
            -_RECIPROCAL_SLOPE * eps,
            eps,
            one_minus_b1,
            one_minus_b2,
            b1 / one_minus_b1,
            b2 / one_minus_b2,
        ]
        values += [
            jnp.where(is_safe, 1 / one_minus_b1, jnp.inf),
            1 / one_minus_b2,
            eps_root * correction2 / one_minus_b2,
            small_eps_from,
        ]
        values.append(silent_decay)
        if self.has_gate:
            gate_values = (1.0 if x is None else x for x in (self.grad_scale, self.apply_if))
            values += [jnp.asarray(x).astype(jnp.float32) for x in gate_values]
        if self.max_direction is not None:
            limit = jnp.asarray(self.max_direction, jnp.float32)
            values += [limit / general_scale, limit / fast_scale]
        if seed is not None:
            values += list(jax.lax.bitcast_convert_type(seed, jnp.float32))
        if self.dither is not None:
            values.append(jnp.asarray(self.dither, jnp.float32))
        return jnp.stack(values)


class DeadElementParams(NamedTuple):
    """Static thresholds of dead elements, and their stored moments.

    Let D = max |m| / (sqrt(max v) + eps) of a group. An idle element has a direction below `idle` * D. A silent one has
    no gradient, and a direction below `silent` * D. An idle first moment becomes 0. A silent second moment keeps its
    value, but at least `lowest` of the group's largest. From `near` of that on, it becomes `raised` of that; larger
    ones decay.
    """

    idle: float
    silent: float
    raised: float
    near: float
    lowest: float


@triton.jit
def _adamw(
    grad_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    mu_ptr: tl.tensor,
    mu_scale_ptr: tl.tensor,
    mu_exponent_ptr: tl.tensor,
    nu_ptr: tl.tensor,
    nu_scale_ptr: tl.tensor,
    nu_exponent_ptr: tl.tensor,
    scalars_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    words_ptr: tl.tensor,
    table_ptr: tl.tensor,
    remainder_ptr: tl.tensor,
    groups: tl.tensor,
    groups_of_row: tl.tensor,
    vectors_of_row: tl.tensor,
    salt_ptr: tl.tensor,
    run_length: tl.tensor,
    run_stride: tl.tensor,
    one: tl.tensor,
    unused1: tl.tensor,
    unused2: tl.tensor,
    unused3: tl.tensor,
    unused4: tl.tensor,
    unused5: tl.tensor,
    unused6: tl.tensor,
    unused7: tl.tensor,
    result_ptr: tl.tensor,
    GROUP_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    SUBTILES: tl.constexpr,
    FAST_PATH: tl.constexpr,
    PARTIAL_GROUPS: tl.constexpr,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_RUNS: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_STEP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    REMAINDER_BITS: tl.constexpr,
    GATED: tl.constexpr,
    CLIP: tl.constexpr,
    MU: tl.constexpr,
    NU: tl.constexpr,
    DEAD_ELEMENTS: tl.constexpr,
) -> None:
    """Update a tile of groups on the fast path if possible, otherwise in subtiles on the general path."""
    if GATED:  # noqa: SIM102 (one is known at compile time)
        if tl.load(scalars_ptr + 22) == 0:
            return
    program = tl.program_id(0)
    needs_general_path = tl.full((), 1, tl.int32)
    if FAST_PATH and (not MASKED or (program + 1) * TILE_GROUPS <= groups):
        needs_general_path = tiles.update_tile_fast(
            program, grad_ptr, weight_ptr, mu_ptr, mu_scale_ptr, mu_exponent_ptr, nu_ptr, nu_scale_ptr,
            nu_exponent_ptr, scalars_ptr, seed_ptr, words_ptr, table_ptr, remainder_ptr, salt_ptr, run_length,
            run_stride, one, result_ptr, GROUP_SIZE, LANES, TILE_GROUPS, HAS_RUNS, VECTOR, IS_STEP, HAS_WEIGHT,
            STOCHASTIC, REMAINDER_BITS, GATED, CLIP, MU, NU, DEAD_ELEMENTS,
        )  # fmt: skip
    if not FAST_PATH or needs_general_path > 0:
        for subtile in range(SUBTILES):
            tiles.update_tile_general(
                program * SUBTILES + subtile, grad_ptr, weight_ptr, mu_ptr, mu_scale_ptr, mu_exponent_ptr, nu_ptr,
                nu_scale_ptr, nu_exponent_ptr, scalars_ptr, seed_ptr, words_ptr, remainder_ptr, groups, groups_of_row,
                vectors_of_row, salt_ptr, run_length, run_stride, one, result_ptr, GROUP_SIZE, LANES * SUBTILES,
                TILE_GROUPS // SUBTILES, PARTIAL_GROUPS, MASKED, ALIGNED, HAS_RUNS, VECTOR, IS_STEP, HAS_WEIGHT,
                STOCHASTIC, REMAINDER_BITS, GATED, CLIP, MU, NU, DEAD_ELEMENTS, not PARTIAL_GROUPS and not FAST_PATH,
            )  # fmt: skip


def unsupported_reason(
    shape: tuple[int, ...], grad: Any, weight: Any, mu: tuple[Any, ...], nu: tuple[Any, ...], group_size: int
) -> str | None:
    """Return why the kernel does not support this shape, and these dtypes of arrays and stored moments, or None."""
    if not shape or math.prod(shape) == 0:
        return f"shape {shape} has no groups"
    if not MIN_GROUP <= group_size <= MAX_GROUP or group_size & (group_size - 1):
        return f"group_size {group_size} is not a power of two from {MIN_GROUP} to {MAX_GROUP}"
    for name, dtype in (("gradient", grad), ("weight", weight)):
        if dtype not in PLAIN_DTYPES:
            return f"the {name} has dtype {jnp.dtype(dtype)}, not {call_triton.join_dtypes(PLAIN_DTYPES)}"
    for name, dtypes in (("mu", mu), ("nu", nu)):
        allowed = CODE_DTYPES if len(dtypes) > 1 else PLAIN_DTYPES
        if dtypes[0] not in allowed:
            return f"{name} is stored in {jnp.dtype(dtypes[0])}, not {call_triton.join_dtypes(allowed)}"
        if any(
            dtype != expected_dtype
            for dtype, expected_dtype in zip(dtypes[1:], (jnp.float32, jnp.bfloat16), strict=False)
        ):
            return f"the scales of {name} are not fp32, or its exponents not bf16"
    return None


def adamw(
    grad: Array,
    weight: Array | tuple[Array, Array] | None,
    mu: tuple[Array, ...],
    nu: tuple[Array, ...],
    scalars: AdamWScalars,
    *,
    mu_storage: Storage | None,
    nu_storage: Storage | None,
    dead_elements: DeadElementParams,
    group_size: int,
    in_place: bool,
    dtype: Any = None,
    seed: Array | None = None,
    nu_seed: Array | None = None,
    salt: ArrayLike = 0,
    run: tuple[int, int] | None = None,
    compute_capability: int | None = None,
) -> tuple[Array | tuple[Array, Array], tuple[Array, ...], tuple[Array, ...]]:
    """Return the results of one AdamW step on one parameter.

    Args:
        grad: gradient, any shape (..., n), fp32, bf16 or fp16.
        weight: the parameter; or, in place, its bf16 high part and the int8 or int16 remainder of its master. None only
            for a change without weight decay.
        mu, nu: moments: fp8 codes (..., n), fp32 scales (..., ceil(n / group_size)) and, with range expansion, bf16
            exponents of the scales' shape; or values in a plain dtype alone.
        scalars: the scalars of the step. If it is not applied, moments and an in-place weight stay; a change is
            undefined.
        mu_storage, nu_storage: coding of the moments; None for values.
        dead_elements: thresholds of dead elements, for codes with range expansion.
        group_size: elements along the last axis per scale, a power of two from 16 to 1024.
        in_place: whether the new weight is returned, otherwise its change.
        dtype: dtype of a change; None for the weight's, or without one the gradient's. In place, it is the weight's.
        seed: two uint32 words for stochastic rounding of new bf16 weights; None rounds to nearest.
        nu_seed: two uint32 words for a second moment with stochastic rounding, in codes or bf16.
        salt: a number of this parameter, uint32, that is mixed into `nu_seed`.
        run: for a shard, whose noise depends on the position in the whole: consecutive groups there, and the distance
            to the next such run; None if all are consecutive. `nu_seed` includes the index of the first group.
        compute_capability: GPU architecture to compile for, such as 90; None for the present GPU.

    Returns:
        The change or the new weight (with a remainder, both parts), and both moments. Moments and an in-place weight
        reuse the memory of donated inputs.

    Raises:
        ValueError: the kernel does not support these arrays; the message has the reason.
    """
    if in_place and weight is None:
        raise ValueError("in_place needs the weight")
    weight, remainder = weight if isinstance(weight, tuple) else (weight, None)
    if (
        remainder is not None
        and weight is not None
        and (not in_place or weight.dtype != jnp.bfloat16 or remainder.dtype not in (jnp.int8, jnp.int16))
    ):
        raise ValueError("a remainder, int8 or int16, needs a bf16 weight, in place")
    dtype = (grad if weight is None else weight).dtype if dtype is None or in_place else dtype
    dtypes = [tuple(x.dtype for x in moment) for moment in (mu, nu)]
    reason = unsupported_reason(grad.shape, grad.dtype, dtype, dtypes[0], dtypes[1], group_size)
    if reason is not None:
        raise ValueError(f"the fused AdamW kernel cannot run: {reason}")
    if seed is not None and (not in_place or dtype != jnp.bfloat16 or remainder is not None):
        raise ValueError("stochastic rounding needs bf16 weights, in place")
    is_stochastic = nu_storage.noise is not None if nu_storage else nu_seed is not None and nu[0].dtype == jnp.bfloat16
    if (nu_seed is not None) != is_stochastic:
        raise ValueError("nu_seed requires a second moment in bf16, or in codes whose storage has `noise`")
    if (scalars.dither is not None) != (mu_storage is not None and mu_storage.dither_format is not None):
        raise ValueError("the scalar `dither` requires a first moment whose storage has `dither_format`")
    length = grad.shape[-1]
    groups_of_row = -(-length // group_size)
    groups = math.prod(grad.shape[:-1]) * groups_of_row
    has_partial_groups = length % group_size > 0
    vector = VECTOR if not has_partial_groups or length % VECTOR == 0 else 4
    is_aligned = length % vector == 0
    # The table has no signs, and dithered first moments have no fast path.
    use_fast_path = (
        not has_partial_groups and len(mu) == len(nu) == 3 and nu_storage is not None and not nu_storage.is_signed
    )
    use_fast_path = use_fast_path and mu_storage is not None and mu_storage.dither_format is None
    # Wider results need registers.
    elements = 32 if jnp.dtype(dtype).itemsize == 2 else ELEMENTS_PER_THREAD
    lanes = min(max(group_size // (elements if use_fast_path else ELEMENTS_PER_THREAD), 1), WARP)
    tile = WARP // lanes
    num_subtiles = min(group_size // lanes // ELEMENTS_PER_THREAD, tile) if use_fast_path else 1
    # The scalars are a placeholder for absent inputs, which are not read.
    placeholder = _scalars_to_vector(scalars, nu_seed)
    inputs = [grad, placeholder if weight is None else weight]
    inputs += [part for moment in (mu, nu) for part in (*moment, *[placeholder] * (3 - len(moment)))]
    # A second pointer to the scalars, for the noise words, saves registers.
    inputs += [placeholder, placeholder if seed is None else seed, placeholder]
    inputs.append(jnp.asarray(log2_code_magnitudes(nu[0].dtype)) if use_fast_path else placeholder)
    inputs.append(placeholder if remainder is None else remainder)
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*mu, *nu)]
    aliased_inputs = [*range(2, 2 + len(mu)), *range(5, 5 + len(nu))]
    if remainder is not None:
        outputs.append(jax.ShapeDtypeStruct(remainder.shape, remainder.dtype))
        aliased_inputs.append(len(inputs) - 1)
    outputs.append(jax.ShapeDtypeStruct(grad.shape, dtype))
    aliased_inputs += [1] * in_place
    unused = [1] * (_MAX_RESULTS - len(outputs))
    results = call_triton.call(
        *inputs,
        groups,
        groups_of_row,
        length // vector if is_aligned else length,
        placeholder if nu_seed is None else jnp.asarray(salt, jnp.uint32),
        *(run or (1, 1)),
        _ONE_BITS,
        *unused,
        kernel=_adamw,
        out_shapes=outputs,
        num_programs=-(-groups // tile),
        num_warps=1,
        compute_capability=compute_capability,
        aliases={source: i for i, source in enumerate(aliased_inputs)},
        GROUP_SIZE=group_size,
        LANES=lanes * vector,
        TILE_GROUPS=tile,
        SUBTILES=num_subtiles,
        FAST_PATH=use_fast_path,
        PARTIAL_GROUPS=has_partial_groups,
        MASKED=has_partial_groups or groups % tile > 0,
        ALIGNED=is_aligned,
        HAS_RUNS=run is not None,
        VECTOR=vector,
        IS_STEP=in_place,
        HAS_WEIGHT=weight is not None,
        STOCHASTIC=seed is not None,
        REMAINDER_BITS=0 if remainder is None else 8 * remainder.dtype.itemsize,
        GATED=scalars.has_gate,
        CLIP=scalars.max_direction is not None,
        MU=mu_storage.constants if mu_storage else codec.UNSCALED,
        NU=nu_storage.constants if nu_storage else codec.STOCHASTIC_BF16 if is_stochastic else codec.UNSCALED,
        DEAD_ELEMENTS=dead_elements,
    )
    result = results[-1] if remainder is None else (results[-1], results[-2])
    return result, tuple(results[: len(mu)]), tuple(results[len(mu) : len(mu) + len(nu)])


_MAX_RESULTS = 8
_scalars_to_vector = jax.jit(lambda scalars, seed: scalars.to_vector(seed))  # traced once for equal parameters


def log2_code_magnitudes(dtype: Any) -> np.ndarray:
    """Return log2 of the magnitudes of all 256 codes of an 8-bit dtype, fp32, by unsigned code."""
    codes = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float64)
    with np.errstate(divide="ignore"):
        return np.log2(np.abs(codes)).astype(np.float32)
