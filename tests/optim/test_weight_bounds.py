"""Bounds on weights: no weight exceeds them, for any gradients, optimizers, schedules and groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from fp8jax.core.scaling import Automatic
from fp8jax.optim.fused import FusedTransformation

STEPS, INTERVAL = 1700, 500
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.03, 20, STEPS, 0.003)
PARAMS = {
    "w": 0.3 * jax.random.normal(jax.random.key(0), (2, 4, 6)),
    "v": 0.3 * jax.random.normal(jax.random.key(1), (4, 6)),
    "b": jnp.zeros(6),
}


def gradients(b1, b2, steps=STEPS):
    """Returns gradients per step and column that are hard for Adam: growing, one after silence, steady, noise, large
    and tiny.
    """
    t, rng = np.arange(steps)[:, None, None], np.random.default_rng(0)
    worst = np.where(t > steps - 300, (b2 / max(b1, 0.5)) ** np.minimum(t - steps, 0.0), 0.0)
    spike = np.where(t == steps - 1, 1e6, 1e-6)
    noise = rng.standard_normal((steps, 4, 1)) * np.exp(3 * rng.standard_normal((steps, 1, 1)))
    turns = np.where(t // 400 % 2 == 0, 1.0, -1e-3)
    columns = [worst, spike, np.ones((steps, 1, 1)), noise, turns, 1e-12 * noise]
    signs = np.sign(rng.standard_normal((1, 4, 6)))
    g = np.concatenate([np.broadcast_to(c, (steps, 4, 1)) for c in columns], -1) * signs
    return {"w": jnp.asarray(np.stack([g, -g], 1), jnp.float32), "v": jnp.asarray(g, jnp.float32)}


@functools.partial(jax.jit, static_argnums=0)
def run(tx, params, grads):
    """Returns for each step and matrix: the largest weight, its bound, and the largest update."""

    def step(carry, grads):
        params, state = carry
        grads = {name: grads.get(name, jnp.ones_like(p)).astype(p.dtype) for name, p in params.items()}
        if isinstance(tx, FusedTransformation):
            old = params
            params, state = tx.step(grads, state, params)
            updates = optax.tree.sub(params, old)
        else:
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        bounds = {path[0]: bound for path, bound in fp8jax.get_weight_amax_bounds(state).items()}
        largest = [{k: jnp.max(jnp.abs(tree[k]), (-2, -1)) for k in ("w", "v")} for tree in (params, updates)]
        return (params, state), (largest[0], bounds, largest[1])

    return jax.lax.scan(step, (params, tx.init(params)), grads)[1]


def groups():
    """Two learning rates, one with a limit and one measured; one group without decay."""
    limit = fp8jax.max_adam_step(SCHEDULE, 0.9, 0.95)
    return optax.multi_transform(
        {
            "a": fp8jax.with_weight_bounds(
                fp8jax.compressed_adamw(SCHEDULE, 0.9, 0.95, weight_decay=0.0), limit, INTERVAL
            ),
            "b": optax.chain(optax.lion(1e-3, weight_decay=0.1), fp8jax.track_weight_amax(INTERVAL)),
        },
        {"w": "a", "v": "b", "b": "b"},
    )


def adamw(b2, make=optax.adamw, rate=SCHEDULE, decay=0.1, **kwargs):
    limit = fp8jax.max_adam_step(rate, 0.9, b2, decay)
    clip = optax.clip_by_global_norm(1e3)
    return optax.chain(
        clip, make(rate, 0.9, b2, weight_decay=decay, **kwargs), fp8jax.track_weight_amax(INTERVAL, limit)
    )


def fused(b2, **kwargs):
    limit = fp8jax.max_adam_step(SCHEDULE, 0.9, b2, 0.1)
    tx = fp8jax.compressed_adamw(SCHEDULE, 0.9, b2, weight_decay=0.1, min_size=0, **kwargs)
    return fp8jax.with_clipping(1e3, fp8jax.with_weight_bounds(tx, limit, INTERVAL))


CASES = {
    "fused": (fused(0.999, mu="fp32", nu="fp32"), 0.999, jnp.float32),
    "fused, quantized moments": (fused(0.95), 0.95, jnp.float32),
    "fused, bf16": (fused(0.95, mu="fp32", nu="fp32"), 0.95, jnp.bfloat16),
    "fused, masters in 16 bits": (fused(0.95, mu="fp32", nu="fp32", master="bf16+int8"), 0.95, jnp.bfloat16),
    "fused, masters in 24 bits": (fused(0.95, master="bf16+int16"), 0.95, jnp.bfloat16),
    "masters in 16 bits": (adamw(0.95, fp8jax.compressed_adamw, min_size=0, master="bf16+int8"), 0.95, jnp.bfloat16),
    "noise": (adamw(0.95, fp8jax.compressed_adamw, min_size=0, master="bf16+stochastic"), 0.95, jnp.bfloat16),
    "adamw": (adamw(0.999), 0.999, jnp.float32),
    "quantized moments": (adamw(0.95, fp8jax.compressed_adamw, min_size=0), 0.95, jnp.float32),
    "sgd, measured": (optax.chain(optax.sgd(1e-3, 0.9), fp8jax.track_weight_amax(INTERVAL)), 0.95, jnp.float32),
    "bf16": (adamw(0.95), 0.95, jnp.bfloat16),
    "groups": (groups(), 0.95, jnp.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_no_weight_exceeds_its_bound(case):
    tx, b2, dtype = CASES[case]
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    largest, bounds, _ = jax.tree.map(np.asarray, run(tx, params, gradients(0.9, b2)))
    for name in ("w", "v"):
        assert bounds[name].shape == (STEPS, *PARAMS[name].shape[:-2])
        assert (largest[name].astype(np.float32) <= bounds[name]).all(), name
        # A new measurement is within a step of the amax. In between, the bound differs, or the test would show nothing.
        ratio = bounds[name][INTERVAL] / largest[name][INTERVAL].astype(np.float32)
        assert (ratio < 1.3).all()
        assert (bounds[name][INTERVAL - 1] > bounds[name][INTERVAL]).all() or case == "sgd, measured"


@pytest.mark.parametrize("fused", [True, False], ids=["step", "update"])
def test_a_bound_follows_a_master_whose_weight_has_not_moved(fused):
    """Each step is 1/50 of the distance of bf16 numbers: 200 of them move the weight, none does alone."""
    rate, ones = 1e-4, {"w": jnp.ones((8, 8), jnp.bfloat16)}
    tx = fp8jax.with_weight_bounds(
        fp8jax.compressed_adamw(rate, 0.9, 0.95, weight_decay=0.0, min_size=0, master="bf16+int8"),
        fp8jax.max_adam_step(rate, 0.9, 0.95),
        interval=50,
    )
    grads, step = {"w": -ones["w"]}, jax.jit(tx.step if fused else functools.partial(by_updates, tx))
    params, state = ones, tx.init(ones)
    for _ in range(200):
        params, state = step(grads, state, params)
        master = fp8jax.master_weights(state, params)["w"]
        assert jnp.maximum(master.max(), params["w"].max()) <= state[1].bounds["w"]
    assert params["w"].max() > 1
    # The largest change of a step, and a bf16 rounding twice.
    assert state[1].bounds["w"] < 1 + 1.2 * 200 * rate + 3 * 2.0**-8


def by_updates(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def test_bounds_hold_where_the_format_has_no_bits_left():
    """Warm-up from zero weights: fp16 masters round to its smallest number, which is half as large again."""
    rate, zeros = 4e-8, {"w": jnp.zeros((8, 8), jnp.float16)}
    adamw = fp8jax.compressed_adamw(rate, 0.9, 0.95, eps=0.0, weight_decay=0.0, min_size=0, master="fp16+int8")
    tx, grads = fp8jax.with_weight_bounds(adamw, fp8jax.max_adam_step(rate, 0.9, 0.95), 2), {"w": jnp.ones((8, 8))}
    params, state = zeros, tx.init(zeros)
    for _ in range(3):
        params, state = tx.step(grads, state, params)
        master = jnp.abs(fp8jax.master_weights(state, params)["w"])
        assert 0 < jnp.maximum(master, jnp.abs(params["w"])).max() <= state[1].bounds["w"] < 5e-7


@pytest.mark.parametrize("master", ["bf16+int8", "bf16+stochastic"])
def test_what_moves_rounded_weights_is_not_cut_to_a_limit(master):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    adamw = fp8jax.compressed_adamw(1e-4, 0.9, 0.95, min_size=0, master=master)
    limit = fp8jax.max_adam_step(1e-4, 0.9, 0.95)
    actual = [params, params]
    for i, tx in enumerate((adamw, optax.chain(adamw, fp8jax.track_weight_amax(limit=limit)))):
        state, update = tx.init(params), jax.jit(tx.update)
        for _ in range(20):
            updates, state = update(params, state, actual[i])
            actual[i] = optax.apply_updates(actual[i], updates)
    jax.tree.map(np.testing.assert_array_equal, *actual)
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (params, actual[0])), strict=True))


def test_loaded_weights_with_masters_have_the_bounds_of_these():
    tx = fp8jax.with_weight_bounds(
        fp8jax.compressed_adamw(1e-4, 0.9, 0.95, min_size=0, master="bf16+int8"), fp8jax.max_adam_step(1e-4, 0.9, 0.95)
    )
    high, remainder = fp8jax.split_master_weights({"w": jnp.full((8, 8), 1.003)}, "bf16+int8")
    state = optax.tree.set(tx.init(high), remainder=remainder)
    state, params = fp8jax.reset_weight_amax_bounds(state, high), high
    assert params["w"].max() < fp8jax.master_weights(state, params)["w"].max() <= state[1].bounds["w"]


def test_the_limit_is_reached_and_more_than_a_learning_rate():
    # For plain Adam: gradients that grow as (b2 / b1)^i after zeros; the learning rate is 1.
    for b2, least in ((0.999, 6.5), (0.95, 1.16)):
        limit = fp8jax.max_adam_step(1.0, 0.9, b2)
        at = np.asarray(limit(jnp.arange(STEPS), jnp.zeros(STEPS)))
        tx = optax.chain(optax.adam(1.0, 0.9, b2), fp8jax.track_weight_amax(INTERVAL))
        _, _, updates = jax.tree.map(np.asarray, run(tx, PARAMS, gradients(0.9, b2)))
        actual = updates["w"].max(-1)
        assert (actual <= at).all()
        assert actual[-1] > 0.998 * at[-1]
        assert actual[-1] > least
        np.testing.assert_allclose(at[0], 1, rtol=2e-3)  # the first step is of one learning rate
        decayed = fp8jax.max_adam_step(1.0, 0.9, b2, 0.25)(jnp.arange(STEPS), jnp.full(STEPS, 2.0))
        np.testing.assert_allclose(decayed - at, 0.25 * 2.0, rtol=1e-2)


def test_limits_that_do_not_exist_are_refused_and_updates_beyond_a_limit_are_cut():
    with pytest.raises(ValueError, match=r"b1=0.99 and b2=0.95 one step of Adam is not bounded"):
        fp8jax.max_adam_step(1e-3, 0.99, 0.95)
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\)"):
        fp8jax.max_adam_step(1e-3, 1.0)
    with pytest.raises(ValueError, match="add both to static_args"):
        jax.eval_shape(lambda b2: fp8jax.max_adam_step(1e-3, b2=b2)(1, 0.0), 0.95)
    for interval in (0, -1, 2.5, float("nan")):
        with pytest.raises(ValueError, match=f"interval must be a positive number of steps, not {interval}"):
            fp8jax.track_weight_amax(interval)
    tx = fp8jax.track_weight_amax(limit=lambda count, bounds: 0.5 + 0 * bounds)
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    updates = {"w": jnp.array([[0.1, 0.7, -9], [jnp.nan, jnp.inf, 0.5]]), "b": jnp.full(3, 9.0)}
    clipped, state = tx.update(updates, tx.init(params), params)
    np.testing.assert_array_equal(clipped["w"], [[updates["w"][0, 0], 0.5, -0.5], [np.nan, np.inf, 0.5]])
    np.testing.assert_array_equal(clipped["b"], updates["b"])
    np.testing.assert_allclose(state.bounds["w"], 1.5, rtol=1e-6)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(updates, state)


def test_parameters_that_are_loaded_are_measured_again():
    tx = optax.chain(optax.adam(1e-3), fp8jax.track_weight_amax())
    state = tx.init(PARAMS)
    loaded = jax.tree.map(lambda p: 7 * p, PARAMS)
    state = fp8jax.reset_weight_amax_bounds(state, loaded)
    for path, bound in fp8jax.get_weight_amax_bounds(state).items():
        np.testing.assert_array_equal(bound, Automatic().measure_amax(loaded[path[0]]))
    with pytest.raises(ValueError, match="v is tracked by track_weight_amax but missing"):
        fp8jax.reset_weight_amax_bounds(state, {"w": loaded["w"]})
    with pytest.raises(ValueError, match="add fp8jax"):
        fp8jax.get_weight_amax_bounds(optax.adam(1e-3).init(PARAMS))
    with pytest.raises(ValueError, match="two trackers have the parameter"):
        fp8jax.get_weight_amax_bounds((state, state))


def test_a_fused_step_is_that_of_the_chain_and_one_that_is_not_applied_leaves_bounds():
    limit = fp8jax.max_adam_step(0.01, 0.9, 0.95, 0.1)
    adamw = fp8jax.compressed_adamw(0.01, 0.9, 0.95, weight_decay=0.1, mu="fp32", nu="fp32")
    tx = fp8jax.with_weight_bounds(adamw, limit, 2)
    grads = jax.tree.map(lambda g: g[7], gradients(0.9, 0.95, 8)) | {"b": jnp.ones(6)}
    state = tx.init(PARAMS)
    params, after = jax.jit(tx.step)(grads, state, PARAMS)
    updates, expected = jax.jit(tx.update)(grads, state, PARAMS)
    applied = optax.apply_updates(PARAMS, updates)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), (params, after), (applied, expected))
    assert after[1].count == 1
    skipped = jax.jit(functools.partial(tx.step, apply_if=False))(grads, state, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, skipped, (PARAMS, state))


def test_a_fused_step_cuts_directions_that_rounded_moments_make_too_long():
    """A second moment that is far too small for its first moment, as rounding can leave it."""
    limit = fp8jax.max_adam_step(1.0, 0.9, 0.95)
    adamw = fp8jax.compressed_adamw(1.0, 0.9, 0.95, weight_decay=0.0, mu="fp32", nu="fp32")
    tx = fp8jax.with_weight_bounds(adamw, limit)
    adam, bounds = tx.init(PARAMS)
    adam = adam._replace(mu=jax.tree.map(jnp.ones_like, PARAMS), nu=jax.tree.map(lambda p: 1e-6 + 0 * p, PARAMS))
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    params, state = tx.step(zeros, (adam, bounds), PARAMS)
    updates, of_update = tx.update(zeros, (adam, bounds), PARAMS)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), state[1], of_update[1])
    np.testing.assert_allclose(optax.apply_updates(PARAMS, updates)["w"], params["w"], rtol=1e-5)
    assert all(
        np.abs(x).max() > 100 for x in jax.tree.leaves(optax.tree.sub(adamw.step(zeros, adam, PARAMS)[0], PARAMS))
    )
    max_change = limit(jnp.int32(0), jnp.float32(0))
    for name, bound in (("w", state[1].bounds["w"]), ("v", state[1].bounds["v"])):
        assert (jnp.max(jnp.abs(params[name]), (-2, -1)) <= bound).all()
        assert np.abs(params[name] - PARAMS[name]).max() > 0.998 * max_change


def test_what_cannot_be_tracked_in_a_fused_step_is_refused():
    limit = fp8jax.max_adam_step(1e-3, 0.9, 0.95)
    with pytest.raises(TypeError, match="use track_weight_amax as the last of a chain"):
        fp8jax.with_weight_bounds(optax.adamw(1e-3), limit)
    with pytest.raises(TypeError, match="use track_weight_amax for other limits"):
        fp8jax.with_weight_bounds(fp8jax.compressed_adamw(1e-3), lambda count, bounds: bounds)
    tx = fp8jax.with_weight_bounds(fp8jax.compressed_adamw(1e-3, b2=0.95), limit)
    with pytest.raises(ValueError, match="omit key"):
        tx.step(PARAMS, tx.init(PARAMS), PARAMS, key=jax.random.key(0))
    tx = fp8jax.with_weight_bounds(fp8jax.compressed_adamw(1e-3, b2=0.95, master="bf16+stochastic"), limit)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    with pytest.raises(ValueError, match=r"master .bf16.stochastic. can round weights away from zero"):
        tx.step(params, tx.init(params), params)
    tx = fp8jax.with_weight_bounds(fp8jax.fp8lm_adamw(1e-3, b2=0.95, master="bf16+int8"), limit)
    for move in (tx.step, tx.update):
        with pytest.raises(ValueError, match="fp8lm_adamw does not bound its updates"):
            move(params, tx.init(params), params)
    with pytest.raises(ValueError, match="interval must be a positive number"):
        fp8jax.with_weight_bounds(fp8jax.compressed_adamw(1e-3), limit, 0)


def test_reset_bounds_are_those_of_all_shards():
    tx = fp8jax.track_weight_amax()
    params = {"w": jnp.asarray([[1.0, -2.0], [3.0, 0.5]])}
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=kinds, devices=jax.devices()[:2])
    rows, replicated = jax.P("fsdp"), jax.P()
    state = tx.init(params)

    def reset(state, params):
        return fp8jax.reset_weight_amax_bounds(state, params, axis_name="fsdp").bounds["w"][None]

    actual = jax.shard_map(reset, mesh=mesh, in_specs=(replicated, rows), out_specs=rows, check_vma=False)(
        state, params
    )
    np.testing.assert_array_equal(actual, [3, 3])

    def update(updates, params):
        tx = fp8jax.track_weight_amax(axis_name="fsdp")
        state = tx.init(params)
        return jnp.stack([bounds["w"] for bounds in (state.bounds, tx.update(updates, state, params)[1].bounds)])

    updates = {"w": jnp.asarray([[0.5, -0.5], [0.25, 4.0]])}
    found = jax.shard_map(lambda *args: update(*args)[None], mesh=mesh, in_specs=(rows, rows), out_specs=rows)
    np.testing.assert_allclose(found(updates, params), [[3, 7], [3, 7]], rtol=1e-6)


def test_without_a_first_moment_a_step_is_bounded_by_the_second_alone():
    """One gradient after none: v is 1 - b2 of its square, over 1 - b2^t."""
    limit, counts = fp8jax.max_adam_step(1.0, b1=0.0, b2=0.95), np.arange(5)
    found = [float(limit(jnp.int32(count), jnp.float32(0))) for count in counts]
    np.testing.assert_allclose(found, np.sqrt((1 - 0.95 ** (counts + 1.0)) / 0.05), rtol=2e-3)


def test_arrays_that_no_linear_layer_quantizes_are_not_tracked():
    shapes = {"w": jnp.ones((4, 4)), "table": jnp.ones((4, 4), jnp.int32), "bias": jnp.ones(4)}
    bounds = fp8jax.track_weight_amax().init(shapes).bounds
    assert [name for name, bound in bounds.items() if not isinstance(bound, optax.MaskedNode)] == ["w"]


def test_a_negative_rate_moves_weights_as_far():
    """As for `optax.scale_by_adam`, whose updates go uphill."""
    bounds, count = jnp.float32([0.5, 2.0]), jnp.int32(3)
    down, up = (fp8jax.max_adam_step(rate, b2=0.95, weight_decay=0.1)(count, bounds) for rate in (0.1, -0.1))
    assert (down > 0.1).all()
    np.testing.assert_array_equal(up, down)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_shows(bad):
    tx = fp8jax.track_weight_amax(limit=lambda count, bounds: 0.1 + 0 * bounds)
    params = {"w": jnp.ones((2, 3))}
    updates = np.asarray([[bad, 5, -0.05], [0, -5, 0.1]], np.float32)
    actual, _ = tx.update({"w": jnp.asarray(updates)}, tx.init(params), params)
    np.testing.assert_array_equal(actual["w"], np.where(np.isfinite(updates), np.clip(updates, -0.1, 0.1), updates))
