"""What the backward pass of an equation keeps anyway: no reader needs to keep it once more (COAT, appendix D)."""

from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.rewrite.graph import Node, Value
from fp8jax.rewrite.primitives import Equation


def saves_output(node: Node, value: Value) -> bool:
    """Whether the backward pass of an equation keeps one of its results, as that of flash attention does."""
    run_equation, is_float = (
        Equation(node.eqn, node.scope),
        [jnp.issubdtype(v.dtype, jnp.inexact) for v in node.operands],
    )

    def differentiate(float_inputs: list[Any], other_inputs: list[Any]) -> Any:
        def run(float_inputs: list[Any]) -> Any:
            float_iter, other_iter = iter(float_inputs), iter(other_inputs)
            return run_equation([next(float_iter) if moves else next(other_iter) for moves in is_float])

        return jax.vjp(run, float_inputs)

    operands = [
        (jax.ShapeDtypeStruct(v.shape, v.dtype), moves) for v, moves in zip(node.operands, is_float, strict=True)
    ]
    moving, fixed = ([kind for kind, moves in operands if moves == wanted] for wanted in (True, False))
    try:
        jaxpr = jax.make_jaxpr(differentiate)(moving, fixed).jaxpr
    except Exception:
        # What cannot be differentiated by itself, as a part of a mesh, keeps nothing that one could know of.
        return False
    results, residuals = jaxpr.outvars[: len(node.results)], jaxpr.outvars[len(node.results) :]
    return any(v is results[node.results.index(value)] for v in residuals)
