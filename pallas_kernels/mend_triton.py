"""Codes of what norms and activations compute, in place: written again under another scale where a flag says so."""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import operations_triton as on
from pallas_kernels import quantize_triton
from pallas_kernels import scaling_triton as device
from pallas_kernels.operations_triton import Operation
from pallas_kernels.quantize_triton import QuantizeLaunch
from pallas_kernels.remake_triton import Operands, kinds_of, pointers

# Enough for every GPU, and as good as nothing where there is nothing to do.
PROGRAMS = 1024


@triton.jit
def _mend(
    first: tl.tensor, first_scale: tl.tensor, up: tl.tensor, up_scale: tl.tensor, activated: tl.tensor,
    activated_scale: tl.tensor, gradient: tl.tensor, inverse: tl.tensor, mean: tl.tensor, weight: tl.tensor,
    bias: tl.tensor, scale_ptr: tl.tensor, wrong_ptr: tl.tensor, codes_ptr: tl.tensor, spare: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, OPERATION: tl.constexpr,
    KINDS: tl.constexpr, HOW: tl.constexpr, PROGRAMS: tl.constexpr,
) -> None:  # fmt: skip
    """Every so manieth tile; none where nothing is wrong. The codes are written where they are."""
    MASKED: tl.constexpr = True  # a program may take a tile beyond the last
    ACROSS: tl.constexpr = (N + WIDE - 1) // WIDE
    TILES: tl.constexpr = (M + HIGH - 1) // HIGH * ACROSS
    if tl.load(wrong_ptr) > 0:
        p = Operands(
            first, first_scale, up, up_scale, activated, activated_scale, gradient, inverse, mean, weight, bias
        )
        for j in range((TILES + PROGRAMS - 1) // PROGRAMS):
            tile = j * PROGRAMS + tl.program_id(0)
            top, left = tile // ACROSS * HIGH, tile % ACROSS * WIDE
            start = top.to(tl.int64) * N + left
            at = (tl.arange(0, HIGH) * N)[:, None] + tl.arange(0, WIDE)[None, :]
            m, n = top + tl.arange(0, HIGH), left + tl.arange(0, WIDE)
            y = on.result(p, start, at, m, left, n, M, N, MASKED, OPERATION, KINDS.norm)
            on.put(y, scale_ptr, codes_ptr + start, at, device.inside(m, n, M, N), MASKED, HOW, False)


def mend(
    operation: Operation,
    kinds: tuple[int, ...],
    operands: Operands,
    codes: Array,
    scale: Array,
    wrong: Array,
    *,
    compute_capability: int | None = None,
) -> Array:
    """Codes of a result (M, N), in place: where `wrong`, written again under `scale`, else as they are.

    Args:
        operation: of `exact` operands. kinds: `remake_triton.NORM` or `RESULT`. operands: as of
            `remake_triton.quantize`.
        codes: float8_e4m3fn or float8_e5m2. scale: an fp32 scalar. wrong: a boolean scalar.
    """
    inputs: list[Any] = [*pointers(operands), scale.reshape(1, 1), wrong.reshape(1).astype(jnp.int32)]
    (mended,) = quantize_triton.call(
        _mend, [*inputs, jax.lax.bitcast_convert_type(codes, jnp.uint8)],
        [jax.ShapeDtypeStruct(codes.shape, jnp.uint8)], PROGRAMS, QuantizeLaunch(32, 128, 4), compute_capability,
        aliases={len(inputs): 0}, OPERATION=operation, KINDS=kinds_of(kinds),
        HOW=device.Coding("tensor", codes.dtype).static, PROGRAMS=PROGRAMS,
    )  # fmt: skip
    return jax.lax.bitcast_convert_type(mended, codes.dtype)
