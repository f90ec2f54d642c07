"""User-written models in Flax NNX: a class per layer, a Python loop over layers, biases as in the papers.

A Llama, a GPT-2 with a tied head, and a vision transformer. Parameters are fp32, the compute dtype is bf16.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.models.moe import ExpertProducts, MoE, Norm, Routes, weighted_swiglu


def attend(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool = True) -> jax.Array:
    """Softmax attention of (B, T, H, C), by cuDNN on a GPU; (B, T, H C)."""
    implementation: Any = "cudnn" if jax.default_backend() == "gpu" else "xla"
    y = jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation)
    return y.reshape(*y.shape[:2], -1)


def rotate(x: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Rotary positions of (B, T, H, C)."""
    length, width = x.shape[1], x.shape[-1]
    angles = jnp.arange(length)[:, None] * base ** (-jnp.arange(0, width, 2) / width)
    sine, cosine = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    left, right = jnp.split(x, 2, -1)
    return jnp.concatenate([left * cosine - right * sine, right * cosine + left * sine], -1)


class PlainExperts(ExpertProducts):
    """A mixture of experts that JAX differentiates.

    Args:
        ragged_dot: the grouped matmul.
    """

    def __init__(self, ragged_dot: Callable[..., jax.Array]) -> None:
        self.ragged_dot = ragged_dot

    def mlp(
        self, x_NxD: jax.Array, tokens: Any, norm: Norm | None, gate_up_ExDx2F: jax.Array, down_ExFxD: jax.Array,
        weights_R: jax.Array, routes: Routes,
    ) -> jax.Array:  # fmt: skip
        gate_up_ExDx2F, down_ExFxD = (w.astype(x_NxD.dtype) for w in (gate_up_ExDx2F, down_ExFxD))
        gate_up_Rx2F = self.ragged_dot(routes.permute(x_NxD), gate_up_ExDx2F, routes.sizes_E)
        h_RxF = weighted_swiglu(gate_up_Rx2F, weights_R)
        return routes.combine(self.ragged_dot(h_RxF, down_ExFxD, routes.sizes_E))


class PlainLlamaBlock(nnx.Module):
    """Attention with grouped heads and rotary positions, then SwiGLU or a mixture of experts; no biases."""

    def __init__(
        self, dim: int, heads: int, kv_heads: int, inner: int, rngs: nnx.Rngs, experts: MoE | None = None
    ) -> None:
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        norm = functools.partial(nnx.RMSNorm, dim, dtype=jnp.bfloat16, rngs=rngs)
        self.width = dim // heads
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.q, self.k, self.v = (linear(dim, n * self.width) for n in (heads, kv_heads, kv_heads))
        self.out = linear(dim, dim)
        self.experts = experts
        if experts is None:
            self.gate, self.up, self.down = linear(dim, inner), linear(dim, inner), linear(inner, dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.attention_norm(x)
        q, k, v = (of(y).reshape(*y.shape[:2], -1, self.width) for of in (self.q, self.k, self.v))
        x = x + self.out(attend(rotate(q), rotate(k), v))
        y = self.mlp_norm(x)
        if self.experts is not None:
            return x + self.experts(y.reshape(-1, y.shape[-1])).reshape(y.shape)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class PlainLlama(nnx.Module):
    """From tokens (B, T) to logits (B, T, V). A policy of `jax.checkpoint_policies` checkpoints each block.

    `experts` is a function that creates a mixture of experts, which replaces the SwiGLU of each block.
    """

    def __init__(
        self, vocab: int, dim: int, layers: int, heads: int, kv_heads: int, inner: int, rngs: nnx.Rngs,
        policy: Callable[..., Any] | None = None, experts: Callable[[nnx.Rngs], MoE] | None = None,
    ) -> None:  # fmt: skip
        self.policy = policy
        self.embed = nnx.Embed(vocab, dim, dtype=jnp.bfloat16, rngs=rngs)
        moes = [None if experts is None else experts(rngs) for _ in range(layers)]
        self.blocks = nnx.List([PlainLlamaBlock(dim, heads, kv_heads, inner, rngs, moe) for moe in moes])
        self.norm = nnx.RMSNorm(dim, dtype=jnp.bfloat16, rngs=rngs)
        self.head = nnx.Linear(dim, vocab, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = nnx.remat(type(block).__call__, policy=self.policy)(block, x) if self.policy else block(x)
        return self.head(self.norm(x))


class PlainGPTBlock(nnx.Module):
    """Attention with packed qkv, then a GELU MLP; biases everywhere."""

    def __init__(self, dim: int, heads: int, rngs: nnx.Rngs) -> None:
        linear = functools.partial(nnx.Linear, dtype=jnp.bfloat16, rngs=rngs)
        norm = functools.partial(nnx.LayerNorm, dim, dtype=jnp.bfloat16, rngs=rngs)
        self.heads = heads
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.qkv, self.proj = linear(dim, 3 * dim), linear(dim, dim)
        self.fc, self.out = linear(dim, 4 * dim), linear(4 * dim, dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        qkv = jnp.split(self.qkv(self.attention_norm(x)), 3, -1)
        q, k, v = (y.reshape(*y.shape[:2], self.heads, -1) for y in qkv)
        x = x + self.proj(attend(q, k, v))
        return x + self.out(jax.nn.gelu(self.fc(self.mlp_norm(x))))


class PlainGPT(nnx.Module):
    """From tokens (B, T) to logits (B, T, V), with a head tied to the embedding."""

    def __init__(self, vocab: int, dim: int, layers: int, heads: int, length: int, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(vocab, dim, dtype=jnp.bfloat16, rngs=rngs)
        self.positions = nnx.Embed(length, dim, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([PlainGPTBlock(dim, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(dim, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def fused(q: jax.Array, k: jax.Array, v: jax.Array, **_: Any) -> jax.Array:
    """Bidirectional `attend` as the `attention_fn` of a Flax layer; (B, T, H, C)."""
    return attend(q, k, v, causal=False).reshape(q.shape)


class PlainViTBlock(nnx.Module):
    """Flax's attention layer, then a GELU MLP."""

    def __init__(self, dim: int, heads: int, attention_fn: Any, rngs: nnx.Rngs) -> None:
        linear = functools.partial(nnx.Linear, dtype=jnp.bfloat16, rngs=rngs)
        norm = functools.partial(nnx.LayerNorm, dim, dtype=jnp.bfloat16, rngs=rngs)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = nnx.MultiHeadAttention(
            heads, dim, dtype=jnp.bfloat16, decode=False, attention_fn=attention_fn, rngs=rngs
        )
        self.fc, self.out = linear(dim, 4 * dim), linear(4 * dim, dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.out(nnx.gelu(self.fc(self.mlp_norm(x))))


class PlainViT(nnx.Module):
    """From images (B, side, side, 3), in 16 x 16 patches, to logits (B, classes) of the mean over patches.

    `attention_fn` replaces Flax's attention function.
    """

    def __init__(
        self,
        classes: int,
        dim: int,
        layers: int,
        heads: int,
        side: int,
        rngs: nnx.Rngs,
        attention_fn: Any = nnx.dot_product_attention,
    ) -> None:
        self.patch = nnx.Conv(3, dim, (16, 16), (16, 16), dtype=jnp.bfloat16, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, (side // 16) ** 2, dim)))
        self.blocks = nnx.List([PlainViTBlock(dim, heads, attention_fn, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(dim, dtype=jnp.bfloat16, rngs=rngs)
        self.head = nnx.Linear(dim, classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patch(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.positions[...].astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def batch(kind: str, size: int, length: int, outputs: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Returns inputs and labels. "text": noisy walks over tokens (B, T). "images": `length` pixels per side."""
    rng = np.random.default_rng(seed)
    if kind == "images":
        images = jnp.asarray(rng.normal(size=(size, length, length, 3)), jnp.bfloat16)
        return images, jnp.asarray(rng.integers(0, outputs, size))
    walks = np.cumsum(rng.integers(0, 3, (size, length + 1)), 1) * 7 + rng.integers(0, 50, (size, 1))
    tokens = jnp.asarray(walks % outputs, jnp.int32)
    return tokens[:, :-1], tokens[:, 1:]
