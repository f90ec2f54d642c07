"""Which matmuls gain from 8 bits, by their shapes and a table of rates."""

import dataclasses
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8jax
from fp8jax.modules import explain
from fp8jax.ops.dispatch import choice
from fp8jax.rewrite import cost_model
from tests.rows import slow

# In round figures what was measured on an H100.
RATES = cost_model.Rates("H100", 735e12, 1450e12, 1330e12, 2.9e12, 3.2e-6)
SHAPES = fp8jax.recipes.for_shapes("te_current")


@pytest.fixture
def one_known_device(monkeypatch, tmp_path):
    """The table of rates has one device."""
    path = tmp_path / "rates.json"
    path.write_text(json.dumps([RATES._asdict()]))
    monkeypatch.setattr(cost_model, "RATES_PATH", path)
    cost_model.load_rates.cache_clear()
    yield
    cost_model.load_rates.cache_clear()


def layer(p, x):
    """The linear layers of a Llama block, with grouped queries."""

    def norm(x):
        h = x.astype(jnp.float32)
        return (h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)).astype(x.dtype)

    w = {name: a.astype(x.dtype) for name, a in p.items()}
    y = norm(x)
    q, k, v = (y @ w[name] for name in "qkv")
    x = x + jnp.tanh(q * jnp.sum(k, -1, keepdims=True) * jnp.sum(v, -1, keepdims=True)) @ w["o"]
    y = norm(x)
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def explained(recipe, dim, inner, tokens, kv=256):
    shapes = {"q": (dim, dim), "k": (dim, kv), "v": (dim, kv), "o": (dim, dim)}
    shapes |= {"gate": (dim, inner), "up": (dim, inner), "down": (inner, dim)}
    p = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    with choice.target(capability=90):
        return fp8jax.transform(layer, recipe).explain(p, jax.ShapeDtypeStruct((1, tokens, dim), jnp.bfloat16))


def quantized_paths(explanation):
    return {entry.path for entry in explanation.quantized if entry.is_product}


def test_what_is_small_is_left_in_16_bits_and_told(one_known_device):
    """Small square matmuls whose input does not come from a norm are slower, and all are at few tokens. With grouped
    queries, k and v alone are slower, and q gains more.
    """
    text = explained(SHAPES, 2048, 5632, 16384)
    assert quantized_paths(text) == {*"qkvo", "gate", "up", "down"}
    assert "; gains about " in next(
        entry.reason for entry in text.quantized if entry.path == "down" and entry.is_product
    )
    assert " us with q, v" in next(entry.reason for entry in text.quantized if entry.path == "k")
    small = explained(SHAPES, 1024, 4096, 16384, kv=1024)
    assert quantized_paths(small) == {*"qkv", "gate", "up", "down"}
    assert "gains nothing at 16,384 tokens: 53 us slower in 8 bits" in str(small)
    none = explained(SHAPES, 1024, 4096, 1024, kv=1024)
    assert quantized_paths(none) == set()
    assert "estimated for an H100: 8 bits save about 0 ms per step in 0 matmuls" in str(none)


def test_of_other_recipes_it_is_told_what_would_be_better_left(one_known_device):
    text = explained("te_current", 1024, 4096, 16384, kv=1024)
    assert len(quantized_paths(text)) == 7
    assert ". o gains nothing at 16,384 tokens: fp8jax.recipes.for_shapes(recipe)" in str(text)
    total = sum(entry.gain * entry.runs_per_step for entry in text.entries if entry.gain is not None)
    assert f"8 bits save about {1e3 * total:.2g} ms per step in 7 matmuls. A CPU has no" in str(text)
    assert "gains nothing" not in str(explained("te_current", 2048, 5632, 16384))
    assert "8 bits cost about " in str(explained("te_current", 1024, 4096, 128))


def test_what_each_product_gains_is_told_less_its_part_of_the_codes(one_known_device):
    linear = fp8jax.recipes.te_current().linear
    entries = {entry.path: entry for entry in explained("te_current", 1024, 4096, 16384).entries if entry.is_product}
    for path, inputs, outputs, producer, readers in (
        ("q", 1024, 1024, "norm", 3), ("k", 1024, 256, "norm", 3), ("gate", 1024, 4096, "norm", 2),
        ("down", 4096, 1024, "activation", 1), ("o", 1024, 1024, "", 1),
    ):  # fmt: skip
        codes = cost_model.quantization_cost(16384, inputs, linear, RATES, producer=producer) / readers
        expected = cost_model.estimate_gain(16384, inputs, outputs, linear, RATES) - codes
        assert entries[path].gain == pytest.approx(expected), path
        assert (entries[path].runs_per_step, entries[path].tokens) == (1, 16384)


def test_those_that_read_an_array_are_decided_together_and_loops_and_stacks_are_known(one_known_device):
    def both(p, x):
        h = jnp.tanh(x)
        return jnp.sum(h @ p["wide"].astype(x.dtype), -1) + jnp.sum(h @ p["thin"].astype(x.dtype), -1)

    def looped(p, x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ p["w"].astype(x.dtype)), None), x, length=3)[0]

    def stacked(p, x):
        return jnp.einsum("etd,edf->etf", x, p["w"].astype(x.dtype))

    def explain_shapes(fn, recipe, x, **shapes):
        p = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        with choice.target(capability=90):
            return fp8jax.transform(fn, recipe).explain(p, jax.ShapeDtypeStruct(x, jnp.bfloat16))

    wide = explain_shapes(both, SHAPES, (1, 16384, 2048), wide=(2048, 8192), thin=(2048, 128))
    assert quantized_paths(wide) == {"wide", "thin"}
    alone = [fp8jax.Rule("wide", None), fp8jax.Rule(".*", SHAPES)]
    assert quantized_paths(explain_shapes(both, alone, (1, 16384, 2048), wide=(2048, 8192), thin=(2048, 128))) == set()
    none = explain_shapes(both, SHAPES, (1, 512, 2048), wide=(2048, 256), thin=(2048, 128))
    assert quantized_paths(none) == set()
    assert " us with thin slower in 8 bits" in next(entry.reason for entry in none.entries if entry.path == "wide")
    # Codes that another product needs in any case cost nothing.
    x, shapes = (1, 8192, 1024), {"wide": (1024, 4096), "thin": (1024, 128)}
    assert quantized_paths(explain_shapes(both, SHAPES, x, **shapes)) == set()
    assert quantized_paths(
        explain_shapes(both, [fp8jax.Rule("thin", "te_current"), fp8jax.Rule(".*", SHAPES)], x, **shapes)
    ) == {*shapes}
    assert (
        quantized_paths(explain_shapes(both, [fp8jax.Rule("thin", None), fp8jax.Rule(".*", SHAPES)], x, **shapes))
        == set()
    )
    (loop,) = (
        entry
        for entry in explain_shapes(looped, "te_current", (1, 16384, 2048), w=(2048, 2048)).entries
        if entry.is_product
    )
    assert loop.runs_per_step == 3
    gained = [entry.gain for entry in explain_shapes(stacked, "te_current", (4, 4096, 512), w=(4, 512, 512)).entries]
    assert gained
    assert not any(gained)


def test_a_device_without_rates_is_taken_for_an_h100(one_known_device):
    p = {name: jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for name in ("q", "k", "v", "o", "gate", "up", "down")}
    text = fp8jax.transform(layer, SHAPES).explain(p, jax.ShapeDtypeStruct((1, 16384, 1024), jnp.bfloat16))
    assert quantized_paths(text) == {*"qkv", "gate", "up", "down"}
    assert "estimated for an H100 (no measurements for this device): 8 bits" in str(text)
    assert cost_model.current_rates() == (RATES, True)
    with choice.target(capability=90):
        assert cost_model.current_rates() == (RATES, False)


def test_a_gain_is_that_of_the_products_less_bytes_and_launches():
    linear = fp8jax.recipes.te_current().linear
    free = RATES._replace(memory=1e30, launch=0.0)
    products = 6 * 4096.0**3 * (1 / 735e12 - (1 / 1450e12 + 2 / 1330e12) / 3)
    assert cost_model.estimate_gain(4096, 4096, 4096, linear, free) == pytest.approx(products)
    assert cost_model.estimate_gain(1, 1, 1, linear, free._replace(launch=1e-6)) == pytest.approx(-8e-6, rel=1e-6)
    slow = RATES._replace(sixteen=1e30, fast=1e30, promoted=1e30, launch=0.0)
    # 14 bytes a weight and 6 an element of the result; 2.2 or 8 of the input, once for all that read it.
    assert cost_model.estimate_gain(100, 10, 7, linear, slow) == pytest.approx(-(14 * 70 + 6 * 700) / 2.9e12)
    assert cost_model.estimate_gain(100, 10, 7, linear, slow, has_bias=True) == pytest.approx(
        -(14 * 70 + 2 * 700) / 2.9e12
    )
    for producer, each in (("norm", -13.8), ("activation", -2.8), ("", 8)):
        assert cost_model.quantization_cost(100, 10, linear, slow, producer=producer) == pytest.approx(
            each * 1000 / 2.9e12
        )
    assert cost_model.quantization_cost(100, 10, linear, RATES, producer="") == pytest.approx(
        8 * 1000 / 2.9e12 + 6.4e-6
    )
    # Two-level scales of inputs and gradients do not need the amax of the tensor first.
    assert cost_model.estimate_gain(100, 10, 7, fp8jax.recipes.moss().linear, slow) == pytest.approx(
        -(14 * 70 + 4 * 700) / 2.9e12
    )
    assert cost_model.quantization_cost(100, 10, fp8jax.recipes.moss().linear, slow, producer="") == pytest.approx(
        6 * 1000 / 2.9e12
    )
    for other in ("deepseek", "switchback", "jetfire"):  # groups, int8
        assert cost_model.estimate_gain(100, 10, 7, fp8jax.recipes.get(other).linear, slow) is None


def test_tokens_are_those_of_a_device(one_known_device):
    """Eight devices that share 16,384 tokens have 2,048 each; at this width nothing gains."""
    devices = np.array(jax.devices()[:8])
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.sharding.Mesh(devices, ("data",), axis_types=(kind,))
        where = jax.NamedSharding(mesh, jax.P(None, "data"))
        with jax.set_mesh(mesh), choice.target(capability=90):
            p = {
                name: jax.ShapeDtypeStruct(
                    (1024, 4096) if name in ("gate", "up") else (4096, 1024) if name == "down" else (1024, 1024),
                    jnp.float32,
                )
                for name in ("q", "k", "v", "o", "gate", "up", "down")
            }
            x = jax.ShapeDtypeStruct((1, 16384, 1024), jnp.bfloat16, sharding=where)
            assert "gains nothing at 2,048 tokens" in str(fp8jax.transform(layer, SHAPES).explain(p, x)), kind


def test_products_that_are_left_are_those_as_written(one_known_device):
    p = {name: jnp.ones((64, 64)) for name in ("q", "k", "v", "o", "gate", "up", "down")}
    x = jax.random.normal(jax.random.key(0), (1, 8, 64), jnp.bfloat16)
    fast = fp8jax.transform(layer, SHAPES)
    assert "f8_" not in str(jax.make_jaxpr(lambda p, x: fast(p, x))(p, x))
    np.testing.assert_array_equal(fast(p, x), jax.jit(layer)(p, x))


class Block(nnx.Module):
    """An MLP after a norm, and a square projection without a norm."""

    def __init__(self, dim, rngs):
        self.norm = nnx.RMSNorm(dim, rngs=rngs)
        self.up = nnx.Linear(dim, 4 * dim, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.proj = nnx.Linear(dim, dim, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        x = x + self.down(jax.nn.silu(self.up(self.norm(x))))
        return x + self.proj(jnp.tanh(x)) * jnp.bfloat16(0.5)


class LinenBlock(nn.Module):
    """The same in Linen."""

    dim: int

    @nn.compact
    def __call__(self, x):
        dense = lambda n, name: nn.Dense(n, use_bias=False, dtype=jnp.bfloat16, name=name)  # noqa: E731
        x = x + dense(self.dim, "down")(jax.nn.silu(dense(4 * self.dim, "up")(nn.RMSNorm(name="norm")(x))))
        return x + dense(self.dim, "proj")(jnp.tanh(x)) * jnp.bfloat16(0.5)


class Biased(nnx.Module):
    """A projection as in attention."""

    def __init__(self, dim, rngs, bias):
        self.proj = nnx.Linear(dim, dim, use_bias=bias, dtype=jnp.bfloat16, rngs=rngs)
        self.up = nnx.Linear(dim, 4 * dim, use_bias=bias, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, use_bias=bias, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x + jnp.tanh(self.proj(x)))))


def test_a_bias_counts(one_known_device, monkeypatch):
    """Its gradient is part of the pass that computes codes: 4 bytes per element of the result."""
    gained = {}
    monkeypatch.setattr(explain, "inspect_program", lambda *args: None)
    for bias in (False, True):
        model = fp8jax.nnx.quantize(nnx.eval_shape(lambda bias=bias: Biased(512, nnx.Rngs(0), bias)), "te_current")
        report = fp8jax.explain(model, jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16))
        gained[bias] = {layer.path: layer.gain for layer in report.layers}
    for path, outputs in (("proj", 512), ("up", 2048)):
        assert gained[True][path] - gained[False][path] == pytest.approx(4 * 4096 * outputs / 2.9e12)


@pytest.mark.parametrize("recipe", [slow("te_current"), "coat", "te_delayed"])
def test_flax_models_decide_by_layer(one_known_device, recipe):
    """At the tokens of a call. In models with states, layers in 16 bits need none."""
    expected = fp8jax.recipes.for_shapes(recipe)
    x = jax.ShapeDtypeStruct((16384, 1024), jnp.bfloat16)
    model = nnx.eval_shape(lambda: Block(1024, nnx.Rngs(0)))
    for report in (fp8jax.explain(model, expected, x), fp8jax.explain(LinenBlock(1024), expected, x)):
        # An activation computes no codes with scales of earlier steps.
        assert {layer.path for layer in report.quantized_layers} == (
            {"up"} if recipe == "te_delayed" else {"up", "down"}
        )
        assert "gains nothing at 16,384 tokens" in next(
            each.reason for each in report.skipped_layers if each.path == "proj"
        )
    small = Block(32, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (8, 32), jnp.bfloat16)
    np.testing.assert_array_equal(fp8jax.nnx.quantize(small, expected)(x), small(x))
    linen = LinenBlock(32)
    quantized = fp8jax.linen.quantize(linen, expected)
    variables = quantized.init(jax.random.key(0), x)
    np.testing.assert_array_equal(quantized.apply(variables, x), linen.apply({"params": variables["params"]}, x))


def test_layers_that_are_left_advance_no_state(monkeypatch):
    """Square layers stay in 16 bits; histories of the others advance, and all weights are trained."""
    monkeypatch.setattr(
        cost_model, "estimate_gain", lambda tokens, inputs, outputs, *_, **__: 1.0 if inputs != outputs else -1.0
    )
    model = fp8jax.nnx.quantize(Block(32, nnx.Rngs(0)), fp8jax.recipes.for_shapes("te_delayed"))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (8, 32), jnp.bfloat16)
    wrt = nnx.Any(nnx.Param, fp8jax.nnx.GradientStatistic)
    loss = lambda model: jnp.mean(model(x).astype(jnp.float32) ** 2)  # noqa: E731
    before = model.proj.kernel[...]
    for _ in range(2):
        grads = nnx.grad(loss, argnums=nnx.DiffState(0, wrt))(model)
        optimizer.update(model, fp8jax.nnx.advance_scaling(model, grads))
    recorded = [np.count_nonzero(layer.dot_general.x[...]) for layer in (model.up, model.down, model.proj)]
    assert recorded == [2, 2, 0]
    assert np.all(model.proj.kernel[...] != before)


def test_auto_runs_where_nothing_has_8_bit_products(monkeypatch):
    """On a CPU, "auto" means 8-bit optimizer states: the model is unchanged, and `explain` gives the reason."""
    model = Block(32, nnx.Rngs(0))
    x = jnp.ones((8, 32), jnp.bfloat16)
    np.testing.assert_array_equal(fp8jax.nnx.quantize(model, "auto")(x), model(x))
    assert "has no 8-bit products for this device" in str(fp8jax.explain(model, "auto", x))
    p = {name: jnp.ones((8, 8)) for name in ("q", "k", "v", "o", "gate", "up", "down")}
    text = fp8jax.transform(layer, "auto").explain(p, jnp.ones((1, 8, 8)))
    assert "has no 8-bit products for this device" in str(text)
    assert fp8jax.recipes.get("auto") == fp8jax.recipes.for_shapes(fp8jax.recipes.for_device(0))
    monkeypatch.setattr(fp8jax.recipes, "for_device", lambda capability=None: fp8jax.recipes.fast())
    assert fp8jax.recipes.get("auto").linear == dataclasses.replace(
        fp8jax.recipes.fast().linear, skip_unprofitable=True
    )


def test_settings_and_the_table():
    with pytest.raises(ValueError, match=r"linear\.skip_unprofitable must be True or False, got 'some'"):
        fp8jax.recipes.Linear(skip_unprofitable="some")
    with pytest.raises(TypeError, match="expects a Recipe"):
        fp8jax.recipes.for_shapes(fp8jax.recipes.te_current().linear)
    for entry in json.loads(cost_model.RATES_PATH.read_text()):
        assert set(cost_model.Rates._fields) <= set(entry)
        assert 1 < entry["fast"] / entry["sixteen"] < 3
        assert 1e-7 < entry["launch"] < 2e-5
