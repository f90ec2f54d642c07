"""Microbatches whose weights are quantized once per step; test_contracts compares results."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from experiments.models.llama import LlamaConfig
from experiments.train.task import Task
from tests.programs import outputs
from tests.rows import slow

SHAPE = LlamaConfig(vocab=40, dim=32, layers=2, heads=4, kv_heads=2, mlp_dim=48)
TOKENS = np.random.default_rng(0).integers(0, SHAPE.vocab, (4, 13)).astype(np.int32)
EXACT = dataclasses.replace(fp8jax.recipes.bf16(), weights=fp8jax.recipes.Weights("fp32", "fp32"))


def make(recipe, microbatches):
    tx = optax.with_extra_args_support(optax.sgd(0.1))
    return Task(SHAPE, tx, recipe, remat=False, seed=0, microbatches=microbatches)


@pytest.mark.parametrize("name", [slow("te_current"), slow("deepseek"), "te_delayed"])
def test_parts_share_the_codes_of_the_weights(name):
    recipe = fp8jax.recipes.get(name)
    state = jax.eval_shape(make(recipe, 1).init)
    weights = {leaf.shape[1:] for leaf in jax.tree.leaves(state.params["layers"]) if leaf.ndim == 3}
    counts = {
        n: outputs(make(recipe, n).gradients, jnp.float8_e4m3fn, state.params, state.model_state, TOKENS)
        for n in (1, 2)
    }

    def count(shapes, prefix):
        return sum(
            shape in {(*prefix, *w) for w in weights} | {(*prefix, *w[::-1]) for w in weights} for shape in shapes
        )

    # Seven linear layers: in the loop over layers for each microbatch, or before the microbatches for all layers.
    assert count(counts[1], ()) >= 7
    assert count(counts[2], ()) == 0
    assert count(counts[2], (SHAPE.layers,)) == 7


def test_a_context_without_quantized_linears_is_used():
    recipe = dataclasses.replace(EXACT, context=fp8jax.recipes.get("coat").context)
    assert not recipe.linear.is_quantized
    task = make(recipe, 1)
    state = jax.eval_shape(task.init)
    assert outputs(task.gradients, jnp.float8_e4m3fn, state.params, state.model_state, TOKENS)


@pytest.mark.parametrize("microbatches", [slow(1), 2])
def test_the_norm_of_gradients_in_16_bits_is_summed_in_32(microbatches):
    weights = fp8jax.recipes.Weights("bf16+stochastic", "bf16")
    task = make(dataclasses.replace(EXACT, weights=weights), microbatches)
    state = task.init()
    _, grads, _ = jax.jit(task.gradients)(state.params, state.model_state, TOKENS)
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("bfloat16")}
    expected = sum(np.sum(np.float64(x) ** 2) for x in jax.tree.leaves(grads)) ** 0.5
    np.testing.assert_allclose(jax.jit(task.step)(state, TOKENS)[1]["grad_norm"], expected, rtol=1e-5)
