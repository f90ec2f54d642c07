"""Matmuls whose result is split into arrays, such as packed q, k and v: computed separately where that is faster."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.ops.dispatch import choice
from fp8jax.ops.quantization import quantize
from fp8jax.rewrite import operations
from tests.distance import relative
from tests.programs import count, dots

WIDTH, WIDTHS = 128, (128, 256, 384)
OUT = sum(WIDTHS)
X = jax.random.normal(jax.random.key(1), (2, 24, WIDTH), jnp.bfloat16)
P = {"w": 0.2 * jax.random.normal(jax.random.key(2), (WIDTH, OUT)), "b": jax.random.normal(jax.random.key(3), (OUT,))}


def packed(p, x):
    """As in GPT-2; the input is read again, as by a residual connection."""
    q, k, v = jnp.split(x @ p["w"].astype(x.dtype) + p["b"].astype(x.dtype), (128, 384), -1)
    return q * jnp.max(k, -1, keepdims=True) + v[..., :WIDTH] * v[..., WIDTH : 2 * WIDTH] + x


def cut(at, p, x):
    return sum(jnp.sum(jnp.sin(y), -1) for y in jnp.split(x @ p["w"].astype(x.dtype), at, -1))


def loss(fn):
    return lambda p, x: jnp.sum(jnp.sin(fn(p, x).astype(jnp.float32)))


@pytest.mark.parametrize("recipe", ["te_current", "fast"])
def test_results_and_gradients_have_the_bits_of_the_whole_product(recipe, monkeypatch):
    results = []
    for is_split in (False, True):
        monkeypatch.setattr(operations, "should_split_output", lambda *_, is_split=is_split: is_split)
        run = jax.value_and_grad(loss(fp8jax.transform(packed, recipe)), (0, 1))
        assert len(dots(run, P, X)) == (5 if is_split else 3)
        results.append(jax.jit(run)(P, X))
    assert all(map(np.array_equal, *map(jax.tree.leaves, results)))
    assert fp8jax.transform(packed, recipe).check(P, X).first_failure is None


def splits(fn, recipe="te_current"):
    """Returns the number of splits in the forward and backward pass, traced for an H100."""
    run = jax.grad(loss(fp8jax.transform(fn, recipe)), (0, 1))
    with choice.target(capability=90):
        return count(run, "split", P, X)


def test_on_a_gpu_nothing_is_cut_and_nothing_put_together(monkeypatch):
    calls, kernel = [], quantize._kernel
    monkeypatch.setattr(quantize, "_kernel", lambda how, x, *rest: calls.append(x) or kernel(how, x, *rest))
    assert splits(packed) == 1  # on several
    assert not any(isinstance(x, tuple) for x in calls)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert splits(packed) == 0
    assert [tuple(y.shape for y in x) for x in calls if isinstance(x, tuple)] == [tuple((48, n) for n in WIDTHS)]


@pytest.mark.parametrize(
    ("fn", "recipe"),
    [
        (lambda p, x: sum(jnp.split(x @ p["w"].astype(x.dtype), 3, 1)), "te_current"),
        (lambda p, x: (lambda y: jnp.split(y, 2, -1)[0] + y[..., 384:])(x @ p["w"].astype(x.dtype)), "te_current"),
        (packed, "fast"),  # scales of rows
        (functools.partial(cut, (120, 384)), "te_current"),  # narrow parts
        (functools.partial(cut, (0, 384)), "te_current"),
        (functools.partial(cut, (128, 256, 384)), "te_current"),
    ],
)
def test_what_is_left_whole(fn, recipe, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert splits(fn, recipe) == 1


@pytest.mark.usefixtures("inspected")
def test_under_a_scaling_with_a_state_the_whole_is_cut():
    """The first step has no history, so it equals current scaling."""
    fast, current = fp8jax.transform(packed, "te_delayed"), fp8jax.transform(packed, "te_current")
    states = fast.init(P, X)
    actual, expected = (jax.grad(loss(f))(P, X) for f in (lambda p, x: fast(p, x, states=states), current))
    assert all(relative(actual[name], expected[name]) < 1e-3 for name in P)
