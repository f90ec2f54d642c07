"""Policies of `jax.checkpoint` that see products in 8 bits, beside those of `jax.checkpoint_policies`."""

from fp8jax.ops.autodiff.checkpointing import with_products as with_products

__all__ = ["with_products"]
