"""Microscaled linear layers: operands of wgrad, its range, and the cost of each way to compute it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8jax
from experiments.models.llama import LlamaConfig
from experiments.train.task import Task
from fp8jax.core.recipe import Linear
from fp8jax.ops.quantization import microscaling
from fp8jax.ops.quantization.microscaling import fold_rows, gradient_operands, rescale_rows_pow2, transpose_codes
from tests.distance import relative
from tests.rows import slow

ROW, TENSOR = (fp8jax.QuantSpec.parse(s) for s in ("e4m3:mx32+token", "e4m3:mx32"))
MOSS = fp8jax.recipes.moss()


@functools.cache
def problem(tokens=96, inputs=128, outputs=64, octaves=3.0):
    """Input, weight and a gradient whose tokens differ by some octaves."""
    with jax.ensure_compile_time_eval():
        keys = jax.random.split(jax.random.key(0), 5)
        x, w, dy = (
            jax.random.normal(k, s)
            for k, s in zip(keys[:3], [(tokens, inputs), (inputs, outputs), (tokens, outputs)], strict=True)
        )
        spread = [jnp.exp2(octaves * jax.random.normal(k, (tokens, 1))) for k in keys[3:]]
        return x * spread[0], 0.05 * w, 1e-4 * dy * spread[1]


@pytest.mark.parametrize("specs", [(ROW, ROW), (TENSOR, ROW), (TENSOR, TENSOR), ("e4m3", ROW), (TENSOR, "e5m2")])
def test_codes_of_both_operands_are_those_of_the_other_products_shifted(specs):
    x, _, dy = problem()
    gradient_codes, rows = (
        fold_rows(a, s) if isinstance(s, fp8jax.QuantSpec) else fp8jax.quantize(a, s)
        for a, s in zip((x, dy), specs, strict=True)
    )
    if specs[1] == ROW:
        rows, _ = gradient_operands(dy, ROW, gradient_codes.scale)
    columns, dy_columns = rescale_rows_pow2(gradient_codes, rows), transpose_codes(rows)
    assert columns.spec.granularity == dy_columns.spec.granularity == "tensor"
    np.testing.assert_array_equal(np.asarray(dy_columns.codes.T).view(np.uint8), np.asarray(rows.codes).view(np.uint8))
    actual = np.asarray(columns.dequantize(), np.float64).T
    expected = np.asarray(gradient_codes.dequantize(), np.float64) * np.asarray(
        microscaling.relative_token_scales(rows), np.float64
    )
    top = float(columns.scale[0, 0])
    normal = np.abs(expected) >= 2.0**-6 * top * (1 - 1e-6)
    assert 0.01 < normal.mean() < 1
    np.testing.assert_allclose(actual[normal], expected[normal], rtol=1e-6)
    # The rest is rounded to half the smallest code.
    assert np.max(np.abs(actual - expected)) <= 2.0**-10 * top * 1.001


def test_a_scale_of_rows_holds_them_and_wastes_less_than_an_octave():
    x, _, _ = problem(octaves=9.0)
    level = jnp.exp(jax.random.normal(jax.random.key(9), (x.shape[0], 1)))
    q = fold_rows(x, ROW, level)
    powers = np.log2(np.asarray(q.scale / level, np.float64))
    np.testing.assert_allclose(powers, np.round(powers), atol=1e-6)
    largest = np.max(np.abs(np.asarray(q.codes, np.float64)), 1)
    assert ((largest > 208) & (largest <= 448)).all()
    np.testing.assert_array_equal(
        np.asarray(fold_rows(x, ROW).scale), np.asarray(fp8jax.quantize(x, "e4m3:token").scale)
    )


def test_tokens_without_gradient_take_no_range_from_others():
    x, w, dy = problem()
    dy = 1e-3 * dy.at[::2].set(0)

    @jax.jit
    def gradient(x, w, dy):
        return jax.vjp(lambda w: fp8jax.linear(x, w, recipe=MOSS), w)[1](dy)[0]

    actual, expected = gradient(x, w, dy), gradient(x[1::2], w, dy[1::2])
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-4, atol=1e-9)


def test_of_a_token_far_below_the_others_nothing_else_is_lost_and_what_is_no_number_shows():
    x, w, dy = problem(octaves=0.0)
    _, vjp_fn = jax.vjp(lambda x, w: fp8jax.linear(x, w, recipe=MOSS), x, w)
    dx, dw = vjp_fn(dy.at[3].multiply(2.0**-40))
    expected = x.T @ dy.at[3].set(0)
    assert relative(dw, expected) < 0.05
    assert relative(dx[3], 2.0**-40 * dy[3] @ w.T) < 0.05
    dx, dw = vjp_fn(dy.at[3, 5].set(jnp.nan))
    assert np.isnan(dx[3]).all()
    assert np.isfinite(np.delete(np.asarray(dx), 3, 0)).all()
    assert np.isnan(dw[:, 5]).all()


@pytest.mark.parametrize("recipe", ["moss", "fast"])
def test_gradients_of_extreme_inputs_and_cotangents_are_as_exact_as_of_ordinary_ones(recipe):
    """The scales of both operands share tokens. Their product may be far outside fp32, though no gradient is."""
    x, w, dy = (np.asarray(a, np.float64) for a in problem(octaves=1.0))
    dy = 1e4 * dy

    @jax.jit
    def gradients(x, dy):
        return jax.vjp(lambda x, w: fp8jax.linear(x, w, recipe=recipe), x, jnp.float32(w))[1](dy)

    # In the last two the weight's gradient is itself outside of fp32.
    for of_x, of_dy in [(1.0, 1.0), (1e-17, 1e-17), (1.0, 1e-34), (1e33, 1e-33), (1e-24, 1e-20), (1e20, 1e25)]:
        dx, dw = gradients(jnp.float32(of_x * x), jnp.float32(of_dy * dy))
        assert relative(np.asarray(dx, np.float64) / of_dy, dy @ w.T) < 0.05, (of_x, of_dy)
        if 1e-35 < of_x * of_dy < 1e35:
            assert relative(np.asarray(dw, np.float64) / of_x / of_dy, x.T @ dy) < 0.05, (of_x, of_dy)


@pytest.mark.parametrize("recipe", ["moss", slow("fast"), "coat", slow("coat_fast")])
def test_the_gradient_of_a_glus_input_is_there_however_small_it_is(recipe):
    rng = np.random.default_rng(0)
    gate, up, down = rng.normal(size=(64, 96)) / 8, rng.normal(size=(64, 96)) / 8, rng.normal(size=(96, 64)) / 10
    x, dy = rng.normal(size=(16, 64)), rng.normal(size=(16, 64))

    def mlp(x):
        g, u = (fp8jax.linear(x, jnp.float32(w), recipe=recipe) for w in (gate, up))
        return fp8jax.glu_linear(g, u, jnp.float32(down), recipe=recipe)

    gradient = jax.jit(lambda x: jax.vjp(mlp, x)[1](jnp.float32(dy))[0])
    dh = dy @ down.T
    # silu(z) = z / 2 + O(z^2)
    expected = (dh * (x @ up) / 2) @ gate.T + (dh * (x @ gate) / 2) @ up.T
    for size in (1e-8, 1e-20, 1e-33):
        actual = np.asarray(gradient(jnp.float32(size * x)), np.float64) / size
        assert relative(actual, expected) < 0.15, size


ARMS = {
    "shared": MOSS.linear,
    "quantized again": Linear("e4m3:mx32+token", "e4m3", "e4m3:mx32+token", x_wgrad="e4m3", dy_wgrad="e4m3"),
    "e5m2": Linear("e4m3:mx32", "e4m3", "e5m2"),
}


def test_shared_scales_cost_the_weights_gradient_less_than_a_second_quantization_or_e5m2():
    x, w, dy = problem(octaves=1.0)
    errors = {}
    for name, part in ARMS.items():
        _, vjp_fn = jax.vjp(functools.partial(fp8jax.linear, recipe=part), x, w)
        dx, dw = vjp_fn(dy)
        errors[name] = relative(dx, dy @ w.T), relative(dw, x.T @ dy)
    assert errors["shared"][1] < 0.9 * errors["quantized again"][1]
    assert errors["shared"][1] < 0.75 * errors["e5m2"][1]
    assert errors["shared"][0] < 0.75 * errors["e5m2"][0]


def test_no_token_changes_an_earlier_ones_output():
    x, w, _ = problem()
    later = x.at[-1].multiply(300.0)
    a, b = (fp8jax.linear(x, w, recipe=MOSS)[:-1] for x in (x, later))
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("recipe", ["moss", "fast"])
def test_of_a_norms_result_and_a_glu_all_gradients_are_near(recipe):
    x, w, _ = problem()
    w2 = w.T
    scale = jnp.ones(x.shape[-1])

    def block(x, w, w2, recipe):
        x, gate, up = fp8jax.norm_linear(x, scale, (w, 1.5 * w), recipe=recipe, residual=True)
        return fp8jax.glu_linear(gate, up, w2, x, recipe=recipe)

    target = jax.random.normal(jax.random.key(3), x.shape)
    actual, expected = (
        jax.jit(lambda *a, r=r: (lambda y, back: (y, *back(target)))(*jax.vjp(lambda *b: block(*b, recipe=r), *a)))(
            x, w, w2
        )
        for r in (recipe, "bf16")
    )
    for a, b in zip(actual, expected, strict=True):
        assert relative(a, b) < 0.1


def test_codes_do_not_depend_on_the_mesh():
    x, w, dy = problem()

    @jax.jit
    def three(x, w, dy):
        y, vjp_fn = jax.vjp(lambda x, w: fp8jax.linear(x, w, recipe=MOSS), x, w)
        return y, *vjp_fn(dy)

    expected = three(x, w, dy)
    for shape, names in (((8,), ("data",)), ((4, 2), ("data", "model"))):
        mesh = Mesh(np.array(jax.devices()).reshape(shape), names)
        rows, cut = (NamedSharding(mesh, P(*axes)) for axes in ((names[0],), (None, names[-1])))
        actual = three(jax.device_put(x, rows), jax.device_put(w, cut), jax.device_put(dy, rows))
        for a, b in zip(actual, expected, strict=True):
            # Sums alone may differ: another rounding would show as 2^-4 of single values.
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("e4m3:mx32+token", "e4m3", "e5m2"), "a per-token fp32 scale"),
        (("e4m3:mx32+token", "e4m3", "e4m3:mx32"), "a per-token fp32 scale"),
        (("e4m3:mx32+ocp", "e4m3", "e5m2"), "cannot be transposed"),
        (("e4m3:mx32", "e4m3", "e5m2+stochastic"), "cannot be transposed"),
        (("e4m3:block128", "e4m3:block128", "e4m3:mx32"), "cannot be transposed"),
    ],
)
def test_operands_that_cannot_share_their_scales_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Linear(*fields)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["moss", "fast"])
def test_a_model_trains_as_in_bf16(recipe):
    tokens = np.random.default_rng(0).integers(0, 40, (4, 17)).astype(np.int32)
    shape, losses = LlamaConfig(vocab=40, dim=32, layers=2, heads=2, kv_heads=1, mlp_dim=64), {}
    for name in ("bf16", recipe):
        preset = fp8jax.recipes.get(name)
        tracked = [fp8jax.track_weight_amax(5)] if preset.linear.needs_weight_bounds else []
        task = Task(shape, optax.chain(optax.adamw(3e-3), *tracked), preset, remat=recipe == "fast", seed=0)
        state, step = task.init(), jax.jit(task.step)
        actual = [float((state := (out := step(state, tokens))[0]) and out[1]["loss"]) for _ in range(40)]
        losses[name] = np.array(actual)
    assert losses["bf16"][-1] < 0.5 * losses["bf16"][0]
    np.testing.assert_allclose(losses[recipe], losses["bf16"], rtol=0.06)
