"""Models with experts: routing, losses and gradients against NumPy, what is kept, meshes, plans, and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from experiments import mesh, plan
from experiments.models import moe, sizes
from experiments.models.shape import LlamaConfig
from experiments.train.experts import RecipeProducts

TINY = LlamaConfig(vocab=40, dim=16, layers=2, heads=2, kv_heads=1, mlp_dim=24, experts=6, experts_per_token=2)
TOKENS = 20


def layer(config=TINY, dtype=jnp.float32, recipe=None, **settings):
    """A layer of experts, its parameters by name, and a function of these and tokens."""
    products = None if recipe is None else RecipeProducts(fp8jax.recipes.get(recipe))
    make = lambda: moe.MoE(
        config, dtype=dtype, param_dtype=jnp.float32, rngs=nnx.Rngs(0), products=products, **settings
    )  # noqa: E731
    graph, params, rest = nnx.split(make(), nnx.Param, ...)
    params = nnx.to_pure_dict(params)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / x.shape[-2] ** 0.5, params)
    return params, lambda params, x: nnx.merge(graph, params, rest)(x)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def oracle(params, x, config=TINY):
    """The layer in float64, a token and an expert at a time, and the choices."""
    gate_up, down = (np.asarray(params["experts"][name]["kernel"], np.float64) for name in ("gate_up", "down"))
    x = np.asarray(x, np.float64)
    probabilities = softmax(x @ np.asarray(params["router"]["kernel"], np.float64))
    y, choices = np.zeros_like(x), []
    for t, row in enumerate(probabilities):
        chosen = sorted(range(config.experts), key=lambda i: -row[i])[: config.experts_per_token]
        total = sum(row[i] for i in chosen) if config.normalize_choices else 1.0
        choices.append(chosen)
        for i in chosen:
            gate, up = np.split(x[t] @ gate_up[i], 2)
            y[t] += row[i] / total * (gate / (1 + np.exp(-gate)) * up) @ down[i]
    return y, np.array(choices)


@pytest.mark.parametrize("normalized", [True, False])
def test_a_layer_is_that_of_numpy_and_so_are_its_gradients(normalized):
    """Experts without tokens among them: the last two are never chosen."""
    config = dataclasses.replace(TINY, normalize_choices=normalized)
    params, run = layer(config)
    params["router"]["kernel"][:, -2:] = -3 * np.abs(params["router"]["kernel"][:, -2:])
    rng = np.random.default_rng(1)
    x = np.abs(rng.normal(size=(TOKENS, config.dim))).astype(np.float32)
    weights = rng.normal(size=x.shape)
    want, choices = oracle(params, x, config)
    assert choices.max() < config.experts - 2
    y, back = jax.vjp(jax.jit(run), params, x)
    np.testing.assert_allclose(y, want, atol=1e-5)
    grads = back(weights.astype(np.float32))
    for at, leaf in enumerate(jax.tree.leaves((params, x))):
        direction = rng.normal(size=leaf.shape)

        def moved(step, at=at, direction=direction):
            leaves, tree = jax.tree.flatten((params, x))
            leaves[at] = leaves[at] + step * direction
            return np.sum(weights * oracle(*jax.tree.unflatten(tree, leaves), config)[0])

        slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
        np.testing.assert_allclose(np.sum(np.asarray(jax.tree.leaves(grads)[at]) * direction), slope, rtol=1e-4)


def test_losses_of_routers_are_those_of_their_papers():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(TOKENS, 6))
    chosen = np.argsort(-logits, -1)[:, :2]
    routes = moe.Routes.from_choices(jnp.asarray(chosen), 6)
    f = np.array([(chosen == i).sum() for i in range(6)]) / TOKENS
    np.testing.assert_array_equal(routes.sizes_E, f * TOKENS)
    balance = 6 * np.sum(f * softmax(logits).mean(0))
    np.testing.assert_allclose(moe.balance_loss(jnp.asarray(logits, jnp.float32), routes.sizes_E), balance, rtol=1e-5)
    z = np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
    np.testing.assert_allclose(moe.z_loss(jnp.asarray(logits, jnp.float32)), z, rtol=1e-5)
