"""Ragged products, of groups of tokens with a matrix each, as in mixtures of experts, under a recipe.

Group i has `group_sizes[i]` consecutive rows. Rows after the last group may hold anything, NaN too, and count as zeros.
Per-tensor scales are per group, and blocks along rows restart at each group's first row. No scale spans two groups.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from fp8jax.core import blocks, derivatives, encoding, formats, noise, scaling
from fp8jax.core.qtensor import QTensor, quantize_with_scale
from fp8jax.core.recipe import Linear, Recipe
from fp8jax.core.scaling import Scaling
from fp8jax.core.spec import TRANSPOSABLE, QuantSpec
from fp8jax.ops.autodiff.checkpointing import INPUT, PRODUCT, PRODUCT_AUX, with_checkpoint_name
from fp8jax.ops.autodiff.residuals import (
    ALREADY_SAVED,
    NO_INPUT_FACTS,
    CotangentFacts,
    InputFacts,
    Recomputable,
    derive_key,
    from_bytes,
    to_bytes,
)
from fp8jax.ops.dispatch.choice import match_varying_axes
from fp8jax.ops.dispatch.sharding import DtypeAndSharding, reshape_to_matrix
from fp8jax.ops.products.linear import require_stateless
from fp8jax.ops.products.operands import Side, encode, gradient_key, input_side, weight_side


class RowSets(NamedTuple):
    """Sets of rows that share a scale.

    Attributes:
        ids: int32 (rows,), the set of each row; `num_sets` for rows in no set.
        num_sets: static number of sets.
    """

    ids: Array
    num_sets: int

    def maxima(self, values: Array) -> Array:
        """Return at each row the maximum over its set of fp32 values >= 0, (rows, n)."""
        table = jnp.zeros((self.num_sets + 1, values.shape[1]), jnp.float32)
        return table.at[self.ids].max(values, indices_are_sorted=True)[self.ids]


class Segments:
    """The groups of a matrix's rows.

    Args:
        rows: number of rows.
        group_sizes: (groups,), integers of any dtype. Their sum is clipped to `rows`.
    """

    def __init__(self, rows: int, group_sizes: Array) -> None:
        # The sum may overflow a narrow dtype.
        ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), rows)
        self._starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
        self.sizes = ends - self._starts
        self._rows = jnp.arange(rows, dtype=jnp.int32)
        ids = jnp.sum(self._rows[:, None] >= ends, axis=1, dtype=jnp.int32)
        self.groups = RowSets(ids, group_sizes.shape[0])

    def mask(self, x: Array) -> Array:
        """Return x (rows, n) with zeros in rows outside of all groups."""
        return jnp.where((self.groups.ids < self.groups.num_sets)[:, None], x, 0)

    def blocks(self, size: int) -> RowSets:
        """Return blocks of `size` rows, counted from the first row of each group. A group's last block may be short."""
        per_group = -(-self.sizes // size)
        ids, count = self.groups.ids, self._rows.shape[0] // size + self.groups.num_sets

        def lookup_group(values: Array, fill_value: int) -> Array:
            return jnp.concatenate([values, jnp.full((1,), fill_value, jnp.int32)])[ids]

        first = jnp.cumsum(per_group) - per_group
        block_in_group = (self._rows - lookup_group(self._starts, 0)) // size
        block_ids = lookup_group(first, 0) + block_in_group
        return RowSets(jnp.where(ids < self.groups.num_sets, block_ids, count), count)


def row_codes(x: Array, spec: QuantSpec, strategy: Scaling, segments: Segments, key: Array | None = None) -> QTensor:
    """Quantize a matrix that a product contracts along its columns.

    Args:
        x: floating array (rows, n).
        spec: as for a matrix of one group. Expanded codes per tensor or block get scales and exponents per row instead.
        strategy: stateless scaling for per-tensor scales.
        segments: the groups of rows.
        key: PRNG key, used if the spec rounds stochastically.

    Returns:
        QTensor (rows, n) with scales per row: granularity "tensor" becomes "token", and "block" becomes "group".
    """
    x = segments.mask(x)
    spans_rows = spec.granularity in ("tensor", "block") or (spec.granularity == "mx" and spec.outer_scale == "tensor")
    if spec.expand or not spans_rows:
        row_granularity = {"tensor": "token", "block": "group"}.get(spec.granularity, spec.granularity)
        return encode(x, dataclasses.replace(spec, granularity=row_granularity), strategy, key=key)  # type: ignore[return-value]
    fmt, row_amax = formats.get(spec.format), jnp.max(_magnitudes(x), axis=1, keepdims=True, initial=0.0)
    if spec.granularity == "block":
        size = spec.group_size or 1
        block_amax = blocks.reduce(_magnitudes(x), (1, size), jnp.max, 0.0)
        return _quantize_with_scale(x, spec, size, scaling.to_scale(segments.blocks(size).maxima(block_amax), fmt), key)
    if spec.granularity == "tensor":
        return _quantize_with_scale(
            x, spec, None, scaling.to_scale(strategy.reduce_amax(segments.groups.maxima(row_amax)), fmt), key
        )
    outer_scale = scaling.to_scale(segments.groups.maxima(row_amax), fmt)
    if spec.is_folded:
        return _quantize_with_scale(x, spec, None, scaling.pow2_scale(row_amax, outer_scale, fmt), key)
    size = spec.group_size or 1
    block_amax = blocks.reduce(_magnitudes(x), (1, size), jnp.max, 0.0)
    return _quantize_with_scale(x, spec, size, _two_level_scale(block_amax, outer_scale, spec), key)


def column_values(
    x: Array, spec: QuantSpec, strategy: Scaling, segments: Segments, dtype: DTypeLike, key: Array | None = None
) -> Array:
    """Quantize and dequantize a matrix that a product contracts along its rows, within each group.

    Args:
        x: floating array (rows, n).
        spec: spec of the transposed matrix, without expansion. Its groups and tokens run along the rows of `x`.
        strategy, segments, key: as in `row_codes`.
        dtype: dtype of the result.

    Returns:
        (rows, n); zeros in rows outside of all groups.
    """
    if spec.granularity in ("tensor", "block"):
        return row_codes(x, spec, strategy, segments, key).dequantize(dtype)
    x, fmt = segments.mask(x), formats.get(spec.format)
    magnitudes, size = _magnitudes(x), spec.group_size or 1
    if spec.granularity == "group":
        return _quantize_with_scale(
            x, spec, 1, scaling.to_scale(segments.blocks(size).maxima(magnitudes), fmt), key
        ).dequantize(dtype)
    group_amax = segments.groups.maxima(magnitudes)
    outer_scale = scaling.to_scale(group_amax, fmt)
    if spec.granularity == "mx" and spec.outer_scale == "tensor":
        outer_scale = scaling.to_scale(jnp.max(group_amax, axis=1, keepdims=True, initial=0.0), fmt)
    if spec.granularity == "token" or (spec.is_folded and spec.outer_scale == "token"):
        scale = outer_scale
    elif spec.is_folded:
        scale = scaling.pow2_scale(group_amax, outer_scale, fmt)
    else:
        scale = _two_level_scale(segments.blocks(size).maxima(magnitudes), outer_scale, spec)
    return _quantize_with_scale(x, spec, 1, scale, key).dequantize(dtype)


def _magnitudes(x: Array) -> Array:
    """Return finite magnitudes in fp32; 0 for NaN and Inf."""
    magnitudes = jnp.abs(x.astype(jnp.float32))
    return formats.where(jnp.isfinite(magnitudes), magnitudes, 0.0)


def _two_level_scale(amax: Array, outer_scale: Array, spec: QuantSpec) -> Array:
    """Return the scales of microscaled groups from their amax, with (MOSS, section 3.1) or without outer scales."""
    outer_scale = jnp.ones_like(outer_scale) if spec.outer_scale == "none" else outer_scale
    powers = encoding.compute_microscales(amax * (1 / outer_scale), spec, formats.get(spec.format))
    return outer_scale * formats.decode_e8m0(powers)


def _quantize_with_scale(x: Array, spec: QuantSpec, width: int | None, scale: Array, key: Array | None) -> QTensor:
    """Quantize under known scales, one per `width` elements of a row, or per row if None."""
    granularity = "token" if width is None else "group"
    row_spec = QuantSpec(spec.format, granularity, width, rounding=spec.rounding)
    seed = noise.key_to_seed(key) if key is not None and spec.rounding == "stochastic" else None
    return quantize_with_scale(x, row_spec, scale, seed=seed)


def ragged_dot(
    x: Array,
    w: Array,
    group_sizes: Array,
    *,
    recipe: Recipe | Linear | str,
    key: Array | None = None,
    input_facts: InputFacts = NO_INPUT_FACTS,
) -> Array:
    """Return `jax.lax.ragged_dot(x, w, group_sizes)` with the products of a recipe, differentiable in `x` and `w`.

    Operands are quantized by the recipe, and the codes of `x` are saved. Each group has its own scales: per-tensor and
    channel scales are per group, and blocks along tokens start at each group's first token. Tokens outside of all
    groups do not affect scales. Saved codes have scales per token: granularity "tensor" is saved as "token", and
    "block" as "group". XLA multiplies the dequantized codes in the dtype of `x`. This saves memory, not time.

    Args:
        x: (tokens, inputs), any floating dtype, with the tokens of each group consecutive.
        w: (groups, inputs, outputs).
        group_sizes: (groups,), integers of any dtype, at least 0. Tokens beyond their sum are in no group. They and
            their cotangents may be NaN or Inf; their results and gradients are 0.
        recipe, key: as in `fp8jax.linear`.
        input_facts: as in `fp8jax.dot_general`.

    Returns:
        (tokens, outputs) in the dtype of `x`.

    Raises:
        ValueError: shapes do not match, a key is missing, or the recipe's scaling observes operands.
        TypeError: `group_sizes` are not integers.
    """
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1] or group_sizes.shape != w.shape[:1]:
        shapes = f"{x.shape}, {w.shape} and {group_sizes.shape}"
        raise ValueError(f"ragged_dot takes (tokens, inputs), (groups, inputs, outputs) and (groups,), not {shapes}")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"ragged_dot takes group_sizes of integers, not {group_sizes.dtype}")
    linear_recipe = require_stateless(recipe)
    source, dy_key = _input_source(x, group_sizes, linear_recipe, key, input_facts), gradient_key(linear_recipe, key)
    value, w = match_varying_axes(x, w)  # type: ignore[assignment]
    name = derivatives.qualified_op_name(f"ragged_dot of {x.shape} and {w.shape}")
    token = derivatives.second_order_guard(name, value, w)
    y: Array = _ragged_product(linear_recipe, name, value, w, source, group_sizes, dy_key, token)
    return derivatives.check_differentiable_dtypes("ragged_dot", y, x, w)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["residuals"], meta_fields=["operation"])
@dataclasses.dataclass(frozen=True)
class _RecomputeResidual:
    """An input that is recomputed from the residuals of the preceding operation."""

    operation: Recomputable
    residuals: Any


class _Source(NamedTuple):
    """The input's codes as bytes, if the recipe saves codes, and its residual."""

    codes: QTensor | None
    residual: QTensor | Array | _RecomputeResidual


class _Residuals(NamedTuple):
    """Residuals of a ragged product."""

    x: QTensor | Array | _RecomputeResidual
    w: Array
    group_sizes: Array
    key: Array | None
    x_kind: DtypeAndSharding
    token: Array | None


def _input_source(x: Array, group_sizes: Array, recipe: Linear, key: Array | None, input_facts: InputFacts) -> _Source:
    # Scales and codes of the whole array are not used: they may depend on rows outside of all groups.
    side, recompute_rule, residual_spec = (
        input_side(recipe),
        input_facts.facts.recompute_rule,
        recipe.spec("x_residual"),
    )
    if residual_spec is None:
        values = input_facts.get_or_compute((None, side.strategy, x.shape), lambda: lax.stop_gradient(x), None, None)
        return _Source(None, values if recompute_rule is None else _recompute_residual(recompute_rule, x))
    subkey = derive_key(key, residual_spec, "x_residual")

    def make_residual() -> QTensor:
        segments = Segments(x.shape[0], group_sizes)
        q = with_checkpoint_name(
            to_bytes(row_codes(lax.stop_gradient(x), residual_spec, side.strategy, segments, subkey)), INPUT
        )
        return q if recompute_rule is None else dataclasses.replace(q, scale=with_checkpoint_name(q.scale, PRODUCT_AUX))

    use = "groups of rows", residual_spec, side.strategy, x.shape
    codes: QTensor = input_facts.get_or_compute(use, make_residual, group_sizes, None if subkey is None else key)
    if recompute_rule is None or residual_spec.rounding == "stochastic":  # the codes depend on the key
        return _Source(codes, codes)
    return _Source(codes, _recompute_residual(recompute_rule, x))


def _recompute_residual(recompute_rule: tuple[Recomputable, Any], x: Array) -> _RecomputeResidual:
    operation, residuals = recompute_rule
    return _RecomputeResidual(operation, lax.stop_gradient(x) if operation == ALREADY_SAVED else residuals)


def _quantize_dequantize(
    x: Array,
    spec: QuantSpec | None,
    strategy: Scaling,
    segments: Segments,
    dtype: Any,
    key: Array | None = None,
    *,
    along_rows: bool = False,
) -> Array:
    """Return the dequantized codes of `x`, contracted along its rows if `along_rows`; without a spec, `x` itself."""
    if spec is None:
        return segments.mask(x).astype(dtype)
    if along_rows:
        return column_values(x, spec, strategy, segments, dtype, key)
    return row_codes(x, spec, strategy, segments, key).dequantize(dtype)


def _dequantize(operand: Any, dtype: Any) -> Array:
    return operand.dequantize(dtype) if isinstance(operand, QTensor) else operand.astype(dtype)


def _weight_values(w: Array, spec: QuantSpec | None, side: Side, dtype: Any, *, transposed: bool) -> Array:
    """Return the dequantized matrices of all groups, (groups, inputs, outputs)."""

    def matrix_values(w: Array) -> Array:
        values = _dequantize(encode(w, spec, side.strategy, transposed=transposed), dtype)
        return values.T if transposed else values

    return jax.vmap(matrix_values)(w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ragged_product(recipe: Linear, name: str, *operands: Any) -> Array:
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
) -> tuple[Array, _Residuals]:
    side, weights = input_side(recipe), weight_side(recipe)
    is_unquantized = not recipe.is_quantized and recipe.spec("x_residual") is None
    if is_unquantized:
        token = None  # 16-bit products are twice differentiable
    a, b = (x, w) if token is None else lax.stop_gradient((x, w))
    segments = Segments(x.shape[0], group_sizes)
    if source.codes is not None and side.residual == side.forward:
        x_values = from_bytes(source.codes).dequantize(x.dtype)
    else:
        x_values = _quantize_dequantize(a, side.forward, side.strategy, segments, x.dtype)
    w_values = _weight_values(b, weights.forward, weights, x.dtype, transposed=True)
    y = lax.ragged_dot(x_values, w_values, segments.sizes)
    y = checkpoint_name(y.astype(x.dtype), PRODUCT)
    if token is not None:
        y = derivatives.differentiable_once(name, y, token)
    residual = x if is_unquantized else source.residual
    return y, _Residuals(residual, w, group_sizes, key, DtypeAndSharding.from_array(x), token)


def _ragged_bwd(recipe: Linear, name: str, residuals: _Residuals, dy: Array) -> tuple[Any, ...]:
    if residuals.token is None:
        return _gradients(recipe, residuals, dy)
    return derivatives.differentiable_once(
        name, _gradients(recipe, *lax.stop_gradient((residuals, dy))), (dy, residuals.token)
    )


def _gradients(recipe: Linear, residuals: _Residuals, dy: Array) -> tuple[Any, ...]:
    weights, dtype, strategy = weight_side(recipe), residuals.x_kind.dtype, recipe.stateless_scaling("dy")
    segments = Segments(dy.shape[0], residuals.group_sizes)
    keys = (None, None) if residuals.key is None else jax.random.split(residuals.key)
    dy_rows = _quantize_dequantize(dy, recipe.spec("dy"), strategy, segments, dtype, keys[0])
    dy_columns = _quantize_dequantize(dy, recipe.spec("dy_wgrad"), strategy, segments, dtype, keys[1], along_rows=True)

    def ragged_dot_fn(x: Array, w: Array) -> Array:
        return lax.ragged_dot(x, w, segments.sizes)

    w_values = _weight_values(residuals.w, weights.backward, weights, dtype, transposed=False)
    like = jax.ShapeDtypeStruct((dy.shape[0], w_values.shape[1]), dtype)
    (dx,) = jax.linear_transpose(lambda x: ragged_dot_fn(x, w_values), like)(dy_rows)
    x_values = _input_values(recipe, residuals.x, segments, dx)
    (dw,) = jax.linear_transpose(lambda w: ragged_dot_fn(x_values, w), jax.ShapeDtypeStruct(residuals.w.shape, dtype))(
        dy_columns
    )
    return dx, dw.astype(residuals.w.dtype), None, None, None, None


def _input_values(
    recipe: Linear, residual: QTensor | Array | _RecomputeResidual, segments: Segments, dx: Array
) -> Array:
    """Return the dequantized input of wgrad, in the shape and dtype of `dx`."""
    side = input_side(recipe)
    if isinstance(residual, QTensor):
        codes = from_bytes(residual)
        if side.backward is None or (side.backward == side.residual and side.backward.granularity in TRANSPOSABLE):
            return codes.dequantize(dx.dtype)
        # Without the barrier, XLA decodes the codes once in the forward pass and saves fp32 values.
        x = from_bytes(lax.optimization_barrier(residual)).dequantize()
    elif isinstance(residual, _RecomputeResidual):
        bound = functools.partial(jnp.full, (dx.shape[0],), jnp.inf)  # the gradient's row bounds are unknown
        x = residual.operation.recompute(residual.residuals, CotangentFacts(dx, None, bound)).array.astype(dx.dtype)
        x = reshape_to_matrix(x, *dx.shape)
    else:
        x = residual
    return _quantize_dequantize(x, side.backward, side.strategy, segments, dx.dtype, along_rows=True)


_ragged_product.defvjp(_forward, _ragged_bwd)
