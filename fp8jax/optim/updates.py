"""Values of functions with released blocks, and what their backward passes updated."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fp8jax.optim.release import Held, sum_of_squares


def value_and_updates(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """As `jax.value_and_grad`; but arguments that hold `Held` come back with new parameters and moments there.

    Args:
        fn: a function with a scalar result, or with `has_aux` a pair of it and anything.
        argnums: the arguments to differentiate; all that hold `Held` must be among them.
        has_aux: whether `fn` returns a pair.

    Returns:
        `(*args) -> (value, updates)`. The value is NaN where a `Held` was used more than once, whose updates would have
        been added to one another.

    Raises:
        ValueError: from a call: a `Held` is not used by `fn`, or is in an argument that is not differentiated.
    """

    def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        chosen = (argnums,) if isinstance(argnums, int) else argnums
        numbers = sorted(i % len(args) for i in chosen)
        fixed = [x for i, x in enumerate(args) if i not in numbers] + list(kwargs.values())
        if bound := _held(fixed):
            raise ValueError(f"{_named(bound[0])} are held, so their argument must be among argnums={argnums}")
        seen: set[int] = set()

        def entered(*args: Any) -> Any:
            order = iter(range(len(_held([args[i] for i in numbers]))))
            enter = lambda x: _entered(x, next(order), seen) if isinstance(x, Held) else x  # noqa: E731
            return fn(
                *(jax.tree.map(enter, x, is_leaf=_is_held) if i in numbers else x for i, x in enumerate(args)), **kwargs
            )

        value, updates = jax.value_and_grad(entered, argnums, has_aux=has_aux)(*args)
        given, new = _held([args[i] for i in numbers]), _held(updates)
        unused = [held for i, held in enumerate(given) if i not in seen]
        if unused:
            raise ValueError(
                f"{_named(unused[0])} are held, but the function does not use them: give their block to it"
            )
        right = functools.reduce(jnp.logical_and, [held.uses == 1 for held in new], jnp.bool_(True))
        check = lambda value: jnp.where(right, value, jnp.nan)  # noqa: E731
        updates = jax.tree.map(_after, updates, is_leaf=_is_held)
        return ((check(value[0]), value[1]) if has_aux else check(value)), updates

    return call


def gradient_norm(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Array]:
    """The global norm of the gradients that `value_and_updates` would use, by a backward pass that updates nothing.

    Args:
        fn, argnums, has_aux: as of `value_and_updates`.

    Returns:
        `(*args) -> norm`, fp32 scalar. Under `jax.jit` no new parameters are computed for it.
    """
    both = value_and_updates(fn, argnums, has_aux)
    measured = lambda x: dataclasses.replace(x, measured=True) if isinstance(x, Held) else x  # noqa: E731
    return lambda *args, **kwargs: updates_norm(both(*jax.tree.map(measured, args, is_leaf=_is_held), **kwargs)[1])


def updates_norm(updates: Any) -> Array:
    """The global norm of the gradients of a step.

    Args:
        updates: of `value_and_updates`: gradients, and `Held` after a step, whose squares count.

    Returns:
        fp32 scalar.
    """
    leaves = jax.tree.leaves(updates, is_leaf=_is_held)
    squares = [jnp.sum(x.squares) if isinstance(x, Held) else sum_of_squares(x) for x in leaves]
    return jnp.sqrt(sum(squares, jnp.float32(0.0)))


def _entered(held: Held, number: int, seen: set[int]) -> Held:
    """The same; that its cotangent is asked for is noted when the backward pass is traced: it is used."""

    @jax.custom_vjp
    def enter(held: Held) -> Held:
        return held

    def backward(_: None, cotangent: Held) -> tuple[Held]:
        seen.add(number)
        return (cotangent,)

    enter.defvjp(lambda held: (held, None), backward)
    return enter(held)  # type: ignore[no-any-return]


def _after(x: Any) -> Any:
    """What is held after a step, without the factor and the limits that were of it."""
    return dataclasses.replace(x, factor=jnp.ones_like(x.factor), limits=None) if isinstance(x, Held) else x


def _held(tree: Any) -> list[Held]:
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_held) if isinstance(x, Held)]


def _is_held(x: Any) -> bool:
    return isinstance(x, Held)


def _named(held: Held) -> str:
    return f"the parameters of {held.name or 'a block'}"
