"""Sharded calls of the norm and activation kernels. Arguments and results are those of the kernels.

Rows may be sharded. Channels may be sharded unless a kernel needs whole rows. Amax values and row sums are reduced over
shards.
"""

import functools
from typing import Any

import jax
from jax import Array

from fp8jax.core import scaling
from fp8jax.core.groups import block_table
from fp8jax.ops.dispatch.choice import capability
from fp8jax.ops.dispatch.partition import DimSharding, run_partitioned
from fp8jax.ops.quantization import fused_reference
from pallas_kernels.nonlinear import (
    activation_rows_triton,
    activation_triton,
    cotangents_triton,
    grouped_glu_triton,
    norm_triton,
    quantize_recomputed_triton,
    requantize_triton,
    sampled_amax_triton,
)
from pallas_kernels.nonlinear.quantize_recomputed_triton import result_kinds

_ROWS, _TILE, _TRANSPOSED = "m -", "m n", "n m"


def forward(
    operation: Any,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    coding: Any,
    *,
    result: fused_reference.Result = None,
) -> Any:
    (scale, dtype), has_row_scales = result or (None, None), fused_reference.is_scaled_by_row(result)

    def run(sharding: DimSharding, x: Array, weight: Array | None, bias: Array | None, scale: Array | None) -> Any:
        result = None if dtype is None else (scale, dtype)
        *arrays, amax, codes = norm_triton.forward(
            operation, x, weight, bias, eps, coding, result=result, compute_capability=capability()
        )
        return *arrays, sharding.pmax(amax, "m"), codes

    return run_partitioned(
        "norm_forward", (operation, eps, coding, str(dtype)), run, (x, weight, bias, scale),
        (_ROWS, "-", "-", _replicated(scale)),
        (_ROWS, _ROWS, "m", "m", "", (_ROWS, _ROWS) if has_row_scales else _ROWS),
    )  # fmt: skip


def backward(
    operation: Any,
    codes: Array,
    scales: Array | None,
    rstd: Array,
    weight: Array | None,
    dy: Array,
    dtype: Any,
    residual: Array | None = None,
) -> Any:
    def run(
        sharding: DimSharding, codes: Array, scales: Array | None, rstd: Array, weight: Any, dy: Array, residual: Any
    ) -> Any:
        dx, *sums, amax = norm_triton.backward(
            operation, codes, scales, rstd, weight, dy, dtype, residual, compute_capability=capability()
        )
        return dx, *(None if total is None else sharding.psum(total, "m") for total in sums), sharding.pmax(amax, "m")

    return run_partitioned(
        "norm_backward", (operation, str(dtype)), run, (codes, scales, rstd, weight, dy, residual),
        (_ROWS, _ROWS, "m", "-", _ROWS, _ROWS), (_ROWS, "-", "-", ""),
    )  # fmt: skip


def encode_activation_residuals(
    operation: Any, gate: Array, up: Array | None, coding: Any, *, result: fused_reference.Result = None
) -> Any:
    (scale, dtype), has_row_scales = result or (None, None), fused_reference.is_scaled_by_row(result)

    def run(sharding: DimSharding, gate: Array, up: Array | None, scale: Array | None) -> Any:
        if has_row_scales:
            residuals, codes, rows = activation_rows_triton.encode_activation_residuals(
                operation, gate, up, coding, dtype, compute_capability=capability()
            )
            return residuals, None, (codes, rows)
        result = None if dtype is None else (scale, dtype)
        residuals, amax, result_codes = activation_triton.encode_activation_residuals(
            operation, gate, up, coding, result=result, compute_capability=capability()
        )
        return residuals, sharding.pmax(amax, "m n"), result_codes

    # Sharded channels are gathered if the kernel needs whole rows.
    needs_whole_rows = has_row_scales or coding.is_packed
    pair, tile = ((_ROWS, _ROWS), _ROWS) if needs_whole_rows else ((_TILE, f"m n/{coding.size}"), _TILE)
    return run_partitioned(
        "encode_activation_residuals", (operation, coding, str(dtype)), run, (gate, up, scale),
        (tile, tile, _replicated(scale)),
        ((pair, pair, pair), "", (tile, tile) if has_row_scales else tile),
    )  # fmt: skip


def requantize_if(
    operation: Any, kinds: tuple[int, ...], operands: Any, codes: Array, scale: Array, condition: Array
) -> Any:
    def run(sharding: DimSharding, *arrays: Any) -> Array:
        return requantize_triton.requantize_if(operation, kinds, *arrays, compute_capability=capability())

    # A norm needs whole rows.
    tile = _ROWS if result_kinds(kinds).is_norm else _TILE
    channels = tile.split()[1]
    operand_dims = quantize_recomputed_triton.Operands(
        tile, up=tile, rstd="m", mean="m", weight=channels, bias=channels  # type: ignore[arg-type]
    )  # fmt: skip
    ins = (operand_dims, tile, _replicated(scale), _replicated(condition))
    return run_partitioned("requantize_if", (operation, kinds), run, (operands, codes, scale, condition), ins, tile)


def quantize(
    operation: Any,
    kinds: tuple[int, ...],
    operands: Any,
    scales: tuple[Array, ...],
    dtype: Any,
    *,
    rows: bool,
    columns: bool,
    result_coding: tuple[Array, Any] | None = None,
    sums: bool = False,
) -> Any:
    scale, result_dtype = result_coding or (None, None)

    def run(sharding: DimSharding, operands: Any, scales: tuple[Array, ...], scale: Array | None) -> Any:
        result_coding = None if scale is None else (scale, result_dtype)
        quantized = quantize_recomputed_triton.quantize(
            operation, kinds, operands, scales, dtype, rows=rows, columns=columns, result_coding=result_coding,
            sums=sums, compute_capability=capability(),
        )  # fmt: skip
        return (quantized[0], [sharding.psum(total, "m") for total in quantized[1]]) if sums else quantized

    ins = (_operands(operation), tuple(map(_scale_dims, scales)), _replicated(scale))
    outs: Any = [(_tile(operation), _transposed_tile(operation))] * (len(kinds) + (result_coding is not None))
    if sums:
        outs = outs, ["-" if _packed(operation) else "n"] * len(kinds)
    static = (operation, kinds, str(dtype), rows, columns, str(result_dtype), sums)
    return run_partitioned("quantize_recomputed", static, run, (operands, scales, scale), ins, outs)


def compute_amaxes(
    operation: Any, kinds: tuple[int, ...], operands: Any, *, every: int = 1, compute_if: Array | None = None
) -> Any:
    def run(sharding: DimSharding, operands: Any, compute_if: Array | None) -> Any:
        rows = operands.first.shape[0]
        if every > 1 and sharding.axes.get("m") and rows % (sampled_amax_triton.SAMPLE_ROWS * every):
            # The sample is defined on rows of the global matrix. The kernel only sees rows of its shard.
            compute_amax = functools.partial(scaling.compute_sample_amax, row_offset=sharding.shard_offset("m", rows))
            maxima = [compute_amax(x) for x in fused_reference.results(operation, kinds, operands)]
        else:
            maxima = sampled_amax_triton.compute_amaxes(
                operation, kinds, operands, every=every, compute_if=compute_if, compute_capability=capability()
            )
        return [sharding.pmax(amax, "m n") for amax in maxima]

    ins, outs = (_operands(operation), _replicated(compute_if)), [""] * len(kinds)
    return run_partitioned("compute_amaxes", (operation, kinds, every), run, (operands, compute_if), ins, outs)


def quantize_and_predict(operation: Any, operands: Any, scale: Array, dtype: Any) -> Any:
    def run(sharding: DimSharding, operands: Any, scale: Array) -> Any:
        codes, maxima = quantize_recomputed_triton.quantize_and_predict(
            operation, operands, scale, dtype, compute_capability=capability()
        )
        return codes, [sharding.pmax(amax, "n" if amax.ndim else "m n") for amax in maxima]

    amax_dims = "m" if scale.ndim else ""
    ins = _operands(operation), _scale_dims(scale)
    outs = _transposed_tile(operation), [amax_dims] * (1 + operation.is_gated)
    return run_partitioned("quantize_and_predict", (operation, str(dtype)), run, (operands, scale), ins, outs)


def cotangents(operation: Any, operands: Any) -> Any:
    def run(sharding: DimSharding, operands: Any) -> Any:
        return cotangents_triton.cotangents(operation, operands, compute_capability=capability())

    outs = [_tile(operation)] * (1 + operation.is_gated)
    return run_partitioned("cotangents", operation, run, (operands,), (_operands(operation),), outs)


def glu_row_statistics(operation: Any, gate_up: Array, scales: Array | None, gradient: Array | None) -> Any:
    def run(sharding: DimSharding, *arrays: Any) -> Any:
        return grouped_glu_triton.row_statistics(operation, *arrays, compute_capability=capability())

    ins, outs = (_ROWS, _ROWS, _ROWS), ("m", None if gradient is None else "m")
    return run_partitioned("glu_row_statistics", operation, run, (gate_up, scales, gradient), ins, outs)


def encode_glu(operation: Any, gate_up: Array, factor: Array, coding: Any, dtype: Any) -> Any:
    def run(sharding: DimSharding, gate_up: Array, factor: Array) -> Any:
        return grouped_glu_triton.encode(operation, gate_up, factor, coding, dtype, compute_capability=capability())

    outs = (None if coding is None else (_ROWS, _ROWS), _ROWS)
    return run_partitioned("encode_glu", (operation, coding, str(dtype)), run, (gate_up, factor), (_ROWS, "m"), outs)


def quantize_glu_cotangents(
    operation: Any,
    gate_up: Array,
    scales: Array | None,
    gradient: Array,
    rows: Array,
    factor: Array,
    result_factor: Array,
    dtype: Any,
    result_dtype: Any,
) -> Any:
    def run(sharding: DimSharding, *arrays: Any) -> Any:
        settings: Any = {"dtype": dtype, "result_dtype": result_dtype, "compute_capability": capability()}
        return tuple(grouped_glu_triton.quantize_cotangents(operation, *arrays, **settings))

    operands = (gate_up, scales, gradient, block_table(rows, gate_up.shape[0]), factor, result_factor)
    matrix = "- -"
    ins = (matrix, matrix, matrix, matrix, "-", "-")
    static = (operation, str(dtype), str(result_dtype))
    return run_partitioned("quantize_glu_cotangents", static, run, operands, ins, (matrix, matrix, matrix))


def _operands(operation: Any) -> Any:
    tile, packed = _tile(operation), _packed(operation)
    scales = _ROWS if packed else f"m n/{operation.group}"
    channels = "-" if packed else "n"
    dims: Any = (tile, scales, tile, scales, tile, scales, tile, "m", "m", channels, channels)
    return quantize_recomputed_triton.Operands(*dims)


def _packed(operation: Any) -> bool:
    return operation.format == "int10" and not operation.reads_arrays


def _tile(operation: Any) -> str:
    """Dimensions of a matrix. Packed rows are not sharded: their high bits come after all low bytes."""
    return _ROWS if _packed(operation) else _TILE


def _transposed_tile(operation: Any) -> str:
    return "- m" if _packed(operation) else _TRANSPOSED


def _scale_dims(x: Array) -> str | None:
    """Dimensions of scales (rows,), or of a scalar."""
    return "m" if x.ndim else ""


def _replicated(x: Any) -> str | None:
    """Dimensions of a small array that is never sharded."""
    return None if x is None else " ".join("-" * jax.numpy.ndim(x))
