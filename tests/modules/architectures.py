"""Two public architectures in plain Flax, and a task that they learn in seconds.

`MiniGPT` is that of the JAX AI Stack's tutorial on language models in Flax NNX (nnx.MultiHeadAttention, ReLU, norms
after the residual sums, its own output layer). `Nanodo` is that of google-deepmind/nanodo in Flax Linen
(nn.DenseGeneral projections, GELU, pre-norms, logits from `Embed.attend`). Both are our own code, without dropout.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.programs import jit_long

VOCAB, LENGTH, WIDTH, HEADS, FEEDFORWARD, LAYERS = 16, 32, 64, 2, 128, 2
STEPS, BATCH, SEEDS = 64, 16, 3


class MiniBlock(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        kinds = {"dtype": dtype, "rngs": rngs}
        self.mha = nnx.MultiHeadAttention(num_heads=HEADS, in_features=WIDTH, decode=False, **kinds)
        self.layer_norm1 = nnx.LayerNorm(WIDTH, epsilon=1e-6, **kinds)
        self.linear1 = nnx.Linear(WIDTH, FEEDFORWARD, **kinds)
        self.linear2 = nnx.Linear(FEEDFORWARD, WIDTH, **kinds)
        self.layer_norm2 = nnx.LayerNorm(WIDTH, epsilon=1e-6, **kinds)

    def __call__(self, x: jax.Array) -> jax.Array:
        causal = jnp.tril(jnp.ones((x.shape[-2], x.shape[-2]), bool))
        x = self.layer_norm1(x + self.mha(x, mask=causal))
        return self.layer_norm2(x + self.linear2(jax.nn.relu(self.linear1(x))))


class MiniGPT(nnx.Module):
    def __init__(self, dtype: Any = jnp.bfloat16, *, rngs: nnx.Rngs) -> None:
        self.token_emb = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.pos_emb = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.transformer_blocks = nnx.List([MiniBlock(dtype, rngs) for _ in range(LAYERS)])
        self.output_layer = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.token_emb(tokens) + self.pos_emb(jnp.arange(tokens.shape[-1]))
        for block in self.transformer_blocks:
            x = block(x)
        return self.output_layer(x)


class CausalAttention(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        project = functools.partial(nn.DenseGeneral, features=(HEADS, WIDTH // HEADS), use_bias=False, dtype=self.dtype)
        q, k, v = (project(name=name)(x) for name in ("query", "key", "value"))
        weights = jnp.einsum("...qhd,...khd->...hqk", q / (WIDTH // HEADS) ** 0.5, k).astype(jnp.float32)
        causal = jnp.tril(jnp.ones(weights.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(causal, weights, -1e9)).astype(v.dtype)
        mixed = jnp.einsum("...hqk,...khd->...qhd", weights, v)
        return nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, dtype=self.dtype, name="attn_out_proj")(mixed)


class Mlp(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        return dense(WIDTH)(jax.nn.gelu(dense(FEEDFORWARD)(x)))


class NanodoBlock(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=self.dtype)
        x = x + CausalAttention(self.dtype)(norm()(x))
        return x + Mlp(self.dtype)(norm()(x))


class Nanodo(nn.Module):
    dtype: Any = jnp.bfloat16
    remat: bool = False

    def setup(self) -> None:
        self.embed = nn.Embed(VOCAB, WIDTH)
        self.pos_embed = nn.Embed(LENGTH, WIDTH)
        block = nn.remat(NanodoBlock) if self.remat else NanodoBlock
        self.blocks = [block(self.dtype) for _ in range(LAYERS)]
        self.out_ln = nn.LayerNorm(use_bias=False, dtype=self.dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.pos_embed(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.out_ln(x).astype(jnp.float32))


@functools.cache
def batches() -> np.ndarray:
    """Returns text (steps, batch, length + 1) in which two tokens determine the next one in 9 of 10 cases."""
    rng = np.random.default_rng(0)
    table = rng.integers(0, VOCAB, (VOCAB, VOCAB))
    text = np.zeros((STEPS, BATCH, LENGTH + 1), np.int32)
    text[..., :2] = rng.integers(0, VOCAB, (STEPS, BATCH, 2))
    for t in range(2, LENGTH + 1):
        noise = rng.integers(0, VOCAB, (STEPS, BATCH))
        follows = table[text[..., t - 2], text[..., t - 1]]
        text[..., t] = np.where(rng.random((STEPS, BATCH)) < 0.9, follows, noise)
    return text


def train(init: Callable[[jax.Array], Any], logits: Callable[[Any, jax.Array], jax.Array]) -> np.ndarray:
    """Returns losses (seeds, steps) of Adam from `init(key)`. All seeds see the same data in the same order."""
    optimizer = optax.flatten(optax.adam(3e-3))

    def loss(params: Any, text: jax.Array) -> jax.Array:
        y = logits(params, text[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(y, text[:, 1:]).mean()

    def step(carry: Any, text: jax.Array) -> Any:
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, text)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    def run(key: jax.Array) -> jax.Array:
        params = init(key)
        return jax.lax.scan(step, (params, optimizer.init(params)), batches())[1]

    return np.asarray(jit_long(jax.vmap(run))(jax.random.split(jax.random.key(0), SEEDS)))


def within_noise(losses: np.ndarray, baseline: np.ndarray) -> bool:
    """Returns whether the final losses differ from the baseline's of the same seed by less than seeds differ."""
    end, base = (x[:, -STEPS // 8 :].mean(1) for x in (losses, baseline))
    return bool((np.abs(end - base) <= base.max() - base.min()).all())


def starve_gradients(quantize: Callable) -> Callable:
    """A quantizer whose e5m2 scales are 2^30 too large: only the largest values of each gradient survive."""

    def broken(x: jax.Array, rows: Any, columns: Any = None, *, scale: Any = None, **settings: Any) -> Any:
        if any(str(spec).startswith("e5m2") for spec in (rows, columns)):
            scale = jnp.max(jnp.abs(x)).astype(jnp.float32) * 2.0**30 / 57344
        return quantize(x, rows, columns, scale=scale, **settings)

    return broken


class Lm1b(nn.Module):
    """As Flax's example lm1b: a decoder whose logits come from a layer named logitdense, or another name."""

    head: str = "logitdense"

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = NanodoBlock(None)(nn.Embed(VOCAB, WIDTH)(tokens))
        return nn.Dense(VOCAB, name=self.head)(nn.LayerNorm()(x)).astype(jnp.float32)


class Experts(nn.Module):
    """A mixture of experts. A router's probabilities or largest logits weight the results of the experts."""

    router: str = "router"
    experts: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        logits = nn.Dense(self.experts, use_bias=False, name=self.router)(x.astype(jnp.float32))
        best, chosen = jax.lax.top_k(jax.nn.softmax(logits), 2)
        weights = jnp.sum(jax.nn.one_hot(chosen, self.experts) * best[..., None], axis=-2)
        results = [Mlp(None, name=f"expert_{i}")(x) for i in range(self.experts)]
        return x + jnp.einsum("...e,...de->...d", weights, jnp.stack(results, -1))


class ResNet(nn.Module):
    """Convolutions, a projection, and a classifier without a name."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(8, (3, 3))(images)).mean(axis=(1, 2))
        x = nn.relu(nn.Dense(WIDTH, name="neck")(x))
        return nn.Dense(10)(x).astype(jnp.float32)


class Conv1D(nn.Module):
    """A linear layer as transformers' FlaxConv1D, with a kernel (outputs, inputs)."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.normal(0.1), (self.features, x.shape[-1]))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return jax.lax.dot_general(x, kernel.T, (((x.ndim - 1,), (0,)), ((), ()))) + bias


class Gpt2(nn.Module):
    """As Flax's GPT-2: all layers are of a custom class, except the tied head, which is called through `apply`."""

    def setup(self) -> None:
        self.wte = nn.Embed(VOCAB, WIDTH)
        self.up, self.down = Conv1D(FEEDFORWARD), Conv1D(WIDTH)
        self.ln_f, self.lm_head = nn.LayerNorm(), nn.Dense(VOCAB, use_bias=False)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.wte(tokens)
        x = self.ln_f(x + self.down(nn.gelu(self.up(x))))
        shared = self.wte.variables["params"]["embedding"].T
        return self.lm_head.apply({"params": {"kernel": shared}}, x)


class Einsum(nn.Module):
    """A matmul as in Gemma: the weight is named w, and the subscripts are an argument."""

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, subscripts: str, x: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, x, self.param("w", nn.initializers.normal(0.1), self.shape))


class Gemma(nn.Module):
    """Matmuls of a custom class, a custom norm, and a Dense layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = OwnNorm(name="norm")(x)
        gate, up = Einsum((2, WIDTH, FEEDFORWARD), name="gating_up")("btd,zdf->zbtf", h)
        x = x + Einsum((FEEDFORWARD, WIDTH), name="linear")("btf,fd->btd", nn.gelu(gate) * up)
        return x + nn.Dense(WIDTH, name="last")(x)


class OwnNorm(nn.Module):
    """A handwritten RMSNorm."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.zeros, x.shape[-1:])
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (1 + scale)


class NnxExperts(nnx.Module):
    """The mixture of experts in NNX: experts as arrays, and a router with a generic name."""

    def __init__(self, rngs: nnx.Rngs, name: str = "choose", experts: int = 4) -> None:
        self.name = name
        setattr(self, name, nnx.Linear(WIDTH, experts, use_bias=False, rngs=rngs))
        self.norm, self.out = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.w = nnx.Param(jax.random.normal(rngs.params(), (experts, WIDTH, WIDTH)) / 8)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norm(x)
        best, chosen = jax.lax.top_k(getattr(self, self.name)(h), 2)
        weights = jnp.sum(jax.nn.one_hot(chosen, len(self.w[...])) * jax.nn.softmax(best)[..., None], axis=-2)
        return x + self.out(jnp.einsum("...e,...d,edf->...f", weights, h, self.w[...]))


class NnxCnn(nnx.Module):
    """As NNX's tutorial on MNIST: two convolutions, then linear1 and linear2, the classifier."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.linear1, self.linear2 = nnx.Linear(8, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.linear2(nnx.relu(self.linear1(nnx.relu(self.conv(images)).mean(axis=(1, 2)))))
