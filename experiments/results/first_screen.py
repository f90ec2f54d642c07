"""README's first table and picture: steps of users' models beside torch.compile's, on one card."""

import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from experiments.results import figures

Result = Mapping[str, Any]
BASE, OURS = "bf16", ("coat", "coat_fast")
# Name in a results file to the column's head.
COLUMNS = {"torch bf16": "torch.compile bf16", "torchao tensorwise": "torchao float8 tensorwise",
           "torchao rowwise": "torchao float8 rowwise", BASE: "JAX bf16", "coat": "`coat`",
           "coat_fast": "`coat_fast`"}  # fmt: skip


class Headline(NamedTuple):
    """A row of the table.

    Attributes:
        label: what is measured.
        bench: name of the results file.
        case: that the rows' cases begin with.
        metric: in that file.
        unit: behind each figure.
        digits: behind the point.
    """

    label: str
    bench: str
    case: str
    metric: str = "step"
    unit: str = "ms"
    digits: int = 0


LINES = (
    Headline("Llama 1.1B, 8 x 2,048 tokens", "models", "Llama 1.1B"),
    Headline("Llama 1.1B, waiting for the loss of each step", "models", "Llama 1.1B", "step, synchronised"),
    Headline("Llama 1.1B, temporary memory", "models", "Llama 1.1B", "temporaries", "GB", 1),
    Headline("GPT-2 350M, 16 x 1,024 tokens", "models_gpt350m", "GPT-2 350M"),
    Headline("ViT-L/16, 256 images", "models_vitl", "ViT-L/16"),
)


def _figures(line: Headline, results: Mapping[str, Mapping[str, Result]]) -> dict[str, dict[str, str | None]]:
    """Return the cells of a line by card and column, for cards with bf16 and ours."""
    cards = {}
    for card, result in results.get(line.bench, {}).items():
        form = f"{{{{[value {{}} > {line.metric} > > {line.case}]:.{line.digits}f}}}} {line.unit}"
        cards[card] = {name: figures.filled(form.format(name), result) for name in COLUMNS}
    return {card: cells for card, cells in cards.items() if cells[BASE] and any(cells[name] for name in OURS)}


def _fullest(cards: Mapping[str, Mapping[str, str | None]], results: Mapping[str, Result]) -> str:
    return max(cards, key=lambda card: (sum(map(bool, cards[card].values())), results[card]["date"]))


def first_card(results: Mapping[str, Mapping[str, Result]]) -> str | None:
    """Return the card whose file of the first line has the most figures, or the newest of these; None without files."""
    cards = _figures(LINES[0], results)
    return _fullest(cards, results[LINES[0].bench]) if cards else None


def table(results: Mapping[str, Mapping[str, Result]]) -> str:
    """Return the table in Markdown, and a line that names the commands, and the card and commit of each model.

    Args:
        results: contents of results files by name and card. A line without bf16 or without ours is left out, and so is
            a column without any figure. A line that `first_card` did not measure is of another card, which the last
            line names.
    """
    preferred = first_card(results)
    rows, sources = dict[str, dict[str, str | None]](), dict[str, dict[str, None]]()
    for line in LINES:
        cards = _figures(line, results)
        if not cards:
            continue
        card = preferred if preferred in cards else _fullest(cards, results[line.bench])
        rows[line.label], result = cards[card], results[line.bench][card]
        commits = list(dict.fromkeys(row["commit"] for row in result["rows"]))
        by = commits[0] if len(commits) == 1 else "several commits"
        model = line.label.partition(",")[0]
        sources.setdefault(figures.short(result["command"]), {})[f"{model} ({card.upper()}, {by})"] = None
    shown = [name for name in COLUMNS if any(of[name] for of in rows.values())]
    head = [f"| | {' | '.join(COLUMNS[name] for name in shown)} |", f"|---|{'---:|' * len(shown)}"]
    body = [f"| {label} | {' | '.join(of[name] or '-' for name in shown)} |" for label, of in rows.items()]
    measured = "; ".join(f"`{command}`: {', '.join(models)}" for command, models in sources.items())
    return "\n".join([*head, *body, "", f"A step, forward, backward and AdamW. Measured by {measured}."])


# Rows of the picture, from the top, and its two panels: a metric, its title and the format of a bar's label.
BARS = ("torch bf16", BASE, "torchao tensorwise", "coat_fast")
PANELS = (("step", "training step (ms)", "{:.0f}"), ("temporaries", "temporary memory (GB)", "{:.1f}"))
GREY, GREEN = "#8c959f", "#1a7f37"


def picture(result: Result, card: str) -> str:
    """Return an SVG with the time and memory of a user's Llama, a bar for each implementation that was measured.

    Args:
        result: content of a results file of `experiments.bench models`.
        card: name of the card in the title.

    Raises:
        ValueError: the file has no bar.
    """
    values = {(row["impl"], row["metric"]): row["value"] for row in result["rows"]}
    bars = [name for name in BARS if all((name, metric) in values for metric, _, _ in PANELS)]
    if not bars:
        raise ValueError(f"no bar for README's picture: the file of {card} has none of {', '.join(BARS)}")
    names = [COLUMNS[name].replace("`coat_fast`", "fp8jax coat_fast") for name in bars][::-1]
    # Text stays text, and equal figures give equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fp8jax", "font.size": 9}):
        figure = Figure(figsize=(7.2, 0.42 * len(bars) + 0.75), layout="constrained")
        for axis, (metric, title, form) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS, strict=True):
            heights = [values[name, metric] for name in bars][::-1]
            drawn = axis.barh(names, heights, color=[GREEN if "fp8jax" in name else GREY for name in names])
            axis.bar_label(drawn, [form.format(height) for height in heights], padding=3)
            axis.set_title(title, fontsize=9)
            axis.set_xlim(0, max(heights) * 1.15)
            axis.tick_params(bottom=False, labelbottom=False, left=False)
            axis.spines[:].set_visible(False)
        figure.suptitle(f"Llama 1.1B, 8 x 2,048 tokens, one {card}", fontsize=10)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
