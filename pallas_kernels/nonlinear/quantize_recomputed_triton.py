"""FP8 codes of norm and activation results, and of activation cotangents, recomputed from operands or residuals.

In: `Operands` on (M, N), fp32 scales. Out: FP8 codes (M, N) and (N, M). Hardware: Ada or newer. Reference: `quantize`
and `quantize_and_predict` in fp8jax/ops/quantization/fused_reference.py.

The 16-bit result is not stored. Scales come from other kernels.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.dispatch.call_triton import bitcast_bytes
from pallas_kernels.nonlinear import operations_triton as ops
from pallas_kernels.nonlinear.operations_triton import Operation
from pallas_kernels.quantization import quantize_triton
from pallas_kernels.quantization import scaling_triton as scaling
from pallas_kernels.quantization import storage_triton as storage
from pallas_kernels.quantization import strided_tiles_triton as strided_tiles
from pallas_kernels.quantization.quantize_triton import QuantizeLaunch

# The kinds of results: of a norm, of an activation, and the cotangents of an activation's gate and up.
NORM, RESULT, GATE, UP = range(4)
# A numpy array, because JAX would launch a kernel for each constant, and would not share equal calls.
_PLACEHOLDER = np.ones((1, 1), np.float32)
FP8_CAPABILITY = quantize_triton.FP8_CAPABILITY


class ResultKinds(NamedTuple):
    """Results of a kernel: a forward result, of a norm or not; or the cotangent of gate, of up alone, or of both."""

    is_forward: bool
    is_norm: bool
    is_up_only: bool
    is_pair: bool


def result_kinds(kinds: tuple[int, ...]) -> ResultKinds:
    return ResultKinds(kinds[0] in (NORM, RESULT), kinds[0] == NORM, kinds[0] == UP, kinds[1:] == (UP,))


class Operands(NamedTuple):
    """Arrays of an operation on (M, N); ten-bit codes are packed, (M, 5 N / 4).

    Scales of codes are (M, N / group), values per row (M,), values per channel (N,).
    """

    first: Array
    first_scale: Array | None = None
    up: Array | None = None
    up_scale: Array | None = None
    activated: Array | None = None
    activated_scale: Array | None = None
    gradient: Array | None = None
    rstd: Array | None = None
    mean: Array | None = None
    weight: Array | None = None
    bias: Array | None = None


@triton.jit
def _load_slice(
    p: tl.tensor, j: tl.tensor, first: tl.tensor, i: tl.tensor, top: tl.tensor, left: tl.tensor, n: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, OPERATION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the operands of cotangents for slice `j` of a tile, every fourth row."""
    offsets = ((4 * i + j) * N)[:, None] + tl.arange(0, n.shape[0])[None, :]
    return ops.load_cotangent_operands(p, first, offsets, top + 4 * i + j, left, n, M, N, MASKED, OPERATION)


@triton.jit
def _load_slices(
    p: tl.tensor, first: tl.tensor, i: tl.tensor, top: tl.tensor, left: tl.tensor, n: tl.tensor, M: tl.constexpr,
    N: tl.constexpr, MASKED: tl.constexpr, OPERATION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the operands of all four slices; all loads precede the first use."""
    return (
        _load_slice(p, 0, first, i, top, left, n, M, N, MASKED, OPERATION),
        _load_slice(p, 1, first, i, top, left, n, M, N, MASKED, OPERATION),
        _load_slice(p, 2, first, i, top, left, n, M, N, MASKED, OPERATION),
        _load_slice(p, 3, first, i, top, left, n, M, N, MASKED, OPERATION),
    )


@triton.jit
def _store_codes(
    y: tl.tensor, factor: tl.tensor, words: tl.tensor, j: tl.tensor, rows_ptr: tl.tensor, offsets: tl.tensor,
    mask: tl.tensor, N: tl.constexpr, MASKED: tl.constexpr, CODING: tl.constexpr, STORE_ROWS: tl.constexpr,
    STORE_COLUMNS: tl.constexpr, FINITE: tl.constexpr = False,
) -> tl.tensor:  # fmt: skip
    """Store the codes of slice `j`, and return the words of the transposed copy with them inserted."""
    codes = scaling.encode(y, scaling.apply_inverse_scale(y, factor, CODING, FINITE), 0, CODING, FINITE)
    if STORE_ROWS:
        scaling.store(rows_ptr, offsets, codes, mask, MASKED)
    if STORE_COLUMNS:
        words = strided_tiles.insert_byte(words, codes, j, N % 4 == 0)
    return words


@triton.jit
def _store_all_codes(
    y0: tl.tensor, y1: tl.tensor, y2: tl.tensor, factor0: tl.tensor, factor1: tl.tensor, factor2: tl.tensor,
    words0: tl.tensor, words1: tl.tensor, words2: tl.tensor, j: tl.tensor, rows0: tl.tensor, rows1: tl.tensor,
    columns2: tl.tensor, i: tl.tensor, top: tl.tensor, n: tl.tensor, M: tl.constexpr, N: tl.constexpr,
    MASKED: tl.constexpr, KINDS: tl.constexpr, CODING: tl.constexpr, STORE_ROWS: tl.constexpr,
    STORE_COLUMNS: tl.constexpr, RESULT_CODING: tl.constexpr, FINITE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the words of `_store_codes` for the requested cotangents and the recomputed result."""
    offsets, mask = (
        ((4 * i + j) * N)[:, None] + tl.arange(0, n.shape[0])[None, :],
        scaling.tile_mask(top + 4 * i + j, n, M, N),
    )
    if RESULT_CODING.kind != "none":
        words2 = _store_codes(
            y2, factor2, words2, j, columns2, offsets, mask, N, MASKED, RESULT_CODING, False, True, FINITE
        )
    if KINDS.is_up_only:
        y0 = y1
    words0 = _store_codes(
        y0, factor0, words0, j, rows0, offsets, mask, N, MASKED, CODING, STORE_ROWS, STORE_COLUMNS, FINITE
    )
    if KINDS.is_pair:
        words1 = _store_codes(
            y1, factor1, words1, j, rows1, offsets, mask, N, MASKED, CODING, STORE_ROWS, STORE_COLUMNS, FINITE
        )
    return words0, words1, words2


@triton.jit
def _quantize_results(
    first_ptr: tl.tensor, first_scale: tl.tensor, up: tl.tensor, up_scale: tl.tensor, activated: tl.tensor,
    activated_scale: tl.tensor, gradient: tl.tensor, rstd: tl.tensor, mean: tl.tensor, weight: tl.tensor,
    bias: tl.tensor, scale0: tl.tensor, scale1: tl.tensor, scale2: tl.tensor, rows0: tl.tensor, columns0: tl.tensor,
    rows1: tl.tensor, columns1: tl.tensor, columns2: tl.tensor, sums0: tl.tensor, sums1: tl.tensor, M: tl.constexpr,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPERATION: tl.constexpr, KINDS: tl.constexpr,
    CODING: tl.constexpr, STORE_ROWS: tl.constexpr, STORE_COLUMNS: tl.constexpr, RESULT_CODING: tl.constexpr,
    BY_ROW: tl.constexpr, SUMS: tl.constexpr,
) -> None:  # fmt: skip
    """Store the codes of a tile; with cotangents, optionally transposed codes of the result and column sums."""
    p = Operands(first_ptr, first_scale, up, up_scale, activated, activated_scale, gradient, rstd, mean, weight, bias)
    MASKED: tl.constexpr = M % BLOCK_M > 0 or N % BLOCK_N > 0
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    IS_PAIR: tl.constexpr = KINDS.is_pair
    program = tl.program_id(0)
    top, left = program // TILES_N * BLOCK_M, program % TILES_N * BLOCK_N
    first = top.to(tl.int64) * N + left
    i, n = tl.arange(0, BLOCK_M // 4), left + tl.arange(0, BLOCK_N)
    words0 = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.uint32)
    words1 = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.uint32)
    words2 = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.uint32)
    factor2 = scaling.reciprocal(tl.load(scale2)) if RESULT_CODING.kind != "none" else 1.0
    if not BY_ROW:
        factor0, factor1 = scaling.reciprocal(tl.load(scale0)), scaling.reciprocal(tl.load(scale1))
    if KINDS.is_forward:
        for j in tl.range(4):
            offsets, m = ((4 * i + j) * N)[:, None] + tl.arange(0, BLOCK_N)[None, :], top + 4 * i + j
            y0 = ops.compute_result(p, first, offsets, m, left, n, M, N, MASKED, OPERATION, KINDS.is_norm)
            mask = scaling.tile_mask(m, n, M, N)
            if BY_ROW:
                factor0 = ops.row_inverse_scales(scale0, m, M, True)
            words0 = _store_codes(
                y0, factor0, words0, j, rows0 + first, offsets, mask, N, MASKED, CODING, STORE_ROWS, STORE_COLUMNS
            )
    else:
        # Assume finite values, and repeat the tile if this sum is not 0.
        nonfinite_sum = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.float32)
        total0 = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.float32)
        total1 = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.float32)
        slices = _load_slices(p, first, i, top, left, n, M, N, MASKED, OPERATION)
        for j in tl.static_range(4):
            y0, y1, y2 = ops.compute_cotangents(slices[j], OPERATION, OPERATION.dtype)
            nonfinite_sum = tl.fma(y1, 0.0, tl.fma(y0, 0.0, nonfinite_sum))
            if RESULT_CODING.kind != "none":
                nonfinite_sum = tl.fma(y2, 0.0, nonfinite_sum)
            if SUMS:
                total0 += y1 if KINDS.is_up_only else y0
                total1 += y1
            if BY_ROW:
                factor0 = ops.row_inverse_scales(scale0, top + 4 * i + j, M, True)
                factor1 = ops.row_inverse_scales(scale1, top + 4 * i + j, M, True) if IS_PAIR else factor0
            words0, words1, words2 = _store_all_codes(
                y0, y1, y2, factor0, factor1, factor2, words0, words1, words2, j, rows0 + first, rows1 + first,
                columns2, i, top, n, M, N, MASKED, KINDS, CODING, STORE_ROWS, STORE_COLUMNS, RESULT_CODING, True,
            )  # fmt: skip
        if SUMS:
            sum_offsets = (program // TILES_N).to(tl.int64) * N + n
            tl.store(sums0 + sum_offsets, tl.sum(total0, 0), mask=n < N)
            if IS_PAIR:
                tl.store(sums1 + sum_offsets, tl.sum(total1, 0), mask=n < N)
        if tl.reduce(tl.reduce(nonfinite_sum, 1, ops.larger_or_nan), 0, ops.larger_or_nan) != 0:
            words0 = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.uint32)
            words1 = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.uint32)
            words2 = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.uint32)
            for k in tl.range(4):
                x = _load_slice(p, k, first, i, top, left, n, M, N, MASKED, OPERATION)
                y0, y1, y2 = ops.compute_cotangents(x, OPERATION, OPERATION.dtype)
                if BY_ROW:
                    factor0 = ops.row_inverse_scales(scale0, top + 4 * i + k, M, True)
                    factor1 = ops.row_inverse_scales(scale1, top + 4 * i + k, M, True) if IS_PAIR else factor0
                words0, words1, words2 = _store_all_codes(
                    y0, y1, y2, factor0, factor1, factor2, words0, words1, words2, k, rows0 + first, rows1 + first,
                    columns2, i, top, n, M, N, MASKED, KINDS, CODING, STORE_ROWS, STORE_COLUMNS, RESULT_CODING, False,
                )  # fmt: skip
    if STORE_COLUMNS:
        strided_tiles.store_transposed(columns0, top, left, i, n, words0, M, N, MASKED)
        if IS_PAIR:
            strided_tiles.store_transposed(columns1, top, left, i, n, words1, M, N, MASKED)
    if RESULT_CODING.kind != "none":
        strided_tiles.store_transposed(columns2, top, left, i, n, words2, M, N, MASKED)


@triton.jit
def _quantize_and_predict(
    first_ptr: tl.tensor, first_scale: tl.tensor, up: tl.tensor, up_scale: tl.tensor, activated: tl.tensor,
    activated_scale: tl.tensor, gradient: tl.tensor, rstd: tl.tensor, mean: tl.tensor, weight: tl.tensor,
    bias: tl.tensor, scale: tl.tensor, transposed_ptr: tl.tensor, amax0_ptr: tl.tensor, amax1_ptr: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OPERATION: tl.constexpr,
    CODING: tl.constexpr, BY_ROW: tl.constexpr,
) -> None:  # fmt: skip
    """Store transposed codes of an activation's result and the amax of its cotangents, per row with BY_ROW."""
    p = Operands(first_ptr, first_scale, up, up_scale, activated, activated_scale, gradient, rstd, mean, weight, bias)
    MASKED: tl.constexpr = M % BLOCK_M > 0 or N % BLOCK_N > 0
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = scaling.reversed_program_id()
    top, left = program // TILES_N * BLOCK_M, program % TILES_N * BLOCK_N
    first = top.to(tl.int64) * N + left
    i, n = tl.arange(0, BLOCK_M // 4), left + tl.arange(0, BLOCK_N)
    if not BY_ROW:
        factor = scaling.reciprocal(tl.load(scale))
    row_offsets = program % TILES_N * M + top
    words = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.uint32)
    running_amax0 = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.float32)
    running_amax1 = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.float32)
    slices = _load_slices(p, first, i, top, left, n, M, N, MASKED, OPERATION)
    for j in tl.static_range(4):
        y0, y1, y = ops.compute_cotangents(slices[j], OPERATION, 0)
        running_amax0, running_amax1 = (
            ops.larger_or_nan(running_amax0, tl.abs(y0)),
            ops.larger_or_nan(running_amax1, tl.abs(y1)),
        )
        if BY_ROW:
            r = 4 * i + j
            factor = ops.row_inverse_scales(scale, top + r, M, True)
            tl.store(amax0_ptr + row_offsets + r, ops.row_amax_or_nonfinite(y0, OPERATION.dtype), mask=top + r < M)
            if OPERATION.is_gated:
                tl.store(amax1_ptr + row_offsets + r, ops.row_amax_or_nonfinite(y1, OPERATION.dtype), mask=top + r < M)
        words = _store_codes(y, factor, words, j, transposed_ptr, 0, 0, N, MASKED, CODING, False, True)
    strided_tiles.store_transposed(transposed_ptr, top, left, i, n, words, M, N, MASKED)
    amax0, amax1 = (
        ops.tile_amax_or_nonfinite(running_amax0, OPERATION.dtype),
        ops.tile_amax_or_nonfinite(running_amax1, OPERATION.dtype),
    )
    if not (tl.maximum(amax0, amax1, propagate_nan=tl.PropagateNan.ALL) < float("inf")):
        max_key0 = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.int32)
        max_key1 = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.int32)
        for k in tl.range(4):
            x, m = _load_slice(p, k, first, i, top, left, n, M, N, MASKED, OPERATION), top + 4 * i + k
            y0, y1, _ = ops.compute_cotangents(x, OPERATION, OPERATION.dtype)
            key0, key1 = (
                ops.masked_magnitude_key(y0, m, n, M, N, MASKED, CODING),
                ops.masked_magnitude_key(y1, m, n, M, N, MASKED, CODING),
            )
            if BY_ROW:
                tl.store(
                    amax0_ptr + row_offsets + 4 * i + k, scaling.magnitude_from_key(tl.max(key0, 1), CODING), mask=m < M
                )
                if OPERATION.is_gated:
                    tl.store(
                        amax1_ptr + row_offsets + 4 * i + k,
                        scaling.magnitude_from_key(tl.max(key1, 1), CODING),
                        mask=m < M,
                    )
            max_key0, max_key1 = tl.maximum(max_key0, key0), tl.maximum(max_key1, key1)
        amax0 = scaling.magnitude_from_key(tl.max(tl.max(max_key0, 1), 0), CODING)
        amax1 = scaling.magnitude_from_key(tl.max(tl.max(max_key1, 1), 0), CODING)
    if not BY_ROW:
        tl.store(amax0_ptr + program, amax0)
        if OPERATION.is_gated:
            tl.store(amax1_ptr + program, amax1)


def quantize(
    operation: Operation,
    kinds: tuple[int, ...],
    operands: Operands,
    scales: tuple[Array, ...],
    dtype: Any,
    *,
    rows: bool,
    columns: bool,
    result_coding: tuple[Array, Any] | None = None,
    sums: bool = False,
    launch: QuantizeLaunch | None = None,
    compute_capability: int | None = None,
) -> Any:
    """Return the codes of one or two results of an operation.

    Args:
        kinds: one or two of NORM, RESULT, GATE and UP.
        operands: arrays or residuals of the operation.
        scales: for each result an fp32 scalar, or (M,) for one per row.
        dtype: float8_e4m3fn or float8_e5m2.
        rows, columns: whether to return codes (M, N) and transposed codes (N, M).
        result_coding: scale and dtype of transposed codes of the activation's result, along with cotangents.
        sums: whether to return column sums of the cotangents.

    Returns:
        A list of (codes, transposed codes) per result, then (None, codes) for `result_coding`; None for what is not
        requested. With `sums`, a pair of this list and the list of sums, fp32 (N,).
    """
    m, n = storage.matrix_shape(operands.first, operation)
    launch = launch or _best_launch(kinds, n, rows, result_coding is not None)
    placeholder = (1, 1)
    shapes = [(m, n) if rows else placeholder, (n, m) if columns else placeholder]
    shapes += [*(shapes if len(kinds) == 2 else [placeholder, placeholder]), (n, m) if result_coding else placeholder]
    tiles_m = -(-m // launch.block_m)
    sum_shapes = [(tiles_m, n) if sums and i < len(kinds) else placeholder for i in range(2)]
    scale_operands = [scales[0], scales[-1], result_coding[0] if result_coding else scales[0]]
    outputs = quantize_triton.call(
        _quantize_results, [*operand_arrays(operands), *(s.reshape(-1, 1) for s in scale_operands)],
        [*(jax.ShapeDtypeStruct(s, jnp.uint8) for s in shapes),
         *(jax.ShapeDtypeStruct(s, jnp.float32) for s in sum_shapes)],
        tiles_m * -(-n // launch.block_n), launch, compute_capability, shape=(m, n),
        OPERATION=operation, KINDS=result_kinds(kinds), CODING=scaling.Coding("tensor", dtype).constants,
        STORE_ROWS=rows, STORE_COLUMNS=columns, BY_ROW=scales[0].ndim > 0, SUMS=sums,
        RESULT_CODING=scaling.Coding("tensor", result_coding[1]).constants if result_coding else scaling.NO_CODING,
    )  # fmt: skip
    types = (dtype, dtype, dtype, dtype, result_coding and result_coding[1])
    codes = [bitcast_bytes(x, d) if w else None
              for x, d, w in zip(outputs[:5], types, (rows, columns, rows, columns, result_coding),
                  strict=True)]  # fmt: skip
    pairs: list[Any] = [(codes[2 * i], codes[2 * i + 1]) for i in range(len(kinds))]
    pairs += [(None, codes[4])] if result_coding else []
    return (pairs, [jnp.sum(x, 0) for x in outputs[5 : 5 + len(kinds)]]) if sums else pairs


def _best_launch(kinds: tuple[int, ...], channels: int, rows: bool, has_result_codes: bool) -> QuantizeLaunch:
    """Return launch parameters that were chosen by measurement on Hopper."""
    if kinds == (NORM,) and not rows and channels % 256 == 0:
        return QuantizeLaunch(32, 256, 4)
    if not rows:
        return QuantizeLaunch(32, 128, 4)
    return QuantizeLaunch(64, 128, 16 if has_result_codes and len(kinds) > 1 else 8)


def quantize_and_predict(
    operation: Operation,
    operands: Operands,
    scale: Array,
    dtype: Any,
    *,
    launch: QuantizeLaunch | None = None,
    compute_capability: int | None = None,
) -> tuple[Array, list[Array]]:
    """Return codes (N, M) of an activation's result, and the amax of its cotangents, for the next scale.

    Each amax is that of `sampled_amax_triton.compute_amaxes`, an fp32 scalar. The arguments are those of `quantize`;
    `operands.gradient` is the cotangent of the result. With a scale per row, (M,), each amax is (M,), too.
    """
    m, n = storage.matrix_shape(operands.first, operation)
    launch, by_row = launch or QuantizeLaunch(32, 128, 4), scale.ndim > 0
    tiles_n, is_pair = -(-n // launch.block_n), operation.is_gated
    tiles = -(-m // launch.block_m) * tiles_n
    shape = (tiles_n, m) if by_row else (tiles,)
    shapes = [jax.ShapeDtypeStruct((n, m), jnp.uint8)]
    shapes += [jax.ShapeDtypeStruct(shape if present else (1,), jnp.float32) for present in (True, is_pair)]
    codes, *tile_amax = quantize_triton.call(
        _quantize_and_predict, [*operand_arrays(operands), scale.reshape(-1, 1)], shapes, tiles, launch,
        compute_capability, shape=(m, n), OPERATION=operation, CODING=scaling.Coding("tensor", dtype).constants,
        BY_ROW=by_row,
    )  # fmt: skip
    axis = 0 if by_row else None
    return bitcast_bytes(codes, dtype), [jnp.max(x, axis) for x in tile_amax[: 1 + is_pair]]


def operand_arrays(operands: Operands) -> list[Array]:
    """Return all operands, codes as bytes, with one element for a missing one."""
    arrays: list[Any] = [_PLACEHOLDER if x is None else x for x in operands]
    return [bitcast_bytes(x, jnp.uint8) for x in arrays]
