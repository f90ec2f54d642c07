"""How codes are cut into equal chunks for devices, in which order they are sent, and how they are joined again."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8jax.core import blocks, formats
from fp8jax.core.spec import QuantSpec


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of one array for a number of devices: (blocks, length) each, for any shape.

    Of a tensor with one scale, or one for each stacked layer, a chunk has a part of every block; of groups it has whole
    ones. Zeros fill up what the devices do not divide.
    """

    shape: tuple[int, ...]
    spec: QuantSpec
    devices: int

    @property
    def has_whole_groups(self) -> bool:
        return self.spec.granularity == "group"

    @functools.cached_property
    def block_counts(self) -> tuple[int, ...]:
        """Blocks along each dimension of the array: the shape of its scales."""
        return blocks.counts(self.shape, self.spec.block_shape(self.shape))

    @functools.cached_property
    def chunk_shape(self) -> tuple[int, int]:
        """Shape of a chunk."""
        count = math.prod(self.block_counts)
        if self.has_whole_groups:
            assert self.spec.group_size is not None
            return -(-count // self.devices), self.spec.group_size
        return count, -(-math.prod(self.shape) // (count * self.devices))

    @property
    def chunk_size(self) -> int:
        return math.prod(self.chunk_shape)

    def split(self, codes: Array) -> Array:
        """An array of this shape as (devices, elements of a chunk)."""
        if not self.has_whole_groups:
            count, length = self.chunk_shape
            flat = codes.reshape(count, -1)
            flat = _pad_axis(flat, 1, self.devices * length).reshape(count, self.devices, length)
            return flat.swapaxes(0, 1).reshape(self.devices, -1)
        rows = _pad_axis(codes.reshape(-1, self.shape[-1]), 1, self.block_counts[-1] * self.chunk_shape[1])
        return _pad_axis(rows.reshape(-1, self.chunk_shape[1]), 0, self.devices * self.chunk_shape[0]).reshape(
            self.devices, -1
        )

    def join(self, chunks: Array) -> Array:
        """The inverse of `cut`."""
        if not self.has_whole_groups:
            count, length = self.chunk_shape
            flat = chunks.reshape(self.devices, count, length).swapaxes(0, 1).reshape(count, -1)
            return flat[:, : math.prod(self.shape) // count].reshape(self.shape)
        groups = chunks.reshape(-1, self.chunk_shape[1])[: math.prod(self.block_counts)]
        rows = groups.reshape(-1, self.block_counts[-1] * self.chunk_shape[1])
        return rows[:, : self.shape[-1]].reshape(self.shape)

    def chunk_scales(self, scale: Array, index: Array) -> Array:
        """The scales of one device's chunk, (blocks, 1), of those of the array."""
        flat = scale.reshape(-1)
        if self.has_whole_groups:
            flat = jnp.pad(flat, (0, self.devices * self.chunk_shape[0] - flat.size))
            flat = lax.dynamic_slice_in_dim(flat, index * self.chunk_shape[0], self.chunk_shape[0])
        return flat[:, None]

    def join_scales(self, scales: Array) -> Array:
        """The scales of the array of those of all chunks, (devices, blocks), or of those that all share, (blocks,)."""
        return scales.reshape(-1)[: math.prod(self.block_counts)].reshape(self.block_counts)


def _pad_axis(x: Array, axis: int, length: int) -> Array:
    missing = length - x.shape[axis]
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])


def to_bytes(x: Array) -> Array:
    """Codes or fp32 numbers as bytes, the last axis four times as long for these.

    Bytes travel as they are on every platform; XLA on CPUs would make fp16 of FP8.
    """
    raw = lax.bitcast_convert_type(x, jnp.uint8)
    return raw if raw.ndim == x.ndim else raw.reshape(*x.shape[:-1], -1)


def to_codes(raw: Array, fmt: formats.Format) -> Array:
    return lax.bitcast_convert_type(raw, fmt.dtype)


def to_fp32(raw: Array) -> Array:
    """The inverse of `to_bytes` of fp32 numbers."""
    return lax.bitcast_convert_type(raw.reshape(*raw.shape[:-1], -1, 4), jnp.float32)


def buckets(sizes: Sequence[int], limit: int = 1 << 22) -> list[list[int]]:
    """Numbers of arrays that travel together: large ones alone, small ones in the order they come in."""
    groups: list[list[int]] = []
    filled = limit
    for i, size in enumerate(sizes):
        if filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += size
    return groups


def split(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Parts of these sizes along the last axis."""
    return jnp.split(x, np.cumsum(sizes)[:-1], axis=-1) if len(sizes) > 1 else [x]
