"""Libraries that patch JAX's matmuls while a model runs, as Qwix's LoRA: refused in Linen, no effect on operations.

`tests.modules.patches` patches like such a library. Adapters that are modules work.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import fp8jax
from tests.modules import patches
from tests.rows import covering, few

X, KEY = jax.random.normal(jax.random.key(0), (8, 32)), jax.random.key(1)
W = jax.random.normal(jax.random.key(2), (32, 64))


class Model(nnx.Module):
    def __init__(self):
        self.up, self.down = nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 32, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.down(nnx.silu(self.up(x)))


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32)(nn.silu(nn.Dense(64)(x)))


CHANGES = {
    "code": patches.code_changed,
    "name": lambda product: patches.name_changed(lax, "dot_general", product),
    "einsum": lambda product: patches.name_changed(jnp, "einsum", product),
}


@pytest.mark.parametrize(
    ("name", "change"),
    covering(["te_current", "coat", "deepseek", "moss", "switchback", "int8_block"], ["code", "name"]),
)
def test_no_product_of_an_operation_is_seen(name, change):
    recipe, calls = fp8jax.recipes.get(name), []

    def refuse(original, *args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    def loss(x, w):
        y = fp8jax.linear(fp8jax.rms_norm(x, jnp.ones(32), recipe=recipe), w, recipe=recipe, key=KEY)
        return jnp.sum(jnp.sin(fp8jax.einsum("td,dh->th", y, w.T, recipe=recipe, key=KEY)))

    with CHANGES[change](refuse):
        program = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(X, W))
        assert not calls
        lax.dot_general(X, W, (((1,), (0,)), ((), ())))  # which a model's own product is
        assert len(calls) == 1
    assert program == str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(X, W))


@pytest.mark.parametrize(
    ("name", "change"),
    few(
        [(name, change) for name in ("te_current", "coat", "te_delayed", "int8_fallback") for change in CHANGES],
        ("te_current", "name"), ("coat", "code"), ("int8_fallback", "einsum"),
    ),
)  # fmt: skip
def test_a_layer_runs_under_a_change(name, change):
    model, linen = fp8jax.nnx.quantize(Model(), name), fp8jax.linen.quantize(LinenModel(), name)
    variables, expected = linen.init(KEY, X), np.asarray(model(X))
    other = np.asarray(linen.apply(variables, X))
    with CHANGES[change](lambda original, *args, **kwargs: original(*args, **kwargs)):
        np.testing.assert_allclose(np.asarray(model(X)), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(linen.apply(variables, X), other, rtol=1e-5, atol=1e-5)
    with CHANGES[change](lambda original, *args, **kwargs: 2 * original(*args, **kwargs)):
        # Layers of Flax refer to the function object: replacing the module's attribute does not change them.
        assert (np.asarray(model(X)) != expected).any() == (change == "code")
        assert (np.asarray(linen.apply(variables, X)) != other).any() or change != "code"
    np.testing.assert_array_equal(np.asarray(model(X)), expected)


@pytest.mark.parametrize("name", ["te_current", "coat", "te_delayed"])
def test_products_of_linen_may_be_changed_in_both_orders(name):
    """The matmuls in the program are quantized. A patch without effect changes nothing."""
    quantized = fp8jax.linen.quantize(LinenModel(), name)
    variables = quantized.init(KEY, X)
    expected = quantized.apply(variables, X)
    inside = fp8jax.linen.quantize(patches.with_adapters(LinenModel()), name)
    for model in (patches.with_adapters(quantized), inside):
        jax.tree.map(np.testing.assert_array_equal, variables, model.init(KEY, X))
        np.testing.assert_array_equal(model.apply(variables, X), expected)


def test_a_class_made_of_a_quantized_linen_model_runs():
    quantized = fp8jax.linen.quantize(LinenModel(), "te_current")

    class Mine(type(quantized)):
        def __call__(self, x):
            return 2 * super().__call__(x)

    variables = quantized.init(KEY, X)
    np.testing.assert_array_equal(Mine().apply(variables, X), 2 * quantized.apply(variables, X))


def test_weights_that_another_library_quantized_are_refused():
    model = Model()
    model.up.kernel = nnx.data({"codes": model.up.kernel[...]})
    with pytest.raises(ValueError, match=r"the kernel of up is a dict, not an nnx.Variable: another library"):
        fp8jax.nnx.quantize(model, "te_current")


def test_adapters_that_are_modules_keep_their_part():
    model = nnx.LoRA(32, 4, 64, base_module=nnx.Linear(32, 64, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    plain = fp8jax.nnx.quantize(model, "te_current")(X)
    model.lora_b[...] = jax.random.normal(KEY, (4, 64))
    quantized = fp8jax.nnx.quantize(model, "te_current")
    part = np.asarray(X, np.float64) @ np.asarray(model.lora_a[...], np.float64) @ np.asarray(model.lora_b[...])
    np.testing.assert_allclose(quantized(X) - plain, part, rtol=1e-4, atol=1e-4)
    grads = nnx.grad(lambda m: jnp.sum(m(X)), argnums=nnx.DiffState(0, nnx.LoRAParam))(quantized)
    expected = np.asarray(X @ model.lora_a[...]).sum(0)[:, None] * np.ones((1, 64))
    np.testing.assert_allclose(grads.lora_b[...], expected, rtol=1e-4, atol=1e-4)
