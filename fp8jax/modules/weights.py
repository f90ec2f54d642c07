"""Weights of NNX models that are quantized once for all microbatches of a step."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core.recipe import Linear
from fp8jax.modules.functional import FrozenParam, count_kernel_axes
from fp8jax.modules.nnx import get_settings
from fp8jax.modules.scaled import (
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
    """A copy of a model that `fp8jax.nnx.quantize` returned, whose layers store their weights quantized.

    Call it inside the training step, before the loop over microbatches: they then share the weights' scales and codes,
    rounded to nearest. Results are those of the model, bit for bit, while the parameters stay the same. The codes and
    their transposed copy take two bytes a parameter while the copy lives. With one batch it saves a pass over the
    weights on several devices and in loops: both copies are written in one pass, as on one GPU outside of loops without
    it, and the backward pass reads no fp32 weights.

        prequantized = fp8jax.nnx.quantize_weights(model)
        for batch in microbatches:  # or nnx.scan
            grads = fp8jax.nnx.grad(loss_fn)(prequantized, batch)  # of nnx.Param, whose tree is the model's

    For scalings with a state, what calls of the copy observe is stored in the model: end the step with the model.

    A model whose recipe has all products in 16 bits, such as "bf16", is copied unchanged without `gradient_dtype`.
    Layers `nnx.Einsum`, those with batch axes, and those of recipes that read the weight itself quantize in each call.

    Args:
        model: a quantized model; it is not changed.
        quantizer: called with the path of a layer, its weight (inputs, outputs), its recipe and the scale that its
            state gives, or None. It returns the quantized weight, or None to leave the layer as it is. The default is
            `fp8jax.quantize_weight`; another may gather the weight from shards (`fp8jax.dist.gather_quantized`).
        gradient_dtype: dtype of the quantized parameters in the copy, and so of their gradients; None does not change
            it. In "bfloat16" products write gradients of two bytes, rounded once, to nearest, as a bf16 layer of Flax
            does. Sums over microbatches are yours to widen. Other readers of such a parameter, such as a tied
            embedding, read it rounded.

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
    if not prequantized_layers and is_default and not (keeps_dtype and _has_only_16_bit_products(model)):
        raise ValueError("the model has no layer with a quantized weight; call fp8jax.nnx.quantize first")
    if not keeps_dtype:
        for layer in prequantized_layers:
            # Without a dtype of its own a layer computes in the dtype that inputs and parameters promote to.
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
    """Whether a layer now stores its weight quantized."""
    settings = get_settings(layer)
    linear = None if settings is None else settings.rules.choose(settings.prefix).linear
    if linear is None or linear.spec("w") is None or linear.spec("w_dgrad") is None:
        return False
    if getattr(layer, "batch_axis", None) or isinstance(layer.kernel, FrozenParam):
        return False
    inputs, outputs = count_kernel_axes(layer)
    kernel = layer.kernel[...]
    num_layer_axes = kernel.ndim - inputs - outputs
    matrix = merge(kernel, *[1] * num_layer_axes, inputs, outputs)
    scaling = layer.dot_general
    if isinstance(scaling, LayerScaling):
        get_scale = _vmap_times(lambda w, state: weight_scale(w, state, recipe=linear), num_layer_axes)
        scale = get_scale(matrix, scaling.load().state)
        weight = _vmap_times(lambda w, s: quantizer(w, linear, s), num_layer_axes)(matrix, scale)
    else:
        weight = _vmap_times(lambda w: quantizer(w, linear, None), num_layer_axes)(matrix)
    if weight is None:
        return False
    if not isinstance(scaling, ParameterStateModule):
        layer.dot_general = nnx.data(ParameterStateModule(linear, "kernel", scaling, lax.dot_general))
    layer.dot_general.prequantized = nnx.data(WeightVariables(weight))
    return True


def _vmap_times(fn: Any, times: int) -> Any:
    for _ in range(times):
        fn = jax.vmap(fn)
    return fn
