"""Statistics of a tensor and of the errors of its codes, in one pass.

In: a matrix or its transpose, its codes, their scales and exponents. Out: fp32 (parts, 16), statistics of parts of the
matrix; then fp32 (statistics,), those of all parts. Hardware: Ada or newer. Reference: `_reference` in
fp8jax/ops/quantization/statistics.py.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.dispatch import call_triton
from pallas_kernels.quantization import codec_triton as codec
from pallas_kernels.quantization import scaling_triton as scaling
from pallas_kernels.quantization.quantize_triton import FP8_CAPABILITY as FP8_CAPABILITY
from pallas_kernels.quantization.quantize_triton import PLAIN_DTYPES

# Four programs on each multiprocessor of an H200.
_MAX_PARTS = 4 * 132
_ALIGNMENT = 16
# Stands for the group size if a row is one group, so that matrices of all lengths share a kernel.
_WHOLE_ROW = 2**30
_STATISTICS = tl.constexpr(16)
# Bits of the columns with maxima and with logarithms of sums; the others are sums.
_MAXIMA = tl.constexpr(0b1100_1110_1000_0100)
_LOG_SUMS = tl.constexpr(0b1_1000)
_INF = tl.constexpr(float("inf"))


@triton.jit
def _sum(x: tl.tensor) -> tl.tensor:
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _max(x: tl.tensor) -> tl.tensor:
    return tl.max(tl.max(x, 1), 0)


@triton.jit
def _repeat_groups(x: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Repeat columns; a single one is left to broadcasting."""
    return scaling.repeat_columns(x, SIZE) if x.shape[1] > 1 else x


@triton.jit
def _compare(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    exponents_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    m_units: tl.tensor,
    n_units: tl.tensor,
    group_rows: tl.tensor,
    statistics_ptr: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT_M: tl.constexpr,
    UNIT_N: tl.constexpr,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_ROW_MASK: tl.constexpr,
    HAS_CODES: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_ONE_SCALE: tl.constexpr,
    IS_DECODED: tl.constexpr,
    STORAGE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    TOLERANCE: tl.constexpr,
    MIN_UNIT: tl.constexpr,
) -> None:
    """Write the statistics of one part: tiles at a distance of the number of programs.

    Squares are summed in units of the largest magnitude so far, so that none overflows.
    """
    GROUPS: tl.constexpr = BLOCK_N // GROUP_SIZE if GROUP_SIZE < BLOCK_N else 1
    GROUP_TILE: tl.constexpr = BLOCK_N // GROUPS
    # A product with a constant shows Triton that addresses are aligned.
    M, N = m_units * UNIT_M, n_units * UNIT_N
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    groups_n = (N + GROUP_SIZE - 1) // GROUP_SIZE
    zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    nonfinite, signal, noise, nonzero, lost, saturated = zeros, zeros, zeros, zeros, zeros, zeros
    group_zeros = tl.zeros((BLOCK_M, GROUPS), tl.float32)
    range_ratio, largest_scale, minus_smallest_scale = group_zeros, group_zeros, group_zeros - _INF
    exponents, groups = group_zeros, group_zeros
    largest_exponent, minus_smallest_exponent = group_zeros, group_zeros - _INF
    rows = tl.zeros((BLOCK_M,), tl.float32)
    amax = tl.full([], 0.0, tl.float32)
    unit = tl.full([], MIN_UNIT, tl.float32)
    tile, tiles = tl.program_id(0), tiles_n * ((M + BLOCK_M - 1) // BLOCK_M)
    while tile < tiles:
        top, left = tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N
        m, n = top + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N)
        row_mask = m < M
        if HAS_ROW_MASK:
            row_mask = tl.load(mask_ptr + m, mask=row_mask, other=0) != 0
        mask = row_mask[:, None] & (n < N)[None, :]
        row, column = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
        first, offsets = top.to(tl.int64) * N + left, row * N + column
        if TRANSPOSED:
            x = scaling.load(x_ptr + left.to(tl.int64) * M + top, row + column * M, mask, MASKED)
        else:
            x = scaling.load(x_ptr + first, offsets, mask, MASKED)
        is_finite = tl.abs(x) < _INF
        nonfinite += tl.where(is_finite, 0.0, 1.0)
        magnitude = tl.where(is_finite, tl.abs(x), 0.0)
        rows += tl.where(row_mask & (left == 0), 1.0, 0.0)
        group_amax = tl.max(tl.reshape(magnitude, (BLOCK_M, GROUPS, GROUP_TILE)), 2)
        tile_amax = _max(group_amax)
        amax = tl.maximum(amax, tile_amax)
        larger_unit = tl.maximum(unit, tile_amax)
        inverse_unit, factor = 1.0 / larger_unit, unit / larger_unit
        factor *= factor
        unit = larger_unit
        magnitude_in_units = magnitude * inverse_unit
        signal = signal * factor + magnitude_in_units * magnitude_in_units
        if HAS_CODES:
            codes = codec.load(codes_ptr + first, offsets, mask, MASKED).to(tl.float32)
            decoded = codes
            if HAS_SCALE:
                group = left // GROUP_SIZE + tl.arange(0, GROUPS)
                group_mask = row_mask[:, None] & (group < groups_n)[None, :]
                group_offsets = (m // group_rows)[:, None] * groups_n + group[None, :]
                if HAS_ONE_SCALE:
                    scale = group_zeros + tl.load(scale_ptr)
                else:
                    scale = scaling.load(scale_ptr, group_offsets, group_mask, True)
                limit = scale * STORAGE.max
                if STORAGE.is_expanded:
                    exponent = tl.load(exponents_ptr + group_offsets, mask=group_mask, other=1.0).to(tl.float32)
                    # A group of several tiles or rows counts where it starts.
                    starts = (m % group_rows == 0)[:, None] & (left % GROUP_SIZE == 0 if GROUPS == 1 else True)
                    starts = group_mask & starts
                    groups += tl.where(starts, 1.0, 0.0)
                    exponents += tl.where(starts, exponent, 0.0)
                    largest_exponent = tl.maximum(largest_exponent, tl.where(starts, exponent, 0.0))
                    minus_smallest_exponent = tl.maximum(minus_smallest_exponent, tl.where(starts, -exponent, -_INF))
                    decoded = codec.decode(
                        tl.reshape(codes, (BLOCK_M * GROUPS, 1, GROUP_TILE)),
                        tl.reshape(scale, (BLOCK_M * GROUPS,)),
                        tl.reshape(exponent, (BLOCK_M * GROUPS,)),
                        1.0,
                        STORAGE,
                    )
                    decoded = tl.reshape(decoded, (BLOCK_M, BLOCK_N))
                elif not IS_DECODED:
                    decoded = codes * _repeat_groups(scale, GROUP_TILE)
                saturated += tl.where(magnitude > _repeat_groups(limit * (1 + TOLERANCE), GROUP_TILE), 1.0, 0.0)
                is_used = (group_amax > 0) & (limit > 0)
                range_ratio = tl.maximum(range_ratio, tl.where(is_used, group_amax / limit, 0.0))
                largest_scale = tl.maximum(largest_scale, tl.where(is_used, limit, 0.0))
                minus_smallest_scale = tl.maximum(minus_smallest_scale, tl.where(is_used, -limit, -_INF))
            difference = x - decoded
            difference = tl.where(tl.abs(difference) < _INF, difference, 0.0) * inverse_unit
            noise = noise * factor + difference * difference
            is_nonzero = magnitude >= scaling.TINY
            nonzero += tl.where(is_nonzero, 1.0, 0.0)
            # The power of a code that is not zero may underflow.
            lost += tl.where(is_nonzero & ((codes if STORAGE.is_expanded else decoded) == 0), 1.0, 0.0)
        tile += tl.num_programs(0)
    # In the order of `NAMES` in fp8jax/ops/quantization/statistics.py.
    statistics_ptr += tl.program_id(0) * _STATISTICS
    log_square = 2 * tl.log(unit)
    tl.store(statistics_ptr, tl.sum(rows, 0) * N)
    tl.store(statistics_ptr + 1, _sum(nonfinite))
    tl.store(statistics_ptr + 2, amax)
    tl.store(statistics_ptr + 3, tl.log(_sum(signal)) + log_square)
    if HAS_CODES:
        tl.store(statistics_ptr + 4, tl.log(_sum(noise)) + log_square)
        tl.store(statistics_ptr + 5, _sum(nonzero))
        tl.store(statistics_ptr + 6, _sum(lost))
        tl.store(statistics_ptr + 7, -float(BITS))
    if HAS_SCALE:
        tl.store(statistics_ptr + 8, _sum(saturated))
        tl.store(statistics_ptr + 9, _max(range_ratio))
        tl.store(statistics_ptr + 10, tl.log2(_max(largest_scale)))
        tl.store(statistics_ptr + 11, -tl.log2(-_max(minus_smallest_scale)))
    if STORAGE.is_expanded:
        tl.store(statistics_ptr + 12, _sum(exponents))
        tl.store(statistics_ptr + 13, _sum(groups))
        tl.store(statistics_ptr + 14, _max(largest_exponent))
        tl.store(statistics_ptr + 15, _max(minus_smallest_exponent))


@triton.jit
def _merge(
    parts_ptr: tl.tensor, parts: tl.tensor, merged_ptr: tl.tensor, STATISTICS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Merge the statistics of parts: some are maxima, some are logarithms of sums, and the others are sums."""
    column = tl.arange(0, _STATISTICS)
    largest = tl.full((_STATISTICS,), -_INF, tl.float32)
    sums = tl.zeros((_STATISTICS,), tl.float32)
    exps = tl.zeros((_STATISTICS,), tl.float32)
    start = 0
    while start < parts:
        part = start + tl.arange(0, BLOCK)[:, None]
        mask = part < parts
        x = tl.load(parts_ptr + part * _STATISTICS + column[None, :], mask=mask, other=-_INF)
        new_largest = tl.maximum(largest, tl.max(x, 0))
        # Any unit serves where all values are -Inf.
        unit = tl.where(new_largest > -_INF, new_largest, 0.0)
        exps = exps * tl.exp(largest - unit) + tl.sum(tl.exp(x - unit[None, :]), 0)
        sums += tl.sum(tl.where(mask, x, 0.0), 0)
        largest = new_largest
        start += BLOCK
    log_sums = tl.where(largest > -_INF, largest + tl.log(exps), -_INF)
    merged = tl.where(((_LOG_SUMS >> column) & 1) > 0, log_sums, sums)
    merged = tl.where(((_MAXIMA >> column) & 1) > 0, largest, merged)
    tl.store(merged_ptr + column, merged, mask=column < STATISTICS)


def unsupported_reason(shape: tuple[int, ...], dtype: Any, group_size: int) -> str | None:
    """Return why the kernel does not support this shape and dtype of an array and columns of a group, or None."""
    rows, columns = math.prod(shape[:-1]), math.prod(shape[-1:])
    if rows * columns == 0:
        return f"shape {shape} has no elements"
    if max(rows, columns) >= 2**26:
        return f"a side of {max(rows, columns)} is too long for its offsets within a tile"
    if dtype not in PLAIN_DTYPES:
        return f"the matrix has dtype {jnp.dtype(dtype)}, not {call_triton.join_dtypes(PLAIN_DTYPES)}"
    if group_size < columns and group_size & (group_size - 1):
        return f"a group of {group_size} is no power of two"
    return None


def merge(parts: Array, num_statistics: int, *, compute_capability: int | None = None) -> Array:
    """Return the statistics of all parts.

    Args:
        parts: fp32 (parts, 16), from `compare_parts`.
        num_statistics: how many of the statistics to return, from the first on.

    Returns:
        fp32 (num_statistics,).
    """
    (merged,) = call_triton.call(
        parts, len(parts),
        kernel=_merge,
        out_shapes=[jax.ShapeDtypeStruct((num_statistics,), jnp.float32)],
        num_programs=1,
        num_warps=4,
        compute_capability=compute_capability,
        STATISTICS=num_statistics,
        BLOCK=128,
    )  # fmt: skip
    return merged


def compare_parts(
    x: Array,
    codes: Array | None = None,
    scale: Array | None = None,
    exponents: Array | None = None,
    row_mask: Array | None = None,
    *,
    largest_code: float = 1.0,
    tolerance: float = 0.0,
    bits: int = 0,
    group_shape: tuple[int, int] = (1, 1),
    is_decoded: bool = False,
    is_transposed: bool = False,
    min_unit: float = scaling.TINY.value,
    compute_capability: int | None = None,
) -> Array:
    """Return the statistics of parts of a matrix, and of the errors of its codes.

    Args:
        x: fp32, bf16 or fp16, the matrix (M, N), or an array (..., N) of M rows; (N, M) if `is_transposed`.
        codes: FP8, int8 or floating, of the matrix's shape; None for statistics of `x` alone.
        scale: fp32, one for each group of elements, (ceil(M / group rows), ceil(N / group columns)). None if `codes`
            are decoded values that have none.
        exponents: range expansion of the groups, in the shape of `scale`, or None.
        row_mask: bool (M, 1), the rows that are counted; None counts all.
        largest_code: largest value of the format.
        tolerance: half the distance of the largest value to the next one, relative to it.
        bits: width of a code.
        group_shape: rows and columns of the elements that share a scale.
        is_decoded: whether `codes` are already multiplied by their scales.
        min_unit: squares are summed in units of the largest magnitude so far, at least of this number.

    Returns:
        fp32 (parts, 16), in the order of `NAMES` in fp8jax/ops/quantization/statistics.py. Those of missing arrays are
        undefined.
    """
    n = x.shape[0] if is_transposed else math.prod(x.shape[-1:])
    m = x.size // n
    unit_m, unit_n = (math.gcd(length, _ALIGNMENT) for length in (m, n))
    block_m, block_n = (32, 32) if is_transposed else (8, 128)
    group_rows, group_size = group_shape
    arrays = codes, scale, exponents, None if row_mask is None else row_mask.astype(jnp.uint8)
    parts = min(-(-m // block_m) * -(-n // block_n), _MAX_PARTS)
    (statistics,) = call_triton.call(
        x, *(x if array is None else array for array in arrays), m // unit_m, n // unit_n, group_rows,
        kernel=_compare,
        out_shapes=[jax.ShapeDtypeStruct((parts, _STATISTICS.value), jnp.float32)],
        num_programs=parts,
        num_warps=4,
        compute_capability=compute_capability,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        UNIT_M=unit_m,
        UNIT_N=unit_n,
        MASKED=m % block_m > 0 or n % block_n > 0 or row_mask is not None,
        TRANSPOSED=is_transposed,
        HAS_ROW_MASK=row_mask is not None,
        HAS_CODES=codes is not None,
        HAS_SCALE=scale is not None,
        HAS_ONE_SCALE=scale is not None and scale.size == 1,
        IS_DECODED=is_decoded,
        STORAGE=codec.UNSCALED._replace(
            is_expanded=exponents is not None, max=largest_code, log2_max=math.log2(largest_code)
        ),
        GROUP_SIZE=group_size if group_size < n else _WHOLE_ROW,
        BITS=bits,
        TOLERANCE=tolerance,
        MIN_UNIT=min_unit,
    )  # fmt: skip
    return statistics
