"""Slowly decaying averages in 8 and 16 bits, against optax in fp32: unbiased, with a stated scatter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from fp8jax.core import noise
from tests.rows import few

STEPS = 3000
SIGNALS = ("constant", "noisy", "falling")
ROWS = 8  # groups of each signal
# The transformation, the moment, its storage, and the relative scatter of a moment whose gradients are noisy.
CASES = {
    "ema 0.999": (optax.ema(0.999), "ema", "e4m3", 0.18),
    "ema 0.9999": (optax.ema(0.9999), "ema", "e4m3", 0.18),
    "sgd 0.99": (optax.sgd(1.0, momentum=0.99), "trace", "e4m3", 0.12),
    "lion 0.99": (optax.lion(1.0, b2=0.99), "mu", "e4m3", 0.12),
    "lion 0.999": (optax.lion(1.0, b2=0.999), "mu", "e5m2", 0.28),
    "adam mu 0.9": (optax.adam(1.0), "mu", "e4m3", 0.04),
    "adam nu 0.999": (optax.adam(1.0), "nu", "e4m3", 0.3),
    "rmsprop 0.999": (optax.rmsprop(1.0, decay=0.999), "nu", "e4m3", 0.3),
    "adafactor": (optax.adafactor(1.0, factored=False), "v", "e4m3", 0.3),
    "ema 0.999 in bf16": (optax.ema(0.999), "ema", "bf16", 0.06),
    "sgd 0.99 in bf16": (optax.sgd(1.0, momentum=0.99), "trace", "bf16", 0.03),
    "adam nu 0.999 in bf16": (optax.adam(1.0), "nu", "bf16", 0.06),
    "ema 0.999 in int8": (optax.ema(0.999), "ema", "int8", None),
}


@functools.partial(jax.jit, static_argnames="steps")
def gradient(t, steps):
    """Gradients of log-normal size, with the rows of each signal."""
    size = jnp.exp(jax.random.normal(jax.random.key(0), (len(SIGNALS), ROWS, 128)))
    random = jax.random.normal(jax.random.fold_in(jax.random.key(1), t), size[1].shape)
    late = t >= steps // 5
    return jnp.concatenate([size[0], size[1] * (1 + random), size[2] * jnp.where(late, 0.3, 1.0)])


def moment(tx, name):
    """Returns the moment after the steps in float64, one row of axes per signal."""
    params = {"w": jnp.zeros((len(SIGNALS) * ROWS, 128))}

    def body(state, t):
        return tx.update({"w": gradient(t, STEPS)}, state, params)[1], None

    state = jax.jit(lambda: jax.lax.scan(body, tx.init(params), jnp.arange(STEPS))[0])()
    value = optax.tree.get(state, name)["w"]
    value = value.dequantize() if isinstance(value, fp8jax.QTensor) else value
    return np.asarray(value, np.float64).reshape(len(SIGNALS), -1)


@pytest.mark.parametrize("kind", few(CASES, "ema 0.999", "ema 0.999 in bf16"))
def test_slow_averages_are_right_on_average_and_do_not_stall(kind):
    tx, name, stored, scatter = CASES[kind]
    ratio = moment(fp8jax.compress_state(tx, {name: stored}, min_size=1), name) / moment(tx, name)
    if stored == "int8":  # small members of a group have few steps
        assert abs(np.median(ratio[0]) - 1) < 0.01
        return
    means, scatters = ratio.mean(1), ratio.std(1)
    # 1,024 elements each, with independent rounding.
    assert (np.abs(means - 1) < 0.004 + 3 * scatters / 1024**0.5).all(), means
    assert scatters[1] < scatter
    assert (scatters[[0, 2]] < (0.1 if name in ("nu", "v") else 0.04)).all()


def test_a_phase_shifts_noise_around_the_unit_interval():
    odd = 2 * np.arange(0, 2**16, 997) + 1
    a, b = (x / 2.0**17 for x in np.meshgrid(odd, odd[::-1]))
    actual = np.asarray(noise.add_phase(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)), np.float64)
    np.testing.assert_array_equal(actual, (a + b - 2.0**-17) % 1)
    assert actual.min() > 0
    assert (actual * 2**17 % 2 == 1).all()
