"""Makes codes of a matrix anew, where they are, if they turn out to have been made under too small a scale."""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import quantize_triton
from pallas_kernels import scaling_triton as device
from pallas_kernels.quantize_triton import Launch

# Enough for every GPU, and as good as nothing where there is nothing to do.
PROGRAMS = 1024


@triton.jit
def _mend(
    x_ptr: tl.tensor, scale_ptr: tl.tensor, wrong_ptr: tl.tensor, rows_ptr: tl.tensor, columns_ptr: tl.tensor,
    spare1: tl.tensor, spare2: tl.tensor, M: tl.constexpr, N: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr,
) -> None:  # fmt: skip
    """Every so manieth tile; none where nothing is wrong."""
    TILES: tl.constexpr = (M + HIGH - 1) // HIGH * ((N + WIDE - 1) // WIDE)
    if tl.load(wrong_ptr) > 0:
        for j in range((TILES + PROGRAMS - 1) // PROGRAMS):
            # Masked, as a tile may lie beyond the last. What is not made here is not touched.
            quantize_triton.tile(
                j * PROGRAMS + tl.program_id(0), x_ptr, scale_ptr, scale_ptr, scale_ptr, rows_ptr, scale_ptr, scale_ptr,
                columns_ptr, scale_ptr, scale_ptr, scale_ptr, M, N, HIGH, WIDE, True, ROWS, COLUMNS, False,
            )  # fmt: skip


def mend(
    x: Array,
    rows: Array | None,
    columns: Array | None,
    scale: Array,
    wrong: Array,
    *,
    compute_capability: int | None = None,
) -> tuple[Array | None, Array | None]:
    """Codes of a matrix and of its transposed copy, in place: where `wrong`, made anew, else as they are.

    Args:
        x: (M, N), fp32, bf16 or fp16.
        rows, columns: codes of `x`, (M, N), and of `x.T`, or None; float8_e4m3fn or float8_e5m2, alike.
        scale: that all of them are made under, an fp32 scalar.
        wrong: a boolean scalar.
        compute_capability: of the GPU to compile for, as 90; None asks the GPU.
    """
    given = [codes for codes in (rows, columns) if codes is not None]
    coding = device.Coding("tensor", given[0].dtype)
    none = jnp.zeros((1, 1), jnp.uint8)
    codes: list[Any] = [none if c is None else jax.lax.bitcast_convert_type(c, jnp.uint8) for c in (rows, columns)]
    inputs = [x, scale.reshape(1, 1), wrong.reshape(1).astype(jnp.int32), *codes]
    how = coding.static._replace(kept=rows is not None)
    found = quantize_triton.call(
        _mend, inputs, [jax.ShapeDtypeStruct(c.shape, c.dtype) for c in codes], PROGRAMS, Launch(128, 128, 16),
        compute_capability, aliases={3: 0, 4: 1}, ROWS=tuple(how),
        COLUMNS=tuple(device.NONE if columns is None else how._replace(kind=device.KINDS["same"])), PROGRAMS=PROGRAMS,
    )  # fmt: skip
    made = [jax.lax.bitcast_convert_type(c, coding.dtype) for c in found]
    return None if rows is None else made[0], None if columns is None else made[1]
