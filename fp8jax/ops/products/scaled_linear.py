"""Linear layers with a stateful scaling, whose state the caller holds."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core import formats
from fp8jax.core.recipe import Linear, Recipe
from fp8jax.core.scaling import Stateful, Threshold
from fp8jax.ops.autodiff.residuals import NO_INPUT_FACTS, InputFacts
from fp8jax.ops.dispatch.sharding import OutSharding
from fp8jax.ops.products.linear import flatten_tokens, output_spec
from fp8jax.ops.products.operands import Input, fallback_input_source
from fp8jax.ops.products.product import Scales, recipe_dot, recipe_dot_from_source
from fp8jax.ops.products.weights import NO_CODES, QuantizedWeight, StepWeight
from fp8jax.recipes import linear_part


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
        w: the weight, (inputs, outputs), for scalings that measure it at the start.

    Raises:
        ValueError: the recipe's scaling has no state.
    """
    state = ScalingState()
    for operand, strategy in _stateful_strategies(recipe).items():
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
    weight: StepWeight = NO_CODES,
) -> tuple[Array, ScalingStats]:
    """`linear` with a stateful scaling.

    Args:
        x: (..., inputs).
        w: (inputs, outputs).
        state: of `init_scaling` or `update_scaling`; no gradient flows to it. Layers that share the codes of an input
            (`input_facts`) use the scale of the first layer's state.
        amax_slot: fp32 scalar of any value, another one for each call. Its cotangent is the amax of the output's
            gradient. JAX sums cotangents: a slot of two calls would get the sum of both. None if the gradient's scaling
            has no state.
        recipe: a recipe with a stateful scaling, such as "delayed".
        quantized: result of `quantize_weight` under the scale that `weight_scale` returns; None quantizes `w` here.
        bias, key, out_sharding: as of `linear`.
        input_facts, weight: as of `dot_general`.

    Returns:
        The output, and the statistics of `x` and `w`. Their `dy` is 0: the cotangent of the slot takes its place. Pass
        the merged statistics of a step to `update_scaling`.

    Raises:
        ValueError: shapes do not match, the recipe's scaling has no state, or a slot or a key is missing.
    """
    strategies, linear_recipe, matrix = _stateful_strategies(recipe), linear_part(recipe), flatten_tokens(x, w)
    values = dict(zip(("x", "w"), lax.stop_gradient((matrix, w)), strict=True))
    state = lax.stop_gradient(state)
    scales: Scales | None = None
    for name, value in values.items():
        if name in strategies and not strategies[name].is_threshold:
            scales = (scales or Scales())._replace(**{name: _scale(name, value, state, linear_recipe)})
    if "dy" in strategies:
        if amax_slot is None:
            raise ValueError(
                f"{linear_recipe.scaling} scaling observes gradients: give scaled_linear amax_slot=jnp.zeros([])"
            )
        dy_amax = strategies["dy"].expected_amax(_operand_state(state, "dy"))
        scales = (scales or Scales())._replace(dy_amax=dy_amax, amax_slot=amax_slot)
    weight = weight if quantized is None else StepWeight.from_codes(quantized)
    out_spec = output_spec(x, w, out_sharding)
    stats: dict[str, Array] = {}
    threshold = strategies.get("x")
    if isinstance(threshold, Threshold):
        value, x_source = fallback_input_source(matrix, linear_recipe, key, x, _operand_state(state, "x"), input_facts)
        y = recipe_dot_from_source(
            value,
            x_source,
            w,
            linear_recipe,
            key,
            scales=scales,
            weight=weight,
            out_spec=out_spec,
            bias=bias,
        )
        stats["x"] = threshold.count_fallbacks(x_source.fallback_tensor.fallback_mask)
    else:
        y = recipe_dot(
            Input(matrix, x, input_facts=input_facts),
            w,
            linear_recipe,
            key,
            scales=scales,
            weight=weight,
            out_spec=out_spec,
            bias=bias,
        )
    stats |= {
        n: strategies[n].collect_stats(_operand_state(state, n), values[n])
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
    return (
        _scale("w", lax.stop_gradient(w), lax.stop_gradient(state), linear_recipe)
        if "w" in _stateful_strategies(recipe)
        else None
    )


def update_scaling(state: ScalingState, stats: ScalingStats, recipe: Recipe | Linear | str) -> ScalingState:
    """The state after a step, of one linear layer, or of stacked ones with leading axes on every array.

    Args:
        state: before the step.
        stats: of the whole step, merged over its microbatches and replicas.
        recipe: a recipe with a stateful scaling.
    """
    new = {}
    for operand, strategy in _stateful_strategies(recipe).items():
        operand_state, operand_stats = _operand_state(state, operand), getattr(stats, operand)
        if strategy.collects_stats:
            update = strategy.update
            for _ in range(jnp.ndim(operand_stats) - len(strategy.stats_shape)):
                update = jax.vmap(update)
            operand_state = update(operand_state, operand_stats)
        new[operand] = operand_state
    return ScalingState(**new)


def collects_stats(linear_recipe: Linear, operand: str) -> bool:
    """Whether calls of a linear layer return statistics of this operand."""
    strategy = linear_recipe.states.get(operand)
    return strategy is not None and strategy.collects_stats


def _scale(name: str, value: Array, state: ScalingState, linear_recipe: Linear) -> Array:
    spec = linear_recipe.spec(name)
    assert spec is not None
    return linear_recipe.states[name].scale(_operand_state(state, name), value, formats.get(spec.format))


def _operand_state(state: ScalingState, operand: str) -> Array:
    value = getattr(state, operand)
    if value is None:
        raise ValueError(f"the scaling of {operand} keeps a state, and none is given: take that of init_scaling")
    return value


def _stateful_strategies(recipe: Recipe | Linear | str) -> dict[str, Stateful]:
    linear_recipe = linear_part(recipe)
    if not linear_recipe.states:
        raise ValueError(
            f"the recipe's linear.scaling is {linear_recipe.scaling!r}, which keeps no state, not 'delayed'"
        )
    return linear_recipe.states
