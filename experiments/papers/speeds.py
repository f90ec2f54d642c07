"""Tables of the papers' speeds beside ours, from results files that are there: `python -m experiments.papers.speeds`.

It measures nothing. It writes results/CARD/NAME.json of each card that has the files that NAME is made of:

    moss_speed       MOSS: Tables 6 and 10, Figure 8, from gemm, step, step_scaling and results/cpu/moss_snr.json
    coat_layer       COAT: Table 7, from layer
    coat_efficiency  COAT: Table 11, from step_7b_fit, step_7b_fit_four and step_7b_fit_eight
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.bench.arms import AGAIN, FAITHFUL, LEAN
from experiments.papers import common
from experiments.papers.common import Row
from experiments.results import figures, record

Result = Mapping[str, Any]
Sourced = tuple[Row, tuple[str, str]]
"""A row, and the commit and device that it is of."""
ONE_GPU = "1b, one GPU"


def value(result: Result, impl: str, metric: str, case: str = "") -> float | None:
    """The first value of an implementation and metric; None where the file has none."""
    found = figures.rows(result, "value", f"{impl} > {metric} > > {case}")
    return float(found[0]) if len(found) else None


def sourced(rows: Iterable[Row], *files: Result) -> list[Sourced]:
    """Rows with the commits and devices of the files that they are made of."""
    commits, devices = zip(*(pair for file in files for pair in record.sources(file)), strict=True)
    source = ", ".join(dict.fromkeys(commits)), ", ".join(dict.fromkeys(devices))
    return [(row, source) for row in rows]


# MOSS, Table 6: milliseconds on an H800, by (M, N, K).
COLUMNS = ("TE", "COAT", "DeepSeek", "MOSS")
TABLE_6 = {
    (2048, 7168, 4096): (0.26, 0.32, 0.20, 0.25),
    (2048, 7168, 11008): (0.63, 0.86, 0.46, 0.67),
    (4096, 2048, 7168): (0.37, 2.27, 0.23, 0.45),
    (4096, 4096, 8192): (0.52, 2.63, 0.39, 0.60),
    (4096, 4096, 12288): (0.75, 3.91, 0.62, 0.72),
    (5120, 5120, 10240): (1.16, 5.57, 0.68, 1.04),
    (8192, 8192, 8192): (2.16, 10.54, 1.23, 1.98),
}
# Our products, and whose column each stands beside. COAT multiplies with one scale a tensor, as TE does.
BASE = "one scale a tensor"
PRODUCTS = {
    "ours tensor": ("TE", BASE),
    "ours tensor promoted": ("COAT", "one scale a tensor, sums promoted to fp32"),
    "ours block": ("DeepSeek", "1x128 by 128x128 groups"),
    "ours mx, codes folded first": ("MOSS", "two-level microscaling"),
    "ours mx exact": ("MOSS", "two-level microscaling, scales applied in registers"),
    "xla bf16": (None, "bf16"),
}
# Figure 8: what the inputs of a recipe's linear layers are scaled by.
SCHEMES = {"te_current": "per tensor", "coat": "per tensor", "coat_fast": "per tensor", "deepseek": "groups of 128",
           "moss": "two-level, row", "fast": "two-level, row"}  # fmt: skip
ACTIVATIONS = ("attention output", "FFN intermediate", "LayerNorm input")
# Table 10: fine-tuning Llama-2-7B on eight H800s, milliseconds of scaling and of a step.
STRATEGIES = {"moss, weights just in time": (3.8, 68.5), "moss, weights delayed": (1.2, 65.9), "moss": (0.2, 63.1)}


def moss_products(gemm: Result) -> list[Row]:
    """Table 6: milliseconds of each product, and relative to that with one scale a tensor, as the paper's to TE's."""
    rows = []
    for (m, n, k), paper in TABLE_6.items():
        case = f"{m}x{n}x{k}"
        rates = {name: value(gemm, impl, "rate", case) for impl, (_, name) in PRODUCTS.items()}
        times = {name: 2e-9 * m * n * k / rate for name, rate in rates.items() if rate}
        for column, name in PRODUCTS.values():
            if name in times:
                theirs = paper[COLUMNS.index(column)] if column else None
                relative = theirs / paper[COLUMNS.index("TE")] if theirs else None
                ratio = times[name] / times[BASE] if BASE in times else None
                rows.append(Row(case, name, times[name], "ms", BASE, ratio, theirs, relative, "Table 6: products",
                                (case, name)))  # fmt: skip
    return rows


def moss_fidelity(step: Result, snr: Result) -> list[Row]:
    """Figure 8: tokens a second of a training step, and the mean ratio of signal to noise of three activations."""
    rows, table = [], "Figure 8: throughput and fidelity"
    for recipe, scheme in SCHEMES.items():
        names = " or ".join(f"{name}, late, {scheme}" for name in ACTIVATIONS)
        noise, speed = figures.rows(snr, "value", f"{names} > *"), value(step, recipe, "tokens/s", ONE_GPU)
        if len(noise) and speed:
            rows.append(Row(recipe, "tokens/s", speed, "1", table=table, pivot=(recipe, "tokens/s")))
            rows.append(Row(recipe, "SNR", float(np.mean(noise)), "dB", table=table, pivot=(recipe, "SNR")))
    return rows


def moss_scalings(step: Result) -> list[Row]:
    """Table 10: a step of `moss` by how its weights are scaled, and what each takes beyond the fastest."""
    base, table = next(iter(STRATEGIES)), "Table 10: a step by how weights are scaled"
    times = {name: value(step, name, "step") for name in STRATEGIES}
    rows = []
    for name, (overhead, paper) in STRATEGIES.items():
        ours, first, automatic = times[name], times[base], times["moss"]
        if ours and first and automatic:
            case = name if name != "moss" else "moss, automatic"
            share = 100 * (overhead - STRATEGIES["moss"][0]) / paper
            rows += [
                Row(case, "step", ours, "ms", base, first / ours, paper, STRATEGIES[base][1] / paper, table),
                Row(case, "scaling above automatic, share of the step", 100 * (ours - automatic) / ours, "%",
                    paper=share, table=table),
            ]  # fmt: skip
    return rows


# COAT, Table 7, hidden size 4096, batch 4: milliseconds forward and backward, and MB of activations, by length.
TABLE_7 = {
    2048: {"bf16": (26.55, 2914), "te_current": (17.98, 2420), FAITHFUL: (16.85, 1766)},
    4096: {"bf16": (54.80, 5828), "te_current": (37.24, 4840), FAITHFUL: (35.6, 3533)},
}


def coat_layer(layer: Result) -> list[Row]:
    """Table 7: time of a Llama-7B layer and what it keeps, and both over bf16, beside the paper's."""
    rows = []
    for length, paper in TABLE_7.items():
        case, table = f"batch 4, length {length}", f"Table 7: hidden size 4096, batch 4, length {length}"
        for name in ("bf16", "te_current", FAITHFUL, LEAN):
            for i, (metric, unit) in enumerate((("time", "ms"), ("kept", "U"))):
                ours, base = value(layer, name, metric, case), value(layer, "bf16", metric, case)
                if ours and base:
                    ratio = paper["bf16"][i] / paper[name][i] if name in paper else None
                    theirs = paper[name][i] if name in paper and metric == "time" else None
                    rows.append(Row(name, metric, ours, unit, "bf16", base / ours, theirs, ratio, table))
    return rows


class Efficiency(NamedTuple):
    """A line of COAT's Table 11: peak GB, sequences a GPU, tokens a second, and speed over bf16."""

    peak: float | None
    batch: int
    tokens: int
    speedup: float


EFFICIENCY_ARMS = {AGAIN: "bf16", "coat_optimizer": "FP8 optimizer", "coat": "FP8 optimizer and activations"}
TABLE_11 = {
    2: (Efficiency(None, 1, 6130, 1.0), Efficiency(61.9, 2, 7258, 1.18), Efficiency(35.6, 4, 11351, 1.85)),
    4: (Efficiency(55.1, 2, 7730, 1.0), Efficiency(44.7, 4, 8384, 1.08), Efficiency(35.6, 4, 11257, 1.45)),
    8: (Efficiency(41.2, 4, 8238, 1.0), Efficiency(36.1, 4, 8444, 1.02), Efficiency(27.0, 8, 11241, 1.36)),
}
EFFICIENCY_FILES = {2: "step_7b_fit", 4: "step_7b_fit_four", 8: "step_7b_fit_eight"}


def efficiency(count: int, step: Result) -> list[Row]:
    """Table 11: memory, batch and tokens a second on so many GPUs; of the arms that the file has."""
    table, rows = f"Table 11: Llama-2-7B on {count} GPUs", list[Row]()
    base = value(step, AGAIN, "tokens/s")
    for (arm, name), paper in zip(EFFICIENCY_ARMS.items(), TABLE_11[count], strict=True):
        if not (tokens := value(step, arm, "tokens/s")) or not base:
            continue
        memory, batch = value(step, arm, "memory"), value(step, arm, "batch")
        rows.append(Row(name, "memory", memory, "GB a GPU", paper=paper.peak, table=table))
        if batch is not None:  # given where it is another than bf16's
            rows.append(Row(name, "batch", batch, "sequences a GPU", paper=paper.batch, table=table))
        rows.append(Row(name, "tokens/s", tokens / count, "a GPU", "bf16", tokens / base, paper.tokens, paper.speedup,
                        table))  # fmt: skip
    return rows


NOTES = {
    "moss_speed": (
        f"SNR is the mean of {', '.join(ACTIVATIONS)} late in training.",
        "The paper's Table 6 is of an H800 and of PyTorch's kernels: compare the columns within each, not the "
        "milliseconds. COAT's products are those of one scale a tensor, so ours takes what they take.",
        "Table 10 is a whole training step of a 1.1 B Llama on one GPU; the paper's is of Llama-2-7B on eight. Codes "
        "of weights are made in all three; just in time their largest magnitudes are read first, delayed they are "
        "counted on the way and used later.",
    ),
    "coat_layer": (
        "A layer of `experiments.models.llama` in bf16, as `fp8jax.nnx.quantize` leaves it. Our bf16 is XLA's with "
        "cuDNN's attention; the paper's is an implementation in PyTorch on an H100 that is slower. TE is `te_current`.",
    ),
    "coat_efficiency": (
        "The paper's baseline is PyTorch's FSDP in bf16, which keeps more than our bf16: it recomputes norms and "
        "activations. Batches are those that `experiments.plan` says fit in 80 GB a GPU; where none is given it is "
        "bf16's. An FP8 optimizer is `coat_optimizer`, with products in bf16.",
    ),
}
TITLES = {
    "moss_speed": "MOSS: products, weights' scales, and the trade of speed for fidelity (Tables 6, 10, Figure 8)",
    "coat_layer": "COAT: a layer's speed and what it keeps (Table 7)",
    "coat_efficiency": "COAT: memory and throughput of Llama-2-7B by what is in 8 bits (Table 11)",
}


def tables(card: Path, snr: Result | None) -> dict[str, tuple[list[Sourced], str]]:
    """The rows of each table that a card's files give, and the date of the newest.

    Args:
        card: folder of its results files.
        snr: content of moss_snr.json.
    """
    names = {"gemm", "step", "step_scaling", "layer", *EFFICIENCY_FILES.values()}
    files = {name: record.load(path) for name in sorted(names) if (path := card / f"{name}.json").exists()}
    found: dict[str, tuple[list[Sourced], str]] = {}
    if snr is not None and {"gemm", "step"} <= files.keys():
        rows = sourced(moss_products(files["gemm"]), files["gemm"])
        for row in moss_fidelity(files["step"], snr):
            rows += sourced([row], snr if row.metric == "SNR" else files["step"])
        if "step_scaling" in files:
            rows += sourced(moss_scalings(files["step_scaling"]), files["step_scaling"])
        found["moss_speed"] = rows, files["step"]["date"]
    if "layer" in files:
        found["coat_layer"] = sourced(coat_layer(files["layer"]), files["layer"]), files["layer"]["date"]
    fits = {count: files[name] for count, name in EFFICIENCY_FILES.items()
            if name in files and files[name].get("complete", True)}  # fmt: skip
    if rows := [row for count, file in fits.items() for row in sourced(efficiency(count, file), file)]:
        found["coat_efficiency"] = rows, max(file["date"] for file in fits.values())
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the tables of every card."""
    options = common.parse(__doc__, argv)
    path = options.results / "cpu" / "moss_snr.json"
    snr = record.load(path) if path.exists() else None
    for card in sorted(path for path in options.results.iterdir() if path.is_dir()):
        for name, (rows, date) in tables(card, snr).items():
            if not rows:
                continue
            devices = [device for row, (_, device) in rows if row.metric != "SNR"]
            common.write(name, TITLES[name], [row for row, _ in rows], NOTES[name], None, options.results,
                         module="speeds", device=devices[-1], sources=[source for _, source in rows],
                         date=date)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
