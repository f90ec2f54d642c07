"""Facts about gradients: for the same array, in its own trace, once, and only during its program."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.ops.autodiff import residuals
from fp8jax.ops.autodiff.residuals import NO_FACTS, ArrayFacts, attach_facts, pop_facts

SAID = ArrayFacts(amax=jnp.float32(3))


def test_a_gradient_is_known_once_and_only_itself():
    x = jnp.ones(3)
    attach_facts(x, SAID)
    attach_facts(None, SAID)  # an input without a gradient
    assert pop_facts(x + 0) is NO_FACTS
    assert pop_facts((x, x)) is NO_FACTS
    assert pop_facts(x) is SAID
    assert pop_facts(x) is NO_FACTS


@pytest.mark.usefixtures("young_heap")
def test_an_array_that_took_the_place_of_another_one_is_not_known():
    known, x, other = residuals._gradient_facts, jnp.ones(3), jnp.ones(3)
    attach_facts(x, SAID)
    place, (_, trace, facts) = id(x), known[id(x)]
    known[id(other)] = weakref.ref(x), trace, facts
    assert pop_facts(other) is NO_FACTS
    del x
    gc.collect()
    assert place not in known


def test_a_gradient_is_not_known_in_a_program_inside():
    @jax.jit
    def program(x):
        def turn(carry, _):
            assert pop_facts(x) is NO_FACTS
            return carry, None

        attach_facts(x, SAID)
        jax.lax.scan(turn, 0, None, length=2)
        attach_facts(x, SAID)
        assert pop_facts(x) is SAID
        return x

    program(jnp.ones(3))


@pytest.mark.usefixtures("young_heap")
def test_nothing_is_known_of_a_program_that_is_over():
    before, kept_arrays = len(residuals._gradient_facts), []

    @jax.jit
    def program(x):
        y = x + 1
        attach_facts(y, SAID._replace(amax=x[0]))
        kept_arrays.append(y)
        return y

    program(jnp.ones(3))
    assert pop_facts(kept_arrays[0]) is NO_FACTS
    jax.jit(lambda x: program(x + 1))(jnp.ones(4))
    kept_arrays.clear()
    gc.collect()
    assert len(residuals._gradient_facts) <= before


def test_products_of_one_array_share_its_codes_under_the_scale_of_the_first_state():
    p = {name: 0.1 * jax.random.normal(jax.random.key(i), (32, 32)) for i, name in enumerate("ab")}
    x = jax.random.normal(jax.random.key(9), (8, 32))
    fast = fp8jax.transform(lambda p, x: (x @ p["a"], x @ p["b"]), [fp8jax.Rule(".*", "te_delayed")])
    states = fast.init(p, x)
    wide = dataclasses.replace(
        states["a"], state=states["a"].state._replace(x=jnp.full_like(states["a"].state.x, 50.0))
    )
    other = {"a": wide, "b": dataclasses.replace(states["b"], state=wide.state._replace(w=states["b"].state.w))}
    actual = jax.jit(fast)(p, x, states={"a": wide, "b": states["b"]})
    expected = jax.jit(fast)(p, x, states=other)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(actual[1], jax.jit(fast)(p, x, states=states)[1])
