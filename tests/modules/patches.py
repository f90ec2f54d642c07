"""A small adapter library that patches JAX's matmuls while a model runs, like Qwix's LoRA."""

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

handlers: list[Callable[..., Any]] = []


def _code() -> types.CodeType:
    """Returns code without free variables, which can replace the code of any function."""

    def call(*args, **kwargs):  # type: ignore[no-untyped-def]
        from tests.modules.patches import handlers

        return handlers[-1](*args, **kwargs)

    return call.__code__


@contextlib.contextmanager
def code_changed(product: Callable[..., Any]) -> Iterator[None]:
    """Calls of `jax.lax.dot_general`, under any name, call `product(original, *args, **kwargs)`."""
    function: Any = lax.dot_general
    code = function.__code__
    original = types.FunctionType(code, function.__globals__, "dot_general", function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    handlers.append(functools.partial(product, original))
    function.__code__ = _code()
    try:
        yield
    finally:
        function.__code__ = code
        handlers.pop()


@contextlib.contextmanager
def name_changed(module: Any, name: str, product: Callable[..., Any]) -> Iterator[None]:
    """The same for one name in a module of JAX."""
    original = getattr(module, name)
    setattr(module, name, functools.wraps(original)(functools.partial(product, original)))
    try:
        yield
    finally:
        setattr(module, name, original)


def adapted(original: Callable[..., Any], lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
    """Adds an adapter's product to a layer's. The first call creates its parameters; the call stack shows the layer."""
    y, frame = original(lhs, rhs, *args, **kwargs), inspect.currentframe()
    while frame is not None:
        layer = frame.f_locals.get("self")
        frame = frame.f_back
        if isinstance(layer, nnx.Linear) and layer.kernel.shape == rhs.shape:
            if not hasattr(layer, "kernel_lora_a"):
                layer.kernel_lora_a = nnx.LoRAParam(jnp.ones((rhs.shape[0], 2)))
                layer.kernel_lora_b = nnx.LoRAParam(jnp.ones((2, rhs.shape[1])))
            numbers = (((lhs.ndim - 1,), (0,)), ((), ()))
            inner = original(lhs, layer.kernel_lora_a[...], numbers)
            return y + original(inner, layer.kernel_lora_b[...], numbers)
    return y


def with_adapters(model: Any, *sample: jax.Array) -> Any:
    """Returns a copy of a Flax model whose call runs with the patch; in NNX with adapters created."""
    copy = nnx.clone(model) if isinstance(model, nnx.Module) else model.copy()
    cls = type(copy)

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any) -> Any:
        with code_changed(adapted):
            return cls.__call__(self, *args)

    copy.__class__ = type(cls.__name__, (cls,), {"__call__": call})
    if sample:
        copy(*sample)
    return copy
