"""Activations of any spelling, found by what they compute: f(gate) or f(gate) * up, f one of `fp8jax.ops`."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from fp8jax.ops.fused_reference import ACTIVATIONS
from fp8jax.rewrite.graph import Value, narrow
from fp8jax.rewrite.primitives import SAME
from fp8jax.rewrite.probes import FUNCTIONS, UnlikeError, evaluate
from fp8jax.rewrite.read import read

_CURVES = ("logistic", "tanh", "erf", "erfc", "exp", "exp2", "expm1")
# Where the function is looked at: densely where it bends, and far out, where a clip would show.
_SPREAD = np.array([8.0, 11, 16, 30, 80, 300, 1e3, 1e4])
_GATE = np.concatenate([np.linspace(-6, 6, 97), _SPREAD, -_SPREAD])[None]
_UP = (3 * np.cos(1 + np.arange(_GATE.size)) * np.exp2(np.arange(_GATE.size) % 7 - 2))[None]
# Constants of a model in bf16 are rounded to 8 bits.
_TOLERANCE = 2.5e-3
_DEEPEST = 12


class ActivationForm(NamedTuple):
    """name(gate) * up, or name(gate)."""

    name: str
    gate: Value
    up: Value | None


def find(value: Value) -> ActivationForm | None:
    """The activation that a value is; None if it is none."""
    for gate in _gates(value):
        others = _independent(value, gate)
        unlike = (other.shape != value.shape or not other.data or other.fixed for other in others)
        if len(others) > 1 or any(unlike):
            continue
        at: dict[Value, Any] = {gate: _GATE} | dict.fromkeys(others, _UP)
        try:
            with np.errstate(all="ignore"):
                result = evaluate(value, at, _refuse)
        except UnlikeError:
            continue
        name = _name(result, _UP if others else np.ones(()))
        if name is not None:
            return ActivationForm(name, narrow(gate), narrow(others[0]) if others else None)
    return None


def _refuse(value: Value) -> Any:
    raise UnlikeError


def _gates(value: Value) -> Iterator[Value]:
    """Values of the same shape that a curve is taken of, the nearest first: one of them may be the gate."""
    found = set[Value]()
    for curve in [v for v in _below(value) if v.kind in _CURVES]:
        for gate in _below(curve):
            data = gate.data and not gate.fixed
            if gate not in found and gate is not curve and data and gate.shape == value.shape:
                found.add(gate)
                yield gate


def _below(value: Value) -> list[Value]:
    """A value and those that it is computed from, element by element, the nearest first."""
    found, new = {value: None}, [value]
    for _ in range(_DEEPEST):
        new = [operand for v in new for operand in _operands(v) if operand not in found]
        found |= dict.fromkeys(new)
    return list(found)


def _operands(value: Value) -> list[Value]:
    known = value.kind in (*FUNCTIONS, *SAME, "integer_pow")
    return value.node.operands if known and value.node is not None and value.node.operation is None else []


def _independent(value: Value, gate: Value) -> list[Value]:
    """What else a value is computed from, as far as that does not depend on the gate; constants are nothing."""
    depends: dict[Value, bool] = {gate: True}
    others: dict[Value, None] = {}

    def visit(v: Value) -> bool:
        if v not in depends:
            each = [(operand, visit(operand)) for operand in _operands(v)]
            depends[v] = any(on_gate for _, on_gate in each)
            if depends[v]:
                others.update((operand, None) for operand, on_gate in each if not on_gate and operand.constant is None)
        return depends[v]

    visit(value)
    return list(others)


def _name(result: Any, up: Any) -> str | None:
    """The form whose values these are, times those of the factor."""
    if np.shape(result) != _GATE.shape:
        return None
    allowed = _TOLERANCE * np.abs(up) * np.maximum(1, np.abs(_GATE) * (np.abs(_GATE) > 6))
    errors = {name: np.max(np.abs(result - _values(f) * up) / allowed) for name, f in ACTIVATIONS.items()}
    best = min(errors, key=lambda name: errors[name])
    return best if errors[best] <= 1 else None


@functools.cache
def _values(function: Callable[[Any], Any]) -> Any:
    """An activation where it is looked at, float64: of what it is written as, nothing is run."""
    graph = read(jax.make_jaxpr(function)(jax.ShapeDtypeStruct(_GATE.shape, np.float32)), [None])
    with np.errstate(all="ignore"):
        return evaluate(graph.outputs[0], {graph.inputs[0]: _GATE}, _refuse)
