"""Experts as users write them: each writing is in 8 bits, or it is listed with a reason and the rest is in 8 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fp8jax
from tests.distance import relative
from tests.rows import few

TOKENS, WIDTH, INNER, EXPERTS, CHOSEN = 32, 32, 48, 4, 2


def normal(i, *shape):
    return jax.random.normal(jax.random.key(i), shape) / shape[-2] ** 0.5


P = {
    "mixer": normal(0, WIDTH, WIDTH),
    "router": normal(1, WIDTH, EXPERTS),
    "gate": normal(2, EXPERTS, WIDTH, INNER),
    "up": normal(3, EXPERTS, WIDTH, INNER),
    "down": normal(4, EXPERTS, INNER, WIDTH),
}
X = jax.random.normal(jax.random.key(5), (TOKENS, WIDTH))
TRANSPOSED = P | {name: jnp.swapaxes(P[name], 1, 2) for name in ("gate", "up", "down")}
JOINED = {name: P[name] for name in ("mixer", "router", "down")} | {"w13": jnp.concatenate([P["gate"], P["up"]], -1)}
OUTPUTS_FIRST = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([1], [2]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


@jax.custom_vjp
def own_dot(x, w, group_sizes):
    """A grouped product with a derivative of its own, as haliax, tokamax and megablox have."""
    return lax.ragged_dot(x, w, group_sizes)


def own_dot_bwd(residuals, dy):
    x, w, group_sizes = residuals
    _, vjp = jax.vjp(lambda x, w: lax.ragged_dot(x, w, group_sizes), x, w)
    return (*vjp(dy), None)


own_dot.defvjp(lambda *operands: (own_dot(*operands), operands), own_dot_bwd)


@jax.jit
def jitted_dot(x, w, group_sizes):
    """One matrix after the other, so that no ragged product is in the program."""
    ends = jnp.cumsum(group_sizes)
    group = jnp.sum(jnp.arange(x.shape[0])[:, None] >= ends, 1)
    y = sum(jnp.where((group == i)[:, None], x @ w[i].T, 0) for i in range(w.shape[0]))
    return y.astype(x.dtype)


def swapped_dot(x, w, group_sizes):
    return lax.ragged_dot(x, jnp.swapaxes(w, 1, 2), group_sizes)


def general_dot(x, w, group_sizes):
    return lax.ragged_dot_general(x, w, group_sizes, OUTPUTS_FIRST)


def float32_dot(x, w, group_sizes):
    return lax.ragged_dot(x, w, group_sizes, preferred_element_type=jnp.float32).astype(x.dtype)


def route(p, x):
    weights, experts = lax.top_k(jax.nn.softmax(x @ p["router"]), CHOSEN)
    return weights / weights.sum(-1, keepdims=True), experts


def block(experts):
    """A block with a product before its experts, which is in 8 bits in any case."""
    return lambda p, x: experts(p, jnp.tanh(x @ p["mixer"]))


def sorted_tokens(dot):
    def experts(p, x):
        weights, chosen = route(p, x)
        order, sizes = jnp.argsort(chosen.reshape(-1)), jnp.bincount(chosen.reshape(-1), length=EXPERTS)
        inputs = x[order // CHOSEN]
        if "w13" in p:
            gate, up = jnp.split(dot(inputs, p["w13"], sizes), 2, -1)
        else:
            gate, up = dot(inputs, p["gate"], sizes), dot(inputs, p["up"], sizes)
        y = dot(jax.nn.silu(gate) * up, p["down"], sizes)
        return (y[jnp.argsort(order)].reshape(TOKENS, CHOSEN, WIDTH) * weights[..., None]).sum(1)

    return experts


def share_of_each(p, x):
    weights, chosen = route(p, x)
    return jnp.sum(jax.nn.one_hot(chosen, EXPERTS) * weights[..., None], 1)


def one_hot(p, x):
    """Tokens are dispatched to places of experts, with a capacity."""
    weights, chosen = route(p, x)
    mask = jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32)
    place = jnp.cumsum(mask.reshape(-1, EXPERTS), 0).reshape(TOKENS, CHOSEN, EXPERTS) * mask - 1
    dispatched = jax.nn.one_hot(jnp.where(mask > 0, place, -1), 3 * TOKENS // 4)
    inputs = jnp.einsum("td,tkec->ecd", x, dispatched)
    h = jax.nn.silu(jnp.einsum("ecd,edf->ecf", inputs, p["gate"])) * jnp.einsum("ecd,edf->ecf", inputs, p["up"])
    y = jnp.einsum("ecf,efd->ecd", h, p["down"])
    return jnp.einsum("ecd,tkec,tk->td", y, dispatched, weights)


def dense(p, x):
    h = jax.nn.silu(jnp.einsum("td,edf->tef", x, p["gate"])) * jnp.einsum("td,edf->tef", x, p["up"])
    return jnp.einsum("ted,te->td", jnp.einsum("tef,efd->ted", h, p["down"]), share_of_each(p, x))


def mapped(p, x):
    one = lambda gate, up, down: (jax.nn.silu(x @ gate) * (x @ up)) @ down  # noqa: E731
    return jnp.einsum("etd,te->td", jax.vmap(one)(p["gate"], p["up"], p["down"]), share_of_each(p, x))


def scanned(p, x):
    def one(total, expert):
        (gate, up, down), share = expert
        return total + share[:, None] * ((jax.nn.silu(x @ gate) * (x @ up)) @ down), None

    return lax.scan(one, jnp.zeros_like(x), ((p["gate"], p["up"], p["down"]), share_of_each(p, x).T))[0]


def looped(p, x):
    shares = share_of_each(p, x)
    one = lambda i: (jax.nn.silu(x @ p["gate"][i]) * (x @ p["up"][i])) @ p["down"][i]  # noqa: E731
    return sum(shares[:, i : i + 1] * one(i) for i in range(EXPERTS))


def gathered(p, x):
    weights, chosen = route(p, x)
    h = jax.nn.silu(jnp.einsum("td,tkdf->tkf", x, p["gate"][chosen])) * jnp.einsum("td,tkdf->tkf", x, p["up"][chosen])
    return jnp.einsum("tkd,tk->td", jnp.einsum("tkf,tkfd->tkd", h, p["down"][chosen]), weights)


def indexed(p, x):
    """An expert of each token, by an index that is data."""
    weights, chosen = route(p, x)
    one = lambda x, i: (jax.nn.silu(x @ p["gate"][i]) * (x @ p["up"][i])) @ p["down"][i]  # noqa: E731
    token = lambda x, w, experts: sum(w[k] * one(x, experts[k]) for k in range(CHOSEN))  # noqa: E731
    return jax.vmap(token)(x, weights, chosen)


def switched(p, x):
    """All tokens go to the expert that most of them choose."""
    _, chosen = route(p, x)
    most = jnp.argmax(jnp.bincount(chosen.reshape(-1), length=EXPERTS))
    branch = lambda i: lambda x: (jax.nn.silu(x @ p["gate"][i]) * (x @ p["up"][i])) @ p["down"][i]  # noqa: E731
    return share_of_each(p, x)[:, most][:, None] * lax.switch(most, [branch(i) for i in range(EXPERTS)], x)


WRITINGS = {
    "ragged_dot": (sorted_tokens(lax.ragged_dot), P),
    "gate and up as one": (sorted_tokens(lax.ragged_dot), JOINED),
    "transposed before": (sorted_tokens(swapped_dot), TRANSPOSED),
    "ragged_dot_general": (sorted_tokens(general_dot), TRANSPOSED),
    "preferred_element_type": (sorted_tokens(float32_dot), P),
    "one-hot": (one_hot, P),
    "dense": (dense, P),
    "vmap": (mapped, P),
    "scan": (scanned, P),
    "loop": (looped, P),
    "switch": (switched, P),
}
LEFT = {
    "custom_vjp": (sorted_tokens(own_dot), P, "inside custom_vjp_call, which has a derivative of its own"),
    "gathered": (gathered, P, "data change or pick the matrix"),
    "indexed": (indexed, P, "data change or pick the matrix"),
}


def experts_of(params):
    return {name for name in params if name not in ("mixer", "router")}


def values_and_gradients(fn, params):
    @jax.jit
    def run(params, x):
        y, vjp = jax.vjp(fn, params, x)
        return y, vjp(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    return run(params, X)


def assert_near(fn, written, params):
    """A result and the gradient of each parameter and of the input as far from those as written as 8 bits are."""
    (y, (grads, dx)), (want, (wanted, wanted_dx)) = (values_and_gradients(each, params) for each in (fn, written))
    assert 0 < relative(y, want) < 0.1
    assert 0 < relative(dx, wanted_dx) < 0.2
    for name in params:
        assert relative(grads[name], wanted[name]) < 0.25, name


@pytest.mark.parametrize("recipe", few(["coat", "deepseek", "coat_fast"], "coat"))
@pytest.mark.parametrize("name", WRITINGS)
def test_a_writing_is_in_8_bits(name, recipe):
    written, params = block(WRITINGS[name][0]), WRITINGS[name][1]
    fast = fp8jax.transform(written, recipe)
    explained = fast.explain(params, X)
    assert {e.path for e in explained.quantized if e.is_product} == {"mixer", *experts_of(params)}
    assert {e.path: e.reason for e in explained.skipped if e.is_product} == {"router": "a router"}
    assert not explained.unquantized_note
    assert_near(fast, written, params)


@pytest.mark.parametrize("name", LEFT)
def test_a_writing_that_is_left_has_its_reason_and_line_and_the_rest_is_in_8_bits(name):
    experts, params, reason = LEFT[name]
    written = block(experts)
    fast = fp8jax.transform(written, "coat")
    explained = fast.explain(params, X)
    assert [e.path for e in explained.quantized if e.is_product] == ["mixer"]
    left = [e for e in explained.skipped if e.path != "router"]
    assert {e.path for e in left} == experts_of(params)
    assert all(e.reason.startswith(reason) and __file__ in e.line for e in left)
    assert reason in explained.unquantized_note
    with pytest.warns(fp8jax.UnquantizedWarning, match="stay in 16 bits"):
        y = fast(params, X)
    assert 0 < relative(y, written(params, X)) < 0.1
    # Nothing is left for the recipe without the product before: the function runs as written.
    alone = fp8jax.transform(experts, [fp8jax.Rule("gate", "deepseek"), "coat"])
    with pytest.warns(fp8jax.UnquantizedWarning, match="all of the FLOPs"):
        np.testing.assert_allclose(alone(params, X), experts(params, X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dot", "params"), [(own_dot, P), (jitted_dot, TRANSPOSED)], ids=["custom_vjp", "jit"])
def test_a_function_that_the_rules_name_is_a_grouped_product(dot, params):
    written, name = block(sorted_tokens(dot)), dot.__name__
    fast = fp8jax.transform(written, [fp8jax.GroupedProduct(name), "coat"])
    explained = fast.explain(params, X)
    experts = [e for e in explained.quantized if e.is_product and e.path != "mixer"]
    assert {(e.path, e.kind) for e in experts} == {(path, name) for path in experts_of(params)}
    assert_near(fast, written, params)
    ragged = block(sorted_tokens(general_dot if params is TRANSPOSED else lax.ragged_dot))
    want = jax.jit(fp8jax.transform(ragged, "coat"))(params, X)
    np.testing.assert_allclose(jax.jit(fast)(params, X), want, rtol=1e-5, atol=1e-6)
    check = fast.check(params, X)
    assert check.first_failure is None
    assert {d.entry.path for d in check.deviations} >= experts_of(params)
    # A rule may leave them.
    left = fp8jax.transform(written, [fp8jax.GroupedProduct(name), fp8jax.Rule("gate|up|down", None), "coat"])
    assert [e.path for e in left.explain(params, X).quantized if e.is_product] == ["mixer"]


def test_square_matrices_of_a_named_function_are_as_the_rule_says():
    """Shapes do not show whether square matrices are (inputs, outputs)."""
    w, sizes = normal(7, EXPERTS, WIDTH, WIDTH), jnp.array([3, 0, 20, 9])
    fn = lambda p, x: jitted_dot(x, p["w"], sizes)  # noqa: E731
    fast = fp8jax.transform(fn, [fp8jax.GroupedProduct("jitted_dot", transposed=True), "te_current"])
    assert 0 < relative(fast({"w": w}, X), fn({"w": w}, X)) < 0.1


def test_a_name_that_no_grouped_product_has_is_refused():
    fn = block(sorted_tokens(own_dot))
    with pytest.raises(ValueError, match=r"no function called 'gmm' .*functions that do are own_dot"):
        fp8jax.transform(fn, [fp8jax.GroupedProduct("gmm"), "coat"]).explain(P, X)
    with pytest.raises(ValueError, match="no function called 'tanh'"):
        fp8jax.transform(lambda p, x: jnp.tanh(x @ p["mixer"]), ["coat", fp8jax.GroupedProduct("tanh")])(P, X)
    with pytest.raises(ValueError, match=r"function 'gmm\(' is no regular expression"):
        fp8jax.GroupedProduct("gmm(")


@pytest.mark.parametrize("recipe", ["te_delayed", "int8_fallback"])
def test_experts_under_a_scaling_with_a_state_are_left_with_a_reason(recipe):
    written = block(sorted_tokens(lax.ragged_dot))
    fast = fp8jax.transform(written, recipe)
    explained = fast.explain(P, X)
    assert [e.path for e in explained.quantized if e.is_product] == ["mixer"]
    assert {e.path for e in explained.skipped if "keeps one state" in e.reason} == {"gate", "up", "down"}
    states = fast.init(P, X)
    assert list(states) == ["mixer"]
    with pytest.warns(fp8jax.UnquantizedWarning):
        assert 0 < relative(fast(P, X, states=states), written(P, X)) < 0.1


def noisy(scores, other):
    return scores + jax.random.normal(jax.random.key(0), scores.shape) * jax.nn.softplus(other())


def limited_to_groups(scores, _):
    """The experts of the best groups alone, as in DeepSeek-V3."""
    grouped = jax.nn.sigmoid(scores).reshape(TOKENS, 8, -1)
    best = lax.top_k(lax.top_k(grouped, 2)[0].sum(-1), 4)[1]
    return jnp.where(jax.nn.one_hot(best, 8).sum(-2)[..., None] > 0, grouped, -jnp.inf).reshape(TOKENS, -1)


def balanced(scores, _):
    """Sinkhorn's iterations."""
    one = lambda _, m: m / m.sum(0, keepdims=True) / m.sum(1, keepdims=True)  # noqa: E731
    return lax.fori_loop(0, 3, one, jnp.exp(scores))


ROUTERS = {
    "softmax": lambda scores, _: jax.nn.softmax(scores),
    "sigmoid": lambda scores, _: jax.nn.sigmoid(scores),
    "sigmoid with a bias": lambda scores, _: jax.nn.sigmoid(scores) + jnp.arange(scores.shape[1]) / 64,
    "top_k before softmax": lambda scores, _: scores,
    "square root of softplus": lambda scores, _: jnp.sqrt(jax.nn.softplus(scores)),
    "exponentials": lambda scores, _: jnp.exp(scores),
    "noisy": noisy,
    "groups": limited_to_groups,
    "Sinkhorn": balanced,
    "expert choice": lambda scores, _: jax.nn.softmax(scores).T,
}


@pytest.mark.parametrize("count", [64, 128])
@pytest.mark.parametrize("name", ROUTERS)
def test_routers_of_many_experts_are_left(name, count):
    """No name says that it is a router, and it has more outputs than narrow products have."""
    p = {"in": P["mixer"], "a": normal(6, WIDTH, count), "b": normal(7, WIDTH, count), "out": normal(8, WIDTH, WIDTH)}

    def fn(p, x):
        h = jnp.tanh(x @ p["in"])
        weights, chosen = lax.top_k(ROUTERS[name](h @ p["a"], lambda: h @ p["b"]), CHOSEN)
        return (h @ p["out"]) * weights.sum() + chosen.sum()

    rows = fp8jax.transform(fn, "coat").explain(p, X)
    assert {e.path for e in rows.quantized if e.is_product} == {"in", "out"}
    routers = {"a", "b"} if name == "noisy" else {"a"}
    assert {e.path for e in rows.skipped if "router" in e.reason and " reads its result" in e.reason} == routers
