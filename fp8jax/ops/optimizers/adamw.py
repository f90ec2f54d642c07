"""AdamW with moments that may be stored in 8 bits: decode, update in fp32, encode; by a fused kernel or in JAX."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fp8jax.core import expansion, formats, noise
from fp8jax.core.masters import MasterWeight
from fp8jax.core.noise import round_stochastic
from fp8jax.core.qtensor import QTensor
from fp8jax.ops.dispatch.choice import call_traced_once, capability
from fp8jax.ops.dispatch.partition import UNSHARDED, DimSharding, on_one_device, run_partitioned
from fp8jax.ops.optimizers.leaf import (
    DEAD_M_RATIO,
    DEAD_V_HIGH,
    DEAD_V_LOW,
    DEAD_V_MID,
    DEAD_V_RATIO,
    Adam,
    Leaf,
    Moment,
    StepResult,
    apply_change,
    is_quantized,
    load,
    scale_and_clip,
    store,
    suppress_dead_elements,
)
from fp8jax.ops.optimizers.step import FusedOptimizer

# Up to this b1, expanded codes of first moments are rounded to nearest. At 0.99 that would stop their decay too early:
# after their last gradient, weights would move a quarter too far.
DITHER_FROM_B1 = 0.98


class _Operands(NamedTuple):
    """The arrays of a leaf, which `run_partitioned` shards, and the scalars."""

    grad: Array
    weight: Any
    mu: tuple[Array, ...]
    nu: tuple[Array, ...]
    scalars: tuple[Array | None, ...]
    weight_seed: Array | None
    nu_seed: Array | None
    salt: Array | None


def needs_dither(moment: Moment, b1: Any) -> bool:
    """Whether a first moment is rounded by `fp8jax.core.noise.decay_dither`, so that its decay is not lost."""
    if not isinstance(moment, QTensor):
        return False
    # Expanded codes are dense enough for a fast decay. The value of an array is not known.
    return not moment.spec.expand or isinstance(b1, Array) or bool(b1 > DITHER_FROM_B1)


def unsupported_reason(adam: Adam, leaf: Leaf) -> str | None:
    """The reason why the kernel does not support a leaf with quantized moments, or None."""
    from pallas_kernels.optimizers import adamw_triton

    if adam.nesterov:
        return "the kernel has no nesterov"
    if isinstance(leaf.weight, MasterWeight) and leaf.dtype != jnp.bfloat16:
        return f"the kernel has remainders of bf16 master weights, and not of {leaf.dtype}"
    specs = [moment.spec for moment in leaf.quantized_arrays]
    if any(spec.expand == "coat" for spec in specs):
        return "the kernel does not support expand='coat', the exponents of the paper; use expand=True"
    in_groups = all(spec.granularity == "group" and spec.axis in (-1, len(leaf.grad.shape) - 1) for spec in specs)
    if not in_groups or any(spec.rounding != "nearest" or spec.group_size != leaf.group_size for spec in specs):
        stored_specs = " and ".join(map(str, specs))
        return f"moments are stored as {stored_specs}, not in the same groups along the last axis, to nearest"
    mu, nu = (tuple(x.dtype for x in _moment_arrays(moment)) for moment in (leaf.mu, leaf.nu))
    return adamw_triton.unsupported_reason(leaf.grad.shape, leaf.grad.dtype, leaf.dtype, mu, nu, leaf.group_size)


class ShardStride(NamedTuple):
    """The positions of the groups or elements of a shard in the whole array.

    Group n of the shard is group `first + n // inner * stride + n % inner` of the whole.

    Attributes:
        first: number of the shard's first group, uint32.
        inner: length of a run of groups that are adjacent in the whole.
        stride: distance between the starts of two runs; 0 if there is one run.
    """

    first: Array
    inner: int
    stride: int

    @classmethod
    def from_sharding(
        cls, sharding: DimSharding, names: Sequence[str], global_counts: Sequence[int], shard_counts: Sequence[int]
    ) -> "ShardStride | None":
        """The stride of a shard, or None if its runs have no constant distance.

        Args:
            global_counts, shard_counts: groups along each axis, of the whole and of the shard.
        """
        runs, stride = [[1, 1]], 1  # (groups, stride), innermost first
        first = jnp.zeros((), jnp.uint32)
        for name, n, shard_count in zip(reversed(names), reversed(global_counts), reversed(shard_counts), strict=True):
            offset = jnp.asarray(sharding.shard_offset(name, shard_count)).astype(jnp.uint32)
            first = first + offset * np.uint32(stride % 2**32)
            if stride == runs[-1][0] * runs[-1][1]:
                runs[-1][0] *= shard_count
            elif shard_count > 1:
                runs.append([shard_count, stride])
            stride *= n
        return None if len(runs) > 2 else cls(first, runs[0][0], runs[1][1] if len(runs) > 1 else 0)


def make_scalars(adam: Adam, decays: bool, is_dithered: bool) -> tuple[Array | None, ...]:
    """The fp32 scalars of a step for the kernel."""
    from pallas_kernels.optimizers import adamw_triton

    count = jnp.asarray(adam.count, jnp.float32)
    scalars = adamw_triton.AdamWScalars(
        adam.rate,
        adam.weight_decay if decays else 0.0,
        *(adam.b1, 1 - adam.b1, adam.b2, 1 - adam.b2),
        *(1 - adam.b1**count, 1 - adam.b2**count),
        *(adam.eps, adam.eps_root),
        *(adam.grad_scale, adam.apply_if, adam.max_direction),
        noise.decay_dither(adam.count)[0] if is_dithered else None,
    )
    return tuple(None if x is None else jnp.asarray(x).astype(jnp.float32) for x in scalars)


def step_leaves(adam: Adam, leaves: Sequence[Leaf]) -> list[StepResult]:
    """The step of leaves with quantized moments, by the fused kernel."""
    scalars = functools.cache(functools.partial(make_scalars, adam))
    is_decay_zero = isinstance(adam.weight_decay, float) and adam.weight_decay == 0
    results = []
    for leaf in leaves:
        is_dithered = needs_dither(leaf.mu, adam.b1)
        step = functools.partial(_step_leaf, is_dithered, leaf.in_place or (leaf.decays and not is_decay_zero))
        # Leaves of a kind share a program, because their salts are arguments of it.
        salt = None if leaf.salt is None else np.uint32(leaf.salt)
        plain_leaf = dataclasses.replace(leaf, salt=None)
        results.append(call_traced_once(step, plain_leaf, salt, scalars(leaf.decays, is_dithered), adam.seed))
    return results


def _step_leaf(
    is_dithered: bool,
    needs_weight: bool,
    leaf: Leaf,
    salt: Array | None,
    scalars: tuple[Array | None, ...],
    seed: Array | None,
) -> StepResult:
    """The step of a leaf without its salt, which is an argument; `seed` is that of the step."""
    from pallas_kernels.optimizers import adamw_triton

    mu_storage = _kernel_storage(leaf.mu, is_signed=True, is_dithered=is_dithered)
    nu_storage = _kernel_storage(leaf.nu, is_signed=False, is_stochastic=salt is not None)
    size = leaf.group_size

    def groups(shape: Sequence[int]) -> list[int]:
        return [*shape[:-1], -(-shape[-1] // size)]

    def kernel(x: _Operands, run: tuple[int, int] | None, in_place: bool, dtype: Any) -> Any:
        return adamw_triton.adamw(
            *x[:4],
            adamw_triton.AdamWScalars(*x.scalars),
            mu_storage=mu_storage,
            nu_storage=nu_storage,
            dead_elements=dead_element_params(),
            group_size=size,
            in_place=in_place,
            dtype=dtype,
            seed=x.weight_seed,
            nu_seed=x.nu_seed,
            salt=0 if x.salt is None else x.salt,
            run=run,
            compute_capability=capability(),
        )

    def step_part(
        sharding: DimSharding, names: Sequence[str], global_counts: Sequence[int], x: _Operands, *kernel_args: Any
    ) -> Any:
        """The step of a shard. The noise of its second moment numbers the groups of the whole array."""
        if x.nu_seed is None or not sharding.axes:
            return kernel(x, None, *kernel_args)
        stride = ShardStride.from_sharding(sharding, names, global_counts, groups(x.grad.shape))
        if stride is not None:
            run = stride.inner, stride.stride or 1
            return kernel(x._replace(nu_seed=_advance_seed(x.nu_seed, stride.first, size)), run, *kernel_args)

        def step_row(i: Array) -> Any:
            number = (sharding.shard_offset(names[0], x.grad.shape[0]) + i).astype(jnp.uint32)
            seed = _advance_seed(x.nu_seed, number * np.uint32(math.prod(global_counts[1:]) % 2**32), size)
            grad, weight, mu, nu = jax.tree.map(lambda array: array[i], tuple(x[:4]))
            row_operands = x._replace(grad=grad, weight=weight, mu=mu, nu=nu, nu_seed=seed)
            return step_part(sharding, names[1:], global_counts[1:], row_operands, *kernel_args)

        return jax.lax.map(step_row, jnp.arange(x.grad.shape[0]))

    def step_shard(sharding: DimSharding, names: Sequence[str], shape: Sequence[int], x: _Operands) -> Any:
        if x.weight_seed is None or not sharding.axes:
            return step_part(sharding, names, groups(shape), x, leaf.in_place, leaf.dtype)
        # The kernel numbers the weights of its shard; their noise numbers those of the whole array.
        assert x.weight is not None
        change, mu, nu = step_part(sharding, names, groups(shape), x._replace(weight_seed=None), False, jnp.float32)
        offsets = [sharding.shard_offset(name, n) for name, n in zip(names, x.grad.shape, strict=True)]
        weight = x.weight.astype(jnp.float32) + change
        weight = round_stochastic(weight, x.weight_seed, global_shape=shape, offsets=offsets)
        apply_if = adamw_triton.AdamWScalars(*x.scalars).apply_if
        return weight if apply_if is None else jnp.where(apply_if > 0, weight, x.weight), mu, nu

    def call(*operands: Any) -> Any:
        x = _Operands(*operands)
        names = [f"axis{i}" for i in range(x.grad.ndim)]
        dims, shape = " ".join(names), x.grad.shape
        # Codes or values, then one entry for each group.
        moments = [(dims, *[f"{dims}/{size}"] * (len(arrays) - 1)) for arrays in (x.mu, x.nu)]
        if on_one_device():
            return step_shard(UNSHARDED, names, shape, x)
        dtypes = str(leaf.dtype), None if remainder is None else str(remainder.dtype)
        static = (mu_storage, nu_storage), size, dtypes, x.grad.shape, [s is None for s in x.scalars]
        weight_dims = dims if remainder is None else (dims, dims)
        ins = (dims, weight_dims, *moments, ("",) * len(x.scalars), "-", "-", "")
        return run_partitioned(
            "adamw_step" if leaf.in_place else "adamw_update", static,
            lambda sharding, *shards: step_shard(sharding, names, shape, _Operands(*shards)),
            operands, ins, (weight_dims, *moments),
        )  # fmt: skip

    weight: Any = leaf.weight
    weight, remainder = (weight.high, weight.remainder) if isinstance(weight, MasterWeight) else (weight, None)
    parts = weight if remainder is None else (weight, remainder)
    moments = _moment_arrays(leaf.mu), _moment_arrays(leaf.nu)
    nu_seed = None if salt is None or seed is None else leaf.advance_seed(seed)
    weight_part = parts if needs_weight else None
    operands = _Operands(leaf.grad, weight_part, *moments, scalars, leaf.weight_seed, nu_seed, salt)
    result, mu, nu = _vmap_as_leading_axis(call)(*operands)
    result = result if remainder is None else MasterWeight(*result)
    return StepResult(result, None, _to_moment(mu, leaf.mu), _to_moment(nu, leaf.nu))


def _advance_seed(seed: Array | None, groups: Array, size: int) -> Array:
    """The words of noise for a shard that begins so many groups of a size after the whole array."""
    assert seed is not None
    return noise.advance_counter(seed, groups * np.uint32(size // 8))


def _vmap_as_leading_axis(function: Any) -> Any:
    """The function of `_Operands` with a rule for `jax.vmap`, which makes the mapped axis a leading axis of the arrays.

    Groups do not depend on leading axes. Noise does: with seeds, the kernel runs once for each index.
    """

    @jax.custom_batching.custom_vmap
    def mapped(*operands: Any) -> Any:
        return function(*operands)

    @mapped.def_vmap
    def rule(size: int, batched: Any, *operands: Any) -> Any:
        if any(seed is not None for seed in operands[5:]):

            def one(i: Array) -> Any:
                return mapped(*jax.tree.map(lambda x, is_mapped: x[i] if is_mapped else x, operands, tuple(batched)))

            results = jax.lax.map(one, jnp.arange(size))
            return results, jax.tree.map(lambda _: True, results)
        if any(jax.tree.leaves(batched[4])):
            raise NotImplementedError(
                "impl 'triton' does not support jax.vmap over the scalars of the step; use impl='xla'"
            )

        def broadcast(x: Array, is_mapped: bool) -> Array:
            return x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))

        results = mapped(*jax.tree.map(broadcast, operands[:4], tuple(batched[:4])), *operands[4:])
        return results, jax.tree.map(lambda _: True, results)

    return mapped


def _moment_arrays(moment: Moment) -> tuple[Array, ...]:
    if not isinstance(moment, QTensor):
        return (moment,)
    moment.check_blocks()
    return tuple(x for x in (moment.codes, moment.scale, moment.expansion) if x is not None)


def _to_moment(arrays: tuple[Array, ...], like: Moment) -> Moment:
    if not isinstance(like, QTensor):
        return arrays[0]
    exponents = arrays[2] if like.spec.expand else None
    return dataclasses.replace(like, codes=arrays[0], scale=arrays[1], expansion=exponents)


def dead_element_params() -> Any:
    """The constants of `dead_elements`, for the kernel."""
    from pallas_kernels.optimizers import adamw_triton

    return adamw_triton.DeadElementParams(DEAD_M_RATIO, DEAD_V_RATIO, DEAD_V_HIGH, DEAD_V_MID, DEAD_V_LOW)


def _kernel_storage(moment: Moment, is_signed: bool, is_stochastic: bool = False, is_dithered: bool = False) -> Any:
    from pallas_kernels.optimizers import adamw_triton

    if not isinstance(moment, QTensor):
        return None
    spec, fmt = moment.spec, formats.get(moment.spec.format)
    ratio = fmt.normal_range**expansion.TARGET_FILL if is_stochastic else fmt.expansion_range
    expanded = (ratio, expansion.MIN_EXPONENT, expansion.MAX_EXPONENT) if spec.expand else None
    smallest = None if spec.flush_to_zero else fmt.smallest
    storage = adamw_triton.Storage(fmt.max, expanded, smallest, is_signed)
    if is_dithered:
        return dataclasses.replace(storage, dither_format=(fmt.mantissa_bits, fmt.smallest_normal))
    if not is_stochastic:
        return storage
    ratios = (fmt.normal_range**expansion.MIN_FILL, fmt.normal_range)
    return dataclasses.replace(storage, noise=adamw_triton.Noise(fmt.mantissa_bits, fmt.smallest_normal, ratios))


def reference(adam: Adam, leaves: Sequence[Leaf]) -> list[StepResult]:
    """The step in plain JAX, also of leaves with a master weight in fp32."""
    grads = [load(leaf.grad) if is_quantized(leaf.grad) else leaf.grad for leaf in leaves]
    mus, nus = [leaf.mu for leaf in leaves], [leaf.nu for leaf in leaves]
    directions, ms, vs = adam_direction(grads, mus, nus, adam)
    # Dead elements are found by moments alone: with nesterov a gradient may cancel the moment of a live one.
    plain_directions = directions
    if adam.nesterov:
        plain_directions, _, _ = adam_direction(grads, mus, nus, dataclasses.replace(adam, nesterov=False))

    def step_leaf(leaf: Leaf, grad: Array, direction: Array, plain_direction: Array, m: Array, v: Array) -> StepResult:
        m, v = suppress_dead_elements(grad, plain_direction, m, v, leaf.mu, leaf.nu, adam)
        is_dithered = needs_dither(leaf.mu, adam.b1)
        mu = store(m, leaf.mu, dither=noise.decay_dither(adam.count, adam.b1) if is_dithered else None)
        nu_seed = None if leaf.salt is None else leaf.advance_seed(noise.fold_in_seed(adam.seed, leaf.salt))
        nu = store(v, leaf.nu, nu_seed, row_length=leaf.padded_row)
        if adam.max_direction is not None:
            direction = clip_finite(direction, adam.max_direction)
        value = leaf.value
        if leaf.decays:
            direction = direction + adam.weight_decay * value
        change = jnp.asarray(-adam.rate, jnp.float32) * direction
        if leaf.master is None:
            return StepResult(apply_change(leaf, change), None, mu, nu)
        master = value + change
        weight = master if leaf.in_place else master - leaf.weight.astype(jnp.float32)
        return StepResult(weight.astype(leaf.dtype), master, mu, nu)

    return [*map(step_leaf, leaves, grads, directions, plain_directions, ms, vs)]


ADAMW = FusedOptimizer(
    name="adamw",
    reference=reference,
    kernel=step_leaves,
    kernel_module="optimizers.adamw_triton",
    unsupported_reason=unsupported_reason,
)


def adam_direction(grads: Any, mu: Any, nu: Any, adam: Adam) -> tuple[Any, Any, Any]:
    """Adam's bias-corrected direction (Kingma and Ba, Algorithm 1), from moments before they are stored again.

    Finite gradients are clipped to 2^62 (`leaf.scale_and_clip`).

    Args:
        mu: the tree with the first moment, as stored, in each leaf's place.
        nu: the tree with the second moments, likewise.

    Returns:
        The tree of directions m / (sqrt(v) + eps), to be followed downhill, and both trees of moments; all in fp32.
        With `adam.nesterov`, m in the directions is b1 times the next step's moment and 1 - b1 times the gradient, each
        bias-corrected (Dozat, 2016).
    """
    # optax's own functions over the whole tree give the bits of `optax.scale_by_adam`: XLA divides by a bias correction
    # differently if leaves do not share it.
    g = jax.tree.map(lambda x: scale_and_clip(x, adam.grad_scale), grads)
    if adam.nesterov and not any(map(is_quantized, jax.tree.leaves((mu, nu), is_leaf=is_quantized))):
        # XLA would fuse the gradients' computation with these sums, and round them otherwise than optax's.
        g = jax.lax.optimization_barrier(g)
    m = optax.tree.update_moment(g, jax.tree.map(load, mu, is_leaf=is_quantized), adam.b1, 1)
    v = optax.tree.update_moment_per_elem_norm(g, jax.tree.map(load, nu, is_leaf=is_quantized), adam.b2, 2)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a number to an integer's power
        if adam.nesterov:
            next_m_hat = optax.tree.bias_correction(m, adam.b1, optax.safe_increment(adam.count))
            g_hat = optax.tree.bias_correction(g, adam.b1, adam.count)
            m_hat = jax.tree.map(lambda m, g: adam.b1 * m + (1 - adam.b1) * g, next_m_hat, g_hat)
        else:
            m_hat = optax.tree.bias_correction(m, adam.b1, adam.count)
        v_hat = optax.tree.bias_correction(v, adam.b2, adam.count)
    d = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + adam.eps_root) + adam.eps), m_hat, v_hat)
    return d, m, v


def clip_finite(x: Array, limit: Any) -> Array:
    """`x` with finite values clipped to a magnitude; NaN and Inf stay."""
    return jnp.where((jnp.abs(x) > limit) & jnp.isfinite(x), jnp.sign(x) * limit, x)
