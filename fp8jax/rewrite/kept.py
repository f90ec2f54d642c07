"""What the backward pass of an equation keeps anyway: no reader needs to keep it once more (COAT, appendix D)."""

from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.rewrite.graph import Node, Value
from fp8jax.rewrite.primitives import Equation


def keeps(node: Node, value: Value) -> bool:
    """Whether the backward pass of an equation keeps one of its results, as that of flash attention does."""
    step, floats = Equation(node.eqn, node.scope), [jnp.issubdtype(v.dtype, jnp.inexact) for v in node.operands]

    def differentiate(moving: list[Any], fixed: list[Any]) -> Any:
        def run(moving: list[Any]) -> Any:
            ends, rest = iter(moving), iter(fixed)
            return step([next(ends) if moves else next(rest) for moves in floats])

        return jax.vjp(run, moving)

    kinds = [(jax.ShapeDtypeStruct(v.shape, v.dtype), moves) for v, moves in zip(node.operands, floats, strict=True)]
    moving, fixed = ([kind for kind, moves in kinds if moves == wanted] for wanted in (True, False))
    try:
        jaxpr = jax.make_jaxpr(differentiate)(moving, fixed).jaxpr
    except Exception:
        # What cannot be differentiated by itself, as a part of a mesh, keeps nothing that one could know of.
        return False
    results, kept = jaxpr.outvars[: len(node.results)], jaxpr.outvars[len(node.results) :]
    return any(v is results[node.results.index(value)] for v in kept)
