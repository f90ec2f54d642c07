"""Frozen weights and adapters: matmuls and gradients against float64, residuals, merging, and errors."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.core.qtensor import from_bytes
from tests.distance import order, relative
from tests.ops.test_linear import KEY, expected_error
from tests.programs import dots, outputs, residuals
from tests.rows import few

TOKENS, INPUTS, OUTPUTS, RANK, ALPHA = 48, 256, 160, 8, 16.0
KEYS = jax.random.split(jax.random.key(3), 5)
X = jax.random.normal(KEYS[0], (2, TOKENS // 2, INPUTS))
W = 0.05 * jax.random.normal(KEYS[1], (INPUTS, OUTPUTS))
DY = jax.random.normal(KEYS[2], (2, TOKENS // 2, OUTPUTS))
ADAPTER = fp8jax.lora.Adapter(
    0.1 * jax.random.normal(KEYS[3], (INPUTS, RANK)), 0.1 * jax.random.normal(KEYS[4], (RANK, OUTPUTS)), ALPHA
)
# Storage of the weight, the recipe, and the dtypes of the operands of both products.
CASES = {
    ("e4m3", "te_current"): ("float8_e4m3fn", "float8_e5m2"),
    ("e4m3:block128", "deepseek"): ("float8_e4m3fn", "float8_e4m3fn"),
    ("e4m3:token", "te_current"): ("float8_e4m3fn", "float8_e5m2"),
    ("e4m3:group128", "fast"): ("float8_e4m3fn", "float32"),
    ("e4m3", "fast"): ("float8_e4m3fn", "float8_e4m3fn"),
    ("int8", "switchback"): ("int8", "int8"),
    ("e4m3:group128", "bf16"): ("float32", "float32"),
    ("int8:block128", "int8_block"): ("int8", "int8"),
}
case = pytest.mark.parametrize(("spec", "recipe"), CASES, ids="-".join)


def float64(w, x=X, dy=DY, adapter=ADAPTER):
    """Returns the result, and the gradients of input and adapter, for the decoded weight."""
    w, a, b = (np.asarray(v, np.float64) for v in (w, adapter.a, adapter.b))
    x, dy = (np.asarray(v, np.float64).reshape(-1, v.shape[-1]) for v in (x, dy))
    scale = ALPHA / RANK
    y, dx = x @ w + scale * x @ a @ b, dy @ w.T + scale * dy @ b.T @ a.T
    return y, dx, scale * x.T @ (dy @ b.T), scale * (x @ a).T @ dy


def ours(w, recipe, adapter=ADAPTER, x=X, dy=DY):
    y, vjp_fn = jax.vjp(lambda x, a: fp8jax.lora.linear(x, w, a, recipe=recipe, key=KEY), x, adapter)
    dx, d = vjp_fn(dy)
    return y.reshape(-1, y.shape[-1]), dx.reshape(-1, dx.shape[-1]), d.a, d.b


@pytest.mark.parametrize(
    ("spec", "recipe"),
    few(
        CASES,
        ("e4m3:block128", "deepseek"),
        ("int8:block128", "int8_block"),
    ),
    ids="-".join,
)
def test_results_and_gradients_are_float64_s_within_the_recipe_s_error(spec, recipe):
    w, linear = fp8jax.freeze(W, spec), fp8jax.recipes.get(recipe).linear
    actual = jax.jit(lambda: ours(w, recipe))()
    expected = float64(w.dequantize())  # of the codes: their own error is not the product's
    x_spec, dy_spec = linear.spec("x"), linear.spec("dy") if CASES[spec, recipe][1] != "float32" else None
    for y, exact, other in zip(actual, expected, (x_spec, dy_spec, None, None), strict=True):
        bound = expected_error(other)
        # Products without codes are fp32 here, or of 16-bit factors.
        assert relative(y, exact) <= 1.3 * bound + (order(INPUTS) if other is None else 4e-3)
        if other is not None:
            assert relative(y, exact) >= 0.2 * bound


@case
def test_products_read_the_codes_where_matrix_units_do(spec, recipe):
    w = fp8jax.freeze(W, spec)
    actual = dots(lambda: ours(w, recipe))
    of_w, of_dy = CASES[spec, recipe]
    assert any(of_w in pair for pair in actual)
    assert any(pair[0] == of_dy for pair in actual)
    assert len(actual) == 8, "two of the base, two of the adapter's forward pass, four of its backward pass"


def test_the_gradient_of_codes_of_outputs_is_by_codes():
    w = fp8jax.freeze(W * jnp.linspace(0.01, 10, OUTPUTS), "e4m3:token")
    assert ("float8_e5m2", "float8_e4m3fn") in dots(lambda: ours(w, "te_current"))
    _, dx, *_ = ours(w, "te_current")
    assert relative(dx, float64(w.dequantize())[1]) < 0.08


@pytest.mark.parametrize("spec", ["e4m3", "e4m3:block128", "e4m3:group128", "e4m3:token", "e4m3:mx32", "int8"])
def test_values_are_those_of_the_codes_of_the_transposed_weight(spec):
    w = jnp.stack([W, 8 * W])
    frozen = fp8jax.freeze(w, spec)
    assert frozen.shape == w.shape
    for one, matrix in zip(frozen.dequantize(), w, strict=True):
        expected = fp8jax.quantize(matrix.T, spec)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(expected.dequantize().T))
    assert frozen.codes.codes.dtype == jnp.uint8
    assert from_bytes(frozen.codes).codes.dtype == fp8jax.formats.get(spec.partition(":")[0]).dtype


def stack(layers=3):
    w = jnp.stack([W] * layers)
    return fp8jax.freeze(w), fp8jax.lora.init_adapter(KEY, w.shape, RANK, ALPHA)


def scanned(w, adapters, x):
    """Layers in a loop; their widths are equal again at the end."""

    def layer(x, parts):
        w, adapter = parts
        return jnp.pad(fp8jax.lora.linear(x, w, adapter, recipe="te_current"), ((0, 0), (0, INPUTS - OUTPUTS))), None

    return jax.lax.scan(layer, x, (w, adapters))[0]


def test_the_base_has_no_gradient_no_kept_input_and_no_wide_copy():
    w, adapters = stack()
    x = X.reshape(-1, INPUTS).astype(jnp.bfloat16)
    saved = residuals(lambda adapters: scanned(w, adapters, x), adapters)
    assert not [k for k in saved if k[0] in ("float32", "bfloat16") and k[1][-2:] in ((INPUTS, OUTPUTS), W.T.shape)]
    # The values of an input, once, for the adapter, without codes for a gradient of the base.
    assert [k for k in saved if TOKENS in k[1] and k[0] == "uint8"] == []
    assert [k for k in saved if k[1][-2:] == (TOKENS, INPUTS)] == [("bfloat16", (3, TOKENS, INPUTS))]
    for wide in (jnp.float32, jnp.bfloat16):
        shapes = outputs(jax.grad(lambda a: scanned(w, a, x).sum().astype(jnp.float32)), wide, adapters)
        assert not [s for s in shapes if s[-2:] in ((INPUTS, OUTPUTS), (OUTPUTS, INPUTS))]


def test_a_frozen_weight_alone_keeps_nothing_of_its_input():
    w = fp8jax.freeze(W)
    saved = residuals(lambda x: fp8jax.linear(x, w, recipe="coat"), X)
    assert sum(np.prod(shape) for dtype, shape in saved if dtype != "uint8") <= 1
    assert [shape for dtype, shape in saved if dtype == "uint8"] == [W.T.shape]


def test_scanned_layers_are_those_one_by_one():
    w, adapters = stack()
    adapters = dataclasses.replace(adapters, b=0.1 * jax.random.normal(KEY, adapters.b.shape))
    x = X.reshape(-1, INPUTS)
    y = x
    for i in range(3):
        w_i, a_i = jax.tree.map(lambda v, i=i: v[i], (w, adapters))
        y = jnp.pad(fp8jax.lora.linear(y, w_i, a_i, recipe="te_current"), ((0, 0), (0, INPUTS - OUTPUTS)))
    assert relative(scanned(w, adapters, x), y) < 1e-5


@pytest.mark.parametrize("frozen", [True, False])
def test_merged_weights_give_what_adapters_give(frozen):
    params = {"q": {"kernel": W}, "k": {"kernel": 2 * W}, "norm": {"scale": jnp.ones(3)}}
    base = fp8jax.lora.freeze(params) if frozen else params
    adapters = fp8jax.lora.init(KEY, base, rank=RANK, alpha=ALPHA, targets="(q|k)/kernel")
    assert list(adapters) == ["k/kernel", "q/kernel"]
    unchanged = fp8jax.lora.merge(base, adapters)
    adapters["q/kernel"] = ADAPTER
    merged = fp8jax.lora.merge(base, adapters)
    assert merged["norm"] is base["norm"] or relative(merged["norm"], base["norm"]) == 0
    for name in ("q", "k"):
        y = fp8jax.lora.linear(X, base[name]["kernel"], adapters[f"{name}/kernel"], recipe="bf16")
        assert relative(y, X @ merged[name]["kernel"]) < order(INPUTS)
    values = base["q"]["kernel"].dequantize() if frozen else W
    np.testing.assert_array_equal(np.asarray(unchanged["q"]["kernel"]), np.asarray(values))
    assert relative(merged["q"]["kernel"], values) > 0.1


def test_an_adapter_starts_as_peft_s_does():
    adapter = fp8jax.lora.init_adapter(KEY, (INPUTS, OUTPUTS), 64, 128)
    assert (adapter.scale, adapter.shape, adapter.rank) == (2.0, (INPUTS, OUTPUTS), 64)
    assert float(jnp.abs(adapter.b).max()) == 0
    a = np.asarray(adapter.a) * INPUTS**0.5
    assert a.min() > -1 > a.min() - 0.01
    assert a.std() == pytest.approx(3**-0.5, rel=0.05)


def test_the_adapter_of_the_transposed_weight_adds_the_transposed_matrix():
    stack = fp8jax.lora.Adapter(*(jnp.stack([x, 2 * x]) for x in (ADAPTER.a, ADAPTER.b)), alpha=ADAPTER.alpha)
    for adapter in (ADAPTER, stack):
        assert adapter.T.shape == (*adapter.shape[:-2], *adapter.shape[:-3:-1])
        assert adapter.T.scale == adapter.scale
        np.testing.assert_allclose(adapter.T.a @ adapter.T.b, (adapter.a @ adapter.b).mT, rtol=1e-5, atol=1e-6)


def test_adapters_of_one_shape_start_differently():
    params = {"q": {"kernel": W}, "v": {"kernel": W}, "layers": {"kernel": jnp.stack([W, W])}}
    adapters = fp8jax.lora.init(KEYS[0], params, rank=4, alpha=8, targets=".*")
    factors = [adapters["q/kernel"].a, adapters["v/kernel"].a, *adapters["layers/kernel"].a]
    assert len({np.asarray(factor).tobytes() for factor in factors}) == 4
    again = fp8jax.lora.init(KEYS[0], params, rank=4, alpha=8, targets=".*")
    np.testing.assert_array_equal(again["v/kernel"].a, adapters["v/kernel"].a)
    other = fp8jax.lora.init(KEYS[1], params, rank=4, alpha=8, targets=".*")
    assert (np.asarray(other["v/kernel"].a) != np.asarray(adapters["v/kernel"].a)).any()


def test_dropout_drops_inputs_of_the_adapter_alone_and_is_unbiased():
    w = fp8jax.freeze(jnp.zeros_like(W))
    x = jnp.ones((4000, INPUTS))
    y = fp8jax.lora.linear(x, w, ADAPTER, recipe="te_current", dropout=0.25, dropout_key=KEY)
    assert float(y.std(0).max()) > 0
    assert relative(y.mean(0), (x[:1] @ ADAPTER.a @ ADAPTER.b * ADAPTER.scale)[0]) < 0.02
    base = fp8jax.freeze(W)
    nothing = dataclasses.replace(ADAPTER, b=jnp.zeros_like(ADAPTER.b))
    dropped = fp8jax.lora.linear(x, base, nothing, recipe="te_current", dropout=0.25, dropout_key=KEY)
    np.testing.assert_array_equal(np.asarray(dropped), np.asarray(fp8jax.linear(x, base, recipe="te_current")))


def test_an_array_as_the_base_has_no_gradient():
    grad = jax.grad(lambda w: fp8jax.lora.linear(X, w, ADAPTER, recipe="te_current").sum())(W)
    assert float(jnp.abs(grad).max()) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fp8jax.lora.init_adapter(KEY, W.shape, 0, 1), "from 1 to 160, got 0"),
        (lambda: fp8jax.lora.init_adapter(KEY, W.shape, 161, 1), "from 1 to 160, got 161"),
        (lambda: fp8jax.lora.init_adapter(KEY, W.shape, 4, 0), "alpha .* positive and finite, got 0"),
        (lambda: fp8jax.lora.init_adapter(KEY, W.shape, 4, float("inf")), "alpha .* positive and finite, got inf"),
        (lambda: fp8jax.lora.init_adapter(KEY, W.shape, 4, float("nan")), "alpha .* positive and finite, got nan"),
        (
            lambda: fp8jax.lora.linear(X, W.T[:, :INPUTS], ADAPTER, recipe="bf16"),
            r"does not fit the weight, \(160, 256\)",
        ),
        (lambda: fp8jax.lora.linear(X, W, ADAPTER, recipe="bf16", dropout=1.0), "dropout must be in.*1.0"),
        (lambda: fp8jax.lora.linear(X, W, ADAPTER, recipe="bf16", dropout=0.1), "needs dropout_key"),
        (
            lambda: fp8jax.lora.init(KEY, {"q": W}, rank=4, alpha=1, targets="v"),
            "'v' match no matrix; the matrices are: q",
        ),
        (lambda: fp8jax.lora.init(KEY, {"q": W}, rank=4, alpha=1, targets="("), "not a regular expression"),
        (lambda: fp8jax.lora.merge({"q": W}, {"v": ADAPTER}), "no weight 'v' for an adapter; use one of q"),
        (lambda: fp8jax.lora.merge({"q": W.T}, {"q": ADAPTER}), "does not fit"),
        (lambda: fp8jax.freeze(W[0]), "got an array of shape"),
        (lambda: fp8jax.freeze(W, "int10:group128"), "an 8-bit spec"),
        (lambda: fp8jax.freeze(W, "e4m3+stochastic"), "rounds to nearest"),
        (lambda: fp8jax.linear(X, fp8jax.freeze(W, "int8"), recipe="coat"), "floating-point and integer codes"),
        (lambda: fp8jax.linear(X, fp8jax.freeze(W), recipe="te_delayed"), "delayed scaling keeps a state"),
        (lambda: fp8jax.linear(X[..., 1:], fp8jax.freeze(W), recipe="coat"), "linear expects"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_paths_in_the_messages_are_those_of_matrices():
    with pytest.raises(ValueError, match=re.escape("the matrices are: a/kernel, b/kernel")):
        fp8jax.lora.init(KEY, {"a": {"kernel": W, "bias": W[0]}, "b": {"kernel": W}}, rank=4, alpha=1, targets="a")
