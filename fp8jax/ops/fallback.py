"""Fallback quantization (arXiv 2503.08040, section 4.3): int8 blocks, and the residual of those with outliers."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fp8jax.core import blocks, formats, noise
from fp8jax.core.qtensor import QTensor, quantize_with_scale
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.choice import Choice, capability, missing_triton, run, tell, triton_or_xla
from fp8jax.ops.cuts import Cut, notation
from fp8jax.ops.partition import partitioned


class Pair(NamedTuple):
    """A matrix as int8 blocks and, where a block falls back, what that leaves as int8 blocks too; 16 bits in all.

    The values are base + used * residual. Codes of the residual of other blocks are undefined: only `used` says which
    are read.

    Attributes:
        base: of the matrix. residual: of what the base leaves, with scales of its own.
        used: bool, one for each block: whether it falls back.
    """

    base: QTensor
    residual: QTensor
    used: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Array:
        """The values, computed in fp32 and cast to `dtype`."""
        return (self.base.dequantize() + self.only_used().dequantize()).astype(dtype)

    def only_used(self) -> QTensor:
        """The residual with zeros where it is not used."""
        block = self.base.spec.block_shape(self.shape)

        def keep(codes: Array, scale: Array, used: Array) -> tuple[Array, Array]:
            falls = blocks.spread(used, codes.shape, block)
            return jnp.where(falls, codes, 0).astype(codes.dtype), jnp.where(used, scale, 1)

        arrays = self.residual.codes, self.residual.scale, self.used
        codes, scale = blocks.on_logical_array(keep, *arrays, like=[self.shape, self.used.shape])
        return dataclasses.replace(self.residual, codes=codes, scale=scale)


def quantize(
    x: Array,
    spec: QuantSpec | str,
    threshold: Array | float,
    *,
    key: Array | None = None,
    impl: str = "auto",
) -> tuple[Pair, QTensor | None]:
    """Blocks of a matrix; those whose largest magnitude exceeds the threshold fall back (section 4.4, "absmax").

    A block with a NaN or Inf has a NaN scale, as every int8 block, and does not fall back.

    Args:
        x: (M, N), floating.
        spec: int8 in blocks, such as "int8:block128".
        threshold: fp32 scalar.
        key: PRNG key, for the second result.
        impl: "auto", "xla" or "triton": "auto" is the kernel on CUDA GPUs for blocks of 32 or 128.

    Returns:
        The pair; and, where there is a key, the same blocks under the same scales, rounded stochastically, as a linear
        saves its input for the backward pass.

    Raises:
        ValueError: the spec or `impl` is another; or `impl` is "triton" and the kernel cannot run.
    """
    spec = _check(spec)
    choice = tell("fallback quantize", _choose(x, spec, impl))
    threshold = jnp.asarray(threshold, jnp.float32)
    reference, kernel = (functools.partial(f, spec) for f in (_reference, _kernel))
    result: tuple[Pair, QTensor | None] = run(choice, impl, x, threshold, key, kernel=kernel, reference=reference)
    return result


def pair(x: Array, base: QTensor, used: Array) -> Pair:
    """The pair whose blocks `used` fall back; residual codes of others are zero here, their scales one."""
    block = base.spec.block_shape(x.shape)
    x = x.astype(jnp.float32)
    rest = jnp.where(jnp.abs(x) < formats.TINY, 0, x) - base.dequantize()
    falls = blocks.spread(used, x.shape, block)
    return Pair(base, quantize_with_scale(jnp.where(falls, rest, 0), base.spec, None), used)


def _check(spec: QuantSpec | str) -> QuantSpec:
    spec = QuantSpec.parse(spec)
    if (spec.format, spec.granularity, spec.rounding) != ("int8", "block", "nearest"):
        raise ValueError(f"fallback is of int8 in blocks, rounded to nearest, such as 'int8:block128', not {spec}")
    return spec


def _choose(x: Array, spec: QuantSpec, impl: str) -> Choice:
    if len(x.shape) != 2:
        raise ValueError(f"fallback quantization takes matrices, not shape {x.shape}; use jax.vmap for stacks of them")

    def unfit() -> str | None:
        if (reason := missing_triton("fallback_triton")) is not None:
            return reason
        from pallas_kernels import fallback_triton

        return fallback_triton.unsupported(x, spec.group_size or 0)

    return triton_or_xla(impl, unfit)


def _reference(spec: QuantSpec, x: Array, threshold: Array, key: Array | None) -> tuple[Pair, QTensor | None]:
    def make(x: Array, threshold: Array, *words: Array) -> tuple[Array, ...]:
        base = quantize_with_scale(x, spec, None)
        largest = blocks.reduce(jnp.abs(x.astype(jnp.float32)), spec.block_shape(x.shape), jnp.max, 0.0)
        parts = pair(x, base, jnp.where(jnp.isnan(base.scale), jnp.nan, largest) > threshold)
        drawn = [quantize_with_scale(x, stochastic(spec), None, words=w) for w in words]
        return tuple(jax.tree.leaves((parts, drawn)))

    words = () if key is None else (noise.of_key(key),)
    count = blocks.counts(x.shape, spec.block_shape(x.shape))
    like = [*[x.shape, count] * 2, count, *[x.shape, count] * len(words)]
    parts = blocks.on_logical_array(make, x, threshold, *words, like=like)
    base, residual, *drawn = (
        QTensor(codes, scale, None, None, stochastic(spec) if i > 1 else spec)
        for i, (codes, scale) in enumerate([parts[:2], parts[2:4], *([parts[5:]] if words else [])])
    )
    return Pair(base, residual, parts[4]), drawn[0] if drawn else None


def stochastic(spec: QuantSpec) -> QuantSpec:
    """The same blocks, rounded stochastically."""
    return QuantSpec.parse(f"{spec}+stochastic")


def _kernel(spec: QuantSpec, x: Array, threshold: Array, key: Array | None) -> tuple[Pair, QTensor | None]:
    words = None if key is None else jax.random.bits(key, (2,), jnp.uint32)
    parts = notation(spec, x.shape, "m n")
    outs = ((parts, parts, parts[1]), None if key is None else parts)
    make = functools.partial(_one, spec, x.shape)
    result: tuple[Pair, QTensor | None] = partitioned(
        "fallback", (spec, x.shape), make, (x, threshold, words), ("m n", "", "-"), outs, units={"m": 4}
    )
    return result


def _one(
    spec: QuantSpec, whole: tuple[int, ...], cut: Cut, x: Array, threshold: Array, words: Array | None
) -> tuple[Pair, QTensor | None]:
    """Of a device's own part of a matrix, whose whole shape is given."""
    from pallas_kernels import fallback_triton

    place = None if words is None else cut.fours(whole, x.shape)
    assert spec.group_size is not None
    parts = fallback_triton.quantize(
        x, threshold, spec.group_size, words=words, place=place, compute_capability=capability()
    )
    base = QTensor(parts.base, parts.base_scale, None, None, spec)
    residual = QTensor(parts.residual, parts.residual_scale, None, None, spec)
    drawn = None if parts.drawn is None else QTensor(parts.drawn, parts.base_scale, None, None, stochastic(spec))
    return Pair(base, residual, parts.used), drawn
