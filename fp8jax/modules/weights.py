"""Weights of NNX models quantized once for all microbatches of a step."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core.recipe import Linear
from fp8jax.modules.functional import kernel_axes
from fp8jax.modules.nnx import settings_of
from fp8jax.modules.scaled import Holder, LayerScaling, WeightVariables
from fp8jax.modules.untrained import UntrainedVariable
from fp8jax.modules.weight_bounds import with_known_bounds
from fp8jax.ops.product import QuantizedWeight
from fp8jax.ops.scaled import weight_scale
from fp8jax.ops.sharding import merge
from fp8jax.ops.weight import quantize_weight

Model = TypeVar("Model", bound=nnx.Module)


Quantizer = Callable[[str, Array, Linear, Array | None], QuantizedWeight | None]


_GRADIENTS = ("bfloat16", "float16", "float32")


def _quantizer(path: str, w: Array, linear: Linear, scale: Array | None) -> QuantizedWeight:
    return quantize_weight(w, recipe=linear, scale=scale)


def quantize_weights(model: Model, quantizer: Quantizer = _quantizer, *, gradients: DTypeLike | None = None) -> Model:
    """A copy of a model that `fp8jax.nnx.quantize` made, whose layers hold their weights quantized.

    Call it inside the training step, before the loop over microbatches: these then share the weights' scales and
    codes, which are rounded to nearest. Its results are the model's own, bit for bit, while the parameters stay the
    same; it costs two bytes a parameter, of codes and of their transposed copy, for as long as it lives. With one batch
    it saves a pass on several devices and in loops: both copies are made in one, as on one GPU outside of loops they
    are anyway, and the backward pass reads no fp32 weights.

        held = fp8jax.nnx.quantize_weights(model)
        for batch in microbatches:  # or nnx.scan
            grads = fp8jax.nnx.grad(loss_fn)(held, batch)  # of nnx.Param, whose tree is the model's

    What calls of the copy observe, for scalings with a state, the model has seen: end the step with the model itself.

    A model whose recipe has all products in 16 bits, such as "bf16", is copied as it is, unless `gradients` are given.

    Layers `nnx.Einsum`, those with batch axes, and those of recipes that read the weight itself quantize in each call.

    Args:
        model: a quantized model; it is not changed.
        quantizer: called with the path of a layer, its weight (inputs, outputs), its recipe and the scale that its
            state gives, or None; gives what the layer holds, or None for nothing. The default is
            `fp8jax.quantize_weight`; another may gather the weight from shards (`fp8jax.dist.gather_quantized`).
        gradients: dtype of the held parameters in the copy, and so of their gradients; None leaves it as it is. In
            "bfloat16" products write them in two bytes a parameter, and clipping and the optimizer read two: rounded
            once, to nearest, as a bf16 layer of Flax has them. Sums over microbatches are yours to widen; what else
            reads such a parameter, as a tied embedding, reads it rounded.

    Raises:
        ValueError: no layer of the model has a weight that can be held; not with a quantizer of your own. Or gradients
            have another dtype than these, or a recipe joins products (`Linear.joins`), which read no held codes.
    """
    if gradients is not None and str(jnp.dtype(gradients)) not in _GRADIENTS:
        raise ValueError(f"gradients must be one of {', '.join(_GRADIENTS)}, or None, not {gradients!r}")
    copy = nnx.clone(model)
    seen_in = {path: m for path, m in nnx.iter_modules(model) if isinstance(m, LayerScaling)}
    for path, own in nnx.iter_modules(copy):
        if isinstance(own, LayerScaling):
            own.note_in(seen_in[path])
    layers = [(".".join(map(str, path)), m) for path, m in nnx.iter_modules(copy)]
    layers = [(path, m) for path, m in layers if isinstance(m, (nnx.Linear, nnx.LinearGeneral))]
    if any(isinstance(m, LayerScaling) and m.linear.tracked for _, m in nnx.iter_modules(copy)):
        with_known_bounds(copy)
    held: list[Any] = [layer for path, layer in layers if _hold(layer, functools.partial(quantizer, path))]
    if not held and quantizer is _quantizer and not (gradients is None and _in_16_bits(model)):
        raise ValueError("the model has no layer with a quantized weight; call fp8jax.nnx.quantize first")
    if gradients is not None:
        for layer in held:
            # Without a dtype of its own a layer computes in what inputs and parameters promote to.
            layer.dtype = layer.dtype or layer.kernel[...].dtype
        for kernel in {id(layer.kernel): layer.kernel for layer in held}.values():
            kernel.set_value(kernel[...].astype(gradients))
    return copy


def _in_16_bits(model: Any) -> bool:
    """Whether a quantized model's rules have all products in 16 bits."""
    rules = [settings.rules for _, m in nnx.iter_modules(model) if (settings := settings_of(m)) is not None]
    linears = [rule.linear for rule in (rules[0].rules if rules else ())]
    return bool(rules) and not any(linear is not None and linear.quantized for linear in linears)


def _hold(layer: Any, quantizer: Callable[[Array, Linear, Array | None], QuantizedWeight | None]) -> bool:
    settings = settings_of(layer)
    linear = None if settings is None else settings.rules.choice(settings.prefix).linear
    if linear is None or linear.spec("w") is None or linear.spec("w_dgrad") is None:
        return False
    if getattr(layer, "batch_axis", None):
        return False
    inputs, outputs = kernel_axes(layer)
    if isinstance(layer.kernel, UntrainedVariable):
        return False
    kernel = layer.kernel[...]
    stacked = kernel.ndim - inputs - outputs
    matrix = merge(kernel, *[1] * stacked, inputs, outputs)
    holder = layer.dot_general
    if isinstance(holder, LayerScaling):
        scale = _mapped(lambda w, state: weight_scale(w, state, recipe=linear), stacked)(matrix, holder.state())
        weight = _mapped(lambda w, s: quantizer(w, linear, s), stacked)(matrix, scale)
    else:
        weight = _mapped(lambda w: quantizer(w, linear, None), stacked)(matrix)
    if weight is None:
        return False
    if linear.joins:
        raise ValueError(
            f"{settings.prefix or 'the model'} has a recipe with linear.joins, whose products quantize their weights "  # type: ignore[union-attr]
            "as one, in each call: they read no held codes. Quantize the model by one with joins=False, or give a "
            "quantizer that returns None there"
        )
    if not isinstance(holder, Holder):
        layer.dot_general = holder = nnx.data(Holder(linear, "kernel", layer.dot_general, lax.dot_general))
    layer.dot_general.held = nnx.data(WeightVariables(weight))
    return True


def _mapped(fn: Any, times: int) -> Any:
    for _ in range(times):
        fn = jax.vmap(fn)
    return fn
