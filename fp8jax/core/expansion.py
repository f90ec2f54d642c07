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

    A block wider than the format gets an exponent below 1, which compresses it so that its smallest value keeps a
    non-zero code.

    Args:
        largest: fp32, largest magnitude of each block; 0 for a block of zeros.
        smallest: fp32, smallest non-zero magnitude of each block; Inf for a block of zeros.
        ratio: R; None uses `fmt.expansion_range`.

    Returns:
        bf16 exponents in [1/16, 16]; 1 if a block has fewer than two distinct magnitudes.
    """
    spans = largest > smallest
    octaves = jnp.where(spans, jnp.log2(largest) - jnp.log2(smallest), 1.0)
    exponent = jnp.clip(np.log2(ratio or fmt.expansion_range) / octaves, MIN_EXPONENT, MAX_EXPONENT)
    return round_to(jnp.where(spans, exponent, 1.0), BF16)


# Fractions of the octaves of normal codes: filled by a new exponent, and the least that the old one must fill.
TARGET_FILL, MIN_FILL = 15 / 16, 7 / 8
# The same for averages that are rounded by decay dither, as fractions of the octaves of `Format.expansion_range`.
DECAYING_MIN_FILL, DECAYING_MAX_FILL = 0.9, 1.05


def exponents_with_hysteresis(largest: Array, smallest: Array, fmt: Format, previous: Array | None) -> Array:
    """The exponents of blocks that are rounded stochastically at every step.

    A new exponent moves all codes of a block, and each value between two codes is then rounded at random. A block
    therefore keeps its exponent while its range fills between `MIN_FILL` and all of the normal codes.

    Args:
        largest, smallest, fmt: as for `exponents`.
        previous: current exponents, bf16; None computes new ones.

    Returns:
        bf16 exponents. A new one makes the range fill `TARGET_FILL` of the octaves, within the bounds of `exponents`.
    """
    new = exponents(largest, smallest, fmt, fmt.normal_range**TARGET_FILL)
    if previous is None:
        return new
    octaves = jnp.log2(largest) - jnp.log2(smallest)
    used_octaves, format_octaves = previous.astype(jnp.float32) * octaves, np.log2(fmt.normal_range)
    return jnp.where((used_octaves >= MIN_FILL * format_octaves) & (used_octaves <= format_octaves), previous, new)


def decaying_exponents_with_hysteresis(largest: Array, smallest: Array, fmt: Format, previous: Array) -> Array:
    """`exponents_with_hysteresis` for averages rounded by decay dither, whose codes include subnormals."""
    octaves = jnp.log2(largest) - jnp.log2(smallest)
    used_octaves, format_octaves = previous.astype(jnp.float32) * octaves, np.log2(fmt.expansion_range)
    fits = (used_octaves >= DECAYING_MIN_FILL * format_octaves) & (used_octaves <= DECAYING_MAX_FILL * format_octaves)
    return jnp.where(fits, previous, exponents(largest, smallest, fmt))


def power(x: Array, unit: ArrayLike, exponent: Array) -> Array:
    """(x / unit)^exponent of fp32 magnitudes, where x / unit may underflow; zeros, NaN and Inf are kept."""
    powered = jnp.exp2(exponent * (jnp.log2(jnp.where(x > 0, x, 1.0)) - jnp.log2(unit)))
    return jnp.where(x > 0, powered, x)


def debias_for_rounding(y: Array, exponent: Array, fmt: Format) -> Array:
    """The value to round stochastically in place of y, so that the decoded value is unbiased.

    Let a and b be the codes around y. They decode in proportion to a^(1 / k) and b^(1 / k). Rounding y itself is
    unbiased for y, but not for y^(1 / k). Let p be the position of y^(1 / k) between the decoded a and b. The result is
    a + p * (b - a).

    Args:
        y: fp32 magnitudes in units of the format.
        exponent: k, fp32, broadcastable against y.
    """
    below, above = fmt.floor_ceil(y)
    low, high = (power(code, jnp.where(y > 0, y, 1.0), 1 / exponent) for code in (below, above))
    debiased = below + (above - below) * ((1 - low) / (high - low))
    return jnp.where((y > 0) & jnp.isfinite(y), debiased, y)
