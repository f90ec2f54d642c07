"""Quantizes each row of a matrix under a scale of its own, found in the same pass: a program holds whole rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import codec_triton as codec
from pallas_kernels import quantize_triton
from pallas_kernels import scaling_triton as device

# What a program holds: threads of 32 elements.
LONGEST, ELEMENTS, GROUP = 32768, 4096, 32


@triton.jit
def _places(program: tl.tensor, LEFT: tl.constexpr, WIDE: tl.constexpr, HIGH: tl.constexpr, M: tl.constexpr,
            N: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Where in a program's rows the WIDE elements from LEFT on are, and which of them there are."""
    n = LEFT + tl.arange(0, WIDE)
    return (tl.arange(0, HIGH) * N)[:, None] + n[None, :], device.inside(program * HIGH + tl.arange(0, HIGH), n, M, N)


@triton.jit
def _peaks(x: tl.tensor, SIZE: tl.constexpr, HOW: tl.constexpr) -> tl.tensor:
    return device.along_rows(device.ordered(x, HOW), SIZE)


@triton.jit
def _codes(x: tl.tensor, factor: tl.tensor, HOW: tl.constexpr) -> tl.tensor:
    y = device.scaled(codec.fp32(x, False), factor, HOW)
    return device.encode(y, y, 0, HOW)


@triton.jit
def _rows(
    x_ptr: tl.tensor,
    level_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    SIZE: tl.constexpr,
    LEVEL: tl.constexpr,
    BY_ROW: tl.constexpr,
    HOW: tl.constexpr,
) -> None:
    """HIGH rows of at most WIDE + REST columns."""
    MASKED: tl.constexpr = M % HIGH > 0 or N < WIDE
    program = tl.program_id(0)
    first = program.to(tl.int64) * (HIGH * N)
    at, here = _places(program, 0, WIDE, HIGH, M, N)
    x = device.load_plain(x_ptr + first, at, here, MASKED)
    largest = tl.max(_peaks(x, SIZE, HOW), 1)
    if REST > 0:
        at2, here2 = _places(program, WIDE, REST, HIGH, M, N)
        x2 = device.load_plain(x_ptr + first, at2, here2, True)
        largest = tl.maximum(largest, tl.max(_peaks(x2, SIZE, HOW), 1))
    m = program * HIGH + tl.arange(0, HIGH)
    if LEVEL:
        level = tl.load(level_ptr + m, mask=m < M, other=1.0) if BY_ROW else tl.load(level_ptr)
        scale = level * device.from_bits(device.power(largest, device.inverse(level), HOW) << 23)
        scale = tl.maximum(scale, device.TINY)
    else:
        scale = device.to_scale(largest, HOW, tl.float32)
    factor = device.inverse(scale)[:, None]
    device.store(codes_ptr + first, at, _codes(x, factor, HOW), here, MASKED)
    if REST > 0:
        device.store(codes_ptr + first, at2, _codes(x2, factor, HOW), here2, True)
    tl.store(scales_ptr + m, scale, mask=m < M)


def unsupported(shape: tuple[int, ...], dtype: Any, coding: device.Coding) -> str | None:
    """Why the kernel cannot take a matrix of this shape and dtype, or make these codes, or None."""
    if len(shape) == 2 and shape[1] > LONGEST:
        return f"a row of {shape[1]} elements is longer than {LONGEST}"
    if coding.stochastic:
        return "it rounds to nearest"
    return quantize_triton.unsupported(shape, dtype, (coding,))


def quantize_rows(
    x: Array,
    coding: device.Coding,
    *,
    level: Array | None = None,
    warps: int | None = None,
    compute_capability: int | None = None,
) -> tuple[Array, Array]:
    """Codes of a matrix with one scale a row, in one pass over it.

    Args:
        x: (M, N), fp32, bf16 or fp16, N at most 32768.
        coding: of kind "token", to nearest.
        level: positive fp32 scalar, or one a row (M, 1): scales are powers of two times it, rounded up; None for the
            rows' own.
        warps: tuning only; None takes the measured best. compute_capability: as of `quantize_triton.quantize`.

    Returns:
        Codes (M, N) and fp32 scales (M, 1).

    Raises:
        ValueError: the kernel cannot take these; the message says why.
    """
    reason = unsupported(x.shape, x.dtype, coding)
    if reason is not None:
        raise ValueError(f"the kernel for rows cannot run: {reason}")
    m, n = x.shape
    wide, rest = _widths(n)
    high = triton.next_power_of_2(max(ELEMENTS // (wide + rest), 1))
    programs = -(-m // high)
    shapes = [
        jax.ShapeDtypeStruct((m, n), jnp.uint8),
        jax.ShapeDtypeStruct((m, 1), jnp.float32),
    ]
    one = jnp.ones((1, 1), jnp.float32) if level is None else level.reshape(-1, 1).astype(jnp.float32)
    launch = quantize_triton.QuantizeLaunch(high, wide, warps or (8 if high == 1 else 4))
    run = functools.partial(quantize_triton.call, _rows, [x, one], shapes, programs, launch, compute_capability)
    codes, scales = run(
        REST=rest,
        SIZE=GROUP,
        LEVEL=level is not None,
        BY_ROW=one.size > 1,
        HOW=coding.static,
    )
    return jax.lax.bitcast_convert_type(codes, coding.dtype), scales


def _widths(columns: int) -> tuple[int, int]:
    """Two powers of two that cover a row, the second perhaps 0: one alone could be nearly twice as long."""
    whole = max(triton.next_power_of_2(columns), GROUP)
    rest = max(triton.next_power_of_2(columns - whole // 2), GROUP)
    return (whole // 2, rest) if whole > GROUP and rest <= whole // 4 else (whole, 0)
