"""Device code of FP8-LM's AdamW: values under a scale, and master weights with working copies.

Hardware: Ada or newer. Reference: fp8jax/ops/optimizers/fp8lm.py.
"""

import numpy as np
import triton
import triton.language as tl

from pallas_kernels.quantization import codec_triton as codec

_TINY = tl.constexpr(float(np.finfo(np.float32).tiny))
_INF = tl.constexpr(float("inf"))
_FP16_NORMAL, _FP16_MANTISSA = tl.constexpr(2.0**-14), tl.constexpr(10)


@triton.jit
def scaled_magnitudes(x: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """Return magnitudes in units of a scale."""
    magnitude = tl.abs(x)
    return tl.where(magnitude < _TINY, 0.0, magnitude) * inverse


@triton.jit
def to_code_units(x: tl.tensor, inverse: tl.tensor, MAX: tl.constexpr, SMALLEST: tl.constexpr) -> tl.tensor:
    """Return magnitudes in units of a scale, finite ones limited to the largest code; Inf and NaN stay."""
    magnitude = tl.abs(x)
    y = scaled_magnitudes(x, inverse)
    y = tl.where((y > MAX) & (magnitude < _INF), MAX, y)
    if SMALLEST > 0:
        y = tl.where((magnitude >= _TINY) & (y < SMALLEST), SMALLEST, y)
    return y


@triton.jit
def copy_sign(y: tl.tensor, x: tl.tensor) -> tl.tensor:
    """Return y, which is not negative, with the sign of x."""
    return codec.from_bits(codec.float_bits(y) | (codec.float_bits(x) & -0x80000000))


@triton.jit
def round_fp16_stochastically(y: tl.tensor, noise: tl.tensor) -> tl.tensor:
    """Return values in units of fp16, rounded up or down by noise; see `Format.encode`. Inf and NaN stay."""
    magnitude = tl.abs(y)
    step = codec.float_bits(tl.where(magnitude > _FP16_NORMAL, magnitude, _FP16_NORMAL)) & 0x7F800000
    # `step` becomes the bits of the spacing of fp16, a power of two.
    step = step - (_FP16_MANTISSA << 23)
    uniform = (noise.to(tl.float32) + 0.5) * 0.0000152587890625
    scaled = y * codec.from_bits((254 << 23) - step)
    floor_ = tl.floor(scaled)
    rounded = (floor_ + tl.where(scaled - floor_ + uniform >= 1.0, 1.0, 0.0)) * codec.from_bits(step)
    return tl.where(magnitude < _INF, rounded, y)


@triton.jit
def reconcile_master(
    master: tl.tensor, weight: tl.tensor, MAX_ROUNDING: tl.constexpr, MIN_BINADE: tl.constexpr
) -> tl.tensor:
    """Return a master weight, or its working copy if that is not a rounding of it: the caller has changed it."""
    binade = codec.from_bits(codec.float_bits(master) & 0x7F800000)
    binade = tl.where(binade > MIN_BINADE, binade, MIN_BINADE)
    return tl.where(tl.abs(weight - master) <= binade * MAX_ROUNDING, master, weight)


@triton.jit
def store_amax(amax_ptr: tl.tensor, y: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    """Store and return the largest finite magnitude."""
    is_counted = y < _INF
    if MASKED:
        is_counted = is_counted & mask
    amax = tl.max(tl.where(is_counted, y, 0.0), axis=0)
    tl.store(amax_ptr, amax)
    return amax
