"""Shardings of products on a mesh with Explicit axes, where they are part of types.

A result has the sharding of JAX's `dot_general` on plain operands, and a gradient that of its primal. Matrices in
between are multiplied as on Auto axes. Without Explicit axes these functions do nothing.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from fp8jax.core import blocks
from fp8jax.core.products import dot_general
from fp8jax.core.qtensor import QTensor

# The argument of `jax.lax.dot_general` for the sharding of a product on Explicit axes.
OutSharding = NamedSharding | PartitionSpec | None


def spec_of(x: Any) -> tuple[Any, ...]:
    """Return the sharding of each axis of an array or a quantized matrix."""
    array = x.codes if isinstance(x, QTensor) else x
    spec = tuple(jax.typeof(array).sharding.spec)
    return (*spec, *[None] * (array.ndim - len(spec)))


def explicit_mesh(*trees: Any) -> Any:
    """Return the mesh with Explicit axes of any of the arrays, or None."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(trees))
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def product_sharding(lhs: Any, rhs: Any, dimension_numbers: Any, out_sharding: OutSharding = None) -> Any:
    """Return a product's sharding by JAX's rule, for `merge` and `reshape`; None without Explicit axes.

    Raises:
        ShardingTypeError: the rule needs `out_sharding`.
        ValueError: `out_sharding` is set without Explicit axes.
    """
    mesh = explicit_mesh(lhs, rhs)
    if mesh is None and out_sharding is None:
        return None
    kinds = (jax.ShapeDtypeStruct(x.shape, "float32", sharding=_sharding_or_none(x)) for x in (lhs, rhs))
    product = jax.eval_shape(lambda a, b: dot_general(a, b, dimension_numbers, out_sharding=out_sharding), *kinds)
    return None if mesh is None else tuple(jax.typeof(product).sharding.spec)


def _sharding_or_none(x: Any) -> NamedSharding | None:
    sharding = jax.typeof(x.codes if isinstance(x, QTensor) else x).sharding
    return None if sharding.mesh.empty else sharding


def merge_spec(spec: Sequence[Any] | None, counts: Sequence[int]) -> tuple[Any, ...] | None:
    """Return the sharding of an array after `merge`."""
    if spec is None:
        return None
    entries, remaining = [], list(spec)
    for count in counts:
        names = [name for entry in remaining[:count] for name in blocks.spec_entry_axes(entry)]
        entries.append(tuple(names) or None)
        del remaining[:count]
    return tuple(entries)


def merge(x: Array, *counts: int) -> Array:
    """Merge consecutive axes, `counts[i]` axes into axis i, without replicating a sharded one.

    Elements move between devices if an axis other than the first of its group is sharded.
    """
    shape, remaining = [], list(x.shape)
    for count in counts:
        shape.append(math.prod(remaining[:count]))
        del remaining[:count]
    return reshape(x, shape, merge_spec(spec_of(x), counts))


def reshape_to_matrix(x: Array, rows: int, columns: int) -> Array:
    """Reshape an array to a matrix, by merging axes if possible."""
    for count in range(x.ndim + 1):
        if (math.prod(x.shape[:count]), math.prod(x.shape[count:])) == (rows, columns):
            return merge(x, count, x.ndim - count)
    return x.reshape(rows, columns)


def reshape(x: Array, shape: Sequence[int], spec: Sequence[Any] | None) -> Array:
    """Return `x.reshape(shape)` with a sharding, which is ignored without Explicit axes."""
    if tuple(shape) == x.shape:
        return x  # no equation: gradient facts are looked up by array identity
    sharding = named_sharding(spec, x)
    return lax.reshape(x, shape, out_sharding=sharding)


def transpose_sharding(out_sharding: OutSharding, axes: Sequence[int]) -> OutSharding:
    """Return a user's sharding of a result after a transposition of its axes."""
    if out_sharding is None:
        return None
    spec = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
    entries = (*spec, *[None] * (len(axes) - len(spec)))
    transposed = PartitionSpec(*(entries[i] for i in axes))
    return NamedSharding(out_sharding.mesh, transposed) if isinstance(out_sharding, NamedSharding) else transposed


def named_sharding(spec: Sequence[Any] | None, *arrays: Any) -> NamedSharding | None:
    """Return a sharding over the mesh with Explicit axes of any of the arrays, or None."""
    mesh = None if spec is None else explicit_mesh(*arrays)
    return None if mesh is None or spec is None else NamedSharding(mesh, PartitionSpec(*spec))


def reshard(x: Array, spec: Sequence[Any], *like: Array) -> Array:
    """Reshard an array, if it or one of `like` has Explicit axes."""
    sharding = named_sharding(spec, x, *like)
    if sharding is None or list(map(blocks.spec_entry_axes, spec_of(x))) == list(map(blocks.spec_entry_axes, spec)):
        return x
    return jax.sharding.reshard(x, sharding)


def matmul_sharded(function: Callable[[Any, Any], Array], a: Any, b: Any, spec: Sequence[Any] | None) -> Array:
    """Return `function(a, b)`, a product contracted along the last axes. Operands are gathered as codes.

    Args:
        a, b: (M, K) and (N, K), quantized or not.
        spec: sharding of the product; None without Explicit axes.
    """
    mesh = explicit_mesh(a, b)
    if mesh is None or spec is None:
        return function(a, b)
    a, b = _gather_operand(a, b, spec[1]), _gather_operand(b, a, spec[0])
    out = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.sharding.auto_axes(function, axes=tuple(mesh.explicit_axes), out_sharding=out)(a, b)


def _gather_operand(operand: Any, other: Any, out_rows: Any) -> Any:
    """Gather an operand over the mesh axes that shard the other operand's rows and `out_rows`."""
    names = {*blocks.spec_entry_axes(spec_of(other)[0])} & {*blocks.spec_entry_axes(out_rows)}
    spec = tuple(
        tuple(name for name in blocks.spec_entry_axes(entry) if name not in names) or None for entry in spec_of(operand)
    )
    if not isinstance(operand, QTensor):
        return reshard(operand, spec)
    mesh = explicit_mesh(operand)
    sizes = dict(mesh.shape) if mesh is not None else {}
    return jax.tree.map(
        lambda x: reshard(x, tuple(blocks.block_partition_spec(PartitionSpec(*spec), x.shape, sizes))), operand
    )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class DtypeAndSharding:
    """The dtype and sharding of an array's gradient, as a static pytree that keeps no array alive."""

    dtype: DTypeLike
    spec: tuple[Any, ...]

    @classmethod
    def from_array(cls, x: Array) -> "DtypeAndSharding":
        return cls(x.dtype, spec_of(x))

    def cast_cotangent(self, gradient: Array) -> Array:
        """Cast and reshard a gradient."""
        return reshard(gradient.astype(self.dtype), self.spec)
