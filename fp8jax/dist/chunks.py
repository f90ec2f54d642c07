"""Split and join of codes as equal chunks for devices, with buckets of arrays that are sent together."""

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
    """The chunks of one array of any shape, one per device: (blocks, length) each.

    With per-tensor or per-layer scales, a chunk has a part of every block. With groups it has whole groups. Zeros pad
    the array to a multiple of the devices.
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
        """The array as (devices, elements of a chunk)."""
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
        """The inverse of `split`."""
        if not self.has_whole_groups:
            count, length = self.chunk_shape
            flat = chunks.reshape(self.devices, count, length).swapaxes(0, 1).reshape(count, -1)
            return flat[:, : math.prod(self.shape) // count].reshape(self.shape)
        groups = chunks.reshape(-1, self.chunk_shape[1])[: math.prod(self.block_counts)]
        rows = groups.reshape(-1, self.block_counts[-1] * self.chunk_shape[1])
        return rows[:, : self.shape[-1]].reshape(self.shape)

    def chunk_scales(self, scale: Array, index: Array) -> Array:
        """The scales of chunk `index`, (blocks, 1), from the scales of the array."""
        flat = scale.reshape(-1)
        if self.has_whole_groups:
            flat = jnp.pad(flat, (0, self.devices * self.chunk_shape[0] - flat.size))
            flat = lax.dynamic_slice_in_dim(flat, index * self.chunk_shape[0], self.chunk_shape[0])
        return flat[:, None]

    def join_scales(self, scales: Array) -> Array:
        """The scales of the array, from those of all chunks, (devices, blocks), or from shared ones, (blocks,)."""
        return scales.reshape(-1)[: math.prod(self.block_counts)].reshape(self.block_counts)


def _pad_axis(x: Array, axis: int, length: int) -> Array:
    missing = length - x.shape[axis]
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])


def to_bytes(x: Array) -> Array:
    """Codes or fp32 numbers as bytes; fp32 makes the last axis four times as long.

    All platforms transfer bytes unchanged. XLA on CPUs would convert FP8 to fp16.
    """
    raw = formats.bitcast(x, jnp.uint8)
    return raw if raw.ndim == x.ndim else raw.reshape(*x.shape[:-1], -1)


def to_codes(raw: Array, fmt: formats.Format) -> Array:
    return formats.bitcast(raw, fmt.dtype)


def to_fp32(raw: Array) -> Array:
    """The inverse of `to_bytes` for fp32 numbers."""
    return formats.bitcast(raw.reshape(*raw.shape[:-1], -1, 4), jnp.float32)


def buckets(sizes: Sequence[int], limit: int = 1 << 22) -> list[list[int]]:
    """Indices of arrays that are sent together: large arrays alone, small ones in order up to `limit` elements."""
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
    """Pieces of these sizes along the last axis."""
    return jnp.split(x, np.cumsum(sizes)[:-1], axis=-1) if len(sizes) > 1 else [x]
