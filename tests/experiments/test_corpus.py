"""Discovery of text, the split, tokenizers and the loader."""

import json
import os

import numpy as np
import pytest
import tokenizers

from experiments.errors import UserError
from experiments.text import data
from experiments.text.tokenizer import BytePair, Bytes


def write(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_files_folders_and_globs_find_the_same_documents(tmp_path):
    write(tmp_path, a="one " * 50, b="two " * 50, c="three " * 50)
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "d.txt").write_text("no")
    folder = data.read_corpus([str(tmp_path)], 0.3)
    assert data.read_corpus([str(tmp_path / "*.txt")], 0.3) == folder
    assert data.read_corpus([str(tmp_path / f"{x}.txt") for x in "abc"], 0.3) == folder
    assert data.read_corpus([str(tmp_path), str(tmp_path / "a.txt")], 0.3) == folder
    assert folder.files == 3
    (tmp_path / "below").mkdir()
    write(tmp_path / "below", e="five " * 50)
    assert data.read_corpus([str(tmp_path / "**" / "*.txt")], 0.3) == data.read_corpus([str(tmp_path)], 0.3) != folder


def test_split_is_by_document_and_the_same_wherever_the_files_lie(tmp_path):
    texts = {f"d{i}": f"text number {i} " * (20 + i) for i in range(40)}
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    one = data.read_corpus([str(write(tmp_path / "x", **texts))], 0.2)
    two = data.read_corpus([str(write(tmp_path / "y", **{k + "z": v for k, v in reversed(texts.items())}))], 0.2)
    assert one.valid == two.valid
    assert sorted(one.train + one.valid) == sorted(texts.values())
    assert set(one.train) == set(two.train)
    assert 0.15 < sum(map(len, one.valid)) / sum(map(len, texts.values())) <= 0.3


def test_single_file_gives_its_tail_to_validation(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(1000))
    # At most half of a large text, at least one character of a small one.
    for one, share, cut in ((text, 0.1, 900), (text, 0.8, 500), ("short", 0.1, 4)):
        corpus = data.read_corpus([str(write(tmp_path, a=one) / "a.txt")], share)
        assert (corpus.train, corpus.valid) == ((one[:cut],), (one[cut:],))


def test_copies_and_empty_files_are_dropped(tmp_path):
    write(tmp_path, a="same " * 30, b="same " * 30, c="other " * 30, d=" \n", e="")
    corpus = data.read_corpus([str(tmp_path)], 0.5)
    assert sorted(corpus.train + corpus.valid) == ["other " * 30, "same " * 30]
    assert len(corpus.valid) == 1


def test_documents_go_to_validation_until_they_hold_its_share(tmp_path):
    write(tmp_path, **{f"d{i}": f"{i:02} " * 30 for i in range(20)})
    for share, count in ((0.2, 4), (0.99, 19)):
        corpus = data.read_corpus([str(tmp_path)], share)
        assert (len(corpus.train), len(corpus.valid)) == (20 - count, count)


def test_standard_library_is_the_default_and_holds_no_tests():
    names = [str(path) for path in data.stdlib_files()]
    assert names == sorted(names, key=lambda n: n.split(os.sep))
    assert any(name.endswith("pydoc_data/topics.py".replace("/", os.sep)) for name in names)
    assert not any(f"{os.sep}{part}{os.sep}" in name for name in names for part in ("test", "site-packages"))
    corpus = data.read_corpus([], 0.05)
    assert sum(map(len, corpus.train)) > 2_000_000
    assert len(corpus.valid) >= 2


@pytest.mark.parametrize("content", [b"text\0text", b"caf\xe9 au lait"])
def test_files_that_are_not_text(tmp_path, content):
    write(tmp_path, good="words " * 50, bad=content)
    corpus = data.read_corpus([str(tmp_path)], 0.1)
    assert [os.path.basename(name) for name in corpus.skipped] == ["bad.txt"]
    patterns = [str(tmp_path), str(tmp_path / "bad.txt")]
    for order in (patterns, patterns[::-1]):
        with pytest.raises(UserError, match=r"bad\.txt: the file is binary or not UTF-8; convert"):
            data.read_corpus(order, 0.1)


def test_missing_paths_are_errors_that_name_them(tmp_path):
    for pattern, message in (
        ("missing.txt", "no such file or folder"),
        ("*.md", "the glob matches no file"),
        ("", "the folder contains no files"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            data.read_corpus([str(tmp_path / pattern)], 0.1)
        assert str(tmp_path / pattern) in str(caught.value)


def test_unreadable_file_is_an_error_that_names_it(tmp_path, monkeypatch):
    path = write(tmp_path, a="text") / "a.txt"

    # Root ignores permission bits, so the error is simulated.
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "read_bytes", refuse)
    with pytest.raises(UserError, match=r"cannot read .*a\.txt: Permission denied"):
        data.read_corpus([str(path)], 0.1)


def test_empty_corpus_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"the corpus is empty: 2 files"):
        data.read_corpus([str(write(tmp_path, a="", b="\n"))], 0.1)


@pytest.mark.parametrize(("length", "which"), [(15, "training"), (100, "validation")])
def test_split_shorter_than_one_sequence_is_an_error(tmp_path, length, which):
    corpus = data.read_corpus([str(write(tmp_path, a="x" * length) / "a.txt")], 0.1)
    with pytest.raises(UserError, match=f"the {which} text has .* one sequence needs 17"):
        data.encode(corpus, Bytes(), 16)


def test_one_sequence_and_the_token_after_it_is_enough():
    # A document has one token more than characters.
    for train, valid, which in ((16, 15, "validation"), (15, 16, "training")):
        with pytest.raises(UserError, match=f"the {which} text has 16 tokens"):
            data.encode(data.Corpus(("x" * train,), ("y" * valid,), 2, ()), Bytes(), 16)
    tokens = data.encode(data.Corpus(("x" * 16,), ("y" * 16,), 2, ()), Bytes(), 16)
    assert (len(tokens.train), len(tokens.valid)) == (17, 17)
    assert (tokens.train[1], tokens.valid[1]) == (ord("x"), ord("y"))


@pytest.mark.parametrize("length", [17, 31, 32, 33])
def test_windows_of_a_text_are_full(length):
    """A window has one token more than its inputs. The last, shorter one is dropped."""
    windows = data._rows(np.arange(length), 16)
    assert len(windows) == {17: 1, 31: 1, 32: 1, 33: 2}[length]
    np.testing.assert_array_equal(windows[len(windows) - 1], np.arange(17) + 16 * (len(windows) - 1))


def test_bytes_round_trip_and_separator():
    ids = Bytes().encode(["añ\n", "b"])
    assert ids.tolist() == [0, 97, 195, 177, 10, 0, 98]
    assert Bytes().decode(ids) == "\nañ\n\nb"
    assert Bytes().decode([195]) == "\N{REPLACEMENT CHARACTER}"


def test_byte_pairs_round_trip_compress_and_reload(tmp_path):
    documents = ["the cat and the hat <|document|> " * 20, "ünïcode \t the\n" * 5]
    tokenizer = BytePair.train(documents, 300)
    ids = tokenizer.encode(documents)
    assert tokenizer.decode(ids.tolist()) == "\n" + "\n".join(documents)
    assert (ids == 0).sum() == 2
    assert len(ids) < 0.6 * sum(len(d.encode()) for d in documents)
    assert ids.max() < tokenizer.vocab <= 300
    unseen = "Ωmega 漢字 \N{PILE OF POO}"
    assert tokenizer.decode(tokenizer.encode([unseen])[1:].tolist()) == unseen
    tokenizer.save(tmp_path / "t.json")
    np.testing.assert_array_equal(BytePair.load(tmp_path / "t.json").encode(documents), ids)
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(UserError, match=r"t\.json cannot be read"):
        BytePair.load(tmp_path / "t.json")


def test_ids_of_large_vocabularies_are_whole():
    words = {"<|document|>": 0} | {f"w{i}": i for i in range(1, 2**16 + 1)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    assert BytePair(model).encode(["w2 w65536", "w65535"]).tolist() == [0, 2, 65536, 0, 65535]


SPELLED = ["a <|document|> b", "", "the <|document|>the\n", "<|document|>"]


def test_the_file_of_byte_pairs_alone_gives_the_ids_of_training(tmp_path):
    tokenizer = BytePair.train(["the cat and the hat <|document|> " * 20], 300)
    tokenizer.save(tmp_path / "t.json")
    ids = tokenizer.encode(SPELLED)
    assert (ids == 0).sum() == len(SPELLED)
    alone = tokenizers.Tokenizer.from_file(str(tmp_path / "t.json"))
    np.testing.assert_array_equal(np.concatenate([x.ids for x in alone.encode_batch(SPELLED)]), ids)
    assert alone.token_to_id("<|document|>") == 0
    assert [alone.decode(alone.encode(x).ids[1:]) for x in SPELLED] == SPELLED


def test_files_of_byte_pairs_of_earlier_runs_give_the_ids_that_they_gave(tmp_path):
    """Until version 0.1, a file had the separator as an added token, without its position."""
    tokenizer = BytePair.train(["the cat and the hat <|document|> " * 20], 300)
    tokenizer.save(tmp_path / "t.json")
    old = json.loads((tmp_path / "t.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    old |= {"added_tokens": [{"id": 0, "content": "<|document|>", **flags}], "post_processor": None}
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert 0 in tokenizers.Tokenizer.from_file(str(tmp_path / "old.json")).encode(SPELLED[0]).ids
    np.testing.assert_array_equal(BytePair.load(tmp_path / "old.json").encode(SPELLED), tokenizer.encode(SPELLED))


def take(iterator, count):
    return np.stack([next(iterator) for _ in range(count)])


def test_batches_are_windows_of_the_text_and_cover_it_once_an_epoch():
    tokens = np.arange(1, 98, dtype=np.uint16)  # 12 sequences of 8 and the token after each
    epochs = take(data.train_batches(tokens, 8, 4, seed=0), 6).reshape(2, 12, 9)
    for epoch in epochs:
        assert sorted(epoch[:, 0].tolist()) == list(range(1, 97, 8))
        np.testing.assert_array_equal(epoch - epoch[:, :1], np.broadcast_to(np.arange(9), (12, 9)))
    assert epochs.dtype == np.int32
    assert not np.array_equal(epochs[0], epochs[1])


def test_order_of_batches_depends_on_the_seed_alone():
    tokens = np.arange(500, dtype=np.uint16)
    first = take(data.train_batches(tokens, 8, 4, seed=3), 20)
    np.testing.assert_array_equal(first, take(data.train_batches(tokens, 8, 4, seed=3), 20))
    assert not np.array_equal(first, take(data.train_batches(tokens, 8, 4, seed=4), 20))


@pytest.mark.parametrize("position", [0, 1, 7])
def test_loader_goes_on_from_a_saved_position(position):
    tokens = np.arange(200, dtype=np.uint16)
    whole = data.train_batches(tokens, 8, 4, seed=1)
    take(whole, position) if position else None
    saved = whole.get_state()
    expected = take(whole, 9)
    resumed = data.train_batches(tokens, 8, 4, seed=1)
    resumed.set_state(saved)
    np.testing.assert_array_equal(take(resumed, 9), expected)


def test_validation_batches_are_fixed_and_spread():
    tokens = np.arange(1001, dtype=np.uint16)
    batches = data.valid_batches(tokens, 10, 4, max_batches=3)
    assert (batches.shape, batches.dtype) == ((3, 4, 11), np.int32)
    assert batches[0, 0, 0] == 0
    assert batches[-1, -1, -1] == 1000
    assert len(np.unique(batches[..., 0])) == 12
    assert data.valid_batches(tokens[:25], 10, 4, max_batches=3).shape == (1, 2, 11)


def test_fingerprint_changes_with_any_token_of_either_split():
    train, valid = np.arange(50, dtype=np.uint16), np.arange(9, dtype=np.uint16)
    base = data.Tokens(train, valid).fingerprint
    assert data.Tokens(train.copy(), valid.copy()).fingerprint == base
    changed = train.copy()
    changed[17] += 1
    others = {data.Tokens(changed, valid).fingerprint, data.Tokens(train, valid[:-1]).fingerprint}
    assert len({base} | others) == 3
