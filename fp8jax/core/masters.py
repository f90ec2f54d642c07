"""Master weights by parts: what the forward pass computes with in 16 bits, and a remainder of 8 or 16 more.

A master is a float with the exponent of its high part's format and 8 or 16 more mantissa bits: of bf16 and int16, fp32
itself. With its bits as an integer P (sign aside) and R bits of remainder,

    high = (P + 2^(R - 1)) >> R,    remainder = P - (high << R),

so the high part is the float of 16 bits next to the master, of two as near the one of larger magnitude, and the
remainder lies in [-2^(R - 1), 2^(R - 1)). Each master has one such pair, also where the high part carries into the next
binade or overflows. Ties to even would not have: an even high part would own 2^R + 1 masters. Where the high part is
zero the remainder has the sign, since sums of parameters and changes have no negative zero.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import formats

HIGH, REMAINDERS = ("bf16", "fp16"), ("int8", "int16")
NAMES = ("fp32", "bf16", "bf16+stochastic", *(f"{high}+{rest}" for high in HIGH for rest in REMAINDERS))
# Of fp16 and fp32: mantissa bits, and the difference of the biases of their exponents.
_FP16_MANTISSA, _FP32_MANTISSA, _BIAS = 10, 23, 127 - 15


@dataclasses.dataclass(frozen=True)
class Master:
    """How master weights are stored that the optimizer updates.

    Attributes:
        name: "fp32"; "bf16", rounded to nearest; "bf16+stochastic", up or down by noise; or "bf16+int8", "bf16+int16",
            "fp16+int8", "fp16+int16", a high part and a remainder.

    Raises:
        ValueError: there is no such name.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"unknown master {self.name!r}; it is one of {', '.join(NAMES)}")

    @property
    def held(self) -> formats.Format:
        """The format of the parameters themselves."""
        return formats.get(self.name.partition("+")[0])

    @property
    def remainder(self) -> np.dtype | None:
        """The dtype of remainders; None where there are none."""
        rest = self.name.partition("+")[2]
        return np.dtype(rest) if rest in REMAINDERS else None

    @property
    def stochastic(self) -> bool:
        """Whether new parameters are rounded stochastically."""
        return self.name.endswith("+stochastic")

    @property
    def bytes_per_element(self) -> float:
        """Bytes a parameter, both parts together."""
        rest = self.remainder
        return self.held.bytes_per_element + (0 if rest is None else rest.itemsize)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MasterWeight:
    """A master weight by parts.

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
        return self.high.dtype  # type: ignore[no-any-return]

    def astype(self, dtype: DTypeLike) -> Array:
        """The master's value."""
        return join(self.high, self.remainder).astype(dtype)


def split(x: Array, high: DTypeLike, remainder: DTypeLike) -> MasterWeight:
    """A value by parts, rounded to nearest, ties to even, where the master has fewer bits than fp32.

    fp32 is exact in bf16 and int16; in fp16 and int16 from 2^-17 on, and below that to 2^-41. Above 65,536 a master of
    fp16 is Inf. The remainder of Inf and NaN is zero.

    Args:
        x: fp32, any shape.
        high: bf16 or fp16.
        remainder: int8 or int16.
    """
    rest = 8 * jnp.dtype(remainder).itemsize
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    place = _shifted(magnitude, 16 - rest) if jnp.dtype(high) == jnp.bfloat16 else _of_fp16(x, magnitude, rest)
    # NaN could carry into the sign, and its remainder would say nothing.
    place = jnp.where(jnp.isnan(x), _nan(high) << np.uint32(rest), place)
    half = 1 << (rest - 1)
    top = (place + np.uint32(half)) >> np.uint32(rest)
    sign, small = (bits >> 16) & np.uint32(0x8000), (top == 0) & (place > 0)
    codes = (top | jnp.where(small, np.uint32(0), sign)).astype(jnp.uint16)
    # XLA may compute x again for the remainder, and otherwise in its last bit: it is of the high part that there is.
    codes = lax.optimization_barrier(codes)
    top = codes.astype(jnp.uint32) & np.uint32(0x7FFF)
    left = lax.bitcast_convert_type(place - (top << np.uint32(rest)), jnp.int32)
    left = jnp.where((top == 0) & (sign > 0), -left, left)
    left = jnp.clip(left, -half, half - 1).astype(remainder)
    return MasterWeight(lax.bitcast_convert_type(codes, jnp.dtype(high)), left)


def join(high: Array, remainder: Array) -> Array:
    """The fp32 value of a master weight.

    Exact for what `split` makes. A high part that somebody has changed since, to zero say, keeps its remainder, and is
    off by at most half its own last place.

    Args:
        high: bf16 or fp16, any shape.
        remainder: int8 or int16, of that shape.
    """
    rest = 8 * remainder.dtype.itemsize
    bits = lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32)
    top = lax.bitcast_convert_type((bits & np.uint32(0x7FFF)) << np.uint32(rest), jnp.int32)
    place = top + remainder.astype(jnp.int32)
    other = lax.bitcast_convert_type(place, jnp.uint32) & np.uint32(0x80000000)
    place = lax.bitcast_convert_type(jnp.abs(place), jnp.uint32)
    magnitude = place << np.uint32(16 - rest) if high.dtype == jnp.bfloat16 else _to_fp32(place, rest)
    sign = (bits & np.uint32(0x8000)) << np.uint32(16)
    return lax.bitcast_convert_type(magnitude | (sign ^ other), jnp.float32)


def _nan(dtype: DTypeLike) -> np.uint32:
    return np.uint32(0x7FC0 if jnp.dtype(dtype) == jnp.bfloat16 else 0x7E00)


def _shifted(magnitude: Array, drop: int) -> Array:
    """A magnitude's bits without the last ones, to nearest, ties to even."""
    if drop == 0:
        return magnitude
    odd = (magnitude >> np.uint32(drop)) & np.uint32(1)
    return (magnitude + np.uint32((1 << (drop - 1)) - 1) + odd) >> np.uint32(drop)


def _of_fp16(x: Array, magnitude: Array, rest: int) -> Array:
    """A magnitude's bits as of a float with fp16's exponent and `rest` more mantissa bits."""
    mantissa = _FP16_MANTISSA + rest
    rebased = magnitude - np.uint32(_BIAS << _FP32_MANTISSA)
    if mantissa > _FP32_MANTISSA:
        normal = rebased << np.uint32(mantissa - _FP32_MANTISSA)
    else:
        normal = _shifted(rebased, _FP32_MANTISSA - mantissa)
    size = jnp.abs(x)
    fixed = jnp.round(jnp.where(size < 2.0**-14, size, 0.0) * np.float32(2.0 ** (14 + mantissa))).astype(jnp.uint32)
    infinite = np.uint32(31 << mantissa)
    return jnp.where(size < 2.0**-14, fixed, jnp.where(size < 65536.0, normal, infinite))


def _to_fp32(place: Array, rest: int) -> Array:
    """Bits of the fp32 that such bits stand for."""
    mantissa = _FP16_MANTISSA + rest
    drop = mantissa - _FP32_MANTISSA
    shifted = place >> np.uint32(drop) if drop > 0 else place << np.uint32(-drop)
    fixed = place.astype(jnp.float32) * np.float32(2.0 ** -(14 + mantissa))
    normal = shifted + np.uint32(_BIAS << _FP32_MANTISSA)
    infinite = shifted + np.uint32((255 - 31) << _FP32_MANTISSA)
    below = lax.bitcast_convert_type(fixed, jnp.uint32)
    return jnp.where(
        place < np.uint32(1 << mantissa), below, jnp.where(place < np.uint32(31 << mantissa), normal, infinite)
    )
