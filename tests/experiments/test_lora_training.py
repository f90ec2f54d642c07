"""Adapters in the training program: what is trained, saved and resumed, and rejected settings."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from experiments import evaluate, mesh
from experiments.models.llama import LlamaConfig
from experiments.train import cli
from experiments.train.config import Lora
from experiments.train.task import Task
from tests.distance import relative
from tests.programs import residuals
from tests.rows import slow

SHAPE = LlamaConfig(vocab=40, dim=64, layers=2, heads=4, kv_heads=2, mlp_dim=96)
TOKENS = np.random.default_rng(0).integers(0, SHAPE.vocab, (4, 33)).astype(np.int32)


def build(lora=Lora(8), recipe="te_current", remat=False, **settings):  # noqa: B008 (frozen)
    return Task(SHAPE, optax.adamw(2e-2), fp8jax.recipes.get(recipe), remat=remat, seed=5, lora=lora, **settings)


def trained(task, steps=4, **settings):
    state, base = jax.jit(task.init)(), jax.jit(task.base)(**settings)
    step, losses = jax.jit(task.step), []
    for _ in range(steps):
        state, metrics = step(state, TOKENS, base)
        losses.append(float(metrics["loss"]))
    return state, base, losses


@pytest.mark.parametrize(
    ("base", "recipe"),
    [
        slow("bf16", "bf16"),
        slow("e4m3", "te_current"),
        slow("e4m3:block128", "deepseek"),
        ("int8:block128", "int8_block"),
    ],
)
def test_adapters_learn_beside_any_base(base, recipe):
    task = build(Lora(8, base=base, lora_targets=".*/(q|v|up)"), recipe)
    state, base_, losses = trained(task, 8)
    assert losses[-1] < losses[0] - 0.1
    names = {"/".join(str(k.key) for k in path) for path, _ in jax.tree_util.tree_leaves_with_path(state.params)}
    assert names == {f"layers/{x}/lora_{y}" for x in ("attention/q", "attention/v", "mlp/up") for y in "ab"}
    assert jax.tree.leaves(state.model_state) == []
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert sorted(x.shape for x in moments) == sorted(2 * [x.shape for x in jax.tree.leaves(state.params)])
    size = 1 if base != "bf16" else 2
    layers = [x for x in jax.tree.leaves(base_["layers"]) if x.ndim == 3 and x.size > 100]
    assert {x.dtype.itemsize for x in layers} == {size}
    assert sum(x.size for x in layers) == 2 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96)
    assert base_["layers"]["mlp_norm"]["scale"].dtype == jnp.float32
    assert base_["embed"]["embedding"].dtype == jnp.bfloat16


def test_a_step_keeps_no_wide_copy_of_the_base_nor_codes_of_inputs_for_it():
    task = build(remat=False)
    state, base = jax.jit(task.init)(), jax.jit(task.base)()
    saved = residuals(lambda params: task.loss(params, base, TOKENS), state.params)
    weights = {x.shape[1:] for x in jax.tree.leaves(base["layers"]) if x.dtype == jnp.uint8 and x.ndim == 3}
    weights |= {shape[::-1] for shape in weights}
    assert len(weights) == 5
    assert not [k for k in saved if k[0] != "uint8" and k[1][-2:] in weights]
    assert not [k for k in saved if k[0] == "uint8" and 128 in k[1][-2:]]


@pytest.mark.slow
def test_the_first_loss_is_the_base_s_own_and_merging_changes_nothing():
    llama, lora = dataclasses.replace(SHAPE, bias="qkv"), Lora(8, lora_alpha=24.0, lora_targets=".*/(q|v|out|up|down)")
    task = Task(llama, optax.adamw(2e-2), fp8jax.recipes.te_current(), remat=False, seed=5, lora=lora)
    plain = Task(llama, task.tx, fp8jax.recipes.bf16(), remat=False, seed=5)
    params = jax.jit(plain.init)().params
    make_base, loss = jax.jit(task.base), jax.jit(plain.loss)
    # With the same parameters; e4m3 rounds them and the inputs.
    for actual, expected in zip(*map(jax.tree.leaves, (make_base(params), make_base())), strict=True):
        # Scales in another program may differ in the last bit.
        np.testing.assert_allclose(np.asarray(actual, np.float32), np.asarray(expected, np.float32), rtol=2e-7)
    for name in "qkv":
        params["layers"]["attention"][name]["bias"] += jnp.linspace(-1, 1, llama.layers)[:, None]
    state, base, losses = trained(task, 6, params=params)
    assert losses[0] == pytest.approx(float(loss(params, {}, TOKENS)), abs=0.02)
    assert losses[-1] < losses[0] - 0.03
    exact = Task(llama, task.tx, fp8jax.recipes.bf16(), remat=False, seed=5, lora=lora)
    merged = jax.jit(task.merged)(state.params, base)
    whole = jax.jit(lambda params: plain.model(params, {})(TOKENS[:, :-1]))
    actual = whole(jax.tree.map(lambda x: x.astype(jnp.float32), merged))
    expected = jax.jit(lambda params, base: exact.model(params, base)(TOKENS[:, :-1]))(state.params, base)
    assert relative(actual, expected) < 0.02
    assert relative(actual, whole(params)) > 0.1
    of = lambda tree: {k: np.asarray(v, np.float64) for k, v in tree["layers"]["mlp"]["up"].items() if k != "held"}  # noqa: E731
    a, b = (of(state.params)[f"lora_{x}"] for x in "ab")
    assert relative(of(merged)["kernel"] - 24 / 8 * a @ b, of(params)["kernel"]) < 0.04


def test_a_bad_loss_changes_nothing_and_the_base_is_no_output():
    task = build()
    state, base = jax.jit(task.init)(), jax.jit(task.base)()
    bad = base | {"norm": {"scale": jnp.full(64, np.nan)}}
    after, metrics = jax.jit(task.step)(state, TOKENS, bad)
    assert not bool(metrics["healthy"])
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.slow
def test_dropout_is_of_training_alone():
    task = build(Lora(8, lora_dropout=0.5))
    state, base, _ = trained(task, 2)
    same = build()
    loss = [float(jax.jit(t.loss)(state.params, base, TOKENS)) for t in (task, same)]
    assert loss[0] == loss[1]
    dropped = float(jax.jit(task.step)(state, TOKENS, base)[1]["loss"])
    assert dropped != loss[0]
    assert dropped == pytest.approx(loss[0], rel=0.05)


FLAGS = ["--recipe", "te_current", "--lora-rank", "4", "--base", "e4m3:block128", "--lora-dropout", "0.1"]


@pytest.mark.slow
def test_a_run_stops_resumes_exactly_and_is_evaluated(argv, out, capsys):
    assert cli.main([*argv, *FLAGS, "--run", "lora"]) == 0
    assert "adapters: lora_rank=4" in (out / "lora" / "log.txt").read_text()
    # From the checkpoint in its middle.
    shutil.copytree(out / "lora", out / "lora_parts")
    folder = out / "lora_parts" / "te_current"
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "8")
    assert cli.main([*argv, *FLAGS, "--run", "lora_parts"]) == 0
    assert "resuming from step 4" in capsys.readouterr().out
    results = [json.loads((out / run / "te_current" / "result.json").read_text()) for run in ("lora", "lora_parts")]
    assert results[0]["result"]["valid_loss"] == results[1]["result"]["valid_loss"]
    assert results[0]["result"]["train_loss"] == results[1]["result"]["train_loss"]
    size = sum(p.stat().st_size for p in (folder / "checkpoints" / "8").rglob("*") if p.is_file())
    assert size < 300_000
    assert evaluate.main(["--run", str(out / "lora"), "--recipe", "te_current"]) == 0


@pytest.mark.parametrize(
    ("base", "many", "parts"),
    [
        slow("e4m3:block128", "fsdp=2,tensor=2", 4),
        slow("e4m3:block128", "data=2,fsdp=2", 2),
        slow("bf16", "tensor=2", 2),
    ],
)
def test_a_base_lies_in_shards_and_adapters_train_alike(base, many, parts, argv, out, monkeypatch, capsys):
    monkeypatch.setattr(mesh, "SMALLEST", 1)
    losses, bases, with_base = {}, {}, cli.with_base
    for where in ("data=1", many):

        def record_base(step, loss, weights, where=where):
            bases[where] = weights
            return with_base(step, loss, weights)

        monkeypatch.setattr(cli, "with_base", record_base)
        run = f"shards_{where[-1]}_{base[-3:]}"
        flags = ["--recipe", "te_current", "--lora-rank", "4", "--mesh", where, "--run", run, "--base", base]
        assert cli.main([*argv, *flags]) == 0
        losses[where] = json.loads((out / run / "te_current" / "result.json").read_text())["result"]["valid_loss"]
    assert losses[many] == pytest.approx(losses["data=1"], rel=2e-3)
    matrices = [x for x in jax.tree.leaves(bases[many]["layers"]) if x.ndim == 3 and min(x.shape[1:]) > 1]
    assert len(matrices) == 7
    assert all(x.addressable_shards[0].data.size * parts == x.size for x in matrices)
    for actual, expected in zip(*(jax.tree.leaves(bases[where]) for where in losses), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert "error" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora-rank", "-1"], "--lora-rank must be at least 0"),
        (["--base", "e4m3:block128"], "--base requires adapters; also set --lora-rank"),
        (["--lora-rank", "4", "--lora-alpha", "0"], "--lora-alpha must be positive"),
        (["--lora-rank", "4", "--lora-dropout", "1"], "--lora-dropout must be"),
        (["--lora-rank", "4", "--lora-targets", "("], "not a regular expression"),
        (["--lora-rank", "4", "--lora-targets", "head"], "matches none of the layers layers/attention/k, "),
        (["--lora-rank", "64"], "the rank of an adapter"),
        (["--lora-rank", "4", "--base", "e4m4"], "--base: unknown number format 'e4m4'"),
        (["--lora-rank", "4", "--base", "int10:group128"], "--base must be bf16, or an 8-bit spec"),
        (["--lora-rank", "4", "--base", "int8"], "te_current multiplies e4m3, and a product"),
        (["--lora-rank", "4", "--recipe", "te_delayed"], "delayed scaling, which keeps a state"),
    ],
)
def test_bad_settings_end_with_a_line_and_code_2(argv, flags, message, capsys):
    assert cli.main([*argv, "--recipe", "te_current", "--run", "lora_bad", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
