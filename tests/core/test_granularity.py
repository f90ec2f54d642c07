"""Granularities, integers, code books and microscaling against references in float64 NumPy and ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp8jax
from fp8jax.core import formats, packing
from fp8jax.core.qtensor import quantize_with_scale

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def block_maxima(a: np.ndarray) -> np.ndarray:
    """Returns the largest values of the 4x4 blocks of a (6, 8) array. The second row of blocks is partial."""
    return np.array([[a[:4, :4].max(), a[:4, 4:].max()], [a[4:, :4].max(), a[4:, 4:].max()]])


def integers(x: np.ndarray, scale: np.ndarray, top: int) -> np.ndarray:
    """Symmetric integer quantization, rounding half to even, in float64."""
    return np.clip(np.round(x.astype(np.float64) / scale), -top, top) * scale


@pytest.mark.parametrize(
    ("spec", "scale_shape", "largest"),
    [
        ("int8", (1, 1), lambda a: a.max(keepdims=True)),
        ("int8:token", (6, 1), lambda a: a.max(1, keepdims=True)),
        ("int8:channel", (1, 8), lambda a: a.max(0, keepdims=True)),
        ("int8:group4", (6, 2), lambda a: np.repeat(a.reshape(6, 2, 4).max(2), 4, 1)),
        ("int8:block4", (2, 2), lambda a: np.kron(block_maxima(a), np.ones((4, 4)))[:6]),
    ],
)
def test_int8_at_every_granularity(spec, scale_shape, largest):
    x = normal(6, 8)
    q = fp8jax.quantize(jnp.asarray(x), spec)
    q.validate()
    assert q.scale.shape == scale_shape
    expected = integers(x, largest(np.abs(x)).astype(np.float64) / 127, 127)
    np.testing.assert_allclose(np.asarray(q.dequantize()), expected, rtol=1e-6)


def test_the_axis_turns_tokens_channels_and_groups():
    x = normal(6, 8)
    for spec in (
        fp8jax.QuantSpec("int8", "token", axis=-2),
        fp8jax.QuantSpec("int8", "channel", axis=-2),
        fp8jax.QuantSpec("e4m3", "group", 4, axis=-2),
        fp8jax.QuantSpec("e4m3", "group", 4, axis=0, expand=True),
        fp8jax.QuantSpec("e4m3", "mx", 4, axis=-2),
    ):
        transposed = fp8jax.quantize(jnp.asarray(x.T), fp8jax.QuantSpec(**{**vars(spec), "axis": -1}))
        q = fp8jax.quantize(jnp.asarray(x), spec)
        q.validate()
        np.testing.assert_array_equal(np.asarray(q.dequantize()), np.asarray(transposed.dequantize()).T)


def test_stacked_axes_share_no_scale():
    x = normal(3, 6, 8) * np.array([1, 10, 100], np.float32)[:, None, None]
    for granularity in ("tensor", "channel"):
        q = fp8jax.quantize(jnp.asarray(x), fp8jax.QuantSpec("int8", granularity, layer_axes=1))
        layers = [fp8jax.quantize(jnp.asarray(layer), f"int8:{granularity}").dequantize() for layer in x]
        np.testing.assert_array_equal(np.asarray(q.dequantize()), np.stack(layers))


def test_int10_keeps_ten_bits_in_ten_bits():
    x = normal(4, 130)
    q = fp8jax.quantize(jnp.asarray(x), "int10:group128")
    q.validate()
    assert q.shape == (4, 130)
    assert q.codes.shape == (4, 165)
    assert q.spec.bytes_per_element == 1.25 + 4 / 128
    scale = np.concatenate(
        [np.repeat(np.abs(part).max(1, keepdims=True), part.shape[1], 1) for part in (x[:, :128], x[:, 128:])], 1
    )
    expected = integers(x, scale.astype(np.float64) / 511, 511)
    np.testing.assert_allclose(np.asarray(q.dequantize()), expected, rtol=1e-6)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("axis", [-1, -2])
def test_packing_is_undone_exactly(length, axis):
    shape, random = (2, length) if axis == -1 else (length, 2), np.random.default_rng(length)
    codes = random.integers(-512, 512, shape).astype(np.int16)
    packed = packing.pack(jnp.asarray(codes), axis)
    assert packed.dtype == jnp.uint8
    assert packed.shape[axis] == 5 * -(-length // 4)
    np.testing.assert_array_equal(np.asarray(packing.unpack(packed, axis, length)), codes)
    nibbles = random.integers(0, 16, shape).astype(np.uint8)
    packed = packing.pack(jnp.asarray(nibbles), axis, bits=4)
    even = np.moveaxis(nibbles, axis, -1)[..., ::2]
    np.testing.assert_array_equal(np.moveaxis(np.asarray(packed), axis, -1) & 15, even)
    assert packed.shape[axis] == -(-length // 2)
    np.testing.assert_array_equal(packing.unpack(packed, axis, length, bits=4), nibbles)


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_packed_codes_have_the_shape_of_their_values(axis):
    x = jnp.asarray(normal(7, 13), jnp.float32)
    q = fp8jax.quantize(x, fp8jax.QuantSpec("int10", "tensor", axis=axis))
    assert q.shape == (7, 13)
    assert q.codes.shape == ((10, 13) if axis % 2 == 0 else (7, 20))
    np.testing.assert_allclose(q.dequantize(), x, atol=float(q.scale[0, 0]) * 0.501)


def test_moss_two_level_microscaling_is_equation_3():
    x = normal(8, 96) * 10.0 ** np.random.default_rng(1).integers(-4, 4, (8, 3)).repeat(32, 1)
    for spec, whole in (("e4m3:mx32", None), ("e4m3:mx32+token", 1)):
        q = fp8jax.quantize(jnp.asarray(x, jnp.float32), spec)
        q.validate()
        groups = np.abs(x.reshape(8, 3, 32)).max(2).astype(np.float64) / 448
        level1 = groups.max(axis=whole, keepdims=True)
        exponent = np.ceil(np.log2(groups / level1) - 1e-9)
        np.testing.assert_allclose(np.asarray(q.scale), level1, rtol=1e-6)
        np.testing.assert_array_equal(np.asarray(q.microscale), exponent + 127)
        unit = np.repeat(level1 * 2.0**exponent, 32, 1)
        codes = (x / unit).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        same = np.asarray(q.codes).view(np.uint8) == codes.view(np.uint8)
        assert same.mean() > 0.999
        assert np.abs(np.asarray(q.codes, np.float32)).max() <= 448


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_ocp_microscaling_is_section_6_3(name):
    fmt = formats.get(name)
    x = (normal(8, 96) * 10.0 ** np.random.default_rng(1).integers(-6, 6, (8, 3)).repeat(32, 1)).astype(np.float32)
    zeros = fp8jax.quantize(jnp.zeros((2, 64)), f"{name}:mx32+ocp")
    np.testing.assert_array_equal(zeros.microscale, 127)
    q = fp8jax.quantize(jnp.asarray(x), f"{name}:mx32+ocp")
    q.validate()
    largest = np.abs(x.reshape(8, 3, 32)).max(2)
    exponent = np.floor(np.log2(largest.astype(np.float64))) - {"e4m3": 8, "e5m2": 15}[name]
    np.testing.assert_array_equal(np.asarray(q.microscale), exponent + 127)
    scaled = x / np.repeat(2.0**exponent, 32, 1).astype(np.float32)
    codes = np.clip(scaled, -fmt.max, fmt.max).astype(fmt.dtype)
    np.testing.assert_array_equal(np.asarray(q.codes).view(np.uint8), codes.view(np.uint8))
    np.testing.assert_array_equal(np.asarray(q.scale), 1)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_powers_that_are_rounded_up_are_the_smallest_without_saturation(name):
    fmt, dtype = formats.get(name), DTYPES[name]
    x = (normal(8, 96) * 10.0 ** np.random.default_rng(1).integers(-6, 6, (8, 3)).repeat(32, 1)).astype(np.float32)
    x[0, 0] = x[0, :32].max() * 2
    top = np.float32(fmt.max)  # exactly the largest code, and one ulp more and less
    x[1, :32], x[1, 32:64], x[1, 64:] = top, np.nextafter(top, np.float32(1e9)), np.nextafter(top, np.float32(0))
    q = fp8jax.quantize(jnp.asarray(x), f"{name}:mx32+ocp+roundup")
    q.validate()
    assert q.storage_key == fp8jax.quantize(jnp.asarray(x), f"{name}:mx32+ocp").storage_key
    exponent = np.ceil(np.log2(np.abs(x.reshape(8, 3, 32)).max(2).astype(np.float64) / fmt.max))
    np.testing.assert_array_equal(exponent[1], [0, 1, 0])
    np.testing.assert_array_equal(np.asarray(q.microscale), exponent + 127)
    unit = np.repeat(2.0**exponent, 32, 1).astype(np.float32)
    assert (np.abs(x / unit) <= fmt.max).all()
    np.testing.assert_array_equal(np.asarray(q.dequantize()), (x / unit).astype(dtype).astype(np.float32) * unit)
    np.testing.assert_array_equal(fp8jax.quantize(jnp.zeros((2, 64)), q.spec).microscale, 1)


def test_a_group_far_below_its_tensor_has_scale_and_codes_of_zero():
    x = np.zeros((2, 32), np.float32)
    x[0, :16], x[:, 16:] = 1, 1e-7 * np.arange(-8, 8)
    q = fp8jax.quantize(jnp.asarray(x), "e2m1:nv16")
    assert (np.asarray(q.codes)[:, 8:] & 0x77 == 0).all()  # but for signs, two codes a byte
    np.testing.assert_array_equal(q.dequantize(), np.where(x == 1, x, 0))


@pytest.mark.parametrize("spec", ["e2m1:nv16", "e2m1:nvblock16"])
def test_nvfp4_is_appendix_b_of_its_paper(spec):
    x = (normal(40, 72) * 10.0 ** np.random.default_rng(1).integers(-2, 2, (40, 1))).astype(np.float32)
    x[:16, :16] = 0
    x[16, 16:32] = 1e-7  # its scale is 0
    q = fp8jax.quantize(jnp.asarray(x), spec)
    q.validate()
    square = q.spec.granularity == "nvblock"
    padded = np.pad(np.abs(x), ((0, 8 if square else 0), (0, 8))).astype(np.float64)
    rows = padded.shape[0] // (16 if square else 1)
    largest = padded.reshape(rows, -1, 5, 16).max((1, 3))
    outer = largest.max() / (6 * 448)
    np.testing.assert_allclose(np.asarray(q.scale), [[outer]], rtol=1e-6)
    # Near a tie the quotient in fp32 may be that of the other code.
    scales = [(largest / 6 / outer * (1 + e)).astype(ml_dtypes.float8_e4m3fn).astype(float) for e in (-3e-7, 0, 3e-7)]
    actual = np.asarray(q.microscale).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert (np.stack(scales) == actual).any(0).all()
    assert actual[0, 0] == 0
    unit = np.kron(actual, np.ones((16 if square else 1, 16)))[:40, :72] * outer
    y = np.divide(x, unit, out=np.zeros(x.shape), where=unit > 0)
    assert np.abs(y).max() <= 6 * 17 / 16  # the scale was rounded down
    candidates = [
        np.clip(y * (1 + e), -6, 6).astype(np.float32).astype(ml_dtypes.float4_e2m1fn) for e in (-4e-7, 0, 4e-7)
    ]
    result = np.asarray(q.dequantize(), np.float64)
    assert np.isclose(result, np.stack(candidates).astype(np.float64) * unit, rtol=1e-6, atol=0).any(0).all()


def test_a_value_that_is_not_finite_marks_its_group_alone_under_two_levels():
    x = normal(32, 64)
    x[3, 5], x[20, 40] = np.nan, -np.inf
    for spec, rows, size in (("e2m1:nv16", 1, 16), ("e2m1:nvblock16", 16, 16), ("e2m1:mx32+ocp+roundup", 1, 32)):
        bad = np.zeros(x.shape, bool)
        for i, j in ((3, 5), (20, 40)):
            bad[i // rows * rows : i // rows * rows + rows, j // size * size : j // size * size + size] = True
        q = fp8jax.quantize(jnp.asarray(x), spec)
        np.testing.assert_array_equal(np.isnan(np.asarray(q.dequantize())), bad)
        others = fp8jax.quantize(jnp.where(jnp.asarray(bad), 0, x), spec)
        if spec.startswith("e2m1:mx"):
            np.testing.assert_array_equal(np.asarray(q.dequantize())[~bad], np.asarray(others.dequantize())[~bad])


def test_stochastic_rounding_of_nvfp4_is_unbiased_within_the_range_of_its_groups():
    x = jnp.broadcast_to(jnp.asarray(normal(1, 64)), (4000, 64))
    q = fp8jax.quantize(x, "e2m1:nv16+stochastic", key=jax.random.key(0))
    unit = np.asarray(q.scale) * np.asarray(q.microscale[0]).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    unit = np.repeat(unit.ravel(), 16)
    inside = np.abs(x[0]) <= 6 * unit
    step = np.where(np.abs(x[0]) > 2 * unit, np.where(np.abs(x[0]) > 4 * unit, 2, 1), 0.5) * unit
    error = np.asarray(q.dequantize(), np.float64).mean(0) - np.asarray(x[0])
    assert inside.sum() > 58
    # Five standard deviations of a Bernoulli variable.
    assert (np.abs(error)[inside] <= 5 * 0.5 * step[inside] / np.sqrt(4000)).all()


def test_microscaled_groups_of_zeros_and_of_all_magnitudes_decode():
    x = np.zeros((5, 64), np.float32)
    x[1, :32] = 1e-30
    x[1, 32:] = 1e30
    x[2] = 3e38
    x[4] = 1.2e-36  # its power of two would be one less than the smallest of OCP
    for spec in ("e4m3:mx32", "e4m3:mx32+token", "e4m3:mx32+ocp"):
        q = fp8jax.quantize(jnp.asarray(x), spec)
        actual = np.asarray(q.dequantize())
        # The largest power of a row ignores zeros; OCP has no such rule.
        assert set(np.asarray(q.microscale)[[0, 3]].ravel().tolist()) == {127 if "ocp" in spec else 1}
        assert np.isfinite(actual).all()
        np.testing.assert_array_equal(actual[[0, 3]], 0)
        np.testing.assert_allclose(actual[1, 32:], 1e30, rtol=2.0**-3)
        np.testing.assert_allclose(actual[4], 1.2e-36 if "token" in spec else 0, rtol=2.0**-3)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_groups_far_below_the_tensor_keep_their_codes(name):
    # In units of the level 1 scale this group is subnormal in fp32; its smallest power of two still reaches it.
    fmt = formats.get(name)
    x = np.zeros((1, 64), np.float32)
    x[0, 0] = 2.0**127
    scale = np.float32(2.0**127) * np.float32(1 / fmt.max)
    codes = np.array([2.0, -1.5, 0.875, -0.25], np.float32)
    x[0, 32:36] = codes * (np.float64(scale) * 2.0**-126)
    q = fp8jax.quantize(jnp.asarray(x), f"{name}:mx32")
    assert int(q.microscale[0, 1]) == 1
    np.testing.assert_array_equal(np.asarray(q.codes[0, 32:36], np.float32), codes)


def test_a_group_whose_own_scale_would_be_subnormal_keeps_its_values():
    x = np.zeros((1, 64), np.float32)
    x[0, 0], x[0, 32:] = 1.7, 1.5e-38
    for spec in ("e4m3:mx32", "e4m3:mx32+token"):
        actual = np.asarray(fp8jax.quantize(jnp.asarray(x), spec).dequantize())
        np.testing.assert_allclose(actual[0, 32:], 1.5e-38, rtol=2.0**-4)
        np.testing.assert_allclose(actual[0, 0], 1.7, rtol=2.0**-4)


@pytest.mark.parametrize("spec", ["int8", "int10:group8", "de8:group8", "ude8:group8"])
def test_formats_without_nan_mark_the_block_of_a_non_finite_value(spec):
    x = np.abs(normal(2, 16))
    x[1, 3] = np.nan
    q = fp8jax.quantize(jnp.asarray(x), spec)
    q.validate()
    actual = np.asarray(q.dequantize())
    assert np.isnan(actual[1, :8]).all()
    if q.spec.granularity == "group":
        assert np.isfinite(actual[0]).all()
        assert np.isfinite(actual[1, 8:]).all()


def test_an_unsigned_format_refuses_negative_values_visibly():
    actual = np.asarray(fp8jax.quantize(jnp.array([[1.0, -0.5], [0.5, 0.25]]), "ude8:token").dequantize())
    assert np.isnan(actual[0]).all()
    np.testing.assert_allclose(actual[1], [0.5, 0.25], rtol=0.01)


@pytest.mark.parametrize("spec", ["de8:group128", "ude8:group128", "de8:group128+expand"])
def test_code_books_in_groups_are_near_their_inputs(spec):
    x = np.abs(normal(4, 256))
    q = fp8jax.quantize(jnp.asarray(x), spec)
    q.validate()
    error = np.sqrt(np.mean((np.asarray(q.dequantize()) - x) ** 2) / np.mean(x**2))
    assert 1e-3 < error < 0.015


def test_given_scales_are_used_and_saturate():
    x = jnp.array([[1.0, -3.0, 500.0, 0.1]])
    q = quantize_with_scale(x, "e4m3", jnp.float32(1.0))
    np.testing.assert_array_equal(np.asarray(q.dequantize()), np.float32([[1.0, -3.0, 448.0, 0.1015625]]))
    assert q.scale.shape == (1, 1)
    with pytest.raises(ValueError, match="computes its scales from the tensor"):
        quantize_with_scale(x, "e4m3:mx2", jnp.float32(1.0))


def test_fp16_with_a_scale_spans_fp16_from_its_largest_value():
    x = jnp.array([1e10, 1.0, -1e3])
    actual = np.asarray(fp8jax.quantize(x, "fp16").dequantize())
    np.testing.assert_allclose(actual, x, rtol=2.0**-10, atol=float(x[0]) / 65504 * 2.0**-25)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "e8m0"}, "is for scales only"),
        ({"format": "int8", "granularity": "mx", "group_size": 32}, "does not support format 'int8'"),
        ({"granularity": "mx", "group_size": 32, "expand": True}, "does not support range expansion"),
        ({"granularity": "mx"}, "positive group_size"),
        ({"granularity": "token", "group_size": 4}, "contradicts granularity 'token'"),
        ({"outer_scale": "token"}, "applies to granularity 'mx'"),
        ({"outer_scale": "row"}, "unknown outer_scale 'row'"),
        ({"exponent_rounding": "up"}, "requires power-of-two scales without an outer scale"),
        ({"granularity": "mx", "group_size": 32, "exponent_rounding": "near"}, "unknown exponent_rounding 'near'"),
        ({"format": "e2m1", "granularity": "nv"}, "use for example nv16"),
        ({"format": "e2m1", "granularity": "nv", "group_size": 16, "flush_to_zero": False}, "whose scales can be 0"),
    ],
)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        fp8jax.QuantSpec(**settings)


def test_a_block_needs_two_axes():
    with pytest.raises(ValueError, match="needs two axes"):
        fp8jax.quantize(jnp.ones(4), "int8:block2")
    assert jax.eval_shape(lambda x: fp8jax.quantize(x, "int8:block2"), jnp.ones((3, 4))).scale.shape == (2, 2)


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_that_an_array_lacks_is_refused_on_either_side(axis):
    spec = fp8jax.QuantSpec("e4m3", "group", 4, axis=axis)
    with pytest.raises(ValueError, match=f"uses axis {axis}, which is out of range for an array of shape \\(8, 8\\)"):
        fp8jax.quantize(jnp.ones((8, 8)), spec)
    assert spec.block_shape((8, 8, 8)).count(4) == 1
