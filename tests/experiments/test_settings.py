"""Every setting of the command line is used: a run is compared with AdamW in NumPy, on batches that
the test computes."""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8jax
from experiments.models.llama import Llama, LlamaConfig
from experiments.text import data
from experiments.text.tokenizer import Bytes
from experiments.train import cli, config, form, optimizer, report
from experiments.train import loop as loops
from experiments.train.optimizer import make_optimizer
from experiments.train.task import Task
from fp8jax import from_recipe
from tests.rows import slow

SHAPE = LlamaConfig(vocab=256, dim=32, layers=2, heads=4, kv_heads=2, mlp_dim=64)
STEPS, WARMUP, LR, FINAL, B1, B2, EPS, DECAY, CLIP = 5, 2, 3e-2, 0.3, 0.7, 0.8, 1e-3, 2.0, 0.3
FLAGS = (
    f"--steps {STEPS} --warmup {WARMUP} --lr {LR} --final-lr {FINAL} --b1 {B1} --b2 {B2} --eps {EPS} "
    f"--weight-decay {DECAY} --clip {CLIP} --seed 5 --valid-fraction 0.25 --eval-batches 3 --eval-every 2 "
    "--checkpoint-every 3 --keep 1 --microbatches 2 --remat blocks --unroll 2 "
    "--sample-tokens 12 --recipe exact --run settings"
).split()
EXACT = dataclasses.replace(fp8jax.recipes.bf16(), weights=fp8jax.recipes.Weights("fp32", "fp32"))


class Batches(NamedTuple):
    next: Callable
    get_state: Callable

    def __next__(self):
        return self.next()


class Recording(loops.Loop):
    """A loop that saves its arguments, the batches it reads, and the states before and after."""

    made: "Recording"

    def run(self, state):
        type(self).made = self
        # Copies: the first step donates the buffers.
        self.start = jax.tree.map(np.array, state)
        self.read, source = [], self.batches

        def note():
            self.read.append(next(source))
            return self.read[-1]

        self.batches = Batches(note, source.get_state)
        self.end = super().run(state)
        return self.end


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Eight documents, each with letters that no other has."""
    folder = tmp_path_factory.mktemp("letters")
    rng = np.random.default_rng(0)
    for i in range(8):
        letters = [chr(65 + 3 * i + j) for j in range(3)]
        (folder / f"{i}.txt").write_text("".join(rng.choice(letters, 400 + 10 * i)))
    return folder


@pytest.fixture(scope="module")
def ran(argv, texts, out):
    """Returns the finished run's loop, its task and its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "Loop", Recording)
        tasks = []
        patch.setattr(cli, "Task", lambda *a, **k: tasks.append(Task(*a, **k)) or tasks[-1])
        assert cli.main([*argv, *FLAGS, "--data", str(texts)], recipe=lambda name: EXACT) == 0
    return Recording.made, tasks[0], out / "settings" / "exact"


@pytest.fixture(scope="module")
def plain():
    """Returns the model and the loss, without the training program."""
    model = Llama(SHAPE, dtype=jnp.float32, param_dtype=jnp.float32, remat=False, rngs=nnx.Rngs(5))
    graphdef, params = nnx.split(model, nnx.Param)

    def loss(params, tokens):
        logits = nnx.merge(graphdef, params)(tokens[:, :-1])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
        return -picked.mean()

    logits = lambda params, tokens: nnx.merge(graphdef, params)(tokens)  # noqa: E731
    return jax.jit(jax.value_and_grad(loss)), nnx.to_pure_dict(params), logits


def rate(step):
    """Returns the learning rate of the update from `step - 1` to `step`."""
    if step - 1 < WARMUP:
        return LR * (step - 1) / WARMUP
    share = (step - 1 - WARMUP) / (STEPS - WARMUP)
    return LR * (FINAL + (1 - FINAL) * (1 + math.cos(math.pi * share)) / 2)


def test_seed_makes_the_parameters_and_the_key_of_the_sampled_text(ran, plain):
    start = ran[0].start
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), start.params, plain[1])
    np.testing.assert_array_equal(start.rng, jax.random.key_data(jax.random.fold_in(jax.random.key(5), 1)))
    other = Llama(SHAPE, dtype=jnp.float32, param_dtype=jnp.float32, remat=False, rngs=nnx.Rngs(0))
    assert np.abs(start.params["embed"]["embedding"] - other.embed.embedding[...]).max() > 0.01


def test_training_is_adamw_with_all_its_settings(ran, plain):
    value_and_grad, params, _ = plain
    loop, _, folder = ran
    rows = [row for row in report.read_metrics(folder / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    flat = {p: np.array(x, np.float64) for p, x in jax.tree.leaves_with_path(params)}
    structure = jax.tree.structure(params)
    mu, nu = ({p: np.zeros_like(x) for p, x in flat.items()} for _ in range(2))
    for step, (row, tokens) in enumerate(zip(rows, loop.read, strict=True), 1):
        now = jax.tree.unflatten(structure, [x.astype(np.float32) for x in flat.values()])
        loss, grads = value_and_grad(now, tokens)
        grads = {p: np.array(x, np.float64) for p, x in jax.tree.leaves_with_path(grads)}
        norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
        assert norm > 2 * CLIP
        np.testing.assert_allclose([row["loss"], row["grad_norm"], row["lr"]], [loss, norm, rate(step)], rtol=1e-4)
        for p, g in grads.items():
            g = g * CLIP / norm
            mu[p] = B1 * mu[p] + (1 - B1) * g
            nu[p] = B2 * nu[p] + (1 - B2) * g**2
            update = mu[p] / (1 - B1**step) / (np.sqrt(nu[p] / (1 - B2**step)) + EPS)
            matrix = any(name in jax.tree_util.keystr(p) for name in ("kernel", "embedding"))
            flat[p] = flat[p] - rate(step) * (update + DECAY * flat[p] * matrix)
    ends = dict(jax.tree.leaves_with_path(loop.end.params))
    for p, expected in flat.items():
        np.testing.assert_allclose(ends[p], expected, atol=3e-4, err_msg=jax.tree_util.keystr(p))
    scales = [p for p in flat if "scale" in jax.tree_util.keystr(p)]
    assert scales
    # Decay of the scales, which start at 1, would be a hundred times the tolerance.
    assert sum(rate(step) for step in range(1, STEPS + 1)) * DECAY > 0.1


def test_decay_and_clip_are_those_of_a_chain_of_optax_bit_for_bit():
    args = cli.parse([*FLAGS, "--recipe", "bf16"])
    tx = make_optimizer(args, EXACT)
    rates = optax.warmup_cosine_decay_schedule(0.0, LR, WARMUP, STEPS, LR * FINAL)
    matrices = {"mlp_norm": {"scale": False}, "up": {"kernel": True, "bias": False}, "embed": {"embedding": True}}
    adamw = optax.adamw(rates, B1, B2, EPS, weight_decay=DECAY, mask=matrices)
    by_hand = optax.chain(optax.clip_by_global_norm(CLIP), adamw)
    rng = np.random.default_rng(0)
    params = {
        "mlp_norm": {"scale": rng.normal(size=(2, 8))},  # of two layers, stacked
        "up": {"kernel": rng.normal(size=(2, 8, 4)), "bias": rng.normal(size=4)},
        "embed": {"embedding": rng.normal(size=(5, 8))},
    }
    params = jax.tree.map(jnp.float32, params)
    states = [t.init(params) for t in (tx, by_hand)]
    for scale in (1.0, 1e-4):  # clipped, and not
        grads = jax.tree.map(lambda x: jnp.float32(rng.normal(size=x.shape)), params)
        grads = optax.tree.scale(scale, grads)
        for _ in range(2):
            both = [t.update(grads, s, params) for t, s in zip((tx, by_hand), states, strict=True)]
            jax.tree.map(np.testing.assert_array_equal, both[0][0], both[1][0])
            states = [s for _, s in both]


def split(texts, ran):
    """Returns the held-out documents, by the letters in the validation batches, and the others."""
    documents = {path.read_text() for path in texts.glob("*.txt")}
    letters = set(np.unique(ran[0].valid).tolist()) - {0}
    held_out = {text for text in documents if letters & set(text.encode())}
    return held_out, documents - held_out


def test_validation_text_is_a_quarter_and_no_batch_of_training_holds_any_of_it(texts, ran):
    held_out, others = split(texts, ran)
    share = sum(map(len, held_out)) / sum(map(len, held_out | others))
    assert 0.25 <= share <= 0.375  # whole documents until they are a quarter, at most half of one more
    recorded = set(np.concatenate(ran[0].read).ravel().tolist()) - {0}
    assert not recorded & set("".join(held_out).encode())
    assert len(others) > len(held_out) > 1


def test_batches_are_the_seeds_windows_of_the_training_text(texts, ran):
    corpus = data.read_corpus([str(texts)], 0.25)
    tokens = np.frombuffer(b"".join(b"\0" + text.encode() for text in corpus.train), np.uint8)
    windows = {tokens[i : i + 17].tobytes() for i in range(0, len(tokens) - 16, 16)}
    rows = [row.astype(np.uint8).tobytes() for batch in ran[0].read for row in batch]
    assert len(set(rows)) == len(rows) == 4 * STEPS
    assert set(rows) <= windows
    # Each in the order of its seed.
    for seed, same in ((5, True), (0, False)):
        batches = data.train_batches(tokens, 16, 4, seed)
        assert all((next(batches) == batch).all() for batch in ran[0].read) == same


def test_as_many_validation_batches_are_scored_as_asked_for_and_their_mean_is_logged(ran, plain):
    loop, _, folder = ran
    assert loop.valid.shape == (3, 4, 17)
    rows = {r["step"]: r["valid_loss"] for r in report.read_metrics(folder / "metrics.jsonl") if "valid_loss" in r}
    assert list(rows) == [2, 4, STEPS]
    losses = [plain[0](loop.end.params, tokens)[0] for tokens in loop.valid]
    np.testing.assert_allclose(rows[STEPS], np.mean(losses), rtol=1e-5)


def test_the_result_is_of_this_run(ran, plain):
    loop, _, folder = ran
    result = json.loads((folder / "result.json").read_text())["result"]
    rows = report.read_metrics(folder / "metrics.jsonl")
    train = [row for row in rows if "loss" in row]
    count = sum(x.size for x in jax.tree.leaves(plain[1]))
    assert (result["recipe"], result["steps"], result["parameters"]) == (EXACT.name, STEPS, count)
    assert (result["train_loss"], result["valid_loss"]) == (train[-1]["loss"], rows[-1]["valid_loss"])
    assert (result["state_bytes"]["mu"], result["state_bytes"]["nu"]) == (4 * count, 4 * count)
    assert result["tokens_per_s"] == np.median([row["tokens_per_s"] for row in train])
    # Twelve bytes, six of them the start of the held-out text.
    tokens = np.frombuffer(result["text"].encode(), np.uint8)
    assert len(result["text"]) <= 12
    np.testing.assert_array_equal(tokens[:5], loop.valid[0, 0, 1:6])


def test_the_sampled_text_is_drawn_from_the_seeds_key(ran, plain):
    """Token by token from the finished model's logits, over 0.8. Another key draws another text."""
    loop, _, folder = ran
    text = json.loads((folder / "result.json").read_text())["result"]["text"]
    prompt = loop.valid[0, 0, :6]
    model = jax.jit(lambda tokens: plain[2](loop.end.params, tokens))

    def drawn(key):
        tokens = np.zeros((1, 12), np.int32)
        tokens[0, :6] = prompt
        for i in range(6, 12):
            logits = model(tokens)[0, i - 1] / 0.8
            tokens[0, i] = jax.random.categorical(jax.random.fold_in(key, i), logits)
        return Bytes().decode(tokens[0].tolist()).strip()

    assert text == drawn(jax.random.fold_in(jax.random.key(5), 1))
    assert text != drawn(jax.random.fold_in(jax.random.key(0), 1))


def test_memory_is_saved_as_asked_for(ran):
    loop, task, folder = ran
    assert (task.microbatches, task.remat, task.unroll) == (2, True, 2)
    program = str(jax.make_jaxpr(task.step)(loop.start, loop.read[0]))
    assert "remat" in program
    assert "unroll=2" in program
    assert "f32[2,16,256]" in program  # logits of half a batch
    assert "f32[4,16,256]" not in program
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [str(STEPS)]


def test_by_default_a_gpu_recomputes_what_neither_contexts_nor_kernels_keep_for_it(monkeypatch):
    def chosen(*names, how="auto"):
        return {form.remat_policy(how, fp8jax.recipes.get(name)) for name in names}

    every = fp8jax.recipes.NAMES
    assert chosen(*every) == {False}  # on a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(form, "missing_triton", lambda kernel: None)
    monkeypatch.setattr(form.choice, "keeps_nonlinear_unchanged", lambda: False)
    assert chosen("moss", "te_current", "fp8_lm", "coat", "fast") == {False}
    assert chosen("bf16", "deepseek", "int8_block", "te_delayed") == {"products"}
    assert chosen(*every, how="products") == {"products"}
    assert chosen(*every, how="none") == {False}
    monkeypatch.setattr(form, "missing_triton", lambda kernel: "no jax-triton")
    assert chosen("moss", "te_current", "fp8_lm", "bf16") == {"products"}
    assert chosen("coat", "fast") == {False}
    monkeypatch.setattr(form.choice, "keeps_nonlinear_unchanged", lambda: True)
    assert chosen("coat", "fast") == {"products"}  # contexts are unquantized


def test_settings_of_the_model_arrive(ran):
    flags = "--model olmo-5m --layers 3 --dim 64 --heads 8 --kv-heads 4 --mlp-dim 96"
    config = cli.parse(flags.split())
    assert config.model.shape(300) == LlamaConfig(300, 64, 3, 8, 4, 96, tied=False, norm="layer")
    assert cli.parse(["--tied"]).model.shape(256).tied
    assert ran[1].llama == SHAPE


@pytest.mark.parametrize(
    ("recipe", "b1", "b2"), [("bf16", 0.9, 0.95), slow("moss", 0.9, 0.95), ("moss", 0.99, 0.95), ("fp8_lm", 0.9, 0.95)]
)
def test_every_optimizer_clips_gradients_by_their_common_norm(recipe, b1, b2):
    """Also for recipes with tracked weight bounds, with and without a limit."""
    settings = config.Config(optim=config.Optim(lr=0.1, warmup=0, b1=b1, b2=b2, clip=0.5, weight_decay=0.0))
    tx = make_optimizer(settings, getattr(fp8jax.recipes, recipe)())
    params = {"w": jnp.ones((8, 128)), "b": jnp.ones(16)}
    draws = [jax.tree.map(lambda x, i=i: jax.random.normal(jax.random.key(i), x.shape), params) for i in (0, 1)]
    # The norm of the first is about 3,000, of the second 0.3. Adam is invariant to scale, but not to their ratio.
    large, small = (jax.tree.map(lambda g, k=k: k * g, draw) for k, draw in zip((100.0, 0.01), draws, strict=True))
    clipped = jax.tree.map(lambda g: g * (0.5 / optax.tree.norm(large)), large)

    def second(first):
        _, state = tx.update(first, tx.init(params), params)
        return tx.update(small, state, params)[0]

    actual, expected = second(large), second(clipped)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-4), actual, expected)
    assert optax.tree.norm(small) < 0.5


@pytest.mark.parametrize("plain", [False, True])
def test_bounds_of_weights_follow_the_settings_of_the_optimizer(plain, monkeypatch):
    limits = {}
    for module in (fp8jax, from_recipe):
        for name in {"max_adam_step", "with_weight_bounds", "track_weight_amax"} & vars(module).keys():
            real = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *a, name=name, real=real: limits.update({name: a}) or real(*a))
    linear = dataclasses.replace(fp8jax.recipes.moss().linear, weight_amax_interval=7)
    recipe = dataclasses.replace(fp8jax.recipes.fp8_lm() if plain else fp8jax.recipes.moss(), linear=linear)
    # b1 is above b2 and its square below: the limit is known.
    optimizer.make_optimizer(config.Config(optim=config.Optim(b1=0.95, b2=0.92, weight_decay=0.3)), recipe)
    assert limits["max_adam_step"][1:] == (0.95, 0.92, 0.3)
    assert (limits["track_weight_amax"][0] if plain else limits["with_weight_bounds"][2]) == 7
    assert ("with_weight_bounds" in limits) != plain
    limits.clear()
    optimizer.make_optimizer(config.Config(optim=config.Optim(b1=0.97, b2=0.92)), recipe)
    assert limits == {"track_weight_amax": (7, None)}
    noisy = dataclasses.replace(recipe, weights=dataclasses.replace(recipe.weights, master="bf16+stochastic"))
    if not plain:
        limits.clear()
        optimizer.make_optimizer(config.Config(optim=config.Optim(b1=0.95, b2=0.92)), noisy)
        assert set(limits) == {"max_adam_step", "track_weight_amax"}
