"""AdamW with moments that may be stored in 8 bits: decode, update in fp32, encode."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fp8jax.core import noise
from fp8jax.core.qtensor import QTensor
from fp8jax.ops.optimizers import adamw_kernel
from fp8jax.ops.optimizers.dead_elements import suppress_dead_elements
from fp8jax.ops.optimizers.leaf import Adam, Leaf, StepResult, apply_change, load, scale_and_clip, store
from fp8jax.ops.optimizers.step import FusedOptimizer


def reference(adam: Adam, leaves: Sequence[Leaf]) -> list[StepResult]:
    """The step in plain JAX, also of leaves with a master weight in fp32."""
    grads = [load(leaf.grad) if isinstance(leaf.grad, QTensor) else leaf.grad for leaf in leaves]
    mus, nus = [leaf.mu for leaf in leaves], [leaf.nu for leaf in leaves]
    directions, ms, vs = adam_direction(grads, mus, nus, adam)
    # Dead elements are found by moments alone: with nesterov a gradient may cancel the moment of a live one.
    plain_directions = directions
    if adam.nesterov:
        plain_directions, _, _ = adam_direction(grads, mus, nus, dataclasses.replace(adam, nesterov=False))

    def step_leaf(leaf: Leaf, grad: Array, direction: Array, plain_direction: Array, m: Array, v: Array) -> StepResult:
        m, v = suppress_dead_elements(grad, plain_direction, m, v, leaf.mu, leaf.nu, adam)
        is_dithered = adamw_kernel.needs_dither(leaf.mu, adam.b1)
        mu = store(m, leaf.mu, dither=noise.decay_dither(adam.count, adam.b1) if is_dithered else None)
        nu_seed = None if leaf.salt is None else leaf.advance_seed(noise.fold_in_seed(adam.seed, leaf.salt))
        nu = store(v, leaf.nu, nu_seed, row_length=leaf.padded_row)
        if adam.max_direction is not None:
            direction = clip_finite(direction, adam.max_direction)
        value = leaf.value
        if leaf.decays:
            direction = direction + adam.weight_decay * value
        change = jnp.asarray(-adam.rate, jnp.float32) * direction
        if leaf.master is None:
            return StepResult(apply_change(leaf, change), None, mu, nu)
        master = value + change
        weight = master if leaf.in_place else master - leaf.weight.astype(jnp.float32)
        return StepResult(weight.astype(leaf.dtype), master, mu, nu)

    return [*map(step_leaf, leaves, grads, directions, plain_directions, ms, vs)]


ADAMW = FusedOptimizer(
    name="adamw",
    reference=reference,
    kernel=adamw_kernel.step_leaves,
    kernel_module="optimizers.adamw_triton",
    unsupported_reason=adamw_kernel.unsupported_reason,
)


def adam_direction(grads: Any, mu: Any, nu: Any, adam: Adam) -> tuple[Any, Any, Any]:
    """Adam's bias-corrected direction (Kingma and Ba, Algorithm 1), from moments before they are stored again.

    Finite gradients are clipped to 2^62 (`leaf.scale_and_clip`).

    Args:
        grads: tree of gradients of any floating dtype.
        mu: the tree with the first moment, as stored, in each leaf's place.
        nu: the tree with the second moments, likewise.
        adam: the scalars of the step.

    Returns:
        The tree of directions m / (sqrt(v) + eps), to be followed downhill, and both trees of moments; all in fp32.
        With `adam.nesterov`, m in the directions is b1 times the next step's moment and 1 - b1 times the gradient, each
        bias-corrected (Dozat, 2016).
    """
    # optax's own functions over the whole tree give the bits of `optax.scale_by_adam`: XLA divides by a bias correction
    # differently if leaves do not share it.
    g = jax.tree.map(lambda x: scale_and_clip(x, adam.grad_scale), grads)
    if adam.nesterov and not any(map(_is_quantized, jax.tree.leaves((mu, nu), is_leaf=_is_quantized))):
        # XLA would fuse the gradients' computation with these sums, and round them otherwise than optax's.
        g = jax.lax.optimization_barrier(g)
    m = optax.tree.update_moment(g, jax.tree.map(load, mu, is_leaf=_is_quantized), adam.b1, 1)
    v = optax.tree.update_moment_per_elem_norm(g, jax.tree.map(load, nu, is_leaf=_is_quantized), adam.b2, 2)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a number to an integer's power
        if adam.nesterov:
            next_m_hat = optax.tree.bias_correction(m, adam.b1, optax.safe_increment(adam.count))
            g_hat = optax.tree.bias_correction(g, adam.b1, adam.count)
            m_hat = jax.tree.map(lambda m, g: adam.b1 * m + (1 - adam.b1) * g, next_m_hat, g_hat)
        else:
            m_hat = optax.tree.bias_correction(m, adam.b1, adam.count)
        v_hat = optax.tree.bias_correction(v, adam.b2, adam.count)
    d = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + adam.eps_root) + adam.eps), m_hat, v_hat)
    return d, m, v


def clip_finite(x: Array, limit: Any) -> Array:
    """`x` with finite values clipped to a magnitude; NaN and Inf stay."""
    return jnp.where((jnp.abs(x) > limit) & jnp.isfinite(x), jnp.sign(x) * limit, x)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, QTensor)
