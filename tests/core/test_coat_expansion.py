"""COAT's range expansion (section 4.2), `expand="coat"`, against the paper's formula in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import fp8jax
from fp8jax import QuantSpec
from fp8jax.core.qtensor import quantize_stochastic

DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
# The paper's section 3: R = largest over smallest code.
RANGES = {"e4m3": 448 / 2.0**-9, "e5m2": 57344 / 2.0**-16}


def exponents(x, name):
    """Returns k = log_R_X(R) of each row, in float64."""
    size = np.abs(np.asarray(x, np.float64))
    smallest = np.where(size > 0, size, np.inf).min(-1)
    return np.log(RANGES[name]) / np.log(size.max(-1) / smallest)


def groups(seed=0, rows=24):
    """Returns rows of 128 values that span some octaves, all with exponents within [1/16, 16]."""
    rng = np.random.default_rng(seed)
    octaves = np.linspace(3, 40, rows)[:, None]
    sign = rng.choice([-1, 1], (rows, 128))
    return jnp.asarray(sign * 2.0 ** (-octaves * rng.uniform(size=(rows, 128))), jnp.float32)


@pytest.mark.parametrize("name", DTYPES)
def test_codes_and_exponents_are_the_papers(name):
    x = groups()
    q = fp8jax.quantize(x, f"{name}:group128+coat")
    q.validate()
    expected = exponents(x, name)
    actual = np.asarray(q.expansion, np.float64)[:, 0]
    np.testing.assert_allclose(actual, expected, rtol=2.0**-8)  # bf16 has 8 bits
    # Q(f(x)) with the stored k. At a tie, fp32 may round to the neighbour.
    top = float(ml_dtypes.finfo(DTYPES[name]).max)
    size = np.abs(np.asarray(x, np.float64))
    y = top * (size / size.max(-1, keepdims=True)) ** actual[:, None]
    codes = np.abs(np.asarray(q.codes).astype(np.float64))
    rounded = y.astype(np.float32).astype(DTYPES[name]).astype(np.float64)
    assert np.mean(codes == rounded) > 0.99
    np.testing.assert_array_equal(np.sign(np.asarray(q.codes).astype(np.float32)), np.sign(x))
    # The smallest reaches the smallest code: within bf16's error of k, 2^-9 of R's octaves.
    smallest = y.min(-1) / float(ml_dtypes.finfo(DTYPES[name]).smallest_subnormal)
    assert (np.abs(np.log2(smallest)) <= np.log2(RANGES[name]) * 2.0**-8).all()


def test_every_step_takes_a_new_exponent_where_ours_keeps_it():
    spec = {expand: QuantSpec("e4m3", "group", 128, expand=expand, flush_to_zero=False) for expand in (True, "coat")}
    x = jnp.abs(groups(rows=8))
    wider = x * jnp.where(jnp.arange(128) == 0, 1.02, 1.0) ** 2
    wider = wider.at[:, 1].set(x.max(-1) * 1.05)
    words = jnp.asarray([1, 2], jnp.uint32)
    for expand, keeps_exponent in ((True, True), ("coat", False)):
        first = quantize_stochastic(x, fp8jax.quantize(x, spec[expand]), words)
        second = quantize_stochastic(wider, first, words)
        same = np.asarray(first.expansion == second.expansion)[:, 0]
        assert same[:4].all() == keeps_exponent, expand
        if expand == "coat":
            np.testing.assert_allclose(
                np.asarray(second.expansion, np.float64)[:, 0], exponents(wider, "e4m3"), rtol=2.0**-8
            )


@pytest.mark.parametrize("b2", [0.95, 0.999])
@pytest.mark.parametrize("form", ["adamw", "compress_state"])
def test_both_moments_of_an_optimizer_have_the_papers_exponents_at_each_step(form, b2):
    if form == "adamw":
        tx = fp8jax.compressed_adamw(1e-3, b2=b2, expand="coat", nu_rounding="nearest", min_size=1)
    else:
        tx = fp8jax.compress_state(optax.adamw(1e-3, b2=b2), expand="coat", min_size=1)
    params = {"w": jnp.ones((4, 128))}
    state = tx.init(params)
    update = jax.jit(tx.update)
    rng = np.random.default_rng(1)

    def moments(state):
        is_q = lambda x: isinstance(x, fp8jax.QTensor)  # noqa: E731
        return [x for x in jax.tree.leaves(state, is_leaf=is_q) if is_q(x)]

    for _ in range(3):
        g = rng.normal(size=(4, 128)) * np.exp(rng.normal(size=(4, 128)))
        m, v = (np.asarray(x.dequantize(), np.float64) for x in moments(state))
        m, v = 0.9 * m + 0.1 * g, b2 * v + (1 - b2) * g**2
        _, state = update({"w": jnp.asarray(g, jnp.float32)}, state, params)
        for actual, x in zip(moments(state), (m, v), strict=True):
            assert actual.spec.expand == "coat"
            np.testing.assert_allclose(
                np.asarray(actual.expansion, np.float64)[:, 0], exponents(x, "e4m3"), rtol=2.0**-7
            )


def test_strings_and_errors():
    spec = QuantSpec.parse("e4m3:group128+coat")
    assert spec.expand == "coat"
    assert str(spec) == "e4m3:group128+coat"
    assert spec.bytes_per_element == QuantSpec.parse("e4m3:group128+expand").bytes_per_element
    with pytest.raises(ValueError, match="options are"):
        QuantSpec.parse("e4m3:group128+expand+coat")
    for make in (
        lambda: QuantSpec("e4m3", "group", 128, expand="paper"),
        lambda: fp8jax.compressed_adamw(1e-3, expand="paper"),
        lambda: fp8jax.compressed_adamw(1e-3, mu="fp32", nu="fp32", expand="paper"),
        lambda: fp8jax.compress_state(optax.adam(1e-3), expand="paper"),
    ):
        with pytest.raises(ValueError, match="unknown expand 'paper'"):
            make()


def test_a_state_has_one_storage_key_and_is_converted_not_reinterpreted():
    params = {"w": jnp.ones((4, 128))}
    ours, papers = (fp8jax.compressed_adamw(1e-3, expand=how, min_size=1) for how in (True, "coat"))
    state = ours.init(params)
    _, state = ours.update({"w": groups(rows=4)}, state, params)
    with pytest.raises(ValueError, match="convert_state"):
        papers.update({"w": groups(rows=4)}, state, params)
    assert papers.init(params).mu["w"].storage_key == state.mu["w"].storage_key
    # Codes and scales of another checkpoint decode in the same way.
    target = jax.tree.structure(papers.init(params))
    restored = jax.tree.unflatten(target, jax.tree.leaves(state))
    np.testing.assert_array_equal(restored.nu["w"].dequantize(), state.nu["w"].dequantize())
    converted = fp8jax.convert_state(state, papers, params)
    # Codes are used unchanged, not rounded again.
    np.testing.assert_array_equal(converted.mu["w"].dequantize(), state.mu["w"].dequantize())
    assert converted.mu["w"].spec.expand == "coat"
    papers.update({"w": groups(rows=4)}, converted, params)


def test_the_kernel_refuses_it_with_a_reason():
    params = {"w": jnp.ones((4, 128))}
    tx = fp8jax.compressed_adamw(1e-3, expand="coat", min_size=1, impl="triton")
    with pytest.raises(ValueError, match="expand='coat'"):
        tx.update({"w": groups(rows=4)}, tx.init(params), params)
