"""Weights of NNX models that are quantized once for all microbatches of a step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core.recipe import Linear
from fp8jax.modules.calls import LayerNames, count_stacked_axes, is_matrix
from fp8jax.modules.functional import FrozenParam, count_kernel_axes
from fp8jax.modules.nnx import LAYERS, get_params, get_settings
from fp8jax.modules.scaled import (
    STATE_PREFIX,
    LayerScaling,
    ParameterStateModule,
    WeightVariables,
    get_scalings,
    measure_missing_bounds,
)
from fp8jax.ops.dispatch.sharding import merge
from fp8jax.ops.products.linear import weight_scale
from fp8jax.ops.products.weights import QuantizedWeight, quantize_weight

Model = TypeVar("Model", bound=nnx.Module)

Quantizer = Callable[[str, Array, Linear, Array | None], QuantizedWeight | None]
_GRADIENT_DTYPES = ("bfloat16", "float16", "float32")


def _default_quantizer(path: str, w: Array, linear: Linear, scale: Array | None) -> QuantizedWeight:
    return quantize_weight(w, recipe=linear, scale=scale)


def quantize_weights(
    model: Model, quantizer: Quantizer = _default_quantizer, *, gradient_dtype: DTypeLike | None = None
) -> Model:
    """Returns a copy of a model of `fp8jax.nnx.quantize` with quantized weights stored in its layers.

    Call it inside the training step, before the loop over microbatches. They then share the weights' scales and codes,
    rounded to nearest. Results are bitwise equal to those of the model until the parameters change. The codes and their
    transposed copy need two bytes per parameter while the copy exists. With one batch it saves a pass over the weights
    on several devices and in loops. Both copies are then written in one pass, and the backward pass reads no fp32
    weights. On one GPU outside of loops this is always so.

        prequantized = fp8jax.nnx.quantize_weights(model)
        for batch in microbatches:  # or nnx.scan
            grads = fp8jax.nnx.grad(loss_fn)(prequantized, batch)  # of nnx.Param, whose tree is the model's

    For scalings with a state, the statistics of calls of the copy are stored in the model: end the step with the model.

    If the recipe has all products in 16 bits, as "bf16" has, and there is no `gradient_dtype`, the copy is unchanged.
    Layers `nnx.Einsum`, those with batch axes, and those of recipes that read the weight itself quantize in each call.
    In a class of your own, the weights of experts are quantized: parameters of three axes or more, (..., inputs,
    outputs). The program omits their codes if no product has a matrix for each expert.

    Args:
        model: a quantized model; it is not changed.
        quantizer: called with the path of a layer, its weight (inputs, outputs), its recipe and the scale of its state,
            or None. It returns the quantized weight, or None to leave the layer unchanged. The default is
            `fp8jax.quantize_weight`; another may gather the weight from shards (`fp8jax.dist.gather_quantized`).
        gradient_dtype: dtype of the quantized parameters of Flax's layers in the copy, and so of their gradients; None
            does not change it. Parameters in classes of your own keep their dtypes. With "bfloat16", products write
            gradients of two bytes, rounded once, to nearest, as a bf16 layer of Flax does. Cast them up before you sum
            over microbatches. Other readers of the parameter, such as a tied embedding, read it rounded.

    Raises:
        ValueError: no layer of the model has a weight to quantize, with the default quantizer. Or `gradient_dtype` is
            another dtype.
    """
    if gradient_dtype is not None and str(jnp.dtype(gradient_dtype)) not in _GRADIENT_DTYPES:
        raise ValueError(
            f"gradient_dtype must be one of {', '.join(_GRADIENT_DTYPES)}, or None, not {gradient_dtype!r}"
        )
    copy = nnx.clone(model)
    original_scalings, scalings = dict(get_scalings(model)), get_scalings(copy)
    for path, scaling in scalings:
        scaling.share_stats(original_scalings[path])
    if any(scaling.linear.needs_weight_bounds for _, scaling in scalings):
        measure_missing_bounds(copy)
    prequantized_layers: list[Any] = [
        layer
        for path, layer in list(nnx.iter_modules(copy))
        if isinstance(layer, (nnx.Linear, nnx.LinearGeneral))
        and _prequantize(layer, functools.partial(quantizer, ".".join(map(str, path))))
    ]
    keeps_dtype, is_default = gradient_dtype is None, quantizer is _default_quantizer
    has_experts = any(
        [
            _prequantize_experts(module, path, quantizer)
            for path, module in list(nnx.iter_modules(copy))
            if not isinstance(module, LAYERS)
        ]
    )
    if (
        not prequantized_layers
        and not has_experts
        and is_default
        and not (keeps_dtype and _has_only_16_bit_products(model))
    ):
        raise ValueError("the model has no layer with a quantized weight; call fp8jax.nnx.quantize first")
    if not keeps_dtype:
        for layer in prequantized_layers:
            # Without its own dtype a layer computes in the dtype that inputs and parameters promote to.
            layer.dtype = layer.dtype or layer.kernel[...].dtype
        for kernel in {id(layer.kernel): layer.kernel for layer in prequantized_layers}.values():
            kernel.set_value(kernel[...].astype(gradient_dtype))
    return copy


def _has_only_16_bit_products(model: Any) -> bool:
    """Whether a quantized model's rules have all products in 16 bits."""
    rules = [settings.rules for _, m in nnx.iter_modules(model) if (settings := get_settings(m)) is not None]
    linears = [rule.linear for rule in (rules[0].rules if rules else ())]
    return bool(rules) and not any(linear is not None and linear.is_quantized for linear in linears)


def _prequantize(layer: Any, quantizer: Callable[[Array, Linear, Array | None], QuantizedWeight | None]) -> bool:
    """Stores a layer's weight quantized; False if its recipe or its kernel rules that out."""
    settings = get_settings(layer)
    linear = None if settings is None else settings.rules.choose(settings.prefix).linear
    if linear is None or linear.spec("w") is None or linear.spec("w_dgrad") is None:
        return False
    if getattr(layer, "batch_axis", None) or isinstance(layer.kernel, FrozenParam):
        return False
    inputs, outputs = count_kernel_axes(layer)
    kernel = layer.kernel[...]
    matrix = merge(kernel, *[1] * (kernel.ndim - inputs - outputs), inputs, outputs)
    weight = _quantize_matrices(matrix, linear, layer.dot_general, quantizer)
    if weight is None:
        return False
    if not isinstance(layer.dot_general, ParameterStateModule):
        layer.dot_general = nnx.data(ParameterStateModule(linear, "kernel", layer.dot_general, lax.dot_general))
    layer.dot_general.prequantized = nnx.data(WeightVariables(weight))
    return True


def _prequantize_experts(module: Any, path: Sequence[Any], quantizer: Quantizer) -> bool:
    """Stores the weights of experts in a module of a user's class quantized; False if it has none."""
    settings, params = get_settings(module), get_params(module)
    if settings is None:
        return False
    names, is_prequantized = LayerNames(settings.prefix, [(name, w.shape) for name, w in params.items()]), False
    for name, param in params.items():
        layer, *aliases = names(name)
        linear = settings.rules.choose(layer, aliases=aliases).linear
        is_stack = count_stacked_axes(param.shape) == len(param.shape) - 2 > 0
        is_stack = is_stack and not isinstance(param, (FrozenParam, nnx.LoRAParam))
        if linear is None or linear.spec("w") is None or linear.spec("w_dgrad") is None or not is_stack:
            continue
        if not is_matrix(name.rpartition("/")[2], param.shape) or not jnp.issubdtype(param.dtype, jnp.floating):
            continue
        attribute = f"{STATE_PREFIX}{name.replace('/', '_')}"
        state, param_path = getattr(module, attribute, None), ".".join(map(str, (*path, *name.split("/"))))
        weight = _quantize_matrices(param[...], linear, state, functools.partial(quantizer, param_path))
        if weight is None:
            continue
        if state is None:
            setattr(module, attribute, nnx.data(ParameterStateModule(linear, name, None, None)))
        getattr(module, attribute).prequantized, is_prequantized = nnx.data(WeightVariables(weight)), True
    return is_prequantized


def _quantize_matrices(
    w: Array, linear: Linear, state: Any, quantizer: Callable[[Array, Linear, Array | None], QuantizedWeight | None]
) -> QuantizedWeight | None:
    """The codes of matrices (..., inputs, outputs), under the scales of a `LayerScaling` if `state` is one."""
    if not isinstance(state, LayerScaling):
        return _vmap_times(lambda w: quantizer(w, linear, None), w.ndim - 2)(w)
    scale = _vmap_times(lambda w, state: weight_scale(w, state, recipe=linear), w.ndim - 2)(w, state.load().state)
    return _vmap_times(lambda w, s: quantizer(w, linear, s), w.ndim - 2)(w, scale)


def _vmap_times(fn: Any, times: int) -> Any:
    for _ in range(times):
        fn = jax.vmap(fn)
    return fn
