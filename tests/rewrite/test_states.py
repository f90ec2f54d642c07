"""Scaling states: read by calls, observed as gradients through every kind of program, and advanced."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import fp8jax
from fp8jax.ops.products.linear import ScalingStats
from fp8jax.rewrite import states
from tests.distance import relative
from tests.programs import dots

WIDTH, INNER = 16, 32
DELAYED = dataclasses.replace(
    fp8jax.recipes.te_delayed(), linear=dataclasses.replace(fp8jax.recipes.te_delayed().linear, amax_history_length=3)
)
P = {"up": 0.2 * jax.random.normal(jax.random.key(0), (WIDTH, INNER)), "down": jnp.ones((INNER, WIDTH)) / 8}
X = jax.random.normal(jax.random.key(1), (4, 6, WIDTH))


def mlp(p, x):
    return jnp.tanh(x @ p["up"]) @ p["down"]


def largest(x, axis=None):
    return np.max(np.abs(np.asarray(x, np.float64)), axis)


def observed(fn, p, x, recipe=DELAYED, states=None):
    """Returns the transformed function, its states, and the observations of one differentiated call."""
    fast = fp8jax.transform(fn, recipe)
    states = fast.init(p, x) if states is None else states
    loss = lambda states, p: jnp.sum(jnp.sin(fast(p, x, states=states)))  # noqa: E731
    return fast, states, jax.jit(jax.grad(loss))(states, p)


def test_one_step_observes_and_advances():
    fast, states, recorded = observed(mlp, P, X)
    assert jax.tree.map(jnp.shape, states["up"].state) == ((3,), (3,), (3,))
    (slots,) = recorded["up"].slots
    np.testing.assert_allclose([slots.x, slots.w], [largest(X), largest(P["up"])], rtol=1e-6)
    dy = jax.grad(lambda h: jnp.sum(jnp.sin(jnp.tanh(h) @ P["down"])))(X @ P["up"])
    np.testing.assert_allclose(slots.dy, largest(dy), rtol=0.1)  # the products after it are quantized
    # States get no gradient of their own.
    assert not any(leaf.any() for leaf in jax.tree.leaves(recorded["up"].state))
    new = fast.advance(states, recorded)
    np.testing.assert_array_equal(new["up"].state.x, [slots.x, 0, 0])
    assert not any(leaf.any() for leaf in jax.tree.leaves(new["up"].slots))
    # The next call reads them: a scale for twice the magnitude gives other codes.
    later = jax.tree.map(lambda s: 2.5 * s, new)
    assert (fast(P, X, states=later) != fast(P, X, states=states)).any()


def test_the_same_bits_as_layers_of_nnx():
    """Three steps of delayed scaling: results, gradients and histories."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
            self.up, self.down = linear(WIDTH, INNER), linear(INNER, WIDTH)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    model = fp8jax.nnx.quantize(Model(nnx.Rngs(0)), DELAYED)
    graph, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)
    params = nnx.to_pure_dict(params)
    fast = fp8jax.transform(lambda p, x: nnx.merge(graph, p, rest)(x), DELAYED)
    states = fast.init(params, X)
    wrt = nnx.Any(nnx.Param, fp8jax.nnx.GradientStatistic)
    theirs = nnx.jit(nnx.value_and_grad(lambda m, x: jnp.sum(jnp.sin(m(x))), argnums=nnx.DiffState(0, wrt)))
    ours = jax.jit(jax.value_and_grad(lambda p, s, x: jnp.sum(jnp.sin(fast(p, x, states=s))), (0, 1)))
    for i in range(3):
        x = X * (i + 1)
        value, grads = theirs(model, x)
        grads = fp8jax.nnx.advance_scaling(model, grads)
        actual, (own, recorded) = ours(params, states, x)
        states = fast.advance(states, recorded)
        assert actual == value
        jax.tree.map(np.testing.assert_array_equal, own, nnx.to_pure_dict(grads))
        for name in ("up", "down"):
            layer, state = getattr(model, name).dot_general, states[f"{name}/kernel"].state
            for operand in ("x", "w", "dy"):
                np.testing.assert_array_equal(getattr(state, operand), getattr(layer, operand)[...])


STACKED = jax.tree.map(lambda w: jnp.stack([w, 2 * w, 3 * w]), P)


def scanned(p, x):
    layer = jax.checkpoint(lambda x, w: (x + mlp(w, x), None))
    return lax.scan(layer, x, p)[0]


def test_stacked_layers_have_states_of_their_own():
    """Through scan and checkpoint; each layer observes its own operands."""
    fast, states, recorded = observed(scanned, STACKED, X)
    assert states["up"].state.x.shape == (3, 3)
    (slots,) = recorded["up"].slots
    np.testing.assert_allclose(slots.w, largest(STACKED["up"], (1, 2)), rtol=1e-6)
    inputs = [X]
    for i in range(2):
        inputs.append(inputs[-1] + mlp(jax.tree.map(lambda w, i=i: w[i], STACKED), inputs[-1]))
    np.testing.assert_allclose(slots.x, [largest(x) for x in inputs], rtol=0.05)
    np.testing.assert_array_equal(fast.advance(states, recorded)["up"].state.w[:, 0], slots.w)


def test_a_shared_layer_observes_the_largest_of_its_turns():
    """Cotangents are summed; magnitudes must be merged by maximum."""
    fn = lambda p, x: lax.fori_loop(0, 3, lambda i, x: x * 0.5 + 0 * mlp(p, x), x)  # noqa: E731
    fast, states, recorded = observed(fn, P, X)
    assert (states["up"].state.x.shape, states["up"].slots[0].x.shape) == ((3,), (3,))
    new = fast.advance(states, recorded)["up"].state
    np.testing.assert_allclose([new.x[0], new.w[0]], [largest(X), largest(P["up"])], rtol=1e-6)


def test_two_uses_of_one_parameter_have_one_state():
    fn = lambda p, x: mlp(p, x) + mlp(p, 3 * x)  # noqa: E731
    fast, states, recorded = observed(fn, P, X)
    assert len(states["up"].slots) == 2
    new = fast.advance(states, recorded)["up"].state
    np.testing.assert_allclose([new.x[0], new.w[0]], [3 * largest(X), largest(P["up"])], rtol=1e-6)


def test_a_branch_that_is_not_taken_observes_nothing():
    fn = lambda p, x: lax.cond(x[0, 0, 0] > 1e3, lambda x: mlp(p, 9 * x), lambda x: mlp(p, x), x)  # noqa: E731
    _, _, recorded = observed(fn, P, X)
    amaxes = sorted(float(slots.x) for slots in recorded["up"].slots)
    np.testing.assert_allclose(amaxes, [0, largest(X)], rtol=1e-6)


@pytest.mark.parametrize("checked", [True, False])
def test_devices_of_a_mesh_observe_their_own(checked):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (jax.P(), jax.P("d")), "out_specs": jax.P("d")}
    fn = lambda p, x: jax.shard_map(mlp, mesh=mesh, check_vma=checked, **specs)(p, x)  # noqa: E731
    x = X.at[:2].multiply(0.5)
    fast, states, recorded = observed(fn, P, x)
    (slots,) = recorded["up"].slots
    np.testing.assert_allclose(slots.x, [largest(x[:2]), largest(x[2:])], rtol=1e-6)
    np.testing.assert_allclose(fast.advance(states, recorded)["up"].state.w[0], largest(P["up"]), rtol=1e-6)


def test_thresholds_count_blocks():
    """int8_fallback: counts are summed, magnitudes are merged by maximum."""
    fast, states, recorded = observed(lambda p, x: mlp(p, x) + mlp(p, x * 100), P, X, "int8_fallback")
    used, blocks = np.sum([slots.x for slots in recorded["up"].slots], 0)
    assert (blocks, used > 0) == (2, True)
    state = fast.advance(states, recorded)["up"].state
    assert state.x == states["up"].state.x * 1.3  # more than three in ten
    assert state.w is None


def test_uses_are_merged_as_their_scaling_asks():
    """Two uses, one in a loop of three iterations: counts are summed, magnitudes are not."""
    linears = DELAYED.linear, fp8jax.recipes.int8_fallback().linear
    uses = [states.WeightUse("w", 0, (states.LoopLevel(False, 3),)), states.WeightUse("w", 1, ())]
    for linear, scalar, expected in ((linears[0], True, 7.0), (linears[1], False, 1 + 2 + 7 + 5)):
        unit = jnp.float32(1) if scalar else jnp.ones(2)
        recorded = {(uses[0].key, "x"): jnp.stack([1 * unit, 2 * unit, 7 * unit]), (uses[1].key, "x"): 5 * unit}
        merged = states.merge_use_stats(recorded, dict.fromkeys(uses, linear))
        np.testing.assert_array_equal(merged["w"]["x"], expected * unit)
    recorded = {(uses[0].key, "dy"): jnp.array([1.0, 2.0, 7.0]), (uses[1].key, "dy"): jnp.float32(5)}
    assert states.merge_use_stats(recorded, dict.fromkeys(uses, linears[0]))["w"]["dy"] == 7
    parameter_state = states.ParameterState(
        linears[0], (), states.init(dict.fromkeys(uses, linears[0]), P | {"w": P["up"]})["w"].state
    )

    def gradient(slot):
        use_inputs = states.use_inputs_from_parameter_states(
            {"w": parameter_state._replace(stats=ScalingStats(dy=slot))}, dict.fromkeys(uses, linears[0])
        )
        return 2 * use_inputs[uses[0].key].slots.dy.sum() + 5 * use_inputs[uses[1].key].slots.dy

    assert jax.grad(gradient)(jnp.float32(0)) == 5
    tracked = states.init({states.WeightUse("w", 0, ()): linears[0]}, {"w": P["up"]})
    each = jax.tree.map(lambda slot: jnp.stack([slot + 1, slot + 5]), tracked)  # statistics of two devices
    new = jax.vmap(lambda recorded: states.advance(tracked, recorded, "devices"), axis_name="devices")(each)
    np.testing.assert_array_equal(new["w"].state.x[:, 0], [5, 5])
    with pytest.raises(ValueError, match="the model has no state for delayed scaling of w"):
        states.use_inputs_from_parameter_states(
            {"w": parameter_state._replace(state=None)}, dict.fromkeys(uses, linears[0])
        )
    with pytest.raises(ValueError, match="have different recipes"):
        states.init({states.WeightUse("w", i, ()): linear for i, linear in enumerate(linears)}, {"w": P["up"]})


def test_bounds_of_weights_come_from_the_optimizer():
    """Automatic scaling: weights have current scales without states, and until bounds are set."""
    fast = fp8jax.transform(scanned, "moss")
    states = fast.init(STACKED, X)
    np.testing.assert_array_equal(states["up"].state.w, np.zeros(len(STACKED["up"])))
    bounds = {(n,): jnp.float32(times * largest(STACKED[n], (1, 2))) for n, times in (("up", 7), ("down", 1))}
    new = fast.update_weight_amax_bounds(states, bounds)
    np.testing.assert_array_equal(new["up"].state.w, bounds["up",])
    assert (fast(STACKED, X, states=new) != fast(STACKED, X, states=states)).any()
    np.testing.assert_array_equal(fast(STACKED, X), fast(STACKED, X, states=states))
    # A given bound and a measured one.
    np.testing.assert_array_equal(fast(STACKED, X, states={**states, "up": new["up"]}), fast(STACKED, X, states=new))
    with pytest.raises(ValueError, match="the optimizer does not track the parameter down"):
        fast.update_weight_amax_bounds(states, {("up",): bounds["up",]})


SIZES = jnp.array([8, 6, 10])
STACK = jax.random.normal(jax.random.key(2), (3, WIDTH, INNER)) * jnp.array([100.0, 1.0, 0.01])[:, None, None]


@pytest.mark.parametrize(
    ("fn", "w"),
    [
        (lambda w, x: x @ (w * 10), P["up"]),
        (lambda w, x: lax.scan(lambda _, w: (None, x @ w), None, w[::-1])[1], STACK),
        (lambda w, x: lax.ragged_dot(x, jnp.roll(w, 1, 0), SIZES), STACK),
        (lambda w, x: lax.ragged_dot(x, w / 0.1, SIZES), STACK),
    ],
    ids=["scaled", "reversed layers", "rolled experts", "scaled experts"],
)
def test_bounds_of_a_parameter_are_none_of_a_matrix_computed_from_it(fn, w):
    """They would clip it. If other operands of the recipe have states, the matmul stays in 16 bits."""
    x, computed = X.reshape(-1, WIDTH), lambda p, x: fn(p["w"], x)
    fast = fp8jax.transform(computed, "moss")
    states = fast.update_weight_amax_bounds(fast.init({"w": w}, x), {("w",): jnp.asarray(largest(w, (-2, -1)))})
    assert 0 < relative(jax.jit(fast)({"w": w}, x, states=states), fn(w, x)) < 0.1
    linear = dataclasses.replace(DELAYED.linear, w_scaling="automatic")
    explanation = fp8jax.transform(computed, dataclasses.replace(DELAYED, linear=linear)).explain({"w": w}, x)
    assert [entry.reason for entry in explanation.skipped] == [
        "computes its matrix from the parameter, but automatic scaling tracks only the parameter itself"
    ]


STACK_OF_4 = jax.random.normal(jax.random.key(3), (4, WIDTH, WIDTH)) * jnp.array([1, 2, 1e-5, 3e-5])[:, None, None]


def each_layer(w, x):
    return lax.scan(lambda _, w: (None, x @ w), None, w)[1]


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: [lax.ragged_dot(x, half, jnp.array([14, 10])) for half in (w[:2], w[2:])],
        lambda w, x: [jax.checkpoint(jnp.matmul)(x, w[i]) for i in range(4)],
        lambda w, x: [x @ w for w in jnp.unstack(jnp.swapaxes(w, 1, 2)[::-1])],
        lambda w, x: [each_layer(half, x) for half in jnp.split(w, 2)],
        lambda w, x: [each_layer(w, x), x @ w[2]],
        lambda w, x: [x @ w.swapaxes(0, 1)[:, i] for i in (0, 2)],
        lambda w, x: [y for half in w.reshape(2, 2, WIDTH, WIDTH) for y in each_layer(half, x)],
    ],
    ids=["halves of experts", "layers", "reversed", "halves of layers", "all and one", "last axis", "reshaped"],
)
@pytest.mark.parametrize("recipe", [DELAYED, "moss"], ids=["delayed", "moss"])
def test_products_of_parts_of_one_parameter_have_states_of_their_own(fn, recipe):
    x, p, part_fn = X.reshape(-1, WIDTH), {"w": STACK_OF_4}, lambda p, x: fn(p["w"], x)
    fast = fp8jax.transform(part_fn, recipe)
    states = fast.update_weight_amax_bounds(fast.init(p, x), {("w",): jnp.asarray(largest(STACK_OF_4, (1, 2)))})

    @jax.jit
    def step(states):
        y, backward = jax.vjp(lambda p, states: fast(p, x, states=states), p, states)
        grads, recorded = backward(y)
        return y, grads, fast.advance(states, recorded)

    for _ in range(2):
        y, grads, states = step(states)
    exact, backward = jax.vjp(lambda p: part_fn(p, x), p)
    assert 0 < max(relative(ours, theirs) for ours, theirs in zip(y, exact, strict=True)) < 0.1
    (exact_grads,) = backward(y)
    for ours, theirs in zip(grads["w"], exact_grads["w"], strict=True):
        assert not theirs.any() or 0 < relative(ours, theirs) < 0.1
    if recipe is DELAYED and states["w"].state.w.ndim > 1:
        read = [i for i, matrix in enumerate(exact_grads["w"]) if matrix.any()]
        np.testing.assert_allclose(states["w"].state.w[read, 0], largest(STACK_OF_4[read,], (1, 2)), rtol=1e-6)


def test_a_computed_index_selects_no_state():
    """All matrices would share one. Delayed scaling leaves the matmul in 16 bits; automatic scaling measures the
    weight.
    """
    fn = lambda p, x: lax.map(lambda i: x @ p["w"][i], jnp.arange(4))  # noqa: E731
    p, x = {"w": STACK_OF_4}, X.reshape(-1, WIDTH)
    (entry,) = fp8jax.transform(fn, DELAYED).explain(p, x).skipped
    assert entry.reason.startswith("selects its matrix by a computed index")
    for ours, theirs in zip(fp8jax.transform(fn, "moss")(p, x), fn(p, x), strict=True):
        assert 0 < relative(ours, theirs) < 0.1


def test_recipes_without_a_state():
    fast = fp8jax.transform(mlp, "coat")
    assert fast.init(P, X) == {}
    np.testing.assert_array_equal(fast(P, X, states={}), fast(P, X))


def test_bad_states():
    fast = fp8jax.transform(mlp, DELAYED)
    with pytest.raises(ValueError, match="delayed scaling of up keeps a state, but no states were passed"):
        fast(P, X)
    states = fast.init(P, X)
    with pytest.raises(ValueError, match="of down keeps a state, but the passed states have none"):
        fast(P, X, states={"up": states["up"]})


@pytest.mark.parametrize("recipe", [DELAYED, "int8_fallback", "moss"])
def test_products_that_read_a_parameter_in_different_ways_have_one_state(recipe):
    """As one of stacked matrices, and alone or all as one. The products with fewer FLOPs are left or measured."""
    several = fp8jax.recipes.moss() if recipe == "moss" else recipe
    lists = {"w": list(STACK_OF_4)}

    def fn(p, x):
        w = jnp.stack(p["w"])
        h = jnp.tanh(jnp.einsum("etd,edf->etf", x, w))
        return h.sum(0) + x[0, :2].sum(0) @ p["w"][0]

    x = jax.random.normal(jax.random.key(3), (4, 8, WIDTH))
    fast = fp8jax.transform(fn, several)
    rows = fast.explain(lists, x)
    alone = [row.reason for row in rows.skipped if row.path == "w/0"]
    if recipe == "moss":
        assert not alone
    else:
        assert len(alone) == 1
        assert alone[0].startswith("reads its parameter in another way")
    states = fast.init(lists, x)
    loss = lambda y: jnp.sum(jnp.sin(y / 4))  # noqa: E731
    y, (grads, _) = jax.value_and_grad(lambda p, states: loss(fast(p, x, states=states)), (0, 1))(lists, states)
    exact, exact_grads = jax.value_and_grad(lambda p: loss(fn(p, x)))(lists)
    assert 0 < relative(y, exact) < 0.1
    assert 0 < relative(grads, exact_grads) < 0.15

    whole = lambda p, x: (scanned(p, x), jnp.einsum("btd,ldf->btlf", x, p["up"]))  # noqa: E731
    fast = fp8jax.transform(whole, several)
    assert 0 < relative(fast(STACKED, X, states=fast.init(STACKED, X)), whole(STACKED, X)) < 0.1


def test_states_are_stacked_for_abstract_parameters():
    fast = fp8jax.transform(scanned, DELAYED)
    kinds = jax.eval_shape(fast.init, STACKED, X)
    assert jax.tree.map(jnp.shape, kinds) == jax.tree.map(jnp.shape, fast.init(STACKED, X))
    actual = dots(lambda p, s: fast(p, X, states=s), STACKED, kinds)
    assert actual == [("float8_e4m3fn", "float8_e4m3fn")] * 2
