"""Replacements for `jax.lax.dot_general`, `jnp.einsum` and `promote_dtype` that layers of Flax take as attributes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core import products
from fp8jax.core.recipe import Linear
from fp8jax.modules.functions import dot_general
from fp8jax.modules.provenance import REGISTRY
from fp8jax.modules.recording import ASIDE
from fp8jax.ops.linear import content_key, einsum_by, is_default_precision
from fp8jax.ops.saved import ITSELF


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """`fp8jax.dot_general` with its recipe, called as that; keys for stochastic rounding come from the data."""

    linear: Linear

    def __call__(self, lhs: Array, rhs: Array, *args: Any, quantized: Any = None, **kwargs: Any) -> Array:
        check_products()
        if aside(self.linear):
            return like_a_product(lambda x, w: lax.dot_general(x, w, *args, **kwargs), lhs, rhs)
        options: Any = {"key": key_of(lhs, self.linear), "quantized": quantized, **kwargs}
        return dot_general(lhs, rhs, *args, recipe=self.linear, **options)


@dataclasses.dataclass(frozen=True)
class Einsum:
    """`fp8jax.einsum` with its recipe, called as `jnp.einsum`; keys for stochastic rounding come from the data."""

    linear: Linear

    def __call__(self, *args: Any, **kwargs: Any) -> Array:
        return einsum_by(DotGeneral(self.linear), *args, **kwargs)


@dataclasses.dataclass(frozen=True)
class SharedPromotion:
    """Flax's `promote_dtype`, after which the cast of an input is known as the same array in another dtype.

    Layers that cast one input, as q, k and v of a model with an fp32 residual stream do, then share its codes, and the
    cast of what a norm or an activation made can be made again as that. A weight that no product reads itself is not
    cast: it is quantized as it is, and loops over layers keep no 16-bit copy of it for their backward pass.

    Attributes:
        promote: `promote_dtype` of Linen (arrays as arguments) or of NNX (a tuple of them), input and weight first.
        linear: the recipe of the layer's products.
        residual: the input is kept for the backward pass in any case, so that no codes of it are.
    """

    promote: Callable[..., Sequence[Any]]
    linear: Linear
    residual: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        source, weight, *_ = args[0] if isinstance(args[0], tuple) else args
        promoted, cast, *rest = self.promote(*args, **kwargs)
        rest = [cast if None in (self.linear.spec("w"), self.linear.spec("w_dgrad")) else weight, *rest]
        if promoted is not source:
            REGISTRY.follow(source, promoted)
        if self.residual:
            REGISTRY.note(promoted, REGISTRY.find(promoted)._replace(again=(ITSELF, None)))
        return (promoted, *rest)


def aside(linear: Linear) -> bool:
    """Whether a run aside does without a recipe's product, of which nothing is asked but that it saves codes."""
    return ASIDE.value and linear.spec("saved") is not None


def like_a_product(product: Callable[[Array, Array], Array], lhs: Array, rhs: Array) -> Array:
    """A product that saves nothing, in a run aside: its cotangents are zeros."""
    kinds = jax.typeof(lhs), jax.typeof(rhs)

    @jax.custom_vjp
    def run(lhs: Array, rhs: Array) -> Array:
        return product(lhs, rhs.astype(lhs.dtype))

    run.defvjp(lambda *operands: (run(*operands), None), lambda *_: tuple(jnp.zeros(k.shape, k.dtype) for k in kinds))
    return run(lhs, rhs)


def key_of(lhs: Array, linear: Linear) -> Array | None:
    """One key for all layers that read an input, so that they share its codes."""
    return REGISTRY.share(lhs, "key", lambda: content_key(lhs)) if linear.stochastic else None


def check_products() -> None:
    """Raises ValueError where a quantized layer runs while another library has changed the products of JAX."""
    if name := products.changed():
        raise ValueError(
            f"a quantized layer runs while another library has changed {name}: what this adds to the layer's product, "
            "such as a LoRA adapter, would be lost. Merge adapters into the weights before the model is quantized, or "
            "take adapters that are modules, as nnx.LoRA, or leave the model as it is written"
        )


def check_replaceable(path: str, layer: Any) -> None:
    """Raises ValueError where a layer of Flax has a precision or a product of its own."""
    if not is_default_precision(layer.precision):
        raise ValueError(
            f"{path} asks for precision {layer.precision!r}, which a quantized product cannot give; "
            "set its precision to None, or leave it out with a rule"
        )
    present = [getattr(layer, name, None) for name in ("dot_general_cls", "dot_general", "einsum_op")]
    for product in present:
        if product not in (None, lax.dot_general, jnp.einsum) and not isinstance(product, (DotGeneral, Einsum)):
            raise ValueError(f"{path} has a product of its own, {product!r}; leave it out with a rule")
