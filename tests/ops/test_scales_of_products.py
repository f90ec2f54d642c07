"""The scale of each operand of each matmul, read off matmuls of single numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.core.recipe import Context, Linear
from tests.distance import relative

PART = Linear("e4m3", "e4m3", "e5m2")
# Numbers with more bits than bf16 has.
M, N, K = (np.float32(v) for v in (1 + 2.0**-10, 3 + 2.0**-11, 5 + 2.0**-9))


def products(recipe, quantized=False):
    """Returns y, dx and dw of 1x1 matrices. Each number determines its scale, so it is the largest code."""
    x, w, dy = (jnp.full((1, 1), v) for v in (M, N, K))
    prequantized = fp8jax.quantize_weight(w, recipe=recipe) if quantized else None
    y, vjp_fn = jax.vjp(lambda x, w: fp8jax.linear(x, w, recipe=recipe, quantized=prequantized), x, w)
    return np.array([float(a[0, 0]) for a in (y, *vjp_fn(dy))])


def up(v):
    """Returns the next bf16 number."""
    bits = np.float32(v).view(np.uint32)
    return float(np.uint32((bits & 0xFFFF0000) + 0x10000).view(np.float32))


@pytest.mark.parametrize("quantized", [False, True])
def test_every_operand_has_the_scale_of_its_strategy(quantized):
    exact = np.array([float(a) * float(b) for a, b in ((M, N), (K, N), (M, K))])
    np.testing.assert_allclose(products(PART, quantized), exact, rtol=1e-6)
    coarse = np.array([up(M) * up(N), up(K) * up(N), up(M) * up(K)])
    assert (coarse > exact * (1 + 1e-4)).all()
    np.testing.assert_allclose(products(dataclasses.replace(PART, scaling="two_stage"), quantized), coarse, rtol=1e-6)
    # Also where each product has operands of its own.
    own = dataclasses.replace(PART, scaling="two_stage", w_dgrad="e5m2", dy_wgrad="e4m3", x_wgrad="e5m2")
    np.testing.assert_allclose(products(own, quantized), coarse, rtol=1e-6)


@pytest.mark.parametrize("saved", [{}, {"x_residual": "e4m3"}], ids=["the same codes", "saved apart"])
def test_every_operand_has_the_scale_of_its_own_history(saved):
    part = dataclasses.replace(PART, scaling="delayed", amax_history_length=2, **saved)
    state = fp8jax.init_scaling(part)
    # If a history's largest value is a quarter of a number, that number saturates to the quarter.
    for wide, clipped in (
        ((0.25, 1, 1), (True, False, True)), ((1, 0.25, 1), (True, True, False)), ((1, 1, 0.25), (False, True, True))
    ):  # fmt: skip
        largest = dict(zip(("x", "w", "dy"), (f * v for f, v in zip(wide, (M, N, K), strict=True)), strict=True))
        state = state._replace(**{name: jnp.array([v, 0], jnp.float32) for name, v in largest.items()})
        x, w, dy = (jnp.full((1, 1), v) for v in (M, N, K))
        y, vjp_fn = jax.vjp(
            lambda x, w, state=state: fp8jax.scaled_linear(x, w, state, jnp.zeros([]), recipe=part)[0], x, w
        )
        actual = np.array([float(a[0, 0]) for a in (y, *vjp_fn(dy))])
        exact = np.array([float(a) * float(b) for a, b in ((M, N), (K, N), (M, K))])
        np.testing.assert_allclose(actual, exact * np.where(clipped, 0.25, 1), rtol=1e-6)


def test_an_input_made_again_has_the_saved_scale_only_where_it_is_quantized_so():
    """The largest code of e4m3 is 448, of int8 127: with the other scale, values saturate."""
    part = Linear("e4m3", "e4m3", "e5m2", x_wgrad="int8", dy_wgrad="int8")
    recipe = dataclasses.replace(
        fp8jax.recipes.coat(), linear=part, context=Context("e4m3:group16", recompute_activations=True)
    )
    x, w, dy = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(24, 32), (32, 16), (24, 16)]))
    dw = jax.vjp(lambda w: fp8jax.norm_linear(x, None, [w], recipe=recipe)[0], w)[1](dy)[0]
    exact = fp8jax.rms_norm(x, recipe=fp8jax.recipes.bf16()).T @ dy
    assert relative(dw, exact) < 0.05


def test_an_input_made_again_is_read_as_it_is_where_its_product_is_not_quantized():
    """In fp32, from the codes that the norm saves, without rounding to 16 bits."""
    context = Context("e4m3:group16", recompute_activations=True)
    recipe = dataclasses.replace(fp8jax.recipes.coat(), linear=fp8jax.recipes.switchback().linear, context=context)
    x, w, dy = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(24, 32), (32, 16), (24, 16)]))
    dw = jax.vjp(lambda w: fp8jax.norm_linear(x, None, [w], recipe=recipe)[0], w)[1](dy)[0]
    decoded = np.asarray(fp8jax.quantize(x, context.spec).dequantize(), np.float64)
    again = decoded / np.sqrt((np.asarray(x, np.float64) ** 2).mean(1, keepdims=True) + 1e-6)
    assert relative(dw, again.T @ np.asarray(dy, np.float64)) < 1e-5


def test_rounding_of_an_input_that_is_saved_in_another_format_is_that_of_both():
    """wgrad reads the saved input, quantized again. Only a number with 2 bits in e4m3 shows e5m2."""
    x, w, dy = jnp.array([[448.0, 26.0]]), jnp.eye(2), jnp.array([[1.0, 0.0]])
    cases = [("same", "e4m3", 26.0), ("e5m2", "e4m3", 24.0), ("same", "e5m2", 24.0), ("e4m3:group1", "e4m3", 26.0)]
    for saved, x_wgrad, expected in cases:
        part = dataclasses.replace(PART, x_residual=saved, x_wgrad=x_wgrad)
        y, vjp_fn = jax.vjp(lambda w, part=part: fp8jax.linear(x, w, recipe=part), w)
        assert float(vjp_fn(dy)[0][1, 0]) == pytest.approx(expected, rel=1e-6)
        assert float(y[0, 1]) == pytest.approx(26.0, rel=1e-6)
