"""Checkpoints are restored bit for bit, or not at all."""

import json
import re
import shutil
import tempfile
import threading
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from experiments.errors import DiskError, UserError
from experiments.mesh import flatten
from experiments.train import checkpoint
from experiments.train.checkpoint import Checkpoints, DamagedError, checksums, digest, digest_of


class State(NamedTuple):
    step: jax.Array
    params: dict
    empty: jax.Array


def make(seed=0):
    key = jax.random.key(seed)
    params = {
        "w": jax.random.normal(key, (40, 30)),
        "codes": jax.random.normal(key, (16, 8)).astype(jnp.float8_e4m3fn),
        "half": jax.random.normal(key, (5,), jnp.bfloat16),
        "on": jnp.array(True),
    }
    return State(jnp.int32(seed), params, jnp.zeros((0, 3), jnp.bfloat16))


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def save(folder, *seeds, keep=2):
    with Checkpoints(folder, keep) as checkpoints:
        for seed in seeds:
            rows = [{"step": seed, "loss": 0.1}]
            checkpoints.save(seed, make(seed), loader={"next_index": seed}, config={"lr": 0.1}, log=rows)


def test_round_trip_keeps_every_bit_and_the_metadata(tmp_path):
    save(tmp_path, 3)
    with Checkpoints(tmp_path, 2) as checkpoints:
        assert checkpoints.latest() == 3
        state, meta = checkpoints.restore(3, jax.eval_shape(make))
    assert_same(state, make(3))
    assert (meta["step"], meta["loader"], meta["config"]) == (3, {"next_index": 3}, {"lr": 0.1})


def test_of_a_checkpoint_with_a_key_nothing_can_be_forged(tmp_path, monkeypatch):
    """A loader's state is changed, with or without a new digest, by an attacker with access to the folder."""
    monkeypatch.setenv(checkpoint.KEY, "secret")
    folder, warnings = tmp_path / "checkpoints", []
    save(folder, 2, 3)

    def resume():
        with Checkpoints(folder, 2) as checkpoints:
            _, meta = checkpoints.resume(jax.eval_shape(make), {"lr": 0.1}, warnings.append)
        return meta["step"]

    assert resume() == 3
    for key, message in (
        ("", "3 is signed: set FP8JAX_CHECKPOINT_KEY to its key"),
        (
            "other",
            "3 was changed, or signed with another key than that in FP8JAX_CHECKPOINT_KEY, and no older one is intact. "
            "Set FP8JAX_CHECKPOINT_KEY to the key of this run, or restart the run with --resume never",
        ),
    ):
        monkeypatch.setenv(checkpoint.KEY, key)
        with pytest.raises(UserError, match=message):
            resume()
    path = folder / "3" / "_CHECKPOINT_METADATA"
    content = json.loads(path.read_text())
    seal = content["custom_metadata"].pop("seal")
    meta = content["custom_metadata"] | {"loader": {"next_index": 7}}
    for key in (None, "other", ""):  # None keeps the seal
        monkeypatch.setenv(checkpoint.KEY, key or "")
        forged = {"seal": seal if key is None else checkpoint._seal(meta), **meta}
        path.write_text(json.dumps(content | {"custom_metadata": forged}))
        monkeypatch.setenv(checkpoint.KEY, "secret")
        if key == "":
            with pytest.raises(UserError, match="3 is not signed: unset FP8JAX_CHECKPOINT_KEY, or move it away"):
                resume()
            path.parent.rename(tmp_path / "away")
        assert resume() == 2
        if key != "":
            assert warnings.pop() == (
                f"checkpoint {folder / '3'} was changed, or signed with another key than that in "
                f"FP8JAX_CHECKPOINT_KEY; moved to {tmp_path / 'damaged-3'}"
            )
            (tmp_path / "damaged-3").rename(folder / "3")
    assert warnings == []
    monkeypatch.setattr(checkpoint.hosts, "several", lambda: True)
    with pytest.raises(UserError, match="FP8JAX_CHECKPOINT_KEY can sign only checkpoints of one process"):
        Checkpoints(folder, 2)


def test_sums_tell_of_values_places_and_shapes():
    x = jnp.arange(6.0).reshape(2, 3)
    # Elements (0, 1) and (1, 0) have the same sum of indices.
    swapped = x.at[0, 1].set(x[1, 0]).at[1, 0].set(x[0, 1])
    sums = [checksums({"x": y})["x"] for y in (x, x[::-1], x[:, ::-1], x.at[1, 2].add(1), swapped)]
    assert len(set(sums)) == 5
    assert all(len(each) == 16 and each[:8] != each[8:] for each in sums)
    assert digest_of({"x": x}) != digest_of({"x": x.reshape(3, 2)})


def test_newest_n_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
    with Checkpoints(tmp_path / "none", 2) as checkpoints:
        assert checkpoints.latest() is None


def test_saves_leave_no_threads(tmp_path):
    """Otherwise a run with many checkpoints would exceed the system's limit of open files."""
    before = threading.active_count()
    save(tmp_path, *range(1, 7))
    assert threading.active_count() < before + 6


def test_saved_state_may_be_donated_at_once(tmp_path):
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: jnp.ones_like(x), s), donate_argnums=0)
    with Checkpoints(tmp_path, 1) as checkpoints:
        state = make(1)
        checkpoints.save(1, state, loader={}, config={})
        jax.block_until_ready(overwrite(state))
    with Checkpoints(tmp_path, 1) as checkpoints:
        assert_same(checkpoints.restore(1, jax.eval_shape(make))[0], make(1))


def test_saved_state_may_be_overwritten_at_once(tmp_path, monkeypatch):
    saved_states = []
    with Checkpoints(tmp_path, 1) as checkpoints:
        monkeypatch.setattr(
            checkpoints._orbax, "save_checkpointables_async", lambda _, x, **__: saved_states.append(x["state"])
        )
        state = {"w": np.arange(4.0)}
        checkpoints.save(1, state, loader={}, config={})
        state["w"][:] = -1
    np.testing.assert_array_equal(saved_states[0]["w"], np.arange(4.0))


def test_a_flipped_byte_in_any_file_is_found(tmp_path):
    save(tmp_path / "good", 3)
    files = [p.relative_to(tmp_path / "good") for p in sorted((tmp_path / "good" / "3").rglob("*")) if p.is_file()]
    messages = []
    for file in files:
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        raw = bytearray((tmp_path / "bad" / file).read_bytes())
        raw[len(raw) // 2] ^= 0x10
        (tmp_path / "bad" / file).write_bytes(raw)
        with Checkpoints(tmp_path / "bad", 2) as checkpoints:
            try:
                state, meta = checkpoints.restore(3, jax.eval_shape(make))
            except UserError as error:
                messages.append(str(error))
            else:
                # A file without content (a marker, a copy) may be damaged without harm.
                assert_same(state, make(3))
                assert meta["loader"] == {"next_index": 3}
        shutil.rmtree(tmp_path / "bad")
    assert len(messages) >= 3
    assert all("damaged" in message and "\n" not in message for message in messages), messages


def test_a_byte_changed_where_orbax_does_not_look_is_found_by_the_digest(tmp_path, monkeypatch):
    save(tmp_path, 3)
    with Checkpoints(tmp_path, 2) as checkpoints:
        load = checkpoints._orbax.load_checkpointables

        def flipped(step, abstract):
            loaded = load(step, abstract)
            raw = np.array(loaded["state"]["params.codes"])
            raw.view(np.uint8)[3, 3] ^= 1
            loaded["state"]["params.codes"] = jnp.asarray(raw)
            return loaded

        monkeypatch.setattr(checkpoints._orbax, "load_checkpointables", flipped)
        with pytest.raises(UserError, match=r"damaged: the bytes of params\.codes do not match their digest"):
            checkpoints.restore(3, jax.eval_shape(make))


@pytest.mark.parametrize("field", ["step", "loader", "config", "log", "leaves"])
def test_metadata_that_was_changed_breaks_its_seal(tmp_path, field):
    save(tmp_path, 3)
    path = tmp_path / "3" / "_CHECKPOINT_METADATA"
    content = json.loads(path.read_text())
    meta = content["custom_metadata"]
    with Checkpoints(tmp_path, 2) as checkpoints:
        assert checkpoints.read_meta(3)["log"] == [{"step": 3, "loss": 0.1}]
    changed = {
        "step": 4,
        "loader": {"next_index": 4},
        "config": {"lr": 0.2},
        "log": [{"step": 3, "loss": 0.2}],
        "leaves": meta["leaves"] | {"step": meta["leaves"]["step"] | {"sha256": "0"}},
    }
    assert set(changed) | {"seal"} == set(meta)
    meta[field] = changed[field]
    path.write_text(json.dumps(content))
    with (
        Checkpoints(tmp_path, 2) as checkpoints,
        pytest.raises(DamagedError, match="damaged: its metadata does not match its own digest"),
    ):
        checkpoints.restore(3, jax.eval_shape(make))


def damage(checkpoint):
    largest = max((p for p in checkpoint.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    raw = bytearray(largest.read_bytes())
    raw[len(raw) // 2] ^= 1
    largest.write_bytes(raw)


def test_resuming_steps_back_to_the_newest_that_is_whole(tmp_path):
    folder = tmp_path / "checkpoints"
    save(folder, 1, 2, 3, 4, keep=4)
    damage(folder / "3")
    (folder / "4" / "_CHECKPOINT_METADATA").write_text("{")
    (tmp_path / "damaged-4").mkdir()
    (tmp_path / "damaged-4.2").mkdir()
    records = []
    with Checkpoints(folder, 4) as checkpoints:
        state, meta = checkpoints.resume(jax.eval_shape(make), {"lr": 0.1}, records.append)
        assert_same(state, make(2))
        assert meta["step"] == checkpoints.latest() == 2
        # The numbers of damaged steps can be used again.
        checkpoints.save(3, make(3), loader={}, config={"lr": 0.1})
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "checkpoints",
        "damaged-3",
        "damaged-4",
        "damaged-4.2",
        "damaged-4.3",
    ]
    assert [re.search(r"checkpoints/(\d) is damaged: .*; moved to .*/(.*)", line).groups() for line in records] == [
        ("4", "damaged-4.3"),
        ("3", "damaged-3"),
    ]
    with Checkpoints(folder, 4) as checkpoints:
        assert_same(checkpoints.resume(jax.eval_shape(make), {"lr": 0.1}, records.append)[0], make(3))
    assert len(records) == 2


def test_resuming_steps_back_from_damage_alone(tmp_path):
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder, 4) as checkpoints:
        assert checkpoints.resume(jax.eval_shape(make), {"lr": 0.1}, pytest.fail) is None
    save(folder, 1, 2)
    with Checkpoints(folder, 4) as checkpoints:
        with pytest.raises(UserError, match=r"checkpoints/2 was trained with .*: lr was 0\.1, now 0\.3"):
            checkpoints.resume(jax.eval_shape(make), {"lr": 0.3}, pytest.fail)
        with pytest.raises(UserError, match="has an unknown leaf empty"):
            checkpoints.resume({"params": {"new": jnp.zeros(3)}}, {"lr": 0.1}, pytest.fail)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


def test_a_save_that_fails_names_the_newest_that_is_there(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)
    full = ValueError("RESOURCE_EXHAUSTED: Error writing x\nFailed to write: No space left on device")
    message = r"No space left on device; [\d,.]+ MiB are free there\); the newest is of step 2\. Fix this"
    checkpoints = Checkpoints(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._orbax, "save_checkpointables_async", raising(full))
        with pytest.raises(DiskError, match=message):
            checkpoints.save(3, make(3), loader={}, config={})
        # A failed background save raises at the next wait.
        patch.setattr(checkpoints._orbax, "close", raising(full))
        with pytest.raises(DiskError, match=message):
            checkpoints.close()
        patch.setattr(checkpoints._orbax, "close", raising(PermissionError(13, "Permission denied")))
        with pytest.raises(DiskError, match=r"\(\[Errno 13\] Permission denied; "):
            checkpoints.close()
    checkpoints.close()


def test_a_save_in_the_background_that_fails_is_an_error_of_the_next_call(tmp_path):
    save(tmp_path / "checkpoints", 1)
    failed = types.SimpleNamespace(result=raising(ValueError("No space left on device")))
    with Checkpoints(tmp_path / "checkpoints", 2) as checkpoints:
        for call in (
            lambda: checkpoints.save(2, make(2), loader={}, config={}),
            lambda: checkpoints.resume(jax.eval_shape(make), {"lr": 0.1}, pytest.fail),
        ):
            checkpoints._save = failed
            with pytest.raises(DiskError, match=r"No space left on device; .*the newest is of step 1\. Fix this"):
                call()
        checkpoints._save = failed
        with pytest.raises(DiskError, match="No space left"):
            checkpoints.close()


def test_links_to_readable_steps_are_removed(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    save(tmp_path / "checkpoints", 1, 2)
    (tmp_path / "checkpoints" / "2" / "_CHECKPOINT_METADATA").write_text("[]")
    with Checkpoints(tmp_path / "checkpoints", 2) as checkpoints:
        assert list((tmp_path / "temporary").glob("checkpoints-*"))
        assert checkpoints.latest() == 2
    assert not list((tmp_path / "temporary").glob("checkpoints-*"))


def raising(error):
    def call(*_, **__):
        raise error

    return call


def test_a_reader_leaves_what_another_process_is_saving(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    for clean in (False, True):
        with Checkpoints(tmp_path, 2, clean=clean) as checkpoints:
            # At once: later cleaning could delete the next save.
            assert (tmp_path / "2.orbax-checkpoint-tmp").exists() != clean
            assert checkpoints.latest() == 1


def test_other_dtype_shape_or_leaves_are_refused(tmp_path):
    save(tmp_path, 3)
    abstract = jax.eval_shape(make)

    def changed(**leaves):
        return abstract._replace(params={k: v for k, v in (abstract.params | leaves).items() if v is not None})

    cases = (
        (changed(w=jax.ShapeDtypeStruct((40, 30), jnp.bfloat16)), r"params\.w is float32\[40, 30\].*expects bfloat16"),
        (changed(w=jax.ShapeDtypeStruct((30, 40), jnp.float32)), r"params\.w is float32\[40, 30\].*float32\[30, 40\]"),
        (changed(w=None), r"has an unknown leaf params\.w"),
        (changed(new=abstract.step), r"lacks params\.new"),
    )
    with Checkpoints(tmp_path, 2) as checkpoints:
        for expected, message in cases:
            with pytest.raises(UserError, match=message):
                checkpoints.restore(3, expected)


def test_moments_that_are_stored_in_another_way_are_refused(tmp_path):
    """Shapes and dtypes are equal. The names of leaves state format, group size and expansion."""
    p = {"w": jnp.ones((4, 300))}
    ways = {"group128+expand": {}, "group140+expand": {"group_size": 140}, "group128": {"expand": False}}
    states = {
        name: jax.eval_shape(fp8jax.compressed_adamw(1e-2, min_size=1, **settings).init, p)
        for name, settings in ways.items()
    }
    with Checkpoints(tmp_path, 1) as checkpoints:
        saved = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), states["group128+expand"])
        checkpoints.save(1, saved, loader={}, config={})
    with Checkpoints(tmp_path, 1) as checkpoints:
        assert_same(checkpoints.restore(1, states["group128+expand"])[0], saved)
        for name in ("group140+expand", "group128"):
            with pytest.raises(UserError, match=r"(lacks|has an unknown leaf) mu\.w\.codes:e4m3:group1"):
                checkpoints.restore(1, states[name])


def test_digest_depends_on_bytes_dtype_and_shape():
    x = np.arange(6, dtype=np.int32)
    variants = [x, x.astype(np.uint32), x.reshape(2, 3), x + 1, x.reshape(3, 2), np.int32(0), np.uint32(0)]
    assert len({digest(np.asarray(v)) for v in variants}) == len(variants)
    assert digest(x.reshape(2, 3).T.copy()) == digest(x.reshape(2, 3).T)


def test_names_of_leaves_are_their_paths():
    assert set(flatten(make())) == {"step", "params.w", "params.codes", "params.half", "params.on", "empty"}
