"""Codes of a matrix with rows in groups. No scale spans two groups, and rows in no group change no scale.

Per-tensor scales are per group, and blocks along rows start at each group's first row.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import blocks, encoding, formats, noise, scaling
from fp8jax.core.groups import ALIGNMENT, PaddedTokens
from fp8jax.core.qtensor import QTensor, quantize_with_scale
from fp8jax.core.scaling import Scaling
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.matmul.grouped_hopper import UnpaddedRows
from fp8jax.ops.matmul.matmul import Operand
from fp8jax.ops.quantization.fallback import FallbackTensor
from fp8jax.ops.quantization.microscaling import fold_rows
from fp8jax.ops.quantization.quantize import quantize, transpose
from fp8jax.ops.quantization.rotation import rotate_rows


class TokenColumns(NamedTuple):
    """The transpose of a matrix (rows, n), with its rows in the padded token axis.

    Attributes:
        operand: (n, length), an array, or codes under one scale or scales per block of tokens; or the rows of such.
        scale: fp32 (groups,), a further scale of each group, or None.
        channel_scale: fp32 (groups, n), a further scale of each group and channel, or None.
    """

    operand: Operand | UnpaddedRows
    scale: Array | None = None
    channel_scale: Array | None = None


@dataclasses.dataclass(frozen=True)
class ColumnEncoder:
    """Quantizes the transpose of rows in whole aligned blocks, under scales per group or block of tokens.

    Attributes:
        dtype: of the values of rows that are codes.
    """

    spec: QuantSpec
    dtype: Any

    def __call__(self, rows: Any) -> QTensor:
        return quantize(rows.dequantize(self.dtype) if isinstance(rows, QTensor) else rows, None, self.spec)[1]


@dataclasses.dataclass(frozen=True)
class BlockTransposer:
    """Transposes codes of `quantize_rows`, in whole aligned blocks, for a spec of granularity "block"."""

    spec: QuantSpec

    def __call__(self, rows: Any) -> QTensor:
        spec, size = dataclasses.replace(self.spec, rounding="nearest"), self.spec.group_size or 1
        columns = transpose(_unscaled(rows.codes, spec))
        # NaN in one row's scale is a NaN of its block.
        scale = jnp.max(rows.scale.reshape(-1, size, rows.scale.shape[1]), axis=1)
        return dataclasses.replace(columns, scale=scale.T, spec=spec)


def quantize_rows(
    x: Array,
    spec: QuantSpec,
    strategy: Scaling,
    tokens: PaddedTokens,
    key: Array | None = None,
    *,
    scale: Array | None = None,
    axes: tuple[str, ...] = (),
) -> QTensor:
    """Quantize a matrix that a product contracts along its columns.

    Args:
        x: floating array (rows, n).
        spec: as for a matrix of one group. Expanded codes per tensor or block get scales and exponents per row instead.
        strategy: stateless scaling for per-tensor scales.
        scale: fp32 (groups,), given for granularity "tensor" without expansion; None computes it from `x`.
        axes: mesh axes of `jax.shard_map` whose devices share the scale of a group.

    Returns:
        QTensor (rows, n) with scales per row: granularity "tensor" becomes "token". "block", "mx" and "nv" become
        "group", whose scales are the products of both levels.
    """
    spans_rows = "tensor" in (spec.granularity, spec.outer_granularity) or spec.granularity == "block"
    if spec.is_folded and not spans_rows:
        return fold_rows(x, spec)
    if spec.expand or not spans_rows:
        granularity = {"tensor": "token", "block": "group"}.get(spec.granularity, spec.granularity)
        spec_by_row = dataclasses.replace(spec, granularity=granularity)
        return quantize(x, spec_by_row, strategy=strategy, key=key if spec.rounding == "stochastic" else None)[0]
    fmt, size = formats.get(spec.format), spec.group_size or 1
    if spec.granularity == "block":
        block_amax = tokens.take_blocks(_padded_block_amax(x, size, tokens), size)
        return _quantize_with_scale(x, spec, size, scaling.to_scale(block_amax, fmt), key)
    if spec.granularity == "tensor" and scale is not None:
        row_scale = tokens.take_groups(scale[:, None])
        return _quantize_with_scale(x, spec, None, jnp.where(row_scale > 0, row_scale, 1), key)
    row_amax = _block_amax(x, (1, x.shape[1]))
    group_amax = group_maxima(row_amax, tokens)
    group_amax = tokens.take_groups(lax.pmax(group_amax, axes) if axes else group_amax)
    if spec.granularity == "tensor":
        return _quantize_with_scale(x, spec, None, scaling.to_scale(strategy.reduce_amax(group_amax), fmt), key)
    outer_scale = _outer_scale(group_amax, spec)
    if spec.is_folded:
        return _quantize_with_scale(x, spec, None, scaling.pow2_scale(row_amax, outer_scale, fmt), key)
    block_amax = _block_amax(x, (1, size))
    return _quantize_with_scale(x, spec, size, _two_level_scale(block_amax, outer_scale, spec), key)


class FallbackRows(NamedTuple):
    """Result of `quantize_fallback_rows`.

    Attributes:
        fallback_tensor: (rows, n), with scales and a mask per row and `spec.group_size` columns.
        counts: fp32 (groups, 2), of each group the blocks that fall back, and all blocks.
    """

    fallback_tensor: FallbackTensor
    counts: Array


def quantize_fallback_rows(x: Array, spec: QuantSpec, thresholds: Array, tokens: PaddedTokens) -> FallbackRows:
    """Quantize a matrix to int8 blocks within each group, as `fp8jax.ops.quantization.fallback.quantize`.

    Args:
        x, tokens: as in `quantize_rows`.
        spec: int8 of granularity "block".
        thresholds: fp32 (groups,). Blocks with a larger amax fall back.
    """
    assert spec.group_size is not None
    size, unit = spec.group_size, tokens.alignment
    base = quantize_rows(x, spec, scaling.Current(), tokens)
    block_thresholds = tokens.spread_groups(thresholds[:, None], size, fill_value=jnp.inf)
    # A block with NaN or Inf does not fall back. Its scale is NaN.
    is_finite = ~jnp.isnan(tokens.reduce_blocks(base.scale, size))
    is_fallback = is_finite & (_padded_block_amax(x, size, tokens) > block_thresholds)
    mask = tokens.take_blocks(is_fallback, size)
    element_mask = blocks.broadcast_blocks(mask, x.shape, (1, size))
    remainder = jnp.where(element_mask, x.astype(jnp.float32) - base.dequantize(), 0)
    residual = quantize_rows(remainder, spec, scaling.Current(), tokens)
    is_used = tokens.rows[::size] < tokens.num_rows
    block_counts = jnp.stack([jnp.sum(is_fallback, 1), is_used * is_fallback.shape[1]], 1).astype(jnp.float32)
    counts = jnp.zeros((tokens.num_groups + 1, 2), jnp.float32)
    counts = counts.at[jnp.repeat(tokens.block_groups, unit // size)].add(block_counts, indices_are_sorted=True)
    return FallbackRows(FallbackTensor(base, residual, mask), counts[:-1])


def transpose_rows(q: QTensor, spec: QuantSpec, tokens: PaddedTokens) -> TokenColumns:
    """Transpose codes of `quantize_rows` without rounding them again.

    Args:
        q: result of `quantize_rows` for `spec`.
        spec: of granularity "tensor" or "block".
    """
    if spec.granularity == "tensor":
        return TokenColumns(UnpaddedRows(_unscaled(q.codes, spec)), group_maxima(q.scale, tokens)[:, 0])
    return TokenColumns(UnpaddedRows(q, BlockTransposer(spec)))


def quantize_columns(
    x: Operand,
    spec: QuantSpec | None,
    strategy: Scaling,
    tokens: PaddedTokens,
    key: Array | None = None,
    *,
    scale: Array | None = None,
    dtype: DTypeLike | None = None,
    rotation: int | None = None,
) -> TokenColumns:
    """Quantize the transpose of a matrix, which a product contracts along its rows, within each group.

    Args:
        x: floating array (rows, n), or codes of `quantize_rows`, which are decoded.
        spec: of the transposed matrix, without expansion. Its groups and tokens run along the rows of `x`. None means
            the array itself.
        strategy, tokens, key, scale: as in `quantize_rows`.
        dtype: of decoded values; None is fp32.
        rotation: length of the transformation of each group's rows (`fp8jax.ops.quantization.rotation`), with zeros in
            padding; or None. Not for granularity "tensor".
    """
    dtype = jnp.float32 if dtype is None else dtype
    is_nearest = spec is not None and spec.rounding == "nearest" and rotation is None
    is_deferred = is_nearest and spec.granularity in ("group", "block")  # type: ignore[union-attr]
    if isinstance(x, QTensor) and (not is_deferred or x.spec.expand):
        x = x.dequantize(dtype)
    if spec is not None and is_deferred:
        return TokenColumns(UnpaddedRows(x, ColumnEncoder(spec, jnp.dtype(dtype))))
    assert not isinstance(x, QTensor)
    if spec is None:
        return TokenColumns(UnpaddedRows(x))
    if spec.granularity == "tensor":
        return transpose_rows(quantize_rows(x, spec, strategy, tokens, key, scale=scale), spec, tokens)
    padded, key = rotate_rows(tokens.pad(x), rotation), key if spec.rounding == "stochastic" else None
    if spec.granularity in ("group", "block"):
        columns = quantize(padded, None, spec, key=key)[1]
        return TokenColumns(columns)
    fmt, size, unit = formats.get(spec.format), spec.group_size or 1, tokens.alignment
    group_amax = tokens.reduce_groups(_block_amax(padded, (unit, 1)))
    if spec.outer_granularity == "tensor":
        outer_scale = _outer_scale(jnp.max(group_amax, axis=1, keepdims=True, initial=0.0), spec)
    else:
        outer_scale = _outer_scale(group_amax, spec)
    if spec.has_microscales and not spec.is_folded:
        block_amax = _block_amax(padded, (size, 1))
        scale = _two_level_scale(block_amax, tokens.spread_groups(outer_scale, size, fill_value=1), spec)
        return TokenColumns(_quantize_with_scale(padded.T, spec, size, scale.T, key))
    if spec.is_folded and spec.outer_scale == "tensor":
        outer_scale = scaling.pow2_scale(group_amax, outer_scale, fmt)
    scale = tokens.spread_groups(outer_scale, unit, fill_value=1)
    q = _quantize_with_scale(padded.T, spec, unit, jnp.broadcast_to(scale, (scale.shape[0], x.shape[1])).T, key)
    # The scales of integers are NaN where the values are.
    channel_scale = tokens.reduce_groups(q.scale.T)
    return TokenColumns(_unscaled(q.codes, spec), channel_scale=channel_scale)


def amax_per_group(x: Array, tokens: PaddedTokens) -> Array:
    """Return the largest finite magnitude of each group's rows of a matrix (rows, n), fp32 (groups,)."""
    return group_maxima(_block_amax(x, (1, x.shape[1])), tokens)[:, 0]


def group_maxima(values: Array, tokens: PaddedTokens) -> Array:
    """The maxima over each group of fp32 numbers >= 0 for each row, (rows, n) to (groups, n); NaN if one is NaN."""
    return tokens.reduce_groups(tokens.reduce_blocks(values, tokens.alignment))


def alignment(*specs: QuantSpec | None) -> int:
    """The multiple of tokens to which each group is padded, so that no block of these specs spans two groups."""
    return math.lcm(ALIGNMENT, *(spec.group_size for spec in specs if spec is not None and spec.group_size is not None))


def _unscaled(codes: Array, spec: QuantSpec) -> QTensor:
    return QTensor(codes, jnp.ones((1, 1), jnp.float32), None, None, QuantSpec(spec.format))


def _block_amax(x: Array, size: tuple[int, int]) -> Array:
    """Return the largest finite magnitude of each block of a matrix, fp32; 0 if there is none."""
    # Maxima in the dtype of `x` are exact. Off GPUs, XLA would write an fp32 copy of it.
    where = formats.where if x.dtype == jnp.float32 else jnp.where
    magnitudes = where(jnp.isfinite(x), jnp.abs(x), 0.0)
    return blocks.reduce(magnitudes, size, jnp.max, 0.0).astype(jnp.float32)


def _padded_block_amax(x: Array, size: int, tokens: PaddedTokens) -> Array:
    """Return the largest finite magnitudes of blocks of `size` by `size`, (length / size, columns / size)."""
    return tokens.reduce_blocks(_block_amax(x, (1, size)), size)


def _outer_scale(amax: Array, spec: QuantSpec) -> Array:
    """Return the scales per tensor or row from their amax; of two levels the outer ones."""
    max_microscale = formats.E4M3.max if spec.microscale_format == "e4m3" else 1.0
    return scaling.to_scale(amax, formats.get(spec.format), max_microscale)


def _two_level_scale(amax: Array, outer_scale: Array, spec: QuantSpec) -> Array:
    """Return both scales of groups, multiplied, from their amax (MOSS, section 3.1; arXiv 2509.25149, appendix B)."""
    outer_scale = jnp.ones_like(outer_scale) if spec.outer_granularity == "none" else outer_scale
    microscales = encoding.compute_microscales(amax * (1 / outer_scale), spec, formats.get(spec.format))
    microscales = encoding.decode_microscales(microscales, spec)
    # Under the outer scale alone, the codes of a group whose scale is 0 are 0, too.
    return outer_scale * jnp.where(microscales > 0, microscales, 1)


def _quantize_with_scale(x: Array, spec: QuantSpec, size: int | None, scale: Array, key: Array | None) -> QTensor:
    """Quantize under known scales, one per `size` elements of a row, or per row if None."""
    key = key if spec.rounding == "stochastic" else None
    if size is None:
        return quantize(x, QuantSpec(spec.format, "token", rounding=spec.rounding), scale=scale, key=key)[0]
    by_group = QuantSpec(spec.format, "group", size, rounding=spec.rounding)
    seed = None if key is None else noise.key_to_seed(key)
    return quantize_with_scale(x, by_group, scale, seed=seed)
