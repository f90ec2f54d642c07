"""Flax NNX: `quantize` for models that were not written for it, and what trains delayed scaling."""

from fp8jax.modules.delayed import GradientStatistic as GradientStatistic
from fp8jax.modules.delayed import ScalingVariable as ScalingVariable
from fp8jax.modules.delayed import advance_scaling as advance_scaling
from fp8jax.modules.nnx import quantize as quantize
