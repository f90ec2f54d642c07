"""`--release` and `--master`: the losses of the plain step with fp32 masters, checkpoints, export, and errors."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from experiments import mesh
from experiments.errors import UserError
from experiments.models.llama import LlamaConfig
from experiments.train import cli, config, trained
from experiments.train.optimizer import make_optimizer, with_master
from experiments.train.released import ReleasedOptimizer
from experiments.train.task import Task
from tests.rows import slow

LLAMA = LlamaConfig(vocab=128, dim=64, layers=3, heads=4, kv_heads=2, mlp_dim=128)
OPTIM = config.Optim(steps=8, warmup=0, schedule="constant", lr=3e-3, clip=100.0)


def tokens(step, rows=4):
    return jax.random.randint(jax.random.key(step), (rows, 33), 0, LLAMA.vocab, jnp.int32)


def task_of(recipe, optim=OPTIM, remat=False, rows=None, chunked=False):
    recipe = with_master(fp8jax.recipes.get(recipe), optim.master)
    tx = make_optimizer(config.Config(optim=optim), recipe)
    return Task(LLAMA, tx, recipe, remat=remat, seed=0, rows=rows, chunked=chunked)


def run(task, steps=3):
    state, step, calls = jax.jit(task.init)(), jax.jit(task.step, donate_argnums=0), []
    for i in range(steps):
        state, metrics = step(state, tokens(i))
        calls.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        assert bool(metrics["healthy"])
    return np.array(calls), state


@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        ("coat_optimizer", {"remat": True, "master": "bf16+int16", "chunked": True}),
        slow("bf16", {}),
        slow("coat_optimizer", {"remat": True}),
        slow("bf16", {"master": "bf16+int16", "chunked": True}),
    ],
    ids=["all at once", "bf16", "8-bit moments", "masters by parts"],
)
def test_released_layers_train_as_the_plain_step(recipe, how):
    """Losses and norms are equal. Both states have one structure, and nearly the same values."""
    optim = dataclasses.replace(OPTIM, master=how.pop("master", ""))
    plain, state = run(task_of(recipe, optim, **how))
    actual, own = run(task_of(recipe, dataclasses.replace(optim, release="previous"), **how))
    np.testing.assert_allclose(actual, plain, rtol=2e-3)
    inner = state.opt_state[1]
    assert jax.tree.structure(own.opt_state.inner) == jax.tree.structure(inner)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), own.params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state.params
    )
    for a, b in zip(*map(jax.tree.leaves, (own.params, state.params)), strict=True):
        assert np.mean(np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32))) < 3e-4  # of 9e-3
    assert int(own.opt_state.inner.count) == 3


@pytest.mark.parametrize("release", ["previous", slow("twice")])
def test_both_clippings(release):
    """Second moments show the clipping: by a layer's own norm, then its share of it, or the global norm."""
    small = dataclasses.replace(OPTIM, clip=0.05, release=release)
    task, step = task_of("bf16", small), jax.jit(task_of("bf16", small).step)
    first, metrics = step(jax.jit(task.init)(), tokens(0))
    second, _ = step(first, tokens(1))
    norm = float(metrics["grad_norm"])
    plain, expected = run(task_of("bf16", dataclasses.replace(small, release="")), 1)
    assert norm == pytest.approx(plain[0, 1], rel=1e-3)
    assert float(first.opt_state.norm) == norm
    squares = np.asarray(first.opt_state.squares)
    assert np.all(squares > 0.05**2)
    assert squares.sum() < norm**2
    ratios = jax.tree.map(lambda a, b: a / b, first.opt_state.inner.nu, expected.opt_state[1].nu)
    for path, ratio in jax.tree_util.tree_leaves_with_path(ratios):
        layers = release == "previous" and "layers" in jax.tree_util.keystr(path)
        ratio = np.nanmedian(ratio.reshape(len(squares), -1), 1) if layers else np.nanmedian(ratio)
        np.testing.assert_allclose(ratio, norm**2 / squares if layers else 1, rtol=0.02)
    if release == "previous":
        nu = (jax.tree.leaves(state.opt_state.inner.nu["layers"]) for state in (second, first))
        added = sum((new - OPTIM.b2 * old).reshape(len(squares), -1).sum(1) for new, old in zip(*nu, strict=True))
        np.testing.assert_allclose(added / (1 - OPTIM.b2), 0.05**2 * squares / norm**2, rtol=1e-3)


@pytest.mark.slow
def test_a_mesh_of_shards_changes_nothing_but_rounding():
    devices = mesh.make(2, 2, jax.devices()[:4])
    rows = mesh.batches(devices)
    optim = dataclasses.replace(OPTIM, release="previous", master="bf16+int8", clip=1.0)
    one, _ = run(task_of("coat_optimizer", optim))
    assert (one[:, 1] > 1).all(), "every step is clipped"
    task = task_of("coat_optimizer", optim, rows=rows)
    placed = mesh.state(devices, jax.eval_shape(task.init))
    state = jax.jit(task.init, out_shardings=placed)()
    step = jax.jit(task.step, donate_argnums=0, out_shardings=(placed, mesh.replicated(devices)))
    for i in range(3):
        state, metrics = step(state, jax.device_put(tokens(i), rows))
        np.testing.assert_allclose([metrics["loss"], metrics["grad_norm"]], one[i], rtol=3e-3)


def test_what_is_refused():
    optim = dataclasses.replace(OPTIM, release="previous")
    with pytest.raises(UserError, match=r"so gradients cannot be accumulated\. Omit --microbatches 2"):
        config.Config(optim=dataclasses.replace(optim, microbatches=2)).validate()
    with pytest.raises(UserError, match="omit --lora-rank"):
        config.Config(optim=optim, lora=config.Lora(lora_rank=2)).validate()
    with pytest.raises(UserError, match=r"so steps cannot be skipped\. Use --on-bad-step rewind or stop"):
        config.Config(optim=optim, run=config.Run(on_bad_step="skip")).validate()
    for name in ("te_delayed", "moss", "int8_fallback"):
        with pytest.raises(UserError, match="has scalings with a state"):
            make_optimizer(config.Config(optim=optim), fp8jax.recipes.get(name))
    with pytest.raises(UserError, match="has 8-bit gradient reductions"):
        make_optimizer(config.Config(optim=optim), fp8jax.recipes.get("fp8_lm"))
    with pytest.raises(UserError, match=r"--master fp8: weights\.master 'fp8' is not one of"):
        with_master(fp8jax.recipes.coat(), "fp8")
    assert isinstance(make_optimizer(config.Config(optim=optim), fp8jax.recipes.coat()), ReleasedOptimizer)


@pytest.mark.parametrize("release", ["previous", slow("twice")])
def test_a_run_goes_on_and_its_export_has_the_masters(release, tmp_path, capsys):
    args = ["--recipe", "coat", "--layers", "2", "--dim", "64", "--heads", "2", "--kv-heads", "2", "--mlp-dim", "64",
            "--seq-len", "32", "--batch", "2", "--eval-batches", "1", "--sample-tokens", "0", "--warmup", "1",
            "--out", str(tmp_path), "--mesh", "data=1", "--release", release, "--master", "bf16+int16",
            "--checkpoint-every", "2"]  # fmt: skip
    assert cli.main([*args, "--steps", "2"]) == 0, capsys.readouterr()
    meta = json.loads((tmp_path / "train" / "config.json").read_text())
    assert (meta["release"], meta["master"]) == (release, "bf16+int16")
    actual = trained.load(tmp_path / "train", "coat")
    params, masters = (jax.tree.leaves(x) for x in (actual.params, actual.masters))
    assert all(x.dtype == jnp.bfloat16 for x in params)
    assert all(x.dtype == jnp.float32 for x in masters)
    high, _ = fp8jax.split_master_weights(actual.masters, "bf16+int16")
    jax.tree.map(np.testing.assert_array_equal, high, actual.params)
    assert any((np.asarray(a) != np.asarray(b, np.float32)).any() for a, b in zip(masters, params, strict=True))
    assert optax.tree.norm(actual.masters) > 0
