"""The table on README's first screen: steps and memory, each of the newest file that has most of its figures."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.tables import claims, lookup

Result = Mapping[str, Any]
BASES = {lookup.AGAIN: ", recomputed", "bf16": ", as written"}
WRITTEN = ("bf16", "coat", "coat_fast")
PARTS = f", released{lookup.PARTS}"
RECOMPUTED = (lookup.AGAIN, "coat", "coat_fast")
# Columns of torch.compile's arms, measured in the same run.
TORCH = {"torch bf16": "torch.compile bf16", "torchao tensorwise": "torchao float8 tensorwise",
         "torchao rowwise": "torchao float8 rowwise"}  # fmt: skip


class Headline(NamedTuple):
    """A row of the table.

    Attributes:
        label: what is measured. Of lines with one label the first that is measured is shown.
        bench: name of the results file.
        metric: in that file.
        unit: behind each figure.
        digits: behind the point.
        rows: names of the rows of bf16, `coat` and `coat_fast`; one that was not measured reads "-".
        case: that the rows' cases begin with.
        base: what is told of bf16.
    """

    label: str
    bench: str
    metric: str
    unit: str
    digits: int
    rows: tuple[str, str, str]
    case: str = ""
    base: str = ""


def _user(label: str, bench: str, case: str) -> list[Headline]:
    """A step of a user's model, in a row of many, and where the host reads the loss after each."""
    return [
        Headline(text, bench, metric, "ms", 0, WRITTEN, case, BASES["bf16"])
        for text, metric in (
            (f"A training step of a user's {label}", "step"),
            ("The same, its loss read after each step", "step, synchronised"),
        )
    ]


LINES = [
    *_user("Llama of 1.1 B", "models", "Llama 1.1B"),
    *_user("GPT-2 of 350 M", "models_gpt350m", "GPT-2 350M"),
    *_user("ViT-L/16, 256 images", "models_vitl", "ViT-L/16"),
    _user("ViT-L/16 with attention by cuDNN", "models_vitl_cudnn", "ViT-L/16")[0],
    # The fastest bf16; memory is compared with the leanest.
    *(Headline("A training step of our 1.1 B Llama, 16,384 tokens", "step", "step", "ms", 0, (base, *WRITTEN[1:]),
           lookup.ONE, BASES[base]) for base in ("bf16", lookup.AGAIN)),
    Headline("Memory of that step", "step", "memory", "GB", 1, RECOMPUTED, lookup.ONE, BASES[lookup.AGAIN]),
    Headline("Tokens a second, all of a Llama-2-7B on one card, as many sequences as fit", "release_most",
             "tokens", "", 0, (f"bf16{PARTS}", f"coat{PARTS}", f"coat_fast{PARTS}")),
    *(Headline("A Llama-7B layer, forward and backward, 16,384 tokens", "layer", "time", "ms", 1,
           (base, "COAT, lean", lookup.BOUNDED), "batch 4, length 4096", told) for base, told in BASES.items()),
    Headline("What a layer keeps for its backward pass", "coat_memory", "total", "U", 1,
         (lookup.AGAIN, "COAT, lean", "COAT, lean"), "", BASES[lookup.AGAIN]),
    Headline("Bytes of Adam's moments, a parameter", "training_parity", "bytes of moments a parameter", "", 2,
         ("bf16", "coat", "coat")),
]  # fmt: skip


def table(results: Mapping[str, Mapping[str, Result]]) -> str:
    """The table in Markdown, of results by name and card; a line without bf16 or without ours is left out."""
    rows: dict[tuple[str, str], str] = {}
    for line in LINES:
        names = (*line.rows, *TORCH)
        looks = [lookup.value(name, line.metric, line.unit, line.digits, line.case) for name in names]
        cards = {card: [look(result) for look in looks] for card, result in results.get(line.bench, {}).items()}
        # A file without bf16 or without ours tells no difference.
        cards = {card: figures for card, figures in cards.items() if figures[0] and any(figures[1:3])}
        if not cards or (line.label, line.bench) in rows:
            continue
        card = max(cards, key=lambda card: (sum(map(bool, cards[card])), results[line.bench][card]["date"]))
        figures, result = cards[card], results[line.bench][card]
        commits = list(dict.fromkeys(row["commit"] for row in result["rows"]))
        by = f"`{claims.short(result['command'])}`, {card.upper()}, "
        by += commits[0] if len(commits) == 1 else "several commits"
        told = [f"{figures[0]}{line.base}", *(figure or "-" for figure in figures[1:])]
        rows[line.label, line.bench] = f"| {line.label} | {' | '.join(told)} | {by} |"
    header = ["", "JAX bf16", "`coat`", "`coat_fast`", *TORCH.values(), "measured by"]
    rule = ["---", *["---:"] * (len(header) - 2), "---"]
    return "\n".join([f"| {' | '.join(header)} |".replace("|  |", "| |"), f"|{'|'.join(rule)}|", *rows.values()])
