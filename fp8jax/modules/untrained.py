"""Variables of NNX models that stand in the place of parameters and are not trained."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from fp8jax.ops.lora import AdaptedWeight, Adapter


class UntrainedVariable(nnx.Variable):
    """A parameter that is not trained: an array, or an `fp8jax.FrozenWeight`. `written` is its class as a parameter."""


def adapters_of(held: Mapping[str, Any]) -> dict[str, Adapter]:
    """The adapters among a module's variables, by the name of the parameter in it."""
    factors: dict[str, dict[str, Any]] = {}
    for variable in held.values():
        metadata = variable.get_metadata() if isinstance(variable, nnx.LoRAParam) else {}
        if "of" in metadata and "factor" in metadata:
            factors.setdefault(metadata["of"], {})[metadata["factor"]] = variable
    return {
        name: Adapter(both["a"].get_raw_value(), both["b"].get_raw_value(), both["a"].alpha)
        for name, both in factors.items()
        if len(both) == 2
    }


def with_adapters(paths: Any, variables: Any, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a call with adapters beside those that have one.

    Args:
        paths, variables: the leaves of the call. params: by path.
    """
    modules: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path, variable in zip(paths, variables, strict=True):
        if isinstance(variable, nnx.LoRAParam) and path[0] == 0:
            modules.setdefault(tuple(path[1:-1]), {})[str(path[-1])] = variable
    found = dict(params)
    for place, held in modules.items():
        for name, adapter in adapters_of(held).items():
            path = "/".join(map(str, (*place, name)))
            found[path] = AdaptedWeight(params[path], adapter)
    return found


def as_written(module: Any) -> Callable[[], None]:
    """Gives variables that are not trained the classes that they had as parameters, until what it returns is called."""
    changed = {id(v): v for _, v in nnx.iter_graph(module) if isinstance(v, UntrainedVariable)}.values()
    for variable in changed:
        object.__setattr__(variable, "__class__", variable.get_metadata()["written"])

    def back() -> None:
        for variable in changed:
            object.__setattr__(variable, "__class__", UntrainedVariable)

    return back
