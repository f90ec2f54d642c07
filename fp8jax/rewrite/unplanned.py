"""Finds norms, activations and matmuls that the plan leaves, and the share of FLOPs that stays in 16 bits."""

import collections
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from fp8jax.ops.quantization.fused_reference import ACTIVATIONS
from fp8jax.rewrite import activations, norms, primitives
from fp8jax.rewrite.call_info import CallInfo
from fp8jax.rewrite.entries import PlanEntry
from fp8jax.rewrite.graph import Graph, Node, Value, search, strip_layout
from fp8jax.rewrite.heads import Flow
from fp8jax.rewrite.primitives import CASTS, IDENTITY_PRIMITIVES, LAYOUTS, RESHAPES
from fp8jax.rewrite.rules import RuleSet
from fp8jax.rewrite.run import Schedule

_MAX_LISTED = 3  # reasons in a message
_MAX_FRACTION = 0.1


class UnquantizedWarning(UserWarning):
    """More than 10 % of the FLOPs of a model's matmuls stay in 16 bits, although the rules select them."""


class UnquantizedShare(NamedTuple):
    """The matmuls that stay in 16 bits although the rules select them.

    Attributes:
        fraction: their share of the FLOPs of all matmuls with parameters in a forward pass. Output heads, embeddings,
            routers, convolutions and matmuls that a rule excludes are not counted.
        text: the fraction and the reasons, as a sentence; "" if there are none.
    """

    fraction: float = 0.0
    text: str = ""

    @property
    def is_notable(self) -> bool:
        """Whether the fraction is large enough for a warning."""
        return self.fraction > _MAX_FRACTION


def flops(node: Node, enclosing: Iterable[tuple[Node, Graph]]) -> float:
    """The FLOPs of a matmul in a forward pass, over all iterations of the scans around it; 0 if unknown.

    A custom derivative has those of the matmuls in it.
    """
    num_runs = math.prod(outer.num_runs(body) for outer, body in enclosing)
    return 2 * num_runs * _node_flops(node)


def _node_flops(node: Node) -> float:
    if node.bodies:
        return sum(node.num_runs(body) * _node_flops(inner) for body in node.bodies for inner in body.walk())
    if node.kind not in primitives.PRODUCTS or len(node.operands) < 2:
        return 0
    left, right, result = node.operands[0].shape, node.operands[1].shape, node.results[0].shape
    if not all(isinstance(n, int) for n in (*left, *right, *result)):
        return 0
    numbers = node.eqn.params.get("dimension_numbers")
    if node.kind == "dot_general":
        return math.prod(result) * math.prod(left[i] for i in numbers[0][0])
    if node.kind == primitives.CONVOLUTION:
        return math.prod(result) * math.prod(right) / max(right[numbers.rhs_spec[0]], 1)
    return math.prod(result) * left[-1] if left else 0


def is_complete(node: Node) -> bool:
    """Whether a custom derivative has 8-bit values already, or is a head with its loss."""
    inside = [inner for body in node.bodies for inner in body.walk_nested()] if node.has_custom_rule else []
    values = [value for inner in inside for value in (*inner.operands, *inner.results)]
    eight_bit = any(_is_number(value.dtype) and value.dtype.itemsize == 1 for value in values)
    return eight_bit or any(inner.kind == "log" for inner in inside)


def _is_number(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer))


def unquantized_share(graph: Graph, entries: dict[Node, PlanEntry], call_info: CallInfo) -> UnquantizedShare:
    """The share of a planned program's FLOPs that its rules ask for and that is not quantized."""
    quantized_flops = sum(entry.flops for entry in entries.values() if entry.is_product and entry.is_quantized)
    missed = {node: entry for node, entry in entries.items() if entry.is_unsupported and entry.flops}
    found = _summarize_share(quantized_flops, list(missed.values()))
    if not found.is_notable:
        return found
    products = {node for node, entry in entries.items() if entry.is_product}
    heads = Flow(graph, products, call_info.num_results, call_info.argument_indices).find_heads()
    return _summarize_share(quantized_flops, [entry for node, entry in missed.items() if node not in heads])


def _summarize_share(quantized_flops: float, entries: Sequence[PlanEntry]) -> UnquantizedShare:
    unquantized_flops = sum(entry.flops for entry in entries)
    if not unquantized_flops:
        return UnquantizedShare()
    groups = collections.defaultdict[str, list[PlanEntry]](list)
    for entry in sorted(entries, key=lambda entry: -entry.flops):
        groups[entry.reason].append(entry)
    notes = [f"{_count_note(group)} ({reason}; {group[0].line})" for reason, group in groups.items()]
    rest = f"; and {len(notes) - _MAX_LISTED} other reasons" if len(notes) > _MAX_LISTED else ""
    fraction = unquantized_flops / (unquantized_flops + quantized_flops)
    figure = f"{min(100 * fraction, 99):.2g} %" if fraction < 1 else "all"
    head = f"{figure} of the FLOPs of matmuls with parameters stay in 16 bits, although the rules select them"
    return UnquantizedShare(fraction, f"{head}: {'; '.join(notes[:_MAX_LISTED])}{rest}")


def _count_note(group: Sequence[PlanEntry]) -> str:
    paths = list(dict.fromkeys(entry.path for entry in group if entry.path))
    count = f"{len(group)} matmul{'s' if len(group) > 1 else ''}"
    more = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
    return f"{count} of {', '.join(paths[:2])}{more}" if paths else count


_ROOTS = ("rsqrt", "sqrt", "pow")
_CURVES = ("logistic", "tanh", "erf", "erfc", "expm1")
# The names of activation functions in `jax.nn` and other libraries.
_ACTIVATION_NAMES = (
    *("relu", "relu6", "leaky_relu", "silu", "swish", "gelu", "elu", "selu", "celu", "mish", "softplus", "sigmoid"),
    *("hard_tanh", "hard_silu", "hard_swish", "hard_sigmoid", "log_sigmoid", "soft_sign", "squareplus", "logaddexp"),
)
_STATISTICS = ("add", "sub", "max", "mul", "div", "select_n", "square", "integer_pow", *LAYOUTS)
_BY_ELEMENT = (
    "add",
    "add_any",
    "sub",
    "mul",
    "div",
    "neg",
    "select_n",
    "max",
    "min",
    *CASTS,
    *IDENTITY_PRIMITIVES,
    *RESHAPES,
)
_MAX_DISTANCE = 12  # steps from a statistic or nonlinear function to a reader of the result
_NO_CONTEXT_REASON = "the rules quantize matmuls only: no recipe has a context"
_ARGUMENT_REASON = "both operands are data; if one is a parameter, name its argument in fp8jax.transform(..., params=)"
_UNREAD_REASON = "no quantized matmul reads its result directly"


class _Program:
    """A planned program, and the readers of each value."""

    def __init__(self, graph: Graph, rules: RuleSet, call_info: CallInfo, quantized_nodes: set[Node]) -> None:
        self.graph, self.rules, self.call_info, self.quantized_nodes = graph, rules, call_info, quantized_nodes
        self.readers: dict[Value, list[Node]] = {}
        for node in graph.walk_nested():
            for value in node.operands:
                self.readers.setdefault(value, []).append(node)


Enclosing = tuple[tuple[Node, Graph], ...]


def find(
    graph: Graph, schedule: Schedule, rules: RuleSet, call_info: CallInfo, entries: Mapping[Node, PlanEntry]
) -> dict[Node, PlanEntry]:
    """The entries of norms, activations and matmuls without a parameter that a plan does not list."""
    program = _Program(graph, rules, call_info, {node for node, entry in entries.items() if entry.is_quantized})
    found: dict[Node, PlanEntry] = {}
    for node, enclosing in _executed_nodes(schedule, ()):
        if node in entries or node.operation is not None:
            continue
        if node.kind in _ROOTS:
            entry = _norm_entry(program, node)
        elif node.kind in primitives.PRODUCTS:
            entry = _product_entry(program, node, enclosing)
        else:
            entry = _activation_entry(program, node)
        if entry is None:
            continue
        scopes = [node.scope, *(outer.scope for outer, _ in enclosing)]
        if not entry.is_product and any(map(primitives.is_differentiated, scopes)):
            entry = entry._replace(reason=primitives.DIFFERENTIATED_REASON)
        found[node] = entry._replace(is_planned=False)
    return found


def _executed_nodes(schedule: Schedule, enclosing: Enclosing) -> Iterator[tuple[Node, Enclosing]]:
    """The nodes that run, with the nodes around them; a call with the name of an activation is one node."""
    for node in schedule.nodes:
        yield from _expand_node(node, schedule, enclosing)


def _expand_node(node: Node, schedule: Schedule | None, enclosing: Enclosing) -> Iterator[tuple[Node, Enclosing]]:
    if node.inlined is not None and primitives.function_name(node.eqn) not in _ACTIVATION_NAMES:
        for inner in node.inlined:
            yield from _expand_node(inner, schedule, enclosing)
        return
    yield node, enclosing
    if node.has_custom_rule or node.inlined is not None:
        return
    schedules = () if schedule is None else schedule.bodies.get(node, ())
    for body, plan in zip(node.bodies, schedules or [None] * len(node.bodies), strict=True):
        for inner in body.nodes if plan is None else plan.nodes:
            yield from _expand_node(inner, plan, (*enclosing, (node, body)))


def _norm_entry(program: _Program, node: Node) -> PlanEntry | None:
    """The entry of the norm whose square root is `node`; None if there is no such norm."""
    root = node.operands[0]
    if not root.is_data or _is_single(root):
        return None
    sums, has_mean = list[Node](), False
    for value in _ancestors(root):
        if value.kind == "reduce_sum" and value.node is not None:
            sums.append(value.node)
        has_mean |= value.kind in ("div", "mul") and value is not root
    squares = [total for total in sums if _squared_value(total.operands[0]) is not None]
    if not squares:
        return None
    x = _squared_value(squares[0].operands[0])
    assert x is not None
    is_centered = len(sums) > len(squares) or any(
        value.kind == "sub" for value in (_strip_identities(x), *_ancestors(root))
    )
    kind = "LayerNorm" if is_centered else "RMSNorm" if has_mean else "L2 norm"
    axes, ndim = tuple(map(int, squares[0].eqn.params["axes"])), squares[0].operands[0].aval.ndim
    path, is_modulated, is_read_by_recipe, is_known = _norm_consumers(program, node.results[0])
    reason = _UNREAD_REASON
    if not program.rules.has_contexts:
        reason = _NO_CONTEXT_REASON
    elif axes != (ndim - 1,):
        kind, reason = "norm", f"its mean is over the axes {axes} of {ndim}, not over the last one"
    elif is_modulated:
        reason = "data scale or shift its result, as in adaLN"
    elif is_read_by_recipe and not is_known:
        reason = "not a recognized form of norm"
    return PlanEntry(path, kind, squares[0].operands[0].shape, None, reason, node.line())


def _norm_consumers(program: _Program, value: Value) -> tuple[str, bool, bool, bool]:
    """A norm's parameter path, and whether data modulate its result, whether a quantized matmul reads it, and whether
    its form is known."""
    path, is_modulated, is_read_by_recipe, is_known = "", False, False, False
    upstream = set(_upstream(value))
    for reader, operand in _downstream(program, value):
        is_read_by_recipe |= reader in program.quantized_nodes and reader.operation is not None
        if reader.kind not in ("mul", "add", "sub", "div") or reader.operation is not None:
            continue
        is_known = is_known or norms.find(reader.results[0]) is not None
        for factor in (o for o in reader.operands if o is not operand and o not in upstream):
            weight = strip_layout(factor).weight
            if weight is not None:
                path = path or program.call_info.layer_paths(weight.path)[0]
            elif reader.kind in ("mul", "div") and factor.is_data and not factor.is_closure_data:
                is_modulated |= upstream.isdisjoint(_upstream(factor))  # unless it is the norm itself
    return path, is_modulated and is_read_by_recipe, is_read_by_recipe, is_known


def _activation_entry(program: _Program, node: Node) -> PlanEntry | None:
    """The entry of the activation that a node is part of; None if there is none."""
    name = primitives.function_name(node.eqn)
    is_named = name in _ACTIVATION_NAMES and (node.inlined is not None or node.has_custom_rule)
    is_relu = node.kind == "max" and any(operand.constant == 0 for operand in node.operands)
    if not (is_named or is_relu or node.kind in _CURVES) or not node.results:
        return None
    value = node.results[0]
    if not value.is_data or not value.depends_on_params or _is_single(value):
        return None
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return None  # as of numbers of experts, which jnp.bincount clips at 0
    if is_relu and _is_statistic(program, value):
        return None
    label, is_read_by_recipe = name if is_named else "relu" if is_relu else node.kind, False
    for reader, _ in _downstream(program, value):
        is_read_by_recipe |= reader in program.quantized_nodes and reader.operation is not None
        if reader.results and reader.kind in ("mul", "div", "add") and reader.operation is None:
            form = activations.find(reader.results[0])
            if form is not None:
                label = f"{form.name}(x)" if form.up is None else f"{form.name}(gate) * up"
    form = activations.find(value)
    if form is not None and "(" not in label:
        label = f"{form.name}(x)"
    reason = _UNREAD_REASON
    if not program.rules.has_contexts:
        reason = _NO_CONTEXT_REASON
    elif "(" not in label:
        reason = f"not a recognized activation ({', '.join(ACTIVATIONS)})"
    elif is_read_by_recipe:
        reason = "no quantized matmul with a context reads its result directly; dropout, for example, changes it"
    return PlanEntry("", label, value.shape, None, reason, node.line())


def _is_single(value: Value) -> bool:
    """Whether a value has one element."""
    return all(isinstance(n, int) and n < 2 for n in value.shape)


def _is_statistic(program: _Program, value: Value) -> bool:
    """Whether a value is a variance or a softmax's maximum, and no activation."""
    return any(v.kind in ("reduce_sum", "reduce_max") for v in _ancestors(value, 4))


def _is_matrix_argument(program: _Program, value: Value) -> bool:
    """Whether a value is an argument of the user's function that may be a matrix of parameters."""
    value = strip_layout(value)
    while value.node is None and value.enclosing_value is not None:
        value = strip_layout(value.enclosing_value)
    # The arguments of a method of a Flax model are no parameters.
    return program.call_info.argument_indices is None and value in program.graph.inputs and value.aval.ndim > 1


def _product_entry(program: _Program, node: Node, enclosing: Enclosing) -> PlanEntry | None:
    """The entry of a matmul without a parameter; None if it contracts nothing."""
    if node.kind == "dot_general" and not node.eqn.params["dimension_numbers"][0][0]:
        return None
    operands = node.operands[:2]
    if not all(jnp.issubdtype(v.dtype, jnp.floating) for v in operands) or not any(v.is_data for v in operands):
        return None
    paths = [path for path in (_adapter_path(program, value) for value in operands) if path]
    if paths:
        reason = f"an adapter; fp8jax.Rule({paths[0]!r}, recipe) quantizes it"
    elif all(v.is_data for v in operands):
        is_argument = [_is_matrix_argument(program, v) for v in operands]
        reason = _ARGUMENT_REASON if sum(is_argument) == 1 else "both operands are data, as in attention"
    else:
        reason = "no operand is a parameter"
    shape = next((v.shape for v in operands if _adapter_path(program, v)), node.results[0].shape)
    path, count = paths[0] if paths else "", flops(node, enclosing)
    return PlanEntry(path, node.kind, shape, None, reason, node.line(), is_product=True, flops=count)


def _adapter_path(program: _Program, value: Value) -> str:
    """The path of the LoRA factor that a value is, up to layouts and casts; else ""."""
    if not program.call_info.adapter_paths:
        return ""
    value = strip_layout(value)
    while value.enclosing_value is not None:
        value = strip_layout(value.enclosing_value)
    inputs = program.graph.inputs
    return program.call_info.adapter_paths.get(inputs.index(value), "") if value in inputs else ""


def _downstream(program: _Program, value: Value) -> Iterator[tuple[Node, Value]]:
    """The readers of a value, and of values computed from it elementwise, each with the value that it reads."""
    visited, frontier = {value}, [value]
    for _ in range(_MAX_DISTANCE):
        values, frontier = frontier, list[Value]()
        for value in values:
            for reader in program.readers.get(value, ()):
                yield reader, value
                if reader.kind in _BY_ELEMENT and reader.operation is None:
                    frontier += [result for result in reader.results if result not in visited]
        visited.update(frontier)


def _operands(value: Value, kinds: Sequence[str]) -> list[Value]:
    node = value.node
    return node.operands if node is not None and node.operation is None and value.kind in kinds else []


def _ancestors(value: Value, max_depth: int = 10) -> list[Value]:
    """A value and the statistics that it is computed from, down to their sums."""
    return search([value], lambda v: _operands(v, _STATISTICS), max_depth)


def _upstream(value: Value) -> list[Value]:
    """A value and the values that it is computed from, up to matmuls and norms before it."""
    kinds = (*_STATISTICS, *_BY_ELEMENT, "reduce_sum", *_ROOTS)
    return search([value], lambda v: _operands(v, kinds), _MAX_DISTANCE)


def _strip_identities(value: Value) -> Value:
    return strip_layout(value, (*CASTS, *IDENTITY_PRIMITIVES, *RESHAPES))


def _squared_value(value: Value) -> Value | None:
    """The value x if a value is x * x or x ** 2; else None."""
    value = _strip_identities(value)
    node = value.node
    if node is None or node.operation is not None:
        return None
    is_square = node.kind == "square" or (node.kind == "integer_pow" and node.eqn.params["y"] == 2)
    is_self_product = node.kind == "mul" and _strip_identities(node.operands[0]) is _strip_identities(node.operands[1])
    return node.operands[0] if is_square or is_self_product else None
