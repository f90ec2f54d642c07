"""Codes of tokens before they are permuted into the rows of a grouped product."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from fp8jax.core import formats, scaling
from fp8jax.core.groups import ALIGNMENT, PaddedTokens
from fp8jax.core.qtensor import QTensor, from_bytes, to_bytes
from fp8jax.core.scaling import Scaling
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.quantization import fused_outputs
from fp8jax.ops.quantization.fused_reference import compute_row_amax
from fp8jax.ops.quantization.group_scales import TokenColumns, group_maxima
from fp8jax.ops.quantization.grouped import quantize_groups
from fp8jax.ops.quantization.quantize import quantize


class RowsAndColumns(NamedTuple):
    """Codes of a matrix (rows, n), as the two products read them.

    Attributes:
        rows: of granularity "token"; None if not requested.
        columns: transposed, in the padded token axis; None if not requested.
    """

    rows: QTensor | None
    columns: TokenColumns | None


class TokenCodes(NamedTuple):
    """Codes of tokens (tokens, n), and the token of each row.

    The scale of a token is a power of two times that of the largest token. Codes of tokens of one group then get a
    common scale without being rounded again, unless they become subnormal.

    Attributes:
        codes: of granularity "token", as bytes.
        row_tokens: int32 (rows,). A row of a token out of bounds is NaN.
    """

    codes: QTensor
    row_tokens: Array

    def gather(self, tokens: PaddedTokens, *, rows: bool = False, columns: bool = False) -> RowsAndColumns:
        """Return the codes of the rows.

        Args:
            tokens: the padded axis of the rows.
            rows, columns: which codes to return.
        """
        q = from_bytes(self.codes)
        fmt, index = q.spec.format, jnp.clip(self.row_tokens, 0, q.shape[0] - 1)
        row_scale = jnp.where((index == self.row_tokens)[:, None], q.scale[index], jnp.nan)
        group_scale = factor = None
        if columns:
            group_scale = group_maxima(row_scale, tokens)
            factor = _divide(row_scale, tokens.take_groups(group_scale))[:, 0]
        row_codes, column_codes = quantize_groups(
            q.codes,
            tokens,
            index=index,
            rows=fmt if rows else None,
            columns=fmt if columns else None,
            row_factor=factor,
        )
        return RowsAndColumns(
            None if row_codes is None else QTensor(row_codes, row_scale, None, None, q.spec),
            None if group_scale is None or column_codes is None else unscaled_columns(column_codes, fmt, group_scale),
        )


def supports(x: Array | QTensor, spec: QuantSpec | None, tokens: PaddedTokens) -> bool:
    """Return whether tokens can be quantized before they are permuted: in FP8 per tensor, rounded to nearest."""
    return spec is not None and fused_outputs.supports(spec) and 0 not in x.shape and tokens.alignment == ALIGNMENT


def quantize_tokens(
    x: Array, index: Array, spec: QuantSpec, strategy: Scaling, tokens: PaddedTokens, scale: Array | None = None
) -> TokenCodes:
    """Quantize tokens, of which rows of groups are copies.

    Args:
        x: (tokens, n).
        index: int32 (rows,), the token of each row.
        spec: a spec for which `supports` holds.
        strategy: of the scale of the largest token in a group.
        scale: fp32 (tokens, 1), scales of such codes that were made before; None computes them.
    """
    if scale is None:
        row_amax = compute_row_amax(x)
        largest = jnp.max(jnp.where(tokens.is_in_group, row_amax[index], 0.0), initial=0.0)
        scale = token_scales(row_amax, largest, spec, strategy)
    return TokenCodes(encode_tokens(x, spec, scale), index)


def token_scales(row_amax: Array, largest: Array, spec: QuantSpec, strategy: Scaling) -> Array:
    """Return the scale of each token, fp32 (tokens, 1), from amax of tokens and of the largest token in a group."""
    fmt = formats.get(spec.format)
    outer_scale = scaling.to_scale(strategy.reduce_amax(largest), fmt)
    # Tokens in no group saturate.
    return scaling.pow2_scale(jnp.minimum(row_amax, largest)[:, None], outer_scale, fmt)


def encode_tokens(x: Array, spec: QuantSpec, scale: Array) -> QTensor:
    """Return the codes of tokens (tokens, n) under scales of `token_scales`, as bytes."""
    codes, _ = quantize(x, QuantSpec(spec.format, "token"), scale=scale)
    return to_bytes(codes)


def unscaled_columns(codes: Array, fmt: str, group_scale: Array) -> TokenColumns:
    """Return transposed codes (n, length) with a scale of each group, fp32 (groups, 1)."""
    one = jnp.ones((1, 1), jnp.float32)
    return TokenColumns(QTensor(codes, one, None, None, QuantSpec(fmt)), group_scale[:, 0])


def _divide(x: Array, y: Array) -> Array:
    """Return x / y, and 0 where y is 0, as in rows of no group."""
    return jnp.where(y > 0, x / jnp.where(y > 0, y, 1.0), 0.0)
