"""Tables of INT8 training: outliers that leave a model's function as it was, runs that diverge, scales that tell."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from experiments.errors import UserError
from experiments.models.llama import Llama, LlamaConfig
from experiments.models.scoring import Score
from experiments.papers import int8_diverges, int8_fallback, int8_leak, int8_outliers, int8_speed
from fp8jax.ops.dispatch import choice

WIDE = LlamaConfig(vocab=32, dim=128, layers=2, heads=4, kv_heads=4, mlp_dim=256)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 17)), jnp.int32)
BLOCK, FACTOR = 32, 64.0


def parameters(llama):
    """Parameters of a model in fp32, and what makes a model of parameters."""
    graphdef, params = nnx.split(Llama(llama, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    return nnx.to_pure_dict(params), lambda values: nnx.merge(graphdef, values)


def test_criteria_measure_what_the_paper_says():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((256, 384)).astype(np.float32)
    x[:128, :128] = 0
    base = x + rng.uniform(-0.1, 0.1, x.shape).astype(np.float32) * (x != 0)
    found = np.asarray(int8_fallback.measures(jnp.asarray(x), jnp.asarray(base), (128, 128)))
    for i, j in np.ndindex(2, 3):
        at = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
        error, size = np.abs(x[at] - base[at]).sum(dtype=float), np.abs(x[at]).sum(dtype=float)
        want = [np.abs(x[at]).max(), error, error / size if size else 0]
        np.testing.assert_allclose(found[:, i, j], want, rtol=1e-5)
    for measured in found:
        share = np.asarray(int8_fallback.top_share(jnp.asarray(measured), 1 / 3))
        assert share.sum() == 2
        assert measured[share].min() >= measured[~share].max()


def test_outliers_come_and_the_function_stays():
    params, model = parameters(dataclasses.replace(WIDE, layers=1))
    before, after = model(params), model(int8_diverges.amplified(params, BLOCK, FACTOR))
    np.testing.assert_allclose(after(TOKENS), before(TOKENS), rtol=1e-4, atol=1e-4)
    small, large = (int8_diverges.inputs(model, TOKENS[:, :-1]) for model in (before, after))
    for name, factor in (("q, k and v", FACTOR), ("gate and up", FACTOR), ("down", FACTOR**0.5)):
        ratio = np.abs(large[name]).max(0) / np.abs(small[name]).max(0)
        outliers = np.flatnonzero(ratio > 2)
        np.testing.assert_array_equal(outliers, np.arange(int8_diverges.WITHIN, len(ratio), 4 * BLOCK))
        np.testing.assert_allclose(ratio[outliers], factor, rtol=1e-3)
        np.testing.assert_allclose(np.delete(ratio, outliers), 1, rtol=1e-2)


@pytest.mark.parametrize(("changes", "message"), [({"dim": 64}, "--block 32 needs"), ({"norm": "layer"}, "no OLMo")])
def test_a_model_that_cannot_have_outliers_is_refused(changes, message):
    params, _ = parameters(dataclasses.replace(WIDE, **changes))
    with pytest.raises(UserError, match=message):
        int8_diverges.amplified(params, BLOCK, FACTOR)


def test_arms_have_the_blocks_and_rates_that_they_are_named_for():
    arms = int8_diverges.arms(16)
    quantized = {name: recipe.linear for name, recipe in arms.items() if name != int8_diverges.BASE}
    for linear in quantized.values():
        specs = [fp8jax.QuantSpec.parse(spec) for spec in (linear.x, linear.w, linear.dy, linear.x_residual)]
        assert {(spec.format, spec.granularity, spec.group_size) for spec in specs} == {("int8", "block", 16)}
        assert [spec.rounding for spec in specs] == ["nearest", "nearest", "stochastic", "stochastic"]
    assert {quantized[name].fallback_fraction_range[1] for name in int8_diverges.RATES} == {0.025, 0.1}
    assert not quantized["int8_block"].states
    assert quantized["int8_fallback"].states


def test_a_run_that_diverges_has_no_loss_and_is_counted():
    def run(loss, valid, end=None):
        return {int8_diverges.TRAINING: [3.0] * 8 + [loss, loss if end is None else end], "validation loss": valid}

    found = {
        "bf16": [run(2.0, 2.0), run(2.0, 2.0)],
        "int8_fallback": [run(2.02, 2.0), run(2.04, 2.0)],
        "int8_block": [run(2.2, 2.1), {**run(2.2, None), int8_diverges.TRAINING: [3.0, 2.5, *[None] * 8]}],
    }
    values = {row.pivot: row.value for row in int8_diverges.rows(found)}
    assert values["int8_fallback", "diverged"] == 0
    assert values["int8_block", "diverged"] == 1
    assert values["int8_block", "validation loss"] is None
    assert values["int8_block", "training loss: % above bf16"] is None
    assert values["int8_fallback", "training loss: % above bf16"] == pytest.approx(1.5)
    # Student's t of one degree of freedom, at 95 %: 12.706 deviations of the mean of 1 and 2.
    assert values["int8_fallback", "± (training loss)"] == pytest.approx(12.706 * 0.5, rel=1e-3)


def test_coarse_codes_have_so_many_values():
    x = jax.random.normal(jax.random.key(0), (64, 64))
    q = fp8jax.quantize(x, "int8:block32")
    coarse = int8_leak.coarse(q, 3)
    assert len(np.unique(coarse.codes)) == 7
    assert coarse.codes.dtype == q.codes.dtype
    assert np.abs(np.asarray(coarse.codes, int) - np.asarray(q.codes, int)).max() <= 127 / 6 + 1


def test_coarse_inputs_change_products_of_blocks_or_say_that_they_met_none():
    x, w = jax.random.normal(jax.random.key(0), (64, 64)), jax.random.normal(jax.random.key(1), (64, 64))
    multiply = lambda: fp8jax.linear(x, w, recipe=fp8jax.recipes.jetfire(), key=jax.random.key(2))  # noqa: E731
    plain = multiply()
    with int8_leak.coarse_inputs(3):
        damaged = multiply()
    error = lambda y: float(jnp.linalg.norm(y - x @ w) / jnp.linalg.norm(x @ w))  # noqa: E731
    assert error(damaged) > 5 * error(plain)
    np.testing.assert_array_equal(multiply(), plain)
    with pytest.raises(RuntimeError, match="nothing was damaged"), int8_leak.coarse_inputs(3):
        fp8jax.linear(x, w, recipe=fp8jax.recipes.te_current())


def test_hidden_loss_is_that_of_tokens_less_that_of_sequences():
    def scores(*losses):
        return {way: Score(10 * loss, 10) for way, loss in zip(int8_leak.WAYS, losses, strict=True)}

    mean, half = int8_leak.hidden([scores(2.0, 2.0, 2.5), scores(2.0, 2.1, 2.8)])
    assert mean == pytest.approx(0.6)
    assert half == pytest.approx(12.706 * 0.1, rel=1e-3)
    assert int8_leak.hidden([scores(2.0, 2.0, 2.5)]) == (pytest.approx(0.5), math.inf)
    rows = {row.pivot: row.value for row in int8_leak.rows({"jetfire": [scores(2.0, 2.0, 2.5)]})}
    assert rows["jetfire", "unquantized"] == pytest.approx(math.exp(2.0))
    assert rows["jetfire", "±"] is None


def test_arms_of_the_leak_are_known_recipes():
    for of in int8_leak.ARMS.values():
        for name in of:
            assert fp8jax.recipes.get(name).name == name


def test_a_residual_is_nearer_than_16_bits_where_outliers_are_few_and_254_times_the_others():
    """Figure 3(b) as arithmetic: a residual reaches as far as the small values, 1, or half a step, r / 254."""
    for ratio in (30, 100, 1000, 3000):
        x = int8_outliers.population(1, ratio)
        assert np.sort(np.abs(x).reshape(-1))[-2:] == pytest.approx([1, ratio], rel=1e-2)
        half_a_step = ratio / 254
        expected = 32767 / (127 * 254) * min(1, 1 / half_a_step)
        assert int8_outliers.over_sixteen(x, 128) == pytest.approx(expected, rel=0.02)
    many = int8_outliers.population(1024, 3000)
    assert np.sum(np.abs(many) > 1) == 1024
    assert int8_outliers.over_sixteen(many, 128) == pytest.approx(32767 / (127 * 254), rel=0.02)


@pytest.mark.slow
def test_figures_are_of_the_same_function_and_gradients_whatever_the_outliers(monkeypatch):
    """Without quantization every factor gives 0; with it outliers cost, and what falls back mends."""
    params, _ = parameters(dataclasses.replace(WIDE, layers=1))
    batches = [TOKENS]
    for name, value in {"BLOCK": 32, "SMALL": 8, "RATES": (0.2, 0.3)}.items():
        monkeypatch.setattr(int8_outliers, name, value)

    def figures():
        rows = int8_outliers.of_model(params, batches, (1, 256))
        return {row.pivot: row.value for row in rows if row.table.startswith(("Figure 3(c)", "Figure 4(b)"))}

    with monkeypatch.context() as exact:
        exact.setattr(int8_outliers, "levels", lambda bits: int8_fallback.EXACT)
        assert max(abs(x) for x in figures().values()) < 1e-4
    found = figures()
    assert found["factor 256", "none"] > 10 * found["factor 1", "none"]
    assert found["factor 256", "absmax, 30%"] < found["factor 256", "none"] / 3


def test_speeds_are_ratios_to_bf16_and_a_backward_pass_is_the_rest(monkeypatch):
    """Of planted times: 4 and 10 ms of bf16, 2 and 5 of all others; a product 8 times as long as those of blocks."""
    monkeypatch.setenv("FP8JAX_DRY", "1")
    monkeypatch.setattr(int8_speed, "RECIPES", ("int8_block",))
    monkeypatch.setattr(int8_speed, "SIDES", (128,))
    monkeypatch.setattr(int8_speed, "QWEN", {"0.5B": dataclasses.replace(WIDE, layers=1)})
    monkeypatch.setattr(int8_speed.timing, "compiled", lambda functions, sets: dict.fromkeys(functions))

    def planted(ready, rounds, burst):
        base = {"bf16": 1e-2, "bf16, forward": 4e-3, "forward": 4e-3, "linear": 3e-3}
        return {name: base.get(name, 2e-3 if name.endswith("forward") else 5e-3) for name in ready}

    monkeypatch.setattr(int8_speed.timing, "seconds", planted)
    rows = {(row.case.split(",")[0], row.table.rpartition(", ")[2]): row for row in int8_speed.layers(64, 1, 1.0)}
    assert rows["int8_block", "backward"].value == pytest.approx(3)
    assert rows["int8_block", "backward"].ratio == pytest.approx(6 / 3)
    assert rows["int8_block", "both"].ratio == pytest.approx(2)
    assert rows["bf16", "forward"].value == pytest.approx(4)
    one, other = int8_speed.products(64, 1, 1.0)
    assert one.value == pytest.approx(2e-12 * 256**3 / 1e-2)
    assert (other.ratio, other.pivot[0]) == (2, "blocks of 128 (xla)")
    assert int8_speed.shares(1, 1.0)[0].value == pytest.approx(75)
    # The layer of GPT-2, whose four linear layers are quantized.
    layer, params, states = int8_speed.gpt_layer(128, "int8_block")
    x = int8_speed.inputs(128)[0]
    with choice.record_choices() as told:
        jax.eval_shape(layer, params, states, x)
    assert [operation for operation, _ in told].count("matmul") == 4
