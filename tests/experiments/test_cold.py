"""The benchmark of compilation: every recipe is measured in a process of its own, and compared with bf16."""

import json
import subprocess
import sys

import pytest

from experiments.bench import cold, timing

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
