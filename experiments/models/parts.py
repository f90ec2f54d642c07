"""Linear layers of models, and shardings of their activations."""

import math
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx


class Boundary(Protocol):
    """The collectives of tensor parallelism before and after the matmuls of a layer.

    Between layers and in norms, a device has some of the tokens. Inside attention and MLPs, it has all tokens, with
    some of the heads and channels.
    """

    @property
    def devices(self) -> int:
        """Number of devices that share a sequence."""
        ...

    def shard(self, x: jax.Array) -> jax.Array:
        """Returns a device's part of a replicated array, along the first axis."""
        ...

    def enter(self, x_NxD: jax.Array) -> jax.Array:
        """Gathers the tokens of all devices."""
        ...

    def leave(self, x_NxD: jax.Array) -> jax.Array:
        """Reduce-scatters tokens: returns a device's tokens of the sum over devices."""
        ...


def linear(
    inner: int,
    outer: int,
    std: float,
    dtype: jax.typing.DTypeLike,
    param_dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
    bias: bool = False,
) -> nnx.Linear:
    init = nnx.initializers.normal(std)
    return nnx.Linear(inner, outer, use_bias=bias, kernel_init=init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)


def rows_on(x: jax.Array, sharding: jax.sharding.NamedSharding | None) -> jax.Array:
    """Constrains the sharding of the first axis (sequences or tokens). XLA alone may shard channels like parameters.

    An axis that the devices do not divide, such as a single sequence in sampling, has no constraint.
    """
    if sharding is None or x.shape[0] % math.prod(sharding.mesh.shape[name] for name in sharding.spec[0]):
        return x
    return jax.lax.with_sharding_constraint(x, sharding) if rows_of(x) is None else jax.sharding.reshard(x, sharding)


def rows_of(x: jax.Array) -> jax.sharding.NamedSharding | None:
    """Returns the sharding of the first axis on a mesh with Explicit axes, where JAX requires output shardings."""
    where = jax.typeof(x).sharding
    return jax.sharding.NamedSharding(where.mesh, jax.P(*where.spec[:1])) if where.mesh.explicit_axes else None


def reshaped(x: jax.Array, *shape: int) -> jax.Array:
    """Reshapes an array, with the same sharding of the first axis."""
    return jnp.reshape(x, shape, out_sharding=rows_of(x))
