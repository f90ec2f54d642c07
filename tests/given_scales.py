"""Matrices whose quotients by given scales are exact codes or beyond the format's range, many beyond fp32's."""

import ml_dtypes
import numpy as np

from fp8jax.core import formats

TINY = float(np.finfo(np.float32).tiny)
# Powers of two, so that codes times them are exact; among them subnormal ones, which count as the smallest normal one.
SCALES = (2.0**-126, 2.0**-149, 1.0, 2.0**-120, 2.0**-127, 2.0**-100, 2.0**100)
HUGE = (3.4e38, 1e38, 1e30, 1e4, 64.0)


def values(fmt: formats.Format) -> np.ndarray:
    """Returns the decoded values of a format's codes, in float64."""
    if fmt.codebook is not None:
        return np.asarray(fmt.codebook)
    if not fmt.is_float:
        return np.arange(-fmt.max, fmt.max + 1)
    dtype = ml_dtypes.float4_e2m1fn if fmt is formats.E2M1 else fmt.dtype
    every = np.arange(2**fmt.bits, dtype=f"u{max(fmt.bits // 8, 1)}").view(dtype).astype(np.float64)
    return every[np.isfinite(every)]


def spread(scale: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    """Returns the scale of each element."""
    rows, columns = (np.minimum(np.arange(n) // b, s - 1) for n, b, s in zip(shape, block, scale.shape, strict=True))
    return scale[rows[:, None], columns[None, :]]


def matrix(
    fmt: formats.Format,
    shape: tuple[int, int],
    block: tuple[int, int],
    dtype: str = "float32",
    *,
    first: int = 0,
    bad: bool = True,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A matrix, fp32 scales of its blocks, and what the codes have to stand for in units of the format, in float64.

    The first block's scale is SCALES[first]. With `bad` some values are Inf or NaN. A finite value beyond the range has
    the largest code, an infinite one the format's Inf, or NaN.
    """
    random = np.random.default_rng(0)
    count = [-(-n // b) for n, b in zip(shape, block, strict=True)]
    scale = np.resize(np.roll(np.float32(SCALES), -first), count)
    unit = spread(np.maximum(scale.astype(np.float64), TINY), shape, block)
    x = random.choice(values(fmt), shape) * unit
    sign = np.where(random.random(shape) < 0.5, -1.0, 1.0) if fmt.is_signed else 1.0
    x = np.where(random.random(shape) < 0.4, random.choice(HUGE, shape) * sign, x)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    with np.errstate(over="ignore"):
        stored = x.astype(kind).astype(np.float64)
    exact = np.isin(stored / unit, values(fmt)) | (np.abs(stored / unit) >= fmt.max)
    x = np.where(np.isfinite(stored) & (np.abs(stored) >= TINY) & exact, stored, -0.0 * sign)
    assert np.mean(np.abs(x / unit) > float(np.finfo(np.float32).max)) > 0.02  # beyond fp32
    expected = np.clip(x / unit, values(fmt).min(), fmt.max)  # the book of de8 has no -1
    assert len(np.unique(expected)) > 1
    if bad:
        for i, value in enumerate([np.nan, np.inf, -np.inf]):
            here = random.random(shape) < 0.03
            here[i, i] = True
            x, expected = np.where(here, value, x), np.where(here, _shown(value, fmt), expected)
    return x.astype(kind), scale, expected


def _shown(value: float, fmt: formats.Format) -> float:
    assert fmt.inf is not None
    return float(np.copysign(fmt.inf, value)) if np.isinf(value) else value
