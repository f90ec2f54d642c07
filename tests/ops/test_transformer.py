"""The linear layers of a transformer with the operations before them, as functions."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from tests.distance import relative
from tests.programs import residuals
from tests.rows import covering, slow

COAT = fp8jax.recipes.coat()
FAITHFUL = dataclasses.replace(COAT, context=fp8jax.recipes.Context("e4m3:group16"))
BF16 = fp8jax.recipes.bf16()
BATCH, LENGTH, HEADS, CHANNELS = 2, 8, 4, 16
WIDTH, INNER = HEADS * CHANNELS, 96


def draw(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def codes(f, *args):
    """Returns the shapes of codes that a function saves, and of 16-bit arrays that are not weights."""
    saved = residuals(f, *args)
    wide = [s for d, s in saved if d in ("bfloat16", "float32") and len(s) >= 2 and s[0] in (BATCH, BATCH * LENGTH)]
    return sorted(s for d, s in saved if d == "uint8"), sorted(
        s for s in wide if s[-1] not in (1, WIDTH // 16, INNER // 16)
    )


def gradients(f, *args):
    loss = lambda *a: sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in jax.tree.leaves(f(*a)))  # noqa: E731
    return jax.jit(jax.grad(loss, range(len(args))))(*args)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_norm_and_its_readers_keep_one_copy(norm):
    x, scale, weights = (
        1 + draw(0, BATCH, LENGTH, WIDTH),
        1 + 0.1 * draw(1, WIDTH),
        [0.1 * draw(i, WIDTH, 32) for i in (2, 3, 4)],
    )
    bias = draw(5, WIDTH) if norm == "layer" else None
    f = lambda recipe, *a: fp8jax.norm_linear(*a, recipe=recipe, norm=norm, norm_bias=bias)  # noqa: E731
    plain = fp8jax.rms_norm(x, scale, recipe=COAT) if bias is None else fp8jax.layer_norm(x, scale, bias, recipe=COAT)
    for y, w in zip(f(COAT, x, scale, weights), weights, strict=True):
        np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (y, fp8jax.linear(plain, w, recipe=COAT))))
    whole = (BATCH, LENGTH, WIDTH)
    assert codes(functools.partial(f, COAT), x, scale, weights) == ([whole], [])
    assert codes(functools.partial(f, FAITHFUL), x, scale, weights) == (sorted([whole, (BATCH * LENGTH, WIDTH)]), [])
    actual = {r.name: gradients(functools.partial(f, r), x, scale, *[weights]) for r in (COAT, BF16)}
    assert relative(actual[COAT.name], actual[BF16.name]) < 0.12


def test_the_projection_of_attention_keeps_nothing_beside_it():
    """An operation that saves its result represents flash attention."""
    z, residual = draw(0, BATCH, LENGTH, HEADS, CHANNELS), draw(1, BATCH, LENGTH, WIDTH)
    w = 0.1 * draw(2, HEADS, CHANNELS, WIDTH)

    @jax.custom_vjp
    def attention(z):
        return jnp.tanh(z)

    attention.defvjp(lambda z: 2 * (jnp.tanh(z),), lambda y, dy: (dy * (1 - y * y),))

    def f(recipe, z, w, residual):
        return fp8jax.attention_output(attention(z), w, residual, recipe=recipe)

    y = f(COAT, z, w, residual)
    expected = fp8jax.linear(jnp.tanh(z).reshape(BATCH, LENGTH, WIDTH), w.reshape(WIDTH, WIDTH), recipe=COAT)
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(residual + expected, np.float32))
    np.testing.assert_array_equal(
        *(np.asarray(f(COAT, z, a, residual), np.float32) for a in (w, w.reshape(WIDTH, WIDTH)))
    )
    # The residuals of attention, and no codes.
    assert codes(functools.partial(f, COAT), z, w, residual) == ([], [(BATCH, LENGTH, HEADS, CHANNELS)])
    actual = {r.name: gradients(functools.partial(f, r), z, w, residual) for r in (COAT, BF16)}
    assert relative(actual[COAT.name], actual[BF16.name]) < 0.12
    only_linear = dataclasses.replace(COAT, context=fp8jax.recipes.Context())
    assert codes(functools.partial(f, only_linear), z, w, residual)[0] == [(BATCH * LENGTH, WIDTH)]


@pytest.mark.parametrize("gated", [True, False])
def test_the_second_half_of_a_perceptron_keeps_its_gate_and_up(gated):
    gate, up, residual = (draw(i, BATCH, LENGTH, n) for i, n in enumerate((INNER, INNER, WIDTH)))
    up, w = up if gated else None, 0.1 * draw(3, INNER, WIDTH)
    f = lambda recipe, gate, up, w, residual: fp8jax.glu_linear(  # noqa: E731
        gate, up, w, residual, recipe=recipe, activation="gelu"
    )
    exact = jax.nn.gelu(gate.astype(jnp.float32), approximate=False) * (1 if up is None else up.astype(jnp.float32))
    expected = residual.astype(jnp.float32) + jnp.einsum("bti,io->bto", exact, w.astype(jnp.float32))
    assert relative(f(COAT, gate, up, w, residual), expected) < 0.06
    inner = (BATCH, LENGTH, INNER)
    assert codes(functools.partial(f, COAT), gate, up, w, residual) == ([inner] * (1 + gated), [])
    actual = {r.name: gradients(lambda *a, r=r: f(r, a[0], up, *a[1:]), gate, w, residual) for r in (COAT, BF16)}
    assert relative(actual[COAT.name], actual[BF16.name]) < 0.12


def test_a_layer_of_these_functions_under_scan_keeps_what_the_plan_says():
    """In U = tokens x width x 2 bytes: inputs of norms, gate and up as codes, and residuals of attention."""
    layers = 3
    shapes = {name: (WIDTH, WIDTH) for name in "qkvo"}
    shapes |= {"gate": (WIDTH, INNER), "up": (WIDTH, INNER), "down": (INNER, WIDTH)}
    w = {name: 0.1 * draw(i, layers, *shape) for i, (name, shape) in enumerate(shapes.items())}
    x = draw(9, BATCH, LENGTH, WIDTH)

    def layer(x, w):
        q, k, v = fp8jax.norm_linear(x, None, [w["q"], w["k"], w["v"]], recipe=COAT)
        q, k, v = (a.reshape(BATCH, LENGTH, HEADS, CHANNELS) for a in (q, k, v))
        x = fp8jax.attention_output(_kept(q, k, v), w["o"], x, recipe=COAT)
        gate, up = fp8jax.norm_linear(x, None, [w["gate"], w["up"]], recipe=COAT)
        return fp8jax.glu_linear(gate, up, w["down"], x, recipe=COAT), None

    model = lambda x, w: jax.lax.scan(layer, x, w)[0]  # noqa: E731
    saved = [
        (d, s)
        for d, s in residuals(model, x, w)
        if s[:1] == (layers,) and s not in {(layers, *s) for s in shapes.values()}
    ]
    size = sum(int(np.prod(s)) * jnp.dtype(d).itemsize for d, s in saved) / layers
    unit = BATCH * LENGTH * WIDTH * 2
    # Two norms' inputs, gate and up in codes with bf16 scales for 16, q, k, v and output in bf16, roots and scalars.
    plan = (2 + 2 * INNER / WIDTH) * 0.5 * (1 + 2 / 16) + 4
    assert plan <= size / unit < plan + 0.1
    assert relative(model(x, w), jax.jit(model)(x, w)) < 0.03


@jax.custom_vjp
def _kept(q, k, v):
    return jnp.tanh(q * k) * v


def _kept_forward(q, k, v):
    y = _kept(q, k, v)
    return y, (q, k, v, y)


def _kept_backward(saved, dy):
    q, k, v, y = saved
    slope = dy * (v - jnp.where(v == 0, 0, y * y / jnp.where(v == 0, 1, v)))
    return slope * k, slope * q, dy * jnp.tanh(q * k)


_kept.defvjp(_kept_forward, _kept_backward)


@pytest.mark.parametrize(("recipe", "norm"), covering([COAT, FAITHFUL, BF16], ["rms", "layer"]))
def test_a_residual_taken_from_the_norm_has_the_same_gradients(norm, recipe):
    x, scale, w = draw(0, BATCH, LENGTH, WIDTH, dtype=jnp.float32), 1 + draw(1, WIDTH), 0.1 * draw(2, WIDTH, WIDTH)
    weights = (w.astype(jnp.float32),) * 2

    def f(residual, x, scale):
        *first, a, b = fp8jax.norm_linear(x, scale, weights, recipe=recipe, norm=norm, residual=residual)
        return (first[0] if residual else x) ** 2 + a * b

    actual, expected = (gradients(functools.partial(f, residual), x, scale) for residual in (True, False))
    for a, b in zip(actual, expected, strict=True):
        assert relative(a, b) < 1e-6
    assert residuals(functools.partial(f, True), x, scale) == residuals(functools.partial(f, False), x, scale)


@pytest.mark.parametrize(
    "mapped",
    [x if sum(x) in (0, 4) or x == (True, False, False, True) else slow(x)
     for x in itertools.product((False, True), repeat=4)],
    ids=str,
)  # fmt: skip
def test_gradients_of_readers_that_are_mapped_or_not(mapped):
    """Under vmap, with a mapped and an unmapped input, as if experts read the same tokens."""
    plain = dataclasses.replace(BF16, context=COAT.context)
    axes = (0 if mapped[0] else None, [0 if m else None for m in mapped[1:]])
    x = draw(0, *([3] if mapped[0] else []), LENGTH, WIDTH, dtype=jnp.float32)
    weights = [0.1 * draw(i, *([3] if m else []), WIDTH, WIDTH, dtype=jnp.float32) for i, m in enumerate(mapped[1:], 1)]

    def loss(residual, x, weights):
        def one(x, weights):
            actual = fp8jax.norm_linear(x, None, weights, recipe=plain, residual=residual)
            return jnp.prod(jnp.stack([jnp.cos(y) for y in (actual if residual else (x, *actual))]), 0)

        return jnp.sum(jax.vmap(one, axes, axis_size=3)(x, weights))

    def apart(x, weights):
        """The same with a separate input for each reader."""

        def one(x, weights):
            actual = [fp8jax.norm_linear(x, None, [w], recipe=plain)[0] for w in weights]
            return jnp.prod(jnp.stack([jnp.cos(y) for y in (x, *actual)]), 0)

        return jnp.sum(jax.vmap(one, axes, axis_size=3)(x, weights))

    expected = jax.tree.leaves(jax.grad(apart, (0, 1))(x, weights))
    for residual in (False, True):
        result = jax.tree.leaves(jax.grad(functools.partial(loss, residual), (0, 1))(x, weights))
        for a, b in zip(result, expected, strict=True):
            assert relative(a, b) < 0.02


def test_the_norm_adds_the_gradient_of_the_residual_stream():
    x, weights = draw(0, LENGTH, WIDTH), [0.1 * draw(i, WIDTH, WIDTH) for i in (1, 2, 3)]

    def f(x):
        x, *y = fp8jax.norm_linear(x, None, weights, recipe=COAT, residual=True)
        return sum(jnp.sum(jnp.sin(a.astype(jnp.float32))) for a in (x, *y))

    def sums(f):
        jaxpr = jax.make_jaxpr(jax.grad(f))(x).jaxpr
        return [e for e in jaxpr.eqns if e.primitive.name == "add_any" and e.outvars[0].aval.shape == x.shape]

    assert len(sums(f)) == len(weights) - 1
    weights = weights[:1]
    assert not sums(f)


def test_weights_quantized_before_change_no_bit():
    x, weights = draw(0, BATCH, LENGTH, WIDTH), [0.1 * draw(i, WIDTH, WIDTH) for i in (1, 2, 3)]
    prequantized = [fp8jax.quantize_weight(w, recipe=COAT) for w in weights]

    def f(prequantized, x, weights):
        a, b = fp8jax.norm_linear(x, None, weights[:2], recipe=COAT, quantized=prequantized[:2])
        y = fp8jax.attention_output(
            a.reshape(BATCH, LENGTH, HEADS, -1), weights[2], recipe=COAT, quantized=prequantized[2]
        )
        return fp8jax.glu_linear(y, b, weights[2], recipe=COAT, quantized=prequantized[2])

    results = (gradients(functools.partial(f, operands), x, weights) for operands in (prequantized, [None] * 3))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_errors_name_the_value():
    x, w = draw(0, 4, WIDTH), draw(1, WIDTH, 8)
    with pytest.raises(ValueError, match="1 weights were passed with 2 quantized"):
        fp8jax.norm_linear(x, None, [w], recipe=COAT, quantized=[fp8jax.quantize_weight(w, recipe=COAT)] * 2)
    with pytest.raises(TypeError, match=r"full fp8jax.Recipe"):
        fp8jax.norm_linear(x, None, [w], recipe=COAT.linear)
    with pytest.raises(ValueError, match="'group'"):
        fp8jax.norm_linear(x, None, [w], recipe=COAT, norm="group")
    with pytest.raises(ValueError, match=r"'rms' \(without norm_bias\) or 'layer', got 'rms' with norm_bias"):
        fp8jax.norm_linear(x, None, [w], recipe=COAT, norm_bias=jnp.ones(WIDTH))
    with pytest.raises(ValueError, match=r"not \(60, 8\)"):
        fp8jax.attention_output(x.reshape(4, HEADS, CHANNELS), w[:60], recipe=COAT)
    with pytest.raises(ValueError, match="unknown activation"):
        fp8jax.glu_linear(x, x, w, recipe=COAT, activation="relu")
    with pytest.raises(ValueError, match="delayed"):
        fp8jax.attention_output(x.reshape(4, HEADS, CHANNELS), w, recipe=fp8jax.recipes.te_delayed())
