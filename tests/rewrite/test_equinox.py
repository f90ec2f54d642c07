"""`fp8jax.filter_transform`: functions of Equinox modules that contain numbers and functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from tests.programs import count, dots, transposed
from tests.rows import slow

eqx = pytest.importorskip("equinox")
WIDTH, INNER = 32, 48
FP8 = ("float8_e4m3fn", "float8_e4m3fn")
X = jax.random.normal(jax.random.key(2), (8, WIDTH))


class Net(eqx.Module):
    norm: eqx.nn.RMSNorm
    layers: list[eqx.nn.Linear]
    dropout: eqx.nn.Dropout
    act: object
    factor: float

    def __init__(self, factor=2.0, act=jnp.tanh):
        first, second = jax.random.split(jax.random.key(0))
        self.norm = eqx.nn.RMSNorm(WIDTH)
        self.layers = [eqx.nn.Linear(WIDTH, INNER, key=first), eqx.nn.Linear(INNER, WIDTH, key=second)]
        self.dropout, self.act, self.factor = eqx.nn.Dropout(0.5, inference=True), act, factor

    def __call__(self, x):
        x = self.norm(x)
        if self.factor > 1:
            x = self.factor * x
        return self.dropout(self.layers[1](self.act(self.layers[0](x))))


def loss(model, x):
    return jnp.mean((jax.vmap(model)(x) - x) ** 2)


@pytest.mark.parametrize("recipe", [slow("te_current"), "coat"])
def test_equinox_differentiates_it_and_its_values_are_those_of_a_plain_function(recipe):
    model, fast = Net(), fp8jax.filter_transform(loss, recipe)
    value, grads = eqx.filter_value_and_grad(fast)(model, X)
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    by_transform = fp8jax.transform(lambda params, x: loss(eqx.combine(params, rest), x), recipe)
    expected, by_hand = jax.jit(jax.value_and_grad(by_transform))(params, X)
    inside, again = eqx.filter_jit(eqx.filter_value_and_grad(fast))(model, X)
    np.testing.assert_array_equal([value, inside], [expected, expected])
    for each in (grads, again):
        assert jax.tree.structure(each) == jax.tree.structure(by_hand)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), each, by_hand)
    assert dots(lambda p: fast(eqx.combine(p, rest), X), params).count(FP8) == 2


def test_numbers_and_functions_are_settings():
    fast = fp8jax.filter_transform(loss, "te_current")
    values = [float(fast(Net(*arguments), X)) for arguments in ((2.0,), (1.0,), (2.0, jnp.sin), (2.0,))]
    assert len(set(values)) == 3
    assert values[0] == values[3]
    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        fp8jax.transform(loss, "te_current")(Net(), X)
    note = next(note for note in raised.value.__notes__ if "fp8jax" in note)
    assert "traced 0.5 at [0].dropout.p as an array" in note
    assert "use fp8jax.filter_transform for numbers" in note
    repeat = lambda p, x, n: jnp.tanh(x @ p["w"]) if n > 1 else x  # noqa: E731
    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        fp8jax.transform(repeat, "te_current")({"w": jnp.ones((WIDTH, WIDTH))}, X, 2)
    note = "fp8jax.transform traced 2 at [2] as an array, as jax.jit does. To keep it static, use static= for arguments"
    assert note in raised.value.__notes__
    with pytest.raises(TypeError, match="dot_general requires") as raised:  # by shapes, not by count
        fp8jax.transform(lambda p, x, n: x[:, 1:] @ p["w"] * n, "te_current")({"w": jnp.ones((WIDTH, WIDTH))}, X, 2)
    assert not any("fp8jax" in note for note in raised.value.__notes__)


def test_rules_go_by_the_paths_of_fields():
    rules = [fp8jax.Rule("layers/0", None), "te_current"]
    explained = fp8jax.filter_transform(lambda x, model: loss(model, x), rules, params=1).explain(X, Net())
    assert [e.path for e in explained.skipped if e.is_product] == ["layers/0"]
    assert [e.path for e in explained.quantized] == ["layers/1"]
    with pytest.raises(TypeError, match="expects a function"):
        fp8jax.filter_transform(3, "te_current")


WEIGHTS = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER), "bias": (INNER,)}


def mapped(p, x):
    """A gated MLP of one token under `jax.vmap`, with matrices on the left, as in Equinox."""

    def one(x):
        return p["down"] @ (jax.nn.silu(p["gate"] @ x + p["bias"]) * (p["up"] @ x))

    return jnp.mean((x + jax.vmap(jax.vmap(one))(x)) ** 2)


def at_once(p, x):
    """The same for all tokens."""
    return jnp.mean((x + (jax.nn.silu(x @ p["gate"].T + p["bias"]) * (x @ p["up"].T)) @ p["down"].T) ** 2)


def test_matrices_on_the_left_of_mapped_vectors_are_products_of_all_tokens():
    """No activation or cotangent is transposed, so facts about them are not lost; with bias."""
    keys = jax.random.split(jax.random.key(0), len(WEIGHTS))
    p = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, WEIGHTS.items(), strict=True)}
    x = jnp.stack([X, X[::-1]])
    results = []
    for f in (mapped, at_once):
        step = jax.value_and_grad(fp8jax.transform(f, "coat"))
        assert not [axes for axes in transposed(step, p, x) if len(axes) > 2]
        results.append((*jax.jit(step)(p, x), count(step, "reduce_sum", p, x)))
    (value, grads, sums), (want, expected, fewest) = results
    assert sums == fewest, "a bias is summed in the pass over its product's cotangent"
    np.testing.assert_allclose(value, want, rtol=1e-6)
    for name in WEIGHTS:
        np.testing.assert_allclose(grads[name], expected[name], rtol=1e-5, atol=1e-5)
