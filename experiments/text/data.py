"""From files to batches of tokens: file discovery, the split, and a loader with a position that can be saved.

Text and tokens are in memory. Nothing depends on the location of the files or on the recipe. The split depends on the
content of each document, and the order of batches only on the seed.
"""

import dataclasses
import glob
import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np

from experiments.errors import UserError
from experiments.files import irregular, read_bytes
from experiments.text.packing import fingerprint_of
from experiments.text.tokenizer import Tokenizer

# Excludes tests, vendored code and generated tables, which differ in style from the rest of the standard library.
_STDLIB_LEAVE_OUT = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "ensurepip"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents as text.

    Attributes:
        train, valid: the two splits; no document is in both.
        files: number of files.
        skipped: names of files in folders and globs that are not text.
        records: `TextRecord`s of `text.records` if documents are packed; they are split after tokenization.
    """

    train: tuple[str, ...]
    valid: tuple[str, ...]
    files: int
    skipped: tuple[str, ...]
    records: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Both splits as 1-D arrays of token ids, and a fingerprint of their content."""

    train: np.ndarray
    valid: np.ndarray

    @property
    def fingerprint(self) -> str:
        """See `fingerprint_of`."""
        return fingerprint_of(self.train, self.valid)


def stdlib_files() -> list[Path]:
    """Returns the standard library's sources and docs on this machine, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (p for p in root.rglob("*.py") if not _STDLIB_LEAVE_OUT & set(p.relative_to(root).parts))
    return sorted(files, key=lambda p: p.relative_to(root).parts)


def find_files(patterns: Sequence[str]) -> list[tuple[Path, bool]]:
    """Returns the files of patterns, each with whether it is a pattern itself (not in a folder or glob).

    A folder stands for all files below it that are not hidden. A file that is found twice counts once.

    Raises:
        UserError: a path does not exist, or is a pipe or a device; or a glob or folder has no file.
    """
    files: dict[Path, tuple[Path, bool]] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_file():
            matches = [(path, True)]
        elif path.exists() and not path.is_dir():
            raise UserError(f"--data {pattern}: {irregular(path.stat().st_mode)}; copy its content to a regular file")
        elif path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file())
            matches = [(p, False) for p in found if not any(x.startswith(".") for x in p.relative_to(path).parts)]
            if not matches:
                raise UserError(f"--data {pattern}: the folder contains no files")
        elif glob.has_magic(pattern):
            names = sorted(glob.glob(str(path), recursive=True))
            matches = [(Path(name), False) for name in names if Path(name).is_file()]
            if not matches:
                raise UserError(f"--data {pattern}: the glob matches no file")
        else:
            raise UserError(f"--data {pattern}: no such file or folder")
        for match, named in matches:
            key = match.resolve()
            files[key] = (match, named or files.get(key, (match, False))[1])
    return list(files.values())


def read_text(path: Path) -> str | None:
    """Returns the file's text, or None if it is binary (has a zero byte) or not UTF-8.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        raw = read_bytes(path)
    except OSError as error:
        raise UserError(f"--data: cannot read {path}: {error.strerror}") from None
    if b"\0" in raw:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def read_corpus(patterns: Sequence[str], valid_fraction: float) -> Corpus:
    """Reads every document and splits them.

    Whole documents go to validation, in the order of a hash of their content, until they contain `valid_fraction` of
    the text. A document that alone would exceed it by half is skipped, and one stays for training. If there is a single
    document, or all are too large, the end of the text is used for validation instead. Empty documents and exact copies
    are dropped, so that a copy cannot be in both splits.

    Args:
        patterns: see `find_files`; none for the standard library.
        valid_fraction: share of the characters, between 0 and 1.

    Raises:
        UserError: a path is missing or unreadable, a file named by itself is not text, or there is no text at all.
    """
    files = find_files(patterns) if patterns else [(path, False) for path in stdlib_files()]
    documents: dict[str, str] = {}
    skipped = []
    for path, named in files:
        text = read_text(path)
        if text is None and named:
            raise UserError(f"--data {path}: the file is binary or not UTF-8; convert it to UTF-8 text or exclude it")
        if text is None:
            skipped.append(str(path))
        elif text.strip():
            documents.setdefault(hashlib.sha256(text.encode()).hexdigest(), text)
    if not documents:
        where = " ".join(patterns) or "the standard library"
        raise UserError(f"the corpus is empty: {len(files)} files in {where}, none with text; pass text with --data")

    target = valid_fraction * sum(map(len, documents.values()))
    chosen, count = set[str](), 0
    for key in sorted(documents):
        if count < target and count + len(documents[key]) <= 1.5 * target and len(chosen) < len(documents) - 1:
            chosen.add(key)
            count += len(documents[key])
    train = [text for key, text in documents.items() if key not in chosen]
    valid = [documents[key] for key in sorted(chosen)]
    if not chosen:
        valid_start = len(train[-1]) - max(1, int(min(target, len(train[-1]) / 2)))
        train[-1], valid = train[-1][:valid_start], [train[-1][valid_start:]]
    return Corpus(tuple(train), tuple(valid), len(files), tuple(skipped))


def encode(corpus: Corpus, tokenizer: Tokenizer, seq_len: int) -> Tokens:
    """Returns both splits as tokens.

    Raises:
        UserError: a split is shorter than one sequence and its last target.
    """
    tokens = Tokens(tokenizer.encode(corpus.train), tokenizer.encode(corpus.valid))
    for name, split in (("training", tokens.train), ("validation", tokens.valid)):
        if len(split) < seq_len + 1:
            raise UserError(
                f"the {name} text has {len(split)} tokens, one sequence needs {seq_len + 1} (--seq-len and one more); "
                f"pass more text with --data{', a larger --valid-fraction' if name == 'validation' else ''} or a "
                "shorter --seq-len"
            )
    return tokens


class _Windows:
    """Sequences of seq_len + 1 tokens. The last target of a sequence is the first input of the next."""

    def __init__(self, tokens: np.ndarray, seq_len: int) -> None:
        self._tokens, self._seq_len = tokens, seq_len

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_len

    def __getitem__(self, index: int) -> np.ndarray:
        start = int(index) * self._seq_len
        return self._tokens[start : start + self._seq_len + 1].astype(np.int32)


def _rows(tokens: np.ndarray, seq_len: int) -> Any:
    """Returns the consecutive sequences of tokens; packed rows unchanged."""
    return tokens if tokens.ndim == 3 else _Windows(tokens, seq_len)


def train_batches(tokens: np.ndarray, seq_len: int, batch: int, seed: int) -> grain.DatasetIterator:
    """Returns an endless iterator of int32 batches (batch, seq_len + 1), or of packed rows (batch, 3, seq_len + 1).

    Sequences are reshuffled every epoch. `get_state()` is a small dict for the checkpoint; `set_state` restores it
    exactly. The order depends on the number of tokens, seq_len, batch and seed.
    """
    dataset = grain.MapDataset.source(_rows(tokens, seq_len)).seed(seed).shuffle().repeat()
    return iter(dataset.batch(batch).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def valid_batches(tokens: np.ndarray, seq_len: int, batch: int, max_batches: int) -> np.ndarray:
    """Returns fixed validation batches, int32 (count, rows, seq_len + 1), or packed, spread evenly over the split.

    At most `max_batches` batches of `batch` rows; a split with fewer sequences is a single batch.
    """
    windows = _rows(tokens, seq_len)
    rows = min(batch, len(windows))
    count = min(max_batches, len(windows) // rows)
    picks = np.linspace(0, len(windows) - 1, count * rows).astype(int)
    return np.stack([windows[i] for i in picks]).reshape(count, rows, *windows[0].shape)
