"""Tests interruptions of a training run: `python -m experiments.soak --kills 50 --steps 10000`.

Small runs of `experiments.train` are killed, stopped, starved of disk space and started twice. Each is started again
until it is done. Its last checkpoint must then equal that of an uninterrupted run, bit for bit. A table is printed;
`--results FOLDER` also writes it to FOLDER/cpu/soak.json. The exit code is 1 if a case fails.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.errors import BusyError, DiskError
from experiments.results import record
from experiments.results.report import table
from experiments.train.checkpoint import Checkpoints, digest
from experiments.train.hosts import OTHER_PROCESS_GONE

RECIPE, STEPS, CHECKPOINT_EVERY = "coat_optimizer", 40, 5
MODEL = (
    "--layers", "1", "--dim", "64", "--heads", "4", "--kv-heads", "2", "--mlp-dim", "128", "--seq-len", "32", "--batch",
    "8", "--eval-batches", "2", "--eval-every", "20", "--sample-tokens", "0", "--recipe", RECIPE, "--steps", str(STEPS),
    "--checkpoint-every", str(CHECKPOINT_EVERY),
)  # fmt: skip
# Kills per run; the run then finishes.
KILLS_PER_RUN = 3
# Moments of kills. "start" is before processes have joined. Each fifth one stops the process, which later continues.
MOMENTS = ("start", "compilation", "steps", "checkpoint")
# Time limit of a wait, and interval of polling, in seconds.
PATIENCE, PAUSE = 3600, 0.002
# Maximum bytes of memory growth per step (the log has a row per step), and maximum number of open files.
GROWTH, FILES = 4096, 10
# Makes glibc return freed memory at once, so that the heap does not grow by fragmentation.
RETURN_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
# The training program with a clock that is a day behind.
LATE_CLOCK = """
import runpy, time
now, now_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: now() - 86400, lambda: now_ns() - 86400 * 10**9
runpy.run_module("experiments.train", run_name="__main__", alter_sys=True)
"""
# The training program on a disk where files cannot grow.
FULL_DISK = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY))
runpy.run_module("experiments.train", run_name="__main__", alter_sys=True)
"""


class Case(NamedTuple):
    """A row of the table.

    Attributes:
        name: description of the case.
        times: number of repetitions.
        failure: description of the failure, or "".
        detail: moments of kills, or measurements.
    """

    name: str
    times: int
    failure: str
    detail: str = ""


class SoakError(Exception):
    """A process misbehaved. The message has the details."""


class Layout(NamedTuple):
    """Number of processes of a run, and of devices per process."""

    processes: int = 1
    devices: int = 1


ONE = Layout()


class Soak:
    """Runs of the training program in one folder.

    Args:
        folder: folder of the text and the runs.
        seed: seed of the moments of kills.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self._expected: dict[Layout, dict[str, str]] = {}
        self._logs: dict[int, Path] = {}
        (folder / "text").mkdir()
        for i in range(4):
            words = " ".join(f"w{(i * 37 + j * j) % 101}" for j in range(1500))
            (folder / "text" / f"{i}.txt").write_text(f"document {i}\n{words}\n")

    def start(
        self, run: str, *options: str, layout: Layout = ONE, program: Sequence[str] = ("-m", "experiments.train"),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> list[subprocess.Popen[str]]:  # fmt: skip
        """Starts the processes of a run.

        Args:
            run: name of the run.
            options: options of the training program, in addition to those of all runs.
            layout: processes and devices.
            program: arguments of Python.
            variables: environment variables.
        """
        flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
        # Starts take most of the time, so programs are compiled without optimization.
        flags += f" --xla_backend_optimization_level=0 --xla_force_host_platform_device_count={layout.devices}"
        env = os.environ | {"XLA_FLAGS": flags}
        env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(record.ROOT), "JAX_LOG_COMPILES": "1"}
        env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", **variables}
        where = ["--out", str(self.folder), "--data", str(self.folder / "text")]
        mesh = ["--mesh", f"fsdp={layout.processes * layout.devices}"]
        command = [sys.executable, "-u", *program, *MODEL, "--run", run, *where, *mesh, *options]
        # A process whose peer is killed before both have joined waits this long.
        shared = ["--coordinator", f"localhost:{_free_port()}", "--process-count", str(layout.processes)]
        shared += ["--patience", "60"]
        process_args = [
            [*shared, "--process-id", str(i)] if layout.processes > 1 else [] for i in range(layout.processes)
        ]
        # Not a pipe: a process would block until its pipe is read.
        started = []
        for i, words in enumerate(process_args):
            log = self.folder / f"{run}.{i}.txt"
            with log.open("w") as file:
                started.append(subprocess.Popen([*command, *words], stdout=file, stderr=file, text=True, env=env))
            self._logs[started[-1].pid] = log
        return started

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """Waits for a process; returns its exit code and output."""
        try:
            code = process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            code = None
        output = self._logs[process.pid].read_text()
        if code is None:
            raise SoakError(f"a process did not end within {PATIENCE} s: {output[-500:]}")
        return code, output

    def finish(self, run: str, *options: str, **start: Any) -> None:
        """Trains a run to its end."""
        for code, output in map(self.end, self.start(run, *options, **start)):
            if code:
                raise SoakError(f"{run} exited with code {code}: {output[-500:]}")

    def check(self, run: str, layout: Layout = ONE) -> str:
        """Returns how a finished run's last state differs from that of an uninterrupted run, or ""."""
        if layout not in self._expected:
            alone = f"alone_{layout.processes}_{layout.devices}"
            self.finish(alone, layout=layout)
            self._expected[layout] = self.last_state(alone)
        expected, actual = self._expected[layout], self.last_state(run)
        differ = [name for name in expected if actual.get(name) != expected[name]]
        return f"{run}: {len(differ)} of {len(expected)} arrays differ, such as {differ[0]}" if differ else ""

    def last_state(self, run: str) -> dict[str, str]:
        """Returns the digest of each array of the last checkpoint, after checking the digests in the checkpoint."""
        with Checkpoints(self.folder / run / RECIPE / "checkpoints", 2, clean=False) as checkpoints:
            leaves = checkpoints.read_meta(STEPS)["leaves"]
            abstract = {k: jax.ShapeDtypeStruct(x["shape"], x["dtype"]) for k, x in leaves.items()}
            arrays, _ = checkpoints.restore(STEPS, abstract)
        return {name: digest(np.asarray(x)) for name, x in arrays.items()}

    def progress(self, run: str) -> int:
        """Returns the number of logged lines of a run."""
        with contextlib.suppress(OSError):
            return (self.folder / run / RECIPE / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def is_compiling(self, processes: Sequence[subprocess.Popen[str]]) -> bool:
        """Returns whether a process has begun to compile the training step."""
        return any("Compiling jit(step)" in self._logs[process.pid].read_text() for process in processes)

    def is_saving(self, run: str) -> bool:
        """Whether a checkpoint is being written."""
        return any((self.folder / run / RECIPE / "checkpoints").glob("*.orbax-checkpoint-tmp"))

    def break_off(self, run: str) -> None:
        """Starts a run and kills it after some checkpoints."""
        processes = self.start(run)
        wait_for(lambda: self.progress(run) > 2 * CHECKPOINT_EVERY, processes)
        processes[0].kill()
        self.end(processes[0])


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def wait_for(condition: Callable[[], bool], processes: Sequence[subprocess.Popen[str]]) -> bool:
    """Waits for a condition. Returns False if a process ends before."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if any(process.poll() is not None for process in processes):
            return False
        if time.monotonic() > deadline:
            raise SoakError(f"a run made no progress within {PATIENCE} s")
        time.sleep(PAUSE)
    return True


def interrupt(soak: Soak, run: str, moment: str, processes: Sequence[subprocess.Popen[str]], stops: bool) -> bool:
    """Kills, or stops and continues, one of the processes at a moment. Returns False if they end before."""
    previous = soak.progress(run)
    conditions = {
        "start": (lambda: True, 2.0),
        "compilation": (lambda: soak.is_compiling(processes), 2.0),
        "steps": (lambda: soak.progress(run) > previous, 0.5),
        "checkpoint": (lambda: soak.progress(run) > previous and soak.is_saving(run), 0.02),
    }
    condition, max_delay = conditions[moment]
    if not wait_for(condition, processes):
        return False
    time.sleep(soak.random.uniform(0, max_delay))
    victim = soak.random.choice(processes)
    if victim.poll() is not None:
        return False
    if not stops:
        victim.kill()
        return True
    victim.send_signal(signal.SIGSTOP)
    time.sleep(soak.random.uniform(0.5, 3))
    victim.send_signal(signal.SIGCONT)
    return True


def kill_often(soak: Soak, count: int, *layouts: Layout) -> Case:
    """Kills or stops runs `count` times in all, at each kind of moment in turn.

    Args:
        soak: the folder of the runs.
        count: number of kills and stops.
        layouts: processes and devices of a run; each start uses the next one. All have the same number of devices.
    """
    stop_counts, failures = Counter[str](), list[str]()
    name = ", then ".join(f"{one.processes} process{'es' * (one.processes > 1)} of {one.devices}" for one in layouts)
    runs = 0
    while stop_counts.total() < count and not failures:
        run, codes, start = f"killed_{'_'.join(f'{p}x{d}' for p, d in layouts)}_{runs}", {1}, 0
        while codes != {0} and not failures:
            number = stop_counts.total()
            moment, stops = MOMENTS[number % len(MOMENTS)], number % 5 == 4
            if moment == "compilation":
                shutil.rmtree(soak.folder / ".xla_cache", ignore_errors=True)
            processes = soak.start(run, layout=layouts[start % len(layouts)])
            start += 1
            if start <= KILLS_PER_RUN and interrupt(soak, run, moment, processes, stops):
                stop_counts[f"stopped in {moment}" if stops else f"killed in {moment}"] += 1
            outcomes = [soak.end(process) for process in processes]
            codes = {code for code, _ in outcomes}
            unexpected = [output for code, output in outcomes if code not in (0, -signal.SIGKILL, OTHER_PROCESS_GONE)]
            if unexpected:
                failures.append(f"{run} ended with {sorted(codes)}: {unexpected[0][-500:]}")
        runs += 1
        failures = failures or list(filter(None, [soak.check(run, layouts[0])]))
    detail = ", ".join(f"{n} {kind}" for kind, n in sorted(stop_counts.items()))
    return Case(f"kills: {name}", stop_counts.total(), "; ".join(failures), f"{runs} runs; {detail}")


def set_clock_back(soak: Soak) -> Case:
    """Continues a run with a clock that is a day behind, after its files got dates in the future."""
    soak.break_off("clock")
    future = time.time() + 86400
    for path in (soak.folder / "clock").rglob("*"):
        os.utime(path, (future, future))
    soak.finish("clock", program=("-c", LATE_CLOCK))
    return Case("clock set back by a day", 1, soak.check("clock"))


def disk_full(soak: Soak) -> Case:
    """Trains on a full disk, and continues on a disk with space."""
    soak.break_off("disk")
    code, output = soak.end(soak.start("disk", program=("-c", FULL_DISK))[0])
    if code != DiskError.exit_code:
        return Case("disk full", 1, f"exit code {code}: {output[-500:]}")
    soak.finish("disk")
    return Case("disk full", 1, soak.check("disk"), f"exit code {code}, then resumed")


def two_in_one_folder(soak: Soak) -> Case:
    """Starts a run a second time while it is running."""
    (first,) = soak.start("twice")
    wait_for(lambda: soak.progress("twice") > 0, [first])
    first.send_signal(signal.SIGSTOP)  # so that it is not done before the second one has started
    (second,) = soak.start("twice")
    code, output = soak.end(second)
    first.send_signal(signal.SIGCONT)
    if code != BusyError.exit_code:
        first.kill()
        return Case("two runs in one folder", 1, f"exit code {code} of the second: {output[-500:]}")
    code, output = soak.end(first)
    failure = f"exit code {code} of the first: {output[-500:]}" if code else soak.check("twice")
    return Case("two runs in one folder", 1, failure, f"exit code {BusyError.exit_code} of the second")


def many_steps(soak: Soak, steps: int) -> Case:
    """Measures a long run with telemetry: growth of memory and open files in its second half, and recompilations."""
    interval = str(max(steps // 20, 1))
    options = ["--steps", str(steps), "--checkpoint-every", interval, "--eval-every", interval, "--log-every", interval]
    options += ["--telemetry", str(max(steps // 100, 1))]
    (process,), sizes = soak.start("many", *options, variables=RETURN_MEMORY), list[tuple[int, int, int]]()
    while process.poll() is None:
        sizes.append((soak.progress("many"), _resident(process.pid), _open_files(process.pid)))
        time.sleep(0.2)
    _, text = soak.end(process)
    if process.returncode:
        return Case("steps with telemetry", steps, f"exit code {process.returncode}: {text[-500:]}")
    late = np.array([x for x in sizes if x[0] > soak.progress("many") / 2 and all(x)])
    if len(late) < 5:
        return Case("steps with telemetry", steps, "too few steps to see growth")
    # The minimum of each part, because writing a checkpoint also takes memory.
    floors = np.array([part[np.argmin(part[:, 1])] for part in np.array_split(late, 5)])
    growth, middle = float(np.polyfit(floors[:, 0], floors[:, 1], 1)[0]), len(late) // 2
    files = float(np.median(late[middle:, 2]) - np.median(late[:middle, 2]))
    # The first validation compiles a program, and the end of a run another one.
    compiled = text.partition("\nvalid ")[2].partition(f"\nvalid {steps}/")[0].count("Finished XLA compilation")
    report = f"{growth:+.0f} bytes a step, {files:+.0f} open files, {compiled} recompilations"
    failure = "" if growth < GROWTH and files < FILES and not compiled else report
    return Case("steps with telemetry", steps, failure, f"{late[-1, 1] / 2**20:.0f} MiB, {report}")


def _resident(pid: int) -> int:
    """Returns the resident bytes of a process, or 0 if it has ended."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def _open_files(pid: int) -> int:
    """Returns the number of open files and sockets of a process, or 0 if it has ended."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases, prints their table, and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills",
        type=int,
        default=50,
        help="number of kills, divided among runs of one process, of two, and of a changing number",
    )
    parser.add_argument("--steps", type=int, default=10_000, help="steps of the long run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of kills")
    parser.add_argument("--results", type=Path, help="folder in which to write cpu/soak.json")
    options = parser.parse_args(argv)
    if options.kills < 3 or options.steps < 100:
        parser.error("--kills must be at least 3, and --steps at least 100")
    jax.config.update("jax_platforms", "cpu")
    share = options.kills // 3
    # The lists run at the same time, each in its own folder.
    lists: list[list[Callable[[Soak], Case]]] = [
        [lambda soak: kill_often(soak, options.kills - 2 * share, ONE)],
        [lambda soak: kill_often(soak, share, Layout(2, 1))],
        [lambda soak: kill_often(soak, share, Layout(2, 1), Layout(1, 2))],
        [set_clock_back, disk_full, two_in_one_folder],
        [lambda soak: many_steps(soak, options.steps)],
    ]

    def run(cases: Sequence[Callable[[Soak], Case]]) -> list[Case]:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            soak, passed_cases = Soak(Path(folder), options.seed), list[Case]()
            for case in cases:
                try:
                    passed_cases.append(case(soak))
                except SoakError as error:
                    passed_cases.append(Case("did not end", 1, str(error)))
                print(
                    passed_cases[-1].name,
                    passed_cases[-1].failure or "passed",
                    passed_cases[-1].detail,
                    sep=": ",
                    flush=True,
                )
        return passed_cases

    with ThreadPoolExecutor(len(lists)) as pool:
        cases = list(itertools.chain(*pool.map(run, lists)))
    print(
        table(["case", "times", "result", ""], [[x.name, str(x.times), x.failure or "passed", x.detail] for x in cases])
    )
    if options.results:
        rows = [
            {
                "case": x.name,
                "impl": RECIPE,
                "metric": metric,
                "value": value,
                "unit": "1",
                "baseline": "",
                "ratio": None,
            }
            for x in cases
            for metric, value in (("times", x.times), ("failures", int(bool(x.failure))))
        ]
        record.write(
            options.results, "soak", title="Training that is killed, stopped and starved", device="cpu", rows=rows,
            command=shlex.join(["python", "-m", "experiments.soak", *(sys.argv[1:] if argv is None else argv)]),
            notes=[f"{x.name}: {x.failure or x.detail}." for x in cases if x.failure or x.detail],
        )  # fmt: skip
    return int(any(case.failure for case in cases))


if __name__ == "__main__":
    sys.exit(main())
