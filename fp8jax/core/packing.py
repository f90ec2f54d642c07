"""Codes of 10 and of 4 bits in bytes.

- 10-bit integers, four in five bytes: the packed axis has all low bytes, then the high bits, four per byte.
- 4-bit codes, two in one byte: the code at the even index has the low bits, as in XLA's own 4-bit arrays.
"""

import jax.numpy as jnp
from jax import Array

from fp8jax.core.blocks import expand_to_rank

_BIAS = 512


def packed_length(n: int, bits: int = 10) -> int:
    """Bytes along the packed axis for `n` codes of 10 or 4 bits."""
    return -(-n // 2) if bits == 4 else 5 * -(-n // 4)


def pack(codes: Array, axis: int, bits: int = 10) -> Array:
    """Packs codes along an axis of any length.

    Args:
        codes: int16 array in [-512, 511], packed four in five bytes. With 4 bits: uint8 array, packed two in one byte.
        bits: 10 or 4.

    Returns:
        uint8 array with `packed_length(n, bits)` along `axis`.
    """
    if bits == 4:
        nibbles = jnp.moveaxis(codes, axis, -1)
        nibbles = jnp.pad(nibbles, [(0, 0)] * (nibbles.ndim - 1) + [(0, nibbles.shape[-1] % 2)])
        return jnp.moveaxis(nibbles[..., ::2] | nibbles[..., 1::2] << 4, -1, axis)
    last = jnp.moveaxis(codes, axis, -1).astype(jnp.int32) + _BIAS
    last = jnp.pad(last, [(0, 0)] * (last.ndim - 1) + [(0, -last.shape[-1] % 4)], constant_values=_BIAS)
    fours = last.reshape(*last.shape[:-1], last.shape[-1] // 4, 4)
    high = jnp.sum((fours >> 8) << _shifts(fours.ndim), axis=-1, dtype=jnp.int32)
    packed = jnp.concatenate([last & 0xFF, high], axis=-1).astype(jnp.uint8)
    return jnp.moveaxis(packed, -1, axis)


def unpack(packed: Array, axis: int, length: int, bits: int = 10) -> Array:
    """The codes that `pack` packed.

    Args:
        packed: uint8 array.
        length: logical length of that axis.
        bits: 10 or 4.
    """
    if bits == 4:
        pairs = jnp.moveaxis(packed, axis, -1)[..., None] >> expand_to_rank(
            jnp.asarray([0, 4], jnp.uint8), packed.ndim + 1
        )
        codes = (pairs & 15).reshape(*pairs.shape[:-2], 2 * pairs.shape[-2])
        return jnp.moveaxis(codes[..., :length], -1, axis)
    last = jnp.moveaxis(packed, axis, -1).astype(jnp.int32)
    fours = last.shape[-1] // 5
    low, high = last[..., : 4 * fours], last[..., 4 * fours :]
    high = (high[..., None] >> _shifts(high.ndim + 1)) & 3
    codes = (low | (high.reshape(low.shape) << 8)) - _BIAS
    return jnp.moveaxis(codes[..., :length].astype(jnp.int16), -1, axis)


def _shifts(ndim: int) -> Array:
    """Shifts of four codes' high bits in their byte, along the last of `ndim` axes."""
    return expand_to_rank(jnp.arange(0, 8, 2, dtype=jnp.int32), ndim)
