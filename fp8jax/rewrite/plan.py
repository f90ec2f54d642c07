"""Plans: which products of a program a recipe takes, and the norms and activations before and between them."""

import collections
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from fp8jax.core.recipe import Linear
from fp8jax.rewrite import activations, biases, held, joins, norms, primitives, weighing
from fp8jax.rewrite.caller import Caller
from fp8jax.rewrite.entries import Entry, ReadWeight
from fp8jax.rewrite.graph import (
    Graph,
    Node,
    Replacement,
    Value,
    before,
    in_order,
    origin_of,
    readers,
)
from fp8jax.rewrite.heads import NARROW, NARROWEST, OUTPUT, Flow, outputs
from fp8jax.rewrite.held import HeldOperation
from fp8jax.rewrite.kept import keeps
from fp8jax.rewrite.kept_bytes import kept_bytes
from fp8jax.rewrite.operations import OTHERS, ActivationOperation, LayoutStep, NormOperation, ProductOperation
from fp8jax.rewrite.primitives import CASTS, LAYOUTS, MARKS, PARTS, RESHAPES
from fp8jax.rewrite.probes import FUNCTIONS
from fp8jax.rewrite.products import choose, find, path_list, refuse
from fp8jax.rewrite.rules import LayerChoice, Ordered, between
from fp8jax.rewrite.shares import UnquantizedShare, flops, share
from fp8jax.rewrite.states import Use, levels_of, scaling_names

_UNKNOWN = LayerChoice(None, "")
# Layers by their paths, each with the other paths that rules may match.
Also = dict[str, tuple[str, ...]]


class ProgramPlan(NamedTuple):
    """The plan of a program.

    Attributes:
        entries: what became of each part, in the program's order.
        uses: the products with one parameter, with their recipes.
        refused: the error of a run: which products ask for a precision that a quantized one cannot give; "" of none.
        share: what stays in 16 bits although the rules ask for 8.
    """

    entries: dict[Node, Entry]
    uses: dict[Use, Linear]
    refused: str
    share: UnquantizedShare


def plan(
    graph: Graph,
    rules: Ordered,
    caller: Caller = Caller(),  # noqa: B008
) -> ProgramPlan:
    """Puts operations of the rules' recipes into a graph.

    Args:
        graph: of a program.
        rules: which recipe is whose.
        caller: of the program.

    Raises:
        ValueError: a rule matches nothing, nothing is left to quantize, or a product with batch axes or of several
            parameters is to have a scaling that observes its operands.
    """
    entries: dict[Node, Entry] = {}
    read = list(find(graph, entries, rules, caller))
    flow = Flow(graph, {p.node for p in read}, caller.results, caller.arguments)
    reasons = flow.heads() if rules.default else {}
    # Who reads a layer's result on in another place wants that as all others.
    inner = {p.path for p in read if p.node not in reasons}
    heads = {p.path: reasons[p.node] for p in read if p.node in reasons}
    heads = {path: why for path, why in heads.items() if why != OUTPUT or path not in inner}
    narrow = _narrow(read, heads) if rules.default else set[Node]()
    for p in read:
        p.choice = choose(p, rules, caller, {p.path: NARROW} | heads if p.node in narrow else heads)
    refused = refuse(read)
    for p in read:
        shape, reason = p.weight.stored.shape, p.choice.reason
        again = any(primitives.computes_again(node.eqn) for node, _ in p.around)
        how: dict[str, Any] = {"product": True, "again": again, "concatenated": p.concatenated}
        how |= {"flops": flops(p.node, p.around), "unsupported": p.refused}
        entries[p.node] = Entry(p.path, p.node.kind, shape, p.choice, reason, p.node.line(), **how)
    places = list(graph.everywhere())
    normed = _replace_all(graph, read, rules, entries, caller)
    others = _unread(graph, caller) | normed
    if caller.whole and not read and not others:
        raise ValueError(
            f"the function has no product of data with a parameter that a recipe could take{_left(entries)}"
        )
    if caller.checks:
        also = others | {p.path: p.others for p in read}
        also |= {path: tuple(rest) for p in read for path, *rest in map(caller.paths, p.weight.further_paths)}
        sources = [path for entry in entries.values() for path in entry.sources]
        left = {p.path for p in read if p.node in narrow} - {p.path for p in read if p.node not in narrow}
        left_out = dict.fromkeys(left, NARROW) | heads
        rules.check_all_used(also, left_out, unknown=_left(entries), also=also, sources=sources)
    for node, size in kept_bytes(graph, entries):
        entries[node] = entries[node]._replace(bytes=size)
    found = {node: entries[node] for node in places if node in entries}
    return ProgramPlan(found, _uses(read), refused, share(graph, found, caller))


def _narrow(products: list[ReadWeight], heads: Mapping[str, str]) -> set[Node]:
    """Products with few outputs; none where no other would be left, in a function that is a part or a toy."""
    narrow = {p.node for p in products if outputs(p.node, p.side) < NARROWEST}
    return narrow if any(p.node not in narrow and p.path not in heads for p in products) else set()


def _uses(products: list[ReadWeight]) -> dict[Use, Linear]:
    """Numbers the products of each parameter, each of which may have a state or be given its weight in codes."""
    uses: dict[Use, Linear] = {}
    counts: collections.Counter[str] = collections.Counter()
    for p in products:
        operation = (p.place or p.node).operation
        linear, path = p.choice.linear, p.weight.path
        if operation is None or linear is None or isinstance(operation, (HeldOperation, joins.JoinedOperation)):
            continue
        if p.concatenated:
            if any(scaling.observes for scaling in linear.states.values()):
                raise ValueError(
                    f"{path_list((p.path, *p.concatenated))} are concatenated or stacked into "
                    f"one matrix, at {p.node.line()}, and {scaling_names(linear)} scaling keeps a state for each "
                    "parameter. Put them together outside of the function, or take a recipe with current scaling, "
                    "as te_current"
                )
            continue
        if not isinstance(operation, ProductOperation) or any(p.node.eqn.params["dimension_numbers"][1]):
            if any(scaling.observes for scaling in linear.states.values()):
                raise ValueError(
                    f"{p.path} has batch axes or groups, at {p.node.line()}: under {scaling_names(linear)} scaling a "
                    f"product has one state. Leave it out, [fp8jax.Rule({p.path!r}, None), recipe], or take a recipe "
                    "with current scaling"
                )
            continue
        operation.use = Use(path, counts[path], levels_of(p.around, p.weight.stored))
        counts[path] += 1
        uses[operation.use] = linear
    return uses


def _left(entries: dict[Node, Entry]) -> str:
    """What to say of products that are left as written, in an error."""
    left = [f"{e.path or e.kind} ({e.reason}) at {e.line}" for e in entries.values() if e.choice is None]
    return f"; left as written: {'; '.join(left[:6])}" if left else ""


def _unread(graph: Graph, caller: Caller) -> Also:
    """The paths of layers of a module that other methods than this one read."""
    read = {value for node in graph.everywhere() for value in node.operands} if caller.modules else set()
    weights = [v.weight for v in graph.inputs if caller.modules and v.weight is not None and v not in read]
    each = [caller.paths(w.path) for w in weights if w.path.endswith("kernel") and w.stored.aval.ndim > 1]
    return {path: tuple(others) for path, *others in each}


def _replace_all(
    graph: Graph, products: list[ReadWeight], rules: Ordered, entries: dict[Node, Entry], caller: Caller
) -> Also:
    """Puts operations in place of products, and of what stands before them; the paths of norms with a choice."""
    groups: dict[tuple[Graph, Value], list[ReadWeight]] = {}
    for p in products:
        groups.setdefault((p.graph, before(p.data, (*MARKS, *RESHAPES), in_order)), []).append(p)
    counts, normed = readers(graph), Also()
    # The node that reads a value, for each that is read once.
    alone = {
        inner: {v: node for node in inner.all() for v in node.operands if counts.get(v) == 1}
        for inner in {p.graph for p in products}
    }
    for (graph_of, root), group in groups.items():
        made = _made(root, counts)
        asked = weighing.choose(made, group, entries, alone[graph_of])
        if rules.between and (not asked or any(p.taken for p in group)):
            normed |= _replace_before(made, group, rules, entries, caller)
        weighing.tell(made, group, entries, alone[graph_of])
        for p in group:
            if p.weight.held is not None:
                entries[p.node] = _replace_held(p, entries[p.node])
            elif p.taken:
                entry = entries.pop(p.node)._replace(kept=_replace_product(p, alone[p.graph]))
                if (told := getattr(p.node.operation, "told", "")) and p.place is None:
                    entry = entry._replace(reason=f"{entry.reason}; {told}")
                entries[p.place or p.node] = entry
    for (graph_of, _), group in groups.items():
        if any(p.taken and p.choice.linear.joins for p in group):  # type: ignore[union-attr]
            joins.join(graph_of, group, entries)
    if not products and caller.names is not None and rules.between:
        # A norm that is called by itself: what reads it is not here.
        for value in graph.outputs[: caller.results]:
            normed |= _replace_before(_made(value, counts), [], rules, entries, caller)
    return normed


def _made(value: Value, counts: dict[Value, int]) -> Value:
    """What made an array that products read, up to marks and layouts, in this program or in one around it; a cast to
    fewer bits that ends a norm or an activation is part of it where nothing else reads what it casts."""
    while value.outer is not None and value.once:
        value = value.outer
    while value.node is not None and value.node.operation is None:
        kind, source = value.kind, (value.node.operands or [value])[0]
        narrows = kind in CASTS and value.dtype.itemsize < source.dtype.itemsize
        last = narrows and counts.get(source, 0) < 2 and source.kind in FUNCTIONS
        if last or not (kind in (*CASTS, *MARKS) or (kind in RESHAPES and in_order(value.node))):
            return value
        barrier = kind == "optimization_barrier"
        value = value.node.operands[value.node.results.index(value)] if barrier else source
        while value.outer is not None and value.once:
            value = value.outer
    return value


def _made_of(p: ReadWeight) -> tuple[Value, tuple[LayoutStep, ...]]:
    """The parameter that a product quantizes, and what is done to it before; or what is read, if that is more."""
    if p.read_as_stored:
        return p.weight.stored, tuple(LayoutStep(node, 0) for node in p.weight.layout)
    value, steps = p.node.operands[p.side], list[LayoutStep]()
    while value is not p.weight.stored:
        node = value.node
        if node is None or node.kind not in (*LAYOUTS, *PARTS) or node.kind == "optimization_barrier":
            return p.node.operands[p.side], ()
        steps.append(LayoutStep(node, node.results.index(value)))
        value = node.operands[0]
    return value, tuple(reversed(steps))


def _replace_product(p: ReadWeight, alone: Mapping[Value, Node]) -> bool:
    """Puts the recipe's product in place of one and of the sum with its bias; whether what it reads is kept anyway.

    `alone` has the only readers of values.
    """
    linear = p.choice.linear
    assert linear is not None
    if p.node.kind in OTHERS:
        OTHERS[p.node.kind].put(p)
        return False
    # What a scaling observes of the data is that of their codes, which are kept then.
    kept = _kept(p) if p.choice.context.saved is not None and "x" not in linear.states else None
    w, layout = _made_of(p)
    contract, batch = p.node.eqn.params["dimension_numbers"]
    outputs, bias = p.node.operands[p.side].aval.ndim - len(contract[p.side]), None
    # Of a parameter on the left, as `jax.vmap` makes of `w @ x`, the transposition that follows is part of the product.
    made = p.node if p.side == 1 or batch[0] else _turned(p.node, outputs, alone) or p.node
    turned = made is not p.node
    if (p.side == 1 or turned) and not batch[0]:
        bias = biases.find(made, outputs, alone.get(made.results[0]))
    node = made if bias is None else bias.sum
    value = None if bias is None else bias.value
    data, params = p.data, p.node.eqn.params
    how: dict[str, Any] = {"params": params, "bias": value, "turned": turned}
    if outputs == 1 and (p.side == 1 or turned) and not batch[0] and (cut := _cut(node, alone)) is not None:
        node, how["widths"] = cut
    operation = ProductOperation(p.choice.recipe, data, w, layout, p.side, origin_of(data), kept, **how)
    others = [operand for step in layout for operand in step.node.operands[1:]]
    node.operation, p.place = operation, node
    node.operands = [kept or data, w, *others, *([] if value is None else [value])]
    return kept is not None


def _turned(node: Node, outputs: int, alone: Mapping[Value, Node]) -> Node | None:
    """What puts the outputs of a product, its first axes, behind all others, and alone reads it; or None."""
    reader, rank = alone.get(node.results[0]), node.results[0].aval.ndim
    if reader is None or reader.kind != "transpose" or reader.operation is not None:
        return None
    behind = (*range(outputs, rank), *range(outputs))
    return reader if tuple(reader.eqn.params["permutation"]) == behind else None


def _cut(node: Node, alone: Mapping[Value, Node]) -> tuple[Node, tuple[int, ...]] | None:
    """What cuts a result along its last axis, and alone reads it, as q, k and v of one product; and the widths."""
    (result,) = node.results
    reader = alone.get(result)
    if reader is None or reader.kind != "split" or reader.operation is not None:
        return None
    reader.scope = node.scope  # of the product, for messages
    params = reader.eqn.params
    return (reader, tuple(params["sizes"])) if params["axis"] == result.aval.ndim - 1 else None


def _replace_held(p: ReadWeight, entry: Entry) -> Entry:
    """Puts the product with what is held in place of one, or says that it reads the values."""
    if not held.replace(p.node, p.side, p.weight, p.choice.linear, p.path, origin_of(p.data)):
        asked = p.taken
        p.choice = LayerChoice(None, f"{p.weight.held}, but not read as (inputs, outputs): values of 16 bits")
        return entry._replace(choice=p.choice, reason=p.choice.reason, unsupported=asked)
    return entry._replace(reason=f"{entry.reason}; {p.weight.held}", held=p.weight.held)


def _replace_before(
    value: Value, group: list[ReadWeight], rules: Ordered, entries: dict[Node, Entry], caller: Caller
) -> Also:
    """Puts an operation in place of the norm or activation that products read, if that is one; the norm's path."""
    normed = Also()
    node = value.node
    if node is not None and isinstance(node.operation, (NormOperation, ActivationOperation)):
        for p in group:
            entries[p.node] = entries[p.node]._replace(reads=entries[node].kind)
    if node is None or node.operation is not None:
        return normed
    choices = [p.choice for p in group if p.choice.linear is not None] or [p.choice for p in group]
    readers_choice = choices[0] if choices else _UNKNOWN
    read, kind = " and ".join(dict.fromkeys(p.path for p in group)), ""
    choice, path, operands = readers_choice, read, list[Value]()
    operation: Replacement | None = None
    if (norm := norms.find(value)) is not None:
        kind = "LayerNorm" if norm.centered else "RMSNorm"
        own = [v.weight.path for v in (before(v) for v in norm.scales) if v.weight is not None]
        if own:
            path, *also = caller.paths(own[0])
            choice = rules.choice(path, also=also)
            normed[path] = tuple(also)
        operands = [norm.x, *norm.scales, *([] if norm.bias is None else [norm.bias])]
        operation = NormOperation(choice.recipe, *norm)
    elif between(choice.recipe) and (activation := activations.find(value)) is not None:
        name, gate, up = activation
        kind = f"{name}(gate){'' if up is None else ' * up'}"
        operands = [gate, *([] if up is None else [up])]
        made_by = (None if v is None or v.node is None else v.node.operation for v in (gate, up))
        biased = any(isinstance(o, ProductOperation) and o.bias is not None for o in made_by)
        operation = ActivationOperation(choice.recipe, name, gate, up, biased)
    if kind and choice.linear is None and rules.contexts:
        entries[node] = Entry(path, kind, value.shape, choice, choice.reason, node.line())
    if not kind or not between(choice.recipe):
        return normed
    others = tuple(dict.fromkeys((p.path, str(p.data.dtype)) for p in group if not p.saves))
    alone = not any(p.saves for p in group)
    entries[node] = Entry(path, kind, value.shape, choice, choice.reason, node.line(), readers=others, alone=alone)
    node.operation, node.operands = operation, operands
    for p in group:
        entries[p.node] = entries[p.node]._replace(reads=kind)
    return normed


def _kept(p: ReadWeight) -> Value | None:
    """What a product reads, if what made it keeps it for its own backward pass, as flash attention does."""
    contract, batch = p.node.eqn.params["dimension_numbers"]
    value, n = before(p.data, (*MARKS, *RESHAPES), in_order), len(contract[0])
    last = tuple(contract[0]) == tuple(range(p.data.aval.ndim - n, p.data.aval.ndim))
    plain = p.side == 1 and not batch[0] and last and tuple(contract[1]) == tuple(range(n))
    inputs = math.prod(p.data.shape[p.data.aval.ndim - n :])
    whole = value.shape[-1:] == (inputs,) or math.prod(value.shape[-2:]) == inputs
    direct = not p.weight.layout and p.weight.stored.aval.ndim == n + 1 and value.dtype == p.data.dtype
    if not (plain and whole and direct and value.kind == "custom_vjp_call") or value.node is None:
        return None
    return value if keeps(value.node, value) else None
