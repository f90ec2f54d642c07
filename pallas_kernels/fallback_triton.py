"""Quantizes a matrix to int8 in blocks, and the residual of the blocks that fall back, in one pass."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import quantize_triton
from pallas_kernels import scaling_triton as device
from pallas_kernels.quantize_triton import QuantizeLaunch

SIDES = (32, 128)
FP8_CAPABILITY = 75  # of the kernel: it makes no FP8 codes


class FallbackCodes(NamedTuple):
    """What the kernel makes of a matrix (M, N), whose blocks are (ceil(M / side), ceil(N / side)).

    Attributes:
        base: int8 codes. base_scale: fp32, of blocks.
        residual: int8 codes of what the base leaves; of blocks that do not fall back nothing is written.
        residual_scale: fp32, of blocks; 1 where a block does not fall back.
        used: bool, of blocks: those that fall back.
        drawn: int8 codes under the scales of the base, rounded stochastically; or None.
    """

    base: Array
    base_scale: Array
    residual: Array
    residual_scale: Array
    used: Array
    drawn: Array | None


@triton.jit
def _block_maxima(x: tl.tensor, HOW: tl.constexpr) -> tl.tensor:
    """`ordered` maxima of the blocks of fp32 values."""
    return device.along_rows(device.along_columns(device.ordered(x, HOW), HOW.size), HOW.size)


@triton.jit
def _spread(values: tl.tensor, SIDE: tl.constexpr) -> tl.tensor:
    return device.over_columns(device.over_rows(values, SIDE), SIDE)


@triton.jit
def _fallback(
    x_ptr: tl.tensor,
    threshold_ptr: tl.tensor,
    noise_ptr: tl.tensor,
    base_ptr: tl.tensor,
    base_scale_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    residual_scale_ptr: tl.tensor,
    used_ptr: tl.tensor,
    drawn_ptr: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    HOW: tl.constexpr,
    DRAWN: tl.constexpr,
    RANDOM: tl.constexpr,
) -> None:
    """A tile of HIGH rows and WIDE columns, of whole blocks."""
    MASKED: tl.constexpr = M % HIGH > 0 or N % WIDE > 0
    SIDE: tl.constexpr = HOW.size
    ACROSS: tl.constexpr = (N + WIDE - 1) // WIDE
    BLOCKS: tl.constexpr = (N + SIDE - 1) // SIDE
    program = tl.program_id(0)
    top, left = program // ACROSS * HIGH, program % ACROSS * WIDE
    first = top.to(tl.int64) * N + left
    i, j = tl.arange(0, HIGH), tl.arange(0, WIDE)
    at, here = i[:, None] * N + j[None, :], device.inside(top + i, left + j, M, N)
    u, v = top // SIDE + tl.arange(0, HIGH // SIDE), left // SIDE + tl.arange(0, WIDE // SIDE)
    block_at, block_here = u[:, None] * BLOCKS + v[None, :], device.inside(u, v, (M + SIDE - 1) // SIDE, BLOCKS)

    x = device.load(x_ptr + first, at, here, MASKED)
    maxima = _block_maxima(x, HOW)
    scale = device.to_scale(maxima, HOW, tl.float32)
    used = device.largest(maxima, HOW) > tl.load(threshold_ptr)
    spread_scale = _spread(scale, SIDE)
    y = device.scaled(x, _spread(device.inverse(scale), SIDE), HOW)
    device.store(base_scale_ptr, block_at, scale, block_here, MASKED)
    device.store(used_ptr, block_at, used.to(tl.uint8), block_here, MASKED)
    if DRAWN:
        word1, word2 = tl.load(noise_ptr), tl.load(noise_ptr + 1)
        # By the place in the whole matrix, of which this may be a part; four rows share 32 bits.
        place = ((top + i) // 4).to(tl.uint32)[:, None] * tl.load(noise_ptr + 2) + (left + j).to(tl.uint32)[None, :]
        random = device.hash(place + tl.load(noise_ptr + 3), word1, word2)
        turn = (8 * ((top + i) % 4)).to(tl.uint32)[:, None]
        random = (random >> turn) | (random << ((32 - turn) & 31))
        device.store(drawn_ptr + first, at, device.encode(x, y, random, RANDOM), here, MASKED)
    codes = device.encode(x, y, tl.zeros((HIGH, WIDE), tl.uint32), HOW)
    device.store(base_ptr + first, at, codes, here, MASKED)

    residual_scale = tl.full(scale.shape, 1.0, tl.float32)
    if tl.max(tl.max(used.to(tl.int32), 1), 0) > 0:
        nonzero = tl.where(tl.abs(x) < device.TINY, 0.0, x)
        value = codes.to(tl.int8, bitcast=True).to(tl.float32)
        rest = tl.fma(-value, spread_scale, nonzero)
        residual_scale = tl.where(used, device.to_scale(_block_maxima(rest, HOW), HOW, tl.float32), 1.0)
        z = device.scaled(rest, _spread(device.inverse(residual_scale), SIDE), HOW)
        codes = device.encode(rest, z, tl.zeros((HIGH, WIDE), tl.uint32), HOW)
        falls = _spread(used.to(tl.int32), SIDE) > 0
        tl.store(residual_ptr + first + at, codes, mask=falls & here)
    device.store(residual_scale_ptr, block_at, residual_scale, block_here, MASKED)


def quantize(
    x: Array,
    threshold: Array,
    side: int,
    *,
    words: Array | None = None,
    place: Array | None = None,
    launch: QuantizeLaunch | None = None,
    compute_capability: int | None = None,
) -> FallbackCodes:
    """Blocks of a matrix, with the residual of those whose largest magnitude exceeds a threshold.

    Args:
        x: (M, N), fp32, bf16 or fp16.
        threshold: fp32 scalar.
        side: of a block, 32 or 128.
        words: two uint32 words, for `Codes.drawn`; None leaves it out.
        place: as of `quantize_triton.quantize`.
        launch: how the work is cut; sides of a tile are multiples of a block's.
        compute_capability: of the GPU to compile for, as 90; None asks the GPU.

    Raises:
        ValueError: the kernel cannot take these; the message says why.
    """
    reason = unsupported(x, side)
    if reason is not None:
        raise ValueError(f"the fallback kernel cannot run: {reason}")
    launch = launch or QuantizeLaunch(side, 128, 16 if side == 128 else 8)
    m, n = x.shape
    blocks = (-(-m // side), -(-n // side))
    noise = jnp.zeros(4, jnp.uint32)
    if words is not None:
        noise = jnp.concatenate([words, jnp.array([n, 0], jnp.uint32) if place is None else place])
    shape = jax.ShapeDtypeStruct
    shapes = [
        *(shape((m, n), jnp.uint8), shape(blocks, jnp.float32)),
        *(shape((m, n), jnp.uint8), shape(blocks, jnp.float32), shape(blocks, jnp.uint8)),
        shape((m, n) if words is not None else (1, 1), jnp.uint8),
    ]
    how = device.Coding("block", jnp.int8, side).static
    programs = -(-m // launch.rows) * -(-n // launch.columns)
    base, base_scale, residual, residual_scale, used, drawn = quantize_triton.call(
        _fallback, [x, threshold.reshape(1).astype(jnp.float32), noise], shapes, programs, launch, compute_capability,
        HOW=how, DRAWN=words is not None, RANDOM=how._replace(stochastic=True),
    )  # fmt: skip
    base, residual, drawn = (jax.lax.bitcast_convert_type(c, jnp.int8) for c in (base, residual, drawn))
    return FallbackCodes(base, base_scale, residual, residual_scale, used != 0, drawn if words is not None else None)


def unsupported(x: Array, side: int) -> str | None:
    """Why the kernel cannot quantize this matrix in blocks of this side, or None."""
    if side not in SIDES:
        return f"blocks of {side} are none of {' and '.join(map(str, SIDES))}"
    return quantize_triton.unsupported(x.shape, x.dtype, (device.Coding("block", jnp.int8, side),))
