"""Gated and plain activations that keep their inputs in 8 bits for the backward pass (COAT, section 5.2)."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import Context, Recipe
from fp8jax.core.spec import QuantSpec
from fp8jax.ops import fused
from fp8jax.ops.fused_reference import ACTIVATIONS, activation_cotangents
from fp8jax.ops.saved import context_part, decode, differentiable, keep


def glu(gate: Array, up: Array, *, recipe: Recipe | Context, activation: str = "silu") -> Array:
    """activation(gate) * up (Shazeer, 2020).

    Forward it is what JAX computes; the backward pass reads the codes of `gate` and `up`, in a faithful context also
    those of the activated gate.

    Args:
        gate: (..., channels), any floating dtype.
        up: the same shape and dtype.
        recipe: a `Recipe`, or its part `Context`; where it keeps inputs as they are, JAX differentiates.
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
    return _activation(activation, gate, up, context)


def activation(x: Array, *, recipe: Recipe | Context, activation: str) -> Array:
    """activation(x), of which the backward pass reads the codes of `x`.

    Args:
        x: (..., channels), any floating dtype.
        recipe: a `Recipe`, or its part `Context`; where it keeps inputs as they are, JAX differentiates.
        activation: "silu", "gelu" (exact) or "gelu_tanh".

    Returns:
        (..., channels) in the dtype of `x`.

    Raises:
        ValueError: unknown activation.
    """
    context, f = context_part(recipe), _function(activation)
    return f(x) if context.spec is None else _activation(activation, x, None, context)


class Kept(NamedTuple):
    """What an activation keeps: the codes of its gate or only input, of `up`, and of the activated gate."""

    gate: QTensor
    up: QTensor | None
    activated: QTensor | None


@dataclasses.dataclass(frozen=True)
class Activation:
    """How an activation goes back: `fp8jax.ops.saved.Remade`."""

    activation: str
    dtype: DTypeLike

    def again(self, kept: Kept) -> Array:
        activated = ACTIVATIONS[self.activation](decode(kept.gate))
        y = (activated if kept.up is None else activated * decode(kept.up)).astype(self.dtype)
        self._note(kept, None, y)
        return y

    def backward(self, kept: Kept, dy: Array, dtypes: tuple[DTypeLike | None, ...]) -> tuple[Array, ...]:
        up, activated = (None if q is None else decode(q) for q in kept[1:])
        cotangents = activation_cotangents(ACTIVATIONS[self.activation], decode(kept.gate), up, activated, dy)
        cast = tuple(ct.astype(dtype) for ct, dtype in zip(cotangents, dtypes, strict=True))
        if all(dtype == self.dtype for dtype in dtypes):
            self._note(kept, dy, *cast)
        return cast

    def _note(self, kept: Kept, dy: Array | None, *arrays: Array) -> None:
        """Says what the result, or with its cotangent those of the inputs, are computed from."""
        operation = _fused(self.activation, arrays[0], kept.up, kept.gate.spec, kept.activated is not None)
        if operation is None:
            return
        from pallas_kernels import remake_triton

        kinds = (remake_triton.RESULT,) if dy is None else (remake_triton.GATE, remake_triton.UP)[: len(arrays)]
        names = [name for name in ("first", "up", "activated") for name in (name, f"{name}_scale")]
        parts = [part for q in kept for part in ((None, None) if q is None else fused.stored(q))]
        given: Any = dict(zip(names, parts, strict=True))
        operands = remake_triton.Operands(**given, gradient=None if dy is None else fused.matrix(dy))
        fused.note(fused.Result(operation, kinds, operands), *arrays)


def _activation(name: str, gate: Array, up: Array | None, context: Context) -> Array:
    assert context.spec is not None
    g, u = lax.stop_gradient(gate), None if up is None else lax.stop_gradient(up)
    activated = ACTIVATIONS[name](g)
    y = activated if u is None else activated * u
    spare = context.lean or u is None
    operation, result = _fused(name, gate, up, context.spec, not spare, forward=True), None
    if operation is None:
        kept = Kept(
            keep(g, context.spec),
            None if u is None else keep(u, context.spec),
            None if spare else keep(activated, context.spec),
        )
    else:
        kept, result = _keep(operation, g, u, context.spec)
    inputs = (gate,) if up is None else (gate, up)
    y = differentiable(Activation(name, gate.dtype), inputs, kept, y, context)
    if result is not None:
        fused.note(result, y)
    return y


def _fused(name: str, like: Array, up: Any, spec: QuantSpec, activated: bool, *, forward: bool = False) -> Any:
    how: Any = {"activation": list(ACTIVATIONS).index(name), "gated": up is not None, "activated": activated}
    return fused.operation(like, spec, like.dtype, forward=forward, **how)


def _keep(operation: Any, gate: Array, up: Array | None, spec: QuantSpec) -> tuple[Kept, fused.Result]:
    """What is kept, and what the result is computed from."""
    from pallas_kernels import remake_triton

    coding, g, u = fused.coding(spec), fused.matrix(gate), None if up is None else fused.matrix(up)
    parts, peak = fused.run(lambda on, *arrays: on.keep_activation(operation, *arrays, coding), g, u)
    codes: Any = [None if part is None else fused.kept(part[0], part[1], gate.shape, spec) for part in parts]
    kept = Kept(*codes)
    operands = remake_triton.Operands(g, up=u)
    return kept, fused.Result(operation._replace(exact=True), (remake_triton.RESULT,), operands, peak)


def _function(name: str) -> Callable[[Array], Array]:
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; it is one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
