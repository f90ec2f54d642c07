"""AdamW on 8-bit moments in one pass: codes, scales, gradient and weight are read once, and results written once."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import adamw_tiles_triton as tiles
from pallas_kernels import call_triton
from pallas_kernels import codec_triton as codec
from pallas_kernels.codec_triton import Noise as Noise
from pallas_kernels.codec_triton import Storage as Storage

MIN_GROUP, MAX_GROUP = 16, 1024
PLAIN_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
CODE_DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)
FP8_CAPABILITY = 89
WARP, ELEMENTS = 32, 16
# Up to x = 1 / 128, 1 / (1 + x) is 1 - _SLOPE * x, to 1.1e-5 of itself.
_SLOPE = 0.9935
# Below it, what is taken over it may be too large for fp32.
_SMALLEST_REST = 2.0**-60
# The bits of 1.0, an argument: the assembler sets bits that it knows, under a mask, in two instructions and not one.
_ONE = 0x3F800000


class AdamWScalars(NamedTuple):
    """The runtime scalars of a step, each a number or a traced scalar; `correction` is 1 - b^t.

    change = -rate * (direction + weight_decay * weight), with direction = m / (sqrt(v + eps_root) + eps), where m and
    v are the moments over `correction1` and `correction2`. Gradients count times `factor`. Where `applied` is False
    nothing is written. A step that has neither leaves both None. Finite directions beyond `max_direction` are cut to
    it; None cuts nothing. `drawn`, in (0, 1), is for first moments that are `codec.faded`.
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
    factor: Any = None
    applied: Any = None
    max_direction: Any = None
    drawn: Any = None

    @property
    def gated(self) -> bool:
        """Whether the step has a factor or may be left out."""
        return self.factor is not None or self.applied is not None

    def vector(self, words: Array | None = None) -> Array:
        """The scalars in the order and form that the kernel reads, both corrections taken out of its moments.

        With r = sqrt(v + eps_root * correction2), direction = m / (r + eps * c) * c / correction1, c the root of
        `correction2`. Under the root, zero counts as the smallest normal number. From the ninth on they are for
        moments that are taken as m / b1_rest and v / b2_rest, both rests times the factor. The last of these takes the
        second moment of a member without a gradient to what it was. Then come, where the step has them, the factor and
        whether it is applied; the largest direction over what takes either kind of moments to it; two words for noise,
        as they are; and `drawn`: so all that a step needs is made at once.
        """
        rate, weight_decay, b1, b1_rest, b2, b2_rest, correction1, correction2, eps, eps_root = (
            jnp.asarray(x, jnp.float32) for x in self[:10]
        )
        correction = jnp.sqrt(correction2)
        careful = correction / correction1
        least = jnp.maximum(eps_root * correction2, np.finfo(np.float32).tiny)
        values = [-rate * careful, weight_decay / careful, b1, b1_rest, b2, b2_rest, least, -eps * correction]
        # Second moments that do not fall, from what they fell to; the first step has none.
        b2 = jnp.maximum(b2, np.finfo(np.float32).tiny)
        before = 1 - (1 - correction2) / b2
        before_decay = jnp.where(before > b2_rest / 2, correction2 / before, 1) / b2

        if self.factor is not None:
            b1_rest, b2_rest = b1_rest * self.factor, b2_rest * jnp.square(self.factor)
        scale = careful * b1_rest / jnp.sqrt(b2_rest)
        eps = eps * correction / jnp.sqrt(b2_rest)
        rate, decay = -rate * scale, weight_decay / scale
        # Where these may make NaN of finite numbers, every tile is a special one.
        tame = (jnp.abs(rate) < 16) & (jnp.abs(decay) < 1) & jnp.isfinite(eps + eps_root)
        tame &= (b2_rest > _SMALLEST_REST) & jnp.isfinite(b2_rest)
        small_from = jnp.where(eps_root == 0, jnp.square(128 * eps), jnp.inf)
        values += [rate, decay, -_SLOPE * eps, eps, b1_rest, b2_rest, b1 / b1_rest, b2 / b2_rest]
        values += [jnp.where(tame, 1 / b1_rest, jnp.inf), 1 / b2_rest, eps_root * correction2 / b2_rest, small_from]
        values.append(before_decay)
        if self.gated:
            gate = (1.0 if x is None else x for x in (self.factor, self.applied))
            values += [jnp.asarray(x).astype(jnp.float32) for x in gate]
        if self.max_direction is not None:
            most = jnp.asarray(self.max_direction, jnp.float32)
            values += [most / careful, most / scale]
        if words is not None:
            values += list(jax.lax.bitcast_convert_type(words, jnp.float32))
        if self.drawn is not None:
            values.append(jnp.asarray(self.drawn, jnp.float32))
        return jnp.stack(values)


class Members(NamedTuple):
    """Members of a group that no longer matter, and what is stored of them; static.

    With D = max |m| / (sqrt(max v) + eps) of a group, a member is idle, or silent if it has no gradient, where its
    direction is under the share of D of that name. The first moment of an idle one becomes 0. The second one of a
    silent one stays as it is, at least `lowest` of the group's largest; from `near` on it becomes `raised` of that;
    what is larger falls on.
    """

    idle: float
    silent: float
    raised: float
    near: float
    lowest: float


@dataclasses.dataclass(frozen=True)
class AdamWLaunch:
    """How the work is cut: tuning only, never the result.

    Attributes:
        warps: warps of a program.
        vector: elements of a thread that lie next to each other. One layout serves codes, gradients and weights, whose
            loads are 16 bytes wide at most.
        elements: elements of a thread of `ordinary` tiles, 16 or 32; None takes 32 where results are 16 bits wide, else
            16. A thread always has 32 of a group of 1024, else 16 of other tiles.
    """

    warps: int = 1
    vector: int = 8
    elements: int | None = None


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
    rest_ptr: tl.tensor,
    groups: tl.tensor,
    groups_of_row: tl.tensor,
    vectors_of_row: tl.tensor,
    salt: tl.tensor,
    inner: tl.tensor,
    stride: tl.tensor,
    one: tl.tensor,
    spare1: tl.tensor,
    spare2: tl.tensor,
    spare3: tl.tensor,
    spare4: tl.tensor,
    spare5: tl.tensor,
    spare6: tl.tensor,
    spare7: tl.tensor,
    result_ptr: tl.tensor,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    ORDINARY: tl.constexpr,
    SHORT: tl.constexpr,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    RUNS: tl.constexpr,
    VECTOR: tl.constexpr,
    STEP: tl.constexpr,
    WEIGHT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    REST: tl.constexpr,
    GATED: tl.constexpr,
    CUT: tl.constexpr,
    MU: tl.constexpr,
    NU: tl.constexpr,
    MEMBERS: tl.constexpr,
) -> None:
    """A tile of groups: as an ordinary one where it is, else carefully, in parts of fewer elements a thread."""
    if GATED:  # noqa: SIM102 (one is known at compile time)
        if tl.load(scalars_ptr + 22) == 0:
            return
    program = tl.program_id(0)
    left = tl.full((), 1, tl.int32)
    if ORDINARY and (not MASKED or (program + 1) * TILE <= groups):
        left = tiles.ordinary(
            program, grad_ptr, weight_ptr, mu_ptr, mu_scale_ptr, mu_exponent_ptr, nu_ptr, nu_scale_ptr,
            nu_exponent_ptr, scalars_ptr, seed_ptr, words_ptr, table_ptr, rest_ptr, salt, inner, stride, one,
            result_ptr, SIZE, LANES, TILE, RUNS, VECTOR, STEP, WEIGHT, STOCHASTIC, REST, GATED, CUT, MU, NU, MEMBERS,
        )  # fmt: skip
    if not ORDINARY or left > 0:
        for part in range(PARTS):
            tiles.careful(
                program * PARTS + part, grad_ptr, weight_ptr, mu_ptr, mu_scale_ptr, mu_exponent_ptr, nu_ptr,
                nu_scale_ptr, nu_exponent_ptr, scalars_ptr, seed_ptr, words_ptr, rest_ptr, groups, groups_of_row,
                vectors_of_row, salt, inner, stride, one, result_ptr, SIZE, LANES * PARTS, TILE // PARTS, SHORT, MASKED,
                ALIGNED, RUNS, VECTOR, STEP, WEIGHT, STOCHASTIC, REST, GATED, CUT, MU, NU, MEMBERS,
                not SHORT and not ORDINARY,
            )  # fmt: skip


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
    weight: Array | tuple[Array, Array] | None,
    mu: tuple[Array, ...],
    nu: tuple[Array, ...],
    scalars: AdamWScalars,
    *,
    mu_storage: Storage | None,
    nu_storage: Storage | None,
    members: Members,
    group_size: int,
    form: Literal["update", "step"],
    dtype: Any = None,
    seed: Array | None = None,
    nu_seed: Array | None = None,
    salt: int = 0,
    run: tuple[int, int] | None = None,
    launch: AdamWLaunch | None = None,
    compute_capability: int | None = None,
) -> tuple[Array | tuple[Array, Array], tuple[Array, ...], tuple[Array, ...]]:
    """One step of AdamW on one parameter.

    Args:
        grad: gradient, any shape (..., n), fp32, bf16 or fp16.
        weight: the parameter, or for a step its bf16 high part and the int8 or int16 remainder of its master; None only
            for an update without weight decay.
        mu: first moment: fp8 codes (..., n), fp32 scales (..., ceil(n / group_size)) and, with range expansion, bf16
            exponents of the scales' shape; or the values in a plain dtype alone.
        nu: second moment, likewise.
        scalars: the scalars of the step. Where it is not applied, moments and the weight of a step are as before, and
            an update is undefined.
        mu_storage: how the codes of the first moment are made; None for plain values.
        nu_storage: likewise of the second moment.
        members: what is stored of members that no longer matter: no first moment and another second one, in codes with
            range expansion.
        group_size: elements along the last axis that share a scale, a power of two from 16 to 1024.
        form: "update" returns the change of the weight, "step" the new weight.
        dtype: dtype of an update; None takes the weight's, or without one the gradient's. A step keeps the weight's.
        seed: two uint32 words: new bf16 weights are rounded stochastically; None rounds to nearest.
        nu_seed: two uint32 words for the second moment: for codes where its storage rounds stochastically, or bf16.
        salt: a number of the parameter's own that joins these words.
        run: where the array is a shard, whose noise goes by groups of the whole: groups that follow each other there,
            and how many further the next such run begins; None if all do. The first one's number is in `nu_seed`.
        launch: how the work is cut; None takes the measured best.
        compute_capability: of the GPU to compile for, as 90; None asks the GPU.

    Returns:
        The change or the new weight, of parts both, and both moments as they were given. Moments, and in a step the
        weight, are updated in place where they are donated, and copied first where they are not.

    Raises:
        ValueError: the kernel cannot take these arrays; the message says why.
    """
    step = form == "step"
    if step and weight is None:
        raise ValueError("form 'step' needs the weight")
    weight, rest = weight if isinstance(weight, tuple) else (weight, None)
    if (
        rest is not None
        and weight is not None
        and (not step or weight.dtype != jnp.bfloat16 or rest.dtype not in (jnp.int8, jnp.int16))
    ):
        raise ValueError("a remainder, int8 or int16, is of a bf16 weight in form 'step'")
    dtype = (grad if weight is None else weight).dtype if dtype is None or step else dtype
    dtypes = [tuple(x.dtype for x in moment) for moment in (mu, nu)]
    reason = unsupported(grad.shape, grad.dtype, dtype, dtypes[0], dtypes[1], group_size)
    if reason is not None:
        raise ValueError(f"the fused AdamW kernel cannot run: {reason}")
    if seed is not None and (not step or dtype != jnp.bfloat16 or rest is not None):
        raise ValueError("stochastic rounding is of the new bf16 weights: form 'step', dtype bfloat16")
    noisy = nu_storage.noise is not None if nu_storage else nu_seed is not None and nu[0].dtype == jnp.bfloat16
    if (nu_seed is not None) != noisy:
        raise ValueError("nu_seed is for a second moment in bf16, or in codes whose storage has `noise`")
    if (scalars.drawn is not None) != (mu_storage is not None and mu_storage.fading is not None):
        raise ValueError("the scalar `drawn` is for a first moment whose storage has `fading`")
    launch = launch or AdamWLaunch()
    length = grad.shape[-1]
    groups_of_row = -(-length // group_size)
    groups = math.prod(grad.shape[:-1]) * groups_of_row
    short = length % group_size > 0
    vector = launch.vector if not short or length % launch.vector == 0 else 4
    aligned = length % vector == 0
    # The table has no signs, and first moments that are faded no form of their own.
    ordinary = not short and len(mu) == len(nu) == 3 and nu_storage is not None and not nu_storage.signed
    ordinary = ordinary and mu_storage is not None and mu_storage.fading is None
    elements = launch.elements or (32 if jnp.dtype(dtype).itemsize == 2 else ELEMENTS)  # wider ones take registers
    lanes = min(max(group_size // (elements if ordinary else ELEMENTS), 1), WARP)
    tile = launch.warps * WARP // lanes
    parts = min(group_size // lanes // ELEMENTS, tile) if ordinary else 1
    # The scalars stand in for what is absent, and are not touched in its place.
    stand_in = _vector(scalars, nu_seed)
    inputs = [grad, stand_in if weight is None else weight]
    inputs += [part for moment in (mu, nu) for part in (*moment, *[stand_in] * (3 - len(moment)))]
    # The scalars once more: with a pointer of its own to their last two, the program has registers enough.
    inputs += [stand_in, stand_in if seed is None else seed, stand_in]
    inputs.append(jnp.asarray(logarithms(nu[0].dtype)) if ordinary else stand_in)
    inputs.append(stand_in if rest is None else rest)
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*mu, *nu)]
    sources = [*range(2, 2 + len(mu)), *range(5, 5 + len(nu))]
    if rest is not None:
        outputs.append(jax.ShapeDtypeStruct(rest.shape, rest.dtype))
        sources.append(len(inputs) - 1)
    outputs.append(jax.ShapeDtypeStruct(grad.shape, dtype))
    sources += [1] * step
    unused = [1] * (_RESULTS - len(outputs))
    results = call_triton.call(
        *inputs,
        groups,
        groups_of_row,
        length // vector if aligned else length,
        salt,
        *(run or (1, 1)),
        _ONE,
        *unused,
        kernel=_adamw,
        results=outputs,
        programs=-(-groups // tile),
        warps=launch.warps,
        compute_capability=compute_capability,
        aliases={source: i for i, source in enumerate(sources)},
        SIZE=group_size,
        LANES=lanes * vector,
        TILE=tile,
        PARTS=parts,
        ORDINARY=ordinary,
        SHORT=short,
        MASKED=short or groups % tile > 0,
        ALIGNED=aligned,
        RUNS=run is not None,
        VECTOR=vector,
        STEP=step,
        WEIGHT=weight is not None,
        STOCHASTIC=seed is not None,
        REST=0 if rest is None else 8 * rest.dtype.itemsize,
        GATED=scalars.gated,
        CUT=scalars.max_direction is not None,
        MU=mu_storage.static if mu_storage else codec.PLAIN,
        NU=nu_storage.static if nu_storage else codec.NOISY_BF16 if noisy else codec.PLAIN,
        MEMBERS=members,
    )
    result = results[-1] if rest is None else (results[-1], results[-2])
    return result, tuple(results[: len(mu)]), tuple(results[len(mu) : len(mu) + len(nu)])


_RESULTS = 8
_vector = jax.jit(lambda scalars, words: scalars.vector(words))  # traced once for all parameters alike


def logarithms(dtype: Any) -> np.ndarray:
    """log2 of the magnitude of each of the 256 codes of an 8-bit dtype, fp32, by the code as an unsigned byte."""
    codes = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float64)
    with np.errstate(divide="ignore"):
        return np.log2(np.abs(codes)).astype(np.float32)


def _either(dtypes: tuple[Any, ...]) -> str:
    return " or ".join(str(jnp.dtype(d)) for d in dtypes)
