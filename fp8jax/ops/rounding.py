"""Stochastic rounding of weights that have no copy in higher precision: the reference of the fused kernels' own."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def round_stochastically(x: Array, words: Array) -> Array:
    """bf16 from fp32, rounded up or down with probabilities that make the expectation exact; NaN and Inf stay.

    The 16 bits of noise depend on nothing but the words and the element's place in the global shape: they are half of
    a multiple of a hash of index // 8, one multiple for each of four pairs. They repeat after 2^35 elements.

    Args:
        x: fp32, any shape.
        words: two uint32 words, random and new at every step.
    """
    shape = x.shape or (1,)
    length = shape[-1]
    row, column = jnp.zeros(shape, jnp.uint32), jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    for axis, size in enumerate(shape[:-1]):
        row = row * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    # Eight rows have a multiple of eight elements: no product here needs more than 32 bits to be right modulo 2^32.
    within = (row & 7) * np.uint32(length) + column
    noise = ((row >> 3) * np.uint32(length) + (within >> 3)) * np.uint32(0x9E3779B9) + words[0]
    noise = (noise ^ (noise >> 16)) * np.uint32(0x7FEB352D)
    noise = (noise ^ (noise >> 15) ^ words[1]) * np.uint32(0x846CA68B)
    noise = noise ^ (noise >> 16)
    noise += noise * np.uint32(0x9708B674) * ((within >> 1) & 3)
    noise = jnp.where(within & 1 == 0, noise & 0xFFFF, noise >> 16).reshape(x.shape)
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint32) + noise) & np.uint32(0xFFFF0000)
    return jnp.where(jnp.isnan(x), x, jax.lax.bitcast_convert_type(bits, jnp.float32)).astype(jnp.bfloat16)
