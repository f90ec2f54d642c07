"""Dead elements of groups, and what is stored for them, so that they cost the others no precision.

The expansion exponent of a group comes from its smallest magnitude. The moments of an element without gradients (a dead
unit, a pruned column) decay without end, and would widen the range of the group. Such elements are found by their
update, |m| / (sqrt(v) + eps), which decays faster than either moment.
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
    """The moments to be stored, if `mu` and `nu` are stored as codes with range expansion; others stay.

    Let D = max|m| / (sqrt(max v) + eps), over the bias-corrected moments of a group. D is a lower bound of the group's
    largest direction.

    - If the direction of an element is below D / 40, its first moment becomes 0. That changes no later update by more
      than this share of the group's largest. Rounding to nearest could hold such a moment at the smallest code.
    - If also its gradient is 0 and its direction below D / 2^24, its second moment decays no further. It keeps its
      bias-corrected value, but at least 1/128 of the group's largest; between 1/8 and 1/2 it becomes 1/2, and
      larger ones decay. A first moment in codes gets there some 45 steps after its last gradient.

    Elements with small gradients are not affected, because directions do not depend on the gradient's scale. An element
    with a gradient every N > 45 steps has the second moment of one with a gradient every 45.

    Moments with the paper's expansion ("coat") stay: their exponents are of all elements.

    Args:
        grad: gradient, any shape.
        direction: bias-corrected direction m / (sqrt(v) + eps), fp32, before it is clipped.
        m, v: new moments, fp32.
        mu, nu: the moments as stored before.
        adam: the scalars of the step.

    Returns:
        Both moments, fp32. Elements that are not finite stay.
    """
    expanded = [isinstance(moment, QTensor) and moment.spec.expand not in (False, "coat") for moment in (mu, nu)]
    if not any(expanded):
        return m, v
    expanded_moment = mu if expanded[0] else nu
    assert isinstance(expanded_moment, QTensor)
    shape = expanded_moment.spec.block_shape(m.shape)

    # Arrays that `suppress` closed over would have another mesh on Explicit axes: they are arguments.
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
