"""Loss and gradient of each device inside `jax.shard_map`, with explicit collectives.

They are used if a recipe reduces gradients in 8 bits, if devices share sequences, and for experts. Otherwise XLA
sums gradients, wherever sharded batches make that necessary.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec

import fp8jax
from experiments import mesh as meshes
from experiments.models.llama import Block, LlamaConfig
from experiments.models.moe import RouterLoss
from experiments.train import experts, tensor
from experiments.train.adapters import BaseVariable, difference, joined
from fp8jax.dist import (
    Factors,
    all_reduce_gradients,
    fsdp_gather_weight,
    gather_quantized,
    init_factors,
    reduce_scatter_gradients,
    regather_policy,
)
from fp8jax.dist.reduce import MIN_SIZE
from fp8jax.recipes import Comm

Gradients = Callable[
    [Any, Any, jax.Array, "GatheredModel | None", tuple[str, ...]], tuple[dict[str, jax.Array], Any, Any]
]


_SUMS = ("add", "sub", "neg")


@dataclasses.dataclass(frozen=True)
class GatheredModel:
    """Gathers sharded parameters, those of a layer in each call: an `Around` of a model's layers.

    For the weight of a quantized matmul, codes are gathered, in the forward and again in the backward pass. For other
    parameters, values are gathered. The backward pass returns gradients averaged over "fsdp", per microbatch.

    Attributes:
        comm: format of the gradients that are sent.
        sharded_names: names of the sharded parameters, such as "layers.mlp.up.kernel".
        dtype: compute dtype of matmuls that read values.
    """

    comm: Comm
    sharded_names: frozenset[str]
    dtype: str

    def policy(self, primitive: Any, *operands: Any, **params: Any) -> bool:
        """Saves everything except gathered arrays, and fp32 sums of a model that computes in 16 bits."""
        is_fp32_sum = primitive.name in _SUMS and getattr(operands[0], "dtype", None) == jnp.float32
        return regather_policy(primitive, *operands, **params) and not (
            is_fp32_sum and fp8jax.formats.get(self.dtype).bits == 16
        )

    def outer_weights(self, weights: nnx.State) -> nnx.State:
        """Gathers the parameters outside of layers; returns the others unchanged."""
        return self._gather(weights, "", {}, set()) if self.sharded_names else weights

    def __call__(self, layer: Block, call: Callable[[Block], Array]) -> Array:
        """Calls a layer whose parameters are sharded."""
        gathers_by_path: dict[str, bool] = {}
        unsure: set[str] = set()

        def codes(path: str, w: Array, linear: fp8jax.recipes.Linear, scale: Array | None) -> Any:
            name = f"layers.{path}.kernel"
            quantized = gather_quantized(w, "fsdp", linear, scale=scale) if name in self.sharded_names else None
            gathers_by_path[name] = quantized is not None
            if gathers_by_path[name] and linear.skip_unprofitable:
                unsure.add(name)
            return quantized

        graph, *states = nnx.split(fp8jax.nnx.quantize_weights(layer, codes), nnx.Param, BaseVariable, ...)
        weights, base, other_state = states
        gathered = nnx.merge(
            graph, self._gather(weights, "layers.", gathers_by_path, unsure), self._base(base), other_state
        )
        y = call(gathered)
        nnx.update(layer, nnx.state(gathered, (fp8jax.nnx.ScalingVariable, RouterLoss)))
        return y

    def _base(self, base: nnx.State) -> nnx.State:
        """Gathers frozen parameters in their stored dtype."""

        def one(path: Any, x: Array) -> Array:
            return (
                lax.all_gather(x, "fsdp", axis=x.ndim - 2, tiled=True)
                if _name(path, "layers.") in self.sharded_names
                else x
            )

        gathered: nnx.State = jax.tree_util.tree_map_with_path(one, base)
        return gathered

    def _gather(self, weights: nnx.State, start: str, gathers_by_path: dict[str, bool], unsure: set[str]) -> nnx.State:
        """Gathers parameters, except those with gathered codes.

        Args:
            weights: sharded parameters.
            start: prefix of the names to gather, "" for those outside of layers.
            gathers_by_path: whether the codes of a weight are gathered, by name.
            unsure: names of weights that are gathered in both forms. XLA removes the one that nothing reads.
        """

        def one(path: Any, x: Array) -> Array:
            name = _name(path, start)
            if name not in self.sharded_names or name.startswith("layers.") != bool(start):
                return x
            # A matmul that quantizes its weight itself reads the stored values.
            dtype = x.dtype if name in gathers_by_path and name not in unsure else fp8jax.formats.get(self.dtype).dtype
            read = not gathers_by_path.get(name, False) or name in unsure
            return fsdp_gather_weight(x, "fsdp", self.comm, dim=x.ndim - 2, dtype=dtype, needs_values=read)

        gathered: nnx.State = jax.tree_util.tree_map_with_path(one, weights)
        return gathered


def _name(path: Any, start: str) -> str:
    """The name of a parameter in `GatheredModel.sharded_names`."""
    return start + jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def mapped(llama: LlamaConfig, recipe: fp8jax.Recipe, rows: jax.sharding.NamedSharding | None) -> bool:
    """Returns whether loss and gradients are computed inside `jax.shard_map`, for batches with this sharding.

    With experts, each device sorts its own tokens. XLA would gather all tokens to sort them.
    """
    if rows is None:
        return False
    shared = rows.mesh.shape.get(tensor.AXIS, 1) > 1
    return recipe.comm.gradients is not None or shared or llama.experts > 0


def reduction(recipe: fp8jax.Recipe) -> Comm:
    """Returns the format of gradients that are sent inside `jax.shard_map`; by default the compute dtype of matmuls."""
    if recipe.comm.gradients is not None:
        return recipe.comm
    return Comm("fp32" if recipe.weights.compute == "fp32" else "bf16")


def check(llama: LlamaConfig, recipe: fp8jax.Recipe, mesh: Any, tokens: int) -> None:
    """Raises ValueError, with the fix, if a mesh cannot train a model with a recipe.

    Args:
        llama: the shape.
        recipe: the recipe.
        mesh: the devices.
        tokens: number of tokens of a microbatch.
    """
    _check_factors(recipe.comm, mesh)
    sharing = mesh.shape[experts.AXIS]
    if sharing > 1:
        experts.check_devices(llama, sharing)
    devices = mesh.shape[tensor.AXIS]
    if devices > 1:
        tensor.check(llama, devices)
        tensor.check_tokens(recipe, devices, tokens // meshes.replicas(mesh))


def _check_factors(comm: Comm, mesh: Any) -> None:
    axes = [name for name in meshes.ROWS if mesh.shape.get(name, 1) > 1]
    if comm.auto_scale and (len(axes) > 1 or experts.AXIS in axes):
        raise ValueError(
            "comm.auto_scale has one factor per parameter. Use --mesh with one axis, data=N or fsdp=N, or a recipe "
            "with two phases, such as fp8_lm_two_phase"
        )


def stacked(tree: Any) -> Any:
    """Returns the number of leading axes of each parameter that stack layers or experts, which have separate scales."""
    return jax.tree_util.tree_map_with_path(lambda path, _: meshes.stacked(path), tree)


def factors(comm: Comm, params: Any, mesh: Any) -> Factors | tuple[()]:
    """Returns the initial state of auto-scaling; empty without auto-scaling or with a single replica.

    Raises:
        ValueError: gradients are reduced along both axes of the mesh.
    """
    if not comm.auto_scale or mesh is None or meshes.replicas(mesh) == 1:
        return ()
    _check_factors(comm, mesh)
    return init_factors(params, meshes.replicas(mesh))


def saturated(factors: Factors, grads: Any) -> jax.Array:
    """Returns the number of gradient elements that saturated in their 8-bit sum, float32."""
    counts = jax.tree.map(lambda part, g: part * g.size, factors.saturated, grads)
    return jnp.round(sum(jax.tree.leaves(counts), jnp.float32(0)))


def gradients(
    device_gradients: Gradients,
    recipe: fp8jax.Recipe,
    mesh: Any,
    params: Any,
    model_state: Any,
    tokens_BxT: jax.Array,
    factors: Factors | tuple[()],
    base: Any = MappingProxyType({}),
) -> tuple[dict[str, jax.Array], Any, Any, Factors | tuple[()]]:
    """Returns losses and gradients (means over all devices), the next model state, and the new factors.

    Sharded parameters are gathered layer by layer: see `GatheredModel`. With factors, which a backward pass cannot
    return, all are gathered before the step, in their stored dtype. Over "tensor", layers are computed in parts;
    parameters outside of layers are gathered before the step.

    Args:
        device_gradients: called with (params, model_state, tokens, gathered_model, axes). It returns the losses and
            gradients of a device, and the model state with observations merged over the mesh axes.
        recipe: its part `comm` has the format in which gradients are sent.
        mesh: the devices.
        params, model_state, tokens_BxT: its arguments, for all devices.
        factors: the state of auto-scaling.
        base: frozen weights, sharded like parameters. The returned model state does not include them.
    """
    comm, compute, base = reduction(recipe), recipe.weights.compute, dict(base)
    specs, base_specs = (jax.tree.map(lambda x: x.spec, meshes.state(mesh, tree)) for tree in (params, base))
    data, fsdp, shared, sharing = (mesh.shape[name] for name in meshes.AXES)
    depths = stacked(params)
    at_once = isinstance(factors, Factors)
    layerwise = (
        None
        if at_once or fsdp == 1
        else GatheredModel(comm, sharded_names(params, mesh) | sharded_names(base, mesh), compute)
    )

    def gathered(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        dim = meshes.dim_sharded_over(spec, "fsdp")
        return x if dim is None else lax.all_gather(x, "fsdp", axis=dim, tiled=True)

    def body(params: Any, model_state: Any, tokens: jax.Array, factors: Any, base: Any) -> Any:
        inputs, gathered_base = params, base
        if shared > 1:
            inputs = tensor.added_once(tensor.gathered(inputs, specs, compute))
            gathered_base = tensor.added_once(tensor.gathered(gathered_base, base_specs, compute))
        if layerwise is None:
            inputs = jax.tree.map(gathered, inputs, specs)
        outer = lambda path, x, spec: gathered(x, spec) if layerwise is None or not meshes.stacked(path) else x  # noqa: E731
        gathered_base = jax.tree_util.tree_map_with_path(outer, gathered_base, base_specs)
        losses, grads, state = device_gradients(
            inputs, joined(model_state, gathered_base), tokens, layerwise, meshes.AXES
        )
        state = difference(state, gathered_base)
        if layerwise is not None:
            is_reduced = jax.tree.map(lambda spec: meshes.dim_sharded_over(spec, "fsdp") is not None, specs)
            unreduced = [
                g for g, reduced in zip(*map(jax.tree.leaves, (grads, is_reduced)), strict=True) if not reduced
            ]
            means = iter(all_reduce_gradients(unreduced, "fsdp", comm) if unreduced else ())
            grads = jax.tree.map(lambda g, reduced: g if reduced else next(means), grads, is_reduced)
        elif fsdp > 1:
            scatter = functools.partial(
                reduce_scatter_gradients, axes="fsdp", comm=comm, specs=specs, layer_axes=depths
            )
            grads, factors = _reduced(scatter, grads, factors)
        if shared > 1:
            losses, grads = lax.psum(losses, tensor.AXIS), tensor.summed(grads, specs, compute)
        min_size = MIN_SIZE // (fsdp * shared)
        if sharing > 1:
            grads = _mean_with_experts(grads, comm, mesh, min_size)
        elif data > 1:
            reduce = functools.partial(
                all_reduce_gradients, axes="data", comm=comm, layer_axes=depths, min_size=min_size
            )
            grads, factors = _reduced(reduce, grads, factors)
        if at_once and shared > 1:  # a sharded parameter has a single factor
            mu = jax.tree.map(lambda mu: lax.pmin(mu, tensor.AXIS), factors.mu)
            factors = Factors(mu, jax.tree.map(lambda part: lax.pmean(part, tensor.AXIS), factors.saturated))
        return lax.pmean(losses, meshes.ROWS), grads, state, factors

    rows, replicated = PartitionSpec(meshes.ROWS), PartitionSpec()
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(specs, replicated, rows, replicated, base_specs),
        out_specs=(replicated, specs, replicated, replicated),
        check_vma=False,
    )(params, model_state, tokens_BxT, factors, base)


def sharded_names(params: Any, mesh: Any) -> frozenset[str]:
    """Returns the names of sharded parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(meshes.state(mesh, params))
    names = ((jax.tree_util.keystr(path, simple=True, separator="."), x.spec) for path, x in leaves)
    return frozenset(name for name, spec in names if meshes.dim_sharded_over(spec, "fsdp") is not None)


def _mean_with_experts(grads: Any, comm: Comm, mesh: Any, min_size: int) -> Any:
    """Returns means over "data" and "expert". Gradients of experts are already sums over "expert"."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(grads)

    def means(of_experts: bool, axes: tuple[str, ...]) -> Any:
        selected = [(path, g) for path, g in leaves if meshes.has_experts(path) == of_experts]
        if all(mesh.shape[name] == 1 for name in axes):
            return iter([g for _, g in selected])
        depths = [meshes.stacked(path) for path, _ in selected]
        return iter(all_reduce_gradients([g for _, g in selected], axes, comm, layer_axes=depths, min_size=min_size))

    expert_means, other_means = means(True, ("data",)), means(False, ("data", experts.AXIS))
    devices = mesh.shape[experts.AXIS]
    gradients = [next(expert_means) / devices if meshes.has_experts(path) else next(other_means) for path, _ in leaves]
    return jax.tree.unflatten(structure, gradients)


def _reduced(reduce: Callable[..., Any], grads: Any, factors: Any) -> tuple[Any, Any]:
    """Reduces gradients, with factors if there are any."""
    if not isinstance(factors, Factors):
        return reduce(grads), factors
    reduced: tuple[Any, Any] = reduce(grads, factors=factors)
    return reduced
