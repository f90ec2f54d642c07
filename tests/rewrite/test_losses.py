"""Output heads that run with their softmax cross-entropy, in users' spellings, against float64."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.nn import log_softmax, logsumexp, one_hot, softmax

import fp8jax
from fp8jax.rewrite.entries import LOSS_KIND
from tests.programs import dots
from tests.rows import few

VOCABULARY, CHANNELS = 40, 16
SHAPE = 4, 6
RECIPE = fp8jax.recipes.coat_fast(head=fp8jax.recipes.HEAD)
losses = optax.softmax_cross_entropy_with_integer_labels


def label_logits(x, labels):
    return jnp.take_along_axis(x, labels[..., None], -1)


def valid(labels):
    return labels != -100


def zeroed(labels):
    return jnp.where(valid(labels), labels, 0)


def smoothed(z, labels):
    log_probs = log_softmax(z)
    return -jnp.mean(0.9 * label_logits(log_probs, labels)[..., 0] + 0.1 * log_probs.mean(-1))


# Writings with the mean over all tokens, of which the first has the label 0 in place of -100.
WHOLE = {
    "optax": lambda z, y: losses(z, y).mean(),
    "flat": lambda z, y: losses(z.reshape(-1, VOCABULARY), y.reshape(-1)).mean(),
    "mapped": lambda z, y: jax.vmap(losses)(z, y).mean(),
    "one-hot": lambda z, y: optax.softmax_cross_entropy(z, one_hot(y, VOCABULARY)).mean(),
    "one sum over all": lambda z, y: -jnp.sum(one_hot(y, VOCABULARY) * log_softmax(z)) / y.size,
    "log_softmax": lambda z, y: -label_logits(log_softmax(z), y).mean(),
    "indexed": lambda z, y: -log_softmax(z.reshape(-1, VOCABULARY))[jnp.arange(y.size), y.reshape(-1)].mean(),
    "indexed in a vmap": lambda z, y: -jax.vmap(jax.vmap(lambda z, y: log_softmax(z)[y]))(z, y).mean(),
    "logsumexp": lambda z, y: (logsumexp(z, -1) - label_logits(z, y)[..., 0]).mean(),
    "its own maximum": lambda z, y: (
        jnp.log(jnp.exp(z - z.max(-1, keepdims=True)).sum(-1)) + z.max(-1) - label_logits(z, y)[..., 0]
    ).mean(),
    "no maximum": lambda z, y: (jnp.log(jnp.exp(z).sum(-1)) - label_logits(z, y)[..., 0]).mean(),
    "logarithm of softmax": lambda z, y: -jnp.log(label_logits(softmax(z), y)).mean(),
    "z-loss": lambda z, y: (losses(z, y) + 1e-3 * logsumexp(z, -1) ** 2).mean(),
    "smoothing": smoothed,
}
# Writings that leave out the label -100, or that weight tokens by `weights`.
MASKED = {
    "where": lambda z, y: jnp.where(valid(y), losses(z, zeroed(y)), 0).sum() / valid(y).sum(),
    "product": lambda z, y: (losses(z, zeroed(y)) * valid(y)).sum() / valid(y).sum(),
    "mean of some": lambda z, y: losses(z, zeroed(y)).mean(where=valid(y)),
    "one-hot": lambda z, y: -jnp.sum(one_hot(y, VOCABULARY) * log_softmax(z), -1).sum() / valid(y).sum(),
    "negative sum": lambda z, y: -jnp.where(~valid(y), 0, -losses(z, zeroed(y))).sum() / valid(y).sum(),
    "weighted": lambda z, y: (losses(z, zeroed(y)) * weights_of(y)).sum() / 3,
}


def weights_of(labels):
    return jnp.where(valid(labels), 1 + jnp.cos(labels.astype(jnp.float32)), 0)


def operands(dtype=jnp.float32, tied=False):
    """Inputs and weights that e4m3 with one scale represents exactly, and labels."""
    random = np.random.default_rng(0)
    x, w = (random.integers(-7, 8, shape) for shape in ((*SHAPE, CHANNELS), (CHANNELS, VOCABULARY)))
    labels = random.integers(0, VOCABULARY, SHAPE)
    labels[0, 0] = -100
    w = (w.T if tied else w) / 16
    return jnp.asarray(x, dtype), jnp.asarray(w, jnp.float32), jnp.asarray(labels, jnp.int32)


def oracle(x, w, labels, weights, smoothing=0.0, z_loss=0.0):
    """Returns the weighted sum of losses, its gradients, and error bounds with codes of the logits' cotangents."""
    x, w = (np.asarray(a, np.float64).reshape(-1, a.shape[-1]) for a in (x, w))
    weights = np.asarray(weights, np.float64).reshape(-1, 1)
    z = x @ w
    lse = np.log(np.exp(z).sum(-1, keepdims=True))
    target = np.eye(VOCABULARY)[np.asarray(zeroed(labels)).reshape(-1)] * (1 - smoothing) + smoothing / VOCABULARY
    total = np.sum(weights * (lse - (target * z).sum(-1, keepdims=True) + z_loss * lse**2))
    d = weights * (np.exp(z - lse) * (1 + 2 * z_loss * lse) - target)
    scale = 1.5 * np.max(np.abs(weights)) / 448
    dx, dw = d @ w.T, x.T @ d
    bounds = (2**-4 * np.abs(d) + scale * 2**-10) @ np.abs(w).T, np.abs(x).T @ (2**-3 * np.abs(d) + scale * 2**-10)
    return total, (dx, dw), bounds


def check(function, x, w, labels, weights, targets=None, **terms):
    """Compares a transformed `function(x, params, labels)` with float64, and checks its head's matmuls."""
    tied = w.shape[0] == VOCABULARY
    params = {"out": w}
    transformed = fp8jax.transform(function, RECIPE)
    (entry,) = (e for e in transformed.explain(params, x, labels).entries if e.is_product)
    assert (entry.path, entry.kind, entry.reason) == ("out", LOSS_KIND, "the recipe's head")
    run = jax.value_and_grad(transformed, argnums=(0, 1))
    products = sorted(tuple(sorted(pair)) for pair in dots(run, params, x, labels))
    assert products == [("float8_e4m3fn",) * 2] * 2 + [("float8_e4m3fn", "float8_e5m2")]
    value, (dparams, dx) = run(params, x, labels)
    targets = labels if targets is None else targets
    expected, gradients, bounds = oracle(x, w.T if tied else w, targets, weights, **terms)
    np.testing.assert_allclose(value, expected, rtol=1e-6 if x.dtype == jnp.float32 else 2e-2)
    actual = np.asarray(dx, np.float64).reshape(-1, CHANNELS), np.asarray(dparams["out"].T if tied else dparams["out"])
    for result, exact, bound in zip(actual, gradients, bounds, strict=True):
        slack = 1 if x.dtype == jnp.float32 else 1.3
        assert np.all(np.abs(result - exact) <= slack * bound + 1e-6)


@pytest.mark.parametrize("name", few(WHOLE, "optax", "one-hot", "indexed", "z-loss"))
def test_a_head_runs_with_its_loss_in_any_writing(name):
    x, w, labels = operands()
    labels = zeroed(labels)
    terms = {"z-loss": {"z_loss": 1e-3}, "smoothing": {"smoothing": 0.1}}.get(name, {})
    check(lambda p, x, y: WHOLE[name](x @ p["out"], y), x, w, labels, np.full(SHAPE, 1 / labels.size), **terms)


@pytest.mark.parametrize("name", few(MASKED, "where", "one-hot", "weighted"))
def test_tokens_that_do_not_count_have_weight_zero(name):
    x, w, labels = operands()
    weights = (
        np.asarray(weights_of(labels)) / 3 if name == "weighted" else np.asarray(valid(labels)) / valid(labels).sum()
    )
    check(lambda p, x, y: MASKED[name](x @ p["out"], y), x, w, labels, weights)


WEIGHTED = {
    "positions": (lambda z, y: (losses(z, y) * jnp.arange(SHAPE[1])).sum(), lambda y: np.arange(SHAPE[1])),
    "sequences": (lambda z, y: (losses(z, y) * jnp.cos(1.0 * y[:, :1])).sum(), lambda y: np.cos(1.0 * y[:, :1])),
    "one number": (lambda z, y: (losses(z, y) * jnp.cos(1.0 * y[0, 0])).sum(), lambda y: np.cos(1.0 * y[0, 0])),
    "one condition": (lambda z, y: lax.select(y[0, 0] < 99, losses(z, y), jnp.zeros(SHAPE)).sum(), lambda y: 1),
    "column": (
        lambda z, y: (losses(z.reshape(-1, VOCABULARY), y.reshape(-1))[:, None] * (1 + y.reshape(-1, 1))).sum(),
        lambda y: 1 + y,
    ),
}


@pytest.mark.parametrize("name", few(WEIGHTED, "positions", "one condition", "column"))
def test_weights_may_be_shared_by_tokens(name):
    loss, weights = WEIGHTED[name]
    x, w, labels = operands()
    labels = zeroed(labels)
    exact = np.broadcast_to(weights(np.asarray(labels)), SHAPE)
    check(lambda p, x, y: loss(x @ p["out"], y), x, w, labels, exact)


def test_several_weights_of_a_token_take_the_product():
    x, w, labels = operands()
    function = lambda p, x, y: (losses(x @ p["out"], y)[..., None] * jnp.ones((1, 1, 3))).sum()  # noqa: E731
    run = fp8jax.transform(function, RECIPE)
    params, labels = {"out": w}, zeroed(labels) + 1
    assert [entry.kind for entry in run.explain(params, x, labels).quantized] == ["dot_general"]
    np.testing.assert_allclose(run(params, x, labels), function(params, x, labels), rtol=1e-3)


def test_tokens_predict_the_next_ones():
    """The last token of each sequence has logits but no loss."""
    x, w, labels = operands()
    labels = zeroed(labels)
    weights = np.broadcast_to(np.arange(SHAPE[1]) < SHAPE[1] - 1, SHAPE) / (SHAPE[0] * (SHAPE[1] - 1))
    loss = lambda p, x, y: losses((x @ p["out"])[:, :-1], y[:, 1:]).mean()  # noqa: E731
    check(loss, x, w, labels, weights, targets=jnp.roll(labels, -1, axis=1))


def test_a_batch_may_be_one_sequence():
    """JAX indexes axes of length 1 by slices, not by batching."""
    x, w, labels = (a[:1] if a.ndim == 3 or a.shape == SHAPE else a for a in operands())
    weights = np.full(labels.shape, 1 / labels.size)
    check(lambda p, x, y: WHOLE["optax"](x @ p["out"], y), x, w, zeroed(labels), weights)


def test_a_mapped_head_has_its_weight_on_the_left():
    """As in Equinox: `w @ x` for one token."""
    x, table, labels = operands(tied=True)
    labels = zeroed(labels)

    def loss(p, x, y):
        return losses(jax.vmap(jax.vmap(lambda x: p["out"] @ x))(x), y).mean()

    check(loss, x, table, labels, np.full(SHAPE, 1 / labels.size))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_tied_table_is_the_transposed_head(dtype):
    x, table, labels = operands(dtype, tied=True)
    weights = np.asarray(valid(labels)) / valid(labels).sum()

    def loss(p, x, y):
        return MASKED["where"]((x @ p["out"].T.astype(x.dtype)).astype(jnp.float32), y)

    check(loss, x, table, labels, weights)


def test_a_bias_of_the_head_has_its_gradient():
    x, w, labels = operands()
    bias = jnp.sin(jnp.arange(float(VOCABULARY)))
    params, labels = {"out": w, "bias": bias}, zeroed(labels)
    run = fp8jax.transform(lambda p, x, y: losses(x @ p["out"] + p["bias"], y).mean(), RECIPE)
    assert [entry.kind for entry in run.explain(params, x, labels).entries] == [LOSS_KIND]
    value, gradients = jax.value_and_grad(run)(params, x, labels)
    x, w, bias = (np.asarray(a, np.float64) for a in (x.reshape(-1, CHANNELS), w, bias))
    targets = np.eye(VOCABULARY)[labels.reshape(-1)]
    z = x @ w + bias
    probabilities = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    np.testing.assert_allclose(value, -np.log((targets * probabilities).sum(-1)).mean(), rtol=1e-5)
    np.testing.assert_allclose(gradients["bias"], (probabilities - targets).mean(0), atol=1e-6)


# Name -> function, and whether its head is recognized. Otherwise only the product follows `Recipe.head`.
OTHER = {
    "each loss is returned": (lambda p, z, y: losses(z, y), True),
    "accuracy": (lambda p, z, y: losses(z, y).mean() + (z.argmax(-1) == y).mean(), True),
    "focal": (lambda p, z, y: ((1 - jnp.exp(-losses(z, y))) ** 2 * losses(z, y)).mean(), True),
    "weights of parameters": (lambda p, z, y: (losses(z, y) * p["out"].sum()).mean(), True),
    "unknown loss of other labels": (
        lambda p, z, y: (logsumexp(z, -1) - jnp.sum(one_hot(y, VOCABULARY) * z, -1)).mean(),
        True,
    ),
    "entropy": (lambda p, z, y: -jnp.sum(softmax(z) * log_softmax(z), -1).mean(), False),
    "its own choice": (lambda p, z, y: losses(z, z.argmax(-1)).mean(), False),
    "one of two maxima has no gradient": (
        lambda p, z, y: (
            jnp.log(jnp.exp(z - z.max(-1, keepdims=True)).sum(-1))
            + lax.stop_gradient(z.max(-1))
            - label_logits(z, y)[..., 0]
        ).mean(),
        False,
    ),
    "no gradient of logsumexp": (
        lambda p, z, y: (lax.stop_gradient(logsumexp(z, -1)) - label_logits(z, y)[..., 0]).mean(),
        False,
    ),
    "columns in another order": (lambda p, z, y: losses(z[..., jnp.arange(VOCABULARY)[::-1]], y).mean(), False),
    "half of it": (lambda p, z, y: (0.5 * logsumexp(z, -1) - label_logits(z, y)[..., 0]).mean(), False),
}


@pytest.mark.parametrize("name", few(OTHER, "accuracy", "weights of parameters", "one of two maxima has no gradient"))
def test_other_functions_of_logits_are_no_losses(name):
    function, is_head = OTHER[name]
    x, w, labels = operands()
    params = {"hidden": jnp.eye(CHANNELS), "out": w}
    plan = fp8jax.transform(lambda p, x, y: function(p, x @ p["hidden"] @ p["out"], y), RECIPE).explain(
        params, x, labels
    )
    entry = next(e for e in plan.entries if e.path == "out")
    assert (entry.kind, entry.is_quantized) == ("dot_general", is_head)


def test_a_batch_of_unknown_size_takes_the_product():
    (batch,) = jax.export.symbolic_shape("batch")
    x, labels = (jax.ShapeDtypeStruct((batch, *a.shape[1:]), a.dtype) for a in operands()[::2])
    rule = fp8jax.Rule("out", fp8jax.recipes.HEAD)
    run = fp8jax.transform(lambda p, x, y: losses(x @ p["out"], y).mean(), rule)
    params = {"out": jax.ShapeDtypeStruct((CHANNELS, VOCABULARY), jnp.float32)}
    assert jax.export.export(jax.jit(run))(params, x, labels).out_avals[0].shape == ()


def test_differentiated_weights_of_tokens_raise():
    x, w, labels = operands()
    run = fp8jax.transform(lambda p, x, y, weights: (losses(x @ p, zeroed(y)) * weights).sum(), RECIPE)
    weights = jnp.ones(SHAPE)
    assert np.isfinite(run(w, x, labels, weights))
    with pytest.raises(ValueError, match="token weights have no gradient"):
        jax.grad(run, argnums=3)(w, x, labels, weights)


@pytest.mark.parametrize("name", ["fast", "te_delayed"])
def test_recipes_that_the_loss_has_no_codes_for_take_the_product(name):
    x, w, labels = operands()
    function = fp8jax.transform(lambda p, x, y: losses(x @ p["out"], y).mean(), fp8jax.Rule("out", name))
    (entry,) = function.explain({"out": w}, x, labels).quantized
    assert entry.kind == "dot_general"


@pytest.mark.parametrize("name", ["head", "table"])
def test_a_model_may_have_nothing_but_a_head(name):
    """The recipe's `head` is used, for a layer named as a head or not."""
    x, w, labels = operands()

    def loss(params, x, labels):
        return losses(x @ params[name], labels).mean()

    params, labels = {name: w}, zeroed(labels)
    value, dw = jax.value_and_grad(fp8jax.transform(loss, RECIPE))(params, x, labels)
    expected, exact_dw = jax.value_and_grad(loss)(params, x, labels)
    assert float(value) == pytest.approx(float(expected), rel=0.02)
    assert np.linalg.norm(dw[name] - exact_dw[name]) < 0.1 * np.linalg.norm(exact_dw[name])
    with pytest.raises(ValueError, match="no layer is left"):
        fp8jax.transform(loss, "coat_fast")(params, x, labels)
