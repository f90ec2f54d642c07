"""Gated and plain activations that keep their inputs in 8 bits for the backward pass (COAT, section 5.2)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import Context, Recipe
from fp8jax.ops.saved import context_part, decode, differentiable, keep

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


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
    context, f = context_part(recipe), _activation(activation)
    if context.spec is None:
        return f(gate) * up
    g, u = lax.stop_gradient(gate), lax.stop_gradient(up)
    activated = f(g)
    kept = Kept(keep(g, context.spec), keep(u, context.spec), None if context.lean else keep(activated, context.spec))
    return differentiable(Activation(activation, gate.dtype), (gate, up), kept, activated * u, context)


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
    context, f = context_part(recipe), _activation(activation)
    if context.spec is None:
        return f(x)
    value = lax.stop_gradient(x)
    kept = Kept(keep(value, context.spec), None, None)
    return differentiable(Activation(activation, x.dtype), (x,), kept, f(value), context)


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
        return (activated if kept.up is None else activated * decode(kept.up)).astype(self.dtype)

    def backward(self, kept: Kept, dy: Array) -> tuple[Array, ...]:
        activated, pull = jax.vjp(ACTIVATIONS[self.activation], decode(kept.gate))
        if kept.up is None:
            return pull(dy)
        if kept.activated is not None:
            activated = decode(kept.activated)
        return *pull(dy * decode(kept.up)), dy * activated


def _activation(name: str) -> Callable[[Array], Array]:
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; it is one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
