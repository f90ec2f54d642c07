"""Number formats as records. To add one, add a constant and list it in `ALL`, which tests iterate over.

Sources: OCP 8-bit Floating Point Specification 1.0 (e4m3 without infinities, e5m2 with them). OCP Microscaling Formats
1.0 (e2m1, e8m0). Dettmers et al., 8-bit Optimizers via Block-wise Quantization (the dynamic exponent code books).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from fp8jax.core import derivatives

E4M3_DTYPE, E5M2_DTYPE = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
_PACKINGS = ("four_in_five", "two_in_one")

# XLA flushes fp32 subnormals on some backends only. The quantizers treat them as zeros on all.
TINY = float(np.finfo(np.float32).tiny)


def bitcast(x: Array, dtype: DTypeLike) -> Array:
    """`jax.lax.bitcast_convert_type(x, dtype)`, also for a transposed constant.

    If a nested function reads the bits of a transposed constant, XLA (jaxlib 0.11) returns those of the constant before
    it was transposed. XLA reshapes the constant correctly, hence the additional axis.
    """
    return jax.lax.squeeze(jax.lax.bitcast_convert_type(jax.lax.expand_dims(x, [0]), dtype), [0])


def copysign(magnitude: Array, signed: Array) -> Array:
    """`jnp.copysign(magnitude, signed)`, computed on bits.

    If XLA selects between a value and its negative, a GPU returns +0 for some -0.
    """
    dtype = magnitude.dtype
    integer = jnp.dtype(f"int{8 * dtype.itemsize}")
    largest = jnp.iinfo(integer).max
    bits, signed_bits = (bitcast(x.astype(dtype), integer) for x in (magnitude, signed))
    return bitcast((bits & largest) | (signed_bits & ~largest), dtype)


def binade(x: Array) -> Array:
    """The largest power of two at or below each normal fp32 magnitude; 0 for subnormals, Inf for NaN."""
    return bitcast(bitcast(x, jnp.int32) & np.int32(0x7F800000), jnp.float32)


def where(condition: Array, x: Array, other: float) -> Array:
    """`jnp.where(condition, x, other)` for fp32 values and a number, computed on bits.

    `jnp.where` broadcasts the number to an array. In a differentiated scan JAX hoists that constant out of the loop,
    and every pass over a matrix then reads it from memory.
    """
    bits, mask = bitcast(x, jnp.int32), -condition.astype(jnp.int32)
    bits_or_other = bits & mask
    if other != 0:
        bits_or_other = bits_or_other | (~mask & np.float32(other).view(np.int32))
    return bitcast(bits_or_other, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Format:
    """A storage format of real numbers.

    Attributes:
        name: the name in specs, recipes and on the command line.
        dtype: dtype of the codes.
        bits: bits of a code. Unless it is packed, it is stored as one element of `dtype`, which may be wider.
        max: largest finite magnitude.
        smallest: smallest non-zero magnitude (a subnormal, if the format has them).
        smallest_normal: smallest magnitude with full relative precision; `smallest` for formats without that notion.
        mantissa_bits: explicitly stored bits of the significand; 0 for formats that are not floating point.
        is_signed: whether there are negative values.
        inf: the decoded value of an infinity's code: Inf, or NaN for formats without Inf. None for formats with
            neither; the block's scale then becomes NaN.
        codebook: the values of all codes in increasing order, for formats defined by a table.
        packing: "four_in_five" packs four 10-bit integers into five bytes, "two_in_one" two 4-bit codes into one
            (`fp8jax.core.packing`). None does not pack.

    Raises:
        ValueError: the packing is unknown or does not fit the codes, codes have more bits than the dtype, or XLA has no
            such dtype.
    """

    name: str
    dtype: np.dtype
    bits: int
    max: float
    smallest: float
    smallest_normal: float
    mantissa_bits: int
    is_signed: bool = True
    inf: float | None = None
    codebook: tuple[float, ...] | None = None
    packing: str | None = None

    def __post_init__(self) -> None:
        if self.packing not in (None, *_PACKINGS):
            names = ", ".join(map(repr, _PACKINGS))
            raise ValueError(f"format {self.name!r}: unknown packing {self.packing!r}; use {names} or None")
        if self.packing == "four_in_five" and (self.bits, self.is_float, self.codebook) != (10, False, None):
            raise ValueError(f"format {self.name!r}: packing 'four_in_five' requires 10-bit integers; set packing=None")
        if self.is_fp4 and (self.bits, self.mantissa_bits, self.dtype) != (4, 1, np.uint8):
            raise ValueError(f"format {self.name!r}: packing 'two_in_one' requires e2m1 codes; set packing=None")
        if self.is_float and self.bits not in (4, 8, 16, 32):
            raise ValueError(f"format {self.name!r}: XLA has no floating-point dtype with {self.bits} bits")
        if self.bits > 8 * self.dtype.itemsize:
            raise ValueError(f"format {self.name!r}: {self.bits} bits do not fit into {self.dtype}")

    @property
    def bytes_per_element(self) -> float:
        return self.bits / 8 if self.packing else float(self.dtype.itemsize)

    @property
    def needs_scale(self) -> bool:
        """Whether tensors in this format need a scale; bf16 and fp32 have fp32's range."""
        return self.max < float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)

    @property
    def is_float(self) -> bool:
        return self.mantissa_bits > 0

    @property
    def is_matmul_format(self) -> bool:
        """Whether matrix units multiply the codes directly."""
        return self.is_fp8 or (self.dtype == np.int8 and self.bits == 8)

    @property
    def is_fp8(self) -> bool:
        """Whether codes have one of the two FP8 dtypes that GPUs and our kernels support."""
        return self.dtype in (E4M3_DTYPE, E5M2_DTYPE)

    @property
    def is_fp4(self) -> bool:
        """Whether codes are e2m1, the FP4 dtype of GPUs, as bits in uint8."""
        return self.packing == "two_in_one"

    @property
    def expansion_range(self) -> float:
        """Ratio R of largest to smallest magnitude that range expansion maps a group onto (COAT, section 4.2).

        Floating-point formats use half the smallest normal, one bit into the subnormals: R is 57344 for e4m3. COAT's
        text uses the smallest subnormal (229376), which doubles the relative error of small second moments. COAT's code
        uses 100352. Other formats use the smallest value.
        """
        return self.max / (self.smallest_normal / 2 if self.is_float else self.smallest)

    @property
    def normal_range(self) -> float:
        """Ratio of largest to smallest normal magnitude, `max / smallest_normal`.

        Groups that are rounded stochastically are kept within this range.
        """
        return self.max / self.smallest_normal

    def encode(
        self, y: Array, key: Array | None = None, noise: Array | None = None, dither: Array | None = None
    ) -> Array:
        """Codes of fp32 values, saturating at `max`; NaN and Inf stay visible if the format has them.

        Args:
            y: fp32 values in units of the format (already divided by their scale), any shape.
            key: PRNG key for unbiased stochastic rounding. None rounds to nearest, ties to even (in a code book, ties
                to the smaller value).
            noise: uniform noise in [0, 1), of the shape of `y`, for stochastic rounding without a key.
            dither: (2, ...) noise in (0, 1) and decay factor, from `fp8jax.core.noise.decay_dither`, for values that
                decay. It rounds by the noise where rounding to nearest would undo the next decay; elsewhere it rounds
                to nearest.

        Returns:
            Codes of dtype `dtype` in the shape of `y`. Magnitudes above `max` become `max`. NaN becomes the format's
            NaN and Inf becomes `inf`; both are arbitrary finite codes if `inf` is None.

        Raises:
            ValueError: codes are differentiated; their gradient would be 0.
        """
        y = derivatives.error_if_differentiated(derivatives.CAST_TO_CODES_ERROR, y)
        if key is not None:
            noise = jax.random.uniform(key, y.shape, jnp.float32)
        finite = jnp.clip(y, -self.max if self.is_signed else 0.0, self.max)
        if self.name == "e8m0":
            return encode_e8m0(y, "nearest")
        if dither is not None:
            finite = self._dither_decay(finite, dither)
        if self.codebook is not None:
            return _codebook_index(finite, self, noise)
        if not self.is_float:
            rounded = jnp.round(finite) if noise is None else _round_stochastic(finite, noise)
            return where(~jnp.isnan(y), rounded, 0).astype(self.dtype)
        if noise is not None:
            step = _ulp(finite, self)
            finite = _round_stochastic(finite / step, noise) * step
        if self.bits < 16 and not self.is_fp8 and noise is None:
            # Some XLA emitters cast to other dtypes through fp16, which rounds twice.
            step = _ulp(finite, self)
            finite = jnp.round(finite * (1 / step)) * step
        if self.inf is None:  # the block's scale is NaN
            finite = jnp.where(jnp.isnan(y), 0.0, finite)
            return encode_fp4(finite) if self.is_fp4 else jax.lax.optimization_barrier(finite.astype(self.dtype))
        infinite = y
        if np.isnan(self.inf):
            quiet_nan_bits = bitcast(y, jnp.int32) | np.int32(1 << 22)  # with its sign
            infinite = bitcast(quiet_nan_bits, jnp.float32)
        codes = jnp.where(jnp.isinf(y), infinite, finite).astype(self.dtype)
        # On a GPU, XLA removes a cast to another dtype and back (`decode`).
        return codes if self.is_fp8 else jax.lax.optimization_barrier(codes)

    def _dither_decay(self, y: Array, dither: Array) -> Array:
        """Values with dither added where rounding to nearest would undo their decay."""
        magnitude, noise_offset, decay_loss = jnp.abs(y), dither[0] - 0.5, 1 - dither[1]
        if self.codebook is not None:
            below, above = self.floor_ceil(magnitude)
            width = above - below
            dithered = jnp.where(magnitude - below > (0.5 - noise_offset) * width, above, below)
        else:
            # Keep each value at or above its power of two, which has a code: the codes below it are closer together.
            power = binade(magnitude)
            width = jnp.ones_like(y)
            if self.is_float:
                width = jnp.maximum(power, self.smallest_normal) * np.float32(2.0**-self.mantissa_bits)
            dithered = jnp.maximum(magnitude + width * noise_offset, power)
        return jnp.where(width > 2 * decay_loss * magnitude, copysign(dithered, y), y)

    def floor_ceil(self, y: Array) -> tuple[Array, Array]:
        """The two representable values around fp32 magnitudes: at or below, and above."""
        if self.codebook is not None:
            return _bracketing_values(y, np.asarray(self.codebook, np.float32))[1:]
        step = _ulp(y, self) if self.is_float else 1.0
        below = jnp.floor(y / step) * step
        return below, below + step

    def decode(self, codes: Array) -> Array:
        """The fp32 values of codes, in units of the format; raises ValueError if FP8 codes are differentiated."""
        if self.is_fp8:
            codes = derivatives.error_if_differentiated(derivatives.CAST_FROM_CODES_ERROR, codes)
        if self.name == "e8m0":
            return decode_e8m0(codes)
        if self.codebook is not None:
            return jnp.take(jnp.asarray(self.codebook, jnp.float32), codes.astype(jnp.int32), axis=0)
        if self.is_fp4:
            return decode_fp4(codes)
        return decode_fp8(codes) if self.is_fp8 else codes.astype(jnp.float32)


def _ulp(y: Array, fmt: Format) -> Array:
    """Spacing of a floating-point format around `y`; for bf16 at least fp32's smallest normal."""
    return jnp.maximum(binade(jnp.maximum(jnp.abs(y), fmt.smallest_normal)) * np.float32(2.0**-fmt.mantissa_bits), TINY)


def _codebook_index(y: Array, fmt: Format, noise: Array | None) -> Array:
    """Code book index of the nearest value, or with noise of one of the two neighbours."""
    values = np.asarray(fmt.codebook, np.float32)
    if noise is None:
        boundaries = (values[1:].astype(np.float64) + values[:-1]) / 2
        index = jnp.searchsorted(jnp.asarray(boundaries, jnp.float32), y, side="left")
    else:
        below, low, high = _bracketing_values(y, values)
        index = below + (noise * (high - low) < y - low).astype(below.dtype)
    return jnp.where(jnp.isnan(y), 0, index).astype(fmt.dtype)


def _bracketing_values(y: Array, values: np.ndarray) -> tuple[Array, Array, Array]:
    below = jnp.clip(jnp.searchsorted(jnp.asarray(values), y, side="right") - 1, 0, len(values) - 2)
    low, high = (jnp.take(jnp.asarray(values), i) for i in (below, below + 1))
    return below, low, high


@jax.jit  # traced once for all codes of a shape
def decode_fp8(codes: Array) -> Array:
    """The fp32 values of FP8 codes, computed on bits.

    XLA on GPUs treats a cast to 8 bits and back as excess precision and removes both casts.
    """
    bits = bitcast(codes, jnp.uint8).astype(jnp.uint16)
    if codes.dtype == jnp.float8_e5m2:
        return bitcast(bits << 8, jnp.float16).astype(jnp.float32)
    magnitude = bits & 0x7F
    half = bitcast((bits & 0x80) << 8 | magnitude << 7, jnp.float16)  # fp16's bias is 8 more
    return where(magnitude != 0x7F, half.astype(jnp.float32) * 256, jnp.nan)


def encode_fp4(y: Array) -> Array:
    """e2m1 codes of fp32 values that the format has, uint8. XLA on CPUs computes with no arrays of 4-bit floats."""
    bits = bitcast(y, jnp.int32)
    magnitude = jnp.where(jnp.abs(y) < 1, (2 * jnp.abs(y)).astype(jnp.int32), ((bits & 0x7FFFFFFF) >> 22) - (126 << 1))
    return (((bits >> 28) & 8) | magnitude).astype(jnp.uint8)


@jax.jit
def decode_fp4(codes: Array) -> Array:
    """The fp32 values of e2m1 codes in uint8, computed on bits."""
    bits = codes.astype(jnp.uint16)
    # The exponent bias of fp16 is 14 more than that of e2m1.
    half = bitcast((bits & 8) << 12 | (bits & 7) << 9, jnp.float16)
    return half.astype(jnp.float32) * 2.0**14


def round_to(x: Array, fmt: Format) -> Array:
    """fp32 values rounded to a plain floating-point format.

    Without `reduce_precision`, XLA on GPUs may skip a cast to bf16 and back and keep the fp32 value.
    """
    exponent_bits = fmt.bits - 1 - fmt.mantissa_bits
    return jax.lax.reduce_precision(x, exponent_bits, fmt.mantissa_bits).astype(fmt.dtype)


def round_up(x: Array, fmt: Format) -> Array:
    """Positive values rounded up to a plain floating-point format; NaN is kept."""
    dropped_bits = FP32.mantissa_bits - fmt.mantissa_bits
    bits = bitcast(x, jnp.int32) + ((1 << dropped_bits) - 1)
    up = bitcast(bits & -(1 << dropped_bits), jnp.float32)
    return round_to(jnp.where(jnp.isnan(x), x, up), fmt)


def _round_stochastic(y: Array, noise: Array) -> Array:
    """Integers above or below y, chosen by noise."""
    below = jnp.floor(y)
    return below + (y - below + noise >= 1).astype(below.dtype)


def encode_e8m0(y: Array, rounding: str) -> Array:
    """Exponent bytes of positive fp32 values: byte b stands for 2^(b - 127), and 255 for NaN.

    Args:
        y: fp32 values. Zero, negative and non-finite ones give 255, subnormals 0.
        rounding: "nearest" (ties up), "up" or "down", to a power of two.

    Returns:
        uint8 bytes in the shape of `y`.
    """
    # Read the bits: the floor of a computed logarithm is wrong one ulp below powers of two.
    bits = bitcast(y, jnp.int32)
    carry = {"nearest": 1 << 22, "up": (1 << 23) - 1, "down": 0}[rounding]
    exponent = jnp.minimum((bits + carry) >> 23, 254)
    return jnp.where((y > 0) & jnp.isfinite(y), exponent, 255).astype(jnp.uint8)


def decode_e8m0(codes: Array) -> Array:
    """The fp32 values of exponent bytes. 2^-127 is subnormal, and 0 on backends that flush subnormals."""
    bits = codes.astype(jnp.int32) << 23
    return jnp.where(codes == 255, jnp.nan, bitcast(bits, jnp.float32))


def significand(x: Array) -> Array:
    """The significands of normal fp32 values, in [1, 2)."""
    bits = bitcast(x, jnp.int32)
    return bitcast((bits & 0x7FFFFF) | 0x3F800000, jnp.float32)


def _floating(name: str, dtype: type) -> Format:
    info = ml_dtypes.finfo(dtype)
    with np.errstate(all="ignore"):
        inf = float(np.float32(np.inf).astype(dtype))
    return Format(
        name=name,
        dtype=np.dtype(dtype),
        bits=int(info.bits),
        max=float(info.max),
        smallest=float(info.smallest_subnormal),
        smallest_normal=float(info.smallest_normal),
        mantissa_bits=int(info.nmant),
        inf=None if np.isfinite(inf) else inf,  # 4-bit formats have neither NaN nor Inf
    )


def _integer(name: str, dtype: type, bits: int, packing: str | None = None) -> Format:
    # Symmetric: the lowest code is not used, so that negation is exact.
    return Format(name, np.dtype(dtype), bits, 2.0 ** (bits - 1) - 1, 1.0, 1.0, 0, packing=packing)


def _dynamic_exponent(name: str, is_signed: bool) -> Format:
    """The 8-bit dynamic exponent code book: seven decades from 1e-6 to 1, each with twice the values of the one below.

    Each decade is divided into equal cells, and the values are their midpoints. Zero and one complete the 256 values.
    The signed book has 127 positive and 127 negative midpoints, and no -1.
    """
    positive = []
    for decade in range(7):
        cells = 2 ** (decade + (0 if is_signed else 1))
        edges = np.linspace(0.1, 1.0, cells + 1)
        positive += list(10.0 ** (decade - 6) * (edges[1:] + edges[:-1]) / 2)
    values = sorted([*positive, *([-v for v in positive] if is_signed else []), 0.0, 1.0])
    book = tuple(float(np.float32(v)) for v in values)
    smallest = float(np.float32(min(positive)))
    return Format(name, np.dtype(np.uint8), 8, 1.0, smallest, smallest, 0, is_signed, None, book)


E4M3 = _floating("e4m3", ml_dtypes.float8_e4m3fn)
E5M2 = _floating("e5m2", ml_dtypes.float8_e5m2)
E2M1 = Format("e2m1", np.dtype(np.uint8), 4, 6.0, 0.5, 1.0, 1, packing="two_in_one")
INT8 = _integer("int8", np.int8, 8)
INT10 = _integer("int10", np.int16, 10, "four_in_five")
E8M0 = Format("e8m0", np.dtype(np.uint8), 8, 2.0**127, 2.0**-127, 2.0**-127, 0, is_signed=False, inf=float("nan"))
DE8 = _dynamic_exponent("de8", is_signed=True)
UDE8 = _dynamic_exponent("ude8", is_signed=False)
FP16 = _floating("fp16", np.float16)
BF16 = _floating("bf16", ml_dtypes.bfloat16)
FP32 = _floating("fp32", np.float32)

ALL: tuple[Format, ...] = (E4M3, E5M2, E2M1, INT8, INT10, E8M0, DE8, UDE8, FP16, BF16, FP32)


@functools.cache
def get(name: str) -> Format:
    """The format called `name`.

    Raises:
        ValueError: no format has this name; the message lists all names.
    """
    for fmt in ALL:
        if fmt.name == name:
            return fmt
    raise ValueError(f"unknown number format {name!r}; use one of {', '.join(f.name for f in ALL)}")


def __dir__() -> list[str]:
    """The formats and `get`."""
    return ["ALL", "Format", "get", *(f.name.upper() for f in ALL)]
