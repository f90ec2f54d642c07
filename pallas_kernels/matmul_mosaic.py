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
        compute, a, b, name="fp8_matmul", tile=tile, epilogue=epilogue, out_dtype=out_dtype, interpret=interpret)  # fmt: skip
