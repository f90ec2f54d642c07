"""Ragged products, of groups of tokens with a matrix each, as in mixtures of experts, under a recipe.

    y  = x[rows of g] @ w[g]       "forward"
    dx = dy[rows of g] @ w[g].T    "dgrad"
    dw[g] = x[rows of g].T @ dy    "wgrad"

Rows in no group may hold anything, NaN too, and count as zeros. No scale spans two groups. The forward product and
dgrad read codes of rows. Wgrad reads transposed codes in an axis in which each group starts at a multiple of 128
(`fp8jax.core.groups.PaddedTokens`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from fp8jax.core import blocks, derivatives, formats
from fp8jax.core.groups import Groups, PaddedTokens
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import SAME, Linear, Recipe
from fp8jax.core.spec import TRANSPOSABLE, QuantSpec
from fp8jax.ops.autodiff.checkpointing import INPUT, PRODUCT, PRODUCT_AUX, with_checkpoint_name
from fp8jax.ops.autodiff.observations import Observation, Place, current_place, observe, observe_codes
from fp8jax.ops.autodiff.residuals import (
    ALREADY_SAVED,
    NO_FACTS,
    NO_INPUT_FACTS,
    ArrayFacts,
    CotangentFacts,
    GradientFacts,
    InputFacts,
    Recomputable,
    current_gradient_facts,
    derive_key,
    from_bytes,
    to_bytes,
)
from fp8jax.ops.dispatch.choice import cast_varying_over, varying_axes
from fp8jax.ops.dispatch.sharding import DtypeAndSharding, explicit_mesh, reshape_to_matrix, spec_of
from fp8jax.ops.matmul.grouped import DeferredMatrices, UnpaddedRows, grouped_matmul, grouped_matmul_dw
from fp8jax.ops.matmul.matmul import Operand
from fp8jax.ops.products.linear import (
    ScalingState,
    ScalingStats,
    collects_stats,
    operand_state,
    require_stateless,
    stateful_strategies,
)
from fp8jax.ops.products.operands import Side, convert_scale_to_spec, encode, gradient_key, input_side, weight_side
from fp8jax.ops.products.product import Scales, check_slot_varies, expected_scale
from fp8jax.ops.products.weights import (
    NO_CODES,
    FrozenSource,
    FrozenWeight,
    LayoutPolicy,
    QuantizedWeight,
    StepWeight,
    weight_source,
)
from fp8jax.ops.quantization.fallback import FallbackTensor
from fp8jax.ops.quantization.group_scales import (
    TokenColumns,
    alignment,
    amax_per_group,
    quantize_columns,
    quantize_fallback_rows,
    quantize_rows,
    transpose_rows,
)
from fp8jax.ops.quantization.token_codes import TokenCodes, quantize_tokens, supports
from fp8jax.recipes import linear_part


def ragged_dot(
    x: Array,
    w: Array | FrozenWeight,
    group_sizes: Array,
    *,
    recipe: Recipe | Linear | str,
    key: Array | None = None,
    group_offset: Array | int | None = None,
    dimension_numbers: lax.RaggedDotDimensionNumbers | None = None,
    preferred_element_type: DTypeLike | None = None,
    quantized: QuantizedWeight | None = None,
    step_weight: StepWeight = NO_CODES,
    input_facts: InputFacts = NO_INPUT_FACTS,
) -> Array:
    """Return `jax.lax.ragged_dot(x, w, group_sizes)` with the products of a recipe, differentiable in `x` and `w`.

    Operands are quantized by the recipe, and the codes of `x` are saved. Each group has its own scales: per-tensor and
    channel scales are per group, and blocks along tokens start at each group's first token. Tokens outside of all
    groups do not affect scales. Saved codes have scales per token: granularity "tensor" is saved as "token", and
    "block" as "group". No product of all tokens with all matrices is computed (`fp8jax.ops.matmul.grouped`).

    Args:
        x: (tokens, inputs), any floating dtype, with the tokens of each group consecutive.
        w: (groups, inputs, outputs), or a stack of weights of `fp8jax.freeze`, which has no gradient. Its product saves
            neither tokens nor weights.
        group_sizes: (groups,), integers of any dtype, at least 0. Tokens beyond their sum are in no group. They and
            their cotangents may be NaN or Inf; their results and gradients are 0.
        recipe, key: as in `fp8jax.linear`.
        group_offset: integer, of shape () or (1,). `w` then has the matrices of groups `group_offset` and following
            ones, and `group_sizes` those of all groups. Tokens of other groups are in no group. None is 0.
        dimension_numbers: as in `jax.lax.ragged_dot_general`; None is that of `jax.lax.ragged_dot`. Two other forms are
            supported. `w` may be (groups, outputs, inputs). Or both operands are contracted along their tokens, which
            are the ragged dimension: (tokens, m) and (tokens, n) give (groups, m, n), quantized as the operands of a
            weight's gradient.
        preferred_element_type: dtype of the result; None takes that of `x`.
        quantized: result of `fp8jax.quantize_weight` for the matrices (groups, inputs, outputs); None quantizes `w` in
            this call.
        step_weight: as of `fp8jax.ops.products.product.recipe_dot`, in place of `quantized`.
        input_facts: as in `fp8jax.dot_general`.

    Returns:
        (tokens, outputs), or (groups, m, n) for a product along tokens. Gradients have the dtypes of `x` and `w`.

    Raises:
        ValueError: shapes do not match, a key is missing, `dimension_numbers` are of another form, or the recipe's
            scaling observes operands. Or the recipe has 4-bit codes or a rotation.
        TypeError: `group_sizes` are not integers.
    """
    if quantized is not None:
        step_weight = StepWeight.from_codes(quantized)
    form, dtype = _Form.parse(dimension_numbers, x, w), jnp.dtype(preferred_element_type or x.dtype)
    if isinstance(w, FrozenWeight) and form.transposed:
        w, form = w.T, form._replace(transposed=False)
    config = _CallConfig(form, require_stateless(recipe), dtype, input_facts)
    return _run(config, x, w, group_sizes, group_offset, key, step_weight, None, None)[0]


def scaled_ragged_dot(
    x: Array,
    w: Array,
    group_sizes: Array,
    state: ScalingState,
    amax_slot: Array | None = None,
    *,
    recipe: Recipe | Linear | str,
    key: Array | None = None,
    group_offset: Array | int | None = None,
    dimension_numbers: lax.RaggedDotDimensionNumbers | None = None,
    preferred_element_type: DTypeLike | None = None,
    quantized: QuantizedWeight | None = None,
    step_weight: StepWeight = NO_CODES,
    input_facts: InputFacts = NO_INPUT_FACTS,
) -> tuple[Array, ScalingStats]:
    """`ragged_dot` with a stateful scaling, which has a state for each group.

    Args:
        x, w, group_sizes: as in `ragged_dot`. A product along tokens has no state.
        state: as in `fp8jax.scaled_linear`, with a leading axis of groups on each array.
        amax_slot: fp32 (groups,), of any values, another one for each call. Its cotangent is the amax of each group's
            part of the output's gradient. None if the gradient's scaling has no state.
        recipe: a recipe with a stateful scaling, such as "te_delayed".
        key, group_offset, dimension_numbers, preferred_element_type, step_weight, input_facts: as in `ragged_dot`.
        quantized: as in `ragged_dot`, under the scales that the state gives.

    Returns:
        The output, and the statistics of `x` and `w` as of `fp8jax.scaled_linear`, with a leading axis of groups. Those
        of a group without rows are 0 for `x`, which leaves its state as it is.

    Raises:
        ValueError: as `ragged_dot`; or the recipe's scaling has no state, or a slot is missing.
        TypeError: `group_sizes` are not integers.
    """
    strategies, linear_recipe = stateful_strategies(recipe), linear_part(recipe)
    if "dy" in strategies and amax_slot is None:
        raise ValueError(
            f"{linear_recipe.scaling} scaling observes gradients: give scaled_ragged_dot amax_slot=jnp.zeros(groups)"
        )
    if quantized is not None:
        step_weight = StepWeight.from_codes(quantized)
    form, dtype = _Form.parse(dimension_numbers, x, w), jnp.dtype(preferred_element_type or x.dtype)
    if form.contracts_tokens:
        raise ValueError("a product along tokens has no weight, and no scaling state: take fp8jax.ragged_dot")
    config = _CallConfig(form, linear_recipe, dtype, input_facts)
    return _run(config, x, w, group_sizes, group_offset, key, step_weight, lax.stop_gradient(state), amax_slot)


class _CallConfig(NamedTuple):
    """The static part of a call, and what is known about its input."""

    form: "_Form"
    recipe: Linear
    dtype: Any
    input_facts: InputFacts


def _run(
    config: _CallConfig,
    x: Array,
    w: Array | FrozenWeight,
    group_sizes: Array,
    group_offset: Array | int | None,
    key: Array | None,
    step_weight: StepWeight,
    state: ScalingState | None,
    amax_slot: Array | None,
) -> tuple[Array, ScalingStats]:
    """Return the result of `ragged_dot`, and the statistics of `scaled_ragged_dot`, empty without a state."""
    form, recipe = config.form, config.recipe
    if (reason := unsupported_ragged_reason(recipe)) is not None:
        raise ValueError(f"ragged_dot cannot follow the recipe: {reason}; take one without, such as 'mxfp8'")
    x, w = form.arrange(x, w)
    form.check(x, w, group_sizes, group_offset)
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"ragged_dot takes group_sizes of integers, not {group_sizes.dtype}")
    sharing_keys = group_sizes, group_offset

    def multiply(
        x: Array, w: Any, group_sizes: Array, group_offset: Any, key: Array | None, step_weight: StepWeight,
        state: ScalingState | None, amax_slot: Array | None,
    ) -> tuple[Array, ScalingStats]:  # fmt: skip
        offset = None if group_offset is None else jnp.asarray(group_offset, jnp.int32).reshape(())
        groups = Groups.from_sizes(group_sizes, x.shape[0], offset, None if form.contracts_tokens else w.shape[0])
        if form.contracts_tokens:
            return _multiply_tokens(x, w, groups, recipe, key, config.dtype), ScalingStats()
        scaling = None if state is None else _GroupScaling.from_state(x, w, groups, recipe, state, amax_slot)
        y, counts = _multiply_rows(
            x, w, groups, recipe, key, config.dtype, form.transposed, step_weight, scaling, facts, sharing_keys
        )
        return y, ScalingStats() if scaling is None else scaling.stats(counts)

    facts, mesh = config.input_facts, explicit_mesh(x, w)
    if mesh is not None:
        # What a call with Auto axes makes is not shared with other calls, and it reads no arrays but its operands.
        facts = InputFacts(facts.facts._replace(codes=None, row_source=None))
        out = NamedSharding(mesh, PartitionSpec(*form.out_spec(spec_of(x), _weight_spec(w))))
        multiply = jax.sharding.auto_axes(
            multiply, axes=tuple(mesh.explicit_axes), out_sharding=(out, NamedSharding(mesh, PartitionSpec()))
        )
    y, stats = multiply(x, w, group_sizes, group_offset, key, step_weight, state, amax_slot)
    trained_w = None if isinstance(w, FrozenWeight) else w
    return derivatives.check_differentiable_dtypes("ragged_dot", y, x, trained_w), stats


def _weight_spec(w: Array | FrozenWeight) -> tuple[Any, ...]:
    """Return the sharding of (groups, inputs, outputs), or of an array as it is."""
    if not isinstance(w, FrozenWeight):
        return spec_of(w)
    groups, first, second = spec_of(w.codes)
    return (groups, first, second) if w.transposed else (groups, second, first)


class _GroupScaling(NamedTuple):
    """What the states of a product's groups give.

    Attributes:
        scales: given scales, fp32 (groups,).
        thresholds: fp32 (groups,), above which blocks of the input fall back; None if none do.
        observed: the statistics of `x` and `w` that are known before the product.
    """

    scales: Scales
    thresholds: Array | None
    observed: ScalingStats

    @classmethod
    def from_state(
        cls, x: Array, w: Array, groups: Groups, recipe: Linear, state: ScalingState, amax_slot: Array | None
    ) -> "_GroupScaling":
        strategies, scales, thresholds, observed = recipe.states, Scales(), None, ScalingStats()
        x, w = lax.stop_gradient((x, w))
        for name, strategy in strategies.items():
            group_states = operand_state(state, name)
            if name == "dy":
                scales = scales._replace(dy_amax=jax.vmap(strategy.expected_amax)(group_states), amax_slot=amax_slot)
                continue
            if strategy.is_threshold:
                thresholds = group_states
                continue
            spec = recipe.spec(name)
            assert spec is not None
            # A scaling reads a tensor's amax alone: that of its group's rows is in place of the input.
            values = w if name == "w" else amax_per_group(x, PaddedTokens.from_groups(groups, x.shape[0]))
            get_scale = functools.partial(strategy.scale, fmt=formats.get(spec.format))
            scales = scales._replace(**{name: jax.vmap(get_scale)(group_states, values)})
            if strategy.collects_stats:
                observed = observed._replace(**{name: jax.vmap(strategy.collect_stats)(group_states, values)})
        if collects_stats(recipe, "dy"):
            observed = observed._replace(dy=jnp.zeros((w.shape[0],), jnp.float32))
        return cls(scales, thresholds, observed)

    def stats(self, counts: Array | None) -> ScalingStats:
        """Return the statistics of the call; `counts` are those of fallback blocks."""
        return self.observed if counts is None else self.observed._replace(x=counts)


def unsupported_ragged_reason(recipe: Linear) -> str | None:
    """Return why a recipe has no ragged products, or None."""
    specs = {spec for pair in recipe.products().values() for spec in pair}
    if any(spec is not None and spec.is_packed for spec in specs):
        return "grouped matmuls of 4-bit codes are not built"
    return None if recipe.rotation is None else "grouped matmuls with a rotation are not built"


class _Form(NamedTuple):
    """The form of a ragged product.

    Attributes:
        contracts_tokens: whether the result is (groups, m, n), of (tokens, m) and (tokens, n).
        transposed: whether the weight is (groups, outputs, inputs).
        x_transposed, w_transposed: whether the user's operand is the transpose of this form's.
    """

    contracts_tokens: bool = False
    transposed: bool = False
    x_transposed: bool = False
    w_transposed: bool = False

    @classmethod
    def parse(cls, numbers: lax.RaggedDotDimensionNumbers | None, x: Array, w: Array | FrozenWeight) -> "_Form":
        """Return the form of a product of `jax.lax.ragged_dot_general`; raise ValueError for an unsupported one."""
        if numbers is None:
            return cls()
        ((lhs, rhs), batch), ragged = numbers.dot_dimension_numbers, tuple(numbers.lhs_ragged_dimensions)
        contract, group = (tuple(lhs), tuple(rhs)), tuple(numbers.rhs_group_dimensions)
        is_plain = not any(map(len, batch)) and len(lhs) == 1 and len(ragged) == 1
        if is_plain and group == (0,) and x.ndim == 2 and w.ndim == 3 and ragged != contract[0]:
            return cls(transposed=contract[1] == (2,), x_transposed=contract[0] == (0,))
        if is_plain and group == () and x.ndim == w.ndim == 2 and ragged == contract[0]:
            return cls(contracts_tokens=True, x_transposed=contract[0] == (1,), w_transposed=contract[1] == (1,))
        raise ValueError(
            f"ragged_dot takes (tokens, inputs), (groups, inputs, outputs) or (groups, outputs, inputs), or contracts "
            f"the tokens of (tokens, m) with those of (tokens, n), not {numbers} of {x.shape} and {w.shape}. Map batch "
            f"dimensions by jax.vmap"
        )

    def arrange(self, x: Array, w: Any) -> tuple[Array, Any]:
        """Return the operands with their axes in the order of this form."""
        return x.T if self.x_transposed else x, w.T if self.w_transposed else w

    def check(self, x: Array, w: Array | FrozenWeight, group_sizes: Array, group_offset: Any) -> None:
        """Raise ValueError if shapes do not match."""
        sizes, shapes = group_sizes.shape, f"{x.shape}, {w.shape} and {group_sizes.shape}"
        if self.contracts_tokens:
            if x.ndim != 2 or w.ndim != 2 or x.shape[0] != w.shape[0] or len(sizes) != 1:
                raise ValueError(f"ragged_dot contracts (tokens, m) and (tokens, n) in groups (groups,), not {shapes}")
            if group_offset is not None:
                raise ValueError("ragged_dot along tokens takes no group_offset: give the sizes of the groups alone")
            return
        layout = "(groups, outputs, inputs)" if self.transposed else "(groups, inputs, outputs)"
        is_matching = x.ndim == 2 and w.ndim == 3 and x.shape[1] == w.shape[2 if self.transposed else 1]
        if not is_matching or len(sizes) != 1 or (sizes != w.shape[:1] and group_offset is None) or sizes < w.shape[:1]:
            raise ValueError(f"ragged_dot takes (tokens, inputs), {layout} and (groups,), not {shapes}")
        if group_offset is not None and jnp.size(group_offset) != 1:
            raise ValueError(f"group_offset is one integer, not an array of shape {jnp.shape(group_offset)}")

    def out_spec(self, x_spec: tuple[Any, ...], w_spec: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the sharding of the result on Explicit axes. An axis shards one dimension."""
        if self.contracts_tokens:
            return (None, *_distinct(x_spec[1], w_spec[1]))
        return _distinct(x_spec[0], w_spec[1 if self.transposed else 2])


def _distinct(first: Any, second: Any) -> tuple[Any, Any]:
    rest = tuple(name for name in blocks.spec_entry_axes(second) if name not in blocks.spec_entry_axes(first))
    return first, rest or None


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["residuals", "index", "scale"], meta_fields=["operation"]
)
@dataclasses.dataclass(frozen=True)
class _RecomputeResidual:
    """An input that is recomputed from the residuals of the preceding operation.

    Attributes:
        operation, residuals: of the operation.
        index: the token of each row, if the operation recomputes tokens before they are permuted; else None.
        scale: of the codes of these tokens, if the recipe quantizes tokens before they are permuted; else None.
    """

    operation: Recomputable
    residuals: Any
    index: Array | None = None
    scale: Array | None = None


class _Source(NamedTuple):
    """What a product reads and saves of its input.

    Attributes:
        codes: as bytes, if the recipe saves codes.
        residual: what is saved.
        fallback: what the forward product reads if blocks fall back, else None.
    """

    codes: QTensor | TokenCodes | None
    residual: QTensor | TokenCodes | Array | _RecomputeResidual
    fallback: FallbackTensor | None = None


class _Config(NamedTuple):
    """The static part of a ragged product.

    Attributes:
        recipe: formats and scalings of the three products.
        dtype: of the result.
        transposed: whether the weight is (groups, outputs, inputs).
        name: of the product, for error messages.
        gradient_facts: what earlier operations of the backward pass attached to the gradients that they returned.
        place: where its operands are observed, or None.
    """

    recipe: Linear
    dtype: Any
    transposed: bool
    name: str
    gradient_facts: GradientFacts
    place: Place | None = None


class _Residuals(NamedTuple):
    """Residuals of a ragged product. With a frozen weight there is no `x` and no `w_kind`."""

    x: QTensor | TokenCodes | Array | _RecomputeResidual | None
    w: StepWeight | FrozenSource
    groups: Groups
    key: Array | None
    scales: Scales | None
    x_kind: DtypeAndSharding
    w_kind: DtypeAndSharding | None
    token: Array


def _multiply_rows(
    x: Array,
    w: Array | FrozenWeight,
    groups: Groups,
    recipe: Linear,
    key: Array | None,
    dtype: Any,
    transposed: bool,
    step_weight: StepWeight,
    scaling: _GroupScaling | None,
    input_facts: InputFacts,
    sharing_keys: tuple[Any, ...],
) -> tuple[Array, Array | None]:
    """Return the product of rows with the matrix of their group, and the counts of fallback blocks or None."""
    if not recipe.is_quantized and recipe.spec("x_residual") is None and not isinstance(w, FrozenWeight):
        return _in_16_bits(x, w, groups, _Layout(dtype, transposed)), None
    scales = None if scaling is None else scaling.scales
    source = _input_source(x, groups, recipe, key, scales and scales.x, input_facts, sharing_keys)
    is_frozen, counts = isinstance(w, FrozenWeight), None
    dy_key = gradient_key(recipe, key, ("dy",) if is_frozen else ("dy", "dy_wgrad"))
    if scaling is not None and scaling.thresholds is not None:
        spec, tokens = recipe.spec("x"), _tokens(recipe, groups, x.shape[0])
        assert spec is not None
        fallback_tensor, counts = quantize_fallback_rows(lax.stop_gradient(x), spec, scaling.thresholds, tokens)
        source = source._replace(fallback=fallback_tensor)
    if transposed:
        step_weight = step_weight.with_step(_swap, values=lax.stop_gradient(w), transposed=not step_weight.transposed)
    w_source = weight_source(_logical(w, transposed), recipe, step_weight=step_weight, scale=scales and scales.w)
    name = derivatives.qualified_op_name(f"ragged_dot of {x.shape} and {w.shape}")
    trained_w = None if isinstance(w, FrozenWeight) else w
    axes = varying_axes((x, trained_w, source, w_source, groups, dy_key))
    x, trained_w = cast_varying_over((x, trained_w), axes)
    if isinstance(w_source, StepWeight):
        w_source = dataclasses.replace(w_source, values=cast_varying_over(w_source.values, axes))
    token = derivatives.second_order_guard(name, x, trained_w)
    place = current_place(f"ragged_dot {'x'.join(map(str, w.shape))}")
    config = _Config(recipe, dtype, transposed, name, current_gradient_facts(), place)
    result: Array = _ragged_product(config, x, trained_w, source, w_source, groups, dy_key, scales, token)
    if scaling is not None and scaling.thresholds is not None:
        observation = Observation({}, {"fallback_threshold": jnp.max(scaling.thresholds)})
        result = observe(result, place, "x", observation)
    return result, counts


class _Layout(NamedTuple):
    """The dtype of a result in 16 bits, and whether the matrices are (groups, outputs, inputs)."""

    dtype: Any
    transposed: bool = False
    contracts_tokens: bool = False


def _in_16_bits(x: Array, w: Array, groups: Groups, layout: "_Layout") -> Array:
    """Return a product in 16 bits, which may be differentiated twice."""
    x, w = cast_varying_over((x, w), varying_axes((x, w, groups)))
    name = derivatives.qualified_op_name(f"ragged_dot of {x.shape} and {w.shape}")
    multiply = _product_of_tokens if layout.contracts_tokens else _product_of_rows
    result: Array = multiply(layout, x, w, groups, derivatives.second_order_guard(name, x, w))
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product_of_rows(layout: _Layout, x: Array, w: Array, groups: Groups, token: Array) -> Array:
    return checkpoint_name(grouped_matmul(x, w, groups, transposed=not layout.transposed, dtype=layout.dtype), PRODUCT)


def _product_of_rows_bwd(layout: _Layout, saved: tuple[Any, ...], dy: Array) -> tuple[Any, ...]:
    x, w, groups, token = saved
    dx = _product_of_rows(_Layout(x.dtype, not layout.transposed), dy, w, groups, token)
    pair = (dy, x) if layout.transposed else (x, dy)
    return dx, _product_of_tokens(_Layout(w.dtype), *pair, groups, token), None, None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product_of_tokens(layout: _Layout, a: Array, b: Array, groups: Groups, token: Array) -> Array:
    tokens = PaddedTokens.from_groups(groups, a.shape[0])
    return grouped_matmul_dw(UnpaddedRows(a), UnpaddedRows(b), tokens, dtype=layout.dtype)


def _product_of_tokens_bwd(layout: _Layout, saved: tuple[Any, ...], ct: Array) -> tuple[Any, ...]:
    a, b, groups, token = saved
    da = _product_of_rows(_Layout(a.dtype, transposed=True), b, ct, groups, token)
    return da, _product_of_rows(_Layout(b.dtype), a, ct, groups, token), None, None


_product_of_rows.defvjp(lambda layout, *operands: (_product_of_rows(layout, *operands), operands), _product_of_rows_bwd)
_product_of_tokens.defvjp(
    lambda layout, *operands: (_product_of_tokens(layout, *operands), operands), _product_of_tokens_bwd
)


def _multiply_tokens(a: Array, b: Array, groups: Groups, recipe: Linear, key: Array | None, dtype: Any) -> Array:
    """Return the product of (tokens, m) and (tokens, n) over the tokens of each group."""
    if not recipe.is_quantized:
        return _in_16_bits(a, b, groups, _Layout(dtype, contracts_tokens=True))
    key = gradient_key(recipe, key)
    a, b = cast_varying_over((a, b), varying_axes((a, b, groups, key)))
    name = derivatives.qualified_op_name(f"ragged_dot of {a.shape} and {b.shape}")
    config = _Config(recipe, dtype, False, name, current_gradient_facts())
    result: Array = _token_product(config, a, b, groups, key, derivatives.second_order_guard(name, a, b))
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_product(config: _Config, *operands: Any) -> Array:
    return _token_product_fwd(config, *operands)[0]


def _token_product_fwd(
    config: _Config, a: Array, b: Array, groups: Groups, key: Array | None, token: Array
) -> tuple[Array, tuple[Any, ...]]:
    recipe, keys = config.recipe, _split(key)
    a, b = lax.stop_gradient((a, b))
    tokens = _tokens(recipe, groups, a.shape[0])
    y = multiply_columns(
        quantize_columns(a, recipe.spec("x_wgrad"), recipe.stateless_scaling("x"), tokens, keys[0]),
        quantize_columns(b, recipe.spec("dy_wgrad"), recipe.stateless_scaling("dy"), tokens, keys[1]),
        tokens,
        dtype=config.dtype,
        fast="wgrad" in recipe.fast_accumulation,
    )
    return derivatives.differentiable_once(config.name, y, token), (a, b, groups, key, token)


def _token_product_bwd(config: _Config, saved: tuple[Any, ...], ct: Array) -> tuple[Any, ...]:
    """Return the products of each operand with the cotangent, as dgrad and the forward product have a weight."""
    recipe, side = config.recipe, weight_side(config.recipe)
    a, b, groups, key, token = lax.stop_gradient(saved)
    tokens, matrices = _tokens(recipe, groups, a.shape[0]), lax.stop_gradient(ct)

    def rows(x: Array, operand: str, key: Array | None) -> Operand:
        spec = recipe.spec(operand)
        return x if spec is None else quantize_rows(x, spec, recipe.stateless_scaling(operand), tokens, key)

    da = grouped_matmul(
        rows(b, "dy", _split(key)[0]), encode(matrices, side.backward, side.strategy), groups,
        dtype=a.dtype, fast="dgrad" in recipe.fast_accumulation,
    )  # fmt: skip
    db = grouped_matmul(
        rows(a, "x", None), encode(matrices, side.forward, side.strategy, transposed=True), groups,
        dtype=b.dtype, fast="forward" in recipe.fast_accumulation,
    )  # fmt: skip
    da, db = derivatives.differentiable_once(config.name, (da, db), (ct, token))
    return da, db, None, None, None


_token_product.defvjp(_token_product_fwd, _token_product_bwd)


def _split(key: Array | None) -> tuple[Array | None, Array | None]:
    return (None, None) if key is None else tuple(jax.random.split(key))  # type: ignore[return-value]


def _logical(w: Any, transposed: bool) -> Any:
    """Return matrices (groups, inputs, outputs)."""
    return _swap(w) if transposed else w


def _swap(w: Array) -> Array:
    return jnp.swapaxes(w, -1, -2)


def _tokens(recipe: Linear, groups: Groups, num_rows: int) -> PaddedTokens:
    """Return the padded token axis, in which all blocks of a recipe's operands are of one group."""
    specs = map(recipe.spec, ("x", "dy", "x_residual", "x_wgrad", "dy_wgrad"))
    return PaddedTokens.from_groups(groups, num_rows, alignment(*specs))


def _input_source(
    x: Array,
    groups: Groups,
    recipe: Linear,
    key: Array | None,
    scale: Array | None,
    input_facts: InputFacts,
    sharing_keys: tuple[Any, ...],
) -> _Source:
    """Return what a product reads and saves of its input.

    Args:
        x, groups, recipe, key, input_facts: of the product.
        scale: fp32 (groups,), given for the codes of the forward product, or None.
        sharing_keys: the arrays that define the groups. Products with the same ones share the codes of an input.
    """
    # Scales and codes of the whole array are not used: they may depend on rows outside of all groups.
    facts, side, residual_spec = input_facts.facts, input_side(recipe), recipe.spec("x_residual")
    recompute_rule, tokens = facts.recompute_rule, _tokens(recipe, groups, x.shape[0])
    if scale is None and facts.row_source is not None and supports(facts.row_source[0], residual_spec, tokens):
        return _token_source(*facts.row_source, side, tokens, input_facts, sharing_keys)
    if residual_spec is None:
        values = input_facts.get_or_compute((None, side.strategy, x.shape), lambda: lax.stop_gradient(x), None, None)
        return _Source(None, values if recompute_rule is None else _recompute_residual(facts, x))
    subkey = derive_key(key, residual_spec, "x_residual")

    def make_residual() -> QTensor:
        residual_scale = convert_scale_to_spec(scale, side.forward, residual_spec)
        if scale is None and facts.codes is not None and facts.codes[0] == residual_spec:
            codes = facts.codes[1]
        else:
            codes = to_bytes(
                quantize_rows(lax.stop_gradient(x), residual_spec, side.strategy, tokens, subkey, scale=residual_scale)
            )
        q = with_checkpoint_name(codes, INPUT)
        return q if recompute_rule is None else dataclasses.replace(q, scale=with_checkpoint_name(q.scale, PRODUCT_AUX))

    # Products with states of their own share the codes made under the scales of the first one.
    use = "groups of rows", residual_spec, side.strategy if scale is None else recipe.strategy("x"), x.shape
    codes: QTensor = input_facts.get_or_compute(use, make_residual, *sharing_keys, None if subkey is None else key)
    if recompute_rule is None or residual_spec.rounding == "stochastic":  # the codes depend on the key
        return _Source(codes, codes)
    return _Source(codes, _recompute_residual(facts, x))


def _token_source(
    x: Array, index: Array, side: Side, tokens: PaddedTokens, input_facts: InputFacts, sharing_keys: tuple[Any, ...]
) -> _Source:
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
        return _Source(codes, codes)
    operation, residuals = input_facts.facts.recompute_rule
    scale = with_checkpoint_name(codes.codes.scale, PRODUCT_AUX)
    return _Source(codes, _RecomputeResidual(operation, residuals, index, scale))


def _recompute_residual(facts: ArrayFacts, x: Array) -> _RecomputeResidual:
    assert facts.recompute_rule is not None
    operation, residuals = facts.recompute_rule
    index = None if facts.row_source is None else facts.row_source[1]
    return _RecomputeResidual(operation, lax.stop_gradient(x) if operation == ALREADY_SAVED else residuals, index)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged_product(config: _Config, *operands: Any) -> Array:
    return _forward(config, *operands)[0]


def _ragged_fwd(
    config: _Config, x: Array, w: Array | None, source: _Source, w_source: StepWeight | FrozenSource, *operands: Any
) -> tuple[Array, _Residuals]:
    """`_forward`, if a backward pass follows."""
    if isinstance(w_source, StepWeight):
        w_source = w_source.quantized_for_gradient(_logical(lax.stop_gradient(w), config.transposed), config.recipe)
    return _forward(config, x, w, source, w_source, *operands)


def _forward(
    config: _Config,
    x: Array,
    w: Array | None,
    source: _Source,
    w_source: StepWeight | FrozenSource,
    groups: Groups,
    key: Array | None,
    scales: Scales | None,
    token: Array,
) -> tuple[Array, _Residuals]:
    recipe, side, w_side = config.recipe, input_side(config.recipe), weight_side(config.recipe)
    x_kind, w_kind = (None if m is None else DtypeAndSharding.from_array(m) for m in (x, w))
    assert x_kind is not None
    x, w = lax.stop_gradient((x, w))
    x_operand: Operand | FallbackTensor = x
    tokens = _tokens(recipe, groups, x.shape[0])
    if source.fallback is not None:
        x_operand = source.fallback
    elif source.codes is not None and side.residual == side.forward:
        x_operand = _rows_of(source.codes, tokens)
    elif side.forward is not None:
        x_operand = quantize_rows(x, side.forward, side.strategy, tokens, scale=scales and scales.x)
    w = _logical(w, config.transposed)
    w_operand = w_source.forward(w, w_side)  # type: ignore[arg-type]
    y = grouped_matmul(
        x_operand,
        w_operand,  # type: ignore[arg-type]
        groups,
        scales_are_shared=_is_in_blocks(side.forward),
        dtype=config.dtype,
        fast="forward" in recipe.fast_accumulation,
    )
    y = checkpoint_name(y, PRODUCT)
    if config.place is not None:
        y = observe_codes(y, config.place, "x", x, x_operand, row_mask=tokens.is_in_group[:, None])
        if w is not None:
            w_codes = w_operand.quantize() if isinstance(w_operand, DeferredMatrices) else w_operand
            observe_matrix = functools.partial(observe_codes, y, config.place, "w", transposed=True)
            y = jax.vmap(observe_matrix, out_axes=None)(w, w_codes)
    y = derivatives.differentiable_once(config.name, y, token)
    w_residual = w_source.residual(w, w_operand, w_side)  # type: ignore[arg-type]
    return y, _Residuals(
        None if w_kind is None else source.residual, w_residual, groups, key, scales, x_kind, w_kind, token
    )


def _is_in_blocks(spec: QuantSpec | None) -> bool:
    return spec is not None and spec.granularity == "block"


def _rows_of(codes: QTensor | TokenCodes, tokens: PaddedTokens) -> QTensor:
    rows = from_bytes(codes) if isinstance(codes, QTensor) else codes.gather(tokens, rows=True).rows
    assert rows is not None
    return rows


def _ragged_bwd(config: _Config, residuals: _Residuals, dy: Array) -> tuple[Any, ...]:
    dy_facts = config.gradient_facts.pop(dy) or NO_FACTS
    gradients, predicted = _gradients(config, *lax.stop_gradient((residuals, dy)), dy_facts)
    gradients = derivatives.differentiable_once(config.name, gradients, (dy, residuals.token))
    if predicted is not None:
        config.gradient_facts.attach(gradients[0], ArrayFacts(predicted=predicted))
    return gradients


_ragged_product.defvjp(_ragged_fwd, _ragged_bwd)


def _gradients(config: _Config, residuals: _Residuals, dy: Array, dy_facts: ArrayFacts) -> tuple[tuple[Any, ...], Any]:
    """Return the cotangents of all operands, and the facts about the cotangents that follow from that of the input."""
    recipe, scales, w = config.recipe, residuals.scales, residuals.w
    tokens = _tokens(recipe, residuals.groups, dy.shape[0])
    spec = recipe.spec("dy")
    scale = dy_amax = None
    if scales is not None and scales.dy_amax is not None:
        check_slot_varies(scales.amax_slot, dy)
        dy_amax = amax_per_group(dy, tokens)
        scale = expected_scale(recipe, scales.dy_amax, dy_amax)
    dy_rows, make_dy_columns = _gradient_operands(recipe, dy, dy_facts, tokens, residuals.key, scale)
    matrices = w.dgrad_codes() if isinstance(w, FrozenSource) else w.operand(weight_side(recipe), None)
    dx = grouped_matmul(
        dy_rows,
        matrices,
        residuals.groups,
        scales_are_shared=_is_in_blocks(spec),
        dtype=residuals.x_kind.dtype,
        fast="dgrad" in recipe.fast_accumulation,
    )
    if config.place is not None:
        dx = observe_codes(dx, config.place, "dy", dy, dy_rows, row_mask=tokens.is_in_group[:, None])
    if not isinstance(w, StepWeight) or residuals.w_kind is None:
        return (dx, None, None, None, None, None, None, None), None
    x_columns, predicted = _input_columns(recipe, residuals, tokens, dx)
    pair = (make_dy_columns(), x_columns) if config.transposed else (x_columns, make_dy_columns())
    dw = multiply_columns(*pair, tokens, dtype=residuals.w_kind.dtype, fast="wgrad" in recipe.fast_accumulation)
    if w.layout_policy is LayoutPolicy.BOTH_ALWAYS:
        # Compute dw now, not when the gradients of all turns are stacked: until then XLA would keep its operands.
        dx, dw = lax.optimization_barrier((dx, dw))
    return (dx, dw, None, None, None, None, scales and Scales(amax_slot=dy_amax), None), predicted


def _gradient_operands(
    recipe: Linear, dy: Array, facts: ArrayFacts, tokens: PaddedTokens, key: Array | None, scale: Array | None
) -> tuple[Operand, Callable[[], TokenColumns]]:
    """Return the output's gradient as dgrad reads it, and a function that returns it as wgrad reads it."""
    spec, column_spec, strategy = recipe.spec("dy"), recipe.spec("dy_wgrad"), recipe.stateless_scaling("dy")
    if recipe.dy_wgrad == SAME and spec is not None and scale is None:
        codes = None
        if facts.codes is not None and facts.codes[0] == spec:
            codes = facts.codes[1]
        elif facts.row_source is not None and supports(facts.row_source[0], spec, tokens):
            codes = quantize_tokens(*facts.row_source, spec, strategy, tokens).gather(tokens, rows=True, columns=True)
        if codes is not None:
            return codes.rows, lambda: codes.columns
    keys = _split(key)
    rows: Operand = dy if spec is None else quantize_rows(dy, spec, strategy, tokens, keys[0], scale=scale)

    def make_columns() -> TokenColumns:
        is_transposable = spec is not None and spec.granularity in TRANSPOSABLE
        if recipe.dy_wgrad == SAME and isinstance(rows, QTensor) and spec is not None and is_transposable:
            return transpose_rows(rows, spec, tokens)
        column_scale = convert_scale_to_spec(scale, spec, column_spec)
        return quantize_columns(dy, column_spec, strategy, tokens, keys[1], scale=column_scale)

    return rows, make_columns


def _input_columns(recipe: Linear, residuals: _Residuals, tokens: PaddedTokens, dx: Array) -> tuple[TokenColumns, Any]:
    """Return the input as wgrad reads it, which has the shape of `dx`, and facts about cotangents that follow."""
    side, residual, dtype = input_side(recipe), residuals.x, residuals.x_kind.dtype
    assert residual is not None
    scale = convert_scale_to_spec(residuals.scales and residuals.scales.x, side.forward, side.backward)
    predicted = None
    if isinstance(residual, QTensor | TokenCodes):
        # Without the barrier, XLA could transpose or decode the codes in the forward pass, and keep the copy.
        residual, _ = lax.optimization_barrier((residual, dx))
    if isinstance(residual, _RecomputeResidual):
        bound = functools.partial(jnp.full, (dx.shape[0],), jnp.inf)  # the gradient's row bounds are unknown
        saved, _ = lax.optimization_barrier((residual, dx))
        facts = CotangentFacts(dx, None, bound)
        x, columns, predicted = residual.operation.recompute(saved.residuals, facts)
        if isinstance(columns, TokenColumns):
            return columns, predicted
        x = x.astype(dtype)
        if saved.scale is not None and saved.index is not None:
            assert side.backward is not None
            residual = quantize_tokens(x, saved.index, side.backward, side.strategy, tokens, saved.scale)
        else:
            residual = reshape_to_matrix(x, *dx.shape) if saved.index is None else x[saved.index]
    if isinstance(residual, TokenCodes):
        if side.backward == side.residual:
            columns = residual.gather(tokens, columns=True).columns
            assert columns is not None
            return columns, predicted
        residual = to_bytes(_rows_of(residual, tokens))
    if isinstance(residual, QTensor):
        codes, spec = from_bytes(residual), side.backward
        if spec is not None and spec == side.residual and spec.granularity in TRANSPOSABLE:
            return transpose_rows(codes, spec, tokens), predicted
        return quantize_columns(codes, spec, side.strategy, tokens, scale=scale, dtype=dtype), predicted
    assert residual is not None
    return quantize_columns(residual, side.backward, side.strategy, tokens, scale=scale), predicted


def multiply_columns(a: TokenColumns, b: TokenColumns, tokens: PaddedTokens, *, dtype: DTypeLike, fast: bool) -> Array:
    """Return the products of two transposed matrices over the tokens of each group, (groups, m, n)."""
    scales = [scale for scale in (a.scale, b.scale) if scale is not None]
    return grouped_matmul_dw(
        a.operand,
        b.operand,
        tokens,
        scale=functools.reduce(jnp.multiply, scales) if scales else None,
        row_scale=a.channel_scale,
        column_scale=b.channel_scale,
        dtype=dtype,
        fast=fast,
    )
