"""Products in XLA's own operations of quantized matrices that several devices may share."""

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
    return all(isinstance(q, QTensor | Pair) and not _base(q).spec.packed for q in operands)


def shared(
    function: Callable[..., Array], static: Any, dtype: DTypeLike, a: Any, b: Any, spec: Sequence[Any] | None
) -> Array:
    """`function(dtype, a, b)`, a product a @ b.T.

    XLA by itself would gather what it has decoded. So each device is sent codes and decodes what it reads, and where a
    contraction is cut it sends its sums in 16 bits, as kernels do.

    Args:
        function: of XLA's own operations; it closes over no array.
        static: what tells it from other functions.
        dtype: of the result.
        a, b: (M, K) and (N, K), quantized or not; what is not `coded` is left to XLA.
        spec: as of `fp8jax.ops.matmul.matmul`.
    """
    if not coded(a, b) or 0 in (*a.shape, *b.shape):
        return sharding.multiply(functools.partial(function, dtype), a, b, spec)

    def multiply(cut: Cut, a: Any, b: Any) -> Array:
        out = jnp.bfloat16 if "k" in cut.axes else dtype
        with named(_base(a), _base(b)):  # XLA's partitioner traces it anew
            return cut.total(function(out, a, b), "k", "m n").astype(dtype)

    ins = _parts(a, "m k"), _parts(b, "n k")
    about = static, str(jnp.dtype(dtype)), _base(a).spec, _base(b).spec
    product: Array = partitioned(
        "plain_product", about, multiply, (a, b), ins, "m n", sums="k", wanted=spec, kernel=False
    )  # fmt: skip
    return product


def _base(q: QTensor | Pair) -> QTensor:
    return q.base if isinstance(q, Pair) else q


def _parts(q: QTensor | Pair, names: str) -> Any:
    parts = notation(_base(q).spec, q.shape, names)
    return (parts, parts, parts[1]) if isinstance(q, Pair) else parts
