"""How the moments of each parameter are stored, and their first values."""

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

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
from fp8jax.ops.optimizers.leaf import is_quantized as is_quantized

T = TypeVar("T")

# Names of moments in optax 0.2.8. State with another name (slow weights, accumulated gradients) may be a sum that would
# stall in 8 bits: the user has to choose its storage.
FIRST_MOMENTS = ("mu", "trace", "ema", "m", "m1", "m2", "exp_avg")
SECOND_MOMENTS = ("nu", "nu_max", "v", "n", "exp_avg_sq", "sum_of_squares", "e_g", "e_x")
# Stored in fp32 by default. A sum that is rounded to nearest stops to grow once its terms are below half a step. A
# maximum that is rounded up stays up. Adadelta's averages depend on each other, so their errors feed back.
MONOTONE_ACCUMULATORS = ("sum_of_squares", "nu_max", "e_g", "e_x")
# Adafactor's means over rows and columns. Without factoring they are unused, of shape (1,), like some parameters.
FACTORED_MOMENTS = ("v_row", "v_col")
SECOND_MOMENT_FIELDS = (*SECOND_MOMENTS, *FACTORED_MOMENTS)
_ROLES = dict.fromkeys(FIRST_MOMENTS, "mu") | dict.fromkeys(SECOND_MOMENT_FIELDS, "nu")

# Largest share of scales and exponents, relative to the bytes of the codes.
MAX_METADATA_FRACTION = 0.10


def should_quantize(shape: tuple[int, ...], spec: QuantSpec | None, min_size: int) -> bool:
    """Whether the moments of a parameter of this global shape are quantized; False without a spec.

    The parameter must have `min_size` elements. Scales and exponents may need at most 10 % of the bytes of the codes,
    or the share of full groups if that is more. Short last axes (LoRA factors, biases) exceed that.
    """
    if spec is None or not shape or math.prod(shape) < max(min_size, 1):
        return False
    allowed = max((1 + MAX_METADATA_FRACTION) * formats.get(spec.format).bytes_per_element, spec.bytes_per_element)
    return spec.nbytes(shape) <= math.prod(shape) * allowed


def zeros(param: Any, storage: QuantSpec | formats.Format, min_size: int) -> Moment:
    """A moment of zeros for one parameter, sharded like it.

    Args:
        param: array, tracer or `jax.ShapeDtypeStruct`.
        storage: how the moment is stored: quantized, or cast to a plain format.
        min_size: parameters with fewer elements have fp32 moments.

    Returns:
        A `QTensor`; an array of the plain format; or an fp32 array if the parameter is not to be quantized.
    """
    if isinstance(storage, formats.Format):
        return jnp.zeros_like(param, dtype=storage.dtype)
    if not should_quantize(param.shape, storage, min_size):
        return jnp.zeros_like(param, dtype=jnp.float32)
    fmt = formats.get(storage.format)
    # The first code of a code book is not zero.
    zero = 0 if fmt.codebook is None else fmt.codebook.index(0.0)
    codes = jnp.full_like(param, zero, dtype=fmt.dtype)
    shape = blocks.counts(param.shape, storage.block_shape(param.shape))
    scale = _ones_per_block(param, shape, formats.get(storage.scale_format).dtype)
    exponents = _ones_per_block(param, shape, expansion.DTYPE) if storage.expand else None
    return QTensor(codes, scale, exponents, None, storage)


def _ones_per_block(param: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """Ones for each block of `param`, in its sharding; not committed to a device if `param` is not."""
    if isinstance(param, jax.core.Tracer):
        axes, sharding = blocks.explicit_axes(param), jax.typeof(param).sharding
        spec = blocks.block_partition_spec(sharding.spec, shape, axes)
        return jnp.ones(shape, dtype, out_sharding=NamedSharding(sharding.mesh, spec) if axes else None)
    # A program moves arrays that are not committed to the devices of its other arguments.
    is_committed = param.committed if isinstance(param, jax.Array) else getattr(param, "sharding", None) is not None
    sharding = param.sharding if is_committed else None
    if isinstance(sharding, NamedSharding):
        spec = blocks.block_partition_spec(sharding.spec, shape, dict(sharding.mesh.shape))
        sharding = NamedSharding(sharding.mesh, spec)
    return jnp.ones(shape, dtype, device=sharding)


def replicate_scalars(state: optax.OptState, params: optax.Params) -> optax.OptState:
    """The state, with counts and other scalars replicated over the mesh of the parameters.

    Otherwise the first step would place them there, and `jax.jit` would compile the second step again.
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
    """An argument that is a tree, or a function of the parameters that returns one, as a tree.

    As in optax, a tree of a callable class (a model that is a pytree) is a tree: its leaves are not callable.
    """
    leaves = jax.tree.leaves(tree_or_fn)
    return tree_or_fn(params) if leaves and all(map(callable, leaves)) else tree_or_fn


def is_namedtuple(node: Any) -> bool:
    """Whether a node of a state is a named tuple."""
    return isinstance(node, tuple) and hasattr(node, "_fields")


def state_bytes(state: optax.OptState) -> dict[str, int]:
    """Bytes of an optimizer state, by role.

    Moments are found by optax's names: Lion's `mu` and SGD's `trace` are first moments; RMSProp's `nu` and Adafactor's
    `v`, `v_row` and `v_col` are second moments.

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
    """A static integer; None if `optax.inject_hyperparams` traced it. Only `init` needs it."""
    if isinstance(value, jax.core.Tracer):
        return None
    if not value >= (1 if name == "group_size" else 0) or value // 1 != value:
        raise ValueError(f"{name} must be a positive integer, not {value}")
    return int(value)


def require_static(group_size: int | None, min_size: int | None) -> tuple[int, int]:
    """Both sizes of `to_static_integer`; ValueError for one that is traced."""
    if group_size is None or min_size is None:
        raise ValueError(
            "group_size and min_size are static; pass them to optax.inject_hyperparams as static_args=('group_size', "
            "'min_size')"
        )
    return group_size, min_size


def iter_namedtuples(tree: Any, is_whole: Callable[[Any], bool] = lambda _: False) -> Iterator[Any]:
    """The named tuples of a state, outer ones first, except those inside of one that is whole."""
    for node in jax.tree.leaves(tree, is_leaf=is_namedtuple):
        if is_namedtuple(node):
            yield node
            if not is_whole(node):
                for field in node:
                    yield from iter_namedtuples(field, is_whole)


def find_nodes(tree: Any, kind: type[T]) -> list[T]:
    """The nodes of a tree that are instances of a class."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]
