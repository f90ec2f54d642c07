"""Finds the matmuls of routers before their scores, such as the first layers of an MLP.

Scores are what a softmax, top_k, argmax or sort reads. The scores of a router select or weight other values, such as
tokens or the outputs of experts. Those of an output head do not: a loss or the caller reads them.
"""

import collections
import functools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8jax.rewrite import primitives
from fp8jax.rewrite.graph import Graph, Node, Value, direct_sources, search, strip_layout
from fp8jax.rewrite.primitives import CASTS, GROUPED_KINDS, IDENTITY_PRIMITIVES, PRODUCTS, RESHAPES

ROUTER_LAYER_REASON = "a layer of a router: only routing scores depend on its result"


class Scores(NamedTuple):
    """The scores that a selection reads.

    Attributes:
        products: the last matmuls before them.
        values: the scores, and all values between them and the results of these matmuls.
    """

    products: frozenset[Node]
    values: frozenset[Value]


def is_linear(node: Node) -> bool:
    """Whether a node is a matmul of data with a value that is no data, such as a normalized parameter."""
    return node.kind == "dot_general" and sum(value.is_data for value in node.operands) == 1


def find_router_layers(graph: Graph, products: Collection[Node], selections: Sequence[Scores]) -> set[Node]:
    """The matmuls among `products` whose results lead only to the scores of routers, without the last matmuls."""
    found = _sole_sources(graph, products, selections)
    if not found:
        return found
    uses = _Uses(graph)
    steering = [scores for scores in selections if scores.products and _steers(scores, uses)]
    return _sole_sources(graph, products, steering)


def find_expert_weights(graph: Graph, sigmoids: Sequence[tuple[Value, Scores]]) -> list[Scores]:
    """The scores of sigmoids that are the weights of a sum over experts.

    A sigmoid whose result scales each channel or head is a gate, and no router.

    Args:
        sigmoids: results of sigmoids, with what these read.
    """
    uses = _Uses(graph) if sigmoids else None
    return [scores for value, scores in sigmoids if uses is not None and _weights_experts(value, scores, uses)]


def _weights_experts(sigmoid: Value, scores: Scores, uses: "_Uses") -> bool:
    """Whether weights that are computed from a sigmoid alone are factors in a sum over its last axis, the experts."""
    num_experts, size = sigmoid.shape[-1] if sigmoid.shape else 1, sigmoid.aval.size
    if not isinstance(num_experts, int) or num_experts < 2:
        return False
    source = _Source(scores)
    visited, todo = {sigmoid}, [sigmoid]
    while todo:
        value = todo.pop()
        new = list(uses.inside_of_loops(value))
        for node in uses.readers.get(value, ()):
            others = [v for v in node.operands if v not in visited and _is_float_data(v)]
            steered = [v for v in _steered_values(node, value) if v in others]
            # A loop over experts has a slice of the weights.
            is_expert = node.kind == "mul" and _base_size(value) * num_experts == size
            is_sum = node.kind == "mul" and any(_sums(reader, num_experts) for reader in uses.readers_of(node))
            is_sum = is_sum or (node.kind == "dot_general" and _has_no_free_axes(node, value))
            if (is_expert or is_sum) and any(map(source.is_bypassed_by, steered)):
                return True
            if not others and not node.bodies and node.kind not in PRODUCTS:
                new += node.results
        todo += [v for v in new if v not in visited]
        visited.update(new)
    return False


def _sums(node: Node, num_experts: int) -> bool:
    """Whether a node sums over an axis of this size."""
    return node.kind == "reduce_sum" and num_experts in [node.operands[0].shape[i] for i in node.eqn.params["axes"]]


def _has_no_free_axes(node: Node, value: Value) -> bool:
    contract, batch = node.eqn.params["dimension_numbers"]
    side = node.operands.index(value)
    return len(contract[side]) + len(batch[side]) == value.aval.ndim


def _base_size(value: Value) -> Any:
    """The size of a value before casts and broadcasts; it may be symbolic."""
    return strip_layout(value, (*CASTS, *IDENTITY_PRIMITIVES, *RESHAPES)).aval.size


def _is_larger(value: Value, score: Value) -> bool:
    """Whether a value has more elements than a score before it is broadcast; False if that is unknown."""
    try:
        return bool(value.aval.size > _base_size(score))
    except jax.errors.InconclusiveDimensionOperation:
        return False


class _Source:
    """The data that scores are computed from."""

    def __init__(self, scores: Scores) -> None:
        self.scores = scores.values.union(*(node.results for node in scores.products))
        self._operands = [value for node in scores.products for value in node.operands]

    @functools.cached_property
    def _sources(self) -> set[Value]:
        return {value for value in search(self._operands, direct_sources) if _is_float_data(value)}

    def is_bypassed_by(self, value: Value) -> bool:
        """Whether a value is computed from the same data, but not from the scores."""
        ancestors = search([value], lambda v: [] if v in self._sources else direct_sources(v))
        return self.scores.isdisjoint(ancestors) and not self._sources.isdisjoint(ancestors)


def _sole_sources(graph: Graph, products: Collection[Node], selections: Sequence[Scores]) -> set[Node]:
    """The matmuls whose results lead only to these scores, without those that end in them."""
    values = {value for scores in selections for value in scores.values}
    last = {node for scores in selections for node in scores.products}
    ancestors = _Ancestors(graph)
    sources = ancestors.search(values)
    candidates = {node for node in products if node not in last and not sources.isdisjoint(node.results)}
    if candidates:
        live = ancestors.search([*graph.outputs, *ancestors.data_operands], values)
        candidates = {node for node in candidates if live.isdisjoint(node.results)}
    return candidates


class _Ancestors:
    """The values that each value is computed from, in a graph and its sub-jaxprs.

    Attributes:
        data_operands: operands of matmuls of data with data. A router has no attention, so the layers before such a
            matmul are none of a router.
    """

    def __init__(self, graph: Graph) -> None:
        self.data_operands: list[Value] = []
        self._producers: dict[Value, Node] = {}
        self._carries: dict[Value, Value] = {}
        for node in graph.walk_nested():
            self._producers |= dict.fromkeys(node.results, node)
            for body in node.bodies:
                self._carries |= dict(_carries(node, body))
            if node.kind in PRODUCTS and not is_linear(node):
                self.data_operands += node.operands

    def search(self, values: Collection[Value], excluded: Collection[Value] = ()) -> set[Value]:
        """Values and all that they are computed from, other than through the excluded values."""
        found, todo = set[Value](), list(values)
        while todo:
            value = todo.pop()
            if value in found or value in excluded:
                continue
            found.add(value)
            todo += [] if value.enclosing_value is None else [value.enclosing_value]
            todo += [self._carries[value]] if value in self._carries else []
            producer = self._producers.get(value)
            if producer is not None:
                todo += [body.outputs[producer.results.index(value)] for body in producer.bodies]
                todo += [operand for operand in producer.operands if not _enters(producer, operand)]
        return found


def _carries(node: Node, body: Graph) -> Iterator[tuple[Value, Value]]:
    """The inputs of a loop's body that later iterations replace, each with the output that replaces it."""
    programs = primitives.sub_jaxprs(node.eqn)
    program = programs[min(node.bodies.index(body), len(programs) - 1)]
    return ((body.inputs[i], body.outputs[output]) for i, output in program.carry_outputs.items())


class _Uses:
    """The nodes that read each value, and the values that are computed from it, in a graph and its sub-jaxprs.

    Later iterations of a loop are left out, in which all values may depend on the scores of the first.
    """

    def __init__(self, graph: Graph) -> None:
        self.readers: dict[Value, list[Node]] = {}
        self._next: dict[Value, list[Value]] = {}
        for node in graph.walk_nested():
            for operand in node.operands:
                self.readers.setdefault(operand, []).append(node)
            for body in node.bodies:
                for value in body.inputs:
                    self._add(value.enclosing_value, value)
                for output, result in zip(body.outputs, node.results, strict=False):
                    self._add(output, result)

    def _add(self, source: Value | None, value: Value) -> None:
        if source is not None:
            self._next.setdefault(source, []).append(value)

    def readers_of(self, node: Node) -> list[Node]:
        """The nodes that read a result of a node."""
        return [reader for value in node.results for reader in self.readers.get(value, ())]

    def inside_of_loops(self, value: Value) -> list[Value]:
        """The inputs of sub-jaxprs that a value is, and the results of nodes with sub-jaxprs whose output it is."""
        return self._next.get(value, [])

    def computed_from(self, value: Value) -> list[Value]:
        results = [v for node in self.readers.get(value, ()) if not _enters(node, value) for v in node.results]
        return [*self.inside_of_loops(value), *results]


def _enters(node: Node, value: Value) -> bool:
    """Whether an operand of a node is an input of its bodies."""
    return any(inner.enclosing_value is value for body in node.bodies for inner in body.inputs)


def _steers(scores: Scores, uses: _Uses) -> bool:
    """Whether scores select or weight values that have the source of the scores but do not depend on these."""
    source = _Source(scores)
    visited, todo = set(source.scores), collections.deque(source.scores)
    while todo:
        value = todo.popleft()  # the nearest readers first
        for node in uses.readers.get(value, ()):
            steered = [v for v in _steered_values(node, value) if v not in visited and _is_float_data(v)]
            if _selects_matrices(node, value) or any(map(source.is_bypassed_by, steered)):
                return True
        new = [v for v in uses.computed_from(value) if v not in visited]
        visited.update(new)
        todo += new
    return False


def _is_float_data(value: Value) -> bool:
    return value.is_data and value.aval.ndim > 0 and bool(jnp.issubdtype(value.dtype, jnp.floating))


def _selects_matrices(node: Node, index: Value) -> bool:
    """Whether a value is the index of matrices that a node gathers from stacked ones, as those of experts."""
    if node.kind not in ("gather", "dynamic_slice") or index not in node.operands[1:]:
        return False
    sizes = node.eqn.params["slice_sizes"]
    return node.operands[0].weight is not None and sum(n > 1 for n in sizes) > 1


def _steered_values(node: Node, score: Value) -> list[Value]:
    """The operands of a node that a value computed from scores selects, orders or weights, as whole rows.

    Scores of heads only select or weight single numbers, such as the loss of a token.
    """
    kind, operands, params = node.kind, node.operands, node.eqn.params
    others = [value for value in operands if value is not score]
    if kind in ("gather", "dynamic_slice"):
        return operands[:1] if score in operands[1:] and math.prod(params["slice_sizes"]) > 1 else []
    if kind.startswith("scatter"):
        return operands[2:] if score is operands[1] and params["dimension_numbers"].update_window_dims else []
    if kind == "dynamic_update_slice":
        return operands[1:2] if score in operands[2:] else []
    if kind == "cond":
        return operands[1:] if score is operands[0] else []
    if kind in GROUPED_KINDS:
        return operands[:1] if score in operands[2:] else []
    if kind in ("mul", "div", "select_n"):
        return [value for value in others if _is_larger(value, score)]
    if kind == "dot_general":
        contract, batch = params["dimension_numbers"]
        num_summed = [len(contract[i]) + len(batch[i]) for i in range(2)]
        return [v for v, n in zip(operands, num_summed, strict=True) if v is not score and v.aval.ndim > n]
    return []
