"""Products of one input that a recipe computes as if they were written as one, of their weights side by side."""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array

from fp8jax.core.recipe import Linear
from fp8jax.ops.autodiff.residuals import StoredWeight
from fp8jax.rewrite import biases
from fp8jax.rewrite.entries import PlanEntry, WeightMatmul
from fp8jax.rewrite.graph import Graph, Node, Value, canonical_value
from fp8jax.rewrite.operations import ActivationOperation, ProductOperation

if TYPE_CHECKING:
    from fp8jax.rewrite.run import Interpreter


@dataclasses.dataclass(eq=False)
class JoinedOperation(ProductOperation):
    """A product of data with several parameters (inputs, outputs), side by side under one scale.

    Attributes:
        weights: the parameters. bias_values: their biases, or none.
    """

    weights: tuple[Value, ...] = ()
    bias_values: tuple[Value, ...] = ()

    @property
    def has_layout(self) -> bool:
        return True

    def _stored_weight(self, interpreter: "Interpreter") -> StoredWeight:
        return StoredWeight([interpreter.array(w) for w in self.weights], functools.partial(jnp.concatenate, axis=1))

    def _bias(self, interpreter: "Interpreter") -> Array | None:
        flat_biases = [interpreter.array(row).reshape(-1) for row in self.bias_values]
        return jnp.concatenate(flat_biases) if flat_biases else None


def join_products(graph: Graph, group: Sequence[WeightMatmul], entries: dict[Node, PlanEntry]) -> None:
    """Puts one operation in place of those products of a group that `Linear.fuse_parallel_matmuls` joins, and tells it.

    Products stay apart whose results an activation reads: its backward pass makes the codes of their gradients. So do
    those whose parameters have no layout as (inputs, outputs), or lie on Explicit axes of a mesh; and those whose bias
    is computed, as a row of several is, for that may be after the first product.

    Args:
        graph: that the products are in.
        group: products of one array, operations in their places.
        entries: of the plan; those of what is joined are changed.
    """
    activation_inputs = {
        v for node in graph.walk() if isinstance(node.operation, ActivationOperation) for v in node.operands
    }
    groups = collections.defaultdict[Any, list[WeightMatmul]](list)
    for p in group:
        operation_node, linear = p.operation_node or p.node, p.choice.linear
        operation = operation_node.operation
        if (
            linear is None
            or not linear.fuse_parallel_matmuls
            or type(operation) is not ProductOperation
            or activation_inputs.intersection(operation_node.results)
        ):
            continue
        is_plain = (
            operation.side == 1
            and not operation.layout
            and operation.saved_data is None
            and operation.split_sizes is None
            and not operation.is_transposed
        )
        numbers = operation.params["dimension_numbers"]
        is_plain = is_plain and tuple(numbers[0][1]) == (0,) and not any(numbers[1])  # (inputs, outputs), as they lie
        if is_plain and biases.has_explicit_sharding(operation.weight):
            reason = f"{entries[operation_node].reason}; not joined, for its parameter lies on Explicit axes"
            entries[operation_node] = entries[operation_node]._replace(reason=reason)
        elif (
            is_plain
            and operation.weight.aval.ndim == 2
            and operation.weight.node is None
            and (operation.bias is None or operation.bias.node is None)
        ):
            data, signature = (
                canonical_value(p.data),
                (p.data.dtype, p.data.shape, operation.weight.dtype, str(operation.params), operation.bias is None),
            )
            groups[data, linear, signature, id(operation_node.enclosing_node)].append(p)
    order = {node: i for i, node in enumerate(graph.walk())}
    for (_, linear, *_), products in groups.items():
        if len(products) > 1:
            _replace_with_joined(sorted(products, key=lambda p: order[p.operation_node or p.node]), linear, entries)


def _replace_with_joined(products: Sequence[WeightMatmul], linear: Linear, entries: dict[Node, PlanEntry]) -> None:
    nodes = [p.operation_node or p.node for p in products]
    operations = [operation for node in nodes if isinstance(operation := node.operation, ProductOperation)]
    first, bias_values = operations[0], tuple(o.bias for o in operations if o.bias is not None)
    weights = tuple(o.weight for o in operations)
    joined_node, results = nodes[0], [result for node in nodes for result in node.results]
    for node in nodes:
        node.operation, node.results = None, []
    joined_node.results = results
    for result in results:
        result.node = joined_node
    joined_node.operands = [first.data, *weights, *bias_values]
    joined_node.operation = JoinedOperation(
        first.recipe, first.data, first.weight, (), first.side, first.canonical_data, params=first.params,
        bias=first.bias, split_sizes=tuple(w.shape[1] for w in weights), weights=weights, bias_values=bias_values,
    )  # fmt: skip
    for p, entry_node in zip(products, nodes, strict=True):
        other_paths = ", ".join(q.path for q in products if q is not p)
        entries[entry_node] = entries[entry_node]._replace(
            reason=f"{entries[entry_node].reason}; joined with {other_paths}"
        )
