"""Layers whose scaling keeps a state: one product for NNX and Linen, and the state's variables in NNX models."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from fp8jax.core.recipe import Linear
from fp8jax.core.scaling import Automatic, AxisNames
from fp8jax.modules import training
from fp8jax.ops.product import QuantizedWeight
from fp8jax.ops.scaled import Observed, ScalingState, init_scaling, observes, update_scaling
from fp8jax.ops.sharding import merge
from fp8jax.rewrite.bounds import Bound, known_bounds, stacked_bound
from fp8jax.rewrite.states import Noted, ParameterState, first_state, scaling_names

OWN = "fp8jax_"


def observed_operands(linear: Linear) -> list[str]:
    """The operands that calls of a layer observe."""
    return [operand for operand in linear.states if observes(linear, operand)]


def nothing_seen(linear: Linear, operand: str, stacked: tuple[int, ...] = ()) -> Array:
    """What has been observed of an operand before the first call."""
    return jnp.zeros((*stacked, *linear.states[operand].statistic), jnp.float32)


def advanced(
    linear: Linear, state: ScalingState, observed: Mapping[str, Array], axis_name: AxisNames
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The states of a layer after a step, by operand, and what is seen then: nothing.

    Args:
        linear: its recipe.
        state: before the step.
        observed: of the step, by operand.
        axis_name: mesh axes of replicas whose observations are merged, or None.
    """
    seen = {o: jnp.zeros_like(value) for o, value in observed.items() if o != "dy"}
    if axis_name is not None:
        observed = {o: linear.states[o].over_replicas(value, axis_name) for o, value in observed.items()}
    new = update_scaling(state, Observed(**observed), linear)._asdict()
    return {operand: value for operand, value in new.items() if value is not None}, seen


class ScalingVariable(nnx.Variable):
    """State of a scaling, and what calls of the current step have seen: module state, never differentiated."""


class GradientStatistic(nnx.Variable):
    """A slot whose cotangent is the largest magnitude of a gradient; never an argument of an optimizer."""


class QuantizedWeightVariable(nnx.Variable):
    """Codes or scales of a weight; they follow from parameters, and are no state of their own."""


class WeightVariables(nnx.Module):
    """A `QuantizedWeight` as variables, so that loops over stacked layers take it apart."""

    def __init__(self, weight: QuantizedWeight) -> None:
        leaves, self.tree = jax.tree.flatten(weight)
        self.leaves = nnx.List([QuantizedWeightVariable(leaf) for leaf in leaves])

    def weight(self) -> QuantizedWeight:
        return jax.tree.unflatten(self.tree, [leaf[...] for leaf in self.leaves])


class Holder(nnx.Module):
    """What an NNX model holds for the products with one parameter, besides it. It stands where a layer of Flax has the
    function that multiplies, and is called as that; or in an attribute of its own.

    Attributes:
        linear: the recipe of the products.
        weight: the path of the parameter in its layer.
        written: what the layer has there; None also for JAX's own function.
        product: JAX's function that it stands for; None in an attribute of its own.
        held: the weight quantized for all microbatches of a step, or None; `fp8jax.nnx.quantize_weights` sets it.
    """

    VARIABLES: tuple[type, ...] = (QuantizedWeightVariable,)

    def __init__(self, linear: Linear, weight: str, written: Any, product: Any) -> None:
        self.linear, self.weight, self.written, self.product = linear, weight, written, product
        self.held: Any = nnx.data(None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.written or self.product)(*args, **kwargs)

    def weight_path(self, path: Sequence[Any]) -> tuple[str, ...]:
        """The path of the parameter, for that of the holder."""
        return (*map(str, path[:-1]), *self.weight.split("/"))

    def stacked(self) -> tuple[int, ...]:
        """The sizes of the first axes of the parameter, those of stacked layers; `nnx.scan` takes them off."""
        assert self.held is not None
        codes: tuple[int, ...] = self.held.weight().forward.codes.shape
        return codes[:-2]

    def given(self, weight: Any) -> ParameterState:
        """What a call reads that has this weight."""
        return ParameterState(self.linear, self.stacked(), weight=None if self.held is None else self.held.weight())

    def note(self, observed: Noted) -> None:
        """Merges what a call observed into what was seen."""


class LayerScaling(Holder):
    """The state of the scaling of one parameter's products, in an NNX model.

    Attributes:
        x, w, dy, or as `Stateful.variable` names them: states, fp32, with the leading axes of stacked layers.
        seen_x, seen_w: what the calls since the last update observed, fp32.
        slot: fp32 (...), zeros.
        use_running_average: read the states and note nothing, as `model.eval()` sets it.

    Args:
        linear: the recipe of its products.
        kernel: the weight, (..., and at least two axes), an array or a shape.
        weight: as of `Holder`.
        stacked: how many of its first axes are those of stacked layers.
        kind: of layer, for messages; no path, because layers that differ in nothing else share their traces.
        written, product: as of `Holder`.
    """

    def __init__(
        self,
        linear: Linear,
        kernel: Array,
        weight: str,
        stacked: int = 0,
        kind: str = "a layer",
        written: Any = None,
        product: Any = None,
    ) -> None:
        super().__init__(linear, weight, written, product)
        self.kind = kind
        self.use_running_average = False
        layers = kernel.shape[:stacked]

        def states(kernel: Array) -> dict[str, Array]:
            init = lambda w: init_scaling(linear, merge(w, 1, w.ndim - 1))  # noqa: E731
            for _ in layers:
                init = jax.vmap(init)
            first = first_state(linear, init(kernel))._asdict()
            own = {linear.states[o].variable(o): s for o, s in first.items() if s is not None}
            seen = {f"seen_{o}": nothing_seen(linear, o, layers) for o in ("x", "w") if observes(linear, o)}
            return own | seen

        abstract = isinstance(kernel, jax.ShapeDtypeStruct)  # of a model that `nnx.eval_shape` made
        for name, state in (jax.eval_shape(states, kernel) if abstract else states(kernel)).items():
            setattr(self, name, ScalingVariable(state))
        if observes(linear, "dy"):
            self.slot = GradientStatistic(
                jax.ShapeDtypeStruct(layers, jnp.float32) if abstract else jnp.zeros(layers, jnp.float32)
            )

    def stacked(self) -> tuple[int, ...]:
        for operand in ("x", "w"):
            if observes(self.linear, operand):
                seen: tuple[int, ...] = getattr(self, f"seen_{operand}").shape
                return seen[: len(seen) - len(self.linear.states[operand].statistic)]
        shape: tuple[int, ...] = (self.slot if hasattr(self, "slot") else self.tracked()).shape
        return shape

    def given(self, weight: Any) -> ParameterState:
        slot, state = self.slot[...] if hasattr(self, "slot") else None, self.state()
        if self.linear.tracked and state.w is not None and not self.use_running_average:
            of: Any = {"names": scaling_names(self.linear), "call": training.BOUNDS, "weight": weight}
            state = state._replace(w=training.observed(state.w, self.kind, **of))
        return super().given(weight)._replace(state=state, slot=slot)

    def note(self, observed: Noted) -> None:
        if self.use_running_average:
            return
        for operand, value in observed.items():
            value = training.observed(value, self.kind, scaling_names(self.linear))
            seen = getattr(self, f"seen_{operand}")
            seen[...] = self.linear.states[operand].merged(seen[...], value)

    def note_in(self, other: "LayerScaling") -> None:
        """From now on what calls observe is noted in another one's variables."""
        for operand in ("x", "w"):
            if observes(self.linear, operand):
                setattr(self, f"seen_{operand}", getattr(other, f"seen_{operand}"))

    def state(self) -> ScalingState:
        return ScalingState(**{o: getattr(self, p.variable(o))[...] for o, p in self.linear.states.items()})

    def tracked(self) -> nnx.Variable:
        """The variable of the weight's state that comes from the optimizer."""
        variable: nnx.Variable = getattr(self, self.linear.states["w"].variable("w"))
        return variable

    def advance(self, dy: Array | None, axis_name: AxisNames = None) -> None:
        """Ends a step: what was seen enters the states, and nothing is seen of the next one yet."""
        observed = {o: getattr(self, f"seen_{o}")[...] for o in ("x", "w") if observes(self.linear, o)}
        observed |= {} if dy is None else {"dy": dy}
        states, seen = advanced(self.linear, self.state(), observed, axis_name)
        for operand, state in states.items():
            getattr(self, self.linear.states[operand].variable(operand))[...] = state
        for operand, value in seen.items():
            getattr(self, f"seen_{operand}")[...] = value


Holder.VARIABLES = (ScalingVariable, GradientStatistic, QuantizedWeightVariable)


def advance_scaling(model: nnx.Module, grads: nnx.State, *, axis_name: AxisNames = None) -> nnx.State:
    """Ends a step of a model whose scaling observes its operands, such as delayed scaling: updates its states in place.

    Differentiate with respect to parameters and statistics, and give the optimizer what this returns:

        wrt = nnx.Any(nnx.Param, fp8jax.nnx.GradientStatistic)
        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model, batch)
        optimizer.update(model, fp8jax.nnx.advance_scaling(model, grads))

    Under gradient accumulation call it once a step, with the statistics of the microbatches merged by maximum
    (gradients are summed); under data parallelism in `jax.shard_map`, with `axis_name`. Where a model is trained and
    this is never called, a warning says so, once in a process.

    Args:
        model: a model that `fp8jax.nnx.quantize` gave a recipe with delayed scaling.
        grads: gradients of `nnx.Any(nnx.Param, GradientStatistic)`.
        axis_name: mesh axes of replicas inside `jax.shard_map`, whose observations are merged: largest magnitudes by
            maximum, counts by sum.

    Returns:
        The gradients without the statistics.

    Raises:
        ValueError: the model has no such scaling, or `grads` lacks its statistics.
    """
    layers = [(path, m) for path, m in nnx.iter_modules(model) if isinstance(m, LayerScaling)]
    layers = [(path, m) for path, m in layers if observed_operands(m.linear)]
    if not layers:
        raise ValueError("the model has no layer with delayed scaling, or another that observes its operands")
    training.settles(training.ADVANCE)
    statistics, rest = nnx.split_state(grads, GradientStatistic, ...)
    seen = dict(nnx.to_flat_state(statistics))
    for path, module in layers:
        if not hasattr(module, "slot"):
            module.advance(None, axis_name)
            continue
        if (*path, "slot") not in seen:
            raise ValueError("differentiate with respect to nnx.Any(nnx.Param, fp8jax.nnx.GradientStatistic)")
        leaf = seen[(*path, "slot")]
        module.advance(leaf[...] if isinstance(leaf, nnx.Variable) else jnp.asarray(leaf), axis_name)
    return rest


def set_weight_bounds(model: nnx.Module, bounds: Mapping[tuple[str, ...], Array]) -> None:
    """Gives the layers of a model with automatic weight scaling their bounds, in place: call it after each update.

    `fp8jax.nnx.Optimizer` does so by itself. For Flax's:

        optimizer = nnx.Optimizer(model, optax.chain(optax.adamw(lr), fp8jax.track_weights()), wrt=nnx.Param)
        optimizer.update(model, grads)
        fp8jax.nnx.set_weight_bounds(model, fp8jax.weight_bounds(optimizer.opt_state))

    Evaluation reads the bounds, which are part of the model's state and of its checkpoints. A model that was never
    given any measures its weights in each call, as they are then.

    Args:
        model: a model that `fp8jax.nnx.quantize` gave a recipe with automatic weight scaling.
        bounds: what `fp8jax.weight_bounds` reads from the state of an optimizer of the model's parameters.

    Raises:
        ValueError: the model has no such layer, or the optimizer follows none of a layer's weights.
    """
    training.settles(training.BOUNDS)
    for path, layer in _tracked(model):
        _set_bound(layer, path, bounds.get(path))


def give_bounds(model: nnx.Module, bounds: Mapping[tuple[str, ...], Array]) -> None:
    """`set_weight_bounds` for the weights that an optimizer trains; others stay as they are, and so do their bounds.

    Raises:
        ValueError: the model has no layer with automatic weight scaling, or the optimizer follows none of its weights.
    """
    training.settles(training.BOUNDS)
    tracked = _tracked(model)
    if bounds and not any(path in bounds for path, _ in tracked):
        # One of embeddings or a head alone follows these.
        own = {tuple(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))}
        if not own & set(bounds):
            _set_bound(tracked[0][1], tracked[0][0], None)
    for path, layer in tracked:
        if path in bounds:
            _set_bound(layer, path, bounds[path])


def _set_bound(layer: LayerScaling, path: Sequence[str], bound: Array | None) -> None:
    variable = layer.tracked()
    variable[...] = stacked_bound(bound, "/".join(path), variable[...].shape)


def measure_weights(model: nnx.Module) -> None:
    """Measures the weights of a model with automatic weight scaling, in place: of one that was given bounds before, for
    parameters that were loaded since. Of one that was not, so that calls need not measure them.

    Where training goes on with them, `fp8jax.measure_weights` measures them for the optimizer, too.

    Raises:
        ValueError: the model has no layer with automatic weight scaling.
    """
    weights = {tuple(map(str, path)): w for path, w in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    for path, layer in _tracked(model):
        _set_bound(layer, path, Automatic().measure(weights[path][...]))


def with_known_bounds(model: nnx.Module) -> None:
    """Measures weights that nobody has given a bound, in place; others are not read."""
    weights = {tuple(map(str, path)): w for path, w in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    layers = _tracked(model)
    tracked = {
        "/".join(path): Bound(layer.linear, layer.stacked(), weights[path][...], layer.tracked()[...])
        for path, layer in layers
        if path in weights
    }
    bounds = known_bounds(tracked)
    for path, layer in layers:
        if path in weights:
            layer.tracked()[...] = bounds["/".join(path)]


def _tracked(model: nnx.Module) -> list[tuple[tuple[str, ...], LayerScaling]]:
    """The products with automatic weight scaling, each with the path of its weight: of a tied one, that in states."""
    layers = [(path, m) for path, m in nnx.iter_modules(model) if isinstance(m, LayerScaling) and m.linear.tracked]
    if not layers:
        raise ValueError("the model has no layer with automatic weight scaling")
    own: dict[tuple[str, ...], nnx.Variable] = {}
    first: dict[int, tuple[str, ...]] = {}
    for place, node in nnx.iter_graph(model):
        path = tuple(map(str, place))
        if isinstance(node, nnx.Variable):
            first[id(node)] = path
        elif isinstance(node, nnx.Module):
            own |= {(*path, name): value for name, value in vars(node).items() if isinstance(value, nnx.Variable)}
    weights = [(m.weight_path(path), m) for path, m in layers]
    return [(first[id(own[path])] if path in own else path, m) for path, m in weights]


def state_name(weight: str) -> str:
    """Where the variables of a product with a parameter are, in a layer of a user's own class; see `layer_path`."""
    return f"{OWN}{weight}"


def layer_path(path: Sequence[Any]) -> tuple[Any, ...]:
    """The path of the layer to which a product's variables belong."""
    return tuple(path[:-1]) if path and str(path[-1]).startswith(OWN) else tuple(path)


def weight_path(path: Sequence[Any]) -> tuple[str, ...]:
    """The path of the weight to whose product the variables at a path belong."""
    layer = layer_path(path)
    return (*map(str, layer), str(path[-1]).removeprefix(OWN) if len(layer) < len(path) else "kernel")
