"""A mixture of experts of plain JAX, its experts in FP8: python examples/moe.py [recipe] [steps]

`fp8jax.ragged_dot` multiplies the tokens of each expert by its matrix; the router stays as it is. Codes of the tokens
are what is kept for the backward pass. The other products are `fp8jax.transform`'s.
"""

import sys

import jax
import jax.numpy as jnp
import optax

import fp8jax

EXPERTS, WIDTH, INNER, TOKENS = 8, 64, 128, 512


def init(key: jax.Array) -> dict[str, jax.Array]:
    shapes = {
        "mix": (WIDTH, WIDTH),
        "router": (WIDTH, EXPERTS),
        "up": (EXPERTS, WIDTH, INNER),
        "down": (EXPERTS, INNER, WIDTH),
    }
    keys = jax.random.split(key, len(shapes))
    return {n: jax.random.normal(k, s) / s[-2] ** 0.5 for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def experts(params: dict[str, jax.Array], x: jax.Array, recipe: str) -> jax.Array:
    """Each token (TOKENS, WIDTH) through the one expert that the router chose."""
    chance = jax.nn.softmax(x @ params["router"])
    chosen, share = chance.argmax(-1), chance.max(-1)
    order = jnp.argsort(chosen)  # tokens of one expert beside each other
    sizes = jnp.bincount(chosen, length=EXPERTS)
    h = fp8jax.ragged_dot(x[order], params["up"], sizes, recipe=recipe)
    y = fp8jax.ragged_dot(jax.nn.gelu(h), params["down"], sizes, recipe=recipe)
    return share[:, None] * jnp.zeros_like(y).at[order].set(y)


def model(params: dict[str, jax.Array], x: jax.Array, recipe: str) -> jax.Array:
    x = x + jnp.tanh(x @ params["mix"])
    return x + experts(params, x, recipe)


def target(x: jax.Array) -> jax.Array:
    """What tokens are to become depends on which of the first channels is largest."""
    return jnp.roll(x, 1, -1) * (1 + x[:, :EXPERTS].argmax(-1)[:, None] / EXPERTS)


def main(recipe: str = "te_current", steps: int = 200) -> list[float]:
    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean((model(params, x, recipe) - target(x)) ** 2)

    params = init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (TOKENS, WIDTH))
    fast = fp8jax.transform(loss, [fp8jax.Rule("mix", recipe)])
    print(fast.explain(params, x))
    tx = optax.chain(optax.clip_by_global_norm(1.0), fp8jax.compressed_adamw(3e-3, min_size=0))

    @jax.jit
    def step(params, state, key):
        value, grads = jax.value_and_grad(fast)(params, jax.random.normal(key, (TOKENS, WIDTH)))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = tx.init(params), []
    for i in range(steps):
        params, state, value = step(params, state, jax.random.key(i))
        losses.append(float(value))
    print(f"{recipe}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
