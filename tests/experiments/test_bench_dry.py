"""Every benchmark's code runs on a CPU, with small shapes and without timing."""

import dataclasses
import importlib
import importlib.util
import json
import os
import runpy
import sys

import jax
import jax.numpy as jnp
import pytest

import fp8jax
from experiments.bench import arms, driver, models, moe, writings
from experiments.results import runner

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
# Slow cases: arms that differ only in their recipe.
FEWER = {
    "step": ["--arm", "coat", "--torch"],
    "models": ["--models", "gpt350m", "--torch", "--arm", "bf16", "coat"],
    "layer": ["--only", "te_current"],
    "release": ["--arm", "coat, released, offloaded, bf16+int8 masters", "bf16"],
}
SLOW = {
    "models",
    "release",
    "optimizer",
    "reduce",
    "step",
    "lora",
    "gemm",
    "gemm_int8",
    "peers",
    "profile",
    "grouped",
    "moe",
    "layer",
}


@pytest.mark.parametrize(
    "job",
    [pytest.param(job, marks=pytest.mark.slow if job.name in SLOW else ()) for job in runner.distinct()],
    ids=lambda j: j.name,
)
def test_the_code_of_each_job_runs(job, monkeypatch, tmp_path):
    monkeypatch.setenv("FP8JAX_DRY", "1")
    monkeypatch.setitem(os.environ, "XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    module, *options = job.command
    *options, out = options
    options += [*FEWER.get(job.name, []), out, str(tmp_path)]
    if module == "experiments.bench":
        name, *options = options
        importlib.import_module(f"{module}.{name}").main(options)
    else:
        monkeypatch.setattr(sys, "argv", [module, *options])
        with pytest.raises(SystemExit, match="0"):
            runpy.run_module(module, run_name="__main__")
    (path,) = tmp_path.glob("*/*.json")
    content = json.loads(path.read_text())
    assert path.stem == job.name
    assert not content["complete"], "a dry run is no measurement"
    assert content["rows"]
    assert all({"commit", "device", "ratio", "baseline"} <= row.keys() for row in content["rows"])


def test_arms_of_a_job_are_recipes_that_there_are():
    for job in (*runner.ONE_GPU, *runner.TWO_GPUS, *runner.FOUR_GPUS):
        if job.command[1] == "step":
            options = list(job.command[2:])
            named = options[options.index("--arm") + 1 :]
            for arm in named[: next((i for i, a in enumerate(named) if a.startswith("--")), None)]:
                arms.settings(arm)
    for arm in {arm for model in models.MODELS.values() for arm in model.arms}:
        assert writings.get_recipe(arm).name


def losses(user, arms, **kwargs):
    """Returns the losses of three steps, and frees the state."""
    results = {}
    for name in arms:
        arm = models.UserArm(user, name, **kwargs)
        arm.prepare()
        results[name] = [float(arm()) for _ in range(3)]
        arm.stop()
        assert arm.state is None
    return results


def small(training):
    """Returns a batch of two sequences for a tiny model."""
    return models.UserModel("small", lambda arm, length, outputs, _: training(arm, length, outputs, True),
                            (), "text", 2, 16, 64)  # fmt: skip


@pytest.mark.slow
def test_a_user_s_model_trains_in_both(monkeypatch):
    """Losses agree except for 8-bit rounding."""
    names = ("bf16", "prequantized:coat, 8-bit head")
    plain, eight = losses(small(models.MODELS["llama1b"].training), names).values()
    assert plain[2] < plain[0]
    assert plain != eight
    assert plain == pytest.approx(eight, rel=0.02)
    heads = [
        writings.get_recipe(arm).head
        for arm in ("prequantized:coat", "coat, 8-bit head", "prequantized:coat, 8-bit head")
    ]
    assert heads == [fp8jax.recipes.bf16().head, fp8jax.recipes.HEAD, fp8jax.recipes.HEAD]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama1b_dots", "llama1b_linen", "llama1b_equinox"])
def test_other_writings_and_policies_train_in_both(name):
    actual = losses(small(models.MODELS[name].training), ("bf16", "coat"))
    assert actual["bf16"][2] < actual["bf16"][0]
    assert actual["bf16"] != actual["coat"]
    assert actual["bf16"] == pytest.approx(actual["coat"], rel=0.02)


@pytest.mark.slow
def test_blocks_of_a_model_with_a_policy_are_checkpointed_and_each_writing_is_quantized():
    """Read from traced programs; nothing runs."""
    inputs, labels = jax.eval_shape(lambda: (jnp.zeros((2, 16), "int32"),) * 2)
    for name in ("llama1b", "llama1b_dots", "llama1b_linen", "llama1b_equinox"):
        for arm, eight in (("bf16", False), ("coat", True)):
            training = models.MODELS[name].training(arm, 16, 64, True)
            program = str(jax.make_jaxpr(training.step)(jax.eval_shape(training.begin), inputs, labels))
            assert ("policy=" in program) == name.endswith("_dots")
            assert ("WithProducts" in program) == (name.endswith("_dots") and eight)
            assert ("f8_e4m3" in program) == eight


@pytest.mark.slow
def test_a_checkpointed_model_computes_the_same_and_two_gpus_have_a_batch_each():
    plain, dots = (small(models.MODELS[name].training) for name in ("llama1b", "llama1b_dots"))
    actual = losses(plain, ["bf16"])["bf16"]
    assert losses(dots, ["bf16"])["bf16"] == pytest.approx(actual, rel=1e-3)
    wide = dataclasses.replace(plain, batch=4)
    assert losses(plain, ["coat"], gpus=2)["coat"] == pytest.approx(losses(wide, ["coat"])["coat"], rel=1e-2)


def test_rates_run_and_a_dry_run_leaves_the_table_alone(monkeypatch, capsys, tmp_path):
    from experiments.bench import rates
    from fp8jax.rewrite.cost_model import Rates

    monkeypatch.setenv("FP8JAX_DRY", "1")
    table = tmp_path / "rates.json"
    rates.main(["--table", str(table), "--device", "none"])
    printed = capsys.readouterr().out
    entry = json.loads(printed[printed.index("{") :])
    assert set(Rates._fields) <= set(entry)
    assert not table.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama1b", "llama1b_linen", "llama1b_equinox"])
def test_an_observed_step_adds_statistics_to_the_same_loss(name):
    user = small(models.MODELS[name].training)
    losses = {}
    for arm in ("coat", "observed:coat"):
        steps = models.UserArm(user, arm)
        losses[arm] = steps()
    loss, statistics = losses["observed:coat"]
    assert float(loss) == float(losses["coat"])
    actual = [
        float(layer_statistics["x"]["snr_db"].min())
        for layer_statistics in statistics.values()
        if "x" in layer_statistics
    ]
    assert len(actual) >= 14  # Two layers of seven products.
    assert all(15 < snr < 45 for snr in actual)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "coat"])
def test_a_layer_whose_experts_are_cut_over_devices_computes_the_whole_layer(name):
    shape, tokens = moe.DRY["small"], 64
    whole = moe.make_layer(shape, moe.arms()[name], 2 * tokens)
    shared = moe.make_layer(shape, moe.arms(2)[name], tokens, 2)
    expected = jax.jit(whole.in_order)(*moe.draw(whole))
    actual = jax.jit(shared.in_order)(*moe.draw(shared))
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    # Devices round partial sums of the router's gradient, and `coat` has scales per device.
    assert float(driver.relative_error(actual, expected)) < (0.02 if name == "bf16" else 0.15)
