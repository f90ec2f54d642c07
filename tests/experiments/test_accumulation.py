"""Accumulation over microbatches: losses, gradients, statistics and states."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.train.losses import accumulate


@pytest.mark.parametrize("factors", list(itertools.permutations([1.0, 8.0, 3.0])), ids=str)
def test_parts_merge_by_mean_and_statistics_by_maximum(factors):
    """States are passed from one microbatch to the next."""

    def one(state, tokens):
        value = tokens[0, 0]
        return state + value, (value, {"w": jnp.array([value, -value])}, {"slot": jnp.array([value, 9 - value])})

    tokens = jnp.repeat(jnp.asarray(factors, jnp.float32), 2)[:, None]
    state, (loss, grads, recorded) = jax.jit(lambda t: accumulate(one, jnp.float32(0), t.reshape(3, -1, 1)))(tokens)
    assert float(state) == 12
    np.testing.assert_allclose([loss, *grads["w"]], [4, 4, -4], rtol=1e-6)
    np.testing.assert_array_equal(recorded["slot"], [8, 8])


def test_gradients_of_16_bits_are_added_up_in_32_whatever_the_order():
    """bf16 numbers near 256 are 2 apart: sums in bf16 would lose the ones, and round a third."""
    for factors in ([256.0, 1.0, 1.0], [1.0, 256.0, 1.0], [1.0, 1.0, 256.0]):

        def one(state, tokens):
            grads = {"w": tokens[0].astype(jnp.bfloat16)}
            return state, (tokens[0, 0], grads, {})

        _, (_, grads, _) = accumulate(one, jnp.float32(0), jnp.float32(factors).reshape(3, 1, 1))
        assert grads["w"].dtype == jnp.float32
        np.testing.assert_allclose(grads["w"], 86, rtol=1e-6)
