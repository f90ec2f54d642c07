"""What an activation keeps, and codes of its result with a scale for each row: a program takes whole rows, twice.

The first pass over a row finds its largest magnitude and writes what is kept; the second computes the row again, whose
operands then are in the cache, and writes its codes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import codec_triton as codec
from pallas_kernels import operations_triton as on
from pallas_kernels import quantize_triton
from pallas_kernels import scaling_triton as device
from pallas_kernels import storage_triton as storage
from pallas_kernels.operations_triton import Operation
from pallas_kernels.quantize_triton import QuantizeLaunch


@triton.jit
def _chunk(
    gate_ptr: tl.tensor, up_ptr: tl.tensor, gate_codes: tl.tensor, gate_scales: tl.tensor, up_codes: tl.tensor,
    up_scales: tl.tensor, codes: tl.tensor, scales: tl.tensor, first: tl.tensor, row: tl.tensor, m: tl.tensor,
    left: tl.tensor, M: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, OPERATION: tl.constexpr, HOW: tl.constexpr,
    KEEP: tl.constexpr, FINITE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A part of some rows of the result, rounded to the operation's dtype; to KEEP, also writes what is kept of it."""
    MASKED: tl.constexpr = True
    n = left + tl.arange(0, WIDE)
    at, start = (row * N)[:, None] + tl.arange(0, WIDE)[None, :], first + left
    here = device.inside(m, n, M, N)
    gate = codec.fp32(device.load_plain(gate_ptr + start, at, here, MASKED))
    y, _ = on.activate(gate, OPERATION.activation)
    if KEEP:
        on.keep(gate, gate_codes, gate_scales, start, at, m, left, n, M, N, MASKED, HOW, FINITE)
        if OPERATION.activated:
            on.keep(on.narrowed(y, OPERATION.dtype), codes, scales, start, at, m, left, n, M, N, MASKED, HOW, FINITE)
    if OPERATION.gated:
        up = codec.fp32(device.load_plain(up_ptr + start, at, here, MASKED))
        if KEEP:
            on.keep(up, up_codes, up_scales, start, at, m, left, n, M, N, MASKED, HOW, FINITE)
        y = y * up
    return on.narrowed(y, OPERATION.dtype)


@triton.jit
def _rows(
    gate_ptr: tl.tensor, up_ptr: tl.tensor, gate_codes: tl.tensor, gate_scales: tl.tensor, up_codes: tl.tensor,
    up_scales: tl.tensor, codes: tl.tensor, scales: tl.tensor, result_ptr: tl.tensor, scale_ptr: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, OPERATION: tl.constexpr,
    HOW: tl.constexpr, TO: tl.constexpr,
) -> None:  # fmt: skip
    top = tl.program_id(0) * HIGH
    row, first = tl.arange(0, HIGH), top.to(tl.int64) * N
    m = top + row
    # As if all were finite, and again if not: then what is added up here is not 0.
    peaks = tl.zeros((HIGH,), tl.float32)
    for left in range(0, N, WIDE):
        y = _chunk(gate_ptr, up_ptr, gate_codes, gate_scales, up_codes, up_scales, codes, scales, first, row, m, left,
                   M, N, WIDE, OPERATION, HOW, True, True)  # fmt: skip
        peaks = on.larger_or_nan(peaks, tl.reduce(tl.abs(y), 1, on.larger_or_nan))
    finite = tl.reduce(peaks, 0, on.larger_or_nan) < float("inf")
    if finite:
        peaks = tl.where(peaks < device.TINY, 0.0, peaks)
    else:
        ordered = tl.zeros((HIGH,), tl.int32)
        for left in range(0, N, WIDE):
            y = _chunk(gate_ptr, up_ptr, gate_codes, gate_scales, up_codes, up_scales, codes, scales, first, row, m,
                       left, M, N, WIDE, OPERATION, HOW, True, False)  # fmt: skip
            n = left + tl.arange(0, WIDE)
            ordered = tl.maximum(ordered, tl.max(on.ordered(y, m, n, M, N, True, TO), 1))
        peaks = device.largest(ordered, TO)
    scale = tl.where(peaks > 0, tl.maximum(peaks * TO.inverse_max, device.TINY), 1.0)
    tl.store(scale_ptr + m, scale, mask=m < M)
    factor = device.inverse(scale)[:, None]
    for left in range(0, N, WIDE):
        n = left + tl.arange(0, WIDE)
        y = _chunk(gate_ptr, up_ptr, gate_codes, gate_scales, up_codes, up_scales, codes, scales, first, row, m, left,
                   M, N, WIDE, OPERATION, HOW, False, True)  # fmt: skip
        at = (row * N)[:, None] + tl.arange(0, WIDE)[None, :]
        encoded = device.encode(y, device.scaled(y, factor, TO), 0, TO)
        device.store(result_ptr + first + left, at, encoded, device.inside(m, n, M, N), True)


def keep_activation(
    operation: Operation,
    gate: Array,
    up: Array | None,
    coding: device.Coding | None,
    dtype: Any,
    *,
    launch: QuantizeLaunch | None = None,
    compute_capability: int | None = None,
) -> tuple[list[tuple[Array, Array] | None], Array, Array]:
    """What an activation keeps, as of `activation_triton.keep_activation`, and codes of its result by rows.

    Args:
        coding: codes of its inputs, or None.
        dtype: of the codes of the result, float8_e4m3fn or float8_e5m2.

    Returns:
        What is kept; codes of the result (M, N); and their scales, fp32 (M, 1).
    """
    m, n = gate.shape
    launch = launch or QuantizeLaunch(1, 2048, 4)
    present = [here and coding is not None for here in (True, operation.gated, operation.activated)]
    shapes = [shape for here in present for shape in storage.codes_of((m, n), coding if here else None)]
    shapes += [jax.ShapeDtypeStruct((m, n), jnp.uint8), jax.ShapeDtypeStruct((m, 1), jnp.float32)]
    outputs = quantize_triton.call(
        _rows, [gate, gate if up is None else up], shapes, -(-m // launch.rows), launch, compute_capability,
        OPERATION=operation, HOW=coding.static if coding else device.NONE, TO=device.Coding("token", dtype).static,
    )  # fmt: skip
    parts = [
        (storage.typed(outputs[2 * i], coding.dtype), outputs[2 * i + 1]) if coding and present[i] else None
        for i in range(3)
    ]
    return parts, jax.lax.bitcast_convert_type(outputs[-2], dtype), outputs[-1]
