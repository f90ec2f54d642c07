"""Grouped matrix products: the rows of each group by the group's own matrix, and each group's own product of rows.

In: FP8, int8 or bf16, and the sizes of the groups. Out: bf16 or fp32. Hardware: Hopper. Reference: `jax.lax.ragged_dot`
of decoded operands.

A tile belongs to one group. It starts at the group's first row, rounded down to a multiple of 8, as TMA requires, and
stores the rows of its group alone. The groups need no padding, and their sizes stay on the device.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul import hopper
from pallas_kernels.matmul.matmul_mosaic import check_int8_k, make_compute

ROW_MULTIPLE = 8  # of the first row of a tile
TOKEN_MULTIPLE = 128  # of the first token of a group in `grouped_matmul_dw`


def grouped_matmul(
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    *,
    first_row: jax.Array | None = None,
    scale: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    column_scale: jax.Array | None = None,
    out_dtype: Any = jnp.bfloat16,
    fast: bool = True,
    tile: hopper.Tile | None = None,
    interpret: hopper.Interpret = None,
) -> jax.Array:
    """Return `a[t] @ b[g].T * scale[g] * row_scale[t] * column_scale[g]` for each row t of each group g.

    From `first_row` on, `group_sizes[0]` rows are group 0, the next `group_sizes[1]` rows group 1, and so on.
    Accumulation, transformations and errors are those of `matmul_mosaic.matmul`.

    Args:
        a: (T, K) float8_e4m3fn, float8_e5m2, int8 or bfloat16.
        b: (G, N, K), also K-major. The two FP8 types may differ; otherwise both operands have the same type.
        group_sizes: (G,) integers, at least 0. Rows after the T-th belong to no group.
        first_row: int32 scalar, the first row of group 0; None for 0. Rows before it belong to no group.
        scale: (G,) float32. row_scale: (T,) float32. column_scale: (G, N) float32.
        out_dtype: bfloat16 or float32.
        fast: whether FP8 products use fast accumulation.
        tile: tuning; None selects it by N. interpret: interpreter parameters, to run on CPU.

    Returns:
        (T, N) in `out_dtype`. Rows of no group are 0. Their operands and scales may be NaN, and change nothing.
        Operands are copied unless T and N are multiples of 8, and K of 128 bytes. The output is copied unless T is a
        multiple of 8, and N a larger multiple of 64 (bfloat16) or 32 (float32).
    """
    hopper.check_operands(a, b, out_dtype, _supported_dtypes(a), b_ndim=3)
    (num_tokens, k), (num_groups, n, _) = a.shape, b.shape
    if a.dtype == jnp.int8:
        check_int8_k(k)
    fast = fast or a.dtype not in hopper.FP8_DTYPES  # other sums are exact, or in fp32
    epilogue = hopper.Epilogue(scale, row_scale, column_scale)
    _check_scales(epilogue, (num_tokens,), num_groups, n)
    tile = tile or best_tile(n, fast)
    b = hopper.pad_axis(b, 1, hopper.round_up(n, ROW_MULTIPLE))
    return hopper.pipelined_matmul(
        make_compute(tile, _accumulator_dtype(a), fast), a, b.reshape(-1, k), name=f"{_prefix(a, fast)}_grouped",
        tile=tile, epilogue=epilogue, out_dtype=out_dtype, schedule=row_schedule(a, b, n, group_sizes, tile, first_row),
        interpret=interpret,
    )  # fmt: skip


def row_schedule(
    a: jax.Array, b: jax.Array, n: int, group_sizes: jax.Array, tile: hopper.Tile, first_row: jax.Array | None = None
) -> hopper.Schedule:
    """Return the tiles of a (T, K) by the first N rows of b (G, rows, K), for groups of these sizes."""
    num_tokens, (num_groups, b_rows, k) = a.shape[0], b.shape
    check_integers("group_sizes", group_sizes, num_groups)
    num_slices = hopper.ceil_div(k, hopper.K_STEP // a.dtype.itemsize)
    tiles_n = hopper.ceil_div(n, tile.block_cols)

    def num_tiles(refs: Any) -> jax.Array:
        count: jax.Array = refs[1][0] * tiles_n
        return count

    def position(refs: Any, index: jax.Array) -> hopper.TilePosition:
        tile_ref, count_ref, _ = refs
        tile_m, tile_n = plgpu.planar_snake(index, (count_ref[0], tiles_n), 1, tile.band_width)
        matrix, row, begin, end = (tile_ref[i, tile_m] for i in range(4))
        row, col = row * ROW_MULTIPLE, tile_n * tile.block_cols
        return hopper.TilePosition(row, col, row, matrix * b_rows + col, num_slices, 0, matrix, (begin, end))

    def zero_rows(refs: Any) -> list[tuple[Any, Any]]:
        bound_ref = refs[2]
        return [(jnp.int32(0), bound_ref[0]), (bound_ref[1], jnp.int32(num_tokens))]

    arrays = _row_tiles(group_sizes, first_row, num_tokens, tile.block_rows)
    return hopper.Schedule((num_tokens, n), arrays, num_tiles, position, zero_rows=zero_rows)


def _row_tiles(
    group_sizes: jax.Array, first_row: jax.Array | None, num_tokens: int, block_rows: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the rows of tiles of all groups, their number, and the rows of all groups.

    Returns:
        int32 (4, maximum): group, first row divided by 8, first row of the group, and the row after its last. The
        kernel sees a multiplication by 8, which proves that the first row is a multiple. int32 (1,): the number. int32
        (2,): first row of the first group, and the row after the last one of the last group.
    """
    num_groups = group_sizes.shape[0]
    # Each group has at most one tile more than its share. Rounding down its first row adds no tile: the group takes
    # those rows from the last tile of the previous group.
    maximum = num_tokens // block_rows + num_groups
    first_row = jnp.int32(0) if first_row is None else jnp.minimum(first_row.astype(jnp.int32), num_tokens)
    ends = first_row + jnp.cumsum(jnp.maximum(group_sizes.astype(jnp.int32), 0), dtype=jnp.int32)
    ends = jnp.minimum(ends, num_tokens)
    begins = jnp.concatenate([first_row[None], ends[:-1]])
    first_rows = begins // ROW_MULTIPLE * ROW_MULTIPLE
    counts = jnp.where(ends > begins, -(-(ends - first_rows) // block_rows), 0)
    count_ends = jnp.cumsum(counts, dtype=jnp.int32)
    number = jnp.arange(maximum, dtype=jnp.int32)
    group = jnp.sum(number[:, None] >= count_ends, axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, num_groups - 1)
    row = first_rows[group] + (number - (count_ends - counts)[group]) * block_rows
    tiles = jnp.stack([group, row // ROW_MULTIPLE, begins[group], ends[group]])
    return tiles, count_ends[-1:], jnp.stack([first_row, ends[-1]])


def grouped_matmul_dw(
    a: jax.Array,
    b: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    *,
    scale: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    column_scale: jax.Array | None = None,
    is_k_major: bool = True,
    out_dtype: Any = jnp.bfloat16,
    fast: bool = True,
    tile: hopper.Tile | None = None,
    interpret: hopper.Interpret = None,
) -> jax.Array:
    """Return `a[:, g] @ b[:, g].T * scale[g] * row_scale[g][:, None] * column_scale[g]` for the tokens of each group g.

    Each group starts at a multiple of 128 tokens. The tokens from its end to the next multiple of 128 must be zeros in
    one operand and finite in the other. Accumulation, transformations and errors are those of `matmul_mosaic.matmul`.

    Args:
        a: (M, T) float8_e4m3fn, float8_e5m2, int8 or bfloat16. Sums of int8 hold groups of up to 131,071 tokens.
        b: (N, T), likewise. The two FP8 types may differ; otherwise both operands have the same type.
        starts: (G,) integers, the first token of each group, a multiple of 128.
        lengths: (G,) integers, the number of tokens of each group; the result of an empty group is 0.
        scale: (G,) float32. row_scale: (G, M) float32. column_scale: (G, N) float32.
        is_k_major: whether the tokens are the last dimension of both operands. False supports bfloat16 (T, M) and (T,
            N).
        out_dtype, fast, tile, interpret: as in `grouped_matmul`.

    Returns:
        (G, M, N) in `out_dtype`. Operands are copied unless M and N are multiples of 8 (of 64 without `is_k_major`),
        and T of 128 bytes. The output is copied unless M is a multiple of 8, and N a larger multiple of 64 (bfloat16)
        or 32 (float32).
    """
    hopper.check_operands(a, b, out_dtype, _supported_dtypes(a), is_k_major=is_k_major)
    if not is_k_major and a.dtype != jnp.bfloat16:
        raise TypeError(f"a has dtype {a.dtype}; is_k_major=False requires bfloat16; transpose 8-bit operands")
    m, n = (x.shape[0 if is_k_major else 1] for x in (a, b))
    fast = fast or a.dtype not in hopper.FP8_DTYPES
    num_groups = starts.size
    epilogue = hopper.Epilogue(scale, row_scale, column_scale)
    _check_scales(epilogue, (num_groups, m), num_groups, n)
    tile = tile or best_tile(n, fast, is_k_major, lead_slices=0)
    padded_m = hopper.round_up(m, ROW_MULTIPLE)
    if row_scale is not None:
        epilogue = hopper.Epilogue(scale, hopper.pad_axis(row_scale, 1, padded_m).reshape(-1), column_scale)
    out = hopper.pipelined_matmul(
        make_compute(tile, _accumulator_dtype(a), fast), a, b, name=f"{_prefix(a, fast)}_grouped_dw", tile=tile,
        epilogue=epilogue, out_dtype=out_dtype, is_k_major=is_k_major, interpret=interpret,
        schedule=token_schedule(padded_m, n, hopper.K_STEP // a.dtype.itemsize, starts, lengths, tile),
    )  # fmt: skip
    return out.reshape(num_groups, padded_m, n)[:, :m]


def token_schedule(
    m: int, n: int, k_step: int, starts: jax.Array, lengths: jax.Array, tile: hopper.Tile
) -> hopper.Schedule:
    """Return the tiles of one (M, N) product per group, of the slices of K that hold the group's tokens."""
    num_groups = starts.size
    check_integers("starts", starts, num_groups)
    check_integers("lengths", lengths, num_groups)
    tiles = hopper.ceil_div(m, tile.block_rows), hopper.ceil_div(n, tile.block_cols)
    tiles_per_group = tiles[0] * tiles[1]
    has_whole_tiles = m % tile.block_rows == 0

    def num_tiles(_: Any) -> jax.Array:
        return jnp.int32(num_groups * tiles_per_group)

    def position(refs: Any, index: jax.Array) -> hopper.TilePosition:
        first_slice_ref, num_slices_ref = refs
        group = jnp.minimum(lax.div(index, jnp.int32(tiles_per_group)), num_groups - 1)
        tile_m, tile_n = plgpu.planar_snake(lax.rem(index, jnp.int32(tiles_per_group)), tiles, 1, tile.band_width)
        a_row, col, first_row = tile_m * tile.block_rows, tile_n * tile.block_cols, group * m
        row_range = None if has_whole_tiles else (first_row, first_row + m)
        return hopper.TilePosition(
            first_row + a_row, col, a_row, col, num_slices_ref[group], first_slice_ref[group], group, row_range
        )

    first_slices = starts.astype(jnp.int32) // k_step
    num_slices = -(-lengths.astype(jnp.int32) // k_step)
    return hopper.Schedule((num_groups * m, n), (first_slices, num_slices), num_tiles, position)


def best_tile(n: int, fast: bool, is_k_major: bool = True, lead_slices: int = 2) -> hopper.Tile:
    """Return the tile with the fewest columns beyond N; wide tiles read operands less often.

    Promoted sums need twice the accumulators: two warpgroups share a tile. A lead needs as many slices in every tile.
    """
    if not fast:
        return hopper.Tile(64, 128, num_stages=6, lead_slices=lead_slices)
    # The swizzle of operands that are not K-major spans 64 columns.
    stages = {192: 4, 160: 5, 128: 6} if is_k_major else {192: 4, 128: 6}
    relative_cost = {192: 1.0, 160: 1.01, 128: 1.04}
    cols = min(stages, key=lambda cols: hopper.round_up(n, cols) * relative_cost[cols])
    return hopper.Tile(128, cols, None, stages[cols])


def _accumulator_dtype(a: jax.Array) -> Any:
    return jnp.int32 if a.dtype == jnp.int8 else jnp.float32


def _prefix(a: jax.Array, fast: bool) -> str:
    """Return the start of a kernel's name."""
    if a.dtype in hopper.FP8_DTYPES:
        return "fp8" if fast else "fp8_promoted"
    return {"int8": "int8", "bfloat16": "bf16"}[a.dtype.name]


def _supported_dtypes(a: jax.Array) -> tuple[Any, ...]:
    """Return the dtypes of both operands, given the first: FP8 types may be mixed."""
    return (a.dtype,) if a.dtype in (jnp.int8, jnp.bfloat16) else hopper.FP8_DTYPES


def check_integers(name: str, x: jax.Array, num_groups: int) -> None:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {x.dtype}; expected integers")
    if x.shape != (num_groups,):
        raise ValueError(f"{name} has shape {x.shape}; expected {(num_groups,)}, one per group")


def _check_scales(epilogue: hopper.Epilogue, row_shape: tuple[int, ...], num_groups: int, n: int) -> None:
    hopper.check_array("scale", epilogue.scale, (num_groups,), (jnp.float32,))
    hopper.check_array("row_scale", epilogue.row_scale, row_shape, (jnp.float32,))
    hopper.check_array("column_scale", epilogue.column_scale, (num_groups, n), (jnp.float32,))
