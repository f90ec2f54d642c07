"""Pure-JAX references of the matmul kernels, with the same arguments and contract, on any device.

They decode the operands and multiply in fp32: as exact as fp32 sums, and slow on a GPU.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    scale: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    column_scale: jax.Array | None = None,
    out_dtype: Any = jnp.bfloat16,
    fast: bool = True,
) -> jax.Array:
    """Reference of `pallas_kernels.matmul.matmul_mosaic.matmul`; fp32 sums whether `fast` or not."""
    out = _product(a.astype(jnp.float32), b.astype(jnp.float32))
    out = _epilogue(out, scale, row_scale, column_scale)
    return out.astype(out_dtype)


def matmul_block(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *,
    out_dtype: Any = jnp.bfloat16,
) -> jax.Array:
    """Reference of `pallas_kernels.matmul.matmul_block_mosaic.matmul_block`."""
    k, n = a.shape[1], b.shape[0]
    if b_scale.shape[0] != n:
        b_scale = jnp.repeat(b_scale, 128, axis=0)[:n]
    left = a.astype(jnp.float32) * jnp.repeat(a_scale, 128, axis=1)[:, :k]
    right = b.astype(jnp.float32) * jnp.repeat(b_scale, 128, axis=1)[:, :k]
    return _product(left, right).astype(out_dtype)


def matmul_mx(
    a: jax.Array,
    b: jax.Array,
    a_exponent: jax.Array,
    *,
    scale: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    column_scale: jax.Array | None = None,
    out_dtype: Any = jnp.bfloat16,
) -> jax.Array:
    """Reference of `pallas_kernels.matmul.matmul_mx_mosaic.matmul_mx`."""
    power = lax.bitcast_convert_type(a_exponent.astype(jnp.int32) << 23, jnp.float32)
    left = a.astype(jnp.float32) * jnp.repeat(power, 32, axis=1)[:, : a.shape[1]]
    out = _product(left, b.astype(jnp.float32))
    return _epilogue(out, scale, row_scale, column_scale).astype(out_dtype)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)


def _epilogue(
    out: jax.Array,
    scale: jax.Array | None,
    row_scale: jax.Array | None,
    column_scale: jax.Array | None,
) -> jax.Array:
    if scale is not None:
        out = out * scale
    if row_scale is not None:
        out = out * row_scale[:, None]
    if column_scale is not None:
        out = out * column_scale[None, :]
    return out
