"""The quantizer against a float64 reference, its invariants, and `QTensor` under JAX transformations."""

import dataclasses
import functools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax import QuantSpec, quantize
from fp8jax.core import expansion, formats
from fp8jax.core.qtensor import from_bytes, quantize_with_scale, to_bytes
from tests.programs import count
from tests.rows import few, slow

SPECS = ["e4m3", "e5m2", "e4m3:group128", "e5m2:group32", "e4m3:group128+expand", "e5m2:group48+expand"]
OTHERS = [
    "int8",
    "int8:block32",
    "int10:group128",
    "de8:group128+expand",
    "e4m3:mx32",
    "e4m3:mx32+token",
    "e5m2:mx32+ocp",
    "e4m3:mx32+ocp+roundup",
    "e2m1:nv16",
    "e2m1:nvblock16",
    "fp16",
]


def groups(x: np.ndarray, size: int) -> list[np.ndarray]:
    return [x[..., i : i + size] for i in range(0, x.shape[-1], size)]


def oracle(x: np.ndarray, spec: fp8jax.QuantSpec) -> np.ndarray:
    """Quantizes and dequantizes in float64, group by group, by the formula in QTensor's docstring."""
    fmt = formats.get(spec.format)
    size = spec.group_size or x.shape[-1]
    out = []
    rows = x.reshape(1, -1) if spec.granularity == "tensor" else x.reshape(-1, x.shape[-1])
    for row in rows.astype(np.float64):
        for group in groups(row, size if spec.granularity == "group" else row.size):
            magnitude = np.abs(group)
            nonzero = magnitude[magnitude > 0]
            if not nonzero.size:
                out.append(group)
                continue
            scale = np.float64(np.float32(nonzero.max() / fmt.max))
            k = 1.0
            if spec.expand and nonzero.max() > nonzero.min():
                k = np.log(fmt.expansion_range) / np.log(nonzero.max() / nonzero.min())
                k = float(np.float32(np.clip(k, 1 / 16, 16)).astype(jnp.bfloat16))
            y = fmt.max * np.minimum(magnitude / (scale * fmt.max), 1) ** k
            codes = y.astype(np.float32).astype(fmt.dtype).astype(np.float64)
            out.append(np.sign(group) * scale * fmt.max * (codes / fmt.max) ** (1 / k))
    return np.concatenate(out).reshape(x.shape)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(3, 300), (2, 5, 128), (7,), (130, 1)], ids=str)
def test_quantize_equals_the_float64_formula(spec, shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32) * 10.0 ** np.random.default_rng(1).uniform(-6, 6)
    q = fp8jax.quantize(jnp.asarray(x), spec)
    q.validate()
    expected = oracle(x, q.spec)
    actual = np.asarray(q.dequantize(), np.float64)
    # The fp32 error may round a value near a tie to the neighbouring code.
    step = 2.0 ** -formats.get(q.spec.format).mantissa_bits
    assert (np.abs(actual - expected) <= 1e-5 * np.abs(expected) + 1e-30).mean() > 0.999
    assert (np.abs(actual - expected) <= step * 16 * np.abs(expected) + 1e-30).all()


NARROW = [QuantSpec(name, "group", 128, scale_format="bf16") for name in ("e4m3", "int8", "int10")]


@pytest.mark.parametrize("spec", ["e4m3", "e4m3:group128", "e5m2:group128", "int8", "int10:group128", *NARROW], ids=str)
def test_error_is_at_most_half_a_step(spec):
    """Also for the largest value of a group, with scales in bf16."""
    x = jax.random.normal(jax.random.key(0), (16, 384)) * jnp.linspace(0.5, 2, 16)[:, None]
    q = fp8jax.quantize(x, spec)
    fmt = formats.get(q.spec.format)
    scale = np.asarray(q.scale, np.float32)
    scale = scale if q.spec.granularity == "tensor" else np.repeat(scale, 128, -1)
    step = np.abs(x) * 2.0**-fmt.mantissa_bits if fmt.is_float else 0
    bound = np.maximum(step, (fmt.smallest if fmt.is_float else 1) * scale) / 2
    assert (np.abs(np.asarray(q.dequantize()) - x) <= bound * (1 + 2e-4)).all()


def test_expansion_lowers_the_error_of_narrow_groups():
    x = jnp.exp(0.5 * jax.random.normal(jax.random.key(0), (64, 512)))
    error = {
        s: float(jnp.mean((fp8jax.quantize(x, s).dequantize() / x - 1) ** 2))
        for s in ("e4m3:group128", "e4m3:group128+expand")
    }
    # The exponent is about log(57344) / log(range of 128 samples) = 11 / 2.6; relative errors shrink by it.
    assert error["e4m3:group128+expand"] < error["e4m3:group128"] / 9


@pytest.mark.parametrize("spec", ["e4m3:group128+expand", "e5m2:group128+expand"])
def test_special_groups_keep_their_values(spec):
    n = 128
    base = np.random.default_rng(0).normal(size=n).astype(np.float32)
    rows = {
        "zeros": np.zeros(n),
        "one non-zero": np.where(np.arange(n) == 5, -0.37, 0.0),
        "one magnitude": np.where(base > 0, 0.3, -0.3),
        "half zeros": base * (np.arange(n) < 64),
        "one 3000 times the others": base * np.where(np.arange(n) == 7, 3000, 1),
        "wider than the format": np.geomspace(1e-30, 1e30, n),
        "as wide as fp32": np.geomspace(1.2e-38, 3.4e38, n),
        "tiny": np.sign(base) * np.geomspace(1.2e-38, 1e-36, n),
        "tiny and narrow": np.sign(base) * np.linspace(1e-37, 1.1e-37, n),
        "huge": base * 1e37,
    }
    x = np.stack(list(rows.values())).astype(np.float32)
    q = fp8jax.quantize(jnp.asarray(x), spec)
    q.validate()
    actual = np.asarray(q.dequantize())
    assert np.isfinite(actual).all()
    np.testing.assert_array_equal(actual == 0, x == 0)
    np.testing.assert_allclose(actual[:3], x[:3], rtol=1e-6)
    # Half a step of the code, in the expanded domain, moves the value by 2^-(m+1) / k; k here is at least 1/16.
    k = np.asarray(q.expansion, np.float32)
    bound = (1 + 2.0 ** -formats.get(q.spec.format).mantissa_bits) ** (1 / k)
    ratio = np.where(
        x == 0,
        1,
        np.maximum(actual / np.where(x == 0, 1, x), np.where(x == 0, 1, x) / np.where(actual == 0, 1, actual)),
    )
    assert (ratio <= bound).all()


def test_exponents_take_our_range_to_half_the_smallest_normal_within_their_bounds():
    largest = jnp.array([1.0, 1.0, 1.0, 1.0, 0.0, 1e38])
    smallest = jnp.array([1 / 57344, 1.0, 1 - 2**-20, 1e-3, jnp.inf, 1.2e-38])
    k = np.asarray(expansion.exponents(largest, smallest, formats.E4M3), np.float32)
    np.testing.assert_allclose(
        k, [1, 1, 16, np.log(57344) / np.log(1000), 1, np.log(57344) / np.log(1e38 / 1.2e-38)], rtol=2**-8
    )


def test_a_non_zero_second_moment_never_becomes_zero():
    x = jnp.array([[1.0, 1e-9, 0.0, 1e-30]])
    rounded_to_zero = fp8jax.quantize(x, fp8jax.QuantSpec("e4m3", "group", 4))
    unflushed = fp8jax.quantize(x, fp8jax.QuantSpec("e4m3", "group", 4, flush_to_zero=False))
    np.testing.assert_array_equal(np.asarray(rounded_to_zero.dequantize())[0] > 0, [True, False, False, False])
    np.testing.assert_array_equal(np.asarray(unflushed.dequantize())[0] > 0, [True, True, False, True])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_input_is_visible_and_leaves_its_neighbours_alone(spec, bad):
    x = np.random.default_rng(0).normal(size=(2, 256)).astype(np.float32)
    clean = np.asarray(fp8jax.quantize(jnp.asarray(np.where(np.arange(256) == 3, 0, x)), spec).dequantize())
    x[:, 3] = bad
    actual = np.asarray(fp8jax.quantize(jnp.asarray(x), spec).dequantize())
    assert not np.isfinite(actual[:, 3]).any()
    others = np.arange(256) != 3
    np.testing.assert_array_equal(actual[:, others], clean[:, others])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 4)], ids=str)
def test_empty_arrays_quantize_to_empty_arrays(spec, shape):
    q = fp8jax.quantize(jnp.zeros(shape), spec)
    q.validate()
    assert q.dequantize().shape == shape


def test_scalars_take_a_tensor_scale_and_refuse_groups():
    assert float(fp8jax.quantize(jnp.float32(-3.25), "e4m3").dequantize()) == -3.25
    with pytest.raises(ValueError, match="axis -1, which is out of range for an array of shape"):
        fp8jax.quantize(jnp.float32(1), "e4m3:group128")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda d: d.__name__)
def test_narrow_inputs_quantize_as_their_fp32_values(dtype):
    x = jax.random.normal(jax.random.key(0), (4, 200)).astype(dtype)
    a, b = (fp8jax.quantize(v, "e4m3:group64+expand") for v in (x, x.astype(jnp.float32)))
    chex.assert_trees_all_equal(a, b)


def test_subnormal_inputs_count_as_zeros():
    x = jnp.array([[1e-40, 1.0, -1e-44]])
    np.testing.assert_array_equal(np.asarray(fp8jax.quantize(x, "e4m3:group3+expand").dequantize()), [[0, 1, 0]])
    for spec in ("e4m3:group3", "int8:group3", "e4m3:group3+expand"):
        q = fp8jax.quantize(jnp.array([[1e-40, 1e-39, -1e-44]]), spec)
        np.testing.assert_array_equal(q.scale, 1)
        np.testing.assert_array_equal(np.asarray(q.dequantize()), 0)


def test_wrong_inputs_are_refused():
    with pytest.raises(TypeError, match="dtype int32"):
        fp8jax.quantize(jnp.arange(4), "e4m3")
    with pytest.raises(ValueError, match="'stochastic' needs a key"):
        fp8jax.quantize(jnp.ones(4), "e4m3+stochastic")
    with pytest.raises(ValueError, match="'nearest' takes no key"):
        fp8jax.quantize(jnp.ones(4), "e4m3", key=jax.random.key(0))


def test_stochastic_rounding_is_unbiased_through_the_scale_and_repeats_with_its_key():
    x = jnp.full((2000, 64), 0.3).at[:, 0].set(1.0)
    quantize = functools.partial(fp8jax.quantize, x, "e4m3:group64+stochastic")
    mean = float(quantize(key=jax.random.key(0)).dequantize()[:, 1:].mean())
    # Steps of 1/32 of the largest power of two below 0.3 * 448: 8 / 448; five standard errors of the mean.
    assert abs(mean - 0.3) < 5 * (8 / 448) / np.sqrt(12 * 2000 * 63) * 2
    chex.assert_trees_all_equal(quantize(key=jax.random.key(3)), quantize(key=jax.random.key(3)))


def test_stacked_tensors_have_a_scale_each():
    x = jnp.stack([jnp.ones((4, 5)), 100 * jnp.ones((4, 5))])
    q = fp8jax.quantize(x, fp8jax.QuantSpec(layer_axes=1))
    q.validate()
    assert q.scale.shape == (2, 1, 1)
    separate = jnp.stack([fp8jax.quantize(layer, "e4m3").dequantize() for layer in x])
    np.testing.assert_array_equal(np.asarray(q.dequantize()), np.asarray(separate))


@pytest.mark.parametrize(
    "spec",
    [slow("e4m3"), "e5m2:group48+expand", *OTHERS[1::2], *map(slow, OTHERS[::2]), fp8jax.QuantSpec(layer_axes=1)],
    ids=str,
)
def test_qtensor_goes_through_jit_vmap_scan_eval_shape_and_donation(spec):
    spec = fp8jax.QuantSpec.parse(spec)
    x = jax.random.normal(jax.random.key(0), (3, 4, 130))
    layered = jax.vmap(lambda layer: fp8jax.quantize(layer, "e4m3:group128+expand" if spec.layer_axes else spec))(x)
    assert layered.shape == x.shape
    q = fp8jax.quantize(x, spec)
    jitted = jax.jit(lambda x: fp8jax.quantize(x, spec))(x)
    chex.assert_trees_all_equal(q, jitted)
    chex.assert_trees_all_equal_shapes_and_dtypes(q, jax.eval_shape(lambda x: fp8jax.quantize(x, spec), x))
    if spec.granularity in ("group", "block") or spec.layer_axes:
        _, by_layer = jax.lax.scan(lambda carry, layer: (carry, layer.dequantize()), 0, q)
        np.testing.assert_array_equal(np.asarray(by_layer), np.asarray(q.dequantize()))
    donated = jax.jit(lambda q: jax.tree.map(lambda leaf: leaf, q), donate_argnums=0)(jitted)
    chex.assert_trees_all_equal(q, donated)
    addresses = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(q)]
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize(
    ("shape", "sharding"),
    [((16, 1024), P(None, "x")), ((16, 384), P("x", None)), ((8, 200), P(None, "x"))],
    ids=str,
)
def test_sharding_changes_no_code_and_scales_follow_it(shape, sharding):
    x = jax.random.normal(jax.random.key(0), shape)
    quantize = jax.jit(fp8jax.quantize, static_argnums=1)
    expected = quantize(x, "e4m3:group128+expand")
    decoded = np.asarray(expected.dequantize())
    blocks = -(-shape[1] // 128)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, sharding)
        # Op by op, each of them compiled for eight devices, once.
        for f in (quantize, fp8jax.quantize) if blocks == 8 else (quantize,):
            q = f(sharded, "e4m3:group128+expand")
            chex.assert_trees_all_equal(jax.device_get(q), jax.device_get(expected))
            assert jax.typeof(q.codes).sharding.spec == jax.typeof(sharded).sharding.spec
            last = "x" if sharding == P(None, "x") and blocks % 8 == 0 else None
            first = "x" if sharding == P("x", None) else None
            for part in (q.scale, q.expansion):
                assert tuple(jax.typeof(part).sharding.spec) == (first, last)
            values = q.dequantize()
            assert jax.typeof(values).sharding.spec == jax.typeof(sharded).sharding.spec
            np.testing.assert_array_equal(np.asarray(values), decoded)
    automatic = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    q = quantize(jax.device_put(x, jax.NamedSharding(automatic, sharding)), "e4m3:group128+expand")
    chex.assert_trees_all_equal(jax.device_get(q), jax.device_get(expected))


def test_validate_names_what_is_wrong():
    q = fp8jax.quantize(jnp.ones((2, 256)), "e4m3:group128+expand")
    for part, message in (
        ({"scale": q.scale[:, :1]}, r"scale is float32\[2, 1\], not float32\[2, 2\]"),
        ({"codes": q.codes.astype(jnp.float32)}, "codes is float32"),
        ({"expansion": None}, "expansion is missing"),
        ({"scale": -q.scale}, "positive"),
        ({"expansion": q.expansion * 0}, "exponents must lie"),
    ):
        broken = dataclasses.replace(q, **part)
        with pytest.raises(ValueError, match=message):
            broken.validate()


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False), min_size=16, max_size=16
    ),
    spec=st.sampled_from(["e4m3:group16+expand", "e5m2:group16+expand", "e4m3:group16"]),
)
def test_any_finite_group_decodes_to_finite_values_of_the_same_signs(values, spec):
    x = np.asarray([values], np.float32)
    q = fp8jax.quantize(jnp.asarray(x), spec)
    q.validate()
    actual = np.asarray(q.dequantize())
    assert np.isfinite(actual).all()
    assert (actual * np.sign(x) >= 0).all()
    if q.spec.expand:
        np.testing.assert_array_equal(actual != 0, x != 0)
    # Below fp32's smallest normal a processor has fewer bits, or none.
    assert np.abs(actual).max() <= np.abs(x).max() * np.float64(1 + 1e-6) + formats.TINY


def test_metadata_is_rounded_in_a_way_that_no_compiler_may_skip():
    """On GPUs, XLA removes a cast of fp32 to bf16 and back. Codes would then not fit the stored scale."""
    for spec in ("e4m3:group128+expand", fp8jax.QuantSpec("e4m3", "group", 128, scale_format="bf16")):
        assert count(lambda x, spec=spec: fp8jax.quantize(x, spec), "reduce_precision", jnp.ones((4, 128))) >= 1


SCALED = [fmt.name for fmt in formats.ALL if fmt.needs_scale and fmt.name != "e8m0"]


@pytest.mark.parametrize(
    ("name", "scale_format"),
    few(
        [(name, scale) for name in SCALED for scale in ("fp32", "bf16")],
        *((name, ("fp32", "bf16")[i % 2]) for i, name in enumerate(SCALED)),
    ),
)
def test_blocks_up_to_the_largest_numbers_have_the_codes_of_ordinary_ones(name, scale_format):
    """A power of two changes only scales, up to 2^127. The largest fp32 numbers have a finite scale."""
    spec = QuantSpec(name, "group", 64, scale_format=scale_format)
    x = np.abs(np.random.default_rng(0).standard_normal((3, 64))).astype(np.float32)
    x *= 0.99 / x.max(-1, keepdims=True)
    expected = quantize(jnp.asarray(x), spec)
    for factor in (1, 2):
        actual = quantize(jnp.asarray(x * np.float32(2.0**127) * factor), spec)
        np.testing.assert_array_equal(
            np.asarray(actual.codes).view(np.uint8), np.asarray(expected.codes).view(np.uint8)
        )
        np.testing.assert_array_equal(
            np.float64(np.float32(actual.scale)), np.float64(np.float32(expected.scale)) * np.float64(2.0**127) * factor
        )
    for expand in (False, True):
        top = quantize(
            jnp.asarray([np.finfo(np.float32).max, 1e38], jnp.float32), dataclasses.replace(spec, expand=expand)
        )
        top.validate()
        decoded = np.asarray(top.dequantize(), np.float64)
        assert np.isfinite(decoded).all()
        np.testing.assert_allclose(decoded, [np.finfo(np.float32).max, 1e38], rtol=0.25 if name == "e2m1" else 2.0**-3)


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("kind", ["own", "given"])
def test_negative_subnormals_count_as_zeros_of_an_unsigned_format(expand, kind):
    if expand and kind == "given":
        pytest.skip("expanded blocks have no given scales")
    spec = QuantSpec("ude8", "group", 4, expand=expand)
    scale = None if kind == "own" else jnp.full((1, 1), 0.5)
    for tiny, visible in ((-1e-42, False), (-1e-45, False), (-0.0, False), (-1.2e-38, True)):
        q = quantize_with_scale(jnp.array([[tiny, 0.5, 0.25, 0.0]], jnp.float32), spec, scale)
        decoded = np.asarray(q.dequantize())
        assert np.isnan(decoded).all() if visible else np.isfinite(decoded).all(), tiny
        assert visible or (decoded[0, [0, 3]] == 0).all()


def along(axis, *tensors):
    """Concatenates QTensors leaf by leaf, as users' tree maps do."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis), *tensors)


def normal(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("spec", "width", "count"), [
    ("e4m3:group128", 100, 2),
    ("e4m3:group128", 64, 3),  # as many blocks are short as before, and three have scales for two
    ("e4m3:group128", 120, 5),
    ("e4m3:group128+expand", 228, 2),
    ("e4m3:block128", 100, 2),
    ("int10:group128", 256, 2),
    ("e4m3:token", 128, 2),
    ("e4m3", 128, 2),
    ("e4m3:mx32+token", 128, 2),
    ("e2m1:nv16", 40, 2),
    ("e2m1:nvblock16", 128, 2),
])  # fmt: skip
def test_joined_arrays_whose_blocks_moved_are_refused(spec, width, count):
    part = fp8jax.quantize(jnp.asarray(normal(4, width)), spec)
    q = along(-1, *[part] * count)
    assert jax.tree.leaves(q)[0].shape[-1] > part.codes.shape[-1]
    with pytest.raises(ValueError, match="concatenated, sliced or stacked one by one"):
        q.dequantize()
    with pytest.raises(ValueError, match=r"concatenated, sliced or stacked|not uint8|not float32"):
        q.validate()
    with pytest.raises(ValueError, match="concatenated, sliced or stacked one by one"):
        jax.jit(lambda q: jax.tree.map(lambda leaf: leaf, q).dequantize())(q)
    if spec == "e4m3:group128":
        with pytest.raises(ValueError, match="concatenated, sliced or stacked one by one"):
            from_bytes(to_bytes(q)).dequantize()


@pytest.mark.parametrize("spec", ["e4m3:group128+expand", "e4m3:block128"])
def test_arrays_joined_at_whole_blocks_decode_as_their_parts(spec):
    parts = [jnp.asarray(normal(128, 256)), jnp.asarray(normal(128, 256)) * 100]
    tensors = [fp8jax.quantize(x, spec) for x in parts]
    values = [q.dequantize() for q in tensors]
    for axis in (-1, 0):
        q = along(axis, *tensors)
        q.validate()
        np.testing.assert_array_equal(q.dequantize(), jnp.concatenate(values, axis))


@pytest.mark.parametrize("spec", ["e4m3", "e4m3:group64+expand", "int8:token", "e2m1:nv16"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e5m2])
def test_cast_codes_are_refused(spec, dtype):
    q = jax.tree.map(lambda a: a.astype(dtype), fp8jax.quantize(jnp.asarray(normal(8, 64)), spec))
    with pytest.raises(ValueError, match="the arrays of a QTensor were cast one by one"):
        q.dequantize()


@pytest.mark.parametrize("spec", ["e4m3:group64+expand", "e4m3:block64", "e4m3:mx32", "e4m3:token", "de8:group64"])
def test_flips_decode_unless_a_block_is_short(spec):
    def flipped(width):
        q = fp8jax.quantize(jnp.asarray(normal(128, width)), spec)
        flip = jax.tree.map(lambda a: a[:, ::-1], q)
        flip.validate()
        return np.asarray(flip.dequantize()), np.asarray(q.dequantize())[:, ::-1]

    np.testing.assert_array_equal(*flipped(128))
    # The limit that the docstring of QTensor states.
    assert np.array_equal(*flipped(80)) == (spec == "e4m3:token")


def test_short_blocks_go_through_tree_maps_of_leading_axes():
    values = [jnp.asarray(normal(4, 100)) * factor for factor in (1, 100)]
    tensors = [fp8jax.quantize(x, "e4m3:group64") for x in values]
    expected = np.stack([q.dequantize() for q in tensors])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *tensors)
    np.testing.assert_array_equal(stacked.dequantize(), expected)
    np.testing.assert_array_equal(jax.tree.map(lambda leaf: leaf[1], stacked).dequantize(), expected[1])
    np.testing.assert_array_equal(jax.vmap(lambda q: q.dequantize())(stacked), expected)
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), stacked)
    np.testing.assert_array_equal(flat.dequantize(), expected.reshape(8, 100))
    _, each = jax.lax.scan(lambda _, q: (None, q.dequantize()), None, stacked)
    np.testing.assert_array_equal(each, expected)
    # Trees of what has no shape fit those of arrays; so does what was pickled before there were short blocks.
    q = tensors[0]
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, P())
    for other in (dataclasses.replace(q, codes=sharding, scale=sharding), q.shardings(sharding)):
        np.testing.assert_array_equal(jax.jit(lambda q: q, in_shardings=(other,))(q).dequantize(), expected[0])
    old = pickle.loads(pickle.dumps(q))
    old.__dict__.pop("short_blocks", None)
    assert jax.tree.structure(old) == jax.tree.structure(q)
    np.testing.assert_array_equal(old.dequantize(), expected[0])
    assert jax.tree.structure(q) != jax.tree.structure(fp8jax.quantize(jnp.ones((4, 90)), "e4m3:group64"))
