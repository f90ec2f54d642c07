"""Quantization of a matrix whose rows belong to groups, such as the tokens of experts. No scale spans two groups.

Group i has `group_sizes[i]` consecutive rows. Rows after the last group may hold anything, NaN too, and count as zeros.
Per-tensor scales are per group, and blocks along rows restart at each group's first row.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fp8jax.core import blocks, encoding, formats, noise, scaling
from fp8jax.core.qtensor import QTensor, quantize_with_scale
from fp8jax.core.scaling import Scaling
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.products.operands import encode


class RowSets(NamedTuple):
    """Sets of rows that share a scale.

    Attributes:
        ids: int32 (rows,), the set of each row; `num_sets` for rows in no set.
        num_sets: static number of sets.
    """

    ids: Array
    num_sets: int

    def maxima(self, values: Array) -> Array:
        """Return at each row the maximum over its set of fp32 values >= 0, (rows, n)."""
        table = jnp.zeros((self.num_sets + 1, values.shape[1]), jnp.float32)
        return table.at[self.ids].max(values, indices_are_sorted=True)[self.ids]


class Segments:
    """The groups of a matrix's rows.

    Args:
        rows: number of rows.
        group_sizes: (groups,), integers of any dtype. Their sum is clipped to `rows`.
    """

    def __init__(self, rows: int, group_sizes: Array) -> None:
        # The sum may overflow a narrow dtype.
        ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), rows)
        self._starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
        self.sizes = ends - self._starts
        self._rows = jnp.arange(rows, dtype=jnp.int32)
        ids = jnp.sum(self._rows[:, None] >= ends, axis=1, dtype=jnp.int32)
        self.groups = RowSets(ids, group_sizes.shape[0])

    def mask(self, x: Array) -> Array:
        """Return x (rows, n) with zeros in rows outside of all groups."""
        return jnp.where((self.groups.ids < self.groups.num_sets)[:, None], x, 0)

    def blocks(self, size: int) -> RowSets:
        """Return blocks of `size` rows, counted from the first row of each group. A group's last block may be short."""
        per_group = -(-self.sizes // size)
        ids, count = self.groups.ids, self._rows.shape[0] // size + self.groups.num_sets

        def lookup_group(values: Array, fill_value: int) -> Array:
            return jnp.concatenate([values, jnp.full((1,), fill_value, jnp.int32)])[ids]

        first = jnp.cumsum(per_group) - per_group
        block_in_group = (self._rows - lookup_group(self._starts, 0)) // size
        block_ids = lookup_group(first, 0) + block_in_group
        return RowSets(jnp.where(ids < self.groups.num_sets, block_ids, count), count)


def row_codes(x: Array, spec: QuantSpec, strategy: Scaling, segments: Segments, key: Array | None = None) -> QTensor:
    """Quantize a matrix that a product contracts along its columns.

    Args:
        x: floating array (rows, n).
        spec: as for a matrix of one group. Expanded codes per tensor or block get scales and exponents per row instead.
        strategy: stateless scaling for per-tensor scales.
        segments: the groups of rows.
        key: PRNG key, used if the spec rounds stochastically.

    Returns:
        QTensor (rows, n) with scales per row: granularity "tensor" becomes "token", and "block" becomes "group".
    """
    x = segments.mask(x)
    spans_rows = spec.granularity in ("tensor", "block") or (spec.granularity == "mx" and spec.outer_scale == "tensor")
    if spec.expand or not spans_rows:
        row_granularity = {"tensor": "token", "block": "group"}.get(spec.granularity, spec.granularity)
        return encode(x, dataclasses.replace(spec, granularity=row_granularity), strategy, key=key)  # type: ignore[return-value]
    fmt, row_amax = formats.get(spec.format), jnp.max(_magnitudes(x), axis=1, keepdims=True, initial=0.0)
    if spec.granularity == "block":
        size = spec.group_size or 1
        block_amax = blocks.reduce(_magnitudes(x), (1, size), jnp.max, 0.0)
        return _quantize_with_scale(x, spec, size, scaling.to_scale(segments.blocks(size).maxima(block_amax), fmt), key)
    if spec.granularity == "tensor":
        return _quantize_with_scale(
            x, spec, None, scaling.to_scale(strategy.reduce_amax(segments.groups.maxima(row_amax)), fmt), key
        )
    outer_scale = scaling.to_scale(segments.groups.maxima(row_amax), fmt)
    if spec.is_folded:
        return _quantize_with_scale(x, spec, None, scaling.pow2_scale(row_amax, outer_scale, fmt), key)
    size = spec.group_size or 1
    block_amax = blocks.reduce(_magnitudes(x), (1, size), jnp.max, 0.0)
    return _quantize_with_scale(x, spec, size, _two_level_scale(block_amax, outer_scale, spec), key)


def column_values(
    x: Array, spec: QuantSpec, strategy: Scaling, segments: Segments, dtype: DTypeLike, key: Array | None = None
) -> Array:
    """Quantize and dequantize a matrix that a product contracts along its rows, within each group.

    Args:
        x: floating array (rows, n).
        spec: spec of the transposed matrix, without expansion. Its groups and tokens run along the rows of `x`.
        strategy, segments, key: as in `row_codes`.
        dtype: dtype of the result.

    Returns:
        (rows, n); zeros in rows outside of all groups.
    """
    if spec.granularity in ("tensor", "block"):
        return row_codes(x, spec, strategy, segments, key).dequantize(dtype)
    x, fmt = segments.mask(x), formats.get(spec.format)
    magnitudes, size = _magnitudes(x), spec.group_size or 1
    if spec.granularity == "group":
        return _quantize_with_scale(
            x, spec, 1, scaling.to_scale(segments.blocks(size).maxima(magnitudes), fmt), key
        ).dequantize(dtype)
    group_amax = segments.groups.maxima(magnitudes)
    outer_scale = scaling.to_scale(group_amax, fmt)
    if spec.granularity == "mx" and spec.outer_scale == "tensor":
        outer_scale = scaling.to_scale(jnp.max(group_amax, axis=1, keepdims=True, initial=0.0), fmt)
    if spec.granularity == "token" or (spec.is_folded and spec.outer_scale == "token"):
        scale = outer_scale
    elif spec.is_folded:
        scale = scaling.pow2_scale(group_amax, outer_scale, fmt)
    else:
        scale = _two_level_scale(segments.blocks(size).maxima(magnitudes), outer_scale, spec)
    return _quantize_with_scale(x, spec, 1, scale, key).dequantize(dtype)


def _magnitudes(x: Array) -> Array:
    """Return finite magnitudes in fp32; 0 for NaN and Inf."""
    magnitudes = jnp.abs(x.astype(jnp.float32))
    return formats.where(jnp.isfinite(magnitudes), magnitudes, 0.0)


def _two_level_scale(amax: Array, outer_scale: Array, spec: QuantSpec) -> Array:
    """Return the scales of microscaled groups from their amax, with (MOSS, section 3.1) or without outer scales."""
    outer_scale = jnp.ones_like(outer_scale) if spec.outer_scale == "none" else outer_scale
    powers = encoding.compute_microscales(amax * (1 / outer_scale), spec, formats.get(spec.format))
    return outer_scale * formats.decode_e8m0(powers)


def _quantize_with_scale(x: Array, spec: QuantSpec, width: int | None, scale: Array, key: Array | None) -> QTensor:
    """Quantize under known scales, one per `width` elements of a row, or per row if None."""
    granularity = "token" if width is None else "group"
    row_spec = QuantSpec(spec.format, granularity, width, rounding=spec.rounding)
    seed = noise.key_to_seed(key) if key is not None and spec.rounding == "stochastic" else None
    return quantize_with_scale(x, row_spec, scale, seed=seed)
