"""Noise for stochastic rounding from random words and each element's position: the reference of the kernels' own.

It depends on nothing but the words and the place in the whole array: no mesh changes it. It needs no array of random
bits.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

# The noise of an array that begins at eighth n of another has n * STRIDE added to its first word.
STRIDE = 0x9E3779B9
PARAM_SEED_STRIDE = 0x85EBCA6B


def counter_noise(
    seed: Array,
    shape: Sequence[int],
    row_length: int | None = None,
    *,
    global_shape: Sequence[int] | None = None,
    offsets: Sequence[ArrayLike] = (),
) -> Array:
    """16 bits of noise for each element of an array, uint32.

    They are half of a multiple of a hash of index // 8, one multiple for each of four pairs, and repeat after 2^35
    elements. The index is the element's place in the flat array whose rows are `row_length` elements long.

    Args:
        seed: two uint32 words.
        shape: of the array.
        row_length: length that rows of the last axis are padded to; None takes their own.
        global_shape: shape of what the array is a part of; None if of nothing larger.
        offsets: where the part begins along each axis.
    """
    padded = tuple(shape) or (1,)
    sizes = padded if global_shape is None else tuple(global_shape)
    starts = [jnp.asarray(start).astype(jnp.uint32) for start in offsets or (0,) * len(padded)]
    places = [jax.lax.broadcasted_iota(jnp.uint32, padded, axis) + start for axis, start in enumerate(starts)]
    length = sizes[-1] if row_length is None else row_length
    index, column = jnp.zeros(padded, jnp.uint32), places[-1]
    for size, place in zip(sizes[:-1], places[:-1], strict=True):
        index = index * _as_uint32(size) + place
    # Eight rows have a multiple of eight elements: no product here needs more than 32 bits to be right modulo 2^32.
    within = (index & 7) * _as_uint32(length) + column
    noise = ((index >> 3) * _as_uint32(length) + (within >> 3)) * np.uint32(STRIDE) + seed[0]
    noise = (noise ^ (noise >> 16)) * np.uint32(0x7FEB352D)
    noise = (noise ^ (noise >> 15) ^ seed[1]) * np.uint32(0x846CA68B)
    noise = noise ^ (noise >> 16)
    noise += noise * np.uint32(0x9708B674) * ((within >> 1) & 3)
    return jnp.where(within & 1 == 0, noise & 0xFFFF, noise >> 16).reshape(shape)


def uniform(seed: Array, shape: Sequence[int], row_length: int | None = None) -> Array:
    """`counter_noise` as fp32 in (0, 1): odd multiples of 2^-17, whose mean is exactly a half."""
    return (counter_noise(seed, shape, row_length).astype(jnp.float32) + 0.5) * np.float32(2**-16)


def step_seed(count: ArrayLike) -> Array:
    """Two words for a step of an optimizer, from its number."""
    x = jnp.asarray(count).astype(jnp.uint32) * np.uint32(STRIDE) + np.asarray([0x243F6A88, 0x85A308D3], np.uint32)
    return _mix_bits(x)


def decay_dither(count: ArrayLike, decay: ArrayLike = 1.0) -> Array:
    """How a moment that decays is rounded at a step: what `Format.encode` takes as `dither`.

    The noise is that of all elements: multiples of the golden ratio modulo 1, which fill the unit interval as evenly as
    can be in however few steps. So rounding is right on average over a moment's own memory, with less of an error than
    noise of each element would leave; and it takes neither places nor a key.

    Args:
        count: number of the step.
        decay: factor by which a value falls that nothing is added to; 1 where it is not known.

    Returns:
        fp32 (2,): noise in (0, 1), and the decay.
    """
    position = (jnp.asarray(count).astype(jnp.uint32) * np.uint32(STRIDE)) >> 16
    noise = (position.astype(jnp.float32) + 0.5) * np.float32(2**-16)
    return jnp.stack([noise, jnp.asarray(decay).astype(jnp.float32)])


def add_phase(dither: Array, phase: Array) -> Array:
    """The sum modulo 1 of odd multiples of 2^-17 in (0, 1), as another one of these.

    With a constant phase for each element, the noise of `decay_dither` is as even in time, and its errors differ
    between elements, so that they average out over an array, too.
    """
    total = dither + phase - np.float32(2**-17)
    return jnp.where(total < 1, total, total - 1)


def key_to_seed(key: Array) -> Array:
    """Two words from a PRNG key of `jax.random`, in some thirty operations.

    Bits of `jax.random` take five times as many, which XLA compiles anew into each pass that reads them.
    """
    data = jax.random.key_data(key).ravel()  # of any kind
    first = jnp.uint32(0)
    for word in data:
        first = _mix_bits(first + word * np.uint32(STRIDE))
    return jnp.stack([first, _mix_bits(data[-1] ^ first * np.uint32(PARAM_SEED_STRIDE))])


def _as_uint32(size: Any) -> ArrayLike:
    """A length as a uint32; of a dimension without a number, as of `jax.export`, the number it will have."""
    return np.uint32(size) if isinstance(size, (int, np.integer)) else jnp.asarray(size).astype(jnp.uint32)


def _mix_bits(x: Array) -> Array:
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def round_stochastic(
    x: Array,
    seed: Array,
    row_length: int | None = None,
    *,
    global_shape: Sequence[int] | None = None,
    offsets: Sequence[ArrayLike] = (),
) -> Array:
    """bf16 from fp32, rounded up or down with probabilities that make the expectation exact; NaN and Inf stay.

    The noise depends on nothing but the words and the element's place in the global shape (`counter_noise`).

    Args:
        x: fp32, any shape.
        seed: two uint32 words, random and new at every step.
        row_length, global_shape, offsets: as of `counter_noise`.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = bits + counter_noise(seed, x.shape, row_length, global_shape=global_shape, offsets=offsets)
    bits = bits & np.uint32(0xFFFF0000)
    return jnp.where(jnp.isnan(x), x, jax.lax.bitcast_convert_type(bits, jnp.float32)).astype(jnp.bfloat16)


def advance_counter(seed: Array, counter_blocks: ArrayLike) -> Array:
    """The words of an array that begins so many eights of elements after another, whose words these are."""
    return seed.at[0].add(jnp.asarray(counter_blocks).astype(jnp.uint32) * np.uint32(STRIDE))


def param_seed(name: str) -> int:
    """A number for a parameter, from its path alone: odd, from 2^30 on and under 2^31."""
    return zlib.crc32(name.encode()) >> 2 | 0x40000001


def fold_in_seed(seed: Array, data: ArrayLike) -> Array:
    """The words of a step for the parameter that has this salt."""
    data_bits = jnp.asarray(data, jnp.uint32)
    return jnp.stack([seed[0] + data_bits, seed[1] ^ (data_bits * np.uint32(PARAM_SEED_STRIDE))])
