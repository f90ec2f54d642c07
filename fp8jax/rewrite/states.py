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
from fp8jax.ops.dispatch.choice import match_varying_axes
from fp8jax.ops.products.scaled_linear import ScalingState, ScalingStats, collects_stats, init_scaling, update_scaling
from fp8jax.ops.products.weights import QuantizedWeight
from fp8jax.rewrite import primitives, training
from fp8jax.rewrite.graph import Graph, Node, Value


class LoopLevel(NamedTuple):
    """A loop or a mesh around a product.

    Attributes:
        has_layer_axis: each turn has a weight of its own, and so a state.
        size: how many turns or devices.
    """

    has_layer_axis: bool
    size: int


class WeightUse(NamedTuple):
    """One product with a parameter.

    Attributes:
        path: of the parameter. number: of the use, among those of this parameter.
        levels: the loops and meshes around it, outermost first.
    """

    path: str
    number: int
    levels: tuple[LoopLevel, ...]

    @property
    def key(self) -> tuple[str, int]:
        return self.path, self.number

    @property
    def layer_axes(self) -> tuple[int, ...]:
        return tuple(level.size for level in self.levels if level.has_layer_axis)


Stats = dict[str, Array]


class UseInputs(NamedTuple):
    """What a product is given: the state of its scaling, slots for what it observes, and its weight in codes."""

    state: ScalingState | None = None
    slots: ScalingStats | None = None
    weight: QuantizedWeight | None = None


class ParameterState(NamedTuple):
    """What the caller holds for the products of one parameter, with leading axes where the parameter is stacked.

    Attributes:
        linear: the recipe that the state was made for.
        layer_axes: the sizes of the leading axes.
        state: the state of their scaling, or None.
        amax_slot: fp32, (*layer_axes,); its cotangent is the largest magnitude of the gradients of all uses. None where
            the gradient's scaling keeps no state.
        weight: the parameter in codes, (*layer_axes, inputs, outputs), or None.
    """

    linear: Linear
    layer_axes: tuple[int, ...]
    state: ScalingState | None = None
    amax_slot: Array | None = None
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
    slots: tuple[ScalingStats, ...]
    linear: Linear
    merged: tuple[tuple[bool, ...], ...]


States = dict[str, TrackedScaling]


def init(uses: Mapping[WeightUse, Linear], weights: Mapping[str, Any]) -> States:
    """The states before the first step, by the paths of parameters.

    Args:
        uses: the products whose scaling keeps a state.
        weights: the parameters, by their paths.
    """
    states: States = {}
    for path, group in _group_by_path(use for use in uses if uses[use].states):
        linear, layer_axes = uses[group[0]], group[0].layer_axes
        if any(use.layer_axes != layer_axes or uses[use] != linear for use in group):
            raise ValueError(
                f"products with the parameter {path} have {scaling_names(linear)} scaling, stand in loops of different "
                "lengths over it or have different recipes, and it has one state: leave one out by a rule, or use two "
                "parameters"
            )
        slots = tuple(_zero_slots(linear, tuple(level.size for level in use.levels)) for use in group)
        merged = tuple(tuple(not level.has_layer_axis for level in use.levels) for use in group)
        state = initial_state(linear, measured_state(linear, weights[path], layer_axes))
        states[path] = TrackedScaling(state, slots, linear, merged)
    return states


def _zero_slots(linear: Linear, axes: tuple[int, ...]) -> ScalingStats:
    zeros = {
        o: jnp.zeros((*axes, *s.stats_shape), jnp.float32)
        for o, s in linear.states.items()
        if collects_stats(linear, o)
    }
    return ScalingStats(**zeros)


def initial_state(linear: Linear, measured: ScalingState) -> ScalingState:
    """The state that a caller holds at first: of a bound on a weight 0, until somebody gives one; see `WeightBound`."""
    if not linear.needs_weight_bounds:
        return measured
    assert measured.w is not None
    return measured._replace(w=jnp.zeros_like(measured.w))


def measured_state(linear: Linear, weight: Any, layer_axes: tuple[int, ...]) -> ScalingState:
    """The state of products with this weight, (*layer_axes, ...), before the first step."""
    init_one: Callable[[Array], ScalingState] = lambda w: init_scaling(linear, w.reshape(-1, w.shape[-1]))  # noqa: E731
    if weight.shape[: len(layer_axes)] != layer_axes:  # the program stacks it otherwise than it is stored
        return jax.tree.map(lambda s: jnp.broadcast_to(s, (*layer_axes, *s.shape)), init_one(weight))  # type: ignore[no-any-return]
    for _ in layer_axes:
        init_one = jax.vmap(init_one)
    return init_one(weight)


def advance(states: States, observed: States, axis_name: AxisNames = None) -> States:
    """The states after a step; see `Transformed.advance`."""
    new = {}
    for path, scaling in states.items():
        linear = scaling.linear
        slots = [{o: x for o, x in slots._asdict().items() if x is not None} for slots in observed[path].slots]
        merged = _merge_stats(linear, slots, scaling.merged)
        if axis_name is not None:
            merged = {o: linear.states[o].reduce_over_replicas(seen, axis_name) for o, seen in merged.items()}
        state = update_scaling(scaling.state, ScalingStats(**merged), linear) if merged else scaling.state
        new[path] = dataclasses.replace(scaling, state=state)
    return new


def _merge_stats(linear: Linear, use_stats: Sequence[Stats], shared_axes: Sequence[tuple[bool, ...]]) -> Stats:
    """What the uses of a parameter have observed, merged as the scaling asks.

    Args:
        linear: their recipe.
        use_stats: of each use, by operand.
        shared_axes: for each use which leading axes are turns or devices that share the state.
    """
    merged: Stats = {}
    for stats, is_shared in zip(use_stats, shared_axes, strict=True):
        axes = tuple(i for i, one in enumerate(is_shared) if one)
        for operand, stat in stats.items():
            scaling = linear.states[operand]
            # The gradient's statistic is a magnitude in any case.
            reduced = jnp.sum(stat, axes) if scaling.merge == "sum" and operand != "dy" else jnp.max(stat, axes)
            previous = merged.get(operand)
            merged[operand] = reduced if previous is None else scaling.merge_stats(previous, reduced)
    return merged


def merge_use_stats(
    stats: Mapping[tuple[tuple[str, int], str], Array], uses: Mapping[WeightUse, Linear]
) -> dict[str, Stats]:
    """What was observed in the forward pass, by the paths of parameters.

    Args:
        stats: by use and operand.
        uses: all of them, with their recipes.
    """
    stats_by_use: dict[tuple[str, int], Stats] = {}
    for (key, operand), value in stats.items():
        stats_by_use.setdefault(key, {})[operand] = value
    return {
        path: _merge_stats(
            uses[group[0]],
            [stats_by_use[use.key] for use in group],
            [tuple(not level.has_layer_axis for level in use.levels) for use in group],
        )
        for path, group in _group_by_path(use for use in uses if use.key in stats_by_use)
    }


def _group_by_path(uses: Iterable[WeightUse]) -> Iterator[tuple[str, list[WeightUse]]]:
    for path, group in itertools.groupby(sorted(uses), key=lambda use: use.path):
        yield path, list(group)


def use_inputs_from_parameter_states(
    parameter_states: Mapping[str, ParameterState], uses: Mapping[WeightUse, Linear]
) -> dict[tuple[str, int], UseInputs]:
    """What each use is given of what the caller holds for its parameter.

    Raises:
        ValueError: the recipe of a product keeps a state that is not held, or one of another shape.
    """
    use_inputs: dict[tuple[str, int], UseInputs] = {}
    for path, group in _group_by_path(uses):
        linear, held_state = uses[group[0]], parameter_states.get(path)
        if held_state is None or (linear.states and held_state.state is None):
            if any(scaling.collects_stats for scaling in linear.states.values()):
                raise ValueError(f"the model holds no state of {scaling_names(linear)} scaling for {path}")
            continue
        if any(use.layer_axes != held_state.layer_axes for use in group):
            raise ValueError(
                f"products with {path} run in loops over {group[0].layer_axes} of it, and there are codes or states "
                f"for {held_state.layer_axes}: run it in nnx.scan over its first axes, or leave it out by a rule"
            )
        slots: Sequence[Any] = [None] * len(group)
        if held_state.amax_slot is not None:
            slots = _broadcast_max_slot(held_state.amax_slot, tuple(use.levels for use in group))
        for use, slot in zip(group, slots, strict=True):
            zero_slots = (
                _zero_slots(linear, tuple(level.size for level in use.levels))
                if held_state.state is not None
                else ScalingStats()
            )
            use_inputs[use.key] = UseInputs(held_state.state, zero_slots._replace(dy=slot), held_state.weight)
    return use_inputs


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _broadcast_max_slot(slot: Array, levels_by_use: tuple[tuple[LoopLevel, ...], ...]) -> tuple[Array, ...]:
    """A slot for each turn and device of each use; the cotangent of the one is the largest of those of all."""
    axes = [tuple(i for i, level in enumerate(levels) if not level.has_layer_axis) for levels in levels_by_use]
    shapes = [tuple(level.size for level in levels) for levels in levels_by_use]
    axes_and_shapes = zip(axes, shapes, strict=True)
    return tuple(jnp.broadcast_to(jnp.expand_dims(slot, own), shape) for own, shape in axes_and_shapes)


def _broadcast_max_slot_bwd(
    levels_by_use: tuple[tuple[LoopLevel, ...], ...], _: None, cotangents: tuple[Array, ...]
) -> tuple[Array]:
    axes = [tuple(i for i, level in enumerate(levels) if not level.has_layer_axis) for levels in levels_by_use]
    return (functools.reduce(jnp.maximum, (jnp.max(x, own) for x, own in zip(cotangents, axes, strict=True))),)


_broadcast_max_slot.defvjp(lambda slot, uses: (_broadcast_max_slot(slot, uses), None), _broadcast_max_slot_bwd)


_MISSING_STATS_MESSAGE = (
    "{path} has {names} scaling: what a call observes is the gradient of its states, and this gradient is not taken of "
    "them. Write grads, observed = jax.grad(lambda p, s: ..., argnums=(0, 1))(params, states), with states=s in the "
    "call, and then states = fast.advance(states, observed)"
)


def use_inputs_from_states(states: States, weights: Mapping[str, Any]) -> dict[tuple[str, int], UseInputs]:
    """What each use of a parameter reads and where its observations go.

    Args:
        states: by the paths of parameters.
        weights: the parameters of the call.
    """
    found = {path: _read_scaling(path, tracked, weights.get(path)) for path, tracked in states.items()}
    return {(path, i): UseInputs(t.state, slots) for path, t in found.items() for i, slots in enumerate(t.slots)}


def _read_scaling(path: str, scaling: TrackedScaling, weight: Any) -> TrackedScaling:
    """The scaling of a parameter, as it is, read in a call; see `fp8jax.rewrite.training`."""
    slots, structure = jax.tree.flatten(scaling.slots)
    if not slots:
        return scaling
    names, (slot, *slots) = scaling_names(scaling.linear), slots
    slot = training.require_statistics(
        slot, weight, _MISSING_STATS_MESSAGE.format(path=path or "the parameter", names=names)
    )
    (state, *other_states), state_structure = jax.tree.flatten(scaling.state)
    state = training.read_state(state, (weight, slot), path or "the parameter", names, "transform")
    return dataclasses.replace(
        scaling,
        state=jax.tree.unflatten(state_structure, (state, *other_states)),
        slots=jax.tree.unflatten(structure, (slot, *slots)),
    )


def scaling_names(linear: Linear) -> str:
    """The names of the scalings of a recipe that keep states."""
    return " and ".join(sorted({linear.scaling_name(operand) for operand in linear.states}))


def stats_as_cotangents(y: Array, slots: ScalingStats, stats: ScalingStats) -> Array:
    """`y`; in the backward pass what was observed becomes the gradient of the slots."""
    if slots.x is None and slots.w is None:
        return y  # itself, so that what is known of its gradient stays known
    arrays = [x for x in (*slots, *stats) if x is not None]
    y, *varying = match_varying_axes(y, *arrays)  # type: ignore[assignment]
    varying_iter = iter(varying)
    slots, stats = (ScalingStats(*(None if x is None else next(varying_iter) for x in each)) for each in (slots, stats))
    result: Array = _emit_stats(y, slots, stats)
    return result


@jax.custom_vjp
def _emit_stats(y: Array, slots: ScalingStats, stats: ScalingStats) -> Array:
    return y


def _emit_stats_fwd(y: Array, slots: ScalingStats, stats: ScalingStats) -> tuple[Array, Any]:
    return y, (jax.tree.map(jnp.zeros_like, slots), stats)


def _emit_stats_bwd(residuals: tuple[ScalingStats, ScalingStats], dy: Array) -> tuple[Array, ScalingStats, None]:
    zeros, stats = residuals
    # That of "dy" is the cotangent of the product's own slot.
    cotangents = {o: zero if zero is None or o == "dy" else getattr(stats, o) for o, zero in zeros._asdict().items()}
    return dy, ScalingStats(**cotangents), None


_emit_stats.defvjp(_emit_stats_fwd, _emit_stats_bwd)


def loop_levels(enclosing: Sequence[tuple[Node, Graph]], weight: Value | None) -> tuple[LoopLevel, ...]:
    """The loops and meshes around a product, outermost first.

    Args:
        enclosing: the nodes that it stands in, each with the body, outermost first.
        weight: the value that its parameter is stored in, in the innermost body.
    """
    levels = list[LoopLevel]()
    for node, body in reversed(enclosing):
        input_index = body.inputs.index(weight) if weight is not None and weight in body.inputs else -1
        if (info := primitives.loop_info(node.eqn)) is not None:
            levels.append(LoopLevel(input_index in info.scanned_operands, info.size))
        outer = weight.enclosing_value if weight is not None and input_index >= 0 else None
        weight = outer.weight.stored if outer is not None and outer.weight is not None else None
    return tuple(reversed(levels))
