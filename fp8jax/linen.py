"""Flax Linen: quantization of existing models, with layers and training steps for them."""

from fp8jax.flax_optimizers import TrainState as TrainState
from fp8jax.flax_optimizers import end_linen_step as _end_step
from fp8jax.modules.linen import make_dot_general_cls as make_dot_general_cls
from fp8jax.modules.linen import quantize as quantize
from fp8jax.modules.linen import unquantize as unquantize
from fp8jax.modules.scaled_linen import advance_scaling as advance_scaling
from fp8jax.modules.scaled_linen import reset_weight_amax_bounds as reset_weight_amax_bounds
from fp8jax.modules.scaled_linen import update_weight_amax_bounds as update_weight_amax_bounds

end_step = _end_step


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
