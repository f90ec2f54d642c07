"""States of scalings: the inputs and statistics of products, and the end of a step.

Observations of a product leave a program as the gradient of a slot. Gradients pass through scans, checkpoints,
conditions, calls and meshes. Cotangents are summed, and most statistics must not be. Each use of a parameter therefore
has its own slot, and a use in a loop or on several devices has one for each iteration and device.

Bounds on weights under automatic scaling come from an optimizer, or else are measured.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from fp8jax.core.recipe import Linear
from fp8jax.core.scaling import AxisNames
from fp8jax.ops.dispatch.choice import cast_varying_like, match_varying_axes
from fp8jax.ops.dispatch.sharding import merge, reshard, spec_of
from fp8jax.ops.products.linear import ScalingState, ScalingStats, collects_stats, init_scaling, update_scaling
from fp8jax.ops.products.lora import AdaptedWeight
from fp8jax.ops.products.weights import FrozenWeight, QuantizedWeight
from fp8jax.rewrite import primitives, training
from fp8jax.rewrite.graph import Graph, Node, Value


class LoopLevel(NamedTuple):
    """A loop or a mesh around a product, or its axis of experts, which is the innermost level.

    Attributes:
        has_layer_axis: whether each iteration or expert has its own weight, and so its own state.
    """

    has_layer_axis: bool
    size: int


def layer_axis_sizes(levels: Sequence[LoopLevel]) -> tuple[int, ...]:
    """Sizes of the levels that have a weight for each iteration, device or expert."""
    return tuple(level.size for level in levels if level.has_layer_axis)


class StateRows(NamedTuple):
    """The rows of a parameter's state that one product reads, because it reads only some of the stacked matrices.

    Attributes:
        sizes: of the leading axes of the state. An index of these axes selects a row.
        shape: of the array of rows that the product reads.
        numbers: the flat indices of these rows.
    """

    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    numbers: tuple[int, ...]

    def select(self, x: Array) -> Array:
        """These rows of an array (*sizes, ...), as (*shape, ...)."""
        trailing = x.shape[len(self.sizes) :]
        return x.reshape(-1, *trailing)[np.array(self.numbers)].reshape(*self.shape, *trailing)

    def scatter(self, x: Array) -> Array:
        """An array (*sizes, ...) with `x`, (*shape, ...), in these rows, and zeros in all others."""
        trailing = x.shape[len(self.shape) :]
        rows = jnp.zeros((math.prod(self.sizes), *trailing), x.dtype)
        return rows.at[np.array(self.numbers)].set(x.reshape(-1, *trailing)).reshape(*self.sizes, *trailing)


class SlotAxes(NamedTuple):
    """The leading axes of the slots of one product, and the rows of the state that they belong to.

    Attributes:
        is_shared: for each axis whether its elements share one state.
    """

    sizes: tuple[int, ...]
    is_shared: tuple[bool, ...]
    rows: StateRows | None = None

    def broadcast(self, slot: Array) -> Array:
        """A slot of the state in the shape of the product's slots."""
        slot = slot if self.rows is None else self.rows.select(slot)
        return jnp.broadcast_to(jnp.expand_dims(slot, _indices(self.is_shared)), self.sizes)

    def merge(self, x: Array, reduce: Callable[..., Array] = jnp.max) -> Array:
        """The statistics of the product, reduced to those of the state."""
        reduced = reduce(x, _indices(self.is_shared))
        return reduced if self.rows is None else self.rows.scatter(reduced)


class WeightUse(NamedTuple):
    """One product with a parameter.

    Attributes:
        number: of the use, among those of this parameter.
        levels: the loops and meshes around it, outermost first, then its axis of experts.
        takes_codes: whether its matrix is the parameter, so that codes of the parameter are those of the matrix.
        rows: of the parameter's state that it reads; None for all.
    """

    path: str
    number: int
    levels: tuple[LoopLevel, ...]
    takes_codes: bool = True
    rows: StateRows | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.path, self.number

    @property
    def state_axes(self) -> tuple[int, ...]:
        """Sizes of the leading axes of the parameter's state."""
        return layer_axis_sizes(self.levels) if self.rows is None else self.rows.sizes

    @property
    def slot_axes(self) -> SlotAxes:
        is_shared = tuple(not level.has_layer_axis for level in self.levels)
        return SlotAxes(tuple(level.size for level in self.levels), is_shared, self.rows)


# Statistics of products, fp32, by operand.
Stats = dict[str, Array]


class UseInputs(NamedTuple):
    """Further inputs of a product: the state of its scaling, slots for its stats, and its quantized weight."""

    state: ScalingState | None = None
    slots: ScalingStats | None = None
    weight: QuantizedWeight | None = None


class ParameterState(NamedTuple):
    """The scaling of one parameter's products as a caller stores it, with leading axes if the parameter is stacked.

    Attributes:
        state: of their scaling, fp32, or None.
        stats: statistics of the calls since the last step, fp32. `dy` is a slot: its cotangent is the amax of the
            gradients of all uses.
        weight: the parameter in codes, (*layer_axes, inputs, outputs), or None.
    """

    linear: Linear
    layer_axes: tuple[int, ...] = ()
    state: ScalingState | None = None
    stats: ScalingStats = ScalingStats()
    weight: QuantizedWeight | None = None

    @classmethod
    def from_variables(
        cls, linear: Linear, layer_axes: tuple[int, ...], variables: Mapping[str, Array]
    ) -> "ParameterState":
        """The record of a layer's variables in Flax, by the names of `state_names` and `stats_names`.

        Evaluation needs no variables of stats.
        """
        state = ScalingState(**{o: variables[name] for o, name in state_names(linear).items()})
        stats = ScalingStats(**{o: variables[name] for o, name in stats_names(linear).items() if name in variables})
        return cls(linear, layer_axes, state, stats)

    def to_variables(self) -> dict[str, Array]:
        """The variables of a layer in Flax, by name."""
        assert self.state is not None
        variables = {name: getattr(self.state, o) for o, name in state_names(self.linear).items()}
        stats = {name: getattr(self.stats, o) for o, name in stats_names(self.linear).items()}
        return variables | {name: value for name, value in stats.items() if value is not None}

    def end_step(
        self, axis_name: AxisNames = None, apply_if: ArrayLike | None = None, *, keep_if_uncalled: bool = True
    ) -> "ParameterState":
        """The record after a step, with empty stats.

        Args:
            axis_name: mesh axes of the replicas to merge stats over, or None.
            apply_if: bool scalar; if it is False, the state stays unchanged. None is True.
            keep_if_uncalled: a layer that was not called since its last step keeps its state. A step may then be ended
                twice.

        Raises:
            ValueError: stats are missing, so that the state would not change.
        """
        assert self.state is not None
        linear, stats = self.linear, _as_dict(self.stats)
        if missing := [operand for operand in observed_operands(linear) if operand not in stats]:
            raise ValueError(f"{scaling_names(linear)} scaling has no stats of {', '.join(missing)} in this step")
        if axis_name is not None:
            stats = {
                o: linear.stateful_strategies[o].reduce_over_replicas(value, axis_name) for o, value in stats.items()
            }
        state = update_scaling(self.state, ScalingStats(**stats), linear)
        if keep_if_uncalled and (was_called := _was_called(linear, stats)) is not None:
            for operand in stats:
                new, old = getattr(state, operand), getattr(self.state, operand)
                mask = jnp.expand_dims(was_called, tuple(range(was_called.ndim, new.ndim)))
                state = state._replace(**{operand: jnp.where(mask, new, old)})
        if apply_if is not None:
            state = jax.tree.map(lambda new, old: jnp.where(apply_if, new, old), state, self.state)
        return self._replace(state=state, stats=jax.tree.map(jnp.zeros_like, self.stats))


def observed_operands(linear: Linear) -> list[str]:
    """The operands that calls of a layer observe."""
    return [operand for operand in linear.stateful_strategies if collects_stats(linear, operand)]


def state_names(linear: Linear) -> dict[str, str]:
    """The names of a layer's variables that hold states, by operand."""
    return {operand: scaling.variable_name(operand) for operand, scaling in linear.stateful_strategies.items()}


def stats_names(linear: Linear) -> dict[str, str]:
    """The names of a layer's variables that hold stats, by operand."""
    return {operand: "slot" if operand == "dy" else f"seen_{operand}" for operand in observed_operands(linear)}


def _as_dict(stats: ScalingStats) -> Stats:
    return {operand: value for operand, value in stats._asdict().items() if value is not None}


def _was_called(linear: Linear, stats: Mapping[str, Array]) -> Array | None:
    """Whether a layer was called since its last step, (*layer_axes,); None if updates by empty stats change nothing."""
    magnitudes = {o: value for o, value in stats.items() if not linear.stateful_strategies[o].is_threshold}
    forward = {o: value for o, value in magnitudes.items() if o != "dy"} or magnitudes
    called_by_operand = [
        jnp.any(v != 0, tuple(range(v.ndim - len(linear.stateful_strategies[o].stats_shape), v.ndim)))
        for o, v in forward.items()
    ]
    return functools.reduce(jnp.logical_or, called_by_operand) if called_by_operand else None


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["state", "slots"], meta_fields=["linear", "slot_axes"]
)
@dataclasses.dataclass(frozen=True)
class TrackedScaling:
    """The scaling of one parameter's products in a transformed function: a pytree that is differentiated.

    Attributes:
        state: fp32, read by calls, with leading axes where the parameter is stacked.
        slots: for each use zeros, whose gradients are its stats.
    """

    state: ScalingState
    slots: tuple[ScalingStats, ...]
    linear: Linear
    slot_axes: tuple[SlotAxes, ...]


States = dict[str, TrackedScaling]


def init(uses: Mapping[WeightUse, Linear], weights: Mapping[str, Any]) -> States:
    """The states before the first step, by the paths of parameters.

    Raises:
        ValueError: products of one parameter cannot have one state.
    """
    states: States = {}
    for path, group in _group_by_path(use for use in uses if uses[use].stateful_strategies):
        linear, state_axes = uses[group[0]], group[0].state_axes
        if any(use.state_axes != state_axes or uses[use] != linear for use in group):
            raise ValueError(
                f"products with the parameter {path} have {scaling_names(linear)} scaling, but they are in loops of "
                "different lengths or have different recipes, and the parameter has one state. Exclude one product "
                "with a rule, or use two parameters"
            )
        slots = tuple(zero_stats(linear, use.slot_axes.sizes) for use in group)
        state = initial_state(linear, weights[path], state_axes)
        states[path] = TrackedScaling(state, slots, linear, tuple(use.slot_axes for use in group))
    return states


def zero_stats(linear: Linear, axes: tuple[int, ...]) -> ScalingStats:
    """The stats of no call, fp32, (*axes, *stats_shape)."""
    return ScalingStats(
        **{
            o: jnp.zeros((*axes, *linear.stateful_strategies[o].stats_shape), jnp.float32)
            for o in observed_operands(linear)
        }
    )


def initial_state(linear: Linear, weight: Any, layer_axes: tuple[int, ...]) -> ScalingState:
    """The state that a caller stores at first; see `measured_state`."""
    measured = measured_state(linear, weight, layer_axes)
    if not linear.needs_weight_bounds:
        return measured
    assert measured.w is not None
    return measured._replace(w=jnp.zeros_like(measured.w))  # no bound yet


def measured_state(linear: Linear, weight: Any, layer_axes: tuple[int, ...]) -> ScalingState:
    """The state of products with a weight, (*layer_axes, ...), before the first step."""
    init_one: Callable[[Array], ScalingState] = lambda w: init_scaling(linear, merge(w, w.ndim - 1, 1))  # noqa: E731
    if weight.shape[: len(layer_axes)] != layer_axes:  # the program stacks it differently than the caller
        return jax.tree.map(lambda s: jnp.broadcast_to(s, (*layer_axes, *s.shape)), init_one(weight))
    for _ in layer_axes:
        init_one = jax.vmap(init_one)
    return init_one(weight)


def advance(states: States, observed: States, axis_name: AxisNames = None) -> States:
    """The states after a step; see `Transformed.advance`."""
    new = {}
    for path, scaling in states.items():
        stats = _merge_stats(scaling.linear, [*map(_as_dict, observed[path].slots)], scaling.slot_axes)
        stored = ParameterState(scaling.linear, state=scaling.state, stats=ScalingStats(**stats))
        state = stored.end_step(axis_name, keep_if_uncalled=False).state
        assert state is not None
        new[path] = dataclasses.replace(scaling, state=state)
    return new


def _merge_stats(linear: Linear, use_stats: Sequence[Stats], slot_axes: Sequence[SlotAxes]) -> Stats:
    """The stats of a parameter from those of its uses, merged by the rule of each scaling."""
    merged: Stats = {}
    for stats, axes in zip(use_stats, slot_axes, strict=True):
        for operand, stat in stats.items():
            scaling = linear.stateful_strategies[operand]
            # The gradient's statistic is a magnitude in any case.
            reduced = axes.merge(stat, jnp.sum if scaling.merge == "sum" and operand != "dy" else jnp.max)
            previous = merged.get(operand)
            merged[operand] = reduced if previous is None else scaling.merge_stats(previous, reduced)
    return merged


def _indices(flags: Sequence[bool]) -> tuple[int, ...]:
    return tuple(i for i, flag in enumerate(flags) if flag)


def merge_use_stats(
    stats: Mapping[tuple[tuple[str, int], str], Array], uses: Mapping[WeightUse, Linear]
) -> dict[str, Stats]:
    """The stats of the forward pass, by the paths of parameters."""
    stats_by_use: dict[tuple[str, int], Stats] = {}
    for (key, operand), value in stats.items():
        stats_by_use.setdefault(key, {})[operand] = value
    return {
        path: _merge_stats(uses[group[0]], [stats_by_use[use.key] for use in group], [use.slot_axes for use in group])
        for path, group in _group_by_path(use for use in uses if use.key in stats_by_use)
    }


def _group_by_path(uses: Iterable[WeightUse]) -> Iterator[tuple[str, list[WeightUse]]]:
    for path, group in itertools.groupby(sorted(uses), key=lambda use: use.path):
        yield path, list(group)


def use_inputs_from_parameter_states(
    parameter_states: Mapping[str, ParameterState], uses: Mapping[WeightUse, Linear]
) -> dict[tuple[str, int], UseInputs]:
    """The inputs of each use, from the records that the caller stores.

    Raises:
        ValueError: the recipe of a product keeps a state that is not stored, or one of another shape.
    """
    use_inputs: dict[tuple[str, int], UseInputs] = {}
    for path, group in _group_by_path(uses):
        linear, stored = uses[group[0]], parameter_states.get(path)
        strategies = linear.stateful_strategies
        if stored is None or (strategies and (stored.state is None or stored.linear.stateful_strategies != strategies)):
            if observed_operands(linear):
                raise ValueError(
                    f"the model has no state for {scaling_names(linear)} scaling of {path}: the recipe was chosen by "
                    "the operations of the call. Pass fp8jax.Rule(path, recipe) for this layer"
                )
            continue
        state_axes = group[0].state_axes
        if state_axes == stored.layer_axes[: len(state_axes)]:
            stored = _without_matrix_axes(stored, len(state_axes))
        if any(use.state_axes != stored.layer_axes for use in group):
            raise ValueError(
                f"products with {path} run in loops over {state_axes} of it, but there are codes or states "
                f"for {stored.layer_axes}. Use nnx.scan over its first axes, or exclude it with a rule"
            )
        gradient_slots: Sequence[Any] = [None] * len(group)
        if stored.stats.dy is not None:
            gradient_slots = _broadcast_max_slot(stored.stats.dy, tuple(use.slot_axes for use in group))
        for use, gradient_slot in zip(group, gradient_slots, strict=True):
            slots = ScalingStats() if stored.state is None else zero_stats(linear, use.slot_axes.sizes)
            codes = stored.weight if use.takes_codes else None
            use_inputs[use.key] = UseInputs(stored.state, slots._replace(dy=gradient_slot), codes)
    return use_inputs


def _without_matrix_axes(stored: ParameterState, num_layer_axes: int) -> ParameterState:
    """A record for products with all matrices of a parameter together, which use the state of the first matrix."""
    count = len(stored.layer_axes) - num_layer_axes
    if not count:
        return stored
    state, axes = stored.state, tuple(range(num_layer_axes, len(stored.layer_axes)))
    if state is not None:
        # A state that does not come from calls, such as a bound, has a value for each matrix.
        state = state._replace(
            **{
                o: first_matrix(x, num_layer_axes, count) if collects_stats(stored.linear, o) else jnp.max(x, axes)
                for o, x in state._asdict().items()
                if x is not None
            }
        )
    stats = jax.tree.map(lambda x: first_matrix(x, num_layer_axes, count), stored.stats)
    return ParameterState(stored.linear, stored.layer_axes[:num_layer_axes], state, stats)


def first_matrix(x: Array, num_layer_axes: int, count: int) -> Array:
    """The first entry along `count` axes after those of layers."""
    return x[(*[slice(None)] * num_layer_axes, *[0] * count)]


# Static are axes, not uses: layers that differ only in their paths share a trace.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _broadcast_max_slot(slot: Array, axes_by_use: tuple[SlotAxes, ...]) -> tuple[Array, ...]:
    """`slot` in the shape of each use's slots. The cotangent of `slot` is the maximum of the uses' cotangents."""
    return tuple(axes.broadcast(slot) for axes in axes_by_use)


def _broadcast_max_slot_bwd(axes_by_use: tuple[SlotAxes, ...], _: None, cotangents: tuple[Array, ...]) -> tuple[Array]:
    largest = (axes.merge(x) for x, axes in zip(cotangents, axes_by_use, strict=True))
    return (functools.reduce(jnp.maximum, largest),)


_broadcast_max_slot.defvjp(lambda slot, axes: (_broadcast_max_slot(slot, axes), None), _broadcast_max_slot_bwd)


def use_inputs_from_states(states: States, weights: Mapping[str, Any]) -> dict[tuple[str, int], UseInputs]:
    """The inputs of each use, from the states of a transformed function."""
    use_inputs: dict[tuple[str, int], UseInputs] = {}
    for path, scaling in states.items():
        state, (slots, structure) = scaling.state, jax.tree.flatten(scaling.slots)
        # Stats of all operands are gradients of one pytree: one slot stands for all.
        stored = ParameterState(scaling.linear, state=state, stats=ScalingStats(dy=slots[0] if slots else None))
        read = read_in_call(stored, weights.get(path), path or "the parameter", training.TRANSFORM)
        assert read.state is not None
        state, slots = read.state, [read.stats.dy, *slots[1:]] if slots else []
        for number, use_slots in enumerate(jax.tree.unflatten(structure, slots)):
            use_inputs[path, number] = UseInputs(state, use_slots)
    return use_inputs


def read_in_call(
    stored: ParameterState,
    weight: Any,
    layer: str,
    interface: training.Interface,
    record: training.TrainingRecord | None = None,
    *,
    is_mutable: bool = True,
) -> ParameterState:
    """A record as the products of a call read it, with the errors and warnings of `fp8jax.rewrite.training`.

    Args:
        weight: the parameter of the call, in any structure.
        record: of the model's training, in NNX.
        is_mutable: whether the caller stores the statistics of the call.
    """
    linear, state, slot = stored.linear, stored.state, stored.stats.dy
    assert state is not None
    names, observed = scaling_names(linear), observed_operands(linear)
    if slot is not None:
        message = interface.statistics_lost.format(layer=layer, names=names)
        slot = training.raise_if_differentiated(slot, weight, message, unless_differentiated=True)
    if observed:
        value = getattr(state, observed[0])
        if not is_mutable:
            message = interface.not_mutable.format(layer=layer, names=names)
            value = training.raise_if_differentiated(value, weight, message)
        warning = interface.never_advanced(training.ADVANCE, layer, names)
        value = training.warn_if_never_advanced(value, (weight, slot), warning, training.ADVANCE, record)
        state = state._replace(**{observed[0]: value})
    if linear.needs_weight_bounds and state.w is not None:
        warning = interface.never_advanced(training.BOUNDS, layer, names)
        state = state._replace(w=training.warn_if_never_advanced(state.w, weight, warning, training.BOUNDS, record))
    return stored._replace(state=state, stats=stored.stats._replace(dy=slot))


def scaling_names(linear: Linear) -> str:
    """The names of the scalings of a recipe that keep states."""
    return " and ".join(sorted({linear.scaling_name(operand) for operand in linear.stateful_strategies}))


def stats_as_cotangents(y: Array, slots: ScalingStats, stats: ScalingStats) -> Array:
    """`y`; in the backward pass the stats become the gradient of the slots."""
    if slots.x is None and slots.w is None:
        return y  # itself: facts about its gradient are found by its identity
    arrays = [x for x in (*slots, *stats) if x is not None]
    y, *varying = match_varying_axes(y, *arrays)  # type: ignore[assignment]
    varying_iter = iter(varying)
    slots, stats = (ScalingStats(*(None if x is None else next(varying_iter) for x in each)) for each in (slots, stats))
    return _emit_stats(y, slots, stats)


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


def loop_levels(
    enclosing: Sequence[tuple[Node, Graph]], weight: Value | None, has_experts: bool = False
) -> tuple[LoopLevel, ...]:
    """The loops and meshes around a product, outermost first.

    Args:
        enclosing: the nodes that contain the product, each with its body, outermost first.
        weight: the value that its parameter is stored in, in the innermost body.
        has_experts: whether the first axis of the parameter is that of experts. A mesh that splits it is a layer axis.
    """
    levels = list[LoopLevel]()
    for node, body in reversed(enclosing):
        input_index = body.inputs.index(weight) if weight is not None and weight in body.inputs else -1
        if (info := primitives.loop_info(node.eqn)) is not None:
            is_split = has_experts and primitives.splits_first_axis(node.eqn, input_index)
            levels.append(LoopLevel(is_split or input_index in info.scanned_operands, info.size))
        outer = weight.enclosing_value if weight is not None and input_index >= 0 else None
        weight = outer.weight.stored if outer is not None and outer.weight is not None else None
    return tuple(reversed(levels))


def find_state_rows(
    matrix: Value, enclosing: Sequence[tuple[Node, Graph]], has_experts: bool = False
) -> StateRows | None:
    """The rows of a state that a product reads, with a row for each stacked matrix; None for all, or if unknown.

    Args:
        matrix: the product's operand, computed from one parameter.
        enclosing: as of `loop_levels`.
    """
    value, steps = matrix, list[tuple[Node, Value]]()
    while value.node is not None or value.enclosing_value is not None:
        node = value.node or next(node for node, body in enclosing if value in body.inputs)
        steps.append((node, value))
        if value.enclosing_value is not None:
            value = value.enclosing_value
        elif node.kind == "optimization_barrier":
            value = node.operands[node.results.index(value)]
        else:
            sources = [operand for operand in node.operands if operand.weight is not None]
            if len(sources) != 1:
                return None
            (value,) = sources
    for num_axes in range(value.aval.ndim - 2, 0, -1):
        sizes, axes = value.shape[:num_axes], tuple(range(num_axes))
        numbers = np.arange(math.prod(sizes)).reshape(sizes)
        for node, result in reversed(steps):
            is_split = result.enclosing_value is not None and result.shape != result.enclosing_value.shape
            if is_split and (node.kind != "scan" or axes[:1] != (0,)):
                break
            if is_split:
                axes = tuple(axis - 1 for axis in axes[1:])
            elif result.enclosing_value is None:
                if (moved := _move_rows(numbers, axes, node, result)) is None:
                    break
                numbers, axes = moved
        else:
            if axes == ((0,) if has_experts else ()):
                is_whole = np.array_equal(numbers, np.arange(math.prod(sizes)).reshape(sizes))
                return None if is_whole else StateRows(sizes, numbers.shape, tuple(numbers.ravel().tolist()))
    return None


def _move_rows(numbers: Any, axes: tuple[int, ...], node: Node, result: Value) -> tuple[Any, tuple[int, ...]] | None:
    """Row numbers after a slice or a change of layout, and their axes in its result; None if they are unknown.

    Args:
        numbers: the row numbers, an array with the loop axes first.
        axes: the axes of the node's operand that correspond to the other axes of `numbers`.
    """
    source = next(operand for operand in node.operands if operand.weight is not None)
    params, shape, num_loops = node.eqn.params, source.shape, numbers.ndim - len(axes)
    slices, removed = [slice(None)] * len(shape), tuple[int, ...]()
    if node.kind == "slice":
        slices = list(
            map(slice, params["start_indices"], params["limit_indices"], params["strides"] or [1] * len(shape))
        )
    elif node.kind == "dynamic_slice":
        for axis, size in enumerate(params["slice_sizes"]):
            start = node.operands[1 + axis].constant
            if start is not None:
                slices[axis] = slice(int(start), int(start) + size)
            elif size != shape[axis] and axis in axes:
                return None
    elif node.kind in ("split", "unstack"):
        sizes, index = params.get("sizes", [1] * len(node.results)), node.results.index(result)
        slices[params["axis"]] = slice(sum(sizes[:index]), sum(sizes[: index + 1]))
        removed = (params["axis"],) if node.kind == "unstack" else ()
    elif node.kind == "rev":
        slices = [slice(None, None, -1 if axis in params["dimensions"] else 1) for axis in range(len(shape))]
    elif node.kind == "squeeze":
        removed = params["dimensions"]
    elif node.kind == "transpose":
        moved_axes = [params["permutation"].index(axis) for axis in axes]
        order = sorted(range(len(axes)), key=moved_axes.__getitem__)
        numbers = numbers.transpose(*range(num_loops), *(num_loops + i for i in order))
        return numbers, tuple(sorted(moved_axes))
    elif result.shape != shape:
        first, last = result.shape[: result.aval.ndim - len(shape[len(axes) :])], shape[len(axes) :]
        is_first = axes == tuple(range(len(axes))) and math.prod(first) == math.prod(shape[: len(axes)])
        if not is_first or result.shape[len(first) :] != last:
            return None
        return numbers.reshape(*numbers.shape[:num_loops], *first), tuple(range(len(first)))
    numbers = numbers[(*[slice(None)] * num_loops, *(slices[axis] for axis in axes))]
    numbers = numbers.squeeze(tuple(num_loops + i for i, axis in enumerate(axes) if axis in removed))
    return numbers, tuple(axis - sum(r < axis for r in removed) for axis in axes if axis not in removed)


def complete_bounds(
    bounds: Mapping[Any, Array], weights: Mapping[Any, Array], linears: Mapping[Any, Linear]
) -> dict[Any, Array]:
    """The bounds of weights, fp32, (*layer_axes,); missing ones are measured.

    Each is measured in its own conditional, so that other weights are not read.

    Args:
        bounds: 0 if there is none, because weights may have been loaded since.
        weights: (*layer_axes, ...), by the keys of bounds.
    """
    if not bounds:
        return {}
    known_bounds = {key: lax.stop_gradient(bound) for key, bound in bounds.items()}
    arrays = {key: lax.stop_gradient(weights[key]) for key in bounds}

    def resolve(key: Any, bound: Array, weight: Array) -> Array:
        measure = functools.partial(_get_or_measure, linears[key])
        if len(bounds) == 1:
            return measure(bound, weight)
        return lax.cond(jnp.all(bound > 0), lambda bound, _: bound, measure, bound, weight)

    def resolve_all(known_bounds: dict[Any, Array], arrays: dict[Any, Array]) -> dict[Any, Array]:
        return {key: resolve(key, known_bounds[key], arrays[key]) for key in bounds}

    # One conditional around all others: a program that has all bounds evaluates only this one.
    all_known = functools.reduce(jnp.logical_and, [jnp.all(bound > 0) for bound in known_bounds.values()])
    return lax.cond(all_known, lambda known_bounds, _: known_bounds, resolve_all, known_bounds, arrays)


def _get_or_measure(linear: Linear, bound: Array, weight: Array) -> Array:
    """The bound, or if it is 0, the amax that the scaling measures over the whole weight."""
    found = measured_state(linear, weight, bound.shape).w
    assert found is not None
    if axes := tuple(jax.sharding.get_abstract_mesh().manual_axes):
        found = lax.pmax(found, axes)
    found = jnp.where(bound > 0, bound, found)
    return cast_varying_like(reshard(found, spec_of(bound), bound), bound)


def with_complete_bounds(
    use_inputs: Mapping[tuple[str, int], UseInputs], uses: Mapping[WeightUse, Linear], weights: Mapping[str, Any]
) -> dict[tuple[str, int], UseInputs]:
    """The inputs of uses, with a bound of each weight, and with only those rows of a state that the use reads.

    Args:
        weights: the parameters as the caller stores them, by path; codes need no bounds.
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
    for use in uses:
        use_input = use_inputs.get(use.key, UseInputs())
        state = use_input.state
        if state is None:
            continue
        if use in tracked_uses and use.path in bounds:
            state = state._replace(w=bounds[use.path])
        if use.rows is not None:
            state = jax.tree.map(use.rows.select, state)
        completed[use.key] = use_input._replace(state=state)
    return completed


def with_weight_bounds(states: States, bounds: Mapping[tuple[str, ...], Array]) -> States:
    """States with the weight bounds of an optimizer; see `Transformed.update_weight_amax_bounds`."""
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
        ValueError: there is none, or the parameter is stacked differently.
    """
    if bound is None:
        raise ValueError(
            f"the optimizer does not track the parameter {path}: its state belongs to another model, or to a part of "
            "this one. Pass the state of the optimizer that trains it, or end the step of that part"
        )
    if bound.shape[: len(layer_axes)] != layer_axes:
        raise ValueError(
            f"automatic scaling expects bounds with leading axes {layer_axes} for {path}, but those of the optimizer "
            f"have shape {bound.shape}; stack the layers along the first axes of the parameter"
        )
    return jnp.max(bound, axis=tuple(range(len(layer_axes), bound.ndim)))
