"""Bytes that the operations of a plan keep for the backward pass."""

import math
from collections.abc import Iterator
from typing import Any

from fp8jax.core.spec import QuantSpec
from fp8jax.rewrite import primitives
from fp8jax.rewrite.entries import Entry
from fp8jax.rewrite.graph import Graph, Node, Value
from fp8jax.rewrite.operations import ActivationOperation, NormOperation


def kept_bytes(graph: Graph, entries: dict[Node, Entry], times: int = 1) -> Iterator[tuple[Node, int]]:
    """For each operation the bytes of its inputs that it keeps, in all turns of the loops around it.

    Codes that several products share are the first one's; an input that the operation before makes again, or that
    something else keeps, counts for nothing, up to a scale. Under `jax.checkpoint` nothing is kept, and nothing said.
    Parameters are not counted.

    Args:
        graph: a planned program.
        entries: what became of its parts.
        times: how often it runs.
    """
    seen = set[Any]()
    for node in graph.all():
        if node in entries and node.operation is not None and all(isinstance(n, int) for n in node.results[0].shape):
            size = _of_operation(node.operation, entries[node], seen)
            if size is not None:
                yield node, int(times * size)
        if not primitives.computes_again(node.eqn):
            turns = node.eqn.params["length"] if node.kind == "scan" else 1
            for body in node.bodies:
                yield from kept_bytes(body, entries, times * turns)


def _of_operation(operation: Any, entry: Entry, seen: set[Any]) -> float | None:
    if entry.product and entry.held is None:
        linear = operation.linear
        assert entry.choice is not None
        made_again, spec = bool(entry.reads) and entry.choice.context.lean, linear.kept()
        if entry.kept or made_again or (operation.root, spec) in seen:
            return 0
        seen.add((operation.root, spec))
        return _bytes(operation.data, spec, operation.inputs)
    if isinstance(operation, NormOperation):
        rows = math.prod(operation.x.shape) // operation.x.shape[-1]
        return _bytes(operation.x, operation.recipe.context.spec) + 4 * rows
    if isinstance(operation, ActivationOperation):
        context, each = operation.recipe.context, [v for v in (operation.gate, operation.up) if v is not None]
        # Faithful, it keeps the activated gate, too.
        each += [operation.gate] if len(each) == 2 and context.spec is not None and not context.lean else []
        return sum(_bytes(value, context.spec) for value in each)
    return None


def _bytes(value: Value, spec: QuantSpec | None, inputs: int | None = None) -> float:
    """Of an array as it is, or of its codes and scales: as it is, or as a matrix with so many columns."""
    size = math.prod(value.shape)
    if spec is None or not size:
        return size * value.dtype.itemsize
    return spec.nbytes(value.shape if inputs is None else (size // inputs, inputs))
