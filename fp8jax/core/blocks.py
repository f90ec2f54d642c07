"""Reductions over blocks of an array, and broadcasts of block values back to it.

A granularity is a block shape: a whole tensor, a group along one axis, or a square of the last two axes. Blocks count
from the start of each dimension of the global shape. The last one may be short.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec


def counts(shape: Sequence[int], blocks: Sequence[int]) -> tuple[int, ...]:
    """Number of blocks along each dimension; 0 along an empty one."""
    return tuple(-(-n // b) for n, b in zip(shape, blocks, strict=True))


def is_whole_axis(length: int, n: int) -> bool:
    """Whether a block of this length covers a dimension of `n`; False if a symbolic dimension leaves that open."""
    try:
        return bool(length >= n)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def expand_to_rank(vector: Array, ndim: int) -> Array:
    """A (channels,) vector reshaped to (1, ..., channels), for `jax_numpy_rank_promotion="raise"`."""
    return jnp.expand_dims(vector, tuple(range(ndim - vector.ndim)))


def reduce(x: Array, blocks: Sequence[int], op: Callable[..., Array], initial: float) -> Array:
    """Reduces each block of `x` to one value.

    Args:
        x: array of any rank.
        blocks: block length along each dimension of `x`.
        op: `jnp.max` or `jnp.min`.
        initial: neutral element of `op`; it also pads short blocks.

    Returns:
        Array of the rank of `x`, with `counts(x.shape, blocks)` entries along each dimension.
    """
    padding, split, axes = [], [], []
    for n, b, count in zip(x.shape, blocks, counts(x.shape, blocks), strict=True):
        if b == 1:
            split.append(n)
            padding.append((0, 0))
            continue
        b = n if count == 1 else b
        padding.append((0, count * b - n))
        split += [count, b]
        axes.append(len(split) - 1)
    if any(after for _, after in padding):
        x = jnp.pad(x, padding, constant_values=initial)
    return op(x.reshape(split), axis=tuple(axes), initial=initial).reshape(counts(x.shape, blocks))


def broadcast_blocks(values: Array, shape: Sequence[int], blocks: Sequence[int]) -> Array:
    """Repeats each block's value over its block: the inverse of `reduce`, broadcastable against `shape`."""
    for axis, (n, b) in enumerate(zip(shape, blocks, strict=True)):
        count = values.shape[axis]
        if count == 1 or b == 1:
            continue
        repeated = (*values.shape[: axis + 1], b, *values.shape[axis + 1 :])
        values = jnp.broadcast_to(jnp.expand_dims(values, axis + 1), repeated)
        values = values.reshape(*repeated[:axis], count * b, *repeated[axis + 2 :])
        values = jax.lax.slice_in_dim(values, 0, n, axis=axis)
    return values


def spec_entry_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes named by one entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def block_partition_spec(spec: PartitionSpec, shape: Sequence[int], mesh_shape: dict[str, int]) -> PartitionSpec:
    """The `PartitionSpec` of block values: the array's, but replicated on axes that do not divide the block count."""
    entries = []
    for n, entry in zip(shape, spec, strict=False):
        entries.append(entry if n % math.prod(mesh_shape[a] for a in spec_entry_axes(entry)) == 0 else None)
    return PartitionSpec(*entries)


def explicit_axes(x: Array) -> dict[str, int]:
    """Names and sizes of the Explicit mesh axes in the type of `x`."""
    mesh = jax.typeof(x).sharding.mesh
    return {name: mesh.shape[name] for name in mesh.explicit_axes}


def on_logical_array(
    fn: Callable[..., tuple[Array, ...]], x: Array, *args: Array | None, out_shapes: Sequence[Sequence[int]]
) -> tuple:
    """Returns `fn(x, *args)` on global arrays, also under an Explicit mesh, where no reshape may split a sharded axis.

    Args:
        x: the array that determines the sharding of the results.
        *args: further arrays, or None.
        out_shapes: shapes of the results, each of the rank of `x`.
    """
    axes = explicit_axes(x)
    if not axes:
        return fn(x, *args)
    # Name the mesh: arrays can have one without `jax.set_mesh`.
    mesh, spec = jax.typeof(x).sharding.mesh, jax.typeof(x).sharding.spec
    out_shardings = tuple(NamedSharding(mesh, block_partition_spec(spec, shape, axes)) for shape in out_shapes)
    return jax.sharding.auto_axes(fn, axes=tuple(axes), out_sharding=out_shardings)(x, *args)
