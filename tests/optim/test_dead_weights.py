"""Weights without further gradients stop moving: a first moment reaches zero before the second moment that divides it.

With rounding to nearest, 0.9 times the smallest code is the same code again, while the second moment decays.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from fp8jax.core import formats, noise
from tests import given_scales
from tests.programs import jit_long
from tests.rows import covering, few, slow

RATE, LAST, STEPS = 1e-3, 40, 280
ADAMW = functools.partial(fp8jax.compressed_adamw, RATE, weight_decay=0.0, min_size=0, expand=False)
LM = functools.partial(fp8jax.fp8lm_adamw, RATE, weight_decay=0.0, min_size=0)


def stored(moments, *, expand=False, **decays):
    return fp8jax.compress_state(optax.adam(RATE, **decays), moments, min_size=0, expand=expand)


# The default b2 is 0.95: second moments fall by half in 14 steps.
CASES = {
    "fp8lm": lambda: LM(b2=0.95),
    "fp8lm e5m2": lambda: LM(b2=0.95, mu="e5m2"),
    "fp8lm in groups": lambda: LM(b2=0.95, group_size=128),
    "fp8lm, b1 0.95": lambda: LM(b1=0.95, b2=0.98),
    "e4m3, e4m3": lambda: ADAMW(b2=0.95),
    "e4m3, fp32": lambda: ADAMW(b2=0.95, nu="fp32"),
    "e5m2, bf16": lambda: ADAMW(b2=0.95, mu="e5m2", nu="bf16"),
    "de8, ude8": lambda: ADAMW(b2=0.95, mu="de8", nu="ude8"),
    "de8, fp32": lambda: ADAMW(b2=0.95, mu="de8", nu="fp32"),
    "expanded": lambda: ADAMW(b2=0.95, expand=True),
    "state: de8, ude8": lambda: stored({"mu": "de8", "nu": "ude8"}, b2=0.95),
    "state: e4m3, fp32": lambda: stored({"mu": "e4m3", "nu": "fp32"}, b2=0.95),
    "state: int8, fp32, b1 0.95": lambda: stored({"mu": "int8", "nu": "fp32"}, b1=0.95, b2=0.98),
    "state: expanded, fp32": lambda: stored({"nu": "fp32"}, expand=True, b2=0.95),
}


def run(tx):
    """Returns updates over the learning rate, (steps, 4, 128). The first 32 columns get gradients until step LAST.

    Half of these are 10,000 times smaller than the others: about one code of e4m3 under the common scale.
    """
    sizes = jnp.where(jnp.arange(128) < 16, 1e-4, 1.0)

    def body(carry, t):
        w, state = carry
        g = jax.random.normal(jax.random.fold_in(jax.random.key(0), t), w.shape) * sizes
        g = jnp.where((jnp.arange(128) < 32) & (t >= LAST), 0, g)
        u, state = tx.update({"w": g}, state, {"w": w})
        return (w + u["w"], state), u["w"] / RATE

    w = 0.02 * jax.random.normal(jax.random.key(1), (4, 128))
    return np.asarray(jax.jit(lambda w: jax.lax.scan(body, (w, tx.init({"w": w})), jnp.arange(STEPS))[1])(w))


@pytest.mark.parametrize(
    "case",
    few(CASES, "fp8lm", "fp8lm in groups", "e4m3, e4m3", "de8, ude8", "expanded", "state: int8, fp32, b1 0.95",
        "state: de8, ude8"),
)  # fmt: skip
def test_weights_without_a_gradient_stand_still(case):
    updates = run(CASES[case]())
    dead, alive = updates[LAST + 200 :, :, :32], updates[LAST + 200 :, :, 32:]
    assert np.abs(dead).max() < 1e-5
    assert np.abs(dead.sum(0)).max() < 1e-3
    assert 0.1 < np.sqrt(np.mean(alive**2)) < 0.5


def test_slow_first_moments_bring_weights_as_far_as_exact_ones_after_their_last_gradient():
    """b1 = 0.99 with expansion, next to elements with rare gradients. Rounding to nearest overshoots by a quarter."""
    decays = {"b1": 0.99, "b2": 0.995}
    column = jnp.arange(128)

    def far(tx):
        def body(state, t):
            g = 0.3 + jax.random.normal(jax.random.fold_in(jax.random.key(0), t), (4, 128))
            without = ((column < 32) & (t >= 400)) | ((column >= 112) & (t % 50 > 1))
            u, state = tx.update({"w": jnp.where(without, 0, g)}, state, w)
            return state, jnp.where(t < 400, 0, u["w"][:, :32])

        w = {"w": jnp.zeros((4, 128))}
        return np.asarray(jit_long(lambda: jax.lax.scan(body, tx.init(w), jnp.arange(1200))[1])(), np.float64).sum(0)

    exact = far(optax.adam(1.0, **decays))
    for b1 in (0.99, jnp.float32(0.99)):
        ours = far(fp8jax.compressed_adamw(1.0, b1, decays["b2"], weight_decay=0.0, min_size=0))
        assert 0.9 < np.sum(ours * exact) / np.sum(exact**2) < 1.1


FORMATS = [fmt for fmt in formats.ALL if fmt.needs_scale and fmt.is_signed and fmt.bits >= 8 and fmt.name != "e8m0"]


@pytest.mark.parametrize(
    ("fmt", "decay"),
    [
        (fmt, decay) if decay in ((0.9,) if fmt.name == "fp16" else (0.99, (0.9, 1.0)[i % 2])) else slow(fmt, decay)
        for i, fmt in enumerate(FORMATS)
        for decay in (0.9, 0.99, 1.0)
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_rounding_of_what_decays(fmt, decay):
    """If rounding to nearest would not change the code, rounding goes up or down and is unbiased over a few steps."""
    codes = np.sort(given_scales.values(fmt))
    codes = codes[codes >= 0]
    magnitudes = 10.0 ** np.random.default_rng(0).uniform(np.log10(fmt.smallest / 4), np.log10(fmt.max), 2000)
    x = np.concatenate([magnitudes, codes]).astype(np.float32)
    x = np.concatenate([x, np.maximum(-x, given_scales.values(fmt).min())]).astype(np.float32)  # de8 has no -1
    steps = 89  # a number of Fibonacci: the noise of so many steps is spread most evenly
    samples = jax.jit(jax.vmap(lambda n: fmt.decode(fmt.encode(jnp.asarray(x), dither=noise.decay_dither(n, decay)))))
    actual = np.asarray(samples(jnp.arange(1000, 1000 + steps)), np.float64)
    exact = np.abs(x.astype(np.float64))
    at = np.clip(np.searchsorted(codes, exact * (1 + 1e-7), side="right"), 1, len(codes) - 1)
    below, above = codes[at - 1], codes[at]
    assert ((np.abs(actual) == below) | (np.abs(actual) == above)).all()
    assert (np.sign(actual) * x >= 0).all()
    stays = above - below > 2.0001 * (1 - decay) * exact
    leaves = above - below < 1.9999 * (1 - decay) * exact
    # The number of multiples of the golden ratio in an interval equals its length, except for two.
    off = np.abs(np.abs(actual).mean(0) - exact) / (above - below)
    assert off[stays].max() <= 2.01 / steps + 2.0**-20
    nearest = np.minimum(exact - below, above - exact)
    assert (np.abs(np.abs(actual[:, leaves]) - exact[leaves]) <= nearest[leaves] + 1e-6 * exact[leaves]).all()
    assert stays.any()
    assert leaves.any() or decay > 0.9


@pytest.mark.parametrize(
    ("fmt", "decay"), covering(FORMATS, [0.9, 0.95]), ids=lambda value: getattr(value, "name", value)
)
def test_codes_that_decay_reach_zero(fmt, decay):
    x = jnp.float32([code for code in given_scales.values(fmt) if abs(code) <= 100 * fmt.smallest])

    def body(x, n):
        return fmt.decode(fmt.encode(decay * x, dither=noise.decay_dither(n, decay))), None

    left, _ = jit_long(lambda x: jax.lax.scan(body, x, jnp.arange(250)))(x)
    np.testing.assert_array_equal(left, 0)
    to_nearest = jit_long(lambda x: jax.lax.fori_loop(0, 100, lambda _, x: fmt.decode(fmt.encode(decay * x)), x))(x)
    assert (to_nearest != 0).any(), "a test that cannot fail"
