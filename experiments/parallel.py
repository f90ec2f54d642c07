"""Loss and gradient of each device, where a recipe says in what gradients travel between devices: in jax.shard_map.

Recipes that leave that to XLA (`Comm.gradients` is None) have no use for this file: XLA then sums gradients wherever
sharded batches make that necessary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from experiments import mesh as meshes
from fp8jax.dist import Factors, all_reduce_gradients, init_factors, reduce_scatter_gradients
from fp8jax.dist.reduce import MIN_SIZE
from fp8jax.recipes import Comm

Gradients = Callable[[Any, Any, jax.Array], tuple[jax.Array, Any, Any]]


def stacked(tree: Any) -> Any:
    """How many leading axes of each parameter stack layers, each of which is a tensor with a scale of its own."""
    return jax.tree_util.tree_map_with_path(lambda path, _: meshes.stacked(path), tree)


def factors(comm: Comm, params: Any, mesh: Any) -> Factors | tuple[()]:
    """The state of auto-scaling before the first step; empty without.

    Raises:
        ValueError: gradients are reduced twice, along both axes of the mesh.
    """
    if not comm.auto_scale or mesh is None:
        return ()
    if all(mesh.shape[name] > 1 for name in meshes.AXES):
        raise ValueError("comm.auto_scale has one factor a parameter; give --mesh one axis, data=N or fsdp=N")
    return init_factors(params, mesh.size)


def saturated(factors: Factors, grads: Any) -> jax.Array:
    """How many elements of a step's gradients lay at the end of the range after their sum in 8 bits, float32."""
    counts = jax.tree.map(lambda part, g: part * g.size, factors.saturated, grads)
    return jnp.round(sum(jax.tree.leaves(counts), jnp.float32(0)))


def gradients(
    own: Gradients,
    comm: Comm,
    mesh: Any,
    params: Any,
    model_state: Any,
    tokens_BxT: jax.Array,
    factors: Factors | tuple[()],
) -> tuple[jax.Array, Any, Any, Factors | tuple[()]]:
    """Means over all devices of loss and gradients, the model state of the next step, and the new factors.

    Parameters that lie in shards are gathered whole before the step, all of them at once and in the dtype that they are
    held in, and their gradients scattered; the optimizer's states stay sharded.
    `fp8jax.dist.gather_weights` would send weights of quantized layers as codes. It is not used here: it reduces
    gradients in its own backward pass, once a microbatch and without factors, and the gathered copy would be as large.

    Args:
        own: `own(params, model_state, tokens)`, a device's own loss, gradients and model state.
        comm: in what gradients travel.
        mesh: the devices.
        params, model_state, tokens_BxT: as of `own`, of all devices.
        factors: the state of auto-scaling.
    """
    places = jax.tree.map(lambda x: x.spec, meshes.state(mesh, params))
    data, fsdp = (mesh.shape[name] for name in meshes.AXES)
    depths = stacked(params)

    def whole(x: jax.Array, place: PartitionSpec) -> jax.Array:
        return lax.all_gather(x, "fsdp", axis=list(place).index("fsdp"), tiled=True) if "fsdp" in place else x

    def body(params: Any, model_state: Any, tokens: jax.Array, factors: Any) -> Any:
        loss, grads, state = own(jax.tree.map(whole, params, places), model_state, tokens)
        if fsdp > 1:
            how = {"specs": places, "stacked": depths}
            grads, factors = _kept(reduce_scatter_gradients, grads, "fsdp", comm, factors, **how)
        if data > 1:
            how = {"stacked": depths, "min_size": MIN_SIZE // fsdp}
            grads, factors = _kept(all_reduce_gradients, grads, "data", comm, factors, **how)
        # Statistics of a step are maxima over its devices; all else is the same on all.
        state = jax.tree.map(lambda x: lax.pmax(x, meshes.AXES) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)
        return lax.pmean(loss, meshes.AXES), grads, state, factors

    rows, everywhere = PartitionSpec(meshes.AXES), PartitionSpec()
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(places, everywhere, rows, everywhere),
        out_specs=(everywhere, places, everywhere, everywhere),
        check_vma=False,
    )(params, model_state, tokens_BxT, factors)


def _kept(reduce: Callable[..., Any], grads: Any, axes: str, comm: Comm, factors: Any, **how: Any) -> tuple[Any, Any]:
    """A reduction of gradients, with factors where there are any."""
    if not isinstance(factors, Factors):
        return reduce(grads, axes, comm, **how), factors
    found: tuple[Any, Any] = reduce(grads, axes, comm, factors=factors, **how)
    return found
