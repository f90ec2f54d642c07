"""Scaled 8-bit matrix product: one accumulator over K, scales in the epilogue.

In: FP8 or int8 (M, K) and (N, K), K-major. Out: (M, N) bf16 or fp32. Hardware: Hopper. Reference: `_reference` in
fp8jax/ops/matmul/matmul.py.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul import hopper

SLICES_PER_PROMOTION = 4  # slices of 128 between promotions to fp32
MAX_INT8_K = 2**31 // 128**2 - 1  # largest K whose int8 sums fit in int32


def matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    scale: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    column_scale: jax.Array | None = None,
    out_dtype: Any = jnp.bfloat16,
    fast: bool = True,
    tile: hopper.Tile | None = None,
    interpret: hopper.Interpret = None,
) -> Any:
    """Return `(a @ b.T) * scale * row_scale[:, None] * column_scale[None, :]`.

    The tensor cores add FP8 products along K with about 14 bits. With `fast`, they do so over all of K; otherwise sums
    over 512 are promoted to fp32. Sums of int8 are exact in int32, and rounded to fp32 once. NaN in an operand or
    factor propagates to its row, its column or the whole output. Rows are independent of each other. Works under jit,
    scan, vmap, shard_map and jax.export; has no derivative.

    Args:
        a: (M, K) float8_e4m3fn, float8_e5m2 or int8.
        b: (N, K), also K-major. The two FP8 types may differ; int8 needs int8, and K up to 131,071.
        scale: () float32, the product of both per-tensor scales. row_scale: (M,) float32. column_scale: (N,) float32.
        out_dtype: bfloat16 or float32.
        fast: whether FP8 products use fast accumulation.
        tile: tuning; None selects it by shape. interpret: interpreter parameters, to run on CPU.

    Returns:
        (M, N) in `out_dtype`. Operands are copied unless M and N are multiples of 8, and K of 128. The output is copied
        unless M is a multiple of 8, and N a larger multiple of 64 (bfloat16) or 32 (float32).

    Raises:
        TypeError, ValueError: a dtype or shape other than these. NotImplementedError: jax < 0.11.
    """
    epilogue = hopper.Epilogue(scale, row_scale, column_scale)
    is_int8 = a.dtype == jnp.int8
    hopper.check_operands(a, b, out_dtype, (jnp.int8,) if is_int8 else hopper.FP8_DTYPES)
    (m, k), n = a.shape, b.shape[0]
    if is_int8:
        check_int8_k(k)
    fast = fast or is_int8  # int32 sums are exact
    hopper.check_epilogue(epilogue, m, n)
    tile = tile or best_tile(m, n, k, fast)
    return hopper.pipelined_matmul(
        make_compute(tile, jnp.int32 if is_int8 else jnp.float32, fast),
        a,
        b,
        name="int8_matmul" if is_int8 else "fp8_matmul" if fast else "fp8_matmul_promoted",
        tile=tile,
        epilogue=epilogue,
        out_dtype=out_dtype,
        interpret=interpret,
    )


def check_int8_k(k: int) -> None:
    """Raise ValueError unless int32 holds sums of K products of int8."""
    if k > MAX_INT8_K:
        raise ValueError(f"K is {k}: int32 holds sums of {MAX_INT8_K} products of int8; split K")


def make_compute(tile: hopper.Tile, accumulator_dtype: Any, fast: bool) -> Any:
    """Return the `compute` function: one accumulator over K with `fast`, otherwise sums over 512, promoted to fp32."""
    shape = (tile.rows, tile.cols)

    def accumulate_fast(pipeline: hopper.WarpgroupPipeline, finish: Any) -> None:
        """Add all products of K in the accumulator of the tensor cores."""

        def accumulate(acc: Any) -> None:
            def body(i: jax.Array, slots: list[Any], previous_slot: jax.Array) -> jax.Array:
                (slot,) = slots
                pipeline.wait(slot)
                plgpu.wgmma(acc, pipeline.a(slot), pipeline.b(slot))
                plgpu.wgmma_wait(1)

                @pl.when(i > 0)
                def _previous_slice_is_done() -> None:
                    pipeline.release(previous_slot, i)

                return slot

            last = pipeline.loop_over_k(body, jnp.int32(0))
            plgpu.wgmma_wait(0)
            pl.when(pipeline.k_steps > 0)(lambda: pipeline.release(last, pipeline.k_steps))
            finish([(0, 0, acc[...])])

        pl.run_scoped(accumulate, plgpu.ACC(shape, accumulator_dtype))

    width = math.gcd(tile.cols, 64)  # in parts, sums need fewer registers
    column_starts = range(0, tile.cols, width)

    def accumulate_promoted(pipeline: hopper.WarpgroupPipeline, finish: Any) -> None:
        def body(i: jax.Array, slots: list[Any], total: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            def multiply_slices(partial: Any) -> tuple[jax.Array, ...]:
                for step, slot in enumerate(slots):
                    pipeline.wait(slot)
                    plgpu.wgmma(partial, pipeline.a(slot), pipeline.b(slot))
                    if step:
                        plgpu.wgmma_wait(1)
                        pipeline.release(slots[step - 1], i + step)
                sums = plgpu.wgmma_accumulator_load(partial, wait_n=0)
                pipeline.release(slots[-1], i + len(slots))
                return tuple(x + sums[:, f : f + width] for x, f in zip(total, column_starts, strict=True))

            return pl.run_scoped(multiply_slices, plgpu.ACC(shape, jnp.float32))

        zero = plgpu.layout_cast(jnp.zeros((tile.rows, width), jnp.float32), plgpu.Layout.WGMMA)
        total = pipeline.loop_over_k(body, tuple(zero for _ in column_starts), unroll=SLICES_PER_PROMOTION)
        finish([(0, first, x) for first, x in zip(column_starts, total, strict=True)])

    return accumulate_fast if fast else accumulate_promoted


def best_tile(m: int, n: int, k: int, fast: bool = True) -> hopper.Tile:
    """Return the tile of least estimated time: number of waves times the cost of a tile.

    A 128-deep step costs its tensor-core cycles, and slightly more in narrow tiles. Alternating warpgroups, each with
    128 rows and at most 192 columns, hide their epilogues; a shared tile adds its own.
    """
    steps = hopper.ceil_div(k, hopper.K_STEP)

    def cost(tile: hopper.Tile) -> float:
        cycles = tile.block_rows * tile.block_cols / 32 * {128: 1.08, 160: 1.04, 192: 1.01}.get(tile.cols, 1.0)
        return hopper.num_waves(m, n, tile) * (steps * cycles + 2000 * (tile.split is not None))

    if not fast:  # twice the accumulators: the warpgroups share a tile
        return hopper.Tile(64, 128, num_stages=6, cluster=hopper.choose_cluster(m, 128), lead_slices=2)
    alternating_tiles = [
        hopper.Tile(
            128, columns, None, stages, cluster=hopper.choose_cluster(n, columns, "N") or hopper.choose_cluster(m, 128)
        )
        for columns, stages in ((128, 6), (160, 5), (192, 4))
    ]
    return min([*alternating_tiles, hopper.Tile()], key=cost)
