"""The values of a moment after a step, before they are stored, from its codes before the step.

In: gradient (M, N), codes, scales and exponents of groups of a row. Out: fp32 (M, N). Hardware: Ada or newer.
Reference: `_reference` in fp8jax/ops/optimizers/next_moment.py.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.dispatch import call_triton
from pallas_kernels.quantization import codec_triton as codec
from pallas_kernels.quantization import scaling_triton as scaling
from pallas_kernels.quantization import statistics_triton
from pallas_kernels.quantization.quantize_triton import FP8_CAPABILITY as FP8_CAPABILITY

_FORMATS = (jnp.float8_e4m3fn, jnp.float8_e5m2)
_BLOCK_M, _BLOCK_N = 8, 128


@triton.jit
def _next_moment(
    gradient_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    exponents_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    m: tl.tensor,
    n_units: tl.tensor,
    moment_ptr: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT_N: tl.constexpr,
    MASKED: tl.constexpr,
    IS_EXPANDED: tl.constexpr,
    IS_SQUARED: tl.constexpr,
    CODE_DTYPE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    MAX: tl.constexpr,
    LOG2_MAX: tl.constexpr,
) -> None:
    """Compute a tile. GROUP_SIZE is a power of two."""
    GROUPS: tl.constexpr = BLOCK_N // GROUP_SIZE if GROUP_SIZE < BLOCK_N else 1
    N = n_units * UNIT_N
    tiles_n, groups_n = (N + BLOCK_N - 1) // BLOCK_N, (N + GROUP_SIZE - 1) // GROUP_SIZE
    top, left = tl.program_id(0) // tiles_n * BLOCK_M, tl.program_id(0) % tiles_n * BLOCK_N
    row = tl.arange(0, BLOCK_M)
    first, offsets = top.to(tl.int64) * N + left, row[:, None] * N + tl.arange(0, BLOCK_N)[None, :]
    mask = scaling.tile_mask(top + row, left + tl.arange(0, BLOCK_N), m, N)
    gradient = scaling.load(gradient_ptr + first, offsets, mask, MASKED)
    gradient = codec.scale_and_clip_gradient(gradient, tl.load(factors_ptr + 2), codec.LARGEST_GRADIENT)
    if IS_SQUARED:
        gradient *= gradient
    codes = statistics_triton.load_codes(codes_ptr + first, offsets, mask, MASKED, CODE_DTYPE)
    group = left // GROUP_SIZE + tl.arange(0, GROUPS)
    group_mask = scaling.tile_mask(top + row, group, m, groups_n)
    group_offsets = (top + row)[:, None] * groups_n + group[None, :]
    scale = scaling.load(scale_ptr, group_offsets, group_mask, True)
    if IS_EXPANDED:
        exponent = tl.load(exponents_ptr + group_offsets, mask=group_mask, other=1.0).to(tl.float32)
        decoded = statistics_triton.expand_range(codes, scale * MAX, exponent, LOG2_MAX, BLOCK_N // GROUPS)
    else:
        decoded = codes * statistics_triton.repeat_groups(scale, BLOCK_N // GROUPS)
    decay, rest = tl.load(factors_ptr), tl.load(factors_ptr + 1)
    # A step that is not taken may have gradients that are not finite.
    moment = decay * decoded + tl.where(rest == 0, 0.0, rest * gradient)
    if MASKED:
        tl.store(moment_ptr + first + offsets, moment, mask=mask)
    else:
        tl.store(moment_ptr + first + offsets, moment)


def unsupported_reason(gradient: Any, codes: Any, group_size: int) -> str | None:
    """Return why the kernel does not support these arrays in groups of a row, or None."""
    if codes.dtype not in _FORMATS:
        return f"it reads codes in {call_triton.join_dtypes(_FORMATS)}, not {codes.dtype}"
    return statistics_triton.unsupported_reason(codes.shape, gradient.dtype, group_size)


def next_moment(
    gradient: Array,
    codes: Array,
    scale: Array,
    exponents: Array | None,
    factors: Array,
    *,
    group_size: int,
    largest_code: float,
    is_squared: bool,
    compute_capability: int | None = None,
) -> Array:
    """Return decay * moment + rest * gradient, or its square, fp32 (M, N).

    Args:
        gradient: (M, N) fp32, bf16 or fp16.
        codes: FP8 (M, N), of the moment.
        scale: (M, groups) of groups of `group_size` columns.
        exponents: range expansion, (M, groups), or None.
        factors: fp32 (3,): the decay; the rest, 0 for a step that is not taken; the factor of the gradient.
        largest_code: of the format.
        is_squared: whether the gradient is squared.
    """
    m, n = codes.shape
    unit_n = math.gcd(n, statistics_triton.ALIGNMENT)
    (moment,) = call_triton.call(
        gradient, jax.lax.bitcast_convert_type(codes, jnp.uint8), scale, scale if exponents is None else exponents,
        factors, m, n // unit_n,
        kernel=_next_moment,
        out_shapes=[jax.ShapeDtypeStruct((m, n), jnp.float32)],
        num_programs=-(-m // _BLOCK_M) * -(-n // _BLOCK_N),
        num_warps=4,
        compute_capability=compute_capability,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=_BLOCK_N,
        UNIT_N=unit_n,
        MASKED=m % _BLOCK_M > 0 or n % _BLOCK_N > 0,
        IS_EXPANDED=exponents is not None,
        IS_SQUARED=is_squared,
        CODE_DTYPE=codes.dtype.name,
        GROUP_SIZE=group_size if group_size < n else statistics_triton.WHOLE_ROW,
        MAX=largest_code,
        LOG2_MAX=math.log2(largest_code),
    )  # fmt: skip
    return moment
