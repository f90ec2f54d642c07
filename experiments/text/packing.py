"""Documents packed into rows of one length. Tokens attend only to their own document.

A batch of rows is int32 (B, 3, T + 1): tokens; 1 where a token is an answer, which the loss is the mean over; and the
number of the document in its row, from 1 on, 0 where the row is filled up. A plain batch is tokens alone, (B, T + 1).
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.errors import UserError

# Rows that wait for documents that still fit; more of them fill rows better.
OPEN_ROWS = 64


class Document(NamedTuple):
    """Token ids, and which of them are answers, both (length,)."""

    ids: np.ndarray
    answers: np.ndarray


def parts(batch: Any) -> tuple[Any, Any, Any]:
    """Tokens (B, T + 1) of a batch, and of a packed one its answers and segments, else None."""
    if batch.ndim == 2:
        return batch, None, None
    return batch[:, 0], batch[:, 1], batch[:, 2]


def fingerprint_of(*splits: np.ndarray) -> str:
    """Sixteen hexadecimal digits that change with any token of some splits."""
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
        documents: how many were packed.
        cut: how many were longer than a row.
        left_out: how many had no answer within a row.
    """

    train: np.ndarray
    valid: np.ndarray
    documents: int
    cut: int
    left_out: int

    @property
    def fingerprint(self) -> str:
        """As of `fingerprint_of`."""
        return fingerprint_of(self.train, self.valid)

    @property
    def filled(self) -> float:
        """Share of the places of rows that hold tokens."""
        return float(np.mean(self.train[:, 2] > 0))

    @property
    def answers(self) -> int:
        """Tokens of training that the loss is of."""
        return int(self.train[:, 1].sum())


def split(documents: Sequence[Document], valid_fraction: float) -> tuple[list[Document], list[Document]]:
    """Documents for training and for validation, in the order of hashes of their tokens; copies are dropped.

    Raises:
        UserError: there are fewer than two.
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
    """Both splits of documents as rows of seq_len + 1 tokens.

    Args:
        documents: in any order; a single one is taken apart.
        valid_fraction: share of the tokens for validation, whole documents.
        seq_len: targets of a row.
        keep_whole: truncate a document that is longer than a row, as for conversations; else it continues in the next.

    Raises:
        UserError: no document has an answer within a row, of either split.
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
    """Each piece goes into the first open row that it fits; the oldest one is closed where all are too full."""
    rows: list[list[Document]] = []
    open_rows: list[tuple[int, int]] = []  # of each its number and its room
    for piece in pieces:
        size = len(piece.ids)
        place = next((i for i, (_, room) in enumerate(open_rows) if room >= size), None)
        if place is None:
            rows.append([])
            open_rows.append((len(rows) - 1, length))
            place = len(open_rows) - 1
        number, room = open_rows[place]
        rows[number].append(piece)
        open_rows[place] = number, room - size
        if room == size:
            open_rows.pop(place)
        elif len(open_rows) > OPEN_ROWS:
            open_rows.pop(0)
    packed = np.zeros((len(rows), 3, length), np.int32)
    for row, documents in zip(packed, rows, strict=True):
        start = 0
        for number, piece in enumerate(documents, 1):
            here = slice(start, start + len(piece.ids))
            row[0, here], row[1, here], row[2, here] = piece.ids, piece.answers, number
            # Nothing of its own document comes before the first token.
            row[1, start] = 0
            start = here.stop
    return packed
