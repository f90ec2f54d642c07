"""`jax.export` with a symbolic batch size: every recipe, with the numbers of a program with a fixed size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import fp8jax
from tests.rows import few, slow

W, ROW = jax.random.normal(jax.random.key(0), (64, 32)), jnp.ones(64)
# Batches of fewer tokens than a block, and of blocks and a part of one.
BATCHES = (3, 150)


def step(name):
    """Returns loss and gradients of a norm and a linear layer."""
    recipe = fp8jax.recipes.get(name)
    states = recipe.linear.stateful_strategies
    state = fp8jax.init_scaling(recipe, W) if any(part.collects_stats for part in states.values()) else None
    slot = jnp.zeros((), jnp.float32) if "dy" in states else None

    def loss(x, w):
        x, key = fp8jax.rms_norm(x, ROW, recipe=recipe), jax.random.key(1)
        if state is None:
            return jnp.sum(jnp.sin(fp8jax.linear(x, w, recipe=recipe, key=key)))
        return jnp.sum(jnp.sin(fp8jax.scaled_linear(x, w, state, slot, recipe=recipe, key=key)[0]))

    return jax.jit(jax.value_and_grad(loss, (0, 1)))


def exported(name, shape):
    kinds = jax.ShapeDtypeStruct(export.symbolic_shape(shape), jnp.float32), jax.ShapeDtypeStruct(W.shape, W.dtype)
    return export.export(step(name))(*kinds)


@pytest.mark.parametrize(
    "name",
    few(fp8jax.recipes.NAMES, "coat_fast", "te_delayed", "deepseek", "int8_fallback"),
)
def test_every_recipe_is_exported(name):
    batch = "32*batch" if name == "nvfp4" else "batch"  # two codes in a byte, in groups of 16
    actual = exported(name, f"{batch}, 64")
    assert str(actual.out_avals[1].shape[0]) == batch


@pytest.mark.parametrize("name", ["int8_block", slow("deepseek")])
def test_an_exported_program_computes_what_the_program_of_a_batch_does(name):
    """Scales and noise depend on the actual size."""
    actual = exported(name, "batch, 64")
    for batch in BATCHES:
        x = jax.random.normal(jax.random.key(2), (batch, 64))
        for a, b in zip(jax.tree.leaves(actual.call(x, W)), jax.tree.leaves(step(name)(x, W)), strict=True):
            # Sums over a block that covers the whole axis have another order.
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(b))))


def test_a_batch_of_sequences_is_exported():
    assert str(exported("int8_block", "batch, 16, 64").out_avals[1].shape[0]) == "batch"
