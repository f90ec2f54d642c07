"""Experts as users write them: each form is quantized, or listed with a reason while the rest is quantized."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fp8jax
from fp8jax.ops.dispatch.choice import target
from fp8jax.ops.products import weights
from tests.distance import relative
from tests.programs import residuals
from tests.rewrite import experts
from tests.rewrite.experts import CHOSEN, EXPERTS, INNER, JOINED, TOKENS, TRANSPOSED, WIDTH, P, X, normal
from tests.rows import covering, few

WRITINGS = {
    "ragged_dot": (experts.sorted_tokens(lax.ragged_dot), P),
    "gate and up as one": (experts.sorted_tokens(lax.ragged_dot), JOINED),
    "transposed before": (experts.sorted_tokens(experts.swapped_dot), TRANSPOSED),
    "ragged_dot_general": (experts.sorted_tokens(experts.general_dot), TRANSPOSED),
    "preferred_element_type": (experts.sorted_tokens(experts.float32_dot), P),
    "one-hot": (experts.one_hot, P),
    "dense": (experts.dense, P),
    "vmap": (experts.mapped, P),
    "scan": (experts.scanned, P),
    "loop": (experts.looped, P),
    "switch": (experts.switched, P),
}
LEFT = {
    "custom_vjp": (
        experts.sorted_tokens(experts.own_dot),
        P,
        "inside custom_vjp_call, which has a custom derivative",
    ),
    "gathered": (experts.gathered, P, "data modify or select the matrix"),
    "indexed": (experts.indexed, P, "data modify or select the matrix"),
    "switched tokens": (experts.switch_tokens, P, "data modify or select the matrix"),
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
    """Asserts that result and gradients differ from the unquantized ones by no more than 8-bit errors."""
    (y, (grads, dx)), (expected, (reference, wanted_dx)) = (
        values_and_gradients(each, params) for each in (fn, written)
    )
    assert 0 < relative(y, expected) < 0.1
    assert 0 < relative(dx, wanted_dx) < 0.2
    for name in params:
        assert relative(grads[name], reference[name]) < 0.25, name


@pytest.mark.parametrize(("name", "recipe"), covering(WRITINGS, ["coat", "deepseek"]))
def test_a_writing_is_in_8_bits(name, recipe):
    experts_of_block, params = WRITINGS[name]
    explained = fp8jax.transform(experts.block(experts_of_block), recipe).explain(params, X)
    assert {e.path for e in explained.quantized if e.is_product} == {"mixer", *experts_of(params)}
    assert {e.path: e.reason for e in explained.skipped if e.is_product} == {"router": "a router"}
    assert not explained.unquantized_note
    # The numbers of chosen experts are clipped at 0 by jnp.bincount, which is no activation.
    assert "relu" not in {e.kind for e in explained.rows}


@pytest.mark.parametrize(
    ("name", "recipe"),
    few(
        [(name, recipe) for name in WRITINGS for recipe in ("coat", "deepseek", "coat_fast")],
        *[("ragged_dot_general", "coat"), ("one-hot", "deepseek"), ("dense", "coat"), ("scan", "coat_fast")],
    ),
)
def test_values_and_gradients_are_near_those_as_written(name, recipe):
    written, params = experts.block(WRITINGS[name][0]), WRITINGS[name][1]
    assert_near(fp8jax.transform(written, recipe), written, params)


@pytest.mark.parametrize("name", few(["ragged_dot", "one-hot", "dense", "vmap"], "one-hot", "dense"))
def test_an_expert_of_small_weights_has_scales_of_its_own(name):
    written = WRITINGS[name][0]
    params = P | {"up": P["up"] * jnp.array([1, 1e-5, 1, 1])[:, None, None]}
    (_, (grads, dx)), (_, (expected, wanted_dx)) = (
        values_and_gradients(fn, params) for fn in (fp8jax.transform(written, "coat"), written)
    )
    for weight in ("gate", "up", "down"):
        errors = [relative(a, b) for a, b in zip(grads[weight], expected[weight], strict=True)]
        assert 0 < errors[1] < 2 * np.mean([errors[0], *errors[2:]]), weight
    assert relative(dx, wanted_dx) < 0.2


@pytest.mark.usefixtures("inspected")
@pytest.mark.parametrize(("recipe", "form"), [("jetfire", "td,edf->etf"), ("int8_fallback", "etd,edf->etf")])
def test_gradients_of_equal_experts_are_rounded_by_noise_of_their_own(recipe, form):
    """Shared and separate tokens, with and without states. The second matmul is in 16 bits and adds no noise."""
    up, x = jnp.stack([normal(1, 64, 32)] * 2), normal(2, 64, 64)
    down, x = jnp.ones((2, 32, 4)), jnp.stack([x, x]) if form.startswith("e") else x

    def loss(p, x):
        return jnp.sum(jnp.sin(jnp.einsum("etf,efd->etd", jnp.tanh(jnp.einsum(form, x, p["up"])), p["down"])))

    fast = fp8jax.transform(loss, [fp8jax.Rule("down", None), recipe])
    states = fast.init({"up": up, "down": down}, x)
    dw = jax.jit(jax.grad(lambda up: fast({"up": up, "down": down}, x, states=states)))(up)
    assert 0 < relative(dw[0], dw[1]) < 0.1


def test_tokens_are_quantized_before_they_are_gathered_and_the_glu_between_products_in_one_pass():
    """On a GPU; its kernels' references run here."""
    written = experts.block(experts.sorted_tokens(lax.ragged_dot))
    fast, rows = fp8jax.transform(written, "coat"), X.shape[0] * experts.CHOSEN
    with target(capability=90):
        program = str(jax.make_jaxpr(jax.grad(lambda p: jnp.sum(fast(p, X))))(JOINED))
        saved = residuals(lambda p, x: fast(p, x), JOINED, X)
        assert_near(fast, written, JOINED)
    assert program.count("_quantize_cotangents") == 1
    saved_codes = [shape for dtype, shape in saved if dtype == "uint8" and len(shape) == 2 and shape[0] != X.shape[0]]
    assert saved_codes == [(rows, 2 * experts.INNER)]


@pytest.mark.parametrize("params", [P, JOINED], ids=["apart", "as one"])
def test_tokens_and_weights_of_experts_are_quantized_once(params, monkeypatch):
    """On one GPU, codes for dgrad are computed with those for the forward matmul, and saved instead of the weights."""
    monkeypatch.setattr(weights, "on_one_device", lambda: True)
    fast = fp8jax.transform(experts.block(experts.sorted_tokens(lax.ragged_dot)), "coat")
    with target(capability=90):
        saved = residuals(lambda p, x: fast(p, x), params, X)
    assert (
        saved.count(("uint8", X.shape)) == 3
    )  # the inputs of the mixer and of the experts, and a weight of this shape
    for name in experts_of(params):
        assert saved.count(("uint8", params[name].shape)) >= 1
        assert ("float32", params[name].shape) not in saved


def test_codes_of_tokens_are_saved_once_for_all_experts():
    fast = fp8jax.transform(experts.dense, "coat")
    saved = residuals(lambda p, x: fast(p, x), P, X)
    assert [shape for dtype, shape in saved if dtype == "uint8" and shape[-1:] == (WIDTH,)] == [X.shape]


@pytest.mark.parametrize("name", LEFT)
def test_a_writing_that_is_left_has_its_reason_and_line_and_the_rest_is_in_8_bits(name):
    layer, params, reason = LEFT[name]
    written = experts.block(layer)
    fast = fp8jax.transform(written, "coat")
    explained = fast.explain(params, X)
    assert [e.path for e in explained.quantized if e.is_product] == ["mixer"]
    unquantized = [e for e in explained.skipped if e.path != "router"]
    assert {e.path for e in unquantized} == experts_of(params)
    assert all(e.reason.startswith(reason) and experts.__file__ in e.line for e in unquantized)
    assert reason in explained.unquantized_note
    with pytest.warns(fp8jax.UnquantizedWarning, match="stay in 16 bits"):
        y = fast(params, X)
    assert 0 < relative(y, written(params, X)) < 0.1
    # Nothing is left for the recipe without the product before: the function runs as written.
    alone = fp8jax.transform(layer, [fp8jax.Rule("gate", "deepseek"), "coat"])
    with pytest.warns(fp8jax.UnquantizedWarning, match="all of the FLOPs"):
        np.testing.assert_allclose(alone(params, X), layer(params, X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dot", "params"), [(experts.own_dot, P), (experts.jitted_dot, TRANSPOSED)], ids=["custom_vjp", "jit"]
)
def test_a_function_that_the_rules_name_is_a_grouped_product(dot, params):
    written, name = experts.block(experts.sorted_tokens(dot)), dot.__name__
    fast = fp8jax.transform(written, [fp8jax.GroupedProduct(name), "coat"])
    explained = fast.explain(params, X)
    named = [e for e in explained.quantized if e.is_product and e.path != "mixer"]
    assert {(e.path, e.kind) for e in named} == {(path, name) for path in experts_of(params)}
    ragged = experts.block(experts.sorted_tokens(experts.general_dot if params is TRANSPOSED else lax.ragged_dot))
    expected = jax.jit(fp8jax.transform(ragged, "coat"))(params, X)
    np.testing.assert_allclose(jax.jit(fast)(params, X), expected, rtol=1e-5, atol=1e-6)
    # A rule may leave them.
    without_a_recipe = fp8jax.transform(
        written, [fp8jax.GroupedProduct(name), fp8jax.Rule("gate|up|down", None), "coat"]
    )
    assert [e.path for e in without_a_recipe.explain(params, X).quantized if e.is_product] == ["mixer"]


@pytest.mark.slow
def test_a_named_function_is_checked_and_differentiated():
    written = experts.block(experts.sorted_tokens(experts.own_dot))
    fast = fp8jax.transform(written, [fp8jax.GroupedProduct("own_dot"), "coat"])
    assert_near(fast, written, P)
    check = fast.check(P, X)
    assert check.first_failure is None
    assert {d.entry.path for d in check.deviations} >= {"gate", "up", "down"}


def test_a_grouped_product_is_checked_with_states_and_without():
    """A history of one expert far below its input saturates its codes."""
    sizes, p = jnp.array([3, 0, 20, 9]), {"up": P["up"]}
    fast = fp8jax.transform(lambda p, x: lax.ragged_dot(x, p["up"], sizes), "te_delayed")
    states = fast.init(p, X)
    low = states["up"].state._replace(x=states["up"].state.x.at[2].set(1e-3))
    failures = [
        fast.check(p, X, states=given).first_failure is not None
        for given in (None, states, {"up": dataclasses.replace(states["up"], state=low)})
    ]
    assert failures == [False, False, True]


def test_square_matrices_of_a_named_function_are_as_the_rule_says():
    """Shapes do not show whether square matrices are (inputs, outputs)."""
    w, sizes = normal(7, EXPERTS, WIDTH, WIDTH), jnp.array([3, 0, 20, 9])
    fn = lambda p, x: experts.jitted_dot(x, p["w"], sizes)  # noqa: E731
    fast = fp8jax.transform(fn, [fp8jax.GroupedProduct("jitted_dot", transposed=True), "te_current"])
    assert 0 < relative(fast({"w": w}, X), fn({"w": w}, X)) < 0.1


def test_a_name_that_no_grouped_product_has_is_refused():
    fn = experts.block(experts.sorted_tokens(experts.own_dot))
    with pytest.raises(ValueError, match=r"no function named 'gmm' .*functions that do are own_dot"):
        fp8jax.transform(fn, [fp8jax.GroupedProduct("gmm"), "coat"]).explain(P, X)
    # Functions with a custom derivative are not searched.
    outer = jax.custom_vjp(lambda *operands: experts.jitted_dot(*operands))
    outer.defvjp(lambda *operands: (outer(*operands), operands), experts.own_dot_bwd)
    written = experts.block(experts.sorted_tokens(outer))
    with pytest.raises(ValueError, match=r"no function named 'jitted_dot' .*functions that do are <lambda>"):
        fp8jax.transform(written, [fp8jax.GroupedProduct("jitted_dot"), "coat"]).explain(TRANSPOSED, X)
    with pytest.raises(ValueError, match="no function named 'tanh'"):
        fp8jax.transform(lambda p, x: jnp.tanh(x @ p["mixer"]), ["coat", fp8jax.GroupedProduct("tanh")])(P, X)
    with pytest.raises(ValueError, match=r"function 'gmm\(' is not a regular expression"):
        fp8jax.GroupedProduct("gmm(")


STATEFUL = ["te_delayed", "int8_fallback", "moss"]


@pytest.mark.parametrize(("name", "recipe"), covering(WRITINGS, STATEFUL))
def test_a_writing_has_a_state_for_each_expert(name, recipe):
    """Slices of a parameter, in a loop or a switch, share one state."""
    experts_of_block, params = WRITINGS[name]
    fast = fp8jax.transform(experts.block(experts_of_block), recipe)
    explained = fast.explain(params, X)
    assert {e.path for e in explained.quantized if e.is_product} == {"mixer", *experts_of(params)}
    assert {e.path for e in explained.skipped if e.is_product} == {"router"}
    axes = {path: s.state.w.shape if recipe == "moss" else s.state.x.shape for path, s in fast.init(params, X).items()}
    expected = () if name in ("loop", "switch") else (EXPERTS,)
    assert {path: shape[: len(expected)] for path, shape in axes.items() if path != "mixer"} == dict.fromkeys(
        experts_of(params), expected
    )


@pytest.mark.parametrize("name", LEFT)
def test_a_writing_that_is_left_stops_no_state_of_the_rest(name):
    layer, params, reason = LEFT[name]
    fast = fp8jax.transform(experts.block(layer), "te_delayed")
    explained = fast.explain(params, X)
    assert {e.path for e in explained.skipped if e.reason.startswith(reason)} == experts_of(params)
    assert list(fast.init(params, X)) == ["mixer"]


@pytest.mark.parametrize(
    ("name", "recipe"),
    few(
        [(name, recipe) for name in WRITINGS for recipe in ("te_delayed", "int8_fallback")],
        ("dense", "int8_fallback"),
    ),
)
def test_steps_with_states_are_near_those_as_written(name, recipe):
    written, params = experts.block(WRITINGS[name][0]), WRITINGS[name][1]
    fast = fp8jax.transform(written, recipe)
    step, weights = make_step(fast), jnp.cos(jnp.arange(X.size, dtype=X.dtype)).reshape(X.shape)
    states = fast.init(params, X)
    for _ in range(2):
        y, grads, states = step(params, states, X, weights)
    expected, (reference, _) = values_and_gradients(written, params)
    assert 0 < relative(y, expected) < 0.1
    for path in params:
        assert relative(grads[path], reference[path]) < 0.25, path


BATCHED = {name: P[name] for name in ("gate", "up", "down")}
INPUTS = jnp.stack([X, 0.1 * X, 10 * X, X[::-1]])
WEIGHTS = jnp.cos(jnp.arange(INPUTS.size, dtype=jnp.float32)).reshape(INPUTS.shape)


def make_step(fn):
    """Returns a step of a function with states: result, gradients and next states."""

    @jax.jit
    def step(params, states, x, weights):
        def loss(params, states):
            y = fn(params, x, states=states)
            return jnp.vdot(y, weights), y

        (grads, observed), y = jax.grad(loss, (0, 1), has_aux=True)(params, states)
        return y, grads, fn.advance(states, observed)

    return step


def test_each_expert_of_a_batched_product_has_a_delayed_scale_of_its_own():
    """Steps with all experts equal those of each expert alone. An expert without tokens keeps its history."""
    one = lambda p, x: (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]  # noqa: E731
    recipe = dataclasses.replace(fp8jax.recipes.te_delayed().linear, amax_history_length=3)
    fast, alone = fp8jax.transform(experts.batched, recipe), fp8jax.transform(one, recipe)
    step, step_alone = make_step(fast), make_step(alone)
    states, params_alone = (
        fast.init(BATCHED, INPUTS),
        [jax.tree.map(lambda w, e=e: w[e], BATCHED) for e in range(EXPERTS)],
    )
    states_alone = [alone.init(p, X) for p in params_alone]
    for x in (INPUTS, 3 * INPUTS.at[1].set(0), 2 * INPUTS):
        weights = WEIGHTS * (x != 0).any((1, 2), keepdims=True)  # no result of an expert without tokens is used
        y, grads, states = step(BATCHED, states, x, weights)
        for e, p in enumerate(params_alone):
            expected, reference, new = step_alone(p, states_alone[e], x[e], weights[e])
            states_alone[e] = new if x[e].any() else states_alone[e]
            np.testing.assert_allclose(y[e], expected, rtol=1e-5, atol=1e-5)
            for name in BATCHED:
                np.testing.assert_allclose(grads[name][e], reference[name], rtol=1e-4, atol=1e-4)
    amax = np.abs(np.asarray(INPUTS)).max((1, 2))
    history = amax[:, None] * np.array([[2, 3, 1], [2, 1, 0], [2, 3, 1], [2, 3, 1]])
    np.testing.assert_allclose(states["gate"].state.x, history, rtol=1e-6)
    for operand in ("x", "dy"):
        for e in (0, 1):
            actual, expected = (getattr(each["down"].state, operand) for each in (states, states_alone[e]))
            np.testing.assert_allclose(actual[e], expected, rtol=1e-4)


def test_each_expert_of_a_batched_product_has_a_threshold_of_its_own():
    fast = fp8jax.transform(experts.batched, "int8_fallback")
    step, states = make_step(fast), fast.init(BATCHED, INPUTS)
    for x in (INPUTS, INPUTS.at[1].set(0)):
        y, grads, states = step(BATCHED, states, x, WEIGHTS)
    # More than 30 % of the blocks of all but the second expert exceed 1, none of the second. It then has no tokens.
    np.testing.assert_allclose(states["gate"].state.x, [1.3**2, 1 / 1.3, 1.3**2, 1.3**2], rtol=1e-6)
    expected, vjp = jax.vjp(lambda p: experts.batched(p, x), BATCHED)
    assert 0 < relative(y, expected) < 0.05
    assert 0 < relative(grads, vjp(WEIGHTS)[0]) < 0.1


def test_experts_of_a_list_that_is_stacked_have_the_states_of_an_array():
    sizes = jnp.array([TOKENS, 0, 2 * TOKENS, TOKENS])

    def fn(p, x):
        h = jnp.tanh(jnp.einsum("ecd,edf->ecf", x, p["up"]))
        return lax.ragged_dot(h.reshape(-1, INNER), p["down"], sizes).reshape(x.shape)

    array = {name: P[name] * jnp.array([1, 1e-5, 1, 3])[:, None, None] for name in ("up", "down")}
    join = lambda p, x: fn({"up": jnp.stack(p["up"]), "down": jnp.array(p["down"])}, x)  # noqa: E731
    results = []
    for written, p in ((fn, array), (join, {name: list(w) for name, w in array.items()})):
        fast = fp8jax.transform(written, "te_delayed")
        step, states = make_step(fast), fast.init(p, INPUTS)
        for x in (INPUTS, 2 * INPUTS):
            y, grads, states = step(p, states, x, WEIGHTS)
        grads = {name: jnp.stack(list(w)) for name, w in grads.items()}
        results.append((y, grads, [states[path].state for path in sorted(states)]))
    assert sorted(states) == ["down/0", "up/0"]
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.slow
def test_states_of_experts_in_a_scan_over_layers_and_microbatches():
    """A state for each layer and expert; observations of microbatches are merged by maximum."""
    stacked = jax.tree.map(lambda w: jnp.stack([w, 0.5 * w]), BATCHED)

    def fn(p, x):
        layer = lambda x, w: (experts.batched(w, x), None)  # noqa: E731
        return lax.map(lambda x: lax.scan(layer, x, p)[0], x)

    fast, x = fp8jax.transform(fn, "te_delayed"), jnp.stack([INPUTS, 2 * INPUTS])
    states = fast.init(stacked, x)
    assert states["gate"].state.x.shape == (2, EXPERTS, 1024)
    state = make_step(fast)(stacked, states, x, jnp.ones_like(x))[2]["gate"].state
    np.testing.assert_allclose(state.x[0, :, 0], 2 * np.abs(np.asarray(INPUTS)).max((1, 2)), rtol=1e-6)
    np.testing.assert_allclose(state.w[..., 0], np.abs(np.asarray(stacked["gate"])).max((2, 3)), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ecd,edf->ecf", "ragged_dot"])
def test_concatenated_experts_have_one_state_in_a_scan_over_layers(form):
    """That of the first parameter, for each layer and expert."""
    stacked = jax.tree.map(lambda w: jnp.stack([w, 0.5 * w]), BATCHED)

    def layer(x, p):
        gate_up, sizes = jnp.concatenate([p["gate"], p["up"]], -1), jnp.full(EXPERTS, TOKENS)
        if form == "ragged_dot":
            y = lax.ragged_dot(x.reshape(-1, WIDTH), gate_up, sizes).reshape(*x.shape[:2], -1)
        else:
            y = jnp.einsum(form, x, gate_up)
        gate, up = jnp.split(y, 2, -1)
        return jnp.einsum("ecf,efd->ecd", jax.nn.silu(gate) * up, p["down"]), None

    written = lambda p, x: lax.scan(layer, x, p)[0]  # noqa: E731
    fast = fp8jax.transform(written, "te_delayed")
    states = fast.init(stacked, INPUTS)
    assert states.keys() == {"gate", "down"}
    _, grads, states = make_step(fast)(stacked, states, INPUTS, WEIGHTS)
    expected = jax.grad(lambda p: jnp.vdot(written(p, INPUTS), WEIGHTS))(stacked)
    for name in stacked:
        assert 0 < relative(grads[name], expected[name]) < 0.25, name
    largest = np.maximum(*(np.abs(np.asarray(stacked[name])).max((2, 3)) for name in ("gate", "up")))
    np.testing.assert_allclose(states["gate"].state.w[..., 0], largest, rtol=1e-6)
    np.testing.assert_allclose(states["gate"].state.x[0, :, 0], np.abs(np.asarray(INPUTS)).max((1, 2)), rtol=1e-6)


def all_to_all(p, x):
    """One expert per device; tokens are sent to their experts, with a capacity."""
    dispatched, weights = experts.dispatch(p, x, x.shape[0])
    inputs = lax.all_to_all(jnp.einsum("td,tkec->ecd", x, dispatched), "e", 0, 1, tiled=True)
    y = lax.all_to_all(experts.batched(p, inputs), "e", 1, 0, tiled=True)
    return jnp.einsum("ecd,tkec,tk->td", y, dispatched, weights)


def ring(p, x):
    """Tokens rotate over devices; each device adds the result of its expert."""
    own = lax.axis_index("e")
    step = [(i, (i + 1) % EXPERTS) for i in range(EXPERTS)]

    def turn(carry, _):
        x, shares, y = carry
        share = lax.dynamic_slice_in_dim(shares, own, 1, 1)
        y = y + share * experts.batched(p, x[None])[0]
        return tuple(lax.ppermute(value, "e", step) for value in (x, shares, y)), None

    return lax.scan(turn, (x, experts.share_of_each(p, x), 0 * x), None, length=EXPERTS)[0][2]


def gathered_tokens(p, x):
    """Each device has all tokens. Those of its expert come first; the others are in no group."""
    weights, chosen = (lax.all_gather(value, "e", tiled=True) for value in experts.route(p, x))
    is_other = chosen.reshape(-1) != lax.axis_index("e")
    order, sizes = jnp.argsort(is_other), jnp.sum(~is_other)[None]
    inputs = lax.all_gather(x, "e", tiled=True)[order // CHOSEN]
    dot = lambda x, w: lax.ragged_dot(x, w, sizes)  # noqa: E731
    y = dot(jax.nn.silu(dot(inputs, p["gate"])) * dot(inputs, p["up"]), p["down"])
    y = y[jnp.argsort(order)].reshape(-1, CHOSEN, WIDTH) * weights[..., None]
    return lax.psum_scatter(y.sum(1), "e", tiled=True)


def gathered_weights(p, x):
    """Each device has all experts, and its own tokens."""
    p = {name: lax.all_gather(w, "e", tiled=True) if w.ndim == 3 else w for name, w in p.items()}
    weights, chosen = experts.route(p, x)
    order, sizes = jnp.argsort(chosen.reshape(-1)), jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    dot = lambda x, w: lax.ragged_dot(x, w, sizes)  # noqa: E731
    inputs = x[order // CHOSEN]
    y = dot(jax.nn.silu(dot(inputs, p["gate"])) * dot(inputs, p["up"]), p["down"])
    return (y[jnp.argsort(order)].reshape(-1, CHOSEN, WIDTH) * weights[..., None]).sum(1)


def over_devices(layer, check_vma=True):
    """A block whose tokens and experts are sharded."""
    mesh = jax.make_mesh((EXPERTS,), ("e",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {name: jax.P("e") if P[name].ndim == 3 else jax.P() for name in P}
    shardings = {"in_specs": (specs, jax.P("e")), "out_specs": jax.P("e")}
    return jax.shard_map(experts.block(layer), mesh=mesh, check_vma=check_vma, **shardings)


@pytest.mark.parametrize("layer", [all_to_all, ring, gathered_tokens])
def test_experts_over_devices_have_a_state_each(layer):
    """A state for each device and each of its experts."""
    fast = fp8jax.transform(over_devices(layer), "te_delayed")
    assert {e.path for e in fast.explain(P, X).quantized if e.is_product} == {"mixer", "gate", "up", "down"}
    assert {s.state.x.shape for path, s in fast.init(P, X).items() if path != "mixer"} == {(EXPERTS, 1, 1024)}


@pytest.mark.slow
def test_experts_over_devices_observe_what_they_observe_on_one():
    fast, alone = (
        fp8jax.transform(fn, "te_delayed")
        for fn in (over_devices(gathered_tokens), experts.block(experts.sorted_tokens(lax.ragged_dot)))
    )
    actual = [make_step(fn)(P, fn.init(P, X), X, jnp.ones_like(X)) for fn in (fast, alone)]
    (y, _, states), (want, _, reference) = actual
    assert relative(y, want) < 0.1
    for path in ("gate", "up", "down"):
        state, expected = (each[path].state for each in (states, reference))
        np.testing.assert_allclose(state.x[:, 0, 0], expected.x[:, 0], rtol=0.05)
        np.testing.assert_allclose(state.w[:, 0, 0], expected.w[:, 0], rtol=1e-6)
        np.testing.assert_allclose(state.dy[:, 0, 0], expected.dy[:, 0], rtol=0.2)


@pytest.mark.parametrize(
    ("layer", "check_vma"),
    few(
        [(layer, check) for layer in (all_to_all, ring, gathered_tokens, gathered_weights) for check in (True, False)],
        (gathered_tokens, True),
    ),
)
def test_experts_over_devices_are_in_8_bits(layer, check_vma):
    written = over_devices(layer, check_vma)
    fast = fp8jax.transform(written, "coat")
    assert {e.path for e in fast.explain(P, X).quantized if e.is_product} == {"mixer", "gate", "up", "down"}
    assert_near(fast, written, P)


def test_parameters_that_devices_gather_have_no_state():
    """Another layer keeps its state."""

    def layer(p, x):
        return jax.nn.silu(x @ lax.all_gather(p["gate"][0], "e", axis=1, tiled=True))[:, :WIDTH]

    rows = fp8jax.transform(over_devices(layer), "te_delayed").explain(P, X)
    assert [e.path for e in rows.quantized] == ["mixer"]
    assert [e.path for e in rows.skipped if "gathers its parameter from devices" in e.reason] == ["gate"]


@pytest.mark.parametrize("spec", few(["e4m3:block128", "e4m3:token"], "e4m3:block128"))
def test_frozen_experts_are_multiplied_as_codes(spec):
    """Gradients flow to the tokens without 16-bit copies of the experts."""
    trained = {name: P[name] for name in ("mixer", "router")}
    frozen = {name: fp8jax.freeze(P[name], spec) for name in P if name not in trained}
    written = experts.block(experts.sorted_tokens(lax.ragged_dot))
    fast = fp8jax.transform(written, "te_current")
    rows = {e.path: e.reason for e in fast.explain(trained | frozen, X).quantized if e.is_product}
    assert {path for path, reason in rows.items() if reason.endswith(f"frozen as {spec}")} == set(frozen)
    actual = values_and_gradients(lambda p, x: fast(p | frozen, x), trained)
    expected = values_and_gradients(lambda p, x: written(P | p, x), trained)
    assert 0 < relative(actual[0], expected[0]) < 0.1
    assert 0 < relative(actual[1], expected[1]) < 0.2
    # Codes per output cannot be used for the transposed matrix: its values are multiplied in 16 bits.
    stored = {name: fp8jax.freeze(TRANSPOSED[name], "e4m3:token") for name in frozen}
    general = fp8jax.transform(experts.block(experts.sorted_tokens(experts.general_dot)), "te_current")
    in_16_bits = {e.path for e in general.explain(trained | stored, X).skipped if "values of 16 bits" in e.reason}
    assert in_16_bits == set(frozen)


@pytest.mark.slow
def test_a_named_function_in_a_scan_under_remat():
    stacked = jax.tree.map(lambda w: jnp.stack([w, w[..., ::-1]]), P)

    def layers(dot):
        layer = jax.checkpoint(lambda x, p: (x + experts.sorted_tokens(dot)(p, x), None))
        return lambda p, x: lax.scan(layer, x, p)[0]

    rules = [fp8jax.GroupedProduct("own_.*"), "te_current"]
    fast, same = fp8jax.transform(layers(experts.own_dot), rules), fp8jax.transform(layers(lax.ragged_dot), rules[1])
    assert {e.path for e in fast.explain(stacked, X).quantized if e.is_product} == {"gate", "up", "down"}
    actual, expected = (values_and_gradients(fn, stacked) for fn in (fast, same))
    assert relative(actual, expected) < 1e-5


def noisy(scores, other):
    return scores + jax.random.normal(jax.random.key(0), scores.shape) * jax.nn.softplus(other())


def limited_to_groups(scores, _):
    """Only experts of the best groups, as in DeepSeek-V3."""
    grouped = jax.nn.sigmoid(scores).reshape(TOKENS, 8, -1)
    best = lax.top_k(lax.top_k(grouped, 2)[0].sum(-1), 4)[1]
    return jnp.where(jax.nn.one_hot(best, 8).sum(-2)[..., None] > 0, grouped, -jnp.inf).reshape(TOKENS, -1)


def balanced(scores, _):
    """Sinkhorn iterations."""
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
    """A router without a telling name, with more outputs than narrow matmuls have."""
    p = {"in": P["mixer"], "a": normal(6, WIDTH, count), "b": normal(7, WIDTH, count), "out": normal(8, WIDTH, WIDTH)}

    def fn(p, x):
        h = jnp.tanh(x @ p["in"])
        weights, chosen = lax.top_k(ROUTERS[name](h @ p["a"], lambda: h @ p["b"]), CHOSEN)
        return (h @ p["out"]) * weights.sum() + chosen.sum()

    rows = fp8jax.transform(fn, "coat").explain(p, X)
    assert {e.path for e in rows.quantized if e.is_product} == {"in", "out"}
    routers = {"a", "b"} if name == "noisy" else {"a"}
    assert {e.path for e in rows.skipped if "router" in e.reason and " reads its result" in e.reason} == routers
