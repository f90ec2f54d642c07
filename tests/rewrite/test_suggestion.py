"""`fp8jax.find_faults` and `fp8jax.suggest`: planted faults are found, and the suggested rules fix them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from fp8jax.ops.dispatch import choice

WIDTH, INNER, TOKENS = 32, 64, 64


def normal(i, *shape):
    return jax.random.normal(jax.random.key(i), shape)


PARAMS = {f"block{i}": {"up": normal(i, WIDTH, INNER) / 6, "down": normal(i + 9, INNER, WIDTH) / 8} for i in range(2)}
X = normal(20, TOKENS, WIDTH)


def loss_fn(params, x):
    y = x
    for block in params.values():
        y = y / jnp.sqrt(jnp.mean(jnp.square(y), -1, keepdims=True))
        y = y + jnp.tanh(y @ block["up"]) @ block["down"]
    return jnp.mean(jnp.square(y - x[:, ::-1]))


def observed_step(fast):
    loss = lambda params, states: fast(params, X, states=states)  # noqa: E731
    return jax.jit(fp8jax.telemetry(jax.value_and_grad(loss, argnums=(0, 1))))


@pytest.mark.usefixtures("inspected")
def test_scaled_weights_and_a_stuck_scale_are_named_and_mended():
    """Delayed scales: weights that grew by 1e4 saturate; a scale that stays too large loses values."""
    fast = fp8jax.transform(loss_fn, "te_delayed")
    states, params = fast.init(PARAMS, X), jax.tree.map(lambda w: w, PARAMS)
    step = observed_step(fast)
    (_, (_, observed)), statistics = step(params, states)
    assert fp8jax.find_faults(statistics) == []
    states = fast.advance(states, observed)
    params["block0"]["up"] = 1e4 * params["block0"]["up"]
    stuck = states["block1/down"].state
    states["block1/down"] = dataclasses.replace(states["block1/down"], state=stuck._replace(x=1e6 * stuck.x))
    (loss, _), statistics = step(params, states)
    faults = fp8jax.find_faults(statistics)
    assert [(f.layer, f.role, f.statistic) for f in faults][:1] == [("block0/up", "w", "saturated")]
    assert {(f.layer, f.role) for f in faults if f.statistic == "snr_db"} >= {("block1/down", "x")}
    assert {f.layer for f in faults if f.role in ("x", "w")} == {"block0/up", "block1/down"}

    suggestion = fp8jax.suggest(loss_fn, "te_delayed", params, X, statistics=statistics)
    expected = float(jax.jit(loss_fn)(params, X))
    assert suggestion.unquantized_loss == pytest.approx(expected, rel=1e-5)
    assert abs(float(loss) - expected) > 0.05 * expected
    mended = fp8jax.transform(loss_fn, suggestion.rules)
    states = {path: states[path] for path in mended.init(params, X)}
    assert not {"block0/up", "block1/down"} & set(states)
    (loss, _), statistics = observed_step(mended)(params, states)
    assert abs(float(loss) - expected) < 0.02 * expected
    assert not {"block0/up", "block1/down"} & {f.layer for f in fp8jax.find_faults(statistics) if f.role in ("x", "w")}

    code = str(suggestion)
    assert re.search(r"# w: 9\d\.\d\d% of values saturated; te_current has 3\d\.\d dB\n", code)
    names = {"fp8jax": fp8jax}
    exec(code, names)
    assert fp8jax.transform(loss_fn, names["rules"]).explain(params, X).rows == mended.explain(params, X).rows


def test_outliers_get_finer_scales_and_what_nothing_mends_16_bits():
    """A large token uses the range of its tensor but of no other group; a large channel uses that of each group."""
    x = np.array(normal(3, 2, TOKENS, 128))
    x[0, 0] *= 1e8
    x[1, :, 0] *= 1e8
    params = {"a+": normal(1, 128, 32), "b": normal(2, 128, 32)}
    suggestion = fp8jax.suggest(lambda p, x: jnp.tanh(x[0] @ p["a+"]) + x[1] @ p["b"], "te_current", params, x)
    assert suggestion.rules == (fp8jax.Rule(r"a\+", "deepseek"), fp8jax.Rule("b", None), "te_current")
    assert suggestion.unmended == ()
    assert suggestion.reasons["b"] == f"x: {127 / 128:.2%} of values lost to zero; in 16 bits it has none"


# Such as that a program never advances its scalings.
@pytest.mark.filterwarnings("error::UserWarning")
def test_statistics_of_a_step_decide_which_layers_get_a_rule():
    """The most serious fault of a layer is the reason. NaN, moments and layers of other functions get no rule."""
    faulty, tenth, half = ({name: np.float32(x)} for name, x in (("snr_db", 5), ("nonfinite", 0.1), ("saturated", 0.5)))
    statistics = {
        "block0/up": {"dy": faulty, "x": tenth},
        "block0/down": {"context": faulty},
        "block1/up": {"m": faulty},
        "block1/down": {"w": faulty, "x": half},
        "elsewhere": {"w": faulty},
    }
    suggestion = fp8jax.suggest(loss_fn, "int8_fallback", PARAMS, X, statistics=statistics)
    layers = ("block1/down", "block0/up", "block0/down")
    assert suggestion.rules == (*(fp8jax.Rule(layer, "te_current") for layer in layers), "int8_fallback")
    assert re.fullmatch(r"x: 50\.00% of values saturated; te_current has 3\d\.\d dB", suggestion.reasons["block1/down"])
    unmended = {(fault.layer, fault.role) for fault in suggestion.unmended}
    assert unmended == {("block0/up", "x"), ("block1/up", "m"), ("elsewhere", "w")}
    losses = suggestion.unquantized_loss, suggestion.loss_before, suggestion.loss_after
    text = "# loss of this batch: {:.5g} in 16 bits, {:.5g} before, {:.5g} with these rules".format(*losses)
    assert str(suggestion).endswith(text)


def test_4_bits_have_errors_of_their_own():
    """16 dB and more are no fault in e2m1. Half of the columns are 1e-5 of the others and underflow."""
    x, w = normal(1, 64, 64), normal(2, 64, 64)
    step = jax.jit(fp8jax.telemetry(lambda x, w: fp8jax.linear(x, w, recipe="nvfp4", key=jax.random.key(0))))
    _, statistics = step(x, w)
    snr = [float(values["snr_db"]) for roles in statistics.values() for values in roles.values()]
    assert all(14 < each < 21 for each in snr)
    assert fp8jax.find_faults(statistics) == []
    _, statistics = step(x.at[:, 32:].multiply(1e-5).at[:, ::16].set(30.0), w)
    assert {fault.role for fault in fp8jax.find_faults(statistics)} == {"x"}


def test_given_rules_stay_and_decide_for_the_other_layers():
    """Grouped matmuls have errors too. "bf16" quantizes nothing, and a pattern may end up without a layer."""
    x = np.array(normal(3, TOKENS, WIDTH))
    x[0] *= 1e8  # a token of the first expert
    sizes = jnp.array([56, 8])
    params = {"experts": normal(1, 2, WIDTH, INNER) / 6, "out": normal(2, INNER, WIDTH) / 8}

    def fn(p, x):
        return jnp.sum(jnp.tanh(jax.lax.ragged_dot(x, p["experts"], sizes)) @ p["out"])

    original_rules = (fp8jax.Rule("out", "bf16"), fp8jax.Rule("exp.*", "te_current"), "coat")
    suggestion = fp8jax.suggest(fn, original_rules, params, x)
    assert suggestion.rules == (fp8jax.Rule("experts", "deepseek"), *original_rules)
    assert set(suggestion.reasons) == {"experts"}
    rows = fp8jax.transform(fn, suggestion.rules).explain(params, x).rows
    assert [row.path for row in rows if row.is_product and row.is_quantized] == ["experts"]


def test_wrong_arguments_say_what_to_give():
    step = jax.jit(fp8jax.telemetry(lambda x, w: fp8jax.linear(x, w, recipe="te_current")))
    with pytest.raises(TypeError, match=r"the second result .* got tuple"):
        fp8jax.find_faults(step(X, PARAMS["block0"]["up"]))
    with pytest.raises(TypeError, match=r"call it outside of jax\.jit"):
        jax.eval_shape(lambda: fp8jax.find_faults(step(X, PARAMS["block0"]["up"])[1]))
    with pytest.raises(TypeError, match=r"already transformed"):
        fp8jax.suggest(fp8jax.transform(loss_fn, "te_current"), "te_current", PARAMS, X)
    model = fp8jax.nnx.quantize(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), "te_current")
    with pytest.raises(ValueError, match=r"fp8jax\.nnx\.unquantize\(model\)"):
        fp8jax.nnx.suggest(lambda model, x: jnp.mean(model(x)), "te_current", model, X)


def test_nan_is_reported_and_not_mended():
    x = X.at[3, 5].set(jnp.nan)
    suggestion = fp8jax.suggest(loss_fn, "te_current", PARAMS, x)
    assert suggestion.rules == ("te_current",)
    assert ("block0/up", "x", "nonfinite") in [(f.layer, f.role, f.statistic) for f in suggestion.unmended]
    assert "# no rule mends block0/up x" in str(suggestion)


def test_nan_next_to_its_cause_is_first():
    statistics = {
        "a": {"dy": {"nonfinite": np.float32(0.01)}, "x": {"nonfinite": np.float32(1)}},
        "b": {"x": {"nonfinite": np.float32(0.02)}, "w": {"saturated": np.float32(1)}},
    }
    faults = [(fault.layer, fault.role) for fault in fp8jax.find_faults(statistics)]
    assert faults == [("b", "x"), ("a", "x"), ("a", "dy"), ("b", "w")]


def test_products_that_gain_nothing():
    # Products this small are slower in 8 bits on each GPU.
    with choice.target(capability=90):
        suggestion = fp8jax.suggest(lambda p, x: x @ p["up+"], "te_current", {"up+": PARAMS["block0"]["up"]}, X)
    assert suggestion.rules == (fp8jax.Rule(r"up\+", None), "te_current")
    assert suggestion.reasons == {r"up\+": "(32, 64) gains nothing in 8 bits at 64 tokens"}
    assert suggestion.loss_before != suggestion.loss_before


def test_nnx_models():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(WIDTH, INNER, rngs=rngs), nnx.tanh, nnx.Linear(INNER, WIDTH, rngs=rngs))
    model.layers[0].kernel[...] = model.layers[0].kernel[...].at[0, 0].set(1e7)
    loss = lambda model, x: jnp.mean(jnp.square(model(x) - x))  # noqa: E731
    suggestion = fp8jax.nnx.suggest(loss, "int8_block", model, X)
    assert suggestion.rules == (fp8jax.Rule("layers/0", None), "int8_block")
    quantized = fp8jax.nnx.quantize(model, suggestion.rules)
    assert float(jax.jit(loss)(quantized, X)) == pytest.approx(suggestion.loss_after, rel=1e-4)
