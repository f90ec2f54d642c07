"""The result of `explain`: what a plan quantizes, what it leaves as written, and what that saves and gains."""

import dataclasses
import functools
import math
import os.path
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from fp8jax.core import formats
from fp8jax.core.recipe import describe_folding
from fp8jax.core.spec import QuantSpec
from fp8jax.core.tables import fold_paths, sectioned_table, sentence, table
from fp8jax.rewrite import primitives, unplanned
from fp8jax.rewrite.call_info import CallInfo
from fp8jax.rewrite.entries import CONVOLUTION_REASON, PlanEntry
from fp8jax.rewrite.graph import Graph, Node, Value, walk_calls
from fp8jax.rewrite.operations import ActivationOperation, LossOperation, NormOperation, RaggedOperation
from fp8jax.rewrite.rules import RuleSet
from fp8jax.rewrite.run import Schedule

_MAX_LISTED = 4  # groups of layers that a sentence lists
_MAX_ROWS = 10  # rows of a section in the summary
# The first columns tell rows apart. Rows that are equal in the others are folded if the terminal is narrow.
_NAME_HEAD = ("path", "shape", "line", "bytes", "gain us")
_SHARED_HEAD = ("operation", "forward", "dgrad", "wgrad", "saved", "why")
_SUMMARY_HEAD = ("layers", "operation", "shape", "saved input, or reason", "bytes")


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The effect of rules on a program. `str(explanation)` is a summary in which equal blocks are one row.

    Attributes:
        rows: the products, norms and activations in the program's order, then layers without a product.
        unquantized_note: the FLOPs in 16 bits that the rules select, with reasons; "" if there are none.
        notes: what a user should look at.
        exchange_note: the bytes that devices send to each other's experts; "" if they send none.
        inspect: compiles the program for `program`; None if there is nothing to compile.
    """

    rows: tuple[PlanEntry, ...]
    unquantized_note: str = ""
    notes: tuple[str, ...] = ()
    exchange_note: str = ""
    inspect: Callable[[], Any] | None = None

    @functools.cached_property
    def program(self) -> Any:
        """The products and kernels of a forward and backward pass, compiled when this is read first.

        An `fp8jax.modules.compiled.Program`; None without a Flax model and sample inputs.
        """
        return None if self.inspect is None else self.inspect()

    @property
    def entries(self) -> tuple[PlanEntry, ...]:
        """The rows of operations that a rule could quantize."""
        return tuple(row for row in self.rows if row.is_planned)

    @property
    def quantized(self) -> tuple[PlanEntry, ...]:
        """The entries that a recipe quantizes."""
        return tuple(entry for entry in self.entries if entry.is_quantized)

    @property
    def skipped(self) -> tuple[PlanEntry, ...]:
        """The entries that are left as written."""
        return tuple(entry for entry in self.entries if not entry.is_quantized)

    @property
    def layers(self) -> tuple[PlanEntry, ...]:
        """The entries of products, each parameter once: that of a quantized product, if there is one."""
        layers: dict[Any, PlanEntry] = {}
        for entry in self.entries:
            key = entry.path, entry.shape
            if entry.is_product and (key not in layers or (entry.is_quantized and not layers[key].is_quantized)):
                layers[key] = entry
        return tuple(layers.values())

    @property
    def quantized_layers(self) -> tuple[PlanEntry, ...]:
        """The layers that a recipe quantizes."""
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
        sentences = "\n".join(sentence(text, indent=2) for text in self._sentences() if text)
        return "\n\n".join(part for part in (sentence(self._headline()), self._summary_table(), sentences) if part)

    @property
    def details(self) -> str:
        """A table with a row for each product, norm and activation, with its line, formats, bytes and gain."""
        rows = [_NAME_HEAD + _SHARED_HEAD, *map(_cells, self.rows)]
        columns = [i for i in range(len(rows[0])) if i == 0 or any(row[i] != "-" for row in rows[1:])]
        names = sum(i < len(_NAME_HEAD) for i in columns)
        return table([[row[i] for i in columns] for row in rows], names=names)

    def _headline(self) -> str:
        layers, contexts = len(self.quantized_layers), [row for row in self.quantized if row.context is not None]
        if not any(row.linear for row in self.rows):
            return "no matmul is quantized"
        flops = [(row.flops, row.linear is not None) for row in self.entries if row.is_product]
        total = sum(count for count, _ in flops)
        share = sum(count for count, is_quantized in flops if is_quantized) / total if total else 0
        parts = [f"{layers} {'layer runs' if layers == 1 else 'layers run'} in {_bits(self.quantized_layers)}"]
        if total:
            kinds = (
                "matmuls and convolutions" if any(row.reason == CONVOLUTION_REASON for row in self.rows) else "matmuls"
            )
            parts[0] += f" ({100 * share:.3g} % of the FLOPs of {kinds} with parameters)"
        if contexts:
            count = len(contexts)
            saves = "norm or activation saves" if count == 1 else "norms and activations save"
            parts.append(f"{count} {saves} {_bits(contexts)}")
        return f"{'. '.join(parts)}."

    def _summary_table(self) -> str:
        sections: dict[str, list[PlanEntry]] = {}
        for row in self.rows:
            if row.linear is not None:
                products = ", ".join(f"{name} {operands}" for name, operands in row.products.items())
                frozen = "" if row.frozen is None else f"; {row.frozen}"
                chosen_by = "" if row.choice is None else f" by {row.choice.reason}"
                sections.setdefault(f"In {_bits([row])}{chosen_by}{frozen}: {products}", []).append(row)
        others = [row for row in self.rows if row.linear is None]
        contexts = [row for row in others if row.context is not None]
        unquantized = [row for row in others if row.context is None]
        layers_first = sorted(unquantized, key=lambda row: not (row.is_product and row.path))
        sections |= {f"Norms and activations that save {_bits(contexts)}": contexts, "Not quantized": layers_first}
        sections = {title: rows for title, rows in sections.items() if rows}
        if not sections:
            return ""
        return sectioned_table(_SUMMARY_HEAD, [(title, _fold_rows(rows)) for title, rows in sections.items()])

    def _sentences(self) -> Iterator[str]:
        yield residual_bytes_note(self.entries)
        yield gains_note(self.entries)
        yield _head_note(self.entries)
        yield self.exchange_note
        yield self.unquantized_note
        yield _rematerialization_note(self.entries)
        if self.leaking_layers:
            specs = ", ".join(sorted({str(layer.token_spanning_spec) for layer in self.leaking_layers}))
            yield (
                f"scales that span tokens: the inputs of {_counted(self.leaking_layers, 'layer')} ({specs}). Later "
                "tokens change the scales of earlier ones: evaluate token by token, or use scales per token or group."
            )
        if folds := dict.fromkeys(spec for row in self.rows if row.linear for spec in row.linear.folded_specs):
            yield describe_folding(folds)
        yield from (f"note: {note}" for note in self.notes)
        # On a CPU all products are widened, and compiling a large model takes a minute.
        if jax.default_backend() != "cpu" and self.program is not None:
            yield from (f"WARNING: {warning}" for warning in self.program.warnings)
        if self.rows:
            program = "" if self.inspect is None else "; compiled program: print(explanation.program)"
            yield f"lines and formats of each row: print(explanation.details){program}"


def _bits(entries: Iterable[PlanEntry]) -> str:
    """The bits of the codes of products, norms and activations, such as "8 bits" or "4 or 8 bits"."""
    specs = {
        spec
        for entry in entries
        for spec in (
            *(spec for pair in (entry.linear.products().values() if entry.linear else ()) for spec in pair),
            entry.context.spec if entry.context else None,
        )
    }
    bits = sorted({formats.get(spec.format).bits for spec in specs if spec is not None})
    return f"{' or '.join(map(str, bits))} bits"


def _fold_rows(rows: Sequence[PlanEntry]) -> list[tuple[str, ...]]:
    """The cells of a section of the summary. Rows that differ in the numbers in their paths alone are one."""
    groups: dict[tuple[str, ...], list[PlanEntry]] = {}
    for row in rows:
        # Unquantized layers are one row for each reason.
        location = (str(row.shape) if row.is_quantized else "", "") if row.path else ("", row.line)
        groups.setdefault((row.kind, _hide_numbers(_short_note(row)), *location), []).append(row)
    cells: list[tuple[str, ...]] = []
    for (kind, hidden_note, *_), group in groups.items():
        sizes = [row.residual_bytes for row in group if row.residual_bytes is not None]
        paths = fold_paths([row.path for row in group if row.path])
        shapes = {str(row.shape or "").replace(" ", "") for row in group}
        count = f" ({len(group)} times)" if len(group) > 1 else ""
        notes = {_short_note(row) for row in group}
        cells.append((
            ", ".join(paths) or f"{_file_and_line(group[0]) or '-'}{count}",
            kind,
            shapes.pop() if len(shapes) == 1 else "",
            notes.pop() if len(notes) == 1 else hidden_note,
            _format_bytes(sum(sizes)) if sizes else "",
        ))  # fmt: skip
    hidden = len(cells) - _MAX_ROWS
    return cells if hidden <= 1 else [*cells[:_MAX_ROWS], (f"and {hidden} more", "", "", "", "")]


def _short_note(entry: PlanEntry) -> str:
    """The residual of an entry's input, or the reason why it is not quantized."""
    return re.sub(r", [\d.]+ B/element", "", entry.residual) if entry.is_quantized else entry.reason


def _hide_numbers(text: str) -> str:
    """A text with "*" for the numbers in the paths that it names."""
    return re.sub(r"\d+(?=/)|(?<=/)\d+", "*", text)


def _file_and_line(entry: PlanEntry) -> str:
    """The file and line of an entry."""
    return os.path.basename(entry.line.partition(" (")[0])


def _cells(entry: PlanEntry) -> tuple[str, ...]:
    return (
        entry.path or "-",
        str(entry.shape or "-").replace(" ", ""),
        _file_and_line(entry) or "-",
        "-" if entry.residual_bytes is None else _format_bytes(entry.residual_bytes),
        "-" if entry.gain is None else f"{1e6 * entry.gain * entry.runs_per_step:+,.1f}",
        entry.kind,
        *(entry.products.values() or ("-",) * 3),
        entry.residual,
        entry.reason,
    )


def _counted(items: Sequence[Any], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _head_note(entries: Sequence[PlanEntry]) -> str:
    """A note on the output heads that stay in 16 bits by default, and how to choose 8 bits; "" if there are none."""
    heads = [entry.path for entry in entries if entry.choice is not None and entry.choice.is_unquantized_head]
    if not heads or not any(entry.linear for entry in entries):
        return ""
    return (
        f"output heads in 16 bits: {', '.join(fold_paths(heads)[:_MAX_LISTED])}. A recipe with "
        "head=fp8jax.recipes.HEAD runs them in 8 bits (docs/howto/functions.md: speed and loss)"
    )


def _rematerialization_note(entries: Sequence[PlanEntry]) -> str:
    """The number of products that run again in the backward pass, and a policy that saves them; "" if none does."""
    products = [entry for entry in entries if entry.linear is not None]
    count = sum(entry.is_rematerialized for entry in products)
    if not count:
        return ""
    return (
        f"{count} of {len(products)} matmuls are recomputed in the backward pass under your jax.checkpoint. Pass "
        "policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable to it, or remove it: norms and activations "
        "of a recipe with a context save only codes"
    )


def residual_bytes_note(entries: Sequence[PlanEntry]) -> str:
    """The bytes that a plan saves of inputs for the backward pass; "" if they are unknown."""
    measured = [entry for entry in entries if entry.residual_bytes is not None]
    total = sum(entry.residual_bytes or 0 for entry in measured)
    unquantized_total = sum(entry.unquantized_residual_bytes or 0 for entry in measured)
    if not total:
        return ""
    prefix = "outside of jax.checkpoint, " if any(entry.is_rematerialized for entry in entries) else ""
    note = f"memory: {prefix}the backward pass needs {_format_bytes(total)} of saved inputs"
    if total <= unquantized_total < 1.05 * total:
        return f"{note}, as much as without the recipe"
    factor = f"{unquantized_total / total:.2g} times as much"
    return (
        f"{note}; without the recipe at least {_format_bytes(unquantized_total)} ({factor})"
        if unquantized_total
        else note
    )


def exchange_note(graph: Graph) -> str:
    """The bytes of tokens that a device sends to the devices of their experts and back; "" if it sends none."""
    total = _exchanged_bytes(graph, jax.sharding.get_abstract_mesh().shape)
    if not total:
        return ""
    return (
        f"devices: each sends {_format_bytes(total)} of tokens to the devices of their experts and back in a forward "
        "pass, if all receive equally many, and as much in the backward pass"
    )


def _exchanged_bytes(graph: Graph, mesh_sizes: Mapping[str, int]) -> float:
    """The bytes that one run of a program sends."""
    total = 0.0
    for node in graph.walk():
        sizes = {**mesh_sizes, **primitives.mesh_sizes(node.eqn)}
        inner = sum(_exchanged_bytes(body, sizes) for body in node.bodies)
        length = node.eqn.params["length"] if node.kind == "scan" else 1
        total += length * inner + primitives.sent_bytes(node.eqn, mesh_sizes)
    return total


def gains_note(entries: Sequence[PlanEntry]) -> str:
    """The time that a plan's products gain in a step, and which of them lose; "" if there are no rates."""
    rated = [entry for entry in entries if entry.rates_device]
    if not rated:
        return ""
    total = 1e3 * sum((entry.gain or 0.0) * entry.runs_per_step for entry in rated)
    gaining = [entry for entry in rated if entry.gain is not None]
    verb = "cost" if total < 0 else "save"
    note = f"speed, estimated for {rated[0].rates_device}: 8 bits {verb} about {abs(total):.2g} ms per step"
    note = f"{note} in {_counted(gaining, 'matmul')}."
    losing = [entry for entry in rated if entry.is_slower]
    if jax.default_backend() == "cpu":
        note = f"{note} A CPU has no 8-bit matmuls: codes save only memory there."
    if not losing:
        return note
    paths = fold_paths([entry.path or "the matrix" for entry in losing])
    more = f" and {len(paths) - _MAX_LISTED} more" if len(paths) > _MAX_LISTED else ""
    tokens = " or ".join(f"{n:,}" for n in sorted({entry.tokens for entry in losing}))
    verb = "gains" if len({entry.path for entry in losing}) == 1 else "gain"
    rule = "fp8jax.recipes.for_shapes(recipe) keeps them in 16 bits"
    return f"{note} {', '.join(paths[:_MAX_LISTED])}{more} {verb} nothing at {tokens} tokens: {rule}"


def list_rows(
    graph: Graph, schedule: Schedule, rules: RuleSet, call_info: CallInfo, entries: Mapping[Node, PlanEntry]
) -> tuple[PlanEntry, ...]:
    """The rows of a planned program, in order: the entries with their bytes, and the parts that the rules do not
    cover."""
    sizes, plain_sizes = (dict(_residual_bytes(graph, entries, count)) for count in (_operation_bytes, _plain_bytes))
    rows = unplanned.find(graph, schedule, rules, call_info, entries)
    rows |= {
        node: entry._replace(residual_bytes=sizes.get(node), unquantized_residual_bytes=plain_sizes.get(node))
        for node, entry in entries.items()
    }
    return tuple(rows[node] for node in walk_calls(graph.nodes, lambda node: True) if node in rows)


# The bytes of one run of an operation; None if they are unknown. Shared arrays are added to a set.
_CountBytes = Callable[[Any, PlanEntry, set[Any]], float | None]


def _residual_bytes(
    graph: Graph, entries: Mapping[Node, PlanEntry], count_bytes: _CountBytes, num_runs: int = 1
) -> Iterator[tuple[Node, int]]:
    """The bytes that each operation saves of its inputs, in all iterations of the loops around it.

    Products that share an input count it once. Parameters do not count. Nothing under a `jax.checkpoint` is listed.
    """
    counted = set[Any]()
    for node in graph.walk():
        if node in entries and node.operation is not None and all(isinstance(n, int) for n in node.results[0].shape):
            size = count_bytes(node.operation, entries[node], counted)
            if size is not None:
                yield node, int(num_runs * size)
        if not primitives.rematerializes_products(node.eqn):
            for body in node.bodies:
                yield from _residual_bytes(body, entries, count_bytes, num_runs * node.num_runs(body))


def _operation_bytes(operation: Any, entry: PlanEntry, counted: set[Any]) -> float | None:
    """The bytes that one run of an operation saves with its recipe."""
    if isinstance(operation, LossOperation):
        return _value_bytes(operation.data, None)  # the gradient of the input
    if entry.frozen is not None and entry.frozen.rank:
        return _input_bytes(operation, counted)  # the adapter reads the input as it is
    if entry.is_product and entry.frozen is None:
        spec = operation.linear.residual_spec()
        if entry.has_saved_input or entry.recomputes_input or (operation.canonical_data, spec) in counted:
            return 0
        counted.add((operation.canonical_data, spec))
        data = operation.saved_tokens if isinstance(operation, RaggedOperation) else operation.data
        return _value_bytes(data, spec, operation.num_inputs)
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


def _plain_bytes(operation: Any, entry: PlanEntry, counted: set[Any]) -> float | None:
    """The bytes that one run of an operation saves without a recipe, at least."""
    if entry.is_product and (entry.frozen is None or entry.frozen.rank):
        return 0 if entry.frozen is None and entry.has_saved_input else _input_bytes(operation, counted)
    if isinstance(operation, NormOperation):
        return _value_bytes(operation.x, None)
    if isinstance(operation, ActivationOperation):
        # The product of two also needs the activated gate.
        saved = [operation.gate] if operation.up is None else [operation.gate, operation.up, operation.gate]
        return sum(_value_bytes(value, None) for value in saved)
    return None


def _input_bytes(operation: Any, counted: set[Any]) -> float:
    """The bytes of a product's unquantized input; 0 if an earlier product has counted it."""
    if operation.canonical_data in counted:
        return 0
    counted.add(operation.canonical_data)
    return _value_bytes(operation.data, None)


def _value_bytes(value: Value, spec: QuantSpec | None, num_columns: int | None = None) -> float:
    """The bytes of an array, or of its codes and scales as a matrix with that many columns."""
    size = math.prod(value.shape)
    if spec is None or not size:
        return size * value.dtype.itemsize
    return spec.nbytes(value.shape if num_columns is None else (size // num_columns, num_columns))
