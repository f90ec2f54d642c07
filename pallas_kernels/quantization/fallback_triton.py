"""INT8 codes of a matrix in blocks, with the residual of fallback blocks, in one pass.

In: (M, N) fp32, bf16 or fp16, and an fp32 threshold. Out: `FallbackCodes`. Hardware: Turing or newer. Reference:
`_reference` in fp8jax/ops/quantization/fallback.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.dispatch.call_triton import bitcast_bytes
from pallas_kernels.quantization import quantize_triton
from pallas_kernels.quantization import scaling_triton as scaling
from pallas_kernels.quantization.quantize_triton import QuantizeLaunch

BLOCK_SIZES = (32, 128)
FP8_CAPABILITY = 75  # the kernel has no FP8 codes


class FallbackCodes(NamedTuple):
    """Codes of a matrix (M, N) in blocks (ceil(M / side), ceil(N / side)).

    Attributes:
        base, base_scale: int8 codes (M, N), and fp32 per block.
        residual: int8 codes (M, N) of the error of the base; undefined in other blocks than fallback blocks.
        residual_scale: fp32, per block; 1 in other blocks.
        is_fallback: bool, per block.
        stochastic: int8 codes with the scales of the base, rounded stochastically; or None.
    """

    base: Array
    base_scale: Array
    residual: Array
    residual_scale: Array
    is_fallback: Array
    stochastic: Array | None


@triton.jit
def _block_maxima(keys: tl.tensor, SIDE: tl.constexpr) -> tl.tensor:
    """Return maxima of blocks, from those of each four rows."""
    return scaling.max_along_rows(scaling.max_along_columns(keys, SIDE // 4), SIDE)


@triton.jit
def _broadcast_blocks(values: tl.tensor, SIDE: tl.constexpr) -> tl.tensor:
    """Broadcast values of blocks to the elements of a slice."""
    return scaling.repeat_columns(scaling.repeat_rows(values, SIDE // 4), SIDE)


@triton.jit
def _base_error(x: tl.tensor, inverse: tl.tensor, scale: tl.tensor, CODING: tl.constexpr) -> tl.tensor:
    """Return the rounding error of the base codes."""
    codes = scaling.encode(x, scaling.apply_inverse_scale(x, inverse, CODING), 0, CODING)
    nonzero = tl.where(tl.abs(x) < scaling.TINY, 0.0, x)
    return tl.fma(-codes.to(tl.int8, bitcast=True).to(tl.float32), scale, nonzero)


@triton.jit
def _fallback(
    x_ptr: tl.tensor,
    threshold_ptr: tl.tensor,
    noise_ptr: tl.tensor,
    base_ptr: tl.tensor,
    base_scale_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    residual_scale_ptr: tl.tensor,
    is_fallback_ptr: tl.tensor,
    stochastic_ptr: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CODING: tl.constexpr,
    HAS_STOCHASTIC: tl.constexpr,
    STOCHASTIC_CODING: tl.constexpr,
) -> None:
    """Write a tile (BLOCK_M, BLOCK_N) of whole blocks, as four slices of every fourth row."""
    MASKED: tl.constexpr = M % BLOCK_M > 0 or N % BLOCK_N > 0
    SIDE: tl.constexpr = CODING.size
    SEVERAL_BLOCKS: tl.constexpr = MASKED or BLOCK_M > SIDE or BLOCK_N > SIDE
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    BLOCKS: tl.constexpr = (N + SIDE - 1) // SIDE
    program = tl.program_id(0)
    top, left = program // TILES_N * BLOCK_M, program % TILES_N * BLOCK_N
    first = top.to(tl.int64) * N + left
    i, n = tl.arange(0, BLOCK_M // 4), left + tl.arange(0, BLOCK_N)
    m0 = top + 4 * i
    slice_offsets = (4 * i * N)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    # Every pass reads the tile again, from a cache: a tile in registers would reduce the occupancy.
    keys = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.int32)
    for j in tl.static_range(4):
        loaded = scaling.load_raw(x_ptr + first, slice_offsets + j * N, scaling.tile_mask(m0 + j, n, M, N), MASKED)
        keys = tl.maximum(keys, scaling.magnitude_key(loaded, CODING))
    block_keys = _block_maxima(keys, SIDE)
    scale = scaling.scale_from_key(block_keys, CODING, tl.float32)
    is_fallback = scaling.magnitude_from_key(block_keys, CODING) > tl.load(threshold_ptr)
    u, v = top // SIDE + tl.arange(0, BLOCK_M // SIDE), left // SIDE + tl.arange(0, BLOCK_N // SIDE)
    block_offsets, block_mask = (
        u[:, None] * BLOCKS + v[None, :],
        scaling.tile_mask(u, v, (M + SIDE - 1) // SIDE, BLOCKS),
    )
    scaling.store(base_scale_ptr, block_offsets, scale, block_mask, MASKED)
    scaling.store(is_fallback_ptr, block_offsets, is_fallback.to(tl.uint8), block_mask, MASKED)

    random = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.uint32)
    if HAS_STOCHASTIC:
        # Noise depends on the position in the whole matrix, because `x` may be a part. Four rows share 32 bits.
        noise_index = (top // 4 + i).to(tl.uint32)[:, None] * tl.load(noise_ptr + 2) + n.to(tl.uint32)[None, :]
        random = scaling.hash_bits(noise_index + tl.load(noise_ptr + 3), tl.load(noise_ptr), tl.load(noise_ptr + 1))
    inverse = _broadcast_blocks(scaling.reciprocal(scale), SIDE)
    for row in tl.range(0, 4, loop_unroll_factor=1):
        mask = scaling.tile_mask(m0 + row, n, M, N)
        x = scaling.load(x_ptr + first, slice_offsets + row * N, mask, MASKED)
        y = scaling.apply_inverse_scale(x, inverse, CODING)
        if HAS_STOCHASTIC:
            rotated = (random >> (8 * row)) | (random << ((32 - 8 * row) & 31))
            scaling.store(
                stochastic_ptr + first,
                slice_offsets + row * N,
                scaling.encode(x, y, rotated, STOCHASTIC_CODING),
                mask,
                MASKED,
            )
        scaling.store(base_ptr + first, slice_offsets + row * N, scaling.encode(x, y, 0, CODING), mask, MASKED)

    residual_scale = tl.full(scale.shape, 1.0, tl.float32)
    if tl.max(tl.max(is_fallback.to(tl.int32), 1), 0) > 0:
        base_scale = _broadcast_blocks(scale, SIDE)
        keys = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.int32)
        for row in tl.range(0, 4, loop_unroll_factor=1):
            x = scaling.load(x_ptr + first, slice_offsets + row * N, scaling.tile_mask(m0 + row, n, M, N), MASKED)
            keys = tl.maximum(keys, scaling.magnitude_key(_base_error(x, inverse, base_scale, CODING), CODING))
        residual_scale = tl.where(
            is_fallback, scaling.scale_from_key(_block_maxima(keys, SIDE), CODING, tl.float32), 1.0
        )
        inverse_residual_scale, fallback_mask = (
            _broadcast_blocks(scaling.reciprocal(residual_scale), SIDE),
            _broadcast_blocks(is_fallback.to(tl.int32), SIDE) > 0,
        )
        for row in tl.range(0, 4, loop_unroll_factor=1):
            mask = scaling.tile_mask(m0 + row, n, M, N)
            error = _base_error(
                scaling.load(x_ptr + first, slice_offsets + row * N, mask, MASKED), inverse, base_scale, CODING
            )
            codes = scaling.encode(error, scaling.apply_inverse_scale(error, inverse_residual_scale, CODING), 0, CODING)
            scaling.store(residual_ptr + first, slice_offsets + row * N, codes, fallback_mask & mask, SEVERAL_BLOCKS)
    scaling.store(residual_scale_ptr, block_offsets, residual_scale, block_mask, MASKED)


def quantize(
    x: Array,
    threshold: Array,
    side: int,
    *,
    seed: Array | None = None,
    rng_offset: Array | None = None,
    compute_capability: int | None = None,
) -> FallbackCodes:
    """Return int8 codes of a matrix in blocks, with a residual for blocks with an amax above a threshold.

    Args:
        x: (M, N), fp32, bf16 or fp16.
        threshold: fp32 scalar.
        side: side of a block, 32 or 128.
        seed: two uint32 words, for `FallbackCodes.stochastic`; None omits it.
        rng_offset, compute_capability: as in `quantize_triton.quantize`.

    Raises:
        ValueError: the kernel does not support these arguments; the message has the reason.
    """
    reason = unsupported_reason(x, side)
    if reason is not None:
        raise ValueError(f"the fallback kernel cannot run: {reason}")
    launch = QuantizeLaunch(side, 128, 4 if side == 128 else 8)
    m, n = x.shape
    blocks = (-(-m // side), -(-n // side))
    noise = jnp.zeros(4, jnp.uint32)
    if seed is not None:
        noise = jnp.concatenate([seed, jnp.array([n, 0], jnp.uint32) if rng_offset is None else rng_offset])
    shape = jax.ShapeDtypeStruct
    shapes = [
        *(shape((m, n), jnp.uint8), shape(blocks, jnp.float32)),
        *(shape((m, n), jnp.uint8), shape(blocks, jnp.float32), shape(blocks, jnp.uint8)),
        shape((m, n) if seed is not None else (1, 1), jnp.uint8),
    ]
    coding = scaling.Coding("block", jnp.int8, side).constants
    programs = -(-m // launch.block_m) * -(-n // launch.block_n)
    base, base_scale, residual, residual_scale, is_fallback, stochastic = quantize_triton.call(
        _fallback, [x, threshold.reshape(1).astype(jnp.float32), noise], shapes, programs, launch, compute_capability,
        CODING=coding, HAS_STOCHASTIC=seed is not None, STOCHASTIC_CODING=coding._replace(is_stochastic=True),
    )  # fmt: skip
    base, residual, stochastic = (bitcast_bytes(c, jnp.int8) for c in (base, residual, stochastic))
    return FallbackCodes(
        base, base_scale, residual, residual_scale, is_fallback != 0, stochastic if seed is not None else None
    )


def unsupported_reason(x: Array, side: int) -> str | None:
    """Return why the kernel cannot quantize this matrix in blocks of this side, or None."""
    if side not in BLOCK_SIZES:
        return f"blocks of {side} are none of {' and '.join(map(str, BLOCK_SIZES))}"
    return quantize_triton.unsupported_reason(x.shape, x.dtype, (scaling.Coding("block", jnp.int8, side),))
