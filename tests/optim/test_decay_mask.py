"""Which parameters decay, by how much, and in both forms of the step.

Gradients of zero leave moments of zero, and these a direction of zero: what is left of a change is the decay,
-rate * weight_decay * weight, exactly.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax

RATE, DECAY = 2.0**-3, 0.5
# The kernel alone has moments in 8 bits.
PARAMS = {"kernel": jnp.full((4, 128), 3.0), "norm": jnp.full((2, 4), 5.0, jnp.bfloat16), "bias": jnp.full(7, 7.0)}
MASKS = {
    "none": (None, {"kernel", "norm", "bias"}),
    "kernel": ({"kernel": True, "norm": False, "bias": False}, {"kernel"}),
    "norm": ({"kernel": False, "norm": True, "bias": False}, {"norm"}),
    "function": (lambda p: {name: x.ndim == 1 for name, x in p.items()}, {"bias"}),
}


def changes(tx, form, params, count=0):
    """What one step with gradients of zero adds to each parameter, in float64; `count` steps have been taken before."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = tx.init(params)._replace(count=jnp.int32(count))
    if form == "step":
        new, _ = tx.step(zeros, state, params)
        return {name: np.asarray(new[name], np.float64) - np.asarray(params[name], np.float64) for name in params}
    updates, _ = tx.update(zeros, state, params)
    return {name: np.asarray(x, np.float64) for name, x in updates.items()}


@pytest.mark.parametrize("form", ["update", "step"])
@pytest.mark.parametrize("mask", MASKS)
def test_parameters_decay_where_the_mask_says(mask, form):
    given, decaying = MASKS[mask]
    tx = fp8jax.compressed_adamw(RATE, weight_decay=DECAY, mask=given, min_size=512)
    for name, change in changes(tx, form, PARAMS).items():
        want = -RATE * DECAY * np.asarray(PARAMS[name], np.float64) * (name in decaying)
        # A new weight in bf16 is rounded; 5 times 15 / 16 has 7 bits.
        np.testing.assert_array_equal(change, want, err_msg=name)


@pytest.mark.parametrize("form", ["update", "step"])
def test_the_decay_is_multiplied_by_the_rate_of_the_step(form):
    schedule = optax.piecewise_constant_schedule(1.0, {1: 0.5, 2: 0.5, 3: 0.25})
    tx = fp8jax.compressed_adamw(schedule, weight_decay=0.25)
    for count, rate in enumerate((1.0, 0.5, 0.25, 1 / 16)):
        np.testing.assert_array_equal(changes(tx, form, {"w": PARAMS["bias"]}, count)["w"], -rate * 0.25 * 7)


def test_without_a_decay_parameters_stay_and_scale_by_never_decays():
    for tx in (fp8jax.compressed_adamw(RATE, weight_decay=0.0), fp8jax.scale_by_compressed_adam()):
        assert not any(x.any() for x in changes(tx, "update", PARAMS).values())
    # The default is that of optax.adamw.
    found = changes(fp8jax.compressed_adamw(1.0), "update", {"w": PARAMS["bias"]})["w"]
    np.testing.assert_array_equal(found, -np.float32(1e-4) * np.float32(7))


@pytest.mark.parametrize("form", ["update", "step"])
@pytest.mark.parametrize("count", [0, 4])
def test_a_first_gradient_moves_parameters_as_adam_in_float64(form, count):
    """From moments of zero after any number of steps; each hyperparameter has a value that no other may take."""
    b1, b2, eps, eps_root, rate, decay = 0.8, 0.95, 0.03, 0.002, 0.25, 0.125
    tx = fp8jax.compressed_adamw(rate, b1, b2, eps, eps_root, decay, {"a": True, "b": False}, min_size=1)
    draw = functools.partial(np.random.default_rng(0).normal, size=(2, 128))
    params, grads = ({name: jnp.asarray(draw(), jnp.float32) for name in "ab"} for _ in range(2))
    state = tx.init(params)._replace(count=jnp.int32(count))
    result, _ = getattr(tx, form)(grads, state, params)
    for name in "ab":
        g, w, t = np.asarray(grads[name], np.float64), np.asarray(params[name], np.float64), count + 1
        m, v = (1 - b1) * g / (1 - b1**t), (1 - b2) * g * g / (1 - b2**t)
        change = -rate * (m / (np.sqrt(v + eps_root) + eps) + decay * w * (name == "a"))
        want = w + change if form == "step" else change
        np.testing.assert_allclose(np.asarray(result[name], np.float64), want, rtol=2e-6, atol=2e-6)
