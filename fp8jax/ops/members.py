"""Members of a group that no longer matter to Adam, and what is stored of them, so that they spoil no other.

The exponent of a group comes from its smallest magnitude. A member whose gradient is gone (a dead unit, a pruned
column) has moments that fall without end, and would take the codes away from the others. It is known by its update,
|m| / (sqrt(v) + eps), which falls faster than either moment's place in the group.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from fp8jax.core import blocks, formats
from fp8jax.core.qtensor import QTensor
from fp8jax.ops.adamw_fused import IDLE, LOWEST, NEAR, RAISED, SILENT
from fp8jax.ops.adamw_leaf import Adam, Moment

_READ = ("count", "b1", "b2", "eps", "eps_root")


def settled(
    grad: Array, direction: Array, m: Array, v: Array, mu: Moment, nu: Moment, adam: Adam
) -> tuple[Array, Array]:
    """The moments as they are to be stored, where `mu` and `nu` are stored as codes with range expansion.

    Moments with the paper's own expansion ("coat") stay as they are: their exponents go by every member.

    With D = max |m| / (sqrt(max v) + eps) of a group, in bias-corrected moments, which no group's largest direction is
    less than:

    - A member is idle where its direction is under D / 40. Its first moment becomes 0: no later update is wrong by more
      than that share of the group's largest, and a moment that is rounded to nearest cannot stay at the smallest code
      while the second one falls.
    - It is silent where its gradient is 0 and its direction under D / 2^24; after a first moment of codes that is some
      45 steps after the last gradient. Its second moment stops to fall: bias-corrected it stays as it is, at least
      1/128 of the group's largest; from 1/8 on it becomes 1/2 of that; what is larger falls on.

    Live members are neither, however small their gradients are: directions know no scale. One that gets a gradient
    every N steps only, with N beyond 45, has a second moment as if N were about 45; and one whose gradients are besides
    less than 1/8 of the group's largest has a second moment of 1/128 of the largest.

    Args:
        grad: gradient, any shape.
        direction: bias-corrected direction m / (sqrt(v) + eps), fp32, before it is cut.
        m, v: new moments, fp32.
        mu, nu: the moments as stored until now, which say how they are stored.
        adam: the scalars of the step.

    Returns:
        Both moments, fp32. What is not finite stays.
    """
    expanded = [isinstance(moment, QTensor) and moment.spec.expand not in (False, "coat") for moment in (mu, nu)]
    if not any(expanded):
        return m, v
    stored = mu if expanded[0] else nu
    assert isinstance(stored, QTensor)
    shape = stored.spec.block_shape(m.shape)

    # On a mesh with Explicit axes an array that the function closes over is of another mesh.
    scalars = {name: x for name, x in vars(adam).items() if name in _READ and isinstance(x, Array)}

    def settle(g: Array, d: Array, m: Array, v: Array, *values: Array) -> tuple[Array, Array]:
        given: dict[str, Any] = dict(zip(scalars, values, strict=True))
        own = dataclasses.replace(adam, **given)
        count = jnp.asarray(own.count, jnp.float32)

        def peak(x: Array) -> Array:
            return blocks.reduce(formats.where(jnp.isfinite(x), jnp.abs(x), 0), shape, jnp.max, 0.0)

        correction, before = (1 - own.b2**n for n in (count, jnp.maximum(count - 1, 1)))
        m_peak, v_peak = peak(m), peak(v)
        largest = m_peak / (1 - own.b1**count) / (jnp.sqrt(v_peak / correction + own.eps_root) + own.eps)
        largest, v_peak = (blocks.spread(x, m.shape, shape) for x in (largest, v_peak))
        size = jnp.abs(d)
        silent = (jnp.abs(g) < formats.TINY) & (size < SILENT * largest) & (v > 0)
        before_decay = v * (correction / before / jnp.maximum(own.b2, np.float32(formats.TINY)))
        low = jnp.maximum(before_decay, LOWEST * v_peak)
        rest = jnp.where(before_decay < NEAR * v_peak, low, RAISED * v_peak)
        rest = jnp.where(before_decay < RAISED * v_peak, rest, v)
        return jnp.where(size < IDLE * largest, 0, m), jnp.where(silent, rest, v)

    g = grad.astype(jnp.float32) if adam.factor is None else grad.astype(jnp.float32) * adam.factor
    m_settled, v_settled = blocks.on_logical_array(
        settle, g, direction, m, v, *scalars.values(), like=[m.shape, m.shape]
    )
    return (m_settled if expanded[0] else m), (v_settled if expanded[1] else v)
