"""Measured figures in pages: looked up in results/CARD/NAME.json, with the card, and a link to the page of all rows."""

import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import fp8jax
from experiments.results import figures, report

ROOT = pathlib.Path(__file__).parents[2]
# What a recipe's arm is called in the benchmark of layers and in the count of kept bytes, where not by its own name.
LAYER = {"coat": "COAT, lean", "coat_fast": "COAT, lean, bounded scales, weights held"}
KEPT = {"coat": "COAT, lean"}


@functools.cache
def results() -> Mapping[str, Mapping[str, Any]]:
    """All results files, by name and card."""
    return report.read(ROOT / "results")


# Studies of the errors of presets, the largest model first.
ERRORS = ("recipe_errors_13m", "recipe_errors_small")
# What model each study of losses trains.
LOSSES = {
    "recipe_parity": "65 M",
    "recipe_parity_block_scaled": "13 M",
    "recipe_parity_experts": "185 M with experts",
}


class Look(NamedTuple):
    """A ratio that is measured of recipes.

    Attributes:
        what: what was measured, against what.
        bench: the results file.
        rows: its rows: a selector of `experiments.results.figures`, with {} for the name of the recipe's arm.
        names: of arms that are not called as their recipe.
        form: how it is written.
    """

    what: str
    bench: str
    rows: str
    names: Mapping[str, str] = {}
    form: str = "{:.2f}x bf16"


STEP, LESS = "{} > step > bf16, recomputed", "{:.2f}x less than bf16"
LOOKS = {
    "step": Look("Training step, Llama 1.1B: speed", "step", f"{STEP} > 1b, one GPU"),
    "memory": Look("Training step, Llama 1.1B: memory", "step", "{} > memory > bf16, recomputed > 1b, one GPU",
                   form=LESS),
    "more": Look("Training step, Llama 1.1B: speed", "step_more", f"{STEP} > 1b, one GPU"),
    "data": Look("The same step on two GPUs, data parallel: speed", "step_two", f"{STEP} > 1b, data parallel over 2"),
    "fsdp": Look("The same step on two GPUs, FSDP: speed", "step_two", f"{STEP} > 1b, FSDP over 2"),
    "7b": Look("Training step, Llama 7B, two GPUs, FSDP: speed", "step_7b", f"{STEP} > 7b, FSDP over 2, 4 x"),
    "layer": Look("One Llama-7B layer, forward and backward: speed", "layer", "{} > time > bf16 > batch 4", LAYER),
    "kept": Look("Residuals of one layer: bytes", "coat_memory", "{} > total, recomputed", KEPT, LESS),
}  # fmt: skip


def by_card(look: Look, recipe: str) -> dict[str, float]:
    """The figure on each card that has it."""
    selector = look.rows.format(look.names.get(recipe, recipe))
    found = {card: figures.rows(result, "ratio", selector) for card, result in results().get(look.bench, {}).items()}
    return {card: float(ratios[0]) for card, ratios in found.items() if len(ratios) == 1}


def label(card: str) -> str:
    """The name of a card, with the number of GPUs if there are several."""
    name, _, count = card.upper().partition("X")
    return f"{count} x {name}" if count else name


def cards(look: Look, recipe: str) -> Iterator[str]:
    """The figure on each card that has it, with a link to its page."""
    for card, figure in by_card(look, recipe).items():
        device = "" if card == "cpu" else f" ({label(card)})"
        yield f"[{look.form.format(figure)}{device}](/results/{look.bench}.md)"


def _losses(recipe: str) -> Iterator[tuple[str, str]]:
    for bench, model in LOSSES.items():
        for card, result in results().get(bench, {}).items():
            rows = {tuple(r["pivot"]): r["value"] for r in result["rows"] if r.get("pivot")}
            told, has_interval = [], False
            for loss in ("training loss", "validation loss"):
                above, half = rows.get((recipe, f"{loss}: % above")), rows.get((recipe, f"± ({loss})"))
                has_interval |= half is not None
                if above is not None:
                    told.append(f"{above:+.2f}{'' if half is None else f' ± {half:.2f}'} % ({loss.split()[0]})")
            if told:
                # Seeds that bf16 lacks are not compared.
                seeds = min(rows[recipe, "seeds"], rows["bf16", "seeds"])
                of_seeds = f"{seeds:.0f} seeds, simultaneous 95 % interval" if has_interval else "one seed, no interval"
                yield (
                    f"Loss relative to bf16, {model}, {of_seeds}",
                    f"[{', '.join(told)} ({card.upper()})](/results/{bench}.md)",
                )


def measured(recipe: str) -> str:
    """A table of all that is measured of a preset."""
    rows = [(look.what, list(cards(look, recipe))) for look in LOOKS.values()]
    lines = [f"| {what} | {', '.join(found)} |" for what, found in rows if found]
    lines += [f"| {what} | {found} |" for what, found in _losses(recipe)]
    if not lines:
        return "This preset has not been measured on a GPU. {doc}`/results/index` lists what has been."
    return "\n".join(["| measurement | figure (card) |", "|---|---:|", *lines])


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
    Choice(HOPPER, "nothing in particular", "fast", ("step", "memory"), "no input scale spans tokens; no state"),
    Choice(HOPPER, "memory", "coat", ("step", "memory"), "fewest bytes of residuals"),
    Choice(HOPPER, "time", "coat_fast", ("step", "layer"), "fewest passes over memory"),
    Choice(HOPPER, "communication", "fp8_lm_two_phase", ("7b",), "weights and gradients are exchanged in 8 bits"),
    Choice(HOPPER, "time, but only matmuls may change", "moss", ("step",), "norms and activations stay in bf16"),
    Choice("Blackwell: B200", "time", "mxfp8", (), "cuDNN multiplies it; compiled, not run by us"),
    Choice("Blackwell: RTX PRO 6000, RTX 50", "memory or time", "coat", (), "per-tensor FP8 matmuls in cuBLASLt"),
    Choice("Ada: L4, L40S, RTX 40", "memory or time", "coat", (), "per-tensor FP8 matmuls in cuBLASLt"),
    Choice("Ampere: RTX 30, A10", "time", "int8_fallback", (), "int8 blocks, outliers in 16 bits"),
    Choice("Ampere: A100", "memory", "coat_optimizer", (), "no FP8 there; only 8-bit optimizer states"),
    Choice("any other, TPU, CPU", "memory", "coat_optimizer", (), "only 8-bit optimizer states"),
)  # fmt: skip


def choose() -> str:
    """The table of recipes by GPU and limiting resource."""
    lines = [f"| {c.gpu} | {c.short} | [`{c.recipe}`](/recipes/{c.recipe}.md) | {c.why} |" for c in CHOICES]
    return "\n".join(["| GPU | limited by | recipe | why |", "|---|---|---|---|", *lines])


def chosen() -> str:
    """The figures of the recipes of `choose`, a column for each card."""
    rows = [(c.recipe, LOOKS[name], by_card(LOOKS[name], c.recipe)) for c in CHOICES for name in c.figures]
    shown = sorted({card for _, _, found in rows for card in found if card != "cpu"})
    lines = []
    for recipe, look, found in rows:
        cells = [f"[{look.form.format(found[c])}](/results/{look.bench}.md)" if c in found else "-" for c in shown]
        if any(cell != "-" for cell in cells):
            lines.append(f"| `{recipe}` | {look.what} | {' | '.join(cells)} |")
    head = f"| recipe | figure | {' | '.join(map(label, shown))} |"
    return "\n".join([head, f"|---|---|{'---:|' * len(shown)}", *lines])


def first() -> str:
    """README's first table."""
    return figures.with_figures(figures.read("docs.toml")["first_screen"], results())


def peers() -> str:
    """Errors of 8-bit AdamWs side by side, of the page that `experiments.bench peers` fills."""
    page = (ROOT / "results" / "pages" / "peers.md").read_text()
    return "\n\n".join(f"**{part.partition(chr(10))[0].strip()}**\n\n{part.partition(chr(10))[2].strip()}"
                       for part in page.split("\n## ")[1:4])  # fmt: skip


def errors() -> str:
    """The figure and the table of the errors of presets while a model trains, of the largest model that was run."""
    bench = next((name for name in ERRORS if name in results()), None)
    if bench is None:
        return "No run of this study is in `results/` yet."
    card, result = next(iter(results()[bench].items()))
    rows = [row for row in result["rows"] if row.get("pivot")]
    return "\n\n".join([
        f"![Loss and SNR of each preset, by role and layer, over the steps](../../results/{card}/{bench}.png)",
        report.pivot_rows(rows), f"Measured on: {label(card)}. All rows: {{doc}}`/results/{bench}`.",
    ])  # fmt: skip


def presets() -> str:
    """All presets with the first sentence of their docstrings."""
    lines = []
    for name in fp8jax.recipes.NAMES:
        doc = (getattr(fp8jax.recipes, name).__doc__ or "").strip().split("\n\n")[0]
        lines.append(f"| [`{name}`](/recipes/{name}.md) | {' '.join(doc.split())} |")
    return "\n".join(["| preset | summary |", "|---|---|", *lines])


MADE: dict[str, Callable[..., str]] = {
    "measured": measured, "stored": stored, "device": device, "choose": choose, "chosen": chosen, "first": first,
    "peers": peers, "errors": errors, "presets": presets,
}  # fmt: skip
