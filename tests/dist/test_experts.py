"""Tokens that are sent to the devices of their experts as codes, compared with float64 and codes of ml_dtypes."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType

import fp8jax
from fp8jax.dist import TokenExchange, expert_collectives
from tests.dist import programs
from tests.distance import relative

ROWS, INPUTS, OUTPUTS, EXPERTS = 12, 32, 16, 8
RNG = np.random.default_rng(0)
# Rows of each of four devices for each of eight experts. Some experts are empty, and some rows are in no group.
UNEVEN = np.array(
    [[3, 0, 1, 0, 5, 0, 0, 2], [0, 0, 0, 0, 0, 12, 0, 0], [1, 1, 2, 1, 1, 2, 0, 1], [0, 0, 4, 0, 0, 0, 0, 3]]
)
ALL_IN_ONE = np.array([[0, 0, 12, 0, 0, 0, 0, 0]] * 4)
NONE = np.zeros((4, 8), int)
SIZES = {"uneven": UNEVEN, "all in one": ALL_IN_ONE, "none": NONE}
X = RNG.normal(size=(4, ROWS, INPUTS)).astype(np.float32) * np.exp(2 * RNG.normal(size=(4, ROWS, 1))).astype(np.float32)
W = RNG.normal(size=(EXPERTS, INPUTS, OUTPUTS)).astype(np.float32)
DY = RNG.normal(size=(4, ROWS, OUTPUTS)).astype(np.float32)


def rounded(x, wire, sizes, fmt=ml_dtypes.float8_e4m3fn):
    """Returns what an expert's device decodes, with scales per row, expert (over all devices) or 32 channels."""
    if wire == "fp32":
        return x
    if wire == "mxfp8":
        groups = x.reshape(*x.shape[:-1], -1, min(32, x.shape[-1]))
        amax = np.abs(groups).max(-1, keepdims=True)
        scale = np.exp2(np.ceil(np.log2(np.where(amax > 0, amax, 1) / float(ml_dtypes.finfo(fmt).max))))
        return ((groups / scale).astype(fmt).astype(np.float32) * scale).reshape(x.shape)
    amax = np.abs(x).max(-1, keepdims=True)
    if wire == "e4m3":
        experts = experts_of(sizes)
        for i in range(EXPERTS):
            amax[experts == i] = amax[experts == i].max(initial=0)
    scale = np.where(amax > 0, amax, 1) * np.float32(1 / float(ml_dtypes.finfo(fmt).max))
    return (x * (1 / scale)).astype(fmt).astype(np.float32) * scale


def experts_of(sizes):
    """Returns the expert of each row, (devices, rows); the number of experts for a row in no group."""
    ends = np.cumsum(sizes, 1)
    return (np.arange(ROWS)[None, :, None] >= ends[:, None]).sum(-1)


def oracle(x, w, dy, sizes, wire):
    """Returns results and gradients in float64, row by row."""
    x, dy, w = (a.astype(np.float64) for a in (rounded(x, wire, sizes), rounded(dy, wire, sizes), w))
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    for (device, row), expert in np.ndenumerate(experts_of(sizes)):
        if expert < EXPERTS:
            y[device, row] = x[device, row] @ w[expert]
            dx[device, row] = w[expert] @ dy[device, row]
            dw[expert] += np.outer(x[device, row], dy[device, row])
    return y, dx, dw


def layer(x, w, sizes, *, wire, capacity=None):
    """Multiplies a device's rows with the experts of all devices. Arrays of one device have a leading axis of 1."""
    exchange = TokenExchange.from_sizes(sizes[0], "expert", x.shape[1], capacity=capacity)
    y = fp8jax.ragged_dot(exchange.dispatch(x[0], wire), w, exchange.group_sizes, recipe="bf16")
    return exchange.combine(y, wire)[None], exchange.overflow[None]


def mapped(function, devices=4, check_vma=True):
    mesh = jax.make_mesh((devices,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    return jax.shard_map(function, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=check_vma)


@functools.cache
def value_and_gradients(wire, check_vma=True):
    run = mapped(functools.partial(layer, wire=wire), check_vma=check_vma)

    def both(x, w, sizes, dy):
        with jax.default_matmul_precision("highest"):
            y, vjp_fn, _ = jax.vjp(jax.checkpoint(lambda x, w: run(x, w, sizes)), x, w, has_aux=True)
            return y, *vjp_fn(dy)

    return jax.jit(both)


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("wire", ["e4m3:token", "e4m3", "mxfp8", "fp32"])
def test_products_over_devices_are_those_of_rounded_rows(wire, case):
    """Rows in no group are NaN. They affect no result, gradient or scale."""
    sizes = SIZES[case]
    unused = experts_of(sizes) == EXPERTS
    x, dy = np.where(unused[..., None], np.nan, X), np.where(unused[..., None], np.nan, DY)
    actual = value_and_gradients(wire)(x, W, sizes, dy)
    for result, expected in zip(
        actual,
        oracle(np.where(unused[..., None], 0, X), W, np.where(unused[..., None], 0, DY), sizes, wire),
        strict=True,
    ):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)


def test_gradients_of_results_travel_in_the_format_of_gradients():
    """Gradients of "te_current" are e5m2 with one scale per expert; its tokens are e4m3."""
    combine = lambda y, sizes: TokenExchange.from_sizes(sizes[0], "expert", ROWS).combine(y[0], "te_current")[None]  # noqa: E731
    y = jnp.zeros((4, 4 * ROWS, OUTPUTS))
    _, vjp_fn = jax.vjp(lambda y: mapped(combine)(y, UNEVEN), y)
    (actual,) = jax.jit(vjp_fn)(DY)
    sent = rounded(np.where(experts_of(UNEVEN)[..., None] < EXPERTS, DY, 0), "e4m3", UNEVEN, ml_dtypes.float8_e5m2)
    for device in range(4):  # the rows of two experts, those of the first device first
        experts = experts_of(UNEVEN)
        expected = np.concatenate([sent[experts == expert] for expert in (2 * device, 2 * device + 1)])
        np.testing.assert_allclose(actual[device, : len(expected)], expected, rtol=1e-6)


def emulated_ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all` as its documentation defines it, for 2-D arrays; zeros if sizes disagree."""
    tables = operand, input_offsets, send_sizes, output_offsets
    operands, input_starts, sizes, output_starts = (jax.lax.all_gather(x, axis_name) for x in tables)
    row, local = jnp.arange(len(output)), send_sizes.size // len(operands)
    mine = jax.lax.axis_index(axis_name) * local + jnp.arange(local)
    for device in range(len(operands)):
        for k in range(local):
            offset = row - output_starts[device, mine[k]]
            is_inside = (offset >= 0) & (offset < sizes[device, mine[k]])
            output = jnp.where(
                is_inside[:, None], operands[device][(input_starts[device, mine[k]] + offset) % len(operand)], output
            )
    agree = jnp.all(recv_sizes == sizes[:, mine].reshape(-1))
    return jnp.where(agree, output, jnp.zeros_like(output))


@pytest.mark.parametrize("case", ["uneven", "all in one"])
def test_ragged_collectives_get_the_offsets_and_sizes_of_their_rows(case, monkeypatch):
    """Both directions are compared with the padded form that XLA runs on CPUs."""
    padded = value_and_gradients("e4m3:token")(X, W, SIZES[case], DY)
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    value_and_gradients.cache_clear()
    ragged = value_and_gradients("e4m3:token", check_vma=False)(X, W, SIZES[case], DY)
    value_and_gradients.cache_clear()
    for actual, expected in zip(ragged, padded, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("wire", "widths"),
    # The size of a message of codes and scales is a multiple of 8 bytes.
    [("e4m3:token", (INPUTS + 8, OUTPUTS + 8)), ("e4m3:group8", (INPUTS + 16, OUTPUTS + 8)), ("fp32", (128, 64))]
    + [(recipe, (INPUTS + 8, OUTPUTS + 8)) for recipe in ("deepseek", "coat", "moss", "mxfp8")]
    + [("nvfp4", (4 * INPUTS, 4 * OUTPUTS))],
)
def test_codes_and_scales_are_all_that_travels_to_experts(wire, widths):
    """Tokens and gradients are sent as codes, results in their own dtype. The plan counts the same bytes."""

    def both(x, w, sizes, dy):
        run = mapped(functools.partial(layer, wire=wire))
        y, vjp_fn = jax.vjp(lambda x: run(x, w, sizes)[0], x)
        return y, vjp_fn(dy)

    operands = X, W, UNEVEN.astype(np.int32), DY
    text = jax.jit(both).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.all_to_all" not in text
    sent = re.findall(r"custom_call @ragged_all_to_all.*? : \(tensor<(\d+)x(\d+)x(\w+)>", text)
    actual = sorted((dtype, int(rows), int(width) * (1 if dtype == "ui8" else 4)) for rows, width, dtype in sent)
    dtype = "f32" if wire in ("fp32", "nvfp4") else "ui8"
    # Results have as many rows as can be received; only the used rows are sent.
    returned = [("f32", 4 * ROWS, 4 * INPUTS), ("f32", 4 * ROWS, 4 * OUTPUTS)]
    assert actual == sorted([(dtype, ROWS, width) for width in widths] + returned)
    # XLA on CPUs exchanges the same number of rows between each pair of devices.
    on_cpu = [request[1:] for request in programs.asked_for(both, *operands) if request[0] == "all_to_all"]
    assert sorted(on_cpu) == sorted((dtype, 4 * ROWS * width) for dtype, _, width in actual)
    forward, backward = (expert_collectives(ROWS, width, 4, wire, "fp32") for width in (INPUTS, OUTPUTS))
    assert [forward[0].nbytes, backward[1].nbytes] == [ROWS * width for width in widths]
    assert [x[-1].sent_bytes for x in (forward, backward)] == [2 * ROWS * 4 * w * 3 / 4 for w in (INPUTS, OUTPUTS)]


def test_rows_beyond_a_capacity_are_counted_and_make_results_nan():
    """On all devices. A capacity that the rows exactly fill is large enough."""
    received = UNEVEN.reshape(4, 4, 2).sum((0, 2))
    for capacity in (received.max(), received.max() - 1, 4):
        run = mapped(functools.partial(layer, wire="fp32", capacity=capacity))
        with jax.default_matmul_precision("highest"):
            y, count = jax.jit(run)(X, W, UNEVEN)
        overflow = np.maximum(received - capacity, 0).sum()
        assert count.tolist() == [overflow] * 4
        assert np.isnan(y).all() == np.isnan(y).any() == bool(overflow)
        if not overflow:
            np.testing.assert_allclose(y, oracle(X, W, DY, UNEVEN, "fp32")[0], rtol=1e-4, atol=1e-4)


def test_experts_are_shared_beside_fsdp_and_tensor_axes():
    """An MLP on 2 x 2 devices equals JAX's own products of all experts on one device.

    The devices along "tensor" have the same rows, and split hidden channels.
    """
    mesh = jax.make_mesh((2, 2, 2), ("expert", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    down, scores = RNG.normal(size=(EXPERTS, OUTPUTS, INPUTS)), RNG.normal(size=(4, ROWS, 1))
    weights = tuple(a.astype(np.float32) for a in (W, down, scores))

    def mlp(x, up, down, scores, sizes):
        exchange = TokenExchange.from_sizes(sizes[0], "expert", ROWS)
        up = jax.lax.all_gather(up, "fsdp", axis=1, tiled=True)
        down = jax.lax.all_gather(down, "fsdp", axis=2, tiled=True)
        rows, scores = exchange.dispatch(x[0], "fp32"), exchange.dispatch(scores[0], "fp32")
        multiply = functools.partial(fp8jax.ragged_dot, group_sizes=exchange.group_sizes, recipe="bf16")
        y = multiply(scores * jnp.tanh(multiply(rows, up)), down)
        return jax.lax.psum(exchange.combine(y, "fp32"), "tensor")[None]

    rows = P(("fsdp", "expert"))
    ins = rows, P("expert", "fsdp", "tensor"), P("expert", "tensor", "fsdp"), rows, rows
    over_devices = jax.shard_map(mlp, mesh=mesh, in_specs=ins, out_specs=rows)

    def on_one_device(x, up, down, scores, sizes):
        chosen = jax.nn.one_hot(experts_of(sizes), EXPERTS)
        return jnp.einsum(
            "drf,drn,nfm->drm", scores * jnp.tanh(jnp.einsum("drm,drn,nmf->drf", x, chosen, up)), chosen, down
        )

    def run(function, *args):
        return jnp.sum(function(*args, UNEVEN) * X / 9), function(*args, UNEVEN)

    with jax.default_matmul_precision("highest"):
        actual = [
            jax.jit(jax.value_and_grad(functools.partial(run, function), argnums=(0, 1, 2, 3), has_aux=True))(
                X, *weights
            )
            for function in (over_devices, on_one_device)
        ]
    for result, expected in zip(*map(jax.tree.leaves, actual), strict=True):
        assert relative(result, expected) < 1e-5


@pytest.mark.parametrize(
    ("error", "message", "ask"),
    [
        (ValueError, "4 devices along .* do not divide", lambda x, s: TokenExchange.from_sizes(s[:7], "expert", ROWS)),
        (TypeError, "integer group_sizes, got float32", lambda x, s: TokenExchange.from_sizes(s * 1.0, "expert", ROWS)),
        (ValueError, "capacity must be", lambda x, s: TokenExchange.from_sizes(s, "expert", ROWS, capacity=0)),
        (ValueError, r"expects \(12, ", lambda x, s: TokenExchange.from_sizes(s, "expert", ROWS).dispatch(x[1:])),
        (ValueError, r"expects \(48, ", lambda x, s: TokenExchange.from_sizes(s, "expert", ROWS).combine(x)),
        (
            ValueError,
            "is not a supported wire format",
            lambda x, s: TokenExchange.from_sizes(s, "expert", ROWS).dispatch(x, "de8"),
        ),
        (ValueError, "'bf16'", lambda x, s: TokenExchange.from_sizes(s, "expert", ROWS).dispatch(x, "te_delayed")),
    ],
)
def test_what_cannot_be_exchanged_is_refused(error, message, ask):
    with pytest.raises(error, match=message):
        jax.eval_shape(mapped(lambda x, sizes: (ask(x[0], sizes[0]), x)[1]), X, UNEVEN)


def test_an_exchange_outside_of_shard_map_is_refused():
    with pytest.raises(ValueError, match=r"inside jax\.shard_map"):
        TokenExchange.from_sizes(UNEVEN[0], "expert", ROWS)


def test_explain_counts_the_rows_that_a_device_sends():
    def run(w, x, sizes):
        exchange = TokenExchange.from_sizes(sizes[0], "expert", ROWS)
        y = jax.lax.ragged_dot(exchange.dispatch(x[0], "e4m3:token"), w, exchange.group_sizes)
        return exchange.combine(y, "e4m3:token")[None]

    explained = fp8jax.transform(mapped(run), "coat").explain(W, X, UNEVEN)
    sent = 3 / 4 * ROWS * (INPUTS + 8 + 4 * OUTPUTS)  # codes with a scale per row, then results in fp32
    assert f"sends {sent:.4g} B of tokens" in explained.exchange_note
    assert explained.exchange_note[:20] in str(explained)
    assert not fp8jax.transform(lambda w, x: x @ w, "coat").explain(W[0], X[0]).exchange_note
