"""What `Transformed.explain` returns: the plan of a function, as a table."""

import dataclasses
from collections.abc import Sequence

from fp8jax.core.tables import sentence, table
from fp8jax.rewrite.entries import PlanEntry

_MAX_LISTED = 6  # layers that a sentence lists


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What the rules make of a function; `str(explanation)` is a table. It is the plan itself: nothing is computed.

    Attributes:
        entries: what the rules speak of, in the order of the program: products with parameters, and norms and
            activations before these.
        all_entries: all products, norms and activations in it, also those that run as written whatever the rules say.
        unquantized_note: a sentence on the multiplications that the rules cover and that stay in 16 bits; "" where
            none do.
        advice: on a GPU without kernels, why there are none, and what to type; else None.
    """

    entries: tuple[PlanEntry, ...]
    all_entries: tuple[PlanEntry, ...] = ()
    unquantized_note: str = ""
    advice: str | None = None

    @property
    def quantized(self) -> tuple[PlanEntry, ...]:
        """What a recipe takes."""
        return tuple(entry for entry in self.entries if entry.is_quantized)

    @property
    def skipped(self) -> tuple[PlanEntry, ...]:
        """What is left as written."""
        return tuple(entry for entry in self.entries if not entry.is_quantized)

    def __str__(self) -> str:
        head = ("parameter", "operation", "shape", "where", "forward", "dgrad", "wgrad", "kept", "reads", "chosen by")
        sections = [table([head, *map(_row, self.all_entries or self.entries)], names=4)]
        notes = (
            self.unquantized_note,
            self._rematerialization_note(),
            residual_bytes_note(self.entries),
            gains_note(self.entries),
            self.advice,
        )
        sections += [sentence(each) for each in notes if each]
        return "\n\n".join(sections)

    def _rematerialization_note(self) -> str:
        """How many products are computed again in the backward pass, and what keeps them."""
        products = [entry for entry in self.entries if entry.is_product and entry.is_quantized]
        num_rematerialized = sum(entry.is_rematerialized for entry in products)
        if not num_rematerialized:
            return ""
        advice = "give it policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable, or leave it out: norms and"
        return (
            f"{num_rematerialized} of {len(products)} products are computed again in the backward pass under your "
            f"jax.checkpoint; {advice} activations of a recipe with a context keep codes alone"
        )


def residual_bytes_note(entries: Sequence[PlanEntry]) -> str:
    """What the operations of a plan keep of their inputs for the backward pass; "" where nothing is known."""
    sizes = sorted(
        ((entry.residual_bytes, entry.path or entry.kind) for entry in entries if entry.residual_bytes), reverse=True
    )
    if not sizes:
        return ""
    largest = ", ".join(f"{path} {_size(size)}" for size, path in sizes[:3])
    total = _size(sum(size for size, _ in sizes))
    return f"kept of inputs for the backward pass: {total}, most of it by {largest}; what is not listed keeps its own"


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.4g} GiB"


def gains_note(entries: Sequence[PlanEntry]) -> str:
    """What the products of a plan gain in a step, and which would be better left; "" where nothing is known."""
    rated = [entry for entry in entries if entry.rates_device]
    if not rated:
        return ""
    total = 1e3 * sum((entry.gain or 0.0) * entry.runs_per_step for entry in rated)
    count = sum(entry.gain is not None for entry in rated)
    verb = "lose" if total < 0 else "gain"
    note = f"8 bits {verb} about {abs(total):.2g} ms a step in {count} products, by rates of {rated[0].rates_device}"
    losing = [entry for entry in rated if entry.is_slower]
    if not losing:
        return note
    paths = list(dict.fromkeys(entry.path for entry in losing))
    listed = ", ".join(paths[:_MAX_LISTED]) + (
        f" and {len(paths) - _MAX_LISTED} more" if len(paths) > _MAX_LISTED else ""
    )
    tokens = " or ".join(f"{n:,}" for n in sorted({entry.tokens for entry in losing}))
    verb = "gains" if len(paths) == 1 else "gain"
    rule = f"give Rule({paths[0]!r}, None), or take fp8jax.recipes.for_shapes(recipe)"
    return f"{note}; {listed} {verb} nothing at {tokens} tokens: {rule}"


def _row(entry: PlanEntry) -> tuple[str, ...]:
    if not entry.is_quantized:
        name = entry.path or "-", entry.kind, _shape(entry), entry.line
        return (*name, *(["as written"] * 3 if entry.is_product else ["-"] * 3), "as written", "-", entry.reason)
    assert entry.choice is not None
    linear, context = entry.choice.linear, entry.choice.context
    assert linear is not None
    if entry.is_product:
        pairs = [f"{x or 'as written'} x {w or 'as written'}" for x, w in linear.products().values()]
        recomputes_input = bool(entry.input_producer) and context.lean
        saved = (
            "nothing of it"
            if recomputes_input or entry.has_saved_input
            else str(linear.spec("x_residual") or "as written")
        )
        if entry.frozen is not None:
            frozen_spec = entry.frozen.spec or "as written"
            pairs = [f"{linear.spec(operand) or 'as written'} x {frozen_spec}" for operand in ("x", "dy")] + ["-"]
            saved = "as written" if entry.frozen.rank else "nothing of it"
    else:
        pairs, saved = ["-"] * 3, str(context.spec or "as written")
    return (
        *(entry.path or "-", entry.kind, _shape(entry), entry.line),
        *(*pairs, saved, entry.input_producer or "-", entry.reason),
    )


def _shape(entry: PlanEntry) -> str:
    return str(entry.shape).replace(" ", "")
