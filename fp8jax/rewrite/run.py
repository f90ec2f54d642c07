"""Runs a graph: what its outputs need, in the order of the program, operations where a plan has put them."""

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax

from fp8jax.core.recipe import Linear
from fp8jax.ops import gradients
from fp8jax.ops.choice import on_cuda
from fp8jax.ops.linear import content_key
from fp8jax.ops.partition import on_one_device
from fp8jax.ops.saved import NOTHING, Known, Origin
from fp8jax.rewrite import primitives
from fp8jax.rewrite.graph import Graph, Node, Value, origin_of
from fp8jax.rewrite.held import as_array, written
from fp8jax.rewrite.operations import as_read
from fp8jax.rewrite.primitives import Equation
from fp8jax.rewrite.states import Given, Use

Shared = TypeVar("Shared")


class Schedule(NamedTuple):
    """What is run of a graph: each node, and the nodes of calls of which more is read or changed than the results.

    `uses` are the products in it, and in nested programs, that may be given a state or their weight in codes; `last` is
    where each value is read for the last time.
    """

    graph: Graph
    nodes: tuple[Node, ...]
    steps: dict[Node, Equation]
    bodies: dict[Node, "tuple[Schedule, ...]"]
    uses: tuple[Use, ...]
    last: dict[Value, int]


def schedule(graph: Graph, *, apart: bool = False, effects: bool = True) -> Schedule:
    """What a graph needs to be run.

    Args:
        graph: of a program, planned or not.
        apart: whether calls and nested programs are taken apart that nothing has changed; else they run as they are.
        effects: whether what has effects is run, even if nothing reads it.
    """
    given = set(graph.inputs)
    wanted = set(graph.outputs) - given
    nodes = tuple(reversed([*_needed(graph.nodes, wanted, given, apart, effects)]))
    bodies = {
        node: tuple(schedule(body, apart=apart) for body in node.bodies)
        for node in nodes
        if not node.sealed and node.operation is None and node.bodies and (node.changed or apart)
    }
    plain = [node for node in nodes if node.operation is None and node not in bodies]
    uses = [use for node in nodes if (use := getattr(node.operation, "use", None)) is not None]
    uses += [use for each in bodies.values() for body in each for use in body.uses]
    last = {value: i for i, node in enumerate(nodes) for value in node.operands}
    last |= dict.fromkeys(graph.outputs, len(nodes))
    steps = {node: Equation(node.eqn, node.scope) for node in plain}
    return Schedule(graph, nodes, steps, bodies, tuple(uses), last)


def _needed(nodes: Sequence[Node], wanted: set[Value], given: set[Value], apart: bool, effects: bool) -> Iterator[Node]:
    """The nodes that give the values wanted, or have effects, the last one first; adds what they read."""
    for node in reversed(nodes):
        if node.inlined is not None and (apart or node.changed or wanted & _inside(node)):
            yield from _needed(node.inlined, wanted, given, apart, effects)
        elif not wanted.isdisjoint(node.results) or (effects and node.eqn.effects and node.operation is None):
            wanted.update(value for value in node.operands if value not in given)
            yield node


def _inside(node: Node) -> set[Value]:
    """The values of a call that are none of its results."""
    made = {value for inner in node.inlined or () for value in (*inner.results, *_inside(inner))}
    return made.difference(node.results)


class Running:
    """One run of a graph.

    Attributes:
        origins: what operations have said of their results, for those that read them.
        states: what each use of a parameter is given, by path and number.
        level: how many counted loops and meshes stand around.
        unrolled, once: as of `fp8jax.ops.gradients.Gradients`.
        seen: what uses have observed of data and parameters, by use and operand, if it is to be told in the forward
            pass; None where it is the gradient of slots.
    """

    def __init__(
        self,
        plan: Schedule,
        arrays: Sequence[Any],
        states: Mapping[Any, Given],
        level: int = 0,
        origins: Mapping[Value, Origin] = MappingProxyType({}),
        forward: bool = False,
        inner: bool = False,
        unrolled: bool = False,
        once: bool | None = None,
    ) -> None:
        self._inner, self.unrolled = inner, unrolled
        self.once = not gradients.in_loop() if once is None else once
        self._plan, self.states, self._level, self._place = plan, states, level, 0
        self.seen: dict[tuple[Any, str], Any] | None = {} if forward else None
        self._arrays: dict[Value, Any] = dict(zip(plan.graph.inputs, arrays, strict=True))
        self.origins: dict[Value, Origin] = dict(origins)
        self._shared: dict[Any, Any] = {}

    def array(self, value: Value) -> Any:
        """What a value is in this run; of what is held in the place of a parameter, its values."""
        return value.array if value.array is not None else as_array(self._arrays[value])

    def held(self, value: Value) -> Any:
        """The same, as it is held."""
        return value.array if value.array is not None else self._arrays[value]

    def read_later(self, value: Value) -> bool:
        """Whether anything after the operation that runs now reads a value."""
        return value.array is None and self._plan.last.get(value, -1) > self._place

    def pass_on(self, value: Value, array: Any) -> None:
        """Gives the array of a value to those that read it later, who may be told by another type how it varies."""
        if jax.typeof(array) == jax.typeof(self._arrays[value]):
            self._arrays[value] = array

    def origin(self, value: Value, x: Any) -> Origin:
        """What is known of an array that has the elements of a value."""
        return as_read(self.origins[value], value, x) if value in self.origins else NOTHING

    def reads(self, x: Any, value: Value | None, linear: Linear, origin: Origin) -> tuple[Known, Any]:
        """What a product knows of the array `x` that it reads, which is made of a value, and the key for what it rounds
        stochastically: readers of one value share both that and what they make of it. Of no value nothing is shared."""
        known = Known(origin) if value is None else Known(origin, functools.partial(self._share, value, x.dtype))
        return known, known.share("key", lambda: content_key(x)) if linear.stochastic else None

    def _share(self, value: Value, dtype: Any, use: Hashable, make: Callable[[], Shared], *others: Any) -> Shared:
        key = value, dtype, use
        made = self._shared.get(key)
        if made is None or any(a is not b for a, b in zip(made[0], others, strict=True)):
            made = self._shared[key] = others, make()
        return made[1]  # type: ignore[no-any-return]

    def outputs(self) -> list[Any]:
        """Runs the graph."""
        with gradients.run(self.unrolled, self.once):
            return self._outputs()

    def _outputs(self) -> list[Any]:
        plan = self._plan
        for self._place, node in enumerate(plan.nodes):
            if node.operation is not None:
                with primitives.place_of(node.eqn, node.scope):
                    results = node.operation.run(self, node)
            elif node in plan.bodies:
                with primitives.place_of(node.eqn, node.scope):
                    results = self._nested(node, plan.bodies[node])
            else:
                results = written(plan.steps[node], node, [self.held(value) for value in node.operands])
            for value, array in zip(node.results, results, strict=True):
                if value.array is None:
                    self._arrays.setdefault(value, array)
        # What a turn of a loop passes on goes as it is held.
        given = set(plan.graph.inputs) if self._inner else set()
        return [self.held(v) if v in given else self.array(v) for v in plan.graph.outputs]

    def _nested(self, node: Node, bodies: Sequence[Schedule]) -> list[Any]:
        counted = primitives.turns(node.eqn) is not None
        carried: dict[Any, Any] = {}
        rows: dict[Any, Any] = {}
        for use in dict.fromkeys(use for plan in bodies for use in plan.uses if use.key in self.states):
            state, slots, weight = self.states[use.key]
            # Each turn and device has slots of its own; a state and a weight, where it has a parameter of its own.
            own = counted and use.levels[self._level].stacked
            given = Given(None if own else state, None if counted else slots, None if own else weight)
            carried[use.key] = given
            rows[use.key] = Given(state if own else None, slots if counted else None, weight if own else None)

        facts = [self._facts(plan.graph) for plan in bodies] if primitives.once(node.eqn) else [{} for _ in bodies]
        moved = [{i: _carry(origin) for i, origin in each.items()} for each in facts]
        arrays = [{i: arrays for i, (arrays, _) in each.items()} for each in moved]

        def run(place: int, inputs: Sequence[Any], more: Any, rows: Any) -> list[Any]:
            (carried, arrays), plan = more, bodies[place]
            origins = {plan.graph.inputs[i]: rebuild(arrays[place][i]) for i, (_, rebuild) in moved[place].items()}
            pairs = {key: zip(carried[key], rows[key], strict=True) for key in rows}
            both = {key: Given(*(a if b is None else b for a, b in pair)) for key, pair in pairs.items()}
            how: Any = {"forward": self.seen is not None, "inner": loops, "unrolled": unrolled, "once": once}
            inner = Running(plan, inputs, both, self._level + counted, origins, **how)
            outputs, seen = inner.outputs(), inner.seen or {}
            # Of a use in another branch nothing is seen: zeros, as slots are.
            return [*outputs, *(seen.get((key, o), getattr(both[key].slots, o)) for key, o in told)]

        loops = node.kind in ("scan", "while")
        unrolled = on_cuda() and on_one_device() and primitives.unrolled(node.eqn, self.unrolled)
        once = self.once and (unrolled or not loops)
        told = [(key, o) for key in rows for o in ("x", "w") if self.seen is not None and self._observes(key, o)]
        operands = [self.held(value) for value in node.operands]
        runs = [functools.partial(run, place) for place in range(len(bodies))]
        results = primitives.run_again(node.eqn, operands, runs, (carried, arrays), rows, len(told))
        if self.seen is not None:
            self.seen |= dict(zip(told, results[len(node.results) :], strict=False))
        return results[: len(node.results)]

    def _observes(self, key: Any, operand: str) -> bool:
        return getattr(self.states[key].slots, operand) is not None

    def _facts(self, body: Graph) -> dict[int, Origin]:
        """What is known of the inputs of a nested program, by their places."""
        found = {}
        for i, value in enumerate(body.inputs):
            source = origin_of(value.outer) if value.outer is not None else value
            if source in self.origins and body.changed:
                found[i] = as_read(self.origins[source], source, value)
        return found


def _carry(origin: Origin) -> tuple[Any, Callable[[Any], Origin]]:
    """The arrays of what is known, and what makes it of the same arrays in another trace."""
    again, part, scale = origin.again, origin.part, origin.scale
    arrays = again and again[1], part and part.arrays, scale and scale[1]

    def rebuild(arrays: Any) -> Origin:
        saved, operands, number = arrays
        return Origin(
            None if again is None else (again[0], saved),
            None if part is None else part.of(*operands),
            None if scale is None else (scale[0], number),
        )

    return arrays, rebuild
