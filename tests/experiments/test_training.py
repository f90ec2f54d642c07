"""The step, the loop and the files of a finished run."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8jax
from experiments.models import sampling
from experiments.models.llama import Llama, LlamaConfig
from experiments.train import cli, folders, optimizer, report
from experiments.train.task import Task

TINY = LlamaConfig(vocab=40, dim=32, layers=2, heads=4, kv_heads=2, mlp_dim=48)


@pytest.fixture(scope="module")
def task():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    plain = dataclasses.replace(fp8jax.recipes.bf16(), weights=fp8jax.recipes.Weights("fp32", "fp32"))
    return Task(TINY, tx, plain, remat=False, seed=0)


@pytest.fixture(scope="module")
def step(task):
    return jax.jit(task.step)


TOKENS = np.random.default_rng(0).integers(0, TINY.vocab, (4, 9)).astype(np.int32)


def test_loss_is_the_mean_cross_entropy_of_next_tokens(task):
    params = task.init().params
    logits = np.asarray(task.model(params, {})(TOKENS[:, :-1]), np.float64)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_probabilities, TOKENS[:, 1:, None], -1).mean()
    np.testing.assert_allclose(task.loss(params, {}, TOKENS), expected, rtol=1e-5)


def test_a_step_applies_the_optimizer_to_the_gradient(task, step):
    state = task.init()
    grads = jax.jit(jax.grad(task.loss))(state.params, {}, TOKENS)
    updates, _ = jax.jit(task.tx.update)(grads, state.opt_state, state.params)
    after, metrics = step(state, TOKENS)
    for new, old, update in zip(*map(jax.tree.leaves, (after.params, state.params, updates)), strict=True):
        np.testing.assert_allclose(new - old, update, atol=2e-5)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-4)
    assert int(after.step) == 1


def test_training_learns_one_batch_by_heart(task, step):
    state = task.init()
    for _ in range(60):
        state, metrics = step(state, TOKENS)
    assert float(metrics["loss"]) < 0.2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nothing_is_applied_from_the_first_bad_step_on(task, step, bad):
    state, _ = step(task.init(), TOKENS)
    poisoned = state._replace(params=state.params | {"norm": {"scale": state.params["norm"]["scale"].at[0].set(bad)}})
    after, metrics = step(poisoned, TOKENS)
    assert not bool(metrics["healthy"])
    assert int(after.step) == 1
    # A later step must change nothing either, even with finite values.
    later, metrics = step(state._replace(healthy=after.healthy), TOKENS)
    assert np.isfinite(float(metrics["loss"]))
    assert not bool(metrics["healthy"])
    for before, stopped in ((poisoned, after), (state, later)):
        for x, y in zip(*map(jax.tree.leaves, ((before[:4]), (stopped[:4]))), strict=True):
            np.testing.assert_array_equal(x, y)


def test_divergence_ends_the_program_before_the_update(argv, out, capsys):
    """It writes heat maps, which show the layer."""
    flags = ["--run", "diverged", "--lr", "1e30", "--recipe", "coat_optimizer", "--checkpoint-every", "1"]
    assert cli.main([*argv, *flags, "--clip", "1e30", "--telemetry", "1"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "not finite, so nothing of it was applied (newest checkpoint: step" in error
    assert "Try a lower --lr" in error
    failed = int(error.split("step ")[1].split(":")[0])
    folder = out / "diverged" / "coat_optimizer"
    losses = {row["step"]: row["loss"] for row in report.read_metrics(folder / "metrics.jsonl") if "loss" in row}
    assert max(losses) == failed - 1
    assert np.isfinite(list(losses.values())).all()
    assert (folder / "telemetry_update.png").exists()


def test_weight_decay_spares_norms_and_nothing_else(task):
    mask = optimizer.decay_mask(task.init().params)
    spared = {jax.tree_util.keystr(path) for path, decayed in jax.tree.leaves_with_path(mask) if not decayed}
    assert spared == {"['norm']['scale']", "['layers']['attention_norm']['scale']", "['layers']['mlp_norm']['scale']"}


def test_weight_decay_spares_biases_of_stacked_layers_too():
    model = nnx.eval_shape(lambda: Llama(dataclasses.replace(TINY, bias="qkv"), rngs=nnx.Rngs(0)))
    mask = optimizer.decay_mask(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert mask["layers"]["attention"]["q"] == {"kernel": True, "bias": False}


def test_run_leaves_its_files(finished):
    assert (finished / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((finished / "config.json").read_text())["lr"] == 2e-3
    for recipe in ("bf16", "coat_optimizer"):
        folder = finished / recipe
        assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
        assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["4", "8"]
        rows = report.read_metrics(folder / "metrics.jsonl")
        assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
        assert [row["step"] for row in rows if "valid_loss" in row] == [4, 8]
        result = json.loads((folder / "result.json").read_text())["result"]
        assert result["valid_loss"] == rows[-1]["valid_loss"]


def test_recipes_start_from_the_same_parameters_and_see_the_same_batches(finished):
    first = [report.read_metrics(finished / r / "metrics.jsonl")[0] for r in ("bf16", "coat_optimizer")]
    assert first[0]["loss"] == first[1]["loss"]
    assert first[0]["grad_norm"] == first[1]["grad_norm"]


def test_fp8_moments_are_smaller_and_the_loss_is_close(finished):
    bf16, coat = (json.loads((finished / r / "result.json").read_text())["result"] for r in ("bf16", "coat_optimizer"))
    assert bf16["state_bytes"]["mu"] == bf16["state_bytes"]["nu"] == 4 * bf16["parameters"]
    assert coat["state_bytes"]["mu"] < bf16["state_bytes"]["mu"]
    assert abs(coat["valid_loss"] / bf16["valid_loss"] - 1) < 0.01


def test_output_has_plan_estimate_progress_and_table(argv, finished, out, capsys):
    shutil.copytree(finished, out / "shown")
    shutil.rmtree(out / "shown" / "coat_optimizer")
    assert cli.main([*argv, "--run", "shown", "--sample-tokens", "12"]) == 0
    shown, log = capsys.readouterr().out, (out / "shown" / "log.txt").read_text()
    for text in (
        "8 of 64 tokens", "already trained for 8 steps", "step 4/8 mean_loss ", "tokens/s ", "valid 8/8 loss ",
        "coat_optimizer writes:", "vs bf16", "times less), at ", "loss.png",
    ):  # fmt: skip
        assert text in shown, text
    assert shown.splitlines().index("") == 5  # lines of the header
    assert shown.count("step 8/8") == 1
    for text in ("lr=0.002", "jax ", "first moment", "bytes/param", "XLA: peak of a step", "adamw by xla"):
        assert text in log, text
        assert text not in shown, text
    assert "WARNING" not in shown


def test_resume_never_moves_the_old_run_aside(argv, finished, out, capsys):
    shutil.copytree(finished, out / "again")
    flags = ["--run", "again", "--resume", "never", "--recipe", "bf16"]
    assert cli.main([*argv, *flags]) == 0
    assert f"moved the old run to {out / 'again.old1'}" in capsys.readouterr().out
    assert (out / "again.old1" / "coat_optimizer" / "result.json").exists()
    assert not (out / "again" / "coat_optimizer").exists()
    losses = [report.read_metrics(out / name / "bf16" / "metrics.jsonl") for name in ("again", "again.old1")]
    assert [r["loss"] for r in losses[0] if "loss" in r] == [r["loss"] for r in losses[1] if "loss" in r]


def test_byte_pair_run_keeps_its_tokenizer(argv, out, capsys, monkeypatch):
    flags = ["--run", "bpe", "--recipe", "bf16", "--tokenizer", "bpe", "--vocab", "300"]
    assert cli.main([*argv, *flags]) == 0
    saved = (out / "bpe" / "tokenizer.json").read_bytes()
    (out / "bpe" / "bf16" / "result.json").unlink()
    assert folders.BytePair.load(out / "bpe" / "tokenizer.json").vocab == 300
    monkeypatch.delattr(folders.BytePair, "train")
    assert cli.main([*argv, *flags]) == 0
    assert "resuming from step 8" in capsys.readouterr().out
    assert (out / "bpe" / "tokenizer.json").read_bytes() == saved


def test_log_drops_what_comes_after_the_resumed_step(tmp_path):
    rest = {"grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 1.0}
    rows = [{"step": s, "loss": 1.0, **rest} for s in (1, 2, 3)] + [{"step": 3, "valid_loss": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "lo')
    console = report.make_console()
    with report.RunLog(tmp_path, console, recipe="r", resumed=2, steps=9, every=5) as log:
        assert not log.has_valid(3)
        log.step(3, 0.5, grad_norm=1.0, lr=0.1, tokens_per_s=2.0)
    read = report.read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in read] == [(1, 1.0), (2, 1.0), (3, 0.5)]


def test_sampling_continues_the_prompt_as_the_model_says():
    def successor(_, tokens):
        return 100.0 * jax.nn.one_hot((tokens + 1) % 7, 7)

    assert sampling.sample(successor, None, [3, 4], 8, jax.random.key(0)) == [3, 4, 5, 6, 0, 1, 2, 3]
    with pytest.raises(ValueError, match="a prompt needs 1 to 3 tokens"):
        sampling.sample(successor, None, [1, 2, 3, 4], 4, jax.random.key(0))


def test_sampling_follows_the_key_and_the_probabilities():
    """The noise of 16-bit logits would be too coarse for the 500 rare tokens."""
    rare = 500 * np.exp(-8.0)

    def weighted(_, tokens):
        logits = jnp.full(502, -4.0, jnp.bfloat16).at[0].set(0).at[1].set(-jnp.inf)
        return jnp.broadcast_to(logits, (*tokens.shape, 502))

    samples, again, other = (
        sampling.sample(weighted, None, [0], 2001, jax.random.key(i), temperature=0.5) for i in (1, 1, 2)
    )
    assert samples == again != other
    # Five standard deviations of the mean of 2,000 draws.
    assert abs(np.mean(np.array(samples[1:]) > 1) - rare / (1 + rare)) < 5 * (0.14 / 2000) ** 0.5
    assert 1 not in samples


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (5 * 2**40, "5,120.0 GiB")]
)
def test_sizes_for_people(count, shown):
    assert report.size(count) == shown
