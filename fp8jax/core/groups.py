"""Groups of consecutive rows, such as the tokens of each expert, and a token axis in which groups are aligned."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core import formats

ALIGNMENT = 128  # of groups in the padded token axis


class Groups(NamedTuple):
    """Groups of consecutive rows. Rows before the first group and after the last one are in no group.

    Attributes:
        starts: int32 (groups,), the first row of each group.
        ends: int32 (groups,), the row after its last one.
    """

    starts: Array
    ends: Array

    @classmethod
    def from_sizes(
        cls, group_sizes: Array, num_rows: int, group_offset: Array | None = None, num_groups: int | None = None
    ) -> "Groups":
        """Groups of these sizes, one after the other.

        Args:
            group_sizes: (all groups,), integers of any dtype, at least 0. Rows beyond `num_rows` are left out.
            group_offset: integer scalar, the first of the returned groups; None for 0.
            num_groups: number of the returned groups; None for all.
        """
        # The sum may overflow a narrow dtype.
        ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), num_rows)
        starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
        if group_offset is None:
            return cls(starts, ends)
        num_groups = group_sizes.shape[0] if num_groups is None else num_groups
        return cls(*(lax.dynamic_slice_in_dim(at, group_offset, num_groups) for at in (starts, ends)))

    @property
    def sizes(self) -> Array:
        return self.ends - self.starts

    def shift(self, offset: Array | int, length: int) -> "Groups":
        """The parts of the groups in rows [offset, offset + length), counted from `offset`."""
        return Groups(*(jnp.clip(at - offset, 0, length) for at in self))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "row_positions", "starts", "lengths", "block_groups"],
    meta_fields=["alignment"],
)
@dataclasses.dataclass(frozen=True)
class PaddedTokens:
    """A token axis in which each group starts at a multiple of an alignment, and is filled up with zeros.

    Blocks of tokens that share a scale then never belong to two groups.

    Attributes:
        rows: int32 (length,), the row at each position; the number of rows for padding.
        row_positions: int32 (rows,), the position of each row; the length for a row in no group.
        starts: int32 (groups,), the first position of each group.
        lengths: int32 (groups,), the padded size of each group, a multiple of the alignment.
        block_groups: int32 (length / alignment,), the group of each aligned block; the number of groups if none.
        alignment: static; a multiple of the lengths of all blocks of tokens that share a scale.
    """

    rows: Array
    row_positions: Array
    starts: Array
    lengths: Array
    block_groups: Array
    alignment: int

    @classmethod
    def from_groups(cls, groups: Groups, num_rows: int, alignment: int = ALIGNMENT) -> "PaddedTokens":
        """The axis of the groups of `num_rows` rows."""
        lengths = -(-groups.sizes // alignment) * alignment
        starts = jnp.cumsum(lengths) - lengths
        num_blocks = -(-(num_rows + (alignment - 1) * min(lengths.shape[0], num_rows)) // alignment)
        length = num_blocks * alignment

        def find(table: Array, group: Array) -> Array:
            return jnp.concatenate([table, jnp.zeros((1,), jnp.int32)])[group]

        first = jnp.arange(num_blocks, dtype=jnp.int32) * alignment
        block_groups = jnp.sum(first[:, None] >= (starts + lengths)[None], axis=1, dtype=jnp.int32)
        block_rows = find(groups.starts - starts, block_groups) + first
        rows = block_rows[:, None] + jnp.arange(alignment, dtype=jnp.int32)[None]
        rows = jnp.where(rows < find(groups.ends, block_groups)[:, None], rows, num_rows).reshape(-1)

        row = jnp.arange(num_rows, dtype=jnp.int32)
        row_groups = jnp.sum(row[:, None] >= groups.ends[None], axis=1, dtype=jnp.int32)
        is_inside = (row >= find(groups.starts, row_groups)) & (row_groups < lengths.shape[0])
        row_positions = jnp.where(is_inside, row + find(starts - groups.starts, row_groups), length)
        return cls(rows, row_positions, starts, lengths, block_groups, alignment)

    @property
    def length(self) -> int:
        return self.rows.shape[0]

    @property
    def num_rows(self) -> int:
        return self.row_positions.shape[0]

    @property
    def num_groups(self) -> int:
        return self.starts.shape[0]

    @property
    def is_in_group(self) -> Array:
        """Whether each row is in a group, bool (rows,)."""
        return self.row_positions < self.length

    def pad(self, x: Array) -> Array:
        """The rows of x (rows, n) at their positions, (length, n), and zeros in between."""
        return take_rows(x, self.rows)

    def reduce_blocks(self, values: Array, size: int) -> Array:
        """The maxima of non-negative values over blocks of `size` padded rows: (rows, n) to (length / size, n)."""
        padded = self.pad(values)
        return jnp.max(padded.reshape(self.length // size, size, padded.shape[1]), axis=1)

    def reduce_groups(self, values: Array) -> Array:
        """The maxima of non-negative values over the aligned blocks of each group: (blocks, n) to (groups, n)."""
        maxima = jnp.zeros((self.num_groups + 1, values.shape[1]), values.dtype)
        return maxima.at[self.block_groups].max(values, indices_are_sorted=True)[:-1]

    def spread_groups(self, values: Array, size: int, fill_value: float = 0) -> Array:
        """The values (groups, n) of each group at its blocks of `size` positions, (length / size, n)."""
        blocks = jnp.take(values, self.block_groups, axis=0, mode="fill", fill_value=fill_value)
        return jnp.repeat(blocks, self.alignment // size, axis=0)

    def take_blocks(self, values: Array, size: int) -> Array:
        """The value of each row's block of `size`, (length / size, n) to (rows, n); 0 for a row in no group."""
        return jnp.take(values, self.row_positions // size, axis=0, mode="fill", fill_value=0)

    def take_groups(self, values: Array) -> Array:
        """The value of each row's group, (groups, n) to (rows, n); 0 for a row in no group."""
        return self.take_blocks(self.spread_groups(values, self.alignment), self.alignment)


def take_rows(x: Array, rows: Array) -> Array:
    """The rows of x (T, n) with these indices, and zeros for an index of T or more."""
    is_fp8 = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1
    # Off GPUs, XLA widens FP8 arrays to gather from them.
    result = formats.bitcast(x, jnp.uint8) if is_fp8 else x
    result = jnp.take(result, rows, axis=0, mode="fill", fill_value=0)
    return formats.bitcast(result, x.dtype) if is_fp8 else result


def block_table(rows: Array, num_rows: int) -> Array:
    """The first row and the number of rows of each block of `ALIGNMENT` positions: int32 (2, blocks)."""
    positions = rows.reshape(-1, ALIGNMENT)
    counts = jnp.sum(positions < num_rows, axis=1, dtype=jnp.int32)
    return jnp.stack([jnp.where(counts > 0, positions[:, 0], 0), counts])
