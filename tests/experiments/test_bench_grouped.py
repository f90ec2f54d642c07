"""The benchmark of grouped products: its code runs through, its references are right, and arms fail alone."""

import argparse
import concurrent.futures
import importlib.util
import json
import os

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import grouped

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
SMALL = grouped.Layer(16, 8, 4, 2, 12)


def test_each_case_is_traced(monkeypatch, tmp_path):
    monkeypatch.setenv("FP8JAX_DRY", "1")
    monkeypatch.setitem(os.environ, "XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    grouped.main(["--dry", "--only", "w13|passes", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*/grouped.json")
    content = json.loads(path.read_text())
    rows = content["rows"]
    assert {row["case"].split(" ", 1)[1] for row in rows if row["metric"] == "time" and row["value"]} == {
        "w13 quantized", "w13 forward", "w13 dx", "w13 dw", "passes"
    }  # fmt: skip
    assert not [note for note in content["notes"] if "Not measured" in note]


def loads():
    """Rows of each expert, and the expert of each row."""
    sizes = SMALL.group_sizes()
    assert sizes.sum() == SMALL.rows
    assert 0 in sizes
    return sizes, np.repeat(np.arange(SMALL.experts), sizes)


def test_references_are_products_of_each_group():
    """Results from float64, in place of those of kernels, have no error; of another group, a large one."""
    sizes, group = loads()
    case = grouped.rows_case("c", SMALL, 16, 8, True)
    x = case.make()
    a, b = (np.asarray(x[key].astype(jnp.float32), np.float64) for key in ("a", "b"))
    out = np.einsum("tk,tnk->tn", a, b[group])
    assert case.error("ours bf16", jnp.asarray(out, jnp.float32), x) < 1e-6
    assert case.error("ours bf16", jnp.asarray(np.einsum("tk,nk->tn", a, b[0]), jnp.float32), x) > 0.5
    scaled = out * np.asarray(x["scale"])[group][:, None]
    assert case.error(grouped.OURS, jnp.asarray(scaled, jnp.float32), x) < 1e-6
    case = grouped.dw_case("c", SMALL, 16, 8)
    x = case.make()
    a, b = (np.asarray(x[key].astype(jnp.float32), np.float64) for key in ("a16", "b16"))
    out = np.stack([a[group == g].T @ b[group == g] for g in range(SMALL.experts)])
    assert case.error("ours bf16", jnp.asarray(out, jnp.float32), x) < 1e-6
    assert case.error("ours bf16", jnp.asarray(out + (sizes == 0)[:, None, None], jnp.float32), x) > 0.5


def test_an_arm_that_fails_stops_no_other():
    arms = [grouped.Arm(name, 0, jnp.sin, ("x",), "good") for name in ("good", "bad", "late", "double")]
    case = grouped.Case("c", 10, {"x": jnp.zeros(3)}, arms, lambda: {"x": jnp.ones(3)})
    futures = {case.key(arm): concurrent.futures.Future() for arm in arms}
    for arm in arms:
        if arm.name in ("good", "double"):
            futures[case.key(arm)].set_result(arm.function)
    futures[case.key(arms[1])].set_exception(ValueError("no room"))
    rows, notes = grouped.measure(case, futures, argparse.Namespace(rounds=1, burst=0.0))
    assert notes == [
        "Not measured: c, bad: ValueError: no room",
        "Not measured: c, late: TimeoutError: it was not compiled in time",
    ]
    assert {row["impl"] for row in rows} == {"good", "double"}
