"""Reads a program: one node for each equation, and for each value whether it is a parameter, data or a constant."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fp8jax.rewrite import closures, primitives
from fp8jax.rewrite.graph import Graph, Node, Value, Weight
from fp8jax.rewrite.primitives import CASTS, JOINS, LAYOUTS, MARKS, PARTS, RESHAPES, Body

# What is computed of constants while they are read, such as the divisor of a variance.
_FOLDED = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "gt": np.greater}


def read(closed: Any, paths: Sequence[str | None], held: Sequence[Any] = ()) -> Graph:
    """The graph of a program.

    An array that the function closes over is data, as its batch may be. Where data of a call meet it as the other
    operand of a product, it is a constant of the model.

    Args:
        closed: the program, with its constants.
        paths: for each input the path of the parameter that it is; None for data.
        held: for each what is in its place, `fp8jax.rewrite.held.kind`; none for arrays.
    """
    jaxpr = getattr(closed, "jaxpr", closed)
    kinds, model_constants = held or [None] * len(paths), frozenset[int]()
    while True:
        inputs = []
        for variable, path, kind in zip(jaxpr.invars, paths, kinds, strict=True):
            value = Value(variable.aval, data=path is None, given=path is None, trained=path is not None)
            value.weight = None if path is None else Weight(path, value, held=kind)
            inputs.append(value)
        graph = _graph(Body(jaxpr, closed.consts, range(0)), inputs, "", model_constants)
        found = closures.constants(graph)
        if not found:
            return graph
        model_constants |= found


def _graph(program: Body, inputs: list[Value], around: str, model_constants: frozenset[int]) -> Graph:
    """The graph of a program; those arrays are constants of the model."""
    nodes: list[Node] = []
    graph = Graph(inputs, nodes, [], around, model_constants)
    graph.outputs = _read(program, graph, nodes, "")
    return graph


def _read(program: Body, graph: Graph, nodes: list[Node], scope: str, inputs: list[Value] | None = None) -> list[Value]:
    """Appends the nodes of a graph's program, or of one that it calls with these inputs; returns its outputs."""
    jaxpr = program.jaxpr
    known: dict[Any, Value] = dict(zip(jaxpr.invars, graph.inputs if inputs is None else inputs, strict=True))
    known |= {
        v: _constant(v.aval, c, graph.model_constants) for v, c in zip(jaxpr.constvars, program.consts, strict=True)
    }

    def look(atom: Any) -> Value:
        return _constant(atom.aval, atom.val, graph.model_constants) if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        operands = [look(atom) for atom in eqn.invars]
        here = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
        inner = primitives.called(eqn)
        if inner is not None:
            inlined: list[Node] = []
            name = f"{eqn.primitive.name}({eqn.params.get('name', '')})"
            results = _read(inner, graph, inlined, "/".join(filter(None, (here, name))), operands)
            node = Node(eqn.primitive.name, operands, results, eqn, here, inlined=inlined)
            for each in inlined:
                each.call = node
        else:
            node = _node(eqn, operands, here, "/".join(filter(None, (graph.around, here))), graph.model_constants)
            results = _chosen(node) or node.results
        nodes.append(node)
        known |= dict(zip(eqn.outvars, results, strict=True))
    return [look(atom) for atom in jaxpr.outvars]


def _node(eqn: Any, operands: list[Value], scope: str, around: str, model_constants: frozenset[int]) -> Node:
    node = Node(eqn.primitive.name, operands, [], eqn, scope)
    data = any(value.data for value in operands)
    depends = _depends(operands)
    node.results = [Value(v.aval, node, data=data, **depends) for v in eqn.outvars]
    if node.kind == "optimization_barrier":
        for result, operand in zip(node.results, operands, strict=True):
            result.data, result.given, result.trained = operand.data, operand.given, operand.trained
            result.closed = operand.closed
            result.weight = operand.weight and dataclasses.replace(operand.weight, moved=True)
        return node
    node.sealed = node.kind in primitives.OWN_DERIVATIVE
    node.bodies = tuple(_body(eqn, program, operands, around, model_constants) for program in primitives.bodies(eqn))
    for body in node.bodies:
        for each in body.nodes:
            each.call = node
        # The condition of a choice is data, and so may be what is carried.
        for result, inside in zip(node.results, body.outputs, strict=False):
            result.data = result.data or inside.data
    if len(node.results) == 1:
        node.results[0].constant = _folded(node)
    if node.kind in ("mul", "div") and all(value.fixed or not value.data for value in operands):
        node.results[0].weight = _scaled(node)
    elif node.kind in JOINS:
        node.results[0].weight = _concatenated(node)
    elif operands and operands[0].weight is not None:
        for result in node.results:
            result.weight = _laid_out(operands[0].weight, node)
    return node


def _depends(operands: Sequence[Value]) -> dict[str, Any]:
    """What a value that is computed from these depends on."""
    closed: frozenset[int] = frozenset().union(*(value.closed for value in operands))
    return {"given": any(v.given for v in operands), "trained": any(v.trained for v in operands), "closed": closed}


def _body(eqn: Any, program: Body, operands: list[Value], around: str, model_constants: frozenset[int]) -> Graph:
    inputs = []
    turns = primitives.turns(eqn)
    rows = turns.rows if turns is not None else range(0)
    data = program.depends([operands[i].data for i in program.inputs])
    for place, (variable, i) in enumerate(zip(program.jaxpr.invars, program.inputs, strict=True)):
        operand, varies = operands[i], place in program.varying
        # What another turn gives may depend on all that the loop reads.
        depends = _depends(operands if varies and data[place] else [operand])
        value = Value(variable.aval, outer=operand, once=primitives.once(eqn), data=data[place], **depends)
        value.constant = None if varies or i in rows else operand.constant
        if operand.weight is not None and not varies:
            whole = all(step.kind in MARKS for step in operand.weight.layout)
            held = operand.weight.held if whole else None
            value.weight = Weight(operand.weight.path, value, held=held, further_paths=operand.weight.further_paths)
        inputs.append(value)
    return _graph(program, inputs, around, model_constants)


def _constant(aval: Any, array: Any, model_constants: frozenset[int]) -> Value:
    number = None
    if np.ndim(array) > 0 and id(array) not in model_constants:
        return Value(aval, data=True, closed=frozenset([id(array)]), array=array)
    if not isinstance(array, jax.core.Tracer) and np.ndim(array) == 0 and _is_number(aval.dtype):
        number = float(array)
    return Value(aval, constant=number, array=array)


def _is_number(dtype: Any) -> bool:
    real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    return real or jnp.issubdtype(dtype, jnp.bool_)


def _folded(node: Node) -> float | None:
    """The number that all elements of a node's result are, if its operands say so."""
    numbers = [value.constant for value in node.operands]
    if not numbers or numbers[0] is None:
        return None
    if node.kind in (*CASTS, *MARKS, *RESHAPES, "transpose", "slice"):
        return numbers[0] if _is_number(node.results[0].dtype) else None
    if node.kind in _FOLDED and len(numbers) == 2 and numbers[1] is not None:
        return float(_FOLDED[node.kind](numbers[0], numbers[1]))
    return None


def _chosen(node: Node) -> list[Value] | None:
    """The operand that a choice with a constant condition gives, or what two transpositions give that are none."""
    source = node.operands[0].node if node.kind == "transpose" else None
    if source is not None and source.kind == "transpose":
        first, last = source.eqn.params["permutation"], node.eqn.params["permutation"]
        if [first[i] for i in last] == list(range(len(last))):
            return source.operands[:1]
    if node.kind != "select_n" or node.operands[0].constant is None:
        return None
    return [node.operands[1 + int(node.operands[0].constant)]]


def _scaled(node: Node) -> Weight | None:
    """The one matrix among the operands of a multiplication by constants or other parameters; it is read as written."""
    matrices = [v.weight for v in node.operands if v.weight is not None and v.weight.stored.aval.ndim > 1]
    return dataclasses.replace(matrices[0], moved=True, held=None) if len(matrices) == 1 else None


def _concatenated(node: Node) -> Weight | None:
    """The parameter that parameters are side by side, as `jnp.stack` and `jnp.concatenate` put them.

    What is held in the place of one has codes of its own, and no concatenation.
    """
    weights = [value.weight for value in node.operands]
    whole = [w for w in weights if w is not None and w.held is None]
    if len(whole) < len(weights) or any(value.data for value in node.operands):
        return None
    if not jnp.issubdtype(node.results[0].dtype, jnp.floating):
        return None
    path, *further = dict.fromkeys(path for w in whole for path in (w.path, *w.further_paths))
    return Weight(path, node.results[0], further_paths=tuple(further))


def _laid_out(weight: Weight, node: Node) -> Weight | None:
    """What a layout or a part of a parameter is; None for what is computed of it."""
    if node.kind in CASTS:
        if not jnp.issubdtype(node.results[0].dtype, jnp.floating):
            return None
        # Codes of a quantized parameter are no values to quantize: these are what they are cast to.
        stored = weight.stored.dtype
        plain = jnp.issubdtype(stored, jnp.floating) and stored.itemsize > 1
        return weight if plain else dataclasses.replace(weight, moved=True)
    # Data may say which of stacked matrices it is; a row that they pick is data.
    picked = node.kind == "dynamic_slice" and sum(n != 1 for n in node.results[0].shape) > 1
    data = any(value.data for value in node.operands[1:]) and not picked
    if node.kind not in (*LAYOUTS, *PARTS, "stop_gradient") or data:
        return None
    # What carries a name may be kept under it, and no gradient passes to what is stopped: both are read as written.
    moved = weight.moved or node.kind in ("name", "stop_gradient") or not primitives.same_elements(node.eqn)
    return dataclasses.replace(weight, layout=(*weight.layout, node), moved=moved)
