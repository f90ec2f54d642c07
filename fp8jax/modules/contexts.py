"""What becomes of the non-linear parts of a Flax model: its norms, activations and, in NNX, attentions."""

import collections
import dataclasses
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx

from fp8jax.core.recipe import Context
from fp8jax.modules import blocks, norms
from fp8jax.modules.blocks import BlockForms
from fp8jax.modules.reading import Reading
from fp8jax.rewrite.rules import LayerChoice, Ordered, Rules, between, ordered


class Told(NamedTuple):
    """What calls of modules have told, by their paths: of activations, and of layers that read what attention keeps."""

    blocks: dict[str, BlockForms]
    residuals: dict[str, set[str]]


@dataclasses.dataclass(frozen=True)
class ContextEntry:
    """What becomes of a norm, of an activation between layers of a module, or of its layers that read no known one.

    Attributes:
        path: its place in the model, joined by "/".
        kind: name of its class.
        computes: "norm", or the expression that it was recognised by; None where nothing is known of it.
        context: what it keeps; None where it is left alone.
        reason: the rule that matched, or why it is left alone.
        attention: the layers that keep no copy of their input, because attention does.
        readers: of a norm, what reads its result without quantizing it: a layer, or a product of none, and the dtype.
        alone: nothing else is known to read it.
    """

    path: str
    kind: str
    computes: str | None
    context: Context | None
    reason: str
    attention: tuple[str, ...] = ()
    readers: tuple[tuple[str, str], ...] = ()
    alone: bool = False

    @property
    def keeps(self) -> str:
        """What is kept for the backward pass, and what the layers keep that read the result."""
        if self.attention:
            return f"{', '.join(self.attention)}: no copy of what attention keeps"
        if self.context is None or self.computes is None:
            return "as written"
        quantized = self.context.lean and not self.alone
        lean = "; quantized layers that read its result keep nothing of it" if quantized else ""
        others = "".join(f"; {reader} keeps it in {dtype}" for reader, dtype in self.readers)
        bound = "; scales from bounds" if self.context.scales == "bound" else ""
        return f"{self.context.spec}{lean}{others}{bound}"


def norm_paths(modules: dict[str, Any], rules: Rules) -> list[str]:
    """The norms that rules choose for."""
    known = (*norms.LAYERS, *norms.LINEN_LAYERS)
    return [path for path, m in modules.items() if isinstance(m, known)] if ordered(rules).contexts else []


def plan(
    modules: dict[str, Any],
    rules: Rules,
    told: Told | None = None,
    *,
    heads: Mapping[str, str] = types.MappingProxyType({}),
    reading: Reading | None = None,
    replace: bool = False,
) -> tuple[ContextEntry, ...]:
    """What the rules make of the non-linear parts of a model.

    A norm follows the rule of its own path, an activation that of the layer that reads its result.

    Args:
        modules: all modules of the model, by path.
        rules: as `fp8jax.nnx.quantize` takes them.
        told: what a call of the model has told; None before it has run.
        heads: layers that a recipe leaves alone, as `Ordered.choice` takes them.
        reading: what a program of the model has told of norms written by hand; None before it has run.
        replace: whether to do so, in place, before linear layers are replaced.
    """
    each, parts, reading = ordered(rules), list[ContextEntry](), reading or Reading()
    unseen = _unseen(modules, each, heads) if told else collections.defaultdict[str, list[str]](list)
    for path, module in modules.items() if each.contexts or (replace and each.between) else ():
        choices: dict[str, LayerChoice] = {}
        kind, block = type(module).__name__, (told.blocks if told else {}).get(path, BlockForms())
        of = block.forms
        if isinstance(module, (*norms.LAYERS, *norms.LINEN_LAYERS)):
            choice, why = each.choice(path), norms.why_not(module)
            context = choice.context if choice.context.saved and why is None else None
            others = _unquantized(modules, each, heads, reading.readers.get(path, {}))
            alone = bool(others) and len(others) == len(reading.readers[path])
            parts.append(ContextEntry(path, kind, "norm", context, why or choice.reason, (), others, alone))
            if replace and why is None and between(choice.recipe):
                norms.replace(module, choice.recipe)
        if path in reading.norms and not isinstance(module, (*norms.LAYERS, *norms.LINEN_LAYERS)):
            inner = any(other != path and other.startswith(f"{path}/" if path else "") for other in modules)
            parts.append(ContextEntry(path, kind, None, None, norms.RETURNED if inner else norms.OWN_CLASS))
        inside = [p for p in sorted(reading.normed) if p.rpartition("/")[0] == path and _context(each.choice(p, heads))]
        if inside and path not in inside:
            read = " and ".join(p.rpartition("/")[2] for p in inside) + (" reads" if len(inside) == 1 else " read")
            parts.append(ContextEntry(path, kind, None, None, f"{read} a norm written by hand: {norms.HOOK} for it"))
        if len(unseen[path]) > 1 and not block.forms and not block.gaps:
            classes = ", ".join(sorted(set(unseen[path])))
            reason = f"no activation is looked for between layers of {classes}; if there is one, {blocks.HOOK}"
            parts.append(ContextEntry(path, kind, None, None, reason))
        for gap in block.gaps:
            parts.append(ContextEntry(path, kind, None, None, f"{gap}: {gap.advice}"))
        for form in of:
            choice = choices.get(form.down) or each.choice("/".join(filter(None, (path, form.down))), heads)
            parts.append(ContextEntry(path, kind, str(form), _context(choice), choice.reason))
    return tuple(parts)


def _unquantized(
    modules: dict[str, Any], rules: Ordered, heads: Mapping[str, str], readers: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """Of what reads a norm, by path and with the dtype, what keeps it unquantized, and the dtype it keeps."""
    found = []
    for path, dtype in readers.items():
        linear = rules.choice(path, heads).linear if path else None
        if linear is None or linear.spec("saved") is None:
            own = getattr(modules.get(path), "dtype", None) if path else None
            found.append((path or "a product of no layer", dtype if own is None else str(jnp.dtype(own))))
    # Inside of a class in `layers=` its own product is quantized, which the program as written does not tell.
    return tuple(entry for entry in found if not (rules.layers and entry[0].startswith("a product of")))


def _unseen(modules: dict[str, Any], rules: Ordered, heads: Mapping[str, str]) -> dict[str, list[str]]:
    """The classes of layers between which no activation is looked for, by the path of the module that holds them."""
    unseen = collections.defaultdict[str, list[str]](list)
    for path, module in modules.items():
        if path and isinstance(module, (nnx.Einsum, nn.Einsum, *rules.layers)) and _context(rules.choice(path, heads)):
            unseen[path.rpartition("/")[0]].append(type(module).__name__)
    return unseen


def _context(choice: LayerChoice) -> Context | None:
    """What is kept of what a layer reads, as far as the rules say so."""
    return choice.context if choice.linear is not None and choice.context.saved else None


def _hint(told: Any) -> str:
    if told is None:
        return "; activations and attention between layers are known in a call: give explain sample inputs"
    return f"; if there is an activation between these layers, {blocks.HOOK}"
