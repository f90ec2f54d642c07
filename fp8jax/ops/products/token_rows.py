"""Tokens as the rows of grouped products, and sums of the rows of each token."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fp8jax.ops.autodiff.residuals import ArrayFacts, GradientFacts, current_gradient_facts


def sum_rows(y: Array, index: Array, rows: Array) -> Array:
    """Return the sum of each token's rows, computed in fp32.

    JAX would differentiate the gather by a scatter. This derivative is a gather. The product before it quantizes the
    gradient of the tokens before they are permuted.

    Args:
        y: (rows, n), any floating dtype.
        index: int32 (rows,), the token of each row.
        rows: int32 (tokens, k), the rows of each token.

    Returns:
        (tokens, n) in the dtype of `y`.
    """
    result: Array = _sum_rows(current_gradient_facts(), y, index, rows)
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_rows(gradient_facts: GradientFacts, y: Array, index: Array, rows: Array) -> Array:
    return jnp.sum(y[rows].astype(jnp.float32), 1).astype(y.dtype)


def _sum_rows_fwd(gradient_facts: GradientFacts, y: Array, index: Array, rows: Array) -> tuple[Array, Array]:
    return _sum_rows(gradient_facts, y, index, rows), index


def _sum_rows_bwd(gradient_facts: GradientFacts, index: Array, dy: Array) -> tuple[Any, ...]:
    ct = dy[index]
    gradient_facts.attach(ct, ArrayFacts(row_source=(dy, index)))
    return ct, None, None


_sum_rows.defvjp(_sum_rows_fwd, _sum_rows_bwd)
