"""Quantizes each row of a matrix under a scale of its own, found in the same pass: a program holds whole rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import quantize_triton
from pallas_kernels import scaling_triton as device

# What a program holds: threads of 32 elements.
LONGEST, ELEMENTS, GROUP = 32768, 4096, 32


@triton.jit
def _rows(
    x_ptr: tl.tensor,
    level_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    lost_ptr: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    SIZE: tl.constexpr,
    LEVEL: tl.constexpr,
    LIMIT: tl.constexpr,
    HOW: tl.constexpr,
) -> None:
    """HIGH rows of at most WIDE columns; with LIMIT, also how many groups of SIZE lie below it in units of a code."""
    MASKED: tl.constexpr = M % HIGH > 0 or N < WIDE
    program = tl.program_id(0)
    m, n = program * HIGH + tl.arange(0, HIGH), tl.arange(0, WIDE)
    first = program.to(tl.int64) * (HIGH * N)
    at, here = (tl.arange(0, HIGH) * N)[:, None] + n[None, :], device.inside(m, n, M, N)
    x = device.load(x_ptr + first, at, here, MASKED)
    groups = device.along_rows(device.ordered(x, HOW), SIZE)
    largest = tl.max(groups, 1)
    if LEVEL:
        level = tl.load(level_ptr)
        scale = level * device.from_bits(device.power(largest, device.inverse(level), HOW) << 23)
    else:
        scale = device.to_scale(largest, HOW, tl.float32)
    factor = device.inverse(scale)[:, None]
    codes = device.encode(device.scaled(x, factor, HOW), 0, HOW)
    device.store(codes_ptr + first, at, codes, here, MASKED)
    tl.store(scales_ptr + m, scale, mask=m < M)
    if LIMIT > 0:
        top = device.largest(groups, HOW)
        lost = ((top > 0) & (top * factor <= LIMIT)).to(tl.int32)
        tl.store(lost_ptr + program, tl.sum(tl.sum(lost, 1), 0))


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
    limit: float | None = None,
    warps: int | None = None,
    compute_capability: int | None = None,
) -> tuple[Array, Array, Array]:
    """Codes of a matrix with one scale a row, in one pass over it.

    Args:
        x: (M, N), fp32, bf16 or fp16, N at most 32768.
        coding: of kind "token", to nearest.
        level: positive fp32 scalar: scales are powers of two times it, rounded up; None for the rows' own.
        limit: groups of 32 along a row count as lost whose largest magnitude is not zero and, in units of a code, at
            most this; None counts nothing.
        warps: tuning only; None takes the measured best. compute_capability: as of `quantize_triton.quantize`.

    Returns:
        Codes (M, N), fp32 scales (M, 1), and how many groups are lost, an int32 scalar.

    Raises:
        ValueError: the kernel cannot take these; the message says why.
    """
    reason = unsupported(x.shape, x.dtype, coding)
    if reason is not None:
        raise ValueError(f"the kernel for rows cannot run: {reason}")
    m, n = x.shape
    wide = max(triton.next_power_of_2(n), GROUP)
    high = max(ELEMENTS // wide, 1)
    programs = -(-m // high)
    shapes = [
        jax.ShapeDtypeStruct((m, n), jnp.uint8),
        jax.ShapeDtypeStruct((m, 1), jnp.float32),
        jax.ShapeDtypeStruct((programs,), jnp.int32),
    ]
    one = jnp.ones((1, 1), jnp.float32) if level is None else level.reshape(1, 1).astype(jnp.float32)
    launch = quantize_triton.Launch(high, wide, warps or min(high * wide // 512, 16))
    run = functools.partial(quantize_triton.call, _rows, [x, one], shapes, programs, launch, compute_capability)
    codes, scales, lost = run(SIZE=GROUP, LEVEL=level is not None, LIMIT=limit or 0.0, HOW=tuple(coding.static))
    return jax.lax.bitcast_convert_type(codes, coding.dtype), scales, jnp.sum(lost) if limit else jnp.int32(0)
