"""Matmuls and residual bytes of a program."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

from fp8jax.ops.dispatch import choice

# For loops of many steps: unlike most programs of the tests they run longer than they compile.
jit_long = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})


def chosen(fn: Callable, *args: Any, capability: int | None = None) -> choice.Choice:
    """Returns the implementation of the first operation of `fn`, here or on a GPU of this compute capability."""
    target = contextlib.nullcontext() if capability is None else choice.target(capability=capability)
    with target, choice.record_choices() as choices:
        jax.eval_shape(lambda *args: fn(*args), *args)  # another function each time, so that it is traced
    return choices[0][1]


def triton_calls(text: str) -> int:
    """Returns the number of Triton kernel calls in a lowered or compiled program, for both launchers."""
    return len(re.findall(r"""(?:@|custom_call_target=")(?:__gpu\$xla\.gpu\.ptx|triton_kernel_call\w*)[("]""", text))


def dots(fn: Callable, *args: Any) -> list[tuple[str, str]]:
    """Returns operand dtypes of every matmul in the jaxpr of `fn`, including loops and calls, once each."""
    return [
        tuple(str(v.aval.dtype) for v in eqn.invars) for eqn in _walk(jax.make_jaxpr(fn)(*args).jaxpr, "dot_general")
    ]


def count(fn: Callable, primitive: str, *args: Any) -> int:
    """Returns how often a primitive occurs in the jaxpr of `fn`."""
    return sum(1 for _ in _walk(jax.make_jaxpr(fn)(*args).jaxpr, primitive))


def transposed(fn: Callable, *args: Any) -> list[tuple[int, ...]]:
    """Returns the permutations of all transposes in the jaxpr of `fn`, including loops and calls, once each."""
    return [eqn.params["permutation"] for eqn in _walk(jax.make_jaxpr(fn)(*args).jaxpr, "transpose")]


def outputs(fn: Callable, dtype: Any, *args: Any) -> list[tuple[int, ...]]:
    """Returns result shapes of casts to a dtype in the jaxpr of `fn`, including loops and calls, once each."""
    casts = _walk(jax.make_jaxpr(fn)(*args).jaxpr, "convert_element_type")
    return [eqn.outvars[0].aval.shape for eqn in casts if eqn.params["new_dtype"] == dtype]


def residuals(fn: Callable, *args: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Returns dtypes and shapes of the residuals of `jax.vjp(fn, *args)`."""
    saved = jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *args)
    return [(str(leaf.dtype), leaf.shape) for leaf in jax.tree.leaves(saved)]


def _walk(jaxpr: Any, primitive: str) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == primitive:
            yield eqn
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from _walk(inner, primitive)


def precisions(fn: Callable, *args: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Returns operand dtypes and precision of every matmul in the jaxpr of `fn`, with loops and calls, once each."""
    products = _walk(jax.make_jaxpr(fn)(*args).jaxpr, "dot_general")
    return [(tuple(str(v.aval.dtype) for v in eqn.invars), (eqn.params["precision"] or [None])[0]) for eqn in products]
