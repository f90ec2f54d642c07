"""Fallback quantization (arXiv 2503.08040, section 4.3): int8 blocks, with an int8 residual for outlier blocks."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fp8jax.core import blocks, noise
from fp8jax.core.qtensor import QTensor, quantize_with_scale
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.dispatch.choice import Choice, capability, choose_impl, missing_triton, record_choice, run
from fp8jax.ops.dispatch.partition import DimSharding, notation, run_partitioned


class FallbackTensor(NamedTuple):
    """A matrix of int8 blocks with values base + fallback_mask * residual.

    Attributes:
        base: QTensor of the matrix.
        residual: QTensor of what `base` leaves, with its own scales. Codes are undefined where the mask is False.
        fallback_mask: bool, one per block.
    """

    base: QTensor
    residual: QTensor
    fallback_mask: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Array:
        """Return the values, computed in fp32 and cast to `dtype`."""
        return (self.base.dequantize() + self.masked_residual().dequantize()).astype(dtype)

    def masked_residual(self) -> QTensor:
        """Return the residual with zero codes and scale 1 in the blocks that do not fall back."""
        block = self.base.spec.block_shape(self.shape)

        def mask_blocks(codes: Array, scale: Array, fallback_mask: Array) -> tuple[Array, Array]:
            element_mask = blocks.broadcast_blocks(fallback_mask, codes.shape, block)
            return jnp.where(element_mask, codes, 0).astype(codes.dtype), jnp.where(fallback_mask, scale, 1)

        arrays = self.residual.codes, self.residual.scale, self.fallback_mask
        codes, scale = blocks.on_logical_array(mask_blocks, *arrays, out_shapes=[self.shape, self.fallback_mask.shape])
        return dataclasses.replace(self.residual, codes=codes, scale=scale)


def quantize(
    x: Array,
    spec: QuantSpec | str,
    threshold: Array | float,
    *,
    key: Array | None = None,
    impl: str = "auto",
) -> tuple[FallbackTensor, QTensor | None]:
    """Quantize a matrix to int8 blocks; blocks with an amax above the threshold fall back (section 4.4, "absmax").

    A block with a NaN or Inf gets a NaN scale, as in every int8 format, and does not fall back.

    Args:
        x: floating array of shape (M, N).
        spec: int8 in blocks, such as "int8:block128".
        threshold: fp32 scalar.
        key: PRNG key for the second result, or None.
        impl: "auto", "xla" or "triton". "auto" runs the kernel on CUDA GPUs for blocks of 32 or 128.

    Returns:
        The `FallbackTensor`, and the blocks rounded stochastically under the same scales (None without a key). A linear
        layer saves the second one for its backward pass.

    Raises:
        ValueError: the spec or `impl` is unsupported, or `impl` is "triton" and the kernel cannot run.
    """
    spec = QuantSpec.parse(spec)
    if (spec.format, spec.granularity, spec.rounding) != ("int8", "block", "nearest"):
        raise ValueError(
            f"fallback needs an int8 spec with blocks that rounds to nearest, such as 'int8:block128', got {spec}"
        )
    choice = record_choice("fallback quantize", _choose(x, spec, impl))
    threshold = jnp.asarray(threshold, jnp.float32)
    reference, kernel = (functools.partial(f, spec) for f in (_reference, _kernel))
    return run(choice, impl, x, threshold, key, kernel=kernel, reference=reference)


def make_fallback_tensor(x: Array, base: QTensor, fallback_mask: Array) -> FallbackTensor:
    """Return the `FallbackTensor` of `x`. Blocks outside the mask have residual codes 0 and scale 1."""
    block = base.spec.block_shape(x.shape)
    x = x.astype(jnp.float32)
    remainder = x - base.dequantize()
    element_mask = blocks.broadcast_blocks(fallback_mask, x.shape, block)
    return FallbackTensor(
        base, quantize_with_scale(jnp.where(element_mask, remainder, 0), base.spec, None), fallback_mask
    )


def _choose(x: Array, spec: QuantSpec, impl: str) -> Choice:
    if len(x.shape) != 2:
        raise ValueError(
            f"fallback quantization expects a matrix, got shape {x.shape}; use jax.vmap for stacks of them"
        )

    def unsupported_reason() -> str | None:
        if (reason := missing_triton("quantization.fallback_triton")) is not None:
            return reason
        from pallas_kernels.quantization import fallback_triton

        return fallback_triton.unsupported_reason(x, spec.group_size or 0)

    return choose_impl(impl, unsupported_reason)


def _reference(spec: QuantSpec, x: Array, threshold: Array, key: Array | None) -> tuple[FallbackTensor, QTensor | None]:
    def quantize_arrays(x: Array, threshold: Array, *seeds: Array) -> tuple[Array, ...]:
        base = quantize_with_scale(x, spec, None)
        block_amax = blocks.reduce(jnp.abs(x.astype(jnp.float32)), spec.block_shape(x.shape), jnp.max, 0.0)
        fallback_tensor = make_fallback_tensor(
            x, base, jnp.where(jnp.isnan(base.scale), jnp.nan, block_amax) > threshold
        )
        stochastic_codes = [quantize_with_scale(x, with_stochastic_rounding(spec), None, seed=s) for s in seeds]
        return tuple(jax.tree.leaves((fallback_tensor, stochastic_codes)))

    seeds = () if key is None else (noise.key_to_seed(key),)
    block_counts = blocks.counts(x.shape, spec.block_shape(x.shape))
    like = [*[x.shape, block_counts] * 2, block_counts, *[x.shape, block_counts] * len(seeds)]
    parts = blocks.on_logical_array(quantize_arrays, x, threshold, *seeds, out_shapes=like)
    base, residual, *stochastic = (
        QTensor(codes, scale, None, None, with_stochastic_rounding(spec) if i > 1 else spec)
        for i, (codes, scale) in enumerate([parts[:2], parts[2:4], *([parts[5:]] if seeds else [])])
    )
    return FallbackTensor(base, residual, parts[4]), stochastic[0] if stochastic else None


def with_stochastic_rounding(spec: QuantSpec) -> QuantSpec:
    """Return the spec with stochastic rounding."""
    return QuantSpec.parse(f"{spec}+stochastic")


def _kernel(spec: QuantSpec, x: Array, threshold: Array, key: Array | None) -> tuple[FallbackTensor, QTensor | None]:
    seed = None if key is None else jax.random.bits(key, (2,), jnp.uint32)
    block_notation = notation(spec, x.shape, "m n")
    outs = ((block_notation, block_notation, block_notation[1]), None if key is None else block_notation)
    quantize_shard = functools.partial(_quantize_shard, spec, x.shape)
    return run_partitioned(
        "fallback", (spec, x.shape), quantize_shard, (x, threshold, seed), ("m n", "", "-"), outs, units={"m": 4}
    )


def _quantize_shard(
    spec: QuantSpec,
    full_shape: tuple[int, ...],
    dim_sharding: DimSharding,
    x: Array,
    threshold: Array,
    seed: Array | None,
) -> tuple[FallbackTensor, QTensor | None]:
    """Quantize a device's shard of a matrix of shape `full_shape`."""
    from pallas_kernels.quantization import fallback_triton

    rng_offset = None if seed is None else dim_sharding.rng_offset(full_shape, x.shape)
    assert spec.group_size is not None
    arrays = fallback_triton.quantize(
        x, threshold, spec.group_size, seed=seed, rng_offset=rng_offset, compute_capability=capability()
    )
    base = QTensor(arrays.base, arrays.base_scale, None, None, spec)
    residual = QTensor(arrays.residual, arrays.residual_scale, None, None, spec)
    stochastic_codes = (
        None
        if arrays.stochastic is None
        else QTensor(arrays.stochastic, arrays.base_scale, None, None, with_stochastic_rounding(spec))
    )
    return FallbackTensor(base, residual, arrays.is_fallback), stochastic_codes
