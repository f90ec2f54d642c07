"""Gradients of NNX models that keep the statistics of scalings."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from fp8jax.modules.scaled import GradientStatistic, get_scalings, merge_gradient_stats


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
        options: other arguments of `flax.nnx.value_and_grad`. With `graph=False` or `graph_updates=False` gradients are
            of all arrays of a model, statistics included.
    """
    is_single = isinstance(argnums, (int, nnx.DiffState))

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        diff_args = [argnums] if is_single else list(argnums)
        arg_indices = [one.argnum if isinstance(one, nnx.DiffState) else one for one in diff_args]
        stat_args = [i for i, place in enumerate(arg_indices) if place < len(args) and _has_statistics(args[place])]
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
    """Whether gradients are of parts of a model's state. In Flax's tree mode they are of all its arrays."""
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
