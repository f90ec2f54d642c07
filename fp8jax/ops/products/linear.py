"""Linear layers, `dot_general` and `einsum` with their three matmuls in the formats of a recipe.

`scaled_linear` has a stateful scaling, whose state the caller holds.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import blocks, derivatives, formats
from fp8jax.core.recipe import SAME, Linear, Recipe
from fp8jax.core.scaling import Stateful, Threshold
from fp8jax.ops.autodiff.observations import Observation, current_layer_scope, observe
from fp8jax.ops.autodiff.residuals import NO_INPUT_FACTS, ArrayFacts, InputFacts
from fp8jax.ops.dispatch.sharding import (
    OutSharding,
    merge,
    merge_spec,
    product_sharding,
    reshape,
    reshard,
    spec_of,
    transpose_sharding,
)
from fp8jax.ops.products.operands import Input, fallback_input_source, input_source
from fp8jax.ops.products.product import Scales, output_spec, recipe_dot
from fp8jax.ops.products.weights import NO_CODES, FrozenWeight, QuantizedWeight, StepWeight
from fp8jax.recipes import linear_part

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def linear(
    x: Array,
    w: Array | FrozenWeight,
    *,
    recipe: Recipe | Linear | str,
    bias: Array | None = None,
    key: Array | None = None,
    quantized: QuantizedWeight | None = None,
    out_sharding: OutSharding = None,
) -> Array:
    """Returns x @ w + bias with the matmuls of a recipe, differentiable in x, w and bias.

    Args:
        x: (..., inputs), any floating dtype.
        w: (inputs, outputs), or a weight of `fp8jax.freeze`, which has no gradient.
        recipe: a `Recipe`, its part `Linear`, or a preset's name.
        bias: (outputs,), added in the dtype of the result.
        key: PRNG key for recipes that round stochastically. Inside `jax.shard_map` fold the index of the replica
            into it (`jax.lax.axis_index`): with one key, rounding errors do not average out over replicas.
        quantized: result of `quantize_weight(w)`; None quantizes `w` in this call.
        out_sharding: sharding of the result on a mesh with Explicit axes, as of `jax.lax.dot_general`; None follows
            JAX's own rule.

    Returns:
        (..., outputs) in the dtype of `x`. Each gradient has the dtype of its argument.

    Raises:
        ValueError: shapes do not match, or a key is missing. `quantized` is of another shape or recipe. A frozen weight
            has integer codes and the recipe floating-point ones, or vice versa.
    """
    out_spec = output_spec(x, w, out_sharding)
    return recipe_dot(
        Input(flatten_tokens(x, w), x),
        w,
        require_stateless(recipe),
        key,
        step_weight=StepWeight.from_codes(quantized),
        out_spec=out_spec,
        bias=bias,
    )


def dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    recipe: Recipe | Linear | str,
    key: Array | None = None,
    quantized: QuantizedWeight | None = None,
    out_sharding: OutSharding = None,
    input_facts: InputFacts = NO_INPUT_FACTS,
    bias: Array | None = None,
    step_weight: StepWeight = NO_CODES,
    split_sizes: tuple[int, ...] | None = None,
) -> Any:
    """`jax.lax.dot_general` with the matmuls of a recipe: `lhs` is the input, `rhs` the weight.

    Args:
        lhs: input, any rank; its free axes are tokens.
        rhs: weight, any rank; its free axes are outputs.
        dimension_numbers: as in `jax.lax.dot_general`. Each batch element has its own scales.
        precision: None, or JAX's default in another spelling.
        preferred_element_type: dtype of the result; None means that of `lhs`.
        recipe, key, out_sharding: as of `linear`.
        quantized: result of `quantize_weight` for `rhs` as a matrix (inputs, outputs), or as (batch, inputs, outputs)
            with one batch axis.
        input_facts: facts about `lhs` from `fp8jax.transform`: how to recompute it, and its codes.
        bias: (outputs,) for all free axes of `rhs`, added in the dtype of `lhs`; without batch axes.
        step_weight: as of `recipe_dot`, in place of `quantized`.
        split_sizes: as of `recipe_dot`; `rhs` then has one free axis and no batch axes.

    Returns:
        The axes of `jax.lax.dot_general`: batch, free axes of `lhs`, free axes of `rhs`. A tuple with `split_sizes`.

    Raises:
        ValueError: `precision` is not JAX's default, or `quantized` does not fit.
        ShardingTypeError of JAX: as `jax.lax.dot_general`.
    """
    linear_recipe = require_stateless(recipe)
    # Neither the products nor the saved input are quantized: the dot_general is JAX's.
    if not linear_recipe.is_quantized and linear_recipe.x_residual in (SAME, None):
        y = lax.dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding)
        n_outputs = rhs.ndim - len(dimension_numbers[0][1]) - len(dimension_numbers[1][1])
        return y if bias is None else y + bias.astype(y.dtype).reshape(y.shape[y.ndim - n_outputs :])
    if not is_default_precision(precision):
        raise ValueError(
            f"a quantized product does not support precision={precision!r}; set it to None, or do not quantize this "
            "product"
        )
    out_spec = product_sharding(lhs, rhs, dimension_numbers, out_sharding)
    (lhs_contract, _), (lhs_batch, _) = dimension_numbers
    left, right = to_matmul_order(lhs, rhs, dimension_numbers)
    n, c = len(lhs_batch), len(lhs_contract)
    batch, tokens, outputs = left.shape[:n], left.shape[n : left.ndim - c], right.shape[n + c :]
    dtype = preferred_element_type or lhs.dtype
    first = [n] if batch else []  # batch axes become one axis, which is left out if there are none
    x, w = merge(left, *first, len(tokens), c), merge(right, *first, c, len(outputs))
    if batch:
        if bias is not None:
            raise ValueError(f"a bias is not supported with batch axes {lhs_batch}")
        if quantized is None and step_weight.forward_codes is not None and step_weight.dgrad_codes is not None:
            quantized = QuantizedWeight(step_weight.forward_codes, step_weight.dgrad_codes)
        if quantized is not None and (len(batch) > 1 or quantized.dgrad.codes.ndim != 3):
            raise ValueError(f"a quantized weight is not supported with batch axes {lhs_batch}")
        keys = None if key is None else reshard(jax.random.split(key, x.shape[0]), spec_of(x)[:1], x)
        batched_spec = (merge_spec(out_spec, (len(batch), len(tokens), len(outputs))) or (None,))[1:] or None
        layout_policy = step_weight.layout_policy

        def multiply(x: Array, w: Array, key: Array | None, quantized: QuantizedWeight | None) -> Any:
            codes = StepWeight.from_codes(quantized, layout_policy)
            return recipe_dot(Input(x), w, linear_recipe, key, step_weight=codes, out_spec=batched_spec)

        y = jax.vmap(multiply)(x, w, keys, quantized)
    else:
        # Products share the codes of an array, whatever axes they contract. So they must all contract the last axes.
        is_shareable = list(lhs_contract) == list(range(len(tokens), lhs.ndim))
        differentiates_source = is_shareable and c == 1
        matrix_spec = merge_spec(
            out_spec, (*([1] * len(tokens) if differentiates_source else [len(tokens)]), len(outputs))
        )
        if quantized is not None:
            step_weight = StepWeight.from_codes(quantized)
        if w is not rhs:
            step_weight = step_weight.with_step(
                lambda w: merge(weight_to_matmul_order(w, dimension_numbers), c, len(outputs)),
                values=rhs,
                transposed=rhs.ndim == 2 and not step_weight.transposed,
            )
        y = recipe_dot(
            Input(x, lhs, differentiates_source, input_facts)
            if is_shareable
            else Input(x, None, differentiates_source),
            w,
            linear_recipe,
            key,
            step_weight=step_weight,
            out_spec=matrix_spec,
            bias=bias,
            split_sizes=split_sizes,
        )

    def restore_axes(y: Array, outputs: Sequence[int] = outputs) -> Array:
        y = reshape(y, (*batch, *tokens, *outputs), out_spec).astype(dtype)
        return derivatives.check_differentiable_dtypes("dot_general", y, lhs, rhs)

    return restore_axes(y) if split_sizes is None else tuple(restore_axes(part, part.shape[-1:]) for part in y)


def to_matmul_order(lhs: Array, rhs: Array, dimension_numbers: DimensionNumbers) -> tuple[Array, Array]:
    """The operands with their axes in the order of matrices.

    Returns:
        The input (batch, free, contracted axes) and the weight (batch, contracted, free axes).
    """
    (contract, _), (batch, _) = dimension_numbers
    free = [i for i in range(lhs.ndim) if i not in (*contract, *batch)]
    return lhs.transpose(*batch, *free, *contract), weight_to_matmul_order(rhs, dimension_numbers)


def weight_to_matmul_order(rhs: Array, dimension_numbers: DimensionNumbers) -> Array:
    """The weight of `to_matmul_order`."""
    (_, contract), (_, batch) = dimension_numbers
    free = [i for i in range(rhs.ndim) if i not in (*contract, *batch)]
    return rhs.transpose(*batch, *contract, *free)


def einsum(
    subscripts: str,
    lhs: Array,
    rhs: Array,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    recipe: Recipe | Linear | str,
    key: Array | None = None,
    out_sharding: OutSharding = None,
) -> Array:
    """`jnp.einsum` of two operands with the matmuls of a recipe: `lhs` is the input, `rhs` the weight.

    Args:
        subscripts: as in `jnp.einsum`, such as "btd,dhc->bthc" or "...d,dh->...h", with an explicit output.
        lhs: input.
        rhs: weight.
        precision, preferred_element_type: as of `dot_general`.
        recipe, key, out_sharding: as of `linear`.

    Raises:
        ValueError: the subscripts have another form, repeat an index in an operand, or sum over an index of one operand
            only; or as `dot_general`.
        ShardingTypeError of JAX: as `jax.lax.dot_general`.
    """
    a, b, out = _parse_subscripts(subscripts, lhs.ndim, rhs.ndim)
    batch = [i for i in a if i in b and i in out]
    contract = [i for i in a if i in b and i not in out]
    numbers: Any = tuple(tuple([t.index(i) for i in axes] for t in (a, b)) for axes in (contract, batch))
    order = [*batch, *(i for i in a if i not in b), *(i for i in b if i not in a)]
    lhs_rhs_sharding = transpose_sharding(out_sharding, [out.index(i) for i in order])
    y: Array = dot_general(
        lhs, rhs, numbers, precision, preferred_element_type, recipe=recipe, key=key, out_sharding=lhs_rhs_sharding
    )
    return y.transpose([order.index(i) for i in out])


def _parse_subscripts(subscripts: str, *ndims: int) -> tuple[str, str, str]:
    """The indices of both operands and of the output, without an ellipsis."""
    inputs, arrow, out = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) == 2 and "..." in inputs:
        longest = max(n - len(t) + 3 for n, t in zip(ndims, terms, strict=True) if "..." in t)
        names = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in subscripts][: max(longest, 0)]
        ellipses = ["".join(names[longest - (n - len(t) + 3) :]) for n, t in zip(ndims, terms, strict=True)]
        terms = [t.replace("...", dots) for t, dots in zip(terms, ellipses, strict=True)]
        out = out.replace("...", "".join(names))
    if not arrow or len(terms) != 2 or any(len(set(t)) != len(t) or "." in t for t in (*terms, out)):
        raise ValueError(
            f"einsum expects two operands with each index at most once, and an explicit output, got {subscripts!r}"
        )
    a, b = terms
    lone_indices = [i for i in (*a, *b) if i not in out and not (i in a and i in b)]
    if lone_indices or set(out) - {*a, *b} or (len(a), len(b)) != ndims:
        raise ValueError(f"einsum {subscripts!r} of operands with {ndims} axes is not a batched matrix product")
    return a, b, out


def linears(
    x: Array,
    weights: Sequence[Array],
    *,
    recipe: Recipe | Linear | str,
    facts: ArrayFacts,
    key: Array | None = None,
    quantized: Sequence[QuantizedWeight] | None = None,
    out_sharding: OutSharding = None,
) -> tuple[Array, ...]:
    """`linear` of one input with several weights, which share the codes of the input.

    Args:
        facts: what `x` is made from.
        quantized: results of `quantize_weight` for each weight; None quantizes them in this call.
        recipe, key, out_sharding: as of `linear`.

    Returns:
        (..., outputs) for each weight.

    Raises:
        ValueError: `quantized` has another length than `weights`; or as `linear`.
    """
    if quantized is not None and len(quantized) != len(weights):
        raise ValueError(
            f"{len(weights)} weights were passed with {len(quantized)} quantized weights; pass one for each"
        )
    weight_codes: Sequence[QuantizedWeight | None] = quantized or [None] * len(weights)
    linear_recipe, results, x_source = require_stateless(recipe), [], None
    for w, codes in zip(weights, weight_codes, strict=True):
        shared_input = Input(flatten_tokens(x, w), x, input_facts=InputFacts(facts))
        x_source = x_source or input_source(shared_input, linear_recipe, key)
        y = recipe_dot(
            shared_input,
            w,
            linear_recipe,
            key,
            x_source=x_source,
            step_weight=StepWeight.from_codes(codes),
            out_spec=output_spec(x, w, out_sharding),
        )
        results.append(y)
    return tuple(results)


_SAMPLE = 64  # channels, of all tokens: the first tokens of sequences may be equal


def key_from_data(x: Array) -> Array:
    """A PRNG key derived from the first channels of an array, for stochastic rounding where no key can be passed.

    The noise depends on the data alone. It needs no state, repeats exactly, and differs between steps and layers.
    Inside `jax.shard_map` each device has its own key, so that rounding errors average out over replicas.
    """

    def hash_bits(x: Array) -> tuple[Array]:
        bits = formats.bitcast(x[..., :_SAMPLE].astype(jnp.float32), jnp.uint32)
        # Mix the bits before the sum. Without that, bf16 values would give only 2^16 keys, and -x the key of x.
        bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
        return (jnp.sum(bits ^ (bits >> 15), dtype=jnp.uint32),)

    return jax.random.key(blocks.on_logical_array(hash_bits, lax.stop_gradient(x), out_shapes=[()])[0])


def flatten_tokens(x: Array, w: Array | FrozenWeight) -> Array:
    """The input (..., inputs) as a matrix (tokens, inputs); raises ValueError if it does not fit the weight."""
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"linear expects (..., inputs) and (inputs, outputs), got {x.shape} and {w.shape}")
    return merge(x, x.ndim - 1, 1)


def is_default_precision(precision: Any) -> bool:
    """Whether a precision is JAX's default.

    Its spellings are None, `lax.Precision.DEFAULT`, its names ("default", "fastest", "bfloat16"), a pair of these, and
    `lax.DotAlgorithmPreset.DEFAULT`.
    """
    if isinstance(precision, (tuple, list)):
        return len(precision) == 2 and all(map(is_default_precision, precision))
    if isinstance(precision, str):
        return precision in ("default", "fastest", "bfloat16")
    return precision in (None, lax.Precision.DEFAULT, lax.DotAlgorithmPreset.DEFAULT)


def require_stateless(recipe: Recipe | Linear | str) -> Linear:
    """The `Linear` of a recipe; raises ValueError if its scaling needs a state."""
    linear_recipe = linear_part(recipe)
    for operand, strategy in linear_recipe.stateful_strategies.items():
        if strategy.collects_stats:
            kind = linear_recipe.scaling_name(operand)
            raise ValueError(
                f"{kind} scaling keeps a state; use fp8jax.scaled_linear, scaled_ragged_dot or scaling='current'"
            )
    return linear_recipe


class ScalingState(NamedTuple):
    """The scaling state of one linear layer, fp32; None for operands without a state. May have leading layer axes.

    Under delayed scaling each field is an amax history, (history,), newest first.
    """

    x: Array | None = None
    w: Array | None = None
    dy: Array | None = None


class ScalingStats(NamedTuple):
    """The statistics of one call of a linear layer, fp32; None for operands without any.

    Under delayed scaling they are amax. `fp8jax.core.scaling.Stateful.merge_stats` merges those of the calls of a step:
    amax by maximum, counts by sum.
    """

    x: Array | None = None
    w: Array | None = None
    dy: Array | None = None


def init_scaling(recipe: Recipe | Linear | str, w: Array | None = None) -> ScalingState:
    """The state of one linear layer before the first step.

    Args:
        recipe: a recipe with a stateful scaling.
        w: the weight, (inputs, outputs), for scalings that measure the initial weight.

    Raises:
        ValueError: the recipe's scaling has no state.
    """
    state = ScalingState()
    for operand, strategy in stateful_strategies(recipe).items():
        state = state._replace(**{operand: strategy.init(w if operand == "w" else None)})
    return state


def scaled_linear(
    x: Array,
    w: Array,
    state: ScalingState,
    amax_slot: Array | None = None,
    *,
    recipe: Recipe | Linear | str,
    bias: Array | None = None,
    key: Array | None = None,
    quantized: QuantizedWeight | None = None,
    out_sharding: OutSharding = None,
    input_facts: InputFacts = NO_INPUT_FACTS,
    step_weight: StepWeight = NO_CODES,
) -> tuple[Array, ScalingStats]:
    """`linear` with a stateful scaling.

    Args:
        x: (..., inputs).
        w: (inputs, outputs).
        state: of `init_scaling` or `update_scaling`; no gradient flows to it. Layers that share the codes of an input
            (`input_facts`) use the scale of the first layer's state.
        amax_slot: fp32 scalar of any value, another one for each call. Its cotangent is the amax of the output's
            gradient. JAX sums cotangents: a slot used in two calls would receive the sum of both. None if the
            gradient's scaling has no state.
        recipe: a recipe with a stateful scaling, such as "delayed".
        quantized: result of `quantize_weight` under the scale that `weight_scale` returns; None quantizes `w` here.
        bias, key, out_sharding: as of `linear`.
        input_facts, step_weight: as of `dot_general`.

    Returns:
        The output, and the statistics of `x` and `w`. Their `dy` is 0; use the cotangent of the slot instead. Pass the
        merged statistics of a step to `update_scaling`.

    Raises:
        ValueError: shapes do not match, the recipe's scaling has no state, or a slot or a key is missing.
    """
    strategies, linear_recipe, matrix = stateful_strategies(recipe), linear_part(recipe), flatten_tokens(x, w)
    values = dict(zip(("x", "w"), lax.stop_gradient((matrix, w)), strict=True))
    state = lax.stop_gradient(state)
    scales: Scales | None = None
    for name, value in values.items():
        if name in strategies and not strategies[name].is_threshold:
            scales = (scales or Scales())._replace(**{name: _scale(name, value, state, linear_recipe)})
    if "dy" in strategies:
        if amax_slot is None:
            raise ValueError(
                f"{linear_recipe.scaling} scaling observes gradients; pass amax_slot=jnp.zeros([]) to scaled_linear"
            )
        dy_amax = strategies["dy"].expected_amax(operand_state(state, "dy"))
        scales = (scales or Scales())._replace(dy_amax=dy_amax, amax_slot=amax_slot)
    step_weight = step_weight if quantized is None else StepWeight.from_codes(quantized)
    out_spec = output_spec(x, w, out_sharding)
    stats: dict[str, Array] = {}
    threshold, x_source = strategies.get("x"), None
    if isinstance(threshold, Threshold):
        x_source = fallback_input_source(matrix, linear_recipe, key, operand_state(state, "x"), input_facts)
    y = recipe_dot(
        Input(matrix, x, input_facts=input_facts),
        w,
        linear_recipe,
        key,
        x_source=x_source,
        scales=scales,
        step_weight=step_weight,
        out_spec=out_spec,
        bias=bias,
    )
    if isinstance(threshold, Threshold) and x_source is not None:
        layer_scope = current_layer_scope(f"linear {'x'.join(map(str, w.shape))}")
        y = observe(y, layer_scope, "x", Observation.from_scalars({"fallback_threshold": operand_state(state, "x")}))
        stats["x"] = threshold.count_fallbacks(x_source.fallback_tensor.fallback_mask)
    stats |= {
        n: strategies[n].collect_stats(operand_state(state, n), values[n])
        for n in values
        if collects_stats(linear_recipe, n) and n not in stats
    }
    if collects_stats(linear_recipe, "dy"):
        stats["dy"] = jnp.zeros((), jnp.float32)
    return y, ScalingStats(**stats)


def weight_scale(w: Array, state: ScalingState, *, recipe: Recipe | Linear | str) -> Array | None:
    """The scale of a weight in this step, an fp32 scalar; None if the scale is computed from the weight itself.

    Raises:
        ValueError: the recipe's scaling has no state.
    """
    linear_recipe = linear_part(recipe)
    if "w" in stateful_strategies(recipe):
        return _scale("w", lax.stop_gradient(w), lax.stop_gradient(state), linear_recipe)
    return None


def update_scaling(state: ScalingState, stats: ScalingStats, recipe: Recipe | Linear | str) -> ScalingState:
    """The state after a step, of one linear layer, or of stacked ones with leading axes on every array.

    Args:
        state: before the step.
        stats: of the whole step, merged over its microbatches and replicas.
        recipe: a recipe with a stateful scaling.
    """
    new = {}
    for operand, strategy in stateful_strategies(recipe).items():
        new[operand], operand_stats = operand_state(state, operand), getattr(stats, operand)
        if strategy.collects_stats:
            update = strategy.update
            for _ in range(jnp.ndim(operand_stats) - len(strategy.stats_shape)):
                update = jax.vmap(update)
            new[operand] = update(new[operand], operand_stats)
    return ScalingState(**new)


def collects_stats(linear_recipe: Linear, operand: str) -> bool:
    """Whether calls of a linear layer return statistics of this operand."""
    strategy = linear_recipe.stateful_strategies.get(operand)
    return strategy is not None and strategy.collects_stats


def _scale(name: str, value: Array, state: ScalingState, linear_recipe: Linear) -> Array:
    fmt = formats.get(linear_recipe.quantized_spec(name).format)
    return linear_recipe.stateful_strategies[name].scale(operand_state(state, name), value, fmt)


def operand_state(state: ScalingState, operand: str) -> Array:
    value = getattr(state, operand)
    if value is None:
        raise ValueError(
            f"the scaling of {operand} keeps a state, but none was passed; pass the result of init_scaling"
        )
    return value


def stateful_strategies(recipe: Recipe | Linear | str) -> dict[str, Stateful]:
    linear_recipe = linear_part(recipe)
    if not linear_recipe.stateful_strategies:
        raise ValueError(
            f"the recipe's linear.scaling is {linear_recipe.scaling!r}, which keeps no state, not 'delayed'"
        )
    return linear_recipe.stateful_strategies
