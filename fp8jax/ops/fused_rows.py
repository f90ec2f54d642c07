"""Codes with scales of rows, of arrays that a kernel computes where it quantizes them (`fp8jax.ops.fused`).

A norm holds whole rows: its kernel writes their codes and scales in the pass in which it computes them. An activation's
reads its operands twice, the second time from the cache. Backward, a first pass over what an activation keeps makes
what the weight's gradient reads and finds the largest magnitude of each row of the cotangents, a second their codes.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from fp8jax.core import formats, scaling
from fp8jax.core.qtensor import QTensor
from fp8jax.core.spec import QuantSpec
from fp8jax.ops import fused
from fp8jax.ops.choice import tell
from fp8jax.ops.saved import from_bytes


def held(part: fused.Output | None, spec: QuantSpec) -> QTensor | None:
    """What `fused.Output.hold` was given of rows."""
    codes = None if part is None else part.result.variants.get(("rows", spec))
    return None if codes is None else from_bytes(codes)


def columns(part: fused.Output | None, spec: QuantSpec, scale: Array) -> QTensor | None:
    """Transposed codes of a matrix under a scale for each row, fp32 (M, 1), or None where no kernel makes them.

    Returns:
        (N, M) of granularity "tensor" and scale 1: rows' scales are the caller's.
    """
    if part is None or len(part.result.kinds) > 1:
        return None
    result, fmt = part.result, formats.get(spec.format)
    tell("quantize", fused.FROM_OPERANDS)
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


def cotangent(part: fused.Output | None, spec: QuantSpec, level: Array | None) -> tuple[QTensor, QTensor] | None:
    """Codes of an activation's cotangent, as they are and transposed; None where no kernel makes them.

    Args:
        part: what it is computed from.
        spec: of granularity "mx".
        level: fp32 (M, 1), as of `fp8jax.ops.microscaled.fold_rows`; None for 1.

    Returns:
        Of granularity "token", and (N, M) of "tensor" with scale 1.
    """
    if part is None or not part.result.peaks or any(peak.ndim != 1 for peak in part.result.peaks):
        return None
    result, place = part
    if level is not None:
        peak = result.peaks[place]
        alone = dataclasses.replace(result, kinds=(result.kinds[place],), peaks=(peak,), variants={})
        return _make(alone, spec, level)[0]
    how = ("cotangents", spec)
    if how not in result.variants:
        result.variants[how] = _make(result, spec, jnp.ones((result.peaks[place].size, 1), jnp.float32))
    pair: tuple[QTensor, QTensor] = result.variants[how][place]
    return pair


def _make(result: fused.Computation, spec: QuantSpec, level: Array) -> list[tuple[QTensor, QTensor]]:
    tell("quantize", fused.FROM_OPERANDS)
    fmt, operation, kinds = formats.get(spec.format), result.operation, result.kinds
    scales = [scaling.power_above(peak.reshape(-1, 1), level, fmt) for peak in result.peaks]

    def make(on: Any, operands: Any, scales: Any) -> Any:
        flat = tuple(scale.reshape(-1) for scale in scales)
        return on.quantize(operation, kinds, operands, flat, fmt.dtype, rows=True, columns=True)

    one = jnp.ones((1, 1), jnp.float32)
    return [
        (
            QTensor(codes, scale, None, None, QuantSpec(spec.format, "token")),
            QTensor(turned, one, None, None, QuantSpec(spec.format)),
        )
        for (codes, turned), scale in zip(fused.run(make, result.operands, scales), scales, strict=True)
    ]
