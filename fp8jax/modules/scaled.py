"""Scalings with a state in NNX models: their variables, gradients that keep their statistics, and the end of a step."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, nnx
from jax import Array
from jax.typing import ArrayLike

from fp8jax.core import frames
from fp8jax.core.recipe import Linear
from fp8jax.core.scaling import Automatic, AxisNames
from fp8jax.ops.products.weights import QuantizedWeight
from fp8jax.rewrite import training
from fp8jax.rewrite.states import (
    ParameterState,
    Stats,
    bound_per_layer,
    complete_bounds,
    initial_state,
    observed_operands,
    read_in_call,
    scaling_names,
    state_names,
    stats_names,
    zero_stats,
)

# The state of a parameter's products in a layer of a user's own class has this prefix and the parameter's name.
STATE_PREFIX = "fp8jax_"
_CLOSED_OVER_MESSAGE = (
    "{layer} has {names} scaling, and each call updates its state, but a transformed function, such as the one that "
    "is differentiated, closes over the model. Pass the model to this function as an argument, or call model.eval() "
    "first to keep the scales unchanged"
)
_LOST_MESSAGE = (
    "the statistics of this model's calls are lost, and its scales do not change. nnx.clone and nnx.merge make copies: "
    "train the model itself. nnx.scan drops changes of a model that it broadcasts (None in in_axes): use "
    "nnx.StateAxes({nnx.Param: None, ...: nnx.Carry}) for the model in in_axes"
)
_EVALUATION_MESSAGE = (
    "this model is trained in evaluation mode, so its scales do not change: call model.train() before the next step. "
    "Ignore this warning if the scales are meant to stay"
)


class ScalingVariable(nnx.Variable):
    """State of a scaling, or the stats of the current step: module state, never differentiated."""


class GradientStatistic(nnx.Variable):
    """A slot variable with the amax of a gradient as its cotangent; never an argument of an optimizer.

    Its value is the largest cotangent since the last step, if `fp8jax.nnx.value_and_grad` or `grad` took the gradients.
    """


class QuantizedWeightVariable(nnx.Variable):
    """Codes or scales of a weight; they follow from parameters and are not separate state."""


class WeightVariables(nnx.Module):
    """A `QuantizedWeight` as variables, so that loops over stacked layers slice it."""

    def __init__(self, weight: QuantizedWeight) -> None:
        leaves, self.treedef = jax.tree.flatten(weight)
        self.leaves = nnx.List([QuantizedWeightVariable(leaf) for leaf in leaves])

    def unflatten(self) -> QuantizedWeight:
        return jax.tree.unflatten(self.treedef, [leaf[...] for leaf in self.leaves])


class ParameterStateModule(nnx.Module):
    """The codes and the scaling state of one parameter's products, as an NNX model stores them.

    It replaces the product function of a layer of Flax, and is called as this function; or it is a separate attribute.

    Attributes:
        weight: the path of the parameter in its layer.
        original: the layer's value in this place; None also for JAX's own function.
        jax_function: JAX's function that it replaces; None in a separate attribute.
        prequantized: the weight quantized for all microbatches of a step by `fp8jax.nnx.quantize_weights`, or None.
    """

    VARIABLES = (ScalingVariable, GradientStatistic, QuantizedWeightVariable)

    def __init__(self, linear: Linear, weight: str, original: Any, jax_function: Any) -> None:
        self.linear, self.weight, self.original, self.jax_function = linear, weight, original, jax_function
        self.prequantized: Any = nnx.data(None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.original or self.jax_function)(*args, **kwargs)

    def get_weight_path(self, path: Sequence[Any]) -> tuple[str, ...]:
        """The path of the parameter, from the path of this module."""
        return (*map(str, path[:-1]), *self.weight.split("/"))

    def layer_axes(self) -> tuple[int, ...]:
        """Sizes of the first axes of the parameter, those of stacked layers; `nnx.scan` removes them."""
        assert self.prequantized is not None
        codes: tuple[int, ...] = self.prequantized.unflatten().forward.codes.shape
        return codes[:-2]

    def load(self) -> ParameterState:
        """The record of the variables, without codes."""
        return ParameterState(self.linear, self.layer_axes())

    def read_state(self, weight: Any) -> ParameterState:
        """The record that a call with this weight reads."""
        return self.load()._replace(weight=None if self.prequantized is None else self.prequantized.unflatten())

    def merge_stats(self, observed: Stats) -> None:
        """Merge what a call observed into the stats of the step."""


class LayerScaling(ParameterStateModule):
    """The state of the scaling of one parameter's products, in an NNX model.

    Attributes:
        x, w, dy, or as `Stateful.variable_name` names them: states, fp32, with the leading axes of stacked layers.
        seen_x, seen_w: stats of the calls since the last step, fp32.
        slot: fp32, (*layer_axes,); the largest magnitude of the output's gradients since the last step, written by
            `fp8jax.nnx.value_and_grad`.
        record: of the training of the model.
        use_running_average: read the states and store no stats, as `model.eval()` sets it.

    Args:
        kernel: the weight, (..., and at least two axes), an array or a shape.
        num_layer_axes: the number of its first axes that are those of stacked layers.
        kind: of layer, for messages; without a path, because layers that differ in nothing else share their traces.
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
        layer_axes = kernel.shape[:num_layer_axes]

        def make_variables(kernel: Array) -> dict[str, Array]:
            state, stats = initial_state(linear, kernel, layer_axes), zero_stats(linear, layer_axes)
            return ParameterState(linear, layer_axes, state, stats).to_variables()

        is_abstract = isinstance(kernel, jax.ShapeDtypeStruct)  # of a model that `nnx.eval_shape` made
        for name, value in (jax.eval_shape(make_variables, kernel) if is_abstract else make_variables(kernel)).items():
            setattr(self, name, (GradientStatistic if name == "slot" else ScalingVariable)(value))

    def layer_axes(self) -> tuple[int, ...]:
        for operand, name in stats_names(self.linear).items():
            shape: tuple[int, ...] = getattr(self, name).shape
            stats_shape = () if operand == "dy" else self.linear.stateful_strategies[operand].stats_shape
            return shape[: len(shape) - len(stats_shape)]
        return self.bound_variable().shape

    def load(self) -> ParameterState:
        names = [*state_names(self.linear).values(), *stats_names(self.linear).values()]
        variables = {name: getattr(self, name)[...] for name in names}
        return ParameterState.from_variables(self.linear, self.layer_axes(), variables)

    def read_state(self, weight: Any) -> ParameterState:
        stored = super().read_state(weight)
        if self.use_running_average:
            return stored
        return read_in_call(stored, weight, self.kind, training.NNX, self.record)

    def merge_stats(self, observed: Stats) -> None:
        if self.use_running_average:
            return
        if observed:
            training.record_observation(self.record)
        try:
            for operand, value in observed.items():
                stats, scaling = getattr(self, f"seen_{operand}"), self.linear.stateful_strategies[operand]
                if stats.ndim == value.ndim:
                    stats[...] = scaling.merge_stats(stats[...], value)
                    continue
                # A product of all matrices together has the state of the first one.
                num_layer_axes = value.ndim - len(scaling.stats_shape)
                index = (*[slice(None)] * num_layer_axes, *[0] * (stats.ndim - value.ndim), ...)
                stats[...] = stats[...].at[index].set(scaling.merge_stats(stats[...][index], value))
        except errors.TraceContextError:
            names = scaling_names(self.linear)
            raise errors.TraceContextError(_CLOSED_OVER_MESSAGE.format(layer=self.kind, names=names)) from None

    def share_stats(self, other: "LayerScaling") -> None:
        """Store stats in another one's variables from now on."""
        for name in stats_names(self.linear).values():
            setattr(self, name, getattr(other, name))

    def bound_variable(self) -> nnx.Variable:
        """The variable of the weight's state that comes from the optimizer."""
        return getattr(self, self.linear.stateful_strategies["w"].variable_name("w"))

    def end_step(self, axis_name: AxisNames = None, apply_if: ArrayLike | None = None) -> None:
        """Advance the states by the stats of the step, unless `apply_if` is False, and empty these, in place."""
        for name, value in self.load().end_step(axis_name, apply_if).to_variables().items():
            getattr(self, name)[...] = value


def get_scalings(model: Any) -> list[tuple[tuple[Any, ...], LayerScaling]]:
    """The scalings with a state of a model, with their paths."""
    return [(path, module) for path, module in nnx.iter_modules(model) if isinstance(module, LayerScaling)]


def advance_scaling(
    model: nnx.Module, grads: Any = None, *, axis_name: AxisNames = None, apply_if: ArrayLike | None = None
) -> Any:
    """Ends a step, in place, of a model with a scaling that observes its operands, such as delayed scaling.

        loss, grads = fp8jax.nnx.value_and_grad(loss_fn)(model, batch)
        fp8jax.nnx.advance_scaling(model)
        optimizer.update(model, grads)

    With gradient accumulation, call it once per step: `fp8jax.nnx.value_and_grad` merges the statistics of
    microbatches. If you call `nnx.grad` with respect to `nnx.Any(nnx.Param, fp8jax.nnx.GradientStatistic)`, merge the
    statistics by maximum, and pass them in `grads`. For data parallelism in `jax.shard_map`, pass `axis_name`. A layer
    that was not called since its last step keeps its states.

    A program that trains a model and never calls this function causes a warning, as does a call after `model.eval()`.

    Args:
        model: a model of `fp8jax.nnx.quantize` with such a scaling.
        grads: gradients of a step, with or without statistics, or None.
        axis_name: mesh axes of replicas inside `jax.shard_map`. Their statistics are merged: amax by maximum,
            counts by sum.
        apply_if: bool scalar; if it is False, as after a step that was skipped, states stay unchanged. None is True.

    Returns:
        The gradients without the statistics.

    Raises:
        ValueError: no scaling of the model observes its operands.
    """
    layers = [module for _, module in get_scalings(model) if observed_operands(module.linear)]
    if not layers:
        raise ValueError("the model has no layer with delayed scaling or another scaling that observes its operands")
    for record in dict.fromkeys(layer.record for layer in layers):
        training.record_advance(training.ADVANCE, record)
        stats = [layer.load().stats for layer in layers if layer.record is record]
        if training.are_stats_lost(record, [value for x, w, _ in stats for value in (x, w) if value is not None]):
            frames.warn(_LOST_MESSAGE)
    if all(layer.use_running_average for layer in layers):
        frames.warn(_EVALUATION_MESSAGE)
    other_grads = None if grads is None else merge_gradient_stats(model, grads)
    for layer in layers:
        layer.end_step(axis_name, apply_if)
    return other_grads


def merge_gradient_stats(model: Any, grads: Any) -> Any:
    """The gradients without statistics; these are merged by maximum into the slots of the model, in place."""
    statistics, other_grads = nnx.split_state(grads, GradientStatistic, ...)
    amax_by_path = dict(nnx.to_flat_state(statistics))
    for path, module in get_scalings(model) if amax_by_path else ():
        leaf = amax_by_path.get((*path, "slot"))
        if leaf is not None:
            amax, slot = leaf[...] if isinstance(leaf, nnx.Variable) else jnp.asarray(leaf), vars(module)["slot"]
            slot[...] = jnp.maximum(slot[...], amax)
    return other_grads


def update_weight_amax_bounds(model: nnx.Module, bounds: Mapping[tuple[str, ...], Array]) -> None:
    """Updates the bounds of layers with automatic weight scaling, in place. Call it after each update.

    `fp8jax.nnx.Optimizer` does this automatically. With the optimizer of Flax:

        optimizer = nnx.Optimizer(model, optax.chain(optax.adamw(lr), fp8jax.track_weight_amax()), wrt=nnx.Param)
        optimizer.update(model, grads)
        fp8jax.nnx.update_weight_amax_bounds(model, fp8jax.get_weight_amax_bounds(optimizer.opt_state))

    Evaluation reads the bounds, which are part of the model's state and of its checkpoints. A model without bounds
    measures its weights in each call.

    Args:
        model: a model that `fp8jax.nnx.quantize` gave a recipe with automatic weight scaling.
        bounds: the result of `fp8jax.get_weight_amax_bounds` for the state of the optimizer of the model's parameters.

    Raises:
        ValueError: the model has no layer with automatic weight scaling, or the optimizer does not track a weight.
    """
    set_bounds(model, bounds, only_trained=False)


def set_bounds(model: nnx.Module, bounds: Mapping[tuple[str, ...], Array], only_trained: bool) -> None:
    """Set the bounds of layers to those of an optimizer, in place; `only_trained` skips weights that it does not have.

    Raises:
        ValueError: the model has no layer with automatic weight scaling, or the optimizer belongs to another model.
    """
    layers = _bounded_layers(model)
    for record in dict.fromkeys(layer.record for _, layer in layers):
        training.record_advance(training.BOUNDS, record)
    trained = [(path, layer) for path, layer in layers if path in bounds] if only_trained else layers
    if bounds and not trained:
        # An optimizer of embeddings or a head alone follows other parameters of this model.
        state_paths = {tuple(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))}
        trained = [] if state_paths & set(bounds) else layers
    for path, layer in trained:
        _set_bound(layer, path, bounds.get(path))


def reset_weight_amax_bounds(model: nnx.Module) -> None:
    """Measures the weights of a model with automatic weight scaling, in place.

    Call it after loading parameters into a model with bounds: old bounds would clip them. A model without bounds then
    needs no measurement in each call. If training continues, call `fp8jax.reset_weight_amax_bounds` for the
    optimizer, too.

    Raises:
        ValueError: the model has no layer with automatic weight scaling.
    """
    weights = _get_params_by_path(model)
    for path, layer in _bounded_layers(model):
        _set_bound(layer, path, Automatic().measure_amax(weights[path][...]))


def measure_missing_bounds(model: nnx.Module) -> None:
    """Measure the weights without a bound, in place; others are not read."""
    weights = _get_params_by_path(model)
    layers = [("/".join(path), weights[path][...], layer) for path, layer in _bounded_layers(model) if path in weights]
    bounds = complete_bounds(
        {path: layer.bound_variable()[...] for path, _, layer in layers},
        {path: weight for path, weight, _ in layers},
        {path: layer.linear for path, _, layer in layers},
    )
    for path, _, layer in layers:
        layer.bound_variable()[...] = bounds[path]


def _get_params_by_path(model: nnx.Module) -> dict[tuple[str, ...], Any]:
    return {tuple(map(str, path)): param for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def _set_bound(layer: LayerScaling, path: Sequence[str], bound: Array | None) -> None:
    variable = layer.bound_variable()
    variable[...] = bound_per_layer(bound, "/".join(path), variable[...].shape)


def _bounded_layers(model: nnx.Module) -> list[tuple[tuple[str, ...], LayerScaling]]:
    """The scalings with bounds, each with the path of its weight. For a tied weight it is the path in states."""
    layers = [(path, layer) for path, layer in get_scalings(model) if layer.linear.needs_weight_bounds]
    if not layers:
        raise ValueError("the model has no layer with automatic weight scaling")
    variables_by_path: dict[tuple[str, ...], nnx.Variable] = {}
    first_paths: dict[int, tuple[str, ...]] = {}
    for keys, node in nnx.iter_graph(model):
        path = tuple(map(str, keys))
        if isinstance(node, nnx.Variable):
            first_paths[id(node)] = path
        elif isinstance(node, nnx.Module):
            variables_by_path |= {
                (*path, k): value for k, value in vars(node).items() if isinstance(value, nnx.Variable)
            }
    weights = [(layer.get_weight_path(path), layer) for path, layer in layers]
    return [(first_paths.get(id(variables_by_path.get(path)), path), layer) for path, layer in weights]


def value_and_grad(f: Callable, *, argnums: Any = 0, has_aux: bool = False, **options: Any) -> Callable:
    """`flax.nnx.value_and_grad` that also keeps the statistics of gradients that delayed scaling needs.

        loss, grads = fp8jax.nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)

    Arguments, values and gradients are those of Flax's function, with any recipe or none. Delayed scaling also needs
    the amax of each layer's output gradient. It is merged by maximum into the `fp8jax.nnx.GradientStatistic` variables
    of the model, in place, as batch statistics are. The gradients contain only parameters.

    Args:
        f: a function. Its arguments at `argnums` are models, arrays, or trees of these, such as a tuple of two models.
        argnums: an integer, an `nnx.DiffState`, or a sequence of them.
        has_aux: whether `f` returns a pair with an auxiliary result that is not differentiated.
        options: other arguments of `flax.nnx.value_and_grad`. With `graph=False` or `graph_updates=False` gradients are
            of all arrays of a model, statistics included.
    """
    is_single = isinstance(argnums, (int, nnx.DiffState))

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        diff_args = [argnums] if is_single else list(argnums)
        arg_indices = [one.argnum if isinstance(one, nnx.DiffState) else one for one in diff_args]
        stat_args = [i for i, arg in enumerate(arg_indices) if arg < len(args) and _has_statistics(args[arg])]
        stat_args = stat_args if _takes_state_grads(options) else []
        for i in stat_args:
            filters = diff_args[i].filter if isinstance(diff_args[i], nnx.DiffState) else nnx.Param
            diff_args[i] = nnx.DiffState(arg_indices[i], nnx.Any(filters, GradientStatistic))
        wrt = diff_args[0] if is_single else tuple(diff_args)
        value, grads = nnx.value_and_grad(f, argnums=wrt, has_aux=has_aux, **options)(*args, **kwargs)
        grads_by_arg = [grads] if is_single else list(grads)
        for i in stat_args:
            grads_by_arg[i] = _merge_statistics(args[arg_indices[i]], grads_by_arg[i])
        return value, grads_by_arg[0] if is_single else tuple(grads_by_arg)

    return call


def grad(f: Callable, *, argnums: Any = 0, has_aux: bool = False, **options: Any) -> Callable:
    """`flax.nnx.grad` that also keeps the statistics of gradients that delayed scaling needs; see `value_and_grad`.

    Args:
        f, argnums, has_aux, options: as of `value_and_grad`.
    """
    with_value = value_and_grad(f, argnums=argnums, has_aux=has_aux, **options)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, grads = with_value(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return call


def _takes_state_grads(options: Mapping[str, Any]) -> bool:
    """Whether gradients are with respect to parts of a model's state; in Flax's tree mode, to all its arrays."""
    modes = {"graph": "set_graph_mode", "graph_updates": "set_graph_updates"}  # not in every version of Flax
    current = {name: getattr(nnx, setting).current_value() for name, setting in modes.items() if hasattr(nnx, setting)}
    return all(value if options.get(name) is None else options[name] for name, value in current.items())


def _flatten_models(argument: Any) -> tuple[list[Any], Any]:
    """The models and other leaves of an argument, such as a tuple of two models, and its structure."""
    return jax.tree.flatten(argument, is_leaf=lambda node: isinstance(node, nnx.Module))


def _has_statistics(argument: Any) -> bool:
    """Whether an argument is a model with statistics of gradients, or a tree with one."""
    models = [leaf for leaf in _flatten_models(argument)[0] if isinstance(leaf, nnx.Module)]
    return any(hasattr(scaling, "slot") for model in models for _, scaling in get_scalings(model))


def _merge_statistics(argument: Any, grads: Any) -> Any:
    """The gradients of an argument without statistics, which are merged into the slots of its models."""
    models, structure = _flatten_models(argument)
    model_grads = zip(models, structure.flatten_up_to(grads), strict=True)
    return structure.unflatten([merge_gradient_stats(m, g) if isinstance(m, nnx.Module) else g for m, g in model_grads])
