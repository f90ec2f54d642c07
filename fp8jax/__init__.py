"""fp8jax: training large JAX models in 8 bits."""

import importlib as _importlib
import importlib.util as _util
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from fp8jax import checkpoint_policies, dist, lora, recipes
from fp8jax.core import flax_state as _flax_state
from fp8jax.core import formats
from fp8jax.core.qtensor import QTensor, quantize
from fp8jax.core.recipe import Recipe
from fp8jax.core.spec import QuantSpec
from fp8jax.from_recipe import optimizer
from fp8jax.ops.autodiff.checkpointing import CHECKPOINT_NAMES, save_quantized
from fp8jax.ops.dispatch.choice import MissingKernelsWarning
from fp8jax.ops.losses.cross_entropy import linear_cross_entropy
from fp8jax.ops.nonlinear.activation import activation, glu
from fp8jax.ops.nonlinear.norm import layer_norm, rms_norm
from fp8jax.ops.nonlinear.transformer import attention_output, glu_linear, norm_linear
from fp8jax.ops.products.linear import (
    dot_general,
    einsum,
    init_scaling,
    linear,
    scaled_linear,
    update_scaling,
    weight_scale,
)
from fp8jax.ops.products.ragged import ragged_dot, scaled_ragged_dot
from fp8jax.ops.products.weights import FrozenWeight, QuantizedWeight, freeze, quantize_weight
from fp8jax.optim.bad_steps import get_bad_steps, skip_bad_steps
from fp8jax.optim.clipping import clip_by_global_norm, with_clipping
from fp8jax.optim.compress_state import compress_state
from fp8jax.optim.compressed_adamw import compressed_adamw, scale_by_compressed_adam
from fp8jax.optim.convert_state import convert_state
from fp8jax.optim.fp8lm_adamw import fp8lm_adamw, params_from_master
from fp8jax.optim.fused_backward import (
    FusedBlockState,
    compute_grad_norm,
    fused_backward,
    grad_norm_from_states,
    value_and_step,
)
from fp8jax.optim.master_weights import master_weights, split_master_weights
from fp8jax.optim.moments import state_bytes
from fp8jax.optim.weight_bounds import (
    get_weight_amax_bounds,
    max_adam_step,
    reset_weight_amax_bounds,
    track_weight_amax,
    with_weight_bounds,
)
from fp8jax.rewrite.rules import GroupedProduct, Rule
from fp8jax.rewrite.suggestion import Suggestion, suggest
from fp8jax.rewrite.telemetry import Fault, find_faults, telemetry
from fp8jax.rewrite.transform import filter_transform, transform
from fp8jax.rewrite.unplanned import UnquantizedWarning

if _TYPE_CHECKING:
    from fp8jax import linen as linen
    from fp8jax import nnx as nnx
    from fp8jax.modules.explain import explain as explain

__version__ = "0.2.0"  # pyproject.toml reads it from here

__all__ = [
    "CHECKPOINT_NAMES",
    "Fault",
    "FrozenWeight",
    "FusedBlockState",
    "GroupedProduct",
    "MissingKernelsWarning",
    "QTensor",
    "QuantSpec",
    "QuantizedWeight",
    "Recipe",
    "Rule",
    "Suggestion",
    "UnquantizedWarning",
    "activation",
    "attention_output",
    "checkpoint_policies",
    "clip_by_global_norm",
    "compress_state",
    "compressed_adamw",
    "compute_grad_norm",
    "convert_state",
    "dist",
    "dot_general",
    "einsum",
    "filter_transform",
    "find_faults",
    "formats",
    "fp8lm_adamw",
    "freeze",
    "fused_backward",
    "get_bad_steps",
    "get_weight_amax_bounds",
    "glu",
    "glu_linear",
    "grad_norm_from_states",
    "init_scaling",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "lora",
    "master_weights",
    "max_adam_step",
    "norm_linear",
    "optimizer",
    "params_from_master",
    "quantize",
    "quantize_weight",
    "ragged_dot",
    "recipes",
    "reset_weight_amax_bounds",
    "rms_norm",
    "save_quantized",
    "scale_by_compressed_adam",
    "scaled_linear",
    "scaled_ragged_dot",
    "skip_bad_steps",
    "split_master_weights",
    "state_bytes",
    "suggest",
    "telemetry",
    "track_weight_amax",
    "transform",
    "update_scaling",
    "value_and_step",
    "weight_scale",
    "with_clipping",
    "with_weight_bounds",
]
_NEED_FLAX = {"nnx": "fp8jax.nnx", "linen": "fp8jax.linen", "explain": "fp8jax.modules.explain"}
if _util.find_spec("flax") is not None:
    __all__ += ["explain", "linen", "nnx"]

_flax_state.install()


def __dir__() -> list[str]:
    """The public names, with those that need Flax; other modules, such as `fp8jax.core`, are internal."""
    return sorted({*__all__, *_NEED_FLAX, *(name for name in globals() if name.startswith("__"))})


if not _TYPE_CHECKING:

    def __getattr__(name: str) -> _Any:
        if name not in _NEED_FLAX:
            raise AttributeError(f"module 'fp8jax' has no attribute {name!r}")
        try:
            module = _importlib.import_module(_NEED_FLAX[name])
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "flax":
                raise
            raise ModuleNotFoundError(f"fp8jax.{name} needs Flax: pip install flax", name="flax") from None
        return module.explain if name == "explain" else module
