"""A small GPT in Flax Linen, in FP8 with an 8-bit optimizer: python examples/nanogpt_linen.py [recipe] [steps]

It reads bytes of Python's own sources. Two lines differ from a bf16 script: `quantize`, and the train state.
"""

import argparse as source_of_text
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import fp8jax

LAYERS, HEADS, WIDTH, LENGTH, BATCH = 2, 4, 128, 64, 16


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.LayerNorm(dtype=x.dtype)(x)
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (nn.Dense(WIDTH, dtype=x.dtype, name=name)(h).reshape(heads) for name in "qkv")
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.Dense(WIDTH, dtype=x.dtype, name="out")(attended.reshape(x.shape))
        h = nn.Dense(4 * WIDTH, dtype=x.dtype, name="up")(nn.LayerNorm(dtype=x.dtype)(x))
        return x + nn.Dense(WIDTH, dtype=x.dtype, name="down")(nn.gelu(h))


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(256, WIDTH, name="embed")(tokens)
        x = (x + nn.Embed(LENGTH, WIDTH, name="place")(jnp.arange(tokens.shape[1]))).astype(jnp.bfloat16)
        for _ in range(LAYERS):
            x = Block()(x)
        return nn.Dense(256, use_bias=False, name="head")(nn.LayerNorm()(x))


@jax.jit
def train_step(state: fp8jax.linen.TrainState, tokens: jax.Array) -> tuple[fp8jax.linen.TrainState, jax.Array]:
    def loss(params: dict) -> jax.Array:
        logits = state.apply_fn({"params": params}, tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def main(recipe: str = "coat", steps: int = 200) -> list[float]:
    text = np.frombuffer(pathlib.Path(source_of_text.__file__).read_bytes(), np.uint8).astype(np.int32)
    model = GPT() if recipe == "bf16" else fp8jax.linen.quantize(GPT(), recipe)
    params = model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]
    tx = fp8jax.optimizer(recipe, 1e-3, weight_decay=0.1, clip=1.0)
    state = fp8jax.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    draw, losses = np.random.default_rng(0), []
    for step in range(steps):
        starts = draw.integers(0, len(text) - LENGTH - 1, BATCH)
        state, loss = train_step(state, np.stack([text[i : i + LENGTH + 1] for i in starts]))
        losses.append(float(loss))
        if step % 20 == 0:
            print(f"step {step:4d}  loss {losses[-1]:.3f}")
    print(f"{recipe}: loss {losses[0]:.3f} to {losses[-1]:.3f}; {fp8jax.state_bytes(state.opt_state)}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
