"""Models whose methods stack the parameters of their layers and scan over them, in NNX and Linen."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import fp8jax
from tests.distance import relative

WIDTH, INNER, LAYERS = 32, 48, 2
X, KEY = jax.random.normal(jax.random.key(1), (8, WIDTH)), jax.random.key(0)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(WIDTH, INNER, rngs=rngs), nnx.Linear(INNER, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.silu(self.up(x)))


class Stacked(nnx.Module):
    """As simply's transformer: layers are modules, and a call stacks their parameters."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        states = [nnx.to_pure_dict(nnx.state(block, nnx.Param)) for block in self.blocks]
        rows = jax.tree.map(lambda *w: jnp.stack(w), *states)

        def turn(x, row):
            h = nnx.silu(x @ row["up"]["kernel"] + row["up"]["bias"])
            return x + h @ row["down"]["kernel"] + row["down"]["bias"], None

        return lax.scan(turn, x, rows)[0]


class StackedLinen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        make = lambda name, *shape: self.param(name, nn.initializers.lecun_normal(), shape)  # noqa: E731
        rows = [(make(f"up_{i}", WIDTH, INNER), make(f"down_{i}", INNER, WIDTH)) for i in range(LAYERS)]
        rows = jax.tree.map(lambda *w: jnp.stack(w), *rows)
        return lax.scan(lambda x, w: (x + nn.silu(x @ w[0]) @ w[1], None), x, rows)[0]


def gradients(model, *params):
    if isinstance(model, nnx.Module):
        return nnx.to_pure_dict(nnx.grad(lambda m: jnp.sum(jnp.sin(m(X))))(model))
    return jax.grad(lambda p: jnp.sum(jnp.sin(model.apply(p, X))))(*params)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_stacked_layers_are_quantized_and_each_is_listed(kind):
    model = Stacked(nnx.Rngs(0)) if kind == "nnx" else StackedLinen()
    report = fp8jax.explain(model, "te_current", X)
    paths = [f"blocks/{i}/{name}" if kind == "nnx" else f"{name}_{i}" for name in ("up", "down") for i in range(LAYERS)]
    assert sorted(layer.path for layer in report.quantized_layers) == sorted(paths)
    assert report.skipped_layers == ()
    assert not report.unquantized_note
    assert sum(p.executions for p in report.program.traced if p.has_codes) == 2 * 3 * LAYERS
    copy = (fp8jax.nnx if kind == "nnx" else fp8jax.linen).quantize(model, "te_current")
    params = () if kind == "nnx" else (model.init(KEY, X),)
    actual, expected = gradients(copy, *params), gradients(model, *params)
    assert all(0 < relative(a, b) < 0.2 for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True))


@pytest.mark.parametrize("make", [lambda: Stacked(nnx.Rngs(0)), StackedLinen], ids=["nnx", "linen"])
def test_stacked_layers_have_no_states_and_are_left_with_the_reason(make):
    skipped = fp8jax.explain(make(), "te_delayed", X).skipped_layers
    assert {len(skipped), *(layer.reason.partition(",")[0] for layer in skipped)} == {
        2 * LAYERS,
        "concatenates or stacks parameters",
    }


def test_automatic_scaling_measures_stacked_layers():
    model = fp8jax.nnx.quantize(Stacked(nnx.Rngs(0)), "moss")
    np.testing.assert_array_less(relative(model(X), Stacked(nnx.Rngs(0))(X)), 0.1)
