"""Microbatches of the training program: what becomes of what each part gives, whichever is largest."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.task import _accumulate


@pytest.mark.parametrize("factors", list(itertools.permutations([1.0, 8.0, 3.0])), ids=str)
def test_parts_merge_by_mean_and_statistics_by_maximum(factors):
    """What is noted passes from one part to the next."""

    def one(noted, tokens):
        value = tokens[0, 0]
        return noted + value, (value, {"w": jnp.array([value, -value])}, {"slot": jnp.array([value, 9 - value])})

    tokens = jnp.repeat(jnp.asarray(factors, jnp.float32), 2)[:, None]
    noted, (loss, grads, seen) = jax.jit(lambda t: _accumulate(one, jnp.float32(0), t.reshape(3, -1, 1)))(tokens)
    assert float(noted) == 12
    np.testing.assert_allclose([loss, *grads["w"]], [4, 4, -4], rtol=1e-6)
    np.testing.assert_array_equal(seen["slot"], [8, 8])
