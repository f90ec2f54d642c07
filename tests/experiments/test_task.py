"""What the training program computes before and in a step: rates, masters, microbatches, states, noise."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8jax
from experiments.models import sampling
from experiments.models.llama import LlamaConfig
from experiments.text import data
from experiments.train import adapters, cli, optimizer
from experiments.train.config import Config
from experiments.train.sections import Data, Lora, Optim, Run
from experiments.train.task import Task, exact_task
from tests.distance import relative

TINY = LlamaConfig(vocab=40, dim=32, layers=2, heads=4, kv_heads=2, mlp_dim=48)
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab, (4, 9)).astype(np.int32)


def build(recipe, **options):
    return Task(TINY, optax.with_extra_args_support(optax.sgd(0.1)), recipe, remat=False, seed=3, **options)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_a_schedule_is_its_formula(name):
    optim = Optim(steps=50, lr=0.4, final_lr=0.25, warmup=10, schedule=name, decay=0.3)
    counts = np.arange(51)
    warm = 0.4 * counts / 10
    fall = np.clip((counts - 10) / 40, 0, 1)
    after = {
        "cosine": 0.1 + 0.3 * (1 + np.cos(np.pi * fall)) / 2,
        "linear": 0.4 - 0.3 * fall,
        "constant": np.full(51, 0.4),
        "wsd": 0.4 - 0.3 * np.clip((counts - 35) / 15, 0, 1),
    }[name]
    rate = optimizer.schedule(optim)
    np.testing.assert_allclose([float(rate(n)) for n in counts], np.where(counts < 10, warm, after), atol=1e-6)


def test_gradients_are_clipped_beside_bounds_that_measure_updates():
    """With b1^2 >= b2 a step has no limit. With b1 = 0 the first step has the sign of the gradient only."""
    config = Config(optim=dataclasses.replace(Optim(), b1=0.9, b2=0.5, clip=1e-12, eps=1e-3, warmup=0, steps=10))
    tx = optimizer.make_optimizer(config, fp8jax.recipes.moss())
    params = {"layers": {"w": jnp.ones((2, 8, 8))}}
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    decay = config.optim.lr * config.optim.weight_decay
    np.testing.assert_allclose(updates["layers"]["w"], -decay, rtol=1e-3)


def test_masters_in_parts_begin_as_the_seeds_parameters():
    recipe = dataclasses.replace(fp8jax.recipes.bf16(), weights=fp8jax.recipes.Weights("bf16+int16", "bf16"))
    tx = fp8jax.compressed_adamw(1e-3, mu="fp32", nu="fp32", master="bf16+int16")
    parts = Task(TINY, tx, recipe, remat=False, seed=3).init()
    plain = dataclasses.replace(recipe, weights=fp8jax.recipes.Weights("fp32", "fp32"))
    whole = Task(TINY, optax.with_extra_args_support(optax.identity()), plain, remat=False, seed=3).init()
    actual = fp8jax.master_weights(parts.opt_state, parts.params)
    jax.tree.map(np.testing.assert_array_equal, actual, whole.params)


def test_scaled_masters_begin_as_the_seeds_parameters():
    """Scaled fp16 has eleven bits; bf16 parameters have eight."""
    recipe = fp8jax.recipes.fp8_lm()
    scaled = Task(TINY, fp8jax.optimizer(recipe, 1e-3), recipe, remat=False, seed=3).init()
    whole = exact_task(TINY, seed=3).init()
    actual = fp8jax.master_weights(scaled.opt_state, scaled.params)
    for x, y in zip(*map(jax.tree.leaves, (actual, whole.params)), strict=True):
        assert relative(x, y) < 2.0**-11


def test_merged_adapters_keep_the_biases_of_the_base():
    lora = dataclasses.replace(Lora(), lora_rank=4, lora_targets=".*/(q|v)", base="bf16")
    llama, tx = dataclasses.replace(TINY, layers=1, bias="qkv"), optax.with_extra_args_support(optax.identity())
    task = Task(llama, tx, fp8jax.recipes.bf16(), remat=False, seed=3, lora=lora)
    params = Task(llama, tx, fp8jax.recipes.bf16(), remat=False, seed=3).init().params
    for i, name in enumerate("qkv"):
        params["layers"]["attention"][name]["bias"] += i + 1
    merged = task.merged(task.init().params, task.base(params))["layers"]["attention"]
    assert {name: float(merged[name]["bias"].mean()) for name in "qkv"} == {"q": 1, "k": 2, "v": 3}


def test_microbatches_are_equal_parts_of_a_batch():
    task = build(fp8jax.recipes.bf16(), microbatches=2)
    tokens = jnp.arange(6 * 9, dtype=jnp.int32).reshape(6, 9)
    np.testing.assert_array_equal(task._split_microbatches(tokens), [tokens[:3], tokens[3:]])


def test_a_bad_step_leaves_histories_and_a_good_one_before_it_advances_them():
    recipe = fp8jax.recipes.te_delayed()
    recipe = dataclasses.replace(recipe, linear=dataclasses.replace(recipe.linear, amax_history_length=4))
    task = build(recipe)
    step = jax.jit(task.step)
    start = task.init()
    good, metrics = step(start, TOKENS)
    assert bool(metrics["healthy"])
    observed = [np.count_nonzero(x) for x in jax.tree.leaves(good.model_state)]
    assert sum(observed) > sum(np.count_nonzero(x) for x in jax.tree.leaves(start.model_state))
    spoiled = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), good.params)
    bad, metrics = step(good._replace(params=spoiled), TOKENS)
    assert not bool(metrics["healthy"])
    jax.tree.map(np.testing.assert_array_equal, bad.model_state, good.model_state)
    assert int(bad.step) == int(good.step) == 1


def test_each_token_of_a_text_is_drawn_by_a_key_of_its_own():
    """A model of zeros has equal logits: with one key for all tokens, a text would repeat one id."""
    task = build(fp8jax.recipes.bf16())
    model = task.model(jax.tree.map(jnp.zeros_like, task.init().params), {})
    texts = [sampling.extend(model, np.array([[1]]), 24, sampling.TokenChoice(1.0), seed=seed)[0] for seed in (0, 1)]
    for text in texts:
        assert len(set(text[1:])) > 8
    assert texts[0] != texts[1]


def test_a_sample_is_no_longer_than_a_sequence():
    config = Config(data=dataclasses.replace(Data(), seq_len=8), run=dataclasses.replace(Run(), sample_tokens=24))
    task = build(fp8jax.recipes.bf16())
    tokenizer = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    session = SimpleNamespace(config=config, tokens=data.Tokens(TOKENS[0], TOKENS[0]), tokenizer=tokenizer)
    text = cli._write_text(session, task, task.init(), {})
    ids = list(map(int, text.split()))
    assert len(ids) == 8
    assert ids[:4] == TOKENS[0, :4].tolist()


def test_adapters_of_layers_drop_inputs_of_their_own():
    """With equal weights, two layers differ only by dropout. Without dropout, alpha scales the added result."""
    recipe, x = fp8jax.recipes.bf16(), jnp.ones((16, 32))
    linear = nnx.Linear(32, 24, use_bias=False, rngs=nnx.Rngs(0))

    def make(path, dropout, alpha):
        lora = dataclasses.replace(Lora(), lora_rank=4, lora_dropout=dropout, lora_alpha=alpha, base="bf16")
        lora = dataclasses.replace(lora, lora_targets=".*")
        layer = adapters.AdaptedLinear(linear, path, lora, recipe, nnx.Rngs(1))
        layer.lora_b[...] = jnp.ones_like(layer.lora_b[...])
        return layer

    base = x @ linear.kernel[...]
    a, b = (make(f"layers/{name}", 0.5, 8.0)(x) - base for name in ("up", "down"))
    assert not np.allclose(a, b)
    np.testing.assert_array_equal(make("layers/up", 0.5, 8.0)(x) - base, a)
    one, two = (make("layers/up", 0.0, alpha)(x) - base for alpha in (8.0, 16.0))
    np.testing.assert_allclose(two, 2 * one, rtol=1e-4, atol=1e-5)
