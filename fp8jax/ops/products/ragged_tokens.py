"""Ragged products over the tokens of each group under a recipe, (tokens, m) and (tokens, n) to (groups, m, n)."""

import functools
from typing import Any, Literal, NamedTuple

import jax
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import derivatives
from fp8jax.core.groups import Groups, PaddedTokens
from fp8jax.core.recipe import Linear
from fp8jax.ops.autodiff.observations import LayerScope
from fp8jax.ops.dispatch.choice import cast_varying_over, varying_axes
from fp8jax.ops.matmul.grouped import grouped_matmul, grouped_matmul_dw
from fp8jax.ops.matmul.matmul import Operand
from fp8jax.ops.products.operands import encode, gradient_key, weight_side
from fp8jax.ops.products.ragged_16_bits import multiply_in_16_bits
from fp8jax.ops.quantization.group_scales import TokenColumns, alignment, quantize_columns, quantize_rows


class RaggedConfig(NamedTuple):
    """The static part of a ragged product.

    Attributes:
        transposed: whether the weight is (groups, outputs, inputs).
    """

    recipe: Linear
    dtype: Any
    transposed: bool
    name: str
    layer_scope: LayerScope | None = None


def multiply_tokens(config: RaggedConfig, a: Array, b: Array, groups: Groups, key: Array | None) -> Array:
    """Return the product of (tokens, m) and (tokens, n) over the tokens of each group."""
    if not config.recipe.is_quantized:
        return multiply_in_16_bits(config.name, config.dtype, False, a, b, groups)
    key = gradient_key(config.recipe, key)
    a, b = cast_varying_over((a, b), varying_axes((a, b, groups, key)))
    return _token_product(config, a, b, groups, key, derivatives.second_order_guard(config.name, a, b))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_product(config: RaggedConfig, *operands: Any) -> Array:
    return _token_product_fwd(config, *operands)[0]


def _token_product_fwd(
    config: RaggedConfig, a: Array, b: Array, groups: Groups, key: Array | None, token: Array
) -> tuple[Array, tuple[Any, ...]]:
    recipe, keys = config.recipe, split_key(key)
    a, b = lax.stop_gradient((a, b))
    tokens = padded_tokens(recipe, groups, a.shape[0])
    a_columns, b_columns = (
        quantize_columns(
            x,
            recipe.spec(f"{operand}_wgrad"),
            recipe.stateless_strategy(operand),
            tokens,
            key,
            rotation=recipe.rotation,
        )
        for x, operand, key in zip((a, b), ("x", "dy"), keys, strict=True)
    )
    y = multiply_columns(a_columns, b_columns, tokens, dtype=config.dtype, fast="wgrad" in recipe.fast_accumulation)
    return derivatives.differentiable_once(config.name, y, token), (a, b, groups, key, token)


def _token_product_bwd(config: RaggedConfig, saved: tuple[Any, ...], ct: Array) -> tuple[Any, ...]:
    """Return the products of each operand with the cotangent, as dgrad and the forward product have a weight."""
    recipe, side = config.recipe, weight_side(config.recipe)
    (a, b, groups, key, token), matrices = lax.stop_gradient((saved, ct))
    tokens = padded_tokens(recipe, groups, a.shape[0])

    def rows(x: Array, operand: str, key: Array | None) -> Operand:
        spec = recipe.spec(operand)
        return x if spec is None else quantize_rows(x, spec, recipe.stateless_strategy(operand), tokens, key)

    da = multiply_groups(
        "dgrad",
        rows(b, "dy", split_key(key)[0]),
        encode(matrices, side.backward, side.strategy),
        groups,
        recipe,
        a.dtype,
    )
    forward = encode(matrices, side.forward, side.strategy, transposed=True)
    db = multiply_groups("forward", rows(a, "x", None), forward, groups, recipe, b.dtype)
    return *derivatives.differentiable_once(config.name, (da, db), (ct, token)), None, None, None


_token_product.defvjp(_token_product_fwd, _token_product_bwd)


def split_key(key: Array | None) -> tuple[Array | None, Array | None]:
    return (None, None) if key is None else tuple(jax.random.split(key))


def padded_tokens(recipe: Linear, groups: Groups, num_rows: int) -> PaddedTokens:
    """Return the padded token axis, in which all blocks of a recipe's operands are of one group."""
    specs = map(recipe.spec, ("x", "dy", "x_residual", "x_wgrad", "dy_wgrad"))
    return PaddedTokens.from_groups(groups, num_rows, alignment(*specs))


def multiply_groups(
    product: Literal["forward", "dgrad"], x: Any, w: Any, groups: Groups, recipe: Linear, dtype: DTypeLike
) -> Array:
    """Return one of a recipe's two products of rows with the transposes of matrices."""
    spec = recipe.spec("x" if product == "forward" else "dy")
    is_in_blocks, fast = spec is not None and spec.granularity == "block", product in recipe.fast_accumulation
    return grouped_matmul(x, w, groups, scales_are_shared=is_in_blocks, dtype=dtype, fast=fast)


def multiply_columns(a: TokenColumns, b: TokenColumns, tokens: PaddedTokens, *, dtype: DTypeLike, fast: bool) -> Array:
    """Return the products of two transposed matrices over the tokens of each group, (groups, m, n)."""
    scale = b.scale if a.scale is None else a.scale if b.scale is None else a.scale * b.scale
    return grouped_matmul_dw(
        a.operand, b.operand, tokens, scale=scale, row_scale=a.channel_scale, column_scale=b.channel_scale,
        dtype=dtype, fast=fast,
    )  # fmt: skip
