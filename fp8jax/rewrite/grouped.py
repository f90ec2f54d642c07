"""Grouped products of a program: JAX's own, and the user's functions that the rules name.

A grouped product multiplies consecutive rows of tokens by the matrix of their group, as `jax.lax.ragged_dot` does.
Libraries wrap it, or a kernel, in a function with a custom derivative. The rewriter does not read into these.
"""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from fp8jax.rewrite import primitives
from fp8jax.rewrite.graph import Graph, Node, walk_calls
from fp8jax.rewrite.primitives import GROUPED_CALL
from fp8jax.rewrite.rules import GroupedProduct


def annotate(graph: Graph, grouped_products: Sequence[GroupedProduct]) -> None:
    """Set `weight_axes` of all grouped products, and make each named call a single node, in place."""
    for node in _readable_nodes(graph):
        if node.kind == "ragged_dot_general":
            node.weight_axes = primitives.ragged_weight_axes(node.eqn)
            continue
        name = function_name(node)
        for named in grouped_products if name else ():
            if named.matches(name) and (axes := _weight_axes(node, named.transposed)) is not None:
                node.kind, node.weight_axes = GROUPED_CALL, axes
                node.bodies, node.inlined, node.has_custom_rule = (), None, False
                node.results[0].node = node
                break


def function_name(node: Node) -> str:
    """The name of the function of a call with the operands and the result of a grouped product; "" for other nodes."""
    return primitives.function_name(node.eqn) if _weight_axes(node, False) is not None else ""


def check_names(graph: Graph, grouped_products: Sequence[GroupedProduct]) -> None:
    """Raise ValueError if a function that the rules name is not called as a grouped product."""
    names = dict.fromkeys(filter(None, map(function_name, _readable_nodes(graph))))
    for named in grouped_products:
        if not any(map(named.matches, names)):
            found = f"; functions that do are {', '.join(names)}" if names else ""
            raise ValueError(
                f"no function named {named.function!r} takes (tokens, inputs), (groups, inputs, outputs) and "
                f"(groups,) and returns (tokens, outputs){found}"
            )


def _readable_nodes(graph: Graph) -> Iterator[Node]:
    """All nodes but those in custom derivatives, each call or loop followed by the nodes in it."""
    return walk_calls(graph.nodes, lambda node: not node.has_custom_rule)


def _weight_axes(node: Node, is_transposed: bool) -> tuple[int, int, int] | None:
    """The axes of groups, inputs and outputs of a call's second operand, by shapes; None without the form.

    Args:
        is_transposed: whether matrices are (outputs, inputs) if they are square.
    """
    if len(node.operands) != 3 or len(node.results) != 1:
        return None
    x, w, group_sizes = node.operands
    y = node.results[0]
    is_float = all(jnp.issubdtype(value.dtype, jnp.floating) for value in (x, w, y))
    if not is_float or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        return None
    if (x.aval.ndim, w.aval.ndim, y.aval.ndim) != (2, 3, 2) or group_sizes.shape != w.shape[:1]:
        return None
    (tokens, inputs), outputs = x.shape, y.shape[1]
    if y.shape[0] != tokens:
        return None
    orders = ((0, 2, 1), (0, 1, 2)) if is_transposed else ((0, 1, 2), (0, 2, 1))
    return next((axes for axes in orders if (w.shape[axes[1]], w.shape[axes[2]]) == (inputs, outputs)), None)
