"""Plans which matmuls of a program are quantized, with the norms and activations before them."""

import collections
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fp8jax.core.recipe import Linear
from fp8jax.ops.losses.head import has_codes
from fp8jax.ops.products.ragged import unsupported_ragged_reason
from fp8jax.rewrite import activations, biases, cost_model, frozen_params, grouped, losses, norms, primitives
from fp8jax.rewrite.call_info import CallInfo
from fp8jax.rewrite.entries import LOSS_KIND, PlanEntry, WeightMatmul
from fp8jax.rewrite.graph import (
    Graph,
    LoopPart,
    Node,
    Replacement,
    Value,
    Weight,
    canonical_value,
    count_readers,
    direct_sources,
    is_order_preserving,
    saves_output,
    stored_weight_axes,
    strip_layout,
)
from fp8jax.rewrite.heads import (
    LOSS_HEAD_REASON,
    MIN_OUTPUTS,
    NARROW_REASON,
    OUTPUT_HEAD_REASON,
    Flow,
    block_number,
    count_outputs,
    edge_reason,
    elementwise_sources,
    find_edge_blocks,
    split_loop,
)
from fp8jax.rewrite.operations import (
    NON_DOT_OPERATIONS,
    ActivationOperation,
    GroupedGluOperation,
    LayoutStep,
    LossOperation,
    NormOperation,
    ProductOperation,
    RaggedOperation,
    stored_experts,
)
from fp8jax.rewrite.primitives import (
    CASTS,
    CONCAT_PRIMITIVES,
    GATHER_PRIMITIVES,
    IDENTITY_PRIMITIVES,
    LAYOUTS,
    RESHAPES,
    SLICING_PRIMITIVES,
)
from fp8jax.rewrite.probes import FUNCTIONS
from fp8jax.rewrite.products import choose, find, path_list, reject_unsupported_precision
from fp8jax.rewrite.routers import ROUTER_LAYER_REASON
from fp8jax.rewrite.rules import LayerChoice, RuleSet, rewrites_nonlinear
from fp8jax.rewrite.states import (
    LoopLevel,
    StateRows,
    WeightUse,
    find_state_rows,
    layer_axis_sizes,
    loop_levels,
    observed_operands,
    scaling_names,
)
from fp8jax.rewrite.unplanned import UnquantizedShare, flops, unquantized_share

_UNKNOWN = LayerChoice(None, "")
_UNSPLIT = "runs in a loop that may be over a part of the model's blocks, so none of them stays in 16 bits"
# The paths of layers, each with the aliases that rules may match.
PathAliases = dict[str, tuple[str, ...]]


class ProgramPlan(NamedTuple):
    """The plan of a program.

    Attributes:
        entries: the entry of each node that the rules concern, in program order.
        uses: the matmuls of each parameter, with their recipes.
        error: the error to raise at a run if matmuls ask for a precision that a quantized one cannot reach, or "".
        share: the share of FLOPs that stays in 16 bits although the rules ask for fewer.
        unsplit_note: the layers in loops over blocks that are not split at the edges of the model, or "".
    """

    entries: dict[Node, PlanEntry]
    uses: dict[WeightUse, Linear]
    error: str
    share: UnquantizedShare
    unsplit_note: str


def plan(
    graph: Graph,
    rules: RuleSet,
    call_info: CallInfo = CallInfo(),  # noqa: B008
) -> ProgramPlan:
    """Plan a program and assign the recipes' operations to the nodes of `graph`.

    Raises:
        ValueError: a rule matches nothing, or nothing can be quantized.
    """
    entries: dict[Node, PlanEntry] = {}
    matmuls = list(find(graph, entries, rules, call_info))
    flow = Flow(graph, {p.node for p in matmuls}, call_info.num_results, call_info.argument_indices)
    reasons, counts = flow.find_heads(), count_readers(graph)
    for p in matmuls:
        if p.node in reasons and _is_matrix_product(p):
            p.loss = losses.find(p.graph, p.node, p.side, counts)
    reasons |= {p.node: LOSS_HEAD_REASON for p in matmuls if p.loss is not None}
    reasons = reasons if rules.has_default else {}
    # A layer whose result is also used elsewhere is no output head.
    other_paths = {p.path for p in matmuls if p.node not in reasons}
    router_layers = {node: reason for node, reason in reasons.items() if reason == ROUTER_LAYER_REASON}
    heads = {p.path: reasons[p.node] for p in matmuls if p.node in reasons and p.node not in router_layers}
    heads = {path: why for path, why in heads.items() if why != OUTPUT_HEAD_REASON or path not in other_paths}
    skipped: dict[Node, str] = {}
    if rules.has_default:
        heads_and_edges = _find_edges(matmuls, rules) | {p.node: heads[p.path] for p in matmuls if p.path in heads}
        heads_and_edges = router_layers | heads_and_edges
        skipped = dict.fromkeys(_narrow_products(matmuls, heads_and_edges), NARROW_REASON) | heads_and_edges
    for p in matmuls:
        p.choice = choose(p, rules, call_info, {p.path: skipped[p.node]} if p.node in skipped else {})
    _find_stacked_experts(matmuls)
    levels = _find_levels(matmuls)
    rows = _find_rows(matmuls, levels, call_info)
    _skip_unsupported_products(matmuls, levels, rows, call_info)
    _skip_other_state_axes(matmuls, levels, rows, call_info)
    error = reject_unsupported_precision(matmuls)
    unsplit_paths: list[str] = []
    for p in matmuls:
        shape, reason = p.weight.stored.shape, p.choice.reason
        is_in_block = block_number(p.path) is not None or any(len(outer.parts) > 1 for outer, _ in p.enclosing)
        is_default = p.is_quantized and rules.takes_by_default(p.path, *p.aliases)
        if rules.unquantized_blocks != (0, 0) and is_default:
            if _has_unknown_block(p) or (_is_indexed(p) and not is_in_block):
                unsplit_paths.append(p.path)
                reason += f"; {_UNSPLIT}"
            elif not is_in_block:
                reason += "; its path has no number of a block"
        is_rematerialized = any(primitives.rematerializes_products(node.eqn) for node, _ in p.enclosing)
        entries[p.node] = PlanEntry(
            p.path,
            primitives.function_name(p.node.eqn) if p.node.kind == primitives.GROUPED_CALL else p.node.kind,
            shape,
            p.choice,
            reason,
            p.node.line(),
            is_product=True,
            is_rematerialized=is_rematerialized,
            flops=flops(p.node, p.enclosing),
            is_unsupported=p.is_unsupported,
            concatenated=p.concatenated,
        )
    nodes = list(graph.walk_nested())
    norm_paths = _replace_all(graph, matmuls, rules, entries, call_info)
    unread_paths = _unread_layers(graph, call_info) | norm_paths
    unsupported_paths = {
        path for e in entries.values() if e.is_grouped_candidate and e.is_unsupported for path in e.source_layers
    }
    if call_info.requires_product:
        grouped.check_names(graph, rules.grouped_products)
    if call_info.requires_product and not matmuls and not unread_paths and not unsupported_paths:
        raise ValueError(
            f"the function has no matmul of data with a parameter that a recipe can quantize{_skipped_note(entries)}"
        )
    if call_info.checks_rules:
        aliases = unread_paths | {p.path: p.aliases for p in matmuls}
        aliases |= {
            path: tuple(rest) for p in matmuls for path, *rest in map(call_info.layer_paths, p.weight.further_paths)
        }
        sources = [path for entry in entries.values() for path in entry.source_layers]
        kept_paths = {p.path for p in matmuls if p.node not in skipped}
        skip_reasons = {p.path: skipped[p.node] for p in matmuls if p.path not in kept_paths}
        rules.check_all_used(
            aliases,
            skip_reasons,
            hint=_skipped_note(entries),
            aliases=aliases,
            source_layers=sources,
            unsupported_layers=sorted(unsupported_paths),
        )
    found = {node: entries[node] for node in nodes if node in entries}
    note = f"{path_list(tuple(dict.fromkeys(unsplit_paths)))}: {_UNSPLIT}" if unsplit_paths else ""
    return ProgramPlan(
        found, _number_uses(matmuls, levels, rows), error, unquantized_share(graph, found, call_info), note
    )


def split_edge_iterations(
    rules: RuleSet, call_info: CallInfo, params: Collection[str], paths: Sequence[str], length: int
) -> tuple[LoopPart, ...]:
    """The parts of a loop, as of `Graph.split_loop`: the recipe may leave its first and last iterations in 16 bits.

    Args:
        paths: of the parameters that are stacked along the loop.
    """
    layers = [call_info.layer_paths(path) for path in paths]
    counts = rules.unquantized_blocks if any(rules.takes_by_default(*layer) for layer in layers) else (0, 0)
    layer_paths = [path for path, *_ in layers]
    if len(stacks := set(map(_stack_and_number, layer_paths))) == 1:
        ((stack, number),) = stacks
        others = (_stack_and_number(call_info.layer_paths(path)[0]) for path in params)
        if any(other[0] == stack and other[1] != number for other in others):
            return (LoopPart(length, has_unknown_blocks=True),)  # a loop in one of several numbered parts of the model
    return split_loop(layer_paths, length, counts)


def _stack_and_number(path: str) -> tuple[str, int | None]:
    """The path up to the number of a layer's block, and the number; ("", None) without one."""
    number = block_number(path)
    return ("", None) if number is None else (path[: number.start()], int(number[0]))


def _find_edges(matmuls: list[WeightMatmul], rules: RuleSet) -> dict[Node, str]:
    """The matmuls in the first and last blocks of a model, with the reason: by loops, or else by their paths."""
    parts = {
        p.node: outer.parts[outer.bodies.index(body)]
        for p in matmuls
        for outer, body in p.enclosing
        if len(outer.parts) > 1
    }
    stacks: dict[str, list[WeightMatmul]] = {}
    for p in matmuls:
        if rules.unquantized_blocks != (0, 0) and p.node not in parts and not _has_unknown_block(p):
            stacks.setdefault(_stack_and_number(p.path)[0], []).append(p)
    blocks = {p.path for stack in stacks.values() if _is_sequence(stack) for p in stack}
    edges = find_edge_blocks(blocks, rules.unquantized_blocks)
    reasons = {
        p.node: edge_reason(p.path, parts[p.node]) if p.node in parts else edges.get(p.path, "") for p in matmuls
    }
    return {node: reason for node, reason in reasons.items() if reason}


def _is_sequence(stack: list[WeightMatmul]) -> bool:
    """Whether the first or the last block of a stack reads a result of another block, unlike experts in a list."""
    blocks = {p.node: _stack_and_number(p.path)[1] for p in stack}
    numbers = sorted(number for number in set(blocks.values()) if number is not None)
    for edge in numbers[:1] + numbers[-1:]:
        visited, todo = set[Value](), [value for node in blocks if blocks[node] == edge for value in node.operands]
        while todo:
            value = todo.pop()
            if value not in visited:
                visited.add(value)
                if value.node in blocks and blocks[value.node] != edge:
                    return True
                todo += direct_sources(value)
    return False


def _has_unknown_block(p: WeightMatmul) -> bool:
    return any(part.has_unknown_blocks for outer, _ in p.enclosing for part in outer.parts)


def _is_indexed(p: WeightMatmul) -> bool:
    """Whether a loop selects the matrix from a stack by its counter."""
    weight: Weight | None = p.weight
    while weight is not None and all(step.kind != "dynamic_slice" for step in weight.layout):
        outer = weight.stored.enclosing_value
        weight = None if outer is None else outer.weight
    return weight is not None


def _narrow_products(products: list[WeightMatmul], skipped: Collection[Node]) -> set[Node]:
    """Matmuls with few outputs; none if no other matmul would be left, in a part of a model or a toy."""
    nodes = {p.node for p in products if count_outputs(p.node, p.side) < MIN_OUTPUTS}
    return nodes if any(p.node not in nodes and p.node not in skipped for p in products) else set()


def _has_batch_axes(p: WeightMatmul) -> bool:
    """Whether a product has a matrix for each group or batch element."""
    return p.node.kind != "dot_general" or any(p.node.eqn.params["dimension_numbers"][1])


def _skip_unsupported_products(
    matmuls: list[WeightMatmul],
    levels: Mapping[Node, tuple[LoopLevel, ...]],
    rows: Mapping[Node, StateRows],
    call_info: CallInfo,
) -> None:
    """Choose no recipe for products with several matrices that it cannot compute, or has no states for."""
    for p in matmuls:
        linear = p.choice.linear
        if linear is None or p.weight.frozen is not None:
            continue
        if p.node.kind != "dot_general" and (reason := unsupported_ragged_reason(linear)):
            p.is_unsupported, p.choice = True, LayerChoice(None, reason)
        if not observed_operands(linear):
            continue
        reason, names = "", scaling_names(linear)
        if _is_gathered(p):
            reason = f"gathers its parameter from devices, and {names} scaling keeps a state for the whole parameter"
        elif p.concatenated and not (_has_batch_axes(p) and p.node in levels and not linear.needs_weight_bounds):
            reason = (
                f"concatenates or stacks parameters, and {names} scaling keeps a state for each; do so outside of the "
                "function, or use a recipe with current scaling, such as te_current"
            )
        elif p.node not in levels or (
            _has_batch_axes(p)
            and call_info.state_axes is not None
            and p.node not in rows
            and call_info.state_axes.get(p.weight.path) != layer_axis_sizes(levels[p.node])
        ):
            reason = f"has batch axes or groups, for each of which {names} scaling would need a state"
            if p.concatenated and p.node in levels:
                reason = (
                    f"stacks the parameters of several layers, and {names} scaling keeps the states in these; store "
                    "them as one parameter, or use a recipe with current scaling, such as te_current"
                )
        elif p.node not in rows and _is_selected_by_index(p, levels[p.node]):
            reason = (
                f"selects its matrix by a computed index, and {names} scaling keeps a state for each matrix; use "
                "lax.scan over the stacked matrices"
            )
        elif linear.needs_weight_bounds and not _has_bounds_of_parameter(p):
            reason = "computes its matrix from the parameter, but automatic scaling tracks only the parameter itself"
        if reason:
            p.is_unsupported, p.choice = True, LayerChoice(None, reason)


def _skip_other_state_axes(
    matmuls: list[WeightMatmul],
    levels: dict[Node, tuple[LoopLevel, ...]],
    rows: Mapping[Node, StateRows],
    call_info: CallInfo,
) -> None:
    """Leave products that need a state of other axes than further products with the same parameter.

    The products with most FLOPs keep the state. A bound on the parameter, unlike a statistic, is measured for the
    others, which are removed from `levels`.
    """
    groups = collections.defaultdict[str, dict[tuple[int, ...], list[WeightMatmul]]](dict)
    for p in matmuls:
        if p.choice.linear is not None and p.choice.linear.stateful_strategies and p.node in levels:
            axes = rows[p.node].sizes if p.node in rows else layer_axis_sizes(levels[p.node])
            groups[p.weight.path].setdefault(axes, []).append(p)
    for path, by_axes in groups.items():
        counts = {axes: sum(flops(p.node, p.enclosing) for p in products) for axes, products in by_axes.items()}
        stored_axes = (call_info.state_axes or {}).get(path)
        kept_axes = max(counts, key=lambda axes: (axes == stored_axes, counts[axes]))
        for p in (p for axes, products in by_axes.items() if axes != kept_axes for p in products):
            linear = p.choice.linear
            assert linear is not None
            if not observed_operands(linear):
                del levels[p.node]
                continue
            reason = (
                f"reads its parameter in another way than {by_axes[kept_axes][0].node.line()}, stacked or alone, but "
                f"{scaling_names(linear)} scaling keeps one state; use a recipe with current scaling, as te_current"
            )
            p.is_unsupported, p.choice = True, LayerChoice(None, reason)


def _is_matrix_product(p: WeightMatmul) -> bool:
    """Whether it contracts the last axis of its data with one axis of a matrix. The shapes are known and not empty."""
    if not all(isinstance(n, int) and n > 0 for n in p.node.results[0].shape):
        return False
    if p.node.kind != "dot_general" or p.node.operands[p.side].aval.ndim != 2:
        return False
    contract, batch = p.node.eqn.params["dimension_numbers"]
    return not batch[0] and tuple(contract[1 - p.side]) == (p.data.aval.ndim - 1,) and p.data.aval.ndim > 1


def _is_gathered(p: WeightMatmul) -> bool:
    """Whether the parameter is gathered from devices, inside of `jax.shard_map`."""
    return p.weight.stored.kind in GATHER_PRIMITIVES


def _has_axis_of_experts(p: WeightMatmul) -> bool:
    """Whether a product has a matrix for each index of the first axis of the parameter as it is stored."""
    if p.weight.further_paths and not _concatenates_matrices(p.weight.stored):
        return False
    if p.node.kind != "dot_general":
        if p.node.weight_axes is None:  # no grouped product
            return False
        axes = stored_experts(p)[1] if p.choice.linear is not None else p.node.weight_axes
        return axes[0] == 0
    if p.weight.layout or p.weight.is_relayouted:
        return False
    return tuple(p.node.eqn.params["dimension_numbers"][1][p.side]) == (0,)


def _concatenates_matrices(stored: Value) -> bool:
    """Whether parameters are concatenated along an axis of their matrices, or along the first one, a matrix each."""
    node = stored.node
    if node is None or node.kind not in CONCAT_PRIMITIVES:
        return False
    if node.kind == "stack":
        return node.eqn.params["axis"] == 0
    return node.eqn.params["dimension"] > 0 or all(value.shape[0] == 1 for value in node.operands)


def _find_levels(matmuls: list[WeightMatmul]) -> dict[Node, tuple[LoopLevel, ...]]:
    """The levels of `WeightUse` of the products whose parameter may have a state or given codes."""
    levels = {}
    for p in matmuls:
        has_experts = p.is_stacked or (_has_batch_axes(p) and _has_axis_of_experts(p))
        if _is_gathered(p) or (_has_batch_axes(p) and not has_experts):  # codes of the parameter are of its shard
            continue
        levels[p.node] = loop_levels(p.enclosing, _first_parameter(p.weight.stored), has_experts)
        if has_experts:
            levels[p.node] += (LoopLevel(True, p.node.operands[p.side].shape[0]),)
    return levels


def _find_rows(
    matmuls: list[WeightMatmul], levels: Mapping[Node, tuple[LoopLevel, ...]], call_info: CallInfo
) -> dict[Node, StateRows]:
    """The rows of states that products with some of the stacked matrices of a parameter read.

    If the state cannot have a row for each matrix, because another product reads all of them as one, all share it.
    """
    found, state_axes = dict[Node, StateRows](), collections.defaultdict[str, set[tuple[int, ...]]](set)
    for p in matmuls:
        linear = p.choice.linear
        if p.node not in levels or linear is None or not linear.stateful_strategies:
            continue
        rows = None
        if not p.weight.further_paths:
            rows = find_state_rows(p.matrix, p.enclosing, _has_batch_axes(p) or p.is_stacked)
        axes = layer_axis_sizes(levels[p.node]) if rows is None else rows.sizes
        state_axes[p.weight.path].add(axes)
        stored_axes = (call_info.state_axes or {}).get(p.weight.path, axes)
        if rows is not None and stored_axes[: len(axes)] == axes and rows.shape == layer_axis_sizes(levels[p.node]):
            found[p.node] = rows
    paths = {p.node: p.weight.path for p in matmuls}
    return {node: rows for node, rows in found.items() if len(state_axes[paths[node]]) == 1}


def _first_parameter(value: Value) -> Value:
    """The first of the parameters that are concatenated into a value; another value itself."""
    while value.kind in CONCAT_PRIMITIVES and value.node is not None and value.node.operands[0].weight is not None:
        value = value.node.operands[0].weight.stored
    return value


def _outer_shape(p: WeightMatmul) -> tuple[int, ...]:
    """The shape of a parameter as the caller stores it."""
    value = p.weight.stored
    while value.enclosing_value is not None:
        value = value.enclosing_value
    return value.shape


def _is_selected_by_index(p: WeightMatmul, levels: tuple[LoopLevel, ...]) -> bool:
    """Whether an index that the program computes selects its matrix from stacked ones."""
    num_axes = p.matrix.aval.ndim + len(layer_axis_sizes(levels)) - (_has_batch_axes(p) or p.is_stacked)
    return _is_indexed(p) and len(_outer_shape(p)) > num_axes


def _has_bounds_of_parameter(p: WeightMatmul) -> bool:
    """Whether bounds on the elements of a parameter, or of each of its stacked matrices, hold for the product's."""
    return _reads_parameter(p, (*LAYOUTS, *SLICING_PRIMITIVES, "stop_gradient"))


def _reads_parameter(p: WeightMatmul, kinds: Collection[str]) -> bool:
    """Whether only equations of these kinds, which keep axes of layers and experts, are before a product's matrix."""
    is_grouped = p.node.kind != "dot_general" and stored_weight_axes(p.node, p.weight.stored) is not None
    value = p.weight.stored if is_grouped else p.matrix
    axes = int(_has_batch_axes(p) or p.is_stacked)  # the first ones, which are kept
    while (outer := value.enclosing_value) is not None or value.node is not None:
        if outer is not None:
            axes += outer.aval.ndim - value.aval.ndim
            value = outer
            continue
        node = value.node
        assert node is not None
        source, params = node.operands[0], node.eqn.params
        if node.kind == "optimization_barrier":
            source = node.operands[node.results.index(value)]
        is_kept = source.shape[:axes] == value.shape[:axes] and not (
            (node.kind == "transpose" and tuple(params["permutation"][:axes]) != tuple(range(axes)))
            or (node.kind == "rev" and min(params["dimensions"], default=axes) < axes)
            or (node.kind in ("broadcast_in_dim", "unstack") and axes > 0)
        )
        if node.kind not in kinds or not is_kept:
            return False
        value = source
    return True


def _find_stacked_experts(matmuls: list[WeightMatmul]) -> None:
    """Mark the products of all tokens with all experts, which a product with a batch axis of experts reads.

    An einsum "td,edf->tef" is one product of (inputs, experts * outputs). Its weight has a matrix of each expert.
    """
    by_node = {p.node: p for p in matmuls}
    for reader in matmuls:
        if reader.node.kind != "dot_general" or not _has_batch_axes(reader):
            continue
        batch = reader.node.eqn.params["dimension_numbers"][1][reader.side]
        sizes = [reader.node.operands[reader.side].shape[axis] for axis in batch]
        for p in map(by_node.__getitem__, elementwise_sources(reader.data, by_node)):
            weight = p.node.operands[p.side]
            numbers = p.node.eqn.params.get("dimension_numbers")
            if p.node.kind == "dot_general" and not _has_batch_axes(p) and weight.shape[:1] == tuple(sizes):
                p.is_stacked = 0 not in numbers[0][p.side] and weight.aval.ndim > 1 + len(numbers[0][p.side])


def _number_uses(
    products: list[WeightMatmul], levels: Mapping[Node, tuple[LoopLevel, ...]], rows: Mapping[Node, StateRows]
) -> dict[WeightUse, Linear]:
    """Number the matmuls of each parameter that may have a state or a quantized weight."""
    uses: dict[WeightUse, Linear] = {}
    counts: collections.Counter[str] = collections.Counter()
    for p in products:
        operation = (p.operation_node or p.node).operation
        linear, path = p.choice.linear, p.weight.path
        if linear is None or not isinstance(operation, ProductOperation | RaggedOperation):
            continue
        if p.concatenated and not observed_operands(linear):  # a bound on a weight is its own alone
            continue
        if p.node not in levels or (p.node not in rows and _is_selected_by_index(p, levels[p.node])):
            continue
        has_experts = _has_batch_axes(p) or p.is_stacked
        layer_axes = layer_axis_sizes(levels[p.node])
        has_outer_shape = not has_experts or _outer_shape(p)[: len(layer_axes)] == layer_axes
        if not observed_operands(linear) and not (has_outer_shape and _has_bounds_of_parameter(p)):
            continue  # bounds and codes are of the parameter's own axes and elements
        takes_codes = _reads_parameter(p, (*CASTS, *IDENTITY_PRIMITIVES))
        operation.use = WeightUse(path, counts[path], levels[p.node], takes_codes, rows.get(p.node))
        counts[path] += 1
        uses[operation.use] = linear
    return uses


def _skipped_note(entries: dict[Node, PlanEntry]) -> str:
    """The skipped matmuls as text for an error message."""
    skipped = [f"{e.path or e.kind} ({e.reason}) at {e.line}" for e in entries.values() if e.choice is None]
    return f"; not quantized: {'; '.join(skipped[:6])}" if skipped else ""


def _unread_layers(graph: Graph, call_info: CallInfo) -> PathAliases:
    """The paths of a module's layers that only its other methods read, with their aliases."""
    read = {value for node in graph.walk_nested() for value in node.operands} if call_info.is_module_method else set()
    weights = [v.weight for v in graph.inputs if call_info.is_module_method and v.weight is not None and v not in read]
    layer_paths = [
        call_info.layer_paths(w.path) for w in weights if w.path.endswith("kernel") and w.stored.aval.ndim > 1
    ]
    return {path: tuple(aliases) for path, *aliases in layer_paths}


def _replace_all(
    graph: Graph, products: list[WeightMatmul], rules: RuleSet, entries: dict[Node, PlanEntry], call_info: CallInfo
) -> PathAliases:
    """Put operations in place of matmuls and of norms and activations before them; return the norms' paths."""
    groups: dict[tuple[Graph, Value], list[WeightMatmul]] = {}
    for p in products:
        groups.setdefault(
            (p.graph, strip_layout(p.data, (*IDENTITY_PRIMITIVES, *RESHAPES), is_order_preserving)), []
        ).append(p)
    counts, norm_paths = count_readers(graph), PathAliases()
    # For each value that is read once, the node that reads it.
    sole_readers = {
        inner: {v: node for node in inner.walk() for v in node.operands if counts.get(v) == 1}
        for inner in {p.graph for p in products}
    }
    for (group_graph, source), group in groups.items():
        producer = _producer(source, counts)
        is_cost_selected = cost_model.drop_unprofitable(producer, group, entries, sole_readers[group_graph])
        if rules.rewrites_nonlinear and (not is_cost_selected or any(p.is_quantized for p in group)):
            norm_paths |= _replace_producer(producer, group, rules, entries, call_info)
        cost_model.annotate_gains(producer, group, entries, sole_readers[group_graph])
        for p in group:
            if p.weight.frozen is not None:
                entries[p.node] = _replace_frozen(p, entries[p.node])
            elif p.is_quantized:
                entry = entries.pop(p.node)._replace(has_saved_input=_replace_product(p, sole_readers[p.graph]))
                node = p.operation_node or p.node
                entries[node] = entry._replace(kind=LOSS_KIND) if isinstance(node.operation, LossOperation) else entry
    if not products and call_info.resolve_paths is not None and rules.rewrites_nonlinear:
        # A norm that is called by itself, without the matmuls that read it.
        for value in graph.outputs[: call_info.num_results]:
            norm_paths |= _replace_producer(_producer(value, counts), [], rules, entries, call_info)
    return norm_paths


def _producer(value: Value, counts: dict[Value, int]) -> Value:
    """The value before identities, lossless reshapes and loop boundaries.

    A final cast to fewer bits stays if nothing else reads its input: it ends a norm or activation.
    """
    while value.enclosing_value is not None and value.is_loop_invariant:
        value = value.enclosing_value
    while value.node is not None and value.node.operation is None:
        kind, source = value.kind, (value.node.operands or [value])[0]
        is_downcast = kind in CASTS and value.dtype.itemsize < source.dtype.itemsize
        is_last_cast = is_downcast and counts.get(source, 0) < 2 and source.kind in FUNCTIONS
        if is_last_cast or not (
            kind in (*CASTS, *IDENTITY_PRIMITIVES) or (kind in RESHAPES and is_order_preserving(value.node))
        ):
            return value
        is_barrier = kind == "optimization_barrier"
        value = value.node.operands[value.node.results.index(value)] if is_barrier else source
        while value.enclosing_value is not None and value.is_loop_invariant:
            value = value.enclosing_value
    return value


def _stored_weight_of(p: WeightMatmul) -> tuple[Value, tuple[LayoutStep, ...]]:
    """The parameter that a matmul quantizes, with its layout steps; the operand and () if more is computed from it."""
    if p.quantizes_stored_weight:
        return p.weight.stored, tuple(LayoutStep(node, 0) for node in p.weight.layout)
    value, steps = p.node.operands[p.side], list[LayoutStep]()
    while value is not p.weight.stored:
        node = value.node
        if node is None or node.kind not in (*LAYOUTS, *SLICING_PRIMITIVES) or node.kind == "optimization_barrier":
            return p.node.operands[p.side], ()
        steps.append(LayoutStep(node, node.results.index(value)))
        value = node.operands[0]
    return value, tuple(reversed(steps))


def _replace_product(p: WeightMatmul, sole_readers: Mapping[Value, Node]) -> bool:
    """Put the recipe's matmul in place of a node and of its bias sum; return whether its input is saved anyway."""
    linear = p.choice.linear
    assert linear is not None
    if p.node.kind in NON_DOT_OPERATIONS:
        NON_DOT_OPERATIONS[p.node.kind].replace_product(p)
        return False
    if (with_loss := _loss_operation(p)) is not None and (total := with_loss.loss.total) is not None:
        total.operation, p.operation_node = with_loss, total
        total.operands = [p.data, with_loss.weight, *with_loss.loss.operands]
        return False
    # Statistics of the input are those of its codes, which are saved then.
    saved_data = (
        _saved_input(p) if p.choice.context.residual is not None and "x" not in linear.stateful_strategies else None
    )
    w, layout = _stored_weight_of(p)
    contract, batch = p.node.eqn.params["dimension_numbers"]
    num_outputs, node = p.node.operands[p.side].aval.ndim - len(contract[p.side]), p.node
    bias = split_sizes = None
    # If the parameter is on the left, as in `w @ x` under `jax.vmap`, the matmul includes the transpose that follows.
    if p.side == 0 and not batch[0]:
        node = _following_transpose(node, num_outputs, sole_readers) or node
    is_transposed = node is not p.node
    if (p.side == 1 or is_transposed) and not batch[0]:
        found_bias = biases.find(node, num_outputs, sole_readers.get(node.results[0]))
        node, bias = (node, None) if found_bias is None else found_bias
        if num_outputs == 1 and (following_split := _following_split(node, sole_readers)) is not None:
            node, split_sizes = following_split
    operation = ProductOperation(
        p.choice.recipe,
        p.data,
        w,
        layout,
        p.side,
        canonical_value(p.data),
        saved_data,
        params=p.node.eqn.params,
        bias=bias,
        is_transposed=is_transposed,
        split_sizes=split_sizes,
        is_stacked=p.is_stacked,
    )
    layout_operands = [operand for step in layout for operand in step.node.operands[1:]]
    node.operation, p.operation_node = operation, node
    node.operands = [saved_data or p.data, w, *layout_operands, *([] if bias is None else [bias])]
    return saved_data is not None


def _loss_operation(p: WeightMatmul) -> LossOperation | None:
    """The operation of an output head and its loss; None if the program has no such loss, or the recipe none for it."""
    linear = p.choice.linear
    if p.loss is None or p.loss.total is None or linear is None or linear.stateful_strategies or not has_codes(linear):
        return None
    w, axis = p.node.operands[p.side], 1 - p.node.eqn.params["dimension_numbers"][0][p.side][0]
    while w.kind in ("transpose", *CASTS, *IDENTITY_PRIMITIVES) and w is not p.weight.stored and w.node is not None:
        axis = w.node.eqn.params["permutation"][axis] if w.kind == "transpose" else axis
        w = w.node.operands[w.node.results.index(w)] if w.kind == "optimization_barrier" else w.node.operands[0]
    return LossOperation(linear, p.data, w, int(axis), p.loss, canonical_value(p.data))


def _following_transpose(node: Node, num_outputs: int, sole_readers: Mapping[Value, Node]) -> Node | None:
    """The node that moves a matmul's outputs from the first axes to the last, if it alone reads the result; or None."""
    reader, rank = sole_readers.get(node.results[0]), node.results[0].aval.ndim
    if reader is None or reader.kind != "transpose" or reader.operation is not None:
        return None
    outputs_last = (*range(num_outputs, rank), *range(num_outputs))
    return reader if tuple(reader.eqn.params["permutation"]) == outputs_last else None


def _following_split(node: Node, sole_readers: Mapping[Value, Node]) -> tuple[Node, tuple[int, ...]] | None:
    """The node that splits a result along its last axis, such as packed q, k and v, and the sizes; or None."""
    (result,) = node.results
    reader = sole_readers.get(result)
    if reader is None or reader.kind != "split" or reader.operation is not None:
        return None
    reader.scope = node.scope  # the matmul's scope, for messages
    params = reader.eqn.params
    return (reader, tuple(params["sizes"])) if params["axis"] == result.aval.ndim - 1 else None


def _replace_frozen(p: WeightMatmul, entry: PlanEntry) -> PlanEntry:
    """Put the matmul with a frozen weight in place of a node; if it cannot be, note that 16-bit values are used."""
    if not frozen_params.replace_product(p.node, p.side, p.weight, p.choice.linear, p.path, canonical_value(p.data)):
        was_quantized = p.is_quantized
        p.choice = LayerChoice(None, f"{p.weight.frozen}, but not read as (inputs, outputs): values of 16 bits")
        return entry._replace(choice=p.choice, reason=p.choice.reason, is_unsupported=was_quantized)
    return entry._replace(reason=f"{entry.reason}; {p.weight.frozen}", frozen=p.weight.frozen)


def _replace_producer(
    value: Value, group: list[WeightMatmul], rules: RuleSet, entries: dict[Node, PlanEntry], call_info: CallInfo
) -> PathAliases:
    """Put an operation in place of the norm or activation that matmuls read; return the norm's path."""
    norm_paths = PathAliases()
    node = value.node
    if node is not None and isinstance(node.operation, (NormOperation, ActivationOperation)):
        for p in group:
            recomputes_input = node.operation.recipe.context.recompute_activations
            entries[p.node] = entries[p.node]._replace(
                input_producer=entries[node].kind, recomputes_input=recomputes_input
            )
    if node is None or node.operation is not None:
        return norm_paths
    choices = [p.choice for p in group if p.choice.linear is not None] or [p.choice for p in group]
    readers_choice = choices[0] if choices else _UNKNOWN
    reader_paths, kind = " and ".join(dict.fromkeys(p.path for p in group)), ""
    choice, path, operands = readers_choice, reader_paths, list[Value]()
    operation: Replacement | None = None
    if (norm := norms.find(value)) is not None:
        kind = "LayerNorm" if norm.centered else "RMSNorm"
        norm_params = [v.weight.path for v in (strip_layout(v) for v in norm.scales) if v.weight is not None]
        if norm_params:
            path, *aliases = call_info.layer_paths(norm_params[0])
            choice = rules.choose(path, aliases=aliases)
            norm_paths[path] = tuple(aliases)
        operands = [norm.x, *norm.scales, *([] if norm.bias is None else [norm.bias])]
        operation = NormOperation(choice.recipe, *norm)
    elif rewrites_nonlinear(choice.recipe) and (activation := activations.find(value)) is not None:
        name, gate, up = activation
        kind = f"{name}(x)" if up is None else f"{name}(gate) * up"
        operands = [gate, *([] if up is None else [up])]
        producers = (None if v is None or v.node is None else v.node.operation for v in (gate, up))
        has_bias = any(isinstance(o, ProductOperation) and o.bias is not None for o in producers)
        operation = ActivationOperation(choice.recipe, name, gate, up, has_bias)
        if (between := _grouped_products_around(gate, up, group)) is not None:
            operands = list(between)
            operation = GroupedGluOperation(choice.recipe, name, gate, up, gate_up=between[0], groups=between[1])
    if kind and choice.linear is None and rules.has_contexts:
        entries[node] = PlanEntry(path, kind, value.shape, choice, choice.reason, node.line())
    if not kind or not rewrites_nonlinear(choice.recipe):
        return norm_paths
    nonsaving_readers = tuple(dict.fromkeys((p.path, str(p.data.dtype)) for p in group if not p.saves_codes))
    entries[node] = PlanEntry(path, kind, value.shape, choice, choice.reason, node.line(), readers=nonsaving_readers)
    node.operation, node.operands = operation, operands
    for p in group:
        entries[p.node] = entries[p.node]._replace(
            input_producer=kind, recomputes_input=choice.context.recompute_activations
        )
    return norm_paths


def _grouped_products_around(gate: Value, up: Value | None, readers: list[WeightMatmul]) -> tuple[Value, Value] | None:
    """The result of a grouped product with gate and up as its halves, and the sizes of its groups.

    None if there is none, or if a reader of the activation is not a grouped product of the same groups.
    """
    source, half = _half(gate)
    if source is None or up is None or half != 0 or _half(up) != (source, 1):
        return None
    nodes = [strip_layout(source, (*CASTS, *IDENTITY_PRIMITIVES)).node, *(p.node for p in readers)]
    if not readers or any(node is None or node.kind not in NON_DOT_OPERATIONS for node in nodes):
        return None
    sizes = {canonical_value(node.operands[2]): node.operands[2] for node in nodes if node is not None}
    return (source, *sizes.values()) if len(sizes) == 1 else None  # type: ignore[return-value]


def _half(value: Value) -> tuple[Value | None, int]:
    """The matrix of which a value is the first (0) or the second (1) half of the columns; None for other values."""
    node = value.node
    if node is None or node.kind not in ("split", "slice") or node.operation is not None:
        return None, 0
    source, params = node.operands[0], node.eqn.params
    if source.aval.ndim != 2 or value.shape != (source.shape[0], source.shape[1] // 2) or source.shape[1] % 2:
        return None, 0
    if node.kind == "split":
        return source, node.results.index(value)
    is_strided = params["strides"] is not None and any(stride != 1 for stride in params["strides"])
    return (None if is_strided else source), int(params["start_indices"][1] > 0)


def _saved_input(p: WeightMatmul) -> Value | None:
    """The matmul's input, if its producer saves it for its own backward pass as flash attention does; or None."""
    contract, batch = p.node.eqn.params["dimension_numbers"]
    value, n = strip_layout(p.data, (*IDENTITY_PRIMITIVES, *RESHAPES), is_order_preserving), len(contract[0])
    is_last_axes = tuple(contract[0]) == tuple(range(p.data.aval.ndim - n, p.data.aval.ndim))
    is_plain = p.side == 1 and not batch[0] and is_last_axes and tuple(contract[1]) == tuple(range(n))
    num_inputs = math.prod(p.data.shape[p.data.aval.ndim - n :])
    has_all_inputs = value.shape[-1:] == (num_inputs,) or math.prod(value.shape[-2:]) == num_inputs
    is_direct = not p.weight.layout and p.weight.stored.aval.ndim == n + 1 and value.dtype == p.data.dtype
    if not (is_plain and has_all_inputs and is_direct and value.kind == "custom_vjp_call") or value.node is None:
        return None
    return value if saves_output(value.node, value) else None
