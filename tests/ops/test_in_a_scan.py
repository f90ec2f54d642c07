"""Quantization in a loop over layers."""

import jax
import jax.numpy as jnp
import pytest

import fp8jax


@pytest.mark.parametrize("name", ["te_current", "coat", "deepseek", "int8_block"])
def test_no_array_of_constants_is_read_in_every_iteration(name):
    """Of a differentiated scan JAX computes what depends on nothing outside of the loop, such as a matrix of zeros."""
    part = fp8jax.recipes.get(name).linear
    key = jax.random.key(0) if part.stochastic else None

    def loss(x, ws):
        def layer(x, w):
            return jax.nn.gelu(fp8jax.linear(x, w, recipe=part, key=key)), None

        return jnp.sum(jax.lax.scan(layer, x, ws)[0])

    shapes = jax.ShapeDtypeStruct((48, 32), jnp.bfloat16), jax.ShapeDtypeStruct((3, 32, 32), jnp.bfloat16)
    program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*shapes)
    made = [v.aval for eqn in program.jaxpr.eqns if not eqn.invars for v in eqn.outvars]
    assert not [kind for kind in made if kind.size >= 32 * 32], made
