"""`QTensor`, the one pytree that quantized tensors travel in, and the quantizer that makes it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from fp8jax.core import blocks, expansion, formats
from fp8jax.core.spec import QuantSpec


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "scale", "expansion"], meta_fields=["spec"])
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A quantized tensor: codes, the scales of their blocks, and with range expansion the exponents of the blocks.

    With M the largest value of the format, and s and k the scale and exponent of an element's block, a code c stands for

        sign(c) * (s * M) * (|c| / M)^(1 / k)

    which is c * s without expansion (k = 1). What always holds, and `validate` checks:

    - `codes` has the logical shape and the format's dtype;
    - `scale` and `expansion` have the rank of `codes` and one entry a block (`spec.block_shape`), counted from the
      start of each dimension of the global shape;
    - scales are positive and finite, and of dtype `spec.scale_format`; a block of zeros has scale 1;
    - `expansion` is None unless `spec.expand`; else bf16 in [1/16, 16];
    - no two leaves share a buffer.

    Non-finite inputs keep their place: NaN is the format's NaN, Inf its Inf, or NaN where it has none; they do not
    enter the statistics of their block.

    Attributes:
        codes: array of the logical shape.
        scale: one value a block.
        expansion: one exponent a block, or None.
        spec: the static `QuantSpec`.
    """

    codes: Array
    scale: Array
    expansion: Array | None
    spec: QuantSpec

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of codes and metadata; also of an abstract QTensor."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Array:
        """The values that the codes stand for, computed in fp32 and cast to `dtype`."""
        arrays = [self.scale] if self.expansion is None else [self.scale, self.expansion]
        (values,) = blocks.on_logical_array(
            functools.partial(_decode, spec=self.spec), self.codes, *arrays, like=[self.codes.shape]
        )
        return values.astype(dtype)

    def validate(self) -> None:
        """Checks the invariants in the class docstring on concrete arrays.

        Raises:
            ValueError: one does not hold; the message names it.
        """
        fmt = formats.get(self.spec.format)
        want = blocks.counts(self.shape, self.spec.block_shape(self.shape))
        parts = {"codes": (self.codes, self.shape, fmt.dtype)}
        parts["scale"] = (self.scale, want, formats.get(self.spec.scale_format).dtype)
        if (self.expansion is not None) != self.spec.expand:
            raise ValueError(f"expansion is {self.expansion}, but the spec is {self.spec}")
        if self.expansion is not None:
            parts["expansion"] = (self.expansion, want, expansion.DTYPE)
        for name, (array, shape, dtype) in parts.items():
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, not {np.dtype(dtype)}{list(shape)}")
        scale = np.asarray(self.scale, np.float32)
        if not (np.isfinite(scale) & (scale > 0)).all():
            raise ValueError("scales must be positive and finite")
        if self.expansion is not None:
            k = np.asarray(self.expansion, np.float32)
            if not ((k >= expansion.LOWEST) & (k <= expansion.HIGHEST)).all():
                raise ValueError(f"expansion exponents must lie in [{expansion.LOWEST}, {expansion.HIGHEST}]")


def quantize(x: Array, spec: QuantSpec | str, *, key: Array | None = None) -> QTensor:
    """Quantizes a tensor with scales taken from its own largest magnitudes.

    Args:
        x: array of a floating dtype, any shape. fp32 subnormals count as zeros.
        spec: a `QuantSpec` or its string form.
        key: PRNG key, needed by stochastic rounding and refused otherwise.

    Returns:
        A `QTensor`, sharded as `x`.

    Raises:
        TypeError: `x` is not of a floating dtype.
        ValueError: the spec is malformed or does not fit the shape, or the key is missing or of no use.
    """
    spec = QuantSpec.parse(spec)
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"cannot quantize an array of dtype {x.dtype}; cast it to a floating dtype first")
    if (key is not None) != (spec.rounding == "stochastic"):
        need = "needs a key" if key is None else "takes no key"
        raise ValueError(f"rounding {spec.rounding!r} {need}")
    count = blocks.counts(x.shape, spec.block_shape(x.shape))
    like = [x.shape, count] + [count] * spec.expand
    keys = () if key is None else (key,)
    codes, scale, *exponents = blocks.on_logical_array(functools.partial(_encode, spec=spec), x, *keys, like=like)
    return QTensor(codes, scale, exponents[0] if exponents else None, spec)


def _encode(x: Array, key: Array | None = None, *, spec: QuantSpec) -> tuple[Array, ...]:
    fmt = formats.get(spec.format)
    block_shape = spec.block_shape(x.shape)
    x = x.astype(jnp.float32)
    magnitude = jnp.abs(x)
    magnitude = jnp.where(magnitude < formats.TINY, 0, magnitude)
    counted = jnp.where(jnp.isfinite(magnitude), magnitude, 0)
    largest = blocks.reduce(counted, block_shape, jnp.max, 0.0)
    # Products with reciprocals throughout: XLA makes them of quotients by constants and scalars in some programs and
    # not in others, and the codes must not depend on that.
    scale = jnp.where(largest > 0, jnp.maximum(largest * np.float32(1 / fmt.max), formats.TINY), 1.0)
    scale = scale.astype(formats.get(spec.scale_format).dtype)
    stored = scale.astype(jnp.float32)
    if spec.expand:
        smallest = blocks.reduce(jnp.where(counted > 0, counted, jnp.inf), block_shape, jnp.min, jnp.inf)
        exponent = expansion.exponents(jnp.maximum(largest, formats.TINY * fmt.max), smallest, fmt)
        k, top = (blocks.spread(s, x.shape, block_shape) for s in (exponent.astype(jnp.float32), stored * fmt.max))
        y = fmt.max * expansion.power(magnitude, top, k)
    else:
        y = magnitude * blocks.spread(1 / stored, x.shape, block_shape)
    if spec.underflow == "smallest":
        y = jnp.where(magnitude > 0, jnp.maximum(y, fmt.smallest), y)
    codes = fmt.encode(jnp.copysign(y, x), key)
    return (codes, scale, exponent) if spec.expand else (codes, scale)


def _decode(codes: Array, scale: Array, exponent: Array | None = None, *, spec: QuantSpec) -> tuple[Array]:
    fmt = formats.get(spec.format)
    block_shape = spec.block_shape(codes.shape)
    values = fmt.decode(codes)
    scale = blocks.spread(scale.astype(jnp.float32), codes.shape, block_shape)
    if exponent is None:
        decoded = values * scale
    else:
        root = blocks.spread(1 / exponent.astype(jnp.float32), codes.shape, block_shape)
        # Half the power on each side of the scale: a compressed group spans more octaves than fp32 has below 1.
        half = expansion.power(jnp.abs(values) * np.float32(1 / fmt.max), 1.0, root / 2)
        decoded = jnp.copysign(half * (scale * fmt.max) * half, values)
    if spec.expand or spec.underflow == "smallest":
        # The rounding of a value close to the smallest normal must not take it where XLA flushes to zero.
        nonzero = jnp.copysign(jnp.maximum(jnp.abs(decoded), formats.TINY), values)
        decoded = jnp.where(values == 0, decoded, nonzero)
    return (decoded,)
