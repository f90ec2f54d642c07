"""Device code of 8-bit codes in groups, in Triton: decoding, and stochastic rounding, of a tile in registers.

With M the largest value of a format, a code c of a group with scale s and exponent k stands for

    sign(c) * (s * M) * (|c| / M)^(1 / k)

Powers are taken with the hardware's approximate log2 and exp2 (relative error 2^-22; Triton's own take four times as
many instructions as all the rest), in the exponent's domain, where a group may span more octaves than fp32 has below
one. A tile is [groups, chunks, lanes]: Triton keeps the second axis within a thread.
"""

import dataclasses
import math
from typing import NamedTuple

import triton
import triton.language as tl

_SIGN_BIT = tl.constexpr(-0x80000000)
# Less the bits of -x, those of 1 / x to a twentieth of it.
_RECIPROCAL_MAGIC = tl.constexpr(0x7EF311C7 - 0x80000000)
# As `fp8jax.ops.optimizers.leaf.LARGEST_GRADIENT`.
LARGEST_GRADIENT = tl.constexpr(2.0**62)


@dataclasses.dataclass(frozen=True)
class Noise:
    """How codes are rounded stochastically; static.

    Attributes:
        mantissa_bits: mantissa bits of the codes' format.
        smallest_normal: of the format.
        span_bounds: ratios of largest to smallest code between which a group keeps its exponent.
    """

    mantissa_bits: int
    smallest_normal: float
    span_bounds: tuple[float, float]


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
        noise: for codes that are rounded stochastically; None rounds to nearest.
        dither_format: mantissa bits and smallest normal number of the format of codes that `add_dither` changes before
            they are rounded to nearest; None are not.
    """

    max: float
    expansion: tuple[float, float, float] | None = None
    smallest: float | None = None
    signed: bool = True
    noise: Noise | None = None
    dither_format: tuple[int, float] | None = None

    @property
    def constants(self) -> "StorageConstants":
        ratio, lowest, highest = self.expansion or (2.0, 1.0, 1.0)
        expanded, smallest = self.expansion is not None, self.smallest or 0.0
        numbers = (self.max, math.log2(self.max), math.log2(ratio), lowest, highest, smallest)
        if self.noise is None:
            mantissa, normal = self.dither_format or (0, 0.0)
            return StorageConstants(True, expanded, self.signed, *numbers, smallest_normal=normal, mantissa=mantissa)
        fewest, most = (math.log2(bound) for bound in self.noise.span_bounds)
        dropped = 23 - self.noise.mantissa_bits
        return StorageConstants(
            True, expanded, self.signed, *numbers, dropped, self.noise.smallest_normal, fewest, most
        )


class StorageConstants(NamedTuple):
    """A `Storage` as the device code takes it."""

    scaled: bool
    expanded: bool
    signed: bool
    max: float
    log2_max: float
    log2_ratio: float
    lowest: float
    highest: float
    smallest: float
    dropped: int = 0
    smallest_normal: float = 0.0
    fewest: float = 0.0
    most: float = 0.0
    mantissa: int = 0


UNSCALED = StorageConstants(False, False, True, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0)
# bf16 that is rounded stochastically.
STOCHASTIC_BF16 = UNSCALED._replace(dropped=16)


@triton.jit
def load(pointer: tl.tensor, offsets: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    """Values as they lie, zeros outside."""
    return tl.load(pointer + offsets, mask=mask, other=0.0) if MASKED else tl.load(pointer + offsets)


@triton.jit
def store(pointer: tl.tensor, offsets: tl.tensor, value: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr) -> None:
    """Stores values in the dtype of where they go."""
    value = value.to(pointer.dtype.element_ty)
    if MASKED:
        tl.store(pointer + offsets, value, mask=mask)
    else:
        tl.store(pointer + offsets, value)


@triton.jit
def log2_abs_approx(x: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(
        "{.reg .f32 a; abs.f32 a, $1; lg2.approx.ftz.f32 $0, a;}", "=f,f", [x], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def exp2_approx(x: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal_approx(x: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def rsqrt_approx(x: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def sqrt_approx(x: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def clip_magnitude(x: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """x with the smaller magnitude of both, in one instruction; the limit is not negative."""
    return tl.inline_asm_elementwise(
        "min.xorsign.abs.f32 $0, $1, $2;", "=f,f,f", [x, limit], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def scale_and_clip_gradient(g: tl.tensor, factor: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Gradients times a factor, of which finite ones are at most LARGEST; NaN and Inf of either stay."""
    product = g * factor
    bounded = tl.maximum(tl.minimum(product, LARGEST), -LARGEST)
    bounded = tl.where(tl.abs(g) < float("inf"), bounded, product)
    return tl.where(tl.abs(factor) < float("inf"), bounded, product)


@triton.jit
def divide_negative_approx(x: tl.tensor, d: tl.tensor) -> tl.tensor:
    """-x / d for finite d up to -1, to 7e-6 of itself, without the unit that takes logarithms and powers of two."""
    estimate = from_bits(-float_bits(d) + _RECIPROCAL_MAGIC)
    error = tl.fma(d, estimate, 1.0)
    estimate = x * estimate
    return tl.fma(estimate, tl.fma(tl.fma(error, error, error), error, error), estimate)


@triton.jit
def multiply_add(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """a * b + c, with a subnormal result flushed to zero, which `encode` then counts it as."""
    return tl.inline_asm_elementwise(
        "fma.rn.ftz.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def float_bits(x: tl.tensor) -> tl.tensor:
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(x: tl.tensor) -> tl.tensor:
    return x.to(tl.float32, bitcast=True)


@triton.jit
def to_fp32(x: tl.tensor, IS_PURE: tl.constexpr = True) -> tl.tensor:
    """fp32 values; not IS_PURE, they are made anew: an earlier use would keep twice the registers."""
    if x.dtype == tl.bfloat16:
        # Two at a time: Triton takes a pair apart before it shifts each.
        y = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], tl.float32, is_pure=IS_PURE, pack=2
        )
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def to_bf16_pair(x: tl.tensor) -> tl.tensor:
    """bf16 of x in both halves of a word: the conversion of one alone shares a unit with log2 and exp2."""
    return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [x], tl.int32, is_pure=True, pack=1)


@triton.jit
def or_inverted_end_bits(y: tl.tensor, x: tl.tensor) -> tl.tensor:
    """Bits of y, but the highest and the lowest one of ~x."""
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, 0x80000001, 0x72;", "=r,r,r", [y, x], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def flip_signs(codes: tl.tensor) -> tl.tensor:
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
def load_float4(pointer: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
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
def add_scaled_noise_to_pairs(x: tl.tensor, noise: tl.tensor, NOISE_SCALE: tl.constexpr) -> tl.tensor:
    """Integers after the lower and upper half of their noise, times 16 or 32, were added to a pair of neighbours."""
    if NOISE_SCALE == 16:
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
def broadcast_groups(x: tl.tensor) -> tl.tensor:
    return x[:, None, None]


@triton.jit
def decode(
    codes: tl.tensor, scale: tl.tensor, exponent: tl.tensor, factor: tl.tensor, STORAGE: tl.constexpr
) -> tl.tensor:
    """What codes stand for, times a scalar factor; or plain floats, times the factor."""
    values = codes.to(tl.float32)
    if STORAGE.expanded:
        decoded = decode_from_log2(log2_abs_approx(values), scale, exponent, factor, STORAGE)
        if STORAGE.signed:
            decoded = from_bits(float_bits(decoded) | (float_bits(values) & _SIGN_BIT))
    elif STORAGE.scaled:
        decoded = values * broadcast_groups(scale * factor)
    else:
        decoded = values * factor
    return decoded


@triton.jit
def decode_from_log2(
    log2_codes: tl.tensor, scale: tl.tensor, exponent: tl.tensor, factor: tl.tensor, STORAGE: tl.constexpr
) -> tl.tensor:
    """`decode` with range expansion, but for the sign, given log2 of the codes' magnitudes."""
    inverse = reciprocal_approx(exponent.to(tl.float32))
    offset = tl.fma(inverse, -STORAGE.log2_max, log2_abs_approx(scale * STORAGE.max * factor))
    return exp2_approx(tl.fma(log2_codes, broadcast_groups(inverse), broadcast_groups(offset)))


@triton.jit
def add_decoded(
    x: tl.tensor, codes: tl.tensor, scale: tl.tensor, exponent: tl.tensor, factor: tl.tensor, STORAGE: tl.constexpr
) -> tl.tensor:
    """x + `decode` of signed codes with range expansion, in fewer instructions."""
    values = codes.to(tl.float32)
    inverse = reciprocal_approx(exponent.to(tl.float32))
    offset = tl.fma(inverse, -STORAGE.log2_max, log2_abs_approx(scale * STORAGE.max * factor))
    # Each value times what it is to be multiplied by: the sign comes with it. That of zero has to be finite.
    power = exp2_approx(
        tl.minimum(tl.fma(log2_abs_approx(values), broadcast_groups(inverse - 1.0), broadcast_groups(offset)), 126.0)
    )
    return multiply_add(values, power, x)


@triton.jit
def pair_noise(octets: tl.tensor, element: tl.tensor, word1: tl.tensor, word2: tl.tensor) -> tl.tensor:
    """Noise for stochastic rounding: of each element's pair of neighbours in the flat array, one half for each.

    A multiple of a hash: of two words, and of the number of the element's eight neighbours, whose four pairs take
    different multiples. `element` is the element's among the eight, or differs from it by a multiple of eight.
    """
    noise = octets.to(tl.uint32) * 0x9E3779B9 + word1
    noise = (noise ^ (noise >> 16)) * 0x7FEB352D
    noise = (noise ^ (noise >> 15) ^ word2) * 0x846CA68B
    noise = noise ^ (noise >> 16)
    return noise + noise * 0x9708B674 * ((element >> 1) & 3).to(tl.uint32)


@triton.jit
def add_dither(
    y: tl.tensor, decay: tl.tensor, dither: tl.tensor, NORMAL: tl.constexpr, MANTISSA: tl.constexpr
) -> tl.tensor:
    """Magnitudes in units of a format, moved where decay would not leave a code to nearest; see `Format.encode`."""
    power = from_bits(float_bits(y) & 0x7F800000)
    unit = tl.maximum(power, NORMAL)
    dithered = tl.maximum(tl.fma(unit, (dither - 0.5) * 2.0**-MANTISSA, y), power)
    return tl.where(unit > (1 - decay) * 2.0 ** (MANTISSA + 1) * y, dithered, y)


@triton.jit
def round_stochastically(
    x: tl.tensor, noise: tl.tensor, element: tl.tensor, PAIRED: tl.constexpr, MAY_HAVE_NAN: tl.constexpr = True
) -> tl.tensor:
    """bf16 from fp32, up or down with probabilities that make the expectation exact; NaN and Inf stay.

    PAIRED: neighbours in a thread, two and two, are the pairs that share `noise`. MAY_HAVE_NAN: there may be some.
    """
    x = float_bits(x)
    if MAY_HAVE_NAN:
        # The bound is a NaN to which noise can be added; the hardware's own is 0x7FFFFFFF.
        x = tl.minimum(x, 0x7FFF0000)
    if PAIRED:
        rounded = add_noise_to_pairs(x, noise)
    else:
        noise = tl.where((element & 1) == 0, noise & 0xFFFF, noise >> 16).to(tl.int32, bitcast=True)
        rounded = from_bits((x + noise) & -0x10000).to(tl.bfloat16)
    return rounded
