"""Text to token ids and back: bytes, or byte-pair encoding trained with the `tokenizers` library.

Id 0 separates documents in both. For bytes, no extra id is needed, because the loader rejects files with the byte 0.
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
        """Returns the ids of all documents (uint16, or uint32 above 65,536 ids), with a separator before each."""

    def decode(self, ids: Iterable[int]) -> str:
        """Converts ids to text. Separators become line breaks, invalid UTF-8 becomes the replacement character."""


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
    """Byte-level byte-pair encoding. It can encode every text.

    The saved file is a complete tokenizer: the library `tokenizers` encodes a document to the same ids, with the
    separator. The file has no added token, so the spelling of the separator inside a document is ordinary text.
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
        """Reads a file of `save`.

        Raises:
            UserError: the file is damaged.
        """
        try:
            return cls(tokenizers.Tokenizer.from_str(read_text(path)))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"tokenizer {path} cannot be read ({error}); train a new one with --resume never") from None

    def save(self, path: Path) -> None:
        """Writes the file. See `files.write_text`."""
        write_text(path, self.to_str())

    def to_str(self) -> str:
        """Returns the content of the file of `save`."""
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
