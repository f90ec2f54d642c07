"""Functions that are traced once for all equal calls of a program.

A model calls the same operations in each block. JAX's cache compares functions by identity, so equal closures and
partial functions would be traced again for each block.
"""

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np


class _FunctionByContent:
    """A function that is hashed and compared by its content."""

    def __init__(self, function: Callable[..., Any], content: Hashable) -> None:
        self.function, self._content = function, content

    def __hash__(self) -> int:
        return hash(self._content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _FunctionByContent) and self._content == other._content


def call_traced_once(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, with the trace of an earlier call of an equal function on arrays of equal types.

    Functions are equal if their code, closures, bound arguments and defaults are. The trace is also lowered once; XLA
    inlines the calls. Functions that close over arrays or unhashable objects are traced each time. Outside of a trace
    the function is called directly.

    Args:
        function: function of arrays. JAX's cache accounts for its context, such as a mesh and
            `fp8jax.ops.dispatch.choice.target`.
        args: trees of arrays.
    """
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
        return function(*args)
    try:
        content = _content(function)
        hash(content)
    except TypeError:
        return function(*args)
    return _call_jitted(_FunctionByContent(function, content), *args)


@functools.partial(jax.jit, static_argnums=0)
def _call_jitted(key: _FunctionByContent, *args: Any) -> Any:
    return key.function(*args)


def clear_trace_cache() -> None:
    """Clear all traces, for tests that replace what a function calls."""
    _call_jitted.clear_cache()  # type: ignore[attr-defined]


_HASHABLE_TYPES = {bool, int, float, str, type(None), type}


def _content(x: Any) -> Hashable:
    """Return a hashable key of a function or a value in its closure, or raise TypeError if there is none."""
    if type(x) in _HASHABLE_TYPES:
        return type(x), x
    if isinstance(x, (jax.Array, jax.core.Tracer, np.ndarray)):
        raise TypeError("an array has no content that is known")
    if isinstance(x, functools.partial):
        return "partial", _content(x.func), _content(x.args), _content(tuple(sorted(x.keywords.items())))
    if isinstance(x, types.FunctionType) and (x.__closure__ or x.__defaults__ or x.__kwdefaults__):
        closure = tuple(cell.cell_contents for cell in x.__closure__ or ())
        defaults = x.__defaults__ or (), tuple(sorted((x.__kwdefaults__ or {}).items()))
        return x.__code__, _content(closure), _content(defaults)
    if type(x) is tuple:
        return tuple(_content(item) for item in x)
    return type(x), x
