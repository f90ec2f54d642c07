"""Training in 8 bits compared with bf16, seed by seed: `python -m experiments.papers.parity --study NAME`.

    python -m experiments.papers.parity --data 'books/*.txt' --arms coat fast --limit 380
    python -m experiments.papers.parity --judge

The first command trains the missing seeds of some arms. Runs are in the study's folder in results/. Several processes,
each with a separate GPU and separate arms, can fill one folder. The second command writes the page. Arms, losses and
the number of seeds are stated in `STUDIES`, before any run. Runs with another text, setting or card are rejected.

All arms of a seed have the same initial parameters and the same order of text. The difference of an arm is the mean
over seeds of (loss / loss of bf16 with the same seed) - 1. Its interval is from Student's t with seeds - 1 degrees of
freedom. A study tests several recipes, so its intervals have Bonferroni's correction. Holm's step-down test decides on
differences from zero.
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
from experiments import startup
from experiments.errors import UserError
from experiments.papers import common, parity_runs
from experiments.papers.common import Row
from experiments.papers.parity_runs import BytePairSetting, FixedBatch, ParityArm, PlainSetting, Rounding, Setting
from experiments.results import record
from experiments.text.tokenizer import Bytes
from experiments.train import lock

BASE, CONTROL = "bf16", "control_one_bit"
FAMILY_ERROR = 0.05
# A training loss is the mean over this last share of the steps.
TAIL = 0.1
TRAINING, VALIDATION = "training loss", "validation loss"
LAST, MEAN = "loss of step 21", "mean loss of 21 steps"
SMALL, MEDIUM = Setting(), Setting(dim=1024, layers=5, heads=8, mlp_dim=2816, length=1024, steps=400, warmup=40)
BLOCK_SCALED_SETTING = PlainSetting(
    dim=384, layers=7, heads=6, mlp_dim=1024, batch=32, steps=400, warmup=40, valid=512, valid_fraction=0.03
)
BLOCK_SCALED_MEDIUM = dataclasses.replace(
    BLOCK_SCALED_SETTING, dim=896, heads=7, mlp_dim=2432, length=1024, batch=16, valid=160
)
MIXTURE = dataclasses.replace(
    BLOCK_SCALED_SETTING, dim=768, layers=6, heads=12, mlp_dim=768, length=1024, batch=16, steps=300, warmup=30,
    valid=256, experts=16, experts_per_token=4,
)  # fmt: skip
# With bytes, the head has only 256 outputs. With tokens, it has a fifth of this model's FLOPs.
TOKENS = BytePairSetting(
    dim=1024, layers=4, heads=8, mlp_dim=2816, length=1024, batch=16, steps=250, warmup=25, valid=160
)
PRESETS = ("coat", "coat_fast", "moss", "fast", "te_current", "deepseek", "int8_fallback", "int8_block", "fp8_lm",
           "fp8_lm_two_phase", "coat_optimizer", "coat_activations", "mxfp8", "nvfp4")  # fmt: skip
NVFP4_PARTS: dict[str, dict[str, Any]] = {
    "no rotation": {"rotation": None},
    "nearest": {"dy": "e2m1:nv16", "dy_wgrad": "e2m1:nv16"},
    "1x16 weights": {"w": "e2m1:nv16", "w_dgrad": "e2m1:nv16"},
}
NVFP4 = fp8jax.recipes.nvfp4()
NVFP4_ARMS = (*(f"nvfp4, {part}" for part in NVFP4_PARTS), "nvfp4, all blocks", "nvfp4, no part")


def linear(name: str, **settings: Any) -> ParityArm:
    """A preset with other settings of its linear layers."""
    recipe = fp8jax.recipes.get(name)
    return ParityArm(dataclasses.replace(recipe, linear=dataclasses.replace(recipe.linear, **settings)))


def with_head(name: str, head: fp8jax.recipes.Linear) -> ParityArm:
    """A preset with other settings of its output head."""
    return ParityArm(dataclasses.replace(fp8jax.recipes.get(name), head=head))


BF16, COAT = fp8jax.recipes.bf16(), fp8jax.recipes.coat()
ARMS: dict[str, ParityArm] = {
    BASE: ParityArm(BF16),
    **{name: ParityArm(fp8jax.recipes.get(name)) for name in PRESETS},
    # Recipes with deliberate damage, which must differ from bf16.
    "control": ParityArm(COAT, "forward", 3),
    CONTROL: ParityArm(COAT, "forward", 2),
    "control_wgrad": ParityArm(COAT, "wgrad", 2),
    "master_bf16_int8": ParityArm(BF16, master="bf16+int8"),
    "master_bf16_stochastic": ParityArm(BF16, master="bf16+stochastic"),
    "released_by_shares": ParityArm(BF16, release="previous"),
    "coat_fp8_head": ParityArm(dataclasses.replace(COAT, head=fp8jax.recipes.HEAD)),
    "coat_fast, 8-bit head": with_head("coat_fast", fp8jax.recipes.HEAD),
    "coat_fast, head of two bits": with_head(
        "coat_fast", dataclasses.replace(fp8jax.recipes.HEAD, x="e5m2", dy_wgrad="e4m3")
    ),
    "coat, fast accumulation": linear("coat", fast_accumulation=("forward", "dgrad", "wgrad")),
    "coat_fast, fast dgrad": linear("coat_fast", fast_accumulation=("forward", "dgrad")),
    "coat_fast, all bits in all sums": linear("coat_fast", fast_accumulation=()),
    "coat_fast, dy stochastic": linear("coat_fast", dy="e5m2+stochastic"),
    "contexts alone": ParityArm(dataclasses.replace(BF16, context=fp8jax.recipes.coat_fast().context)),
    "x alone in e4m3": ParityArm(BF16, rounding=Rounding(x="e4m3")),
    "w alone in e4m3": ParityArm(BF16, rounding=Rounding(w="e4m3")),
    "dy alone in e5m2": ParityArm(BF16, rounding=Rounding(dy="e5m2")),
    "dy alone in e5m2, stochastic": ParityArm(BF16, rounding=Rounding(dy="e5m2+stochastic")),
    "mxfp8, rounded down": linear(
        "mxfp8", **dict.fromkeys(("x", "w", "dy", "w_dgrad", "x_wgrad", "dy_wgrad"), "e4m3:mx32+ocp")
    ),
    **{f"nvfp4, {part}": linear("nvfp4", **settings) for part, settings in NVFP4_PARTS.items()},
    "nvfp4, all blocks": ParityArm(dataclasses.replace(NVFP4, unquantized_blocks=(0, 0))),
    "nvfp4, no part": ParityArm(
        dataclasses.replace(
            linear("nvfp4", **{k: v for part in NVFP4_PARTS.values() for k, v in part.items()}).recipe,
            unquantized_blocks=(0, 0),
        )
    ),
    # Steps between measurements of the amax of weights; moss has 500.
    **{f"moss_interval_{steps}": linear("moss", weight_amax_interval=steps) for steps in (1, 100, 2000)},
}


@dataclasses.dataclass(frozen=True)
class Study:
    """A comparison with bf16, stated before the runs.

    Attributes:
        title: title of the page.
        page: name of the results file.
        folder: folder of the runs in the results folder.
        setting: the model and its schedule.
        recipes: arms that are tested for a difference from bf16.
        other_arms: further arms that may be trained.
        pairs: comparisons with another arm than bf16, as (label, arm, base).
        about: a further note.
        seeds: number of seeds of each arm.
        doubled: arms with twice as many seeds.
        losses: names of the losses that are compared.
        family: whether the intervals of all recipes and losses hold jointly.
        table: heading of the table.
    """

    title: str
    page: str
    folder: str
    setting: Setting | FixedBatch
    recipes: tuple[str, ...]
    other_arms: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str, str], ...] = ()
    about: str = ""
    seeds: int = 5
    doubled: tuple[str, ...] = ()
    losses: tuple[str, str] = (TRAINING, VALIDATION)
    family: bool = True
    table: str = "Seeds of each beside bf16's"

    def seeds_of(self, arm: str) -> range:
        """Returns the seeds of an arm."""
        return range(self.seeds * (2 if arm in self.doubled else 1))

    @property
    def tests(self) -> int:
        """Number of tests, stated before the runs: each recipe, each loss."""
        return len(self.recipes) * len(self.losses)

    @property
    def confidence(self) -> float:
        """Confidence of each interval."""
        return 1 - FAMILY_ERROR / (self.tests if self.family else 1)

    def path_of(self, results: Path, arm: str) -> Path:
        """Returns the file of an arm's runs."""
        return results / self.folder / f"{arm.replace(', ', '_').replace(' ', '_')}.json"


STUDIES = {
    "recipes": Study(
        "Loss of each recipe relative to bf16 (COAT, Table 13)", "recipe_parity", "parity_recipes", MEDIUM,
        ("coat", "coat_fast", "fast", "int8_fallback", "fp8_lm"),
        (CONTROL, "coat_optimizer", "coat_activations", "int8_block", "fp8_lm_two_phase", "released_by_shares",
         "coat_fp8_head", "coat, fast accumulation", "coat_fast, fast dgrad"),
        (("coat_fast beside coat", "coat_fast", "coat"),),
        f"{CONTROL} is coat with one mantissa bit in forward matmuls: it must differ. We first looked at five seeds "
        "of a coat_fast with fast accumulation in all matmuls. The present coat_fast and bf16 have ten seeds.",
        doubled=(BASE, "coat_fast"),
    ),
    "intervals": Study(
        "MOSS: loss by interval of exact weight scales (Tables 9 and 11)", "recipe_parity_intervals",
        "parity_intervals", SMALL, ("moss_interval_1", "moss_interval_100", "moss", "moss_interval_2000"),
        pairs=(("moss beside every step (Table 11)", "moss", "moss_interval_1"),),
        about="moss measures the amax of weights every 500 steps. With an interval of 2,000, longer than the run, all "
            "scales are predicted from the first weights. results/pages/scaling.md has the cost. The paper reports "
            "accuracies on NumGLUE after fine-tuning a Llama-2-7B: bf16 58.7 %, every step 59.3, 100 steps 59.4, "
            "500 steps 59.4, 2,000 steps 58.1. We report losses. In its Table 11, predicted scales are within 0.2 % "
            "of those of every step.",
    ),
    "block_scaled": Study(
        "Loss of MXFP8 and NVFP4 relative to bf16, and of NVFP4 without one part", "recipe_parity_block_scaled",
        "parity_block_scaled", BLOCK_SCALED_SETTING, ("mxfp8", "nvfp4", "coat"), ("mxfp8, rounded down", *NVFP4_ARMS),
        tuple((f"{arm} beside {arm.partition(', ')[0]}", arm, arm.partition(", ")[0])
              for arm in ("mxfp8, rounded down", *NVFP4_ARMS)),
        "nvfp4 keeps the first and last of the seven blocks in bf16; the arm 'all blocks' does not. 'no part' has "
        "no rotation, rounds to nearest, has 1x16 scales of weights, and all blocks in e2m1. GPUs before Blackwell "
        "decode the codes to bf16.",
    ),
    "block_scaled_medium": Study(
        "Loss of MXFP8 and NVFP4 relative to bf16, with 69 M parameters", "recipe_parity_block_scaled_medium",
        "parity_block_scaled_medium", BLOCK_SCALED_MEDIUM, ("mxfp8", "nvfp4", "coat"),
        about="nvfp4 keeps the first and last of the seven blocks in bf16. GPUs before Blackwell decode the codes to "
            "bf16.",
        seeds=8,
    ),
    "experts": Study(
        "Loss of a mixture of experts, relative to bf16", "recipe_parity_experts", "parity_experts", MIXTURE,
        ("coat", "coat_fast", "deepseek", "int8_fallback"),
        about="Each layer has sixteen experts, four per token. The model is user-written, with two calls of "
            "`jax.lax.ragged_dot` for the experts. Routers stay in 16 bits.", seeds=3,
    ),
    "head": Study(
        "Loss with an 8-bit output head, relative to bf16", "recipe_parity_head", "parity_head", TOKENS,
        ("coat_fast", "coat_fast, 8-bit head"), ("coat_fast, head of two bits",),
        tuple((f"{arm} beside coat_fast", arm, "coat_fast")
              for arm in ("coat_fast, 8-bit head", "coat_fast, head of two bits")),
        "Tokens are from byte-pair encoding, trained on the training text. The head of two bits has e5m2 inputs.",
        seeds=10,
    ),
    "long": Study(
        "Loss of a larger model over ten times as many steps, relative to bf16", "recipe_parity_long", "parity_65m",
        dataclasses.replace(MEDIUM, steps=4600, warmup=200), ("moss", "fast"), (CONTROL, "coat"),
    ),
    "fixed_batch": Study(
        "Loss on one fixed batch, by quantized part", "fixed_batch", "parity_fixed_batch", FixedBatch(),
        ("coat_fast",), tuple(name for name, arm in ARMS.items() if name not in (BASE, "coat_fast")
                              and not (arm.product or arm.master or arm.release)),
        about="'only x', 'only w' and 'only dy' quantize one operand of all linear layers except the head, with one "
            "scale per tensor. The rest is bf16.",
        seeds=10, losses=(LAST, MEAN), family=False, table="Paired with the same seeds of bf16",
    ),
}  # fmt: skip

Runs = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Arm, seed, loss."""


class Gap(NamedTuple):
    """The relative loss difference of two arms, paired over common seeds.

    Attributes:
        each: difference of each seed.
        value: mean over seeds.
        half: half-width of the confidence interval; None for a single seed.
        p: two-sided p-value of no difference, without correction; None for a single seed.
    """

    each: tuple[float, ...]
    value: float
    half: float | None = None
    p: float | None = None


def gap(arm: Mapping[int, float], base: Mapping[int, float], confidence: float) -> Gap | None:
    """Returns the paired difference of two arms, or None without common seeds."""
    each = np.array([arm[seed] / base[seed] - 1 for seed in sorted(arm.keys() & base.keys())])
    if len(each) < 2:
        return Gap(tuple(each.tolist()), float(each[0])) if len(each) else None
    error = float(np.std(each, ddof=1) / np.sqrt(len(each)))
    quantile = float(stats.t.ppf((1 + confidence) / 2, len(each) - 1))
    p = float(2 * stats.t.sf(abs(each.mean()) / error, len(each) - 1)) if error else float(each.mean() == 0)
    return Gap(tuple(each.tolist()), float(each.mean()), quantile * error, p)


def holm(values: Mapping[Any, float], tests: int) -> dict[Any, float]:
    """Returns Holm's adjusted p-values: the smallest family-wise level at which each test is rejected.

    Args:
        values: p-values of the tests that were made.
        tests: number of stated tests, including those not made.
    """
    result, largest = dict[Any, float](), 0.0
    for rank, key in enumerate(sorted(values, key=lambda key: values[key])):
        largest = max(largest, min(1.0, (tests - rank) * values[key]))
        result[key] = largest
    return result


def compare(study: Study, runs: Runs) -> dict[tuple[str, str], Gap]:
    """Returns differences from bf16 and of the study's pairs, by (label, loss). p-values of recipes are Holm's."""
    pairs = {name: (name, BASE) for name in runs if name != BASE}
    pairs |= {label: (arm, base) for label, arm, base in study.pairs}
    gaps = dict[tuple[str, str], Gap]()
    for label, (arm, base) in pairs.items():
        for loss in study.losses:
            of, base_losses = ({s: run[loss] for s, run in runs.get(name, {}).items()} for name in (arm, base))
            if (found := gap(of, base_losses, study.confidence)) is not None:
                gaps[label, loss] = found
    if study.family:
        values = {key: g.p for key, g in gaps.items() if key[0] in study.recipes and g.p is not None}
        adjusted = holm(values, study.tests)
        gaps |= {key: gaps[key]._replace(p=p) for key, p in adjusted.items()}
    return gaps


def losses_of(study: Study, run: Mapping[str, Any]) -> dict[str, float]:
    """Returns the losses in a run's file that the study compares."""
    losses = run["losses"]
    values = {TRAINING: float(np.mean(losses[-max(1, round(TAIL * len(losses))) :])),
              VALIDATION: run.get("valid_loss"), LAST: losses[-1], MEAN: float(np.mean(losses))}  # fmt: skip
    return {loss: values[loss] for loss in study.losses}


def read(study: Study, results: Path) -> tuple[Runs, dict[str, dict[str, Any]]]:
    """Returns the losses of all trained arms, for the stated seeds, and the content of their files.

    Raises:
        UserError: two arms differ in text, card or setting.
    """
    paths = {name: study.path_of(results, name) for name in (BASE, *study.recipes, *study.other_arms)}
    files = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    for key in ("text", "device", "setting"):
        # Older files of the fixed batch have neither text nor setting.
        stated = {name: content[key] for name, content in files.items() if key in content}
        first = next(iter(stated), "")
        for name, here in stated.items():
            if here != (there := stated[first]):
                raise UserError(
                    f"{paths[name]} and {paths[first]} have different values of {key}, {here} and {there}, but all "
                    "arms must have the same; train one of them again"
                )
    runs = {}
    for name, content in files.items():
        content["runs"] = parity_runs.runs_of(content)
        found = {seed: content["runs"].get(str(seed)) for seed in study.seeds_of(name)}
        runs[name] = {seed: losses_of(study, run) for seed, run in found.items() if run is not None}
    return {name: of for name, of in runs.items() if of}, files


def rows(study: Study, runs: Runs, gaps: Mapping[tuple[str, str], Gap]) -> list[Row]:
    """Returns means, differences in percent, half-widths and p-values, by arm."""
    entries = []

    def put(arm: str, column: str, value: float | None, unit: str = "1") -> None:
        entries.append(Row(arm, column, value, unit, table=study.table, pivot=(arm, column)))

    for arm in dict.fromkeys((*runs, *(label for label, _ in gaps))):
        if arm in runs:
            put(arm, "seeds", len(runs[arm]))
        for loss in study.losses:
            if arm in runs:
                put(arm, loss, float(np.mean([run[loss] for run in runs[arm].values()])),
                    "nats/byte" if study.setting.vocab == Bytes.vocab else "nats/token")  # fmt: skip
            if (of := gaps.get((arm, loss))) is not None:
                put(arm, f"{loss}: % above", 100 * of.value, "%")
                if of.half is not None:
                    put(arm, f"± ({loss})", 100 * of.half, "%")
                    put(arm, f"p ({loss})", of.p)
    return entries


def draw(study: Study, gaps: Mapping[tuple[str, str], Gap]) -> Figure:
    """Draws a panel per loss and a line per arm, with the difference of each seed, their mean and its interval."""
    figure = Figure(figsize=(11, 3.8), dpi=110, layout="constrained")
    arms = list(dict.fromkeys(arm for arm, _ in gaps))
    for axes, loss in zip(figure.subplots(1, 2, sharey=True), study.losses, strict=True):
        for y, arm in enumerate(arms):
            of = gaps[arm, loss]
            axes.plot([100 * x for x in of.each], [y] * len(of.each), "o", color="0.6", ms=4)
            # The interval of two seeds is wider than the figure.
            half = None if of.half is None or len(of.each) < 3 else 100 * of.half
            axes.errorbar(100 * of.value, y, xerr=half, fmt="s", color="tab:red", capsize=4)
        axes.set_yticks(range(len(arms)), arms, fontsize=8)
        axes.axvline(0, color="gray", linewidth=0.8)
        axes.set(xlabel=f"{loss}, % above the baseline with the same seed")
        axes.grid(alpha=0.3)
    return figure


def notes(study: Study, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns notes on the trained models and the statistics."""
    baseline_file, setting = files[BASE], study.setting
    if isinstance(setting, FixedBatch):
        description = f"{setting.steps} steps on one batch of {setting.batch} x {setting.length} tokens, no warm-up."
    else:
        unit = "bytes" if setting.vocab == Bytes.vocab else f"tokens of {setting.vocab:,}"
        description = (
            f"A Llama of {baseline_file['parameters']:,} parameters, {setting.steps:,} steps of {setting.batch} x "
            f"{setting.length} {unit}, the text {baseline_file['text']} in every arm. Training loss is the mean of the "
            f"last {TAIL:.0%} of the steps."
        )
    doubled = f" ({2 * study.seeds} of {' and '.join(study.doubled)})" if study.doubled else ""
    intervals = f"Confidence intervals of {study.confidence:.2%} each, from Student's t over paired seeds."
    if study.family:
        intervals += (
            f" All {study.tests} hold together at {1 - FAMILY_ERROR:.0%} (Bonferroni). "
            f"p has Holm's correction for {study.tests} tests; for other arms it has none."
        )
    incomplete = ", ".join(
        f"{name} {len(of['runs'])} of {len(study.seeds_of(name))} seeds" for name, of in files.items()
        if len(of["runs"]) < len(study.seeds_of(name))
    )  # fmt: skip
    return [
        description,
        f"Decided before the runs: recipes {', '.join(study.recipes)}, {study.seeds} seeds each{doubled}.",
        intervals,
        *([f"Not finished: {incomplete}. A difference without an interval is from one seed."]
          if incomplete else []),
        *([study.about] if study.about else []),
        *(f"{name} ran on {of['replicas']} devices, with 8-bit gradients."
          for name, of in files.items() if of.get("replicas", 1) > 1),
    ]  # fmt: skip


def source(of: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the commits of an arm's runs, and the device."""
    commits = {run.get("commit") or of.get("commit") or record.UNKNOWN: None for run in of["runs"].values()}
    return ", ".join(commits), of["device"]


def write(name: str, results: Path) -> None:
    """Writes the page from the study's folder.

    Raises:
        UserError: runs are incompatible, or those of bf16 are missing.
    """
    study = STUDIES[name]
    runs, files = read(study, results)
    if BASE not in runs or len(runs) < 2:
        raise UserError(f"{results / study.folder} has no runs with bf16 and another arm; train them first")
    gaps = compare(study, runs)
    table = rows(study, runs, gaps)
    arms = {label: arm for label, arm, _ in study.pairs}
    common.write(
        study.page, study.title, table, notes(study, files), draw(study, gaps) if gaps else None, results,
        arguments=f"--study {name}", module="parity", device=files[BASE]["device"],
        sources=[source(files[arms.get(row.case, row.case)]) for row in table],
        date=max(of["date"] for of in files.values()),
    )  # fmt: skip
    for (label, loss), of in gaps.items():
        interval = "" if of.half is None else f" ± {100 * of.half:.2f} % (p {of.p:.2g})"
        print(f"{label}, {loss}: {100 * of.value:+.2f}{interval or ' % (one seed)'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Trains the missing runs of some arms, or writes the page. Returns 1 if runs are still missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=STUDIES, default=next(iter(STUDIES)), help="default: %(default)s")
    parser.add_argument("--data", nargs="*", default=[], help="text, as for experiments.train")
    parser.add_argument("--arms", nargs="*", metavar="ARM", help="arms to train (default: the recipes and bf16)")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds; a run that would end later is not started"
    )
    parser.add_argument("--judge", action="store_true", help="write the page, without training")
    parser.add_argument("--results", type=Path, default=common.RESULTS, help="where to write (default: results)")
    options = parser.parse_args(argv)
    begin, study = time.perf_counter(), STUDIES[options.study]
    names = (BASE, *study.recipes, *study.other_arms)
    arms = options.arms or [BASE, *study.recipes]
    if unknown := [name for name in arms if name not in names]:
        parser.error(
            f"--arms: no {', '.join(map(repr, unknown))} in this study; there are {', '.join(map(repr, names))}"
        )

    def has_time(took: float) -> bool:
        return time.perf_counter() - begin + 1.2 * took < options.limit

    try:
        if options.judge:
            write(options.study, options.results)
            return 0
        startup.recommend_flags()
        text = None
        if not isinstance(study.setting, FixedBatch):
            text = parity_runs.read_text(options.data, study.setting)
            print(f"text {text.fingerprint}, commit {record.commit()}", flush=True)
        for name in arms:
            path = study.path_of(options.results, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with lock.hold(path):
                parity_runs.train_arm(
                    name, ARMS[name], study.seeds_of(name), study.setting, path, text=text, has_time=has_time
                )
        _, files = read(study, options.results)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    incomplete = [name for name in arms if len(files.get(name, {"runs": ()})["runs"]) < len(study.seeds_of(name))]
    if incomplete:
        print(f"not finished: {', '.join(incomplete)}; run the same command again")
    return 1 if incomplete else 0


if __name__ == "__main__":
    sys.exit(main())
