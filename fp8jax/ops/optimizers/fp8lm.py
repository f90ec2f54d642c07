"""FP8-LM's AdamW (Peng et al., 2023, section 2.2) for parameters with few scales for moments and master weights.

The scales of a step come from upper bounds: of the amax that the last step stored, of the gradient's amax, and of the
learning rate. They are known before the step, so it is one pass over its arrays, after one over the gradient.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fp8jax.core import blocks, formats, noise, scaling
from fp8jax.core.masters import MasterWeight
from fp8jax.core.qtensor import QTensor, quantize_with_scale
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.dispatch.choice import call_traced_once, capability
from fp8jax.ops.dispatch.partition import DimSharding, notation, run_partitioned
from fp8jax.ops.optimizers import adamw
from fp8jax.ops.optimizers.adamw import ShardStride
from fp8jax.ops.optimizers.leaf import Adam, Leaf, StepResult, apply_change, half_step, load, scale_and_clip
from fp8jax.ops.optimizers.step import FusedOptimizer

# Adam's largest direction is 7.3 for the default decays, and 22 for b2 = 0.9999, by the Cauchy-Schwarz inequality.
# Rounding of moments adds to that.
_MAX_DIRECTION = 64.0
_FP32_MAX = np.finfo(np.float32).max
# Finite gradients are clipped to this magnitude, so that bias-corrected first moments stay finite. A second moment may
# become Inf: a scale that fits it would set all others of the tensor to zero.
_MAX_GRADIENT = np.float32(2.0**126)
# Bounds the rounding errors of sums of a few fp32 terms.
_ROUNDING_MARGIN = np.float32(1 + 2**-20)


def reference(adam: Adam, leaves: Sequence[Leaf]) -> list[StepResult]:
    """The step in plain JAX. Leaves without quantized arrays use the step of `adamw`."""
    if not leaves[0].quantized_arrays:
        return adamw.reference(adam, leaves)
    return [_step_quantized(adam, leaf) for leaf in leaves]


def _step_quantized(adam: Adam, leaf: Leaf) -> StepResult:
    """The step of one leaf, by the operations of the kernel."""
    one_minus_b1, one_minus_b2 = (jnp.asarray(1 - b, jnp.float32) for b in (adam.b1, adam.b2))
    count = jnp.asarray(adam.count, jnp.float32)
    corrections = [1 / (1 - b**count) for b in (adam.b1, adam.b2)]
    rate, decay = jnp.asarray(adam.rate, jnp.float32), adam.weight_decay if leaf.decays else 0.0
    g = scale_and_clip(load(leaf.grad), adam.grad_scale, _MAX_GRADIENT)
    m = one_minus_b1 * g + adam.b1 * load(leaf.mu)
    old_v = load(leaf.nu)
    decayed_v = adam.b2 * old_v
    # A second moment above zero stays above zero, even if its decayed value underflows.
    v = one_minus_b2 * (g * g) + jnp.where((old_v > 0) & (decayed_v < formats.TINY), formats.TINY, decayed_v)
    direction = (m * corrections[0]) / (jnp.sqrt(v * corrections[1] + adam.eps_root) + adam.eps)
    weight = leaf.value
    change = -rate * (direction + decay * weight)
    *master_scales, mu_scale, nu_scale = _new_scales(adam, leaf)
    mu = quantize_with_scale(m, leaf.mu.spec, mu_scale, dither=noise.decay_dither(adam.count, adam.b1))
    nu = quantize_with_scale(v, leaf.nu.spec, nu_scale)
    if leaf.master is None:
        master, result = None, apply_change(leaf, change)
    else:
        new, scale = weight + change, master_scales[0]
        master = _quantize_master(new, leaf.master.spec, scale, leaf.weight_seed)
        max_code = formats.get(leaf.master.spec.format).max
        given_copy, block = leaf.weight.astype(jnp.float32), leaf.master.spec.block_shape(new.shape)
        # The caller has changed these copies to values beyond the bound. The next step has a larger bound.
        in_units = jnp.abs(new) * blocks.broadcast_blocks(1 / scale, new.shape, block)
        is_saturated = (in_units > max_code) & jnp.isfinite(new)
        result = jnp.where(is_saturated, given_copy, load(master))
        result = (result if leaf.in_place else result - given_copy).astype(leaf.dtype)
    amaxes = [block_amax(q) for q in (master, mu, nu) if q is not None]
    if master is not None:
        amax_in_units = array_block_amax(new, block) * (1 / scale)
        amaxes[0] = jnp.where(amax_in_units > max_code, jnp.minimum(amax_in_units, _FP32_MAX) * scale, amaxes[0])
    return StepResult(result, master, mu, nu, jnp.stack(amaxes))


def _new_scales(adam: Adam, leaf: Leaf) -> list[Array]:
    """Scales of the quantized arrays after the step, each of the shape of the present one."""
    if _has_grad_codes(leaf):
        grad_scale = 1.0 if adam.grad_scale is None else adam.grad_scale
        # The clip is for a scale of gradients that are all zero.
        grad_amax = jnp.minimum(jnp.abs(grad_scale) * block_amax(leaf.grad), _MAX_GRADIENT)
        grad_square_amax = jnp.square(grad_amax)
    else:
        values = scale_and_clip(load(leaf.grad), adam.grad_scale, _MAX_GRADIENT)
        block = leaf.mu.spec.block_shape(leaf.mu.shape)
        # `array_block_amax` skips squares that overflow. Their second moments become Inf.
        grad_amax, grad_square_amax = array_block_amax(values, block), array_block_amax(jnp.square(values), block)
    *weight_amaxes, mu_amax, nu_amax = leaf.amax
    rate = jnp.abs(jnp.asarray(adam.rate, jnp.float32))
    bounds = [w + rate * (_MAX_DIRECTION + adam.weight_decay * w) for w in weight_amaxes]
    b1, b2 = (jnp.asarray(b, jnp.float32) for b in (adam.b1, adam.b2))
    bounds += [b1 * mu_amax + (1 - b1) * grad_amax, b2 * nu_amax + (1 - b2) * grad_square_amax]
    return [
        pow2_scale_from_bound(bound, formats.get(q.spec.format))
        for bound, q in zip(bounds, leaf.quantized_arrays, strict=True)
    ]


def _quantize_master(values: Array, spec: QuantSpec, scale: Array, seed: Array | None) -> QTensor:
    rounding_spec = spec if seed is None else dataclasses.replace(spec, rounding="stochastic")
    return dataclasses.replace(quantize_with_scale(values, rounding_spec, scale, seed=seed), spec=spec)


def _has_grad_codes(leaf: Leaf) -> bool:
    """Whether the gradient is FP8 codes with scales of the same blocks as the parameter's."""
    g, mu = leaf.grad, leaf.mu
    if not isinstance(g, QTensor) or g.spec.format not in ("e4m3", "e5m2"):
        return False
    return (g.spec.granularity, g.scale.shape) == (mu.spec.granularity, mu.scale.shape)


def _grad_dtype(leaf: Leaf) -> Any:
    """Dtype of the gradient that the kernel reads: its codes, or its values."""
    if _has_grad_codes(leaf):
        return leaf.grad.codes.dtype
    return jnp.float32 if isinstance(leaf.grad, QTensor) else leaf.grad.dtype


def quantize_to_pow2_scale(values: Array, spec: QuantSpec) -> QTensor:
    """A quantized array with power-of-two scales for its own amax."""
    bound = array_block_amax(values, spec.block_shape(values.shape))
    return quantize_with_scale(values, spec, pow2_scale_from_bound(bound, formats.get(spec.format)))


def stack_amax(*arrays: Any) -> Array | None:
    """`Leaf.amax` of the stored arrays of a parameter; None if they are not quantized."""
    return jnp.stack([*map(block_amax, arrays)]) if isinstance(arrays[0], QTensor) else None


def block_amax(q: QTensor) -> Array:
    """The amax over the finite elements of each block of a quantized array, of its scale's shape."""
    codes = jnp.abs(formats.get(q.spec.format).decode(q.codes))
    codes = jnp.where(jnp.isfinite(codes), codes, 0.0)
    return _finite_product(blocks.reduce(codes, q.spec.block_shape(q.shape), jnp.max, 0.0), q.scale)


def array_block_amax(x: Array, block: tuple[int, ...]) -> Array:
    """The amax over the finite elements of each block of an array."""
    values = jnp.abs(x.astype(jnp.float32))
    return blocks.reduce(jnp.where(jnp.isfinite(values), values, 0.0), block, jnp.max, 0.0)


def _finite_product(codes: Array, scale: Array) -> Array:
    values = codes * scale
    return jnp.where(jnp.isfinite(values), values, 0.0)


def _stored_amax(amax_in_units: Array, fmt: formats.Format, scale: Array) -> Array:
    """The amax of a block's decoded values, from its amax before encoding, in units of the scale."""
    # If the block saturates, the result is the amax before encoding, so that the next scale fits it.
    stored = _finite_product(fmt.decode(fmt.encode(amax_in_units)), scale)
    return jnp.where(amax_in_units > fmt.max, amax_in_units * scale, stored)


def pow2_scale_from_bound(bound: Array, fmt: formats.Format) -> Array:
    """The least power of two with which a format holds magnitudes up to a bound; finite for any bound."""
    # With powers of two, a value that does not change is not rounded again when its scale changes. A bound that is not
    # finite comes from values that their own codes show, and must not spoil the others of the block.
    bound = bound * _ROUNDING_MARGIN
    bound = jnp.where(bound <= _FP32_MAX, bound, _FP32_MAX)
    return formats.decode_e8m0(formats.encode_e8m0(scaling.to_scale(bound, fmt), "up"))


def unsupported_reason(adam: Adam, leaf: Leaf) -> str | None:
    """The reason why the kernel does not support a leaf with quantized arrays, or None."""
    from pallas_kernels.optimizers import fp8lm_triton

    del adam
    mu, is_stochastic = leaf.mu, leaf.weight_seed is not None
    if mu.spec.granularity != "tensor":
        return f"moments have scales for groups of {mu.spec.group_size}, but the kernel supports one scale per layer"
    if isinstance(leaf.weight, MasterWeight) and leaf.dtype != jnp.bfloat16:
        return f"the kernel has remainders of bf16 master weights, and not of {leaf.dtype}"
    return fp8lm_triton.unsupported_reason(mu.shape, _grad_dtype(leaf), leaf.dtype, mu.codes.dtype, is_stochastic)


class _Operands(NamedTuple):
    """The arrays of a leaf, which `run_partitioned` shards, and the scalars."""

    grad: Array
    weight: Any
    codes: tuple[Array, ...]
    grad_scale: Array
    scales: tuple[Array, ...]
    new_scales: tuple[Array, ...]
    scalars: tuple[Array | None, ...]
    weight_seed: Array | None


def _make_scalars(adam: Adam, decays: bool) -> tuple[Array | None, ...]:
    """The fp32 scalars of a step for the kernel, of parameters that decay or not."""
    from pallas_kernels.optimizers import fp8lm_triton

    count = jnp.asarray(adam.count, jnp.float32)
    scalars = fp8lm_triton.FP8LMScalars(
        *(adam.rate, adam.weight_decay if decays else 0.0),
        *(adam.b1, 1 - adam.b1, adam.b2, 1 - adam.b2),
        *(1 / (1 - adam.b1**count), 1 / (1 - adam.b2**count)),
        *(adam.eps, adam.eps_root, noise.decay_dither(adam.count)[0], adam.grad_scale, adam.apply_if),
    )
    return tuple(None if x is None else jnp.asarray(x).astype(jnp.float32) for x in scalars)


def _step_by_kernel(static: tuple[tuple[str, Any], ...], traced: dict[str, Any], leaf: Leaf) -> StepResult:
    """The step of one leaf by the kernel, on each device of its part; see `Adam.split_static`."""
    from pallas_kernels.optimizers import fp8lm_triton

    adam = Adam(**dict(static), **traced)
    spec, shape, quantized = leaf.mu.spec, leaf.mu.shape, leaf.quantized_arrays
    fmts = [formats.get(q.spec.format) for q in quantized]
    names = [f"axis{i}" for i in range(len(shape))]
    if leaf.weight_seed is not None:
        # The kernel finds the places of elements in the whole array, for the noise, if at most two axes are sharded.
        matrix = (0, max(len(shape) - 2, 1))
        names = [name if i in matrix else "-" for i, name in enumerate(names)]
    layer_axis_names = " ".join(name for name in names[spec.layer_axes :] if name != "-")

    def step_shard(sharding: DimSharding, *operands: Any) -> Any:
        x = _Operands(*operands)
        scale_rows = [x.grad_scale, *x.scales, *x.new_scales, *(1 / scale for scale in x.new_scales)]
        seed, run = x.weight_seed, None
        if seed is not None:
            stride = ShardStride.from_sharding(sharding, names, shape, x.grad.shape)
            assert stride is not None, "of two axes"
            run = (stride.inner, stride.stride or 1) if sharding.axes else None
            seed = jnp.append(seed, stride.first.astype(jnp.uint32))
        weight, codes, amax = fp8lm_triton.fp8lm(
            x.grad, x.weight, x.codes,
            jnp.stack([scale.reshape(-1) for scale in scale_rows]),
            fp8lm_triton.FP8LMScalars(*x.scalars),
            in_place=leaf.in_place,
            seed=seed,
            run=run,
            rounding=half_step(leaf.dtype),
            compute_capability=capability(),
        )  # fmt: skip
        # Each device has the amax of its part, and a scale is of all axes but those of layers.
        amax = sharding.pmax(jnp.max(amax, axis=-1), layer_axis_names)
        # Rounding keeps the order: the largest code is that of the largest value.
        rows = [
            _stored_amax(block_maxima.reshape(scale.shape), fmt, scale)
            for block_maxima, fmt, scale in zip(amax, fmts, x.new_scales, strict=True)
        ]
        return weight, codes, jnp.stack(rows)

    has_grad_codes, n = _has_grad_codes(leaf), len(quantized)
    scales, scalars = _new_scales(adam, leaf), _make_scalars(adam, leaf.decays)
    weight: Any = leaf.weight
    weight = (weight.high, weight.remainder) if isinstance(weight, MasterWeight) else weight
    operands = _Operands(
        grad=leaf.grad.codes if has_grad_codes else load(leaf.grad) if isinstance(leaf.grad, QTensor) else leaf.grad,
        weight=weight,
        codes=tuple(q.codes for q in quantized),
        grad_scale=leaf.grad.scale if has_grad_codes else jnp.ones_like(leaf.mu.scale),
        scales=tuple(q.scale for q in quantized),
        new_scales=tuple(scales),
        scalars=scalars,
        weight_seed=leaf.weight_seed,
    )
    dims, scale_dims = notation(spec, shape, " ".join(names))
    weight_dims = (dims, dims) if isinstance(weight, tuple) else dims
    codes_dims, scales_dims = (dims,) * n, (scale_dims,) * n
    ins = (dims, weight_dims, codes_dims, scale_dims, scales_dims, scales_dims, ("",) * len(scalars), "-")
    dtypes = str(spec), str(jax.tree.map(lambda x: x.dtype, weight)), n
    settings = (dtypes, has_grad_codes, [x is None for x in scalars], leaf.weight_seed is None, spec.layer_axes)
    result, codes, amax = run_partitioned(
        "fp8lm_step" if leaf.in_place else "fp8lm_update",
        settings, step_shard, operands, ins, (weight_dims, codes_dims, f"- {scale_dims}"),
    )  # fmt: skip
    result = MasterWeight(*result) if isinstance(result, tuple) else result
    if adam.apply_if is not None:
        gate = lambda new, old: jnp.where(adam.apply_if, new, old)  # noqa: E731
        scales, amax = jax.tree.map(gate, (scales, amax), ([q.scale for q in quantized], leaf.amax))
    *master, mu, nu = (
        dataclasses.replace(q, codes=x, scale=scale) for q, x, scale in zip(quantized, codes, scales, strict=True)
    )
    return StepResult(result, master[0] if master else None, mu, nu, amax)


def _step_leaves(adam: Adam, leaves: Sequence[Leaf]) -> list[StepResult]:
    static, traced = adam.split_static()
    return [call_traced_once(functools.partial(_step_by_kernel, static), traced, leaf) for leaf in leaves]


FP8LM = FusedOptimizer(
    name="fp8lm_adamw",
    reference=reference,
    kernel=_step_leaves,
    kernel_module="optimizers.fp8lm_triton",
    unsupported_reason=unsupported_reason,
)
