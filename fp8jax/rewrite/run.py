"""The interpreter of a planned graph: it runs the nodes that the outputs need, with the operations of the plan."""

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax

from fp8jax.core.recipe import Linear
from fp8jax.ops.autodiff.observations import at_layer
from fp8jax.ops.autodiff.residuals import NO_FACTS, ArrayFacts, InputFacts
from fp8jax.ops.dispatch.choice import on_cuda
from fp8jax.ops.dispatch.partition import on_one_device
from fp8jax.ops.products.linear import key_from_data
from fp8jax.ops.products.weights import LayoutPolicy
from fp8jax.rewrite import primitives
from fp8jax.rewrite.frozen_params import as_array, run_unchanged
from fp8jax.rewrite.graph import Graph, Node, Value, canonical_value
from fp8jax.rewrite.operations import convert_facts
from fp8jax.rewrite.primitives import Equation
from fp8jax.rewrite.states import UseInputs, WeightUse

Shared = TypeVar("Shared")


class Schedule(NamedTuple):
    """The nodes of a graph that are run, in order. Calls are inlined if the plan changes them or reads inside them.

    Attributes:
        steps: the equation of each node that is run unchanged.
        bodies: the schedules of sub-jaxprs that the plan changes.
        uses: products, also in sub-jaxprs, that may get a scaling state or the codes of their weight.
        last_read: index of the last node that reads each value.
    """

    graph: Graph
    nodes: tuple[Node, ...]
    steps: dict[Node, Equation]
    bodies: dict[Node, "tuple[Schedule, ...]"]
    uses: tuple[WeightUse, ...]
    last_read: dict[Value, int]


def schedule(graph: Graph, *, inline_all: bool = False, keep_effects: bool = True) -> Schedule:
    """The schedule of a graph.

    Args:
        inline_all: whether to inline calls and sub-jaxprs that the plan does not change.
        keep_effects: whether to run equations with effects whose results are not read.
    """
    available = set(graph.inputs)
    needed = set(graph.outputs) - available
    nodes = tuple(reversed([*_live_nodes(graph.nodes, needed, available, inline_all, keep_effects)]))
    bodies = {
        node: tuple(schedule(body, inline_all=inline_all) for body in node.bodies)
        for node in nodes
        if not node.has_custom_rule and node.operation is None and node.bodies and (node.is_rewritten or inline_all)
    }
    unchanged = [node for node in nodes if node.operation is None and node not in bodies]
    uses = [use for node in nodes if (use := getattr(node.operation, "use", None)) is not None]
    uses += [use for each in bodies.values() for body in each for use in body.uses]
    last_read = {value: i for i, node in enumerate(nodes) for value in node.operands}
    last_read |= dict.fromkeys(graph.outputs, len(nodes))
    steps = {node: Equation(node.eqn, node.scope) for node in unchanged}
    return Schedule(graph, nodes, steps, bodies, tuple(uses), last_read)


def _live_nodes(
    nodes: Sequence[Node], needed: set[Value], available: set[Value], inline_all: bool, keep_effects: bool
) -> Iterator[Node]:
    """The nodes that compute needed values or have effects, last one first. Their operands are added to `needed`."""
    for node in reversed(nodes):
        if node.inlined is not None and (inline_all or node.is_rewritten or needed & _inner_values(node)):
            yield from _live_nodes(node.inlined, needed, available, inline_all, keep_effects)
        elif not needed.isdisjoint(node.results) or (keep_effects and node.eqn.effects and node.operation is None):
            needed.update(value for value in node.operands if value not in available)
            yield node


def _inner_values(node: Node) -> set[Value]:
    """The values inside of a call, without its results."""
    inner_values = {value for inner in node.inlined or () for value in (*inner.results, *_inner_values(inner))}
    return inner_values.difference(node.results)


class Interpreter:
    """One run of a graph.

    Attributes:
        facts: facts about results of operations, for the operations that read them.
        use_inputs: scaling state, slots and codes for each use of a parameter, by path and number.
        layout_policy: when products make the codes of their weights in both layouts.
        stats: statistics of data and parameters, by use and operand, if the run returns them; None if they leave as
            the gradients of slots.
    """

    def __init__(
        self,
        schedule: Schedule,
        arrays: Sequence[Any],
        use_inputs: Mapping[Any, UseInputs],
        loop_depth: int = 0,
        facts: Mapping[Value, ArrayFacts] = MappingProxyType({}),
        collect_stats: bool = False,
        is_loop_body: bool = False,
        layout_policy: LayoutPolicy = LayoutPolicy.BOTH_FOR_GRADIENT,
        layer_axes: tuple[int | None, ...] = (),
    ) -> None:
        self._layer_axes = layer_axes  # as of `fp8jax.ops.autodiff.observations.LayerScope`
        self._is_loop_body, self.layout_policy = is_loop_body, layout_policy
        self._schedule, self.use_inputs, self._position = schedule, use_inputs, 0
        self._loop_depth = loop_depth  # number of enclosing scans and meshes
        self.stats: dict[tuple[Any, str], Any] | None = {} if collect_stats else None
        self._arrays: dict[Value, Any] = dict(zip(schedule.graph.inputs, arrays, strict=True))
        self.facts: dict[Value, ArrayFacts] = dict(facts)
        self._cache: dict[Any, Any] = {}

    def array(self, value: Value) -> Any:
        """The array of a value in this run. A frozen weight is dequantized."""
        return value.array if value.array is not None else as_array(self._arrays[value])

    def raw_value(self, value: Value) -> Any:
        """The array or the frozen weight of a value in this run."""
        return value.array if value.array is not None else self._arrays[value]

    def is_live_after(self, value: Value) -> bool:
        """Whether a value is read after the current node."""
        return value.array is None and self._schedule.last_read.get(value, -1) > self._position

    def set_passthrough(self, value: Value, array: Any) -> None:
        """Replaces the array of a value for its later readers, unless it varies over other mesh axes."""
        if jax.typeof(array) == jax.typeof(self._arrays[value]):
            self._arrays[value] = array

    def get_facts(self, value: Value, x: Any) -> ArrayFacts:
        """Facts about `x`, an array with the elements of a value."""
        return convert_facts(self.facts[value], value, x) if value in self.facts else NO_FACTS

    def input_facts(self, x: Any, value: Value | None, linear: Linear, facts: ArrayFacts) -> tuple[InputFacts, Any]:
        """Facts about the input `x` of a product, and the key for its stochastic rounding.

        Products that read one value share the codes that they make from it, and the key. With None they share nothing.
        """
        shared = InputFacts(facts)
        if value is not None:
            shared = InputFacts(facts, functools.partial(self._get_or_make, value, x.dtype))
        return shared, shared.get_or_compute("key", lambda: key_from_data(x)) if linear.is_stochastic else None

    def _get_or_make(
        self, value: Value, dtype: Any, use: Hashable, make: Callable[[], Shared], *dependencies: Any
    ) -> Shared:
        key = value, dtype, use
        entry = self._cache.get(key)
        if entry is None or any(a is not b for a, b in zip(entry[0], dependencies, strict=True)):
            entry = self._cache[key] = dependencies, make()
        return entry[1]

    def run(self) -> list[Any]:
        """Runs the graph and returns its outputs."""
        schedule = self._schedule
        for self._position, node in enumerate(schedule.nodes):
            if node.operation is not None:
                with primitives.equation_context(node.eqn, node.scope), at_layer(node.path, self._layer_axes):
                    results = node.operation.run(self, node)
            elif node in schedule.bodies:
                with primitives.equation_context(node.eqn, node.scope):
                    results = self._run_nested(node, schedule.bodies[node])
            else:
                results = run_unchanged(schedule.steps[node], node, [self.raw_value(value) for value in node.operands])
            for value, array in zip(node.results, results, strict=True):
                if value.array is None:
                    self._arrays.setdefault(value, array)
        # The body of a loop returns a frozen weight as it is.
        available = set(schedule.graph.inputs) if self._is_loop_body else set()
        return [self.raw_value(v) if v in available else self.array(v) for v in schedule.graph.outputs]

    def _run_nested(self, node: Node, bodies: Sequence[Schedule]) -> list[Any]:
        is_counted = primitives.loop_info(node.eqn) is not None
        is_loop = node.kind in ("scan", "while")
        layout_policy = self._layout_policy_in(node.eqn)
        part_sizes, layer_axes = [part.size for part in node.parts], [self._layer_axes] * len(bodies)
        if is_counted:
            levels = [use.levels[self._loop_depth] for body in bodies for use in body.uses]
            starts = primitives.part_starts(node.eqn, part_sizes) if part_sizes else [0]
            has_layer_axis = any(level.has_layer_axis for level in levels)
            layer_axes = [(*self._layer_axes, start if has_layer_axis else None) for start in starts]
        shared_inputs, row_inputs = self._split_use_inputs(bodies, is_counted)
        stat_keys = [
            (key, operand)
            for key in row_inputs
            for operand in ("x", "w")
            if self.stats is not None and getattr(self.use_inputs[key].slots, operand) is not None
        ]
        # For each body, the facts about its inputs by position: arrays, and the function that rebuilds them.
        flat_facts: list[dict[int, Any]] = [{} for _ in bodies]
        if primitives.is_outside_loop(node.eqn):
            flat_facts = [
                {i: _flatten_facts(facts) for i, facts in self._body_facts(body.graph).items()} for body in bodies
            ]
        fact_arrays = [{i: arrays for i, (arrays, _) in each.items()} for each in flat_facts]

        def run_body(index: int, inputs: Sequence[Any], consts: Any, rows: Any) -> list[Any]:
            (shared, arrays), body = consts, bodies[index]
            facts = {body.graph.inputs[i]: rebuild(arrays[index][i]) for i, (_, rebuild) in flat_facts[index].items()}
            use_inputs = {}
            for key in rows:
                pairs = zip(shared[key], rows[key], strict=True)
                use_inputs[key] = UseInputs(*(a if b is None else b for a, b in pairs))
            inner = Interpreter(
                body,
                inputs,
                use_inputs,
                self._loop_depth + is_counted,
                facts,
                collect_stats=self.stats is not None,
                is_loop_body=is_loop,
                layout_policy=layout_policy,
                layer_axes=layer_axes[index],
            )
            outputs, stats = inner.run(), inner.stats or {}
            # A use in another branch has no statistics: return its slots, which are zeros.
            return [*outputs, *(stats.get((key, o), getattr(use_inputs[key].slots, o)) for key, o in stat_keys)]

        results = primitives.rebind_control_flow(
            node.eqn,
            [self.raw_value(value) for value in node.operands],
            [functools.partial(run_body, index) for index in range(len(bodies))],
            extra_consts=(shared_inputs, fact_arrays),
            extra_xs=row_inputs,
            num_extra_outputs=len(stat_keys),
            part_sizes=part_sizes,
        )
        if self.stats is not None:
            self.stats |= dict(zip(stat_keys, results[len(node.results) :], strict=False))
        return results[: len(node.results)]

    def _split_use_inputs(
        self, bodies: Sequence[Schedule], is_counted: bool
    ) -> tuple[dict[Any, UseInputs], dict[Any, UseInputs]]:
        """Inputs of the uses in `bodies`: those that iterations and devices share, and those with a row for each."""
        shared: dict[Any, UseInputs] = {}
        rows: dict[Any, UseInputs] = {}
        for use in dict.fromkeys(use for body in bodies for use in body.uses if use.key in self.use_inputs):
            state, slots, weight = self.use_inputs[use.key]
            # Each iteration and device has its own slots, and its own state and codes if it has its own parameter.
            has_layer_axis = is_counted and use.levels[self._loop_depth].has_layer_axis
            shared[use.key] = UseInputs(
                state=None if has_layer_axis else state,
                slots=None if is_counted else slots,
                weight=None if has_layer_axis else weight,
            )
            rows[use.key] = UseInputs(
                state=state if has_layer_axis else None,
                slots=slots if is_counted else None,
                weight=weight if has_layer_axis else None,
            )
        return shared, rows

    def _layout_policy_in(self, eqn: Any) -> LayoutPolicy:
        """`layout_policy` of the programs of an equation."""
        is_unrolled = primitives.is_unrolled(eqn, self.layout_policy is LayoutPolicy.BOTH_ALWAYS)
        if is_unrolled and on_cuda() and on_one_device():
            # XLA copies the row of a stacked weight in each iteration. With both layouts, the backward pass does not
            # read that copy, which has up to four bytes per parameter.
            return LayoutPolicy.BOTH_ALWAYS
        if eqn.primitive.name in ("scan", "while"):
            return LayoutPolicy.EACH_WHEN_READ  # the loop would stack the codes of all iterations
        return LayoutPolicy.BOTH_FOR_GRADIENT if self.layout_policy is LayoutPolicy.BOTH_ALWAYS else self.layout_policy

    def _body_facts(self, body: Graph) -> dict[int, ArrayFacts]:
        """Facts about the inputs of a sub-jaxpr, by position."""
        found = {}
        for i, value in enumerate(body.inputs):
            source = canonical_value(value.enclosing_value) if value.enclosing_value is not None else value
            if source in self.facts and body.is_rewritten:
                found[i] = convert_facts(self.facts[source], source, value)
        return found


def _flatten_facts(facts: ArrayFacts) -> tuple[Any, Callable[[Any], ArrayFacts]]:
    """The arrays of facts, and a function that rebuilds the facts from these arrays in another trace."""
    recomputable, fused_output, scale = facts.recompute_rule, facts.fused_output, facts.scale
    arrays = recomputable and recomputable[1], fused_output and fused_output.arrays, scale and scale[1]

    def rebuild(arrays: Any) -> ArrayFacts:
        saved, operands, number = arrays
        return ArrayFacts(
            None if recomputable is None else (recomputable[0], saved),
            None if fused_output is None else fused_output.with_arrays(*operands),
            None if scale is None else (scale[0], number),
        )

    return arrays, rebuild
