"""Classifies closed-over arrays as data, such as a batch, or as constants of the model."""

from fp8jax.rewrite.graph import Graph, Value
from fp8jax.rewrite.primitives import PRODUCTS


def find_model_constants(graph: Graph) -> frozenset[int]:
    """The identities of closed-over arrays that are constants of the model.

    Such an array, or a value computed from it, is multiplied with data of the call. A matmul with batch axes may be
    attention to a closed-over memory. That memory is no constant if it passed a matmul with a parameter.
    """
    found = set[int]()
    for node in graph.walk_nested():
        if node.kind not in PRODUCTS or len(node.operands) < 2:
            continue
        for candidate, other in (node.operands[:2], node.operands[1::-1]):
            if (
                candidate.closure_ids
                and not candidate.depends_on_inputs
                and other.depends_on_inputs
                and not (_has_batch_axes(node.eqn) and _depends_on_product(candidate))
            ):
                found |= candidate.closure_ids
    return frozenset(found)


def _has_batch_axes(eqn: object) -> bool:
    numbers = getattr(eqn, "params", {}).get("dimension_numbers")
    return isinstance(numbers, tuple) and len(numbers) == 2 and any(numbers[1])


def _depends_on_product(value: Value) -> bool:
    """Whether a value is computed from a matmul with a parameter."""
    seen, todo = set[Value](), [value]
    while todo:
        value = todo.pop()
        if value in seen or not value.depends_on_params:
            continue
        seen.add(value)
        todo += [] if value.enclosing_value is None else [value.enclosing_value]
        if value.node is not None:
            if value.kind in PRODUCTS and any(operand.weight is not None for operand in value.node.operands):
                return True
            todo += value.node.operands
            todo += [body.outputs[value.node.results.index(value)] for body in value.node.bodies]
    return False
