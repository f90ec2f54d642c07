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
    """

    max: float
    expansion: tuple[float, float, float] | None = None
    smallest: float | None = None
    signed: bool = True

    @property
    def static(self) -> "Static":
        ratio, lowest, highest = self.expansion or (2.0, 1.0, 1.0)
        expanded, smallest = self.expansion is not None, self.smallest or 0.0
        return Static(
            True, expanded, self.signed, self.max, math.log2(self.max), math.log2(ratio), lowest, highest, smallest
        )


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


PLAIN = Static(False, False, True, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0)


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
def root(x: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


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
def prefetch(pointer: tl.tensor, SIZE: tl.constexpr) -> None:
    """Has SIZE elements from `pointer` on brought into the second-level cache; SIZE fills cache lines."""
    LINES: tl.constexpr = SIZE * pointer.dtype.element_ty.primitive_bitwidth // 1024
    lines = pointer.to(tl.int64) + tl.arange(0, LINES) * 128
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def per_group(x: tl.tensor) -> tl.tensor:
    return x[:, None, None]


@triton.jit
def decode(codes: tl.tensor, scale: tl.tensor, exponent: tl.tensor, factor: tl.tensor, HOW: tl.constexpr) -> tl.tensor:
    """What codes stand for, times a scalar factor; or plain floats, times the factor."""
    values = codes.to(tl.float32)
    if HOW[1]:
        inverse = reciprocal(exponent.to(tl.float32))
        offset = tl.fma(inverse, -HOW[4], log2_abs(scale * HOW[3] * factor))
        decoded = exp2(tl.fma(log2_abs(values), per_group(inverse), per_group(offset)))
        if HOW[2]:
            decoded = from_bits(bits(decoded) | (bits(values) & _SIGN))
    elif HOW[0]:
        decoded = values * per_group(scale * factor)
    else:
        decoded = values * factor
    return decoded


@triton.jit
def extremes(x: tl.tensor, SIGNED: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Of each group the bits of the largest finite magnitude, and those of the smallest non-zero one, less one.

    Less one, zero is the largest unsigned integer. A group of zeros gets 0 and that.
    """
    magnitude = bits(x) & _MAGNITUDE if SIGNED else bits(x)
    largest = tl.max(tl.max(magnitude + _FINITE_TO_TOP, axis=1), axis=1)
    smallest = (magnitude - 1).to(tl.uint32, bitcast=True)
    smallest = tl.min(tl.min(smallest, axis=1), axis=1)
    return tl.maximum(largest, _FINITE_TO_TOP) - _FINITE_TO_TOP, smallest


@triton.jit
def encode(x: tl.tensor, CODE: tl.constexpr, HOW: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Codes of the values of a tile, and scale and exponent of each group; unexpanded, the exponents are no matter."""
    largest_bits, smallest = extremes(x, HOW[2])
    largest = from_bits(largest_bits)
    scale = tl.where(largest_bits > 0, tl.maximum(largest * (1 / HOW[3]), _TINY), 1.0)
    if HOW[1]:
        top = tl.maximum(largest, _TINY * HOW[3])
        spans = (bits(top) - 1).to(tl.uint32, bitcast=True) > smallest
        log2_top = log2_abs(scale * HOW[3])
        octaves = log2_top - log2_abs(from_bits((smallest + 1).to(tl.int32, bitcast=True)))
        k = tl.minimum(tl.maximum(HOW[5] * reciprocal(octaves), HOW[6]), HOW[7])
        exponent = tl.where(spans, k, 1.0).to(tl.bfloat16)
        k = exponent.to(tl.float32)
        y = exp2(tl.fma(log2_abs(x), per_group(k), per_group(tl.fma(-k, log2_top, HOW[4]))))
    else:
        exponent = scale.to(tl.bfloat16)
        y = tl.abs(x) * per_group(tl.div_rn(1.0, scale))
        if HOW[8] > 0:
            y = tl.where((x != 0) & (y < HOW[8]), HOW[8], y)
    # The conversion saturates Inf to the largest value; the lowest bit makes it NaN, and is nothing to a finite value.
    y_bits = bits(y) | 1
    if HOW[2]:
        y_bits = y_bits | (bits(x) & _SIGN)
    codes = from_bits(y_bits).to(CODE)
    if tl.float8e5 == CODE:
        infinity = tl.where(x > 0, 0x7C, -4).to(tl.int8).to(CODE, bitcast=True)
        codes = tl.where(tl.abs(x) == float("inf"), infinity, codes)
    return codes, scale, exponent


@triton.jit
def round_stochastically(
    x: tl.tensor, base: tl.tensor, offsets: tl.tensor, word1: tl.tensor, word2: tl.tensor
) -> tl.tensor:
    """bf16 from fp32, up or down with probabilities that make the expectation exact; NaN and Inf stay.

    Noise is half of a hash of the number of the element's pair, base + offsets over two, and of two words. `base` is
    even.
    """
    noise = ((base >> 1).to(tl.uint32) + (offsets >> 1).to(tl.uint32)) * 0x9E3779B9 + word1
    noise = (noise ^ (noise >> 16)) * 0x7FEB352D
    noise = (noise ^ (noise >> 15) ^ word2) * 0x846CA68B
    noise = noise ^ (noise >> 16)
    noise = tl.where((offsets & 1) == 0, noise & 0xFFFF, noise >> 16).to(tl.int32, bitcast=True)
    # The bound is a NaN to which noise can be added; the hardware's own is 0x7FFFFFFF.
    rounded = tl.minimum(bits(x), 0x7FFF0000) + noise
    return from_bits(rounded & -0x10000).to(tl.bfloat16)
