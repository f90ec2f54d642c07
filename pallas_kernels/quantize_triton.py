"""Quantizes a matrix in one pass: codes and scales of it, and of its transposed copy, each as its product wants them.

A program reads a tile once. It holds the tile as four slices of every fourth row, so that the codes of four
neighbouring rows become one 32-bit word of the transposed copy, and the exchange between threads is of whole words.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import call_triton
from pallas_kernels import codec_triton as codec
from pallas_kernels import scaling_triton as device
from pallas_kernels import slices_triton as slicing
from pallas_kernels.scaling_triton import Coding as Coding

PLAIN_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
GROUPS = (16, 32, 64, 128)
FP8_CAPABILITY = 89
ALIGNED = 128  # columns of one of several matrices: those of the widest tile


class Quantized(NamedTuple):
    """Codes of a matrix (rows, columns); scale and microscale where they are computed, by rows and groups."""

    codes: Array
    scale: Array | None = None
    microscale: Array | None = None


class Cuts(NamedTuple):
    """Where the second and the third of the matrices begin that lie side by side; of one matrix both are 0."""

    second: int = 0
    third: int = 0


@triton.jit
def _quantize(
    x_ptr: tl.tensor,
    second_ptr: tl.tensor,
    third_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    column_scale_ptr: tl.tensor,
    noise_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    row_scales_ptr: tl.tensor,
    row_powers_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    column_scales_ptr: tl.tensor,
    column_powers_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
    CUTS: tl.constexpr,
) -> None:
    """A tile of HIGH rows and WIDE columns."""
    MASKED: tl.constexpr = M % HIGH > 0 or N % WIDE > 0
    R: tl.constexpr = HIGH // 4
    ACROSS: tl.constexpr = (N + WIDE - 1) // WIDE
    program = tl.program_id(0)
    top, left = program // ACROSS * HIGH, program % ACROSS * WIDE
    first = top.to(tl.int64) * N + left
    i, n = tl.arange(0, R), left + tl.arange(0, WIDE)
    m0 = top + 4 * i
    at0 = (4 * i * N)[:, None] + tl.arange(0, WIDE)[None, :]
    source, at, stride = x_ptr + first, at0, N
    if CUTS.second > 0:
        last, later = left >= CUTS.third, left >= CUTS.second
        begin = tl.where(last, CUTS.third, tl.where(later, CUTS.second, 0))
        width = tl.where(last, N - CUTS.third, tl.where(later, CUTS.third - CUTS.second, CUTS.second))
        stride = tl.multiple_of(width, 64)
        source = tl.where(last, third_ptr, tl.where(later, second_ptr, x_ptr))
        source += top.to(tl.int64) * stride + tl.multiple_of(left - begin, 64)
        at = (4 * i * stride)[:, None] + tl.arange(0, WIDE)[None, :]
    x0, x1, x2, x3 = slicing.load_slices(source, at, stride, m0, n, M, N, MASKED)
    xs = (x0, x1, x2, x3)
    if SUMS:
        total = (codec.fp32(x0, False) + codec.fp32(x1, False)) + (codec.fp32(x2, False) + codec.fp32(x3, False))
        tl.store(sums_ptr + (program // ACROSS).to(tl.int64) * N + n, tl.sum(total, 0), mask=n < N)
    random1 = tl.zeros((R, WIDE), tl.uint32)
    random2 = random1
    if ROWS.stochastic or COLUMNS.stochastic:
        word1, word2 = tl.load(noise_ptr), tl.load(noise_ptr + 1)
        # By the place in the whole matrix, of which this may be a part.
        four = (top // 4 + i).to(tl.uint32)[:, None] * tl.load(noise_ptr + 2) + n.to(tl.uint32)[None, :]
        four += tl.load(noise_ptr + 3)
        if ROWS.stochastic:
            random1 = device.hashed(four, word1, word2)
        if (COLUMNS.kind != "none" and COLUMNS.kind != "same") and COLUMNS.stochastic:
            random2 = device.hashed(four, word2, word1)
    ordered = tl.zeros((R, WIDE), tl.int32)
    largest0, ordered = device.slice_maxima(x0, ordered, ROWS, COLUMNS)
    largest1, ordered = device.slice_maxima(x1, ordered, ROWS, COLUMNS)
    largest2, ordered = device.slice_maxima(x2, ordered, ROWS, COLUMNS)
    largest3, ordered = device.slice_maxima(x3, ordered, ROWS, COLUMNS)
    largest_of = (largest0, largest1, largest2, largest3)

    inverse_scale = 1.0
    if ROWS.kind == "block":
        SIDE: tl.constexpr = ROWS.size
        WIDTH: tl.constexpr = (N + SIDE - 1) // SIDE
        largest = device.along_rows(device.along_columns(ordered, SIDE // 4), SIDE)
        scale = device.to_scale(largest, ROWS, row_scales_ptr.dtype.element_ty)
        u, v = top // SIDE + tl.arange(0, HIGH // SIDE), left // SIDE + tl.arange(0, WIDE // SIDE)
        there = device.inside(u, v, (M + SIDE - 1) // SIDE, WIDTH)
        device.store(row_scales_ptr, u[:, None] * WIDTH + v[None, :], scale, there, MASKED)
        if COLUMNS.kind == "same":
            turned = u[:, None] + v[None, :] * ((M + SIDE - 1) // SIDE)
            device.store(column_scales_ptr, turned, scale, there, MASKED)
        inverse_scale = device.over_columns(device.over_rows(device.inverse(scale), SIDE // 4), SIDE)
    elif ROWS.maxima > 0:
        scale = device.scale_of_maxima(row_scale_ptr, ROWS)
        tl.store(row_scales_ptr, scale, mask=program == 0)
        inverse_scale = device.inverse(scale)
    elif ROWS.kind != "none" and ROWS.kind != "group" and not ROWS.by_row:
        inverse_scale = device.inverse(tl.load(row_scale_ptr))

    factor = 1.0
    power = 1.0
    if COLUMNS.kind != "none" and COLUMNS.kind != "same":
        LONG: tl.constexpr = COLUMNS.size // 4
        if COLUMNS.kind != "group":
            if COLUMNS.maxima > 0:
                scale = device.scale_of_maxima(column_scale_ptr, COLUMNS)
                tl.store(column_scales_ptr, scale, mask=program == 0)
                factor = device.inverse(scale)
            elif COLUMNS.by_row:
                factor = device.inverse(tl.load(column_scale_ptr + n, mask=n < N, other=1.0))[None, :]
            else:
                factor = device.inverse(tl.load(column_scale_ptr))
        if COLUMNS.kind == "group" or COLUMNS.kind == "mx":
            HEIGHT: tl.constexpr = (M + 4 * LONG - 1) // (4 * LONG)
            g = top // (4 * LONG) + tl.arange(0, R // LONG)
            place = n.to(tl.int64)[None, :] * HEIGHT + g[:, None]
            if COLUMNS.scales_turned:
                place = n[None, :] + g.to(tl.int64)[:, None] * N
            there = device.inside(g, n, HEIGHT, N)
            largest = device.along_columns(ordered, LONG)
            if COLUMNS.kind == "group":
                scale = device.to_scale(largest, COLUMNS, column_scales_ptr.dtype.element_ty)
                device.store(column_scales_ptr, place, scale, there, MASKED)
                factor = device.over_rows(device.inverse(scale), LONG)
            else:
                byte = device.power(largest, factor, COLUMNS)
                device.store(column_powers_ptr, place, byte.to(tl.uint8), there, MASKED)
                power = device.over_rows(device.of_power(byte), LONG)

    words = tl.zeros((R, WIDE), tl.uint32)
    for j in tl.static_range(4):
        x, m, here = codec.fp32(xs[j], False), m0 + j, device.inside(m0 + j, n, M, N)
        if ROWS.kind != "none":
            y = device.scale_along_rows(
                x, largest_of[j], m, left, inverse_scale, row_scale_ptr, row_scales_ptr, row_powers_ptr, M, N, MASKED,
                ROWS,
            )  # fmt: skip
            codes = device.encode(x, y, device.noise(random1, j), ROWS)
            if ROWS.written:
                device.store(rows_ptr + first, at0 + j * N, codes, here, MASKED)
        if COLUMNS.kind != "none" and COLUMNS.kind != "same":
            if COLUMNS.kind == "mx":
                x = device.times_power(x, power, COLUMNS)
            y = device.scaled(x, factor, COLUMNS)
            codes = device.encode(x, y, device.noise(random2, j), COLUMNS)
        if COLUMNS.kind != "none":
            words = slicing.insert(words, codes, j, N % 4 == 0)
    if COLUMNS.kind != "none":
        slicing.store_words(columns_ptr, top, left, i, n, words, M, N, MASKED)


@dataclasses.dataclass(frozen=True)
class QuantizeLaunch:
    """How the work is cut: tuning only, never the result. Sides of a tile are powers of two, and no group is longer."""

    rows: int = 128
    columns: int = 128
    warps: int = 8
    stages: int = 1


def unsupported(shape: tuple[int, ...], dtype: Any, codings: tuple[Coding | None, ...]) -> str | None:
    """Why the kernel cannot take a matrix of this shape and dtype, or make these codes, or None."""
    if len(shape) != 2 or 0 in shape:
        return f"it takes matrices that are not empty, not shape {shape}"
    if max(shape) >= 2**22:
        return f"a side of {max(shape)} is too long for its offsets within a tile"
    if dtype not in PLAIN_DTYPES:
        return f"the matrix has dtype {jnp.dtype(dtype)}, not {' or '.join(str(jnp.dtype(d)) for d in PLAIN_DTYPES)}"
    for coding in codings:
        if coding is None:
            continue
        if coding.dtype not in device.FORMATS:
            return f"it makes codes in float8_e4m3fn, float8_e5m2 or int8, not {jnp.dtype(coding.dtype)}"
        if coding.kind == "mx" and coding.dtype == jnp.int8:
            return "microscaling is of floating codes"
        if coding.kind in ("group", "block", "mx") and coding.size not in GROUPS:
            return f"a {coding.kind} of {coding.size} is none of {', '.join(map(str, GROUPS))}"
    return None


def unfit_beside(matrices: Sequence[Any]) -> str | None:
    """Why the kernel cannot take matrices as one that they are side by side, or None."""
    if len(matrices) == 1:
        return None
    if not 1 < len(matrices) < 4 or any(x.shape[1] % ALIGNED or not x.shape[1] for x in matrices):
        widths = ", ".join(str(x.shape[1]) for x in matrices)
        return f"it takes two or three matrices side by side, of multiples of {ALIGNED} columns, not of {widths}"
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
    maxima: Array | None = None,
    up: bool = False,
    words: Array | None = None,
    place: Array | None = None,
    sums: bool = False,
    launch: QuantizeLaunch | None = None,
    compute_capability: int | None = None,
) -> tuple[Quantized | None, Quantized | None, Array | None]:
    """Codes of a matrix and of its transposed copy, in one pass over it.

    Args:
        x: (M, N), fp32, bf16 or fp16; or the two or three matrices, of M rows, that it is side by side: see `joins`.
        rows: codes of `x`, or None.
        columns: codes of x.T, (N, M); "same" for those of `rows`, transposed, which must be "tensor" or "block".
        row_scale: given positive fp32 scales of `rows`: () or (1, 1) for all, (M, 1) for each row.
        column_scale: likewise of `columns`, (N, 1) for each row of x.T.
        maxima: largest finite magnitudes of parts of `x`, fp32 (n,), of few parts, for each program reads all: the
            largest gives the scales of kind "tensor" that are not given, which are returned.
        up: whether that one is rounded up to bf16 before.
        words: two uint32 words, random and new at every call, for stochastic rounding.
        place: where the matrix is part of a larger one, two uint32 words: the columns of that, and of the part's first
            element, whose row is a multiple of 4, a quarter of its row times these columns plus its column.
        sums: whether the sums of columns are wanted, too.
        launch: how the work is cut; None takes the measured best.
        compute_capability: of the GPU to compile for, as 90; None asks the GPU.

    Returns:
        What was asked for, last the sums, fp32 (N,). Given scales are not returned; those of "same" are the transposed
        ones of `rows`.

    Raises:
        ValueError: the kernel cannot take these; the message says why.
    """
    written = rows is not None
    if isinstance(columns, Coding) and columns.kind == "block":
        # Blocks of the transposed matrix are those of the matrix.
        if rows is not None and rows != columns:
            options: Any = {"words": words, "place": place, "launch": launch, "compute_capability": compute_capability}
            own: Any = {"row_scale": row_scale, "maxima": maxima, "up": up, "sums": sums}
            first, _, total = quantize(x, rows, None, **own, **options)
            return first, quantize(x, None, columns, **options)[1], total
        rows, columns = columns, "same"
    same = columns == "same"
    coding = rows if same else columns
    assert coding != "same"
    matrices = [*x] if isinstance(x, Sequence) else [x]
    (m, n), dtype = (matrices[0].shape[0], sum(y.shape[1] for y in matrices)), matrices[0].dtype
    reason = unsupported((m, n), dtype, (rows, coding)) or unfit_beside(matrices)
    if reason is not None:
        raise ValueError(f"the quantize kernel cannot run: {reason}")
    if same and (rows is None or rows.kind not in ("tensor", "block")):
        raise ValueError(f"columns 'same' needs rows of kind 'tensor' or 'block', not {rows}")
    if any(c is not None and c.stochastic for c in (rows, coding)) and words is None:
        raise ValueError("stochastic rounding needs words")
    launch = launch or _best(rows, coding, same, dtype)
    shapes = [*_shapes(rows, (m, n), written=written), *_shapes(coding, (n, m))]
    one = jnp.ones((1, 1), jnp.float32)
    scales = [one if s is None else s.reshape(-1, 1).astype(jnp.float32) for s in (row_scale, column_scale)]
    by_row = [s.shape[0] > 1 for s in scales]
    statics = [
        device.NONE if c is None else c.static._replace(by_row=b, scales_turned=_scales_turned(c))
        for c, b in zip((rows, coding), by_row, strict=True)
    ]
    computed = [
        maxima is not None and c is not None and c.kind == "tensor" and s is None and not (same and i)
        for i, (c, s) in enumerate(zip((rows, coding), (row_scale, column_scale), strict=True))
    ]
    for i in (i for i, here in enumerate(computed) if here):
        assert maxima is not None
        scales[i] = maxima
        statics[i] = statics[i]._replace(maxima=maxima.size, spread=triton.next_power_of_2(maxima.size), up=up)
    if same:
        statics[1] = statics[1]._replace(kind="same")
    statics[0] = statics[0]._replace(written=written)
    noise = jnp.zeros(4, jnp.uint32)
    if words is not None:
        noise = jnp.concatenate([words, jnp.array([n, 0], jnp.uint32) if place is None else place])
    down = -(-m // launch.rows)
    shapes.append(jax.ShapeDtypeStruct((down, n) if sums else (1, 1), jnp.float32))
    if len(matrices) > 1 and ALIGNED % launch.columns:
        raise ValueError(f"the quantize kernel cannot run: tiles of {launch.columns} columns, not a part of {ALIGNED}")
    ends = [*itertools.accumulate(y.shape[1] for y in matrices)]
    cuts, others = (Cuts(*ends[:2]), [matrices[1], matrices[-1]]) if len(matrices) > 1 else (Cuts(), [one, one])
    *parts, partial = call(
        _quantize, [matrices[0], *others, *scales, noise], shapes, down * -(-n // launch.columns), launch,
        compute_capability, shape=(m, n), ROWS=statics[0], COLUMNS=statics[1], SUMS=sums, CUTS=cuts,
    )  # fmt: skip
    first, second = _quantized(rows, parts[:3], computed[0]), _quantized(coding, parts[3:], computed[1])
    if same and computed[0] and first is not None and second is not None:
        second = second._replace(scale=first.scale)
    return (first if written else None), second, jnp.sum(partial, 0) if sums else None


def _best(rows: Coding | None, columns: Coding | None, same: bool, dtype: Any) -> QuantizeLaunch:
    """Measured on an H200: what has more to keep in registers takes smaller programs, or, not in bf16, more threads."""
    warps = 4 if dtype == jnp.bfloat16 else 8
    kinds = {c.kind for c in (rows, columns) if c is not None}
    if "block" in kinds:
        return QuantizeLaunch(warps=4)
    if "group" in kinds and columns is not None:
        return QuantizeLaunch(warps=warps)
    if any(c is not None and c.stochastic for c in (rows, columns)) or (columns is not None and not same):
        return QuantizeLaunch(128, max(64, rows.size if rows else 0), warps)
    if same and dtype == jnp.float32:
        return QuantizeLaunch(64, warps=8)  # of weights: 27.0 us on an H100 where 128 rows and 16 warps take 28.8
    return QuantizeLaunch(warps=16 if same else 8)


def _scales_turned(how: Coding) -> bool:
    """Whether scales are written transposed, as products of groups read them: a transposition later is a kernel."""
    return how.kind == "group" and how.size == 128


def _shapes(how: Coding | None, shape: tuple[int, int], written: bool = True) -> list[Any]:
    """Of codes, scales and powers; of those that are not made, of one element."""
    one = (1, 1)
    if how is None:
        return [jax.ShapeDtypeStruct(one, dtype) for dtype in (jnp.uint8, jnp.float32, jnp.uint8)]
    count = (-(-shape[0] // how.size) if how.kind == "block" else shape[0], -(-shape[1] // max(how.size, 1)))
    scales = count if how.kind in ("group", "block") else one
    return [
        jax.ShapeDtypeStruct(shape if written else one, jnp.uint8),
        jax.ShapeDtypeStruct(scales[::-1] if _scales_turned(how) else scales, how.scale_dtype),
        jax.ShapeDtypeStruct(count if how.kind == "mx" else one, jnp.uint8),
    ]


def _quantized(how: Coding | None, parts: Any, computed: bool) -> Quantized | None:
    if how is None:
        return None
    codes = jax.lax.bitcast_convert_type(parts[0], how.dtype)
    scale = parts[1] if computed or how.kind in ("group", "block") else None
    if scale is not None and _scales_turned(how):
        scale = scale.T
    return Quantized(codes, scale, parts[2] if how.kind == "mx" else None)


def call(
    kernel: Any, inputs: list[Any], shapes: list[Any], grid: int, launch: QuantizeLaunch, capability: int | None,
    aliases: dict[int, int] | None = None, shape: tuple[int, int] | None = None, **static: Any,
) -> Any:  # fmt: skip
    """A kernel's results on a grid of programs, its tile as `launch` says, from a matrix and further inputs.

    `shape` is the matrix's where it is packed.
    """
    m, n = shape or inputs[0].shape
    tile = {"M": m, "N": n, "HIGH": launch.rows, "WIDE": launch.columns}
    return call_triton.call(
        *inputs,
        kernel=kernel,
        results=shapes,
        programs=grid,
        warps=launch.warps,
        stages=launch.stages,
        compute_capability=capability,
        aliases=aliases,
        **tile,
        **static,
    )
