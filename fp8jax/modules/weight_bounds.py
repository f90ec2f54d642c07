"""Bounds of weights under automatic scaling in NNX models: from an optimizer, or measured."""

from collections.abc import Mapping, Sequence

from flax import nnx
from jax import Array

from fp8jax.core.scaling import Automatic
from fp8jax.modules.scaled import LayerScaling
from fp8jax.rewrite import training
from fp8jax.rewrite.bounds import WeightBound, bound_per_layer, complete_bounds


def update_weight_amax_bounds(model: nnx.Module, bounds: Mapping[tuple[str, ...], Array]) -> None:
    """Gives the layers of a model with automatic weight scaling their bounds, in place: call it after each update.

    `fp8jax.nnx.Optimizer` does so by itself. For Flax's:

        optimizer = nnx.Optimizer(model, optax.chain(optax.adamw(lr), fp8jax.track_weight_amax()), wrt=nnx.Param)
        optimizer.update(model, grads)
        fp8jax.nnx.update_weight_amax_bounds(model, fp8jax.get_weight_amax_bounds(optimizer.opt_state))

    Evaluation reads the bounds, which are part of the model's state and of its checkpoints. A model without bounds
    measures its weights in each call.

    Args:
        model: a model that `fp8jax.nnx.quantize` gave a recipe with automatic weight scaling.
        bounds: what `fp8jax.get_weight_amax_bounds` reads from the state of an optimizer of the model's parameters.

    Raises:
        ValueError: the model has no such layer, or the optimizer follows none of a layer's weights.
    """
    for path, layer in _layers_to_update(model):
        _set_bound(layer, path, bounds.get(path))


def update_trained_bounds(model: nnx.Module, bounds: Mapping[tuple[str, ...], Array]) -> None:
    """`update_weight_amax_bounds` for the weights that an optimizer trains; others stay as they are, and so do their
    bounds.

    Raises:
        ValueError: the model has no layer with automatic weight scaling, or the optimizer follows none of its weights.
    """
    bounded_layers = _layers_to_update(model)
    if bounds and not any(path in bounds for path, _ in bounded_layers):
        # One of embeddings or a head alone follows these.
        state_paths = {tuple(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))}
        if not state_paths & set(bounds):
            _set_bound(bounded_layers[0][1], bounded_layers[0][0], None)
    for path, layer in bounded_layers:
        if path in bounds:
            _set_bound(layer, path, bounds[path])


def _layers_to_update(model: nnx.Module) -> list[tuple[tuple[str, ...], LayerScaling]]:
    """As `_bounded_layers`, in a step that gives bounds."""
    layers = _bounded_layers(model)
    for record in {layer.record for _, layer in layers}:
        training.record_advance(training.BOUNDS, record)
    return layers


def _set_bound(layer: LayerScaling, path: Sequence[str], bound: Array | None) -> None:
    variable = layer.bound_variable()
    variable[...] = bound_per_layer(bound, "/".join(path), variable[...].shape)


def reset_weight_amax_bounds(model: nnx.Module) -> None:
    """Measures the weights of a model with automatic weight scaling, in place.

    Call it after loading parameters into a model that has bounds, which would clip them. A model without bounds then
    needs no measurement in each call. If training continues, call `fp8jax.reset_weight_amax_bounds` for the
    optimizer, too.

    Raises:
        ValueError: the model has no layer with automatic weight scaling.
    """
    weights = {tuple(map(str, path)): w for path, w in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    for path, layer in _bounded_layers(model):
        _set_bound(layer, path, Automatic().measure_amax(weights[path][...]))


def measure_missing_bounds(model: nnx.Module) -> None:
    """Measures the weights without a bound, in place; others are not read."""
    weights = {tuple(map(str, path)): w for path, w in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    layers = _bounded_layers(model)
    tracked_bounds = {
        "/".join(path): WeightBound(layer.linear, layer.layer_axes(), weights[path][...], layer.bound_variable()[...])
        for path, layer in layers
        if path in weights
    }
    bounds = complete_bounds(tracked_bounds)
    for path, layer in layers:
        if path in weights:
            layer.bound_variable()[...] = bounds["/".join(path)]


def _bounded_layers(model: nnx.Module) -> list[tuple[tuple[str, ...], LayerScaling]]:
    """The products with automatic weight scaling, each with the path of its weight: of a tied one, that in states."""
    layers = [
        (path, m) for path, m in nnx.iter_modules(model) if isinstance(m, LayerScaling) and m.linear.needs_weight_bounds
    ]
    if not layers:
        raise ValueError("the model has no layer with automatic weight scaling")
    variables_by_path: dict[tuple[str, ...], nnx.Variable] = {}
    first_paths: dict[int, tuple[str, ...]] = {}
    for place, node in nnx.iter_graph(model):
        path = tuple(map(str, place))
        if isinstance(node, nnx.Variable):
            first_paths[id(node)] = path
        elif isinstance(node, nnx.Module):
            variables_by_path |= {
                (*path, name): value for name, value in vars(node).items() if isinstance(value, nnx.Variable)
            }
    weights = [(m.get_weight_path(path), m) for path, m in layers]
    return [(first_paths[id(variables_by_path[path])] if path in variables_by_path else path, m) for path, m in weights]
