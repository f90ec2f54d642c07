"""What is known of gradients: of the very array, in its own trace and run, once, and no longer than its program."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.ops.autodiff import gradient_facts
from fp8jax.ops.autodiff.residuals import ArrayFacts

SAID = ArrayFacts(amax=jnp.float32(3))


def test_a_gradient_is_known_once_and_only_itself():
    known, x = gradient_facts.GradientFacts(), jnp.ones(3)
    known.attach(x, SAID)
    known.attach(None, SAID)  # of an input that has no gradient
    assert known.pop(x + 0) is None
    assert known.pop(x) is SAID
    assert known.pop(x) is None


@pytest.mark.usefixtures("young_heap")
def test_an_array_that_took_the_place_of_another_one_is_not_known():
    known, x = gradient_facts.GradientFacts(), jnp.ones(3)
    known.attach(x, SAID)
    (place, (_, trace, origin)), other = next(iter(known._facts.items())), jnp.ones(3)
    known._facts[id(other)] = weakref.ref(x), trace, origin
    assert known.pop(other) is None
    del x
    gc.collect()
    assert place not in known._facts


def test_a_gradient_is_not_known_in_a_program_inside():
    known = gradient_facts.GradientFacts()

    @jax.jit
    def program(x):
        def turn(carry, _):
            assert known.pop(x) is None
            return carry, None

        known.attach(x, SAID)
        jax.lax.scan(turn, 0, None, length=2)
        known.attach(x, SAID)
        assert known.pop(x) is SAID
        return x

    program(jnp.ones(3))


def test_runs_know_nothing_of_each_other_and_functions_nothing_of_another_program():
    x = jnp.ones(3)
    around = gradient_facts.current()
    with gradient_facts.scope():
        inner = gradient_facts.current()
        with gradient_facts.scope():
            assert gradient_facts.current() not in (inner, around)
        assert gradient_facts.current() is inner
        inner.attach(x, SAID)
    assert gradient_facts.current() is around
    assert around.pop(x) is None
    held = []

    @jax.jit
    def program(y):
        held.append(y)
        around.attach(y, SAID)
        return y

    program(x)
    assert around._facts
    around.attach(x, SAID)
    assert list(around._facts) == [id(x)]
    assert around.pop(x) is SAID


def test_products_of_one_array_share_its_codes_under_the_scale_of_the_first_state():
    p = {name: 0.1 * jax.random.normal(jax.random.key(i), (32, 32)) for i, name in enumerate("ab")}
    x = jax.random.normal(jax.random.key(9), (8, 32))
    fast = fp8jax.transform(lambda p, x: (x @ p["a"], x @ p["b"]), [fp8jax.Rule(".*", "te_delayed")])
    states = fast.init(p, x)
    wide = dataclasses.replace(
        states["a"], state=states["a"].state._replace(x=jnp.full_like(states["a"].state.x, 50.0))
    )
    other = {"a": wide, "b": dataclasses.replace(states["b"], state=wide.state._replace(w=states["b"].state.w))}
    got = jax.jit(fast)(p, x, states={"a": wide, "b": states["b"]})
    want = jax.jit(fast)(p, x, states=other)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(got[1], jax.jit(fast)(p, x, states=states)[1])
