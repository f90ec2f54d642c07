"""What `explain` returns: the plan of a program as a table, and what it saves and gains."""

import dataclasses
import math
import os.path
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fp8jax.core.recipe import describe_folding
from fp8jax.core.spec import QuantSpec
from fp8jax.core.tables import sentence, table
from fp8jax.rewrite import primitives, unplanned
from fp8jax.rewrite.call_info import CallInfo
from fp8jax.rewrite.entries import PlanEntry
from fp8jax.rewrite.graph import Graph, Node, Value, walk_calls
from fp8jax.rewrite.operations import ActivationOperation, NormOperation
from fp8jax.rewrite.rules import RuleSet
from fp8jax.rewrite.run import Schedule

_MAX_LISTED = 6  # layers that a sentence lists
# The first columns tell rows apart. Rows that are equal in the others are folded if the terminal is narrow.
_NAME_HEAD = ("path", "shape", "line", "bytes", "gain us")
_SHARED_HEAD = ("operation", "forward", "dgrad", "wgrad", "saved", "why")


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What the rules make of a program; `str(explanation)` is a table and notes.

    Attributes:
        rows: the products, norms and activations in the program's order, then layers without a product.
        unquantized_note: the share of FLOPs in 16 bits that the rules want in 8, with reasons; "" if there is none.
        notes: what a user should look at.
        program: products and kernels of the compiled program, `fp8jax.modules.compiled.Program`; None if not compiled.
    """

    rows: tuple[PlanEntry, ...]
    unquantized_note: str = ""
    notes: tuple[str, ...] = ()
    program: Any = None

    @property
    def entries(self) -> tuple[PlanEntry, ...]:
        """The rows that the rules cover."""
        return tuple(row for row in self.rows if row.is_planned)

    @property
    def quantized(self) -> tuple[PlanEntry, ...]:
        """The entries that a recipe takes."""
        return tuple(entry for entry in self.entries if entry.is_quantized)

    @property
    def skipped(self) -> tuple[PlanEntry, ...]:
        """The entries that are left as written."""
        return tuple(entry for entry in self.entries if not entry.is_quantized)

    @property
    def layers(self) -> tuple[PlanEntry, ...]:
        """The entries of products, each parameter once."""
        layers: dict[Any, PlanEntry] = {}
        for entry in self.entries:
            if entry.is_product:
                layers.setdefault((entry.path, entry.shape), entry)
        return tuple(layers.values())

    @property
    def quantized_layers(self) -> tuple[PlanEntry, ...]:
        """The layers that a recipe takes."""
        return tuple(layer for layer in self.layers if layer.is_quantized)

    @property
    def skipped_layers(self) -> tuple[PlanEntry, ...]:
        """The layers that are left as written."""
        return tuple(layer for layer in self.layers if not layer.is_quantized)

    @property
    def leaking_layers(self) -> tuple[PlanEntry, ...]:
        """The layers with input scales that span tokens."""
        return tuple(layer for layer in self.layers if layer.token_spanning_spec)

    @property
    def context_entries(self) -> tuple[PlanEntry, ...]:
        """The entries of norms and activations."""
        return tuple(entry for entry in self.entries if not entry.is_product)

    def __str__(self) -> str:
        rows = [_NAME_HEAD + _SHARED_HEAD, *map(_cells, self.rows)]
        columns = [i for i in range(len(rows[0])) if i == 0 or any(row[i] != "-" for row in rows[1:])]
        names = sum(i < len(_NAME_HEAD) for i in columns)
        sections = [table([[row[i] for i in columns] for row in rows], names=names)] if self.rows else []
        sections += [sentence(text) for text in self._sentences() if text]
        return "\n\n".join([*sections, *([str(self.program)] if self.program is not None else [])])

    def _sentences(self) -> Iterator[str]:
        if not any(row.linear for row in self.rows):
            yield "no product is quantized"
        if self.leaking_layers:
            specs = ", ".join(sorted({str(layer.token_spanning_spec) for layer in self.leaking_layers}))
            yield (
                f"scales that span tokens: the inputs of {len(self.leaking_layers)} layers ({specs}). Later tokens "
                "change the scales of earlier ones: evaluate token by token, or take a granularity of tokens or groups."
            )
        if folds := dict.fromkeys(spec for row in self.rows if row.linear for spec in row.linear.folded_specs):
            yield describe_folding(folds)
        yield self.unquantized_note
        yield _rematerialization_note(self.entries)
        yield residual_bytes_note(self.entries)
        yield gains_note(self.entries)
        yield from (f"note: {note}" for note in self.notes)


def _cells(entry: PlanEntry) -> tuple[str, ...]:
    return (
        entry.path or "-",
        str(entry.shape or "-").replace(" ", ""),
        os.path.basename(entry.line.partition(" (")[0]) or "-",
        "-" if entry.residual_bytes is None else _format_bytes(entry.residual_bytes),
        "-" if entry.gain is None else f"{1e6 * entry.gain * entry.runs_per_step:+,.1f}",
        entry.kind,
        *(entry.products.values() or ("-",) * 3),
        entry.residual,
        entry.reason,
    )


def _format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _rematerialization_note(entries: Sequence[PlanEntry]) -> str:
    """How many products run again in the backward pass, and what saves them; "" if none does."""
    products = [entry for entry in entries if entry.linear is not None]
    count = sum(entry.is_rematerialized for entry in products)
    if not count:
        return ""
    return (
        f"{count} of {len(products)} products are computed again in the backward pass under your jax.checkpoint; give "
        "it policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable, or leave it out: norms and activations of "
        "a recipe with a context save codes alone"
    )


def residual_bytes_note(entries: Sequence[PlanEntry]) -> str:
    """The bytes that a plan saves of inputs for the backward pass; "" if they are unknown."""
    sizes = [(entry.residual_bytes, entry.path or entry.kind) for entry in entries if entry.residual_bytes]
    if not sizes:
        return ""
    largest = ", ".join(f"{path} {_format_bytes(size)}" for size, path in sorted(sizes, reverse=True)[:3])
    total = _format_bytes(sum(size for size, _ in sizes))
    return f"saved of inputs for the backward pass: {total}, most by {largest}; rows without bytes are not counted"


def gains_note(entries: Sequence[PlanEntry]) -> str:
    """The time that a plan's products gain in a step, and which of them lose; "" if there are no rates."""
    rated = [entry for entry in entries if entry.rates_device]
    if not rated:
        return ""
    total = 1e3 * sum((entry.gain or 0.0) * entry.runs_per_step for entry in rated)
    count = sum(entry.gain is not None for entry in rated)
    verb = "lose" if total < 0 else "gain"
    note = f"8 bits {verb} about {abs(total):.2g} ms a step in {count} products, by rates of {rated[0].rates_device}"
    losing = [entry for entry in rated if entry.is_slower]
    if not losing:
        return note
    paths = list(dict.fromkeys(entry.path for entry in losing))
    more = f" and {len(paths) - _MAX_LISTED} more" if len(paths) > _MAX_LISTED else ""
    tokens = " or ".join(f"{n:,}" for n in sorted({entry.tokens for entry in losing}))
    verb = "gains" if len(paths) == 1 else "gain"
    rule = f"give Rule({paths[0]!r}, None), or take fp8jax.recipes.for_shapes(recipe)"
    return f"{note}; {', '.join(paths[:_MAX_LISTED])}{more} {verb} nothing at {tokens} tokens: {rule}"


def list_rows(
    graph: Graph, schedule: Schedule, rules: RuleSet, call_info: CallInfo, entries: Mapping[Node, PlanEntry]
) -> tuple[PlanEntry, ...]:
    """The rows of a planned program in its order: the plan's entries with their bytes, and what the rules do not cover.

    Args:
        graph: the program, planned.
        schedule: what is run of it.
        rules: which recipe is whose.
        call_info: of the program.
        entries: of the plan.
    """
    sizes = dict(_residual_bytes(graph, entries))
    rows = unplanned.find(graph, schedule, rules, call_info, entries)
    rows |= {node: entry._replace(residual_bytes=sizes.get(node)) for node, entry in entries.items()}
    return tuple(rows[node] for node in walk_calls(graph.nodes) if node in rows)


def _residual_bytes(graph: Graph, entries: Mapping[Node, PlanEntry], num_runs: int = 1) -> Iterator[tuple[Node, int]]:
    """The bytes that each operation saves of its inputs, in all iterations of the loops around it.

    Products that share codes count them once. Parameters do not count. Nothing under a `jax.checkpoint` is listed.
    """
    counted = set[Any]()
    for node in graph.walk():
        if node in entries and node.operation is not None and all(isinstance(n, int) for n in node.results[0].shape):
            size = _operation_bytes(node.operation, entries[node], counted)
            if size is not None:
                yield node, int(num_runs * size)
        if not primitives.rematerializes_products(node.eqn):
            length = node.eqn.params["length"] if node.kind == "scan" else 1
            for body in node.bodies:
                yield from _residual_bytes(body, entries, num_runs * length)


def _operation_bytes(operation: Any, entry: PlanEntry, counted: set[Any]) -> float | None:
    """The bytes of one run of an operation; None if they are unknown. Shared codes are added to `counted`."""
    if entry.is_product and entry.frozen is None:
        spec = operation.linear.residual_spec()
        if entry.has_saved_input or entry.recomputes_input or (operation.canonical_data, spec) in counted:
            return 0
        counted.add((operation.canonical_data, spec))
        return _value_bytes(operation.data, spec, operation.num_inputs)
    if isinstance(operation, NormOperation):
        rows = math.prod(operation.x.shape) // operation.x.shape[-1]
        return _value_bytes(operation.x, operation.recipe.context.spec) + 4 * rows
    if isinstance(operation, ActivationOperation):
        context, saved = operation.recipe.context, [v for v in (operation.gate, operation.up) if v is not None]
        # The activated gate is saved, too, unless it is recomputed.
        if len(saved) == 2 and context.spec is not None and not context.recompute_activations:
            saved.append(operation.gate)
        return sum(_value_bytes(value, context.spec) for value in saved)
    return None


def _value_bytes(value: Value, spec: QuantSpec | None, num_columns: int | None = None) -> float:
    """The bytes of an array, or of its codes and scales as a matrix with that many columns."""
    size = math.prod(value.shape)
    if spec is None or not size:
        return size * value.dtype.itemsize
    return spec.nbytes(value.shape if num_columns is None else (size // num_columns, num_columns))
