"""Norms and activations with 8-bit residuals, against float64; their residuals; layers that recompute their input."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import fp8jax
from fp8jax import activation, glu, layer_norm, rms_norm
from fp8jax.core.recipe import Context
from fp8jax.ops.nonlinear.activation import ACTIVATIONS
from tests.distance import relative
from tests.programs import residuals
from tests.rows import covering

TOKENS, CHANNELS, OUTPUTS = 24, 72, 40
FAITHFUL, LEAN = Context("e4m3:group16"), Context("e4m3:group16", recompute_activations=True)
CONTEXTS = [FAITHFUL, LEAN, Context("int10:group128"), Context("e5m2:token", recompute_activations=True)]
LINEAR = fp8jax.recipes.coat().linear


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def stored(x, context) -> np.ndarray:
    """Returns an array after storage as codes, in float64."""
    q = fp8jax.quantize(jnp.asarray(x, jnp.float32), context.spec)
    return np.asarray(q.dequantize(), np.float64)


def reference_norm(x, scale, bias, eps, centered, dy, context=None):
    """Returns result and gradients in float64; with a context, those of the stored input."""
    x, dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    z = x - x.mean(-1, keepdims=True) if centered else x
    inverse = 1 / np.sqrt((z**2).mean(-1, keepdims=True) + eps)
    y = z * inverse * (1 if scale is None else np.asarray(scale, np.float64))
    y = y + (0 if bias is None else np.asarray(bias, np.float64))
    hat = (z if context is None else stored(z, context)) * inverse
    t = dy * (1 if scale is None else np.asarray(scale, np.float64))
    dx = t - hat * (t * hat).mean(-1, keepdims=True) - (t.mean(-1, keepdims=True) if centered else 0)
    axes = tuple(range(x.ndim - 1))
    return y, inverse * dx, (dy * hat).sum(axes), dy.sum(axes)


def near(actual, expected, steps=64):
    """Asserts equality up to the rounding of some fp32 operations on values as large as the largest here."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=steps * 2.0**-24 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("context", "parameters", "eps"),
    covering([Context(), *CONTEXTS], ["none", "scale", "bias", "scale and bias"], [0.5, 1e-6]),
    ids=str,
)
def test_layer_norm_is_exact_forward_and_that_of_the_stored_input_backward(parameters, eps, context):
    x = 3 + normal(0, 2, TOKENS // 2, CHANNELS)
    scale = 1 + 0.3 * normal(1, CHANNELS) if "scale" in parameters else None
    bias = normal(2, CHANNELS) if "bias" in parameters else None
    dy = normal(3, *x.shape)
    f = lambda x, s, b: layer_norm(x, s, b, recipe=context, eps=eps)  # noqa: E731
    y, vjp_fn = jax.vjp(f, x, scale, bias)
    residual_context = context if context.residual else None
    expected = reference_norm(x, scale, bias, eps, True, dy, residual_context)
    for operand, actual, want in zip((x, x, scale, bias), (y, *vjp_fn(dy)), expected, strict=True):
        assert (actual is None) == (operand is None)
        if actual is not None:
            near(actual, want)


@pytest.mark.parametrize(
    ("context", "scaled", "eps"), covering([Context(), *CONTEXTS], [False, True], [0.5, 1e-6]), ids=str
)
def test_rms_norm_is_exact_forward_and_that_of_the_stored_input_backward(scaled, eps, context):
    x, dy = normal(0, TOKENS, CHANNELS), normal(3, TOKENS, CHANNELS)
    scale = 1 + 0.3 * normal(1, CHANNELS) if scaled else None
    y, vjp_fn = jax.vjp(lambda x, s: rms_norm(x, s, recipe=context, eps=eps), x, scale)
    residual_context = context if context.residual else None
    expected = reference_norm(x, scale, None, eps, False, dy, residual_context)[:3]
    for operand, actual, want in zip((x, x, scale), (y, *vjp_fn(dy)), expected, strict=True):
        assert (actual is None) == (operand is None)
        if actual is not None:
            near(actual, want)


def test_codes_of_layer_norm_do_not_feel_the_mean():
    x, dy = normal(0, TOKENS, CHANNELS), normal(3, TOKENS, CHANNELS)
    grad = lambda x: jax.vjp(lambda x: layer_norm(x, recipe=LEAN), x)[1](dy)[0]  # noqa: E731
    assert relative(grad(x + 100), grad(x)) < 1e-3


def reference_activation(name, x):
    """Returns value and derivative in float64."""
    x = np.asarray(x, np.float64)
    if name == "silu":
        s = scipy.special.expit(x)
        return x * s, s * (1 + x * (1 - s))
    if name == "gelu":
        cdf = scipy.special.ndtr(x)
        return x * cdf, cdf + x * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    c = np.sqrt(2 / np.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    return x * (1 + t) / 2, (1 + t) / 2 + x * (1 - t**2) * c * (1 + 3 * 0.044715 * x**2) / 2


@pytest.mark.parametrize(("context", "name"), covering([Context(), *CONTEXTS], ACTIVATIONS), ids=str)
def test_activations_have_the_gradient_of_the_stored_input(name, context):
    x, u, dy = (3 * normal(i, TOKENS, CHANNELS) for i in range(3))
    keep = (lambda a: stored(a, context)) if context.residual else np.asarray
    y, vjp_fn = jax.vjp(lambda x: activation(x, recipe=context, activation=name), x)
    steps = 256 if name == "gelu_tanh" else 64  # XLA's tanh is a ratio of polynomials, off by 2^-17 near its ends
    near(y, reference_activation(name, x)[0], steps)
    near(vjp_fn(dy)[0], np.asarray(dy) * reference_activation(name, keep(x))[1], steps)

    y, vjp_fn = jax.vjp(lambda x, u: glu(x, u, recipe=context, activation=name), x, u)
    value, slope = reference_activation(name, keep(x))
    exact = reference_activation(name, x)[0]
    activated = value if context.recompute_activations else keep(exact)
    near(y, exact * np.asarray(u), steps)
    for actual, expected in zip(vjp_fn(dy), (dy * keep(u) * slope, dy * activated), strict=True):
        # An fp32 activation may round to another code than a float64 one.
        assert relative(actual, expected) < 1e-3


@pytest.mark.parametrize("context", CONTEXTS, ids=str)
def test_gradients_are_as_near_the_exact_ones_as_the_format_allows(context):
    x, u, dy = (normal(i, 256, 256) for i in range(3))
    step = relative(stored(x, context), x)
    pairs = {
        "rms": (lambda x: rms_norm(x, recipe=context), lambda x: rms_norm(x, recipe=Context()), 1),
        "layer": (lambda x: layer_norm(x, recipe=context), lambda x: layer_norm(x, recipe=Context()), 1),
        # Two stored factors, one of them through a slope whose own relative error is at most twice that of its input.
        "glu": (lambda x: glu(x, u, recipe=context), lambda x: jax.nn.silu(x) * u, 5**0.5),
    }
    for quantized, exact, factor in pairs.values():
        actual, expected = (jax.vjp(f, x)[1](dy)[0] for f in (quantized, exact))
        assert 0 < relative(actual, expected) <= factor * step


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda d: d.__name__)
def test_dtypes_are_those_of_the_arguments(dtype):
    x, scale = normal(0, TOKENS, CHANNELS, dtype=dtype), jnp.ones(CHANNELS)
    y, vjp_fn = jax.vjp(lambda x, s: rms_norm(x, s, recipe=LEAN, dtype=jnp.bfloat16), x, scale)
    dx, ds = vjp_fn(y)
    assert (y.dtype, dx.dtype, ds.dtype) == (jnp.bfloat16, dtype, jnp.float32)
    y, vjp_fn = jax.vjp(lambda x: glu(x, x, recipe=LEAN), x)
    assert (y.dtype, vjp_fn(y)[0].dtype) == (dtype, dtype)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(jax.nn.silu(x) * x))


@pytest.mark.parametrize(("context", "bad"), covering(CONTEXTS, [np.nan, np.inf]), ids=str)
def test_what_is_not_finite_stays_visible(context, bad):
    x = normal(0, TOKENS, CHANNELS).at[3, 5].set(bad)
    ops = {
        "rms": lambda x: rms_norm(x, recipe=context),
        "layer": lambda x: layer_norm(x, recipe=context),
        "glu": lambda x: glu(x, 1 + x, recipe=context),
        "gelu": lambda x: activation(x, recipe=context, activation="gelu"),
    }
    for name, f in ops.items():
        y, vjp_fn = jax.vjp(f, x)
        for array in (y, *vjp_fn(jnp.ones_like(y))):
            row = np.asarray(array)
            assert not np.isfinite(row[3, 5]) or name == "gelu", name
            assert np.isfinite(np.delete(row, 3, 0)).all(), name


def layer(context, x, p):
    recipe = dataclasses.replace(fp8jax.recipes.coat(), linear=LINEAR, context=context)
    gate, up = fp8jax.norm_linear(x, p["norm"], (p["gate"], p["up"]), recipe=recipe)
    return fp8jax.glu_linear(gate, up, p["down"], x, recipe=recipe)


def parameters(dtype=jnp.bfloat16):
    shapes = {"gate": (CHANNELS, OUTPUTS), "up": (CHANNELS, OUTPUTS), "down": (OUTPUTS, CHANNELS)}
    kernels = {name: 0.1 * normal(i, 2, *shape, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}
    return kernels | {"norm": jnp.ones((2, CHANNELS), dtype)}


def scanned(context, x, p, wrap=lambda f: f):
    return jax.lax.scan(wrap(lambda x, p: (layer(context, x, p), None)), x, p)[0]


@pytest.mark.parametrize(("style", "context"), covering(["plain", "scan", "jit", "remat"], [FAITHFUL, LEAN]), ids=str)
def test_a_layer_keeps_each_input_once_and_in_codes(style, context):
    x, p = normal(9, TOKENS, CHANNELS, dtype=jnp.bfloat16), parameters()
    one = lambda x, p: layer(context, x, jax.tree.map(lambda a: a[0], p))  # noqa: E731
    forms = {
        "plain": one,
        "scan": functools.partial(scanned, context),
        "jit": jax.jit(one),
        "remat": functools.partial(scanned, context, wrap=jax.checkpoint),
    }
    residual_context = residuals(forms[style], x, p)
    stack = (2,) if style in ("scan", "remat") else ()
    wide = [shape for dtype, shape in residual_context if dtype != "uint8" and TOKENS in shape and shape[-1] >= OUTPUTS]
    codes = sorted(shape[-1] for dtype, shape in residual_context if dtype == "uint8")
    if style == "remat":
        # The block's input alone.
        assert (codes, wide) == ([], [(*stack, TOKENS, CHANNELS)])
        return
    # Norm input, gate, up; faithful: the activated gate and the inputs of the linears too.
    further = [OUTPUTS] * 2 + [CHANNELS] if context is FAITHFUL else []
    assert codes == sorted([CHANNELS, OUTPUTS, OUTPUTS, *further])
    assert not wide


def test_linears_under_a_lean_context_compute_the_weight_gradient_of_the_input_made_again():
    x, w, dy = normal(0, TOKENS, CHANNELS), normal(1, CHANNELS, OUTPUTS), normal(2, TOKENS, OUTPUTS)
    scale = 1 + 0.3 * normal(3, CHANNELS)

    def grads(context, recipe):
        f = lambda w: fp8jax.norm_linear(x, scale, [w], recipe=dataclasses.replace(recipe, context=context))[0]  # noqa: E731
        return jax.jit(lambda w: jax.vjp(f, w)[1](dy)[0])(w)

    h = np.asarray(rms_norm(x, scale, recipe=Context()), np.float64)
    inverse = 1 / np.sqrt((np.asarray(x, np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    again = stored(x, LEAN) * inverse * np.asarray(scale, np.float64)
    step = np.abs(h).max() / 448
    codes = np.asarray(jnp.asarray(np.clip(again / step, -448, 448), jnp.float8_e4m3fn), np.float64) * step
    gradient = np.asarray(fp8jax.quantize(dy, "e5m2").dequantize(), np.float64)
    current = fp8jax.recipes.te_current()
    # The scale is that of the exact input. A few values are so close to a tie that fp32 rounds them to another code.
    assert relative(grads(LEAN, current), codes.T @ gradient) < 2e-3
    assert relative(grads(LEAN, current), grads(FAITHFUL, current)) > 1e-2
    # A recipe whose products for the weight stay in 16 bits reads the values themselves.
    near(grads(LEAN, fp8jax.recipes.switchback()), again.T @ np.asarray(dy, np.float64), steps=2.0**17)
    for name in ("deepseek", "coat"):
        recipe = fp8jax.recipes.get(name)
        assert relative(grads(LEAN, recipe), h.T @ np.asarray(dy, np.float64)) < 0.09


def test_vmap_gives_what_a_loop_gives():
    x, p = normal(0, 3, TOKENS, CHANNELS), jax.tree.map(lambda a: a[0], parameters(jnp.float32))
    grad = jax.jit(jax.grad(lambda x: (layer(LEAN, x, p) ** 2).sum()))
    together, alone = jax.jit(jax.vmap(grad))(x), jnp.stack([grad(a) for a in x])
    assert relative(together, alone) < 1e-2


def test_wrong_arguments_are_refused():
    x = jnp.ones((4, 8))
    with pytest.raises(ValueError, match=r"scale \(channels,\), got \(4, 8\) and \(4,\)"):
        rms_norm(x, jnp.ones(4), recipe=LEAN)
    with pytest.raises(ValueError, match=r"bias \(channels,\)"):
        layer_norm(x, jnp.ones(8), jnp.ones(()), recipe=LEAN)
    with pytest.raises(ValueError, match="unknown activation 'swish'; use one of silu, gelu, gelu_tanh"):
        activation(x, recipe=LEAN, activation="swish")
    with pytest.raises(ValueError, match="glu expects arrays of the same dtype and shape"):
        glu(x, jnp.ones((4, 7)), recipe=LEAN)
