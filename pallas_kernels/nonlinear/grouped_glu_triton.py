"""GLU of the rows of groups, with gate and up side by side: residuals and codes, forward and backward.

In: gate and up (M, 2 N), fp32, bf16 or fp16, or their codes in groups along the rows. Out: FP8 codes (M, N) and
(M, 2 N), and transposed codes on a token axis with a multiple of 128 tokens per group. Hardware: Ada or newer.
Reference: fp8jax/ops/quantization/glu_reference.py.

Rows have factors in place of scales: the inverse of a group's scale, times a weight of the row.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.dispatch.call_triton import bitcast_bytes
from pallas_kernels.nonlinear import operations_triton as ops
from pallas_kernels.nonlinear.operations_triton import Operation
from pallas_kernels.quantization import codec_triton as codec
from pallas_kernels.quantization import quantize_triton
from pallas_kernels.quantization import scaling_triton as scaling
from pallas_kernels.quantization import storage_triton as storage
from pallas_kernels.quantization import strided_tiles_triton as strided_tiles
from pallas_kernels.quantization.quantize_groups_triton import BLOCK
from pallas_kernels.quantization.quantize_triton import QuantizeLaunch

FP8_CAPABILITY = quantize_triton.FP8_CAPABILITY
_PLACEHOLDER = np.ones((1, 1), np.float32)


class Cotangents(NamedTuple):
    """Codes of the cotangent of gate and up, and transposed codes of the result.

    Attributes:
        rows: (M, 2 N).
        columns: (2 N, tokens).
        result_columns: (N, tokens).
    """

    rows: Array
    columns: Array
    result_columns: Array


@triton.jit
def _load(
    first_ptr: tl.tensor, scale_ptr: tl.tensor, gradient_ptr: tl.tensor, m: tl.tensor, left: tl.tensor, n: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, OPERATION: tl.constexpr, BACKWARD: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the operands of `operations_triton.compute_cotangents` for rows `m`; zeros for rows from M on."""
    WIDTH: tl.constexpr = 2 * N
    row = m.to(tl.int64)[:, None]
    gate = ops.load_codes_and_scales(
        first_ptr, scale_ptr, 0, row * WIDTH + n[None, :], m, left, n, M, WIDTH, True, OPERATION
    )
    up = ops.load_codes_and_scales(
        first_ptr, scale_ptr, 0, row * WIDTH + (n + N)[None, :], m, left + N, n + N, M, WIDTH, True, OPERATION
    )
    dy = gate[0][0]
    if BACKWARD:
        dy = scaling.load_raw(gradient_ptr, row * N + n[None, :], scaling.tile_mask(m, n, M, N), True)
    return dy, gate, up, gate


@triton.jit
def _row_statistics(
    first_ptr: tl.tensor, scale_ptr: tl.tensor, gradient_ptr: tl.tensor, amax_ptr: tl.tensor, dot_ptr: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPERATION: tl.constexpr,
    BACKWARD: tl.constexpr, CODING: tl.constexpr,
) -> None:  # fmt: skip
    """Store the amax of each row of the result, or of its cotangents and the product of gradient and result."""
    m = scaling.reversed_program_id() * BLOCK_M + tl.arange(0, BLOCK_M)
    amax_keys = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for left in range(0, N, BLOCK_N):
        n = left + tl.arange(0, BLOCK_N)
        x = _load(first_ptr, scale_ptr, gradient_ptr, m, left, n, M, N, OPERATION, BACKWARD)
        if BACKWARD:
            dgate, dup, y = ops.compute_cotangents(x, OPERATION, OPERATION.dtype)
            products = tl.fma(x[0].to(tl.float32), y, products)
            amax_keys = tl.maximum(amax_keys, scaling.magnitude_key(dgate, CODING))
            amax_keys = tl.maximum(amax_keys, scaling.magnitude_key(dup, CODING))
        else:
            y, _ = ops.activation_and_slope(ops.decode_loaded(x[1], OPERATION), OPERATION.activation)
            y = ops.round_to_dtype(y * ops.decode_loaded(x[2], OPERATION), OPERATION.dtype)
            amax_keys = tl.maximum(amax_keys, scaling.magnitude_key(y, CODING))
    amax = scaling.magnitude_from_key(tl.max(amax_keys, 1), CODING)
    tl.store(amax_ptr + m, amax, mask=m < M)
    if BACKWARD:
        tl.store(dot_ptr + m, tl.sum(products, 1), mask=m < M)


@triton.jit
def _encode(
    gate_up_ptr: tl.tensor, factor_ptr: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, result_ptr: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPERATION: tl.constexpr,
    RESIDUAL_CODING: tl.constexpr, RESULT_CODING: tl.constexpr,
) -> None:  # fmt: skip
    """Store the residuals of a tile of gate and up, and the codes of the result."""
    MASKED: tl.constexpr = M % BLOCK_M > 0
    WIDTH: tl.constexpr = 2 * N
    TILES_N: tl.constexpr = N // BLOCK_N
    program = scaling.reversed_program_id()
    top, left = program // TILES_N * BLOCK_M, program % TILES_N * BLOCK_N
    i, m, n = tl.arange(0, BLOCK_M), top + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N)
    first, mask = top.to(tl.int64) * WIDTH + left, scaling.tile_mask(m, n, M, N)
    offsets = (i * WIDTH)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    gate = codec.to_fp32(scaling.load_raw(gate_up_ptr + first, offsets, mask, MASKED))
    up = codec.to_fp32(scaling.load_raw(gate_up_ptr + first + N, offsets, mask, MASKED))
    ops.store_group_quantized(
        gate, codes_ptr, scales_ptr, first, offsets, m, left, n, M, WIDTH, MASKED, RESIDUAL_CODING, False
    )
    ops.store_group_quantized(
        up, codes_ptr, scales_ptr, first + N, offsets, m, left + N, n + N, M, WIDTH, MASKED, RESIDUAL_CODING, False
    )
    y, _ = ops.activation_and_slope(gate, OPERATION.activation)
    y = ops.round_to_dtype(y * up, OPERATION.dtype)
    factor = tl.load(factor_ptr + m, mask=m < M, other=0.0)[:, None]
    codes = scaling.encode(y, scaling.apply_inverse_scale(y, factor, RESULT_CODING), 0, RESULT_CODING)
    result_offsets = (i * N)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    scaling.store(result_ptr + (top.to(tl.int64) * N + left), result_offsets, codes, mask, MASKED)


@triton.jit
def _quantize_cotangents(
    first_ptr: tl.tensor, scale_ptr: tl.tensor, gradient_ptr: tl.tensor, block_ptr: tl.tensor, factor_ptr: tl.tensor,
    result_factor_ptr: tl.tensor, rows_ptr: tl.tensor, columns_ptr: tl.tensor, result_ptr: tl.tensor, M: tl.constexpr,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    OPERATION: tl.constexpr, CODING: tl.constexpr, RESULT_CODING: tl.constexpr,
) -> None:  # fmt: skip
    """Store the codes of a tile of tokens of one group, in slices of every fourth row."""
    WIDTH: tl.constexpr = 2 * N
    TILES_N: tl.constexpr = N // BLOCK_N
    program = tl.program_id(0)
    top, left = program // TILES_N * BLOCK_M, program % TILES_N * BLOCK_N
    block = top // BLOCK_SIZE
    row_count = tl.load(block_ptr + TOKENS // BLOCK_SIZE + block)
    i, n = tl.arange(0, BLOCK_M // 4), left + tl.arange(0, BLOCK_N)
    row_in_block = top % BLOCK_SIZE + 4 * i
    row = tl.load(block_ptr + block) + row_in_block
    m0 = tl.where(row_in_block < row_count, row, M)
    m1 = tl.where(row_in_block + 1 < row_count, row + 1, M)
    m2 = tl.where(row_in_block + 2 < row_count, row + 2, M)
    m3 = tl.where(row_in_block + 3 < row_count, row + 3, M)
    # All loads come before the first store.
    x0 = _load(first_ptr, scale_ptr, gradient_ptr, m0, left, n, M, N, OPERATION, True)
    x1 = _load(first_ptr, scale_ptr, gradient_ptr, m1, left, n, M, N, OPERATION, True)
    x2 = _load(first_ptr, scale_ptr, gradient_ptr, m2, left, n, M, N, OPERATION, True)
    x3 = _load(first_ptr, scale_ptr, gradient_ptr, m3, left, n, M, N, OPERATION, True)
    slices, rows = (x0, x1, x2, x3), (m0, m1, m2, m3)
    gate_words = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.uint32)
    up_words = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.uint32)
    result_words = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.uint32)
    for j in tl.static_range(4):
        dgate, dup, y = ops.compute_cotangents(slices[j], OPERATION, OPERATION.dtype)
        m = rows[j]
        mask = (m < M)[:, None] & (n < N)[None, :]
        offsets = m.to(tl.int64)[:, None] * WIDTH + n[None, :]
        factor = tl.load(factor_ptr + m, mask=m < M, other=0.0)[:, None]
        codes = scaling.encode(dgate, scaling.apply_inverse_scale(dgate, factor, CODING), 0, CODING)
        tl.store(rows_ptr + offsets, codes, mask=mask)
        gate_words = strided_tiles.insert_byte(gate_words, codes, j, N % 4 == 0)
        codes = scaling.encode(dup, scaling.apply_inverse_scale(dup, factor, CODING), 0, CODING)
        tl.store(rows_ptr + offsets + N, codes, mask=mask)
        up_words = strided_tiles.insert_byte(up_words, codes, j, N % 4 == 0)
        factor = tl.load(result_factor_ptr + m, mask=m < M, other=0.0)[:, None]
        codes = scaling.encode(y, scaling.apply_inverse_scale(y, factor, RESULT_CODING), 0, RESULT_CODING)
        result_words = strided_tiles.insert_byte(result_words, codes, j, N % 4 == 0)
    strided_tiles.store_transposed(columns_ptr, top, left, i, n, gate_words, TOKENS, WIDTH, False)
    strided_tiles.store_transposed(columns_ptr, top, left + N, i, n, up_words, TOKENS, WIDTH, False)
    strided_tiles.store_transposed(result_ptr, top, left, i, n, result_words, TOKENS, N, False)


def _block_n(n: int, largest: int, smallest: int) -> int:
    """Return the widest tile, a power of two, that divides n channels and has whole groups of `smallest`."""
    return next(size for size in (largest, largest // 2, largest // 4, largest // 8, smallest) if n % size == 0)


def row_statistics(
    operation: Operation,
    gate_up: Array,
    scales: Array | None = None,
    gradient: Array | None = None,
    *,
    launch: QuantizeLaunch | None = None,
    compute_capability: int | None = None,
) -> tuple[Array, Array | None]:
    """Return the largest finite magnitude of each row.

    Args:
        operation: the activation; it reads arrays or codes.
        gate_up: (M, 2 N), gate and up, or their codes.
        scales: of the codes, (M, 2 N / group), or None.
        gradient: of the result, (M, N), or None.

    Returns:
        fp32 (M,), of the result, and None. With a gradient, of the cotangents of gate and up, and the scalar products
        of gradient and result, fp32 (M,).
    """
    m, n = gate_up.shape[0], gate_up.shape[1] // 2
    launch = launch or QuantizeLaunch(4, _block_n(n, 256, 16), 4)
    has_gradient = gradient is not None
    amax, dots = quantize_triton.call(
        _row_statistics,
        [bitcast_bytes(gate_up, jnp.uint8), *(_PLACEHOLDER if x is None else x for x in (scales, gradient))],
        [jax.ShapeDtypeStruct((m,), jnp.float32), jax.ShapeDtypeStruct((m if has_gradient else 1,), jnp.float32)],
        -(-m // launch.block_m), launch, compute_capability, shape=(m, n), OPERATION=operation, BACKWARD=has_gradient,
        CODING=scaling.NO_CODING,
    )  # fmt: skip
    return amax, dots if has_gradient else None


def encode(
    operation: Operation,
    gate_up: Array,
    factor: Array,
    coding: scaling.Coding | None,
    dtype: Any,
    *,
    launch: QuantizeLaunch | None = None,
    compute_capability: int | None = None,
) -> tuple[tuple[Array, Array] | None, Array]:
    """Return the residuals of a GLU, and the codes of its result.

    Args:
        operation: the activation.
        gate_up: (M, 2 N), gate and up.
        factor: fp32 (M,), multiplied into each row of the result before it is rounded.
        coding: coding of the residuals, in groups that divide N; None for no residuals.
        dtype: float8_e4m3fn or float8_e5m2, of the result's codes.

    Returns:
        Codes (M, 2 N) and scales (M, 2 N / group) of gate and up, or None; codes of the result (M, N).
    """
    m, n = gate_up.shape[0], gate_up.shape[1] // 2
    launch = launch or QuantizeLaunch(16, _block_n(n, 128, coding.size if coding else 16), 4)
    shapes = [*storage.code_shapes((m, 2 * n), coding), jax.ShapeDtypeStruct((m, n), jnp.uint8)]
    codes, scales, result = quantize_triton.call(
        _encode, [gate_up, factor], shapes, -(-m // launch.block_m) * (n // launch.block_n), launch,
        compute_capability, shape=(m, n), OPERATION=operation,
        RESIDUAL_CODING=coding.constants if coding else scaling.NO_CODING,
        RESULT_CODING=scaling.Coding("tensor", dtype).constants,
    )  # fmt: skip
    residuals = None if coding is None else (bitcast_bytes(codes, coding.dtype), scales)
    return residuals, bitcast_bytes(result, dtype)


def quantize_cotangents(
    operation: Operation,
    gate_up: Array,
    scales: Array | None,
    gradient: Array,
    blocks: Array,
    factor: Array,
    result_factor: Array,
    dtype: Any,
    result_dtype: Any,
    *,
    launch: QuantizeLaunch | None = None,
    compute_capability: int | None = None,
) -> Cotangents:
    """Return codes of the cotangent of gate and up, and of the recomputed result, of the rows of groups.

    Args:
        operation, gate_up, scales, gradient: as of `row_statistics`.
        blocks: as of `quantize_groups_triton.quantize_groups`.
        factor, result_factor: fp32 (M,), multiplied into each row of cotangent and result before they are rounded.
        dtype, result_dtype: of the codes.

    Returns:
        Codes. Tokens of no row are 0. Codes of rows that are in no block are not initialized.
    """
    m, n = gate_up.shape[0], gate_up.shape[1] // 2
    tokens = blocks.shape[1] * BLOCK
    launch = launch or QuantizeLaunch(64, _block_n(n, 128, 16), 16 if n % 128 == 0 else 8)
    shapes = [jax.ShapeDtypeStruct(s, jnp.uint8) for s in ((m, 2 * n), (2 * n, tokens), (n, tokens))]
    row_scales = _PLACEHOLDER if scales is None else scales
    rows, columns, result = quantize_triton.call(
        _quantize_cotangents,
        [bitcast_bytes(gate_up, jnp.uint8), row_scales, gradient, blocks, factor, result_factor],
        shapes, tokens // launch.block_m * (n // launch.block_n), launch, compute_capability, shape=(m, n),
        TOKENS=tokens, BLOCK_SIZE=BLOCK, OPERATION=operation, CODING=scaling.Coding("tensor", dtype).constants,
        RESULT_CODING=scaling.Coding("tensor", result_dtype).constants,
    )  # fmt: skip
    cast = bitcast_bytes
    return Cotangents(cast(rows, dtype), cast(columns, dtype), cast(result, result_dtype))
