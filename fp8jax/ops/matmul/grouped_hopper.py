"""Choice and call of the GPU kernels for grouped products."""

import dataclasses
import functools
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import formats
from fp8jax.core.groups import Groups, PaddedTokens, block_table
from fp8jax.core.qtensor import QTensor
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.dispatch.choice import Choice, capability, current_target, missing_triton
from fp8jax.ops.matmul.hopper import HOPPER, strip_residual
from fp8jax.ops.matmul.matmul import Operand
from fp8jax.ops.quantization.fallback import FallbackTensor
from fp8jax.ops.quantization.quantize import transpose
from pallas_kernels.dispatch.multiprocessors import reserved_sms

KernelName = Literal["codes", "block", "int8 block", "bf16"]


class Encoder(Protocol):
    """Makes an operand of codes from a part of an array. It is hashable, and static under `jax.jit`."""

    @property
    def spec(self) -> QuantSpec:
        """The spec of the codes."""
        ...

    def __call__(self, *parts: Any) -> QTensor: ...


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=["encoder"])
@dataclasses.dataclass(frozen=True)
class DeferredMatrices:
    """Matrices (G, N, K) that are quantized when a tile reads them, so that their codes need no memory.

    Attributes:
        values: an array of G matrices.
        scale: a given scale of each matrix, or None.
        encoder: static; `encoder(values[g], scale[g])` is the matrix (N, K).
    """

    values: Array
    scale: Array | None
    encoder: Encoder

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(jax.eval_shape(self.quantize).shape)

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    def quantize(self) -> QTensor:
        """The codes of all matrices."""
        return jax.vmap(self.encoder)(self.values, self.scale)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["encoder"])
@dataclasses.dataclass(frozen=True)
class UnpaddedRows:
    """The transpose of a matrix with rows that are not yet in the padded axis.

    Attributes:
        values: (rows, n), an array or a QTensor.
        encoder: static; makes (n, length) from rows of a part of the padded axis, in whole aligned blocks. None
            transposes the values: an array, or codes with one scale.
    """

    values: Operand
    encoder: Encoder | None = None

    def to_columns(self, rows: Operand) -> Operand:
        """Return the operand (n, length) of these rows."""
        if self.encoder is not None:
            return self.encoder(rows)
        return rows.with_codes(rows.codes.T) if isinstance(rows, QTensor) else rows.T


def find_spec(x: Any) -> QuantSpec | None:
    """Return the spec of the codes that an operand has when it is multiplied; None for an array."""
    if isinstance(x, DeferredMatrices | UnpaddedRows) and x.encoder is not None:
        return x.encoder.spec
    x = strip_residual(x.values if isinstance(x, UnpaddedRows) else x)
    return x.spec if isinstance(x, QTensor) else None


def choose_kernel(a: Any, b: Any, length: int, scales_are_shared: bool) -> tuple[Choice, KernelName | None]:
    """Return the choice on a CUDA GPU, and the kernel's name (None for the loop of XLA).

    Args:
        length: the largest number of products in a sum.
    """
    if (reason := _missing_kernel(a, b)) is not None:
        decoded = ", codes are decoded" if any(find_spec(x) is not None for x in (a, b)) else ""
        return Choice("xla", f"a loop over tiles{decoded}, not the kernel: {reason}"), None
    specs = find_spec(a), find_spec(b)
    contracts_tokens = isinstance(b, UnpaddedRows) or len(b.shape) == 2
    if _is_in_blocks(*specs, contracts_tokens=contracts_tokens):
        return Choice("mosaic", "the kernel for groups and blocks of 128"), "block"
    if scales_are_shared and _is_in_int8_blocks(*specs, contracts_tokens=contracts_tokens):
        return Choice("mosaic", "the kernel for int8 blocks of 128"), "int8 block"
    if specs[0] is not None and specs[1] is not None:
        if (reason := _unsupported_codes(specs[0], specs[1], length)) is None:
            return Choice("mosaic", "the kernel for scales of groups, rows and columns"), "codes"
        return Choice("mosaic", f"the kernel for bf16, codes are decoded: {reason}"), "bf16"
    return Choice("mosaic", "the kernel for bf16"), "bf16"


def _missing_kernel(a: Any, b: Any) -> str | None:
    """Return why no kernel can multiply the operands, or None."""
    if not current_target().kernels:
        return "kernels are switched off"
    if jax.__version_info__ < (0, 11) or capability() != HOPPER:
        return "it needs a Hopper GPU and jax >= 0.11"
    a, b = (x.values if isinstance(x, UnpaddedRows) else x for x in (a, b))
    if 0 in (*a.shape, *b.shape):
        return f"shapes {a.shape} and {b.shape} are empty"
    for x in (a, b):
        if find_spec(x) is None and x.dtype not in (jnp.bfloat16, jnp.float16):
            return f"it supports 8 or 16 bits, not {x.dtype}"
    return None


def _is_in_blocks(a: QuantSpec | None, b: QuantSpec | None, *, contracts_tokens: bool) -> bool:
    """Return whether codes are FP8 in groups of 128 of a row, by such (tokens) or by blocks of 128x128 (matrices)."""
    if a is None or b is None or not (formats.get(a.format).is_fp8 and formats.get(b.format).is_fp8):
        return False
    kinds = (a.granularity, a.group_size, b.granularity, b.group_size)
    return kinds == ("group", 128, "group" if contracts_tokens else "block", 128) and not (a.expand or b.expand)


def _is_in_int8_blocks(a: QuantSpec | None, b: QuantSpec | None, *, contracts_tokens: bool) -> bool:
    """Return whether codes are int8 in blocks of 128x128. Codes of rows have a scale per row of a block."""
    if a is None or b is None or not a.format == b.format == "int8":
        return False
    kinds = (a.granularity, a.group_size, b.granularity, b.group_size)
    return kinds == ("block" if contracts_tokens else "group", 128, "block", 128)


def _unsupported_codes(a: QuantSpec, b: QuantSpec, length: int) -> str | None:
    """Return why the kernel for codes cannot multiply codes of these specs, or None."""
    for spec in (a, b):
        if spec.granularity not in ("tensor", "token") or spec.expand:
            return f"its scales are of tensors and rows, not of {spec}"
    kinds = [formats.get(spec.format) for spec in (a, b)]
    if not (all(fmt.is_fp8 for fmt in kinds) or all(fmt.name == "int8" for fmt in kinds)):
        return f"codes of {a.format} and {b.format} are neither both FP8 nor both int8"
    if kinds[0].name == "int8":
        from pallas_kernels.matmul.matmul_mosaic import MAX_INT8_K

        return None if length <= MAX_INT8_K else f"int32 holds sums of {MAX_INT8_K} products, not {length}"
    return None


# Under jit, as in `fp8jax.ops.matmul.hopper`: equal products of a program are lowered once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def multiply_rows(
    kernel_name: KernelName, transposed: bool, fast: bool, n_reserved: int, dtype: Any, x: Any, w: Any, *bounds: Array
) -> Array:
    """Return `grouped_matmul` by a kernel, for groups of rows within these bounds; all but arrays are static."""
    from pallas_kernels.matmul.grouped_block_mosaic import grouped_block_matmul
    from pallas_kernels.matmul.grouped_mosaic import grouped_matmul

    scale = row_scale = column_scale = None
    if isinstance(w, DeferredMatrices):
        w = w.quantize()
    groups = Groups(*bounds)
    out_dtype, first_row = _kernel_dtype(dtype), groups.starts[0]
    with reserved_sms(n_reserved):
        if kernel_name == "int8 block":
            return lax.optimization_barrier(_multiply_int8_blocks(x, w, groups, out_dtype).astype(dtype))
        if kernel_name == "block":
            x_scale, w_scale = (q.scale.astype(jnp.float32) for q in (x, w))
            y = grouped_block_matmul(
                x.codes, w.codes, x_scale, w_scale, groups.sizes, first_row=first_row, out_dtype=out_dtype
            )
        else:
            if kernel_name == "codes":
                scale, row_scale, column_scale = _row_scales(x, w)
                x, w = x.codes, w.codes
            else:
                x, w = _to_bf16(x), _to_bf16(w)
                w = jnp.swapaxes(w, 1, 2) if transposed else w
            y = grouped_matmul(
                x,
                w,
                groups.sizes,
                first_row=first_row,
                scale=scale,
                row_scale=row_scale,
                column_scale=column_scale,
                out_dtype=out_dtype,
                fast=fast,
            )
    # Without the barrier, XLA duplicates the call if a loop saves the result (dynamic slice fusion).
    return lax.optimization_barrier(y.astype(dtype))


def _multiply_int8_blocks(x: QTensor | FallbackTensor, w: QTensor, groups: Groups, dtype: DTypeLike) -> Array:
    """Return the product of rows in int8 blocks. The kernel reads them where each group starts at a block."""
    from pallas_kernels.matmul.grouped_int8_mosaic import grouped_int8_block_matmul
    from pallas_kernels.matmul.matmul_int8_mosaic import BLOCK, FallbackResidual

    tokens = PaddedTokens.from_groups(groups, x.shape[0], BLOCK)

    def pad(q: QTensor) -> tuple[Array, Array]:
        return tokens.pad(q.codes), tokens.reduce_blocks(q.scale.astype(jnp.float32), BLOCK)

    base, residual = strip_residual(x), None
    if isinstance(x, FallbackTensor):
        is_fallback = tokens.reduce_blocks(x.fallback_mask.astype(jnp.int32), BLOCK) > 0
        residual = FallbackResidual(*pad(x.residual), is_fallback)
    codes, scale = pad(base)
    y = grouped_int8_block_matmul(
        codes, w.codes, scale, w.scale, tokens.block_groups, residual=residual, out_dtype=dtype
    )
    return jnp.take(y, tokens.row_positions, axis=0, mode="fill", fill_value=0)


def _row_scales(x: QTensor, w: QTensor) -> tuple[Array | None, Array | None, Array | None]:
    """Return the scales of each matrix, row of x and row of each matrix."""
    row_scale = jnp.broadcast_to(x.scale.astype(jnp.float32)[:, 0], (x.shape[0],))
    scale = w.scale.astype(jnp.float32)[:, :, 0]
    return (scale[:, 0], row_scale, None) if scale.shape[1] == 1 else (None, row_scale, scale)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def multiply_tokens(
    kernel_name: KernelName,
    fast: bool,
    n_reserved: int,
    dtype: Any,
    a: Any,
    b: Any,
    rows: Array,
    starts: Array,
    ends: Array,
    scale: Array | None,
    row_scale: Array | None,
    column_scale: Array | None,
) -> Array:
    """Return `grouped_matmul_dw` by a kernel, for groups between these positions; all but arrays are static."""
    from pallas_kernels.matmul.grouped_block_mosaic import grouped_block_matmul_dw
    from pallas_kernels.matmul.grouped_int8_mosaic import grouped_int8_block_matmul_dw
    from pallas_kernels.matmul.grouped_mosaic import grouped_matmul_dw

    is_k_major = True
    if all(isinstance(x, UnpaddedRows) and find_spec(x) is None for x in (a, b)):
        is_k_major = False
        a, b = (_pad(_to_bf16(x.values), rows) for x in (a, b))
    else:
        a, b = (_columns(x, rows) for x in (a, b))
        if kernel_name in ("block", "int8 block"):
            multiply_blocks = grouped_block_matmul_dw if kernel_name == "block" else grouped_int8_block_matmul_dw
            with reserved_sms(n_reserved):
                dw = multiply_blocks(
                    a.codes, b.codes, a.scale, b.scale, starts, ends - starts, out_dtype=_kernel_dtype(dtype)
                )
            if scale is not None:
                dw = dw * scale[:, None, None]
            if row_scale is not None:
                dw = dw * row_scale[:, :, None]
            if column_scale is not None:
                dw = dw * column_scale[:, None]
            return lax.optimization_barrier(dw.astype(dtype))
        if kernel_name == "codes":
            own_scale = (a.scale * b.scale).reshape(())
            scale = own_scale * (jnp.ones_like(starts, jnp.float32) if scale is None else scale)
            a, b = a.codes, b.codes
        else:
            a, b = _to_bf16(a), _to_bf16(b)
    with reserved_sms(n_reserved):
        dw = grouped_matmul_dw(
            a,
            b,
            starts,
            ends - starts,
            scale=scale,
            row_scale=row_scale,
            column_scale=column_scale,
            is_k_major=is_k_major,
            out_dtype=_kernel_dtype(dtype),
            fast=fast,
        )
    return lax.optimization_barrier(dw.astype(dtype))


def _columns(x: Operand | UnpaddedRows, rows: Array) -> Operand:
    """Return an operand (n, length) in the padded axis."""
    if not isinstance(x, UnpaddedRows):
        return x
    if x.encoder is not None or not isinstance(x.values, QTensor):
        return x.to_columns(jax.tree.map(lambda leaf: _pad(leaf, rows), x.values))
    codes = x.values.codes
    if _transposition_unsupported_reason(codes) is not None:
        return transpose(x.values.with_codes(_pad(codes, rows)))
    from pallas_kernels.quantization import quantize_groups_triton

    table = block_table(rows, codes.shape[0])
    blocks = jnp.concatenate([table, jnp.zeros_like(table[:1])])
    coding = quantize_groups_triton.Coding("tensor", codes.dtype)
    _, columns = quantize_groups_triton.quantize_groups(
        codes, blocks, 1, columns=coding, compute_capability=capability()
    )
    return x.values.with_codes(columns)


def _transposition_unsupported_reason(codes: Array) -> str | None:
    """Return why the kernel cannot transpose codes into the padded axis, or None."""
    if (reason := missing_triton("quantization.quantize_groups_triton", fp8=False)) is not None:
        return reason
    from pallas_kernels.quantization import quantize_groups_triton

    return quantize_groups_triton.unsupported_reason(codes.shape, codes.dtype, ())


def _pad(x: Array, rows: Array) -> Array:
    return jnp.take(x, rows, axis=0, mode="fill", fill_value=0)


def _to_bf16(x: Any) -> Array:
    """Return the values of a matrix or a stack of matrices, rounded to bf16."""
    if not isinstance(x, QTensor):
        return x.astype(jnp.bfloat16)
    decode = lambda q: q.dequantize(jnp.bfloat16)  # noqa: E731
    return jax.vmap(decode)(x) if x.codes.ndim == 3 else decode(x)


def _kernel_dtype(dtype: DTypeLike) -> DTypeLike:
    return dtype if dtype in (jnp.bfloat16, jnp.float32) else jnp.float32
