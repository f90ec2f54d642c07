"""Quantizes what norms and activations compute, and the gradients of the latter, without writing it out in between.

A tile is computed from the operation's own operands, which are read as they are or from the codes that the operation
keeps, and becomes codes under a given scale, as they are and transposed. Other kernels find the scales.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import operations_triton as on
from pallas_kernels import quantize_triton
from pallas_kernels import scaling_triton as device
from pallas_kernels import slices_triton as slicing
from pallas_kernels import storage_triton as storage
from pallas_kernels.operations_triton import Operation
from pallas_kernels.quantize_triton import QuantizeLaunch

# What a tile is: the result of a norm or of an activation, or the cotangent of an activation's gate or up.
NORM, RESULT, GATE, UP = range(4)
# Stands for what is not given. JAX would make each of its own a kernel, and calls that differ in nothing else apart.
_ONE = np.ones((1, 1), np.float32)
FP8_CAPABILITY = quantize_triton.FP8_CAPABILITY


class Kinds(NamedTuple):
    """What a kernel makes: a result, that of a norm or not; or cotangents, that of up alone or both."""

    forward: bool
    norm: bool
    only_up: bool
    both: bool


def kinds_of(kinds: tuple[int, ...]) -> Kinds:
    return Kinds(kinds[0] in (NORM, RESULT), kinds[0] == NORM, kinds[0] == UP, kinds[1:] == (UP,))


class Operands(NamedTuple):
    """Arrays of an operation on (M, N), codes of ten bits packed: (M, 5 N / 4).

    Scales of codes are (M, N / group), rows' values (M,), channels' (N,).
    """

    first: Array
    first_scale: Array | None = None
    up: Array | None = None
    up_scale: Array | None = None
    activated: Array | None = None
    activated_scale: Array | None = None
    gradient: Array | None = None
    inverse: Array | None = None
    mean: Array | None = None
    weight: Array | None = None
    bias: Array | None = None


@triton.jit
def _slice(
    p: tl.tensor, j: tl.tensor, first: tl.tensor, i: tl.tensor, top: tl.tensor, left: tl.tensor, n: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, OPERATION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The operands of cotangents of slice `j` of a tile, which is every fourth row."""
    at = ((4 * i + j) * N)[:, None] + tl.arange(0, n.shape[0])[None, :]
    return on.operands(p, first, at, top + 4 * i + j, left, n, M, N, MASKED, OPERATION)


@triton.jit
def _slices(
    p: tl.tensor, first: tl.tensor, i: tl.tensor, top: tl.tensor, left: tl.tensor, n: tl.tensor, M: tl.constexpr,
    N: tl.constexpr, MASKED: tl.constexpr, OPERATION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Those of all four: all loads before the first use."""
    return (
        _slice(p, 0, first, i, top, left, n, M, N, MASKED, OPERATION),
        _slice(p, 1, first, i, top, left, n, M, N, MASKED, OPERATION),
        _slice(p, 2, first, i, top, left, n, M, N, MASKED, OPERATION),
        _slice(p, 3, first, i, top, left, n, M, N, MASKED, OPERATION),
    )


@triton.jit
def _put(
    y: tl.tensor, factor: tl.tensor, words: tl.tensor, j: tl.tensor, rows_ptr: tl.tensor, at: tl.tensor,
    here: tl.tensor, N: tl.constexpr, MASKED: tl.constexpr, HOW: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, FINITE: tl.constexpr = False,
) -> tl.tensor:  # fmt: skip
    """Writes the codes of slice `j`; returns the words of the transposed copy with them."""
    codes = device.encode(y, device.scaled(y, factor, HOW, FINITE), 0, HOW, FINITE)
    if ROWS:
        device.store(rows_ptr, at, codes, here, MASKED)
    if COLUMNS:
        words = slicing.insert(words, codes, j, N % 4 == 0)
    return words


@triton.jit
def _put_all(
    y0: tl.tensor, y1: tl.tensor, y2: tl.tensor, factor0: tl.tensor, factor1: tl.tensor, factor2: tl.tensor,
    words0: tl.tensor, words1: tl.tensor, words2: tl.tensor, j: tl.tensor, rows0: tl.tensor, rows1: tl.tensor,
    columns2: tl.tensor, i: tl.tensor, top: tl.tensor, n: tl.tensor, M: tl.constexpr, N: tl.constexpr,
    MASKED: tl.constexpr, KINDS: tl.constexpr, HOW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    AGAIN: tl.constexpr, FINITE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`_put` of the cotangents that are asked for, and of the result again."""
    at, here = ((4 * i + j) * N)[:, None] + tl.arange(0, n.shape[0])[None, :], device.inside(top + 4 * i + j, n, M, N)
    if AGAIN.kind != "none":
        words2 = _put(y2, factor2, words2, j, columns2, at, here, N, MASKED, AGAIN, False, True, FINITE)
    if KINDS.only_up:
        y0 = y1
    words0 = _put(y0, factor0, words0, j, rows0, at, here, N, MASKED, HOW, ROWS, COLUMNS, FINITE)
    if KINDS.both:
        words1 = _put(y1, factor1, words1, j, rows1, at, here, N, MASKED, HOW, ROWS, COLUMNS, FINITE)
    return words0, words1, words2


@triton.jit
def _codes(
    first_ptr: tl.tensor, first_scale: tl.tensor, up: tl.tensor, up_scale: tl.tensor, activated: tl.tensor,
    activated_scale: tl.tensor, gradient: tl.tensor, inverse: tl.tensor, mean: tl.tensor, weight: tl.tensor,
    bias: tl.tensor, scale0: tl.tensor, scale1: tl.tensor, scale2: tl.tensor, rows0: tl.tensor, columns0: tl.tensor,
    rows1: tl.tensor, columns1: tl.tensor, columns2: tl.tensor, sums0: tl.tensor, sums1: tl.tensor, M: tl.constexpr,
    N: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, OPERATION: tl.constexpr, KINDS: tl.constexpr,
    HOW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AGAIN: tl.constexpr, BY_ROW: tl.constexpr,
    SUMS: tl.constexpr,
) -> None:  # fmt: skip
    """Codes of a tile, in four slices of every fourth row, as `quantize_triton` makes them.

    With cotangents also transposed ones of the result, as AGAIN says, and sums of the tile's columns.
    """
    p = Operands(
        first_ptr, first_scale, up, up_scale, activated, activated_scale, gradient, inverse, mean, weight, bias
    )
    MASKED: tl.constexpr = M % HIGH > 0 or N % WIDE > 0
    ACROSS: tl.constexpr = (N + WIDE - 1) // WIDE
    BOTH: tl.constexpr = KINDS.both
    program = tl.program_id(0)
    top, left = program // ACROSS * HIGH, program % ACROSS * WIDE
    first = top.to(tl.int64) * N + left
    i, n = tl.arange(0, HIGH // 4), left + tl.arange(0, WIDE)
    words0 = tl.zeros((HIGH // 4, WIDE), tl.uint32)
    words1 = tl.zeros((HIGH // 4, WIDE), tl.uint32)
    words2 = tl.zeros((HIGH // 4, WIDE), tl.uint32)
    factor2 = device.inverse(tl.load(scale2)) if AGAIN.kind != "none" else 1.0
    if not BY_ROW:
        factor0, factor1 = device.inverse(tl.load(scale0)), device.inverse(tl.load(scale1))
    if KINDS.forward:
        for j in tl.range(4):
            at, m = ((4 * i + j) * N)[:, None] + tl.arange(0, WIDE)[None, :], top + 4 * i + j
            y0 = on.result(p, first, at, m, left, n, M, N, MASKED, OPERATION, KINDS.norm)
            here = device.inside(m, n, M, N)
            if BY_ROW:
                factor0 = on.row_factors(scale0, m, M, True)
            words0 = _put(y0, factor0, words0, j, rows0 + first, at, here, N, MASKED, HOW, ROWS, COLUMNS)
    else:
        # As if all were finite, and again if not: then what is added up here is not 0.
        nothing = tl.zeros((HIGH // 4, WIDE), tl.float32)
        total0 = tl.zeros((HIGH // 4, WIDE), tl.float32)
        total1 = tl.zeros((HIGH // 4, WIDE), tl.float32)
        slices = _slices(p, first, i, top, left, n, M, N, MASKED, OPERATION)
        for j in tl.static_range(4):
            y0, y1, y2 = on.cotangents(slices[j], OPERATION, OPERATION.dtype)
            nothing = tl.fma(y1, 0.0, tl.fma(y0, 0.0, nothing))
            if AGAIN.kind != "none":
                nothing = tl.fma(y2, 0.0, nothing)
            if SUMS:
                total0 += y1 if KINDS.only_up else y0
                total1 += y1
            if BY_ROW:
                factor0 = on.row_factors(scale0, top + 4 * i + j, M, True)
                factor1 = on.row_factors(scale1, top + 4 * i + j, M, True) if BOTH else factor0
            words0, words1, words2 = _put_all(
                y0, y1, y2, factor0, factor1, factor2, words0, words1, words2, j, rows0 + first, rows1 + first,
                columns2, i, top, n, M, N, MASKED, KINDS, HOW, ROWS, COLUMNS, AGAIN, True,
            )  # fmt: skip
        if SUMS:
            place = (program // ACROSS).to(tl.int64) * N + n
            tl.store(sums0 + place, tl.sum(total0, 0), mask=n < N)
            if BOTH:
                tl.store(sums1 + place, tl.sum(total1, 0), mask=n < N)
        if tl.reduce(tl.reduce(nothing, 1, on.larger_or_nan), 0, on.larger_or_nan) != 0:
            words0 = tl.zeros((HIGH // 4, WIDE), tl.uint32)
            words1 = tl.zeros((HIGH // 4, WIDE), tl.uint32)
            words2 = tl.zeros((HIGH // 4, WIDE), tl.uint32)
            for k in tl.range(4):
                x = _slice(p, k, first, i, top, left, n, M, N, MASKED, OPERATION)
                y0, y1, y2 = on.cotangents(x, OPERATION, OPERATION.dtype)
                if BY_ROW:
                    factor0 = on.row_factors(scale0, top + 4 * i + k, M, True)
                    factor1 = on.row_factors(scale1, top + 4 * i + k, M, True) if BOTH else factor0
                words0, words1, words2 = _put_all(
                    y0, y1, y2, factor0, factor1, factor2, words0, words1, words2, k, rows0 + first, rows1 + first,
                    columns2, i, top, n, M, N, MASKED, KINDS, HOW, ROWS, COLUMNS, AGAIN, False,
                )  # fmt: skip
    if COLUMNS:
        slicing.store_words(columns0, top, left, i, n, words0, M, N, MASKED)
        if BOTH:
            slicing.store_words(columns1, top, left, i, n, words1, M, N, MASKED)
    if AGAIN.kind != "none":
        slicing.store_words(columns2, top, left, i, n, words2, M, N, MASKED)


@triton.jit
def _ahead(
    first_ptr: tl.tensor, first_scale: tl.tensor, up: tl.tensor, up_scale: tl.tensor, activated: tl.tensor,
    activated_scale: tl.tensor, gradient: tl.tensor, inverse: tl.tensor, mean: tl.tensor, weight: tl.tensor,
    bias: tl.tensor, scale: tl.tensor, columns: tl.tensor, peaks0: tl.tensor, peaks1: tl.tensor, M: tl.constexpr,
    N: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, OPERATION: tl.constexpr, HOW: tl.constexpr,
    BY_ROW: tl.constexpr,
) -> None:  # fmt: skip
    """The transposed codes of an activation's result, as `_codes` makes them, and the peaks of its cotangents.

    BY_ROW, under a scale for each row, and peaks of each row's part.
    """
    p = Operands(
        first_ptr, first_scale, up, up_scale, activated, activated_scale, gradient, inverse, mean, weight, bias
    )
    MASKED: tl.constexpr = M % HIGH > 0 or N % WIDE > 0
    ACROSS: tl.constexpr = (N + WIDE - 1) // WIDE
    program = device.from_last()
    top, left = program // ACROSS * HIGH, program % ACROSS * WIDE
    first = top.to(tl.int64) * N + left
    i, n = tl.arange(0, HIGH // 4), left + tl.arange(0, WIDE)
    if not BY_ROW:
        factor = device.inverse(tl.load(scale))
    place = program % ACROSS * M + top
    words = tl.zeros((HIGH // 4, WIDE), tl.uint32)
    top0 = tl.zeros((HIGH // 4, WIDE), tl.float32)
    top1 = tl.zeros((HIGH // 4, WIDE), tl.float32)
    slices = _slices(p, first, i, top, left, n, M, N, MASKED, OPERATION)
    for j in tl.static_range(4):
        y0, y1, y = on.cotangents(slices[j], OPERATION, 0)
        top0, top1 = on.larger_or_nan(top0, tl.abs(y0)), on.larger_or_nan(top1, tl.abs(y1))
        if BY_ROW:
            r = 4 * i + j
            factor = on.row_factors(scale, top + r, M, True)
            tl.store(peaks0 + place + r, on.row_peaks_of_finite(y0, OPERATION.dtype), mask=top + r < M)
            if OPERATION.gated:
                tl.store(peaks1 + place + r, on.row_peaks_of_finite(y1, OPERATION.dtype), mask=top + r < M)
        words = _put(y, factor, words, j, columns, 0, 0, N, MASKED, HOW, False, True)
    slicing.store_words(columns, top, left, i, n, words, M, N, MASKED)
    peak0, peak1 = on.peak_of_finite(top0, OPERATION.dtype), on.peak_of_finite(top1, OPERATION.dtype)
    if not (tl.maximum(peak0, peak1, propagate_nan=tl.PropagateNan.ALL) < float("inf")):
        ordered0 = tl.zeros((HIGH // 4, WIDE), tl.int32)
        ordered1 = tl.zeros((HIGH // 4, WIDE), tl.int32)
        for k in tl.range(4):
            x, m = _slice(p, k, first, i, top, left, n, M, N, MASKED, OPERATION), top + 4 * i + k
            y0, y1, _ = on.cotangents(x, OPERATION, OPERATION.dtype)
            own0, own1 = on.ordered(y0, m, n, M, N, MASKED, HOW), on.ordered(y1, m, n, M, N, MASKED, HOW)
            if BY_ROW:
                tl.store(peaks0 + place + 4 * i + k, device.largest(tl.max(own0, 1), HOW), mask=m < M)
                if OPERATION.gated:
                    tl.store(peaks1 + place + 4 * i + k, device.largest(tl.max(own1, 1), HOW), mask=m < M)
            ordered0, ordered1 = tl.maximum(ordered0, own0), tl.maximum(ordered1, own1)
        peak0 = device.largest(tl.max(tl.max(ordered0, 1), 0), HOW)
        peak1 = device.largest(tl.max(tl.max(ordered1, 1), 0), HOW)
    if not BY_ROW:
        tl.store(peaks0 + program, peak0)
        if OPERATION.gated:
            tl.store(peaks1 + program, peak1)


def quantize(
    operation: Operation,
    kinds: tuple[int, ...],
    operands: Operands,
    scales: tuple[Array, ...],
    dtype: Any,
    *,
    rows: bool,
    columns: bool,
    again: tuple[Array, Any] | None = None,
    sums: bool = False,
    launch: QuantizeLaunch | None = None,
    compute_capability: int | None = None,
) -> Any:
    """Codes of one or two results of an operation under given scales.

    Args:
        operation: what is computed. kinds: which results, one or two of NORM, RESULT, GATE and UP.
        operands: what from. dtype: float8_e4m3fn or float8_e5m2.
        scales: for each result an fp32 scalar, or for each one a row, (M,).
        rows, columns: whether codes (M, N) and transposed ones (N, M) are wanted.
        again: scale and dtype of transposed codes of the activation's result, where cotangents are quantized.
        sums: whether sums of columns of the cotangents are wanted, too.
        launch, compute_capability: as of `quantize_triton.quantize`.

    Returns:
        A list, of each result codes and transposed codes, last those of `again`; None for what is not wanted. With
        `sums` a pair: this list, and that of the sums, fp32 (N,).
    """
    m, n = storage.shape_of(operands.first, operation)
    launch = launch or _best(kinds, n, rows, again is not None)
    one = (1, 1)
    shapes = [(m, n) if rows else one, (n, m) if columns else one]
    shapes += [*(shapes if len(kinds) == 2 else [one, one]), (n, m) if again else one]
    down = -(-m // launch.rows)
    partial = [(down, n) if sums and i < len(kinds) else one for i in range(2)]
    scale_operands = [scales[0], scales[-1], again[0] if again else scales[0]]
    outputs = quantize_triton.call(
        _codes, [*pointers(operands), *(s.reshape(-1, 1) for s in scale_operands)],
        [*(jax.ShapeDtypeStruct(s, jnp.uint8) for s in shapes),
         *(jax.ShapeDtypeStruct(s, jnp.float32) for s in partial)],
        down * -(-n // launch.columns), launch, compute_capability, shape=(m, n),
        OPERATION=operation, KINDS=kinds_of(kinds), HOW=device.Coding("tensor", dtype).static,
        ROWS=rows, COLUMNS=columns, BY_ROW=scales[0].ndim > 0, SUMS=sums,
        AGAIN=device.Coding("tensor", again[1]).static if again else device.NONE,
    )  # fmt: skip
    types = (dtype, dtype, dtype, dtype, again and again[1])
    wanted = [jax.lax.bitcast_convert_type(x, d) if w else None
              for x, d, w in zip(outputs[:5], types, (rows, columns, rows, columns, again), strict=True)]  # fmt: skip
    pairs: list[Any] = [(wanted[2 * i], wanted[2 * i + 1]) for i in range(len(kinds))]
    pairs += [(None, wanted[4])] if again else []
    return (pairs, [jnp.sum(x, 0) for x in outputs[5 : 5 + len(kinds)]]) if sums else pairs


def _best(kinds: tuple[int, ...], channels: int, rows: bool, again: bool) -> QuantizeLaunch:
    """Measured on an H200; two results of 16,384 x 5,632 on an H100, where tiles of 64 x 64 take 10 to 15 % longer."""
    if kinds == (NORM,) and not rows and channels % 256 == 0:
        return QuantizeLaunch(32, 256, 4)
    if not rows:
        return QuantizeLaunch(32, 128, 4)
    return QuantizeLaunch(64, 128, 16 if again and len(kinds) > 1 else 8)


def ahead(
    operation: Operation,
    operands: Operands,
    scale: Array,
    dtype: Any,
    *,
    launch: QuantizeLaunch | None = None,
    compute_capability: int | None = None,
) -> tuple[Array, list[Array]]:
    """Codes (N, M) of an activation's result under a given scale, and the peaks of its cotangents, in one pass.

    Peaks are those of `peaks_triton`, arguments as of `quantize`; `operands.gradient` is that of the result. Under a
    scale for each row, (M,), the peaks are of each row, (M,), too.
    """
    m, n = storage.shape_of(operands.first, operation)
    launch, by_row = launch or QuantizeLaunch(32, 128, 4), scale.ndim > 0
    across, pair = -(-n // launch.columns), operation.gated
    tiles = -(-m // launch.rows) * across
    shape = (across, m) if by_row else (tiles,)
    shapes = [jax.ShapeDtypeStruct((n, m), jnp.uint8)]
    shapes += [jax.ShapeDtypeStruct(shape if present else (1,), jnp.float32) for present in (True, pair)]
    codes, *maxima = quantize_triton.call(
        _ahead, [*pointers(operands), scale.reshape(-1, 1)], shapes, tiles, launch, compute_capability, shape=(m, n),
        OPERATION=operation, HOW=device.Coding("tensor", dtype).static, BY_ROW=by_row,
    )  # fmt: skip
    axis = 0 if by_row else None
    return jax.lax.bitcast_convert_type(codes, dtype), [jnp.max(x, axis) for x in maxima[: 1 + pair]]


def pointers(operands: Operands) -> list[Array]:
    """All operands, codes as bytes; one element where there is none."""
    arrays: list[Any] = [_ONE if x is None else x for x in operands]
    return [jax.lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 else x for x in arrays]
