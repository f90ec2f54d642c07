"""nvfp4 codes and scales of a matrix and of its transposed copy, in one pass.

In: (M, N) fp32, bf16 or fp16. Out: e2m1 codes, two in a byte, (M, N / 2) and (N, M / 2). e4m3 scales of 16 elements or
of 16 x 16. The matrix may be transformed before the transposed copy, each 16 rows by a Hadamard matrix. Hardware: Ada
or newer. Reference: `_reference` in fp8jax/ops/quantization/quantize.py.

A program reads a tile once, as 16 slices of every 16th row. A group of the transposed copy is then one element of each
slice, and its codes become a 64-bit word without an exchange between threads.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.quantization import codec_triton as codec
from pallas_kernels.quantization import quantize_triton
from pallas_kernels.quantization import scaling_triton as scaling
from pallas_kernels.quantization import strided_tiles_triton as strided_tiles
from pallas_kernels.quantization.quantize_triton import FP8_CAPABILITY as FP8_CAPABILITY
from pallas_kernels.quantization.quantize_triton import Quantized, QuantizeLaunch

SIZE = 16  # codes of a group
_INVERSE_MAX = tl.constexpr(0.1666666716337204)  # 1 / 6 in fp32
_ROUND_TO_HALVES = tl.constexpr(1.5 * 2.0**22)  # added to a small number: its halves in the lowest bits


class Coding(NamedTuple):
    """How codes are computed; a compile-time constant.

    Attributes:
        kind: "nv" for scales of 16 along a row, "nvblock" for scales of 16 x 16, "none" for no codes.
        is_stochastic: whether rounding is stochastic and unbiased; otherwise to nearest even.
    """

    kind: Literal["nv", "nvblock", "none"] = "none"
    is_stochastic: bool = False


@triton.jit
def _load(
    x_ptr: tl.tensor, top: tl.tensor, left: tl.tensor, M: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Return the 16 slices of a tile."""
    i, n = tl.arange(0, BLOCK_M // 16), left + tl.arange(0, BLOCK_N)
    m, pointer = top + 16 * i, x_ptr + top.to(tl.int64) * N + left
    offsets = (16 * i * N)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    x0, x1, x2, x3 = strided_tiles.load_slices(pointer, offsets, N, m, n, M, N, MASKED)
    x4, x5, x6, x7 = strided_tiles.load_slices(pointer, offsets + 4 * N, N, m + 4, n, M, N, MASKED)
    x8, x9, x10, x11 = strided_tiles.load_slices(pointer, offsets + 8 * N, N, m + 8, n, M, N, MASKED)
    x12, x13, x14, x15 = strided_tiles.load_slices(pointer, offsets + 12 * N, N, m + 12, n, M, N, MASKED)
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15


@triton.jit
def _signed(x: tl.tensor, ROW: tl.constexpr, SIGNS: tl.constexpr) -> tl.tensor:
    x = codec.to_fp32(x, False)
    return x * -1.0 if SIGNS >> ROW & 1 else x


@triton.jit
def _transform4(
    x0: tl.tensor, x1: tl.tensor, x2: tl.tensor, x3: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the Hadamard transform of four rows."""
    y0, y1, y2, y3 = x0 + x1, x0 - x1, x2 + x3, x2 - x3
    return y0 + y2, y1 + y3, y0 - y2, y1 - y3


@triton.jit
def _transform(x: tl.tuple, is_full: tl.tensor, SIGNS: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Return the transforms of groups of 16 rows, in the order of sums of `rotate_rows`; short groups are unchanged."""
    a0, a1, a2, a3 = _transform4(
        _signed(x[0], 0, SIGNS), _signed(x[1], 1, SIGNS), _signed(x[2], 2, SIGNS), _signed(x[3], 3, SIGNS)
    )
    b0, b1, b2, b3 = _transform4(
        _signed(x[4], 4, SIGNS), _signed(x[5], 5, SIGNS), _signed(x[6], 6, SIGNS), _signed(x[7], 7, SIGNS)
    )
    c0, c1, c2, c3 = _transform4(
        _signed(x[8], 8, SIGNS), _signed(x[9], 9, SIGNS), _signed(x[10], 10, SIGNS), _signed(x[11], 11, SIGNS)
    )
    d0, d1, d2, d3 = _transform4(
        _signed(x[12], 12, SIGNS), _signed(x[13], 13, SIGNS), _signed(x[14], 14, SIGNS), _signed(x[15], 15, SIGNS)
    )
    a0, b0, c0, d0 = _transform4(a0, b0, c0, d0)
    a1, b1, c1, d1 = _transform4(a1, b1, c1, d1)
    a2, b2, c2, d2 = _transform4(a2, b2, c2, d2)
    a3, b3, c3, d3 = _transform4(a3, b3, c3, d3)
    return (
        _select(is_full, a0, x[0]), _select(is_full, a1, x[1]), _select(is_full, a2, x[2]),
        _select(is_full, a3, x[3]), _select(is_full, b0, x[4]), _select(is_full, b1, x[5]),
        _select(is_full, b2, x[6]), _select(is_full, b3, x[7]), _select(is_full, c0, x[8]),
        _select(is_full, c1, x[9]), _select(is_full, c2, x[10]), _select(is_full, c3, x[11]),
        _select(is_full, d0, x[12]), _select(is_full, d1, x[13]), _select(is_full, d2, x[14]),
        _select(is_full, d3, x[15]),
    )  # fmt: skip


@triton.jit
def _select(is_full: tl.tensor, transform: tl.tensor, x: tl.tensor) -> tl.tensor:
    """Return the normalized transform of groups of 16 rows, and the values of a shorter group."""
    return tl.where(is_full, transform * 0.25, x.to(tl.float32))


@triton.jit
def _largest(x: tl.tuple, KEYS: tl.constexpr) -> tl.tensor:
    """Return the largest `magnitude_key` of the slices."""
    keys = scaling.magnitude_key(x[0], KEYS)
    for k in tl.static_range(1, 16):
        keys = tl.maximum(keys, scaling.magnitude_key(x[k], KEYS))
    return keys


@triton.jit
def _scales(keys: tl.tensor, inverse_outer: tl.tensor, KEYS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return e4m3 bytes of groups, and the inverses of their values; 0 for a value of 0 or NaN."""
    amax = scaling.magnitude_from_key(keys, KEYS)
    scale = (amax * inverse_outer * _INVERSE_MAX).to(tl.float8e4nv)
    value = scale.to(tl.float32)
    return scale.to(tl.uint8, bitcast=True), tl.where(value > 0, scaling.reciprocal(value), 0.0)


@triton.jit
def _encode(
    x: tl.tensor, inverse_outer: tl.tensor, factor: tl.tensor, noise: tl.tensor, STOCHASTIC: tl.constexpr
) -> tl.tensor:
    """Return e2m1 codes as int32; 0 for NaN and Inf."""
    y = scaling.apply_inverse_scale(codec.to_fp32(x, False), inverse_outer, None, True)
    y = scaling.apply_inverse_scale(y, factor, None, True)
    magnitude = tl.minimum(tl.abs(y), 6.0)
    # From 1 on, codes are the exponent and the first bit of the significand of fp32, less 252. Below 1 they are 0.5
    # apart, as they are from 1 to 2.
    is_small = magnitude < 1
    if STOCHASTIC:
        bits = codec.float_bits(magnitude + tl.where(is_small, 1.0, 0.0))
        bits += (noise & 0x3FFFFF).to(tl.int32, bitcast=True)
        index = (bits >> 22) - tl.where(is_small, 254, 252)
    else:
        bits = codec.float_bits(magnitude)
        index = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - 252
        index = tl.where(is_small, codec.float_bits(magnitude + _ROUND_TO_HALVES) & 3, index)
    return tl.where(y == y, index | ((codec.float_bits(y) >> 28) & 8), 0)


@triton.jit
def _noise(
    noise_ptr: tl.tensor, word1: tl.tensor, word2: tl.tensor, top: tl.tensor, left: tl.tensor, K: tl.constexpr,
    R: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return random bits of slice K, by the position in the whole matrix, because `x` may be a part."""
    fours = (top // 4 + 4 * tl.arange(0, R) + K // 4).to(tl.uint32)
    n = (left + tl.arange(0, BLOCK_N)).to(tl.uint32)
    index = fours[:, None] * tl.load(noise_ptr + 2) + n[None, :] + tl.load(noise_ptr + 3)
    return scaling.rotate_noise(scaling.hash_bits(index, word1, word2), K % 4)


@triton.jit
def _nvfp4(
    x_ptr: tl.tensor,
    row_outer_ptr: tl.tensor,
    column_outer_ptr: tl.tensor,
    noise_ptr: tl.tensor,
    row_codes_ptr: tl.tensor,
    row_scales_ptr: tl.tensor,
    column_codes_ptr: tl.tensor,
    column_scales_ptr: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIGNS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Write the codes of a tile (BLOCK_M, BLOCK_N). KEYS is the coding of `magnitude_key`."""
    MASKED: tl.constexpr = M % BLOCK_M > 0 or N % BLOCK_N > 0
    R: tl.constexpr = BLOCK_M // 16
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    GROUPS_M: tl.constexpr = (M + 15) // 16
    GROUPS_N: tl.constexpr = (N + 15) // 16
    program = tl.program_id(0)
    top, left = program // TILES_N * BLOCK_M, program % TILES_N * BLOCK_N
    n = left + tl.arange(0, BLOCK_N)
    g, h = top // 16 + tl.arange(0, R), left // 16 + tl.arange(0, BLOCK_N // 16)
    x = _load(x_ptr, top, left, M, N, BLOCK_M, BLOCK_N, MASKED)
    word1, word2 = tl.load(noise_ptr), tl.load(noise_ptr + 1)

    if ROWS.kind != "none":
        inverse_outer = scaling.reciprocal(tl.load(row_outer_ptr))
        if ROWS.kind == "nvblock":
            byte, factor = _scales(scaling.max_along_rows(_largest(x, KEYS), 16), inverse_outer, KEYS)
            offsets = g.to(tl.int64)[:, None] * GROUPS_N + h[None, :]
            scaling.store(row_scales_ptr, offsets, byte, scaling.tile_mask(g, h, GROUPS_M, GROUPS_N), MASKED)
            factor = scaling.repeat_columns(factor, 16)
        shift, pair = (4 * (tl.arange(0, BLOCK_N) % 2))[None, :], left // 2 + tl.arange(0, BLOCK_N // 2)
        for k in tl.static_range(16):
            m = top + 16 * tl.arange(0, R) + k
            if ROWS.kind == "nv":
                keys = scaling.max_along_rows(scaling.magnitude_key(x[k], KEYS), 16)
                byte, group_factor = _scales(keys, inverse_outer, KEYS)
                offsets = m.to(tl.int64)[:, None] * GROUPS_N + h[None, :]
                scaling.store(row_scales_ptr, offsets, byte, scaling.tile_mask(m, h, M, GROUPS_N), MASKED)
                factor = scaling.repeat_columns(group_factor, 16)
            noise = word1
            if ROWS.is_stochastic:
                noise = _noise(noise_ptr, word1, word2, top, left, k, R, BLOCK_N)
            codes = _encode(x[k], inverse_outer, factor, noise, ROWS.is_stochastic)
            pairs = tl.sum(tl.reshape(codes << shift, (R, BLOCK_N // 2, 2)), 2).to(tl.uint8)
            offsets = m.to(tl.int64)[:, None] * ((N + 1) // 2) + pair[None, :]
            scaling.store(row_codes_ptr, offsets, pairs, scaling.tile_mask(m, pair, M, (N + 1) // 2), MASKED)

    if COLUMNS.kind != "none":
        inverse_outer = scaling.reciprocal(tl.load(column_outer_ptr))
        if SIGNS is not None:
            x = _transform(x, ((g + 1) * 16 <= M)[:, None], SIGNS)
        keys = _largest(x, KEYS)
        if COLUMNS.kind == "nvblock":
            byte, factor = _scales(scaling.max_along_rows(keys, 16), inverse_outer, KEYS)
            offsets = h.to(tl.int64)[None, :] * GROUPS_M + g[:, None]
            scaling.store(column_scales_ptr, offsets, byte, scaling.tile_mask(g, h, GROUPS_M, GROUPS_N), MASKED)
            factor = scaling.repeat_columns(factor, 16)
        else:
            byte, factor = _scales(keys, inverse_outer, KEYS)
            offsets = n.to(tl.int64)[None, :] * GROUPS_M + g[:, None]
            scaling.store(column_scales_ptr, offsets, byte, scaling.tile_mask(g, n, GROUPS_M, N), MASKED)
        word = tl.zeros((R, BLOCK_N), tl.uint64)
        for k in tl.static_range(16):
            noise = word2
            if COLUMNS.is_stochastic:
                noise = _noise(noise_ptr, word2, word1, top, left, k, R, BLOCK_N)
            codes = _encode(x[k], inverse_outer, factor, noise, COLUMNS.is_stochastic)
            word |= codes.to(tl.uint64) << (4 * k)
        word = tl.trans(word)
        if M % 16 == 0:
            words = column_codes_ptr.to(tl.pointer_type(tl.uint64), bitcast=True)
            offsets = n.to(tl.int64)[:, None] * GROUPS_M + g[None, :]
            scaling.store(words, offsets, word, scaling.tile_mask(n, g, N, GROUPS_M), MASKED)
        else:
            for j in tl.static_range(8):
                pair = 8 * g + j
                offsets = n.to(tl.int64)[:, None] * ((M + 1) // 2) + pair[None, :]
                mask = scaling.tile_mask(n, pair, N, (M + 1) // 2)
                scaling.store(column_codes_ptr, offsets, (word >> (8 * j)).to(tl.uint8), mask, MASKED)


@triton.jit
def _transformed_amax(
    x_ptr: tl.tensor,
    amax_ptr: tl.tensor,
    transformed_amax_ptr: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SIGNS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Write the largest finite magnitudes of a tile and of its transform."""
    MASKED: tl.constexpr = M % BLOCK_M > 0 or N % BLOCK_N > 0
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = scaling.reversed_program_id()
    top, left = program // TILES_N * BLOCK_M, program % TILES_N * BLOCK_N
    x = _load(x_ptr, top, left, M, N, BLOCK_M, BLOCK_N, MASKED)
    key = tl.max(tl.max(_largest(x, KEYS), 1), 0)
    tl.store(amax_ptr + program, scaling.magnitude_from_key(key, KEYS))
    is_full = (top + 16 * tl.arange(0, BLOCK_M // 16) + 16 <= M)[:, None]
    key = tl.max(tl.max(_largest(_transform(x, is_full, SIGNS), KEYS), 1), 0)
    tl.store(transformed_amax_ptr + program, scaling.magnitude_from_key(key, KEYS))


def unsupported_reason(shape: tuple[int, ...], dtype: Any) -> str | None:
    """Return why the kernels do not support this shape or dtype, or None."""
    return quantize_triton.unsupported_reason(shape, dtype, ())


def compute_amax(x: Array, signs: int, *, compute_capability: int | None = None) -> tuple[Array, Array]:
    """Return the largest finite magnitudes of a matrix, and of its Hadamard transform along rows; fp32 scalars.

    Arguments are those of `quantize`.
    """
    programs = _programs(x.shape)
    shape = jax.ShapeDtypeStruct((programs,), jnp.float32)
    first, second = quantize_triton.call(
        _transformed_amax, [x], [shape, shape], programs, _LAUNCH, compute_capability, SIGNS=signs,
        KEYS=scaling.NO_CODING,
    )  # fmt: skip
    return jnp.max(first), jnp.max(second)


def quantize(
    x: Array,
    rows: Coding | None,
    columns: Coding | None,
    *,
    row_scale: Array | None = None,
    column_scale: Array | None = None,
    signs: int | None = None,
    seed: Array | None = None,
    rng_offset: Array | None = None,
    compute_capability: int | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """Return the nvfp4 codes of a matrix and of its transposed copy.

    Args:
        x: (M, N), fp32, bf16 or fp16.
        rows: coding of `x`, or None.
        columns: coding of x.T, or None.
        row_scale, column_scale: positive fp32 scale of the tensor, for each coding.
        signs: bits of the rows, of each 16, whose signs are changed before the Hadamard transformation of `columns`.
            The rows after the last full 16 are not transformed. None transforms nothing.
        seed, rng_offset: as in `quantize_triton.quantize`.
        compute_capability: GPU architecture to compile for, such as 90; None for the present GPU.

    Returns:
        Codes, two in a byte, with e4m3 bytes as `microscale`, for `rows` and `columns`; None for what is not requested.

    Raises:
        ValueError: the kernel does not support these arguments; the message has the reason.
    """
    reason = unsupported_reason(x.shape, x.dtype)
    if reason is not None:
        raise ValueError(f"the nvfp4 kernel cannot run: {reason}")
    codings = [Coding() if c is None else c for c in (rows, columns)]
    if any(c.is_stochastic for c in codings) and seed is None:
        raise ValueError("stochastic rounding needs a seed")
    m, n = x.shape
    noise = jnp.zeros(4, jnp.uint32)
    if seed is not None:
        noise = jnp.concatenate([seed, jnp.array([n, 0], jnp.uint32) if rng_offset is None else rng_offset])
    scales = [jnp.ones((1,), jnp.float32) if s is None else s.reshape(1) for s in (row_scale, column_scale)]
    # Keys of integer codings: NaN and Inf are the largest, and make the scale of their group NaN.
    outputs = quantize_triton.call(
        _nvfp4, [x, *scales, noise], [*_output_shapes(codings[0], (m, n)), *_output_shapes(codings[1], (n, m))],
        _programs(x.shape), _LAUNCH, compute_capability, ROWS=codings[0], COLUMNS=codings[1], SIGNS=signs,
        KEYS=scaling.INTEGER_CODING,
    )  # fmt: skip
    first, second = (Quantized(codes, microscale=microscale) for codes, microscale in (outputs[:2], outputs[2:]))
    return (None if rows is None else first), (None if columns is None else second)


_LAUNCH = QuantizeLaunch(64, 128, 4)


def _programs(shape: tuple[int, ...]) -> int:
    return -(-shape[0] // _LAUNCH.block_m) * -(-shape[1] // _LAUNCH.block_n)


def _output_shapes(coding: Coding, shape: tuple[int, int]) -> list[Any]:
    """Return the shapes of codes and scales; one element each without codes."""
    rows = -(-shape[0] // SIZE) if coding.kind == "nvblock" else shape[0]
    shapes = (
        ((1, 1), (1, 1)) if coding.kind == "none" else ((shape[0], -(-shape[1] // 2)), (rows, -(-shape[1] // SIZE)))
    )
    return [jax.ShapeDtypeStruct(s, jnp.uint8) for s in shapes]
