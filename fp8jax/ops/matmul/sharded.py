"""Products of quantized matrices that several devices may share."""

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
    """Whether all are quantized, in codes that lie as the matrix does."""
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
    """`function(dtype, a, b)`, a product a @ b.T.

    XLA by itself would gather what it has decoded. So each device is sent codes and decodes what it reads, and where a
    contraction is cut it sends its sums in 16 bits, as those of a gradient in bf16: in fp32 they would travel twice as
    long.

    Args:
        function: closes over no array.
        static: what tells it from other functions.
        dtype: of the result.
        a, b: (M, K) and (N, K), quantized or not; what is not `is_unpacked_quantized` is left to XLA.
        out_spec: as of `fp8jax.ops.matmul.matmul.matmul`.
        kernel: as of `fp8jax.ops.dispatch.partition.run_partitioned`.
    """
    if not is_unpacked_quantized(a, b) or 0 in (*a.shape, *b.shape):
        return sharding.matmul_sharded(functools.partial(function, dtype), a, b, out_spec)

    def multiply_shard(dim_sharding: DimSharding, a: Any, b: Any) -> Array:
        out = jnp.dtype(
            jnp.bfloat16 if "k" in dim_sharding.axes else dtype
        )  # of one kind: jitted kernels are found by it
        with product_name_scope(strip_residual(a), b):  # XLA's partitioner traces it anew
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
    """A quantized matrix without its residual, if it has one; others as they are."""
    return q.base if isinstance(q, FallbackTensor) else q
