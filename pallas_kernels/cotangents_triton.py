"""The cotangents of an activation's inputs, from its gradient and what it keeps, as arrays: for whoever reads these.

`remake_triton` makes their FP8 codes, without writing them.
"""

import jax
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import operations_triton as on
from pallas_kernels import quantize_triton, remake_triton
from pallas_kernels import scaling_triton as device
from pallas_kernels import storage_triton as storage
from pallas_kernels.operations_triton import Operation
from pallas_kernels.quantize_triton import QuantizeLaunch
from pallas_kernels.remake_triton import Operands

# Where neither what is kept nor what is made is FP8: of the kernels of norms and activations, too.
FP8_CAPABILITY = 80


@triton.jit
def _cotangents(
    gate_ptr: tl.tensor, gate_scale: tl.tensor, up: tl.tensor, up_scale: tl.tensor, activated: tl.tensor,
    activated_scale: tl.tensor, gradient: tl.tensor, dgate_ptr: tl.tensor, dup_ptr: tl.tensor, M: tl.constexpr,
    N: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, OPERATION: tl.constexpr,
) -> None:  # fmt: skip
    p = Operands(gate_ptr, gate_scale, up, up_scale, activated, activated_scale, gradient)
    MASKED: tl.constexpr = M % HIGH > 0 or N % WIDE > 0
    ACROSS: tl.constexpr = (N + WIDE - 1) // WIDE
    program = tl.program_id(0)
    top, left = program // ACROSS * HIGH, program % ACROSS * WIDE
    first = top.to(tl.int64) * N + left
    at = (tl.arange(0, HIGH) * N)[:, None] + tl.arange(0, WIDE)[None, :]
    m, n = top + tl.arange(0, HIGH), left + tl.arange(0, WIDE)
    here = device.inside(m, n, M, N)
    x = on.operands(p, first, at, m, left, n, M, N, MASKED, OPERATION)
    dgate, dup, _ = on.cotangents(x, OPERATION, 0)
    device.store(dgate_ptr + first, at, dgate.to(dgate_ptr.dtype.element_ty), here, MASKED)
    if OPERATION.gated:
        device.store(dup_ptr + first, at, dup.to(dup_ptr.dtype.element_ty), here, MASKED)


def cotangents(
    operation: Operation,
    operands: Operands,
    *,
    launch: QuantizeLaunch | None = None,
    compute_capability: int | None = None,
) -> list[Array]:
    """Those of an activation's gate and, if it is gated, of up, (M, N), in the operation's dtype.

    Args:
        operation: what is computed.
        operands: what from; `gradient` is that of the result.
        launch, compute_capability: as of `quantize_triton.quantize`.
    """
    m, n = storage.shape_of(operands.first, operation)
    launch = launch or QuantizeLaunch(16, 128, 8)
    tiles = -(-m // launch.rows) * -(-n // launch.columns)
    dtype = quantize_triton.PLAIN_DTYPES[operation.dtype]
    shapes = [jax.ShapeDtypeStruct((m, n) if there else (1, 1), dtype) for there in (True, operation.gated)]
    outputs = quantize_triton.call(
        _cotangents, remake_triton.pointers(operands)[:7], shapes, tiles, launch, compute_capability, shape=(m, n),
        OPERATION=operation,
    )  # fmt: skip
    return list(outputs[: 1 + operation.gated])
