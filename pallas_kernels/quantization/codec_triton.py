"""Device code of 8-bit codes in groups: decoding and stochastic rounding of a tile in registers.

Hardware: Ada or newer. Reference: `Format` in fp8jax/core/formats.py, and fp8jax/core/expansion.py.

With M the largest value of a format, a code c of a group with scale s and exponent k decodes to

    sign(c) * (s * M) * (|c| / M)^(1 / k)

Powers use the hardware's approximate log2 and exp2 (relative error 2^-22): Triton's own need many more instructions.
The computation stays in the exponent's domain, because a group may span more octaves than fp32 has below one. A tile is
[groups, chunks, lanes]: Triton keeps the second axis inside of a thread.
"""

import dataclasses
import math
from typing import NamedTuple

import triton
import triton.language as tl

_SIGN_BIT = tl.constexpr(-0x80000000)
# This number minus the bits of -x are the bits of an estimate of 1 / x.
_RECIPROCAL_MAGIC = tl.constexpr(0x7EF311C7 - 0x80000000)
# Equal to `fp8jax.ops.optimizers.leaf.LARGEST_GRADIENT`.
LARGEST_GRADIENT = tl.constexpr(2.0**62)


@dataclasses.dataclass(frozen=True)
class Noise:
    """Static parameters of stochastic rounding.

    Attributes:
        mantissa_bits, smallest_normal: those of the code format.
        span_bounds: bounds of the ratio of largest to smallest code between which a group keeps its exponent.
    """

    mantissa_bits: int
    smallest_normal: float
    span_bounds: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Storage:
    """Static parameters of the codes of a tensor.

    Attributes:
        max: largest finite magnitude of the code format.
        expansion: range expansion: target ratio of largest to smallest magnitude in a group, and the bounds of its
            exponent; None for codes with a scale alone.
        smallest: the code of non-zero values that would round to zero; None lets them. With range expansion no value
            rounds to zero.
        is_signed: whether values may be negative.
        noise: stochastic rounding; None rounds to nearest.
        dither_format: mantissa bits and smallest normal number of the code format, for `add_dither`; None without
            dither.
    """

    max: float
    expansion: tuple[float, float, float] | None = None
    smallest: float | None = None
    is_signed: bool = True
    noise: Noise | None = None
    dither_format: tuple[int, float] | None = None

    @property
    def constants(self) -> "StorageConstants":
        ratio, lowest, highest = self.expansion or (2.0, 1.0, 1.0)
        is_expanded, smallest = self.expansion is not None, self.smallest or 0.0
        numbers = (self.max, math.log2(self.max), math.log2(ratio), lowest, highest, smallest)
        if self.noise is None:
            mantissa, normal = self.dither_format or (0, 0.0)
            return StorageConstants(
                True, is_expanded, self.is_signed, *numbers, smallest_normal=normal, mantissa=mantissa
            )
        fewest, most = (math.log2(bound) for bound in self.noise.span_bounds)
        dropped = 23 - self.noise.mantissa_bits
        return StorageConstants(
            True, is_expanded, self.is_signed, *numbers, dropped, self.noise.smallest_normal, fewest, most
        )


class StorageConstants(NamedTuple):
    """A `Storage` in the form of a compile-time constant."""

    has_scale: bool
    is_expanded: bool
    is_signed: bool
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
# bf16 with stochastic rounding.
STOCHASTIC_BF16 = UNSCALED._replace(dropped=16)


@triton.jit
def load(pointer: tl.tensor, offsets: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    """Load values in their own dtype, zeros outside of the mask."""
    return tl.load(pointer + offsets, mask=mask, other=0.0) if MASKED else tl.load(pointer + offsets)


@triton.jit
def store(pointer: tl.tensor, offsets: tl.tensor, value: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr) -> None:
    """Store values, converted to the dtype of the destination."""
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
    """Return x with its magnitude limited to `limit`, which is not negative, in one instruction."""
    return tl.inline_asm_elementwise(
        "min.xorsign.abs.f32 $0, $1, $2;", "=f,f,f", [x, limit], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def scale_and_clip_gradient(g: tl.tensor, factor: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Return gradients times a factor. Finite products are limited to LARGEST; NaN and Inf of an operand propagate."""
    product = g * factor
    bounded = tl.maximum(tl.minimum(product, LARGEST), -LARGEST)
    bounded = tl.where(tl.abs(g) < float("inf"), bounded, product)
    return tl.where(tl.abs(factor) < float("inf"), bounded, product)


@triton.jit
def divide_negative_approx(x: tl.tensor, d: tl.tensor) -> tl.tensor:
    """Return -x / d for finite d <= -1, approximately, without the unit for logarithms and powers of two."""
    estimate = from_bits(-float_bits(d) + _RECIPROCAL_MAGIC)
    error = tl.fma(d, estimate, 1.0)
    estimate = x * estimate
    return tl.fma(estimate, tl.fma(tl.fma(error, error, error), error, error), estimate)


@triton.jit
def multiply_add(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """Return a * b + c, with a subnormal result flushed to zero, as `encode` expects."""
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
    """Return fp32 values. Without IS_PURE each use recomputes them, because stored ones need twice the registers."""
    if x.dtype == tl.bfloat16:
        # Two at a time: Triton would split a pair before it shifts each half.
        y = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], tl.float32, is_pure=IS_PURE, pack=2
        )
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def to_bf16_pair(x: tl.tensor) -> tl.tensor:
    """Return bf16 of x in both halves of a word: the conversion of a single value shares a unit with log2 and exp2."""
    return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [x], tl.int32, is_pure=True, pack=1)


@triton.jit
def or_inverted_end_bits(y: tl.tensor, x: tl.tensor) -> tl.tensor:
    """Return the bits of y, with the highest and lowest bit of ~x."""
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, 0x80000001, 0x72;", "=r,r,r", [y, x], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def flip_signs(codes: tl.tensor) -> tl.tensor:
    """Return int8 codes of the negated numbers."""
    return tl.inline_asm_elementwise("xor.b32 $0, $1, 0x80808080;", "=r,r", [codes], tl.int8, is_pure=True, pack=4)


@triton.jit
def with_signs(codes: tl.tensor, signs: tl.tensor) -> tl.tensor:
    """Return int8 codes of magnitudes, with the signs of `signs`."""
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, 0x80808080, 0xF8;", "=r,r,r", [codes, signs], tl.int8, is_pure=True, pack=4
    )


@triton.jit
def nan_where_not_finite(x: tl.tensor, other: tl.tensor) -> tl.tensor:
    """Return x, or NaN if `other` is Inf or NaN; both are bf16."""
    return tl.inline_asm_elementwise(
        "{.reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $2, zero, $1;}",
        "=r,r,r", [x, other], tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def load_float4(pointer: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Load four fp32 numbers from an aligned address in one instruction; impure, so that it is not moved."""
    return tl.inline_asm_elementwise(
        "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=f,=f,=f,=f,l", [pointer], (tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def add_noise_to_pairs(x: tl.tensor, noise: tl.tensor) -> tl.tensor:
    """Return bf16 from fp32 bits plus noise: neighbours of a pair get the lower and the upper half of their noise."""
    return tl.inline_asm_elementwise(
        """{.reg .b32 even, odd;
        dp2a.lo.u32.u32 even, $3, 0x1, $1;
        dp2a.lo.u32.u32 odd, $3, 0x100, $2;
        prmt.b32 $0, even, odd, 0x7632;}""",
        "=r,r,r,r,r", [x, noise], tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def add_scaled_noise_to_pairs(x: tl.tensor, noise: tl.tensor, NOISE_SCALE: tl.constexpr) -> tl.tensor:
    """Return integers plus noise times NOISE_SCALE, 16 or 32: a pair of neighbours adds the two halves of its noise."""
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
    """Return decoded values times a scalar factor; for plain storage, floats times the factor."""
    values = codes.to(tl.float32)
    if STORAGE.is_expanded:
        decoded = decode_from_log2(log2_abs_approx(values), scale, exponent, factor, STORAGE)
        if STORAGE.is_signed:
            decoded = from_bits(float_bits(decoded) | (float_bits(values) & _SIGN_BIT))
    elif STORAGE.has_scale:
        decoded = values * broadcast_groups(scale * factor)
    else:
        decoded = values * factor
    return decoded


@triton.jit
def decode_from_log2(
    log2_codes: tl.tensor, scale: tl.tensor, exponent: tl.tensor, factor: tl.tensor, STORAGE: tl.constexpr
) -> tl.tensor:
    """Return `decode` with range expansion, without the sign, from log2 of the code magnitudes."""
    inverse = reciprocal_approx(exponent.to(tl.float32))
    offset = tl.fma(inverse, -STORAGE.log2_max, log2_abs_approx(scale * STORAGE.max * factor))
    return exp2_approx(tl.fma(log2_codes, broadcast_groups(inverse), broadcast_groups(offset)))


@triton.jit
def add_decoded(
    x: tl.tensor, codes: tl.tensor, scale: tl.tensor, exponent: tl.tensor, factor: tl.tensor, STORAGE: tl.constexpr
) -> tl.tensor:
    """Return x + `decode` of signed codes with range expansion, in fewer instructions."""
    values = codes.to(tl.float32)
    inverse = reciprocal_approx(exponent.to(tl.float32))
    offset = tl.fma(inverse, -STORAGE.log2_max, log2_abs_approx(scale * STORAGE.max * factor))
    # Multiply each value by a power: the sign comes with it. The power at zero must be finite.
    power = exp2_approx(
        tl.minimum(tl.fma(log2_abs_approx(values), broadcast_groups(inverse - 1.0), broadcast_groups(offset)), 126.0)
    )
    return multiply_add(values, power, x)


@triton.jit
def pair_noise(octets: tl.tensor, element: tl.tensor, word1: tl.tensor, word2: tl.tensor) -> tl.tensor:
    """Return noise for stochastic rounding: one word per pair of neighbours in the flat array, a half for each.

    The word is a multiple of a hash of two seed words and of the index of the eight neighbours; their four pairs use
    different multiples. `element` is the index among the eight, or congruent to it modulo eight.
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
    """Return magnitudes in units of a format, dithered if nearest rounding would lose decay; see `Format.encode`."""
    power = from_bits(float_bits(y) & 0x7F800000)
    unit = tl.maximum(power, NORMAL)
    dithered = tl.maximum(tl.fma(unit, (dither - 0.5) * 2.0**-MANTISSA, y), power)
    return tl.where(unit > (1 - decay) * 2.0 ** (MANTISSA + 1) * y, dithered, y)


@triton.jit
def round_stochastically(
    x: tl.tensor, noise: tl.tensor, element: tl.tensor, PAIRED: tl.constexpr, MAY_HAVE_NAN: tl.constexpr = True
) -> tl.tensor:
    """Return bf16 from fp32, rounded without bias; NaN and Inf stay. PAIRED: neighbours of a thread share `noise`."""
    x = float_bits(x)
    if MAY_HAVE_NAN:
        # Noise added to 0x7FFF0000 stays a NaN; added to the hardware's own NaN, 0x7FFFFFFF, it overflows.
        x = tl.minimum(x, 0x7FFF0000)
    if PAIRED:
        rounded = add_noise_to_pairs(x, noise)
    else:
        noise = tl.where((element & 1) == 0, noise & 0xFFFF, noise >> 16).to(tl.int32, bitcast=True)
        rounded = from_bits((x + noise) & -0x10000).to(tl.bfloat16)
    return rounded
