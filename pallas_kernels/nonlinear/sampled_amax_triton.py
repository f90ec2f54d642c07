"""Largest finite magnitudes of norm and activation results and of activation cotangents, which are not stored.

In: `Operands` on (M, N). Out: fp32 (). Hardware: Ada or newer for FP8 residuals, Ampere otherwise. Reference:
`compute_amaxes` in fp8jax/ops/quantization/fused_reference.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.nonlinear import operations_triton as ops
from pallas_kernels.nonlinear.operations_triton import Operation
from pallas_kernels.nonlinear.quantize_recomputed_triton import Operands, operand_arrays, result_kinds
from pallas_kernels.quantization import quantize_triton
from pallas_kernels.quantization import scaling_triton as scaling
from pallas_kernels.quantization import storage_triton as storage
from pallas_kernels.quantization.quantize_triton import QuantizeLaunch

# Rows of a tile, and therefore of a sample.
SAMPLE_ROWS = 32
_TRUE = np.ones(1, np.int32)


@triton.jit
def _sampled_amax(
    first: tl.tensor, first_scale: tl.tensor, up: tl.tensor, up_scale: tl.tensor, activated: tl.tensor,
    activated_scale: tl.tensor, gradient: tl.tensor, rstd: tl.tensor, mean: tl.tensor, weight: tl.tensor,
    bias: tl.tensor, compute_if_ptr: tl.tensor, amax0_ptr: tl.tensor, amax1_ptr: tl.tensor, M: tl.constexpr,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPERATION: tl.constexpr, KINDS: tl.constexpr,
    CODING: tl.constexpr, SAMPLE_STRIDE: tl.constexpr, CONDITIONAL: tl.constexpr,
) -> None:  # fmt: skip
    p = Operands(first, first_scale, up, up_scale, activated, activated_scale, gradient, rstd, mean, weight, bias)
    MASKED: tl.constexpr = M % BLOCK_M > 0 or N % BLOCK_N > 0
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    top, left = program // TILES_N * (BLOCK_M * SAMPLE_STRIDE), program % TILES_N * BLOCK_N
    start = top.to(tl.int64) * N + left
    offsets = (tl.arange(0, BLOCK_M) * N)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    m, n = top + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N)
    should_run = tl.load(compute_if_ptr) > 0 if CONDITIONAL else True
    if should_run:
        if KINDS.is_forward:
            y0 = ops.compute_result(p, start, offsets, m, left, n, M, N, MASKED, OPERATION, KINDS.is_norm)
        else:
            x = ops.load_cotangent_operands(p, start, offsets, m, left, n, M, N, MASKED, OPERATION)
            y0, y1, _ = ops.compute_cotangents(x, OPERATION, OPERATION.dtype)
            if KINDS.is_up_only:
                y0 = y1
            if KINDS.is_pair:
                tl.store(amax1_ptr + program, ops.tile_amax(y1, m, n, M, N, MASKED, CODING))
        tl.store(amax0_ptr + program, ops.tile_amax(y0, m, n, M, N, MASKED, CODING))


def compute_amaxes(
    operation: Operation,
    kinds: tuple[int, ...],
    operands: Operands,
    *,
    every: int = 1,
    compute_if: Array | None = None,
    compute_capability: int | None = None,
) -> list[Array]:
    """Return the largest finite magnitude of each result of an operation, fp32 scalars.

    Arguments are those of `quantize_recomputed_triton.quantize`. The first SAMPLE_ROWS of each SAMPLE_ROWS * `every`
    rows are used. If `compute_if`, a boolean scalar, is False, nothing is read and 0 is returned.
    """
    m, n = storage.matrix_shape(operands.first, operation)
    launch = QuantizeLaunch(SAMPLE_ROWS, 128, 4)
    tiles = -(-m // (launch.block_m * every)) * -(-n // launch.block_n)
    shapes = [jax.ShapeDtypeStruct((tiles if i < len(kinds) else 1,), jnp.float32) for i in range(2)]
    flag = _TRUE if compute_if is None else compute_if.reshape(1).astype(jnp.int32)
    outputs = quantize_triton.call(
        _sampled_amax, [*operand_arrays(operands), flag], shapes, tiles, launch, compute_capability, shape=(m, n),
        OPERATION=operation, KINDS=result_kinds(kinds), CODING=scaling.NO_CODING, SAMPLE_STRIDE=every,
        CONDITIONAL=compute_if is not None,
    )  # fmt: skip
    amax = [jnp.max(x) for x in outputs[: len(kinds)]]
    return amax if compute_if is None else [jnp.where(compute_if, amax, 0.0) for amax in amax]
