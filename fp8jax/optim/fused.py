"""`FusedTransformation`: an optax transformation with a step that updates parameters in place."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import optax
from jax import Array
from jax.typing import ArrayLike

from fp8jax.ops.optimizers.leaf import WHOLE_TREE, TreeSlice
from fp8jax.optim import flax_variables


class FusedTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation that can also apply its update itself.

    `step(grads, state, params) -> (params, state)` equals `update` followed by `optax.apply_updates`, without a tree of
    updates: each parameter is read and written once. It has further keyword arguments:

    key: PRNG key for stochastic rounding of bf16 parameters. To nearest, changes below half a step of bf16 are lost.
    grad_scale: scalar factor of the gradients, applied in fp32 in the same pass.
    apply_if: boolean scalar. If it is False, parameters and state stay unchanged, without a copy.
    max_direction: scalar. Finite directions are clipped to this magnitude, before rate and weight decay. It is for
        `fp8jax.with_weight_bounds`; `fp8lm_adamw` raises.
    tree_slice: which part of all parameters these are, for `fp8jax.fused_backward`.

    `update` holds the step, so that a copy made of `init` and `update`, by `_replace` or `jax.tree.map`, has it too.

    Raises:
        TypeError: no step is given, and `update` is not that of a fused transformation.
    """

    def __new__(cls, init: Callable, update: Callable, step: Callable | None = None) -> "FusedTransformation":
        if step is None and not isinstance(update, _Update):
            raise TypeError(
                f"FusedTransformation: {update!r} is not the update of a fused transformation, so there is no step; "
                "pass all three, FusedTransformation(init, update, step)"
            )
        return super().__new__(cls, init, update if step is None else _Update(update, step))

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> "FusedTransformation":
        return cls(*iterable)

    @property
    def step(self) -> Callable[..., tuple[optax.Params, optax.OptState]]:
        """The function that updates parameters in place."""
        return self.update.step


@dataclasses.dataclass(frozen=True, eq=False)
class _Update:
    """The update of a fused transformation, and the step that equals it."""

    update: Callable
    step: Callable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.update(*args, **kwargs)


class StepOptions(NamedTuple):
    """The options of a step.

    Attributes:
        in_place: whether the result is the new parameters, or else their changes.
        key, grad_scale, apply_if, max_direction, tree_slice: as of `FusedTransformation`.
    """

    in_place: bool
    key: Array | None = None
    grad_scale: ArrayLike | None = None
    apply_if: ArrayLike | None = None
    max_direction: ArrayLike | None = None
    tree_slice: TreeSlice = WHOLE_TREE


def fused_transformation(init_fn: Callable, update_fn: Callable) -> FusedTransformation:
    """A transformation from its two functions that also accepts parameters in boxes of Flax.

    Args:
        init_fn: `init_fn(params) -> state`.
        update_fn: `update_fn(grads, state, params, options) -> (result, state)`, with `StepOptions`.
    """

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        max_direction: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del extra_args
        return update_fn(updates, state, params, StepOptions(False, max_direction=max_direction))

    def step(
        grads: optax.Updates,
        state: optax.OptState,
        params: optax.Params,
        *,
        key: Array | None = None,
        grad_scale: ArrayLike | None = None,
        apply_if: ArrayLike | None = None,
        max_direction: ArrayLike | None = None,
        tree_slice: TreeSlice = WHOLE_TREE,
    ) -> tuple[optax.Params, optax.OptState]:
        options = StepOptions(True, key, grad_scale, apply_if, max_direction, tree_slice)
        return update_fn(grads, state, params, options)

    return FusedTransformation(*flax_variables.with_unboxed_variables(init_fn, update, step))
