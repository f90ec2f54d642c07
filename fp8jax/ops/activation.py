"""Gated and plain activations that keep their inputs in 8 bits for the backward pass (COAT, section 5.2)."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import formats, scaling
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import Context, Recipe
from fp8jax.core.spec import QuantSpec
from fp8jax.ops import fused, fused_rows
from fp8jax.ops.fused_reference import ACTIVATIONS, activation_cotangents
from fp8jax.ops.saveable import ACTIVATION, named
from fp8jax.ops.saved import Gradient, decode, differentiable, keep
from fp8jax.recipes import context_part


def glu(gate: Array, up: Array, *, recipe: Recipe | Context | str, activation: str = "silu") -> Array:
    """activation(gate) * up (Shazeer, 2020).

    Forward it is what JAX computes; the backward pass reads the codes of `gate` and `up`, in a faithful context also
    those of the activated gate.

    Args:
        gate: (..., channels), any floating dtype.
        up: the same shape and dtype.
        recipe: a `Recipe`, its part `Context`, or a name; where it keeps inputs as they are, JAX differentiates.
        activation: "silu", "gelu" (exact) or "gelu_tanh".

    Returns:
        (..., channels) in the dtype of `gate`.

    Raises:
        ValueError: unknown activation, or the shapes or dtypes differ.
    """
    if (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise ValueError(f"glu takes arrays alike, not {gate.dtype}{gate.shape} and {up.dtype}{up.shape}")
    context, f = context_part(recipe), _function(activation)
    if context.spec is None:
        return f(gate) * up
    return _activation(activation, gate, up, context, fused.bounded(recipe), fused_rows.of_layers(recipe))


def activation(x: Array, *, recipe: Recipe | Context | str, activation: str) -> Array:
    """activation(x), of which the backward pass reads the codes of `x`.

    Args:
        x: (..., channels), any floating dtype.
        recipe: a `Recipe`, its part `Context`, or a name; where it keeps inputs as they are, JAX differentiates.
        activation: "silu", "gelu" (exact) or "gelu_tanh".

    Returns:
        (..., channels) in the dtype of `x`.

    Raises:
        ValueError: unknown activation.
    """
    context, f = context_part(recipe), _function(activation)
    if context.spec is None:
        return f(x)
    return _activation(activation, x, None, context, fused.bounded(recipe), fused_rows.of_layers(recipe))


# The derivative of GELU is at most 1.129, that of SiLU 1.100; neither is larger than its argument.
SLOPE = 1.13


class Kept(NamedTuple):
    """What an activation keeps: the codes of its gate or only input, of `up`, and of the activated gate."""

    gate: QTensor
    up: QTensor | None
    activated: QTensor | None


@dataclasses.dataclass(frozen=True)
class Activation:
    """How an activation goes back: `fp8jax.ops.saved.Remade`; `bounded`, scales of its cotangents come from bounds."""

    activation: str
    dtype: DTypeLike
    bounded: bool = False

    def again(self, kept: Kept, gradient: Gradient) -> Array:
        activated = ACTIVATIONS[self.activation](decode(kept.gate))
        y = (activated if kept.up is None else activated * decode(kept.up)).astype(self.dtype)
        known = self._foreseen(kept, gradient)
        fused.foresee(gradient.array, known)
        dy = gradient.array if (gradient.array.shape, gradient.array.dtype) == (y.shape, y.dtype) else None
        found = self._operands(kept, y, dy)
        if found is not None:
            from pallas_kernels.remake_triton import RESULT

            operation, operands = found
            ahead = None if dy is None else (dy, known)
            fused.note(fused.Result(operation, (RESULT,), operands, ahead=ahead), y)
        return y

    def backward(
        self, kept: Kept, dy: Array, dtypes: tuple[DTypeLike | None, ...], others: Array | None
    ) -> tuple[Array, ...]:
        up, activated = (None if q is None else decode(q) for q in kept[1:])
        cotangents = activation_cotangents(ACTIVATIONS[self.activation], decode(kept.gate), up, activated, dy)
        cast = tuple(ct.astype(dtype) for ct, dtype in zip(cotangents, dtypes, strict=True))
        if all(dtype == self.dtype for dtype in dtypes):
            known, found = fused.foreseen(dy), self._operands(kept, cast[0], dy)
            for cotangent, scale in zip(cast, known.scales, strict=False):
                assert known.spec is not None
                fused.give_scale(cotangent, known.spec, scale)
            if found is not None:
                from pallas_kernels.remake_triton import GATE, UP

                operation, operands = found
                kinds = (GATE, UP)[: len(cast)]
                fused.note(fused.Result(operation, kinds, operands, known.peaks, made=known.made), *cast)
        return cast

    def _foreseen(self, kept: Kept, gradient: Gradient) -> fused.Foreseen:
        """Scales of the cotangents of gate and up from bounds on them, if these are wanted."""
        spec, plain = gradient.spec, kept.gate.spec.granularity in ("tensor", "token", "group")
        if not self.bounded or spec is None or spec.format != "e5m2" or not fused.takes(spec):
            return fused.Foreseen()
        if not plain or gradient.array.shape != kept.gate.shape:
            return fused.Foreseen()
        slopes = [jnp.asarray(SLOPE)]
        if kept.up is not None:
            slopes = [SLOPE * _largest(kept.up), _largest(kept.gate)]
        rows, fmt = gradient.rows(), formats.get(spec.format)
        largest = (scaling.largest_magnitude(rows * slope) for slope in slopes)
        return fused.Foreseen(spec=spec, scales=tuple(scaling.to_scale(bound, fmt) for bound in largest))

    def _operands(self, kept: Kept, like: Array, dy: Array | None) -> tuple[Any, Any] | None:
        """How the kernels compute the result, or with its gradient those of the inputs, alike to an array.

        None for XLA.
        """
        operation = _fused(self.activation, like, kept.up, kept.gate.spec, kept.activated is not None)
        if operation is None:
            return None
        from pallas_kernels import remake_triton

        names = [name for name in ("first", "up", "activated") for name in (name, f"{name}_scale")]
        parts = [part for q in kept for part in ((None, None) if q is None else fused.stored(q))]
        given: Any = dict(zip(names, parts, strict=True))
        return operation, remake_triton.Operands(**given, gradient=None if dy is None else fused.matrix(dy))


def _largest(kept: QTensor) -> Array:
    """An upper bound of the magnitudes in each row, fp32 (rows,), from the scales."""
    scale = fused.matrix(kept.scale).astype(jnp.float32)
    return jnp.max(scale, -1, initial=0.0) * formats.get(kept.spec.format).max


def _activation(
    name: str, gate: Array, up: Array | None, context: Context, to: QuantSpec | None, by_rows: QuantSpec | None
) -> Array:
    """`to` is how the result will be quantized, if this is to give the scale; `by_rows`, if its rows give theirs."""
    assert context.spec is not None
    g, u = lax.stop_gradient(gate), None if up is None else lax.stop_gradient(up)
    spare = context.lean or u is None
    operation = _fused(name, gate, up, context.spec, not spare, forward=True)
    result, scale, made = None, None, None
    # XLA would make an approximate GELU part of the FP8 product before, and fail where others read that, too.
    plain = lax.optimization_barrier(g)
    activated = ACTIVATIONS[name](plain)
    y = activated if u is None else activated * u
    if operation is None:
        kept = Kept(
            keep(plain, context.spec),
            None if u is None else keep(u, context.spec),
            None if spare else keep(activated, context.spec),
        )
        if to is not None:
            matrix = fused.matrix(y)
            scale = _bound(to, scaling.largest_of_sample(matrix), scaling.largest_magnitude(matrix))
    else:
        kept, result, scale, made = _keep(operation, g, u, context.spec, to, by_rows)
    inputs = (gate,) if up is None else (gate, up)
    bounded = context.lean and context.scales == "bound"
    kept = named(kept, ACTIVATION)
    y, _ = differentiable(Activation(name, gate.dtype, bounded), inputs, kept, y, context)
    if result is not None:
        fused.note(result, y)
    if by_rows is not None and scale is not None and made is not None:
        fused_rows.give(y, by_rows, made, scale)
    elif to is not None and scale is not None:
        fused.give_scale(y, to, scale, made)
    return y


def _bound(to: QuantSpec, sample: Array, largest: Array | float = 0.0) -> Array:
    """The scale of a result from the largest magnitudes of a sample of it, and of all of it if that is known."""
    return scaling.to_scale(jnp.maximum(scaling.beyond_sample(sample), largest), formats.get(to.format))


def _fused(name: str, like: Array, up: Any, spec: QuantSpec, activated: bool, *, forward: bool = False) -> Any:
    how: Any = {"activation": list(ACTIVATIONS).index(name), "gated": up is not None, "activated": activated}
    return fused.operation(like, spec, like.dtype, forward=forward, **how)


def _keep(
    operation: Any, gate: Array, up: Array | None, spec: QuantSpec, to: QuantSpec | None, by_rows: QuantSpec | None
) -> tuple[Kept, fused.Result, Array | None, Array | None]:
    """What is kept, what the result is computed from, and if it is known how to quantize it, its scale and codes."""
    from pallas_kernels import remake_triton

    coding, g, u = fused.coding(spec), fused.matrix(gate), None if up is None else fused.matrix(up)
    exact, kinds = operation._replace(exact=True), (remake_triton.RESULT,)

    def both(on: Any, *arrays: Any) -> Any:
        if by_rows is not None:
            parts, codes, scale = on.keep_activation_rows(operation, *arrays, coding, formats.get(by_rows.format).dtype)
            return parts, None, scale, codes
        if to is None:
            parts, peak, _ = on.keep_activation(operation, *arrays, coding)
            return parts, peak, None, None
        with jax.named_scope("sample"):
            (sample,) = on.peaks(exact, kinds, remake_triton.Operands(arrays[0], up=arrays[1]), every=scaling.EVERY)
        first = _bound(to, sample), formats.get(to.format).dtype
        parts, peak, codes = on.keep_activation(operation, *arrays, coding, result=first)
        scale = _bound(to, sample, peak)
        with jax.named_scope("mend"):
            codes = on.mend(exact, *arrays, codes, scale, peak > scaling.beyond_sample(sample))
        return parts, peak, scale, codes

    parts, peak, scale, made = fused.run(both, g, u)
    codes: Any = [None if part is None else fused.kept(part[0], part[1], gate.shape, spec) for part in parts]
    result = fused.Result(exact, kinds, remake_triton.Operands(g, up=u), () if peak is None else (peak,))
    return Kept(*codes), result, scale, made


def _function(name: str) -> Callable[[Array], Array]:
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; it is one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
