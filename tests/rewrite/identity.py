"""A function read and run again with a plan that changes nothing."""

from collections.abc import Callable
from typing import Any

import jax

from fp8jax.rewrite.read import read
from fp8jax.rewrite.run import Interpreter, schedule


def again(fn: Callable, *, apart: bool = False) -> Callable:
    """`fn` read into a graph and run; `apart`, with each call and each nested program taken apart and put together."""

    def call(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(lambda *args: fn(*args), return_shape=True)(*args)
        plan = schedule(read(closed, [None] * len(jax.tree.leaves(args))), inline_all=apart)
        return jax.tree.unflatten(jax.tree.structure(shapes), Interpreter(plan, jax.tree.leaves(args), {}).run())

    return call


def text(fn: Callable, *args: Any) -> str:
    """The program of a function, with the scopes and lines of its equations."""
    closed = jax.make_jaxpr(lambda *args: fn(*args))(*args)
    return getattr(closed, "jaxpr", closed).pretty_print(name_stack=True, source_info=True)  # type: ignore[no-any-return]
