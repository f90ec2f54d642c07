"""Schedules, MFU, traces of steps, and logs of other services."""

import json
import sys
import types

import jax
import numpy as np
import pytest

import fp8jax
from experiments import errors
from experiments.models.llama import LlamaConfig
from experiments.train import cli, config, optimizer, report, speed
from experiments.train.config import Lora, Optim
from experiments.train.optimizer import make_optimizer
from experiments.train.task import Task

SHAPE = LlamaConfig(vocab=50, dim=32, layers=3, heads=4, kv_heads=2, mlp_dim=64)


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("constant", {0: 0, 5: 1, 10: 2, 50: 2, 99: 2}),
        ("linear", {0: 0, 5: 1, 10: 2, 55: 1.1, 100: 0.2}),
        ("wsd", {0: 0, 10: 2, 79: 2, 80: 2, 90: 1.1, 100: 0.2}),
        ("cosine", {0: 0, 5: 1, 10: 2, 55: 1.1, 100: 0.2}),
    ],
)
def test_schedules_go_through_their_points(name, rates):
    rate = optimizer.schedule(Optim(steps=100, warmup=10, lr=2.0, final_lr=0.1, schedule=name))
    np.testing.assert_allclose([float(rate(step)) for step in rates], list(rates.values()), atol=1e-6)
    assert float(optimizer.schedule(Optim(steps=100, warmup=0, lr=2.0, schedule=name))(0)) == 2.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--schedule", "wsd", "--decay", "0"], "--decay must be a share of --steps"),
        (["--schedule", "wsd", "--decay", "0.95", "--steps", "100", "--warmup", "20"], "starts at step 5 with wsd"),
        (["--head", "fp8", "--logits", "whole"], "--head fp8 computes logits in chunks of tokens; omit"),
        (["--wandb", "mine"], "--wandb mine needs the package wandb"),
        (["--profile", "-1"], "--profile must be at least 0"),
    ],
)
def test_bad_settings_are_told(argv, flags, message, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert cli.main([*argv, "--run", "bad", *flags]) == 2
    assert message in capsys.readouterr().err


def test_operations_are_those_of_products_and_attention():
    """Computed by hand: six per weight and token, four next to adapters, two and four per causal score."""
    tx = make_optimizer(config.Config(), fp8jax.recipes.bf16())
    attention = 3 * 32 * 32 + 3 * 32 * 32  # q, out, and half of each for k and v
    block = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
    assert attention == 6144
    whole = Task(SHAPE, tx, fp8jax.recipes.bf16(), remat=False, seed=0)
    params = jax.eval_shape(whole.init).params
    matrices, scores = 3 * block + 32 * 50, 6 * 3 * 32 * 128
    assert speed.operations(SHAPE, params, {}, 128) == 6 * matrices + scores
    part = Task(SHAPE, tx, fp8jax.recipes.te_current(), remat=False, seed=0, lora=Lora(4, lora_targets=".*/q"))
    shapes = jax.eval_shape(part.init).params, jax.eval_shape(part.base)
    scales = 3 * 7  # codes count as their matrices; their metadata is negligible
    expected = 6 * 3 * (32 * 4 + 4 * 32) + 4 * matrices + scores
    assert expected <= speed.operations(SHAPE, *shapes, 128) <= expected + 4 * scales


def test_peaks_are_of_the_cards_that_are_named():
    assert speed.peak("NVIDIA H100 80GB HBM3") == 989.5e12
    assert speed.peak("NVIDIA H100 PCIe") == 756e12
    assert speed.peak("NVIDIA A100-SXM4-40GB") == 312e12
    assert speed.peak("cpu") is None


class Service(types.ModuleType):
    """A fake of wandb."""

    def __init__(self):
        super().__init__("wandb")
        self.begun, self.rows, self.ended = [], [], 0

    def init(self, **settings):
        self.begun.append(settings)
        return self

    def log(self, row, step):
        self.rows.append((step, row))

    def finish(self):
        self.ended += 1


def test_a_run_is_traced_logged_elsewhere_and_says_how_much_of_a_gpu_it_uses(argv, out, capsys, monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service)
    monkeypatch.setattr(speed, "peak", lambda kind: 1e12)
    flags = ["--run", "traced", "--recipe", "bf16", "--profile", "2", "--wandb", "mine", "--schedule", "wsd"]
    assert cli.main([*argv, *flags]) == 0
    folder = out / "traced" / "bf16"
    assert list(folder.glob("profile/plugins/profile/*/*.xplane.pb"))
    assert list(folder.glob("profile/plugins/profile/*/perfetto_trace.json.gz"))
    rows = report.read_metrics(folder / "metrics.jsonl")
    (begun,) = service.begun
    assert (begun["project"], begun["name"], begun["resume"]) == ("mine", "traced/bf16", "allow")
    assert begun["config"]["schedule"] == "wsd"
    assert [{"step": step, **row} for step, row in service.rows] == rows
    assert service.ended == 1
    settings = cli.parse([*argv, *flags])
    llama = settings.model.shape(256)
    shapes = jax.eval_shape(
        Task(llama, make_optimizer(settings, fp8jax.recipes.bf16()), fp8jax.recipes.bf16(), remat=False,
                   seed=0).init).params  # fmt: skip
    for row in (row for row in rows if "loss" in row):
        assert row["mfu"] == pytest.approx(row["tokens_per_s"] * speed.operations(llama, shapes, {}, 16) / 1e12)
    assert " mfu " in capsys.readouterr().out
    assert json.loads((out / "traced" / "config.json").read_text())["schedule"] == "wsd"


def test_a_trace_of_a_run_that_ends_in_it_is_whole(tmp_path):
    with speed.Trace(tmp_path, 5) as trace:
        for step in range(4):
            trace.before(step, jax.numpy.ones(3) * step)
    assert list(tmp_path.rglob("*.xplane.pb"))
    with speed.Trace(tmp_path / "none", 0) as trace:
        trace.before(speed.UNTRACED, ())
    assert not (tmp_path / "none").exists()


def test_a_trace_begins_after_the_untraced_steps_and_ends_after_its_own(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **_: events.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: events.append("stop"))
    with speed.Trace(tmp_path, 3) as trace:
        for step in range(8):
            events.append(step)
            trace.before(step, jax.numpy.ones(3))
    assert events == [0, 1, 2, str(tmp_path), 3, 4, 5, "stop", 6, 7]


def test_runs_of_before_these_settings_resume(tmp_path):
    old = config.Config().mathematics()
    for name in ("schedule", "decay", "field", "init", "base", "lora_rank", "lora_alpha"):
        del old[name]
    config.check_same(old, config.Config().mathematics(), tmp_path)
    with pytest.raises(errors.UserError, match="lora_rank was 0, now 4"):
        config.check_same(old, config.Config(lora=Lora(4)).mathematics(), tmp_path)
