"""Trains a small transformer over data and tensor axes with all communication in 8 bits, compared with one device."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType

import fp8jax
from fp8jax.dist import all_reduce_gradients
from fp8jax.dist.collectives import collectives
from tests.dist import blocks

VOCAB, BATCH, LENGTH, STEPS, LAYERS = 64, 4, 64, 12, 2
DATA, TENSOR = 2, 4
ENDS = {"embed": P(), "head": P()}


def init():
    embed, head = jax.random.normal(jax.random.key(7), (2, VOCAB, blocks.WIDTH))
    return {"embed": embed, "head": head.T / blocks.WIDTH**0.5, "layers": [blocks.params(i) for i in range(LAYERS)]}


SPECS = ENDS | {"layers": [blocks.SPECS] * LAYERS}


def batches():
    """Batches of tokens in which each token determines the next one."""
    follows = np.random.default_rng(0).permutation(VOCAB)
    rng = np.random.default_rng(1)
    for _ in range(STEPS):
        tokens = rng.integers(0, VOCAB, (BATCH, LENGTH + 1))
        for i in range(1, LENGTH + 1):
            tokens[:, i] = follows[tokens[:, i - 1]]
        yield tokens[:, :-1], tokens[:, 1:]


def loss(params, tokens, targets, layer, recipe):
    x = params["embed"][tokens]
    for p in params["layers"]:
        x = layer(p, x, recipe)
    logits = fp8jax.rms_norm(x, recipe="bf16") @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def train(step):
    params = init()
    state, losses = TX.init(params), []
    for tokens, targets in batches():
        params, state, value = step(params, state, tokens, targets)
        losses.append(float(value))
    return np.asarray(losses)


TX = optax.adam(3e-3)


def apply(params, state, grads):
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def alone(recipe):
    def step(params, state, tokens, targets):
        value, grads = jax.value_and_grad(loss)(params, tokens, targets, blocks.layer, recipe)
        return *apply(params, state, grads), value

    return jax.jit(step)


def parallel(recipe):
    mesh = jax.make_mesh((DATA, TENSOR), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def step(params, state, tokens, targets):
        def own(params):  # a device's part of the mean over the sequence
            return loss(params, tokens, targets, blocks.parallel_layer, recipe) / TENSOR

        value, grads = jax.value_and_grad(own)(params)
        # Gradients of replicated parameters are partial sums over each device's tokens.
        grads = jax.tree.map(lambda g, spec: g if "tensor" in spec else jax.lax.psum(g, "tensor"), grads, SPECS)
        grads = all_reduce_gradients(grads, "data", recipe.comm if recipe.comm.gradients else "fp32")
        return *apply(params, state, grads), jax.lax.pmean(jax.lax.psum(value, "tensor"), "data")

    state = (optax.ScaleByAdamState(P(), SPECS, SPECS), optax.EmptyState())
    rows = P("data", "tensor")
    ins, outs = (SPECS, state, rows, rows), (SPECS, state, P())
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False))


@pytest.mark.slow  # test_sequence and test_reduce test layers, sums and wire formats.
@pytest.mark.parametrize("name", ["fp8_lm", "fast"])
def test_a_model_trains_over_both_axes_as_on_one_device(name):
    recipe = dataclasses.replace(fp8jax.recipes.get(name), comm=fp8jax.recipes.Comm("e4m3"))
    step = parallel(recipe)
    actual, expected = train(step), train(alone(recipe))
    assert expected[-1] < expected[0] / 10
    np.testing.assert_allclose(actual, expected, rtol=0.1)
    params = init()
    tokens, targets = next(batches())
    program = step.lower(params, TX.init(params), tokens, targets).compile().as_text()
    travelled = [one for one in collectives(program) if one.devices == TENSOR]
    size = BATCH // DATA * LENGTH * blocks.WIDTH
    of_activations = [one for one in travelled if one.kind in ("all-gather", "all-to-all")]
    codes = [one for one in of_activations if one.dtype == "u8"]
    # Two gathers and two scatters per layer, forward and backward.
    assert sum(one.times * one.nbytes for one in codes if one.kind == "all-to-all") == LAYERS * 4 * size
    assert sum(one.times * one.nbytes for one in codes if one.kind == "all-gather") == LAYERS * 4 * size // TENSOR
    assert all(one.nbytes <= 4 * size // blocks.WIDTH for one in of_activations if one.dtype != "u8")
