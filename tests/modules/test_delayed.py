"""Delayed scaling in NNX models: histories of stacked layers, statistics of gradients, evaluation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8jax
from experiments.models.llama import Llama, LlamaConfig

HISTORY = 3
DELAYED = dataclasses.replace(fp8jax.recipes.te_current().linear, scaling="delayed", amax_history_length=HISTORY)
CONFIG = LlamaConfig(vocab=32, dim=32, layers=2, heads=2, kv_heads=1, mlp_dim=48)
TOKENS = jax.random.randint(jax.random.key(0), (2, 9), 0, CONFIG.vocab)


def loss_of(model, tokens):
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit
def train(model, optimizer, tokens):
    wrt = nnx.Any(nnx.Param, fp8jax.nnx.GradientStatistic)
    loss, grads = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, wrt))(model, tokens)
    optimizer.update(model, fp8jax.nnx.advance_scaling(model, grads))
    return loss


def make(remat=False, recipe=DELAYED):
    model = fp8jax.nnx.quantize(Llama(CONFIG, remat=remat, rngs=nnx.Rngs(0)), recipe)
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


@pytest.mark.parametrize("recipe", ["te_delayed", "moss", "int8_fallback"])
def test_a_model_of_shapes_alone_gets_the_states_of_one_of_arrays(recipe):
    make = lambda: Llama(CONFIG, rngs=nnx.Rngs(0))  # noqa: E731
    abstract = nnx.state(fp8jax.nnx.quantize(nnx.eval_shape(make), recipe))
    abstract_states = nnx.eval_shape(lambda: nnx.state(fp8jax.nnx.quantize(make(), recipe)))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))
    assert len(jax.tree.leaves(nnx.filter_state(abstract, fp8jax.nnx.ScalingVariable)))
    assert nnx.to_pure_dict(abstract) == nnx.to_pure_dict(abstract_states)


def test_histories_of_stacked_layers_advance_and_training_learns():
    model, optimizer = make(remat=True)
    product = model.layers.mlp.up.dot_general
    assert product.x.shape == (CONFIG.layers, HISTORY)
    losses = [float(train(model, optimizer, TOKENS)) for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]
    for history in (product.x, product.w, product.dy):
        assert (np.asarray(history[...]) > 0).all()
    np.testing.assert_array_equal(np.asarray(product.seen_x[...]), 0)


def test_gradients_of_a_part_of_the_parameters_are_of_these_alone_and_statistics_of_all():
    model, _ = make()
    part = nnx.All(nnx.Param, nnx.PathContains("up"))
    grads = fp8jax.nnx.grad(loss_of, argnums=nnx.DiffState(0, part))(model, TOKENS)
    whole = dict(nnx.to_flat_state(fp8jax.nnx.grad(loss_of)(model, TOKENS)))
    found = nnx.to_flat_state(grads)
    assert [path[-2:] for path, _ in found] == [("up", "kernel")]
    for path, grad in found:
        np.testing.assert_array_equal(grad[...], whole[path][...])
    for _, scaling in nnx.iter_modules(model):
        if hasattr(scaling, "slot"):
            assert (np.asarray(scaling.slot[...]) > 0).all()


def test_the_first_step_is_that_of_current_scaling():
    losses = [float(loss_of(make(recipe=r)[0], TOKENS)) for r in (DELAYED, fp8jax.recipes.te_current())]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


def test_evaluation_changes_no_state():
    model, optimizer = make()
    train(model, optimizer, TOKENS)
    before = jax.tree.map(np.asarray, nnx.state(model, fp8jax.nnx.ScalingVariable))
    model.eval()
    loss_of(model, 1 + TOKENS // 2)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model, fp8jax.nnx.ScalingVariable))
    model.train()
    loss_of(model, TOKENS)
    assert (np.asarray(model.layers.mlp.up.dot_general.seen_x[...]) > 0).all()


def test_missing_statistics_and_layers_without_state_are_refused():
    model, _ = make()
    with pytest.raises(ValueError, match=r"differentiate with respect to nnx.Any"):
        nnx.jit(nnx.grad(loss_of))(model, TOKENS)  # in a loop over layers
    plain = fp8jax.nnx.quantize(Llama(CONFIG, rngs=nnx.Rngs(0)), fp8jax.recipes.te_current())
    with pytest.raises(ValueError, match="no layer with delayed scaling"):
        fp8jax.nnx.advance_scaling(plain, nnx.state(plain, nnx.Param))


class Listed(nnx.Module):
    """Weights in Flax's own list, which accepts nothing else."""

    def __init__(self, rngs):
        self.ws = nnx.List([nnx.Param(jax.random.normal(rngs.params(), (32, 32)) / 6) for _ in range(2)])

    def __call__(self, x):
        for w in self.ws:
            x = jnp.tanh(x @ w)
        return x


def test_states_of_weights_in_a_list_stand_beside_the_list():
    model = nnx.clone(fp8jax.nnx.quantize(Listed(nnx.Rngs(0)), DELAYED))
    wrt = nnx.Any(nnx.Param, fp8jax.nnx.GradientStatistic)
    x = jax.random.normal(jax.random.key(1), (8, 32))
    for _ in range(HISTORY):
        grads = nnx.grad(lambda m: jnp.sum(m(x) ** 2), argnums=nnx.DiffState(0, wrt))(model)
        grads = fp8jax.nnx.advance_scaling(model, grads)
    assert len(jax.tree.leaves(grads)) == 2
    for i, largest in ((0, jnp.abs(x).max()), (1, 1.0)):
        state = getattr(model, f"fp8jax_ws_{i}")
        np.testing.assert_allclose(state.w[...], jnp.abs(model.ws[i][...]).max(), rtol=1e-6)
        np.testing.assert_allclose(state.x[...], largest, rtol=0.2)
    assert len(jax.tree.leaves(nnx.state(fp8jax.nnx.unquantize(model)))) == 2
