"""COAT's Tables 1 and 9, Figures 2 and 3 on real moments: `python -m experiments.papers.coat_optimizer`.

The error of Adam's direction m / sqrt(v) by storage of both moments, the dynamic range of groups before and after
expansion, the frequency of codes, and the error by group size. Xi et al., COAT, ICLR 2025.
"""

import argparse
import sys
from collections.abc import Iterable
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

import fp8jax
from experiments.mesh import flatten
from experiments.papers import common
from experiments.papers.common import Row
from fp8jax.core import blocks
from fp8jax.core.recipe import Optimizer
from fp8jax.optim.compressed_adamw import MIN_SIZE
from fp8jax.optim.moments import should_quantize

FORMATS = ("e4m3", "e5m2", "de8")
GROUP = 128
EPS = 1e-8
GROUP_SIZES = (16, 32, 64, 128, 256)
NAMES = {"e4m3": "E4M3", "e5m2": "E5M2", "de8": "DE8"}
BASE = "E4M3 | E4M3"
LAYERS, OUTER = "layers", "embedding and head"
METRIC = "MSE of m/sqrt(v)"
Pairs: TypeAlias = list[tuple[np.ndarray, np.ndarray]]

# COAT, Tables 1 and 9: first order | second order. Table 1's last column, of E5M2 with expansion, has lost its heading
# in our copy; Table 9 repeats one of its rows under the full heading. No unit is given.
_COLUMNS = ("E4M3", "E4M3 + Expand", "E5M2", "E5M2 + Expand", "DE8", "DE8 + Expand")
_PAPER_ROWS = {
    "E4M3": (20.10, 18.08, 25.65, 18.16),
    "E4M3 + Expand": (15.13, 12.31, 21.96, 12.43, 14.01, 18.84),
    "E5M2": (37.02, 35.96, 40.30, 36.00),
    "E5M2 + Expand": (17.79, 15.48, 23.84, 15.57),
    "DE8": (12.11, 8.27, 20.02, 8.43, 10.54, 16.25),
    "DE8 + Expand": (11.57, 7.47, 19.69, 7.65, 9.91, 15.81),
}
PAPER = {f"{r} | {c}": v for r, values in _PAPER_ROWS.items() for c, v in zip(_COLUMNS, values, strict=False)}


def label(name: str, expand: bool) -> str:
    """Returns the paper's name of a storage."""
    return NAMES[name] + (" + Expand" if expand else "")


def spec(moment: str, name: str, expand: bool, group: int = GROUP) -> fp8jax.QuantSpec:
    """Returns the spec by which `compressed_adamw` stores "mu" or "nu". Dynamic exponents of "nu" are unsigned."""
    stored = "ude8" if moment == "nu" and name == "de8" else name
    settings = Optimizer(**{"mu": "fp32", "nu": "fp32", moment: stored}, group_size=group, expand=expand).spec(moment)
    assert settings is not None
    return settings


def matrices(mu: Any, nu: Any) -> dict[str, Pairs]:
    """Returns the fp32 moments that the optimizer quantizes: those of layers, and those of embedding and head."""
    first, second, shape = flatten(mu), flatten(nu), spec("mu", "e4m3", True)
    pairs: dict[str, Pairs] = {LAYERS: [], OUTER: []}
    for name, m in first.items():
        if should_quantize(m.shape, shape, int(MIN_SIZE)):
            pairs[LAYERS if name.startswith("layers.") else OUTER].append((np.asarray(m), np.asarray(second[name])))
    return pairs


def stored(values: np.ndarray, storage: fp8jax.QuantSpec) -> np.ndarray:
    """Returns the stored and decoded values, float64."""
    return np.asarray(fp8jax.quantize(jnp.asarray(values), storage).dequantize(), np.float64)


def direction(m: np.ndarray, v: np.ndarray) -> np.ndarray:
    return m / (np.sqrt(v) + EPS)


def mean_square(errors: Iterable[np.ndarray]) -> float:
    """Returns the mean square over all elements of all arrays."""
    errors = list(errors)
    return float(sum((e**2).sum() for e in errors) / sum(e.size for e in errors))


def error_table(pairs: Pairs) -> dict[str, float]:
    """Returns the mean squared error of m / sqrt(v), by "first order | second order"."""
    exact = [direction(m.astype(np.float64), v.astype(np.float64)) for m, v in pairs]
    storages = [(name, expand) for name in FORMATS for expand in (False, True)]
    ms = {s: [stored(m, spec("mu", *s)) for m, _ in pairs] for s in storages}
    vs = {s: [stored(v, spec("nu", *s)) for _, v in pairs] for s in storages}
    return {
        f"{label(*first)} | {label(*second)}": mean_square(
            direction(m, v) - d for m, v, d in zip(ms[first], vs[second], exact, strict=True)
        )
        for first in storages
        for second in storages
    }


def group_size_table(pairs: Pairs) -> dict[int, tuple[float, float]]:
    """Returns the error of e4m3 with expansion, and bytes per parameter of both moments, by group size."""
    exact = [direction(m.astype(np.float64), v.astype(np.float64)) for m, v in pairs]
    table = {}
    for size in GROUP_SIZES:
        specs = {moment: spec(moment, "e4m3", True, size) for moment in ("mu", "nu")}
        error = mean_square(
            direction(stored(m, specs["mu"]), stored(v, specs["nu"])) - d
            for (m, v), d in zip(pairs, exact, strict=True)
        )
        shapes = [m.shape for m, _ in pairs]
        size_bytes = sum(s.nbytes(shape) for s in specs.values() for shape in shapes)
        table[size] = error, size_bytes / sum(int(np.prod(shape)) for shape in shapes)
    return table


def dynamic_ranges(values: Iterable[np.ndarray], moment: str) -> dict[str, np.ndarray]:
    """Returns the dynamic range of each group of 128, before and after expansion, and its exponent k.

    The range is the largest over the smallest non-zero magnitude.
    """
    ranges: dict[str, list[np.ndarray]] = {"before": [], "after": [], "k": []}
    storage = spec(moment, "e4m3", True)
    for x in values:
        magnitude = jnp.abs(jnp.asarray(x))
        shape = storage.block_shape(x.shape)
        largest = np.asarray(blocks.reduce(magnitude, shape, jnp.max, 0.0), np.float64)
        nonzero = jnp.where(magnitude > 0, magnitude, jnp.inf)
        smallest = np.asarray(blocks.reduce(nonzero, shape, jnp.min, jnp.inf), np.float64)
        quantized = fp8jax.quantize(jnp.asarray(x), storage)
        assert quantized.expansion is not None
        k = np.asarray(quantized.expansion, np.float64)
        real = largest > 0
        ratio = largest[real] / smallest[real]
        ranges["before"].append(ratio)
        ranges["k"].append(k[real])
        ranges["after"].append(ratio ** k[real])
    return {name: np.concatenate(parts) for name, parts in ranges.items()}


def code_shares(values: Iterable[np.ndarray], moment: str) -> dict[str, np.ndarray]:
    """Returns the frequency of e4m3's 127 magnitudes among non-zero values, before and after expansion."""
    shares = {}
    arrays = [jnp.asarray(x) for x in values]
    for when, expand in (("before", False), ("after", True)):
        counts = np.zeros(127, np.int64)
        for x in arrays:
            codes = np.asarray(fp8jax.quantize(x, spec(moment, "e4m3", expand)).codes).view(np.uint8) & 0x7F
            counts += np.bincount(codes[np.asarray(x) != 0], minlength=127)
        shares[when] = counts / counts.sum()
    return shares


def entropy(shares: np.ndarray) -> float:
    """Returns the entropy of codes, in bits per value."""
    used = shares[shares > 0]
    return float(-np.sum(used * np.log2(used)))


def rows(
    errors: dict[str, dict[str, float]],
    ranges: dict[str, dict[str, np.ndarray]],
    shares: dict[str, dict[str, np.ndarray]],
    sizes: dict[int, tuple[float, float]],
) -> list[Row]:
    """Returns all rows of the results file."""
    entries = []
    for part, values in errors.items():
        for case, value in values.items():
            paper = PAPER.get(case) if part == LAYERS else None
            ratio = None if paper is None else paper / PAPER[BASE]
            first, second = case.split(" | ")
            entries.append(
                Row(
                    case, METRIC, value, "1", BASE, value / values[BASE], paper, ratio,
                    "Tables 1 and 9" if part == LAYERS else "The same for embedding and head", (first, second),
                )
            )  # fmt: skip
    for name, ratios in ranges.items():
        for what in ("before", "after", "k"):
            metric_name = "exponent k" if what == "k" else f"dynamic range {what} expansion"
            for percent in (5, 50, 95):
                value = float(np.percentile(ratios[what], percent))
                pivot = (f"{name}, {metric_name}", f"percentile {percent}")
                entries.append(Row(f"{name}, percentile {percent}", metric_name, value, table="Figure 2", pivot=pivot))
    for name, code_shares in shares.items():
        base = f"{name}, before expansion"
        for when in ("before", "after"):
            bits, ratio = entropy(code_shares[when]), entropy(code_shares[when]) / entropy(code_shares["before"])
            entries.append(
                Row(f"{name}, {when} expansion", "entropy of codes", bits, "bits", base, ratio, table="Figure 3")
            )
    base = f"group of {GROUP}"
    for size, (error, nbytes) in sizes.items():
        ratio = error / sizes[GROUP][0]
        table = "Group sizes of optimizer states"
        entries.append(Row(f"group of {size}", METRIC, error, "1", base, ratio, table=table))
        entries.append(Row(f"group of {size}", "moments", nbytes, "bytes/parameter", table=table))
    return entries


def notes(pairs: dict[str, Pairs]) -> list[str]:
    """Returns notes on the measurements and their differences from the paper."""
    counts = {part: sum(m.size for m, _ in values) for part, values in pairs.items()}
    return [
        f"Moments of the {counts[LAYERS]:,} parameters in the layers of the 5M Llama after {common.STEPS} steps of "
        f"AdamW (b1 0.9, b2 0.95) on the sources of Python's standard library, in groups of {GROUP}.",
        "The paper states neither the unit of its errors nor its model, so only ratios to E4M3 | E4M3 are compared.",
        "Our expansion differs from the paper's text by design. A group is mapped to a range of 57344, not 229376. "
        "Zeros are left out of statistics. A second moment that would round to zero gets the smallest code. DE8 of "
        "second moments is unsigned.",
        f"The {counts[OUTER]:,} parameters of embedding and head are listed separately. Groups of the head run along "
        "the bytes of the vocabulary, of which many never occur, so some groups span more than 8 bits can "
        "represent.",
        "Our copy of the paper has no images, so Figures 2 and 3 cannot be compared. Its text states ranges below "
        "1e4 and 1e1, and k of 1 to 3 and 5 to 15 (first and second moments). Figure 3 is given here by the entropy "
        "of the codes of the 127 magnitudes of e4m3 (at most 6.99 bits).",
        "The group sizes are of optimizer states; the paper's Table 10 is of activations (coat_activations).",
    ]


def table(options: argparse.Namespace) -> common.Table:
    """Returns the results file.

    Raises:
        UserError: see `common.dump`.
    """
    pairs = matrices(*common.dump(options.out).moments)
    errors = {part: error_table(values) for part, values in pairs.items()}
    ranges = {
        "first order": dynamic_ranges((m for m, _ in pairs[LAYERS]), "mu"),
        "second order": dynamic_ranges((v for _, v in pairs[LAYERS]), "nu"),
    }
    shares = {
        "first order": code_shares((m for m, _ in pairs[LAYERS]), "mu"),
        "second order": code_shares((v for _, v in pairs[LAYERS]), "nu"),
    }
    title = "COAT: quantization error of optimizer states (Tables 1 and 9, Figures 2 and 3)"
    entries = rows(errors, ranges, shares, group_size_table(pairs[LAYERS]))
    return common.Table("coat_optimizer", title, entries, notes(pairs))


if __name__ == "__main__":
    sys.exit(common.run(__doc__, table))
