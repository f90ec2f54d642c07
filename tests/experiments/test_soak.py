"""The soak detects a different bit, growing memory and recompilation. Its long run is slow."""

import re
import sys

import numpy as np
import pytest

from experiments import soak
from experiments.results import record
from experiments.train.checkpoint import Checkpoints


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A soak in whose folder no process is started."""
    monkeypatch.setattr(soak.Soak, "finish", lambda *_, **__: None)
    return soak.Soak(tmp_path, 0)


def test_a_bit_of_the_last_state_that_differs_is_named(small):
    x = np.arange(6, dtype=np.float32)
    for run, y in (("alone_1_1", x), ("same", x), ("other", np.nextafter(x, 9, dtype=np.float32))):
        with Checkpoints(small.folder / run / soak.RECIPE / "checkpoints", 2) as checkpoints:
            checkpoints.save(soak.STEPS, {"a": x, "b": y}, loader={}, config={})
    assert small.check("same") == ""
    assert small.check("other") == "other: 1 of 2 arrays differ, such as b"


STEPPER = """
import pathlib, sys, time
log, kept, files = pathlib.Path(sys.argv[1]), [], []
log.parent.mkdir(parents=True)
print("Finished XLA compilation of step", "valid 5/100 loss 1", sep="\\n", flush=True)
with log.open("w", buffering=1) as file:
    for step in range(1, 101):
        kept.append(b"x" * int(sys.argv[2]))
        files += [log.open() for _ in range(int(sys.argv[4]))]
        print(step, file=file)
        time.sleep(0.02)
print(sys.argv[3], "valid 100/100 loss 1", sep="\\n", flush=True)
"""


@pytest.mark.parametrize(
    ("size", "line", "files", "failure"),
    [
        (10, "", 0, ""),
        (10**6, "", 0, r"\+\d{5,} bytes a step, .0 open files, 0 recompilations"),
        (10, "Finished XLA compilation", 0, r".\d+ bytes a step, .0 open files, 1 recompilations"),
        (10, "", 1, r".\d+ bytes a step, \+\d\d open files, 0 recompilations"),
    ],
)
def test_growth_and_programs_that_are_compiled_again_are_failures(small, monkeypatch, size, line, files, failure):
    log, start = small.folder / "many" / soak.RECIPE / "metrics.jsonl", soak.subprocess.Popen
    stepper = [sys.executable, "-c", STEPPER, str(log), str(size), line, str(files)]
    monkeypatch.setattr(soak.subprocess, "Popen", lambda command, **options: start(stepper, **options))
    case = soak.many_steps(small, 100)
    assert re.fullmatch(failure, case.failure)


def test_a_process_that_ends_is_not_waited_for(small):
    (process,) = small.start("done", program=["-c", "print('done')"])
    assert not soak.wait_for(lambda: False, [process])
    assert small.end(process) == (0, "done\n")
    assert not small.is_compiling([process])
    (process,) = small.start("compiles", program=["-c", "print('Compiling jit(step) with')"])
    small.end(process)
    assert small.is_compiling([process])


def test_kills_come_at_each_moment_in_turn_also_over_runs(small, monkeypatch):
    moments = []

    def interrupt(_, run, moment, processes, stops):
        moments.append((run[-1], moment, stops))
        return True

    monkeypatch.setattr(soak, "interrupt", interrupt)
    monkeypatch.setattr(small, "start", lambda *_, **__: [len(moments)])
    monkeypatch.setattr(small, "end", lambda before: (-9 if len(moments) > before else 0, ""))
    monkeypatch.setattr(small, "check", lambda *_: "")
    case = soak.kill_often(small, 6, soak.ONE)
    assert (case.times, case.failure) == (6, "")
    in_turn = ["start", "compilation", "steps", "checkpoint", "start", "compilation"]
    assert [moment for _, moment, _ in moments] == in_turn
    assert [(run, stops) for run, _, stops in moments] == [*[("0", False)] * 3, ("1", False), ("1", True), ("1", False)]


@pytest.mark.slow
def test_runs_end_in_the_same_bits_whatever_happens_to_them(tmp_path):
    assert soak.main(["--kills", "3", "--steps", "100", "--results", str(tmp_path)]) == 0
    rows = record.load(tmp_path / "cpu" / "soak.json")["rows"]
    assert all(row["value"] == 0 for row in rows if row["metric"] == "failures")
