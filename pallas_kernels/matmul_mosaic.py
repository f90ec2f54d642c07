"""Scaled FP8 matrix product for Hopper: e4m3 or e5m2 operands, one fp32 accumulator, scales in the epilogue."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper


def matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    scale: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    column_scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype: Any = jnp.bfloat16,
    tile: hopper.Tile | None = None,
    interpret: hopper.Interpret = None,
) -> jax.Array:
    """`(a @ b.T) * scale * row_scale[:, None] * column_scale[None, :] + bias + residual` in one kernel.

    The tensor cores add the products of a row of K with about 14 bits (fast accumulation): 3e-3 relative on normal data,
    whatever K. A NaN of an operand or factor reaches its row, column or the whole output. The result does not depend
    on the batch or on the other rows. Works under jit, scan, vmap, shard_map and jax.export; has no derivative.

    Args:
        a: (M, K) float8_e4m3fn or float8_e5m2. b: (N, K), likewise, K-major as Hopper wants it. Mixed types may meet.
        scale: () float32, the product of both per-tensor scales. row_scale: (M,) float32. column_scale: (N,) float32.
        bias: (N,) float32 or bfloat16. residual: (M, N) float32 or bfloat16, rounded to `out_dtype` first.
        out_dtype: bfloat16 or float32.
        tile: tuning; None chooses by the shape. interpret: interpreter parameters, to run on CPU.

    Returns:
        (M, N) in `out_dtype`. K not a multiple of 16 copies both operands, N not a multiple of 8 (bfloat16) or 4
        (float32) copies the output.

    Raises:
        TypeError, ValueError: a dtype or shape other than these. NotImplementedError: jax < 0.11.
    """
    epilogue = hopper.Epilogue(scale, row_scale, column_scale, bias, residual)
    hopper.check_operands(a, b, out_dtype)
    (m, k), n = a.shape, b.shape[0]
    hopper.check_epilogue(epilogue, m, n)
    tile = tile or best_tile(m, n, k, jnp.dtype(out_dtype).itemsize)

    def compute(share: hopper.Share, finish: Any) -> None:
        def accumulate(acc: Any) -> None:
            def body(i: jax.Array, slots: list[Any], before: jax.Array) -> jax.Array:
                (slot,) = slots
                share.wait(slot)
                plgpu.wgmma(acc, share.a(slot), share.b(slot))
                plgpu.wgmma_wait(1)

                @pl.when(i > 0)
                def _previous_slice_is_done() -> None:
                    share.release(before)

                return slot

            last = share.loop(body, jnp.int32(0))
            plgpu.wgmma_wait(0)
            share.release(last)
            finish([(0, acc[...])])

        pl.run_scoped(accumulate, plgpu.ACC((tile.rows, tile.cols), jnp.float32))

    return hopper.product(
        compute, a, b, name="fp8_matmul", tile=tile, epilogue=epilogue, out_dtype=out_dtype, interpret=interpret
    )


def best_tile(m: int, n: int, k: int, out_bytes: int) -> hopper.Tile:
    """The tile with the least estimated time: waves of tiles times what a tile costs.

    A 128-deep step costs a tile the larger of its tensor-core cycles and its shared-memory cycles (operands written once
    and read for every 64 rows, 128 bytes a cycle). Tiles of one warpgroup hide their epilogue behind the other's
    products; a shared tile adds it, about 5000 cycles as measured on an H200.
    """
    steps = hopper.ceil_div(k, hopper.K_STEP)

    def cost(tile: hopper.Tile) -> float:
        tiles = hopper.ceil_div(m, tile.block_rows) * hopper.ceil_div(n, tile.block_cols)
        waves = hopper.ceil_div(tiles, hopper.multiprocessors())
        read = tile.block_rows + tile.block_cols * tile.block_rows // 64
        shared = (tile.block_rows + tile.block_cols + read) * hopper.K_STEP / 128
        return waves * (steps * max(shared, tile.block_rows * tile.block_cols / 32) + 5000 * (tile.split is not None))

    turns = [(128, 6), (160, 5), (192, 4)]
    candidates = [hopper.Tile(128, c, None, s, cluster=hopper.pairing(m, 128)) for c, s in turns]
    return min([*candidates, hopper.Tile(64, 256, "M", 4)], key=cost)
