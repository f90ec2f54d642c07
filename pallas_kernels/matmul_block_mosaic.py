"""Block-scaled FP8 matrix product for Hopper: 1x128 by 128x128 and 1x128 by 1x128, promoted to fp32 every 128 of K."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.hopper import Tile


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
    scales, while other products are in flight. The error on normal data is the output's own rounding (1.7e-3 in
    bfloat16). NaN of a code or scale reaches its row or column. Works under jit, scan, vmap, shard_map and jax.export;
    has no derivative. The scheme is DeepSeek-V3's (arXiv 2412.19437, section 3.3).

    Args:
        a: (M, K) float8_e4m3fn or float8_e5m2. b: (N, K), likewise, K-major. Mixed types may meet.
        a_scale: (M, ceil(K / 128)) float32, one for each row and 128 of K (1x128).
        b_scale: float32, (ceil(N / 128), ceil(K / 128)) for 128x128 blocks, or (N, ceil(K / 128)) for 1x128.
        bias: (N,) float32 or bfloat16. residual: (M, N) float32 or bfloat16, rounded to `out_dtype` first.
        out_dtype: bfloat16 or float32.
        tile, unroll: tuning; `unroll` slices of K are chained, each promoted while the next multiplies.
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
        tile, unroll = best_tile(m, n, by_column)
    # Columns that share a scale of b, or so few that registers hold their scales beside three sets of sums.
    width = 32 if by_column else math.gcd(tile.cols, 128)
    starts = range(0, tile.cols, width)
    # A fence in each slice costs a chain more than scales from device memory, a slice ahead; columns have too many.
    direct = unroll > 1 and not by_column
    streams, extras = [], []
    if direct:
        extras.append(hopper.pad_axis(a_scale, 0, hopper.covered(m, tile.block_rows, tile.cluster == "M")))
    else:
        streams.append(hopper.Stream.of(a_scale, tile.block_rows, lambda row, _: row))
    if by_column:
        streams.append(hopper.Stream.of(b_scale, tile.block_cols, lambda _, col: col))
    else:
        cols = hopper.covered(n, tile.block_cols, tile.cluster == "N")
        extras.append(hopper.pad_axis(b_scale, 0, hopper.ceil_div(cols, 128)))

    def compute(share: hopper.Share, finish: Any, *refs: Any) -> None:
        def blocks_of_b(i: jax.Array) -> list[Any]:
            return [refs[-1][lax.div(share.col + first, 128), i] for first in starts]

        def read(i: jax.Array) -> tuple[Any, ...]:
            i = lax.min(i, jnp.int32(blocks - 1))
            rows = refs[0].at[pl.ds(share.row, tile.rows), i]
            return plgpu.load(rows, layout=hopper.ROW, optimized=False), *blocks_of_b(i)

        def streamed(i: jax.Array, slot: Any) -> tuple[Any, ...]:
            return share.scales(0, slot, share.stage_row, tile.rows, hopper.ROW), *blocks_of_b(i)

        def spread(x: jax.Array, axis: int) -> jax.Array:
            return lax.broadcast_in_dim(x, (tile.rows, width), [axis])

        def promote(acc: Any, in_flight: int, partial: Any, slot: Any, scales: Any, slices: Any) -> Any:
            done = plgpu.wgmma_accumulator_load(partial, wait_n=in_flight)
            if by_column:
                row = share.scales(0, slot, share.stage_row, tile.rows, hopper.ROW)
                total = []
                for x, first in zip(acc, starts, strict=True):
                    column = share.scales(1, slot, share.stage_col + first, width, hopper.COLUMN)
                    total.append(x + done[:, first : first + width] * spread(row, 0) * spread(column, 1))
                share.scales_read()
                share.release(slot, slices)
                return tuple(total)
            share.release(slot, slices)
            row, *columns = scales
            factors = [spread(row * c, 0) for c in columns]
            return tuple(x + done[:, f : f + width] * s for x, f, s in zip(acc, starts, factors, strict=True))

        def body(i: jax.Array, slots: list[Any], carry: tuple[Any, Any]) -> tuple[Any, Any]:
            # Each partial product is promoted while the next one is in flight.
            def chain(step: int, acc: Any, ahead: Any, before: Any) -> tuple[Any, Any]:
                if step == len(slots):
                    return promote(acc, 0, *before), ahead
                slot = slots[step]
                share.wait(slot)
                scales = ahead if direct or by_column else streamed(i + step, slot)

                def issue(partial: Any) -> tuple[Any, Any]:
                    plgpu.wgmma(partial, share.a(slot), share.b(slot))
                    if not (direct or by_column):
                        share.scales_read()
                    later = read(i + step + 1) if direct else ()
                    total = acc if before is None else promote(acc, 1, *before)
                    return chain(step + 1, total, later, (partial, slot, scales, i + step + 1))

                return pl.run_scoped(issue, plgpu.ACC((tile.rows, tile.cols), jnp.float32))

            return chain(0, *carry, None)

        zero = plgpu.layout_cast(jnp.zeros((tile.rows, width), jnp.float32), plgpu.Layout.WGMMA)
        first = read(jnp.int32(0)) if direct else ()
        acc, _ = share.loop(body, (tuple(zero for _ in starts), first), unroll)
        finish(list(zip(starts, acc, strict=True)))

    return hopper.product(
        compute, a, b, streams, extras, name="fp8_matmul_block", tile=tile, epilogue=epilogue, out_dtype=out_dtype,
        interpret=interpret,
    )  # fmt: skip


def best_tile(m: int, n: int, by_column: bool = False) -> tuple[Tile, int]:
    """Tile and `unroll` with the least estimated time: waves of tiles times a slice's, as measured on an H200.

    With blocks of b, three warpgroups multiplied 1.13 times as fast as two with tiles of 128 x 128, at the power limit;
    with scales of columns a slice takes 1.47 times as long in the wider tile.
    """

    def cost(choice: tuple[float, Tile, int]) -> float:
        slice_time, tile, _ = choice
        tiles = hopper.ceil_div(m, tile.block_rows) * hopper.ceil_div(n, tile.block_cols)
        return slice_time * hopper.ceil_div(tiles, hopper.multiprocessors())

    cluster = hopper.pairing(m, 128)
    if by_column:
        choices = [(1.47, Tile(64, 192, cluster=cluster, lead=1), 1), (1.0, Tile(64, 128, stages=5), 4)]
    else:
        three = Tile(64, 128, cluster=hopper.pairing(n, 128, "N"), warpgroups=3)
        choices = [(1.5 / 1.13, three, 1), (1.0, Tile(64, 128, stages=6, cluster=cluster), 8)]
    return min(choices, key=cost)[1:]
