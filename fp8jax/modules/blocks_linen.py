"""Runs modules of Flax Linen aside, to recognise the activations between their layers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.core.scope import DenyList
from flax.traverse_util import flatten_dict

from fp8jax.modules import blocks
from fp8jax.modules.blocks import BlockForms
from fp8jax.modules.recording import ModuleCall, Recording

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
    known = _call(module, args, kwargs)
    if known is None:
        return BlockForms()
    with quiet():
        return blocks.recognise(_run, *known, memory)


def _call(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, list[Any]] | None:
    """What a call of a module depends on, without and with arrays; None where there is no activation to look for."""
    if module.scope is None or type(module).__module__.startswith("flax."):
        return None
    params = flatten_dict(module.variables.get("params", {}))
    if sum(len(path) == 2 and path[1] == "kernel" for path in params) < 2:
        return None
    leaves, structure = jax.tree.flatten((nn.meta.unbox(module.variables), args, kwargs))
    leaves = [jax.typeof(x) if isinstance(x, np.ndarray) else x for x in leaves]
    copy, scope = module.clone(parent=None), module.scope
    # 1 and True are equal, and have one hash.
    fields = tuple(type(getattr(copy, field.name)) for field in dataclasses.fields(copy))
    return (copy, structure, tuple(sorted(scope.rngs)), _hashable(scope.mutable), fields), leaves


def _hashable(collections: Any) -> Any:
    """A filter of collections, as Flax takes it, that has a hash."""
    if isinstance(collections, DenyList):
        return DenyList(_hashable(collections.deny))
    return collections if isinstance(collections, (bool, str)) else frozenset(collections)


class Watch:
    """What stands in the place of calls, in a run aside that is recorded."""

    def __init__(self, recording: Recording) -> None:
        self._recording, self._running = recording, dict[tuple[str, ...], ModuleCall]()

    def call(self, call: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        """Calls a method of a module, as `nn.intercept_methods` takes it."""
        module = context.module
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        if isinstance(module, LAYERS) and module.path and module.path[:-1] in self._running:
            args, kwargs = blocks.positional(args, kwargs)
            (x,) = args
            layer = self._running[module.path[:-1]].layer
            return layer(str(module.name), functools.partial(call, x), x)
        known = None if module.is_initializing() else _call(module, args, kwargs)
        if known is None:
            return call(*args, **kwargs)
        return self.module(
            blocks.signature(_run, *known), known[1], module.path, functools.partial(call, *args, **kwargs)
        )

    def module(self, key: Any, leaves: list[Any], path: tuple[str, ...], call: Callable[[], Any]) -> Any:
        """Calls a module."""
        before = self._running.get(path)
        with self._recording.module(key, leaves) as self._running[path]:
            try:
                return call()
            finally:
                del self._running[path]
                if before is not None:
                    self._running[path] = before


def _run(static: Any, leaves: list[Any], recording: Recording, key: Any) -> None:
    copy, structure, rngs, mutable, _ = static
    variables, args, kwargs = jax.tree.unflatten(structure, leaves)
    watch = Watch(recording)
    outermost = iter([key])

    def intercept(call: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name == "__call__" and (own := next(outermost, None)) is not None:
            return watch.module(own, leaves, (), functools.partial(call, *args, **kwargs))
        return watch.call(call, args, kwargs, context)

    with nn.intercept_methods(intercept):
        keys = {name: jax.random.key(0) for name in rngs}
        nn.Module.apply(copy, variables, *args, rngs=keys, mutable=mutable, **kwargs)
