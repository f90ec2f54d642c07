"""Calls of a transformed function with their plans."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from fp8jax.core.recipe import Linear
from fp8jax.rewrite.caller import user_level
from fp8jax.rewrite.entries import Entry
from fp8jax.rewrite.shares import UnquantizedShare, UnquantizedWarning
from fp8jax.rewrite.states import Given, Noted, ParameterState, States, Use, held_by_use, init, merged_uses


class CallPlan(NamedTuple):
    """The plan of all calls that are alike.

    Attributes:
        entries: what becomes of each part that the rules speak of.
        uses: the products with one parameter, and their recipes.
        paths: of the arrays in the parameters; None for data.
        structure: of the results.
        run, compiled: the program, of arrays and of what uses are given.
        listing: gives all that `explain` lists, in the program's order: what also runs as written is looked for then.
        refused: the error of a run; see `fp8jax.rewrite.plan.ProgramPlan`. share: likewise.
    """

    entries: tuple[Entry, ...]
    uses: dict[Use, Linear]
    paths: tuple[str | None, ...]
    structure: Any
    run: Callable
    compiled: Callable
    listing: Callable[[], tuple[Entry, ...]]
    refused: str = ""
    share: UnquantizedShare = UnquantizedShare()


class Notices:
    """The texts that one transformed function, or one model, has warned with.

    Attributes:
        texts: these.
        silent: whether nothing is to be said now.
    """

    def __init__(self) -> None:
        self.texts = set[str]()
        self.silent = False

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Says nothing, and notes nothing as said."""
        before, self.silent = self.silent, True
        try:
            yield
        finally:
            self.silent = before


class PlannedCall(NamedTuple):
    """A call with its plan: what `Transformed.planned` returns."""

    plan: CallPlan
    arrays: list[Any]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What becomes of each product with a parameter, and of what stands before it."""
        return self.plan.entries

    @property
    def uses(self) -> dict[Use, Linear]:
        """The products with one parameter, and their recipes."""
        return self.plan.uses

    def warn(self, notices: Notices) -> None:
        """Warn, once for each text, if more than a tenth of the FLOPs stay in 16 bits although the rules ask for 8."""
        share = self.plan.share
        said = notices.silent or share.text in notices.texts
        if share.notable and not self.plan.refused and not said:
            notices.texts.add(share.text)
            text = f"{share.text}. explain lists each product. fp8jax.Rule(path, None) for a parameter silences this"
            warnings.warn(text, UnquantizedWarning, stacklevel=user_level(1))

    def _check(self) -> None:
        if self.plan.refused:
            raise ValueError(self.plan.refused)

    @property
    def weights(self) -> dict[str, Any]:
        """The parameters, by their paths."""
        return {path: x for path, x in zip(self.plan.paths, self.arrays, strict=True) if path is not None}

    def init(self) -> States:
        """The states of scalings before the first step; see `Transformed.init`."""
        self._check()
        return init(self.uses, self.weights)

    def run(self, given: Mapping[Any, Given], *, noting: bool) -> tuple[Any, Any]:
        """The function's results; `noting`, also what uses observed, else that is the gradient of their slots.

        Args:
            given: what each use is given, by its key.

        Raises:
            ValueError: products ask for a precision that a quantized product cannot give.
        """
        self._check()
        inside = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((self.arrays, given)))
        outputs, seen = (self.plan.run if inside else self.plan.compiled)(self.arrays, given, noting=noting)
        return jax.tree.unflatten(self.plan.structure, outputs), seen

    def with_held(self, held: Mapping[str, ParameterState]) -> tuple[Any, dict[str, Noted]]:
        """The function's results, and what was observed of inputs and weights, by the paths of parameters.

        Where nothing is held automatic scaling measures the weights; others that keep a state raise.

        Args:
            held: what the caller holds of states and weights in codes, by the paths of parameters; what is observed of
                gradients is the cotangent of their slots.

        Raises:
            ValueError: the recipe of a product keeps a state that is not held, or one of another shape.
        """
        results, seen = self.run(held_by_use(held, self.uses), noting=True)
        return results, merged_uses(seen, self.uses)
