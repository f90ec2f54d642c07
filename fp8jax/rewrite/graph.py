"""A program as a graph: a node for each equation, and what is known of each value."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax.numpy as jnp

from fp8jax.rewrite import primitives
from fp8jax.rewrite.primitives import CASTS, LAYOUTS, MARKS, RESHAPES


@dataclasses.dataclass(eq=False)
class Value:
    """An array of a program, and what is known of it.

    Attributes:
        aval: its shape and dtype.
        node: what computes it; None for inputs and constants.
        outer: of an input of a nested program, the value around it that it is in the first turn.
        once: that it is in every turn, as a whole.
        weight: the parameter that it is, up to casts, layouts and parts.
        data: it depends on more than parameters and the model's own constants.
        given: it depends on an argument that holds no parameters.
        trained: it depends on a parameter.
        closed: the arrays that the function closes over and that it depends on, by identity.
        constant: the number that all its elements are, if that is known.
        array: a constant's value.
    """

    aval: Any
    node: "Node | None" = None
    outer: "Value | None" = None
    once: bool = False
    weight: "Weight | None" = None
    data: bool = False
    given: bool = False
    trained: bool = False
    closed: frozenset[int] = frozenset()
    constant: float | None = None
    array: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape  # type: ignore[no-any-return]

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def fixed(self) -> bool:
        """Whether it is data that are computed from closed-over arrays alone: every call has the same."""
        return self.data and bool(self.closed) and not self.given and not self.trained

    @property
    def kind(self) -> str:
        """The primitive that computes it, or ""."""
        return "" if self.node is None else self.node.kind


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A parameter under layouts.

    Attributes:
        path: its place in the tree of parameters.
        stored: the value in its own dtype, and in the order of its elements in memory.
        layout: the equations that give it another shape; casts are none.
        moved: they take a part of it, or change the order of its elements.
        held: what is in its place, if that is no array; see `fp8jax.rewrite.held`.
        further_paths: those of the other parameters of a concatenation.
    """

    path: str
    stored: Value
    layout: tuple["Node", ...] = ()
    moved: bool = False
    held: Any = None
    further_paths: tuple[str, ...] = ()


class Replacement(Protocol):
    """What stands in place of an equation."""

    def run(self, running: Any, node: "Node") -> Sequence[Any]:
        """The results, from the operands that `running.array(value)` gives."""
        ...


@dataclasses.dataclass(eq=False)
class Node:
    """An equation, or what a plan has put in its place.

    Attributes:
        kind: the primitive's name.
        operands, results: values.
        eqn: the equation.
        scope: the names of the scopes and calls of its program that it stands in.
        bodies: the programs that it runs, as graphs of their own.
        sealed: these have a derivative that is not theirs, and are read only.
        inlined: the nodes of a call, whose values belong to the graph around it; None for no call.
        operation: what is run in its place.
        call: the call or loop that it stands in, or None.
    """

    kind: str
    operands: list[Value]
    results: list[Value]
    eqn: Any
    scope: str = ""
    bodies: tuple["Graph", ...] = ()
    sealed: bool = False
    inlined: "list[Node] | None" = None
    operation: Replacement | None = None
    call: "Node | None" = None

    @property
    def changed(self) -> bool:
        """Whether a plan has changed it, or something inside of it."""
        inside = any(node.changed for node in self.inlined or ())
        return self.operation is not None or inside or any(body.changed for body in self.bodies)

    def line(self) -> str:
        """Where it was written."""
        around, node = list[Any](), self.call
        while node is not None:
            around.append(node.eqn)
            node = node.call
        return primitives.line_of(self.eqn, around)


@dataclasses.dataclass(eq=False)
class Graph:
    """A program.

    Attributes:
        inputs, outputs: values.
        nodes: in their order.
        around: the scopes around it.
        model_constants: the arrays that the function closes over and that are constants of its model, by identity.
    """

    inputs: list[Value]
    nodes: list[Node]
    outputs: list[Value]
    around: str = ""
    model_constants: frozenset[int] = frozenset()

    @property
    def changed(self) -> bool:
        return any(node.changed for node in self.nodes)

    def all(self) -> Iterator[Node]:
        """The nodes of this program, those of calls in it among them, but not those of nested programs."""
        yield from _flat(self.nodes)

    def everywhere(self) -> Iterator[Node]:
        """`all`, and the nodes of nested programs, each after the node that runs it."""
        for node in self.all():
            yield node
            for body in node.bodies:
                yield from body.everywhere()


def _flat(nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        if node.inlined is None:
            yield node
        else:
            yield from _flat(node.inlined)


def readers(graph: Graph) -> dict[Value, int]:
    """How often each value of a program, and of those in it, is read, as an operand or an output."""
    counts: dict[Value, int] = {}
    todo = [graph]
    while todo:
        inner = todo.pop()
        for values in (*(node.operands for node in inner.all()), inner.outputs):
            for value in values:
                counts[value] = counts.get(value, 0) + 1
        todo += [body for node in inner.all() for body in node.bodies]
    return counts


def lossless(dtypes: Sequence[Any], wanted: Any) -> bool:
    """Whether values that were in one dtype after another, the first one last, are those of the first in the last."""
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (*dtypes, wanted)):
        return len({*dtypes, wanted}) == 1
    narrow = {dtype for dtype in (*dtypes, wanted) if dtype.itemsize == 2}
    least = min(dtypes[0].itemsize, wanted.itemsize)
    return len(narrow) < 2 and all(dtype.itemsize >= least for dtype in dtypes)


def before(value: Value, through: Sequence[str] = LAYOUTS, allowed: Callable[[Node], bool] | None = None) -> Value:
    """What a value is up to layouts and casts of these kinds, each of which must be allowed."""
    node = value.node
    while node is not None and node.kind in through and node.operation is None and (allowed is None or allowed(node)):
        value = node.operands[node.results.index(value)] if node.kind == "optimization_barrier" else node.operands[0]
        node = value.node
    return value


def computed_from(value: Value, most: int = 4) -> dict[str, Any]:
    """The paths of the first parameters that a value is computed from, each with what is held in its place."""
    paths, seen, todo = dict[str, Any](), set[Value](), [value]
    while todo and len(paths) < most:
        value = todo.pop(0)
        if value in seen:
            continue
        seen.add(value)
        if value.weight is not None:
            paths |= dict.fromkeys((value.weight.path, *value.weight.further_paths), value.weight.held)
        else:
            todo += [] if value.outer is None else [value.outer]
            todo += [] if value.node is None else value.node.operands
    return dict(list(paths.items())[:most])


def changed_by_data(value: Value) -> str | None:
    """The path of the matrix, as large as a value, that data have changed element by element; or of the stacked ones
    that they have picked it from. None where it is neither."""
    size, seen, todo = value.aval.size, set[Value](), [value]
    while todo:
        value = todo.pop()
        picked = value.kind == "gather" and value.node is not None
        source = value.node.operands[0] if picked and value.node is not None else value
        if source.weight is not None and source.aval.ndim > (2 if picked else 1):
            return source.weight.path
        steps = value.node is not None and value.kind in (*_CHANGES, *CASTS, *MARKS, *RESHAPES, "transpose")
        new = value.node.operands if value.node is not None and steps else []
        new = new if value.outer is None else [value.outer]
        todo += [operand for operand in new if operand.aval.size == size and operand not in seen]
        seen.update(todo)
    return None


_CHANGES = ("add", "add_any", "sub", "mul", "div", "select_n", "clamp", "max", "min")


def origin_of(value: Value) -> Value:
    """The value whose elements, in their order, another one has: up to marks, reshapes, and casts that lose nothing."""
    wanted, casts, best = value.dtype, list[Any](), value
    while True:
        value = before(value, (*MARKS, *RESHAPES), in_order)
        if not lossless([value.dtype, *casts[1:]], wanted):
            return best
        best = value
        casts.append(value.dtype)
        if value.kind not in CASTS or value.node is None or value.node.operation is not None:
            return best
        value = value.node.operands[0]


def narrow(value: Value) -> Value:
    """A value before casts that only widen it."""
    while value.kind in CASTS and value.node is not None and value.node.operation is None:
        source = value.node.operands[0]
        wider = source.dtype.itemsize > value.dtype.itemsize
        if wider or source.dtype.itemsize < 2 or not lossless([source.dtype], value.dtype):
            return value
        value = source
    return value


def in_order(node: Node) -> bool:
    """Whether a layout keeps all elements in the order in which they lie in memory."""
    return primitives.same_elements(node.eqn)
