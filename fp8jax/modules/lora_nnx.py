"""LoRA in quantized NNX models: parameters become variables that are not trained, with adapters beside them."""

import re
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fp8jax.core.spec import QuantSpec
from fp8jax.modules import functional
from fp8jax.modules.matrices import not_a_model
from fp8jax.modules.nnx import LAYERS, beside, chosen, modules, names, params, settings_of
from fp8jax.modules.untrained import UntrainedVariable, adapters_of
from fp8jax.ops.frozen import FrozenWeight, freeze
from fp8jax.ops.lora import Adapter, init_adapter, matrix_shape, merge_adapter

Model = TypeVar("Model", bound=nnx.Module)
# Metadata that says how an array lies on a mesh, which codes, transposed, do not.
_PLACES = ("sharding", "sharding_names", "sharding_rules", "out_sharding", "mesh")


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
    """A copy of a quantized model whose parameters are not trained, with adapters beside layers that follow a recipe.

        model = fp8jax.nnx.lora(fp8jax.nnx.quantize(model, "te_current"), rank=16, alpha=32, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.LoRAParam)
        grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, batch)

    Parameters become `UntrainedVariable`s: gradients and optimizer states of `nnx.Param` and of `nnx.LoRAParam` are
    those of adapters. The weights of layers that follow a recipe are held as codes, a byte each, and multiplied by
    them as `fp8jax.lora.linear` does it; the recipe "bf16" decodes them for products in 16 bits. Adapters are
    `nnx.LoRAParam`s `NAME_adapter_a` and `NAME_adapter_b` of the module that holds the parameter NAME. Save
    `nnx.state(model)` as any, or `fp8jax.nnx.adapters(model)`.

    Args:
        model: what `quantize` returned, with current scaling; it is not changed.
        rank, alpha: of all adapters: alpha / rank times the product of both factors is added to a weight.
        targets: regular expression of the paths of layers that have an adapter, as rules match them.
        base: what weights are frozen in, as of `fp8jax.freeze`; None keeps their dtype.
        dtype: of adapters.
        rngs: of the adapters' first values: `nnx.Rngs`, or a key.

    Raises:
        TypeError: the model is no NNX module.
        ValueError: it is not quantized or has adapters already; no layer follows a recipe, or one with a scaling that
            keeps states; `targets` match no layer; or as `fp8jax.freeze` and `fp8jax.lora.init_adapter`.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(not_a_model("fp8jax.nnx.lora takes an NNX module", model))
    settings = settings_of(model)
    if settings is None:
        raise ValueError(
            "the model is not quantized: give fp8jax.nnx.lora what fp8jax.nnx.quantize returns; for products in 16 "
            "bits, fp8jax.nnx.quantize(model, 'bf16')"
        )
    adapted = nnx.clone(model)
    found = modules(adapted)
    if any(isinstance(v, UntrainedVariable) for m in found.values() for v in params(m).values()):
        raise ValueError("the model has adapters already; merge them with fp8jax.nnx.merge_lora")
    taken = chosen(found, settings.rules)
    if not taken:
        raise ValueError(
            "no layer of the model follows a recipe, and adapters stand beside those that do; for products in 16 bits, "
            "fp8jax.nnx.quantize(model, 'bf16')"
        )
    for path, (_, _, linear) in taken.items():
        if linear.states and any(scaling.observes for scaling in linear.states.values()):
            raise ValueError(f"{path} has {linear.scaling} scaling, which keeps a state: take a recipe without")
    layers = {path: names(taken, path) for path in taken}
    matching = {path for path, each in layers.items() if any(re.fullmatch(targets, name) for name in each)}
    if not matching:
        raise ValueError(
            f"targets {targets!r} match none of the layers {', '.join(sorted(x[0] for x in layers.values()))}"
        )
    key = rngs.params() if isinstance(rngs, nnx.Rngs) else rngs
    for i, (path, (holder, name, _)) in enumerate(sorted(taken.items())):
        module, variable = found[holder], params(found[holder])[name]
        axes = functional.kernel_axes(module) if isinstance(module, LAYERS[:2]) and name == "kernel" else (1, 1)
        value = variable.get_value()
        if path in matching:
            shape = matrix_shape(value, axes)
            adapter = init_adapter(jax.random.fold_in(key, i), shape, rank, alpha, dtype)
            own, of = beside(found, holder, name)
            for factor in ("a", "b"):
                placed = nnx.LoRAParam(getattr(adapter, factor), of=of, alpha=adapter.alpha, factor=factor)
                setattr(own, f"{of.replace('/', '_')}_adapter_{factor}", placed)
        if base is not None:
            value = jax.jit(freeze, static_argnums=(1, 2))(value, QuantSpec.parse(base), axes)
        _exchange(module, name, _untrained(variable, value))
    for module in found.values():
        for name, variable in list(params(module).items()):
            if not isinstance(variable, (UntrainedVariable, nnx.LoRAParam)):
                _exchange(module, name, _untrained(variable, variable.get_value()))
    return adapted


def _untrained(variable: Any, value: Any) -> UntrainedVariable:
    metadata = dict(variable.get_metadata())
    places = {k: metadata.pop(k) for k in _PLACES if k in metadata} if isinstance(value, FrozenWeight) else {}
    return UntrainedVariable(value, written=type(variable), places=tuple(places.items()), **metadata)


def _exchange(module: Any, name: str, variable: Any) -> None:
    """Puts another variable in the place of a parameter of a module, in a container or not."""
    if isinstance(module, nnx.List):
        module[int(name)] = variable
        return
    first, *steps = name.split("/")
    if not steps:
        setattr(module, first, variable)
        return
    held = getattr(module, first)
    for step in steps[:-1]:
        held = held[step if isinstance(held, dict) else int(step)]
    held[steps[-1] if isinstance(held, dict) else int(steps[-1])] = variable


def adapters(model: nnx.Module) -> dict[str, Adapter]:
    """The adapters of a model, by the paths of their parameters: "layers/attention/q/kernel".

    Raises:
        ValueError: it has none.
    """
    found = {
        "/".join(filter(None, (path, name))): adapter
        for path, module in modules(model).items()
        for name, adapter in adapters_of(vars(module)).items()
    }
    if not found:
        raise ValueError("the model has no adapters; fp8jax.nnx.lora adds them")
    return found


def merge_lora(model: Model, dtype: DTypeLike | None = None) -> Model:
    """A quantized model with parameters again, of which those with an adapter have its part added.

    Args:
        model: what `lora` returned; it is not changed.
        dtype: of the parameters that have been frozen or adapted; None for that which they had.

    Raises:
        ValueError: it has no adapters.
    """
    own = adapters(model)
    merged = nnx.clone(model)
    for holder, module in modules(merged).items():
        for name, variable in list(params(module).items()):
            if isinstance(variable, UntrainedVariable):
                path = "/".join(filter(None, (holder, name)))
                _exchange(module, name, _trained(variable, own.get(path), dtype))
        for name, value in list(vars(module).items()):
            if isinstance(value, nnx.LoRAParam) and "of" in value.get_metadata():
                delattr(module, name)
    return merged


def _trained(variable: Any, adapter: Adapter | None, dtype: DTypeLike | None) -> Any:
    value, metadata = variable.get_raw_value(), dict(variable.get_metadata())
    written, places = metadata.pop("written"), dict(metadata.pop("places"))
    wanted = value.dtype if dtype is None else dtype
    if adapter is not None:
        value = merge_adapter(value, adapter, wanted)
    elif isinstance(value, FrozenWeight):
        value = value.dequantize(wanted)
    return written(value, **metadata, **places)
