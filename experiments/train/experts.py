"""The products of experts by a recipe, and what is kept of their inputs for the backward pass."""

import dataclasses
from typing import Any

import jax

import fp8jax
from experiments.models.moe import ExpertProducts
from fp8jax.ops.autodiff.residuals import dequantize_residual, quantize_residual
from fp8jax.ops.products.linear import key_from_data


@dataclasses.dataclass(frozen=True)
class RecipeProducts(ExpertProducts):
    """Products by `fp8jax.ragged_dot`, also in 16 bits; kept are codes as the recipe's context says, else arrays."""

    recipe: fp8jax.Recipe

    def multiply(self, x_RxD: jax.Array, w_ExDxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
        linear = self.recipe.linear
        w_ExDxF = w_ExDxF if linear.is_quantized else w_ExDxF.astype(x_RxD.dtype)
        key = key_from_data(x_RxD) if linear.is_stochastic else None
        return fp8jax.ragged_dot(x_RxD, w_ExDxF, sizes_E, recipe=linear, key=key)

    def encode(self, x: jax.Array) -> Any:
        spec = self.recipe.context.spec
        return x if spec is None else quantize_residual(x, spec)

    def decode(self, kept: Any, dtype: jax.typing.DTypeLike) -> jax.Array:
        return dequantize_residual(kept).astype(dtype)


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
