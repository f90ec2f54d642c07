"""Folds the powers of two of a microscaled matrix into its codes, for a product with row scales.

In: e4m3 codes (M, N), E8M0 exponents uint8 (M, ceil(N / 32)), fp32 scales. Out: e4m3 (M, N), fp32 (M, 1). Hardware: Ada
or newer. Reference: `_fold_reference` in fp8jax/ops/quantization/microscaling.py.
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
from pallas_kernels.quantization.quantize_triton import FP8_CAPABILITY as FP8_CAPABILITY

GROUP = 32
_NAN = tl.constexpr(255)
_ONE = tl.constexpr(127)


@triton.jit
def _power_as_fp16(byte: tl.tensor) -> tl.tensor:
    """Return 2^(byte - 127) in fp16, for bytes up to 127: exact from 2^-24 on, then 0; NaN for 255."""
    field = byte.to(tl.int32) - (_ONE - 15)
    subnormal = tl.where(field > -10, 512 >> tl.minimum(tl.maximum(-field, 0), 9), 0)
    half_bits = tl.where(field > 0, field << 10, subnormal)
    return tl.where(byte == _NAN, 0x7E00, half_bits).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _fold(
    codes_ptr: tl.tensor,
    exponents_ptr: tl.tensor,
    outer_scale_ptr: tl.tensor,
    folded_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    BY_ROW: tl.constexpr,
) -> None:
    """Fold BLOCK_M rows, BLOCK_N columns at a time; a row has up to GROUPS_POW2 groups."""
    GROUPS: tl.constexpr = (N + GROUP_SIZE - 1) // GROUP_SIZE
    MASKED: tl.constexpr = M % BLOCK_M > 0 or N % BLOCK_N > 0
    top = tl.program_id(0) * BLOCK_M
    m = top + tl.arange(0, BLOCK_M)
    codes_ptr += top.to(tl.int64) * N
    folded_ptr += top.to(tl.int64) * N
    exponents_ptr += top.to(tl.int64) * GROUPS
    row = tl.arange(0, BLOCK_M)[:, None]
    group_index = tl.arange(0, GROUPS_POW2)
    mask = scaling.tile_mask(m, group_index, M, GROUPS)
    exponents = tl.load(exponents_ptr + row * GROUPS + group_index[None, :], mask=mask, other=0).to(tl.int32)
    largest = tl.max(tl.where(exponents == _NAN, 0, exponents), 1)
    outer_scale = tl.load(outer_scale_ptr + (m if BY_ROW else m * 0), mask=m < M, other=1.0)
    scale = outer_scale * codec.from_bits(largest << 23)
    is_normal = scale >= scaling.TINY
    tl.store(scale_ptr + m, tl.where(is_normal, scale, outer_scale), mask=m < M)
    shift = tl.where(is_normal, _ONE - largest, 0)[:, None]
    for left in range(0, N, BLOCK_N):
        n, g = left + tl.arange(0, BLOCK_N), left // GROUP_SIZE + tl.arange(0, BLOCK_N // GROUP_SIZE)
        offsets, column_mask = row * N + n[None, :], scaling.tile_mask(m, n, M, N)
        codes = scaling.load_raw(codes_ptr, offsets, column_mask, MASKED)
        byte = scaling.load_raw(exponents_ptr, row * GROUPS + g[None, :], scaling.tile_mask(m, g, M, GROUPS), MASKED)
        byte = byte.to(tl.int32)
        byte = tl.where(byte == _NAN, _NAN, byte + shift)
        power = scaling.repeat_columns(_power_as_fp16(byte), GROUP_SIZE)
        folded = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16) * power
        scaling.store(folded_ptr, offsets, folded.to(tl.float8e4nv).to(tl.uint8, bitcast=True), column_mask, MASKED)


def fold_codes(
    codes: Array, exponents: Array, outer_scale: Array, *, num_warps: int = 4, compute_capability: int | None = None
) -> tuple[Array, Array]:
    """Return codes times their powers of two over the largest power of their row, and scales that include it.

    Each product is rounded to nearest even: exact while the code stays normal, zero below 2^-10. A NaN power turns its
    group into NaN.

    Args:
        codes: (M, N) float8_e4m3fn.
        exponents: (M, ceil(N / 32)) uint8, biased exponents (E8M0) of groups of 32 along N.
        outer_scale: positive fp32 scales, (1, 1) or (M, 1). If such a scale times the largest power is
            subnormal in fp32, the row keeps the scale, and its powers are folded as they are.

    Returns:
        Codes (M, N) and fp32 scales (M, 1).

    Raises:
        ValueError: other shapes or dtypes.
    """
    m, n = codes.shape
    groups = -(-n // GROUP)
    for name, x, shapes_allowed, dtype in (
        ("codes", codes, [(m, n)], jnp.float8_e4m3fn),
        ("exponents", exponents, [(m, groups)], jnp.uint8),
        ("outer_scale", outer_scale, [(1, 1), (m, 1)], jnp.float32),
    ):
        if x.shape not in shapes_allowed or x.dtype != dtype or 0 in x.shape:
            raise ValueError(
                f"{name} is {x.dtype}{list(x.shape)}, not {jnp.dtype(dtype)} of shape {shapes_allowed[-1]}"
            )
    block_n = min(max(triton.next_power_of_2(n), GROUP), 4096)
    launch = quantize_triton.QuantizeLaunch(max(8192 // block_n, 1), block_n, num_warps)
    shapes: list[Any] = [jax.ShapeDtypeStruct((m, n), jnp.uint8), jax.ShapeDtypeStruct((m, 1), jnp.float32)]
    inputs = [bitcast_bytes(codes, jnp.uint8), exponents, outer_scale]
    folded, scale = quantize_triton.call(
        _fold, inputs, shapes, -(-m // launch.block_m), launch, compute_capability,
        GROUP_SIZE=GROUP, GROUPS_POW2=triton.next_power_of_2(groups), BY_ROW=outer_scale.shape[0] > 1,
    )  # fmt: skip
    return bitcast_bytes(folded, codes.dtype), scale
