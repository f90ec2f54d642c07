"""Finds norms by their values: (x - mean) / sqrt(variance + eps) * scale + bias, or RMSNorm, in any spelling."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fp8jax.rewrite.graph import Node, Value, strip_upcasts
from fp8jax.rewrite.primitives import LAYOUTS, RESHAPES
from fp8jax.rewrite.probes import NoMatchError, elementwise_einsum_factors, evaluate

# Rows of several magnitudes: the small ones show the place of eps.
_MAGNITUDES = np.array([1e-5, 1e-3, 0.1, 3.0])[:, None]
_TOLERANCE = 1e-6
_ROOTS = ("rsqrt", "sqrt", "pow")


class NormForm(NamedTuple):
    """The parts of a norm over the last axis.

    Attributes:
        scales: the parameters that multiply the result, each (channels,) or one number, up to axes of length 1.
        bias: the parameter that is added; or None.
        eps: the number added to the mean square or variance.
        centered: True for LayerNorm, False for RMSNorm.
    """

    x: Value
    scales: tuple[Value, ...]
    bias: Value | None
    eps: float
    centered: bool


def find(value: Value) -> NormForm | None:
    """The norm that computes a value; None if there is none."""
    if value.aval.ndim < 1 or value.shape[-1] < 2 or not any(v.kind in _ROOTS for v in _ancestors(value)):
        return None
    for x in _candidate_inputs(value):
        if x.shape[-1:] == value.shape[-1:] and (norm := _match_norm(value, x)) is not None:
            return norm
    return None


def _candidate_inputs(value: Value) -> Iterator[Value]:
    """The values whose mean, mean square or variance may be taken."""
    visited = set[Value]()
    for total in (v for v in _ancestors(value) if v.kind == "reduce_sum" and v.node is not None):
        squared = _strip_to_channels(_operands(total)[0])
        for v in (squared, *_operands(squared)):
            v = _strip_to_channels(v)
            less_mean = _operands(v)[:1] if v.kind == "sub" else []
            for x in (*map(_strip_to_channels, less_mean), v):
                if x.is_data and x not in visited:
                    visited.add(x)
                    yield x


def _operands(value: Value) -> list[Value]:
    node: Node | None = value.node
    return [] if node is None or node.operation is not None else elementwise_einsum_factors(node) or node.operands


def _ancestors(value: Value, max_depth: int = 24) -> list[Value]:
    """A value and the values that it is computed from by primitives of norms, nearest first."""
    norm_kinds = (*_ROOTS, "mul", "div", "add", "sub", "max", "reduce_sum", "square", "integer_pow", *LAYOUTS)
    found, new = {value: None}, [value]
    for _ in range(max_depth):
        if len(found) > 64:
            break
        new = [o for v in new if v.kind in norm_kinds for o in _operands(v) if o not in found and o.is_data]
        found |= dict.fromkeys(new)
    return list(found)


def _match_norm(value: Value, x: Value) -> NormForm | None:
    """The norm of `x` that equals a value; None if there is none."""
    random, channels = np.random.default_rng(0), x.shape[-1]
    rows = random.normal(size=(len(_MAGNITUDES), channels)) * _MAGNITUDES + 0.3 * _MAGNITUDES
    parameters: dict[Value, Any] = {}

    def on_leaf(v: Value) -> Any:
        if v.is_data and not v.is_closure_data:
            raise NoMatchError
        v = _parameter_vector(v, channels)
        if v not in parameters:
            parameters[v] = 1 + 0.5 * random.normal(size=(1, channels if v.aval.size > 1 else 1))
        return parameters[v]

    known_values: dict[Value, Any] = {x: rows}
    try:
        result = evaluate(value, known_values, on_leaf)
    except NoMatchError:
        return None
    if np.shape(result) != rows.shape or len(parameters) > 4 or value.aval.size != x.aval.size:
        return None
    for centered, bias in itertools.product((False, True), (None, *parameters)):
        scales = tuple(v for v in parameters if v is not bias)
        scale = math.prod((parameters[v] for v in scales), start=np.ones((1, 1)))
        z = rows - np.mean(rows, -1, keepdims=True) if centered else rows
        shifted = result if bias is None else result - parameters[bias]
        eps = _infer_eps(z, shifted / scale, {v.constant for v in known_values} - {None})
        if eps is None:
            continue
        inverse = 1 / np.sqrt(np.mean(z * z, -1, keepdims=True) + eps)
        if np.allclose(shifted, z * inverse * scale, rtol=_TOLERANCE, atol=_TOLERANCE * 1e-3):
            return NormForm(x, scales, bias, eps, centered)
    return None


def _parameter_vector(value: Value, channels: int) -> Value:
    """A parameter before it is broadcast over rows."""
    while value.aval.size not in (1, channels) and value.kind == "broadcast_in_dim" and value.node is not None:
        source = value.node.operands[0]
        is_last_axis = value.node.eqn.params["broadcast_dimensions"][-1:] == (value.aval.ndim - 1,)
        if source.aval.size > 1 and not (is_last_axis and source.shape[-1] == channels):
            raise NoMatchError
        value = source
    if value.aval.size not in (1, channels) or (value.aval.size > 1 and value.shape[-1] != channels):
        raise NoMatchError
    return value


def _infer_eps(z: Any, y: Any, constants: set[Any]) -> float | None:
    """The constant of the program nearest to the eps that the smallest row implies; None if none is near."""
    largest = np.argmax(np.abs(z[0]))
    if y[0, largest] == 0 or not np.isfinite(y[0, largest]):
        return None
    eps = float((z[0, largest] / y[0, largest]) ** 2 - np.mean(z[0] ** 2))
    nearest = min((c for c in constants if c > 0), key=lambda c: abs(c - eps), default=0.0)
    return nearest if nearest and math.isclose(nearest, eps, rel_tol=1e-4) else None


def _strip_to_channels(x: Value) -> Value:
    """The value before casts that widen it and reshapes that keep its channels."""
    while x.node is not None and x.node.operation is None:
        source = (x.node.operands or [x])[0]
        keeps_channels = x.kind in RESHAPES and source.shape[-1:] == x.shape[-1:] and source.aval.size == x.aval.size
        inner = source if keeps_channels else strip_upcasts(x)
        if inner is x:
            break
        x = inner
    return x
