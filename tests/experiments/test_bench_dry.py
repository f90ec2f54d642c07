"""Every benchmark's code runs through on a CPU, small and without measuring, before a GPU's time is spent."""

import importlib
import importlib.util
import json
import os

import pytest

from experiments import results
from experiments.bench import arms, models

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
# What takes longer than to try the code once: arms that differ in their recipe alone.
FEWER = {
    "step": ["--arm", "coat", "--torch"],
    "models": ["--models", "gpt350m", "--arm", "bf16", "coat"],
    "layer": ["--only", "te_current"],
    "release": ["--arm", "coat, released, offloaded, bf16+int8 masters", "bf16"],
}
SLOW = {
    "int8_speed",
    "models",
    "release",
    "optimizer",
    "coat_speed",
    "cold",
    "reduce",
    "step",
    "lora",
    "gemm",
    "gemm_int8",
    "peers",
}


@pytest.mark.parametrize(
    "job",
    [pytest.param(job, marks=pytest.mark.slow if job.name in SLOW else ()) for job in results.distinct()],
    ids=lambda j: j.name,
)
def test_the_code_of_each_job_runs(job, monkeypatch, tmp_path):
    monkeypatch.setenv("FP8JAX_DRY", "1")
    monkeypatch.setitem(os.environ, "XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    module, *options = job.command
    *options, out = options
    if module == "experiments.bench":
        name, *options = options
        module = f"{module}.{name}"
        main = importlib.import_module(module).main
    else:
        main = importlib.import_module(module).main
    main([*options, *FEWER.get(job.name, []), out, str(tmp_path)])
    (path,) = tmp_path.glob("*/*.json")
    content = json.loads(path.read_text())
    assert path.stem == job.name
    assert not content["complete"], "a dry run is no measurement"
    assert content["rows"]
    assert all({"commit", "device", "ratio", "baseline"} <= row.keys() for row in content["rows"])


def test_arms_of_a_job_are_recipes_that_there_are():
    for job in (*results.ONE_GPU, *results.TWO_GPUS, *results.FOUR_GPUS):
        if job.command[1] == "step":
            options = list(job.command[2:])
            named = options[options.index("--arm") + 1 :]
            for arm in named[: next((i for i, a in enumerate(named) if a.startswith("--")), None)]:
                arms.settings(arm)
    for arm in {arm for of_model in models.ARMS.values() for arm in of_model}:
        assert models.recipe_of(arm).name


def test_a_user_s_model_trains_in_both(monkeypatch):
    """Two steps, really run: losses agree but for what 8 bits round, and the state is freed."""
    small = models._llama(64, 1, 4, 2, 128)
    user = models.UserModel("small", small, small, "text", 2, 16, 64)
    losses = {}
    for recipe in ("bf16", "held:coat", "coat, 8-bit head"):
        arm = models.UserArm(user, recipe)
        arm.prepare()
        losses[recipe] = [float(arm()) for _ in range(3)]
        arm.stop()
        assert arm.state is None
    assert losses["bf16"][2] < losses["bf16"][0]
    assert losses["bf16"] == pytest.approx(losses["held:coat"], rel=0.02)
    assert losses["bf16"] != losses["held:coat"] != losses["coat, 8-bit head"]
    assert losses["bf16"] == pytest.approx(losses["coat, 8-bit head"], rel=0.02)


def test_rates_run_and_a_dry_run_leaves_the_table_alone(monkeypatch, capsys, tmp_path):
    from experiments.bench import rates
    from fp8jax.ops.gains import Rates

    monkeypatch.setenv("FP8JAX_DRY", "1")
    table = tmp_path / "rates.json"
    rates.main(["--table", str(table), "--device", "none"])
    told = capsys.readouterr().out
    entry = json.loads(told[told.index("{") :])
    assert set(Rates._fields) <= set(entry)
    assert not table.exists()
