"""Device code of 8-bit codes in groups, in Triton: encoding, decoding and stochastic rounding of a tile in registers.

With M the largest value of a format, a code c of a group with scale s and exponent k stands for

    sign(c) * (s * M) * (|c| / M)^(1 / k)

Powers are taken with the hardware's approximate log2 and exp2 (relative error 2^-22; Triton's own take four times as
many instructions as all the rest), in the exponent's domain, where a group may span more octaves than fp32 has below
one. A tile is [groups, chunks, lanes]: Triton keeps the second axis within a thread.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl

_TINY = tl.constexpr(float(np.finfo(np.float32).tiny))
_SIGN = tl.constexpr(-0x80000000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
# Added to the bits of a magnitude, takes Inf and NaN out of the positive integers, and leaves the order of the rest.
_FINITE_TO_TOP = tl.constexpr(0x00800000)
_LARGEST_FINITE = tl.constexpr(0x7F7FFFFF)
# Less the bits of -x, those of 1 / x to a twentieth of it.
_INVERSE = tl.constexpr(0x7EF311C7 - 0x80000000)


@dataclasses.dataclass(frozen=True)
class Storage:
    """How the codes of a tensor are made; static.

    Attributes:
        max: largest finite magnitude of the codes' format.
        expansion: range expansion: the ratio of largest to smallest magnitude that a group is raised to, and the
            bounds of its exponent; None for codes that are scaled alone.
        smallest: the smallest code, which a non-zero value that would round to zero gets; None where it may. With
            range expansion no value rounds to zero.
        signed: whether values may be negative.
        mantissa: mantissa bits of the codes, for codes that are rounded stochastically; None rounds to nearest. Where
            there is range expansion, its ratio leaves all values of a group normal.
        smallest_normal: of the codes' format.
    """

    max: float
    expansion: tuple[float, float, float] | None = None
    smallest: float | None = None
    signed: bool = True
    mantissa: int | None = None
    smallest_normal: float = 0.0

    @property
    def static(self) -> "Static":
        ratio, lowest, highest = self.expansion or (2.0, 1.0, 1.0)
        expanded, smallest = self.expansion is not None, self.smallest or 0.0
        numbers = (self.max, math.log2(self.max), math.log2(ratio), lowest, highest, smallest)
        dropped = 0 if self.mantissa is None else 23 - self.mantissa
        return Static(True, expanded, self.signed, *numbers, dropped, self.smallest_normal)


class Static(NamedTuple):
    """A `Storage` as the device code takes it: a constant tuple."""

    scaled: bool
    expanded: bool
    signed: bool
    max: float
    log2_max: float
    log2_ratio: float
    lowest: float
    highest: float
    smallest: float
    dropped: int
    smallest_normal: float


PLAIN = Static(False, False, True, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0, 0.0)


@triton.jit
def log2_abs(x: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(
        "{.reg .f32 a; abs.f32 a, $1; lg2.approx.ftz.f32 $0, a;}", "=f,f", [x], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def exp2(x: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def inverse_root(x: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def root(x: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def over_negative(x: tl.tensor, d: tl.tensor) -> tl.tensor:
    """-x / d for finite d up to -1, to 7e-6 of itself, without the unit that takes logarithms and powers of two."""
    near = from_bits(-bits(d) + _INVERSE)
    error = tl.fma(d, near, 1.0)
    near = x * near
    return tl.fma(near, tl.fma(tl.fma(error, error, error), error, error), near)


@triton.jit
def multiply_add(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """a * b + c, with a subnormal result flushed to zero, which `encode` then counts it as."""
    return tl.inline_asm_elementwise(
        "fma.rn.ftz.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def bits(x: tl.tensor) -> tl.tensor:
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(x: tl.tensor) -> tl.tensor:
    return x.to(tl.float32, bitcast=True)


@triton.jit
def fp32(x: tl.tensor, KEPT: tl.constexpr = True) -> tl.tensor:
    """fp32 values; not KEPT, they are made anew where an earlier use has them, which would take twice the registers."""
    if x.dtype == tl.bfloat16:
        # Two at a time: Triton takes a pair apart before it shifts each.
        y = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], tl.float32, is_pure=KEPT, pack=2
        )
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def bf16_twice(x: tl.tensor) -> tl.tensor:
    """bf16 of x in both halves of a word: the conversion of one alone shares a unit with log2 and exp2."""
    return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [x], tl.int32, is_pure=True, pack=1)


@triton.jit
def ends_of_inverted(y: tl.tensor, x: tl.tensor) -> tl.tensor:
    """Bits of y, but the highest and the lowest one of ~x."""
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, 0x80000001, 0x72;", "=r,r,r", [y, x], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def turned(codes: tl.tensor) -> tl.tensor:
    """Codes, as int8, of the negative numbers."""
    return tl.inline_asm_elementwise("xor.b32 $0, $1, 0x80808080;", "=r,r", [codes], tl.int8, is_pure=True, pack=4)


@triton.jit
def with_signs(codes: tl.tensor, signs: tl.tensor) -> tl.tensor:
    """Codes, as int8, of magnitudes, with the signs of others."""
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, 0x80808080, 0xF8;", "=r,r,r", [codes, signs], tl.int8, is_pure=True, pack=4
    )


@triton.jit
def nan_where_not_finite(x: tl.tensor, other: tl.tensor) -> tl.tensor:
    """x, both of bf16, but NaN where `other` is Inf or NaN."""
    return tl.inline_asm_elementwise(
        "{.reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $2, zero, $1;}",
        "=r,r,r", [x, other], tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def load_four(pointer: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Four fp32 numbers at an aligned address by one instruction; impure, so that it stays where it is."""
    return tl.inline_asm_elementwise(
        "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=f,=f,=f,=f,l", [pointer], (tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def add_noise_to_pairs(x: tl.tensor, noise: tl.tensor) -> tl.tensor:
    """bf16 from the bits of fp32, after the lower and upper half of their noise were added to a pair of neighbours."""
    return tl.inline_asm_elementwise(
        """{.reg .b32 even, odd;
        dp2a.lo.u32.u32 even, $3, 0x1, $1;
        dp2a.lo.u32.u32 odd, $3, 0x100, $2;
        prmt.b32 $0, even, odd, 0x7632;}""",
        "=r,r,r,r,r", [x, noise], tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def add_scaled_noise_to_pairs(x: tl.tensor, noise: tl.tensor, ONE: tl.constexpr) -> tl.tensor:
    """Integers after the lower and upper half of their noise, times 16 or 32, were added to a pair of neighbours."""
    if ONE == 16:
        y = tl.inline_asm_elementwise(
            "dp2a.lo.u32.u32 $0, $4, 0x10, $2; dp2a.lo.u32.u32 $1, $4, 0x1000, $3;",
            "=r,=r,r,r,r,r", [x, noise], tl.int32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        y = tl.inline_asm_elementwise(
            "dp2a.lo.u32.u32 $0, $4, 0x20, $2; dp2a.lo.u32.u32 $1, $4, 0x2000, $3;",
            "=r,=r,r,r,r,r", [x, noise], tl.int32, is_pure=True, pack=2,
        )  # fmt: skip
    return y


@triton.jit
def per_group(x: tl.tensor) -> tl.tensor:
    return x[:, None, None]


@triton.jit
def decode(codes: tl.tensor, scale: tl.tensor, exponent: tl.tensor, factor: tl.tensor, HOW: tl.constexpr) -> tl.tensor:
    """What codes stand for, times a scalar factor; or plain floats, times the factor."""
    values = codes.to(tl.float32)
    if HOW[1]:
        decoded = decode_logarithms(log2_abs(values), scale, exponent, factor, HOW)
        if HOW[2]:
            decoded = from_bits(bits(decoded) | (bits(values) & _SIGN))
    elif HOW[0]:
        decoded = values * per_group(scale * factor)
    else:
        decoded = values * factor
    return decoded


@triton.jit
def decode_logarithms(
    logarithms: tl.tensor, scale: tl.tensor, exponent: tl.tensor, factor: tl.tensor, HOW: tl.constexpr
) -> tl.tensor:
    """`decode` with range expansion, but for the sign, given log2 of the codes' magnitudes."""
    inverse = reciprocal(exponent.to(tl.float32))
    offset = tl.fma(inverse, -HOW[4], log2_abs(scale * HOW[3] * factor))
    return exp2(tl.fma(logarithms, per_group(inverse), per_group(offset)))


@triton.jit
def add_decoded(
    x: tl.tensor, codes: tl.tensor, scale: tl.tensor, exponent: tl.tensor, factor: tl.tensor, HOW: tl.constexpr
) -> tl.tensor:
    """x + `decode` of signed codes with range expansion, in fewer instructions; may be NaN where a code is zero."""
    values = codes.to(tl.float32)
    inverse = reciprocal(exponent.to(tl.float32))
    offset = tl.fma(inverse, -HOW[4], log2_abs(scale * HOW[3] * factor))
    # Each value times what it is to be multiplied by: the sign comes with it.
    power = exp2(tl.fma(log2_abs(values), per_group(inverse - 1.0), per_group(offset)))
    return multiply_add(values, power, x)


@triton.jit
def extremes(x: tl.tensor, SIGNED: tl.constexpr, QUICK: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of each group the bits of the largest finite magnitude, and those of the smallest non-zero one, less one; and x.

    Less one, zero is the largest unsigned integer. A group of zeros gets 0 and that. The quick way counts zeros, Inf
    and NaN as values, and a program that has some goes the other way as well; unsigned, its Inf are NaN from then on.
    """
    magnitude = bits(x) & _MAGNITUDE if SIGNED else bits(x)
    if QUICK:
        largest = tl.max(tl.max(magnitude, axis=1), axis=1)
        smallest = (tl.min(tl.min(magnitude, axis=1), axis=1) - 1).to(tl.uint32, bitcast=True)
        if tl.max(tl.maximum(largest.to(tl.uint32, bitcast=True), smallest), axis=0) > _LARGEST_FINITE:
            largest, smallest = _careful_extremes(magnitude)
            if not SIGNED:
                x = tl.where(magnitude > _LARGEST_FINITE, float("nan"), x)
    else:
        largest, smallest = _careful_extremes(magnitude)
    return largest, smallest, x


@triton.jit
def _careful_extremes(magnitude: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    largest = tl.max(tl.max(magnitude + _FINITE_TO_TOP, axis=1), axis=1)
    smallest = (magnitude - 1).to(tl.uint32, bitcast=True)
    smallest = tl.min(tl.min(smallest, axis=1), axis=1)
    return tl.maximum(largest, _FINITE_TO_TOP) - _FINITE_TO_TOP, smallest


@triton.jit
def ordinary_extremes(x: tl.tensor, SIGNED: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Of each group the bits of the largest and the smallest magnitude; the largest of a group with a NaN is NaN."""
    if SIGNED:
        # Magnitudes of two are compared without being made; of integers, three at a time.
        magnitude = tl.reshape(tl.abs(x), (x.shape[0], 2, x.shape[1] // 2, x.shape[2]))
        largest = bits(tl.reduce(magnitude, 1, _larger_or_nan))
        smallest = bits(tl.min(magnitude, axis=1))
    else:
        largest, smallest = bits(x), bits(x)
    return tl.max(tl.max(largest, axis=1), axis=1), tl.min(tl.min(smallest, axis=1), axis=1)


@triton.jit
def _larger_or_nan(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def exponents(
    log2_top: tl.tensor, smallest: tl.tensor, spans: tl.tensor, HOW: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Exponents of groups from log2 of the largest magnitude, the smallest one, and whether they differ.

    Returned as stored and in fp32; and what log2 of a code has beside the exponent times log2 of the magnitude.
    """
    octaves = log2_top - log2_abs(smallest)
    k = tl.minimum(tl.maximum(HOW[5] * reciprocal(octaves), HOW[6]), HOW[7])
    pair = bf16_twice(tl.where(spans, k, 1.0))
    k = from_bits(pair & -0x10000)
    return (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), k, tl.fma(-k, log2_top, HOW[4])


@triton.jit
def interpolated(y: tl.tensor, k: tl.tensor, HOW: tl.constexpr) -> tl.tensor:
    """Bits of normal y, moved between the codes around it, and a little: ready for noise, of which a half is missing.

    The codes around y decode to what is no linear function of them. Linear noise takes the upper one with the right
    probability p where y lies at p of the way. With t the way of y itself, s = 1 - 1 / k, and codes h apart around
    their middle c, p = t + t * (1 - t) * s * h / (2 * c) up to terms in (h / c)^2. Here 1 / c is a straight line in the
    significand of y, 6 % off at most, of a p that differs from t by 0.015 (e4m3) or 0.03 (e5m2) at most.
    """
    WIDTH: tl.constexpr = 2.0 ** (HOW[9] - 23)
    x = bits(y)
    # Beyond 1 / k = 8, for groups of 2^120, p is not that far from t.
    s = 0.5 * tl.maximum(1.0 - reciprocal(k), -7.0)
    # A floating-point number this large has its integer part in its lowest bits.
    slope, start = per_group(s * (-0.4706 * 8388608.0)), per_group(s * (1.4118 * 8388608.0))
    way = from_bits((x & ((1 << HOW[9]) - 1)) | 0x3F800000) - (1.0 + WIDTH / 2)
    significand = from_bits((x & 0x007FFFFF) | 0x3F800000)
    square = tl.fma(-way, way, WIDTH * WIDTH / 4)
    moved = tl.fma(square, tl.fma(significand, slope, start), 12582912.0)
    return x + bits(moved) + ((1 << (HOW[9] - 17)) - 0x4B400000)


@triton.jit
def add_noise(
    y: tl.tensor, k: tl.tensor, noise: tl.tensor, place: tl.tensor, PAIRED: tl.constexpr, HOW: tl.constexpr
) -> tl.tensor:
    """Values of codes, for fp32 magnitudes in units of the codes: one of the two around, unbiased; Inf and NaN stay."""
    if HOW[1]:
        x = interpolated(y, k, HOW)
    else:
        # Under the smallest normal number the codes are as far apart as above it.
        shift = tl.where(y < HOW[10], HOW[10], 0.0)
        x = bits(y + shift) + (1 << (HOW[9] - 17))
    if PAIRED:
        x = add_scaled_noise_to_pairs(x, noise, 1 << (HOW[9] - 16))
    else:
        half = tl.where((place & 1) == 0, noise & 0xFFFF, noise >> 16).to(tl.int32, bitcast=True)
        x = x + half * (1 << (HOW[9] - 16))
    rounded = from_bits(x & -(1 << HOW[9]))
    if not HOW[1]:
        rounded = rounded - shift
    return tl.where(y < float("inf"), rounded, y)


@triton.jit
def encode_ordinary(
    x: tl.tensor, largest: tl.tensor, smallest: tl.tensor, unit: tl.tensor, per_unit: tl.tensor, noise: tl.tensor,
    CODE: tl.constexpr, HOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """As `encode`, with range expansion, of values in units of `unit`, of which there are `per_unit` in one.

    Given `ordinary_extremes`. Without zeros, Inf and NaN, and no scale is subnormal. Neighbours are pairs of `noise`.
    """
    scale = from_bits(largest) * (unit * (1 / HOW[3]))
    log2_top = log2_abs(scale * (per_unit * HOW[3]))
    exponent, k, offset = exponents(log2_top, from_bits(smallest), largest > smallest, HOW)
    y = exp2(tl.fma(log2_abs(x), per_group(k), per_group(offset)))
    if HOW[9] > 0:
        y = from_bits(
            add_scaled_noise_to_pairs(interpolated(y, k, HOW) - (1 << (HOW[9] - 1)), noise, 1 << (HOW[9] - 16))
        )
    codes = y.to(CODE)
    if HOW[2]:
        codes = with_signs(codes.to(tl.int8, bitcast=True), x.to(CODE).to(tl.int8, bitcast=True))
        codes = codes.to(CODE, bitcast=True)
    return codes, scale, exponent


@triton.jit
def encode(
    x: tl.tensor, noise: tl.tensor, place: tl.tensor, CODE: tl.constexpr, HOW: tl.constexpr, QUICK: tl.constexpr,
    PAIRED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Codes of the values of a tile, and scale and exponent of each group; unexpanded, the exponents are no matter.

    `noise`, `place` and PAIRED as of `round_stochastically`, for codes that are rounded so.
    """
    largest_bits, smallest, marked = extremes(x, HOW[2], QUICK)
    largest = from_bits(largest_bits)
    scale = tl.where(largest_bits > 0, tl.maximum(largest * (1 / HOW[3]), _TINY), 1.0)
    if HOW[1]:
        top = tl.maximum(largest, _TINY * HOW[3])
        spans = (bits(top) - 1).to(tl.uint32, bitcast=True) > smallest
        smallest = from_bits((smallest + 1).to(tl.int32, bitcast=True))
        exponent, k, offset = exponents(log2_abs(scale * HOW[3]), smallest, spans, HOW)
        y = exp2(tl.fma(log2_abs(marked), per_group(k), per_group(offset)))
    else:
        exponent, k = scale.to(tl.bfloat16), scale
        y = tl.abs(marked) * per_group(tl.div_rn(1.0, scale))
        if HOW[8] > 0:
            y = tl.where((x != 0) & (y < HOW[8]), HOW[8], y)
    if HOW[9] > 0:
        y = add_noise(y, k, noise, place, PAIRED, HOW)
    # The conversion saturates Inf to the largest value; the lowest bit makes it NaN, and is nothing to a finite value.
    if HOW[2]:
        # Of ~x, since the lowest bit of Inf is 0; the signs turn as codes, four at a time.
        codes = from_bits(ends_of_inverted(bits(y), bits(x))).to(CODE)
        codes = turned(codes.to(tl.int8, bitcast=True)).to(CODE, bitcast=True)
    elif QUICK:
        codes = y.to(CODE)
    else:
        codes = from_bits(bits(y) | 1).to(CODE)
    if tl.float8e5 == CODE:
        infinity = tl.where(x > 0, 0x7C, -4).to(tl.int8).to(CODE, bitcast=True)
        codes = tl.where(tl.abs(x) == float("inf"), infinity, codes)
    return codes, scale, exponent


@triton.jit
def noise_of_pairs(eighths: tl.tensor, place: tl.tensor, word1: tl.tensor, word2: tl.tensor) -> tl.tensor:
    """Noise for stochastic rounding: of each element's pair of neighbours in the flat array, one half for each.

    A multiple of a hash: of two words, and of the number of the element's eight neighbours, whose four pairs take
    different multiples. `place` is the element's among the eight, or differs from it by a multiple of eight.
    """
    noise = eighths.to(tl.uint32) * 0x9E3779B9 + word1
    noise = (noise ^ (noise >> 16)) * 0x7FEB352D
    noise = (noise ^ (noise >> 15) ^ word2) * 0x846CA68B
    noise = noise ^ (noise >> 16)
    return noise + noise * 0x9708B674 * ((place >> 1) & 3).to(tl.uint32)


@triton.jit
def round_stochastically(
    x: tl.tensor, noise: tl.tensor, place: tl.tensor, PAIRED: tl.constexpr, NAN: tl.constexpr = True
) -> tl.tensor:
    """bf16 from fp32, up or down with probabilities that make the expectation exact; NaN and Inf stay.

    PAIRED: neighbours in a thread, two and two, are the pairs that share `noise`. NAN: there may be some.
    """
    x = bits(x)
    if NAN:
        # The bound is a NaN to which noise can be added; the hardware's own is 0x7FFFFFFF.
        x = tl.minimum(x, 0x7FFF0000)
    if PAIRED:
        rounded = add_noise_to_pairs(x, noise)
    else:
        noise = tl.where((place & 1) == 0, noise & 0xFFFF, noise >> 16).to(tl.int32, bitcast=True)
        rounded = from_bits((x + noise) & -0x10000).to(tl.bfloat16)
    return rounded
