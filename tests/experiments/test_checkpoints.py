"""Checkpoints come back bit for bit, or not at all."""

import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from experiments.checkpoint import Checkpoints, digest, flatten
from experiments.config import UserError


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
    return State(jnp.int32(seed), params, jnp.zeros((0, 3)))


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def save(folder, *seeds, keep=2):
    with Checkpoints(folder, keep) as checkpoints:
        for seed in seeds:
            checkpoints.save(seed, make(seed), loader={"next_index": seed}, config={"lr": 0.1})


def test_round_trip_keeps_every_bit_and_the_metadata(tmp_path):
    save(tmp_path, 3)
    with Checkpoints(tmp_path, 2) as checkpoints:
        assert checkpoints.latest() == 3
        state, meta = checkpoints.restore(3, jax.eval_shape(make))
    assert_same(state, make(3))
    assert (meta["step"], meta["loader"], meta["config"]) == (3, {"next_index": 3}, {"lr": 0.1})


def test_newest_n_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
    with Checkpoints(tmp_path / "none", 2) as checkpoints:
        assert checkpoints.latest() is None


def test_saved_state_may_be_donated_at_once(tmp_path):
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: jnp.ones_like(x), s), donate_argnums=0)
    with Checkpoints(tmp_path, 1) as checkpoints:
        state = make(1)
        checkpoints.save(1, state, loader={}, config={})
        jax.block_until_ready(overwrite(state))
    with Checkpoints(tmp_path, 1) as checkpoints:
        assert_same(checkpoints.restore(1, jax.eval_shape(make))[0], make(1))


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
                # A file that does not matter (a marker, a copy) may be damaged without harm.
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
        for wanted, message in cases:
            with pytest.raises(UserError, match=message):
                checkpoints.restore(3, wanted)


def test_moments_that_are_stored_in_another_way_are_refused(tmp_path):
    """Same shapes, same dtypes: the names of leaves say the format, the groups and the expansion."""
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
