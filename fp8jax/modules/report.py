"""What `explain` returns: a report on a model, layer by layer, and on what its program really multiplies."""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from fp8jax.core.recipe import Context, Linear, describe_folding
from fp8jax.core.tables import sentence, table
from fp8jax.modules.program import Program
from fp8jax.rewrite.frozen_params import FrozenInfo


@dataclasses.dataclass(frozen=True)
class Layer:
    """What becomes of a layer.

    Attributes:
        path: its place in the model and, joined by "/", in the tree of its parameters.
        kind: name of its class.
        kernel: shape of its kernel or embedding, stacked layers included; None if it has none.
        linear: what its products compute in; None where it is left alone.
        reason: the rule that matched, or why it is left alone.
        dtype: what it computes in where nothing is quantized; None if its inputs say.
        frozen: what stands in the place of its weight, which is not trained.
    """

    path: str
    kind: str
    kernel: tuple[int, ...] | None
    linear: Linear | None
    reason: str
    dtype: str | None = None
    frozen: FrozenInfo | None = None

    @property
    def products(self) -> dict[str, str]:
        """What the forward, dgrad and wgrad product multiply; empty where the layer is left alone."""
        if self.linear is None:
            return {}
        unquantized_dtype = self.dtype or "as written"
        if self.frozen is not None:
            pairs = {"forward": "x", "dgrad": "dy"}
            weight = self.frozen.spec or unquantized_dtype
            return {k: f"{self.linear.spec(v) or unquantized_dtype} x {weight}" for k, v in pairs.items()} | {
                "wgrad": "-"
            }
        return {
            name: f"{left or unquantized_dtype} x {right or unquantized_dtype}" if left or right else unquantized_dtype
            for name, (left, right) in self.linear.matmul_operands().items()
        }

    @property
    def x_residual(self) -> tuple[str, float | None]:
        """What is kept of the input for the backward pass, and its bytes an element, None where unknown."""
        spec = self.linear.residual_spec() if self.linear and self.frozen is None else None
        if self.frozen is not None and not self.frozen.rank:
            return "nothing", 0.0
        if spec is not None:
            return str(spec), spec.bytes_per_element
        return self.dtype or "as written", float(jnp.dtype(self.dtype).itemsize) if self.dtype else None

    @property
    def token_spanning_spec(self) -> str | None:
        """The spec of the forward input if a scale of it is shared by tokens, which lets later ones change earlier."""
        spec = self.linear.spec("x") if self.linear else None
        spans = spec is not None and spec.outer_scale != "none" and spec.block_shape((2, 2))[0] > 1
        return str(spec) if spans else None


@dataclasses.dataclass(frozen=True)
class ContextEntry:
    """What becomes of a norm, of an activation between layers of a module, or of its layers that read no known one.

    Attributes:
        path: its place in the model, joined by "/".
        kind: name of its class.
        computation: "norm", or the expression that it was recognised by; None where nothing is known of it.
        context: what it keeps; None where it is left alone.
        reason: the rule that matched, or why it is left alone.
        attention_layers: the layers that keep no copy of their input, because attention does.
        readers: of a norm, what reads its result without quantizing it: a layer, or a product of none, and the dtype.
        has_only_listed_readers: nothing else is known to read it.
    """

    path: str
    kind: str
    computation: str | None
    context: Context | None
    reason: str
    attention_layers: tuple[str, ...] = ()
    readers: tuple[tuple[str, str], ...] = ()
    has_only_listed_readers: bool = False

    @property
    def residuals(self) -> str:
        """What is kept for the backward pass, and what the layers keep that read the result."""
        if self.attention_layers:
            return f"{', '.join(self.attention_layers)}: no copy of what attention keeps"
        if self.context is None or self.computation is None:
            return "as written"
        quantized = self.context.lean and not self.has_only_listed_readers
        lean = "; quantized layers that read its result keep nothing of it" if quantized else ""
        others = "".join(f"; {reader} keeps it in {dtype}" for reader, dtype in self.readers)
        bound = "; scales from bounds" if self.context.scales == "bound" else ""
        return f"{self.context.spec}{lean}{others}{bound}"


@dataclasses.dataclass(frozen=True)
class Report:
    """What `explain` found; `str(report)` is a table.

    Attributes:
        layers: the linear layers, embeddings, convolutions and attentions of the model, and whatever else has matrices.
        program: the products of a forward and backward pass; None without sample inputs.
        context_entries: norms, activations and attentions, where the rules say what these keep.
        notes: what should be looked at: output heads and routers that are quantized, and matrices that are not known.
        figures: sentences on what stays in 16 bits, is kept and is gained.
        unplanned_entries: norms, activations and products without a parameter that run as written, whatever the rules
            say.
    """

    layers: tuple[Layer, ...]
    program: Program | None = None
    context_entries: tuple[ContextEntry, ...] = ()
    notes: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    unplanned_entries: tuple[ContextEntry, ...] = ()

    @property
    def quantized_layers(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.linear is not None)

    @property
    def skipped_layers(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.linear is None)

    @property
    def leaking_layers(self) -> tuple[Layer, ...]:
        """Layers that let the values of later tokens into the scales of earlier ones."""
        return tuple(layer for layer in self.layers if layer.token_spanning_spec)

    def __str__(self) -> str:
        head = ("layer", "kind", "kernel", "forward", "dgrad", "wgrad", "saved input", "bytes/element", "chosen by")
        rows: list[tuple[str, ...]] = [head]
        for layer in self.quantized_layers:
            saved, size = layer.x_residual
            size_text = "?" if size is None else f"{size:.4g}"
            rows.append((*_name_columns(layer), *layer.products.values(), saved, size_text, layer.reason))
        sections = [table(rows, names=3) if rows[1:] else "no layer is quantized", *map(sentence, self._remarks())]
        if self.context_entries or self.unplanned_entries:
            rows = [("norm, activation or attention", "kind", "computes", "keeps", "chosen by")]
            rows += [
                (p.path or "-", p.kind, p.computation or "-", p.residuals, p.reason)
                for p in self.context_entries + self.unplanned_entries
            ]
            sections.append(table(rows, names=3))
        if self.skipped_layers:
            rows = [
                ("left alone", "kind", "kernel", "why"),
                *((*_name_columns(x), x.reason) for x in self.skipped_layers),
            ]
            sections.append(table(rows, names=3))
        sections += [sentence(f"note: {note}") for note in self.notes]
        sections += [sentence(figure) for figure in self.figures]
        return "\n\n".join([*sections, *([str(self.program)] if self.program else [])])

    def _remarks(self) -> Iterator[str]:
        """What of the layers needs a sentence."""
        if self.leaking_layers:
            specs = ", ".join(sorted({str(layer.token_spanning_spec) for layer in self.leaking_layers}))
            yield (
                f"scales that span tokens: the inputs of {len(self.leaking_layers)} layers ({specs}). Later tokens "
                "change the scales of earlier ones: evaluate token by token, or take a granularity of tokens or groups."
            )
        if folds := dict.fromkeys(
            spec for layer in self.quantized_layers if layer.linear for spec in layer.linear.folded_specs
        ):
            yield describe_folding(folds)
        if any(part.context is not None and part.context.lean for part in self.context_entries):
            yield "saved inputs: quantized layers that read the result of a lean norm or activation (below) keep none."


def _name_columns(layer: Layer) -> tuple[str, str, str]:
    return layer.path or "-", layer.kind, str(layer.kernel or "-").replace(" ", "")
