"""Products of quantized matrices that several devices may share."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fp8jax.core.qtensor import QTensor
from fp8jax.ops import sharding
from fp8jax.ops.choice import named
from fp8jax.ops.cuts import Cut, notation
from fp8jax.ops.fallback import Pair
from fp8jax.ops.partition import partitioned


def coded(*operands: Any) -> bool:
    """Whether all are quantized, in codes that lie as the matrix does."""
    return all(isinstance(q, QTensor | Pair) and not base(q).spec.packed for q in operands)


def shared(
    function: Callable[..., Array],
    static: Any,
    dtype: DTypeLike,
    a: Any,
    b: Any,
    spec: Sequence[Any] | None,
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
        a, b: (M, K) and (N, K), quantized or not; what is not `coded` is left to XLA.
        spec: as of `fp8jax.ops.matmul.matmul`.
        kernel: as of `fp8jax.ops.partition.partitioned`.
    """
    if not coded(a, b) or 0 in (*a.shape, *b.shape):
        return sharding.multiply(functools.partial(function, dtype), a, b, spec)

    def multiply(cut: Cut, a: Any, b: Any) -> Array:
        out = jnp.dtype(jnp.bfloat16 if "k" in cut.axes else dtype)  # of one kind: jitted kernels are found by it
        with named(base(a), b):  # XLA's partitioner traces it anew
            return cut.total(function(out, a, b), "k", "m n").astype(dtype)

    parts = notation(base(a).spec, a.shape, "m k")
    ins = (parts, parts, parts[-1]) if isinstance(a, Pair) else parts, notation(b.spec, b.shape, "n k")
    about = static, isinstance(a, Pair), str(jnp.dtype(dtype)), base(a).spec, b.spec
    product: Array = partitioned(
        "product" if kernel else "plain_product", about, multiply, (a, b), ins, "m n",
        sums="k", wanted=spec, kernel=kernel,
    )  # fmt: skip
    return product


def base(q: Any) -> Any:
    """A quantized matrix without its residual, if it has one; others as they are."""
    return q.base if isinstance(q, Pair) else q
