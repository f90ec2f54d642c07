"""The kernels for int8 in blocks of 128, of which the left operand's may have residuals: which, and their call."""

import functools
from typing import Any, Literal

import jax
from jax import Array
from jax.typing import DTypeLike

from fp8jax.core.qtensor import QTensor
from fp8jax.ops.choice import capability, current_target, missing_triton
from fp8jax.ops.fallback import FallbackTensor

HOPPER, BLOCK_SIZE = 90, 128
# GPUs of the kernel in Triton: those with int8 matrix units before Hopper that have bf16.
TRITON_CAPABILITIES = range(80, 90)


def is_int8_blocks(a: QTensor, b: QTensor) -> bool:
    """Whether both are int8 in blocks of 128, so that the kernel for them takes their scales."""
    return all(
        (q.spec.format, q.spec.granularity, q.spec.group_size) == ("int8", "block", BLOCK_SIZE) and len(q.shape) == 2
        for q in (a, b)
    )


def unsupported_reason(a: QTensor, b: QTensor) -> str | None:
    """Why the kernel cannot multiply them, or None."""
    if not is_int8_blocks(a, b):
        return f"it takes int8 in blocks of {BLOCK_SIZE}, not {a.spec} with {b.spec}"
    if 0 in (*a.shape, *b.shape):
        return f"shapes {a.shape} and {b.shape} are empty"
    if not current_target().kernels:
        return "kernels are switched off"
    if capability() in TRITON_CAPABILITIES:
        return missing_triton("matmul_int8_triton")
    if jax.__version_info__ < (0, 11) or capability() != HOPPER:
        return "it needs an Ampere, Ada or Hopper GPU, and on Hopper jax >= 0.11"
    return None


def kernel_language() -> Literal["mosaic", "triton"]:
    """What the kernel for the GPU is written in."""
    return "triton" if capability() in TRITON_CAPABILITIES else "mosaic"


def matmul_int8(dtype: DTypeLike, a: FallbackTensor | QTensor, b: QTensor) -> Array:
    """a @ b.T by the kernel, in bf16 or fp32."""
    from pallas_kernels.matmul_int8_mosaic import FallbackResidual, matmul_int8_block

    kernel: Any = matmul_int8_block
    if kernel_language() == "triton":
        from pallas_kernels import matmul_int8_triton

        kernel = functools.partial(matmul_int8_triton.matmul_int8_block, compute_capability=capability())
    base, residual = a, None
    if isinstance(a, FallbackTensor):
        base, residual = a.base, FallbackResidual(a.residual.codes, a.residual.scale, a.fallback_mask)
    assert isinstance(base, QTensor)
    product: Array = kernel(base.codes, b.codes, base.scale, b.scale, residual=residual, out_dtype=dtype)
    return product
