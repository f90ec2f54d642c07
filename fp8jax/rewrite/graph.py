"""A jaxpr as a graph: one node per equation, and facts about each value."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fp8jax.rewrite import primitives
from fp8jax.rewrite.primitives import CASTS, IDENTITY_PRIMITIVES, LAYOUTS, RESHAPES, SLICING_PRIMITIVES, Equation

if TYPE_CHECKING:
    from fp8jax.rewrite.run import Interpreter


@dataclasses.dataclass(eq=False)
class Value:
    """An array of a program, with facts about it.

    Attributes:
        node: the node that computes it; None for inputs and constants.
        enclosing_value: for an input of a sub-jaxpr, the outer value that it equals in the first iteration.
        is_loop_invariant: whether it equals all of that value in every iteration.
        weight: the parameter that it equals up to casts, layouts and slices.
        is_data: whether it depends on more than parameters and the model's constants.
        depends_on_inputs: whether it depends on an argument without parameters.
        closure_ids: the identities of the closed-over arrays that it depends on.
        constant: the number that all of its elements equal; None if unknown.
    """

    aval: Any
    node: "Node | None" = None
    enclosing_value: "Value | None" = None
    is_loop_invariant: bool = False
    weight: "Weight | None" = None
    is_data: bool = False
    depends_on_inputs: bool = False
    depends_on_params: bool = False
    closure_ids: frozenset[int] = frozenset()
    constant: float | None = None
    array: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def is_closure_data(self) -> bool:
        """Whether it is data computed from closed-over arrays alone, which is the same in every call."""
        return self.is_data and bool(self.closure_ids) and not self.depends_on_inputs and not self.depends_on_params

    @property
    def kind(self) -> str:
        """The name of the primitive that computes it, or ""."""
        return "" if self.node is None else self.node.kind


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A parameter with the layouts applied to it.

    Attributes:
        stored: the value in its stored dtype and memory order.
        layout: the nodes that change its shape, without casts.
        is_relayouted: whether these slice it or change the order of its elements.
        frozen: the facts of `fp8jax.rewrite.frozen_params` if it is not a plain array.
        further_paths: the paths of the other parameters of a concatenation.
    """

    path: str
    stored: Value
    layout: tuple["Node", ...] = ()
    is_relayouted: bool = False
    frozen: Any = None
    further_paths: tuple[str, ...] = ()


def stored_weight_axes(node: "Node", stored: Value) -> tuple[int, int, int] | None:
    """The axes of groups, inputs and outputs of a grouped product's parameter as it is stored.

    None if more than casts and transpositions are between both.
    """
    value, axes = node.operands[1], node.weight_axes
    while value is not stored and axes is not None:
        step = value.node
        if step is None or step.kind not in ("transpose", *CASTS):
            return None
        if step.kind == "transpose":
            first, second, third = (step.eqn.params["permutation"][axis] for axis in axes)
            axes = first, second, third
        value = step.operands[0]
    return axes


class Replacement(Protocol):
    """An operation that a plan runs in place of a node."""

    def run(self, interpreter: "Interpreter", node: "Node") -> Sequence[Any]:
        """The node's results, from the operands that `interpreter.array(value)` returns."""
        ...


class LoopPart(NamedTuple):
    """Consecutive iterations of a loop, which one of its bodies runs.

    Attributes:
        reason: why blocks in them stay in 16 bits, or "".
        edge_numbers: the numbers in the paths of these blocks; None for all.
        has_unknown_blocks: whether it runs blocks of a model whose first and last ones are not known.
    """

    size: int
    reason: str = ""
    edge_numbers: frozenset[int] | None = None
    has_unknown_blocks: bool = False


@dataclasses.dataclass(eq=False)
class Node:
    """An equation, or the operation that a plan runs in its place.

    Attributes:
        scope: the names of the scopes and calls around it in its program.
        bodies: the graphs of its sub-jaxprs, or one graph for each of `parts`.
        parts: of a scan, in the order of execution; () for all else.
        has_custom_rule: whether the bodies have a custom derivative. They are then read only.
        inlined: the nodes of a call, whose values belong to the outer graph; None if it is no such call.
        weight_axes: of a grouped product, the axes of the second operand that are groups, inputs and outputs.
        path: of its layer, in a plan; "" if it has none.
    """

    kind: str
    operands: list[Value]
    results: list[Value]
    eqn: Any
    scope: str = ""
    bodies: tuple["Graph", ...] = ()
    parts: tuple[LoopPart, ...] = ()
    has_custom_rule: bool = False
    inlined: "list[Node] | None" = None
    operation: Replacement | None = None
    enclosing_node: "Node | None" = None
    weight_axes: tuple[int, int, int] | None = None
    path: str = ""

    @property
    def is_rewritten(self) -> bool:
        """Whether a plan has replaced it, or a node inside of it."""
        has_rewritten_inlined = any(node.is_rewritten for node in self.inlined or ())
        return self.operation is not None or has_rewritten_inlined or any(body.is_rewritten for body in self.bodies)

    def num_runs(self, body: "Graph") -> int:
        """How often one run of this node runs a body: the iterations of a scan, or 1."""
        return self.parts[self.bodies.index(body)].size if self.parts else 1

    def line(self) -> str:
        """The source line of its equation."""
        enclosing, node = list[Any](), self.enclosing_node
        while node is not None:
            enclosing.append(node.eqn)
            node = node.enclosing_node
        return primitives.source_line(self.eqn, enclosing)


@dataclasses.dataclass(eq=False)
class Graph:
    """A jaxpr.

    Attributes:
        model_constants: the identities of closed-over arrays that are constants of the model.
        split_loop: returns the parts of a loop in it, from the paths of stacked parameters and the number of
            iterations. None splits no loop.
    """

    inputs: list[Value]
    nodes: list[Node]
    outputs: list[Value]
    outer_scope: str = ""
    model_constants: frozenset[int] = frozenset()
    split_loop: Callable[[Sequence[str], int], tuple[LoopPart, ...]] | None = None

    @property
    def is_rewritten(self) -> bool:
        return any(node.is_rewritten for node in self.nodes)

    def walk(self) -> Iterator[Node]:
        """The nodes of this program and of inlined calls, without those of sub-jaxprs."""
        for node in walk_calls(self.nodes, enters=lambda node: False):
            if node.inlined is None:
                yield node

    def walk_nested(self) -> Iterator[Node]:
        """The nodes of `walk`, each followed by those of its sub-jaxprs."""
        for node in self.walk():
            yield node
            for body in node.bodies:
                yield from body.walk_nested()


def walk_calls(nodes: Sequence[Node], enters: Callable[[Node], bool]) -> Iterator[Node]:
    """All nodes in program order, each call followed by the nodes in it, and by its sub-jaxprs' if `enters(node)`."""
    for node in nodes:
        yield node
        yield from walk_calls(node.inlined or (), enters)
        for body in node.bodies if enters(node) else ():
            yield from walk_calls(body.nodes, enters)


def count_readers(graph: Graph) -> dict[Value, int]:
    """The number of times that each value is read as an operand or output, in a graph and its sub-jaxprs."""
    counts: dict[Value, int] = {}
    todo = [graph]
    while todo:
        inner = todo.pop()
        for values in (*(node.operands for node in inner.walk()), inner.outputs):
            for value in values:
                counts[value] = counts.get(value, 0) + 1
        todo += [body for node in inner.walk() for body in node.bodies]
    return counts


def is_lossless(dtypes: Sequence[Any], target: Any) -> bool:
    """Whether a cast from `dtypes[0]` through the other dtypes to `target` equals the direct cast."""
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (*dtypes, target)):
        return len({*dtypes, target}) == 1
    two_byte_dtypes = {dtype for dtype in (*dtypes, target) if dtype.itemsize == 2}
    min_size = min(dtypes[0].itemsize, target.itemsize)
    return len(two_byte_dtypes) < 2 and all(dtype.itemsize >= min_size for dtype in dtypes)


def strip_layout(
    value: Value, kinds: Sequence[str] = LAYOUTS, is_allowed: Callable[[Node], bool] | None = None
) -> Value:
    """The value before layouts and casts of these kinds that `is_allowed` accepts."""
    node = value.node
    while (
        node is not None and node.kind in kinds and node.operation is None and (is_allowed is None or is_allowed(node))
    ):
        value = node.operands[node.results.index(value)] if node.kind == "optimization_barrier" else node.operands[0]
        node = value.node
    return value


def direct_sources(value: Value) -> list[Value]:
    """The operands of a value's node, its values in sub-jaxprs, and the outer value that it equals at first."""
    outer = [] if value.enclosing_value is None else [value.enclosing_value]
    if value.node is None:
        return outer
    return [*outer, *value.node.operands, *(b.outputs[value.node.results.index(value)] for b in value.node.bodies)]


def search(
    starts: Iterable[Value], step: Callable[[Value], Iterable[Value]], max_depth: int | None = None
) -> list[Value]:
    """These values and all that `step` leads to from them, in that many steps, nearest first."""
    found = frontier = dict.fromkeys(starts)
    while frontier and max_depth != 0:
        frontier = dict.fromkeys(v for value in frontier for v in step(value) if v not in found)
        found = found | frontier
        max_depth = None if max_depth is None else max_depth - 1
    return list(found)


def source_parameters(value: Value) -> dict[str, Any]:
    """The paths of the nearest four parameters that a value is computed from, each with its `frozen` facts."""
    paths = dict[str, Any]()
    for found in search([value], lambda v: [] if v.weight is not None else direct_sources(v)):
        if found.weight is not None:
            paths |= dict.fromkeys((found.weight.path, *found.weight.further_paths), found.weight.frozen)
    return dict(list(paths.items())[:4])


class ModifiedWeight(NamedTuple):
    """A matrix that data change elementwise, or one that data gather from stacked matrices, as those of experts."""

    path: str
    is_gathered: bool


def find_modified_weight(value: Value) -> ModifiedWeight | None:
    """The parameter that a value is, after data have changed it or gathered from it; None for other values."""
    visited, todo, is_sliced = set[Value](), [value], False
    while todo:
        value = todo.pop()
        size = value.aval.size
        is_gather = value.kind == "gather" and value.node is not None
        source = value.node.operands[0] if is_gather and value.node is not None else value
        if source.weight is not None and source.aval.ndim > (2 if is_gather else 1):
            return ModifiedWeight(source.weight.path, is_gather or is_sliced)
        is_elementwise = value.node is not None and value.kind in (
            *_ELEMENTWISE_UPDATES,
            *CASTS,
            *IDENTITY_PRIMITIVES,
            *RESHAPES,
            "transpose",
        )
        operands = value.node.operands if value.node is not None and is_elementwise else []
        operands = operands if value.enclosing_value is None else [value.enclosing_value]
        operands = [operand for operand in operands if operand.aval.size == size]
        # Under jax.vmap a branch of lax.switch reads its matrix from stacked ones, which the index of the token masks.
        if value.node is not None and value.kind in SLICING_PRIMITIVES:
            operands = [v for v in value.node.operands[:1] if strip_layout(v).kind == "select_n"]
            is_sliced = is_sliced or bool(operands)
        todo += [operand for operand in operands if operand not in visited]
        visited.update(todo)
    return None


_ELEMENTWISE_UPDATES = ("add", "add_any", "sub", "mul", "div", "select_n", "clamp", "max", "min")


def canonical_value(value: Value) -> Value:
    """The earliest value with the same elements, before identities, reshapes, and casts that equal one direct cast."""
    target, casts, canonical = value.dtype, list[Any](), value
    while True:
        value = strip_layout(value, (*IDENTITY_PRIMITIVES, *RESHAPES), is_order_preserving)
        if not is_lossless([value.dtype, *casts[1:]], target):
            return canonical
        canonical = value
        casts.append(value.dtype)
        if value.kind not in CASTS or value.node is None or value.node.operation is not None:
            return canonical
        value = value.node.operands[0]


def strip_upcasts(value: Value) -> Value:
    """The value before casts that only widen it."""
    while value.kind in CASTS and value.node is not None and value.node.operation is None:
        source = value.node.operands[0]
        is_wider = source.dtype.itemsize > value.dtype.itemsize
        if is_wider or source.dtype.itemsize < 2 or not is_lossless([source.dtype], value.dtype):
            return value
        value = source
    return value


def is_order_preserving(node: Node) -> bool:
    """Whether a layout keeps all elements in memory order."""
    return node.kind != "transpose" and math.prod(node.operands[0].shape) == math.prod(node.results[0].shape)


def saves_output(node: Node, value: Value) -> bool:
    """Whether a node's backward pass saves one of its results, as flash attention does (COAT, appendix D)."""
    run_equation = Equation(node.eqn, node.scope)
    is_float = [jnp.issubdtype(v.dtype, jnp.inexact) for v in node.operands]

    def differentiate(operands: list[Any]) -> Any:
        def run(floats: list[Any]) -> Any:
            float_iter = iter(floats)
            return run_equation([next(float_iter) if f else x for x, f in zip(operands, is_float, strict=True)])

        return jax.vjp(run, [x for x, f in zip(operands, is_float, strict=True) if f])

    try:
        jaxpr = jax.make_jaxpr(differentiate)([jax.ShapeDtypeStruct(v.shape, v.dtype) for v in node.operands]).jaxpr
    except Exception:
        return False  # as inside of `jax.shard_map`
    results, residuals = jaxpr.outvars[: len(node.results)], jaxpr.outvars[len(node.results) :]
    return any(v is results[node.results.index(value)] for v in residuals)
