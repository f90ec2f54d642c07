"""AdamW on 8-bit moments in one pass: codes, scales, gradient and weight are read once, and results written once."""

import dataclasses
import inspect
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax_triton
import numpy as np
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import codec_triton as codec
from pallas_kernels.codec_triton import Storage as Storage

MIN_GROUP, MAX_GROUP = 16, 1024
PLAIN_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
CODE_DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)
FP8_CAPABILITY = 89
WARP, ELEMENTS = 32, 16


class Scalars(NamedTuple):
    """The runtime scalars of a step, each a number or a traced scalar; `correction` is 1 - b^t.

    change = -rate * (direction + weight_decay * weight), with direction = m / (sqrt(v + eps_root) + eps), where m and
    v are the moments over `correction1` and `correction2`.
    """

    rate: Any
    weight_decay: Any
    b1: Any
    b1_rest: Any
    b2: Any
    b2_rest: Any
    correction1: Any
    correction2: Any
    eps: Any
    eps_root: Any

    @property
    def vector(self) -> Array:
        """The scalars in the order and form that the kernel reads, both corrections taken out of its moments.

        With r = sqrt(v + eps_root * correction2), direction = m / (r + eps * c) * c / correction1, c the root of
        `correction2`. Under the root, zero counts as the smallest normal number.
        """
        correction = jnp.sqrt(jnp.asarray(self.correction2, jnp.float32))
        least = jnp.maximum(self.eps_root * self.correction2, np.finfo(np.float32).tiny)
        scale = correction / self.correction1
        values = [-self.rate * scale, self.weight_decay / scale, self.b1, self.b1_rest, self.b2, self.b2_rest]
        values += [least, -self.eps * correction]
        return jnp.stack([jnp.asarray(x, jnp.float32) for x in values])


@dataclasses.dataclass(frozen=True)
class Launch:
    """How the work is cut: tuning only, never the result.

    Attributes:
        warps: warps of a program; a thread has 16 elements, or 32 of a group of 1024.
        vector: elements of a thread that lie next to each other. One layout serves codes, gradients and weights, whose
            loads are 16 bytes wide at most.
    """

    warps: int = 1
    vector: int = 8


@triton.jit
def _load(pointer: tl.tensor, offsets: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    return tl.load(pointer + offsets, mask=mask, other=0.0) if MASKED else tl.load(pointer + offsets)


@triton.jit
def _store(pointer: tl.tensor, offsets: tl.tensor, value: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr) -> None:
    value = value.to(pointer.dtype.element_ty)
    if MASKED:
        tl.store(pointer + offsets, value, mask=mask)
    else:
        tl.store(pointer + offsets, value)


@triton.jit
def _store_moment(
    x: tl.tensor, pointer: tl.tensor, scale_ptr: tl.tensor, exponent_ptr: tl.tensor, offsets: tl.tensor,
    mask: tl.tensor, group: tl.tensor, there: tl.tensor, MASKED: tl.constexpr, HOW: tl.constexpr, QUICK: tl.constexpr,
) -> None:  # fmt: skip
    stored = x
    if HOW[0]:
        stored, scale, exponent = codec.encode(x, pointer.dtype.element_ty, HOW, QUICK)
        _store(scale_ptr, group, scale, there, MASKED)
        if HOW[1]:
            _store(exponent_ptr, group, exponent, there, MASKED)
    _store(pointer, offsets, stored, mask, MASKED)


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
    groups: tl.tensor,
    groups_of_row: tl.tensor,
    vectors_of_row: tl.tensor,
    spare1: tl.tensor,
    spare2: tl.tensor,
    spare3: tl.tensor,
    spare4: tl.tensor,
    spare5: tl.tensor,
    spare6: tl.tensor,
    result_ptr: tl.tensor,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    SHORT: tl.constexpr,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    VECTOR: tl.constexpr,
    STEP: tl.constexpr,
    WEIGHT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    MU: tl.constexpr,
    NU: tl.constexpr,
) -> None:
    """A tile of groups. Moments, and in a step the weight, are written where they were read."""
    program = tl.program_id(0)
    group = program * TILE + tl.arange(0, TILE)
    inside = tl.arange(0, SIZE // LANES)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    there = group < groups
    if SHORT:
        length = vectors_of_row * VECTOR if ALIGNED else vectors_of_row
        row = group // groups_of_row
        column = (group - row * groups_of_row) * SIZE
        start = row.to(tl.int64) * length + column
        if ALIGNED:
            start = tl.multiple_of(start, VECTOR)
        base = program.to(tl.int64) * 0
        offsets = codec.per_group(start) + inside
        mask = codec.per_group(there) & (codec.per_group(column) + inside < length)
    else:
        base = program.to(tl.int64) * (TILE * SIZE)
        offsets = tl.arange(0, TILE)[:, None, None] * SIZE + inside
        mask = codec.per_group(there) & (inside >= 0)
    offsets = tl.max_contiguous(offsets, (1, 1, VECTOR))

    g = _load(grad_ptr + base, offsets, mask, MASKED)
    w = _load(weight_ptr + base, offsets, mask, MASKED) if WEIGHT else 0.0
    rate, weight_decay = tl.load(scalars_ptr), tl.load(scalars_ptr + 1)
    b1, b1_rest = tl.load(scalars_ptr + 2), tl.load(scalars_ptr + 3)
    b2, b2_rest = tl.load(scalars_ptr + 4), tl.load(scalars_ptr + 5)
    least, negative_eps = tl.load(scalars_ptr + 6), tl.load(scalars_ptr + 7)
    word1 = tl.load(seed_ptr) if STOCHASTIC else 0
    word2 = tl.load(seed_ptr + 1) if STOCHASTIC else 0
    nu = _load(nu_ptr + base, offsets, mask, MASKED)
    mu = _load(mu_ptr + base, offsets, mask, MASKED)
    # The assembler puts loads off to where their values are used, but not past a barrier; scales are used first.
    tl.debug_barrier()
    nu_scale = _load(nu_scale_ptr, group, there, MASKED) if NU[0] else 1.0
    nu_exponent = _load(nu_exponent_ptr, group, there, MASKED) if NU[1] else 1.0
    mu_scale = _load(mu_scale_ptr, group, there, MASKED) if MU[0] else 1.0
    mu_exponent = _load(mu_exponent_ptr, group, there, MASKED) if MU[1] else 1.0

    # The second moment comes first, here and below: the assembler then needs fewest registers.
    g = codec.fp32(g)
    w = codec.fp32(w) if WEIGHT else 0.0
    v = codec.multiply_add(g * g, b2_rest, codec.decode(nu, nu_scale, nu_exponent, b2, NU))
    m = codec.multiply_add(g, b1_rest, codec.decode(mu, mu_scale, mu_exponent, b1, MU))
    inverse_root = codec.inverse_root(v + least)
    change = m * codec.over_negative(inverse_root, tl.fma(inverse_root, negative_eps, -1.0))
    if WEIGHT:
        change = tl.fma(w, weight_decay, change)
    result = tl.fma(change, rate, w) if STEP else change * rate
    if STOCHASTIC:
        result = codec.round_stochastically(result, base, offsets, word1, word2, ALIGNED)
    _store((weight_ptr if STEP else result_ptr) + base, offsets, result, mask, MASKED)

    _store_moment(v, nu_ptr + base, nu_scale_ptr, nu_exponent_ptr, offsets, mask, group, there, MASKED, NU, not SHORT)
    _store_moment(m, mu_ptr + base, mu_scale_ptr, mu_exponent_ptr, offsets, mask, group, there, MASKED, MU, not SHORT)


def unsupported(
    shape: tuple[int, ...], grad: Any, weight: Any, mu: tuple[Any, ...], nu: tuple[Any, ...], group_size: int
) -> str | None:
    """Why the kernel cannot take arrays of this shape and these dtypes, or None.

    Args:
        shape: shape of the parameter.
        grad: dtype of the gradient.
        weight: dtype of the weight and of the result.
        mu: dtypes of what the first moment is stored in, (codes, scale), (codes, scale, exponent) or (values,).
        nu: likewise of the second moment.
        group_size: elements of a group.
    """
    if not shape or math.prod(shape) == 0:
        return f"shape {shape} has no groups"
    if not MIN_GROUP <= group_size <= MAX_GROUP or group_size & (group_size - 1):
        return f"group_size {group_size} is not a power of two from {MIN_GROUP} to {MAX_GROUP}"
    for name, dtype in (("gradient", grad), ("weight", weight)):
        if dtype not in PLAIN_DTYPES:
            return f"the {name} has dtype {jnp.dtype(dtype)}, not {_either(PLAIN_DTYPES)}"
    for name, dtypes in (("mu", mu), ("nu", nu)):
        allowed = CODE_DTYPES if len(dtypes) > 1 else PLAIN_DTYPES
        if dtypes[0] not in allowed:
            return f"{name} is stored in {jnp.dtype(dtypes[0])}, not {_either(allowed)}"
        if any(dtype != want for dtype, want in zip(dtypes[1:], (jnp.float32, jnp.bfloat16), strict=False)):
            return f"the scales of {name} are not fp32, or its exponents not bf16"
    return None


def adamw(
    grad: Array,
    weight: Array | None,
    mu: tuple[Array, ...],
    nu: tuple[Array, ...],
    scalars: Scalars,
    *,
    mu_storage: Storage | None,
    nu_storage: Storage | None,
    group_size: int,
    form: Literal["update", "step"],
    dtype: Any = None,
    seed: Array | None = None,
    launch: Launch | None = None,
    compute_capability: int | None = None,
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    """One step of AdamW on one parameter.

    Args:
        grad: gradient, any shape (..., n), fp32, bf16 or fp16.
        weight: the parameter; None only for an update without weight decay.
        mu: first moment: fp8 codes (..., n), fp32 scales (..., ceil(n / group_size)) and, with range expansion, bf16
            exponents of the scales' shape; or the values in a plain dtype alone.
        nu: second moment, likewise.
        scalars: the scalars of the step.
        mu_storage: how the codes of the first moment are made; None for plain values.
        nu_storage: likewise of the second moment.
        group_size: elements along the last axis that share a scale, a power of two from 16 to 1024.
        form: "update" returns the change of the weight, "step" the new weight.
        dtype: dtype of an update; None takes the weight's, or without one the gradient's. A step keeps the weight's.
        seed: two uint32 words: new bf16 weights are rounded stochastically; None rounds to nearest.
        launch: how the work is cut; None takes the measured best.
        compute_capability: of the GPU to compile for, as 90; None asks the GPU.

    Returns:
        The change or the new weight, and both moments as they were given. Moments, and in a step the weight, are
        updated in place where they are donated, and copied first where they are not.

    Raises:
        ValueError: the kernel cannot take these arrays; the message says why.
    """
    step = form == "step"
    if step and weight is None:
        raise ValueError("form 'step' needs the weight")
    like = grad if weight is None else weight
    dtype = like.dtype if dtype is None or step else dtype
    dtypes = [tuple(x.dtype for x in moment) for moment in (mu, nu)]
    reason = unsupported(grad.shape, grad.dtype, dtype, dtypes[0], dtypes[1], group_size)
    if reason is not None:
        raise ValueError(f"the fused AdamW kernel cannot run: {reason}")
    if seed is not None and (not step or dtype != jnp.bfloat16):
        raise ValueError("stochastic rounding is of the new bf16 weights: form 'step', dtype bfloat16")
    launch = launch or Launch()
    length = grad.shape[-1]
    groups_of_row = -(-length // group_size)
    groups = math.prod(grad.shape[:-1]) * groups_of_row
    short = length % group_size > 0
    vector = launch.vector if not short or length % launch.vector == 0 else 4
    aligned = length % vector == 0
    lanes = min(group_size // ELEMENTS, WARP)
    tile = launch.warps * WARP // lanes
    # The scalars stand in for what is absent, and are not touched in its place.
    stand_in = scalars.vector
    inputs = [grad, stand_in if weight is None else weight]
    inputs += [part for moment in (mu, nu) for part in (*moment, *[stand_in] * (3 - len(moment)))]
    inputs += [stand_in, stand_in if seed is None else seed]
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*mu, *nu)]
    outputs.append(jax.ShapeDtypeStruct(grad.shape, dtype))
    sources = [*range(2, 2 + len(mu)), *range(5, 5 + len(nu)), *[1] * step]
    # Before 0.4, jax-triton appends a parameter for every result, later only for those without an input to alias.
    appended = "out_shape" in _TRITON_CALL
    unused = [1] * (_RESULTS - (len(outputs) if appended else len(outputs) - len(sources)))
    results = jax_triton.triton_call(
        *inputs,
        groups,
        groups_of_row,
        length // vector if aligned else length,
        *unused,
        kernel=_adamw,
        grid=(-(-groups // tile),),
        num_warps=launch.warps,
        num_stages=1,
        compute_capability=compute_capability,
        input_output_aliases={source: i for i, source in enumerate(sources)},
        SIZE=group_size,
        LANES=lanes * vector,
        TILE=tile,
        SHORT=short,
        MASKED=short or groups % tile > 0,
        ALIGNED=aligned,
        VECTOR=vector,
        STEP=step,
        WEIGHT=weight is not None,
        STOCHASTIC=seed is not None,
        MU=tuple(mu_storage.static if mu_storage else codec.PLAIN),
        NU=tuple(nu_storage.static if nu_storage else codec.PLAIN),
        **{"out_shape" if appended else "out_type": outputs},
    )
    return results[-1], tuple(results[: len(mu)]), tuple(results[len(mu) : -1])


_TRITON_CALL = inspect.signature(jax_triton.triton_call).parameters
_RESULTS = 7


def _either(dtypes: tuple[Any, ...]) -> str:
    return " or ".join(str(jnp.dtype(d)) for d in dtypes)
