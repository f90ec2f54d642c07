"""Codes and scales of a matrix and of its transposed copy, in one pass; or of a stack of matrices.

In: (M, N) fp32, bf16 or fp16. Out: 8-bit codes (M, N) and (N, M), their scales, column sums fp32 (N,). Hardware: Ada or
newer for FP8 codes, Turing otherwise. Reference: `_reference` in fp8jax/ops/quantization/quantize.py.

A program reads a tile once, as four slices of every fourth row. The codes of four neighbouring rows then become one
32-bit word of the transposed copy, and threads exchange whole words.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.dispatch import call_triton
from pallas_kernels.dispatch.call_triton import bitcast_bytes
from pallas_kernels.quantization import codec_triton as codec
from pallas_kernels.quantization import scaling_triton as scaling
from pallas_kernels.quantization import strided_tiles_triton as strided_tiles
from pallas_kernels.quantization.scaling_triton import Coding as Coding

PLAIN_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
GROUP_SIZES = (16, 32, 64, 128)
FP8_CAPABILITY = 89
COLUMN_ALIGNMENT = 128  # packed matrices have multiples of the widest tile


class Quantized(NamedTuple):
    """Codes of a matrix (rows, columns), and the scales that the kernel computed."""

    codes: Array
    scale: Array | None = None
    microscale: Array | None = None


class ColumnOffsets(NamedTuple):
    """First columns of the second and third of several packed matrices; 0 for a single matrix."""

    second_start: int = 0
    third_start: int = 0


class StackStrides(NamedTuple):
    """Elements between the arrays of two matrices of a stack; all 0 for a single matrix.

    Attributes:
        matrix: of the matrix, and of its codes.
        row_scale, column_scale: of the inputs.
        row_scales, row_powers, column_scales, column_powers: of the outputs.
    """

    matrix: int = 0
    row_scale: int = 0
    column_scale: int = 0
    row_scales: int = 0
    row_powers: int = 0
    column_scales: int = 0
    column_powers: int = 0


@triton.jit
def _quantize(
    x_ptr: tl.tensor,
    x2_ptr: tl.tensor,
    x3_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    column_scale_ptr: tl.tensor,
    noise_ptr: tl.tensor,
    row_codes_ptr: tl.tensor,
    row_scales_ptr: tl.tensor,
    row_powers_ptr: tl.tensor,
    column_codes_ptr: tl.tensor,
    column_scales_ptr: tl.tensor,
    column_powers_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_CODING: tl.constexpr,
    COLUMN_CODING: tl.constexpr,
    SUMS: tl.constexpr,
    COLUMN_OFFSETS: tl.constexpr,
    STACK_STRIDES: tl.constexpr,
) -> None:
    """Write the codes of a tile (BLOCK_M, BLOCK_N)."""
    MASKED: tl.constexpr = M % BLOCK_M > 0 or N % BLOCK_N > 0
    R: tl.constexpr = BLOCK_M // 4
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    if STACK_STRIDES.matrix > 0:
        TILES: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M * TILES_N
        matrix = (program // TILES).to(tl.int64)
        program = program % TILES
        x_ptr += matrix * STACK_STRIDES.matrix
        row_scale_ptr += matrix * STACK_STRIDES.row_scale
        column_scale_ptr += matrix * STACK_STRIDES.column_scale
        if ROW_CODING.kind != "none" and ROW_CODING.writes_codes:
            row_codes_ptr += matrix * STACK_STRIDES.matrix
        row_scales_ptr += matrix * STACK_STRIDES.row_scales
        row_powers_ptr += matrix * STACK_STRIDES.row_powers
        if COLUMN_CODING.kind != "none":
            column_codes_ptr += matrix * STACK_STRIDES.matrix
        column_scales_ptr += matrix * STACK_STRIDES.column_scales
        column_powers_ptr += matrix * STACK_STRIDES.column_powers
    top, left = program // TILES_N * BLOCK_M, program % TILES_N * BLOCK_N
    first = top.to(tl.int64) * N + left
    i, n = tl.arange(0, R), left + tl.arange(0, BLOCK_N)
    m0 = top + 4 * i
    slice_offsets = (4 * i * N)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    source, source_offsets, stride = x_ptr + first, slice_offsets, N
    if COLUMN_OFFSETS.second_start > 0:
        in_third, in_second = left >= COLUMN_OFFSETS.third_start, left >= COLUMN_OFFSETS.second_start
        source_left = tl.where(
            in_third, COLUMN_OFFSETS.third_start, tl.where(in_second, COLUMN_OFFSETS.second_start, 0)
        )
        width = tl.where(
            in_third,
            N - COLUMN_OFFSETS.third_start,
            tl.where(in_second, COLUMN_OFFSETS.third_start - COLUMN_OFFSETS.second_start, COLUMN_OFFSETS.second_start),
        )
        stride = tl.multiple_of(width, 64)
        source = tl.where(in_third, x3_ptr, tl.where(in_second, x2_ptr, x_ptr))
        source += top.to(tl.int64) * stride + tl.multiple_of(left - source_left, 64)
        source_offsets = (4 * i * stride)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    x0, x1, x2, x3 = strided_tiles.load_slices(source, source_offsets, stride, m0, n, M, N, MASKED)
    slices = (x0, x1, x2, x3)
    if SUMS:
        total = (codec.to_fp32(x0, False) + codec.to_fp32(x1, False)) + (
            codec.to_fp32(x2, False) + codec.to_fp32(x3, False)
        )
        tl.store(sums_ptr + (program // TILES_N).to(tl.int64) * N + n, tl.sum(total, 0), mask=n < N)
    random1 = tl.zeros((R, BLOCK_N), tl.uint32)
    random2 = random1
    if ROW_CODING.is_stochastic or COLUMN_CODING.is_stochastic:
        word1, word2 = tl.load(noise_ptr), tl.load(noise_ptr + 1)
        # Noise depends on the position in the whole matrix, because `x` may be a part.
        noise_index = (top // 4 + i).to(tl.uint32)[:, None] * tl.load(noise_ptr + 2) + n.to(tl.uint32)[None, :]
        noise_index += tl.load(noise_ptr + 3)
        if ROW_CODING.is_stochastic:
            random1 = scaling.hash_bits(noise_index, word1, word2)
        if (COLUMN_CODING.kind != "none" and COLUMN_CODING.kind != "same") and COLUMN_CODING.is_stochastic:
            random2 = scaling.hash_bits(noise_index, word2, word1)
    amax_keys = tl.zeros((R, BLOCK_N), tl.int32)
    largest0, amax_keys = scaling.slice_amax_keys(x0, amax_keys, ROW_CODING, COLUMN_CODING)
    largest1, amax_keys = scaling.slice_amax_keys(x1, amax_keys, ROW_CODING, COLUMN_CODING)
    largest2, amax_keys = scaling.slice_amax_keys(x2, amax_keys, ROW_CODING, COLUMN_CODING)
    largest3, amax_keys = scaling.slice_amax_keys(x3, amax_keys, ROW_CODING, COLUMN_CODING)
    slice_keys = (largest0, largest1, largest2, largest3)

    inverse_scale = 1.0
    if ROW_CODING.kind == "block":
        BLOCK: tl.constexpr = ROW_CODING.size
        GROUPS_N: tl.constexpr = (N + BLOCK - 1) // BLOCK
        largest = scaling.max_along_rows(scaling.max_along_columns(amax_keys, BLOCK // 4), BLOCK)
        scale = scaling.scale_from_key(largest, ROW_CODING, row_scales_ptr.dtype.element_ty)
        u, v = top // BLOCK + tl.arange(0, BLOCK_M // BLOCK), left // BLOCK + tl.arange(0, BLOCK_N // BLOCK)
        group_mask = scaling.tile_mask(u, v, (M + BLOCK - 1) // BLOCK, GROUPS_N)
        scaling.store(row_scales_ptr, u[:, None] * GROUPS_N + v[None, :], scale, group_mask, MASKED)
        if COLUMN_CODING.kind == "same":
            transposed = u[:, None] + v[None, :] * ((M + BLOCK - 1) // BLOCK)
            scaling.store(column_scales_ptr, transposed, scale, group_mask, MASKED)
        inverse_scale = scaling.repeat_columns(scaling.repeat_rows(scaling.reciprocal(scale), BLOCK // 4), BLOCK)
    elif ROW_CODING.has_amax:
        scale = scaling.scale_from_amax(row_scale_ptr, ROW_CODING)
        tl.store(row_scales_ptr, scale, mask=program == 0)
        inverse_scale = scaling.reciprocal(scale)
    elif ROW_CODING.kind != "none" and ROW_CODING.kind != "group" and not ROW_CODING.has_row_scales:
        inverse_scale = scaling.reciprocal(tl.load(row_scale_ptr))

    factor = 1.0
    inverse_power = 1.0
    if COLUMN_CODING.kind != "none" and COLUMN_CODING.kind != "same":
        GROUP_QUARTER: tl.constexpr = COLUMN_CODING.size // 4
        if COLUMN_CODING.kind != "group":
            if COLUMN_CODING.has_amax:
                scale = scaling.scale_from_amax(column_scale_ptr, COLUMN_CODING)
                tl.store(column_scales_ptr, scale, mask=program == 0)
                factor = scaling.reciprocal(scale)
            elif COLUMN_CODING.has_row_scales:
                factor = scaling.reciprocal(tl.load(column_scale_ptr + n, mask=n < N, other=1.0))[None, :]
            else:
                factor = scaling.reciprocal(tl.load(column_scale_ptr))
        if COLUMN_CODING.kind == "group" or COLUMN_CODING.kind == "mx":
            GROUPS_M: tl.constexpr = (M + 4 * GROUP_QUARTER - 1) // (4 * GROUP_QUARTER)
            g = top // (4 * GROUP_QUARTER) + tl.arange(0, R // GROUP_QUARTER)
            group_offsets = n.to(tl.int64)[None, :] * GROUPS_M + g[:, None]
            if COLUMN_CODING.has_transposed_scales:
                group_offsets = n[None, :] + g.to(tl.int64)[:, None] * N
            group_mask = scaling.tile_mask(g, n, GROUPS_M, N)
            largest = scaling.max_along_columns(amax_keys, GROUP_QUARTER)
            if COLUMN_CODING.kind == "group":
                scale = scaling.scale_from_key(largest, COLUMN_CODING, column_scales_ptr.dtype.element_ty)
                scaling.store(column_scales_ptr, group_offsets, scale, group_mask, MASKED)
                factor = scaling.repeat_rows(scaling.reciprocal(scale), GROUP_QUARTER)
            else:
                byte = scaling.e8m0_exponent(largest, factor, COLUMN_CODING)
                scaling.store(column_powers_ptr, group_offsets, byte.to(tl.uint8), group_mask, MASKED)
                inverse_power = scaling.repeat_rows(scaling.inverse_of_exponent(byte), GROUP_QUARTER)

    words = tl.zeros((R, BLOCK_N), tl.uint32)
    for j in tl.static_range(4):
        x, m, mask = codec.to_fp32(slices[j], False), m0 + j, scaling.tile_mask(m0 + j, n, M, N)
        if ROW_CODING.kind != "none":
            y = scaling.scale_rows(
                x, slice_keys[j], m, left, inverse_scale, row_scale_ptr, row_scales_ptr, row_powers_ptr, M, N, MASKED,
                ROW_CODING,
            )  # fmt: skip
            codes = scaling.encode(x, y, scaling.rotate_noise(random1, j), ROW_CODING)
            if ROW_CODING.writes_codes:
                scaling.store(row_codes_ptr + first, slice_offsets + j * N, codes, mask, MASKED)
        if COLUMN_CODING.kind != "none" and COLUMN_CODING.kind != "same":
            if COLUMN_CODING.kind == "mx":
                x = scaling.apply_inverse_power(x, inverse_power, COLUMN_CODING)
            y = scaling.apply_inverse_scale(x, factor, COLUMN_CODING)
            codes = scaling.encode(x, y, scaling.rotate_noise(random2, j), COLUMN_CODING)
        if COLUMN_CODING.kind != "none":
            words = strided_tiles.insert_byte(words, codes, j, N % 4 == 0)
    if COLUMN_CODING.kind != "none":
        strided_tiles.store_transposed(column_codes_ptr, top, left, i, n, words, M, N, MASKED)


@dataclasses.dataclass(frozen=True)
class QuantizeLaunch:
    """Launch parameters: tuning only, never the result. Sides of a tile are powers of two; no group is longer."""

    block_m: int = 128
    block_n: int = 128
    num_warps: int = 8
    num_stages: int = 1


def unsupported_reason(shape: tuple[int, ...], dtype: Any, codings: tuple[Coding | None, ...]) -> str | None:
    """Return why the kernel does not support this shape, dtype or coding, or None."""
    if len(shape) != 2 or 0 in shape:
        return f"it needs a non-empty matrix, not shape {shape}"
    if max(shape) >= 2**22:
        return f"a side of {max(shape)} is too long for its offsets within a tile"
    if dtype not in PLAIN_DTYPES:
        return f"the matrix has dtype {jnp.dtype(dtype)}, not {' or '.join(str(jnp.dtype(d)) for d in PLAIN_DTYPES)}"
    for coding in codings:
        if coding is None:
            continue
        if coding.dtype not in scaling.FORMATS:
            return f"it makes codes in float8_e4m3fn, float8_e5m2 or int8, not {jnp.dtype(coding.dtype)}"
        if coding.kind == "mx" and coding.dtype == jnp.int8:
            return "microscaling needs floating codes"
        if coding.kind in ("group", "block", "mx") and coding.size not in GROUP_SIZES:
            return f"a {coding.kind} of {coding.size} is none of {', '.join(map(str, GROUP_SIZES))}"
    return None


def unsupported_packed_reason(matrices: Sequence[Any]) -> str | None:
    """Return why the kernel does not support these packed matrices, or None."""
    if len(matrices) == 1:
        return None
    if not 1 < len(matrices) < 4 or any(x.shape[1] % COLUMN_ALIGNMENT or not x.shape[1] for x in matrices):
        widths = ", ".join(str(x.shape[1]) for x in matrices)
        return f"it needs two or three packed matrices with multiples of {COLUMN_ALIGNMENT} columns, not {widths}"
    if len({(x.shape[0], x.dtype) for x in matrices}) > 1:
        return "matrices side by side have the same rows and dtype"
    return None


def quantize(
    x: Array | Sequence[Array],
    rows: Coding | None,
    columns: Coding | Literal["same"] | None,
    *,
    row_scale: Array | None = None,
    column_scale: Array | None = None,
    amax: Array | None = None,
    rounds_amax_up: bool = False,
    seed: Array | None = None,
    rng_offset: Array | None = None,
    sums: bool = False,
    compute_capability: int | None = None,
) -> tuple[Quantized | None, Quantized | None, Array | None]:
    """Return the codes of a matrix and of its transposed copy, and column sums.

    Args:
        x: (M, N), fp32, bf16 or fp16; or two or three packed matrices of M rows, N columns in total; or a stack
            (matrices, M, N). Scales, `amax` and results of a stack have its leading dimension. A stack takes no `seed`
            and no `sums`.
        rows: coding of `x`, or None.
        columns: coding of x.T, (N, M), or None; "same" for the transposed codes of `rows`, of kind "tensor" or "block".
        row_scale: given positive fp32 scales of `rows`: () or (1, 1) for all, (M, 1) per row.
        column_scale: likewise of `columns`, (N, 1) per row of x.T.
        amax: largest finite magnitude of `x`, fp32 scalar. It determines the missing scales of kind "tensor", which are
            then returned.
        rounds_amax_up: whether it is rounded up to bf16.
        seed: two uint32 random words, new in every call, for stochastic rounding.
        rng_offset: for a part of a larger matrix, two uint32 words: the columns of that matrix, and the position of the
            part. The position is a quarter of the first row (a multiple of 4) times these columns, plus the first
            column.
        compute_capability: GPU architecture to compile for, such as 90; None for the present GPU.

    Returns:
        Codes of `rows`, codes of `columns`, and sums, fp32 (N,); None for what is not requested. Given scales are not
        returned. For "same" they are the transposed codes of `rows`.

    Raises:
        ValueError: the kernel does not support these arguments; the message has the reason.
    """
    writes_rows = rows is not None
    if isinstance(columns, Coding) and columns.kind == "block":
        # Blocks of the transposed matrix are those of the matrix.
        if rows is not None and rows != columns:
            quantize_x = functools.partial(
                quantize, x, seed=seed, rng_offset=rng_offset, compute_capability=compute_capability
            )
            first, _, column_sums = quantize_x(
                rows, None, row_scale=row_scale, amax=amax, rounds_amax_up=rounds_amax_up, sums=sums
            )
            return first, quantize_x(None, columns)[1], column_sums
        rows, columns = columns, "same"
    is_same = columns == "same"
    coding = rows if is_same else columns
    assert coding != "same"
    matrices = [*x] if isinstance(x, Sequence) else [x]
    stack = matrices[0].shape[:-2]
    (m, n), dtype = (matrices[0].shape[-2], sum(y.shape[-1] for y in matrices)), matrices[0].dtype
    if stack and (len(stack) > 1 or len(matrices) > 1 or seed is not None or sums):
        raise ValueError("the quantize kernel cannot run: a stack needs one leading dimension, no seed and no sums")
    reason = unsupported_reason((m, n), dtype, (rows, coding)) or unsupported_packed_reason(matrices)
    if reason is not None:
        raise ValueError(f"the quantize kernel cannot run: {reason}")
    if is_same and (rows is None or rows.kind not in ("tensor", "block")):
        raise ValueError(f"columns 'same' needs rows of kind 'tensor' or 'block', not {rows}")
    if any(c is not None and c.is_stochastic for c in (rows, coding)) and seed is None:
        raise ValueError("stochastic rounding needs a seed")
    launch = _best_launch(rows, coding, is_same, dtype)
    shapes = [*_output_shapes(rows, (m, n), writes_codes=writes_rows), *_output_shapes(coding, (n, m))]
    placeholder = jnp.ones((1, 1), jnp.float32)
    scales = [
        placeholder if s is None else s.reshape(*stack, -1, 1).astype(jnp.float32) for s in (row_scale, column_scale)
    ]
    by_row = [s.shape[-2] > 1 for s in scales]
    constants = [
        scaling.NO_CODING
        if c is None
        else c.constants._replace(has_row_scales=b, has_transposed_scales=_has_transposed_scales(c))
        for c, b in zip((rows, coding), by_row, strict=True)
    ]
    has_computed_scale = [
        amax is not None and c is not None and c.kind == "tensor" and s is None and not (is_same and i)
        for i, (c, s) in enumerate(zip((rows, coding), (row_scale, column_scale), strict=True))
    ]
    for i in (i for i, mask in enumerate(has_computed_scale) if mask):
        assert amax is not None
        scales[i] = amax.reshape(*stack, 1)
        constants[i] = constants[i]._replace(has_amax=True, rounds_amax_up=rounds_amax_up)
    if is_same:
        constants[1] = constants[1]._replace(kind="same")
    constants[0] = constants[0]._replace(writes_codes=writes_rows)
    noise = jnp.zeros(4, jnp.uint32)
    if seed is not None:
        noise = jnp.concatenate([seed, jnp.array([n, 0], jnp.uint32) if rng_offset is None else rng_offset])
    tiles_m = -(-m // launch.block_m)
    shapes.append(jax.ShapeDtypeStruct((tiles_m, n) if sums else (1, 1), jnp.float32))
    strides = StackStrides()
    if stack:
        scale_sizes = [0 if s is placeholder else s.size // stack[0] for s in scales]
        strides = StackStrides(m * n, *scale_sizes, *(shapes[i].size for i in (1, 2, 4, 5)))
        shapes = [jax.ShapeDtypeStruct((*stack, *s.shape), s.dtype) for s in shapes]
    column_ends = [*itertools.accumulate(y.shape[1] for y in matrices)]
    column_offsets, other_matrices = (
        (ColumnOffsets(*column_ends[:2]), [matrices[1], matrices[-1]])
        if len(matrices) > 1
        else (ColumnOffsets(), [placeholder, placeholder])
    )
    *outputs, partial_sums = call(
        _quantize, [matrices[0], *other_matrices, *scales, noise], shapes,
        math.prod(stack) * tiles_m * -(-n // launch.block_n), launch, compute_capability, shape=(m, n),
        ROW_CODING=constants[0], COLUMN_CODING=constants[1], SUMS=sums, COLUMN_OFFSETS=column_offsets,
        STACK_STRIDES=strides,
    )  # fmt: skip
    first, second = (
        _to_quantized(rows, outputs[:3], has_computed_scale[0]),
        _to_quantized(coding, outputs[3:], has_computed_scale[1]),
    )
    if is_same and has_computed_scale[0] and first is not None and second is not None:
        second = second._replace(scale=first.scale)
    return (first if writes_rows else None), second, jnp.sum(partial_sums, 0) if sums else None


def _best_launch(rows: Coding | None, columns: Coding | None, is_same: bool, dtype: Any) -> QuantizeLaunch:
    """Return launch parameters chosen by measurement: register pressure favours small programs or more threads."""
    warps = 4 if dtype == jnp.bfloat16 else 8
    kinds = {c.kind for c in (rows, columns) if c is not None}
    if "block" in kinds:
        return QuantizeLaunch(num_warps=4)
    if "group" in kinds and columns is not None:
        return QuantizeLaunch(num_warps=warps)
    if any(c is not None and c.is_stochastic for c in (rows, columns)) or (columns is not None and not is_same):
        return QuantizeLaunch(128, max(64, rows.size if rows else 0), warps)
    if is_same and dtype == jnp.float32:
        return QuantizeLaunch(64, num_warps=8)  # fp32 weights
    return QuantizeLaunch(num_warps=16 if is_same else 8)


def _has_transposed_scales(coding: Coding) -> bool:
    """Return whether scales are stored transposed, as group products read them: no kernel transposes them later."""
    return coding.kind == "group" and coding.size == 128


def _output_shapes(coding: Coding | None, shape: tuple[int, int], writes_codes: bool = True) -> list[Any]:
    """Return the shapes of codes, scales and powers; one element each for unused outputs."""
    placeholder = (1, 1)
    if coding is None:
        return [jax.ShapeDtypeStruct(placeholder, dtype) for dtype in (jnp.uint8, jnp.float32, jnp.uint8)]
    count = (-(-shape[0] // coding.size) if coding.kind == "block" else shape[0], -(-shape[1] // max(coding.size, 1)))
    scales = count if coding.kind in ("group", "block") else placeholder
    return [
        jax.ShapeDtypeStruct(shape if writes_codes else placeholder, jnp.uint8),
        jax.ShapeDtypeStruct(scales[::-1] if _has_transposed_scales(coding) else scales, coding.scale_dtype),
        jax.ShapeDtypeStruct(count if coding.kind == "mx" else placeholder, jnp.uint8),
    ]


def _to_quantized(coding: Coding | None, outputs: Any, has_computed_scale: bool) -> Quantized | None:
    if coding is None:
        return None
    codes = bitcast_bytes(outputs[0], coding.dtype)
    scale = outputs[1] if has_computed_scale or coding.kind in ("group", "block") else None
    if scale is not None and _has_transposed_scales(coding):
        scale = jnp.swapaxes(scale, -1, -2)
    return Quantized(codes, scale, outputs[2] if coding.kind == "mx" else None)


def call(
    kernel: Any, inputs: list[Any], shapes: list[Any], grid: int, launch: QuantizeLaunch,
    compute_capability: int | None, aliases: dict[int, int] | None = None, shape: tuple[int, int] | None = None,
    **constexprs: Any,
) -> Any:  # fmt: skip
    """Return the results of a kernel over a matrix and further inputs; `shape` is the matrix's if it is packed."""
    m, n = shape or inputs[0].shape
    return call_triton.call(
        *inputs,
        kernel=kernel,
        out_shapes=shapes,
        num_programs=grid,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        compute_capability=compute_capability,
        aliases=aliases,
        M=m,
        N=n,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        **constexprs,
    )
