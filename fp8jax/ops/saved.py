"""What operations keep for the backward pass: codes as bytes, and results that are computed again from what is kept.

FP8 arrays may not enter a differentiated function, because a cotangent takes the dtype of its primal: codes travel as
bytes, which have none. An operation here computes its result and what it keeps outside of the differentiated function,
from values alone, so that one function per operation makes both and a fused kernel can take its place.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import formats
from fp8jax.core.qtensor import QTensor, quantize
from fp8jax.core.recipe import Context, Recipe
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.choice import vary_alike
from fp8jax.ops.recent import Origins


def to_bytes(q: QTensor) -> QTensor:
    """A quantized tensor as values without gradients, its codes as bytes."""
    q = jax.tree.map(lax.stop_gradient, q)
    return dataclasses.replace(q, codes=_cast_bytes(q.codes, jnp.uint8))


def from_bytes(saved: QTensor) -> QTensor:
    """The quantized tensor that `to_bytes` was given."""
    dtype = jnp.uint8 if saved.spec.packed else formats.get(saved.spec.format).dtype
    return dataclasses.replace(saved, codes=_cast_bytes(saved.codes, dtype))


def _cast_bytes(codes: Array, dtype: DTypeLike) -> Array:
    """Codes of one byte as another type of one byte; wider ones as they are."""
    return lax.bitcast_convert_type(codes, dtype) if codes.dtype.itemsize == 1 else codes


def keep(x: Array, spec: QuantSpec) -> QTensor:
    """The values of an array as codes in bytes, with scales along its last axis."""
    return to_bytes(quantize(lax.stop_gradient(x), spec))


def decode(saved: QTensor) -> Array:
    """The fp32 values of what `keep` returned."""
    return from_bytes(saved).dequantize()


class Remade(Protocol):
    """How an operation goes back from what it kept; hashable, static under `jax.jit`."""

    def again(self, kept: Any) -> Array:
        """The operation's result, computed again."""
        ...

    def backward(self, kept: Any, dy: Array, dtypes: tuple[DTypeLike | None, ...]) -> tuple[Array | None, ...]:
        """Cotangents of the operation's differentiable inputs, in their dtypes, from that of its result."""
        ...


@dataclasses.dataclass(frozen=True)
class Itself:
    """How to go back to an array that is kept in any case: flash attention keeps its output (COAT, section D)."""

    def again(self, kept: Array) -> Array:
        return kept

    def backward(self, kept: Array, dy: Array, dtypes: tuple[DTypeLike | None, ...]) -> tuple[Array | None, ...]:
        raise TypeError("an array that is kept is no operation")


ITSELF = Itself()

# An array that is noted as ITSELF is given there as None: an entry must not keep its own array alive.
origins: Origins[tuple[Remade, Any]] = Origins()


def differentiable(how: Remade, inputs: tuple[Array | None, ...], kept: Any, y: Array, context: Context) -> Array:
    """The result `y` of an operation on `inputs`, whose backward pass reads nothing but `kept`.

    Under a lean context `y` is known by what was kept: linear layers that read it keep no codes of it.

    Args:
        how: what goes back.
        inputs: what gradients flow to; None where there is none.
        kept: arrays without gradients.
        y: the result, computed from the values of the inputs.
        context: says whether linear layers may compute `y` again.
    """
    y, *inputs = vary_alike(lax.stop_gradient(y), *inputs)  # type: ignore[assignment]
    y = _differentiable(how, tuple(inputs), kept, y)
    if context.lean:
        origins.note(y, (how, kept))
    return y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(how: Remade, inputs: tuple[Array | None, ...], kept: Any, y: Array) -> Array:
    return y


def _forward(how: Remade, inputs: tuple[Array | None, ...], kept: Any, y: Array) -> tuple[Array, Any]:
    # Of the inputs only the dtypes are needed.
    return y, (kept, jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), inputs))


def _backward(how: Remade, residuals: Any, dy: Array) -> tuple[Any, None, None]:
    kept, inputs = residuals
    return how.backward(kept, dy, tuple(None if x is None else x.dtype for x in inputs)), None, None


_differentiable.defvjp(_forward, _backward)


def context_part(recipe: Recipe | Context) -> Context:
    """The part of a recipe that non-linear operations follow."""
    return recipe.context if isinstance(recipe, Recipe) else recipe
