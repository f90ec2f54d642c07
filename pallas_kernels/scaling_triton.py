"""Device code of quantization: scales of groups and codes, bit for bit as the quantizer of `fp8jax.core` makes them.

A tile is [rows, columns]; magnitudes are compared as integers, above those of Inf and NaN, which enter no scale.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from pallas_kernels import codec_triton as codec
from pallas_kernels.codec_triton import bits, from_bits

KINDS = {"none": 0, "tensor": 1, "token": 2, "group": 3, "block": 4, "mx": 5, "same": 6}

_TINY = tl.constexpr(float(np.finfo(np.float32).tiny))
_TINY_BITS = tl.constexpr(0x00800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SIGN = tl.constexpr(-0x80000000)


@dataclasses.dataclass(frozen=True)
class Coding:
    """How codes are made of a matrix along its rows; static.

    Attributes:
        kind: what shares a scale: "tensor" or "token" (a row), given; "group" of `size` of a row, or "block" of `size`
            by `size`, computed; "mx", a computed power of two for each `size` of a row, under a given scale.
        dtype: float8_e4m3fn or float8_e5m2.
        size: 16, 32, 64 or 128; 0 for "tensor" and "token".
        ocp: for "mx", powers of two by OCP Microscaling Formats 1.0 (section 6.3), not rounded up.
        scale_dtype: float32 or bfloat16, of computed scales.
        stochastic: rounded up or down with probabilities that make the expectation exact; else to nearest even.
    """

    kind: Literal["tensor", "token", "group", "block", "mx"]
    dtype: Any = jnp.float8_e4m3fn
    size: int = 0
    ocp: bool = False
    scale_dtype: Any = jnp.float32
    stochastic: bool = False

    @property
    def static(self) -> "Static":
        top = float(jnp.finfo(self.dtype).max)
        e5m2 = self.dtype == jnp.float8_e5m2
        return Static(KINDS[self.kind], self.size, float(np.float32(1 / top)), int(np.log2(top)), e5m2, self.ocp,
                      self.stochastic)  # fmt: skip


class Static(NamedTuple):
    """A `Coding` as the device code takes it: a constant tuple."""

    kind: int
    size: int
    inverse_max: float
    log2_max: int
    e5m2: bool
    ocp: bool
    stochastic: bool
    by_row: bool = False
    kept: bool = True


NONE = Static(0, 0, 0.0, 0, False, False, False)


@triton.jit
def load_plain(pointer: tl.tensor, inside: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    return tl.load(pointer + inside, mask=mask, other=0) if MASKED else tl.load(pointer + inside)


@triton.jit
def load(pointer: tl.tensor, inside: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    """fp32 values."""
    return load_plain(pointer, inside, mask, MASKED).to(tl.float32)


@triton.jit
def finite(x: tl.tensor) -> tl.tensor:
    """Bits of magnitudes, ordered as they are and above those of Inf and NaN."""
    return (bits(x) & _MAGNITUDE) + _TINY_BITS


@triton.jit
def along_rows(x: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """The maximum of each SIZE columns."""
    return tl.max(tl.reshape(x, (x.shape[0], x.shape[1] // SIZE, SIZE)), 2)


@triton.jit
def along_columns(x: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """The maximum of each SIZE rows."""
    return tl.max(tl.reshape(x, (x.shape[0] // SIZE, SIZE, x.shape[1])), 1)


@triton.jit
def over_columns(x: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    wide = tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], SIZE))
    return tl.reshape(wide, (x.shape[0], x.shape[1] * SIZE))


@triton.jit
def over_rows(x: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    wide = tl.broadcast_to(x[:, None, :], (x.shape[0], SIZE, x.shape[1]))
    return tl.reshape(wide, (x.shape[0] * SIZE, x.shape[1]))


@triton.jit
def largest(ordered: tl.tensor) -> tl.tensor:
    """The magnitude whose `finite` bits are given; 0 where no value was finite and non-zero."""
    found = tl.maximum(ordered, _TINY_BITS) - _TINY_BITS
    return from_bits(tl.where(found < _TINY_BITS, 0, found))


@triton.jit
def to_scale(ordered: tl.tensor, HOW: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    top = largest(ordered)
    return tl.where(top > 0, tl.maximum(top * HOW[2], _TINY), 1.0).to(dtype)


@triton.jit
def inverse(scale: tl.tensor) -> tl.tensor:
    """1 / scale of normal numbers, rounded to nearest: the hardware's approximation and one step of Newton's."""
    scale = scale.to(tl.float32)
    near = codec.reciprocal(scale)
    return tl.fma(near, tl.fma(-scale, near, 1.0), near)


@triton.jit
def power(ordered: tl.tensor, inverse: tl.tensor, HOW: tl.constexpr) -> tl.tensor:
    """E8M0 bytes, as int32, of groups of values times the inverse of their level 1 scale."""
    top = largest(ordered) * inverse
    top = tl.where(top < _TINY, 0.0, top)
    byte = tl.minimum((bits(top * HOW[2]) + 0x7FFFFF) >> 23, 254)
    if HOW[5]:
        byte = tl.maximum((bits(top) >> 23) - HOW[3], 0)
    return tl.where(top > 0, byte, 127)


@triton.jit
def of_power(byte: tl.tensor) -> tl.tensor:
    """2^(127 - byte)."""
    return from_bits((254 - byte) << 23)


@triton.jit
def scaled(x: tl.tensor, inverse: tl.tensor, HOW: tl.constexpr) -> tl.tensor:
    """x times the inverse of its scale, subnormal values as zeros; Inf becomes NaN where the format has no Inf."""
    nothing = from_bits(bits(x) & _SIGN) if HOW[4] else x * 0.0
    return codec.multiply_add(x, inverse, nothing)


@triton.jit
def noise(first: tl.tensor, inside: tl.tensor, word1: tl.tensor, word2: tl.tensor) -> tl.tensor:
    """16 random bits: half of a hash of the number of the element's pair and of two words.

    The element's number is first + inside, and `first` is even.
    """
    mixed = ((first >> 1).to(tl.uint32) + (inside >> 1).to(tl.uint32)) * 0x9E3779B9 + word1
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15) ^ word2) * 0x846CA68B
    mixed = mixed ^ (mixed >> 16)
    return tl.where((inside & 1) == 0, mixed & 0xFFFF, mixed >> 16).to(tl.int32, bitcast=True)


@triton.jit
def encode(
    y: tl.tensor, first: tl.tensor, inside: tl.tensor, word1: tl.tensor, word2: tl.tensor, HOW: tl.constexpr
) -> tl.tensor:
    """Codes, as uint8, of scaled values.

    Stochastically: below the smallest normal, adding that gives all values its exponent and so the step of subnormals;
    the noise is added to the bits that are cut off.
    """
    value = y
    if HOW[6]:
        CUT: tl.constexpr = 21 if HOW[4] else 20
        SMALLEST: tl.constexpr = 2.0**-14 if HOW[4] else 2.0**-6
        shift = tl.where(tl.abs(y) < SMALLEST, SMALLEST, 0.0)
        lifted = tl.minimum(bits(tl.abs(y) + shift), 0x7FE00000)  # a NaN to which noise can be added
        cut = (lifted + (noise(first, inside, word1, word2) << (CUT - 16))) & (-(1 << CUT))
        value = from_bits(bits(from_bits(cut) - shift) | (bits(y) & _SIGN))
    if HOW[4]:
        codes = value.to(tl.float8e5).to(tl.uint8, bitcast=True)
        # The conversion saturates.
        codes = tl.where(tl.abs(y) == float("inf"), tl.where(y > 0, 0x7C, 0xFC).to(tl.uint8), codes)
    else:
        codes = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return codes


@triton.jit
def store(
    pointer: tl.tensor, at: tl.tensor, value: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr
) -> None:  # fmt: skip
    if MASKED:
        tl.store(pointer + at, value, mask=mask)
    else:
        tl.store(pointer + at, value)


@triton.jit
def starts(x: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """The number of each group of SIZE indices that `x` counts."""
    return tl.min(tl.reshape(x, (x.shape[0] // SIZE, SIZE)), 1) // SIZE


@triton.jit
def scale_along_rows(
    x: tl.tensor, m: tl.tensor, n: tl.tensor, given: tl.tensor, scale_ptr: tl.tensor, scales_ptr: tl.tensor,
    powers_ptr: tl.tensor, M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, HOW: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The values of a slice in units of their scales, which are stored where they are found here."""
    SIZE: tl.constexpr = HOW[1]
    if HOW[0] == 3 or HOW[0] == 5:
        g = starts(n, SIZE)
        WIDTH: tl.constexpr = (N + SIZE - 1) // SIZE
        at = m.to(tl.int64)[:, None] * WIDTH + g[None, :]
        there = inside(m, g, M, WIDTH)
    if HOW[0] == 3:
        scale = to_scale(along_rows(finite(x), SIZE), HOW, scales_ptr.dtype.element_ty)
        store(scales_ptr, at, scale, there, MASKED)
        factor = over_columns(inverse(scale), SIZE)
    elif HOW[7]:
        factor = inverse(tl.load(scale_ptr + m, mask=m < M, other=1.0))[:, None]
    else:
        factor = given
    y = scaled(x, factor, HOW)
    if HOW[0] == 5:
        byte = power(along_rows(finite(x), SIZE), factor, HOW)
        store(powers_ptr, at, byte.to(tl.uint8), there, MASKED)
        y = y * over_columns(of_power(byte), SIZE)
    return y


@triton.jit
def inside(m: tl.tensor, n: tl.tensor, M: tl.constexpr, N: tl.constexpr) -> tl.tensor:
    return (m < M)[:, None] & (n < N)[None, :]


@triton.jit
def turn(
    columns_ptr: tl.tensor, top: tl.tensor, left: tl.tensor, i: tl.tensor, j: tl.tensor, codes: tl.tensor,
    words: tl.tensor, here: tl.tensor, M: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Words with the codes of slice `j` put in; where columns are not whole words, the codes are stored at once."""
    if M % 4 > 0:
        at = tl.arange(0, codes.shape[1])[None, :] * M + (4 * i + j)[:, None]
        store(columns_ptr + (left.to(tl.int64) * M + top), at, codes, here, MASKED)
    return words | (codes.to(tl.uint32) << (8 * j))


@triton.jit
def store_words(
    columns_ptr: tl.tensor, top: tl.tensor, left: tl.tensor, i: tl.tensor, n: tl.tensor, words: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
) -> None:  # fmt: skip
    """Writes the words of a tile into the transposed copy."""
    pointer = (columns_ptr + (left.to(tl.int64) * M + top)).to(tl.pointer_type(tl.uint32), bitcast=True)
    at = tl.arange(0, words.shape[1])[:, None] * (M // 4) + i[None, :]
    store(pointer, at, tl.trans(words), inside(n, top + 4 * i, N, M), MASKED)


@triton.jit
def row_slice(
    x: tl.tensor, words: tl.tensor, i: tl.tensor, j: tl.tensor, m0: tl.tensor, n: tl.tensor, top: tl.tensor,
    left: tl.tensor, first: tl.tensor, at0: tl.tensor, given: tl.tensor, word1: tl.tensor, word2: tl.tensor,
    scale_ptr: tl.tensor, rows_ptr: tl.tensor, scales_ptr: tl.tensor, powers_ptr: tl.tensor, columns_ptr: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Writes the codes of slice `j`; returns the words, with them where the transposed copy has the same."""
    at, here = at0 + j * N, inside(m0 + j, n, M, N)
    y = scale_along_rows(x, m0 + j, n, given, scale_ptr, scales_ptr, powers_ptr, M, N, MASKED, ROWS)
    codes = encode(y, first, at, word1, word2, ROWS)
    if ROWS[8]:
        store(rows_ptr + first, at, codes, here, MASKED)
    if COLUMNS[0] == 6:
        words = turn(columns_ptr, top, left, i, j, codes, words, here, M, MASKED)
    return words


@triton.jit
def column_slice(
    x: tl.tensor, words: tl.tensor, i: tl.tensor, j: tl.tensor, m0: tl.tensor, n: tl.tensor, top: tl.tensor,
    left: tl.tensor, first: tl.tensor, at0: tl.tensor, factor: tl.tensor, power: tl.tensor, word1: tl.tensor,
    word2: tl.tensor, columns_ptr: tl.tensor, M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Words with the codes that slice `j` has in the transposed copy."""
    y = scaled(x, factor, COLUMNS)
    if COLUMNS[0] == 5:
        y = y * power
    codes = encode(y, first, at0 + j * N, word2, word1, COLUMNS)
    return turn(columns_ptr, top, left, i, j, codes, words, inside(m0 + j, n, M, N), M, MASKED)
