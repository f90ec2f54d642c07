"""Two-level microscaled FP8 product: E8M0 exponents of the left operand, applied per 32 of K.

In: FP8 codes (M, K) and (N, K), uint8 exponents (M, ceil(K / 32)). Out: (M, N) bf16 or fp32. Hardware: Hopper.
Reference: `_reference` in fp8jax/ops/matmul/matmul.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul import hopper
from pallas_kernels.matmul.hopper_wgmma import finish_product, start_product

GROUP_SIZE = 32
GROUPS_PER_STEP = hopper.K_STEP // GROUP_SIZE


def matmul_mx(
    a: jax.Array,
    b: jax.Array,
    a_exponent: jax.Array,
    *,
    scale: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    column_scale: jax.Array | None = None,
    out_dtype: Any = jnp.bfloat16,
    tile: hopper.Tile | None = None,
    interpret: hopper.Interpret = None,
) -> jax.Array:
    """Return `(a * 2^(a_exponent - 127)) @ b.T`, with scales as in `matmul_mosaic.matmul`.

    The left operand is microscaled: an fp32 outer scale per tensor (`scale`) or per row (`row_scale`), and a power of
    two per 32 of K (MOSS, section 3.1). Partial sums over 32, times their power of two, are added to an fp32
    accumulator. Byte 0 stands for 0, because XLA flushes subnormals. Byte 255 (NaN) results in infinity or NaN.

    Args:
        a: (M, K) float8_e4m3fn or float8_e5m2. b: (N, K), also K-major.
        a_exponent: (M, ceil(K / 32)) uint8, biased exponents (E8M0).
        tile: tuning; tiles of 64 rows.

    Other arguments, the result, transformations and errors are those of `matmul_mosaic.matmul`.
    """
    epilogue = hopper.Epilogue(scale, row_scale, column_scale)
    hopper.check_operands(a, b, out_dtype)
    (m, k), n = a.shape, b.shape[0]
    hopper.check_epilogue(epilogue, m, n)
    hopper.check_array("a_exponent", a_exponent, (m, hopper.ceil_div(k, GROUP_SIZE)), (jnp.uint8,))
    tile = tile or hopper.Tile(64, 128, num_stages=5, cluster=hopper.choose_cluster(m, 128))
    if tile.rows != 64:
        raise ValueError(f"{tile} has {tile.rows} rows; microscaled products need 64")
    stream = hopper.Stream.from_slices(_exponent_words(a_exponent, k), tile.block_rows, lambda position: position.row)
    return hopper.pipelined_matmul(
        _make_compute(tile, interpret), a, b, [stream], name="fp8_matmul_mx", tile=tile, epilogue=epilogue,
        out_dtype=out_dtype, use_inline_wgmma=True, interpret=interpret,
    )  # fmt: skip


def _exponent_words(exponent: jax.Array, k: int) -> jax.Array:
    """Convert (M, ceil(K / 32)) bytes to (M, ceil(K / 128)) int32: four groups per word, the first lowest."""
    steps = hopper.ceil_div(k, hopper.K_STEP)
    exponent = hopper.pad_axis(exponent, 1, steps * GROUPS_PER_STEP)
    return lax.bitcast_convert_type(exponent.reshape(exponent.shape[0], steps, GROUPS_PER_STEP), jnp.int32)


def _make_compute(tile: hopper.Tile, interpret: hopper.Interpret) -> Any:
    def start_group_product(pipeline: hopper.WarpgroupPipeline, slot: Any, group: Any) -> jax.Array:
        if interpret is None:
            return start_product(pipeline.a(slot), pipeline.b(slot, transposed=False), [group])
        return _reference_product(pipeline.a(slot), pipeline.b(slot, transposed=False), group)

    def finish_group_product(sums: jax.Array, in_flight: int) -> jax.Array:
        return sums if interpret is not None else finish_product(sums, in_flight)

    def compute(pipeline: hopper.WarpgroupPipeline, finish: Any) -> None:
        def promote(acc: jax.Array, in_flight: int, sums: jax.Array, word: jax.Array, group: int, *slice_: Any) -> Any:
            finished = finish_group_product(sums, in_flight)
            if group == GROUPS_PER_STEP - 1:
                pipeline.release(*slice_)
            byte = lax.shift_right_logical(word, jnp.int32(8 * group)) & jnp.int32(255)
            scale = lax.bitcast_convert_type(byte << jnp.int32(23), jnp.float32)
            return acc + finished * lax.broadcast_in_dim(scale, acc.shape, [0])

        def body(i: jax.Array, slots: list[Any], acc: jax.Array) -> jax.Array:
            pending: Any = None
            for step, slot in enumerate(slots):
                pipeline.wait(slot)
                word = pipeline.load_scales(0, slot, pipeline.stage_row, tile.rows, hopper.ROW_LAYOUT)
                for group in range(GROUPS_PER_STEP):
                    sums = start_group_product(pipeline, slot, group)
                    if group == 0:
                        pipeline.fence_scale_reads()
                    # Promote each partial product while the next one is in flight.
                    acc = acc if pending is None else promote(acc, 1, *pending)
                    pending = sums, word, group, slot, i + step + 1
            return promote(acc, 0, *pending)

        zero = plgpu.layout_cast(jnp.zeros((tile.rows, tile.cols), jnp.float32), plgpu.Layout.WGMMA)
        finish([(0, 0, pipeline.loop_over_k(body, zero, unroll=2))])

    return compute


def _reference_product(a: Any, b: Any, group: int) -> jax.Array:
    """Return the result of `start_product` and `finish_product`, in jnp, for the interpreter."""
    left, right = (x[...].astype(jnp.float32)[:, GROUP_SIZE * group : GROUP_SIZE * (group + 1)] for x in (a, b))
    plgpu.commit_smem()
    return lax.dot_general(left, right, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
