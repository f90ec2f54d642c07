"""Device code of master weights by parts, in Triton: bf16 and a remainder of 8 or 16 bits, joined and split.

With a master's bits, the sign aside, as an integer P, high = (P + 2^(BITS - 1)) >> BITS, and the remainder is what is
left of P: the high part is the bf16 next to the master, ties away from zero. Beside one of zero the remainder has the
sign.
"""

import triton
import triton.language as tl

from pallas_kernels.quantization import codec_triton as codec


@triton.jit
def join_master(block_m: tl.tensor, remainder: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """The fp32 value of a bf16 high part and its remainder."""
    word = block_m.to(tl.int16, bitcast=True).to(tl.int32)
    magnitude = ((word & 0x7FFF) << BITS) + remainder.to(tl.int32)
    sign = ((word & 0x8000) << 16) ^ (magnitude & -0x80000000)
    return codec.from_bits((tl.abs(magnitude) << (16 - BITS)) | sign)


@triton.jit
def split_master(x: tl.tensor, BITS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The bf16 high part of fp32 and its remainder, int32; with 8 bits the master is rounded, ties to even."""
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
