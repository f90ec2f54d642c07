"""Choice and call of the GPU kernel for a product of two quantized matrices."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import blocks, formats
from fp8jax.core.products import dot_general
from fp8jax.core.qtensor import QTensor
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.dispatch import sharding
from fp8jax.ops.dispatch.choice import Choice, capability, current_target, missing_triton, product_name_scope
from fp8jax.ops.dispatch.partition import DimSharding, notation, run_partitioned
from fp8jax.ops.quantization.fallback import FallbackTensor
from fp8jax.ops.quantization.microscaling import fold_microscales, is_foldable
from pallas_kernels.dispatch.multiprocessors import reserved_sms


def is_shardable(*operands: Any) -> bool:
    """Return whether all operands are quantized, and not packed in a way that shards would split."""

    def is_cut(spec: QuantSpec) -> bool:
        return spec.is_packed and not (formats.get(spec.format).is_fp4 and spec.axis in (-1, 1))

    return all(isinstance(q, QTensor | FallbackTensor) and not is_cut(strip_residual(q).spec) for q in operands)


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
    are sent in 16 bits, like bf16 gradients.

    Args:
        function: (dtype, a, b) -> product. It must not close over arrays.
        static: hashable key of the function.
        a, b: (M, K) and (N, K), quantized or not. Without `is_shardable` XLA partitions the product.
        out_spec: as in `fp8jax.ops.matmul.matmul.matmul`.
        kernel: as in `fp8jax.ops.dispatch.partition.run_partitioned`.
    """
    if not is_shardable(a, b) or 0 in (*a.shape, *b.shape):
        return sharding.matmul_sharded(functools.partial(function, dtype), a, b, out_spec)

    def multiply_shard(dim_sharding: DimSharding, a: Any, b: Any) -> Array:
        a, b = (dataclasses.replace(q, length=2 * q.codes.shape[1]) if _is_packed(q) else q for q in (a, b))
        out = jnp.dtype(jnp.bfloat16 if "k" in dim_sharding.axes else dtype)  # a np.dtype, so that jit caches hit
        with product_name_scope(strip_residual(a), b):  # XLA's partitioner traces this again
            return dim_sharding.psum(function(out, a, b), "k", "m n").astype(dtype)

    a_notation = notation(strip_residual(a).spec, a.shape, "m k")
    ins = (
        (a_notation, a_notation, a_notation[-1]) if isinstance(a, FallbackTensor) else a_notation,
        notation(b.spec, b.shape, "n k"),
    )
    static_key = static, isinstance(a, FallbackTensor), str(jnp.dtype(dtype)), strip_residual(a).spec, b.spec
    return run_partitioned(
        "product" if kernel else "plain_product", static_key, multiply_shard, (a, b), ins, "m n",
        sum_dim="k", out_spec=out_spec, is_kernel=kernel,
    )  # fmt: skip


def strip_residual(q: Any) -> Any:
    """Return the base of a `FallbackTensor`, or the operand itself."""
    return q.base if isinstance(q, FallbackTensor) else q


def _is_packed(q: Any) -> bool:
    return isinstance(q, QTensor) and q.spec.is_packed


HOPPER, BLACKWELL, BLOCK_SIZE = 90, 100, 128
# Groups of Blackwell's block-scaled formats, mxfp8 and nvfp4.
MX_SIZE, NV_SIZE = 32, 16
# GPUs of the Triton kernel: int8 matrix units and bf16, before Hopper.
TRITON_CAPABILITIES = range(80, 90)


def is_int8_blocks(a: QTensor, b: QTensor) -> bool:
    """Return whether both operands are int8 in blocks of 128, which the int8 kernel supports."""
    return all(
        (q.spec.format, q.spec.granularity, q.spec.group_size) == ("int8", "block", BLOCK_SIZE) and len(q.shape) == 2
        for q in (a, b)
    )


def unsupported_int8_reason(a: QTensor, b: QTensor) -> str | None:
    """Return why the int8 kernel cannot multiply the operands, or None."""
    if not is_int8_blocks(a, b):
        return f"it supports int8 in blocks of {BLOCK_SIZE}, not {a.spec} with {b.spec}"
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
    """Return the language of the GPU's int8 kernel."""
    return "triton" if capability() in TRITON_CAPABILITIES else "mosaic"


def matmul_int8(dtype: DTypeLike, a: FallbackTensor | QTensor, b: QTensor) -> Array:
    """Return a @ b.T by the int8 kernel, in bf16 or fp32."""
    from pallas_kernels.matmul.matmul_int8_mosaic import FallbackResidual, matmul_int8_block

    kernel: Any = matmul_int8_block
    if kernel_language() == "triton":
        from pallas_kernels.matmul import matmul_int8_triton

        kernel = functools.partial(matmul_int8_triton.matmul_int8_block, compute_capability=capability())
    base, residual = a, None
    if isinstance(a, FallbackTensor):
        base, residual = a.base, FallbackResidual(a.residual.codes, a.residual.scale, a.fallback_mask)
    assert isinstance(base, QTensor)
    return kernel(base.codes, b.codes, base.scale, b.scale, residual=residual, out_dtype=dtype)


_NO_TRITON_GEMM = "--xla_gpu_enable_triton_gemm=false"
_K_MAJOR = (((1,), (1,)), ((), ()))
KernelName = Literal["row", "block", "mx", "mx right", "int8"]


def choose_kernel(a: Any, b: Any) -> tuple[Choice, KernelName | Literal["cublas", "block_scaled"] | None]:
    """Return the choice on a CUDA GPU, and the kernel's name for `run` (None for the reference).

    With one scale per operand, our kernel and cuBLASLt are about equally fast (`experiments.bench gemm`). cuBLASLt can
    also add a residual, so it is preferred. XLA reliably calls it with FP8 operands only if its own Triton products are
    disabled (XLA_FLAGS=--xla_gpu_enable_triton_gemm=false). Otherwise the kernel runs on Hopper, and the reference
    elsewhere. Row scales, group scales and int8 products use our kernels: XLA would need a second pass.
    """
    if capability() >= BLACKWELL and is_block_scaled_pair(a, b):
        return Choice("xla", "jax.nn.scaled_matmul, in the GPU's own block scaling"), "block_scaled"
    if not isinstance(a, FallbackTensor) and a.spec.is_block_scaled and b.spec.is_block_scaled:
        needed = "a Blackwell GPU, codes of one format and a contraction of whole groups"
        return Choice("xla", f"not block-scaled: that needs {needed}"), None
    kernel = find_kernel(a, b)
    if kernel == "int8":
        if (reason := unsupported_int8_reason(strip_residual(a), b)) is not None:
            return Choice("xla", f"not the kernel: {reason}"), None
        return Choice(kernel_language(), f"the kernel for {_DESCRIPTIONS['int8']}"), "int8"
    fp8 = _is_fp8_pair(a, b)
    if not (fp8 or _is_int8_pair(a, b)) or 0 in (*a.shape, *b.shape):
        return Choice("xla", "the kernels support two non-empty FP8 or int8 operands"), None
    e5m2 = a.spec.format == b.spec.format == "e5m2"
    per_tensor = all(q.spec.granularity == "tensor" for q in (a, b))
    cublas = fp8 and per_tensor and not e5m2 and capability() >= 89
    if cublas and _NO_TRITON_GEMM in os.environ.get("XLA_FLAGS", "").split():
        return Choice("xla", "cuBLASLt's product, scales applied in it"), "cublas"
    if (reason := _kernel_unsupported_reason(a, b)) is not None or kernel is None:
        remedy = f"; with XLA_FLAGS={_NO_TRITON_GEMM} cuBLASLt multiplies these codes" if cublas else ""
        return Choice("xla", f"not the kernel: {reason}{remedy}"), None
    return Choice("mosaic", f"the kernel for scales of {_DESCRIPTIONS[kernel]}"), kernel


def _is_fp8_pair(a: QTensor, b: QTensor) -> bool:
    return all(formats.get(q.spec.format).is_fp8 for q in (a, b))


def _is_int8_pair(a: QTensor, b: QTensor) -> bool:
    return a.spec.format == b.spec.format == "int8"


_DESCRIPTIONS = {
    "row": "tensors and rows",
    "block": "groups of 128",
    "mx": "rows, codes folded first, or, exactly, of microscaled groups of 32",
    "mx right": "rows, codes folded first, or, exactly, of microscaled groups of 32",
    "int8": "int8 blocks of 128",
}


def unsupported_reason(a: Any, b: Any) -> str | None:
    """Return why no Mosaic kernel can multiply the operands, or None."""
    if find_kernel(a, b) == "int8":
        other = None if kernel_language() == "mosaic" else "it needs a Hopper GPU"
        return unsupported_int8_reason(strip_residual(a), b) or other
    if not (_is_fp8_pair(a, b) or _is_int8_pair(a, b)):
        return f"codes of {a.spec.format} and {b.spec.format} are neither both FP8 nor both int8"
    if 0 in (*a.shape, *b.shape):
        return f"shapes {a.shape} and {b.shape} are empty"
    return _kernel_unsupported_reason(a, b)


def _kernel_unsupported_reason(a: QTensor, b: QTensor) -> str | None:
    if not current_target().kernels:
        return "kernels are switched off"
    kernel = find_kernel(a, b)
    if _is_int8_pair(a, b) and kernel is None:  # no GPU has such a kernel
        return f"int8 kernels support scales per tensor, row or block of 128, not {a.spec} with {b.spec}"
    if jax.__version_info__ < (0, 11) or capability() != HOPPER:
        return "it needs a Hopper GPU and jax >= 0.11"
    if kernel is None:
        return f"no kernel for scales of {a.spec} with {b.spec}"
    if _is_int8_pair(a, b):
        from pallas_kernels.matmul.matmul_mosaic import MAX_INT8_K

        return None if a.shape[1] <= MAX_INT8_K else f"int32 holds sums of {MAX_INT8_K} products, not {a.shape[1]}"
    return None


def contraction_length(q: QTensor) -> int:
    """Return the length along the contraction that shares a scale, or 0 if all of it does."""
    if q.spec.has_microscales:
        return q.spec.group_size or 0
    length = q.spec.block_shape(q.shape)[1]
    return 0 if blocks.is_whole_axis(length, q.shape[1]) else length


def find_kernel(a: Any, b: Any) -> KernelName | None:
    """Return the kernel for these scales, or None. `unsupported_reason` may still reject the operands."""
    if isinstance(a, FallbackTensor) or is_int8_blocks(a, b):
        return "int8"
    micro = [q.spec.has_microscales for q in (a, b)]
    if any(micro):
        mx_operand, other_operand = (a, b) if micro[0] else (b, a)
        is_mx32 = (mx_operand.spec.granularity, mx_operand.spec.group_size) == ("mx", 32)
        if all(micro) or not is_mx32 or contraction_length(other_operand):
            return None
        return "mx" if micro[0] else "mx right"
    sizes = {contraction_length(a), contraction_length(b)}
    if sizes == {0}:
        return "row"
    return "block" if sizes <= {0, 128} and _is_fp8_pair(a, b) else None


def is_block_scaled_pair(a: Any, b: Any) -> bool:
    """Return whether Blackwell's matrix units multiply the operands: mxfp8 by mxfp8, or nvfp4 by nvfp4.

    FP8 codes under scales of tensors or rows count as mxfp8 with powers of 1. Outer scales are applied to the sums.
    """
    if not (isinstance(a, QTensor) and isinstance(b, QTensor)) or 0 in (*a.shape, *b.shape):
        return False
    if all(q.spec.is_block_scaled and formats.get(q.spec.format).is_fp4 for q in (a, b)):
        return a.shape[1] % NV_SIZE == 0
    kinds = {q.spec.granularity for q in (a, b)}
    fits = all(q.spec.granularity != "mx" or q.spec.group_size == MX_SIZE for q in (a, b)) and _is_fp8_pair(a, b)
    return "mx" in kinds and kinds <= {"mx", "tensor", "token"} and fits and a.shape[1] % MX_SIZE == 0


def run(
    kernel_name: KernelName | Literal["cublas", "block_scaled"],
    exact: bool,
    fast: bool,
    dtype: DTypeLike,
    a: Any,
    b: QTensor,
    out_spec: Sequence[Any] | None = None,
) -> Array:
    """Return a @ b.T by the kernel that `choose_kernel` returned, for operands that may be sharded.

    A sharded contraction is summed over devices. `out_spec` is the result's sharding on Explicit mesh axes, or None.
    """
    if kernel_name == "block_scaled":
        return sharded_matmul(_block_scaled, kernel_name, jnp.dtype(dtype), a, b, out_spec)
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
    """Call a kernel under jit: lowering Mosaic is slow, and equal products of a program are then lowered once."""
    with reserved_sms(n_reserved):
        # Without the barrier, XLA duplicates the call if a loop saves the result (dynamic slice fusion).
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
    """Return the precision for XLA: with the highest, cuBLASLt disables fast accumulation."""
    return lax.Precision.DEFAULT if fast else lax.Precision.HIGHEST


def _cublas(fast: bool, dtype: DTypeLike, a: QTensor, b: QTensor) -> Array:
    """Return an FP8 product that XLA compiles to one cuBLASLt call with fp32 scales; it folds their cast to bf16.

    Without barriers, XLA merges products with a common operand (q, k, v) into a 16-bit one. It also moves the cast of a
    scale away, which rounds it. The operands are bf16 for any dtype, in case XLA does not match the pattern.
    """
    wide_dtype, out = jnp.bfloat16, jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32
    codes, scales = lax.optimization_barrier(([a.codes, b.codes], [q.scale.reshape(()) for q in (a, b)]))
    left, right = (c.astype(wide_dtype) * s.astype(wide_dtype) for c, s in zip(codes, scales, strict=True))
    y = dot_general(left, right, _K_MAJOR, precision=accumulation_precision(fast), preferred_element_type=out)
    return y.astype(dtype)


def row_scales(q: QTensor) -> Array:
    """Return row scales, fp32 (rows, 1) or (1, 1); more columns if they vary along the contraction."""
    block_rows = q.spec.block_shape(q.shape)[0]
    return blocks.broadcast_blocks(q.scale.astype(jnp.float32), (q.shape[0], 1), (block_rows, 1))


def group_scales(q: QTensor, size: int) -> Array:
    """Return the scale of each row and section of `size` along the contraction, fp32 (rows, sections)."""
    return jnp.broadcast_to(row_scales(q), (q.shape[0], -(-q.shape[1] // size)))


def _epilogue_scales(a: QTensor, b: QTensor) -> tuple[Array | None, Array | None, Array | None]:
    """Return the epilogue's scales of two matrices: per tensor, per row and per column."""
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


def _block_scaled(dtype: DTypeLike, a: QTensor, b: QTensor) -> Array:
    """Return the product of block-scaled codes by one call of cuDNN, followed by the outer scales.

    The call rounds its fp32 sums to bf16 if the result is bf16. Outer scales then round once more.
    """
    out = jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32
    (left, left_scales), (right, right_scales) = map(_block_scaled_operand, (a, b))
    sums = jax.nn.scaled_matmul(left, right, left_scales, right_scales, preferred_element_type=out)[0]
    if all(q.spec.outer_granularity == "none" for q in (a, b)):
        return sums.astype(dtype)
    return (sums.astype(jnp.float32) * (row_scales(a) * row_scales(b).T)).astype(dtype)


def _block_scaled_operand(q: QTensor) -> tuple[Array, Array]:
    """Return codes (1, rows, K) and scales (1, rows, K / size) in the dtypes of `jax.nn.scaled_matmul`."""
    if formats.get(q.spec.format).is_fp4:
        codes = formats.bitcast(q.codes, jnp.float4_e2m1fn).reshape(q.codes.shape[0], -1)
        scales, scale_dtype, size = q.microscale, jnp.float8_e4m3fn, NV_SIZE
    else:
        codes, scales, scale_dtype, size = q.codes, q.microscale, jnp.float8_e8m0fnu, MX_SIZE
    count = (codes.shape[0], codes.shape[1] // size)
    if scales is None:
        scales = jnp.full(count, 127, jnp.uint8)  # powers of 1
    scales = blocks.broadcast_blocks(scales, count, (NV_SIZE if q.spec.granularity == "nvblock" else 1, 1))
    return codes[None], formats.bitcast(jnp.broadcast_to(scales, count), scale_dtype)[None]
