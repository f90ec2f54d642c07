"""How the moments of each parameter are stored: which are quantized, and what they are before the first step."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from fp8jax.core import blocks, expansion, formats
from fp8jax.core.qtensor import QTensor
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.adamw import Moment

# Metadata that a parameter with short groups may add to its codes, relative to them.
MAX_METADATA = 0.10


def is_compressed(shape: tuple[int, ...], spec: QuantSpec, min_size: int) -> bool:
    """Whether the moments of a parameter of this global shape are quantized.

    They are if the parameter has `min_size` elements, and scales and exponents take at most 10 % of the codes'
    bytes, or at most what full groups take where the group size asks for more: a short last axis (LoRA factors,
    biases) would keep little but metadata.
    """
    if not shape or math.prod(shape) < max(min_size, 1):
        return False
    allowed = max((1 + MAX_METADATA) * formats.get(spec.format).bytes_per_element, spec.bytes_per_element)
    return spec.nbytes(shape) <= math.prod(shape) * allowed


def zeros(param: Any, stored: QuantSpec | formats.Format, min_size: int) -> Moment:
    """A moment of zeros for one parameter, sharded as it is.

    Args:
        param: array, tracer or `jax.ShapeDtypeStruct`.
        stored: how the moment is to be stored: quantized, or cast to a plain format.
        min_size: parameters with fewer elements keep fp32 moments.

    Returns:
        A `QTensor`; an array of the plain format; or an fp32 array if the parameter is not to be quantized.
    """
    if isinstance(stored, formats.Format):
        return jnp.zeros_like(param, dtype=stored.dtype)
    if not is_compressed(param.shape, stored, min_size):
        return jnp.zeros_like(param, dtype=jnp.float32)
    fmt = formats.get(stored.format)
    # A code book does not begin with zero.
    zero = 0 if fmt.codebook is None else fmt.codebook.index(0.0)
    codes = jnp.full_like(param, zero, dtype=fmt.dtype)
    shape = blocks.counts(param.shape, stored.block_shape(param.shape))
    scale = _ones(param, shape, formats.get(stored.scale_format).dtype)
    exponents = _ones(param, shape, expansion.DTYPE) if stored.expand else None
    return QTensor(codes, scale, exponents, None, stored)


def _ones(param: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """Ones, a block of `param` each, in the sharding of `param`."""
    abstract = isinstance(param, jax.ShapeDtypeStruct)
    sharding = None if isinstance(param, jax.core.Tracer) else param.sharding
    if not abstract and (axes := blocks.explicit_axes(param)):
        spec = blocks.partition(jax.typeof(param).sharding.spec, shape, axes)
        return jnp.ones(shape, dtype, out_sharding=spec)
    if isinstance(sharding, NamedSharding):
        spec = blocks.partition(sharding.spec, shape, dict(sharding.mesh.shape))
        return jnp.ones(shape, dtype, device=NamedSharding(sharding.mesh, spec))
    return jnp.ones(shape, dtype, device=sharding)


def state_bytes(state: Any) -> dict[str, int]:
    """Bytes of an optimizer state, by role.

    Args:
        state: the state of any optax transformation, concrete or abstract.

    Returns:
        {"mu": bytes of all first moments, "nu": of all second moments, "other": the rest}.
    """

    def is_adam(node: Any) -> bool:
        return isinstance(node, tuple) and {"mu", "nu"} <= set(getattr(node, "_fields", ()))

    def nbytes(tree: Any) -> int:
        return sum(
            math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree) if hasattr(x, "dtype")
        )

    nodes = [node for node in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(node)]
    moments = {name: sum(nbytes(getattr(node, name)) for node in nodes) for name in ("mu", "nu")}
    return {**moments, "other": nbytes(state) - sum(moments.values())}


def static_integer(name: str, value: int | np.integer | Array) -> int | None:
    """A static integer; None for one that `optax.inject_hyperparams` traced, which `update` has no need of."""
    if isinstance(value, jax.core.Tracer):
        return None
    if not value >= (1 if name == "group_size" else 0) or value // 1 != value:
        raise ValueError(f"{name} must be a positive integer, not {value}")
    return int(value)
