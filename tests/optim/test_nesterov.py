"""`nesterov` of `compressed_adamw` against optax, and the replacement of `mu_dtype`."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from fp8jax.ops.dispatch import choice
from tests.distance import relative

RATE, STEPS = 1e-2, 6
PARAMS = {
    name: jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)
    for seed, (name, shape) in enumerate({"w": (16, 256), "b": (24,)}.items())
}


def updates_of(tx):
    """Returns the updates of some steps with changing gradients, in one program."""

    def step(state, key):
        grads = jax.tree.map(lambda p: p * (1 + jax.random.normal(key, p.shape)), PARAMS)
        updates, state = tx.update(grads, state, PARAMS)
        return state, updates

    return jax.jit(lambda: jax.lax.scan(step, tx.init(PARAMS), jax.random.split(jax.random.key(0), STEPS)))()


@pytest.mark.parametrize("make", ["adamw", "scale_by_adam"])
def test_fp32_moments_give_the_bits_of_optax(make):
    fp32 = {"mu": "fp32", "nu": "fp32"}
    if make == "adamw":
        ours, plain, theirs = (
            fp8jax.compressed_adamw(RATE, **fp32, nesterov=True),
            optax.adamw(RATE),
            optax.nadamw(RATE),
        )
    else:
        ours, theirs = fp8jax.scale_by_compressed_adam(**fp32, nesterov=True), optax.scale_by_adam(nesterov=True)
        plain = optax.scale_by_adam()
    states = [tx.init(PARAMS) for tx in (ours, theirs, plain)]
    update, expected, without = (jax.jit(tx.update) for tx in (ours, theirs, plain))
    for step in range(4):
        grads = jax.tree.map(lambda p, step=step: p * (step - 1.5), PARAMS)
        (u, a), (v, b), (w, c) = (
            f(grads, state, PARAMS) for f, state in zip((update, expected, without), states, strict=True)
        )
        states = [a, b, c]
        chex.assert_trees_all_equal(u, v)
    assert relative(u, w) > 0.1


@pytest.mark.parametrize(("moments", "off"), [({}, 0.05), ({"mu": "bf16", "nu": "fp32"}, 0.004)])
def test_stored_moments_are_within_their_format(moments, off):
    tx = fp8jax.compressed_adamw(RATE, b2=0.95, nesterov=True, min_size=1, **moments)
    _, updates = updates_of(tx)
    assert relative(updates, updates_of(optax.nadamw(RATE, b2=0.95))[1]) < off
    # The fused step is update and addition, with the same state.
    state, grads = tx.init(PARAMS), jax.tree.map(jnp.sin, PARAMS)
    change, after = jax.jit(tx.update)(grads, state, PARAMS)
    stepped, also = jax.jit(tx.step)(grads, state, PARAMS)
    chex.assert_trees_all_close(stepped, optax.apply_updates(PARAMS, change), rtol=1e-6, atol=1e-8)
    chex.assert_trees_all_equal(after, also)


def test_a_moment_that_its_gradient_cancels_is_not_taken_for_idle():
    """b1 m / (1 - b1^2) + (1 - b1) g / (1 - b1) = 0 while m is as large as the others'."""
    tx = fp8jax.compressed_adamw(RATE, nesterov=True, min_size=1, nu_rounding="nearest")
    g = jnp.ones((1, 128))
    _, state = tx.update(g, tx.init(g), g)
    # Moments of 0.1 become 0.09 + 0.1 g, whose direction in the second step is 0.
    cancel = -0.9 * 0.09 / (1 - 0.9**3) / (0.1 / (1 - 0.9**2) + 0.9 * 0.1 / (1 - 0.9**3))
    updates, state = tx.update(g.at[0, 7].set(cancel), state, g)
    assert abs(float(updates[0, 7]) + RATE * 1e-4) < RATE / 40
    expected = 0.09 + 0.1 * cancel
    np.testing.assert_allclose(state.mu.dequantize()[0, 7], expected, rtol=0.07)


def test_what_is_refused_says_what_to_take():
    make = (fp8jax.compressed_adamw, lambda rate, **kwargs: fp8jax.scale_by_compressed_adam(**kwargs))
    for tx in make:
        with pytest.raises(TypeError, match=r"mu_dtype=.*bfloat16.*mu='bf16' or mu='fp32'.*mu='e4m3' \(the default\)"):
            tx(RATE, mu_dtype=jnp.bfloat16)
        with pytest.raises(ValueError, match="impl 'triton' does not support nesterov=True; use impl='auto' or 'xla'"):
            tx(RATE, nesterov=True, impl="triton")
    tx = fp8jax.compressed_adamw(RATE, b2=0.95, nesterov=True)
    tracked = fp8jax.with_weight_bounds(tx, fp8jax.max_adam_step(RATE, b2=0.95))
    with pytest.raises(ValueError, match=r"Chain fp8jax.track_weight_amax\(\) without a limit"):
        tracked.update(PARAMS, tracked.init(PARAMS), PARAMS)


def test_the_kernel_is_left_to_xla_with_a_reason():
    tx = fp8jax.compressed_adamw(RATE, nesterov=True, min_size=1)
    with choice.target(capability=90), choice.record_choices() as choices:
        jax.eval_shape(tx.update, PARAMS, jax.eval_shape(tx.init, PARAMS), PARAMS)
    assert [c.impl for _, c in choices] == ["xla", "xla"]
    assert "the kernel has no nesterov" in str(choices)
