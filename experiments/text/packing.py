"""Documents packed into rows of one length. Tokens attend only to their own document.

A batch of rows is int32 (B, 3, T + 1): tokens; 1 for tokens of answers, over which the loss is the mean; and the number
of the document in its row, from 1 on, with 0 for padding. A plain batch has only tokens, (B, T + 1).
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.errors import UserError

# Number of open rows for further documents. More open rows have less padding.
OPEN_ROWS = 64


class Document(NamedTuple):
    """Token ids, and a mask of answers, both (length,)."""

    ids: np.ndarray
    answers: np.ndarray


def parts(batch: Any) -> tuple[Any, Any, Any]:
    """Returns tokens (B, T + 1), answers and segments of a batch; the latter are None if it is not packed."""
    if batch.ndim == 2:
        return batch, None, None
    return batch[:, 0], batch[:, 1], batch[:, 2]


def fingerprint_of(*splits: np.ndarray) -> str:
    """Returns sixteen hexadecimal digits of all tokens of splits."""
    digest = hashlib.sha256()
    for split in splits:
        digest.update(f"{split.dtype}{split.shape}".encode())
        digest.update(np.ascontiguousarray(split).data)
    return digest.hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Packed:
    """Both splits as rows, int32 (rows, 3, T + 1).

    Attributes:
        train, valid: the splits.
        documents: number of packed documents.
        cut: number of documents longer than a row.
        left_out: number of documents without an answer within a row.
    """

    train: np.ndarray
    valid: np.ndarray
    documents: int
    cut: int
    left_out: int

    @property
    def fingerprint(self) -> str:
        """See `fingerprint_of`."""
        return fingerprint_of(self.train, self.valid)

    @property
    def filled(self) -> float:
        """Share of the positions in rows that are not padding."""
        return float(np.mean(self.train[:, 2] > 0))

    @property
    def answers(self) -> int:
        """Number of training tokens in the loss."""
        return int(self.train[:, 1].sum())


def split(documents: Sequence[Document], valid_fraction: float) -> tuple[list[Document], list[Document]]:
    """Splits documents for training and validation, in the order of hashes of their tokens. Drops copies.

    Raises:
        UserError: there are fewer than two documents.
    """
    unique: dict[str, Document] = {}
    for document in documents:
        unique.setdefault(hashlib.sha256(document.ids.tobytes() + document.answers.tobytes()).hexdigest(), document)
    if len(unique) < 2:
        raise UserError(
            f"--data: {len(unique)} different documents; pass at least one for training and one for validation"
        )
    target, count, valid = valid_fraction * sum(len(d.ids) for d in unique.values()), 0, set[str]()
    for key in sorted(unique):
        if count < target and len(valid) < len(unique) - 1:
            valid.add(key)
            count += len(unique[key].ids)
    return [d for key, d in sorted(unique.items()) if key not in valid], [unique[key] for key in sorted(valid)]


def pack(documents: Sequence[Document], valid_fraction: float, seq_len: int, *, keep_whole: bool) -> Packed:
    """Packs both splits of documents into rows of seq_len + 1 tokens.

    Args:
        documents: documents in any order; a single one is divided.
        valid_fraction: share of the tokens for validation, in whole documents.
        seq_len: targets per row.
        keep_whole: whether to truncate documents longer than a row (conversations), or to continue them in other rows.

    Raises:
        UserError: in a split, no document has an answer within a row.
    """
    if len(documents) == 1:
        documents = list(_pieces(documents[0], seq_len + 1, keep_whole))
    rows, cut, left_out = [], 0, 0
    for each in split(documents, valid_fraction):
        pieces = []
        for document in each:
            cut += len(document.ids) > seq_len + 1
            for piece in _pieces(document, seq_len + 1, keep_whole):
                if piece.answers[1:].any():
                    pieces.append(piece)
                else:
                    left_out += 1
        if not pieces:
            raise UserError(
                f"--seq-len {seq_len}: no document of a split has an answer within this length; use a larger "
                "--seq-len, or more documents"
            )
        rows.append(_packed(pieces, seq_len + 1))
    return Packed(rows[0], rows[1], len(documents), cut, left_out)


def _pieces(document: Document, length: int, keep_whole: bool) -> Iterable[Document]:
    for start in range(0, 1 if keep_whole else max(len(document.ids) - 1, 1), length):
        yield Document(document.ids[start : start + length], document.answers[start : start + length])


def _packed(pieces: Iterable[Document], length: int) -> np.ndarray:
    """Packs each piece into the first open row with space. If there is none, closes the oldest row."""
    rows: list[list[Document]] = []
    open_rows: list[tuple[int, int]] = []  # (number of the row, free tokens)
    for piece in pieces:
        size = len(piece.ids)
        row_index = next((i for i, (_, room) in enumerate(open_rows) if room >= size), None)
        if row_index is None:
            rows.append([])
            open_rows.append((len(rows) - 1, length))
            row_index = len(open_rows) - 1
        number, room = open_rows[row_index]
        rows[number].append(piece)
        open_rows[row_index] = number, room - size
        if room == size:
            open_rows.pop(row_index)
        elif len(open_rows) > OPEN_ROWS:
            open_rows.pop(0)
    packed = np.zeros((len(rows), 3, length), np.int32)
    for row, documents in zip(packed, rows, strict=True):
        start = 0
        for number, piece in enumerate(documents, 1):
            positions = slice(start, start + len(piece.ids))
            row[0, positions], row[1, positions], row[2, positions] = piece.ids, piece.answers, number
            # The first token of a document has no context, so it is not a target.
            row[1, start] = 0
            start = positions.stop
    return packed
