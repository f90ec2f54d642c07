"""INT8 matrix product in blocks of 128x128 with a residual for fallback blocks of the left operand.

Arrays and reference are those of `matmul_int8_mosaic`. Hardware: Ampere or Ada.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.dispatch import call_triton
from pallas_kernels.quantization import scaling_triton as scaling

BLOCK = 128  # also the tile of the output
FP8_CAPABILITY = 80  # the kernel has no FP8 codes


@triton.jit
def _multiply(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    a_scale_ptr: tl.tensor,
    b_scale_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    residual_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> None:
    """Compute one tile (BLOCK_M, BLOCK_N) of the output (M, N)."""
    STEPS: tl.constexpr = (K + 127) // 128
    TILES_M: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    # Bands of GROUP_M rows of tiles keep their operands in the L2 cache.
    first_tile_m = program // (GROUP_M * TILES_N) * GROUP_M
    group_m = tl.minimum(TILES_M - first_tile_m, GROUP_M)
    program_in_group = program % (GROUP_M * TILES_N)
    top, left = (first_tile_m + program_in_group % group_m) * BLOCK_M, program_in_group // group_m * BLOCK_N
    m, n, k = top + tl.arange(0, BLOCK_M), left + tl.arange(0, BLOCK_N), tl.arange(0, 128)
    a_offsets = m.to(tl.int64)[:, None] * K + k[None, :]
    b_offsets = n.to(tl.int64)[None, :] * K + k[:, None]
    a_row, b_row = top // 128 * STEPS, left // 128 * STEPS
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(STEPS):
        k_mask = k + step * 128 < K
        a_mask, b_mask = (m < M)[:, None] & k_mask[None, :], (n < N)[None, :] & k_mask[:, None]
        a = tl.load(a_ptr + a_offsets + step * 128, mask=a_mask, other=0)
        b = tl.load(b_ptr + b_offsets + step * 128, mask=b_mask, other=0)
        scale = tl.load(b_scale_ptr + b_row + step)
        acc += tl.dot(a, b, out_dtype=tl.int32).to(tl.float32) * (tl.load(a_scale_ptr + a_row + step) * scale)
        if HAS_RESIDUAL:
            residual_scale = tl.load(residual_scale_ptr + a_row + step)
            if residual_scale != 0:
                residual = tl.load(residual_ptr + a_offsets + step * 128, mask=a_mask, other=0)
                acc += tl.dot(residual, b, out_dtype=tl.int32).to(tl.float32) * (residual_scale * scale)
    out_offsets = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=scaling.tile_mask(m, n, M, N))


def matmul_int8_block(
    a: Array,
    b: Array,
    a_scale: Array,
    b_scale: Array,
    *,
    residual: Any = None,
    out_dtype: Any = jnp.bfloat16,
    compute_capability: int | None = None,
) -> Array:
    """Return the product of `matmul_int8_mosaic.matmul_int8_block`, with the same arguments except for tuning.

    Sums of 128 products are exact in int32, and are added in fp32 times their two scales. On Ampere these conversions
    and multiply-adds need about as long as the products (arXiv 2503.08040, appendix B).

    Args:
        compute_capability: GPU architecture to compile for, such as 80; None for the present GPU.

    Raises:
        ValueError: operands are not int8 matrices with block scales.
    """
    (m, k), n = a.shape, b.shape[0]
    rows, columns, steps = (-(-size // BLOCK) for size in (m, n, k))
    arrays = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}
    expected_shapes = {"a": (m, k), "b": (n, k), "a_scale": (rows, steps), "b_scale": (columns, steps)}
    for name, shape in expected_shapes.items():
        dtype = jnp.float32 if name.endswith("scale") else jnp.int8
        if arrays[name].shape != shape or arrays[name].dtype != dtype or 0 in shape:
            raise ValueError(f"{name} is {arrays[name].dtype}{arrays[name].shape}, not {jnp.dtype(dtype)}{shape}")
    residual_scale = (
        jnp.zeros((1, 1), jnp.float32) if residual is None else jnp.where(residual.is_fallback, residual.scale, 0)
    )
    residual_codes = jnp.zeros((1, 1), jnp.int8) if residual is None else residual.codes
    (out,) = call_triton.call(
        a, b, a_scale, b_scale, residual_codes, residual_scale, kernel=_multiply,
        out_shapes=[jax.ShapeDtypeStruct((m, n), out_dtype)], num_programs=rows * columns, num_warps=8, num_stages=3,
        compute_capability=compute_capability, M=m, N=n, K=k, BLOCK_M=BLOCK, BLOCK_N=BLOCK,
        HAS_RESIDUAL=residual is not None, GROUP_M=8,
    )  # fmt: skip
    return out  # type: ignore[no-any-return]
