"""Ragged products of arrays, which are not quantized and may be differentiated twice."""

import functools
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from fp8jax.core import derivatives
from fp8jax.core.groups import Groups, PaddedTokens
from fp8jax.ops.autodiff.checkpointing import PRODUCT
from fp8jax.ops.dispatch.choice import cast_varying_over, varying_axes
from fp8jax.ops.matmul.grouped import grouped_matmul, grouped_matmul_dw
from fp8jax.ops.matmul.grouped_hopper import UnpaddedRows


def multiply_in_16_bits(name: str, dtype: Any, transposed: bool, x: Array, w: Array, groups: Groups) -> Array:
    """Return the product of rows with (groups, inputs, outputs), or over the tokens of each group with (tokens, n).

    Args:
        transposed: whether matrices are (groups, outputs, inputs).
    """
    x, w = cast_varying_over((x, w), varying_axes((x, w, groups)))
    multiply = _multiply_tokens if w.ndim == 2 else _multiply_rows
    return multiply((dtype, transposed), x, w, groups, derivatives.second_order_guard(name, x, w))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_rows(static: tuple[Any, bool], x: Array, w: Array, groups: Groups, token: Array) -> Array:
    dtype, transposed = static
    return checkpoint_name(grouped_matmul(x, w, groups, transposed=not transposed, dtype=dtype), PRODUCT)


def _multiply_rows_bwd(static: tuple[Any, bool], saved: tuple[Any, ...], dy: Array) -> tuple[Any, ...]:
    (x, w, groups, token), (_, transposed) = saved, static
    dx = _multiply_rows((x.dtype, not transposed), dy, w, groups, token)
    pair = (dy, x) if transposed else (x, dy)
    return dx, _multiply_tokens((w.dtype, False), *pair, groups, token), None, None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_tokens(static: tuple[Any, bool], a: Array, b: Array, groups: Groups, token: Array) -> Array:
    tokens = PaddedTokens.from_groups(groups, a.shape[0])
    return grouped_matmul_dw(UnpaddedRows(a), UnpaddedRows(b), tokens, dtype=static[0])


def _multiply_tokens_bwd(static: tuple[Any, bool], saved: tuple[Any, ...], ct: Array) -> tuple[Any, ...]:
    a, b, groups, token = saved
    da = _multiply_rows((a.dtype, True), b, ct, groups, token)
    return da, _multiply_rows((b.dtype, False), a, ct, groups, token), None, None


_multiply_rows.defvjp(lambda static, *operands: (_multiply_rows(static, *operands), operands), _multiply_rows_bwd)
_multiply_tokens.defvjp(lambda static, *operands: (_multiply_tokens(static, *operands), operands), _multiply_tokens_bwd)
