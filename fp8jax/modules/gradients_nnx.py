"""Gradients of NNX models that keep the statistics of scalings."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from fp8jax.modules.scaled import GradientStatistic, LayerScaling, note_gradients


def value_and_grad(f: Callable, *, argnums: Any = 0, has_aux: bool = False, **options: Any) -> Callable:
    """`flax.nnx.value_and_grad` that also keeps the statistics of gradients that delayed scaling needs.

        loss, grads = fp8jax.nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)

    Arguments, values and gradients are those of Flax's function, with any recipe or none. Delayed scaling also needs
    the amax of each layer's output gradient. It is merged by maximum into the `fp8jax.nnx.GradientStatistic` variables
    of the model, in place, as batch statistics are. The gradients contain parameters alone.

    Args:
        f: a function whose arguments at `argnums` are models, arrays, or trees of these, such as a tuple of two models.
        argnums: an integer, an `nnx.DiffState`, or a sequence of them.
        has_aux: whether `f` returns a pair, of which the second part is not differentiated.
        options: others of `flax.nnx.value_and_grad`. With `graph=False` or `graph_updates=False` gradients are of all
            arrays of a model, statistics included.
    """
    return _keeping_statistics(nnx.value_and_grad, f, argnums, {"has_aux": has_aux, **options}, last=True)


def grad(f: Callable, *, argnums: Any = 0, has_aux: bool = False, **options: Any) -> Callable:
    """`flax.nnx.grad` that also keeps the statistics of gradients that delayed scaling needs; see `value_and_grad`.

    Args:
        f, argnums, has_aux, options: as of `value_and_grad`.
    """
    return _keeping_statistics(nnx.grad, f, argnums, {"has_aux": has_aux, **options}, last=not has_aux)


def _keeping_statistics(transform: Callable, f: Callable, argnums: Any, options: Any, last: bool) -> Callable:
    """A gradient by Flax's function. `last`: gradients are the last part of a pair; else the first."""
    single = isinstance(argnums, (int, nnx.DiffState))
    pair = transform is nnx.value_and_grad or options["has_aux"]

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        wanted = [argnums] if single else list(argnums)
        places = [one.argnum if isinstance(one, nnx.DiffState) else one for one in wanted]
        found = [i for i, place in enumerate(places) if place < len(args) and _has_slots(args[place])]
        found = found if _by_state(options) else []
        for i in found:
            filters = wanted[i].filter if isinstance(wanted[i], nnx.DiffState) else nnx.Param
            wanted[i] = nnx.DiffState(places[i], nnx.Any(filters, GradientStatistic))
        result = transform(f, argnums=wanted[0] if single else tuple(wanted), **options)(*args, **kwargs)
        if not found:
            return result
        grads = result[1 if last else 0] if pair else result
        each = [grads] if single else list(grads)
        for i in found:
            each[i] = _without_statistics(args[places[i]], each[i])
        grads = each[0] if single else tuple(each)
        if not pair:
            return grads
        return (result[0], grads) if last else (grads, result[1])

    return call


def _by_state(options: Mapping[str, Any]) -> bool:
    """Whether gradients are taken of parts of a model's state. In Flax's tree mode they are of all its arrays."""
    modes = {"graph": "set_graph_mode", "graph_updates": "set_graph_updates"}  # not in every version of Flax
    current = {name: getattr(nnx, setting).current_value() for name, setting in modes.items() if hasattr(nnx, setting)}
    return all(value if options.get(name) is None else options[name] for name, value in current.items())


def _models(argument: Any) -> tuple[list[Any], Any]:
    """The models in an argument, such as a tuple of two, and the structure that they and its other leaves stand in."""
    return jax.tree.flatten(argument, is_leaf=lambda node: isinstance(node, nnx.Module))


def _has_slots(argument: Any) -> bool:
    """Whether an argument is a model with statistics of gradients, or a tree that has one."""
    models = [leaf for leaf in _models(argument)[0] if isinstance(leaf, nnx.Module)]
    modules = [module for model in models for _, module in nnx.iter_modules(model)]
    return any(isinstance(module, LayerScaling) and hasattr(module, "slot") for module in modules)


def _without_statistics(argument: Any, grads: Any) -> Any:
    """The gradients of an argument without statistics; these are merged into the slots of its models."""
    models, structure = _models(argument)
    each = zip(models, structure.flatten_up_to(grads), strict=True)
    return structure.unflatten([note_gradients(m, g) if isinstance(m, nnx.Module) else g for m, g in each])
