"""What `Transformed.explain` returns: the plan of a function, as a table."""

import dataclasses
from collections.abc import Sequence

from fp8jax.rewrite.plan import Entry


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What the rules make of a function; `str(explanation)` is a table. It is the plan itself: nothing is computed.

    Attributes:
        entries: products with parameters, norms and activations, in the order of the program.
    """

    entries: tuple[Entry, ...]

    @property
    def quantized(self) -> tuple[Entry, ...]:
        """What a recipe takes."""
        return tuple(entry for entry in self.entries if entry.taken)

    @property
    def left(self) -> tuple[Entry, ...]:
        """What is left as written."""
        return tuple(entry for entry in self.entries if not entry.taken)

    def __str__(self) -> str:
        head = ("parameter", "operation", "shape", "forward", "dgrad", "wgrad", "kept", "reads", "chosen by", "where")
        parts = [_table([head, *map(_row, self.quantized)])]
        if self.left:
            rows = [(e.path or "-", e.kind, _shape(e), e.reason, e.line) for e in self.left]
            parts.append(_table([("left as written", "operation", "shape", "why", "where"), *rows]))
        if told := self._told_again():
            parts.append(told)
        return "\n\n".join(parts)

    def _told_again(self) -> str:
        """How many products are computed again in the backward pass, and what keeps them."""
        products = [entry for entry in self.entries if entry.product and entry.taken]
        again = sum(entry.again for entry in products)
        if not again:
            return ""
        keep = "give it policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable, or leave it out: norms and"
        return (
            f"{again} of {len(products)} products are computed again in the backward pass under your jax.checkpoint; "
            f"{keep} activations of a recipe with a context keep codes alone"
        )


def _row(entry: Entry) -> tuple[str, ...]:
    assert entry.choice is not None
    linear, context = entry.choice.linear, entry.choice.context
    assert linear is not None
    if entry.product:
        pairs = [f"{x or 'as written'} x {w or 'as written'}" for x, w in linear.products().values()]
        lean = bool(entry.reads) and context.lean
        kept = "nothing of it" if lean or entry.kept else str(linear.spec("saved") or "as written")
    else:
        pairs, kept = ["-"] * 3, str(context.spec or "as written")
    return (
        *(entry.path or "-", entry.kind, _shape(entry), *pairs, kept),
        *(entry.reads or "-", entry.reason, entry.line),
    )


def _shape(entry: Entry) -> str:
    return str(entry.shape).replace(" ", "")


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)
