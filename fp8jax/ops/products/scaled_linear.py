"""Linear layers with a scaling that keeps a state, which the caller holds."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core import formats
from fp8jax.core.recipe import Linear, Recipe
from fp8jax.core.scaling import Stateful, Threshold
from fp8jax.ops.autodiff.residuals import NO_INPUT_FACTS, InputFacts, StoredWeight
from fp8jax.ops.dispatch.sharding import OutSharding
from fp8jax.ops.products.linear import flatten_tokens, output_spec
from fp8jax.ops.products.operands import Input, fallback_input_source
from fp8jax.ops.products.product import Scales, recipe_dot, recipe_dot_from_source
from fp8jax.ops.products.weights import BothLayouts, QuantizedWeight
from fp8jax.recipes import linear_part


class ScalingState(NamedTuple):
    """States of one linear's scaling, fp32; None for operands whose scaling keeps none. May be stacked.

    Under delayed scaling each is a history of largest magnitudes, (history,), newest first.
    """

    x: Array | None = None
    w: Array | None = None
    dy: Array | None = None


class ScalingStats(NamedTuple):
    """What one call of a linear observed of its operands, fp32; None where nothing is.

    Largest magnitudes under delayed scaling. Those of the calls of one step merge as the strategy says
    (`fp8jax.core.scaling.Stateful.merge_stats`): magnitudes by maximum, counts by sum.
    """

    x: Array | None = None
    w: Array | None = None
    dy: Array | None = None


def init_scaling(recipe: Recipe | Linear | str, w: Array | None = None) -> ScalingState:
    """The state before the first step, for one linear.

    Args:
        recipe: a recipe with a scaling that keeps a state.
        w: the weight, (inputs, outputs), for scalings that measure it at the start.

    Raises:
        ValueError: the recipe's scaling keeps no state.
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
    stored_weight: StoredWeight | None = None,
    both_layouts: BothLayouts = BothLayouts.NEVER,
    on_passthrough: Callable[[Array], None] | None = None,
) -> tuple[Array, ScalingStats]:
    """`linear` with a scaling that keeps a state.

    Args:
        x: (..., inputs).
        w: (inputs, outputs).
        state: read only; no gradient flows to it. Layers that read one array share its codes, where `input_facts` knows
            of them, under the scale of the first one's state.
        amax_slot: fp32 scalar of any value, no two calls the same one. Its cotangent is the largest magnitude of the
            output's gradient; cotangents sum, so a slot that two calls share would get the sum of both. None where the
            gradient's scaling keeps no state.
        recipe: a recipe whose scaling keeps a state, such as "delayed".
        quantized: what `quantize_weight` made of `w` with the scale that `weight_scale` gives; None does so here.
        bias, key, out_sharding: as of `linear`. input_facts, stored_weight, both_layouts, on_passthrough: as of
            `dot_general`.

    Returns:
        The output, and what was observed of `x` and `w`; its `dy` is 0, the slot's cotangent takes its place. Pass
        the merged observations of a step to `update_scaling`.

    Raises:
        ValueError: shapes do not match, the recipe's scaling keeps no state, or a slot or a key is missing.
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
    out_spec = output_spec(x, w, out_sharding)
    stats: dict[str, Array] = {}
    threshold = strategies.get("x")
    if isinstance(threshold, Threshold):
        value, x_source = fallback_input_source(matrix, linear_recipe, key, x, _operand_state(state, "x"), input_facts)
        y, _ = recipe_dot_from_source(
            value,
            x_source,
            w,
            linear_recipe,
            key,
            scales=scales,
            quantized=quantized,
            out_spec=out_spec,
            bias=bias,
            stored_weight=stored_weight,
            both_layouts=both_layouts,
        )
        stats["x"] = threshold.count_fallbacks(x_source.fallback_tensor.fallback_mask)
    else:
        y = recipe_dot(
            Input(matrix, x, input_facts=input_facts),
            w,
            linear_recipe,
            key,
            scales=scales,
            quantized=quantized,
            out_spec=out_spec,
            bias=bias,
            on_passthrough=on_passthrough,
            stored_weight=stored_weight,
            both_layouts=both_layouts,
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
    """The scale, an fp32 scalar, that the recipe's scaling gives to a weight in this step; None for the weight's own.

    Raises:
        ValueError: the recipe's scaling keeps no state.
    """
    linear_recipe = linear_part(recipe)
    return (
        _scale("w", lax.stop_gradient(w), lax.stop_gradient(state), linear_recipe)
        if "w" in _stateful_strategies(recipe)
        else None
    )


def update_scaling(state: ScalingState, stats: ScalingStats, recipe: Recipe | Linear | str) -> ScalingState:
    """The states after a step, of one linear or, with leading axes on every array, of stacked ones.

    Args:
        state: before the step.
        stats: of the whole step, merged over its microbatches and replicas.
        recipe: a recipe whose scaling keeps a state.
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
    """Whether calls of a linear observe this operand."""
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
