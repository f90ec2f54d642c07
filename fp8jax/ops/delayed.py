"""Linear layers with delayed scaling, whose state the caller holds."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core import formats, scaling
from fp8jax.core.recipe import Linear, Recipe
from fp8jax.ops.linear import output_spec, rows
from fp8jax.ops.product import QuantizedWeight, Scales, product
from fp8jax.ops.saved import BLANK, Provenance
from fp8jax.recipes import linear_part


class ScalingState(NamedTuple):
    """Amax histories of one linear under delayed scaling, fp32 (history,) each, newest first; may be stacked."""

    x: Array
    w: Array
    dy: Array


class Observed(NamedTuple):
    """Largest magnitudes that one call of a linear saw, fp32 scalars: merge calls of one step by maximum."""

    x: Array
    w: Array
    dy: Array


def init_scaling(recipe: Recipe | Linear | str) -> ScalingState:
    """Empty histories for one linear.

    Raises:
        ValueError: the recipe's scaling is not "delayed".
    """
    zeros = _delayed(recipe).init()
    return ScalingState(zeros, jnp.zeros_like(zeros), jnp.zeros_like(zeros))


def delayed_linear(
    x: Array,
    w: Array,
    state: ScalingState,
    slot: Array,
    *,
    recipe: Recipe | Linear | str,
    bias: Array | None = None,
    quantized: QuantizedWeight | None = None,
    out_sharding: Any = None,
    known: Provenance = BLANK,
) -> tuple[Array, Observed]:
    """`linear` with delayed scaling.

    Args:
        x: (..., inputs).
        w: (inputs, outputs).
        state: histories, read only; no gradient flows to them.
        slot: fp32 scalar of any value, no two calls the same one. Its cotangent is the largest magnitude of the
            output's gradient; cotangents sum, so a slot that two calls share would get the sum of both.
        recipe: a recipe whose scaling is "delayed".
        bias: (outputs,).
        quantized: what `quantize_weight` made of `w` with the scale that `weight_scale` gives; None does so here.
        out_sharding: on a mesh with Explicit axes, as of `linear`.
        known: as of `linear`.

    Returns:
        The output, and what was observed of `x` and `w`; its `dy` is 0, the slot's cotangent takes its place. Pass
        the merged observations of a step to `update_scaling`.

    Raises:
        ValueError: shapes do not match, or the recipe's scaling is not "delayed".
    """
    strategy, part, matrix = _delayed(recipe), linear_part(recipe), rows(x, w)
    values = lax.stop_gradient((matrix, w))
    past = lax.stop_gradient(jnp.max(state.dy)) * 2.0**strategy.margin
    scales = Scales(_scale("x", values[0], state, part), _scale("w", values[1], state, part), past, slot)
    spec = output_spec(x, w, out_sharding)
    y = product(matrix, w, part, None, source=x, scales=scales, quantized=quantized, spec=spec, known=known)
    seen_x, seen_w = map(scaling.largest_magnitude, values)
    observed = Observed(seen_x, seen_w, jnp.zeros([]))
    return (y if bias is None else y + bias.astype(y.dtype)), observed


def weight_scale(w: Array, state: ScalingState, *, recipe: Recipe | Linear | str) -> Array:
    """The scale, an fp32 scalar, that delayed scaling gives to a weight in this step.

    Raises:
        ValueError: the recipe's scaling is not "delayed".
    """
    return _scale("w", lax.stop_gradient(w), state, linear_part(recipe))


def update_scaling(state: ScalingState, observed: Observed, recipe: Recipe | Linear | str) -> ScalingState:
    """The histories after a step, of one linear or, with leading axes on every array, of stacked ones.

    Args:
        state: histories before the step.
        observed: largest magnitudes of the whole step: the maximum over its microbatches and replicas.
        recipe: a recipe whose scaling is "delayed".
    """
    _delayed(recipe)
    return advance(state, observed)


def advance(state: ScalingState, observed: Observed) -> ScalingState:
    """`update_scaling`: how histories advance depends on their length alone."""
    update = jnp.vectorize(scaling.Delayed(state.x.shape[-1]).update, signature="(h),()->(h)")
    return ScalingState(*map(update, state, observed))


def _scale(name: str, value: Array, state: ScalingState, part: Linear) -> Array:
    spec = part.spec(name)
    assert spec is not None
    return _delayed(part).scale(lax.stop_gradient(getattr(state, name)), value, formats.get(spec.format))


def _delayed(recipe: Recipe | Linear | str) -> scaling.Delayed:
    part = linear_part(recipe)
    if part.scaling != "delayed":
        raise ValueError(f"the recipe's linear.scaling is {part.scaling!r}, not 'delayed'")
    return scaling.Delayed(part.history, part.margin)
