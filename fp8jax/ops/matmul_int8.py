"""Products of int8 blocks, of which the left operand's may have residuals: kernels, and what stands for them."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fp8jax.core.qtensor import QTensor
from fp8jax.ops import matmul as op
from fp8jax.ops import sharding
from fp8jax.ops.choice import Choice, by_platform, capability, local, on_cuda, tell, unplaced
from fp8jax.ops.fallback import Pair
from fp8jax.ops.partition import Cut, notation, partitioned

IMPLS = ("auto", "xla", "mosaic")
HOPPER, BLOCK = 90, 128
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
        impl: "auto", "xla" or "mosaic"; see `chosen`.
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
        reference = functools.partial(_decoded, dtype, spec)

    def kernel(a: Pair, b: QTensor) -> Array:
        product = run(dtype, a, b)
        return product if spec is None else sharding.place(product, spec, a.base.codes, b.codes)

    if choice.impl == "xla":
        return reference(a, b)
    return local(kernel)(a, b) if impl == "mosaic" else by_platform(a, b, cuda=kernel, default=reference)


def chosen(a: QTensor, b: QTensor, *, impl: str = "auto", platform: str | None = None) -> Choice:
    """What multiplies two operands in int8 blocks, with residuals or without: "auto" is the kernel on Hopper GPUs."""
    return _choose(a, b, impl, on_cuda(platform))


def _choose(a: QTensor, b: QTensor, impl: str, cuda: bool) -> Choice:
    if impl not in IMPLS:
        raise ValueError(f"unknown impl {impl!r}; it is one of {', '.join(IMPLS)}")
    if impl == "xla":
        return Choice("xla", "asked for")
    reason = unfit(a, b) if cuda else "it needs a CUDA GPU"
    if reason is None:
        return Choice("mosaic", "the kernel for int8 blocks of 128")
    if impl == "mosaic":
        raise ValueError(f"impl 'mosaic' cannot run: {reason}")
    decoded = "; codes are decoded and multiplied in bf16" if cuda else ""
    return Choice("xla", f"not the kernel: {reason}{decoded}")


def fits(a: QTensor, b: QTensor) -> bool:
    """Whether both are int8 in blocks of 128, so that the kernel for them takes their scales."""
    return all(
        (q.spec.format, q.spec.granularity, q.spec.group_size) == ("int8", "block", BLOCK) and len(q.shape) == 2
        for q in (a, b)
    )


def unfit(a: QTensor, b: QTensor) -> str | None:
    """Why the kernel cannot multiply them, or None."""
    if not fits(a, b):
        return f"it takes int8 in blocks of {BLOCK}, not {a.spec} with {b.spec}"
    if 0 in (*a.shape, *b.shape):
        return f"shapes {a.shape} and {b.shape} are empty"
    if jax.__version_info__ < (0, 11) or capability() != HOPPER:
        return "it needs a Hopper GPU and jax >= 0.11"
    return unplaced()


def run(dtype: DTypeLike, a: Pair | QTensor, b: QTensor) -> Array:
    """a @ b.T by the kernel, of matrices that may be sharded; where a contraction is cut, parts are summed."""
    base = a.base if isinstance(a, Pair) else a
    parts = notation(base.spec, base.shape, "m k")
    ins = (parts, parts, parts[1]) if isinstance(a, Pair) else parts
    static = (isinstance(a, Pair), str(jnp.dtype(dtype)), base.spec, b.spec)
    multiply = functools.partial(_multiply, jnp.dtype(dtype))
    product: Array = partitioned(
        "int8_product", static, multiply, (a, b), (ins, notation(b.spec, b.shape, "n k")), "m n"
    )
    return product


def _multiply(dtype: DTypeLike, cut: Cut, a: Pair | QTensor, b: QTensor) -> Array:
    # Sums over devices are of 16 bits, as those of a gradient in bf16.
    out = jnp.bfloat16 if "k" in cut.axes or dtype == jnp.bfloat16 else jnp.float32
    return cut.total(_kernel(out, a, b), "k").astype(dtype)


@functools.partial(jax.jit, static_argnums=0)
def _kernel(out: DTypeLike, a: Pair | QTensor, b: QTensor) -> Array:
    """Jitted, because lowering a Mosaic kernel takes most of a second: equal products of a program are lowered once."""
    from pallas_kernels.matmul_int8_mosaic import Residual, matmul_int8_block

    base, residual = a, None
    if isinstance(a, Pair):
        base, residual = a.base, Residual(a.residual.codes, a.residual.scale, a.used)
    assert isinstance(base, QTensor)
    return matmul_int8_block(base.codes, b.codes, base.scale, b.scale, residual=residual, out_dtype=out)


def _reference(dtype: DTypeLike, spec: tuple | None, a: Pair, b: QTensor) -> Array:
    product = functools.partial(op.matmul, impl="xla", spec=spec)
    return (product(a.base, b) + product(a.only_used(), b)).astype(dtype)


def _decoded(dtype: DTypeLike, spec: tuple | None, a: Pair, b: QTensor) -> Array:
    return op.matmul(a.dequantize(jnp.bfloat16), b.dequantize(jnp.bfloat16), dtype=dtype, spec=spec)
