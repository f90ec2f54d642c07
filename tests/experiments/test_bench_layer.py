"""The benchmark of a layer, with a small one: its arms compute the same layer and save the expected residuals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import arms as bench_arms
from experiments.bench import layer, timing
from experiments.models.flash import dot_product_attention
from experiments.models.llama import LlamaConfig

SMALL = LlamaConfig(vocab=8, dim=48, layers=1, heads=2, kv_heads=2, mlp_dim=128)


@pytest.mark.slow
def test_arms_compute_the_same_layer_and_held_weights_change_no_bit(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    lean = bench_arms.LEAN
    prequantized = f"{lean}, {layer.PREQUANTIZED}"
    arms = layer.arms(16, SMALL, (lean, prequantized))
    assert list(arms) == [layer.BF16, layer.BF16_REMATERIALIZED, layer.BF16_FUNCTIONS, lean, prequantized]
    results = (jax.tree.leaves(jax.jit(a.three)(*a.operands)) for a in arms.values())
    for plain, again, functions, a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        exact, *others = (np.asarray(z, np.float64) for z in (plain, again, functions, a))
        errors = [np.linalg.norm(exact - z) / np.linalg.norm(exact) for z in others]
        assert max(errors[:2]) < 0.005
        assert max(errors[:2]) < errors[2] < 0.4
    assert arms[lean].saved == pytest.approx(arms[prequantized].saved)
    assert arms[layer.BF16].saved > 3 * arms[lean].saved
    assert 1.2 * arms[lean].saved < arms[layer.BF16_REMATERIALIZED].saved < arms[layer.BF16].saved / 2
    actual = {(r["impl"], r["baseline"]): r for r in layer.saved_rows("case", arms)}
    for base in (layer.BF16, layer.BF16_REMATERIALIZED):
        assert actual[lean, base]["ratio"] == pytest.approx(arms[base].saved / arms[lean].saved)
    assert actual[lean, layer.PAPER]["ratio"] * actual[lean, layer.PAPER]["value"] == pytest.approx(22.66)


@pytest.mark.slow
def test_the_layer_as_functions_is_that_of_the_model(monkeypatch):
    monkeypatch.setattr(layer, "attend", lambda q, k, v, is_causal: dot_product_attention(q, k, v, is_causal=is_causal))
    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    prequantized = f"{bench_arms.LEAN}, {layer.BOUNDED}, {layer.PREQUANTIZED}"
    arms = layer.arms(16, SMALL, (prequantized, f"{prequantized}, {layer.FUNCTIONS}"))
    actual = {name: jax.tree.leaves(jax.jit(arm.three)(*arm.operands)) for name, arm in arms.items()}
    assert set(actual) - {layer.BF16, layer.BF16_REMATERIALIZED, layer.BF16_FUNCTIONS} == {
        prequantized,
        f"{prequantized}, {layer.FUNCTIONS}",
    }
    for leaves in zip(
        *(actual[name] for name in (layer.BF16, prequantized, f"{prequantized}, {layer.FUNCTIONS}")), strict=True
    ):
        exact, model, functions = (np.asarray(leaf, np.float64) for leaf in leaves)
        # One rounding less can change a scale, and with it the e5m2 codes of a whole gradient.
        assert 0 < np.linalg.norm(functions - exact) < 1.2 * np.linalg.norm(model - exact)
    assert arms[prequantized].saved == arms[f"{prequantized}, {layer.FUNCTIONS}"].saved


@pytest.mark.slow
def test_a_layer_with_fallback_has_thresholds_that_its_inputs_settled(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    monkeypatch.setattr(layer, "BATCH", 2)
    arm = layer.arms(128, dataclasses.replace(SMALL, dim=256, mlp_dim=512), ("int8_fallback",))["int8_fallback"]
    params, codes, x, _ = arm.operands
    threshold = codes["attention"]["q"]["dot_general"]["threshold_x"]
    assert 1 < threshold < np.abs(np.asarray(x, np.float32)).max() * 1.3  # normalized inputs, like x
    assert codes["mlp"]["down"]["dot_general"]["threshold_x"] < 1
    y, (grads, dx) = jax.eval_shape(arm.three, *arm.operands)
    assert (y.shape, jax.tree.map(jnp.shape, grads), dx.shape) == (x.shape, jax.tree.map(jnp.shape, params), x.shape)


def test_times_are_compared_with_bf16_in_its_forms_and_held_weights_are_counted():
    prequantized = f"a, {layer.PREQUANTIZED}"
    arms = (
        layer.BF16,
        layer.BF16_REMATERIALIZED,
        layer.BF16_FUNCTIONS,
        "a",
        prequantized,
        f"{prequantized}, {layer.FUNCTIONS}",
        layer.WEIGHTS,
    )
    times = {name: timing.Seconds([i + 1.0, i + 2.0, i + 9.0]) for i, name in enumerate(arms)}
    actual = {(r["impl"], r["metric"]): r for r in layer.time_rows("case", times)}
    assert len(actual) == len(layer.time_rows("case", times))
    assert actual["a", "time"]["ratio"] == 2 / 5
    assert actual["a", "time"]["quartiles"] == [4500, 8500]
    assert actual["a", f"time, {layer.BF16_REMATERIALIZED}"]["ratio"] == 3 / 5
    assert ("a", f"time, {layer.BF16_FUNCTIONS}") not in actual
    assert actual[f"{prequantized}, {layer.FUNCTIONS}", f"time, {layer.BF16_FUNCTIONS}"]["ratio"] == 4 / 7
    assert actual[prequantized, "time, 1 microbatch"]["value"] == 1e3 * (6 + 8)
    assert actual[prequantized, "time, 4 microbatches"]["value"] == 1e3 * (6 + 8 / 4)
    assert actual[prequantized, "time, 4 microbatches"]["ratio"] == 2 / 8
    assert ("a", "time, 4 microbatches") not in actual
    assert actual[layer.WEIGHTS, "time once a step"]["value"] == 8e3


def test_weights_are_quantized_as_arms_hold_them():
    arms = layer.arms(16, SMALL, (f"{bench_arms.LEAN}, {layer.PREQUANTIZED}",))
    make, kernels = layer.weights(arms[layer.BF16])
    codes = sorted(x.size for x in jax.tree.leaves(jax.eval_shape(make, *kernels)) if x.ndim == 2 and x.size > 1)
    dtypes = sorted(
        x.size for x in jax.tree.leaves(arms[f"{bench_arms.LEAN}, {layer.PREQUANTIZED}"].operands[1]) if x.size > 1
    )
    assert codes == dtypes
    assert len(codes) == 2 * 7
