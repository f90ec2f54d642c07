"""The products of experts by a recipe, and what is kept of their inputs for the backward pass."""

import dataclasses
from typing import Any, NamedTuple

import jax

import fp8jax
from experiments.models.moe import ExpertProducts, Norm, Routes, recomputed
from fp8jax.core.groups import Groups
from fp8jax.ops.autodiff.residuals import (
    ArrayFacts,
    CotangentFacts,
    InputFacts,
    Recomputed,
    dequantize_residual,
    quantize_residual,
)
from fp8jax.ops.nonlinear.grouped_glu import grouped_glu
from fp8jax.ops.products.linear import key_from_data
from fp8jax.ops.products.token_rows import sum_rows


@dataclasses.dataclass(frozen=True)
class RecipeProducts(ExpertProducts):
    """Products by `fp8jax.ragged_dot`, also in 16 bits; kept are codes as the recipe's context says, else arrays."""

    recipe: fp8jax.Recipe

    def multiply(self, x_RxD: jax.Array, w_ExDxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
        linear = self.recipe.linear
        w_ExDxF = w_ExDxF if linear.is_quantized else w_ExDxF.astype(x_RxD.dtype)
        key = key_from_data(x_RxD) if linear.is_stochastic else None
        return fp8jax.ragged_dot(x_RxD, w_ExDxF, sizes_E, recipe=linear, key=key)

    def mlp(
        self, x_NxD: jax.Array, tokens: Any, norm: Norm | None, gate_up_ExDx2F: jax.Array, down_ExFxD: jax.Array,
        weights_R: jax.Array, routes: Routes,
    ) -> jax.Array:  # fmt: skip
        linear = self.recipe.linear
        if not linear.is_quantized or linear.is_stochastic or type(routes) is not Routes:
            return super().mlp(x_NxD, tokens, norm, gate_up_ExDx2F, down_ExFxD, weights_R, routes)
        # Codes are made of tokens before they are permuted, and of gate and up where they are multiplied.
        index_R, groups = routes.order_R // routes.rows_NxK.shape[1], routes.sizes_E
        if norm is not None:
            x_NxD = recomputed(_apply_norm, self, x_NxD, tokens, norm)
        rule = _DecodeTokens(self, x_NxD.dtype), _DecodeTokens.Saved(tokens, norm)
        facts = ArrayFacts(rule, row_source=(jax.lax.stop_gradient(x_NxD), index_R))
        dot = lambda x, w, facts: fp8jax.ragged_dot(x, w, groups, recipe=linear, input_facts=InputFacts(facts))  # noqa: E731
        gate_up_Rx2F = dot(routes.permute(x_NxD), gate_up_ExDx2F, facts)
        row_groups = Groups.from_sizes(groups, index_R.size)
        h_RxF, facts = grouped_glu(gate_up_Rx2F, row_groups, self.recipe, weights=weights_R)
        return sum_rows(dot(h_RxF, down_ExFxD, facts), index_R, routes.rows_NxK)

    def encode(self, x: jax.Array) -> Any:
        spec = self.recipe.context.spec
        return x if spec is None else quantize_residual(x, spec)

    def decode(self, kept: Any, dtype: jax.typing.DTypeLike) -> jax.Array:
        return dequantize_residual(kept).astype(dtype)


def _apply_norm(products: ExpertProducts, x_NxD: jax.Array, norm: Norm) -> jax.Array:
    return norm(x_NxD)


@dataclasses.dataclass(frozen=True)
class _DecodeTokens:
    """Decodes tokens, and applies their norm: a `fp8jax.ops.autodiff.residuals.Recomputable` without a backward pass.

    Attributes:
        products: decode the tokens.
        dtype: of the tokens.
    """

    class Saved(NamedTuple):
        """Encoded tokens, and their norm."""

        tokens: Any
        norm: Norm | None

    products: ExpertProducts
    dtype: jax.typing.DTypeLike

    def recompute(self, saved: Saved, gradient: CotangentFacts) -> Recomputed:
        x_NxD = self.products.decode(saved.tokens, self.dtype)
        return Recomputed(x_NxD if saved.norm is None else saved.norm(x_NxD))

    def backward(self, *_: Any) -> Any:
        raise TypeError("tokens that are decoded are no operation")


def check(recipe: fp8jax.Recipe) -> None:
    """Raises ValueError for a recipe whose products have a state, which those of experts do not have."""
    names = sorted(
        {recipe.linear.scaling_name(operand) for operand, s in recipe.linear.states.items() if s.collects_stats}
    )
    if names:
        raise ValueError(
            f"{recipe.name}: {' and '.join(names)} scaling keeps a state for each product, and products of experts "
            "have none; take coat, coat_fast, deepseek or another recipe without it"
        )
