"""Which products gain by 8 bits, by their shapes and a table of rates."""

import json

import jax
import jax.numpy as jnp
import pytest

import fp8jax
from fp8jax.ops import choice, gains

# In round figures what was measured on an H100.
RATES = gains.Rates("H100", 735e12, 1450e12, 1330e12, 2.9e12, 3.2e-6)
SHAPES = fp8jax.recipes.for_shapes("te_current")


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(gains, "table", lambda: (RATES,))


def layer(p, x):
    """The linear layers of a block of a Llama, with grouped queries."""

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


def taken(explanation):
    return {entry.path for entry in explanation.quantized if entry.product}


def test_what_is_small_is_left_in_16_bits_and_told(known):
    """As the figures of single layers on an H100 say: k and v lose, and so does a small square product of its own."""
    told = explained(SHAPES, 2048, 5632, 16384)
    assert taken(told) == {"q", "o", "gate", "up", "down"}
    assert "gains nothing at 16,384 tokens" in str(told)
    assert "; gains about " in next(entry.reason for entry in told.quantized if entry.path == "down" and entry.product)
    assert "o" not in taken(explained(SHAPES, 1024, 4096, 16384, kv=1024))
    assert taken(explained(SHAPES, 1024, 4096, 1024, kv=1024)) == set()
    assert len(taken(explained("te_current", 2048, 5632, 16384))) == 7


def test_without_rates_every_product_is_taken():
    told = explained(SHAPES, 2048, 5632, 16384) if not gains.table() else None
    if told is not None:
        assert len(taken(told)) == 7
        assert "no rates of this GPU are known" in str(told)
    assert gains.of_device() is None  # of a CPU


def test_a_gain_is_that_of_the_products_less_bytes_and_launches():
    linear = fp8jax.recipes.te_current().linear
    how = {"made": True, "readers": 1, "rates": RATES._replace(memory=1e30, launch=0.0)}
    products = 6 * 4096.0**3 * (1 / 735e12 - (1 / 1450e12 + 2 / 1330e12) / 3)
    assert gains.gain(4096, 4096, 4096, linear, **how) == pytest.approx(products)
    slow = how | {"rates": RATES._replace(sixteen=1e30, fast=1e30, promoted=1e30, launch=0.0)}
    # 14 bytes a weight, 6 an element of the result, and 2.2 or 8 of the input, in part.
    assert gains.gain(100, 10, 7, linear, **slow) == pytest.approx(-(14 * 70 + 6 * 700 + 2.2 * 1000) / 2.9e12)
    own = slow | {"made": False, "readers": 2}
    assert gains.gain(100, 10, 7, linear, **own) == pytest.approx(-(14 * 70 + 6 * 700 + 4 * 1000) / 2.9e12)
    assert gains.gain(100, 10, 7, fp8jax.recipes.deepseek().linear, **slow) is None


def test_products_that_are_left_are_those_as_written(known):
    p = {name: jnp.ones((64, 64)) for name in ("q", "k", "v", "o", "gate", "up", "down")}
    x = jax.random.normal(jax.random.key(0), (1, 8, 64), jnp.bfloat16)
    with choice.target(capability=90):
        fast = fp8jax.transform(layer, SHAPES)
        program = jax.make_jaxpr(lambda p, x: fast(p, x))(p, x)
        assert "f8_" not in str(program)


def test_settings_and_the_table():
    with pytest.raises(ValueError, match="select is 'all' or 'gains'"):
        fp8jax.recipes.Linear(select="some")
    with pytest.raises(TypeError, match="takes a whole recipe"):
        fp8jax.recipes.for_shapes(fp8jax.recipes.te_current().linear)
    for entry in json.loads(gains.TABLE.read_text()):
        assert set(gains.Rates._fields) <= set(entry)
        assert 1 < entry["fast"] / entry["sixteen"] < 3
        assert 1e-7 < entry["launch"] < 2e-5
