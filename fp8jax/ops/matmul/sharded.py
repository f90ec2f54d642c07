"""Products of sharded quantized matrices."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fp8jax.core.qtensor import QTensor
from fp8jax.ops.dispatch import sharding
from fp8jax.ops.dispatch.choice import product_name_scope
from fp8jax.ops.dispatch.partition import run_partitioned
from fp8jax.ops.dispatch.shard_notation import DimSharding, notation
from fp8jax.ops.quantization.fallback import FallbackTensor


def is_unpacked_quantized(*operands: Any) -> bool:
    """Return whether all operands are quantized and unpacked."""
    return all(isinstance(q, QTensor | FallbackTensor) and not strip_residual(q).spec.is_packed for q in operands)


def sharded_matmul(
    function: Callable[..., Array],
    static: Any,
    dtype: DTypeLike,
    a: Any,
    b: Any,
    out_spec: Sequence[Any] | None,
    *,
    kernel: bool = False,
) -> Array:
    """Return `function(dtype, a, b)`, a product a @ b.T, on shards.

    XLA would gather decoded operands. Here devices exchange codes and decode their shard. Sums of a sharded contraction
    travel in 16 bits, like bf16 gradients.

    Args:
        function: (dtype, a, b) -> product. It must not close over arrays.
        static: hashable key of the function.
        dtype: dtype of the result.
        a, b: (M, K) and (N, K), quantized or not. Without `is_unpacked_quantized` XLA partitions the product.
        out_spec: as in `fp8jax.ops.matmul.matmul.matmul`.
        kernel: as in `fp8jax.ops.dispatch.partition.run_partitioned`.
    """
    if not is_unpacked_quantized(a, b) or 0 in (*a.shape, *b.shape):
        return sharding.matmul_sharded(functools.partial(function, dtype), a, b, out_spec)

    def multiply_shard(dim_sharding: DimSharding, a: Any, b: Any) -> Array:
        out = jnp.dtype(jnp.bfloat16 if "k" in dim_sharding.axes else dtype)  # a np.dtype, so that jit caches hit
        with product_name_scope(strip_residual(a), b):  # XLA's partitioner traces this again
            return dim_sharding.psum(function(out, a, b), "k", "m n").astype(dtype)

    a_notation = notation(strip_residual(a).spec, a.shape, "m k")
    ins = (
        (a_notation, a_notation, a_notation[-1]) if isinstance(a, FallbackTensor) else a_notation,
        notation(b.spec, b.shape, "n k"),
    )
    static_key = static, isinstance(a, FallbackTensor), str(jnp.dtype(dtype)), strip_residual(a).spec, b.spec
    product: Array = run_partitioned(
        "product" if kernel else "plain_product", static_key, multiply_shard, (a, b), ins, "m n",
        sum_dim="k", out_spec=out_spec, is_kernel=kernel,
    )  # fmt: skip
    return product


def strip_residual(q: Any) -> Any:
    """Return the base of a `FallbackTensor`, or the operand itself."""
    return q.base if isinstance(q, FallbackTensor) else q
