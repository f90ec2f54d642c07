"""Forms of `fp8jax.ragged_dot`: layouts of weights, products along tokens, a device's experts, meshes, given codes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8jax
from tests.distance import relative
from tests.programs import residuals
from tests.rows import covering, few

TOKENS, INPUTS, OUTPUTS, GROUPS = 96, 64, 48, 4
SIZES = np.array([20, 0, 37, 11])
STARTS = np.concatenate([[0], np.cumsum(SIZES)])
ROWS = [slice(a, b) for a, b in itertools.pairwise(STARTS)]
RNG = np.random.default_rng(0)
X, W, DY = (
    RNG.normal(size=s).astype(np.float32) for s in ((TOKENS, INPUTS), (GROUPS, INPUTS, OUTPUTS), (TOKENS, OUTPUTS))
)
NAMES = ["coat", "te_current", "deepseek", "int8_block", "bf16"]
RECIPES = few(NAMES, "coat", "bf16")
RECIPES_AND_SWITCH = few(itertools.product(NAMES, [True, False]), ("coat", True), ("bf16", False))
LIMITS = {"bf16": 1e-6}
Numbers = lax.RaggedDotDimensionNumbers


def limit(recipe):
    return LIMITS.get(recipe, 0.08)


def dot(recipe, **settings):
    key = jax.random.key(0) if recipe == "int8_block" else None
    return functools.partial(fp8jax.ragged_dot, recipe=recipe, key=key, **settings)


def gradients(function):
    """The product, and its gradients under the cotangent DY."""

    def run(x, w, dy):
        y, vjp_fn = jax.vjp(function, x, w)
        return (y, *vjp_fn(dy))

    return run


def oracle(x, w, dy):
    """The product of rows and its gradients, in float64; rows in no group are zeros."""
    x, w, dy = (np.asarray(m, np.float64) for m in (x, w, dy))
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    for i, rows in enumerate(ROWS):
        y[rows], dx[rows], dw[i] = x[rows] @ w[i], dy[rows] @ w[i].T, x[rows].T @ dy[rows]
    return y, dx, dw


@pytest.mark.parametrize(("recipe", "x_transposed"), RECIPES_AND_SWITCH)
def test_weights_of_both_layouts(recipe, x_transposed):
    numbers = Numbers((((0 if x_transposed else 1,), (2,)), ((), ())), [int(x_transposed)], [0])
    run = dot(recipe, dimension_numbers=numbers)
    x, w = X.T if x_transposed else X, W.swapaxes(1, 2)
    y, dx, dw = jax.jit(gradients(lambda x, w: run(x, w, jnp.asarray(SIZES))))(x, w, DY)
    dx = dx.T if x_transposed else dx
    for actual, expected in zip((y, dx, dw.swapaxes(1, 2)), oracle(X, W, DY), strict=True):
        assert relative(actual, expected) < limit(recipe)


def test_the_outputs_of_a_transposed_weight_are_placed_on_an_explicit_mesh_as_its_second_axis():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    run = dot("coat", dimension_numbers=Numbers((((1,), (2,)), ((), ())), [0], [0]))
    with jax.set_mesh(mesh):
        w = jax.device_put(W.swapaxes(1, 2), NamedSharding(mesh, P(None, "d")))
        x = jax.device_put(X, NamedSharding(mesh, P()))
        y = jax.eval_shape(lambda x, w: run(x, w, jnp.asarray(SIZES)), x, w)
    assert y.sharding.spec == P(None, "d")


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_along_tokens(recipe):
    """The product of a weight's gradient, as in a user's own backward pass, and its gradients."""
    run = dot(recipe, dimension_numbers=Numbers((((0,), (0,)), ((), ())), [0], []))
    tail = np.arange(TOKENS)[:, None] >= STARTS[-1]
    x, dy = np.where(tail, np.nan, X), np.where(tail, np.inf, DY)
    dw, da, db = jax.jit(gradients(lambda a, b: run(a, b, jnp.asarray(SIZES))))(x, dy, W)
    _, _, expected = oracle(X, W, DY)
    assert relative(dw, expected) < limit(recipe)
    y, dx, _ = oracle(X, W, DY)  # the product's operands are multiplied by the cotangent W
    assert relative(da, dx) < limit(recipe)
    assert relative(db, y) < limit(recipe)
    assert not np.asarray(da)[STARTS[-1] :].any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_devices_part_of_the_experts(recipe):
    """Rows of other experts may have any content, and do not affect scales."""
    x, dy = X.copy(), DY.copy()
    others = np.r_[0:20, STARTS[-1] : TOKENS]
    x[others], dy[others] = np.nan, 1e30
    run = jax.jit(lambda x, w, dy, at: gradients(lambda x, w: dot(recipe)(x, w, SIZES, group_offset=at))(x, w, dy))
    y, dx, dw = run(x, W[1:], dy, jnp.array([1]))
    want_y, want_dx, want_dw = oracle(X, W, DY)
    rows_of_device = slice(20, STARTS[-1])
    for actual, expected in (
        (y[rows_of_device], want_y[rows_of_device]),
        (dx[rows_of_device], want_dx[rows_of_device]),
        (dw, want_dw[1:]),
    ):
        assert relative(actual, expected) < limit(recipe)
    assert not np.asarray(y)[others].any()
    assert not np.asarray(dx)[others].any()
    np.testing.assert_array_equal(y, dot(recipe)(x, W[1:], SIZES, group_offset=1))


@pytest.mark.parametrize(("recipe", "check"), RECIPES_AND_SWITCH)
def test_gradients_inside_shard_map(recipe, check):
    """Each device has tokens and sizes; all share the weights. The weight's gradient is summed over devices."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def inside(x, w, sizes):
        dx, dw = jax.grad(lambda x, w: jnp.sum(jnp.sin(dot(recipe)(x, w, sizes))), (0, 1))(x, w)
        return dx, dw if check else lax.psum(dw, "data")

    parts = {"in_specs": (P("data"), P(), P("data")), "out_specs": (P("data"), P())}
    mapped = jax.jit(jax.shard_map(inside, mesh=mesh, check_vma=check, **parts))
    x, sizes = np.concatenate([X, X[::-1]]), np.concatenate([SIZES, SIZES[::-1]])
    dx, dw = mapped(x, W, sizes)
    alone = jax.jit(jax.grad(lambda x, w, s: jnp.sum(jnp.sin(dot(recipe)(x, w, s))), (0, 1)))
    first, second = alone(X, W, SIZES), alone(X[::-1], W, SIZES[::-1])
    assert relative(dx, np.concatenate([first[0], second[0]])) < 1e-5
    assert relative(dw, first[1] + second[1]) < 1e-5
    if check:  # sizes alone differ between devices: both gradients are summed
        parts = {"in_specs": (P(), P(), P("data")), "out_specs": (P(), P())}
        dx, dw = jax.jit(jax.shard_map(inside, mesh=mesh, **parts))(X, W, sizes)
        second = alone(X, W, SIZES[::-1])
        assert relative(dx, first[0] + second[0]) < 1e-5
        assert relative(dw, first[1] + second[1]) < 1e-5


@pytest.mark.parametrize("recipe", RECIPES)
def test_explicit_meshes(recipe):
    """Each placement has the specs of x, of w and of the result."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    run = gradients(lambda x, w: dot(recipe)(x, w, jnp.asarray(SIZES)))
    expected = jax.jit(run)(X, W, DY)
    for x_spec, w_spec, y_spec in (
        (P("d"), P(), P("d", None)),
        (P(), P(None, None, "d"), P(None, "d")),
        (P(None, "d"), P(None, "d"), P(None, None)),
    ):
        with jax.set_mesh(mesh):
            x, w, dy = map(jax.device_put, (X, W, DY), (NamedSharding(mesh, s) for s in (x_spec, w_spec, y_spec)))
            y, dx, dw = jax.jit(run)(x, w, dy)
        assert jax.typeof(y).sharding.spec == y_spec
        assert jax.typeof(dx).sharding == jax.typeof(x).sharding
        assert jax.typeof(dw).sharding == jax.typeof(w).sharding
        # Sums of codes are sent between devices in 16 bits.
        for actual, alone in zip((y, dx, dw), expected, strict=True):
            assert relative(actual, alone) < (1e-5 if recipe == "bf16" else 5e-3)


def test_mapped_over_inputs_and_weights():
    run = lambda x, w: dot("coat")(x, w, jnp.asarray(SIZES))  # noqa: E731
    xs, ws = jnp.stack([X, 2 * X[::-1]]), jnp.stack([W, W[::-1]])
    total = lambda x, w: jnp.sum(jnp.sin(jax.vmap(run, (0, None))(x, w)))  # noqa: E731
    dx, dw = jax.jit(jax.grad(total, (0, 1)))(xs, W)
    alone = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(run(x, w))), (0, 1)))
    each = [alone(x, W) for x in xs]
    assert relative(dx, jnp.stack([d for d, _ in each])) < 1e-5
    assert relative(dw, each[0][1] + each[1][1]) < 1e-5
    actual = jax.jit(jax.vmap(run))(xs, ws)
    assert relative(actual, jnp.stack([run(*pair) for pair in zip(xs, ws, strict=True)])) < 1e-5


@pytest.mark.parametrize(("recipe", "transposed"), covering(["coat", "deepseek"], [False, True]))
def test_codes_of_experts_are_given_once_for_all_calls(recipe, transposed):
    """The product reads given codes, saves those of dgrad, and has the results of the weight that they are of."""
    numbers = Numbers((((1,), (2,)), ((), ())), [0], [0]) if transposed else None
    w = jnp.asarray(W.swapaxes(1, 2) if transposed else W)
    quantized = fp8jax.quantize_weight(jnp.asarray(W), recipe=recipe)
    assert quantized.forward.shape == (GROUPS, OUTPUTS, INPUTS)
    run = dot(recipe, dimension_numbers=numbers)
    plain = lambda x, w: run(x, w, jnp.asarray(SIZES))  # noqa: E731
    run_quantized = lambda x, w: run(x, w, jnp.asarray(SIZES), quantized=quantized)  # noqa: E731
    for actual, expected in zip(
        jax.jit(gradients(run_quantized))(X, w, DY), jax.jit(gradients(plain))(X, w, DY), strict=True
    ):
        assert relative(actual, expected) < 1e-6
    saved = residuals(run_quantized, jnp.asarray(X), w)
    assert ("uint8", (GROUPS, INPUTS, OUTPUTS)) in saved
    assert ("float32", w.shape) not in saved
    # Codes of another weight give another product: the passed codes are read.
    other = fp8jax.quantize_weight(2 * jnp.asarray(W), recipe=recipe)
    assert relative(run(X, w, SIZES, quantized=other), 2 * plain(X, w)) < 1e-6
    with pytest.raises(ValueError, match="with a quantized weight of"):
        run(X, w, SIZES, quantized=jax.tree.map(lambda a: a[:2], quantized))


def test_the_result_has_the_dtype_that_is_asked_for():
    x, w = jnp.asarray(X, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16)
    for recipe in ("coat", "bf16"):
        y, vjp_fn = jax.vjp(lambda x, w, r=recipe: dot(r, preferred_element_type=jnp.float32)(x, w, SIZES), x, w)
        assert y.dtype == jnp.float32
        assert np.any(y != y.astype(jnp.bfloat16).astype(jnp.float32))
        assert [g.dtype for g in vjp_fn(y)] == [jnp.bfloat16] * 2


@pytest.mark.parametrize(("numbers", "w_shape"), [
    (Numbers((((1,), (1,)), ((), ())), [0], [2]), W.shape),  # groups last
    (Numbers((((1,), (1,)), ((0,), (0,))), [0], []), W.shape),  # a batch of tokens
    (Numbers((((0,), (1,)), ((), ())), [0], [0]), W.shape),
])  # fmt: skip
def test_other_forms_are_refused(numbers, w_shape):
    with pytest.raises(ValueError, match=r"ragged_dot expects .*Use jax.vmap for batch dimensions"):
        dot("coat", dimension_numbers=numbers)(X, W.reshape(w_shape), SIZES)


def test_bad_input():
    along = Numbers((((0,), (0,)), ((), ())), [0], [])
    with pytest.raises(ValueError, match=r"group_offset must be a scalar integer, got an array of shape \(2,\)"):
        dot("coat")(X, W, SIZES, group_offset=jnp.array([0, 1]))
    with pytest.raises(ValueError, match="does not support group_offset"):
        dot("coat", dimension_numbers=along)(X, DY, SIZES, group_offset=1)
    with pytest.raises(ValueError, match=r"contracts \(tokens, m\) and \(tokens, n\)"):
        dot("coat", dimension_numbers=along)(X, DY[:-1], SIZES)
    with pytest.raises(ValueError, match=r"got \(96, 64\), \(4, 64, 48\) and \(3,\)"):
        dot("coat")(X, W, SIZES[:3], group_offset=0)
