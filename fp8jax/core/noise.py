"""Counter-based noise for stochastic rounding: the reference of the kernels' generator.

It is a function of a seed and of the position in the global array. It does not depend on the mesh and needs no array of
random bits.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fp8jax.core import formats

# A shard that starts at element 8 * n of the global array adds n * STRIDE to the first seed word.
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

    Each is one 16-bit half of a multiple of a hash of index // 8, with one multiple per pair of elements. Noise repeats
    after 2^35 elements. The index is the position in the flat array whose rows have `row_length` elements.

    Args:
        seed: two uint32 words.
        row_length: length to which rows of the last axis are padded; None uses their own.
        global_shape: shape of the array that this is a slice of; None if it is not a slice.
        offsets: start of the slice along each axis.
    """
    padded = tuple(shape) or (1,)
    sizes = padded if global_shape is None else tuple(global_shape)
    starts = [jnp.asarray(start).astype(jnp.uint32) for start in offsets or (0,) * len(padded)]
    positions = [jax.lax.broadcasted_iota(jnp.uint32, padded, axis) + start for axis, start in enumerate(starts)]
    length = sizes[-1] if row_length is None else row_length
    index, column = jnp.zeros(padded, jnp.uint32), positions[-1]
    for size, position in zip(sizes[:-1], positions[:-1], strict=True):
        index = index * _as_uint32(size) + position
    # Eight rows have a multiple of eight elements, so 32-bit products are exact modulo 2^32.
    within = (index & 7) * _as_uint32(length) + column
    noise = ((index >> 3) * _as_uint32(length) + (within >> 3)) * np.uint32(STRIDE) + seed[0]
    noise = (noise ^ (noise >> 16)) * np.uint32(0x7FEB352D)
    noise = (noise ^ (noise >> 15) ^ seed[1]) * np.uint32(0x846CA68B)
    noise = noise ^ (noise >> 16)
    noise += noise * np.uint32(0x9708B674) * ((within >> 1) & 3)
    return jnp.where(within & 1 == 0, noise & 0xFFFF, noise >> 16).reshape(shape)


def uniform(seed: Array, shape: Sequence[int], row_length: int | None = None) -> Array:
    """`counter_noise` as fp32 in (0, 1): odd multiples of 2^-17, with mean exactly 1/2."""
    return (counter_noise(seed, shape, row_length).astype(jnp.float32) + 0.5) * np.float32(2**-16)


def step_seed(count: ArrayLike) -> Array:
    """The seed of an optimizer step, two uint32 words, from its number."""
    x = jnp.asarray(count).astype(jnp.uint32) * np.uint32(STRIDE) + np.asarray([0x243F6A88, 0x85A308D3], np.uint32)
    return _mix_bits(x)


def decay_dither(count: ArrayLike, decay: ArrayLike = 1.0) -> Array:
    """The dither for `Format.encode` of a decaying moment at a step.

    All elements share the noise: multiples of the golden ratio modulo 1, which cover (0, 1) evenly in any number of
    steps. The rounding error averages out over the time constant of the moment. Its variance is lower than with
    independent noise per element, and it needs neither a key nor element positions.

    Args:
        decay: factor by which a value shrinks if nothing is added; 1 if unknown.

    Returns:
        fp32 (2,): noise in (0, 1), and the decay.
    """
    position = (jnp.asarray(count).astype(jnp.uint32) * np.uint32(STRIDE)) >> 16
    noise = (position.astype(jnp.float32) + 0.5) * np.float32(2**-16)
    return jnp.stack([noise, jnp.asarray(decay).astype(jnp.float32)])


def add_phase(dither: Array, phase: Array) -> Array:
    """The sum modulo 1 of two odd multiples of 2^-17 in (0, 1), again such a multiple.

    With a constant phase for each element, the noise of `decay_dither` stays even in time, and errors also average out
    over the elements of an array.
    """
    total = dither + phase - np.float32(2**-17)
    return jnp.where(total < 1, total, total - 1)


def key_to_seed(key: Array) -> Array:
    """A seed, two uint32 words, from a key of `jax.random`.

    It needs a fifth of the operations of `jax.random.bits`, which XLA would recompute in each pass that reads them.
    """
    data = jax.random.key_data(key).ravel()  # any key implementation
    first = jnp.uint32(0)
    for word in data:
        first = _mix_bits(first + word * np.uint32(STRIDE))
    return jnp.stack([first, _mix_bits(data[-1] ^ first * np.uint32(PARAM_SEED_STRIDE))])


def _as_uint32(size: Any) -> ArrayLike:
    """A length as uint32; symbolic dimensions (`jax.export`) become arrays."""
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
    """bf16 from fp32, rounded up or down so that the expectation is exact; NaN and Inf are kept.

    The noise depends only on the seed and the position in the global shape (`counter_noise`).

    Args:
        x: fp32, any shape.
        seed: two uint32 words, random and new at every step.
        row_length, global_shape, offsets: as for `counter_noise`.
    """
    bits = formats.bitcast(x, jnp.uint32)
    bits = bits + counter_noise(seed, x.shape, row_length, global_shape=global_shape, offsets=offsets)
    bits = bits & np.uint32(0xFFFF0000)
    return jnp.where(jnp.isnan(x), x, formats.bitcast(bits, jnp.float32)).astype(jnp.bfloat16)


def advance_counter(seed: Array, counter_blocks: ArrayLike) -> Array:
    """The seed of an array that starts 8 * `counter_blocks` elements after the array with this seed."""
    return seed.at[0].add(jnp.asarray(counter_blocks).astype(jnp.uint32) * np.uint32(STRIDE))


def param_seed(name: str) -> int:
    """An odd number in [2^30, 2^31) from a parameter's path."""
    return zlib.crc32(name.encode()) >> 2 | 0x40000001


def fold_in_seed(seed: Array, data: ArrayLike) -> Array:
    """The step's seed for the parameter with this `param_seed`."""
    data_bits = jnp.asarray(data, jnp.uint32)
    return jnp.stack([seed[0] + data_bits, seed[1] ^ (data_bits * np.uint32(PARAM_SEED_STRIDE))])
