"""Quantizes a matrix to 10-bit integers in groups of 128 of a row, and packs four of them into five bytes, in one pass.

A row of packed codes has all low bytes first, then the high bits, so that both are stored side by side.
"""

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import codec_triton as codec
from pallas_kernels import quantize_triton
from pallas_kernels import scaling_triton as device
from pallas_kernels.quantize_triton import QuantizeLaunch

GROUP, TOP = 128, 511
FP8_CAPABILITY = 75  # of the kernel: it makes no FP8 codes
_BIAS = tl.constexpr(512)
_ROUNDING = tl.constexpr(1.5 * 2.0**23)  # added to a small number, leaves an integer in the lowest bits
_ROUNDING_BITS = tl.constexpr(0x4B400000)
# Integers, as `scaling_triton` says it, of largest code 511.
HOW = device.NONE._replace(kind="group", size=GROUP, inverse_max=float(np.float32(1 / TOP)), format="int8")


@triton.jit
def _pack(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    HOW: tl.constexpr,
) -> None:
    """HIGH groups, of WIDE columns."""
    GROUPS: tl.constexpr = (N + WIDE - 1) // WIDE
    FOURS: tl.constexpr = (N + 3) // 4
    group = tl.program_id(0) * HIGH + tl.arange(0, HIGH)
    row, first, there = (group // GROUPS).to(tl.int64), group % GROUPS * WIDE, group < M * GROUPS
    column = first[:, None] + tl.arange(0, WIDE)[None, :]
    here = there[:, None] & (column < N)
    x = tl.load(x_ptr + row[:, None] * N + column, mask=here, other=0).to(tl.float32)
    scale = device.to_scale(tl.max(device.ordered(x, HOW), 1), HOW, tl.bfloat16)
    tl.store(scales_ptr + group, scale, mask=there)
    y = tl.minimum(tl.maximum(device.scaled(x, device.inverse(scale)[:, None], HOW), -511.0), 511.0)
    code = tl.where(y == y, codec.bits(y + _ROUNDING) - _ROUNDING_BITS, 0) + _BIAS
    out = codes_ptr + row[:, None] * (5 * FOURS)
    tl.store(out + column, (code & 255).to(tl.uint8), mask=there[:, None] & (column < 4 * FOURS))
    two = (code >> 8) << (2 * (tl.arange(0, WIDE) % 4))[None, :]
    high = tl.sum(tl.reshape(two, (HIGH, WIDE // 4, 4)), 2)
    four = (first // 4)[:, None] + tl.arange(0, WIDE // 4)[None, :]
    tl.store(out + 4 * FOURS + four, high.to(tl.uint8), mask=there[:, None] & (four < FOURS))


def pack(
    x: Array, *, launch: QuantizeLaunch | None = None, compute_capability: int | None = None
) -> tuple[Array, Array]:
    """Packed codes, uint8 (M, 5 ceil(N / 4)), and bf16 scales (M, ceil(N / 128)) of a matrix (M, N).

    Bit for bit those of `fp8jax.quantize` for "int10:group128" with bf16 scales. A group with a NaN or Inf has a NaN
    scale.

    Raises:
        ValueError: the matrix is empty or of another dtype than fp32, bf16 or fp16.
    """
    reason = quantize_triton.unsupported(x.shape, x.dtype, ())
    if reason is not None:
        raise ValueError(f"the packing kernel cannot run: {reason}")
    launch = launch or QuantizeLaunch(64, GROUP, 8)
    (m, n), groups = x.shape, -(-x.shape[1] // GROUP)
    shapes = [jax.ShapeDtypeStruct((m, 5 * -(-n // 4)), jnp.uint8), jax.ShapeDtypeStruct((m, groups), jnp.bfloat16)]
    programs = -(-m * groups // launch.rows)
    codes, scales = quantize_triton.call(_pack, [x], shapes, programs, launch, compute_capability, HOW=HOW)
    return codes, scales
