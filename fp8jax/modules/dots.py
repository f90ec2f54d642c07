"""A replacement for `jax.lax.dot_general` that layers of Flax take as an attribute."""

import dataclasses
from typing import Any

from jax import Array

from fp8jax.core import products
from fp8jax.core.recipe import Linear
from fp8jax.modules.functions import dot_general
from fp8jax.modules.provenance import REGISTRY
from fp8jax.ops.linear import content_key


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """`fp8jax.dot_general` with its recipe, called as that; keys for stochastic rounding come from the data."""

    linear: Linear

    def __call__(self, lhs: Array, rhs: Array, *args: Any, quantized: Any = None, **kwargs: Any) -> Array:
        check_products()
        options: Any = {"key": key_of(lhs, self.linear), "quantized": quantized, **kwargs}
        return dot_general(lhs, rhs, *args, recipe=self.linear, **options)


def key_of(lhs: Array, linear: Linear) -> Array | None:
    """One key for all layers that read an input, so that they share its codes."""
    return REGISTRY.share(lhs, "key", lambda: content_key(lhs)) if linear.stochastic else None


def check_products() -> None:
    """Raises ValueError where a quantized layer runs while another library has changed the products of JAX."""
    if name := products.changed():
        raise ValueError(
            f"a quantized layer runs while another library has changed {name}: what this adds to the layer's product, "
            "such as a LoRA adapter, would be lost. Merge adapters into the weights before the model is quantized, or "
            "take adapters that are modules, as nnx.LoRA, or leave the model as it is written"
        )
