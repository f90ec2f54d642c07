"""What INT8 with fallback can gain on Hopper, from measured rates: `python -m experiments.papers.int8_limit`.

It times nothing. Of a card's results/CARD/ it takes the rates of int8 products in blocks (gemm_int8), of FP8 ones
(gemm) and of bf16 (linear), the speed of a copy (quantize), and the times of a layer and of a step (layer, step_more,
step). The limit of a layer is that of its products, each at the rate of its shape, of the bytes that its quantizers
must read and write at a copy's speed, and of everything else as bf16 has it. arXiv 2503.08040 reports 1.57 for a step
on an RTX 4090, whose int8 units are four times as fast as its bf16 ones; Hopper's are twice.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.bench import cases
from experiments.bench.cases import Gemm
from experiments.models import sizes
from experiments.models.llama import LlamaConfig
from experiments.papers import common
from experiments.papers.common import Row
from experiments.results import lookup, record

FILES = ("gemm", "gemm_int8", "linear", "quantize", "layer", "step", "step_more")
TOKENS = 16384
# The share of blocks that fall back, as `bench linear` sets it, the middle of the recipe's 10 to 30 %.
SHARE = 0.2
# Bytes an element of what a quantizer reads and writes, bf16 in: of inputs codes, residual's where they fall back, and
# what is kept; of gradients and weights codes along and across.
BYTES = {"int8": (2 + 1 + SHARE + 1, 4.0, 4.0), "fp8": (2 + 1 + 1, 4.0, 4.0)}
PRODUCTS = {"int8": (1 + SHARE, 1.0, 1.0), "fp8": (1.0, 1.0, 1.0)}
ARMS = {"int8": "int8_fallback", "fp8": "fast"}
# The file and the implementation of products in 8 bits.
EIGHT = {"int8": ("gemm_int8", "ours int8 block"), "fp8": ("gemm", "ours tensor")}
WHOLES = "a layer of 7B", "a step of 1b"

Result = Mapping[str, Any]


class Shape(NamedTuple):
    """A linear layer: K inputs a token, and the widths of the layers that read the same input."""

    k: int
    widths: tuple[int, ...]


class CardRates(NamedTuple):
    """Of a card, what was measured.

    Attributes:
        plain: operations a second of bf16's three products of a linear layer, by (inputs, outputs).
        products: of 8-bit products by kind, each by (M, N, K).
        copy: bytes a second.
    """

    plain: Mapping[tuple[int, int], float]
    products: Mapping[str, Mapping[Gemm, float]]
    copy: float

    def bf16(self, k: int, n: int) -> float:
        """Of a linear layer; of one that was not measured the lowest, which leaves least for all else."""
        return self.plain.get((k, n), min(self.plain.values()))

    def eight(self, kind: str, shape: Gemm) -> float:
        """Of a product, or of its transpose; of one that was not measured the highest: it is a limit."""
        m, n, k = shape
        known = self.products[kind]
        return known.get(shape) or known.get((n, m, k)) or max(known.values())


def linears(config: LlamaConfig) -> tuple[Shape, ...]:
    """The linear layers of a block."""
    kv = config.kv_heads * config.head_dim
    return (
        Shape(config.dim, (config.dim, kv, kv)),
        Shape(config.dim, (config.dim,)),
        Shape(config.dim, (config.mlp_dim, config.mlp_dim)),
        Shape(config.mlp_dim, (config.dim,)),
    )


def plain_products(shapes: Sequence[Shape], tokens: int, rates: CardRates) -> float:
    """Milliseconds of bf16's three products of each layer, forward and backward."""
    return sum(6e3 * tokens * shape.k * n / rates.bf16(shape.k, n) for shape in shapes for n in shape.widths)


def products(shapes: Sequence[Shape], tokens: int, kind: str, rates: CardRates) -> float:
    """Milliseconds of the same in 8 bits, each product at the rate of its own shape."""
    return sum(
        2e3 * m * n * k * times / rates.eight(kind, (m, n, k))
        for shape in shapes
        for width in shape.widths
        for (m, n, k), times in zip(cases.products(tokens, shape.k, width), PRODUCTS[kind], strict=True)
    )


def quantized(shapes: Sequence[Shape], tokens: int, kind: str) -> float:
    """Bytes that quantizers read and write: an input that several layers read once."""
    x, dy, w = BYTES[kind]
    return sum(tokens * shape.k * x + sum(tokens * n * dy + shape.k * n * w for n in shape.widths) for shape in shapes)


def rates(files: Mapping[str, Result]) -> CardRates:
    """What a card's files say, shape by shape; of copies the fastest."""

    def of(name: str, impl: str, metric: str) -> list[tuple[tuple[int, ...], float]]:
        rows = (row for row in files[name]["rows"] if row["impl"] == impl and row["metric"] == metric)
        return [(tuple(map(int, re.findall(r"\d+", row["case"]))), 1e12 * row["value"]) for row in rows if row["value"]]

    eight = {kind: {gemm: rate for gemm, rate in of(*where, "rate") if len(gemm) == 3} for kind, where in EIGHT.items()}
    plain = {(shape[1], shape[2]): rate for shape, rate in of("linear", "xla bf16", "rate") if len(shape) == 3}
    return CardRates(plain, eight, max(rate for _, rate in of("quantize", "device copy", "bandwidth")))


def limit(shapes: Sequence[Shape], tokens: int, kind: str, rates: CardRates) -> tuple[float, float]:
    """Milliseconds of the products and of the quantizers of layers at their limit."""
    return products(shapes, tokens, kind, rates), 1e3 * quantized(shapes, tokens, kind) / rates.copy


def layers_alone(files: Mapping[str, Result], rates: CardRates) -> list[Row]:
    """Each linear layer of `bench linear`: the limit, over bf16's time, and what was measured."""
    rows = []
    for k, n in cases.LINEARS_7B:
        case = f"{TOKENS} x {k} -> {n}"
        shape = (Shape(k, (n,)),)
        measured = lookup.find(files["linear"], f"int8_fallback, {SHARE:.0%}".replace("%", " %"), "rate", "ratio",
                               case=case)  # fmt: skip
        if (k, n) not in rates.plain or not measured:
            continue
        bf16 = plain_products(shape, TOKENS, rates)
        rows += _compared("Linear layers", case, bf16, limit(shape, TOKENS, "int8", rates), 0.0, measured[0])
    return rows


def wholes(files: Mapping[str, Result], rates: CardRates) -> list[Row]:
    """A layer of 7B and a step of 1b: the limit of int8 and of FP8, and what was measured."""
    rows = []
    one = (sizes.get("7b", 256), 1, "layer", "bf16", "time", "")
    step = (sizes.get("1b", 32000), sizes.get("1b", 32000).layers, "step", lookup.AGAIN, "step", lookup.ONE)
    for config, count, name, base, metric, case in (one, step):
        shapes = linears(config) * count
        for kind, arm in ARMS.items():
            file = files["step_more" if (name, kind) == ("step", "int8") else name]
            plain = lookup.find(file, base, metric, "value", case=case)
            measured = lookup.find(file, arm, metric, "value", case=case)
            if not plain or not measured:
                continue
            rest = plain[0] - plain_products(shapes, TOKENS, rates)
            label = f"{WHOLES[0] if name == 'layer' else WHOLES[1]}, {arm}"
            rows += _compared("A layer and a step", label, plain[0], limit(shapes, TOKENS, kind, rates), rest,
                              plain[0] / measured[0])  # fmt: skip
    return rows


def _compared(
    table: str, case: str, bf16: float, parts: tuple[float, float], rest: float, measured: float
) -> list[Row]:
    products, quantizers = parts
    whole = products + quantizers + rest
    columns = [("bf16", bf16, "ms"), ("products at the limit", products, "ms"), ("quantizers", quantizers, "ms")]
    columns += [("all else, as bf16", rest, "ms")] if rest else []
    columns += [("limit over bf16", bf16 / whole, "x"), ("measured over bf16", measured, "x"),
                ("above the limit", bf16 / measured - whole, "ms")]  # fmt: skip
    return [Row(case, name, value, unit, table=table, pivot=(case, name)) for name, value, unit in columns]


def beyond(shapes: Sequence[Shape], tokens: int) -> dict[str, float]:
    """Bytes that the kernels of `int8_fallback` read and write beyond those of `quantized`, by cause.

    They were read off a layer's program that was compiled for an H200.
    """
    return {
        "an input's codes again for each further threshold": sum(
            tokens * shape.k * (3 + SHARE) * (len(shape.widths) - 1) for shape in shapes
        ),
        "what is kept, transposed backward": sum(2.0 * tokens * shape.k for shape in shapes),
        "an input read for its noise's key": sum(2.0 * tokens * shape.k for shape in shapes),
        "weights read forward and backward": sum(2.0 * shape.k * n for shape in shapes for n in shape.widths),
    }


def causes(rates: CardRates) -> list[Row]:
    """`beyond` of a layer of 7B and of all of 1b's, at a copy's speed."""
    table, rows = "What int8_fallback reads and writes beyond the limit, ms at a copy's speed", []
    for label, name in zip(WHOLES, ("7b", "1b"), strict=True):
        config = sizes.get(name, 32000)
        shapes = linears(config) * (1 if name == "7b" else config.layers)
        for cause, count in beyond(shapes, TOKENS).items():
            rows.append(Row(label, cause, 1e3 * count / rates.copy, "ms", table=table, pivot=(label, cause)))
    return rows


def verdict(rows: Sequence[Row]) -> list[str]:
    """What the rows say of INT8 beside FP8, of measurements beside their limits, and of what is read beyond."""
    found = {row.pivot: row.value for row in rows if row.pivot and row.value is not None}
    lines, slower = [], []
    for label in WHOLES:
        most = found.get((f"{label}, int8_fallback", "limit over bf16"))
        fast = found.get((f"{label}, fast", "measured over bf16"))
        if most is None or fast is None:
            continue
        slower.append(most < fast)
        how = "slower" if most < fast else "not slower"
        lines.append(
            f"{label[0].upper()}{label[1:]}: at its limit INT8 with fallback, {most:.2f} of bf16, is {how} than FP8 "
            f"(`fast`) was measured, {fast:.2f}."
        )
    if slower:
        why = "That is why `auto` takes FP8 on Hopper." if all(slower) else (
            "`auto` takes FP8 on Hopper, which these figures do not wholly bear out."
        )  # fmt: skip
        lines[-1] += f" {why}"
    for row in rows:
        if row.metric == "above the limit" and row.value is not None and row.value < 0:
            lines.append(
                f"{row.case}: {-row.value:.2f} ms below what stands here as its limit; all else is faster by this "
                "recipe than by bf16, or a product than at any shape that was measured."
            )
    for label in WHOLES:
        more = sum(value for (case, _), value in found.items() if case == label)
        above = found.get((f"{label}, int8_fallback", "above the limit"))
        if more and above is not None:
            whole = found[f"{label}, int8_fallback", "bf16"]
            lines.append(
                f"{label[0].upper()}{label[1:]} lies {above:.1f} ms above its limit; what is read and written beyond "
                f"takes {more:.1f} ms of them at a copy's speed ({100 * more / whole:.1f} % of bf16's time), if the "
                "kernels reach it."
            )
    return lines


def write(results: Path, files: Mapping[str, Result]) -> None:
    """Writes the table of one card."""
    speed = rates(files)
    rows = [*layers_alone(files, speed), *wholes(files, speed), *causes(speed)]
    sources = [pair for file in files.values() for pair in record.sources(file)]
    commits = ", ".join(dict.fromkeys(commit for commit, _ in sources))
    told = {"bf16": speed.plain.values()} | {kind: known.values() for kind, known in speed.products.items()}
    notes = [
        "Each product has the rate of its own shape. Where that was not measured an 8-bit one has the highest of its "
        "kind, for this is a limit, and bf16 the lowest, which leaves least for all else. Rates: "
        + ", ".join(f"{kind} {min(seen) / 1e12:,.0f} to {max(seen) / 1e12:,.0f} TOP/s" for kind, seen in told.items())
        + f"; a copy {speed.copy / 1e12:.2f} TB/s. From " + ", ".join(f"{name}.json" for name in files) + ".",
        f"INT8's products: a forward one of 1 + {SHARE} for blocks that fall back, and two backward. Bytes an element "
        f"of quantizers: inputs {BYTES['int8'][0]:g}, gradients and weights {BYTES['int8'][1]:g}; an input that "
        "several layers read counts once, where `int8_fallback` reads it once a layer, each with its threshold. All "
        "else (attention, norms, activations, head, optimizer) is what bf16 takes over its products; norms and "
        "activations of a recipe may take less than that, so it is no bound.",
        "Sums of int8 blocks leave the tensor core once a block, to be scaled, and blocks that fall back are "
        "multiplied twice; FP8 with one scale a tensor or a row sums there.",
        *verdict(rows),
        "Steps measured before commit e6883dd began with thresholds of 1, where blocks fall back: they may be slower "
        "than those of a run. The layer's are of thresholds that have settled.",
    ]  # fmt: skip
    title = "INT8 fallback: the limit on Hopper, and what was measured"
    device = record.sources(files["gemm_int8"])[0][1]
    common.write(
        "int8_limit", title, rows, notes, None, results, device=device, sources=[(commits, device)] * len(rows),
        date=max(file["date"] for file in files.values()),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Regenerates results/CARD/int8_limit.json of each card that has what it is made of."""
    options = common.parser(__doc__).parse_args(argv)
    for folder in sorted(path.parent for path in options.results.glob("*/gemm_int8.json")):
        paths = {name: folder / f"{name}.json" for name in FILES}
        if all(path.exists() for path in paths.values()):
            write(options.results, {name: record.load(path) for name, path in paths.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
