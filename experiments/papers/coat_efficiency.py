"""COAT's Table 11 beside ours, from measurements that are there: `python -m experiments.papers.coat_efficiency`.

It times nothing. Steps of Llama-2-7B over 2, 4 and 8 GPUs, each arm with the batch that fits in 80 GB, are those of
results/CARD/step_7b_fit.json, step_7b_fit_four.json and step_7b_fit_eight.json; what these lack is left out.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.papers import common
from experiments.papers.common import Row
from experiments.results import lookup, record

Result = Mapping[str, Any]


class Measured(NamedTuple):
    """What the paper has of a configuration: GB at most, sequences a GPU, tokens a second and over bf16's."""

    peak: float | None
    batch: int
    tokens: int
    speedup: float


# Arms of `bench step`, and their rows of the paper's table, by the number of GPUs.
ARMS = {lookup.AGAIN: "bf16", "coat_optimizer": "FP8 optimizer", "coat": "FP8 optimizer and activations"}
PAPER = {
    2: (Measured(None, 1, 6130, 1.0), Measured(61.9, 2, 7258, 1.18), Measured(35.6, 4, 11351, 1.85)),
    4: (Measured(55.1, 2, 7730, 1.0), Measured(44.7, 4, 8384, 1.08), Measured(35.6, 4, 11257, 1.45)),
    8: (Measured(41.2, 4, 8238, 1.0), Measured(36.1, 4, 8444, 1.02), Measured(27.0, 8, 11241, 1.36)),
}
FILES = {2: "step_7b_fit", 4: "step_7b_fit_four", 8: "step_7b_fit_eight"}


def rows(count: int, step: Result) -> list[Row]:
    """A configuration's memory, batch and tokens a second, of so many GPUs; those that the file has."""
    table, listed = f"Table 11: Llama-2-7B on {count} GPUs", list[Row]()
    base = lookup.find(step, lookup.AGAIN, "tokens/s", "value")
    for (arm, name), paper in zip(ARMS.items(), PAPER[count], strict=True):
        tokens = lookup.find(step, arm, "tokens/s", "value")
        if not tokens or not base:
            continue
        memory = lookup.find(step, arm, "memory", "value")
        listed.append(Row(name, "memory", memory[0] if memory else None, "GB a GPU", paper=paper.peak, table=table))
        # A row says the batch where it is another than bf16's.
        batch = lookup.find(step, arm, "batch", "value")
        if batch:
            listed.append(Row(name, "batch", batch[0], "sequences a GPU", paper=paper.batch, table=table))
        listed.append(Row(name, "tokens/s", tokens[0] / count, "a GPU", ARMS[lookup.AGAIN], tokens[0] / base[0],
                          paper.tokens, paper.speedup, table))  # fmt: skip
    return listed


def write(results: Path, files: Mapping[int, Result]) -> None:
    """Writes the table of one card's files, by the number of GPUs."""
    table, sources = list[Row](), list[tuple[str, str]]()
    for count, step in files.items():
        found = rows(count, step)
        commits, devices = zip(*record.sources(step), strict=True)
        sources += [(", ".join(dict.fromkeys(commits)), ", ".join(dict.fromkeys(devices)))] * len(found)
        table += found
    if not table:
        return
    notes = [
        "The paper's baseline is PyTorch's FSDP in bf16, which keeps more than our bf16: it recomputes norms and "
        "activations. Batches are those that `experiments.plan` says fit in 80 GB a GPU; where none is given it is "
        "bf16's. An FP8 optimizer is `coat_optimizer`, with products in bf16.",
    ]
    title = "COAT: memory and throughput of Llama-2-7B by what is in 8 bits (Table 11)"
    last = max(files)
    common.write("coat_efficiency", title, table, notes, None, results, device=sources[-1][1], sources=sources,
                 date=files[last]["date"])  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Regenerates results/CARD/coat_efficiency.json of each card that has such steps."""
    options = common.parser(__doc__).parse_args(argv)
    for folder in sorted(path for path in options.results.iterdir() if path.is_dir()):
        paths = {count: folder / f"{name}.json" for count, name in FILES.items()}
        files = {count: record.load(path) for count, path in paths.items() if path.exists()}
        files = {count: file for count, file in files.items() if file.get("complete", True)}
        if files:
            write(options.results, files)
    return 0


if __name__ == "__main__":
    sys.exit(main())
