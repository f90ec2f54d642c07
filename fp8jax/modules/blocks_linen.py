"""Runs modules of Flax Linen aside, to recognise the activations between their layers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax.traverse_util import flatten_dict
from jax import Array

from fp8jax.modules import blocks
from fp8jax.modules.blocks import BlockForms

LAYERS = (nn.Dense, nn.DenseGeneral)


def recognise(
    module: nn.Module, args: Any, kwargs: Any, quiet: Callable[[], Any], memory: dict[Any, BlockForms]
) -> BlockForms:
    """The activations between the linear layers that a module holds itself, in a call with these arguments.

    A copy of the module is traced for their shapes and dtypes, with the outputs of its layers as unknowns: where the
    input of a layer is term by term a form of such outputs, it reads that form, whatever else the module computes.

    Args:
        module: bound, with parameters.
        args: of its `__call__`.
        kwargs: likewise.
        quiet: makes a context in which nothing is quantized.
        memory: as of `blocks.recognise`.
    """
    params = flatten_dict(module.variables.get("params", {}))
    kernels = [path for path in params if len(path) == 2 and path[1] == "kernel"]
    if len(kernels) < 2 or type(module).__module__.startswith("flax."):
        return BlockForms()
    assert module.scope is not None
    leaves, structure = jax.tree.flatten((nn.meta.unbox(module.variables), args, kwargs))
    copy, scope = module.clone(parent=None), module.scope
    # 1 and True are equal, and have one hash.
    fields = tuple(type(getattr(copy, field.name)) for field in dataclasses.fields(copy))
    with quiet():
        return blocks.recognise(_run, (copy, structure, tuple(scope.rngs), scope.mutable, fields), leaves, memory)


def _run(static: Any, leaves: list[Any], layer: Callable[[str, Callable[[], Array], Array], Array]) -> None:
    copy, structure, rngs, mutable, _ = static
    variables, args, kwargs = jax.tree.unflatten(structure, leaves)

    def intercept(call: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if context.method_name != "__call__" or not isinstance(module, LAYERS) or len(module.path) != 1:
            return call(*args, **kwargs)
        args, kwargs = blocks.positional(args, kwargs)
        (x,) = args
        return layer(str(module.name), functools.partial(call, x), x)

    with nn.intercept_methods(intercept):
        copy.apply(variables, *args, rngs={name: jax.random.key(0) for name in rngs}, mutable=mutable, **kwargs)
