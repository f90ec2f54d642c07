"""One body for all parameters of a kind, so that a program of many is traced and compiled in the time of a few.

What is done to a parameter is a function under `jax.jit`: JAX traces and lowers it once for all of one shape. XLA takes
calls apart and compiles each copy; on a CPU that is nearly all of the time. There, on one device, parameters of a kind
are stacked, and one loop runs over them. Elsewhere nothing is stacked: it would cost memory, and where arrays are
sharded, exchanges between devices. (XLA also keeps calls that are said not to be taken apart, but compiles each still.)
A program of 200 parameters of five kinds is compiled in 7 CPU-seconds so, about one a kind; optax's AdamW takes one.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

# Fewer are not worth a loop.
MIN_LOOP_ROWS = 4


def map_leaves(body: Callable[..., Any], static: Hashable, scalars: Any, rows: Sequence[Any]) -> list[Any]:
    """`body(static, scalars, row)` for each row.

    Args:
        body: a function of a module, not a new one each time: it is traced once for each kind of row.
        static: what else it is traced for.
        scalars: tree of arrays that all rows have in common.
        rows: trees of arrays; those of one structure, and of the same types leaf by leaf, are of a kind.

    Returns:
        The results, in the order of the rows.
    """
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
        # A stack that XLA fused with what reads it would look for its operand at each element.
        stacked = lax.optimization_barrier(jax.tree.map(lambda *leaves: _bits(jnp.stack(leaves)), *rows))
        one = functools.partial(_call_body, body, static, scalars)
        like = jax.eval_shape(one, rows[0])

        def step(bits: Any) -> Any:
            row = jax.tree.map(_from_bits, bits, rows[0])
            return jax.tree.map(_bits, one(row))

        # Of places that XLA does not know each result is copied by the same code, of known ones by code of its own,
        # whose compilation took two thirds of the time.
        found, indices = lax.optimization_barrier((lax.map(step, stacked), [np.int32(i) for i in range(len(rows))]))
        return [jax.tree.map(functools.partial(_unstack_row, i), found, like) for i in indices]

    def separate(scalars: Any, rows: Sequence[Any]) -> list[Any]:
        return [_call_body(body, static, scalars, row) for row in rows]

    found: list[Any] = lax.platform_dependent(scalars, rows, cpu=loop, default=separate)
    return found


def _unstack_row(index: Any, stacked: Any, like: Any) -> Any:
    return _from_bits(lax.dynamic_index_in_dim(stacked, index, keepdims=False, allow_negative_indices=False), like)


def _is_single_device() -> bool:
    """Whether the arrays of the program that is traced lie on one device, or are a device's own."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return all(size == 1 or kind == AxisType.Manual for size, kind in kinds)


def _bits(x: Any) -> Any:
    """Narrow floats as integers, which XLA moves as they are: on a CPU it would convert whole stacks of them."""
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") if narrow else x


def _from_bits(bits: Any, like: Any) -> Any:
    return bits if bits.dtype == like.dtype else lax.bitcast_convert_type(bits, like.dtype)
