"""Cotangents of an activation's inputs, as arrays, from the cotangent of its result and the residuals.

In: `Operands` on (M, N). Out: (M, N) fp32, bf16 or fp16. Hardware: Ada or newer for FP8 residuals, Ampere otherwise.
Reference: `cotangents` in fp8jax/ops/quantization/fused_reference.py. `quantize_recomputed_triton` computes FP8 codes
instead.
"""

import jax
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.nonlinear import operations_triton as ops
from pallas_kernels.nonlinear import quantize_recomputed_triton
from pallas_kernels.nonlinear.operations_triton import Operation
from pallas_kernels.nonlinear.quantize_recomputed_triton import Operands
from pallas_kernels.quantization import quantize_triton
from pallas_kernels.quantization import scaling_triton as scaling
from pallas_kernels.quantization import storage_triton as storage
from pallas_kernels.quantization.quantize_triton import QuantizeLaunch

# For residuals and results without FP8; also for the other norm and activation kernels.
FP8_CAPABILITY = 80


@triton.jit
def _cotangents(
    gate_ptr: tl.tensor, gate_scale: tl.tensor, up: tl.tensor, up_scale: tl.tensor, activated: tl.tensor,
    activated_scale: tl.tensor, gradient: tl.tensor, dgate_ptr: tl.tensor, dup_ptr: tl.tensor, M: tl.constexpr,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPERATION: tl.constexpr,
) -> None:  # fmt: skip
    p = Operands(gate_ptr, gate_scale, up, up_scale, activated, activated_scale, gradient)
    MASKED: tl.constexpr = M % BLOCK_M > 0 or N % BLOCK_N > 0
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    top, left = program // TILES_N * BLOCK_M, program % TILES_N * BLOCK_N
    first = top.to(tl.int64) * N + left
    offsets = (tl.arange(0, BLOCK_M) * N)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    m, n = top + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N)
    mask = scaling.tile_mask(m, n, M, N)
    x = ops.load_cotangent_operands(p, first, offsets, m, left, n, M, N, MASKED, OPERATION)
    dgate, dup, _ = ops.compute_cotangents(x, OPERATION, 0)
    scaling.store(dgate_ptr + first, offsets, dgate.to(dgate_ptr.dtype.element_ty), mask, MASKED)
    if OPERATION.is_gated:
        scaling.store(dup_ptr + first, offsets, dup.to(dup_ptr.dtype.element_ty), mask, MASKED)


def cotangents(
    operation: Operation,
    operands: Operands,
    *,
    launch: QuantizeLaunch | None = None,
    compute_capability: int | None = None,
) -> list[Array]:
    """Return the cotangents of gate and, if gated, of up: (M, N), in the operation's dtype.

    `operands` are the residuals, with the cotangent of the result as `gradient`.
    """
    m, n = storage.matrix_shape(operands.first, operation)
    launch = launch or QuantizeLaunch(16, 128, 8)
    tiles = -(-m // launch.block_m) * -(-n // launch.block_n)
    dtype = quantize_triton.PLAIN_DTYPES[operation.dtype]
    shapes = [jax.ShapeDtypeStruct((m, n) if mask else (1, 1), dtype) for mask in (True, operation.is_gated)]
    outputs = quantize_triton.call(
        _cotangents, quantize_recomputed_triton.operand_arrays(operands)[:7], shapes, tiles, launch,
        compute_capability, shape=(m, n), OPERATION=operation,
    )  # fmt: skip
    return list(outputs[: 1 + operation.is_gated])
