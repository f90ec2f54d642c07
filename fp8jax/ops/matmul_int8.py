"""Products of int8 blocks of which the left operand's may have residuals: the kernel, and what stands for it."""

import functools

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fp8jax.core.qtensor import QTensor
from fp8jax.ops import int8_kernels, sharding
from fp8jax.ops import matmul as op
from fp8jax.ops.choice import Choice, capability, check_impl, named, on_cuda, run, tell
from fp8jax.ops.fallback import Pair
from fp8jax.ops.matmul_shared import shared

_K_MAJOR = (((1,), (1,)), ((), ()))


def matmul_pair(
    a: Pair, b: QTensor, *, dtype: DTypeLike = jnp.float32, impl: str = "auto", spec: tuple | None = None
) -> Array:
    """a @ b.T, of blocks with residuals and plain blocks (arXiv 2503.08040, algorithm 1).

    Sums over a block's length are exact, in int32, and enter fp32 under their two scales. On a CUDA GPU without the
    kernel both are decoded to bf16, which keeps the inputs that came in bf16 nearly whole.

    Args:
        a: (M, K). b: (N, K), int8 in blocks of the same side.
        dtype: of the result.
        impl: "auto", "xla" or "mosaic": "auto" is a kernel on Ampere, Ada and Hopper.
        spec: as of `fp8jax.ops.matmul.matmul`.

    Returns:
        (M, N) array.

    Raises:
        ValueError: shapes or blocks do not match; `impl` is unknown, or it is "mosaic" and the kernel cannot run.
    """
    if len(b.shape) != 2 or a.shape[1] != b.shape[1] or a.base.spec != b.spec:
        raise ValueError(f"matmul_pair takes (M, K) and (N, K) of one spec, not {a.shape} of {a.base.spec} and {b}")
    choice = _choose(a.base, b, impl, impl == "mosaic" or on_cuda())
    tell("fallback matmul", choice)
    spec = spec or sharding.product_sharding(a.base, b, _K_MAJOR)
    reference = functools.partial(_reference, dtype, spec)
    if choice.impl == "xla" and on_cuda() and impl != "xla":
        reference = functools.partial(shared, op.in_16_bits(), capability(), dtype, spec=spec)

    def kernel(a: Pair, b: QTensor) -> Array:
        product = int8_kernels.run(dtype, a, b, spec)
        return product if spec is None else sharding.place(product, spec, a.base.codes, b.codes)

    with named(a.base, b):
        product: Array = run(choice, impl, a, b, kernel=kernel, reference=reference)
        return product


def _choose(a: QTensor, b: QTensor, impl: str, cuda: bool) -> Choice:
    check_impl(impl, op.IMPLS)
    if impl == "xla":
        return Choice("xla", "asked for")
    reason = int8_kernels.unfit(a, b) if cuda else "it needs a CUDA GPU"
    if reason is None and not (impl == "mosaic" and int8_kernels.language() != "mosaic"):
        return Choice(int8_kernels.language(), "the kernel for int8 blocks of 128")
    reason = reason or "it needs a Hopper GPU"
    if impl == "mosaic":
        raise ValueError(f"impl 'mosaic' cannot run: {reason}")
    decoded = "; codes are decoded and multiplied in bf16" if cuda else ""
    return Choice("xla", f"not the kernel: {reason}{decoded}")


def _reference(dtype: DTypeLike, spec: tuple | None, a: Pair, b: QTensor) -> Array:
    product = functools.partial(op.matmul, impl="xla", spec=spec)
    return (product(a.base, b) + product(a.only_used(), b)).astype(dtype)
