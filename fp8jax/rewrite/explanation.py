"""What `Transformed.explain` returns: the plan of a function, as a table."""

import dataclasses
from collections.abc import Sequence

from fp8jax.core.tables import sentence, table
from fp8jax.rewrite.entries import Entry

_NAMED = 6  # layers that a sentence lists


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What the rules make of a function; `str(explanation)` is a table. It is the plan itself: nothing is computed.

    Attributes:
        entries: what the rules speak of, in the order of the program: products with parameters, and norms and
            activations before these.
        listing: all products, norms and activations in it, also those that run as written whatever the rules say.
        share: a sentence on the multiplications that the rules cover and that stay in 16 bits; "" where none do.
        advice: on a GPU without kernels, why there are none, and what to type; else None.
    """

    entries: tuple[Entry, ...]
    listing: tuple[Entry, ...] = ()
    share: str = ""
    advice: str | None = None

    @property
    def quantized(self) -> tuple[Entry, ...]:
        """What a recipe takes."""
        return tuple(entry for entry in self.entries if entry.taken)

    @property
    def left(self) -> tuple[Entry, ...]:
        """What is left as written."""
        return tuple(entry for entry in self.entries if not entry.taken)

    def __str__(self) -> str:
        head = ("parameter", "operation", "shape", "where", "forward", "dgrad", "wgrad", "kept", "reads", "chosen by")
        parts = [table([head, *map(_row, self.listing or self.entries)], names=4)]
        told = self.share, self._told_again(), kept_bytes(self.entries), gained(self.entries), self.advice
        parts += [sentence(each) for each in told if each]
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


def kept_bytes(entries: Sequence[Entry]) -> str:
    """What the operations of a plan keep of their inputs for the backward pass; "" where nothing is known."""
    each = sorted(((entry.bytes, entry.path or entry.kind) for entry in entries if entry.bytes), reverse=True)
    if not each:
        return ""
    most = ", ".join(f"{path} {_size(size)}" for size, path in each[:3])
    whole = _size(sum(size for size, _ in each))
    return f"kept of inputs for the backward pass: {whole}, most of it by {most}; what is not listed keeps its own"


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.4g} GiB"


def gained(entries: Sequence[Entry]) -> str:
    """What the products of a plan gain in a step, and which would be better left; "" where nothing is known."""
    known = [entry for entry in entries if entry.rates]
    if not known:
        return ""
    total = 1e3 * sum((entry.gain or 0.0) * entry.times for entry in known)
    count = sum(entry.gain is not None for entry in known)
    does = "lose" if total < 0 else "gain"
    told = f"8 bits {does} about {abs(total):.2g} ms a step in {count} products, by rates of {known[0].rates}"
    losing = [entry for entry in known if entry.loses]
    if not losing:
        return told
    paths = list(dict.fromkeys(entry.path for entry in losing))
    named = ", ".join(paths[:_NAMED]) + (f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else "")
    tokens = " or ".join(f"{n:,}" for n in sorted({entry.tokens for entry in losing}))
    does = "gains" if len(paths) == 1 else "gain"
    rule = f"give Rule({paths[0]!r}, None), or take fp8jax.recipes.for_shapes(recipe)"
    return f"{told}; {named} {does} nothing at {tokens} tokens: {rule}"


def _row(entry: Entry) -> tuple[str, ...]:
    if not entry.taken:
        name = entry.path or "-", entry.kind, _shape(entry), entry.line
        return (*name, *(["as written"] * 3 if entry.product else ["-"] * 3), "as written", "-", entry.reason)
    assert entry.choice is not None
    linear, context = entry.choice.linear, entry.choice.context
    assert linear is not None
    if entry.product:
        pairs = [f"{x or 'as written'} x {w or 'as written'}" for x, w in linear.products().values()]
        lean = bool(entry.reads) and context.lean
        kept = "nothing of it" if lean or entry.kept else str(linear.spec("saved") or "as written")
        if entry.held is not None:
            held = entry.held.spec or "as written"
            pairs = [f"{linear.spec(operand) or 'as written'} x {held}" for operand in ("x", "dy")] + ["-"]
            kept = "as written" if entry.held.rank else "nothing of it"
    else:
        pairs, kept = ["-"] * 3, str(context.spec or "as written")
    return (
        *(entry.path or "-", entry.kind, _shape(entry), entry.line),
        *(*pairs, kept, entry.reads or "-", entry.reason),
    )


def _shape(entry: Entry) -> str:
    return str(entry.shape).replace(" ", "")
