"""Models of custom classes: unrecognized layers are named, and layers of custom classes are quantized."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from tests.distance import relative
from tests.modules.architectures import FEEDFORWARD, LENGTH, VOCAB, WIDTH, Conv1D, Gemma, Gpt2
from tests.programs import dots
from tests.rows import slow

TE, DEEPSEEK = fp8jax.recipes.te_current(), fp8jax.recipes.deepseek()
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (2, 6, WIDTH))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH)))


def eight(fn, *args) -> int:
    return sum("8" in a and "8" in b for a, b in dots(fn, *args))


def eight_of(model, x) -> int:
    """Returns the number of 8-bit matmuls in a call of an NNX model."""
    graph, state = nnx.split(model)
    return eight(lambda state, x: nnx.merge(graph, state, copy=True)(x), state, x)


class Own(nnx.Module):
    """A layer as in Gemma's NNX models or MaxText's DenseGeneral: a custom class around one matrix."""

    def __init__(self, inner: int, outer: int, how: str, rngs: nnx.Rngs) -> None:
        self.kernel, self.how = nnx.Param(jax.random.normal(rngs.params(), (inner, outer)) / inner**0.5), how
        self.bias, self.calls = nnx.Param(jnp.zeros(outer)), nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        w, x = self.kernel[...].astype(jnp.bfloat16), x.astype(jnp.bfloat16)
        if self.how == "@":
            return x @ w + self.bias[...]
        if self.how == "einsum":
            return jnp.einsum("...d,df->...f", x, w)
        if self.how == "weight first":
            return jnp.moveaxis(jnp.tensordot(w, x, ((0,), (x.ndim - 1,))), 0, -1)
        return jax.lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))


class Model(nnx.Module):
    def __init__(self, style: str = "@") -> None:
        rngs = nnx.Rngs(0)
        self.known, self.own = nnx.Linear(WIDTH, WIDTH, rngs=rngs), Own(WIDTH, FEEDFORWARD, style, rngs)
        self.down, self.table_embedding = Own(FEEDFORWARD, WIDTH, style, rngs), nnx.Param(jnp.ones((99, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.own(self.known(x))))


def test_own_classes_are_known_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert eight_of(fp8jax.nnx.quantize(Model(), TE), X) == 3
        model = fp8jax.linen.quantize(Gemma(), TE)
        assert eight(model.apply, jax.eval_shape(model.init, KEY, X), X) == 3
        assert eight(fp8jax.linen.quantize(Conv1D(4), TE).apply, jax.eval_shape(Conv1D(4).init, KEY, X), X) == 1
    model = nnx.Sequential(Own(8, 8, "@", nnx.Rngs(0)), Own(8, 8, "@", nnx.Rngs(0)))
    assert eight_of(fp8jax.nnx.quantize(model, TE), jnp.ones((3, 8))) == 2


@pytest.mark.parametrize("style", ["@", slow("einsum"), "weight first", slow("dot_general")])
def test_layers_of_a_users_class_compute_as_a_linear_with_the_recipe(style):
    model = Model(style)
    quantized = fp8jax.nnx.quantize(model, DEEPSEEK)
    assert isinstance(quantized.own, Own)
    actual = quantized.own(X)
    # The parameter is quantized from all of its bits.
    w, x = model.own.kernel[...], X.astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(fp8jax.linear(x, w, recipe=DEEPSEEK), actual.dtype))
    assert quantized.own.calls[...] == 1
    jax.tree.map(
        np.testing.assert_array_equal, *(nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (quantized, model))
    )

    def loss(model):
        return jnp.mean(model(X).astype(jnp.float32) ** 2)

    actual, expected = (nnx.jit(nnx.grad(loss))(m) for m in (quantized, model))
    assert 0 < relative(actual["own"]["kernel"][...], expected["own"]["kernel"][...]) < 0.15
    report = fp8jax.explain(model, DEEPSEEK, X)
    assert sorted((layer.path, layer.kind) for layer in report.quantized_layers) == [
        ("down", "Own"),
        ("known", "Linear"),
        ("own", "Own"),
    ]
    assert sum(p.occurrences for p in report.program.traced if p.has_codes) == 9


@pytest.mark.parametrize(
    ("model", "x", "products"),
    [slow(Gemma(), X, 3), (Gpt2(), TOKENS, 2)],
    ids=["gemma", "gpt2"],
)
def test_layers_of_a_users_class_in_linen(model, x, products):
    variables = jax.jit(model.init)(KEY, x)
    quantized = fp8jax.linen.quantize(model, TE)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(quantized.init)(KEY, x), variables)

    def loss(model, variables):
        return jnp.mean(model.apply(variables, x).astype(jnp.float32) ** 2)

    assert eight(jax.grad(lambda v: loss(quantized, v)), variables) == 3 * products
    actual, expected = (jax.jit(jax.grad(lambda v, m=m: loss(m, v)))(variables) for m in (quantized, model))
    for a, b in zip(*(jax.tree.leaves(jax.device_get(g)) for g in (actual, expected)), strict=True):
        assert relative(a, b) < 0.25
    assert relative(actual, expected) > 0
    report = fp8jax.explain(model, TE, x)
    assert len(report.quantized_layers) == products
    assert report.notes == ()


def test_a_precision_that_a_class_asks_for_is_refused():
    class Exact(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((4, 4)))

        def __call__(self, x):
            return jnp.dot(x, self.w[...], precision="highest")

    with pytest.raises(ValueError, match="asks for precision"):
        fp8jax.nnx.quantize(Exact(), fp8jax.Rule(".*", TE))(jnp.ones((2, 4)))


EQUINOX = type("Linear", (), {"__module__": "equinox.nn._linear"})


@pytest.mark.parametrize("take", ["fp8jax.nnx.quantize", "fp8jax.linen.quantize", "explain"])
def test_what_is_no_model_of_flax_is_refused_with_what_to_do(take):
    function = {"fp8jax.nnx.quantize": fp8jax.nnx.quantize, "fp8jax.linen.quantize": fp8jax.linen.quantize}
    call = function.get(take, fp8jax.explain)
    do = "use fp8jax.transform(fn, rules) for any function of parameters, or call fp8jax.linear(x, w, recipe=...)"
    for model, message in (
        (EQUINOX(), "Linear, of Equinox; use fp8jax.filter_transform(loss, rules)"),
        (lambda x: x, f"function. Without Flax, {do}"),
        ({"w": 1}, f"dict; pass the model, not its parameters. Without Flax, {do}"),
        (nnx.Linear, "the class Linear; pass an instance"),
    ):
        with pytest.raises(TypeError, match=f"{take} expects an?.* module, not {re.escape(message)}"):
            call(model, TE)


def test_an_equinox_model_is_told_what_to_do():
    equinox = pytest.importorskip("equinox")
    with pytest.raises(TypeError, match=r"not MLP, of Equinox; use fp8jax\.filter_transform"):
        fp8jax.nnx.quantize(equinox.nn.MLP(2, 2, 2, 1, key=KEY), TE)
