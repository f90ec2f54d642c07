"""JAX's `dot_general` at the time when this library was imported.

Libraries that add adapters or quantization patch `jax.lax.dot_general` and `jnp.einsum` at run time: the module
attribute, or the function's code, as Qwix does. They mean to patch the model's matmuls, not our matmuls of codes.
Operations here therefore call `dot_general` below, which such patches do not reach (except in `jax.vmap`, whose rule
calls JAX's). Layers check `find_patched_matmul`.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def _copy(function: Any) -> Callable[..., Any]:
    """A copy of a Python function with its own code object; any other callable unchanged."""
    if not isinstance(function, types.FunctionType):
        return function
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
    """The JAX matmul that another library has patched, such as "jax.lax.dot_general"; None if there is none."""
    for path, (module, name, function, code) in _ORIGINALS.items():
        current = getattr(module, name)
        if current is not function or _code(current) is not code:
            return path
    return None
