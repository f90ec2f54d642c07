"""When the fused AdamW kernel can take a parameter, and how it is called."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fp8jax.core import expansion, formats, noise
from fp8jax.core.masters import MasterWeight
from fp8jax.core.noise import round_stochastically
from fp8jax.core.qtensor import QTensor
from fp8jax.ops.adamw_leaf import Adam as Adam
from fp8jax.ops.adamw_leaf import Form as Form
from fp8jax.ops.adamw_leaf import Leaf as Leaf
from fp8jax.ops.adamw_leaf import Moment as Moment
from fp8jax.ops.adamw_leaf import difference
from fp8jax.ops.choice import Choice, capability, check_impl, missing_triton, triton_or_xla
from fp8jax.ops.cuts import WHOLE, Cut
from fp8jax.ops.partition import on_one_device, partitioned

# Members of a group that no longer matter, as `fp8jax.ops.members.settled` takes them: shares of a group's direction,
# and of its largest second moment.
IDLE, SILENT = 1 / 40, 2.0**-24
RAISED, NEAR, LOWEST = 1 / 2, 1 / 8, 1 / 128
# Expanded codes of first moments that decay more slowly are rounded by noise of the step: to nearest at 0.99 they would
# bring weights a quarter too far after their last gradient.
SLOW = 0.98


class _Operands(NamedTuple):
    grad: Array
    weight: Any
    mu: tuple[Array, ...]
    nu: tuple[Array, ...]
    scalars: tuple[Array | None, ...]
    noise: Array | None
    nu_noise: Array | None


def fades(moment: Moment, b1: Any) -> bool:
    """Whether a first moment is rounded by `fp8jax.core.noise.fading`, so that its decay is not lost.

    With range expansion codes reach down to the smallest value of a group, and lie close enough together for a decay of
    `SLOW` or faster. Nobody knows the decay where it is an array, traced or not.
    """
    if not isinstance(moment, QTensor):
        return False
    return not moment.spec.expand or isinstance(b1, Array) or bool(b1 > SLOW)


def choose(leaf: Leaf, impl: str, nesterov: bool = False) -> Choice:
    """What computes the step of a parameter; with `nesterov`, XLA.

    Raises:
        ValueError: `impl` is unknown; or it is "triton", and the kernel cannot take a quantized parameter.
    """
    check_impl(impl)
    if not leaf.quantized:
        return Choice("xla", "no moment is quantized")
    why = "the kernel has no nesterov" if nesterov else None
    return triton_or_xla(impl, lambda: why or missing_triton("adamw_triton") or _unsupported(leaf), "the fused kernel")


def _unsupported(leaf: Leaf) -> str | None:
    from pallas_kernels import adamw_triton

    if isinstance(leaf.weight, MasterWeight) and leaf.dtype != jnp.bfloat16:
        return f"the kernel has remainders of bf16 master weights, and not of {leaf.dtype}"

    specs = [moment.spec for moment in leaf.quantized]
    if any(spec.expand == "coat" for spec in specs):
        return "expand='coat' takes exponents as the paper does, which the kernel does not; take expand=True"
    in_groups = all(spec.granularity == "group" and spec.axis in (-1, len(leaf.grad.shape) - 1) for spec in specs)
    if not in_groups or any(spec.rounding != "nearest" or spec.group_size != leaf.group_size for spec in specs):
        stored = " and ".join(map(str, specs))
        return f"moments are stored as {stored}, not in the same groups along the last axis, to nearest"
    mu, nu = (tuple(x.dtype for x in _parts(moment)) for moment in (leaf.mu, leaf.nu))
    return adamw_triton.unsupported(leaf.grad.shape, leaf.grad.dtype, leaf.dtype, mu, nu, leaf.group_size)


class Place(NamedTuple):
    """Where the groups of a part, or its elements, lie among those of the whole array.

    Group n of the part is group `first + n // inner * stride + n % inner` of the whole.

    Attributes:
        first: number of the part's first group, uint32.
        inner: groups of the part that follow each other in the whole.
        stride: how many groups further the next such run begins; 0 if all follow each other.
    """

    first: Array
    inner: int
    stride: int

    @classmethod
    def of(cls, cut: Cut, names: Sequence[str], whole: Sequence[int], part: Sequence[int]) -> "Place | None":
        """None where runs of groups have no constant stride.

        Args:
            names: of the axes.
            whole, part: groups along each axis.
        """
        runs, stride = [[1, 1]], 1  # (groups, stride), innermost first
        first = jnp.zeros((), jnp.uint32)
        for name, n, own in zip(reversed(names), reversed(whole), reversed(part), strict=True):
            first = first + jnp.asarray(cut.start(name, own)).astype(jnp.uint32) * np.uint32(stride % 2**32)
            if stride == runs[-1][0] * runs[-1][1]:
                runs[-1][0] *= own
            elif own > 1:
                runs.append([own, stride])
            stride *= n
        return None if len(runs) > 2 else cls(first, runs[0][0], runs[1][1] if len(runs) > 1 else 0)


def scalars_of(adam: Adam, decays: bool, faded: bool) -> tuple[Array | None, ...]:
    """What the kernel is told of a step, fp32, for parameters that decay or not, whose first moment is faded or not."""
    from pallas_kernels import adamw_triton

    count = jnp.asarray(adam.count, jnp.float32)
    scalars = adamw_triton.AdamWScalars(
        adam.rate,
        adam.weight_decay if decays else 0.0,
        *(adam.b1, 1 - adam.b1, adam.b2, 1 - adam.b2),
        *(1 - adam.b1**count, 1 - adam.b2**count),
        *(adam.eps, adam.eps_root),
        *(adam.factor, adam.applied, adam.max_direction),
        noise.fading(adam.count)[0] if faded else None,
    )
    return tuple(None if x is None else jnp.asarray(x).astype(jnp.float32) for x in scalars)


def run(
    form: Form, leaf: Leaf, adam: Adam, scalars: Callable[[bool, bool], tuple[Array | None, ...]] | None = None
) -> tuple[Array, Moment, Moment]:
    """The result and both moments of one parameter, by the fused kernel; `scalars` gives those of `scalars_of`."""
    from pallas_kernels import adamw_triton

    faded = fades(leaf.mu, adam.b1)
    storage = (
        _storage(leaf.mu, signed=True, fading=faded),
        _storage(leaf.nu, signed=False, stochastic=leaf.nu_noise is not None),
    )
    values = (scalars or functools.partial(scalars_of, adam))(leaf.decays, faded)
    asked, form = form, "step" if leaf.exact else form
    reads = form == "step" or (leaf.decays and not (isinstance(adam.weight_decay, float) and adam.weight_decay == 0))
    size = leaf.group_size

    def groups(shape: Sequence[int]) -> list[int]:
        return [*shape[:-1], -(-shape[-1] // size)]

    def kernel(x: _Operands, run: tuple[int, int] | None, form: Form, dtype: Any) -> Any:
        return adamw_triton.adamw(
            *x[:4],
            adamw_triton.AdamWScalars(*x.scalars),
            mu_storage=storage[0],
            nu_storage=storage[1],
            members=members(),
            group_size=size,
            form=form,
            dtype=dtype,
            seed=x.noise,
            nu_seed=x.nu_noise,
            salt=leaf.salt,
            run=run,
            compute_capability=capability(),
        )

    def part(cut: Cut, names: Sequence[str], whole: Sequence[int], x: _Operands, *how: Any) -> Any:
        """The step of a part of the parameter; noise of its second moment goes by numbers of groups of the whole."""
        if x.nu_noise is None or not cut.axes:
            return kernel(x, None, *how)
        place = Place.of(cut, names, whole, groups(x.grad.shape))
        if place is not None:
            run = place.inner, place.stride or 1
            return kernel(x._replace(nu_noise=_later(x.nu_noise, place.first, size)), run, *how)

        def row(i: Array) -> Any:
            number = (cut.start(names[0], x.grad.shape[0]) + i).astype(jnp.uint32)
            words = _later(x.nu_noise, number * np.uint32(math.prod(whole[1:]) % 2**32), size)
            grad, weight, mu, nu = jax.tree.map(lambda array: array[i], tuple(x[:4]))
            own = x._replace(grad=grad, weight=weight, mu=mu, nu=nu, nu_noise=words)
            return part(cut, names[1:], whole[1:], own, *how)

        return jax.lax.map(row, jnp.arange(x.grad.shape[0]))

    def local(cut: Cut, names: Sequence[str], shape: Sequence[int], x: _Operands) -> Any:
        if x.noise is None or not cut.axes:
            return part(cut, names, groups(shape), x, form, leaf.dtype)
        # The kernel numbers weights in its own part; their noise goes by their places in the whole.
        assert x.weight is not None
        change, mu, nu = part(cut, names, groups(shape), x._replace(noise=None), "update", jnp.float32)
        begin = [cut.start(name, n) for name, n in zip(names, x.grad.shape, strict=True)]
        weight = x.weight.astype(jnp.float32) + change
        weight = round_stochastically(weight, x.noise, whole=shape, begin=begin)
        applied = adamw_triton.AdamWScalars(*x.scalars).applied
        return weight if applied is None else jnp.where(applied > 0, weight, x.weight), mu, nu

    def call(*operands: Any) -> Any:
        x = _Operands(*operands)
        names = [f"axis{i}" for i in range(x.grad.ndim)]
        array, shape = " ".join(names), x.grad.shape
        moments = [
            (array, *[f"{array}/{size}"] * (len(parts) - 1)) for parts in (x.mu, x.nu)
        ]  # codes or values, then what there is for each group
        if on_one_device():  # `_over_leading_axes` has mapped it
            return local(WHOLE, names, shape, x)
        kinds = str(leaf.dtype), None if rest is None else str(rest.dtype)
        static = storage, size, kinds, leaf.salt, x.grad.shape, [s is None for s in x.scalars]
        of_weight = array if rest is None else (array, array)
        ins = (array, of_weight, *moments, ("",) * len(x.scalars), "-", "-")
        return partitioned(
            f"adamw_{form}", static,
            lambda cut, *own: local(cut, names, shape, _Operands(*own)), operands, ins, (of_weight, *moments),
        )  # fmt: skip

    weight: Any = leaf.weight
    weight, rest = (weight.high, weight.remainder) if isinstance(weight, MasterWeight) else (weight, None)
    parts = weight if rest is None else (weight, rest)
    moments = _parts(leaf.mu), _parts(leaf.nu)
    operands = _Operands(leaf.grad, parts if reads else None, *moments, values, leaf.noise, leaf.words)
    results = _over_leading_axes(call)(*operands)
    # The kernel's parts are of whole groups; what had others on Explicit axes gets these back.
    result, mu, nu = jax.tree.map(placed, results, (leaf.grad if parts is None else parts, *moments))
    result = result if rest is None else MasterWeight(*result)
    if asked != form:
        result = difference(result, leaf.weight)
    return result, _restored(mu, leaf.mu), _restored(nu, leaf.nu)


def placed(x: Array, like: Array) -> Array:
    """A result that lies on Explicit axes as what it takes the place of."""
    sharding = jax.typeof(like).sharding
    same = not sharding.mesh.explicit_axes or jax.typeof(x).sharding == sharding
    return x if same else jax.sharding.reshard(x, sharding)


def _later(words: Array | None, groups: Array, size: int) -> Array:
    """The words of noise of a part that begins so many groups of a size after the whole."""
    assert words is not None
    return noise.later(words, groups * np.uint32(size // 8))


def _over_leading_axes(local: Any) -> Any:
    """Under `jax.vmap` the mapped axis becomes one more leading axis of the arrays, which groups do not see.

    Noise does: with it, which goes by positions in one parameter, the kernel runs once for each.
    """

    @jax.custom_batching.custom_vmap
    def mapped(*operands: Any) -> Any:
        return local(*operands)

    @mapped.def_vmap
    def rule(size: int, batched: Any, *operands: Any) -> Any:
        if any(words is not None for words in operands[5:]):

            def one(i: Array) -> Any:
                return mapped(*jax.tree.map(lambda x, is_mapped: x[i] if is_mapped else x, operands, tuple(batched)))

            results = jax.lax.map(one, jnp.arange(size))
            return results, jax.tree.map(lambda _: True, results)
        if any(jax.tree.leaves(batched[4])):
            raise NotImplementedError("impl 'triton' cannot map over the scalars of the step; take impl='xla'")

        def spread(x: Array, is_mapped: bool) -> Array:
            return x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))

        results = mapped(*jax.tree.map(spread, operands[:4], tuple(batched[:4])), *operands[4:])
        return results, jax.tree.map(lambda _: True, results)

    return mapped


def _parts(moment: Moment) -> tuple[Array, ...]:
    if not isinstance(moment, QTensor):
        return (moment,)
    moment.check_blocks()
    return tuple(x for x in (moment.codes, moment.scale, moment.expansion) if x is not None)


def _restored(parts: tuple[Array, ...], like: Moment) -> Moment:
    if not isinstance(like, QTensor):
        return parts[0]
    exponents = parts[2] if like.spec.expand else None
    return dataclasses.replace(like, codes=parts[0], scale=parts[1], expansion=exponents)


def members() -> Any:
    """`fp8jax.ops.members` as the kernel takes it."""
    from pallas_kernels import adamw_triton

    return adamw_triton.Members(IDLE, SILENT, RAISED, NEAR, LOWEST)


def _storage(moment: Moment, signed: bool, stochastic: bool = False, fading: bool = False) -> Any:
    from pallas_kernels import adamw_triton

    if not isinstance(moment, QTensor):
        return None
    spec, fmt = moment.spec, formats.get(moment.spec.format)
    ratio = fmt.normal_range**expansion.NEW if stochastic else fmt.expansion_range
    expanded = (ratio, expansion.LOWEST, expansion.HIGHEST) if spec.expand else None
    smallest = fmt.smallest if spec.underflow == "smallest" else None
    plain = adamw_triton.Storage(fmt.max, expanded, smallest, signed)
    if fading:
        return dataclasses.replace(plain, fading=(fmt.mantissa_bits, fmt.smallest_normal))
    if not stochastic:
        return plain
    ratios = (fmt.normal_range**expansion.FEWEST, fmt.normal_range)
    return dataclasses.replace(plain, noise=adamw_triton.Noise(fmt.mantissa_bits, fmt.smallest_normal, ratios))
