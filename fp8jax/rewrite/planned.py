"""Calls of a transformed function with their plans."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fp8jax.core import frames
from fp8jax.core.recipe import Linear
from fp8jax.ops.dispatch import choice
from fp8jax.rewrite.entries import PlanEntry
from fp8jax.rewrite.explanation import Explanation
from fp8jax.rewrite.plan import ProgramPlan
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
from fp8jax.rewrite.unplanned import UnquantizedWarning


class CallPlan(NamedTuple):
    """The plan of all calls with the same program.

    Attributes:
        paths: for each array its parameter path; None for data.
        run, compiled: run the planned program on arrays and use inputs; `compiled` is jitted.
        list_rows: returns the rows of `explain`, in program order.
        note_exchange: returns `fp8jax.rewrite.explanation.exchange_note` of the program.
    """

    program: ProgramPlan
    paths: tuple[str | None, ...]
    result_structure: Any
    run: Callable
    compiled: Callable
    list_rows: Callable[[], tuple[PlanEntry, ...]]
    note_exchange: Callable[[], str]

    def explain(self, rows: Sequence[PlanEntry] | None = None, inspect: Callable[[], Any] | None = None) -> Explanation:
        """The plan for a reader.

        Args:
            rows: the rows to show in place of those of `list_rows`.
            inspect: compiles the program, as in `Explanation`.
        """
        program = self.program
        error = f"a call raises ValueError: {program.error}" if program.error else None
        notes = error, program.unsplit_note, choice.missing_kernels_advice()
        rows = self.list_rows() if rows is None else rows
        return Explanation(tuple(rows), program.share.text, tuple(filter(None, notes)), self.note_exchange(), inspect)


class Notices:
    """The warnings that one transformed function or model has issued."""

    def __init__(self) -> None:
        self.texts = set[str]()
        self.is_silent = False

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """A context in which warnings are neither issued nor recorded."""
        previous, self.is_silent = self.is_silent, True
        try:
            yield
        finally:
            self.is_silent = previous


class PlannedCall(NamedTuple):
    """A call with its plan, as `Transformed.plan_call` returns it."""

    plan: CallPlan
    arrays: list[Any]

    @property
    def uses(self) -> dict[WeightUse, Linear]:
        """The matmuls of each parameter, with their recipes."""
        return self.plan.program.uses

    def warn(self, notices: Notices) -> None:
        """Warn, once for each text, of loops over blocks that are not split, and of FLOPs that stay in 16 bits.

        It warns of these if they are over 10 % of all, and the rules select them.
        """
        _, _, error, share, note = self.plan.program
        if note and not notices.is_silent and note not in notices.texts:
            notices.texts.add(note)
            frames.warn(f"{note}. Scan over the whole stack; fp8jax.Rule(path, recipe) for a parameter silences this")
        is_known = notices.is_silent or share.text in notices.texts
        if share.is_notable and not error and not is_known:
            notices.texts.add(share.text)
            text = f"{share.text}. `explain` lists each matmul. To silence this, exclude them: fp8jax.Rule(path, None)"
            frames.warn(text, UnquantizedWarning)

    def _raise_error(self) -> None:
        if error := self.plan.program.error:
            raise ValueError(error)

    @property
    def weights(self) -> dict[str, Any]:
        """The parameters, by their paths."""
        return {path: x for path, x in zip(self.plan.paths, self.arrays, strict=True) if path is not None}

    def init(self) -> States:
        """The scaling states before the first step; see `Transformed.init`."""
        self._raise_error()
        return init(self.uses, self.weights)

    def run(self, use_inputs: Mapping[Any, UseInputs], *, collect_stats: bool) -> tuple[Any, Any]:
        """The function's results, and the statistics of its uses.

        Args:
            collect_stats: return the statistics; otherwise they are the gradients of slots.

        Raises:
            ValueError: matmuls ask for a precision that a quantized matmul cannot reach.
        """
        self._raise_error()
        is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((self.arrays, use_inputs)))
        outputs, stats = (self.plan.run if is_traced else self.plan.compiled)(
            self.arrays, use_inputs, collect_stats=collect_stats
        )
        return jax.tree.unflatten(self.plan.result_structure, outputs), stats

    def run_with_states(self, parameter_states: Mapping[str, ParameterState]) -> tuple[Any, dict[str, Stats]]:
        """The function's results, and the statistics of inputs and weights by parameter path.

        Without a state, automatic scaling measures the weights in each call; other stateful scalings raise.

        Args:
            parameter_states: states and quantized weights, by parameter path. Slots' cotangents are gradient
                statistics.

        Raises:
            ValueError: a state that a recipe needs is missing, or has another shape.
        """
        results, stats = self.run(use_inputs_from_parameter_states(parameter_states, self.uses), collect_stats=True)
        return results, merge_use_stats(stats, self.uses)
