"""Finds the matmuls of data with parameters, and why others are not quantized."""

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.rewrite import grouped, primitives
from fp8jax.rewrite.call_info import CallInfo
from fp8jax.rewrite.entries import CONVOLUTION_REASON, PlanEntry, WeightMatmul
from fp8jax.rewrite.graph import Graph, ModifiedWeight, Node, Value, find_modified_weight, source_parameters
from fp8jax.rewrite.operations import NON_DOT_OPERATIONS
from fp8jax.rewrite.primitives import CONVOLUTION, GROUPED_CALL, GROUPED_KINDS
from fp8jax.rewrite.rules import LayerChoice, RuleSet
from fp8jax.rewrite.unplanned import flops, is_complete

_MAX_LISTED = 3  # paths listed in a message
_NO_DATA_REASON = "neither operand depends on data"


def find(
    graph: Graph,
    entries: dict[Node, PlanEntry],
    rules: RuleSet,
    call_info: CallInfo,
    enclosing: tuple[tuple[Node, Graph], ...] = (),
) -> Iterator[WeightMatmul]:
    """Yield the matmuls of data with a parameter that may be quantized.

    Args:
        entries: entries of skipped matmuls are added.
        enclosing: the nodes around the program, each with the body, outermost first.
    """
    for node in graph.walk():
        if not node.has_custom_rule:
            for body in node.bodies:
                yield from find(body, entries, rules, call_info, (*enclosing, (node, body)))
        if node.kind not in primitives.PRODUCTS and not node.has_custom_rule and not primitives.is_opaque(node.eqn):
            continue
        floats = [jnp.issubdtype(value.dtype, jnp.floating) for value in node.operands[:2]]
        sides = [i for i, value in enumerate(node.operands[:2]) if value.weight is not None and floats[i]]
        if len(sides) == 2:  # a gathered parameter is data
            sides = [i for i in sides if not node.operands[i].is_data] or sides
        reason = _skip_reason(node, sides, graph.outer_scope)
        if reason is None:
            matrix = node.operands[sides[0]]
            assert matrix.weight is not None
            path, *aliases = call_info.layer_paths(matrix.weight.path)
            yield WeightMatmul(graph, node, sides[0], matrix, matrix.weight, path, tuple(aliases), enclosing)
        elif reason:
            entries[node] = _skipped_entry(node, sides, reason, rules, call_info, enclosing)


def choose(p: WeightMatmul, rules: RuleSet, call_info: CallInfo, heads: dict[str, str]) -> LayerChoice:
    """The rules' choice for a matmul, equal for all parameters that are concatenated into its matrix.

    Raises:
        ValueError: the rules treat these parameters differently.
    """
    choice = rules.choose(p.path, heads, p.aliases)
    if not p.weight.further_paths:
        return choice
    further_layers = [call_info.layer_paths(path) for path in p.weight.further_paths]
    p.concatenated = tuple(dict.fromkeys(path for path, *_ in further_layers))
    first_choice = rules.choose(p.path, aliases=p.aliases)
    for path, *also in further_layers:
        choice_of_path = rules.choose(path, aliases=also)
        if (choice_of_path.linear, choice_of_path.context) != (first_choice.linear, first_choice.context):
            raise ValueError(
                f"{p.path} and {path} are concatenated or stacked into one matrix at {p.node.line()}, which has one "
                f"recipe, and the rules differ: {p.path} by {first_choice.reason}, {path} by {choice_of_path.reason}. "
                "Use the same rule for both"
            )
    return dataclasses.replace(choice, reason=f"{choice.reason}; concatenated with {path_list(p.concatenated)}")


def path_list(paths: tuple[str, ...]) -> str:
    """Paths as text, with a count of those after the first `_MAX_LISTED`."""
    more = f" and {len(paths) - _MAX_LISTED} more" if len(paths) > _MAX_LISTED else ""
    return ", ".join(paths[:_MAX_LISTED]) + more


def reject_unsupported_precision(products: Sequence[WeightMatmul]) -> str:
    """Deselect matmuls that request a precision; return the error to raise at a run, or ""."""
    rejected: list[tuple[WeightMatmul, Any]] = []
    for p in products:
        precision = p.node.eqn.params.get("precision")
        precisions = precision if isinstance(precision, tuple) else (precision,)
        if p.is_quantized and any(x not in (None, lax.Precision.DEFAULT) for x in precisions):
            rejected.append((p, precision))
            p.is_unsupported = True
            p.choice = LayerChoice(None, f"asks for precision {precision}, which a quantized matmul does not support")
    if not rejected:
        return ""
    default = jax.config.jax_default_matmul_precision
    unset = f" and leave jax_default_matmul_precision, which is {default!r}, unset" if default else ""
    paths = list(dict.fromkeys(p.path for p, _ in rejected))
    # Layers that differ in numbers alone share a pattern.
    patterns = paths if len(paths) < 5 else list(dict.fromkeys(re.sub(r"\d+", r"\\d+", path) for path in paths))
    rule = f"fp8jax.Rule({'|'.join(patterns)!r}, None)"
    if len(rejected) == 1:
        ((p, precision),) = rejected
        return (
            f"{p.path} asks for precision {precision}, which a quantized matmul does not support, at "
            f"{p.node.line()}; set its precision to None{unset}, or exclude it with a rule: [{rule}, recipe]"
        )
    groups = collections.defaultdict[tuple[str, str], dict[str, None]](dict)
    for p, precision in rejected:
        groups[p.node.line(), str(precision)][p.path] = None
    verb = {True: "asks", False: "ask"}
    lines = [
        f"{', '.join(group_paths)} {verb[len(group_paths) == 1]} for precision {precision_name}, at {line}"
        for (line, precision_name), group_paths in groups.items()
    ]
    return (
        f"{len(rejected)} matmuls ask for a precision that a quantized matmul does not support: {'; '.join(lines)}. "
        f"Set their precision to None{unset}, or exclude them with a rule: [{rule}, recipe]"
    )


def _skipped_entry(
    node: Node,
    sides: list[int],
    reason: str,
    rules: RuleSet,
    call_info: CallInfo,
    enclosing: tuple[tuple[Node, Graph], ...],
) -> PlanEntry:
    """The plan entry of a matmul that is not quantized."""
    weights = [value.weight for value in node.operands if value.weight is not None]
    non_data = [i for i, value in enumerate(node.operands[:2]) if not value.is_data]
    candidates = [*sides, *non_data]
    if reason == _NO_DATA_REASON:  # the layer is the last parameter that is not broadcast, as learned queries are
        candidates = sorted(reversed(sides), key=lambda i: _is_broadcast(node.operands[i]))
        weights = [w for i in candidates if (w := node.operands[i].weight) is not None]
    matrix = next((node.operands[i] for i in candidates), node.results[0])
    modified = None if weights else _modified_weight(node.operands[:2])
    source_paths = [w.path for w in weights] or [*source_parameters(matrix)] if modified is None else [modified.path]
    paths = [call_info.layer_paths(path) for path in source_paths]
    # A rule may exclude the parameters that its matrix is computed from, such as an embedding's.
    linears = [rules.choose(path, aliases=also).linear for path, *also in paths]
    is_requested = (
        all(linear is not None for linear in linears)
        and (bool(linears) or rules.has_default)
        and node.kind != CONVOLUTION
        and not is_complete(node)
        and reason != _NO_DATA_REASON  # a regularizer, or a product of factors, is no layer
    )
    is_grouped_candidate = (
        node.has_custom_rule
        or primitives.is_opaque(node.eqn)
        or node.kind in GROUPED_KINDS
        or (modified is not None and modified.is_gathered)
    )
    return PlanEntry(
        paths[0][0] if weights or modified is not None else "",
        node.kind,
        matrix.shape,
        None,
        reason,
        node.line(),
        is_product=True,
        flops=flops(node, enclosing),
        is_unsupported=is_requested,
        is_grouped_candidate=is_grouped_candidate,
        source_layers=tuple(path for path, *_ in paths),
    )


def _is_broadcast(value: Value) -> bool:
    """Whether a parameter has more elements where it is read than where it is stored."""
    return value.weight is not None and value.aval.size != value.weight.stored.aval.size


def _skip_reason(node: Node, sides: list[int], outer_scope: str) -> str | None:
    """The reason why a matmul is not quantized; None if it may be, "" if there is nothing to report."""
    is_data = [value.is_data for value in node.operands[:2]]
    matrices = [v for v in node.operands if v.weight is not None and v.aval.ndim > 1]
    if node.kind == "dot_general" and not node.eqn.params["dimension_numbers"][0][0]:
        return "contracts nothing" if matrices else ""
    if node.kind != GROUPED_CALL and (node.has_custom_rule or primitives.is_opaque(node.eqn)):
        why = "has a custom derivative" if node.has_custom_rule else "is not supported"
        name = grouped.function_name(node)
        hint = f"; fp8jax.GroupedProduct({name!r}) among the rules quantizes it if it is a grouped product"
        return f"inside {node.kind}, which {why}{hint if name else ''}" if matrices else ""
    wrong_dtypes = [
        v.dtype for v in node.operands[:2] if v.weight is not None and not jnp.issubdtype(v.dtype, jnp.floating)
    ]
    if wrong_dtypes and not sides:
        return f"its parameter is {wrong_dtypes[0]}"
    is_differentiated = primitives.is_differentiated(f"{outer_scope}/{node.scope}")
    if len(sides) != 1 or not is_data[1 - sides[0]]:
        reason = _reason_without_parameter(node.operands[:2])
        return "" if reason == _NO_DATA_REASON and is_differentiated else reason
    if sides[0] == 0 and _is_whole_argument(node.operands[0]) and node.operands[1].is_closure_data:
        return (
            "the parameter is a single array, like a batch, and is multiplied by a matrix that the function closes over"
        )
    if is_differentiated:
        return f"{primitives.DIFFERENTIATED_REASON}; pass the differentiated function to fp8jax.transform"
    if node.kind != "dot_general" and not (
        node.kind in NON_DOT_OPERATIONS and NON_DOT_OPERATIONS[node.kind].supports(node, sides[0])
    ):
        if node.kind in NON_DOT_OPERATIONS:
            return f"this form of {node.kind} is not supported"
        return CONVOLUTION_REASON if node.kind == CONVOLUTION else f"{node.kind} is not supported"
    if not jnp.issubdtype(node.operands[1 - sides[0]].dtype, jnp.floating):
        return f"its data are {node.operands[1 - sides[0]].dtype}"
    return None


def _is_whole_argument(value: Value) -> bool:
    """Whether the argument with parameters is a single array: it may be a batch by mistake."""
    return value.weight is not None and not value.weight.path


def _reason_without_parameter(operands: list[Value]) -> str:
    """The reason why a matmul is not one of data with a parameter; "" for data times data."""
    if len(operands) == 2 and operands[0].is_data != operands[1].is_data:
        found = source_parameters(next(value for value in operands if not value.is_data))
        frozen = " and ".join(dict.fromkeys(str(stands) for stands in found.values() if stands is not None))
        source_names = " and ".join(found) or "constants"
        return (
            "data are multiplied by a value computed from "
            f"{source_names}{f', {frozen}: 16-bit values' if frozen else ''}"
        )
    if not any(value.is_data for value in operands) and any(value.weight is not None for value in operands):
        return _NO_DATA_REASON
    modified = _modified_weight(operands)
    return "" if modified is None else f"data modify or select the matrix {modified.path}"


def _modified_weight(operands: Sequence[Value]) -> ModifiedWeight | None:
    """The parameter of the one operand that data have changed or gathered; None if there is none, or if both are."""
    found = [m for v in operands if v.is_data and (m := find_modified_weight(v)) is not None]
    return found[0] if len(found) == 1 else None
