"""The transposed copy of a matrix of 8-bit codes, in tiles of words as in `quantize_triton`.

In: 8-bit (M, N), optionally fp32 factors (M, 1). Out: (N, M) in the same dtype. Hardware: Ada or newer. Reference:
`_multiply_and_transpose` in fp8jax/ops/quantization/quantize.py.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.dispatch.call_triton import bitcast_bytes
from pallas_kernels.quantization import quantize_triton
from pallas_kernels.quantization import scaling_triton as scaling
from pallas_kernels.quantization import strided_tiles_triton as strided_tiles
from pallas_kernels.quantization.quantize_triton import FP8_CAPABILITY as FP8_CAPABILITY
from pallas_kernels.quantization.quantize_triton import QuantizeLaunch


@triton.jit
def _transpose(
    x_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    transposed_ptr: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CODING: tl.constexpr,
) -> None:
    """Store the transposed copy of a tile of bytes, or of codes times a factor per row."""
    MASKED: tl.constexpr = M % BLOCK_M > 0 or N % BLOCK_N > 0
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    top, left = program // TILES_N * BLOCK_M, program % TILES_N * BLOCK_N
    i, n = tl.arange(0, BLOCK_M // 4), left + tl.arange(0, BLOCK_N)
    first = top.to(tl.int64) * N + left
    offsets = (4 * i * N)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    words = tl.zeros((BLOCK_M // 4, BLOCK_N), tl.uint32)
    for j in tl.static_range(4):
        mask = scaling.tile_mask(top + 4 * i + j, n, M, N)
        codes = scaling.load_raw(x_ptr + first, offsets + j * N, mask, MASKED)
        if CODING.kind != "none":
            m = top + 4 * i + j
            x = codes.to(tl.float8e5 if CODING.format == "float8_e5m2" else tl.float8e4nv, bitcast=True).to(tl.float32)
            factor = tl.load(factor_ptr + m, mask=m < M, other=0.0)[:, None]
            codes = scaling.encode(x, x * factor, 0, CODING)
        words = strided_tiles.insert_byte(words, codes, j, N % 4 == 0)
    strided_tiles.store_transposed(transposed_ptr, top, left, i, n, words, M, N, MASKED)


def transpose(
    x: Array,
    *,
    factor: Array | None = None,
    compute_capability: int | None = None,
) -> Array:
    """Return the transposed copy of a matrix of 8-bit codes, (N, M) in the dtype of `x`.

    Args:
        x: (M, N), any dtype of one byte.
        factor: fp32 (M, 1) factors of the rows of FP8 codes, rounded to nearest; None leaves the codes unchanged.

    Raises:
        ValueError: `x` is empty, no matrix, or has wider elements.
    """
    if x.ndim != 2 or 0 in x.shape or x.dtype.itemsize != 1:
        raise ValueError(f"the transpose kernel needs a non-empty matrix of bytes, got {x.dtype}{x.shape}")
    launch = QuantizeLaunch(num_warps=16)
    grid = -(-x.shape[0] // launch.block_m) * -(-x.shape[1] // launch.block_n)
    shape = jax.ShapeDtypeStruct(x.shape[::-1], jnp.uint8)
    codes = bitcast_bytes(x, jnp.uint8)
    coding = scaling.NO_CODING if factor is None else scaling.Coding("tensor", x.dtype).constants
    factor = jnp.ones((1, 1), jnp.float32) if factor is None else factor
    (transposed,) = quantize_triton.call(
        _transpose, [codes, factor], [shape], grid, launch, compute_capability, CODING=coding
    )
    return bitcast_bytes(transposed, x.dtype)
