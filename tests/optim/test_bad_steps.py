"""`skip_bad_steps`: skipped steps change no bit of parameters, moments and scaling states. Loss jumps by NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax.optim import bad_steps
from tests.rows import few, slow

PARAMS = {"w": jnp.linspace(-1, 1, 512).reshape(4, 128), "b": jnp.array([-0.0, 0.0, 3.0])}
GRADS = jax.tree.map(lambda p: jnp.cos(7 * p), PARAMS)
BAD = {"w": GRADS["w"].at[2, 5].set(jnp.inf), "b": GRADS["b"]}
INNER = {
    "compressed_adamw": lambda: fp8jax.compressed_adamw(1e-2, min_size=0),
    "fp8lm_adamw": lambda: fp8jax.fp8lm_adamw(1e-2, min_size=0),
    "clipped": lambda: fp8jax.optimizer("coat", 1e-2, clip=1.0, min_size=0),
    "bounds": lambda: fp8jax.optimizer("moss", 1e-2, b2=0.95, min_size=0),
    "compress_state": lambda: fp8jax.compress_state(optax.lion(1e-2)),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
}


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def apply(tx, form, grads, state, params, **options):
    result, state = getattr(tx, form)(grads, state, params, **options)
    return (result if form == "step" else optax.apply_updates(params, result)), state


@pytest.mark.parametrize(
    ("name", "form"),
    few(
        [(name, form) for name in INNER for form in ("update", "step") if form == "update" or name in list(INNER)[:4]],
        ("compressed_adamw", "step"), ("fp8lm_adamw", "update"), ("bounds", "step"), ("chain", "update"),
    ),
)  # fmt: skip
def test_a_bad_step_leaves_all_bits_and_a_good_one_is_that_of_the_optimizer(name, form):
    plain = INNER[name]()
    tx = fp8jax.skip_bad_steps(plain)
    step, alone = (jax.jit(functools.partial(apply, t, form)) for t in (tx, plain))
    params, state = step(GRADS, tx.init(PARAMS), PARAMS, value=jnp.float32(2.0))
    expected, _ = alone(GRADS, plain.init(PARAMS), PARAMS)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-2 * 2**-23), params, expected)
    params["b"] = PARAMS["b"]  # with a negative zero
    for count, (grads, loss) in enumerate([(BAD, 2.0), (GRADS, np.nan), (GRADS, np.inf)], 1):
        after, new = step(grads, state, params, value=jnp.float32(loss))
        assert bits((after, new.inner)) == bits((params, state.inner))
        state = new
        assert tuple(map(int, fp8jax.get_bad_steps({"any": [state]}))) == (count, count)
    after, state = step(GRADS, state, params, value=jnp.float32(2.0))
    assert bits(after["w"]) != bits(params["w"])
    assert tuple(map(int, fp8jax.get_bad_steps(state))) == (3, 0)


def test_the_wrapped_optimizer_gets_the_loss_and_other_arguments_too():
    seen = {}

    def update(updates, state, params=None, **extra_args):
        seen.update(extra_args)
        return updates, state

    tx = fp8jax.skip_bad_steps(optax.GradientTransformationExtraArgs(optax.init_empty_state, update))
    tx.update(GRADS, tx.init(PARAMS), PARAMS, value=jnp.float32(2.0), grad=3)
    assert seen == {"value": 2, "grad": 3}
    seen.clear()
    tx.update(GRADS, tx.init(PARAMS), PARAMS)
    assert seen == {}


def test_a_step_that_the_caller_leaves_out_is_not_counted_and_a_factor_that_is_not_finite_is_bad():
    tx = fp8jax.skip_bad_steps(INNER["compressed_adamw"]())
    state = tx.init(PARAMS)
    left = tx.step(BAD, state, PARAMS, apply_if=jnp.bool_(False))
    assert bits(left) == bits((PARAMS, state))
    params, after = tx.step(GRADS, state, PARAMS, grad_scale=np.nan)
    assert bits((params, after.inner)) == bits((PARAMS, state.inner))
    assert int(fp8jax.get_bad_steps(after).total) == 1
    quantized = {name: fp8jax.quantize(g, "e5m2") for name, g in BAD.items()}
    assert int(fp8jax.get_bad_steps(tx.step(quantized, state, PARAMS)[1]).total) == 1


def test_a_jump_is_a_loss_above_the_median_plus_spreads_of_the_last_good_losses():
    rng = np.random.default_rng(0)
    losses = np.float32(3 * 0.999 ** np.arange(400) + rng.normal(0, 0.05, 400))
    losses[[70, 71, 200, 399]] += [0.8, 2.0, 0.15, 0.6]
    losses[300] = np.nan

    def observe(monitor, loss):
        is_good, monitor = bad_steps.observe_step(monitor, jnp.bool_(True), loss, 4.0)
        return monitor, (is_good, bad_steps.loss_limit(monitor, 4.0))

    _, (is_good, limits) = jax.jit(lambda x: jax.lax.scan(observe, bad_steps.init_monitor(), x))(losses)
    good, expected = [], []
    for loss, actual in zip(losses, np.asarray(is_good), strict=True):
        window = np.float64(good[-128:])
        limit = np.inf
        if len(window) >= 64:
            median = np.median(window)
            limit = median + 4 * max(1.4826 * np.median(np.abs(window - median)), median / 256)
        assert actual == (loss <= limit), loss
        good += [loss] if actual else []
        expected.append(limit)
    np.testing.assert_allclose(limits[:-1], expected[1:], rtol=1e-6)
    assert not np.asarray(is_good)[[70, 71, 300, 399]].any()
    assert np.sum(~np.asarray(is_good)) < 12


def test_losses_that_are_all_equal_have_a_spread_of_half_a_step_of_bf16():
    monitor = bad_steps.init_monitor()._replace(losses=jnp.full(128, 2.0), loss_count=jnp.int32(200))
    np.testing.assert_allclose(bad_steps.loss_limit(monitor, 6.0), 2 + 6 * 2 / 256, rtol=1e-6)
    negative = monitor._replace(losses=-monitor.losses)
    np.testing.assert_allclose(bad_steps.loss_limit(negative, 6.0), -2 + 6 * 2 / 256, rtol=1e-6)
    few_losses = monitor._replace(loss_count=jnp.int32(63))
    assert np.isinf(bad_steps.loss_limit(few_losses, 6.0))


def test_losses_of_zero_set_no_limit():
    """Losses can be exactly 0, as a hinge loss, and rise again."""
    tx = fp8jax.skip_bad_steps(optax.sgd(0.1), max_loss_jump=6.0)
    step = jax.jit(lambda state, loss: (tx.update(PARAMS, state, PARAMS, value=loss)[1], None))
    losses = np.float32([0.0] * 64 + [1e-6] * 164)
    state, _ = jax.lax.scan(step, tx.init(PARAMS), losses)
    assert tuple(map(int, fp8jax.get_bad_steps(state))) == (0, 0)
    # More than half of the losses are above 0 again: they limit the next one.
    state, _ = step(state, jnp.float32(1.0))
    assert int(fp8jax.get_bad_steps(state).total) == 1


def test_arguments_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="max_loss_jump must be positive, not 0"):
        fp8jax.skip_bad_steps(optax.sgd(0.1), 0.0)
    tx = fp8jax.skip_bad_steps(optax.sgd(0.1), 6.0)
    with pytest.raises(ValueError, match=r"max_loss_jump=6.0 needs the loss of each step; pass value=loss"):
        tx.update(GRADS, tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=r"does not skip steps; wrap it in fp8jax.skip_bad_steps"):
        fp8jax.get_bad_steps(optax.adam(0.1).init(PARAMS))
    with pytest.raises(ValueError, match="use one, as the outermost transformation"):
        fp8jax.get_bad_steps(optax.chain(tx, tx).init(PARAMS))


def test_a_bad_microbatch_is_left_out_of_the_accumulated_gradients():
    tx = fp8jax.skip_bad_steps(optax.MultiSteps(fp8jax.compressed_adamw(1e-2, min_size=0), 2))
    step, runs = jax.jit(functools.partial(apply, tx, "update")), []
    for batches in ([GRADS, BAD, GRADS], [GRADS, GRADS]):
        params, state = PARAMS, tx.init(PARAMS)
        for grads in batches:
            params, state = step(grads, state, params)
        runs.append(bits((params, state.inner)))
    assert runs[0] == runs[1] != bits((PARAMS, tx.init(PARAMS).inner))


def test_a_step_that_is_bad_on_one_device_is_skipped_on_all_and_losses_are_averaged():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    tx = fp8jax.skip_bad_steps(optax.sgd(0.1), 6.0, axis_name="data")
    state = tx.init(PARAMS)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
    def step(factor, losses):
        grads = jax.tree.map(lambda g: g * jnp.where(jax.lax.axis_index("data") == 1, factor, 1.0), GRADS)
        updates, new = tx.update(grads, state, PARAMS, value=losses[0])
        return jax.tree.map(lambda x: x[None], (optax.tree.norm(updates), new.monitor))

    step = jax.jit(step)
    norms, monitor = step(jnp.float32(jnp.nan), jnp.array([1.0, 4.0]))
    np.testing.assert_array_equal(norms, 0)
    np.testing.assert_array_equal(monitor.total, [1, 1])
    norms, monitor = step(jnp.float32(1), jnp.array([1.0, 4.0]))
    assert (np.asarray(norms) > 0).all()
    np.testing.assert_array_equal(monitor.losses[:, 0], [2.5, 2.5])


X = jax.random.normal(jax.random.key(0), (32, 64))
RECIPES = pytest.mark.parametrize("recipe", ["te_delayed", slow("moss"), slow("int8_fallback")])


@RECIPES
@pytest.mark.parametrize("optimizer_class", ["ours", slow("flax")])
def test_a_skipped_step_of_nnx_leaves_scaling_states(recipe, optimizer_class):
    """NaN in the data reaches the gradients, the amax histories and the thresholds."""
    ours = optimizer_class == "ours"
    model = fp8jax.nnx.quantize(nnx.Linear(64, 64, rngs=nnx.Rngs(1)), recipe)
    tx = fp8jax.skip_bad_steps(fp8jax.optimizer(recipe, 1e-2, b2=0.95, min_size=0))
    optimizer = (fp8jax.nnx.Optimizer if ours else nnx.Optimizer)(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = fp8jax.nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads, value=loss)
        if not ours:
            fp8jax.nnx.end_step(model, grads, optimizer.opt_state)

    def parts():
        state = nnx.as_pure(nnx.state((model, optimizer)))
        return bits((state[0], state[1]["opt_state"].inner if ours else None)), int(optimizer.step[...])

    step(model, optimizer, X)
    before = parts()
    step(model, optimizer, X.at[3, 4].set(jnp.nan))
    after = parts()
    assert after[0] == before[0]
    assert after[1] == before[1] + (not ours)
    assert int(fp8jax.get_bad_steps(optimizer.opt_state).consecutive) == 1
    step(model, optimizer, 2 * X)
    assert parts()[0] != before[0]
    assert int(fp8jax.get_bad_steps(optimizer.opt_state).consecutive) == 0


@RECIPES
def test_a_skipped_step_of_linen_leaves_scaling_states(recipe):
    model = fp8jax.linen.quantize(nn.Dense(64), recipe)
    variables = model.init(jax.random.key(0), X)
    tx = fp8jax.skip_bad_steps(fp8jax.optimizer(recipe, 1e-2, b2=0.95, min_size=0))
    state = fp8jax.linen.TrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=tx, scaling=variables["fp8jax_scaling"], rules=recipe
    )
    slots = variables.get("fp8jax_statistics", {})

    @jax.jit
    def step(state, x):
        def loss_fn(params, slots):
            inputs = {"params": params, "fp8jax_statistics": slots, "fp8jax_scaling": state.scaling}
            y, new = state.apply_fn(inputs, x, mutable=["fp8jax_scaling"])
            return jnp.mean(y**2), new["fp8jax_scaling"]

        (loss, scaling), (grads, recorded) = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)(
            state.params, slots
        )
        options = {"value": loss}
        return state.apply_gradients(
            grads=grads, statistics=recorded if slots else None, scaling=scaling, step_arguments=options
        )

    def parts(state):
        return bits((state.params, state.opt_state.inner, state.scaling, state.step))

    state = step(state, X)
    skipped = step(state, X.at[3, 4].set(jnp.nan))
    assert parts(skipped) == parts(state)
    assert int(fp8jax.get_bad_steps(skipped.opt_state).consecutive) == 1
    assert parts(step(skipped, 2 * X)) == parts(step(state, 2 * X)) != parts(state)
