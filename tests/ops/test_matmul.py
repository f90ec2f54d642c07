"""Products of quantized matrices against products of what they decode to, in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.ops.matmul import matmul, transpose
from tests.programs import dots

FP8 = ["e4m3", "e5m2:token", "e4m3:group32", "e4m3:block32", "e4m3:mx32", "e4m3:mx32+token"]
INT8 = ["int8", "int8:token", "int8:group16", "int8:block32"]
OTHER = ["int10:group32", "de8:group32", "e4m3:group32+expand"]


def operands(m=37, n=45, k=100):
    rng = np.random.default_rng(0)
    a = rng.normal(size=(m, k)) * 10.0 ** rng.integers(-2, 3, (m, 1))
    return jnp.asarray(a, jnp.float32), jnp.asarray(rng.normal(size=(n, k)), jnp.float32)


@pytest.mark.parametrize(("left", "right"), [*itertools.product(FP8, FP8[::2]), *itertools.product(INT8, INT8[1::2])])
def test_codes_are_multiplied_exactly_and_scaled(left, right):
    a, b = operands()
    qa, qb = fp8jax.quantize(a, left), fp8jax.quantize(b, right)
    want = np.asarray(qa.dequantize(), np.float64) @ np.asarray(qb.dequantize(), np.float64).T
    size = np.abs(np.asarray(qa.dequantize(), np.float64)) @ np.abs(np.asarray(qb.dequantize(), np.float64)).T
    got = np.asarray(jax.jit(matmul)(qa, qb), np.float64)
    # Products of codes are exact in fp32; sums of 100 of them round at most that often.
    assert (np.abs(got - want) <= 100 * 2.0**-24 * size).all()


@pytest.mark.parametrize("spec", OTHER)
def test_other_codes_are_multiplied_as_bf16(spec):
    a, b = operands()
    qa, qb = fp8jax.quantize(a, spec), fp8jax.quantize(b, "e4m3")
    want = np.asarray(qa.dequantize(jnp.bfloat16), np.float64) @ np.asarray(qb.dequantize(jnp.bfloat16), np.float64).T
    np.testing.assert_allclose(np.asarray(matmul(qa, qb)), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("spec", ["e4m3", "e4m3:group32", "int8:block32"])
def test_operands_of_the_product_have_eight_bits(spec):
    a, b = operands()
    qa, qb = fp8jax.quantize(a, spec), fp8jax.quantize(b, spec)
    name = "int8" if spec.startswith("int8") else "float8_e4m3fn"
    assert set(dots(matmul, qa, qb)) == {(name, name)}


def test_transposed_codes_are_the_transposed_matrix():
    a, _ = operands()
    for spec in ("e4m3", "int8:block32"):
        q = fp8jax.quantize(a, spec)
        np.testing.assert_array_equal(np.asarray(transpose(q).dequantize()), np.asarray(q.dequantize()).T)
    with pytest.raises(ValueError, match="do not serve the transposed matrix"):
        transpose(fp8jax.quantize(a, "e4m3:group32"))


def test_wrong_operands_are_refused():
    a, b = operands()
    with pytest.raises(ValueError, match=r"matmul takes \(M, K\) and \(N, K\)"):
        matmul(a, b.T)
    with pytest.raises(ValueError, match="a scale for each index of the contraction"):
        matmul(fp8jax.quantize(a, "e4m3:channel"), fp8jax.quantize(b, "e4m3"))


def test_a_nan_in_an_operand_shows_in_its_row():
    a, b = operands()
    for spec in ("e4m3:token", "int8:token"):
        y = np.asarray(matmul(fp8jax.quantize(a.at[3, 5].set(jnp.nan), spec), fp8jax.quantize(b, spec)))
        assert np.isnan(y[3]).all()
        assert np.isfinite(np.delete(y, 3, 0)).all()
