"""Says once that a model with states of scaling is trained, and that nobody advances them.

Python sees a step of training while it is traced, and once more when the whole program is lowered: what layers observe,
and the bounds of weights that they read, go through an operation that does nothing else than look then whether
`advance_scaling`, or `set_weight_bounds`, was ever called. Outside of programs many gradients must have followed each
other.
"""

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import jax
from jax import Array
from jax.extend.core import Primitive, get_opaque_trace_state
from jax.interpreters import ad, batching, mlir

# So many gradients outside of a program may be the microbatches of one step.
_MICROBATCHES = 16
# Who advances states: a call with what layers have observed, or with what the optimizer knows.
ADVANCE, BOUNDS = "advance_scaling", "set_weight_bounds"


class _Steps:
    """What is known in this process.

    Attributes:
        settled: the calls that were ever made, or of which it has been said that they are not.
        gradients: how many were taken outside of programs.
        last: a weak reference to the trace of the last one.
    """

    def __init__(self) -> None:
        self.settled, self.gradients = frozenset[str](), 0
        self.last: Any = None


_steps = _Steps()


@contextlib.contextmanager
def inspected() -> Iterator[None]:
    """Within it a program is looked at, and no model trained."""
    before, _steps.settled = _steps.settled, frozenset(_ADVICE)
    try:
        yield
    finally:
        _steps.settled = before


def settles(call: str) -> None:
    """Notes that states are advanced by this call."""
    _steps.settled |= {call}


_ADVICE = {
    ADVANCE: "unless it is called after it, once a step, scales and thresholds stay what they were at first. Write "
    "{}, or take a recipe with current scaling",
    BOUNDS: "unless it is called after each update, each call reads all weights for their largest magnitudes, which "
    "this scaling is there to save. Write {}, with fp8jax.track_weights last in the optimizer's chain, or take recipe "
    "'fast', whose scales need neither",
}
# How states are advanced in each of Flax's interfaces.
_WRITE = {
    (ADVANCE, "nnx"): "grads = fp8jax.nnx.advance_scaling(model, grads) before the optimizer's update",
    (ADVANCE, "linen"): "scaling = fp8jax.linen.advance_scaling(scaling, seen), for the collection that apply has "
    "written",
    (BOUNDS, "nnx"): "fp8jax.nnx.set_weight_bounds(model, fp8jax.weight_bounds(optimizer.opt_state)) after the "
    "optimizer's update (fp8jax.nnx.Optimizer does so with fp8jax.optimizer of the recipe)",
    (BOUNDS, "linen"): "scaling = fp8jax.linen.set_weight_bounds(scaling, fp8jax.weight_bounds(opt_state)) after the "
    "optimizer's update",
}


def observed(
    value: Array, layer: str, names: str, interface: str = "nnx", call: str = ADVANCE, weight: Any = None
) -> Array:
    """What a call of a layer observed or read, as it is; where the call is differentiated, for a warning.

    Args:
        value: the observation, or the bound of a weight.
        layer: what messages call the layer.
        names: of its scalings.
        interface: of Flax, "nnx" or "linen".
        call: what advances the state, `ADVANCE` or `BOUNDS`.
        weight: the weight that the bound is of: nothing is said of one that is not differentiated, which stays as it
            is. None for observations.
    """
    if call in _steps.settled or not (weight is None or isinstance(weight, jax.core.Tracer)):
        return value
    # As with JAX's record of a trace: where it has other names, nothing is said.
    trace: Any = getattr(get_opaque_trace_state(), "_trace_ref", lambda: None)()
    outermost, differentiated = None, False
    while hasattr(trace, "parent_trace"):
        outermost = trace
        differentiated |= type(trace).__name__ in ("LinearizeTrace", "JVPTrace")
        trace = trace.parent_trace
    if not differentiated:
        return value
    if hasattr(outermost, "frame"):
        others, how = () if weight is None else (weight,), {"layer": layer, "names": names, "interface": interface}
        result: Array = _LOOK.bind(value, *others, trained=weight is None, call=call, **how)
        return result
    if _steps.last is None or _steps.last() is not outermost:
        _steps.gradients, _steps.last = _steps.gradients + 1, weakref.ref(outermost)
        if _steps.gradients > _MICROBATCHES:
            _look(layer, names, interface, call)
    return value


def _look(layer: str, names: str, interface: str, call: str) -> None:
    """Warns where states were never advanced, once."""
    if call in _steps.settled:
        return
    settles(call)
    warnings.warn(
        f"{layer} with {names} scaling is trained in a program that never calls fp8jax.{interface}.{call}: "
        f"{_ADVICE[call].format(_WRITE[call, interface])}",
        stacklevel=2,
    )


def _lowered(context: Any, value: Any, *weight: Any, trained: bool, **how: Any) -> list[Any]:
    if trained:
        _look(**how)
    return [value]


_LOOK = Primitive("fp8jax_observed")
_LOOK.def_impl(lambda value, *_, **__: value)
_LOOK.def_abstract_eval(lambda value, *_, **__: value)
# JAX asks for it where the weight is differentiated, or what was observed.
ad.primitive_jvps[_LOOK] = lambda primals, tangents, **how: (
    _LOOK.bind(*primals, **how | {"trained": True}),
    tangents[0],
)
batching.primitive_batchers[_LOOK] = lambda values, dims, **how: (_LOOK.bind(*values, **how), dims[0])
mlir.register_lowering(_LOOK, _lowered)
