"""Scales of `fp8jax.ragged_dot` are per group: groups of any size and scale, rows in no group, blocks of tokens."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import fp8jax
from fp8jax.core.recipe import Linear
from tests.distance import relative
from tests.rows import few, slow

ROWS, INPUTS, OUTPUTS = 90, 48, 40
SIZES = np.array([20, 0, 37, 11])
ENDS = np.cumsum(SIZES)
GROUPS = [slice(end - size, end) for end, size in zip(ENDS, SIZES, strict=True)]
RNG = np.random.default_rng(0)
X, W, DY = (RNG.normal(size=s).astype(np.float32) for s in ((ROWS, INPUTS), (4, INPUTS, OUTPUTS), (ROWS, OUTPUTS)))
EXACT, OCP = "e4m3:mx32+exact", "e4m3:mx32+ocp"
RECIPES = {
    **{name: fp8jax.recipes.get(name).linear for name in fp8jax.recipes.NAMES},
    "mx under a tensor's scale": Linear("e4m3:mx32", "e4m3", "e4m3:mx32"),
    "exact mx under a tensor's scale": Linear(EXACT, "e4m3", EXACT, x_wgrad=EXACT, dy_wgrad=EXACT),
    "OCP's mx": Linear(OCP, "e4m3", OCP, x_wgrad=OCP, dy_wgrad=OCP),
    "saved expanded": Linear("e4m3", "e4m3", "e5m2", x_residual="e4m3:tensor+expand", x_wgrad="e4m3:token"),
    "saved as it is": Linear("e4m3", "e4m3", "e5m2", x_residual=None, x_wgrad="e4m3"),
}
RECIPES = {
    name: linear
    for name, linear in RECIPES.items()
    if not any(s.collects_stats for s in linear.stateful_strategies.values())
}
RUN = few(RECIPES, "bf16", "coat", "deepseek", "int8_block")


@functools.cache
def program(name):
    """Returns the matmul and its gradients, compiled once for all tests of a recipe."""
    linear = RECIPES[name]
    key = jax.random.key(1) if linear.is_stochastic else None

    def products(x, w, dy, sizes):
        y, vjp_fn = jax.vjp(lambda x, w: fp8jax.ragged_dot(x, w, sizes, recipe=linear, key=key), x, w)
        return (y, *vjp_fn(dy))

    compiled = jax.jit(products)
    return lambda x, dy, sizes=SIZES: [np.asarray(a) for a in compiled(x, W, dy, jnp.asarray(sizes, jnp.int32))]


@pytest.mark.parametrize("name", RUN)
def test_rows_in_no_group_change_nothing(name):
    expected = program(name)(X, DY)
    for tail in (1e5, 1e30, np.nan, np.inf):
        x, dy = X.copy(), DY.copy()
        x[ENDS[-1] :], dy[ENDS[-1] :] = tail, tail
        actual = program(name)(x, dy)
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(a, b)
        assert not actual[0][ENDS[-1] :].any()
        assert not actual[1][ENDS[-1] :].any()
    for a in program(name)(np.full_like(X, np.nan), np.full_like(DY, np.nan), 0 * SIZES):
        assert not a.any()


@pytest.mark.parametrize("name", RUN)
def test_a_group_a_millionth_as_large_is_as_exact(name):
    x, dy = X.copy(), DY.copy()
    x[GROUPS[0]] *= 1e-6
    dy[GROUPS[2]] *= 1e-6
    y, dx, dw = program(name)(x, dy)
    limit = 0.2 if name == "nvfp4" else 0.08
    for i, rows in enumerate(GROUPS):
        a, w, g = (m.astype(np.float64) for m in (x[rows], W[i], dy[rows]))
        for actual, expected in ((y[rows], a @ w), (dx[rows], g @ w.T), (dw[i], a.T @ g)):
            assert relative(actual, expected) < limit if expected.any() else not actual.any()


@pytest.mark.parametrize("name", RUN)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_seen_in_its_group_alone(name, bad):
    row, column, group, rows = 25, 7, 2, np.arange(ROWS)
    others = (rows < GROUPS[group].start) | (rows >= GROUPS[group].stop)
    for place, product, gradient in (("x", 0, (group, column)), ("dy", 1, (group, slice(None), column))):
        x, dy = X.copy(), DY.copy()
        {"x": x, "dy": dy}[place][row, column] = bad
        actual = program(name)(x, dy)
        assert not np.isfinite(actual[product][row]).any()
        assert not np.isfinite(actual[2][gradient]).any()
        assert all(np.isfinite(a[others]).all() for a in actual[:2])
        assert np.isfinite(np.delete(actual[2], group, 0)).all()


SMALL_RECIPES = few(["coat", "coat_fast", "te_current", "deepseek", "int8_block"], "coat", "deepseek")


@functools.cache
def many_groups(name):
    """Returns the matmul and its gradients for groups of 64 to 128 tokens."""
    linear = fp8jax.recipes.get(name).linear
    key = jax.random.key(1) if linear.is_stochastic else None

    @jax.jit
    def products(x, w, dy, sizes):
        y, vjp_fn = jax.vjp(lambda x, w: fp8jax.ragged_dot(x, w, sizes, recipe=linear, key=key), x, w)
        return (y, *vjp_fn(dy))

    return products


@pytest.mark.parametrize("name", SMALL_RECIPES)
@pytest.mark.parametrize("small", ["tokens", "cotangents", "weights"])
def test_experts_of_small_operands_have_at_most_twice_the_error(name, small):
    """Groups of 64 to 128 tokens, fewer than a group of scales; every second one is 1e-5 of the others."""
    sizes = np.array([64, 128, 100, 77, 91, 66])
    ends, rng = np.cumsum(sizes), np.random.default_rng(3)
    x, w, dy = (rng.normal(size=s).astype(np.float32) for s in ((ends[-1] + 30, 64), (6, 64, 48), (ends[-1] + 30, 48)))
    for i, end in enumerate(ends):
        rows, factor = slice(end - sizes[i], end), 1e-5 if i % 2 else 1.0
        x[rows] *= factor if small == "tokens" else 1.0
        dy[rows] *= factor if small == "cotangents" else 1.0
        w[i] *= factor if small == "weights" else 1.0
    x[ends[-1] :] = dy[ends[-1] :] = 1e7
    y, dx, dw = many_groups(name)(x, w, dy, sizes)
    errors = []
    for i, end in enumerate(ends):
        rows = slice(end - sizes[i], end)
        a, b, c = (m.astype(np.float64) for m in (x[rows], w[i], dy[rows]))
        pairs = (y[rows], a @ b), (dx[rows], c @ b.T), (dw[i], a.T @ c)
        errors.append([relative(*pair) for pair in pairs])
    ordinary, others = np.max(errors[::2], axis=0), np.max(errors[1::2], axis=0)
    assert (ordinary < 0.08).all()
    assert (others < 2 * ordinary).all()


E4M3 = ml_dtypes.float8_e4m3fn


def of_scale(x, scale):
    return (x / scale).astype(np.float32).astype(E4M3).astype(np.float64) * scale


def rounded(x, kind, size):
    """Returns values of a group's rows, contracted along rows, in e4m3: one scale for `size` rows, or a power of two
    under a scale.
    """
    x, result = x.astype(np.float64), np.zeros(x.shape)
    level = np.max(np.abs(x), axis=0, keepdims=True) / 448
    for start in range(0, len(x), size):
        part = x[start : start + size]
        if kind == "block":
            for left in range(0, x.shape[1], size):
                square = part[:, left : left + size]
                result[start : start + size, left : left + size] = of_scale(square, np.abs(square).max() / 448)
            continue
        scale = np.max(np.abs(part), axis=0, keepdims=True) / 448
        if kind == "mx":
            scale = level * 2.0 ** np.ceil(np.log2(scale / level))
        result[start : start + size] = of_scale(part, scale)
    return result


@pytest.mark.parametrize(("spec", "kind", "size"), [
    ("e4m3:group8", "group", 8),
    ("e4m3:block16", "block", 16),
    ("e4m3:token", "token", 1000),
    ("e4m3:mx8+token+exact", "mx", 8),
])  # fmt: skip
def test_scales_along_tokens_are_counted_from_each_groups_first_token(spec, kind, size):
    """In a matmul with the identity, the weight's gradient is that of the rounded rows."""
    rows = RNG.normal(size=(ROWS, INPUTS)).astype(np.float32) * np.exp(3 * RNG.normal(size=(ROWS, 1)))
    linear = Linear("e4m3", "e4m3", "e4m3", x_residual=None, x_wgrad=spec, dy_wgrad=spec)
    w, dy = jnp.ones((4, INPUTS, OUTPUTS)), jnp.asarray(DY)
    run = jax.jit(lambda x, w: fp8jax.ragged_dot(x, w, jnp.asarray(SIZES), recipe=linear))
    actual = jax.vjp(run, jnp.asarray(rows, jnp.float32), w)[1](dy)[1]
    rows = rows.astype(np.float32)
    for i, group in enumerate(GROUPS):
        expected = rounded(rows[group], kind, size).T @ rounded(DY[group], kind, size) if SIZES[i] else 0 * actual[i]
        np.testing.assert_allclose(actual[i], expected, atol=2e-6 * np.abs(expected).max(initial=1.0))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "uint32", "int32"])
def test_group_sizes_of_any_integers(dtype):
    """Also if their sum exceeds their dtype."""
    x, sizes = jnp.ones((400, 8)), np.array([120, 0, 100, 110])
    y = fp8jax.ragged_dot(
        x, jnp.arange(1.0, 5)[:, None, None] * jnp.ones((1, 8, 4)), sizes.astype(dtype), recipe="coat"
    )
    np.testing.assert_allclose(y[:, 0], 8.0 * np.repeat([1, 3, 4, 0], [120, 100, 110, 70]), rtol=1e-2)


EMPTY = [(0, 3, 8, 4), (8, 0, 8, 4), (8, 3, 8, 0), (8, 3, 0, 4), (2, 9, 8, 4)]


@pytest.mark.parametrize("shape", [slow(x) if 0 in x[1:3] else x for x in EMPTY])
def test_empty_buffers_and_more_groups_than_rows(shape):
    rows, groups, inputs, outputs = shape
    sizes = jnp.zeros(groups, jnp.int32).at[-1:].set(min(rows, 2))
    x, w = jnp.ones((rows, inputs)), jnp.ones((groups, inputs, outputs))
    y, vjp_fn = jax.vjp(lambda x, w: fp8jax.ragged_dot(x, w, sizes, recipe="deepseek"), x, w)
    dx, dw = vjp_fn(jnp.ones_like(y))
    assert (y.shape, dx.shape, dw.shape) == ((rows, outputs), x.shape, w.shape)
    np.testing.assert_allclose(y[:2], jnp.full_like(y[:2], inputs if groups else 0), rtol=1e-2)


@pytest.mark.parametrize("name", ["coat", slow("deepseek")])
def test_transformations_with_sizes_of_the_program(name):
    run = lambda x, w, sizes: fp8jax.ragged_dot(x, w, sizes, recipe=name)  # noqa: E731
    x, w, both = jnp.asarray(X), jnp.asarray(W), jnp.stack([SIZES, SIZES[::-1]])
    each = jnp.stack([run(x, w, sizes) for sizes in both])
    mapped = jax.jit(jax.vmap(run))(jnp.stack([x, x]), jnp.stack([w, w]), both)
    np.testing.assert_allclose(mapped, each, rtol=1e-5, atol=1e-4)

    def total(w, run):
        def step(c, sizes):
            return c + jnp.sum(jnp.sin(run(x, w, sizes))), None

        return lax.scan(step, 0.0, both)[0]

    expected = sum(jax.grad(lambda w, s=sizes: jnp.sum(jnp.sin(run(x, w, s))))(w) for sizes in both)
    actual = jax.jit(jax.grad(total), static_argnums=1)(w, jax.checkpoint(run))
    assert relative(actual, expected) < 1e-3


@pytest.mark.parametrize("recipe", ["coat", slow("coat_fast")])
def test_experts_of_a_model_whose_buffer_is_not_full(recipe):
    """Matmuls that share an input, and one whose input is recomputed, after a norm of all rows."""
    sizes = jnp.asarray(SIZES)
    shapes = {"gate": (4, 64, 32), "up": (4, 64, 32), "down": (4, 32, 64)}
    p = {name: 0.2 * jax.random.normal(jax.random.key(i), s) for i, (name, s) in enumerate(shapes.items())}
    x = jax.random.normal(jax.random.key(9), (ROWS, 64))

    def experts(p, x):
        x = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        h = jax.nn.silu(lax.ragged_dot(x, p["gate"], sizes)) * lax.ragged_dot(x, p["up"], sizes)
        return lax.ragged_dot(h, p["down"], sizes)

    def gradient(f):
        return jax.jit(jax.grad(lambda p, x: jnp.sum(jnp.sin(f(p, x)[: ENDS[-1]]))))

    fast = gradient(fp8jax.transform(experts, recipe))
    actual = fast(p, x)
    assert 0 < relative(actual, gradient(experts)(p, x)) < 0.2
    for tail in (1e10, jnp.nan):
        again = fast(p, x.at[ENDS[-1] :].set(tail))
        jax.tree.map(np.testing.assert_array_equal, again, actual)
