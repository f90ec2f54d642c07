"""Block-scaled FP8 matrix product for Hopper: 1x128 by 128x128 and 1x128 by 1x128, promoted to fp32 every 128 of K."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper


def matmul_block(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype: Any = jnp.bfloat16,
    tile: hopper.Tile | None = None,
    width: int = 64,
    interpret: hopper.Interpret = None,
) -> jax.Array:
    hopper.check_operands(a, b, out_dtype)
    (m, k), n = a.shape, b.shape[0]
    blocks = hopper.ceil_div(k, hopper.K_STEP)
    epilogue = hopper.Epilogue(bias=bias, residual=residual)
    hopper.check_epilogue(epilogue, m, n)
    by_column = b_scale.shape == (n, blocks) and n > 1
    hopper.check_array("a_scale", a_scale, (m, blocks), (jnp.float32,))
    if not by_column:
        hopper.check_array("b_scale", b_scale, (hopper.ceil_div(n, 128), blocks), (jnp.float32,))
    tile = tile or hopper.Tile(rows=64, cols=128)
    starts = range(0, tile.cols, 64)
    rows = hopper.covered(m, tile.block_rows, tile.cluster == "M")
    cols = hopper.covered(n, tile.block_cols, tile.cluster == "N")
    a_scale = hopper.pad_axis(a_scale, 0, rows)
    b_scale = hopper.pad_axis(b_scale.T, 1, cols) if by_column else hopper.pad_axis(b_scale, 0, hopper.ceil_div(cols, 128))

    def compute(share: hopper.Share, steps: Any, finish: Any, a_ref: Any, b_ref: Any) -> None:
        def load(i: jax.Array) -> tuple[Any, ...]:
            row = plgpu.load(a_ref.at[pl.ds(share.row, tile.rows), i], layout=hopper.ROW, optimized=False)
            if by_column:
                return row, *(
                    plgpu.load(b_ref.at[i, pl.ds(share.col + first, 64)], layout=hopper.COLUMN, optimized=False)
                    for first in starts
                )
            return row, *(b_ref[lax.div(share.col + first, 128), i] for first in starts)

        def body(i: jax.Array, stage: hopper.Stage, carry: Any) -> Any:
            acc, (row, *columns) = carry
            following = load(jnp.minimum(i + 1, blocks - 1))

            def spread(x: jax.Array, axis: int) -> jax.Array:
                return lax.broadcast_in_dim(x, (tile.rows, 64), [axis])

            def promote(*partial: Any) -> Any:
                for first, ref in zip(range(0, tile.cols, width), partial, strict=True):
                    plgpu.wgmma(ref, stage.a(), stage.b(first, width))
                out = []
                for j, ref in enumerate(partial):
                    done = plgpu.wgmma_accumulator_load(ref, wait_n=len(partial) - 1 - j)
                    if j == len(partial) - 1:
                        stage.release()
                    for first in range(0, width, 64):
                        p = len(out)
                        scale = spread(row, 0) * spread(columns[p], 1) if by_column else spread(row * columns[p], 0)
                        out.append(acc[p] + done[:, first : first + 64] * scale)
                return tuple(out), following

            return pl.run_scoped(promote, *[plgpu.ACC((tile.rows, width), jnp.float32)] * (tile.cols // width))

        zero = plgpu.layout_cast(jnp.zeros((tile.rows, 64), jnp.float32), plgpu.Layout.WGMMA)
        acc, _ = steps(body, (tuple(zero for _ in starts), load(jnp.int32(0))))
        finish(list(zip(starts, acc, strict=True)))

    return hopper.product(
        compute, a, b, [a_scale, b_scale], name="fp8_matmul_block", tile=tile, epilogue=epilogue,
        out_dtype=out_dtype, interpret=interpret)  # fmt: skip
