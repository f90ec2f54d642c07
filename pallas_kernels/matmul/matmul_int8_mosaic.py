"""INT8 matrix product in blocks of 128x128 with a residual for fallback blocks of the left operand.

In: int8 codes (M, K) and (N, K) with fp32 block scales. Out: (M, N) bf16 or fp32. Hardware: Hopper. Reference:
`_reference` in fp8jax/ops/matmul/matmul.py, for the base and for the masked residual.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul import hopper
from pallas_kernels.matmul.hopper import Tile
from pallas_kernels.matmul.hopper_wgmma import multiply_rows
from pallas_kernels.matmul.matmul_block_mosaic import best_tile

BLOCK = 128


class FallbackResidual(NamedTuple):
    """The residual of the fallback blocks of a left operand.

    Attributes:
        codes: int8, of the operand's shape. scale: fp32, one per block. Other blocks are not used.
        is_fallback: bool, one per block.
    """

    codes: jax.Array
    scale: jax.Array
    is_fallback: jax.Array


def matmul_int8_block(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    residual: FallbackResidual | None = None,
    out_dtype: Any = jnp.bfloat16,
    tile: Tile | None = None,
    interpret: hopper.Interpret = None,
) -> jax.Array:
    """Return `(dequantize(a) + is_fallback * dequantize(residual)) @ dequantize(b).T`, with one scale per block.

    Algorithm 1 of arXiv 2503.08040. Sums of 128 products are exact in int32. Times their two scales, they are added to
    an fp32 accumulator. A fallback block is multiplied twice, the second time with its residual; other residual blocks
    are not loaded. Transformations and errors are those of `matmul_mosaic.matmul`.

    Args:
        a: (M, K) int8. b: (N, K) int8, K-major.
        a_scale: (ceil(M / 128), ceil(K / 128)) float32. b_scale: (ceil(N / 128), ceil(K / 128)) float32.
        residual: residual of a, or None.
        tile: tuning, with 128 rows per block; None selects it by shape.
        out_dtype, interpret: as in `matmul_mosaic.matmul`.

    Returns:
        (M, N) in `out_dtype`.
    """
    hopper.check_operands(a, b, out_dtype, (jnp.int8,))
    (m, k), n = a.shape, b.shape[0]
    blocks = hopper.ceil_div(m, BLOCK), hopper.ceil_div(k, BLOCK)
    hopper.check_array("a_scale", a_scale, blocks, (jnp.float32,))
    hopper.check_array("b_scale", b_scale, (hopper.ceil_div(n, BLOCK), blocks[1]), (jnp.float32,))
    tile = tile or best_tile(m, n, "N")
    check_tile(tile)
    b_stream = hopper.Stream.from_blocks(b_scale, tile.block_cols, lambda position: lax.div(position.col, BLOCK))
    streams = [a_block_stream(a_scale), b_stream]
    second_operand, schedule = None, None
    if residual is not None:
        second_operand = make_second_operand(residual, a.shape)
        schedule = _sorted_schedule(m, n, tile, blocks[1] + jnp.sum(second_operand.scale != 0, 1, dtype=jnp.int32))
        streams.append(a_block_stream(second_operand.scale))
    return hopper.pipelined_matmul(
        make_compute(tile, second_operand is not None, interpret is not None), a, b, streams,
        name="int8_matmul_block", tile=tile, out_dtype=out_dtype, use_inline_wgmma=True,
        second_operand=second_operand, schedule=schedule, interpret=interpret,
    )  # fmt: skip


def check_tile(tile: Tile) -> None:
    """Raise ValueError unless each warpgroup's part of a tile has one scale per slice."""
    if tile.block_rows != BLOCK or BLOCK % tile.cols:
        raise ValueError(
            f"{tile}: the tile must have {BLOCK} rows, and the columns of each warpgroup must divide {BLOCK}"
        )


def a_block_stream(scales: jax.Array) -> hopper.Stream:
    """Return the stream of block scales (M / 128, K / 128) of the left operand, or of its fallback residual."""
    return hopper.Stream.from_blocks(scales, BLOCK, lambda position: lax.div(position.a_row, BLOCK))


def make_second_operand(residual: FallbackResidual, shape: tuple[int, ...]) -> hopper.SecondOperand:
    """Return the residual of an operand of this shape, with scale 0 in the blocks that do not fall back."""
    blocks = hopper.ceil_div(shape[0], BLOCK), hopper.ceil_div(shape[1], BLOCK)
    hopper.check_array("residual.codes", residual.codes, shape, (jnp.int8,))
    hopper.check_array("residual.scale", residual.scale, blocks, (jnp.float32,))
    hopper.check_array("residual.is_fallback", residual.is_fallback, blocks, (jnp.bool_,))
    return hopper.SecondOperand(residual.codes, jnp.where(residual.is_fallback, residual.scale, 0))


def _sorted_schedule(m: int, n: int, tile: Tile, slice_counts: jax.Array) -> hopper.Schedule:
    """Return the tiles of an (M, N) product whose rows of tiles have these numbers of slices."""
    tiles = slice_counts.shape[0], hopper.ceil_div(n, tile.block_cols)

    def num_tiles(_: Any) -> jax.Array:
        return jnp.int32(tiles[0] * tiles[1])

    def position(refs: Any, index: jax.Array) -> hopper.TilePosition:
        count_ref, order_ref = refs
        tile_m, tile_n = plgpu.planar_snake(index, tiles, 1, tile.band_width)
        tile_m = order_ref[tile_m]
        row, col = tile_m * tile.block_rows, tile_n * tile.block_cols
        return hopper.TilePosition(row, col, row, col, count_ref[tile_m])

    arrays = slice_counts, jnp.argsort(-slice_counts).astype(jnp.int32)
    return hopper.Schedule((m, n), arrays, num_tiles, position, is_sorted=True)


def make_compute(tile: Tile, has_residual: bool, is_interpreted: bool, may_be_empty: bool = False) -> Any:
    """Return the `compute` function: 64 rows at a time, as in `matmul_block_mosaic`, with int32 sums."""
    row_starts = range(0, tile.rows, 64)

    def compute(pipeline: hopper.WarpgroupPipeline, finish: Any) -> None:
        b_block = lax.div(pipeline.col, BLOCK) - lax.div(pipeline.col - pipeline.stage_col, BLOCK)

        def add_slice(i: jax.Array, slots: list[Any], carry: Any) -> Any:
            (slot, next_slot), (totals, sums, position) = slots, carry
            new_totals = []
            for top, total in zip(row_starts, totals, strict=True):
                is_last = top == row_starts[-1]

                def load_scale(is_last: bool = is_last) -> tuple[jax.Array, hopper.SlicePosition]:
                    k_index = position.k_index if has_residual else i
                    scale, next_position = pipeline.load_slice_scale(0, slot, 0, k_index), position
                    if has_residual:
                        residual_scale = pipeline.load_slice_scale(2, slot, 0, k_index)
                        scale, next_position = (
                            lax.select(position.is_second == 1, residual_scale, scale),
                            position.next_position(residual_scale),
                        )
                    scale = scale * pipeline.load_slice_scale(1, slot, b_block, k_index)
                    if is_last:
                        pipeline.fence_scale_reads()
                        if next_slot is not None:
                            pipeline.wait(next_slot)
                    return scale, next_position

                sums, (scale, next_step) = multiply_rows(
                    pipeline, slot, top, sums, load_scale, is_interpreted=is_interpreted
                )
                if is_last:
                    pipeline.release(slot, i + 1)
                new_totals.append(total + sums.astype(jnp.float32) * scale)
            return tuple(new_totals), sums, next_step

        def zeros(dtype: Any) -> jax.Array:
            return plgpu.layout_cast(jnp.zeros((64, tile.cols), dtype), plgpu.Layout.WGMMA)

        def add_slices() -> Any:
            pipeline.wait(pipeline.first_stage)
            init = no_totals, zeros(jnp.int32), hopper.SlicePosition(jnp.int32(0), jnp.int32(0))
            return pipeline.loop_over_k(add_slice, init, with_next=True)[0]

        no_totals = tuple(zeros(jnp.float32) for _ in row_starts)
        totals = pipeline.loop_unless_empty(add_slices, no_totals, may_be_empty)
        finish([(top, 0, x) for top, x in zip(row_starts, totals, strict=True)])

    return compute
