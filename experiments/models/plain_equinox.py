"""A user-written Llama in Equinox. A module processes one token or one sequence; `jax.vmap` adds the other axes."""

import equinox as eqx
import jax
import jax.numpy as jnp

from experiments.models.plain import attend, rotate


class EquinoxLlamaBlock(eqx.Module):
    """Attention with grouped heads and rotary positions, then SwiGLU, of one sequence (T, D); no biases."""

    attention_norm: eqx.nn.RMSNorm
    mlp_norm: eqx.nn.RMSNorm
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    out: eqx.nn.Linear
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    width: int = eqx.field(static=True)

    def __init__(self, dim: int, heads: int, kv_heads: int, inner: int, key: jax.Array) -> None:
        self.width = dim // heads
        kv = kv_heads * self.width
        shapes = {"q": (dim, dim), "k": (dim, kv), "v": (dim, kv), "out": (dim, dim),
                  "gate": (dim, inner), "up": (dim, inner), "down": (inner, dim)}  # fmt: skip
        for (name, shape), of in zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True):
            setattr(self, name, eqx.nn.Linear(*shape, use_bias=False, key=of))
        self.attention_norm, self.mlp_norm = (eqx.nn.RMSNorm(dim, use_bias=False) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.attention_norm)(x)
        q, k, v = (jax.vmap(of)(y).reshape(1, len(x), -1, self.width) for of in (self.q, self.k, self.v))
        x = x + jax.vmap(self.out)(attend(rotate(q), rotate(k), v)[0])
        y = jax.vmap(self.mlp_norm)(x)
        return x + jax.vmap(self.down)(jax.nn.silu(jax.vmap(self.gate)(y)) * jax.vmap(self.up)(y))


class EquinoxLlama(eqx.Module):
    """From tokens (T,) of one sequence to logits (T, V)."""

    embed: eqx.nn.Embedding
    blocks: list[EquinoxLlamaBlock]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(
        self, vocab: int, dim: int, layers: int, heads: int, kv_heads: int, inner: int, key: jax.Array
    ) -> None:
        first, last, *keys = jax.random.split(key, layers + 2)
        self.embed = eqx.nn.Embedding(vocab, dim, key=first)
        self.blocks = [EquinoxLlamaBlock(dim, heads, kv_heads, inner, of) for of in keys]
        self.norm = eqx.nn.RMSNorm(dim, use_bias=False)
        self.head = eqx.nn.Linear(dim, vocab, use_bias=False, key=last)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def in_bf16(model: EquinoxLlama) -> EquinoxLlama:
    """Returns a copy with bf16 arrays, as from `jmp` or a user's cast."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, model)
