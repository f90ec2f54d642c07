"""Largest magnitudes of what norms and activations compute, and of the gradients of the latter, without writing it."""

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import operations_triton as on
from pallas_kernels import quantize_triton
from pallas_kernels import scaling_triton as device
from pallas_kernels import storage_triton as storage
from pallas_kernels.operations_triton import Operation
from pallas_kernels.quantize_triton import QuantizeLaunch
from pallas_kernels.remake_triton import Operands, kinds_of, pointers

# Rows of a tile, and so of a sample.
SAMPLE = 32
_ALWAYS = np.ones(1, np.int32)


@triton.jit
def _peaks(
    first: tl.tensor, first_scale: tl.tensor, up: tl.tensor, up_scale: tl.tensor, activated: tl.tensor,
    activated_scale: tl.tensor, gradient: tl.tensor, inverse: tl.tensor, mean: tl.tensor, weight: tl.tensor,
    bias: tl.tensor, wanted: tl.tensor, peaks0: tl.tensor, peaks1: tl.tensor, M: tl.constexpr, N: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, OPERATION: tl.constexpr, KINDS: tl.constexpr, HOW: tl.constexpr,
    EVERY: tl.constexpr, GUARDED: tl.constexpr,
) -> None:  # fmt: skip
    p = Operands(first, first_scale, up, up_scale, activated, activated_scale, gradient, inverse, mean, weight, bias)
    MASKED: tl.constexpr = M % HIGH > 0 or N % WIDE > 0
    ACROSS: tl.constexpr = (N + WIDE - 1) // WIDE
    program = tl.program_id(0)
    top, left = program // ACROSS * (HIGH * EVERY), program % ACROSS * WIDE
    start = top.to(tl.int64) * N + left
    at = (tl.arange(0, HIGH) * N)[:, None] + tl.arange(0, WIDE)[None, :]
    m, n = top + tl.arange(0, HIGH), left + tl.arange(0, WIDE)
    here = tl.load(wanted) > 0 if GUARDED else True
    if here:
        if KINDS.forward:
            y0 = on.result(p, start, at, m, left, n, M, N, MASKED, OPERATION, KINDS.norm)
        else:
            x = on.operands(p, start, at, m, left, n, M, N, MASKED, OPERATION)
            y0, y1, _ = on.cotangents(x, OPERATION, OPERATION.dtype)
            if KINDS.both:
                tl.store(peaks1 + program, on.peak(y1, m, n, M, N, MASKED, HOW))
        tl.store(peaks0 + program, on.peak(y0, m, n, M, N, MASKED, HOW))


def peaks(
    operation: Operation,
    kinds: tuple[int, ...],
    operands: Operands,
    *,
    every: int = 1,
    wanted: Array | None = None,
    compute_capability: int | None = None,
) -> list[Array]:
    """Largest finite magnitudes of results of an operation, fp32 scalars; arguments as of `remake_triton.quantize`.

    Of the rows it takes the first SAMPLE of `every` so many times that number. Where `wanted`, a boolean scalar, is
    False, it reads nothing and returns 0.
    """
    m, n = storage.shape_of(operands.first, operation)
    launch = QuantizeLaunch(SAMPLE, 128, 4)
    tiles = -(-m // (launch.rows * every)) * -(-n // launch.columns)
    shapes = [jax.ShapeDtypeStruct((tiles if i < len(kinds) else 1,), jnp.float32) for i in range(2)]
    flag = _ALWAYS if wanted is None else wanted.reshape(1).astype(jnp.int32)
    outputs = quantize_triton.call(
        _peaks, [*pointers(operands), flag], shapes, tiles, launch, compute_capability, shape=(m, n),
        OPERATION=operation, KINDS=kinds_of(kinds), HOW=device.NONE, EVERY=every, GUARDED=wanted is not None,
    )  # fmt: skip
    maxima = [jnp.max(x) for x in outputs[: len(kinds)]]
    return maxima if wanted is None else [jnp.where(wanted, peak, 0.0) for peak in maxima]
