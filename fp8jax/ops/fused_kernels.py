"""The kernels of norms and activations on arrays that may be sharded; arguments and results are the kernels' own.

Rows may be cut everywhere, channels where no row is needed as a whole. Largest magnitudes are of all parts, and so are
sums over rows.
"""

import functools
from typing import Any

import jax
from jax import Array

from fp8jax.core import scaling
from fp8jax.ops import fused_reference
from fp8jax.ops.choice import capability
from fp8jax.ops.cuts import Cut
from fp8jax.ops.partition import partitioned
from pallas_kernels import (
    activation_rows_triton,
    activation_triton,
    cotangents_triton,
    mend_triton,
    norm_triton,
    peaks_triton,
    remake_triton,
)
from pallas_kernels.remake_triton import kinds_of

_ROWS, _TILE, _TURNED = "m -", "m n", "n m"


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
    (scale, dtype), by_row = result or (None, None), fused_reference.of_rows(result)

    def run(cut: Cut, x: Array, weight: Array | None, bias: Array | None, scale: Array | None) -> Any:
        result = None if dtype is None else (scale, dtype)
        *arrays, peak, codes = norm_triton.forward(
            operation, x, weight, bias, eps, coding, result=result, compute_capability=capability()
        )
        return *arrays, cut.maximum(peak, "m"), codes

    return partitioned(
        "norm_forward", (operation, eps, coding, str(dtype)), run, (x, weight, bias, scale),
        (_ROWS, "-", "-", _whole(scale)),
        (_ROWS, _ROWS, "m", "m", "", (_ROWS, _ROWS) if by_row else _ROWS),
    )  # fmt: skip


def backward(
    operation: Any,
    codes: Array,
    scales: Array | None,
    inverse: Array,
    weight: Array | None,
    dy: Array,
    dtype: Any,
    residual: Array | None = None,
) -> Any:
    def run(cut: Cut, codes: Array, scales: Array | None, inverse: Array, weight: Any, dy: Array, residual: Any) -> Any:
        dx, *sums, peak = norm_triton.backward(
            operation, codes, scales, inverse, weight, dy, dtype, residual, compute_capability=capability()
        )
        return dx, *(None if total is None else cut.total(total, "m") for total in sums), cut.maximum(peak, "m")

    return partitioned(
        "norm_backward", (operation, str(dtype)), run, (codes, scales, inverse, weight, dy, residual),
        (_ROWS, _ROWS, "m", "-", _ROWS, _ROWS), (_ROWS, "-", "-", ""),
    )  # fmt: skip


def keep_activation(
    operation: Any, gate: Array, up: Array | None, coding: Any, *, result: fused_reference.Result = None
) -> Any:
    (scale, dtype), by_row = result or (None, None), fused_reference.of_rows(result)

    def run(cut: Cut, gate: Array, up: Array | None, scale: Array | None) -> Any:
        if by_row:
            kept, codes, rows = activation_rows_triton.keep_activation(
                operation, gate, up, coding, dtype, compute_capability=capability()
            )
            return kept, None, (codes, rows)
        result = None if dtype is None else (scale, dtype)
        kept, peak, made = activation_triton.keep_activation(
            operation, gate, up, coding, result=result, compute_capability=capability()
        )
        return kept, cut.maximum(peak, "m n"), made

    # Where rows are needed whole channels that are cut are gathered.
    whole = by_row or coding.packed
    pair, tile = ((_ROWS, _ROWS), _ROWS) if whole else ((_TILE, f"m n/{coding.size}"), _TILE)
    return partitioned(
        "keep_activation", (operation, coding, str(dtype)), run, (gate, up, scale), (tile, tile, _whole(scale)),
        ((pair, pair, pair), "", (tile, tile) if by_row else tile),
    )  # fmt: skip


def mend(operation: Any, kinds: tuple[int, ...], operands: Any, codes: Array, scale: Array, wrong: Array) -> Any:
    def run(cut: Cut, *arrays: Any) -> Array:
        return mend_triton.mend(operation, kinds, *arrays, compute_capability=capability())

    # The codes of a norm's result come from whole rows.
    tile = _ROWS if kinds_of(kinds).norm else _TILE
    channels = tile.split()[1]
    sources = remake_triton.Operands(tile, up=tile, inverse="m", mean="m", weight=channels, bias=channels)  # type: ignore[arg-type]
    ins = (sources, tile, _whole(scale), _whole(wrong))
    return partitioned("mend", (operation, kinds), run, (operands, codes, scale, wrong), ins, tile)


def quantize(
    operation: Any,
    kinds: tuple[int, ...],
    operands: Any,
    scales: tuple[Array, ...],
    dtype: Any,
    *,
    rows: bool,
    columns: bool,
    again: tuple[Array, Any] | None = None,
    sums: bool = False,
) -> Any:
    scale, to = again or (None, None)

    def run(cut: Cut, operands: Any, scales: tuple[Array, ...], scale: Array | None) -> Any:
        again = None if scale is None else (scale, to)
        made = remake_triton.quantize(
            operation, kinds, operands, scales, dtype, rows=rows, columns=columns, again=again, sums=sums,
            compute_capability=capability(),
        )  # fmt: skip
        return (made[0], [cut.total(total, "m") for total in made[1]]) if sums else made

    ins = (_operands(operation), tuple(map(_by_row, scales)), _whole(scale))
    outs: Any = [(_tile(operation), _turned(operation))] * (len(kinds) + (again is not None))
    if sums:
        outs = outs, ["-" if _packed(operation) else "n"] * len(kinds)
    static = (operation, kinds, str(dtype), rows, columns, str(to), sums)
    return partitioned("remake", static, run, (operands, scales, scale), ins, outs)


def peaks(operation: Any, kinds: tuple[int, ...], operands: Any, *, every: int = 1, wanted: Array | None = None) -> Any:
    def run(cut: Cut, operands: Any, wanted: Array | None) -> Any:
        rows = operands.first.shape[0]
        if every > 1 and cut.axes.get("m") and rows % (peaks_triton.SAMPLE * every):
            # The rows of the sample are those of the whole matrix, which the kernel counts in its own part.
            find = functools.partial(scaling.largest_of_sample, start=cut.start("m", rows))
            maxima = [find(x) for x in fused_reference.results(operation, kinds, operands)]
        else:
            maxima = peaks_triton.peaks(
                operation, kinds, operands, every=every, wanted=wanted, compute_capability=capability()
            )
        return [cut.maximum(peak, "m n") for peak in maxima]

    ins, outs = (_operands(operation), _whole(wanted)), [""] * len(kinds)
    return partitioned("peaks", (operation, kinds, every), run, (operands, wanted), ins, outs)


def ahead(operation: Any, operands: Any, scale: Array, dtype: Any) -> Any:
    def run(cut: Cut, operands: Any, scale: Array) -> Any:
        codes, maxima = remake_triton.ahead(operation, operands, scale, dtype, compute_capability=capability())
        return codes, [cut.maximum(peak, "n" if peak.ndim else "m n") for peak in maxima]

    each = "m" if scale.ndim else ""
    ins, outs = (_operands(operation), _by_row(scale)), (_turned(operation), [each] * (1 + operation.gated))
    return partitioned("ahead", (operation, str(dtype)), run, (operands, scale), ins, outs)


def cotangents(operation: Any, operands: Any) -> Any:
    def run(cut: Cut, operands: Any) -> Any:
        return cotangents_triton.cotangents(operation, operands, compute_capability=capability())

    outs = [_tile(operation)] * (1 + operation.gated)
    return partitioned("cotangents", operation, run, (operands,), (_operands(operation),), outs)


def _operands(operation: Any) -> Any:
    tile, packed = _tile(operation), _packed(operation)
    scales = _ROWS if packed else f"m n/{operation.group}"
    channels = "-" if packed else "n"
    parts: Any = (tile, scales, tile, scales, tile, scales, tile, "m", "m", channels, channels)
    return remake_triton.Operands(*parts)


def _packed(operation: Any) -> bool:
    return operation.format == "int10" and not operation.exact


def _tile(operation: Any) -> str:
    """A matrix. Packed rows are never cut: the high bits come after all low bytes."""
    return _ROWS if _packed(operation) else _TILE


def _turned(operation: Any) -> str:
    return "- m" if _packed(operation) else _TURNED


def _by_row(x: Array) -> str | None:
    """Scales (rows,), or one."""
    return "m" if x.ndim else ""


def _whole(x: Any) -> str | None:
    """An array of few numbers, which is never cut."""
    return None if x is None else " ".join("-" * jax.numpy.ndim(x))
