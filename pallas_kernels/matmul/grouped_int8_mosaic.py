"""Grouped INT8 products in blocks of 128x128: with a residual for fallback blocks of rows, and over tokens.

In: int8 codes with fp32 block scales, on a token axis in which each group starts at a multiple of 128. Out: bf16 or
fp32. Hardware: Hopper. Reference: `jax.lax.ragged_dot` of decoded operands.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul import hopper, matmul_int8_mosaic
from pallas_kernels.matmul.grouped_mosaic import ROW_MULTIPLE, check_integers, token_schedule
from pallas_kernels.matmul.matmul_block_mosaic import best_tile
from pallas_kernels.matmul.matmul_int8_mosaic import BLOCK, FallbackResidual, a_block_stream


def grouped_int8_block_matmul(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    block_groups: jax.Array,
    *,
    residual: FallbackResidual | None = None,
    out_dtype: Any = jnp.bfloat16,
    tile: hopper.Tile | None = None,
    interpret: hopper.Interpret = None,
) -> jax.Array:
    """Return `(dequantize(a) + is_fallback * dequantize(residual)) @ dequantize(b)[g].T`, g the group of each row.

    Accumulation and fallback are those of `matmul_int8_mosaic.matmul_int8_block`. Copies and errors are those of
    `matmul_mosaic.matmul`.

    Args:
        a: (T, K) int8. Each block of 128 rows belongs to one group; T is a multiple of 128.
        b: (G, N, K) int8, K-major.
        a_scale: (T / 128, ceil(K / 128)) float32. b_scale: (G, ceil(N / 128), ceil(K / 128)) float32.
        block_groups: (T / 128,) integers, the group of each block of rows; G for blocks of no group.
        residual: residual of a, or None.
        tile, out_dtype, interpret: as in `matmul_int8_mosaic.matmul_int8_block`.

    Returns:
        (T, N) in `out_dtype`. Rows of no group are not initialized.
    """
    hopper.check_operands(a, b, out_dtype, (jnp.int8,), b_ndim=3)
    (num_tokens, k), (num_groups, n, _) = a.shape, b.shape
    if num_tokens % BLOCK:
        raise ValueError(f"a has {num_tokens} rows; expected whole blocks of {BLOCK} rows per group")
    blocks, steps = num_tokens // BLOCK, hopper.ceil_div(k, BLOCK)
    column_blocks = hopper.ceil_div(n, BLOCK)
    hopper.check_array("a_scale", a_scale, (blocks, steps), (jnp.float32,))
    hopper.check_array("b_scale", b_scale, (num_groups, column_blocks, steps), (jnp.float32,))
    check_integers("block_groups", block_groups, blocks)
    tile = tile or best_tile(num_tokens, n, "N")
    matmul_int8_mosaic.check_tile(tile)

    def first_block(position: hopper.TilePosition) -> jax.Array:
        return position.matrix * column_blocks + lax.div(position.col, BLOCK)

    b_stream = hopper.Stream.from_blocks(b_scale.reshape(-1, steps), tile.block_cols, first_block)
    streams = [a_block_stream(a_scale), b_stream]
    slice_counts, second_operand = jnp.full(blocks, steps, jnp.int32), None
    if residual is not None:
        second_operand = matmul_int8_mosaic.make_second_operand(residual, a.shape)
        slice_counts += jnp.sum(second_operand.scale != 0, 1, dtype=jnp.int32)
        streams.append(a_block_stream(second_operand.scale))
    b = hopper.pad_axis(b, 1, hopper.round_up(n, ROW_MULTIPLE))
    return hopper.pipelined_matmul(
        matmul_int8_mosaic.make_compute(tile, residual is not None, interpret is not None), a, b.reshape(-1, k),
        streams, name="int8_grouped_block", tile=tile, out_dtype=out_dtype,
        use_inline_wgmma=True, second_operand=second_operand, interpret=interpret,
        schedule=_block_schedule((num_tokens, n), b.shape[1], tile, slice_counts, block_groups, num_groups),
    )  # fmt: skip


def _block_schedule(
    out_shape: tuple[int, int],
    b_rows: int,
    tile: hopper.Tile,
    slice_counts: jax.Array,
    block_groups: jax.Array,
    num_groups: int,
) -> hopper.Schedule:
    """Return the tiles of the blocks that have a group, those with the most slices first."""
    tiles_n = hopper.ceil_div(out_shape[1], tile.block_cols)

    def num_tiles(refs: Any) -> jax.Array:
        count: jax.Array = refs[3][0] * tiles_n
        return count

    def position(refs: Any, index: jax.Array) -> hopper.TilePosition:
        count_ref, order_ref, group_ref, used_ref = refs
        tile_m, tile_n = plgpu.planar_snake(index, (used_ref[0], tiles_n), 1, tile.band_width)
        block = order_ref[tile_m]
        row, col, matrix = block * BLOCK, tile_n * tile.block_cols, group_ref[block]
        return hopper.TilePosition(row, col, row, matrix * b_rows + col, count_ref[block], 0, matrix)

    groups = block_groups.astype(jnp.int32)
    counts = jnp.where(groups < num_groups, slice_counts, 0)
    order = jnp.argsort(-counts).astype(jnp.int32)
    used = jnp.sum(counts > 0, dtype=jnp.int32).reshape(1)
    return hopper.Schedule(out_shape, (counts, order, groups, used), num_tiles, position, is_sorted=True)


def grouped_int8_block_matmul_dw(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    *,
    out_dtype: Any = jnp.bfloat16,
    tile: hopper.Tile | None = None,
    interpret: hopper.Interpret = None,
) -> jax.Array:
    """Return `dequantize(a)[:, g] @ dequantize(b)[:, g].T` for the tokens of each group g, with one scale per block.

    Tokens are those of `grouped_mosaic.grouped_matmul_dw`, accumulation that of
    `matmul_int8_mosaic.matmul_int8_block`.

    Args:
        a: (M, T) int8. b: (N, T) int8.
        a_scale: (ceil(M / 128), ceil(T / 128)) float32. b_scale: (ceil(N / 128), ceil(T / 128)) float32.
        starts, lengths: (G,) integers, as in `grouped_mosaic.grouped_matmul_dw`.
        tile, out_dtype, interpret: as in `matmul_int8_mosaic.matmul_int8_block`.

    Returns:
        (G, M, N) in `out_dtype`; zeros for groups without tokens.
    """
    hopper.check_operands(a, b, out_dtype, (jnp.int8,))
    (m, num_tokens), n, num_groups = a.shape, b.shape[0], starts.size
    steps = hopper.ceil_div(num_tokens, BLOCK)
    hopper.check_array("a_scale", a_scale, (hopper.ceil_div(m, BLOCK), steps), (jnp.float32,))
    hopper.check_array("b_scale", b_scale, (hopper.ceil_div(n, BLOCK), steps), (jnp.float32,))
    tile = tile or best_tile(m * num_groups, n, "N")
    matmul_int8_mosaic.check_tile(tile)
    padded_m = hopper.round_up(m, ROW_MULTIPLE)
    b_stream = hopper.Stream.from_blocks(b_scale, tile.block_cols, lambda position: lax.div(position.b_row, BLOCK))
    out = hopper.pipelined_matmul(
        matmul_int8_mosaic.make_compute(tile, False, interpret is not None, may_be_empty=True), a, b,
        [a_block_stream(a_scale), b_stream], name="int8_grouped_block_dw", tile=tile, out_dtype=out_dtype,
        use_inline_wgmma=True, schedule=token_schedule(padded_m, n, BLOCK, starts, lengths, tile), interpret=interpret,
    )  # fmt: skip
    return out.reshape(num_groups, padded_m, n)[:, :m]
