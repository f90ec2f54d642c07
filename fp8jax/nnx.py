"""Flax NNX: quantization of existing models, with LoRA and training steps for them."""

from fp8jax.flax_optimizers import Optimizer as Optimizer
from fp8jax.flax_optimizers import end_nnx_step as _end_step
from fp8jax.modules.functional import FrozenParam as FrozenParam
from fp8jax.modules.functional import telemetry as telemetry
from fp8jax.modules.lora_nnx import adapters as adapters
from fp8jax.modules.lora_nnx import lora as lora
from fp8jax.modules.lora_nnx import merge_lora as merge_lora
from fp8jax.modules.nnx import quantize as quantize
from fp8jax.modules.nnx import suggest as suggest
from fp8jax.modules.nnx import unquantize as unquantize
from fp8jax.modules.scaled import GradientStatistic as GradientStatistic
from fp8jax.modules.scaled import QuantizedWeightVariable as QuantizedWeightVariable
from fp8jax.modules.scaled import ScalingVariable as ScalingVariable
from fp8jax.modules.scaled import advance_scaling as advance_scaling
from fp8jax.modules.scaled import grad as grad
from fp8jax.modules.scaled import reset_weight_amax_bounds as reset_weight_amax_bounds
from fp8jax.modules.scaled import update_weight_amax_bounds as update_weight_amax_bounds
from fp8jax.modules.scaled import value_and_grad as value_and_grad
from fp8jax.modules.weights import quantize_weights as quantize_weights

end_step = _end_step


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
