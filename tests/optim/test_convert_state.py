"""`convert_state`: moments, count and wrapper states of another optimizer. Unknown states are refused."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8jax
from fp8jax import QTensor

RATE = optax.linear_schedule(1e-2, 1e-3, 20)
SETTINGS = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1}
EXACT = functools.partial(optax.adamw, RATE, **SETTINGS)
OURS = {
    "compressed": functools.partial(fp8jax.compressed_adamw, RATE, min_size=0, **SETTINGS),
    "e5m2": functools.partial(fp8jax.compressed_adamw, RATE, min_size=0, mu="e5m2", nu="bf16", **SETTINGS),
    "fp8lm": functools.partial(fp8jax.fp8lm_adamw, RATE, min_size=0, **SETTINGS),
    "around": lambda: fp8jax.compress_state(EXACT(), min_size=1),
    "chain": lambda: optax.chain(fp8jax.clip_by_global_norm(1e9), OURS["compressed"]()),
}


def params():
    return {"w": jax.random.normal(jax.random.key(0), (6, 256)), "b": jnp.ones(7)}


def run(tx, p, state, steps):
    """Returns the parameters and the state after these steps. Gradients depend only on the step's number."""
    update = jax.jit(tx.update)
    for i in steps:
        leaves, tree = jax.tree.flatten(p)
        keys = jax.random.split(jax.random.key(i), len(leaves))
        scale = 10.0 ** -(i / 4)
        g = tree.unflatten([scale * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])
        updates, state = update(g, state, p)
        p = optax.apply_updates(p, updates)
    return p, state


@functools.cache
def exact(steps):
    tx, p = EXACT(), params()
    return run(tx, p, tx.init(p), range(steps))


def test_there_and_back_without_8_bits_gives_the_bits_of_a_run_that_changes_nothing():
    """Counts continue, also those of schedules."""
    p, state = exact(4)
    ours = fp8jax.compressed_adamw(RATE, mu="fp32", nu="fp32", **SETTINGS)
    state = fp8jax.convert_state(state, ours, p)
    p, state = run(ours, p, state, range(4, 8))
    assert int(state.count) == 8
    p, state = run(EXACT(), p, fp8jax.convert_state(state, EXACT(), p), range(8, 12))
    chex.assert_trees_all_equal((p, state), exact(12))


@pytest.mark.parametrize("name", OURS)
def test_a_run_that_changes_its_optimizer_midway_and_back_goes_where_one_does_that_keeps_it(name):
    ours = OURS[name]()
    p, state = exact(4)
    template = ours.init(p)
    converted = fp8jax.convert_state(state, ours, p)
    chex.assert_trees_all_equal_shapes_and_dtypes(converted, template)
    for moment in ("mu", "nu"):
        expected, actual = (optax.tree.get(x, moment) for x in (state, converted))
        spec = actual["w"].spec if isinstance(actual["w"], QTensor) else None
        step = fp8jax.formats.get(spec.format if spec else "bf16").mantissa_bits if not (spec and spec.expand) else 3
        for key in expected:
            x = actual[key].dequantize() if isinstance(actual[key], QTensor) else actual[key].astype(jnp.float32)
            error = np.abs(x - expected[key]) / np.abs(expected[key]).max()
            assert error.max() <= 2.0 ** -(step + 1) * 1.001, (moment, key)
    p, state = run(ours, p, converted, range(4, 8))
    assert int(optax.tree.get_all_with_path(state, "count")[0][1]) == 8
    p, state = run(EXACT(), p, fp8jax.convert_state(state, EXACT(), p), range(8, 12))
    chex.assert_trees_all_equal_shapes_and_dtypes(state, EXACT().init(p))
    expected, _ = exact(12)
    start, _ = exact(4)
    for a, b, s in zip(*map(jax.tree.leaves, (p, expected, start)), strict=True):
        assert np.abs(a - b).max() <= 0.15 * np.abs(b - s).max() + 2e-3 * (name == "fp8lm")
    # Without conversion the moments would begin at zero, which is much farther away.
    lost, _ = run(EXACT(), exact(4)[0], EXACT().init(params()), range(4, 12))
    assert np.abs(lost["w"] - expected["w"]).max() > 0.3 * np.abs(expected["w"] - start["w"]).max()


def test_wrappers_are_taken_over_where_both_have_them():
    p = params()
    old = optax.inject_hyperparams(optax.adamw)(1e-2)
    new = optax.inject_hyperparams(functools.partial(fp8jax.compressed_adamw, min_size=0))(1e-2)
    _, state = run(old, p, old.init(p), range(3))
    state.hyperparams["learning_rate"] = jnp.float32(0.5)
    converted = fp8jax.convert_state(state, new, p)
    assert float(converted.hyperparams["learning_rate"]) == 0.5
    assert int(converted.inner_state.count) == int(converted.count) == 3
    further = optax.inject_hyperparams(lambda learning_rate, further: optax.adamw(learning_rate * further))(0.25, 2.0)
    converted = fp8jax.convert_state(further.init(p), new, p)
    assert float(converted.hyperparams["learning_rate"]) == 0.25
    assert converted.hyperparams.keys() == new.init(p).hyperparams.keys()
    sums = optax.MultiSteps(optax.adamw(1e-2), 4).gradient_transformation()
    _, state = run(sums, p, sums.init(p), range(2))
    again = optax.MultiSteps(fp8jax.compressed_adamw(1e-2, min_size=0), 4).gradient_transformation()
    chex.assert_trees_all_equal(fp8jax.convert_state(state, again, p).acc_grads, state.acc_grads)
    with pytest.raises(ValueError, match="no state that corresponds to the MultiStepsState"):
        fp8jax.convert_state(state, OURS["compressed"](), p)


def test_master_weights_of_fp8_lm_are_kept_between_its_settings():
    p = params()
    tx, other = (fp8jax.fp8lm_adamw(1e-2, min_size=0, mu=mu) for mu in ("e4m3", "e5m2"))
    p, state = run(tx, p, tx.init(p), range(2))
    converted = fp8jax.convert_state(state, other, jax.tree.map(jnp.zeros_like, p))
    chex.assert_trees_all_equal(converted.master, state.master)
    assert converted.mu["w"].codes.dtype == jnp.float8_e5m2
    for i, x in enumerate((converted.master, converted.mu, converted.nu)):
        np.testing.assert_allclose(converted.largest["w"][i], jnp.abs(x["w"].dequantize()).max(), rtol=1e-6)
    # Moments with the same storage are copied; others are rounded like those of the new optimizer.
    slow, fast = (fp8jax.compressed_adamw(1e-2, expand=expand, min_size=0) for expand in ("coat", True))
    converted_too = fp8jax.convert_state(slow.init(p), fast, p)
    assert jax.tree.structure(converted_too) == jax.tree.structure(fast.init(p)) != jax.tree.structure(slow.init(p))
    scale = np.asarray(converted.mu["w"].scale)
    assert (np.frexp(scale)[0] == 0.5).all(), "a power of two"


def test_remainders_of_masters_have_as_many_bits_as_the_new_optimizers():
    makers = {n: fp8jax.compressed_adamw(RATE, min_size=0, master=f"bf16+int{n}", **SETTINGS) for n in (8, 16)}
    # The last one's remainder is the largest there is: rounded to 8 bits it would be one more than those.
    expected = {"w": params()["w"].at[0, 0].set(1 + 2.0**-8 - 2.0**-23)}
    high, rest = fp8jax.split_master_weights(expected, "bf16+int16")
    assert int(rest["w"][0, 0]) == 2**15 - 1
    state = optax.tree.set(makers[16].init(high), remainder=rest)
    shorter = fp8jax.convert_state(state, makers[8], high)
    short, again = (
        fp8jax.master_weights(x, high)["w"] for x in (shorter, fp8jax.convert_state(shorter, makers[16], high))
    )
    error = np.abs(short - expected["w"]) / 2.0 ** np.floor(np.log2(np.abs(expected["w"])))
    assert error[0, 0] == pytest.approx(2.0**-15, rel=0.01)
    assert error.max() <= 2.0**-15
    assert error[np.asarray(rest["w"]) < 127.5 * 256].max() <= 2.0**-16
    np.testing.assert_array_equal(again, short)


def test_a_converted_state_lies_where_one_from_the_start_does():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.sharding.NamedSharding(mesh, jax.P(None, "x"))
    p = {"w": jax.device_put(jnp.ones((6, 1024)), where)}
    tx = OURS["compressed"]()
    actual = fp8jax.convert_state(EXACT().init({"w": jnp.ones((6, 1024))}), tx, p)
    moments = [jax.tree.map(lambda x: x.sharding, state.mu) for state in (actual, tx.init(p))]
    assert moments[0] == moments[1]
    assert moments[0]["w"].codes == where


def test_states_of_flax_are_converted_with_their_variables():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    p = nnx.state(model, nnx.Param)
    tx = OURS["compressed"]()
    converted = fp8jax.convert_state(nnx.Optimizer(model, EXACT(), wrt=nnx.Param).opt_state, tx, p)
    chex.assert_trees_all_equal(converted, tx.init(p))


def test_what_cannot_be_converted_is_refused():
    p = params()
    with pytest.raises(TypeError, match="tx is an optimizer, got a dict"):
        fp8jax.convert_state({}, {}, {})
    with pytest.raises(ValueError, match="the old state has 0 parts with count, mu, nu"):
        fp8jax.convert_state(optax.sgd(1e-2).init(p), OURS["compressed"](), p)
    with pytest.raises(ValueError, match="belongs to other parameters"):
        fp8jax.convert_state(EXACT().init({"w": p["w"]}), OURS["compressed"](), p)
    with pytest.raises(ValueError, match=r"shape \(6, 256\), but the new one has shape \(256, 6\)"):
        fp8jax.convert_state(EXACT().init(p), OURS["compressed"](), dict(p, w=p["w"].T))


TAKERS = {
    "compressed_adamw": OURS["compressed"],
    "scale_by_compressed_adam": functools.partial(fp8jax.scale_by_compressed_adam, min_size=0),
    "fp8lm_adamw": OURS["fp8lm"],
}


@pytest.mark.parametrize("form", ["update", "step"])
@pytest.mark.parametrize("name", TAKERS)
def test_the_state_of_another_optimizer_is_refused_with_the_way_to_convert_it(name, form):
    tx, p = TAKERS[name](), params()
    if not hasattr(tx, form):
        return
    call = getattr(tx, form)
    for other in (EXACT().init(p), EXACT().init(p)[0], {"count": 0, "mu": p, "nu": p}):
        with pytest.raises(TypeError, match=r"expects the state that its own `init` returns.*fp8jax.convert_state"):
            call(p, other, p)
    # Field names and class alone do not identify the optimizer's own state: its moments would stay unchanged.
    state = tx.init(p)
    for moment in ("mu", "nu"):
        fp32 = jax.tree.map(jnp.zeros_like, p)
        with pytest.raises(ValueError, match=rf"{moment} of \['w'\] is stored as float32, but .*convert_state"):
            call(p, state._replace(**{moment: fp32}), p)
    q = fp8jax.quantize(p["w"], fp8jax.QuantSpec(**{**vars(state.mu["w"].spec), "format": "e5m2"}))
    with pytest.raises(ValueError, match=r"mu of \['w'\] is stored as codes:e5m2"):
        call(p, state._replace(mu=dict(state.mu, w=q)), p)


def test_so_is_a_plain_state_around_a_transformation():
    tx, p = OURS["around"](), params()
    with pytest.raises(ValueError, match=r"\[0\]\.mu\['w'\] is stored as float32.*convert_state"):
        tx.update(p, EXACT().init(p), p)
