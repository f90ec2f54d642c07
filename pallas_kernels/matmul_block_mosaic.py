"""Block-scaled FP8 matrix product for Hopper: 1x128 by 128x128 and 1x128 by 1x128, promoted to fp32 every 128 of K."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.hopper import Tile

# Of a thread of the memory warpgroup and of the others. With more the assembler starts a pass before it has added the
# sums of the one before, and spills.
TWO_PASSES = (72, 216)


def matmul_block(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype: Any = jnp.bfloat16,
    tile: Tile | None = None,
    unroll: int = 1,
    interpret: hopper.Interpret = None,
) -> jax.Array:
    """`dequantize(a) @ dequantize(b).T + bias + residual` with a scale for every 128 of K, promoted to fp32 every 128.

    The tensor cores add 128 products with about 14 bits; each partial sum then enters an fp32 accumulator times its two
    scales, while products of the other warpgroups are in flight. The error on normal data is the output's own rounding
    (1.7e-3 in bfloat16). NaN of a code or scale reaches its row or column. Works under jit, scan, vmap, shard_map and
    jax.export; has no derivative. The scheme is DeepSeek-V3's (arXiv 2412.19437, section 3.3).

    Args:
        a: (M, K) float8_e4m3fn or float8_e5m2. b: (N, K), likewise, K-major. Mixed types may meet.
        a_scale: (M, ceil(K / 128)) float32, one for each row and 128 of K (1x128).
        b_scale: float32, (ceil(N / 128), ceil(K / 128)) for 128x128 blocks, or (N, ceil(K / 128)) for 1x128.
        bias: (N,) float32 or bfloat16. residual: (M, N) float32 or bfloat16, rounded to `out_dtype` first.
        out_dtype: bfloat16 or float32.
        tile, unroll: tuning; None chooses both by the shape. unroll: slices of K between two jumps.
        interpret: interpreter parameters, to run on CPU.

    Returns:
        (M, N) in `out_dtype`; copies for odd K and N as in `matmul_mosaic.matmul`.

    Raises:
        TypeError, ValueError: a dtype or shape other than these. NotImplementedError: jax < 0.11.
    """
    hopper.check_operands(a, b, out_dtype)
    (m, k), n = a.shape, b.shape[0]
    blocks = hopper.ceil_div(k, hopper.K_STEP)
    epilogue = hopper.Epilogue(bias=bias, residual=residual)
    hopper.check_epilogue(epilogue, m, n)
    by_column = b_scale.shape == (n, blocks) and n > 1
    hopper.check_array("a_scale", a_scale, (m, blocks), (jnp.float32,))
    if not by_column:
        hopper.check_array("b_scale", b_scale, (hopper.ceil_div(n, 128), blocks), (jnp.float32,))
    if tile is None:
        plain = out_dtype == jnp.bfloat16 and bias is None and residual is None
        tile, unroll = best_tile(m, n, by_column, plain)
    streams = [hopper.Stream.of_slices(a_scale, tile.block_rows, lambda row, _: row)]
    if by_column:
        streams.append(hopper.Stream.of_slices(b_scale, tile.block_cols, lambda _, col: col))
    else:
        # A tile that starts within a block reaches into one more.
        rows = hopper.ceil_div(tile.block_cols, 128) + (tile.block_cols % 128 > 0)
        streams.append(hopper.Stream.of_rows(b_scale, rows, lambda _, col: lax.div(col, 128)))
    registers = TWO_PASSES if tile.rows > 64 and tile.warpgroups == 2 and not by_column else None
    return hopper.product(
        _compute(tile, unroll, by_column), a, b, streams, name="fp8_matmul_block", tile=tile,
        epilogue=epilogue, out_dtype=out_dtype, registers=registers, interpret=interpret,
    )  # fmt: skip


def _compute(tile: Tile, unroll: int, by_column: bool) -> Any:
    """Products of 64 rows after 64, so that the sums of one pass only wait beside the accumulators.

    Each slice is awaited while the last products of the one before are in flight: between two passes a warpgroup's
    tensor cores idle for what is done there.
    """
    width = math.gcd(tile.cols, 64 if by_column else 128)  # columns promoted at a time; those of a block share a scale
    tops, starts = range(0, tile.rows, 64), range(0, tile.cols, width)

    def compute(share: hopper.Share, finish: Any) -> None:
        first_block = lax.div(share.col - share.stage_col, 128)

        def spread(x: jax.Array, axis: int) -> jax.Array:
            return lax.broadcast_in_dim(x, (64, width), [axis])

        def add_slice(i: jax.Array, slot: Any, following: Any, acc: tuple[Any, ...]) -> tuple[Any, ...]:
            rows = [share.scales(0, slot, share.stage_row + top, 64, hopper.ROW) for top in tops]
            blocks = [] if by_column else [lax.div(share.col + first, 128) - first_block for first in starts]
            columns = [share.scale(1, slot, block, i) for block in blocks]

            def factor(row: jax.Array, part: int) -> jax.Array:
                if not by_column:
                    return spread(row * columns[part], 0)
                start = share.stage_col + starts[part]
                return spread(row, 0) * spread(share.scales(1, slot, start, width, hopper.COLUMN), 1)

            def add_rows(top: int, total: Any, partial: Any) -> Any:
                row, last = rows[top // 64], top == tops[-1]
                plgpu.wgmma(partial, share.a(slot, top, 64), share.b(slot))
                if last and not by_column:
                    share.scales_read()
                if last and following is not None:
                    share.wait(following)
                done = plgpu.wgmma_accumulator_load(partial, wait_n=0)
                if last and not by_column:
                    share.release(slot, i + 1)
                parts = enumerate(zip(total, starts, strict=True))
                total = tuple(x + done[:, first : first + width] * factor(row, part) for part, (x, first) in parts)
                if last and by_column:
                    share.scales_read()
                    share.release(slot, i + 1)
                return total

            sums = plgpu.ACC((64, tile.cols), jnp.float32)
            passes = zip(tops, acc, strict=True)
            return tuple(pl.run_scoped(functools.partial(add_rows, top, total), sums) for top, total in passes)

        def body(i: jax.Array, slots: list[Any], acc: tuple[Any, ...]) -> tuple[Any, ...]:
            for step, (slot, following) in enumerate(itertools.pairwise(slots)):
                acc = add_slice(i + step, slot, following, acc)
            return acc

        zero = plgpu.layout_cast(jnp.zeros((64, width), jnp.float32), plgpu.Layout.WGMMA)
        share.wait(share.stage)
        acc = share.loop(body, tuple(tuple(zero for _ in starts) for _ in tops), unroll, following=True)
        finish([(top, f, x) for top, row in zip(tops, acc, strict=True) for f, x in zip(starts, row, strict=True)])

    return compute


def best_tile(m: int, n: int, by_column: bool = False, plain: bool = True) -> tuple[Tile, int]:
    """Tile and `unroll` with the least estimated time: waves of tiles times a slice's, as measured on an H200.

    Two warpgroups in two passes have the largest tiles; those of three or of a single pass may leave fewer
    multiprocessors idle. With blocks of b, two passes are for a plain output, in bfloat16 without bias or residual:
    with these they spill. Clusters gain nothing: what multicast saves, a release by one thread for all costs.
    """
    choices = [(1.48, Tile(64, 128, warpgroups=3), 1), (1.06, Tile(64, 128, stages=5), 1)]
    if by_column or plain:
        choices.append((2.0, Tile(128, 128, stages=3, slots=4), 1 if by_column else 4))
    return min(choices, key=lambda choice: choice[0] * hopper.waves(m, n, choice[1]))[1:]
