"""Flax's optimizers with the fused step, against Flax's own with `update`: equal weights, moments and checkpoints."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx
from flax.training import train_state

import fp8jax
from fp8jax.optim.fused import FusedTransformation
from tests.rows import few, slow

SMALL = {"group_size": 32, "min_size": 1}
X = jax.random.normal(jax.random.key(1), (16, 32))
MADE = {
    "compressed_adamw": lambda: fp8jax.compressed_adamw(1e-2, weight_decay=0.1, **SMALL),
    "fp8lm_adamw": lambda: fp8jax.fp8lm_adamw(1e-2, weight_decay=0.1, min_size=100),
    "clipped": lambda: fp8jax.with_clipping(0.05, fp8jax.compressed_adamw(1e-2, weight_decay=0.1, **SMALL)),
    "bf16": lambda: fp8jax.optimizer("bf16", 1e-2, weight_decay=0.1, clip=0.05),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(0.05), fp8jax.compressed_adamw(1e-2, weight_decay=0.1, **SMALL)
    ),
}


def close(ours, theirs):
    """Asserts equality up to fp32 rounding. `step` multiplies by one factor where a chain writes clipped gradients, and
    adds where it writes updates. At a tie this changes a code of a moment, by an eighth, in at most 1 of 100.
    """
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        off = np.abs(np.asarray(mine, np.float64) - np.asarray(other, np.float64))
        assert np.quantile(off, 0.99) < 2e-6
        assert off.max() < 3 * 1e-2 / 8


def loss(model):
    return jnp.mean((model(X) - X) ** 2)


def train(make, tx, steps=3, **arguments):
    model = nnx.Sequential(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Linear(64, 32, rngs=nnx.Rngs(1)))
    optimizer = make(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, arguments):
        optimizer.update(model, nnx.grad(loss)(model), **arguments)

    for _ in range(steps):
        step(model, optimizer, arguments)
    return model, optimizer


@pytest.mark.parametrize("kind", few(MADE, "fp8lm_adamw"))
def test_nnx_optimizer_trains_as_flax_s_own(kind):
    tx = MADE[kind]()
    ours, theirs = train(fp8jax.nnx.Optimizer, tx), train(nnx.Optimizer, tx)
    close(nnx.state(ours[0]), nnx.state(theirs[0]))
    states = nnx.as_pure(ours[1].opt_state), nnx.as_pure(theirs[1].opt_state)
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    close(*states)
    assert int(ours[1].step[...]) == 3


@pytest.mark.parametrize("kind", few(MADE, "compressed_adamw"))
def test_a_quantized_moment_is_one_variable_which_checkpoints_keep(kind, tmp_path):
    tx = MADE[kind]()
    saved, other = train(fp8jax.nnx.Optimizer, tx), train(fp8jax.nnx.Optimizer, tx, steps=1)
    variables = jax.tree.leaves(saved[1].opt_state, is_leaf=lambda x: isinstance(x, (nnx.Variable, fp8jax.QTensor)))
    assert all(isinstance(x, nnx.Variable) for x in variables)
    assert any(isinstance(x.get_value(), fp8jax.QTensor) for x in variables) == (kind != "bf16")
    structure = jax.tree.structure(nnx.state(saved))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(saved))
        checkpointer.wait_until_finished()
        nnx.update(other, checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: nnx.state(other))))
    chex.assert_trees_all_equal(nnx.state(other), nnx.state(saved))
    for model, optimizer in (saved, other):
        optimizer.update(model, nnx.grad(loss)(model))
    chex.assert_trees_all_equal(nnx.state(other), nnx.state(saved))
    assert jax.tree.structure(nnx.state(saved)) == structure


def test_arrays_of_a_moment_with_names_of_sharded_axes_are_variables_of_their_own():
    class Named(nnx.Module):
        def __init__(self, **metadata):
            self.kernel = nnx.Param(jnp.ones((32, 64)), eager_sharding=False, **metadata)

    for metadata in ({"out_sharding": (None, "x")}, {"optimizer_sharding": (None, "x")}):
        optimizer = fp8jax.nnx.Optimizer(Named(**metadata), MADE["compressed_adamw"](), wrt=nnx.Param)
        assert optimizer.opt_state.mu.kernel.codes.get_metadata()["out_sharding"] == (None, "x")
    optimizer = fp8jax.nnx.Optimizer(Named(note="kept"), MADE["compressed_adamw"](), wrt=nnx.Param)
    moment = optimizer.opt_state.mu.kernel
    assert isinstance(moment, nnx.Variable)
    assert moment.get_metadata()["note"] == "kept"


def test_nnx_optimizer_refuses_a_linen_module():
    with pytest.raises(
        TypeError, match=r"expects an NNX module, not Dense, a module of Flax Linen; .*linen\.TrainState"
    ):
        fp8jax.nnx.Optimizer(nn.Dense(4), optax.sgd(0.1), wrt=nnx.Param)


def test_nnx_optimizer_hands_arguments_on_to_the_step():
    tx = MADE["compressed_adamw"]()
    start, after = train(fp8jax.nnx.Optimizer, tx, steps=0), train(fp8jax.nnx.Optimizer, tx, apply_if=jnp.bool_(False))
    chex.assert_trees_all_equal(nnx.state(after[0]), nnx.state(start[0]))
    plain, factor = (
        train(fp8jax.nnx.Optimizer, optax_like(), **options) for options in ({}, {"grad_scale": jnp.float32(0.0)})
    )
    assert not np.array_equal(*(nnx.state(m[0])["layers"][0]["kernel"][...] for m in (plain, factor)))


def optax_like():
    return fp8jax.optimizer("bf16", 1e-2, weight_decay=0.1)


def test_weights_are_the_step_s():
    def update(*_, **__):
        raise AssertionError("updates were asked for")

    def step(grads, state, params, **arguments):
        return jax.tree.map(lambda p, g: p - g, params, grads), state

    tx = FusedTransformation(lambda params: optax.EmptyState(), update, step)
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    before, grads = nnx.as_pure(nnx.state(model)), nnx.grad(lambda m: jnp.sum(m(X[:, :4])))(model)
    fp8jax.nnx.Optimizer(model, tx, wrt=nnx.Param).update(model, grads)
    expected = jax.tree.map(lambda p, g: p - g, before, nnx.as_pure(nnx.state(grads)))
    chex.assert_trees_all_close(nnx.as_pure(nnx.state(model)), expected)
    state = fp8jax.linen.TrainState.create(apply_fn=None, params={"w": X}, tx=tx)
    new = state.apply_gradients(grads={"w": X}, apply_fn=len)
    np.testing.assert_array_equal(new.params["w"], 0 * X)
    assert new.apply_fn is len


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32)(nn.tanh(nn.Dense(64)(x)))


@pytest.mark.parametrize("kind", few(MADE, "chain"))
def test_train_state_trains_as_flax_s_own(kind):
    model, tx = Net(), MADE[kind]()
    params = model.init(jax.random.key(0), X)

    def run(make):
        state = make.create(apply_fn=model.apply, params=params, tx=tx)
        step = jax.jit(
            lambda s: s.apply_gradients(grads=jax.grad(lambda p: loss(lambda x: s.apply_fn(p, x)))(s.params))
        )
        for _ in range(3):
            state = step(state)
        return state

    ours, theirs = run(fp8jax.linen.TrainState), run(train_state.TrainState)
    assert int(ours.step) == 3
    close(ours.params, theirs.params)
    chex.assert_trees_all_equal_shapes_and_dtypes(ours.opt_state, theirs.opt_state)


def test_train_state_hands_arguments_on_and_leaves_overwritten_collections_to_gradients():
    tx = MADE["compressed_adamw"]()
    params = {"params": {"w": jnp.ones((32, 64))}, "_overwrite_with_gradient": {"scale": jnp.ones(())}}
    grads = {"params": {"w": jnp.full((32, 64), 0.1)}, "_overwrite_with_gradient": {"scale": jnp.full((), 7.0)}}
    state = fp8jax.linen.TrainState.create(apply_fn=None, params=params, tx=tx)
    after = state.apply_gradients(grads=grads)
    assert float(after.params["_overwrite_with_gradient"]["scale"]) == 7.0
    assert float(after.params["params"]["w"][0, 0]) < 1.0
    still = state.apply_gradients(grads=grads, step_arguments={"apply_if": jnp.bool_(False)})
    np.testing.assert_array_equal(still.params["params"]["w"], params["params"]["w"])


def test_arguments_of_the_step_are_refused_by_a_chain_which_would_ignore_them():
    chain, model = MADE["chain"](), nnx.Linear(32, 64, rngs=nnx.Rngs(0))
    optimizer, before = fp8jax.nnx.Optimizer(model, chain, wrt=nnx.Param), nnx.as_pure(nnx.state(model))
    state = fp8jax.linen.TrainState.create(apply_fn=None, params=before, tx=chain)
    for update in (
        lambda: optimizer.update(model, nnx.state(model), apply_if=jnp.bool_(False)),
        lambda: state.apply_gradients(grads=before, step_arguments={"apply_if": jnp.bool_(False)}),
    ):
        with pytest.raises(
            TypeError, match=r"apply_if requires a transformation with `step`.*with_clipping\(1.0, tx\)"
        ):
            update()
    chex.assert_trees_all_equal(nnx.as_pure(nnx.state(model)), before)


@pytest.mark.parametrize("way", ["nnx", "linen"])
def test_arguments_of_a_chain_reach_its_update(way):
    """optax's reduction on plateaus reads the loss."""
    chain = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    params = nnx.as_pure(nnx.state(model))
    if way == "nnx":
        optimizer = fp8jax.nnx.Optimizer(model, chain, wrt=nnx.Param)
        optimizer.update(model, nnx.state(model), value=jnp.float32(3.0))
        after, opt_state = nnx.as_pure(nnx.state(model)), nnx.as_pure(optimizer.opt_state)
    else:
        state = fp8jax.linen.TrainState.create(apply_fn=None, params=params, tx=chain)
        state = state.apply_gradients(grads=params, step_arguments={"value": jnp.float32(3.0)})
        after, opt_state = state.params, state.opt_state
    chex.assert_trees_all_close(after, jax.tree.map(lambda x: 0.9 * x, params), rtol=1e-6)
    assert float(optax.tree.get(opt_state, "best_value")) == 3.0


@pytest.mark.parametrize("recipe", ["coat", "bf16", "fp8_lm"])
def test_optimizer_clips(recipe):
    params, big = {"w": jnp.ones((64, 128))}, {"w": jnp.linspace(-3, 5, 64 * 128).reshape(64, 128)}
    plain, tx = (fp8jax.optimizer(recipe, 1e-2, eps=1e-2, min_size=1, **options) for options in ({}, {"clip": 0.5}))
    norm = float(np.linalg.norm(np.asarray(big["w"], np.float64)))
    expected, _ = plain.step(jax.tree.map(lambda g: g * (0.5 / norm), big), plain.init(params), params)
    unclipped, _ = plain.step(big, plain.init(params), params)
    clipped_params, _ = tx.step(big, tx.init(params), params)
    np.testing.assert_allclose(clipped_params["w"], expected["w"], rtol=1e-4)
    assert np.abs(np.asarray(clipped_params["w"]) - np.asarray(unclipped["w"])).max() > 1e-3
    with pytest.raises(ValueError, match="clip must be positive"):
        fp8jax.optimizer(recipe, 1e-2, clip=0.0)


WIDE = nnx.Any(nnx.Param, fp8jax.nnx.GradientStatistic)


def scaled_run(recipe, make, tx, end, steps=3, wrt=nnx.Param):
    """Runs some steps of a two-layer model with a recipe. `end` is called around the optimizer's update."""
    layers = nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Linear(64, 32, rngs=nnx.Rngs(1))
    model = fp8jax.nnx.quantize(nnx.Sequential(*layers), recipe)
    optimizer = make(model, tx, wrt=wrt)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(loss, argnums=nnx.DiffState(0, WIDE))(model)
        end(model, optimizer, grads)

    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def alone(model, optimizer, grads):
    optimizer.update(model, grads)


def advanced(model, optimizer, grads):
    optimizer.update(model, fp8jax.nnx.advance_scaling(model, grads))


def bounded(model, optimizer, grads):
    optimizer.update(model, grads)
    fp8jax.nnx.update_weight_amax_bounds(model, fp8jax.get_weight_amax_bounds(optimizer.opt_state))


def ended(model, optimizer, grads):
    optimizer.update(model, grads)
    fp8jax.nnx.end_step(model, grads, optimizer.opt_state)


@pytest.mark.parametrize(
    ("recipe", "by_hand", "chained"),
    [
        ("te_delayed", advanced, False),
        slow("int8_fallback", advanced, False),
        slow("moss", bounded, False),
        ("moss", bounded, True),
    ],
)
def test_nnx_optimizer_ends_the_step_of_scalings(recipe, by_hand, chained):
    """Equal to explicit calls next to Flax's own optimizer. Explicit calls next to ours change nothing."""
    tx = fp8jax.optimizer(recipe, 1e-2, b2=0.95)
    if chained:
        tx = optax.chain(fp8jax.compressed_adamw(1e-2, b2=0.95), fp8jax.track_weight_amax())
    first = nnx.state(scaled_run(recipe, fp8jax.nnx.Optimizer, tx, alone, steps=0)[0], fp8jax.nnx.ScalingVariable)
    runs = [scaled_run(recipe, fp8jax.nnx.Optimizer, tx, end)[0] for end in (alone, by_hand)]
    kinds = fp8jax.nnx.ScalingVariable, nnx.Param
    ours, both = ([nnx.state(model, kind) for kind in kinds] for model in runs)
    chex.assert_trees_all_equal(ours, both)
    theirs, _ = scaled_run(recipe, nnx.Optimizer, tx, by_hand)
    close(nnx.state(runs[0], fp8jax.nnx.ScalingVariable), nnx.state(theirs, fp8jax.nnx.ScalingVariable))
    one_call, _ = scaled_run(recipe, nnx.Optimizer, tx, ended)
    chex.assert_trees_all_equal(nnx.state(one_call), nnx.state(theirs))
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (first, ours[0])), strict=True))


@pytest.mark.parametrize(
    ("recipe", "chained"), [slow("te_delayed", False), ("int8_fallback", False), ("moss", False), slow("moss", True)]
)
def test_train_state_ends_the_step_of_scalings(recipe, chained):
    """Equal to explicit calls. Parameters may be all variables of `init`, or the collection alone."""
    model, tx = fp8jax.linen.quantize(Net(), recipe), fp8jax.optimizer(recipe, 1e-2, b2=0.95)
    if chained:
        tx = optax.chain(fp8jax.compressed_adamw(1e-2, b2=0.95), fp8jax.track_weight_amax())
    variables = model.init(jax.random.key(0), X)
    params, scaling = variables["params"], variables["fp8jax_scaling"]
    statistics = variables.get("fp8jax_statistics", {})

    def loss_fn(params, statistics, scaling):
        collections = {"params": params, "fp8jax_scaling": scaling, "fp8jax_statistics": statistics}
        y, new = model.apply(collections, X, mutable=["fp8jax_scaling"])
        return jnp.mean((y - X) ** 2), new.get("fp8jax_scaling", scaling)

    grads, by_hand = jax.grad(loss_fn, argnums=(0, 1), has_aux=True)(params, statistics, scaling)
    (weights, recorded), opt_state = grads, tx.init(params)
    for whole in (False, True):
        inside = (lambda tree: {"params": tree}) if whole else (lambda tree: tree)
        state = fp8jax.linen.TrainState.create(
            apply_fn=model.apply, params=inside(params), tx=tx, scaling=scaling, rules=recipe
        )
        after = state.apply_gradients(grads=inside(weights), statistics=recorded, scaling=by_hand)
        if recipe == "moss":
            step = tx.update if chained else tx.step
            new = fp8jax.get_weight_amax_bounds(step(weights, opt_state, params)[1])
            expected = fp8jax.linen.update_weight_amax_bounds(by_hand, new)
        else:
            expected = fp8jax.linen.advance_scaling(by_hand, recorded, recipe)
        chex.assert_trees_all_close(after.scaling, expected, rtol=1e-6)
        assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (after.scaling, scaling)), strict=True))
    plain = fp8jax.linen.TrainState.create(apply_fn=None, params=params, tx=tx)
    with pytest.raises(ValueError, match=r"Pass scaling="):
        plain.apply_gradients(grads=weights, statistics=recorded)


def test_the_end_of_a_step_merges_what_replicas_have_seen():
    """Two replicas observed 3 and 5; both continue with 5, for gradients too."""
    recorded = jnp.array([3.0, 5.0])
    model = fp8jax.nnx.quantize(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), "te_delayed")
    graph, state = nnx.split(model)

    def of_nnx(own):
        model = nnx.merge(graph, jax.tree.map(lambda x: x, state))
        model.dot_general.seen_x[...] = model.dot_general.slot[...] = own
        fp8jax.nnx.end_step(model, nnx.state(model, fp8jax.nnx.GradientStatistic), axis_name="data")
        return [getattr(model.dot_general, operand)[...].max() for operand in ("x", "dy")]

    variables = fp8jax.linen.quantize(nn.Dense(64), "te_delayed").init(jax.random.key(0), X)

    def of_linen(own):
        scaling, statistics = variables["fp8jax_scaling"] | {"seen_x": own}, {"slot": own}
        after = fp8jax.linen.end_step(scaling, statistics, axis_name="data")
        return [after[operand].max() for operand in ("x", "dy")]

    for ends in (of_nnx, of_linen):
        np.testing.assert_array_equal(jax.vmap(ends, axis_name="data")(recorded), [[5, 5]] * 2)


def test_bounds_are_those_of_trained_weights_and_frozen_ones_keep_theirs():
    tx = fp8jax.optimizer("moss", 1e-2, b2=0.95)
    second = nnx.All(nnx.Param, nnx.filterlib.PathContains(2))
    (model, optimizer), (before, _) = (
        scaled_run("moss", fp8jax.nnx.Optimizer, tx, alone, steps, second) for steps in (3, 0)
    )
    ((_, bound),) = fp8jax.get_weight_amax_bounds(optimizer.opt_state).items()
    kinds = [dict(nnx.to_flat_state(nnx.state(m, fp8jax.nnx.ScalingVariable))) for m in (model, before)]
    (frozen, trained) = sorted(kinds[0], key=str)
    assert kinds[0][trained][...] == bound > kinds[1][trained][...]
    assert kinds[0][frozen][...] == kinds[1][frozen][...]
    of_other = optax.chain(optax.sgd(1e-2), fp8jax.track_weight_amax()).init({"encoder": {"kernel": jnp.ones((4, 4))}})
    with pytest.raises(
        ValueError, match="the parameter layers/0/kernel: its state belongs to another model, or to a p"
    ):
        fp8jax.nnx.end_step(model, {}, of_other)
    model.embedding = nnx.Param(jnp.ones((4, 4)))  # one that trains it alone is of this model
    of_own = optax.chain(optax.sgd(1e-2), fp8jax.track_weight_amax()).init({"embedding": model.embedding[...]})
    fp8jax.nnx.end_step(model, {}, of_own)
    assert [x[...] for x in kinds[0].values()] == jax.tree.leaves(nnx.state(model, fp8jax.nnx.ScalingVariable))


def test_linen_s_step_gives_bounds_of_trained_weights_and_leaves_frozen_ones():
    variables = fp8jax.linen.quantize(Net(), "moss").init(jax.random.key(0), X)
    params, scaling = variables["params"], variables["fp8jax_scaling"]
    frozen, trained = sorted(params)
    follows = {frozen: optax.set_to_zero(), trained: optax.chain(optax.sgd(1e-2), fp8jax.track_weight_amax())}
    opt_state = optax.multi_transform(follows, {name: name for name in params}).init(params)
    after = fp8jax.linen.end_step(scaling, opt_state=opt_state)
    assert jax.tree.leaves(after[frozen]) == jax.tree.leaves(scaling[frozen]) == [0]
    assert jax.tree.leaves(after[trained]) == [jnp.abs(params[trained]["kernel"]).max()]
    alone = optax.chain(optax.sgd(1e-2), fp8jax.track_weight_amax()).init({"other": params[trained]})
    with pytest.raises(ValueError, match=f"the optimizer does not track the parameter {frozen}/kernel"):
        fp8jax.linen.end_step(scaling, opt_state=alone)


def test_weights_loaded_before_the_optimizer_is_made_are_within_its_bounds():
    model = fp8jax.nnx.quantize(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), "moss")
    right = nnx.Linear(32, 64, rngs=nnx.Rngs(0))
    for each in (model, right):
        each.kernel[...] *= 4
    off = lambda: np.linalg.norm(model(X) - right(X)) / np.linalg.norm(right(X))  # noqa: E731
    make = functools.partial(fp8jax.nnx.Optimizer, model, fp8jax.optimizer("moss", 1e-2), wrt=nnx.Param)
    assert nnx.eval_shape(make).step.shape == ()  # shapes alone leave the model as it is
    (bound,) = jax.tree.leaves(nnx.state(model, fp8jax.nnx.ScalingVariable))
    assert (float(bound), off() < 0.05) == (0, True)
    make()
    (bound,) = jax.tree.leaves(nnx.state(model, fp8jax.nnx.ScalingVariable))
    assert (float(bound), off() < 0.05) == (float(jnp.abs(model.kernel[...]).max()), True)


def test_an_optimizer_without_matrices_gives_no_bounds():
    biases = nnx.All(nnx.Param, nnx.filterlib.PathContains("bias"))
    model, _ = scaled_run("moss", fp8jax.nnx.Optimizer, fp8jax.optimizer("moss", 1e-2), alone, 1, biases)
    assert jnp.any(model.layers[0].bias[...] != 0)
    # Nor does one of a model whose scales are others.
    fp8jax.nnx.Optimizer(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), fp8jax.optimizer("moss", 1e-2), wrt=nnx.Param)


def test_a_model_of_thresholds_and_delayed_scaling_may_have_ended_its_step():
    rules = [fp8jax.Rule(".*0", "int8_fallback"), fp8jax.Rule(".*2", "te_delayed")]
    tx = fp8jax.optimizer("te_delayed", 1e-2)
    runs = [scaled_run(rules, fp8jax.nnx.Optimizer, tx, end)[0] for end in (alone, advanced)]
    chex.assert_trees_all_equal(*(nnx.state(model, fp8jax.nnx.ScalingVariable) for model in runs))


def test_layers_with_one_weight_have_its_bound():
    layers = [nnx.Linear(32, 32, rngs=nnx.Rngs(i)) for i in range(2)]
    layers[1].kernel = layers[0].kernel
    model = fp8jax.nnx.quantize(nnx.Sequential(*layers), "moss")
    optimizer = fp8jax.nnx.Optimizer(model, fp8jax.optimizer("moss", 1e-2), wrt=nnx.Param)
    optimizer.update(model, nnx.grad(loss)(model))
    ((_, bound),) = fp8jax.get_weight_amax_bounds(optimizer.opt_state).items()
    for follow in (
        lambda: None,
        lambda: fp8jax.nnx.update_weight_amax_bounds(model, {("layers", "0", "kernel"): bound}),
    ):
        follow()
        assert [float(x) for x in jax.tree.leaves(nnx.state(model, fp8jax.nnx.ScalingVariable))] == 2 * [float(bound)]
    fp8jax.nnx.reset_weight_amax_bounds(model)
    largest = float(jnp.abs(model.layers[0].kernel[...]).max())
    assert [float(x) for x in jax.tree.leaves(nnx.state(model, fp8jax.nnx.ScalingVariable))] == 2 * [largest]
