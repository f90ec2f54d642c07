"""Number formats as records: a new format is a new constant, and `ALL` parametrises the tests.

Sources: OCP 8-bit Floating Point Specification 1.0 (e4m3 without infinities, e5m2 with them).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

# XLA flushes fp32 subnormals on some backends and keeps them on others; the quantizers treat them as zeros on all.
TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Format:
    """A storage format of real numbers.

    Attributes:
        name: the name used in specs, recipes and on the command line.
        dtype: dtype of the codes.
        max: largest finite magnitude that a code stands for.
        smallest: smallest non-zero magnitude that a code stands for (a subnormal, where the format has them).
        smallest_normal: smallest magnitude that has all mantissa bits.
        mantissa_bits: explicitly stored bits of the significand.
        inf: what the code of an infinity decodes to (Inf, or NaN where the format has none).
    """

    name: str
    dtype: np.dtype
    max: float
    smallest: float
    smallest_normal: float
    mantissa_bits: int
    inf: float

    @property
    def bytes_per_element(self) -> float:
        return float(self.dtype.itemsize)

    @property
    def scaled(self) -> bool:
        """Whether tensors in this format need a scale: 8-bit formats do, bf16 and fp32 hold fp32's own range."""
        return self.max < float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)

    @property
    def expansion_range(self) -> float:
        """Ratio R of largest to smallest magnitude that range expansion maps a group onto (COAT, section 4.2).

        Half the smallest normal, so one bit into the subnormals: 57344 for e4m3. COAT's text takes the smallest
        subnormal (229376), where the relative error of small second moments doubles; its code takes 100352.
        """
        return self.max / (self.smallest_normal / 2)

    def encode(self, y: Array, key: Array | None = None) -> Array:
        """Rounds fp32 values to codes, saturating at `max`; NaN and Inf stay visible.

        Args:
            y: fp32 values in units of the format (already divided by their scale), any shape.
            key: a PRNG key for stochastic rounding, which is unbiased; None rounds to nearest, ties to even.

        Returns:
            Codes of dtype `dtype` in the shape of `y`. Magnitudes beyond `max` become `max`, NaN the format's NaN,
            Inf `inf`.
        """
        finite = jnp.clip(y, -self.max, self.max)
        if key is not None:
            finite = _round_stochastically(finite, self, key)
        y = jnp.where(jnp.isinf(y), jnp.copysign(self.inf, y), finite)
        return y.astype(self.dtype)

    def decode(self, codes: Array) -> Array:
        """The fp32 values of codes, in units of the format."""
        return codes.astype(jnp.float32)


def _round_stochastically(y: Array, fmt: Format, key: Array) -> Array:
    _, exponent = jnp.frexp(jnp.maximum(jnp.abs(y), fmt.smallest_normal))
    step = jnp.ldexp(jnp.float32(1), exponent - 1 - fmt.mantissa_bits)
    noise = jax.random.uniform(key, y.shape, jnp.float32)
    return jnp.clip(jnp.floor(y / step + noise) * step, -fmt.max, fmt.max)


def _floating(name: str, dtype: type) -> Format:
    info = ml_dtypes.finfo(dtype)
    with np.errstate(all="ignore"):
        inf = float(np.float32(np.inf).astype(dtype))
    return Format(
        name=name,
        dtype=np.dtype(dtype),
        max=float(info.max),
        smallest=float(info.smallest_subnormal),
        smallest_normal=float(info.smallest_normal),
        mantissa_bits=int(info.nmant),
        inf=inf,
    )


E4M3 = _floating("e4m3", ml_dtypes.float8_e4m3fn)
E5M2 = _floating("e5m2", ml_dtypes.float8_e5m2)
BF16 = _floating("bf16", ml_dtypes.bfloat16)
FP32 = _floating("fp32", np.float32)

ALL: tuple[Format, ...] = (E4M3, E5M2, BF16, FP32)


@functools.cache
def get(name: str) -> Format:
    """The format called `name`.

    Raises:
        ValueError: no format has this name; the message lists those there are.
    """
    for fmt in ALL:
        if fmt.name == name:
            return fmt
    raise ValueError(f"unknown number format {name!r}; formats are {', '.join(f.name for f in ALL)}")
