"""Errors and warnings for training that never updates scaling states.

Python runs while a step is traced, differentiated and lowered, not while it is executed. Each state is read through
primitives that return their first operand. Their JVP rule raises if a gradient of the weight is taken and the
statistics of the scaling are lost. Their lowering warns if the program never advances the state.
"""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive, get_opaque_trace_state
from jax.interpreters import ad, batching, mlir

from fp8jax.core import frames

# Up to this number of gradients outside of a program may be the microbatches of one step.
_MAX_MICROBATCHES = 16
# The calls that advance states: by the statistics of a step, or by the bounds of an optimizer.
ADVANCE, BOUNDS = "advance_scaling", "update_weight_amax_bounds"


class TrainingRecord:
    """The training of one NNX model. No two records are equal: models do not share a program.

    Attributes:
        automatic_calls: the calls that the model's optimizer makes in each update.
        gradient_counts: by call, the number of gradients computed outside of programs since the last call.
        last_traces: by call, a weak reference to the trace of the last of these gradients.
    """

    def __init__(self, automatic_calls: frozenset[str] = frozenset()) -> None:
        self.automatic_calls = automatic_calls
        self.gradient_counts: dict[str, int] = {}
        self.last_traces: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"automatic_calls": self.automatic_calls}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return "TrainingRecord()"

    def count_gradient(self, call: str, trace: Any) -> bool:
        """Count a gradient outside of programs. True for the first one that is not a microbatch of one step."""
        last = self.last_traces.get(call)
        if last is not None and last() is trace:
            return False
        self.gradient_counts[call], self.last_traces[call] = self.gradient_counts.get(call, 0) + 1, weakref.ref(trace)
        return self.gradient_counts[call] == _MAX_MICROBATCHES + 1


class _Program:
    """A program during its trace.

    Attributes:
        advanced: the calls that advance states, each after the record of the model, or None.
        warned: the missing calls of past warnings, in this form.
        observed: records of the models with calls that have collected statistics; None for models of Linen.
    """

    def __init__(self) -> None:
        self.advanced, self.warned = set[tuple[Any, str]](), set[tuple[Any, str]]()
        self.observed = set[TrainingRecord | None]()

    def __repr__(self) -> str:
        return "program"


_programs: weakref.WeakKeyDictionary[Any, _Program] = weakref.WeakKeyDictionary()
_is_inspecting = False


@contextlib.contextmanager
def suppress_training_checks() -> Iterator[None]:
    """A context without these errors and warnings, for programs that are inspected and train no model."""
    global _is_inspecting
    previous, _is_inspecting = _is_inspecting, True
    try:
        yield
    finally:
        _is_inspecting = previous


def _outermost_program() -> tuple[_Program | None, Any, bool]:
    """The program that is traced, or None; the outermost trace, or None; whether a gradient is taken within it."""
    # Without these names in a version of JAX there are no warnings.
    trace: Any = getattr(get_opaque_trace_state(), "_trace_ref", lambda: None)()
    outermost, differentiated = None, False
    while hasattr(trace, "parent_trace"):
        outermost = trace
        differentiated |= type(trace).__name__ in ("LinearizeTrace", "JVPTrace")
        trace = trace.parent_trace
    program = _programs.setdefault(outermost, _Program()) if hasattr(outermost, "frame") else None
    return program, outermost, differentiated


def record_advance(call: str, record: TrainingRecord | None = None) -> None:
    """Record that a step advances states by this call."""
    if record is not None:
        record.gradient_counts.pop(call, None)
    program, _, _ = _outermost_program()
    if program is not None:
        program.advanced.add((record, call))


def record_observation(record: TrainingRecord | None) -> None:
    """Record that a call of the model in this program, or in a loop of it, observes something; None is for Linen."""
    for trace in _enclosing_programs():
        _programs.setdefault(trace, _Program()).observed.add(record)


def are_stats_lost(record: TrainingRecord | None, stats: Sequence[Any]) -> bool:
    """Whether calls of a model in this program, or in this loop, have observed something, and all of it is lost."""
    trace = next(_enclosing_programs(), None)
    if trace is None or trace not in _programs or record not in _programs[trace].observed:
        return False
    # Without these names in a version of JAX nothing is reported.
    inputs = set(map(id, getattr(trace.frame, "invars", ())))
    return all(id(getattr(value, "val", None)) in inputs for value in stats)


def _enclosing_programs() -> Iterator[Any]:
    """The traces of the program and the loops that are traced, from the innermost one."""
    trace: Any = getattr(get_opaque_trace_state(), "_trace_ref", lambda: None)()
    while hasattr(trace, "parent_trace"):
        if hasattr(trace, "frame"):
            yield trace
        trace = trace.parent_trace


class Interface(NamedTuple):
    """The texts of messages about one interface.

    Attributes:
        prefix: of the calls that advance states.
        statistics_lost: error of a gradient that leaves out statistics, a format of {layer} and {names} of scalings.
        not_mutable: error of training that stores no observations, such a format.
    """

    prefix: str
    advance_code: str
    bounds_code: str
    statistics_lost: str
    not_mutable: str = ""

    def never_advanced(self, call: str, layer: str, names: str) -> str:
        """The warning of a program that trains a layer with these scalings and never makes a call."""
        if call == BOUNDS:
            advice = (
                "without this call after each update, every forward pass reads all weights to measure them. Call "
                f"{self.bounds_code}, with fp8jax.track_weight_amax last in the optimizer's chain, or use the recipe "
                "'fast', which needs neither"
            )
        else:
            advice = (
                "without this call in each step, scales and thresholds keep their initial values. Call "
                f"{self.advance_code}, or use a recipe with current scaling"
            )
        method = "advance" if call == ADVANCE else call
        name = f"{self.prefix}.{call}" if self.prefix else f"{method} of the transformed function"
        return f"{layer} with {names} scaling is trained in a program that never calls {name}: {advice}"


_STATISTICS = "{layer} has {names} scaling, whose state needs the amax of the output's gradient, but this gradient "
LINEN_STEP = (
    "Use (loss, new), (grads, seen) = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)(params, statistics), "
    'where loss_fn calls apply(..., mutable=["fp8jax_scaling"]) and returns the updated collection. Then call '
    'fp8jax.linen.end_step(new["fp8jax_scaling"], seen, opt_state, rules), or use fp8jax.linen.TrainState'
)
NNX = Interface(
    prefix="fp8jax.nnx",
    advance_code="fp8jax.nnx.end_step(model, grads, optimizer.opt_state) after the optimizer's update "
    "(fp8jax.nnx.Optimizer does so)",
    bounds_code="fp8jax.nnx.update_weight_amax_bounds(model, fp8jax.get_weight_amax_bounds(optimizer.opt_state)) after "
    "the optimizer's update (fp8jax.nnx.Optimizer does so with fp8jax.optimizer of the recipe)",
    statistics_lost=f"{_STATISTICS}does not contain it. Use fp8jax.nnx.value_and_grad(...) or fp8jax.nnx.grad(...) "
    "instead of Flax's functions. Or differentiate with respect to nnx.Any(nnx.Param, "
    "fp8jax.nnx.GradientStatistic), and pass all gradients to fp8jax.nnx.end_step. For gradients that "
    "are not used for training, call model.eval() first: the scales then do not change",
)
LINEN = Interface(
    prefix="fp8jax.linen",
    advance_code="scaling = fp8jax.linen.advance_scaling(scaling, seen), for the collection that apply has written",
    bounds_code="scaling = fp8jax.linen.update_weight_amax_bounds(scaling, fp8jax.get_weight_amax_bounds(opt_state)) "
    "after the optimizer's update",
    statistics_lost=f"{_STATISTICS}is not computed with respect to the collection 'fp8jax_statistics'. {LINEN_STEP}",
    not_mutable="{layer} has {names} scaling and is trained, but its statistics are lost: the collection "
    f"'fp8jax_scaling' is not mutable. {LINEN_STEP}",
)
TRANSFORM = Interface(
    prefix="",
    advance_code="states = fast.advance(states, observed), where fast is the transformed function and observed the "
    "gradient of its states",
    bounds_code="states = fast.update_weight_amax_bounds(states, fp8jax.get_weight_amax_bounds(opt_state)) after the "
    "optimizer's update, where fast is the transformed function",
    statistics_lost="{layer} has {names} scaling: the statistics of a call are the gradient with respect to its "
    "states, which is not computed here. Use grads, observed = jax.grad(lambda p, s: ..., argnums=(0, "
    "1))(params, states), with states=s in the call, and then states = fast.advance(states, observed)",
)


def _differentiable_arrays(operands: Any) -> list[Array]:
    """The traced arrays that a gradient may be taken of."""
    leaves = [x for x in jax.tree.leaves(operands) if isinstance(x, jax.core.Tracer)]
    return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]


def warn_if_never_advanced(
    state: Array, operands: Any, message: str, call: str, record: TrainingRecord | None = None
) -> Array:
    """`state`, unchanged. Warns once for each program that computes a gradient of `operands` and never advances the
    state.

    In a program, a primitive returns the state. Its JVP rule notes the gradient, and its lowering warns. Outside of a
    program, only gradients of an NNX model are counted. More than `_MAX_MICROBATCHES` of them without `call` warn.

    Args:
        operands: the weight and the slot of the product, in any structure.
        call: the name of the call that advances the state, `ADVANCE` or `BOUNDS`.
        record: the record of an NNX model; None for other interfaces.
    """
    arrays = _differentiable_arrays(operands)
    if not arrays or (record is not None and call in record.automatic_calls):
        return state
    program, outermost, differentiated = _outermost_program()
    if program is not None:
        # `_read_jvp` sets the parameter `is_differentiated` if a gradient of `arrays` is taken.
        return _READ.bind(
            state, *arrays, message=message, call=call, record=record, program=program, is_differentiated=False
        )
    if differentiated and not _is_inspecting and record is not None and record.count_gradient(call, outermost):
        frames.warn(message)
    return state


def _lower_read(
    context: Any, state: Any, *_: Any, message: str, call: str, record: Any, program: _Program, is_differentiated: bool
) -> Any:
    if is_differentiated and (record, call) not in program.advanced | program.warned:
        program.warned.add((record, call))
        frames.warn(message)
    return [state]


def _read_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Array, Any]:
    """JAX calls it if one of the operands is differentiated."""
    return _READ.bind(
        *primals, **params | {"is_differentiated": params["is_differentiated"] or not _is_inspecting}
    ), tangents[0]


def raise_if_differentiated(value: Array, weight: Any, message: str, *, unless_differentiated: bool = False) -> Array:
    """`value`, unchanged.

    Args:
        value: a state as a product reads it, or a slot whose cotangent is a statistic.
        weight: the weight of the product, in any structure.
        unless_differentiated: allow a gradient of `weight` that is also taken of `value`.

    Raises:
        ValueError: a gradient of `weight` is taken.
    """
    arrays = _differentiable_arrays(weight)
    if not arrays:
        return value
    return _ERROR_IF_TRAINED.bind(value, *arrays, message=message, unless_differentiated=unless_differentiated)


def _require_jvp(primals: Any, tangents: Any, *, message: str, unless_differentiated: bool) -> tuple[Array, Any]:
    is_differentiated, *is_trained = (type(tangent) is not ad.Zero for tangent in tangents)
    if any(is_trained) and not (unless_differentiated and is_differentiated) and not _is_inspecting:
        raise ValueError(message)
    return _ERROR_IF_TRAINED.bind(*primals, message=message, unless_differentiated=unless_differentiated), tangents[0]


def _identity_primitive(name: str, jvp: Any, lowering: Any) -> Primitive:
    """A primitive that returns its first operand."""
    operation = Primitive(name)
    operation.def_impl(lambda value, *_, **__: value)
    operation.def_abstract_eval(lambda value, *_, **__: value)
    ad.primitive_jvps[operation] = jvp
    batching.primitive_batchers[operation] = lambda values, dims, **params: (operation.bind(*values, **params), dims[0])
    mlir.register_lowering(operation, lowering)
    return operation


_READ = _identity_primitive("fp8jax_read_state", _read_jvp, _lower_read)
_ERROR_IF_TRAINED = _identity_primitive(
    "fp8jax_error_if_trained", _require_jvp, lambda context, value, *_, **__: [value]
)
