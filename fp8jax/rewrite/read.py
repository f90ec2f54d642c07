"""Reads a jaxpr into a graph, and finds which values are parameters, data or constants."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fp8jax.rewrite import grouped, primitives
from fp8jax.rewrite.graph import Graph, LoopPart, Node, Value, Weight, direct_sources, is_order_preserving, search
from fp8jax.rewrite.primitives import (
    CASTS,
    CONCAT_PRIMITIVES,
    GATHER_PRIMITIVES,
    IDENTITY_PRIMITIVES,
    LAYOUTS,
    PRODUCTS,
    RESHAPES,
    SLICING_PRIMITIVES,
    SubJaxpr,
)
from fp8jax.rewrite.rules import GroupedProduct


def find_model_constants(graph: Graph) -> frozenset[int]:
    """The identities of closed-over arrays that are constants of the model.

    Such an array, or a value computed from it, is multiplied with data of the call. A matmul with batch axes may be
    attention to a closed-over memory. That memory is not a constant if it passed a matmul with a parameter.
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


def _has_batch_axes(eqn: Any) -> bool:
    numbers = eqn.params.get("dimension_numbers")
    return isinstance(numbers, tuple) and len(numbers) == 2 and any(numbers[1])


def _depends_on_product(value: Value) -> bool:
    """Whether a value is computed from a matmul with a parameter."""
    sources = search([value], lambda v: [source for source in direct_sources(v) if source.depends_on_params])
    products = (v.node for v in sources if v.kind in PRODUCTS and v.node is not None)
    return any(operand.weight is not None for node in products for operand in node.operands)


# Operations that are folded if their operands are constants, such as the divisor of a variance.
_FOLDED = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "gt": np.greater}


def read(
    closed_jaxpr: Any,
    paths: Sequence[str | None],
    frozen: Sequence[Any] = (),
    grouped_products: Sequence[GroupedProduct] = (),
    split_loop: Callable[[Sequence[str], int], tuple[LoopPart, ...]] | None = None,
) -> Graph:
    """The graph of a program.

    A closed-over array is data, as it may be a batch. If it is multiplied with data of the call, it is a constant of
    the model.

    Args:
        paths: for each input its parameter path; None for data.
        frozen: for each input `fp8jax.rewrite.frozen_params.frozen_info`; empty if all are arrays.
        grouped_products: the functions that the rules name as grouped products.
    """
    jaxpr = getattr(closed_jaxpr, "jaxpr", closed_jaxpr)
    frozen_infos, model_constants = frozen or [None] * len(paths), frozenset[int]()
    while True:
        inputs = []
        for variable, path, kind in zip(jaxpr.invars, paths, frozen_infos, strict=True):
            value = Value(
                variable.aval, is_data=path is None, depends_on_inputs=path is None, depends_on_params=path is not None
            )
            value.weight = None if path is None else Weight(path, value, frozen=kind)
            inputs.append(value)
        graph = Graph(inputs, [], [], "", model_constants, split_loop)
        graph.outputs = _read_equations(SubJaxpr(jaxpr, closed_jaxpr.consts, range(0)), graph, graph.nodes, "")
        found = find_model_constants(graph)
        if not found:
            grouped.annotate(graph, grouped_products)
            return graph
        model_constants |= found


def _read_equations(
    sub_jaxpr: SubJaxpr, graph: Graph, nodes: list[Node], scope: str, inputs: list[Value] | None = None
) -> list[Value]:
    """Append the nodes of a graph's jaxpr, or of one that it calls with `inputs`; return its outputs."""
    jaxpr = sub_jaxpr.jaxpr
    values: dict[Any, Value] = dict(zip(jaxpr.invars, graph.inputs if inputs is None else inputs, strict=True))
    values |= {
        v: _constant(v.aval, c, graph.model_constants) for v, c in zip(jaxpr.constvars, sub_jaxpr.consts, strict=True)
    }

    def value_of(atom: Any) -> Value:
        return _constant(atom.aval, atom.val, graph.model_constants) if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [value_of(atom) for atom in eqn.invars]
        equation_scope = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
        inner = primitives.inlinable_jaxpr(eqn)
        if inner is not None:
            inlined: list[Node] = []
            name = f"{eqn.primitive.name}({eqn.params.get('name', '')})"
            results = _read_equations(inner, graph, inlined, "/".join(filter(None, (equation_scope, name))), operands)
            node = Node(eqn.primitive.name, operands, results, eqn, equation_scope, inlined=inlined)
            for inner_node in inlined:
                inner_node.enclosing_node = node
        else:
            node = _make_node(eqn, operands, equation_scope, graph)
            results = _forwarded_operands(node) or node.results
        nodes.append(node)
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def _make_node(eqn: Any, operands: list[Value], scope: str, graph: Graph) -> Node:
    node = Node(eqn.primitive.name, operands, [], eqn, scope)
    if node.kind == "optimization_barrier":
        for variable, operand in zip(eqn.outvars, operands, strict=True):
            weight = operand.weight and dataclasses.replace(operand.weight, is_relayouted=True)
            is_data, depends = operand.is_data, _dependencies([operand])
            node.results.append(Value(variable.aval, node, weight=weight, is_data=is_data, **depends))
        return node
    is_data, depends = any(value.is_data for value in operands), _dependencies(operands)
    node.results = [Value(v.aval, node, is_data=is_data, **depends) for v in eqn.outvars]
    node.has_custom_rule = node.kind in primitives.CUSTOM_DERIVATIVE_CALLS
    programs = primitives.sub_jaxprs(eqn)
    node.bodies = tuple(_make_body(node, program, graph) for program in programs)
    if node.kind == "scan":
        node.parts = _split(node, graph)
        node.bodies += tuple(_make_body(node, programs[0], graph) for _ in node.parts[1:])
    for body in node.bodies:
        for inner_node in body.nodes:
            inner_node.enclosing_node = node
        # An output may be data although no operand is, if the condition or a carry is.
        for result, body_output in zip(node.results, body.outputs, strict=False):
            result.is_data = result.is_data or body_output.is_data
    if len(node.results) == 1:
        node.results[0].constant = _folded_constant(node)
    if node.kind in ("mul", "div") and all(value.is_closure_data or not value.is_data for value in operands):
        node.results[0].weight = _scaled_weight(node)
    elif node.kind in (*CONCAT_PRIMITIVES, *GATHER_PRIMITIVES):
        node.results[0].weight = _concatenated_weight(node)
    elif operands and operands[0].weight is not None:
        for result in node.results:
            result.weight = _relayouted_weight(operands[0].weight, node)
    return node


def _dependencies(operands: Sequence[Value]) -> dict[str, Any]:
    """The dependencies of a value that is computed from these operands, by the names of fields of `Value`."""
    return {
        "depends_on_inputs": any(v.depends_on_inputs for v in operands),
        "depends_on_params": any(v.depends_on_params for v in operands),
        "closure_ids": frozenset().union(*(v.closure_ids for v in operands)),
    }


def _split(node: Node, graph: Graph) -> tuple[LoopPart, ...]:
    """The parts of a scan, by the matrices that it has for each iteration. `graph` is the one around it."""
    length = node.eqn.params["length"]
    if not _iterates_over_blocks(node):
        return (LoopPart(length),)
    has_inner_loop = any(
        inner.kind == "scan" and _iterates_over_blocks(inner) for inner in node.bodies[0].walk_nested()
    )
    matrices = _scanned_matrices(node)
    if graph.split_loop is None or has_inner_loop or not all(_is_whole_stack(value, length) for value in matrices):
        return (LoopPart(length, has_unknown_blocks=True),)
    return graph.split_loop([value.weight.path for value in matrices if value.weight is not None], length)


def _scanned_matrices(node: Node) -> list[Value]:
    """The operands of a scan that are matrices of parameters, one for each iteration."""
    scanned = [node.operands[i] for i in primitives.loop_info(node.eqn).scanned_operands]  # type: ignore[union-attr]
    return [value for value in scanned if value.weight is not None and value.aval.ndim > 2]


def _iterates_over_blocks(node: Node) -> bool:
    """Whether a scan has matrices for each iteration, and a matmul reads what the last iteration computed.

    In a loop over experts, no matmul does: it adds up their results.
    """
    if not _scanned_matrices(node):
        return False
    (sub_jaxpr,), body = primitives.sub_jaxprs(node.eqn), node.bodies[0]
    inputs, carries = set(body.inputs), {body.inputs[i] for i in sub_jaxpr.carry_outputs}
    carries = {value for value in carries if jnp.issubdtype(value.dtype, jnp.floating)}  # a counter is no result
    products = [inner for inner in body.walk_nested() if inner.kind in PRODUCTS]
    data = [value for inner in products for value in inner.operands if value.weight is None]
    found = search(data, lambda value: [] if value in inputs else direct_sources(value))
    return not data or not carries.isdisjoint(found)


def _is_whole_stack(value: Value, length: int) -> bool:
    """Whether the first axis of a value is an axis of this length of a parameter, as the caller stores it."""
    axis = 0
    while value.weight is not None:
        for step in reversed(value.weight.layout):
            if step.kind == "transpose":
                axis = step.eqn.params["permutation"][axis]
            elif step.operands[0].shape[: axis + 1] != step.results[0].shape[: axis + 1]:
                return False
        stored = value.weight.stored
        if stored.kind == "concatenate" and stored.node is not None and stored.node.eqn.params["dimension"] != axis:
            value = stored.node.operands[0]
        elif stored.enclosing_value is not None:
            value = stored.enclosing_value
        else:
            return stored.node is None and stored.shape[axis] == length
    return False


def _make_body(node: Node, sub_jaxpr: SubJaxpr, graph: Graph) -> Graph:
    """The graph of a node's sub-jaxpr; `graph` is the one around it."""
    eqn, operands, inputs = node.eqn, node.operands, []
    info = primitives.loop_info(eqn)
    scanned = info.scanned_operands if info is not None else range(0)
    # The edges of a device's layers, or of a loop in one over parameters, are not edges of the model.
    iterates_over_params = any(
        value.weight is not None and (i in scanned or primitives.splits_first_axis(eqn, i, partly=True))
        for i, value in enumerate(operands)
    )
    is_data = sub_jaxpr.data_dependent_inputs([operands[i].is_data for i in sub_jaxpr.operand_indices])
    for input_index, (variable, i) in enumerate(zip(sub_jaxpr.jaxpr.invars, sub_jaxpr.operand_indices, strict=True)):
        operand, is_carried = operands[i], input_index in sub_jaxpr.carry_outputs
        # A later iteration may depend on all operands of the loop.
        depends = _dependencies(operands if is_carried and is_data[input_index] else [operand])
        value = Value(
            variable.aval,
            enclosing_value=operand,
            is_loop_invariant=primitives.is_outside_loop(eqn),
            is_data=is_data[input_index],
            **depends,
        )
        value.constant = None if is_carried or i in scanned else operand.constant
        if operand.weight is not None and not is_carried:
            has_no_layout = all(step.kind in IDENTITY_PRIMITIVES for step in operand.weight.layout)
            frozen = operand.weight.frozen if has_no_layout else None
            value.weight = Weight(operand.weight.path, value, frozen=frozen, further_paths=operand.weight.further_paths)
        inputs.append(value)
    outer_scope = "/".join(filter(None, (graph.outer_scope, node.scope)))
    body = Graph(inputs, [], [], outer_scope, graph.model_constants, None if iterates_over_params else graph.split_loop)
    body.outputs = _read_equations(sub_jaxpr, body, body.nodes, "")
    return body


def _constant(aval: Any, array: Any, model_constants: frozenset[int]) -> Value:
    number = None
    if np.ndim(array) > 0 and id(array) not in model_constants:
        return Value(aval, is_data=True, closure_ids=frozenset([id(array)]), array=array)
    if not isinstance(array, jax.core.Tracer) and np.ndim(array) == 0 and _is_number(aval.dtype):
        number = float(array)
    return Value(aval, constant=number, array=array)


def _is_number(dtype: Any) -> bool:
    real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    return real or jnp.issubdtype(dtype, jnp.bool_)


def _folded_constant(node: Node) -> float | None:
    """The number that all elements of a node's result equal; None if unknown."""
    numbers = [value.constant for value in node.operands]
    if not numbers or numbers[0] is None:
        return None
    if node.kind in (*CASTS, *IDENTITY_PRIMITIVES, *RESHAPES, "transpose", "slice"):
        return numbers[0] if _is_number(node.results[0].dtype) else None
    if node.kind in _FOLDED and len(numbers) == 2 and numbers[1] is not None:
        return float(_FOLDED[node.kind](numbers[0], numbers[1]))
    return None


def _forwarded_operands(node: Node) -> list[Value] | None:
    """The operand that a constant select, or a transpose that undoes another, returns; else None."""
    source = node.operands[0].node if node.kind == "transpose" else None
    if source is not None and source.kind == "transpose":
        first, last = source.eqn.params["permutation"], node.eqn.params["permutation"]
        if [first[i] for i in last] == list(range(len(last))):
            return source.operands[:1]
    if node.kind != "select_n" or node.operands[0].constant is None:
        return None
    return [node.operands[1 + int(node.operands[0].constant)]]


def _scaled_weight(node: Node) -> Weight | None:
    """The one matrix among the factors of a product or quotient without data; else None. (n, 1) is a vector."""
    weights = [v.weight for v in node.operands if v.weight is not None]
    matrices = [weight for weight in weights if sum(n != 1 for n in weight.stored.shape) > 1]
    return dataclasses.replace(matrices[0], is_relayouted=True, frozen=None) if len(matrices) == 1 else None


def _concatenated_weight(node: Node) -> Weight | None:
    """The weight of parameters that `jnp.stack` or `jnp.concatenate` joins, or of one that devices gather.

    Frozen parameters have their own codes, and cannot be joined.
    """
    weights = [value.weight for value in node.operands]
    unfrozen = [w for w in weights if w is not None and w.frozen is None]
    if len(unfrozen) < len(weights) or any(value.is_data for value in node.operands):
        return None
    if not jnp.issubdtype(node.results[0].dtype, jnp.floating):
        return None
    path, *further = dict.fromkeys(path for w in unfrozen for path in (w.path, *w.further_paths))
    return Weight(path, node.results[0], further_paths=tuple(further))


def _relayouted_weight(weight: Weight, node: Node) -> Weight | None:
    """The weight of a node's result if it casts, slices or relayouts a weight; None if it computes something else."""
    if node.kind in CASTS:
        if not jnp.issubdtype(node.results[0].dtype, jnp.floating):
            return None
        # A parameter stored in codes is not quantized itself: its cast values are.
        stored = weight.stored.dtype
        is_float = jnp.issubdtype(stored, jnp.floating) and stored.itemsize > 1
        return weight if is_float else dataclasses.replace(weight, is_relayouted=True)
    # Data may select one of stacked matrices; a single row that data select is data.
    is_matrix_slice = node.kind == "dynamic_slice" and sum(n != 1 for n in node.results[0].shape) > 1
    data = any(value.is_data for value in node.operands[1:]) and not is_matrix_slice
    if node.kind not in (*LAYOUTS, *SLICING_PRIMITIVES, "stop_gradient") or data:
        return None
    # A named value may be saved under its name, and stop_gradient drops gradients: both are read as written.
    is_relayouted = weight.is_relayouted or node.kind in ("name", "stop_gradient") or not is_order_preserving(node)
    return dataclasses.replace(weight, layout=(*weight.layout, node), is_relayouted=is_relayouted)
