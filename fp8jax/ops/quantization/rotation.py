"""The randomized Hadamard transformation, which spreads outliers over a group before it is quantized.

The transformation is orthogonal. A product is unchanged if both operands are transformed along the contraction.
"""

import hashlib

import jax.numpy as jnp
import numpy as np
from jax import Array

from fp8jax.core import blocks


def signs(size: int) -> np.ndarray:
    """Return the fixed random signs of a group, fp32 (size,), at most 256."""
    # Bits of a linear function of the index, such as a CRC, would only permute the rows of H.
    bits = np.unpackbits(np.frombuffer(hashlib.sha256(b"signs").digest(), np.uint8))
    return 1 - 2 * bits[:size].astype(np.float32)


def rotate_rows(x: Array, size: int | None) -> Array:
    """Transform each group of consecutive rows by H D / sqrt(size), with the Hadamard matrix H and signs D.

    Args:
        x: floating array (rows, n). Rows after the last full group stay unchanged.
        size: rows of a group, a power of two; None returns `x`.

    Returns:
        fp32 (rows, n). Sums are those of adjacent rows first, then of pairs, and so on.
    """
    if size is None:
        return x

    def transform(x: Array) -> tuple[Array]:
        n_rows, columns = x.shape[0] - x.shape[0] % size, x.shape[1]
        values = x.astype(jnp.float32)
        y = values[:n_rows].reshape(n_rows // size, size, columns) * signs(size)[None, :, None]
        half = 1
        while half < size:
            y = y.reshape(n_rows // (2 * half), 2, half, columns)
            y = jnp.stack([y[:, 0] + y[:, 1], y[:, 0] - y[:, 1]], axis=1)
            half *= 2
        y = y.reshape(n_rows, columns) * np.float32(size**-0.5)
        return (y if n_rows == x.shape[0] else jnp.concatenate([y, values[n_rows:]]),)

    return blocks.on_logical_array(transform, x, out_shapes=[x.shape])[0]
