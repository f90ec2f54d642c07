"""How the moments of each parameter are stored: which are quantized, and what they are before the first step."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax.core import blocks, expansion, formats
from fp8jax.core.qtensor import QTensor
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.optimizers.leaf import Moment

# What optax 0.2.8 calls the moments it keeps for each parameter. A name that is not here (slow weights, accumulated
# gradients, distances travelled) may belong to a sum that 8 bits would stall, so the user has to say what it is.
FIRST_MOMENTS = ("mu", "trace", "ema", "m", "m1", "m2", "exp_avg")
SECOND_MOMENTS = ("nu", "nu_max", "v", "n", "exp_avg_sq", "sum_of_squares", "e_g", "e_x")
# Sums and maxima: a sum that is rounded to nearest stops to grow where its terms are under half a step, and a maximum
# that is rounded up stays up. Of Adadelta's averages each is made of the other, and errors go round. They are stored in
# fp32 unless the user says otherwise.
MONOTONE_ACCUMULATORS = ("sum_of_squares", "nu_max", "e_g", "e_x")
# With those that have another shape than their parameters.
SECOND_MOMENT_FIELDS = (*SECOND_MOMENTS, "v_row", "v_col")
_ROLES = dict.fromkeys(FIRST_MOMENTS, "mu") | dict.fromkeys(SECOND_MOMENT_FIELDS, "nu")

# Metadata that a parameter with short groups may add to its codes, relative to them.
MAX_METADATA_FRACTION = 0.10


def should_quantize(shape: tuple[int, ...], spec: QuantSpec | None, min_size: int) -> bool:
    """Whether the moments of a parameter of this global shape are quantized.

    They are if the parameter has `min_size` elements, and scales and exponents take at most 10 % of the codes'
    bytes, or at most what full groups take where the group size asks for more: a short last axis (LoRA factors,
    biases) would keep little but metadata. Without a spec none are.
    """
    if spec is None or not shape or math.prod(shape) < max(min_size, 1):
        return False
    allowed = max((1 + MAX_METADATA_FRACTION) * formats.get(spec.format).bytes_per_element, spec.bytes_per_element)
    return spec.nbytes(shape) <= math.prod(shape) * allowed


def zeros(param: Any, storage: QuantSpec | formats.Format, min_size: int) -> Moment:
    """A moment of zeros for one parameter, sharded as it is.

    Args:
        param: array, tracer or `jax.ShapeDtypeStruct`.
        storage: how the moment is to be stored: quantized, or cast to a plain format.
        min_size: parameters with fewer elements keep fp32 moments.

    Returns:
        A `QTensor`; an array of the plain format; or an fp32 array if the parameter is not to be quantized.
    """
    if isinstance(storage, formats.Format):
        return jnp.zeros_like(param, dtype=storage.dtype)
    if not should_quantize(param.shape, storage, min_size):
        return jnp.zeros_like(param, dtype=jnp.float32)
    fmt = formats.get(storage.format)
    # A code book does not begin with zero.
    zero = 0 if fmt.codebook is None else fmt.codebook.index(0.0)
    codes = jnp.full_like(param, zero, dtype=fmt.dtype)
    shape = blocks.counts(param.shape, storage.block_shape(param.shape))
    scale = _ones_per_block(param, shape, formats.get(storage.scale_format).dtype)
    exponents = _ones_per_block(param, shape, expansion.DTYPE) if storage.expand else None
    return QTensor(codes, scale, exponents, None, storage)


def _ones_per_block(param: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """Ones, a block of `param` each, in the sharding of `param`; where that is not committed to a device, neither."""
    if isinstance(param, jax.core.Tracer):
        axes, sharding = blocks.explicit_axes(param), jax.typeof(param).sharding
        spec = blocks.block_partition_spec(sharding.spec, shape, axes)
        return jnp.ones(shape, dtype, out_sharding=NamedSharding(sharding.mesh, spec) if axes else None)
    # Programs move what is not committed to where their other arguments are.
    is_committed = param.committed if isinstance(param, jax.Array) else getattr(param, "sharding", None) is not None
    sharding = param.sharding if is_committed else None
    if isinstance(sharding, NamedSharding):
        spec = blocks.block_partition_spec(sharding.spec, shape, dict(sharding.mesh.shape))
        sharding = NamedSharding(sharding.mesh, spec)
    return jnp.ones(shape, dtype, device=sharding)


def replicate_scalars(params: optax.Params, state: optax.OptState) -> optax.OptState:
    """The state, with counts and the like on all devices of the mesh that the parameters are on.

    The first step would put them there; and as its result, they would make `jax.jit` compile the second one anew.
    """
    leaves = jax.tree.leaves((params, state))
    if any(not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) for x in leaves):
        return state
    meshes = {x.sharding.mesh for x in jax.tree.leaves(params) if x.committed and isinstance(x.sharding, NamedSharding)}
    if len(meshes) != 1:
        return state
    replicated = NamedSharding(meshes.pop(), PartitionSpec())
    return jax.tree.map(lambda x: x if x.committed else jax.device_put(x, replicated), state)


def resolve_tree(tree_or_fn: Any, params: optax.Params) -> Any:
    """What an argument says of parameters, which is a tree, or a function of them that gives one.

    A tree of a class that can be called (a model that is a pytree) is a tree: its leaves cannot, as optax has it.
    """
    leaves = jax.tree.leaves(tree_or_fn)
    return tree_or_fn(params) if leaves and all(map(callable, leaves)) else tree_or_fn


def is_namedtuple(node: Any) -> bool:
    """Whether a node of a state is a named tuple."""
    return isinstance(node, tuple) and hasattr(node, "_fields")


def state_bytes(state: optax.OptState) -> dict[str, int]:
    """Bytes of an optimizer state, by role.

    Moments go by the names in which optax keeps them: Lion's `mu` and the `trace` of SGD are first moments, the `nu` of
    RMSProp and Adafactor's `v`, `v_row` and `v_col` second ones.

    Args:
        state: the state of any optax transformation, concrete or abstract, or the `opt_state` of an `nnx.Optimizer`.

    Returns:
        {"mu": bytes of all first moments, "nu": of all second moments, "other": the rest}.
    """
    sizes = {"mu": 0, "nu": 0, "other": 0}

    def add(tree: Any, role: str | None) -> None:
        for node in jax.tree.leaves(tree, is_leaf=is_namedtuple):
            if is_namedtuple(node):
                for name in node._fields:
                    add(getattr(node, name), role or _ROLES.get(name))
            elif hasattr(node, "dtype"):
                sizes[role or "other"] += math.prod(node.shape) * node.dtype.itemsize  # keys of noise, too

    add(state, None)
    return sizes


def to_static_integer(name: str, value: int | np.integer | Array) -> int | None:
    """A static integer; None for one that `optax.inject_hyperparams` traced, which `update` has no need of."""
    if isinstance(value, jax.core.Tracer):
        return None
    if not value >= (1 if name == "group_size" else 0) or value // 1 != value:
        raise ValueError(f"{name} must be a positive integer, not {value}")
    return int(value)


def require_static(group_size: int | None, min_size: int | None) -> tuple[int, int]:
    """Both sizes of `to_static_integer`; ValueError for one that is traced."""
    if group_size is None or min_size is None:
        raise ValueError(
            "group_size and min_size are static: name them in optax.inject_hyperparams, "
            "static_args=('group_size', 'min_size')"
        )
    return group_size, min_size


def is_quantized(node: Any) -> bool:
    """Whether a node of a tree is a `QTensor`."""
    return isinstance(node, QTensor)
