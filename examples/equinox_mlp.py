"""An Equinox model in FP8: python examples/equinox_mlp.py [recipe] [steps]   (pip install equinox)

A loss is a function of the model, which is a pytree: `fp8jax.transform` takes it, and Equinox differentiates what comes
back. No class of the model is known to fp8jax.
"""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp

import fp8jax


class MLP(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        first, second = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(64)
        self.up, self.down = eqx.nn.Linear(64, 256, key=first), eqx.nn.Linear(256, 64, key=second)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


def loss(model: MLP, x: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(model)(x) - jnp.sin(3 * x)) ** 2)


def main(recipe: str = "coat", steps: int = 200) -> list[float]:
    model = MLP(jax.random.key(0))
    fast = fp8jax.filter_transform(loss, recipe)
    print(fast.explain(model, jnp.ones((64, 64))))
    tx = fp8jax.compressed_adamw(3e-3, min_size=0)
    state = tx.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, state, key):
        value, grads = eqx.filter_value_and_grad(fast)(model, jax.random.normal(key, (64, 64)))
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    losses = []
    for i in range(steps):
        model, state, value = step(model, state, jax.random.key(i))
        losses.append(float(value))
    print(f"{recipe}: loss {losses[0]:.3f} to {losses[-1]:.3f}; {fp8jax.state_bytes(state)}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
