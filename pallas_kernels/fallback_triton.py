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
def _block_maxima(below: tl.tensor, SIDE: tl.constexpr) -> tl.tensor:
    """Maxima of blocks, given those of each four rows."""
    return device.along_rows(device.along_columns(below, SIDE // 4), SIDE)


@triton.jit
def _spread(values: tl.tensor, SIDE: tl.constexpr) -> tl.tensor:
    """Values of blocks for each element of a slice."""
    return device.over_columns(device.over_rows(values, SIDE // 4), SIDE)


@triton.jit
def _rest(x: tl.tensor, inverse: tl.tensor, scale: tl.tensor, HOW: tl.constexpr) -> tl.tensor:
    """What the base leaves of values."""
    codes = device.encode(x, device.scaled(x, inverse, HOW), 0, HOW)
    nonzero = tl.where(tl.abs(x) < device.TINY, 0.0, x)
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
    """A tile of HIGH rows and WIDE columns, of whole blocks, as four slices of every fourth row."""
    MASKED: tl.constexpr = M % HIGH > 0 or N % WIDE > 0
    SIDE: tl.constexpr = HOW.size
    SEVERAL: tl.constexpr = MASKED or HIGH > SIDE or WIDE > SIDE
    ACROSS: tl.constexpr = (N + WIDE - 1) // WIDE
    BLOCKS: tl.constexpr = (N + SIDE - 1) // SIDE
    program = tl.program_id(0)
    top, left = program // ACROSS * HIGH, program % ACROSS * WIDE
    first = top.to(tl.int64) * N + left
    i, n = tl.arange(0, HIGH // 4), left + tl.arange(0, WIDE)
    m0 = top + 4 * i
    at0 = (4 * i * N)[:, None] + tl.arange(0, WIDE)[None, :]
    # Every pass reads the tile anew, from a cache: registers that held it would keep other programs away.
    below = tl.zeros((HIGH // 4, WIDE), tl.int32)
    for j in tl.static_range(4):
        loaded = device.load_plain(x_ptr + first, at0 + j * N, device.inside(m0 + j, n, M, N), MASKED)
        below = tl.maximum(below, device.ordered(loaded, HOW))
    maxima = _block_maxima(below, SIDE)
    scale = device.to_scale(maxima, HOW, tl.float32)
    used = device.largest(maxima, HOW) > tl.load(threshold_ptr)
    u, v = top // SIDE + tl.arange(0, HIGH // SIDE), left // SIDE + tl.arange(0, WIDE // SIDE)
    block_at, block_here = u[:, None] * BLOCKS + v[None, :], device.inside(u, v, (M + SIDE - 1) // SIDE, BLOCKS)
    device.store(base_scale_ptr, block_at, scale, block_here, MASKED)
    device.store(used_ptr, block_at, used.to(tl.uint8), block_here, MASKED)

    random = tl.zeros((HIGH // 4, WIDE), tl.uint32)
    if DRAWN:
        # By the place in the whole matrix, of which this may be a part; four rows share 32 bits.
        place = (top // 4 + i).to(tl.uint32)[:, None] * tl.load(noise_ptr + 2) + n.to(tl.uint32)[None, :]
        random = device.hashed(place + tl.load(noise_ptr + 3), tl.load(noise_ptr), tl.load(noise_ptr + 1))
    inverse = _spread(device.inverse(scale), SIDE)
    for row in tl.range(0, 4, loop_unroll_factor=1):
        here = device.inside(m0 + row, n, M, N)
        x = device.load(x_ptr + first, at0 + row * N, here, MASKED)
        y = device.scaled(x, inverse, HOW)
        if DRAWN:
            turned = (random >> (8 * row)) | (random << ((32 - 8 * row) & 31))
            device.store(drawn_ptr + first, at0 + row * N, device.encode(x, y, turned, RANDOM), here, MASKED)
        device.store(base_ptr + first, at0 + row * N, device.encode(x, y, 0, HOW), here, MASKED)

    residual_scale = tl.full(scale.shape, 1.0, tl.float32)
    if tl.max(tl.max(used.to(tl.int32), 1), 0) > 0:
        base_scale = _spread(scale, SIDE)
        below = tl.zeros((HIGH // 4, WIDE), tl.int32)
        for row in tl.range(0, 4, loop_unroll_factor=1):
            x = device.load(x_ptr + first, at0 + row * N, device.inside(m0 + row, n, M, N), MASKED)
            below = tl.maximum(below, device.ordered(_rest(x, inverse, base_scale, HOW), HOW))
        residual_scale = tl.where(used, device.to_scale(_block_maxima(below, SIDE), HOW, tl.float32), 1.0)
        unit, falls = _spread(device.inverse(residual_scale), SIDE), _spread(used.to(tl.int32), SIDE) > 0
        for row in tl.range(0, 4, loop_unroll_factor=1):
            here = device.inside(m0 + row, n, M, N)
            rest = _rest(device.load(x_ptr + first, at0 + row * N, here, MASKED), inverse, base_scale, HOW)
            codes = device.encode(rest, device.scaled(rest, unit, HOW), 0, HOW)
            device.store(residual_ptr + first, at0 + row * N, codes, falls & here, SEVERAL)
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
    launch = launch or QuantizeLaunch(side, 128, 4 if side == 128 else 8)
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
