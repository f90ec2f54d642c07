"""MOSS's Tables 6 and 10 and Figure 8 beside ours, from measurements: `python -m experiments.papers.moss_speed`.

It times nothing. Products are those of results/CARD/gemm.json, steps those of step.json, steps by how weights are
scaled those of step_scaling.json, ratios of signal to noise those of results/cpu/moss_snr.json; what these lack is left
out.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.papers import common
from experiments.papers.common import Row
from experiments.results import lookup, record

# Milliseconds of Table 6, on an H800, by (M, N, K).
COLUMNS = ("TE", "COAT", "DeepSeek", "MOSS")
PAPER = {
    (2048, 7168, 4096): (0.26, 0.32, 0.20, 0.25),
    (2048, 7168, 11008): (0.63, 0.86, 0.46, 0.67),
    (4096, 2048, 7168): (0.37, 2.27, 0.23, 0.45),
    (4096, 4096, 8192): (0.52, 2.63, 0.39, 0.60),
    (4096, 4096, 12288): (0.75, 3.91, 0.62, 0.72),
    (5120, 5120, 10240): (1.16, 5.57, 0.68, 1.04),
    (8192, 8192, 8192): (2.16, 10.54, 1.23, 1.98),
}
# Our products, and whose column each stands beside. COAT multiplies with one scale a tensor, as TE does.
PRODUCTS = {
    "ours tensor": ("TE", "one scale a tensor"),
    "ours tensor promoted": ("COAT", "one scale a tensor, sums promoted to fp32"),
    "ours block": ("DeepSeek", "1x128 by 128x128 groups"),
    "ours mx, codes folded first": ("MOSS", "two-level microscaling"),
    "ours mx exact": ("MOSS", "two-level microscaling, scales applied in registers"),
    "xla bf16": (None, "bf16"),
}
BASE = "one scale a tensor"
# What the inputs of a recipe's linear layers are scaled by.
SCHEMES = {
    "te_current": "per tensor",
    "coat": "per tensor",
    "coat_fast": "per tensor",
    "deepseek": "groups of 128",
    "moss": "two-level, row",
    "fast": "two-level, row",
}
ACTIVATIONS = ("attention output", "FFN intermediate", "LayerNorm input")

# Table 10: fine-tuning Llama-2-7B on eight H800s, milliseconds of scaling and of a step.
STRATEGIES = {
    "moss, weights just in time": (3.8, 68.5), "moss, weights delayed": (1.2, 65.9), "moss": (0.2, 63.1),
}  # fmt: skip

Result = Mapping[str, Any]


def scalings(step: Result) -> list[Row]:
    """Table 10: a step of `moss` by how its weights are scaled, and what each takes beyond the fastest."""
    base, table = next(iter(STRATEGIES)), "Table 10: a step by how weights are scaled"
    times = {name: lookup.find(step, name, "step", "value") for name in STRATEGIES}
    rows = []
    for name, (overhead, paper) in STRATEGIES.items():
        if not times[name] or not times[base]:
            continue
        ours, first = times[name][0], times[base][0]
        case = name if name != "moss" else "moss, automatic"
        theirs = STRATEGIES[base][1]
        rows += [
            Row(case, "step", ours, "ms", base, first / ours, paper, theirs / paper, table),
            Row(case, "scaling above automatic, share of the step", 100 * (ours - times["moss"][0]) / ours, "%",
                paper=100 * (overhead - STRATEGIES["moss"][0]) / paper, table=table),
        ] if times["moss"] else []  # fmt: skip
    return rows


def products(gemm: Result) -> list[Row]:
    """Table 6: milliseconds of each product, and relative to that with one scale a tensor, as the paper's to TE's."""
    rows = []
    for (m, n, k), paper in PAPER.items():
        case = f"{m}x{n}x{k}"
        rates = {name: lookup.find(gemm, impl, "rate", "value", case=case) for impl, (_, name) in PRODUCTS.items()}
        times = {name: 2e-9 * m * n * k / rate[0] for name, rate in rates.items() if rate}
        for column, name in PRODUCTS.values():
            if name not in times:
                continue
            theirs = paper[COLUMNS.index(column)] if column else None
            relative = theirs / paper[COLUMNS.index("TE")] if theirs else None
            ratio = times[name] / times[BASE] if BASE in times else None
            rows.append(
                Row(case, name, times[name], "ms", BASE, ratio, theirs, relative, "Table 6: products", (case, name))
            )
    return rows


def landscape(step: Result, snr: Result) -> list[Row]:
    """Figure 8: tokens a second of a training step, and the mean ratio of signal to noise of three activations."""
    rows = []
    for recipe, scheme in SCHEMES.items():
        cases = {f"{name}, late, {scheme}" for name in ACTIVATIONS}
        noise = [row["value"] for row in snr["rows"] if row["case"] in cases]
        speed = lookup.find(step, recipe, "tokens/s", "value", case=lookup.ONE)
        if not noise or not speed:
            continue
        table = "Figure 8: throughput and fidelity"
        rows.append(Row(recipe, "tokens/s", speed[0], "1", table=table, pivot=(recipe, "tokens/s")))
        rows.append(Row(recipe, "SNR", float(np.mean(noise)), "dB", table=table, pivot=(recipe, "SNR")))
    return rows


def of_products(rows: Sequence[Row]) -> str:
    """Times of two-level products over those with one scale a tensor, and over bf16."""
    times = {row.pivot: row.value for row in rows if row.table.startswith("Table 6") and row.pivot and row.value}
    lines = []
    for name in ("two-level microscaling", "two-level microscaling, scales applied in registers"):
        for base in (BASE, "bf16"):
            ratios = [t / times[case, base] for (case, n), t in times.items() if n == name and (case, base) in times]
            if ratios:
                lines.append(f"{name} takes {min(ratios):.2f} to {max(ratios):.2f} times the time of {base}")
    return (f"Here {'; '.join(lines)}. The first has codes that were folded when they were quantized." if lines
            else "Two-level products were not timed here.")  # fmt: skip


def of_schemes(rows: Sequence[Row]) -> str:
    """Where moss stands among the recipes, in speed and in fidelity."""
    points: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.table.startswith("Figure 8") and row.value is not None:
            points.setdefault(row.case, {})[row.metric] = row.value
    if "moss" not in points:
        return "Here moss was not timed."
    moss, others = points["moss"], {name: point for name, point in points.items() if name != "moss"}
    ahead = {m: [name for name, point in others.items() if point[m] > moss[m]] for m in ("tokens/s", "SNR")}
    spread = max(p["SNR"] for p in points.values()) - min(p["SNR"] for p in points.values())
    faster, finer = (", ".join(names) or "none" for names in ahead.values())
    # A bit of a code is 6 dB.
    why = ": what is left is the rounding to four bits" if spread < 3 else ""
    return (
        f"Here faster than moss: {faster}; of a higher ratio of signal to noise: {finer}. All schemes lie within "
        f"{spread:.1f} dB{why}."
    )


def draw(rows: list[Row]) -> Figure:
    """Each recipe as a point, as the paper's Figure 8."""
    figure = Figure(figsize=(6, 4), dpi=110, layout="constrained")
    axes = figure.subplots()
    points: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.table.startswith("Figure 8") and row.value is not None:
            points.setdefault(row.case, {})[row.metric] = row.value
    for name, point in points.items():
        axes.plot(point["tokens/s"], point["SNR"], "o")
        axes.annotate(name, (point["tokens/s"], point["SNR"]), xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes.set(xlabel="tokens/s of a training step", ylabel="SNR of linear layers' inputs, dB")
    axes.margins(0.15)
    return figure


def main() -> int:
    """Regenerates results/CARD/moss_speed.json and .png of each card that has what it is made of."""
    options = common.parse(__doc__)
    snr = record.load(options.results / "cpu" / "moss_snr.json")
    for folder in sorted(path.parent for path in options.results.glob("*/gemm.json")):
        if (folder / "step.json").exists():
            gemm, step = (record.load(folder / f"{name}.json") for name in ("gemm", "step"))
            more = folder / "step_scaling.json"
            scaled = record.load(more) if more.exists() else None
            write(options.results, gemm, step, snr, scaled)
    return 0


def write(results: Path, gemm: Result, step: Result, snr: Result, scaled: Result | None = None) -> None:
    """Writes the table of one card; `scaled` has steps by how weights are scaled."""
    groups = [(products(gemm), gemm), (landscape(step, snr), step)]
    groups += [(scalings(scaled), scaled)] if scaled else []
    rows = [row for rows, _ in groups for row in rows]
    sources = []
    for of, source in groups:
        for row in of:
            commits, devices = zip(*record.sources(snr if row.metric == "SNR" else source), strict=True)
            sources.append((", ".join(dict.fromkeys(commits)), ", ".join(dict.fromkeys(devices))))
    coat = [times[COLUMNS.index("COAT")] / times[COLUMNS.index("TE")] for times in PAPER.values()]
    notes = [
        f"Products: `{gemm['command']}`; steps: `{step['command']}`; SNR: `{snr['command']}`, the mean of "
        f"{', '.join(ACTIVATIONS)} late in training.",
        "The paper's Table 6 is of an H800 and of PyTorch's kernels: compare the columns within each, not the "
        f"milliseconds. Its COAT takes {min(coat):.1f} to {max(coat):.1f} times as long as TE; COAT's products are "
        "those of one scale a tensor, so ours takes what they take. " + of_products(rows),
        "Figure 8: the paper puts MOSS right of and above all others. " + of_schemes(rows),
    ]
    if scaled:
        notes.append(
            f"Table 10: `{scaled['command']}`, a whole training step of a 1.1 B Llama on one GPU; the paper's is of "
            "Llama-2-7B on eight. Codes of weights are made in all three; just in time their largest magnitudes are "
            "read first, delayed they are counted on the way and used later."
        )
    title = "MOSS: products, weights' scales, and the trade of speed for fidelity (Tables 6, 10, Figure 8)"
    device = record.sources(step)[0][1]
    common.write(
        "moss_speed", title, rows, notes, draw(rows), results, device=device, sources=sources, date=step["date"]
    )


if __name__ == "__main__":
    sys.exit(main())
