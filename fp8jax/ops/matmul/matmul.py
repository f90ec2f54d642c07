"""Products of quantized matrices. Both operands are contracted along their last axis, as 8-bit matrix units require."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import blocks, encoding, formats
from fp8jax.core.products import dot_general
from fp8jax.core.qtensor import QTensor
from fp8jax.core.spec import TRANSPOSABLE
from fp8jax.ops.dispatch import sharding
from fp8jax.ops.dispatch.choice import (
    Choice,
    by_platform,
    call_traced_once,
    capability,
    check_impl,
    mark_varying,
    on_cuda,
    product_name_scope,
    record_choice,
)
from fp8jax.ops.matmul import hopper
from fp8jax.ops.matmul.hopper import (
    contraction_length,
    is_block_scaled_pair,
    is_shardable,
    row_scales,
    sharded_matmul,
    strip_residual,
)
from fp8jax.ops.quantization.fallback import FallbackTensor
from fp8jax.ops.quantization.quantize import transpose

Operand = QTensor | Array
IMPLS = ("auto", "xla", "mosaic")
_K_MAJOR = (((1,), (1,)), ((), ()))
_BF16_CAPABILITY = 80  # Ampere


def matmul(
    a: Operand | FallbackTensor,
    b: Operand | FallbackTensor,
    *,
    dtype: DTypeLike = jnp.float32,
    impl: str = "auto",
    fast: bool = True,
    exact: bool = False,
    out_spec: Sequence[Any] | None = None,
    transposed: bool = False,
) -> Array:
    """Return a @ b.T for matrices that may be quantized.

    Codes are multiplied with fp32 (integers: int32) accumulation, and scales are applied to the sum. Scales that vary
    along the contraction split it, and each section is promoted to fp32 under its own scales. Operands without codes
    for matrix units are multiplied in bf16 (fp32 if one is an fp32 array). If a GPU has no kernel for the codes, both
    operands are rounded to bf16 and multiplied with fp32 sums. GPUs without bf16, such as a T4, use fp16 and apply
    scales outside.

    Hopper's tensor cores accumulate FP8 products with about 14 bits, and truncate. Sums are promoted to fp32 after 128
    to 512 elements, or never with fast accumulation. The error grows with the contraction and is biased towards zero,
    which matters most for wgrad.

    Int8 blocks with residuals (`fp8jax.ops.quantization.fallback`; arXiv 2503.08040, algorithm 1) are summed exactly,
    in int32, over a block, and promoted to fp32 under their two scales.

    Args:
        a: (M, K), a QTensor, a floating array or a `FallbackTensor`. No scale may be per index of the contraction
            ("channel").
        b: (N, K), likewise, but no `FallbackTensor`. If `a` is one, `b` has blocks of the same size.
        impl: "xla" is the reference. On a CUDA GPU "auto" is the fastest (results/gemm.json). For FP8 that is cuBLASLt,
            or a Mosaic kernel on Hopper, on any number of devices. For int8 it is a kernel: on Hopper for scales per
            tensor or row, from Ampere on for blocks of 128. Otherwise it is the reference. "mosaic" is the kernel.
            `fp8jax.ops.dispatch.choice.record_choices` records the choice.
        fast: whether to use fast accumulation, if the GPU has it.
        exact: whether to apply every power of two of microscaled operands in fp32, at half the speed. Else e4m3 codes
            with an outer scale are folded first (`fp8jax.ops.quantization.microscaling.fold_microscales`). Codes that
            become subnormal are then rounded to 2^-9 of the row's scale. The reference is always exact.
        out_spec: sharding of both axes of the result on Explicit mesh axes; None follows JAX's rule.
        transposed: whether `b` is the transposed copy of another product's operand. If codes are decoded, both products
            then share one decoded matrix.

    Raises:
        ValueError: shapes do not match, a scale is per index of the contraction, `impl` is unknown, or `impl` is
            "mosaic" and no kernel can run.
        ShardingTypeError: JAX's rule needs a sharding of the result.
    """
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"matmul expects (M, K) and (N, K), got {a.shape} and {b.shape}")
    if isinstance(b, FallbackTensor) or (isinstance(a, FallbackTensor) and getattr(b, "spec", None) != a.base.spec):
        raise ValueError(
            f"if a has blocks with fallback residuals, b must have plain blocks of the same spec, got {_describe(a)} "
            f"and {_describe(b)}"
        )
    choice, kernel_name = _choose_with_fallback(a, b, impl, impl == "mosaic" or on_cuda())
    record_choice("fallback matmul" if isinstance(a, FallbackTensor) else "matmul", choice)
    out_spec = out_spec or sharding.product_sharding(strip_residual(a), b, _K_MAJOR)
    dense_reference = functools.partial(reference_matmul, fast)
    kernel: Callable[..., Array] | None = None
    if kernel_name is not None:
        kernel = functools.partial(hopper.run, kernel_name, exact, fast)
    elif on_cuda() and _needs_16_bits(a, b):
        kernel = functools.partial(
            sharded_matmul, dot_in_16_bits(transposed), (capability() >= _BF16_CAPABILITY, transposed)
        )
    elif on_cuda() and is_shardable(a, b):
        kernel = functools.partial(sharded_matmul, dense_reference, fast)

    def dense_product(a: Any, b: Operand) -> Array:
        if isinstance(a, FallbackTensor):
            product = functools.partial(
                sharding.matmul_sharded, functools.partial(dense_reference, jnp.float32), b=b, spec=out_spec
            )
            return (product(a=a.base) + product(a=a.masked_residual())).astype(dtype)
        return sharding.matmul_sharded(functools.partial(dense_reference, dtype), a, b, out_spec)

    def run_kernel(a: Any, b: Operand) -> Array:
        assert kernel is not None
        product = kernel(dtype, a, b, out_spec)
        return product if out_spec is None else sharding.reshard(product, out_spec, *jax.tree.leaves((a, b)))

    def reference(a: Any, b: Operand) -> Array:
        with product_name_scope(strip_residual(a), b):  # a function that XLA does not inline has its own names
            return dense_product(a, b)

    with product_name_scope(strip_residual(a), b):
        if kernel is None:
            return call_traced_once(reference, a, b)
        if impl == "mosaic":
            return mark_varying(run_kernel)(a, b)
        return by_platform(a, b, cuda=run_kernel, default=reference)


def _describe(q: Any) -> str:
    """Describe an operand for messages."""
    if isinstance(q, FallbackTensor):
        return f"{q.base.spec} with residuals"
    return str(q.spec) if isinstance(q, QTensor) else f"an array of {q.dtype}"


def _choose_with_fallback(a: Operand | FallbackTensor, b: Operand, impl: str, cuda: bool) -> tuple[Choice, Any]:
    choice, kernel_name = _choose_kernel(a, b, impl, cuda)
    if kernel_name is None and cuda and _needs_16_bits(a, b):
        half_format = "bf16" if capability() >= _BF16_CAPABILITY else "fp16"
        choice = Choice("xla", f"{choice.reason}; codes are decoded and multiplied in {half_format}")
    return choice, kernel_name


def _choose_kernel(a: Operand | FallbackTensor, b: Operand, impl: str, cuda: bool) -> tuple[Choice, Any]:
    check_impl(impl, IMPLS)
    if impl == "xla":
        return Choice("xla", "asked for"), None
    reason = None if cuda else "it needs a CUDA GPU"
    left = strip_residual(a)
    has_codes = isinstance(left, QTensor) and isinstance(b, QTensor) and has_matmul_codes(left) and has_matmul_codes(b)
    if not has_codes and not is_block_scaled_pair(a, b):
        reason = reason or "an operand is not in a matmul format"
    elif reason is None:
        if impl == "auto":
            return hopper.choose_kernel(a, b)
        reason = hopper.unsupported_reason(a, b)
        if reason is None:
            return Choice("mosaic", "asked for"), hopper.find_kernel(a, b)
    if impl == "mosaic":
        raise ValueError(f"impl 'mosaic' cannot run: {reason}")
    return Choice("xla", f"not a kernel: {reason}"), None


def _needs_16_bits(a: Operand | FallbackTensor, b: Operand) -> bool:
    """Return whether XLA on a GPU would widen codes to fp32, which is far slower than 16 bits."""
    if isinstance(a, FallbackTensor):
        return True
    if not (isinstance(a, QTensor) and isinstance(b, QTensor)):
        # XLA also widens bf16 arrays on GPUs without bf16.
        is_dense = not (isinstance(a, QTensor) or isinstance(b, QTensor))
        return not is_dense or (capability() < _BF16_CAPABILITY and _dense_dtype(a, b) == jnp.bfloat16)
    integers = all(has_matmul_codes(q) and jnp.issubdtype(q.codes.dtype, jnp.integer) for q in (a, b))
    return not integers or any(contraction_length(q) for q in (a, b))


def dot_in_16_bits(transposed: bool = False) -> Callable[..., Array]:
    """Return a function (dtype, a, b) that decodes codes to 16 bits and multiplies them."""
    return functools.partial(_dot_decoded, transposed=transposed) if capability() >= _BF16_CAPABILITY else _dot_fp16


def _dot_decoded(dtype: DTypeLike, a: Any, b: Any, transposed: bool = False) -> Array:
    """Return the product of the values, rounded to bf16, with fp32 sums."""
    if 0 in (*a.shape, *b.shape):
        return jnp.zeros((a.shape[0], b.shape[0]), dtype)

    def decode(x: Any) -> Array:
        return x.astype(jnp.bfloat16) if isinstance(x, Array) else x.dequantize(jnp.bfloat16)

    if _are_block_scaled(a, b):
        return _dot_block_scaled(dtype, a, b)
    if transposed and isinstance(b, QTensor) and b.spec.granularity in TRANSPOSABLE:
        # XLA cancels the two transpositions and reuses the decoded codes.
        return _dot_fp32_sums(decode(a), decode(transpose(b, impl="xla")).T, dtype)
    return _dot_fp32_sums(decode(a), decode(b), dtype)


def _are_block_scaled(*operands: Any) -> bool:
    return all(isinstance(q, QTensor) and q.spec.is_block_scaled for q in operands)


def _dot_block_scaled(dtype: DTypeLike, a: Any, b: Any) -> Array:
    """Return the product of mxfp8 or nvfp4 operands: codes times block scales are exact in bf16."""
    left, right = (dataclasses.replace(q, scale=jnp.ones_like(q.scale)).dequantize(jnp.bfloat16) for q in (a, b))
    if all(q.spec.outer_granularity == "none" for q in (a, b)):
        return _dot_fp32_sums(left, right, dtype)
    return (_dot_fp32_sums(left, right, jnp.float32) * (row_scales(a) * row_scales(b).T)).astype(dtype)


def _dot_fp16(dtype: DTypeLike, a: Any, b: Any) -> Array:
    """Return the product of the values, rounded to fp16 in units of each row, with fp32 sums."""
    if 0 in (*a.shape, *b.shape):
        return jnp.zeros((a.shape[0], b.shape[0]), dtype)
    (left, rows), (right, columns) = map(_to_fp16, (a, b))
    return (_dot_fp32_sums(left, right, jnp.float32) * rows * columns.T).astype(dtype)


def _decode_unscaled(q: QTensor) -> Array:
    """Return the fp32 values of codes, in units of their scales."""
    return formats.get(q.spec.format).decode(q.codes)


def _to_fp16(x: Any) -> tuple[Array, Array]:
    """Return a matrix in fp16, and the fp32 unit of each row or of all rows (rows or 1, 1).

    The unit is the scale. If scales vary along a row it is the largest, and smaller values keep 11 bits or 2^-24 of it.
    The unit of an array is its amax.
    """
    if isinstance(x, QTensor) and has_matmul_codes(x):
        size = contraction_length(x)
        if size == 0:
            return _decode_unscaled(x).astype(jnp.float16), row_scales(x)
        scales = _section_scales(x, size, -(-x.shape[1] // size))
        unit = jnp.max(scales, axis=1, keepdims=True)
        relative = blocks.broadcast_blocks(scales / unit, x.shape, (1, size))
        return (_decode_unscaled(x) * relative).astype(jnp.float16), unit
    if isinstance(x, Array) and x.dtype == jnp.float16:
        return x, jnp.ones((1, 1), jnp.float32)
    values = x.astype(jnp.float32) if isinstance(x, Array) else x.dequantize()
    largest = jnp.max(jnp.abs(values), axis=1, keepdims=True)
    unit = jnp.where(largest > 0, largest, 1)
    return (values / unit).astype(jnp.float16), unit


def _dot_fp32_sums(a: Array, b: Array, dtype: DTypeLike) -> Array:
    """Return a product with fp32 sums. If the result has 16 bits, devices send partial sums in 16 bits."""
    is_bf16 = a.dtype == b.dtype == jnp.dtype(dtype) == jnp.bfloat16
    return dot_general(a, b, _K_MAJOR, preferred_element_type=dtype if is_bf16 else jnp.float32).astype(dtype)


def reference_matmul(fast: bool, dtype: DTypeLike, a: Operand, b: Operand) -> Array:
    if 0 in (*a.shape, *b.shape):
        # An empty matrix has no blocks, hence no scales.
        return mark_varying(lambda *_: jnp.zeros((a.shape[0], b.shape[0]), dtype))(a, b)
    if _are_block_scaled(a, b):
        return _dot_block_scaled(dtype, a, b)
    if not (isinstance(a, QTensor) and isinstance(b, QTensor) and has_matmul_codes(a) and has_matmul_codes(b)):
        dense_dtype = _dense_dtype(a, b)
        a, b = (x.dequantize(dense_dtype) if isinstance(x, QTensor) else x.astype(dense_dtype) for x in (a, b))
        return _dot_fp32_sums(a, b, dtype)
    size = math.gcd(*(contraction_length(q) for q in (a, b)))
    if size == 0:
        sums = _dot_codes(a.codes, b.codes, fast)
        return (sums * row_scales(a) * row_scales(b).T).astype(dtype)
    return _dot_promoted(a, b, size).astype(dtype)


def has_matmul_codes(q: QTensor) -> bool:
    """Return whether matrix units support the codes directly."""
    contracted_axis = {"channel": 1, "token": 0, "group": 0, "mx": 0, "nv": 0}.get(q.spec.granularity)
    if contracted_axis is not None and q.spec.axis % 2 == contracted_axis:
        raise ValueError(
            f"{q.spec} along axis {q.spec.axis} has a scale for each contracted index, which a product of codes "
            "cannot apply"
        )
    return formats.get(q.spec.format).is_matmul_format and not q.spec.expand


def _dense_dtype(a: Operand, b: Operand) -> DTypeLike:
    dense_dtypes = [x.dtype for x in (a, b) if not isinstance(x, QTensor)]
    return jnp.float32 if dense_dtypes and all(d == jnp.float32 for d in dense_dtypes) else jnp.bfloat16


def _dot_codes(a: Array, b: Array, fast: bool) -> Array:
    integers = jnp.issubdtype(a.dtype, jnp.integer)
    precision = hopper.accumulation_precision(fast or integers)
    sum_dtype = jnp.int32 if integers else jnp.float32
    sums = dot_general(a, b, _K_MAJOR, precision=precision, preferred_element_type=sum_dtype)
    return sums.astype(jnp.float32)


def _dot_promoted(a: QTensor, b: QTensor, size: int) -> Array:
    """Sum the products of sections of `size` along the contraction, each under its own scales, in fp32."""
    count = -(-a.shape[1] // size)

    def split_contraction(q: QTensor) -> tuple[Array, Array]:
        codes = jnp.pad(q.codes, ((0, 0), (0, count * size - q.shape[1])))
        codes = codes.reshape(q.shape[0], count, size).swapaxes(0, 1)
        return codes, _section_scales(q, size, count).T[:, :, None]

    def add_section(sums: Array, part: tuple[tuple[Array, Array], tuple[Array, Array]]) -> tuple[Array, None]:
        (a_codes, a_scale), (b_codes, b_scale) = part
        return sums + _dot_codes(a_codes, b_codes, True) * a_scale * b_scale.T, None

    sections = split_contraction(a), split_contraction(b)
    zeros = mark_varying(lambda _: jnp.zeros((a.shape[0], b.shape[0]), jnp.float32))(sections)
    return lax.scan(add_section, zeros, sections)[0]


def _section_scales(q: QTensor, size: int, n_sections: int) -> Array:
    """Return the scale of each row and section of the contraction, (rows, sections)."""
    shape = (q.shape[0], n_sections * size)
    scale = blocks.broadcast_blocks(q.scale.astype(jnp.float32), q.shape, q.spec.block_shape(q.shape))
    scale = jnp.broadcast_to(scale, q.shape)
    if q.microscale is not None:
        power = blocks.broadcast_blocks(
            encoding.decode_microscales(q.microscale, q.spec), q.shape, q.spec.micro_shape(q.shape)
        )
        scale = scale * power
    return jnp.pad(scale[:, ::size], ((0, 0), (0, n_sections - scale[:, ::size].shape[1])))[: shape[0]]
