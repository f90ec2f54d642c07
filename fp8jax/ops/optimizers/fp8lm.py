"""FP8-LM's AdamW on parameters whose moments, and master weights, share one scale a layer, or a group: a step of it.

Scales come from bounds, which nothing exceeds and which are known before the step: of the largest magnitudes of what is
stored, which the step before has told, of the gradient's and of the learning rate. So a step is one pass over its
arrays, after one over gradients. `_reference` is it in plain JAX, and `_fused` the kernel of
`pallas_kernels/optimizers/fp8lm_triton.py`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from fp8jax.core import blocks, formats, noise, scaling
from fp8jax.core.masters import MasterWeight
from fp8jax.core.qtensor import QTensor, quantize_with_scale
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.dispatch import missing_kernels
from fp8jax.ops.dispatch.choice import (
    Choice,
    capability,
    cast_varying_like,
    choose_impl,
    missing_triton,
    record_choice,
    reshard_like,
)
from fp8jax.ops.dispatch.partition import run_partitioned
from fp8jax.ops.dispatch.shard_notation import DimSharding, notation
from fp8jax.ops.optimizers import map_leaves
from fp8jax.ops.optimizers.adamw import load
from fp8jax.ops.optimizers.adamw_kernel import ShardStride, reshard_array_like
from fp8jax.ops.optimizers.adamw_leaf import Adam, Form, apply_change, exact_update, scale_and_clip

# Adam's largest direction is 7.3 for the default decays and 22 for b2 = 0.9999, by the inequality of Cauchy and
# Schwarz; rounding of moments adds to that.
_MAX_DIRECTION = 64.0
_FP32_MAX = np.finfo(np.float32).max
# Finite gradients count with this magnitude at most: bias-corrected first moments stay finite. A second moment may be
# Inf, of its own weight alone, since a scale of the tensor that fits it would take the codes of all others.
_MAX_GRADIENT = np.float32(2.0**126)
# Of sums of a few fp32 terms.
_ROUNDING_MARGIN = np.float32(1 + 2**-20)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["grad", "weight", "master", "mu", "nu", "amax", "noise"],
    meta_fields=["decays"],
)
@dataclasses.dataclass(frozen=True)
class FP8LMLeaf:
    """What a step needs of one parameter.

    Attributes:
        grad: gradient, an array or a `QTensor`.
        weight: the working copy of the master weight; or that itself, an array or a `MasterWeight`.
        master: master weight, fp16 codes, of a parameter that is too small for them fp32; None where `weight` is it.
        mu: first moment, FP8 codes or fp32.
        nu: second moment, fp16 codes or fp32.
        amax: largest magnitudes of what is in codes, stacked along a new first axis, each of its scale's shape.
        noise: two random words for stochastic rounding of the master weight, or None.
        decays: whether the parameter decays; static.
    """

    grad: Any
    weight: Array | MasterWeight
    master: Any
    mu: Any
    nu: Any
    amax: Array
    noise: Array | None
    decays: bool

    @property
    def quantized_tensors(self) -> tuple[QTensor, ...]:
        """What is in codes."""
        return tuple(q for q in (self.master, self.mu, self.nu) if q is not None)

    @property
    def is_quantized(self) -> bool:
        """Whether anything is in codes."""
        return isinstance(self.mu, QTensor)

    @property
    def working_copy(self) -> Array:
        """The parameter as a working copy."""
        assert not isinstance(self.weight, MasterWeight), "a master by parts has none"
        return self.weight

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the parameter that the caller holds."""
        return self.weight.dtype

    @property
    def exact(self) -> bool:
        """As of `adamw_leaf.AdamLeaf`."""
        return self.master is None and (isinstance(self.weight, MasterWeight) or self.noise is not None)

    @property
    def has_grad_codes(self) -> bool:
        """Whether the gradient is FP8 codes under scales of the parameter's own kind."""
        g, mu = self.grad, self.mu
        if not isinstance(g, QTensor) or g.spec.format not in ("e4m3", "e5m2"):
            return False
        return (g.spec.granularity, g.scale.shape) == (mu.spec.granularity, mu.scale.shape)


class StepResult(NamedTuple):
    """What a step makes of one parameter: its change or what it is now, and what is stored in codes."""

    result: Any
    master: QTensor | None
    mu: QTensor
    nu: QTensor
    amax: Array


def apply(form: Form, leaves: Sequence[FP8LMLeaf], adam: Adam, impl: str = "auto") -> list[StepResult]:
    """A step of some parameters.

    Args:
        form: "update" gives the distance of a working copy from the new master weight, or the change of a parameter
            that is its own (`adamw_leaf.apply_change`); "step" the new parameter.
        leaves: the parameters.
        adam: the scalars of the step; `apply_if` is for "step".
        impl: "auto", "xla" or "triton"; see `choose`.

    Raises:
        ValueError: `impl` is unknown, or it is "triton", and the kernel cannot take a parameter.
    """
    impls = [record_choice("fp8lm_adamw", choose(leaf, impl)).impl for leaf in leaves]

    def step_leaves(leaf_impls: Sequence[str], leaves: Sequence[FP8LMLeaf]) -> list[StepResult]:
        static, arguments = adam.split_static()
        plain = [leaf for name, leaf in zip(leaf_impls, leaves, strict=True) if name == "xla"]
        reference_rows = iter(map_leaves.map_leaves(_step_leaf, (form, static), arguments, plain))
        rows = [
            _fused(form, adam, leaf) if name == "triton" else next(reference_rows)
            for name, leaf in zip(leaf_impls, leaves, strict=True)
        ]
        scalars = list(vars(adam).values())
        return [cast_varying_like(row, leaf, scalars) for row, leaf in zip(rows, leaves, strict=True)]

    if impl == "auto" and leaves:
        missing_kernels.warn_if_missing()
    reference = functools.partial(step_leaves, ["xla"] * len(leaves))
    if "triton" not in impls:
        return reference(leaves)
    fused = functools.partial(step_leaves, impls)
    default = None if impl == "triton" else reshard_like(fused, reference, (leaves,))
    results: list[StepResult] = jax.lax.platform_dependent(leaves, cuda=fused, default=default)
    return results


def choose(leaf: FP8LMLeaf, impl: str) -> Choice:
    """What computes the step of a parameter.

    Raises:
        ValueError: as `apply`.
    """
    return choose_impl(
        impl, lambda: missing_triton("optimizers.fp8lm_triton") or _unsupported_reason(leaf), "the fused kernel"
    )


def _unsupported_reason(leaf: FP8LMLeaf) -> str | None:
    from pallas_kernels.optimizers import fp8lm_triton

    if leaf.mu.spec.granularity != "tensor":
        return f"scales are of groups of {leaf.mu.spec.group_size}, and the kernel takes one a layer"
    if isinstance(leaf.weight, MasterWeight) and leaf.dtype != jnp.bfloat16:
        return f"the kernel has remainders of bf16 master weights, and not of {leaf.dtype}"
    grad = (
        leaf.grad.codes.dtype
        if leaf.has_grad_codes
        else jnp.float32
        if isinstance(leaf.grad, QTensor)
        else leaf.grad.dtype
    )
    return fp8lm_triton.unsupported_reason(leaf.mu.shape, grad, leaf.dtype, leaf.mu.codes.dtype, leaf.noise is not None)


def block_amax(q: QTensor) -> Array:
    """The largest finite magnitude of each block of a quantized array, of its scale's shape."""
    codes = jnp.abs(formats.get(q.spec.format).decode(q.codes))
    codes = jnp.where(jnp.isfinite(codes), codes, 0.0)
    return _finite_product(blocks.reduce(codes, q.spec.block_shape(q.shape), jnp.max, 0.0), q.scale)


def _finite_product(codes: Array, scale: Array) -> Array:
    values = codes * scale
    return jnp.where(jnp.isfinite(values), values, 0.0)


def _stored_amax(amax_in_units: Array, fmt: formats.Format, scale: Array) -> Array:
    """The largest magnitude that is stored, of that in units of a scale before; itself where it is beyond all codes."""
    return jnp.where(
        amax_in_units > fmt.max, amax_in_units * scale, _finite_product(fmt.decode(fmt.encode(amax_in_units)), scale)
    )


def array_block_amax(x: Array, block: tuple[int, ...]) -> Array:
    """The largest finite magnitude of each block of an array."""
    values = jnp.abs(x.astype(jnp.float32))
    return blocks.reduce(jnp.where(jnp.isfinite(values), values, 0.0), block, jnp.max, 0.0)


def pow2_scale_from_bound(bound: Array, fmt: formats.Format) -> Array:
    """The power of two by which magnitudes up to a bound are codes of a format.

    Scales are powers of two, so that what did not change is not rounded anew when its scale does. They are finite: a
    bound that is not comes from values that their own codes show, and must not spoil those beside them.
    """
    bound = bound * _ROUNDING_MARGIN
    bound = jnp.where(bound <= _FP32_MAX, bound, _FP32_MAX)
    return formats.decode_e8m0(formats.encode_e8m0(scaling.to_scale(bound, fmt), "up"))


def _new_scales(leaf: FP8LMLeaf, adam: Adam) -> list[Array]:
    """Scales of what is in codes after the step, each of the shape of the present one."""
    grad_scale = 1.0 if adam.grad_scale is None else adam.grad_scale
    if leaf.has_grad_codes:
        grad_amax = jnp.minimum(jnp.abs(grad_scale) * block_amax(leaf.grad), _MAX_GRADIENT)  # its scale may be of zeros
        grad_square_amax = jnp.square(grad_amax)
    else:
        values, block = (
            scale_and_clip(load(leaf.grad), adam.grad_scale, _MAX_GRADIENT),
            leaf.mu.spec.block_shape(leaf.mu.shape),
        )
        # A gradient that is finite may have a square that is not: its own second moment then is Inf.
        grad_amax, grad_square_amax = array_block_amax(values, block), array_block_amax(jnp.square(values), block)
    *weight_amaxes, mu_amax, nu_amax = leaf.amax
    rate = jnp.abs(jnp.asarray(adam.rate, jnp.float32))
    bounds = [w + rate * (_MAX_DIRECTION + adam.weight_decay * w) for w in weight_amaxes]
    b1, b2 = (jnp.asarray(b, jnp.float32) for b in (adam.b1, adam.b2))
    bounds += [b1 * mu_amax + (1 - b1) * grad_amax, b2 * nu_amax + (1 - b2) * grad_square_amax]
    return [
        pow2_scale_from_bound(bound, formats.get(q.spec.format))
        for bound, q in zip(bounds, leaf.quantized_tensors, strict=True)
    ]


def _scalars(adam: Adam, decays: bool) -> Any:
    from pallas_kernels.optimizers import fp8lm_triton

    count = jnp.asarray(adam.count, jnp.float32)
    return fp8lm_triton.FP8LMScalars(
        *(adam.rate, adam.weight_decay if decays else 0.0),
        *(adam.b1, 1 - adam.b1, adam.b2, 1 - adam.b2),
        *(1 / (1 - adam.b1**count), 1 / (1 - adam.b2**count)),
        *(adam.eps, adam.eps_root, noise.decay_dither(adam.count)[0], adam.grad_scale, adam.apply_if),
    )


def _step_leaf(static: Any, scalars: Any, leaf: FP8LMLeaf) -> StepResult:
    form, constants = static
    return _reference(form, Adam(**dict(constants), **scalars), leaf)


def _reference(form: Form, adam: Adam, leaf: FP8LMLeaf) -> StepResult:
    """The step in plain JAX; each operation is the kernel's."""
    one_minus_b1, one_minus_b2 = (jnp.asarray(1 - b, jnp.float32) for b in (adam.b1, adam.b2))
    count = jnp.asarray(adam.count, jnp.float32)
    corrections = [1 / (1 - b**count) for b in (adam.b1, adam.b2)]
    rate, decay = jnp.asarray(adam.rate, jnp.float32), adam.weight_decay if leaf.decays else 0.0
    g = scale_and_clip(load(leaf.grad), adam.grad_scale, _MAX_GRADIENT)
    m = one_minus_b1 * g + adam.b1 * load(leaf.mu)
    old_v = load(leaf.nu)
    decayed_v = adam.b2 * old_v
    # One that is not zero stays so where fp32 has no number for its decay.
    v = one_minus_b2 * (g * g) + jnp.where((old_v > 0) & (decayed_v < formats.TINY), formats.TINY, decayed_v)
    direction = (m * corrections[0]) / (jnp.sqrt(v * corrections[1] + adam.eps_root) + adam.eps)
    weight = (
        leaf.weight.astype(jnp.float32)
        if leaf.master is None
        else reconcile_master(load(leaf.master), leaf.working_copy)
    )
    change = -rate * (direction + decay * weight)
    *master_scales, mu_scale, nu_scale = _new_scales(leaf, adam)
    mu = quantize_with_scale(m, leaf.mu.spec, mu_scale, dither=noise.decay_dither(adam.count, adam.b1))
    nu = quantize_with_scale(v, leaf.nu.spec, nu_scale)
    if leaf.master is None:
        master, result = None, apply_change(form, leaf, change)
    else:
        new, scale = weight + change, master_scales[0]
        master = _quantize_master(new, leaf.master.spec, scale, leaf.noise)
        max_code = formats.get(leaf.master.spec.format).max
        given_copy, block = leaf.working_copy.astype(jnp.float32), leaf.master.spec.block_shape(new.shape)
        # What a copy was changed to lies beyond the bound: the next step, which knows a larger one, reads it there.
        is_saturated = (jnp.abs(new) * blocks.broadcast_blocks(1 / scale, new.shape, block) > max_code) & jnp.isfinite(
            new
        )
        result = jnp.where(is_saturated, given_copy, load(master))
        result = (result - given_copy if form == "update" else result).astype(leaf.dtype)
    amaxes = [block_amax(q) for q in (master, mu, nu) if q is not None]
    if master is not None:
        amax_in_units = array_block_amax(new, block) * (1 / scale)
        amaxes[0] = jnp.where(amax_in_units > max_code, jnp.minimum(amax_in_units, _FP32_MAX) * scale, amaxes[0])
    row = StepResult(result, master, mu, nu, jnp.stack(amaxes))
    if adam.apply_if is None:
        return row
    old_row = StepResult(leaf.weight, leaf.master, leaf.mu, leaf.nu, leaf.amax)
    return jax.tree.map(lambda new, old: jnp.where(adam.apply_if, new, old), row, old_row)


def reconcile_master(master: Array, working_copy: Array) -> Array:
    """Master weights, or working copies where these are no roundings of them: somebody has changed them.

    Args:
        master: fp32 values of master weights.
        working_copy: the working copies, in any floating dtype.
    """
    half, normal = half_step(working_copy.dtype)
    working_copy = working_copy.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(master, jnp.uint32) & np.uint32(0x7F800000)
    binade = jnp.maximum(jax.lax.bitcast_convert_type(bits, jnp.float32), normal)
    return jnp.where(jnp.abs(working_copy - master) <= binade * np.float32(half), master, working_copy)


def half_step(dtype: DTypeLike) -> tuple[float, float]:
    """How far rounding to a dtype takes a number, over the power of two below it, and the least of such powers.

    A sixteenth more: a change that is added in that dtype is rounded itself.
    """
    float_info = jnp.finfo(dtype)
    normal = float(float_info.smallest_normal)
    return float(float_info.eps) / 2 * (1 + 2**-4), normal if normal > np.finfo(np.float32).tiny else 0.0


def _quantize_master(values: Array, spec: QuantSpec, scale: Array, seed: Array | None) -> QTensor:
    rounding_spec = spec if seed is None else dataclasses.replace(spec, rounding="stochastic")
    return dataclasses.replace(quantize_with_scale(values, rounding_spec, scale, seed=seed), spec=spec)


class _MasterOperands(NamedTuple):
    grad: Array
    weight: Any
    codes: tuple[Array, ...]
    grad_scale: Array
    scales: tuple[Array, ...]
    new_scales: tuple[Array, ...]
    scalars: tuple[Array | None, ...]
    noise: Array | None


def _fused(form: Form, adam: Adam, leaf: FP8LMLeaf) -> StepResult:
    from pallas_kernels.optimizers import fp8lm_triton

    shape, layer_axes, spec = leaf.mu.shape, leaf.mu.spec.layer_axes, leaf.mu.spec
    requested_form, form = form, "step" if leaf.exact else form
    names = [f"axis{i}" for i in range(len(shape))]
    if leaf.noise is not None:
        # Noise goes by places in the whole array, which the kernel finds where no more than two axes are cut.
        matrix = (0, max(len(shape) - 2, 1))
        names = [name if i in matrix else "-" for i, name in enumerate(names)]
    fmts = [formats.get(q.spec.format) for q in leaf.quantized_tensors]

    def step_shard(sharding: DimSharding, *operands: Any) -> Any:
        x = _MasterOperands(*operands)
        scale_rows = [x.grad_scale, *x.scales, *x.new_scales, *(1 / scale for scale in x.new_scales)]
        seed, run = x.noise, None
        if seed is not None:
            stride = ShardStride.from_sharding(sharding, names, shape, x.grad.shape)
            assert stride is not None, "of two axes"
            run = (stride.inner, stride.stride or 1) if sharding.axes else None
            seed = jnp.append(seed, stride.first.astype(jnp.uint32))
        result, codes, amax = fp8lm_triton.fp8lm(
            *x[:3],
            jnp.stack([scale.reshape(-1) for scale in scale_rows]),
            fp8lm_triton.FP8LMScalars(*x.scalars),
            form=form,
            words=seed,
            run=run,
            rounding=half_step(leaf.dtype),
            compute_capability=capability(),
        )
        # A scale spans all but stacked axes: each device has found the largest of its part.
        amax = sharding.pmax(jnp.max(amax, axis=-1), " ".join(name for name in names[layer_axes:] if name != "-"))
        # Rounding keeps the order: the largest code is that of the largest value.
        rows = [
            _stored_amax(block_maxima.reshape(scale.shape), fmt, scale)
            for block_maxima, fmt, scale in zip(amax, fmts, x.new_scales, strict=True)
        ]
        return result, codes, jnp.stack(rows)

    array_dims, scale_dims = notation(spec, shape, " ".join(names))
    scales = _new_scales(leaf, adam)
    scalars = tuple(None if x is None else jnp.asarray(x).astype(jnp.float32) for x in _scalars(adam, leaf.decays))
    weight: Any = leaf.weight
    weight = (weight.high, weight.remainder) if isinstance(weight, MasterWeight) else weight
    weight_dims, num_quantized = (
        (array_dims, array_dims) if isinstance(weight, tuple) else array_dims,
        len(leaf.quantized_tensors),
    )
    codes_dims, scales_dims = (array_dims,) * num_quantized, (scale_dims,) * num_quantized
    ins = (array_dims, weight_dims, codes_dims, scale_dims, scales_dims, scales_dims, ("",) * len(scalars), "-")
    grad = leaf.grad.codes if leaf.has_grad_codes else load(leaf.grad) if isinstance(leaf.grad, QTensor) else leaf.grad
    grad_scale = leaf.grad.scale if leaf.has_grad_codes else jnp.ones_like(leaf.mu.scale)
    operands = _MasterOperands(
        *(grad, weight, tuple(q.codes for q in leaf.quantized_tensors), grad_scale),
        *(tuple(q.scale for q in leaf.quantized_tensors), tuple(scales), scalars, leaf.noise),
    )
    dtypes = str(leaf.mu.spec), str(jax.tree.map(lambda x: x.dtype, weight)), num_quantized
    static = (form, dtypes, leaf.has_grad_codes, [x is None for x in scalars], leaf.noise is None, layer_axes)
    result, codes, amaxes = run_partitioned(
        f"fp8lm_{form}", static, step_shard, operands, ins, (weight_dims, codes_dims, f"- {scale_dims}")
    )
    result = MasterWeight(*result) if isinstance(result, tuple) else result
    if adam.apply_if is not None:
        scales, amaxes = jax.tree.map(
            lambda new, old_row: jnp.where(adam.apply_if, new, old_row),
            (scales, amaxes), ([q.scale for q in leaf.quantized_tensors], leaf.amax),
        )  # fmt: skip
    *master, mu, nu = (
        dataclasses.replace(q, codes=x, scale=scale)
        for q, x, scale in zip(leaf.quantized_tensors, codes, scales, strict=True)
    )
    new_row = StepResult(result, master[0] if master else None, mu, nu, amaxes)
    old = StepResult(leaf.weight, leaf.master, leaf.mu, leaf.nu, leaf.amax)
    row: StepResult = jax.tree.map(reshard_array_like, new_row, old)
    return row if requested_form == form else row._replace(result=exact_update(row.result, leaf.weight))


def fold_in_master_seed(seed: Array, path: str) -> Array:
    """The words of a step for the master weight of the parameter at a path."""
    return noise.fold_in_seed(seed, noise.param_seed(f"master/{path}"))
