"""Values of functions with blocks of `fused_backward`, and the updates of their backward passes."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fp8jax.optim.fused_backward import FusedBlockState, sum_of_squares


def value_and_step(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad`, which returns each `FusedBlockState` of the arguments with new parameters and moments.

    Args:
        fn: a function with a scalar result, or with `has_aux` a pair of it and anything.
        argnums: the arguments to differentiate; all that hold a `FusedBlockState` must be among them.
        has_aux: whether `fn` returns a pair.

    Returns:
        `(*args) -> (value, updates)`. The value is NaN if a `FusedBlockState` was used more than once, because its
        updates would have been added.

    Raises:
        ValueError: from a call: `fn` does not use a `FusedBlockState`, or one is in an argument that is not
            differentiated.
    """

    def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        argnums_tuple = (argnums,) if isinstance(argnums, int) else argnums
        diff_argnums = sorted(i % len(args) for i in argnums_tuple)
        constant_args = [x for i, x in enumerate(args) if i not in diff_argnums] + list(kwargs.values())
        if constant_states := _find_block_states(constant_args):
            raise ValueError(
                f"{_describe_params(constant_states[0])} are held, so their argument must be among argnums={argnums}"
            )
        used_numbers: set[int] = set()

        def mark_and_call(*args: Any) -> Any:
            order = iter(range(len(_find_block_states([args[i] for i in diff_argnums]))))
            enter = lambda x: _mark_used(x, next(order), used_numbers) if isinstance(x, FusedBlockState) else x  # noqa: E731
            return fn(
                *(
                    jax.tree.map(enter, x, is_leaf=_is_block_state) if i in diff_argnums else x
                    for i, x in enumerate(args)
                ),
                **kwargs,
            )

        value, updates = jax.value_and_grad(mark_and_call, argnums, has_aux=has_aux)(*args)
        old_states, new_states = _find_block_states([args[i] for i in diff_argnums]), _find_block_states(updates)
        unused_states = [block_state for i, block_state in enumerate(old_states) if i not in used_numbers]
        if unused_states:
            raise ValueError(
                f"{_describe_params(unused_states[0])} are held, but the function does not use them: give their block "
                "to it"
            )
        is_valid = functools.reduce(
            jnp.logical_and, [block_state.uses == 1 for block_state in new_states], jnp.bool_(True)
        )
        check = lambda value: jnp.where(is_valid, value, jnp.nan)  # noqa: E731
        updates = jax.tree.map(_reset_grad_scale, updates, is_leaf=_is_block_state)
        return ((check(value[0]), value[1]) if has_aux else check(value)), updates

    return call


def compute_grad_norm(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Array]:
    """The global norm of the gradients of `value_and_step`, by a backward pass that updates nothing.

    Args:
        fn, argnums, has_aux: as of `value_and_step`.

    Returns:
        `(*args) -> norm`, fp32 scalar. Under `jax.jit` it computes no new parameters.
    """
    step_fn = value_and_step(fn, argnums, has_aux)
    to_norm_only = lambda x: dataclasses.replace(x, norm_only=True) if isinstance(x, FusedBlockState) else x  # noqa: E731
    return lambda *args, **kwargs: grad_norm_from_states(
        step_fn(*jax.tree.map(to_norm_only, args, is_leaf=_is_block_state), **kwargs)[1]
    )


def grad_norm_from_states(updates: Any) -> Array:
    """The global norm of the gradients of a step.

    Args:
        updates: of `value_and_step`: gradients, and each `FusedBlockState` after the step, with its sum of squares.

    Returns:
        fp32 scalar.
    """
    leaves = jax.tree.leaves(updates, is_leaf=_is_block_state)
    squares = [jnp.sum(x.squares) if isinstance(x, FusedBlockState) else sum_of_squares(x) for x in leaves]
    return jnp.sqrt(sum(squares, jnp.float32(0.0)))


def _mark_used(block_state: FusedBlockState, number: int, used_numbers: set[int]) -> FusedBlockState:
    """The same state; `number` is added to `used_numbers` when its cotangent is traced."""

    @jax.custom_vjp
    def mark(block_state: FusedBlockState) -> FusedBlockState:
        return block_state

    def backward(_: None, cotangent: FusedBlockState) -> tuple[FusedBlockState]:
        used_numbers.add(number)
        return (cotangent,)

    mark.defvjp(lambda block_state: (block_state, None), backward)
    return mark(block_state)  # type: ignore[no-any-return]


def _reset_grad_scale(x: Any) -> Any:
    """A state after a step, without the scale and the limits of that step."""
    return (
        dataclasses.replace(x, grad_scale=jnp.ones_like(x.grad_scale), max_norms=None)
        if isinstance(x, FusedBlockState)
        else x
    )


def _find_block_states(tree: Any) -> list[FusedBlockState]:
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_block_state) if isinstance(x, FusedBlockState)]


def _is_block_state(x: Any) -> bool:
    return isinstance(x, FusedBlockState)


def _describe_params(block_state: FusedBlockState) -> str:
    return f"the parameters of {block_state.name or 'a block'}"
