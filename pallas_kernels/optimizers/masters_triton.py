"""Device code of master weights in two parts: bf16 and a remainder of 8 or 16 bits.

Reference: `join` and `split` in fp8jax/core/masters.py. Let P be the master's bits without sign, as an integer. Then
high = (P + 2^(BITS - 1)) >> BITS: the nearest bf16, ties away from zero. The remainder is P - (high << BITS). If high
is zero, the remainder has the sign.
"""

import triton
import triton.language as tl

from pallas_kernels.quantization import codec_triton as codec


@triton.jit
def join_master(block_m: tl.tensor, remainder: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return the fp32 value of a bf16 high part and its remainder."""
    word = block_m.to(tl.int16, bitcast=True).to(tl.int32)
    magnitude = ((word & 0x7FFF) << BITS) + remainder.to(tl.int32)
    sign = ((word & 0x8000) << 16) ^ (magnitude & -0x80000000)
    return codec.from_bits((tl.abs(magnitude) << (16 - BITS)) | sign)


@triton.jit
def split_master(x: tl.tensor, BITS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the bf16 high part of fp32, and its remainder, int32; 8 bits round the master to nearest even."""
    word = codec.float_bits(x)
    magnitude = word & 0x7FFFFFFF
    rounded = magnitude
    if BITS == 8:
        rounded = (magnitude + 0x7F + ((magnitude >> 8) & 1)) >> 8
    rounded = tl.where(magnitude > 0x7F800000, 0x7FC0 << BITS, rounded)
    top = (rounded + (1 << (BITS - 1))) >> BITS
    remainder = rounded - (top << BITS)
    sign = (word >> 16) & 0x8000
    remainder = tl.where((top == 0) & (sign != 0), -remainder, remainder)
    code = top | tl.where((top == 0) & (rounded > 0), 0, sign)
    return code.to(tl.int16).to(tl.bfloat16, bitcast=True), remainder
