"""Dead elements of a group: their moments do not take codes from the others, and return with their gradients.

The reference is AdamW in float64 NumPy. "Error" is |u - u64| / |u64| of the update, over live elements and some steps.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from tests.programs import jit_long
from tests.rows import slow

DEAD = (0, 1, 16, 64)
KINDS = ("alike", "log-normal", "a sixteenth 1,000 times smaller")
ROWS, DIES, WINDOW = 12, 50, 4
TX = functools.partial(fp8jax.compressed_adamw, 1.0, weight_decay=0.0, min_size=0, impl="xla")


def gradients(seed, dies=DIES):
    """Returns scales (kind, dead, row, 128), which elements die, and a function of the step's number."""
    random = np.random.default_rng(seed)
    scale = np.full((len(KINDS), len(DEAD), ROWS, 128), 1e-3)
    scale[1] *= np.exp(random.standard_normal((1, ROWS, 128)))
    scale[2, ..., :8] *= 1e-3
    dead = np.zeros(scale.shape, bool)
    for row in range(ROWS):
        order = 8 + random.permutation(120)
        for i, n in enumerate(DEAD):
            dead[:, i, row, order[:n]] = True
    scale = scale.astype(np.float32)

    def at(step):
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(seed), step), (ROWS, 128))
        return jnp.where(dead & (step >= dies), 0, scale * noise)

    return dead, at


def run(tx, b2, at, checks, window=WINDOW):
    """Returns updates of the last steps before each check, of a transformation and of Adam in float64."""

    @jit_long
    def steps(state, first):
        params = {"w": jnp.zeros(shape)}
        return jax.lax.scan(lambda s, t: tx.update({"w": at(t)}, s, params)[::-1], state, first + jnp.arange(window))

    @jit_long
    def skip(state, first, last):
        params = {"w": jnp.zeros(shape)}
        return jax.lax.fori_loop(first, last, lambda t, s: tx.update({"w": at(t)}, s, params)[1], state)

    grads = jax.jit(at)
    shape = jax.eval_shape(at, 0).shape
    state, m, v, results, done = tx.init({"w": jnp.zeros(shape)}), 0.0, 0.0, [], 0
    for check in checks:
        state = skip(state, done, check - window)
        state, ours = steps(state, check - window)
        exact = []
        for t in range(done, check):
            g = np.asarray(grads(t), np.float64)
            m, v = 0.9 * m + 0.1 * g, b2 * v + (1 - b2) * g**2
            if t >= check - window:
                exact.append(-m / (1 - 0.9 ** (t + 1)) / (np.sqrt(v / (1 - b2 ** (t + 1))) + 1e-8))
        done = check
        results.append((np.asarray(ours["w"], np.float64), np.stack(exact)))
    return results, state


def error(ours, exact, which):
    """Returns the error over the selected elements, by kind and number of dead ones."""
    square = [np.sum(np.where(which, x**2, 0), axis=(0, 3, 4)) for x in (ours - exact, exact)]
    return np.sqrt(square[0] / square[1])


@pytest.mark.parametrize(
    ("b2", "checks"),
    [
        slow(0.95, (80, 100, 120, 200, 320)),
        (0.999, (100, 200, 400)),
        pytest.param(0.95, (1500, 3000), marks=pytest.mark.slow),
        pytest.param(0.999, (1500, 5000), marks=pytest.mark.slow),
    ],
)
def test_dead_members_leave_the_others_their_codes(b2, checks):
    dead, at = gradients(0)
    actual, _ = run(TX(b2=b2), b2, at, checks)
    small = np.arange(128) < 8
    for ours, exact in actual:
        for which in (~dead, ~dead & ~small, ~dead & small):
            errors = error(ours, exact, which)
            assert np.all(errors < 1.4 * errors[:, :1] + 0.002), (which.mean(), errors)
        assert np.abs(ours[:, dead]).max() < 2 * np.abs(exact[:, dead]).max() + 0.01
    late = actual[-1][0]
    assert np.all(late[:, dead] == 0)


@pytest.mark.parametrize(("b2", "least"), [slow(0.95, 0.9), (0.999, 0.5)])
def test_a_member_whose_gradients_come_back_is_updated_again(b2, least):
    """Its second moment did not decay: the first updates have ordinary size, without the jump of exact Adam."""
    dead, at = gradients(1)
    actual, _ = run(TX(b2=b2), b2, lambda t: at(jnp.where(t < 200, t, t % DIES))[2], (202, 250), 2)
    gains = [np.sum((u * exact)[:, dead[2]]) / np.sum(exact[:, dead[2]] ** 2) for u, exact in actual]
    assert 0.3 < gains[0] < 1.1
    assert least < gains[1] < 1.1


@pytest.mark.parametrize(("b2", "least"), [(0.95, 0.65), slow(0.999, 0.4)])
def test_rare_gradients_are_not_lost(b2, least):
    """An element with a gradient every 100 steps has a second moment as if it came every 45."""
    rare = np.arange(128) == 5

    def at(step):
        g = 1e-3 * jax.random.normal(jax.random.fold_in(jax.random.key(3), step), (1, 1, 8 * ROWS, 128))
        return jnp.where(rare & (step % 100 != 99), 0, g)

    actual, _ = run(TX(b2=b2), b2, at, (800,), 1)
    ours, exact = (x[..., rare] for x in actual[0])
    gain = np.sum(ours * exact) / np.sum(exact**2)
    assert least < gain < 1.03


def test_a_first_moment_is_zero_before_the_second_one_falls_further():
    """With rounding to nearest a moment could stay at the smallest code, and the weight would keep moving."""
    dead, at = gradients(2)
    actual, state = run(TX(b2=0.95), 0.95, lambda t: at(t)[:1, :, :2], (140,))
    dead = dead[:1, :, :2]
    assert np.all(np.asarray(state.mu["w"].dequantize())[dead] == 0)
    assert np.all(actual[0][0][:, dead] == 0)


@pytest.mark.parametrize(("mu", "nu"), [slow("fp32", "e4m3"), ("e4m3", "fp32")])
def test_either_moment_may_be_in_codes(mu, nu):
    dead, at = gradients(4)
    actual, state = run(TX(b2=0.95, mu=mu, nu=nu), 0.95, at, (320,))
    errors = error(*actual[0], ~dead)
    # With equal scales, a second moment alone is so exact that a wider range shows, by less than a first moment's
    # error.
    assert np.all(errors < np.maximum(1.3 * errors[:, :1], 0.02)), errors
    plain = state.mu if mu == "fp32" else state.nu
    assert np.all(np.asarray(plain["w"])[dead] != 0)  # moments without codes equal optax's
