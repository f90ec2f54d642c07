"""Flax NNX: `quantize` for models that were not written for it."""

from fp8jax.modules.nnx import quantize as quantize
