"""LoRA in quantized NNX models: frozen parameters with trained adapters."""

import re
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fp8jax.core.spec import QuantSpec
from fp8jax.modules import functional
from fp8jax.modules.calls import wrong_model_message
from fp8jax.modules.functional import FrozenParam, collect_adapters
from fp8jax.modules.nnx import LAYERS, get_layer_names, get_modules, get_owner, get_params, get_settings, select_params
from fp8jax.ops.products.lora import Adapter, init_adapter, matrix_shape, merge_adapter
from fp8jax.ops.products.weights import FrozenWeight, freeze
from fp8jax.rewrite.states import observed_operands

Model = TypeVar("Model", bound=nnx.Module)
# Sharding metadata, which does not fit transposed codes.
_SHARDING_METADATA = ("sharding", "sharding_names", "sharding_rules", "out_sharding", "mesh")


def lora(
    model: Model,
    *,
    rank: int,
    alpha: float,
    targets: str = ".*",
    base: QuantSpec | str | None = "e4m3",
    dtype: DTypeLike = jnp.bfloat16,
    rngs: nnx.Rngs | jax.Array,
) -> Model:
    """Returns a copy of a quantized model with frozen parameters and with adapters for the layers that have a recipe.

        model = fp8jax.nnx.lora(fp8jax.nnx.quantize(model, "te_current"), rank=16, alpha=32, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.LoRAParam)
        grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, batch)

    Parameters become `FrozenParam`s, so gradients and optimizer states of `nnx.Param` and `nnx.LoRAParam` contain only
    adapters. Weights of layers with a recipe are stored as 8-bit codes and multiplied as in `fp8jax.lora.linear`. The
    recipe "bf16" decodes them for 16-bit matmuls. The adapters of a parameter NAME are `nnx.LoRAParam`s in its module,
    `NAME_adapter_a` and `NAME_adapter_b`. Save `nnx.state(model)` as usual, or `fp8jax.nnx.adapters(model)`.

    Args:
        model: a model that `quantize` returned, with current scaling; it is not changed.
        rank, alpha: for all adapters; alpha / rank times the product of both factors is added to a weight.
        targets: regular expression for the paths of layers that get an adapter, as in rules.
        base: the format of frozen weights, as in `fp8jax.freeze`; None keeps their dtype.
        dtype: the dtype of adapters.
        rngs: `nnx.Rngs` or a key, for the initial adapters.

    Raises:
        TypeError: the model is not an NNX module.
        ValueError: it is not quantized, or already has adapters. No layer has a recipe, or a recipe has a scaling that
            keeps states. `targets` match no layer. Or as in `fp8jax.freeze` and `fp8jax.lora.init_adapter`.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(wrong_model_message("fp8jax.nnx.lora expects an NNX module", model))
    settings = get_settings(model)
    if settings is None:
        raise ValueError(
            "the model is not quantized; call fp8jax.nnx.quantize first. For products in 16 bits, use "
            "fp8jax.nnx.quantize(model, 'bf16')"
        )
    adapted_model = nnx.clone(model)
    found_modules = get_modules(adapted_model)
    if any(isinstance(v, FrozenParam) for m in found_modules.values() for v in get_params(m).values()):
        raise ValueError("the model already has adapters; merge them with fp8jax.nnx.merge_lora")
    selected = select_params(found_modules, settings.rules)
    if not selected:
        raise ValueError(
            "no layer of the model has a recipe, and only layers with a recipe can have adapters. For products in 16 "
            "bits, use fp8jax.nnx.quantize(model, 'bf16')"
        )
    for path, (_, _, linear) in selected.items():
        if observed_operands(linear):
            raise ValueError(f"{path} has {linear.scaling} scaling, which keeps a state; use a recipe without a state")
    layer_names = {path: get_layer_names(selected, path) for path in selected}
    matching_paths = {
        path
        for path, names_of_layer in layer_names.items()
        if any(re.fullmatch(targets, name) for name in names_of_layer)
    }
    if not matching_paths:
        raise ValueError(
            f"targets {targets!r} match none of the layers {', '.join(sorted(x[0] for x in layer_names.values()))}"
        )
    key = rngs.params() if isinstance(rngs, nnx.Rngs) else rngs
    for i, (path, (holder, name, _)) in enumerate(sorted(selected.items())):
        module, variable = found_modules[holder], get_params(found_modules[holder])[name]
        axes = functional.count_kernel_axes(module) if isinstance(module, LAYERS[:2]) and name == "kernel" else (1, 1)
        value = variable.get_value()
        if path in matching_paths:
            shape = matrix_shape(value, axes)
            adapter = init_adapter(jax.random.fold_in(key, i), shape, rank, alpha, dtype)
            owner, param_name = get_owner(found_modules, holder, name)
            for factor in ("a", "b"):
                lora_param = nnx.LoRAParam(getattr(adapter, factor), of=param_name, alpha=adapter.alpha, factor=factor)
                setattr(owner, f"{param_name.replace('/', '_')}_adapter_{factor}", lora_param)
        if base is not None:
            value = jax.jit(freeze, static_argnums=(1, 2))(value, QuantSpec.parse(base), axes)
        _replace_param(module, name, _freeze_param(variable, value))
    for module in found_modules.values():
        for name, variable in list(get_params(module).items()):
            if not isinstance(variable, (FrozenParam, nnx.LoRAParam)):
                _replace_param(module, name, _freeze_param(variable, variable.get_value()))
    return adapted_model


def _freeze_param(variable: Any, value: Any) -> FrozenParam:
    metadata = dict(variable.get_metadata())
    sharding_metadata = (
        {k: metadata.pop(k) for k in _SHARDING_METADATA if k in metadata} if isinstance(value, FrozenWeight) else {}
    )
    return FrozenParam(value, written=type(variable), places=tuple(sharding_metadata.items()), **metadata)


def _replace_param(module: Any, name: str, variable: Any) -> None:
    """Put another variable in place of a module's parameter, in a container or not."""
    if isinstance(module, nnx.List):
        module[int(name)] = variable
        return
    first, *steps = name.split("/")
    if not steps:
        setattr(module, first, variable)
        return
    container = getattr(module, first)
    for step in steps[:-1]:
        container = container[step if isinstance(container, dict) else int(step)]
    container[steps[-1] if isinstance(container, dict) else int(steps[-1])] = variable


def adapters(model: nnx.Module) -> dict[str, Adapter]:
    """The adapters of a model, by the paths of their parameters: "layers/attention/q/kernel".

    Raises:
        ValueError: it has none.
    """
    adapters_by_path = {
        "/".join(filter(None, (path, name))): adapter
        for path, module in get_modules(model).items()
        for name, adapter in collect_adapters(vars(module)).items()
    }
    if not adapters_by_path:
        raise ValueError("the model has no adapters; add them with fp8jax.nnx.lora")
    return adapters_by_path


def merge_lora(model: Model, dtype: DTypeLike | None = None) -> Model:
    """Returns a quantized model with trainable parameters, with the adapters added to them.

    Args:
        model: a model that `lora` returned; it is not changed.
        dtype: the dtype of parameters that were frozen or adapted; None for their original one.

    Raises:
        ValueError: it has no adapters.
    """
    adapters_by_path = adapters(model)
    merged = nnx.clone(model)
    for holder, module in get_modules(merged).items():
        for name, variable in list(get_params(module).items()):
            if isinstance(variable, FrozenParam):
                path = "/".join(filter(None, (holder, name)))
                _replace_param(module, name, _unfreeze_param(variable, adapters_by_path.get(path), dtype))
        for name, value in list(vars(module).items()):
            if isinstance(value, nnx.LoRAParam) and "of" in value.get_metadata():
                delattr(module, name)
    return merged


def _unfreeze_param(variable: Any, adapter: Adapter | None, dtype: DTypeLike | None) -> Any:
    value, metadata = variable.get_raw_value(), dict(variable.get_metadata())
    param_class, sharding_metadata = metadata.pop("written"), dict(metadata.pop("places"))
    target_dtype = value.dtype if dtype is None else dtype
    if adapter is not None:
        value = merge_adapter(value, adapter, target_dtype)
    elif isinstance(value, FrozenWeight):
        value = value.dequantize(target_dtype)
    return param_class(value, **metadata, **sharding_metadata)
