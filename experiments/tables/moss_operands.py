"""Which operand costs FP8 training its early accuracy: `python -m experiments.tables.moss_operands` (a GPU).

Short runs of a small Llama with all linear layers per tensor as in te_current, with one of the three products left in
bf16 or one operand in another format, and with MOSS's microscaled ones; against bf16 from the same seeds and batches.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import numpy as np

import fp8jax
from experiments.config import UserError
from experiments.tables import common, parity_runs, training_parity
from experiments.tables.common import Row
from experiments.tables.parity_runs import ParityArm, Setting
from fp8jax.recipes import Linear

SETTING = Setting(layers=8, heads=8, mlp_dim=1376, steps=300, warmup=30)
SEEDS, BASE = 3, training_parity.BASE
# Steps whose mean training loss is shown as early.
EARLY = 100
LINEARS = {
    "te_current": Linear("e4m3", "e4m3", "e5m2"),
    "forward_bf16": Linear(None, None, "e5m2", w_dgrad="e4m3", x_wgrad="e4m3", saved="e4m3"),
    "dgrad_bf16": Linear("e4m3", "e4m3", None, w_dgrad=None, dy_wgrad="e5m2"),
    "wgrad_bf16": Linear("e4m3", "e4m3", "e5m2", x_wgrad=None, dy_wgrad=None, saved=None),
    "gradients_bf16": Linear("e4m3", "e4m3", None, w_dgrad=None, x_wgrad=None, dy_wgrad=None, saved=None),
    "gradients_e4m3": Linear("e4m3", "e4m3", "e4m3"),
    "moss": dataclasses.replace(fp8jax.recipes.moss().linear, w_scaling=None),
}


def arms() -> dict[str, ParityArm]:
    """Recipes that differ in their linear layers alone, without 8-bit states."""
    plain = fp8jax.recipes.bf16()
    choices = {
        name: ParityArm(dataclasses.replace(plain, name=name, linear=linear)) for name, linear in LINEARS.items()
    }
    return {BASE: ParityArm(plain)} | choices


def read(folder: Path) -> dict[str, dict[int, dict[str, float]]]:
    """Losses by arm, seed and metric: early and late in training, and of the validation text at the end."""
    losses: dict[str, dict[int, dict[str, float]]] = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        of_seeds = losses.setdefault(content["arm"], {})
        for seed, run in content["runs"].items():
            curve, count = np.array(run["losses"]), EARLY // parity_runs.STRIDE
            of_seeds[int(seed)] = {
                f"training, first {EARLY} steps": float(curve[:count].mean()),
                "training, last tenth": float(curve[-len(curve) // 10 :].mean()),
                "validation": run["valid_loss"],
            }
    return losses


def rows(losses: dict[str, dict[int, dict[str, float]]]) -> list[Row]:
    """Differences from bf16 of the same seeds, in per cent, with half of the 95 % interval's width."""
    table = []
    for metric in next(iter(losses[BASE].values())):
        for name, spread in training_parity.differences(losses, metric, paired=True).items():
            table.append(Row(name, metric, 100 * spread.value, "%", BASE))
            table.append(Row(name, f"{metric}, half of the interval", 100 * spread.half, "%"))
    return table


def main(argv: list[str] | None = None) -> int:
    """Trains the arms that DIR/moss_operands lacks, and writes DIR/moss_operands.json of those that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=[], help="text, as experiments.train takes it")
    parser.add_argument("--arms", nargs="*", choices=list(arms()), default=list(arms()), help="(default: all)")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no run would end")
    parser.add_argument("--results", type=Path, default=common.RESULTS, help="where to write (default: results)")
    options = parser.parse_args(argv)
    begin, folder = time.perf_counter(), options.results / "moss_operands"
    try:
        text = parity_runs.read_text(options.data, SETTING)
        for name in options.arms:
            room = lambda took: time.perf_counter() - begin + 1.2 * took < options.limit  # noqa: E731
            path = folder / f"{name}.json"
            parity_runs.train_arm(name, arms()[name], range(options.seeds), text, SETTING, path, room)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    losses, missing = read(folder), set(arms())
    missing -= set(losses)
    if BASE in missing or len(losses) < 2:
        print(f"{', '.join(sorted(missing))} are missing: nothing to compare yet")
        return 0
    notes = [
        f"{SETTING.layers} layers of width {SETTING.dim}, {SETTING.batch} x {SETTING.length} bytes a step, "
        f"{SETTING.steps} steps, {options.seeds} seeds that all arms share; AdamW in fp32, fp32 weights. Differences "
        "of the same seeds' losses; the noise is pooled over all arms.",
        "An interval that holds 0 shows no cost. Where all do, an early loss that one seed of a recipe shows is that "
        "seed's, or of what these arms leave out: 8-bit moments and contexts.",
        *([f"Not run: {', '.join(sorted(missing))}."] if missing else []),
    ]
    title = "Which operand costs FP8 training its early accuracy"
    run = json.loads((folder / f"{BASE}.json").read_text())
    stamp = {key: run[key] for key in ("date", "flags", "commit")}
    common.write("moss_operands", title, rows(losses), notes, None, options.results, device=run["device"], stamp=stamp)
    return 0


if __name__ == "__main__":
    sys.exit(main())
