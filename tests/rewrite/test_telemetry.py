"""`fp8jax.telemetry`: statistics against NumPy, in loops, checkpoints, meshes and frameworks; programs without it."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax.ops.autodiff import observations

LAYERS, WIDTH, INNER, TOKENS = 3, 32, 64, 16


def normal(i, *shape):
    return jax.random.normal(jax.random.key(i), shape) / 4


def wide(i, *shape):
    """Values of many magnitudes."""
    return normal(i, *shape) * jnp.exp(4 * normal(i + 100, *shape) * 4)


def quantized(x, dtype):
    """float64 values of codes under the scale of the amax, by ml_dtypes."""
    largest = float(ml_dtypes.finfo(dtype).max)
    scale = np.float32(np.max(np.abs(x)) / np.float32(largest))
    return np.asarray(np.asarray(x / scale, np.float32).astype(dtype), np.float64) * float(scale)


def snr_db(x, decoded):
    x, decoded = np.asarray(x, np.float64), np.asarray(decoded, np.float64)
    return 10 * np.log10(np.sum(x**2) / np.sum((x - decoded) ** 2))


def stacked_mlp(p, x):
    """Layers in a scan, recomputed in the backward pass."""

    @jax.checkpoint
    def layer(x, w):
        return x + jax.nn.silu(x @ w["up"]) @ w["down"], None

    return jax.lax.scan(layer, x, p["layers"])[0]


STACKED = {"layers": {"up": normal(0, LAYERS, WIDTH, INNER), "down": normal(1, LAYERS, INNER, WIDTH)}}
BATCH = normal(2, 4, TOKENS, WIDTH)


def train_step(fn, tx):
    def step(p, state, batch):
        def add(total, x):
            loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.square(fn(p, x) - 1)))(p)
            return jax.tree.map(jnp.add, total, grads), loss

        zeros = jax.tree.map(jnp.zeros_like, p)
        grads, losses = jax.lax.scan(add, zeros, batch.reshape(2, 2, TOKENS, WIDTH))
        return *tx.step(grads, state, p), jnp.mean(losses)

    return step


@pytest.fixture(scope="module")
def stacked_step():
    """A step in microbatches of stacked layers: its results without and with telemetry, and the statistics."""
    tx = fp8jax.compressed_adamw(1e-2)
    step = train_step(fp8jax.transform(stacked_mlp, "coat"), tx)
    arguments = STACKED, tx.init(STACKED), BATCH
    text = jax.jit(step).lower(*arguments).as_text()
    results, actual = jax.jit(fp8jax.telemetry(step))(*arguments)
    return jax.jit(step)(*arguments), results, actual, text, jax.jit(step).lower(*arguments).as_text()


def test_results_and_programs_are_those_without_telemetry(stacked_step):
    plain, observed, _, text, text_after = stacked_step
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(observed), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    # The traced functions of the run with telemetry are not found in JAX's caches.
    assert text == text_after


def test_each_stacked_layer_has_a_value(stacked_step):
    _, _, actual, *_ = stacked_step
    roles = {"x", "w", "dy", "update"}
    # Rows of 32 elements are too short for moments in 8 bits.
    expected = {"layers/up": {*roles, "m", "v"}, "layers/down": {*roles, "context"}}
    assert {layer: set(actual[layer]) for layer in actual} == expected
    for name in ("up", "down"):
        w = actual[f"layers/{name}"]["w"]
        expected = [snr_db(x, quantized(x, ml_dtypes.float8_e4m3fn)) for x in np.asarray(STACKED["layers"][name])]
        np.testing.assert_allclose(w["snr_db"], expected, atol=0.2)
        np.testing.assert_array_equal(w["amax"], np.max(np.abs(STACKED["layers"][name]), (1, 2)))
    # The input of the first layer is the batch: both microbatches together.
    x = actual["layers/up"]["x"]
    np.testing.assert_array_equal(x["amax"][0], np.max(np.abs(BATCH)))
    halves = [quantized(x, ml_dtypes.float8_e4m3fn) for x in np.asarray(BATCH).reshape(2, -1)]
    assert abs(float(x["snr_db"][0]) - snr_db(np.asarray(BATCH).reshape(2, -1), halves)) < 0.02
    assert x["snr_db"].shape == actual["layers/down"]["context"]["snr_db"].shape == (LAYERS,)


def linear_loss(recipe):
    """The gradient of the result of `fn` is its third argument."""
    fn = fp8jax.transform(lambda p, x: x @ p["w"], recipe)
    return jax.grad(lambda p, x, dy: jnp.sum(fn(p, x) * dy))


def test_statistics_are_a_mapping_in_one_array():
    p, batches = {"w": normal(0, 2, WIDTH, WIDTH)}, normal(1, 3, TOKENS, WIDTH)
    layers = lambda p, x: jax.lax.scan(lambda x, w: (x @ w, None), x, p["w"])[0]  # noqa: E731
    observe = fp8jax.telemetry(fp8jax.transform(layers, "te_current"))
    run = jax.jit(lambda x: observe(p, x)[1])
    (array,) = jax.tree.leaves(run(batches[0]))
    assert isinstance(array, jax.Array)
    expected = [pickle.loads(pickle.dumps(jax.device_get(run(x)))) for x in batches]
    assert [*expected[0]] == ["w"]
    assert len(expected[0]) == 1
    assert "v" not in expected[0]
    assert set(expected[0]["w"]) == {"x", "w"}
    founds = {
        "scan": jax.jit(lambda xs: jax.lax.scan(lambda _, x: (None, observe(p, x)[1]), None, xs)[1])(batches),
        "vmap": jax.jit(jax.vmap(lambda x: observe(p, x)[1]))(batches),
        "reading inside": jax.jit(lambda xs: {"w": dict(jax.vmap(lambda x: observe(p, x)[1])(xs)["w"])})(batches),
    }
    for actual in founds.values():
        for role, statistics in actual["w"].items():
            for name, values in statistics.items():
                np.testing.assert_allclose(values, [each["w"][role][name] for each in expected], rtol=1e-5)


@pytest.mark.parametrize("scale", [1e25, 1e-25])
def test_squares_out_of_range(scale):
    """Microbatches of different magnitudes, whose squares are no fp32 numbers."""
    x, w = (
        np.float32(scale) * np.array([[[1.0]], [[3.0]]], np.float32) * normal(1, 2, TOKENS, WIDTH),
        normal(0, WIDTH, INNER),
    )
    run = lambda _, x: (None, fp8jax.linear(x, w, recipe="te_current"))  # noqa: E731
    _, actual = jax.jit(fp8jax.telemetry(lambda x: jax.lax.scan(run, None, x)[1]))(x)
    check_codes(
        actual[f"linear {WIDTH}x{INNER}"]["x"], np.asarray(x, np.float64).astype(np.float32), ml_dtypes.float8_e4m3fn
    )


def test_the_gradient_of_a_result():
    p, x, dy = {"w": normal(0, WIDTH, INNER)}, normal(1, TOKENS, WIDTH), wide(2, TOKENS, INNER)
    _, actual = jax.jit(fp8jax.telemetry(linear_loss("te_current")))(p, x, dy)
    check_codes(actual["w"]["dy"], [dy], ml_dtypes.float8_e5m2)
    assert 0 < float(actual["w"]["dy"]["lost"]) < 1


def check_codes(stats, groups, dtype):
    """Statistics of matrices that have a scale each."""
    decoded = np.concatenate([quantized(x, dtype).ravel() for x in groups])
    x = np.concatenate([np.asarray(x).ravel() for x in groups])
    assert abs(float(stats["snr_db"]) - snr_db(x, decoded)) < 0.05
    assert abs(float(stats["lost"]) * np.sum(x != 0) - np.sum((decoded == 0) & (x != 0))) <= 2
    assert float(stats["amax"]) == np.max(np.abs(x))
    assert float(stats["saturated"]) == float(stats["nonfinite"]) == 0


@pytest.mark.parametrize("frozen", [False, True])
def test_grouped_products(frozen):
    """Each group of tokens, and each expert, has a scale. Rows in no group are not counted."""
    x, w, dy = (np.array(wide(i, *s)) for i, s in enumerate([(TOKENS, WIDTH), (3, WIDTH, INNER), (TOKENS, INNER)]))
    x[11:], dy[11:] = np.nan, 1e9
    sizes = jnp.array([4, 0, 7])
    fn = fp8jax.transform(lambda p, x: jax.lax.ragged_dot(x, p["experts"], sizes), "te_current")
    weight = fp8jax.freeze(w, "e4m3") if frozen else w

    def loss(p, x):
        y = fp8jax.ragged_dot(x, weight, sizes, recipe="te_current") if frozen else fn(p, x)
        return jnp.vdot(y, dy)

    _, actual = jax.jit(fp8jax.telemetry(jax.grad(loss, (0, 1))))({"experts": w}, x)
    (roles,) = actual.values()
    assert list(actual) == ["ragged_dot 3x32x64" if frozen else "experts"]
    assert set(roles) == ({"x", "dy"} if frozen else {"x", "w", "dy"})
    check_codes(roles["x"], np.split(x[:11], [4]), ml_dtypes.float8_e4m3fn)
    check_codes(roles["dy"], np.split(dy[:11], [4]), ml_dtypes.float8_e5m2)
    if not frozen:
        check_codes(roles["w"], w, ml_dtypes.float8_e4m3fn)


def test_what_a_glu_between_grouped_products_saves():
    p, x, sizes = {"up": normal(0, 2, 64, 512), "down": normal(1, 2, 256, 64)}, normal(2, 64, 64), jnp.array([24, 32])
    x = x.at[56:].set(1e6)  # in no group

    def loss(p, x):
        gate, up = jnp.split(jax.lax.ragged_dot(x, p["up"], sizes), 2, -1)
        return jnp.sum(jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes))

    _, actual = jax.jit(fp8jax.telemetry(jax.grad(fp8jax.transform(loss, "coat"))))(p, x)
    rows = np.concatenate([x[:24] @ p["up"][0], x[24:56] @ p["up"][1]])
    assert set(actual["down"]) == {"x", "w", "dy", "context"}
    np.testing.assert_allclose(actual["down"]["context"]["amax"], np.max(np.abs(rows)), rtol=0.05)
    assert 30 < float(actual["down"]["context"]["snr_db"]) < 36


def test_the_gradient_of_a_frozen_product():
    """Scales of a row of the weight are multiplied into the gradient before it is quantized."""
    x, w, dy = normal(0, TOKENS, WIDTH), np.array(wide(1, WIDTH, INNER)), np.array(wide(2, TOKENS, INNER))
    for granularity in ("tensor", "token"):
        frozen = fp8jax.freeze(w, f"e4m3:{granularity}")
        loss = lambda x, w=frozen: jnp.vdot(fp8jax.linear(x, w, recipe="te_current"), dy)  # noqa: E731
        _, actual = jax.jit(fp8jax.telemetry(jax.grad(loss)))(x)
        scale = np.float32(np.max(np.abs(w), 0) / np.float32(448)) if granularity == "token" else np.float32(1)
        assert set(actual[f"linear {WIDTH}x{INNER}"]) == {"x", "dy"}
        check_codes(actual[f"linear {WIDTH}x{INNER}"]["dy"], [dy * scale], ml_dtypes.float8_e5m2)


def test_a_stale_scale_and_values_that_are_not_finite():
    p, x = {"w": normal(0, WIDTH, INNER)}, np.asarray(normal(1, TOKENS, WIDTH)).copy()
    fn = fp8jax.transform(lambda p, x: x @ p["w"], "te_delayed")
    states = fn.init(p, x)
    stale = float(np.max(np.abs(x))) / 4
    state = states["w"].state._replace(x=jnp.full_like(states["w"].state.x, stale))
    states = {"w": dataclasses.replace(states["w"], state=state)}
    x[0, 0] = np.nan
    run = jax.jit(fp8jax.telemetry(lambda p, x, states: fn(p, x, states=states)))
    stats = run(p, x, states)[1]["w"]["x"]
    magnitude = np.abs(x[np.isfinite(x)])
    assert float(stats["nonfinite"]) == pytest.approx(1 / x.size)
    np.testing.assert_allclose(stats["range_ratio"], np.max(magnitude) / stale, rtol=1e-5)
    # The largest code is 448; up to 464 values are rounded to it.
    np.testing.assert_allclose(stats["saturated"], np.sum(magnitude > stale * 464 / 448) / x.size, rtol=1e-5)
    assert float(stats["saturated"]) > 0.1


@pytest.mark.parametrize("grouped", [False, True])
def test_blocks_that_fall_back(grouped):
    """A product of one expert has the statistics of a matrix."""
    p, x = {"w": normal(0, *[1] * grouped, 256, 128)}, np.asarray(normal(1, 256, 256)).copy()
    x[:128, 128:] *= 100
    multiply = functools.partial(jax.lax.ragged_dot, group_sizes=jnp.array([256])) if grouped else jnp.matmul
    fn = fp8jax.transform(lambda p, x: multiply(x, p["w"]), "int8_fallback")
    states = fn.init(p, x)
    threshold = float(np.max(states["w"].state.x))
    run = jax.jit(fp8jax.telemetry(lambda p, x, states: fn(p, x, states=states)))
    stats = run(p, x, states)[1]["w"]["x"]
    amax = np.max(np.abs(x).reshape(2, 128, 2, 128), (1, 3))
    assert float(stats["fallback_rate"]) == np.mean(amax > threshold)
    assert float(stats["fallback_threshold"]) == threshold
    np.testing.assert_allclose(stats["scale_spread"], np.log2(np.max(amax) / np.min(amax)), rtol=1e-4)


OPTIMIZERS = {
    "compressed_adamw": fp8jax.compressed_adamw(1e-2, weight_decay=0.0),
    "fp8lm_adamw": fp8jax.fp8lm_adamw(1e-2),
    "compress_state": fp8jax.compress_state(optax.adam(1e-2)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_and_updates(name):
    tx = OPTIMIZERS[name]
    p, grads = {"w": normal(0, 64, 128)}, {"w": 1e-12 * wide(1, 64, 128)}
    (updates, state), actual = jax.jit(fp8jax.telemetry(tx.update))(grads, tx.init(p), p)
    g = np.asarray(grads["w"], np.float64)
    stats, mu, nu = actual["w"], *(optax.tree_utils.tree_get(state, key)["w"] for key in ("mu", "nu"))
    assert abs(float(stats["m"]["snr_db"]) - snr_db(0.1 * g, mu.dequantize())) < 0.1
    assert ("update" in stats) == (name != "compress_state")
    if "update" in stats:
        expected = np.linalg.norm(updates["w"]) / np.linalg.norm(p["w"])
        np.testing.assert_allclose(stats["update"]["update_ratio"], expected, rtol=1e-4)
    if name != "fp8lm_adamw":
        assert abs(float(stats["v"]["snr_db"]) - snr_db(g**2 * float(np.float32(1 - 0.999)), nu.dequantize())) < 0.1
        exponents = np.asarray(nu.expansion, np.float64)
        np.testing.assert_allclose(stats["v"]["expansion"], np.mean(exponents), rtol=1e-5)
        np.testing.assert_allclose(stats["v"]["expansion_spread"], np.ptp(exponents), rtol=1e-5)


def test_updates_of_new_parameters_and_of_zeros():
    tx, p = fp8jax.compressed_adamw(1e-2), {"w": normal(0, 64, 128), "zero": jnp.zeros((64, 128))}
    grads = {"w": wide(1, 64, 128), "zero": normal(2, 64, 128)}
    (new, _), actual = jax.jit(fp8jax.telemetry(tx.step))(grads, tx.init(p), p)
    norms = {"w": np.linalg.norm(p["w"]), "zero": np.sqrt(np.finfo(np.float32).tiny)}
    for name, norm in norms.items():
        change = np.linalg.norm(np.asarray(new[name], np.float64) - p[name])
        np.testing.assert_allclose(actual[name]["update"]["update_ratio"], change / norm, rtol=1e-4)


@pytest.mark.parametrize("manual", [True, False])
def test_devices_have_one_value_together(manual):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    p, x, dy = {"w": normal(0, WIDTH, INNER)}, wide(1, TOKENS, WIDTH), wide(2, TOKENS, INNER)
    gradient = linear_loss("deepseek")  # no scale spans two devices
    unsharded = jax.jit(fp8jax.telemetry(gradient))(p, x, dy)[1]
    rows = jax.NamedSharding(mesh, P("data"))
    if manual:
        own = gradient
        gradient = jax.shard_map(
            lambda *arrays: jax.lax.psum(own(*arrays), "data"),
            mesh=mesh,
            in_specs=(P(), P("data"), P("data")),
            out_specs=P(),
            check_vma=False,
        )
    with jax.set_mesh(mesh):
        actual = jax.jit(fp8jax.telemetry(gradient))(p, *jax.device_put((x, dy), rows))[1]
    for role in ("x", "w", "dy"):
        for name, value in unsharded["w"][role].items():
            np.testing.assert_allclose(actual["w"][role][name], value, rtol=1e-4, err_msg=f"{role} {name}")


def test_sums_of_gradients_in_8_bits():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    grads = {"mlp": {"w": jnp.broadcast_to(normal(0, 64, 128), (2, 64, 128)), "bias": normal(1, 2, 128)}}
    factors = fp8jax.dist.init_factors(jax.tree.map(lambda g: g[0], grads), 1)

    def reduce(grads, factors):
        own = jax.tree.map(lambda g: g[0], grads)
        return fp8jax.dist.all_reduce_gradients(own, "data", fp8jax.recipes.fp8_lm(), factors=factors)

    mapped = jax.shard_map(reduce, mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), check_vma=False)
    (_, new), actual = jax.jit(fp8jax.telemetry(mapped))(grads, factors)
    stats = actual["mlp/w"]["gradient"]
    # Equal gradients of both devices sum up to twice the largest code.
    assert float(stats["factor"]) == float(factors.mu["mlp"]["w"])
    assert float(stats["saturated"]) == float(new.saturated["mlp"]["w"]) > 0
    assert set(actual) == {"mlp/w"}


def test_a_branch_that_is_not_taken_has_no_values():
    p, x = {"w": normal(0, WIDTH, WIDTH)}, normal(1, TOKENS, WIDTH)
    fn = fp8jax.transform(lambda p, x: x @ p["w"], "te_current")

    def program(p, x, flag):
        return jax.lax.cond(flag, lambda x: fn(p, x), lambda x: fp8jax.linear(2 * x, p["w"], recipe="te_current"), x)

    run = jax.jit(fp8jax.telemetry(program))
    for flag, amax, other in ((True, 1, "linear 32x32"), (False, 2, "w")):
        actual = run(p, x, flag)[1]
        branch = actual["w"] if flag else actual["linear 32x32"]
        np.testing.assert_array_equal(branch["x"]["amax"], amax * np.max(np.abs(x)))
        assert np.isnan(actual[other]["x"]["snr_db"])


def test_iterations_of_a_while_loop_have_one_value_together():
    fn, x = fp8jax.transform(stacked_mlp, "coat"), BATCH[0]

    def loop(p, x, count):
        return jax.lax.while_loop(lambda c: c[1] < count, lambda c: (fn(p, c[0]), c[1] + 1), (x, 0))[0]

    run = jax.jit(fp8jax.telemetry(loop))
    one_by_one = jax.jit(fp8jax.telemetry(lambda p, x: fn(p, fn(p, x))))
    (y, actual), (expected_y, expected) = run(STACKED, x, 2), one_by_one(STACKED, x)
    np.testing.assert_array_equal(y, expected_y)
    assert actual["layers/up"]["x"]["snr_db"].shape == (LAYERS,)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), actual, expected)
    assert np.isnan(run(STACKED, x, 0)[1]["layers/up"]["x"]["snr_db"]).all()


def test_a_while_loop_of_a_batch_is_observed_until_the_first_member_ends():
    fn, x = fp8jax.transform(stacked_mlp, "coat"), BATCH[:2]

    def loop(x, count):  # values are doubled, so that the largest is that of the last observed iteration
        step = lambda c: (2 * fn(STACKED, c[0]), c[1] + 1)  # noqa: E731
        return jax.lax.while_loop(lambda c: c[1] < count, step, (x, 0))[0]

    run = jax.jit(fp8jax.telemetry(jax.vmap(loop)))
    y, actual = run(x, jnp.array([4, 2]))
    np.testing.assert_allclose(y[0], loop(x[0], 4), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y[1], loop(x[1], 2), rtol=1e-5, atol=1e-5)
    expected = run(x, jnp.array([2, 2]))[1]
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert (actual["layers/up"]["x"]["amax"] < run(x, jnp.array([3, 3]))[1]["layers/up"]["x"]["amax"]).all()


def test_an_error_in_a_layer_leaves_its_name_to_nothing_else():
    with pytest.raises(RuntimeError), observations.at_layer("a", ()):
        raise RuntimeError
    with observations.is_observing(True):
        assert observations.current_layer_scope("b").layer == "b"


def test_a_differentiated_call_is_refused():
    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(lambda x: fp8jax.telemetry(lambda x: 2 * x)(x)[0])(jnp.ones([]))


def test_models_of_each_framework_have_the_same_statistics():
    """The same layers as a function, in Flax NNX and Linen, and in Equinox."""
    equinox = pytest.importorskip("equinox")
    w, x = normal(0, WIDTH, INNER), normal(1, TOKENS, WIDTH)

    class Linen(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(INNER, use_bias=False, name="up")(x)

    class Equinox(equinox.Module):
        up: jax.Array

        def __call__(self, x):
            return x @ self.up

    layer = nnx.Linear(WIDTH, INNER, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel[...] = w
    module = nnx.Sequential(layer)
    quantized, dense = fp8jax.nnx.quantize(module, "te_current"), fp8jax.linen.quantize(Linen(), "te_current")
    function = fp8jax.transform(lambda p, x: x @ p["up"], "te_current")
    eqx = fp8jax.filter_transform(lambda model, x: model(x), "te_current")
    loss = lambda fn: lambda model, *args: jnp.sum(jnp.sin(fn(model, *args)))  # noqa: E731
    variables = {"params": {"up": {"kernel": w}}}
    founds = [
        jax.jit(fp8jax.telemetry(jax.grad(loss(function))))({"up": w}, x)[1],
        nnx.jit(fp8jax.nnx.telemetry(nnx.grad(loss(lambda model, x: model(x)))))(quantized, x)[1],
        jax.jit(fp8jax.telemetry(jax.grad(loss(dense.apply))))(variables, x)[1],
        jax.jit(fp8jax.telemetry(equinox.filter_grad(loss(eqx))))(Equinox(w), x)[1],
    ]
    assert [list(actual) for actual in founds] == [["up"], ["layers/0"], ["up"], ["up"]]
    for actual in founds:
        (stats,) = actual.values()
        jax.tree.map(np.testing.assert_array_equal, stats, founds[0]["up"])


def test_members_of_a_batch_have_one_value_together():
    w, x = normal(0, 2, WIDTH, INNER), wide(1, 2, TOKENS, WIDTH)
    stacked = jax.vmap(lambda x, w: fp8jax.linear(x, w, recipe="deepseek"))
    (stats,) = jax.jit(fp8jax.telemetry(stacked))(x, w)[1].values()
    one_by_one = jax.jit(fp8jax.telemetry(lambda x, w: [fp8jax.linear(x[i], w[i], recipe="deepseek") for i in (0, 1)]))
    (expected,) = one_by_one(x, w)[1].values()
    assert stats["x"]["amax"].shape == ()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), stats, expected)


def test_a_weight_in_loops_of_different_lengths_has_one_value():
    weights, x = normal(0, 3, WIDTH, WIDTH), normal(1, TOKENS, WIDTH)
    body = lambda x, w: (x @ w, None)  # noqa: E731
    fn = fp8jax.transform(lambda p, x: jax.lax.scan(body, x, p["w"])[0] + jax.lax.scan(body, x, p["w"][:2])[0], "coat")
    _, actual = jax.jit(fp8jax.telemetry(fn))({"w": weights}, x)
    assert {name: value.shape for name, value in actual["w"]["w"].items()} == dict.fromkeys(actual["w"]["w"], ())
    np.testing.assert_array_equal(actual["w"]["w"]["amax"], np.max(np.abs(weights)))


@pytest.mark.parametrize(("length", "reverse"), [(3, False), (5, False), (5, True)])
def test_layers_of_a_split_scan_have_a_value_each(length, reverse):
    """A scan of two blocks per iteration, whose first block and last one stay in 16 bits."""
    names = [(block, name) for block in ("block_0", "block_1") for name in ("up", "down")]
    p = {block: {} for block, _ in names}
    for i, (block, name) in enumerate(names):
        p[block][name] = normal(i, length, WIDTH, WIDTH)

    def net(p, x):
        def body(x, w):
            for block in w.values():
                x = x + jnp.tanh(x @ block["up"]) @ block["down"]
            return x, None

        return jax.lax.scan(body, x, p, reverse=reverse)[0]

    recipe = dataclasses.replace(fp8jax.recipes.te_current(), unquantized_blocks=(1, 1))
    fast = fp8jax.transform(net, recipe)
    grad = jax.grad(lambda p, x: jnp.sum(jnp.sin(fast(p, x))))
    _, actual = jax.jit(fp8jax.telemetry(grad))(p, normal(9, TOKENS, WIDTH))
    for block, name in names:
        is_without_first_row = (block == "block_0") != reverse
        rows = p[block][name][1:] if is_without_first_row else p[block][name][:-1]
        stats = actual[f"{block}/{name}"]
        np.testing.assert_array_equal(stats["w"]["amax"], np.max(np.abs(rows), (1, 2)))
        assert {values["snr_db"].shape for values in stats.values()} == {(length - 1,)}


def test_functions_of_equal_paths_have_one_value_with_the_fewest_bits():
    p, x = {"w": normal(0, WIDTH, INNER)}, normal(1, TOKENS, WIDTH)
    fns = [fp8jax.transform(lambda p, x: x @ p["w"], recipe) for recipe in ("te_current", "nvfp4")]
    for order in (fns, fns[::-1]):
        _, actual = jax.jit(fp8jax.telemetry(lambda p, x, order=order: [fn(p, x) for fn in order]))(p, x)
        assert actual["w"]["w"]["bits"] == 4
        # In 4 bits the bound is 12 dB.
        assert 12 < actual["w"]["w"]["snr_db"] < 25
        assert fp8jax.find_faults(actual) == []


def test_jitted_functions_inside_are_traced_anew():
    """JAX's caches of functions that were traced with telemetry, or without it, do not serve the other."""
    x = normal(0, TOKENS, WIDTH)
    functions = [jax.jit(lambda x: fp8jax.linear(x, normal(1, WIDTH, INNER), recipe="te_current")) for _ in range(2)]
    for fn, is_plain_first in zip(functions, (True, False), strict=True):
        outer = lambda x, fn=fn: fn(x) + 1  # noqa: E731
        plain = str(jax.make_jaxpr(outer)(x)) if is_plain_first else None
        assert list(jax.jit(fp8jax.telemetry(outer))(x)[1]) == [f"linear {WIDTH}x{INNER}"]
        assert "fp8jax_observe" not in (plain or str(jax.make_jaxpr(outer)(x)))
