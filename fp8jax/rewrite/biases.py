"""Biases, found where a parameter is added to nothing but a product's result, as a row to each token."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from fp8jax.rewrite.graph import Node, Value, before, in_order
from fp8jax.rewrite.primitives import CASTS, MARKS, RESHAPES

_SUMS = ("add", "add_any")


class BiasForm(NamedTuple):
    """A sum of a product and a bias.

    Attributes:
        sum: the node that adds.
        value: the parameter, with the elements of the outputs in their order; as it is stored, if that is only cast.
    """

    sum: Node
    value: Value


def find(node: Node, outputs: int, reader: Node | None) -> BiasForm | None:
    """The sum that a product's result is part of; None if it is none.

    Args:
        node: the product, whose result has the weight's own axes last.
        outputs: how many these are.
        reader: the only node that reads its result.
    """
    (result,) = node.results
    if reader is None or reader.kind not in _SUMS or reader.operation is not None:
        return None
    (other,) = (value for value in reader.operands if value is not result)
    if explicit(result):
        return None
    vector = _vector(other, result.shape, result.aval.ndim - outputs)
    if vector is None or vector.data or vector.weight is None:
        return None
    if vector.kind in CASTS and vector.node is not None:
        source = vector.node.operands[0]
        vector = source if jnp.issubdtype(source.dtype, jnp.floating) and source.dtype.itemsize > 1 else vector
    return BiasForm(reader, before(vector, (*MARKS, *RESHAPES), in_order))


def _vector(value: Value, shape: tuple[int, ...], lead: int) -> Value | None:
    """What is spread over the first axes of a shape and has the elements of the others, in their order."""
    value, wanted = before(value, MARKS), [i for i in range(lead, len(shape)) if shape[i] != 1]
    places: Sequence[int] = range(value.aval.ndim)
    if value.kind == "broadcast_in_dim" and value.node is not None:
        places = value.node.eqn.params["broadcast_dimensions"]
        (value,) = value.node.operands
    # Its other axes are of one element, which JAX spreads.
    wide = [place for place, n in zip(places, value.shape, strict=True) if n != 1]
    return before(value, (*MARKS, *RESHAPES), in_order) if wide == wanted != [] else None


def explicit(value: Value) -> bool:
    """Whether the array lies on Explicit mesh axes: there its sum says how the result lies."""
    sharding: Any = getattr(value.aval, "sharding", None)
    return bool(sharding is not None and sharding.mesh.explicit_axes)
