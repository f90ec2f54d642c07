"""Given scales, against NumPy: finite values saturate for any scale; Inf and NaN stay visible."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp8jax
from fp8jax.core import formats, packing
from fp8jax.core.qtensor import quantize_with_scale
from tests import given_scales
from tests.rows import few

SHAPE = (30, 45)
BLOCKS = {"tensor": SHAPE, "token": (1, 45), "channel": (30, 1), "group": (1, 8), "block": (8, 8)}
FORMATS = [f.name for f in formats.ALL if f.needs_scale and f.name != "e8m0"]


def in_units(q: fp8jax.QTensor) -> np.ndarray:
    """Returns decoded values before the scale."""
    fmt = formats.get(q.spec.format)
    codes = packing.unpack(q.codes, q.spec.axis, q.shape[-1], fmt.bits) if q.spec.is_packed else q.codes
    if fmt is formats.E2M1:
        codes = np.asarray(codes).view(ml_dtypes.float4_e2m1fn)
    book = None if fmt.codebook is None else np.asarray(fmt.codebook)
    return np.asarray(codes).astype(np.float64) if book is None else book[np.asarray(codes)]


# Each format to nearest and stochastically, each granularity, and most pairs of them.
ALL = [
    (name, granularity, rounding)
    for name in FORMATS
    for granularity in BLOCKS
    for rounding in ("nearest", "stochastic")
]


@pytest.mark.parametrize(("name", "granularity", "rounding"), few(ALL, *ALL[::3]))
def test_finite_values_beyond_the_range_saturate(name, granularity, rounding):
    fmt, block = formats.get(name), BLOCKS[granularity]
    size = block[1] if granularity in ("group", "block") else None
    key = jax.random.key(0) if rounding == "stochastic" else None
    # One program a case; each rounding, granularity and format of codes meets both formats of scales.
    other = (list(BLOCKS).index(granularity) + FORMATS.index(name) + (rounding == "stochastic")) % 2
    spec = fp8jax.QuantSpec(name, granularity, size, rounding=rounding, scale_format=("fp32", "bf16")[other])
    for first in (0, 1, 3, 5):
        x, scale, expected = given_scales.matrix(fmt, SHAPE, block, first=first, bad=fmt.inf is not None)
        q = jax.jit(quantize_with_scale, static_argnums=1)(x, spec, scale, key=key)
        np.testing.assert_array_equal(in_units(q), expected)
        np.testing.assert_array_equal(np.asarray(q.scale, np.float32), np.maximum(scale, np.float32(given_scales.TINY)))
        q.validate()


@pytest.mark.parametrize("scale", [0.0, 1e-39])
def test_a_scale_of_zero_counts_as_the_smallest_normal_number(scale):
    for name in ("e4m3", "int8"):
        q = quantize_with_scale(jnp.asarray([[0.0, 1.0, -1.0]]), name, jnp.float32(scale))
        assert float(q.scale[0, 0]) == given_scales.TINY
        largest = formats.get(name).max
        np.testing.assert_array_equal(np.asarray(q.codes).astype(np.float32), [[0, largest, -largest]])


@pytest.mark.parametrize("name", ["int8", "int10", "de8", "ude8"])
def test_only_what_is_not_finite_marks_a_block_of_formats_without_nan(name):
    fmt = formats.get(name)
    x, scale, expected = given_scales.matrix(fmt, (16, 32), (1, 8), bad=False)
    x[3, 9], x[7, 31], x[0, 0] = np.nan, np.inf, 3e38
    expected[0, 0] = fmt.max
    marked = np.zeros((16, 4), bool)
    marked[3, 1] = marked[7, 3] = True
    q = quantize_with_scale(jnp.asarray(x), f"{name}:group8", scale)
    np.testing.assert_array_equal(np.isnan(q.scale), marked)
    fine = ~np.repeat(marked, 8, 1)
    np.testing.assert_array_equal(in_units(q)[fine], expected[fine])


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "fp16"])
def test_what_is_not_finite_stays_visible_under_the_largest_scales(name):
    # Their reciprocals are subnormal, and 0 where XLA flushes those.
    x = np.float32([[np.inf, -np.inf, np.nan, 0.0, -1.0]])
    for scale in (2.0**127, 3.4e38):
        q = quantize_with_scale(jnp.asarray(x), name, jnp.float32(scale))
        np.testing.assert_array_equal(np.isfinite(in_units(q)), np.isfinite(x))


def test_a_given_scale_is_stored_to_nearest_and_one_of_integers_found_here_above():
    spec, scale = fp8jax.QuantSpec("int8", "token", scale_format="bf16"), np.float32(1 + 2.0**-9)
    x = jnp.full((1, 8), 127 * scale)
    assert (quantize_with_scale(x, spec, scale).scale, fp8jax.quantize(x, spec).scale) == (1, 1 + 2.0**-7)


def test_rounding_within_the_range_is_that_of_the_product_with_the_reciprocal():
    # bf16 values under powers of two: quotients are exact, ties among them.
    x = np.random.default_rng(0).normal(size=(64, 96)).astype(jnp.bfloat16).astype(np.float32) * 40
    for name in ("e4m3", "fp16"):
        fmt = formats.get(name)
        for scale in (2.0**-3, 4.0):
            q = quantize_with_scale(jnp.asarray(x), name, jnp.float32(scale))
            expected = np.clip(x / np.float32(scale), -fmt.max, fmt.max).astype(fmt.dtype)
            np.testing.assert_array_equal(np.asarray(q.codes).astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("spec", ["e4m3", "e5m2:token", "e4m3:group8", "fp16:block8"])
def test_sharded_programs_have_the_same_codes(spec):
    spec = fp8jax.QuantSpec.parse(spec)
    x, scale, _ = given_scales.matrix(formats.get(spec.format), (32, 64), spec.block_shape((32, 64)))
    run = jax.jit(lambda x, scale: quantize_with_scale(x, spec, scale))
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharded = run(jax.device_put(x, jax.NamedSharding(mesh, jax.P("a", "b"))), scale)
    assert len(sharded.codes.sharding.device_set) == 8
    for actual, expected in zip(jax.tree.leaves(sharded), jax.tree.leaves(run(x, scale)), strict=True):
        np.testing.assert_array_equal(np.asarray(actual).view(np.uint8), np.asarray(expected).view(np.uint8))
