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
    epilogue = hopper.Epilogue(scale, row_scale, column_scale, bias, residual)
    hopper.check_operands(a, b, out_dtype)
    hopper.check_epilogue(epilogue, a.shape[0], b.shape[0])
    tile = tile or hopper.Tile()
    k_steps = hopper.ceil_div(a.shape[1], hopper.K_STEP)

    def compute(share: hopper.Share, steps: Any, finish: Any) -> None:
        def accumulate(acc: Any) -> None:
            def body(k: jax.Array, stage: hopper.Stage, _: None) -> None:
                plgpu.wgmma(acc, stage.a(), stage.b())
                if not tile.overlap:
                    plgpu.wgmma_wait(0)
                    stage.release()
                    return
                plgpu.wgmma_wait(1)

                @pl.when(k > 0)
                def _previous() -> None:
                    stage.release(back=1)

                @pl.when(k == k_steps - 1)
                def _last() -> None:
                    plgpu.wgmma_wait(0)
                    stage.release()

            steps(body)
            finish([(0, acc[...])])

        pl.run_scoped(accumulate, plgpu.ACC((tile.rows, tile.cols), jnp.float32))

    return hopper.product(
        compute, a, b, name="fp8_matmul", tile=tile, epilogue=epilogue, out_dtype=out_dtype, interpret=interpret)  # fmt: skip
