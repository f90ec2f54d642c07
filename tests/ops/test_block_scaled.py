"""Linear layers in mxfp8 and nvfp4, and the rotation before wgrad, against float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import hadamard

import fp8jax
from fp8jax.core.recipe import Linear
from fp8jax.ops.quantization import rotation
from tests.distance import relative

LINEAR = {name: fp8jax.recipes.get(name).linear for name in ("mxfp8", "nvfp4", "te_current", "int8_block")}
# Relative errors of normal values in a product: rounding leaves 2.6 % of e4m3 under powers of two, 9 % of e2m1 under
# 1x16, 11 % under 16x16, and half as much again where it is stochastic; two operands add.
BOUNDS = {"mxfp8": (0.040, 0.040, 0.040), "nvfp4": (0.155, 0.195, 0.185)}


@functools.cache
def problem() -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (200, 96), (96, 64), (200, 64)
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))


@functools.cache
def compiled(recipe: Linear):
    def run(x, w, dy):
        key = jax.random.key(1) if recipe.is_stochastic else None
        y, vjp_fn = jax.vjp(lambda x, w: fp8jax.linear(x, w, recipe=recipe, key=key), x, w)
        return y, *vjp_fn(dy)

    return jax.jit(run)


def errors(recipe: Linear, x, w, dy) -> list[float]:
    """Returns the relative errors of the three matmuls."""
    x64, w64, dy64 = (np.asarray(a, np.float64) for a in (x, w, dy))
    expected = x64 @ w64, dy64 @ w64.T, x64.T @ dy64
    return [relative(actual, product) for actual, product in zip(compiled(recipe)(x, w, dy), expected, strict=True)]


@pytest.mark.parametrize("name", BOUNDS)
def test_products_have_the_error_of_their_format_and_no_more(name):
    actual = errors(LINEAR[name], *problem())
    assert all(bound / 1.6 < error < bound for error, bound in zip(actual, BOUNDS[name], strict=True)), actual


def test_each_operand_is_made_from_the_values_along_its_own_contraction():
    """Exact arithmetic on `fp8jax.quantize` of the matrix, or of its transpose."""
    x, w, dy = problem()
    x64, w64, dy64 = (
        {
            transposed: np.asarray(
                fp8jax.quantize(a.T if transposed else a, "e4m3:mx32+ocp+roundup").dequantize(), np.float64
            )
            for transposed in (False, True)
        }
        for a in (x, w, dy)
    )
    expected = x64[False] @ w64[True].T, dy64[False] @ w64[False].T, x64[True] @ dy64[True].T
    for actual, product in zip(compiled(LINEAR["mxfp8"])(x, w, dy), expected, strict=True):
        np.testing.assert_allclose(actual, product, atol=2e-5 * np.abs(product).max())


@pytest.mark.parametrize("size", [16, 64])
def test_the_rotation_is_hadamards_matrix_with_signs_and_leaves_a_short_group(size):
    x = np.random.default_rng(0).normal(size=(2 * size + 5, 7)).astype(np.float32)
    actual = np.asarray(rotation.rotate_rows(jnp.asarray(x), size), np.float64)
    signs = rotation.signs(size)
    assert set(signs) == {-1, 1}
    # Signs that are a row of the matrix would only permute it, and equal tokens would become one large value.
    assert np.abs(hadamard(size) @ signs).max() <= size / 2
    matrix = hadamard(size) * signs / np.sqrt(size)
    expected = np.concatenate([matrix @ x[:size], matrix @ x[size : 2 * size], x[2 * size :]])
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    np.testing.assert_allclose(actual.T @ actual, x.T.astype(np.float64) @ x, atol=1e-3)  # no product changes
    assert rotation.rotate_rows(x, None) is x


ROWS = Linear("int8:token", "int8:token", "int8:token", "int8:token", "int8:token", "int8:token", None)


@pytest.mark.parametrize(
    ("linear", "largest"),
    [(ROWS, 0.75), (dataclasses.replace(LINEAR["int8_block"], x_wgrad="int8:block128", x_residual=None), 0.75),
     (LINEAR["te_current"], 1.5), (LINEAR["nvfp4"], 1.5)],
    ids=["rows", "int8_block", "te_current", "nvfp4"],
)  # fmt: skip
def test_a_rotation_spreads_outliers_before_wgrad_and_changes_no_other_product(linear, largest):
    """Integers gain if one of 16 tokens has the full range. Floating-point codes keep their error."""
    x, w, dy = problem()
    x = x.at[::16].multiply(30.0)
    plain, rotated = (errors(dataclasses.replace(linear, rotation=size), x, w, dy) for size in (None, 16))
    assert rotated[0] == plain[0]
    assert rotated[1] == pytest.approx(plain[1], rel=0.05)  # noise differs
    assert rotated[2] != plain[2]
    assert rotated[2] < largest * plain[2]


def test_stochastic_gradients_average_out():
    x, w, dy = problem()
    linear = dataclasses.replace(LINEAR["nvfp4"], rotation=None)

    @jax.jit
    def gradients(key):
        return jax.vjp(lambda x, w: fp8jax.linear(x, w, recipe=linear, key=key), x, w)[1](dy)

    dx, dw = jax.lax.map(gradients, jax.random.split(jax.random.key(5), 64))
    assert not np.array_equal(dx[0], dx[1])
    # The remaining error is that of the weight and the input, which are rounded to nearest.
    for mean, actual, expected in ((dx.mean(0), dx[0], dy @ w.T), (dw.mean(0), dw[0], x.T @ dy)):
        assert relative(mean, expected) < 0.8 * relative(actual, expected)


SIZES = np.asarray([40, 0, 23, 100])


@functools.cache
def grouped(name: str):
    """Returns operands of a grouped matmul, its three results, and those of dense matmuls with the same recipe."""
    x, w, dy = (np.array(a) for a in problem())
    ends = np.cumsum(SIZES)
    for scale, start, end in zip((1, 1, 1e-4, 1e4), ends - SIZES, ends, strict=True):
        x[start:end] *= scale
    x[ends[-1] :], dy[ends[-1] :] = 1e30, np.nan  # rows in no group
    w = np.stack([w, w, 30 * w[::-1], w[:, ::-1]])

    def run(x, w, dy):
        key = jax.random.key(1) if LINEAR[name].is_stochastic else None
        multiply = functools.partial(fp8jax.ragged_dot, group_sizes=jnp.asarray(SIZES), recipe=LINEAR[name], key=key)
        y, vjp_fn = jax.vjp(multiply, x, w)
        return y, *vjp_fn(dy)

    return (x, w, dy), jax.jit(run)(x, w, dy)


@pytest.mark.parametrize("name", BOUNDS)
def test_experts_have_the_error_of_their_format_and_no_scale_spans_two(name):
    (x, w, dy), (y, dx, dw) = grouped(name)
    ends = np.cumsum(SIZES)
    for group in (0, 2, 3):
        rows = slice(ends[group] - SIZES[group], ends[group])
        x64, w64, dy64 = (a.astype(np.float64) for a in (x[rows], w[group], dy[rows]))
        actual = relative(y[rows], x64 @ w64), relative(dx[rows], dy64 @ w64.T), relative(dw[group], x64.T @ dy64)
        assert all(bound / 1.7 < error < bound for error, bound in zip(actual, BOUNDS[name], strict=True)), actual
    assert not np.any(dw[1])
    assert not np.any(y[ends[-1] :])
    assert not np.any(dx[ends[-1] :])


@pytest.mark.parametrize(
    "linear",
    [dataclasses.replace(LINEAR["nvfp4"], dy="e2m1:nv16", dy_wgrad="e2m1:nv16"),
     Linear("int8:block128", "int8:block128", "int8:block128", rotation=16)],
    ids=["nvfp4", "int8_block"],
)  # fmt: skip
def test_one_group_is_a_dense_product_rotated_before_wgrad(linear):
    x, w, dy = (a[:128] for a in problem())
    x = x.at[::16].multiply(30.0)

    def run(linear, *sizes):
        def multiply(x, w):
            if not sizes:
                return fp8jax.linear(x, w, recipe=linear)
            return fp8jax.ragged_dot(x, w[None], jnp.asarray(sizes), recipe=linear)

        y, vjp_fn = jax.vjp(multiply, x, w)
        return y, *vjp_fn(dy)

    dense, actual = jax.jit(functools.partial(run, linear))(), jax.jit(functools.partial(run, linear, 128))()
    assert all(relative(a, b) < 5e-3 for a, b in zip(actual, dense, strict=True))
    assert relative(actual[2], jax.jit(functools.partial(run, dataclasses.replace(linear, rotation=None)))()[2]) > 0.01


def test_what_has_no_such_product_says_so():
    x, w, _ = problem()
    sizes = jnp.asarray([100, 100])
    for recipe, reason in (
        (dataclasses.replace(LINEAR["te_current"], rotation=16), "rotation=16 before x_wgrad=e4m3:tensor is not built"),
        (dataclasses.replace(LINEAR["nvfp4"], x="e2m1:nvblock16"), "x is e2m1:nvblock16, but .* for weights only"),
    ):
        with pytest.raises(ValueError, match=f"{reason}.*use another, such as 'mxfp8'"):
            fp8jax.ragged_dot(x, jnp.stack([w, w]), sizes, recipe=recipe)
    for settings, message in (
        ({"rotation": 8}, "linear.rotation 8 is not one of 16, 32, 64, 128"),
        ({"rotation": 16, "x_wgrad": None, "dy_wgrad": None}, "transforms the quantized operands of wgrad"),
        ({"x": "e4m3:mx32", "dy": "e4m3:mx32", "rotation": 16}, "does not fold"),
        ({"w": "e2m1:nvblock16", "w_dgrad": "e4m3"}, "the forward product mixes 4-bit and 8-bit operands"),
        (
            {"x": "e2m1:group16"},
            "is not supported as a matmul operand; use an 8-bit format without expansion, or 'e2m1:nv16'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(Linear("e4m3", "e4m3", "e4m3"), **settings)
    for counts in ((1,), [1, 1], (1, -1), (True, 1)):
        with pytest.raises(ValueError, match="unquantized_blocks must be two block counts"):
            dataclasses.replace(fp8jax.recipes.nvfp4(), unquantized_blocks=counts)
