"""What the tables share: their options, and how results are written."""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import jax
from matplotlib.figure import Figure

from experiments.results import record

RESULTS = Path("results")


@dataclasses.dataclass(frozen=True)
class Row:
    """A figure: one row of a results file.

    Attributes:
        case: what was measured.
        metric: which figure of it.
        value: ours.
        unit: "1" for plain numbers.
        baseline: the case that `ratio` is relative to, or None.
        ratio: value over the baseline's.
        paper: the paper's figure, or None where our copy of the paper does not hold one.
        paper_ratio: the paper's figure over the paper's baseline.
        table: which table or figure of the paper it belongs to.
        pivot: row and column labels where the table is two-dimensional.
        impl: what computed it.
    """

    case: str
    metric: str
    value: float | None
    unit: str = "1"
    baseline: str | None = None
    ratio: float | None = None
    paper: float | None = None
    paper_ratio: float | None = None
    table: str = ""
    pivot: tuple[str, str] | None = None
    impl: str = "fp8jax"


def write(
    bench: str,
    title: str,
    rows: Sequence[Row],
    notes: Sequence[str],
    figure: Figure | None,
    results: Path = RESULTS,
    *,
    arguments: str = "",
    module: str = "",
    device: str | None = None,
    sources: Sequence[tuple[str, str]] | None = None,
    date: str | None = None,
) -> Path:
    """Writes RESULTS/CARD/BENCH.json, and BENCH.png where there is a figure.

    Args:
        bench: name of the file, and of the module in `experiments.papers`.
        title: headline in RESULTS.md.
        rows: the figures.
        notes: what was measured on what, and why it differs from the paper's.
        figure: saved beside them, if there is one.
        results: folder, made where missing.
        arguments: of the command that regenerates it.
        module: name of the module in `experiments.papers`, where it is not `bench`.
        device: what was measured on; None for this process's first device.
        sources: of each row the commit and the device, where figures come from other files; None for this process's.
        date: of what was measured; None for today.
    """
    listed = [dataclasses.asdict(row) for row in rows]
    if sources is not None:
        listed = [row | {"commit": of, "device": on} for row, (of, on) in zip(listed, sources, strict=True)]
    path = record.write(
        results,
        bench,
        title=title,
        command=f"python -m experiments.papers.{module or bench} {arguments}".strip(),
        device=device or jax.devices()[0].device_kind,
        rows=listed,
        notes=notes,
        complete=not os.environ.get("FP8JAX_DRY"),
        date=date,
    )
    if figure is None:
        path.with_suffix(".png").unlink(missing_ok=True)  # of an older command, which drew one
    else:
        figure.savefig(path.with_suffix(".png"))
    print(f"wrote {path}")
    return path


def parse(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of a table, described by the module's docstring: --results."""
    options = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    options.add_argument("--results", type=Path, default=RESULTS, help="where to write (default: results)")
    return options.parse_args(argv)
