"""Stochastic rounding of weights that have no copy in higher precision: the reference of the fused kernels' own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fp8jax.core import noise


def round_stochastically(x: Array, words: Array, **part: Any) -> Array:
    """bf16 from fp32, rounded up or down with probabilities that make the expectation exact; NaN and Inf stay.

    The noise depends on nothing but the words and the element's place in the global shape (`noise.by_position`).

    Args:
        x: fp32, any shape.
        words: two uint32 words, random and new at every step.
        part: of what `x` is a part, `whole` and `begin` of `noise.by_position`.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise.by_position(words, x.shape, **part)
    bits = bits & np.uint32(0xFFFF0000)
    return jnp.where(jnp.isnan(x), x, jax.lax.bitcast_convert_type(bits, jnp.float32)).astype(jnp.bfloat16)
