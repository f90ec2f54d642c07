"""The loss with logits in chunks of tokens equals that with all logits, and needs less memory."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from experiments import mesh
from experiments.errors import UserError
from experiments.models.llama import LlamaConfig
from experiments.text import packing
from experiments.train import cli, form
from experiments.train.config import Config
from experiments.train.task import Task
from fp8jax.ops.losses import cross_entropy as of_tokens
from fp8jax.recipes import Comm, Weights
from tests.distance import relative
from tests.programs import dots
from tests.rows import slow

SHAPE = LlamaConfig(vocab=61, dim=32, layers=2, heads=2, kv_heads=1, mlp_dim=64)
TOKENS = np.random.default_rng(0).integers(0, SHAPE.vocab, (8, 17)).astype(np.int32)
EXACT = dataclasses.replace(fp8jax.recipes.bf16(), weights=Weights("fp32", "fp32"))


def documents():
    """Documents of 3 to 12 tokens, two thirds of them answers."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(3, 13, 60)
    return [packing.Document(rng.integers(1, 60, n), (np.arange(n) % 3 > 0).astype(np.int8)) for n in lengths]


ROWS = packing.pack(documents(), 0.2, 16, keep_whole=True).train[:8]  # unfilled positions are zeros


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    """Small chunks."""
    monkeypatch.setattr(of_tokens, "CHUNK_BYTES", 6 * SHAPE.vocab * 24)


def test_chunks_are_of_whole_tiles_where_a_quarter_more_of_them_is(monkeypatch):
    monkeypatch.setattr(of_tokens, "CHUNK_BYTES", 3 * 2**29)
    assert of_tokens.num_chunks(16_000, 65_536, False) == 5  # of 3,200 tokens; four chunks would end within a tile
    assert of_tokens.num_chunks(16_001, 65_536, False) == 4
    assert of_tokens.num_chunks(10**6, 10**6, True) == 16


def both(recipe=EXACT, shape=SHAPE, tokens=TOKENS, devices=None, kinds=(False, True), **settings):
    """Returns evaluation loss, metrics of a step and the weights after it, with all logits and with chunks."""
    results = []
    for chunked in kinds:
        rows = None if devices is None else mesh.batches(devices)
        each = Task(shape, optax.sgd(1.0), recipe, remat=False, seed=0, rows=rows, chunked=chunked, **settings)
        state, placed = each.init(), None
        if rows is not None:
            placed = mesh.state(devices, jax.eval_shape(each.init))
            state = jax.device_put(state, placed)
        placed_tokens = mesh.place(tokens, rows) if rows is not None else jnp.asarray(tokens)
        loss = float(jax.jit(each.loss)(state.params, state.model_state, placed_tokens))
        after, metrics = jax.jit(each.step, out_shardings=(placed, None))(state, placed_tokens)
        steps = jax.tree.map(lambda a, b: np.asarray(b, np.float64) - np.asarray(a), state.params, after.params)
        results.append((loss, {k: float(v) for k, v in metrics.items()}, steps))
    return results


def agree(actual, losses, steps):
    (loss, metrics, step), (chunked_loss, chunked_metrics, chunked_step) = actual
    assert chunked_loss == pytest.approx(loss, rel=losses)
    assert chunked_metrics == pytest.approx(metrics, rel=max(losses, steps))
    assert relative(chunked_step, step) < steps
    assert all(np.linalg.norm(x) > 0 for x in jax.tree.leaves(step))


@pytest.mark.parametrize(
    ("tied", "tokens"),
    [slow(False, TOKENS), (True, ROWS), slow(True, TOKENS), slow(False, ROWS)],
    ids=["text", "packed, tied", "text, tied", "packed"],
)
def test_losses_and_gradients_are_those_of_whole_logits(tied, tokens):
    agree(both(shape=dataclasses.replace(SHAPE, tied=tied), tokens=tokens), 1e-6, 1e-5)


def test_in_microbatches():
    agree(both(tokens=ROWS, microbatches=2), 1e-6, 1e-5)


@pytest.mark.parametrize(("weights", "tokens", "losses"), [slow({}, TOKENS, 2e-3), ({"compute": "fp32"}, ROWS, 1e-6)])
def test_beside_layers_in_8_bits(weights, tokens, losses):
    """The head is not quantized. bf16 logits have half a step of 2^-9."""
    coat = fp8jax.recipes.coat()
    actual = both(recipe=dataclasses.replace(coat, weights=dataclasses.replace(coat.weights, **weights)), tokens=tokens)
    # Gradients that differ in the last bit may round to different e5m2 codes, a step of 2^-2 apart.
    agree(actual, losses, 0.05)


@pytest.mark.parametrize("devices", [slow(None), {"data": 2, "fsdp": 2}])
def test_a_head_in_8_bits(devices, monkeypatch):
    """Its three products run in 8 bits, the layers in 16 bits. Other gradients have its errors."""
    monkeypatch.setattr(mesh, "SMALLEST", 256)
    recipe = dataclasses.replace(EXACT, head=fp8jax.recipes.HEAD)
    placed = devices and mesh.make(**devices)
    (narrow,), (wide,) = both(recipe, tokens=ROWS, devices=placed, kinds=[False]), both(tokens=ROWS, kinds=[False])
    # Evaluation has an 8-bit head too: with chunks alone, only the order of sums would differ.
    assert narrow[0] == pytest.approx(narrow[1]["loss"], rel=1e-6)
    assert abs(narrow[0] / wide[0] - 1) > 1e-5
    # Codes of input and weight have an error of at most half a step of 2^-4, and 0.6 of that on average.
    assert narrow[0] == pytest.approx(wide[0], rel=0.02)
    assert relative(narrow[2], wide[2]) < 0.1
    if devices is None:
        task = Task(SHAPE, optax.sgd(1.0), recipe, remat=False, seed=0)
        kinds = collections.Counter(dots(task.step, jax.eval_shape(task.init), TOKENS))
        assert sum(n for kind, n in kinds.items() if "float8_e4m3fn" in kind) == 3
        assert kinds["float8_e4m3fn", "float8_e5m2"] == 1
        assert "head's dgrad dy" in recipe.explain()


@pytest.mark.parametrize(
    ("where", "comm"),
    [
        slow({"data": 8, "fsdp": 1}, Comm()),
        slow({"data": 2, "fsdp": 2}, Comm()),
        ({"data": 1, "fsdp": 4}, Comm("fp32")),
    ],
    ids=["data", "both", "in shard_map"],
)
def test_on_several_devices(where, comm, monkeypatch):
    """With a sharded head, and with layers that are gathered one by one."""
    monkeypatch.setattr(mesh, "SMALLEST", 256)
    agree(both(dataclasses.replace(EXACT, comm=comm), devices=mesh.make(**where)), 1e-6, 1e-5)


def test_logits_are_never_whole():
    """The program of a step has no array with a row of logits for each token."""
    tokens = TOKENS.shape[0] * (TOKENS.shape[1] - 1)
    shape = dataclasses.replace(SHAPE, vocab=1031)  # too large for a lookup by one-hot rows
    for chunked in (False, True):
        each = Task(shape, optax.sgd(1.0), EXACT, remat=False, seed=0, chunked=chunked)
        text = str(jax.make_jaxpr(each.step)(jax.eval_shape(each.init), TOKENS))
        shapes = [f"[{tokens},{shape.vocab}]", f"[8,16,{shape.vocab}]"]
        assert any(each in text for each in shapes) != chunked


@pytest.mark.parametrize(
    ("how", "tokens", "vocab", "chunked"),
    [("auto", 16384, 32_000, False), ("auto", 16384, 32_769, True), ("auto", 4096, 128_256, False),
     ("auto", 16384, 128_256, True), ("whole", 16384, 128_256, False), ("chunked", 8, 8, True)],
)  # fmt: skip
def test_auto_goes_by_the_bytes_of_logits(how, tokens, vocab, chunked):
    assert form.in_chunks(how, tokens, vocab) == chunked


def test_the_setting_arrives(monkeypatch, tmp_path, capsys):
    """The number of tokens is that of a device's microbatch."""
    recorded = {}

    def build(*args, **settings):
        recorded.update(settings, recipe=args[2])
        raise UserError("seen")

    monkeypatch.setattr(cli, "Task", build)
    (tmp_path / "text.txt").write_text("abc def " * 3000)
    flags = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path), "--recipe", "bf16", "--model", "5m",
             "--batch", "8", "--seq-len", "64", "--microbatches", "2"]  # fmt: skip
    for i, (logits, limit, expected) in enumerate(
        [("chunked", 2**31, True), ("whole", 1, False), ("auto", 2**31, False), ("auto", 4 * 4 * 64 * 256 - 1, True),
         ("auto", 4 * 4 * 64 * 256, False)]
    ):  # fmt: skip
        monkeypatch.setattr(form, "WHOLE_BYTES", limit)
        assert cli.main([*flags, "--run", str(i), "--logits", logits, "--mesh", "data=1"]) == 2
        assert recorded["chunked"] == expected, (logits, limit)
    assert not recorded["recipe"].head.is_quantized
    others = {"seed": 5, "balance_coefficient": 0.25, "z_coefficient": 0.5, "unroll": 2, "on_bad_step": "skip",
              "max_loss_jump": 6.0}  # fmt: skip
    flags_ = [word for name, value in others.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    flags = [*flags, *flags_, "--model", "moe-50m", "--head", "fp8", "--run", "others", "--mesh", "data=1"]
    assert cli.main(flags) == 2
    assert recorded["recipe"].head == fp8jax.recipes.HEAD
    assert recorded | others == recorded
    assert "seen" in capsys.readouterr().err
    assert Config().run.logits == "auto"
