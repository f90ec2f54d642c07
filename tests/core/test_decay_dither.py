"""Rounding of decaying averages, of expanded groups and of short groups, against float64."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8jax.core import encoding, expansion, formats, noise
from fp8jax.core.spec import QuantSpec

E4M3 = formats.E4M3
RANGE = 448 / 2.0**-7  # of e4m3, down to half of its smallest normal number


def codes(x, spec, **options):
    return np.asarray(encoding.encode(jnp.asarray(x), QuantSpec.parse(spec), **options).codes).astype(np.float64)


def dithered(x, spec, phase, decay, **options):
    return codes(x, spec, dither=(jnp.float32(phase), jnp.float32(decay)), **options)


def test_the_decay_of_an_expanded_value_is_raised_to_its_exponent():
    """Codes are 1/15 to 1/8 of a value apart. Rounding to nearest undoes a decay of 3 %, but not one of 11.5 %."""
    exponent = 4
    x = np.exp2(-np.linspace(0, np.log2(RANGE) / exponent, 16, dtype=np.float32))[None]
    nearest = codes(x, "e4m3:group16+expand")
    normal = nearest >= 2.0**-5
    for phase in (0.02, 0.98):
        np.testing.assert_array_equal(dithered(x, "e4m3:group16+expand", phase, 0.97)[normal], nearest[normal])
    low, high = (dithered(x, "e4m3:group16+expand", phase, 0.995) for phase in (0.02, 0.98))
    assert (high >= low).all()
    assert (high > low)[normal].sum() > normal.sum() / 2


def test_elements_of_a_seed_have_dither_of_their_own():
    x = np.full((64, 64), 0.3, np.float32)
    x[:, 0] = 1
    exact = np.float32(0.3) * 448
    for phase in (0.1, 0.5, 0.9):
        alone = dithered(x, "e4m3:token", phase, 0.999)[:, 1:]
        assert len(np.unique(alone)) == 1
        mixed = dithered(x, "e4m3:token", phase, 0.999, seed=noise.step_seed(3))[:, 1:]
        assert set(np.unique(mixed)) == {128, 144}
        # 4,032 draws of 128 or 144 have a mean with a standard deviation of 0.12.
        assert abs(mixed.mean() - exact) < 0.6


def test_noise_of_short_groups_counts_full_ones():
    x = np.random.default_rng(0).uniform(0.1, 1, (6, 20)).astype(np.float32)
    full = np.pad(x, ((0, 0), (0, 12)))
    seed = noise.step_seed(5)
    np.testing.assert_array_equal(codes(x, "e4m3:group16", seed=seed), codes(full, "e4m3:group16", seed=seed)[:, :20])


def test_compressed_groups_decode_within_half_a_code():
    """A group of 199 octaves has an exponent of 0.08, which raises a relative error of 1/8 to at most a factor of 5."""
    x = np.logspace(-30, 30, 16, dtype=np.float32)[None] * np.where(np.arange(16) % 3, 1, -1).astype(np.float32)
    spec = QuantSpec.parse("e4m3:group16+expand")
    leaves = encoding.encode(jnp.asarray(x), spec)
    decoded = np.asarray(encoding.decode(leaves, x.shape, spec)).astype(np.float64)
    assert (np.sign(decoded) == np.sign(x)).all()
    assert np.abs(np.log(np.abs(decoded) / np.abs(x.astype(np.float64)))).max() < np.log(5)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_an_infinite_member_takes_no_range_from_its_group(bad):
    x = np.asarray([[2, 1, -1e-3, 1e-4, -1e-6, 0, bad, 1e-7]], np.float32)
    actual = np.asarray(encoding.limit_group_range(jnp.asarray(x), QuantSpec.parse("e4m3:group8+expand"), 1.0))
    np.testing.assert_array_equal(actual, np.where(np.abs(x) < 2 / RANGE, 0, x))


def test_small_members_are_raised_where_none_may_become_zero_and_zeros_stay():
    x = np.asarray([[2, -1e-3, 0, 1e-6, -1e-7, 0, 0.5, 0]], np.float32)
    spec = dataclasses.replace(QuantSpec.parse("e4m3:group8+expand"), flush_to_zero=False)
    actual = np.asarray(encoding.limit_group_range(jnp.asarray(x), spec, 1.0))
    is_small = (x != 0) & (np.abs(x) < 2 / RANGE)
    np.testing.assert_allclose(actual, np.where(is_small, np.copysign(2 / RANGE, x), x), rtol=1e-6)


def test_zeros_inf_and_nan_are_rounded_as_they_are():
    y = np.asarray([0, np.inf, np.nan, 3.3], np.float32)
    actual = np.asarray(expansion.debias_for_rounding(jnp.asarray(y), jnp.float32(2), formats.E5M2))
    np.testing.assert_array_equal(actual[:3], y[:3])
    # Codes around 3.3 are 3 and 3.5. They decode in proportion to their square roots.
    place = (3.3**0.5 - 3**0.5) / (3.5**0.5 - 3**0.5)
    np.testing.assert_allclose(actual[3], 3 + 0.5 * place, rtol=1e-6)


def test_exponents_of_decaying_averages_stay_within_their_fill():
    octaves = np.asarray([4.0, 8.0, 20.0], np.float32)
    largest, smallest = np.exp2(octaves), np.ones(3, np.float32)
    for fill in (0.85, 0.92, 1.0, 1.04, 1.08):
        previous = (fill * np.log2(RANGE) / octaves).astype(ml_dtypes.bfloat16)
        new = (np.log2(RANGE) / octaves).astype(ml_dtypes.bfloat16)
        actual = expansion.decaying_exponents_with_hysteresis(
            jnp.asarray(largest), jnp.asarray(smallest), E4M3, jnp.asarray(previous)
        )
        np.testing.assert_array_equal(np.asarray(actual), previous if 0.9 <= fill <= 1.05 else new)
