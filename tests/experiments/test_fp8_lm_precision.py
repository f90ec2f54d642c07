"""FP8-LM's ablation of precisions: storage formats, training of its arms, and its notes."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.models.llama import LlamaConfig
from experiments.papers import fp8_lm_precision
from experiments.train.optimizer import decay_mask
from experiments.train.task import exact_task

TINY = LlamaConfig(vocab=32, dim=32, layers=2, heads=2, kv_heads=1, mlp_dim=48)
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 9)).astype(np.int32)


def test_every_arm_names_known_storages():
    for arm in fp8_lm_precision.ARMS.values():
        assert set(arm) <= set(fp8_lm_precision.STORAGES)
    assert len(set(fp8_lm_precision.ARMS.values())) == len(fp8_lm_precision.ARMS)


def test_storage_has_a_scale_for_each_layer_and_keeps_second_moments_from_zero():
    tree = {"layers": jnp.array([[1.0, 2.0], [1e-8, 2e-8]]), "head": jnp.array([1.0, 1e-8])}
    storages = fp8_lm_precision.STORAGES
    stored = fp8_lm_precision.store(storages["e4m3, scaled"], tree)
    np.testing.assert_allclose(stored["layers"], tree["layers"], rtol=0.07)
    assert stored["head"].tolist() == [1.0, 0.0]
    assert fp8_lm_precision.store(storages["e4m3, no zeros"], tree)["head"][1] > 0
    assert fp8_lm_precision.store("bf16", {"a": jnp.float32(1 + 2**-9)})["a"] == 1.0
    # On a GPU, XLA removes a cast to bf16 and back.
    assert "reduce_precision" in str(jax.make_jaxpr(lambda x: fp8_lm_precision.store("bf16", {"a": x}))(1.0))


def test_the_loss_of_an_arm_is_that_of_its_last_steps_over_fp32_s():
    ones, first = np.full(50, 2.0), np.arange(50) < 50 - fp8_lm_precision.TAIL
    losses = {fp8_lm_precision.BASE: ones, "master bf16": ones.copy(), "m e4m3": np.where(first, 9.0, 2.5),
              "v e4m3": np.full(50, np.nan), "v e5m2": np.full(50, 1.95)}  # fmt: skip
    plain = [ones, np.full(50, 2.1)]
    rows = {row.case: (row.value, row.ratio) for row in fp8_lm_precision.rows(losses, plain)}
    assert (rows["m e4m3"], rows["v e4m3"]) == ((2.5, 1.25), (None, None))
    assert rows["all fp32, largest less smallest of three seeds"][0] == pytest.approx(0.1)


def test_each_of_the_four_goes_through_its_own_storage(monkeypatch):
    """In order: the first weights; then for each step the gradients, the new weights, and both moments."""
    calls = []

    def store_as(index, tree):
        calls.append((int(index), min(float(x.min()) for x in jax.tree.leaves(tree)) >= 0))
        return tree

    monkeypatch.setattr(fp8_lm_precision, "store_as", store_as)
    gradients = {"layers": {"up": {"kernel": jnp.array([[1.0, -2.0]])}}}
    task = types.SimpleNamespace(gradients=lambda params, *_: ({"loss": jnp.float32(0)}, gradients, {}))
    with jax.disable_jit():
        fp8_lm_precision.make_run(task, 1, 1e-3)(jnp.arange(4), gradients, jnp.asarray(TOKENS[None]))
    assert calls == [(0, False), (1, False), (0, False), (2, False), (3, True)]


@pytest.mark.slow
def test_arms_train_as_optax_does_and_a_coarse_master_weight_shows(monkeypatch):
    few = {name: fp8_lm_precision.STORAGES[name] for name in ("fp32", "e4m3, scaled")}
    monkeypatch.setattr(fp8_lm_precision, "STORAGES", few)
    arms = {
        fp8_lm_precision.BASE: fp8_lm_precision.PrecisionArm(),
        "master": fp8_lm_precision.PrecisionArm(master="e4m3, scaled"),
    }
    batches = np.stack([TOKENS] * 6)
    losses, plain = fp8_lm_precision.train_arms(TINY, batches, arms, (0,))
    task = exact_task(TINY, 0)
    params = jax.jit(task.init)().params
    f = fp8_lm_precision
    rate = optax.warmup_cosine_decay_schedule(0.0, f.RATE, 5, 6, f.RATE / 10)
    tx = optax.chain(
        optax.clip_by_global_norm(f.CLIP), optax.adamw(rate, f.B1, f.B2, f.EPS, weight_decay=f.DECAY, mask=decay_mask)
    )

    @jax.jit
    def step(params, state):
        losses, grads, _ = task.gradients(params, {}, TOKENS)
        updates, state = tx.update(grads, state, params)
        return losses["loss"], optax.apply_updates(params, updates), state

    state, expected = tx.init(params), []
    for _ in range(6):
        loss, params, state = step(params, state)
        expected.append(float(loss))
    np.testing.assert_allclose(losses[f.BASE], expected, rtol=1e-3)
    np.testing.assert_array_equal(plain[0], losses[f.BASE])
    assert expected[-1] < expected[0] - 0.01
    assert abs(losses["master"][0] - expected[0]) > 1e-4
