"""Bounds on weights under automatic scaling: from an optimizer, or else measured."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core.recipe import Linear
from fp8jax.ops.dispatch.choice import cast_varying_like
from fp8jax.ops.dispatch.sharding import reshard, spec_of
from fp8jax.ops.products.lora import AdaptedWeight
from fp8jax.ops.products.weights import FrozenWeight
from fp8jax.rewrite.states import States, UseInputs, WeightUse, measured_state


def complete_bounds(
    bounds: Mapping[Any, Array], weights: Mapping[Any, Array], linears: Mapping[Any, Linear]
) -> dict[Any, Array]:
    """The bounds of weights, fp32, (*layer_axes,); missing ones are measured.

    Each is measured in its own conditional, so that other weights are not read.

    Args:
        bounds: 0 if there is none, because weights may have been loaded since.
        weights: (*layer_axes, ...), by the keys of bounds.
        linears: the recipes of their products, by the keys of bounds.
    """
    if not bounds:
        return {}
    given = {key: lax.stop_gradient(bound) for key, bound in bounds.items()}
    arrays = {key: lax.stop_gradient(weights[key]) for key in bounds}

    def resolve(key: Any, bound: Array, weight: Array) -> Array:
        measure = functools.partial(_get_or_measure, linears[key])
        if len(bounds) == 1:
            return measure(bound, weight)
        return lax.cond(jnp.all(bound > 0), lambda bound, _: bound, measure, bound, weight)  # type: ignore[no-any-return]

    def resolve_all(given: dict[Any, Array], arrays: dict[Any, Array]) -> dict[Any, Array]:
        return {key: resolve(key, given[key], arrays[key]) for key in bounds}

    # One conditional around all others: a program that has all bounds evaluates only this one.
    all_known = functools.reduce(jnp.logical_and, [jnp.all(bound > 0) for bound in given.values()])
    return lax.cond(all_known, lambda given, _: given, resolve_all, given, arrays)  # type: ignore[no-any-return]


def _get_or_measure(linear: Linear, bound: Array, weight: Array) -> Array:
    """The bound, or if it is 0, what the scaling measures of the whole weight."""
    found = measured_state(linear, weight, bound.shape).w
    assert found is not None
    if axes := tuple(jax.sharding.get_abstract_mesh().manual_axes):
        found = lax.pmax(found, axes)
    found = jnp.where(bound > 0, bound, found)
    return cast_varying_like(reshard(found, spec_of(bound), bound), bound)  # type: ignore[no-any-return]


def with_complete_bounds(
    use_inputs: Mapping[tuple[str, int], UseInputs], uses: Mapping[WeightUse, Linear], weights: Mapping[str, Any]
) -> dict[tuple[str, int], UseInputs]:
    """The inputs of uses, with a bound of each weight.

    Args:
        use_inputs: of the caller, by use.
        uses: all of them, with their recipes.
        weights: what the caller stores as parameters, by their paths; codes need no bounds.
    """
    bounds, linears, arrays = dict[str, Array](), dict[str, Linear](), dict[str, Array]()
    tracked_uses = [
        use
        for use in uses
        if uses[use].needs_weight_bounds and use.key in use_inputs and use_inputs[use.key].weight is None
    ]
    for use in tracked_uses:
        state, weight = use_inputs[use.key].state, weights[use.path]
        weight = weight.weight if isinstance(weight, AdaptedWeight) else weight
        if state is not None and state.w is not None and not isinstance(weight, FrozenWeight):
            bounds[use.path], linears[use.path], arrays[use.path] = state.w, uses[use], weight
    bounds, completed = complete_bounds(bounds, arrays, linears), dict(use_inputs)
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
