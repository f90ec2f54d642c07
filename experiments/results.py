"""Measures all that README and RESULTS quote, file by file: `make results`, or `python -m experiments.results`.

One command makes each file of results/CARD/, on one card at one commit. A file whose rows are of this commit and card
is left as it is, so that a run that was cut short goes on where it stopped; nobody edits one. `--list` says what is
there and, from git, what changed since; `--dry` runs the benchmarks' code on a CPU, small and without measuring.

On one GPU the files of one GPU are made, the most important first, in under an hour on an H100; on two or more
those of two; with `--cpu` the papers' tables that need none. `TRAINED` takes hours and is told by `--list` alone.
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.bench import record


@dataclasses.dataclass(frozen=True)
class Job:
    """A results file and the command that makes it.

    Attributes:
        name: of the file.
        command: module and options; it takes the folder of results, too.
        seconds: that it takes on an H100, or on a CPU's cores.
    """

    name: str
    command: tuple[str, ...]
    seconds: float

    @property
    def argv(self) -> list[str]:
        """The command for this Python."""
        return [sys.executable, "-m", *self.command]


def bench(name: str, seconds: float, *options: str, file: str | None = None) -> Job:
    """A job of `experiments.bench`, which writes FILE.json, NAME.json without."""
    named = ("--name", file) if file else ()
    return Job(file or name, ("experiments.bench", name, *options, *named, "--out"), seconds)


def table(name: str, seconds: float, *options: str) -> Job:
    """A job of `experiments.tables`."""
    return Job(name, (f"experiments.tables.{name}", *options, "--results"), seconds)


# An arm takes 20 to 80 s to trace and compile.
# In the order of their importance; seconds were seen on an H100, or are guesses on the safe side.
STEP = ("--mesh", "one", "--rounds", "3", "--steps", "4")
ONE_GPU = (
    bench("step", 300, *STEP, "--torch", "torch bf16", "--arm", "te_current", "coat", "coat_fast", "moss", "fast"),
    bench("models", 150, "--models", "llama1b", "--rounds", "3"),
    *(bench("models", 150, "--models", name, "--rounds", "3", file=f"models_{name}")
      for name in ("vitl", "gpt350m", "gpt124m")),
    bench("release", 190, "--rounds", "2"),
    bench("release", 240, "--batch", "0", "--rounds", "2", "--arm", "coat_optimizer, released, bf16+int8 masters",
          "coat, released, bf16+int8 masters", "bf16, released, bf16+int8 masters", file="release_most"),
    bench("release", 200, "--length", "4096", "--rounds", "2", "--arm", "coat, released, bf16+int8 masters",
          "fast, released, bf16+int8 masters", file="release_4096"),
    bench("release", 240, "--model", "8b", "--length", "8192", "--rounds", "2", "--arm",
          "coat, released, bf16+int8 masters", "fast, released, bf16+int8 masters", file="release_8b"),
    bench("release", 200, "--fit", "40", "--batch", "0", "--rounds", "2", "--arm", "coat, released, bf16+int8 masters",
          file="release_40"),
    bench("release", 120, "--batch", "16", "--rounds", "2", "--steps", "2", "--arm",
          "coat, released, bf16+int8 masters", "coat, released, offloaded, bf16+int8 masters", file="release_offload"),
    bench("layer", 70, "--lengths", "4096"),
    bench("optimizer", 110),
    bench("gemm", 125, "--limit", "100"),
    table("coat_speed", 100, "--hidden", "4096"),
    bench("peers", 130),
    bench("step", 260, *STEP, "--torch", "--arm", "fp8_lm", "moss_mx", "int8_fallback", "bf16",
          "te_current, none of our kernels", file="step_more"),
    bench("step", 200, *STEP, "--vocab", "128256", "--torch", "--arm", "bf16, whole logits", "coat", "coat_fast",
          file="step_vocab"),
    bench("quantize", 65),
    bench("gemm_int8", 65, "--limit", "55", "--shapes", "4"),
    bench("linear", 50, "--model", "7b", "--tokens", "16384"),
    bench("scaling", 45),
    bench("lora", 110, "--arm", "te_current on e4m3", "fast on e4m3"),
)  # fmt: skip
TWO_GPUS = (
    bench("step", 240, "--mesh", "data", "fsdp", "--rounds", "3", "--torch", "--arm", "coat", "fast",
          "coat, 8-bit gradients, one phase", file="step_two"),
    bench("step", 300, "--mesh", "tensor", "--rounds", "3", "--torch", "--arm", "coat", "coat_fast", "fast",
          file="step_tensor"),
    bench("reduce", 120),
    bench("step", 200, "--model", "7b", "--mesh", "fsdp", "--batch", "4", "--rounds", "3", "--torch", "--arm", "coat",
          "fp8_lm", "fp8_lm_two_phase", file="step_7b"),
    bench("step", 200, "--model", "7b", "--mesh", "fsdp", "--fit", "80", "--rounds", "3", "--torch", "--arm", "coat",
          file="step_7b_fit"),
    bench("release", 240, "--model", "13b", "--gpus", "2", "--rounds", "2", "--arm",
          "coat, released, bf16+int8 masters", "coat, bf16+int8 masters", file="release_13b"),
    bench("release", 240, "--gpus", "2", "--length", "4096", "--batch", "0", "--rounds", "2", "--arm",
          "coat, released, bf16+int8 masters", file="release_two"),
)  # fmt: skip
CPU = (
    table("plans", 60),
    table("coat_memory", 60),
    table("int8_memory", 60),
    table("second_moment", 90),
    table("coat_expansion", 60),
    table("release_clipping", 600),
    table("coat_optimizer", 400),
    table("coat_activations", 200),
    table("moss_snr", 400),
    table("fp8_lm_gradients", 200),
    table("moss_scaling", 300),
    table("int8_leak", 900),
    table("int8_fallback", 900),
    table("int8_diverges", 1800),
    table("finetuning", 1500),
)
# From other files, without measuring: after the others.
DERIVED = (table("moss_speed", 20), table("training_parity", 20, "--judge"))
TRAINED = {
    "training_parity": "python -m experiments.tables.training_parity --data TEXT, an hour of a GPU for eight seeds",
    "training_parity, 65m": "python -m experiments.tables.training_parity --size 65m --data TEXT, three hours",
    "training_parity, 65m_short": "python -m experiments.tables.training_parity --size 65m_short --data TEXT --seeds 3 "
    "--arms bf16 master_bf16_int8 master_bf16_stochastic released, five minutes of two GPUs",
    "finetuning, 60m": "python -m experiments.tables.finetuning --size 60m --data TEXT, eight minutes of a GPU",
    "fp8_lm_precision_125m": "python -m experiments.tables.fp8_lm_precision --model 125m --data TEXT, half an hour",
}


def distinct() -> tuple[Job, ...]:
    """The jobs of GPUs, of those that differ in options alone the first."""
    return tuple({job.command[:2]: job for job in (*TWO_GPUS[::-1], *ONE_GPU[::-1])}.values())


def gpus() -> tuple[str, int]:
    """The name of this host's GPUs, and their number, of visible ones; "" and 0 without one."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return "", 0
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    names = done.stdout.split("\n")[:-1] if done.returncode == 0 else []
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        names = names[: len(visible.split(","))]
    return (names[0], len(names)) if names else ("", 0)


def state(path: Path, commit: str) -> str:
    """What there is of a file: "done" at this commit, "missing", "not complete", or of which commit it is."""
    if not path.exists():
        return "missing"
    result = json.loads(path.read_text())
    if not result.get("complete", True):
        return "not complete"
    commits = sorted({of for row in result["rows"] for of in row["commit"].split(", ")})
    if commits == [commit]:
        return "done"
    return "; ".join(f"{of}: {record.since(of) or 'no change since'}" for of in commits)


def run(job: Job, folder: Path, log: Path, limit: float) -> str | None:
    """Runs a job, its output into a log; what went wrong, or None. At the limit it and its children are killed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen([*job.argv, str(folder)], stdout=out, stderr=subprocess.STDOUT,
                                   start_new_session=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"killed after {limit:.0f} s"
    return None if code == 0 else f"ended with code {code}: " + log.read_text().strip().rpartition("\n")[2][:200]


def pack(bundle: Path, folders: Sequence[Path]) -> None:
    """All files of some folders as one archive, whole or not at all."""
    part = bundle.with_suffix(".part")
    with tarfile.open(part, "w:gz") as archive:
        for folder in folders:
            if folder.is_dir():
                archive.add(folder, folder.name)
    os.replace(part, bundle)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the files that are not of this commit; 0 if none is left, 1 else, 2 where there is nothing to run on."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [job.name for job in (*ONE_GPU, *TWO_GPUS, *CPU, *DERIVED)]
    parser.add_argument("--only", nargs="+", choices=sorted(set(names)), metavar="NAME", help="some files")
    parser.add_argument("--cpu", action="store_true", help="the tables that need no GPU")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for all; then what is left is told")
    parser.add_argument("--list", action="store_true", help="what there is and what changed since; runs nothing")
    parser.add_argument("--dry", action="store_true", help="run the code on small shapes, on a CPU; keeps nothing")
    parser.add_argument("--again", action="store_true", help="also what is of this commit")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder (default: results)")
    parser.add_argument("--bundle", type=Path, help="all that there is and the logs as one .tgz, after each file")
    options = parser.parse_args(argv)
    try:
        commit = record.commit()
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as scratch:
        device, count = ("cpu", 0) if options.cpu or options.dry else gpus()
        if options.dry:
            os.environ |= {"FP8JAX_DRY": "1", "JAX_PLATFORMS": "cpu"}
            options.results, options.again = Path(scratch), True
        if options.cpu:
            os.environ["JAX_PLATFORMS"] = "cpu"
        if options.list:
            return told(options.results, commit)
        jobs: tuple[Job, ...] = CPU if options.cpu else TWO_GPUS if count > 1 else ONE_GPU
        if options.dry:
            # What differs in options alone is run once.
            jobs = distinct()
        jobs = tuple(job for job in jobs if not options.only or job.name in options.only)
        if not options.dry and not options.cpu and count == 0:
            print("no GPU here: --cpu makes the tables that need none, --dry tries the code", file=sys.stderr)
            return 2
        return measure(jobs, commit, device if count <= 1 else f"{count} x {device}", options)


def measure(jobs: Sequence[Job], commit: str, device: str, options: argparse.Namespace) -> int:
    """Runs jobs within the budget; tells what is left."""
    start, left = time.monotonic(), dict[str, str]()
    folder, logs = options.results / record.card(device), options.results / "logs"
    print(f"{device} at {commit}: {', '.join(job.name for job in jobs)}", flush=True)
    for job in jobs:
        if not options.again and state(folder / f"{job.name}.json", commit) == "done":
            print(f"{job.name}: of this commit and card already", flush=True)
            continue
        room = options.budget - (time.monotonic() - start)
        if room < job.seconds:
            left[job.name] = f"needs {job.seconds:.0f} s, {max(room, 0):.0f} are left"
            continue
        begin = time.monotonic()
        problem = run(job, options.results, logs / f"{job.name}.log", min(room, max(2 * job.seconds, 120)))
        if problem is None and not options.dry and (found := state(folder / f"{job.name}.json", commit)) != "done":
            problem = f"ran, and left a file that is {found}"
        print(f"{job.name}: {problem or 'done'}, {time.monotonic() - begin:.0f} s", flush=True)
        if problem:
            left[job.name] = problem
        if options.bundle:
            pack(options.bundle, [folder, logs])
    for name, why in left.items():
        print(f"left: {name} ({why})", flush=True)
    return 1 if left else 0


def of_kind(card: str) -> str:
    """Which list of jobs a card's folder is of."""
    return "CPU" if card == "cpu" else "two GPUs" if re.search(r"x\d+$", card) else "one GPU"


def told(results: Path, commit: str) -> int:
    """Prints what there is of every file, by card."""
    folders = sorted(path for path in results.iterdir() if path.is_dir() and list(path.glob("*.json")))
    for kind, jobs in (("one GPU", ONE_GPU), ("two GPUs", TWO_GPUS), ("CPU", CPU), ("from other files", DERIVED)):
        print(f"{kind}:")
        for job in jobs:
            cards = [folder for folder in folders if jobs is DERIVED or of_kind(folder.name) == kind]
            paths = {folder.name: folder / f"{job.name}.json" for folder in cards}
            found = {card: state(path, commit) for card, path in paths.items() if path.exists()}
            print(f"  {job.name}: " + ("; ".join(f"{card}: {what}" for card, what in found.items()) or "missing"))
    print("trained, not by this command:")
    for name, how in TRAINED.items():
        print(f"  {name}: {how}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
