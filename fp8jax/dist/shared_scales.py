"""Scales that all devices share, and sums of codes under them."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core import blocks, formats, scaling
from fp8jax.core.spec import QuantSpec
from fp8jax.dist.chunks import split, to_bytes, to_codes


def shared_scales(arrays: Sequence[Array], specs: Sequence[QuantSpec], axes: tuple[str, ...]) -> list[Array]:
    """The shared scales of arrays of one shape on each device (FP8-LM, equation 4).

    Our scales divide, so the paper's minimum is a maximum here. A NaN or Inf on any device makes the block's scale NaN.
    """
    local_amax = [
        blocks.reduce(abs_with_nan_as_inf(x), spec.block_shape(x.shape), jnp.max, 0.0)
        for x, spec in zip(arrays, specs, strict=True)
    ]
    global_amax = pmax_arrays(local_amax, axes)
    return [to_scale(x, formats.get(spec.format)) for x, spec in zip(global_amax, specs, strict=True)]


def abs_with_nan_as_inf(x: Array) -> Array:
    """|x| in fp32, with Inf for NaN, which NCCL's maxima ignore."""
    absolute = jnp.abs(x.astype(jnp.float32))
    return jnp.where(jnp.isnan(absolute), jnp.inf, absolute)


def pmax_arrays(arrays: Sequence[Array], axes: tuple[str, ...]) -> list[Array]:
    """The maximum of each array over devices, in one collective."""
    flat = jnp.concatenate([x.reshape(-1) for x in arrays])
    reduced = split(lax.pmax(flat, axes), [x.size for x in arrays])
    return [part.reshape(x.shape) for part, x in zip(reduced, arrays, strict=True)]


def to_scale(amax: Array, fmt: formats.Format) -> Array:
    """The scales that map each amax to the largest code; NaN if it is infinite."""
    return jnp.where(jnp.isinf(amax), jnp.nan, scaling.to_scale(amax, fmt))


def encode(x: Array, spec: QuantSpec, scale: Array) -> Array:
    """The codes of an array under scales of its blocks; NaN (0 in formats without NaN) if a scale is NaN."""
    reciprocal = blocks.broadcast_blocks(1 / scale, x.shape, spec.block_shape(x.shape))
    return formats.get(spec.format).encode(x.astype(jnp.float32) * reciprocal)


def reduce_scatter_codes(
    x: Array, spec: QuantSpec, scale: Array, axes: tuple[str, ...], dim: int, factor: float = 1.0
) -> Array:
    """A device's shard, along a dimension, of the sum of all devices' arrays times a factor, fp32.

    Codes are sent to the shard's device, and summed there.

    Args:
        x: array of one shape on each device; the devices divide the dimension and its blocks.
        spec: `QuantSpec` of `x` on the wire.
        scale: scales of its blocks, the same on all devices.
        axes: the mesh axes.
        dim: the dimension that is scattered.
        factor: a constant.
    """
    fmt, devices = formats.get(spec.format), lax.axis_size(axes)
    codes = encode(x, spec, scale)
    shape = (*x.shape[:dim], devices, x.shape[dim] // devices, *x.shape[dim + 1 :])
    operand = jnp.moveaxis(to_bytes(codes).reshape(shape), dim, 0)
    total = sum_codes(to_codes(lax.all_to_all(operand, axes, 0, 0, tiled=True), fmt), fmt)
    return total * (
        blocks.broadcast_blocks(shard_scales(scale, axes, dim), total.shape, spec.block_shape(total.shape)) * factor
    )


def shard_scales(scale: Array, axes: tuple[str, ...], dim: int) -> Array:
    """The scales of a device's shard along a dimension."""
    if scale.shape[dim] == 1:
        return scale
    length = scale.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(scale, lax.axis_index(axes) * length, length, dim)


def sum_codes(codes: Array, fmt: formats.Format) -> Array:
    """The sum of codes along the first axis in units of the format, fp32.

    It is exact and then rounded to fp32 once, so the order does not matter. Sums of e5m2, and of more than 9,000 e4m3
    codes, are rounded at each addition.
    """
    if not fmt.is_float:
        return jnp.sum(codes, axis=0, dtype=jnp.int32).astype(jnp.float32)
    values, steps = fmt.decode(codes), codes.shape[0] * fmt.max / fmt.smallest
    if not 2**24 < steps < 2**31:
        return jnp.sum(values, axis=0)
    total = jnp.sum((values * (1 / fmt.smallest)).astype(jnp.int32), axis=0).astype(jnp.float32)
    return jnp.where(jnp.any(jnp.isnan(values), axis=0), jnp.nan, total * fmt.smallest)
