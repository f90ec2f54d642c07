"""Matmuls of experts by a recipe, and their residuals for the backward pass."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax

import fp8jax
from experiments.models.moe import ExpertProducts, Norm, Routes, recomputed
from experiments.models.shape import LlamaConfig
from fp8jax.core.groups import Groups
from fp8jax.dist import TokenExchange, TokenGather, expert_collectives
from fp8jax.dist.collectives import Collective
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
from fp8jax.ops.products.ragged import unsupported_ragged_reason
from fp8jax.ops.products.token_rows import sum_rows
from fp8jax.recipes import Linear

AXIS = "expert"


class ExpertSharing(NamedTuple):
    """Sharding of experts over devices along "expert", inside `jax.shard_map`.

    Attributes:
        wire_format: format of sent tokens, an argument of `fp8jax.dist.TokenExchange.dispatch`.
        capacity: rows that a device can receive, as a multiple of those that it sends; 0 for the rows of all devices.
    """

    wire_format: Linear | str
    capacity: float = 0.0


@functools.partial(jax.tree_util.register_dataclass, data_fields=["routes", "exchange"], meta_fields=["wire_format"])
@dataclasses.dataclass(frozen=True)
class SharedRoutes:
    """Routes to the experts of several devices. The rows are those that this device's experts receive.

    Attributes:
        routes: routes of the tokens of this device.
        exchange: the exchange of rows between devices.
        wire_format: format of sent tokens, an argument of `fp8jax.dist.TokenExchange.dispatch`.
    """

    routes: Routes
    exchange: TokenExchange
    wire_format: Linear | str

    @property
    def sizes_E(self) -> jax.Array:
        """Number of rows of each expert of this device."""
        return self.exchange.group_sizes

    def permute(self, x_NxD: jax.Array) -> jax.Array:
        """See `Routes`."""
        return self.exchange.dispatch(self.routes.permute(x_NxD), self.wire_format)

    def combine(self, y_RxD: jax.Array) -> jax.Array:
        """See `Routes`."""
        return self.routes.combine(self.exchange.combine(y_RxD, self.wire_format))

    def per_row(self, weights_NxK: jax.Array) -> jax.Array:
        """See `Routes`."""
        return self.exchange.dispatch(self.routes.per_row(weights_NxK)[:, None], "fp32")[:, 0]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["gather"], meta_fields=["wire_format"])
@dataclasses.dataclass(frozen=True)
class GatheredRoutes:
    """Routes to the experts of several devices. Each device gathers the tokens of all.

    Attributes:
        gather: the gather of tokens, and the rows of this device's experts.
        wire_format: the format of the gathered tokens, as for `fp8jax.dist.TokenGather.dispatch`.
    """

    gather: TokenGather
    wire_format: Linear | str

    @property
    def sizes_E(self) -> jax.Array:
        """Number of rows of each expert of this device."""
        return self.gather.group_sizes

    def permute(self, x_NxD: jax.Array) -> jax.Array:
        """See `Routes`."""
        return self.gather.dispatch(x_NxD, self.wire_format)

    def combine(self, y_RxD: jax.Array) -> jax.Array:
        """See `Routes`."""
        return self.gather.combine(y_RxD, self.wire_format)

    def per_row(self, weights_NxK: jax.Array) -> jax.Array:
        """See `Routes`."""
        return self.gather.dispatch_weights(weights_NxK)


def gathers_tokens(devices: int, experts_per_token: int) -> bool:
    """Returns whether gathering all tokens sends at most as much as sending each token to its experts."""
    return devices <= experts_per_token


@dataclasses.dataclass(frozen=True)
class RecipeProducts(ExpertProducts):
    """Matmuls by `fp8jax.ragged_dot`, also in 16 bits. Residuals are codes if the recipe has a context, else arrays.

    Attributes:
        recipe: recipe of the matmuls.
        sharing: sharding of experts over devices; None if each device has all experts.
    """

    recipe: fp8jax.Recipe
    sharing: ExpertSharing | None = None

    def share(self, routes: Routes, experts_NxK: jax.Array) -> Any:
        if self.sharing is None:
            return routes
        rows, devices = experts_NxK.size, jax.lax.axis_size(AXIS)
        capacity, wire_format = math.ceil(self.sharing.capacity * rows) or None, self.sharing.wire_format
        if gathers_tokens(devices, experts_NxK.shape[1]):
            gather = TokenGather.from_choices(experts_NxK, routes.sizes_E.size, AXIS, capacity=capacity)
            return GatheredRoutes(gather, wire_format)
        exchange = TokenExchange.from_sizes(routes.sizes_E, AXIS, rows, capacity=capacity)
        return SharedRoutes(routes, exchange, wire_format)

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
        if not linear.is_quantized or linear.is_stochastic:
            return super().mlp(x_NxD, tokens, norm, gate_up_ExDx2F, down_ExFxD, weights_R, routes)
        # Tokens are quantized before the permutation; gate and up are quantized at their multiplication.
        groups, combine = routes.sizes_E, routes.combine
        if norm is not None:
            x_NxD = recomputed(_apply_norm, self, x_NxD, tokens, norm)
        if isinstance(routes, GatheredRoutes):
            x_RxD, facts = routes.gather.dispatch_with_facts(x_NxD, routes.wire_format)
        else:
            exchanged = routes if isinstance(routes, SharedRoutes) else None
            rule = _DecodeTokens(self, x_NxD.dtype), _DecodeTokens.Saved(tokens, norm, exchanged)
            x_RxD, facts = routes.permute(x_NxD), ArrayFacts(rule)
        if isinstance(routes, Routes):
            index_R = routes.order_R // routes.rows_NxK.shape[1]
            facts = facts._replace(row_source=(jax.lax.stop_gradient(x_NxD), index_R))
            combine = functools.partial(sum_rows, index=index_R, rows=routes.rows_NxK)
        dot = lambda x, w, facts: fp8jax.ragged_dot(x, w, groups, recipe=linear, input_facts=InputFacts(facts))  # noqa: E731
        gate_up_Rx2F = dot(x_RxD, gate_up_ExDx2F, facts)
        row_groups = Groups.from_sizes(groups, weights_R.size)
        h_RxF, facts = grouped_glu(gate_up_Rx2F, row_groups, self.recipe, weights=weights_R)
        return combine(dot(h_RxF, down_ExFxD, facts))

    def encode(self, x: jax.Array) -> Any:
        spec = self.recipe.context.spec
        return x if spec is None else quantize_residual(x, spec)

    def decode(self, saved: Any, dtype: jax.typing.DTypeLike) -> jax.Array:
        return dequantize_residual(saved).astype(dtype)


def _apply_norm(products: ExpertProducts, x_NxD: jax.Array, norm: Norm) -> jax.Array:
    return norm(x_NxD)


@dataclasses.dataclass(frozen=True)
class _DecodeTokens:
    """Decodes tokens, applies their norm, and sends them: a `fp8jax.ops.autodiff.residuals.Recomputable`.

    It has no backward pass.

    Attributes:
        products: decodes the tokens.
        dtype: dtype of the tokens.
    """

    class Saved(NamedTuple):
        """Encoded tokens, their norm, and their destinations, if they are sent."""

        tokens: Any
        norm: Norm | None
        routes: SharedRoutes | None

    products: ExpertProducts
    dtype: jax.typing.DTypeLike

    def recompute(self, saved: Saved, gradient: CotangentFacts) -> Recomputed:
        x_NxD = self.products.decode(saved.tokens, self.dtype)
        x_NxD = x_NxD if saved.norm is None else saved.norm(x_NxD)
        return Recomputed(x_NxD if saved.routes is None else saved.routes.permute(x_NxD))

    def backward(self, *_: Any) -> Any:
        raise TypeError("decoding of tokens has no backward pass")


def exchanged(
    llama: LlamaConfig, devices: int, wire_format: Linear | str, tokens: int, dtype: str = "bf16", times: int = 1
) -> list[Collective]:
    """Returns the collectives of tokens in layers of experts, forward and backward. Backward sends tokens again.

    Args:
        tokens: number of tokens of a device.
        dtype: dtype of the tokens.
        times: number of layers.
    """
    gathers = gathers_tokens(devices, llama.experts_per_token)
    kind: Any = "all-gather" if gathers else "ragged-all-to-all"
    rows = tokens if gathers else tokens * llama.experts_per_token
    return expert_collectives(rows, llama.dim, devices, wire_format, dtype, kind=kind, times=times, dispatches=2)


def check_devices(llama: LlamaConfig, devices: int) -> None:
    """Raises ValueError, with the fix, if this number of devices cannot share the experts."""
    if not llama.experts:
        raise ValueError(f"expert={devices}: the model has no experts; use data={devices} or fsdp={devices}")
    if llama.experts % devices:
        fits = [n for n in range(1, llama.experts + 1) if llama.experts % n == 0]
        raise ValueError(
            f"{devices} devices along expert do not divide {llama.experts} experts; expert must be one of {fits}"
        )


def check(recipe: fp8jax.Recipe) -> None:
    """Raises ValueError for a recipe with a scaling state, or without matmuls of experts."""
    if (reason := unsupported_ragged_reason(recipe.linear)) is not None:
        raise ValueError(f"{recipe.name}: {reason}; use mxfp8, nvfp4, coat or another recipe")
    names = sorted(
        {
            recipe.linear.scaling_name(operand)
            for operand, s in recipe.linear.stateful_strategies.items()
            if s.collects_stats
        }
    )
    if names:
        raise ValueError(
            f"{recipe.name}: {' and '.join(names)} scaling keeps a state for each product, which this program does "
            "not support for experts; use coat, coat_fast, deepseek or another recipe without it"
        )
