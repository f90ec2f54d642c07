"""Products of one input that a recipe computes as if they were written as one, of their weights side by side."""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from fp8jax.core.recipe import Linear
from fp8jax.ops.saved import LaidOut
from fp8jax.rewrite import biases
from fp8jax.rewrite.entries import Entry, ReadWeight
from fp8jax.rewrite.graph import Graph, Node, Value, origin_of
from fp8jax.rewrite.operations import ActivationOperation, ProductOperation


@dataclasses.dataclass(eq=False)
class JoinedOperation(ProductOperation):
    """A product of data with several parameters (inputs, outputs), side by side under one scale.

    Attributes:
        weights: the parameters. rows: their biases, or none.
    """

    weights: tuple[Value, ...] = ()
    rows: tuple[Value, ...] = ()

    @property
    def laid_out(self) -> bool:
        return True

    def _laid_out(self, running: Any) -> LaidOut:
        return LaidOut([running.array(w) for w in self.weights], functools.partial(jnp.concatenate, axis=1))

    def _bias(self, running: Any) -> Array | None:
        rows = [running.array(row).reshape(-1) for row in self.rows]
        return jnp.concatenate(rows) if rows else None


def join(graph: Graph, group: Sequence[ReadWeight], entries: dict[Node, Entry]) -> None:
    """Puts one operation in place of those products of a group that a recipe joins (`Linear.joins`), and tells it.

    Products stay apart whose results an activation reads: its backward pass makes the codes of their gradients. So do
    those whose parameters have no layout as (inputs, outputs), or lie on Explicit axes of a mesh; and those whose bias
    is computed, as a row of several is, for that may be after the first product.

    Args:
        graph: that the products are in.
        group: products of one array, operations in their places.
        entries: of the plan; those of what is joined are changed.
    """
    active = {v for node in graph.all() if isinstance(node.operation, ActivationOperation) for v in node.operands}
    alike = collections.defaultdict[Any, list[ReadWeight]](list)
    for p in group:
        place, linear = p.place or p.node, p.choice.linear
        o = place.operation
        if linear is None or not linear.joins or type(o) is not ProductOperation or active.intersection(place.results):
            continue
        plain = o.side == 1 and not o.layout and o.kept is None and o.widths is None and not o.turned
        numbers = o.params["dimension_numbers"]
        plain = plain and tuple(numbers[0][1]) == (0,) and not any(numbers[1])  # (inputs, outputs), as they lie
        if plain and biases.explicit(o.weight):
            reason = f"{entries[place].reason}; not joined, for its parameter lies on Explicit axes"
            entries[place] = entries[place]._replace(reason=reason)
        elif plain and o.weight.aval.ndim == 2 and o.weight.node is None and (o.bias is None or o.bias.node is None):
            data, same = origin_of(p.data), (p.data.dtype, p.data.shape, o.weight.dtype, str(o.params), o.bias is None)
            alike[data, linear, same, id(place.call)].append(p)
    order = {node: i for i, node in enumerate(graph.all())}
    for (_, linear, *_), products in alike.items():
        if len(products) > 1:
            _put(sorted(products, key=lambda p: order[p.place or p.node]), linear, entries)


def _put(products: Sequence[ReadWeight], linear: Linear, entries: dict[Node, Entry]) -> None:
    places = [p.place or p.node for p in products]
    each: list[Any] = [place.operation for place in places]
    first, rows = each[0], tuple(o.bias for o in each if o.bias is not None)
    weights = tuple(o.weight for o in each)
    place, results = places[0], [result for each_place in places for result in each_place.results]
    for other in places:
        other.operation, other.results = None, []
    place.results = results
    for result in results:
        result.node = place
    place.operands = [first.data, *weights, *rows]
    place.operation = JoinedOperation(
        first.recipe, first.data, first.weight, (), first.side, first.root, params=first.params, bias=first.bias,
        widths=tuple(w.shape[1] for w in weights), weights=weights, rows=rows,
    )  # fmt: skip
    for p, of in zip(products, places, strict=True):
        others = ", ".join(q.path for q in products if q is not p)
        entries[of] = entries[of]._replace(reason=f"{entries[of].reason}; joined with {others}")
