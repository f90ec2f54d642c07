"""Facts about a traced call from its caller, and the parameter paths that rules match."""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

# Usual names of a layer's matrix or vector, and of a box around it.
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


class CallInfo(NamedTuple):
    """Facts about a traced call that only its caller has.

    Attributes:
        num_results: the number of leading outputs that the function returns; the others are its state. None: all
            outputs.
        argument_indices: the inputs that are arguments of the function; None: all data inputs.
        is_module_method: whether it is a module's method. The module may be a layer itself, with a "kernel", and other
            methods may read its other parameters.
        resolve_paths: maps a parameter's path to its layer's path and the aliases that rules may match. None: the path
            without its last step, if that is a usual name of a parameter.
        adapter_paths: input indices of LoRA factors, which are not parameters, with their paths.
        requires_product: whether planning raises if no matmul can be quantized.
        checks_rules: whether planning raises if a rule matches nothing.
        state_axes: the leading axes of the scaling state or the codes that the caller stores for a parameter, by the
            parameter's path. None: the caller stores what the plan asks for.
    """

    num_results: int | None = None
    argument_indices: Collection[int] | None = None
    is_module_method: bool = False
    resolve_paths: Callable[[str], tuple[str, ...]] | None = None
    adapter_paths: Mapping[int, str] = MappingProxyType({})
    requires_product: bool = True
    checks_rules: bool = True
    state_axes: Mapping[str, tuple[int, ...]] | None = None

    def layer_paths(self, path: str) -> tuple[str, ...]:
        """The layer's path for a parameter's path, and the aliases that rules may match."""
        return (layer_path(path, self.is_module_method),) if self.resolve_paths is None else self.resolve_paths(path)


def layer_path(path: str, is_module_method: bool = False) -> str:
    """The path that rules match: a parameter's path without its own name; "" for a model that is one layer."""
    steps = path.split("/")
    if steps[-1] == "value" and steps[-2:-1] and steps[-2] in _PARAM_NAMES:  # a box with metadata
        steps.pop()
    if steps[-1] in _PARAM_NAMES and (is_module_method or len(steps) > 1):
        steps.pop()
    return "/".join(steps)
