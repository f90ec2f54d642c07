"""A plain Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied or untied head.

With `norm="layer"` it is an OLMo, whose norms are LayerNorms without parameters (Groeneveld et al., 2024, section 2.1).

Layers are Flax's own, stacked along a leading axis by `nnx.vmap` and run by `nnx.scan`, so that one block is compiled
whatever the depth. Shapes stand in the names: B sequences, T positions, N = B x T tokens, D width, H query heads, K key
heads, C channels of a head, V vocabulary. The residual stream is kept as (N, D): XLA on CPU has a fast path for the
weight gradient of a 2-D matrix product in bf16 and none for a 3-D one (12 times slower).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama. `validate` says which combinations are possible.

    Attributes:
        vocab: rows of the embedding table.
        dim: width of the residual stream.
        layers: number of blocks.
        heads: query heads; `dim / heads` channels each.
        kv_heads: key and value heads, shared by `heads / kv_heads` query heads each.
        mlp_dim: width inside the SwiGLU.
        tied: whether the output head is the transposed embedding table.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in RMSNorm, to the variance in LayerNorm.
        norm: "rms", with a scale, or "layer", with neither scale nor bias.
    """

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    mlp_dim: int
    tied: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    norm: str = "rms"

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.dim // self.heads

    def validate(self) -> None:
        """Raises ValueError that names the first impossible value."""
        for name in ("vocab", "dim", "layers", "heads", "kv_heads", "mlp_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not divisible by heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head size, got dim/heads = {self.head_dim}")
        if self.norm not in ("rms", "layer"):
            raise ValueError(f"norm must be rms or layer, got {self.norm!r}")


def rope_tables(length: int, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every rotary angle: two float32 arrays (length, head_dim / 2)."""
    frequency_c = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle_TxC = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency_c[None, :]
    return jnp.cos(angle_TxC), jnp.sin(angle_TxC)


def apply_rope(x_BxTxHxC: jax.Array, cos_TxC: jax.Array, sin_TxC: jax.Array) -> jax.Array:
    """Rotates channel c against channel c + C/2 by the position's angle, in float32; returns the input's dtype."""
    first, second = jnp.split(x_BxTxHxC.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_TxC[None, :, None, :], sin_TxC[None, :, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BxTxHxC.dtype)


# Rows of an embedding table up to which a product with one-hot rows is the faster lookup.
ONE_HOT = 1024


def _linear(
    inner: int, outer: int, std: float, dtype: jax.typing.DTypeLike, param_dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
) -> nnx.Linear:
    init = nnx.initializers.normal(std)
    return nnx.Linear(inner, outer, use_bias=False, kernel_init=init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)


def _norm(config: LlamaConfig, **kinds: Any) -> nnx.RMSNorm | nnx.LayerNorm:
    if config.norm == "rms":
        return nnx.RMSNorm(config.dim, epsilon=config.norm_eps, **kinds)
    return nnx.LayerNorm(config.dim, epsilon=config.norm_eps, use_scale=False, use_bias=False, **kinds)


def attend(q_BxTxHxC: jax.Array, k_BxTxKxC: jax.Array, v_BxTxKxC: jax.Array, *, is_causal: bool) -> jax.Array:
    """Softmax attention by the fastest implementation of the default device; (B, T, H, C)."""
    # cuDNN's flash attention exists for 16-bit types on NVIDIA GPUs only.
    flash = jax.default_backend() == "gpu" and q_BxTxHxC.dtype in (jnp.bfloat16, jnp.float16)
    return jax.nn.dot_product_attention(
        q_BxTxHxC, k_BxTxKxC, v_BxTxKxC, is_causal=is_causal, implementation="cudnn" if flash else "xla"
    )


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
        self.config, self.rows, width = config, rows, config.kv_heads * config.head_dim
        out_std = 0.02 / (2 * config.layers) ** 0.5
        self.q = _linear(config.dim, config.dim, 0.02, dtype, param_dtype, rngs)
        self.k = _linear(config.dim, width, 0.02, dtype, param_dtype, rngs)
        self.v = _linear(config.dim, width, 0.02, dtype, param_dtype, rngs)
        self.out = _linear(config.dim, config.dim, out_std, dtype, param_dtype, rngs)

    def __call__(self, x_NxD: jax.Array, cos_TxC: jax.Array, sin_TxC: jax.Array) -> jax.Array:
        length, channels = cos_TxC.shape[0], self.config.head_dim
        split = (x_NxD.shape[0] // length, length)
        q_BxTxHxC = apply_rope(_reshaped(self.q(x_NxD), *split, self.config.heads, channels), cos_TxC, sin_TxC)
        k_BxTxKxC = apply_rope(_reshaped(self.k(x_NxD), *split, self.config.kv_heads, channels), cos_TxC, sin_TxC)
        v_BxTxKxC = _reshaped(self.v(x_NxD), *split, self.config.kv_heads, channels)
        qkv = (rows_on(x, self.rows) for x in (q_BxTxHxC, k_BxTxKxC, v_BxTxKxC))
        mixed_BxTxHxC = attend(*qkv, is_causal=True)
        return self.out(_reshaped(mixed_BxTxHxC, *x_NxD.shape))


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(
        self, config: LlamaConfig, *, dtype: jax.typing.DTypeLike, param_dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ) -> None:
        out_std = 0.02 / (2 * config.layers) ** 0.5
        self.gate = _linear(config.dim, config.mlp_dim, 0.02, dtype, param_dtype, rngs)
        self.up = _linear(config.dim, config.mlp_dim, 0.02, dtype, param_dtype, rngs)
        self.down = _linear(config.mlp_dim, config.dim, out_std, dtype, param_dtype, rngs)

    def __call__(self, x_NxD: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x_NxD)) * self.up(x_NxD))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x))."""

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
        self.rows = rows
        self.attention_norm = _norm(config, **kinds)
        self.attention = Attention(config, rows=rows, **kinds)
        self.mlp_norm = _norm(config, **kinds)
        self.mlp = SwiGLU(config, **kinds)

    def __call__(self, x_NxD: jax.Array, cos_TxC: jax.Array, sin_TxC: jax.Array) -> jax.Array:
        x_NxD = rows_on(x_NxD, self.rows)
        x_NxD = x_NxD + self.attention(self.attention_norm(x_NxD), cos_TxC, sin_TxC)
        return x_NxD + self.mlp(self.mlp_norm(x_NxD))


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

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, rows=rows, rngs=rngs, **kinds)

        self.layers = stack(rngs)
        self.norm = _norm(config, rngs=rngs, **kinds)
        if not config.tied:
            self.head = _linear(config.dim, config.vocab, 0.02, dtype, param_dtype, rngs)

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """Integer tokens (B, T) to logits (B, T, V) in the compute dtype."""
        x_NxD = self.decode(self.embed(_reshaped(tokens_BxT, tokens_BxT.size)), tokens_BxT.shape[1])
        return _reshaped(self.logits(x_NxD), *tokens_BxT.shape, self.config.vocab)

    def decode(self, x_NxD: jax.Array, length: int) -> jax.Array:
        """Embedded sequences of a length T, one after the other in N, to what the head reads, (N, D)."""
        cos_TxC, sin_TxC = rope_tables(length, self.config.head_dim, self.config.rope_theta)

        def block(layer: Block, x_NxD: jax.Array) -> jax.Array:
            if self.around is not None:
                return self.around(layer, lambda layer: layer(x_NxD, cos_TxC, sin_TxC))
            return layer(x_NxD, cos_TxC, sin_TxC)

        if self.remat or self.around is not None:
            policy = self.around.policy if self.around is not None and not self.remat else None
            block = nnx.remat(block, policy=products_saveable if self.remat == "products" else policy)
        x_NxD = nnx.scan(block, in_axes=(0, nnx.Carry), out_axes=nnx.Carry, unroll=self.unroll)(self.layers, x_NxD)
        return self.norm(rows_on(x_NxD, self.rows))

    def logits(self, x_NxD: jax.Array) -> jax.Array:
        """What `decode` returned to logits (N, V)."""
        return self.embed.attend(x_NxD, _rows_of(x_NxD)) if self.config.tied else self.head(x_NxD)
