"""The inputs of training: prompts of samples, ids of texts, and errors."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.errors import UserError
from experiments.text import chat, data, packing
from experiments.text.data import Corpus, Tokens
from experiments.text.packing import Packed
from experiments.text.records import TextRecord
from experiments.text.tokenizer import SEPARATOR, Bytes
from experiments.train import start
from experiments.train.cli import parse
from experiments.train.start import CheckpointTokenizer


def packed(answers):
    """Four tokens of a document, and two of another."""
    row = np.array([[9, 8, 7, 6, 5, 4], [*answers, 1, 1], [1, 1, 1, 1, 2, 2]], np.int32)
    return Packed(row[None], row[None], 1, 0, 0)


@pytest.mark.parametrize(
    ("answers", "longest", "expected"),
    [
        ((0, 0, 1, 1), 24, [9, 8]),  # up to the answer
        ((0, 0, 1, 1), 1, [9]),
        ((0, 1, 1, 1), 24, [9, 8, 7, 6]),  # a whole text, whose first token is not a target
        ((1, 1, 1, 1), 3, [9, 8, 7]),
        ((0, 0, 0, 0), 24, [9, 8, 7, 6]),  # nothing of the next document
        ((0, 0, 0, 1), 24, [9, 8, 7]),
        ((0, 0, 1, 1), 0, []),
    ],
)
def test_a_sample_goes_on_from_the_first_document_up_to_an_answer(answers, longest, expected):
    assert start.prompt(packed(answers), longest) == expected


def test_a_sample_of_plain_text_goes_on_from_its_first_tokens():
    tokens = Tokens(np.array([1, 2, 3], np.uint16), np.array([7, 8, 9], np.uint16))
    assert start.prompt(tokens, 2) == [7, 8]
    assert start.prompt(tokens, 24) == [7, 8, 9]
    assert start.prompt(tokens, 0) == []


@pytest.mark.parametrize(
    ("begins", "ends", "expected", "whole"),
    [
        (1, 2, [1, 10, 11, 1, 12], [1, 10, 11, 2]),
        (0, 2, [0, 10, 11, 0, 12], [0, 10, 11, 2]),
        (None, 2, [2, 10, 11, 2, 12], [10, 11, 2]),
        (None, 0, [0, 10, 11, 0, 12], [10, 11, 0]),
        (None, None, [10, 11, 12], [10, 11]),
    ],
)
def test_texts_are_parted_by_what_begins_them_or_else_ends_them(begins, ends, expected, whole):
    requests = []

    def encode_batch(texts, add_special_tokens):
        requests.append(add_special_tokens)
        return [SimpleNamespace(ids={"ab": [10, 11], "c": [12]}[text]) for text in texts]

    for vocab, dtype in ((1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)):
        spelled = CheckpointTokenizer(Path(), vocab, SimpleNamespace(encode_batch=encode_batch), begins, ends)
        actual = spelled.encode(["ab", "c"])
        assert (actual.dtype, actual.tolist()) == (dtype, expected)
        document = spelled.document([10, 11])
        assert (document.ids.tolist(), document.answers.tolist()) == (whole, [1] * len(whole))
    assert requests == [False, False]


def test_records_of_plain_text_are_packed_whole_and_conversations_need_a_template(monkeypatch):
    config = parse("--run r --seq-len 8 --valid-fraction 0.5".split())  # noqa: SIM905
    texts = tuple(f"text {i}" for i in range(8))
    corpus = Corpus(texts, (), 1, (), tuple(TextRecord(f"f:{i}", text) for i, text in enumerate(texts)))
    original, calls = packing.pack, []
    monkeypatch.setattr(
        packing, "pack", lambda actual, *how, **more: calls.append((how, more)) or original(actual, *how, **more)
    )
    actual = start.encode(config, corpus, Bytes())
    assert calls == [((0.5, 8), {"keep_whole": False})]
    assert actual.documents == len(texts)
    rows = np.concatenate([actual.train, actual.valid])
    first = rows[0][0][rows[0][2] == 1]
    assert first[0] == SEPARATOR
    assert bytes(first[1:].astype(np.uint8)).decode() in {text[: len(first) - 1] for text in texts}
    talk = TextRecord("f:9", None, ({"role": "user", "content": "a"},))
    with pytest.raises(UserError, match="f:9: conversations need the chat template of a checkpoint; set --init"):
        start.encode(config, Corpus((), (), 1, (), (talk,)), Bytes())


class Letters:
    """A fake tokenizer: one id per letter, and none before a text."""

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return SimpleNamespace(ids=[ord(letter) for letter in text])


def test_texts_and_conversations_are_packed_together(monkeypatch):
    """Only whole conversations are never split."""
    config = parse("--run r --seq-len 8 --valid-fraction 0.5".split())  # noqa: SIM905
    calls = []
    monkeypatch.setattr(packing, "pack", lambda actual, *_, keep_whole: calls.append((actual, keep_whole)))
    monkeypatch.setattr(chat, "Template", lambda folder: folder)
    monkeypatch.setattr(start, "conversation", lambda record, template, model: (record.where, template))
    text, talk = TextRecord("f:1", "ab"), TextRecord("f:2", None, ({"role": "user", "content": "a"},))
    spelled = CheckpointTokenizer(Path("made"), 300, Letters(), 1, 2)
    for texts in (("ab",), ()):
        start.encode(config, Corpus(texts, (), 1, (), (*[text] * len(texts), talk)), spelled)
    (both, parted), (talks, whole) = calls
    assert (both[0].ids.tolist(), both[1:], parted) == ([1, 97, 98, 2], [("f:2", Path("made"))], False)
    assert (talks, whole) == ([("f:2", Path("made"))], True)


def test_answers_are_tokens_that_lie_within_an_answer():
    offsets = [(0, 2), (1, 3), (2, 2), (2, 4), (3, 5), (5, 6), (6, 8)]
    encode = lambda text, add_special_tokens: SimpleNamespace(ids=[*range(7)], offsets=offsets)  # noqa: E731
    template = SimpleNamespace(spans=lambda messages, where: ("abcdefgh", [(2, 4), (5, 8)]))
    actual = start.conversation(TextRecord("f:1", None, ()), template, SimpleNamespace(encode=encode))
    assert actual.answers.tolist() == [0, 0, 0, 1, 0, 1, 1]


def test_without_data_a_checkpoint_is_tuned_on_all_of_the_standard_library(monkeypatch):
    monkeypatch.setattr(data, "read_corpus", lambda patterns, _: Corpus(("a", "b"), ("c",), 7, ()))
    actual = start.read(parse("--run r --init x".split()))  # noqa: SIM905
    assert ([record.text for record in actual.records], actual.train, actual.files) == ([*"abc"], (*"abc",), 7)


def test_a_checkpoint_says_what_begins_and_ends_texts_and_how_many_there_are(tmp_path):
    from tests.experiments import hub_cases

    tokenizers = pytest.importorskip("tokenizers")
    cases = {}
    for name in ("llama3", "gpt2"):
        golden = hub_cases.golden(name)
        (tmp_path / name).mkdir()
        cases[name] = hub_cases.write(tmp_path / name, golden["config"], golden["shapes"])
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 3, "</s>": 5, "a": 6, "<u>": 7}, "<u>"))
    model.save(str(cases["llama3"] / "tokenizer.json"))
    (cases["llama3"] / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    (cases["llama3"] / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    actual = start.tokenizer(parse(["--init", str(cases["llama3"])]))
    assert (actual.begins, actual.ends) == (3, 5)
    with pytest.raises(UserError, match="packed documents need rotary positions, but this model has learned positions"):
        start.shape(parse(["--init", str(cases["gpt2"])]))
