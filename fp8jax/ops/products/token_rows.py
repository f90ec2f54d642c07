"""Tokens as the rows of grouped products, and sums of the rows of each token."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fp8jax.ops.autodiff.residuals import ArrayFacts, attach_facts

# Named scope of the collectives of tokens that devices gather for their experts.
TOKEN_GATHER = "token_gather"


@jax.custom_vjp
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
    return jnp.sum(y[rows].astype(jnp.float32), 1).astype(y.dtype)


def _sum_rows_bwd(index: Array, dy: Array) -> tuple[Any, ...]:
    ct = dy[index]
    attach_facts(ct, ArrayFacts(row_source=(dy, index)))
    return ct, None, None


sum_rows.defvjp(lambda y, index, rows: (sum_rows(y, index, rows), index), _sum_rows_bwd)
