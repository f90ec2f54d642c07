"""Facts about gradients: an operation attaches them to a gradient that it returns, for the operation before.

A fact belongs to one array in one trace. An array that is computed from it, such as a sum, has no facts, and the
operation that reads such an array measures it: one more pass over the array, and the same result.
"""

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from jax import Array
from jax.extend.core import get_opaque_trace_state

# How many traces a thread remembers: those of nested programs that it traces in turn.
_MAX_TRACES = 4


class GradientFacts:
    """`fp8jax.ops.autodiff.residuals.ArrayFacts` of the gradients of one program, each of which is read once."""

    def __init__(self) -> None:
        self._facts: dict[int, tuple[Any, Any, Any]] = {}

    def attach(self, x: Array | None, facts: Any) -> None:
        """Attaches facts to a gradient; does nothing if `x` is no array."""
        if isinstance(x, Array):
            key = id(x)
            remove = lambda _: self._facts.pop(key, None)  # noqa: E731
            self._facts[key] = weakref.ref(x, remove), get_opaque_trace_state(), facts

    def pop(self, x: Any) -> Any:
        """Removes and returns the facts of a gradient; None if it has none in this trace, or is several arrays."""
        reference, trace, facts = self._facts.pop(id(x), (lambda: None, None, None))
        return facts if reference() is x and trace == get_opaque_trace_state() else None


class _Thread(threading.local):
    """The facts of operations that a thread calls outside of a run, by trace, the latest one last."""

    def __init__(self) -> None:
        self.by_trace: list[tuple[Any, GradientFacts]] = []


_thread = _Thread()
_run_facts: contextvars.ContextVar[GradientFacts | None] = contextvars.ContextVar("gradients", default=None)


def current_gradient_facts() -> GradientFacts:
    """The facts of the run that an operation is part of. Outside of a run, those of the trace that it is called in."""
    if (run_facts := _run_facts.get()) is not None:
        return run_facts
    trace = get_opaque_trace_state()
    facts = next((facts for each, facts in _thread.by_trace if each == trace), None) or GradientFacts()
    others = [pair for pair in _thread.by_trace if pair[0] != trace]
    _thread.by_trace = [*others[1 - _MAX_TRACES :], (trace, facts)]
    return facts


@contextlib.contextmanager
def gradient_facts_scope() -> Iterator[None]:
    """A context in which operations are those of one run."""
    token = _run_facts.set(GradientFacts())
    try:
        yield
    finally:
        _run_facts.reset(token)
