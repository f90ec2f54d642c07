"""Heads and routers, read off the graph: products whose results are the function's outputs, or choose, or are narrow.

A result that a function returns is an output head's; one that goes into softmax, top_k or argmax is a head's or a
router's. Their errors go straight into the loss, or send tokens elsewhere, and both are small. A product with fewer
than 16 outputs gains no time in 8 bits. It often is a head whose result the function reads itself, as a critic's value.
"""

import math
from collections.abc import Collection, Iterator
from typing import Any

import jax.numpy as jnp

from fp8jax.rewrite.graph import Graph, Node, Value
from fp8jax.rewrite.primitives import CHOICES, JOINS, LAYOUTS, PARTS, PRODUCTS

# What a result stays a result under: casts, layouts, parts, and functions of one value that soften or scale it.
_SAME = (
    *(*LAYOUTS, *PARTS, *JOINS, "reduce_precision", "stop_gradient", "gather", "pad", "select_n"),
    *("neg", "tanh", "logistic", "clamp", "mul", "div", "add", "sub", "add_any"),
)
_SCALINGS = ("mul", "div", "add", "sub", "add_any")
# The operands of these that are values, not conditions or places.
_VALUES = {"select_n": slice(1, None), "gather": slice(0, 1), "dynamic_slice": slice(0, 1)}
NARROWEST = 16
NARROW = f"fewer than {NARROWEST} outputs"
OUTPUT, _CHOOSES = "an output head: the function returns its result", "a router, gate or head: {} reads its result"


class Flow:
    """Where the results of products go.

    Args:
        graph: of the whole program.
        products: the nodes of products with parameters.
        results: how many of the outputs, the first ones, are what the function returns; the rest is its state.
        arguments: the inputs that are arguments of the function; None for all that are data.
    """

    def __init__(
        self, graph: Graph, products: set[Node], results: int | None = None, arguments: Collection[int] | None = None
    ) -> None:
        self._graph, self._products = graph, products
        self._returned = graph.outputs[:results]
        self._given = graph.inputs if arguments is None else [graph.inputs[i] for i in arguments]
        self._results: dict[Value, frozenset[Node] | None] = {}

    def heads(self) -> dict[Node, str]:
        """The products that are heads or routers, with the reason.

        A result that has the shape of a floating input is no output: who gives a part of a model, such as a perceptron
        whose last product returns to the width of its input, wants that product, too. And where only outputs would be
        left, none is: the function is a part, such as projections that are returned.
        """
        reasons = {node: _CHOOSES.format(name) for node, name in self._chosen()}
        given = [v for v in self._given if v.data]
        # Without arguments beside parameters its arguments are what it closes over.
        given = given or [v for node in self._graph.everywhere() for v in node.operands if v.array is not None]
        shapes = {v.shape for v in given if v.data and jnp.issubdtype(v.dtype, jnp.floating)}
        outputs = [value for value in self._returned if value.shape not in shapes]
        returned = {node for value in outputs for node in self._of(value) or ()} - reasons.keys() - self._multiplied()
        if self._products - reasons.keys() - returned:
            reasons |= dict.fromkeys(returned, OUTPUT)
        return reasons

    def _chosen(self) -> Iterator[tuple[Node, str]]:
        totals = {_plain(node.operands[-1]) for node in self._graph.everywhere() if node.kind in ("div", "log")}
        for node in self._graph.everywhere():
            if node.kind in CHOICES:
                yield from ((product, CHOICES[node.kind]) for product in self._of(node.operands[0]) or ())
            if node.kind == "exp" and (less := _plain(node.operands[0])).kind == "sub" and less.node is not None:
                scores, largest = less.node.operands
                found = self._of(scores)
                if found and found == self._largest(largest):
                    yield from ((product, "softmax") for product in found)
            # Written without its largest element: the sum divides, or its logarithm is taken.
            if (
                node.kind == "reduce_sum"
                and node.results[0] in totals
                and (powers := _plain(node.operands[0])).kind == "exp"
                and powers.node
            ):
                last = tuple(node.eqn.params["axes"]) == (powers.aval.ndim - 1,)
                found = self._of(powers.node.operands[0]) if last else None
                yield from ((product, "softmax") for product in found or ())

    def _of(self, value: Value) -> frozenset[Node] | None:
        """The products whose result a value is, up to a bias, scale and the like; None for other data."""
        if value not in self._results:
            self._results[value] = self._look(value)
        return self._results[value]

    def _look(self, value: Value) -> frozenset[Node] | None:
        node = value.node
        if not value.data or value.fixed or value.constant is not None:
            return frozenset()
        if node is None:
            return None if value.outer is None else self._of(value.outer)
        if node in self._products:
            return frozenset([node])
        if node.bodies:
            place = node.results.index(value)
            return _joined([self._of(body.outputs[place]) for body in node.bodies])
        if node.kind not in _SAME:
            return None
        operands = node.operands[_VALUES.get(node.kind, slice(None))]
        if node.kind == "optimization_barrier":
            operands = [operands[node.results.index(value)]]
        each = [self._of(operand) for operand in operands]
        return None if node.kind in _SCALINGS and sum(bool(e) for e in each) > 1 else _joined(each)

    def _largest(self, value: Value) -> frozenset[Node] | None:
        """The products of whose result a value is the largest element."""
        value, node = _plain(value), _plain(value).node
        if node is None or not value.data:
            return None
        if node.kind == "reduce_max":
            return self._of(node.operands[0])
        if node.kind in ("max", "select_n"):
            found = [self._largest(o) for o in node.operands[_VALUES.get(node.kind, slice(None))] if o.data]
            return next((each for each in found if each), None)
        return None

    def _multiplied(self) -> set[Node]:
        """The products whose results later products are computed from."""
        seen = set[Value]()
        todo = [o for node in self._graph.everywhere() if node.kind in PRODUCTS for o in node.operands]
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            todo += [] if value.outer is None else [value.outer]
            if value.node is not None:
                todo += value.node.operands
                place = value.node.results.index(value)
                todo += [body.outputs[place] for body in value.node.bodies]
        return {value.node for value in seen if value.node in self._products and value.node is not None}


def outputs(node: Node, side: int) -> int:
    """How many outputs a product with the matrix that is its operand `side` has, for each of its batch axes."""
    shape, params = node.operands[side].shape, node.eqn.params
    if node.kind != "dot_general":
        return shape[-1]
    contract, batch = params["dimension_numbers"]
    return math.prod(n for axis, n in enumerate(shape) if axis not in (*contract[side], *batch[side]))


def _plain(value: Value) -> Value:
    while value.node is not None and value.kind in (*LAYOUTS, "stop_gradient") and len(value.node.results) == 1:
        value = value.node.operands[0]
    return value


def _joined(each: list[frozenset[Node] | None]) -> frozenset[Node] | None:
    """What is known of a value that may be any of several, or is computed of all."""
    known: list[Any] = [e for e in each if e is not None]
    return frozenset().union(*known) if len(known) == len(each) else None
