"""Codes of the rows of groups, as grouped matrix products read them: in rows, and transposed on a padded token axis.

On that axis each group starts at a multiple of 128 tokens. The tokens from its end to the next multiple are zeros, so
that products over the tokens of a group need no masks, and no scale spans two groups.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from fp8jax.core import formats
from fp8jax.core.qtensor import quantize_with_scale
from fp8jax.core.scaling import clamp_scale
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.dispatch.choice import capability, choose_impl, missing_triton, record_choice, run
from fp8jax.ops.dispatch.partition import DimSharding, run_partitioned

BLOCK = 128


class GroupLayout(NamedTuple):
    """The places of rows, which are sorted by group, on the padded token axis.

    Attributes:
        starts: int32 (groups,), first token of each group, a multiple of 128.
        lengths: int32 (groups,), number of tokens of each group.
        blocks: int32 (3, tokens / 128): of each block of 128 tokens the first row, the number of rows, and the group.
            The rows of no group are one more group.
    """

    starts: Array
    lengths: Array
    blocks: Array

    @property
    def num_tokens(self) -> int:
        """The length of the padded token axis."""
        return self.blocks.shape[1] * BLOCK

    def _to_tokens(self, x: Array) -> Array:
        """Return the values of blocks, (tokens / 128,), at each of their tokens."""
        return jnp.broadcast_to(x[:, None], (x.shape[0], BLOCK)).reshape(-1)  # XLA folds `jnp.repeat` for a minute

    def broadcast_groups(self, x: Array) -> Array:
        """Return the values of groups, (groups + 1,), at each token; the last is that of tokens of no group."""
        return self._to_tokens(x[self.blocks[2]])

    def token_rows(self) -> tuple[Array, Array]:
        """Return the row of each token, int32 (tokens,), and whether it is a row of a group, bool (tokens,)."""
        first_row, row_count, group = (self._to_tokens(x) for x in self.blocks)
        position = jnp.arange(self.num_tokens, dtype=jnp.int32) % BLOCK
        return first_row + position, (position < row_count) & (group < self.starts.shape[0])

    def pad(self, x: Array, index: Array | None = None) -> Array:
        """Return the rows of x (T, N) on the padded token axis, (tokens, N), with zeros in tokens of no group.

        Args:
            index: int32 (rows,), the row of x of each row; None if x has them in the order of the groups.
        """
        row, is_row = self.token_rows()
        row = jnp.where(is_row, row, 0)
        return jnp.where(is_row[:, None], x[row if index is None else index[row]], jnp.zeros((), x.dtype))


def group_layout(group_sizes: Array, num_rows: int) -> GroupLayout:
    """Return the layout of groups of consecutive rows.

    Args:
        group_sizes: (groups,) integers of any dtype, at least 0. Their sum is clipped to `num_rows`; other rows are of
            no group.
        num_rows: number of rows.
    """
    num_blocks = num_rows // BLOCK + group_sizes.shape[0] + 1  # each group fills at most one block in part
    ends = jnp.minimum(jnp.cumsum(jnp.maximum(group_sizes.astype(jnp.int32), 0), dtype=jnp.int32), num_rows)
    ends = jnp.append(ends, num_rows)
    begins = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    counts = -(-(ends - begins) // BLOCK)
    block_ends = jnp.cumsum(counts, dtype=jnp.int32)
    first_blocks = block_ends - counts
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(block[:, None] >= block_ends, axis=1, dtype=jnp.int32), group_sizes.shape[0])
    first_row = begins[group] + (block - first_blocks[group]) * BLOCK
    row_count = jnp.clip(ends[group] - first_row, 0, BLOCK)
    blocks = jnp.stack([first_row, row_count, group])
    return GroupLayout(first_blocks[:-1] * BLOCK, (ends - begins)[:-1], blocks)


def quantize_groups(
    x: Array,
    layout: GroupLayout,
    *,
    index: Array | None = None,
    rows: str | None = None,
    columns: str | None = None,
    row_scale: Array | None = None,
    column_scale: Array | None = None,
    impl: str = "auto",
) -> tuple[Array | None, Array | None]:
    """Return codes of the rows of groups under given scales, and transposed codes on the padded token axis.

    A value beyond the range of its scale saturates. NaN stays NaN in FP8; int8 has arbitrary codes, and its scale must
    be NaN.

    Args:
        x: (T, N) of a floating dtype, or 8-bit codes, which are transposed as they are.
        layout: `group_layout` of the rows.
        index: int32 (rows,), the row of x of each row in the order of the groups; None if x has this order.
        rows, columns: format of each result, "e4m3", "e5m2" or "int8"; None for no result.
        row_scale: positive fp32 () or (rows,). column_scale: positive fp32 () or (groups,). None for 8-bit codes.
        impl: "auto", "xla" or "triton".

    Returns:
        Codes (rows, N), and codes (N, tokens); None for what is not requested. Rows of no group and tokens of no row
        are 0.

    Raises:
        ValueError: a shape or format other than these, or `impl` is "triton" and the kernel cannot run.
    """
    num_rows = x.shape[0] if index is None else index.shape[0]
    is_copy = x.dtype.itemsize == 1
    _check(x, layout, num_rows, rows, columns, row_scale, column_scale)

    def unsupported_reason() -> str | None:
        fp8 = any(f is not None and formats.get(f).is_float for f in (rows, columns)) and not is_copy
        if (reason := missing_triton("quantization.quantize_groups_triton", fp8=fp8)) is not None:
            return reason
        from pallas_kernels.quantization import quantize_groups_triton

        return quantize_groups_triton.unsupported_reason(x.shape, x.dtype, ())

    choice = record_choice("quantize groups", choose_impl(impl, unsupported_reason))
    reference, kernel = (functools.partial(f, rows, columns) for f in (_reference, _kernel))
    result: tuple[Array | None, Array | None] = run(
        choice, impl, x, layout, index, row_scale, column_scale, kernel=kernel, reference=reference
    )
    return result


def _check(
    x: Array,
    layout: GroupLayout,
    num_rows: int,
    rows: str | None,
    columns: str | None,
    row_scale: Array | None,
    column_scale: Array | None,
) -> None:
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x has shape {x.shape}; expected a matrix that is not empty")
    if rows is None and columns is None:
        raise ValueError("rows and columns are None; name the format of at least one result")
    num_groups = layout.starts.shape[0]
    if layout.blocks.shape[1] != num_rows // BLOCK + num_groups + 1:
        raise ValueError(f"the layout has {layout.blocks.shape[1]} blocks; make it by group_layout(sizes, {num_rows})")
    if x.dtype.itemsize == 1:
        if (
            rows is not None
            or formats.get(str(columns)).dtype != x.dtype
            or row_scale is not None
            or column_scale is not None
        ):
            raise ValueError(f"x has codes of {x.dtype}, which are only transposed: give columns of that format alone")
        return
    for name, fmt, scale, length in (("row", rows, row_scale, num_rows), ("column", columns, column_scale, num_groups)):
        if fmt is not None and not formats.get(fmt).is_matmul_format:
            raise ValueError(f"{name}s is {fmt!r}; expected 'e4m3', 'e5m2' or 'int8'")
        if (fmt is None) != (scale is None):
            raise ValueError(f"{name}s is {fmt!r} and {name}_scale is {scale}: give both, or none")
        if scale is not None and scale.shape not in ((), (length,)):
            raise ValueError(f"{name}_scale has shape {scale.shape}; expected () or {(length,)}")


def _reference(
    rows: str | None,
    columns: str | None,
    x: Array,
    layout: GroupLayout,
    index: Array | None,
    row_scale: Array | None,
    column_scale: Array | None,
) -> tuple[Array | None, Array | None]:
    row_codes = column_codes = None
    num_groups = layout.starts.shape[0]
    if rows is not None and row_scale is not None:
        ordered = x if index is None else x[index]
        is_row = jnp.arange(ordered.shape[0], dtype=jnp.int32) < jnp.sum(layout.lengths)
        row_codes = _encode(jnp.where(is_row[:, None], ordered, 0), rows, jnp.where(is_row, row_scale, 1))
    if columns is not None:
        padded = layout.pad(x, index)
        if column_scale is not None:
            scale = jnp.append(jnp.broadcast_to(column_scale, num_groups), jnp.float32(1))
            padded = _encode(padded, columns, layout.broadcast_groups(scale))
        column_codes = padded.T
    return row_codes, column_codes


def _encode(x: Array, fmt: str, scale: Array) -> Array:
    """Return codes of x (rows, N) under a scale per row."""
    return quantize_with_scale(x, QuantSpec.parse(f"{fmt}:token"), scale[:, None]).codes


def _kernel(
    rows: str | None,
    columns: str | None,
    x: Array,
    layout: GroupLayout,
    index: Array | None,
    row_scale: Array | None,
    column_scale: Array | None,
) -> tuple[Array | None, Array | None]:
    num_groups = layout.starts.shape[0]
    scales = [None if s is None else clamp_scale(s) for s in (row_scale, column_scale)]
    operands = (x, layout.blocks, index, *scales)
    ins = (
        "- n",
        "- -",
        None if index is None else "-",
        *(None if s is None else " ".join("-" * s.ndim) for s in scales),
    )
    outs = (None if rows is None else "- n", None if columns is None else "n -")
    quantize_shard = functools.partial(_quantize_shard, rows, columns, num_groups)
    result: tuple[Array | None, Array | None] = run_partitioned(
        "quantize_groups", (rows, columns, num_groups), quantize_shard, operands, ins, outs
    )
    return result


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
        column_scale=column_scale, compute_capability=capability(),
    )  # fmt: skip
