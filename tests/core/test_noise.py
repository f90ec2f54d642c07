"""Counter-based noise: each seed word, each axis and each parameter changes it; NaN and Inf are preserved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.core import noise

SEED = np.asarray([123_456_789, 987_654_321], np.uint32)


def words(*seed):
    return jnp.asarray(seed, jnp.uint32)


def fraction_equal(a, b):
    return np.mean(np.asarray(a) == np.asarray(b))


def test_noise_is_even_over_sixteen_bits():
    samples = np.asarray(noise.counter_noise(words(*SEED), (256, 256)))
    assert samples.min() >= 0
    assert samples.max() < 2**16
    counts = np.bincount(samples.ravel() >> 12, minlength=16)
    # Sixteen bins of 4,096 expected draws: five standard deviations are 310.
    assert np.abs(counts - 4096).max() < 310


def test_neighbours_have_noise_of_their_own():
    drawn = np.asarray(noise.counter_noise(words(*SEED), (128, 128)), np.float64)
    for axis in range(2):
        for distance in (1, 2, 3, 4, 8):
            a, b = np.split(np.moveaxis(drawn, axis, 0), [distance])[1], np.moveaxis(drawn, axis, 0)[:-distance]
            assert fraction_equal(a, b) < 1e-3
            # Five standard deviations of some 16,000 independent pairs are 0.04.
            assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.04


def test_either_word_of_the_seed_changes_the_noise():
    samples = noise.counter_noise(words(*SEED), (32, 40))
    for other in (SEED + np.asarray([1, 0], np.uint32), SEED + np.asarray([0, 1], np.uint32)):
        assert fraction_equal(samples, noise.counter_noise(words(*other), (32, 40))) < 0.02


@pytest.mark.parametrize("starts", [(3, 0, 0), (0, 5, 0), (0, 0, 11), (2, 7, 13)], ids=str)
def test_a_slice_has_the_noise_of_its_place(starts):
    shape, size = (5, 12, 37), (2, 4, 9)
    full = np.asarray(noise.counter_noise(words(*SEED), shape))
    part = noise.counter_noise(words(*SEED), size, global_shape=shape, offsets=starts)
    np.testing.assert_array_equal(part, full[tuple(slice(a, a + n) for a, n in zip(starts, size, strict=True))])


def test_rows_are_counted_by_their_padded_length():
    padded = np.asarray(noise.counter_noise(words(*SEED), (6, 48)))
    np.testing.assert_array_equal(noise.counter_noise(words(*SEED), (6, 33), 48), padded[:, :33])


def test_an_array_behind_others_continues_their_noise():
    full = np.asarray(noise.counter_noise(words(*SEED), (64,)))
    np.testing.assert_array_equal(noise.counter_noise(noise.advance_counter(words(*SEED), 3), (40,)), full[24:])


def test_rounding_depends_on_the_seed_and_the_place():
    x = jnp.full((64, 64), 1 + 2.0**-9, jnp.float32)
    rounded = np.asarray(noise.round_stochastic(x, words(*SEED)), np.float32)
    assert set(np.unique(rounded)) == {1.0, 1 + 2.0**-7}
    # A quarter is rounded up; 4,096 draws have a standard deviation of 28.
    assert abs((rounded > 1).sum() - 1024) < 140
    part = noise.round_stochastic(x[:8, :16], words(*SEED), global_shape=(64, 64), offsets=(24, 32))
    np.testing.assert_array_equal(np.asarray(part, np.float32), rounded[24:32, 32:48])
    assert fraction_equal(noise.round_stochastic(x, words(*(SEED + np.uint32(1)))), rounded) < 0.8


def test_rounding_keeps_what_is_not_finite():
    x = np.asarray([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32)
    # The noise could carry this payload into the sign or into zero.
    x = np.concatenate([x, np.asarray([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)])
    rounded = np.asarray(noise.round_stochastic(jnp.asarray(x), words(*SEED)), np.float32)
    np.testing.assert_array_equal(rounded, x)
    np.testing.assert_array_equal(np.signbit(rounded[2:6]), np.signbit(x[2:6]))


def test_every_word_of_a_key_changes_the_seed():
    keys = [jax.random.wrap_key_data(jnp.asarray(data, jnp.uint32)) for data in ((1, 2), (3, 2), (1, 3), (2, 1))]
    seeds = {tuple(np.asarray(noise.key_to_seed(key)).tolist()) for key in keys}
    assert len(seeds) == 4
    assert len({first for first, _ in seeds}) == len({second for _, second in seeds}) == 4


def test_parameters_have_seeds_that_differ_in_both_words():
    seeds = [noise.fold_in_seed(noise.step_seed(7), noise.param_seed(name)) for name in ("a/kernel", "b/kernel")]
    assert np.all(np.asarray(seeds[0]) != np.asarray(seeds[1]))
    assert np.all(np.asarray(noise.step_seed(7)) != np.asarray(noise.step_seed(8)))
