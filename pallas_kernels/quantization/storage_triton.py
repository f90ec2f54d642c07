"""Storage of residuals and results of norms and activations: loads and stores of a tile, shapes and dtypes.

Hardware and reference are those of the kernels. Codes of ten bits are packed, four in five bytes. A row has all low
bytes first, then the high bits of four codes per byte.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.quantization import codec_triton as codec
from pallas_kernels.quantization import quantize_triton
from pallas_kernels.quantization import scaling_triton as scaling
from pallas_kernels.quantization.scaling_triton import Coding

# The bits of 2^23, to which integers are added; and the float of code 0, which is stored as 512.
_INTEGER_BITS = tl.constexpr(0x4B000000)
_INTEGER_ZERO = tl.constexpr(2.0**23 + 512)
# Added to a small number: its integer plus 512 in the lowest bits.
_ROUNDING = tl.constexpr(1.5 * 2.0**23 + 512)


@triton.jit
def load_codes(
    codes_ptr: tl.tensor, first: tl.tensor, offsets: tl.tensor, m: tl.tensor, left: tl.tensor, n: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, OPERATION: tl.constexpr, PREFETCH: tl.constexpr = False,
) -> tl.tensor:  # fmt: skip
    """Return the codes of a tile, or its values if it reads arrays.

    Codes of ten bits are low bytes, and words with the high bits of eight.

    `left` is the first of the columns `n`. An asynchronous copy needs at least four bytes. With PREFETCH, words are
    therefore those of sixteen codes, and each is read twice.
    """
    if OPERATION.format == "int10" and not OPERATION.reads_arrays:
        row = m.to(tl.int64)[:, None]
        low = scaling.load_raw(codes_ptr, row * (N // 4 * 5) + n[None, :], scaling.tile_mask(m, n, M, N), MASKED)
        CODES_PER_WORD: tl.constexpr = 16 if PREFETCH else 8
        g = left // CODES_PER_WORD + tl.arange(0, n.shape[0] // 8) // (CODES_PER_WORD // 8)
        words = codes_ptr.to(tl.pointer_type(tl.int32 if PREFETCH else tl.uint16), bitcast=True)
        word_offsets = tl.multiple_of(row * (N // CODES_PER_WORD * 5) + N // CODES_PER_WORD * 4 + g[None, :], (1, 1))
        block_m = scaling.load_raw(words, word_offsets, scaling.tile_mask(m, g, M, N // CODES_PER_WORD), MASKED)
    else:
        low = scaling.load_raw(codes_ptr + first, offsets, scaling.tile_mask(m, n, M, N), MASKED)
        block_m = low
    return low, block_m


@triton.jit
def decode_codes(codes: tl.tensor, OPERATION: tl.constexpr) -> tl.tensor:
    """Return fp32 values, in units of their scales, from the result of `load_codes`."""
    if OPERATION.format == "int10":
        shift = (tl.arange(0, codes[0].shape[1]) % (16 if codes[1].dtype == tl.int32 else 8))[None, :] * 2
        block_m = ((scaling.repeat_columns(codes[1].to(tl.int32), 8) >> shift) & 3) << 8
        y = codec.from_bits(codes[0].to(tl.int32) | block_m | _INTEGER_BITS) - _INTEGER_ZERO
    else:
        y = codes[0].to(tl.float8e5 if OPERATION.format == "float8_e5m2" else tl.float8e4nv, bitcast=True)
    return y.to(tl.float32)


@triton.jit
def store_ten_bits(
    y: tl.tensor, codes_ptr: tl.tensor, m: tl.tensor, left: tl.tensor, n: tl.tensor, M: tl.constexpr, N: tl.constexpr,
    MASKED: tl.constexpr, FINITE: tl.constexpr,
) -> None:  # fmt: skip
    """Store ten-bit codes of values in units of their scales: low bytes of a row, then its high bits by fours."""
    word = codec.float_bits(tl.minimum(tl.maximum(y, -511.0), 511.0) + _ROUNDING)
    if not FINITE:
        word = tl.where(y == y, word, 512)
    row = m.to(tl.int64)[:, None]
    # A thread writes eight neighbours at once, as many as of 16 bits: other layouts use shared memory. Rows of 5 N / 4
    # bytes begin at multiples of eight, or of four.
    low = tl.multiple_of(row * (N // 4 * 5) + n[None, :], (1, 8 if N % 32 == 0 else 4))
    scaling.store(codes_ptr, low, word.to(tl.uint8), scaling.tile_mask(m, n, M, N), MASKED)
    shift = (tl.arange(0, y.shape[1]) % 8)[None, :] * 2
    block_m = tl.sum(tl.reshape(((word >> 8) & 3) << shift, (y.shape[0], y.shape[1] // 8, 8)), 2)
    g = left // 8 + tl.arange(0, y.shape[1] // 8)
    words = codes_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)
    # Each thread writes its own bits.
    word_offsets = tl.multiple_of(row * (N // 8 * 5) + N // 2 + g[None, :], (1, 1))
    scaling.store(words, word_offsets, block_m.to(tl.uint16), scaling.tile_mask(m, g, M, N // 8), MASKED)


def code_shapes(shape: tuple[int, int], coding: Coding | None) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of the codes of a residual and of their scales; one element each without codes."""
    if coding is None:
        return [jax.ShapeDtypeStruct((1, 1), jnp.uint8), jax.ShapeDtypeStruct((1, 1), jnp.float32)]
    (m, n), size = shape, coding.size
    scales = jax.ShapeDtypeStruct((m, -(-n // size)), coding.scale_dtype)
    return [jax.ShapeDtypeStruct((m, n // 4 * 5) if coding.is_packed else shape, jnp.uint8), scales]


def result_coding(result: tuple[Array | None, Any] | None) -> tuple[scaling.CodingConstants, Any]:
    """Return the coding and storage dtype of a result from its scale and dtype: codes, codes per row, or values."""
    if result is None:
        return scaling.NO_CODING, jnp.uint8
    scale, dtype = result
    if jnp.dtype(dtype).itemsize > 1:
        return scaling.ARRAY_CODING, dtype
    return Coding("token" if scale is None else "tensor", dtype).constants, jnp.uint8


def matrix_shape(codes: Array, operation: Any) -> tuple[int, int]:
    """Return the shape of the matrix with these codes, or of the matrix itself if it reads arrays."""
    m, n = codes.shape
    return m, (n // 5 * 4 if operation.format == "int10" and not operation.reads_arrays else n)


def unsupported_reason(shape: tuple[int, ...], dtype: Any, coding: Coding | None) -> str | None:
    """Return why norm and activation kernels do not support this shape, dtype or coding of residuals, or None."""
    is_packed = coding is not None and coding.is_packed and coding.size in quantize_triton.GROUP_SIZES
    reason = quantize_triton.unsupported_reason(shape, dtype, () if is_packed else (coding,))
    if reason is not None or coding is None:
        return reason
    if coding.kind != "group" or coding.dtype == jnp.int8 or coding.is_stochastic:
        return f"the saved codes must be FP8 or 10-bit groups that round to nearest, not {coding}"
    n, size = shape[1], coding.size
    if is_packed:
        return f"{n} channels are less than a group, or no multiple of 16" if n % 16 or n < size else None
    return f"{n} channels are not a multiple of the group size {size}" if n % size else None
