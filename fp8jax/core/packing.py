"""10-bit codes, four in five bytes: the packed axis has all low bytes, then the high bits, four per byte."""

import jax.numpy as jnp
from jax import Array

from fp8jax.core.blocks import expand_to_rank

_BIAS = 512


def packed_length(n: int) -> int:
    """Bytes along the packed axis for `n` codes."""
    return 5 * -(-n // 4)


def pack(codes: Array, axis: int) -> Array:
    """Packs int16 codes in [-512, 511].

    Args:
        codes: int16 array; the packed axis may have any length.
        axis: the axis along which four codes become five bytes.

    Returns:
        uint8 array with `packed_length(n)` along `axis`.
    """
    last = jnp.moveaxis(codes, axis, -1).astype(jnp.int32) + _BIAS
    last = jnp.pad(last, [(0, 0)] * (last.ndim - 1) + [(0, -last.shape[-1] % 4)], constant_values=_BIAS)
    fours = last.reshape(*last.shape[:-1], last.shape[-1] // 4, 4)
    high = jnp.sum((fours >> 8) << _shifts(fours.ndim), axis=-1, dtype=jnp.int32)
    packed = jnp.concatenate([last & 0xFF, high], axis=-1).astype(jnp.uint8)
    return jnp.moveaxis(packed, -1, axis)


def unpack(packed: Array, axis: int, length: int) -> Array:
    """The int16 codes that `pack` packed.

    Args:
        packed: uint8 array.
        axis: the packed axis.
        length: logical length of that axis.
    """
    last = jnp.moveaxis(packed, axis, -1).astype(jnp.int32)
    fours = last.shape[-1] // 5
    low, high = last[..., : 4 * fours], last[..., 4 * fours :]
    high = (high[..., None] >> _shifts(high.ndim + 1)) & 3
    codes = (low | (high.reshape(low.shape) << 8)) - _BIAS
    return jnp.moveaxis(codes[..., :length].astype(jnp.int16), -1, axis)


def _shifts(ndim: int) -> Array:
    """Shifts of four codes' high bits in their byte, along the last of `ndim` axes."""
    return expand_to_rank(jnp.arange(0, 8, 2, dtype=jnp.int32), ndim)
