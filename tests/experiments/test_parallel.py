"""The training step with 8-bit gradients: results, communication, and the state of its factors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from experiments import mesh
from experiments.models.llama import LlamaConfig
from experiments.train import config, parallel
from experiments.train.optimizer import make_optimizer
from experiments.train.task import Task
from fp8jax.dist.collectives import collectives
from fp8jax.ops.products import linear
from fp8jax.recipes import Comm
from tests.dist import programs

LLAMA = LlamaConfig(vocab=64, dim=64, layers=1, heads=2, kv_heads=2, mlp_dim=128)
TOKENS = jax.random.randint(jax.random.key(1), (16, 33), 0, 64)
FP32 = dataclasses.replace(fp8jax.recipes.bf16(), weights=fp8jax.recipes.Weights("fp32", "fp32"))


def steps(recipe, where, count=1, microbatches=1):
    """Returns metrics of some steps, the state after them, and the collectives of the compiled step that send
    gradients."""
    devices = mesh.make(**where)
    rows = mesh.batches(devices) if devices.size > 1 else None
    optimizer = make_optimizer(config.Config(), recipe)
    task = Task(LLAMA, optimizer, recipe, remat=False, seed=0, rows=rows, microbatches=microbatches)
    state, placed = jax.jit(task.init)(), None
    if rows is not None:
        placed = mesh.state(devices, jax.eval_shape(task.init))
        state = jax.device_put(state, placed)
    tokens = mesh.place(TOKENS, rows)
    step = jax.jit(task.step, out_shardings=(placed, None)).lower(state, tokens).compile()
    results = []
    for _ in range(count):
        state, metrics = step(state, tokens)
        results.append({name: float(x) for name, x in metrics.items()})
    return results, state, [x for x in collectives(step.as_text()) if x.nbytes >= 4096]


@pytest.fixture(scope="module")
def one():
    return {name: steps(recipe, {"data": 1, "fsdp": 1}, 1) for name, recipe in {"fp32": FP32}.items()}


@pytest.mark.parametrize(
    "where", [{"data": 8, "fsdp": 1}, pytest.param({"data": 2, "fsdp": 2}, marks=pytest.mark.slow)], ids=str
)
def test_a_step_on_many_devices_is_one_devices_up_to_8_bits(where, one, monkeypatch):
    monkeypatch.setattr(mesh, "SMALLEST", 4096)
    recipe = dataclasses.replace(FP32, comm=Comm("e4m3"))
    (metrics,), state, sent = steps(recipe, where, microbatches=2 if where["fsdp"] == 1 else 1)
    (expected,), after, _ = one["fp32"]
    assert metrics["healthy"]
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.02)
    assert metrics["grad_norm"] != pytest.approx(expected["grad_norm"], rel=1e-6)
    old, new = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(s.opt_state[1].mu)]) for s in (after, state))
    assert np.linalg.norm(new - old) < 0.06 * np.linalg.norm(old)
    gradients = [x for x in sent if x.kind != "all-gather" or x.dtype == "u8"]
    assert {(x.kind, x.dtype) for x in gradients} == {("all-to-all", "u8"), ("all-gather", "u8")}
    matrices = sum(x.size for x in jax.tree.leaves(state.params) if x.size >= 4096)
    over_all = sum(x.nbytes for x in gradients if x.kind == "all-to-all" and x.devices == max(where.values()))
    assert over_all >= matrices * (1 if where["fsdp"] == 1 else 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("where", [{"data": 4, "fsdp": 1}, {"data": 2, "fsdp": 1, "tensor": 2}], ids=str)
def test_fp8_lm_trains_on_many_devices_and_factors_are_kept_in_its_state(where):
    recipe = fp8jax.recipes.fp8_lm()
    assert recipe.comm == Comm("e4m3", "one_phase", auto_scale=True)
    metrics, state, _ = steps(recipe, where, 4)
    assert all(m["healthy"] for m in metrics)
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    mu = np.array(jax.tree.leaves(state.factors.mu))
    assert ((mu >= 1 / where["data"]) & (mu <= 1)).all()
    assert jax.tree.structure(state.factors.mu) == jax.tree.structure(state.params)
    with pytest.raises(ValueError, match="Use --mesh with one axis"):
        steps(recipe, {"data": 2, "fsdp": 2})


def test_a_step_tells_how_many_elements_of_its_sums_in_8_bits_saturated():
    """With mu = 1/2 and two devices, a sum reaches the end of the range only if both have their amax there."""
    recipe = dataclasses.replace(FP32, comm=Comm("e4m3", "one_phase", auto_scale=True))
    devices = mesh.make(2, 1)
    rows = mesh.batches(devices)
    task = Task(LLAMA, make_optimizer(config.Config(), recipe), recipe, remat=False, seed=0, rows=rows)
    state = jax.jit(task.init)()
    state = state._replace(factors=state.factors._replace(mu=jax.tree.map(lambda mu: mu * 0 + 0.5, state.factors.mu)))
    step = jax.jit(task.step)
    results = {}
    for name, tokens in (("alike", TOKENS.at[8:].set(TOKENS[:8])), ("apart", TOKENS)):
        after, metrics = step(state, mesh.place(tokens, rows))
        assert metrics["healthy"]
        results[name] = int(metrics["saturated"])
        parts = zip(*map(jax.tree.leaves, (after.factors.saturated, state.params)), strict=True)
        assert results[name] == round(sum(float(part) * x.size for part, x in parts))
    large = sum(x.size >= 4096 for x in jax.tree.leaves(state.params))
    assert results["alike"] >= large > results["apart"]
    stopped, _ = step(state._replace(healthy=jnp.array(False)), mesh.place(TOKENS, rows))
    jax.tree.map(np.testing.assert_array_equal, stopped.factors, state.factors)
    other = dataclasses.replace(task, recipe=FP32)
    assert "saturated" not in jax.eval_shape(other.step, state._replace(factors=()), TOKENS)[1]


def test_replicas_round_gradients_stochastically_with_keys_of_their_own(monkeypatch):
    """Keys come from a device's own rows: rounding errors average out over replicas, and every run has the
    same keys."""
    recipe = dataclasses.replace(fp8jax.recipes.jetfire(), comm=Comm("e4m3"))
    devices = mesh.make(2, 1)
    task = Task(LLAMA, make_optimizer(config.Config(), recipe), recipe, remat=False, seed=0,
                      rows=mesh.batches(devices))  # fmt: skip
    state, calls = jax.jit(task.init)(), []

    def record(x):
        key = linear.key_from_data(x)
        jax.debug.callback(lambda *actual: calls.append(actual), jax.lax.axis_index("data"), jax.random.key_data(key))
        return key

    monkeypatch.setattr("fp8jax.rewrite.run.key_from_data", record)
    args = task.gradients, recipe, devices, state.params, state.model_state
    run = jax.jit(lambda tokens: parallel.gradients(*args, tokens, ())[0]["loss"])
    for _ in range(2):
        run(mesh.place(TOKENS, task.rows)).block_until_ready()
    jax.effects_barrier()
    keys = [{tuple(map(int, words)) for device, words in calls if device == replica} for replica in range(2)]
    assert len(keys[0]) == len(keys[1]) == len(calls) / 4 >= 4
    assert not keys[0] & keys[1]


FACTORS, TWO_PHASES = Comm("e4m3", "one_phase", auto_scale=True), Comm("e4m3")


@pytest.mark.parametrize(
    ("where", "comm"),
    [((2, 1, 2), FACTORS), ((1, 2, 2), FACTORS), ((2, 1, 2), TWO_PHASES)],
    ids=lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else x.form,
)
def test_devices_that_share_sequences_sum_parts_and_agree_on_factors(where, comm, monkeypatch):
    """For given gradients of each device: means over replicas, of sums over "tensor" if these are partial."""
    monkeypatch.setattr(mesh, "SMALLEST", 1024)
    devices, rng, mu = mesh.make(*where[:2], tensor=where[2]), np.random.default_rng(0), np.float32(0.7)
    params = {"layers": {"up": {"kernel": (2, 64, 64)}, "out": {"bias": (2, 64)}, "norm": {"scale": (2, 64)}},
              "embed": {"embedding": (64, 96)}}  # fmt: skip
    params = jax.tree.map(lambda shape: np.zeros(shape, np.float32), params, is_leaf=lambda x: isinstance(x, tuple))
    size = np.float32([1, 0.25])  # of two replicas: their sums stay in the range with this factor
    draw = lambda x: rng.uniform(0.5, 1, (2, 2, *x.shape)).astype(np.float32) * size.reshape(2, *[1] * (x.ndim + 1))  # noqa: E731
    samples = jax.tree.map(draw, params)
    up, bias = samples["layers"]["up"]["kernel"], samples["layers"]["out"]["bias"]
    up[:, :, ..., :32] = 1  # except those of one device's half of a kernel, which are equal
    up[:, :, 1] *= 1e-7  # a layer with its own scale
    up[:, 1], bias[:, 1] = up[:, 0], bias[:, 0]
    losses = rng.uniform(size=(2, 2)).astype(np.float32)

    def own(inputs, state, tokens, whole, axes):
        assert whole is None
        replica, part = jax.lax.axis_index(("data", "fsdp")), jax.lax.axis_index("tensor")
        grads = jax.tree.map(lambda g: jnp.asarray(g)[replica, part], samples)
        assert inputs["layers"]["up"]["kernel"].shape == (2, 64, 32)
        kernel = grads["layers"]["up"]["kernel"]
        grads["layers"]["up"]["kernel"] = jax.lax.dynamic_slice_in_dim(kernel, part * 32, 32, 2)
        return jnp.asarray(losses)[replica, part], grads, state

    recipe, state = dataclasses.replace(FP32, comm=comm), ()
    if comm.auto_scale:
        state = parallel.factors(comm, params, devices)
        np.testing.assert_allclose(jax.tree.leaves(state.mu), 2**-0.5)
        state = state._replace(mu=jax.tree.map(lambda _: mu, state.mu))
    run = jax.jit(functools.partial(parallel.gradients, own, recipe, devices))
    rows = np.zeros((2, 3), np.int32)
    if comm is TWO_PHASES:  # also a shard of a matrix that is large when unsharded
        sent = programs.asked_for(run, params, {}, rows, state)
        assert [x[2] for x in sent if x[:2] == ("all_to_all", "ui8")] == [2 * 64 * 32 + 64 * 48]
    loss, grads, _, state = run(params, {}, rows, state)
    np.testing.assert_allclose(loss, losses.sum(1).mean(), rtol=1e-6)
    expected = jax.tree.map(lambda g: g.astype(np.float64).sum(1).mean(0), samples)
    for name in ("up", "out"):
        expected["layers"][name] = jax.tree.map(lambda g: g / 2, expected["layers"][name])
    actual, half = grads["layers"].pop("up")["kernel"], expected["layers"].pop("up")["kernel"]
    np.testing.assert_allclose(actual[..., 32:], half[..., 32:], rtol=2.0**-3, atol=0)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2.0**-3), grads, expected)
    if comm.auto_scale:
        assert state.saturated["layers"]["up"]["kernel"] == 0.5
        assert state.mu["layers"]["up"]["kernel"] == 0.5
        assert state.mu["layers"]["norm"]["scale"] == pytest.approx(0.7 * 2**1e-3)
    else:
        np.testing.assert_allclose(actual[..., :32], half[..., :32], rtol=2.0**-3)


def test_where_gradients_are_summed_and_in_what():
    half, coded = fp8jax.recipes.bf16(), dataclasses.replace(FP32, comm=TWO_PHASES)
    assert [parallel.reduction(recipe) for recipe in (FP32, half, coded)] == [Comm("fp32"), Comm("bf16"), TWO_PHASES]
    rows = {shared: mesh.batches(mesh.make(2, 1, tensor=shared)) for shared in (1, 2)}
    experts = dataclasses.replace(LLAMA, experts=2, experts_per_token=1)
    cases = (LLAMA, half), (LLAMA, coded), (experts, half)
    actual = [[parallel.mapped(*case, where) for where in (None, rows[1], rows[2])] for case in cases]
    assert actual == [[False, False, True], [False, True, True], [False, True, True]]
    params = {"w": np.zeros((4, 4), np.float32)}
    assert parallel.factors(FACTORS, params, None) == parallel.factors(TWO_PHASES, params, rows[1].mesh) == ()
    assert parallel.factors(FACTORS, params, mesh.make(1, 1, tensor=2)) == ()
    factors = fp8jax.dist.Factors(params, {"w": np.float32(0.25), "b": np.float32(0.5)})
    assert parallel.saturated(factors, {"w": np.zeros((4, 5)), "b": np.zeros(3)}) == round(0.25 * 20 + 0.5 * 3)


@pytest.mark.parametrize(("compute", "held"), [("bf16", False), ("fp32", True)])
def test_sums_in_fp32_are_held_where_a_model_computes_in_it(compute, held):
    whole = parallel.GatheredModel(Comm("bf16"), frozenset(), compute)
    wide, narrow = (jax.ShapeDtypeStruct((8, 4), dtype) for dtype in ("float32", "bfloat16"))
    assert [whole.policy(p, wide, wide) for p in (jax.lax.add_p, jax.lax.sub_p, jax.lax.neg_p)] == [held] * 3
    assert whole.policy(jax.lax.add_p, narrow, narrow)
    assert whole.policy(jax.lax.dot_general_p, wide, wide)
    assert not whole.policy(jax.lax.all_gather_p, narrow)
