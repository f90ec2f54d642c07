"""Text from checkpoints: the cache of keys and values, sampling of tokens, and the command line."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from experiments import generate
from experiments.hub import tokenizer
from experiments.hub.load import load
from experiments.models import sampling
from experiments.models.llama import Llama, LlamaConfig
from experiments.models.sampling import TokenChoice
from tests.experiments import hub_cases as cases
from tests.rows import few, slow

TINY = LlamaConfig(vocab=40, dim=32, layers=2, heads=4, kv_heads=2, mlp_dim=48)


def checkpoint(folder, case):
    golden = cases.golden(case)
    return cases.write(folder, golden["config"], golden["shapes"]), golden


@pytest.mark.parametrize("case", few(cases.CASES, "llama31", "gpt2"))
def test_greedy_tokens_are_those_of_transformers(case, tmp_path):
    folder, golden = checkpoint(tmp_path, case)
    prompt = np.asarray(golden["tokens"])[:1, :7]
    texts = sampling.extend(load(folder).model(jnp.float32), prompt, len(golden["greedy"]))
    assert texts == [golden["greedy"]]


@pytest.mark.parametrize("case", [slow("llama31"), "mistral_window", slow("qwen3"), slow("olmo2"), "gpt2"])
def test_cached_logits_are_those_of_the_whole_text(case, tmp_path):
    folder, golden = checkpoint(tmp_path, case)
    model, tokens = load(folder).model(jnp.float32), jnp.asarray(golden["tokens"])
    expected, cache = np.asarray(model(tokens)), model.cache(2, 25)
    graphdef, state = nnx.split(model)
    state = nnx.to_pure_dict(state)
    step = jax.jit(lambda tokens, cache: nnx.merge(graphdef, state).extend(tokens, cache))
    for start, stop in [(0, 5), (5, 8), *((i, i + 1) for i in range(8, 20))]:
        logits, cache = step(tokens[:, start:stop], cache)
        np.testing.assert_allclose(logits, expected[:, stop - 1], atol=2e-5 * np.abs(expected).max())
    assert int(cache.length) == 20


def test_a_cache_has_the_dtype_that_is_computed_in():
    model = Llama(TINY, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    logits, cache = model.extend(jnp.ones((1, 3), jnp.int32), model.cache(1, 4))
    assert (logits.dtype, cache.keys.dtype, cache.keys.shape) == (jnp.bfloat16, jnp.bfloat16, (2, 1, 4, 2, 8))


def drawn(choice, logits, count=4000):
    keys = jax.random.split(jax.random.key(3), count)
    tokens = jax.vmap(lambda key: choice(jnp.asarray(logits)[None], key)[0])(keys)
    return np.bincount(np.asarray(tokens), minlength=len(logits)) / count


LOGITS = np.log([0.4, 0.3, 0.15, 0.1, 0.05])


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (TokenChoice(1.0), [0.4, 0.3, 0.15, 0.1, 0.05]),
        (TokenChoice(0.5), np.square([0.4, 0.3, 0.15, 0.1, 0.05]) / np.square([0.4, 0.3, 0.15, 0.1, 0.05]).sum()),
        (TokenChoice(1.0, top_k=2), [4 / 7, 3 / 7, 0, 0, 0]),
        (TokenChoice(1.0, top_k=1), [1, 0, 0, 0, 0]),
        (TokenChoice(1.0, top_k=9), [0.4, 0.3, 0.15, 0.1, 0.05]),
        (TokenChoice(1.0, top_p=0.39), [1, 0, 0, 0, 0]),
        (TokenChoice(1.0, top_p=0.69), [4 / 7, 3 / 7, 0, 0, 0]),
        (TokenChoice(1.0, top_p=0.71), [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0]),
        (TokenChoice(1.0, top_k=3, top_p=0.8), [4 / 7, 3 / 7, 0, 0, 0]),  # 0.7 / 0.85 of three are above 0.8
        (TokenChoice(0.0, top_k=3, top_p=0.5), [1, 0, 0, 0, 0]),
    ],
)
def test_tokens_are_drawn_with_their_probabilities(choice, expected):
    shares = drawn(choice, LOGITS)
    np.testing.assert_allclose(shares, expected, atol=4 * 0.5 / 4000**0.5)
    assert (shares[np.asarray(expected) == 0] == 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, r"temperature must be at least 0, got -1\.0"),
        ({"temperature": float("nan")}, "temperature must be at least 0, got nan"),
        ({"top_k": -1}, "top_k must be at least 1, or 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "top_p must be above 0"),
    ],
)
def test_impossible_choices_are_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        TokenChoice(**settings).validate()


def test_rare_tokens_are_drawn_from_logits_of_16_bits():
    """The noise of 16-bit logits would be too coarse."""
    logits, rare = jnp.asarray([0.0] + [-8.0] * 500, jnp.bfloat16), 500 * np.exp(-8.0)
    spread = 5 * (0.14 / 4000) ** 0.5
    assert drawn(TokenChoice(1.0), logits)[1:].sum() == pytest.approx(rare / (1 + rare), abs=spread)


@dataclasses.dataclass(frozen=True)
class Counted(TokenChoice):
    """A sampling function that counts its calls."""

    times: list = dataclasses.field(default_factory=list, compare=False)

    def __call__(self, logits, key):
        jax.debug.callback(lambda: self.times.append(1))
        return super().__call__(logits, key)


def test_a_sample_without_a_cache_draws_each_token_anew_at_its_temperature():
    calls = functools.partial(sampling.sample, prompt=[3, 1], length=42)

    def logits(params, tokens):
        return jnp.broadcast_to(params, (*tokens.shape, params.size))

    uniform = calls(logits, jnp.zeros(50), key=jax.random.key(0))
    assert (uniform[:2], len(uniform)) == ([3, 1], 42)
    assert len(set(uniform[2:])) > 15
    assert calls(logits, jnp.zeros(50), key=jax.random.key(0)) == uniform
    assert calls(logits, jnp.zeros(50), key=jax.random.key(1)) != uniform
    # The second token is e^3 times as probable; with a temperature of 100 hardly more, with 0.1 exclusively.
    shares = [np.mean(calls(logits, jnp.float32([0, 3]), key=jax.random.key(2), temperature=t)[2:]) for t in (0.1, 100)]
    assert shares[0] == 1
    assert 0.2 < shares[1] < 0.8
    # Each token is drawn from the logits at the preceding position.
    assert calls(lambda _, tokens: 1e4 * jax.nn.one_hot((tokens + 1) % 5, 5), None, key=jax.random.key(3))[:6] == [
        3, 1, 2, 3, 4, 0,
    ]  # fmt: skip


def test_seeds_give_texts_and_ends_end_them():
    model = Llama(dataclasses.replace(TINY, learned_positions=30), dtype=jnp.float32, rngs=nnx.Rngs(0))
    prompt, choice = np.asarray([[3, 4], [3, 4]]), TokenChoice(2.0)
    texts = sampling.extend(model, prompt, 30, choice, seed=1)
    assert texts == sampling.extend(model, prompt, 30, choice, seed=1)
    assert texts != sampling.extend(model, prompt, 30, choice, seed=2)
    assert texts[0] != texts[1]
    assert all(len(text) == 30 for text in texts)
    end = texts[0][10]
    counted = Counted(2.0)
    ended = sampling.extend(model, prompt, 30, counted, seed=1, stop=[end])
    jax.effects_barrier()
    assert len(counted.times) == max(map(len, ended)) - 2
    for text, whole in zip(ended, texts, strict=True):
        assert text == whole[: whole.index(end, 2) + 1 if end in whole[2:] else 30]
    assert sampling.extend(model, prompt, 30, choice, seed=1, stop=[3])[0][:2] == [3, 4]


@pytest.mark.parametrize(
    ("prompt", "length", "message"),
    [
        (np.zeros((1, 0)), 4, "a prompt needs 1 to 3 tokens"),
        (np.zeros((1, 4)), 4, "a prompt needs 1 to 3 tokens .* got 4"),
        (np.array([[3, 40]]), 4, "ids from 3 to 40, but the model has ids from 0 to 39"),
        (np.array([[3, -1]]), 4, "ids from -1 to 3, but the model has ids from 0 to 39"),
        (np.zeros((1, 2)), 20, "the model has 16 positions, not 20"),
    ],
)
def test_prompts_that_do_not_fit_are_errors(prompt, length, message):
    model = Llama(dataclasses.replace(TINY, learned_positions=16), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        sampling.extend(model, prompt.astype(np.int32), length)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with a tokenizer of letters; "<s>" precedes a text, "c" ends it."""
    folder, _ = checkpoint(tmp_path, "llama3")
    words = ["<unk>", "<s>", *"abcdefghijklmnopqrstuvwxyz .,!?-:;'"]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 39]}')
    return folder


def run(capsys, *flags):
    code = generate.main(list(flags))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_command_line_writes_what_the_model_says(folder, capsys):
    flags = ["--model", str(folder), "--dtype", "float32", "--prompt", "hello world"]
    code, out, err = run(capsys, *flags, "--tokens", "12", "--ignore-end")
    model, spelled = load(folder).model(jnp.float32), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = spelled.encode("hello world").ids
    assert ids[0] == 1
    greedy = sampling.extend(model, np.asarray([ids]), len(ids) + 12)[0]
    assert (code, out) == (0, spelled.decode(greedy) + "\n")
    assert "12 tokens in" in err
    assert run(capsys, *flags, "--tokens", "12", "--ignore-end", "--temperature", "9", "--top-k", "1")[1] == out
    end = greedy[len(ids) + 4]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [39, end]}))
    before = greedy[: greedy.index(end, len(ids))]
    assert run(capsys, *flags, "--tokens", "30")[1] == spelled.decode(before) + "\n"
    assert run(capsys, *flags, "--tokens", "12", "--ignore-end")[1] == out
    sampled = [*flags, "--tokens", "12", "--temperature", "3", "--top-k", "30", "--samples", "2", "--ignore-end"]
    first, again, other = (run(capsys, *sampled, "--seed", seed)[1] for seed in "778")
    assert first == again != other
    assert len(set(first.splitlines())) == 2


@pytest.mark.parametrize(
    ("flags", "change", "message"),
    [
        (["--tokens", "0"], None, "--tokens and --samples must be at least 1, got 0"),
        (["--samples", "0"], None, "--tokens and --samples must be at least 1, got 128 and 0"),
        (["--seed", str(2**64)], None, "--seed must fit in 64 bits, got 18446744073709551616"),
        (["--top-p", "2"], None, "top_p must be above 0"),
        (["--prompt", "a\udcff"], None, "--prompt cannot be encoded"),
        ([], lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        ([], lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read"),
        ([], lambda f: (f / "generation_config.json").write_text('{"eos_token_id": "x"}'), "eos_token_id is"),
        ([], lambda f: (f / "generation_config.json").write_text('{"eos_token_id": [true]}'), "eos_token_id is [True]"),
        ([], lambda f: (f / "model.safetensors").write_bytes(b"12345678"), "model.safetensors is damaged"),
    ],
)
def test_wrong_input_is_one_line_and_a_code(folder, capsys, flags, change, message):
    if change:
        change(folder)
    code, out, err = run(capsys, "--model", str(folder), "--prompt", "a", *flags)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_what_a_model_cannot_continue_is_one_line(folder, capsys, monkeypatch):
    def refuses(*_, **__):
        raise ValueError("no room")

    monkeypatch.setattr(sampling, "extend", refuses)
    assert run(capsys, "--model", str(folder), "--prompt", "a") == (2, "", "error: no room\n")


def test_a_tokenizer_of_another_model_is_refused(folder, capsys):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    longer = tokenizers.Tokenizer.from_file(str(path))
    longer.add_tokens([*"012", "zebra"])
    content["model"]["vocab"]["zebra"] = 40
    for text in (json.dumps(content), longer.to_str()):
        path.write_text(text)
        code, _, err = run(capsys, "--model", str(folder), "--prompt", "a")
        assert code == 2
        assert "tokenizer.json has ids up to 40 ('zebra'), but the checkpoint's embedding table has 40 rows" in err


def test_the_first_file_that_names_ends_of_texts_says_which(tmp_path):
    for generation, config, ends in (
        ({"eos_token_id": [4, 39]}, {"eos_token_id": 2}, (4, 39)),
        ({"eos_token_id": None}, {"eos_token_id": 2}, (2,)),
        ({}, {}, ()),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert tokenizer.ends(tmp_path) == ends
