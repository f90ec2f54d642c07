"""What an activation keeps for its backward pass, the largest magnitude of its result, and codes of it, in one pass."""

import dataclasses
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
def _keep(
    gate_ptr: tl.tensor, up_ptr: tl.tensor, to_scale: tl.tensor, gate_codes: tl.tensor, gate_scales: tl.tensor,
    up_codes: tl.tensor, up_scales: tl.tensor, codes: tl.tensor, scales: tl.tensor, peaks: tl.tensor,
    result_ptr: tl.tensor, M: tl.constexpr, N: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    OPERATION: tl.constexpr, HOW: tl.constexpr, TO: tl.constexpr,
) -> None:  # fmt: skip
    """The codes that an activation keeps of a tile, those of its result there, and the largest magnitude of that."""
    MASKED: tl.constexpr = M % HIGH > 0 or N % WIDE > 0
    ACROSS: tl.constexpr = (N + WIDE - 1) // WIDE
    program = device.from_last()
    top, left = program // ACROSS * HIGH, program % ACROSS * WIDE
    first = top.to(tl.int64) * N + left
    at = (tl.arange(0, HIGH) * N)[:, None] + tl.arange(0, WIDE)[None, :]
    m, n = top + tl.arange(0, HIGH), left + tl.arange(0, WIDE)
    here = device.inside(m, n, M, N)
    gate = codec.fp32(device.load_plain(gate_ptr + first, at, here, MASKED))
    up = gate
    if OPERATION.gated:
        up = codec.fp32(device.load_plain(up_ptr + first, at, here, MASKED))
    # As if all were finite, and again if not, which the result tells: of Inf and NaN it is not finite either.
    on.keep(gate, gate_codes, gate_scales, first, at, m, left, n, M, N, MASKED, HOW, True)
    if OPERATION.gated:
        on.keep(up, up_codes, up_scales, first, at, m, left, n, M, N, MASKED, HOW, True)
    y, _ = on.activate(gate, OPERATION.activation)
    if OPERATION.activated:
        on.keep(on.narrowed(y, OPERATION.dtype), codes, scales, first, at, m, left, n, M, N, MASKED, HOW, True)
    if OPERATION.gated:
        y = y * up
    if TO.kind != "none":
        if TO.kind != "array":
            y = on.narrowed(y, OPERATION.dtype)
        on.put(y, to_scale, result_ptr + first, at, here, MASKED, TO, True)
    top = on.peak_of_finite(y, OPERATION.dtype)
    if top < float("inf"):
        tl.store(peaks + program, top)
    else:
        gate = codec.fp32(device.load_plain(gate_ptr + first, at, here, MASKED))
        on.keep(gate, gate_codes, gate_scales, first, at, m, left, n, M, N, MASKED, HOW, False)
        y, _ = on.activate(gate, OPERATION.activation)
        if OPERATION.activated:
            on.keep(on.narrowed(y, OPERATION.dtype), codes, scales, first, at, m, left, n, M, N, MASKED, HOW, False)
        if OPERATION.gated:
            up = codec.fp32(device.load_plain(up_ptr + first, at, here, MASKED))
            on.keep(up, up_codes, up_scales, first, at, m, left, n, M, N, MASKED, HOW, False)
            y = y * up
        y = on.narrowed(y, OPERATION.dtype)
        if TO.kind != "none":
            on.put(y, to_scale, result_ptr + first, at, here, MASKED, TO, False)
        tl.store(peaks + program, on.peak(y, m, n, M, N, MASKED, TO))


def keep_activation(
    operation: Operation,
    gate: Array,
    up: Array | None,
    coding: device.Coding,
    *,
    result: tuple[Array | None, Any] | None = None,
    launch: QuantizeLaunch | None = None,
    compute_capability: int | None = None,
) -> tuple[list[tuple[Array, Array] | None], Array, Array | None]:
    """What an activation keeps, in one pass: codes and scales of its gate, `up` and activated gate.

    Args:
        result: scale, an fp32 scalar, and dtype of codes of the result, or None; of the result itself None and dtype.

    Returns:
        For each of them codes (M, N), of ten bits packed, (M, 5 N / 4), and scales (M, N / group), or None where the
        operation has or keeps no such; the largest finite magnitude of its result, an fp32 scalar; and codes of the
        result (M, N), or the result, or None.
    """
    m, n = gate.shape
    if launch is None:
        launch = QuantizeLaunch(32, 128, 8) if n % 256 else QuantizeLaunch(16, 256, 8)
        # Eight elements a thread, in 60 registers; sixteen would take 100.
        launch = dataclasses.replace(launch, rows=launch.rows // 2) if coding.packed else launch
    tiles = -(-m // launch.rows) * -(-n // launch.columns)
    present, (to, dtype) = (True, operation.gated, operation.activated), storage.result_of(result)
    shapes = [shape for here in present for shape in storage.codes_of((m, n), coding if here else None)]
    shapes += [jax.ShapeDtypeStruct((tiles,), jnp.float32)]
    shapes += [jax.ShapeDtypeStruct((m, n) if result else (1, 1), dtype)]
    scale = result[0].reshape(1, 1) if result and result[0] is not None else jnp.ones((1, 1), jnp.float32)
    outputs = quantize_triton.call(
        _keep, [gate, gate if up is None else up, scale], shapes, tiles, launch, compute_capability,
        OPERATION=operation, HOW=coding.static, TO=to,
    )  # fmt: skip
    codes = [storage.typed(outputs[2 * i], coding.dtype) for i in range(3)]
    result_codes = storage.typed(outputs[-1], result[1]) if result else None
    return (
        [(codes[i], outputs[2 * i + 1]) if present[i] else None for i in range(3)],
        jnp.max(outputs[-2]),
        result_codes,
    )
