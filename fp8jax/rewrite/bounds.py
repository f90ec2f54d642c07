"""Bounds on weights under automatic scaling: from an optimizer, or else measured."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core.recipe import Linear
from fp8jax.ops.dispatch.choice import cast_varying_like
from fp8jax.ops.dispatch.sharding import reshard, spec_of
from fp8jax.ops.products.frozen_weights import FrozenWeight
from fp8jax.ops.products.lora import AdaptedWeight
from fp8jax.rewrite.states import States, UseInputs, WeightUse, measured_state


class WeightBound(NamedTuple):
    """What a weight under automatic scaling is quantized by.

    Attributes:
        linear: the recipe of its products.
        weight: an array, (*layer_axes, ...).
        bound: fp32, (*layer_axes,); 0 if there is none, because weights may have been loaded since.
    """

    linear: Linear
    weight: Array
    bound: Array

    def get_or_measure(self) -> Array:
        """The bound, or if there is none, what the scaling measures of the whole weight."""
        found = measured_state(self.linear, self.weight, self.bound.shape).w
        assert found is not None
        if axes := tuple(jax.sharding.get_abstract_mesh().manual_axes):
            found = lax.pmax(found, axes)
        found = jnp.where(self.bound > 0, self.bound, found)
        return cast_varying_like(reshard(found, spec_of(self.bound), self.bound), self.bound)  # type: ignore[no-any-return]


def complete_bounds(weight_bounds: Mapping[Any, WeightBound]) -> dict[Any, Array]:
    """The bounds of weights; missing ones are measured, each in a conditional, so that other weights are not read."""
    initial = {key: lax.stop_gradient(each.bound) for key, each in weight_bounds.items()}
    if not initial:
        return {}
    weights = {key: lax.stop_gradient(each.weight) for key, each in weight_bounds.items()}

    def resolve_bound(key: Any, bound: Array, weight: Array) -> Array:
        def measured(bound: Array, weight: Array) -> Array:
            return weight_bounds[key]._replace(weight=weight, bound=bound).get_or_measure()

        if len(weight_bounds) == 1:
            return measured(bound, weight)
        found: Array = lax.cond(jnp.all(bound > 0), lambda bound, _: bound, measured, bound, weight)
        return found

    def resolve_all(bounds: dict[Any, Array], weights: dict[Any, Array]) -> dict[Any, Array]:
        return {key: resolve_bound(key, bounds[key], weights[key]) for key in weight_bounds}

    # One conditional around all others: a program that has all bounds evaluates only this one.
    all_known = functools.reduce(jnp.logical_and, [jnp.all(bound > 0) for bound in initial.values()])
    result: dict[Any, Array] = lax.cond(all_known, lambda bounds, _: bounds, resolve_all, initial, weights)
    return result


def with_complete_bounds(
    use_inputs: Mapping[tuple[str, int], UseInputs], uses: Mapping[WeightUse, Linear], weights: Mapping[str, Any]
) -> dict[tuple[str, int], UseInputs]:
    """What uses are given, with a bound of each weight.

    Args:
        use_inputs: of the caller, by use.
        uses: all of them, with their recipes.
        weights: what the caller stores as parameters, by their paths; codes need no bounds.
    """
    weight_bounds, completed = dict[str, WeightBound](), dict(use_inputs)
    tracked_uses = [
        use
        for use in uses
        if uses[use].needs_weight_bounds and use.key in use_inputs and use_inputs[use.key].weight is None
    ]
    for use in tracked_uses:
        state, weight = use_inputs[use.key].state, weights[use.path]
        weight = weight.weight if isinstance(weight, AdaptedWeight) else weight
        if state is not None and state.w is not None and not isinstance(weight, FrozenWeight):
            weight_bounds[use.path] = WeightBound(uses[use], weight, state.w)
    bounds = complete_bounds(weight_bounds)
    for use in tracked_uses:
        if use.path in bounds:
            use_input = use_inputs[use.key]
            assert use_input.state is not None
            completed[use.key] = use_input._replace(state=use_input.state._replace(w=bounds[use.path]))
    return completed


def with_weight_bounds(states: States, bounds: Mapping[tuple[str, ...], Array]) -> States:
    """States whose weights have the bounds of an optimizer; see `Transformed.update_weight_amax_bounds`."""
    bounds_by_path, new = {"/".join(map(str, path)): bound for path, bound in bounds.items()}, dict(states)
    for path, scaling in states.items():
        if scaling.linear.needs_weight_bounds:
            assert scaling.state.w is not None
            bound = bound_per_layer(bounds_by_path.get(path), path, scaling.state.w.shape)
            new[path] = dataclasses.replace(scaling, state=scaling.state._replace(w=bound))
    return new


def bound_per_layer(bound: Array | None, path: str, layer_axes: tuple[int, ...]) -> Array:
    """The bounds of stacked layers, (*layer_axes,), from those of all matrices in the last two axes of a parameter.

    Raises:
        ValueError: there is none, or the parameter is stacked otherwise.
    """
    if bound is None:
        raise ValueError(
            f"the optimizer follows no parameter {path}: its state is another model's, or that of a part of this one; "
            "give the state of the optimizer that trains it, or end the step of that part"
        )
    if bound.shape[: len(layer_axes)] != layer_axes:
        raise ValueError(
            f"automatic scaling takes kernels stacked along their first axes, {layer_axes}: the bounds of {path} are "
            f"{bound.shape}"
        )
    return jnp.max(bound, axis=tuple(range(len(layer_axes), bound.ndim)))
