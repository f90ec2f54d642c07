"""Layers whose scaling keeps a state: one product for NNX and Linen, and the state's variables in NNX models."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, nnx
from jax import Array

from fp8jax.core.recipe import Linear
from fp8jax.core.scaling import AxisNames
from fp8jax.ops.dispatch.sharding import merge
from fp8jax.ops.products.scaled_linear import ScalingState, ScalingStats, collects_stats, init_scaling, update_scaling
from fp8jax.ops.products.weights import QuantizedWeight
from fp8jax.rewrite import training
from fp8jax.rewrite.states import ParameterState, Stats, initial_state, scaling_names

STATE_PREFIX = "fp8jax_"
_STATISTICS_MESSAGE = (
    "{layer} has {names} scaling, whose state needs the largest magnitude of the output's gradient, and this gradient "
    "leaves it out. Write fp8jax.nnx.value_and_grad(...) or fp8jax.nnx.grad(...) in place of Flax's functions. Or "
    "differentiate with respect to nnx.Any(nnx.Param, fp8jax.nnx.GradientStatistic), and give all of the gradients to "
    "fp8jax.nnx.end_step. For gradients that do not train, call model.eval() first: scales then stay as they are"
)
_CLOSED_OVER_MESSAGE = (
    "{layer} has {names} scaling, whose state a call changes, and the model is from outside of a transformed function, "
    "such as the one that is differentiated: pass the model to this function as an argument, or call model.eval() "
    "first if its scales are to stay as they are"
)


def get_observed_operands(linear: Linear) -> list[str]:
    """The operands that calls of a layer observe."""
    return [operand for operand in linear.states if collects_stats(linear, operand)]


def init_stats(linear: Linear, operand: str, layer_axes: tuple[int, ...] = ()) -> Array:
    """What has been observed of an operand before the first call."""
    return jnp.zeros((*layer_axes, *linear.states[operand].stats_shape), jnp.float32)


def advance_states(
    linear: Linear, state: ScalingState, observed: Mapping[str, Array], axis_name: AxisNames
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The states of a layer after a step, by operand, and what is seen then: nothing.

    A layer that was not called since its last step keeps its states, so that a step may be ended twice.

    Args:
        linear: its recipe.
        state: before the step.
        observed: of the step, by operand.
        axis_name: mesh axes of replicas whose observations are merged, or None.
    """
    reset_stats = {o: jnp.zeros_like(value) for o, value in observed.items() if o != "dy"}
    if axis_name is not None:
        observed = {o: linear.states[o].reduce_over_replicas(value, axis_name) for o, value in observed.items()}
    new = update_scaling(state, ScalingStats(**observed), linear)._asdict()
    states = {operand: value for operand, value in new.items() if value is not None}
    was_called = _was_called(linear, observed)
    return {
        o: _where_called(was_called, value, getattr(state, o)) if o in observed else value
        for o, value in states.items()
    }, reset_stats


def _was_called(linear: Linear, observed: Mapping[str, Array]) -> Array | None:
    """Whether a layer was called since its last step, (*stacked,); None where its states tell that by themselves."""
    magnitudes = {o: value for o, value in observed.items() if not linear.states[o].is_threshold}
    forward = {o: value for o, value in magnitudes.items() if o != "dy"} or magnitudes
    called_by_operand = [
        jnp.any(v != 0, tuple(range(v.ndim - len(linear.states[o].stats_shape), v.ndim))) for o, v in forward.items()
    ]
    return functools.reduce(jnp.logical_or, called_by_operand) if called_by_operand else None


def _where_called(was_called: Array | None, new: Array, old: Array | None) -> Array:
    if was_called is None or old is None:
        return new
    return jnp.where(jnp.expand_dims(was_called, tuple(range(was_called.ndim, new.ndim))), new, old)


class ScalingVariable(nnx.Variable):
    """State of a scaling, and what calls of the current step have seen: module state, never differentiated."""


class GradientStatistic(nnx.Variable):
    """A slot whose cotangent is the largest magnitude of a gradient; never an argument of an optimizer.

    Its value is the largest cotangent since the last step, where `fp8jax.nnx.value_and_grad` or `grad` took gradients.
    """


class QuantizedWeightVariable(nnx.Variable):
    """Codes or scales of a weight; they follow from parameters, and are no state of their own."""


class WeightVariables(nnx.Module):
    """A `QuantizedWeight` as variables, so that loops over stacked layers take it apart."""

    def __init__(self, weight: QuantizedWeight) -> None:
        leaves, self.treedef = jax.tree.flatten(weight)
        self.leaves = nnx.List([QuantizedWeightVariable(leaf) for leaf in leaves])

    def unflatten(self) -> QuantizedWeight:
        return jax.tree.unflatten(self.treedef, [leaf[...] for leaf in self.leaves])


class ParameterStateModule(nnx.Module):
    """What an NNX model holds for the products with one parameter, besides it. It stands where a layer of Flax has the
    function that multiplies, and is called as that; or in an attribute of its own.

    Attributes:
        linear: the recipe of the products.
        weight: the path of the parameter in its layer.
        original: what the layer has there; None also for JAX's own function.
        jax_function: JAX's function that it stands for; None in an attribute of its own.
        prequantized: the weight quantized for all microbatches of a step, or None; `fp8jax.nnx.quantize_weights` sets
            it.
    """

    VARIABLES: tuple[type, ...] = (QuantizedWeightVariable,)

    def __init__(self, linear: Linear, weight: str, original: Any, jax_function: Any) -> None:
        self.linear, self.weight, self.original, self.jax_function = linear, weight, original, jax_function
        self.prequantized: Any = nnx.data(None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.original or self.jax_function)(*args, **kwargs)

    def get_weight_path(self, path: Sequence[Any]) -> tuple[str, ...]:
        """The path of the parameter, for that of the holder."""
        return (*map(str, path[:-1]), *self.weight.split("/"))

    def layer_axes(self) -> tuple[int, ...]:
        """The sizes of the first axes of the parameter, those of stacked layers; `nnx.scan` takes them off."""
        assert self.prequantized is not None
        codes: tuple[int, ...] = self.prequantized.unflatten().forward.codes.shape
        return codes[:-2]

    def read_state(self, weight: Any) -> ParameterState:
        """What a call reads that has this weight."""
        return ParameterState(
            self.linear, self.layer_axes(), weight=None if self.prequantized is None else self.prequantized.unflatten()
        )

    def merge_stats(self, observed: Stats) -> None:
        """Merges what a call observed into what was seen."""


class LayerScaling(ParameterStateModule):
    """The state of the scaling of one parameter's products, in an NNX model.

    Attributes:
        x, w, dy, or as `Stateful.variable_name` names them: states, fp32, with the leading axes of stacked layers.
        seen_x, seen_w: what the calls since the last update observed, fp32.
        slot: fp32 (...), the largest magnitude of the output's gradients since the last update, as `value_and_grad` of
            `fp8jax.nnx` has seen it.
        record: what is known of the training of the model.
        use_running_average: read the states and note nothing, as `model.eval()` sets it.

    Args:
        linear: the recipe of its products.
        kernel: the weight, (..., and at least two axes), an array or a shape.
        weight: as of `ParameterStateModule`.
        num_layer_axes: how many of its first axes are those of stacked layers.
        kind: of layer, for messages; no path, because layers that differ in nothing else share their traces.
        original, jax_function: as of `ParameterStateModule`.
        record: one for all layers of a model.
    """

    def __init__(
        self,
        linear: Linear,
        kernel: Array,
        weight: str,
        num_layer_axes: int = 0,
        kind: str = "a layer",
        original: Any = None,
        jax_function: Any = None,
        record: training.TrainingRecord | None = None,
    ) -> None:
        super().__init__(linear, weight, original, jax_function)
        self.kind, self.record = kind, record or training.TrainingRecord()
        self.use_running_average = False
        layers = kernel.shape[:num_layer_axes]

        def make_variables(kernel: Array) -> dict[str, Array]:
            init = lambda w: init_scaling(linear, merge(w, 1, w.ndim - 1))  # noqa: E731
            for _ in layers:
                init = jax.vmap(init)
            first = initial_state(linear, init(kernel))._asdict()
            state_arrays = {linear.states[o].variable_name(o): s for o, s in first.items() if s is not None}
            init_observed = {
                f"seen_{o}": init_stats(linear, o, layers) for o in ("x", "w") if collects_stats(linear, o)
            }
            return state_arrays | init_observed

        is_abstract = isinstance(kernel, jax.ShapeDtypeStruct)  # of a model that `nnx.eval_shape` made
        for name, state in (jax.eval_shape(make_variables, kernel) if is_abstract else make_variables(kernel)).items():
            setattr(self, name, ScalingVariable(state))
        if collects_stats(linear, "dy"):
            self.slot = GradientStatistic(
                jax.ShapeDtypeStruct(layers, jnp.float32) if is_abstract else jnp.zeros(layers, jnp.float32)
            )

    def layer_axes(self) -> tuple[int, ...]:
        for operand in ("x", "w"):
            if collects_stats(self.linear, operand):
                stats_shape: tuple[int, ...] = getattr(self, f"seen_{operand}").shape
                return stats_shape[: len(stats_shape) - len(self.linear.states[operand].stats_shape)]
        shape: tuple[int, ...] = (self.slot if hasattr(self, "slot") else self.bound_variable()).shape
        return shape

    def read_state(self, weight: Any) -> ParameterState:
        slot, state = self.slot[...] if hasattr(self, "slot") else None, self.scaling_state()
        if not self.use_running_average:
            names = scaling_names(self.linear)
            if slot is not None:
                slot = training.require_statistics(
                    slot, weight, _STATISTICS_MESSAGE.format(layer=self.kind, names=names)
                )
            if get_observed_operands(self.linear):
                operand = "x" if state.x is not None else get_observed_operands(self.linear)[0]
                state_array = training.read_state(
                    getattr(state, operand), (weight, slot), self.kind, names, record=self.record
                )
                state = state._replace(**{operand: state_array})
            if self.linear.needs_weight_bounds and state.w is not None:
                state = state._replace(
                    w=training.read_state(state.w, weight, self.kind, names, call=training.BOUNDS, record=self.record)
                )
        return super().read_state(weight)._replace(state=state, amax_slot=slot)

    def merge_stats(self, observed: Stats) -> None:
        if self.use_running_average:
            return
        if observed:
            training.record_observation(self.record)
        try:
            for operand, value in observed.items():
                stats = getattr(self, f"seen_{operand}")
                stats[...] = self.linear.states[operand].merge_stats(stats[...], value)
        except errors.TraceContextError:
            names = scaling_names(self.linear)
            raise errors.TraceContextError(_CLOSED_OVER_MESSAGE.format(layer=self.kind, names=names)) from None

    def share_stats(self, other: "LayerScaling") -> None:
        """From now on what calls observe is noted in another one's variables."""
        for operand in ("x", "w"):
            if collects_stats(self.linear, operand):
                setattr(self, f"seen_{operand}", getattr(other, f"seen_{operand}"))
        if hasattr(self, "slot"):
            self.slot = other.slot

    def scaling_state(self) -> ScalingState:
        return ScalingState(**{o: getattr(self, p.variable_name(o))[...] for o, p in self.linear.states.items()})

    def bound_variable(self) -> nnx.Variable:
        """The variable of the weight's state that comes from the optimizer."""
        variable: nnx.Variable = getattr(self, self.linear.states["w"].variable_name("w"))
        return variable

    def merge_gradient_amax(self, dy: Array) -> None:
        """Merges the largest magnitude of the output's gradient into the slot."""
        self.slot[...] = jnp.maximum(self.slot[...], dy)

    def advance_state(self, axis_name: AxisNames = None) -> None:
        """Ends a step: what was seen enters the states, and nothing is seen of the next one yet."""
        names = {o: "slot" if o == "dy" else f"seen_{o}" for o in get_observed_operands(self.linear)}
        observed = {o: getattr(self, name)[...] for o, name in names.items()}
        states, _ = advance_states(self.linear, self.scaling_state(), observed, axis_name)
        for operand, state in states.items():
            getattr(self, self.linear.states[operand].variable_name(operand))[...] = state
        for operand, name in names.items():
            getattr(self, name)[...] = jnp.zeros_like(observed[operand])


ParameterStateModule.VARIABLES = (ScalingVariable, GradientStatistic, QuantizedWeightVariable)


def advance_scaling(model: nnx.Module, grads: Any = None, *, axis_name: AxisNames = None) -> Any:
    """Ends a step of a model whose scaling observes its operands, such as delayed scaling: updates its states in place.

        loss, grads = fp8jax.nnx.value_and_grad(loss_fn)(model, batch)
        fp8jax.nnx.advance_scaling(model)
        optimizer.update(model, grads)

    Under gradient accumulation call it once a step: `fp8jax.nnx.value_and_grad` merges the statistics of microbatches.
    If you take gradients by `nnx.grad` with respect to `nnx.Any(nnx.Param, fp8jax.nnx.GradientStatistic)`, merge the
    statistics by maximum, and give them in `grads`. Under data parallelism in `jax.shard_map` give `axis_name`. A layer
    that was not called since its last step keeps its states.

    A program that trains a model and never calls this function causes a warning.

    Args:
        model: a model that `fp8jax.nnx.quantize` gave a recipe with delayed scaling.
        grads: gradients of a step, with or without statistics, or None.
        axis_name: mesh axes of replicas inside `jax.shard_map`, whose observations are merged: largest magnitudes by
            maximum, counts by sum.

    Returns:
        The gradients without the statistics.

    Raises:
        ValueError: the model has no such scaling.
    """
    layers = [(path, m) for path, m in nnx.iter_modules(model) if isinstance(m, LayerScaling)]
    layers = [(path, m) for path, m in layers if get_observed_operands(m.linear)]
    if not layers:
        raise ValueError("the model has no layer with delayed scaling, or another that observes its operands")
    for record in {m.record for _, m in layers}:
        training.record_advance(training.ADVANCE, record)
        layers_of_record = [m for _, m in layers if m.record is record]
        stats = [
            getattr(m, f"seen_{o}")[...] for m in layers_of_record for o in get_observed_operands(m.linear) if o != "dy"
        ]
        training.warn_if_stats_lost(record, stats)
    other_grads = None if grads is None else merge_gradient_stats(model, grads)
    for _, module in layers:
        module.advance_state(axis_name)
    return other_grads


def merge_gradient_stats(model: Any, grads: Any) -> Any:
    """The gradients without statistics; these are merged into the slots of the model, in place."""
    statistics, other_grads = nnx.split_state(grads, GradientStatistic, ...)
    amax_by_path = dict(nnx.to_flat_state(statistics))
    for path, module in nnx.iter_modules(model) if amax_by_path else ():
        leaf = amax_by_path.get((*path, "slot"))
        if leaf is not None and isinstance(module, LayerScaling):
            module.merge_gradient_amax(leaf[...] if isinstance(leaf, nnx.Variable) else jnp.asarray(leaf))
    return other_grads


def get_state_name(weight: str) -> str:
    """Where the variables of a product with a parameter are, in a layer of a user's own class; see `get_layer_path`."""
    return f"{STATE_PREFIX}{weight}"


def get_layer_path(path: Sequence[Any]) -> tuple[Any, ...]:
    """The path of the layer to which a product's variables belong."""
    return tuple(path[:-1]) if path and str(path[-1]).startswith(STATE_PREFIX) else tuple(path)


def get_weight_path(path: Sequence[Any]) -> tuple[str, ...]:
    """The path of the weight to whose product the variables at a path belong."""
    layer = get_layer_path(path)
    return (*map(str, layer), str(path[-1]).removeprefix(STATE_PREFIX) if len(layer) < len(path) else "kernel")
