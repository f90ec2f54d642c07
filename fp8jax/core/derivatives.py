"""Values whose derivative would be lost in 8 bits: an exception takes the place of a gradient that is silently 0.

A cast to codes has the derivative 0 almost everywhere, and one from FP8 codes has a cotangent in FP8, which becomes NaN
beyond 448. So JAX's own rules give a gradient without a word, and no one sees that a part of the model has none.
"""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

Tree = TypeVar("Tree")

CODES = (
    "a gradient through 8-bit codes would be 0: the cast to codes was differentiated, or an operation in 8 bits twice. "
    "Take fp8jax.saveable(x, name), whose gradient passes to x, or fp8jax.linear for a product, once; or "
    "jax.lax.stop_gradient(x) where no gradient is wanted"
)
VALUES = (
    "a gradient with respect to FP8 codes would itself be FP8, and NaN beyond its range: the cast from codes was "
    "differentiated. Differentiate with respect to the values that q.dequantize() returns"
)
TWICE = (
    "an operation that computes or saves in 8 bits was differentiated twice: the gradient of its gradient would be 0. "
    "Give this part of the model recipe 'bf16', or differentiate it once"
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def refuse(reason: str, values: Tree, others: Any = ()) -> Tree:
    """`values`; raises ValueError with the reason where they, or `others`, are differentiated."""
    return values


@refuse.defjvp
def _refused(reason: str, primals: Any, tangents: Any) -> Any:
    raise ValueError(reason)


def passed(name: str, result: Array, *inputs: Array | None) -> Array:
    """The result of an operation, to which gradients pass: it and its inputs are floats of 16 bits or more.

    Arrays in FP8 are taken as long as nothing is differentiated.

    Raises:
        TypeError: an input is of no floating dtype.
        ValueError: an array of 8 bits is differentiated, or the result is to be no float.
    """
    dtypes = [x.dtype for x in (*inputs, result) if x is not None]
    if all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1 for dtype in dtypes):
        return result
    for x in inputs:
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} takes arrays of a floating dtype, not {x.dtype}{list(x.shape)}: cast it to bf16")
    names = ", ".join(sorted({str(dtype) for dtype in dtypes}))
    reason = (
        f"{name} was differentiated in {names}: gradients in 8 bits would be 0 or NaN. Cast to bf16; to save a value "
        "in 8 bits and pass its gradient take fp8jax.saveable(x, name)"
    )
    return refuse(reason, result, inputs)
