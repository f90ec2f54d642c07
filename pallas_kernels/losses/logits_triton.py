"""Softmax cross-entropy of logits: row maxima and sums of exponentials, then quantized cotangents.

In: logits (M, N) fp32, bf16 or fp16; labels and weights (M,). Out: fp32 (M,) statistics; FP8 codes (M, N) and (N, M).
Hardware: Ada or newer for FP8 codes. Reference: the XLA paths of `fp8jax/ops/losses/head.py`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.dispatch import call_triton
from pallas_kernels.dispatch.call_triton import bitcast_bytes
from pallas_kernels.nonlinear import operations_triton as operations
from pallas_kernels.quantization import codec_triton as codec
from pallas_kernels.quantization import quantize_triton
from pallas_kernels.quantization import scaling_triton as scaling
from pallas_kernels.quantization import strided_tiles_triton as strided_tiles
from pallas_kernels.quantization.quantize_triton import PLAIN_DTYPES
from pallas_kernels.quantization.scaling_triton import Coding

FP8_CAPABILITY = quantize_triton.FP8_CAPABILITY
_BLOCK_M, _BLOCK_N = 4, 2048  # tile of `_exponentials`


@triton.jit
def _exponentials(
    z_ptr: tl.tensor, max_ptr: tl.tensor, sums_ptr: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    """Write the row maxima, and the row sums of exp(z - maximum), of a tile of (BLOCK_M, BLOCK_N)."""
    MASKED: tl.constexpr = M % BLOCK_M > 0 or N % BLOCK_N > 0
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    top, left = program // TILES_N * BLOCK_M, program % TILES_N * BLOCK_N
    m, n = top + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N)
    first = top.to(tl.int64) * N + left
    offsets = (tl.arange(0, BLOCK_M) * N)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    z = codec.to_fp32(scaling.load_raw(z_ptr + first, offsets, scaling.tile_mask(m, n, M, N), MASKED))
    if MASKED:
        z = tl.where(scaling.tile_mask(m, n, M, N), z, float("-inf"))
    largest = tl.reduce(z, 1, operations.larger_or_nan)
    # Subtract nothing from rows with a non-finite maximum: NaN and Inf then propagate.
    finite_max = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
    total = tl.sum(tl.exp(z - finite_max[:, None]), 1)
    part_offsets = m * TILES_N + program % TILES_N
    tl.store(max_ptr + part_offsets, largest, mask=m < M)
    tl.store(sums_ptr + part_offsets, total, mask=m < M)


def max_and_sum_exp(z: Array, *, compute_capability: int | None = None) -> tuple[Array, Array]:
    """Return the maximum of each row of logits, and its sum of exp(z - maximum), two fp32 (M,).

    The maximum is NaN if the row has a NaN. A non-finite maximum is not subtracted. `z` is (M, N), fp32, bf16 or fp16.
    """
    m, n = z.shape
    tiles_n = -(-n // _BLOCK_N)
    parts = jax.ShapeDtypeStruct((m, tiles_n), jnp.float32)
    part_max, sums = call_triton.call(
        z, kernel=_exponentials, out_shapes=[parts, parts], num_programs=-(-m // _BLOCK_M) * tiles_n, num_warps=8,
        compute_capability=compute_capability, M=m, N=n, BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N,
    )  # fmt: skip
    row_max = jnp.max(part_max, 1)
    finite = lambda x: jnp.where(jnp.isfinite(x), x, 0.0)  # noqa: E731
    return row_max, jnp.sum(sums * jnp.exp(jnp.minimum(finite(part_max) - finite(row_max)[:, None], 0.0)), 1)


@triton.jit
def _cotangents(
    z_ptr: tl.tensor, lse_ptr: tl.tensor, labels_ptr: tl.tensor, weights_ptr: tl.tensor, row_scale_ptr: tl.tensor,
    column_scale_ptr: tl.tensor, row_codes_ptr: tl.tensor, column_codes_ptr: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROW_CODING: tl.constexpr,
    COLUMN_CODING: tl.constexpr, DTYPE: tl.constexpr, TWO_Z_LOSS: tl.constexpr, LABEL_WEIGHT: tl.constexpr,
    OTHER_WEIGHT: tl.constexpr,
) -> None:  # fmt: skip
    """Write the codes of a tile (BLOCK_M, BLOCK_N), which is read as four slices of every fourth row."""
    MASKED: tl.constexpr = M % BLOCK_M > 0 or N % BLOCK_N > 0
    R: tl.constexpr = BLOCK_M // 4
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    top, left = program // TILES_N * BLOCK_M, program % TILES_N * BLOCK_N
    first = top.to(tl.int64) * N + left
    i, n = tl.arange(0, R), left + tl.arange(0, BLOCK_N)
    m0 = top + 4 * i
    slice_offsets = (4 * i * N)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    zs = strided_tiles.load_slices(z_ptr + first, slice_offsets, N, m0, n, M, N, MASKED)
    row_inverse_scale, column_inverse_scale = (
        scaling.reciprocal(tl.load(row_scale_ptr)),
        scaling.reciprocal(tl.load(column_scale_ptr)),
    )
    words = tl.zeros((R, BLOCK_N), tl.uint32)
    for j in tl.static_range(4):
        m = m0 + j
        lse = tl.load(lse_ptr + m, mask=m < M, other=0.0)[:, None]
        label = tl.load(labels_ptr + m, mask=m < M, other=-1)[:, None]
        weight = tl.load(weights_ptr + m, mask=m < M, other=0.0)[:, None]
        d = tl.exp(codec.to_fp32(zs[j], False) - lse)
        if TWO_Z_LOSS > 0:
            d = d * (1 + TWO_Z_LOSS * lse)
        d = d - tl.where(n[None, :] == label, LABEL_WEIGHT, 0.0)
        if OTHER_WEIGHT > 0:
            d = d - OTHER_WEIGHT
        d = operations.round_to_dtype(tl.where(weight == 0, 0.0, d * weight), DTYPE)
        codes = scaling.encode(d, scaling.apply_inverse_scale(d, row_inverse_scale, ROW_CODING), 0, ROW_CODING)
        scaling.store(row_codes_ptr + first, slice_offsets + j * N, codes, scaling.tile_mask(m, n, M, N), MASKED)
        codes = scaling.encode(d, scaling.apply_inverse_scale(d, column_inverse_scale, COLUMN_CODING), 0, COLUMN_CODING)
        words = strided_tiles.insert_byte(words, codes, j, N % 4 == 0)
    strided_tiles.store_transposed(column_codes_ptr, top, left, i, n, words, M, N, MASKED)


def quantize_cotangents(
    z: Array,
    lse: Array,
    labels: Array,
    weights: Array,
    *,
    rows: Coding,
    columns: Coding,
    scales: Sequence[Array],
    two_z_loss: float = 0.0,
    label_weight: float = 1.0,
    other_weight: float = 0.0,
    compute_capability: int | None = None,
) -> tuple[Array, Array]:
    """Return the quantized cotangents of logits, rounded to the dtype of `z` before they are encoded.

    The cotangents are weights * (exp(z - lse) * (1 + two_z_loss * lse) - label_weight * [label] - other_weight).

    Args:
        z: logits (M, N), fp32, bf16 or fp16.
        lse: fp32 (M,).
        labels: int32 (M,); a label outside of [0, N) matches no column.
        weights: fp32 (M,); a row of weight 0 has zero cotangents, even with NaN logits.
        rows, columns: coding of the codes and of their transposed copy: kind "tensor", FP8, round to nearest.
        scales: positive fp32 scalars, one per coding.

    Returns:
        Codes (M, N) and (N, M), in the dtypes of the codings.
    """
    launch, (m, n) = quantize_triton.QuantizeLaunch(128, 64, 4), z.shape
    codes = quantize_triton.call(
        _cotangents, [z, lse, labels, weights, *(s.reshape(1) for s in scales)],
        [jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in ((m, n), (n, m))],
        -(-m // launch.block_m) * -(-n // launch.block_n), launch, compute_capability,
        ROW_CODING=rows.constants, COLUMN_CODING=columns.constants, DTYPE=PLAIN_DTYPES.index(z.dtype),
        TWO_Z_LOSS=two_z_loss, LABEL_WEIGHT=label_weight, OTHER_WEIGHT=other_weight,
    )  # fmt: skip
    first, second = (bitcast_bytes(x, c.dtype) for x, c in zip(codes, (rows, columns), strict=True))
    return first, second
