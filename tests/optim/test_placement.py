"""Placement of the state: with its parameters, committed only if they are, and one program for all steps."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax import QTensor
from tests.rows import few

OURS = functools.partial(fp8jax.compress_state, min_size=1)
KINDS = {
    "adamw": fp8jax.compressed_adamw(1e-2, min_size=1),
    "scale_by_adam": fp8jax.scale_by_compressed_adam(min_size=1),
    "lion": OURS(optax.lion(1e-2)),
    "schedule_free": OURS(optax.contrib.schedule_free_adamw(1e-2), {"z": "e4m3"}),
}
COMPILE = "/jax/core/compile/backend_compile_duration"
events: collections.Counter = collections.Counter()
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.update([event]))


def params():
    return {"w": jax.random.normal(jax.random.key(0), (8, 1024)), "b": jnp.zeros(8)}


def programs(tx, p, state, x, steps=3):
    """Returns the number of programs that XLA compiles for these steps, and the last loss."""

    def loss(p, x):
        return jnp.mean((p["b"] + x @ p["w"] @ p["w"].T) ** 2)

    @jax.jit
    def step(p, state, x):
        value, grads = jax.value_and_grad(loss)(p, x)
        updates, state = tx.update(grads, state, p)
        return optax.apply_updates(p, updates), state, value

    before = events[COMPILE]
    for _ in range(steps):
        p, state, value = step(p, state, x)
    return events[COMPILE] - before, float(value)


@pytest.mark.parametrize("kind", few(KINDS, "adamw", "lion"))
def test_state_of_uncommitted_parameters_is_uncommitted_and_one_program_does_all_steps(kind):
    tx, p = KINDS[kind], params()
    for state in (tx.init(p), jax.jit(tx.init)(p)):
        assert not any(x.committed for x in jax.tree.leaves(state))
    assert programs(tx, p, tx.init(p), jnp.ones((16, 8)))[0] == 1


def test_a_committed_state_would_be_counted():
    """Checks that the count of programs detects a committed state."""
    tx, p = KINDS["adamw"], params()
    state = tx.init(p)
    count = jax.device_put(state.count, jax.devices()[0])
    assert programs(tx, p, state._replace(count=count), jnp.ones((16, 8)))[0] == 2


@pytest.mark.parametrize("kind", few(KINDS, "adamw", "lion"))
def test_a_batch_over_eight_devices_takes_uncommitted_state(kind):
    tx, p = KINDS[kind], params()
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = jax.random.normal(jax.random.key(1), (16, 8))
    _, expected = programs(tx, p, tx.init(p), x)
    # The second program is of parameters that the first step put on the mesh; there, all stays where it is.
    count, actual = programs(tx, p, tx.init(p), jax.device_put(x, NamedSharding(mesh, P("x"))))
    assert count == 2
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "devices"),
    few([(kind, n) for kind in KINDS for n in (1, 8)], ("adamw", 8), ("lion", 1)),
)
def test_an_explicit_mesh_needs_no_set_mesh(kind, devices):
    tx = KINDS[kind]
    mesh = jax.make_mesh((devices,), ("x",))
    assert mesh.axis_types == (AxisType.Explicit,), "JAX's default, which this test is about"
    sharding = {"w": NamedSharding(mesh, P(None, "x")), "b": NamedSharding(mesh, P())}
    p = jax.device_put(params(), sharding)
    state = tx.init(p)
    moments = [q for q in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, QTensor)) if isinstance(q, QTensor)]
    assert moments
    for q in moments:
        assert [jax.typeof(x).sharding.spec for x in jax.tree.leaves(q)] == [P(None, "x")] * 3
    assert all(x.committed for x in jax.tree.leaves(state))
    before = events[COMPILE]
    update = jax.jit(tx.update)
    for _ in range(3):
        updates, state = update(p, state, p)
    assert events[COMPILE] - before == 1
    assert jax.tree.map(jax.typeof, updates) == jax.tree.map(jax.typeof, p)
    updates, _ = tx.update(p, state, p)
    assert jax.tree.map(jax.typeof, updates) == jax.tree.map(jax.typeof, p)


def test_shardings_for_a_state_come_from_those_of_the_parameters():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    named_sharding = functools.partial(NamedSharding, mesh)
    tx = fp8jax.compressed_adamw(1e-2, min_size=64)
    p = {"w": jnp.ones((16, 1024)), "cut": jnp.ones((16, 1536)), "b": jnp.ones(8)}
    expected = {"w": named_sharding(P(None, "x")), "cut": named_sharding(P(None, "x")), "b": named_sharding(P())}
    shardings = optax.tree.map_params(
        tx,
        lambda moment, sharding: moment.shardings(sharding) if isinstance(moment, QTensor) else sharding,
        jax.eval_shape(tx.init, p),
        expected,
        transform_non_params=lambda _: named_sharding(P()),
        is_leaf=lambda x: isinstance(x, QTensor),
    )
    state = jax.jit(tx.init, out_shardings=shardings)(p)
    assert {x.sharding.spec for x in jax.tree.leaves(state.mu["w"])} == {P(None, "x")}
    # Eight do not divide twelve groups.
    assert [x.sharding.spec for x in jax.tree.leaves(state.nu["cut"])] == [P(None, "x"), P(None, None), P(None, None)]
    assert jax.tree.map(lambda x: x.sharding, tx.init(jax.device_put(p, expected)).mu) == shardings.mu
