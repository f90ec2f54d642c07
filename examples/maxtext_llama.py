"""A MaxText model in FP8 with an 8-bit optimizer: python examples/maxtext_llama.py [recipe] [steps]

MaxText's Llama is as it comes, read from its own config (`pip install --no-deps maxtext`, and what its import then asks
for; without its `cuda12` and `tpu` extras). It reads bytes of Python's own sources.
"""

import argparse as source_of_text
import os
import pathlib
import sys

os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
import optax
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils, model_creation_utils

import fp8jax

LENGTH, BATCH = 64, 16
SETTINGS = {
    "run_name": "fp8jax",
    "base_emb_dim": 128,
    "base_mlp_dim": 256,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 32,
    "base_num_decoder_layers": 2,
    "vocab_size": 256,
    "max_target_length": LENGTH,
    "per_device_batch_size": BATCH,
    "attention": "dot_product",
    "scan_layers": False,
    "hardware": jax.default_backend(),
    "enable_checkpointing": False,
    "skip_jax_distributed_system": True,
    "log_config": False,
}


@nnx.jit
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    places = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))

    def loss(model: nnx.Module) -> jax.Array:
        logits = model(tokens[:, :-1], places, jnp.ones_like(places)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def main(recipe: str = "coat", steps: int = 200) -> list[float]:
    base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
    config = pyconfig.initialize(["", str(base), *(f"{name}={value}" for name, value in SETTINGS.items())])
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    text = np.frombuffer(pathlib.Path(source_of_text.__file__).read_bytes(), np.uint8).astype(np.int32)
    draw, losses = np.random.default_rng(0), []
    with jax.set_mesh(mesh):
        model = model_creation_utils.create_model(config, mesh, rngs=nnx.Rngs(params=0, dropout=1))
        if recipe != "bf16":
            model = fp8jax.nnx.quantize(model, recipe)
        optimizer = nnx.Optimizer(model, fp8jax.optimizer(recipe, 1e-3, clip=1.0), wrt=nnx.Param)
        for _ in range(steps):
            starts = draw.integers(0, len(text) - LENGTH - 1, BATCH)
            losses.append(float(train_step(model, optimizer, np.stack([text[i : i + LENGTH + 1] for i in starts]))))
    print(f"{recipe}: loss {losses[0]:.3f} to {losses[-1]:.3f}; {fp8jax.state_bytes(optimizer.opt_state)}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
