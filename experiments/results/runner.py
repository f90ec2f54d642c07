"""Runs the jobs of results files on the GPUs of this host."""

import argparse
import concurrent.futures
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments import results
from experiments.files import parse_json, read_text
from experiments.results import record
from experiments.results.jobs import CPU, DERIVED, EIGHT_GPUS, FOUR_GPUS, ONE_GPU, TRAINED, TWO_GPUS, Job
from experiments.results.report import RUNS

# Jobs by number of GPUs.
JOBS = {8: EIGHT_GPUS, 4: FOUR_GPUS, 2: TWO_GPUS, 1: ONE_GPU, 0: CPU}
SHARED = 2  # number of studies that train on one GPU
DEVICE_LABELS = {8: "eight GPUs", 4: "four GPUs", 2: "two GPUs", 1: "one GPU", 0: "CPU"}


def distinct() -> tuple[Job, ...]:
    """Returns the GPU jobs; of those that differ only in options, the first."""
    return tuple({job.command[:2]: job for job in (*TWO_GPUS[::-1], *ONE_GPU[::-1])}.values())


def gpus() -> tuple[str, list[str]]:
    """Returns the name of this host's GPUs and the visible GPU numbers; "" and none without a GPU."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return "", []
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    names = completed.stdout.split("\n")[:-1] if completed.returncode == 0 else []
    if not names:
        return "", []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return names[0], [str(i) for i in range(len(names))]
    # As in CUDA, entries after an invalid one are ignored.
    visible_gpus = list(itertools.takewhile(lambda word: word and not word.startswith("-"), visible.split(",")))
    return (names[0], visible_gpus) if visible_gpus else ("", [])


def state(path: Path, commit: str) -> str:
    """Returns the state of a file: "done" at this commit, "missing", "damaged", "not complete", or its commits."""
    if not path.exists():
        return "missing"
    try:
        result = parse_json(read_text(path))
        if not result.get("complete", True):
            return "not complete"
        commits = sorted({of for row in result["rows"] for of in row["commit"].split(", ")})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "damaged"
    if not commits:
        return "without rows"
    if commits == [commit]:
        return "done"
    return "; ".join(f"{of}: {record.since(of) or 'no change since'}" for of in commits)


# Process groups of running jobs. Each has its own group, so that a time limit also kills its children.
_RUNNING = set[int]()


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """A context in which a signal that ends this process also kills the running jobs."""

    def stop(code: int, _frame: object) -> None:
        for group in list(_RUNNING):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        os._exit(128 + code)

    old_handlers = {kind: signal.signal(kind, stop) for kind in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for kind, handler in old_handlers.items():
            signal.signal(kind, handler)


def run(
    job: Job, folder: Path, log: Path, limit: float, extra_variables: Mapping[str, str] | None = None
) -> str | None:
    """Runs a job and returns its error, or None. After the time limit, the job and its children are killed.

    Args:
        job: the job.
        folder: folder of results.
        log: file for its output.
        limit: time limit in seconds.
        extra_variables: environment variables in addition to those of this process.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(extra_variables or {})
    with log.open("w") as out:
        process = subprocess.Popen([*job.argv, str(folder)], stdout=out, stderr=subprocess.STDOUT,
                                   start_new_session=True, env=environment)  # fmt: skip
        _RUNNING.add(process.pid)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"killed after {limit:.0f} s"
        finally:
            _RUNNING.discard(process.pid)
    return None if code == 0 else f"ended with code {code}: " + log.read_text().strip().rpartition("\n")[2][:200]


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the files that are not of this commit. Returns 0 if none remains, 1 otherwise, 2 without a device."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.results", description=(results.__doc__ or "").split("\n")[0]
    )
    names = [job.name for jobs in (*JOBS.values(), TRAINED) for job in jobs]
    parser.add_argument("--only", nargs="+", choices=sorted(set(names)), metavar="NAME", help="some files")
    parser.add_argument("--cpu", action="store_true", help="make the tables that need no GPU")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds for all jobs; remaining files are listed"
    )
    parser.add_argument("--data", nargs="+", metavar="TEXT", help="train the studies on these files, two on a GPU")
    parser.add_argument(
        "--list", action="store_true", help="list the files and later changes of the code, without running"
    )
    parser.add_argument(
        "--dry", action="store_true", help="run the code with small shapes on a CPU, without keeping results"
    )
    parser.add_argument("--again", action="store_true", help="also make files of this commit again")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder (default: results)")
    options = parser.parse_args(argv)
    if options.data and (options.dry or options.cpu):
        parser.error("--data trains on GPUs; omit --dry and --cpu")
    try:
        commit = record.commit()
    except ValueError as error:
        parser.error(str(error))
    if options.list and not options.results.is_dir():
        parser.error(f"--results {options.results}: there is no such folder")
    if options.list:
        return print_states(options.results, commit)
    with tempfile.TemporaryDirectory() as scratch:
        device, slots = "cpu", [""]
        if options.dry:
            os.environ |= {"FP8JAX_DRY": "1", "JAX_PLATFORMS": "cpu"}
            options.results, options.again = Path(scratch), True
        elif options.cpu:
            os.environ["JAX_PLATFORMS"] = "cpu"
        else:
            device, slots = gpus()
            slots = slots * SHARED if options.data else slots
        if not slots:
            print("no GPU here: --cpu makes the tables that need none, --dry tries the code", file=sys.stderr)
            return 2
        count = len(set(slots))
        # Jobs that differ only in options run once. Jobs of many GPUs come first, or they would wait for all GPUs.
        multi_gpu_jobs = [job for width in JOBS if 0 < width <= count for job in JOBS[width]]
        trained = [job.reading(options.data or ()) for job in TRAINED if job.gpus <= count]
        jobs = distinct() if options.dry else CPU if options.cpu else trained if options.data else multi_gpu_jobs
        if absent := sorted(set(options.only or ()) - {job.name for job in jobs}):
            parser.error(f"--only {' '.join(absent)}: not with these options and {count} of {device}: see --list")
        jobs = [job for job in jobs if not options.only or job.name in options.only]
        with ending_together():
            return measure(jobs, commit, device, slots, options)


class Slots:
    """Slots for jobs on the GPUs of a host.

    Args:
        gpus: GPU number of each slot; slots with equal numbers share a GPU.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus, self._free, self._change = gpus, list(range(len(gpus))), threading.Condition()

    def take(self, count: int) -> list[int]:
        """Waits for slots on this many GPUs, and acquires one of each."""
        with self._change:
            self._change.wait_for(lambda: len({self._gpus[i] for i in self._free}) >= count)
            first = {self._gpus[i]: i for i in sorted(self._free, reverse=True)}
            gpu_ids = sorted(first.values())[:count]
            self._free = [i for i in self._free if i not in gpu_ids]
            return gpu_ids

    def give_back(self, gpu_ids: Sequence[int]) -> None:
        """Releases the slots."""
        with self._change:
            self._free += gpu_ids
            self._change.notify_all()


def measure(jobs: Sequence[Job], commit: str, device: str, slots: Sequence[str], options: argparse.Namespace) -> int:
    """Runs jobs within the budget, in parallel if there are slots. Prints the remaining files.

    Args:
        jobs: jobs in starting order.
        commit: the current commit.
        device: name of one GPU, or "cpu".
        slots: GPU number of each slot; "" for a slot on CPUs.
        options: the parsed command line.
    """
    start, skipped, slots_pool = time.monotonic(), dict[str, str](), Slots(slots)
    print(f"{len(set(slots))} x {device} at {commit}: {', '.join(job.name for job in jobs)}", flush=True)
    # With local changes or an unknown commit, existing files may be outdated.
    is_known = commit != record.UNKNOWN and not commit.endswith("+")

    def seconds_left() -> float:
        return float(options.budget - (time.monotonic() - start))

    def state_of(job: Job) -> str:
        card = record.card(f"{job.gpus} x {device}" if job.gpus > 1 else device)
        return state(options.results / card / f"{job.name}.json", commit)

    def run_one(job: Job, gpu_ids: Sequence[int]) -> None:
        begin = time.monotonic()
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(slots[i] for i in gpu_ids)} if slots[gpu_ids[0]] else {}
        environment |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / SHARED}"} if options.data else {}
        log, limit = options.results / "logs" / f"{job.name}.log", min(seconds_left(), max(2 * job.seconds, 120))
        try:
            problem = run(job, options.results, log, limit, environment)
        finally:
            slots_pool.give_back(gpu_ids)
        if problem is None and not (options.dry or options.data) and (state := state_of(job)) != "done":
            problem = f"ran, and left a file that is {state}"
        print(f"{job.name}: {problem or 'done'}, {time.monotonic() - begin:.0f} s", flush=True)
        if problem:
            skipped[job.name] = problem

    running = []
    with concurrent.futures.ThreadPoolExecutor(len(slots)) as pool:
        for job in jobs:
            if is_known and not (options.again or options.data) and state_of(job) == "done":
                print(f"{job.name}: of this commit and card already", flush=True)
                continue
            gpu_ids = slots_pool.take(1 if options.dry else max(job.gpus, 1))
            if seconds_left() < job.seconds:
                skipped[job.name] = f"needs {job.seconds:.0f} s, {max(seconds_left(), 0):.0f} are left"
                slots_pool.give_back(gpu_ids)
            else:
                running.append(pool.submit(run_one, job, gpu_ids))
    for future in running:
        future.result()
    for name, why in skipped.items():
        print(f"left: {name} ({why})", flush=True)
    return 1 if skipped else 0


def print_states(results: Path, commit: str) -> int:
    """Prints the state of every file, by card."""
    for kind, jobs in (
        *((DEVICE_LABELS[n], JOBS[n]) for n in sorted(JOBS, key=lambda n: n or 99)),
        ("other files", DERIVED),
    ):
        print(f"{kind}:")
        for job in jobs:
            paths = (
                path for path in sorted(results.glob(f"*/{job.name}.json")) if not path.parent.name.startswith(RUNS)
            )
            states = [f"{path.parent.name}: {state(path, commit)}" for path in paths]
            print(f"  {job.name}: {'; '.join(states) or 'missing'}")
    print("trained, with --data TEXT:")
    for job in TRAINED:
        print(f"  {job.name}: {job.gpus} GPU{'s' if job.gpus > 1 else ''}, {job.seconds / 60:.0f} minutes")
    return 0
