"""Trained models as Hugging Face checkpoints, by the command line."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from experiments import evaluate, generate
from experiments.hub import __main__ as command
from experiments.hub import files
from experiments.hub.load import load
from experiments.text.tokenizer import Bytes
from experiments.train import cli

pytestmark = pytest.mark.slow

TEXTS = ["the <|document|> w5 w7", "añ\n\t 漢", "<|document|>", ""]


@pytest.fixture(scope="module")
def run(argv, out):
    """A run of recipes with current and with predicted weight scales, and byte-pair encoding."""
    flags = ["--run", "hub", "--recipe", "te_current", "moss", "--tokenizer", "bpe", "--vocab", "300"]
    assert cli.main([*argv, *flags, "--eval-every", "8"]) == 0
    return out / "hub"


def export(*flags):
    assert command.main([str(flag) for flag in flags]) == 0


def relative(a, b):
    return float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))


def test_a_run_becomes_a_checkpoint_with_its_tokenizer(run, tmp_path, capsys):
    trained = evaluate.load(run, "te_current")
    export("--run", run, "--recipe", "te_current", "--out", tmp_path / "out", "--dtype", "same")
    loaded = load(tmp_path / "out")
    assert loaded.config == trained.task.llama
    jax.tree.map(np.testing.assert_array_equal, loaded.params, trained.params)
    spelled = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    ids = np.concatenate([spelled.encode(text).ids for text in TEXTS])
    np.testing.assert_array_equal(ids, trained.tokenizer.encode(TEXTS))
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (fields["eos_token_id"], fields["max_position_embeddings"]) == (0, 16)
    assert fields["architectures"] == ["LlamaForCausalLM"]
    assert generate.main(["--model", str(tmp_path / "out"), "--prompt", "w5", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("w5")


@pytest.mark.parametrize("recipe", ["te_current", "moss"])
def test_codes_in_the_checkpoint_are_those_that_layers_multiply_by(run, recipe, tmp_path):
    trained = evaluate.load(run, recipe)
    export("--run", run, "--recipe", recipe, "--out", tmp_path / "out", "--eight", "recipe")
    stored = files.tensors(tmp_path / "out")
    graph, stacked = nnx.split(trained.task.model(trained.params, trained.model_state).layers)
    for i in range(2):
        layer = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))
        for name, linear in (("self_attn.q_proj", layer.attention.q), ("mlp.down_proj", layer.mlp.down)):
            codes, scale = (stored[f"model.layers.{i}.{name}.{x}"].read() for x in ("weight", "weight_scale"))
            values = codes.astype(np.float32) * scale
            # A product with the identity returns the decoded values.
            recorded = linear(jnp.eye(values.shape[1], dtype=jnp.bfloat16))
            np.testing.assert_array_equal(np.asarray(recorded), values.T.astype(jnp.bfloat16))
            kernel = np.asarray(linear.kernel[...], np.float32)
            predicted = abs(float(scale[0]) / (np.abs(kernel).max() / 448) - 1) > 1e-5
            assert predicted == (recipe == "moss")


def test_dequantized_logits_are_within_the_error_of_the_recipe(run, tmp_path):
    trained = evaluate.load(run, "te_current")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 300, (4, 16)))
    export("--run", run, "--recipe", "te_current", "--out", tmp_path / "8", "--eight", "recipe", "--dtype", "float32")
    export("--run", run, "--recipe", "te_current", "--out", tmp_path / "32", "--dtype", "float32")
    exact, served = (
        load(tmp_path / name, dtype=jnp.float32).model(jnp.float32)(tokens).astype(jnp.float32) for name in ("32", "8")
    )
    recipe = trained.task.model(trained.params, trained.model_state)(tokens).astype(jnp.float32)
    assert 0 < relative(served, np.asarray(exact)) < relative(recipe, np.asarray(exact)) < 0.2


def test_bytes_become_a_tokenizer_of_256_letters(finished, tmp_path):
    export("--run", finished, "--recipe", "bf16", "--out", tmp_path / "out")
    spelled = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    everything = ["".join(map(chr, range(1, 0x300))), *TEXTS]
    ids = np.concatenate([spelled.encode(text).ids for text in everything])
    np.testing.assert_array_equal(ids, Bytes().encode(everything))
    assert spelled.get_vocab_size() == 256
    assert [spelled.decode(spelled.encode(text).ids[1:]) for text in everything] == everything
    assert load(tmp_path / "out").params["norm"]["scale"].dtype == jnp.bfloat16


def test_a_checkpoint_is_written_in_8_bits(run, tmp_path, capsys):
    export("--run", run, "--recipe", "te_current", "--out", tmp_path / "a")
    export("--model", tmp_path / "a", "--out", tmp_path / "b", "--eight", "channel", "--activations")
    weight = files.tensors(tmp_path / "b")["model.layers.1.mlp.up_proj.weight_scale"]
    assert weight.shape == (64, 1)
    assert (tmp_path / "b" / "tokenizer.json").read_text() == (tmp_path / "a" / "tokenizer.json").read_text()
    export("--model", tmp_path / "a", "--out", tmp_path / "c", "--eight", "deepseek")
    err = capsys.readouterr().err
    assert "128 does not divide a weight or one fused with it: model.layers.0.self_attn.q_proj, " in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--run", "RUN", "--model", "x"], "pass either --run with --recipe, or --model"),
        (["--run", "RUN"], "--run needs --recipe"),
        (["--run", "RUN", "--recipe", "coat"], "has checkpoints of moss, te_current"),
        (["--run", "RUN", "--recipe", "moss", "--eight", "recipe-deepseek"], "recipe moss has one scale per tensor"),
    ],
)
def test_wrong_input_is_one_line_and_a_code(run, tmp_path, capsys, flags, message):
    flags = [str(run) if flag == "RUN" else flag for flag in flags]
    assert command.main(["--out", str(tmp_path / "out"), *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
