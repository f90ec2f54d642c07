"""Products of groups of tokens with a matrix each, as experts have them, whose three products follow a recipe."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from fp8jax.core import derivatives
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import Linear, Recipe
from fp8jax.core.scaling import Scaling
from fp8jax.core.spec import TRANSPOSABLE, QuantSpec
from fp8jax.ops.choice import vary_alike
from fp8jax.ops.inputs import gradient_key
from fp8jax.ops.linear import stateless
from fp8jax.ops.operand import Side, encode, input_side, weight_side
from fp8jax.ops.saveable import BESIDE, INPUT, PRODUCT, named
from fp8jax.ops.saved import BLANK, ITSELF, Gradient, Known, Remade, from_bytes, key_for, to_bytes
from fp8jax.ops.segments import Segments, column_values, row_codes
from fp8jax.ops.sharding import Kind, rows_of


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

    Operands are quantized as the recipe says, and the codes of `x` are what is saved. Each group has scales of its own:
    a scale of a tensor becomes one of each group, a scale of a channel one of each group's channel, and blocks along
    tokens start at each group's first token. Tokens in no group enter no scale. Saved codes have scales of each token:
    granularity "tensor" is saved as "token", and "block" as "group".
    The products are XLA's, of the values of the codes in the dtype of `x`: this saves memory, no time.

    Args:
        x: (tokens, inputs), any floating dtype, the tokens of each group one after another.
        w: (groups, inputs, outputs).
        group_sizes: (groups,), integers of any dtype, at least 0. Tokens beyond their sum are in no group: they may
            hold anything, NaN and Inf too, and so may their cotangents. Their results and gradients are 0.
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
    source, noise = _source(x, group_sizes, part, key, known), gradient_key(part, key)
    value, w = vary_alike(x, w)  # type: ignore[assignment]
    name = derivatives.named(f"ragged_dot of {x.shape} and {w.shape}")
    token = derivatives.token(name, value, w)
    y: Array = _ragged(part, name, value, w, source, group_sizes, noise, token)
    return derivatives.passed("ragged_dot", y, x, w)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["saved"], meta_fields=["operation"])
@dataclasses.dataclass(frozen=True)
class _Recomputed:
    """An input that the operation before computes again from what that saved."""

    operation: Remade
    saved: Any


class _Source(NamedTuple):
    """The input besides its values: codes as bytes if the recipe saves some, and what the backward pass reads."""

    codes: QTensor | None
    residual: QTensor | Array | _Recomputed


class _Saved(NamedTuple):
    """What a product saves: what its input's source says, the matrices, the groups, a key for gradients, a token."""

    x: QTensor | Array | _Recomputed
    w: Array
    group_sizes: Array
    key: Array | None
    kind: Kind
    token: Array | None


def _source(x: Array, group_sizes: Array, recipe: Linear, key: Array | None, known: Known) -> _Source:
    # Scales and codes of the whole array are not used: rows in no group may have entered them.
    side, again, saved = input_side(recipe), known.origin.again, recipe.spec("saved")
    if saved is None:
        values = known.share((None, side.strategy, x.shape), lambda: lax.stop_gradient(x), None, None)
        return _Source(None, values if again is None else _recomputed(again, x))
    subkey = key_for(key, saved, "saved")

    def make() -> QTensor:
        segments = Segments(x.shape[0], group_sizes)
        q = named(to_bytes(row_codes(lax.stop_gradient(x), saved, side.strategy, segments, subkey)), INPUT)
        return q if again is None else dataclasses.replace(q, scale=named(q.scale, BESIDE))

    use = "groups of rows", saved, side.strategy, x.shape
    codes: QTensor = known.share(use, make, group_sizes, None if subkey is None else key)
    if again is None or saved.rounding == "stochastic":  # the codes depend on the key
        return _Source(codes, codes)
    return _Source(codes, _recomputed(again, x))


def _recomputed(again: tuple[Remade, Any], x: Array) -> _Recomputed:
    operation, saved = again
    return _Recomputed(operation, lax.stop_gradient(x) if operation == ITSELF else saved)


def _rounded(
    x: Array,
    spec: QuantSpec | None,
    strategy: Scaling,
    segments: Segments,
    dtype: Any,
    key: Array | None = None,
    *,
    columns: bool = False,
) -> Array:
    """The values of codes of `x`, contracted along its rows if `columns`; of no spec its own."""
    if spec is None:
        return segments.masked(x).astype(dtype)
    if columns:
        return column_values(x, spec, strategy, segments, dtype, key)
    return row_codes(x, spec, strategy, segments, key).dequantize(dtype)


def _values(operand: Any, dtype: Any) -> Array:
    return operand.dequantize(dtype) if isinstance(operand, QTensor) else operand.astype(dtype)


def _matrices(w: Array, spec: QuantSpec | None, side: Side, dtype: Any, *, transposed: bool) -> Array:
    """The matrices of all groups as a product reads them, (groups, inputs, outputs)."""

    def one(w: Array) -> Array:
        values = _values(encode(w, spec, side.strategy, transposed=transposed), dtype)
        return values.T if transposed else values

    return jax.vmap(one)(w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ragged(recipe: Linear, name: str, *operands: Any) -> Array:
    return _forward(recipe, name, *operands)[0]


def _forward(
    recipe: Linear,
    name: str,
    x: Array,
    w: Array,
    source: _Source,
    group_sizes: Array,
    key: Array | None,
    token: Array | None,
) -> tuple[Array, _Saved]:
    side, weights = input_side(recipe), weight_side(recipe)
    plain = not recipe.quantized and recipe.spec("saved") is None
    if plain:
        token = None  # forward mode has met it; a product in 16 bits may be differentiated twice
    a, b = (x, w) if token is None else lax.stop_gradient((x, w))
    segments = Segments(x.shape[0], group_sizes)
    if source.codes is not None and side.saved == side.forward:
        rows = from_bytes(source.codes).dequantize(x.dtype)
    else:
        rows = _rounded(a, side.forward, side.strategy, segments, x.dtype)
    matrices = _matrices(b, weights.forward, weights, x.dtype, transposed=True)
    y = lax.ragged_dot(rows, matrices, segments.sizes)
    y = checkpoint_name(y.astype(x.dtype), PRODUCT)
    if token is not None:
        y = derivatives.once(name, y, token)
    residual = x if plain else source.residual
    return y, _Saved(residual, w, group_sizes, key, Kind.of(x), token)


def _backward(recipe: Linear, name: str, saved: _Saved, dy: Array) -> tuple[Any, ...]:
    if saved.token is None:
        return _gradients(recipe, saved, dy)
    return derivatives.once(name, _gradients(recipe, *lax.stop_gradient((saved, dy))), (dy, saved.token))


def _gradients(recipe: Linear, saved: _Saved, dy: Array) -> tuple[Any, ...]:
    weights, dtype, strategy = weight_side(recipe), saved.kind.dtype, recipe.own_strategy("dy")
    segments = Segments(dy.shape[0], saved.group_sizes)
    keys = (None, None) if saved.key is None else jax.random.split(saved.key)
    rows = _rounded(dy, recipe.spec("dy"), strategy, segments, dtype, keys[0])
    columns = _rounded(dy, recipe.spec("dy_wgrad"), strategy, segments, dtype, keys[1], columns=True)

    def product(x: Array, w: Array) -> Array:
        return lax.ragged_dot(x, w, segments.sizes)

    matrices = _matrices(saved.w, weights.backward, weights, dtype, transposed=False)
    like = jax.ShapeDtypeStruct((dy.shape[0], matrices.shape[1]), dtype)
    (dx,) = jax.linear_transpose(lambda x: product(x, matrices), like)(rows)
    inputs = _inputs(recipe, saved.x, segments, dx)
    (dw,) = jax.linear_transpose(lambda w: product(inputs, w), jax.ShapeDtypeStruct(saved.w.shape, dtype))(columns)
    return dx, dw.astype(saved.w.dtype), None, None, None, None


def _inputs(recipe: Linear, residual: QTensor | Array | _Recomputed, segments: Segments, dx: Array) -> Array:
    """The values of the input in the product for the weight's gradient, in the shape and dtype of `dx`."""
    side = input_side(recipe)
    if isinstance(residual, QTensor):
        codes = from_bytes(residual)
        if side.backward is None or (side.backward == side.saved and side.backward.granularity in TRANSPOSABLE):
            return codes.dequantize(dx.dtype)
        # Behind a barrier: XLA would decode the codes once for the forward product, too, and keep that in fp32.
        x = from_bytes(lax.optimization_barrier(residual)).dequantize()
    elif isinstance(residual, _Recomputed):
        bound = functools.partial(jnp.full, (dx.shape[0],), jnp.inf)  # nothing is known of the gradient's rows
        x = residual.operation.again(residual.saved, Gradient(dx, None, bound)).array.astype(dx.dtype)
        x = rows_of(x, *dx.shape)
    else:
        x = residual
    return _rounded(x, side.backward, side.strategy, segments, dx.dtype, columns=True)


_ragged.defvjp(_forward, _backward)
