"""Quantization of fused outputs: arrays that a kernel recomputes while it quantizes them.

See `fp8jax.ops.quantization.fused_outputs`. Scales are per tensor or per row.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from fp8jax.core import formats, scaling
from fp8jax.core.qtensor import QTensor
from fp8jax.core.scaling import Scaling
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.autodiff.residuals import from_bytes
from fp8jax.ops.dispatch.choice import Choice, record_choice
from fp8jax.ops.quantization import fused_outputs
from fp8jax.ops.quantization.fused_outputs import FusedOutput, FusedOutputs

FROM_OPERANDS = Choice("triton", "from what the matrix is computed from, which is not written")


def quantize_fused(
    fused_output: FusedOutput,
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    *,
    shares_codes: bool,
    scale: Array | None,
    strategy: Scaling,
    sums: bool = False,
) -> tuple[QTensor | None, QTensor | None] | None:
    """Quantize a fused output and its transposed copy, or return None if no kernel can.

    Args:
        fused_output: describes the matrix, (M, N).
        rows, columns: specs for `x` and `x.T`, or None.
        shares_codes: whether `rows` and `columns` have the same codes. If False, one of them must be None.
        scale, strategy: as in `fp8jax.ops.quantization.quantize.quantize`.
        sums: whether to compute column sums. They are stored in `fused_output.group.sums` if codes are computed here.

    Returns:
        QTensors of `x` (M, N) and `x.T` (N, M), each None if its spec is None; or None without a kernel.
    """
    spec = rows if columns is None else columns
    if spec is None or not (shares_codes or rows is None or columns is None) or not fused_outputs.supports(spec):
        return None
    key = (rows is not None, columns is not None, spec, strategy if scale is None else None)
    scales, pairs = fused_output.group.variants.get(key, (None, None))
    if pairs is not None and (scale is None or scales[fused_output.position] is scale):
        return pairs[fused_output.position]  # type: ignore[no-any-return]
    if scale is None:
        pairs = _quantize_group(fused_output.group, key, None, sums)
        fused_output.group.variants[key] = None, pairs
        return pairs[fused_output.position]
    if fused_output.group.predicted is not None and rows is None:
        return None, _quantize_and_predict(fused_output.group, spec, scale)
    single = dataclasses.replace(fused_output.group, kinds=(fused_output.group.kinds[fused_output.position],))
    single.sums = {}
    pair = _quantize_group(single, key, scale, sums)[0]
    if single.sums:
        fused_output.group.sums[fused_output.position] = single.sums[0]
    return pair


def _quantize_group(
    group: FusedOutputs, key: Any, scale: Array | None, sums: bool = False
) -> list[tuple[QTensor | None, QTensor | None]]:
    from pallas_kernels.nonlinear.quantize_recomputed_triton import GATE, UP

    rows, columns, spec, strategy = key
    record_choice("quantize", FROM_OPERANDS)
    # JAX caches traced functions. `make` must not close over the result, which holds tracers.
    fmt, operation, kinds = formats.get(spec.format), group.operation, group.kinds
    sums = sums and kinds[0] in (GATE, UP)

    def make(backend: Any, operands: Any, scale: Array | None, peaks: tuple[Array, ...]) -> Any:
        if scale is None:
            amaxes = peaks or backend.peaks(operation, kinds, operands)
            scales = tuple(scaling.to_scale(strategy.reduce_amax(top), fmt) for top in amaxes)
        else:
            scales = (scaling.clamp_scale(scale.reshape(())),)
        quantized = backend.quantize(
            operation, kinds, operands, scales, fmt.dtype, rows=rows, columns=columns, sums=sums
        )
        pairs, totals = quantized if sums else (quantized, [])
        return [(*pair, s.reshape(1, 1)) for pair, s in zip(pairs, scales, strict=True)], totals

    pairs, totals = fused_outputs.run(make, group.operands, scale, group.peaks)
    group.sums.update(enumerate(totals))
    return [fused_outputs.to_qtensor_pair(spec, *arrays) for arrays in pairs]


def _quantize_and_predict(group: FusedOutputs, spec: QuantSpec, scale: Array) -> QTensor:
    """Quantize the transposed result of an activation, and predict what its backward pass needs.

    The prediction is the amax of each cotangent, or the cotangents' codes if their scales are given.
    """
    from pallas_kernels.nonlinear.quantize_recomputed_triton import GATE, UP

    record_choice("quantize", FROM_OPERANDS)
    operation, dtype = group.operation, formats.get(spec.format).dtype
    predicted = group.predicted
    assert predicted is not None
    out_dtype, needs_sums = (
        None if predicted.spec is None else formats.get(predicted.spec.format).dtype,
        predicted.needs_sums,
    )

    def make(backend: Any, operands: Any, scale: Array, scales: tuple[Array, ...]) -> Any:
        scale = scaling.clamp_scale(scale.reshape(()))
        if not scales:
            codes, peaks = backend.quantize_and_predict(operation, operands, scale, dtype)
            return codes, scale.reshape(1, 1), tuple(peaks), []
        quantized = backend.quantize(
            operation,
            (GATE, UP)[: len(scales)],
            operands,
            scales,
            out_dtype,
            rows=True,
            columns=True,
            result_coding=(scale, dtype),
            sums=needs_sums,
        )
        (*pairs, (_, codes)), totals = quantized if needs_sums else (quantized, [])
        cotangents = [(*pair, s.reshape(1, 1)) for pair, s in zip(pairs, scales, strict=True)]
        return codes, scale.reshape(1, 1), cotangents, totals

    codes, used_scale, cotangents, totals = fused_outputs.run(make, group.operands, scale, predicted.scales)
    if predicted.spec is None:
        group.predicted = predicted._replace(peaks=cotangents)
    else:
        pairs = tuple(fused_outputs.to_qtensor_pair(predicted.spec, *parts) for parts in cotangents)
        group.predicted = predicted._replace(codes=pairs, sums=tuple(totals))
    return QTensor(codes, used_scale, None, None, spec)


def cached_row_codes(fused_output: FusedOutput | None, spec: QuantSpec) -> QTensor | None:
    """Return the row codes stored by `FusedOutput.cache_codes`, or None."""
    codes = None if fused_output is None else fused_output.group.variants.get(("rows", spec))
    return None if codes is None else from_bytes(codes)


def quantize_columns(fused_output: FusedOutput | None, spec: QuantSpec, scale: Array) -> QTensor | None:
    """Quantize the transposed matrix under a scale per row, fp32 (M, 1), or return None if no kernel can.

    Returns:
        QTensor (N, M) of granularity "tensor" and scale 1. The caller applies the row scales.
    """
    if fused_output is None or len(fused_output.group.kinds) > 1:
        return None
    group, fmt = fused_output.group, formats.get(spec.format)
    record_choice("quantize", FROM_OPERANDS)
    operation, kinds, predicted = group.operation, group.kinds, group.predicted

    def make(backend: Any, operands: Any, scale: Array) -> Any:
        if predicted is None:
            ((_, codes),) = backend.quantize(operation, kinds, operands, (scale,), fmt.dtype, rows=False, columns=True)
            return codes, ()
        return backend.quantize_and_predict(operation, operands, scale, fmt.dtype)

    codes, peaks = fused_outputs.run(make, group.operands, scale.reshape(-1))
    if predicted is not None:
        group.predicted = predicted._replace(peaks=tuple(peaks))
    return QTensor(codes, jnp.ones((1, 1), jnp.float32), None, None, QuantSpec(spec.format))


def quantize_cotangent(
    fused_output: FusedOutput | None, spec: QuantSpec, outer_scale: Array | None
) -> tuple[QTensor, QTensor] | None:
    """Quantize an activation's cotangent and its transposed copy, or return None if no kernel can.

    Args:
        fused_output: describes the cotangent, (M, N).
        spec: of granularity "mx".
        outer_scale: fp32 (M, 1), as in `fp8jax.ops.quantization.microscaling.fold_rows`; None means 1.

    Returns:
        QTensors (M, N) of granularity "token" and (N, M) of "tensor" with scale 1. The caller applies the row scales.
    """
    if fused_output is None or not fused_output.group.peaks or any(peak.ndim != 1 for peak in fused_output.group.peaks):
        return None
    group, position = fused_output
    if outer_scale is not None:
        peak = group.peaks[position]
        single = dataclasses.replace(group, kinds=(group.kinds[position],), peaks=(peak,), variants={})
        return _quantize_rows_and_transposed(single, spec, outer_scale)[0]
    key = ("cotangents", spec)
    if key not in group.variants:
        group.variants[key] = _quantize_rows_and_transposed(
            group, spec, jnp.ones((group.peaks[position].size, 1), jnp.float32)
        )
    pair: tuple[QTensor, QTensor] = group.variants[key][position]
    return pair


def _quantize_rows_and_transposed(
    group: FusedOutputs, spec: QuantSpec, outer_scale: Array
) -> list[tuple[QTensor, QTensor]]:
    record_choice("quantize", FROM_OPERANDS)
    fmt, operation, kinds = formats.get(spec.format), group.operation, group.kinds
    scales = [scaling.pow2_scale(peak.reshape(-1, 1), outer_scale, fmt) for peak in group.peaks]

    def make(backend: Any, operands: Any, scales: Any) -> Any:
        flat = tuple(scale.reshape(-1) for scale in scales)
        return backend.quantize(operation, kinds, operands, flat, fmt.dtype, rows=True, columns=True)

    one = jnp.ones((1, 1), jnp.float32)
    return [
        (
            QTensor(codes, scale, None, None, QuantSpec(spec.format, "token")),
            QTensor(transposed, one, None, None, QuantSpec(spec.format)),
        )
        for (codes, transposed), scale in zip(fused_outputs.run(make, group.operands, scales), scales, strict=True)
    ]
