"""What part of a program computes, by its values: it is evaluated in float64 at a few points.

Values prove a function of the arrays that are put in, and where each step of it has the derivative that its own values
have, its derivative, too. So nothing is evaluated that has another one: a stop_gradient, a custom_jvp or custom_vjp, a
choice by condition, a kernel.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import scipy.special

from fp8jax.rewrite.graph import Node, Value
from fp8jax.rewrite.primitives import RESHAPES, SAME

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative},
    **{"exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log1p": np.log1p, "tanh": np.tanh, "pow": np.power},
    **{"logistic": scipy.special.expit, "erf": scipy.special.erf, "erfc": scipy.special.erfc},
    **{"square": np.square, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x)},
}
_MOST = 64  # nodes; no norm or activation has as many


class UnlikeError(Exception):
    """A part of a program is no function of the arrays that were put in, as far as can be known."""


def evaluate(value: Value, at: dict[Value, Any], leaf: Callable[[Value], Any]) -> Any:
    """A value where others are given, float64.

    An array (..., channels) is (rows, channels) here; a number for each row (rows, 1); a parameter (1, channels).

    Args:
        value: what is computed.
        at: arrays in place of values; what is computed on the way is added.
        leaf: what an array is that is not given and may not be computed: it returns an array, or raises `UnlikeError`.

    Raises:
        UnlikeError: it cannot be computed so.
    """
    if value in at:
        return at[value]
    if len(at) > _MOST:
        raise UnlikeError
    at[value] = result = _result(value, at, leaf)
    return result


def _result(value: Value, at: dict[Value, Any], leaf: Callable[[Value], Any]) -> Any:
    node, shape = value.node, value.shape
    if value.constant is not None:
        return np.float64(value.constant)
    constant = value.fixed and not next(iter(at)).fixed
    if node is None or node.operation is not None or not value.data or constant:
        return leaf(value)
    look = lambda operand: evaluate(operand, at, leaf)  # noqa: E731
    if node.kind in FUNCTIONS:
        return FUNCTIONS[node.kind](*map(look, node.operands))
    if node.kind == "integer_pow":
        return look(node.operands[0]) ** node.eqn.params["y"]
    if node.kind == "max" and any(operand.constant == 0 for operand in node.operands):
        # A variance that rounding made negative is none; of anything else this is a function with a corner.
        return _no_less_than_zero(*map(look, node.operands))
    if node.kind == "reduce_sum":
        operand = node.operands[0]
        if tuple(node.eqn.params["axes"]) != (operand.aval.ndim - 1,):
            raise UnlikeError
        array = look(operand)
        # Statistics are of whole rows: elsewhere a sum has other terms than these.
        if np.shape(array)[-1:] != operand.shape[-1:]:
            raise UnlikeError
        return np.sum(array, -1, keepdims=True)
    if node.kind in SAME:
        return look(node.operands[0])
    if factors := spread_factors(node):
        return look(factors[0]) * look(factors[1])
    if node.kind in RESHAPES and _of_rows(node.eqn, node.operands[0].shape, shape):
        return look(node.operands[0])
    return leaf(value)


def spread_factors(node: Node) -> list[Value]:
    """What `einsum("...k,k->...k")` multiplies element by element; nothing of any other node.

    JAX writes it as a product that contracts nothing, with the channels as its batch, and moves these to the end again.
    """
    product = node.operands[0].node if node.kind == "transpose" else None
    if product is None or product.operation is not None or product.kind != "dot_general":
        return []
    (_, batch), last = product.eqn.params["dimension_numbers"], len(node.eqn.params["permutation"]) - 1
    factors = product.operands
    by_channel = all(list(axes) == [x.aval.ndim - 1] for x, axes in zip(factors, batch, strict=True))
    vector = min(x.aval.ndim for x in factors) == 1
    back = tuple(node.eqn.params["permutation"]) == (*range(1, last + 1), 0)
    return list(factors) if by_channel and vector and back else []


def _no_less_than_zero(a: Any, b: Any) -> Any:
    result = np.maximum(a, b)
    if np.min(np.where(np.ndim(a) == 0, b, a)) < -1e-9 or np.shape(result)[-1:] != (1,):
        raise UnlikeError
    return result


def _of_rows(eqn: Any, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a layout leaves rows and channels what they are: axes of one element come and go, and rows are spread
    over channels that are alike."""
    if eqn.primitive.name != "broadcast_in_dim":
        return [n for n in before if n != 1] == [n for n in after if n != 1]
    places = eqn.params["broadcast_dimensions"]
    leading = list(places) == list(range(len(before)))
    return leading and all(n == after[i] for n, i in zip(before[: len(after) - 1], places, strict=False))
