"""A trainer that never calls `advance_scaling`, or `set_weight_bounds`, is told, once; nobody else is."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import fp8jax
from fp8jax.modules import training

X = jax.random.normal(jax.random.key(0), (8, 16))
MESSAGE = "scaling is trained in a program that never calls fp8jax."


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """As in a process that has trained nothing yet."""
    monkeypatch.setattr(training, "_steps", training._Steps())


class Layers(nnx.Module):
    """Two layers in a loop, which differentiates a program of its own."""

    def __init__(self):
        make = lambda key: nnx.Linear(16, 16, rngs=nnx.Rngs(key))  # noqa: E731
        self.layers = nnx.vmap(make)(jax.random.split(jax.random.key(1), 2))

    def __call__(self, x):
        return nnx.scan(nnx.remat(lambda x, layer: layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.layers
        )


MODELS = {"layer": lambda: nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0))), "loop": Layers}


def quantized(name, model="layer"):
    return fp8jax.nnx.quantize(MODELS[model](), fp8jax.Rule(".*", name))


def loss(model, x):
    return jnp.mean(model(x) ** 2)


@nnx.jit
def never(model, optimizer, x):
    optimizer.update(model, nnx.grad(loss)(model, x))


@nnx.jit
def each_step(model, optimizer, x):
    wrt = nnx.Any(nnx.Param, fp8jax.nnx.GradientStatistic)
    grads = nnx.grad(loss, argnums=nnx.DiffState(0, wrt))(model, x)
    optimizer.update(model, fp8jax.nnx.advance_scaling(model, grads))


def told(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught if MESSAGE in str(one.message)]


def train(step, name, model="layer", steps=3):
    model = quantized(name, model)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
    for _ in range(steps):
        step(model, optimizer, X)


@pytest.mark.parametrize(
    ("name", "kind", "call"),
    [
        ("te_delayed", "delayed", "advance_scaling"),
        ("int8_fallback", "threshold", "advance_scaling"),
        ("moss", "automatic", "set_weight_bounds"),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_a_trainer_that_never_advances_states_is_told_once(name, kind, call, model):
    """All trained with their initial state for ever, without a word."""
    (message,) = told(lambda: train(never, name, model))
    assert message.startswith(f"an nnx.Linear with {kind} {MESSAGE}nnx.{call}: ")
    assert told(lambda: train(never, name)) == []


def test_each_of_the_two_calls_is_asked_for_by_itself():
    assert told(lambda: train(each_step, "te_delayed")) == []
    assert len(told(lambda: train(never, "moss"))) == 1


def test_who_gives_bounds_in_the_step_is_told_nothing():
    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(loss)(model, x))
        fp8jax.nnx.set_weight_bounds(model, fp8jax.weight_bounds(optimizer.opt_state))

    model = quantized("moss")
    tracked = optax.chain(optax.sgd(1e-2), fp8jax.track_weights())
    assert told(lambda: step(model, nnx.Optimizer(model, tracked, wrt=nnx.Param), X)) == []


@pytest.mark.parametrize("wraps", [lambda loss: loss, nnx.jit, nnx.remat], ids=["plain", "jit", "remat"])
@pytest.mark.parametrize("model", MODELS)
def test_bounds_of_weights_that_are_not_trained_are_not_asked_for(model, wraps):
    """They stay what they are, and the optimizer follows none of them: the call would have raised."""
    frozen = quantized("moss", model)
    of_input, of_both = (nnx.jit(nnx.grad(wraps(loss), argnums=which)) for which in (1, (0, 1)))
    assert told(lambda: of_input(frozen, X)) == []
    assert len(told(lambda: of_both(frozen, X))) == 1


def test_outside_of_programs_they_are_not_asked_for_either():
    frozen = quantized("moss")
    assert told(lambda: [nnx.grad(loss, argnums=1)(frozen, X) for _ in range(17)]) == []
    assert len(told(lambda: [nnx.grad(loss)(frozen, X) for _ in range(17)])) == 1


def test_linen_is_told_its_own_call():
    model = fp8jax.linen.quantize(nn.Dense(16), fp8jax.Rule(".*", "moss"))
    variables = model.init(jax.random.key(0), X)
    step = jax.jit(jax.grad(lambda p: jnp.mean(model.apply({**variables, "params": p}, X) ** 2)))
    (message,) = told(lambda: step(variables["params"]))
    assert f"with automatic {MESSAGE}linen.set_weight_bounds: " in message


def test_linen_is_told_nothing_of_weights_that_are_not_trained():
    model = fp8jax.linen.quantize(nn.Dense(16), fp8jax.Rule(".*", "moss"))
    variables = model.init(jax.random.key(0), X)
    step = jax.jit(lambda v, x: jax.grad(lambda x: jnp.mean(model.apply(v, x) ** 2))(x))
    assert told(lambda: step(variables, X)) == []


@pytest.mark.parametrize("name", ["te_delayed", "int8_fallback"])
def test_who_advances_states_is_told_nothing(name):
    assert told(lambda: train(each_step, name)) == []
    assert told(lambda: train(never, name)) == []  # another model, in a process that knows


@pytest.mark.parametrize("name", ["te_delayed", "int8_fallback"])
def test_outside_of_programs_microbatches_are_told_nothing(name):
    model = quantized(name)
    wrt = nnx.Any(nnx.Param, fp8jax.nnx.GradientStatistic)
    take = lambda: nnx.grad(loss, argnums=nnx.DiffState(0, wrt))(model, X)  # noqa: E731
    assert told(lambda: [take() for _ in range(16)]) == []
    assert len(told(take)) == 1
    assert told(take) == []


def test_nothing_is_told_of_a_gradient_that_is_no_training():
    model = quantized("te_delayed")
    assert told(lambda: nnx.jit(loss)(model, X)) == []  # a call
    assert told(lambda: fp8jax.explain(MODELS["layer"](), fp8jax.Rule(".*", "te_delayed"), X)) == []
    model.eval()
    assert told(lambda: nnx.jit(nnx.grad(loss))(model, X)) == []
    model.train()
    assert len(told(lambda: nnx.jit(nnx.grad(loss))(model, X))) == 1
