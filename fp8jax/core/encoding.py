"""Encoding of an array to codes, scales, exponents and microscales, and decoding from these."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fp8jax.core import blocks, derivatives, expansion, formats, noise, packing, scaling
from fp8jax.core.spec import QuantSpec


class QTensorLeaves(NamedTuple):
    """The arrays of a QTensor; None for those that its spec does not use."""

    codes: Array
    scale: Array
    expansion: Array | None = None
    microscale: Array | None = None


@functools.partial(jax.jit, static_argnames="spec", inline=True)  # traced once for all layers of a shape
def encode(
    x: Array,
    spec: QuantSpec,
    *,
    scale: Array | None = None,
    key: Array | None = None,
    seed: Array | None = None,
    previous: Array | None = None,
    dither: Array | None = None,
) -> QTensorLeaves:
    fmt = formats.get(spec.format)
    block_shape = spec.block_shape(x.shape)
    x = derivatives.error_if_differentiated(derivatives.CAST_TO_CODES_ERROR, x, scale).astype(jnp.float32)
    is_scale_given, raw = scale is not None, jnp.abs(x)
    magnitude = formats.where(~(raw < formats.TINY), raw, 0)
    # Subnormals are removed from the block maxima below: here XLA on a GPU would write the mask that two passes share.
    measured = magnitude if spec.expand else raw
    finite_magnitude = formats.where(jnp.isfinite(measured), measured, 0)
    bad = None
    if fmt.inf is None:
        bad = ~jnp.isfinite(x)
        if not fmt.is_signed:
            bad |= x <= -formats.TINY  # smaller ones count as zeros
    if scale is None:
        if bad is not None and not spec.expand and not spec.has_microscales:
            # Put Inf, not NaN, into the maximum: a NaN would be lost where devices share a block.
            finite_magnitude = formats.where(~bad, raw, jnp.inf)
        largest = blocks.reduce(finite_magnitude, block_shape, jnp.max, 0.0)
        largest = formats.where(largest >= formats.TINY, largest, 0)
        scale = scaling.to_scale(largest, fmt, formats.E4M3.max if spec.microscale_format == "e4m3" else 1.0)
        if spec.outer_granularity == "none":
            scale = jnp.ones_like(scale)
    else:
        scale = scaling.clamp_scale(scale)
    scale = jnp.broadcast_to(scale, blocks.counts(x.shape, block_shape))
    if bad is not None and (is_scale_given or spec.expand):
        scale = formats.where(blocks.reduce(bad.astype(jnp.float32), block_shape, jnp.max, 0.0) <= 0, scale, jnp.nan)
    elif bad is not None and not spec.has_microscales:
        scale = formats.where(largest < jnp.inf, scale, jnp.nan)
    if spec.scale_format != "fp32":
        scale = jnp.minimum(scale, _max_scale(spec.scale_format, spec.format))
    scale = cast_scale(scale, spec, is_given=is_scale_given)
    # Multiply by reciprocals throughout. XLA turns divisions by constants and scalars into such products in some
    # programs only, and the codes must not depend on that.
    scale_fp32 = scale.astype(jnp.float32)
    exponent = microscale = None
    if spec.expand:
        smallest = blocks.reduce(
            formats.where(finite_magnitude > 0, finite_magnitude, jnp.inf), block_shape, jnp.min, jnp.inf
        )
        top = jnp.maximum(largest, formats.TINY * fmt.max)
        if spec.expand == "coat":
            exponent = expansion.exponents(top, smallest, fmt, fmt.max / fmt.smallest)
        elif spec.rounding == "stochastic":
            exponent = expansion.exponents_with_hysteresis(top, smallest, fmt, previous)
        elif previous is not None:
            exponent = expansion.decaying_exponents_with_hysteresis(top, smallest, fmt, previous)
        else:
            exponent = expansion.exponents(top, smallest, fmt)
        k, top = (
            blocks.broadcast_blocks(s, x.shape, block_shape)
            for s in (exponent.astype(jnp.float32), scale_fp32 * fmt.max)
        )
        y = fmt.max * expansion.power(magnitude, top, k)
    else:
        y = magnitude
        if spec.has_microscales:
            micro_shape = spec.micro_shape(x.shape)
            largest = blocks.reduce(formats.where(jnp.isfinite(y), y, 0), micro_shape, jnp.max, 0.0)
            microscale = compute_microscales(largest * (1 / scale_fp32), spec, fmt)
            if bad is not None:
                has_bad = blocks.reduce(bad.astype(jnp.float32), micro_shape, jnp.max, 0.0) > 0
                nan = np.uint8(0xFF if spec.microscale_format == "e8m0" else 0x7F)
                microscale = jnp.where(has_bad, nan, microscale)
        if microscale is not None and spec.microscale_format == "e8m0":
            # Apply the power first: y / outer scale alone may be subnormal, which only some devices flush.
            power = jnp.ldexp(jnp.float32(1), 127 - microscale.astype(jnp.int32))
            y = y * blocks.broadcast_blocks(power, x.shape, micro_shape)
        if fmt.max >= 4:
            y = y * blocks.broadcast_blocks(1 / scale_fp32, x.shape, block_shape)
        else:
            # Scales are as large as the values here. Above 2^126 their reciprocals are subnormal.
            unit = jnp.where(scale_fp32 > 2.0**125, np.float32(2.0**-32), 1.0)
            y = y * blocks.broadcast_blocks(unit, x.shape, block_shape)
            y = y * blocks.broadcast_blocks(1 / (scale_fp32 * unit), x.shape, block_shape)
        if microscale is not None and spec.microscale_format == "e4m3":
            factor = decode_microscales(microscale, spec)
            # A group far below the tensor has scale 0, and codes 0.
            factor = jnp.where(factor > 0, 1 / factor, 0)
            y = y * blocks.broadcast_blocks(factor, x.shape, micro_shape)
        if is_scale_given and fmt.inf is not None:
            # In units of a given scale a finite value may exceed fp32. It saturates; only Inf stays Inf.
            y = jnp.where(jnp.isfinite(magnitude), jnp.minimum(y, fmt.max), y)
    if not spec.flush_to_zero:
        y = jnp.where(magnitude > 0, jnp.maximum(y, fmt.smallest), y)
    if spec.expand and (spec.rounding == "stochastic" or seed is not None):
        y = expansion.debias_for_rounding(y, k, fmt)
    uniform_noise = None
    if seed is not None:
        # Noise counts short groups as full ones, so that kernels can index by group and position in it.
        row = None if spec.group_size is None else -(-x.shape[-1] // spec.group_size) * spec.group_size
        uniform_noise = noise.uniform(seed, x.shape, row)
    if dither is not None:
        phase, decay = dither
        if uniform_noise is not None:
            phase, uniform_noise = noise.add_phase(phase, uniform_noise), None
        if spec.expand:  # the decay of a power of a value
            decay = expansion.power(decay, 1.0, k)
        dither = jnp.stack(jnp.broadcast_arrays(phase, decay))
    codes = fmt.encode(formats.copysign(y, x), key, uniform_noise, dither)
    return QTensorLeaves(
        packing.pack(codes, spec.axis, fmt.bits) if spec.is_packed else codes, scale, exponent, microscale
    )


def limit_group_range(x: Array, spec: QuantSpec, min_exponent: float) -> Array:
    """Values clamped so that the exponents of their groups are at least `min_exponent`.

    Otherwise one tiny member makes a group's exponent small and all its codes coarse. Magnitudes below amax / R^(1 /
    min_exponent), with R the range of the format, become 0, or that threshold without `flush_to_zero`. Specs without
    expansion, and with the paper's ("coat"), return the values unchanged.

    Args:
        x: array of a floating dtype, to be quantized by `spec`.
        spec: the `QuantSpec`.
        min_exponent: smallest exponent, in (0, 16].
    """
    if spec.expand is not True:
        return x
    shape, min_ratio = spec.block_shape(x.shape), formats.get(spec.format).expansion_range ** (-1 / min_exponent)

    def bound(x: Array) -> tuple[Array]:
        size = jnp.abs(x.astype(jnp.float32))
        largest = blocks.reduce(formats.where(jnp.isfinite(size), size, 0), shape, jnp.max, 0.0)
        min_magnitude = blocks.broadcast_blocks(largest * np.float32(min_ratio), x.shape, shape)
        replacement = jnp.zeros_like(min_magnitude) if spec.flush_to_zero else min_magnitude
        return (jnp.where((size > 0) & (size < min_magnitude), formats.copysign(replacement, x).astype(x.dtype), x),)

    return blocks.on_logical_array(bound, x, out_shapes=[x.shape])[0]


def cast_scale(scale: Array, spec: QuantSpec, *, is_given: bool = False) -> Array:
    """Positive fp32 scales, cast to the scale dtype of a spec.

    Scales of integer formats are rounded up unless they are given. Rounded down to bf16, the largest of 511 codes would
    saturate by two steps.
    """
    fmt = formats.get(spec.format)
    integers = not fmt.is_float and fmt.codebook is None
    return (formats.round_up if integers and not is_given else formats.round_to)(scale, formats.get(spec.scale_format))


@functools.cache
def _max_scale(scale_format: str, name: str) -> float:
    """The largest number of a scale format whose product with the largest code is finite in fp32."""
    limit, dtype = formats.FP32.max / formats.get(name).max, formats.get(scale_format).dtype
    bits = np.asarray(limit, dtype).view(np.uint16)  # limits are positive
    largest = (bits - np.uint16(1)).view(dtype) if float(bits.view(dtype)) > limit else bits.view(dtype)
    return float(largest)


def compute_microscales(amax: Array, spec: QuantSpec, fmt: formats.Format) -> Array:
    """Bytes of the scales of groups from their amax in units of the outer scale."""
    if spec.microscale_format == "e4m3":
        # arXiv 2509.25149, appendix B, rounded to nearest: the largest codes of a group may saturate by 1/16.
        return formats.bitcast(formats.E4M3.encode(amax * np.float32(1 / fmt.max)), jnp.uint8)
    if spec.outer_scale == "none" and spec.exponent_rounding == "down":
        # OCP Microscaling Formats 1.0, section 6.3: the exponent of the largest element minus that of the format.
        exponent = formats.encode_e8m0(amax, "down").astype(jnp.int32) - int(np.log2(fmt.max))
        return jnp.where(amax > 0, jnp.maximum(exponent, 0), 127).astype(jnp.uint8)
    # MOSS, equation 3, and arXiv 2506.08027, section 3: the group's own scale, over the outer scale if there is one.
    # It is rounded up, so that no code saturates. Groups of zeros get the smallest power: another group then has the
    # largest of the row.
    return formats.encode_e8m0(jnp.maximum(amax * np.float32(1 / fmt.max), formats.TINY), "up")


def decode_microscales(microscale: Array, spec: QuantSpec) -> Array:
    """The fp32 values of the bytes of microscales."""
    if spec.microscale_format == "e8m0":
        return formats.decode_e8m0(microscale)
    return formats.decode_fp8(formats.bitcast(microscale, jnp.float8_e4m3fn))


def decode(leaves: QTensorLeaves, shape: tuple[int, ...], spec: QuantSpec) -> Array:
    fmt = formats.get(spec.format)
    block_shape = spec.block_shape(shape)
    codes = packing.unpack(leaves.codes, spec.axis, shape[spec.axis], fmt.bits) if spec.is_packed else leaves.codes
    values = fmt.decode(codes)
    scale = blocks.broadcast_blocks(leaves.scale.astype(jnp.float32), shape, block_shape)
    if leaves.microscale is not None:
        values = values * blocks.broadcast_blocks(
            decode_microscales(leaves.microscale, spec), shape, spec.micro_shape(shape)
        )
    if leaves.expansion is None:
        decoded = values * scale
    else:
        root = blocks.broadcast_blocks(1 / leaves.expansion.astype(jnp.float32), shape, block_shape)
        # Apply half the power on each side of the scale: a compressed group spans more octaves than fp32 has below 1.
        half = expansion.power(jnp.abs(values) * np.float32(1 / fmt.max), 1.0, root / 2)
        decoded = formats.copysign(half * (scale * fmt.max) * half, values)
    if spec.expand or not spec.flush_to_zero:
        # Rounding must not move a value near the smallest normal into the range that XLA flushes to zero.
        nonzero = formats.copysign(jnp.maximum(jnp.abs(decoded), formats.TINY), values)
        decoded = jnp.where(values == 0, decoded, nonzero)
    return decoded
