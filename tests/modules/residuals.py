"""Results and residuals of NNX models with inputs of one width."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import fp8jax
from fp8jax.recipes import Context
from tests.programs import residuals

TOKENS, WIDTH, INNER = 12, 32, 48
COAT = fp8jax.recipes.coat_activations()
LINEAR_ONLY = dataclasses.replace(COAT, context=Context())


def inputs(*shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(7), shape or (TOKENS, WIDTH)).astype(dtype)


def gradients(model, x):
    """Returns values and gradients with respect to the input and the parameters."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    loss = lambda p, x: jnp.sum(jnp.sin(nnx.merge(graph, p, rest)(x).astype(jnp.float32)))  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x)


def kept_by(model, *args, **kwargs) -> list[tuple[str, tuple[int, ...]]]:
    """Returns dtypes and shapes of the residuals of a model's call."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return residuals(lambda p, *args: nnx.merge(graph, p, rest, copy=True)(*args, **kwargs), params, *args)


def codes(model, *args, **kwargs) -> Counter:
    """Returns the widths of the codes that a call saves."""
    return Counter(shape[-1] for dtype, shape in kept_by(model, *args, **kwargs) if dtype == "uint8")


def wide(model, *args, **kwargs) -> int:
    """Returns the number of saved arrays of the inner width that are not codes."""
    return sum(d != "uint8" and s[-1:] == (INNER,) and len(s) == 3 for d, s in kept_by(model, *args, **kwargs))


X = inputs(2, 6, WIDTH)


def linear(inner=WIDTH, outer=INNER, seed=0, **kinds):
    return nnx.Linear(inner, outer, rngs=nnx.Rngs(seed), **kinds)


def found_activations(model, *sample, **keywords) -> list[str]:
    """Returns the activations that are recognized in a call."""
    parts = fp8jax.explain(model, COAT, *sample, **keywords).context_entries
    return [part.kind for part in parts if not part.kind.endswith("Norm")]


def both(model):
    """Returns the model with 8-bit residuals of activations, and without."""
    return (fp8jax.nnx.quantize(model, recipe) for recipe in (COAT, LINEAR_ONLY))


def assert_same(actual, expected):
    def plain(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)

    jax.tree.map(lambda a, b: np.testing.assert_array_equal(plain(a), plain(b)), actual, expected)


class Short(nnx.Module):
    def __init__(self, compute) -> None:
        self.up, self.down, self.compute = linear(), linear(INNER, WIDTH, 1), compute

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.compute(self, x)
