"""Handwritten norms: recognized in NNX. In Linen, `explain` names them and the alternative."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import fp8jax
from tests.rows import few

COAT = fp8jax.recipes.coat_activations()
WIDTH, INNER = 32, 48
X = jax.random.normal(jax.random.key(0), (2, 6, WIDTH))

mean = functools.partial(jnp.mean, axis=-1, keepdims=True)


def rms(x, scale):
    return x * jax.lax.rsqrt(mean(x**2) + 1e-6) * scale


def rms_in_fp32(x, scale):
    wide = x.astype(jnp.float32)
    return (wide / jnp.sqrt(mean(jnp.square(wide)) + 1e-6)).astype(x.dtype) * (1 + scale)


def rms_by_power(x, scale):
    return scale * (x * (mean(x * x) + 1e-6) ** -0.5)


def layer(x, scale):
    return (x - mean(x)) / jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-5) * scale + scale


def layer_as_flax_does(x, scale):
    variance = jnp.maximum(0.0, mean(x * x) - mean(x) ** 2)
    return (x - mean(x)) * (jax.lax.rsqrt(variance + 1e-5) * scale)


@jax.custom_vjp
def with_backward(x, scale):
    return rms(x, scale)


with_backward.defvjp(lambda x, scale: (rms(x, scale), x), lambda x, dy: (dy, dy[0, 0]))
NORMS = (rms, rms_in_fp32, rms_by_power, layer, layer_as_flax_does)
# These are no norms of the last axis, or are modified before a layer reads them.
OTHERS = {
    "unit length": lambda x, scale: x * jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True)) * scale,
    "over tokens": lambda x, scale: x * jax.lax.rsqrt(jnp.mean(x**2, axis=-2, keepdims=True)) * scale,
    "a residual": lambda x, scale: x + rms(x, scale),
    "two norms": lambda x, scale: rms(x, scale) + rms(jnp.tanh(x), scale),
    "two stages": lambda x, scale: mean(x**2) * rms(x, scale),
    "a function": lambda x, scale: jnp.tanh(rms(x, scale)),
    "the hook": lambda x, scale: fp8jax.rms_norm(x, scale, recipe=COAT),
    "a backward pass of its own": with_backward,
    "none": lambda x, scale: x * scale,
}


class LinenOwn(nn.Module):
    function: Callable

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.function(x, self.param("scale", nn.initializers.ones, x.shape[-1:]))


class LinenPerceptron(nn.Module):
    """A norm in the block itself, or in a module with any name."""

    function: Callable
    inside: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.inside:
            h = self.function(x, self.param("scale", nn.initializers.ones, x.shape[-1:]))
        else:
            h = LinenOwn(self.function, name="before")(x)
        gate, up = (nn.Dense(INNER, name=name)(h) for name in ("gate", "up"))
        return x + nn.Dense(WIDTH, name="down")(nn.silu(gate) * up)


class LinenStack(nn.Module):
    function: Callable

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = nn.remat(LinenPerceptron)(self.function, name="block")
        scan = nn.scan(lambda m, x, _: (m(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return scan(block, x, None)[0]


class NnxOwn(nnx.Module):
    def __init__(self, function: Callable) -> None:
        self.function, self.scale = function, nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.function(x, self.scale[...])


class NnxPerceptron(nnx.Module):
    """The same in NNX."""

    def __init__(self, rngs: nnx.Rngs, function: Callable, inside: bool = True) -> None:
        self.function, self.scale = function, nnx.Param(jnp.ones(WIDTH))
        self.before = None if inside else NnxOwn(function)
        self.gate, self.up = (nnx.Linear(WIDTH, INNER, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(INNER, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.function(x, self.scale[...]) if self.before is None else self.before(x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


class NnxStack(nnx.Module):
    def __init__(self, function: Callable) -> None:
        make = functools.partial(NnxPerceptron, function=function)
        self.block = nnx.vmap(make, in_axes=0)(nnx.Rngs(0).split(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        run = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return run(self.block, x)


def perceptrons(function: Callable, inside: bool) -> tuple[Any, Any]:
    return LinenPerceptron(function, inside), NnxPerceptron(nnx.Rngs(0), function, inside)


def normed(model: Any, rules: Any = COAT) -> list[str]:
    """Returns the paths of recognized norms."""
    return [p.path for p in fp8jax.explain(model, rules, X).context_entries if p.kind.endswith("Norm")]


@pytest.mark.parametrize(
    ("function", "inside"),
    few(
        [(function, inside) for function in NORMS for inside in (True, False)],
        *((function, i % 2 == 0) for i, function in enumerate(NORMS)),
    ),
    ids=lambda x: getattr(x, "__name__", "inside" if x else "class"),
)
def test_a_norm_written_by_hand_is_known(function, inside):
    path = "" if inside else "before"
    # A scale that is computed from a parameter is none: the norm has the name of what reads it.
    path = "gate and up" if function is rms_in_fp32 else path
    for model in perceptrons(function, inside):
        assert normed(model) == [path], type(model)


@pytest.mark.parametrize("name", few(OTHERS, "unit length", "two stages", "the hook"))
def test_what_is_no_norm_of_the_last_axis_is_none(name):
    for inside in (True, False):
        model = perceptrons(OTHERS[name], inside)[inside]
        assert normed(model) == [], (type(model), inside)


def test_loops_and_rules_leave_the_norm_in_the_list():
    for model in (LinenStack(rms), NnxStack(rms)):
        assert normed(model) == ["block"], type(model)
    rules = [fp8jax.Rule("gate", None), fp8jax.Rule(".*", COAT)]
    for model in perceptrons(rms, True):
        assert normed(model, rules) == [""], type(model)
        # Without a context, there is no note about norms.
        assert normed(model, fp8jax.recipes.te_current()) == []


def test_the_norms_of_flax_are_known():
    for model in (
        nn.Sequential([nn.LayerNorm(), nn.Dense(INNER), nn.RMSNorm(), nn.Dense(WIDTH)]),
        nnx.Sequential(
            *(nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0)), nnx.Linear(WIDTH, INNER, rngs=nnx.Rngs(0))),
            *(nnx.RMSNorm(INNER, rngs=nnx.Rngs(0)), nnx.Linear(INNER, WIDTH, rngs=nnx.Rngs(0))),
        ),
    ):
        assert len(normed(model)) == 2
