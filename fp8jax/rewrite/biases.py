"""Finds biases: a parameter added as a row to each token of a matmul's result, if nothing else reads that result."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from fp8jax.rewrite.graph import Node, Value, is_order_preserving, strip_layout
from fp8jax.rewrite.primitives import CASTS, IDENTITY_PRIMITIVES, RESHAPES

_SUMS = ("add", "add_any")


class BiasForm(NamedTuple):
    """The sum of a matmul's result and a bias.

    Attributes:
        value: the parameter, in the order of the outputs and in its stored dtype if that is a float of 16 bits or more.
    """

    sum: Node
    value: Value


def find(node: Node, num_outputs: int, reader: Node | None) -> BiasForm | None:
    """The bias addition after a matmul; None if there is none.

    Args:
        node: the matmul. The outputs of its weight are the last axes of its result.
        reader: the only node that reads the result; None if there are several.
    """
    (result,) = node.results
    if reader is None or reader.kind not in _SUMS or reader.operation is not None:
        return None
    (addend,) = (value for value in reader.operands if value is not result)
    if has_explicit_sharding(result):
        return None
    vector = _broadcast_vector(addend, result.shape, result.aval.ndim - num_outputs)
    if vector is None or vector.is_data or vector.weight is None:
        return None
    if vector.kind in CASTS and vector.node is not None:
        source = vector.node.operands[0]
        vector = source if jnp.issubdtype(source.dtype, jnp.floating) and source.dtype.itemsize > 1 else vector
    return BiasForm(reader, strip_layout(vector, (*IDENTITY_PRIMITIVES, *RESHAPES), is_order_preserving))


def _broadcast_vector(value: Value, shape: tuple[int, ...], num_leading: int) -> Value | None:
    """The vector that is broadcast over the first `num_leading` axes of a shape; None if the value has another form."""
    value = strip_layout(value, IDENTITY_PRIMITIVES)
    target_axes = [i for i in range(num_leading, len(shape)) if shape[i] != 1]
    output_axes: Sequence[int] = range(value.aval.ndim)
    if value.kind == "broadcast_in_dim" and value.node is not None:
        output_axes = value.node.eqn.params["broadcast_dimensions"]
        (value,) = value.node.operands
    # Axes of length 1 are broadcast by JAX.
    wide_axes = [axis for axis, n in zip(output_axes, value.shape, strict=True) if n != 1]
    if wide_axes != target_axes or not target_axes:
        return None
    return strip_layout(value, (*IDENTITY_PRIMITIVES, *RESHAPES), is_order_preserving)


def has_explicit_sharding(value: Value) -> bool:
    """Whether an array is sharded over Explicit mesh axes. There the sum determines the sharding of its result."""
    sharding: Any = getattr(value.aval, "sharding", None)
    return bool(sharding is not None and sharding.mesh.explicit_axes)
