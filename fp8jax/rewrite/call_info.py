"""What is known of a program from who calls it, and the paths by which rules know its parameters."""

import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

# What layers of all frameworks call their matrix or vector, and what wraps it.
_PARAM_NAMES = (
    "kernel",
    "w",
    "weight",
    "weights",
    "embedding",
    "scale",
    "bias",
    "b",
    "offset",
    "gamma",
    "beta",
    "value",
)
# What stands between a model's own lines and JAX. Libraries of models, such as Levanter, are not among these.
_LIBRARIES = (
    *("jax", "jaxlib", "flax", "haiku", "equinox", "haliax", "jaxtyping", "beartype", "typeguard", "optax", "chex"),
    *("einops", "numpy", "fp8jax"),
)


@functools.lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Whether a source file is Python's own, or of a library that models are written with.

    Args:
        file: its path, as a frame has it.
    """
    if file.startswith(("<frozen", "<@beartype")):
        return True
    packages = (getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES)
    if file.startswith(tuple(os.path.dirname(package) + os.sep for package in packages if package)):
        return True
    installed = any(f"{os.sep}{name}{os.sep}" in file for name in ("site-packages", "dist-packages"))
    return not installed and file.startswith(sysconfig.get_path("stdlib") + os.sep)


def user_stacklevel(num_frames: int = 1) -> int:
    """The `stacklevel` of a warning that names the nearest line that is of no library.

    Args:
        num_frames: how many calls the function that warns is away from this one.
    """
    frame, level = sys._getframe(num_frames), 1
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


class CallInfo(NamedTuple):
    """What is known of a program from who calls it.

    Attributes:
        num_results: how many of the outputs, the first ones, are what the function returns; the rest is its state. None
            for all.
        argument_indices: the inputs that are arguments of the function; None for all that are data.
        is_module_method: whether it is a method of a module, which has parameters for other methods, too, and is itself
            a layer if it has a "kernel".
        resolve_paths: gives for the path of a parameter that of its layer, and others that rules may match. None for
            the path without what layers call their parameter.
        adapter_paths: the paths of inputs that are adapters' arrays and no parameters, by their numbers.
        requires_product: there is to be a product that a recipe could take.
        checks_rules: each rule is to match something.
    """

    num_results: int | None = None
    argument_indices: Collection[int] | None = None
    is_module_method: bool = False
    resolve_paths: Callable[[str], tuple[str, ...]] | None = None
    adapter_paths: Mapping[int, str] = MappingProxyType({})
    requires_product: bool = True
    checks_rules: bool = True

    def layer_paths(self, path: str) -> tuple[str, ...]:
        """For the path of a parameter that of its layer, and others that rules may match."""
        return (layer_path(path, self.is_module_method),) if self.resolve_paths is None else self.resolve_paths(path)


def layer_path(path: str, is_module_method: bool = False) -> str:
    """The path that rules match: of a layer, without what it calls its parameter; of a whole model that is one, ""."""
    steps = path.split("/")
    if steps[-1] == "value" and steps[-2:-1] and steps[-2] in _PARAM_NAMES:  # in a box with metadata
        steps.pop()
    if steps[-1] in _PARAM_NAMES and (is_module_method or len(steps) > 1):
        steps.pop()
    return "/".join(steps)
