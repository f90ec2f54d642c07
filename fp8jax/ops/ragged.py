"""Products of groups of tokens with a matrix each, as experts have them, whose three products follow a recipe."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from fp8jax.core import derivatives
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import Linear, Recipe
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.choice import vary_alike
from fp8jax.ops.inputs import Input, gradient_key, input_source
from fp8jax.ops.linear import stateless
from fp8jax.ops.operand import Residual, Side, Source, encode, input_side, weight_side
from fp8jax.ops.saveable import PRODUCT
from fp8jax.ops.saved import BLANK, Gradient, Known
from fp8jax.ops.sharding import Kind


def ragged_dot(
    x: Array,
    w: Array,
    group_sizes: Array,
    *,
    recipe: Recipe | Linear | str,
    key: Array | None = None,
    known: Known = BLANK,
) -> Array:
    """`jax.lax.ragged_dot` with the products of a recipe, differentiable in `x` and `w`.

    Operands are quantized as the recipe says, each expert's matrix by itself, and the codes of `x` are what is saved.
    The products are XLA's, of the values of the codes in the dtype of `x`: this saves memory, no time.

    Args:
        x: (tokens, inputs), any floating dtype, the tokens of each group one after another.
        w: (groups, inputs, outputs).
        group_sizes: (groups,), integers; tokens beyond their sum are in no group, and their results are 0.
        recipe, key: as of `fp8jax.linear`. known: as of `fp8jax.dot_general`.

    Returns:
        (tokens, outputs) in the dtype of `x`.

    Raises:
        ValueError: shapes do not match, a key is missing, or the recipe's scaling observes operands.
        TypeError: `group_sizes` are no integers.
    """
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1] or group_sizes.shape != w.shape[:1]:
        shapes = f"{x.shape}, {w.shape} and {group_sizes.shape}"
        raise ValueError(f"ragged_dot takes (tokens, inputs), (groups, inputs, outputs) and (groups,), not {shapes}")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"ragged_dot takes group_sizes of integers, not {group_sizes.dtype}")
    part = stateless(recipe)
    of_x, noise = input_source(Input(x, known=known), part, key), gradient_key(part, key)
    value, w = vary_alike(x, w)  # type: ignore[assignment]
    name = derivatives.named(f"ragged_dot of {x.shape} and {w.shape}")
    token = derivatives.token(name, value, w)
    y: Array = _ragged(part, name, value, w, of_x, group_sizes, noise, token)
    return derivatives.passed("ragged_dot", y, x, w)


class _Saved(NamedTuple):
    """What a product saves: what its input's source says, the matrices, the groups, a key for gradients, a token."""

    x: Residual
    w: Array
    group_sizes: Array
    key: Array | None
    kind: Kind
    token: Array | None


def _values(operand: Any, dtype: Any) -> Array:
    return operand.dequantize(dtype) if isinstance(operand, QTensor) else operand.astype(dtype)


def _matrices(w: Array, spec: QuantSpec | None, side: Side, dtype: Any, *, transposed: bool) -> Array:
    """The matrices of all groups as a product reads them, (groups, inputs, outputs)."""

    def one(w: Array) -> Array:
        values = _values(encode(w, spec, side.strategy, transposed=transposed), dtype)
        return values.T if transposed else values

    return jax.vmap(one)(w)


def _sides(recipe: Linear) -> tuple[Side, Side]:
    # The scales of tokens of both operands of the weight's gradient are shared in kernels alone.
    return input_side(recipe)._replace(shared=False), weight_side(recipe)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ragged(recipe: Linear, name: str, *operands: Any) -> Array:
    return _forward(recipe, name, *operands)[0]


def _forward(
    recipe: Linear,
    name: str,
    x: Array,
    w: Array,
    of_x: Source,
    group_sizes: Array,
    key: Array | None,
    token: Array | None,
) -> tuple[Array, _Saved]:
    side, weights = _sides(recipe)
    if not recipe.quantized and recipe.spec("saved") is None:
        token = None  # forward mode has met it; a product in 16 bits may be differentiated twice
    a, b = (x, w) if token is None else lax.stop_gradient((x, w))
    rows = of_x.forward(a, side)
    matrices = _matrices(b, weights.forward, weights, x.dtype, transposed=True)
    y = lax.ragged_dot(_values(rows, x.dtype), matrices, group_sizes)
    y = checkpoint_name(y.astype(x.dtype), PRODUCT)
    if token is not None:
        y = derivatives.once(name, y, token)
    return y, _Saved(of_x.residual(x, rows, side), w, group_sizes, key, Kind.of(x), token)


def _backward(recipe: Linear, name: str, saved: _Saved, dy: Array) -> tuple[Any, ...]:
    if saved.token is None:
        return _gradients(recipe, saved, dy)
    return derivatives.once(name, _gradients(recipe, *lax.stop_gradient((saved, dy))), (dy, saved.token))


def _gradients(recipe: Linear, saved: _Saved, dy: Array) -> tuple[Any, ...]:
    (side, weights), dtype = _sides(recipe), saved.kind.dtype
    keys = (None, None) if saved.key is None else jax.random.split(saved.key)
    strategy = recipe.own_strategy("dy")
    rows = _values(encode(dy, recipe.spec("dy"), strategy, key=keys[0]), dtype)
    columns = _values(encode(dy, recipe.spec("dy_wgrad"), strategy, key=keys[1], transposed=True), dtype).T

    def product(x: Array, w: Array) -> Array:
        return lax.ragged_dot(x, w, saved.group_sizes)

    matrices = _matrices(saved.w, weights.backward, weights, dtype, transposed=False)
    like = jax.ShapeDtypeStruct((dy.shape[0], matrices.shape[1]), dtype)
    (dx,) = jax.linear_transpose(lambda x: product(x, matrices), like)(rows)
    bound = functools.partial(jnp.full, (dy.shape[0],), jnp.inf)  # nothing is known of its rows
    inputs = _values(saved.x.operand(side, Gradient(dx, None, bound)), dtype).T
    (dw,) = jax.linear_transpose(lambda w: product(inputs, w), jax.ShapeDtypeStruct(saved.w.shape, dtype))(columns)
    return dx, dw.astype(saved.w.dtype), None, None, None, None


_ragged.defvjp(_forward, _backward)
