"""COAT, section 6 and Table 13: training in 8 bits beside bf16, and what a broken recipe does.

    python -m experiments.tables.training_parity --data 'books/*.txt' --devices 4

Trains every arm that results/training_parity/ lacks, one on each device at a time, then compares all. Stopped by SIGINT
or SIGTERM, all arms save; the same command goes on. Each arm sees the same batches in the same order; three seeds of
bf16 are the noise that a difference must exceed.
"""

import argparse
import dataclasses
import datetime
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

import fp8jax
from experiments import report, train
from experiments.tables import common
from experiments.tables.common import Row

# Training perplexities of Table 13.
PAPER = {"bf16": 2.995, "coat": 3.008, "coat_optimizer": 2.998, "coat_activations": 2.999}
# A Llama of 64 M parameters and 300 M bytes; what a flag leaves out stands at its default.
FLAGS = (
    "--layers 5 --dim 1024 --heads 8 --kv-heads 8 --mlp-dim 2816 --seq-len 1024 --batch 64 --steps 4600 --warmup 200 "
    "--lr 1e-3 --eval-every 460 --eval-batches 16 --checkpoint-every 2300 --keep 1 --log-every 100 --sample-tokens 0 "
    "--valid-fraction 0.0275"
)
_INTEGERS = dataclasses.replace(
    fp8jax.recipes.coat(),
    name="control",
    optimizer=fp8jax.recipes.Optimizer(mu="int8", nu="int8", expand=False),
    linear=fp8jax.recipes.Linear("int8", "int8", "int8"),
    context=fp8jax.recipes.Context(),
)
# The control is broken on purpose: evenly spaced integers for moments and gradients, which have a wide range.
ARMS: dict[str, tuple[fp8jax.Recipe, int]] = {
    "bf16": (fp8jax.recipes.bf16(), 0),
    "coat": (fp8jax.recipes.coat(), 0),
    "coat_fast": (fp8jax.recipes.coat_fast(), 0),
    "coat_optimizer": (fp8jax.recipes.coat_optimizer(), 0),
    "coat_activations": (fp8jax.recipes.coat_activations(), 0),
    "control": (_INTEGERS, 0),
    "coat, seed 1": (fp8jax.recipes.coat(), 1),
    "bf16, seed 1": (fp8jax.recipes.bf16(), 1),
    "bf16, seed 2": (fp8jax.recipes.bf16(), 2),
}
_LIMIT, _STRIDE = 0.005, 10


@dataclasses.dataclass(frozen=True)
class Arm:
    """A finished arm.

    Attributes:
        flags: of experiments.train that it was trained with.
        device: that it was trained on.
        date: of its result file, in ISO 8601; only speeds of one day are compared.
        result: as experiments.report.Result.
        losses: training losses, each the mean of `_STRIDE` steps.
    """

    flags: str
    device: str
    date: str
    result: dict[str, Any]
    losses: list[float]

    @property
    def loss(self) -> float:
        """Validation loss after the last step, nats per token."""
        return float(self.result["valid_loss"])


def folder(out: Path, name: str) -> Path:
    """Where the training program leaves an arm."""
    recipe, seed = ARMS[name]
    return out / f"parity_{recipe.name}_{seed}" / recipe.name


def train_arm(name: str, data: Sequence[str], out: Path, flags: str) -> int:
    """Trains one arm in this process, or goes on with it; the training program's exit code."""
    recipe, seed = ARMS[name]
    argv = ["--recipe", recipe.name, "--seed", str(seed), "--run", folder(out, name).parent.name, "--out", str(out)]
    argv += ["--data", *data] if data else []
    return train.main([*argv, *flags.split()], recipe=lambda _: recipe)


def train_all(names: Sequence[str], devices: int, argv: Sequence[str], out: Path) -> dict[str, int]:
    """Trains arms in processes of their own, one a device at a time; their exit codes.

    Args:
        names: arms, in the order in which they start.
        devices: how many GPUs; on CPU, how many at once.
        argv: command line that a process gets besides `--arm NAME`.
        out: where their output is written, to NAME.log.
    """
    out.mkdir(parents=True, exist_ok=True)
    waiting, codes = list(names), dict[str, int]()
    running: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
    stopping: list[int] = []

    def stop(signum: int, _frame: FrameType | None) -> None:
        stopping.append(signum)
        for _, process in running.values():
            process.send_signal(signal.SIGTERM)

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        while running or (waiting and not stopping):
            for device in range(devices):
                if device not in running and waiting and not stopping:
                    name = waiting.pop(0)
                    log = (out / f"{name.replace(', ', '_').replace(' ', '_')}.log").open("a")
                    command = [sys.executable, "-u", "-m", "experiments.tables.training_parity", *argv, "--arm", name]
                    env = os.environ | {"CUDA_VISIBLE_DEVICES": str(device)}
                    running[device] = (name, subprocess.Popen(command, stdout=log, stderr=log, env=env))
                    print(f"{name}: started on device {device}, output in {log.name}", flush=True)
            for device, (name, process) in list(running.items()):
                if process.poll() is not None:
                    codes[name] = process.returncode
                    print(f"{name}: ended with code {process.returncode}", flush=True)
                    del running[device]
            time.sleep(0.2)
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
    return codes


def collect(out: Path, results: Path, flags: str) -> None:
    """Keeps what matters of the arms that are finished, in RESULTS/training_parity/."""
    for name in ARMS:
        finished = folder(out, name) / "result.json"
        if finished.exists():
            losses = [row["loss"] for row in report.read_metrics(finished.with_name("metrics.jsonl")) if "loss" in row]
            means = [float(np.mean(losses[i : i + _STRIDE])) for i in range(0, len(losses), _STRIDE)]
            result = json.loads(finished.read_text())["result"]
            date = datetime.datetime.fromtimestamp(finished.stat().st_mtime, datetime.UTC).date().isoformat()
            arm = Arm(flags, jax.devices()[0].device_kind, date, result, [round(x, 5) for x in means])
            path = stored(results, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            report.write_json(path, dataclasses.asdict(arm))


def stored(results: Path, name: str) -> Path:
    """Where an arm is kept."""
    recipe, seed = ARMS[name]
    return results / "training_parity" / f"{recipe.name}_{seed}.json"


def read(results: Path, flags: str) -> dict[str, Arm]:
    """The arms that are kept and were trained with these flags."""
    found = {}
    for name in ARMS:
        path = stored(results, name)
        if path.exists():
            arm = Arm(**json.loads(path.read_text()))
            if arm.flags == flags:
                found[name] = arm
    return found


def noise(arms: Mapping[str, Arm]) -> float | None:
    """Largest less smallest validation loss over three seeds of bf16, relative to the first; None without them."""
    losses = [arm.loss for name, arm in arms.items() if name.startswith("bf16")]
    return float(np.ptp(losses) / arms["bf16"].loss) if len(losses) == 3 else None


def rows(arms: Mapping[str, Arm]) -> list[Row]:
    """Validation loss, bytes of moments and speed of every arm, relative to bf16."""
    found = []
    for metric, unit, get in (
        ("validation loss", "nats/token", lambda arm: arm.loss),
        ("moments", "bytes/parameter", _moments),
        ("speed", "tokens/s", lambda arm: arm.result["tokens_per_s"]),
    ):
        base = get(arms["bf16"])
        for name, arm in arms.items():
            compared = name in PAPER and metric == "validation loss"
            paper = math.log(PAPER[name]) / math.log(PAPER["bf16"]) if compared else None
            alike = metric != "speed" or arm.date == arms["bf16"].date
            against, ratio = ("bf16", get(arm) / base) if alike else (None, None)
            row = Row(name, metric, get(arm), unit, against, ratio, paper_ratio=paper, table=metric)
            found.append(row)
    return found


def verdict(arms: Mapping[str, Arm]) -> list[str]:
    """How far each arm is from bf16, beside the noise and the limit that a recipe must keep."""
    floor = noise(arms)
    if floor is None:
        lines = ["Other seeds of bf16 are not trained yet: how much of a difference is noise is not known."]
    else:
        lines = [f"Three seeds of bf16 differ by {floor:.2%} of their validation loss."]
    for name, arm in arms.items():
        if name.startswith("bf16"):
            continue
        seed = ARMS[name][1]
        base = f"bf16, seed {seed}" if seed else "bf16"
        if base in arms:
            above = arm.loss / arms[base].loss - 1
            kept = "within" if above <= _LIMIT else "outside"
            lines.append(f"{name}: {above:+.2%} of the validation loss of {base}, {kept} the limit of {_LIMIT:.1%}.")
    missing = [name for name in ARMS if name not in arms]
    return [*lines, f"Not trained yet: {'; '.join(missing)}."] if missing else lines


def draw(arms: Mapping[str, Arm]) -> Figure:
    """Training loss, smoothed, and its distance from bf16's."""
    figure = Figure(figsize=(13, 4.5), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    curves = {name: _smooth(arm.losses) for name, arm in arms.items()}
    for name, losses in curves.items():
        steps = _STRIDE * np.arange(len(losses))
        style = {"color": "0.6", "lw": 0.8} if name.startswith("bf16,") else {"lw": 1.1}
        left.plot(steps, losses, label=name, **style)  # type: ignore[arg-type]
        shared = min(len(losses), len(curves["bf16"]))
        difference = 100 * (losses[:shared] / curves["bf16"][:shared] - 1)
        right.plot(steps[:shared], difference, label=name, **style)  # type: ignore[arg-type]
    left.set(xlabel="step", ylabel="training loss, mean of 50 steps (nats per byte)", yscale="log")
    right.set(xlabel="step", ylabel="% above bf16")
    right.set_yscale("symlog", linthresh=1)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Trains what is missing and regenerates results/training_parity.json and .png."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", nargs="*", default=[], help="text, as experiments.train takes it")
    parser.add_argument("--devices", type=int, default=1, help="GPUs to train on, an arm each (default: 1)")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS), help="which to train (default: all)")
    parser.add_argument("--arm", choices=ARMS, help="train this arm alone, in this process, and write no results")
    parser.add_argument("--flags", default=FLAGS, help="other flags of experiments.train")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of training runs (default: runs)")
    parser.add_argument("--results", type=Path, default=common.RESULTS, help="where to write (default: results)")
    given = parser.parse_args(argv)
    if given.arm:
        return train_arm(given.arm, given.data, given.out, given.flags)
    missing = [name for name in given.arms if name not in read(given.results, given.flags)]
    passed = ["--data", *given.data, "--flags", given.flags, "--out", str(given.out)]
    codes = train_all(missing, given.devices, passed, given.out)
    collect(given.out, given.results, given.flags)
    arms = read(given.results, given.flags)
    unfinished = [name for name in given.arms if name not in arms]
    if unfinished:
        print(f"not finished: {', '.join(unfinished)} (exit codes {codes}); give the same command again")
    if "bf16" not in arms:
        return 1
    first = arms["bf16"]
    notes = [
        f"A Llama of {first.result['parameters']:,} parameters on text as bytes, on one {first.device} an arm; flags "
        f"of experiments.train: {given.flags}. All arms keep fp32 master weights, bf16 fp32 moments too. "
        "The control has int8 moments without expansion and int8 products with one scale a tensor.",
        "The paper's ratios are those of the logarithms of Table 13's training perplexities; in pretraining OLMo-1B "
        "its training loss is 0.67 % above bf16's (Table 3).",
        *_later(arms),
        *verdict(arms),
    ]
    title = "COAT: training in 8 bits beside bf16 (section 6, Table 13)"
    arguments = "--data 'books/*.txt' --devices 4"
    device = f"{first.device}, one an arm"
    common.write(
        "training_parity", title, rows(arms), notes, draw(arms), given.results, arguments=arguments, device=device
    )
    return 1 if unfinished else 0


def _later(arms: Mapping[str, Arm]) -> list[str]:
    names = [f"{name} on {arm.date}" for name, arm in arms.items() if arm.date != arms["bf16"].date]
    told = (
        f"Trained later than bf16, with other versions of the kernels: {', '.join(names)}; so its speed has no ratio."
    )
    return [told] if names else []


def _moments(arm: Arm) -> float:
    sizes = arm.result["state_bytes"]
    return (sizes["mu"] + sizes["nu"]) / arm.result["parameters"]


def _smooth(values: Sequence[float], width: int = 5) -> np.ndarray:
    width = max(1, min(width, len(values)))
    return np.convolve(values, np.ones(width) / width, "valid")


if __name__ == "__main__":
    sys.exit(main())
