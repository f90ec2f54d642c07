"""COAT, Table 13, and its like for the other recipes, and MOSS, Table 9: five seeds of each beside bf16's.

    python -m experiments.papers.recipe_parity --data 'books/*.txt' --arms coat fast --limit 380
    python -m experiments.papers.recipe_parity --judge

The first trains the seeds of some arms that results/parity_recipes/ lacks; several such processes, each on a GPU of its
own and with arms of its own, fill one folder. The second makes the page of all that is there. Recipes, losses and the
number of seeds are stated here, before any run is looked at. Runs of another text, setting or card are refused. With
`--study intervals` the arms are MOSS's intervals between measurements of weights' scales, of a smaller model.

Every seed has one start and one order of text for all arms. The difference of an arm is the mean over seeds of what it
lies above the same seed of bf16, with Student's t of seeds - 1 degrees of freedom. Several recipes are looked at, so
that intervals are Bonferroni's, of all recipes together, and of differences from zero Holm's step-down test decides.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from scipy import stats  # type: ignore[import-untyped]

import fp8jax
from experiments import flags
from experiments.errors import UserError
from experiments.papers import common, parity_runs, training_parity
from experiments.papers.common import Row
from experiments.papers.parity_runs import ParityArm, Setting
from experiments.papers.training_parity import BASE, LIMIT, TAIL, TRAINING, VALIDATION
from experiments.results import record
from experiments.train import lock

SEEDS, FAMILY_ERROR = 5, 0.05
LOSSES = (TRAINING, VALIDATION)
TABLE = "Seeds of each beside bf16's"
CONTROL = f"{training_parity.CONTROL}_one_bit"
# Products whose fast accumulation is an option, beside the forward one, by what it costs.
SUMS, DGRAD = "coat, fast accumulation", "coat_fast, fast dgrad"
ABLATIONS = {
    name: dataclasses.replace(recipe, linear=dataclasses.replace(recipe.linear, fast_accumulation=products))
    for name, recipe, products in (
        (SUMS, fp8jax.recipes.coat(), ("forward", "dgrad", "wgrad")),
        (DGRAD, fp8jax.recipes.coat_fast(), ("forward", "dgrad")),
    )
}
ARMS = training_parity.ARMS | {name: ParityArm(recipe) for name, recipe in ABLATIONS.items()}


@dataclasses.dataclass(frozen=True)
class SeedStudy:
    """What is compared with bf16, stated before the runs.

    Attributes:
        title: of the page.
        suffix: of its name, after "recipe_parity".
        folder: of the runs, in that of results.
        setting: the model and its schedule.
        recipes: arms of which it is asked whether they differ from bf16; all together they err with 5 %.
        others: arms that may be trained, too, and are not among these: parts of recipes that tell why one differs,
            and other ways to train.
        pairs: comparisons with another arm than bf16, by what they are called.
        about: what else is to be said.
        doubled: arms with twice as many seeds.
    """

    title: str
    suffix: str
    folder: str
    setting: Setting
    recipes: tuple[str, ...]
    others: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str, str], ...] = ()
    about: str = ""
    doubled: tuple[str, ...] = ()

    def seeds(self, arm: str) -> range:
        """Of an arm."""
        return range(SEEDS * (2 if arm in self.doubled else 1))

    @property
    def confidence(self) -> float:
        """Of each interval, that those of all recipes and losses hold together."""
        return 1 - FAMILY_ERROR / self.tests

    @property
    def tests(self) -> int:
        """Stated before the runs: each recipe, each loss."""
        return len(self.recipes) * len(LOSSES)

    def path_of(self, results: Path, arm: str) -> Path:
        return results / self.folder / f"{arm.replace(', ', '_').replace(' ', '_')}.json"


STUDIES = {
    "recipes": SeedStudy(
        "Five seeds of each recipe beside bf16 (COAT, Table 13)",
        "",
        "parity_recipes",
        training_parity.SIZES["65m_short"][1],
        ("coat", "coat_fast", "fast", "int8_fallback", "fp8_lm"),
        (
            CONTROL,
            "coat_optimizer",
            "coat_activations",
            "int8_block",
            "fp8_lm_two_phase",
            "released_by_shares",
            "coat_fp8_head",
            SUMS,
            DGRAD,
        ),
        (("coat_fast beside coat", "coat_fast", "coat"),),
        f"{CONTROL} is coat whose forward products read codes of one mantissa bit: it must differ. Five seeds of "
        "a coat_fast whose sums were all fast were looked at first; as it is now, and bf16, it has twice as many.",
        doubled=(BASE, "coat_fast"),
    ),
    "intervals": SeedStudy(
        "MOSS: steps between measurements of weights' scales (Tables 9, 11)",
        "_intervals",
        "parity_intervals",
        training_parity.SIZES["13m"][1],
        ("moss_interval_1", "moss_interval_100", "moss", "moss_interval_2000"),
        pairs=(("moss beside every step (Table 11)", "moss", "moss_interval_1"),),
        about="moss measures its weights' scales every 500 steps; 2,000 are more than the run has, so that scales are "
        "predicted from the first weights on. The paper has accuracies on NumGLUE after fine-tuning a Llama-2-7B: "
        "bf16 58.7 %, every step 59.3, 100 steps 59.4, 500 steps 59.4, 2,000 steps 58.1; we have neither, and give "
        "losses. In its Table 11 predicted scales are within 0.2 % of those of every step in three such accuracies; "
        "here stands the difference of the two losses. What scales cost is in results/pages/scaling.md.",
    ),
}

Runs = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Arm, seed, loss."""


class Gap(NamedTuple):
    """How far an arm's loss lies above another's, over seeds that both have, as a share.

    Attributes:
        each: of a seed.
        value: their mean.
        half: half of the interval's width.
        p: of no difference, two-sided; as it is, for no other comparison.
    """

    each: tuple[float, ...]
    value: float
    half: float
    p: float


def gap(arm: Mapping[int, float], base: Mapping[int, float], confidence: float) -> Gap | None:
    """The paired difference of two arms; None with fewer than two seeds, which tell no noise."""
    each = np.array([arm[seed] / base[seed] - 1 for seed in sorted(arm.keys() & base.keys())])
    if len(each) < 2:
        return None
    error = float(np.std(each, ddof=1) / np.sqrt(len(each)))
    quantile = float(stats.t.ppf((1 + confidence) / 2, len(each) - 1))
    p = float(2 * stats.t.sf(abs(each.mean()) / error, len(each) - 1)) if error else float(each.mean() == 0)
    return Gap(tuple(each.tolist()), float(each.mean()), quantile * error, p)


def holm(values: Mapping[Any, float], tests: int) -> dict[Any, float]:
    """Adjusted p of each of several tests: the smallest level of all together at which Holm's procedure rejects it.

    Args:
        values: p of each that was made.
        tests: how many were stated; those not made count.
    """
    result, largest = dict[Any, float](), 0.0
    for rank, key in enumerate(sorted(values, key=lambda key: values[key])):
        largest = max(largest, min(1.0, (tests - rank) * values[key]))
        result[key] = largest
    return result


@dataclasses.dataclass(frozen=True)
class Judged:
    """What the runs show: gaps by arm and loss, and Holm's p of recipes.

    Attributes:
        gaps: of arms from bf16, and of the study's pairs.
        adjusted: p of each recipe and loss, for all of them together.
    """

    gaps: dict[tuple[str, str], Gap]
    adjusted: dict[tuple[str, str], float]

    @property
    def arms(self) -> list[str]:
        """What is compared."""
        return list(dict.fromkeys(arm for arm, _ in self.gaps))

    def verdict(self, arm: str) -> str:
        """ "within" the limit, "outside", or "undecided", by both losses."""
        ends = [(abs(g.value) + g.half, abs(g.value) - g.half) for (name, _), g in self.gaps.items() if name == arm]
        if all(far <= LIMIT for far, _ in ends):
            return "within"
        return "outside" if any(near > LIMIT for _, near in ends) else "undecided"

    def differs(self, arm: str) -> bool:
        """Whether a loss of a recipe differs from bf16's, at 5 % for all recipes together."""
        return any(p < FAMILY_ERROR for (name, _), p in self.adjusted.items() if name == arm)


def judge(study: SeedStudy, runs: Runs) -> Judged:
    """Compares every arm with bf16, and the study's pairs."""
    pairs = {name: (name, BASE) for name in runs if name != BASE}
    pairs |= {label: (arm, base) for label, arm, base in study.pairs}
    gaps = dict[tuple[str, str], Gap]()
    for label, (arm, base) in pairs.items():
        for loss in LOSSES:
            of, beside = ({s: run[loss] for s, run in runs.get(name, {}).items()} for name in (arm, base))
            if (found := gap(of, beside, study.confidence)) is not None:
                gaps[label, loss] = found
    return Judged(gaps, holm({key: g.p for key, g in gaps.items() if key[0] in study.recipes}, study.tests))


def read(study: SeedStudy, results: Path) -> tuple[Runs, dict[str, dict[str, Any]]]:
    """Losses of the arms that there are, of the stated seeds, and the files.

    Raises:
        UserError: two arms were trained on another text, card or setting.
    """
    paths = {name: study.path_of(results, name) for name in (BASE, *study.recipes, *study.others)}
    files = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    for key in ("text", "device", "setting"):
        first = next(iter(files), "")
        for name, content in files.items():
            if content[key] != files[first][key]:
                raise UserError(
                    f"{paths[name]} and {paths[first]} are of another {key}, {content[key]} and {files[first][key]}: "
                    "all arms have one; train one of them again"
                )
    losses = {
        name: {seed: loss_of(content["runs"][str(seed)]) for seed in study.seeds(name) if str(seed) in content["runs"]}
        for name, content in files.items()
    }
    return {name: runs for name, runs in losses.items() if runs}, files


def loss_of(run: Mapping[str, Any]) -> dict[str, float]:
    """Of a run's file the mean training loss of its last steps, and the validation loss after them."""
    losses = run["losses"]
    return {TRAINING: float(np.mean(losses[-max(1, round(TAIL * len(losses))) :])), VALIDATION: run["valid_loss"]}


def rows(runs: Runs, judged: Judged) -> list[Row]:
    """Means, differences in percent, half-widths and Holm's p, a row an arm."""
    entries = []

    def put(arm: str, column: str, value: float | None, unit: str = "1") -> None:
        entries.append(Row(arm, column, value, unit, table=TABLE, pivot=(arm, column)))

    for arm in dict.fromkeys((*runs, *judged.arms)):
        if arm in runs:
            put(arm, "seeds", len(runs[arm]))
        for loss in LOSSES:
            if arm in runs:
                put(arm, loss, float(np.mean([run[loss] for run in runs[arm].values()])), "nats/byte")
            if (of := judged.gaps.get((arm, loss))) is not None:
                put(arm, f"{loss}: % above", 100 * of.value, "%")
                put(arm, f"± ({loss})", 100 * of.half, "%")
                put(arm, f"p ({loss})", judged.adjusted.get((arm, loss), of.p))
    return entries


def told(study: SeedStudy, judged: Judged) -> list[str]:
    """The verdict on each arm, in words."""
    words = {"within": f"within ±{LIMIT:.1%}", "outside": f"outside ±{LIMIT:.1%}",
             "undecided": f"not told from ±{LIMIT:.1%} by so few seeds"}  # fmt: skip
    lines = []
    for arm in judged.arms:
        shown = "; ".join(
            f"{loss} {100 * g.value:+.2f} ± {100 * g.half:.2f} % (seeds "
            + ", ".join(f"{100 * x:+.2f}" for x in g.each) + f"; p {judged.adjusted.get((arm, loss), g.p):.2g})"
            for (name, loss), g in judged.gaps.items() if name == arm
        )  # fmt: skip
        differs = ""
        if arm in study.recipes:
            differs = "; differs from bf16" if judged.differs(arm) else "; no difference from bf16 is shown"
        lines.append(f"{arm}: {shown}; {words[judged.verdict(arm)]}{differs}.")
    return lines


def draw(judged: Judged) -> Figure:
    """A panel a loss: each seed's difference, the mean and its interval, a line an arm."""
    figure = Figure(figsize=(11, 3.8), dpi=110, layout="constrained")
    arms = judged.arms
    for axes, loss in zip(figure.subplots(1, 2, sharey=True), LOSSES, strict=True):
        for y, arm in enumerate(arms):
            of = judged.gaps[arm, loss]
            axes.plot([100 * x for x in of.each], [y] * len(of.each), "o", color="0.6", ms=4)
            axes.errorbar(100 * of.value, y, xerr=100 * of.half, fmt="s", color="tab:red", capsize=4)
        axes.set_yticks(range(len(arms)), arms, fontsize=8)
        axes.axvspan(-100 * LIMIT, 100 * LIMIT, color="tab:green", alpha=0.15)
        axes.set(xlabel=f"{loss}, % above the other's with the same seed")
        axes.grid(alpha=0.3)
    return figure


def notes(study: SeedStudy, files: Mapping[str, Mapping[str, Any]], judged: Judged) -> list[str]:
    """What was trained, how it is judged, and what came of it."""
    setting, one = Setting(**files[BASE]["setting"]), files[BASE]
    more = f" ({2 * SEEDS} of {' and '.join(study.doubled)})" if study.doubled else ""
    replicated = {name: of["replicas"] for name, of in files.items() if of.get("replicas", 1) > 1}
    return [
        f"A Llama of {one['parameters']:,} parameters, {setting.steps:,} steps of {setting.batch} x {setting.length} "
        f"bytes, text {one['text']} in every arm. Stated before the runs: the recipes {', '.join(study.recipes)}, "
        f"{SEEDS} seeds each{more}, both losses, the limit of ±{LIMIT:.1%}. Training loss is the mean of the last "
        f"{TAIL:.0%} of the steps.",
        f"Intervals are of {study.confidence:.2%} each, Student's t of the paired seeds, so that all "
        f"{study.tests} of recipes and losses hold together with {1 - FAMILY_ERROR:.0%} (Bonferroni). p is Holm's, of "
        f"{study.tests} tests (recipes and losses); of other arms it is of that test alone.",
        *([study.about] if study.about else []),
        *(f"{name} ran on {count} devices, whose gradients travelled as its recipe says."
          for name, count in replicated.items()),
        *told(study, judged),
    ]  # fmt: skip


def write(name: str, results: Path) -> None:
    """Writes results/CARD/recipe_parity.json and .png of what the study's folder holds.

    Raises:
        UserError: runs do not go together, or bf16's are missing.
    """
    study = STUDIES[name]
    runs, files = read(study, results)
    if BASE not in runs or len(runs) < 2:
        raise UserError(
            f"{results / study.folder} has no runs of bf16 and of another arm: train them first, with --data"
        )
    judged = judge(study, runs)
    table = rows(runs, judged)
    arms = {label: arm for label, arm, _ in study.pairs}
    sources = [training_parity.source(files[arms.get(row.case, row.case)]) for row in table]
    options = "" if name == next(iter(STUDIES)) else f"--study {name} "
    common.write(
        "recipe_parity", study.title, table, notes(study, files, judged), draw(judged) if judged.gaps else None,
        results, arguments=f"{options}--data 'books/*.txt'", suffix=study.suffix, device=files[BASE]["device"],
        sources=sources, date=max(of["date"] for of in files.values()),
    )  # fmt: skip
    print("\n".join(told(study, judged)))


def main(argv: Sequence[str] | None = None) -> int:
    """Trains what is missing of some arms, or judges; 1 where runs are missing still."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=STUDIES, default=next(iter(STUDIES)), help="default: %(default)s")
    parser.add_argument("--data", nargs="*", default=[], help="text, as experiments.train takes it")
    parser.add_argument(
        "--arms", nargs="*", metavar="ARM", help="which to train (default: the recipes and the control)"
    )
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no run would end")
    parser.add_argument("--judge", action="store_true", help="train nothing, write the page")
    parser.add_argument("--results", type=Path, default=common.RESULTS, help="where to write (default: results)")
    options = parser.parse_args(argv)
    begin, study = time.perf_counter(), STUDIES[options.study]
    known = (BASE, *study.recipes, *study.others)
    arms = options.arms or [BASE, *study.recipes, *(name for name in study.others if name == CONTROL)]
    if unknown := [name for name in arms if name not in known]:
        parser.error(
            f"--arms: no {', '.join(map(repr, unknown))} in this study; there are {', '.join(map(repr, known))}"
        )

    def room(took: float) -> bool:
        return time.perf_counter() - begin + 1.2 * took < options.limit

    try:
        if options.judge:
            write(options.study, options.results)
            return 0
        flags.recommend()
        text = parity_runs.read_text(options.data, study.setting)
        print(f"text {text.fingerprint}, commit {record.commit()}", flush=True)
        for name in arms:
            path = study.path_of(options.results, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with lock.hold(path):
                parity_runs.train_arm(name, ARMS[name], study.seeds(name), text, study.setting, path, room)
        _, files = read(study, options.results)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    short = [name for name in arms if len(files.get(name, {"runs": ()})["runs"]) < len(study.seeds(name))]
    if short:
        print(f"not finished: {', '.join(short)}; give the same command again")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
