"""Residuals of an activation, and FP8 codes of its result with one scale per row.

In: gate and up (M, N), fp32, bf16 or fp16. Out: codes and scales of the residuals, FP8 (M, N), fp32 (M, 1). Hardware:
Ada or newer. Reference: `encode_activation_residuals` in fp8jax/ops/quantization/fused_reference.py.

A program processes whole rows twice. The first pass computes the amax and stores the residuals. The second one
recomputes the row from cached operands and stores its codes.
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


@triton.jit
def _compute_chunk(
    gate_ptr: tl.tensor, up_ptr: tl.tensor, gate_codes: tl.tensor, gate_scales: tl.tensor, up_codes: tl.tensor,
    up_scales: tl.tensor, activated_codes: tl.tensor, activated_scales: tl.tensor, first: tl.tensor, row: tl.tensor,
    m: tl.tensor, left: tl.tensor, M: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, OPERATION: tl.constexpr,
    RESIDUAL_CODING: tl.constexpr, STORE_RESIDUALS: tl.constexpr, FINITE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return a part of the result, rounded to the operation's dtype; STORE_RESIDUALS also stores the residuals."""
    MASKED: tl.constexpr = True
    n = left + tl.arange(0, BLOCK_N)
    offsets, start = (row * N)[:, None] + tl.arange(0, BLOCK_N)[None, :], first + left
    mask = scaling.tile_mask(m, n, M, N)
    gate = codec.to_fp32(scaling.load_raw(gate_ptr + start, offsets, mask, MASKED))
    y, _ = ops.activation_and_slope(gate, OPERATION.activation)
    if STORE_RESIDUALS:
        ops.store_group_quantized(
            gate, gate_codes, gate_scales, start, offsets, m, left, n, M, N, MASKED, RESIDUAL_CODING, FINITE
        )
        if OPERATION.saves_activated:
            ops.store_group_quantized(
                ops.round_to_dtype(y, OPERATION.dtype),
                activated_codes,
                activated_scales,
                start,
                offsets,
                m,
                left,
                n,
                M,
                N,
                MASKED,
                RESIDUAL_CODING,
                FINITE,
            )
    if OPERATION.is_gated:
        up = codec.to_fp32(scaling.load_raw(up_ptr + start, offsets, mask, MASKED))
        if STORE_RESIDUALS:
            ops.store_group_quantized(
                up, up_codes, up_scales, start, offsets, m, left, n, M, N, MASKED, RESIDUAL_CODING, FINITE
            )
        y = y * up
    return ops.round_to_dtype(y, OPERATION.dtype)


@triton.jit
def _encode_residuals_by_row(
    gate_ptr: tl.tensor, up_ptr: tl.tensor, gate_codes: tl.tensor, gate_scales: tl.tensor, up_codes: tl.tensor,
    up_scales: tl.tensor, activated_codes: tl.tensor, activated_scales: tl.tensor, result_ptr: tl.tensor,
    result_scale_ptr: tl.tensor, M: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    OPERATION: tl.constexpr, RESIDUAL_CODING: tl.constexpr, OUT_CODING: tl.constexpr,
) -> None:  # fmt: skip
    """Store the residuals of whole rows, and the codes of their result with a scale for each row."""
    top = tl.program_id(0) * BLOCK_M
    row, first = tl.arange(0, BLOCK_M), top.to(tl.int64) * N
    m = top + row
    # Assume finite values, and repeat with the general code if the amax is not finite.
    row_amax = tl.zeros((BLOCK_M,), tl.float32)
    for left in range(0, N, BLOCK_N):
        y = _compute_chunk(gate_ptr, up_ptr, gate_codes, gate_scales, up_codes, up_scales, activated_codes,
                   activated_scales, first, row, m, left, M, N, BLOCK_N, OPERATION, RESIDUAL_CODING,
                   True, True)  # fmt: skip
        row_amax = ops.larger_or_nan(row_amax, tl.reduce(tl.abs(y), 1, ops.larger_or_nan))
    finite = tl.reduce(row_amax, 0, ops.larger_or_nan) < float("inf")
    if finite:
        row_amax = tl.where(row_amax < scaling.TINY, 0.0, row_amax)
    else:
        amax_keys = tl.zeros((BLOCK_M,), tl.int32)
        for left in range(0, N, BLOCK_N):
            y = _compute_chunk(gate_ptr, up_ptr, gate_codes, gate_scales, up_codes, up_scales, activated_codes,
                       activated_scales, first, row, m, left, M, N, BLOCK_N, OPERATION, RESIDUAL_CODING, True,
                       False)  # fmt: skip
            n = left + tl.arange(0, BLOCK_N)
            amax_keys = tl.maximum(amax_keys, tl.max(ops.masked_magnitude_key(y, m, n, M, N, True, OUT_CODING), 1))
        row_amax = scaling.magnitude_from_key(amax_keys, OUT_CODING)
    scale = tl.where(row_amax > 0, tl.maximum(row_amax * OUT_CODING.inverse_max, scaling.TINY), 1.0)
    tl.store(result_scale_ptr + m, scale, mask=m < M)
    factor = scaling.reciprocal(scale)[:, None]
    for left in range(0, N, BLOCK_N):
        n = left + tl.arange(0, BLOCK_N)
        y = _compute_chunk(gate_ptr, up_ptr, gate_codes, gate_scales, up_codes, up_scales, activated_codes,
                   activated_scales, first, row, m, left, M, N, BLOCK_N, OPERATION, RESIDUAL_CODING,
                   False, True)  # fmt: skip
        offsets = (row * N)[:, None] + tl.arange(0, BLOCK_N)[None, :]
        encoded = scaling.encode(y, scaling.apply_inverse_scale(y, factor, OUT_CODING), 0, OUT_CODING)
        scaling.store(result_ptr + first + left, offsets, encoded, scaling.tile_mask(m, n, M, N), True)


def encode_activation_residuals(
    operation: Operation,
    gate: Array,
    up: Array | None,
    coding: scaling.Coding | None,
    dtype: Any,
    *,
    launch: QuantizeLaunch | None = None,
    compute_capability: int | None = None,
) -> tuple[list[tuple[Array, Array] | None], Array, Array]:
    """Return residuals as `activation_triton.encode_activation_residuals`, and codes of the result with row scales.

    Args:
        coding: coding of the residuals, or None.
        dtype: dtype of the result's codes, float8_e4m3fn or float8_e5m2.

    Returns:
        Residuals; codes of the result (M, N); and their scales, fp32 (M, 1).
    """
    m, n = gate.shape
    launch = launch or QuantizeLaunch(1, 2048, 4)
    is_saved = [mask and coding is not None for mask in (True, operation.is_gated, operation.saves_activated)]
    shapes = [shape for here in is_saved for shape in storage.code_shapes((m, n), coding if here else None)]
    shapes += [jax.ShapeDtypeStruct((m, n), jnp.uint8), jax.ShapeDtypeStruct((m, 1), jnp.float32)]
    outputs = quantize_triton.call(
        _encode_residuals_by_row, [gate, gate if up is None else up], shapes, -(-m // launch.block_m), launch,
        compute_capability, OPERATION=operation, RESIDUAL_CODING=coding.constants if coding else scaling.NO_CODING,
        OUT_CODING=scaling.Coding("token", dtype).constants,
    )  # fmt: skip
    residuals = [
        (bitcast_bytes(outputs[2 * i], coding.dtype), outputs[2 * i + 1]) if coding and is_saved[i] else None
        for i in range(3)
    ]
    return residuals, bitcast_bytes(outputs[-2], dtype), outputs[-1]
