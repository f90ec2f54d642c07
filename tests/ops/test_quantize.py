"""Quantization of a matrix and its transposed copy: what is chosen, what is refused."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.ops.quantization import quantize as op
from tests.programs import chosen

triton = pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed")


def matrix(shape=(100, 260)):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def equal(a, b):
    assert a.spec == b.spec
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


@pytest.mark.parametrize(
    ("rows", "columns"),
    [("e4m3", "e5m2"), ("e4m3:group128", "e4m3:group32"), (None, "e4m3:mx32"), ("int8:token", None), ("e4m3", "same"),
     ("int8:block32", "same")],
)  # fmt: skip
def test_both_are_the_quantizers(rows, columns):
    x = matrix()
    first, second = op.quantize(x, rows, columns)
    assert (first is None, second is None) == (rows is None, columns is None)
    if rows:
        equal(first, fp8jax.quantize(x, rows))
    if columns:
        equal(second, op.transpose(first) if columns == "same" else fp8jax.quantize(x.T, columns))


def test_two_stage_scales_and_given_ones():
    x = matrix()
    q, _ = op.quantize(x, "e4m3", strategy="two_stage")
    largest = np.abs(np.asarray(x)).max()
    assert largest <= float(q.scale[0, 0]) * 448 < largest * (1 + 2.0**-7)
    q, t = op.quantize(x, "e4m3", "e4m3:token", scale=jnp.float32(0.5))
    assert (np.asarray(q.scale) == 0.5).all()
    assert (np.asarray(t.scale) == 0.5).all()


def test_stochastic_rounding_needs_a_key_and_repeats():
    x = matrix()
    with pytest.raises(ValueError, match="pass a key"):
        op.quantize(x, "e4m3+stochastic")
    with pytest.raises(ValueError, match="take no key"):
        op.quantize(x, "e4m3", key=jax.random.key(0))
    first, second = op.quantize(x, "e4m3+stochastic", "e4m3+stochastic", key=jax.random.key(0))
    assert np.mean(np.asarray(second.codes) != np.asarray(first.codes).T) > 0.1
    again = op.quantize(x, "e4m3+stochastic", "e4m3+stochastic", key=jax.random.key(0))
    equal(again[0], first)
    equal(again[1], second)
    y = jnp.full((200, 300), 10.3).at[0, 0].set(127)  # between codes 10 and 11
    for i, codes in enumerate(op.quantize(y, "int8+stochastic", "same", key=jax.random.key(1))):
        assert set(np.unique(codes.codes)) == {10, 11, 127}, i
        assert abs(np.mean(np.asarray(codes.codes) == 11) - 0.3) < 5 * (0.21 / 60_000) ** 0.5


def test_xla_draws_no_bits_for_a_matrix_and_transposes_none_for_its_blocks():
    """Random bits would take longer than the product, and fp32 has four times the bytes of codes."""
    x = jnp.ones((64, 96))
    run = lambda key: op.quantize(x, None, "int8:block32+stochastic", key=key, impl="xla")  # noqa: E731
    text = str(jax.make_jaxpr(run)(jax.random.key(0)))
    assert "random_bits" not in text
    assert "threefry" not in text
    assert set(re.findall(r":(\w+)\[96,64\]", text)) == {"i8"}
    assert len(re.findall(r"= reduce_m\w+\[", text)) == 1  # one pass finds what is not finite, too


def test_what_does_not_suit_is_refused():
    x = matrix()
    with pytest.raises(ValueError, match="scales that can be transposed"):
        op.quantize(x, "e4m3:group128", "same")
    with pytest.raises(ValueError, match=r"a matrix, got shape \(26000,\)"):
        op.quantize(x.reshape(-1), "e4m3")
    with pytest.raises(ValueError, match="unknown impl 'mosaic'"):
        op.quantize(x, "e4m3", impl="mosaic")


@triton
@pytest.mark.parametrize(
    ("rows", "columns", "scale", "reason"),
    [("int10", None, None, "plain FP8 and int8"), ("e4m3:group128+expand", None, None, "plain FP8 and int8"),
     ("int8", "e4m3", None, "floating and integer"), ("int8", None, 1.0, "given scales"),
     ("e4m3:group48", None, None, "a group of 48"), (None, "e4m3:block256", None, "a block of 256"),
     ("e4m3:channel", None, None, "along the last axis"), ("e4m3:group128", None, 1.0, "given scales")],
)  # fmt: skip
def test_auto_falls_back_with_a_reason_and_the_explicit_kernel_raises_it(rows, columns, scale, reason):
    x, scale = matrix(), None if scale is None else jnp.float32(scale)
    choice = chosen(lambda x: op.quantize(x, rows, columns, scale=scale), x, capability=90)
    assert choice.impl == "xla"
    assert reason in choice.reason
    with pytest.raises(ValueError, match=reason):
        op.quantize(x, rows, columns, scale=scale, impl="triton")


@triton
def test_what_is_chosen_is_told():
    x = matrix()
    quantize = functools.partial(op.quantize, rows="e4m3", columns="same")
    assert chosen(quantize, x, capability=90).impl == "triton"
    assert "CUDA" in chosen(quantize, x).reason
    spread = jax.device_put(matrix((8, 256)), jax.NamedSharding(jax.make_mesh((8,), ("x",)), jax.P("x")))
    assert chosen(quantize, spread, capability=90).impl == "triton"


@triton
def test_an_explicit_kernel_does_not_run_on_cpu():
    with pytest.raises((NotImplementedError, ValueError), match="platform"):
        jax.jit(lambda x: op.quantize(x, "e4m3", impl="triton"))(matrix())


def test_the_program_on_cpu_has_no_kernel():
    text = str(jax.make_jaxpr(lambda x: op.quantize(x, "e4m3", "same"))(matrix()))
    assert "triton" not in text
    assert "platform" not in text
