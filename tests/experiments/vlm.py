"""A small vision-language model: a ViT encodes the image, a projector maps it to tokens, a Llama decodes.

The vision tower is a plain pre-norm ViT (LayerNorm, Flax's own attention, GELU, biases). Names of shapes are those of
experiments/models/llama.py; P is patches per image, W the width of the vision tower.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.models.llama import Llama, LlamaConfig, attend


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """The shape of a vision tower. `validate` says which combinations are possible.

    Attributes:
        image: rows and columns of an image, in pixels of three colours.
        patch: rows and columns of a patch.
        dim: width of the residual stream.
        layers: number of blocks.
        heads: attention heads; `dim / heads` channels each.
        mlp_dim: width inside the MLP.
        norm_eps: added to the variance in LayerNorm.
    """

    image: int
    patch: int
    dim: int
    layers: int
    heads: int
    mlp_dim: int
    norm_eps: float = 1e-6

    @property
    def patches(self) -> int:
        """Patches of an image, P."""
        return (self.image // self.patch) ** 2

    def validate(self) -> None:
        """Raises ValueError that names the first impossible value."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{field.name} must be positive, got {getattr(self, field.name)}")
        if self.image % self.patch:
            raise ValueError(f"image {self.image} is not divisible by patch {self.patch}")
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not divisible by heads {self.heads}")


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> jax.Array:
    return attend(query, key, value, is_causal=False)


class MLP(nnx.Module):
    """down(gelu(up(x))), with biases."""

    def __init__(self, inner: int, width: int, outer: int, **kinds: Any) -> None:
        self.up, self.down = nnx.Linear(inner, width, **kinds), nnx.Linear(width, outer, **kinds)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


class EncoderBlock(nnx.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)), without a mask."""

    def __init__(self, config: ViTConfig, **kinds: Any) -> None:
        self.attention_norm = nnx.LayerNorm(config.dim, epsilon=config.norm_eps, **kinds)
        self.attention = nnx.MultiHeadAttention(
            config.heads, config.dim, decode=False, attention_fn=_attend, keep_rngs=False, **kinds
        )
        self.mlp_norm = nnx.LayerNorm(config.dim, epsilon=config.norm_eps, **kinds)
        self.mlp = MLP(config.dim, config.mlp_dim, config.dim, **kinds)

    def __call__(self, x_BxPxW: jax.Array) -> jax.Array:
        x_BxPxW = x_BxPxW + self.attention(self.attention_norm(x_BxPxW))
        return x_BxPxW + self.mlp(self.mlp_norm(x_BxPxW))


class ViT(nnx.Module):
    """Maps images (B, rows, columns, 3) to a token per patch, (B, P, W). Blocks are stacked and scanned."""

    def __init__(self, config: ViTConfig, *, remat: bool = False, rngs: nnx.Rngs, **kinds: Any) -> None:
        config.validate()
        self.config, self.remat = config, remat
        self.embed_patch = nnx.Linear(3 * config.patch**2, config.dim, rngs=rngs, **kinds)
        init = nnx.initializers.normal(0.02)
        self.embed_position = nnx.Embed(config.patches, config.dim, embedding_init=init, rngs=rngs, **kinds)

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> EncoderBlock:
            return EncoderBlock(config, rngs=rngs, **kinds)

        self.layers = stack(rngs)
        self.norm = nnx.LayerNorm(config.dim, epsilon=config.norm_eps, rngs=rngs, **kinds)

    def __call__(self, images: jax.Array) -> jax.Array:
        config, patch = self.config, self.config.patch
        side = config.image // patch
        x = images.reshape(-1, side, patch, side, patch, 3).swapaxes(2, 3)
        x = self.embed_patch(x.reshape(-1, config.patches, 3 * patch**2))
        x_BxPxW = x + self.embed_position(jnp.arange(config.patches))

        def block(layer: EncoderBlock, x_BxPxW: jax.Array) -> jax.Array:
            return layer(x_BxPxW)

        if self.remat:
            block = nnx.remat(block)
        return self.norm(nnx.scan(block, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x_BxPxW))


class VLM(nnx.Module):
    """Images and the tokens so far to logits of the next ones.

    Args:
        vision: the shape of the vision tower.
        text: the shape of the decoder.
        dtype: what is computed in.
        param_dtype: what parameters are stored in.
        remat: keep only each block's input for the backward pass and compute the rest again.
        rngs: source of the initial parameters.

    Raises:
        ValueError: a configuration is impossible.
    """

    def __init__(
        self,
        vision: ViTConfig,
        text: LlamaConfig,
        *,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        remat: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        kinds: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.vision = ViT(vision, remat=remat, **kinds)
        self.projector = MLP(vision.dim, text.dim, text.dim, **kinds)
        self.decoder = Llama(text, remat=remat, **kinds)

    def __call__(self, images: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
        """Returns logits (B, T, V), in the compute dtype, of images (B, rows, columns, 3) and integer tokens (B, T)."""
        batch, length = tokens_BxT.shape
        image_BxPxD = self.projector(self.vision(images))
        text_BxTxD = self.decoder.embed(tokens_BxT.reshape(-1)).reshape(batch, length, -1)
        x_BxSxD = jnp.concatenate([image_BxPxD, text_BxTxD], axis=1)
        x_NxD = self.decoder.decode(x_BxSxD.reshape(-1, x_BxSxD.shape[-1]), x_BxSxD.shape[1])
        read_BxTxD = x_NxD.reshape(x_BxSxD.shape)[:, -length:]
        return self.decoder.logits(read_BxTxD.reshape(-1, x_NxD.shape[-1])).reshape(batch, length, -1)


def caption_loss(model: VLM, images: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of each next token of the captions (B, T + 1), float32."""
    logits_BxTxV = model(images, tokens_BxT[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, tokens_BxT[:, 1:]).mean()


COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0)}
SHAPES = ("square", "disc", "cross")
WORDS = (".", "a", *COLOURS, *SHAPES, "at", "top", "bottom", "left", "right")


def pairs(seed: int, count: int, size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Coloured shapes on noise and what they are: ". a red disc at top left", as indices of `WORDS`.

    Args:
        seed: the same seed gives the same pairs; others, other noise.
        count: how many.
        size: rows and columns of an image, at least 16.

    Returns:
        Images (count, size, size, 3), float32, and captions (count, 7), int32.
    """
    rng = np.random.default_rng(seed)
    colour, shape, down, right = (rng.integers(0, n, count) for n in (len(COLOURS), len(SHAPES), 2, 2))
    centre = (np.stack([down, right], 1) + 0.5) * size / 2 - 0.5 + rng.integers(-1, 2, (count, 2))
    row, column = (np.abs(np.arange(size) - centre[:, i, None]) for i in (0, 1))
    row, column, radius = row[:, :, None], column[:, None, :], size / 6
    inside = np.select(
        [shape[:, None, None] == i for i in range(3)],
        [
            np.maximum(row, column) <= radius,
            row**2 + column**2 <= radius**2,
            (np.minimum(row, column) < 1) & (np.maximum(row, column) <= radius),
        ],
    )
    images = inside[..., None] * np.array(list(COLOURS.values()))[colour][:, None, None]
    images = images + 0.1 * rng.normal(size=(count, size, size, 3))
    first = np.array([WORDS.index(w) for w in (".", "a", "red", "square", "at", "top", "left")])
    captions = first + np.stack([0 * colour, 0 * colour, colour, shape, 0 * colour, down, right], 1)
    return images.astype(np.float32), captions.astype(np.int32)
