"""Quantization in a loop over layers."""

import jax
import jax.numpy as jnp
import pytest

import fp8jax
from tests.distance import relative


@pytest.mark.parametrize("name", ["te_current", "coat", "deepseek", "int8_block"])
def test_no_array_of_constants_is_read_in_every_iteration(name):
    """JAX hoists constants out of a differentiated scan, such as a matrix of zeros."""
    part = fp8jax.recipes.get(name).linear
    key = jax.random.key(0) if part.is_stochastic else None

    def loss(x, ws):
        def layer(x, w):
            return jax.nn.gelu(fp8jax.linear(x, w, recipe=part, key=key)), None

        return jnp.sum(jax.lax.scan(layer, x, ws)[0])

    shapes = jax.ShapeDtypeStruct((48, 32), jnp.bfloat16), jax.ShapeDtypeStruct((3, 32, 32), jnp.bfloat16)
    program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*shapes)
    constants = [v.aval for eqn in program.jaxpr.eqns if not eqn.invars for v in eqn.outvars]
    assert not [kind for kind in constants if kind.size >= 32 * 32], constants


@pytest.mark.parametrize("check", [True, False])
def test_a_gradient_of_a_map_over_devices(check):
    """Residuals of the loop leave the map. XLA for CPU crashed on empty arrays among them."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x, ws = jnp.cos(jnp.arange(4 * 32.0)).reshape(4, 32), jnp.sin(jnp.arange(2 * 32 * 32.0)).reshape(2, 32, 32)

    def loss(ws, x):
        layer = lambda x, w: (jnp.tanh(fp8jax.linear(x, w, recipe="deepseek")), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(layer, x, ws)[0])

    specs = {"in_specs": (jax.P(), jax.P("d")), "out_specs": jax.P()}
    mapped = jax.shard_map(lambda *x: jax.lax.psum(loss(*x), "d"), mesh=mesh, check_vma=check, **specs)
    actual, expected = (jax.jit(jax.grad(f))(ws, x) for f in (mapped, lambda ws, x: loss(ws, x[:2]) + loss(ws, x[2:])))
    assert relative(actual, expected) < 1e-2
