"""Fused blocks of a transformer: linear layers with the operation before them, for models without modules.

One FP8 copy serves both neighbours of each array. No 16-bit copy survives to the backward pass (COAT, section 5.2 and
appendix D).
"""

import math
from collections.abc import Sequence
from typing import Literal

import jax
from jax import Array

from fp8jax.core.recipe import Recipe
from fp8jax.ops.autodiff.residuals import ALREADY_SAVED, NO_INPUT_FACTS, ArrayFacts, InputFacts
from fp8jax.ops.dispatch.sharding import OutSharding, merge
from fp8jax.ops.nonlinear.activation import activate, check_glu_inputs
from fp8jax.ops.nonlinear.norm import normalize
from fp8jax.ops.products.linear import flatten_tokens, linears, output_spec, require_stateless
from fp8jax.ops.products.operands import Input
from fp8jax.ops.products.product import recipe_dot
from fp8jax.ops.products.weights import QuantizedWeight, StepWeight
from fp8jax.recipes import resolve


def norm_linear(
    x: Array,
    scale: Array | None,
    weights: Sequence[Array],
    *,
    recipe: Recipe | str,
    norm: Literal["rms", "layer"] = "rms",
    norm_bias: Array | None = None,
    eps: float = 1e-6,
    key: Array | None = None,
    residual: bool = False,
    quantized: Sequence[QuantizedWeight] | None = None,
    out_sharding: OutSharding = None,
) -> tuple[Array, ...]:
    """Apply a norm and the linear layers that read its result, such as q, k and v, or gate and up.

    The layers share one quantized copy of the norm's result. It is saved with the codes of `x`, unless the context
    recomputes activations.

        x, q, k, v = fp8jax.norm_linear(x, scale, (wq, wk, wv), recipe=recipe, residual=True)
        x = fp8jax.attention_output(attention(q, k, v), wo, x, recipe=recipe)

    Args:
        x: (..., channels), any floating dtype.
        scale: (channels,), of the norm; or None.
        weights: (channels, outputs) each.
        recipe: a `Recipe` or a preset's name. Its `linear` and `context` apply.
        norm: "rms" or "layer".
        norm_bias: (channels,), for "layer"; or None.
        eps: added to the mean square or variance.
        residual: whether to also return `x`, for a residual sum. Its gradient is added in the norm's backward pass.
        quantized: results of `quantize_weight` for each weight. None quantizes them in this call.
        key, out_sharding: as in `linear`.

    Returns:
        (..., outputs) for each weight, in the dtype of `x`; preceded by `x` if `residual`.

    Raises:
        ValueError: unknown norm, bias for "rms", or different numbers of `quantized` and weights; or as `rms_norm` and
            `linear`.
        TypeError: `recipe` is a part of a recipe.
    """
    recipe = _resolve_whole_recipe(recipe)
    if norm not in ("rms", "layer") or (norm == "rms" and norm_bias is not None):
        raise ValueError(f"norm must be 'rms' (without norm_bias) or 'layer', got {norm!r} with norm_bias {norm_bias}")
    centered = norm == "layer"
    h, passthrough, facts = normalize(x, scale, norm_bias, recipe, eps, None, centered=centered, returns_input=residual)
    y = linears(h, weights, recipe=recipe, key=key, quantized=quantized, facts=facts, out_sharding=out_sharding)
    if not residual:
        return y
    assert passthrough is not None
    return (passthrough, *y)


def attention_output(
    y: Array,
    w: Array,
    residual: Array | None = None,
    *,
    recipe: Recipe | str,
    key: Array | None = None,
    quantized: QuantizedWeight | None = None,
    out_sharding: OutSharding = None,
) -> Array:
    """Return the output projection of attention, plus a residual.

    Flash attention saves its output for its own backward pass. With a context, this layer therefore saves only one
    scale (COAT, appendix D).

    Args:
        y: (..., heads, channels), any floating dtype, exactly as attention returns it. A reshaped copy would be saved,
            too.
        w: (heads * channels, outputs), or (heads, channels, outputs).
        residual: (..., outputs), or None.
        recipe: as in `norm_linear`.
        quantized: result of `quantize_weight` for `w` as (inputs, outputs). None quantizes it in this call.
        key, out_sharding: as in `linear`. The sharding is that of the projection.

    Returns:
        (..., outputs) in the dtype of `y`, promoted with that of the residual.

    Raises:
        ValueError: shapes do not match, or as `linear`.
        TypeError: `recipe` is a part of a recipe.
    """
    recipe = _resolve_whole_recipe(recipe)
    shape, inputs = y.shape[-2:], math.prod(y.shape[-2:])
    if y.ndim < 2 or w.shape[:-1] not in (shape, (inputs,)):
        raise ValueError(f"w must be (heads, channels, outputs) or (inputs, outputs) for y {y.shape}, not {w.shape}")
    input_facts = (
        InputFacts(ArrayFacts(recompute_rule=(ALREADY_SAVED, y)))
        if recipe.context.residual is not None
        else NO_INPUT_FACTS
    )
    tokens, matrix = merge(y, *[1] * (y.ndim - 2), 2), merge(w, w.ndim - 1, 1)
    out_spec, token_input = output_spec(tokens, matrix, out_sharding), Input(tokens, y, False, input_facts)
    out = recipe_dot(
        token_input,
        matrix,
        require_stateless(recipe),
        key,
        step_weight=StepWeight.from_codes(quantized),
        out_spec=out_spec,
    )
    return out if residual is None else residual + out


def glu_linear(
    gate: Array,
    up: Array | None,
    w: Array,
    residual: Array | None = None,
    *,
    recipe: Recipe | str,
    activation: str = "silu",
    key: Array | None = None,
    quantized: QuantizedWeight | None = None,
    out_sharding: OutSharding = None,
) -> Array:
    """Return residual + (activation(gate) * up) @ w, the second half of an MLP.

    A context that recomputes activations saves only the codes of `gate` and `up`.

    Args:
        gate: (..., inner), any floating dtype.
        up: array of the same shape and dtype; None for activation(gate) @ w.
        w: (inner, outputs).
        residual: (..., outputs), or None. With a context, pass the `x` that `norm_linear` returns with `residual=True`.
            If anything else reads it, the product is added to a copy, not in place.
        recipe: as in `norm_linear`.
        activation: "silu", "gelu" (exact) or "gelu_tanh".
        key, quantized, out_sharding: as in `linear`. The sharding is that of the product.

    Returns:
        (..., outputs) in the dtype of `gate`, promoted with that of the residual.

    Raises:
        ValueError: as `glu` and `linear`.
        TypeError: `recipe` is a part of a recipe.
    """
    recipe = _resolve_whole_recipe(recipe)
    if up is not None:
        check_glu_inputs(gate, up)
    h, facts = activate(activation, gate, up, recipe)
    out_spec = output_spec(h, w, out_sharding)
    h_input = Input(flatten_tokens(h, w), h, input_facts=InputFacts(facts))
    y = recipe_dot(
        h_input, w, require_stateless(recipe), key, step_weight=StepWeight.from_codes(quantized), out_spec=out_spec
    )
    if residual is not None and recipe.context.residual is not None:
        # cuBLASLt adds in place only to an array without other readers.
        residual = jax.lax.optimization_barrier(residual)
    return y if residual is None else residual + y


def _resolve_whole_recipe(recipe: Recipe | str) -> Recipe:
    preset = resolve(recipe)
    if not isinstance(preset, Recipe):
        raise TypeError(f"a norm or an activation fused with linear layers needs a full fp8jax.Recipe, got {preset!r}")
    return preset
