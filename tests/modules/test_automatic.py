"""Automatic weight scaling in the training program and in models: through steps, microbatches, shards, loading."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp8jax
from experiments.models.llama import LlamaConfig
from experiments.train.config import Config, Optim
from experiments.train.optimizer import make_optimizer, schedule
from experiments.train.task import Task
from fp8jax.core.scaling import Automatic

INTERVAL = 3
PART = fp8jax.recipes.Linear(
    "e4m3", "e4m3", "e5m2", scaling="two_stage", w_scaling="automatic", weight_amax_interval=INTERVAL
)
RECIPE = fp8jax.Recipe("automatic", linear=PART)
SHAPE = LlamaConfig(vocab=40, dim=32, layers=2, heads=4, kv_heads=2, mlp_dim=48)
TOKENS = np.random.default_rng(0).integers(0, SHAPE.vocab, (4, 14)).astype(np.int32)
OPTIM = Optim(lr=0.02, warmup=1, steps=20)


def task(microbatches=1):
    tx = make_optimizer(Config(optim=OPTIM), RECIPE)
    return Task(SHAPE, tx, RECIPE, remat=False, seed=0, microbatches=microbatches)


def layers(state):
    """Returns (bound, amax) of each kernel of a state, (layers,) each, by path."""
    weights, results = jax.tree.leaves_with_path(state.params["layers"]), {}
    for path, w in weights:
        if path[-1].key == "kernel":
            node = state.model_state["layers"]
            for key in path[:-1]:
                node = node[key.key]
            (bound,) = jax.tree.leaves(node)
            results[jax.tree_util.keystr(path)] = np.asarray(bound), np.abs(np.asarray(w)).max((-2, -1))
    assert len(results) == 7
    return results


def reductions(jaxpr, shapes, depth=0):
    """Returns the nesting depth in conditionals of each maximum over an array with these last two axes."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("reduce_max", "argmax", "reduce_min") and eqn.invars[0].aval.shape[-2:] in shapes:
            yield depth
        inner = depth + (eqn.primitive.name == "cond")
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(part, "jaxpr"):
                    yield from reductions(part.jaxpr, shapes, inner)
                elif hasattr(part, "eqns"):
                    yield from reductions(part, shapes, inner)


@pytest.fixture(scope="module")
def run():
    """Returns the states of some training steps, and the compiled step."""
    program = task()
    step, states = jax.jit(program.step), [jax.jit(program.init)()]
    for _ in range(INTERVAL + 2):
        state, metrics = step(states[-1], TOKENS)
        assert metrics["healthy"]
        states.append(state)
    return program, step, states


def test_bounds_hold_and_are_measured_every_interval_in_one_program(run):
    _, step, states = run
    assert step._cache_size() == 1
    for i, state in enumerate(states):
        for path, (bound, largest) in layers(state).items():
            assert bound.shape == (SHAPE.layers,)
            assert (largest <= bound).all(), (i, path)
            if i == 0:
                np.testing.assert_array_equal(bound, largest)
    # Measured before the update after INTERVAL of them, and grown by that one.
    before, after = layers(states[INTERVAL]), layers(states[INTERVAL + 1])
    limit = fp8jax.max_adam_step(schedule(OPTIM), OPTIM.b1, OPTIM.b2, OPTIM.weight_decay)
    for path, (_, largest) in before.items():
        grown = largest + limit(jnp.int32(INTERVAL), largest)
        np.testing.assert_allclose(after[path][0], grown, rtol=1e-6)


def test_no_weight_is_reduced_outside_of_the_branch(run):
    program, _, states = run
    kernels = {w.shape[-2:] for w in jax.tree.leaves(states[0].params["layers"]) if w.ndim == 3}
    shapes = kernels | {shape[::-1] for shape in kernels}
    jaxpr = jax.make_jaxpr(program.step)(states[0], TOKENS)
    # Measuring is conditional, with one more condition around a model's call. Nothing else computes the weight's amax.
    depths = list(reductions(jaxpr.jaxpr, shapes))
    assert set(depths) == {1, 2}
    assert depths.count(2) >= 7
    current = dataclasses.replace(RECIPE, linear=dataclasses.replace(PART, w_scaling=None))
    other = Task(SHAPE, optax.with_extra_args_support(optax.sgd(0.1)), current, remat=False, seed=0)
    state = jax.eval_shape(other.init)
    assert 0 in list(reductions(jax.make_jaxpr(other.step)(state, TOKENS).jaxpr, shapes))


def test_microbatches_evaluation_and_resuming_read_the_bounds(run):
    program, step, states = run
    parts = jax.jit(task(2).step)(states[0], TOKENS)[0]
    for (bound, largest), (whole, _) in zip(layers(parts).values(), layers(states[1]).values(), strict=True):
        assert (largest <= bound).all()
        np.testing.assert_allclose(bound, whole, rtol=1e-6)
    # A saved and restored run continues with the same bits.
    resumed = jax.tree.map(lambda x: jnp.asarray(np.array(x)), states[2])
    for _ in range(2):
        resumed, _ = step(resumed, TOKENS)
    jax.tree.map(np.testing.assert_array_equal, resumed, states[4])
    # Evaluation has the bounds for scales, not the weights: with others it differs.
    state, double = states[-1], jax.tree.map(lambda x: 3.7 * x, states[-1].model_state)
    loss = jax.jit(program.loss)
    assert loss(state.params, state.model_state, TOKENS) != loss(state.params, double, TOKENS)


def test_a_layer_takes_the_scale_of_its_bound_and_measures_loaded_weights():
    layer = nnx.Linear(16, 8, use_bias=False, rngs=nnx.Rngs(0))
    quantized, w = fp8jax.nnx.quantize(layer, PART), layer.kernel[...]
    x = jax.random.normal(jax.random.key(1), (4, 16))
    np.testing.assert_array_equal(
        quantized(x), fp8jax.linear(x, w, recipe=dataclasses.replace(PART, w_scaling="current"))
    )
    optimizer = nnx.Optimizer(quantized, optax.chain(optax.sgd(1.0), fp8jax.track_weight_amax()), wrt=nnx.Param)
    grads = jax.tree.map(lambda p: jnp.full_like(p, 0.5), nnx.state(quantized, nnx.Param))
    optimizer.update(quantized, grads)
    fp8jax.nnx.update_weight_amax_bounds(quantized, fp8jax.get_weight_amax_bounds(optimizer.opt_state))
    bound, moved = float(jnp.abs(w).max()) + 0.5, quantized.kernel[...]
    np.testing.assert_allclose(quantized.dot_general.automatic_w[...], bound, rtol=1e-6)
    prequantized = fp8jax.quantize_weight(moved, recipe=PART, scale=quantized.dot_general.automatic_w[...] / 448)
    np.testing.assert_allclose(quantized(x), fp8jax.linear(x, moved, recipe=PART, quantized=prequantized), rtol=1e-6)
    quantized.kernel[...] = 10 * moved
    fp8jax.nnx.reset_weight_amax_bounds(quantized)
    np.testing.assert_array_equal(quantized.dot_general.automatic_w[...], jnp.abs(10 * moved).max())
    with pytest.raises(ValueError, match="the optimizer does not track the parameter kernel"):
        fp8jax.nnx.update_weight_amax_bounds(quantized, {("other",): jnp.ones(())})
    with pytest.raises(ValueError, match="has no layer with automatic weight scaling"):
        fp8jax.nnx.reset_weight_amax_bounds(layer)
    with pytest.raises(ValueError, match=r"pass the weight to init_scaling"):
        fp8jax.init_scaling(PART)


def by_nnx(x, w):
    model = fp8jax.nnx.quantize(nnx.Linear(16, 8, use_bias=False, rngs=nnx.Rngs(0)), PART)
    model.kernel[...] = w
    return jax.jit(lambda x: model(x))(x)


def by_nnx_held(x, w):
    model = fp8jax.nnx.quantize(nnx.Linear(16, 8, use_bias=False, rngs=nnx.Rngs(0)), PART)
    model.kernel[...] = w
    return fp8jax.nnx.quantize_weights(model)(x)


def by_linen(x, w):
    model = fp8jax.linen.quantize(nn.Dense(8, use_bias=False), PART)
    return model.apply({**model.init(jax.random.key(0), x), "params": {"kernel": w}}, x)


def by_transform(x, w):
    fast = fp8jax.transform(lambda w, x: x @ w["w"], [fp8jax.Rule(".*", PART)])
    return fast({"w": w}, x, states=fast.init({"w": w / 100}, x))


def by_shards(x, w):
    """Each device has some columns of the weight; their scale is that of the whole weight."""
    fast = fp8jax.transform(lambda w, x: x @ w["w"], [fp8jax.Rule(".*", PART)])
    mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    columns, states = P(None, "model"), fast.init({"w": w}, x)
    call = jax.shard_map(
        lambda w, x, states: fast({"w": w}, x, states=states),
        mesh=mesh,
        in_specs=(columns, P(), P()),
        out_specs=columns,
    )
    return jax.jit(call)(w, x, states)


@pytest.mark.parametrize("apply", [by_nnx, by_nnx_held, by_linen, by_transform, by_shards], ids=lambda f: f.__name__)
def test_weights_that_are_loaded_are_measured_until_bounds_are_given(apply):
    x, w = jax.random.normal(jax.random.key(1), (4, 16)), 7 * jax.random.normal(jax.random.key(2), (16, 8))
    expected = fp8jax.linear(x, w, recipe=dataclasses.replace(PART, w_scaling="current"))
    np.testing.assert_allclose(apply(x, w), expected, rtol=1e-6)


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "fp8jax_scaling": 0}
        return nn.scan(Body, variable_axes=axes, split_rngs={"params": True}, length=3)()(x, None)[0]


class Body(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.relu(nn.Dense(16)(x)), None


def test_linen_layers_are_given_bounds_one_a_layer():
    model, x = fp8jax.linen.quantize(Stack(), PART), jax.random.normal(jax.random.key(1), (4, 16))
    variables = model.init(jax.random.key(0), x)
    params, scaling = variables["params"], variables["fp8jax_scaling"]
    kernel = jax.tree.leaves(params)[1]
    largest = np.abs(np.asarray(kernel)).max((-2, -1))
    np.testing.assert_array_equal(jax.tree.leaves(scaling)[0], 0)
    tx = optax.chain(optax.sgd(1.0), fp8jax.track_weight_amax())
    grads = jax.grad(lambda params: jnp.sum(model.apply({"params": params, "fp8jax_scaling": scaling}, x) ** 2))(params)
    _, state = tx.update(grads, tx.init(params), params)
    after = fp8jax.linen.update_weight_amax_bounds(scaling, fp8jax.get_weight_amax_bounds(state))
    assert jax.tree.structure(after) == jax.tree.structure(scaling)
    expected = largest + np.abs(np.asarray(jax.tree.leaves(grads)[1])).max((-2, -1))
    np.testing.assert_allclose(jax.tree.leaves(after)[0], expected, rtol=1e-6)
    measured_again = fp8jax.linen.reset_weight_amax_bounds(after, jax.tree.map(lambda p: 2 * p, params))
    np.testing.assert_array_equal(jax.tree.leaves(measured_again)[0], 2 * largest)
    with pytest.raises(ValueError, match="has automatic scaling: pass the collections 'fp8jax_scaling' from"):
        model.apply({"params": params}, x)


def test_shards_of_a_weight_have_one_bound():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    w = jax.random.normal(jax.random.key(0), (8, 6))
    grads = {"w": jax.random.normal(jax.random.key(1), (8, 6))}
    results = []
    for place, axis in ((None, None), (P("data"), None), (P("data"), "data")):
        tx = optax.chain(optax.adam(0.1), fp8jax.track_weight_amax(1, axis_name=axis))

        def two_steps(w, grads, tx=tx):
            state, params = tx.init({"w": w}), {"w": w}
            for _ in range(2):
                updates, state = tx.update(grads, state, params)
                params = optax.apply_updates(params, updates)
            return state[-1].bounds["w"][None]

        if axis is not None:
            two_steps = jax.shard_map(two_steps, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
        operands = (w, grads) if place is None else jax.device_put((w, grads), NamedSharding(mesh, place))
        results.append(np.asarray(jax.jit(two_steps)(*operands)))
    assert results[2].shape == (4,)
    for actual in results[1:]:
        np.testing.assert_allclose(actual, np.broadcast_to(results[0], actual.shape), rtol=1e-6)
    assert results[0] > float(Automatic().measure_amax(w))


def test_of_weights_without_a_bound_those_alone_are_measured():
    """A partly frozen model whose optimizer tracks the other weights: weights with a bound are not read."""
    layers = [nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(i)) for i in range(2)]
    model = fp8jax.nnx.quantize(nnx.Sequential(*layers), PART)
    x, call = jax.random.normal(jax.random.key(2), (4, 16)), nnx.jit(lambda model, x: model(x))
    plain = call(model, x)
    graph, state = nnx.split(model)
    program = jax.make_jaxpr(lambda state: nnx.merge(graph, state)(x))(state)
    (outer,) = [eqn for eqn in program.eqns if eqn.primitive.name == "cond"]
    measuring = max((branch.jaxpr for branch in outer.params["branches"]), key=lambda jaxpr: len(jaxpr.eqns))
    assert [eqn.primitive.name for eqn in measuring.eqns].count("cond") == 2
    assert "reduce_max" not in {eqn.primitive.name for eqn in measuring.eqns}
    bounds = [layer.dot_general.automatic_w for layer in model.layers]
    for i in range(2):
        bounds[i][...], bounds[1 - i][...] = 1e3, 0.0
        other = call(model, x)
        assert (other != plain).any()
        bounds[1 - i][...] = jnp.abs(layers[1 - i].kernel[...]).max()
        np.testing.assert_array_equal(call(model, x), other)
