"""Finds output heads and routers in a graph, and matmuls that are too narrow for 8 bits.

Heads and routers are small, and their errors change the loss or the routing directly. A matmul with fewer than 16
outputs gains no time in 8 bits. It often is a head inside of the function, such as a critic's value.
"""

import collections
import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from fp8jax.rewrite.graph import Graph, LoopPart, Node, Value, direct_sources, search, strip_layout
from fp8jax.rewrite.primitives import (
    CONCAT_PRIMITIVES,
    LAYOUTS,
    PRODUCTS,
    RESHAPES,
    SELECTION_PRIMITIVES,
    SLICING_PRIMITIVES,
)
from fp8jax.rewrite.routers import (
    ROUTER_LAYER_REASON,
    Scores,
    find_expert_weights,
    find_router_layers,
    is_linear,
)

# Casts, layouts, slices and functions of one value, under which a head's result is still its result.
_TRANSPARENT = (
    *(
        *LAYOUTS,
        *SLICING_PRIMITIVES,
        *CONCAT_PRIMITIVES,
        "reduce_precision",
        "stop_gradient",
        "gather",
        "pad",
        "select_n",
    ),
    *("neg", "tanh", "logistic", "clamp", "mul", "div", "add", "sub", "add_any"),
)
_FORWARDED = (*LAYOUTS, "stop_gradient")
_SCALINGS = ("mul", "div", "add", "sub", "add_any")
# Further elementwise functions, such as those between a router and the selection of experts.
_ELEMENTWISE_FUNCTIONS = (
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "sqrt",
    "square",
    "integer_pow",
    "abs",
    "max",
    "min",
    "erf",
)
# Further functions in norms, such as that of a projection in a cosine router.
_NORMALIZATIONS = ("reduce_sum", "reduce_max", "rsqrt", "pow")
# The operands that are values, not conditions or indices.
_VALUE_OPERANDS = {"select_n": slice(1, None), "gather": slice(0, 1), "dynamic_slice": slice(0, 1)}
MIN_OUTPUTS = 16
NARROW_REASON = f"fewer than {MIN_OUTPUTS} outputs"
OUTPUT_HEAD_REASON = "an output head: the function returns its result"
LOSS_HEAD_REASON = "an output head: softmax cross-entropy reads its result"
_SELECTION_REASON = "a router, gate or head: {} reads its result"


def block_number(path: str) -> re.Match[str] | None:
    """The first number in a path, which is the layer's block."""
    return re.search(r"\d+", path)


def find_edge_blocks(paths: Collection[str], counts: tuple[int, int]) -> dict[str, str]:
    """The layers in the first and last blocks of a model, with the reason.

    Paths that agree up to the number of the block are of one stack. If no other block of a stack would be left, none is
    an edge.

    Args:
        counts: numbers of blocks at the start and at the end.
    """
    stacks: dict[str, dict[str, int]] = {}
    for path in paths:
        if (number := block_number(path)) is not None:
            stacks.setdefault(path[: number.start()], {})[path] = int(number[0])
    reasons: dict[str, str] = {}
    for stack in stacks.values():
        blocks, (first, last) = sorted(set(stack.values())), counts
        if len(blocks) > first + last:
            edges = dict.fromkeys(blocks[:first], f"in the first {first} of {len(blocks)} blocks")
            edges |= dict.fromkeys(blocks[len(blocks) - last :], f"in the last {last} of {len(blocks)} blocks")
            reasons |= {path: edges[block] for path, block in stack.items() if block in edges}
    return reasons


def split_loop(paths: Collection[str], length: int, counts: tuple[int, int]) -> tuple[LoopPart, ...]:
    """The parts of a loop over the blocks of a model, with those that hold its first and last blocks.

    If all paths have a number after the same prefix, and each of several numbers has at least two layers, an iteration
    has a block for each number. Any other iteration is one block. If no other block would be left, none is an edge, and
    the loop has one part.

    Args:
        counts: numbers of blocks at the start and at the end.
    """
    found = [block_number(path) for path in set(paths)]
    prefixes = {number and number.string[: number.start()] for number in found}
    counter = collections.Counter(int(number[0]) for number in found if number is not None)
    # Names such as Dense_0 and Dense_1 number the layers of a block.
    numbers = sorted(counter) if len(prefixes) == 1 and min(counter.values(), default=0) > 1 else []
    per_iteration = max(len(numbers), 1)
    first, last = (-(-count // per_iteration) for count in counts)
    if not any(counts) or length * per_iteration <= sum(counts) or length < first + last:
        return (LoopPart(length),)

    def edge(name: str, size: int, count: int, numbers: Sequence[int]) -> LoopPart:
        edge_numbers = frozenset(numbers) if size == 1 and numbers else None
        count = count if size == 1 else size * per_iteration
        return LoopPart(size, f"in the {name} {count} of {length * per_iteration} blocks", edge_numbers)

    parts = (
        edge("first", first, counts[0], numbers[: counts[0]]),
        LoopPart(length - first - last),
        edge("last", last, counts[1], numbers[-counts[1] :]),
    )
    return tuple(part for part in parts if part.size)


def edge_reason(path: str, part: LoopPart) -> str:
    """Why a layer in a part of a loop stays in 16 bits; "" if it does not."""
    number = block_number(path)
    is_edge = part.edge_numbers is None or number is None or int(number[0]) in part.edge_numbers
    return part.reason if is_edge else ""


class Flow:
    """Finds where the results of matmuls go.

    Args:
        num_results: the number of leading outputs that the function returns; the others are its state.
        argument_indices: the inputs that are arguments of the function; None: all data inputs.
    """

    def __init__(
        self,
        graph: Graph,
        products: set[Node],
        num_results: int | None = None,
        argument_indices: Collection[int] | None = None,
    ) -> None:
        self._graph, self._products = graph, products
        self._returned_values = graph.outputs[:num_results]
        self._argument_values = (
            graph.inputs if argument_indices is None else [graph.inputs[i] for i in argument_indices]
        )
        self._sources: dict[Value, frozenset[Node] | None] = {}

    def find_heads(self) -> dict[Node, str]:
        """The matmuls that are heads or of routers, with the reason.

        A result with the shape of a floating-point input is not an output: the function may be a part of a model, such
        as an MLP. If every other matmul would be an output head, none is, as for projections that are returned.
        """
        reasons = dict[Node, str]()
        router_scores = list[Scores]()
        for scores, name, is_over_outputs in self._selections():
            for node in scores.products & self._products:
                reasons.setdefault(node, _SELECTION_REASON.format(name))  # the first reader in the program
            if is_over_outputs:
                router_scores.append(scores)
        for scores in find_expert_weights(self._graph, list(self._sigmoids())):
            reasons |= dict.fromkeys(scores.products & self._products, _SELECTION_REASON.format("sigmoid")) | reasons
            router_scores.append(scores)
        router_layers = find_router_layers(self._graph, self._products, router_scores)
        reasons = dict.fromkeys(router_layers, ROUTER_LAYER_REASON) | reasons
        data_arguments = [v for v in self._argument_values if v.is_data]
        # If the arguments are all parameters, the arrays that the function closes over count as its inputs.
        data_arguments = data_arguments or [
            v for node in self._graph.walk_nested() for v in node.operands if v.array is not None
        ]
        shapes = {v.shape for v in data_arguments if v.is_data and jnp.issubdtype(v.dtype, jnp.floating)}
        outputs = [value for value in self._returned_values if value.shape not in shapes]
        returned = (
            {node for value in outputs for node in self._source_products(value) or ()}
            - reasons.keys()
            - self._inner_products()
        )
        if self._products - reasons.keys() - returned:
            reasons |= dict.fromkeys(returned, OUTPUT_HEAD_REASON)
        return reasons

    def _selections(self) -> Iterator[tuple[Scores, str, bool]]:
        """What each selection reads, its name, and whether it may be among the outputs of the matmuls before.

        A softmax over another axis than that of the outputs may be attention to tokens.
        """
        nodes = list(self._graph.walk_nested())
        denominators = {strip_layout(node.operands[-1], _FORWARDED) for node in nodes if node.kind in ("div", "log")}
        matmuls = self._products | {node for node in nodes if is_linear(node)}
        for node in nodes:
            if node.kind in SELECTION_PRIMITIVES:
                values = elementwise_values(node.operands[0], matmuls)
                yield _scores(values, matmuls), SELECTION_PRIMITIVES[node.kind], True
            if (
                node.kind == "exp"
                and (shifted := strip_layout(node.operands[0], _FORWARDED)).kind == "sub"
                and shifted.node is not None
            ):
                scores, largest = shifted.node.operands
                if (reduction := self._find_max(largest)) is not None:
                    found = self._source_products(scores)
                    if not found or found != self._source_products(reduction.operands[0]):
                        found = self._normalized_products(scores, reduction, matmuls)
                    if found:
                        values = elementwise_values(scores, matmuls, _NORMALIZATIONS)
                        yield Scores(found, values), "softmax", _is_over_outputs(reduction, found)
            # A softmax without subtracted maximum: the sum is a divisor, or its logarithm is taken.
            if (
                node.kind == "reduce_sum"
                and node.results[0] in denominators
                and (exponentials := strip_layout(node.operands[0], _FORWARDED)).kind == "exp"
                and exponentials.node
            ):
                is_last_axis = tuple(node.eqn.params["axes"]) == (exponentials.aval.ndim - 1,)
                found = self._source_products(exponentials.node.operands[0]) if is_last_axis else None
                if found:
                    values = elementwise_values(exponentials.node.operands[0], matmuls)
                    yield Scores(found, values), "softmax", _is_over_outputs(node, found)

    def _sigmoids(self) -> Iterator[tuple[Value, Scores]]:
        """The results of sigmoids, with what they read."""
        for node in self._graph.walk_nested():
            if node.kind == "logistic" and (found := self._source_products(node.operands[0])):
                yield node.results[0], Scores(found, elementwise_values(node.operands[0], found))

    def _normalized_products(self, scores: Value, reduction: Node, matmuls: Collection[Node]) -> frozenset[Node] | None:
        """The matmuls that a softmax's input is computed from by norms, noise and the like; None for other data.

        Args:
            reduction: computes the largest score.
        """
        if strip_layout(reduction.operands[0], _FORWARDED) is not strip_layout(scores, _FORWARDED):
            return None
        values = elementwise_values(scores, matmuls, _NORMALIZATIONS)
        found = _scores(values, matmuls).products
        leaves = [v for v in values if not _elementwise_operands(v, matmuls, _NORMALIZATIONS)] if found else []
        floats = [v for v in leaves if v.node not in found and jnp.issubdtype(v.dtype, jnp.floating)]
        if not found or any(value.kind in PRODUCTS for value in floats):
            return None
        # Noise is computed from random keys, which are integers.
        inputs = [v for v in search(floats, direct_sources) if v.node is None and v.is_data]
        return None if any(jnp.issubdtype(v.dtype, jnp.floating) for v in inputs) else found

    def _source_products(self, value: Value) -> frozenset[Node] | None:
        """The matmuls whose result a value is, up to biases, scales and the like; None for other data."""
        if value not in self._sources:
            self._sources[value] = self._find_source_products(value)
        return self._sources[value]

    def _find_source_products(self, value: Value) -> frozenset[Node] | None:
        node = value.node
        if not value.is_data or value.is_closure_data or value.constant is not None:
            return frozenset()
        if node is None:
            return None if value.enclosing_value is None else self._source_products(value.enclosing_value)
        if node in self._products:
            return frozenset([node])
        if node.bodies:
            result_index = node.results.index(value)
            return _union([self._source_products(body.outputs[result_index]) for body in node.bodies])
        if node.kind not in _TRANSPARENT:
            return None
        operands = node.operands[_VALUE_OPERANDS.get(node.kind, slice(None))]
        if node.kind == "optimization_barrier":
            operands = [operands[node.results.index(value)]]
        sources = [self._source_products(operand) for operand in operands]
        return None if node.kind in _SCALINGS and sum(bool(e) for e in sources) > 1 else _union(sources)

    def _find_max(self, value: Value) -> Node | None:
        """The node that computes a maximum over an axis, before layouts and maxima with constants."""
        value = strip_layout(value, _FORWARDED)
        node = value.node
        if node is None or not value.is_data or node.kind == "reduce_max":
            return node if value.is_data else None
        if node.kind not in ("max", "select_n"):
            return None
        operands = node.operands[_VALUE_OPERANDS.get(node.kind, slice(None))]
        found = [self._find_max(operand) for operand in operands if operand.is_data]
        return next((each for each in found if each), None)

    def _inner_products(self) -> set[Node]:
        """The matmuls on whose results later matmuls depend."""
        read = [o for node in self._graph.walk_nested() if node.kind in PRODUCTS for o in node.operands]
        return {v.node for v in search(read, direct_sources) if v.node is not None and v.node in self._products}


def elementwise_values(value: Value, products: Collection[Node], further_kinds: Sequence[str] = ()) -> frozenset[Value]:
    """A value and the data that it is computed from elementwise, or by `further_kinds`, back to results of matmuls."""
    start = [value] if value.is_data else []
    return frozenset(search(start, lambda v: _elementwise_operands(v, products, further_kinds)))


def _elementwise_operands(value: Value, products: Collection[Node], further_kinds: Sequence[str]) -> list[Value]:
    """The data that an elementwise function, or one of `further_kinds`, computes a value from."""
    node = value.node
    if node is None:
        sources = direct_sources(value)
    elif node.bodies and node not in products:
        sources = [body.outputs[node.results.index(value)] for body in node.bodies]
    elif node.kind == "optimization_barrier":
        sources = [node.operands[node.results.index(value)]]
    elif node in products or node.kind not in (*_TRANSPARENT, *_ELEMENTWISE_FUNCTIONS, *further_kinds):
        sources = []
    else:
        sources = node.operands[_VALUE_OPERANDS.get(node.kind, slice(None))]
    return [source for source in sources if source.is_data]


def elementwise_sources(value: Value, products: Collection[Node]) -> set[Node]:
    """The matmuls that a value is computed from elementwise. Noise, masks and sums over its elements are ignored."""
    return set(_scores(elementwise_values(value, products), products).products)


def _scores(values: frozenset[Value], products: Collection[Node]) -> Scores:
    """Values before a selection, with the matmuls among `products` that they are computed from."""
    return Scores(frozenset(v.node for v in values if v.node is not None and v.node in products), values)


def _is_over_outputs(reduction: Node, products: Collection[Node]) -> bool:
    """Whether a reduction may be over the outputs of matmuls, or over those of each head or group."""
    *others, size = reduction.operands[0].shape
    sides = {node: next((i for i, value in enumerate(node.operands[:2]) if not value.is_data), 1) for node in products}
    is_last_axis = tuple(reduction.eqn.params["axes"]) == (len(others),)
    is_axis_of_outputs = is_last_axis and isinstance(size, int) and size > 1
    if not is_axis_of_outputs or _is_axis_of_data(reduction.operands[0], len(others), products):
        return False
    return all(count_outputs(node, side) % size == 0 for node, side in sides.items())


def _is_axis_of_data(value: Value, axis: int, products: Collection[Node]) -> bool:
    """Whether an axis of more than one element is one of the data of the matmul before, such as that of tokens.

    The scores of learned queries have this axis last. False if the axis cannot be followed to a matmul.
    """
    while True:
        node = value.node
        if node is None:
            source = value.enclosing_value
            if source is None or source.shape != value.shape:
                return False
        elif node in products:
            return node.kind == "dot_general" and _is_free_axis_of_data(node, axis)
        else:
            operands = node.operands[_VALUE_OPERANDS.get(node.kind, slice(None))]
            source = next((v for v in operands if v.is_data and v.aval.size == value.aval.size), None)
            followed = None if source is None else _axis_before(node, source, value, axis)
            if source is None or followed is None:
                return False
            axis = followed
        value = source


def _is_free_axis_of_data(node: Node, axis: int) -> bool:
    """Whether an axis of a matmul's result is one that only its data have."""
    contract, batch = node.eqn.params["dimension_numbers"]
    free_axes = [v.aval.ndim - len(c) - len(b) for v, c, b in zip(node.operands, contract, batch, strict=True)]
    position = axis - len(batch[0])
    return position >= 0 and node.operands[int(position >= free_axes[0])].is_data


def _axis_before(node: Node, source: Value, value: Value, axis: int) -> int | None:
    """The axis of an operand that is an axis of the result, with as many elements; None if it is not known."""
    before, after = source.shape, value.shape
    if node.kind == "transpose":
        return int(node.eqn.params["permutation"][axis])
    if node.kind not in (*_TRANSPARENT, *_ELEMENTWISE_FUNCTIONS) or node.bodies:
        return None
    if before == after:
        return axis
    # A reshape keeps an axis if the axes behind it have as many elements as before.
    sizes = [(n, math.prod(before[i + 1 :])) for i, n in enumerate(before)]
    kept = after[axis], math.prod(after[axis + 1 :])
    return sizes.index(kept) if node.kind in RESHAPES and kept in sizes else None


def count_outputs(node: Node, side: int) -> int:
    """The number of outputs of a matmul with a weight as operand `side`, per batch element."""
    shape, params = node.operands[side].shape, node.eqn.params
    if node.weight_axes is not None:
        return shape[node.weight_axes[2]]
    if node.kind != "dot_general":
        return shape[-1]
    contract, batch = params["dimension_numbers"]
    return math.prod(n for axis, n in enumerate(shape) if axis not in (*contract[side], *batch[side]))


def _union(sources: list[frozenset[Node] | None]) -> frozenset[Node] | None:
    """The union of the sources of several values; None if those of one are unknown."""
    known_sources: list[Any] = [e for e in sources if e is not None]
    return frozenset().union(*known_sources) if len(known_sources) == len(sources) else None
