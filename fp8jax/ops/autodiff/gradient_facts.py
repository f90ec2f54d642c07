"""What operations say of the gradients that they make, for the operation before, whose backward pass comes next.

A gradient is known as long as it is the very array that was made, in the trace that made it: whatever adds to it or
changes it makes another one. Of that nothing is known, and the operation finds out by itself what it would have been
told: a pass more over the array, and never another one's facts.
"""

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from jax import Array
from jax.extend.core import get_opaque_trace_state


class GradientFacts:
    """Of one run of a program: `fp8jax.ops.autodiff.residuals.ArrayFacts` of each gradient, which is asked for once.

    `is_unrolled` says that the program is a turn of a loop whose turns one GPU runs one after the other, without a
    loop. There XLA copies each turn's row of a stacked weight, and a product makes both copies of codes in one pass: it
    would hold the row, with four bytes an element, for the backward pass.

    `outside_loops` says that it is a program that a transformed function runs, and no loop's body in it: what a product
    keeps of a weight is kept as it is, where a loop would copy it into an array for all of its turns.
    """

    def __init__(self, is_unrolled: bool = False, outside_loops: bool = False) -> None:
        self.is_unrolled, self.outside_loops = is_unrolled, outside_loops
        self._facts: dict[int, tuple[Any, Any, Any]] = {}

    def attach(self, x: Array | None, facts: Any) -> None:
        """Says what is known of a gradient."""
        if isinstance(x, Array):
            key = id(x)
            remove = lambda _: self._facts.pop(key, None)  # noqa: E731
            self._facts[key] = weakref.ref(x, remove), get_opaque_trace_state(), facts

    def pop(self, x: Array) -> Any:
        """What is known of a gradient; None if nothing is."""
        reference, trace, facts = self._facts.pop(id(x), (lambda: None, None, None))
        return facts if reference() is x and trace == get_opaque_trace_state() else None


class _ThreadGradientFacts(GradientFacts, threading.local):
    """Of the functions that a thread calls outside of any run. What was said in another program is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self._program: Any = None

    def attach(self, x: Array | None, facts: Any) -> None:
        program = _outermost_trace()
        if program != self._program:
            self._facts.clear()
            self._program = program
        super().attach(x, facts)


def _outermost_trace() -> Any:
    """A weak reference to the outermost trace; None outside of any, or where JAX's record of it has other names."""
    trace: Any = getattr(get_opaque_trace_state(), "_trace_ref", lambda: None)()
    outermost = None
    while hasattr(trace, "parent_trace"):
        outermost = weakref.ref(trace) if hasattr(trace, "frame") else outermost
        trace = trace.parent_trace
    return outermost


def is_in_loop() -> bool:
    """Whether what is traced now is a loop's body, as far as JAX tells; where it does not tell, it may be one."""
    trace: Any = getattr(get_opaque_trace_state(), "_trace_ref", lambda: None)()
    traces: list[Any] = []
    while hasattr(trace, "parent_trace") and all(trace is not other for other in traces):
        traces.append(trace)
        trace = trace.parent_trace
    frames = [trace.frame for trace in traces if hasattr(trace, "frame")]
    kinds = [getattr(getattr(frame, "debug_info", None), "traced_for", "") for frame in frames]
    return any(not kind.startswith(_NON_LOOP_TRACES) for kind in kinds)


_NON_LOOP_TRACES = ("jit", "pjit", "checkpoint", "shard_map", "custom_vjp", "custom_jvp", "linearize", "vjp", "grad")
_thread_facts = _ThreadGradientFacts()
_run_facts: contextvars.ContextVar[GradientFacts | None] = contextvars.ContextVar("gradients", default=None)


def current() -> GradientFacts:
    """Of the run that an operation is part of; of the thread, for a function that is called by itself."""
    return _run_facts.get() or _thread_facts


@contextlib.contextmanager
def scope(is_unrolled: bool = False, outside_loops: bool = False) -> Iterator[None]:
    """Within it operations are those of one run, with which what is known of their gradients goes."""
    token = _run_facts.set(GradientFacts(is_unrolled, outside_loops))
    try:
        yield
    finally:
        _run_facts.reset(token)
