"""Softmax cross-entropy of logits in two passes over them: sums of exponentials, and codes of the loss's cotangents."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import call_triton, quantize_triton
from pallas_kernels import codec_triton as codec
from pallas_kernels import operations_triton as operations
from pallas_kernels import scaling_triton as device
from pallas_kernels import slices_triton as slicing
from pallas_kernels.quantize_triton import PLAIN_DTYPES
from pallas_kernels.scaling_triton import Coding

FP8_CAPABILITY = quantize_triton.FP8_CAPABILITY
_ROWS, _COLUMNS = 4, 2048  # of a program that sums exponentials


@triton.jit
def _exponentials(
    z_ptr: tl.tensor, tops_ptr: tl.tensor, sums_ptr: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Of WIDE columns of HIGH rows the largest logit of each row, and the sum of exponentials below that."""
    MASKED: tl.constexpr = M % HIGH > 0 or N % WIDE > 0
    ACROSS: tl.constexpr = (N + WIDE - 1) // WIDE
    program = tl.program_id(0)
    top, left = program // ACROSS * HIGH, program % ACROSS * WIDE
    m, n = top + tl.arange(0, HIGH), left + tl.arange(0, WIDE)
    first = top.to(tl.int64) * N + left
    at = (tl.arange(0, HIGH) * N)[:, None] + tl.arange(0, WIDE)[None, :]
    z = codec.fp32(device.load_plain(z_ptr + first, at, device.inside(m, n, M, N), MASKED))
    if MASKED:
        z = tl.where(device.inside(m, n, M, N), z, float("-inf"))
    largest = tl.reduce(z, 1, operations.larger_or_nan)
    # NaN and infinities come out as they do where nothing is subtracted.
    base = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
    total = tl.sum(tl.exp(z - base[:, None]), 1)
    place = m * ACROSS + program % ACROSS
    tl.store(tops_ptr + place, largest, mask=m < M)
    tl.store(sums_ptr + place, total, mask=m < M)


def exponentials(z: Array, *, compute_capability: int | None = None) -> tuple[Array, Array]:
    """The largest logit of each row, or NaN, and the sum of exponentials of what the row's logits are below it.

    Args:
        z: (M, N), fp32, bf16 or fp16. compute_capability: of the GPU to compile for, as 90; None asks the GPU.

    Returns:
        Two fp32 (M,); below a largest one that is not finite nothing is subtracted.
    """
    m, n = z.shape
    across = -(-n // _COLUMNS)
    parts = jax.ShapeDtypeStruct((m, across), jnp.float32)
    tops, sums = call_triton.call(
        z, kernel=_exponentials, results=[parts, parts], programs=-(-m // _ROWS) * across, warps=8,
        compute_capability=compute_capability, M=m, N=n, HIGH=_ROWS, WIDE=_COLUMNS,
    )  # fmt: skip
    top = jnp.max(tops, 1)
    finite = lambda x: jnp.where(jnp.isfinite(x), x, 0.0)  # noqa: E731
    return top, jnp.sum(sums * jnp.exp(jnp.minimum(finite(tops) - finite(top)[:, None], 0.0)), 1)


@triton.jit
def _cotangents(
    z_ptr: tl.tensor, lse_ptr: tl.tensor, labels_ptr: tl.tensor, weights_ptr: tl.tensor, row_scale_ptr: tl.tensor,
    column_scale_ptr: tl.tensor, rows_ptr: tl.tensor, columns_ptr: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DTYPE: tl.constexpr, STEEPER: tl.constexpr, HIT: tl.constexpr, REST: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of HIGH rows, every fourth of which a slice has, as of the kernel that quantizes, and WIDE columns."""
    MASKED: tl.constexpr = M % HIGH > 0 or N % WIDE > 0
    R: tl.constexpr = HIGH // 4
    ACROSS: tl.constexpr = (N + WIDE - 1) // WIDE
    program = tl.program_id(0)
    top, left = program // ACROSS * HIGH, program % ACROSS * WIDE
    first = top.to(tl.int64) * N + left
    i, n = tl.arange(0, R), left + tl.arange(0, WIDE)
    m0 = top + 4 * i
    at0 = (4 * i * N)[:, None] + tl.arange(0, WIDE)[None, :]
    zs = slicing.load_slices(z_ptr + first, at0, N, m0, n, M, N, MASKED)
    by_rows, by_columns = device.inverse(tl.load(row_scale_ptr)), device.inverse(tl.load(column_scale_ptr))
    words = tl.zeros((R, WIDE), tl.uint32)
    for j in tl.static_range(4):
        m = m0 + j
        lse = tl.load(lse_ptr + m, mask=m < M, other=0.0)[:, None]
        label = tl.load(labels_ptr + m, mask=m < M, other=-1)[:, None]
        weight = tl.load(weights_ptr + m, mask=m < M, other=0.0)[:, None]
        d = tl.exp(codec.fp32(zs[j], False) - lse)
        if STEEPER > 0:
            d = d * (1 + STEEPER * lse)
        d = d - tl.where(n[None, :] == label, HIT, 0.0)
        if REST > 0:
            d = d - REST
        d = operations.narrowed(tl.where(weight == 0, 0.0, d * weight), DTYPE)
        codes = device.encode(d, device.scaled(d, by_rows, ROWS), 0, ROWS)
        device.store(rows_ptr + first, at0 + j * N, codes, device.inside(m, n, M, N), MASKED)
        codes = device.encode(d, device.scaled(d, by_columns, COLUMNS), 0, COLUMNS)
        words = slicing.insert(words, codes, j, N % 4 == 0)
    slicing.store_words(columns_ptr, top, left, i, n, words, M, N, MASKED)


def cotangent_codes(
    z: Array,
    lse: Array,
    labels: Array,
    weights: Array,
    *,
    rows: Coding,
    columns: Coding,
    scales: Sequence[Array],
    steeper: float = 0.0,
    hit: float = 1.0,
    rest: float = 0.0,
    compute_capability: int | None = None,
) -> tuple[Array, Array]:
    """Codes of weights (exp(z - lse) (1 + steeper lse) - hit [label] - rest), rounded to the dtype of `z` before.

    Args:
        z: logits (M, N), fp32, bf16 or fp16. lse: fp32 (M,). labels: int32 (M,); one outside of [0, N) is no column's.
        weights: fp32 (M,); 0 makes zeros, whatever else the row holds.
        rows, columns: of the kind "tensor", FP8, to nearest; how codes are made, and those of the transposed copy.
        scales: fp32 scalars, positive, of both.
        compute_capability: of the GPU to compile for, as 90; None asks the GPU.

    Returns:
        Codes (M, N) and (N, M) in their dtypes.
    """
    launch, (m, n) = quantize_triton.QuantizeLaunch(128, 64, 4), z.shape
    kinds: Any = {"ROWS": rows.static, "COLUMNS": columns.static, "DTYPE": PLAIN_DTYPES.index(z.dtype)}
    made = quantize_triton.call(
        _cotangents, [z, lse, labels, weights, *(s.reshape(1) for s in scales)],
        [jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in ((m, n), (n, m))],
        -(-m // launch.rows) * -(-n // launch.columns), launch, compute_capability,
        STEEPER=steeper, HIT=hit, REST=rest, **kinds,
    )  # fmt: skip
    first, second = (jax.lax.bitcast_convert_type(x, c.dtype) for x, c in zip(made, (rows, columns), strict=True))
    return first, second
