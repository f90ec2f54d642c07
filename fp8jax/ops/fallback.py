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
from fp8jax.ops.choice import Choice, capability, missing_triton, on_cuda, run, tell, triton_or_xla
from fp8jax.ops.cuts import Cut, notation
from fp8jax.ops.partition import partitioned

CRITERIA = ("absmax", "l1", "relative_l1")


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
    criterion: str = "absmax",
    key: Array | None = None,
    impl: str = "auto",
) -> tuple[Pair, QTensor | None]:
    """Blocks of a matrix; those whose measure exceeds the threshold fall back.

    A block with a NaN or Inf has a NaN scale, as every int8 block, and does not fall back.

    Args:
        x: (M, N), floating.
        spec: int8 in blocks, such as "int8:block128".
        threshold: fp32 scalar, in the units of the criterion.
        criterion: what is measured of a block (section 4.4): "absmax", its largest magnitude; "l1", the sum of its
            quantization errors; "relative_l1", that over the sum of its magnitudes.
        key: PRNG key, for the second result.
        impl: "auto", "xla" or "triton": "auto" is the kernel on CUDA GPUs for blocks of 32 or 128, by "absmax".

    Returns:
        The pair; and, where there is a key, the same blocks under the same scales, rounded stochastically, as a linear
        saves its input for the backward pass.

    Raises:
        ValueError: the spec, the criterion or `impl` is another; or `impl` is "triton" and the kernel cannot run.
    """
    spec = _check(spec)
    if criterion not in CRITERIA:
        raise ValueError(f"unknown criterion {criterion!r}; it is one of {', '.join(CRITERIA)}")
    choice = tell("fallback quantize", _choose(x, spec, criterion, impl, impl == "triton" or on_cuda()))
    threshold = jnp.asarray(threshold, jnp.float32)
    reference = functools.partial(_reference, spec, criterion)
    kernel = functools.partial(_kernel, spec)
    result: tuple[Pair, QTensor | None] = run(choice, impl, x, threshold, key, kernel=kernel, reference=reference)
    return result


def measured(x: Array, base: QTensor, criterion: str = "absmax") -> Array:
    """The measure of each block that decides whether it falls back: fp32, NaN where a block is not finite.

    Args:
        x: the matrix. base: its blocks. criterion: as of `quantize`.
    """
    block = base.spec.block_shape(x.shape)
    x = x.astype(jnp.float32)
    if criterion == "absmax":
        measure = blocks.reduce(jnp.abs(x), block, jnp.max, 0.0)
    else:
        measure = _total(jnp.abs(x - base.dequantize()), block)
    if criterion == "relative_l1":
        size = _total(jnp.abs(x), block)
        measure = jnp.where(size == 0, 0, measure / jnp.where(size == 0, 1, size))
    return jnp.where(jnp.isnan(base.scale), jnp.nan, measure)


def top_share(measures: Array, share: float) -> Array:
    """The blocks with the largest measures, as many as `share` of them: for study, as it needs all at once."""
    flat = measures.reshape(-1)
    count = round(share * flat.size)
    return jnp.isin(jnp.arange(flat.size), jnp.argsort(-flat)[:count]).reshape(measures.shape)


def pair(x: Array, base: QTensor, used: Array) -> Pair:
    """The pair whose blocks `used` fall back; residual codes of others are zero here, their scales one."""
    block = base.spec.block_shape(x.shape)
    x = x.astype(jnp.float32)
    rest = jnp.where(jnp.abs(x) < formats.TINY, 0, x) - base.dequantize()
    falls = blocks.spread(used, x.shape, block)
    return Pair(base, quantize_with_scale(jnp.where(falls, rest, 0), base.spec, None), used)


def _total(x: Array, block: tuple[int, ...]) -> Array:
    def add(x: Array, axis: tuple[int, ...], initial: float) -> Array:
        return jnp.sum(x, axis)

    return blocks.reduce(x, block, add, 0.0)


def _check(spec: QuantSpec | str) -> QuantSpec:
    spec = QuantSpec.parse(spec)
    if (spec.format, spec.granularity, spec.rounding) != ("int8", "block", "nearest"):
        raise ValueError(f"fallback is of int8 in blocks, rounded to nearest, such as 'int8:block128', not {spec}")
    return spec


def _choose(x: Array, spec: QuantSpec, criterion: str, impl: str, cuda: bool) -> Choice:
    if len(x.shape) != 2:
        raise ValueError(f"fallback quantization takes matrices, not shape {x.shape}; use jax.vmap for stacks of them")

    def unfit() -> str | None:
        if (reason := missing_triton("fallback_triton")) is not None:
            return reason
        from pallas_kernels import fallback_triton

        other = None if criterion == "absmax" else f"it measures blocks by absmax, not {criterion}"
        return fallback_triton.unsupported(x, spec.group_size or 0) or other

    return triton_or_xla(impl, cuda, unfit)


def _reference(
    spec: QuantSpec, criterion: str, x: Array, threshold: Array, key: Array | None
) -> tuple[Pair, QTensor | None]:
    def make(x: Array, threshold: Array, *words: Array) -> tuple[Array, ...]:
        base = quantize_with_scale(x, spec, None)
        parts = pair(x, base, measured(x, base, criterion) > threshold)
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

    place = None
    if words is not None:
        first = cut.start("m", x.shape[0]) // 4 * whole[1] + cut.start("n", x.shape[1])
        place = jnp.stack([jnp.asarray(value, jnp.uint32) for value in (whole[1], first)])
    assert spec.group_size is not None
    parts = fallback_triton.quantize(
        x, threshold, spec.group_size, words=words, place=place, compute_capability=capability()
    )
    base = QTensor(parts.base, parts.base_scale, None, None, spec)
    residual = QTensor(parts.residual, parts.residual_scale, None, None, spec)
    drawn = None if parts.drawn is None else QTensor(parts.drawn, parts.base_scale, None, None, stochastic(spec))
    return Pair(base, residual, parts.used), drawn
