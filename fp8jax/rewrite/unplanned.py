"""Entries of `explain` for what a plan leaves as written: norms, activations and products without a parameter."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import jax.numpy as jnp

from fp8jax.rewrite import activations, norms, primitives
from fp8jax.rewrite.caller import Caller
from fp8jax.rewrite.entries import Entry
from fp8jax.rewrite.graph import Graph, Node, Value, before
from fp8jax.rewrite.primitives import CASTS, LAYOUTS, MARKS, RESHAPES
from fp8jax.rewrite.rules import Ordered
from fp8jax.rewrite.run import Schedule
from fp8jax.rewrite.shares import flops

_ROOTS = ("rsqrt", "sqrt", "pow")
_CURVES = ("logistic", "tanh", "erf", "erfc", "expm1")
# Functions that programs call by these names.
_NAMES = (
    *("relu", "relu6", "leaky_relu", "silu", "swish", "gelu", "elu", "selu", "celu", "mish", "softplus", "sigmoid"),
    *("hard_tanh", "hard_silu", "hard_swish", "hard_sigmoid", "log_sigmoid", "soft_sign", "squareplus", "logaddexp"),
)
_STATISTICS = ("add", "sub", "max", "mul", "div", "select_n", "square", "integer_pow", *LAYOUTS)
_BY_ELEMENT = ("add", "add_any", "sub", "mul", "div", "neg", "select_n", "max", "min", *CASTS, *MARKS, *RESHAPES)
_FURTHEST = 12  # steps from a statistic, or a curve, to what reads the result
_NO_CONTEXT = "no rule's recipe has a context, which says what norms and activations keep"
_UNREAD = "no product of a recipe reads its result as it is"


class _Program:
    """A planned program, and who reads what in it."""

    def __init__(self, graph: Graph, schedule: Schedule, rules: Ordered, caller: Caller, taken: set[Node]) -> None:
        self.graph, self.schedule, self.rules, self.caller, self.taken = graph, schedule, rules, caller, taken
        self.readers: dict[Value, list[Node]] = {}
        for node in graph.everywhere():
            for value in node.operands:
                self.readers.setdefault(value, []).append(node)


Around = tuple[tuple[Node, Graph], ...]


def list_entries(
    graph: Graph, schedule: Schedule, rules: Ordered, caller: Caller, entries: Mapping[Node, Entry]
) -> tuple[Entry, ...]:
    """The entries of `explain` for a planned program, in its order.

    Args:
        graph: the program, planned.
        schedule: what is run of it.
        rules: which recipe is whose.
        caller: of the program.
        entries: of the plan.

    Returns:
        The plan's entries, and what runs as written beside them: norms, activations of what products give, and products
        of which no operand is a parameter.
    """
    program = _Program(graph, schedule, rules, caller, {node for node, entry in entries.items() if entry.taken})
    found: dict[Node, Entry] = {}
    for node, around in _running(schedule, ()):
        if node in entries or node.operation is not None:
            continue
        if node.kind in _ROOTS:
            entry = _norm(program, node)
        elif node.kind in primitives.PRODUCTS:
            entry = _product(program, node, around)
        else:
            entry = _activation(program, node)
        if entry is not None:
            found[node] = entry
    found |= entries
    return tuple(found[node] for node in _everywhere(graph.nodes) if node in found)


def _everywhere(nodes: Sequence[Node]) -> Iterator[Node]:
    """All nodes, calls and what is in them among them."""
    for node in nodes:
        yield node
        yield from _everywhere(node.inlined or ())
        for body in node.bodies:
            yield from _everywhere(body.nodes)


def _running(schedule: Schedule, around: Around) -> Iterator[tuple[Node, Around]]:
    """The nodes that run, with what they stand in; of a call that is an activation by its name, the call."""
    for node in schedule.nodes:
        yield from _parts(node, schedule, around)


def _parts(node: Node, schedule: Schedule | None, around: Around) -> Iterator[tuple[Node, Around]]:
    if node.inlined is not None and primitives.function_name(node.eqn) not in _NAMES:
        for inner in node.inlined:
            yield from _parts(inner, schedule, around)
        return
    yield node, around
    if node.sealed or node.inlined is not None:
        return
    schedules = () if schedule is None else schedule.bodies.get(node, ())
    for body, plan in zip(node.bodies, schedules or [None] * len(node.bodies), strict=True):
        for inner in body.nodes if plan is None else plan.nodes:
            yield from _parts(inner, plan, (*around, (node, body)))


def _norm(program: _Program, node: Node) -> Entry | None:
    """The entry of the norm whose square root a node is; None if it belongs to no norm."""
    root = node.operands[0]
    if not root.data or root.aval.ndim < 1 or root.aval.size < 2:
        return None
    sums, means = list[Node](), False
    for value in _below(root):
        if value.kind == "reduce_sum" and value.node is not None:
            sums.append(value.node)
        means |= value.kind in ("div", "mul") and value is not root
    squares = [total for total in sums if _squared(total.operands[0]) is not None]
    if not squares:
        return None
    x = _squared(squares[0].operands[0])
    assert x is not None
    centered = len(sums) > len(squares) or any(value.kind == "sub" for value in (_plain(x), *_below(root)))
    kind = "LayerNorm" if centered else "RMSNorm" if means else "L2 norm"
    axes, ndim = tuple(squares[0].eqn.params["axes"]), squares[0].operands[0].aval.ndim
    path, modulated, read, known = _after_norm(program, node.results[0])
    reason = _UNREAD
    if not program.rules.contexts:
        reason = _NO_CONTEXT
    elif axes != (ndim - 1,):
        kind, reason = "norm", f"its mean is over the axes {axes} of {ndim}, not over the last one"
    elif modulated:
        reason = "data scale or shift its result, as in adaLN"
    elif read and not known:
        reason = "fp8jax knows no norm of this form"
    return Entry(path, kind, squares[0].operands[0].shape, None, reason, node.line())


def _after_norm(program: _Program, value: Value) -> tuple[str, bool, bool, bool]:
    """The path of a norm's parameter, whether data scale or shift the result, whether a product of a recipe reads it,
    and whether some of what is computed of it is a norm as fp8jax knows them."""
    path, modulated, read, known = "", False, False, False
    own = set(_upstream(value))
    for reader, operand in _forward(program, value):
        read |= reader in program.taken and reader.operation is not None
        if reader.kind not in ("mul", "add", "sub", "div") or reader.operation is not None:
            continue
        known = known or norms.find(reader.results[0]) is not None
        for other in (o for o in reader.operands if o is not operand and o not in own):
            weight = before(other).weight
            if weight is not None:
                path = path or program.caller.paths(weight.path)[0]
            elif reader.kind in ("mul", "div") and other.data and not other.fixed:
                modulated |= own.isdisjoint(_upstream(other))  # else it is the norm itself
    return path, modulated and read, read, known


def _activation(program: _Program, node: Node) -> Entry | None:
    """The entry of the activation that a node is part of; None if it belongs to none."""
    name = primitives.function_name(node.eqn)
    named = name in _NAMES and (node.inlined is not None or node.sealed)
    rectified = node.kind == "max" and any(operand.constant == 0 for operand in node.operands)
    if not (named or rectified or node.kind in _CURVES) or not node.results:
        return None
    value = node.results[0]
    if not value.data or not value.trained or value.aval.ndim < 1 or value.aval.size < 2:
        return None
    if rectified and _statistic(program, value):
        return None
    label, read = name if named else "relu" if rectified else node.kind, False
    for reader, _ in _forward(program, value):
        read |= reader in program.taken and reader.operation is not None
        if reader.results and reader.kind in ("mul", "div", "add") and reader.operation is None:
            form = activations.find(reader.results[0])
            if form is not None:
                label = f"{form.name}(gate){'' if form.up is None else ' * up'}"
    form = activations.find(value)
    if form is not None and "(" not in label:
        label = f"{form.name}(gate)"
    reason = _UNREAD
    if not program.rules.contexts:
        reason = _NO_CONTEXT
    elif "(" not in label:
        reason = "fp8jax knows no activation of this form"
    elif read:
        reason = "the rule of the product that reads it has no context"
    return Entry("", label, value.shape, None, reason, node.line())


def _statistic(program: _Program, value: Value) -> bool:
    """Whether a value is a variance, or what a softmax subtracts, and no activation."""
    return any(v.kind in ("reduce_sum", "reduce_max") for v in _below(value, 4))


def _product(program: _Program, node: Node, around: Around) -> Entry | None:
    """The entry of a product of which no operand is a parameter; None if it contracts nothing."""
    if node.kind == "dot_general" and not node.eqn.params["dimension_numbers"][0][0]:
        return None
    operands = node.operands[:2]
    if not all(jnp.issubdtype(v.dtype, jnp.floating) for v in operands) or not any(v.data for v in operands):
        return None
    paths = [path for path in (_adapter(program, value) for value in operands) if path]
    if paths:
        reason = f"an adapter; fp8jax.Rule({paths[0]!r}, recipe) quantizes it"
    elif all(v.data for v in operands):
        reason = "both operands are data, as those of attention are"
    else:
        reason = "no operand is a parameter"
    shape = next((v.shape for v in operands if _adapter(program, v)), node.results[0].shape)
    path, count = paths[0] if paths else "", flops(node, around)
    return Entry(path, node.kind, shape, None, reason, node.line(), product=True, flops=count)


def _adapter(program: _Program, value: Value) -> str:
    """The path of the adapter's array that a value is, up to layouts and casts; "" of anything else."""
    if not program.caller.adapters:
        return ""
    value = before(value)
    while value.outer is not None:
        value = before(value.outer)
    inputs = program.graph.inputs
    return program.caller.adapters.get(inputs.index(value), "") if value in inputs else ""


def _forward(program: _Program, value: Value) -> Iterator[tuple[Node, Value]]:
    """The readers of a value, and of values computed from it element by element, each with the value that it reads."""
    seen, new = {value}, [value]
    for _ in range(_FURTHEST):
        values, new = new, list[Value]()
        for value in values:
            for reader in program.readers.get(value, ()):
                yield reader, value
                if reader.kind in _BY_ELEMENT and reader.operation is None:
                    new += [result for result in reader.results if result not in seen]
        seen.update(new)


def _operands(value: Value, through: Sequence[str]) -> list[Value]:
    node = value.node
    return node.operands if node is not None and node.operation is None and value.kind in through else []


def _walk(value: Value, step: Callable[[Value], list[Value]], deepest: int) -> list[Value]:
    found, new = {value: None}, [value]
    for _ in range(deepest):
        new = [o for v in new for o in step(v) if o not in found]
        found |= dict.fromkeys(new)
    return list(found)


def _below(value: Value, deepest: int = 10) -> list[Value]:
    """A value and the statistics that it is computed from, down to their sums."""
    return _walk(value, lambda v: _operands(v, _STATISTICS), deepest)


def _upstream(value: Value) -> list[Value]:
    """A value and what it is computed from, up to products and norms before it."""
    through = (*_STATISTICS, *_BY_ELEMENT, "reduce_sum", *_ROOTS)
    return _walk(value, lambda v: _operands(v, through), _FURTHEST)


def _plain(value: Value) -> Value:
    return before(value, (*CASTS, *MARKS, *RESHAPES))


def _squared(value: Value) -> Value | None:
    """The value whose square this is; None if it is no square."""
    value = _plain(value)
    node = value.node
    if node is None or node.operation is not None:
        return None
    powers = node.kind == "square" or (node.kind == "integer_pow" and node.eqn.params["y"] == 2)
    same = node.kind == "mul" and _plain(node.operands[0]) is _plain(node.operands[1])
    return node.operands[0] if powers or same else None
