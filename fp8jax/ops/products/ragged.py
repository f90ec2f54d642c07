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
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from fp8jax.core import blocks, derivatives
from fp8jax.core.groups import Groups, PaddedTokens
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import SAME, Linear, Recipe
from fp8jax.core.spec import TRANSPOSABLE
from fp8jax.ops.autodiff.checkpointing import INPUT, PRODUCT, PRODUCT_AUX, with_checkpoint_name
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
from fp8jax.ops.matmul.grouped import UnpaddedRows, grouped_matmul, grouped_matmul_dw
from fp8jax.ops.matmul.matmul import Operand
from fp8jax.ops.products.linear import require_stateless
from fp8jax.ops.products.operands import Side, encode, gradient_key, input_side, weight_side
from fp8jax.ops.products.weights import NO_CODES, LayoutPolicy, QuantizedWeight, StepWeight, weight_source
from fp8jax.ops.quantization.group_scales import (
    TokenColumns,
    alignment,
    quantize_columns,
    quantize_rows,
    transpose_rows,
)
from fp8jax.ops.quantization.token_codes import TokenCodes, quantize_tokens, supports


def ragged_dot(
    x: Array,
    w: Array,
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
        w: (groups, inputs, outputs).
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
            scaling observes operands.
        TypeError: `group_sizes` are not integers.
    """
    linear_recipe = require_stateless(recipe)
    form = _Form.parse(dimension_numbers, x, w)
    x, w = form.arrange(x, w)
    form.check(x, w, group_sizes, group_offset)
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"ragged_dot takes group_sizes of integers, not {group_sizes.dtype}")
    if quantized is not None:
        step_weight = StepWeight.from_codes(quantized)
    dtype = jnp.dtype(preferred_element_type or x.dtype)

    def multiply(
        x: Array, w: Array, group_sizes: Array, group_offset: Any, key: Array | None, step_weight: StepWeight
    ) -> Array:
        offset = None if group_offset is None else jnp.asarray(group_offset, jnp.int32).reshape(())
        groups = Groups.from_sizes(group_sizes, x.shape[0], offset, None if form.contracts_tokens else w.shape[0])
        if form.contracts_tokens:
            return _multiply_tokens(x, w, groups, linear_recipe, key, dtype)
        return _multiply_rows(x, w, groups, linear_recipe, key, dtype, form.transposed, step_weight, facts)

    # Products share what they make of one input if their groups are the same arrays.
    share = functools.partial(_share, input_facts.get_or_compute, (group_sizes, group_offset))
    facts, mesh = input_facts._replace(get_or_compute=share), explicit_mesh(x, w)
    if mesh is not None:
        # What a call with Auto axes makes is not shared with other calls, and it reads no arrays but its operands.
        facts = InputFacts(input_facts.facts._replace(codes=None, row_source=None))
        out = NamedSharding(mesh, PartitionSpec(*form.out_spec(spec_of(x), spec_of(w))))
        multiply = jax.sharding.auto_axes(multiply, axes=tuple(mesh.explicit_axes), out_sharding=out)
    y: Array = multiply(x, w, group_sizes, group_offset, key, step_weight)
    return derivatives.check_differentiable_dtypes("ragged_dot", y, x, w)


def _share(
    get_or_compute: Callable[..., Any], groups: tuple[Any, ...], use: Hashable, make: Callable[[], Any], *rest: Any
) -> Any:
    """Return the result of `InputFacts.get_or_compute` for these groups."""
    return get_or_compute(use, make, *groups, *rest)


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
    def parse(cls, numbers: lax.RaggedDotDimensionNumbers | None, x: Array, w: Array) -> "_Form":
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

    def arrange(self, x: Array, w: Array) -> tuple[Array, Array]:
        """Return the operands with their axes in the order of this form."""
        return x.T if self.x_transposed else x, w.T if self.w_transposed else w

    def check(self, x: Array, w: Array, group_sizes: Array, group_offset: Any) -> None:
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
    """The input's codes as bytes, if the recipe saves codes, and its residual."""

    codes: QTensor | TokenCodes | None
    residual: QTensor | TokenCodes | Array | _RecomputeResidual


class _Config(NamedTuple):
    """The static part of a ragged product.

    Attributes:
        recipe: formats and scalings of the three products.
        dtype: of the result.
        transposed: whether the weight is (groups, outputs, inputs).
        name: of the product, for error messages.
        gradient_facts: what earlier operations of the backward pass attached to the gradients that they returned.
    """

    recipe: Linear
    dtype: Any
    transposed: bool
    name: str
    gradient_facts: GradientFacts


class _Residuals(NamedTuple):
    """Residuals of a ragged product."""

    x: QTensor | TokenCodes | Array | _RecomputeResidual
    w: StepWeight
    groups: Groups
    key: Array | None
    x_kind: DtypeAndSharding
    w_kind: DtypeAndSharding
    token: Array


def _multiply_rows(
    x: Array,
    w: Array,
    groups: Groups,
    recipe: Linear,
    key: Array | None,
    dtype: Any,
    transposed: bool,
    step_weight: StepWeight,
    input_facts: InputFacts,
) -> Array:
    """Return the product of rows with the matrix of their group."""
    if not recipe.is_quantized and recipe.spec("x_residual") is None:
        return _in_16_bits(x, w, groups, _Layout(dtype, transposed))
    source, dy_key = _input_source(x, groups, recipe, key, input_facts), gradient_key(recipe, key)
    if transposed:
        step_weight = step_weight.with_step(_swap, values=lax.stop_gradient(w), transposed=not step_weight.transposed)
    w_source = weight_source(_logical(w, transposed), recipe, step_weight=step_weight)
    assert isinstance(w_source, StepWeight)
    x, w, values = cast_varying_over((x, w, w_source.values), varying_axes((x, w, source, w_source, groups, dy_key)))
    w_source = dataclasses.replace(w_source, values=values)
    name = derivatives.qualified_op_name(f"ragged_dot of {x.shape} and {w.shape}")
    token = derivatives.second_order_guard(name, x, w)
    result: Array = _ragged_product(
        _Config(recipe, dtype, transposed, name, current_gradient_facts()),
        x,
        w,
        source,
        w_source,
        groups,
        dy_key,
        token,
    )
    return result


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


def _logical(w: Array, transposed: bool) -> Array:
    """Return matrices (groups, inputs, outputs)."""
    return _swap(w) if transposed else w


def _swap(w: Array) -> Array:
    return jnp.swapaxes(w, -1, -2)


def _tokens(recipe: Linear, groups: Groups, num_rows: int) -> PaddedTokens:
    """Return the padded token axis, in which all blocks of a recipe's operands are of one group."""
    specs = map(recipe.spec, ("x", "dy", "x_residual", "x_wgrad", "dy_wgrad"))
    return PaddedTokens.from_groups(groups, num_rows, alignment(*specs))


def _input_source(x: Array, groups: Groups, recipe: Linear, key: Array | None, input_facts: InputFacts) -> _Source:
    # Scales and codes of the whole array are not used: they may depend on rows outside of all groups.
    facts, side, residual_spec = input_facts.facts, input_side(recipe), recipe.spec("x_residual")
    recompute_rule, tokens = facts.recompute_rule, _tokens(recipe, groups, x.shape[0])
    if facts.row_source is not None and supports(facts.row_source[0], residual_spec, tokens):
        return _token_source(*facts.row_source, side, tokens, input_facts)
    if residual_spec is None:
        values = input_facts.get_or_compute((None, side.strategy, x.shape), lambda: lax.stop_gradient(x), None, None)
        return _Source(None, values if recompute_rule is None else _recompute_residual(facts, x))
    subkey = derive_key(key, residual_spec, "x_residual")

    def make_residual() -> QTensor:
        if facts.codes is not None and facts.codes[0] == residual_spec:
            codes = facts.codes[1]
        else:
            codes = to_bytes(quantize_rows(lax.stop_gradient(x), residual_spec, side.strategy, tokens, subkey))
        q = with_checkpoint_name(codes, INPUT)
        return q if recompute_rule is None else dataclasses.replace(q, scale=with_checkpoint_name(q.scale, PRODUCT_AUX))

    use = "groups of rows", residual_spec, side.strategy, x.shape
    codes: QTensor = input_facts.get_or_compute(use, make_residual, None if subkey is None else key)
    if recompute_rule is None or residual_spec.rounding == "stochastic":  # the codes depend on the key
        return _Source(codes, codes)
    return _Source(codes, _recompute_residual(facts, x))


def _token_source(x: Array, index: Array, side: Side, tokens: PaddedTokens, input_facts: InputFacts) -> _Source:
    """Return the source of rows that are tokens of `x` (tokens, inputs), which is quantized before."""
    spec = side.residual
    assert spec is not None
    use = "tokens of rows", spec, side.strategy, x.shape
    codes: TokenCodes = input_facts.get_or_compute(
        use,
        lambda: with_checkpoint_name(quantize_tokens(lax.stop_gradient(x), index, spec, side.strategy, tokens), INPUT),
        index,
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
    config: _Config, x: Array, w: Array, source: _Source, w_source: StepWeight, *operands: Any
) -> tuple[Array, _Residuals]:
    """`_forward`, if a backward pass follows."""
    w_source = w_source.quantized_for_gradient(_logical(lax.stop_gradient(w), config.transposed), config.recipe)
    return _forward(config, x, w, source, w_source, *operands)


def _forward(
    config: _Config,
    x: Array,
    w: Array,
    source: _Source,
    w_source: StepWeight,
    groups: Groups,
    key: Array | None,
    token: Array,
) -> tuple[Array, _Residuals]:
    recipe, side, w_side = config.recipe, input_side(config.recipe), weight_side(config.recipe)
    x_kind, w_kind = map(DtypeAndSharding.from_array, (x, w))
    x, w = lax.stop_gradient((x, w))
    x_operand: Operand = x
    tokens = _tokens(recipe, groups, x.shape[0])
    if source.codes is not None and side.residual == side.forward:
        x_operand = _rows_of(source.codes, tokens)
    elif side.forward is not None:
        x_operand = quantize_rows(x, side.forward, side.strategy, tokens)
    w = _logical(w, config.transposed)
    w_operand = w_source.forward(w, w_side)
    y = grouped_matmul(
        x_operand,
        w_operand,  # type: ignore[arg-type]
        groups,
        dtype=config.dtype,
        fast="forward" in recipe.fast_accumulation,
    )
    y = derivatives.differentiable_once(config.name, checkpoint_name(y, PRODUCT), token)
    w_residual = w_source.residual(w, w_operand, w_side)
    return y, _Residuals(source.residual, w_residual, groups, key, x_kind, w_kind, token)


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
    recipe = config.recipe
    tokens = _tokens(recipe, residuals.groups, dy.shape[0])
    dy_rows, dy_columns = _gradient_operands(recipe, dy, dy_facts, tokens, residuals.key)
    dx = grouped_matmul(
        dy_rows,
        residuals.w.operand(weight_side(recipe), None),
        residuals.groups,
        dtype=residuals.x_kind.dtype,
        fast="dgrad" in recipe.fast_accumulation,
    )
    x_columns, predicted = _input_columns(recipe, residuals, tokens, dx)
    pair = (dy_columns, x_columns) if config.transposed else (x_columns, dy_columns)
    dw = multiply_columns(*pair, tokens, dtype=residuals.w_kind.dtype, fast="wgrad" in recipe.fast_accumulation)
    if residuals.w.layout_policy is LayoutPolicy.BOTH_ALWAYS:
        # Compute dw now, not when the gradients of all turns are stacked: until then XLA would keep its operands.
        dx, dw = lax.optimization_barrier((dx, dw))
    return (dx, dw, None, None, None, None, None), predicted


def _gradient_operands(
    recipe: Linear, dy: Array, facts: ArrayFacts, tokens: PaddedTokens, key: Array | None
) -> tuple[Operand, TokenColumns]:
    """Return the output's gradient as dgrad and as wgrad read it."""
    spec, strategy, keys = recipe.spec("dy"), recipe.stateless_scaling("dy"), _split(key)
    if recipe.dy_wgrad == SAME and spec is not None:
        codes = None
        if facts.codes is not None and facts.codes[0] == spec:
            codes = facts.codes[1]
        elif facts.row_source is not None and supports(facts.row_source[0], spec, tokens):
            codes = quantize_tokens(*facts.row_source, spec, strategy, tokens).gather(tokens, rows=True, columns=True)
        if codes is not None:
            return codes  # type: ignore[no-any-return]
    rows: Operand = dy if spec is None else quantize_rows(dy, spec, strategy, tokens, keys[0])
    if recipe.dy_wgrad == SAME and isinstance(rows, QTensor) and spec is not None and spec.granularity in TRANSPOSABLE:
        return rows, transpose_rows(rows, spec, tokens)
    return rows, quantize_columns(dy, recipe.spec("dy_wgrad"), strategy, tokens, keys[1])


def _input_columns(recipe: Linear, residuals: _Residuals, tokens: PaddedTokens, dx: Array) -> tuple[TokenColumns, Any]:
    """Return the input as wgrad reads it, which has the shape of `dx`, and facts about cotangents that follow."""
    side, residual, dtype = input_side(recipe), residuals.x, residuals.x_kind.dtype
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
        return quantize_columns(codes, spec, side.strategy, tokens, dtype=dtype), predicted
    return quantize_columns(residual, side.backward, side.strategy, tokens), predicted


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
