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

FORMATS = (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)
_LARGEST = {"int8": 127.0, "int10": 511.0}

TINY = tl.constexpr(float(np.finfo(np.float32).tiny))
_TINY_BITS = tl.constexpr(0x00800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SIGN = tl.constexpr(-0x80000000)
_INF_BITS = tl.constexpr(0x7F800000)
_ROUNDING = tl.constexpr(1.5 * 2.0**23)  # added to a small number, leaves an integer in the lowest bits


@dataclasses.dataclass(frozen=True)
class Coding:
    """How codes are made of a matrix along its rows; static.

    Attributes:
        kind: what shares a scale: "tensor" or "token" (a row), given; "group" of `size` of a row, or "block" of `size`
            by `size`, computed; "mx", a computed power of two for each `size` of a row, under a given scale.
        dtype: float8_e4m3fn, float8_e5m2, or int8 from -127 to 127, where a NaN or Inf makes its scale NaN; of what
            operations keep also int16, which stands for ten bits from -511 to 511, packed four in five bytes.
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
    def packed(self) -> bool:
        return jnp.dtype(self.dtype) == jnp.int16

    @property
    def format(self) -> str:
        return "int10" if self.packed else jnp.dtype(self.dtype).name

    @property
    def static(self) -> "CodingConstants":
        top = _LARGEST.get(self.format) or float(jnp.finfo(self.dtype).max)
        return CodingConstants(self.kind, self.size, float(np.float32(1 / top)), int(np.log2(top)), self.format,
                      self.ocp, self.stochastic, integer=self.format in _LARGEST)  # fmt: skip


class CodingConstants(NamedTuple):
    """A `Coding` as the device code takes it; also of no codes, "none", and of the "same" as those of the rows.

    Triton 3.9 knows the fields of such a constant on the device, and no properties.
    """

    kind: str
    size: int
    inverse_max: float
    log2_max: int
    format: str
    ocp: bool
    stochastic: bool
    by_row: bool = False
    written: bool = True
    scales_turned: bool = False  # they lie transposed
    integer: bool = False
    maxima: int = 0  # of parts, from which the kernel computes the scale; 0 where that is given
    spread: int = 0  # the power of two above their number
    up: bool = False  # whether the largest of them is rounded up to bf16


NONE = CodingConstants("none", 0, 0.0, 0, "float8_e4m3fn", False, False)
INTEGERS = NONE._replace(format="int8", integer=True)
# A result as it is, in the dtype of where it is written.
ARRAY = NONE._replace(kind="array")


@triton.jit
def from_last() -> tl.tensor:
    """The number of this program, of which the last one starts first.

    What was written, or read, just before ends with what lies last, and the L2 cache still holds that. Kernels that
    read first what another one has made start there; those that read the same once more then start with the first.
    """
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def load_plain(pointer: tl.tensor, inside: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    return tl.load(pointer + inside, mask=mask, other=0) if MASKED else tl.load(pointer + inside)


@triton.jit
def load(pointer: tl.tensor, inside: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    """fp32 values."""
    return load_plain(pointer, inside, mask, MASKED).to(tl.float32)


@triton.jit
def ordered(x: tl.tensor, HOW: tl.constexpr) -> tl.tensor:
    """Bits of magnitudes, ordered as they are, above those of Inf and NaN; for integers, which have no such, below."""
    if x.dtype == tl.bfloat16:
        magnitude = ordered_pairs(x, 0 if HOW.integer else _TINY_BITS | (_TINY_BITS >> 16))
    else:
        magnitude = (bits(x.to(tl.float32)) & _MAGNITUDE) + (0 if HOW.integer else _TINY_BITS)
    return magnitude


@triton.jit
def ordered_pairs(x: tl.tensor, bias: tl.constexpr) -> tl.tensor:
    """`ordered` of bf16, two at a time; the bias is of both."""
    return tl.inline_asm_elementwise(
        """{.reg .b32 pair;
        and.b32 pair, $2, 0x7fff7fff;
        add.s32 pair, pair, $4;
        shl.b32 $0, pair, 16;
        and.b32 $1, pair, 0xffff0000;}""",
        "=r,=r,r,r,r", [x, bias], tl.int32, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def along_rows(x: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """The maximum of each SIZE columns."""
    return tl.max(tl.reshape(x, (x.shape[0], x.shape[1] // SIZE, SIZE)), 2)


@triton.jit
def along_columns(x: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """The maximum of each SIZE rows."""
    return tl.max(tl.reshape(x, (x.shape[0] // SIZE, SIZE, x.shape[1])), 1)


@triton.jit
def slice_maxima(
    x: tl.tensor, below: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """`ordered` maxima of the groups in a slice's rows, where they are asked for; and of it and what is `below`."""
    largest = below
    if ROWS.kind == "group" or ROWS.kind == "mx":
        largest = along_rows(ordered(x, ROWS), ROWS.size)
    if ROWS.kind == "block":
        below = tl.maximum(below, ordered(x, ROWS))
    elif COLUMNS.kind == "group" or COLUMNS.kind == "mx":
        below = tl.maximum(below, ordered(x, COLUMNS))
    return largest, below


@triton.jit
def over_columns(x: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    wide = tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], SIZE))
    return tl.reshape(wide, (x.shape[0], x.shape[1] * SIZE))


@triton.jit
def over_rows(x: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    wide = tl.broadcast_to(x[:, None, :], (x.shape[0], SIZE, x.shape[1]))
    return tl.reshape(wide, (x.shape[0] * SIZE, x.shape[1]))


@triton.jit
def largest(ordered: tl.tensor, HOW: tl.constexpr) -> tl.tensor:
    """The magnitude whose `ordered` bits are given; 0 where no value was finite and non-zero."""
    magnitude = ordered
    if HOW.integer:
        magnitude = tl.where(magnitude >= _INF_BITS, _INF_BITS + 1, magnitude)
    else:
        magnitude = tl.maximum(magnitude, _TINY_BITS) - _TINY_BITS
    return from_bits(tl.where(magnitude < _TINY_BITS, 0, magnitude))


@triton.jit
def to_scale(ordered: tl.tensor, HOW: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    top = largest(ordered, HOW)
    scale = tl.where(top > 0, tl.maximum(top * HOW.inverse_max, TINY), 1.0)
    if HOW.integer and dtype == tl.bfloat16:
        # Rounded up: under a scale that was rounded down the largest code would saturate.
        scale = from_bits((bits(scale) + 0xFFFF) & -0x10000)
    return tl.where(top == top, scale, top).to(dtype)


@triton.jit
def scale_of_maxima(maxima_ptr: tl.tensor, HOW: tl.constexpr) -> tl.tensor:
    """The scale of a tensor, fp32, from the largest finite magnitudes of its parts."""
    at = tl.arange(0, HOW.spread)
    top = tl.max(bits(tl.load(maxima_ptr + at, mask=at < HOW.maxima, other=0.0)), 0)
    if HOW.up:
        top = (top + 0xFFFF) & -0x10000
    largest = from_bits(top)
    return tl.where(largest > 0, tl.maximum(largest * HOW.inverse_max, TINY), 1.0)


@triton.jit
def inverse(scale: tl.tensor) -> tl.tensor:
    """1 / scale of normal numbers, rounded to nearest: the hardware's approximation and one step of Newton's."""
    scale = scale.to(tl.float32)
    near = codec.reciprocal(scale)
    return tl.fma(near, tl.fma(-scale, near, 1.0), near)


@triton.jit
def power(ordered: tl.tensor, inverse: tl.tensor, HOW: tl.constexpr) -> tl.tensor:
    """E8M0 bytes, as int32, of groups of values times the inverse of their level 1 scale."""
    top = largest(ordered, HOW) * inverse
    top = tl.where(top < TINY, 0.0, top)
    if HOW.ocp:
        byte = tl.where(top > 0, tl.maximum((bits(top) >> 23) - HOW.log2_max, 0), 127)
    else:
        byte = tl.minimum(tl.maximum((bits(top * HOW.inverse_max) + 0x7FFFFF) >> 23, 1), 254)
    return byte


@triton.jit
def of_power(byte: tl.tensor) -> tl.tensor:
    """2^(127 - byte)."""
    return from_bits((254 - byte) << 23)


@triton.jit
def scaled(x: tl.tensor, inverse: tl.tensor, HOW: tl.constexpr, FINITE: tl.constexpr = False) -> tl.tensor:
    """x times the inverse of its scale, subnormal values as zeros; Inf becomes NaN where the format has no Inf.

    Of FINITE values in fewer instructions, as in `encode`.
    """
    if FINITE:
        nothing = from_bits(tl.full([], _SIGN, tl.int32))
    elif HOW.format == "float8_e5m2":
        nothing = from_bits(bits(x) & _SIGN)
    else:
        nothing = x * 0.0
    return codec.multiply_add(x, inverse, nothing)


@triton.jit
def times_power(x: tl.tensor, power: tl.tensor, HOW: tl.constexpr) -> tl.tensor:
    """x times the inverse of its group's power of two, subnormal values as zeros, Inf as Inf.

    It precedes the division by the level 1 scale, whose quotient alone may be subnormal and would be flushed.
    """
    return scaled(x, power, HOW, True)


@triton.jit
def hashed(number: tl.tensor, word1: tl.tensor, word2: tl.tensor) -> tl.tensor:
    """32 random bits for each number."""
    mixed = number * 0x9E3779B9 + word1
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15) ^ word2) * 0x846CA68B
    return mixed ^ (mixed >> 16)


@triton.jit
def noise(random: tl.tensor, J: tl.constexpr) -> tl.tensor:
    """The random bits of one of four elements that share them, turned so that no two have the same high bits."""
    turned = random
    if J > 0:
        turned = (random >> (8 * J)) | (random << (32 - 8 * J))
    return turned


@triton.jit
def encode(
    x: tl.tensor, y: tl.tensor, noise: tl.tensor, HOW: tl.constexpr, FINITE: tl.constexpr = False
) -> tl.tensor:  # fmt: skip
    """Codes, as uint8, of values x that are y when `scaled`.

    Under a given scale y may be infinite where x is not, and saturates; under a computed one y will do for x.

    Stochastically: below the smallest normal, adding that gives all values its exponent and so the step of subnormals;
    the noise is added to the bits that are cut off.
    """
    if HOW.format == "int8":
        value = tl.minimum(tl.maximum(y, -127.0), 127.0)
        if HOW.stochastic:
            fraction = from_bits(((noise >> 9) | 0x3F800000).to(tl.int32, bitcast=True)) - 1.0
            # The sum is rounded down: beside an integer fp32 has no place for all of the noise's bits, and to nearest
            # the largest draws would take it to the next.
            value = tl.floor(
                tl.inline_asm_elementwise(
                    "add.rm.f32 $0, $1, $2;", "=f,f,f", [value, fraction], tl.float32, is_pure=True, pack=1
                )
            )
        codes = tl.where(y == y, bits(value + _ROUNDING), 0).to(tl.uint8)
    else:
        value = y
        if HOW.stochastic:
            CUT: tl.constexpr = 21 if HOW.format == "float8_e5m2" else 20
            SMALLEST: tl.constexpr = 2.0**-14 if HOW.format == "float8_e5m2" else 2.0**-6
            shift = tl.where(tl.abs(y) < SMALLEST, SMALLEST, 0.0)
            lifted = tl.minimum(bits(tl.abs(y) + shift), 0x7FE00000)  # a NaN to which noise can be added
            cut = (lifted + (noise & ((1 << CUT) - 1)).to(tl.int32, bitcast=True)) & (-(1 << CUT))
            value = from_bits(bits(from_bits(cut) - shift) | (bits(y) & _SIGN))
        if HOW.format == "float8_e5m2" and FINITE:
            codes = value.to(tl.float8e5).to(tl.uint8, bitcast=True)
        elif HOW.format == "float8_e5m2":
            # The conversion saturates: an infinity becomes the largest value, 0x7B, and here 0x7C; as does the NaN, of
            # any sign, that it is times an inverse flushed to 0.
            infinite = tl.where(
                tl.abs(y if ((HOW.kind == "group" or HOW.kind == "mx") or HOW.kind == "block") else x) == float("inf"),
                7,
                0,
            ).to(tl.uint8)
            codes = (value.to(tl.float8e5).to(tl.uint8, bitcast=True) | infinite) ^ (infinite & 3)
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
def scale_along_rows(
    x: tl.tensor, largest: tl.tensor, m: tl.tensor, left: tl.tensor, inverse_scale: tl.tensor, scale_ptr: tl.tensor,
    scales_ptr: tl.tensor, powers_ptr: tl.tensor, M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
    HOW: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The values of a slice, from column `left` on, in units of their scales, which are stored where made here.

    `largest` are the `ordered` maxima of groups.
    """
    SIZE: tl.constexpr = HOW.size
    if HOW.kind == "group" or HOW.kind == "mx":
        g = left // SIZE + tl.arange(0, x.shape[1] // SIZE)
        WIDTH: tl.constexpr = (N + SIZE - 1) // SIZE
        at = m.to(tl.int64)[:, None] * WIDTH + g[None, :]
        if HOW.scales_turned:
            at = m[:, None] + g.to(tl.int64)[None, :] * M
        there = inside(m, g, M, WIDTH)
    if HOW.kind == "group":
        scale = to_scale(largest, HOW, scales_ptr.dtype.element_ty)
        store(scales_ptr, at, scale, there, MASKED)
        factor = over_columns(inverse(scale), SIZE)
    elif HOW.by_row:
        factor = inverse(tl.load(scale_ptr + m, mask=m < M, other=1.0))[:, None]
    else:
        factor = inverse_scale
    if HOW.kind == "mx":
        byte = power(largest, factor, HOW)
        store(powers_ptr, at, byte.to(tl.uint8), there, MASKED)
        x = times_power(x, over_columns(of_power(byte), SIZE), HOW)
    return scaled(x, factor, HOW)


@triton.jit
def inside(m: tl.tensor, n: tl.tensor, M: tl.constexpr, N: tl.constexpr) -> tl.tensor:
    return (m < M)[:, None] & (n < N)[None, :]
