"""Variables of NNX models that replace parameters and are not trained."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from fp8jax.ops.products.lora import AdaptedWeight, Adapter


class FrozenParam(nnx.Variable):
    """A parameter that is not trained: an array or an `fp8jax.FrozenWeight`. Metadata `written` is its class before."""


def collect_adapters(attributes: Mapping[str, Any]) -> dict[str, Adapter]:
    """The adapters among a module's variables, by the name of the parameter in it."""
    factors: dict[str, dict[str, Any]] = {}
    for variable in attributes.values():
        metadata = variable.get_metadata() if isinstance(variable, nnx.LoRAParam) else {}
        if "of" in metadata and "factor" in metadata:
            factors.setdefault(metadata["of"], {})[metadata["factor"]] = variable
    return {
        name: Adapter(pair["a"].get_raw_value(), pair["b"].get_raw_value(), pair["a"].alpha)
        for name, pair in factors.items()
        if len(pair) == 2
    }


def with_adapters(paths: Any, variables: Any, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a call, by path, each with its adapter.

    Args:
        paths, variables: the leaves of the call.
        params: the parameters, by path.
    """
    modules: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path, variable in zip(paths, variables, strict=True):
        if isinstance(variable, nnx.LoRAParam) and path[0] == 0:
            modules.setdefault(tuple(path[1:-1]), {})[str(path[-1])] = variable
    adapted_params = dict(params)
    for place, lora_params in modules.items():
        for name, adapter in collect_adapters(lora_params).items():
            path = "/".join(map(str, (*place, name)))
            adapted_params[path] = AdaptedWeight(params[path], adapter)
    return adapted_params


def restore_param_classes(module: Any) -> Callable[[], None]:
    """Give frozen parameters the classes that they had before, in place. The returned function undoes it."""
    frozen_params = {id(v): v for _, v in nnx.iter_graph(module) if isinstance(v, FrozenParam)}.values()
    for variable in frozen_params:
        object.__setattr__(variable, "__class__", variable.get_metadata()["written"])

    def undo() -> None:
        for variable in frozen_params:
            object.__setattr__(variable, "__class__", FrozenParam)

    return undo
