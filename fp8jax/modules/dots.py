"""Replacements for `jax.lax.dot_general` and `jnp.einsum` that layers of Flax take as an attribute."""

import dataclasses
from typing import Any

from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core.recipe import Linear
from fp8jax.ops.linear import DimensionNumbers, content_key, dot_general, einsum


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """`fp8jax.dot_general` with its recipe; keys for stochastic rounding come from the data."""

    linear: Linear

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> Array:
        return dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            recipe=self.linear,
            key=content_key(lhs) if self.linear.stochastic else None,
            out_sharding=out_sharding,
        )


@dataclasses.dataclass(frozen=True)
class Einsum:
    """`fp8jax.einsum` with its recipe; keys for stochastic rounding come from the data."""

    linear: Linear

    def __call__(
        self,
        subscripts: str,
        lhs: Array,
        rhs: Array,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> Array:
        if precision not in (None, lax.Precision.DEFAULT) or out_sharding is not None:
            raise ValueError(f"a quantized einsum takes no precision={precision!r}, out_sharding={out_sharding!r}")
        key = content_key(lhs) if self.linear.stochastic else None
        y = einsum(subscripts, lhs, rhs, recipe=self.linear, key=key)
        return y if preferred_element_type is None else y.astype(preferred_element_type)
