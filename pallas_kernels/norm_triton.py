"""RMSNorm and LayerNorm by whole rows: forward with the codes that are kept, and backward from these or the input."""

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

# The longest row that a program holds; how many rows at most share one sum over rows, and how many sums at least, so
# that a GPU has work for all of its multiprocessors.
LONGEST, ROWS, SUMS = 16384, 32, 512
# Bytes of operands that may be on their way: what every GPU with FP8 has of shared memory for a program.
AHEAD = 96 << 10


@triton.jit
def _forward(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, to_scale: tl.tensor, codes_ptr: tl.tensor,
    scales_ptr: tl.tensor, inverse_ptr: tl.tensor, mean_ptr: tl.tensor, peaks_ptr: tl.tensor, result_ptr: tl.tensor,
    row_scale_ptr: tl.tensor, M: tl.constexpr, N: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    EPS: tl.constexpr, OPERATION: tl.constexpr, HOW: tl.constexpr, TO: tl.constexpr, BY_ROW: tl.constexpr,
) -> None:  # fmt: skip
    MASKED: tl.constexpr = M % HIGH > 0 or N < WIDE
    program = device.from_last()
    m, n = program * HIGH + tl.arange(0, HIGH), tl.arange(0, WIDE)
    first = program.to(tl.int64) * (HIGH * N)
    at, here = (tl.arange(0, HIGH) * N)[:, None] + n[None, :], device.inside(m, n, M, N)
    z = codec.fp32(device.load_plain(x_ptr + first, at, here, MASKED))
    mean = tl.zeros((HIGH,), tl.float32)
    if OPERATION.centered:
        mean = tl.sum(z, 1) / N
        tl.store(mean_ptr + m, mean, mask=m < M)
        z = tl.where(here, z - mean[:, None], 0.0)
    inverse = 1 / tl.sqrt_rn(tl.sum(z * z, 1) / N + EPS)
    tl.store(inverse_ptr + m, inverse, mask=m < M)
    # As if all were finite, and again if not, which the result tells: of Inf and NaN it is not finite either.
    on.keep(z, codes_ptr, scales_ptr, first, at, m, 0, n, M, N, MASKED, HOW, True)
    y = on.normalized(z, inverse, weight_ptr, bias_ptr, n, N, MASKED, OPERATION)
    if TO.kind != "none" and TO.kind != "array":
        y = on.narrowed(y, OPERATION.dtype)
    if BY_ROW:
        on.put_rows(y, row_scale_ptr, result_ptr + first, at, m, n, M, N, MASKED, TO, True)
    elif TO.kind != "none":
        on.put(y, to_scale, result_ptr + first, at, here, MASKED, TO, True)
    top = on.peak_of_finite(y, OPERATION.dtype)
    if top < float("inf"):
        tl.store(peaks_ptr + program, top)
    else:
        z = codec.fp32(device.load_plain(x_ptr + first, at, here, MASKED))
        if OPERATION.centered:
            z = tl.where(here, z - mean[:, None], 0.0)
        on.keep(z, codes_ptr, scales_ptr, first, at, m, 0, n, M, N, MASKED, HOW, False)
        y = on.narrowed(on.normalized(z, inverse, weight_ptr, bias_ptr, n, N, MASKED, OPERATION), OPERATION.dtype)
        if BY_ROW:
            on.put_rows(y, row_scale_ptr, result_ptr + first, at, m, n, M, N, MASKED, TO, False)
        elif TO.kind != "none":
            on.put(y, to_scale, result_ptr + first, at, here, MASKED, TO, False)
        tl.store(peaks_ptr + program, on.peak(y, m, n, M, N, MASKED, TO))


@triton.jit
def _backward(
    codes_ptr: tl.tensor, scales_ptr: tl.tensor, dy_ptr: tl.tensor, inverse_ptr: tl.tensor, weight_ptr: tl.tensor,
    residual_ptr: tl.tensor, dx_ptr: tl.tensor, dweight_ptr: tl.tensor, dbias_ptr: tl.tensor, peaks_ptr: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, OPERATION: tl.constexpr,
    RESIDUAL: tl.constexpr, AT_ONCE: tl.constexpr, STAGES: tl.constexpr, HOW: tl.constexpr,
) -> None:  # fmt: skip
    """HIGH rows, AT_ONCE at a time, the next STAGES - 1 on their way."""
    MASKED: tl.constexpr = M % HIGH > 0 or N < WIDE
    GROUP: tl.constexpr = OPERATION.group
    WIDTH: tl.constexpr = (N + GROUP - 1) // GROUP
    # A thread takes eight neighbours of everything, which is as many 16-bit values as it can write at once; the scale
    # of each eight is read in pairs where it is narrower than the four bytes that a copy ahead of time takes.
    PAIRS: tl.constexpr = scales_ptr.dtype.element_ty == tl.bfloat16 and N % (2 * GROUP) == 0
    program = device.from_last()
    n, row = tl.multiple_of(tl.arange(0, WIDE), 8), tl.arange(0, AT_ONCE)
    at, g = (row * N)[:, None] + n[None, :], tl.arange(0, WIDE // 8) * 8 // GROUP
    dweight = tl.zeros((1, WIDE), tl.float32)
    dbias = tl.zeros((1, WIDE), tl.float32)
    top = tl.zeros((1, WIDE), tl.int32)
    if OPERATION.scaled:
        weight = codec.fp32(tl.load(weight_ptr + n, mask=n < N, other=0.0))[None, :]
    for j in tl.range(0, HIGH, AT_ONCE, num_stages=STAGES):
        m = program * HIGH + j + row
        first = (program * HIGH + j).to(tl.int64) * N
        here, there = device.inside(m, n, M, N), device.inside(m, g, M, WIDTH)
        if OPERATION.exact:
            scale = 1.0
        elif PAIRS:
            words = scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + first // (2 * GROUP)
            pair = device.load_plain(words, (row * (N // (2 * GROUP)))[:, None] + g[None, :] // 2, there, MASKED)
            scale = codec.from_bits(tl.where((g & 1)[None, :] > 0, pair & -0x10000, pair << 16))
        else:
            scales = scales_ptr + (program * HIGH + j).to(tl.int64) * WIDTH
            scale = device.load(scales, (row * WIDTH)[:, None] + g[None, :], there, MASKED)
        inverse = tl.load(inverse_ptr + m, mask=m < M, other=0.0)[:, None]
        codes = storage.load_codes(codes_ptr, first, at, m, 0, n, M, N, MASKED, OPERATION, True)
        dy = codec.fp32(device.load_plain(dy_ptr + first, at, here, MASKED))
        if RESIDUAL and STAGES > 1:
            residual = codec.fp32(device.load_plain(residual_ptr + first, at, here, MASKED))
        if OPERATION.exact:
            normal = codec.fp32(codes[0])
            if OPERATION.centered:
                normal = normal - (tl.sum(normal, 1) / N)[:, None]
            normal = normal * inverse
        else:
            normal = storage.values(codes, OPERATION) * device.over_columns(scale, 8) * inverse
        dweight += tl.sum(dy * normal, 0)[None, :]
        t = dy
        if OPERATION.biased:
            dbias += tl.sum(dy, 0)[None, :]
        if OPERATION.scaled:
            t = dy * weight
        dx = t - normal * (tl.sum(t * normal, 1) / N)[:, None]
        if OPERATION.centered:
            dx = dx - (tl.sum(t, 1) / N)[:, None]
        dx = inverse * dx
        if RESIDUAL and STAGES == 1:
            residual = codec.fp32(device.load_plain(residual_ptr + first, at, here, MASKED))
        if RESIDUAL:
            dx = dx + residual
        rounded = dx.to(dx_ptr.dtype.element_ty)
        device.store(dx_ptr + first, at, rounded, here, MASKED)
        top = tl.maximum(top, tl.max(on.ordered(rounded, m, n, M, N, MASKED, HOW), 0)[None, :])
    tl.store(peaks_ptr + program, device.largest(tl.max(tl.max(top, 1), 0), HOW))
    place, there = program.to(tl.int64) * N + n[None, :], (n < N)[None, :]
    if OPERATION.scaled:
        device.store(dweight_ptr, place, dweight, there, MASKED)
    if OPERATION.biased:
        device.store(dbias_ptr, place, dbias, there, MASKED)


def unsupported(shape: tuple[int, ...], dtype: Any, coding: device.Coding | None) -> str | None:
    """Why the kernels cannot normalize the rows of a matrix of this shape and dtype, or None."""
    if len(shape) == 2 and shape[1] > LONGEST:
        return f"rows of {shape[1]} are longer than {LONGEST}"
    return storage.unsupported(shape, dtype, coding)


def forward(
    operation: Operation,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    coding: device.Coding | None,
    *,
    result: tuple[Array | None, Any] | None = None,
    compute_capability: int | None = None,
) -> tuple[Array | None, Array | None, Array, Array | None, Array, Array | tuple[Array, Array] | None]:
    """What a norm keeps of (M, N), in one pass.

    Args:
        coding: codes of the input, or None.
        result: scale, an fp32 scalar, and dtype of codes of the result, or None. A scale of None is each row's own;
            with a wider dtype the result itself is wanted.

    Returns:
        Codes (M, N) and scales (M, N / group) of `x`, less its mean where the norm is centered, or None, None; 1 / root
        of each row, fp32 (M,); the mean, likewise, or None; the largest finite magnitude of the result, an fp32 scalar;
        and codes of the result (M, N), with scales (M, 1) if they are the rows' own, or the result, or None. Codes of
        ten bits are packed, uint8 (M, 5 N / 4).
    """
    m, n = x.shape
    launch = _launch(n)
    to, dtype = storage.result_of(result)
    programs, by_row = -(-m // launch.rows), to.kind == "token"
    shapes = [
        *storage.codes_of((m, n), coding),
        jax.ShapeDtypeStruct((m,), jnp.float32),
        jax.ShapeDtypeStruct((m if operation.centered else 1,), jnp.float32),
        jax.ShapeDtypeStruct((programs,), jnp.float32),
        jax.ShapeDtypeStruct((m, n) if result else (1, 1), dtype),
        jax.ShapeDtypeStruct((m if by_row else 1, 1), jnp.float32),
    ]
    to_scale = None if result is None or result[0] is None else result[0].reshape(1, 1)
    inputs = [x, *(jnp.ones((1, 1), jnp.float32) if p is None else p for p in (weight, bias, to_scale))]
    codes, scales, inverse, mean, peaks, result_codes, row_scale = quantize_triton.call(
        _forward, inputs, shapes, programs, launch, compute_capability, EPS=eps, OPERATION=operation,
        HOW=coding.static if coding else device.NONE, TO=to, BY_ROW=by_row,
    )  # fmt: skip
    quantized: Any = storage.typed(result_codes, result[1]) if result else None
    quantized = (quantized, row_scale) if by_row else quantized
    of_input = (storage.typed(codes, coding.dtype), scales) if coding else (None, None)
    return *of_input, inverse, mean if operation.centered else None, jnp.max(peaks), quantized


def backward(
    operation: Operation,
    codes: Array,
    scales: Array | None,
    inverse: Array,
    weight: Array | None,
    dy: Array,
    dtype: Any,
    residual: Array | None = None,
    *,
    compute_capability: int | None = None,
) -> tuple[Array, Array | None, Array | None, Array]:
    """Cotangents of a norm's input, weight and bias from those of its result, dy (M, N).

    Args:
        codes, scales: of the input, less its mean where the norm is centered, packed if of ten bits; if exact, the
            input itself, and None.
        residual: (M, N), the input's cotangent from elsewhere, which is added before the one rounding.

    Returns:
        (M, N) in `dtype`; fp32 (N,) of the weight and of the bias, None where there is none; the largest finite
        magnitude of the first, an fp32 scalar.
    """
    m, n = dy.shape
    rows, wide = max(1, min(ROWS, m // SUMS)), triton.next_power_of_2(n)
    launch = QuantizeLaunch(rows, wide, max(4, wide // 512))
    programs = -(-m // launch.rows)
    sums = [jax.ShapeDtypeStruct((programs, n) if p else (1, 1), jnp.float32)
            for p in (operation.scaled, operation.biased)]  # fmt: skip
    scales, *optional = (jnp.ones((1, 1), jnp.float32) if p is None else p for p in (scales, weight, residual))
    first = codes if operation.exact else storage.typed(codes, jnp.uint8)
    inputs = [first, scales, dy, inverse, *optional]
    at_once = 2 if rows % 2 == 0 and wide < 2048 else 1
    read = (
        first.dtype.itemsize
        + (0 if operation.exact else scales.dtype.itemsize / 8)
        + (0.5 if operation.format == "int10" else 0)
        + dy.dtype.itemsize
        + (0 if residual is None else residual.dtype.itemsize)
    )
    results = [jax.ShapeDtypeStruct((m, n), dtype), *sums, jax.ShapeDtypeStruct((programs,), jnp.float32)]
    dx, dweight, dbias, peaks = quantize_triton.call(
        _backward, inputs, results, programs, launch, compute_capability, shape=(m, n), OPERATION=operation,
        RESIDUAL=residual is not None, AT_ONCE=at_once, HOW=device.NONE,
        STAGES=3 if 2 * at_once * wide * read < AHEAD else 1,
    )  # fmt: skip
    return (
        dx,
        jnp.sum(dweight, 0) if operation.scaled else None,
        jnp.sum(dbias, 0) if operation.biased else None,
        jnp.max(peaks),
    )


def _launch(n: int) -> QuantizeLaunch:
    """Whole rows, a program about 4,096 elements."""
    wide = triton.next_power_of_2(n)
    return QuantizeLaunch(max(1, 4096 // wide), wide, 4 if wide <= 4096 else 8)
