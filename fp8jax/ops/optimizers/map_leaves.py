"""One program for all leaves of a kind, to trace and compile many parameters in the time of a few."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

# Fewer rows are not worth a loop.
MIN_LOOP_ROWS = 4


def map_leaves(body: Callable[..., Any], static: Hashable, scalars: Any, rows: Sequence[Any]) -> list[Any]:
    """The results of `body(static, scalars, row)`, in the order of the rows.

    Args:
        body: a function of a module, not a closure: it is traced once for each kind of row.
        static: hashable argument of `body`.
        scalars: tree of arrays that all rows share.
        rows: trees of arrays; a kind has one structure, and the same types of leaves.
    """
    # JAX traces and lowers a jitted function once for each kind. XLA inlines its calls and compiles each copy, which
    # takes nearly all of the time on a CPU. There, the rows of a kind are stacked, and one loop runs over them.
    # Elsewhere stacking would cost memory, and communication between devices if arrays are sharded.
    kinds: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        leaves, structure = jax.tree.flatten(row)
        kinds.setdefault((structure, *map(jax.typeof, leaves)), []).append(i)
    results: list[Any] = [None] * len(rows)
    is_single_device = _is_single_device()
    for indices in kinds.values():
        if is_single_device and len(indices) >= MIN_LOOP_ROWS:
            outputs = _call_in_loop(body, static, scalars, [rows[i] for i in indices])
        else:
            outputs = [_call_body(body, static, scalars, rows[i]) for i in indices]
        for i, result in zip(indices, outputs, strict=True):
            results[i] = result
    return results


@functools.partial(jax.jit, static_argnums=(0, 1))
def _call_body(body: Callable[..., Any], static: Hashable, scalars: Any, row: Any) -> Any:
    return body(static, scalars, row)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _call_in_loop(body: Callable[..., Any], static: Hashable, scalars: Any, rows: Sequence[Any]) -> list[Any]:
    def loop(scalars: Any, rows: Sequence[Any]) -> list[Any]:
        # If XLA fused the stack with its reader, it would select an operand for each element.
        stacked = lax.optimization_barrier(jax.tree.map(lambda *leaves: _bits(jnp.stack(leaves)), *rows))
        one = functools.partial(_call_body, body, static, scalars)
        like = jax.eval_shape(one, rows[0])

        def step(bits: Any) -> Any:
            row = jax.tree.map(_from_bits, bits, rows[0])
            return jax.tree.map(_bits, one(row))

        # With indices that XLA does not know, the same code copies each result. With constants, each copy is compiled.
        found, indices = lax.optimization_barrier((lax.map(step, stacked), [np.int32(i) for i in range(len(rows))]))
        return [jax.tree.map(functools.partial(_unstack_row, i), found, like) for i in indices]

    def separate(scalars: Any, rows: Sequence[Any]) -> list[Any]:
        return [_call_body(body, static, scalars, row) for row in rows]

    found: list[Any] = lax.platform_dependent(scalars, rows, cpu=loop, default=separate)
    return found


def _unstack_row(index: Any, stacked: Any, like: Any) -> Any:
    return _from_bits(lax.dynamic_index_in_dim(stacked, index, keepdims=False, allow_negative_indices=False), like)


def _is_single_device() -> bool:
    """Whether the arrays of the traced program lie on one device, or are local ones inside `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return all(size == 1 or kind == AxisType.Manual for size, kind in kinds)


def _bits(x: Any) -> Any:
    """Floats of less than 32 bits as integers: XLA on a CPU would convert whole stacks of them."""
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") if narrow else x


def _from_bits(bits: Any, like: Any) -> Any:
    return bits if bits.dtype == like.dtype else lax.bitcast_convert_type(bits, like.dtype)
