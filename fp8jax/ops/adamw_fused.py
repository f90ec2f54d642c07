"""When the fused AdamW kernel can take a parameter, and how it is called."""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from fp8jax.core import blocks, expansion, formats, noise
from fp8jax.core.qtensor import QTensor
from fp8jax.ops.choice import Choice, capability, missing_triton, spread

Moment = QTensor | Array
Form = Literal["update", "step"]

IMPLS = ("auto", "xla", "triton")


@dataclasses.dataclass(frozen=True)
class Adam:
    """The scalars of a step; each may be a traced scalar.

    Attributes:
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        eps_root: added to the second moment under the root.
        count: number of this step, from 1, int32.
        rate: the change of a weight is -rate * (direction + weight_decay * weight).
        weight_decay: strength of the decoupled weight decay.
    """

    b1: ArrayLike
    b2: ArrayLike
    eps: ArrayLike
    eps_root: ArrayLike
    count: Array
    rate: Any = -1.0
    weight_decay: Any = 0.0


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["grad", "weight", "mu", "nu", "noise", "nu_noise"],
    meta_fields=["decays", "salt"],
)
@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a step needs of one parameter.

    Attributes:
        grad: gradient.
        weight: the parameter, or None.
        mu: first moment as stored.
        nu: second moment as stored.
        decays: whether the parameter decays; static.
        noise: two random words for stochastic rounding of the parameter, or None.
        nu_noise: two words of the step for that of a quantized second moment, or None; the parameter's own are these
            with its salt (`fp8jax.core.noise.salted`).
        salt: a number of the parameter's own; static.
    """

    grad: Array
    weight: Array | None
    mu: Moment
    nu: Moment
    decays: bool
    noise: Array | None
    nu_noise: Array | None = None
    salt: int = 0

    @property
    def dtype(self) -> np.dtype:
        """Dtype of a change of the parameter."""
        return (self.grad if self.weight is None else self.weight).dtype

    @property
    def quantized(self) -> list[QTensor]:
        return [moment for moment in (self.mu, self.nu) if isinstance(moment, QTensor)]

    @property
    def group_size(self) -> int:
        size = self.quantized[0].spec.group_size
        assert size is not None
        return size


class _Operands(NamedTuple):
    grad: Array
    weight: Array | None
    mu: tuple[Array, ...]
    nu: tuple[Array, ...]
    scalars: tuple[Array, ...]
    noise: Array | None
    nu_noise: Array | None


def choose(leaf: Leaf, impl: str, cuda: bool) -> Choice:
    """What computes the step of a parameter on CUDA, or elsewhere.

    Raises:
        ValueError: `impl` is unknown; or it is "triton", and the kernel cannot take a quantized parameter.
    """
    if impl not in IMPLS:
        raise ValueError(f"unknown impl {impl!r}; it is one of {', '.join(IMPLS)}")
    if not leaf.quantized:
        return Choice("xla", "no moment is quantized")
    if impl == "xla":
        return Choice("xla", "asked for")
    reason = (
        (None if cuda else "it needs a CUDA GPU") or missing_triton("adamw_triton") or _unsupported(leaf) or _cut(leaf)
    )
    if reason is None:
        return Choice("triton", "the fused kernel takes it")
    if impl == "triton":
        raise ValueError(f"impl 'triton' cannot run: {reason}")
    return Choice("xla", f"not the fused kernel: {reason}")


def _unsupported(leaf: Leaf) -> str | None:
    from pallas_kernels import adamw_triton

    specs = [moment.spec for moment in leaf.quantized]
    in_groups = all(spec.granularity == "group" and spec.axis in (-1, len(leaf.grad.shape) - 1) for spec in specs)
    if not in_groups or any(spec.rounding != "nearest" or spec.group_size != leaf.group_size for spec in specs):
        stored = " and ".join(map(str, specs))
        return f"moments are stored as {stored}, not in the same groups along the last axis, to nearest"
    mu, nu = (tuple(x.dtype for x in _parts(moment)) for moment in (leaf.mu, leaf.nu))
    return adamw_triton.unsupported(leaf.grad.shape, leaf.grad.dtype, leaf.dtype, mu, nu, leaf.group_size)


def _cut(leaf: Leaf) -> str | None:
    """Why groups may not lie on one device each, as far as the arrays and their types tell, or None."""
    arrays = [leaf.grad, *(_parts(moment)[0] for moment in (leaf.mu, leaf.nu))]
    arrays += [] if leaf.weight is None else [leaf.weight]
    if axes := _explicit(leaf):
        return _cut_explicitly(leaf, arrays, axes)
    return spread(*arrays)


def _cut_explicitly(leaf: Leaf, arrays: list[Any], axes: dict[str, int]) -> str | None:
    mesh = jax.typeof(leaf.grad).sharding.mesh
    if any(size > 1 for name, size in mesh.shape.items() if name not in axes and name not in mesh.manual_axes):
        return "the mesh has Auto axes, whose sharding is not known before compilation"
    specs = {PartitionSpec(*_entries(x)) for x in arrays}
    if len(specs) > 1:
        return "gradient, parameter and moments are sharded differently"
    if leaf.noise is not None:
        return "the noise of stochastic rounding goes by global positions"
    shards = math.prod(axes[a] for a in _entries(leaf.grad)[-1])
    if shards > 1 and leaf.grad.shape[-1] % (shards * leaf.group_size):
        return "a shard cuts groups"
    if leaf.nu_noise is not None and _Place.of(leaf) is None:
        return "the noise of the second moment goes by global positions, and more than two axes are cut"
    return None


def _entries(x: Array) -> list[tuple[str, ...]]:
    """The mesh axes that each axis of an array is sharded over."""
    spec = jax.typeof(x).sharding.spec
    axes = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    return [*axes, *[()] * (x.ndim - len(axes))]


class _Place(NamedTuple):
    """Where the groups of a shard lie among those of the global array.

    Group n of the shard is group `first + n // inner * stride + n % inner`.

    Attributes:
        axes: for each axis of the array, the mesh axes it is sharded over.
        steps: for each axis, how many groups further the next shard along it begins.
        inner: groups of the shard that follow each other in the global array.
        stride: how many groups further the next such run begins.
    """

    axes: list[tuple[str, ...]]
    steps: list[int]
    inner: int
    stride: int

    @classmethod
    def of(cls, leaf: Leaf) -> "_Place | None":
        """None where runs of groups have no constant stride."""
        entries, mesh = _entries(leaf.grad), jax.typeof(leaf.grad).sharding.mesh
        shape = [*leaf.grad.shape[:-1], -(-leaf.grad.shape[-1] // leaf.group_size)]
        runs, stride = [[1, 1]], 1  # (groups, stride), innermost first
        steps: list[int] = []
        for n, axes in zip(reversed(shape), reversed(entries), strict=True):
            local = n // math.prod(mesh.shape[a] for a in axes)
            steps.insert(0, local * stride)
            if stride == runs[-1][0] * runs[-1][1]:
                runs[-1][0] *= local
            elif local > 1:
                runs.append([local, stride])
            stride *= n
        if len(runs) > 2:
            return None
        return cls(entries, steps, runs[0][0], runs[1][1] if len(runs) > 1 else 0)

    def first(self) -> Array:
        """Inside `jax.shard_map`, the number of the shard's first group, uint32."""
        number = jnp.zeros((), jnp.uint32)
        for axes, step in zip(self.axes, self.steps, strict=True):
            if axes:
                number = number + jax.lax.axis_index(axes).astype(jnp.uint32) * np.uint32(step % 2**32)
        return number


def _explicit(leaf: Leaf) -> dict[str, int]:
    return {} if isinstance(leaf.grad, jax.ShapeDtypeStruct) else blocks.explicit_axes(leaf.grad)


def run(form: Form, leaf: Leaf, adam: Adam) -> tuple[Array, Moment, Moment]:
    """The result and both moments of one parameter, by the fused kernel."""
    from pallas_kernels import adamw_triton

    scalars = adamw_triton.Scalars(
        adam.rate,
        adam.weight_decay if leaf.decays else 0.0,
        *(adam.b1, 1 - adam.b1, adam.b2, 1 - adam.b2),
        *(1 - adam.b1**adam.count, 1 - adam.b2**adam.count),
        *(adam.eps, adam.eps_root),
    )
    place = _Place.of(leaf) if leaf.nu_noise is not None and _explicit(leaf) else None
    reads = form == "step" or (leaf.decays and not (isinstance(adam.weight_decay, float) and adam.weight_decay == 0))

    def local(*args: Any) -> Any:
        x = _Operands(*args)
        words = x.nu_noise
        if place is not None:
            assert words is not None
            eighths = place.first() * np.uint32(leaf.group_size // 8)
            words = words.at[0].add(eighths * np.uint32(noise.STRIDE))
        return adamw_triton.adamw(
            *x[:4],
            adamw_triton.Scalars(*x.scalars),
            mu_storage=_storage(leaf.mu, signed=True),
            nu_storage=_storage(leaf.nu, signed=False, stochastic=words is not None),
            group_size=leaf.group_size,
            form=form,
            dtype=leaf.dtype,
            seed=x.noise,
            nu_seed=words,
            salt=leaf.salt,
            run=None if place is None or not place.stride else (place.inner, place.stride),
            compute_capability=capability(),
        )

    call = _over_leading_axes(local)
    values = tuple(jnp.asarray(x, jnp.float32) for x in scalars)
    moments = _parts(leaf.mu), _parts(leaf.nu)
    operands = _Operands(leaf.grad, leaf.weight if reads else None, *moments, values, leaf.noise, leaf.nu_noise)
    if _explicit(leaf):
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tuple(operands))
        mesh = jax.typeof(leaf.grad).sharding.mesh  # known without jax.set_mesh, too
        call = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=(specs[0], specs[2], specs[3]), check_vma=False)
    result, mu, nu = call(*operands)
    return result, _restored(mu, leaf.mu), _restored(nu, leaf.nu)


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
    return tuple(x for x in (moment.codes, moment.scale, moment.expansion) if x is not None)


def _restored(parts: tuple[Array, ...], like: Moment) -> Moment:
    if not isinstance(like, QTensor):
        return parts[0]
    exponents = parts[2] if like.spec.expand else None
    return dataclasses.replace(like, codes=parts[0], scale=parts[1], expansion=exponents)


def _storage(moment: Moment, signed: bool, stochastic: bool = False) -> Any:
    from pallas_kernels import adamw_triton

    if not isinstance(moment, QTensor):
        return None
    spec, fmt = moment.spec, formats.get(moment.spec.format)
    ratio = fmt.normal_range**expansion.NEW if stochastic else fmt.expansion_range
    expanded = (ratio, expansion.LOWEST, expansion.HIGHEST) if spec.expand else None
    smallest = fmt.smallest if spec.underflow == "smallest" else None
    plain = adamw_triton.Storage(fmt.max, expanded, smallest, signed)
    if not stochastic:
        return plain
    kept = (fmt.normal_range**expansion.FEWEST, fmt.normal_range)
    return dataclasses.replace(plain, noise=adamw_triton.Noise(fmt.mantissa_bits, fmt.smallest_normal, kept))
