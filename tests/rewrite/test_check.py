"""`Transformed.check` compares each operation with the one that it replaces."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import fp8jax
from fp8jax.rewrite import activations, norms

WIDTH, INNER = 32, 48
SHAPES = {"n": (2, WIDTH), "gate": (2, WIDTH, INNER), "up": (2, WIDTH, INNER), "down": (2, INNER, WIDTH)}
P = {name: 0.2 * jax.random.normal(jax.random.key(i), shape) for i, (name, shape) in enumerate(SHAPES.items())}
X = jax.random.normal(jax.random.key(9), (2, 8, WIDTH), jnp.bfloat16)


def layers(p, x):
    """A scan over checkpointed layers, with an unrelated effect."""

    def layer(x, w):
        w = {name: leaf.astype(x.dtype) for name, leaf in w.items()}
        h = x.astype(jnp.float32)
        h = (h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)).astype(x.dtype) * w["n"]
        jax.debug.callback(lambda _: None, h[0, 0, 0])
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None

    return lax.scan(jax.checkpoint(layer), x, p)[0]


@pytest.mark.parametrize("recipe", ["coat", "te_delayed", "jetfire"])
def test_operations_are_within_the_error_of_their_recipe(recipe):
    actual = fp8jax.transform(layers, recipe).check(P, X)
    kinds = ["dot_general", "dot_general", "dot_general"]
    if recipe == "coat":
        kinds = ["RMSNorm", *kinds[:2], "silu(gate) * up", *kinds[2:]]
    assert [d.entry.kind for d in actual.deviations] == kinds
    assert actual.first_failure is None, actual
    assert all(d.forward_error > 0 and d.gradient_error > 0 for d in actual.deviations if d.entry.is_product)
    assert "every operation is within its recipe's error" in str(actual)


@pytest.mark.parametrize("reverse", [False, True])
def test_states_of_a_call_give_its_scales(reverse):
    """A history of the first layer far below its input saturates the codes; that of another layer has no effect."""

    def stack(p, x):
        layer = lambda x, w: (jnp.tanh(x @ w.astype(x.dtype)), None)  # noqa: E731
        return lax.scan(layer, x, p["w"], reverse=reverse)[0]

    p = {"w": 0.2 * jax.random.normal(jax.random.key(0), (2, WIDTH, WIDTH))}
    fast = fp8jax.transform(stack, "te_delayed")
    states = fast.init(p, X)
    assert fast.check(p, X, states=states).first_failure is None
    first = int(reverse)
    for layer, fails in ((first, True), (1 - first, False)):
        state = states["w"].state
        low = state._replace(x=state.x.at[layer].set(1e-3))
        actual = fast.check(p, X, states={"w": dataclasses.replace(states["w"], state=low)})
        assert (actual.first_failure is not None) == fails, actual
    with pytest.raises(ValueError, match="keeps a state, but the passed states have none"):
        fast.check(p, X, states={"other": states["w"]})


def test_the_first_that_is_further_off_is_named(monkeypatch):
    """As if an activation had been mistaken for another, or a norm's eps for a larger one."""
    find = activations.find
    monkeypatch.setattr(activations, "find", lambda v: (a := find(v)) and a._replace(name="gelu"))
    actual = fp8jax.transform(layers, "coat").check(P, X)
    assert actual.first_failure is not None
    assert (actual.first_failure.entry.path, actual.first_failure.entry.kind) == ("down", "gelu(gate) * up")
    assert "unexplained: down gelu(gate) * up: forward" in str(actual)
    assert "test_check.py" in str(actual)
    find_norm = norms.find
    monkeypatch.setattr(norms, "find", lambda v: (n := find_norm(v)) and n._replace(eps=0.1))
    first = fp8jax.transform(layers, "coat").check(P, X).first_failure
    assert first is not None
    assert first.entry.kind == "RMSNorm"


def test_a_wrong_gradient_is_seen(monkeypatch):
    """The forward values are right, the derivative is wrong."""
    from fp8jax.ops.nonlinear import activation

    backward = activation.ActivationBackward.backward
    wrong = lambda *args: (tuple(1.5 * ct for ct in backward(*args)[0]), ())  # noqa: E731
    monkeypatch.setattr(activation.ActivationBackward, "backward", wrong)
    first = fp8jax.transform(layers, "coat").check(P, X).first_failure
    assert first is not None
    assert first.entry.kind == "silu(gate) * up"
    assert first.forward_error < first.forward_tolerance
