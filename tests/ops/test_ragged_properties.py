"""Properties of `fp8jax.ragged_dot` in float64: groups of any size, rows in no group, and experts with small values."""

import functools

import jax
import numpy as np
import pytest

import fp8jax
from tests.distance import relative
from tests.rows import few

TOKENS, INPUTS, OUTPUTS, GROUPS = 320, 64, 48, 4
SIZES = {
    "64 to 128 tokens": [64, 128, 100, 28],
    "empty": [0, 200, 0, 120],
    "one token each": [1, 1, 1, 1],
    "one token": [0, 0, 0, 1],
    "all in one": [0, 0, 320, 0],
    "none": [0, 0, 0, 0],
}
RNG = np.random.default_rng(0)
X, W, DY = (
    RNG.normal(size=s).astype(np.float32) for s in ((TOKENS, INPUTS), (GROUPS, INPUTS, OUTPUTS), (TOKENS, OUTPUTS))
)
RECIPES = few(["coat", "te_current", "deepseek", "mxfp8", "moss", "switchback", "int8_block", "bf16"], "coat")


@functools.cache
def product_and_gradients(recipe):
    key = jax.random.key(0) if recipe == "int8_block" else None

    @jax.jit
    def run(x, w, dy, sizes):
        y, vjp_fn = jax.vjp(lambda x, w: fp8jax.ragged_dot(x, w, sizes, recipe=recipe, key=key), x, w)
        return y, *vjp_fn(dy)

    return lambda x, w, dy, sizes: [np.asarray(a) for a in run(x, w, dy, np.asarray(sizes, np.int32))]


def rows_of(sizes):
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def oracle(x, w, dy, sizes):
    """The result in float64; rows in no group are zeros."""
    x, w, dy = (a.astype(np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    for i, rows in enumerate(rows_of(sizes)):
        y[rows], dx[rows], dw[i] = x[rows] @ w[i], dy[rows] @ w[i].T, x[rows].T @ dy[rows]
    return y, dx, dw


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_groups_of_any_size_whatever_other_rows_hold(sizes, recipe):
    run, end = product_and_gradients(recipe), sum(sizes)
    x, dy = (np.where(np.arange(TOKENS)[:, None] < end, m, 0) for m in (X, DY))
    results = run(x, W, dy, sizes)
    for actual, expected in zip(results, oracle(x, W, dy, sizes), strict=True):
        assert np.linalg.norm(actual - expected) <= (1e-5 if recipe == "bf16" else 0.08) * np.linalg.norm(expected)
    for rest in (1e7, 1e30, np.nan, np.inf):
        x[end:] = dy[end:] = rest
        for actual, expected in zip(run(x, W, dy, sizes), results, strict=True):
            np.testing.assert_array_equal(actual, expected)
    assert not results[0][end:].any()
    assert not results[1][end:].any()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("small", ["x", "dy", "w", "x, dy and w"])
def test_an_expert_of_small_values_has_no_larger_errors(small, recipe):
    """Values of 1e-5 of the others: at most twice their relative error."""
    sizes = SIZES["64 to 128 tokens"]
    rows, operands = rows_of(sizes), {"x": X.copy(), "w": W.copy(), "dy": DY.copy()}
    for name in operands:
        if name in small.replace(",", "").split():
            operands[name][0 if name == "w" else rows[0]] *= 1e-5
    results = product_and_gradients(recipe)(*operands.values(), sizes)
    for actual, expected, is_weight in zip(
        results, oracle(*operands.values(), sizes), (False, False, True), strict=True
    ):
        parts = range(GROUPS) if is_weight else rows
        errors = [relative(actual[part], expected[part]) for part in parts]
        assert errors[0] <= 2 * np.mean(errors[1:]) + 1e-6
