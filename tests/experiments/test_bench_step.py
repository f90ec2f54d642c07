"""The benchmark of a whole step, on a small model: its arms train alike, and bf16 recomputed keeps less."""

import argparse
import json

import jax
import numpy as np
import pytest

from experiments.bench import step, timing
from experiments.models.llama import LlamaConfig

LLAMA = LlamaConfig(vocab=16, dim=32, layers=2, heads=2, kv_heads=2, mlp_dim=64)


def test_all_arms_are_timed_and_compared(monkeypatch, tmp_path):
    monkeypatch.setattr(step, "ARMS", (step.BF16, step.BF16_AGAIN, "coat"))
    clock = iter(np.arange(1e4))
    monkeypatch.setattr(step.time, "perf_counter", lambda: next(clock))
    seen = []
    monkeypatch.setattr(step, "memory", lambda compiled: (seen.append(compiled), (len(seen), 10.0 * len(seen)))[1])
    options = argparse.Namespace(model="tiny", batch=2, length=32, rounds=2, steps=3, out=tmp_path)
    step.measure(LLAMA, options)
    content = json.loads((tmp_path / "step.json").read_text())
    found = {(r["impl"], r["metric"]): r for r in content["rows"]}
    assert found["coat", "step"]["value"] == 1000
    assert found["coat", "step"]["quartiles"] == [1000, 1000]
    assert (found["coat", "memory"]["value"], found["coat", "memory"]["ratio"]) == (30e-9, pytest.approx(2 / 3))
    assert {r["baseline"] for r in content["rows"]} == {step.BF16, step.BF16_AGAIN}
    assert content["kernels"]


def test_recomputed_arms_give_the_same_step_and_need_fewer_temporaries():
    tokens = jax.random.randint(jax.random.key(0), (2, 33), 0, LLAMA.vocab)
    losses, needs = {}, {}
    for name in (step.BF16, step.BF16_AGAIN):
        task, compiled = step.build(name, LLAMA, 2, 32)
        _, metrics = compiled(jax.jit(task.init)(), tokens)
        losses[name] = (float(metrics["loss"]), float(metrics["grad_norm"]))
        needs[name] = step.memory(compiled)
    np.testing.assert_allclose(losses[step.BF16_AGAIN], losses[step.BF16], rtol=1e-3)
    assert needs[step.BF16_AGAIN][0] < needs[step.BF16][0]
    assert needs[step.BF16][1] > needs[step.BF16][0]


def test_seconds_remember_their_rounds():
    found = timing.Seconds([4.0, 1.0, 2.0, 3.0, 5.0])
    assert found == 3
    assert found.quartiles() == [2, 4]
    assert found.quartiles(lambda t: 12 / t) == [3, 6]
