"""GLU between grouped matmuls, and codes of tokens before the permutation, against float64."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.core.groups import Groups
from fp8jax.ops.autodiff.residuals import ArrayFacts, InputFacts
from fp8jax.ops.dispatch.choice import target
from fp8jax.ops.nonlinear.grouped_glu import grouped_glu
from fp8jax.ops.products.ragged import ragged_dot
from fp8jax.ops.products.token_rows import sum_rows
from tests.rows import slow

TOKENS, K, D, F = 40, 2, 64, 32
SIZES = (30, 0, 1, 43)  # the last 6 rows are in no group


def layer(recipe, sizes, index, rows):
    """A layer of experts without a router, as a function of tokens, row weights and matrices."""

    def run(x, weights, gate_up, down):
        facts = ArrayFacts(row_source=(jax.lax.stop_gradient(x), index))
        h = ragged_dot(x[index], gate_up, sizes, recipe=recipe.linear, input_facts=InputFacts(facts))
        groups = Groups.from_sizes(sizes, index.size)
        h, facts = grouped_glu(h, groups, recipe, weights=weights)
        y = ragged_dot(h, down, sizes, recipe=recipe.linear, input_facts=InputFacts(facts))
        return sum_rows(y, index, rows)

    return run


def oracle(index, rows):
    """The same in fp32 by dense matmuls, differentiated by JAX."""
    ends = np.cumsum(SIZES)

    def run(x, weights, gate_up, down):
        y = jnp.zeros((index.size, D))
        for group, (end, size) in enumerate(zip(ends, SIZES, strict=True)):
            at = slice(end - size, end)
            gate, up = jnp.split(x[index[at]] @ gate_up[group], 2, -1)
            y = y.at[at].set((jax.nn.silu(gate) * up * weights[at, None]) @ down[group])
        return y[rows].sum(1)

    return run


def drawn():
    """Returns operands. Tokens whose two rows both belong to the first expert are 1e-5 of the others."""
    rng, few = np.random.default_rng(0), SIZES[0]
    order = np.concatenate([rng.permutation(few), few + rng.permutation(TOKENS * K - few)]).astype(np.int32)
    rows = np.argsort(order).astype(np.int32).reshape(TOKENS, K)
    index = order // K
    x = rng.normal(size=(TOKENS, D))
    x[: few // K] *= 1e-5
    weights, ct = rng.uniform(0.2, 1, TOKENS * K), rng.normal(size=(TOKENS, D))
    matrices = (rng.normal(size=(4, D, 2 * F)) / 8, rng.normal(size=(4, F, D)) / 6)
    return (x, weights, *matrices), ct, index, rows


def error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(("recipe", "on_gpu"), [("coat", True), slow("te_current", True), ("deepseek", False)])
def test_a_layer_and_its_gradients_are_those_in_16_bits_but_for_rounding(recipe, on_gpu):
    """`on_gpu` runs the references of the kernels with their codes."""
    operands, ct, index, rows = drawn()
    operands, ct = tuple(jnp.asarray(a, jnp.float32) for a in operands), jnp.asarray(ct, jnp.float32)
    with target(capability=90) if on_gpu else contextlib.nullcontext():
        run = layer(fp8jax.recipes.get(recipe), jnp.asarray(SIZES), jnp.asarray(index), jnp.asarray(rows))
        y, grads = jax.jit(lambda *a: (run(*a), jax.vjp(run, *a)[1](ct)))(*operands)
    want, vjp_fn = jax.vjp(oracle(index, rows), *operands)
    first, others = slice(SIZES[0] // K), slice(SIZES[0] // K, None)
    for actual, expected in zip((y, *grads), (want, *vjp_fn(ct)), strict=True):
        assert np.isfinite(np.asarray(actual)).all()
        assert 0.005 < error(actual, expected) < 0.15
    for actual, expected in ((y, want), (grads[0], vjp_fn(ct)[0])):
        assert error(actual[first], expected[first]) < 2 * error(actual[others], expected[others])
    dw, expected = grads[2], vjp_fn(ct)[2]
    assert error(dw[0], expected[0]) < 2 * error(dw[3], expected[3])


def test_rows_of_no_group_change_nothing():
    operands, ct, index, rows = drawn()
    operands, ct = tuple(jnp.asarray(a, jnp.float32) for a in operands), jnp.asarray(ct, jnp.float32)
    inside = sum(SIZES)
    outside = np.setdiff1d(index[inside:], index[:inside])
    spoiled = (operands[0].at[outside].set(jnp.nan), operands[1].at[inside:].set(jnp.nan), *operands[2:])
    with target(capability=90):
        run = layer(fp8jax.recipes.coat(), jnp.asarray(SIZES), jnp.asarray(index), jnp.asarray(rows))
        both = [jax.jit(lambda *a: (run(*a), jax.vjp(run, *a)[1](ct)))(*a) for a in (operands, spoiled)]
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_array_equal(a, b)
