"""How figures are looked up in results/CARD/NAME.json, and written: what claims and quotes are made of."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
OURS = "compressed_adamw"
FP32 = "fp32 weights, bf16 gradients"
MEANS = "geometric mean"
PARTS = ", bf16+int8 masters"
MOST = ("tokens", "tokens/s", 0), ("batch", "sequences", 0)
MOST_EACH = ("tokens", "tokens/s a GPU", 0), ("batch", "sequences a GPU", 0)
BOUNDED = "COAT, lean, bounded scales, weights held"


def find(
    result: Result, impl: str, metric: str, field: str, baseline: str | None = None, case: str = ""
) -> list[float]:
    """A field of all rows of an implementation (or, in tables of papers, a case) and metric, means apart.

    Args:
        result: content of a results file.
        impl: implementation, or case where all rows are ours.
        metric: which.
        field: "value" or "ratio".
        baseline: only rows that are compared with this.
        case: only cases that begin so; without, all but means.
    """
    return [
        row[field]
        for row in result["rows"]
        if impl in (row["impl"], row["case"]) and row["metric"] == metric and row[field] is not None
        and (baseline is None or row["baseline"] == baseline)
        and (row["case"].startswith(case) if case else not row["case"].startswith(MEANS))
    ]  # fmt: skip


def span(values: Sequence[float], unit: str = "", digits: int = 2) -> str | None:
    """The smallest to the largest, or one figure where they read the same; None of none."""
    if not values:
        return None
    ends = list(dict.fromkeys(f"{x:.{digits}f}" for x in (min(values), max(values))))
    return " to ".join(ends) + (f" {unit}" if unit else "")


def ratio(impl: str, metric: str, baseline: str | None = None, case: str = "", unit: str = "x") -> Any:
    """Looks ratios up."""
    return lambda result: span(find(result, impl, metric, "ratio", baseline, case), unit)


def value(impl: str, metric: str, unit: str, digits: int = 1, case: str = "") -> Any:
    """Looks values up."""
    return lambda result: span(find(result, impl, metric, "value", None, case), unit, digits)


def beside(label: str, look: Callable[[Result], str | None]) -> Callable[[Result], str | None]:
    """A figure with the name of whose it is before it."""

    def told(result: Result) -> str | None:
        text = look(result)
        return text and f"{label} {text}"

    return told


def several(*looks: Callable[[Result], str | None]) -> Callable[[Result], str | None]:
    """Figures of several, those that there are."""
    return lambda result: "; ".join(text for look in looks if (text := look(result))) or None


def against_22(impl: str) -> Callable[[Result], str | None]:
    """The paper's 22.66 U for bf16 over what a layer keeps here."""

    def look(result: Result) -> str | None:
        saved, theirs = find(result, impl, "total", "value"), find(result, "paper, BF16", "kept", "value")
        return span([theirs[-1] / saved[0]], "x") if saved else None

    return look


def difference(*names: str) -> Callable[[Result], str | None]:
    """An arm's differences in training and validation loss, of the table of many seeds, else of the older runs.

    Args:
        names: of the arm in either.
    """

    def look(result: Result) -> str | None:
        rows = {(r["table"], r["pivot"][0], r["pivot"][1]): r["value"] for r in result["rows"] if r.get("pivot")}
        for table, name in itertools.product(dict.fromkeys(table for table, *_ in rows), names):
            parts = []
            for loss in ("training loss", "validation loss"):
                above, half = rows.get((table, name, f"{loss}: % above bf16")), rows.get((table, name, f"± ({loss})"))
                if above is not None and half is not None:
                    parts.append(f"{above:+.2f} ± {half:.2f} %")
            if parts:
                return f"{parts[0]} (training), {parts[1]} (validation)"
        return None

    return look


def above(arm: str) -> Callable[[Result], str | None]:
    """Looks up by how much the validation loss of seeds lies above bf16's, with its interval."""

    def look(result: Result) -> str | None:
        found = [find(result, arm, metric, "value") for metric in ("validation loss: % above", "± (validation loss)")]
        return f"{found[0][0]:+.2f} ± {found[1][0]:.2f} %" if all(found) else None

    return look


def exchanged(result: Result, impl: str) -> str:
    """What a GPU's collectives of a step result in, all kinds."""
    rows = [row for row in result["rows"] if row["impl"] == impl and row["metric"].startswith("exchanged")]
    return f"{sum(row['value'] for row in rows) / 1e3:.1f} GB"


AGAIN = "bf16, recomputed"


def signal(scheme: str) -> Callable[[Result], str | None]:
    """SNR of the activations of MOSS's Table 7, late in training."""
    names = ("attention output", "FFN intermediate", "LayerNorm input")
    return lambda result: span(
        [row["value"] for row in result["rows"] if row["case"] in {f"{name}, late, {scheme}" for name in names}],
        "dB",
        1,
    )


ONE, DATA, FSDP = "1b, one GPU", "1b, data parallel over 2", "1b, FSDP over 2"
FOUR = "1b, data parallel over 4", "1b, FSDP over 4", "1b, mesh fsdp=2,tensor=2"
FSDP_7B, FIT_7B = "7b, FSDP over 2, 4 x", "7b, FSDP over 2, what fits"


def of_ideal(order: str) -> Callable[[Result], str | None]:
    """How near the fallback product comes to the block product, over all shares of blocks and shapes."""

    def look(result: Result) -> str | None:
        names = (f"ours fallback {rate} {order}" for rate in (0.1, 0.2, 0.3, 0.5))
        return span([x for name in names for x in find(result, name, "of ideal", "ratio")])

    return look


def quotient(above: str, below: str, metric: str, digits: int = 2) -> Callable[[Result], str | None]:
    """One case's value over another's."""

    def look(result: Result) -> str | None:
        top, bottom = find(result, above, metric, "value"), find(result, below, metric, "value")
        return span([top[0] / bottom[0]], "x", digits) if top and bottom else None

    return look


def error(impl: str, case: str) -> Callable[[Result], str | None]:
    """An error of an update, three digits; where an update was not finite, that."""

    def look(result: Result) -> str | None:
        rows = [r for r in result["rows"] if (r["impl"], r["case"], r["metric"]) == (impl, case, "error of the update")]
        return None if not rows else "not finite" if rows[0]["value"] is None else f"{rows[0]['value']:.3g}"

    return look


# Results files of `experiments.bench.models`, the case in each, and what it is.
USERS = {"models": ("Llama 1.1B", "Llama of 1.1 B parameters"), "models_vitl": ("ViT-L/16", "ViT-L/16"),
         "models_vitl_cudnn": ("ViT-L/16, attention by cuDNN", "ViT-L/16 whose `attention_fn` is cuDNN's"),
         "models_gpt350m": ("GPT-2 350M", "GPT-2 of 350 M parameters"),
         "models_gpt124m": ("GPT-2 124M", "GPT-2 of 124 M parameters")}  # fmt: skip
SUSTAINED = "speed, sustained"
PEER_OURS = "fp8jax.compressed_adamw"
PEERS = {"torchao 8-bit": "torchao AdamW8bit", "torchao FP8": "torchao AdamWFp8",
         "bitsandbytes": "bitsandbytes AdamW8bit", "FlashOptim": "FlashOptim FlashAdamW"}  # fmt: skip
# Streams of `experiments.bench.peers`; the last ones are those where peers are as good or better.
PEER_STREAMS = {
    "training": "gradients of a small Llama's training",
    "sigma 3": "gradients of log-normal scales, sigma 3",
    "sigma 1": "the same, sigma 1",
    "outlier": "one gradient of 1e4",
    "rare rows": "rows that seldom have one",
    "16 dead": "16 of 128 columns dead",
    "tiny": "like-sized gradients of 1e-8",
}
# Figures of `experiments.papers.int8_outliers`, and what decides whether a block falls back.
HALVES, PERPLEXITY = "error of two halves of 8 bits over that of 16 bits", "perplexity, % above the unquantized one"
COSINES = "1 - cosine of gradients, share of blocks that fall back forward and backward"
CRITERIA = ("absmax", "l1", "relative_l1")
