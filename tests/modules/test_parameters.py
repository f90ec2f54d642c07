"""Every parameter and setting of a Flax layer keeps its meaning: epsilons, biases, dtypes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from tests.distance import relative

COAT = fp8jax.recipes.coat()
TE = fp8jax.recipes.te_current()
X = jax.random.normal(jax.random.key(0), (12, 32))
DY = jax.random.normal(jax.random.key(1), (12, 32))


def shaken(params):
    """Returns parameters with random values instead of zeros and ones."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    return tree.unflatten([1 + 0.3 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])


def nnx_case(norm, eps, recipe):
    model = {"rms": nnx.RMSNorm, "layer": nnx.LayerNorm}[norm](32, epsilon=eps, rngs=nnx.Rngs(0))
    model = nnx.Sequential(model, nnx.Linear(32, 32, rngs=nnx.Rngs(0)))
    nnx.update(model, shaken(nnx.state(model, nnx.Param)))
    model = model if recipe is None else fp8jax.nnx.quantize(model, recipe)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return (lambda params, x: nnx.merge(graph, params, rest).layers[0](x)), nnx.to_pure_dict(params)


def linen_case(norm, eps, recipe):
    norm_module = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}[norm](epsilon=eps)
    model = nn.Sequential([norm_module, nn.Dense(32)])
    params = shaken(model.init(jax.random.key(0), X))
    model = model if recipe is None else fp8jax.linen.quantize(model, recipe)

    def first(params, x):
        _, state = model.apply(params, x, capture_intermediates=True, mutable="intermediates")
        return state["intermediates"]["layers_0"]["__call__"][0]

    return first, params


@pytest.mark.parametrize("case", [nnx_case, linen_case], ids=lambda f: f.__name__)
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_norm_has_its_epsilon_and_gradients_of_each_parameter(norm, case):
    (f, params), (plain, same) = case(norm, 0.5, COAT), case(norm, 0.5, None)
    jax.tree.map(np.testing.assert_array_equal, params, same)
    x = 0.3 * X
    y, vjp_fn = jax.vjp(f, params, x)
    expected, exact = jax.vjp(plain, params, x)
    assert relative(y, expected) < 1e-5
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(vjp_fn(DY)), jax.tree.leaves(exact(DY)), strict=True):
        # The input is saved in e4m3; the layer after the norm has no gradients here.
        assert not (a.any() or b.any()) or relative(a, b) < 0.06, path


LAYERS = {
    "Dense": lambda: nn.Dense(16),
    "Einsum": lambda: nn.Einsum((32, 4, 4), "td,dhc->hct"),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_biases_of_linen_layers_have_their_gradients(layer):
    model = LAYERS[layer]()
    params = shaken(model.init(jax.random.key(0), X))["params"]

    def gradients(model):
        y, vjp_fn = jax.vjp(lambda p: model.apply({"params": p}, X), params)
        return vjp_fn(jax.random.normal(jax.random.key(3), y.shape))[0]

    actual, expected = gradients(fp8jax.linen.quantize(model, TE)), gradients(model)
    np.testing.assert_allclose(actual["bias"], expected["bias"], rtol=1e-5, atol=1e-5)
    assert 0 < relative(actual["kernel"], expected["kernel"]) < 0.1


@pytest.mark.parametrize("recipe", [TE, fp8jax.recipes.te_delayed()], ids=lambda r: r.name)
def test_biases_of_nnx_layers_have_their_gradients(recipe):
    layer = nnx.LinearGeneral(32, (4, 4), rngs=nnx.Rngs(0))
    nnx.update(layer, shaken(nnx.state(layer, nnx.Param)))

    def gradients(layer):
        target = jax.random.normal(jax.random.key(3), (12, 4, 4))
        return nnx.to_pure_dict(fp8jax.nnx.grad(lambda layer: jnp.sum(layer(X) * target))(layer))

    actual, expected = gradients(fp8jax.nnx.quantize(layer, recipe)), gradients(layer)
    np.testing.assert_allclose(actual["bias"], expected["bias"], rtol=1e-5, atol=1e-5)
    assert 0 < relative(actual["kernel"], expected["kernel"]) < 0.1


@pytest.mark.parametrize("expected", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
def test_results_have_the_element_type_that_is_asked_for(expected):
    dtype = jnp.bfloat16 if expected == jnp.float32 else jnp.float32
    x, w = X.astype(dtype), DY.T[:, :8].astype(dtype)
    numbers = (((1,), (0,)), ((), ()))
    for recipe in (TE, fp8jax.recipes.bf16(), fp8jax.recipes.deepseek()):
        y = fp8jax.dot_general(x, w, numbers, preferred_element_type=expected, recipe=recipe)
        assert (y.dtype, fp8jax.dot_general(x, w, numbers, recipe=recipe).dtype) == (expected, dtype)
        assert relative(y, X @ DY.T[:, :8]) < 0.06
    layer = nn.Einsum((32, 8), "td,dh->th", preferred_element_type=expected)
    params = jax.tree.map(lambda a: a.astype(dtype), layer.init(jax.random.key(0), X))
    assert fp8jax.linen.quantize(layer, TE).apply(params, x).dtype == layer.apply(params, x).dtype
