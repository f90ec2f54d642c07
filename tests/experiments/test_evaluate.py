"""Evaluation: windows and scores against direct computation, and one line for wrong input."""

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from experiments import evaluate
from experiments.errors import UserError
from experiments.evaluate import Evaluation
from experiments.models import scoring
from experiments.models.llama import LlamaConfig
from experiments.text import data
from experiments.text.tokenizer import Bytes
from experiments.train import cli, report
from experiments.train import config as configuration
from experiments.train.config import Config
from experiments.train.optimizer import make_optimizer
from experiments.train.task import Task

VOCAB = 11
TABLE = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(jnp.bfloat16).astype(np.float32)
LOG = TABLE - np.log(np.exp(TABLE.astype(np.float64)).sum(-1, keepdims=True))


def bigram(table, tokens_BxT):
    """Logits of the next token, in 16 bits, that depend on the current token only."""
    return jnp.take(table, tokens_BxT, axis=0).astype(jnp.bfloat16)


@pytest.mark.parametrize("count", [2, 3, 5, 6, 7, 8, 11, 16])
def test_windows_score_every_token_but_the_first_once(count):
    tokens = np.random.default_rng(count).integers(0, VOCAB, count)
    windows = scoring.cut(tokens, 5)
    assert windows.tokens_NxT.shape == (len(windows.tokens_NxT), 6)
    assert windows.counts_NxT.sum() == count - 1
    score = scoring.score_text(scoring.score_sequences(bigram), TABLE, windows)
    assert score.tokens == count - 1
    np.testing.assert_allclose(score.nll, -LOG[tokens[:-1], tokens[1:]].sum(), rtol=1e-5)


def test_a_text_of_one_token_cannot_be_scored():
    with pytest.raises(ValueError, match="two tokens"):
        scoring.cut(np.array([3]), 4)


def test_a_perplexity_is_a_number_however_large_the_loss_is():
    assert scoring.Score(9e5, 3).perplexity == scoring.Score(2100, 3).perplexity == math.exp(700)


def test_a_sum_loses_no_token_beside_large_ones():
    logs = -jnp.ones((4, 64)).at[:, 0].set(2.0**24)
    windows = scoring.Windows(np.zeros((1, 65), np.int32), np.ones((1, 64), bool))
    assert scoring.score_text(lambda *_: logs, None, windows) == (2**24 + 63, 64)


@pytest.fixture(scope="module")
def trained(finished):
    return evaluate.load(finished, "bf16")


def small(recipe):
    """Returns an untrained model of the recipe, and its state before the first step."""
    settings = Config(data=configuration.Data(seq_len=16))
    shape = LlamaConfig(vocab=VOCAB, dim=32, layers=1, heads=2, kv_heads=1, mlp_dim=48)
    task = Task(shape, make_optimizer(settings, recipe), recipe, remat=False, seed=0)
    state = jax.jit(task.init)()
    return evaluate.Trained(settings, recipe, task, state.params, state.model_state, 0, Bytes())


def test_a_model_with_states_is_evaluated_with_those_it_was_trained_to():
    trained = small(fp8jax.recipes.te_delayed())
    tokens = np.random.default_rng(3).integers(0, VOCAB, (1, 16)).astype(np.int32)
    histories = jax.tree.map(lambda x: jnp.full_like(x, 0.05), trained.model_state)
    recorded = dataclasses.replace(trained, model_state=histories)
    fresh, actual = (np.asarray(t.model(t.params, tokens), np.float32) for t in (trained, recorded))
    expected = np.asarray(trained.task.model(trained.params, histories)(tokens), np.float32)
    np.testing.assert_array_equal(actual, expected)
    assert np.linalg.norm(actual - fresh) > 0.1 * np.linalg.norm(fresh)  # inputs beyond a twentieth saturated


@pytest.mark.slow
def test_a_run_with_delayed_scaling_is_evaluated_with_its_histories(argv, out):
    assert cli.main([*argv, "--run", "delayed", "--recipe", "te_delayed", "--microbatches", "2"]) == 0
    trained = evaluate.load(out / "delayed", "te_delayed")
    product = trained.model_state["layers"]["mlp"]["up"]["dot_general"]
    assert (np.asarray(product["dy"])[:, :8] > 0).all()
    assert (np.asarray(product["dy"])[:, 8:] == 0).all()
    # Scales from earlier steps do not depend on later tokens, unlike those of the tensor itself.
    model = trained.model
    a = np.random.default_rng(2).integers(97, 122, (1, 17)).astype(np.int32)
    b = a.copy()
    b[:, 12:] = 200
    whole = [scoring.run(scoring.score_sequences(model), trained.params, x, rows=1)[:, :11] for x in (a, b)]
    np.testing.assert_array_equal(*whole)


def test_perplexity_of_a_file_is_that_of_the_model(trained, finished, tmp_path):
    text = "w1 w2 w3 and some words that were not in the corpus"
    (tmp_path / "a.txt").write_text(text)
    actual = evaluate.evaluate(Evaluation(finished, "bf16", data=(str(tmp_path / "a.txt"),)), report.make_console())
    tokens = np.frombuffer(b"\0" + text.encode(), np.uint8).astype(np.int32)
    model = trained.task.model(trained.params, trained.model_state)
    total = 0.0
    for start in range(0, len(tokens) - 1, 16):
        end = min(start + 16, len(tokens) - 1)
        inputs = tokens[end - 16 : end]
        log = np.asarray(jax.nn.log_softmax(model(inputs[None]).astype(jnp.float32)), np.float64)[0]
        total -= log[np.arange(16), tokens[end - 15 : end + 1]][16 - (end - start) :].sum()
    score = actual[str(tmp_path / "a.txt")]
    assert score.tokens == len(text)
    np.testing.assert_allclose(score.loss, total / len(text), rtol=2e-3)


def table_row(shown, name):
    line = next(line for line in shown.splitlines() if re.match(rf"│ {name} +│", line))
    return [cell.strip() for cell in line.split("│")[2:-1]]


def test_without_data_the_text_is_what_training_held_back(trained, finished, corpus, capsys):
    actual = evaluate.evaluate(Evaluation(finished, "bf16"), report.make_console())["validation split"]
    row = table_row(capsys.readouterr().out, "validation split")
    texts = [path.read_text() for path in corpus.glob("*.txt")]
    valid_text = data.read_corpus([str(corpus)], 0.05).valid
    size = len("".join(valid_text))
    assert size < 0.1 * sum(map(len, texts))
    # One token per byte; the separator before the first document is not scored.
    assert actual.tokens == size + len(valid_text) - 1
    expected = [actual.loss, math.exp(actual.loss), actual.nll / math.log(2) / actual.tokens]
    assert row == [f"{actual.tokens:,}", f"{actual.tokens:,}", *(f"{x:.4f}" for x in expected)]


def test_a_limit_scores_the_first_tokens_alone(trained, finished, corpus, capsys):
    paths = sorted(map(str, corpus.glob("*.txt")))[:2]
    settings = Evaluation(finished, "bf16", data=tuple(paths), limit=20)
    actual = evaluate.evaluate(settings, report.make_console())
    assert [actual[path].tokens for path in (*paths, "together")] == [20, 20, 40]
    assert actual["together"].nll == pytest.approx(actual[paths[0]].nll + actual[paths[1]].nll)
    row = table_row(capsys.readouterr().out, paths[0])
    assert row[:2] == [f"{len(Path(paths[0]).read_text()):,}", "20"]
    assert float(row[-1]) == pytest.approx(actual[paths[0]].nll / math.log(2) / 20, abs=1e-4)


def test_without_a_limit_a_text_is_scored_whole_and_the_last_line_is_of_all(trained, capsys, monkeypatch):
    texts, nothing = {"a": ("abcd" * 9,), "b": ("é" * 5,)}, lambda params, tokens: -jnp.ones(tokens[:, 1:].shape)
    monkeypatch.setattr(scoring, "score_sequences", lambda model: nothing)
    actual = evaluate._print_texts(report.make_console(), trained, texts, 0)
    assert {name: score.tokens for name, score in actual.items()} == {"a": 36, "b": 10, "together": 46}
    assert table_row(capsys.readouterr().out, "together") == ["46", "46", "1.0000", "2.7183", f"{1 / math.log(2):.4f}"]


def test_texts_are_read_whole_and_files_that_are_none_passed_over_unless_they_are_named(trained, tmp_path):
    text, none, records = (tmp_path / name for name in ("a.txt", "b.txt", "c.jsonl"))
    text.write_text(" ".join(map(str, range(200))))
    none.write_bytes(b"\xff\xfe\x00\xff")
    of = lambda *data: evaluate.read_texts(Evaluation(Path(), "bf16", data=tuple(map(str, data))), trained)  # noqa: E731
    assert of(tmp_path) == {str(text): (text.read_text(),)}
    with pytest.raises(UserError, match=r"b\.txt"):
        of(text, none)
    text.unlink()
    with pytest.raises(UserError, match=rf"--data {tmp_path}: no text in it"):
        of(tmp_path)
    records.write_text(json.dumps({"text": "x"}) + "\n")
    for name, field, value in (("data", "data", (str(records),)), ("model", "init", "folder")):
        part = dataclasses.replace(getattr(trained.config, name), **{field: value})
        other = dataclasses.replace(trained, config=dataclasses.replace(trained.config, **{name: part}))
        with pytest.raises(UserError, match="packed records; pass texts to score with --data"):
            evaluate.read_texts(Evaluation(Path(), "bf16"), other)


def test_a_checkpoint_that_is_damaged_is_refused_and_stays(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    metadata = run / "bf16" / "checkpoints" / "8" / "_CHECKPOINT_METADATA"
    metadata.write_text(metadata.read_text().replace('"step": 8', '"step": 9'))
    (run / "bf16" / "checkpoints" / "12.orbax-checkpoint-tmp").mkdir()
    assert evaluate.main(["--run", str(run), "--recipe", "bf16"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(r"checkpoints/8 is damaged: .*\. Move this folder away to evaluate the previous checkpoint", error)
    assert len(list(metadata.parents[1].iterdir())) == 3


def test_a_recipe_that_changed_since_is_refused(finished, monkeypatch, capsys):
    changed = dataclasses.replace(fp8jax.recipes.bf16(), weights=fp8jax.recipes.Weights("fp32", "fp32"))
    monkeypatch.setattr(fp8jax.recipes, "get", lambda name: changed)
    assert evaluate.main(["--run", str(finished), "--recipe", "bf16"]) == 2
    assert "recipe.weights.compute was 'bf16', now 'fp32'" in capsys.readouterr().err


def test_the_command_line_prints_the_run_and_its_text(finished, capsys):
    assert evaluate.main(["--run", str(finished), "--recipe", "coat_optimizer", "--limit", "20"]) == 0
    shown = capsys.readouterr().out
    assert "step 8; linear layers unquantized; contexts of 16" in shown
    assert "validation split" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--recipe", "bf17"], "--recipe: unknown recipe 'bf17'"),
        (["--recipe", "te_current"], "has checkpoints of bf16, coat_optimizer"),
        (["--recipe", "bf16", "--run", "nowhere"], "there is no run of experiments.train"),
        (["--recipe", "bf16", "--limit", "-1"], "--limit must be at least 0, got -1"),
        (["--recipe", "bf16", "--data", "nowhere.txt"], "--data nowhere.txt: no such file"),
    ],
)
def test_wrong_input_is_one_line_that_names_it(finished, capsys, flags, message):
    assert evaluate.main(["--run", str(finished), *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error, error
