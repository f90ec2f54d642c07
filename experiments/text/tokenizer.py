"""Text to token ids and back: bytes, or byte-pair encoding trained with the `tokenizers` library.

Id 0 separates documents in both. For bytes that costs no extra id, since a text never contains the byte 0 (the loader
refuses files that do).
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from experiments.errors import UserError
from experiments.files import read_text, write_text

SEPARATOR = 0
_SEPARATOR_TEXT = "<|document|>"


class Tokenizer(Protocol):
    """The interface of a tokenizer for the loader and the sampler."""

    @property
    def vocab(self) -> int:
        """Number of ids."""

    def encode(self, documents: Sequence[str]) -> np.ndarray:
        """All documents in one array of ids (uint16, or uint32 above 65,536 ids), a separator before each."""

    def decode(self, ids: Iterable[int]) -> str:
        """Ids to text; separators become line breaks, broken UTF-8 the replacement character."""


class Bytes:
    """A token is a byte."""

    vocab = 256

    def encode(self, documents: Sequence[str]) -> np.ndarray:
        if any("\0" in document for document in documents):
            raise UserError("a text contains the character U+0000, which separates documents; remove it")
        joined = b"".join(b"\0" + document.encode() for document in documents)
        return np.frombuffer(joined, np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(map(int, ids)).replace(b"\0", b"\n").decode(errors="replace")


class BytePair:
    """Byte-level byte-pair encoding: every text can be encoded, nothing is unknown.

    What it saves is a whole tokenizer: `tokenizers` alone makes the same ids of a document, separator included. A
    separator's spelling inside a document is ordinary text, so that the file has no added token: one would match it.
    """

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        content = json.loads(model.to_str()) | {"added_tokens": []}
        self._model = tokenizers.Tokenizer.from_str(json.dumps(content))
        self._model.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{_SEPARATOR_TEXT} $A", special_tokens=[(_SEPARATOR_TEXT, SEPARATOR)]
        )

    @classmethod
    def train(cls, documents: Sequence[str], vocab: int) -> "BytePair":
        """Learns at most `vocab` ids (fewer from a short text) from the documents."""
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=[_SEPARATOR_TEXT],
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        model.train_from_iterator(documents, trainer)
        return cls(model)

    @classmethod
    def load(cls, path: Path) -> "BytePair":
        """Reads what `save` wrote.

        Raises:
            UserError: the file is damaged.
        """
        try:
            return cls(tokenizers.Tokenizer.from_str(read_text(path)))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"tokenizer {path} cannot be read ({error}); train a new one with --resume never") from None

    def save(self, path: Path) -> None:
        """As `files.write_text`."""
        write_text(path, self.to_str())

    def to_str(self) -> str:
        """What `save` writes."""
        return self._model.to_str()

    @property
    def vocab(self) -> int:
        return self._model.get_vocab_size()

    def encode(self, documents: Sequence[str]) -> np.ndarray:
        dtype = np.uint16 if self.vocab <= 2**16 else np.uint32
        return np.concatenate([np.array(encoded.ids, dtype) for encoded in self._model.encode_batch(list(documents))])

    def decode(self, ids: Iterable[int]) -> str:
        groups: list[list[int]] = [[]]
        for i in ids:
            if i == SEPARATOR:
                groups.append([])
            else:
                groups[-1].append(i)
        return "\n".join(self._model.decode(group) for group in groups)
