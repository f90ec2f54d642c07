"""With any content of a checkpoint's metadata files, resuming uses the previous checkpoint and names the moved one."""

import errno
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.errors import DiskError, UserError
from experiments.train import checkpoint
from experiments.train.checkpoint import Checkpoints, DamagedError

STATE = {"w": jnp.arange(32.0).reshape(4, 8)}
META = "_CHECKPOINT_METADATA"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 1, 2 and 3, with the step plus STATE. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpoints(folder, 3) as checkpoints:
        for step in (1, 2, 3):
            state = jax.tree.map(lambda x, step=step: x + step, STATE)
            checkpoints.save(step, state, loader={}, config={}, log=[{"step": step, "loss": 0.5}])
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def resume(folder):
    records = []
    with Checkpoints(folder, 3) as checkpoints:
        state, meta = checkpoints.resume(jax.eval_shape(lambda: STATE), {}, records.append)
        assert checkpoints.latest() == meta["step"]
    np.testing.assert_array_equal(state["w"], STATE["w"] + meta["step"])
    return meta["step"], records


def flipped(path, old):
    raw = bytearray(path.read_bytes())
    raw[raw.index(old)] ^= 1
    return bytes(raw)


def test_a_bit_that_changes_anywhere_in_the_metadata_is_found(folder):
    """A flipped bit in every byte of field names, and in every twelfth byte elsewhere: an error, or the saved state."""
    path = folder / "3" / META
    whole = path.read_bytes()
    for step in "12":
        shutil.rmtree(folder / step)
    with Checkpoints(folder, 3) as checkpoints:
        meta = checkpoints.read_meta(3)
    results = []
    names = [f'"{name}"'.encode() for name in json.loads(whole)]
    places = {*range(0, len(whole), 12)}.union(*(range(at := whole.index(name), at + len(name)) for name in names))
    for at in sorted(places):
        raw = bytearray(whole)
        raw[at] ^= 1 << at % 7
        path.write_bytes(raw)
        with Checkpoints(folder, 3) as checkpoints:
            assert checkpoints.latest() == 3
            try:
                assert checkpoints.read_meta(3) == meta
            except DamagedError as error:
                results.append(str(error))
    assert len(results) > len(places) / 2
    assert all(x.startswith(f"checkpoint {folder / '3'} is damaged: its metadata ") for x in results)
    assert not any("\n" in x for x in results)


WRONG = {
    "key": lambda path: flipped(path, b"performance_metrics"),
    "list": b"[]",
    "number": b"1",
    "null": b"null",
    "deep": b"[" * 100_000,
    "deep within": b'{"custom_metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
    "digits": b'{"commit_timestamp_nsecs": ' + b"9" * 5000 + b"}",
    "late": b'{"commit_timestamp_nsecs": ' + b"9" * 300 + b"}",
    "text": b'{"commit_timestamp_nsecs": "now"}',
    "empty": b"",
    "bytes": b"\xff\xfe",
}


@pytest.mark.parametrize("name", WRONG)
def test_metadata_of_the_newest_that_cannot_be_is_moved_and_the_one_before_taken(folder, name):
    path = folder / "3" / META
    path.write_bytes(WRONG[name](path) if callable(WRONG[name]) else WRONG[name])
    step, (line,) = resume(folder)
    assert step == 2
    assert line.startswith(f"checkpoint {folder / '3'} is damaged: its metadata ")
    assert line.endswith(f"; moved to {folder.with_name('damaged-3')}")
    assert resume(folder) == (2, [])
    with Checkpoints(folder, 3) as checkpoints:
        checkpoints.save(3, STATE, loader={}, config={})
    assert sorted(x.name for x in folder.iterdir()) == ["1", "2", "3"]


@pytest.mark.parametrize("file", [META, "state/_METADATA", "state/manifest.ocdbt"])
def test_a_pipe_in_place_of_a_file_is_moved_and_read_by_nobody(folder, file):
    (folder / "3" / file).unlink()
    os.mkfifo(folder / "3" / file)
    step, (line,) = resume(folder)
    assert step == 2
    assert f"{folder / '3' / file} is no regular file; moved to" in line


@pytest.mark.parametrize("content", [b"", b"[]", b"1", b"{}", b"[" * 100_000, b'{"tree_metadata": 1}'])
def test_metadata_of_arrays_that_cannot_be_is_damage(folder, content):
    (folder / "3" / "state" / "_METADATA").write_bytes(content)
    step, (line,) = resume(folder)
    assert (step, line.startswith(f"checkpoint {folder / '3'} is damaged: ")) == (2, True)


def test_a_damaged_one_that_cannot_be_moved_is_named(folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    (folder / "3" / META).write_bytes(b"[]")
    monkeypatch.setattr(checkpoint.os, "rename", refuse)
    with pytest.raises(DiskError, match=r"3 is damaged, and cannot be moved to .*damaged-3 \(Read-only file system\)"):
        resume(folder)


def test_an_older_one_that_orbax_cannot_read_is_moved_too(folder):
    (folder / "1" / META).write_bytes(b"[]")
    (folder / "2" / META).unlink()
    os.mkfifo(folder / "2" / META)
    step, lines = resume(folder)
    assert (step, len(lines)) == (3, 2)
    assert resume(folder) == (3, [])
    assert [x.name for x in folder.iterdir()] == ["3"]


def test_where_none_is_whole_all_stay_and_a_reader_moves_nothing(folder):
    for step in (1, 2, 3):
        (folder / str(step) / META).write_bytes(b"[]")
    with (
        Checkpoints(folder, 3) as checkpoints,
        pytest.raises(UserError, match=r"checkpoints/3 is damaged: its metadata .*, and no older one is intact"),
    ):
        checkpoints.resume(STATE, {}, pytest.fail)
    with Checkpoints(folder, 3, clean=False) as checkpoints:
        assert checkpoints.latest() == 3
        with pytest.raises(DamagedError, match=r"checkpoints/3 is damaged: its metadata cannot be read"):
            checkpoints.read_meta(3)
        with pytest.raises(DamagedError, match=r"checkpoints/\d is damaged: its metadata cannot be read"):
            checkpoints.save(4, STATE, loader={}, config={})
    assert sorted(x.name for x in folder.iterdir()) == ["1", "2", "3"]
