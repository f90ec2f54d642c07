"""Biases, found where a parameter is added to nothing but a product's result, as a row to each token."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from fp8jax.rewrite.graph import Node, Value, is_order_preserving, strip_layout
from fp8jax.rewrite.primitives import CASTS, IDENTITY_PRIMITIVES, RESHAPES

_SUMS = ("add", "add_any")


class BiasForm(NamedTuple):
    """A sum of a product and a bias.

    Attributes:
        sum: the node that adds.
        value: the parameter, with the elements of the outputs in their order; as it is stored, if that is only cast.
    """

    sum: Node
    value: Value


def find(node: Node, num_outputs: int, reader: Node | None) -> BiasForm | None:
    """The sum that a product's result is part of; None if it is none.

    Args:
        node: the product, whose result has the weight's own axes last.
        num_outputs: how many these are.
        reader: the only node that reads its result.
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
    """What is spread over the first axes of a shape and has the elements of the others, in their order."""
    value, target_axes = (
        strip_layout(value, IDENTITY_PRIMITIVES),
        [i for i in range(num_leading, len(shape)) if shape[i] != 1],
    )
    output_axes: Sequence[int] = range(value.aval.ndim)
    if value.kind == "broadcast_in_dim" and value.node is not None:
        output_axes = value.node.eqn.params["broadcast_dimensions"]
        (value,) = value.node.operands
    # Its other axes are of one element, which JAX spreads.
    wide_axes = [place for place, n in zip(output_axes, value.shape, strict=True) if n != 1]
    return (
        strip_layout(value, (*IDENTITY_PRIMITIVES, *RESHAPES), is_order_preserving)
        if wide_axes == target_axes != []
        else None
    )


def has_explicit_sharding(value: Value) -> bool:
    """Whether the array lies on Explicit mesh axes: there its sum says how the result lies."""
    sharding: Any = getattr(value.aval, "sharding", None)
    return bool(sharding is not None and sharding.mesh.explicit_axes)
