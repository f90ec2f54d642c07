"""The kernels for int8 in blocks of 128, of which the left operand's may have residuals: which, and their call."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fp8jax.core.qtensor import QTensor
from fp8jax.ops.choice import aimed, capability, missing_triton, named
from fp8jax.ops.cuts import Cut, notation
from fp8jax.ops.fallback import Pair
from fp8jax.ops.partition import partitioned

HOPPER, BLOCK = 90, 128
# GPUs of the kernel in Triton: those with int8 matrix units before Hopper that have bf16.
TRITON = range(80, 90)


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
    if not aimed().kernels:
        return "kernels are switched off"
    if capability() in TRITON:
        return missing_triton("matmul_int8_triton")
    if jax.__version_info__ < (0, 11) or capability() != HOPPER:
        return "it needs an Ampere, Ada or Hopper GPU, and on Hopper jax >= 0.11"
    return None


def language() -> Literal["mosaic", "triton"]:
    """What the kernel for the GPU is written in."""
    return "triton" if capability() in TRITON else "mosaic"


def run(dtype: DTypeLike, a: Pair | QTensor, b: QTensor, spec: Sequence[Any] | None = None) -> Array:
    """a @ b.T by the kernel, of matrices that may be sharded; where a contraction is cut, parts are summed.

    `spec` is how the result is to lie on Explicit mesh axes, if it is known.
    """
    base = a.base if isinstance(a, Pair) else a
    parts = notation(base.spec, base.shape, "m k")
    ins = (parts, parts, parts[1]) if isinstance(a, Pair) else parts
    free = aimed().free_multiprocessors
    static = (language(), free, isinstance(a, Pair), str(jnp.dtype(dtype)), base.spec, b.spec)
    multiply = functools.partial(_multiply, free, jnp.dtype(dtype))
    sides = ins, notation(b.spec, b.shape, "n k")
    product: Array = partitioned("int8_product", static, multiply, (a, b), sides, "m n", sums="k", wanted=spec)
    return product


def _multiply(free: int, dtype: DTypeLike, cut: Cut, a: Pair | QTensor, b: QTensor) -> Array:
    # Sums over devices are of 16 bits, as those of a gradient in bf16.
    out = jnp.bfloat16 if "k" in cut.axes or dtype == jnp.bfloat16 else jnp.float32
    with named(a.base if isinstance(a, Pair) else a, b):  # XLA's partitioner traces it anew
        product = _kernel(language(), free, out, a, b)
    return cut.total(product, "k", "m n").astype(dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _kernel(written_in: str, free: int, out: DTypeLike, a: Pair | QTensor, b: QTensor) -> Array:
    """Jitted, because lowering a Mosaic kernel takes most of a second: equal products of a program are lowered once."""
    from pallas_kernels import hopper
    from pallas_kernels.matmul_int8_mosaic import FallbackResidual, matmul_int8_block

    multiply: Any = matmul_int8_block
    if written_in == "triton":
        from pallas_kernels import matmul_int8_triton

        multiply = functools.partial(matmul_int8_triton.matmul_int8_block, compute_capability=capability())
    base, residual = a, None
    if isinstance(a, Pair):
        base, residual = a.base, FallbackResidual(a.residual.codes, a.residual.scale, a.used)
    assert isinstance(base, QTensor)
    with hopper.left(free):
        product = multiply(base.codes, b.codes, base.scale, b.scale, residual=residual, out_dtype=out)
    # Behind a barrier, as in `fp8jax.ops.matmul_hopper`: no second call for a loop that saves the result.
    barred: Array = jax.lax.optimization_barrier(product)
    return barred
