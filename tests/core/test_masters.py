"""Split master weights against a float64 reference, over all magnitudes of fp32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8jax.core import masters
from fp8jax.core.recipe import Weights

COUNT = 64
# By format of the high part: dtype, smallest normal exponent, largest exponent, mantissa bits.
FORMATS = {"bf16": (jnp.bfloat16, -126, 127, 7), "fp16": (jnp.float16, -14, 15, 10)}
PARTS = [(high, rest) for high in masters.HIGH_FORMATS for rest in masters.REMAINDER_DTYPES]


def unit(x, lowest, mantissa):
    """Returns the spacing of floats with that many mantissa bits at the magnitude of x."""
    return 2.0 ** (np.maximum(np.frexp(np.where(x == 0, 1e-300, x))[1] - 1, lowest) - mantissa)


def oracle(x, high, rest):
    """Returns master, high part and remainder of finite fp32 values, in float64."""
    _, lowest, highest, mantissa = FORMATS[high]
    bits, top = 8 * np.dtype(rest).itemsize, 2.0 ** (highest + 1)
    x, sign = np.abs(np.float64(x)), np.where(np.signbit(x), -1.0, 1.0)
    step = unit(x, lowest, mantissa + bits)
    master = np.rint(x / step) * step  # numpy rounds ties to even
    step = unit(master, lowest, mantissa)
    high_values = np.floor(master / step + 0.5) * step  # ties away from zero
    below = unit(np.nextafter(high_values, 0), lowest, mantissa + bits)  # of masters below the high part
    remainder = (master - high_values) / np.where(
        master < high_values, below, unit(high_values, lowest, mantissa + bits)
    )
    infinite = master >= top
    master, remainder = np.where(infinite, np.inf, master), np.where(infinite, 0, remainder)
    remainder = np.where(high_values == 0, sign * remainder, remainder)
    return sign * master, sign * np.where(high_values >= top, np.inf, high_values), remainder


@functools.cache
def programs(high, rest):
    split = jax.jit(lambda x: masters.split(x, FORMATS[high][0], jnp.dtype(rest)))
    return split, jax.jit(masters.join)


def check(x, high, rest):
    split, join = programs(high, rest)
    parts = split(x)
    actual, top = np.asarray(join(parts.high, parts.remainder)), np.asarray(parts.high)
    remainder, finite = np.asarray(parts.remainder), np.isfinite(x)
    assert top.dtype == FORMATS[high][0]
    assert remainder.dtype == rest
    with np.errstate(all="ignore"):
        master, expected_high, expected = (part[finite] for part in oracle(np.where(finite, x, 0), high, rest))
    np.testing.assert_array_equal(actual[finite].astype(np.float64), master)
    np.testing.assert_array_equal(top[finite].astype(np.float64), expected_high)
    np.testing.assert_array_equal(remainder[finite], expected)
    assert (np.signbit(actual) == np.signbit(x))[~np.isnan(x)].all()
    for y in (actual, top.astype(np.float32)):
        np.testing.assert_array_equal(y[~finite], x[~finite])  # NaN and Inf of both signs
    split_again = split(actual)
    np.testing.assert_array_equal(np.asarray(split_again.remainder), remainder)
    assert np.asarray(split_again.high).tobytes() == top.tobytes()


# Bits of fp32 by the part that matters: anywhere; around ties and carries of high parts; around ties of masters.
_ANY = st.integers(0, 2**32 - 1)
_NEAR = st.builds(lambda top, low: (top << 16 | (0x8000 + low) & 0xFFFF) & 0xFFFFFFFF, st.integers(0, 2**16 - 1),
                  st.integers(-300, 300) | st.integers(-0x8000, -0x7F00) | st.integers(0x7F00, 0x7FFF))  # fmt: skip
_BINADE = st.builds(lambda sign, exponent, low: (sign << 31 | exponent << 23) + low & 0xFFFFFFFF,
                    st.integers(0, 1), st.integers(0, 255), st.integers(-(2**17), 2**17))  # fmt: skip
_FP16 = st.builds(lambda sign, exponent, low: sign << 31 | exponent << 23 | low,
                  st.integers(0, 1), st.integers(127 - 42, 127 + 17), st.integers(0, 2**23 - 1))  # fmt: skip


@pytest.mark.parametrize(("high", "rest"), PARTS)
@settings(max_examples=60, deadline=None)
@given(st.lists(_ANY | _NEAR | _BINADE | _FP16, min_size=COUNT, max_size=COUNT))
def test_parts_are_those_of_an_oracle(high, rest, bits):
    check(np.array(bits, np.uint32).view(np.float32), high, rest)


@pytest.mark.parametrize(("high", "rest"), PARTS)
def test_every_high_part_with_the_ends_of_its_remainders(high, rest):
    """All 65,536 bit patterns, at, next to and between both ends: pairs and masters correspond one to one."""
    size, dtype = 8 * np.dtype(rest).itemsize, FORMATS[high][0]
    half = 2 ** (size - 1)
    split, join = programs(high, rest)
    codes = np.arange(2**16, dtype=np.uint16)
    for remainder in (-half, -half + 1, -1, 0, 1, half - 1):
        top = jnp.asarray(codes.view(dtype))
        rests = jnp.full(top.shape, remainder, rest)
        value = join(top, rests)
        parts = split(value)
        # A negative zero has no other remainder, and the lowest one would be a tie to the smallest.
        same = np.isfinite(np.asarray(top, np.float32)) & ((codes & 0x7FFF > 0) | (remainder > -half))
        same &= (codes != 0x8000) | (remainder == 0)
        if high == "fp16" and rest == "int16" and remainder % 8:
            same &= codes & 0x7FFF < 0x100  # fp32 has fewer bits in other binades
        np.testing.assert_array_equal(np.asarray(parts.remainder)[same], remainder)
        assert (np.asarray(parts.high).view(np.uint16) == codes)[same].all()


def test_masters_of_fp16_are_finite_up_to_their_own_range():
    """The high part is Inf from 65,520 on. The remainder contains by how much it is too large."""
    x = np.asarray([65504, 65505.5, 65519.99, 65520, 65535, 65535.99, -65530], np.float32)
    master = masters.split(jnp.asarray(x), jnp.float16, jnp.int16)
    np.testing.assert_array_equal(masters.join(master.high, master.remainder), x)
    beyond = masters.split(jnp.asarray([65536, -7e4], jnp.float32), jnp.float16, jnp.int16)
    np.testing.assert_array_equal(masters.join(beyond.high, beyond.remainder), [np.inf, -np.inf])


def test_what_somebody_sets_to_zero_stays_small():
    """A pruned weight keeps a remainder in units of the smallest number."""
    for high, rest in PARTS:
        zeros = jnp.array([0.0, -0.0] * 3, FORMATS[high][0])
        value = np.asarray(masters.join(zeros, jnp.array([-128, -128, 0, 0, 127, 127], rest)))
        assert (np.abs(value) <= 2.0**-25).all()
        assert not value[2:4].any()


@pytest.mark.parametrize("name", masters.NAMES)
def test_names_say_what_is_stored(name):
    master = masters.Master(name)
    bits = {"fp32": 4, "bf16": 2, "bf16+stochastic": 2}.get(name, 3 if name.endswith("8") else 4)
    compute = "fp16" if name.startswith("fp16") else "bf16"
    weights = Weights(name, compute)
    assert master.bytes_per_element == weights.bytes_per_element == bits
    assert weights.param_format == master.param_format.name == name.split("+")[0]
    assert (weights.split_master is None) == (not name.endswith(("8", "16")) or name == "bf16")
    assert master.is_stochastic == (name == "bf16+stochastic")
    with pytest.raises(ValueError, match="unknown master 'fp8'"):
        masters.Master("fp8")
    for wrong in ({"master": "fp16+int8"}, {"master": "bf16+int8", "compute": "fp32"}, {"master": "bf16+int4"}):
        with pytest.raises(ValueError, match="weights"):
            Weights(**wrong)
