"""A full disk, truncated and missing files, and a second process lead to a message and an exit code,
or change nothing."""

import asyncio
import dataclasses
import errno
import gc
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import jax
import pytest
from orbax.checkpoint import v1 as ocp

from experiments import files
from experiments.errors import BusyError, DiskError, UserError
from experiments.train import checkpoint, cli, folders, lock, report, trained
from experiments.train.result import Result, read_result
from experiments.train.task import Task
from tests.rows import slow

ROOT = Path(__file__).parents[2]
BF16 = ("--recipe", "bf16")


@pytest.fixture
def copy(finished, out, request):
    """Returns a copy of the finished run, and its name."""
    folder = out / re.sub(r"\W", "_", request.node.name)
    shutil.copytree(finished, folder)
    return folder


def content(folder):
    result = json.loads((folder / "bf16" / "result.json").read_text())
    return result, (folder / "bf16" / "metrics.jsonl").read_text()


DEEP = "[" * 200_000


@pytest.mark.parametrize(
    "torn", ['{"result": {"recipe": "bf1', slow('{"config": {}, "result": {"recipe": "bf16"}}'), slow("NaN")]
)
def test_torn_result_is_told_and_made_again(argv, finished, copy, capsys, torn):
    path = copy / "bf16" / "result.json"
    path.write_text(re.sub('("valid_loss": ).*,', r"\1NaN,", path.read_text()) if torn == "NaN" else torn)
    assert cli.main([*argv, *BF16, "--run", copy.name]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"bf16/result\.json is damaged \(.*\); it is recreated from the newest checkpoint, if any", shown)
    assert "step 8/8" not in shown
    assert content(copy) == content(finished)


WRONG = {
    "train_loss": math.inf, "valid_loss": math.nan, "tokens_per_s": "5", "steps": 8.0, "parameters": -1, "recipe": 3,
    "text": None, "state_bytes": {"mu": 3},
}  # fmt: skip


def test_a_result_with_a_field_that_cannot_be_is_damaged(finished, tmp_path):
    text, path = (finished / "bf16" / "result.json").read_text(), tmp_path / "result.json"
    path.write_text(text)
    result, config = read_result(path)
    assert (dataclasses.asdict(result), config) == (json.loads(text)["result"], json.loads(text)["config"])
    assert set(WRONG) == {field.name for field in dataclasses.fields(Result)}
    for name, value in (*WRONG.items(), ("steps", True)):
        whole = json.loads(text)
        whole["result"][name] = value
        path.write_text(json.dumps(whole))
        with pytest.raises(ValueError, match="nu is None" if name == "state_bytes" else f"{name} is "):
            read_result(path)
    whole = json.loads(text)
    whole["result"]["state_bytes"]["other"] = 0
    path.write_text(json.dumps(whole))
    assert read_result(path)[0].state_bytes["other"] == 0
    for other in ("[]", '{"result": {}}', DEEP):
        path.write_text(other)
        with pytest.raises(ValueError):  # noqa: PT011 (what is wrong is different each time)
            read_result(path)


def test_json_that_is_nested_too_deep_is_damaged_wherever_it_is_read(argv, finished, tmp_path, capsys):
    (tmp_path / "config.json").write_text(DEEP)
    with pytest.raises(UserError, match=r"config\.json cannot be read \(nested too deep\); restart the run"):
        folders.read_config(tmp_path)
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        trained.read_config(tmp_path)
    assert report.read_metrics(tmp_path / "config.json") == []
    assert lock._read_owner(tmp_path / "config.json") == "another process"


def test_nothing_is_written_to_what_a_link_leads_to(tmp_path, monkeypatch):
    """In a folder that others can write to, a link may point to any file of this user."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("config.partial", "config.json", "log.txt"):
        (tmp_path / name).symlink_to(precious)
    files.write_text(tmp_path / "config.json", "new")
    assert (tmp_path / "config.json").read_text() == "new"
    assert not (tmp_path / "config.json").is_symlink()
    # The other user creates the link again after it was removed.
    (tmp_path / "config.partial").symlink_to(precious)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(DiskError, match=r"cannot be written \(File exists\)"):
            files.write_text(tmp_path / "config.json", "newer")
    with pytest.raises(DiskError, match=r"log\.txt cannot be written \(Too many levels of symbolic links\)"):
        report.Details(report.make_console()).keep(tmp_path / "log.txt")
    assert precious.read_text() == "mine"


def test_a_file_is_whole_on_disk_before_it_replaces_the_old_one(tmp_path, monkeypatch):
    path, events = tmp_path / "result.json", []
    path.write_text("old")
    (tmp_path / "result.partial").write_text("remains of a kill")
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(os.fstat(descriptor).st_size))
    monkeypatch.setattr(os, "replace", lambda *args: events.append(path.read_text()) or replace(*args))
    files.write_text(path, "new text")
    assert events == [len("new text"), "old"]
    assert {x.name: x.read_text() for x in tmp_path.iterdir()} == {"result.json": "new text"}

    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DiskError, match=r"result\.json cannot be written \(No space left on device\)"):
        files.write_text(path, "newer text")
    assert path.read_text() == "new text"


@pytest.mark.parametrize("kind", ["file", "link to a folder", "link to nothing"])
def test_what_is_no_folder_where_orbax_writes_is_named(tmp_path, kind):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("")

    def put(path):
        path.parent.mkdir(exist_ok=True)
        if kind == "file":
            path.write_text("")
        else:
            path.symlink_to(tmp_path / ("elsewhere" if kind == "link to a folder" else "nowhere"))

    put(tmp_path / "run" / "7.orbax-checkpoint-tmp")
    with pytest.raises(UserError, match=r"7\.orbax-checkpoint-tmp is not a folder, .*; move it away"):
        checkpoint.Checkpoints(tmp_path / "run", 1)
    assert (tmp_path / "elsewhere" / "precious").exists()
    put(tmp_path / "checkpoints")
    if kind == "link to a folder":
        checkpoint.Checkpoints(tmp_path / "checkpoints", 1).close()
        return
    with pytest.raises(UserError, match=f"is a {kind}, but the checkpoint folder must be there; move it away"):
        checkpoint.Checkpoints(tmp_path / "checkpoints", 1)


@pytest.mark.usefixtures("young_heap")
def test_what_orbax_leaves_of_an_error_is_not_shown(monkeypatch, caplog):
    """After a failed read, other reads have tasks that nobody awaits, and callbacks to a closed loop."""
    calls = []
    logging.getLogger("asyncio").setLevel(logging.NOTSET)
    monkeypatch.setattr(sys, "unraisablehook", lambda x: calls.append(str(x.exc_value)))
    checkpoint.quiet()
    checkpoint.quiet()
    loop = asyncio.new_event_loop()
    loop.create_future().set_exception(ValueError("nobody looks at it"))
    loop.close()
    gc.collect()
    assert not caplog.records
    for text in ("Event loop is closed", "of the user"):
        sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(text)))
    assert calls == ["of the user"]


def test_deleted_metrics_change_no_result(argv, finished, copy, capsys):
    (copy / "bf16" / "metrics.jsonl").unlink()
    (copy / "bf16" / "result.json").unlink()
    assert cli.main([*argv, *BF16, "--run", copy.name]) == 0
    assert content(copy)[0] == content(finished)[0]
    assert "lacks" not in capsys.readouterr().out  # The checkpoint has the last 50 steps, these are 8.


def test_steps_that_metrics_lack_are_told_where_a_result_is_used_as_it_is(argv, copy, capsys):
    lines = (copy / "bf16" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "bf16" / "metrics.jsonl").write_text("".join([*lines[:2], '{"step": 3, "lo\n', "\x00\n", *lines[5:8]]))
    (copy / "coat_optimizer" / "metrics.jsonl").unlink()
    assert cli.main([*argv, "--run", copy.name]) == 0
    shown = capsys.readouterr().out
    assert "bf16/metrics.jsonl lacks steps 3 to 4, 8: loss.png has a gap there" in shown
    assert "coat_optimizer/metrics.jsonl lacks steps 1 to 8: loss.png" in shown
    assert shown.count("its result is used as it is") == 2


def row(step, **fields):
    return {"step": step, "loss": 10.0 * step, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 5.0, **fields}


def test_metrics_are_put_right_from_the_checkpoint(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    rows = [row(1), row(2), row(4), {"step": 4, "valid_loss": 2.0}, row(6, loss=-1.0), row(9)]
    lines = [json.dumps(r).encode() for r in rows]
    torn = [b"\xff\xfe", b"{", b"[]", b'{"step": 3}', b'{"loss": 1.0}', b'{"step": "3", "valid_loss": 1.0}', b"null"]
    path.write_bytes(b"\n".join([*lines, *torn, b'{"step": 7, "lo']))
    recent = [row(5), row(6), row(7)]
    console = report.make_console()
    with report.RunLog(tmp_path, console, recipe="r", resumed=7, recent=recent, steps=9, every=5) as log:
        assert f"{path} lacks steps 3: loss.png has a gap there" in capsys.readouterr().out.replace("\n", "")
        assert log.recent(7) == [row(1), row(2), row(4), *recent]
        assert log.has_valid(4)
        assert not log.has_valid(7)
    assert report.read_metrics(path) == [row(1), row(2), row(4), {"step": 4, "valid_loss": 2.0}, *recent]


def test_a_checkpoint_holds_the_newest_rows_alone(tmp_path):
    with report.RunLog(tmp_path, report.make_console(), recipe="r", resumed=0, steps=99, every=200) as log:
        for step in range(1, 71):
            log.step(**{k: v for k, v in row(step).items()})
        assert [r["step"] for r in log.recent(69)] == list(range(20, 70))


@pytest.mark.parametrize(
    ("steps", "last", "actual"),
    [((), 0, ""), ((), 3, "1 to 3"), ((1, 2, 3), 3, ""), ((2, 9), 5, "1, 3 to 5"), ((1, 3, 4), 6, "2, 5 to 6")],
)
def test_missing_steps_are_ranges(steps, last, actual):
    assert report.missing(steps, last) == actual


def test_files_where_folders_should_be(argv, copy, capsys):
    shutil.rmtree(copy / "bf16")
    (copy / "bf16").mkdir()
    (copy / "bf16" / "checkpoints").write_text("")
    assert cli.main([*argv, *BF16, "--run", copy.name]) == 2
    assert capsys.readouterr().err == (
        f"error: {copy}/bf16/checkpoints is a file, but the checkpoint folder must be there; move it away\n"
    )
    shutil.rmtree(copy)
    copy.write_text("")
    assert cli.main([*argv, *BF16, "--run", copy.name]) == 2
    assert f"--run {copy.name}: cannot create {copy}: File exists" in capsys.readouterr().err


def test_a_full_disk_is_one_line_and_nothing_is_lost(argv, finished, copy, capsys, monkeypatch):
    shutil.rmtree(copy / "bf16" / "checkpoints" / "8")
    (copy / "bf16" / "result.json").unlink()
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*_, **__):
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(ocp.training.Checkpointer, "save_checkpointables_async", fail)
        assert cli.main([*argv, *BF16, "--run", copy.name]) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "bf16/checkpoints (No space left on device; " in error
    assert "the newest is of step 4. Fix this and run the same command again" in error
    assert not (copy / "bf16" / "result.json").exists()

    with monkeypatch.context() as patch:
        patch.setattr(report.os, "fsync", fail)
        assert cli.main([*argv, *BF16, "--run", copy.name]) == 3
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: \S*\.owner cannot be written \(No space left on device\)\. Fix .*\n", error)

    assert cli.main([*argv, *BF16, "--run", copy.name]) == 0
    assert "resuming from step 4" in capsys.readouterr().out
    again, first = (content(folder)[0]["result"] for folder in (copy, finished))
    assert {**again, "tokens_per_s": 0} == {**first, "tokens_per_s": 0}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_logs_on_a_full_disk_name_their_file(tmp_path):
    for name in ("metrics.jsonl", "tensorboard"):
        folder = tmp_path / name
        folder.mkdir()
        log = report.RunLog(folder, report.make_console(), recipe="r", resumed=0, steps=9, every=1)
        if name == "tensorboard":
            log._board._py_recordio_writer._writer = Path("/dev/full").open("wb")  # noqa: SIM115
        else:
            log._file.close()
            log._file = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115
        with pytest.raises(DiskError, match=rf"{name}/{name} cannot be written \(No space left on device\)"):
            log.step(1, 1.0, grad_norm=1.0, lr=0.1, tokens_per_s=1.0)
        with pytest.raises(DiskError, match="No space left"):
            log.__exit__(None, None, None)
    # tensorboardX's own writer waits in a thread.
    assert not [thread for thread in threading.enumerate() if "EventLogger" in type(thread).__name__]


def test_tensorboard_holds_what_was_logged(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    with report.RunLog(tmp_path, report.make_console(), recipe="r", resumed=3, steps=9, every=5) as log:
        log.step(4, 1.5, grad_norm=2.5, lr=0.25, tokens_per_s=8.0)
        log.valid(4, 0.5)
    (path,) = (tmp_path / "tensorboard").iterdir()
    raw, events = path.read_bytes(), []
    while raw:  # each record: length (8 bytes), its checksum (4), the event, its checksum (4)
        size = int.from_bytes(raw[:8], "little")
        events.append(Event.FromString(raw[12 : 12 + size]))
        raw = raw[16 + size :]
    assert [(e.step, e.session_log.status) for e in events if e.HasField("session_log")] == [(4, 1)]
    values = {v.tag: (e.step, v.simple_value) for e in events for v in e.summary.value}
    numbers = {"loss": 1.5, "grad_norm": 2.5, "lr": 0.25, "tokens_per_s": 8.0, "valid_loss": 0.5}
    assert values == {name: (4, value) for name, value in numbers.items()}


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 9 GB"),
            3,
            r"memory is too small \(RES.*--batch",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "somewhere"), 3, "Permission denied: 'somewhere'"),
        (jax.errors.JaxRuntimeError("INTERNAL: a bug"), None, ""),
    ],
)
def test_what_the_machine_lacks_is_one_line(argv, monkeypatch, capsys, error, code, message):
    def fail(self):
        raise error

    monkeypatch.setattr(Task, "init", fail)
    command = [*argv, *BF16, "--run", "lacking"]
    if code is None:
        with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
            cli.main(command)
        return
    assert cli.main(command) == code
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert re.search(message, shown), shown


def test_the_plan_is_shown_before_the_state_is_made(argv, out, monkeypatch):
    calls = []

    def note(state, *rest, show=report.memory_table):
        calls.append((state["parameters"], sum(x.nbytes for x in jax.live_arrays()) - before))
        return show(state, *rest)

    monkeypatch.setattr(report, "memory_table", note)
    before = sum(x.nbytes for x in jax.live_arrays())
    assert cli.main([*argv, *BF16, "--run", "planned", "--sample-tokens", "0"]) == 0
    ((size, live_bytes),) = calls
    assert size > 100_000
    assert live_bytes < size / 2


def test_a_second_process_is_kept_out_and_told_who_is_in(argv, copy, capsys):
    with lock.hold(copy):
        for flags in ([], ["--resume", "never"]):
            assert cli.main([*argv, "--run", copy.name, *flags]) == 4
            error = capsys.readouterr().err
            assert error.count("\n") == 1
            assert re.search(rf"error: {copy} is being trained by process {os.getpid()} on \S+ \(since .*--run", error)
    assert copy.exists()
    assert not copy.with_name(f"{copy.name}.old1").exists()
    assert cli.main([*argv, "--run", copy.name]) == 0
    (copy.with_name(f".{copy.name}.owner")).write_text("torn")
    with lock.hold(copy):
        pass


def test_a_killed_process_blocks_nobody(tmp_path):
    folder = tmp_path / "run"
    code = (
        "import sys, time, pathlib; from experiments.train import lock\n"
        "with lock.hold(pathlib.Path(sys.argv[1])): print('in', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout.readline() == "in\n"
    with pytest.raises(BusyError, match=f"process {process.pid} on"), lock.hold(folder):
        pass
    process.kill()
    assert process.wait() == -signal.SIGKILL
    with lock.hold(folder):
        assert json.loads((tmp_path / ".run.owner").read_text())["pid"] == os.getpid()
    assert not (tmp_path / ".run.owner").exists()
