"""Codes, scales, exponents and powers of two of an array, and its values from these."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fp8jax.core import blocks, derivatives, expansion, formats, noise, packing, scaling
from fp8jax.core.spec import QuantSpec


class QTensorLeaves(NamedTuple):
    """The arrays of a QTensor; None for those that its spec has no use for."""

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
    # The largest magnitudes are rid of subnormals after: XLA on a GPU writes a mask that two passes have in common.
    measured = magnitude if spec.expand else raw
    finite_magnitude = formats.where(jnp.isfinite(measured), measured, 0)
    bad = None
    if fmt.inf is None:
        bad = ~jnp.isfinite(x)
        if not fmt.signed:
            bad |= x <= -formats.TINY  # smaller ones count as zeros
    if scale is None:
        if bad is not None and not spec.expand:
            # The maximum says it, too; a NaN would be lost where devices share a block.
            finite_magnitude = formats.where(~bad, raw, jnp.inf)
        largest = blocks.reduce(finite_magnitude, block_shape, jnp.max, 0.0)
        largest = formats.where(largest >= formats.TINY, largest, 0)
        scale = scaling.to_scale(largest, fmt)
        if spec.granularity == "mx" and spec.outer_scale == "none":
            scale = jnp.ones_like(scale)
    else:
        scale = scaling.clamp_scale(scale)
    scale = jnp.broadcast_to(scale, blocks.counts(x.shape, block_shape))
    if bad is not None and (is_scale_given or spec.expand):
        scale = formats.where(blocks.reduce(bad.astype(jnp.float32), block_shape, jnp.max, 0.0) <= 0, scale, jnp.nan)
    elif bad is not None:
        scale = formats.where(largest < jnp.inf, scale, jnp.nan)
    if spec.scale_format != "fp32":
        scale = jnp.minimum(scale, _max_scale(spec.scale_format, spec.format))
    scale = cast_scale(scale, spec, is_given=is_scale_given)
    # Products with reciprocals throughout: XLA makes them of quotients by constants and scalars in some programs and
    # not in others, and the codes must not depend on that.
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
        if spec.granularity == "mx":
            micro_shape = spec.micro_shape(x.shape)
            largest = blocks.reduce(formats.where(jnp.isfinite(y), y, 0), micro_shape, jnp.max, 0.0)
            microscale = compute_microscales(largest * (1 / scale_fp32), spec, fmt)
            # The power comes first: a quotient by the level 1 scale alone may be subnormal, which devices flush or not.
            power = jnp.ldexp(jnp.float32(1), 127 - microscale.astype(jnp.int32))
            y = y * blocks.broadcast_blocks(power, x.shape, micro_shape)
        if fmt.max >= 4:
            y = y * blocks.broadcast_blocks(1 / scale_fp32, x.shape, block_shape)
        else:
            # Scales are as large as values here, and beyond 2^126 have no normal number as their reciprocal.
            unit = jnp.where(scale_fp32 > 2.0**125, np.float32(2.0**-32), 1.0)
            y = y * blocks.broadcast_blocks(unit, x.shape, block_shape)
            y = y * blocks.broadcast_blocks(1 / (scale_fp32 * unit), x.shape, block_shape)
        if is_scale_given and fmt.inf is not None:
            # In units of a given scale a finite value may lie beyond fp32; it is none of the infinite ones.
            y = jnp.where(jnp.isfinite(magnitude), jnp.minimum(y, fmt.max), y)
    if spec.underflow == "smallest":
        y = jnp.where(magnitude > 0, jnp.maximum(y, fmt.smallest), y)
    if spec.expand and (spec.rounding == "stochastic" or seed is not None):
        y = expansion.debias_for_rounding(y, k, fmt)
    uniform_noise = None
    if seed is not None:
        # Short groups are counted as whole ones, so that kernels can go by group and place in the group.
        row = None if spec.group_size is None else -(-x.shape[-1] // spec.group_size) * spec.group_size
        uniform_noise = noise.uniform(seed, x.shape, row)
    if dither is not None:
        phase, decay = dither
        if uniform_noise is not None:
            phase, uniform_noise = noise.add_phase(phase, uniform_noise), None
        if spec.expand:  # the decay of a power of a value
            decay = expansion.power(decay, 1.0, k)
        dither = jnp.stack(jnp.broadcast_arrays(phase, decay))
    codes = fmt.encode(jnp.copysign(y, x), key, uniform_noise, dither)
    return QTensorLeaves(packing.pack(codes, spec.axis) if spec.is_packed else codes, scale, exponent, microscale)


def limit_group_range(x: Array, spec: QuantSpec, min_exponent: float) -> Array:
    """Values whose groups get exponents of `min_exponent` or more, so that no tiny member takes codes from others.

    Magnitudes below a group's largest / R^(1 / min_exponent), with R the range of the format, become 0, or where the
    spec keeps what is not zero from decoding to it (underflow "smallest"), that bound. Specs without expansion, and
    with the paper's ("coat"), leave all values as they are.

    Args:
        x: array of a floating dtype, to be quantized as `spec` says.
        spec: how.
        min_exponent: the smallest exponent, in (0, 16].
    """
    if spec.expand is not True:
        return x
    shape, min_ratio = spec.block_shape(x.shape), formats.get(spec.format).expansion_range ** (-1 / min_exponent)

    def bound(x: Array) -> tuple[Array]:
        size = jnp.abs(x.astype(jnp.float32))
        largest = blocks.reduce(formats.where(jnp.isfinite(size), size, 0), shape, jnp.max, 0.0)
        min_magnitude = blocks.broadcast_blocks(largest * np.float32(min_ratio), x.shape, shape)
        replacement = min_magnitude if spec.underflow == "smallest" else jnp.zeros_like(min_magnitude)
        return (jnp.where((size > 0) & (size < min_magnitude), jnp.copysign(replacement, x).astype(x.dtype), x),)

    return blocks.on_logical_array(bound, x, out_shapes=[x.shape])[0]


def cast_scale(scale: Array, spec: QuantSpec, *, is_given: bool = False) -> Array:
    """Positive fp32 scales in the dtype that a spec stores them in.

    Those of integers are rounded up, unless they are given: under a scale that was rounded down to bf16 the largest of
    511 codes would saturate by two steps, where all others err by half of one.
    """
    fmt = formats.get(spec.format)
    integers = not fmt.is_float and fmt.codebook is None
    return (formats.round_up if integers and not is_given else formats.round_to)(scale, formats.get(spec.scale_format))


@functools.cache
def _max_scale(scale_format: str, name: str) -> float:
    """The largest number of a format that times the largest code of another is finite in fp32."""
    limit, dtype = formats.FP32.max / formats.get(name).max, formats.get(scale_format).dtype
    bits = np.asarray(limit, dtype).view(np.uint16)  # limits are positive
    largest = (bits - np.uint16(1)).view(dtype) if float(bits.view(dtype)) > limit else bits.view(dtype)
    return float(largest)


def compute_microscales(amax: Array, spec: QuantSpec, fmt: formats.Format) -> Array:
    """E8M0 bytes of groups whose largest magnitudes, in units of the level 1 scale, are given."""
    if spec.outer_scale == "none":
        # OCP Microscaling Formats 1.0, section 6.3: the exponent of the largest element less that of the format.
        exponent = formats.encode_e8m0(amax, "down").astype(jnp.int32) - int(np.log2(fmt.max))
        return jnp.where(amax > 0, jnp.maximum(exponent, 0), 127).astype(jnp.uint8)
    # MOSS, equation 3: the group's own scale over that of level 1, rounded up, so that no code saturates. Zeros have
    # the smallest, so that they leave the largest power of a row to others.
    return formats.encode_e8m0(jnp.maximum(amax * np.float32(1 / fmt.max), formats.TINY), "up")


def decode(leaves: QTensorLeaves, shape: tuple[int, ...], spec: QuantSpec) -> Array:
    fmt = formats.get(spec.format)
    block_shape = spec.block_shape(shape)
    codes = packing.unpack(leaves.codes, spec.axis, shape[spec.axis]) if spec.is_packed else leaves.codes
    values = fmt.decode(codes)
    scale = blocks.broadcast_blocks(leaves.scale.astype(jnp.float32), shape, block_shape)
    if leaves.microscale is not None:
        values = values * blocks.broadcast_blocks(
            formats.decode_e8m0(leaves.microscale), shape, spec.micro_shape(shape)
        )
    if leaves.expansion is None:
        decoded = values * scale
    else:
        root = blocks.broadcast_blocks(1 / leaves.expansion.astype(jnp.float32), shape, block_shape)
        # Half the power on each side of the scale: a compressed group spans more octaves than fp32 has below 1.
        half = expansion.power(jnp.abs(values) * np.float32(1 / fmt.max), 1.0, root / 2)
        decoded = jnp.copysign(half * (scale * fmt.max) * half, values)
    if spec.expand or spec.underflow == "smallest":
        # The rounding of a value close to the smallest normal must not take it where XLA flushes to zero.
        nonzero = jnp.copysign(jnp.maximum(jnp.abs(decoded), formats.TINY), values)
        decoded = jnp.where(values == 0, decoded, nonzero)
    return decoded
