"""COAT, section 6 and Table 13: training in 8 bits beside bf16, over many seeds, and a recipe that is damaged a little.

    python -m experiments.papers.training_parity --data 'books/*.txt' --limit 540
    python -m experiments.papers.training_parity --judge

The first trains every seed of every arm that results/parity/ lacks, one after another on one device, and writes a file
after each; stopped, or out of time (--limit, in seconds), the same command goes on. Both compare what is there. With
`--size 65m` runs are of a larger model, in results/parity_65m/; with `--size 65m_short` they are a tenth as long.

An arm's difference is that of its mean loss from the mean of bf16's seeds. Its noise is that of the differences within
a seed, which has one start and one order of text for all arms, and no other noise: training is chaotic. An arm passes
if the 95 % interval of its difference, in training and in validation loss, lies within the limit on both sides; it
fails if an interval lies outside; else the runs cannot tell. The control must fail.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy import stats  # type: ignore[import-untyped]

import fp8jax
from experiments import flags
from experiments.errors import UserError
from experiments.papers import common, parity_runs
from experiments.papers.common import Row
from experiments.papers.parity_runs import ParityArm, Setting
from experiments.results import record

# Decided before the runs. COAT's own training loss is 0.67 % above bf16's in pretraining OLMo-1B (Table 3).
LIMIT, CONFIDENCE = 0.005, 0.95
BASE, CONTROL = "bf16", "control"


def _moss(**linear: Any) -> fp8jax.Recipe:
    moss = fp8jax.recipes.moss()
    return dataclasses.replace(moss, linear=dataclasses.replace(moss.linear, **linear))


ARMS: dict[str, ParityArm] = {
    BASE: ParityArm(fp8jax.recipes.bf16()),
    "coat": ParityArm(fp8jax.recipes.coat()),
    CONTROL: ParityArm(fp8jax.recipes.coat(), "forward", 3),
    "coat_fast": ParityArm(fp8jax.recipes.coat_fast()),
    "moss": ParityArm(fp8jax.recipes.moss()),
    "fast": ParityArm(fp8jax.recipes.fast()),
    "int8_fallback": ParityArm(fp8jax.recipes.int8_fallback()),
    "int8_block": ParityArm(fp8jax.recipes.int8_block()),
    "fp8_lm": ParityArm(fp8jax.recipes.fp8_lm()),
    "fp8_lm_two_phase": ParityArm(fp8jax.recipes.fp8_lm_two_phase()),
    "coat_optimizer": ParityArm(fp8jax.recipes.coat_optimizer()),
    "coat_activations": ParityArm(fp8jax.recipes.coat_activations()),
    f"{CONTROL}_one_bit": ParityArm(fp8jax.recipes.coat(), "forward", 2),
    f"{CONTROL}_wgrad": ParityArm(fp8jax.recipes.coat(), "wgrad", 2),
    # Steps between measurements of automatic scaling's weights; moss has 500.
    # Masters by parts, rounded stochastically, and layers updated inside the backward pass, beside fp32 masters.
    "master_bf16_int8": ParityArm(fp8jax.recipes.bf16(), master="bf16+int8"),
    "master_bf16_stochastic": ParityArm(fp8jax.recipes.bf16(), master="bf16+stochastic"),
    "released_by_shares": ParityArm(fp8jax.recipes.bf16(), release="previous"),
    "coat_fp8_head": ParityArm(dataclasses.replace(fp8jax.recipes.coat(), head=fp8jax.recipes.HEAD)),
    **{f"moss_interval_{steps}": ParityArm(_moss(weight_amax_interval=steps)) for steps in (1, 100, 2000)},
}
SEEDS = 8
# The share of the steps, the last ones, that a training loss is the mean of.
TAIL = 0.1
TRAINING, VALIDATION = "training loss", "validation loss"
# By name the folder of results that runs of a size are in, and its setting; the larger one reads 301 M bytes.
SIZES: dict[str, tuple[str, Setting]] = {
    "13m": ("parity", Setting()),
    "65m": (
        "parity_65m",
        Setting(dim=1024, layers=5, heads=8, mlp_dim=2816, length=1024, steps=4600, warmup=200),
    ),
    "65m_short": (
        "parity_65m_short",
        Setting(dim=1024, layers=5, heads=8, mlp_dim=2816, length=1024, steps=400, warmup=40),
    ),
}
SMALL = "13m"
TABLES = {
    "13m": "Many seeds of a small model",
    "65m": "Seeds of a larger model, each beside bf16's",
    "65m_short": "Seeds of the larger model for 400 steps, each beside bf16's",
}

Losses = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Arm, seed, metric."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of an arm's mean loss from that of bf16's seeds, as a share of it.

    Attributes:
        value: positive where the arm is worse.
        half: half of the confidence interval's width; infinite where nothing tells the noise.
        seeds: of the arm.
    """

    value: float
    half: float
    seeds: int

    @property
    def verdict(self) -> str:
        """What the runs show of this difference."""
        if self.seeds < 2:
            return "not judged"
        if abs(self.value) + self.half <= LIMIT:
            return "within"
        return "outside" if abs(self.value) - self.half > LIMIT else "undecided"

    def __str__(self) -> str:
        return f"{100 * self.value:+.2f} ± {100 * self.half:.2f} %"


def differences(losses: Losses, metric: str, *, paired: bool) -> dict[str, Difference]:
    """Of each arm but bf16, with noise that is pooled over all arms but the control.

    Args:
        losses: bf16's, and those of arms.
        metric: which loss.
        paired: whether seeds are compared with the same seeds of bf16, else arms with the mean of all of bf16's.
    """
    values = {name: {seed: of[metric] for seed, of in runs.items()} for name, runs in losses.items()}
    base = values.pop(BASE)
    gaps, spread = {}, {} if paired else {BASE: list(base.values())}
    for name, runs in values.items():
        against = {seed: base[seed] for seed in runs} if paired else base
        gaps[name] = np.mean(list(runs.values())) / np.mean(list(against.values())) - 1
        spread[name] = [x / base[seed] for seed, x in runs.items()] if paired else list(runs.values())
    relative = {name: np.divide(x, np.mean(x)) for name, x in spread.items()}
    sound = [x for name, x in relative.items() if not name.startswith(CONTROL)]
    freedom = sum(len(x) - 1 for x in sound)
    noise = np.sqrt(sum(np.var(x) * len(x) for x in sound) / freedom) if freedom else np.inf
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, freedom) if freedom else np.inf
    result = {}
    for name, value in gaps.items():
        count = len(values[name])
        own = float(np.std(relative[name], ddof=1)) if count > 1 else 0.0
        error = max(noise, own) * np.sqrt(1 / count + (0 if paired else 1 / len(base)))
        result[name] = Difference(float(value), float(quantile * error), count)
    return result


def judge(losses: Losses, *, paired: bool) -> dict[str, str]:
    """What the runs show of each arm but bf16: "within", "outside", "undecided" or "not judged"."""
    gaps = [differences(losses, metric, paired=paired) for metric in (TRAINING, VALIDATION)]
    verdicts: dict[str, str] = {}
    for name in gaps[0]:
        of = {each[name].verdict for each in gaps}
        verdicts[name] = next(x for x in ("not judged", "outside", "undecided", "within") if x in of)
    return verdicts


def paired_runs(results: Path, size: str) -> tuple[Losses, dict[str, dict[str, Any]]]:
    """Losses of the runs of a size, of seeds that bf16 has, too, and the files, of arms that there were, too."""
    former = sorted({path.stem for path in _file(results, size, BASE).parent.glob("*.json")} - {*ARMS})
    paths = {name: _file(results, size, name) for name in (*ARMS, *former)}
    files = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    base = files.get(BASE, {"runs": {}})["runs"]
    losses = {
        name: {int(seed): _run(content["runs"][seed]) for seed in base if seed in content["runs"]}
        for name, content in files.items()
    }
    return {name: runs for name, runs in losses.items() if runs}, files


def _file(results: Path, size: str, name: str) -> Path:
    return results / SIZES[size][0] / f"{name}.json"


def _run(run: Mapping[str, Any]) -> dict[str, float]:
    return {TRAINING: _tail(run["losses"]), VALIDATION: run["valid_loss"]}


def _tail(losses: Sequence[float]) -> float:
    return float(np.mean(losses[-max(1, round(TAIL * len(losses))) :]))


def rows(losses: Losses, table: str, *, paired: bool) -> list[Row]:
    """Means, differences from bf16 and half-widths of intervals, in percent, as a table of arms."""
    entries = []
    for name, runs in losses.items():
        entries.append(Row(name, "seeds", len(runs), table=table, pivot=(name, "seeds")))
        for metric in (TRAINING, VALIDATION):
            mean = float(np.mean([run[metric] for run in runs.values()]))
            entries.append(Row(name, metric, mean, "nats/byte", table=table, pivot=(name, metric)))
            if name != BASE:
                of = differences(losses, metric, paired=paired)[name]
                half = 100 * of.half if np.isfinite(of.half) else None
                for column, value in ((f"{metric}: % above bf16", 100 * of.value), ("±", half)):
                    label = f"± ({metric})" if column == "±" else column
                    entries.append(Row(name, label, value, "%", table=table, pivot=(name, label)))
    return entries


def told(losses: Losses, *, paired: bool) -> list[str]:
    """The verdict on each arm, in words."""
    gaps = {metric: differences(losses, metric, paired=paired) for metric in (TRAINING, VALIDATION)}
    lines = []
    for name, verdict in judge(losses, paired=paired).items():
        shown = "; ".join(f"{metric} {of[name]}" for metric, of in gaps.items())
        what = {"within": f"passes: within ±{LIMIT:.1%}", "outside": f"fails: outside ±{LIMIT:.1%}",
                "undecided": f"cannot be told from ±{LIMIT:.1%} by these runs",
                "not judged": "one seed, not judged"}[verdict]  # fmt: skip
        lines.append(f"{name}: {shown}; {what}.")
    return lines


def draw(losses: Losses, curves: Mapping[str, Mapping[int, np.ndarray]]) -> Figure:
    """Differences of training losses by step, means over seeds; and differences of all seeds with intervals.

    Args:
        losses: at the end of the runs.
        curves: of each arm and seed, (steps / 10,).
    """
    figure = Figure(figsize=(13, 4.5), dpi=110, layout="constrained")
    left, *right = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    for name in losses:
        if name != BASE:
            difference = 100 * np.mean([curves[name][s] / curves[BASE][s] - 1 for s in losses[name]], 0)
            width = min(10, len(difference))
            smooth = np.convolve(difference, np.ones(width) / width, "valid")
            left.plot(parity_runs.STRIDE * np.arange(len(smooth)), smooth, label=name, lw=1.1)
    left.set(xlabel="step", ylabel="training loss, % above bf16's with the same seed, mean of seeds")
    left.set_yscale("symlog", linthresh=1)
    left.legend(fontsize=8)
    for axes, metric in zip(right, (TRAINING, VALIDATION), strict=True):
        for y, (name, of) in enumerate(differences(losses, metric, paired=True).items()):
            each = [100 * (run[metric] / losses[BASE][s][metric] - 1) for s, run in losses[name].items()]
            axes.plot(each, [y] * len(each), "o", color="0.6", ms=4)
            axes.errorbar(100 * of.value, y, xerr=100 * of.half, fmt="s", color="tab:red", capsize=4)
        axes.set_yticks(range(len(losses) - 1), [name for name in losses if name != BASE], fontsize=8)
        axes.axvspan(-100 * LIMIT, 100 * LIMIT, color="tab:green", alpha=0.15)
        axes.set(xlabel=f"{metric}, % above bf16")
    for axes in (left, *right):
        axes.grid(alpha=0.3)
    return figure


def _described(files: Mapping[str, Mapping[str, Any]]) -> str:
    setting = Setting(**files[BASE]["setting"])
    dates = sorted({of["date"] for of in files.values()})
    return (
        f"a Llama of {files[BASE]['parameters']:,} parameters, {setting.tokens / 1e6:.1f} M bytes a run, {dates[0]} to "
        f"{dates[-1]}. Every arm of a seed has the same start and the same text, so that differences are within seeds."
    )


def write(results: Path) -> None:
    """Regenerates results/CARD/training_parity.json, and .png where there are runs of several seeds."""
    losses, files = paired_runs(results, SMALL)
    others = {size: paired_runs(results, size) for size in SIZES if size != SMALL}
    table, notes, figure = list[Row](), list[str](), None
    sources: list[tuple[str, str]] = []
    notes += [
        f"An arm passes if the {CONFIDENCE:.0%} interval of its difference from bf16, in training and in validation "
        f"loss, lies within ±{LIMIT:.1%} of the loss, which was decided before the runs; it fails if one lies outside. "
        f"Training loss is the mean of the last {TAIL:.0%} of the steps.",
    ]
    if BASE in losses and len(losses[BASE]) > 1:
        table += rows(losses, TABLES[SMALL], paired=True) + moments(files, TABLES[SMALL])
        sources += [source(files[row.case]) for row in table]
        curves = {
            name: {s: np.array(files[name]["runs"][str(s)]["losses"]) for s in runs} for name, runs in losses.items()
        }
        figure = draw(losses, curves)
        notes += [
            f"Many seeds: {_described(files)} {CONTROL} is coat whose forward products read codes without mantissa "
            f"bits, powers of two; {CONTROL}_one_bit, whose forward products read codes of one; and {CONTROL}_wgrad, "
            "whose weight gradients' products read codes of two mantissa bits less.",
            *(
                f"{name} ran on {of['replicas']} devices, whose gradients travelled as its recipe says."
                for name, of in files.items()
                if of.get("replicas", 1) > 1
            ),
            *told(losses, paired=True),
        ]
        if CONTROL in losses and judge(losses, paired=True)[CONTROL] != "outside":
            notes.append("The control is not told from a sound arm: what passes here has not been shown to train well.")
    else:
        notes.append("Not run yet with many seeds of a small model.")
    for size, (larger, larger_files) in others.items():
        if BASE in larger:
            more = rows(larger, TABLES[size], paired=True)
            table += more
            sources += [source(larger_files[row.case]) for row in more]
            what = "Larger" if size == "65m" else TABLES[size]
            notes += [f"{what}: {_described(larger_files)}", *told(larger, paired=True)]
    title = "COAT: training in 8 bits beside bf16 (section 6, Table 13)"
    arguments = "--data 'books/*.txt' --limit 540"
    if not table:
        return
    dated = (*files.values(), *(of for _, more_files in others.values() for of in more_files.values()))
    date = max(of["date"] for of in dated)
    common.write(
        "training_parity", title, table, notes, figure, results, arguments=arguments, device=sources[0][1],
        sources=sources, date=date,
    )  # fmt: skip


def moments(files: Mapping[str, Mapping[str, Any]], table: str) -> list[Row]:
    """Bytes of Adam's moments a parameter."""
    column = "bytes of moments a parameter"
    return [Row(name, column, of["moments"], table=table, pivot=(name, column)) for name, of in files.items()]


def source(of: Mapping[str, Any]) -> tuple[str, str]:
    """The commits of an arm's runs, as the file says, and the device."""
    commits = {run.get("commit") or of.get("commit") or record.UNKNOWN: None for run in of["runs"].values()}
    return ", ".join(commits), of["device"]


def main(argv: Sequence[str] | None = None) -> int:
    """Trains what is missing and regenerates training_parity.json and .png; 1 where runs are missing still."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=[], help="text, as experiments.train takes it")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS), help="which to train (default: all)")
    parser.add_argument("--size", choices=SIZES, default=SMALL, help=f"parameters of the model (default: {SMALL})")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"runs of an arm (default: {SEEDS})")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no run would end")
    parser.add_argument("--judge", action="store_true", help="train nothing")
    parser.add_argument("--results", type=Path, default=common.RESULTS, help="where to write (default: results)")
    options = parser.parse_args(argv)
    begin = time.perf_counter()

    def room(took: float) -> bool:
        return time.perf_counter() - begin + 1.2 * took < options.limit

    if not options.judge:
        flags.recommend()
        try:
            setting = SIZES[options.size][1]
            text = parity_runs.read_text(options.data, setting)
            for name in options.arms:
                path = _file(options.results, options.size, name)
                parity_runs.train_arm(name, ARMS[name], range(options.seeds), text, setting, path, room)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    write(options.results)
    _, files = paired_runs(options.results, options.size)
    short = [name for name in options.arms if len(files.get(name, {"runs": ()})["runs"]) < options.seeds]
    if short and not options.judge:
        print(f"not finished: {', '.join(short)}; give the same command again")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
