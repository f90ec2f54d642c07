"""Whether Triton kernels run on the target GPU, what runs without them, and the warning.

Without kernels XLA quantizes. Two parts of a recipe are then slower than 16 bits:

- 8-bit contexts (`Recipe.context`) cost a pass to quantize and one to decode. Norms and activations of models therefore
  stay as written, and layers quantize their inputs (`keeps_nonlinear_unchanged`). `fp8jax.rms_norm`, `glu` and the like
  follow the recipe.
- 8-bit optimizer states (`Recipe.optimizer`) stay in 8 bits, because they save memory.

The rest is equally fast: products with scales per tensor use cuBLASLt.
"""

import sys
import warnings

from fp8jax.ops.dispatch.choice import TRITON_CAPABILITY, capability, current_target, missing_triton, on_cuda

# The bounds of pyproject.toml, which explains why Python 3.11 needs another Triton.
REQUIREMENTS = ("jax-triton>=0.3.1,<0.5", *(["triton>=3.6,<3.7"] if sys.version_info < (3, 12) else []))
_LIBRARY_PACKAGES = ("fp8jax", "jax", "jaxlib", "flax", "optax", "equinox", "contextlib", "functools")


class MissingKernelsWarning(UserWarning):
    """Warns that no Triton kernel of fp8jax runs on this GPU, so XLA is used, which is slower."""


def missing_kernels_reason() -> str | None:
    """Return why Triton kernels cannot run in programs traced here, or None if they can or the device needs none.

    Raises:
        ValueError: the environment variable FP8JAX_KERNEL_CALLS has an unknown value.
    """
    return missing_triton("dispatch.call_triton", fp8=False) if on_cuda() else None


def keeps_nonlinear_unchanged() -> bool:
    """Return whether norms and activations of models stay as written, under any context."""
    return missing_kernels_reason() is not None


def missing_kernels_advice() -> str | None:
    """Return why no kernels run here and the command to install them, or None if they run or are disabled."""
    if not current_target().kernels or (reason := missing_kernels_reason()) is None:
        return None
    packages = " ".join(f'"{requirement}"' for requirement in REQUIREMENTS)
    # Packages do not help if the GPU is too old.
    remedy = f". Type: pip install {packages}" if capability() >= TRITON_CAPABILITY else ""
    return (
        f"no Triton kernel of fp8jax runs on this GPU, because {reason}. Steps may take longer than in bf16: XLA makes "
        f"all codes, norms and activations stay as the model has them, and 8-bit optimizer states cost time{remedy}"
    )


def warn_if_kernels_missing() -> None:
    """Warn, at the caller's line outside of libraries, if no kernel runs on an NVIDIA GPU."""
    if (message := missing_kernels_advice()) is None or capability() == 0:
        return
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARY_PACKAGES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, MissingKernelsWarning, stacklevel=level)
