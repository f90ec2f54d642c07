"""What is known of gradients: of the very array, in its own trace and run, once, and no longer than its program."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.ops.autodiff import residuals
from fp8jax.ops.autodiff.residuals import ArrayFacts

SAID = ArrayFacts(amax=jnp.float32(3))


def test_a_gradient_is_known_once_and_only_itself():
    known, x = residuals.GradientFacts(), jnp.ones(3)
    known.attach(x, SAID)
    known.attach(None, SAID)  # of an input that has no gradient
    assert known.pop(x + 0) is None
    assert known.pop(x) is SAID
    assert known.pop(x) is None


@pytest.mark.usefixtures("young_heap")
def test_an_array_that_took_the_place_of_another_one_is_not_known():
    known, x = residuals.GradientFacts(), jnp.ones(3)
    known.attach(x, SAID)
    (place, (_, trace, origin)), other = next(iter(known._facts.items())), jnp.ones(3)
    known._facts[id(other)] = weakref.ref(x), trace, origin
    assert known.pop(other) is None
    del x
    gc.collect()
    assert place not in known._facts


def test_a_gradient_is_not_known_in_a_program_inside():
    known = residuals.GradientFacts()

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


def test_runs_and_programs_have_facts_of_their_own():
    x = jnp.ones(3)
    around = residuals.current_gradient_facts()
    with residuals.gradient_facts_scope():
        inner = residuals.current_gradient_facts()
        with residuals.gradient_facts_scope():
            assert residuals.current_gradient_facts() not in (inner, around)
        assert residuals.current_gradient_facts() is inner
        inner.attach(x, SAID)
    assert residuals.current_gradient_facts() is around
    assert around.pop(x) is None
    held = []

    def program(y):
        own = residuals.current_gradient_facts()
        assert own is residuals.current_gradient_facts()
        own.attach(y, SAID)
        held.append((y, own))
        return jax.jit(lambda z: (held.append((z, residuals.current_gradient_facts())), own)[0] or z)(y)

    for _ in range(3):
        jax.jit(lambda y: program(y))(x)
    facts = [own for _, own in held]
    assert len({id(own) for own in (around, *facts)}) == 7
    assert residuals.current_gradient_facts() is not facts[-1]
    assert residuals.current_gradient_facts().pop(held[0][0]) is None
    # Nothing of the first program is referenced by the thread.
    first = weakref.ref(facts[0])
    del facts
    held.clear()
    gc.collect()
    assert first() is None


def test_a_program_around_another_one_has_its_facts_before_and_after():
    found = []

    @jax.jit
    def program(x):
        found.append(residuals.current_gradient_facts())
        jax.jit(lambda y: found.append(residuals.current_gradient_facts()) or y)(x)
        found.append(residuals.current_gradient_facts())
        return x

    program(jnp.ones(3))
    assert found[0] is found[2]
    assert found[0] is not found[1]


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
