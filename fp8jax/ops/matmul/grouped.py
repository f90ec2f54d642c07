"""Products of groups of rows with one matrix per group, as of the tokens of each expert with its weight.

Rows in no group may hold anything. Neither product reads them, and their results are 0.

The form by XLA loops over tiles of rows. A tile belongs to one group, so that a matrix is read for its own rows alone.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core.qtensor import QTensor
from fp8jax.ops.dispatch.choice import Choice, cast_varying_like, check_impl, on_cuda, product_name_scope, record_choice
from fp8jax.ops.dispatch.partition import run_partitioned
from fp8jax.ops.dispatch.shard_notation import DimSharding, notation
from fp8jax.ops.matmul.matmul import Operand, dot_in_16_bits, reference_matmul

ALIGNMENT = 128  # of groups in the padded token axis
IMPLS = ("auto", "xla")


class Groups(NamedTuple):
    """Groups of consecutive rows.

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
        """Return groups of these sizes, one after the other.

        Args:
            group_sizes: (all groups,), integers of any dtype, at least 0. Rows beyond `num_rows` are left out.
            num_rows: number of rows.
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

    def row_groups(self, num_rows: int) -> Array:
        """Return the group of each row, int32 (num_rows,); the number of groups for a row in none."""
        rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
        groups = jnp.sum(rows >= self.ends[None], axis=1, dtype=jnp.int32)
        is_before = jnp.all(rows < self.starts[None], axis=1)
        return jnp.where(is_before, self.starts.shape[0], groups)

    def shift(self, offset: Array | int, length: int) -> "Groups":
        """Return the parts of the groups in rows [offset, offset + length), counted from `offset`."""
        return Groups(*(jnp.clip(at - offset, 0, length) for at in self))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "starts", "lengths", "block_groups"],
    meta_fields=["num_rows", "alignment"],
)
@dataclasses.dataclass(frozen=True)
class PaddedTokens:
    """A token axis in which each group starts at a multiple of an alignment, and is filled up with zeros.

    Blocks of tokens that share a scale then never belong to two groups.

    Attributes:
        rows: int32 (length,), the row at each place; `num_rows` for a place that is filled up.
        starts: int32 (groups,), the first place of each group.
        lengths: int32 (groups,), the number of places of each group, a multiple of the alignment.
        block_groups: int32 (length / alignment,), the group of each aligned block; the number of groups if none.
        num_rows: static, number of rows.
        alignment: static.
    """

    rows: Array
    starts: Array
    lengths: Array
    block_groups: Array
    num_rows: int
    alignment: int

    @classmethod
    def from_groups(cls, groups: Groups, num_rows: int, alignment: int = ALIGNMENT) -> "PaddedTokens":
        """Return the axis of the groups of `num_rows` rows."""
        lengths = -(-groups.sizes // alignment) * alignment
        starts = jnp.cumsum(lengths) - lengths
        count = -(-(num_rows + (alignment - 1) * min(lengths.shape[0], num_rows)) // alignment)
        places = (jnp.arange(count, dtype=jnp.int32) * alignment)[:, None]
        group = jnp.sum(places >= (starts + lengths)[None], axis=1, dtype=jnp.int32)

        def find(values: Array) -> Array:
            return jnp.concatenate([values, jnp.zeros((1,), jnp.int32)])[group][:, None]

        rows = find(groups.starts - starts) + places + jnp.arange(alignment, dtype=jnp.int32)[None]
        rows = jnp.where(rows < find(groups.ends), rows, num_rows)
        return cls(rows.reshape(-1), starts, lengths, group, num_rows, alignment)

    @property
    def length(self) -> int:
        return self.rows.shape[0]

    def pad(self, x: Array) -> Array:
        """Return the rows of x (num_rows, n) at their places, (length, n), and zeros in between."""
        return jnp.take(x, self.rows, axis=0, mode="fill", fill_value=0)


def grouped_matmul(
    x: Operand, w: Operand, groups: Groups, *, dtype: DTypeLike = jnp.float32, fast: bool = True, impl: str = "auto"
) -> Array:
    """Return the product of each group's rows with the transpose of its matrix: x[rows of g] @ w[g].T.

    Codes are multiplied as by `fp8jax.ops.matmul.matmul.matmul`. It has no derivative.

    Args:
        x: (T, K), the rows of each group consecutive; an array, or a QTensor with scales per row or group of a row.
        w: (G, N, K); an array, or a QTensor of a matrix mapped by `jax.vmap`, with scales of its own for each matrix.
        groups: the rows of each of the G groups.
        dtype: dtype of the result.
        fast: whether to use fast accumulation, if the GPU has it.
        impl: "auto" or "xla".

    Returns:
        (T, N); zeros in rows of no group.

    Raises:
        ValueError: shapes do not match, or `impl` is unknown.
    """
    check_impl(impl, IMPLS)
    if len(x.shape) != 2 or len(w.shape) != 3 or x.shape[1] != w.shape[2] or groups.ends.shape != w.shape[:1]:
        shapes = f"{x.shape}, {w.shape} and {groups.ends.shape[0]} groups"
        raise ValueError(f"grouped_matmul takes (T, K), (G, N, K) and G groups, not {shapes}")
    record_choice("grouped matmul", Choice("xla", "a loop over tiles of rows"))
    function = functools.partial(_multiply_shard, _loop_over_tiles, fast, jnp.dtype(dtype))
    static = "xla", fast, str(jnp.dtype(dtype)), *map(_spec, (x, w))
    ins = _notation(x, "t k"), _notation(w, "n k", "- "), "-", "-"
    with product_name_scope(x, w):
        result: Array = run_partitioned(
            "grouped_product", static, function, (x, w, *groups), ins, "t n", sum_dim="k", is_kernel=False
        )
    return result


def grouped_matmul_dw(
    a: Operand,
    b: Operand,
    tokens: PaddedTokens,
    *,
    scale: Array | None = None,
    row_scale: Array | None = None,
    column_scale: Array | None = None,
    dtype: DTypeLike = jnp.float32,
    fast: bool = True,
    impl: str = "auto",
) -> Array:
    """Return each group's product over its tokens: a[:, tokens of g] @ b[:, tokens of g].T. It has no derivative.

    Args:
        a: (M, tokens.length); an array, codes whose scales are given, or a QTensor with scales per block of tokens.
        b: (N, tokens.length), likewise.
        tokens: the padded axis.
        scale: fp32 (G,), multiplied to the result; or None.
        row_scale: fp32 (G, M), multiplied to its rows; or None.
        column_scale: fp32 (G, N), multiplied to its columns; or None.
        dtype, fast, impl: as in `grouped_matmul`.

    Returns:
        (G, M, N); zeros for groups without tokens.

    Raises:
        ValueError: shapes do not match, or `impl` is unknown.
    """
    check_impl(impl, IMPLS)
    if len(a.shape) != 2 or len(b.shape) != 2 or not a.shape[1] == b.shape[1] == tokens.length:
        shapes = f"{a.shape} and {b.shape}"
        raise ValueError(f"grouped_matmul_dw takes (M, length) and (N, length) of {tokens.length} places, not {shapes}")
    record_choice("grouped matmul of tokens", Choice("xla", "a loop over blocks of tokens"))
    function = functools.partial(_multiply_shard_dw, _loop_over_blocks, tokens.alignment, fast, jnp.dtype(dtype))
    static = "xla", tokens.alignment, fast, str(jnp.dtype(dtype)), *map(_spec, (a, b))
    operands = a, b, tokens.starts, tokens.lengths, scale, row_scale, column_scale
    ins = _notation(a, "m t"), _notation(b, "n t"), "-", "-", "-", "- m", "- n"
    with product_name_scope(a, b):
        result: Array = run_partitioned(
            "grouped_product_dw", static, function, operands, ins, "- m n",
            units={"t": tokens.alignment}, sum_dim="t", is_kernel=False,
        )  # fmt: skip
    return result


def _spec(x: Operand) -> str:
    return str(x.spec) if isinstance(x, QTensor) else str(x.dtype)


def _notation(x: Operand, names: str, prefix: str = "") -> str | tuple[str, ...]:
    """Return the notation of an operand, whose leading axes are `prefix`."""
    if not isinstance(x, QTensor):
        return prefix + names
    return tuple(prefix + text for text in notation(x.spec, x.shape[-2:], names))


def _multiply_shard(
    multiply: Callable[..., Array], fast: bool, dtype: Any, sharding: DimSharding, x: Any, w: Any, *bounds: Array
) -> Array:
    """Return the product of a device's rows with its part of the matrices."""
    rows = x.shape[0]
    groups = Groups(*bounds).shift(sharding.shard_offset("t", rows), rows)
    sum_dtype = _sum_dtype(x, w, dtype) if "k" in sharding.axes else dtype
    y = multiply(fast, sum_dtype, x, w, *groups)
    return sharding.psum(y, "k", "t n").astype(dtype)


def _multiply_shard_dw(
    multiply: Callable[..., Array],
    alignment: int,
    fast: bool,
    dtype: Any,
    sharding: DimSharding,
    a: Any,
    b: Any,
    starts: Array,
    lengths: Array,
    *scales: Array | None,
) -> Array:
    """Return the products over a device's part of the padded axis, summed over devices."""
    length = a.shape[1]
    groups = Groups(starts, starts + lengths).shift(sharding.shard_offset("t", length), length)
    sum_dtype = _sum_dtype(a, b, dtype) if "t" in sharding.axes else dtype
    dw = multiply(alignment, fast, sum_dtype, a, b, *groups, *scales)
    return sharding.psum(dw, "t", "- m n").astype(dtype)


def _sum_dtype(a: Operand, b: Operand, dtype: Any) -> Any:
    """Return the dtype in which partial sums travel between devices: 16 bits for those of codes."""
    is_codes = all(isinstance(x, QTensor) or x.dtype.itemsize == 1 for x in (a, b))
    return jnp.dtype(jnp.bfloat16) if is_codes else dtype


def _multiply_tile(fast: bool, dtype: DTypeLike, a: Any, b: Any) -> Array:
    """Return a @ b.T by XLA, for matrices of one group."""
    if on_cuda():
        return dot_in_16_bits()(dtype, a, b)
    return reference_matmul(fast, dtype, a, b)


def _tile_size(length: int, groups: int, unit: int) -> int:
    """Return the length of a tile: `unit` times a power of two, about half of a group, and at most 512 if possible."""
    units = max(length // (2 * groups * unit), 1)
    return unit * min(1 << (units.bit_length() - 1), max(512 // unit, 1))


def _loop_over_tiles(fast: bool, dtype: Any, x: Any, w: Any, starts: Array, ends: Array) -> Array:
    """Return `grouped_matmul` for groups that are rows [starts, ends) of x."""
    (rows, _), (groups, columns, _) = x.shape, w.shape
    result = cast_varying_like(jnp.zeros((rows, columns), dtype), x, w, starts, ends)
    if 0 in (*x.shape, *w.shape):
        return result
    size = min(_tile_size(rows, groups, 16), rows)
    tiles = -(-(ends - starts) // size)
    tile_ends = jnp.cumsum(tiles)
    x, w, restore_x, restore_w = *map(_to_bits, (x, w)), *map(_restorer, (x, w))

    def multiply(i: Array, y: Array) -> Array:
        group = jnp.sum(tile_ends <= i)
        begin = starts[group] + (i - (tile_ends - tiles)[group]) * size
        at = jnp.minimum(begin, rows - size)  # the last tile starts earlier, among rows that are complete
        matrix = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, group, keepdims=False), w)
        product = _multiply_tile(fast, dtype, restore_x(_slice(x, 0, at, size)), restore_w(matrix))
        index = at + jnp.arange(size, dtype=jnp.int32)
        is_own = ((index >= begin) & (index < ends[group]))[:, None]
        product = jnp.where(is_own, product, lax.dynamic_slice_in_dim(y, at, size))
        return lax.dynamic_update_slice_in_dim(y, product, at, 0)

    return lax.fori_loop(0, tile_ends[-1], multiply, result)


def _loop_over_blocks(
    alignment: int,
    fast: bool,
    dtype: Any,
    a: Any,
    b: Any,
    starts: Array,
    ends: Array,
    scale: Array | None,
    row_scale: Array | None,
    column_scale: Array | None,
) -> Array:
    """Return `grouped_matmul_dw` for groups that are places [starts, ends) of the axis, in whole aligned blocks."""
    (rows, length), (columns, _), groups = a.shape, b.shape, starts.shape[0]
    if 0 in (rows, columns, length, groups):
        return cast_varying_like(jnp.zeros((groups, rows, columns), dtype), a, b, starts, ends)
    size = min(_tile_size(length, groups, alignment), length)
    a, b, restore_a, restore_b = *map(_to_bits, (a, b)), *map(_restorer, (a, b))

    def sum_group(group: Array) -> Array:
        start, end = starts[group], ends[group]

        def add_block(i: Array, sums: Array) -> Array:
            begin = start + i * size
            at = jnp.minimum(begin, length - size)
            index = at + jnp.arange(size, dtype=jnp.int32)
            is_own = (index >= begin) & (index < end)
            left, right = (_mask_columns(_slice(x, 1, at, size), is_own) for x in (a, b))
            return sums + _multiply_tile(fast, jnp.float32, restore_a(left), restore_b(right))

        zeros = cast_varying_like(jnp.zeros((rows, columns), jnp.float32), a, b, starts, ends)
        sums = lax.fori_loop(0, -(-(end - start) // size), add_block, zeros)
        if scale is not None:
            sums = sums * scale[group]
        if row_scale is not None:
            sums = sums * row_scale[group][:, None]
        if column_scale is not None:
            sums = sums * column_scale[group][None]
        return sums.astype(dtype)

    return lax.map(sum_group, jnp.arange(groups))


def _to_bits(x: Any) -> Any:
    """Return an operand with FP8 codes as bytes: off GPUs, XLA widens a whole FP8 array before it slices it."""

    def to_bits(leaf: Array) -> Array:
        is_fp8 = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize == 1
        return lax.bitcast_convert_type(leaf, jnp.uint8) if is_fp8 else leaf

    return jax.tree.map(to_bits, x)


def _restorer(x: Any) -> Callable[[Any], Any]:
    """Return the inverse of `_to_bits`, for a part of `x`."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(x)]

    def restore(part: Any) -> Any:
        leaves, structure = jax.tree.flatten(part)
        pairs = zip(leaves, dtypes, strict=True)
        return structure.unflatten([y if y.dtype == d else lax.bitcast_convert_type(y, d) for y, d in pairs])

    return restore


def _slice(x: Any, axis: int, start: Array, size: int) -> Any:
    """Return `size` rows or columns of an array or a QTensor, in whole blocks of it."""
    length = x.shape[axis]

    def slice_leaf(leaf: Array) -> Array:
        block = length // leaf.shape[axis]
        return lax.dynamic_slice_in_dim(leaf, start // block, size // block, axis) if block < length else leaf

    return jax.tree.map(slice_leaf, x)


def _mask_columns(x: Any, is_own: Array) -> Any:
    """Return an array or a QTensor with zeros in other columns, codes and scales: a scale of them may be NaN."""

    def mask_leaf(leaf: Array) -> Array:
        count = leaf.shape[1]  # one scale is of this group, since groups have whole blocks
        return leaf if count == 1 else jnp.where(is_own[:: is_own.shape[0] // count][None], leaf, jnp.zeros_like(leaf))

    return jax.tree.map(mask_leaf, x)
