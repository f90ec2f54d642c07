"""The products of experts by a recipe, and what is kept of their inputs for the backward pass."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax

import fp8jax
from experiments.models.moe import ExpertProducts, Routes
from experiments.models.shape import LlamaConfig
from fp8jax.dist import TokenExchange
from fp8jax.ops.autodiff.residuals import dequantize_residual, quantize_residual
from fp8jax.ops.products.linear import key_from_data
from fp8jax.recipes import Linear

AXIS = "expert"


class ExpertSharing(NamedTuple):
    """How devices along "expert" share experts, inside `jax.shard_map`.

    Attributes:
        wire_format: of what they send to each other's experts, as `fp8jax.dist.TokenExchange.dispatch` takes it.
        capacity: rows that a device has room for, in multiples of those that it sends; 0 for those of all devices.
    """

    wire_format: Linear | str
    capacity: float = 0.0


@functools.partial(jax.tree_util.register_dataclass, data_fields=["routes", "exchange"], meta_fields=["wire_format"])
@dataclasses.dataclass(frozen=True)
class SharedRoutes:
    """Routes to the experts of several devices, whose rows are those that this device's experts receive.

    Attributes:
        routes: of the tokens of this device.
        exchange: which of their rows go to which device.
        wire_format: of what is sent to experts, as `fp8jax.dist.TokenExchange.dispatch` takes it.
    """

    routes: Routes
    exchange: TokenExchange
    wire_format: Linear | str

    @property
    def sizes_E(self) -> jax.Array:
        """Rows of each expert of this device."""
        return self.exchange.group_sizes

    def permute(self, x_NxD: jax.Array) -> jax.Array:
        """As of `Routes`."""
        return self.exchange.dispatch(self.routes.permute(x_NxD), self.wire_format)

    def combine(self, y_RxD: jax.Array) -> jax.Array:
        """As of `Routes`."""
        return self.routes.combine(self.exchange.combine(y_RxD, self.wire_format))

    def per_row(self, weights_NxK: jax.Array) -> jax.Array:
        """As of `Routes`."""
        return self.exchange.dispatch(self.routes.per_row(weights_NxK)[:, None], "fp32")[:, 0]


@dataclasses.dataclass(frozen=True)
class RecipeProducts(ExpertProducts):
    """Products by `fp8jax.ragged_dot`, also in 16 bits; kept are codes as the recipe's context says, else arrays.

    Attributes:
        recipe: of the products.
        sharing: how devices share experts; None where each has all of them.
    """

    recipe: fp8jax.Recipe
    sharing: ExpertSharing | None = None

    def share(self, routes: Routes) -> Any:
        if self.sharing is None:
            return routes
        rows = routes.order_R.size
        capacity = math.ceil(self.sharing.capacity * rows) or None
        exchange = TokenExchange.from_sizes(routes.sizes_E, AXIS, rows, capacity=capacity)
        return SharedRoutes(routes, exchange, self.sharing.wire_format)

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


def check_devices(llama: LlamaConfig, devices: int) -> None:
    """Raises ValueError that says why so many devices cannot share experts, and the fix."""
    if not llama.experts:
        raise ValueError(f"expert={devices}: the model has no experts; take data={devices} or fsdp={devices}")
    if llama.experts % devices:
        fits = [n for n in range(1, llama.experts + 1) if llama.experts % n == 0]
        raise ValueError(f"{devices} devices along expert do not divide {llama.experts} experts; expert may be {fits}")


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
