"""Patterns of public models, as small models of our own."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.nnx import bridge

import fp8jax
from fp8jax.modules.compiled import inspect_program
from tests.modules.architectures import FEEDFORWARD, WIDTH

COAT = fp8jax.recipes.coat()
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (2, 8, WIDTH))


class Norms(nnx.Module):
    """Norms and an MLP with its norm: all inputs of layers can be recomputed."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.before, self.after = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, FEEDFORWARD, rngs=rngs), nnx.Linear(FEEDFORWARD, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.after(x + self.down(nnx.silu(self.up(self.before(x)))))


def test_what_is_saved_aside_is_not_said_to_be_saved():
    saved = fp8jax.explain(Norms(), COAT, X).program.residuals
    assert len(saved) == 2
    assert all("nothing; the operation before makes it again" in line for line in saved)


class OwnInit(nn.Module):
    """A model whose `init` and `apply` have other arguments than Flax's."""

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        x = x + nn.Dense(WIDTH, name="out")(nn.gelu(nn.Dense(FEEDFORWARD, name="up")(nn.LayerNorm()(x))))
        return nn.Dense(3, name="last")(nn.Dropout(0.5)(x, deterministic))

    def init(self, key: jax.Array) -> dict:
        return jax.jit(super().init, static_argnums=2)(key, X, True)

    def apply(self, variables: dict, x: jax.Array) -> jax.Array:
        return super().apply(variables, x, True)


def test_a_model_may_have_an_init_and_an_apply_of_its_own():
    report = fp8jax.explain(OwnInit(), COAT, X, True)
    assert {layer.path for layer in report.quantized_layers} == {"up", "out"}
    assert {part.kind for part in report.context_entries} == {"LayerNorm", "gelu_tanh(x)"}
    model, copy = OwnInit(), fp8jax.linen.quantize(OwnInit(), COAT)
    variables = copy.init(KEY)
    assert jax.tree.structure(variables) == jax.tree.structure(model.init(KEY))
    program = inspect_program(jax.grad(lambda v: jnp.sum(copy.apply(v, X))), variables)
    assert sum(p.occurrences for p in program.traced if p.has_codes) == 2 * 3
    assert all("makes it again" in line for line in program.residuals)


class Relu(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(WIDTH, name="down")(nn.relu(nn.Dense(FEEDFORWARD, name="up")(x)))


class Gated(nn.Module):
    """A gated MLP with the weights of its layers in its own scope, as in Gemma."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        up, down = Weighted("up", (2, WIDTH, FEEDFORWARD)), Weighted("down", (FEEDFORWARD, WIDTH))
        nn.share_scope(self, up)
        nn.share_scope(self, down)
        gate = up("btd,zdf->zbtf", x)
        return down("btf,fd->btd", nn.gelu(gate[0]) * gate[1])


class Weighted(nn.Module):
    weight: str
    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, subscripts: str, x: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, x, self.param(self.weight, nn.initializers.normal(0.1), self.shape))


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + Gated(name="mlp")(x)


def test_layers_in_the_scope_of_the_module_around_them_are_layers():
    report = fp8jax.explain(Residual(), COAT, X)
    assert [(layer.path, layer.kind) for layer in report.quantized_layers] == [
        ("mlp/up", "Gated"),
        ("mlp/down", "Gated"),
    ]
    assert (report.skipped_layers, report.notes) == ((), ())
    assert sum(p.occurrences for p in report.program.traced if p.has_codes) == 2 * 3
    copy = fp8jax.linen.quantize(Residual(), COAT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.apply(copy.init(KEY, X), X)


class Experts(nnx.Module):
    """A router and the layers of its experts in one module."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        expert = lambda: nnx.Dict(up=nnx.Linear(WIDTH, 32, rngs=rngs), down=nnx.Linear(32, WIDTH, rngs=rngs))  # noqa: E731
        self.gate, self.experts = nnx.Linear(WIDTH, 2, rngs=rngs), nnx.List([expert(), expert()])

    def __call__(self, x: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(self.gate(x))
        return sum(weights[..., i : i + 1] * m.down(nnx.silu(m.up(x))) for i, m in enumerate(self.experts))


def test_a_router_beside_activations_needs_no_line():
    parts = fp8jax.explain(Experts(), COAT, X).context_entries
    assert [(part.path, part.kind) for part in parts] == [(f"experts/{i}/down", "silu(x)") for i in range(2)]


class Bridged(nnx.Module):
    def __init__(self, inner: nn.Module) -> None:
        self.known = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.held = bridge.lazy_init(bridge.ToNNX(inner, rngs=nnx.Rngs(0)), X)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.held(self.known(x))


class Perceptron(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(WIDTH, FEEDFORWARD, rngs=rngs), nnx.Linear(FEEDFORWARD, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.up(x)))


class InLinen(nn.Module):
    make: object

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + bridge.to_linen(self.make, name="held")(nn.Dense(WIDTH)(x))


def quantized_perceptron(rngs: nnx.Rngs) -> nnx.Module:
    return fp8jax.nnx.quantize(Perceptron(rngs), COAT)


@pytest.mark.parametrize(
    ("model", "whole", "first"),
    [
        (Bridged(Relu()), Bridged(fp8jax.linen.quantize(Relu(), COAT)), "known"),
        (InLinen(Perceptron), InLinen(quantized_perceptron), "Dense_0"),
    ],
    ids=["ToNNX", "to_linen"],
)
def test_what_a_bridge_holds_is_quantized(model, whole, first):
    whole, report = (fp8jax.explain(m, COAT, X) for m in (whole, model))
    assert [layer.path for layer in report.quantized_layers] == [first, "held/up", "held/down"]
    for each in (whole, report):
        assert each.notes == ()
        assert sum(p.occurrences for p in each.program.traced if p.has_codes) == 3 * 3


def test_what_cannot_be_quantized_is_refused_with_what_to_do():
    model = Perceptron(nnx.Rngs(0))
    model.up.precision = jax.lax.Precision.HIGHEST
    with pytest.raises(ValueError, match=r"up asks for precision .*HIGHEST.*set its precision to None, or exclude it"):
        fp8jax.nnx.quantize(model, COAT)(X)
