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
from fp8jax.ops.optimizers.leaf import Adam, Moment

# Shares of a group's largest direction, and of its largest second moment.
DEAD_M_RATIO, DEAD_V_RATIO = 1 / 40, 2.0**-24
DEAD_V_HIGH, DEAD_V_MID, DEAD_V_LOW = 1 / 2, 1 / 8, 1 / 128
_SCALARS_READ = ("count", "b1", "b2", "eps", "eps_root")


def suppress_dead_elements(
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
    expanded_moment = mu if expanded[0] else nu
    assert isinstance(expanded_moment, QTensor)
    shape = expanded_moment.spec.block_shape(m.shape)

    # On a mesh with Explicit axes an array that the function closes over is of another mesh.
    scalars = {name: x for name, x in vars(adam).items() if name in _SCALARS_READ and isinstance(x, Array)}

    def suppress(g: Array, d: Array, m: Array, v: Array, *values: Array) -> tuple[Array, Array]:
        scalar_values: dict[str, Any] = dict(zip(scalars, values, strict=True))
        traced_adam = dataclasses.replace(adam, **scalar_values)
        count = jnp.asarray(traced_adam.count, jnp.float32)

        def peak(x: Array) -> Array:
            return blocks.reduce(formats.where(jnp.isfinite(x), jnp.abs(x), 0), shape, jnp.max, 0.0)

        correction, previous_correction = (1 - traced_adam.b2**n for n in (count, jnp.maximum(count - 1, 1)))
        m_peak, v_peak = peak(m), peak(v)
        direction_bound = (
            m_peak
            / (1 - traced_adam.b1**count)
            / (jnp.sqrt(v_peak / correction + traced_adam.eps_root) + traced_adam.eps)
        )
        direction_bound, v_peak = (blocks.broadcast_blocks(x, m.shape, shape) for x in (direction_bound, v_peak))
        magnitude = jnp.abs(d)
        is_silent = (jnp.abs(g) < formats.TINY) & (magnitude < DEAD_V_RATIO * direction_bound) & (v > 0)
        before_decay = v * (correction / previous_correction / jnp.maximum(traced_adam.b2, np.float32(formats.TINY)))
        low = jnp.maximum(before_decay, DEAD_V_LOW * v_peak)
        dead_v = jnp.where(before_decay < DEAD_V_MID * v_peak, low, DEAD_V_HIGH * v_peak)
        dead_v = jnp.where(before_decay < DEAD_V_HIGH * v_peak, dead_v, v)
        return jnp.where(magnitude < DEAD_M_RATIO * direction_bound, 0, m), jnp.where(is_silent, dead_v, v)

    g = grad.astype(jnp.float32) if adam.grad_scale is None else grad.astype(jnp.float32) * adam.grad_scale
    new_m, new_v = blocks.on_logical_array(
        suppress, g, direction, m, v, *scalars.values(), out_shapes=[m.shape, m.shape]
    )
    return (new_m if expanded[0] else m), (new_v if expanded[1] else v)
