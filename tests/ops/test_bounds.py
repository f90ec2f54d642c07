"""Scales from bounds on results of norms and activations, and on cotangents of activations."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from fp8jax.core.recipe import Context, Linear
from fp8jax.ops.products import operands, product
from tests.distance import relative
from tests.ops.test_contexts import CHANNELS, LEAN, LINEAR, OUTPUTS, TOKENS, layer, normal, parameters
from tests.programs import residuals
from tests.rows import covering, slow

COAT = fp8jax.recipes.coat()


def recipe(amax, recomputes=True, **linear):
    context = Context("e4m3:group16", recompute_activations=recomputes, amax=amax)
    return dataclasses.replace(COAT, context=context, linear=dataclasses.replace(LINEAR, **linear))


@pytest.fixture
def scales(monkeypatch):
    """Returns values, scale and codes of each array of a width that is quantized as a layer's forward input."""
    calls, actual = [], operands.quantize

    def watched(x, *specs, scale=None, **style):
        pair = actual(x, *specs, scale=scale, **style)
        traced = isinstance(x, jax.core.Tracer)  # substitution runs modules aside to recognise activations
        if not traced and specs[1] is None and pair[0].spec.format == "e4m3":
            calls.append((np.asarray(x, np.float64), scale is not None, pair[0]))
        return pair

    monkeypatch.setattr(operands, "quantize", watched)
    return calls


def check(recorded, scale):
    """Asserts that one array was quantized with a scale, accurately."""
    ((values, given, q),) = recorded
    assert given
    np.testing.assert_allclose(float(q.scale.reshape(())), scale, rtol=1e-5)
    assert np.max(np.abs(np.asarray(q.codes, np.float64))) <= 448
    assert relative(q.dequantize(), values) < 0.04
    recorded.clear()


@pytest.mark.parametrize("recomputes", [True, False])
def test_the_scale_of_a_norms_result_is_that_of_a_bound_on_it(recomputes, scales):
    x, w = 3 + normal(0, TOKENS, CHANNELS), normal(1, CHANNELS, OUTPUTS)
    x = x.at[0].set(0).at[0, 0].set(1e4)  # one value of a row is the root of the sum of all their squares
    scale, bias, part = 1 + 0.3 * normal(2, CHANNELS), normal(3, CHANNELS), recipe("bound", recomputes)
    top, shift = float(jnp.max(jnp.abs(scale))), float(jnp.max(jnp.abs(bias)))
    fp8jax.norm_linear(x, scale, [w], recipe=part)
    check(scales, 1.01 * top * np.sqrt(CHANNELS) / 448)
    fp8jax.norm_linear(x, None, [w], recipe=part)
    check(scales, 1.01 * np.sqrt(CHANNELS) / 448)
    fp8jax.norm_linear(x, scale, [w], recipe=part, norm="layer", norm_bias=bias)
    check(scales, 1.01 * (top * np.sqrt(CHANNELS) + shift) / 448)
    assert not scales


def norm_product(x, scale, w, kind, eps):
    """A norm and a matmul in float64."""
    z = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    return z / np.sqrt((z * z).mean(-1, keepdims=True) + eps) * scale @ w


@pytest.mark.parametrize("recomputes", [True, False])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norms_bound_that_is_far_above_its_result_costs_no_accuracy(kind, recomputes):
    x, w, dy = (np.asarray(normal(i, 64, n), np.float64) for i, n in ((0, 64), (1, OUTPUTS), (2, OUTPUTS)))
    outlier = np.ones(64)
    outlier[5] = 1e4
    run = jax.jit(
        lambda x, scale, w, eps: jax.vjp(
            lambda w: fp8jax.norm_linear(x, scale, [w], recipe=recipe("bound", recomputes), norm=kind, eps=eps)[0], w
        ),
        static_argnums=3,
    )
    for size, scale, eps in [(1.0, 1, 1e-3), (1e-5, 1, 1e-3), (1e-30, 1, 1e-3), (1.0, outlier, 1e-3)]:
        part = w / np.reshape(scale * np.ones(64), (64, 1))  # each channel contributes equally to the result
        arrays = (jnp.asarray(a, jnp.float32) for a in (size * x, scale * np.ones(64), part))
        y, back = run(*arrays, eps)
        expected, h = (norm_product(size * x, scale, v, kind, eps) for v in (part, np.eye(64)))
        assert relative(y, expected) < 0.06, (size, eps)
        assert relative(back(jnp.asarray(dy, jnp.float32))[0][:5], (h.T @ dy)[:5]) < 0.08, (size, eps)


@pytest.mark.parametrize("flax", ["nnx", "linen"])
def test_by_substitution_a_layer_behind_a_norm_of_small_inputs_is_as_exact_as_behind_any(flax):
    x = np.asarray(1e-6 * normal(0, 16, 64), np.float64)
    if flax == "nnx":

        class Model(nnx.Module):
            def __init__(self, rngs):
                self.norm = nnx.RMSNorm(64, epsilon=1e-3, rngs=rngs)
                self.linear = nnx.Linear(64, OUTPUTS, use_bias=False, rngs=rngs)

            def __call__(self, x):
                return self.linear(self.norm(x))

        model = Model(nnx.Rngs(0))
        w, y = model.linear.kernel[...], fp8jax.nnx.quantize(model, "coat_fast")(jnp.float32(x))
    else:
        model = nn.Sequential([nn.LayerNorm(epsilon=1e-3), nn.Dense(OUTPUTS, use_bias=False)])
        variables = model.init(jax.random.key(0), jnp.float32(x))
        w = variables["params"]["layers_1"]["kernel"]
        y = fp8jax.linen.quantize(model, "coat_fast").apply(variables, jnp.float32(x))
    expected = norm_product(x, 1.0, np.asarray(w, np.float64), {"nnx": "rms", "linen": "layer"}[flax], 1e-3)
    assert relative(y, expected) < 0.06


@pytest.mark.parametrize("where", ["everywhere alike", "out of sample", "in the sample", "nothing in the sample"])
def test_the_scale_of_an_activations_result_follows_from_a_sample_of_it_unless_more_is_found(where, scales):
    gate, up, w = normal(0, 2, 300, OUTPUTS), normal(1, 2, 300, OUTPUTS), normal(2, OUTPUTS, CHANNELS)
    rows = gate.reshape(600, OUTPUTS)
    if where == "out of sample":
        rows = rows.at[40, 3].set(50.0)
    elif where == "in the sample":
        rows = rows.at[513, 3].set(50.0)
    elif where == "nothing in the sample":
        rows = rows.at[:32].set(0).at[512:544].set(0)
    gate, part = rows.reshape(gate.shape), recipe("bound")
    y = jnp.abs(fp8jax.glu(gate, up, recipe=recipe("exact"))).reshape(600, OUTPUTS)
    sample, largest = (float(jnp.max(a)) for a in (jnp.concatenate([y[:32], y[512:544]]), y))
    assert (4 * sample < largest) == (where in ("out of sample", "nothing in the sample"))
    fp8jax.glu_linear(gate, up, w, recipe=part)
    check(scales, max(4 * sample, largest) / 448)


def test_bounds_are_of_layers_that_quantize_so(scales):
    x, w = normal(0, TOKENS, CHANNELS), normal(1, CHANNELS, OUTPUTS)
    token = recipe("bound", x="e4m3:token", x_wgrad="e4m3:token")
    fp8jax.linear(fp8jax.rms_norm(x, recipe=recipe("bound")), w, recipe=recipe("bound"))  # is computed without a norm
    fp8jax.norm_linear(x, None, [w], recipe=token)
    assert [scale for _, scale, _ in scales] == [False] * 2


class Perceptron(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(CHANNELS, rngs=rngs)
        self.gate, self.up = (nnx.Linear(CHANNELS, OUTPUTS, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(OUTPUTS, CHANNELS, rngs=rngs)

    def __call__(self, x):
        h = self.norm(x)
        return self.down(nnx.silu(self.gate(h)) * self.up(h))


class LinenPerceptron(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.RMSNorm(name="norm")(x)
        gate, up = (nn.Dense(OUTPUTS, name=name)(h) for name in ("gate", "up"))
        return nn.Dense(CHANNELS, name="down")(nn.silu(gate) * up)


@pytest.mark.parametrize("flax", [slow("nnx"), "linen"])
def test_by_substitution_bounds_are_of_the_layers_that_rules_quantize(flax, scales):
    x, part = normal(0, TOKENS, CHANNELS), recipe("bound")

    def run(rules):
        scales.clear()
        variables = LinenPerceptron().init(jax.random.key(0), x)
        with jax.disable_jit():  # a call is compiled otherwise
            if flax == "nnx":
                fp8jax.nnx.quantize(Perceptron(nnx.Rngs(0)), rules)(x)
            else:
                fp8jax.linen.quantize(LinenPerceptron(), rules).apply(variables, x)
        return {np.shape(values)[-1]: scale for values, scale, _ in scales}

    assert run(part) == {CHANNELS: True, OUTPUTS: True}
    assert run(recipe("exact")) == {CHANNELS: False, OUTPUTS: False}
    token = recipe("bound", x="e4m3:token", x_wgrad="e4m3:token")
    assert run([fp8jax.Rule("down", token), fp8jax.Rule(".*", part)]) == {CHANNELS: True, OUTPUTS: False}


def whole(part, x, p):
    x, gate, up = fp8jax.norm_linear(x, p["norm"], (p["gate"], p["up"]), recipe=part, residual=True)
    return fp8jax.glu_linear(gate, up, p["down"], x, recipe=part)


def test_a_layer_under_bounds_is_as_exact_as_under_largest_values():
    p = jax.tree.map(lambda a: a[0], parameters(jnp.float32))
    x, dy = 3 * normal(0, 600, CHANNELS), 1e-3 * normal(1, 600, CHANNELS)

    @functools.partial(jax.jit, static_argnums=0)
    def run(part, x, p):
        y, vjp_fn = jax.vjp(functools.partial(whole, part), x, p)
        return y, vjp_fn(dy)

    def values(part):
        return jax.tree.leaves(run(part, x, p))

    def errors(part):
        return [relative(a, b) for a, b in zip(values(part), exact, strict=True)]

    exact = values(fp8jax.recipes.bf16())

    for recomputes in (True, False):
        of_bounds, of_amaxes = (errors(recipe(amax, recomputes)) for amax in ("bound", "exact"))
        for bound, largest in zip(of_bounds, of_amaxes, strict=True):
            assert 0 < bound < 1.1 * largest


def test_vmap_and_jit_give_what_a_loop_gives():
    gate, up = (normal(i, 3, 4 * TOKENS, OUTPUTS) for i in range(2))
    gate, w, part = gate.at[1, 40].multiply(1e3), normal(2, OUTPUTS, CHANNELS), recipe("bound")
    y = jnp.max(jnp.abs(fp8jax.glu(gate, up, recipe=Context())), -1)
    assert (4 * jnp.max(y[:, :32], 1) < jnp.max(y, 1)).tolist() == [False, True, False]
    value = lambda gate, up: fp8jax.glu_linear(gate, up, w, recipe=part)  # noqa: E731
    both = lambda *a: (value(*a), *jax.grad(lambda *a: (value(*a) ** 2).sum(), (0, 1))(*a))  # noqa: E731
    together, alone = jax.jit(jax.vmap(both))(gate, up), list(map(jax.jit(both), gate, up))
    for actual, *expected in zip(together, *alone, strict=True):
        for a, b in zip(actual, expected, strict=True):
            assert relative(a, b) < 1e-2


@pytest.mark.parametrize(("recomputes", "style"), covering([True, False], [lambda f: f, jax.jit, jax.checkpoint]))
def test_no_more_is_kept_under_bounds(recomputes, style):
    x, p = normal(9, 600, CHANNELS, dtype=jnp.bfloat16), parameters()

    def scanned_residuals(part):
        step = style(lambda x, p: whole(part, x, p))
        return residuals(lambda x, p: jax.lax.scan(lambda x, p: (step(x, p), None), x, p)[0], x, p)

    assert sorted(scanned_residuals(recipe("bound", recomputes))) == sorted(
        scanned_residuals(recipe("exact", recomputes))
    )


def test_the_bound_of_a_norm_holds_after_a_cast_and_is_finite(scales):
    x, w, part = normal(0, TOKENS, CHANNELS), normal(1, CHANNELS, OUTPUTS), recipe("bound")

    def f(w, x):
        h = (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)
        return jnp.sin(h.astype(jnp.float32)[0]), h @ w.astype(h.dtype)

    with jax.disable_jit():
        fp8jax.transform(f, [fp8jax.Rule(".*", part)])(w, x)
    check(scales, 1.01 * np.sqrt(CHANNELS) / 448)
    fp8jax.norm_linear(x, jnp.ones(CHANNELS).at[0].set(1e38), [w], recipe=part)
    ((_, _, q),) = scales
    np.testing.assert_allclose(float(q.scale.reshape(())), np.finfo(np.float32).max / 448, rtol=1e-5)


def plain(context, x, p):
    part = dataclasses.replace(COAT, linear=LINEAR, context=context)
    return fp8jax.glu_linear(fp8jax.linear(x, p["gate"], recipe=part), None, p["down"], recipe=part, activation="gelu")


@pytest.mark.parametrize("f", [layer, plain])
def test_bounded_cotangents_do_not_saturate_and_are_as_exact_as_those_under_their_largest(f, monkeypatch):
    calls = []
    actual = product.quantize_and_sum

    def watched(x, *specs, scale=None, **style):
        pair, total = actual(x, *specs, scale=scale, **style)
        if scale is not None and x.shape[-1] == OUTPUTS and pair[0] is not None and pair[0].spec.format == "e5m2":
            calls.append(jnp.max(jnp.abs(pair[0].codes.astype(jnp.float32))))
        return pair, total

    monkeypatch.setattr(product, "quantize_and_sum", watched)
    p = jax.tree.map(lambda a: a[0], parameters(jnp.float32))
    x, dy = normal(0, 40 * TOKENS, CHANNELS), 1e-3 * normal(1, 40 * TOKENS, CHANNELS) * 2.0 ** normal(3, CHANNELS)

    def grads(context):
        calls.clear()
        run = jax.jit(lambda x, p: (jax.vjp(functools.partial(f, context), x, p)[1](dy), calls))
        gradients, tops = run(x, p)
        return jax.tree.leaves(gradients), tops

    (largest, none), (bounded, tops) = grads(LEAN), grads(dataclasses.replace(LEAN, amax="bound"))
    for module in (__name__, "tests.ops.test_contexts"):
        monkeypatch.setattr(f"{module}.LINEAR", Linear())
    exact, _ = grads(Context())
    assert not none
    assert len(tops) == (2 if f is layer else 1)
    assert all(0 < top < 2**15 for top in tops)  # below the largest code of e5m2, which the largest values would have
    for e, a, b in zip(exact, largest, bounded, strict=True):
        assert not e.any() or relative(b, e) < 1.2 * relative(a, e)
    assert any(not np.array_equal(a, b) for a, b in zip(largest, bounded, strict=True))


@pytest.mark.parametrize(
    ("name", "gate", "gated"), [("silu", -24.0, True), ("silu", -28.0, False), ("silu", 3.0, True)]
)
def test_where_an_activation_is_flat_bounds_of_its_cotangents_cost_nothing(name, gate, gated):
    """The slope of all elements is far below the largest one; at 3 it is not."""
    x, dy, up, down = 1 + 0.1 * normal(0, 64, 64), normal(1, 64, CHANNELS), normal(2, 64, 80), normal(3, 80, CHANNELS)
    w = jnp.full((64, 80), gate / 64) * (1 + 0.1 * normal(4, 64, 80))

    def gradients(scales):
        part = recipe(scales)

        def f(x, w, up):
            g, u = (fp8jax.linear(x, v, recipe=part) for v in (w, up))
            return fp8jax.glu_linear(g, u if gated else None, down, recipe=part, activation=name)

        return jax.jit(lambda *args: jax.vjp(f, *args)[1](dy))(x, w, up)

    for a, b in zip(gradients("bound"), gradients("exact"), strict=True):
        assert not b.any() or relative(a, b) < 0.12


@pytest.mark.parametrize("style", ["e4m3:block16", "e4m3:mx32+ocp", "reshaped", "two axes", "two readers", "known"])
def test_where_no_bound_is_known_the_largest_cotangent_gives_the_scale(style, monkeypatch):
    spec = style if ":" in style else "e4m3:group16"
    x, w, v = normal(0, 32, 64), 0.1 * normal(1, 64, 64), 0.1 * normal(2, 64, 64)
    given, actual = [], product.quantize_and_sum

    def watched(x, *specs, scale=None, **style):
        given.append(scale is not None)
        return actual(x, *specs, scale=scale, **style)

    def f(p, x):
        h = jax.nn.silu(x @ p["w"])
        if style == "reshaped":
            h = h.reshape(2, 16, 64)
        if style == "two axes":
            return jnp.einsum("tac,acd->td", jax.nn.silu((x @ p["w"]).reshape(16, 2, 64)), p["both"])
        y = h @ p["v"]
        return y + h if style == "two readers" else y

    monkeypatch.setattr(product, "quantize_and_sum", watched)
    part = dataclasses.replace(recipe("bound"), context=Context(spec, recompute_activations=True, amax="bound"))
    fast = fp8jax.transform(f, [fp8jax.Rule(".*", part)])
    jax.eval_shape(jax.grad(lambda *args: jnp.sum(fast(*args))), {"w": w, "v": v, "both": jnp.stack([w, v])}, x)
    # The gradients of the last product, and of the one before the activation. A sum of two readers' gradients is a
    # separate array.
    assert given[:2] == [False, style == "known"]


def test_bounds_of_gradients_that_are_not_finite_are_those_of_the_others():
    x, w, v = normal(0, 32, 64), 0.1 * normal(1, 64, 64), 0.1 * normal(2, 64, 64)
    dy = 1e-6 * normal(3, 32, 64)

    def grad(amax, dy):
        part = recipe(amax)

        def f(x):
            return fp8jax.glu_linear(fp8jax.linear(x, w, recipe=part), None, v, recipe=part, activation="silu")

        return np.asarray(jax.vjp(f, x)[1](dy)[0])

    for value in (np.nan, np.inf):
        actual, expected = grad("bound", dy.at[5].set(value))[6:], grad("bound", dy)[6:]
        assert relative(actual, expected) < 0.2


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"unknown context\.amax 'small'; use one of exact, bound"):
        Context("e4m3:group16", amax="small")
    with pytest.raises(ValueError, match=r"context\.amax 'bound' needs a format; set context\.residual"):
        Context(amax="bound")
