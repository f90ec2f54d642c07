"""RMSNorm and LayerNorm over whole rows: forward with residuals, and backward from these or from the input.

In: (M, N) fp32, bf16 or fp16, weight and bias (N,). Out: (M, N), codes and scales, sums (N,). Hardware: Ada or newer
for FP8 codes, Ampere otherwise. Reference: `forward` and `backward` in fp8jax/ops/quantization/fused_reference.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
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
from pallas_kernels.quantization.quantize_triton import QuantizeLaunch

# The longest row of a program; the most rows per partial sum; and the fewest partial sums, to occupy all
# multiprocessors.
MAX_CHANNELS, MAX_ROWS_PER_SUM, MIN_SUMS = 16384, 32, 512
# Bytes of prefetched operands: shared memory per program on every GPU with FP8.
PREFETCH_BYTES = 96 << 10


@triton.jit
def _forward(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, result_scale: tl.tensor, codes_ptr: tl.tensor,
    scales_ptr: tl.tensor, rstd_ptr: tl.tensor, mean_ptr: tl.tensor, amax_ptr: tl.tensor, result_ptr: tl.tensor,
    row_scale_ptr: tl.tensor, M: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EPS: tl.constexpr, OPERATION: tl.constexpr, RESIDUAL_CODING: tl.constexpr, OUT_CODING: tl.constexpr,
    BY_ROW: tl.constexpr,
) -> None:  # fmt: skip
    MASKED: tl.constexpr = M % BLOCK_M > 0 or N < BLOCK_N
    program = scaling.reversed_program_id()
    m, n = program * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    first = program.to(tl.int64) * (BLOCK_M * N)
    offsets, mask = (tl.arange(0, BLOCK_M) * N)[:, None] + n[None, :], scaling.tile_mask(m, n, M, N)
    z = codec.to_fp32(scaling.load_raw(x_ptr + first, offsets, mask, MASKED))
    mean = tl.zeros((BLOCK_M,), tl.float32)
    if OPERATION.centered:
        mean = tl.sum(z, 1) / N
        tl.store(mean_ptr + m, mean, mask=m < M)
        z = tl.where(mask, z - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt_rn(tl.sum(z * z, 1) / N + EPS)
    tl.store(rstd_ptr + m, rstd, mask=m < M)
    # Assume finite values. If an input is not finite, the result is not either, and the rows are repeated below.
    ops.store_group_quantized(z, codes_ptr, scales_ptr, first, offsets, m, 0, n, M, N, MASKED, RESIDUAL_CODING, True)
    y = ops.normalize(z, rstd, weight_ptr, bias_ptr, n, N, MASKED, OPERATION)
    if OUT_CODING.kind != "none" and OUT_CODING.kind != "array":
        y = ops.round_to_dtype(y, OPERATION.dtype)
    if BY_ROW:
        ops.store_rows_quantized(y, row_scale_ptr, result_ptr + first, offsets, m, n, M, N, MASKED, OUT_CODING, True)
    elif OUT_CODING.kind != "none":
        ops.store_quantized(y, result_scale, result_ptr + first, offsets, mask, MASKED, OUT_CODING, True)
    amax = ops.tile_amax_or_nonfinite(y, OPERATION.dtype)
    if amax < float("inf"):
        tl.store(amax_ptr + program, amax)
    else:
        z = codec.to_fp32(scaling.load_raw(x_ptr + first, offsets, mask, MASKED))
        if OPERATION.centered:
            z = tl.where(mask, z - mean[:, None], 0.0)
        ops.store_group_quantized(
            z, codes_ptr, scales_ptr, first, offsets, m, 0, n, M, N, MASKED, RESIDUAL_CODING, False
        )
        y = ops.round_to_dtype(ops.normalize(z, rstd, weight_ptr, bias_ptr, n, N, MASKED, OPERATION), OPERATION.dtype)
        if BY_ROW:
            ops.store_rows_quantized(
                y, row_scale_ptr, result_ptr + first, offsets, m, n, M, N, MASKED, OUT_CODING, False
            )
        elif OUT_CODING.kind != "none":
            ops.store_quantized(y, result_scale, result_ptr + first, offsets, mask, MASKED, OUT_CODING, False)
        tl.store(amax_ptr + program, ops.tile_amax(y, m, n, M, N, MASKED, OUT_CODING))


@triton.jit
def _backward(
    codes_ptr: tl.tensor, scales_ptr: tl.tensor, dy_ptr: tl.tensor, rstd_ptr: tl.tensor, weight_ptr: tl.tensor,
    residual_ptr: tl.tensor, dx_ptr: tl.tensor, dweight_ptr: tl.tensor, dbias_ptr: tl.tensor, amax_ptr: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPERATION: tl.constexpr,
    RESIDUAL: tl.constexpr, ROWS_PER_STEP: tl.constexpr, NUM_STAGES: tl.constexpr, CODING: tl.constexpr,
) -> None:  # fmt: skip
    """Process BLOCK_M rows, ROWS_PER_STEP at a time, with NUM_STAGES - 1 steps prefetched."""
    MASKED: tl.constexpr = M % BLOCK_M > 0 or N < BLOCK_N
    GROUP: tl.constexpr = OPERATION.group
    GROUPS: tl.constexpr = (N + GROUP - 1) // GROUP
    # A thread reads eight neighbours of every operand, the most 16-bit values of one store. Asynchronous copies need
    # four bytes: narrower scales of eight are read in pairs.
    PAIRS: tl.constexpr = scales_ptr.dtype.element_ty == tl.bfloat16 and N % (2 * GROUP) == 0
    program = scaling.reversed_program_id()
    n, row = tl.multiple_of(tl.arange(0, BLOCK_N), 8), tl.arange(0, ROWS_PER_STEP)
    offsets, g = (row * N)[:, None] + n[None, :], tl.arange(0, BLOCK_N // 8) * 8 // GROUP
    dweight = tl.zeros((1, BLOCK_N), tl.float32)
    dbias = tl.zeros((1, BLOCK_N), tl.float32)
    amax_keys = tl.zeros((1, BLOCK_N), tl.int32)
    if OPERATION.has_scale:
        weight = codec.to_fp32(tl.load(weight_ptr + n, mask=n < N, other=0.0))[None, :]
    for j in tl.range(0, BLOCK_M, ROWS_PER_STEP, num_stages=NUM_STAGES):
        m = program * BLOCK_M + j + row
        first = (program * BLOCK_M + j).to(tl.int64) * N
        mask, group_mask = scaling.tile_mask(m, n, M, N), scaling.tile_mask(m, g, M, GROUPS)
        if OPERATION.reads_arrays:
            scale = 1.0
        elif PAIRS:
            words = scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + first // (2 * GROUP)
            pair = scaling.load_raw(words, (row * (N // (2 * GROUP)))[:, None] + g[None, :] // 2, group_mask, MASKED)
            scale = codec.from_bits(tl.where((g & 1)[None, :] > 0, pair & -0x10000, pair << 16))
        else:
            scales = scales_ptr + (program * BLOCK_M + j).to(tl.int64) * GROUPS
            scale = scaling.load(scales, (row * GROUPS)[:, None] + g[None, :], group_mask, MASKED)
        rstd = tl.load(rstd_ptr + m, mask=m < M, other=0.0)[:, None]
        codes = storage.load_codes(codes_ptr, first, offsets, m, 0, n, M, N, MASKED, OPERATION, True)
        dy = codec.to_fp32(scaling.load_raw(dy_ptr + first, offsets, mask, MASKED))
        if RESIDUAL and NUM_STAGES > 1:
            residual = codec.to_fp32(scaling.load_raw(residual_ptr + first, offsets, mask, MASKED))
        if OPERATION.reads_arrays:
            x_hat = codec.to_fp32(codes[0])
            if OPERATION.centered:
                x_hat = x_hat - (tl.sum(x_hat, 1) / N)[:, None]
            x_hat = x_hat * rstd
        else:
            x_hat = storage.decode_codes(codes, OPERATION) * scaling.repeat_columns(scale, 8) * rstd
        dweight += tl.sum(dy * x_hat, 0)[None, :]
        dx_hat = dy
        if OPERATION.has_bias:
            dbias += tl.sum(dy, 0)[None, :]
        if OPERATION.has_scale:
            dx_hat = dy * weight
        dx = dx_hat - x_hat * (tl.sum(dx_hat * x_hat, 1) / N)[:, None]
        if OPERATION.centered:
            dx = dx - (tl.sum(dx_hat, 1) / N)[:, None]
        dx = rstd * dx
        if RESIDUAL and NUM_STAGES == 1:
            residual = codec.to_fp32(scaling.load_raw(residual_ptr + first, offsets, mask, MASKED))
        if RESIDUAL:
            dx = dx + residual
        rounded = dx.to(dx_ptr.dtype.element_ty)
        scaling.store(dx_ptr + first, offsets, rounded, mask, MASKED)
        amax_keys = tl.maximum(
            amax_keys, tl.max(ops.masked_magnitude_key(rounded, m, n, M, N, MASKED, CODING), 0)[None, :]
        )
    tl.store(amax_ptr + program, scaling.magnitude_from_key(tl.max(tl.max(amax_keys, 1), 0), CODING))
    sum_offsets, group_mask = program.to(tl.int64) * N + n[None, :], (n < N)[None, :]
    if OPERATION.has_scale:
        scaling.store(dweight_ptr, sum_offsets, dweight, group_mask, MASKED)
    if OPERATION.has_bias:
        scaling.store(dbias_ptr, sum_offsets, dbias, group_mask, MASKED)


def unsupported_reason(shape: tuple[int, ...], dtype: Any, coding: scaling.Coding | None) -> str | None:
    """Return why the kernels cannot normalize the rows of a matrix of this shape and dtype, or None."""
    if len(shape) == 2 and shape[1] > MAX_CHANNELS:
        return f"rows of {shape[1]} are longer than {MAX_CHANNELS}"
    return storage.unsupported_reason(shape, dtype, coding)


def forward(
    operation: Operation,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    coding: scaling.Coding | None,
    *,
    result: tuple[Array | None, Any] | None = None,
    compute_capability: int | None = None,
) -> tuple[Array | None, Array | None, Array, Array | None, Array, Array | tuple[Array, Array] | None]:
    """Return the residuals of a norm of (M, N), and optionally its result or the codes of that.

    Args:
        x: (M, N), fp32, bf16 or fp16.
        weight, bias: (N,), or None.
        coding: coding of the input, or None.
        result: fp32 scalar scale and dtype of the result's codes, or None for no result. A scale of None stands for row
            scales; with a dtype of 16 or 32 bits, the result itself is returned.

    Returns:
        - codes (M, N) and scales (M, N / group) of the centered input, or None, None; ten bits: uint8 (M, 5 N / 4)
        - reciprocal root mean square of each row, fp32 (M,), and its mean, likewise, or None
        - amax of the result, an fp32 scalar
        - codes of the result (M, N), with scales (M, 1) if per row; or the result; or None
    """
    m, n = x.shape
    launch = _best_launch(n)
    result_coding, dtype = storage.result_coding(result)
    programs, by_row = -(-m // launch.block_m), result_coding.kind == "token"
    shapes = [
        *storage.code_shapes((m, n), coding),
        jax.ShapeDtypeStruct((m,), jnp.float32),
        jax.ShapeDtypeStruct((m if operation.centered else 1,), jnp.float32),
        jax.ShapeDtypeStruct((programs,), jnp.float32),
        jax.ShapeDtypeStruct((m, n) if result else (1, 1), dtype),
        jax.ShapeDtypeStruct((m if by_row else 1, 1), jnp.float32),
    ]
    result_scale = None if result is None or result[0] is None else result[0].reshape(1, 1)
    inputs = [x, *(jnp.ones((1, 1), jnp.float32) if p is None else p for p in (weight, bias, result_scale))]
    codes, scales, rstd, mean, tile_amax, result_codes, row_scale = quantize_triton.call(
        _forward, inputs, shapes, programs, launch, compute_capability, EPS=eps, OPERATION=operation,
        RESIDUAL_CODING=coding.constants if coding else scaling.NO_CODING, OUT_CODING=result_coding, BY_ROW=by_row,
    )  # fmt: skip
    quantized: Any = bitcast_bytes(result_codes, result[1]) if result else None
    quantized = (quantized, row_scale) if by_row else quantized
    input_codes = (bitcast_bytes(codes, coding.dtype), scales) if coding else (None, None)
    return *input_codes, rstd, mean if operation.centered else None, jnp.max(tile_amax), quantized


def backward(
    operation: Operation,
    codes: Array,
    scales: Array | None,
    rstd: Array,
    weight: Array | None,
    dy: Array,
    dtype: Any,
    residual: Array | None = None,
    *,
    compute_capability: int | None = None,
) -> tuple[Array, Array | None, Array | None, Array]:
    """Return the cotangents of a norm's input, weight and bias.

    Args:
        codes, scales: of the input, centered if the norm is, packed if of ten bits; the input and None if the
            operation reads arrays.
        rstd: reciprocal root mean squares, fp32 (M,).
        dy: (M, N), the cotangent of the result.
        residual: (M, N), a cotangent that is added to that of the input before it is rounded.

    Returns:
        (M, N) in `dtype`; fp32 (N,) of the weight and of the bias, or None; the amax of the first, an fp32 scalar.
    """
    m, n = dy.shape
    rows, block_n = max(1, min(MAX_ROWS_PER_SUM, m // MIN_SUMS)), triton.next_power_of_2(n)
    launch = QuantizeLaunch(rows, block_n, max(4, block_n // 512))
    programs = -(-m // launch.block_m)
    sums = [jax.ShapeDtypeStruct((programs, n) if p else (1, 1), jnp.float32)
            for p in (operation.has_scale, operation.has_bias)]  # fmt: skip
    scales, *optional = (jnp.ones((1, 1), jnp.float32) if p is None else p for p in (scales, weight, residual))
    first = codes if operation.reads_arrays else bitcast_bytes(codes, jnp.uint8)
    inputs = [first, scales, dy, rstd, *optional]
    rows_per_step = 2 if rows % 2 == 0 and block_n < 2048 else 1
    bytes_per_element = (
        first.dtype.itemsize
        + (0 if operation.reads_arrays else scales.dtype.itemsize / 8)
        + (0.5 if operation.format == "int10" else 0)
        + dy.dtype.itemsize
        + (0 if residual is None else residual.dtype.itemsize)
    )
    results = [jax.ShapeDtypeStruct((m, n), dtype), *sums, jax.ShapeDtypeStruct((programs,), jnp.float32)]
    dx, dweight, dbias, tile_amax = quantize_triton.call(
        _backward, inputs, results, programs, launch, compute_capability, shape=(m, n), OPERATION=operation,
        RESIDUAL=residual is not None, ROWS_PER_STEP=rows_per_step, CODING=scaling.NO_CODING,
        NUM_STAGES=3 if 2 * rows_per_step * block_n * bytes_per_element < PREFETCH_BYTES else 1,
    )  # fmt: skip
    return (
        dx,
        jnp.sum(dweight, 0) if operation.has_scale else None,
        jnp.sum(dbias, 0) if operation.has_bias else None,
        jnp.max(tile_amax),
    )


def _best_launch(n: int) -> QuantizeLaunch:
    """Return launch parameters: whole rows, about 4,096 elements per program."""
    block_n = triton.next_power_of_2(n)
    return QuantizeLaunch(max(1, 4096 // block_n), block_n, 4 if block_n <= 4096 else 8)
