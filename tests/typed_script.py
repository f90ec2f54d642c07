"""A script with types, as users write it: mypy and pyright read it, both strict (`make check`, `make release`)."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

import fp8jax


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.up(x)))


def part(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jax.nn.silu(x @ p["gate"]) @ p["down"]


def recipe_of(name: str) -> fp8jax.Recipe:
    recipe = fp8jax.recipes.get(name)
    return dataclasses.replace(recipe, optimizer=fp8jax.recipes.Optimizer(mu="e4m3", nu="bf16"))


def loss(model: Model, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - x) ** 2)


def main() -> None:
    x = jax.random.normal(jax.random.key(0), (8, 64))
    recipe = recipe_of("te_current")
    print(recipe.explain(), recipe.linear.products()["forward"])
    rules: list[fp8jax.Rule | fp8jax.Recipe] = [fp8jax.Rule("down", None), recipe]
    model = fp8jax.nnx.quantize(Model(nnx.Rngs(0)), rules)
    optimizer = fp8jax.nnx.Optimizer(model, fp8jax.optimizer(recipe, 1e-3, clip=1.0), wrt=nnx.Param)
    grads = nnx.grad(loss)(model, x)
    optimizer.update(model, grads)
    report: str = str(fp8jax.explain(Model(nnx.Rngs(0)), rules))
    print(report)

    weights = {
        "gate": jax.random.normal(jax.random.key(1), (64, 128)),
        "down": jax.random.normal(jax.random.key(2), (128, 64)),
    }
    tx = fp8jax.compressed_adamw(1e-3, weight_decay=0.1, mask=None, min_size=0)
    state = tx.init(weights)
    _, state = tx.update(weights, state, weights)
    sizes: dict[str, int] = fp8jax.state_bytes(state)
    y = fp8jax.linear(part(weights, x), weights["gate"], recipe="coat")
    codes = fp8jax.quantize(y, fp8jax.QuantSpec("e4m3", "group", 64, expand=True))
    back: jax.Array = codes.dequantize(jnp.bfloat16)
    widest: float = fp8jax.formats.E4M3.max
    print(sizes["mu"], back.shape, codes.codes.dtype, widest, fp8jax.recipes.NAMES[0], fp8jax.__version__)


if __name__ == "__main__":
    main()
