"""README's first table: steps of users' models beside torch.compile's, on one card."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.results import claims, lookup

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
    Headline("the same, each loss read at once", "models", "Llama 1.1B", "step, synchronised"),
    Headline("the same, temporary memory", "models", "Llama 1.1B", "temporaries", "GB", 1),
    Headline("GPT-2 350M, 16 x 1,024 tokens", "models_gpt350m", "GPT-2 350M"),
    Headline("ViT-L/16, 256 images", "models_vitl", "ViT-L/16"),
)


def table(results: Mapping[str, Mapping[str, Result]]) -> str:
    """Return the table in Markdown, and a line that names the card, commits and commands.

    The card is that of the first line's file with the most figures, or the newest of these. A line that was not
    measured on it is taken from another card, which the last line names.

    Args:
        results: contents of results files by name and card. A line without bf16 or without ours is left out, and so is
            a column without any figure.
    """
    first_card = ""
    rows, sources = dict[str, dict[str, str | None]](), dict[str, None]()
    for line in LINES:
        looks = [lookup.value(name, line.metric, line.unit, line.digits, line.case) for name in COLUMNS]
        cards = {card: dict(zip(COLUMNS, (look(result) for look in looks), strict=True))
                 for card, result in results.get(line.bench, {}).items()}  # fmt: skip
        # A file without bf16 or without ours tells no difference.
        cards = {card: of for card, of in cards.items() if of[BASE] and any(of[name] for name in OURS)}
        if not cards:
            continue
        dates = {card: results[line.bench][card]["date"] for card in cards}
        card = max(cards, key=lambda card: (card == first_card, sum(map(bool, cards[card].values())), dates[card]))
        first_card = first_card or card
        rows[line.label], result = cards[card], results[line.bench][card]
        commits = list(dict.fromkeys(row["commit"] for row in result["rows"]))
        by = commits[0] if len(commits) == 1 else "several commits"
        sources[f"`{claims.short(result['command'])}`, {card.upper()}, {by}"] = None
    shown = [name for name in COLUMNS if any(of[name] for of in rows.values())]
    head = [f"| | {' | '.join(COLUMNS[name] for name in shown)} |", f"|---|{'---:|' * len(shown)}"]
    body = [f"| {label} | {' | '.join(of[name] or '-' for name in shown)} |" for label, of in rows.items()]
    return "\n".join([*head, *body, "", f"A step, forward, backward and AdamW. Measured by {'; '.join(sources)}."])
