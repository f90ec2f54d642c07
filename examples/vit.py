"""A small vision transformer in Flax NNX, in FP8: python examples/vit.py [recipe] [steps]

It learns which of eight directions the stripes of an image have. `explain` says what became of each layer.
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import fp8jax

SIDE, PATCH, WIDTH, HEADS, LAYERS, CLASSES, BATCH = 32, 8, 96, 4, 2, 8, 32


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        kinds = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, **kinds), nnx.LayerNorm(WIDTH, **kinds)
        self.attention = nnx.MultiHeadAttention(num_heads=HEADS, in_features=WIDTH, decode=False, **kinds)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, **kinds), nnx.Linear(4 * WIDTH, WIDTH, **kinds)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class ViT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.patches = nnx.Linear(PATCH * PATCH, WIDTH, rngs=rngs)
        self.place = nnx.Param(0.02 * jax.random.normal(rngs.params(), ((SIDE // PATCH) ** 2, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        n = SIDE // PATCH
        cut = images.reshape(-1, n, PATCH, n, PATCH).swapaxes(2, 3).reshape(-1, n * n, PATCH * PATCH)
        x = (self.patches(cut) + self.place[...]).astype(jnp.bfloat16)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def stripes(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Images (BATCH, SIDE, SIDE) of noisy stripes, and their directions."""
    keys = jax.random.split(key, 3)
    labels = jax.random.randint(keys[0], (BATCH,), 0, CLASSES)
    angle, phase = jnp.pi * labels / CLASSES, jax.random.uniform(keys[1], (BATCH,), maxval=6.28)
    y, x = jnp.mgrid[:SIDE, :SIDE]
    wave = x * jnp.cos(angle)[:, None, None] + y * jnp.sin(angle)[:, None, None]
    return jnp.sin(wave + phase[:, None, None]) + 0.5 * jax.random.normal(keys[2], (BATCH, SIDE, SIDE)), labels


@nnx.jit
def train_step(model: ViT, optimizer: nnx.Optimizer, key: jax.Array) -> jax.Array:
    images, labels = stripes(key)

    def loss(model: ViT) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(images).astype(jnp.float32), labels).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def main(recipe: str = "coat", steps: int = 150) -> list[float]:
    rules = [fp8jax.Rule("patches", None), recipe]  # the first layer reads the image itself
    print(fp8jax.explain(ViT(nnx.Rngs(0)), rules))
    model = fp8jax.nnx.quantize(ViT(nnx.Rngs(0)), rules)
    optimizer = fp8jax.nnx.Optimizer(model, fp8jax.optimizer(recipe, 1e-3, clip=1.0), wrt=nnx.Param)
    losses = [float(train_step(model, optimizer, jax.random.key(i))) for i in range(steps)]
    print(f"{recipe}: loss {losses[0]:.3f} to {sum(losses[-5:]) / 5:.3f}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
