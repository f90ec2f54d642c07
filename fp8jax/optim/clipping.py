"""Clipping by the global norm, for gradients in codes and fused with a step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from fp8jax.ops.optimizers.leaf import is_quantized, load
from fp8jax.optim import checks
from fp8jax.optim.fused import FusedTransformation
from fp8jax.optim.fused_backward import clip_factor


def clip_by_global_norm(max_norm: float | Array) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm`, also for gradients that are `QTensor`s.

    It uses the norm of the decoded values. Clipping multiplies the scales of a `QTensor`.
    """
    checks.check_positive("max_norm", max_norm)
    optax_clip = optax.clip_by_global_norm(max_norm)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        if not any(map(is_quantized, jax.tree.leaves(updates, is_leaf=is_quantized))):
            return optax_clip.update(updates, state, params)
        factor = clip_factor(max_norm, global_norm(updates))

        def clip(x: Any) -> Any:
            return dataclasses.replace(x, scale=x.scale * factor) if is_quantized(x) else (x * factor).astype(x.dtype)

        return jax.tree.map(clip, updates, is_leaf=is_quantized), state

    return optax.GradientTransformation(optax_clip.init, update)


def global_norm(grads: optax.Updates) -> Array:
    """The root of the sum of the squares of all gradients, an fp32 scalar; of the decoded values of `QTensor`s."""
    squares: Array = optax.tree.norm([load(x) for x in jax.tree.leaves(grads, is_leaf=is_quantized)], squared=True)
    return jnp.sqrt(jnp.asarray(squares, jnp.float32))


def with_clipping(max_norm: float | Array, tx: FusedTransformation) -> FusedTransformation:
    """Wraps a fused transformation to clip gradients by their global norm.

    `init`, `update` and the state are those of `optax.chain(optax.clip_by_global_norm(max_norm), tx)`, which has no
    `step`. Here `step` clips in the pass that updates parameters and moments. It reads gradients twice, once for the
    norm, and writes no clipped gradients. If the norm overflows fp32 (beyond 1.8e19), finite gradients become 0, as in
    optax.

    Args:
        max_norm: largest global norm, positive.
        tx: a transformation with `step`, as `compressed_adamw` or `fp8jax.optimizer` return.

    Returns:
        The transformation. Its `step` has the arguments `key`, `grad_scale` and `apply_if`, as that of `tx`;
        `grad_scale` is applied before clipping.

    Raises:
        ValueError: `max_norm` is not positive.
        TypeError: `tx` has no `step`.

    Examples:
        >>> import fp8jax, jax.numpy as jnp
        >>> tx = fp8jax.with_clipping(1.0, fp8jax.optimizer("coat", 3e-4))
        >>> params = {"w": jnp.ones((64, 128))}
        >>> params, state = tx.step(params, tx.init(params), params)
    """
    if not isinstance(tx, FusedTransformation):
        raise TypeError(f"with_clipping expects a transformation with `step`, got {tx!r}. Clip others with optax.chain")
    checks.check_positive("max_norm", max_norm)
    chain = optax.chain(clip_by_global_norm(max_norm), tx)

    def step(
        grads: optax.Updates,
        state: tuple[optax.OptState, optax.OptState],
        params: optax.Params,
        *,
        grad_scale: ArrayLike | None = None,
        **step_options: Any,
    ) -> tuple[optax.Params, tuple[optax.OptState, optax.OptState]]:
        grad_scale = jnp.float32(1.0) if grad_scale is None else jnp.asarray(grad_scale, jnp.float32)
        clip = grad_scale * clip_factor(max_norm, global_norm(grads) * jnp.abs(grad_scale))
        params, inner = tx.step(grads, state[1], params, grad_scale=clip, **step_options)
        return params, (state[0], inner)

    return FusedTransformation(chain.init, chain.update, step)
