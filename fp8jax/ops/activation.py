"""Gated and plain activations that keep their inputs in 8 bits for the backward pass (COAT, section 5.2)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import derivatives, formats, scaling
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import Context, Recipe
from fp8jax.core.spec import QuantSpec
from fp8jax.ops import fused
from fp8jax.ops.fused_reference import ACTIVATIONS, activation_cotangents
from fp8jax.ops.saveable import ACTIVATION, named
from fp8jax.ops.saved import NOTHING, Gradient, Made, Origin, decode, differentiable, keep
from fp8jax.recipes import context_part


def glu(
    gate: Array,
    up: Array,
    *,
    recipe: Recipe | Context | str,
    activation: str = "silu",
) -> Array:
    """activation(gate) * up (Shazeer, 2020).

    Forward it is what JAX computes; the backward pass reads the codes of `gate` and `up`, in a faithful context also
    those of the activated gate. Where inputs are kept as they are JAX differentiates. `glu_linear` is it with the layer
    that reads it, which keeps less.

    Args:
        gate: (..., channels), any floating dtype.
        up: the same shape and dtype.
        recipe: a `Recipe`, its part `Context`, or a name.
        activation: "silu", "gelu" (exact) or "gelu_tanh".

    Returns:
        (..., channels) in the dtype of `gate`.

    Raises:
        ValueError: unknown activation, or the shapes or dtypes differ.
    """
    check_alike(gate, up)
    return activate(activation, gate, up, context_part(recipe))[0]


def activation(x: Array, *, recipe: Recipe | Context | str, activation: str) -> Array:
    """activation(x), of which the backward pass reads the codes of `x`.

    Args:
        x: (..., channels), any floating dtype.
        recipe, activation: as of `glu`.

    Returns:
        (..., channels) in the dtype of `x`.

    Raises:
        ValueError: unknown activation.
    """
    return activate(activation, x, None, context_part(recipe))[0]


def check_alike(gate: Array, up: Array) -> None:
    """Raises ValueError for what are no two inputs of a gated activation."""
    if (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise ValueError(f"glu takes arrays alike, not {gate.dtype}{gate.shape} and {up.dtype}{up.shape}")


# The derivative of GELU is at most 1.129, that of SiLU 1.100; neither is larger than its argument.
SLOPE = 1.13


class ActivationSaved(NamedTuple):
    """What an activation saves: the codes of its gate or only input, of `up`, and of the activated gate.

    Where inputs are kept as they are, these in place of their codes.
    """

    gate: QTensor | Array
    up: QTensor | Array | None
    activated: QTensor | None


@dataclasses.dataclass(frozen=True)
class Activation:
    """How an activation goes back: `fp8jax.ops.saved.Remade`.

    Attributes:
        activation: its name. dtype: of its inputs.
        bounded: whether scales of its cotangents come from bounds.
        written: whether kernels write its cotangents, as `fused.written`.
        biased: whether layers before it have biases, whose gradients are sums of its cotangents.
    """

    activation: str
    dtype: DTypeLike
    bounded: bool = False
    written: bool = False
    biased: bool = False

    def again(self, saved: ActivationSaved, gradient: Gradient) -> Made:
        activated = ACTIVATIONS[self.activation](decode(saved.gate))
        y = (activated if saved.up is None else activated * decode(saved.up)).astype(self.dtype)
        dy = gradient.array if (gradient.array.shape, gradient.array.dtype) == (y.shape, y.dtype) else None
        sources, part = self._operands(saved, y, dy), None
        foreseen = self._foreseen(saved, gradient, None if dy is None else sources)
        if sources is not None:
            from pallas_kernels.remake_triton import RESULT

            operation, operands = sources
            ahead = None if dy is None else foreseen
            (part,) = fused.Computation(operation, (RESULT,), operands, ahead=ahead).parts
        return Made(y, part, foreseen)

    def backward(
        self,
        saved: ActivationSaved,
        dy: Array,
        dtypes: tuple[DTypeLike | None, ...],
        others: Array | None,
        foreseen: fused.Foreseen | None,
    ) -> tuple[tuple[Array, ...], tuple[Origin, ...]]:
        plain = self._operands(saved, dy, dy, fp8=False) if self.written and {*dtypes} == {self.dtype} else None
        if plain is not None:
            operation, operands = plain
            arrays = fused.run(lambda on, operands: on.cotangents(operation, operands), operands)
            return tuple(fused.array(x, dy) for x in arrays), ()
        up, activated = (None if q is None else decode(q) for q in saved[1:])
        cotangents = activation_cotangents(ACTIVATIONS[self.activation], decode(saved.gate), up, activated, dy)
        cast = tuple(ct.astype(dtype) for ct, dtype in zip(cotangents, dtypes, strict=True))
        if any(dtype != self.dtype for dtype in dtypes):
            return cast, ()
        foreseen, sources = foreseen or fused.Foreseen(), self._operands(saved, cast[0], dy)
        parts: tuple[fused.Output | None, ...] = (None,) * len(cast)
        if sources is not None:
            from pallas_kernels.remake_triton import GATE, UP

            kinds = (GATE, UP)[: len(cast)]
            sums = dict(enumerate(foreseen.sums))
            parts = fused.Computation(
                sources[0], kinds, sources[1], foreseen.peaks, None, foreseen.variants, sums
            ).parts
        spec, scales = foreseen.spec, foreseen.scales or (None,) * len(cast)
        known = (None if spec is None or scale is None else (spec, scale) for scale in scales)
        return cast, tuple(Origin(None, part, scale) for part, scale in zip(parts, known, strict=True))

    def _foreseen(self, saved: ActivationSaved, gradient: Gradient, sources: Any) -> fused.Foreseen:
        """Scales of the cotangents of gate and up from bounds on them, if these are wanted.

        `sources` are how kernels compute the cotangents, or None.
        """
        spec = gradient.spec
        if not self.bounded or spec is None or spec.format != "e5m2" or not fused.takes(spec):
            return fused.Foreseen()
        assert isinstance(saved.gate, QTensor)
        plain = saved.gate.spec.granularity in ("tensor", "token", "group")
        if not plain or gradient.array.shape != saved.gate.shape:
            return fused.Foreseen()
        slopes = [jnp.float32(SLOPE)]
        if saved.up is not None:
            assert isinstance(saved.up, QTensor)
            slopes = [SLOPE * _largest(saved.up), _largest(saved.gate)]
        rows, fmt = gradient.rows(), formats.get(spec.format)
        bounds = tuple(scaling.largest_magnitude(rows * slope) for slope in slopes)
        if sources is None:
            peaks = self._peaks(saved, gradient.array)
        else:
            operation, operands = sources
            peaks = fused.run(functools.partial(_peaks_under, operation, fmt), operands, bounds)
        tight = (
            jnp.where(scaling.is_loose(bound, peak, fmt), peak, bound)
            for bound, peak in zip(bounds, peaks, strict=True)
        )
        return fused.Foreseen(
            spec=spec, scales=tuple(scaling.to_scale(bound, fmt) for bound in tight), summed=self.biased
        )

    def _peaks(self, saved: ActivationSaved, dy: Array) -> tuple[Array, ...]:
        """The largest magnitudes of the cotangents of gate and up."""
        up, activated = (None if q is None else decode(q) for q in saved[1:])
        cotangents = activation_cotangents(ACTIVATIONS[self.activation], decode(saved.gate), up, activated, dy)
        return tuple(scaling.largest_magnitude(ct.astype(self.dtype)) for ct in cotangents)

    def _operands(
        self, saved: ActivationSaved, like: Array, dy: Array | None, *, fp8: bool = True
    ) -> tuple[Any, Any] | None:
        """How the kernels compute the result, or with its gradient those of the inputs, alike to an array.

        None for XLA.
        """
        spec = None if isinstance(saved.gate, Array) else saved.gate.spec
        operation = _fused(self.activation, like, saved.up, spec, saved.activated is not None, fp8=fp8)
        if operation is None:
            return None
        from pallas_kernels import remake_triton

        names = [name for name in ("first", "up", "activated") for name in (name, f"{name}_scale")]
        parts = [part for q in saved for part in ((None, None) if q is None else fused.stored(q))]
        arrays: Any = dict(zip(names, parts, strict=True))
        return operation, remake_triton.Operands(**arrays, gradient=None if dy is None else fused.matrix(dy))


def _peaks_under(operation: Any, fmt: formats.Format, on: Any, operands: Any, bounds: tuple[Array, ...]) -> Any:
    """The largest magnitudes of an activation's cotangents, or 0 where a sample of rows shows that no bound is loose.

    The fp32 scalars are those of the gate and, if the activation is gated, of `up`.
    """
    from pallas_kernels.remake_triton import GATE, UP

    kinds = (GATE, UP)[: len(bounds)]
    with jax.named_scope("sample"):
        sample = on.peaks(operation, kinds, operands, every=scaling.EVERY)
    loose = [(peak == 0) | scaling.is_loose(bound, peak, fmt) for bound, peak in zip(bounds, sample, strict=True)]
    with jax.named_scope("mend"):
        return tuple(on.peaks(operation, kinds, operands, wanted=functools.reduce(jnp.logical_or, loose)))


def _largest(residual: QTensor) -> Array:
    """An upper bound of the magnitudes in each row, fp32 (rows,), from the scales."""
    scale = fused.matrix(residual.scale).astype(jnp.float32)
    return jnp.max(scale, -1, initial=0.0) * formats.get(residual.spec.format).max


def activate(
    name: str,
    gate: Array,
    up: Array | None,
    recipe: Recipe | Context | str,
    *,
    biased: bool = False,
) -> tuple[Array, Origin]:
    """The result of an activation, `glu` where there is an `up`, and what it is made from.

    `biased` says that linear layers with a bias have made an input: the pass that quantizes its gradient then gives
    that of the bias, too.
    """
    context, function, reader = context_part(recipe), _function(name), fused.reader(recipe)
    spare, operation, written = context.lean or context.spec is None or up is None, None, fused.written(recipe)
    if context.spec is not None or fused.at_once(recipe):
        operation = _fused(name, gate, up, context.spec, not spare, forward=True, fp8=not written)
    if context.spec is None and operation is None:
        y = function(gate) if up is None else function(gate) * up
        return derivatives.passed("an activation", y, gate, up), NOTHING
    g, u = lax.stop_gradient(gate), None if up is None else lax.stop_gradient(up)
    to = None if reader is None else reader.spec("x")
    part = scale = codes = None
    # XLA would make an approximate GELU part of the FP8 product before, and fail where others read that, too.
    plain = lax.optimization_barrier(g)
    activated = function(plain)
    y = activated if u is None else activated * u
    if operation is None:
        assert context.spec is not None
        kept = plain, u, None if spare else activated
        saved = ActivationSaved(*(None if x is None else keep(x, context.spec) for x in kept))  # type: ignore[arg-type]
        if to is not None and not to.folds:
            matrix = fused.matrix(y)
            scale = _bound(to, scaling.largest_of_sample(matrix), scaling.largest_magnitude(matrix))
    elif written:
        assert context.spec is not None
        saved, y = _keep_and_write(operation, g, u, context.spec)
    else:
        saved, result, scale, codes = _keep(operation, g, u, context.spec, to)
        (part,) = result.parts
    inputs = (gate,) if up is None else (gate, up)
    saved = saved if context.spec is None else named(saved, ACTIVATION)
    how = Activation(name, gate.dtype, context.lean and context.scales == "bound", written, biased)
    y, _ = differentiable(how, inputs, saved, y, name="an activation")
    origin = fused.origin(context, how, saved, part, reader, scale, codes)
    y = derivatives.passed("an activation", y, *inputs)
    return y, origin


def _bound(to: QuantSpec, sample: Array, largest: Array | float = 0.0) -> Array:
    """The scale of a result from the largest magnitudes of a sample of it, and of all of it if that is known."""
    return scaling.to_scale(jnp.maximum(scaling.beyond_sample(sample), largest), formats.get(to.format))


def _fused(
    name: str,
    like: Array,
    up: Any,
    spec: QuantSpec | None,
    activated: bool,
    *,
    forward: bool = False,
    fp8: bool = True,
) -> Any:
    how: Any = {"activation": name, "gated": up is not None, "activated": activated}
    return fused.operation(like, spec, like.dtype, forward=forward, fp8=fp8, **how)


def _keep_and_write(operation: Any, gate: Array, up: Array | None, spec: QuantSpec) -> tuple[ActivationSaved, Array]:
    """What is kept, and the result."""
    coding, dtype = fused.coding(spec), gate.dtype
    g, u = fused.matrix(gate), None if up is None else fused.matrix(up)
    parts, _, y = fused.run(
        lambda on, *arrays: on.keep_activation(operation, *arrays, coding, result=(None, dtype)), g, u
    )
    return _saved(parts, gate, spec), fused.array(y, gate)


def _saved(parts: Any, like: Array, spec: QuantSpec) -> ActivationSaved:
    codes: Any = [None if part is None else fused.residual(part[0], part[1], like, spec) for part in parts]
    return ActivationSaved(*codes)


def _keep(
    operation: Any, gate: Array, up: Array | None, spec: QuantSpec | None, to: QuantSpec | None
) -> tuple[ActivationSaved, fused.Computation, Array | None, Any]:
    """What is kept, what the result is computed from, and if it is known how to quantize it, its scale and codes.

    Codes of rows have their scales beside them.
    """
    from pallas_kernels import remake_triton

    coding, g, u = fused.coding(spec), fused.matrix(gate), None if up is None else fused.matrix(up)
    exact, kinds = operation._replace(exact=True), (remake_triton.RESULT,)

    def both(on: Any, *arrays: Any) -> Any:
        keep = functools.partial(on.keep_activation, operation, *arrays, coding)
        if to is None or to.folds:
            parts, peak, codes = keep(result=None if to is None else (None, formats.get(to.format).dtype))
            return parts, peak, None, codes
        operands = remake_triton.Operands(arrays[0], up=arrays[1])
        with jax.named_scope("sample"):
            (sample,) = on.peaks(exact, kinds, operands, every=scaling.EVERY)
        parts, peak, codes = keep(result=(_bound(to, sample), formats.get(to.format).dtype))
        scale = _bound(to, sample, peak)
        with jax.named_scope("mend"):
            codes = on.mend(exact, kinds, operands, codes, scale, peak > scaling.beyond_sample(sample))
        return parts, peak, scale, codes

    # Of what is kept as it is, and is not coded by rows, the layers that read the result find the scale.
    nothing = spec is None and (to is None or not to.folds)
    parts, peak, scale, codes = ((), None, None, None) if nothing else fused.run(both, g, u)
    saved = ActivationSaved(gate, up, None) if spec is None else _saved(parts, gate, spec)
    result = fused.Computation(exact, kinds, remake_triton.Operands(g, up=u), () if peak is None else (peak,))
    return saved, result, scale, codes


def _function(name: str) -> Callable[[Array], Array]:
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; it is one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
