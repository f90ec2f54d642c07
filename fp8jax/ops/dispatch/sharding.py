"""Where the parts of a product lie on a mesh with Explicit axes, on which types say how arrays are sharded.

A result lies where JAX's own `dot_general` of the plain operands puts it, and a gradient as what it is the gradient of.
Between those, matrices are multiplied as on a mesh with Auto axes. On any other mesh nothing here does anything.
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

# How users say where a product's result lies on Explicit axes, as `jax.lax.dot_general` takes it.
OutSharding = NamedSharding | PartitionSpec | None


def spec_of(x: Any) -> tuple[Any, ...]:
    """The sharding of each axis of an array or a quantized matrix."""
    array = x.codes if isinstance(x, QTensor) else x
    spec = tuple(jax.typeof(array).sharding.spec)
    return (*spec, *[None] * (array.ndim - len(spec)))


def explicit_mesh(*trees: Any) -> Any:
    """The mesh with Explicit axes on which any of the arrays lies, or None."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(trees))
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def product_sharding(lhs: Any, rhs: Any, dimension_numbers: Any, out_sharding: OutSharding = None) -> Any:
    """The sharding of a product by JAX's own rule, as `merge` and `reshape` take it; None without Explicit axes.

    Raises:
        ShardingTypeError: the rule needs `out_sharding`.
        ValueError: there are no Explicit axes that `out_sharding` could be of.
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
    """The sharding of an array whose runs of so many axes have become one each."""
    if spec is None:
        return None
    entries, remaining = [], list(spec)
    for count in counts:
        names = [name for entry in remaining[:count] for name in blocks.spec_entry_axes(entry)]
        entries.append(tuple(names) or None)
        del remaining[:count]
    return tuple(entries)


def merge(x: Array, *counts: int) -> Array:
    """An array whose runs of so many axes become one each, none of them replicated that was sharded.

    Elements move between devices if an axis is sharded that others of its run come before.
    """
    shape, remaining = [], list(x.shape)
    for count in counts:
        shape.append(math.prod(remaining[:count]))
        del remaining[:count]
    return reshape(x, shape, merge_spec(spec_of(x), counts))


def reshape_to_matrix(x: Array, rows: int, columns: int) -> Array:
    """The elements of an array as a matrix; its axes are merged, where they can be."""
    for count in range(x.ndim + 1):
        if (math.prod(x.shape[:count]), math.prod(x.shape[count:])) == (rows, columns):
            return merge(x, count, x.ndim - count)
    return x.reshape(rows, columns)


def reshape(x: Array, shape: Sequence[int], spec: Sequence[Any] | None) -> Array:
    """`x.reshape(shape)` with a sharding, which is of no meaning without Explicit axes."""
    if tuple(shape) == x.shape:
        return x  # and no equation: gradients of it are known by what they are
    sharding = named_sharding(spec, x)
    return lax.reshape(x, shape, out_sharding=sharding)


def transpose_sharding(out_sharding: OutSharding, axes: Sequence[int]) -> OutSharding:
    """The sharding, as users give it, of a result with its axes in this order."""
    if out_sharding is None:
        return None
    spec = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
    entries = (*spec, *[None] * (len(axes) - len(spec)))
    transposed = PartitionSpec(*(entries[i] for i in axes))
    return NamedSharding(out_sharding.mesh, transposed) if isinstance(out_sharding, NamedSharding) else transposed


def named_sharding(spec: Sequence[Any] | None, *arrays: Any) -> NamedSharding | None:
    """A sharding over the mesh with Explicit axes of any of the arrays, or None."""
    mesh = None if spec is None else explicit_mesh(*arrays)
    return None if mesh is None or spec is None else NamedSharding(mesh, PartitionSpec(*spec))


def reshard(x: Array, spec: Sequence[Any], *like: Array) -> Array:
    """An array in another sharding, where it or others that it must lie with have Explicit axes."""
    sharding = named_sharding(spec, x, *like)
    if sharding is None or list(map(blocks.spec_entry_axes, spec_of(x))) == list(map(blocks.spec_entry_axes, spec)):
        return x
    return jax.sharding.reshard(x, sharding)


def matmul_sharded(function: Callable[[Any, Any], Array], a: Any, b: Any, spec: Sequence[Any] | None) -> Array:
    """`function(a, b)`, the product of quantized matrices by the contraction of their last axes.

    What one device needs whole of another's operand it is sent as codes.

    Args:
        function: a function of global arrays.
        a, b: (M, K) and (N, K), quantized or not.
        spec: the sharding of the product; None without Explicit axes.
    """
    mesh = explicit_mesh(a, b)
    if mesh is None or spec is None:
        return function(a, b)
    a, b = _gather_operand(a, b, spec[1]), _gather_operand(b, a, spec[0])
    out = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.sharding.auto_axes(function, axes=tuple(mesh.explicit_axes), out_sharding=out)(a, b)


def _gather_operand(operand: Any, other: Any, out_rows: Any) -> Any:
    """An operand whole along those mesh axes over which the other one's rows are sharded, and stay so in `out_rows`."""
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
    """The dtype and sharding that the gradient of an array has; static, so that no array is kept for it."""

    dtype: DTypeLike
    spec: tuple[Any, ...]

    @classmethod
    def from_array(cls, x: Array) -> "DtypeAndSharding":
        return cls(x.dtype, spec_of(x))

    def cast_cotangent(self, gradient: Array) -> Array:
        """A gradient as one of this kind."""
        return reshard(gradient.astype(self.dtype), self.spec)
