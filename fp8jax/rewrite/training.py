"""Errors and warnings for training that leaves the states of scalings as they are.

Python runs while a step is traced, differentiated and lowered, not while it is executed. Operations that return their
first operand stand beside the state of each product. Their derivative raises where a gradient of the weight is taken
and the statistics of the scaling are lost. Their lowering warns where the program never advances the state.
"""

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive, get_opaque_trace_state
from jax.interpreters import ad, batching, mlir

_LIBRARY_PREFIXES = ("fp8jax", "jax", "jaxlib", "flax", "functools", "contextlib")
# So many gradients outside of a program may be the microbatches of one step.
_MAX_MICROBATCHES = 16
# What advances states: by the statistics of a step, or by the bounds of an optimizer.
ADVANCE, BOUNDS = "advance_scaling", "update_weight_amax_bounds"


class TrainingRecord:
    """The training of one NNX model. No two records are equal, so that no two models share a program.

    Attributes:
        ended: the calls that the model's optimizer makes in each update.
        gradient_counts: by call, how many gradients were taken outside of programs since it was last made.
        last_traces: by call, a weak reference to the trace of the last of them.
    """

    def __init__(self, ended: frozenset[str] = frozenset()) -> None:
        self.ended = ended
        self.gradient_counts: dict[str, int] = {}
        self.last_traces: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"ended": self.ended}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return "TrainingRecord()"

    def count_gradient(self, call: str, trace: Any) -> bool:
        """Counts a gradient outside of programs; whether it is the first that is no microbatch of one step."""
        last = self.last_traces.get(call)
        if last is not None and last() is trace:
            return False
        self.gradient_counts[call], self.last_traces[call] = self.gradient_counts.get(call, 0) + 1, weakref.ref(trace)
        return self.gradient_counts[call] == _MAX_MICROBATCHES + 1


class _Program:
    """A program that is traced.

    Attributes:
        advanced: the calls in it that advance states, each with the record of the model, or None.
        warned: missing calls that have been warned of.
        observed: records of the models whose calls in it have observed something.
    """

    def __init__(self) -> None:
        self.advanced, self.warned = set[tuple[Any, str]](), set[tuple[Any, str]]()
        self.observed = set[TrainingRecord]()

    def __repr__(self) -> str:
        return "program"


_programs: weakref.WeakKeyDictionary[Any, _Program] = weakref.WeakKeyDictionary()
_is_inspecting = False


@contextlib.contextmanager
def suppress_training_checks() -> Iterator[None]:
    """A context in which programs are inspected and no model is trained: it has no errors and no warnings."""
    global _is_inspecting
    previous, _is_inspecting = _is_inspecting, True
    try:
        yield
    finally:
        _is_inspecting = previous


def _outermost_trace() -> tuple[Any, bool]:
    """The outermost trace, or None, and whether a gradient is taken within it."""
    # As with JAX's record of a trace: where it has other names, nothing is said.
    trace: Any = getattr(get_opaque_trace_state(), "_trace_ref", lambda: None)()
    outermost, differentiated = None, False
    while hasattr(trace, "parent_trace"):
        outermost = trace
        differentiated |= type(trace).__name__ in ("LinearizeTrace", "JVPTrace")
        trace = trace.parent_trace
    return outermost, differentiated


def record_advance(call: str, record: TrainingRecord | None = None) -> None:
    """Records that a step advances states by this call."""
    if record is not None:
        record.gradient_counts.pop(call, None)
    outermost, _ = _outermost_trace()
    if hasattr(outermost, "frame"):
        _programs.setdefault(outermost, _Program()).advanced.add((record, call))


def record_observation(record: TrainingRecord) -> None:
    """Records that a call of the model in this program observes something."""
    outermost, _ = _outermost_trace()
    if hasattr(outermost, "frame"):
        _programs.setdefault(outermost, _Program()).observed.add(record)


def warn_if_stats_lost(record: TrainingRecord, stats: Sequence[Array]) -> None:
    """Warns if calls of a model in this program have observed something, and all of it is lost.

    Args:
        record: of the model.
        stats: all observations of the model, before the state is advanced by them.
    """
    outermost, _ = _outermost_trace()
    program = _programs.get(outermost) if hasattr(outermost, "frame") else None
    if program is None or record not in program.observed:
        return
    # Without these names in a version of JAX nothing is said.
    inputs = set(map(id, getattr(outermost.frame, "invars", ())))
    if all(id(getattr(value, "val", None)) in inputs for value in stats):
        warnings.warn(
            "the observations of this model's calls are lost, and its scales stay as they are: nnx.scan drops changes "
            "of a model that it broadcasts (None in in_axes). Write nnx.StateAxes({nnx.Param: None, ...: nnx.Carry}) "
            "for the model in in_axes",
            UserWarning,
            stacklevel=_user_stacklevel(),
        )


_ADVICE = {
    ADVANCE: "without that call in each step, scales and thresholds keep their first values. Write {}, or take a "
    "recipe with current scaling",
    BOUNDS: "without that call after each update, every forward pass reads all weights to measure them. Write {}, with "
    "fp8jax.track_weight_amax last in the optimizer's chain, or take recipe 'fast', which needs neither",
}
# How states are advanced in each of the interfaces.
_HOW_TO_ADVANCE = {
    (ADVANCE, "nnx"): "fp8jax.nnx.end_step(model, grads, optimizer.opt_state) after the optimizer's update "
    "(fp8jax.nnx.Optimizer does so)",
    (ADVANCE, "linen"): "scaling = fp8jax.linen.advance_scaling(scaling, seen), for the collection that apply has "
    "written",
    (ADVANCE, "transform"): "states = fast.advance(states, observed), where fast is the transformed function and "
    "observed the gradient of its states",
    (
        BOUNDS,
        "nnx",
    ): "fp8jax.nnx.update_weight_amax_bounds(model, fp8jax.get_weight_amax_bounds(optimizer.opt_state)) after "
    "the optimizer's update (fp8jax.nnx.Optimizer does so with fp8jax.optimizer of the recipe)",
    (BOUNDS, "linen"): "scaling = fp8jax.linen.update_weight_amax_bounds(scaling, "
    "fp8jax.get_weight_amax_bounds(opt_state)) after the optimizer's update",
}
_ADVANCE_CALLS = {
    "nnx": "fp8jax.nnx.{}",
    "linen": "fp8jax.linen.{}",
    "transform": "advance of the transformed function",
}


def _differentiable_arrays(trained: Any) -> list[Array]:
    """The traced arrays that a gradient may be taken of."""
    leaves = [x for x in jax.tree.leaves(trained) if isinstance(x, jax.core.Tracer)]
    return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]


def read_state(
    state: Array,
    trained: Any,
    layer: str,
    names: str,
    interface: str = "nnx",
    call: str = ADVANCE,
    record: TrainingRecord | None = None,
) -> Array:
    """A state, as it is. Warns once a program where that takes a gradient of `trained` and never advances the state.

    Args:
        state: of a scaling, as a product reads it.
        trained: the weight and the slot of the product, in any structure.
        layer: what messages call the layer.
        names: of its scalings.
        interface: "nnx", "linen" or "transform".
        call: what advances the state, `ADVANCE` or `BOUNDS`.
        record: of the model, in NNX.
    """
    arrays = _differentiable_arrays(trained)
    if not arrays or (record is not None and call in record.ended):
        return state
    outermost, differentiated = _outermost_trace()
    message = layer, names, interface, call
    if hasattr(outermost, "frame"):
        program = _programs.setdefault(outermost, _Program())
        result: Array = _READ.bind(state, *arrays, message=message, record=record, program=program, trained=False)
        return result
    if differentiated and not _is_inspecting and record is not None and record.count_gradient(call, outermost):
        _warn(*message)
    return state


def _warn(layer: str, names: str, interface: str, call: str) -> None:
    warnings.warn(
        f"{layer} with {names} scaling is trained in a program that never calls "
        f"{_ADVANCE_CALLS[interface].format(call)}: {_ADVICE[call].format(_HOW_TO_ADVANCE[call, interface])}",
        UserWarning,
        stacklevel=_user_stacklevel(),
    )


def _user_stacklevel() -> int:
    """How many frames above the caller the first one is that belongs to no library of a training step."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARY_PREFIXES:
        frame, level = frame.f_back, level + 1
    return level


def _lower_read(context: Any, state: Any, *_: Any, message: Any, record: Any, program: _Program, trained: bool) -> Any:
    key = record, message[-1]
    if trained and key not in program.advanced | program.warned:
        program.warned.add(key)
        _warn(*message)
    return [state]


def _read_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Array, Any]:
    """JAX calls it where one of the operands is differentiated."""
    return _READ.bind(*primals, **params | {"trained": params["trained"] or not _is_inspecting}), tangents[0]


def require_statistics(slot: Array, trained: Any, message: str) -> Array:
    """A slot, as it is.

    Args:
        slot: an array whose cotangent is a statistic.
        trained: the weight of the product, in any structure.
        message: of the error.

    Raises:
        ValueError: where a gradient of `trained` is taken, and none of the slot.
    """
    arrays = _differentiable_arrays(trained)
    return _REQUIRE.bind(slot, *arrays, message=message, kept=True) if arrays else slot  # type: ignore[no-any-return]


def forbid_training(state: Array, trained: Any, message: str) -> Array:
    """A state, as it is.

    Args:
        state: of a scaling, as a product reads it.
        trained: the weight of the product, in any structure.
        message: of the error.

    Raises:
        ValueError: where a gradient of `trained` is taken.
    """
    arrays = _differentiable_arrays(trained)
    return _REQUIRE.bind(state, *arrays, message=message, kept=False) if arrays else state  # type: ignore[no-any-return]


def _require_jvp(primals: Any, tangents: Any, *, message: str, kept: bool) -> tuple[Array, Any]:
    has_tangent = [type(tangent) is not ad.Zero for tangent in tangents]
    if any(has_tangent[1:]) and not (kept and has_tangent[0]) and not _is_inspecting:
        raise ValueError(message)
    return _REQUIRE.bind(*primals, message=message, kept=kept), tangents[0]


def _identity_primitive(name: str, jvp: Any, lowering: Any) -> Primitive:
    """An operation that returns its first operand."""
    operation = Primitive(name)
    operation.def_impl(lambda value, *_, **__: value)
    operation.def_abstract_eval(lambda value, *_, **__: value)
    ad.primitive_jvps[operation] = jvp
    batching.primitive_batchers[operation] = lambda values, dims, **how: (operation.bind(*values, **how), dims[0])
    mlir.register_lowering(operation, lowering)
    return operation


_READ = _identity_primitive("fp8jax_read_state", _read_jvp, _lower_read)
_REQUIRE = _identity_primitive("fp8jax_require", _require_jvp, lambda context, value, *_, **__: [value])
