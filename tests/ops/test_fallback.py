"""Fallback quantization against float64 NumPy: values, non-finite blocks, rounding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.ops.matmul import matmul
from fp8jax.ops.quantization import fallback
from fp8jax.ops.quantization import quantize as op

SHAPES = [((256, 384), 128), ((70, 130), 32), ((200, 300), 128)]


def outliers(shape, seed=0):
    """Normal values; one in 500 is a hundred times as large."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.where(rng.uniform(size=shape) < 0.002, 100, 1)).astype(np.float32)


def tiles(x, side):
    """Returns the blocks of a matrix in float64, by position."""
    counts = [-(-n // side) for n in x.shape]
    return {
        (i, j): x[i * side : (i + 1) * side, j * side : (j + 1) * side].astype(np.float64)
        for i in range(counts[0])
        for j in range(counts[1])
    }


@pytest.mark.parametrize(("shape", "side"), SHAPES)
def test_blocks_that_fall_back_keep_the_residual_to_half_a_step_and_others_the_base(shape, side):
    x = outliers(shape)
    x[:side, :side] = 0
    pair, samples = fallback.quantize(x, f"int8:block{side}", 50.0)
    assert samples is None
    decoded, plain = np.asarray(pair.dequantize(), np.float64), np.asarray(pair.base.dequantize(), np.float64)
    used = np.asarray(pair.fallback_mask)
    assert 0 < used.mean() < 1
    for (i, j), block in tiles(x, side).items():
        at = np.s_[i * side : (i + 1) * side, j * side : (j + 1) * side]
        top = np.abs(block).max()
        assert used[i, j] == (top > 50)
        assert np.abs(plain[at] - block).max() <= 0.5001 * top / 127
        # The residual is at most half a step, and is quantized to half of 1/127 of its own largest.
        rest = np.abs(plain[at] - block).max()
        error = np.abs(decoded[at] - block).max()
        assert error <= (0.501 * rest / 127 + 2e-7 * top if used[i, j] else rest)


def test_what_is_not_finite_stays_visible_and_no_other_block_sees_it():
    x = outliers((64, 96))
    clean, _ = fallback.quantize(x, "int8:block32", 50.0)
    x[3, 3], x[40, 70] = np.inf, np.nan
    pair, _ = fallback.quantize(x, "int8:block32", 50.0)
    bad = np.zeros((2, 3), bool)
    bad[0, 0] = bad[1, 2] = True
    assert not np.asarray(pair.fallback_mask)[bad].any()
    is_nan = np.isnan(np.asarray(pair.dequantize()))
    np.testing.assert_array_equal(is_nan, np.kron(bad, np.ones((32, 32), bool)))
    np.testing.assert_array_equal(np.asarray(pair.dequantize())[~is_nan], np.asarray(clean.dequantize())[~is_nan])


def test_a_block_falls_back_above_the_threshold_alone_and_its_subnormals_are_zero():
    x = np.zeros((32, 96), np.float32)
    x[0, 0] = x[1, 40] = -8.0
    x[2, 70] = np.nextafter(np.float32(8), np.float32(9))
    x[3, 71] = 1e-40
    pair, _ = fallback.quantize(x, "int8:block32", 8.0)
    np.testing.assert_array_equal(pair.fallback_mask, [[False, False, True]])
    assert np.asarray(pair.dequantize())[3, 71] == 0
    subnormal, _ = fallback.quantize(np.full((32, 32), 1e-40, np.float32), "int8:block32", -1.0)
    np.testing.assert_array_equal(subnormal.fallback_mask, [[True]])
    np.testing.assert_array_equal(subnormal.dequantize(), np.zeros((32, 32)))


def test_residuals_of_blocks_that_do_not_fall_back_are_never_read():
    pair, _ = fallback.quantize(outliers((64, 96)), "int8:block32", 50.0)
    used = np.asarray(pair.fallback_mask)
    rest = pair.residual
    undefined = dataclasses.replace(
        rest,
        codes=jnp.where(np.kron(used, np.ones((32, 32), bool)), rest.codes, 77),
        scale=jnp.where(used, rest.scale, jnp.nan),
    )
    np.testing.assert_array_equal(pair._replace(residual=undefined).dequantize(), pair.dequantize())


def test_what_is_saved_is_unbiased_under_the_same_scales():
    x = outliers((32, 64))
    run = jax.jit(lambda key: fallback.quantize(x, "int8:block32", 1.0, key=key))
    pair, samples = run(jax.random.key(0))
    np.testing.assert_array_equal(samples.scale, pair.base.scale)
    mean = jnp.mean(jax.lax.map(lambda key: run(key)[1].dequantize(), jax.random.split(jax.random.key(1), 400)), 0)
    step = np.kron(np.asarray(pair.base.scale), np.ones((32, 32)))
    assert np.abs(np.asarray(mean) - x).max() < 5 * (step / 2 / 20).max()
    assert np.abs(np.asarray(samples.dequantize()) - np.asarray(pair.base.dequantize())).max() > 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"spec": "e4m3:block128"}, "an int8 spec with blocks"),
        ({"spec": "int8:block128+stochastic"}, "an int8 spec with blocks"),
        ({"impl": "mosaic"}, "unknown impl 'mosaic'"),
        ({"impl": "triton", "spec": "int8:block64"}, "cannot run"),
        ({"x": jnp.zeros((2, 3, 4))}, "expects a matrix"),
    ],
)
def test_errors_name_the_value(arguments, text):
    settings = {"x": jnp.zeros((4, 4)), "spec": "int8:block128", "threshold": 1.0} | arguments
    with pytest.raises(ValueError, match=text):
        fallback.quantize(settings.pop("x"), settings.pop("spec"), settings.pop("threshold"), **settings)


def test_where_no_kernel_runs_pairs_are_decoded_with_the_residuals_that_are_used():
    """In bf16, and in fp16 by rows, as on GPUs without a kernel. Unused residual codes contain garbage."""
    x, w = outliers((70, 100)), np.random.default_rng(2).standard_normal((40, 100)).astype(np.float32)
    pair, _ = fallback.quantize(x, "int8:block32", 3.5)
    used = np.asarray(pair.fallback_mask)
    assert 0 < used.mean() < 1
    junk = jnp.where(np.kron(used, np.ones((32, 32), bool))[:70, :100], pair.residual.codes, 127)
    pair = pair._replace(residual=dataclasses.replace(pair.residual, codes=junk.astype(jnp.int8)))
    right, _ = op.quantize(jnp.asarray(w), "int8:block32")

    def decoded(q):
        scale = np.kron(np.asarray(q.scale, np.float64), np.ones((32, 32)))[: q.shape[0], : q.shape[1]]
        return np.asarray(q.codes, np.float64) * scale

    falls = np.kron(used, np.ones((32, 32)))[:70, :100]
    left = decoded(pair.base) + falls * decoded(pair.residual)
    expected, size = left @ decoded(right).T, np.abs(left) @ np.abs(decoded(right)).T
    base = decoded(pair.base) @ decoded(right).T
    for multiply, bits in ((matmul._dot_decoded, 9), (matmul._dot_fp16, 12)):
        actual = np.asarray(multiply(jnp.float32, pair, right), np.float64)
        assert (np.abs(actual - expected) <= 2.1 * 2.0**-bits * size + 1e-6 * np.abs(expected).max()).all()
    # The last value distinguishes a residual from none.
    assert np.linalg.norm(actual - expected) < 0.1 * np.linalg.norm(base - expected)


def test_a_product_of_pairs_equals_float64():
    x, w = outliers((200, 300)), np.random.default_rng(2).standard_normal((140, 300)).astype(np.float32)
    pair, _ = fallback.quantize(x, "int8:block32", 20.0)
    right, _ = op.quantize(jnp.asarray(w), "int8:block32")
    y = np.asarray(jax.jit(matmul.matmul)(pair, right), np.float64)
    expected = np.asarray(pair.dequantize(), np.float64) @ np.asarray(right.dequantize(), np.float64).T
    assert np.linalg.norm(y - expected) < 1e-6 * np.linalg.norm(expected)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    plain = np.asarray(pair.base.dequantize(), np.float64) @ w.astype(np.float64).T
    assert np.linalg.norm(y - exact) < 0.6 * np.linalg.norm(plain - exact)
    with pytest.raises(ValueError, match=r"cannot run: it needs a|supports int8 in blocks of 128"):
        matmul.matmul(pair, right, impl="mosaic")
    other, _ = op.quantize(jnp.asarray(w), "int8:block128")
    with pytest.raises(ValueError, match="of the same spec"):
        matmul.matmul(pair, other)
