"""Plots of benchmarks. `python -m experiments.bench.plots` draws those of all results files again.

The words of old files are replaced as on the pages (`experiments.results.wording`).
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.bench import timing
from experiments.results import report, wording

# Baselines of cases without a peer, by benchmark; see `timing.compared`.
LAST_RESORTS = {"gemm": "xla bf16"}
# The parts of a step in a file of `bench profile`, and their colors.
PARTS = {
    "8-bit matmuls": "tab:green",
    "16-bit matmuls": "tab:blue",
    "attention": "tab:purple",
    "our other kernels": "tab:orange",
    "XLA's other kernels": "tab:cyan",
    "collectives": "tab:red",
    "gaps": "lightgray",
}


def draw(rows: Sequence[timing.Row], title: str, path: Path, last_resort: str | None = None) -> None:
    """Draws the rows of a benchmark: bars of milliseconds for a profile, otherwise ratios to the baselines."""
    rows = [wording.row(row) for row in rows]
    steps: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row["metric"] in PARTS and row["value"] is not None:
            steps.setdefault((row["case"], row["impl"]), {})[row["metric"]] = row["value"]
    figure = parts_figure(steps) if steps else ratios_figure(rows, last_resort)
    if figure is not None:
        figure.suptitle(title, fontsize=9)
        figure.savefig(path, dpi=110)


def parts_figure(steps: Mapping[tuple[str, str], Mapping[str, float]]) -> Figure:
    """Returns a bar per case and implementation, with the milliseconds of each part."""
    figure = Figure(figsize=(9, 1.2 + 0.35 * len(steps)), layout="constrained")
    axes = figure.subplots()
    labels = [f"{case}\n{impl}" for case, impl in steps]
    start = np.zeros(len(steps))
    for part, color in PARTS.items():
        times = np.array([step.get(part, 0.0) for step in steps.values()])
        if times.any():
            axes.barh(labels, times, left=start, color=color, label=part, height=0.7)
        start += times
    for y, total in enumerate(start):
        axes.text(total, y, f" {total:.0f}", va="center", fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, max(start) * 1.06)
    axes.set_xlabel("ms per step", fontsize=8)
    figure.legend(loc="outside lower center", ncols=len(PARTS), fontsize=7, frameon=False)
    return figure


def ratios_figure(rows: Sequence[timing.Row], last_resort: str | None) -> Figure | None:
    """Returns a panel per metric: ratios of implementations, a dot per case, and their geometric means as lines."""
    shown = dict[str, dict[str, list[timing.Row]]]()
    for metric in dict.fromkeys(row["metric"] for row in rows if row["ratio"]):
        comparisons = timing.compared(rows, metric, last_resort)
        others = {impl: mine for impl, mine in comparisons.items() if {row["baseline"] for row in mine} != {impl}}
        if others:
            shown[metric] = others
    if not shown:
        return None
    heights = [len(comparisons) + 2 for comparisons in shown.values()]
    figure = Figure(figsize=(9, 0.5 + 0.28 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(shown), height_ratios=heights, squeeze=False)
    for axes, (metric, comparisons) in zip(panels[:, 0], shown.items(), strict=True):
        for y, mine in enumerate(comparisons.values()):
            axes.plot([row["ratio"] for row in mine], [y] * len(mine), "o", color="tab:blue", alpha=0.5, markersize=5)
            axes.plot([timing.mean_ratio(mine)] * 2, [y - 0.35, y + 0.35], color="tab:red", linewidth=2)
        axes.axvline(1, color="tab:gray", linewidth=0.8)
        axes.set_yticks(range(len(comparisons)), list(comparisons), fontsize=7)
        axes.invert_yaxis()
        baselines = {row["baseline"] for mine in comparisons.values() for row in mine}
        baseline = baselines.pop() if len(baselines) == 1 else "the best peer"
        axes.set_xlabel(f"{metric}: ratio to {baseline}; red: geometric mean over cases", fontsize=8)
    return figure


def main() -> None:
    """Draws the plots of all results files of benchmarks in a folder."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bench.plots", description=main.__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of CARD/NAME.json")
    folder = parser.parse_args().results
    for name, of_cards in report.read(folder).items():
        for card, result in of_cards.items():
            if result["command"].startswith("python -m experiments.bench "):
                path = folder / card / f"{name}.png"
                draw(result["rows"], wording.title(result), path, LAST_RESORTS.get(name))
                print(path)


if __name__ == "__main__":
    main()
