"""`fp8jax.ragged_dot` by oracles in NumPy: each group's product, of the values of its codes."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp8jax
from tests.distance import relative
from tests.programs import residuals
from tests.rows import slow

TOKENS, INPUTS, OUTPUTS = 10, 8, 6
X = jax.random.normal(jax.random.key(0), (TOKENS, INPUTS))
W = jax.random.normal(jax.random.key(1), (3, INPUTS, OUTPUTS)) * jnp.array([1.0, 0.1, 30.0])[:, None, None]
SIZES = jnp.array([4, 0, 5])  # an empty group, and a token in none
OF = np.array([0] * 4 + [2] * 5)


def rounded(x, fmt=ml_dtypes.float8_e4m3fn):
    """The values of codes with one scale."""
    scale = np.max(np.abs(x)) / float(ml_dtypes.finfo(fmt).max) if x.size else 1.0
    return (np.asarray(x, np.float64) / scale).astype(np.float32).astype(fmt).astype(np.float64) * scale


def by_group(x, function):
    """Applies a function to each group's rows; zeros for the row in no group."""
    parts = [function(x[:9][e == OF]) for e in range(3)]
    return np.concatenate([*parts, np.zeros((1, x.shape[1]))])


E5M2 = ml_dtypes.float8_e5m2


MIXED = fp8jax.recipes.Linear("e4m3", "e4m3", "e4m3", "e5m2", "e5m2", "e5m2", x_residual=None)


@pytest.mark.parametrize("recipe", ["te_current", MIXED], ids=["te_current", "mixed"])
def test_each_group_by_its_own_matrix(recipe):
    y, vjp_fn = jax.vjp(lambda x, w: fp8jax.ragged_dot(x, w, SIZES, recipe=recipe), X, W)
    dy, part = jax.random.normal(jax.random.key(2), y.shape), fp8jax.recipes.linear_part(recipe)
    kinds = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": E5M2}
    by = lambda x, operand: rounded(np.asarray(x), kinds[part.spec(operand).format])  # noqa: E731
    forward, backward = ([by(m, operand) for m in W] for operand in ("w", "w_dgrad"))
    # One scale for each group's tokens, independent of the token in no group.
    x, x_wgrad = (by_group(np.asarray(X), lambda m, o=o: by(m, o)) for o in ("x", "x_wgrad"))
    g, g_wgrad = (by_group(np.asarray(dy), lambda m, o=o: by(m, o)) for o in ("dy", "dy_wgrad"))
    expected = np.stack([x[i] @ forward[e] for i, e in enumerate(OF)] + [np.zeros(OUTPUTS)])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    dx, dw = vjp_fn(dy)
    expected = np.stack([g[i] @ backward[e].T for i, e in enumerate(OF)] + [np.zeros(INPUTS)])
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    expected = np.stack([x_wgrad[:9][e == OF].T @ g_wgrad[:9][e == OF] for e in range(3)])
    np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    "name", ["coat", slow("deepseek"), "moss", "jetfire", slow("int8_block"), "switchback", slow("fast")]
)
def test_recipes_lie_near_the_product(name):
    x, w, sizes = jax.random.normal(jax.random.key(0), (64, 128)), 0.1 * jnp.ones((2, 128, 32)), jnp.array([40, 24])
    w = w + 0.1 * jax.random.normal(jax.random.key(1), w.shape)
    key = jax.random.key(3)
    run = lambda f: jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1)))(x, w)  # noqa: E731
    actual = run(lambda x, w: fp8jax.ragged_dot(x, w, sizes, recipe=name, key=key))
    assert 0 < relative(actual, run(lambda x, w: jax.lax.ragged_dot(x, w, sizes))) < 0.25


@pytest.mark.parametrize("shared", [True, False])
def test_noise_of_gradients_and_their_dtypes(shared):
    """With identities, the gradients show how the products round the result's gradient: once, or separately."""
    x, w, dy = (
        jnp.eye(32, dtype=jnp.bfloat16),
        jnp.eye(32)[None],
        jax.random.normal(jax.random.key(0), (32, 32), jnp.bfloat16),
    )
    linear = fp8jax.recipes.jetfire().linear
    linear = linear if shared else dataclasses.replace(linear, dy_wgrad=linear.dy)
    run = lambda x, w: fp8jax.ragged_dot(x, w, jnp.array([32]), recipe=linear, key=jax.random.key(1))  # noqa: E731
    dx, dw = jax.vjp(run, x, w)[1](dy)
    assert (dx.dtype, dw.dtype) == (x.dtype, w.dtype)
    step = float(jnp.abs(dy).max()) / 127 + 2.0**-7  # and the result's own rounding
    assert (np.abs(dx - dy) < step).all()
    assert (np.abs(dw[0] - dy) < step).all()
    assert (np.mean(np.abs(dx - dw[0]) > step / 2) > 0.1) != shared


def test_codes_are_saved():
    run = lambda x, w: jnp.sin(fp8jax.ragged_dot(x, w, SIZES, recipe="te_current"))  # noqa: E731
    assert [d for d, s in residuals(run, X, W) if s == X.shape] == ["uint8"]
    named = jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names("fp8jax_product"))
    assert ("float32", (TOKENS, OUTPUTS)) in residuals(named, X, W)


def test_bad_input():
    with pytest.raises(ValueError, match=r"got \(10, 8\), \(3, 6, 8\) and \(3,\)"):
        fp8jax.ragged_dot(X, W.transpose(0, 2, 1), SIZES, recipe="coat")
    with pytest.raises(ValueError, match=r"got \(10, 8\), \(3, 8, 6\) and \(2,\)"):
        fp8jax.ragged_dot(X, W, SIZES[:2], recipe="coat")
    with pytest.raises(TypeError, match="integer array as group_sizes, got float32"):
        fp8jax.ragged_dot(X, W, SIZES.astype(jnp.float32), recipe="coat")
    with pytest.raises(TypeError, match=r"integer array as group_sizes, got list; use jnp\.asarray"):
        fp8jax.ragged_dot(X, W, SIZES.tolist(), recipe="coat")
    with pytest.raises(ValueError, match="stochastically"):
        fp8jax.ragged_dot(X, W, SIZES, recipe="jetfire")
    with pytest.raises(ValueError, match="delayed scaling keeps a state"):
        fp8jax.ragged_dot(X, W, SIZES, recipe="te_delayed")
