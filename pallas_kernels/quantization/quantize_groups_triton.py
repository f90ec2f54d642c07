"""Codes of the rows of groups, and their transposed copy on a token axis with a multiple of 128 tokens per group.

In: (T, N) fp32, bf16 or fp16, or 8-bit codes; optionally the rows to select, in the order of the groups. Out: 8-bit
codes (rows, N) and (N, tokens). Hardware: Ada or newer for FP8 codes, Turing otherwise. Reference: `_reference` in
fp8jax/ops/quantization/grouped.py.

A program reads a tile of 128 tokens of one group, in words as in `quantize_triton`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.dispatch.call_triton import bitcast_bytes
from pallas_kernels.quantization import codec_triton as codec
from pallas_kernels.quantization import quantize_triton
from pallas_kernels.quantization import scaling_triton as scaling
from pallas_kernels.quantization import strided_tiles_triton as strided_tiles
from pallas_kernels.quantization.quantize_triton import FP8_CAPABILITY as FP8_CAPABILITY
from pallas_kernels.quantization.quantize_triton import Coding, QuantizeLaunch

BLOCK = 128  # tokens of a block, all of one group
COPY = scaling.NO_CODING._replace(kind="copy")  # 8-bit codes as they are


@triton.jit
def _codes(x: tl.tensor, factor: tl.tensor, CODING: tl.constexpr) -> tl.tensor:
    codes = x
    if CODING.kind != "copy":
        value = codec.to_fp32(x, False)
        codes = scaling.encode(value, scaling.apply_inverse_scale(value, factor, CODING), 0, CODING)
    return codes


@triton.jit
def _multiply_codes(x: tl.tensor, factor: tl.tensor, CODING: tl.constexpr) -> tl.tensor:
    """Return the FP8 codes of a factor times the values of codes."""
    value = x.to(tl.float8e5 if CODING.format == "float8_e5m2" else tl.float8e4nv, bitcast=True).to(tl.float32)
    return scaling.encode(value, scaling.apply_inverse_scale(value, factor, CODING), 0, CODING)


@triton.jit
def _load_slice(
    x_ptr: tl.tensor, index_ptr: tl.tensor, row: tl.tensor, is_row: tl.tensor, n: tl.tensor, N: tl.constexpr,
    HAS_INDEX: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the values of some rows, which `index_ptr` may look up; zeros where `is_row` is false."""
    source = tl.load(index_ptr + row, mask=is_row, other=0) if HAS_INDEX else row
    offsets = (source.to(tl.int64) * N)[:, None] + n[None, :]
    return tl.load(x_ptr + offsets, mask=is_row[:, None] & (n < N)[None, :], other=0)


@triton.jit
def _quantize_groups(
    x_ptr: tl.tensor,
    index_ptr: tl.tensor,
    block_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    column_scale_ptr: tl.tensor,
    row_codes_ptr: tl.tensor,
    column_codes_ptr: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    ROW_CODING: tl.constexpr,
    COLUMN_CODING: tl.constexpr,
) -> None:
    """Write the codes of a tile (BLOCK_M, BLOCK_N) of M tokens; tokens of no row get zeros."""
    MASKED: tl.constexpr = N % BLOCK_N > 0
    NUM_BLOCKS: tl.constexpr = M // BLOCK_SIZE
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    top, left = program // TILES_N * BLOCK_M, program % TILES_N * BLOCK_N
    block = top // BLOCK_SIZE
    group = tl.load(block_ptr + 2 * NUM_BLOCKS + block)
    row_count = tl.load(block_ptr + NUM_BLOCKS + block)
    i, n = tl.arange(0, BLOCK_M // 4), left + tl.arange(0, BLOCK_N)
    row_in_block = top % BLOCK_SIZE + 4 * i
    row = tl.load(block_ptr + block) + row_in_block
    # All loads come before the first store.
    x0 = _load_slice(x_ptr, index_ptr, row, row_in_block < row_count, n, N, HAS_INDEX)
    x1 = _load_slice(x_ptr, index_ptr, row + 1, row_in_block + 1 < row_count, n, N, HAS_INDEX)
    x2 = _load_slice(x_ptr, index_ptr, row + 2, row_in_block + 2 < row_count, n, N, HAS_INDEX)
    x3 = _load_slice(x_ptr, index_ptr, row + 3, row_in_block + 3 < row_count, n, N, HAS_INDEX)
    slices = (x0, x1, x2, x3)
    row_factor = 1.0
    if ROW_CODING.kind == "tensor":
        row_factor = scaling.reciprocal(tl.load(row_scale_ptr))
    column_factor = 1.0
    if COLUMN_CODING.kind == "tensor":
        column_factor = scaling.reciprocal(tl.load(column_scale_ptr))
    elif COLUMN_CODING.kind == "token":
        column_factor = scaling.reciprocal(tl.load(column_scale_ptr + tl.minimum(group, NUM_GROUPS - 1)))
    words = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.uint32)
    for j in tl.static_range(4):
        if ROW_CODING.kind != "none":
            if ROW_CODING.kind == "token":
                scale = tl.load(row_scale_ptr + row + j, mask=row_in_block + j < row_count, other=1.0)
                row_factor = scaling.reciprocal(scale)[:, None]
            mask = (row_in_block + j < row_count)[:, None] & (n < N)[None, :]
            offsets = ((row + j).to(tl.int64) * N)[:, None] + n[None, :]
            tl.store(row_codes_ptr + offsets, _codes(slices[j], row_factor, ROW_CODING), mask=mask)
        if COLUMN_CODING.kind != "none":
            if COLUMN_CODING.kind == "copy" and COLUMN_CODING.has_row_scales:
                row_factor = tl.load(row_scale_ptr + row + j, mask=row_in_block + j < row_count, other=0.0)[:, None]
                codes = _multiply_codes(slices[j], row_factor, COLUMN_CODING)
            else:
                codes = _codes(slices[j], column_factor, COLUMN_CODING)
            words = strided_tiles.insert_byte(words, codes, j, N % 4 == 0)
    if COLUMN_CODING.kind != "none":
        strided_tiles.store_transposed(column_codes_ptr, top, left, i, n, words, M, N, MASKED)


def unsupported_reason(shape: tuple[int, ...], dtype: Any, codings: tuple[Coding | None, ...]) -> str | None:
    """Return why the kernel does not support this shape, dtype or coding, or None."""
    is_copy = jnp.dtype(dtype).itemsize == 1
    reason = quantize_triton.unsupported_reason(shape, jnp.bfloat16 if is_copy else dtype, codings)
    if reason is None and any(
        c is not None and (c.kind not in ("tensor", "token") or c.is_stochastic) for c in codings
    ):
        return "it needs given scales and rounding to nearest"
    return reason


def quantize_groups(
    x: Array,
    blocks: Array,
    num_groups: int,
    *,
    index: Array | None = None,
    rows: Coding | None = None,
    columns: Coding | None = None,
    row_scale: Array | None = None,
    column_scale: Array | None = None,
    row_factor: Array | None = None,
    compute_capability: int | None = None,
) -> tuple[Array | None, Array | None]:
    """Return the codes of the rows of groups, and the transposed codes on a token axis of whole blocks per group.

    Args:
        x: (T, N) fp32, bf16 or fp16, or 8-bit codes, which are copied.
        blocks: int32 (3, tokens / 128): first row of each block of tokens, number of its rows, and its group; a block
            without rows may have any group.
        index: int32 (rows,), the row of x of each row; None if x has them in this order.
        rows, columns: codings of kind "tensor" or "token", with one scale for all rows, or one each; None for no
            result. Columns have one for all groups, or one each. 8-bit codes take codings of their own dtype.
        row_scale: fp32 () or (rows,). column_scale: fp32 () or (groups,).
        row_factor: fp32 (rows,), multiplied into the columns of FP8 codes; None for 1.
        compute_capability: GPU architecture to compile for, such as 90; None for the present GPU.

    Returns:
        Codes (rows, N), and codes (N, tokens); None for what is not requested. Tokens of no row are 0. Codes of rows
        that are in no block are not initialized.

    Raises:
        ValueError: the kernel does not support these arguments; the message has the reason.
    """
    num_tokens, n, num_rows = blocks.shape[1] * BLOCK, x.shape[1], (x if index is None else index).shape[0]
    if reason := unsupported_reason(x.shape, x.dtype, (rows, columns)):
        raise ValueError(f"the kernel for groups cannot run: {reason}")
    is_copy = x.dtype.itemsize == 1
    if is_copy and any(c is not None and c.dtype != x.dtype for c in (rows, columns)):
        raise ValueError(f"the kernel for groups cannot run: codes of {x.dtype} can only be copied to the same dtype")
    launch = QuantizeLaunch()
    scales = [
        jnp.ones(1, jnp.float32) if s is None else s.astype(jnp.float32).reshape(-1)
        for s in (row_factor if is_copy else row_scale, column_scale)
    ]
    constants = [scaling.NO_CODING if c is None else COPY if is_copy else c.constants for c in (rows, columns)]
    if row_factor is not None and columns is not None:
        constants[1] = columns.constants._replace(kind="copy", has_row_scales=True)
    placeholder = (1, 1)
    shapes = [
        jax.ShapeDtypeStruct(placeholder if rows is None else (num_rows, n), jnp.uint8),
        jax.ShapeDtypeStruct(placeholder if columns is None else (n, num_tokens), jnp.uint8),
    ]
    source = bitcast_bytes(x, jnp.uint8) if is_copy else x
    index_or_placeholder = jnp.zeros(1, jnp.int32) if index is None else index.astype(jnp.int32)
    grid = num_tokens // launch.block_m * -(-n // launch.block_n)
    outputs = quantize_triton.call(
        _quantize_groups, [source, index_or_placeholder, blocks, *scales], shapes, grid, launch, compute_capability,
        shape=(num_tokens, n), NUM_GROUPS=num_groups, BLOCK_SIZE=BLOCK, HAS_INDEX=index is not None,
        ROW_CODING=constants[0], COLUMN_CODING=constants[1],
    )  # fmt: skip
    row_codes, column_codes = (
        None if c is None else bitcast_bytes(codes, c.dtype) for c, codes in zip((rows, columns), outputs, strict=True)
    )
    return row_codes, column_codes
