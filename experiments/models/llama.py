"""A plain Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied or untied head.

Its relatives are settings of it: OLMo, whose norms are LayerNorms without parameters (Groeneveld et al., 2024, section
2.1), OLMo 2, Mistral, Qwen2.5, Qwen3 and GPT-2. experiments/hub has the settings of each.

Layers are Flax's own, stacked along a leading axis by `nnx.vmap` and run by `nnx.scan`, so that one block is compiled
whatever the depth. Shapes stand in the names: B sequences, T positions, N = B x T tokens, D width, H query heads, K key
heads, C channels of a head, V vocabulary. The residual stream is kept as (N, D): XLA on CPU has a fast path for the
weight gradient of a 2-D matrix product in bf16 and none for a 3-D one (12 times slower).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.models.rope import apply_rope, rope_tables
from experiments.models.shape import LlamaConfig as LlamaConfig

# Rows of an embedding table up to which a product with one-hot rows is the faster lookup.
ONE_HOT = 1024


def _linear(
    inner: int,
    outer: int,
    std: float,
    dtype: jax.typing.DTypeLike,
    param_dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
    bias: bool = False,
) -> nnx.Linear:
    init = nnx.initializers.normal(std)
    return nnx.Linear(inner, outer, use_bias=bias, kernel_init=init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)


def _norm(config: LlamaConfig, **kinds: Any) -> nnx.RMSNorm | nnx.LayerNorm:
    if config.norm == "rms":
        return nnx.RMSNorm(config.dim, epsilon=config.norm_eps, **kinds)
    both = config.norm == "layer_bias"
    return nnx.LayerNorm(config.dim, epsilon=config.norm_eps, use_scale=both, use_bias=both, **kinds)


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

    A causal position sees the last `window` ones, itself included, and those of its own segment; None sees all.
    """
    # cuDNN's flash attention exists for 16-bit types on NVIDIA GPUs only.
    flash = jax.default_backend() == "gpu" and q_BxTxHxC.dtype in (jnp.bfloat16, jnp.float16)
    seen: dict[str, Any] = {}
    if window is not None and window < q_BxTxHxC.shape[1]:
        seen = {"local_window_size": (window - 1, 0)}
    if segments_BxT is not None:
        seen["mask"] = (segments_BxT[:, :, None] == segments_BxT[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q_BxTxHxC, k_BxTxKxC, v_BxTxKxC, is_causal=is_causal, implementation="cudnn" if flash else "xla", **seen
    )


class Cache(NamedTuple):
    """Keys and values of the positions so far, of all layers.

    Attributes:
        keys, values: (layers, B, S, K, C), of S positions at most.
        length: int32, how many of them there are.
    """

    keys: jax.Array
    values: jax.Array
    length: jax.Array


def attend_cached(
    q_BxTxHxC: jax.Array, keys_BxSxKxC: jax.Array, values_BxSxKxC: jax.Array, start: jax.Array, window: int | None
) -> jax.Array:
    """As a causal `attend` of positions from `start` on to all S, of which later ones hold anything."""
    ahead_TxS = jnp.arange(keys_BxSxKxC.shape[1])[None] - (start + jnp.arange(q_BxTxHxC.shape[1]))[:, None]
    seen_TxS = (ahead_TxS <= 0) if window is None else (ahead_TxS <= 0) & (ahead_TxS > -window)
    return jax.nn.dot_product_attention(q_BxTxHxC, keys_BxSxKxC, values_BxSxKxC, mask=seen_TxS[None, None])


def products_saveable(primitive: Any, *operands: Any, **how: Any) -> bool:
    """Policy of `jax.checkpoint` that keeps what products of matrices and cuDNN's attention give.

    Products are JAX's own, or what carries a name that ends with "product".
    """
    if primitive.name == "name":
        return str(how["name"]).endswith("product")
    product = primitive.name == "dot_general" and all(x.ndim == 2 for x in operands)
    return product or "attention" in primitive.name


def rows_on(x: jax.Array, sharding: jax.sharding.NamedSharding | None) -> jax.Array:
    """An array whose first axis, of sequences or tokens, lies so; XLA alone may cut channels where parameters are.

    What the devices do not divide, such as one sequence that is sampled, is left to XLA.
    """
    if sharding is None or x.shape[0] % sharding.mesh.size:
        return x
    return jax.lax.with_sharding_constraint(x, sharding) if _rows_of(x) is None else jax.sharding.reshard(x, sharding)


def _rows_of(x: jax.Array) -> jax.sharding.NamedSharding | None:
    """How the first axis of an array lies on a mesh with Explicit axes, where JAX asks how a result lies; else None."""
    where = jax.typeof(x).sharding
    return jax.sharding.NamedSharding(where.mesh, jax.P(*where.spec[:1])) if where.mesh.explicit_axes else None


def _reshaped(x: jax.Array, *shape: int) -> jax.Array:
    """An array in another shape, whose first axis lies as before."""
    return jnp.reshape(x, shape, out_sharding=_rows_of(x))


class Embed(nnx.Embed):
    """Looks rows up in a table; in a small one, as bytes need, by a product with one-hot rows.

    The gradient of a lookup adds rows where they came from. Of a small table many are the same, and a GPU adds those
    one after the other, in an order that changes from run to run: half the time of a step of 64 M parameters.
    """

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        if self.num_embeddings > ONE_HOT or out_sharding is not None:
            return super().__call__(inputs, out_sharding or _rows_of(inputs))
        (table_VxD,) = self.promote_dtype((self.embedding[...],), dtype=self.dtype)
        return jax.nn.one_hot(inputs, self.num_embeddings, dtype=table_VxD.dtype) @ table_VxD


class Attention(nnx.Module):
    """Causal self-attention with rotary positions; `kv_heads` keys and values serve `heads` queries."""

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
        self.q = _linear(config.dim, width, 0.02, dtype, param_dtype, rngs, of_inputs)
        self.k = _linear(config.dim, kv_width, 0.02, dtype, param_dtype, rngs, of_inputs)
        self.v = _linear(config.dim, kv_width, 0.02, dtype, param_dtype, rngs, of_inputs)
        self.out = _linear(width, config.dim, out_std, dtype, param_dtype, rngs, config.bias == "all")
        if config.qk_norm:
            sizes = (config.head_dim,) * 2 if config.qk_norm == "head" else (width, kv_width)
            kinds: dict[str, Any] = {"epsilon": config.norm_eps, "dtype": dtype, "param_dtype": param_dtype}
            self.q_norm, self.k_norm = (nnx.RMSNorm(size, rngs=rngs, **kinds) for size in sizes)

    def __call__(
        self, x_NxD: jax.Array, cos_TxC: jax.Array, sin_TxC: jax.Array, segments_BxT: jax.Array | None = None
    ) -> jax.Array:
        qkv = (rows_on(x, self.rows) for x in self.heads(x_NxD, cos_TxC, sin_TxC))
        mixed_BxTxHxC = attend(*qkv, is_causal=True, window=self.config.window, segments_BxT=segments_BxT)
        return self.out(_reshaped(mixed_BxTxHxC, x_NxD.shape[0], self.config.heads * self.config.head_dim))

    def extend(
        self, x_NxD: jax.Array, cos_TxC: jax.Array, sin_TxC: jax.Array, cache: Cache
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What further positions give, with the keys and values of a layer's cache (B, S, K, C) after them."""
        q_BxTxHxC, k_BxTxKxC, v_BxTxKxC = self.heads(x_NxD, cos_TxC, sin_TxC)
        at = (0, cache.length, 0, 0)
        keys = jax.lax.dynamic_update_slice(cache.keys, k_BxTxKxC.astype(cache.keys.dtype), at)
        values = jax.lax.dynamic_update_slice(cache.values, v_BxTxKxC.astype(cache.values.dtype), at)
        mixed_BxTxHxC = attend_cached(q_BxTxHxC, keys, values, cache.length, self.config.window)
        return self.out(mixed_BxTxHxC.reshape(x_NxD.shape[0], -1)), keys, values

    def heads(self, x_NxD: jax.Array, cos_TxC: jax.Array, sin_TxC: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries (B, T, H, C), keys and values (B, T, K, C) of sequences as long as the tables of angles."""
        length, config = cos_TxC.shape[0], self.config
        split = (x_NxD.shape[0] // length, length)

        def turned(x: jax.Array, norm: str, heads: int) -> jax.Array:
            if config.qk_norm == "width":
                x = getattr(self, norm)(x)
            x = _reshaped(x, *split, heads, config.head_dim)
            if config.qk_norm == "head":
                x = getattr(self, norm)(x)
            return x if config.learned_positions else apply_rope(x, cos_TxC, sin_TxC)

        q_BxTxHxC = turned(self.q(x_NxD), "q_norm", config.heads)
        k_BxTxKxC = turned(self.k(x_NxD), "k_norm", config.kv_heads)
        return q_BxTxHxC, k_BxTxKxC, _reshaped(self.v(x_NxD), *split, config.kv_heads, config.head_dim)


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(
        self, config: LlamaConfig, *, dtype: jax.typing.DTypeLike, param_dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ) -> None:
        out_std, bias = 0.02 / (2 * config.layers) ** 0.5, config.bias == "all"
        self.gate = _linear(config.dim, config.mlp_dim, 0.02, dtype, param_dtype, rngs, bias)
        self.up = _linear(config.dim, config.mlp_dim, 0.02, dtype, param_dtype, rngs, bias)
        self.down = _linear(config.mlp_dim, config.dim, out_std, dtype, param_dtype, rngs, bias)

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x_NxD)) * self.up(x_NxD))


class PlainMLP(nnx.Module):
    """down(gelu(up(x)))."""

    def __init__(
        self, config: LlamaConfig, *, dtype: jax.typing.DTypeLike, param_dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ) -> None:
        out_std, bias = 0.02 / (2 * config.layers) ** 0.5, config.bias == "all"
        self.up = _linear(config.dim, config.mlp_dim, 0.02, dtype, param_dtype, rngs, bias)
        self.down = _linear(config.mlp_dim, config.dim, out_std, dtype, param_dtype, rngs, bias)

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x_NxD)))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)); with norms after, x + norm(attention(x)) and so on."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: jax.typing.DTypeLike,
        param_dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
        rows: jax.sharding.NamedSharding | None = None,
    ) -> None:
        kinds: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.rows, self.norm_after = rows, config.norm_after
        self.attention_norm = _norm(config, **kinds)
        self.attention = Attention(config, rows=rows, **kinds)
        self.mlp_norm = _norm(config, **kinds)
        self.mlp = SwiGLU(config, **kinds) if config.mlp == "swiglu" else PlainMLP(config, **kinds)

    def __call__(self, x_NxD: jax.Array, *tables: jax.Array) -> jax.Array:
        x_NxD = rows_on(x_NxD, self.rows)
        if self.norm_after:
            x_NxD = x_NxD + self.attention_norm(self.attention(x_NxD, *tables))
            return x_NxD + self.mlp_norm(self.mlp(x_NxD))
        x_NxD = x_NxD + self.attention(self.attention_norm(x_NxD), *tables)
        return x_NxD + self.mlp(self.mlp_norm(x_NxD))

    def extend(
        self, x_NxD: jax.Array, cos_TxC: jax.Array, sin_TxC: jax.Array, cache: Cache
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """As `Attention.extend`."""
        if self.norm_after:
            mixed_NxD, keys, values = self.attention.extend(x_NxD, cos_TxC, sin_TxC, cache)
            x_NxD = x_NxD + self.attention_norm(mixed_NxD)
            return x_NxD + self.mlp_norm(self.mlp(x_NxD)), keys, values
        mixed_NxD, keys, values = self.attention.extend(self.attention_norm(x_NxD), cos_TxC, sin_TxC, cache)
        x_NxD = x_NxD + mixed_NxD
        return x_NxD + self.mlp(self.mlp_norm(x_NxD)), keys, values


class Around(Protocol):
    """Calls a layer of a model whose parameters are not whole."""

    def __call__(self, layer: Block, call: Callable[[Block], jax.Array]) -> jax.Array:
        """What `call` gives of the whole layer, of the layer as it is."""
        ...

    def policy(self, primitive: Any, *operands: Any, **how: Any) -> bool:
        """Of `jax.checkpoint`, for layers that compute nothing else again."""
        ...


class Llama(nnx.Module):
    """Token ids to logits.

    Args:
        config: the shape; checked by `config.validate()`.
        dtype: what is computed in. Normalisation statistics, rotary angles and the logits' loss are float32.
        param_dtype: what parameters are stored in.
        remat: what a block computes again in the backward pass: nothing, everything but its input (True), or all but
            its products and attention ("products"), which is the fastest in bf16.
        rows: how tokens and sequences lie on several devices; None leaves it to XLA.
        unroll: layers in one turn of the loop over them. What a loop reads of stacked weights and saves for the
            backward pass, XLA copies; more layers in a turn take longer to compile. None: all on a GPU, else one.
        rngs: source of the initial parameters.

    Raises:
        ValueError: the configuration is impossible, or unroll is below 1.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        remat: bool | str = False,
        rows: jax.sharding.NamedSharding | None = None,
        unroll: int | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        config.validate()
        if remat not in (False, True, "products"):
            raise ValueError(f"remat must be False, True or 'products', got {remat!r}")
        if unroll is None:
            unroll = config.layers if jax.default_backend() == "gpu" else 1
        if unroll < 1:
            raise ValueError(f"unroll must be at least 1, got {unroll}")
        self.config, self.remat, self.rows, self.unroll = config, remat, rows, unroll
        # How a layer is called; None calls it as it is. Whoever trains a model in parts sets it.
        self.around: Around | None = None
        kinds: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        init = nnx.initializers.normal(0.02)
        self.embed = Embed(config.vocab, config.dim, embedding_init=init, rngs=rngs, **kinds)
        if config.learned_positions:
            size = config.learned_positions, config.dim
            self.embed_position = nnx.Embed(*size, embedding_init=init, rngs=rngs, **kinds)

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, rows=rows, rngs=rngs, **kinds)

        self.layers = stack(rngs)
        self.norm = _norm(config, rngs=rngs, **kinds)
        if not config.tied:
            self.head = _linear(config.dim, config.vocab, 0.02, dtype, param_dtype, rngs)

    def __call__(self, tokens_BxT: jax.Array, segments_BxT: jax.Array | None = None) -> jax.Array:
        """Integer tokens (B, T) to logits (B, T, V) in the compute dtype; none sees those of another segment."""
        x_NxD = self.embed(_reshaped(tokens_BxT, tokens_BxT.size))
        x_NxD = self.decode(x_NxD, tokens_BxT.shape[1], segments_BxT)
        return _reshaped(self.logits(x_NxD), *tokens_BxT.shape, self.config.vocab)

    def decode(self, x_NxD: jax.Array, length: int, segments_BxT: jax.Array | None = None) -> jax.Array:
        """Embedded sequences of a length T, one after the other in N, to what the head reads, (N, D)."""
        if segments_BxT is not None and self.config.learned_positions:
            raise ValueError("segments need rotary positions, which are relative; this model has learned ones")
        x_NxD, *angles = self.placed(x_NxD, length)
        tables = (*angles, segments_BxT) if segments_BxT is not None else tuple(angles)

        def block(layer: Block, x_NxD: jax.Array) -> jax.Array:
            if self.around is not None:
                return self.around(layer, lambda layer: layer(x_NxD, *tables))
            return layer(x_NxD, *tables)

        if self.remat or self.around is not None:
            policy = self.around.policy if self.around is not None and not self.remat else None
            block = nnx.remat(block, policy=products_saveable if self.remat == "products" else policy)
        x_NxD = nnx.scan(block, in_axes=(0, nnx.Carry), out_axes=nnx.Carry, unroll=self.unroll)(self.layers, x_NxD)
        return self.norm(rows_on(x_NxD, self.rows))

    def placed(
        self, x_NxD: jax.Array, length: int, start: jax.typing.ArrayLike = 0
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Embedded sequences with learned positions from `start` on, if there are any, and the tables of rotary ones.

        Raises:
            ValueError: a sequence is longer than the table of learned positions.
        """
        config, learned = self.config, self.config.learned_positions
        if learned:
            if length > learned:
                raise ValueError(f"a sequence of {length} tokens is longer than the {learned} positions of the model")
            place_TxD = self.embed_position(jnp.asarray(start) + jnp.arange(length))
            x_NxD = x_NxD + jnp.tile(place_TxD, (x_NxD.shape[0] // length, 1))
        return x_NxD, *rope_tables(length, config.head_dim, config.rope_theta, config.rope_scaling, start)

    def cache(self, batch: int, length: int) -> Cache:
        """An empty cache for `extend`, of `batch` sequences of at most `length` tokens."""
        config = self.config
        shape = (config.layers, batch, length, config.kv_heads, config.head_dim)
        dtype = self.embed.dtype
        return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros([], jnp.int32))

    def extend(self, tokens_BxT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Logits (B, V) after the last of further tokens, with a cache that has them; its length must leave room."""
        batch, length = tokens_BxT.shape
        x_NxD, cos_TxC, sin_TxC = self.placed(self.embed(tokens_BxT.reshape(-1)), length, cache.length)

        def block(layer: Block, x_NxD: jax.Array, keys: jax.Array, values: jax.Array) -> Any:
            return layer.extend(x_NxD, cos_TxC, sin_TxC, Cache(keys, values, cache.length))

        scan = nnx.scan(block, in_axes=(0, nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0, 0))
        x_NxD, keys, values = scan(self.layers, x_NxD, cache.keys, cache.values)
        last_BxD = self.norm(x_NxD.reshape(batch, length, -1)[:, -1])
        return self.logits(last_BxD), Cache(keys, values, cache.length + length)

    def logits(self, x_NxD: jax.Array) -> jax.Array:
        """What `decode` returned to logits (N, V)."""
        return self.embed.attend(x_NxD, _rows_of(x_NxD)) if self.config.tied else self.head(x_NxD)
