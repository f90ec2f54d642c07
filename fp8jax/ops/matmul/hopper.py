"""Which kernel multiplies two quantized matrices on a GPU, and how it is called."""

import functools
import os
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import blocks, formats
from fp8jax.core.products import dot_general
from fp8jax.core.qtensor import QTensor
from fp8jax.ops.dispatch.choice import Choice, capability, current_target, missing_triton
from fp8jax.ops.matmul.sharded import sharded_matmul, strip_residual
from fp8jax.ops.quantization.fallback import FallbackTensor
from fp8jax.ops.quantization.microscaling import fold_microscales, is_foldable

HOPPER, MICROSCALING, BLOCK_SIZE = 90, 100, 128
# GPUs of the kernel in Triton: those with int8 matrix units before Hopper that have bf16.
TRITON_CAPABILITIES = range(80, 90)


def is_int8_blocks(a: QTensor, b: QTensor) -> bool:
    """Whether both are int8 in blocks of 128, so that the kernel for them takes their scales."""
    return all(
        (q.spec.format, q.spec.granularity, q.spec.group_size) == ("int8", "block", BLOCK_SIZE) and len(q.shape) == 2
        for q in (a, b)
    )


def unsupported_int8_reason(a: QTensor, b: QTensor) -> str | None:
    """Why the kernel of int8 blocks cannot multiply them, or None."""
    if not is_int8_blocks(a, b):
        return f"it takes int8 in blocks of {BLOCK_SIZE}, not {a.spec} with {b.spec}"
    if 0 in (*a.shape, *b.shape):
        return f"shapes {a.shape} and {b.shape} are empty"
    if not current_target().kernels:
        return "kernels are switched off"
    if capability() in TRITON_CAPABILITIES:
        return missing_triton("matmul.matmul_int8_triton")
    if jax.__version_info__ < (0, 11) or capability() != HOPPER:
        return "it needs an Ampere, Ada or Hopper GPU, and on Hopper jax >= 0.11"
    return None


def kernel_language() -> Literal["mosaic", "triton"]:
    """What the kernel for the GPU is written in."""
    return "triton" if capability() in TRITON_CAPABILITIES else "mosaic"


def matmul_int8(dtype: DTypeLike, a: FallbackTensor | QTensor, b: QTensor) -> Array:
    """a @ b.T by the kernel, in bf16 or fp32."""
    from pallas_kernels.matmul.matmul_int8_mosaic import FallbackResidual, matmul_int8_block

    kernel: Any = matmul_int8_block
    if kernel_language() == "triton":
        from pallas_kernels.matmul import matmul_int8_triton

        kernel = functools.partial(matmul_int8_triton.matmul_int8_block, compute_capability=capability())
    base, residual = a, None
    if isinstance(a, FallbackTensor):
        base, residual = a.base, FallbackResidual(a.residual.codes, a.residual.scale, a.fallback_mask)
    assert isinstance(base, QTensor)
    product: Array = kernel(base.codes, b.codes, base.scale, b.scale, residual=residual, out_dtype=dtype)
    return product


_NO_TRITON_GEMM = "--xla_gpu_enable_triton_gemm=false"
_K_MAJOR = (((1,), (1,)), ((), ()))
KernelName = Literal["row", "block", "mx", "mx right", "int8"]


def choose_kernel(a: Any, b: Any) -> tuple[Choice, KernelName | Literal["cublas", "native"] | None]:
    """What multiplies them best on a CUDA GPU, and how `run` calls it; None for the reference.

    With one scale for each operand cuBLASLt's FP8 product and ours lie within some per cent of each other on an H200.
    Of ten shapes in three runs of `experiments.bench gemm` ours led each time for 16384 x 22016 x 4096 alone, by 3 to
    10 %; for the others the sign changed from run to run, or ours took up to 16 % longer. XLA also lets cuBLASLt add
    what a result is added to, which saves a pass worth more: so it is cuBLASLt for every shape. But XLA calls it with
    8-bit operands only where its own Triton products are switched off (XLA_FLAGS=--xla_gpu_enable_triton_gemm=false):
    otherwise it may widen the operands to 16 bits, so that on Hopper the kernel is taken, and elsewhere the reference,
    which rounds what codes stand for once. Scales of rows, which cuBLASLt leaves to a second kernel of XLA, and of
    groups are ours; so are those of int8 products, whose int32 sums XLA writes and reads again.
    """
    kernel = find_kernel(a, b)
    if kernel == "int8":
        if (reason := unsupported_int8_reason(strip_residual(a), b)) is not None:
            return Choice("xla", f"not the kernel: {reason}"), None
        return Choice(kernel_language(), f"the kernel for {_DESCRIPTIONS['int8']}"), "int8"
    fp8 = _is_fp8_pair(a, b)
    if not (fp8 or _is_int8_pair(a, b)) or 0 in (*a.shape, *b.shape):
        return Choice("xla", "the kernels take two FP8 or two int8 operands that are not empty"), None
    e5m2 = a.spec.format == b.spec.format == "e5m2"
    per_tensor = all(q.spec.granularity == "tensor" for q in (a, b))
    cublas = fp8 and per_tensor and not e5m2 and capability() >= 89
    if cublas and _is_triton_gemm_off():
        return Choice("xla", "cuBLASLt's product, scales applied in it"), "cublas"
    if capability() >= MICROSCALING and fp8 and _has_native_microscaling(a, b):
        return Choice("xla", "jax.nn.scaled_matmul, in the GPU's own microscaling"), "native"
    if (reason := _kernel_unsupported_reason(a, b)) is not None or kernel is None:
        remedy = f"; with XLA_FLAGS={_NO_TRITON_GEMM} cuBLASLt multiplies these codes" if cublas else ""
        return Choice("xla", f"not the kernel: {reason}{remedy}"), None
    return Choice("mosaic", f"the kernel for scales of {_DESCRIPTIONS[kernel]}"), kernel


def _is_fp8_pair(a: QTensor, b: QTensor) -> bool:
    return all(formats.get(q.spec.format).is_fp8 for q in (a, b))


def _is_int8_pair(a: QTensor, b: QTensor) -> bool:
    return a.spec.format == b.spec.format == "int8"


def _is_triton_gemm_off() -> bool:
    return _NO_TRITON_GEMM in os.environ.get("XLA_FLAGS", "").split()


_DESCRIPTIONS = {
    "row": "tensors and rows",
    "block": "groups of 128",
    "mx": "rows, codes folded first, or, exactly, of microscaled groups of 32",
    "mx right": "rows, codes folded first, or, exactly, of microscaled groups of 32",
    "int8": "int8 blocks of 128",
}


def unsupported_reason(a: Any, b: Any) -> str | None:
    """Why no Mosaic kernel can multiply them, or None."""
    if find_kernel(a, b) == "int8":
        other = None if kernel_language() == "mosaic" else "it needs a Hopper GPU"
        return unsupported_int8_reason(strip_residual(a), b) or other
    if not (_is_fp8_pair(a, b) or _is_int8_pair(a, b)):
        return f"codes of {a.spec.format} and {b.spec.format} are neither both FP8 nor both int8"
    if 0 in (*a.shape, *b.shape):
        return f"shapes {a.shape} and {b.shape} are empty"
    if jax.__version_info__ < (0, 11):
        return f"it needs jax >= 0.11, found {jax.__version__}"
    return "it needs a Hopper GPU" if capability() != HOPPER else _kernel_unsupported_reason(a, b)


def _kernel_unsupported_reason(a: QTensor, b: QTensor) -> str | None:
    if not current_target().kernels:
        return "kernels are switched off"
    kernel = find_kernel(a, b)
    if _is_int8_pair(a, b) and kernel is None:  # on no GPU
        return f"int8 kernels take scales of tensors, rows and blocks of 128, not {a.spec} with {b.spec}"
    if jax.__version_info__ < (0, 11) or capability() != HOPPER:
        return "it needs a Hopper GPU and jax >= 0.11"
    if kernel is None:
        return f"no kernel for scales of {a.spec} with {b.spec}"
    if _is_int8_pair(a, b):
        from pallas_kernels.matmul.matmul_mosaic import MAX_INT8_K

        return None if a.shape[1] <= MAX_INT8_K else f"int32 holds sums of {MAX_INT8_K} products, not {a.shape[1]}"
    return None


def contraction_length(q: QTensor) -> int:
    """Length along the contraction over which a scale holds; 0 where it holds over all."""
    if q.spec.granularity == "mx":
        return q.spec.group_size or 0
    length = q.spec.block_shape(q.shape)[1]
    return 0 if blocks.is_whole_axis(length, q.shape[1]) else length


def find_kernel(a: Any, b: Any) -> KernelName | None:
    """The kernel for operands with such scales, if there is one; `unsupported_reason` may have something against it."""
    if isinstance(a, FallbackTensor) or is_int8_blocks(a, b):
        return "int8"
    micro = [q.spec.granularity == "mx" for q in (a, b)]
    if any(micro):
        mx_operand, other_operand = (a, b) if micro[0] else (b, a)
        if all(micro) or mx_operand.spec.group_size != 32 or contraction_length(other_operand):
            return None
        return "mx" if micro[0] else "mx right"
    sizes = {contraction_length(a), contraction_length(b)}
    if sizes == {0}:
        return "row"
    return "block" if sizes <= {0, 128} and _is_fp8_pair(a, b) else None


def _has_native_microscaling(a: QTensor, b: QTensor) -> bool:
    kinds = {q.spec.granularity for q in (a, b)}
    fits = all(q.spec.granularity != "mx" or q.spec.group_size == 32 for q in (a, b))
    return "mx" in kinds and kinds <= {"mx", "tensor", "token"} and fits and a.shape[1] % 32 == 0


def run(
    kernel_name: KernelName | Literal["cublas", "native"],
    exact: bool,
    fast: bool,
    dtype: DTypeLike,
    a: Any,
    b: QTensor,
    out_spec: Sequence[Any] | None = None,
) -> Array:
    """a @ b.T by what `choose_kernel` named, of matrices that may be sharded.

    Where a contraction is cut, parts are summed. `out_spec` is how the result is to lie on Explicit mesh axes,
    if it is known.
    """
    if kernel_name == "native":
        return _scaled_matmul(a, b).astype(dtype)
    if kernel_name == "mx" and not exact and is_foldable(a):
        kernel_name, a = "row", fold_microscales(a)
    if kernel_name == "mx right" and not exact and is_foldable(b):
        kernel_name, b = "row", fold_microscales(b)
    n_reserved, fast = current_target().free_multiprocessors, fast or kernel_name == "int8"
    multiply = (
        functools.partial(_cublas, fast)
        if kernel_name == "cublas"
        else functools.partial(_call_kernel, kernel_name, fast, n_reserved)
    )
    static = kernel_name, fast, n_reserved, kernel_language()
    return sharded_matmul(multiply, static, jnp.dtype(dtype), a, b, out_spec, kernel=True)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _call_kernel(kernel_name: KernelName, fast: bool, n_reserved: int, dtype: DTypeLike, a: Any, b: QTensor) -> Array:
    """Jitted, because lowering a Mosaic kernel takes most of a second: equal products of a program are lowered once."""
    from pallas_kernels.matmul.hopper import reserved_sms

    with reserved_sms(n_reserved):
        # Behind a barrier: where a loop saves the result, XLA (dynamic slice fusion) would make a second call for that.
        return lax.optimization_barrier(_run_kernel(kernel_name, fast, dtype, a, b))


def _run_kernel(kernel_name: KernelName, fast: bool, dtype: DTypeLike, a: Any, b: QTensor) -> Array:
    out = dtype if dtype in (jnp.bfloat16, jnp.float32) else jnp.float32
    if kernel_name == "int8":
        return matmul_int8(out, a, b).astype(dtype)
    if kernel_name == "row":
        return _row(a, b, fast, out).astype(dtype)
    if kernel_name == "block":
        return _block(a, b, out).astype(dtype)
    return (_mx(a, b, out) if kernel_name == "mx" else _mx(b, a, out).T).astype(dtype)


def accumulation_precision(fast: bool) -> lax.Precision:
    """What XLA makes of an FP8 product: with the highest precision cuBLASLt has fast accumulation off."""
    return lax.Precision.DEFAULT if fast else lax.Precision.HIGHEST


def _cublas(fast: bool, dtype: DTypeLike, a: QTensor, b: QTensor) -> Array:
    """XLA makes one cuBLASLt call of this, which gets the fp32 scales: it folds their cast to bf16 away.

    Behind barriers, because XLA would first merge products that share an operand (q, k, v; gate, up) into one of 16
    bits, and because it leaves a cast of a scale that it can move away from the product where it is, rounding it.
    Written with operands of bf16 whatever the result: where XLA leaves the product as written it is not one of fp32.
    """
    wide_dtype, out = jnp.bfloat16, jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32
    codes, scales = lax.optimization_barrier(([a.codes, b.codes], [q.scale.reshape(()) for q in (a, b)]))
    left, right = (c.astype(wide_dtype) * s.astype(wide_dtype) for c, s in zip(codes, scales, strict=True))
    y = dot_general(left, right, _K_MAJOR, precision=accumulation_precision(fast), preferred_element_type=out)
    return y.astype(dtype)


def row_scales(q: QTensor) -> Array:
    """Scales of rows, fp32 (rows, 1), or (1, 1); of parts of rows where they change along the contraction."""
    block_rows = q.spec.block_shape(q.shape)[0]
    return blocks.broadcast_blocks(q.scale.astype(jnp.float32), (q.shape[0], 1), (block_rows, 1))


def group_scales(q: QTensor, size: int) -> Array:
    """The scale of each row in each part of `size` of the contraction, fp32 (rows, parts), where none is of less."""
    return jnp.broadcast_to(row_scales(q), (q.shape[0], -(-q.shape[1] // size)))


def _epilogue_scales(a: QTensor, b: QTensor) -> tuple[Array | None, Array | None, Array | None]:
    """The scales of two matrices as the epilogue of a kernel takes them: of all, of rows and of columns."""
    left, right = row_scales(a), row_scales(b)
    if left.shape[0] == 1 and right.shape[0] == 1:
        return (left * right).reshape(()), None, None
    row_scale = column_scale = None
    if left.shape[0] > 1:
        row_scale = left[:, 0] if right.shape[0] > 1 else left[:, 0] * right[0, 0]
    if right.shape[0] > 1:
        column_scale = right[:, 0] if left.shape[0] > 1 else right[:, 0] * left[0, 0]
    return None, row_scale, column_scale


def _row(a: QTensor, b: QTensor, fast: bool, dtype: DTypeLike) -> Array:
    from pallas_kernels.matmul.matmul_mosaic import matmul

    scale, row_scale, column_scale = _epilogue_scales(a, b)
    return matmul(
        a.codes, b.codes, scale=scale, row_scale=row_scale, column_scale=column_scale, out_dtype=dtype, fast=fast
    )


def _block(a: QTensor, b: QTensor, dtype: DTypeLike) -> Array:
    from pallas_kernels.matmul.matmul_block_mosaic import matmul_block

    square = b.spec.granularity == "block" and b.spec.group_size == 128
    right = b.scale.astype(jnp.float32) if square else group_scales(b, 128)
    return matmul_block(a.codes, b.codes, group_scales(a, 128), right, out_dtype=dtype)


def _mx(a: QTensor, b: QTensor, dtype: DTypeLike) -> Array:
    from pallas_kernels.matmul.matmul_mx_mosaic import matmul_mx

    assert a.microscale is not None
    scale, row_scale, column_scale = _epilogue_scales(a, b)
    return matmul_mx(
        a.codes, b.codes, a.microscale, scale=scale, row_scale=row_scale, column_scale=column_scale, out_dtype=dtype
    )


def _scaled_matmul(a: QTensor, b: QTensor) -> Array:
    """In fp32, by the microscaling of the GPU's tensor cores; level 1 scales come after."""

    def powers(q: QTensor) -> Array:
        one = jnp.full((q.shape[0], q.shape[1] // 32), 127, jnp.uint8)
        return lax.bitcast_convert_type(one if q.microscale is None else q.microscale, jnp.float8_e8m0fnu)[None]

    sums = jax.nn.scaled_matmul(
        a.codes[None], b.codes[None], powers(a), powers(b), preferred_element_type=jnp.float32)[0]  # fmt: skip
    return sums * row_scales(a) * row_scales(b).T
