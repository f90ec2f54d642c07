"""What a user writes: an NNX model in FP8, 8-bit AdamW in Flax's optimizer, JAX's default mesh, Orbax.

`python user_script.py FOLDER` trains on all devices, saves, restores into a new model, and takes one more step in both.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import fp8jax


class Model(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.head = nnx.RMSNorm(128, rngs=rngs), nnx.Linear(128, 64, rngs=rngs)
        self.up, self.down = nnx.Linear(128, 256, rngs=rngs), nnx.Linear(256, 128, rngs=rngs)

    def __call__(self, x):
        return self.head(x + self.down(nnx.silu(self.up(self.norm(x)))))


def create(seed):
    model = fp8jax.nnx.quantize(Model(nnx.Rngs(seed)), fp8jax.recipes.coat())
    return model, nnx.Optimizer(model, fp8jax.compressed_adamw(3e-3), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - jnp.sin(x[..., :64])) ** 2))(model)
    optimizer.update(model, grads)
    return loss


mesh = jax.make_mesh((jax.device_count(),), ("data",))
jax.set_mesh(mesh)
sharding = NamedSharding(mesh, PartitionSpec("data"))
batches = [jax.device_put(jax.random.normal(jax.random.key(i), (16, 32, 128)), sharding) for i in range(21)]
model, optimizer = create(seed=0)
losses = [float(step(model, optimizer, x)) for x in batches[:20]]
print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} on {jax.device_count()} devices")

path = pathlib.Path(sys.argv[1]).resolve() / "state"
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, nnx.state((model, optimizer)))
    checkpointer.wait_until_finished()
    other = create(seed=1)
    nnx.update(other, checkpointer.restore(path, nnx.state(other)))
print(f"next loss {float(step(model, optimizer, batches[20]))}, restored {float(step(*other, batches[20]))}")
