"""`fp8jax.transform`: functions of plain arrays and of other frameworks, rules, heads, settings, errors."""

import copy
import dataclasses
import functools
import pickle
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fp8jax
from fp8jax.ops.products import weights
from fp8jax.ops.products.weights import quantize_weight
from fp8jax.rewrite import operations
from fp8jax.rewrite import run as graph_run
from tests.distance import relative
from tests.programs import dots, residuals
from tests.rows import few

WIDTH, INNER = 32, 48
FP8 = ("float8_e4m3fn", "float8_e4m3fn")


def normal(i, *shape):
    return 0.2 * jax.random.normal(jax.random.key(i), shape)


P = {"up": normal(0, WIDTH, INNER), "down": normal(1, INNER, WIDTH)}
X = 5 * normal(2, 4, 8, WIDTH).astype(jnp.bfloat16)


def mlp(p, x):
    return jnp.tanh(x @ p["up"].astype(x.dtype)) @ p["down"].astype(x.dtype)


def eight_bit(fn, *args):
    return dots(fn, *args).count(FP8)


def loss(fn):
    return lambda p, *args: jnp.sum(jnp.sin(fn(p, *args).astype(jnp.float32)))


def assert_near(fn, *args, rules="te_current", products=2):
    """Gradients as far from those as written as 8 bits are, and this many products in 8 bits."""
    fast = fp8jax.transform(fn, rules)
    assert eight_bit(fast, *args) == products
    expected, actual = (jax.jit(jax.grad(loss(f)))(*args) for f in (fn, fast))
    assert 0 < relative(actual, expected) < 0.25
    return fast


def test_data_in_the_first_argument_is_refused_unless_params_says_so():
    swapped = lambda x, p: mlp(p, x)  # noqa: E731
    with pytest.raises(ValueError, match=r"shape \(4, 8, 32\), while argument 1 contains matrices. Pass params=1"):
        fp8jax.transform(swapped, "te_current").explain(X, P)
    with pytest.raises(ValueError, match="Pass params='p'"):
        fp8jax.transform(swapped, "te_current")(X, p=P)
    assert eight_bit(fp8jax.transform(swapped, "te_current", params=1), X, P) == 2
    # The first argument has the parameters: data are one array, or a tree without matrices, or `params` is passed.
    product = lambda w, batch: batch["x"] @ w  # noqa: E731
    assert eight_bit(fp8jax.transform(lambda w, x: x @ w, "te_current"), P["up"], X) == 1
    assert (
        eight_bit(fp8jax.transform(lambda w, batch: X @ w * batch["y"], "te_current"), P["up"], {"y": X[0, 0, :1]}) == 1
    )
    assert eight_bit(fp8jax.transform(product, "te_current", params=0), P["up"], {"x": X}) == 1


def test_layers_of_plain_arrays_in_a_scan():
    """Products with more axes by einsum, stacked parameters that are cast as one, an embedding and a head."""
    p = {"embed": normal(0, 17, WIDTH), "out": normal(1, WIDTH, 17)}
    p["layers"] = {"q": normal(2, 3, WIDTH, 2, 8), "o": normal(3, 3, 2, 8, WIDTH), "n": jnp.ones((3, WIDTH))}

    def layer(x, w):
        h = x.astype(jnp.float32)
        h = (h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-5)).astype(x.dtype) * w["n"]
        q = jnp.einsum("btd,dhc->bthc", h, w["q"])
        return x + jnp.einsum("bthc,hcd->btd", jnp.tanh(q), w["o"]), None

    def decoder(p, tokens):
        p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        return lax.scan(layer, p["embed"][tokens], p["layers"])[0] @ p["out"]

    tokens = jnp.arange(32).reshape(4, 8) % 17
    fast = assert_near(decoder, p, tokens, rules="coat")
    explained = fast.explain(p, tokens)
    assert [e.path for e in explained.quantized] == ["layers/n", "layers/q", "layers/o"]
    assert [(e.path, e.kind) for e in explained.skipped] == [("out", "dot_general")]
    assert "an output head: the function returns its result" in str(explained)
    # A loss inside of the function hides its outputs; its softmax finds the head.
    entropy = lambda p, t: -jnp.mean(jax.nn.log_softmax(decoder(p, t).astype(jnp.float32))[..., 0])  # noqa: E731
    (head,) = fp8jax.transform(entropy, "coat").explain(p, tokens).skipped
    assert (head.path, head.reason) == ("out", "a router, gate or head: softmax reads its result")


def test_parameters_on_the_left():
    """As Equinox has them, under vmap."""
    p = {"w": normal(0, INNER, WIDTH), "v": normal(1, WIDTH, INNER)}
    row = lambda p, x: p["v"] @ jnp.tanh(p["w"] @ x)  # noqa: E731
    fn = lambda p, x: jax.vmap(jax.vmap(row, (None, 0)), (None, 0))(p, x)  # noqa: E731
    assert_near(fn, p, X.astype(jnp.float32))
    actual = jax.jit(fp8jax.transform(fn, "te_current"))(p, X.astype(jnp.float32))
    hidden = jnp.tanh(fp8jax.linear(X.astype(jnp.float32), p["w"].T, recipe="te_current"))
    np.testing.assert_array_equal(actual, fp8jax.linear(hidden, p["v"].T, recipe="te_current"))


def branches(p, x):
    return lax.cond(x[0, 0, 0] > 0, lambda x: mlp(p, x), lambda x: x - mlp(p, x), x)


def repeated(p, x):
    return lax.fori_loop(0, 3, lambda _, x: x + mlp(p, x), x)


def checkpointed(p, x):
    return jax.checkpoint(mlp, policy=jax.checkpoint_policies.nothing_saveable)(p, x)


def spread(p, x):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(mlp, mesh=mesh, in_specs=(jax.P(), jax.P("d")), out_specs=jax.P("d"))(p, x)


def placed(p, x):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(mlp, out_shardings=jax.NamedSharding(mesh, jax.P("d")))(p, x)


@pytest.mark.parametrize(
    ("fn", "products"), [(branches, 4), (repeated, 2), (checkpointed, 2), (spread, 2), (placed, 2)]
)
def test_products_inside_other_programs(fn, products):
    assert_near(fn, P, X, products=products)


def test_an_inner_jit_keeps_its_name_shardings_and_donation():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    to = jax.NamedSharding(mesh, jax.P("d"))
    fn = lambda p, x: jax.jit(mlp, out_shardings=to, donate_argnums=1)(p, x * 2)  # noqa: E731
    fast = fp8jax.transform(fn, "te_current")
    (eqn,) = [e for e in jax.make_jaxpr(fast)(P, X).eqns if e.primitive.name == "jit"]
    assert eqn.params["name"] == "mlp"
    assert eqn.params["donated_invars"] == (False, False, True)
    assert eqn.params["out_shardings"] == (to,)
    assert eight_bit(fast, P, X) == 2


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_meshes_change_no_code(kind):
    """Batches on two devices, a parameter on the left, too: results as on one, gradients as of functions by hand."""

    def fn(p, x):
        return mlp(p, x) + jnp.einsum("dc,btc->btd", p["left"].astype(x.dtype), jnp.tanh(x))

    def by_hand(p, x):
        linear = functools.partial(fp8jax.linear, recipe="te_current")
        return linear(jnp.tanh(linear(x, p["up"])), p["down"]) + linear(jnp.tanh(x), p["left"].T)

    p, mesh = {**P, "left": normal(4, WIDTH, WIDTH)}, jax.make_mesh((2,), ("d",), axis_types=(kind,))
    fast = fp8jax.transform(fn, "te_current")
    want = jax.jit(fast)(p, X)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, jax.NamedSharding(mesh, spec)) for a, spec in ((p, jax.P()), (X, jax.P("d")))]
        assert eight_bit(fast, *placed) == 3
        np.testing.assert_array_equal(jax.device_get(jax.jit(fast)(*placed)), want)
        actual, expected = (jax.jit(jax.grad(loss(f)))(*placed) for f in (fast, by_hand))
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(actual), jax.device_get(expected))


def test_calls_that_nothing_changes_stay():
    """Other equations run unchanged: an inner jit without a product remains a jit."""
    fn = lambda p, x: jax.jit(jnp.cumsum)(jax.nn.silu(mlp(p, x)))  # noqa: E731
    names = [e.params.get("name") for e in jax.make_jaxpr(fp8jax.transform(fn, "te_current"))(P, X).eqns]
    assert {"silu", "cumsum"} <= set(names)


def test_rules_match_paths_of_parameters():
    p = {"a": P, "b": {"mlp": {"up": {"kernel": P["up"]}, "down": {"w": {"value": P["down"]}}}}}

    def fn(p, x):
        b = p["b"]["mlp"]
        return mlp({"up": b["up"]["kernel"], "down": b["down"]["w"]["value"]}, mlp(p["a"], x))

    first, *rest = (fp8jax.Rule("a/.*", None), fp8jax.Rule("b/mlp/up", "deepseek"), "te_current")
    explained = fp8jax.transform(fn, [first, *rest]).explain(p, X)
    assert [e.path for e in explained.skipped] == ["a/up", "a/down"]
    assert [(e.path, e.choice.linear.x) for e in explained.quantized] == [
        ("b/mlp/up", "e4m3:group128"),
        ("b/mlp/down", "e4m3"),
    ]
    # As Haiku names its parameters.
    haiku = {"net/~/up": {"w": P["up"], "b": jnp.zeros(INNER)}, "net/~/down": {"w": P["down"]}}
    net = lambda p, x: jnp.tanh(x @ p["net/~/up"]["w"] + p["net/~/up"]["b"]) @ p["net/~/down"]["w"]  # noqa: E731
    explained = fp8jax.transform(net, [fp8jax.Rule("net/~/up", None), "coat"]).explain(haiku, X.astype(jnp.float32))
    assert ([e.path for e in explained.skipped], [e.path for e in explained.quantized]) == (
        ["net/~/up"],
        ["net/~/down"],
    )
    with pytest.raises(ValueError, match="no layer is left for 'nothing' to match; the layers are a/down, a/up, b/mlp"):
        fp8jax.transform(fn, [fp8jax.Rule("nothing", "coat"), "coat"])(p, X)


def test_routers_are_left():
    p = {"choose": normal(0, WIDTH, 4), **P}

    def fn(p, x):
        best, _ = lax.top_k(jax.nn.softmax((x @ p["choose"].astype(x.dtype)).astype(jnp.float32)), 1)
        return mlp(p, x) * best.astype(x.dtype)

    explained = fp8jax.transform(fn, "te_current").explain(p, X)
    assert [(e.path, e.reason.partition(":")[0]) for e in explained.skipped] == [("choose", "a router, gate or head")]
    # A rule that names it has its way.
    with_rules = fp8jax.transform(fn, [fp8jax.Rule("choose", "te_current"), "te_current"])
    assert len(with_rules.explain(p, X).quantized) == 3


def test_a_part_that_returns_its_projections_is_quantized():
    fn = lambda p, x: (x @ p["up"].astype(x.dtype), x @ p["gate"].astype(x.dtype))  # noqa: E731
    p = {"up": P["up"], "gate": P["up"]}
    assert len(fp8jax.transform(fn, "te_current").explain(p, X).quantized) == 2


class Layer(NamedTuple):
    """A module as Equinox has them: arrays and settings are leaves of one tree."""

    w: jax.Array
    function: object
    scaled: bool

    def __call__(self, x, *, train):
        y = self.function(x @ self.w.astype(x.dtype))
        return y * 2 if train or self.scaled else y


def test_settings_are_static():
    """Booleans, functions and strings among the arguments; others by name."""
    layers = [Layer(P["up"], jnp.tanh, True), Layer(P["down"], jnp.sin, False)]
    traced = []

    def fn(layers, x, times, how="sum", *, train):
        traced.append(how)
        for layer in layers * times:
            x = layer(x, train=train)
        return getattr(jnp, how)(x)

    fast = fp8jax.transform(fn, "te_current", static="times")
    y = fast(layers, X, times=1, train=True)
    assert y == fast(layers, X, times=1, train=True)
    assert len(traced) == 1
    assert fast(layers, X, times=1, how="mean", train=False) != y
    assert len(fast.explain(layers, X, times=2, train=True).quantized) == 4
    # True and 1 are equal, and no setting is a number.
    assert fp8jax.transform(lambda p, x, n: mlp(p, x) * n, "te_current")(P, X, 1).shape == X.shape
    with pytest.raises(TypeError, match="an argument that is not an array must be hashable"):
        fp8jax.transform(lambda p, x, s: mlp(p, x), "te_current")(P, X, {1})


def test_gradients_that_a_function_takes_itself_are_as_written():
    """First-order meta-learning: the inner step is the model as written, the outer products are quantized."""

    def meta(p, x):
        grads = jax.grad(lambda p: jnp.sum(jnp.sin(mlp(p, x))))(p)
        return mlp(jax.tree.map(lambda w, g: w - 0.01 * g, p, grads), x)

    with pytest.raises(
        ValueError, match="no matmul of data with a parameter that a recipe can quantize; not quantized"
    ):
        fp8jax.transform(meta, "te_current")(P, X)
    both = lambda p, x: mlp(p, x) + meta(p, x)  # noqa: E731
    fast = fp8jax.transform(both, "te_current")
    assert eight_bit(fast, P, X) == 2
    force = lambda p, x: mlp(p, jax.grad(lambda x: jnp.sum(mlp(p, x)).astype(jnp.float32))(x))  # noqa: E731
    plan = fp8jax.transform(force, "te_current").explain(P, X)
    assert {e.reason[:18] for e in plan.skipped} == {"part of a gradient"}
    reasons = [e.reason.partition(" that the")[0] for e in fast.explain(P, X).skipped]
    assert reasons == [*["part of a gradient"] * 3, *(f"data modify or select the matrix {name}" for name in P)]
    expected, actual = (jax.grad(loss(f))(P, X) for f in (both, fast))
    assert 0 < relative(actual, expected) < 0.15


@pytest.mark.parametrize("axis", [0, 1])
def test_gains_of_weight_normalization_may_have_an_axis_of_one_element(axis):
    """As in Equinox and PyTorch, for matrices on either side."""

    def fn(p, x):
        norm = jnp.linalg.norm(p["v"], axis=axis, keepdims=True)
        w = p["v"] * p["g"] / norm
        return jnp.sin(jnp.einsum("td,dk->tk", x, w if axis == 0 else w.T))

    v = jax.random.normal(jax.random.key(5), (WIDTH, INNER) if axis == 0 else (INNER, WIDTH))
    p = {"v": v, "g": jnp.ones(jnp.sum(v, axis, keepdims=True).shape)}
    x = jax.random.normal(jax.random.key(6), (64, WIDTH))
    fast = fp8jax.transform(fn, "te_current")
    assert [row.path for row in fast.explain(p, x).quantized] == ["v"]
    expected, actual = (jax.grad(lambda p, f=f: jnp.mean((f(p, x) - 1) ** 2))(p) for f in (fn, fast))
    assert all(0 < relative(actual[name], expected[name]) < 0.15 for name in p)


def test_what_has_a_derivative_of_its_own_is_as_written():
    @jax.custom_vjp
    def product(w, x):
        return x @ w.astype(x.dtype)

    product.defvjp(
        lambda w, x: (product(w, x), None), lambda _, dy: (jnp.ones((WIDTH, INNER)), jnp.zeros(X.shape, X.dtype))
    )
    fn = lambda p, x: product(p["up"], x) @ p["down"].astype(x.dtype)  # noqa: E731
    fast = fp8jax.transform(fn, "te_current")
    (unquantized,) = fast.explain(P, X).skipped
    assert (unquantized.path, unquantized.reason) == ("up", "inside custom_vjp_call, which has a custom derivative")
    np.testing.assert_array_equal(jax.grad(loss(fast))(P, X)["up"], 1)


def test_frozen_parameters_get_no_gradient():
    fn = lambda p, x: mlp({**p, "up": lax.stop_gradient(p["up"])}, x)  # noqa: E731
    fast = fp8jax.transform(fn, "te_current")
    assert eight_bit(fast, P, X) == 2
    assert not jax.grad(loss(fast))(P, X)["up"].any()


def test_adapters_of_sixteen_bits_beside_a_base_of_eight():
    """LoRA by hand: base and adapter read one array."""
    p = {**P, "lora_a": normal(5, WIDTH, 4), "lora_b": normal(6, 4, INNER)}

    def fn(p, x):
        c = {k: w.astype(x.dtype) for k, w in p.items()}
        return jnp.tanh(x @ c["up"] + x @ c["lora_a"] @ c["lora_b"] * 2) @ c["down"]

    fast = assert_near(fn, p, X, rules=[fp8jax.Rule(".*lora.*", None), "coat"])
    assert [e.path for e in fast.explain(p, X).skipped] == ["lora_a", "lora_b"]


def test_matrices_that_are_scaled():
    """By a constant, or a parameter; the gradient of both is the product's."""
    p = {**P, "scale": jnp.full((INNER,), 0.5)}

    def fn(p, x):
        return jnp.tanh(x @ (0.5 * p["up"] * p["scale"]).astype(x.dtype)) @ (p["down"] / 2).astype(x.dtype)

    fast = assert_near(fn, p, X)
    assert [e.path for e in fast.explain(p, X).quantized] == ["up", "down"]
    # A sum of parameters is not a matrix that a rule can name.
    merged = lambda p, x: x @ (p["up"] + p["down"].T).astype(x.dtype) @ p["down"].astype(x.dtype)  # noqa: E731
    (unquantized,) = fp8jax.transform(merged, "coat").explain(P, X).skipped
    assert (unquantized.reason, unquantized.shape) == (
        "data are multiplied by a value computed from up and down",
        (WIDTH, INNER),
    )


STACK = normal(6, 3, WIDTH, WIDTH)


def turn(h, w):
    return jnp.tanh(h @ w.astype(h.dtype))


def counted(w, x):
    return lax.fori_loop(0, 3, lambda i, h: turn(h, w[i]), x)


def counted_while(w, x, n=3):
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, turn(c[1], w[c[0]])), (0, x))[1]


def over_places(w, x):
    return lax.scan(lambda h, i: (turn(h, w[i]), None), x, jnp.arange(3))[0]


def one_of_a_turn_before(w, x):
    """The place of a matrix depends on data."""
    step = lambda i, c: (c[0] + jnp.sum(c[1] > 9, dtype=jnp.int32), turn(c[1], w[c[0]]))  # noqa: E731
    return lax.fori_loop(0, 3, step, (jnp.argmax(x[0, 0, :3]), x))[1]


def test_members_of_a_batch_end_a_while_loop_at_their_own_iteration():
    counts = jnp.array([[0, 3], [1, 2]])
    keys = jax.random.split(jax.random.key(0), counts.size).reshape(counts.shape)

    def loop(w, x, n, key):
        state = 0, x, key
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, turn(c[1], w), jax.random.split(c[2])[0]), state)

    batched = jax.vmap(jax.vmap(loop, (None, 0, 0, 0)), (None, 0, 0, 0))
    x = X.reshape(2, 2, 8, WIDTH)
    fast = fp8jax.transform(batched, "te_current")
    assert eight_bit(fast, STACK[0], x, counts, keys) == 1
    ends, y, last_keys = jax.jit(fast)(STACK[0], x, counts, keys)
    np.testing.assert_array_equal(ends, counts)
    for i in np.ndindex(*counts.shape):
        expected, key = np.float32(x[i]), keys[i]
        for _ in range(counts[i]):
            expected, key = np.tanh(expected @ np.float32(STACK[0])), jax.random.split(key)[0]
        assert relative(y[i], expected) < 0.1
        assert last_keys[i] == key


@pytest.mark.parametrize("fn", [counted, over_places, one_of_a_turn_before])
def test_matrices_that_a_place_picks(fn):
    fast = assert_near(fn, STACK, X, products=1)
    (entry,) = fast.explain(STACK, X).quantized
    assert entry.shape == STACK.shape


def test_matrices_that_a_loop_without_a_length_picks():
    fast = fp8jax.transform(counted_while, [fp8jax.Rule(".*", "te_current")])
    assert eight_bit(fast, STACK, X, 2) == 1
    actual, expected = (fast(STACK, X, 3), fp8jax.transform(counted, [fp8jax.Rule(".*", "te_current")])(STACK, X))
    np.testing.assert_array_equal(actual, expected)
    # A scaling with a state would share it between all matrices.
    delayed = fp8jax.transform(counted, [fp8jax.Rule(".*", "te_delayed")])
    assert delayed.init(STACK, X) == {}
    assert "selects its matrix by a computed index" in " ".join(str(delayed.explain(STACK, X)).split())


def test_a_row_that_data_pick_is_data():
    fn = lambda p, x, i: mlp(p, p["table"][i] + x)  # noqa: E731
    p = {**P, "table": normal(7, 9, WIDTH)}
    assert_near(fn, p, X[0], jnp.int32(3))
    alone = loss(lambda p, i: mlp(p, p["table"][i].astype(jnp.bfloat16)))
    assert eight_bit(fp8jax.transform(alone, "te_current"), p, jnp.int32(3)) == 2
    alone = lambda p, x, i: mlp(p, x) + (x @ p["table"][i].astype(x.dtype))[..., None]  # noqa: E731
    assert eight_bit(fp8jax.transform(alone, "te_current"), p, X, jnp.int32(3)) == 2
    # So are rows, next to another parameter.
    rows = loss(lambda p, i: mlp(p, lax.dynamic_slice_in_dim(p["table"], i, 4).astype(jnp.bfloat16)))
    assert eight_bit(fp8jax.transform(rows, "te_current"), p, jnp.int32(3)) == 2


@pytest.mark.parametrize(
    ("matrix", "why"),
    [
        (lambda p, x: p["up"] * (x[0, 0, :, None] > 0), "data modify or select the matrix up"),
        (lambda p, x: p["up"] - jnp.outer(x[0, 0], x[0, 1, :1]), "data modify or select the matrix up"),
        (lambda p, x: p["stack"][jnp.argmax(x[:, 0], -1) % 3], "data modify or select the matrix stack"),
        (lambda p, x: jnp.maximum(p["up"], p["down"].T), "data are multiplied by a value computed from up and down"),
        (lambda p, x: jnp.ones((WIDTH, 3)), "data are multiplied by a value computed from constants"),
    ],
)
def test_matrices_that_no_rule_can_name_are_told(matrix, why):
    p = {**P, "stack": normal(6, 3, WIDTH, INNER)}
    product = jax.checkpoint(lambda x, w: x @ w.astype(x.dtype))
    fn = lambda p, x: jnp.sum(jnp.sin(product(x, matrix(p, x)))) + mlp(p, x)  # noqa: E731
    explained = fp8jax.transform(fn, "te_current").explain(p, X)
    assert [e.reason for e in explained.skipped] == [why]
    assert [e.path for e in explained.quantized] == ["up", "down"]


def test_products_of_data_are_nothing_to_tell_of():
    p = {**P, "table": normal(7, 8, WIDTH)}

    def fn(p, x):
        rows, places = p["table"][jnp.argmax(x, -1) % 8], x[0] + p["table"]
        return mlp(p, (x @ rows.mT + places @ places.T).astype(x.dtype) @ x)

    assert not fp8jax.transform(fn, "te_current").explain(p, X).skipped


def test_what_turns_of_a_loop_replace_is_data():
    """Except counters: a state that starts with zeros, and a token that the previous iteration has chosen."""
    p = {"in": normal(0, WIDTH, WIDTH), "same": normal(1, WIDTH, WIDTH), "table": normal(2, 9, WIDTH), **P}
    step = lambda p: lambda h, x: (jnp.tanh(x @ p["in"] + h @ p["same"]), None)  # noqa: E731
    recurrent = lambda p, x: lax.scan(step(p), jnp.zeros((8, WIDTH)), x)[0]  # noqa: E731
    assert eight_bit(fp8jax.transform(recurrent, "te_current"), p, X.astype(jnp.float32)) == 2

    def greedy(p, length):
        choose = lambda token: jnp.argmax(jnp.tanh(mlp(p, p["table"][token])))  # noqa: E731
        return lax.fori_loop(0, length, lambda _, token: choose(token), jnp.int32(0))

    assert eight_bit(fp8jax.transform(greedy, [fp8jax.Rule("up|down", "te_current")]), p, 4) == 2


def scanned(w, x):
    return lax.scan(lambda h, w: (turn(h, w.T), None), x, w)[0]


def on_the_left(w, x):
    return lax.scan(lambda h, w: (jnp.tanh(jnp.einsum("od,btd->bto", w.astype(h.dtype), h)), None), x, w)[0]


def parts(w, x):
    return turn(turn(x, w[1].T), lax.slice_in_dim(w[0], 0, 20, axis=1)) @ jnp.split(w[2, :20].astype(x.dtype), 2, 1)[1]


@pytest.mark.usefixtures("inspected")
@pytest.mark.parametrize(
    ("fn", "recipe"),
    few(
        [(fn, recipe) for fn in (scanned, on_the_left, parts) for recipe in ("te_current", "te_delayed")]
        + [(counted, "te_current")],
        (scanned, "te_delayed"), (on_the_left, "te_current"), (parts, "te_current"), (counted, "te_current"),
    ),
)  # fmt: skip
def test_of_a_part_or_layout_of_a_parameter_the_parameter_is_kept(fn, recipe):
    """The backward pass recomputes the matrix: no other array of weights is saved, unlike in 16-bit training."""
    x = X[:3, :5]
    fast = fp8jax.transform(fn, [fp8jax.Rule(".*", recipe)])
    with_states = functools.partial(fast, states=fast.init(STACK, x))
    saved = {shape for _, shape in residuals(lambda w: loss(with_states)(w, x), STACK) if WIDTH in shape}
    assert {shape for shape in saved if not {3, 5} <= {*shape} and 15 not in shape} == {STACK.shape}
    expected, actual = (jax.grad(loss(f))(STACK, x) for f in (fn, with_states))
    assert 0 < relative(actual, expected) < 0.25


def looped(unroll, around=lambda turn: turn):
    step = around(lambda h, w: (turn(h, w), None))
    return lambda w, x: lax.scan(step, x, w, unroll=unroll)[0]


@pytest.mark.parametrize(
    ("fn", "gpu", "written_out"),
    [(looped(True), True, True), (looped(3), True, True), (looped(2), True, False), (looped(1), True, False),
     (looped(True, jax.checkpoint), True, False), (looped(True), False, False), (parts, True, False)],
)  # fmt: skip
def test_turns_written_out_on_a_gpu_make_both_copies_of_a_weight_at_once(fn, gpu, written_out, monkeypatch):
    """Equal bits. The row of the stacked weight is not saved, and its gradient is computed in its iteration."""
    fast = fp8jax.transform(fn, [fp8jax.Rule(".*", "te_current")])

    def run():
        program = jax.make_jaxpr(jax.grad(loss(lambda *args: fast(*args))))(STACK, X)
        return program, jax.jit(jax.grad(loss(lambda *args: fast(*args))))(STACK, X)

    before, expected = run()
    monkeypatch.setattr(graph_run, "on_cuda", lambda: gpu)
    monkeypatch.setattr(graph_run, "on_one_device", lambda: True)
    calls = []
    monkeypatch.setattr(
        weights, "quantize_weight", lambda *args, **how: calls.append(how) or quantize_weight(*args, **how)
    )
    after, actual = run()
    np.testing.assert_array_equal(actual, expected)
    assert bool(calls) == written_out
    assert (str(after).count("optimization_barrier") > str(before).count("optimization_barrier")) == written_out


def as_they_lie(p, x):
    return jnp.tanh(x @ p["up"].astype(x.dtype)) @ p["down"].astype(x.dtype)


def as_outputs_by_inputs(p, x):
    return jnp.tanh(x @ p["down"].astype(x.dtype).T) @ p["up"].astype(x.dtype).T


def in_a_loop(p, x):
    return lax.scan(lambda x, _: (as_they_lie(p, x), None), x, None, 2)[0]


@pytest.mark.usefixtures("inspected")
@pytest.mark.parametrize(
    ("fn", "recipe", "saved", "made"),
    [
        (as_they_lie, "te_current", 2, 2), (as_outputs_by_inputs, "te_current", 2, 2),
        (jax.checkpoint(as_they_lie), "te_current", 0, 2), (in_a_loop, "te_current", 0, 0),
        (as_they_lie, "te_delayed", 0, 0),
    ],
)  # fmt: skip
def test_outside_of_loops_both_copies_of_a_weight_are_made_at_once_on_a_gpu(fn, recipe, saved, made, monkeypatch):
    """Equal bits. One copy of each is saved, in either layout, and only if a gradient is computed."""
    fast = fp8jax.transform(fn, [fp8jax.Rule(".*", recipe)])
    with_states = functools.partial(fast, states=fast.init(P, X))
    sizes = {P["up"].shape, P["down"].shape}

    def run():
        codes = [shape for dtype, shape in residuals(with_states, P, X) if dtype == "uint8" and shape in sizes]
        return len(codes), jax.jit(jax.grad(lambda *args: loss(with_states)(*args), (0, 1)))(P, X)

    before, expected = run()
    monkeypatch.setattr(weights, "on_cuda", lambda: True)
    monkeypatch.setattr(weights, "on_one_device", lambda: True)
    after, actual = run()
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert after - before == saved
    passes = []
    count = lambda *args, **how: passes.append(how) or quantize_weight(*args, **how)  # noqa: E731
    monkeypatch.setattr(weights, "quantize_weight", count)
    jax.eval_shape(lambda *args: with_states(*args), P, X)
    assert not passes
    jax.eval_shape(jax.grad(lambda *args: loss(with_states)(*args)), P, X)
    assert len(passes) == made
    # A loop around the call is not part of the plan.
    turns = lambda p, x: lax.scan(lambda x, _: (with_states(p, x), None), x, None, 2)[0]  # noqa: E731
    jax.eval_shape(jax.grad(loss(turns)), P, X)
    assert len(passes) > made or not made


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_parameters_that_are_stored_in_fewer_bits(dtype):
    """A base of a fine-tuned model: what is multiplied is its value in 16 bits, times a scale."""
    p = {"up": (40 * P["up"]).astype(dtype), "scale": jnp.full((INNER,), 1 / 40), "down": P["down"]}

    def fn(p, x):
        base = lax.stop_gradient(p["up"].astype(x.dtype)) * p["scale"].astype(x.dtype)
        return jnp.tanh(x @ base) @ p["down"].astype(x.dtype)

    fast = fp8jax.transform(fn, "te_current")
    assert eight_bit(fast, p, X) == 2
    run = lambda f: jax.grad(lambda q: loss(f)({**p, **q}, X))({"down": p["down"], "scale": p["scale"]})  # noqa: E731
    assert 0 < relative(run(fast), run(fn)) < 0.25
    plain = lambda p, x: x @ p["up"].astype(x.dtype) @ p["down"].astype(x.dtype)  # noqa: E731
    assert relative(fp8jax.transform(plain, "te_current")(p, X), plain(p, X)) < 0.15


def test_programs_that_are_not_read_are_told():
    @jax.custom_batching.custom_vmap
    def product(w, x):
        return x @ w.astype(x.dtype)

    product.def_vmap(lambda size, batched, w, x: (product(w, x), True))
    fast = fp8jax.transform(lambda p, x: product(p["up"], x) @ p["down"].astype(x.dtype), "te_current")
    (unquantized,) = fast.explain(P, X).skipped
    assert (unquantized.path, unquantized.reason) == ("up", "inside custom_vmap_call, which is not supported")


def test_experts_by_groups_of_tokens():
    """`jax.lax.ragged_dot` of sorted tokens: the router is not quantized, and recomputed activations are not saved."""
    p = {"choose": normal(0, WIDTH, 3), "up": normal(1, 3, WIDTH, INNER), "down": normal(2, 3, INNER, WIDTH)}

    def experts(p, x):
        tokens = x.reshape(-1, WIDTH)
        expert = jnp.argmax(tokens @ p["choose"].astype(x.dtype), -1)
        order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=3)
        h = jax.nn.silu(lax.ragged_dot(tokens[order], p["up"].astype(x.dtype), sizes))
        return lax.ragged_dot(h, p["down"].astype(x.dtype), sizes)[jnp.argsort(order)].reshape(x.shape)

    fast = fp8jax.transform(experts, "coat")
    explained = fast.explain(p, X)
    assert [e.path for e in explained.quantized if e.is_product] == ["up", "down"]
    assert {e.reason for e in explained.quantized if e.is_product} == {"the recipe"}
    assert [e.path for e in explained.skipped] == ["choose"]
    expected, actual = (jax.jit(jax.grad(loss(f)))(p, X) for f in (experts, fast))
    assert 0 < relative(actual, expected) < 0.25
    saved = residuals(jax.jit(functools.partial(fast, p)), X)
    assert {d for d, s in saved if s == (32, INNER)} == {"uint8"}


def test_experts_as_one_batched_product():
    p = {"up": normal(1, 3, WIDTH, INNER), "down": normal(2, 3, INNER, WIDTH)}

    def experts(p, x):
        h = jax.nn.silu(jnp.einsum("btd,edf->ebtf", x, p["up"].astype(x.dtype)))
        return jnp.sum(jnp.einsum("ebtf,efd->ebtd", h, p["down"].astype(x.dtype)), 0)

    assert_near(experts, p, X, rules="coat")


@dataclasses.dataclass(eq=False)
class Pointwise:
    """A convolution of one pixel, added as CONTRIBUTING describes."""

    linear: object
    data: object
    weight: object
    canonical_data: object

    @classmethod
    def supports(cls, node, side):
        plain = node.eqn.params["dimension_numbers"] == lax.ConvDimensionNumbers(
            (0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2)
        )
        return side == 1 and plain and node.operands[1].shape[:2] == (1, 1)

    @classmethod
    def replace_product(cls, p):
        p.node.operands = [p.data, p.weight.stored]
        p.node.operation = cls(p.choice.linear, p.data, p.weight.stored, p.data)

    @property
    def num_inputs(self):
        return self.data.shape[-1]

    def run(self, interpreter, node):
        x, w = interpreter.array(self.data), interpreter.array(self.weight)
        return [fp8jax.linear(x, w[0, 0], recipe=self.linear)]


def test_a_product_of_someone_elses(monkeypatch):
    numbers = ("NHWC", "HWIO", "NHWC")
    p = {"first": normal(0, 1, 1, WIDTH, INNER), "second": normal(1, 3, 3, INNER, WIDTH)}

    def convolved(p, x):
        for name in p:
            x = lax.conv_general_dilated(
                jnp.tanh(x), p[name].astype(x.dtype), (1, 1), "SAME", dimension_numbers=numbers
            )
        return x

    image = X.reshape(1, 4, 8, WIDTH)
    with pytest.raises(ValueError, match=r"first \(convolutions are not quantized\)"):
        fp8jax.transform(convolved, "te_current")(p, image)
    monkeypatch.setitem(operations.NON_DOT_OPERATIONS, "conv_general_dilated", Pointwise)
    fast = assert_near(convolved, p, image, products=1)
    explained = fast.explain(p, image)
    (entry,), (unquantized,) = explained.quantized, explained.skipped
    assert (entry.path, entry.residual_bytes) == ("first", image.size + 4)
    assert unquantized.reason == "this form of conv_general_dilated is not supported"
    assert fast.check(p, image).first_failure is None


@pytest.mark.usefixtures("young_heap")
def test_effects_leaks_and_lines():
    def fn(p, x):
        jax.debug.print("seen")
        return mlp(p, x)

    fast = fp8jax.transform(fn, "te_current")
    with jax.checking_leaks():
        jax.make_jaxpr(jax.grad(loss(fast)))(P, X)
    assert "debug_callback" in str(jax.make_jaxpr(fast)(P, X)) or "debug_print" in str(jax.make_jaxpr(fast)(P, X))
    lines = {e.line for e in fast.explain(P, X).quantized}
    assert all(re.search(r"test_transform.py:\d+ \(mlp\)", line) for line in lines)
    # The line of a product that is replaced is its products' own, and its scope.
    lowered = jax.jit(jax.named_scope("block")(fast)).lower(P, X)
    assert re.search(r"block/fp8jax:e4m3\*e4m3/(\S+/)?dot_general", lowered.compile().as_text())
    assert lowered.as_text(debug_info=True).count('test_transform.py"') > 2


def test_lines_of_functions_that_jax_has_traced_before():
    def fn(p, x):
        p = {name: w.astype(x.dtype) for name, w in p.items()}
        x = jax.nn.silu(x @ p["up"]) @ p["down"]
        return jax.nn.silu(x @ p["up"]) @ p["down"]

    first = fn.__code__.co_firstlineno
    lines = [e.line for e in fp8jax.transform(fn, "coat").explain(P, X).entries if "silu" in e.kind]
    assert [int(line.split(":")[1].split()[0]) - first for line in lines] == [2, 3]


def test_closures_over_traces():
    """A function that closes over traced values has a plan for one call."""

    def outer(x, scale):
        return fp8jax.transform(lambda p, x: mlp(p, x) * scale, "te_current")(P, x)

    for scale in (1.0, 2.0):
        actual = jax.jit(outer)(X, jnp.bfloat16(scale))
        np.testing.assert_array_equal(actual, jax.jit(fp8jax.transform(mlp, "te_current"))(P, X) * jnp.bfloat16(scale))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense:
    """A module that is a pytree, as those of Equinox."""

    kernel: jax.Array

    def __call__(self, x):
        return x @ self.kernel


def test_bad_input():
    with pytest.raises(
        ValueError, match=r"up asks for precision .*HIGHEST.* does not support, at .*test_transform.py:\d+"
    ):
        fp8jax.transform(lambda p, x: jnp.dot(x, p["up"].astype(x.dtype), precision="highest"), "coat")(P, X)
    with pytest.raises(TypeError, match="expects a function of parameters and data, got 3"):
        fp8jax.transform(3, "coat")
    # An Equinox module is called with data only: its vector would be taken for the parameter of a matmul.
    for transform in (fp8jax.transform, fp8jax.filter_transform):
        with pytest.raises(TypeError, match=r"got Dense, which contains its parameters.*lambda model, x: model\(x\)"):
            transform(Dense(jnp.ones((64, 64))), "coat")
    with pytest.raises(ValueError, match="coats"):
        fp8jax.transform(mlp, "coats")
    with pytest.raises(ValueError, match="has no matmul of data with a parameter"):
        fp8jax.transform(lambda p, x: x, "coat")(P, X)
    with pytest.raises(ValueError, match="params=3"):
        fp8jax.transform(mlp, "coat", params=3)(P, X)
    with pytest.raises(ValueError, match=r"up \(its parameter is complex64\) at"):
        fp8jax.transform(lambda p, x: x @ p["up"], "coat")({"up": P["up"].astype(jnp.complex64)}, X)
    with pytest.raises(ValueError, match="has no matmul of data with a parameter") as error:
        fp8jax.transform(lambda x: mlp(P, x), "coat")(X)
    assert "closes over 2 matrices" in "".join(error.value.__notes__)


def test_a_copy_computes_the_same_and_knows_no_programs():
    """Also after a call, when it has compiled programs, which cannot be copied."""
    fast = fp8jax.transform(mlp, "te_current")
    expected = fast(P, X)
    for copied in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert not copied._calls
        np.testing.assert_array_equal(copied(P, X), expected)


def test_several_arguments_of_parameters():
    fn = lambda base, extra, x: mlp({**base, **extra}, x)  # noqa: E731
    fast = fp8jax.transform(fn, [fp8jax.Rule("1/.*", None), "te_current"], params=(0, 1))
    explained = fast.explain({"up": P["up"]}, {"down": P["down"]}, X)
    assert ([e.path for e in explained.quantized], [e.path for e in explained.skipped]) == (["0/up"], ["1/down"])


def test_nothing_is_computed_to_explain():
    kinds = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (P, X))
    assert len(fp8jax.transform(mlp, "coat").explain(*kinds).quantized) == 2


def test_fewer_bytes_are_kept():
    """Codes instead of 16-bit inputs, and no recomputed activations."""
    fn = lambda p, x: jax.nn.silu(x @ p["up"].astype(x.dtype)) @ p["down"].astype(x.dtype)  # noqa: E731
    saved = lambda f: [r for r in residuals(jax.jit(functools.partial(f, P)), X) if len(r[1]) > 2]  # noqa: E731
    assert {d for d, s in saved(fn) if s[-1] == INNER} == {"bfloat16"}
    assert {d for d, s in saved(fp8jax.transform(fn, "coat")) if s[-1] == INNER} == {"uint8"}


def asks(p, x):
    """Like umT5: products in fp32, one of them in a loop."""
    step = lambda h, w: (jnp.dot(h, w, precision="highest"), None)  # noqa: E731
    h = jnp.einsum("btc,cd->btd", lax.scan(step, x, p["loop"])[0], p["up"], precision=lax.Precision.HIGH)
    return jnp.sum(jnp.tanh(h) @ p["down"])


def test_all_products_that_ask_for_a_precision_are_in_one_error_and_explain_marks_them():
    p, x = P | {"loop": normal(9, 3, WIDTH, WIDTH)}, X.astype(jnp.float32)
    fast = fp8jax.transform(asks, "te_current")
    for call in (fast, fast.init, jax.jit(fast), jax.grad(fast)):
        with pytest.raises(ValueError, match="2 matmuls ask for a precision") as error:
            call(p, x)
        form = r"(\w+) asks for precision [^;]*?\.(\w+)\)?, at \S*test_transform.py:\d+"
        lines = re.findall(form, str(error.value))
        assert lines == [("loop", "HIGHEST"), ("up", "HIGH")]
        assert "fp8jax.Rule('loop|up', None)" in str(error.value)
    explained = fast.explain(p, x)
    assert [e.path for e in explained.quantized] == ["down"]
    assert [(e.path, e.is_unsupported) for e in explained.skipped] == [("loop", True), ("up", True)]
    assert all("asks for precision" in e.reason for e in explained.skipped)
    assert len(fp8jax.transform(asks, [fp8jax.Rule("loop|up", None), "te_current"]).explain(p, x).quantized) == 1
    many = {f"layers/{i}/up": P["up"] for i in range(6)}
    six = lambda p, x: sum(jnp.sum(jnp.dot(x, w, precision="highest")) for w in p.values())  # noqa: E731
    with pytest.raises(ValueError, match=re.escape(r"Rule('layers/\\d+/up', None)")):
        fp8jax.transform(six, "te_current")(many, X)
