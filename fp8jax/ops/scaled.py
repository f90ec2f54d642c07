"""Linear layers with a scaling that keeps a state, which the caller holds."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core import formats
from fp8jax.core.recipe import Linear, Recipe
from fp8jax.core.scaling import Stateful, Threshold
from fp8jax.ops.inputs import Input, fall_back
from fp8jax.ops.linear import output_spec, rows
from fp8jax.ops.product import QuantizedWeight, Scales, multiply, product
from fp8jax.ops.saved import BLANK, Known, LaidOut
from fp8jax.ops.sharding import OutSharding
from fp8jax.recipes import linear_part


class ScalingState(NamedTuple):
    """States of one linear's scaling, fp32; None for operands whose scaling keeps none. May be stacked.

    Under delayed scaling each is a history of largest magnitudes, (history,), newest first.
    """

    x: Array | None = None
    w: Array | None = None
    dy: Array | None = None


class Observed(NamedTuple):
    """What one call of a linear observed of its operands, fp32; None where nothing is.

    Largest magnitudes under delayed scaling. Those of the calls of one step merge as the strategy says
    (`fp8jax.core.scaling.Stateful.merged`): magnitudes by maximum, counts by sum.
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
    values = {"w": w}
    return ScalingState(**{operand: part.init(values.get(operand)) for operand, part in _states(recipe).items()})


def scaled_linear(
    x: Array,
    w: Array,
    state: ScalingState,
    slot: Array | None = None,
    *,
    recipe: Recipe | Linear | str,
    bias: Array | None = None,
    key: Array | None = None,
    quantized: QuantizedWeight | None = None,
    out_sharding: OutSharding = None,
    known: Known = BLANK,
    laid: LaidOut | None = None,
    pass_on: Callable[[Array], None] | None = None,
) -> tuple[Array, Observed]:
    """`linear` with a scaling that keeps a state.

    Args:
        x: (..., inputs).
        w: (inputs, outputs).
        state: read only; no gradient flows to it. Layers that read one array share its codes, where `known` knows
            of them, under the scale of the first one's state.
        slot: fp32 scalar of any value, no two calls the same one. Its cotangent is the largest magnitude of the
            output's gradient; cotangents sum, so a slot that two calls share would get the sum of both. None where the
            gradient's scaling keeps no state.
        recipe: a recipe whose scaling keeps a state, such as "delayed".
        quantized: what `quantize_weight` made of `w` with the scale that `weight_scale` gives; None does so here.
        bias, key, out_sharding: as of `linear`. known, laid, pass_on: as of `dot_general`.

    Returns:
        The output, and what was observed of `x` and `w`; its `dy` is 0, the slot's cotangent takes its place. Pass
        the merged observations of a step to `update_scaling`.

    Raises:
        ValueError: shapes do not match, the recipe's scaling keeps no state, or a slot or a key is missing.
    """
    parts, part, matrix = _states(recipe), linear_part(recipe), rows(x, w)
    values = dict(zip(("x", "w"), lax.stop_gradient((matrix, w)), strict=True))
    state = lax.stop_gradient(state)
    scaled = {name: value for name, value in values.items() if name in parts and not parts[name].decides}
    scales = {name: _scale(name, value, state, part) for name, value in scaled.items()}
    if "dy" in parts:
        if slot is None:
            raise ValueError(f"{part.scaling} scaling observes gradients: give scaled_linear a slot, jnp.zeros([])")
        scales |= {"dy": parts["dy"].expected(_of(state, "dy")), "slot": slot}
    spec = output_spec(x, w, out_sharding)
    fixed, observed = Scales(**scales) if scales else None, {}
    threshold = parts.get("x")
    if isinstance(threshold, Threshold):
        value, blocks = fall_back(matrix, part, key, x, _of(state, "x"), known)
        y, _ = multiply(value, blocks, w, part, key, fixed, quantized, spec, bias=bias, laid=laid)
        observed["x"] = threshold.count(blocks.pair.used)
    else:
        how: Any = {"scales": fixed, "quantized": quantized, "spec": spec, "bias": bias, "laid": laid}
        y = product(Input(matrix, x, known=known), w, part, key, **how, pass_on=pass_on)
    observed |= {
        n: parts[n].observe(_of(state, n), values[n]) for n in values if observes(part, n) and n not in observed
    }
    if observes(part, "dy"):
        observed["dy"] = jnp.zeros((), jnp.float32)
    return y, Observed(**observed)


def weight_scale(w: Array, state: ScalingState, *, recipe: Recipe | Linear | str) -> Array | None:
    """The scale, an fp32 scalar, that the recipe's scaling gives to a weight in this step; None for the weight's own.

    Raises:
        ValueError: the recipe's scaling keeps no state.
    """
    part = linear_part(recipe)
    return _scale("w", lax.stop_gradient(w), lax.stop_gradient(state), part) if "w" in _states(recipe) else None


def update_scaling(state: ScalingState, observed: Observed, recipe: Recipe | Linear | str) -> ScalingState:
    """The states after a step, of one linear or, with leading axes on every array, of stacked ones.

    Args:
        state: before the step.
        observed: of the whole step, merged over its microbatches and replicas.
        recipe: a recipe whose scaling keeps a state.
    """
    new = {}
    for operand, part in _states(recipe).items():
        old, seen = _of(state, operand), getattr(observed, operand)
        if part.observes:
            update = part.update
            for _ in range(jnp.ndim(seen) - len(part.statistic)):
                update = jax.vmap(update)
            old = update(old, seen)
        new[operand] = old
    return ScalingState(**new)


def observes(part: Linear, operand: str) -> bool:
    """Whether calls of a linear observe this operand."""
    strategy = part.states.get(operand)
    return strategy is not None and strategy.observes


def _scale(name: str, value: Array, state: ScalingState, part: Linear) -> Array:
    spec = part.spec(name)
    assert spec is not None
    return part.states[name].scale(_of(state, name), value, formats.get(spec.format))


def _of(state: ScalingState, operand: str) -> Array:
    value = getattr(state, operand)
    if value is None:
        raise ValueError(f"the scaling of {operand} keeps a state, and none is given: take that of init_scaling")
    return value


def _states(recipe: Recipe | Linear | str) -> dict[str, Stateful]:
    part = linear_part(recipe)
    if not part.states:
        raise ValueError(f"the recipe's linear.scaling is {part.scaling!r}, which keeps no state, not 'delayed'")
    return part.states
