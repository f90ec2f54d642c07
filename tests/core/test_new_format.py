"""Formats added as CONTRIBUTING describes: with 4, 6, 8 and 12 bits.

The format defines its packing: a number of bits that is not a byte's is not int10's. Kernels support the two FP8
dtypes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp8jax
from fp8jax.core import formats
from fp8jax.core.formats import Format
from fp8jax.ops.autodiff import residuals
from fp8jax.ops.matmul import matmul
from fp8jax.recipes import Linear
from tests.rows import covering

NEW = {
    "e2m1loose": formats._floating("e2m1loose", ml_dtypes.float4_e2m1fn),
    "e4m3ieee": formats._floating("e4m3ieee", ml_dtypes.float8_e4m3),
    "int4": formats._integer("int4", ml_dtypes.int4, 4),
    "int6": formats._integer("int6", np.int8, 6),
    "int12": formats._integer("int12", np.int16, 12),
}
SPECS = ["", ":group16", ":token", ":block16"]


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setattr(formats, "ALL", (*formats.ALL, *NEW.values()))
    formats.get.cache_clear()
    yield
    formats.get.cache_clear()


def nearest(fmt: Format, x: np.ndarray) -> np.ndarray:
    """Returns the nearest code values to x in units of the format, ties to even, by NumPy and ml_dtypes."""
    clipped = np.clip(x, -fmt.max, fmt.max)
    return clipped.astype(np.float32).astype(fmt.dtype).astype(float) if fmt.is_float else np.round(clipped)


@pytest.mark.parametrize(("name", "how"), covering(NEW, SPECS))
def test_codes_are_those_of_the_format(name, how):
    fmt, x = NEW[name], np.random.default_rng(0).standard_normal((6, 45)).astype(np.float32)
    x[3] *= 1e-3
    q = fp8jax.quantize(jnp.asarray(x), name + how)
    q.validate()
    assert (q.codes.dtype, q.codes.shape, q.length) == (fmt.dtype, x.shape, None)
    assert q.nbytes == x.size * fmt.dtype.itemsize + 4 * q.scale.size
    size = {"": 45, ":group16": 16, ":token": 45, ":block16": 16}[how]
    scale = np.repeat(np.asarray(q.scale, np.float64), size, -1)[:, :45]
    scale = np.broadcast_to(scale, x.shape)
    assert np.abs(x / scale).max() == pytest.approx(fmt.max)
    # Near a tie the quotient in fp32 may be that of the other code.
    actual = np.asarray(q.dequantize(), np.float64) / scale
    expected = np.stack([nearest(fmt, x / scale * (1 + e)) for e in (-2e-7, 0, 2e-7)])
    assert np.isclose(actual, expected, rtol=1e-6).any(0).all()


@pytest.mark.parametrize("name", NEW)
def test_what_is_not_finite_stays_visible(name):
    x = jnp.asarray([[1.0, np.nan, 2.0, 0.0], [1.0, -np.inf, 2.0, 0.0], [1.0, 0.5, 2.0, 0.0]])
    decoded = np.asarray(fp8jax.quantize(x, f"{name}:group4").dequantize())
    assert not np.isfinite(decoded[:2, 1]).any()
    assert np.isfinite(decoded[2]).all()


@pytest.mark.parametrize("name", NEW)
def test_products_decode_them_and_layers_refuse_them(name):
    """No matrix unit supports them: matmuls decode QTensors, and recipes list the 8-bit formats."""
    x, w = jax.random.normal(jax.random.key(0), (32, 64)), jax.random.normal(jax.random.key(1), (24, 64))
    a, b = (fp8jax.quantize(y, f"{name}:group16") for y in (x, w))
    actual = matmul.matmul(a, b)
    expected = np.asarray(a.dequantize(), np.float64) @ np.asarray(b.dequantize(), np.float64).T
    # Decoded to 16 bits, each factor is 2^-9 off at most.
    np.testing.assert_allclose(actual, expected, atol=2.0**-7 * np.abs(expected).max())
    assert not matmul.has_matmul_codes(a)
    with pytest.raises(ValueError, match="is not supported as a matmul operand"):
        Linear(name, name, name)


@pytest.mark.parametrize("name", NEW)
def test_what_is_kept_for_the_backward_pass_has_their_values(name):
    x, spec = jax.random.normal(jax.random.key(0), (32, 64)), fp8jax.QuantSpec(name, "group", 16)
    expected = np.asarray(fp8jax.quantize(x, spec).dequantize())
    np.testing.assert_array_equal(
        jax.jit(lambda x: residuals.dequantize_residual(residuals.quantize_residual(x, spec)))(x), expected
    )
    value, slope = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(fp8jax.save_quantized(x, "kept", spec))))(x)
    assert float(value) == pytest.approx(np.sin(expected.astype(np.float64)).sum(), abs=1e-2)
    np.testing.assert_allclose(slope, np.cos(expected), atol=1e-5)


def test_what_a_format_cannot_be_is_refused():
    for fields, message in (
        ({"packing": "four_in_five"}, "packing 'four_in_five' requires 10-bit integers"),
        ({"packing": "three_in_one"}, "unknown packing 'three_in_one'; use 'four_in_five', 'two_in_one' or None"),
        ({"bits": 16}, "16 bits do not fit into"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(NEW["e2m1loose"], **fields)
    with pytest.raises(ValueError, match="packing 'two_in_one' requires e2m1 codes"):
        dataclasses.replace(NEW["int4"], packing="two_in_one")
    with pytest.raises(ValueError, match="no floating-point dtype with 6 bits"):
        formats._floating("e2m3", ml_dtypes.float6_e2m3fn)
    with pytest.raises(ValueError, match="packing 'four_in_five' requires 10-bit integers"):
        formats._integer("int8 packed", np.int8, 8, "four_in_five")
    assert fp8jax.quantize(jnp.ones((4, 8)), "int10").codes.shape == (4, 10)
    for make, message in (
        (lambda: fp8jax.compressed_adamw(1e-3, mu="int4"), "'int4' codes have 4 bits; use a format with 8 or 16"),
        (lambda: fp8jax.recipes.Comm("int4"), "is not an 8-bit wire format; use 'e4m3', 'e5m2' or 'int8'"),
        (lambda: fp8jax.recipes.Comm("e4m3ieee"), "is not an 8-bit wire format; use 'e4m3', 'e5m2' or 'int8'"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
