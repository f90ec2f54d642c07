"""Codes of every format against ml_dtypes and the tables of the OCP FP8 specification."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8jax.core import formats

FLOAT8 = [f for f in formats.ALL if f.dtype.itemsize == 1]
# OCP 8-bit Floating Point Specification 1.0, table 1: largest, smallest normal, smallest subnormal.
OCP = {"e4m3": (448.0, 2.0**-6, 2.0**-9), "e5m2": (57344.0, 2.0**-14, 2.0**-16)}


def values(fmt: formats.Format) -> np.ndarray:
    """The distinct finite non-negative values of a format, in order, decoded by ml_dtypes."""
    every = np.arange(256, dtype=np.uint8).view(fmt.dtype).astype(np.float32)
    return np.unique(np.abs(every[np.isfinite(every)]))


def bits(codes: jax.Array) -> np.ndarray:
    return np.asarray(codes).view(np.uint8)


@pytest.mark.parametrize("fmt", FLOAT8, ids=lambda f: f.name)
def test_limits_are_those_of_the_specification(fmt):
    assert (fmt.max, fmt.smallest_normal, fmt.smallest) == OCP[fmt.name]


@pytest.mark.parametrize("fmt", FLOAT8, ids=lambda f: f.name)
def test_all_256_codes_survive_decode_and_encode(fmt):
    every = np.arange(256, dtype=np.uint8).view(fmt.dtype)
    decoded = np.asarray(fmt.decode(jnp.asarray(every)))
    np.testing.assert_array_equal(decoded, every.astype(np.float32))
    again = bits(fmt.encode(jnp.asarray(decoded)))
    number = ~np.isnan(decoded)
    np.testing.assert_array_equal(again[number], every.view(np.uint8)[number])
    assert np.isnan(again[~number].view(fmt.dtype).astype(np.float32)).all()


@pytest.mark.parametrize("fmt", FLOAT8, ids=lambda f: f.name)
def test_rounding_is_to_nearest_ties_to_even_up_to_saturation(fmt):
    grid = values(fmt)
    middle = (grid[1:] + grid[:-1]) / 2
    near = np.concatenate([middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf), grid])
    x = np.concatenate([near, -near]).astype(np.float32)
    np.testing.assert_array_equal(bits(jax.jit(fmt.encode)(x)), x.astype(fmt.dtype).view(np.uint8))


@pytest.mark.parametrize("fmt", FLOAT8, ids=lambda f: f.name)
def test_random_values_of_all_magnitudes_round_as_ml_dtypes_does(fmt):
    rng = np.random.default_rng(0)
    x = (rng.choice([-1, 1], 50_000) * 2.0 ** rng.uniform(-20, np.log2(fmt.max), 50_000)).astype(np.float32)
    np.testing.assert_array_equal(bits(fmt.encode(jnp.asarray(x))), x.astype(fmt.dtype).view(np.uint8))


@pytest.mark.parametrize("fmt", FLOAT8, ids=lambda f: f.name)
def test_overflow_saturates_and_non_finite_values_stay_visible(fmt):
    x = jnp.array([1.04 * fmt.max, 1e30, -1e30, jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    decoded = np.asarray(fmt.decode(fmt.encode(x)))
    np.testing.assert_array_equal(decoded[:3], [fmt.max, fmt.max, -fmt.max])
    infinity = [np.nan, np.nan] if fmt.name == "e4m3" else [np.inf, -np.inf]
    np.testing.assert_array_equal(decoded[3:], [*infinity, np.nan])


@pytest.mark.parametrize("fmt", FLOAT8, ids=lambda f: f.name)
def test_stochastic_rounding_is_unbiased_and_takes_a_neighbour(fmt):
    grid = values(fmt)
    # Between the zero code and the smallest subnormal, inside the subnormals, across the normals, near the maximum.
    low = grid[[0, 1, 3, 20, len(grid) // 2, len(grid) - 2]]
    high = grid[[1, 2, 4, 21, len(grid) // 2 + 1, len(grid) - 1]]
    share, draws = 0.3, 40_000
    x = np.repeat((low + share * (high - low)).astype(np.float32)[:, None], draws, 1)
    got = np.asarray(fmt.decode(fmt.encode(jnp.asarray(-x), jax.random.key(0))))
    assert (np.isclose(-got, low[:, None], rtol=1e-6) | np.isclose(-got, high[:, None], rtol=1e-6)).all()
    went_up = (np.isclose(-got, high[:, None], rtol=1e-6)).mean(1)
    # Five standard deviations of a binomial share.
    np.testing.assert_allclose(went_up, share, atol=5 * np.sqrt(share * (1 - share) / draws))


@pytest.mark.parametrize("fmt", FLOAT8, ids=lambda f: f.name)
def test_stochastic_rounding_leaves_representable_values_alone(fmt):
    grid = values(fmt)
    np.testing.assert_array_equal(np.asarray(fmt.decode(fmt.encode(jnp.asarray(grid), jax.random.key(1)))), grid)


def test_scaled_says_which_formats_lack_the_range_of_fp32():
    assert {f.name: f.scaled for f in formats.ALL} == {"e4m3": True, "e5m2": True, "bf16": False, "fp32": False}


def test_unknown_format_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown number format 'e3m4'.*e4m3"):
        formats.get("e3m4")


def test_dtypes_are_those_of_ml_dtypes():
    assert formats.E4M3.dtype == ml_dtypes.float8_e4m3fn
    assert formats.E5M2.dtype == ml_dtypes.float8_e5m2
