"""Identifies a part of a program by its values at a few points, in float64.

Equal values prove equal functions. They prove equal derivatives only if each step has its own derivative, so custom
derivatives, stop_gradient, selections and kernels are not evaluated.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import scipy.special

from fp8jax.rewrite.graph import Node, Value
from fp8jax.rewrite.primitives import PROBE_IDENTITY, RESHAPES

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative},
    **{"exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log1p": np.log1p, "tanh": np.tanh, "pow": np.power},
    **{"logistic": scipy.special.expit, "erf": scipy.special.erf, "erfc": scipy.special.erfc},
    **{"square": np.square, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x)},
}
_MAX_NODES = 64  # more than any norm or activation has


class NoMatchError(Exception):
    """A value is not a function of the probe arrays, as far as can be shown."""


def evaluate(value: Value, known_values: dict[Value, Any], on_leaf: Callable[[Value], Any]) -> Any:
    """The float64 array of a value, from arrays for other values.

    An array (..., channels) is (rows, channels) here. A number per row is (rows, 1). A parameter is (1, channels).

    Args:
        known_values: arrays by value; computed ones are added.
        on_leaf: returns the array of a value that is neither known nor computable, or raises `NoMatchError`.

    Raises:
        NoMatchError: the value cannot be computed.
    """
    if value in known_values:
        return known_values[value]
    if len(known_values) > _MAX_NODES:
        raise NoMatchError
    known_values[value] = result = _result(value, known_values, on_leaf)
    return result


def _result(value: Value, known_values: dict[Value, Any], on_leaf: Callable[[Value], Any]) -> Any:
    node, shape = value.node, value.shape
    if value.constant is not None:
        return np.float64(value.constant)
    constant = value.is_closure_data and not next(iter(known_values)).is_closure_data
    if node is None or node.operation is not None or not value.is_data or constant:
        return on_leaf(value)
    evaluate_operand = lambda operand: evaluate(operand, known_values, on_leaf)  # noqa: E731
    if node.kind in FUNCTIONS:
        return FUNCTIONS[node.kind](*map(evaluate_operand, node.operands))
    if node.kind == "integer_pow":
        return evaluate_operand(node.operands[0]) ** node.eqn.params["y"]
    if node.kind == "max" and any(operand.constant == 0 for operand in node.operands):
        # Only clamps that change nothing are matched, as of a variance; any other max is not smooth.
        return _clamp_to_zero(*map(evaluate_operand, node.operands))
    if node.kind == "reduce_sum":
        operand = node.operands[0]
        if tuple(node.eqn.params["axes"]) != (operand.aval.ndim - 1,):
            raise NoMatchError
        array = evaluate_operand(operand)
        # A sum over broadcast elements would have more terms than the probe array.
        if np.shape(array)[-1:] != operand.shape[-1:]:
            raise NoMatchError
        return np.sum(array, -1, keepdims=True)
    if node.kind in PROBE_IDENTITY:
        return evaluate_operand(node.operands[0])
    if factors := elementwise_einsum_factors(node):
        return evaluate_operand(factors[0]) * evaluate_operand(factors[1])
    if node.kind in RESHAPES and _keeps_rows(node.eqn, node.operands[0].shape, shape):
        return evaluate_operand(node.operands[0])
    return on_leaf(value)


def elementwise_einsum_factors(node: Node) -> list[Value]:
    """The factors of `einsum("...k,k->...k")`; [] for any other node.

    JAX writes it as a dot_general with channels as batch axis and no contraction, and a transpose.
    """
    product = node.operands[0].node if node.kind == "transpose" else None
    if product is None or product.operation is not None or product.kind != "dot_general":
        return []
    (_, batch), last = product.eqn.params["dimension_numbers"], len(node.eqn.params["permutation"]) - 1
    factors = product.operands
    batches_channels = all(list(axes) == [x.aval.ndim - 1] for x, axes in zip(factors, batch, strict=True))
    has_vector = min(x.aval.ndim for x in factors) == 1
    moves_channels_back = tuple(node.eqn.params["permutation"]) == (*range(1, last + 1), 0)
    return list(factors) if batches_channels and has_vector and moves_channels_back else []


def _clamp_to_zero(a: Any, b: Any) -> Any:
    result = np.maximum(a, b)
    if np.min(np.where(np.ndim(a) == 0, b, a)) < -1e-9 or np.shape(result)[-1:] != (1,):
        raise NoMatchError
    return result


def _keeps_rows(eqn: Any, old_shape: tuple[int, ...], new_shape: tuple[int, ...]) -> bool:
    """Whether a reshape only adds or drops axes of length 1, or broadcasts rows over equal channels."""
    if eqn.primitive.name != "broadcast_in_dim":
        return [n for n in old_shape if n != 1] == [n for n in new_shape if n != 1]
    output_axes = eqn.params["broadcast_dimensions"]
    keeps_leading = list(output_axes) == list(range(len(old_shape)))
    return keeps_leading and all(
        n == new_shape[i] for n, i in zip(old_shape[: len(new_shape) - 1], output_axes, strict=False)
    )
