"""Products of data with parameters in a program, and why others are left as written."""

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.rewrite import primitives
from fp8jax.rewrite.caller import Caller
from fp8jax.rewrite.entries import Entry, ReadWeight
from fp8jax.rewrite.graph import Graph, Node, Value, changed_by_data, computed_from
from fp8jax.rewrite.operations import OTHERS
from fp8jax.rewrite.rules import LayerChoice, Ordered
from fp8jax.rewrite.shares import flops, is_complete

_MOST_NAMED = 3  # further parameters of a concatenation


def find(
    graph: Graph,
    entries: dict[Node, Entry],
    rules: Ordered,
    caller: Caller,
    around: tuple[tuple[Node, Graph], ...] = (),
) -> Iterator[ReadWeight]:
    """The products of data with a parameter that may be quantized; notes the others.

    Args:
        graph: of a program.
        entries: what is left as written is added.
        rules: which recipe is whose.
        caller: of the program.
        around: the nodes that the program stands in, each with the body, outermost first.
    """
    for node in graph.all():
        if not node.sealed:
            for body in node.bodies:
                yield from find(body, entries, rules, caller, (*around, (node, body)))
        if node.kind not in primitives.PRODUCTS and not node.sealed and not primitives.unread(node.eqn):
            continue
        floats = [jnp.issubdtype(value.dtype, jnp.floating) for value in node.operands[:2]]
        sides = [i for i, value in enumerate(node.operands[:2]) if value.weight is not None and floats[i]]
        if len(sides) == 2:  # a part of a parameter that data pick is data beside another parameter
            sides = [i for i in sides if not node.operands[i].data] or sides
        why = _why_not(node, sides, graph.around)
        if why is None:
            weight = node.operands[sides[0]].weight
            assert weight is not None
            path, *others = caller.paths(weight.path)
            yield ReadWeight(graph, node, sides[0], weight, path, tuple(others), around)
        elif why:
            entries[node] = _left(node, sides, why, rules, caller, around)


def choose(p: ReadWeight, rules: Ordered, caller: Caller, heads: dict[str, str]) -> LayerChoice:
    """The choice of the rules for a product, the same for all parameters that are concatenated in its matrix.

    Raises:
        ValueError: the rules treat these parameters differently.
    """
    choice = rules.choice(p.path, heads, p.others)
    if not p.weight.further_paths:
        return choice
    others = [caller.paths(path) for path in p.weight.further_paths]
    p.concatenated = tuple(dict.fromkeys(path for path, *_ in others))
    first = rules.choice(p.path, also=p.others)
    for path, *also in others:
        other = rules.choice(path, also=also)
        if (other.linear, other.context) != (first.linear, first.context):
            raise ValueError(
                f"{p.path} and {path} are concatenated or stacked into one matrix at {p.node.line()}, which has one "
                f"recipe, and the rules differ: {p.path} by {first.reason}, {path} by {other.reason}. "
                "Give both the same rule"
            )
    return dataclasses.replace(choice, reason=f"{choice.reason}; concatenated with {path_list(p.concatenated)}")


def path_list(paths: tuple[str, ...], most: int = _MOST_NAMED) -> str:
    """Paths in a sentence."""
    return ", ".join(paths[:most]) + (f" and {len(paths) - most} more" if len(paths) > most else "")


def refuse(products: Sequence[ReadWeight]) -> str:
    """Leaves products as written that ask for a precision; returns the error of a run, or "".

    Args:
        products: those of a program, with their choices.
    """
    refused: list[tuple[ReadWeight, Any]] = []
    for p in products:
        asked = p.node.eqn.params["precision"]
        each = asked if isinstance(asked, tuple) else (asked,)
        if p.taken and any(x not in (None, lax.Precision.DEFAULT) for x in each):
            refused.append((p, asked))
            p.refused = True
            p.choice = LayerChoice(None, f"asks for precision {asked}, which a quantized product cannot give")
    if not refused:
        return ""
    default = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    unset = f" and leave jax_default_matmul_precision, which is {default!r}, unset" if default else ""
    paths = list(dict.fromkeys(p.path for p, _ in refused))
    # Of many layers one pattern for each number in their paths.
    patterns = paths if len(paths) < 5 else list(dict.fromkeys(re.sub(r"\d+", r"\\d+", path) for path in paths))
    rule = f"fp8jax.Rule({'|'.join(patterns)!r}, None)"
    if len(refused) == 1:
        ((p, asked),) = refused
        return (
            f"{p.path} asks for precision {asked}, which a quantized product cannot give, at {p.node.line()}; set "
            f"its precision to None{unset}, or leave it out with a rule: [{rule}, recipe]"
        )
    groups = collections.defaultdict[tuple[str, str], dict[str, None]](dict)
    for p, asked in refused:
        groups[p.node.line(), str(asked)][p.path] = None
    verb = {True: "asks", False: "ask"}
    lines = [
        f"{', '.join(of)} {verb[len(of) == 1]} for precision {asked}, at {line}" for (line, asked), of in groups.items()
    ]
    return (
        f"{len(refused)} products ask for a precision that a quantized product cannot give: {'; '.join(lines)}. Set "
        f"their precision to None{unset}, or leave them out with a rule: [{rule}, recipe]"
    )


def _left(
    node: Node,
    sides: list[int],
    why: str,
    rules: Ordered,
    caller: Caller,
    around: tuple[tuple[Node, Graph], ...],
) -> Entry:
    """The reason that `explain` gives for a product that is left as written."""
    weights = [value.weight for value in node.operands if value.weight is not None]
    fixed = [i for i, value in enumerate(node.operands[:2]) if not value.data]
    matrix = next((node.operands[i] for i in (*sides, *fixed)), node.results[0])
    paths = [caller.paths(path) for path in ([w.path for w in weights] or [*computed_from(matrix)])]
    # A rule may leave the parameters alone that it is computed from, as one of an embedding or a head does.
    chosen = [rules.choice(path, also=also).linear for path, *also in paths]
    asked = all(linear is not None for linear in chosen) and (bool(chosen) or rules.default) and not is_complete(node)
    path = paths[0][0] if weights else ""
    entry = Entry(path, node.kind, matrix.shape, None, why, node.line(), product=True)
    return entry._replace(flops=flops(node, around), unsupported=asked, sources=tuple(path for path, *_ in paths))


def _why_not(node: Node, sides: list[int], around: str) -> str | None:
    """Why a product is left as written; None where it need not be, "" where there is nothing to say."""
    data = [value.data for value in node.operands[:2]]
    matrices = [v for v in node.operands if v.weight is not None and v.aval.ndim > 1]
    if node.kind == "dot_general" and not node.eqn.params["dimension_numbers"][0][0]:
        return "contracts nothing" if matrices else ""
    if node.sealed or primitives.unread(node.eqn):
        why = "has a derivative of its own" if node.sealed else "is not read"
        return f"inside {node.kind}, which {why}" if matrices else ""
    typed = [v.dtype for v in node.operands[:2] if v.weight is not None and not jnp.issubdtype(v.dtype, jnp.floating)]
    if typed and not sides:
        return f"its parameter is {typed[0]}"
    if len(sides) != 1 or not data[1 - sides[0]]:
        return _unnamed(node.operands[:2])
    if sides[0] == 0 and _is_batch(node.operands[0]) and node.operands[1].fixed:
        return "the parameter is one array, as a batch is, and meets a matrix that the function closes over"
    if primitives.differentiated(f"{around}/{node.scope}"):
        return "part of a gradient that the function takes itself; give that gradient's function to fp8jax.transform"
    if node.kind != "dot_general" and not (node.kind in OTHERS and OTHERS[node.kind].takes(node, sides[0])):
        return f"fp8jax has no {node.kind}{' of this form' if node.kind in OTHERS else ''}"
    if not jnp.issubdtype(node.operands[1 - sides[0]].dtype, jnp.floating):
        return f"its data are {node.operands[1 - sides[0]].dtype}"
    return None


def _is_batch(value: Value) -> bool:
    """Whether the argument with parameters is one array, of which a value is part: it may be a batch by mistake."""
    return value.weight is not None and not value.weight.path


def _unnamed(operands: list[Value]) -> str:
    """The reason why a product has no parameter that a rule could name; "" for a product of data with data."""
    if len(operands) == 2 and operands[0].data != operands[1].data:
        found = computed_from(next(value for value in operands if not value.data))
        held = " and ".join(dict.fromkeys(str(stands) for stands in found.values() if stands is not None))
        of = " and ".join(found) or "constants"
        return f"data meet what is computed from {of}{f', {held}: values of 16 bits' if held else ''}"
    changed = [path for v in operands if v.data and (path := changed_by_data(v)) is not None]
    return f"data change or pick the matrix {changed[0]}" if len(changed) == 1 else ""
