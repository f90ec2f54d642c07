"""Folded microscaling: its codes, and its matmuls against the two-level matmul in float64."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.ops.dispatch import choice
from fp8jax.ops.matmul.matmul import matmul
from fp8jax.ops.quantization.microscaling import fold_microscales, fold_rows
from tests.rows import few


def fold(x, spec, **kwargs):
    return fold_rows(x, fp8jax.QuantSpec.parse(spec), **kwargs)


@pytest.mark.parametrize("level1", ["", "+token"])
def test_folded_codes_are_the_two_level_ones_until_they_go_subnormal(level1):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(64, 256)) * 10.0 ** rng.uniform(-8, 8, (64, 1))
    down = rng.integers(0, 3, (64, 8))
    x = jnp.asarray(x * np.exp2(-np.repeat(down, 32, 1).astype(float)), jnp.float32)
    two = fp8jax.quantize(x, f"e4m3:mx32{level1}")
    one = fold(x, f"e4m3:mx32{level1}")
    one.validate()
    a, b = (np.asarray(q.dequantize(), np.float64) for q in (two, one))
    exact = np.asarray(x, np.float64)
    normal = np.abs(np.asarray(one.codes).astype(np.float64)) >= 2.0**-6
    np.testing.assert_array_equal(a[normal], b[normal])
    # The rest is rounded once, to half the smallest code of its row.
    assert (np.abs(b - exact) <= 2.0**-10 * np.asarray(one.scale) + 2.0**-4 * np.abs(exact)).all()


@pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")
@pytest.mark.parametrize(
    ("columns", "reason"), [(40000, "a row of 40000 elements is longer"), (64, "compute capability 80")]
)
def test_what_the_kernel_cannot_fold_is_refused_or_left_to_xla(columns, reason):
    x = jnp.ones((2, columns), jnp.bfloat16)
    with choice.target(capability=80 if columns == 64 else 90), choice.record_choices() as choices:
        with pytest.raises(ValueError, match=reason):
            fold(x, "e4m3:mx32", impl="triton")
        np.testing.assert_array_equal(np.asarray(fold(x, "e4m3:mx32").dequantize()), 1)
    assert [(name, c.impl) for name, c in choices] == [("fold", "xla")]
    assert reason in choices[0][1].reason


@pytest.mark.parametrize("spec", ["e4m3:mx32", "e4m3:mx32+token"])
def test_folding_under_transformations(spec):
    x = jnp.asarray(np.random.default_rng(3).normal(size=(3, 8, 100)) * [[[1]], [[1e3]], [[1e-3]]], jnp.bfloat16)
    expected = [fold(one, spec) for one in x]
    mapped = jax.jit(jax.vmap(lambda one: fold(one, spec)))(x)
    for i, one in enumerate(expected):
        np.testing.assert_array_equal(np.asarray(mapped.scale[i]), np.asarray(one.scale))
        np.testing.assert_array_equal(np.asarray(mapped.codes[i]), np.asarray(one.codes))


def round_e4m3(x):
    """Rounds to nearest even with saturation, from the definition: 3 mantissa bits, smallest exponent -6."""
    step = np.exp2(np.maximum(np.frexp(np.abs(x))[1] - 1, -6) - 3.0)
    return np.clip(np.round(x / step) * step, -448, 448)


@pytest.mark.parametrize("level1", ["", "+token"])
def test_folding_afterwards_rounds_each_code_under_its_power_over_the_largest_of_its_row(level1):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(6, 150)) * 10.0 ** rng.uniform(-4, 4, (6, 1)) * 2.0 ** -rng.integers(0, 20, (6, 150))
    q = fp8jax.quantize(jnp.asarray(x, jnp.float32), f"e4m3:mx32{level1}")
    powers = np.array(q.microscale)
    powers[0, 1], powers[1], powers[2, 3] = 255, 0, 40  # NaN; all zeros; far below the others
    powers[3, :2] = 58, 211  # further apart than a power can represent
    scale = np.broadcast_to(q.scale, (6, 1)).copy() if level1 else np.array(q.scale)
    if level1:  # times the largest power subnormal: the powers stay in the codes
        scale[4], powers[4] = 1e-37, powers[4] - 20
    one = fold_microscales(dataclasses.replace(q, microscale=jnp.asarray(powers), scale=jnp.asarray(scale)))
    one.validate()
    wide = powers.astype(np.float64)
    top = np.where(powers == 255, 0, wide).max(1, keepdims=True)
    small = (scale * np.exp2(top - 127) < np.finfo(np.float32).tiny) | (top == 0)
    top = np.where(small, 127, top)
    assert small.ravel().tolist() == [False, True, False, False, level1 != "", False]
    np.testing.assert_array_equal(np.asarray(one.scale), (scale * np.exp2(top - 127)).astype(np.float32))
    factor = np.repeat(np.where(powers == 255, np.nan, np.exp2(wide - top)), 32, 1)[:, :150]
    expected = round_e4m3(np.asarray(q.codes).astype(np.float64) * factor)
    expected[1] = 0
    np.testing.assert_array_equal(np.asarray(one.codes).astype(np.float64), expected)


def test_what_cannot_be_folded_afterwards_is_refused():
    x = jnp.ones((4, 64))
    for spec in ("e4m3:mx16", "e5m2:mx32", "e4m3:mx32+ocp", "e4m3"):
        with pytest.raises(ValueError, match="fold_microscales expects e4m3 codes"):
            fold_microscales(fp8jax.quantize(x, spec))
    with pytest.raises(ValueError, match="unknown impl 'mosaic'"):
        fold_microscales(fp8jax.quantize(x, "e4m3:mx32"), impl="mosaic")


@pytest.mark.parametrize("shape", [(0, 64), (4, 0)])
def test_nothing_is_folded_to_nothing(shape):
    one = jax.jit(fold_microscales)(fp8jax.quantize(jnp.ones(shape), "e4m3:mx32"))
    assert one.codes.shape == shape
    one.validate()


def test_folding_afterwards_says_what_does_it_and_works_in_shard_map():
    q = fp8jax.quantize(jnp.ones((4, 64)), "e4m3:mx32+token")
    with choice.record_choices() as choices:
        expected = fold_microscales(q)
    assert [(name, c.impl) for name, c in choices] == [("fold_microscales", "xla")]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    mapped = jax.jit(jax.shard_map(fold_microscales, mesh=mesh, in_specs=spec, out_specs=spec))
    np.testing.assert_array_equal(np.asarray(mapped(q).codes), np.asarray(expected.codes))


def decibels(actual, expected):
    """Returns the signal-to-noise ratio of each row."""
    return 10 * np.log10((expected**2).sum(1) / ((actual - expected) ** 2).sum(1))


def products(x, w, level1, afterwards=False):
    """Returns the folded product in bf16, and the two-level product in float64."""
    wq, two = fp8jax.quantize(w, "e4m3"), fp8jax.quantize(x, f"e4m3:mx32{level1}")
    actual = matmul(fold_microscales(two) if afterwards else fold(x, f"e4m3:mx32{level1}"), wq, dtype=jnp.bfloat16)
    expected = np.asarray(two.dequantize(), np.float64) @ np.asarray(wq.dequantize(), np.float64).T
    return np.asarray(actual, np.float64), expected


@pytest.mark.parametrize("level1", ["", "+token"])
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "channels"])
def test_the_worst_row_of_a_folded_product_is_right_to_50_decibels(level1, kind):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(64, 1024)) * 10.0 ** rng.uniform(-6, 6, (64, 1))
    if kind == "heavy tails":
        x *= rng.standard_t(3, x.shape)
    if kind == "channels":
        x *= np.where(rng.random(1024) < 0.01, 30, 1)
    x[:, 64:96] = 0  # padding: a group that must not affect the others' scale
    x, w = jnp.asarray(x, jnp.float32), jnp.asarray(rng.normal(size=(96, 1024)), jnp.float32)
    for afterwards in (False, True):
        assert decibels(*products(x, w, level1, afterwards)).min() > 50
    _, expected = products(x, w, level1)
    one_scale = matmul(fp8jax.quantize(x, "e4m3"), fp8jax.quantize(w, "e4m3"))
    assert decibels(np.asarray(one_scale, np.float64), expected).min() < 1


@pytest.mark.parametrize(
    ("e", "level1"),
    few([(e, level) for e in range(11) for level in ("", "+token")], *((e, ("", "+token")[e % 2]) for e in range(11))),
)
def test_groups_of_small_activations_keep_six_bits_of_their_product(level1, e):
    rng = np.random.default_rng(e)
    x, w = rng.uniform(-1, 1, (64, 256)), rng.normal(size=(96, 256))
    x[:, 0] = x[:, 32] = 1
    x[:, 32:] *= 2.0**-e
    w[:, :32] = 0
    for afterwards in (False, True):
        actual, expected = products(*(jnp.asarray(a, jnp.float32) for a in (x, w)), level1, afterwards)
        assert np.linalg.norm(actual - expected) <= 2.0**-6 * np.linalg.norm(expected)
