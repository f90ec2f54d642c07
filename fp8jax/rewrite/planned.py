"""Calls of a transformed function with their plans."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fp8jax.core.recipe import Linear
from fp8jax.ops.dispatch import missing_kernels
from fp8jax.rewrite.call_info import user_stacklevel
from fp8jax.rewrite.entries import PlanEntry
from fp8jax.rewrite.explanation import Explanation
from fp8jax.rewrite.shares import UnquantizedShare, UnquantizedWarning
from fp8jax.rewrite.states import (
    ParameterState,
    States,
    Stats,
    UseInputs,
    WeightUse,
    init,
    merge_use_stats,
    use_inputs_from_parameter_states,
)


class CallPlan(NamedTuple):
    """The plan of all calls that are alike.

    Attributes:
        entries: what becomes of each part that the rules speak of.
        uses: the products with one parameter, and their recipes.
        paths: of the arrays in the parameters; None for data.
        result_structure: of the results.
        run, compiled: the program, of arrays and of what uses are given.
        list_rows: returns the rows of `explain`, in the program's order.
        error: of a run; see `fp8jax.rewrite.plan.ProgramPlan`. share: likewise.
    """

    entries: tuple[PlanEntry, ...]
    uses: dict[WeightUse, Linear]
    paths: tuple[str | None, ...]
    result_structure: Any
    run: Callable
    compiled: Callable
    list_rows: Callable[[], tuple[PlanEntry, ...]]
    error: str = ""
    share: UnquantizedShare = UnquantizedShare()

    def explain(self, rows: Sequence[PlanEntry] | None = None, program: Any = None) -> Explanation:
        """The plan as a table.

        Args:
            rows: in place of those of `list_rows`.
            program: the compiled program, `fp8jax.modules.compiled.Program`.
        """
        notes = (f"a call raises ValueError: {self.error}" if self.error else None, missing_kernels.advice())
        rows = self.list_rows() if rows is None else rows
        return Explanation(tuple(rows), self.share.text, tuple(filter(None, notes)), program)


class Notices:
    """The texts that one transformed function, or one model, has warned with.

    Attributes:
        texts: these.
        is_silent: whether nothing is to be said now.
    """

    def __init__(self) -> None:
        self.texts = set[str]()
        self.is_silent = False

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Says nothing, and notes nothing as said."""
        previous, self.is_silent = self.is_silent, True
        try:
            yield
        finally:
            self.is_silent = previous


class PlannedCall(NamedTuple):
    """A call with its plan: what `Transformed.plan_call` returns."""

    plan: CallPlan
    arrays: list[Any]

    @property
    def entries(self) -> tuple[PlanEntry, ...]:
        """What becomes of each product with a parameter, and of what stands before it."""
        return self.plan.entries

    @property
    def uses(self) -> dict[WeightUse, Linear]:
        """The products with one parameter, and their recipes."""
        return self.plan.uses

    def warn(self, notices: Notices) -> None:
        """Warn, once for each text, if more than a tenth of the FLOPs stay in 16 bits although the rules ask for 8."""
        share = self.plan.share
        is_known = notices.is_silent or share.text in notices.texts
        if share.is_notable and not self.plan.error and not is_known:
            notices.texts.add(share.text)
            text = f"{share.text}. explain lists each product. fp8jax.Rule(path, None) for a parameter silences this"
            warnings.warn(text, UnquantizedWarning, stacklevel=user_stacklevel(1))

    def _raise_error(self) -> None:
        if self.plan.error:
            raise ValueError(self.plan.error)

    @property
    def weights(self) -> dict[str, Any]:
        """The parameters, by their paths."""
        return {path: x for path, x in zip(self.plan.paths, self.arrays, strict=True) if path is not None}

    def init(self) -> States:
        """The states of scalings before the first step; see `Transformed.init`."""
        self._raise_error()
        return init(self.uses, self.weights)

    def run(self, use_inputs: Mapping[Any, UseInputs], *, collect_stats: bool) -> tuple[Any, Any]:
        """The function's results, and what uses observed: without `collect_stats` that is the gradient of slots.

        Args:
            use_inputs: what each use is given, by its key.

        Raises:
            ValueError: products ask for a precision that a quantized product cannot give.
        """
        self._raise_error()
        is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((self.arrays, use_inputs)))
        outputs, stats = (self.plan.run if is_traced else self.plan.compiled)(
            self.arrays, use_inputs, collect_stats=collect_stats
        )
        return jax.tree.unflatten(self.plan.result_structure, outputs), stats

    def run_with_states(self, parameter_states: Mapping[str, ParameterState]) -> tuple[Any, dict[str, Stats]]:
        """The function's results, and what was observed of inputs and weights, by the paths of parameters.

        Where nothing is held automatic scaling measures the weights; others that keep a state raise.

        Args:
            parameter_states: what the caller holds of states and weights in codes, by the paths of parameters; what is
                observed of gradients is the cotangent of their slots.

        Raises:
            ValueError: the recipe of a product keeps a state that is not held, or one of another shape.
        """
        results, stats = self.run(use_inputs_from_parameter_states(parameter_states, self.uses), collect_stats=True)
        return results, merge_use_stats(stats, self.uses)
