"""States of scalings: what products read of them, and what they observe, which leaves as gradients of their slots.

A gradient knows its way out of scans, checkpoints, conditions, calls and meshes. Cotangents sum, and a largest
magnitude must not: so each use of a parameter has a slot of its own, and a use in a loop or on several devices one for
each turn and device. `advance` merges them as the scaling asks.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fp8jax.core.recipe import Linear
from fp8jax.core.scaling import AxisNames
from fp8jax.ops.choice import vary_alike
from fp8jax.ops.product import QuantizedWeight
from fp8jax.ops.scaled import Observed, ScalingState, init_scaling, observes, update_scaling
from fp8jax.rewrite import primitives, training
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
    """One product with a parameter.

    Attributes:
        path: of the parameter. number: of the use, among those of this parameter.
        levels: the loops and meshes around it, outermost first.
    """

    path: str
    number: int
    levels: tuple[Level, ...]

    @property
    def key(self) -> tuple[str, int]:
        return self.path, self.number

    @property
    def stacked(self) -> tuple[int, ...]:
        return tuple(level.times for level in self.levels if level.stacked)


Noted = dict[str, Array]


class Given(NamedTuple):
    """What a product is given: the state of its scaling, slots for what it observes, and its weight in codes."""

    state: ScalingState | None = None
    slots: Observed | None = None
    weight: QuantizedWeight | None = None


class ParameterState(NamedTuple):
    """What the caller holds for the products of one parameter, with leading axes where the parameter is stacked.

    Attributes:
        linear: the recipe that the state was made for.
        stacked: the sizes of the leading axes.
        state: the state of their scaling, or None.
        slot: fp32, (*stacked,); its cotangent is the largest magnitude of the gradients of all uses. None where the
            gradient's scaling keeps no state.
        weight: the parameter in codes, (*stacked, inputs, outputs), or None.
    """

    linear: Linear
    stacked: tuple[int, ...]
    state: ScalingState | None = None
    slot: Array | None = None
    weight: QuantizedWeight | None = None


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
    for path, group in _groups(use for use in uses if uses[use].states):
        linear, stacked = uses[group[0]], group[0].stacked
        if any(use.stacked != stacked or uses[use] != linear for use in group):
            raise ValueError(
                f"products with the parameter {path} have {scaling_names(linear)} scaling, stand in loops of different "
                "lengths over it or have different recipes, and it has one state: leave one out by a rule, or use two "
                "parameters"
            )
        slots = tuple(_slots(linear, tuple(level.times for level in use.levels)) for use in group)
        merged = tuple(tuple(not level.stacked for level in use.levels) for use in group)
        state = first_state(linear, measured_state(linear, weights[path], stacked))
        states[path] = TrackedScaling(state, slots, linear, merged)
    return states


def _slots(linear: Linear, axes: tuple[int, ...]) -> Observed:
    seen = {o: jnp.zeros((*axes, *s.statistic), jnp.float32) for o, s in linear.states.items() if observes(linear, o)}
    return Observed(**seen)


def first_state(linear: Linear, measured: ScalingState) -> ScalingState:
    """The state that a caller holds at first: of a bound on a weight 0, until somebody gives one; see `Bound`."""
    if not linear.tracked:
        return measured
    assert measured.w is not None
    return measured._replace(w=jnp.zeros_like(measured.w))


def measured_state(linear: Linear, weight: Any, stacked: tuple[int, ...]) -> ScalingState:
    """The state of products with this weight, (*stacked, ...), before the first step."""
    one: Callable[[Array], ScalingState] = lambda w: init_scaling(linear, w.reshape(-1, w.shape[-1]))  # noqa: E731
    if weight.shape[: len(stacked)] != stacked:  # the program stacks it otherwise than it is stored
        return jax.tree.map(lambda s: jnp.broadcast_to(s, (*stacked, *s.shape)), one(weight))  # type: ignore[no-any-return]
    for _ in stacked:
        one = jax.vmap(one)
    return one(weight)


def advance(states: States, observed: States, axis_name: AxisNames = None) -> States:
    """The states after a step; see `Transformed.advance`."""
    new = {}
    for path, tracked in states.items():
        linear = tracked.linear
        slots = [{o: x for o, x in slots._asdict().items() if x is not None} for slots in observed[path].slots]
        merged = _merged(linear, slots, tracked.merged)
        if axis_name is not None:
            merged = {o: linear.states[o].over_replicas(seen, axis_name) for o, seen in merged.items()}
        state = update_scaling(tracked.state, Observed(**merged), linear) if merged else tracked.state
        new[path] = dataclasses.replace(tracked, state=state)
    return new


def _merged(linear: Linear, each: Sequence[Noted], shared: Sequence[tuple[bool, ...]]) -> Noted:
    """What the uses of a parameter have observed, merged as the scaling asks.

    Args:
        linear: their recipe.
        each: of each use, by operand.
        shared: for each use which leading axes are turns or devices that share the state.
    """
    merged: Noted = {}
    for noted, several in zip(each, shared, strict=True):
        axes = tuple(i for i, one in enumerate(several) if one)
        for operand, seen in noted.items():
            scaling = linear.states[operand]
            # The gradient's statistic is a magnitude in any case.
            whole = jnp.sum(seen, axes) if scaling.merge == "sum" and operand != "dy" else jnp.max(seen, axes)
            before = merged.get(operand)
            merged[operand] = whole if before is None else scaling.merged(before, whole)
    return merged


def merged_uses(seen: Mapping[tuple[tuple[str, int], str], Array], uses: Mapping[Use, Linear]) -> dict[str, Noted]:
    """What was observed in the forward pass, by the paths of parameters.

    Args:
        seen: by use and operand.
        uses: all of them, with their recipes.
    """
    noted: dict[tuple[str, int], Noted] = {}
    for (key, operand), value in seen.items():
        noted.setdefault(key, {})[operand] = value
    return {
        path: _merged(
            uses[group[0]],
            [noted[use.key] for use in group],
            [tuple(not level.stacked for level in use.levels) for use in group],
        )
        for path, group in _groups(use for use in uses if use.key in noted)
    }


def _groups(uses: Iterable[Use]) -> Iterator[tuple[str, list[Use]]]:
    for path, each in itertools.groupby(sorted(uses), key=lambda use: use.path):
        yield path, list(each)


def held_by_use(held: Mapping[str, ParameterState], uses: Mapping[Use, Linear]) -> dict[tuple[str, int], Given]:
    """What each use is given of what the caller holds for its parameter.

    Raises:
        ValueError: the recipe of a product keeps a state that is not held, or one of another shape.
    """
    given: dict[tuple[str, int], Given] = {}
    for path, group in _groups(uses):
        linear, has = uses[group[0]], held.get(path)
        if has is None or (linear.states and has.state is None):
            if any(scaling.observes for scaling in linear.states.values()):
                raise ValueError(f"the model holds no state of {scaling_names(linear)} scaling for {path}")
            continue
        if any(use.stacked != has.stacked for use in group):
            raise ValueError(
                f"products with {path} run in loops over {group[0].stacked} of it, and there are codes or states "
                f"for {has.stacked}: run it in nnx.scan over its first axes, or leave it out by a rule"
            )
        slots: Sequence[Any] = [None] * len(group)
        if has.slot is not None:
            slots = _spread(has.slot, tuple(use.levels for use in group))
        for use, slot in zip(group, slots, strict=True):
            own = _slots(linear, tuple(level.times for level in use.levels)) if has.state is not None else Observed()
            given[use.key] = Given(has.state, own._replace(dy=slot), has.weight)
    return given


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _spread(slot: Array, uses: tuple[tuple[Level, ...], ...]) -> tuple[Array, ...]:
    """A slot for each turn and device of each use; the cotangent of the one is the largest of those of all."""
    axes = [tuple(i for i, level in enumerate(levels) if not level.stacked) for levels in uses]
    shapes = [tuple(level.times for level in levels) for levels in uses]
    each = zip(axes, shapes, strict=True)
    return tuple(jnp.broadcast_to(jnp.expand_dims(slot, own), shape) for own, shape in each)


def _spread_back(uses: tuple[tuple[Level, ...], ...], _: None, cotangents: tuple[Array, ...]) -> tuple[Array]:
    axes = [tuple(i for i, level in enumerate(levels) if not level.stacked) for levels in uses]
    return (functools.reduce(jnp.maximum, (jnp.max(x, own) for x, own in zip(cotangents, axes, strict=True))),)


_spread.defvjp(lambda slot, uses: (_spread(slot, uses), None), _spread_back)


_STATISTICS = (
    "{path} has {names} scaling: what a call observes is the gradient of its states, and this gradient is not taken of "
    "them. Write grads, observed = jax.grad(lambda p, s: ..., argnums=(0, 1))(params, states), with states=s in the "
    "call, and then states = fast.advance(states, observed)"
)


def by_use(states: States, weights: Mapping[str, Any]) -> dict[tuple[str, int], Given]:
    """What each use of a parameter reads and where its observations go.

    Args:
        states: by the paths of parameters.
        weights: the parameters of the call.
    """
    found = {path: _trained(path, tracked, weights.get(path)) for path, tracked in states.items()}
    return {(path, i): Given(t.state, slots) for path, t in found.items() for i, slots in enumerate(t.slots)}


def _trained(path: str, tracked: TrackedScaling, weight: Any) -> TrackedScaling:
    """The scaling of a parameter, as it is, read in a call; see `fp8jax.rewrite.training`."""
    slots, structure = jax.tree.flatten(tracked.slots)
    if not slots:
        return tracked
    names, (slot, *slots) = scaling_names(tracked.linear), slots
    slot = training.require_statistics(slot, weight, _STATISTICS.format(path=path or "the parameter", names=names))
    (state, *others), whole = jax.tree.flatten(tracked.state)
    state = training.read_state(state, (weight, slot), path or "the parameter", names, "transform")
    return dataclasses.replace(
        tracked,
        state=jax.tree.unflatten(whole, (state, *others)),
        slots=jax.tree.unflatten(structure, (slot, *slots)),
    )


def scaling_names(linear: Linear) -> str:
    """The names of the scalings of a recipe that keep states."""
    return " and ".join(sorted({linear.scaling_name(operand) for operand in linear.states}))


def observed_beside(y: Array, slots: Observed, seen: Observed) -> Array:
    """`y`; in the backward pass what was observed becomes the gradient of the slots."""
    if slots.x is None and slots.w is None:
        return y  # itself, so that what is known of its gradient stays known
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
