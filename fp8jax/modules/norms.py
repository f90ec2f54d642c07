"""Norms of Flax that keep their inputs in 8 bits for the backward pass."""

from typing import Any

import flax.linen as nn
from flax import nnx
from flax.linen.dtypes import canonicalize_dtype
from jax import Array

from fp8jax.core.recipe import Recipe
from fp8jax.modules.functions import layer_norm, rms_norm

LAYERS = (nnx.RMSNorm, nnx.LayerNorm)
LINEN_LAYERS = (nn.RMSNorm, nn.LayerNorm)
HOOK = "call fp8jax.rms_norm or fp8jax.layer_norm"
RETURNED = f"it returns a norm written by hand: {HOOK} for it"
OWN_CLASS = f"a norm of its own class: {HOOK} in it"


class RMSNorm(nnx.RMSNorm):
    """`nnx.RMSNorm` as `fp8jax.nnx.quantize` makes it: `recipe` says what is kept."""

    recipe: Recipe

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        if mask is not None:
            return super().__call__(x, mask)
        scale = None if self.scale is None else self.scale[...]
        x, scale = self.promote_dtype((x, scale), dtype=self.dtype)
        return rms_norm(x, scale, recipe=self.recipe, eps=self.epsilon)


class LayerNorm(nnx.LayerNorm):
    """`nnx.LayerNorm` as `fp8jax.nnx.quantize` makes it: `recipe` says what is kept."""

    recipe: Recipe

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        if mask is not None:
            return super().__call__(x, mask=mask)
        scale, bias = (None if p is None else p[...] for p in (self.scale, self.bias))
        x, scale, bias = self.promote_dtype((x, scale, bias), dtype=self.dtype)
        return layer_norm(x, scale, bias, recipe=self.recipe, eps=self.epsilon)


def why_not(norm: Any) -> str | None:
    """Why a norm cannot keep codes; None where it can."""
    if type(norm) not in (*LAYERS, *LINEN_LAYERS):
        return OWN_CLASS
    if any(axes not in (-1, (-1,), [-1]) for axes in (norm.reduction_axes, norm.feature_axes)):
        return f"it reduces axes {norm.reduction_axes}, not the last one alone"
    if norm.axis_name is not None:
        return f"it reduces over the mesh axis {norm.axis_name!r}"
    if not getattr(norm, "force_float32_reductions", True):
        return "its statistics are not in fp32"
    return None


def linen_norm(norm: Any, recipe: Recipe, x: Array) -> Array:
    """What `nn.RMSNorm` or `nn.LayerNorm` computes while it runs, keeping what the recipe says."""
    biased = getattr(norm, "use_bias", False)
    scale = norm.param("scale", norm.scale_init, x.shape[-1:], norm.param_dtype) if norm.use_scale else None
    bias = norm.param("bias", norm.bias_init, x.shape[-1:], norm.param_dtype) if biased else None
    dtype = canonicalize_dtype(*(a for a in (x, scale, bias) if a is not None), dtype=norm.dtype)
    if isinstance(norm, nn.RMSNorm):
        return rms_norm(x, scale, recipe=recipe, eps=norm.epsilon, dtype=dtype)
    return layer_norm(x, scale, bias, recipe=recipe, eps=norm.epsilon, dtype=dtype)


def replace(norm: Any, recipe: Recipe) -> None:
    """Makes a norm keep codes, in place."""
    norm.recipe = recipe
    object.__setattr__(norm, "__class__", RMSNorm if isinstance(norm, nnx.RMSNorm) else LayerNorm)
