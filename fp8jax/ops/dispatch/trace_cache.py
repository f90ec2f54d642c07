"""Functions that are traced once for all calls that are alike, in whatever program they stand.

A model calls the same operations for each of its blocks, and JAX knows a function by its identity: partial functions
and closures that say the same are others to it, and would be traced anew for each block.
"""

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np


class _FunctionByContent:
    """A function that is known by what it says."""

    def __init__(self, function: Callable[..., Any], content: Hashable) -> None:
        self.function, self._content = function, content

    def __hash__(self) -> int:
        return hash(self._content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _FunctionByContent) and self._content == other._content


def call_traced_once(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, whose trace is that of an earlier call of an equal function with arrays of the same types.

    Functions are equal that have the same code and the same content: what they close over, what is bound to them, and
    their defaults. The program that is traced calls the trace, which is lowered once, too; XLA takes calls apart before
    all else. A function that closes over arrays, or over what has no hash, is traced anew; outside of any trace it is
    called as it is.

    Args:
        function: of arrays alone; what it is traced in, such as a mesh and `fp8jax.ops.dispatch.choice.target`, JAX
            tells apart.
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


def clear_cache() -> None:
    """Forgets all traces: what a function calls was replaced, as tests do."""
    _call_jitted.clear_cache()  # type: ignore[attr-defined]


_HASHABLE_TYPES = {bool, int, float, str, type(None), type}


def _content(x: Any) -> Hashable:
    """What tells a function, or what it closes over, from others; TypeError where nothing does."""
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
