"""A preset's name is accepted wherever a recipe is. Other names raise an error with the fix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import fp8jax
from fp8jax import recipes
from fp8jax.modules import calls

X, W = jax.random.normal(jax.random.key(0), (8, 16)), jax.random.normal(jax.random.key(1), (16, 16))
ONE = jnp.ones(16)
TAKE = {
    "linear": ("deepseek", lambda r: fp8jax.linear(X, W, recipe=r)),
    "dot_general": ("deepseek", lambda r: fp8jax.dot_general(X, W, (((1,), (0,)), ((), ())), recipe=r)),
    "einsum": ("deepseek", lambda r: fp8jax.einsum("td,df->tf", X, W, recipe=r)),
    "quantize_weight": ("te_current", lambda r: fp8jax.quantize_weight(W, recipe=r).forward.codes),
    "init_scaling": ("te_delayed", lambda r: fp8jax.init_scaling(r).x),
    "scaled_linear": (
        "te_delayed",
        lambda r: fp8jax.scaled_linear(X, W, fp8jax.init_scaling(r), jnp.zeros(()), recipe=r)[0],
    ),
    "rms_norm": ("coat", lambda r: jax.grad(lambda x: fp8jax.rms_norm(x, ONE, recipe=r).sum())(X)),
    "layer_norm": ("coat_fast", lambda r: jax.grad(lambda x: fp8jax.layer_norm(x, ONE, ONE, recipe=r).sum())(X)),
    "glu": ("coat", lambda r: jax.grad(lambda x: fp8jax.glu(x, x, recipe=r).sum())(X)),
    "activation": ("coat", lambda r: jax.grad(lambda x: fp8jax.activation(x, recipe=r, activation="silu").sum())(X)),
    "norm_linear": ("coat", lambda r: fp8jax.norm_linear(X, ONE, (W,), recipe=r)[0]),
    "attention_output": ("coat", lambda r: fp8jax.attention_output(X.reshape(8, 2, 8), W, X, recipe=r)),
    "glu_linear": ("coat", lambda r: fp8jax.glu_linear(X, X, W, recipe=r)),
    "Rule": ("deepseek", lambda r: fp8jax.nnx.quantize(layer(), fp8jax.Rule(".*", r))(X)),
    "nnx.quantize": ("deepseek", lambda r: fp8jax.nnx.quantize(layer(), r)(X)),
    "linen.quantize": (
        "deepseek",
        lambda r: fp8jax.linen.quantize(nn.Dense(16), r).apply({"params": {"kernel": W, "bias": ONE}}, X),
    ),
    "make_dot_general_cls": (
        "deepseek",
        lambda r: nn.Dense(16, dot_general_cls=fp8jax.linen.make_dot_general_cls(r)).apply(
            {"params": {"kernel": W, "bias": ONE}}, X
        ),
    ),
}


def layer():
    return nnx.Linear(16, 16, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("take", TAKE)
def test_a_name_is_the_preset_and_a_preset_that_was_not_called_is_told_so(take):
    name, call = TAKE[take]
    np.testing.assert_array_equal(np.asarray(call(name)), np.asarray(call(recipes.get(name))))
    with pytest.raises(ValueError, match=r"unknown recipe 'te_curent'; use one of bf16, "):
        call("te_curent")
    with pytest.raises(
        TypeError, match=r"is a function that returns a recipe; call it, fp8jax.recipes.te_current\(\), or"
    ):
        call(recipes.te_current)
    with pytest.raises(
        TypeError,
        match=r"a recipe must be a fp8jax.Recipe, its part Linear or Context, or the name of .*, got 8|rules must be",
    ):
        call(8)


def test_explain_takes_names():
    report = fp8jax.explain(layer(), "te_current")
    assert [layer.linear for layer in report.quantized_layers] == [recipes.te_current().linear]
    with pytest.raises(TypeError, match="call it"):
        fp8jax.explain(layer(), recipes.coat)


def test_a_part_that_says_nothing_of_an_operation_is_refused():
    context, linear = recipes.coat().context, recipes.coat().linear
    with pytest.raises(TypeError, match="products need a Recipe or its part Linear, got Context"):
        fp8jax.linear(X, W, recipe=context)
    with pytest.raises(TypeError, match="norms and activations need a Recipe or its part Context, got Linear"):
        fp8jax.rms_norm(X, ONE, recipe=linear)
    with pytest.raises(TypeError, match=r"needs a full fp8jax\.Recipe, got Linear"):
        fp8jax.glu_linear(X, X, W, recipe=linear)
    with pytest.raises(TypeError, match="a rule expects a Recipe or its part Linear, got Context"):
        fp8jax.nnx.quantize(layer(), context)


@pytest.mark.parametrize(
    ("name", "shape", "is_matrix"),
    [
        *((name, (4, 4), True) for name in ("kernel", "w", "layers/up/w1", "embeds/kernel", "scalar")),
        *((name, (4, 4), False) for name in ("wte_embedding", "pos_table", "position", "token_types", "out_bias")),
        *((name, (4, 4), False) for name in ("ln_scale", "gamma", "beta1", "attention_mask", "layers/pos_embed")),
        ("w", (3, 1, 4), True),
        ("w", (1, 4), False),
        ("w", (4,), False),
        ("w", (4, 1, 1), False),
    ],
)
def test_matrices_are_told_by_name_and_shape(name, shape, is_matrix):
    assert calls.is_matrix(name, shape) == is_matrix


def test_what_is_no_model_is_told_what_takes_it():
    other = {kind: type("Mlp", (), {"__module__": f"{kind}.nn"})() for kind in ("equinox", "haiku")}
    for model, message in (
        (nnx.Linear, "f takes, not the class Linear; pass an instance"),
        ({}, "f takes, not dict; pass the model, not its parameters. Without Flax, use fp8jax"),
        (3, "f takes, not int. Without Flax, use fp8jax.transform"),
        (other["equinox"], "f takes, not Mlp, of Equinox; use fp8jax.filter_transform"),
        (other["haiku"], "f takes, not Mlp, of Haiku; use fp8jax.transform"),
    ):
        assert calls.wrong_model_message("f takes", model).startswith(message)


def test_a_module_of_the_other_flax_is_told_its_function():
    class Mine(nn.Dense):
        pass

    for call, message in (
        (lambda: fp8jax.nnx.quantize(Mine(8), "coat"), "not Mine, a module of Flax Linen; use fp8jax.linen.quantize"),
        (lambda: fp8jax.nnx.unquantize(nn.Dense(8)), "a module of Flax Linen; use fp8jax.linen.unquantize"),
        (
            lambda: fp8jax.nnx.lora(nn.Dense(8), rank=1, alpha=1, rngs=nnx.Rngs(0)),
            "Flax Linen; use fp8jax.lora.freeze",
        ),
        (lambda: fp8jax.linen.quantize(layer(), "coat"), "not Linear, a module of Flax NNX; use fp8jax.nnx.quantize"),
        (lambda: fp8jax.linen.unquantize(layer()), "a module of Flax NNX; use fp8jax.nnx.unquantize"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
