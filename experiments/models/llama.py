"""A plain Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied or untied head.

Settings give related models: OLMo, with LayerNorms without parameters (Groeneveld et al., 2024, section 2.1), OLMo 2,
Mistral, Qwen2.5, Qwen3 and GPT-2, and with experts Mixtral and Qwen3-MoE. experiments/hub has the settings of each.

Layers are Flax layers, stacked along a leading axis by `nnx.vmap` and run by `nnx.scan`, so that only one block is
compiled. Names have shape suffixes: B sequences, T positions, N = B x T tokens, D width, H query heads, K key heads, C
channels of a head, V vocabulary. The residual stream is (N, D): XLA on CPUs has a fast path for the weight gradient of
a 2-D bf16 matmul, but not of a 3-D one.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.models.attention import Attention, Cache
from experiments.models.attention import attend as attend
from experiments.models.moe import ExpertProducts, MoE
from experiments.models.parts import Boundary, linear, reshaped, rows_of, rows_on
from experiments.models.rope import apply_rope as apply_rope
from experiments.models.rope import rope_tables
from experiments.models.shape import LlamaConfig as LlamaConfig

# Up to this number of rows, a matmul with one-hot rows is the faster lookup.
ONE_HOT = 1024


def _norm(config: LlamaConfig, **options: Any) -> nnx.RMSNorm | nnx.LayerNorm:
    if config.norm == "rms":
        return nnx.RMSNorm(config.dim, epsilon=config.norm_eps, **options)
    both = config.norm == "layer_bias"
    return nnx.LayerNorm(config.dim, epsilon=config.norm_eps, use_scale=both, use_bias=both, **options)


def products_saveable(primitive: Any, *operands: Any, **params: Any) -> bool:
    """A policy of `jax.checkpoint` that saves the outputs of matmuls and of cuDNN attention.

    Matmuls are those of JAX, and values with a checkpoint name that ends with "product".
    """
    if primitive.name == "name":
        return str(params["name"]).endswith("product")
    product = primitive.name == "dot_general" and all(x.ndim == 2 for x in operands)
    return product or "attention" in primitive.name


class Embed(nnx.Embed):
    """An embedding lookup; in a small table, such as for bytes, by a matmul with one-hot rows.

    The gradient of a lookup is a scatter-add. With a small table, many indices are equal. A GPU adds them one after the
    other, in an order that changes between runs, which is slow and not deterministic.
    """

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        if self.num_embeddings > ONE_HOT or out_sharding is not None:
            return super().__call__(inputs, out_sharding or rows_of(inputs))
        (table_VxD,) = self.promote_dtype((self.embedding[...],), dtype=self.dtype)
        return jax.nn.one_hot(inputs, self.num_embeddings, dtype=table_VxD.dtype) @ table_VxD


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(
        self, config: LlamaConfig, *, dtype: jax.typing.DTypeLike, param_dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ) -> None:
        out_std, bias = 0.02 / (2 * config.layers) ** 0.5, config.bias == "all"
        self.gate = linear(config.dim, config.mlp_dim, 0.02, dtype, param_dtype, rngs, bias)
        self.up = linear(config.dim, config.mlp_dim, 0.02, dtype, param_dtype, rngs, bias)
        self.down = linear(config.mlp_dim, config.dim, out_std, dtype, param_dtype, rngs, bias)

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x_NxD)) * self.up(x_NxD))


class PlainMLP(nnx.Module):
    """down(gelu(up(x)))."""

    def __init__(
        self, config: LlamaConfig, *, dtype: jax.typing.DTypeLike, param_dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ) -> None:
        out_std, bias = 0.02 / (2 * config.layers) ** 0.5, config.bias == "all"
        self.up = linear(config.dim, config.mlp_dim, 0.02, dtype, param_dtype, rngs, bias)
        self.down = linear(config.mlp_dim, config.dim, out_std, dtype, param_dtype, rngs, bias)

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
        boundary: Boundary | None = None,
        expert_products: ExpertProducts | None = None,
        router_losses: bool = False,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.rows, self.boundary, self.norm_after = rows, boundary, config.norm_after
        self.attention_norm = _norm(config, **options)
        self.attention = Attention(config, rows=rows, **options)
        self.mlp_norm = _norm(config, **options)
        self.mlp: Any
        if config.experts:
            self.mlp = MoE(config, products=expert_products, has_losses=router_losses, **options)
        else:
            self.mlp = SwiGLU(config, **options) if config.mlp == "swiglu" else PlainMLP(config, **options)

    def __call__(self, x_NxD: jax.Array, *tables: jax.Array) -> jax.Array:
        x_NxD = rows_on(x_NxD, self.rows)
        attention = self._shared(lambda x_NxD: self.attention(x_NxD, *tables))
        mlp = self._shared(self.mlp)
        if self.norm_after:
            x_NxD = x_NxD + self.attention_norm(attention(x_NxD))
            return x_NxD + self.mlp_norm(mlp(x_NxD))
        x_NxD = x_NxD + attention(rows_on(self.attention_norm(x_NxD), self.rows))
        if isinstance(self.mlp, MoE):
            return x_NxD + self.mlp(x_NxD, self.mlp_norm)
        return x_NxD + mlp(rows_on(self.mlp_norm(x_NxD), self.rows))

    def _shared(self, sublayer: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        """Wraps a sublayer whose heads or channels are sharded, as a function of a device's tokens."""
        boundary = self.boundary
        return sublayer if boundary is None else lambda x_NxD: boundary.leave(sublayer(boundary.enter(x_NxD)))

    def extend(
        self, x_NxD: jax.Array, cos_TxC: jax.Array, sin_TxC: jax.Array, cache: Cache
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `Attention.extend`."""
        if self.norm_after:
            mixed_NxD, keys, values = self.attention.extend(x_NxD, cos_TxC, sin_TxC, cache)
            x_NxD = x_NxD + self.attention_norm(mixed_NxD)
            return x_NxD + self.mlp_norm(self.mlp(x_NxD)), keys, values
        mixed_NxD, keys, values = self.attention.extend(self.attention_norm(x_NxD), cos_TxC, sin_TxC, cache)
        x_NxD = x_NxD + mixed_NxD
        if isinstance(self.mlp, MoE):
            return x_NxD + self.mlp(x_NxD, self.mlp_norm), keys, values
        return x_NxD + self.mlp(self.mlp_norm(x_NxD)), keys, values


class Around(Protocol):
    """Calls a layer of a model with sharded parameters."""

    def __call__(self, layer: Block, call: Callable[[Block], jax.Array]) -> jax.Array:
        """Returns `call` of the gathered layer, given the sharded layer."""
        ...

    def policy(self, primitive: Any, *operands: Any, **params: Any) -> bool:
        """A policy of `jax.checkpoint` for layers without further rematerialization."""
        ...


class Llama(nnx.Module):
    """Token ids to logits.

    Args:
        config: the shape; checked by `config.validate()`.
        dtype: compute dtype. Statistics of norms, rotary angles and the loss are float32.
        param_dtype: dtype of parameters.
        remat: what a block recomputes in the backward pass: nothing (False), everything (True), or everything except
            matmuls and attention ("products"), which is the fastest in bf16.
        rows: sharding of tokens and sequences over several devices; None leaves it to XLA.
        boundary: tensor parallelism inside `jax.shard_map`; `config` then has a device's heads and channels.
        expert_products: matmuls and residuals of experts; None for `ExpertProducts`.
        router_losses: whether a call sets variables of router losses, see `experiments.models.moe.router_losses`.
        unroll: layers per iteration of the loop over layers. A loop copies stacked weights and residuals. More layers
            per iteration need more time to compile. None: all on a GPU, else one.
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
        boundary: Boundary | None = None,
        expert_products: ExpertProducts | None = None,
        router_losses: bool = False,
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
        self.config, self.remat, self.rows, self.boundary, self.unroll = config, remat, rows, boundary, unroll
        # Wrapper of layer calls, or None. Sharded training sets it.
        self.around: Around | None = None
        # Replacement of the loop over layers, as a function of embedded sequences and tables, or None.
        self.run: Callable[..., jax.Array] | None = None
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        init = nnx.initializers.normal(0.02)
        self.embed = Embed(config.vocab, config.dim, embedding_init=init, rngs=rngs, **dtypes)
        if config.learned_positions:
            size = config.learned_positions, config.dim
            self.embed_position = nnx.Embed(*size, embedding_init=init, rngs=rngs, **dtypes)

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(
                config,
                rows=rows,
                boundary=boundary,
                expert_products=expert_products,
                router_losses=router_losses,
                rngs=rngs,
                **dtypes,
            )

        self.layers = stack(rngs)
        self.norm = _norm(config, rngs=rngs, **dtypes)
        if not config.tied:
            self.head = linear(config.dim, config.vocab, 0.02, dtype, param_dtype, rngs)

    def __call__(self, tokens_BxT: jax.Array, segments_BxT: jax.Array | None = None) -> jax.Array:
        """Returns logits (B, T, V) of tokens (B, T), in the compute dtype. Tokens attend only within their segment."""
        x_NxD = self.hidden(tokens_BxT, segments_BxT)
        return reshaped(self.logits(x_NxD), *tokens_BxT.shape, self.config.vocab)

    def hidden(self, tokens_BxT: jax.Array, segments_BxT: jax.Array | None = None) -> jax.Array:
        """Returns the head's input (N, D) of integer tokens (B, T); with tensor parallelism, of a device's tokens."""
        x_NxD = self.embed(self._device_part(reshaped(tokens_BxT, tokens_BxT.size)))
        return self.decode(x_NxD, tokens_BxT.shape[1], segments_BxT)

    def decode(self, x_NxD: jax.Array, length: int, segments_BxT: jax.Array | None = None) -> jax.Array:
        """Returns the head's input (N, D) of embedded sequences (N, D) of length T, concatenated along N."""
        if segments_BxT is not None and self.config.learned_positions:
            raise ValueError("segments need rotary (relative) positions, but this model has learned positions")
        x_NxD, *angles = self.placed(x_NxD, length)
        tables = (*angles, segments_BxT) if segments_BxT is not None else tuple(angles)

        if self.run is not None:
            return self.norm(rows_on(self.run(x_NxD, *tables), self.rows))

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
        """Adds learned positions from `start` on, if there are any. Returns embeddings and tables of rotary positions.

        Raises:
            ValueError: a sequence is longer than the table of learned positions.
        """
        config, learned = self.config, self.config.learned_positions
        if learned:
            if length > learned:
                raise ValueError(f"a sequence of {length} tokens is longer than the {learned} positions of the model")
            place_TxD = self.embed_position(jnp.asarray(start) + jnp.arange(length))
            sequences = x_NxD.shape[0] * (1 if self.boundary is None else self.boundary.devices) // length
            x_NxD = x_NxD + self._device_part(jnp.tile(place_TxD, (sequences, 1)))
        return x_NxD, *rope_tables(length, config.head_dim, config.rope_theta, config.rope_scaling, start)

    def _device_part(self, x: jax.Array) -> jax.Array:
        return x if self.boundary is None else self.boundary.shard(x)

    def cache(self, batch: int, length: int) -> Cache:
        """Returns an empty cache for `extend`, for `batch` sequences of at most `length` tokens."""
        config = self.config
        shape = (config.layers, batch, length, config.kv_heads, config.head_dim)
        dtype = self.embed.dtype
        return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros([], jnp.int32))

    def extend(self, tokens_BxT: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Returns logits (B, V) after further tokens, and the updated cache. The cache must have space for them."""
        batch, length = tokens_BxT.shape
        x_NxD, cos_TxC, sin_TxC = self.placed(self.embed(tokens_BxT.reshape(-1)), length, cache.length)

        def block(layer: Block, x_NxD: jax.Array, keys: jax.Array, values: jax.Array) -> Any:
            return layer.extend(x_NxD, cos_TxC, sin_TxC, Cache(keys, values, cache.length))

        scan = nnx.scan(block, in_axes=(0, nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0, 0))
        x_NxD, keys, values = scan(self.layers, x_NxD, cache.keys, cache.values)
        last_BxD = self.norm(x_NxD.reshape(batch, length, -1)[:, -1])
        return self.logits(last_BxD), Cache(keys, values, cache.length + length)

    def logits(self, x_NxD: jax.Array) -> jax.Array:
        """Returns logits (N, V) of the result of `decode`."""
        return self.embed.attend(x_NxD, rows_of(x_NxD)) if self.config.tied else self.head(x_NxD)

    @property
    def output(self) -> tuple[jax.Array, int]:
        """Returns the head's matrix and its vocabulary axis."""
        return (self.embed.embedding[...], 0) if self.config.tied else (self.head.kernel[...], 1)
