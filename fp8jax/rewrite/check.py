"""Compares each planned operation with the equations that it replaces, on the arrays of the original function."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fp8jax.core import formats
from fp8jax.core.recipe import Linear
from fp8jax.core.spec import QuantSpec
from fp8jax.rewrite import primitives
from fp8jax.rewrite.entries import PlanEntry
from fp8jax.rewrite.graph import Graph, Node, Value
from fp8jax.rewrite.operations import ProductOperation, RaggedOperation
from fp8jax.rewrite.primitives import Equation
from fp8jax.rewrite.run import Interpreter, schedule
from fp8jax.rewrite.states import UseInputs

_BF16_TOLERANCE = 2.0**-6  # relative error of a few operations in bf16


class Deviation(NamedTuple):
    """The relative errors of one operation, as norms of differences over norms.

    Attributes:
        forward_error, gradient_error: of its result, and of its operands' gradients for a random one of its result.
        forward_tolerance, gradient_tolerance: the errors that the recipe's formats explain.
    """

    entry: PlanEntry
    forward_error: float
    gradient_error: float
    forward_tolerance: float
    gradient_tolerance: float

    @property
    def is_within_tolerance(self) -> bool:
        """Whether the recipe's formats explain both errors; False for NaN."""
        return self.forward_error <= self.forward_tolerance and self.gradient_error <= self.gradient_tolerance

    def __str__(self) -> str:
        e = self.entry
        figures = (
            f"forward {self.forward_error:.1e} of {self.forward_tolerance:.1e}, gradient {self.gradient_error:.1e} of"
        )
        return f"{e.path or '-'} {e.kind}: {figures} {self.gradient_tolerance:.1e}, at {e.line}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `Transformed.check`, in program order."""

    deviations: tuple[Deviation, ...]

    @property
    def first_failure(self) -> Deviation | None:
        return next((d for d in self.deviations if not d.is_within_tolerance), None)

    def __str__(self) -> str:
        bad = (
            f"unexplained: {self.first_failure}"
            if self.first_failure is not None
            else "every operation is within its recipe's error"
        )
        return "\n".join([*map(str, self.deviations), bad])


class _Pair(NamedTuple):
    """An operation's node in the planned graph, the original graph, and the same node in it."""

    original: Graph
    node: Node
    original_node: Node


def check(
    original: Graph,
    planned: Graph,
    entries: dict[Node, PlanEntry],
    arrays: Sequence[Any],
    use_inputs: Mapping[tuple[str, int], UseInputs],
) -> Comparison:
    """Compare a planned graph with the original graph of the same program, on these inputs.

    Uses without `use_inputs` have current scaling.
    """
    pairs: list[_Pair] = []

    def errors(arrays: Sequence[Any], use_inputs: Mapping[tuple[str, int], UseInputs]) -> list[tuple[Array, Array]]:
        pairs.clear()
        return list(_run_and_compare(original, planned, arrays, pairs, use_inputs))

    found = jax.jit(errors)(arrays, use_inputs)
    return Comparison(
        tuple(
            Deviation(entries[p.node], float(f), float(g), *_tolerances(entries[p.node], p.node))
            for p, (f, g) in zip(pairs, found, strict=True)
        )
    )


def _run_and_compare(
    original: Graph,
    planned: Graph,
    arrays: Sequence[Any],
    pairs: list[_Pair],
    use_inputs: Mapping[tuple[str, int], UseInputs],
    loop_depth: int = 0,
) -> Iterator[tuple[Array, Array]]:
    """Run the original program; yield the errors of each operation, in loops of the first iteration of each part."""
    arrays_by_value: dict[Value, Any] = dict(zip(original.inputs, arrays, strict=True))
    original_values = dict(zip(planned.inputs, original.inputs, strict=True))
    for node, original_node in zip(planned.walk(), original.walk(), strict=True):
        operands = [v.array if v.array is not None else arrays_by_value[v] for v in original_node.operands]
        results = Equation(original_node.eqn, original_node.scope)(operands)
        arrays_by_value |= dict(zip(original_node.results, results, strict=True))
        original_values |= dict(zip(node.results, original_node.results, strict=True))
        if node.operation is not None:
            pairs.append(_Pair(original, node, original_node))
            leaves = [v for v in dict.fromkeys(node.operands) if v.array is None]
            yield _errors(
                pairs[-1],
                leaves,
                [original_values[v] for v in leaves],
                [arrays_by_value[original_values[v]] for v in leaves],
                use_inputs,
            )
        elif node.is_rewritten and not node.has_custom_rule:
            programs = primitives.sub_jaxprs(node.eqn) * max(len(node.parts), 1)
            iteration, sizes = 0, [part.size for part in node.parts] or [0] * len(programs)
            for body, planned_body, program, size in zip(
                original_node.bodies, node.bodies, programs, sizes, strict=True
            ):
                if node.kind != "shard_map":
                    inputs = [operands[i] for i in program.operand_indices]
                    inputs = primitives.iteration_inputs(node.eqn, inputs, iteration)
                    inner_inputs = _iteration_use_inputs(node.eqn, planned_body, use_inputs, loop_depth, iteration)
                    inner_depth = loop_depth + (primitives.loop_info(node.eqn) is not None)
                    yield from _run_and_compare(body, planned_body, inputs, pairs, inner_inputs, inner_depth)
                iteration += size


def _iteration_use_inputs(
    eqn: Any, body: Graph, use_inputs: Mapping[tuple[str, int], UseInputs], loop_depth: int, iteration: int
) -> dict[tuple[str, int], UseInputs]:
    """The inputs of the uses in an equation's jaxpr, in an iteration."""
    uses = [use for node in body.walk_nested() if (use := getattr(node.operation, "use", None)) is not None]
    found = {use.key: use_inputs[use.key] for use in uses if use.key in use_inputs}
    if primitives.loop_info(eqn) is None:
        return found
    row = primitives.iteration_row(eqn, iteration)
    take_row = functools.partial(jax.tree.map, lambda x: x[row])
    for use in uses:
        if use.key in found:
            state, slots, weight = found[use.key]
            state = take_row(state) if use.levels[loop_depth].has_layer_axis else state
            found[use.key] = UseInputs(state, take_row(slots), weight)
    return found


def _errors(
    pair: _Pair,
    leaves: list[Value],
    original_leaves: list[Value],
    arrays: list[Any],
    use_inputs: Mapping[tuple[str, int], UseInputs],
) -> tuple[Array, Array]:
    node, operation = pair.node, pair.node.operation
    if isinstance(operation, ProductOperation | RaggedOperation):
        has_state = operation.use is not None and operation.use.key in use_inputs
        if operation.linear.stateful_strategies and not has_state:
            operation = operation.with_current_scaling()
    single_node = dataclasses.replace(node, operation=operation)
    planned_schedule = schedule(Graph(leaves, [single_node], [node.results[0]]))
    original_schedule = schedule(
        Graph(original_leaves, pair.original.nodes, [pair.original_node.results[0]]), keep_effects=False
    )
    floats = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

    def run(plan: Any) -> Any:
        def forward(float_inputs: list[Any]) -> Any:
            inputs = list(arrays)
            for i, x in zip(floats, float_inputs, strict=True):
                inputs[i] = x
            return Interpreter(plan, inputs, use_inputs).run()[0]

        y, vjp = jax.vjp(forward, [arrays[i] for i in floats])
        dy = jax.random.normal(jax.random.key(0), y.shape).astype(y.dtype)
        return y, vjp(dy)[0]

    (y, gradients), (original_y, original_gradients) = run(planned_schedule), run(original_schedule)
    return _relative_error([y], [original_y]), _relative_error(gradients, original_gradients)


def _relative_error(a: Sequence[Array], b: Sequence[Array]) -> Array:
    """The largest relative distance between paired arrays; 0 if both arrays of a pair are 0."""
    norm = lambda x: jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32))))  # noqa: E731
    differences = [(norm(x.astype(jnp.float32) - y.astype(jnp.float32)), norm(y)) for x, y in zip(a, b, strict=True)]
    return jnp.max(jnp.stack([jnp.where(d == 0, 0.0, d / size) for d, size in differences]))


def _tolerances(entry: PlanEntry, node: Node) -> tuple[float, float]:
    """The forward and gradient tolerances of a recipe: half a unit in the last place per quantized operand."""
    assert entry.choice is not None
    context = entry.choice.context.spec
    if not entry.is_product:
        return _BF16_TOLERANCE, _BF16_TOLERANCE + _half_ulp(context)
    linear: Linear | None = entry.choice.linear
    assert linear is not None
    forward, dgrad, wgrad = (sum(map(_half_ulp, pair)) for pair in linear.products().values())
    recomputed = _half_ulp(context) if entry.input_producer else 0.0
    return _BF16_TOLERANCE + forward, _BF16_TOLERANCE + max(dgrad, wgrad + recomputed)


def _half_ulp(spec: QuantSpec | None) -> float:
    """Half a unit in the last place of a format, relative to a typical value."""
    if spec is None:
        return 0.0
    fmt = formats.get(spec.format)
    return 2.0 ** -(fmt.mantissa_bits + 1) if fmt.is_float else 2.0**-4
