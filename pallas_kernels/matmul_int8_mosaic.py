"""INT8 matrix product in blocks of 128x128 for Hopper; blocks of the left operand may have a residual."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.hopper import Tile
from pallas_kernels.hopper_wgmma import multiply_rows

BLOCK = 128


class FallbackResidual(NamedTuple):
    """What the blocks of a left operand that fall back add to it.

    Attributes:
        codes: int8, of the operand's shape; those of other blocks are not read.
        scale: fp32, one for each block, of those that fall back.
        used: bool, one for each block: whether it falls back.
    """

    codes: jax.Array
    scale: jax.Array
    used: jax.Array


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
    """`(dequantize(a) + used * dequantize(residual)) @ dequantize(b).T`, every block under its own scale.

    Algorithm 1 of arXiv 2503.08040. Sums of 128 products are exact, in int32, and enter an fp32 accumulator times their
    two scales. A block that falls back is multiplied twice, the second time its residual; other residual blocks are not
    loaded. Works under jit, scan, vmap, shard_map and jax.export; has no derivative.

    Args:
        a: (M, K) int8. b: (N, K) int8, K-major.
        a_scale: (ceil(M / 128), ceil(K / 128)) float32. b_scale: (ceil(N / 128), ceil(K / 128)) float32.
        residual: of a; None multiplies a alone.
        out_dtype: bfloat16 or float32.
        tile: tuning; None chooses it by the shape. It computes 128 rows.
        interpret: interpreter parameters, to run on CPU.

    Returns:
        (M, N) in `out_dtype`.

    Raises:
        TypeError, ValueError: a dtype or shape other than these. NotImplementedError: jax < 0.11.
    """
    hopper.check_operands(a, b, out_dtype, (jnp.int8,))
    (m, k), n = a.shape, b.shape[0]
    blocks = hopper.ceil_div(m, BLOCK), hopper.ceil_div(k, BLOCK)
    hopper.check_array("a_scale", a_scale, blocks, (jnp.float32,))
    hopper.check_array("b_scale", b_scale, (hopper.ceil_div(n, BLOCK), blocks[1]), (jnp.float32,))
    tile = tile or best_tile(m, n)
    if tile.block_rows != BLOCK or BLOCK % tile.cols:
        raise ValueError(f"{tile}: it has to compute {BLOCK} rows, and each warpgroup columns that divide {BLOCK}")
    # A tile that starts within a block reaches into one more.
    b_rows = hopper.ceil_div(tile.block_cols, BLOCK) + (tile.block_cols % BLOCK > 0)
    right = hopper.Stream.of_rows(b_scale, b_rows, lambda _, col: lax.div(col, BLOCK))

    def of_a(scales: jax.Array) -> hopper.Stream:
        return hopper.Stream.of_rows(scales, 1, lambda row, _: lax.div(row, BLOCK))

    walk, streams = None, [of_a(a_scale), right]
    if residual is not None:
        hopper.check_array("residual.codes", residual.codes, a.shape, (jnp.int8,))
        hopper.check_array("residual.scale", residual.scale, blocks, (jnp.float32,))
        hopper.check_array("residual.used", residual.used, blocks, (jnp.bool_,))
        again = jnp.where(residual.used, residual.scale, 0)
        counts = blocks[1] + jnp.sum(again != 0, 1, dtype=jnp.int32)
        walk = hopper.Walk(residual.codes, again, counts, jnp.argsort(-counts).astype(jnp.int32))
        streams.append(of_a(again))
    return hopper.product(
        _compute(tile, walk is not None, interpret is not None), a, b, streams, name="int8_matmul_block", tile=tile,
        epilogue=hopper.Epilogue(), out_dtype=out_dtype, own_wgmma=True, walk=walk, interpret=interpret,
    )  # fmt: skip


def _compute(tile: Tile, walks: bool, interpreted: bool) -> Any:
    """Products of 64 rows after 64, whose int32 sums only wait beside the fp32 accumulators (see the FP8 kernel).

    While a product is in flight, its scales are read, and before the last one of a slice the next slice is awaited.
    """
    tops = range(0, tile.rows, 64)

    def compute(share: hopper.Share, finish: Any) -> None:
        within = lax.div(share.col, BLOCK) - lax.div(share.col - share.stage_col, BLOCK)

        def add_slice(i: jax.Array, slots: list[Any], carry: Any) -> Any:
            (slot, following), (totals, sums, step) = slots, carry
            added = []
            for top, total in zip(tops, totals, strict=True):
                last = top == tops[-1]

                def beside(last: bool = last) -> tuple[jax.Array, hopper.Step]:
                    part = step.part if walks else i
                    scale, next_step = share.scale(0, slot, 0, part), step
                    if walks:
                        again = share.scale(2, slot, 0, part)
                        scale, next_step = lax.select(step.of_second == 1, again, scale), step.following(again)
                    scale = scale * share.scale(1, slot, within, part)
                    if last:
                        share.scales_read()
                        if following is not None:
                            share.wait(following)
                    return scale, next_step

                sums, (scale, next_step) = multiply_rows(share, slot, top, sums, beside, interpreted=interpreted)
                if last:
                    share.release(slot, i + 1)
                added.append(total + sums.astype(jnp.float32) * scale)
            return tuple(added), sums, next_step

        def zeros(dtype: Any) -> jax.Array:
            return plgpu.layout_cast(jnp.zeros((64, tile.cols), dtype), plgpu.Layout.WGMMA)

        share.wait(share.stage)
        init = tuple(zeros(jnp.float32) for _ in tops), zeros(jnp.int32), hopper.Step(jnp.int32(0), jnp.int32(0))
        totals, *_ = share.loop(add_slice, init, following=True)
        finish([(top, 0, x) for top, x in zip(tops, totals, strict=True)])

    return compute


def best_tile(m: int, n: int) -> Tile:
    """The tile with the least estimated time, as `matmul_block_mosaic.best_tile`: of 128x256, or of 128x128."""
    choices = (2.0, Tile(128, 128, "N", stages=3, slots=4, raster=16)), (1.08, Tile(64, 128, stages=5))

    def cost(choice: tuple[float, Tile]) -> float:
        tiles = hopper.tiles_each(m, n, choice[1])
        return choice[0] * (tiles + math.ceil(tiles)) / 2

    return min(choices, key=cost)[1]
