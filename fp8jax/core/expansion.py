"""Dynamic range expansion (COAT, section 4.2): raise a block to a power that fits its range to the format's."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fp8jax.core.formats import BF16, Format, round_to

MIN_EXPONENT, MAX_EXPONENT = 1 / 16, 16.0
DTYPE = BF16.dtype


def exponents(largest: Array, smallest: Array, fmt: Format, ratio: float | None = None) -> Array:
    """The exponent of each block: log(R) / log(largest / smallest), with R the range of the format.

    A block wider than the format gets an exponent under 1, which compresses it, so that its smallest value keeps a
    non-zero code.

    Args:
        largest: fp32, largest magnitude of each block; 0 for a block of zeros.
        smallest: fp32, smallest non-zero magnitude of each block; Inf for a block of zeros.
        fmt: the format of the codes.
        ratio: R; None takes the format's `expansion_range`.

    Returns:
        bf16 exponents in [1/16, 16]; 1 where a block has fewer than two magnitudes.
    """
    spans = largest > smallest
    octaves = jnp.where(spans, jnp.log2(largest) - jnp.log2(smallest), 1.0)
    exponent = jnp.clip(np.log2(ratio or fmt.expansion_range) / octaves, MIN_EXPONENT, MAX_EXPONENT)
    return round_to(jnp.where(spans, exponent, 1.0), BF16)


# Shares of the octaves of a format's normal codes: those that a group takes which gets a new exponent, and the fewest
# with which it keeps the one it has.
TARGET_FILL, MIN_FILL = 15 / 16, 7 / 8
# The same of codes that are rounded to nearest but for decay: shares of the octaves of `Format.expansion_range`.
DECAYING_MIN_FILL, DECAYING_MAX_FILL = 0.9, 1.05


def exponents_with_hysteresis(largest: Array, smallest: Array, fmt: Format, previous: Array | None) -> Array:
    """The exponents of blocks that are rounded stochastically, step after step.

    A new exponent moves all codes of a block, and every value that then lies between two is rounded at random: with one
    at each step a second moment at b2 = 0.999 is 3 times as noisy. So a block keeps its exponent as long as its range
    fills the normal codes, from `MIN_FILL` to all of them.

    Args:
        largest, smallest, fmt: as of `exponents`.
        previous: the exponents until now, bf16; None makes new ones.

    Returns:
        bf16 exponents; with a new one the range fills `TARGET_FILL` of the octaves, within the bounds of `exponents`.
    """
    new = exponents(largest, smallest, fmt, fmt.normal_range**TARGET_FILL)
    if previous is None:
        return new
    octaves = jnp.log2(largest) - jnp.log2(smallest)
    used_octaves, format_octaves = previous.astype(jnp.float32) * octaves, np.log2(fmt.normal_range)
    return jnp.where((used_octaves >= MIN_FILL * format_octaves) & (used_octaves <= format_octaves), previous, new)


def decaying_exponents_with_hysteresis(largest: Array, smallest: Array, fmt: Format, previous: Array) -> Array:
    """As `exponents_with_hysteresis`, of averages that are rounded as decaying: codes reach into the subnormals."""
    octaves = jnp.log2(largest) - jnp.log2(smallest)
    used_octaves, format_octaves = previous.astype(jnp.float32) * octaves, np.log2(fmt.expansion_range)
    fits = (used_octaves >= DECAYING_MIN_FILL * format_octaves) & (used_octaves <= DECAYING_MAX_FILL * format_octaves)
    return jnp.where(fits, previous, exponents(largest, smallest, fmt))


def power(x: Array, unit: ArrayLike, exponent: Array) -> Array:
    """(x / unit)^exponent of fp32 magnitudes, where x / unit may underflow; zeros, NaN and Inf stay."""
    powered = jnp.exp2(exponent * (jnp.log2(jnp.where(x > 0, x, 1.0)) - jnp.log2(unit)))
    return jnp.where(x > 0, powered, x)


def debias_for_rounding(y: Array, exponent: Array, fmt: Format) -> Array:
    """What to round stochastically in place of y, so that the value is unbiased that the code decodes to.

    The codes around y, a and b, decode in proportion to a^(1 / k) and b^(1 / k). Rounding takes b with probability
    (y - a) / (b - a), which gives y on average, but not y^(1 / k): that lies between the values of a and b in another
    proportion p. Returned is a + p * (b - a).

    Args:
        y: fp32 magnitudes in units of the format.
        exponent: k, fp32, broadcastable against y.
        fmt: the format of the codes.
    """
    below, above = fmt.floor_ceil(y)
    low, high = (power(code, jnp.where(y > 0, y, 1.0), 1 / exponent) for code in (below, above))
    debiased = below + (above - below) * ((1 - low) / (high - low))
    return jnp.where((y > 0) & jnp.isfinite(y), debiased, y)
