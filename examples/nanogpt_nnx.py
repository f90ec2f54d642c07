"""A small GPT in Flax NNX, in FP8 with an 8-bit optimizer: python examples/nanogpt_nnx.py [recipe] [steps]

It reads bytes of Python's own sources. Two lines differ from a bf16 script: `quantize`, and the optimizer.
"""

import argparse as source_of_text
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import fp8jax

LAYERS, HEADS, WIDTH, LENGTH, BATCH = 2, 4, 128, 64, 16


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        kinds = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, **kinds), nnx.LayerNorm(WIDTH, **kinds)
        self.qkv, self.out = nnx.Linear(WIDTH, 3 * WIDTH, **kinds), nnx.Linear(WIDTH, WIDTH, **kinds)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, **kinds), nnx.Linear(4 * WIDTH, WIDTH, **kinds)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.qkv(self.norm1(x)).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        attended = jax.nn.dot_product_attention(*jnp.moveaxis(heads, 2, 0), is_causal=True)
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.place = nnx.Embed(256, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 256, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@nnx.jit
def train_step(model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    def loss(model: GPT) -> jax.Array:
        logits = model(tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def main(recipe: str = "coat", steps: int = 200) -> list[float]:
    text = np.frombuffer(pathlib.Path(source_of_text.__file__).read_bytes(), np.uint8).astype(np.int32)
    model = GPT(nnx.Rngs(0))
    if recipe != "bf16":
        model = fp8jax.nnx.quantize(model, recipe)
    optimizer = fp8jax.nnx.Optimizer(model, fp8jax.optimizer(recipe, 1e-3, weight_decay=0.1, clip=1.0), wrt=nnx.Param)
    draw, losses = np.random.default_rng(0), []
    for step in range(steps):
        starts = draw.integers(0, len(text) - LENGTH - 1, BATCH)
        losses.append(float(train_step(model, optimizer, np.stack([text[i : i + LENGTH + 1] for i in starts]))))
        if step % 20 == 0:
            print(f"step {step:4d}  loss {losses[-1]:.3f}")
    print(f"{recipe}: loss {losses[0]:.3f} to {losses[-1]:.3f}; {fp8jax.state_bytes(optimizer.opt_state)}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
