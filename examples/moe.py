"""A mixture of experts in Flax NNX, its experts in FP8: python examples/moe.py [recipe] [steps]

The model is plain Flax and JAX: tokens are sorted by expert, and `jax.lax.ragged_dot` multiplies those of each expert
by its matrix. `fp8jax.nnx.quantize` replaces these products. The router stays in 16 bits.
"""

import sys

import jax
import jax.numpy as jnp
from flax import nnx

import fp8jax

EXPERTS, CHOSEN, WIDTH, INNER, TOKENS = 8, 2, 64, 64, 512


class MoE(nnx.Module):
    """The sum over the chosen experts of a token of weight * down(silu(gate(x)) * up(x))."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.gate_up = nnx.Param(init(rngs.params(), (EXPERTS, WIDTH, 2 * INNER)))
        self.down = nnx.Param(init(rngs.params(), (EXPERTS, INNER, WIDTH)))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The result (tokens, WIDTH), and the load-balancing loss of Switch Transformer, eq. 4."""
        probabilities = jax.nn.softmax(self.router(x))
        weights, experts = jax.lax.top_k(probabilities, CHOSEN)
        order = jnp.argsort(experts.reshape(-1))  # choices, those of one expert beside each other
        sizes = jnp.bincount(experts.reshape(-1), length=EXPERTS)
        gate, up = jnp.split(jax.lax.ragged_dot(x[order // CHOSEN], self.gate_up[...], sizes), 2, -1)
        y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, self.down[...], sizes)
        y = y[jnp.argsort(order)].reshape(*weights.shape, WIDTH)
        balance = EXPERTS * jnp.sum(sizes / len(x) * probabilities.mean(0))
        return jnp.einsum("tk,tkd->td", weights, y), balance


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.mixer, self.moe = nnx.Linear(WIDTH, WIDTH, rngs=rngs), MoE(rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + jnp.tanh(self.mixer(x))
        y, balance = self.moe(x)
        return x + y, balance


def target(x: jax.Array) -> jax.Array:
    """A function of a token that depends on which of its first channels is the largest."""
    return jnp.roll(x, 1, -1) * (1 + x[:, :EXPERTS].argmax(-1)[:, None] / EXPERTS)


def main(recipe: str = "coat", steps: int = 200) -> list[float]:
    model = fp8jax.nnx.quantize(Model(nnx.Rngs(0)), recipe)
    optimizer = fp8jax.nnx.Optimizer(model, fp8jax.optimizer(recipe, 3e-3, clip=1.0), wrt=nnx.Param)
    print(fp8jax.explain(model, jnp.zeros((TOKENS, WIDTH))))

    @nnx.jit
    def train_step(model: Model, optimizer: fp8jax.nnx.Optimizer, key: jax.Array) -> jax.Array:
        x = jax.random.normal(key, (TOKENS, WIDTH))

        def loss_fn(model: Model) -> tuple[jax.Array, jax.Array]:
            y, balance = model(x)
            error = jnp.mean((y - target(x)) ** 2)
            return error + 0.01 * balance, error

        (_, error), grads = fp8jax.nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        return error

    losses = [float(train_step(model, optimizer, jax.random.key(i))) for i in range(steps)]
    print(f"{recipe}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
