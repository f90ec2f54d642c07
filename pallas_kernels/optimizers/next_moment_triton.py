"""The values of a moment after a step, before they are stored, from its codes before the step.

In: gradient (..., n), codes, scales and exponents of groups of a row. Out: fp32 (..., n). Hardware: Ada or newer.
Reference: `_reference` in fp8jax/ops/optimizers/next_moment.py.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.dispatch import call_triton
from pallas_kernels.quantization import codec_triton as codec
from pallas_kernels.quantization.quantize_triton import FP8_CAPABILITY as FP8_CAPABILITY

_TILE = 1024
_ALIGNMENT = 16


@triton.jit
def _next_moment(
    gradient_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    exponents_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    groups: tl.tensor,
    n_units: tl.tensor,
    moment_ptr: tl.tensor,
    TILE_GROUPS: tl.constexpr,
    UNIT_N: tl.constexpr,
    MASKED: tl.constexpr,
    IS_SQUARED: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    STORAGE: tl.constexpr,
) -> None:
    """Compute the groups of a tile (TILE_GROUPS, 1, GROUP_SIZE)."""
    # A product with a constant shows Triton that addresses are aligned.
    N = n_units * UNIT_N
    groups_of_row = (N + GROUP_SIZE - 1) // GROUP_SIZE
    group = tl.program_id(0) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    row, left = group // groups_of_row, group % groups_of_row * GROUP_SIZE
    lane = tl.arange(0, GROUP_SIZE)[None, None, :]
    offsets = codec.broadcast_groups(row.to(tl.int64) * N + left) + lane
    group_mask = group < groups
    mask = codec.broadcast_groups(group_mask) & (codec.broadcast_groups(left) + lane < N)
    gradient = codec.load(gradient_ptr, offsets, mask, MASKED).to(tl.float32)
    gradient = codec.scale_and_clip_gradient(gradient, tl.load(factors_ptr + 2), codec.LARGEST_GRADIENT)
    if IS_SQUARED:
        gradient *= gradient
    codes = codec.load(codes_ptr, offsets, mask, MASKED)
    scale = codec.load(scale_ptr, group, group_mask, MASKED)
    exponent = codec.load(exponents_ptr, group, group_mask, MASKED)
    decay, rest = tl.load(factors_ptr), tl.load(factors_ptr + 1)
    # A step that is not taken may have gradients that are not finite.
    change = tl.where(rest == 0, 0.0, rest * gradient)
    moment = decay * codec.decode(codes, scale, exponent, 1.0, STORAGE) + change
    codec.store(moment_ptr, offsets, moment, mask, MASKED)


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
    """Return decay * moment + rest * gradient, or its square, fp32 (..., n).

    Args:
        gradient: fp32, bf16 or fp16 (..., n).
        codes: FP8 (..., n), of the moment.
        scale: fp32 (..., ceil(n / group_size)), of groups of a row.
        exponents: range expansion, in the shape of `scale`, or None.
        factors: fp32 (3,): the decay; the rest, 0 for a step that is not taken; the factor of the gradient.
        group_size: power of two.
        largest_code: largest value of the format.
        is_squared: whether the gradient is squared.
    """
    n = gradient.shape[-1]
    unit_n, tile_groups = math.gcd(n, _ALIGNMENT), max(_TILE // group_size, 1)
    (moment,) = call_triton.call(
        gradient, codes, scale, scale if exponents is None else exponents, factors, scale.size, n // unit_n,
        kernel=_next_moment,
        out_shapes=[jax.ShapeDtypeStruct(gradient.shape, jnp.float32)],
        num_programs=-(-scale.size // tile_groups),
        num_warps=4,
        compute_capability=compute_capability,
        TILE_GROUPS=tile_groups,
        UNIT_N=unit_n,
        MASKED=scale.size % tile_groups > 0 or n % group_size > 0,
        IS_SQUARED=is_squared,
        GROUP_SIZE=group_size,
        STORAGE=codec.UNSCALED._replace(
            has_scale=True, is_expanded=exponents is not None, max=largest_code, log2_max=math.log2(largest_code)
        ),
    )  # fmt: skip
    return moment
