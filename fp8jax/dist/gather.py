"""FSDP with 8-bit gathers: sharded weights, gathered as codes for a layer."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from fp8jax.core import blocks, encoding, formats
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import Comm, Linear, Recipe
from fp8jax.core.spec import QuantSpec
from fp8jax.dist import manual, shared_scales
from fp8jax.dist.reduce import broadcast_specs, reduce_scatter_gradients, resolve


def gather_weights(
    weights: Any,
    axes: manual.Axes,
    wire_format: QuantSpec | Recipe | Linear | str = "e4m3",
    *,
    specs: Any,
    gradients: Comm | Recipe | str = "bf16",
    dtype: DTypeLike | None = None,
) -> Any:
    """Whole weights from each device's shards, which are sent as codes; call it inside `jax.shard_map`.

    Every device quantizes its shard under the scales of the whole weight and gathers the codes, one byte per element.
    The decoded weights are rounded once. Products of the recipe in `wire_format` round them to the same codes again. In
    the backward pass, gradients of the whole weight are summed over the devices and scattered, as for
    `jax.lax.all_gather`, in the format of `gradients`.

    The whole weight is a residual if the backward pass needs it. To gather codes again instead, use `jax.checkpoint`
    with a policy that does not save it, such as `jax.checkpoint_policies.dots_saveable`.

    Args:
        weights: tree of shards of floating dtypes.
        axes: the mesh axes of the shards.
        wire_format: the `QuantSpec` of each whole weight, or its string form; or a recipe, for the spec of its weights
            (inputs, outputs), with leading axes stacked.
        specs: tree, or a prefix of `weights`, of `PartitionSpec`s, which name the dimension that is sharded over all of
            `axes`. A weight that is not sharded, or has fewer than two axes, is returned unchanged.
        gradients: format of gradients on the wire, as for `reduce_scatter_gradients`.
        dtype: dtype of the whole weights; None uses that of the shards.

    Returns:
        The tree of whole weights.

    Raises:
        ValueError: outside of `jax.shard_map`; the recipe does not quantize weights; or a shard ends within a block.
    """
    replicas, names = manual.check_manual_axes("gather_weights", axes, ()), manual.axis_names(axes)
    comm = resolve(gradients)
    flat: Any = jax.tree_util.tree_flatten_with_path(weights)
    gathered = []
    for (path, w), partition_spec in zip(flat[0], broadcast_specs(specs, weights), strict=True):
        dim = _sharded_dim(partition_spec, names)
        if dim is None or w.ndim < 2:
            gathered.append(w)
            continue
        spec = _weight_spec(wire_format, w.ndim)
        shape = tuple(n * replicas if i == dim else n for i, n in enumerate(w.shape))
        block = spec.block_shape(shape)[dim], (spec.micro_shape(shape)[dim] if spec.granularity == "mx" else 1)
        if any(b < shape[dim] and w.shape[dim] % b for b in block):
            raise ValueError(
                f"gather_weights: shards of {jax.tree_util.keystr(path) or 'the weight'} are {w.shape[dim]} long "
                f"along dimension {dim}, which is not a multiple of the block of {spec}; shard another dimension"
            )
        gathered.append(_gather(spec, names, dim, shape, comm, jnp.dtype(dtype or w.dtype), w))
    return flat[1].unflatten(gathered)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4, 5))
def _gather(
    spec: QuantSpec, axes: tuple[str, ...], dim: int, shape: tuple[int, ...], comm: Comm, dtype: Any, w: Array
) -> Array:
    """The whole weight of this `shape`, decoded from codes that are gathered along `dim`, over the mesh axes `axes`.

    `w` is a device's shard. The forward pass does not use `comm`, which is the format of gradients on the wire.
    """
    fmt, scale = formats.get(spec.format), None
    is_scale_shared = spec.block_shape(shape)[dim] >= shape[dim]
    # If a block spans `dim`, all shards share its scale. It comes from the maximum over devices.
    if is_scale_shared:
        amax = blocks.reduce(shared_scales.abs_with_nan_as_inf(w), spec.block_shape(w.shape), jnp.max, 0.0)
        scale = shared_scales.to_scale(shared_scales.pmax_arrays([amax], axes)[0], fmt)
        if spec.granularity == "mx" and spec.outer_scale == "none":
            scale = jnp.ones_like(scale)
    leaves = encoding.encode(w, spec, scale=scale)

    def all_gather(x: Array) -> Array:
        shard_bytes = formats.bitcast(x, jnp.uint8)
        gathered_bytes = lax.all_gather(shard_bytes, axes, axis=dim, tiled=True)
        return formats.bitcast(gathered_bytes, x.dtype)

    codes = all_gather(leaves.codes)
    scale = leaves.scale if is_scale_shared else all_gather(leaves.scale)
    micro = None if leaves.microscale is None else all_gather(leaves.microscale)
    return QTensor(codes, scale, None, micro, spec).dequantize(dtype)


def _forward(spec: Any, axes: Any, dim: Any, shape: Any, comm: Any, dtype: Any, w: Array) -> tuple[Array, Any]:
    return _gather(spec, axes, dim, shape, comm, dtype, w), jnp.zeros((0,), w.dtype)


def _backward(spec: Any, axes: Any, dim: int, shape: Any, comm: Comm, dtype: Any, like: Array, dy: Array) -> Any:
    partition_spec = PartitionSpec(*[None] * dim, axes)
    mean = reduce_scatter_gradients(dy, axes, comm, specs=partition_spec, min_size=0)
    return ((mean * lax.axis_size(axes)).astype(like.dtype),)


_gather.defvjp(_forward, _backward)


def _sharded_dim(partition_spec: PartitionSpec, axes: tuple[str, ...]) -> int | None:
    for dim, entry in enumerate(partition_spec):
        if tuple(name for name in blocks.spec_entry_axes(entry) if name in axes) == axes:
            return dim
    return None


def _weight_spec(wire_format: QuantSpec | Recipe | Linear | str, ndim: int) -> QuantSpec:
    """The spec of a weight with `ndim` axes; a recipe's spec is for (outputs, inputs)."""
    from fp8jax import recipes

    if isinstance(wire_format, str) and wire_format in recipes.NAMES:
        wire_format = recipes.get(wire_format)
    if not isinstance(wire_format, (Recipe, Linear)):
        return QuantSpec.parse(wire_format)
    spec = recipes.linear_part(wire_format).spec("w")
    if spec is None:
        raise ValueError("gather_weights: the recipe does not quantize weights; pass a spec, such as 'e4m3'")
    return dataclasses.replace(spec, axis=-2, layer_axes=ndim - 2)
