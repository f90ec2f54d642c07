"""Tokens that all devices gather as codes, against float64 of a dense computation and codes of ml_dtypes."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType

import fp8jax
from fp8jax.dist import TokenGather, expert_collectives
from tests.dist import programs
from tests.distance import relative

DEVICES, TOKENS, CHOICES, INPUTS, OUTPUTS, EXPERTS = 4, 6, 2, 32, 48, 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(DEVICES * TOKENS, INPUTS)).astype(np.float32)
W = RNG.normal(size=(EXPERTS, INPUTS, OUTPUTS)).astype(np.float32)
DY = RNG.normal(size=(DEVICES * TOKENS, OUTPUTS)).astype(np.float32)
WEIGHTS = RNG.uniform(size=(DEVICES * TOKENS, CHOICES)).astype(np.float32)
# The third device has no token, experts 1 and 7 have none, and the last four tokens have one expert or none.
CHOSEN = RNG.permuted(np.tile([0, 2, 3, 6], (DEVICES * TOKENS, 1)), axis=1)[:, :CHOICES]
CHOSEN[-4:, 1], CHOSEN[-2:, 0] = EXPERTS, -1
CASES = {"uneven": CHOSEN, "all in one": np.array([[5, EXPERTS]] * (DEVICES * TOKENS))}
# Tokens 3, 9, ... and their gradients are 1e-5 of the others.
SMALL = np.where(np.arange(DEVICES * TOKENS) % 6 == 3, 1e-5, 1.0).astype(np.float32)[:, None]


def rounded(x, wire, chosen, fmt=ml_dtypes.float8_e4m3fn):
    """What devices decode. A scale per tensor is that of the largest token with an expert, times powers of two."""
    if wire == "fp32":
        return x
    x = np.where(((chosen >= 0) & (chosen < EXPERTS)).any(1)[:, None], x, 0)
    amax = np.abs(x).max(-1, keepdims=True)
    if wire == "e4m3":
        amax = amax.max() * np.exp2(np.ceil(np.log2(np.where(amax > 0, amax, 1) / amax.max())))
    scale = np.where(amax > 0, amax, 1) * np.float32(1 / float(ml_dtypes.finfo(fmt).max))
    return (x * (1 / scale)).astype(fmt).astype(np.float32) * scale


def oracle(x, w, weights, dy, chosen, wire):
    """Results and gradients in float64, a token and a choice at a time."""
    x, dy, w = (a.astype(np.float64) for a in (rounded(x, wire, chosen), rounded(dy, wire, chosen), w))
    y, dx, dw, dweights = (np.zeros(a.shape) for a in (dy, x, w, weights))
    for (token, choice), expert in np.ndenumerate(chosen):
        if 0 <= expert < EXPERTS:
            weight = weights[token, choice]
            y[token] += weight * x[token] @ w[expert]
            dx[token] += weight * w[expert] @ dy[token]
            dw[expert] += weight * np.outer(x[token], dy[token])
            dweights[token, choice] = dy[token] @ (x[token] @ w[expert])
    return y, dx, dw, dweights


def layer(x, w, weights, chosen, *, wire, capacity=None, recipe="bf16"):
    """The weighted sum of the products of a device's tokens with their experts' matrices."""
    gather = TokenGather.from_choices(chosen, EXPERTS, "expert", capacity=capacity)
    y = fp8jax.ragged_dot(gather.dispatch(x, wire), w, gather.group_sizes, recipe=recipe)
    return gather.combine(y * gather.dispatch_weights(weights)[:, None], wire), gather.overflow[None]


def mapped(function, devices=DEVICES, axis_type=AxisType.Auto, check_vma=True):
    mesh = jax.make_mesh((devices,), ("expert",), axis_types=(axis_type,), devices=jax.devices()[:devices])
    return jax.shard_map(function, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=check_vma)


def value_and_gradients(function, x, w, weights, chosen, dy):
    with jax.default_matmul_precision("highest"):
        y, back, _ = jax.vjp(lambda *args: function(*args, chosen), x, w, weights, has_aux=True)
        return y, *back(dy)


@pytest.mark.parametrize(
    ("wire", "devices", "check_vma"), [("e4m3:token", 4, True), ("e4m3", 2, True), ("e4m3", 4, False), ("fp32", 4, True)]
)
def test_products_over_devices_are_those_of_rounded_tokens(wire, devices, check_vma):
    """Small tokens keep their digits. Tokens without experts are NaN, and stay out of results, gradients and scales."""
    run = mapped(functools.partial(layer, wire=wire), devices, check_vma=check_vma)
    run = jax.jit(functools.partial(value_and_gradients, run))
    for chosen in CASES.values():
        unused = ~((chosen >= 0) & (chosen < EXPERTS)).any(1)[:, None]
        x, dy = SMALL * X, SMALL * DY
        got = run(np.where(unused, np.nan, x), W, WEIGHTS, chosen, np.where(unused, np.nan, dy))
        want = oracle(np.where(unused, 0, x), W, WEIGHTS, np.where(unused, 0, dy), chosen, wire)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
        for one, other in zip(got[:2], want[:2], strict=True):  # the small tokens
            np.testing.assert_allclose(one[3::6], other[3::6], rtol=1e-3, atol=1e-8)
