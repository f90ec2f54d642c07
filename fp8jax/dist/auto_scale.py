"""FP8-LM's auto-scale factor mu: how much of the format's range a gradient takes before it is summed in 8 bits."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

MAX_SATURATED_FRACTION = 1e-5
STEPS_TO_DOUBLE = 1000


class Factors(NamedTuple):
    """The state of one-phase reductions; a tree of arrays, to be kept with the optimizer's state in checkpoints.

    Attributes:
        mu: for each parameter its factor, an fp32 scalar: codes use this part of the format's range, so that sums of
            them stay in it.
        saturated: for each parameter the part of the last sum that lay at the end of the range, an fp32 scalar.
    """

    mu: Any
    saturated: Any


def init_factors(params: Any, replicas: int) -> Factors:
    """Factors before the first step: 1 / sqrt(replicas), as sums of independent gradients grow.

    Args:
        params: tree of parameters or gradients, concrete or abstract.
        replicas: devices that gradients are summed over.
    """
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1, not {replicas}")
    return Factors(
        jax.tree.map(lambda _: jnp.full((), 1 / math.sqrt(replicas), jnp.float32), params),
        jax.tree.map(lambda _: jnp.zeros((), jnp.float32), params),
    )


def next_factor(mu: Array, saturated: Array, finite: Array, replicas: int) -> Array:
    """The factor after a step: half where more than 0.001 % saturated, else 1/1000 of a doubling more.

    It stays between 1 / replicas, with which no sum leaves the range, and 1, with which the largest magnitude of a
    single device is at its end. A gradient that is not finite says nothing of it.
    """
    new = jnp.where(saturated > MAX_SATURATED_FRACTION, mu / 2, mu * np.float32(2 ** (1 / STEPS_TO_DOUBLE)))
    return jnp.where(finite, jnp.clip(new, 1 / replicas, 1), mu)
