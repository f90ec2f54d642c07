"""`fp8jax.scaled_ragged_dot` against NumPy: a state and observations for each group."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8jax
from tests.distance import relative
from tests.rows import few

GROUPS, INPUTS, OUTPUTS = 4, 256, 192
SIZES = np.array([140, 0, 1, 90])
ROWS, TOKENS = int(SIZES.sum()), 250
OF = np.repeat(np.arange(GROUPS), SIZES)
RNG = np.random.default_rng(0)
X, W, DY = (
    RNG.normal(size=s).astype(np.float32) for s in ((TOKENS, INPUTS), (GROUPS, INPUTS, OUTPUTS), (TOKENS, OUTPUTS))
)
W *= np.array([1, 1, 30, 1e-3], np.float32)[:, None, None]
# Rows in no group may have any content.
X[ROWS:], DY[ROWS:] = 1e30, np.nan
DELAYED = dataclasses.replace(fp8jax.recipes.te_delayed().linear, amax_history_length=3)
BLOCK = 64  # half of the alignment of groups
INT8 = f"int8:block{BLOCK}"
BLOCKS = {"x": INT8, "w": INT8, "dy": f"{INT8}+stochastic", "x_residual": f"{INT8}+stochastic"}
FALLBACK = dataclasses.replace(fp8jax.recipes.int8_fallback().linear, **BLOCKS)


def init(recipe):
    return jax.vmap(lambda w: fp8jax.init_scaling(recipe, w))(jnp.asarray(W))


def make_step(recipe, sizes=SIZES):
    """Returns a step: result, gradients and statistics of a matmul with states."""

    @jax.jit
    def step(x, w, dy, state):
        slot = jnp.zeros(GROUPS) if recipe is DELAYED else None
        run = lambda x, w, slot: fp8jax.scaled_ragged_dot(  # noqa: E731
            x, w, jnp.asarray(sizes), state, slot, recipe=recipe, key=jax.random.key(0)
        )
        y, vjp_fn, stats = jax.vjp(run, x, w, slot, has_aux=True)
        dx, dw, amax = vjp_fn(dy)
        return y, dx, dw, stats._replace(dy=amax)

    return step


def rounded(x, amax, dtype):
    """Returns decoded, saturated values with the scale of an amax."""
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    scale = np.maximum(np.float32(amax) * np.float32(1 / largest), np.float32(2.0**-126))
    return np.clip(x / scale, -largest, largest).astype(dtype).astype(np.float64) * scale


def test_each_group_has_a_delayed_scale_of_its_own():
    state = init(DELAYED)
    # The first group expects less than its largest value, which saturates; the others have no history yet.
    amax = {"x": 2.0, "w": 8.0, "dy": 2.5}
    state = state._replace(**{o: getattr(state, o).at[0, 1].set(value) for o, value in amax.items()})
    y, dx, dw, stats = make_step(DELAYED)(X, W, DY, state)

    def by_group(x, dtype, expected):
        parts = [x[:ROWS][g == OF] for g in range(GROUPS)]
        parts = [rounded(m, expected if g == 0 else np.abs(m).max(initial=0), dtype) for g, m in enumerate(parts)]
        return np.concatenate(parts)

    x, g = by_group(X, ml_dtypes.float8_e4m3fn, 2.0), by_group(DY, ml_dtypes.float8_e5m2, 2.5)
    w = [rounded(m, 8.0 if i == 0 else np.abs(m).max(), ml_dtypes.float8_e4m3fn) for i, m in enumerate(W)]
    want = np.stack([x[i] @ w[e] for i, e in enumerate(OF)]), np.stack([g[i] @ w[e].T for i, e in enumerate(OF)])
    np.testing.assert_allclose(y[:ROWS], want[0], rtol=1e-5, atol=1e-5 * np.abs(want[0]).max())
    np.testing.assert_allclose(dx[:ROWS], want[1], rtol=1e-5, atol=1e-5 * np.abs(want[1]).max())
    for e in range(GROUPS):
        np.testing.assert_allclose(dw[e], x[e == OF].T @ g[e == OF], rtol=1e-5, atol=2e-4)
    assert not np.asarray(y)[ROWS:].any()
    assert not np.asarray(dx)[ROWS:].any()
    largest = lambda x: [np.abs(x[:ROWS][e == OF]).max(initial=0) for e in range(GROUPS)]  # noqa: E731
    for actual, of in zip(stats, (largest(X), np.abs(W).max((1, 2)), largest(DY)), strict=True):
        np.testing.assert_array_equal(actual, np.asarray(of, np.float32))
    # A group without rows keeps its histories of tokens and gradients.
    new = fp8jax.update_scaling(state, stats, DELAYED)
    np.testing.assert_array_equal(new.x[1], state.x[1])
    np.testing.assert_array_equal(new.dy[1], state.dy[1])
    np.testing.assert_array_equal(new.x[0], [stats.x[0], 0, 2])


def test_each_group_has_a_threshold_of_its_own():
    thresholds = np.array([3.5, 1, 0.5, 10], np.float32)
    state = init(FALLBACK)._replace(x=jnp.asarray(thresholds))
    y, dx, dw, stats = make_step(FALLBACK)(X, W, DY, state)
    expected, counts = np.zeros((ROWS, OUTPUTS)), np.zeros((GROUPS, 2))

    def codes(m):
        scale = np.abs(m).max() / 127
        return np.rint(m / scale) * scale

    for e, first in enumerate(np.cumsum(SIZES) - SIZES):
        w = np.zeros(W[e].shape)
        for i in range(0, INPUTS, BLOCK):
            for j in range(0, OUTPUTS, BLOCK):
                w[i : i + BLOCK, j : j + BLOCK] = codes(W[e, i : i + BLOCK, j : j + BLOCK].astype(np.float64))
        for at in range(first, first + SIZES[e], BLOCK):
            rows = slice(at, min(at + BLOCK, first + SIZES[e]))
            for i in range(0, INPUTS, BLOCK):
                block = X[rows, i : i + BLOCK].astype(np.float64)
                falls_back = np.abs(block).max() > thresholds[e]
                counts[e] += falls_back, 1
                base = codes(block)
                expected[rows] += (base + (codes(block - base) if falls_back else 0)) @ w[i : i + BLOCK]
    np.testing.assert_array_equal(stats.x, counts)
    assert 0 < counts[0, 0] < counts[0, 1]
    assert (np.abs(y[:ROWS] - expected).max(1) < 1e-4 * np.abs(expected).max(1)).all()
    x, dy = (m[:ROWS].astype(np.float64) for m in (X, DY))
    assert relative(dx[:ROWS], np.stack([dy[i] @ W[e].T for i, e in enumerate(OF)])) < 0.03
    assert relative(dw, np.stack([x[e == OF].T @ dy[e == OF] for e in range(GROUPS)])) < 0.03
    new = fp8jax.update_scaling(state, stats, FALLBACK)
    np.testing.assert_allclose(new.x, thresholds * np.array([1.3, 1, 1.3, 1 / 1.3]), rtol=1e-6)


RECIPES = {
    "coat": fp8jax.recipes.coat().linear,
    "deepseek": fp8jax.recipes.deepseek().linear,
    "int8_fallback": FALLBACK,
    "te_delayed": DELAYED,
}


@pytest.mark.parametrize("what", few(["tokens", "cotangents", "weights"], "cotangents"))
@pytest.mark.parametrize("name", few(RECIPES, "deepseek", "te_delayed"))
def test_an_expert_of_small_values_has_the_error_of_others(name, what):
    """At most twice the mean error of ordinary experts, for any content of rows in no group."""
    recipe, sizes = RECIPES[name], np.array([64, 64, 64, 40])
    group = np.repeat(np.arange(GROUPS), sizes)
    rng = np.random.default_rng(1)
    shapes = (TOKENS, INPUTS), (GROUPS, INPUTS, OUTPUTS), (TOKENS, OUTPUTS)
    x, w, dy = (rng.normal(size=s).astype(np.float32) for s in shapes)
    small = {"tokens": x[64:128], "weights": w[1], "cotangents": dy[64:128]}[what]
    small *= 1e-5
    for m in (x, dy):
        m[len(group) :] = np.array([1e7, 1e30, np.nan, np.inf], np.float32)[np.arange(TOKENS - len(group)) % 4, None]
    if recipe.stateful_strategies:
        y, dx, dw, _ = make_step(recipe, sizes)(x, w, dy, init(recipe))
    else:
        run = lambda x, w: fp8jax.ragged_dot(x, w, sizes, recipe=recipe)  # noqa: E731
        y, vjp_fn = jax.vjp(run, x, w)
        dx, dw = vjp_fn(dy)
    x, w, dy = (m.astype(np.float64) for m in (x, w, dy))
    for actual, expected in (
        (y, lambda e: x[: len(group)][group == e] @ w[e]),
        (dx, lambda e: dy[: len(group)][group == e] @ w[e].T),
        (dw, lambda e: x[: len(group)][group == e].T @ dy[: len(group)][group == e]),
    ):
        actual = np.asarray(actual)
        errors = [
            relative(actual[e] if actual.ndim == 3 else actual[: len(group)][group == e], expected(e))
            for e in range(GROUPS)
        ]
        assert 0 < errors[1] < 2 * np.mean([errors[0], *errors[2:]])
        assert max(errors) < 0.08


@pytest.mark.parametrize("check", few([True, False], True))
def test_devices_observe_their_own_tokens(check):
    """Maxima over the devices' statistics equal those of all tokens."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    state = init(DELAYED)

    def inside(x, dy, sizes, slot):
        run = lambda w, slot: fp8jax.scaled_ragged_dot(x, w, sizes, state, slot, recipe=DELAYED)  # noqa: E731
        _, vjp_fn, stats = jax.vjp(run, jnp.asarray(W), slot, has_aux=True)
        dw, amax = vjp_fn(dy)
        return (dw if check else lax.psum(dw, "data")), stats.x[None], amax[None]

    specs = {"in_specs": (P("data"), P("data"), P("data"), P("data")), "out_specs": (P(), P("data"), P("data"))}
    mapped = jax.jit(jax.shard_map(inside, mesh=mesh, check_vma=check, **specs))
    x, dy = (np.concatenate([m, 2 * m]) for m in (X, DY))
    dw, x_amax, dy_amax = mapped(x, dy, np.concatenate([SIZES, SIZES]), jnp.zeros(2 * GROUPS))
    step = make_step(DELAYED)
    first, second = step(X, W, DY, state), step(2 * X, W, 2 * DY, state)
    assert relative(dw, first[2] + second[2]) < 1e-5
    np.testing.assert_array_equal(x_amax, [first[3].x, second[3].x])
    np.testing.assert_array_equal(dy_amax, [first[3].dy, second[3].dy])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [DELAYED, FALLBACK], ids=["delayed", "fallback"])
@pytest.mark.parametrize(("x_spec", "w_spec", "y_spec"), [
    (P("d"), P(), P("d", None)),
    (P(), P(None, None, "d"), P(None, "d")),
], ids=["tokens", "outputs"])  # fmt: skip
def test_explicit_meshes_observe_all_tokens(recipe, x_spec, w_spec, y_spec):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    state, step = init(recipe), make_step(recipe)
    expected = step(X, W, DY, state)
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(m, NamedSharding(mesh, s)) for m, s in ((X, x_spec), (W, w_spec), (DY, y_spec))]
        actual = step(*arrays, state)
    assert relative(actual[:3], expected[:3]) < 5e-3  # sums of codes are sent between devices in 16 bits
    jax.tree.map(np.testing.assert_array_equal, actual[3], expected[3])


def test_a_frozen_stack_has_the_result_of_its_values_and_no_gradient():
    """Residuals are the codes, neither tokens nor weights."""
    frozen, sizes = fp8jax.freeze(jnp.asarray(W), "e4m3:block128"), jnp.asarray(SIZES)
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    x, dy = (np.where(np.arange(TOKENS)[:, None] < ROWS, m, 0) for m in (X, DY))
    values = np.asarray(frozen.dequantize(), np.float64)
    expected = (
        np.stack([x[i] @ values[e] for i, e in enumerate(OF)]),
        np.stack([dy[i] @ values[e].T for i, e in enumerate(OF)]),
    )
    for w, options in ((frozen, {}), (frozen.T, {"dimension_numbers": numbers})):
        for recipe, limit in (("bf16", 0.02), ("te_current", 0.06)):
            run = lambda x, w=w, o=options, r=recipe: fp8jax.ragged_dot(x, w, sizes, recipe=r, **o)  # noqa: E731
            y, vjp_fn = jax.vjp(run, jnp.asarray(x))
            assert relative(y[:ROWS], expected[0]) < limit
            assert relative(vjp_fn(jnp.asarray(dy))[0][:ROWS], expected[1]) < limit
            assert not np.asarray(y)[ROWS:].any()
            saved = [leaf for leaf in jax.tree.leaves(vjp_fn) if getattr(leaf, "size", 0) >= min(x.size, W.size)]
            assert {(str(leaf.dtype), leaf.shape[0]) for leaf in saved} == {("uint8", GROUPS)}


def test_bad_input():
    sizes, state = jnp.asarray(SIZES), init(DELAYED)
    with pytest.raises(ValueError, match=r"pass amax_slot=jnp.zeros\(groups\) to scaled_ragged_dot"):
        fp8jax.scaled_ragged_dot(X, W, sizes, state, recipe=DELAYED)
    along = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    with pytest.raises(ValueError, match="has no weight and no scaling state"):
        fp8jax.scaled_ragged_dot(X, DY, sizes, state, jnp.zeros(4), recipe=DELAYED, dimension_numbers=along)
    with pytest.raises(ValueError, match="keeps no state"):
        fp8jax.scaled_ragged_dot(X, W, sizes, state, recipe="coat")
    with pytest.raises(ValueError, match=r"use fp8jax.scaled_linear, scaled_ragged_dot or"):
        fp8jax.ragged_dot(X, W, sizes, recipe="te_delayed")
    with pytest.raises(ValueError, match="integer codes"):
        fp8jax.ragged_dot(X, fp8jax.freeze(jnp.asarray(W), "int8"), sizes, recipe="coat")
    run = lambda x: jnp.sum(  # noqa: E731
        fp8jax.scaled_ragged_dot(x, W, sizes, state, jnp.zeros(4), recipe=DELAYED)[0] ** 2
    )
    with pytest.raises(ValueError, match="was differentiated twice"):
        jax.grad(lambda x: jnp.sum(jax.grad(run)(x)))(jnp.asarray(X))
