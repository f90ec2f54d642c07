"""Tensor and sequence parallelism: devices along "tensor" share the sequences of their part of a batch.

Between layers and in norms, a device has some of the tokens. In attention and MLPs, it has all tokens, with some of the
heads and channels. Input projections are sharded along outputs, output projections along inputs
(`experiments.mesh.state`). If the recipe quantizes operands without a state, activations are sent as codes, forward and
backward. Otherwise they are sent in the compute dtype of matmuls. Embedding, head and loss use a device's own tokens.
"""

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import fp8jax
from experiments import mesh as meshes
from experiments.models.shape import LlamaConfig
from experiments.train.form import Form
from fp8jax.dist import gather_sequence, scatter_sequence
from fp8jax.recipes import Linear

AXIS = "tensor"


@dataclasses.dataclass(frozen=True)
class TokenBoundary:
    """The `Boundary` of a model's layers inside `jax.shard_map`.

    Attributes:
        devices: number of devices that share sequences.
        wire_format: format of sent activations: the linear part of a recipe for codes, or a dtype by name.
    """

    devices: int
    wire_format: Linear | str

    def shard(self, x: jax.Array) -> jax.Array:
        """Returns a device's part of a replicated array, along the first axis."""
        length = x.shape[0] // self.devices
        return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * length, length)

    def enter(self, x_NxD: jax.Array) -> jax.Array:
        """Gathers the tokens of all devices."""
        return gather_sequence(x_NxD, AXIS, self.wire_format)

    def leave(self, x_NxD: jax.Array) -> jax.Array:
        """Reduce-scatters tokens: returns a device's tokens of the sum over devices. Rematerialization saves them."""
        return checkpoint_name(scatter_sequence(x_NxD, AXIS, self.wire_format), "boundary_product")


def wire_format(recipe: fp8jax.Recipe) -> Linear | str:
    """Returns the format of activations between devices: codes of a recipe's matmuls, or their compute dtype.

    Codes are not possible with stateful scaling, whose state covers all tokens, or with fallback blocks, which are
    quantized only after the fallback is decided.
    """
    part = recipe.linear
    observes = any(strategy.collects_stats for strategy in part.stateful_strategies.values())
    return recipe.weights.compute if observes or not part.is_quantized else part


def of_device(form: Form, devices: int) -> Form:
    """Returns the form of a device's model if it shares sequences with other devices.

    Raises:
        ValueError: see `check`.
    """
    check(form.llama, devices)
    if form.lora is not None:
        check_base(form.llama, form.lora.base, devices)
    boundary = TokenBoundary(devices, wire_format(form.recipe))
    return dataclasses.replace(form, llama=of_heads(form.llama, devices), rows=None, boundary=boundary)


def of_heads(llama: LlamaConfig, devices: int) -> LlamaConfig:
    """Returns the shape with a device's heads and channels."""
    sizes = {name: getattr(llama, name) // devices for name in ("heads", "kv_heads", "mlp_dim")}
    return dataclasses.replace(llama, **sizes, channels=llama.head_dim)


def check(llama: LlamaConfig, devices: int) -> None:
    """Raises ValueError, with the fix, if the model cannot be sharded over this number of devices."""
    if llama.experts:
        raise ValueError(
            f"{devices} devices along tensor are not supported for experts; use fsdp={devices} or data={devices}"
        )
    for name, label in (("heads", "query heads"), ("kv_heads", "key and value heads"), ("mlp_dim", "MLP channels")):
        size = getattr(llama, name)
        if size % devices:
            fits = [n for n in range(1, size + 1) if size % n == 0]
            raise ValueError(
                f"{devices} devices along tensor do not divide {size} {label}; tensor must be one of {fits}"
            )
    if llama.qk_norm == "width":
        raise ValueError("a norm over the channels of all heads (qk_norm 'width') cannot be sharded; use tensor=1")


def check_base(llama: LlamaConfig, base: str, devices: int) -> None:
    """Raises ValueError if the shards of a frozen weight would split a group of its codes."""
    if base == "bf16":
        return
    spec = fp8jax.QuantSpec.parse(base)
    unit = spec.group_size or 1
    inputs = {"channels of all heads": llama.heads * llama.head_dim, "MLP channels": llama.mlp_dim}
    outputs = {"channels of key heads": llama.kv_heads * llama.head_dim} if spec.granularity == "block" else {}
    for label, size in (inputs | outputs).items():
        if size > unit and (size // devices) % unit:
            raise ValueError(
                f"{devices} devices along tensor have {size // devices} of {size} {label} each, not a multiple of the "
                f"group of {unit} of --base {spec}. Use --base {spec.format}, or another number of devices along tensor"
            )


def check_tokens(recipe: fp8jax.Recipe, devices: int, tokens: int) -> None:
    """Raises ValueError, with the fix, if the tokens of a replica's microbatch cannot be sharded over devices."""
    unit, operands = 1, wire_format(recipe)
    for operand in ("x", "dy"):
        spec = operands.spec(operand) if isinstance(operands, Linear) else None
        if spec is not None and spec.granularity == "block" and spec.rounding == "nearest":
            unit = max(unit, spec.group_size or 1)
    if tokens % (devices * unit):
        blocks = f", in blocks of {unit} with recipe {recipe.name}" if unit > 1 else ""
        raise ValueError(
            f"{devices} devices along tensor do not divide the {tokens} tokens of a replica{blocks}; use a multiple "
            f"of {devices * unit} tokens"
        )


def dimensions(params: Any, devices: int) -> Any:
    """Returns the dimension along which each parameter is sharded inside a layer, or -1."""
    mesh = jax.sharding.AbstractMesh((1, 1, devices, 1), meshes.AXES)

    def dimension(path: Any, sharding: jax.sharding.NamedSharding) -> int:
        dim = meshes.dim_sharded_over(sharding.spec, AXIS) if meshes.stacked(path) else None
        return -1 if dim is None else dim

    return jax.tree_util.tree_map_with_path(dimension, meshes.state(mesh, params))


def gathered(params: Any, specs: Any, dtype: str) -> Any:
    """Gathers parameters outside of layers, which are sharded over "tensor", in the compute dtype of matmuls."""

    def gather(path: Any, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        dim = meshes.dim_sharded_over(spec, AXIS)
        if meshes.stacked(path) or dim is None:
            return x
        sent = x.astype(fp8jax.formats.get(dtype).dtype)
        return lax.all_gather(sent, AXIS, axis=dim, tiled=True).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(gather, params, specs)


def summed(grads: Any, specs: Any, dtype: str) -> Any:
    """Sums the gradients of devices, with the shardings of the parameters.

    Gradients of sharded parameters of layers, and of biases that are added once, are already complete. Others are from
    a device's own tokens or heads.
    """

    def reduce(path: Any, g: jax.Array, spec: PartitionSpec) -> jax.Array:
        dim = meshes.dim_sharded_over(spec, AXIS)
        if meshes.stacked(path) and (dim is not None or _added_once(path)):
            return g
        if dim is None:
            return lax.psum(g.astype("float32"), AXIS).astype(g.dtype)
        sent = g.astype(fp8jax.formats.get(dtype).dtype)
        return lax.psum_scatter(sent, AXIS, scatter_dimension=dim, tiled=True).astype(g.dtype)

    return jax.tree_util.tree_map_with_path(reduce, grads, specs)


def added_once(params: Any) -> Any:
    """Zeroes the biases of output projections on all devices but the first, so that a sum adds them once."""
    first = lax.axis_index(AXIS) == 0
    return jax.tree_util.tree_map_with_path(lambda path, x: x * first if _added_once(path) else x, params)


def _added_once(path: Any) -> bool:
    names = [str(getattr(key, "key", "")) for key in path]
    return len(names) > 1 and names[-1] == "bias" and names[-2] in meshes.INPUTS
