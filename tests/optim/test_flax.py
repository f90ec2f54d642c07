"""Flax's own optimizer and serialization with an 8-bit state, without further changes."""

import importlib
import sys

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint
import pytest
from flax import linen as nn
from flax import nnx, serialization
from flax.nnx.training.optimizer import OptVariable
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax import QTensor
from fp8jax.core import flax_state
from tests.rows import few, slow

SMALL = {"group_size": 32, "min_size": 1}
EXACT = {
    "compressed_adamw": lambda: optax.adamw(1e-2),
    "in a chain": lambda: optax.chain(optax.clip(1.0), optax.scale_by_adam(), optax.scale_by_learning_rate(1e-2)),
    "lion": lambda: optax.lion(1e-2),
    "sgd": lambda: optax.sgd(0.3, momentum=0.9),
    "adafactor": lambda: optax.adafactor(1e-2, momentum=0.9, min_dim_size_to_factor=32),
    "muon": lambda: optax.contrib.muon(1e-2),
}
OURS = {
    "compressed_adamw": lambda: fp8jax.compressed_adamw(1e-2, weight_decay=1e-4, **SMALL),
    "in a chain": lambda: optax.chain(
        optax.clip(1.0), fp8jax.scale_by_compressed_adam(**SMALL), optax.scale_by_learning_rate(1e-2)
    ),
    **{
        kind: lambda kind=kind: fp8jax.compress_state(EXACT[kind](), **SMALL)
        for kind in ("lion", "sgd", "adafactor", "muon")
    },
}
X = jax.random.normal(jax.random.key(1), (16, 32))


class Model(nnx.Module):
    def __init__(self, rngs, **metadata):
        self.up = nnx.Linear(32, 64, rngs=rngs, kernel_metadata=metadata)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(x)))


def start(tx):
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def step(model, optimizer):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(X) - X) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def moments(state):
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, QTensor))
    return [x for x in leaves if isinstance(x, QTensor)]


@pytest.mark.parametrize("kind", few(OURS, "compressed_adamw"))
def test_nnx_optimizer_trains_saves_restores_and_goes_on_bit_for_bit(kind, tmp_path):
    jitted = nnx.jit(step)
    exact = start(EXACT[kind]())
    model, optimizer = start(OURS[kind]())
    assert {type(q.codes) for q in moments(optimizer.opt_state)} == {OptVariable}
    types = jax.tree.structure(nnx.state(optimizer))
    expected = [float(jitted(*exact)) for _ in range(12)]
    actual = [float(jitted(model, optimizer)) for _ in range(12)]
    assert expected[-1] < 0.8 * expected[0], "the exact optimizer must learn for this to mean anything"
    np.testing.assert_allclose(actual, expected, rtol=0.05)
    assert jax.tree.structure(nnx.state(optimizer)) == types

    saved = nnx.state((model, optimizer))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        fresh = start(OURS[kind]())
        nnx.update(fresh, checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: nnx.state(fresh))))
    for _ in range(2):
        jitted(model, optimizer)
        jitted(*fresh)
    chex.assert_trees_all_equal(nnx.state(fresh), nnx.state((model, optimizer)))


def test_without_jit_and_on_trees_of_variables_it_is_the_same_optimizer():
    """`nnx.Optimizer` passes arrays. A direct call on `nnx.state` passes Variables."""
    tx = OURS["compressed_adamw"]()
    model, optimizer = start(tx)
    losses = [float(step(model, optimizer)) for _ in range(3)]
    graph, params = nnx.split(Model(nnx.Rngs(0)))
    state, calls = tx.init(params), []
    for _ in range(3):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((nnx.merge(graph, p)(X) - X) ** 2))(params)
        updates, new = tx.update(grads, state, params)
        assert jax.tree.structure((updates, new)) == jax.tree.structure((params, state))
        params, state = optax.apply_updates(params, updates), new
        calls.append(float(loss))
    np.testing.assert_allclose(calls, losses, rtol=1e-6)
    stepped, _ = tx.step(grads, state, params)
    assert jax.tree.structure(stepped) == jax.tree.structure(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(stepped, params)


@pytest.mark.parametrize("kind", ["compressed_adamw", "muon"])
def test_optax_finds_moments_of_an_nnx_optimizer_and_bytes_are_counted(kind):
    _, optimizer = start(OURS[kind]())
    state = nnx.as_pure(optimizer.opt_state)
    actual = dict(optax.tree.get_all_with_path(state, "mu"))
    assert {QTensor} <= {type(q) for tree in actual.values() for q in moments(tree)}
    assert optax.tree.get_all_with_path(state, "count")
    sizes = fp8jax.state_bytes(optimizer.opt_state)
    assert sizes == fp8jax.state_bytes(state)
    assert sizes["mu"] >= 2 * 32 * 64
    assert sizes["other"] <= 64


@pytest.mark.slow
def test_sharding_metadata_of_parameters_reaches_the_arrays_of_their_moments():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        for sharding, of_scales in (((None, "x"), (None, None)), (("x", None), ("x", None))):
            model = Model(nnx.Rngs(0), out_sharding=sharding)
            optimizer = nnx.Optimizer(model, OURS["compressed_adamw"](), wrt=nnx.Param)
            # 64 columns are two groups, which do not divide by eight; 32 rows do.
            specs = nnx.get_partition_spec(optimizer.opt_state).mu.up.kernel
            assert specs.codes.get_value() == P(*sharding)
            assert specs.scale.get_value() == specs.expansion.get_value() == P(*of_scales)
            moment = optimizer.opt_state.nu.up.kernel
            assert moment.codes.get_value().sharding.spec == P(*sharding)
            assert np.isfinite(float(nnx.jit(step)(model, optimizer)))


def test_names_of_sharded_axes_stay_where_blocks_can_be_cut():
    """A 32 x 256 parameter with 8 groups per row: without a mesh, and with arrays on one of as many devices."""
    tx = fp8jax.compressed_adamw(1e-2, **SMALL)
    x = jnp.ones((32, 256))
    for kind in (P, lambda *names: names):
        for names, kept in (((None, "x"), (None, None)), (("x", None), ("x", None))):
            for key in ("out_sharding", "optimizer_sharding"):
                box = nnx.Param(x, eager_sharding=False, **{key: kind(*names)})
                moment = tx.init({"w": box}).mu["w"]
                actual = (part.get_metadata()[key] for part in (moment.codes, moment.scale))
                assert [tuple(each) for each in actual] == [names, kept]
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    placed = nnx.Param(jax.device_put(x, jax.NamedSharding(mesh, P(None, "x"))), optimizer_sharding=P(None, "x"))
    assert tx.init({"w": placed}).mu["w"].scale.get_metadata()["optimizer_sharding"] == (None, "x")
    # Updates are in the boxes of the parameters, for any boxes of gradients.
    params = {"w": nn.Partitioned(x, names=("y", "x"))}
    updates, _ = tx.update({"w": nnx.Param(x)}, tx.init(params), params)
    assert isinstance(updates["w"], nn.Partitioned)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "x"))
        return nn.Dense(32)(jnp.tanh(nn.Dense(64, kernel_init=init)(x)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["compressed_adamw", slow("lion")])
def test_a_partitioned_train_state_of_linen_is_sharded_trained_and_serialized(kind):
    model, tx, mesh = Linen(), OURS[kind](), jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def init(key):
        return TrainState.create(apply_fn=model.apply, params=model.init(key, X), tx=tx)

    @jax.jit
    def train(state):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((state.apply_fn(p, X) - X) ** 2))(state.params)
        return state.apply_gradients(grads=grads), loss

    whole = init(jax.random.key(0))
    shardings = nn.get_sharding(jax.eval_shape(init, jax.random.key(0)), mesh)
    state = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
    moment = optax.tree.get_all_with_path(state.opt_state, "mu")[0][1]["params"]["Dense_1"]["kernel"]
    # 64 columns are two groups, which do not divide by eight.
    assert [x.sharding.spec for x in jax.tree.leaves(moment)] == [P(None, "x"), P(None, None), P(None, None)]
    types = jax.tree.structure(state)
    for _ in range(3):
        (whole, expected), (state, actual) = train(whole), train(state)
        np.testing.assert_allclose(actual, expected, rtol=1e-3)
    assert jax.tree.structure(state) == types
    restored = serialization.from_bytes(init(jax.random.key(1)), serialization.to_bytes(state))
    chex.assert_trees_all_equal(restored, state)


def test_flax_serialization_keeps_every_bit():
    tx = optax.chain(optax.clip(1.0), fp8jax.compressed_adamw(1e-2, mu="e5m2", nu="ude8", expand=False, **SMALL))
    p = {"w": jax.random.normal(jax.random.key(0), (4, 96)), "b": jnp.ones(3)}
    _, state = tx.update(p, tx.init(p), p)
    as_dict = serialization.to_state_dict(state)
    assert as_dict["1"]["mu"]["w"]["codes:e5m2:group32:v1"].dtype == jnp.float8_e5m2
    for restored in (
        serialization.from_state_dict(tx.init(p), as_dict),
        serialization.from_bytes(tx.init(p), serialization.to_bytes(state)),
    ):
        chex.assert_trees_all_equal(restored, state)
        chex.assert_trees_all_equal_shapes_and_dtypes(restored, state)
    other = fp8jax.compressed_adamw(1e-2, mu="e4m3", nu="ude8", expand=False, **SMALL)
    with pytest.raises(
        ValueError, match=r"contains codes:e5m2:group32:v1, scale, but its template contains codes:e4m3:group32:v1"
    ):
        serialization.from_state_dict(optax.chain(optax.clip(1.0), other).init(p), as_dict)


def test_flax_may_be_imported_after_the_last_state_is_made(monkeypatch):
    state = fp8jax.compressed_adamw(1e-2, min_size=0).init({"w": jnp.ones((4, 128))})
    monkeypatch.setattr(flax, "serialization", serialization)
    monkeypatch.setattr(sys, "meta_path", [x for x in sys.meta_path if x is not flax_state._ImportHook])
    monkeypatch.delitem(sys.modules, "flax.serialization")
    flax_state.install()
    later = importlib.import_module("flax.serialization")
    assert later is not serialization
    assert later.to_bytes(state) == serialization.to_bytes(state)
    chex.assert_trees_all_equal(later.from_bytes(state, later.to_bytes(state)), state)
