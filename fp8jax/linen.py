"""Flax Linen: `quantize` for models that were not written for it, and a class for layers' `dot_general_cls`."""

from fp8jax.modules.linen import make_dot_general_cls as make_dot_general_cls
from fp8jax.modules.linen import quantize as quantize
