"""The share of a program's FLOPs that stays in 16 bits although its rules ask for 8."""

import collections
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from fp8jax.rewrite import primitives
from fp8jax.rewrite.call_info import CallInfo
from fp8jax.rewrite.entries import PlanEntry
from fp8jax.rewrite.graph import Graph, Node
from fp8jax.rewrite.heads import Flow

_MAX_LISTED = 3  # reasons in a message
_MAX_FRACTION = 0.1


class UnquantizedWarning(UserWarning):
    """More than a tenth of a model's FLOPs stay in 16 bits, although the rules ask for 8."""


class UnquantizedShare(NamedTuple):
    """The matmuls that stay in 16 bits although the rules ask for 8.

    Attributes:
        fraction: their share of the FLOPs of all matmuls with parameters in a forward pass. Output heads, embeddings,
            routers and matmuls that a rule excludes are not counted.
        text: the fraction and the reasons, as a sentence; "" if there are none.
    """

    fraction: float = 0.0
    text: str = ""

    @property
    def is_notable(self) -> bool:
        """Whether it is above a tenth."""
        return self.fraction > _MAX_FRACTION


def flops(node: Node, enclosing: Iterable[tuple[Node, Graph]]) -> float:
    """The FLOPs of a matmul in a forward pass, over all iterations of the scans around it; 0 if unknown.

    A custom derivative has those of the matmuls in it.
    """
    num_runs = math.prod(outer.eqn.params["length"] for outer, _ in enclosing if outer.kind == "scan")
    return 2 * num_runs * _node_flops(node)


def _node_flops(node: Node) -> float:
    if node.bodies:
        length = node.eqn.params["length"] if node.kind == "scan" else 1
        return length * sum(_node_flops(inner) for body in node.bodies for inner in body.walk())
    if node.kind not in primitives.PRODUCTS or len(node.operands) < 2:
        return 0
    left, right, result = node.operands[0].shape, node.operands[1].shape, node.results[0].shape
    if not all(isinstance(n, int) for n in (*left, *right, *result)):
        return 0
    numbers = node.eqn.params.get("dimension_numbers")
    if node.kind == "dot_general":
        return math.prod(result) * math.prod(left[i] for i in numbers[0][0])
    if node.kind == "conv_general_dilated":
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
    lost = sum(entry.flops for entry in entries)
    if not lost:
        return UnquantizedShare()
    groups = collections.defaultdict[str, list[PlanEntry]](list)
    for entry in sorted(entries, key=lambda entry: -entry.flops):
        groups[entry.reason].append(entry)
    notes = [f"{_count_note(group)} ({reason}; {group[0].line})" for reason, group in groups.items()]
    rest = f"; and {len(notes) - _MAX_LISTED} other reasons" if len(notes) > _MAX_LISTED else ""
    fraction = lost / (lost + quantized_flops)
    figure = f"{100 * fraction:.2g} %" if fraction < 1 else "all"
    head = f"{figure} of the FLOPs in products with parameters stay in 16 bits, although the rules ask for 8"
    return UnquantizedShare(fraction, f"{head}: {'; '.join(notes[:_MAX_LISTED])}{rest}")


def _count_note(group: Sequence[PlanEntry]) -> str:
    paths = list(dict.fromkeys(entry.path for entry in group if entry.path))
    count = f"{len(group)} product{'s' if len(group) > 1 else ''}"
    more = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
    return f"{count} of {', '.join(paths[:2])}{more}" if paths else count
