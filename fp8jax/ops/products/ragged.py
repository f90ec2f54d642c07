"""Ragged products, of groups of tokens with a matrix each, as in mixtures of experts, under a recipe.

    y  = x[rows of g] @ w[g]       "forward"
    dx = dy[rows of g] @ w[g].T    "dgrad"
    dw[g] = x[rows of g].T @ dy    "wgrad"

Rows in no group may hold anything, NaN too, and count as zeros. No scale spans two groups. The forward product and
dgrad read codes of rows. Wgrad reads transposed codes in an axis in which each group starts at a multiple of 128
(`fp8jax.core.groups.PaddedTokens`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from fp8jax.core import blocks, derivatives
from fp8jax.core.groups import Groups
from fp8jax.core.recipe import Linear, Recipe
from fp8jax.ops.autodiff.residuals import NO_INPUT_FACTS, InputFacts
from fp8jax.ops.dispatch.sharding import explicit_mesh, spec_of
from fp8jax.ops.products.linear import ScalingState, ScalingStats, require_stateless, stateful_strategies
from fp8jax.ops.products.ragged_rows import multiply_rows
from fp8jax.ops.products.ragged_states import GroupScaling
from fp8jax.ops.products.ragged_tokens import RaggedConfig, multiply_tokens
from fp8jax.ops.products.weights import NO_CODES, FrozenWeight, QuantizedWeight, StepWeight
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
        preferred_element_type: dtype of the result; None means that of `x`.
        quantized: result of `fp8jax.quantize_weight` for the matrices (groups, inputs, outputs); None quantizes `w` in
            this call.
        step_weight: as of `fp8jax.ops.products.product.recipe_dot`, in place of `quantized`.
        input_facts: as in `fp8jax.dot_general`.

    Returns:
        (tokens, outputs), or (groups, m, n) for a product along tokens. Gradients have the dtypes of `x` and `w`.

    Raises:
        ValueError: shapes do not match, a key is missing, `dimension_numbers` are of another form, or the recipe's
            scaling observes operands. Or the recipe rotates operands with one scale, or has "nvblock" codes of tokens.
        TypeError: `group_sizes` are not an integer array.
    """
    static = require_stateless(recipe), dimension_numbers, preferred_element_type
    arrays = x, w, group_sizes, group_offset, key, None, None
    return _multiply(*static, input_facts, quantized, step_weight, *arrays)[0]


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
        quantized: as in `ragged_dot`, under the scales of the state.

    Returns:
        The output, and the statistics of `x` and `w` as of `fp8jax.scaled_linear`, with a leading axis of groups. For a
        group without rows the statistics of `x` are 0, so its state does not change.

    Raises:
        ValueError: as `ragged_dot`; or the recipe's scaling has no state, or a slot is missing.
        TypeError: `group_sizes` are not an integer array.
    """
    linear_recipe = linear_part(recipe)
    if "dy" in stateful_strategies(recipe) and amax_slot is None:
        raise ValueError(
            f"{linear_recipe.scaling} scaling observes gradients; pass amax_slot=jnp.zeros(groups) to scaled_ragged_dot"
        )
    static = linear_recipe, dimension_numbers, preferred_element_type
    arrays = x, w, group_sizes, group_offset, key, lax.stop_gradient(state), amax_slot
    return _multiply(*static, input_facts, quantized, step_weight, *arrays)


def _multiply(
    recipe: Linear, numbers: lax.RaggedDotDimensionNumbers | None, dtype: DTypeLike | None, input_facts: InputFacts,
    quantized: QuantizedWeight | None, step_weight: StepWeight, x: Any, w: Any, group_sizes: Any, *arrays: Any,
) -> tuple[Array, ScalingStats]:  # fmt: skip
    """Return the result of `ragged_dot`, and the statistics of `scaled_ragged_dot`, empty without a state.

    `arrays` are the group_offset, the key, the state and the slot.
    """
    form, dtype = _Form.parse(numbers, x, w), jnp.dtype(dtype or x.dtype)
    step_weight = step_weight if quantized is None else StepWeight.from_codes(quantized)
    group_offset, _, state, _ = arrays
    if form.contracts_tokens and state is not None:
        raise ValueError("a product that contracts tokens has no weight and no scaling state; use fp8jax.ragged_dot")
    if (reason := unsupported_ragged_reason(recipe)) is not None:
        raise ValueError(f"ragged_dot does not support the recipe: {reason}; use another, such as 'mxfp8'")
    if isinstance(w, FrozenWeight) and form.transposed:
        w, form = w.T, form._replace(transposed=False)
    x, w = form.arrange(x, w)
    sizes_dtype = getattr(group_sizes, "dtype", None)
    if sizes_dtype is None or not jnp.issubdtype(sizes_dtype, jnp.integer):
        found = type(group_sizes).__name__ if sizes_dtype is None else sizes_dtype
        raise TypeError(f"ragged_dot expects an integer array as group_sizes, got {found}; use jnp.asarray")
    form.check(x, w, group_sizes, group_offset)
    facts, mesh, sharing_keys = input_facts, explicit_mesh(x, w), (group_sizes, group_offset)

    def multiply(x: Array, w: Any, group_sizes: Array, step_weight: StepWeight, *arrays: Any) -> Any:
        group_offset, key, state, amax_slot = arrays
        offset = None if group_offset is None else jnp.asarray(group_offset, jnp.int32).reshape(())
        groups = Groups.from_sizes(group_sizes, x.shape[0], offset, None if form.contracts_tokens else w.shape[0])
        name = derivatives.qualified_op_name(f"ragged_dot of {x.shape} and {w.shape}")
        config = RaggedConfig(recipe, dtype, form.transposed, name)
        if form.contracts_tokens:
            return multiply_tokens(config, x, w, groups, key), ScalingStats()
        scaling = None if state is None else GroupScaling.from_state(x, w, groups, recipe, state, amax_slot)
        y, counts = multiply_rows(config, x, w, groups, key, step_weight, scaling, facts, sharing_keys)
        return y, ScalingStats() if scaling is None else scaling.stats(counts)

    if mesh is not None:
        # The trace of a call with Auto axes is not shared with other calls, and reads no arrays but its operands.
        facts = InputFacts(facts.facts._replace(codes=None, row_source=None))
        out = NamedSharding(mesh, PartitionSpec(*form.out_spec(spec_of(x), _weight_spec(w))))
        multiply = jax.sharding.auto_axes(
            multiply, axes=tuple(mesh.explicit_axes), out_sharding=(out, NamedSharding(mesh, PartitionSpec()))
        )
    y, stats = multiply(x, w, group_sizes, step_weight, *arrays)
    trained_w = None if isinstance(w, FrozenWeight) else w
    return derivatives.check_differentiable_dtypes("ragged_dot", y, x, trained_w), stats


def _weight_spec(w: Array | FrozenWeight) -> tuple[Any, ...]:
    """Return the sharding of (groups, inputs, outputs), or of an array as it is."""
    if not isinstance(w, FrozenWeight):
        return spec_of(w)
    groups, first, second = spec_of(w.codes)
    return (groups, first, second) if w.transposed else (groups, second, first)


def unsupported_ragged_reason(recipe: Linear) -> str | None:
    """Return why a recipe has no ragged products, or None."""
    fields = ("x", "dy", "x_residual", "x_wgrad", "dy_wgrad")
    specs = {field: spec for field in fields if (spec := recipe.spec(field)) is not None}
    for field, spec in specs.items():
        if spec.granularity == "nvblock":
            return f"{field} is {spec}, but grouped matmuls support square blocks of scales for weights only"
        if recipe.rotation is not None and field.endswith("_wgrad") and spec.granularity == "tensor":
            return f"rotation={recipe.rotation} before {field}={spec} is not built for grouped matmuls"
    return None


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
            "ragged_dot expects (tokens, inputs) and (groups, inputs, outputs) or (groups, outputs, inputs), or "
            f"contracts the tokens of (tokens, m) and (tokens, n), got {numbers} of {x.shape} and {w.shape}. Use "
            "jax.vmap for batch dimensions"
        )

    def arrange(self, x: Array, w: Any) -> tuple[Array, Any]:
        """Return the operands with their axes in the order of this form."""
        return x.T if self.x_transposed else x, w.T if self.w_transposed else w

    def check(self, x: Array, w: Array | FrozenWeight, group_sizes: Array, group_offset: Any) -> None:
        """Raise ValueError if shapes do not match."""
        sizes, shapes = group_sizes.shape, f"{x.shape}, {w.shape} and {group_sizes.shape}"
        if self.contracts_tokens:
            if x.ndim != 2 or w.ndim != 2 or x.shape[0] != w.shape[0] or len(sizes) != 1:
                raise ValueError(f"ragged_dot contracts (tokens, m) and (tokens, n) in groups (groups,), got {shapes}")
            if group_offset is not None:
                raise ValueError("ragged_dot along tokens does not support group_offset; pass only the group sizes")
            return
        layout = "(groups, outputs, inputs)" if self.transposed else "(groups, inputs, outputs)"
        is_matching = x.ndim == 2 and w.ndim == 3 and x.shape[1] == w.shape[2 if self.transposed else 1]
        if not is_matching or len(sizes) != 1 or (sizes != w.shape[:1] and group_offset is None) or sizes < w.shape[:1]:
            raise ValueError(f"ragged_dot expects (tokens, inputs), {layout} and (groups,), got {shapes}")
        if group_offset is not None and jnp.size(group_offset) != 1:
            raise ValueError(f"group_offset must be a scalar integer, got an array of shape {jnp.shape(group_offset)}")

    def out_spec(self, x_spec: tuple[Any, ...], w_spec: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the sharding of the result on Explicit axes. An axis shards one dimension."""
        if self.contracts_tokens:
            return (None, *_distinct(x_spec[1], w_spec[1]))
        return _distinct(x_spec[0], w_spec[1 if self.transposed else 2])


def _distinct(first: Any, second: Any) -> tuple[Any, Any]:
    rest = tuple(name for name in blocks.spec_entry_axes(second) if name not in blocks.spec_entry_axes(first))
    return first, rest or None
