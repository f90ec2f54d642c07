"""The values of a moment after a step, before they are stored: those that telemetry compares with the stored codes."""

import functools

import jax.numpy as jnp
from jax import Array

from fp8jax.core import formats
from fp8jax.core.qtensor import QTensor
from fp8jax.ops.dispatch.choice import capability, choose_impl, missing_triton, record_choice, run
from fp8jax.ops.dispatch.partition import DimSharding, notation, run_partitioned
from fp8jax.ops.optimizers.leaf import Adam, load, scale_and_clip
from fp8jax.ops.quantization.statistics import dimension_names


def next_moment(adam: Adam, gradient: Array, moment: QTensor, *, is_squared: bool, impl: str = "auto") -> Array:
    """The fp32 values of a moment after a step, or those before if the step is not taken.

    Args:
        adam: the scalars of the step.
        gradient: fp32, bf16 or fp16, of the moment's shape, before `adam.grad_scale`.
        moment: in codes, before the step.
        is_squared: whether it is the second moment.
        impl: "auto", "xla" or "triton", as in `fp8jax.ops.quantization.quantize.quantize`.
    """
    decay = adam.b2 if is_squared else adam.b1
    grad_scale = 1.0 if adam.grad_scale is None else adam.grad_scale
    factors = jnp.stack([jnp.asarray(x, jnp.float32) for x in (decay, 1 - decay, grad_scale)])
    if adam.apply_if is not None:
        factors = jnp.where(adam.apply_if, factors, jnp.array([1, 0, 1], jnp.float32))
    choice = record_choice("next_moment", choose_impl(impl, lambda: _unsupported_reason(gradient, moment)))
    kernel, reference = (functools.partial(f, is_squared) for f in (_kernel, _reference))
    values: Array = run(choice, impl, gradient, moment, factors, kernel=kernel, reference=reference)
    return values


def _reference(is_squared: bool, gradient: Array, moment: QTensor, factors: Array) -> Array:
    scaled = scale_and_clip(gradient, factors[2])
    value = jnp.square(scaled) if is_squared else scaled
    # A step that is not taken may have gradients that are not finite.
    return factors[0] * load(moment) + jnp.where(factors[1] == 0, 0, factors[1] * value)


def _unsupported_reason(gradient: Array, moment: QTensor) -> str | None:
    if moment.spec.granularity != "group" or moment.spec.axis not in (-1, moment.codes.ndim - 1):
        return f"it reads groups along the last axis, not {moment.spec}"
    if (reason := missing_triton("optimizers.next_moment_triton")) is not None:
        return reason
    from pallas_kernels.optimizers import adamw_triton

    assert moment.spec.group_size is not None
    dtypes = tuple(x.dtype for x in (moment.codes, moment.scale, moment.expansion) if x is not None)
    return adamw_triton.unsupported_reason(
        gradient.shape, gradient.dtype, gradient.dtype, dtypes, dtypes, moment.spec.group_size
    )


def _kernel(is_squared: bool, gradient: Array, moment: QTensor, factors: Array) -> Array:
    dims = dimension_names(gradient.ndim)
    static = is_squared, moment.spec
    operands, ins = (gradient, moment, factors), (dims, notation(moment.spec, moment.shape, dims), "-")
    shard = functools.partial(_next_shard, is_squared)
    values: Array = run_partitioned("next_moment", static, shard, operands, ins, dims)
    return values


def _next_shard(is_squared: bool, _: DimSharding, gradient: Array, moment: QTensor, factors: Array) -> Array:
    from pallas_kernels.optimizers import next_moment_triton

    assert moment.spec.group_size is not None
    return next_moment_triton.next_moment(
        gradient,
        moment.codes,
        moment.scale,
        moment.expansion,
        factors,
        group_size=moment.spec.group_size,
        largest_code=formats.get(moment.spec.format).max,
        is_squared=is_squared,
        compute_capability=capability(),
    )
