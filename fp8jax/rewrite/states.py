"""States of scalings: what products read of them, and what they observe, which leaves as gradients of their slots.

A gradient knows its way out of scans, checkpoints, conditions, calls and meshes. Cotangents sum, and a largest
magnitude must not: so each use of a parameter has a slot of its own, and a use in a loop or on several devices one for
each turn and device. `advance` merges them as the scaling asks.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fp8jax.core.recipe import Linear
from fp8jax.ops.choice import vary_alike
from fp8jax.ops.scaled import Observed, ScalingState, init_scaling, observes, update_scaling
from fp8jax.rewrite import primitives
from fp8jax.rewrite.graph import Graph, Node, Value


class Level(NamedTuple):
    """A loop or a mesh around a product.

    Attributes:
        stacked: each turn has a weight of its own, and so a state.
        times: how many turns or devices.
    """

    stacked: bool
    times: int


class Use(NamedTuple):
    """One product with a parameter: its path, the use's number, and the loops and meshes around it, outermost first."""

    path: str
    number: int
    levels: tuple[Level, ...]

    @property
    def key(self) -> tuple[str, int]:
        return self.path, self.number

    @property
    def stacked(self) -> tuple[int, ...]:
        return tuple(level.times for level in self.levels if level.stacked)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["state", "slots"], meta_fields=["linear", "merged"])
@dataclasses.dataclass(frozen=True)
class TrackedScaling:
    """The scaling of one parameter's products, with leading axes where the parameter is stacked.

    Attributes:
        state: fp32, read by calls.
        slots: for each use zeros, whose gradients are what was observed.
        linear: the recipe of the products.
        merged: for each use which leading axes of its slots are turns or devices that share the state.
    """

    state: ScalingState
    slots: tuple[Observed, ...]
    linear: Linear
    merged: tuple[tuple[bool, ...], ...]


States = dict[str, TrackedScaling]


def init(uses: Mapping[Use, Linear], weights: Mapping[str, Any]) -> States:
    """The states before the first step, by the paths of parameters.

    Args:
        uses: the products whose scaling keeps a state.
        weights: the parameters, by their paths.
    """
    states: States = {}
    for path, each in itertools.groupby(sorted(uses), key=lambda use: use.path):
        group = list(each)
        linear, stacked = uses[group[0]], group[0].stacked
        if any(use.stacked != stacked or uses[use] != linear for use in group):
            raise ValueError(
                f"products with the parameter {path} have {scaling_names(linear)} scaling, stand in loops of different "
                "lengths over it or have different recipes, and it has one state: leave one out by a rule, or use two "
                "parameters"
            )
        slots = tuple(_slots(linear, tuple(level.times for level in use.levels)) for use in group)
        merged = tuple(tuple(not level.stacked for level in use.levels) for use in group)
        states[path] = TrackedScaling(_state(linear, weights[path], stacked), slots, linear, merged)
    return states


def _slots(linear: Linear, axes: tuple[int, ...]) -> Observed:
    seen = {o: jnp.zeros((*axes, *s.statistic), jnp.float32) for o, s in linear.states.items() if observes(linear, o)}
    return Observed(**seen)


def _state(linear: Linear, weight: Any, stacked: tuple[int, ...]) -> ScalingState:
    one: Callable[[Array], ScalingState] = lambda w: init_scaling(linear, w.reshape(-1, w.shape[-1]))  # noqa: E731
    if weight.shape[: len(stacked)] != stacked:  # the program stacks it otherwise than it is stored
        return jax.tree.map(lambda s: jnp.broadcast_to(s, (*stacked, *s.shape)), one(weight))  # type: ignore[no-any-return]
    for _ in stacked:
        one = jax.vmap(one)
    return one(weight)


def advance(states: States, observed: States, axis_name: Any = None) -> States:
    """The states after a step; see `Transformed.advance`."""
    new = {}
    for path, tracked in states.items():
        linear, merged = tracked.linear, dict[str, Array]()
        for slots, shared in zip(observed[path].slots, tracked.merged, strict=True):
            for operand, seen in slots._asdict().items():
                if seen is None:
                    continue
                scaling = linear.states[operand]
                axes = tuple(i for i, several in enumerate(shared) if several)
                # The gradient's statistic is a magnitude in any case.
                whole = jnp.sum(seen, axes) if scaling.merge == "sum" and operand != "dy" else jnp.max(seen, axes)
                before = merged.get(operand)
                merged[operand] = whole if before is None else scaling.merged(before, whole)
        if axis_name is not None:
            merged = {o: linear.states[o].over_replicas(seen, axis_name) for o, seen in merged.items()}
        state = update_scaling(tracked.state, Observed(**merged), linear) if merged else tracked.state
        new[path] = dataclasses.replace(tracked, state=state)
    return new


def with_bounds(states: States, bounds: Mapping[tuple[str, ...], Array]) -> States:
    """States whose weights have the bounds of an optimizer; see `Transformed.set_weight_bounds`."""
    known, new = {"/".join(map(str, path)): bound for path, bound in bounds.items()}, dict(states)
    for path, tracked in states.items():
        if not tracked.linear.tracked:
            continue
        if path not in known:
            raise ValueError(f"the optimizer follows no parameter {path}: its state is another model's")
        assert tracked.state.w is not None
        stacked = tracked.state.w.ndim
        if known[path].shape[:stacked] != tracked.state.w.shape:
            raise ValueError(f"the bounds of {path} are {known[path].shape}, its states {tracked.state.w.shape}")
        bound = jnp.max(known[path], axis=tuple(range(stacked, known[path].ndim)))
        new[path] = dataclasses.replace(tracked, state=tracked.state._replace(w=bound))
    return new


def by_use(states: States) -> dict[tuple[str, int], tuple[ScalingState, Observed]]:
    """What each use of a parameter reads and where its observations go."""
    return {(path, i): (t.state, slots) for path, t in states.items() for i, slots in enumerate(t.slots)}


def scaling_names(linear: Linear) -> str:
    """The names of the scalings of a recipe that keep states."""
    return " and ".join(sorted({linear.scaling_name(operand) for operand in linear.states}))


def observed_beside(y: Array, slots: Observed, seen: Observed) -> Array:
    """`y`; in the backward pass what was observed becomes the gradient of the slots."""
    arrays = [x for x in (*slots, *seen) if x is not None]
    y, *varying = vary_alike(y, *arrays)  # type: ignore[assignment]
    rest = iter(varying)
    slots, seen = (Observed(*(None if x is None else next(rest) for x in each)) for each in (slots, seen))
    result: Array = _beside(y, slots, seen)
    return result


@jax.custom_vjp
def _beside(y: Array, slots: Observed, seen: Observed) -> Array:
    return y


def _forward(y: Array, slots: Observed, seen: Observed) -> tuple[Array, Any]:
    return y, (jax.tree.map(jnp.zeros_like, slots), seen)


def _backward(saved: tuple[Observed, Observed], dy: Array) -> tuple[Array, Observed, None]:
    nothing, seen = saved
    # That of "dy" is the cotangent of the product's own slot.
    each = {o: zero if zero is None or o == "dy" else getattr(seen, o) for o, zero in nothing._asdict().items()}
    return dy, Observed(**each), None


_beside.defvjp(_forward, _backward)


def levels_of(around: Sequence[tuple[Node, Graph]], weight: Value | None) -> tuple[Level, ...]:
    """The loops and meshes around a product, outermost first.

    Args:
        around: the nodes that it stands in, each with the body, outermost first.
        weight: the value that its parameter is stored in, in the innermost body.
    """
    levels = list[Level]()
    for node, body in reversed(around):
        place = body.inputs.index(weight) if weight is not None and weight in body.inputs else -1
        if (turns := primitives.turns(node.eqn)) is not None:
            levels.append(Level(place in turns.rows, turns.times))
        outer = weight.outer if weight is not None and place >= 0 else None
        weight = outer.weight.stored if outer is not None and outer.weight is not None else None
    return tuple(reversed(levels))
