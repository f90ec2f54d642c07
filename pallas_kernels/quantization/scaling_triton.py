"""Device code of quantization: scales and codes, bit for bit those of `fp8jax.core`.

A tile is [rows, columns]. Magnitudes are compared as integers. Inf and NaN order below finite values: they enter no
scale.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from pallas_kernels.quantization import codec_triton as codec
from pallas_kernels.quantization.codec_triton import float_bits, from_bits

FORMATS = (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8)
_MAX_INTEGER = {"int8": 127.0, "int10": 511.0}

TINY = tl.constexpr(float(np.finfo(np.float32).tiny))
_TINY_BITS = tl.constexpr(0x00800000)
_MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
_SIGN_BIT = tl.constexpr(-0x80000000)
_INF_BITS = tl.constexpr(0x7F800000)
_ROUND_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)  # added to a small number: its integer in the lowest bits


@dataclasses.dataclass(frozen=True)
class Coding:
    """How codes are computed along the rows of a matrix; static.

    Attributes:
        kind: granularity of the scales. "tensor" or "token" (per row): given scales. "group" of `size` along a row or
            "block" of `size` by `size`: computed. "mx": a computed power of two per `size` of a row, under a given
            scale.
        dtype: float8_e4m3fn, float8_e5m2, or int8 from -127 to 127. With int8, NaN or Inf turns its scale into NaN. For
            residuals also int16: ten bits from -511 to 511, packed four in five bytes.
        size: 16, 32, 64 or 128; 0 for "tensor" and "token".
        uses_ocp_rule: for "mx", powers of two by OCP Microscaling Formats 1.0 (section 6.3), not rounded up.
        scale_dtype: float32 or bfloat16, of computed scales.
        is_stochastic: whether rounding is stochastic and unbiased; otherwise to nearest even.
    """

    kind: Literal["tensor", "token", "group", "block", "mx"]
    dtype: Any = jnp.float8_e4m3fn
    size: int = 0
    uses_ocp_rule: bool = False
    scale_dtype: Any = jnp.float32
    is_stochastic: bool = False

    @property
    def is_packed(self) -> bool:
        return jnp.dtype(self.dtype) == jnp.int16

    @property
    def format(self) -> str:
        return "int10" if self.is_packed else jnp.dtype(self.dtype).name

    @property
    def constants(self) -> "CodingConstants":
        largest_code = _MAX_INTEGER.get(self.format) or float(jnp.finfo(self.dtype).max)
        return CodingConstants(
            self.kind,
            self.size,
            inverse_max=float(np.float32(1 / largest_code)),
            log2_max=int(np.log2(largest_code)),
            format=self.format,
            uses_ocp_rule=self.uses_ocp_rule,
            is_stochastic=self.is_stochastic,
            is_integer=self.format in _MAX_INTEGER,
        )


class CodingConstants(NamedTuple):
    """A `Coding` as a compile-time constant; also "none" for no codes, and "same" for transposed codes of the rows.

    Device code of Triton 3.9 supports fields of a constant, but no properties.
    """

    kind: str
    size: int
    inverse_max: float
    log2_max: int
    format: str
    uses_ocp_rule: bool
    is_stochastic: bool
    has_row_scales: bool = False  # whether each row has a scale, which the caller passes
    writes_codes: bool = True
    has_transposed_scales: bool = False  # whether scales are stored transposed
    is_integer: bool = False
    has_amax: bool = False  # whether the caller passes the tensor's amax instead of the scale
    rounds_amax_up: bool = False  # whether that amax is rounded up to bf16


NO_CODING = CodingConstants("none", 0, 0.0, 0, "float8_e4m3fn", False, False)
INTEGER_CODING = NO_CODING._replace(format="int8", is_integer=True)
# A result without codes, in the dtype of its destination.
ARRAY_CODING = NO_CODING._replace(kind="array")


@triton.jit
def reversed_program_id() -> tl.tensor:
    """Return the index of this program in reversed order.

    The L2 cache still has the end of an array that was just written or read. Kernels that read it next start there.
    """
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def load_raw(pointer: tl.tensor, offsets: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    return tl.load(pointer + offsets, mask=mask, other=0) if MASKED else tl.load(pointer + offsets)


@triton.jit
def load(pointer: tl.tensor, offsets: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    """Load fp32 values."""
    return load_raw(pointer, offsets, mask, MASKED).to(tl.float32)


@triton.jit
def magnitude_key(x: tl.tensor, CODING: tl.constexpr) -> tl.tensor:
    """Return ordered integer keys of magnitudes: finite values above Inf and NaN; for integer codings, below them."""
    if x.dtype == tl.bfloat16:
        magnitude = magnitude_key_bf16x2(x, 0 if CODING.is_integer else _TINY_BITS | (_TINY_BITS >> 16))
    else:
        magnitude = (float_bits(x.to(tl.float32)) & _MAGNITUDE_MASK) + (0 if CODING.is_integer else _TINY_BITS)
    return magnitude


@triton.jit
def magnitude_key_bf16x2(x: tl.tensor, bias: tl.constexpr) -> tl.tensor:
    """Return `magnitude_key` of bf16, two at a time; `bias` has both halves."""
    return tl.inline_asm_elementwise(
        """{.reg .b32 pair;
        and.b32 pair, $2, 0x7fff7fff;
        add.s32 pair, pair, $4;
        shl.b32 $0, pair, 16;
        and.b32 $1, pair, 0xffff0000;}""",
        "=r,=r,r,r,r", [x, bias], tl.int32, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def max_along_rows(x: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return the maximum of each SIZE columns."""
    return tl.max(tl.reshape(x, (x.shape[0], x.shape[1] // SIZE, SIZE)), 2)


@triton.jit
def max_along_columns(x: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return the maximum of each SIZE rows."""
    return tl.max(tl.reshape(x, (x.shape[0] // SIZE, SIZE, x.shape[1])), 1)


@triton.jit
def slice_amax_keys(
    x: tl.tensor, running_key: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the `magnitude_key` maxima of groups in the rows of a slice, and the updated `running_key`, if needed."""
    row_keys = running_key
    if ROWS.kind == "group" or ROWS.kind == "mx":
        row_keys = max_along_rows(magnitude_key(x, ROWS), ROWS.size)
    if ROWS.kind == "block":
        running_key = tl.maximum(running_key, magnitude_key(x, ROWS))
    elif COLUMNS.kind == "group" or COLUMNS.kind == "mx":
        running_key = tl.maximum(running_key, magnitude_key(x, COLUMNS))
    return row_keys, running_key


@triton.jit
def repeat_columns(x: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    repeated = tl.broadcast_to(x[:, :, None], (x.shape[0], x.shape[1], SIZE))
    return tl.reshape(repeated, (x.shape[0], x.shape[1] * SIZE))


@triton.jit
def repeat_rows(x: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    repeated = tl.broadcast_to(x[:, None, :], (x.shape[0], SIZE, x.shape[1]))
    return tl.reshape(repeated, (x.shape[0] * SIZE, x.shape[1]))


@triton.jit
def magnitude_from_key(key: tl.tensor, CODING: tl.constexpr) -> tl.tensor:
    """Return the magnitude of a `magnitude_key`; 0 if no value was finite and non-zero."""
    magnitude = key
    if CODING.is_integer:
        magnitude = tl.where(magnitude >= _INF_BITS, _INF_BITS + 1, magnitude)
    else:
        magnitude = tl.maximum(magnitude, _TINY_BITS) - _TINY_BITS
    return from_bits(tl.where(magnitude < _TINY_BITS, 0, magnitude))


@triton.jit
def scale_from_key(key: tl.tensor, CODING: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    amax = magnitude_from_key(key, CODING)
    scale = tl.where(amax > 0, tl.maximum(amax * CODING.inverse_max, TINY), 1.0)
    if CODING.is_integer and dtype == tl.bfloat16:
        # Round up: with a scale that was rounded down, the largest code would saturate.
        scale = from_bits((float_bits(scale) + 0xFFFF) & -0x10000)
    return tl.where(amax == amax, scale, amax).to(dtype)


@triton.jit
def scale_from_amax(amax_ptr: tl.tensor, CODING: tl.constexpr) -> tl.tensor:
    """Return the fp32 scale of a tensor from its largest finite magnitude."""
    amax_bits = float_bits(tl.load(amax_ptr))
    if CODING.rounds_amax_up:
        amax_bits = (amax_bits + 0xFFFF) & -0x10000
    amax = from_bits(amax_bits)
    return tl.where(amax > 0, tl.maximum(amax * CODING.inverse_max, TINY), 1.0)


@triton.jit
def reciprocal(scale: tl.tensor) -> tl.tensor:
    """Return 1 / scale of normal numbers, rounded to nearest: the hardware's approximation and one Newton step."""
    scale = scale.to(tl.float32)
    estimate = codec.reciprocal_approx(scale)
    return tl.fma(estimate, tl.fma(-scale, estimate, 1.0), estimate)


@triton.jit
def e8m0_exponent(key: tl.tensor, inverse: tl.tensor, CODING: tl.constexpr) -> tl.tensor:
    """Return E8M0 bytes, as int32, of groups of values times the inverse of their outer scale."""
    amax = magnitude_from_key(key, CODING) * inverse
    amax = tl.where(amax < TINY, 0.0, amax)
    if CODING.uses_ocp_rule:
        byte = tl.where(amax > 0, tl.maximum((float_bits(amax) >> 23) - CODING.log2_max, 0), 127)
    else:
        byte = tl.minimum(tl.maximum((float_bits(amax * CODING.inverse_max) + 0x7FFFFF) >> 23, 1), 254)
    return byte


@triton.jit
def inverse_of_exponent(byte: tl.tensor) -> tl.tensor:
    """Return 2^(127 - byte)."""
    return from_bits((254 - byte) << 23)


@triton.jit
def apply_inverse_scale(
    x: tl.tensor, inverse: tl.tensor, CODING: tl.constexpr, FINITE: tl.constexpr = False
) -> tl.tensor:
    """Return x times the inverse scale, with subnormals flushed to zero; Inf becomes NaN in formats without Inf."""
    if FINITE:
        addend = from_bits(tl.full([], _SIGN_BIT, tl.int32))
    elif CODING.format == "float8_e5m2":
        addend = from_bits(float_bits(x) & _SIGN_BIT)
    else:
        addend = x * 0.0
    return codec.multiply_add(x, inverse, addend)


@triton.jit
def apply_inverse_power(x: tl.tensor, power: tl.tensor, CODING: tl.constexpr) -> tl.tensor:
    """Return x times the inverse of its group's power of two, with subnormals flushed to zero; Inf stays.

    It precedes the division by the outer scale: that quotient alone may be subnormal, and would be flushed.
    """
    return apply_inverse_scale(x, power, CODING, True)


@triton.jit
def hash_bits(number: tl.tensor, word1: tl.tensor, word2: tl.tensor) -> tl.tensor:
    """Return 32 random bits per number."""
    hash_ = number * 0x9E3779B9 + word1
    hash_ = (hash_ ^ (hash_ >> 16)) * 0x7FEB352D
    hash_ = (hash_ ^ (hash_ >> 15) ^ word2) * 0x846CA68B
    return hash_ ^ (hash_ >> 16)


@triton.jit
def rotate_noise(random: tl.tensor, ELEMENT: tl.constexpr) -> tl.tensor:
    """Return the random bits of one of four elements that share them, rotated so that their high bits differ."""
    rotated = random
    if ELEMENT > 0:
        rotated = (random >> (8 * ELEMENT)) | (random << (32 - 8 * ELEMENT))
    return rotated


@triton.jit
def encode(
    x: tl.tensor, y: tl.tensor, noise: tl.tensor, CODING: tl.constexpr, FINITE: tl.constexpr = False
) -> tl.tensor:  # fmt: skip
    """Return uint8 codes of values x; y is x after `apply_inverse_scale`.

    With a given scale, y may be infinite and saturates although x is finite. With a computed scale, y can replace x.

    Stochastic rounding adds noise to the truncated bits. Below the smallest normal number, that number is added first:
    all values then have its exponent, and therefore the spacing of subnormals.
    """
    if CODING.format == "int8":
        value = tl.minimum(tl.maximum(y, -127.0), 127.0)
        if CODING.is_stochastic:
            fraction = from_bits(((noise >> 9) | 0x3F800000).to(tl.int32, bitcast=True)) - 1.0
            # Round the sum down: it has more bits than fp32, and rounding to nearest would be biased.
            value = tl.floor(
                tl.inline_asm_elementwise(
                    "add.rm.f32 $0, $1, $2;", "=f,f,f", [value, fraction], tl.float32, is_pure=True, pack=1
                )
            )
        codes = tl.where(y == y, float_bits(value + _ROUND_TO_INTEGER), 0).to(tl.uint8)
    else:
        value = y
        if CODING.is_stochastic:
            DROPPED_BITS: tl.constexpr = 21 if CODING.format == "float8_e5m2" else 20
            MIN_NORMAL: tl.constexpr = 2.0**-14 if CODING.format == "float8_e5m2" else 2.0**-6
            shift = tl.where(tl.abs(y) < MIN_NORMAL, MIN_NORMAL, 0.0)
            shifted = tl.minimum(float_bits(tl.abs(y) + shift), 0x7FE00000)  # noise added to this bound stays NaN
            truncated = (shifted + (noise & ((1 << DROPPED_BITS) - 1)).to(tl.int32, bitcast=True)) & (
                -(1 << DROPPED_BITS)
            )
            value = from_bits(float_bits(from_bits(truncated) - shift) | (float_bits(y) & _SIGN_BIT))
        if CODING.format == "float8_e5m2" and FINITE:
            codes = value.to(tl.float8e5).to(tl.uint8, bitcast=True)
        elif CODING.format == "float8_e5m2":
            # The conversion saturates Inf to 0x7B; it must be 0x7C. The same holds for NaN from Inf times an inverse
            # flushed to 0.
            infinite = tl.where(
                tl.abs(y if ((CODING.kind == "group" or CODING.kind == "mx") or CODING.kind == "block") else x)
                == float("inf"),
                7,
                0,
            ).to(tl.uint8)
            codes = (value.to(tl.float8e5).to(tl.uint8, bitcast=True) | infinite) ^ (infinite & 3)
        else:
            codes = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return codes


@triton.jit
def store(
    pointer: tl.tensor, offsets: tl.tensor, value: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr
) -> None:  # fmt: skip
    if MASKED:
        tl.store(pointer + offsets, value, mask=mask)
    else:
        tl.store(pointer + offsets, value)


@triton.jit
def scale_rows(
    x: tl.tensor, keys: tl.tensor, m: tl.tensor, left: tl.tensor, inverse_scale: tl.tensor, scale_ptr: tl.tensor,
    scales_ptr: tl.tensor, powers_ptr: tl.tensor, M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
    CODING: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return a slice, from column `left` on, over its scales; those computed from `keys` are stored."""
    SIZE: tl.constexpr = CODING.size
    if CODING.kind == "group" or CODING.kind == "mx":
        g = left // SIZE + tl.arange(0, x.shape[1] // SIZE)
        GROUPS: tl.constexpr = (N + SIZE - 1) // SIZE
        offsets = m.to(tl.int64)[:, None] * GROUPS + g[None, :]
        if CODING.has_transposed_scales:
            offsets = m[:, None] + g.to(tl.int64)[None, :] * M
        mask = tile_mask(m, g, M, GROUPS)
    if CODING.kind == "group":
        scale = scale_from_key(keys, CODING, scales_ptr.dtype.element_ty)
        store(scales_ptr, offsets, scale, mask, MASKED)
        factor = repeat_columns(reciprocal(scale), SIZE)
    elif CODING.has_row_scales:
        factor = reciprocal(tl.load(scale_ptr + m, mask=m < M, other=1.0))[:, None]
    else:
        factor = inverse_scale
    if CODING.kind == "mx":
        byte = e8m0_exponent(keys, factor, CODING)
        store(powers_ptr, offsets, byte.to(tl.uint8), mask, MASKED)
        x = apply_inverse_power(x, repeat_columns(inverse_of_exponent(byte), SIZE), CODING)
    return apply_inverse_scale(x, factor, CODING)


@triton.jit
def tile_mask(m: tl.tensor, n: tl.tensor, M: tl.constexpr, N: tl.constexpr) -> tl.tensor:
    return (m < M)[:, None] & (n < N)[None, :]
