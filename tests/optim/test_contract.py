"""The contract of optax's own optimizers: wrappers, dtypes, abstract init, and unchanged types."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fp8jax
from tests.rows import few, slow

ADAMW = functools.partial(fp8jax.compressed_adamw, 0.05, b2=0.95, min_size=0)
LM = functools.partial(fp8jax.fp8lm_adamw, 0.05, b2=0.95, min_size=0)
SCALE = functools.partial(fp8jax.scale_by_compressed_adam, b2=0.95, min_size=0)


def params(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "w": jax.random.normal(keys[0], (6, 300)).astype(dtype),
        "layers": [jax.random.normal(keys[1], (2, 4, 128)).astype(dtype), jnp.zeros((0, 4), dtype)],
        "short": jnp.ones((), dtype),
    }


def grads(step=0, dtype=jnp.float32):
    leaves, tree = jax.tree.flatten(params(dtype))
    keys = jax.random.split(jax.random.key(100 + step), len(leaves))
    return tree.unflatten([jax.random.normal(k, x.shape).astype(x.dtype) for k, x in zip(keys, leaves, strict=True)])


def train(tx, steps=4, dtype=jnp.float32):
    p = params(dtype)
    state = tx.init(p)
    update = jax.jit(tx.update)
    for step in range(steps):
        updates, state = update(grads(step, dtype), state, p)
        p = optax.apply_updates(p, updates)
    return p, state


def assert_close_to_exact(p, tx, tolerance=0.15, rounded=1e-6):
    """Asserts that compressed moments move parameters like exact ones, up to a share of the distance."""
    exact, _ = train(tx)
    start = params()
    for a, b, s in zip(*map(jax.tree.leaves, (p, exact, start)), strict=True):
        moved = np.abs(np.asarray(b - s))
        if moved.size:
            assert np.abs(np.asarray(a - b)).max() <= tolerance * moved.max() + rounded


WRAPPERS = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "masked": lambda tx: optax.masked(tx, {"w": True, "layers": [True, False], "short": False}),
    "partition": lambda tx: optax.partition(
        {"ours": tx, "sgd": optax.sgd(0.01)},
        {"w": "ours", "layers": ["sgd", "ours"], "short": "ours"},
    ),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, every_k_schedule=2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, max_consecutive_errors=2),
}


@pytest.mark.parametrize(
    ("make", "wrapper"),
    few(
        [(make, wrapper) for make in ("compressed_adamw", "fp8lm_adamw") for wrapper in WRAPPERS],
        *(("compressed_adamw", wrapper) for wrapper in WRAPPERS), ("fp8lm_adamw", "partition"),
    ),
)  # fmt: skip
def test_works_in_the_wrappers_of_optax(make, wrapper):
    wrap = WRAPPERS[wrapper]
    make, rounded = {"compressed_adamw": (ADAMW, 1e-6), "fp8lm_adamw": (LM, 2e-3)}[make]
    p, state = train(wrap(make()))
    assert_close_to_exact(p, wrap(optax.adamw(0.05, b2=0.95)), rounded=rounded)  # masters in fp16
    assert any(x.dtype == jnp.float8_e4m3fn for x in jax.tree.leaves(state))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_no_step_changes_the_types_of_the_state(wrapper):
    tx = WRAPPERS[wrapper](ADAMW())
    p = params()
    state = tx.init(p)
    for update in (tx.update, jax.jit(tx.update)) if wrapper == "alone" else (jax.jit(tx.update),):
        _, new = update(grads(), state, p)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, new)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, jax.eval_shape(tx.init, p))


def test_multi_transform_is_partition():
    tx = optax.multi_transform({"a": ADAMW(), "b": optax.sgd(0.1)}, {"w": "a", "v": "b"})
    p = {"w": jnp.ones((4, 128)), "v": jnp.ones((4, 128))}
    updates, _ = tx.update(p, tx.init(p), p)
    np.testing.assert_allclose(np.asarray(updates["v"]), -0.1, rtol=1e-6)
    assert (np.asarray(updates["w"]) < 0).all()


def test_static_hyperparameters_are_named_where_they_cannot_be_traced():
    make = functools.partial(optax.inject_hyperparams, fp8jax.compressed_adamw)
    p = {"w": jnp.ones((40, 128))}
    tx = make(static_args=("group_size", "min_size"))(1e-3, group_size=64, min_size=0)
    assert jax.jit(tx.init)(p).inner_state.mu["w"].scale.shape == (40, 2)
    with pytest.raises(ValueError, match="static_args="):
        jax.jit(make()(1e-3, group_size=64).init)(p)


@pytest.mark.parametrize("make", [fp8jax.compressed_adamw, fp8jax.fp8lm_adamw])
def test_constants_that_were_rounded_to_16_bits_are_refused(make):
    """optax.inject_hyperparams stores settings in the parameters' dtype: 0.999 is 1 in bf16, traced or not."""
    p = {"w": jnp.ones((8, 128), jnp.bfloat16)}
    for init in (lambda tx: tx.init, lambda tx: jax.jit(tx.init)):
        with pytest.raises(TypeError, match=r"b1 has dtype bfloat16.* hyperparam_dtype=jnp.float32"):
            init(optax.inject_hyperparams(make)(1e-3))(p)
    optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(1e-3).init(p)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("tx", [ADAMW(), SCALE()], ids=["adamw", "scale"])
def test_updates_keep_the_dtype_of_the_parameters(dtype, tx):
    p = params(dtype)
    updates, state = jax.jit(tx.update)(grads(dtype=dtype), tx.init(p), p)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, p)
    without = SCALE().update(grads(dtype=dtype), SCALE().init(p))[0]
    chex.assert_trees_all_equal_shapes_and_dtypes(without, p)
    assert state.mu["short"].dtype == jnp.float32


def test_bf16_parameters_are_trained_in_fp32_arithmetic():
    p32, p16 = params(), params(jnp.bfloat16)
    tx = ADAMW()
    a, _ = jax.jit(tx.update)(grads(), tx.init(p32), jax.tree.map(lambda x: x.astype(jnp.float32), p16))
    b, _ = jax.jit(tx.update)(grads(), tx.init(p16), p16)
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x.astype(jnp.bfloat16), a), b)


def test_init_takes_abstract_parameters():
    p = params()
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), p)
    for tx in (ADAMW(), SCALE()):
        chex.assert_trees_all_equal(tx.init(abstract), tx.init(p))
        chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(tx.init, abstract), tx.init(p))


def test_optax_finds_and_maps_the_state():
    p = params()
    state = optax.chain(optax.clip(1.0), ADAMW()).init(p)
    assert set(optax.tree.get(state, "mu")) == set(p)
    assert int(optax.tree.get(state, "count")) == 0
    mapped = optax.tree.map_params(ADAMW(), lambda _: "leaf", ADAMW().init(p))
    assert (mapped.nu["w"].codes, mapped.nu["w"].scale, mapped.nu["short"]) == ("leaf", "leaf", "leaf")
    assert int(mapped.count) == 0


def test_extra_arguments_are_tolerated_and_nothing_recompiles():
    tx, p = ADAMW(), params()
    state = tx.init(p)
    traces = []

    @jax.jit
    def update(g, s, p):
        traces.append(0)
        return tx.update(g, s, p, value=1.0, unknown=None)

    for step in range(3):
        _, state = update(grads(step), state, p)
    assert len(traces) == 1


@pytest.mark.parametrize(("tx", "sharding"), [(ADAMW(), P("x")), slow(SCALE(), P(None, "x"))], ids=["adamw", "scale"])
def test_types_and_values_hold_under_an_explicit_mesh(tx, sharding):
    p = {"w": jax.random.normal(jax.random.key(0), (8, 1024)), "cut": jax.random.normal(jax.random.key(1), (16, 384))}
    g = jax.tree.map(lambda x: x[::-1] * 0.1, p)
    want_updates, want_state = jax.jit(tx.update)(g, tx.init(p), p)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        p, g = (jax.device_put(tree, sharding) for tree in (p, g))
        state = tx.init(p)
        types = jax.tree.map(jax.typeof, state)
        assert jax.tree.map(jax.typeof, jax.jit(tx.init)(p)) == types
        for update in (tx.update, jax.jit(tx.update)):
            updates, new = update(g, state, p)
            assert jax.tree.map(jax.typeof, new) == types
            assert jax.tree.map(jax.typeof, updates) == jax.tree.map(jax.typeof, p)
            chex.assert_trees_all_close(jax.device_get(updates), jax.device_get(want_updates), rtol=1e-6)
        assert jax.typeof(state.mu["w"].codes).sharding.spec == jax.typeof(p["w"]).sharding.spec
    same = jax.tree.map(
        lambda a, b: (np.asarray(a) == np.asarray(b)).mean(), jax.device_get(new), jax.device_get(want_state)
    )
    assert min(jax.tree.leaves(same)) > 0.999


def test_a_rate_may_vary_over_devices_where_parameters_do_not():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    p, rates = jax.random.normal(jax.random.key(0), (8, 1024)), jnp.asarray([1e-3, 2e-3])

    def step(p, rate):
        tx = fp8jax.compressed_adamw(rate[0])
        updates, state = tx.update(p, tx.init(p), p)
        return updates, jax.tree.leaves(optax.tree.get(state, "mu"))

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("x")), out_specs=(P("x"), P()))
    updates, _ = jax.jit(mapped)(p, rates)
    np.testing.assert_allclose(updates[8:], 2 * updates[:8], rtol=1e-5)


def test_state_of_arrays_on_an_automatic_mesh_is_sharded_like_them():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    p = {"w": jax.device_put(jnp.ones((8, 1024)), jax.NamedSharding(mesh, P(None, "x")))}
    state = ADAMW().init(p)
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(state.mu)} == {P(None, "x")}


def test_which_leaves_are_compressed_depends_on_their_global_shape_alone():
    shapes = {
        "large": (64, 128),
        "small": (31, 128),
        "narrow": (1024, 59),
        "wide enough": (1024, 60),
        "vector": (4096,),
    }
    tx = fp8jax.compressed_adamw(1e-3)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharded = tx.init({k: jnp.zeros(s, out_sharding=P("x") if s[0] % 8 == 0 else P()) for k, s in shapes.items()})
    for state in (sharded, tx.init({k: jnp.zeros(s) for k, s in shapes.items()})):
        compressed = {k for k, m in state.mu.items() if isinstance(m, fp8jax.QTensor)}
        assert compressed == {"large", "wide enough", "vector"}
    # A small group size needs more metadata than a tenth; it is not ignored for that reason.
    assert isinstance(fp8jax.compressed_adamw(1e-3, group_size=16).init(jnp.zeros((64, 128))).mu, fp8jax.QTensor)
