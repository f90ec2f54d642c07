"""Block-scaled FP8 matrix product: 1x128 by 128x128 or 1x128 by 1x128, promoted to fp32 every 128 of K.

In: FP8 codes (M, K) and (N, K) with fp32 scales. Out: (M, N) bf16 or fp32. Hardware: Hopper. Reference: `_reference` in
fp8jax/ops/matmul/matmul.py.
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul import hopper
from pallas_kernels.matmul.hopper import Tile
from pallas_kernels.matmul.hopper_wgmma import multiply_rows


def matmul_block(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    out_dtype: Any = jnp.bfloat16,
    tile: Tile | None = None,
    interpret: hopper.Interpret = None,
) -> jax.Array:
    """Return `dequantize(a) @ dequantize(b).T`, with a scale for every 128 of K.

    The tensor cores add 128 products with about 14 bits. Each partial sum, times its two scales, is added to an fp32
    accumulator. NaN of a code or scale propagates to its row or column. The scheme is DeepSeek-V3's (arXiv 2412.19437,
    section 3.3). Transformations, copies and errors are those of `matmul_mosaic.matmul`.

    Args:
        a: (M, K) float8_e4m3fn or float8_e5m2. b: (N, K), also K-major. The two types may differ.
        a_scale: (M, ceil(K / 128)) float32, one per row and 128 of K (1x128).
        b_scale: float32, (ceil(N / 128), ceil(K / 128)) for 128x128 blocks, or (N, ceil(K / 128)) for 1x128.
        out_dtype, tile, interpret: as in `matmul_mosaic.matmul`.

    Returns:
        (M, N) in `out_dtype`.
    """
    hopper.check_operands(a, b, out_dtype)
    (m, k), n = a.shape, b.shape[0]
    blocks = hopper.ceil_div(k, hopper.K_STEP)
    has_column_scales = b_scale.shape == (n, blocks) and n > 1
    hopper.check_array("a_scale", a_scale, (m, blocks), (jnp.float32,))
    if not has_column_scales:
        hopper.check_array("b_scale", b_scale, (hopper.ceil_div(n, 128), blocks), (jnp.float32,))
    tile = tile or best_tile(m, n)
    streams = [hopper.Stream.from_slices(a_scale, tile.block_rows, lambda position: position.a_row)]
    if has_column_scales:
        streams.append(hopper.Stream.from_slices(b_scale, tile.block_cols, lambda position: position.b_row))
    else:
        streams.append(
            hopper.Stream.from_blocks(b_scale, tile.block_cols, lambda position: lax.div(position.b_row, 128))
        )
    return hopper.pipelined_matmul(
        make_compute(tile, has_column_scales, interpret is not None), a, b, streams, name="fp8_matmul_block",
        tile=tile, out_dtype=out_dtype, use_inline_wgmma=True, static_key=has_column_scales,
        interpret=interpret,
    )  # fmt: skip


def make_compute(tile: Tile, has_column_scales: bool, is_interpreted: bool, may_be_empty: bool = False) -> Any:
    """Return the `compute` function: 64 rows at a time, so that the sums of only one pass need registers.

    Tensor cores idle between two passes. Each pass therefore loads its scales, and the last one waits for the next
    slice, while products are in flight. Scales of single columns would need too many registers for that.
    `may_be_empty` admits tiles without slices.
    """
    width = math.gcd(tile.cols, 64 if has_column_scales else 128)  # columns scaled at a time
    row_starts, column_starts = range(0, tile.rows, 64), range(0, tile.cols, width)

    def compute(pipeline: hopper.WarpgroupPipeline, finish: Any) -> None:
        first_block = lax.div(pipeline.col - pipeline.stage_col, 128)

        def broadcast(x: jax.Array, axis: int) -> jax.Array:
            return lax.broadcast_in_dim(x, (64, width), [axis])

        def block_scale(i: jax.Array, slot: Any, start: int) -> jax.Array:
            return pipeline.load_slice_scale(1, slot, lax.div(pipeline.col + start, 128) - first_block, i)

        def column_scales(slot: Any, start: int) -> jax.Array:
            return broadcast(pipeline.load_scales(1, slot, pipeline.stage_col + start, width, hopper.COLUMN_LAYOUT), 1)

        def add_slice(i: jax.Array, slots: list[Any], carry: Any) -> Any:
            (slot, next_slot), (totals, sums) = slots, carry

            def add_rows(top: int, total: Any, sums: Any) -> tuple[Any, Any]:
                is_last = top == row_starts[-1]

                def load_scales() -> list[jax.Array]:
                    row = pipeline.load_scales(0, slot, pipeline.stage_row + top, 64, hopper.ROW_LAYOUT)
                    scales = [
                        broadcast(row if has_column_scales else row * block_scale(i, slot, start), 0)
                        for start in column_starts
                    ]
                    if is_last and not has_column_scales:
                        pipeline.fence_scale_reads()
                    if is_last and next_slot is not None:
                        pipeline.wait(next_slot)
                    return scales

                sums, scales = multiply_rows(pipeline, slot, top, sums, load_scales, is_interpreted=is_interpreted)
                if is_last and not has_column_scales:
                    pipeline.release(slot, i + 1)
                new_total = []
                for x, start, scale in zip(total, column_starts, scales, strict=True):
                    scaled = sums[:, start : start + width] * scale
                    new_total.append(x + (scaled * column_scales(slot, start) if has_column_scales else scaled))
                if is_last and has_column_scales:
                    pipeline.fence_scale_reads()
                    pipeline.release(slot, i + 1)
                return tuple(new_total), sums

            added = []
            for top, total in zip(row_starts, totals, strict=True):
                total, sums = add_rows(top, total, sums)
                added.append(total)
            return tuple(added), sums

        def zeros(cols: int) -> jax.Array:
            return plgpu.layout_cast(jnp.zeros((64, cols), jnp.float32), plgpu.Layout.WGMMA)

        def add_slices() -> Any:
            pipeline.wait(pipeline.first_stage)
            return pipeline.loop_over_k(add_slice, (no_totals, zeros(tile.cols)), with_next=True)[0]

        no_totals = tuple(tuple(zeros(width) for _ in column_starts) for _ in row_starts)
        totals = pipeline.loop_unless_empty(add_slices, no_totals, may_be_empty)
        finish(
            [
                (top, f, x)
                for top, row in zip(row_starts, totals, strict=True)
                for f, x in zip(column_starts, row, strict=True)
            ]
        )

    return compute


def best_tile(m: int, n: int, split: Literal["M", "N"] = "M") -> Tile:
    """Return the tile of least estimated cost: tiles per multiprocessor times the relative cost of a tile.

    Idle multiprocessors of the last wave count half: at its power limit, the GPU clocks the busy ones higher.
    `split` is that of a tile of two warpgroups.
    """
    large = Tile(128, 128, split, num_stages=3, store_slots=4, band_width=16)
    choices = (2.0, large), (1.08, Tile(64, 128, num_stages=5))

    def cost(choice: tuple[float, Tile]) -> float:
        tiles = hopper.mean_tiles_per_sm(m, n, choice[1])
        return choice[0] * (tiles + math.ceil(tiles)) / 2

    return min(choices, key=cost)[1]
