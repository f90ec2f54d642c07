"""The nearest line of a user's code, for messages."""

import functools
import os
import sys
import sysconfig
import warnings

# Libraries whose frames are skipped in messages. Libraries of models, such as Levanter, are not in this list.
_LIBRARIES = (
    *("jax", "jaxlib", "flax", "haiku", "equinox", "haliax", "jaxtyping", "beartype", "typeguard", "optax", "chex"),
    *("einops", "numpy", "fp8jax"),
)


@functools.lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Whether a frame's source file belongs to Python itself or to a library that models are written with."""
    if file.startswith(("<frozen", "<@beartype")):
        return True
    packages = (getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES)
    if file.startswith(tuple(os.path.dirname(package) + os.sep for package in packages if package)):
        return True
    installed = any(f"{os.sep}{name}{os.sep}" in file for name in ("site-packages", "dist-packages"))
    return not installed and file.startswith(sysconfig.get_path("stdlib") + os.sep)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issues a warning at the nearest line outside of libraries."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
