"""Scaling states of ragged products, one for each group."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core import formats
from fp8jax.core.groups import Groups, PaddedTokens
from fp8jax.core.recipe import Linear
from fp8jax.ops.products.linear import ScalingState, ScalingStats, collects_stats, operand_state
from fp8jax.ops.products.product import Scales
from fp8jax.ops.quantization.group_scales import amax_per_group


class GroupScaling(NamedTuple):
    """The scales from the states of a product's groups.

    Attributes:
        scales: given scales, fp32 (groups,).
        thresholds: fp32 (groups,), above which blocks of the input fall back; None if none do.
        observed: the statistics of `x` and `w` that are known before the product.
    """

    scales: Scales
    thresholds: Array | None
    observed: ScalingStats

    @classmethod
    def from_state(
        cls, x: Array, w: Array, groups: Groups, recipe: Linear, state: ScalingState, amax_slot: Array | None
    ) -> "GroupScaling":
        strategies, scales, thresholds, observed = recipe.stateful_strategies, Scales(), None, ScalingStats()
        x, w = lax.stop_gradient((x, w))
        for name, strategy in strategies.items():
            group_states = operand_state(state, name)
            if name == "dy":
                scales = scales._replace(dy_amax=jax.vmap(strategy.expected_amax)(group_states), amax_slot=amax_slot)
                continue
            if strategy.is_threshold:
                thresholds = group_states
                continue
            # A scaling reads only the amax of a tensor, so the amax of each group's rows replaces the input.
            values = w if name == "w" else amax_per_group(x, PaddedTokens.from_groups(groups, x.shape[0]))
            get_scale = functools.partial(strategy.scale, fmt=formats.get(recipe.quantized_spec(name).format))
            scales = scales._replace(**{name: jax.vmap(get_scale)(group_states, values)})
            if strategy.collects_stats:
                observed = observed._replace(**{name: jax.vmap(strategy.collect_stats)(group_states, values)})
        if collects_stats(recipe, "dy"):
            observed = observed._replace(dy=jnp.zeros((w.shape[0],), jnp.float32))
        return cls(scales, thresholds, observed)

    def stats(self, counts: Array | None) -> ScalingStats:
        """Return the statistics of the call; `counts` are those of fallback blocks."""
        return self.observed if counts is None else self.observed._replace(x=counts)
