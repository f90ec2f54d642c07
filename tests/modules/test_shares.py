"""The share of FLOPs that stay in 16 bits: what counts, and when each interface warns."""

import functools
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import fp8jax
from tests.modules.architectures import Gemma, Gpt2, MiniGPT, Nanodo

WIDTH, INNER, OUT = 32, 48, 96
X, KEY = jnp.ones((8, WIDTH)), jax.random.key(0)
P = {"up": jnp.ones((WIDTH, INNER)), "cut": jnp.ones((INNER, OUT))}


class Nnx(nnx.Module):
    """A layer, and a matrix computed from a parameter."""

    def __init__(self, out: int = OUT) -> None:
        self.up = nnx.Linear(WIDTH, INNER, use_bias=False, rngs=nnx.Rngs(0))
        self.cut = nnx.Param(jnp.ones((INNER, out)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(self.up(x)) @ jnp.maximum(self.cut[...], 0)) ** 2)


class Linen(nn.Module):
    out: int = OUT

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.tanh(nn.Dense(INNER, use_bias=False, name="up")(x))
        return jnp.mean((y @ jnp.maximum(self.param("cut", nn.initializers.ones, (INNER, self.out)), 0)) ** 2)


def loss(p, x):
    return jnp.mean((jnp.tanh(x @ p["up"]) @ jnp.maximum(p["cut"], 0)) ** 2)


def of_nnx(out=OUT):
    model = fp8jax.nnx.quantize(Nnx(out), "coat")
    return (
        (lambda: model(X)),
        (lambda: nnx.grad(lambda m, x: m(x))(model, X)),
        functools.partial(nnx.jit(lambda m, x: m(x)), model, X),
    )


def of_linen(out=OUT):
    model = fp8jax.linen.quantize(Linen(out), "coat")
    params = Linen(out).init(KEY, X)
    jitted = functools.partial(jax.jit(model.apply), params, X)
    return (lambda: model.apply(params, X)), (lambda: jax.grad(model.apply)(params, X)), jitted


def of_transform(out=OUT):
    fast, p = fp8jax.transform(loss, "coat"), P | {"cut": jnp.ones((INNER, out))}
    return (lambda: fast(p, X)), (lambda: jax.grad(fast)(p, X)), functools.partial(jax.jit(fast), p, X)


def unquantized_warnings(*calls):
    """Returns the `UnquantizedWarning`s of calls."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls:
            call()
    return [w for w in caught if w.category is fp8jax.UnquantizedWarning]


@pytest.mark.parametrize("make", [of_nnx, of_linen, of_transform])
def test_each_model_says_once_what_share_stays_in_16_bits_and_why(make):
    share = INNER * OUT / (INNER * OUT + WIDTH * INNER)
    for _ in range(2):  # the second model is another one, of the same class
        call, gradient, jitted = make()
        (warned,) = unquantized_warnings(call, gradient, jitted, call, gradient)
        assert str(warned.message).startswith(f"{100 * share:.2g} % of the FLOPs of matmuls with parameters")
        assert re.search(
            r"1 matmul .*data are multiplied by a value computed from cut; .*test_shares.py:\d+ ", str(warned.message)
        )
        assert warned.filename == __file__
    assert not unquantized_warnings(*make(3)[:2])  # less than a tenth


def test_explain_prints_the_share_and_says_nothing_else():
    texts = []
    for explained in (
        lambda: fp8jax.explain(Nnx(), "coat", X),
        lambda: fp8jax.explain(Linen(), "coat", X),
        lambda: fp8jax.explain(fp8jax.nnx.quantize(Nnx(), "coat"), X),
        lambda: fp8jax.transform(loss, "coat").explain(P, X),
    ):
        assert not unquantized_warnings(lambda explained=explained: texts.append(" ".join(str(explained()).split())))
        assert "75 % of the FLOPs of matmuls with parameters stay in 16 bits, although" in texts[-1]
    model = fp8jax.nnx.quantize(Nnx(), "coat")
    fp8jax.explain(model, X)
    assert len(unquantized_warnings(lambda: model(X))) == 1  # explain has not replaced the warning


def test_what_rules_and_heads_leave_and_attention_computes_is_not_counted():
    p = P | {"embed": jnp.ones((WIDTH, OUT)), "out": jnp.ones((INNER, 8 * OUT)), "up2": jnp.ones((INNER, INNER))}

    def model(p, x):
        h = jnp.tanh(x @ p["up"]) @ p["up2"]
        h = jax.nn.softmax(h @ h.T) @ h + x @ jnp.maximum(p["embed"], 0)[:, :INNER]
        return -jnp.mean(jax.nn.log_softmax(h @ (p["out"] / jnp.linalg.norm(p["out"], axis=0)))[:, 0])

    assert not unquantized_warnings(lambda: fp8jax.transform(model, "coat")(p, X))
    rules = [fp8jax.Rule("cut", None), "coat"]
    assert not unquantized_warnings(lambda: fp8jax.transform(loss, rules)(P, X))
    assert not unquantized_warnings(lambda: fp8jax.transform(loss, fp8jax.Rule("up", "coat"))(P, X))
    with pytest.warns(fp8jax.UnquantizedWarning, match="data are multiplied by a value computed from cut"):
        fp8jax.transform(loss, fp8jax.Rule("up|cut", "coat"))(P, X)


def test_heads_with_their_loss_and_operations_of_a_recipe_are_not_counted():
    labels = jnp.zeros(len(X), jnp.int32)

    def entropy(p, x):
        return jnp.mean(fp8jax.linear_cross_entropy(jnp.tanh(x @ p["up"]), p["cut"], labels))

    def own(p, x):
        return jnp.mean(fp8jax.linear(jnp.tanh(x @ p["up"]), p["cut"], recipe="te_current") ** 2)

    for fn in (entropy, own):
        assert not fp8jax.transform(fn, "coat").explain(P, X).unquantized_note
    assert fp8jax.transform(lambda p, x: jnp.mean(plain(x @ p["up"], p["cut"])), "coat").explain(P, X).unquantized_note


@jax.custom_vjp
def plain(x, w):
    return x @ w


plain.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, dy: (dy @ saved[1].T, saved[0].T @ dy))


def test_products_in_loops_count_for_each_turn():
    def looped(p, x):
        return jnp.mean(jax.lax.scan(lambda h, _: (jnp.tanh(h @ jnp.maximum(p["w"], 0)), None), x @ p["w"], None, 5)[0])

    explained = fp8jax.transform(looped, "coat").explain({"w": jnp.ones((WIDTH, WIDTH))}, X)
    assert f"{100 * 5 / 6:.2g} % of the FLOPs" in explained.unquantized_note
    per_turn = 2 * X.shape[0] * WIDTH * WIDTH
    assert [e.flops for e in explained.entries if e.is_product] == [per_turn, 5 * per_turn]


@pytest.mark.parametrize("make", [MiniGPT, Nanodo, Gpt2, Gemma])
def test_ordinary_models_say_nothing(make):
    if make is MiniGPT:
        model = fp8jax.nnx.quantize(MiniGPT(rngs=nnx.Rngs(0)), "coat")
        assert not unquantized_warnings(lambda: jax.eval_shape(lambda t: model(t), jnp.zeros((2, 8), jnp.int32)))
        return
    model, tokens = fp8jax.linen.quantize(make(), "coat"), jnp.zeros((2, 8), jnp.int32)
    sample = tokens if make is not Gemma else jnp.ones((2, 8, 64))
    params = jax.eval_shape(make().init, KEY, sample)
    assert not unquantized_warnings(lambda: jax.eval_shape(model.apply, params, sample))


class ConvNet(nn.Module):
    """A network in which convolutions have most of the FLOPs."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(64, (3, 3), name="conv")(x).reshape(len(x), -1, 64)
        return nn.Dense(64)(nn.Dense(256)(x))


def test_convolutions_are_counted_and_not_warned_of():
    x = jnp.ones((2, 8, 8, 32))
    model = fp8jax.linen.quantize(ConvNet(), "coat")
    params = jax.tree.map(lambda s: jnp.zeros(s.shape), jax.eval_shape(ConvNet().init, KEY, x))
    assert not unquantized_warnings(lambda: jax.eval_shape(model.apply, params, x))
    hidden, conv, head = 64 * 256, 3 * 3 * 32 * 64, 256 * 64  # multiplications for each pixel
    expected = f"({100 * hidden / (hidden + conv + head):.3g} % of the FLOPs of matmuls and convolutions"
    transformed = fp8jax.transform(lambda p, x: ConvNet().apply(p, x), "coat")
    for explained in (fp8jax.explain(ConvNet(), "coat", x), transformed.explain(params, x)):
        assert expected in str(explained)
        assert not explained.unquantized_note
        (row,) = [row for row in explained.rows if row.path.endswith("conv")]
        assert row.reason == "convolutions are not quantized"
