"""The comparison of recipes at the end of a run: a table, and sentences on the gains over the first recipe."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from experiments.results.figures import rows
from experiments.train.report import size
from experiments.train.result import RECENT, Result

_MAX_SPREAD = 0.1  # above this `spread`, speeds are not compared
_RESULTS_PATH = Path(__file__).parents[2] / "results"
_H100_PATH = "h100/step.json"


def comparison_table(results: Sequence[Result], *, has_speed: bool) -> Table:
    """Returns a table with a row for each recipe, relative to the first. It fits into 80 columns.

    Args:
        results: results of all recipes of a run.
        has_speed: whether their speeds can be compared.
    """
    baseline = results[0]
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    against = f"vs {baseline.recipe}"
    names = ("training\nloss", "validation\nloss", against, "moments", against)
    for name in (*names, *(("tokens/s", against) if has_speed else ())):
        table.add_column(name, justify="right", no_wrap=name != against)
    for result in results:
        is_baseline = result is baseline
        speed = (f"{result.tokens_per_s:,.0f}", _times(result.tokens_per_s / baseline.tokens_per_s, "x"))
        table.add_row(
            result.recipe,
            f"{result.train_loss:.4f}",
            f"{result.valid_loss:.4f}",
            "" if is_baseline else _percent(result, baseline),
            size(_moments(result)),
            "" if is_baseline else _times(_moments(baseline) / max(_moments(result), 1), "x less"),
            *((speed[0], "" if is_baseline else speed[1]) if has_speed else ()),
        )
    return table


def sentences(
    results: Sequence[Result], quantized: Mapping[str, str], spreads: Mapping[str, float], backend: str
) -> list[str]:
    """Returns sentences on the gains over the first recipe.

    Args:
        results: results of all recipes of a run.
        quantized: format of matmuls, such as "FP8", by recipe; only recipes that quantize them.
        spreads: `spread` of the speeds of each recipe's steps.
        backend: JAX backend, such as "cpu".
    """
    baseline, *rivals = results
    if not rivals:
        rival = "coat" if baseline.recipe == "bf16" else baseline.recipe
        return [f"Only {baseline.recipe} was trained. To compare it: --recipe bf16 {rival}"]
    lines = [_memory_sentence(result, baseline) for result in rivals if _moments(result) < _moments(baseline)]
    if backend == "cpu":
        names = [result.recipe for result in results if result.recipe in quantized]
        return [*lines, *([_cpu_sentence(names, quantized)] if names else [])]
    unsteady = {name: value for name, value in spreads.items() if value > _MAX_SPREAD}
    if unsteady:
        spread_texts = ", ".join(f"{name} by {100 * value:.0f} %" for name, value in unsteady.items())
        return [*lines, f"Speeds are not compared: the steps differ too much ({spread_texts}), as on a busy machine."]
    for result in rivals:
        factor = _times(result.tokens_per_s / baseline.tokens_per_s, " times as many tokens per second")
        lines.append(f"{result.recipe} trains on {factor} as {baseline.recipe}.")
    return lines


def spread(metrics: Sequence[Mapping[str, Any]]) -> float:
    """Returns the interquartile range of the newest steps' speeds relative to their median, or 0 for few steps."""
    speeds = [row["tokens_per_s"] for row in metrics if "tokens_per_s" in row][-RECENT:]
    if len(speeds) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(speeds, n=4)
    return (high - low) / middle


def has_comparable_speeds(spreads: Mapping[str, float], backend: str) -> bool:
    """Returns whether speeds can be compared. Speeds of 8-bit matmuls on a CPU do not predict those on a GPU."""
    return backend != "cpu" and all(value <= _MAX_SPREAD for value in spreads.values())


def _memory_sentence(result: Result, baseline: Result) -> str:
    ours, theirs = size(_moments(result)), size(_moments(baseline))
    factor = _times(_moments(baseline) / max(_moments(result), 1), " times less")
    change = f"{_percent(result, baseline)} validation loss"
    return f"Moments need {ours} instead of {theirs} ({factor}), at {change} ({result.recipe}, one seed)."


def _cpu_sentence(names: Sequence[str], quantized: Mapping[str, str]) -> str:
    formats = " and ".join(dict.fromkeys(quantized[name] for name in names))
    text = f"{formats} matmuls ({', '.join(names)}) are not faster on a CPU"
    factors = {name: factor for name in names if (factor := _h100_factor(name))}
    if not factors:
        return f"{text}."
    factor_texts = ", ".join(f"{factor:.1f} times as fast with {name}" for name, factor in factors.items())
    return f"{text}. On an H100, a step of a 1.1 B Llama is {factor_texts} as in bf16 (results/{_H100_PATH})."


def _h100_factor(recipe: str) -> float | None:
    """Returns the speedup of a step on an H100 over bf16, or None if it was not measured."""
    path = _RESULTS_PATH / _H100_PATH
    measured = json.loads(path.read_text()) if path.exists() else {"rows": []}
    ours, theirs = (rows(measured, "value", f"{name} > step") for name in (recipe, "bf16"))
    return float(theirs[0] / ours[0]) if len(ours) and len(theirs) else None


def _moments(result: Result) -> int:
    return result.state_bytes["mu"] + result.state_bytes["nu"]


def _percent(result: Result, baseline: Result) -> str:
    # Avoids a negative zero.
    return f"{round(100 * (result.valid_loss / baseline.valid_loss - 1), 2) + 0.0:+.2f} %"


def _times(factor: float, unit: str) -> str:
    return f"{factor:.1f}{unit}" if abs(factor - 1) >= 0.05 else "same"
