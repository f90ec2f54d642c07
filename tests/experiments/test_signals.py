"""A signal in the first seconds of the training program ends it with a line, and no other process waits for it."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import packages, signals, startup
from experiments.errors import DiskError
from experiments.signals import Stopped, StopSignals
from experiments.train import checkpoint, cli, hosts, lock
from experiments.train.config import Run
from tests.experiments.test_hosts import port
from tests.rows import slow

ROOT = Path(__file__).parents[2]


def start(*argv):
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "experiments.train", *argv]
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=-1, stderr=-1, text=True)


@pytest.mark.parametrize("signum", [signal.SIGTERM, slow(signal.SIGINT)])
def test_a_signal_while_modules_are_imported_ends_with_a_line(tmp_path, signum):
    process = start("--run", "a b", "--out", str(tmp_path))
    # Python has started, and imports take seconds from here on.
    time.sleep(0.5)
    process.send_signal(signum)
    output, complaint = process.communicate(timeout=60)
    name = signal.Signals(signum).name
    assert (process.returncode, output) == (128 + signum, "")
    again = f"python -m experiments.train --run 'a b' --out {tmp_path}"
    assert complaint == f"stopped by {name}: no step was lost. To resume: {again}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, slow(1)])
def test_a_process_that_is_told_to_end_before_it_has_joined_keeps_no_other_waiting(argv, which):
    where = ["--coordinator", f"localhost:{port()}", "--process-count", "2", "--mesh", "fsdp=2", "--run", "early"]
    processes = [start(*argv, *where, "--process-id", str(i)) for i in range(2)]
    time.sleep(0.5)
    processes[which].send_signal(signal.SIGTERM)
    begin = time.monotonic()
    complaints = [process.communicate(timeout=110)[1] for process in processes]
    # Much less than --patience, which is 120 s.
    assert time.monotonic() - begin < 80
    assert [process.returncode for process in processes] == [143 if i == which else 5 for i in range(2)], complaints
    assert re.search(
        rf"process {which} of 2 ends when the others have joined it, or .*; a second signal ends it now\n"
        "stopped by SIGTERM: no step was lost. To resume: python -m experiments.train ",
        complaints[which],
    )
    assert "another one has ended, or cannot be reached" in complaints[1 - which]


def test_the_first_signal_is_a_flag_and_is_heard_of_once(monkeypatch, capfd):
    default = signal.getsignal(signal.SIGTERM)
    with StopSignals() as stop:
        stop.notice = "heard"
        stop.check()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signum == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        with pytest.raises(Stopped):
            stop.check()
    assert capfd.readouterr().err == "heard\n"
    assert signal.getsignal(signal.SIGTERM) == default
    with StopSignals("python -m x --resume never") as stop:
        ended = []
        monkeypatch.setattr(signals.os, "_exit", ended.append)
        os.kill(os.getpid(), signal.SIGINT)
        # Code that replaces the signal handler in the meantime loses it again.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop.renew()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert ended == [130]
    assert capfd.readouterr().err == "stopped by SIGINT: no step was lost. To resume: python -m x\n"
    assert signal.getsignal(signal.SIGTERM) == default


def test_handlers_of_before_are_there_again_afterwards():
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    for signum in (None, signal.SIGINT):
        with StopSignals() as stop:
            assert signal.getsignal(signal.SIGTERM) not in before
            if signum is not None:
                signal.raise_signal(signum)
            assert stop.signum == signum
        assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_that_came_before_training_began_stops_it_before_any_file_is_made(argv, out, monkeypatch, capsys):
    early = StopSignals()
    early.signum = signal.SIGTERM
    monkeypatch.setattr(signals, "started", early)
    assert cli.main([*argv, "--run", "early"]) == 143
    assert capsys.readouterr().err.startswith("stopped by SIGTERM: no step was lost. To resume: python -m experiments")
    assert not (out / "early").exists()


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["python", "-m", "experiments.train", "--run", "m"], ("experiments.train", ["--run", "m"])),
        (["python", "-um", "experiments.plan"], ("experiments.plan", [])),
        (["python", "-X", "importtime", "-mexperiments.hub", "-m"], ("experiments.hub", ["-m"])),
        (["python", "-m"], ("", [])),
        (["python", "script.py"], ("", [])),
    ],
)
def test_the_program_is_read_from_the_command_line_of_python(words, program):
    assert startup._program(words) == program


def test_a_run_of_one_process_joins_nobody():
    stop = StopSignals()
    hosts.join(Run(), stop)
    assert (stop.signum, stop.notice) == (None, "")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_named_with_what_to_do(argv, out, tmp_path, monkeypatch, capsys, number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(lock.filelock.FileLock, "acquire", refuse)
        with pytest.raises(DiskError, match=f"{tmp_path} cannot be written .*; make it writable, or use another --out"):
            lock.hold(tmp_path / "run").__enter__()
        assert cli.main([*argv, "--run", "readonly"]) == 3
        error = f"error: {out} cannot be written ({os.strerror(number)}); make it writable, or use another --out\n"
        assert capsys.readouterr().err == error
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        (out / "readonly").mkdir(exist_ok=True)
        assert cli.main([*argv, "--run", "readonly", "--resume", "never"]) == 3
        message = f"readonly cannot be moved to {out / 'readonly.old1'} ({os.strerror(number)}); make {out} writable"
        assert message in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.ocp.training, "Checkpointer", refuse)
        with pytest.raises(DiskError, match=rf"{tmp_path}/new cannot be created or read \(.*\); make it writable"):
            checkpoint.Checkpoints(tmp_path / "new", 1)
    code, message = cli._explain(OSError(number, os.strerror(number), "a/b"), "")
    assert (code, message.count("\n")) == (3, 0)
    assert message.endswith("'a/b'. Make it writable, or use another --out")


def test_a_package_that_is_missing_at_last_is_a_line():
    error = ModuleNotFoundError("No module named 'wandb'", name="wandb")
    assert cli._explain(error, "") == (2, f"error: {packages.explain(error, 'experiments.train')}")
    assert cli._explain(ModuleNotFoundError("x", name="experiments.x"), "") is None
