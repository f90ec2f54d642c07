"""Functions that close over their batch, and functions that stack or concatenate their parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fp8jax
from tests.programs import count, dots

FP8 = ("float8_e4m3fn", "float8_e4m3fn")
WIDTH, INNER, LAYERS = 32, 48, 3


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / shape[0] ** 0.5


X, SKEW = normal(0, 16, WIDTH) * 4, normal(1, WIDTH, WIDTH)
P = {"up": normal(2, WIDTH, INNER), "down": normal(3, INNER, WIDTH), "n": 1 + normal(4, WIDTH)}
TOKENS = jnp.arange(16) % 9


def mlp(p, x):
    h = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["n"]
    return jnp.mean((x + jax.nn.silu(h @ p["up"]) @ p["down"]) ** 2)


def mapped(p, x):
    """With matrices on the left, as in Equinox."""
    return jnp.mean(jax.vmap(lambda x: p["down"].T @ jax.nn.silu(p["up"].T @ (x * p["n"])))(x) ** 2)


def scanned(p, x):
    """A loop over the rows of the batch; the carry depends on them."""
    return mlp(p, lax.scan(lambda h, row: (h + row, h @ p["up"][:, :WIDTH]), x[0], x)[1])


def looked_up(p, tokens):
    return mlp(p, p["table"][tokens])


@pytest.mark.parametrize(
    ("loss", "batch", "same"),
    [
        (mlp, X, lambda x: x),
        (mlp, X, lambda x: x - x.mean()),
        (mapped, X, lambda x: x / jnp.std(x)),
        (scanned, X, lambda x: x),
        (looked_up, TOKENS, lambda t: t[::-1]),
    ],
    ids=["as it is", "centred", "matrices on the left", "in a loop", "tokens"],
)
def test_a_batch_that_a_loss_closes_over_is_data(loss, batch, same):
    p = P | {"table": normal(5, 9, WIDTH)}
    closed = fp8jax.transform(lambda p: loss(p, same(batch)), "coat")
    with_arguments = fp8jax.transform(lambda p, x: loss(p, same(x)), "coat")
    kinds = lambda entries: [(e.path, e.kind, e.is_quantized) for e in entries]  # noqa: E731
    assert kinds(closed.explain(p).entries) == kinds(with_arguments.explain(p, batch).entries)
    assert len(closed.explain(p).quantized) > 2
    if loss is scanned:  # it takes as long to compile as all others together
        return
    actual, expected = jax.jit(jax.value_and_grad(closed))(p), jax.jit(jax.value_and_grad(with_arguments))(p, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), actual, expected)


def test_a_batch_of_a_trace_around_and_labels_as_an_argument():
    def step(p, x, y):
        loss = fp8jax.transform(lambda p, y: jnp.mean((x @ p["up"] @ p["down"] - y) ** 2), "te_current")
        return jax.grad(loss)(p, y)

    assert dots(step, P, X, X).count(FP8) == 2
    # Eagerly both arrays of `x` are constants of the program.
    np.testing.assert_allclose(step(P, X, X)["up"], jax.jit(step)(P, X, X)["up"], rtol=1e-5, atol=1e-7)


def test_matrices_of_the_model_that_data_meet_are_no_data():
    """The function closes over a frozen base, a merged adapter, a rotation of weights or a weight mask."""
    base, mask = normal(7, WIDTH, INNER), (normal(8, WIDTH, INNER) > 0).astype(jnp.float32)
    cases = {
        "constants": (lambda p, x: x @ base + x @ p["up"], ["up"]),
        "up": (lambda p, x: x @ (base + 0.5 * p["up"]), []),
        "up ": (lambda p, x: x @ (SKEW @ p["up"]), []),
        "": (lambda p, x: x @ (mask * p["up"]), ["up"]),
    }
    for case, (first, is_quantized) in cases.items():
        fn = lambda p, x, first=first: jnp.mean((first(p, x) @ p["down"]) ** 2)  # noqa: E731
        explained = fp8jax.transform(fn, "te_current").explain(P, X)
        assert [e.path for e in explained.quantized] == [*is_quantized, "down"], case
        rotated = ["neither operand depends on data"] if case == "up " else []
        assert [e.reason for e in explained.skipped] == (
            [*rotated, f"data are multiplied by a value computed from {case.strip()}"] if case else []
        )


def test_attention_to_a_memory_that_a_loss_closes_over():
    def loss(p, x, memory):
        q, k, v = (
            (y @ w).reshape(-1, 4, w.shape[-1] // 4) for y, w in ((x, p["up"]), (memory, p["up"]), (memory, p["up"]))
        )
        mixed = jnp.einsum("hts,shc->thc", jax.nn.softmax(jnp.einsum("thc,shc->hts", q, k)), v)
        return jnp.mean((mixed.reshape(len(x), -1) @ p["down"]) ** 2)

    for fast, args in (
        (fp8jax.transform(lambda p, x: loss(p, x, X), "te_current"), (P, X)),
        (fp8jax.transform(loss, "te_current"), (P, X, X)),
    ):
        assert len(fast.explain(*args).quantized) == 4


def test_constants_of_a_head_or_a_norm_stay_its_constants():
    """A vocabulary mask added to logits, and a norm's scale that is not a parameter."""
    mask, scale = jnp.where(jnp.arange(INNER) < 40, 0.0, -1e9), 1 + normal(9, WIDTH)

    def loss(p, x):
        x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
        return -jnp.mean(jax.nn.log_softmax(jnp.tanh(x @ p["down"].T @ p["down"]) @ p["up"] + mask)[:, 0])

    explained = fp8jax.transform(loss, "coat").explain(P, X)
    assert [e.kind for e in explained.quantized] == ["RMSNorm", "dot_general", "dot_general"]
    assert [e.reason for e in explained.skipped] == ["a router, gate or head: softmax reads its result"]


def test_one_array_in_place_of_parameters_is_a_batch_by_mistake():
    with pytest.raises(ValueError, match="has no matmul of data with a parameter"):
        fp8jax.transform(lambda x: mlp(P, x), "coat")(X)
    weight = lambda w: jnp.mean((X @ w) ** 2)  # noqa: E731
    assert [e.path for e in fp8jax.transform(weight, "te_current").explain(P["up"]).quantized] == [""]


BLOCKS = {f"block_{i}": jax.tree.map(lambda w, i=i: w * (1 + i / 4), P) for i in range(LAYERS)}
STACKED = jax.tree.map(lambda *w: jnp.stack(w), *BLOCKS.values())


def block(h, w):
    x = h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * w["n"]
    return h + jax.nn.silu(x @ w["up"]) @ w["down"], None


def loop(layers, x):
    return jnp.mean(lax.scan(block, x, layers)[0] ** 2)


def tree(join):
    return lambda p: jax.tree.map(lambda *w: join(w), *p.values())


def unstacked(p, x):
    layers = tree(jnp.stack)(p)
    for i in range(LAYERS):
        x, _ = block(x, jax.tree.map(lambda w, i=i: list(w)[i], layers))
    return jnp.mean(x**2)


def by_index(p, x):
    step = lambda h, i: block(h, jax.tree.map(lambda w: w[i], tree(jnp.stack)(p)))  # noqa: E731
    return jnp.mean(lax.scan(step, x, jnp.arange(LAYERS))[0] ** 2)


FORMS = {
    "stacked": lambda p, x: loop(tree(jnp.stack)(p), x),
    "concatenated": lambda p, x: loop(tree(lambda w: jnp.concatenate([a[None] for a in w]))(p), x),
    "an array of arrays": lambda p, x: loop(tree(jnp.array)(p), x),
    "stacked last": lambda p, x: loop(tree(lambda w: jnp.moveaxis(jnp.stack(w, -1), -1, 0))(p), x),
    "stacked within a stack": lambda p, x: loop(
        tree(lambda w: jnp.stack([jnp.stack(w[:2]), jnp.stack([w[2], w[0]])]).reshape(4, *w[0].shape)[:LAYERS])(p), x
    ),
    "taken apart again": unstacked,
    "picked by number": by_index,
}


@pytest.fixture(scope="module")
def expected():
    """Returns loss and gradients of functions of stacked parameters."""
    fast = {recipe: fp8jax.transform(loop, recipe) for recipe in ("coat", "moss")}
    return {recipe: jax.jit(jax.value_and_grad(f))(STACKED, X) for recipe, f in fast.items()}


@pytest.mark.parametrize("form", FORMS)
def test_products_of_parameters_that_a_loss_stacks_are_taken(form, expected):
    """Bits equal those of parameters stacked outside. "moss" has a bound for each weight, and measures these."""
    compiled = {"stacked": expected.items(), "stacked last": [("coat", expected["coat"])]}
    for recipe, (loss, grads) in compiled.get(form, ()):
        fast = fp8jax.transform(FORMS[form], recipe)
        actual, by_block = jax.jit(jax.value_and_grad(fast))(BLOCKS, X)
        np.testing.assert_allclose(actual, loss, rtol=1e-6)
        stacked = tree(jnp.stack)(by_block)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), stacked, grads)
    explained = fp8jax.transform(FORMS[form], "coat").explain(BLOCKS, X)
    assert not explained.skipped
    assert {e.path for e in explained.quantized} <= {f"block_0/{name}" for name in P}
    assert all("concatenated with block_1/" in e.reason for e in explained.quantized if e.is_product)


def test_packed_projections_of_two_parameters_are_one_product():
    def loss(p, x):
        y = x @ jnp.concatenate([p["up"], p["down"].T], 1) + jnp.concatenate([p["bias"], p["bias"]])
        return jnp.mean(jnp.tanh(y[:, :WIDTH]) @ p["up"])

    p = P | {"bias": normal(6, INNER)}
    fast = fp8jax.transform(loss, "te_current")
    (packed, _) = fast.explain(p, X).quantized
    assert (packed.path, packed.concatenated, packed.shape) == ("up", ("down",), (WIDTH, 2 * INNER))
    assert count(fast, "dot_general", p, X) == 2
    expected = jax.grad(loss)(p, X)
    for name, actual in jax.grad(fast)(p, X).items():
        assert np.linalg.norm(actual - expected[name]) <= 0.1 * np.linalg.norm(expected[name]), name


def test_rules_for_stacked_parameters():
    fn = FORMS["stacked"]
    each = [fp8jax.Rule("block_[01]/.*", "te_current"), fp8jax.Rule("block_2/.*", "te_current")]
    assert len(fp8jax.transform(fn, each).explain(BLOCKS, X).quantized) == 2
    explained = fp8jax.transform(fn, [fp8jax.Rule(".*/up", None), "te_current"]).explain(BLOCKS, X)
    assert [e.path for e in explained.skipped if e.is_product] == ["block_0/up"]
    with pytest.raises(ValueError, match=r"block_0/up and block_1/up are concatenated .*Use the same rule for both"):
        fp8jax.transform(fn, [fp8jax.Rule("block_1/.*", None), "te_current"])(BLOCKS, X)


@pytest.mark.parametrize("recipe", ["te_delayed", "int8_fallback"])
def test_stacked_parameters_have_no_state_and_stop_no_other_product(recipe):
    params = {"blocks": BLOCKS, "alone": normal(9, WIDTH, WIDTH)}
    fast = fp8jax.transform(lambda p, x: loop(tree(jnp.stack)(p["blocks"]), jnp.tanh(x @ p["alone"])), recipe)
    unquantized = [e for e in fast.explain(params, X).skipped if e.is_product]
    assert {e.path for e in unquantized} == {"blocks/block_0/up", "blocks/block_0/down"}
    assert all(e.reason.startswith("concatenates or stacks parameters") for e in unquantized)
    assert list(fast.init(params, X)) == ["alone"]


def test_frozen_weights_that_are_stacked_are_told():
    frozen = {name: {k: fp8jax.freeze(w) if w.ndim > 1 else w for k, w in p.items()} for name, p in BLOCKS.items()}
    fast = fp8jax.transform(lambda p, x: loop(tree(jnp.stack)(p), x) + mlp(P | {"up": p["block_0"]["up"]}, x), "coat")
    reasons = [e.reason for e in fast.explain(frozen, X).skipped if e.is_product]
    assert any("a value computed from block_0/up and block_1/up" in each and "frozen as" in each for each in reasons)
