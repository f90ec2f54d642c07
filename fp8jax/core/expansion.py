"""Dynamic range expansion (COAT, section 4.2): raise a block to a power that fits its range to the format's."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fp8jax.core.formats import BF16, Format, round_to

LOWEST, HIGHEST = 1 / 16, 16.0
DTYPE = BF16.dtype


def exponents(largest: Array, smallest: Array, fmt: Format) -> Array:
    """The exponent of each block: log(R) / log(largest / smallest), with R the range of the format.

    A block wider than the format gets an exponent under 1, which compresses it, so that its smallest value keeps a
    non-zero code.

    Args:
        largest: fp32, largest magnitude of each block; 0 for a block of zeros.
        smallest: fp32, smallest non-zero magnitude of each block; Inf for a block of zeros.
        fmt: the format of the codes; R is its `expansion_range`.

    Returns:
        bf16 exponents in [1/16, 16]; 1 where a block has fewer than two magnitudes.
    """
    spans = largest > smallest
    octaves = jnp.where(spans, jnp.log2(largest) - jnp.log2(smallest), 1.0)
    exponent = jnp.clip(np.log2(fmt.expansion_range) / octaves, LOWEST, HIGHEST)
    return round_to(jnp.where(spans, exponent, 1.0), BF16)


def power(x: Array, unit: ArrayLike, exponent: Array) -> Array:
    """(x / unit)^exponent of fp32 magnitudes, where x / unit may underflow; zeros, NaN and Inf stay."""
    powered = jnp.exp2(exponent * (jnp.log2(jnp.where(x > 0, x, 1.0)) - jnp.log2(unit)))
    return jnp.where(x > 0, powered, x)
