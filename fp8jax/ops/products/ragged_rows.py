"""Ragged products of rows with the matrix of their group, under a recipe."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from fp8jax.core import derivatives
from fp8jax.core.groups import Groups, PaddedTokens
from fp8jax.core.qtensor import QTensor, from_bytes, to_bytes
from fp8jax.core.recipe import SAME, Linear
from fp8jax.core.spec import TRANSPOSABLE, QuantSpec
from fp8jax.ops.autodiff.checkpointing import INPUT, PRODUCT, PRODUCT_AUX, with_checkpoint_name
from fp8jax.ops.autodiff.observations import Observation, current_layer_scope, observe, observe_codes
from fp8jax.ops.autodiff.residuals import (
    ALREADY_SAVED,
    ArrayFacts,
    CotangentFacts,
    InputFacts,
    Recomputable,
    attach_facts,
    derive_key,
    pop_facts,
)
from fp8jax.ops.dispatch.choice import cast_varying_over, varying_axes
from fp8jax.ops.dispatch.sharding import DtypeAndSharding, reshape_to_matrix
from fp8jax.ops.matmul.grouped_hopper import DeferredMatrices
from fp8jax.ops.matmul.matmul import Operand
from fp8jax.ops.products.operands import Side, convert_scale_to_spec, gradient_key, input_side, weight_side
from fp8jax.ops.products.product import Scales, check_slot_varies, expected_scale
from fp8jax.ops.products.ragged_16_bits import multiply_in_16_bits
from fp8jax.ops.products.ragged_states import GroupScaling
from fp8jax.ops.products.ragged_tokens import RaggedConfig, multiply_columns, multiply_groups, padded_tokens, split_key
from fp8jax.ops.products.weights import FrozenSource, FrozenWeight, LayoutPolicy, StepWeight, weight_source
from fp8jax.ops.quantization.fallback import FallbackTensor
from fp8jax.ops.quantization.group_scales import (
    TokenColumns,
    amax_per_group,
    quantize_columns,
    quantize_fallback_rows,
    quantize_rows,
    transpose_rows,
)
from fp8jax.ops.quantization.token_codes import RowsAndColumns, TokenCodes, quantize_tokens, supports


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["residuals", "index", "scale"], meta_fields=["operation"]
)
@dataclasses.dataclass(frozen=True)
class _RecomputeResidual:
    """An input that is recomputed from the residuals of the preceding operation.

    Attributes:
        operation, residuals: of the operation.
        index: the token of each row, if the operation recomputes tokens before they are permuted; else None, also if it
            recomputes their codes.
        scale: of the codes of these tokens, if the recipe quantizes tokens before they are permuted; else None.
    """

    operation: Recomputable
    residuals: Any
    index: Array | None = None
    scale: Array | None = None


InputResidual = QTensor | TokenCodes | Array | _RecomputeResidual


class InputSource(NamedTuple):
    """The codes that a product reads and saves of its input.

    Attributes:
        codes: as bytes, if the recipe saves codes.
        residual: what is saved.
        fallback: what the forward product reads if blocks fall back, else None.
    """

    codes: QTensor | TokenCodes | None
    residual: InputResidual
    fallback: FallbackTensor | None = None


def input_source(
    x: Array,
    groups: Groups,
    recipe: Linear,
    key: Array | None,
    scale: Array | None,
    input_facts: InputFacts,
    sharing_keys: tuple[Any, ...],
) -> InputSource:
    """Return what a product reads and saves of its input.

    Args:
        scale: fp32 (groups,), given for the codes of the forward product, or None.
        sharing_keys: the arrays that define the groups. Products with the same ones share the codes of an input.
    """
    # Scales and codes of the whole array are not used: they may depend on rows outside of all groups.
    facts, side, residual_spec = input_facts.facts, input_side(recipe), recipe.spec("x_residual")
    recompute_rule, tokens = facts.recompute_rule, padded_tokens(recipe, groups, x.shape[0])
    if scale is None and (token_codes := _known_token_codes(facts, residual_spec, tokens)) is not None:
        return InputSource(token_codes, token_codes if recompute_rule is None else _RecomputeResidual(*recompute_rule))
    if scale is None and facts.row_source is not None and supports(facts.row_source[0], residual_spec, tokens):
        return _token_source(*facts.row_source, side, tokens, input_facts, sharing_keys)
    if residual_spec is None:
        values = input_facts.get_or_compute((None, side.strategy, x.shape), lambda: lax.stop_gradient(x), None, None)
        return InputSource(None, values if recompute_rule is None else _recompute_residual(facts, x))
    subkey = derive_key(key, residual_spec, "x_residual")

    def make_residual() -> QTensor:
        residual_scale = convert_scale_to_spec(scale, side.forward, residual_spec)
        codes_spec, known_codes = facts.codes or (None, None)
        if scale is None and codes_spec == residual_spec and isinstance(known_codes, QTensor):
            q = known_codes
        else:
            values = lax.stop_gradient(x)
            q = to_bytes(quantize_rows(values, residual_spec, side.strategy, tokens, subkey, scale=residual_scale))
        q = with_checkpoint_name(q, INPUT)
        return q if recompute_rule is None else dataclasses.replace(q, scale=with_checkpoint_name(q.scale, PRODUCT_AUX))

    # Products with their own states share the codes made under the scales of the first one.
    use = "groups of rows", residual_spec, side.strategy if scale is None else recipe.strategy("x"), x.shape
    codes: QTensor = input_facts.get_or_compute(use, make_residual, *sharing_keys, None if subkey is None else key)
    if recompute_rule is None or residual_spec.rounding == "stochastic":  # the codes depend on the key
        return InputSource(codes, codes)
    return InputSource(codes, _recompute_residual(facts, x))


def _known_token_codes(facts: ArrayFacts, spec: QuantSpec | None, tokens: PaddedTokens) -> TokenCodes | None:
    """Return codes of the tokens that the rows are, if they are known under this spec."""
    if facts.codes is None or facts.codes[0] != spec or not isinstance(facts.codes[1], TokenCodes):
        return None
    return facts.codes[1] if supports(facts.codes[1].codes, spec, tokens) else None


def _token_source(
    x: Array, index: Array, side: Side, tokens: PaddedTokens, input_facts: InputFacts, sharing_keys: tuple[Any, ...]
) -> InputSource:
    """Return the source of rows that are tokens of `x` (tokens, inputs), which is quantized before."""
    spec = side.residual
    assert spec is not None
    use = "tokens of rows", spec, side.strategy, x.shape
    codes: TokenCodes = input_facts.get_or_compute(
        use,
        lambda: with_checkpoint_name(quantize_tokens(lax.stop_gradient(x), index, spec, side.strategy, tokens), INPUT),
        *sharing_keys,
    )
    if input_facts.facts.recompute_rule is None:
        return InputSource(codes, codes)
    return InputSource(
        codes, _recompute_residual(input_facts.facts, x, with_checkpoint_name(codes.codes.scale, PRODUCT_AUX))
    )


def _recompute_residual(facts: ArrayFacts, x: Array, scale: Array | None = None) -> _RecomputeResidual:
    assert facts.recompute_rule is not None
    operation, residuals = facts.recompute_rule
    index = None if facts.row_source is None else facts.row_source[1]
    residuals = lax.stop_gradient(x) if operation == ALREADY_SAVED else residuals
    return _RecomputeResidual(operation, residuals, index, scale)


def rows_of(codes: QTensor | TokenCodes, tokens: PaddedTokens) -> QTensor:
    """Return the codes of the rows of a product."""
    rows = from_bytes(codes) if isinstance(codes, QTensor) else codes.gather(tokens, rows=True).rows
    assert rows is not None
    return rows


def input_columns(
    recipe: Linear, residual: InputResidual, scale: Array | None, tokens: PaddedTokens, dx: Array
) -> tuple[TokenColumns, Any]:
    """Return the input as wgrad reads it, and facts about cotangents that follow.

    Args:
        residual: of the input, which has the shape and dtype of `dx`.
        scale: as in `input_source`.
        dx: the input's gradient.
    """
    side, predicted = input_side(recipe), None
    scale = convert_scale_to_spec(scale, side.forward, side.backward)
    if isinstance(residual, QTensor | TokenCodes):
        # Without the barrier, XLA could transpose or decode the codes in the forward pass, and keep the copy.
        residual, _ = lax.optimization_barrier((residual, dx))
    if isinstance(residual, _RecomputeResidual):
        bound = functools.partial(jnp.full, (dx.shape[0],), jnp.inf)  # the gradient's row bounds are unknown
        saved, _ = lax.optimization_barrier((residual, dx))
        x, columns, predicted = residual.operation.recompute(saved.residuals, CotangentFacts(dx, None, bound))
        if isinstance(columns, TokenColumns):
            return columns, predicted
        x = x.astype(dx.dtype)
        if isinstance(columns, TokenCodes) and saved.index is None:
            residual = columns
        elif saved.scale is not None and saved.index is not None:
            assert side.backward is not None
            residual = quantize_tokens(x, saved.index, side.backward, side.strategy, tokens, saved.scale)
        else:
            residual = reshape_to_matrix(x, *dx.shape) if saved.index is None else x[saved.index]
    if isinstance(residual, TokenCodes):
        if side.backward == side.residual and side.rotation is None:
            columns = residual.gather(tokens, columns=True).columns
            assert columns is not None
            return columns, predicted
        residual = to_bytes(rows_of(residual, tokens))
    if isinstance(residual, QTensor):
        codes, spec = from_bytes(residual), side.backward
        if spec == side.residual and side.rotation is None and spec is not None and spec.granularity in TRANSPOSABLE:
            return transpose_rows(codes, spec, tokens), predicted
        residual = codes
    columns = quantize_columns(
        residual, side.backward, side.strategy, tokens, scale=scale, dtype=dx.dtype, rotation=side.rotation
    )
    return columns, predicted


class _Residuals(NamedTuple):
    """Residuals of a ragged product. With a frozen weight there is no `x` and no `w_kind`."""

    x: InputResidual | None
    w: StepWeight | FrozenSource
    groups: Groups
    key: Array | None
    scales: Scales | None
    x_kind: DtypeAndSharding
    w_kind: DtypeAndSharding | None
    token: Array


def multiply_rows(
    config: RaggedConfig, x: Array, w: Array | FrozenWeight, groups: Groups, key: Array | None, step_weight: StepWeight,
    scaling: GroupScaling | None, input_facts: InputFacts, sharing_keys: tuple[Any, ...],
) -> tuple[Array, Array | None]:  # fmt: skip
    """Return the product of rows with the matrix of their group, and the counts of fallback blocks or None."""
    recipe, transposed = config.recipe, config.transposed
    if not recipe.is_quantized and recipe.spec("x_residual") is None and not isinstance(w, FrozenWeight):
        return multiply_in_16_bits(config.name, config.dtype, transposed, x, w, groups), None
    scales = None if scaling is None else scaling.scales
    source = input_source(x, groups, recipe, key, scales and scales.x, input_facts, sharing_keys)
    is_frozen, counts = isinstance(w, FrozenWeight), None
    dy_key = gradient_key(recipe, key, ("dy",) if is_frozen else ("dy", "dy_wgrad"))
    if scaling is not None and scaling.thresholds is not None:
        spec, tokens = recipe.spec("x"), padded_tokens(recipe, groups, x.shape[0])
        assert spec is not None
        fallback_tensor, counts = quantize_fallback_rows(lax.stop_gradient(x), spec, scaling.thresholds, tokens)
        source = source._replace(fallback=fallback_tensor)
    if transposed:
        step_weight = step_weight.with_step(_swap, values=lax.stop_gradient(w), transposed=not step_weight.transposed)
    w_source = weight_source(_logical(w, transposed), recipe, step_weight=step_weight, scale=scales and scales.w)
    trained_w = None if isinstance(w, FrozenWeight) else w
    axes = varying_axes((x, trained_w, source, w_source, groups, dy_key))
    x, trained_w = cast_varying_over((x, trained_w), axes)
    if isinstance(w_source, StepWeight):
        w_source = dataclasses.replace(w_source, values=cast_varying_over(w_source.values, axes))
    token = derivatives.second_order_guard(config.name, x, trained_w)
    layer_scope = current_layer_scope(f"ragged_dot {'x'.join(map(str, w.shape))}")
    config = config._replace(layer_scope=layer_scope)
    result: Array = _ragged_product(config, x, trained_w, source, w_source, groups, dy_key, scales, token)
    if scaling is not None and scaling.thresholds is not None:
        observation = Observation.from_scalars({"fallback_threshold": jnp.max(scaling.thresholds)})
        result = observe(result, layer_scope, "x", observation)
    return result, counts


def _logical(w: Any, transposed: bool) -> Any:
    """Return matrices (groups, inputs, outputs)."""
    return _swap(w) if transposed else w


def _swap(w: Array) -> Array:
    return jnp.swapaxes(w, -1, -2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged_product(config: RaggedConfig, *operands: Any) -> Array:
    return _forward(config, *operands)[0]


def _ragged_fwd(
    config: RaggedConfig, x: Array, w: Array | None, source: InputSource, w_source: Any, *operands: Any
) -> tuple[Array, _Residuals]:
    """`_forward`, if a backward pass follows."""
    if isinstance(w_source, StepWeight):
        w_source = w_source.quantized_for_gradient(_logical(lax.stop_gradient(w), config.transposed), config.recipe)
    return _forward(config, x, w, source, w_source, *operands)


def _forward(
    config: RaggedConfig, x: Array, w: Any, source: InputSource, w_source: StepWeight | FrozenSource, groups: Groups,
    key: Array | None, scales: Scales | None, token: Array,
) -> tuple[Array, _Residuals]:  # fmt: skip
    recipe, side, w_side = config.recipe, input_side(config.recipe), weight_side(config.recipe)
    x_kind, w_kind = (None if m is None else DtypeAndSharding.from_array(m) for m in (x, w))
    assert x_kind is not None
    x, w = lax.stop_gradient((x, w))
    x_operand: Operand | FallbackTensor = x
    tokens = padded_tokens(recipe, groups, x.shape[0])
    if source.fallback is not None:
        x_operand = source.fallback
    elif source.codes is not None and side.residual == side.forward:
        x_operand = rows_of(source.codes, tokens)
    elif side.forward is not None:
        x_operand = quantize_rows(x, side.forward, side.strategy, tokens, scale=scales and scales.x)
    w = _logical(w, config.transposed)
    w_operand = w_source.forward(w, w_side)
    y = multiply_groups("forward", x_operand, w_operand, groups, recipe, config.dtype)
    y = checkpoint_name(y, PRODUCT)
    if config.layer_scope is not None:
        y = observe_codes(y, config.layer_scope, "x", x, x_operand, row_mask=tokens.is_in_group[:, None])
        if w is not None:
            w_codes = w_operand.quantize() if isinstance(w_operand, DeferredMatrices) else w_operand
            observe_matrix = functools.partial(observe_codes, y, config.layer_scope, "w", is_transposed=True)
            y = jax.vmap(observe_matrix, out_axes=None)(w, w_codes)
    y = derivatives.differentiable_once(config.name, y, token)
    w_residual, x_residual = w_source.residual(w, w_operand, w_side), None if w_kind is None else source.residual
    return y, _Residuals(x_residual, w_residual, groups, key, scales, x_kind, w_kind, token)


def _ragged_bwd(config: RaggedConfig, residuals: _Residuals, dy: Array) -> tuple[Any, ...]:
    dy_facts = pop_facts(dy)
    gradients, predicted = _gradients(config, *lax.stop_gradient((residuals, dy)), dy_facts)
    gradients = derivatives.differentiable_once(config.name, gradients, (dy, residuals.token))
    if predicted is not None:
        attach_facts(gradients[0], ArrayFacts(predicted=predicted))
    return gradients


_ragged_product.defvjp(_ragged_fwd, _ragged_bwd)


def _gradients(
    config: RaggedConfig, residuals: _Residuals, dy: Array, dy_facts: ArrayFacts
) -> tuple[tuple[Any, ...], Any]:
    """Return the cotangents of all operands, and the facts about the cotangents that follow from that of the input."""
    recipe, scales, w = config.recipe, residuals.scales, residuals.w
    tokens = padded_tokens(recipe, residuals.groups, dy.shape[0])
    scale = dy_amax = None
    if scales is not None and scales.dy_amax is not None:
        check_slot_varies(scales.amax_slot, dy)
        dy_amax = amax_per_group(dy, tokens)
        scale = expected_scale(recipe, scales.dy_amax, dy_amax)
    dy_rows, make_dy_columns = _gradient_operands(recipe, dy, dy_facts, tokens, residuals.key, scale)
    matrices = w.dgrad_codes() if isinstance(w, FrozenSource) else w.operand(weight_side(recipe), None)
    dx = multiply_groups("dgrad", dy_rows, matrices, residuals.groups, recipe, residuals.x_kind.dtype)
    if config.layer_scope is not None:
        dx = observe_codes(dx, config.layer_scope, "dy", dy, dy_rows, row_mask=tokens.is_in_group[:, None])
    if not isinstance(w, StepWeight) or residuals.w_kind is None:
        return (dx, None, None, None, None, None, None, None), None
    assert residuals.x is not None
    x_columns, predicted = input_columns(recipe, residuals.x, scales and scales.x, tokens, dx)
    pair = (make_dy_columns(), x_columns) if config.transposed else (x_columns, make_dy_columns())
    dw = multiply_columns(*pair, tokens, dtype=residuals.w_kind.dtype, fast="wgrad" in recipe.fast_accumulation)
    if w.layout_policy is LayoutPolicy.BOTH_ALWAYS:
        # Compute dw now, not when the gradients of all iterations are stacked: until then XLA would keep its operands.
        dx, dw = lax.optimization_barrier((dx, dw))
    return (dx, dw, None, None, None, None, scales and Scales(amax_slot=dy_amax), None), predicted


def _gradient_operands(
    recipe: Linear, dy: Array, facts: ArrayFacts, tokens: PaddedTokens, key: Array | None, scale: Array | None
) -> tuple[Operand, Callable[[], TokenColumns]]:
    """Return the output's gradient as dgrad reads it, and a function that returns it as wgrad reads it."""
    spec, column_spec, strategy = recipe.spec("dy"), recipe.spec("dy_wgrad"), recipe.stateless_strategy("dy")
    shares_codes = recipe.dy_wgrad == SAME and recipe.rotation is None
    if shares_codes and spec is not None and scale is None:
        codes: Any = None
        if (token_codes := _known_token_codes(facts, spec, tokens)) is not None:
            codes = token_codes.gather(tokens, rows=True, columns=True)
        elif facts.codes is not None and facts.codes[0] == spec and isinstance(facts.codes[1], RowsAndColumns):
            codes = facts.codes[1]
        elif facts.row_source is not None and supports(facts.row_source[0], spec, tokens):
            codes = quantize_tokens(*facts.row_source, spec, strategy, tokens).gather(tokens, rows=True, columns=True)
        if codes is not None:
            return codes.rows, lambda: codes.columns
    keys = split_key(key)
    rows: Operand = dy if spec is None else quantize_rows(dy, spec, strategy, tokens, keys[0], scale=scale)

    def make_columns() -> TokenColumns:
        is_transposable = spec is not None and spec.granularity in TRANSPOSABLE
        if shares_codes and isinstance(rows, QTensor) and spec is not None and is_transposable:
            return transpose_rows(rows, spec, tokens)
        column_scale = convert_scale_to_spec(scale, spec, column_spec)
        return quantize_columns(
            dy, column_spec, strategy, tokens, keys[1], scale=column_scale, rotation=recipe.rotation
        )

    return rows, make_columns
