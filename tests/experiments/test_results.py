"""`make results`: which jobs run and which are left, and the origin of figures, with planted commands and histories."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from experiments.papers import parity
from experiments.results import record, runner

MAKE = """import json, pathlib, sys
name, commit, complete, folder = sys.argv[1:5]
path = pathlib.Path(folder, "h9", f"{name}.json")
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps({"complete": complete == "yes", "rows": [{"commit": commit, "device": "H9"}]}))
print("made", name)
"""


class PlantedJob(runner.Job):
    """A job that runs a script."""

    @property
    def argv(self):
        return [sys.executable, *self.command]


@pytest.fixture
def job(tmp_path):
    script = tmp_path / "make.py"
    script.write_text(MAKE)

    def make(name, commit="abcdef1234", complete="yes", seconds=1.0, code=None, gpus=1):
        command = (str(script), name, commit, complete) if code is None else ("-c", code)
        return PlantedJob(name, command, seconds, gpus)

    return make


@pytest.fixture
def planted(monkeypatch, tmp_path):
    monkeypatch.setenv("FP8JAX_COMMIT", "abcdef1234567")
    monkeypatch.setattr(runner, "gpus", lambda: ("NVIDIA H9 80GB", ["0"]))
    folder = tmp_path / "results"

    def run(jobs, *options):
        of = {width: tuple(job for job in jobs if job.gpus == width) for width in runner.JOBS}
        monkeypatch.setattr(runner, "JOBS", of)
        return runner.main(["--results", str(folder), *options])

    return run


def test_files_of_this_commit_are_left_as_they_are(job, planted, capsys, tmp_path):
    assert planted([job("a"), job("b")]) == 0
    assert planted([job("a"), job("b"), job("c")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("of this commit and card already") == 2
    assert "c: done" in printed
    results = tmp_path / "results"
    assert sorted(path.name for path in (results / "h9").iterdir()) == ["a.json", "b.json", "c.json"]
    assert (results / "logs" / "c.log").read_text() == "made c\n"


def test_what_failed_or_has_no_room_is_left_and_told(job, planted, capsys):
    jobs = [
        job("fails", code="import sys; sys.exit('no such kernel')"),
        job("partial", complete="no"),
        job("other", commit="1234567890"),
        job("long", seconds=1000.0),
        job("good"),
    ]
    assert planted(jobs, "--budget", "500") == 1
    printed = capsys.readouterr().out
    assert "left: fails (ended with code 1: no such kernel)" in printed
    assert "left: partial (ran, and left a file that is not complete)" in printed
    assert "left: other (ran, and left a file that is 1234567890: " in printed
    assert "left: long (needs 1000 s, " in printed
    assert "good: done" in printed
    assert "left: good" not in printed


def test_a_job_may_take_twice_its_time_but_no_more_than_the_budget(job, planted, monkeypatch):
    limits = {}
    monkeypatch.setattr(runner, "run", lambda job, folder, log, limit, *_: limits.update({job.name: limit}) or "ended")
    planted([job("short", seconds=5.0), job("long", seconds=300.0), job("last", seconds=400.0)], "--budget", "500")
    assert limits["short"] == 120
    assert 490 < limits["long"] <= 500
    assert 490 < limits["last"] <= 500


# Writes its start, its end and its environment; waits until its fellows run.
SEEN = """import json, os, pathlib, sys, time
there, fellows, folder = pathlib.Path({there!r}), {fellows}, sys.argv[1]
(there / "begin_{name}").touch()
while len(list(there.glob("begin_*"))) < fellows:
    time.sleep(0.01)
told = [os.environ["CUDA_VISIBLE_DEVICES"], sorted(p.name for p in there.iterdir())]
(there / "told_{name}").write_text(json.dumps(told))
path = pathlib.Path(folder, "h9{card}", "{name}.json")
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps(dict(rows=[dict(commit="abcdef1234", device="H9")])))
"""


def test_jobs_of_a_host_with_four_gpus_run_side_by_side(job, planted, monkeypatch, capsys, tmp_path):
    """The multi-GPU job alone and first, then two of two GPUs together, then four of one; each sees its GPUs."""
    monkeypatch.setattr(runner, "gpus", lambda: ("NVIDIA H9 80GB", ["2", "3", "5", "7"]))
    folder = tmp_path / "there"
    folder.mkdir()
    jobs = [
        job(name, gpus=gpus, code=SEEN.format(there=str(folder), name=name, fellows=fellows, card=card))
        for name, gpus, fellows, card in (
            ("n1", 1, 7, ""), ("n2", 1, 7, ""), ("n3", 1, 7, ""), ("n4", 1, 7, ""),
            ("two1", 2, 3, "x2"), ("two2", 2, 3, "x2"), ("four", 4, 1, "x4"), ("eight", 8, 1, "x8"),
        )
    ]  # fmt: skip
    assert planted(jobs) == 0, capsys.readouterr().out
    reported = {path.name[5:]: json.loads(path.read_text()) for path in folder.glob("told_*")}
    assert reported["four"][0] == "2,3,5,7"
    assert reported["four"][1] == ["begin_four"]
    assert {reported[name][0] for name in ("two1", "two2")} == {"2,3", "5,7"}
    assert {reported[f"n{i}"][0] for i in (1, 2, 3, 4)} == {"2", "3", "5", "7"}
    assert set(reported["two1"][1]) <= {"begin_four", "told_four", "begin_two1", "begin_two2", "told_two2"}
    assert "eight" not in reported
    assert planted(jobs) == 0
    assert capsys.readouterr().out.count("of this commit and card already") == 7


TRAINS = """
import json, os, pathlib, sys, time
there, name, fellows = pathlib.Path("{there}"), "{name}", {fellows}
(there / "begin_{name}").touch()
until = time.monotonic() + 20
while len(list(there.glob("begin_*"))) < fellows and time.monotonic() < until:
    time.sleep(0.01)
assert time.monotonic() < until
known = "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION"
(there / "told_{name}").write_text(json.dumps([[os.environ[key] for key in known], sys.argv[1:]]))
folder = pathlib.Path(sys.argv[-1], "parity_x")
folder.mkdir(parents=True, exist_ok=True)
(folder / "{name}.json").write_text("{{}}")
"""


def test_studies_train_on_a_text_two_on_a_gpu(job, planted, monkeypatch, capsys, tmp_path):
    """The job of two GPUs has a different share on each. Two wait for each other, with only one GPU."""
    folder = tmp_path / "there"
    folder.mkdir()

    def studies(*of):
        jobs = [
            job(name, gpus=gpus, code=TRAINS.format(there=str(folder), name=name, fellows=fellows))
            for name, gpus, fellows in of
        ]
        monkeypatch.setattr(runner, "TRAINED", [dataclasses.replace(j, command=(*j.command, "--out")) for j in jobs])

    reported = lambda name: json.loads((folder / f"told_{name}").read_text())  # noqa: E731
    studies(("a", 1, 2), ("b", 1, 2), ("wide", 2, 0))
    planted([])
    actual = planted([job("timed")], "--data", "x.txt", "y.txt")
    assert actual == 0, capsys.readouterr().out
    assert reported("a") == [["0", "0.45"], ["--data", "x.txt", "y.txt", "--out", str(tmp_path / "results")]]
    assert {path.name for path in folder.glob("told*")} == {"told_a", "told_b"}

    monkeypatch.setattr(runner, "gpus", lambda: ("NVIDIA H9 80GB", ["4", "6"]))
    studies(("c", 1, 5), ("wide", 2, 5), ("d", 1, 5), ("e", 1, 0))
    assert planted([], "--data", "x.txt") == 0, capsys.readouterr().out
    assert sorted(reported("wide")[0][0].split(",")) == ["4", "6"]
    assert {reported(name)[0][0] for name in "cd"} == {"4", "6"}
    # Existing runs do not end a study: it finds the missing seeds itself.
    (folder / "told_e").unlink()
    (tmp_path / "results" / "h9").mkdir(exist_ok=True)
    content = json.dumps({"rows": [{"commit": "abcdef1234", "device": "H9"}]})
    (tmp_path / "results" / "h9" / "e.json").write_text(content)
    assert planted([], "--data", "x.txt", "--only", "e") == 0
    assert reported("e")[1][:2] == ["--data", "x.txt"]


def test_a_job_takes_slots_of_different_gpus():
    slots = runner.Slots(["4", "6", "4", "6"])
    assert [slots.take(count) for count in (1, 2, 1)] == [[0], [1, 2], [3]]
    slots.give_back([0, 2])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(slots.take, 2)  # both use one GPU
        slots.give_back([1])
        assert waiting.result(10) == [0, 1]
    assert runner.Slots(["", ""]).take(1) == [0]


def test_a_study_that_fails_is_left(job, planted, monkeypatch, capsys):
    monkeypatch.setattr(runner, "TRAINED", [job("a", code="raise SystemExit(1)"), job("b", gpus=2, code="")])
    assert planted([], "--data", "x") == 1
    printed = capsys.readouterr().out
    assert printed.startswith("1 x NVIDIA H9")
    assert "left: a (ended with code 1" in printed
    for options, why in (
        (("--only", "b", "--data", "x"), "--only b: not with these options and 1 of NVIDIA H9"),
        (("--only", "a"), "--only a: not with these options"),
        (("--only", "c", "--data", "x"), "--only c: not with these options"),
        (("--data", "x", "--dry"), "--data trains on GPUs; omit --dry and --cpu"),
        (("--data", "x", "--cpu"), "--data trains on GPUs; omit --dry and --cpu"),
    ):
        with pytest.raises(SystemExit):
            planted([job("c")], *options)
        assert why in capsys.readouterr().err


def test_studies_are_those_that_pages_are_made_of():
    named = {job.name: job for job in runner.TRAINED}
    assert len(named) == len(runner.TRAINED)
    options = {name: dict(zip(job.command[1::2], job.command[2::2], strict=False)) for name, job in named.items()}
    for study in ("recipes", "intervals"):
        arms = {of["--arms"] for of in options.values() if of.get("--study") == study}
        of = parity.STUDIES[study]
        assert {"bf16", *of.recipes} <= arms <= {"bf16", *of.recipes, *of.other_arms}, study
    assert {job.gpus for job in named.values() if "fp8_lm" in job.command} == {2}


def test_a_job_is_killed_at_the_limit_with_its_children(tmp_path, job):
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    problem = runner.run(job("slow", code=code), tmp_path, tmp_path / "slow.log", 2.0)
    assert problem == "killed after 2 s"
    assert ends((tmp_path / "slow.log").read_text().strip())


def ends(pid):
    """Returns whether a process ends soon. A zombie counts as ended."""
    status = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


# A run whose only job writes its process id and sleeps.
SLEEPER = """import pathlib, sys
from experiments.results import jobs, runner
class Sleeper(jobs.Job):
    argv = [sys.executable, "-c", "import os, pathlib, sys, time; p = pathlib.Path(sys.argv[1], 'pid'); "
            "p.write_text(str(os.getpid())); time.sleep(60)"]
runner.JOBS = {1: (Sleeper("sleeper", (), 1.0),)}
runner.gpus = lambda: ("NVIDIA H9 80GB", ["0"])
runner.main(["--results", sys.argv[1]])
"""


def test_a_run_that_is_ended_takes_its_jobs_with_it(monkeypatch, tmp_path):
    monkeypatch.setenv("FP8JAX_COMMIT", "abcdef1234567")
    before = signal.getsignal(signal.SIGTERM)
    process = subprocess.Popen([sys.executable, "-c", SLEEPER, str(tmp_path)])
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert ends(pid.read_text())
    with runner.ending_together():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(runner, "gpus", lambda: ("", []))
    assert runner.main(["--results", str(tmp_path)]) == 2
    assert "no GPU here" in capsys.readouterr().err
    monkeypatch.setenv("FP8JAX_COMMIT", "main")
    with pytest.raises(SystemExit):
        runner.main(["--results", str(tmp_path)])
    assert "FP8JAX_COMMIT='main' is not a commit hash" in capsys.readouterr().err


def test_it_takes_100_minutes_of_one_gpu():
    assert sum(job.seconds for job in runner.ONE_GPU) <= 100 * 60
    names = [job.name for jobs in (*runner.JOBS.values(), runner.DERIVED) for job in jobs]
    assert len(set(names)) == len(names)
    assert all(job.gpus == width for width, jobs in runner.JOBS.items() for job in jobs)
    assert runner.ONE_GPU[0].name == "step"


def test_the_list_says_what_changed_since(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FP8JAX_COMMIT", "abcdef1234")
    monkeypatch.setattr(record, "since", lambda of: {"111": "commits since: 2 of fp8jax"}.get(of, ""))
    for card, name, commit in (("h9", "step", "abcdef1234"), ("h9x2", "reduce", "111"), ("cpu", "plans", "222")):
        (tmp_path / card).mkdir(exist_ok=True)
        content = {"rows": [{"commit": commit, "device": "2 x d" if card == "h9x2" else "d"}]}
        (tmp_path / card / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "parity").mkdir()
    (tmp_path / "parity" / "step.json").write_text(json.dumps({"runs": {}}))
    assert runner.main(["--results", str(tmp_path), "--list"]) == 0
    printed = capsys.readouterr().out
    one, two, cpu = (printed.index(kind) for kind in ("one GPU:", "two GPUs:", "CPU:"))
    assert (
        one
        < printed.index("step: h9: done")
        < two
        < printed.index("reduce: h9x2: 111: commits since: 2 of fp8jax")
        < cpu
    )
    assert "plans: cpu: 222: no change since" in printed
    assert "gemm: missing" in printed


def history(root, *files):
    """Creates a repository with a commit for each text of each file; returns the hashes."""
    git = lambda *a: subprocess.run(  # noqa: E731
        ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", *a],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    root.mkdir(exist_ok=True)
    git("init", "-q")
    hashes = []
    for path, text in files:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
        git("add", "-A")
        git("commit", "-q", "-m", text)
        hashes.append(git("rev-parse", "HEAD"))
    return hashes


def test_what_changed_since_follows_from_git(tmp_path):
    root = tmp_path / "repository"
    first, second, last = history(root, ("pallas_kernels/a.py", "1"), ("README.md", "2"), ("pallas_kernels/a.py", "3"))
    assert record.since(first[:10], root) == "commits since: 1 of pallas_kernels"
    assert record.since(second, root) == "commits since: 1 of pallas_kernels"
    assert record.since(f"{last}+", root) == ""
    assert record.since("0123456789", root) == "commit 0123456789 is not in this history"
    assert record.since(record.UNKNOWN, root) == "commit unknown"
    (tmp_path / "plain").mkdir()
    assert record.since(first, tmp_path / "plain") == "no history here"
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{root}", str(shallow)], check=True)
    assert record.since(first, shallow) == f"commit {first} is not in this history"


def test_a_commit_is_that_of_the_code_that_runs(tmp_path, monkeypatch):
    monkeypatch.delenv("FP8JAX_COMMIT", raising=False)
    root = tmp_path / "repository"
    *_, first = history(root, ("fp8jax/a.py", "1"), ("experiments/b.py", "1"), ("README.md", "1"))
    assert record._head.__wrapped__(root) == first[:10]
    (root / "README.md").write_text("not measured")
    assert record._head.__wrapped__(root) == first[:10]
    for path in ("fp8jax/a.py", "experiments/b.py"):
        before = (root / path).read_text()
        (root / path).write_text("2")
        assert record._head.__wrapped__(root) == f"{first[:10]}+"
        (root / path).write_text(before)
    (tmp_path / "plain").mkdir()
    assert record._head.__wrapped__(tmp_path / "plain") == record.UNKNOWN
    monkeypatch.setenv("FP8JAX_COMMIT", f"{first}+")
    assert record.commit() == f"{first[:10]}+"


@pytest.mark.parametrize(
    ("device", "card"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("2 x NVIDIA H200", "h200x2"), ("cpu", "cpu"),
     ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA Graphics Device", "graphicsdevice"),
     ("NVIDIA GeForce RTX 4090", "rtx4090")],
)  # fmt: skip
def test_folders_are_named_after_cards(device, card):
    assert record.card(device) == card


def test_rows_of_other_commits_and_cards_keep_them(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8JAX_COMMIT", "0123456789")
    rows = [{"case": "a"}, {"case": "b", "commit": "abc"}, {"case": "c", "device": "other"}, {"case": "d"}]
    path = record.write(tmp_path, "x", title="", command="c", device="cpu", rows=rows, notes=[], date="2026-01-01",
                        versions={"torch": "2"}, complete=False)  # fmt: skip
    content = json.loads(path.read_text())
    assert (content["date"], content["complete"], content["versions"]["torch"]) == ("2026-01-01", False, "2")
    assert record.sources(content) == [("0123456789", "cpu"), ("abc", "cpu"), ("0123456789", "other")]


def test_only_visible_gpus_count(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H9 80GB'\necho 'NVIDIA H9 80GB'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert runner.gpus() == ("NVIDIA H9 80GB", ["0", "1"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert runner.gpus() == ("NVIDIA H9 80GB", ["1"])
    for hidden in ("", "-1", "-1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert runner.gpus() == ("", [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,-1,1")
    assert runner.gpus() == ("NVIDIA H9 80GB", ["0"])


def test_a_name_that_does_not_run_here_is_refused(job, planted, capsys, tmp_path):
    for name in ("four", "paper"):
        with pytest.raises(SystemExit):
            planted([job("one"), job("four", gpus=4), job("paper", gpus=0)], "--only", "one", name)
        assert f"--only {name}: not with these options" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        runner.main(["--results", str(tmp_path / "none"), "--list"])
    assert "there is no such folder" in capsys.readouterr().err


def test_what_differs_from_a_commit_is_measured_again(job, planted, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("FP8JAX_COMMIT", "abcdef1234567+")
    for _ in range(2):
        assert planted([job("a", commit="abcdef1234+")]) == 0
        assert "a: done" in capsys.readouterr().out
    (tmp_path / "empty.json").write_text('{"rows": []}')
    assert runner.state(tmp_path / "empty.json", "abc") == "without rows"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "1", "[" * 100_000, '{"rows": 3}', '{"rows": [{"commit": 3}]}', "{}"]
)
def test_a_file_that_is_damaged_is_told_and_measured_again(job, planted, capsys, tmp_path, content):
    (tmp_path / "h9").mkdir(exist_ok=True)
    (tmp_path / "h9" / "a.json").write_text(content)
    assert runner.state(tmp_path / "h9" / "a.json", "abc") == "damaged"
    with pytest.raises(ValueError, match=r"a\.json: "):
        record.load(tmp_path / "h9" / "a.json")
    assert planted([job("a")]) == 0
    assert "a: done" in capsys.readouterr().out


def test_rows_of_unknown_commits_and_of_local_changes_are_not_shown(tmp_path):
    row = {
        "case": "c",
        "impl": "i",
        "metric": "m",
        "value": 1,
        "unit": "",
        "baseline": None,
        "ratio": None,
        "device": "d",
    }
    commits = ("abcdef1", "unknown", "abcdef1+", "abcdef1, unknown", "abcdef1, bcdef12")
    content = {
        "bench": "b",
        "versions": {},
        "command": "c",
        "date": "d",
        "rows": [row | {"commit": c} for c in commits],
    }
    path = tmp_path / "b.json"
    path.write_text(json.dumps(content))
    actual = record.load(path)
    assert [row["commit"] for row in actual["rows"]] == ["abcdef1", "abcdef1, bcdef12"]
    assert any(note.startswith("3 rows of this file are left out") for note in actual["notes"])
    path.write_text(json.dumps(content | {"rows": content["rows"][:1]}))
    assert record.load(path).get("notes", []) == []
