"""Measured figures in pages: looked up in results/CARD/NAME.json, with the card, and a link to the page of all rows."""

import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import fp8jax
from experiments.results import first_screen, lookup, quotes, report

ROOT = pathlib.Path(__file__).parents[2]
# What a recipe's arm is called in the benchmark of layers and in the count of kept bytes, where not by its own name.
LAYER = {"coat": "COAT, lean", "coat_fast": lookup.BOUNDED}
KEPT = {"coat": "COAT, lean"}


@functools.cache
def results() -> Mapping[str, Mapping[str, Any]]:
    """All results files, by name and card."""
    return report.read(ROOT / "results")


class Look(NamedTuple):
    """A figure of a recipe.

    Attributes:
        what: what was measured, against what.
        bench: the results file.
        look: the recipe's name to the figure, of the file's content; None where it has none.
        form: how it is written.
    """

    what: str
    bench: str
    look: Callable[[str, Mapping[str, Any]], float | None]
    form: str = "{:.2f} x"


def _row(impl: str, metric: str, field: str, baseline: str | None = None, case: str = "") -> quotes.Look:
    return quotes.one(impl, metric, field, baseline, case)


def _step(case: str, metric: str = "step") -> Callable[[str, Mapping[str, Any]], float | None]:
    return lambda name, result: _row(name, metric, "ratio", lookup.AGAIN, case)(result)


def _layer(name: str, result: Mapping[str, Any]) -> float | None:
    return _row(LAYER.get(name, name), "time", "ratio", "bf16", "batch 4")(result)


def _kept(name: str, result: Mapping[str, Any]) -> float | None:
    return _row(KEPT.get(name, name), "total, recomputed", "ratio")(result)


LOOKS = {
    "step": Look("A training step of a 1.1 B Llama, speed over bf16 that recomputes", "step", _step(lookup.ONE)),
    "memory": Look("Its memory, times fewer bytes", "step", _step(lookup.ONE, "memory")),
    "more": Look("A training step of a 1.1 B Llama, speed over bf16 that recomputes", "step_more", _step(lookup.ONE)),
    "data": Look("That step on two GPUs, data parallel", "step_two", _step(lookup.DATA)),
    "fsdp": Look("That step on two GPUs, FSDP", "step_two", _step(lookup.FSDP)),
    "7b": Look("A 7 B Llama on two GPUs, FSDP, speed over bf16", "step_7b", _step(lookup.FSDP_7B)),
    "layer": Look("A Llama-7B layer, forward and backward, speed over bf16 as Flax writes it", "layer", _layer),
    "kept": Look("What a layer keeps, times fewer bytes than bf16 that recomputes", "coat_memory", _kept),
}


def cards(look: Look, recipe: str) -> Iterator[str]:
    """The figure on each card that has it, with a link to its page."""
    for card, result in results().get(look.bench, {}).items():
        found = look.look(recipe, result)
        if found is not None:
            of = "" if card == "cpu" else f" ({card.upper()})"
            yield f"[{look.form.format(found)}{of}](/results/{look.bench}.md)"


def _losses(recipe: str) -> Iterator[tuple[str, str]]:
    for card, result in results().get("recipe_parity", {}).items():
        rows = {tuple(r["pivot"]): r["value"] for r in result["rows"] if r.get("pivot")}
        told = []
        for loss in ("training loss", "validation loss"):
            above, half = rows.get((recipe, f"{loss}: % above")), rows.get((recipe, f"± ({loss})"))
            if above is not None and half is not None:
                told.append(f"{above:+.2f} ± {half:.2f} % ({loss.split()[0]})")
        if told:
            yield (
                f"Loss from bf16's, 95 % interval of all recipes together, 65 M, {rows[recipe, 'seeds']:.0f} seeds",
                f"[{', '.join(told)} ({card.upper()})](/results/recipe_parity.md)",
            )


def measured(recipe: str) -> str:
    """A table of all that is measured of a preset."""
    rows = [(look.what, list(cards(look, recipe))) for look in LOOKS.values()]
    lines = [f"| {what} | {', '.join(found)} |" for what, found in rows if found]
    lines += [f"| {what} | {found} |" for what, found in _losses(recipe)]
    if not lines:
        return "Nothing of this preset alone is measured on a GPU yet; {doc}`/results/index` lists what is."
    return "\n".join(["| measured | |", "|---|---:|", *lines])


def stored(recipe: str) -> str:
    """What a preset stores where: `Recipe.explain()`."""
    return f"```text\n{fp8jax.recipes.get(recipe).explain()}\n```"


def device(capability: str) -> str:
    """What `recipe="auto"` takes for a compute capability."""
    found = fp8jax.recipes.device(int(capability))
    return f"`{found.recipe}`: {' '.join(found.description.split())}."


class Choice(NamedTuple):
    """A line of the table of the page Choose."""

    gpu: str
    short: str
    recipe: str
    figures: tuple[str, ...]
    why: str


HOPPER = "Hopper: H100, H200"
CHOICES = (
    Choice(HOPPER, "nothing in particular", "fast", ("step", "memory"), "no scale of an input spans tokens, no state"),
    Choice(HOPPER, "memory", "coat", ("step", "memory", "kept"), "keeps fewest bytes for the backward pass"),
    Choice(HOPPER, "time", "coat_fast", ("step", "layer"), "fewest passes over memory"),
    Choice(HOPPER, "communication", "fp8_lm_two_phase", ("7b",), "weights and gradients travel as codes"),
    Choice(HOPPER, "trust: nothing but products changes", "moss", ("step",), "norms and activations stay in bf16"),
    Choice("Blackwell: B200, RTX PRO 6000", "memory or time", "fast", (), "our kernels are Hopper's: XLA computes"),
    Choice("Ada: L4, L40S, RTX 40", "memory or time", "coat", (), "products with one scale a tensor, by cuBLASLt"),
    Choice("Ampere: RTX 30, A10", "time", "int8_fallback", (), "int8 blocks, outliers in 16 bits"),
    Choice("Ampere: A100", "memory", "coat_optimizer", (), "no FP8 there; optimizer states alone"),
    Choice("any other, and TPU or CPU", "memory", "coat_optimizer", (), "optimizer states alone"),
)  # fmt: skip


def choose() -> str:
    """The table GPU by what is short to recipe, with our figures."""
    lines = []
    for choice in CHOICES:
        found = [f"{name}: {figure}" for name in choice.figures for figure in cards(LOOKS[name], choice.recipe)]
        told = "<br>".join(found) or "not measured by us"
        link = f"[`{choice.recipe}`](/recipes/{choice.recipe}.md)"
        lines.append(f"| {choice.gpu} | {choice.short} | {link} | {told} | {choice.why} |")
    return "\n".join(["| GPU | what is short | recipe | measured | why |", "|---|---|---|---|---|", *lines])


def first() -> str:
    """README's first table."""
    return first_screen.table(results())


def peers() -> str:
    """Errors of 8-bit AdamWs side by side, of the page that `experiments.bench peers` fills."""
    page = (ROOT / "results" / "pages" / "peers.md").read_text()
    return "\n\n".join(f"**{part.partition(chr(10))[0].strip()}**\n\n{part.partition(chr(10))[2].strip()}"
                       for part in page.split("\n## ")[1:4])  # fmt: skip


def presets() -> str:
    """All presets with the first sentence of their docstrings."""
    lines = []
    for name in fp8jax.recipes.NAMES:
        doc = (getattr(fp8jax.recipes, name).__doc__ or "").strip().split("\n\n")[0]
        lines.append(f"| [`{name}`](/recipes/{name}.md) | {' '.join(doc.split())} |")
    return "\n".join(["| preset | |", "|---|---|", *lines])


MADE: dict[str, Callable[..., str]] = {
    "measured": measured, "stored": stored, "device": device, "choose": choose, "first": first, "peers": peers,
    "presets": presets,
}  # fmt: skip
