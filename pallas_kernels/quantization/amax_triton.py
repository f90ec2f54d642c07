"""Largest finite magnitudes of the rows and columns of a matrix, in one pass.

In: (M, N) fp32, bf16 or fp16. Out: fp32 (M,) and (N,). Hardware: as for `quantize_triton`. Reference:
`compute_amax` in fp8jax/core/scaling.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.quantization import quantize_triton
from pallas_kernels.quantization import scaling_triton as scaling
from pallas_kernels.quantization.quantize_triton import QuantizeLaunch


class AmaxOutputs(NamedTuple):
    """The maxima to compute."""

    rows: bool
    columns: bool


@triton.jit
def _amax(
    x_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES_PER_STRIP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CODING: tl.constexpr,
) -> None:
    """Write the maxima of the rows and of the columns of a strip of TILES_PER_STRIP tiles, one below the other."""
    MASKED: tl.constexpr = M % (BLOCK_M * TILES_PER_STRIP) > 0 or N % BLOCK_N > 0
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = scaling.reversed_program_id()
    strip, tile_n = program // TILES_N, program % TILES_N
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets = tl.arange(0, BLOCK_M)[:, None] * N + tl.arange(0, BLOCK_N)[None, :]
    amax_keys = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for i in range(TILES_PER_STRIP):
        top = (strip * TILES_PER_STRIP + i) * BLOCK_M
        m, first = top + tl.arange(0, BLOCK_M), top.to(tl.int64) * N + tile_n * BLOCK_N
        keys = scaling.magnitude_key(
            scaling.load_raw(x_ptr + first, offsets, scaling.tile_mask(m, n, M, N), MASKED), CODING
        )
        amax_keys = tl.maximum(amax_keys, keys)
        if OUTPUTS.rows:
            tl.store(rows_ptr + tile_n * M + m, scaling.magnitude_from_key(tl.max(keys, 1), CODING), mask=m < M)
    if OUTPUTS.columns:
        tl.store(columns_ptr + strip * N + n, scaling.magnitude_from_key(tl.max(amax_keys, 0), CODING), mask=n < N)


def compute_amax(
    x: Array,
    *,
    rows: bool = False,
    columns: bool = False,
    integers: bool = False,
    launch: QuantizeLaunch | None = None,
    tiles_per_strip: int | None = None,
    compute_capability: int | None = None,
) -> tuple[Array | None, Array | None]:
    """Return the largest finite magnitudes of the rows and columns of a matrix.

    Args:
        x: (M, N), fp32, bf16 or fp16.
        rows, columns: which maxima to return.
        integers: whether a maximum is NaN if a value is NaN or Inf, which integer codes cannot represent.
        launch, compute_capability: as in `quantize_triton.quantize`.
        tiles_per_strip: tiles per program, one below the other; tuning only.

    Returns:
        fp32 maxima of the rows (M,) and of the columns (N,); None for those that are not requested.
    """
    # Chosen by measurement on an H100.
    launch = launch or QuantizeLaunch(16 if columns else 32, 256, 4)
    m, n = x.shape
    tiles_per_strip = tiles_per_strip or (16 if columns else 1)
    strips, tiles_n = -(-m // (launch.block_m * tiles_per_strip)), -(-n // launch.block_n)
    shapes = ((tiles_n, m) if rows else (1,), (strips, n) if columns else (1,))
    coding = scaling.INTEGER_CODING if integers else scaling.NO_CODING
    outputs = quantize_triton.call(
        _amax, [x], [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes], strips * tiles_n, launch,
        compute_capability, TILES_PER_STRIP=tiles_per_strip, OUTPUTS=AmaxOutputs(rows, columns), CODING=coding,
    )  # fmt: skip
    return jnp.max(outputs[0], 0) if rows else None, jnp.max(outputs[1], 0) if columns else None
