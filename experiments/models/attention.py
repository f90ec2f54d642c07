"""Causal self-attention with rotary positions, and its cache of keys and values.

Names have shape suffixes, as in `experiments.models.llama`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.models.parts import linear, reshaped, rows_on
from experiments.models.rope import apply_rope
from experiments.models.shape import LlamaConfig


def attend(
    q_BxTxHxC: jax.Array,
    k_BxTxKxC: jax.Array,
    v_BxTxKxC: jax.Array,
    *,
    is_causal: bool,
    window: int | None = None,
    segments_BxT: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention by the fastest implementation of the default device; (B, T, H, C).

    A causal position attends to the last `window` positions, including itself, in its segment. None: no limit.
    """
    # cuDNN's flash attention supports only 16-bit types on NVIDIA GPUs.
    flash = jax.default_backend() == "gpu" and q_BxTxHxC.dtype in (jnp.bfloat16, jnp.float16)
    mask: dict[str, Any] = {}
    if window is not None and window < q_BxTxHxC.shape[1]:
        mask = {"local_window_size": (window - 1, 0)}
    if segments_BxT is not None:
        mask["mask"] = (segments_BxT[:, :, None] == segments_BxT[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q_BxTxHxC, k_BxTxKxC, v_BxTxKxC, is_causal=is_causal, implementation="cudnn" if flash else "xla", **mask
    )


class Cache(NamedTuple):
    """Keys and values of previous positions, for all layers.

    Attributes:
        keys, values: (layers, B, S, K, C), with space for S positions.
        length: int32, number of positions in use.
    """

    keys: jax.Array
    values: jax.Array
    length: jax.Array


def attend_cached(
    q_BxTxHxC: jax.Array, keys_BxSxKxC: jax.Array, values_BxSxKxC: jax.Array, start: jax.Array, window: int | None
) -> jax.Array:
    """Causal `attend` of positions from `start` on to S cached positions. Later cached positions are ignored."""
    ahead_TxS = jnp.arange(keys_BxSxKxC.shape[1])[None] - (start + jnp.arange(q_BxTxHxC.shape[1]))[:, None]
    seen_TxS = (ahead_TxS <= 0) if window is None else (ahead_TxS <= 0) & (ahead_TxS > -window)
    return jax.nn.dot_product_attention(q_BxTxHxC, keys_BxSxKxC, values_BxSxKxC, mask=seen_TxS[None, None])


class Attention(nnx.Module):
    """Causal grouped-query self-attention with rotary positions: `heads` queries share `kv_heads` keys and values."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: jax.typing.DTypeLike,
        param_dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
        rows: jax.sharding.NamedSharding | None = None,
    ) -> None:
        self.config, self.rows = config, rows
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        out_std, of_inputs = 0.02 / (2 * config.layers) ** 0.5, config.bias in ("qkv", "all")
        self.q = linear(config.dim, width, 0.02, dtype, param_dtype, rngs, of_inputs)
        self.k = linear(config.dim, kv_width, 0.02, dtype, param_dtype, rngs, of_inputs)
        self.v = linear(config.dim, kv_width, 0.02, dtype, param_dtype, rngs, of_inputs)
        self.out = linear(width, config.dim, out_std, dtype, param_dtype, rngs, config.bias == "all")
        if config.qk_norm:
            sizes = (config.head_dim,) * 2 if config.qk_norm == "head" else (width, kv_width)
            norm_options: dict[str, Any] = {"epsilon": config.norm_eps, "dtype": dtype, "param_dtype": param_dtype}
            self.q_norm, self.k_norm = (nnx.RMSNorm(size, rngs=rngs, **norm_options) for size in sizes)

    def __call__(
        self, x_NxD: jax.Array, cos_TxC: jax.Array, sin_TxC: jax.Array, segments_BxT: jax.Array | None = None
    ) -> jax.Array:
        qkv = (rows_on(x, self.rows) for x in self.heads(x_NxD, cos_TxC, sin_TxC))
        mixed_BxTxHxC = attend(*qkv, is_causal=True, window=self.config.window, segments_BxT=segments_BxT)
        mixed_NxD = reshaped(mixed_BxTxHxC, x_NxD.shape[0], self.config.heads * self.config.head_dim)
        return self.out(rows_on(mixed_NxD, self.rows))

    def extend(
        self, x_NxD: jax.Array, cos_TxC: jax.Array, sin_TxC: jax.Array, cache: Cache
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the output for further positions, and a layer's updated cache of keys and values (B, S, K, C)."""
        q_BxTxHxC, k_BxTxKxC, v_BxTxKxC = self.heads(x_NxD, cos_TxC, sin_TxC)
        start = (0, cache.length, 0, 0)
        keys = jax.lax.dynamic_update_slice(cache.keys, k_BxTxKxC.astype(cache.keys.dtype), start)
        values = jax.lax.dynamic_update_slice(cache.values, v_BxTxKxC.astype(cache.values.dtype), start)
        mixed_BxTxHxC = attend_cached(q_BxTxHxC, keys, values, cache.length, self.config.window)
        return self.out(mixed_BxTxHxC.reshape(x_NxD.shape[0], -1)), keys, values

    def heads(self, x_NxD: jax.Array, cos_TxC: jax.Array, sin_TxC: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries (B, T, H, C), keys and values (B, T, K, C). The tables of angles give the length T."""
        length, config = cos_TxC.shape[0], self.config
        split = (x_NxD.shape[0] // length, length)

        def normed_and_rotated(x: jax.Array, norm: str, heads: int) -> jax.Array:
            if config.qk_norm == "width":
                x = getattr(self, norm)(x)
            x = reshaped(x, *split, heads, config.head_dim)
            if config.qk_norm == "head":
                x = getattr(self, norm)(x)
            return x if config.learned_positions else apply_rope(x, cos_TxC, sin_TxC)

        q_BxTxHxC = normed_and_rotated(self.q(x_NxD), "q_norm", config.heads)
        k_BxTxKxC = normed_and_rotated(self.k(x_NxD), "k_norm", config.kv_heads)
        return q_BxTxHxC, k_BxTxKxC, reshaped(self.v(x_NxD), *split, config.kv_heads, config.head_dim)
