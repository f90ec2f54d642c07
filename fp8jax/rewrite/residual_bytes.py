"""Bytes that the operations of a plan keep for the backward pass."""

import math
from collections.abc import Iterator
from typing import Any

from fp8jax.core.spec import QuantSpec
from fp8jax.rewrite import primitives
from fp8jax.rewrite.entries import PlanEntry
from fp8jax.rewrite.graph import Graph, Node, Value
from fp8jax.rewrite.operations import ActivationOperation, NormOperation


def residual_bytes(graph: Graph, entries: dict[Node, PlanEntry], num_runs: int = 1) -> Iterator[tuple[Node, int]]:
    """For each operation the bytes of its inputs that it keeps, in all turns of the loops around it.

    Codes that several products share are the first one's; an input that the operation before makes again, or that
    something else keeps, counts for nothing, up to a scale. Under `jax.checkpoint` nothing is kept, and nothing said.
    Parameters are not counted.

    Args:
        graph: a planned program.
        entries: what became of its parts.
        num_runs: how often it runs.
    """
    counted = set[Any]()
    for node in graph.walk():
        if node in entries and node.operation is not None and all(isinstance(n, int) for n in node.results[0].shape):
            size = _operation_residual_bytes(node.operation, entries[node], counted)
            if size is not None:
                yield node, int(num_runs * size)
        if not primitives.rematerializes_products(node.eqn):
            length = node.eqn.params["length"] if node.kind == "scan" else 1
            for body in node.bodies:
                yield from residual_bytes(body, entries, num_runs * length)


def _operation_residual_bytes(operation: Any, entry: PlanEntry, counted: set[Any]) -> float | None:
    if entry.is_product and entry.frozen is None:
        linear = operation.linear
        assert entry.choice is not None
        is_recomputed, spec = bool(entry.input_producer) and entry.choice.context.lean, linear.residual_spec()
        if entry.has_saved_input or is_recomputed or (operation.canonical_data, spec) in counted:
            return 0
        counted.add((operation.canonical_data, spec))
        return _residual_nbytes(operation.data, spec, operation.num_inputs)
    if isinstance(operation, NormOperation):
        rows = math.prod(operation.x.shape) // operation.x.shape[-1]
        return _residual_nbytes(operation.x, operation.recipe.context.spec) + 4 * rows
    if isinstance(operation, ActivationOperation):
        context, saved = operation.recipe.context, [v for v in (operation.gate, operation.up) if v is not None]
        # Faithful, it keeps the activated gate, too.
        saved += [operation.gate] if len(saved) == 2 and context.spec is not None and not context.lean else []
        return sum(_residual_nbytes(value, context.spec) for value in saved)
    return None


def _residual_nbytes(value: Value, spec: QuantSpec | None, num_inputs: int | None = None) -> float:
    """Of an array as it is, or of its codes and scales: as it is, or as a matrix with so many columns."""
    size = math.prod(value.shape)
    if spec is None or not size:
        return size * value.dtype.itemsize
    return spec.nbytes(value.shape if num_inputs is None else (size // num_inputs, num_inputs))
