"""fp8jax: training large JAX models in 8 bits."""

import importlib as _importlib
import importlib.util as _util
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from fp8jax import checkpoint_policies as checkpoint_policies
from fp8jax import dist as dist
from fp8jax import lora as lora
from fp8jax import recipes as recipes
from fp8jax.core import flax_state as _flax_state
from fp8jax.core import formats as formats
from fp8jax.core.qtensor import QTensor as QTensor
from fp8jax.core.qtensor import quantize as quantize
from fp8jax.core.recipe import Recipe as Recipe
from fp8jax.core.spec import QuantSpec as QuantSpec
from fp8jax.from_recipe import optimizer as optimizer
from fp8jax.ops.autodiff.checkpointing import CHECKPOINT_NAMES as CHECKPOINT_NAMES
from fp8jax.ops.autodiff.checkpointing import save_quantized as save_quantized
from fp8jax.ops.dispatch.choice import MissingKernelsWarning as MissingKernelsWarning
from fp8jax.ops.losses.cross_entropy import linear_cross_entropy as linear_cross_entropy
from fp8jax.ops.nonlinear.activation import activation as activation
from fp8jax.ops.nonlinear.activation import glu as glu
from fp8jax.ops.nonlinear.norm import layer_norm as layer_norm
from fp8jax.ops.nonlinear.norm import rms_norm as rms_norm
from fp8jax.ops.nonlinear.transformer import attention_output as attention_output
from fp8jax.ops.nonlinear.transformer import glu_linear as glu_linear
from fp8jax.ops.nonlinear.transformer import norm_linear as norm_linear
from fp8jax.ops.products.linear import dot_general as dot_general
from fp8jax.ops.products.linear import einsum as einsum
from fp8jax.ops.products.linear import init_scaling as init_scaling
from fp8jax.ops.products.linear import linear as linear
from fp8jax.ops.products.linear import scaled_linear as scaled_linear
from fp8jax.ops.products.linear import update_scaling as update_scaling
from fp8jax.ops.products.linear import weight_scale as weight_scale
from fp8jax.ops.products.ragged import ragged_dot as ragged_dot
from fp8jax.ops.products.ragged import scaled_ragged_dot as scaled_ragged_dot
from fp8jax.ops.products.weights import FrozenWeight as FrozenWeight
from fp8jax.ops.products.weights import QuantizedWeight as QuantizedWeight
from fp8jax.ops.products.weights import freeze as freeze
from fp8jax.ops.products.weights import quantize_weight as quantize_weight
from fp8jax.optim.bad_steps import get_bad_steps as get_bad_steps
from fp8jax.optim.bad_steps import skip_bad_steps as skip_bad_steps
from fp8jax.optim.clipping import clip_by_global_norm as clip_by_global_norm
from fp8jax.optim.clipping import with_clipping as with_clipping
from fp8jax.optim.compress_state import compress_state as compress_state
from fp8jax.optim.compressed_adamw import compressed_adamw as compressed_adamw
from fp8jax.optim.compressed_adamw import scale_by_compressed_adam as scale_by_compressed_adam
from fp8jax.optim.convert_state import convert_state as convert_state
from fp8jax.optim.fp8lm_adamw import fp8lm_adamw as fp8lm_adamw
from fp8jax.optim.fp8lm_adamw import params_from_master as params_from_master
from fp8jax.optim.fused_backward import FusedBlockState as FusedBlockState
from fp8jax.optim.fused_backward import compute_grad_norm as compute_grad_norm
from fp8jax.optim.fused_backward import fused_backward as fused_backward
from fp8jax.optim.fused_backward import grad_norm_from_states as grad_norm_from_states
from fp8jax.optim.fused_backward import value_and_step as value_and_step
from fp8jax.optim.master_weights import master_weights as master_weights
from fp8jax.optim.master_weights import split_master_weights as split_master_weights
from fp8jax.optim.moments import state_bytes as state_bytes
from fp8jax.optim.weight_bounds import get_weight_amax_bounds as get_weight_amax_bounds
from fp8jax.optim.weight_bounds import max_adam_step as max_adam_step
from fp8jax.optim.weight_bounds import reset_weight_amax_bounds as reset_weight_amax_bounds
from fp8jax.optim.weight_bounds import track_weight_amax as track_weight_amax
from fp8jax.optim.weight_bounds import with_weight_bounds as with_weight_bounds
from fp8jax.rewrite.rules import GroupedProduct as GroupedProduct
from fp8jax.rewrite.rules import Rule as Rule
from fp8jax.rewrite.suggestion import Suggestion as Suggestion
from fp8jax.rewrite.suggestion import suggest as suggest
from fp8jax.rewrite.telemetry import Fault as Fault
from fp8jax.rewrite.telemetry import find_faults as find_faults
from fp8jax.rewrite.telemetry import telemetry as telemetry
from fp8jax.rewrite.transform import filter_transform as filter_transform
from fp8jax.rewrite.transform import transform as transform
from fp8jax.rewrite.unplanned import UnquantizedWarning as UnquantizedWarning

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
