"""Gradients that 8 bits would turn into 0 or NaN raise an error with the alternative; others are correct."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.core import formats
from fp8jax.ops.quantization import quantize as matrices
from tests.rows import covering, few

CODES = ("e4m3:group16", "e5m2", "int8:block16", "e4m3:mx32", "int8:token", "int10:group128", "de8:group64")
NARROW = (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8, jnp.uint8)
RECIPES = ("te_current", "deepseek", "coat", "moss", "jetfire", "int8_block", "switchback", "fp8_lm", "fast")


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


X, W = draw(0, 32, 64), draw(1, 64, 48) / 8


def total(y):
    return jnp.sum(y.astype(jnp.float32) ** 3)


def differentiate(mode, f, x):
    """Returns a derivative of f at x, by one of JAX's transformations."""
    ways = {
        "grad": lambda: jax.grad(f)(x),
        "jitted": lambda: jax.jit(jax.grad(f))(x),
        "jvp": lambda: jax.jvp(f, (x,), (x,))[1],
        "linearize": lambda: jax.linearize(f, x)[1](x),
        "checkpoint": lambda: jax.grad(jax.checkpoint(f))(x),
        "scan": lambda: jax.grad(lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=2)[0])(x),
    }
    return ways[mode]()


@pytest.mark.parametrize(
    ("spec", "mode"), covering(CODES, ["grad", "jitted", "jvp", "linearize", "checkpoint", "scan"])
)
def test_the_cast_to_codes_is_not_differentiated(spec, mode):
    def f(x):
        return total(fp8jax.quantize(x, spec).dequantize())

    with pytest.raises(ValueError, match=r"fp8jax.save_quantized.*fp8jax.linear.*stop_gradient"):
        differentiate(mode, f, X)
    assert np.isfinite(f(X))
    # A value that is not differentiated is allowed.
    gradient = differentiate(
        "grad", lambda x: total(x * fp8jax.quantize(jax.lax.stop_gradient(x), spec).dequantize()), X
    )
    assert np.all(np.isfinite(gradient))


@pytest.mark.parametrize("name", [f.name for f in formats.ALL if f.needs_scale and f.name != "e8m0"])
def test_no_format_encodes_what_is_differentiated(name):
    fmt = formats.get(name)
    for noise in (None, 0.5 * jnp.ones(X.shape)):
        with pytest.raises(ValueError, match="gradient through 8-bit codes"):
            jax.grad(lambda x, noise=noise: total(fmt.decode(fmt.encode(jnp.abs(x), None, noise))))(X)


def test_neither_are_codes_of_matrices_nor_given_scales():
    scale = jnp.ones((1, 1))
    for f in (
        lambda x: total(matrices.quantize(x, "e4m3", "e4m3:group16")[1].dequantize()),
        lambda x: total(matrices.quantize(X, "e4m3", scale=scale * jnp.sum(x))[0].dequantize()),
        lambda x: total(fp8jax.core.qtensor.quantize_with_scale(X, "int8", scale * jnp.sum(x)).dequantize()),
    ):
        with pytest.raises(ValueError, match="gradient through 8-bit codes"):
            jax.grad(f)(X)


def test_codes_themselves_are_not_differentiated_but_their_scales_are():
    q = fp8jax.quantize(X, "e4m3")
    with pytest.raises(ValueError, match="with respect to FP8 codes"):
        jax.grad(lambda codes: total(dataclasses.replace(q, codes=codes).dequantize()))(q.codes)
    actual = jax.grad(lambda scale: jnp.sum(dataclasses.replace(q, scale=scale).dequantize()))(q.scale)
    np.testing.assert_allclose(actual, jnp.sum(q.codes.astype(jnp.float32)).reshape(1, 1), rtol=1e-5)


OPERATIONS = {
    "linear": lambda x, **mode: fp8jax.linear(x, W, **mode),
    "norm": fp8jax.rms_norm,
    "layer norm": fp8jax.layer_norm,
    "activation": lambda x, **mode: fp8jax.activation(x, activation="silu", **mode),
    "glu": lambda x, **mode: fp8jax.glu(x, x, **mode),
}


@pytest.mark.parametrize(("name", "dtype", "recipe"), covering(OPERATIONS, NARROW, ["bf16", "coat"]))
def test_a_cast_to_8_bits_before_an_operation_raises(dtype, name, recipe):
    def f(x):
        return total(OPERATIONS[name](x.astype(dtype), recipe=recipe))

    with pytest.raises((ValueError, TypeError), match=r"Cast to bfloat16|cast it to|not accept dtype"):
        jax.grad(f)(X)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("f", [
    lambda x, dtype: fp8jax.rms_norm(x, recipe="coat", dtype=dtype),
    lambda x, dtype: fp8jax.rms_norm(x, recipe="bf16", dtype=dtype),
    lambda x, dtype: fp8jax.dot_general(
        x, W, (((1,), (0,)), ((), ())), preferred_element_type=dtype, recipe="te_current"
    ),
    lambda x, dtype: dataclasses.replace(fp8jax.quantize(X, "e4m3"), scale=jnp.sum(x).reshape(1, 1)).dequantize(dtype),
])  # fmt: skip
def test_so_does_a_result_in_8_bits(dtype, f):
    assert f(X, dtype).dtype == dtype
    with pytest.raises(
        ValueError, match=r"gradients in 8 bits would be 0 or NaN. Cast to bfloat16.*fp8jax.save_quantized"
    ):
        jax.grad(lambda x: total(f(x, dtype)))(X)


def test_fp8_arrays_are_taken_where_nothing_is_differentiated():
    x = X.astype(jnp.float8_e4m3fn)
    wide, y = (fp8jax.linear(x, W, recipe="te_current") for x in (x.astype(jnp.float32), x))
    assert y.dtype == x.dtype
    # Half a step of e4m3, once or twice.
    np.testing.assert_allclose(np.asarray(y, np.float32), wide, rtol=2.0**-3, atol=2.0**-9)


@pytest.mark.parametrize(
    ("recipe", "argument"),
    few(
        [(recipe, argument) for recipe in RECIPES for argument in (0, 1)],
        ("te_current", 0), ("deepseek", 1), ("jetfire", 0), ("int8_block", 1),
    ),
)  # fmt: skip
def test_a_gradient_of_a_gradient_of_a_product_raises(recipe, argument):
    recipe = getattr(fp8jax.recipes, recipe)()
    key = jax.random.key(2) if recipe.linear.is_stochastic else None
    inner = jax.grad(lambda x, w: total(fp8jax.linear(x, w, recipe=recipe, key=key)), argument)
    assert np.all(np.isfinite(inner(X, W)))
    for outer in (0, 1):
        with pytest.raises(ValueError, match=r"differentiated twice"):
            jax.jit(jax.grad(lambda x, w: jnp.sum(inner(x, w) ** 2), outer))(X, W)


def test_without_8_bits_a_gradient_of_a_gradient_is_right():
    def inner(f):
        return jax.grad(lambda x: jnp.sum(jax.grad(lambda x: total(f(x)))(x) ** 2))

    actual, expected = inner(lambda x: fp8jax.linear(x, W, recipe="bf16"))(X), inner(lambda x: x @ W)(X)
    np.testing.assert_allclose(actual, expected, rtol=2e-2, atol=2e-2 * float(jnp.max(jnp.abs(expected))))
