"""Scales of extreme magnitudes, and states of strategies over several steps, against float64 NumPy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.core import scaling
from fp8jax.core.formats import BF16, E4M3, E5M2, FP32, INT8
from fp8jax.core.recipe import Linear

TINY, HUGE = np.finfo(np.float32).tiny, np.finfo(np.float32).max
FORMATS = (E4M3, E5M2, INT8)


def test_scales_of_extremes_are_normal_and_finite():
    amax = np.asarray([0, TINY, 1e-30, 1, 3e38, HUGE], np.float32)
    for fmt in FORMATS:
        exact = np.where(amax > 0, np.maximum(amax.astype(np.float64) / fmt.max, TINY), 1)
        scale = np.asarray(scaling.to_scale(jnp.asarray(amax), fmt))
        np.testing.assert_allclose(scale, exact, rtol=2.0**-22)
        assert (scale >= TINY).all()
        for other in FORMATS:
            with np.errstate(over="ignore"):
                expected = np.minimum(exact.astype(np.float32).astype(np.float64) * fmt.max / other.max, HUGE)
            converted = np.asarray(scaling.convert_scale(jnp.asarray(scale), fmt, other))
            normal = expected >= TINY
            np.testing.assert_allclose(converted[normal], expected[normal], rtol=2.0**-21)
    smallest = scaling.convert_scale(jnp.float32(scaling.TINY), E4M3, E5M2)
    assert float(smallest) == np.finfo(np.float32).tiny  # its reciprocal is finite, where subnormals are flushed, too
    largest = scaling.convert_scale(jnp.float32(HUGE), E5M2, INT8)
    assert float(largest) == HUGE
    assert float(scaling.clamp_scale(jnp.float32(0))) == TINY


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_amax_is_the_largest_finite_magnitude(bad):
    x = np.asarray([[1, -3, 2], [0, 0.5, -1]], np.float32)
    for place in np.ndindex(*x.shape):
        spoiled = x.copy()
        spoiled[place] = bad
        expected = np.abs(np.where(np.isfinite(spoiled), spoiled, 0)).max()
        assert float(scaling.compute_amax(jnp.asarray(spoiled))) == expected
        assert float(scaling.Automatic().measure_amax(jnp.asarray(spoiled))) == expected
    assert float(scaling.compute_amax(jnp.full((2,), bad))) == 0


def test_bounds_from_samples_are_finite_and_of_the_sampled_rows():
    assert float(scaling.amax_from_sample(jnp.float32(HUGE))) == HUGE
    assert float(scaling.amax_from_sample(jnp.float32(1.5))) == 1.5 * scaling.SAMPLE_MARGIN
    rows, period = scaling.SAMPLE_ROWS, scaling.SAMPLE_ROWS * scaling.SAMPLE_EVERY
    for start in (0, 5, rows, period - 3, 2 * period + rows - 1):
        for length in (4, rows + 1):
            x = np.arange(1, length + 1, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
            sampled = (start + np.arange(length)) % period < rows
            expected = max(x[sampled].max(initial=0), 0)
            assert float(scaling.compute_sample_amax(jnp.asarray(x), start)) == expected, (start, length)


def test_a_history_skips_steps_without_values_and_forgets_the_oldest():
    strategy = scaling.Delayed(amax_history_length=3)
    state, history = strategy.init(), [0.0] * 3
    for amax in (2.0, 0.0, 5.0, np.inf, 1.0, np.nan, 3.0):
        state = strategy.update(state, jnp.float32(amax))
        if amax != 0:
            history = [amax if np.isfinite(amax) else 0.0, *history[:-1]]
        np.testing.assert_array_equal(state, np.asarray(history, np.float32))
        assert float(strategy.expected_amax(state)) == max(history)


def test_an_empty_history_scales_by_the_tensor():
    strategy, x = scaling.Delayed(amax_history_length=2), jnp.asarray([[3.0, -7.0]])
    current_scale = float(strategy.scale(strategy.init(), x, E4M3))
    assert current_scale == pytest.approx(7 / 448, rel=1e-6)
    updated = strategy.update(strategy.init(), jnp.float32(28))
    assert float(strategy.scale(updated, x, E4M3)) == pytest.approx(28 / 448, rel=1e-6)


def test_settings_of_strategies_arrive():
    delayed = scaling.find_scaling("delayed", Linear("e4m3", "e4m3", "e5m2", amax_history_length=5, margin=3), "dy")
    assert delayed.init().shape == (5,)
    assert float(delayed.expected_amax(jnp.asarray([1.0, 2.0]))) == 16
    assert float(delayed.scale(delayed.init(), jnp.ones((2, 2)), E4M3)) == pytest.approx(8 / 448, rel=1e-6)
    settings = dataclasses.replace(Linear(), fallback_fraction_range=(0.25, 0.5), threshold_update_factor=2.0)
    threshold = scaling.find_scaling("threshold", settings, "x")
    updated = [float(threshold.update(jnp.float32(1), jnp.asarray([n, 8.0]))) for n in (1.0, 2.0, 4.0, 5.0)]
    assert updated == [0.5, 1, 1, 2]
    every_seventh = dataclasses.replace(Linear(), weight_amax_interval=7)
    assert scaling.find_scaling("automatic", every_seventh) == scaling.Automatic(7)
    assert isinstance(scaling.find_scaling("threshold", settings, "w"), scaling.Current)


def test_thresholds_move_into_their_range_and_stay_normal_numbers():
    strategy = scaling.Threshold(update_factor=1e20)
    none, all_of_them = jnp.asarray([0.0, 4.0]), jnp.asarray([4.0, 4.0])
    state = strategy.init()
    for stats, end in ((none, TINY), (all_of_them, 1 / TINY)):
        for _ in range(5):
            state = strategy.update(state, stats)
        assert float(state) == pytest.approx(end, rel=1e-6)
    assert float(strategy.update(jnp.float32(3), jnp.zeros((2,)))) == 3


@pytest.mark.parametrize("fmt", [BF16, FP32], ids=lambda fmt: fmt.name)
def test_a_bound_grows_as_the_weights_of_its_dtype(fmt):
    strategy, rng = scaling.Automatic(), np.random.default_rng(0)
    bounds = np.exp(rng.normal(size=200) * 5).astype(fmt.dtype).astype(np.float32)
    steps = (bounds * np.exp(rng.normal(size=200) * 4 - 4)).astype(np.float32)
    grown = np.asarray(strategy.grow_bound(jnp.asarray(bounds), jnp.asarray(steps), fmt.dtype))
    exact = bounds.astype(np.float64) + steps
    np.testing.assert_array_equal(grown.astype(fmt.dtype).astype(np.float32), grown)
    assert (grown >= exact.astype(np.float32).astype(fmt.dtype).astype(np.float32)).all()
    assert (grown <= exact * (1 + 2.0**-fmt.mantissa_bits + 2.0**-21)).all()


def test_a_rounded_amax_is_the_next_bf16():
    amax = np.asarray([0, 1, 1 + 2.0**-9, 448, 449.5, TINY, 3e38, np.inf, np.nan], np.float32)
    actual = np.asarray(scaling.TwoStage().reduce_amax(jnp.asarray(amax)))
    finite = np.where(np.isfinite(amax), amax, 0)
    assert (actual >= finite).all()
    assert (actual <= finite * (1 + 2.0**-7)).all()
    np.testing.assert_array_equal(actual.astype(BF16.dtype).astype(np.float32), actual)
    assert actual[1] == 1


def test_a_power_of_two_times_the_outer_scale_covers_an_amax():
    amax = np.asarray([0, 1e-38, 1, 448, 448.1, 896, 1e38], np.float32)
    outer = np.float32(0.7)
    scale = np.asarray(scaling.pow2_scale(jnp.asarray(amax), jnp.float32(outer), E4M3)).astype(np.float64)
    exact = np.maximum(outer * 2.0 ** np.ceil(np.log2(np.maximum(amax.astype(np.float64), 1e-300) / outer / 448)), TINY)
    np.testing.assert_allclose(scale, exact, rtol=1e-6)


@pytest.mark.parametrize(("amax", "outer"), [(3e38, 1e-3), (1e38, 0.1), (3e38, TINY)])
def test_a_scale_is_finite_if_the_outer_scale_is_far_too_small(amax, outer):
    scale = float(scaling.pow2_scale(jnp.float32(amax), jnp.float32(outer), E4M3))
    assert scale == float(np.float32(outer)) * 2.0**127


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (scaling.Delayed, {"amax_history_length": 0}, "amax_history_length must be positive, not 0"),
        (scaling.Threshold, {"min_fraction": -0.1}, "got min -0.1"),
        (scaling.Threshold, {"max_fraction": 1.1}, "and max 1.1"),
        (scaling.Threshold, {"min_fraction": 0.4}, "got min 0.4 and max 0.3"),
        (scaling.Threshold, {"update_factor": 1.0}, "greater than 1, got 1.0"),
        (scaling.Threshold, {"update_factor": float("nan")}, "greater than 1, got nan"),
        (scaling.Automatic, {"weight_amax_interval": 0}, "weight_amax_interval must be positive, not 0"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_one_at_a_time(kind, settings, message):
    kind()
    with pytest.raises(ValueError, match=message):
        kind(**settings)
