"""Codes of the rows of groups, as grouped matrix products read them: in rows, and transposed on a padded token axis."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from fp8jax.core import formats
from fp8jax.core.groups import ALIGNMENT, PaddedTokens, block_table
from fp8jax.core.qtensor import quantize_with_scale
from fp8jax.core.scaling import clamp_scale
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.dispatch.choice import capability, choose_impl, missing_triton, record_choice, run
from fp8jax.ops.dispatch.partition import DimSharding, run_partitioned


def quantize_groups(
    x: Array,
    tokens: PaddedTokens,
    *,
    index: Array | None = None,
    rows: str | None = None,
    columns: str | None = None,
    row_scale: Array | None = None,
    column_scale: Array | None = None,
    row_factor: Array | None = None,
    impl: str = "auto",
) -> tuple[Array | None, Array | None]:
    """Return, in one pass, codes of the rows of groups under given scales, and transposed codes on the token axis.

    A value beyond the range of its scale saturates. NaN stays NaN in FP8; int8 has arbitrary codes, and its scale must
    be NaN.

    Args:
        x: (T, N) of a floating dtype, or 8-bit codes, which are copied.
        tokens: the padded token axis of the rows, with an alignment of 128.
        index: int32 (rows,), the row of x of each row in the order of the groups; None if x has this order.
        rows, columns: format of each result, "e4m3", "e5m2" or "int8"; None for no result.
        row_scale: positive fp32 () or (rows,). column_scale: positive fp32 () or (groups,). None for 8-bit codes.
        row_factor: fp32 (rows,), multiplied into the columns of FP8 codes; None for 1.

    Returns:
        Codes (rows, N), and codes (N, tokens.length); None for what is not requested. Tokens of no row are 0. Codes of
        rows of no group are arbitrary: grouped products do not use them.

    Raises:
        ValueError: a shape or format other than these, or `impl` is "triton" and the kernel cannot run.
    """
    is_copy = x.dtype.itemsize == 1
    operands = _Operands(x, tokens, index, row_scale, column_scale, row_factor)
    _check(rows, columns, operands)

    def unsupported_reason() -> str | None:
        is_encoded = not is_copy or row_factor is not None
        fp8 = any(f is not None and formats.get(f).is_float for f in (rows, columns)) and is_encoded
        if (reason := missing_triton("quantization.quantize_groups_triton", fp8=fp8)) is not None:
            return reason
        from pallas_kernels.quantization import quantize_groups_triton

        return quantize_groups_triton.unsupported_reason(x.shape, x.dtype, ())

    choice = record_choice("quantize groups", choose_impl(impl, unsupported_reason))
    reference, kernel = (functools.partial(f, rows, columns) for f in (_reference, _kernel))
    return run(choice, impl, operands, kernel=kernel, reference=reference)


class _Operands(NamedTuple):
    x: Array
    tokens: PaddedTokens
    row_index: Array | None
    row_scale: Array | None
    column_scale: Array | None
    row_factor: Array | None


def _check(rows: str | None, columns: str | None, operands: _Operands) -> None:
    x, tokens, index, row_scale, column_scale, row_factor = operands
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x has shape {x.shape}; expected a non-empty matrix")
    if rows is None and columns is None:
        raise ValueError("rows and columns are both None; pass the format of at least one result")
    num_rows = (x if index is None else index).shape[0]
    if tokens.num_rows != num_rows or tokens.alignment != ALIGNMENT:
        raise ValueError(
            f"tokens has {tokens.num_rows} rows and alignment {tokens.alignment}; expected {num_rows} and {ALIGNMENT}"
        )
    if x.dtype.itemsize == 1:
        has_other_format = any(f is not None and formats.get(f).dtype != x.dtype for f in (rows, columns))
        if has_other_format or row_scale is not None or column_scale is not None:
            raise ValueError(
                f"x has codes of {x.dtype}, which are only copied; use the same format for the results, without scales"
            )
        if row_factor is not None and (columns is None or not formats.get(columns).is_fp8):
            raise ValueError(f"row_factor needs columns of FP8 codes, but columns is {columns!r}")
        if row_factor is not None and row_factor.shape != (num_rows,):
            raise ValueError(f"row_factor has shape {row_factor.shape}; expected {(num_rows,)}")
        return
    if row_factor is not None:
        raise ValueError(f"row_factor needs 8-bit codes, but x is {x.dtype}; multiply the factor into the scales")
    for name, fmt, scale, length in (
        ("row", rows, row_scale, num_rows),
        ("column", columns, column_scale, tokens.num_groups),
    ):
        if fmt is not None and not formats.get(fmt).is_matmul_format:
            raise ValueError(f"{name}s is {fmt!r}; expected 'e4m3', 'e5m2' or 'int8'")
        if (fmt is None) != (scale is None):
            raise ValueError(f"{name}s is {fmt!r} and {name}_scale is {scale}; pass both or neither")
        if scale is not None and scale.shape not in ((), (length,)):
            raise ValueError(f"{name}_scale has shape {scale.shape}; expected () or {(length,)}")


def _reference(rows: str | None, columns: str | None, operands: _Operands) -> tuple[Array | None, Array | None]:
    x, tokens, index, row_scale, column_scale, row_factor = operands
    row_codes = column_codes = None
    ordered = x if index is None else x[index]
    if rows is not None:
        row_codes = ordered
        if row_scale is not None:
            row_codes = _encode(ordered, rows, jnp.broadcast_to(row_scale, ordered.shape[0]))
    if row_factor is not None:
        ordered = _encode(formats.decode_fp8(ordered) * row_factor[:, None], str(columns), jnp.ones(ordered.shape[0]))
    if columns is not None:
        padded = tokens.pad(ordered)
        if column_scale is not None:
            scale = jnp.broadcast_to(column_scale, tokens.num_groups)[:, None]
            padded = _encode(padded, columns, tokens.spread_groups(scale, 1, fill_value=1)[:, 0])
        column_codes = padded.T
    return row_codes, column_codes


def _encode(x: Array, fmt: str, scale: Array) -> Array:
    """Return codes of x (rows, N) under a scale per row."""
    return quantize_with_scale(x, QuantSpec.parse(f"{fmt}:token"), scale[:, None]).codes


def _kernel(rows: str | None, columns: str | None, operands: _Operands) -> tuple[Array | None, Array | None]:
    x, tokens, index, row_scale, column_scale, row_factor = operands
    blocks = jnp.concatenate([block_table(tokens.rows, tokens.num_rows), tokens.block_groups[None]])
    scales = [None if s is None else clamp_scale(s) for s in (row_scale, column_scale)]
    ins = ("- n", "- -", *(None if s is None else " ".join("-" * s.ndim) for s in (index, *scales, row_factor)))
    outs = (None if rows is None else "- n", None if columns is None else "n -")
    quantize_shard = functools.partial(_quantize_shard, rows, columns, tokens.num_groups)
    return run_partitioned(
        "quantize_groups", (rows, columns, tokens.num_groups), quantize_shard,
        (x, blocks, index, *scales, row_factor), ins, outs,
    )  # fmt: skip


def _quantize_shard(
    rows: str | None,
    columns: str | None,
    num_groups: int,
    _: DimSharding,
    x: Array,
    blocks: Array,
    index: Array | None,
    row_scale: Array | None,
    column_scale: Array | None,
    row_factor: Array | None,
) -> tuple[Array | None, Array | None]:
    from pallas_kernels.quantization import quantize_groups_triton

    codings = [
        None
        if fmt is None
        else quantize_groups_triton.Coding(
            "token" if scale is not None and scale.ndim else "tensor", formats.get(fmt).dtype
        )
        for fmt, scale in ((rows, row_scale), (columns, column_scale))
    ]
    return quantize_groups_triton.quantize_groups(
        x, blocks, num_groups, index=index, rows=codings[0], columns=codings[1], row_scale=row_scale,
        column_scale=column_scale, row_factor=row_factor, compute_capability=capability(),
    )  # fmt: skip
