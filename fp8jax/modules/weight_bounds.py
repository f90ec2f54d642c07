"""Bounds of weights under automatic scaling in NNX models: from an optimizer, or measured."""

from collections.abc import Mapping, Sequence

from flax import nnx
from jax import Array

from fp8jax.core.scaling import Automatic
from fp8jax.modules.scaled import LayerScaling
from fp8jax.rewrite import training
from fp8jax.rewrite.bounds import Bound, known_bounds, stacked_bound


def set_weight_bounds(model: nnx.Module, bounds: Mapping[tuple[str, ...], Array]) -> None:
    """Gives the layers of a model with automatic weight scaling their bounds, in place: call it after each update.

    `fp8jax.nnx.Optimizer` does so by itself. For Flax's:

        optimizer = nnx.Optimizer(model, optax.chain(optax.adamw(lr), fp8jax.track_weights()), wrt=nnx.Param)
        optimizer.update(model, grads)
        fp8jax.nnx.set_weight_bounds(model, fp8jax.weight_bounds(optimizer.opt_state))

    Evaluation reads the bounds, which are part of the model's state and of its checkpoints. A model without bounds
    measures its weights in each call.

    Args:
        model: a model that `fp8jax.nnx.quantize` gave a recipe with automatic weight scaling.
        bounds: what `fp8jax.weight_bounds` reads from the state of an optimizer of the model's parameters.

    Raises:
        ValueError: the model has no such layer, or the optimizer follows none of a layer's weights.
    """
    for path, layer in _followed(model):
        _set_bound(layer, path, bounds.get(path))


def give_bounds(model: nnx.Module, bounds: Mapping[tuple[str, ...], Array]) -> None:
    """`set_weight_bounds` for the weights that an optimizer trains; others stay as they are, and so do their bounds.

    Raises:
        ValueError: the model has no layer with automatic weight scaling, or the optimizer follows none of its weights.
    """
    tracked = _followed(model)
    if bounds and not any(path in bounds for path, _ in tracked):
        # One of embeddings or a head alone follows these.
        own = {tuple(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))}
        if not own & set(bounds):
            _set_bound(tracked[0][1], tracked[0][0], None)
    for path, layer in tracked:
        if path in bounds:
            _set_bound(layer, path, bounds[path])


def _followed(model: nnx.Module) -> list[tuple[tuple[str, ...], LayerScaling]]:
    """As `_tracked`, in a step that gives bounds."""
    layers = _tracked(model)
    for record in {layer.record for _, layer in layers}:
        training.advances(training.BOUNDS, record)
    return layers


def _set_bound(layer: LayerScaling, path: Sequence[str], bound: Array | None) -> None:
    variable = layer.tracked()
    variable[...] = stacked_bound(bound, "/".join(path), variable[...].shape)


def measure_weights(model: nnx.Module) -> None:
    """Measures the weights of a model with automatic weight scaling, in place.

    Call it after loading parameters into a model that has bounds, which would clip them. A model without bounds then
    needs no measurement in each call. If training continues, call `fp8jax.measure_weights` for the optimizer, too.

    Raises:
        ValueError: the model has no layer with automatic weight scaling.
    """
    weights = {tuple(map(str, path)): w for path, w in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    for path, layer in _tracked(model):
        _set_bound(layer, path, Automatic().measure(weights[path][...]))


def with_known_bounds(model: nnx.Module) -> None:
    """Measures the weights without a bound, in place; others are not read."""
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
