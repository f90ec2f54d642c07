"""What an activation keeps for its backward pass, and the largest magnitude of its result, in one pass."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import codec_triton as codec
from pallas_kernels import operations_triton as on
from pallas_kernels import quantize_triton
from pallas_kernels import scaling_triton as device
from pallas_kernels.operations_triton import Operation
from pallas_kernels.quantize_triton import Launch


@triton.jit
def _keep(
    gate_ptr: tl.tensor, up_ptr: tl.tensor, gate_codes: tl.tensor, gate_scales: tl.tensor, up_codes: tl.tensor,
    up_scales: tl.tensor, codes: tl.tensor, scales: tl.tensor, peaks: tl.tensor, M: tl.constexpr, N: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, OPERATION: tl.constexpr, HOW: tl.constexpr,
) -> None:  # fmt: skip
    """The codes that an activation keeps of a tile, and the largest magnitude of its result there."""
    MASKED: tl.constexpr = M % HIGH > 0 or N % WIDE > 0
    ACROSS: tl.constexpr = (N + WIDE - 1) // WIDE
    program = tl.program_id(0)
    top, left = program // ACROSS * HIGH, program % ACROSS * WIDE
    first = top.to(tl.int64) * N + left
    at = (tl.arange(0, HIGH) * N)[:, None] + tl.arange(0, WIDE)[None, :]
    m, n = top + tl.arange(0, HIGH), left + tl.arange(0, WIDE)
    here = device.inside(m, n, M, N)
    gate = codec.fp32(device.load_plain(gate_ptr + first, at, here, MASKED))
    up = gate
    if OPERATION[1]:
        up = codec.fp32(device.load_plain(up_ptr + first, at, here, MASKED))
    # As if all were finite, and again if not, which the result tells: of Inf and NaN it is not finite either.
    on.keep(gate, gate_codes, gate_scales, first, at, m, left, n, M, N, MASKED, HOW, True)
    if OPERATION[1]:
        on.keep(up, up_codes, up_scales, first, at, m, left, n, M, N, MASKED, HOW, True)
    y, _ = on.activate(gate, OPERATION[0])
    if OPERATION[9]:
        on.keep(on.narrowed(y, OPERATION[5]), codes, scales, first, at, m, left, n, M, N, MASKED, HOW, True)
    if OPERATION[1]:
        y = y * up
    top = on.peak_of_finite(y, OPERATION[5])
    if top < float("inf"):
        tl.store(peaks + program, top)
    else:
        gate = codec.fp32(device.load_plain(gate_ptr + first, at, here, MASKED))
        on.keep(gate, gate_codes, gate_scales, first, at, m, left, n, M, N, MASKED, HOW, False)
        y, _ = on.activate(gate, OPERATION[0])
        if OPERATION[9]:
            on.keep(on.narrowed(y, OPERATION[5]), codes, scales, first, at, m, left, n, M, N, MASKED, HOW, False)
        if OPERATION[1]:
            up = codec.fp32(device.load_plain(up_ptr + first, at, here, MASKED))
            on.keep(up, up_codes, up_scales, first, at, m, left, n, M, N, MASKED, HOW, False)
            y = y * up
        tl.store(peaks + program, on.peak(on.narrowed(y, OPERATION[5]), m, n, M, N, MASKED, HOW))


def keep_activation(
    operation: Operation,
    gate: Array,
    up: Array | None,
    kept: device.Coding,
    *,
    launch: Launch | None = None,
    compute_capability: int | None = None,
) -> tuple[list[tuple[Array, Array] | None], Array]:
    """What an activation keeps, in one pass: codes and scales of its gate, `up` and activated gate.

    Returns:
        For each of them codes (M, N) and scales (M, N / group), or None where the operation has or keeps no such; and
        the largest finite magnitude of its result, an fp32 scalar.
    """
    m, n = gate.shape
    launch = launch or (Launch(32, 128, 8) if n % 256 else Launch(16, 256, 8))
    tiles = -(-m // launch.rows) * -(-n // launch.columns)
    present = (True, operation.gated, operation.activated)
    shapes = [
        jax.ShapeDtypeStruct(shape if here else (1, 1), kind)
        for here in present
        for shape, kind in (((m, n), jnp.uint8), ((m, n // kept.size), kept.scale_dtype))
    ]
    inputs = [gate, gate if up is None else up]
    found = quantize_triton.call(
        _keep, inputs, [*shapes, jax.ShapeDtypeStruct((tiles,), jnp.float32)], tiles, launch, compute_capability,
        OPERATION=tuple(operation), HOW=tuple(kept.static),
    )  # fmt: skip
    codes = [jax.lax.bitcast_convert_type(found[2 * i], kept.dtype) for i in range(3)]
    return [(codes[i], found[2 * i + 1]) if present[i] else None for i in range(3)], jnp.max(found[-1])
