"""Whether Triton kernels run on the GPU that programs are traced for, what runs without, and the warning of it.

Without them XLA makes all codes. Two parts of a recipe are then slower than what they replace:

- Contexts in 8 bits (`Recipe.context`). Each costs a pass of its own to quantize and another one to decode. In models
  norms and activations are therefore left as written: their inputs stay in the model's dtype, and layers quantize what
  they read (`keeps_nonlinear_unchanged`). `fp8jax.rms_norm`, `glu` and their siblings keep what their recipe says.
- Optimizer states in 8 bits (`Recipe.optimizer`). They stay in 8 bits, which users ask for to save memory.

All else is the same with and without kernels: scales per tensor take cuBLASLt's FP8 product, and XLA makes the codes.
"""

import sys
import warnings

from fp8jax.ops.dispatch.choice import TRITON_CAPABILITY, capability, current_target, missing_triton, on_cuda

# The bounds of pyproject.toml, where a comment says why Python 3.11 needs another Triton.
REQUIREMENTS = ("jax-triton>=0.3.1,<0.5", *(["triton>=3.6,<3.7"] if sys.version_info < (3, 12) else []))
_LIBRARY_PACKAGES = ("fp8jax", "jax", "jaxlib", "flax", "optax", "equinox", "contextlib", "functools")


class MissingKernelsWarning(UserWarning):
    """No Triton kernel of fp8jax runs on this GPU: XLA takes their place, which is slower."""


def missing_kernels_reason() -> str | None:
    """Why no Triton kernel runs in programs that are traced here; None where kernels run, or for other devices.

    Raises:
        ValueError: the environment variable FP8JAX_KERNEL_CALLS has an unknown value.
    """
    return missing_triton("dispatch.call_triton", fp8=False) if on_cuda() else None


def keeps_nonlinear_unchanged() -> bool:
    """Whether models' norms and activations are left as written, whatever the context of their recipe."""
    return missing_kernels_reason() is not None


def advice() -> str | None:
    """A text: why no kernels run here, and the line to type; None if they run or are switched off."""
    if not current_target().kernels or (reason := missing_kernels_reason()) is None:
        return None
    packages = " ".join(f'"{requirement}"' for requirement in REQUIREMENTS)
    # No package helps a GPU that is too old.
    remedy = f". Type: pip install {packages}" if capability() >= TRITON_CAPABILITY else ""
    return (
        f"no Triton kernel of fp8jax runs on this GPU, because {reason}. Steps may take longer than in bf16: XLA makes "
        f"all codes, norms and activations stay as the model has them, and 8-bit optimizer states cost time{remedy}"
    )


def warn_if_missing() -> None:
    """Warns, at the caller's line outside of libraries, if no kernel runs on an NVIDIA GPU."""
    if (message := advice()) is None or capability() == 0:
        return
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARY_PACKAGES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, MissingKernelsWarning, stacklevel=level)
