"""Scaling strategies, and the rules of their state: scan, remat, accumulation, replicas, evaluation, resume."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax.core import formats, scaling

RECIPE = dataclasses.replace(fp8jax.recipes.te_current().linear, scaling="delayed", amax_history_length=3)
X = jax.random.normal(jax.random.key(0), (24, 32))
W = 0.1 * jax.random.normal(jax.random.key(1), (32, 16))
T = jax.random.normal(jax.random.key(2), (24, 16))


def loss(w, slot, state, x=X, target=T):
    y, observed = fp8jax.scaled_linear(x, w, state, slot, recipe=RECIPE)
    return jnp.sum(y * target), observed


def step(w, state, x=X, target=T):
    """Returns the gradient of the weight, and all observations of a step."""
    (dw, dy), observed = jax.grad(loss, argnums=(0, 1), has_aux=True)(w, jnp.zeros([]), state, x, target)
    return dw, observed._replace(dy=dy)


def test_two_stage_scales_are_those_of_the_tensor_rounded_up_to_bf16():
    for shape in ((5, 40), (3, 4, 16), (7,)):
        x = jax.random.normal(jax.random.key(0), shape)
        exact = float(jnp.abs(x).max()) / 448
        actual = float(scaling.TwoStage().scale((), x, formats.E4M3))
        assert exact * (1 - 1e-6) <= actual <= exact * (1 + 2.0**-7)
    assert float(scaling.TwoStage().scale((), jnp.zeros((4, 16)), formats.E4M3)) == 1


def test_two_stage_scaling_in_a_linear_is_current_scaling_within_bf16():
    current = fp8jax.recipes.te_current().linear
    two = dataclasses.replace(current, scaling="two_stage")
    a, b = (jax.vjp(functools.partial(fp8jax.linear, recipe=r), X, W)[0] for r in (current, two))
    assert (np.asarray(a) != np.asarray(b)).any()
    assert float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a)) < 0.06


def test_delayed_scales_come_from_the_largest_of_the_history():
    strategy = scaling.Delayed(amax_history_length=3, margin=1)
    state = strategy.init()
    x = jnp.array([2.0, -7.0])
    np.testing.assert_allclose(strategy.scale(state, x, formats.E4M3), 2 * 7 / 448, rtol=1e-6)
    for largest, expected in ((4.0, 4), (9.0, 9), (1.0, 9), (1.0, 9), (1.0, 1), (jnp.inf, 1), (jnp.nan, 1)):
        state = strategy.update(state, jnp.float32(largest))
        np.testing.assert_allclose(strategy.scale(state, x, formats.E4M3), 2 * expected / 448, rtol=1e-6)


def test_the_first_step_is_current_scaling_and_later_ones_use_the_history():
    state = fp8jax.init_scaling(RECIPE)
    current = dataclasses.replace(RECIPE, scaling="current")
    dw, observed = step(W, state)
    expected = jax.grad(lambda w: jnp.sum(fp8jax.linear(X, w, recipe=current) * T))(W)
    np.testing.assert_allclose(np.asarray(dw), np.asarray(expected), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(observed, [jnp.abs(v).max() for v in (X, W, T)], rtol=1e-6)
    state = fp8jax.update_scaling(state, observed, RECIPE)
    # Ten times larger inputs saturate at the old scale, for one step.
    y, _ = fp8jax.scaled_linear(10 * X, W, state, jnp.zeros([]), recipe=RECIPE)
    clipped = jnp.clip(10 * X, -jnp.abs(X).max(), jnp.abs(X).max()) @ W
    assert float(jnp.linalg.norm(y - clipped) / jnp.linalg.norm(clipped)) < 0.06
    _, observed = step(W, state, 10 * X)
    y, _ = fp8jax.scaled_linear(10 * X, W, fp8jax.update_scaling(state, observed, RECIPE), jnp.zeros([]), recipe=RECIPE)
    assert float(jnp.linalg.norm(y - 10 * X @ W) / jnp.linalg.norm(10 * X @ W)) < 0.06


def test_statistics_of_a_scan_over_layers_are_one_a_layer():
    ws = jnp.stack([W @ W.T, 3 * W @ W.T])
    states = jax.tree.map(lambda a: jnp.stack([a, a]), fp8jax.init_scaling(RECIPE))

    def run(ws, slots, remat):
        def layer(x, leaves):
            y, observed = fp8jax.scaled_linear(x, *leaves, recipe=RECIPE)
            return jnp.tanh(y), observed

        body = jax.checkpoint(layer) if remat else layer
        y, observed = jax.lax.scan(body, X, (ws, states, slots))
        return jnp.sum(y**2), observed

    results = [
        jax.jit(jax.grad(functools.partial(run, remat=r), (0, 1), has_aux=True))(ws, jnp.zeros(2))
        for r in (False, True)
    ]
    for (_, slots), observed in results:
        assert slots.shape == (2,)
        assert (np.asarray(slots) > 0).all()
        np.testing.assert_allclose(observed.w, [jnp.abs(w).max() for w in ws], rtol=1e-6)
        state = fp8jax.update_scaling(states, observed._replace(dy=slots), RECIPE)
        np.testing.assert_array_equal(state.dy[:, 0], slots)
        np.testing.assert_array_equal(state.dy[:, 1:], 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *results)


def test_microbatches_merge_by_maximum():
    state = fp8jax.init_scaling(RECIPE)
    halves = [step(W, state, X[i : i + 12], T[i : i + 12])[1] for i in (0, 12)]
    merged = jax.tree.map(jnp.maximum, *halves)
    np.testing.assert_allclose(merged, step(W, state)[1], rtol=1e-6)


def test_replicas_merge_by_maximum():
    state = fp8jax.init_scaling(RECIPE)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(w, state, x, target):
        dw, observed = step(w, state, x, target)
        return jax.lax.psum(dw, "data"), jax.tree.map(lambda a: jax.lax.pmax(a, "data"), observed)

    specs = {"mesh": mesh, "in_specs": (P(), P(), P("data"), P("data")), "out_specs": P()}
    _, observed = jax.jit(jax.shard_map(local, **specs, check_vma=False))(W, state, X, T)
    np.testing.assert_allclose(observed, step(W, state)[1], rtol=1e-6)
    with pytest.raises(ValueError, match=r"\['data'\], but the amax_slot of its scaling does not.*check_vma=False"):
        jax.jit(jax.shard_map(local, **specs))(W, state, X, T)


def test_evaluation_reads_the_state_and_changes_nothing():
    state = fp8jax.update_scaling(fp8jax.init_scaling(RECIPE), step(W, fp8jax.init_scaling(RECIPE))[1], RECIPE)
    before = jax.tree.map(np.array, state)
    a, _ = fp8jax.scaled_linear(X, W, state, jnp.zeros([]), recipe=RECIPE)
    b, _ = fp8jax.scaled_linear(X, W, state, jnp.ones([]), recipe=RECIPE)
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, state))


@pytest.mark.parametrize("name", ["te_delayed", "int8_fallback"])
def test_a_linear_with_a_state_adds_its_bias_and_reads_weights_that_are_held(name):
    recipe = fp8jax.recipes.get(name)
    state, bias, key = fp8jax.init_scaling(recipe, W), jnp.arange(16.0), jax.random.key(3)
    slot = jnp.zeros([]) if "dy" in recipe.linear.stateful_strategies else None
    key = key if recipe.linear.is_stochastic else None

    def run(w, **kwargs):
        return fp8jax.scaled_linear(X, w, state, slot, recipe=recipe, key=key, **kwargs)[0]

    plain = run(W)
    np.testing.assert_array_equal(run(W, bias=bias), plain + bias)
    prequantized = fp8jax.quantize_weight(W, recipe=recipe, scale=fp8jax.weight_scale(W, state, recipe=recipe))
    np.testing.assert_array_equal(run(0 * W, quantized=prequantized), plain)


def test_delayed_recipes_are_refused_where_there_is_no_state():
    with pytest.raises(ValueError, match=r"use fp8jax.scaled_linear"):
        fp8jax.linear(X, W, recipe=RECIPE)
    with pytest.raises(ValueError, match="not 'delayed'"):
        fp8jax.init_scaling(fp8jax.recipes.te_current())
    with pytest.raises(ValueError, match="amax_history_length must be positive"):
        scaling.Delayed(0)
