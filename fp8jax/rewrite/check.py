"""Compares the operations of a plan with what they stand for, each on the arrays that the function as written gives."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fp8jax.core import formats
from fp8jax.core.recipe import Linear
from fp8jax.core.spec import QuantSpec
from fp8jax.rewrite import primitives
from fp8jax.rewrite.entries import Entry
from fp8jax.rewrite.graph import Graph, Node, Value
from fp8jax.rewrite.operations import ProductOperation
from fp8jax.rewrite.primitives import Equation
from fp8jax.rewrite.run import Running, schedule

_SIXTEEN_BITS = 2.0**-6  # what a few operations in bf16 leave, relative


class Deviation(NamedTuple):
    """How far an operation is from what is written, as norms of differences over norms.

    Attributes:
        entry: the operation.
        forward, gradient: of its result, and of its operands' gradients for a random one of its result.
        forward_allowed, gradient_allowed: what the formats of its recipe explain.
    """

    entry: Entry
    forward: float
    gradient: float
    forward_allowed: float
    gradient_allowed: float

    @property
    def explained(self) -> bool:
        """Whether the formats explain it; NaN is explained by nothing."""
        return self.forward <= self.forward_allowed and self.gradient <= self.gradient_allowed

    def __str__(self) -> str:
        e = self.entry
        figures = f"forward {self.forward:.1e} of {self.forward_allowed:.1e}, gradient {self.gradient:.1e} of"
        return f"{e.path or '-'} {e.kind}: {figures} {self.gradient_allowed:.1e}, at {e.line}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `Transformed.check` found, in the order of the program; `first` is the first that is not explained."""

    deviations: tuple[Deviation, ...]

    @property
    def first(self) -> Deviation | None:
        return next((d for d in self.deviations if not d.explained), None)

    def __str__(self) -> str:
        bad = f"unexplained: {self.first}" if self.first is not None else "every operation is within its recipe's error"
        return "\n".join([*map(str, self.deviations), bad])


class _Pair(NamedTuple):
    """An operation, in a program and in the same program as written."""

    written: Graph
    planned: Graph
    node: Node
    as_written: Node


def check(written: Graph, planned: Graph, entries: dict[Node, Entry], arrays: Sequence[Any]) -> Comparison:
    """Compares two graphs of one program, of which one is planned, on these inputs."""
    pairs: list[_Pair] = []

    def figures(arrays: Sequence[Any]) -> list[tuple[Array, Array]]:
        pairs.clear()
        return list(_walk(written, planned, arrays, pairs))

    found = jax.jit(figures)(arrays)
    return Comparison(
        tuple(
            Deviation(entries[p.node], float(f), float(g), *_allowed(entries[p.node], p.node))
            for p, (f, g) in zip(pairs, found, strict=True)
        )
    )


def _walk(written: Graph, planned: Graph, arrays: Sequence[Any], pairs: list[_Pair]) -> Iterator[tuple[Array, Array]]:
    """Runs a program as written; the figures of each operation in it, and in the first turns of programs in it."""
    known: dict[Value, Any] = dict(zip(written.inputs, arrays, strict=True))
    same = dict(zip(planned.inputs, written.inputs, strict=True))
    for node, as_written in zip(planned.all(), written.all(), strict=True):
        operands = [v.array if v.array is not None else known[v] for v in as_written.operands]
        results = Equation(as_written.eqn, as_written.scope)(operands)
        known |= dict(zip(as_written.results, results, strict=True))
        same |= dict(zip(node.results, as_written.results, strict=True))
        if node.operation is not None:
            pairs.append(_Pair(written, planned, node, as_written))
            leaves = [v for v in dict.fromkeys(node.operands) if v.array is None]
            yield _figures(pairs[-1], leaves, [same[v] for v in leaves], [known[same[v]] for v in leaves])
        elif node.changed and not node.sealed:
            for body, inside, program in zip(as_written.bodies, node.bodies, primitives.bodies(node.eqn), strict=True):
                if node.kind != "shard_map":
                    first = primitives.first_turn(node.eqn, [operands[i] for i in program.inputs])
                    yield from _walk(body, inside, first, pairs)


def _figures(pair: _Pair, leaves: list[Value], as_written: list[Value], arrays: list[Any]) -> tuple[Array, Array]:
    node, operation = pair.node, pair.node.operation
    if isinstance(operation, ProductOperation) and operation.recipe.linear.states:
        linear = dataclasses.replace(operation.recipe.linear, scaling="current", w_scaling=None)
        operation = dataclasses.replace(
            operation, recipe=dataclasses.replace(operation.recipe, linear=linear), use=None
        )
    alone = dataclasses.replace(node, operation=operation)
    new = schedule(Graph(leaves, [alone], [node.results[0]]))
    old = schedule(Graph(as_written, pair.written.nodes, [pair.as_written.results[0]]), effects=False)
    floats = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

    def run(plan: Any) -> Any:
        def of(moving: list[Any]) -> Any:
            inputs = list(arrays)
            for i, x in zip(floats, moving, strict=True):
                inputs[i] = x
            return Running(plan, inputs, {}).outputs()[0]

        y, back = jax.vjp(of, [arrays[i] for i in floats])
        dy = jax.random.normal(jax.random.key(0), y.shape).astype(y.dtype)
        return y, back(dy)[0]

    (y, gradients), (wanted, expected) = run(new), run(old)
    return _apart([y], [wanted]), _apart(gradients, expected)


def _apart(a: Sequence[Array], b: Sequence[Array]) -> Array:
    """The largest relative distance of arrays; 0 where both are 0."""
    norm = lambda x: jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32))))  # noqa: E731
    each = [(norm(x.astype(jnp.float32) - y.astype(jnp.float32)), norm(y)) for x, y in zip(a, b, strict=True)]
    return jnp.max(jnp.stack([jnp.where(d == 0, 0.0, d / size) for d, size in each]))


def _allowed(entry: Entry, node: Node) -> tuple[float, float]:
    """What the formats of a recipe explain: half a step of each operand that is rounded."""
    assert entry.choice is not None
    context = entry.choice.context.spec
    if not entry.product:
        return _SIXTEEN_BITS, _SIXTEEN_BITS + _half_step(context)
    linear: Linear | None = entry.choice.linear
    assert linear is not None
    forward, dgrad, wgrad = (sum(map(_half_step, pair)) for pair in linear.products().values())
    made_again = _half_step(context) if entry.reads else 0.0
    return _SIXTEEN_BITS + forward, _SIXTEEN_BITS + max(dgrad, wgrad + made_again)


def _half_step(spec: QuantSpec | None) -> float:
    """Half a step of a format, relative to a value of usual size."""
    if spec is None:
        return 0.0
    fmt = formats.get(spec.format)
    return 2.0 ** -(fmt.mantissa_bits + 1) if fmt.is_float else 2.0**-4
