"""Policies of `jax.checkpoint` that also recognize 8-bit products, for use with `jax.checkpoint_policies`."""

from fp8jax.ops.autodiff.checkpointing import with_products as with_products

__all__ = ["with_products"]
