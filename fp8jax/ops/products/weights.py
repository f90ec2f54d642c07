"""Codes of a weight: where they come from for the products of a layer, and both copies in one pass."""

import functools
from typing import Any

from jax import Array, lax

from fp8jax.core.recipe import SAME, Linear, Recipe
from fp8jax.core.spec import TRANSPOSABLE
from fp8jax.ops.autodiff.checkpointing import PRODUCT_AUX, with_checkpoint_name
from fp8jax.ops.autodiff.residuals import to_bytes
from fp8jax.ops.dispatch.choice import on_cuda
from fp8jax.ops.dispatch.partition import on_one_device
from fp8jax.ops.products.frozen_weights import FrozenSource, FrozenWeight, check_same_kind
from fp8jax.ops.products.operands import (
    PrequantizedWeight,
    QuantizedWeight,
    QuantizeHere,
    Source,
    convert_scale_to_spec,
    make_codes,
)
from fp8jax.ops.quantization.quantize import quantize
from fp8jax.recipes import linear_part


def choose_weight_source(
    w: Array | FrozenWeight, recipe: Linear, *, scale: Array | None = None, quantized: QuantizedWeight | None = None
) -> Source | FrozenSource:
    """The source of a weight (inputs, outputs), and with it what the product saves of it.

    Raises:
        ValueError: `quantized` is of a weight of another shape or recipe, or of one that is frozen; or the recipe's
            codes are integers and a frozen weight's are not, or the reverse.
    """
    if isinstance(w, FrozenWeight):
        if quantized is not None:
            raise ValueError("a frozen weight is quantized already: leave out quantized=")
        check_same_kind(recipe, w.codes.spec)
        return FrozenSource(w.codes, w.transposed)
    if quantized is None:
        return QuantizeHere(scale)
    shape, *specs = quantized.dgrad.shape, quantized.forward.spec, quantized.dgrad.spec
    if shape != w.shape or specs != [recipe.spec("w"), recipe.spec("w_dgrad")]:
        expected = f"{w.shape} of specs {recipe.w} and {recipe.w_dgrad}"
        raise ValueError(f"a weight {expected} was given quantized as {shape}, {specs[0]} and {specs[1]}")
    return PrequantizedWeight(quantized)


def quantize_weight(w: Array, *, recipe: Recipe | Linear | str, scale: Array | None = None) -> QuantizedWeight:
    """A weight as the products of a recipe read it, for `fp8jax.linear` to use in every call of a step.

    Under gradient accumulation the microbatches of a step then share its scales and codes, of the weight and of its
    transposed copy, one byte a parameter each:

        quantized = fp8jax.quantize_weight(w, recipe=recipe)
        y = fp8jax.linear(x, w, recipe=recipe, quantized=quantized)

    Args:
        w: (inputs, outputs), any floating dtype. Gradients flow to the `w` that `linear` is given, not to this one.
        recipe: a `Recipe`, its part `Linear`, or a preset's name; it quantizes the weight in both products.
        scale: fp32 scalar, for granularity "tensor" and the forward product's format; None takes it from `w`.

    Returns:
        Codes with their scales, rounded to nearest; use it only while `w` stays the same.

    Raises:
        ValueError: the recipe has a product that reads the weight itself.
    """
    linear_recipe = linear_part(recipe)
    forward, dgrad = linear_recipe.spec("w"), linear_recipe.spec("w_dgrad")
    if forward is None or dgrad is None:
        raise ValueError(
            f"the recipe computes with w={linear_recipe.w!r}, w_dgrad={linear_recipe.w_dgrad!r}: not quantized in both"
        )
    if forward == dgrad and forward.granularity in TRANSPOSABLE:
        rows, transposed = quantize(
            lax.stop_gradient(w), dgrad, SAME, scale=scale, strategy=linear_recipe.stateless_scaling("w")
        )
        assert rows is not None
        assert transposed is not None
        return QuantizedWeight(to_bytes(transposed), to_bytes(rows))
    make = functools.partial(make_codes, w, strategy=linear_recipe.stateless_scaling("w"))
    return QuantizedWeight(
        make(forward, transposed=True, scale=scale), make(dgrad, scale=convert_scale_to_spec(scale, forward, dgrad))
    )


def quantize_both_layouts(w: Array, recipe: Linear) -> QuantizedWeight | None:
    """What `quantize_weight` makes of a matrix (inputs, outputs), if one pass over it makes both copies; else None."""
    spec = recipe.spec("w")
    if spec is None or spec != recipe.spec("w_dgrad") or spec.rounding != "nearest":
        return None
    return quantize_weight(w, recipe=recipe) if spec.granularity in TRANSPOSABLE else None


def quantize_both_for_grad(w_source: Any, w: Array, recipe: Linear) -> Any:
    """The source of a weight of which on one GPU both copies of codes are made at once, where its scale is its own.

    The second one is kept until the backward pass, a byte a parameter, which then reads no weight of four.
    """
    if (
        not isinstance(w_source, QuantizeHere)
        or w_source.scale is not None
        or not on_cuda()
        or not on_one_device()
        or not w.size
    ):
        return w_source
    quantized = quantize_both_layouts(w.T if w_source.transposed else w, recipe)
    if quantized is None:
        return w_source
    if w_source.transposed:
        quantized = QuantizedWeight(quantized.dgrad, quantized.forward)
    return PrequantizedWeight(quantized._replace(dgrad=with_checkpoint_name(quantized.dgrad, PRODUCT_AUX)))
