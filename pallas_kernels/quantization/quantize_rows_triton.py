"""Codes of a matrix with one scale per row, in one pass: a program processes whole rows.

In: (M, N) fp32, bf16 or fp16. Out: 8-bit codes (M, N), fp32 scales (M, 1). Hardware: Ada or newer for FP8 codes, Turing
otherwise. Reference: `_reference` in fp8jax/ops/quantization/quantize.py; with an outer scale, that of microscaling.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.dispatch.call_triton import bitcast_bytes
from pallas_kernels.quantization import codec_triton as codec
from pallas_kernels.quantization import quantize_triton
from pallas_kernels.quantization import scaling_triton as scaling

# Limits of a program; a thread reduces 32 elements.
MAX_COLUMNS, ELEMENTS_PER_PROGRAM, GROUP = 32768, 4096, 32


@triton.jit
def _row_offsets(program: tl.tensor, LEFT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return the offsets of BLOCK_N columns from LEFT on in a program's rows, and their mask."""
    n = LEFT + tl.arange(0, BLOCK_N)
    return (tl.arange(0, BLOCK_M) * N)[:, None] + n[None, :], scaling.tile_mask(
        program * BLOCK_M + tl.arange(0, BLOCK_M), n, M, N
    )


@triton.jit
def _group_keys(x: tl.tensor, SIZE: tl.constexpr, CODING: tl.constexpr) -> tl.tensor:
    return scaling.max_along_rows(scaling.magnitude_key(x, CODING), SIZE)


@triton.jit
def _encode(x: tl.tensor, factor: tl.tensor, CODING: tl.constexpr) -> tl.tensor:
    y = scaling.apply_inverse_scale(codec.to_fp32(x, False), factor, CODING)
    return scaling.encode(y, y, 0, CODING)


@triton.jit
def _quantize_rows(
    x_ptr: tl.tensor,
    outer_scale_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_OUTER_SCALE: tl.constexpr,
    BY_ROW: tl.constexpr,
    CODING: tl.constexpr,
) -> None:
    """Write the codes of BLOCK_M rows of at most BLOCK_N + TAIL_N columns."""
    MASKED: tl.constexpr = M % BLOCK_M > 0 or N < BLOCK_N
    program = tl.program_id(0)
    first = program.to(tl.int64) * (BLOCK_M * N)
    offsets, mask = _row_offsets(program, 0, M, N, BLOCK_M, BLOCK_N)
    x = scaling.load_raw(x_ptr + first, offsets, mask, MASKED)
    keys = tl.max(_group_keys(x, GROUP_SIZE, CODING), 1)
    if TAIL_N > 0:
        tail_offsets, tail_mask = _row_offsets(program, BLOCK_N, M, N, BLOCK_M, TAIL_N)
        tail = scaling.load_raw(x_ptr + first, tail_offsets, tail_mask, True)
        keys = tl.maximum(keys, tl.max(_group_keys(tail, GROUP_SIZE, CODING), 1))
    m = program * BLOCK_M + tl.arange(0, BLOCK_M)
    if HAS_OUTER_SCALE:
        outer_scale = tl.load(outer_scale_ptr + m, mask=m < M, other=1.0) if BY_ROW else tl.load(outer_scale_ptr)
        scale = outer_scale * scaling.from_bits(
            scaling.e8m0_exponent(keys, scaling.reciprocal(outer_scale), CODING) << 23
        )
        scale = tl.maximum(scale, scaling.TINY)
    else:
        scale = scaling.scale_from_key(keys, CODING, tl.float32)
    factor = scaling.reciprocal(scale)[:, None]
    scaling.store(codes_ptr + first, offsets, _encode(x, factor, CODING), mask, MASKED)
    if TAIL_N > 0:
        scaling.store(codes_ptr + first, tail_offsets, _encode(tail, factor, CODING), tail_mask, True)
    tl.store(scales_ptr + m, scale, mask=m < M)


def unsupported_reason(shape: tuple[int, ...], dtype: Any, coding: scaling.Coding) -> str | None:
    """Return why the kernel does not support this shape, dtype or coding, or None."""
    if len(shape) == 2 and shape[1] > MAX_COLUMNS:
        return f"a row of {shape[1]} elements is longer than {MAX_COLUMNS}"
    if coding.is_stochastic:
        return "it rounds to nearest"
    return quantize_triton.unsupported_reason(shape, dtype, (coding,))


def quantize_rows(
    x: Array,
    coding: scaling.Coding,
    *,
    outer_scale: Array | None = None,
    compute_capability: int | None = None,
) -> tuple[Array, Array]:
    """Return the codes of a matrix with one scale per row.

    Args:
        x: (M, N), fp32, bf16 or fp16, N at most 32768.
        coding: of kind "token", to nearest.
        outer_scale: positive fp32 scalar, or one per row (M, 1). Scales are then powers of two times it, rounded up.
            None: scales are those of the rows.

    Returns:
        Codes (M, N) and fp32 scales (M, 1).

    Raises:
        ValueError: the kernel does not support these arguments; the message has the reason.
    """
    reason = unsupported_reason(x.shape, x.dtype, coding)
    if reason is not None:
        raise ValueError(f"the kernel for rows cannot run: {reason}")
    m, n = x.shape
    block_n, tail_n = _block_widths(n)
    block_m = triton.next_power_of_2(max(ELEMENTS_PER_PROGRAM // (block_n + tail_n), 1))
    programs = -(-m // block_m)
    shapes = [
        jax.ShapeDtypeStruct((m, n), jnp.uint8),
        jax.ShapeDtypeStruct((m, 1), jnp.float32),
    ]
    outer_scales = (
        jnp.ones((1, 1), jnp.float32) if outer_scale is None else outer_scale.reshape(-1, 1).astype(jnp.float32)
    )
    launch = quantize_triton.QuantizeLaunch(block_m, block_n, 8 if block_m == 1 else 4)
    codes, scales = quantize_triton.call(
        _quantize_rows, [x, outer_scales], shapes, programs, launch, compute_capability, TAIL_N=tail_n,
        GROUP_SIZE=GROUP, HAS_OUTER_SCALE=outer_scale is not None, BY_ROW=outer_scales.size > 1,
        CODING=coding.constants,
    )  # fmt: skip
    return bitcast_bytes(codes, coding.dtype), scales


def _block_widths(columns: int) -> tuple[int, int]:
    """Return two powers of two that cover a row, the second possibly 0: a single one may be nearly twice as long."""
    covering = max(triton.next_power_of_2(columns), GROUP)
    tail = max(triton.next_power_of_2(columns - covering // 2), GROUP)
    return (covering // 2, tail) if covering > GROUP and tail <= covering // 4 else (covering, 0)
