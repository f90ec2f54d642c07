"""Calls layers of Flax Linen with the product of a recipe."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax import Array

from fp8jax.core.recipe import Linear
from fp8jax.modules.dots import DotGeneral, Einsum, SharedPromotion, check_replaceable
from fp8jax.modules.scaled import observed_operands
from fp8jax.modules.scaled_linen import LinenScaling

LAYERS = (nn.Dense, nn.DenseGeneral, nn.Einsum)
_EINSUM = inspect.unwrap(nn.Einsum.__call__)


def call(path: str, layer: Any, linear: Linear, written: Callable, context: Any, args: Any, kwargs: Any) -> Any:
    """What a layer returns with a recipe's product.

    Args:
        path: of the layer, for messages.
        layer: one of `LAYERS`, bound.
        linear: the recipe of its products.
        written: its method.
        context: of the method's interception, `nn.intercept_methods`.
        args: of the method.
        kwargs: likewise.

    Raises:
        ValueError: the layer has a precision or a product of its own, or batch axes where `linear` observes operands.
    """
    check_replaceable(path, layer)
    with contextlib.ExitStack() as stack:
        if layer.promote_dtype is promote_dtype:
            stack.enter_context(attributes(layer, promote_dtype=SharedPromotion(promote_dtype, linear)))
        scaling = LinenScaling(linear, layer.scope)
        if isinstance(layer, nn.Einsum):
            if context.orig_method.func is _EINSUM:
                product = scaling.einsum if observed_operands(linear) else Einsum(linear)
                return _einsum(layer, product, *args, **kwargs)
            return written(*args, **kwargs)
        stack.enter_context(attributes(layer, dot_general=scaling.dot_general if linear.states else DotGeneral(linear)))
        return written(*args, **kwargs)


@contextlib.contextmanager
def attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Sets attributes for a while, also those of a module, which Flax freezes; bound modules live for one call."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            object.__setattr__(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(owner, name, value)


def _einsum(layer: Any, product: Callable[..., Array], inputs: Array, einsum_str: str | None = None) -> Array:
    """`nn.Einsum` with a product that is called as `jnp.einsum`, for which it has no field."""
    subscripts = nn.merge_param("einsum_str", layer.einsum_str, einsum_str).replace(" ", "")
    terms, _, out = subscripts.partition("->")
    weight = terms.partition(",")[2]
    if layer.use_bias and "." in weight:
        raise ValueError(f"the bias of {subscripts!r} has no fixed shape where the kernel has an ellipsis")
    kernel = layer.param("kernel", layer.kernel_init, layer.shape, layer.param_dtype)
    sizes = dict(zip(weight, layer.shape, strict="." not in weight))
    shape = [sizes[c] for c in out if c in sizes]
    bias: Array | None = layer.param("bias", layer.bias_init, shape, layer.param_dtype) if layer.use_bias else None
    x, w, bias = layer.promote_dtype(inputs, kernel, bias, dtype=layer.dtype)
    y: Array = product(subscripts, x, w, layer.precision, layer.preferred_element_type)
    if bias is None:
        return y
    spelled = out.replace("...", "." * (y.ndim - len(out.replace("...", ""))))
    return y + jnp.reshape(bias, [sizes.get(c, 1) for c in spelled])
