"""A user-written Llama in Flax Linen, as in `plain`: compact modules and a Python loop over layers."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.models.plain import attend, rotate


class LinenLlamaBlock(nn.Module):
    """Attention with grouped heads and rotary positions, then SwiGLU; no biases."""

    heads: int
    kv_heads: int
    inner: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dim = x.shape[-1]

        def linear(outputs: int, name: str) -> Any:
            return nn.Dense(outputs, use_bias=False, dtype=jnp.bfloat16, name=name)

        y = nn.RMSNorm(dtype=jnp.bfloat16, name="attention_norm")(x)
        width = dim // self.heads
        q, k, v = (
            linear(count * width, name)(y).reshape(*y.shape[:2], count, width)
            for name, count in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        x = x + linear(dim, "out")(attend(rotate(q), rotate(k), v))
        y = nn.RMSNorm(dtype=jnp.bfloat16, name="mlp_norm")(x)
        return x + linear(dim, "down")(nn.silu(linear(self.inner, "gate")(y)) * linear(self.inner, "up")(y))


class LinenLlama(nn.Module):
    """From tokens (B, T) to logits (B, T, V)."""

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    inner: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab, self.dim, dtype=jnp.bfloat16, name="embed")(tokens)
        for _ in range(self.layers):
            x = LinenLlamaBlock(self.heads, self.kv_heads, self.inner)(x)
        x = nn.RMSNorm(dtype=jnp.bfloat16, name="norm")(x)
        return nn.Dense(self.vocab, use_bias=False, dtype=jnp.bfloat16, name="head")(x)
