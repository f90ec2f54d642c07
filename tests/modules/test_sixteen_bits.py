"""Recipes without quantized matmuls: unchanged models in each framework, and LoRA on a quantized base."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import fp8jax

RECIPES = ("bf16", "coat_optimizer")
X = jax.random.normal(jax.random.key(0), (6, 32))
W = {
    "up": jax.random.normal(jax.random.key(1), (32, 48)) / 6,
    "down": jax.random.normal(jax.random.key(2), (48, 32)) / 6,
}


class Mlp(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm, self.up = nnx.RMSNorm(32, rngs=rngs), nnx.Linear(32, 48, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(48, 32, use_bias=False, rngs=rngs)
        self.up.kernel[...], self.down.kernel[...] = W["up"], W["down"]

    def __call__(self, x):
        return self.down(nnx.silu(self.up(self.norm(x))))


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.silu(nn.Dense(48, use_bias=False, name="up")(nn.RMSNorm()(x)))
        return nn.Dense(32, use_bias=False, name="down")(x)


def gradients(fn, *args):
    return jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(fn(*args))), argnums=(0, 1))(*args)


def of_nnx(recipe):
    model = Mlp() if recipe is None else fp8jax.nnx.quantize(Mlp(), recipe)
    graph, state = nnx.split(model)
    return gradients(lambda state, x: nnx.merge(graph, state)(x), state, X)


def of_linen(recipe):
    model = LinenMlp() if recipe is None else fp8jax.linen.quantize(LinenMlp(), recipe)
    return gradients(model.apply, model.init(jax.random.key(3), X), X)


def of_function(recipe):
    def mlp(p, x):
        return jax.nn.silu(x @ p["up"]) @ p["down"]

    return gradients(mlp if recipe is None else fp8jax.transform(mlp, recipe), W, X)


@pytest.mark.parametrize("run", [of_nnx, of_linen, of_function])
def test_a_recipe_without_products_leaves_every_bit(run):
    expected = jax.tree.leaves(run(None))
    for recipe in (*RECIPES, [fp8jax.Rule(".*up", "bf16"), "coat_optimizer"]):
        for actual, value in zip(jax.tree.leaves(run(recipe)), expected, strict=True):
            np.testing.assert_array_equal(actual, value)


def test_a_loop_over_recipes_trains_and_explains():
    for recipe in (*RECIPES, "te_current"):
        model = fp8jax.nnx.quantize(Mlp(), recipe)
        optimizer = fp8jax.nnx.Optimizer(model, fp8jax.optimizer(recipe, 1e-3), wrt=nnx.Param)
        read = fp8jax.nnx.quantize_weights(model)
        optimizer.update(model, nnx.grad(lambda model: jnp.sum(model(X) ** 2))(read))
        assert jnp.any(model.up.kernel[...] != W["up"])
        for report in (fp8jax.explain(Mlp(), recipe), fp8jax.explain(fp8jax.nnx.quantize(Mlp(), recipe), X)):
            layers = report.quantized_layers if recipe == "te_current" else report.skipped_layers
            assert {layer.path for layer in layers} == {"up", "down"}
            assert recipe == "te_current" or {x.reason for x in layers} == {"the recipe, which quantizes no product"}
    with pytest.raises(ValueError, match="no layer with a quantized weight"):
        fp8jax.nnx.quantize_weights(fp8jax.nnx.quantize(Mlp(), "bf16"), gradient_dtype="bfloat16")


def decoded(w):
    """Returns a weight after rounding to e4m3 with one scale."""
    w = np.asarray(w, np.float64)
    scale = np.float32(np.abs(w).max() / 448)
    return (w / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def by_hand(x, adapters):
    def product(x, name):
        adapter = adapters[f"{name}/kernel"]
        a, b = (np.asarray(factor, np.float64) for factor in (adapter.a, adapter.b))
        return x @ (decoded(W[name]) + adapter.scale * a @ b)

    x = np.asarray(x, np.float64)
    x = product(x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6), "up")
    return product(x / (1 + np.exp(-x)), "down")


def filled(adapter):
    b = jax.random.normal(jax.random.key(5), adapter.b.shape) / 8
    return fp8jax.lora.Adapter(adapter.a, b, adapter.alpha)


def test_lora_of_nnx_on_codes_with_products_that_are_not_quantized():
    quantized = fp8jax.nnx.quantize(Mlp(), "bf16")
    model = fp8jax.nnx.lora(quantized, rank=4, alpha=8.0, dtype=jnp.float32, rngs=nnx.Rngs(1))
    for layer in (model.up, model.down):
        layer.kernel_adapter_b[...] = filled(
            fp8jax.lora.Adapter(layer.kernel_adapter_a[...], layer.kernel_adapter_b[...])
        ).b
    assert {type(layer.kernel.get_raw_value()) for layer in (model.up, model.down)} == {fp8jax.FrozenWeight}
    np.testing.assert_allclose(model(X), by_hand(X, fp8jax.nnx.adapters(model)), rtol=1e-4, atol=1e-4)
    grads = nnx.grad(lambda model: jnp.sum(model(X) ** 2), argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    assert len(jax.tree.leaves(grads)) == 4
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(grads))
    plain = fp8jax.nnx.lora(quantized, rank=4, alpha=8.0, base=None, rngs=nnx.Rngs(1))
    np.testing.assert_allclose(plain(X), Mlp()(X), rtol=1e-5, atol=1e-5)
    assert "frozen as e4m3" in str(fp8jax.explain(model, X))


def test_lora_of_linen_on_codes_with_products_that_are_not_quantized():
    model = fp8jax.linen.quantize(LinenMlp(), "coat_optimizer")
    params = model.init(jax.random.key(3), X)["params"] | {name: {"kernel": w} for name, w in W.items()}
    base = fp8jax.lora.freeze(params, "e4m3", targets="(up|down)/kernel")
    adapters = fp8jax.lora.init(jax.random.key(4), base, rank=4, alpha=8.0, targets="(up|down)/kernel")
    adapters = {path: filled(adapter) for path, adapter in adapters.items()}

    def apply(adapters):
        return model.apply({"params": fp8jax.lora.adapt(base, adapters)}, X)

    np.testing.assert_allclose(apply(adapters), by_hand(X, adapters), rtol=1e-4, atol=1e-4)
    grads = jax.grad(lambda adapters: jnp.sum(apply(adapters) ** 2))(adapters)
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(grads))


def test_an_integer_base_under_a_recipe_of_floats_is_told_one_that_takes_it():
    def adapted(recipe):
        model = fp8jax.nnx.quantize(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), recipe)
        return fp8jax.nnx.lora(model, rank=4, alpha=8.0, base="int8", rngs=nnx.Rngs(1))

    with pytest.raises(ValueError, match="use the recipe 'bf16', which dequantizes it"):
        adapted("te_current")(X)
    assert adapted("bf16")(X).shape == X.shape


def test_lora_of_a_model_whose_rules_have_no_recipe_says_what_does():
    options = {"rank": 4, "alpha": 8.0, "rngs": nnx.Rngs(1)}
    for model in (Mlp(), fp8jax.nnx.quantize(Mlp(), [fp8jax.Rule(".*", None)])):
        with pytest.raises(ValueError, match=r"For products in 16 bits, use fp8jax.nnx.quantize\(model, 'bf16'\)"):
            fp8jax.nnx.lora(model, **options)
    norms = fp8jax.nnx.quantize(Mlp(), [fp8jax.Rule("norm", "coat"), fp8jax.Rule(".*", None)])
    with pytest.raises(ValueError, match=r"For products in 16 bits, use fp8jax.nnx.quantize\(model, 'bf16'\)"):
        fp8jax.nnx.lora(norms, **options)
