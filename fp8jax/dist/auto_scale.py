"""FP8-LM's auto-scale factor mu: the fraction of the format's range that a gradient uses before an 8-bit sum."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

MAX_SATURATED_FRACTION = 1e-5
STEPS_TO_DOUBLE = 1000


class Factors(NamedTuple):
    """The state of one-phase reductions, a tree of arrays; save it in checkpoints with the optimizer's state.

    Attributes:
        mu: factor of each parameter, an fp32 scalar. Codes use this fraction of the format's range, so that their sums
            stay in it.
        saturated: fraction of each parameter's last sum at the end of the range, an fp32 scalar.
    """

    mu: Any
    saturated: Any


def init_factors(params: Any, replicas: int) -> Factors:
    """Factors before the first step: 1 / sqrt(replicas), the growth of sums of independent gradients.

    Args:
        params: tree of parameters or gradients, concrete or abstract.
        replicas: number of devices that gradients are summed over.
    """
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1, not {replicas}")
    return Factors(
        jax.tree.map(lambda _: jnp.full((), 1 / math.sqrt(replicas), jnp.float32), params),
        jax.tree.map(lambda _: jnp.zeros((), jnp.float32), params),
    )


def next_factor(mu: Array, saturated: Array, finite: Array, replicas: int) -> Array:
    """The next factor: half if more than 0.001 % saturated, else larger by 2^(1/1000).

    It stays between 1 / replicas, where no sum can saturate, and 1, where one device's amax is the largest code. A
    non-finite gradient leaves it unchanged.
    """
    new = jnp.where(saturated > MAX_SATURATED_FRACTION, mu / 2, mu * np.float32(2 ** (1 / STEPS_TO_DOUBLE)))
    return jnp.where(finite, jnp.clip(new, 1 / replicas, 1), mu)
