"""The benchmark of compilation: every recipe is measured in a process of its own, and compared with bf16."""

import json
import subprocess
import sys

import jax
import pytest

from experiments.bench import cold, timing
from experiments.models.llama import LlamaConfig

SECONDS = {"bf16": 2.0, "te_current": 5.0, "deepseek": 9.0, "coat": 12.5}


@pytest.mark.parametrize("jobs", [1, 3])
def test_what_recipes_add_to_cold_compilation(monkeypatch, jobs):
    started, written = [], {}

    def start(name):
        started.append(name)
        line = json.dumps({"cold": SECONDS[name], "cached": SECONDS[name] / 4})
        return subprocess.Popen([sys.executable, "-c", f"print('{line}')"], stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(timing, "need_gpu", lambda: None)
    monkeypatch.setattr(timing, "write", lambda bench, title, rows, *rest: written.update({bench: rows}))
    monkeypatch.setattr(cold, "_start", start)
    cold.main(["--jobs", str(jobs)])
    assert sorted(started) == sorted(SECONDS)
    added = {row["impl"]: row["value"] for row in written["cold"] if row["metric"] == "added"}
    assert added == {"te_current": 3.0, "deepseek": 7.0, "coat": 10.5}
    cached = {row["impl"]: row["ratio"] for row in written["cold"] if row["metric"] == "cached"}
    assert cached["coat"] == 6.25


@pytest.mark.slow
def test_a_second_process_starts_with_the_first_ones_caches(monkeypatch):
    ran = []

    def run(command, env, **_):
        ran.append((command[-4:], env["FP8JAX_KERNEL_CACHE"]))
        times = {"tracing": 1.0, "lowering": 2.0 / len(ran), "compilation": 4.0 / len(ran)}
        return subprocess.CompletedProcess(command, 0, f"noise\n{json.dumps(times)}\n")

    monkeypatch.setattr(cold.subprocess, "run", run)
    found = cold.both("coat")
    assert (found["cold"], found["cached"], found["cached, lowering"]) == (7.0, 4.0, 1.0)
    assert ran[0] == ran[1]
    (_, name, _, cache), kernels = ran[0]
    assert (name, kernels) == ("coat", f"{cache}/kernels")


@pytest.mark.slow
def test_a_step_is_compiled_into_the_cache(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        found = cold.seconds("bf16", str(tmp_path), LlamaConfig(16, 32, 1, 2, 2, 64), 1, 8)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert list(found) == ["tracing", "lowering", "compilation"]
    assert all(value > 0 for value in found.values())
