"""JAX's product of arrays, as it was when this library was imported.

Libraries that add adapters or quantization to a model change `jax.lax.dot_general` and `jnp.einsum` while it runs: the
name in the module, or the code of the function itself, as Qwix does. What they mean are the model's own products, not
those of codes that stand in the place of these. So operations here multiply by `dot_general` below, which no such
change reaches (but in `jax.vmap`, whose rule calls JAX's), and layers ask `find_patched_matmul`.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def _copy(function: Any) -> Callable[..., Any]:
    """A function with code of its own; itself where it is none written in Python."""
    if not isinstance(function, types.FunctionType):
        return function  # type: ignore[no-any-return]
    code_fields = (
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy = types.FunctionType(*code_fields)
    copy.__kwdefaults__, copy.__doc__ = function.__kwdefaults__, function.__doc__
    return copy


def _code(function: Any) -> Any:
    return getattr(inspect.unwrap(function), "__code__", None)


dot_general = _copy(lax.dot_general)
_ORIGINALS = {
    f"{module.__name__}.{name}": (module, name, getattr(module, name), _code(getattr(module, name)))
    for module, name in ((lax, "dot_general"), (jax.numpy, "einsum"))
}


def find_patched_matmul() -> str | None:
    """The product of JAX that another library has changed, as "jax.lax.dot_general"; None where it is JAX's own."""
    for path, (module, name, function, code) in _ORIGINALS.items():
        current = getattr(module, name)
        if current is not function or _code(current) is not code:
            return path
    return None
