"""FSDP inside `jax.shard_map`: whole weights for one layer at a time, and the scatter of their gradients.

Products read codes, which are gathered in the forward pass and again in the backward pass. The gradient of the whole
weight is scattered in its own backward pass.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from fp8jax.core import formats, scaling
from fp8jax.core.qtensor import QTensor, from_bytes, to_bytes
from fp8jax.core.recipe import Comm, Linear, Recipe
from fp8jax.dist import manual
from fp8jax.dist.reduce import reduce_scatter_gradients, resolve
from fp8jax.ops.products.linear import collects_stats
from fp8jax.ops.products.weights import QuantizedWeight, one_pass_spec
from fp8jax.ops.quantization.quantize import quantize, transpose
from fp8jax.recipes import linear_part

# fp32 results in a norm, whose 16-bit operands are saved instead. Sums are not listed: in a model that computes in fp32
# their operands would be saved in their place.
_ELEMENTWISE = frozenset(("convert_element_type", "mul", "square", "integer_pow", "broadcast_in_dim"))


def regather_policy(primitive: Any, *operands: Any, **params: Any) -> bool:
    """A policy of `jax.checkpoint` that saves everything except gathered arrays, which the backward pass gathers again.

    It also does not save fp32 results of elementwise operations: XLA recomputes them from their 16-bit operands.
    """
    if primitive.name.startswith("all_gather"):
        return False
    out_dtype = params.get("new_dtype", operands[0].dtype if operands and hasattr(operands[0], "dtype") else None)
    return not (primitive.name in _ELEMENTWISE and out_dtype == jnp.float32)


def gather_quantized(
    w: Array, axes: manual.Axes, recipe: Recipe | Linear | str, *, scale: Array | None = None
) -> QuantizedWeight | None:
    """A whole `QuantizedWeight` for the products of a recipe, from each device's rows; call it inside `jax.shard_map`.

    Codes and scales are those of `fp8jax.quantize_weight` for the whole weight, bit for bit. One byte per element
    is sent. Use it in `fp8jax.linear(x, fsdp_gather_weight(w, ..., needs_values=False), quantized=...)`, under
    `jax.checkpoint` with `regather_policy` or another policy that does not save gathered arrays.

    Args:
        w: a device's rows of a weight (inputs, outputs).
        axes: the mesh axes that shard the rows.
        recipe: a `Recipe`, its part `Linear`, or a preset's name.
        scale: as for `quantize_weight`.

    Returns:
        The whole weight. None if the recipe reads the weight itself, quantizes it separately for dgrad or collects its
        statistics, or if a shard ends within a block.

    Raises:
        ValueError: outside of `jax.shard_map`.
    """
    manual.check_manual_axes("gather_quantized", axes, (), _ADVICE)
    names, linear = manual.axis_names(axes), linear_part(recipe)
    spec, strategy = one_pass_spec(linear), linear.stateless_strategy("w")
    if spec is None or collects_stats(linear, "w") or w.shape[0] % (spec.group_size or 1):
        return None
    w = lax.stop_gradient(w)
    if spec.granularity == "tensor" and scale is None:
        amax = lax.pmax(scaling.compute_amax(w), names)
        scale = scaling.to_scale(strategy.reduce_amax(amax), formats.get(spec.format))
    shard = quantize(w, spec, scale=scale, strategy=strategy)[0]
    assert shard is not None
    shard = to_bytes(shard)
    scales = shard.scale if spec.granularity == "tensor" else _gather(shard.scale, names)
    gathered = QTensor(_gather(shard.codes, names), scales, None, None, spec)
    return QuantizedWeight(to_bytes(transpose(from_bytes(gathered))), gathered)


def fsdp_gather_weight(
    w: Array,
    axes: manual.Axes,
    gradients: Comm | Recipe | str,
    *,
    dim: int = 0,
    dtype: DTypeLike | None = None,
    needs_values: bool = True,
) -> Array:
    """A whole weight from each device's shard; call it inside `jax.shard_map`.

    In the backward pass the mean of the gradients over the devices is scattered, in the format of `gradients`.

    Args:
        w: a device's shard.
        axes: the mesh axes that shard it.
        gradients: as for `reduce_scatter_gradients`.
        dim: the sharded dimension.
        dtype: dtype on the wire and of the result; None uses that of the shard.
        needs_values: whether the values are read. If not, the result is zeros, which stand for the weight next to the
            codes of `gather_quantized`; nothing is gathered or computed.

    Raises:
        ValueError: outside of `jax.shard_map`; or as for `reduce_scatter_gradients`, in the backward pass.
    """
    manual.check_manual_axes("fsdp_gather_weight", axes, (), _ADVICE)
    return _gather_weight(
        manual.axis_names(axes), dim, resolve(gradients), jnp.dtype(dtype or w.dtype), needs_values, w
    )


_ADVICE = "jax.shard_map(step, mesh=mesh, axis_names={names}, in_specs=..., out_specs=...)"


def _gather(x: Array, axes: tuple[str, ...], dim: int = 0) -> Array:
    return lax.all_gather(x, axes, axis=dim, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
def _gather_weight(axes: tuple[str, ...], dim: int, comm: Comm, dtype: Any, needs_values: bool, w: Array) -> Array:
    if needs_values:
        return _gather(w.astype(dtype), axes, dim)
    return jnp.zeros([n * lax.axis_size(axes) if i == dim else n for i, n in enumerate(w.shape)], dtype)


def _forward(axes: Any, dim: Any, comm: Any, dtype: Any, needs_values: Any, w: Array) -> tuple[Array, Array]:
    return _gather_weight(axes, dim, comm, dtype, needs_values, w), jnp.zeros((0,), w.dtype)


def _backward(axes: Any, dim: int, comm: Comm, dtype: Any, needs_values: bool, like: Array, dy: Array) -> tuple[Array]:
    partition_spec = PartitionSpec(*[None] * dim, axes)
    return (reduce_scatter_gradients(dy, axes, comm, specs=partition_spec).astype(like.dtype),)


_gather_weight.defvjp(_forward, _backward)
