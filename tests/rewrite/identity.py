"""Reads a function and runs it again with an empty plan."""

from collections.abc import Callable
from typing import Any

import jax

from fp8jax.rewrite.read import read
from fp8jax.rewrite.run import Interpreter, schedule


def again(fn: Callable, *, apart: bool = False) -> Callable:
    """Reads `fn` into a graph and runs it; with `apart`, each call and sub-jaxpr is taken apart and rebuilt."""

    def call(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(lambda *args: fn(*args), return_shape=True)(*args)
        plan = schedule(read(closed, [None] * len(jax.tree.leaves(args))), inline_all=apart)
        return jax.tree.unflatten(jax.tree.structure(shapes), Interpreter(plan, jax.tree.leaves(args), {}).run())

    return call


def text(fn: Callable, *args: Any) -> str:
    """Returns the program of a function, with scopes and lines of its equations."""
    closed = jax.make_jaxpr(lambda *args: fn(*args))(*args)
    return getattr(closed, "jaxpr", closed).pretty_print(name_stack=True, source_info=True)  # type: ignore[no-any-return]
