"""The states of all recipes are restored from 8 devices to 2 and back to 8 through checkpoints, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from experiments import mesh
from experiments.mesh import flatten
from experiments.models.llama import LlamaConfig
from experiments.train import config
from experiments.train.checkpoint import Checkpoints
from experiments.train.optimizer import make_optimizer
from experiments.train.task import Task

LLAMA = LlamaConfig(vocab=64, dim=64, layers=2, heads=4, kv_heads=2, mlp_dim=128)
KERNEL = "layers.mlp.up.kernel"
LAYER = "model_state.layers.mlp.up.dot_general"
# By recipe: names in its state, each with whether the array is sharded.
STATES = {
    "te_delayed": {f"{LAYER}.{name}": False for name in ("x", "w", "dy", "seen_x", "seen_w", "slot")},
    "moss": {f"{LAYER}.automatic_w": False, f"opt_state.1.1.bounds.{KERNEL}": False},
    "int8_fallback": {f"{LAYER}.threshold_x": False, f"{LAYER}.seen_x": False},
    "fp8_lm": {f"factors.{part}.{KERNEL}": False for part in ("mu", "saturated")}
    | {f"opt_state.1.{part}.{KERNEL}.codes": True for part in ("master", "mu", "nu")}
    | {f"opt_state.1.{part}.{KERNEL}.scale": False for part in ("master", "mu", "nu")},
    "coat": {f"opt_state.1.{moment}.{KERNEL}.{part}": True
             for moment in ("mu", "nu") for part in ("codes", "scale", "expansion")},
}  # fmt: skip


def build(name, devices):
    recipe = fp8jax.recipes.get(name)
    optimizer = make_optimizer(config.Config(), recipe)
    return Task(LLAMA, optimizer, recipe, remat=False, seed=0, rows=mesh.batches(devices))


def noise(x, rng):
    """Returns arbitrary bits of a dtype, including NaN."""
    if x.dtype == jnp.bool:
        return rng.integers(0, 2, x.shape).astype(bool)
    raw = rng.integers(0, 256, (*x.shape, x.dtype.itemsize), np.uint8)
    return raw.view(x.dtype).reshape(x.shape)


def bits(tree):
    return {name.partition(":")[0]: (x.dtype, x.shape, np.asarray(x).tobytes()) for name, x in flatten(tree).items()}


@pytest.mark.parametrize("name", STATES)
def test_a_state_goes_from_8_devices_to_2_and_back_bit_for_bit(name, tmp_path, monkeypatch):
    monkeypatch.setattr(mesh, "SMALLEST", 1024)
    # Sums along both axes of a mesh have no factors.
    many, few = mesh.make(*(1, 8) if name == "fp8_lm" else (4, 2)), mesh.make(1, 2)
    abstract = jax.eval_shape(build(name, many).init)
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: noise(x, rng), abstract)
    want = bits(state)
    state = jax.device_put(state, mesh.state(many, abstract))
    for step, where in enumerate((few, many), 1):
        with Checkpoints(tmp_path / name, 2) as checkpoints:
            checkpoints.save(step, state, loader={}, config={})
        expected = jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), abstract, mesh.state(where, abstract)
        )
        with Checkpoints(tmp_path / name, 2) as checkpoints:
            state, _ = checkpoints.restore(step, expected)
        assert bits(state) == want
        actual = {leaf.partition(":")[0]: x for leaf, x in flatten(state).items()}
        for leaf, sharded in STATES[name].items():
            assert actual[leaf].sharding.num_devices == where.size
            assert actual[leaf].sharding.is_fully_replicated != sharded, leaf
