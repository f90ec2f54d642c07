"""Finds activations by their values: f(gate) or f(gate) * up, in any spelling, for each f of `fp8jax.ops`."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from fp8jax.ops.quantization.fused_reference import ACTIVATIONS
from fp8jax.rewrite.graph import Value, search, strip_upcasts
from fp8jax.rewrite.primitives import PROBE_IDENTITY
from fp8jax.rewrite.probes import FUNCTIONS, NoMatchError, evaluate
from fp8jax.rewrite.read import read

_CURVES = ("logistic", "tanh", "erf", "erfc", "exp", "exp2", "expm1")
# Probe points: dense where the functions bend, and some far out, where a clip would show.
_FAR_POINTS = np.array([8.0, 11, 16, 30, 80, 300, 1e3, 1e4])
_GATE_POINTS = np.concatenate([np.linspace(-6, 6, 97), _FAR_POINTS, -_FAR_POINTS])[None]
_UP_POINTS = (3 * np.cos(1 + np.arange(_GATE_POINTS.size)) * np.exp2(np.arange(_GATE_POINTS.size) % 7 - 2))[None]
# A bf16 model's constants are rounded to 8 significant bits.
_TOLERANCE = 2.5e-3
_MAX_DEPTH = 12


class ActivationForm(NamedTuple):
    """The parts of an activation: name(gate) * up, or name(gate) if `up` is None."""

    name: str
    gate: Value
    up: Value | None


def find(value: Value) -> ActivationForm | None:
    """The activation that computes a value; None if there is none."""
    for gate in _candidate_gates(value):
        independent = _independent_inputs(value, gate)
        mismatched = (other.shape != value.shape or not other.is_data or other.is_closure_data for other in independent)
        if len(independent) > 1 or any(mismatched):
            continue
        known_values: dict[Value, Any] = {gate: _GATE_POINTS} | dict.fromkeys(independent, _UP_POINTS)
        try:
            with np.errstate(all="ignore"):
                result = evaluate(value, known_values, _reject_leaf)
        except NoMatchError:
            continue
        name = _match_name(result, _UP_POINTS if independent else np.ones(()))
        if name is not None:
            return ActivationForm(name, strip_upcasts(gate), strip_upcasts(independent[0]) if independent else None)
    return None


def _reject_leaf(value: Value) -> Any:
    raise NoMatchError


def _candidate_gates(value: Value) -> Iterator[Value]:
    """The inputs of nonlinear functions with the value's shape, nearest first; one of them may be the gate."""
    found = set[Value]()
    for curve in [v for v in _ancestors(value) if v.kind in _CURVES]:
        for gate in _ancestors(curve):
            data = gate.is_data and not gate.is_closure_data
            if gate not in found and gate is not curve and data and gate.shape == value.shape:
                found.add(gate)
                yield gate


def _ancestors(value: Value) -> list[Value]:
    """A value and the values that it is computed from elementwise, nearest first."""
    return search([value], _operands, _MAX_DEPTH)


def _operands(value: Value) -> list[Value]:
    is_elementwise = value.kind in (*FUNCTIONS, *PROBE_IDENTITY, "integer_pow")
    return value.node.operands if is_elementwise and value.node is not None and value.node.operation is None else []


def _independent_inputs(value: Value, gate: Value) -> list[Value]:
    """The operands of a value's computation that do not depend on the gate, without constants."""
    depends: dict[Value, bool] = {gate: True}
    independent: dict[Value, None] = {}

    def visit(v: Value) -> bool:
        if v not in depends:
            dependencies = [(operand, visit(operand)) for operand in _operands(v)]
            depends[v] = any(on_gate for _, on_gate in dependencies)
            if depends[v]:
                independent.update(
                    (operand, None) for operand, on_gate in dependencies if not on_gate and operand.constant is None
                )
        return depends[v]

    visit(value)
    return list(independent)


def _match_name(result: Any, up: Any) -> str | None:
    """The name of the activation f with f(gate) * up equal to `result`; None if there is none."""
    if np.shape(result) != _GATE_POINTS.shape:
        return None
    allowed = _TOLERANCE * np.abs(up) * np.maximum(1, np.abs(_GATE_POINTS) * (np.abs(_GATE_POINTS) > 6))
    errors = {name: np.max(np.abs(result - _activation_values(f) * up) / allowed) for name, f in ACTIVATIONS.items()}
    best = min(errors, key=lambda name: errors[name])
    return best if errors[best] <= 1 else None


@functools.cache
def _activation_values(function: Callable[[Any], Any]) -> Any:
    """An activation at the probe points, float64, evaluated from its jaxpr.

    Raises:
        NotImplementedError: the activation has a primitive that `fp8jax.rewrite.probes` does not evaluate.
    """
    jaxpr = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(_GATE_POINTS.shape, np.float32))
    graph = read(jaxpr, [None])
    try:
        with np.errstate(all="ignore"):
            return evaluate(graph.outputs[0], {graph.inputs[0]: _GATE_POINTS}, _reject_leaf)
    except NoMatchError:
        raise NotImplementedError(
            f"the activation {jaxpr.jaxpr} has a primitive that fp8jax.rewrite.probes does not evaluate; add it to "
            "FUNCTIONS there, or write the activation with the listed primitives"
        ) from None
