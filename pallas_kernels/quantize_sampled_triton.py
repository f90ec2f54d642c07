"""Quantizes a matrix under the scale of a sample of it, while it finds its largest magnitude: it is read once.

Where that is beyond what the sample promised a second launch makes the codes anew; else it leaves at once.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import quantize_triton
from pallas_kernels import scaling_triton as device
from pallas_kernels.quantize_triton import Coding, QuantizeLaunch


@triton.jit
def _quantize_beyond(
    x_ptr: tl.tensor, bounds_ptr: tl.tensor, peak_ptr: tl.tensor, spare: tl.tensor, rows_ptr: tl.tensor,
    row_scale_ptr: tl.tensor, row_powers_ptr: tl.tensor, columns_ptr: tl.tensor, column_scale_ptr: tl.tensor,
    column_powers_ptr: tl.tensor, sums_ptr: tl.tensor, M: tl.constexpr, N: tl.constexpr, HIGH: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUMS: tl.constexpr,
) -> None:  # fmt: skip
    quantize_triton.tile(
        x_ptr, bounds_ptr, bounds_ptr, bounds_ptr, peak_ptr, rows_ptr, row_scale_ptr, row_powers_ptr, columns_ptr,
        column_scale_ptr, column_powers_ptr, sums_ptr, M, N, HIGH, WIDE, ROWS, COLUMNS, SUMS, True,
    )  # fmt: skip


@triton.jit
def _quantize_again(
    x_ptr: tl.tensor, bounds_ptr: tl.tensor, peak_ptr: tl.tensor, rows_ptr: tl.tensor, row_scale_ptr: tl.tensor,
    columns_ptr: tl.tensor, column_scale_ptr: tl.tensor, spare1: tl.tensor, spare2: tl.tensor, spare3: tl.tensor,
    spare4: tl.tensor, M: tl.constexpr, N: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BOUNDS: tl.constexpr, SPREAD: tl.constexpr,
) -> None:  # fmt: skip
    """Codes and scales are written where they are."""
    at = tl.arange(0, SPREAD)
    bound = tl.max(tl.load(bounds_ptr + at, mask=at < BOUNDS, other=0.0), 0)
    if tl.load(peak_ptr) > bound:
        quantize_triton.tile(
            x_ptr, peak_ptr, peak_ptr, peak_ptr, peak_ptr, rows_ptr, row_scale_ptr, rows_ptr, columns_ptr,
            column_scale_ptr, columns_ptr, peak_ptr, M, N, HIGH, WIDE, ROWS, COLUMNS, False, False,
        )  # fmt: skip


def quantize(
    x: Array,
    rows: Coding | None,
    columns: Coding | Literal["same"] | None,
    bounds: Array,
    zero: Array,
    *,
    up: bool = False,
    sums: bool = False,
    over: Callable[[Array], Array] = lambda largest: largest,
    launch: QuantizeLaunch | None = None,
    compute_capability: int | None = None,
) -> tuple[quantize_triton.Quantized | None, quantize_triton.Quantized | None, Array | None]:
    """Codes of a matrix and of its transposed copy, under the scale of the largest of bounds and its own maximum.

    Args:
        x: (M, N), fp32, bf16 or fp16.
        rows, columns: as of `quantize_triton.quantize`, of kind "tensor", FP8 rounded to nearest.
        bounds, zero: as of `maxima_triton.sample`.
        up: whether that one is rounded up to bf16 before.
        sums: whether the sums of columns are wanted, too.
        over: makes of the largest magnitude of this part of a matrix, fp32 (1,), that of the whole.
        launch, compute_capability: as of `quantize_triton.quantize`.

    Raises:
        ValueError: the kernel cannot take these; the message says why.
    """
    same = columns == "same"
    coding = rows if same else columns
    assert coding != "same"
    for c in (rows, coding):
        if c is not None and (c.kind != "tensor" or c.stochastic or c.dtype == jnp.int8):
            raise ValueError(f"scales of a sample are of FP8 tensors rounded to nearest, not of {c}")
    reason = quantize_triton.unsupported(x.shape, x.dtype, (rows, coding))
    if reason is not None:
        raise ValueError(f"the quantize kernel cannot run: {reason}")
    launch, (m, n) = launch or quantize_triton.best(rows, coding, same, x.dtype), x.shape

    def static(count: int) -> dict[str, Any]:
        """Of codes whose scale is of so many maxima."""
        spread = triton.next_power_of_2(count)
        both = [
            device.NONE if c is None else c.static._replace(maxima=count, spread=spread, up=up)
            for c in (rows, None if same else coding)
        ]
        if same:
            both[1] = both[0]._replace(kind="same", maxima=0)
        return {"ROWS": both[0], "COLUMNS": both[1]}

    down, over_columns = -(-m // launch.rows), -(-n // launch.columns)
    shapes = [*quantize_triton.shapes_of(rows, (m, n)), *quantize_triton.shapes_of(coding, (n, m))]
    sum_shape = jax.ShapeDtypeStruct((down, n) if sums else (1, 1), jnp.float32)
    peak, *parts, partial = quantize_triton.call(
        _quantize_beyond, [x, bounds, zero], [jax.ShapeDtypeStruct((1,), jnp.float32), *shapes, sum_shape],
        down * over_columns, launch, compute_capability, aliases={2: 0}, **static(bounds.size), SUMS=sums,
    )  # fmt: skip
    made = [parts[i] for i in (0, 1, 3, 4)]
    with jax.named_scope("mend"):
        made = quantize_triton.call(
            _quantize_again, [x, bounds, over(peak), *made], [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in made],
            down * over_columns, launch, compute_capability, aliases={3: 0, 4: 1, 5: 2, 6: 3}, **static(1),
            BOUNDS=bounds.size, SPREAD=triton.next_power_of_2(bounds.size),
        )  # fmt: skip
    results = [
        None if c is None else quantize_triton.Quantized(jax.lax.bitcast_convert_type(codes, c.dtype), scale)
        for c, codes, scale in ((rows, made[0], made[1]), (coding, made[2], made[1] if same else made[3]))
    ]
    return results[0], results[1], jnp.sum(partial, 0) if sums else None
