"""Properties of the public quantizing functions for any input: bounds of the error model, by NumPy in float64.

Inputs are 6 x 200, so that the last block is short, with magnitudes over a range that Hypothesis chooses, and special
values anywhere. Each property compiles one program for each spec or recipe.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fp8jax
from fp8jax.core import formats
from tests.rows import few, slow

SHAPE = (6, 200)
SPECIALS = (0.0, -0.0, 1e-45, -1e-38, 1.5, -448.0, 3e38)
NON_FINITE = (np.nan, np.inf, -np.inf)
# Slow runs have 5,000 examples in all, fast runs a few.
counts = pytest.mark.parametrize("count", [4, slow(175)])


@st.composite
def arrays(draw, specials=SPECIALS, lowest=-100, highest=100):
    """Normal values times 2^exponent, each times up to 2^+-spread more, with some special values in their place."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    exponent, spread = draw(st.integers(lowest, highest)), draw(st.integers(0, 20))
    x = rng.normal(size=SHAPE) * 2.0 ** (exponent + rng.integers(-spread, spread + 1, SHAPE))
    places = st.tuples(st.integers(0, SHAPE[0] - 1), st.integers(0, SHAPE[1] - 1))
    for place, value in draw(st.lists(st.tuples(places, st.sampled_from(specials or (0.0,))), max_size=8)):
        x[place] = value
    return np.float32(np.clip(x, -3e38, 3e38)) if np.isfinite(specials).all() else np.float32(x)


def check(holds, count, *strategies, examples=()):
    """Runs a property on so many inputs, the same ones each time, and on the given ones."""
    test = given(*strategies)(holds)
    for one in examples:
        test = example(*one)(test)
    settings(max_examples=count, deadline=None, derandomize=True, database=None)(test)()


def block_amax(x, spec):
    """The largest finite magnitude of each element's block, in float64."""
    x = np.where(np.isfinite(x), np.abs(np.float64(x)), 0)
    if spec.granularity == "tensor":
        return np.full(x.shape, x.max())
    if spec.granularity in ("token", "channel"):
        return np.broadcast_to(x.max(-1 if spec.granularity == "token" else 0, keepdims=True), x.shape)
    rows, columns = (spec.group_size,) * 2 if spec.granularity == "block" else (1, spec.group_size)
    amax = np.zeros_like(x)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            amax[i : i + rows, j : j + columns] = x[i : i + rows, j : j + columns].max()
    return amax


def step(magnitude, amax, fmt):
    """Half the distance of neighbouring values of a format whose largest one decodes to `amax`."""
    return np.maximum(
        magnitude * 2.0 ** -(fmt.mantissa_bits + 1) if fmt.is_float else 0, amax / fmt.max * fmt.smallest / 2
    )


SPECS = ["e4m3", "e5m2:token", "int8:channel", "e4m3:group128", "int8:block32", "e4m3:block64"]
# fp32 represents the scale of such blocks, and its quotients.
NORMAL = formats.TINY * 2.0**20


@functools.cache
def decoded(spec):
    return jax.jit(lambda x: fp8jax.quantize(x, spec).dequantize(jnp.float32))


@counts
@pytest.mark.parametrize("spec", few(SPECS, "e5m2:token", "int8:block32"))
def test_values_come_back_within_half_a_step_of_their_block(spec, count):
    spec = fp8jax.QuantSpec.parse(spec)
    fmt = formats.get(spec.format)

    def holds(x):
        actual, amax = np.float64(decoded(spec)(x)), block_amax(x, spec)
        is_normal = amax > NORMAL
        limit = step(np.abs(np.float64(x)), amax, fmt) * (1 + 1e-5) + 2.0**-22 * np.abs(x)
        assert (np.abs(actual - x) <= limit)[is_normal].all()
        assert np.isfinite(actual).all()
        assert (actual * np.sign(x) >= 0).all()
        assert (np.abs(actual) <= amax * (1 + 1e-6) + formats.TINY).all()

    # A block of zeros; one of numbers near the largest of fp32; and values that 16 bits represent exactly.
    ones = np.ones(SHAPE, np.float32)
    check(holds, count, arrays(), examples=[(0 * ones,), (3e38 * ones,), (1e-30 * ones,)])


@counts
@pytest.mark.parametrize("spec", few([*SPECS, "e4m3:mx32", "e4m3:group128+expand"], "e4m3:group128"))
def test_a_power_of_two_times_the_values_gives_as_many_times_the_result(spec, count):
    spec = fp8jax.QuantSpec.parse(spec)

    def holds(x, exponent):
        x = np.where(np.abs(x) > 2.0**-40, x, 0)
        np.testing.assert_array_equal(decoded(spec)(x * np.float32(2.0**exponent)), 2.0**exponent * decoded(spec)(x))

    check(holds, count, arrays(specials=(0.0,), lowest=-10, highest=10), st.integers(-30, 30))


@counts
@pytest.mark.parametrize("spec", few(["e4m3", "e5m2:token", "e4m3:group128", "e4m3:group128+expand"], "e5m2:token"))
def test_what_is_not_finite_stays_so_and_changes_no_other_value(spec, count):
    def holds(x):
        actual, is_finite = np.asarray(decoded(fp8jax.QuantSpec.parse(spec))(x)), np.isfinite(x)
        assert (np.isfinite(actual) == is_finite).all()
        without = decoded(fp8jax.QuantSpec.parse(spec))(np.where(is_finite, x, 0))
        np.testing.assert_array_equal(actual[is_finite], np.asarray(without)[is_finite])

    check(holds, count, arrays(specials=NON_FINITE))


@counts
@pytest.mark.parametrize("spec", few(["e4m3:mx32", "e4m3:mx32+token", "e4m3:mx32+ocp"], "e4m3:mx32+token"))
def test_microscales_lose_at_most_a_power_of_two_of_their_group(spec, count):
    """Powers are rounded up, so that a group has at least half of the format's range; OCP's may saturate instead."""
    group = fp8jax.QuantSpec("e4m3", "group", 32)

    def holds(x):
        actual, amax = np.float64(decoded(fp8jax.QuantSpec.parse(spec))(x)), block_amax(x, group)
        # The powers of groups reach 2^-127 of the outer scale.
        is_normal = amax > max(NORMAL, np.abs(x).max() * 2.0**-100)
        limit = step(np.abs(np.float64(x)), 2 * amax, formats.E4M3) * (1 + 1e-5) + 2.0**-21 * np.abs(x)
        saturated = np.abs(actual) >= amax * 0.8 if spec.endswith("ocp") else np.zeros(SHAPE, bool)
        assert ((np.abs(actual - x) <= limit) | saturated)[is_normal].all()
        assert (np.abs(actual - x) <= np.abs(x) / 8 + limit)[is_normal].all()

    check(holds, count, arrays(lowest=-20, highest=20, specials=(0.0, 1e-30)))


@counts
@pytest.mark.parametrize("fmt", few(["e4m3", "e5m2"], "e4m3"))
def test_expanded_values_are_within_half_a_step_of_the_power_of_their_group(fmt, count):
    spec = fp8jax.QuantSpec.parse(f"{fmt}:group128+expand")
    quantize, fmt = jax.jit(lambda x: fp8jax.quantize(x, spec)), formats.get(fmt)

    def holds(x):
        q = quantize(x)
        wide = lambda a: np.repeat(np.float64(a), 128, -1)[:, : SHAPE[1]]  # noqa: E731
        amax, k = block_amax(x, spec), wide(q.expansion)
        code = np.abs(np.float64(q.codes))
        ideal = fmt.max * np.where(amax > 0, np.abs(np.float64(x)) / np.where(amax > 0, amax, 1), 0) ** k
        # Scales are in bf16; a power of k multiplies their error by k.
        limit = step(ideal, fmt.max, fmt) * 1.01 + ideal * k * 2.0**-7
        # A value that is not zero has the smallest code at least.
        limit = np.where(ideal < fmt.smallest, fmt.smallest, limit)
        assert (np.abs(code - ideal) <= limit)[amax > NORMAL].all()
        assert ((k >= 1 / 16) & (k <= 16)).all()

    check(holds, count, arrays(lowest=-40, highest=40))


RECIPES = ["te_current", "coat", "deepseek", "int8_block"]


@counts
@pytest.mark.parametrize("recipe", few(RECIPES, "deepseek"))
def test_a_product_and_its_gradients_err_by_no_more_than_their_operands(recipe, count):
    """Norms of errors, as of independent errors of half a step in the coarsest blocks there are.

    Errors of rounding are smaller by the root of three.
    """
    linear, w = fp8jax.recipes.get(recipe).linear, np.float32(np.random.default_rng(1).normal(size=(SHAPE[1], 64)))
    w = np.asarray(w, jnp.bfloat16)

    @jax.jit
    def run(x, dy):
        y, vjp = jax.vjp(lambda x, w: fp8jax.linear(x, w, recipe=linear, key=jax.random.key(0)), x, w)
        return y, *vjp(dy)

    def error(x, spec):
        if spec is None:
            return 0 * x
        spec = fp8jax.QuantSpec.parse(str(spec))
        return step(np.abs(x), np.abs(x).max(), formats.get(spec.format)) * 1.01 + np.abs(x) * 2.0**-8

    def holds(x, seed):
        x = np.asarray(x, jnp.bfloat16)
        dy = np.asarray(np.random.default_rng(seed).normal(size=(SHAPE[0], 64)), jnp.bfloat16)
        actual = [np.float64(array) for array in run(x, dy)]
        a, b, c = (np.float64(np.float32(array)) for array in (x, w, dy))
        specs = {"x": linear.x, "w": linear.w, "dy": linear.dy or linear.x}
        ex, ew, ec = (error(*pair) for pair in ((a, specs["x"]), (b, specs["w"]), (c, specs["dy"])))
        # Operands of gradients are codes of codes: twice the error.
        pairs = [(a, b, ex, ew), (c, b.T, 2 * ec, 2 * ew.T), (a.T, c, 2 * ex.T, 2 * ec)]
        for y, (left, right, el, er) in zip(actual, pairs, strict=True):
            limit = np.sum(el**2 @ right**2 + left**2 @ er**2 + el**2 @ er**2) ** 0.5
            limit += np.linalg.norm(left @ right) * 2.0**-8 + formats.TINY
            assert np.linalg.norm(y - left @ right) <= limit

    check(holds, count, arrays(lowest=-10, highest=10, specials=(0.0, 1e-20, 8.0)), st.integers(0, 99))


@counts
@pytest.mark.parametrize("make", [fp8jax.compressed_adamw, fp8jax.fp8lm_adamw], ids=["compressed_adamw", "fp8lm_adamw"])
def test_a_first_step_moves_each_weight_by_the_rate_and_the_second_one_by_no_more_than_adam_may(make, count):
    """For gradients far above eps; of zeros there is no step. b1 0.9 and b2 0.95 as in `max_adam_step`."""
    rate, params = 0.125, np.ones(SHAPE, np.float32)
    tx = make(rate, b2=0.95, weight_decay=0.0, eps=1e-30, min_size=0)
    step = jax.jit(tx.update)

    def holds(g):
        state = tx.init(params)
        first, state = step(g, state, params)
        second, state = step(g, state, params)
        is_clear = np.abs(g) > np.abs(g).max() * 2.0**-6
        np.testing.assert_allclose(np.asarray(first)[is_clear], -rate * np.sign(g)[is_clear], rtol=5e-3)
        assert all(np.isfinite(np.float32(x)).all() for x in jax.tree.leaves((first, second, state)))
        assert (np.asarray(second)[g == 0] == 0).all() or make is fp8jax.compressed_adamw
        assert (np.asarray(second) * np.sign(g) <= 0)[is_clear].all()

    check(holds, count, arrays(specials=(0.0, 1.0), lowest=-10, highest=10))
