"""Tokens that all devices gather as codes, compared with a dense computation in float64 and codes of ml_dtypes."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import fp8jax
from fp8jax.dist import TokenGather, expert_collectives
from fp8jax.ops.autodiff.residuals import ArrayFacts, InputFacts
from fp8jax.ops.products import ragged_rows
from fp8jax.ops.products.token_rows import sum_rows
from tests.dist import programs

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

UNUSED = np.where(np.arange(DEVICES * TOKENS) % 2, np.nan, 1e30).astype(np.float32)[:, None]


def rounded(x, wire, chosen, fmt=ml_dtypes.float8_e4m3fn):
    """Returns what devices decode. A scale per tensor is that of the largest token with an expert."""
    if wire == "fp32":
        return x
    x = np.where(((chosen >= 0) & (chosen < EXPERTS)).any(1)[:, None], x, 0)
    amax = np.abs(x).max(-1, keepdims=True)
    if wire == "e4m3":
        amax = amax.max() * np.exp2(np.ceil(np.log2(np.where(amax > 0, amax, 1) / amax.max())))
    scale = np.where(amax > 0, amax, 1) * np.float32(1 / float(ml_dtypes.finfo(fmt).max))
    return (x * (1 / scale)).astype(fmt).astype(np.float32) * scale


def oracle(x, w, weights, dy, chosen, wire):
    """Returns results and gradients in float64, token by token and choice by choice."""
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
    """Returns the weighted sum of the products of a device's tokens with their experts' matrices."""
    gather = TokenGather.from_choices(chosen, EXPERTS, "expert", capacity=capacity)
    y = fp8jax.ragged_dot(gather.dispatch(x, wire), w, gather.group_sizes, recipe=recipe)
    return gather.combine(y * gather.dispatch_weights(weights)[:, None], wire), gather.overflow[None]


def mesh_of(devices, axis_type=AxisType.Auto):
    return jax.make_mesh((devices,), ("expert",), axis_types=(axis_type,), devices=jax.devices()[:devices])


def mapped(function, devices=DEVICES, axis_type=AxisType.Auto, check_vma=True):
    mesh = mesh_of(devices, axis_type)
    return jax.shard_map(function, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=check_vma)


def value_and_gradients(function, x, w, weights, chosen, dy):
    with jax.default_matmul_precision("highest"):
        y, vjp_fn, _ = jax.vjp(lambda *args: function(*args, chosen), x, w, weights, has_aux=True)
        return y, *vjp_fn(dy)


@pytest.mark.parametrize(
    ("wire", "devices", "axis_type", "check_vma"),
    [
        ("e4m3:token", 4, AxisType.Auto, True),
        ("e4m3", 2, AxisType.Explicit, True),
        ("e4m3", 4, AxisType.Auto, False),
        ("fp32", 4, AxisType.Auto, True),
    ],
)
def test_products_over_devices_are_those_of_rounded_tokens(wire, devices, axis_type, check_vma):
    """Small tokens keep their precision. NaN and huge tokens without experts affect no result or scale."""
    run = mapped(functools.partial(layer, wire=wire), devices, axis_type, check_vma)
    run = jax.jit(functools.partial(value_and_gradients, run))
    for chosen in CASES.values():
        unused = ~((chosen >= 0) & (chosen < EXPERTS)).any(1)[:, None]
        x, dy = SMALL * X, SMALL * DY
        arrays = np.where(unused, UNUSED, x), W, WEIGHTS, chosen, np.where(unused, UNUSED, dy)
        actual = jax.device_get(run(*jax.device_put(arrays, NamedSharding(mesh_of(devices, axis_type), P("expert")))))
        expected = oracle(np.where(unused, 0, x), W, WEIGHTS, np.where(unused, 0, dy), chosen, wire)
        for one, other in zip(actual, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
        for one, other in zip(actual[:2], expected[:2], strict=True):  # the small tokens
            np.testing.assert_allclose(one[3::6], other[3::6], rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("recipe", ["coat", "deepseek", "bf16"])
def test_codes_and_scales_are_all_that_is_gathered(recipe):
    """Tokens and gradients are sent as codes, sums in their own dtype. The plan counts the same bytes."""
    run = mapped(functools.partial(layer, wire=recipe))

    def both(x, w, dy):
        y, vjp_fn = jax.vjp(lambda x: run(x, w, WEIGHTS, CHOSEN.astype(np.int32))[0], x)
        return y, vjp_fn(dy)

    actual = programs.asked_for(both, X, W, DY)
    forward, backward = (
        expert_collectives(TOKENS, width, DEVICES, recipe, "fp32", kind="all-gather") for width in (INPUTS, OUTPUTS)
    )
    # Tokens have as many channels as inputs, their gradients' cotangents as many as outputs.
    count = len(forward) // 2
    planned = [*forward[:count], *backward[count:], forward[-1]]
    actual = [(kind.replace("_", "-"), dtype.replace("ui8", "u8"), nbytes) for kind, dtype, nbytes in actual]
    # Choices, their weights and the amax of tensors are sent too.
    small = [("all-gather", dtype, 4 * TOKENS * CHOICES) for dtype in ("i32", "f32")]
    assert sorted(one for one in actual if one[0] != "all-reduce") == sorted([*(one[:3] for one in planned), *small])
    assert all(nbytes == 4 for kind, _, nbytes in actual if kind == "all-reduce")


def test_products_read_the_codes_that_travelled(monkeypatch):
    """Nothing is quantized twice. Results and gradients are those of one device, which quantizes all tokens."""

    def products(x, w, weights, chosen):
        gather = TokenGather.from_choices(chosen, EXPERTS, "expert")
        rows, facts = gather.dispatch_with_facts(x, "coat")
        y = fp8jax.ragged_dot(rows, w, gather.group_sizes, recipe="coat", input_facts=InputFacts(facts))
        return gather.combine(y, "coat"), gather.overflow[None]

    def on_one_device(x, w, weights, chosen):
        order = np.argsort(chosen.reshape(-1), kind="stable")
        sizes, tokens = np.bincount(chosen.reshape(-1), minlength=EXPERTS), order // CHOICES
        rows = jnp.asarray(np.argsort(order).reshape(chosen.shape))
        facts = ArrayFacts(row_source=(jax.lax.stop_gradient(x), jnp.asarray(tokens)))
        y = fp8jax.ragged_dot(x[tokens], w, jnp.asarray(sizes), recipe="coat", input_facts=InputFacts(facts))
        return sum_rows(y, jnp.asarray(tokens), rows), 0

    chosen = np.stack([RNG.permutation(EXPERTS)[:CHOICES] for _ in X])
    arrays = SMALL * X, W, WEIGHTS, chosen, SMALL * DY
    expected = jax.jit(lambda x, w, weights, dy: value_and_gradients(on_one_device, x, w, weights, chosen, dy))(
        *arrays[:3], arrays[4]
    )
    monkeypatch.delattr(ragged_rows, "quantize_tokens")
    actual = jax.jit(functools.partial(value_and_gradients, mapped(products, 2)))(*arrays)
    for one, other in zip(
        actual, expected, strict=True
    ):  # XLA rounds sums differently in functions that are not inlined.
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6 * np.abs(other).max())


def test_rows_beyond_a_capacity_are_counted_and_make_results_nan():
    """On all devices. A capacity that the rows exactly fill is large enough."""
    needed = max(np.isin(CHOSEN, (2 * device, 2 * device + 1)).sum() for device in range(DEVICES))
    for capacity in (needed, needed - 1):
        run = mapped(functools.partial(layer, wire="fp32", capacity=capacity))
        with jax.default_matmul_precision("highest"):
            y, count = jax.jit(run)(X, W, WEIGHTS, CHOSEN)
        counts = [np.isin(CHOSEN, (2 * device, 2 * device + 1)).sum() for device in range(DEVICES)]
        overflow = sum(max(0, count - capacity) for count in counts)
        assert count.tolist() == [overflow] * DEVICES
        assert np.isnan(y).all() == np.isnan(y).any() == bool(overflow)
        if not overflow:
            np.testing.assert_allclose(y, oracle(X, W, WEIGHTS, DY, CHOSEN, "fp32")[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("error", "message", "ask"),
    [
        (ValueError, "4 devices along .* do not divide 6", lambda x, c: TokenGather.from_choices(c, 6, "expert")),
        (TypeError, "integer experts, got float32", lambda x, c: TokenGather.from_choices(c * 1.0, EXPERTS, "expert")),
        (ValueError, r"\(tokens, choices\)", lambda x, c: TokenGather.from_choices(c[0], EXPERTS, "expert")),
        (ValueError, "capacity must be", lambda x, c: TokenGather.from_choices(c, EXPERTS, "expert", capacity=0)),
        (ValueError, r"expects \(6, ", lambda x, c: TokenGather.from_choices(c, EXPERTS, "expert").dispatch(x[1:])),
        (ValueError, r"expects \(48, ", lambda x, c: TokenGather.from_choices(c, EXPERTS, "expert").combine(x)),
        (
            ValueError,
            r"expects \(6, 2\)",
            lambda x, c: TokenGather.from_choices(c, EXPERTS, "expert").dispatch_weights(x),
        ),
        (
            ValueError,
            "not a supported wire format",
            lambda x, c: TokenGather.from_choices(c, EXPERTS, "expert").dispatch(x, "de8"),
        ),
    ],
)
def test_what_cannot_be_gathered_is_refused(error, message, ask):
    with pytest.raises(error, match=message):
        jax.eval_shape(mapped(lambda x, chosen: (ask(x, chosen), x)[1]), X, CHOSEN)


def test_a_gather_outside_of_shard_map_is_refused():
    with pytest.raises(ValueError, match=r"inside jax\.shard_map"):
        TokenGather.from_choices(CHOSEN, EXPERTS, "expert")


def test_explain_counts_the_tokens_that_a_device_sends():
    run = mapped(lambda w, x, weights, chosen: layer(x, w, weights, chosen, wire="e4m3:token")[0])
    explained = fp8jax.transform(run, "coat").explain(W, X, WEIGHTS, CHOSEN)
    codes, sums = TOKENS * (INPUTS + 4), 4 * TOKENS * OUTPUTS
    assert f"sends {(DEVICES - 1) * (codes + sums) / 1024:.4g} KiB of tokens" in explained.exchange_note
