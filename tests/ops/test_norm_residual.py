"""The gradient of a norm's passthrough, added in the norm's backward pass, with and without kernels."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.ops.quantization import fused_outputs
from tests.distance import relative

COAT = fp8jax.recipes.coat()
FAITHFUL = dataclasses.replace(COAT, context=fp8jax.recipes.Context("e4m3:group16"))
ROWS, CHANNELS = 12, 48


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def gradients(recipe, norm, dtype, through):
    """Returns gradients of a norm's input, scale and bias. The passthrough has the larger gradient."""
    x, scale = (3 * draw(0, 2, ROWS // 2, CHANNELS)).astype(dtype), 1 + 0.3 * draw(1, CHANNELS)
    bias = draw(2, CHANNELS) if norm == "layer" else None
    w = 0.1 * draw(3, CHANNELS, 16).astype(dtype)
    dy, others = draw(4, 2, ROWS // 2, 16).astype(dtype), (5 * draw(5, *x.shape)).astype(dtype)

    def f(x, scale, bias):
        actual = fp8jax.norm_linear(x, scale, [w], recipe=recipe, norm=norm, norm_bias=bias, residual=through, eps=0.25)
        return actual if through else (x, *actual)

    return jax.vjp(f, x, scale, bias)[1]((others, dy))


def exact(norm):
    """The same in float64 without quantization, from the formula of a norm's derivative."""
    x, scale, w, dy, others = (
        np.asarray(a, np.float64)
        for a in (3 * draw(0, ROWS, CHANNELS), 1 + 0.3 * draw(1, CHANNELS), 0.1 * draw(3, CHANNELS, 16),
                  draw(4, ROWS, 16), 5 * draw(5, ROWS, CHANNELS))
    )  # fmt: skip
    z = x - x.mean(1, keepdims=True) if norm == "layer" else x
    inverse = 1 / np.sqrt((z * z).mean(1, keepdims=True) + 0.25)
    dh = dy @ w.T
    t, hat = dh * scale, z * inverse
    dx = t - hat * (t * hat).mean(1, keepdims=True) - (t.mean(1, keepdims=True) if norm == "layer" else 0)
    return inverse * dx + others, (dh * hat).sum(0), dh.sum(0) if norm == "layer" else None


@pytest.fixture
def kernels(monkeypatch):
    """Switches the kernels on; on a CPU these are their references."""
    pytest.importorskip("jax_triton")
    monkeypatch.setattr(fused_outputs, "missing_triton", lambda _: None)

    def switch(on):
        monkeypatch.setattr(fused_outputs, "on_cuda", lambda: on)

    return switch


@pytest.mark.parametrize("recipe", [COAT, FAITHFUL], ids=["lean", "faithful"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_what_a_norm_passes_on_has_its_gradient_added(norm, recipe, kernels):
    expected = [a for a in exact(norm) if a is not None]
    for on in (False, True):
        kernels(on)
        for through in (False, True):
            actual = [a for a in gradients(recipe, norm, jnp.float32, through) if a is not None]
            # The added gradient is 50 times the rest, which has the error of e4m3 and e5m2.
            rest, exact_rest = (a[0].reshape(ROWS, CHANNELS) - 5 * draw(5, ROWS, CHANNELS) for a in (actual, expected))
            for a, b in zip((rest, *actual[1:]), (exact_rest, *expected[1:]), strict=True):
                assert relative(a, b) < 0.1
            assert relative(actual[0].reshape(ROWS, CHANNELS), expected[0]) < 5e-3


def test_the_sum_is_rounded_once_and_has_the_dtype_of_the_input(kernels):
    for on in (False, True):
        kernels(on)
        narrow, wide = (gradients(COAT, "rms", dtype, True)[0] for dtype in (jnp.bfloat16, jnp.float32))
        assert (narrow.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
        assert relative(narrow, wide) < 2.0**-8


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_epsilon_is_the_one_that_is_given(norm):
    x, w = 0.1 * draw(0, 4, CHANNELS), jnp.eye(CHANNELS)
    f = functools.partial(fp8jax.norm_linear, x, None, [w], norm=norm)
    for recipe in (fp8jax.recipes.bf16(), COAT):
        (y,), (other,) = f(recipe=recipe, eps=0.25), f(recipe=recipe)
        z = np.asarray(x, np.float64)
        z = z - z.mean(1, keepdims=True) if norm == "layer" else z
        assert relative(y, z / np.sqrt((z * z).mean(1, keepdims=True) + 0.25)) < 0.04
        assert relative(other, z / np.sqrt((z * z).mean(1, keepdims=True) + 1e-6)) < 0.04
