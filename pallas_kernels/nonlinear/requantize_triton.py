"""Conditional requantization, in place, of a norm's or activation's codes under another scale.

In: `Operands` and FP8 codes (M, N), fp32 scale (), bool (). Out: FP8 codes (M, N). Hardware: Ada or newer. Reference:
`requantize_if` in fp8jax/ops/quantization/fused_reference.py.
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
from pallas_kernels.nonlinear.quantize_recomputed_triton import Operands, operand_arrays, result_kinds
from pallas_kernels.quantization import quantize_triton
from pallas_kernels.quantization import scaling_triton as scaling
from pallas_kernels.quantization.quantize_triton import QuantizeLaunch

# Enough for every GPU, and negligible if the condition is false.
NUM_PROGRAMS = 1024


@triton.jit
def _requantize_if(
    first: tl.tensor, first_scale: tl.tensor, up: tl.tensor, up_scale: tl.tensor, activated: tl.tensor,
    activated_scale: tl.tensor, gradient: tl.tensor, rstd: tl.tensor, mean: tl.tensor, weight: tl.tensor,
    bias: tl.tensor, scale_ptr: tl.tensor, condition_ptr: tl.tensor, codes_ptr: tl.tensor, unused: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPERATION: tl.constexpr,
    KINDS: tl.constexpr, CODING: tl.constexpr, PROGRAMS: tl.constexpr,
) -> None:  # fmt: skip
    """Store every PROGRAMS-th tile in place if the condition is true."""
    MASKED: tl.constexpr = True  # the last round may exceed the tiles
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M * TILES_N
    if tl.load(condition_ptr) > 0:
        p = Operands(first, first_scale, up, up_scale, activated, activated_scale, gradient, rstd, mean, weight, bias)
        for j in range((TILES + PROGRAMS - 1) // PROGRAMS):
            tile = j * PROGRAMS + tl.program_id(0)
            top, left = tile // TILES_N * BLOCK_M, tile % TILES_N * BLOCK_N
            start = top.to(tl.int64) * N + left
            offsets = (tl.arange(0, BLOCK_M) * N)[:, None] + tl.arange(0, BLOCK_N)[None, :]
            m, n = top + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N)
            y = ops.compute_result(p, start, offsets, m, left, n, M, N, MASKED, OPERATION, KINDS.is_norm)
            ops.store_quantized(
                y, scale_ptr, codes_ptr + start, offsets, scaling.tile_mask(m, n, M, N), MASKED, CODING, False
            )


def requantize_if(
    operation: Operation,
    kinds: tuple[int, ...],
    operands: Operands,
    codes: Array,
    scale: Array,
    condition: Array,
    *,
    compute_capability: int | None = None,
) -> Array:
    """Return codes of a result (M, N), in place: recomputed under `scale` if `condition`, otherwise unchanged.

    Args:
        operation, kinds: the operation, which reads arrays; `quantize_recomputed_triton.NORM` or `RESULT`.
        codes: float8_e4m3fn or float8_e5m2 (M, N).
        scale, condition: fp32 and boolean scalar.
    """
    inputs: list[Any] = [*operand_arrays(operands), scale.reshape(1, 1), condition.reshape(1).astype(jnp.int32)]
    (requantized,) = quantize_triton.call(
        _requantize_if, [*inputs, bitcast_bytes(codes, jnp.uint8)],
        [jax.ShapeDtypeStruct(codes.shape, jnp.uint8)], NUM_PROGRAMS, QuantizeLaunch(32, 128, 4), compute_capability,
        aliases={len(inputs): 0}, OPERATION=operation, KINDS=result_kinds(kinds),
        CODING=scaling.Coding("tensor", codes.dtype).constants, PROGRAMS=NUM_PROGRAMS,
    )  # fmt: skip
    return bitcast_bytes(requantized, codes.dtype)
