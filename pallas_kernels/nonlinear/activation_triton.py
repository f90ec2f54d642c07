"""Residuals of an activation, the amax of its result, and optionally the result or its codes, in one pass.

In: gate and up (M, N), fp32, bf16 or fp16. Out: codes and scales of the residuals, fp32 (), (M, N). Hardware: Ada or
newer for FP8 codes, Ampere otherwise. Reference: `encode_activation_residuals` in ops/quantization/fused_reference.py.
"""

import dataclasses
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
def _encode_residuals(
    gate_ptr: tl.tensor, up_ptr: tl.tensor, result_scale: tl.tensor, gate_codes: tl.tensor, gate_scales: tl.tensor,
    up_codes: tl.tensor, up_scales: tl.tensor, activated_codes: tl.tensor, activated_scales: tl.tensor,
    amax_ptr: tl.tensor, result_ptr: tl.tensor, M: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, OPERATION: tl.constexpr, RESIDUAL_CODING: tl.constexpr, OUT_CODING: tl.constexpr,
) -> None:  # fmt: skip
    """Store the residuals of a tile, its result or the codes of that, and its amax."""
    MASKED: tl.constexpr = M % BLOCK_M > 0 or N % BLOCK_N > 0
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = scaling.reversed_program_id()
    top, left = program // TILES_N * BLOCK_M, program % TILES_N * BLOCK_N
    first = top.to(tl.int64) * N + left
    offsets = (tl.arange(0, BLOCK_M) * N)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    m, n = top + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N)
    mask = scaling.tile_mask(m, n, M, N)
    gate = codec.to_fp32(scaling.load_raw(gate_ptr + first, offsets, mask, MASKED))
    up = gate
    if OPERATION.is_gated:
        up = codec.to_fp32(scaling.load_raw(up_ptr + first, offsets, mask, MASKED))
    # Assume finite values. If an input is not finite, the result is not either, and the tile is repeated below.
    ops.store_group_quantized(
        gate, gate_codes, gate_scales, first, offsets, m, left, n, M, N, MASKED, RESIDUAL_CODING, True
    )
    if OPERATION.is_gated:
        ops.store_group_quantized(
            up, up_codes, up_scales, first, offsets, m, left, n, M, N, MASKED, RESIDUAL_CODING, True
        )
    y, _ = ops.activation_and_slope(gate, OPERATION.activation)
    if OPERATION.saves_activated:
        ops.store_group_quantized(
            ops.round_to_dtype(y, OPERATION.dtype),
            activated_codes,
            activated_scales,
            first,
            offsets,
            m,
            left,
            n,
            M,
            N,
            MASKED,
            RESIDUAL_CODING,
            True,
        )
    if OPERATION.is_gated:
        y = y * up
    if OUT_CODING.kind != "none":
        if OUT_CODING.kind != "array":
            y = ops.round_to_dtype(y, OPERATION.dtype)
        ops.store_quantized(y, result_scale, result_ptr + first, offsets, mask, MASKED, OUT_CODING, True)
    top = ops.tile_amax_or_nonfinite(y, OPERATION.dtype)
    if top < float("inf"):
        tl.store(amax_ptr + program, top)
    else:
        gate = codec.to_fp32(scaling.load_raw(gate_ptr + first, offsets, mask, MASKED))
        ops.store_group_quantized(
            gate, gate_codes, gate_scales, first, offsets, m, left, n, M, N, MASKED, RESIDUAL_CODING, False
        )
        y, _ = ops.activation_and_slope(gate, OPERATION.activation)
        if OPERATION.saves_activated:
            ops.store_group_quantized(
                ops.round_to_dtype(y, OPERATION.dtype),
                activated_codes,
                activated_scales,
                first,
                offsets,
                m,
                left,
                n,
                M,
                N,
                MASKED,
                RESIDUAL_CODING,
                False,
            )
        if OPERATION.is_gated:
            up = codec.to_fp32(scaling.load_raw(up_ptr + first, offsets, mask, MASKED))
            ops.store_group_quantized(
                up, up_codes, up_scales, first, offsets, m, left, n, M, N, MASKED, RESIDUAL_CODING, False
            )
            y = y * up
        y = ops.round_to_dtype(y, OPERATION.dtype)
        if OUT_CODING.kind != "none":
            ops.store_quantized(y, result_scale, result_ptr + first, offsets, mask, MASKED, OUT_CODING, False)
        tl.store(amax_ptr + program, ops.tile_amax(y, m, n, M, N, MASKED, OUT_CODING))


def encode_activation_residuals(
    operation: Operation,
    gate: Array,
    up: Array | None,
    coding: scaling.Coding,
    *,
    result: tuple[Array | None, Any] | None = None,
    launch: QuantizeLaunch | None = None,
    compute_capability: int | None = None,
) -> tuple[list[tuple[Array, Array] | None], Array, Array | None]:
    """Return codes and scales of an activation's residuals: gate, up and activated gate.

    Args:
        gate, up: (M, N), fp32, bf16 or fp16; `up` is None without a gate.
        coding: coding of the residuals.
        result: fp32 scalar scale and dtype of the result's codes; (None, dtype) for the result itself; None for
            neither.

    Returns:
        For each residual codes (M, N) and scales (M, N / group), or None if the operation does not save it. Ten-bit
        codes are packed, (M, 5 N / 4). Then the amax of the result, an fp32 scalar, and the result or its codes (M, N),
        or None.
    """
    m, n = gate.shape
    if launch is None:
        launch = QuantizeLaunch(32, 128, 8) if n % 256 else QuantizeLaunch(16, 256, 8)
        # Eight elements per thread: sixteen need too many registers.
        launch = dataclasses.replace(launch, block_m=launch.block_m // 2) if coding.is_packed else launch
    tiles = -(-m // launch.block_m) * -(-n // launch.block_n)
    is_saved = (True, operation.is_gated, operation.saves_activated)
    result_coding, dtype = storage.result_coding(result)
    shapes = [shape for mask in is_saved for shape in storage.code_shapes((m, n), coding if mask else None)]
    shapes += [jax.ShapeDtypeStruct((tiles,), jnp.float32)]
    shapes += [jax.ShapeDtypeStruct((m, n) if result else (1, 1), dtype)]
    scale = result[0].reshape(1, 1) if result and result[0] is not None else jnp.ones((1, 1), jnp.float32)
    outputs = quantize_triton.call(
        _encode_residuals, [gate, gate if up is None else up, scale], shapes, tiles, launch, compute_capability,
        OPERATION=operation, RESIDUAL_CODING=coding.constants, OUT_CODING=result_coding,
    )  # fmt: skip
    codes = [bitcast_bytes(outputs[2 * i], coding.dtype) for i in range(3)]
    result_codes = bitcast_bytes(outputs[-1], result[1]) if result else None
    return (
        [(codes[i], outputs[2 * i + 1]) if is_saved[i] else None for i in range(3)],
        jnp.max(outputs[-2]),
        result_codes,
    )
