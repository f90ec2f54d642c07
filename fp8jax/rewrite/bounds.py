"""Bounds on weights under automatic scaling: an optimizer's, and where nobody has given one, what weights measure."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core.recipe import Linear
from fp8jax.ops.choice import vary_with
from fp8jax.ops.frozen import FrozenWeight
from fp8jax.ops.lora import AdaptedWeight
from fp8jax.ops.sharding import place, spec_of
from fp8jax.rewrite.states import Given, States, Use, measured_state


class Bound(NamedTuple):
    """What a weight under automatic scaling is quantized by.

    Attributes:
        linear: the recipe of its products. stacked: the sizes of its leading axes.
        weight: an array.
        bound: fp32, (*stacked,); 0 where nobody has given one, for weights may have been loaded since.
    """

    linear: Linear
    stacked: tuple[int, ...]
    weight: Array
    bound: Array

    def measured(self) -> Array:
        """The bound, or where there is none what the scaling makes of the whole weight."""
        found = measured_state(self.linear, self.weight, self.stacked).w
        assert found is not None
        if axes := tuple(jax.sharding.get_abstract_mesh().manual_axes):
            found = lax.pmax(found, axes)
        found = jnp.where(self.bound > 0, self.bound, found)
        return vary_with(place(found, spec_of(self.bound), self.bound), self.bound)  # type: ignore[no-any-return]


def known_bounds(tracked: Mapping[Any, Bound]) -> dict[Any, Array]:
    """The bounds of weights, those measured that nobody has given: in a conditional each, for others are not read.

    All are within one more, so that a program in which all are given meets no other.
    """
    given = {key: lax.stop_gradient(each.bound) for key, each in tracked.items()}
    if not given:
        return {}
    weights = {key: lax.stop_gradient(each.weight) for key, each in tracked.items()}

    def one(key: Any, bound: Array, weight: Array) -> Array:
        def measured(bound: Array, weight: Array) -> Array:
            return tracked[key]._replace(weight=weight, bound=bound).measured()

        if len(tracked) == 1:
            return measured(bound, weight)
        found: Array = lax.cond(jnp.all(bound > 0), lambda bound, _: bound, measured, bound, weight)
        return found

    def measure(bounds: dict[Any, Array], weights: dict[Any, Array]) -> dict[Any, Array]:
        return {key: one(key, bounds[key], weights[key]) for key in tracked}

    all_given = functools.reduce(jnp.logical_and, [jnp.all(bound > 0) for bound in given.values()])
    result: dict[Any, Array] = lax.cond(all_given, lambda bounds, _: bounds, measure, given, weights)
    return result


def with_known_bounds(
    given: Mapping[tuple[str, int], Given], uses: Mapping[Use, Linear], weights: Mapping[str, Any]
) -> dict[tuple[str, int], Given]:
    """What uses are given, with a bound of each weight.

    Args:
        given: of the caller, by use.
        uses: all of them, with their recipes.
        weights: what the caller holds as parameters, by their paths; codes need no bounds.
    """
    tracked, new = dict[str, Bound](), dict(given)
    own = [use for use in uses if uses[use].tracked and use.key in given and given[use.key].weight is None]
    for use in own:
        state, weight = given[use.key].state, weights[use.path]
        weight = weight.weight if isinstance(weight, AdaptedWeight) else weight
        if state is not None and state.w is not None and not isinstance(weight, FrozenWeight):
            tracked[use.path] = Bound(uses[use], use.stacked, weight, state.w)
    bounds = known_bounds(tracked)
    for use in own:
        if use.path in bounds:
            new[use.key] = given[use.key]._replace(state=given[use.key].state._replace(w=bounds[use.path]))  # type: ignore[union-attr]
    return new


def with_bounds(states: States, bounds: Mapping[tuple[str, ...], Array]) -> States:
    """States whose weights have the bounds of an optimizer; see `Transformed.set_weight_bounds`."""
    known, new = {"/".join(map(str, path)): bound for path, bound in bounds.items()}, dict(states)
    for path, tracked in states.items():
        if tracked.linear.tracked:
            assert tracked.state.w is not None
            bound = stacked_bound(known.get(path), path, tracked.state.w.shape)
            new[path] = dataclasses.replace(tracked, state=tracked.state._replace(w=bound))
    return new


def stacked_bound(bound: Array | None, path: str, stacked: tuple[int, ...]) -> Array:
    """The bounds of stacked layers from those of all matrices in the last two axes of the parameter at a path.

    Raises:
        ValueError: there is none, or the parameter is stacked otherwise.
    """
    if bound is None:
        raise ValueError(
            f"the optimizer follows no parameter {path}: its state is another model's, or that of a part of this one; "
            "give the state of the optimizer that trains it, or end the step of that part"
        )
    if bound.shape[: len(stacked)] != stacked:
        raise ValueError(
            f"automatic scaling takes kernels stacked along their first axes, {stacked}: the bounds of {path} are "
            f"{bound.shape}"
        )
    return jnp.max(bound, axis=tuple(range(len(stacked), bound.ndim)))
