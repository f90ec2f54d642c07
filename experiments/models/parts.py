"""What the parts of a model are made of: linear layers, and how arrays lie on several devices."""

import math
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx


class Boundary(Protocol):
    """Where devices share sequences: what a layer's products read, and what they give.

    Between layers, and in norms, each device has some of the tokens; from the first products of attention and of an MLP
    to the last it has all of them, with some of the heads and channels.
    """

    @property
    def devices(self) -> int:
        """How many share a sequence."""
        ...

    def shard(self, x: jax.Array) -> jax.Array:
        """A device's part of the first axis of an array that all have."""
        ...

    def enter(self, x_NxD: jax.Array) -> jax.Array:
        """All tokens, of those that each device has."""
        ...

    def leave(self, x_NxD: jax.Array) -> jax.Array:
        """A device's tokens of the sum of what all devices have."""
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
    """An array whose first axis, of sequences or tokens, lies so; XLA alone may cut channels where parameters are.

    What the devices do not divide, such as one sequence that is sampled, is left to XLA.
    """
    if sharding is None or x.shape[0] % math.prod(sharding.mesh.shape[name] for name in sharding.spec[0]):
        return x
    return jax.lax.with_sharding_constraint(x, sharding) if rows_of(x) is None else jax.sharding.reshard(x, sharding)


def rows_of(x: jax.Array) -> jax.sharding.NamedSharding | None:
    """How the first axis of an array lies on a mesh with Explicit axes, where JAX asks how a result lies; else None."""
    where = jax.typeof(x).sharding
    return jax.sharding.NamedSharding(where.mesh, jax.P(*where.spec[:1])) if where.mesh.explicit_axes else None


def reshaped(x: jax.Array, *shape: int) -> jax.Array:
    """An array in another shape, whose first axis lies as before."""
    return jnp.reshape(x, shape, out_sharding=rows_of(x))
