"""Codes of every format against ml_dtypes and the tables of the OCP FP8 specification."""

import pathlib
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp8jax
import pallas_kernels
from fp8jax.core import formats, masters

PACKAGE = pathlib.Path(fp8jax.__file__).parent
KERNELS = pathlib.Path(pallas_kernels.__file__).parent
FLOAT8 = [formats.E4M3, formats.E5M2]
FLOATS = [*FLOAT8, formats.E2M1]
# OCP 8-bit Floating Point Specification 1.0, table 1, and Microscaling Formats 1.0, section 5.3.3: largest, smallest
# normal, smallest subnormal.
OCP = {"e4m3": (448.0, 2.0**-6, 2.0**-9), "e5m2": (57344.0, 2.0**-14, 2.0**-16), "e2m1": (6.0, 1.0, 0.5)}


def dtype_of(fmt: formats.Format) -> np.dtype:
    """Returns the ml_dtypes dtype of a format."""
    return np.dtype(ml_dtypes.float4_e2m1fn) if fmt is formats.E2M1 else fmt.dtype


def all_codes(fmt: formats.Format) -> np.ndarray:
    """Returns every code of a format, in its ml_dtypes dtype."""
    return np.arange(2**fmt.bits, dtype=np.uint8).view(dtype_of(fmt))


def values(fmt: formats.Format) -> np.ndarray:
    """Returns the distinct finite non-negative values of a format in order, decoded by ml_dtypes."""
    every = all_codes(fmt).astype(np.float32)
    return np.unique(np.abs(every[np.isfinite(every)]))


def bits(codes: jax.Array) -> np.ndarray:
    return np.asarray(codes).view(np.uint8)


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
def test_limits_are_those_of_the_specification(fmt):
    assert (fmt.max, fmt.smallest_normal, fmt.smallest) == OCP[fmt.name]


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
def test_all_codes_survive_decode_and_encode(fmt):
    every = all_codes(fmt)
    decoded = np.asarray(fmt.decode(jnp.asarray(every.view(fmt.dtype))))
    np.testing.assert_array_equal(decoded, every.astype(np.float32))
    encoded = bits(fmt.encode(jnp.asarray(decoded)))
    number = ~np.isnan(decoded)
    np.testing.assert_array_equal(encoded[number], every.view(np.uint8)[number])
    assert np.isnan(encoded[~number].view(fmt.dtype).astype(np.float32)).all()


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
def test_rounding_is_to_nearest_ties_to_even_up_to_saturation(fmt):
    grid = values(fmt)
    middle = (grid[1:] + grid[:-1]) / 2
    inputs = np.concatenate([middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf), grid])
    x = np.concatenate([inputs, -inputs]).astype(np.float32)
    np.testing.assert_array_equal(bits(jax.jit(fmt.encode)(x)), x.astype(dtype_of(fmt)).view(np.uint8))


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
def test_random_values_of_all_magnitudes_round_as_ml_dtypes_does(fmt):
    rng = np.random.default_rng(0)
    x = (rng.choice([-1, 1], 50_000) * 2.0 ** rng.uniform(-20, np.log2(fmt.max), 50_000)).astype(np.float32)
    np.testing.assert_array_equal(bits(fmt.encode(jnp.asarray(x))), x.astype(dtype_of(fmt)).view(np.uint8))


@pytest.mark.parametrize("fmt", FLOAT8, ids=lambda f: f.name)
def test_overflow_saturates_and_non_finite_values_stay_visible(fmt):
    x = jnp.array([1.04 * fmt.max, 1e30, -1e30, jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    decoded = np.asarray(fmt.decode(fmt.encode(x)))
    np.testing.assert_array_equal(decoded[:3], [fmt.max, fmt.max, -fmt.max])
    infinity = [np.nan, np.nan] if fmt.name == "e4m3" else [np.inf, -np.inf]
    np.testing.assert_array_equal(decoded[3:], [*infinity, np.nan])


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
def test_stochastic_rounding_is_unbiased_and_takes_a_neighbour(fmt):
    grid = values(fmt)
    # Between the zero code and the smallest subnormal, inside the subnormals, across the normals, near the maximum.
    index = np.asarray([0, 1, 3, min(20, len(grid) - 4), len(grid) // 2, len(grid) - 2])
    low, high = grid[index], grid[index + 1]
    share, draws = 0.3, 40_000
    x = np.repeat((low + share * (high - low)).astype(np.float32)[:, None], draws, 1)
    actual = np.asarray(fmt.decode(fmt.encode(jnp.asarray(-x), jax.random.key(0))))
    assert (np.isclose(-actual, low[:, None], rtol=1e-6) | np.isclose(-actual, high[:, None], rtol=1e-6)).all()
    went_up = (np.isclose(-actual, high[:, None], rtol=1e-6)).mean(1)
    # Five standard deviations of a binomial share.
    np.testing.assert_allclose(went_up, share, atol=5 * np.sqrt(share * (1 - share) / draws))


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
def test_stochastic_rounding_leaves_representable_values_alone(fmt):
    grid = values(fmt)
    np.testing.assert_array_equal(np.asarray(fmt.decode(fmt.encode(jnp.asarray(grid), jax.random.key(1)))), grid)


@pytest.mark.parametrize("fmt", [formats.FP16, formats.BF16, formats.INT8, formats.INT10], ids=lambda f: f.name)
def test_the_largest_noise_takes_no_representable_value_up(fmt):
    """Also in fp16 and int10: their sums with noise are rounded up in fp32, the largest beyond the format."""
    grid = np.arange(2**16, dtype=np.uint16).view(fmt.dtype) if fmt.is_float else np.arange(-fmt.max, fmt.max + 1)
    grid = grid.astype(np.float32)
    # bf16's steps may be subnormal in fp32, which XLA flushes to 0: it then has fewer codes.
    grid = grid[np.isfinite(grid) & ((np.abs(grid) >= 2.0**-119) | (grid == 0))]
    for noise in (0.0, 1 - 2.0**-17, 1 - 2.0**-24):
        samples = fmt.encode(jnp.asarray(grid), noise=jnp.full(grid.shape, noise, jnp.float32))
        np.testing.assert_array_equal(np.asarray(fmt.decode(samples)), grid)


def test_scaled_says_which_formats_lack_the_range_of_fp32():
    assert {f.name for f in formats.ALL if not f.needs_scale} == {"bf16", "fp32"}


def test_unknown_format_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown number format 'e3m4'.*e4m3"):
        formats.get("e3m4")


def test_dtypes_are_those_of_ml_dtypes():
    assert formats.E4M3.dtype == ml_dtypes.float8_e4m3fn
    assert formats.E5M2.dtype == ml_dtypes.float8_e5m2


def test_integers_round_to_nearest_even_and_are_symmetric():
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.4, 128, 1e9, -1e9, 0.49999997], np.float32)
    np.testing.assert_array_equal(formats.INT8.encode(jnp.asarray(x)), [0, 2, 2, 0, -2, 126, 127, 127, 127, -127, 0])
    assert (formats.INT8.max, formats.INT10.max) == (127, 511)
    assert formats.INT10.encode(jnp.float32(1e4)) == 511


def test_integers_round_stochastically_without_bias():
    x = jnp.full(40_000, -2.3)
    actual = np.asarray(formats.INT8.encode(x, jax.random.key(0)))
    assert set(actual) == {-3, -2}
    assert abs(actual.mean() + 2.3) < 5 * np.sqrt(0.3 * 0.7 / x.size)


def test_e8m0_rounds_and_decodes_as_ml_dtypes_does():
    dtype = ml_dtypes.float8_e8m0fnu
    x = np.concatenate([s * 2.0 ** np.arange(-126, 127) for s in (1, 1.4999, 1.5, 1.9999)]).astype(np.float32)
    codes = np.asarray(formats.E8M0.encode(jnp.asarray(x)))
    np.testing.assert_array_equal(codes, x.astype(dtype).view(np.uint8))
    every = np.arange(256, dtype=np.uint8)
    decoded = np.asarray(formats.E8M0.decode(jnp.asarray(every)))
    np.testing.assert_array_equal(decoded[1:], every.view(dtype).astype(np.float32)[1:])
    assert decoded[0] in (0, 2.0**-127)
    bad = jnp.array([0.0, -1.0, jnp.nan, jnp.inf])
    np.testing.assert_array_equal(formats.E8M0.encode(bad), [255] * 4)


def test_e8m0_rounds_up_and_down_right_at_powers_of_two_and_one_ulp_beside_them():
    powers = (2.0 ** np.arange(-100, 100)).astype(np.float32)
    exponent = np.arange(-100, 100) + 127
    for x, up, down in (
        (powers, exponent, exponent),
        (np.nextafter(powers, np.float32(np.inf)), exponent + 1, exponent),
        (np.nextafter(powers, np.float32(0)), exponent, exponent - 1),
    ):
        np.testing.assert_array_equal(formats.encode_e8m0(jnp.asarray(x), "up"), up)
        np.testing.assert_array_equal(formats.encode_e8m0(jnp.asarray(x), "down"), down)


def test_e8m0_saturates_at_the_largest_power():
    x = np.asarray([2.0**127, 1.5 * 2.0**127, np.finfo(np.float32).max], np.float32)
    for rounding in ("nearest", "up", "down"):
        np.testing.assert_array_equal(formats.encode_e8m0(jnp.asarray(x), rounding), 254)
    np.testing.assert_array_equal(formats.encode_e8m0(jnp.asarray([np.inf, np.nan, 0, -1], jnp.float32), "up"), 255)


@pytest.mark.parametrize("fmt", [formats.DE8, formats.UDE8], ids=lambda f: f.name)
def test_dynamic_exponent_books_are_those_of_8_bit_adam(fmt):
    """The published map has 256 values from -0.9930 (unsigned: 0) to 1, with these smallest and largest ones."""
    book = np.asarray(fmt.codebook)
    assert len(set(book)) == 256
    assert (np.diff(book) > 0).all()
    assert {0.0, 1.0} <= set(book)
    if fmt.is_signed:
        np.testing.assert_allclose(
            book[[0, 1, 254, 126, 128, 129]], [-0.99296875, -0.97890625, 0.99296875, -5.5e-7, 5.5e-7, 3.25e-6]
        )
        np.testing.assert_allclose(book[book > 0][:-1], -book[book < 0][::-1])
    else:
        np.testing.assert_allclose(book[[0, 1, 2, 3, 254]], [0, 3.25e-7, 7.75e-7, 2.125e-6, 0.996484375])


@pytest.mark.parametrize("fmt", [formats.DE8, formats.UDE8], ids=lambda f: f.name)
def test_code_books_encode_to_the_nearest_value(fmt):
    book = np.asarray(fmt.codebook, np.float64)
    every = np.asarray(fmt.encode(jnp.asarray(book, jnp.float32)))
    np.testing.assert_array_equal(every, np.arange(256))
    rng = np.random.default_rng(0)
    sign = rng.choice([-1, 1], 20_000) if fmt.is_signed else 1
    x = (sign * 10.0 ** rng.uniform(-8, 0.3, 20_000)).astype(np.float32)
    actual = np.asarray(fmt.decode(fmt.encode(jnp.asarray(x))), np.float64)
    best = np.abs(book[None] - np.clip(x, -1 if fmt.is_signed else 0, 1)[:, None]).min(1)
    np.testing.assert_allclose(np.abs(actual - np.clip(x, -1, 1)), best, rtol=1e-5, atol=1e-10)
    samples = np.asarray(fmt.decode(fmt.encode(jnp.full(40_000, 0.3331), jax.random.key(0))))
    low, high = np.unique(samples)
    assert low < 0.3331 < high
    assert abs(samples.mean() - 0.3331) < 5 * (high - low) / 2 / np.sqrt(40_000)


def test_rounding_up_gives_the_next_number_and_keeps_nan():
    bits = np.array([0x7FFFFFFF, -1, 0x7FC00000], np.int32)  # NaN as PTX and others write it
    assert np.isnan(formats.round_up(jnp.asarray(bits.view(np.float32)), formats.get("bf16")).astype(np.float32)).all()
    x = np.array([1.0, 1.0 + 2.0**-20, 3.14159, 1e-30, np.inf], np.float32)
    actual = np.asarray(formats.round_up(jnp.asarray(x), formats.get("bf16")).astype(jnp.float32))
    nearest = x.astype(jnp.bfloat16).astype(np.float32)
    expected = np.where(
        nearest < x, np.nextafter(nearest.astype(jnp.bfloat16), jnp.bfloat16(np.inf)).astype(np.float32), nearest
    )
    np.testing.assert_array_equal(actual, expected)


def nested(function, constant):
    """Returns `function(constant.T)`: one nested function transposes the constant, another one applies `function`."""
    return jax.jit(lambda: jax.jit(lambda x: jax.jit(function)(x.T))(constant))()


@pytest.mark.parametrize("spec", ["e4m3:group128", "e4m3:mx32", "int8:token", "e4m3:group128+expand", "de8:group128"])
def test_codes_of_a_transposed_constant_in_nested_functions(spec):
    x = jax.random.normal(jax.random.key(3), (70, 192))
    decode = lambda x: fp8jax.quantize(x, spec).dequantize()  # noqa: E731
    np.testing.assert_allclose(nested(decode, x), decode(jnp.array(x.T)), rtol=1e-5)


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda f: f.name)
def test_transposed_constant_codes_in_nested_functions(fmt):
    codes = jnp.asarray(all_codes(fmt).view(fmt.dtype)).reshape(-1, 8)
    np.testing.assert_array_equal(nested(fmt.decode, codes), all_codes(fmt).astype(np.float32).reshape(-1, 8).T)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_masters_of_a_transposed_constant_in_nested_functions(dtype):
    x = jax.random.normal(jax.random.key(4), (6, 10))
    master = nested(lambda x: masters.split(x, dtype, jnp.int16), x)
    np.testing.assert_array_equal(master.high.astype(jnp.float32), np.asarray(x.T).astype(dtype).astype(np.float32))
    np.testing.assert_array_equal(
        nested(lambda x: masters.join(x, jnp.zeros(x.shape, jnp.int8)), x.astype(dtype)), x.astype(dtype).T
    )


def test_bits_are_read_by_one_function():
    pattern = re.compile(
        r"(?<![`.])(?:jax\.)?lax\.bitcast_convert_type\(|(?<!`)jnp\.(?:signbit|copysign|nextafter|frexp)"
    )
    paths = sorted(path for package in (PACKAGE, KERNELS) for path in package.rglob("*.py"))
    uses = [path.name for path in paths for _ in pattern.findall(path.read_text())]
    # A vector, a reshaped array and a value inside of a kernel are no transposed constants.
    others = ["matmul_mx_mosaic.py", "matmul_mx_mosaic.py", "adamw_triton.py"]
    assert uses == ["formats.py", "call_triton.py", *others]
