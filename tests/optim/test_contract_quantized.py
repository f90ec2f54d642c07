"""The contract of optax's contributed optimizers with every leaf quantized: groups of three, minimum size one."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import fp8jax
from fp8jax import QTensor
from tests.rows import few

SMALL = {"group_size": 3, "min_size": 1}


def around(make):
    return lambda rate: fp8jax.compress_state(make(rate), **SMALL)


# Constructor, the learning rate for the minimum below, and the number of moments for `TREE`.
OPTIMIZERS = {
    "compressed_adamw": (lambda rate: fp8jax.compressed_adamw(rate, weight_decay=0.0, **SMALL), 0.1, 4),
    "scale_by_compressed_adam": (
        lambda rate: optax.chain(
            fp8jax.scale_by_compressed_adam(nu="e5m2", **SMALL), optax.scale_by_learning_rate(rate)
        ),
        0.1,
        4,
    ),
    "adam": (around(optax.adam), 0.1, 4),
    "amsgrad": (around(optax.amsgrad), 0.1, 4),
    "lion": (around(lambda rate: optax.lion(rate, weight_decay=0.0)), 0.01, 2),
    "momentum": (around(lambda rate: optax.sgd(rate, momentum=0.9)), 0.001, 2),
    "rmsprop": (around(lambda rate: optax.rmsprop(rate, momentum=0.9)), 0.01, 4),
    "adafactor": (
        around(lambda rate: optax.adafactor(rate, multiply_by_parameter_scale=False, momentum=0.9)),
        0.1,
        4,
    ),
    "muon": (around(optax.contrib.muon), 0.1, 3),
}
TREE = [-jnp.ones((2, 3)), jnp.ones((2, 5, 3))]


def moments(state):
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, QTensor))
    return [x for x in leaves if isinstance(x, QTensor)]


def loss(p):
    """A parabola, and the Rosenbrock function in three dimensions."""
    x = p["valley"]
    valley = jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)
    return jnp.sum((p["parabola"] - jnp.array([1.0, -1.0, 1.0])) ** 2) + valley


@pytest.mark.parametrize("name", few(OPTIMIZERS, "compressed_adamw", "amsgrad", "momentum", "adafactor"))
def test_it_finds_the_minimum_of_a_parabola_and_of_a_valley(name):
    steps = 6000
    make, rate, _ = OPTIMIZERS[name]
    tx = make(optax.cosine_decay_schedule(rate, steps))

    @jax.jit
    def run():
        p = {"parabola": jnp.array([-1.0, 10.0, 1.0]), "valley": jnp.zeros(3)}
        state = optax.tree.map_params(tx, lambda v: v, tx.init(p))
        assert len(moments(state)) >= 2

        def body(_, carry):
            p, state = carry
            updates, state = tx.update(jax.grad(loss)(p), state, p)
            return optax.apply_updates(p, updates), state

        return jax.lax.fori_loop(0, steps, body, (p, state))[0]

    p = run()
    np.testing.assert_allclose(p["parabola"], [1, -1, 1], atol=3e-2)
    np.testing.assert_allclose(p["valley"], 1.0, atol=3e-2)


@pytest.mark.parametrize("name", few(OPTIMIZERS, "compressed_adamw", "lion", "adafactor"))
def test_injected_hyperparameters_change_nothing_and_extra_arguments_pass(name):
    make, _, count = OPTIMIZERS[name]
    tx, injected = make(0.1), optax.inject_hyperparams(make)(0.1)

    @jax.jit
    def both(grads, p):
        state, inside = tx.init(p), injected.init(p)
        assert len(moments(state)) == len(moments(inside)) == count
        return tx.update(grads, state, p, value=1.0, unknown=None), injected.update(grads, inside, p)

    (updates, new), (actual, after) = both(jax.tree.map(jnp.negative, TREE), TREE)
    chex.assert_trees_all_close(actual, updates, rtol=1e-4)
    chex.assert_trees_all_equal_shapes_and_dtypes(after.inner_state, new)
    for a, b in zip(moments(after), moments(new), strict=True):
        a, b = (jax.tree.map(np.asarray, q) for q in (a, b))
        assert np.mean(a.codes == b.codes) > 0.9
        np.testing.assert_allclose(a.scale, b.scale, rtol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_types_are_kept_and_init_takes_abstract_parameters(name):
    make, _, count = OPTIMIZERS[name]
    tx = make(0.1)
    for dtype in (jnp.float32, jnp.bfloat16):
        p = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), TREE)
        state = jax.eval_shape(tx.init, p)
        assert len(moments(state)) == count
        updates, new = jax.eval_shape(tx.update, p, state, p)
        chex.assert_trees_all_equal_shapes_and_dtypes((updates, new), (p, state))
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), p)
        chex.assert_trees_all_equal_shapes_and_dtypes(tx.init(abstract), state)
