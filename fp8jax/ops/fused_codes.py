"""Codes of arrays that a kernel computes where it quantizes them (`fp8jax.ops.fused`), under one scale or one a row.

Of rows: a norm holds whole rows; its kernel writes their codes and scales in the pass in which it computes them. An
activation's reads its operands twice, the second time from the cache. Backward, a first pass over what an activation
keeps makes what the weight's gradient reads and finds the largest magnitude of each row of the cotangents, a second
their codes.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from fp8jax.core import formats, scaling
from fp8jax.core.qtensor import QTensor
from fp8jax.core.scaling import Scaling
from fp8jax.core.spec import QuantSpec
from fp8jax.ops import fused
from fp8jax.ops.choice import Choice, tell
from fp8jax.ops.fused import Computation, Output
from fp8jax.ops.saved import from_bytes

FROM_OPERANDS = Choice("triton", "from what the matrix is computed from, which is not written")


def codes(
    part: Output,
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    *,
    same: bool,
    scale: Array | None,
    strategy: Scaling,
    sums: bool = False,
) -> tuple[QTensor | None, QTensor | None] | None:
    """Codes of a matrix and of its transposed copy from what it is computed from; None where that is no kernel's.

    Args:
        part: what the matrix is computed from.
        rows, columns: how `x` and `x.T` are quantized, or None where they are not.
        same: whether both have the same codes; else one of them is None.
        scale, strategy: as of `fp8jax.ops.quantize.quantize`.
        sums: whether sums of columns are wanted, which `part.result.sums` then has if the codes are made here.
    """
    spec = rows if columns is None else columns
    if spec is None or not (same or rows is None or columns is None) or not fused.takes(spec):
        return None
    how = (rows is not None, columns is not None, spec, strategy if scale is None else None)
    scales, pairs = part.result.variants.get(how, (None, None))
    if pairs is not None and (scale is None or scales[part.place] is scale):
        return pairs[part.place]  # type: ignore[no-any-return]
    if scale is None:
        pairs = _make(part.result, how, None, sums)
        part.result.variants[how] = None, pairs
        return pairs[part.place]
    if part.result.ahead is not None and rows is None:
        return None, _make_ahead(part.result, spec, scale)
    alone = dataclasses.replace(part.result, kinds=(part.result.kinds[part.place],))
    alone.sums = {}
    pair = _make(alone, how, scale, sums)[0]
    if alone.sums:
        part.result.sums[part.place] = alone.sums[0]
    return pair


def _make(
    result: Computation, how: Any, scale: Array | None, sums: bool = False
) -> list[tuple[QTensor | None, QTensor | None]]:
    from pallas_kernels.remake_triton import GATE, UP

    rows, columns, spec, strategy = how
    tell("quantize", FROM_OPERANDS)
    # JAX keeps traced functions: this one must not hold the result, and with it arrays of a trace.
    fmt, operation, kinds = formats.get(spec.format), result.operation, result.kinds
    sums = sums and kinds[0] in (GATE, UP)

    def make(on: Any, operands: Any, scale: Array | None, peaks: tuple[Array, ...]) -> Any:
        if scale is None:
            tops = peaks or on.peaks(operation, kinds, operands)
            scales = tuple(scaling.to_scale(strategy.settle(top), fmt) for top in tops)
        else:
            scales = (scaling.usable(scale.reshape(())),)
        made = on.quantize(operation, kinds, operands, scales, fmt.dtype, rows=rows, columns=columns, sums=sums)
        pairs, totals = made if sums else (made, [])
        return [(*pair, s.reshape(1, 1)) for pair, s in zip(pairs, scales, strict=True)], totals

    pairs, totals = fused.run(make, result.operands, scale, result.peaks)
    result.sums.update(enumerate(totals))
    return [fused.pair(spec, *parts) for parts in pairs]


def _make_ahead(result: Computation, spec: QuantSpec, scale: Array) -> QTensor:
    """Transposed codes of an activation's result, made with what the backward pass will ask for next.

    These are the peaks of the cotangents that the result's gradient gives, or their codes where scales are given.
    """
    from pallas_kernels.remake_triton import GATE, UP

    tell("quantize", FROM_OPERANDS)
    operation, dtype = result.operation, formats.get(spec.format).dtype
    known = result.ahead
    assert known is not None
    to, summed = None if known.spec is None else formats.get(known.spec.format).dtype, known.summed

    def make(on: Any, operands: Any, scale: Array, scales: tuple[Array, ...]) -> Any:
        scale = scaling.usable(scale.reshape(()))
        if not scales:
            codes, peaks = on.ahead(operation, operands, scale, dtype)
            return codes, scale.reshape(1, 1), tuple(peaks), []
        how: Any = {"rows": True, "columns": True, "again": (scale, dtype), "sums": summed}
        made = on.quantize(operation, (GATE, UP)[: len(scales)], operands, scales, to, **how)
        (*pairs, (_, codes)), totals = made if summed else (made, [])
        parts = [(*pair, s.reshape(1, 1)) for pair, s in zip(pairs, scales, strict=True)]
        return codes, scale.reshape(1, 1), parts, totals

    codes, used, cotangents, totals = fused.run(make, result.operands, scale, known.scales)
    if known.spec is None:
        result.ahead = known._replace(peaks=cotangents)
    else:
        pairs = tuple(fused.pair(known.spec, *parts) for parts in cotangents)
        result.ahead = known._replace(codes=pairs, sums=tuple(totals))
    return QTensor(codes, used, None, None, spec)


def held(part: Output | None, spec: QuantSpec) -> QTensor | None:
    """What `Output.hold` was given of rows."""
    codes = None if part is None else part.result.variants.get(("rows", spec))
    return None if codes is None else from_bytes(codes)


def columns(part: Output | None, spec: QuantSpec, scale: Array) -> QTensor | None:
    """Transposed codes of a matrix under a scale for each row, fp32 (M, 1), or None where no kernel makes them.

    Returns:
        (N, M) of granularity "tensor" and scale 1: rows' scales are the caller's.
    """
    if part is None or len(part.result.kinds) > 1:
        return None
    result, fmt = part.result, formats.get(spec.format)
    tell("quantize", FROM_OPERANDS)
    operation, kinds, ahead = result.operation, result.kinds, result.ahead

    def make(on: Any, operands: Any, scale: Array) -> Any:
        if ahead is None:
            ((_, codes),) = on.quantize(operation, kinds, operands, (scale,), fmt.dtype, rows=False, columns=True)
            return codes, ()
        return on.ahead(operation, operands, scale, fmt.dtype)

    codes, peaks = fused.run(make, result.operands, scale.reshape(-1))
    if ahead is not None:
        result.ahead = ahead._replace(peaks=tuple(peaks))
    return QTensor(codes, jnp.ones((1, 1), jnp.float32), None, None, QuantSpec(spec.format))


def cotangent(part: Output | None, spec: QuantSpec, level: Array | None) -> tuple[QTensor, QTensor] | None:
    """Codes of an activation's cotangent, as they are and transposed; None where no kernel makes them.

    Args:
        part: what it is computed from.
        spec: of granularity "mx".
        level: fp32 (M, 1), as of `fp8jax.ops.microscaled.fold_rows`; None for 1.

    Returns:
        Of granularity "token", and (N, M) of "tensor" with scale 1: rows' scales are the caller's.
    """
    if part is None or not part.result.peaks or any(peak.ndim != 1 for peak in part.result.peaks):
        return None
    result, place = part
    if level is not None:
        peak = result.peaks[place]
        alone = dataclasses.replace(result, kinds=(result.kinds[place],), peaks=(peak,), variants={})
        return _make_rows(alone, spec, level)[0]
    how = ("cotangents", spec)
    if how not in result.variants:
        result.variants[how] = _make_rows(result, spec, jnp.ones((result.peaks[place].size, 1), jnp.float32))
    pair: tuple[QTensor, QTensor] = result.variants[how][place]
    return pair


def _make_rows(result: Computation, spec: QuantSpec, level: Array) -> list[tuple[QTensor, QTensor]]:
    tell("quantize", FROM_OPERANDS)
    fmt, operation, kinds = formats.get(spec.format), result.operation, result.kinds
    scales = [scaling.power_above(peak.reshape(-1, 1), level, fmt) for peak in result.peaks]

    def make(on: Any, operands: Any, scales: Any) -> Any:
        flat = tuple(scale.reshape(-1) for scale in scales)
        return on.quantize(operation, kinds, operands, flat, fmt.dtype, rows=True, columns=True)

    one = jnp.ones((1, 1), jnp.float32)
    return [
        (
            QTensor(codes, scale, None, None, QuantSpec(spec.format, "token")),
            QTensor(transposed, one, None, None, QuantSpec(spec.format)),
        )
        for (codes, transposed), scale in zip(fused.run(make, result.operands, scales), scales, strict=True)
    ]
