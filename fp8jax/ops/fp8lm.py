"""FP8-LM's AdamW on parameters whose moments, and master weights, share one scale a layer, or a group: a step of it.

Scales come from bounds, which nothing exceeds and which are known before the step: of the largest magnitudes of what is
stored, which the step before has told, of the gradient's and of the learning rate. So a step is one pass over its
arrays, after one over gradients. `_reference` is it in plain JAX, and `_fused` the kernel of
`pallas_kernels/fp8lm_triton.py`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from fp8jax.core import blocks, formats, noise, scaling
from fp8jax.core.masters import MasterWeight
from fp8jax.core.qtensor import QTensor, quantize_with_scale
from fp8jax.core.spec import QuantSpec
from fp8jax.ops import alike, kernels
from fp8jax.ops.adamw import load
from fp8jax.ops.adamw_fused import Place, placed
from fp8jax.ops.adamw_leaf import Adam, Form, difference, renewed, within
from fp8jax.ops.choice import Choice, capability, missing_triton, placed_like, tell, triton_or_xla, vary_with
from fp8jax.ops.cuts import Cut, notation
from fp8jax.ops.partition import partitioned

# Adam's largest direction is 7.3 for the default decays and 22 for b2 = 0.9999, by the inequality of Cauchy and
# Schwarz; rounding of moments adds to that.
_LARGEST_DIRECTION = 64.0
_LARGEST = np.finfo(np.float32).max
# Finite gradients count with this magnitude at most: bias-corrected first moments stay finite. A second moment may be
# Inf, of its own weight alone, since a scale of the tensor that fits it would take the codes of all others.
_LARGEST_GRADIENT = np.float32(2.0**126)
# Of sums of a few fp32 terms.
_ROUNDED_UP = np.float32(1 + 2**-20)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["grad", "weight", "master", "mu", "nu", "largest", "noise"],
    meta_fields=["decays"],
)
@dataclasses.dataclass(frozen=True)
class MasterLeaf:
    """What a step needs of one parameter.

    Attributes:
        grad: gradient, an array or a `QTensor`.
        weight: the working copy of the master weight; or that itself, an array or a `MasterWeight`.
        master: master weight, fp16 codes, of a parameter that is too small for them fp32; None where `weight` is it.
        mu: first moment, FP8 codes or fp32.
        nu: second moment, fp16 codes or fp32.
        largest: largest magnitudes of what is in codes, stacked along a new first axis, each of its scale's shape.
        noise: two random words for stochastic rounding of the master weight, or None.
        decays: whether the parameter decays; static.
    """

    grad: Any
    weight: Array | MasterWeight
    master: Any
    mu: Any
    nu: Any
    largest: Array
    noise: Array | None
    decays: bool

    @property
    def stored(self) -> tuple[QTensor, ...]:
        """What is in codes."""
        return tuple(q for q in (self.master, self.mu, self.nu) if q is not None)

    @property
    def quantized(self) -> bool:
        """Whether anything is in codes."""
        return isinstance(self.mu, QTensor)

    @property
    def copy(self) -> Array:
        """The parameter as a working copy."""
        assert not isinstance(self.weight, MasterWeight), "a master by parts has none"
        return self.weight

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the parameter that the caller holds."""
        return self.weight.dtype

    @property
    def exact(self) -> bool:
        """As of `adamw_leaf.Leaf`."""
        return self.master is None and (isinstance(self.weight, MasterWeight) or self.noise is not None)

    @property
    def codes(self) -> bool:
        """Whether the gradient is FP8 codes under scales of the parameter's own kind."""
        g, mu = self.grad, self.mu
        if not isinstance(g, QTensor) or g.spec.format not in ("e4m3", "e5m2"):
            return False
        return (g.spec.granularity, g.scale.shape) == (mu.spec.granularity, mu.scale.shape)


class StepResult(NamedTuple):
    """What a step makes of one parameter: its change or what it is now, and what is stored in codes."""

    result: Any
    master: QTensor | None
    mu: QTensor
    nu: QTensor
    largest: Array


def apply(form: Form, leaves: Sequence[MasterLeaf], adam: Adam, impl: str = "auto") -> list[StepResult]:
    """A step of some parameters.

    Args:
        form: "update" gives the distance of a working copy from the new master weight, or the change of a parameter
            that is its own (`adamw_leaf.renewed`); "step" the new parameter.
        leaves: the parameters.
        adam: the scalars of the step; `applied` is for "step".
        impl: "auto", "xla" or "triton"; see `choose`.

    Raises:
        ValueError: `impl` is unknown, or it is "triton", and the kernel cannot take a parameter.
    """
    impls = [tell("fp8lm_adamw", choose(leaf, impl)).impl for leaf in leaves]

    def each(which: Sequence[str], leaves: Sequence[MasterLeaf]) -> list[StepResult]:
        static, arguments = adam.parts()
        plain = [leaf for name, leaf in zip(which, leaves, strict=True) if name == "xla"]
        rest = iter(alike.each(_row, (form, static), arguments, plain))
        rows = [
            _fused(form, adam, leaf) if name == "triton" else next(rest)
            for name, leaf in zip(which, leaves, strict=True)
        ]
        scalars = list(vars(adam).values())
        return [vary_with(row, leaf, scalars) for row, leaf in zip(rows, leaves, strict=True)]

    if impl == "auto" and leaves:
        kernels.warn()
    reference = functools.partial(each, ["xla"] * len(leaves))
    if "triton" not in impls:
        return reference(leaves)
    fused = functools.partial(each, impls)
    otherwise = None if impl == "triton" else placed_like(fused, reference, (leaves,))
    results: list[StepResult] = jax.lax.platform_dependent(leaves, cuda=fused, default=otherwise)
    return results


def choose(leaf: MasterLeaf, impl: str) -> Choice:
    """What computes the step of a parameter.

    Raises:
        ValueError: as `apply`.
    """
    return triton_or_xla(impl, lambda: missing_triton("fp8lm_triton") or _unsupported(leaf), "the fused kernel")


def _unsupported(leaf: MasterLeaf) -> str | None:
    from pallas_kernels import fp8lm_triton

    if leaf.mu.spec.granularity != "tensor":
        return f"scales are of groups of {leaf.mu.spec.group_size}, and the kernel takes one a layer"
    if isinstance(leaf.weight, MasterWeight) and leaf.dtype != jnp.bfloat16:
        return f"the kernel has remainders of bf16 master weights, and not of {leaf.dtype}"
    grad = leaf.grad.codes.dtype if leaf.codes else jnp.float32 if isinstance(leaf.grad, QTensor) else leaf.grad.dtype
    return fp8lm_triton.unsupported(leaf.mu.shape, grad, leaf.dtype, leaf.mu.codes.dtype, leaf.noise is not None)


def largest(q: QTensor) -> Array:
    """The largest finite magnitude of each block of a quantized array, of its scale's shape."""
    codes = jnp.abs(formats.get(q.spec.format).decode(q.codes))
    codes = jnp.where(jnp.isfinite(codes), codes, 0.0)
    return _scaled(blocks.reduce(codes, q.spec.block_shape(q.shape), jnp.max, 0.0), q.scale)


def _scaled(codes: Array, scale: Array) -> Array:
    values = codes * scale
    return jnp.where(jnp.isfinite(values), values, 0.0)


def _told(units: Array, fmt: formats.Format, scale: Array) -> Array:
    """The largest magnitude that is stored, of that in units of a scale before; itself where it is beyond all codes."""
    return jnp.where(units > fmt.max, units * scale, _scaled(fmt.decode(fmt.encode(units)), scale))


def largest_of(x: Array, block: tuple[int, ...]) -> Array:
    """The largest finite magnitude of each block of an array."""
    values = jnp.abs(x.astype(jnp.float32))
    return blocks.reduce(jnp.where(jnp.isfinite(values), values, 0.0), block, jnp.max, 0.0)


def scale_above(bound: Array, fmt: formats.Format) -> Array:
    """The power of two by which magnitudes up to a bound are codes of a format.

    Scales are powers of two, so that what did not change is not rounded anew when its scale does. They are finite: a
    bound that is not comes from values that their own codes show, and must not spoil those beside them.
    """
    bound = bound * _ROUNDED_UP
    bound = jnp.where(bound <= _LARGEST, bound, _LARGEST)
    return formats.decode_e8m0(formats.encode_e8m0(scaling.to_scale(bound, fmt), "up"))


def _new_scales(leaf: MasterLeaf, adam: Adam) -> list[Array]:
    """Scales of what is in codes after the step, each of the shape of the present one."""
    factor = 1.0 if adam.factor is None else adam.factor
    if leaf.codes:
        of_grad = jnp.minimum(jnp.abs(factor) * largest(leaf.grad), _LARGEST_GRADIENT)  # its scale may be of zeros
        of_square = jnp.square(of_grad)
    else:
        values, block = within(load(leaf.grad), adam.factor, _LARGEST_GRADIENT), leaf.mu.spec.block_shape(leaf.mu.shape)
        # A gradient that is finite may have a square that is not: its own second moment then is Inf.
        of_grad, of_square = largest_of(values, block), largest_of(jnp.square(values), block)
    *of_weights, of_mu, of_nu = leaf.largest
    rate = jnp.abs(jnp.asarray(adam.rate, jnp.float32))
    bounds = [w + rate * (_LARGEST_DIRECTION + adam.weight_decay * w) for w in of_weights]
    b1, b2 = (jnp.asarray(b, jnp.float32) for b in (adam.b1, adam.b2))
    bounds += [b1 * of_mu + (1 - b1) * of_grad, b2 * of_nu + (1 - b2) * of_square]
    return [scale_above(bound, formats.get(q.spec.format)) for bound, q in zip(bounds, leaf.stored, strict=True)]


def _scalars(adam: Adam, decays: bool) -> Any:
    from pallas_kernels import fp8lm_triton

    count = jnp.asarray(adam.count, jnp.float32)
    return fp8lm_triton.FP8LMScalars(
        *(adam.rate, adam.weight_decay if decays else 0.0),
        *(adam.b1, 1 - adam.b1, adam.b2, 1 - adam.b2),
        *(1 / (1 - adam.b1**count), 1 / (1 - adam.b2**count)),
        *(adam.eps, adam.eps_root, noise.fading(adam.count)[0], adam.factor, adam.applied),
    )


def _row(static: Any, scalars: Any, leaf: MasterLeaf) -> StepResult:
    form, constants = static
    return _reference(form, Adam(**dict(constants), **scalars), leaf)


def _reference(form: Form, adam: Adam, leaf: MasterLeaf) -> StepResult:
    """The step in plain JAX; each operation is the kernel's."""
    b1_rest, b2_rest = (jnp.asarray(1 - b, jnp.float32) for b in (adam.b1, adam.b2))
    count = jnp.asarray(adam.count, jnp.float32)
    corrections = [1 / (1 - b**count) for b in (adam.b1, adam.b2)]
    rate, decay = jnp.asarray(adam.rate, jnp.float32), adam.weight_decay if leaf.decays else 0.0
    g = within(load(leaf.grad), adam.factor, _LARGEST_GRADIENT)
    m = b1_rest * g + adam.b1 * load(leaf.mu)
    held = load(leaf.nu)
    kept = adam.b2 * held
    # One that is not zero stays so where fp32 has no number for its decay.
    v = b2_rest * (g * g) + jnp.where((held > 0) & (kept < formats.TINY), formats.TINY, kept)
    direction = (m * corrections[0]) / (jnp.sqrt(v * corrections[1] + adam.eps_root) + adam.eps)
    weight = leaf.weight.astype(jnp.float32) if leaf.master is None else current(load(leaf.master), leaf.copy)
    change = -rate * (direction + decay * weight)
    *of_master, of_mu, of_nu = _new_scales(leaf, adam)
    mu = quantize_with_scale(m, leaf.mu.spec, of_mu, fading=noise.fading(adam.count, adam.b1))
    nu = quantize_with_scale(v, leaf.nu.spec, of_nu)
    if leaf.master is None:
        master, result = None, renewed(form, leaf, change)
    else:
        new, scale = weight + change, of_master[0]
        master = _master(new, leaf.master.spec, scale, leaf.noise)
        most = formats.get(leaf.master.spec.format).max
        given, block = leaf.copy.astype(jnp.float32), leaf.master.spec.block_shape(new.shape)
        # What a copy was changed to lies beyond the bound: the next step, which knows a larger one, reads it there.
        beyond = (jnp.abs(new) * blocks.spread(1 / scale, new.shape, block) > most) & jnp.isfinite(new)
        result = jnp.where(beyond, given, load(master))
        result = (result - given if form == "update" else result).astype(leaf.dtype)
    maxima = [largest(q) for q in (master, mu, nu) if q is not None]
    if master is not None:
        units = largest_of(new, block) * (1 / scale)
        maxima[0] = jnp.where(units > most, jnp.minimum(units, _LARGEST) * scale, maxima[0])
    row = StepResult(result, master, mu, nu, jnp.stack(maxima))
    if adam.applied is None:
        return row
    before = StepResult(leaf.weight, leaf.master, leaf.mu, leaf.nu, leaf.largest)
    return jax.tree.map(lambda new, old: jnp.where(adam.applied, new, old), row, before)


def current(held: Array, given: Array) -> Array:
    """Master weights, or working copies where these are no roundings of them: somebody has changed them.

    Args:
        held: fp32 values of master weights.
        given: the working copies, in any floating dtype.
    """
    half, normal = half_step(given.dtype)
    given = given.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(held, jnp.uint32) & np.uint32(0x7F800000)
    binade = jnp.maximum(jax.lax.bitcast_convert_type(bits, jnp.float32), normal)
    return jnp.where(jnp.abs(given - held) <= binade * np.float32(half), held, given)


def half_step(dtype: DTypeLike) -> tuple[float, float]:
    """How far rounding to a dtype takes a number, over the power of two below it, and the least of such powers.

    A sixteenth more: a change that is added in that dtype is rounded itself.
    """
    kind = jnp.finfo(dtype)
    normal = float(kind.smallest_normal)
    return float(kind.eps) / 2 * (1 + 2**-4), normal if normal > np.finfo(np.float32).tiny else 0.0


def _master(values: Array, spec: QuantSpec, scale: Array, words: Array | None) -> QTensor:
    how = spec if words is None else dataclasses.replace(spec, rounding="stochastic")
    return dataclasses.replace(quantize_with_scale(values, how, scale, words=words), spec=spec)


class _MasterOperands(NamedTuple):
    grad: Array
    weight: Any
    codes: tuple[Array, ...]
    grad_scale: Array
    scales: tuple[Array, ...]
    new_scales: tuple[Array, ...]
    scalars: tuple[Array | None, ...]
    noise: Array | None


def _fused(form: Form, adam: Adam, leaf: MasterLeaf) -> StepResult:
    from pallas_kernels import fp8lm_triton

    shape, depth, spec = leaf.mu.shape, leaf.mu.spec.stacked, leaf.mu.spec
    asked, form = form, "step" if leaf.exact else form
    names = [f"axis{i}" for i in range(len(shape))]
    if leaf.noise is not None:
        # Noise goes by places in the whole array, which the kernel finds where no more than two axes are cut.
        matrix = (0, max(len(shape) - 2, 1))
        names = [name if i in matrix else "-" for i, name in enumerate(names)]
    new = [formats.get(q.spec.format) for q in leaf.stored]

    def local(cut: Cut, *operands: Any) -> Any:
        x = _MasterOperands(*operands)
        parts = [x.grad_scale, *x.scales, *x.new_scales, *(1 / scale for scale in x.new_scales)]
        words, run = x.noise, None
        if words is not None:
            place = Place.of(cut, names, shape, x.grad.shape)
            assert place is not None, "of two axes"
            run = (place.inner, place.stride or 1) if cut.axes else None
            words = jnp.append(words, place.first.astype(jnp.uint32))
        result, codes, largest = fp8lm_triton.fp8lm(
            *x[:3],
            jnp.stack([scale.reshape(-1) for scale in parts]),
            fp8lm_triton.FP8LMScalars(*x.scalars),
            form=form,
            words=words,
            run=run,
            rounding=half_step(leaf.dtype),
            compute_capability=capability(),
        )
        # A scale spans all but stacked axes: each device has found the largest of its part.
        largest = cut.maximum(jnp.max(largest, axis=-1), " ".join(name for name in names[depth:] if name != "-"))
        # Rounding keeps the order: the largest code is that of the largest value.
        rows = [
            _told(one.reshape(scale.shape), fmt, scale)
            for one, fmt, scale in zip(largest, new, x.new_scales, strict=True)
        ]
        return result, codes, jnp.stack(rows)

    array, of_scale = notation(spec, shape, " ".join(names))
    scales = _new_scales(leaf, adam)
    scalars = tuple(None if x is None else jnp.asarray(x).astype(jnp.float32) for x in _scalars(adam, leaf.decays))
    weight: Any = leaf.weight
    weight = (weight.high, weight.remainder) if isinstance(weight, MasterWeight) else weight
    of_weight, many = (array, array) if isinstance(weight, tuple) else array, len(leaf.stored)
    of_codes, of_scales = (array,) * many, (of_scale,) * many
    ins = (array, of_weight, of_codes, of_scale, of_scales, of_scales, ("",) * len(scalars), "-")
    grad = leaf.grad.codes if leaf.codes else load(leaf.grad) if isinstance(leaf.grad, QTensor) else leaf.grad
    grad_scale = leaf.grad.scale if leaf.codes else jnp.ones_like(leaf.mu.scale)
    operands = _MasterOperands(
        *(grad, weight, tuple(q.codes for q in leaf.stored), grad_scale),
        *(tuple(q.scale for q in leaf.stored), tuple(scales), scalars, leaf.noise),
    )
    kinds = str(leaf.mu.spec), str(jax.tree.map(lambda x: x.dtype, weight)), many
    static = (form, kinds, leaf.codes, [x is None for x in scalars], leaf.noise is None, depth)
    result, codes, told = partitioned(
        f"fp8lm_{form}", static, local, operands, ins, (of_weight, of_codes, f"- {of_scale}")
    )
    result = MasterWeight(*result) if isinstance(result, tuple) else result
    if adam.applied is not None:
        scales, told = jax.tree.map(
            lambda new, old: jnp.where(adam.applied, new, old),
            (scales, told), ([q.scale for q in leaf.stored], leaf.largest),
        )  # fmt: skip
    *master, mu, nu = (
        dataclasses.replace(q, codes=x, scale=scale) for q, x, scale in zip(leaf.stored, codes, scales, strict=True)
    )
    new_row = StepResult(result, master[0] if master else None, mu, nu, told)
    old = StepResult(leaf.weight, leaf.master, leaf.mu, leaf.nu, leaf.largest)
    row: StepResult = jax.tree.map(placed, new_row, old)
    return row if asked == form else row._replace(result=difference(row.result, leaf.weight))


def salted(words: Array, path: str) -> Array:
    """The words of a step for the master weight of the parameter at a path."""
    return noise.salted(words, noise.salt(f"master/{path}"))
