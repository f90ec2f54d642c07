"""A transformer layer, on one device and sharded over its sequence and channels."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import P

import fp8jax
from fp8jax.dist import gather_linear, scatter_sequence

HEADS, CHANNELS, INNER = 8, 16, 256
WIDTH = HEADS * CHANNELS
# Sharding of a layer's weights: along outputs if the sequence is gathered, else along inputs.
SPECS = {"norm1": P(), "norm2": P()}
SPECS |= {name: P(None, "tensor") for name in ("q", "k", "v", "gate", "up")}
SPECS |= {name: P("tensor") for name in ("out", "down")}


def params(seed: int = 0) -> dict[str, jax.Array]:
    inner = {"gate": (WIDTH, INNER), "up": (WIDTH, INNER), "down": (INNER, WIDTH)}
    shapes = {name: (WIDTH, WIDTH) for name in ("q", "k", "v", "out")} | inner
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    samples = {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return samples | {name: 1 + jax.random.normal(keys[i], (WIDTH,)) / 8 for i, name in enumerate(("norm1", "norm2"))}


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of (..., heads * channels), for any number of heads; heads are separate axes in the result."""
    q, k, v = (x.reshape(*x.shape[:-1], -1, CHANNELS) for x in (q, k, v))
    scores = jnp.einsum("bthc,bshc->bhts", q, k) / CHANNELS**0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(scores), v)


def layer(p: Any, x: jax.Array, recipe: Any) -> jax.Array:
    """The layer on one device; x is (batch, tokens, width)."""
    x, q, k, v = fp8jax.norm_linear(x, p["norm1"], [p["q"], p["k"], p["v"]], recipe=recipe, residual=True)
    x = fp8jax.attention_output(attend(q, k, v), p["out"], x, recipe=recipe)
    x, gate, up = fp8jax.norm_linear(x, p["norm2"], [p["gate"], p["up"]], recipe=recipe, residual=True)
    return fp8jax.glu_linear(gate, up, p["down"], x, recipe=recipe)


def parallel_layer(p: Any, x: jax.Array, recipe: Any, sums: Any = None) -> jax.Array:
    """The same layer inside `jax.shard_map`; x is (batch, a device's tokens, width).

    Args:
        p, x: a device's shards; `SPECS` are those of `p`.
        recipe: recipe of the matmuls and of the arrays that are sent.
        sums: wire format of partial sums; None for that of the recipe.
    """
    kwargs: Any = {"recipe": recipe, "gradients": sums}
    wire_format = {"gradients": recipe}
    h = fp8jax.rms_norm(x, p["norm1"], recipe=recipe)
    q, k, v = gather_linear(h, [p["q"], p["k"], p["v"]], "tensor", **kwargs)
    y = fp8jax.attention_output(attend(q, k, v), p["out"], recipe=recipe)
    x = x + scatter_sequence(y, "tensor", sums or recipe, **wire_format)
    h = fp8jax.rms_norm(x, p["norm2"], recipe=recipe)
    gate, up = gather_linear(h, [p["gate"], p["up"]], "tensor", **kwargs)
    y = fp8jax.glu_linear(gate, up, p["down"], recipe=recipe)
    return x + scatter_sequence(y, "tensor", sums or recipe, **wire_format)
