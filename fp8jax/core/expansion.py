"""Dynamic range expansion (COAT, section 4.2): raise a block to a power that fits its range to the format's."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fp8jax.core.formats import BF16, Format, round_to

LOWEST, HIGHEST = 1 / 16, 16.0
DTYPE = BF16.dtype


def exponents(largest: Array, smallest: Array, fmt: Format, rounding: str = "nearest") -> Array:
    """The exponent of each block: log(R) / log(largest / smallest), with R the range of the format.

    A block wider than the format gets an exponent under 1, which compresses it, so that its smallest value keeps a
    non-zero code.

    Args:
        largest: fp32, largest magnitude of each block; 0 for a block of zeros.
        smallest: fp32, smallest non-zero magnitude of each block; Inf for a block of zeros.
        fmt: the format of the codes.
        rounding: of the codes; R is the format's `expansion_range`, or "stochastic" its `normal_range`.

    Returns:
        bf16 exponents in [1/16, 16]; 1 where a block has fewer than two magnitudes.
    """
    spans = largest > smallest
    octaves = jnp.where(spans, jnp.log2(largest) - jnp.log2(smallest), 1.0)
    ratio = fmt.normal_range if rounding == "stochastic" else fmt.expansion_range
    exponent = jnp.clip(np.log2(ratio) / octaves, LOWEST, HIGHEST)
    return round_to(jnp.where(spans, exponent, 1.0), BF16)


def power(x: Array, unit: ArrayLike, exponent: Array) -> Array:
    """(x / unit)^exponent of fp32 magnitudes, where x / unit may underflow; zeros, NaN and Inf stay."""
    powered = jnp.exp2(exponent * (jnp.log2(jnp.where(x > 0, x, 1.0)) - jnp.log2(unit)))
    return jnp.where(x > 0, powered, x)


def interpolated(y: Array, exponent: Array, fmt: Format) -> Array:
    """What to round stochastically in place of y, so that the value is unbiased that the code decodes to.

    The codes around y, a and b, decode in proportion to a^(1 / k) and b^(1 / k). Rounding takes b with probability
    (y - a) / (b - a), which gives y on average, but not y^(1 / k): that lies between the values of a and b in another
    proportion p. Returned is a + p * (b - a).

    Args:
        y: fp32 magnitudes in units of the format.
        exponent: k, fp32, broadcastable against y.
        fmt: the format of the codes.
    """
    below, above = fmt.neighbours(y)
    low, high = (power(code, jnp.where(y > 0, y, 1.0), 1 / exponent) for code in (below, above))
    between = below + (above - below) * ((1 - low) / (high - low))
    return jnp.where((y > 0) & jnp.isfinite(y), between, y)
