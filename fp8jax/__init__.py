"""fp8jax: training large JAX models in 8 bits."""

import importlib as _importlib
from importlib import metadata as _metadata
from typing import Any as _Any

from fp8jax import recipes as recipes
from fp8jax.core import formats as formats
from fp8jax.core.qtensor import QTensor as QTensor
from fp8jax.core.qtensor import quantize as quantize
from fp8jax.core.recipe import Recipe as Recipe
from fp8jax.core.spec import QuantSpec as QuantSpec
from fp8jax.modules.rules import Rule as Rule
from fp8jax.ops.linear import delayed_linear as delayed_linear
from fp8jax.ops.linear import dot_general as dot_general
from fp8jax.ops.linear import einsum as einsum
from fp8jax.ops.linear import init_scaling as init_scaling
from fp8jax.ops.linear import linear as linear
from fp8jax.ops.linear import update_scaling as update_scaling
from fp8jax.optim.compress_state import compress_state as compress_state
from fp8jax.optim.compressed_adamw import compressed_adamw as compressed_adamw
from fp8jax.optim.compressed_adamw import scale_by_compressed_adam as scale_by_compressed_adam
from fp8jax.optim.moments import state_bytes as state_bytes

__version__ = _metadata.version("fp8jax")


def __getattr__(name: str) -> _Any:
    # Flax is needed by these alone.
    if name in ("nnx", "linen"):
        return _importlib.import_module(f"fp8jax.{name}")
    if name == "explain":
        return _importlib.import_module("fp8jax.modules.report").explain
    raise AttributeError(f"module 'fp8jax' has no attribute {name!r}")
