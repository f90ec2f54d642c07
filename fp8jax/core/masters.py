"""Master weights in two parts: the 16-bit parameter of the forward pass, and a remainder of 8 or 16 more bits.

A master is a float with the exponent of its high part's format and 8 or 16 more mantissa bits. With bf16 and int16 it
is fp32 itself. Let P be its bits as an integer without the sign, and R the bits of the remainder:

    high = (P + 2^(R - 1)) >> R,    remainder = P - (high << R)

The high part is the 16-bit float nearest to the master; ties go to the larger magnitude. The remainder lies in [-2^(R -
1), 2^(R - 1)). Each master has exactly one such pair, even if the high part carries into the next binade or overflows.
Ties to even would break that: an even high part would own 2^R + 1 masters. If the high part is zero, the remainder
carries the sign, because sums of parameters and changes have no negative zero.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import formats

HIGH_FORMATS, REMAINDER_DTYPES = ("bf16", "fp16"), ("int8", "int16")
NAMES = ("fp32", "bf16", "bf16+stochastic", *(f"{high}+{low}" for high in HIGH_FORMATS for low in REMAINDER_DTYPES))
# Mantissa bits of fp16 and fp32, and the difference of their exponent biases.
_FP16_MANTISSA, _FP32_MANTISSA, _BIAS = 10, 23, 127 - 15


@dataclasses.dataclass(frozen=True)
class Master:
    """Storage of the master weights that the optimizer updates.

    Attributes:
        name: "fp32"; "bf16", rounded to nearest; "bf16+stochastic", rounded by noise; or a high part and a remainder:
            "bf16+int8", "bf16+int16", "fp16+int8", "fp16+int16".

    Raises:
        ValueError: there is no such name.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"unknown master {self.name!r}; use one of {', '.join(NAMES)}")

    @property
    def param_format(self) -> formats.Format:
        """The format of the parameters."""
        return formats.get(self.name.partition("+")[0])

    @property
    def remainder(self) -> np.dtype | None:
        """The dtype of remainders; None if there are none."""
        remainder_name = self.name.partition("+")[2]
        return np.dtype(remainder_name) if remainder_name in REMAINDER_DTYPES else None

    @property
    def is_stochastic(self) -> bool:
        """Whether new parameters are rounded stochastically."""
        return self.name.endswith("+stochastic")

    @property
    def bytes_per_element(self) -> float:
        """Bytes per parameter, both parts together."""
        remainder = self.remainder
        return self.param_format.bytes_per_element + (0 if remainder is None else remainder.itemsize)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MasterWeight:
    """A master weight in two parts.

    Attributes:
        high: bf16 or fp16, any shape: the parameter.
        remainder: int8 or int16, of the same shape.
    """

    high: Array
    remainder: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.high.shape

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the parameter."""
        return self.high.dtype

    def astype(self, dtype: DTypeLike) -> Array:
        """The master's value in `dtype`."""
        return join(self.high, self.remainder).astype(dtype)


def split(x: Array, high_dtype: DTypeLike, remainder_dtype: DTypeLike) -> MasterWeight:
    """An fp32 value in two parts, rounded to nearest, ties to even, if the master has fewer bits than fp32.

    bf16 and int16 hold fp32 exactly. fp16 and int16 do from 2^-17 on, and below with an error of at most 2^-41. A
    master of fp16 is Inf above 65,536. The remainder of Inf and NaN is zero.

    Args:
        x: fp32, any shape.
        high_dtype: bf16 or fp16.
        remainder_dtype: int8 or int16.
    """
    remainder_bits = 8 * jnp.dtype(remainder_dtype).itemsize
    bits = formats.bitcast(x, jnp.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    master_bits = (
        _shift_right_to_even(magnitude, 16 - remainder_bits)
        if jnp.dtype(high_dtype) == jnp.bfloat16
        else _fp32_to_extended_fp16(x, magnitude, remainder_bits)
    )
    # A NaN could carry into the sign bit.
    nan = np.uint32(0x7FC0 if jnp.dtype(high_dtype) == jnp.bfloat16 else 0x7E00)
    master_bits = jnp.where(jnp.isnan(x), nan << np.uint32(remainder_bits), master_bits)
    half = 1 << (remainder_bits - 1)
    high_bits = (master_bits + np.uint32(half)) >> np.uint32(remainder_bits)
    sign, is_high_zero = (bits >> 16) & np.uint32(0x8000), (high_bits == 0) & (master_bits > 0)
    codes = (high_bits | jnp.where(is_high_zero, np.uint32(0), sign)).astype(jnp.uint16)
    # XLA may recompute x for the remainder with another last bit. The barrier ties the remainder to this high part.
    codes = lax.optimization_barrier(codes)
    high_bits = codes.astype(jnp.uint32) & np.uint32(0x7FFF)
    remainder_value = formats.bitcast(master_bits - (high_bits << np.uint32(remainder_bits)), jnp.int32)
    remainder_value = jnp.where((high_bits == 0) & (sign > 0), -remainder_value, remainder_value)
    remainder_value = jnp.clip(remainder_value, -half, half - 1).astype(remainder_dtype)
    return MasterWeight(formats.bitcast(codes, jnp.dtype(high_dtype)), remainder_value)


def join(high: Array, remainder: Array) -> Array:
    """The fp32 value of a master weight.

    Exact for the results of `split`. If the high part was changed since, for example to zero, its old remainder adds an
    error of at most half its last place.

    Args:
        high: bf16 or fp16, any shape.
        remainder: int8 or int16, of that shape.
    """
    remainder_bits = 8 * remainder.dtype.itemsize
    bits = formats.bitcast(high, jnp.uint16).astype(jnp.uint32)
    high_bits = formats.bitcast((bits & np.uint32(0x7FFF)) << np.uint32(remainder_bits), jnp.int32)
    master_bits = high_bits + remainder.astype(jnp.int32)
    sign_flip = formats.bitcast(master_bits, jnp.uint32) & np.uint32(0x80000000)
    master_bits = formats.bitcast(jnp.abs(master_bits), jnp.uint32)
    magnitude = (
        master_bits << np.uint32(16 - remainder_bits)
        if high.dtype == jnp.bfloat16
        else _extended_fp16_to_fp32(master_bits, remainder_bits)
    )
    sign = (bits & np.uint32(0x8000)) << np.uint32(16)
    return formats.bitcast(magnitude | (sign ^ sign_flip), jnp.float32)


def _shift_right_to_even(magnitude: Array, drop: int) -> Array:
    """The bits of a magnitude without the last `drop`, rounded to nearest, ties to even."""
    if drop == 0:
        return magnitude
    odd = (magnitude >> np.uint32(drop)) & np.uint32(1)
    return (magnitude + np.uint32((1 << (drop - 1)) - 1) + odd) >> np.uint32(drop)


def _fp32_to_extended_fp16(x: Array, magnitude: Array, remainder_bits: int) -> Array:
    """The bits of an fp32 magnitude in a float with fp16's exponent and `remainder_bits` more mantissa bits."""
    mantissa = _FP16_MANTISSA + remainder_bits
    rebased = magnitude - np.uint32(_BIAS << _FP32_MANTISSA)
    if mantissa > _FP32_MANTISSA:
        normal = rebased << np.uint32(mantissa - _FP32_MANTISSA)
    else:
        normal = _shift_right_to_even(rebased, _FP32_MANTISSA - mantissa)
    size = jnp.abs(x)
    fixed = jnp.round(jnp.where(size < 2.0**-14, size, 0.0) * np.float32(2.0 ** (14 + mantissa))).astype(jnp.uint32)
    infinite = np.uint32(31 << mantissa)
    return jnp.where(size < 2.0**-14, fixed, jnp.where(size < 65536.0, normal, infinite))


def _extended_fp16_to_fp32(master_bits: Array, remainder_bits: int) -> Array:
    """The inverse of `_fp32_to_extended_fp16`."""
    mantissa = _FP16_MANTISSA + remainder_bits
    drop = mantissa - _FP32_MANTISSA
    shifted = master_bits >> np.uint32(drop) if drop > 0 else master_bits << np.uint32(-drop)
    fixed = master_bits.astype(jnp.float32) * np.float32(2.0 ** -(14 + mantissa))
    normal = shifted + np.uint32(_BIAS << _FP32_MANTISSA)
    infinite = shifted + np.uint32((255 - 31) << _FP32_MANTISSA)
    below = formats.bitcast(fixed, jnp.uint32)
    return jnp.where(
        master_bits < np.uint32(1 << mantissa),
        below,
        jnp.where(master_bits < np.uint32(31 << mantissa), normal, infinite),
    )
