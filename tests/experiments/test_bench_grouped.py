"""The benchmark of grouped products: its code runs, its references are right, and a failing arm does
not stop others."""

import argparse
import importlib.util
import json
import os
import types

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import grouped

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
SMALL = grouped.Layer(16, 8, 4, 2, 12)


def test_each_case_is_traced(monkeypatch, tmp_path):
    monkeypatch.setenv("FP8JAX_DRY", "1")
    monkeypatch.setitem(os.environ, "XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    grouped.main(["--out", str(tmp_path)])
    (path,) = tmp_path.glob("*/grouped.json")
    times = [(row["case"], row["impl"]) for row in json.loads(path.read_text())["rows"] if row["metric"] == "time"]
    cases = ("small w13 quantized", "small w2 quantized")
    assert times == [(case, arm) for case in cases for arm in (grouped.OURS, grouped.PLAIN)]


@pytest.mark.parametrize("is_permuted", [True, False])
def test_references_are_products_of_each_group(is_permuted):
    """Float64 results instead of the kernels' have no error; those of another group have a large one."""
    sizes = SMALL.group_sizes()
    assert sizes.sum() == SMALL.rows
    assert 0 in sizes
    group = np.repeat(np.arange(SMALL.experts), sizes)
    case = grouped.Case(SMALL, 16, 8, is_permuted)
    x = case.operands()
    rows, dy, w = (np.asarray(x[key].astype(jnp.float32), np.float64) for key in ("x", "dy", "w16"))
    rows = rows[np.asarray(x["index"])]

    def results(of):
        dw = [dy[group == g].T @ rows[group == g] for g in range(SMALL.experts)]
        actual = np.einsum("tk,tnk->tn", rows, w[of]), np.einsum("tn,tnk->tk", dy, w[of]), np.stack(dw)
        return tuple(jnp.asarray(y, jnp.float32) for y in actual)

    assert case.error(results(group), x) < 1e-6
    assert case.error(results((group + 1) % SMALL.experts), x) > 0.5
    y, dx, dw = results(group)
    assert case.error((y, dx, dw[::-1]), x) > 0.5


def test_an_arm_that_fails_stops_no_other(capsys):
    def bad(x):
        raise ValueError("no room")

    arms = {"good": lambda x: x, "bad": bad, "double": lambda x: 2 * x}
    case = types.SimpleNamespace(
        arms=arms, work=1e12, operands=lambda: {"x": jnp.ones(3)}, error=lambda out, _: float(out[0])
    )
    rows = grouped.measure("c", case, argparse.Namespace(rounds=1, burst=0.0))
    assert "bad failed: ValueError no room" in capsys.readouterr().out
    assert [(row["impl"], row["value"]) for row in rows if row["metric"] == "error"] == [
        ("good", 1),
        ("double", 2),
    ]
    assert {row["impl"] for row in rows if row["metric"] == "rate"} == {"good", "double"}
