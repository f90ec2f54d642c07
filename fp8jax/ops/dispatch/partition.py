"""Kernels on sharded arrays: one place that turns a call on whole arrays into calls on each device's own parts.

A kernel sees one device's arrays alone, and XLA cannot look into it. So a call says how its operands may be cut, in the
notation of `fp8jax.ops.dispatch.shard_notation`.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fp8jax.ops.dispatch.shard_notation import UNSHARDED, Dimension, Dimensions, DimSharding, Notation, dimensions


class Placement(NamedTuple):
    """The devices of a call.

    Attributes:
        mesh: of all, over whose axes they exchange.
        group: of those that XLA numbers.
    """

    mesh: Any
    group: Any

    @classmethod
    def from_operand(cls, mesh: Any, call_mesh: Any, x: Any) -> "Placement":
        """Finds the devices.

        Args:
            mesh: that JAX says, empty where it knows none and inside `jax.shard_map`.
            call_mesh: the abstract mesh at the call.
            x: an operand, as XLA tells it.
        """
        devices = np.array(x.sharding._device_assignment)
        if AxisType.Manual in call_mesh.axis_types:
            auto_sizes = auto_axis_sizes(call_mesh)
            group_devices = devices[: math.prod(auto_sizes.values())].reshape(*auto_sizes.values())
            return cls(
                Mesh(devices.reshape(call_mesh.axis_sizes), call_mesh.axis_names),
                Mesh(group_devices, tuple(auto_sizes)),
            )
        full_mesh = Mesh(devices, ("all",)) if mesh.empty else mesh
        return cls(full_mesh, full_mesh)

    def spec(self, x: Any) -> PartitionSpec:
        """The mesh axes that cut each dimension of an array; none where it is cut as no axes do, by parts of one."""
        hlo_sharding = x.sharding and x.sharding._to_xla_hlo_sharding(len(x.shape))
        if hlo_sharding is None or not hlo_sharding.is_tiled():
            return PartitionSpec()
        tiles = np.reshape(hlo_sharding.tile_assignment_devices(), hlo_sharding.tile_assignment_dimensions())
        first_devices = (np.moveaxis(tiles, i, 0).reshape(tiles.shape[i], -1)[:, 0] for i in range(len(x.shape)))
        axes_by_order = _axes_by_device_order(tuple(self.group.shape.items()))
        return PartitionSpec(*(axes_by_order.get(tuple(devices.tolist())) for devices in first_devices))


def auto_axis_sizes(mesh: Any) -> dict[str, int]:
    """Sizes of the mesh axes over which XLA places arrays."""
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in kinds if kind == AxisType.Auto and size > 1}


def manual_mesh_context(mesh: Any) -> Any:
    """A context in which arrays are a device's own, whatever mesh a program has set."""
    kinds = (AxisType.Manual,) * len(mesh.axis_names)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(tuple(mesh.axis_sizes), mesh.axis_names, kinds))


@functools.cache
def _axes_by_device_order(sizes: tuple[tuple[str, int], ...]) -> dict[tuple[int, ...], tuple[str, ...]]:
    """By the devices that hold the parts of a dimension, in their order, the mesh axes that cut it."""
    grid = np.arange(math.prod(size for _, size in sizes)).reshape([size for _, size in sizes])
    orders: dict[tuple[int, ...], tuple[str, ...]] = {}
    for count in range(1, len(sizes) + 1):
        for axes in itertools.permutations(range(len(sizes)), count):
            shards = np.moveaxis(grid, axes, range(count)).reshape(math.prod(sizes[i][1] for i in axes), -1)
            orders.setdefault(tuple(shards[:, 0].tolist()), tuple(sizes[i][0] for i in axes))
    return orders


def run_partitioned(
    name: str,
    static: Any,
    function: Callable[..., Any],
    operands: Sequence[Any],
    ins: Sequence[Any],
    outs: Any,
    *,
    units: Mapping[str, int] | None = None,
    sum_dim: str | None = None,
    out_spec: Sequence[Any] | None = None,
    is_kernel: bool = True,
) -> Any:
    """Runs a function of a device's own arrays on arrays that may be sharded, under `jit` as well as `jax.vmap`.

    Arrays on Auto mesh axes are cut as XLA's partitioner places them, those on Explicit axes as their types say. Inside
    `jax.shard_map` the arrays are a device's own already.

    Args:
        name: of the program.
        static: all else that `function` is compiled for; with the name and the code it tells kernels apart in JAX's
            persistent cache, so its `repr` must say it all.
        function: `function(sharding, *operands)`, which closes over no array; `sharding` sums and compares over
            devices.
        operands: arrays, trees of them, or None.
        ins: for each operand how it may be cut, in the notation of this file; of a tree, for each of its parts.
        outs: the same of what `function` returns.
        units: what the parts of a dimension are multiples of, beside its blocks.
        sum_dim: the dimension that the only result is summed over; `function` then gives that to `sharding.psum`.
        out_spec: how the only result is to lie on Explicit mesh axes; on Auto ones XLA's partitioner says.
        is_kernel: False if `function` is of JAX's operations alone, which `jax.vmap` may map; kernels run one by one.

    Returns:
        What `function` returns for whole arrays.
    """
    if on_one_device() and not is_kernel:
        return function(UNSHARDED, *operands)
    if on_one_device():
        return jax.custom_batching.sequential_vmap(functools.partial(function, UNSHARDED))(*operands)
    leaves, structure = jax.tree.flatten(tuple(operands))

    def call_on_shards(sharding: DimSharding, *arrays: Array) -> Any:
        return function(sharding, *jax.tree.unflatten(structure, arrays))

    global_types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    results = jax.eval_shape(functools.partial(call_on_shards, UNSHARDED), *global_types)
    in_out_dims = tuple(_match_dimensions(ins, tuple(operands))), tuple(_match_dimensions(outs, results))
    notation = Notation(*in_out_dims, tuple((units or {}).items()), sum_dim)
    digest = hashlib.sha256(repr((static, notation, _code_digest())).encode()).hexdigest()[:16]
    run_leaves = _partitioned_call(
        f"{name}_{digest}",
        lambda sharding, *x: jax.tree.leaves(call_on_shards(sharding, *x)),
        notation,
        0,
        out_spec,
        is_kernel,
    )
    return jax.tree.unflatten(jax.tree.structure(results), run_leaves(*leaves))


@functools.cache
def _code_digest() -> str:
    """A digest of the code that kernels are made and called by, and of the packages that compile them.

    XLA sees nothing of a kernel in a program that it partitions. So the name of the call says all that there is to tell
    programs apart in JAX's persistent cache, which hits only where `jax_remove_custom_partitioning_ptr_from_cache_key`
    is set: keys otherwise hold the address of a function.
    """
    digest = hashlib.sha256()
    for package in ("pallas_kernels", "fp8jax.core", "fp8jax.ops"):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(pathlib.Path(folder).rglob("*.py")):
                digest.update(path.name.encode() + path.read_bytes())
    for package in ("jax-triton", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{package} {importlib.metadata.version(package)}".encode())
    return digest.hexdigest()


def on_one_device() -> bool:
    """Whether arrays are a device's own: there is no other, or `jax.shard_map` has cut them over all mesh axes."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return AxisType.Manual in mesh.axis_types and not mesh.explicit_axes and not auto_axis_sizes(mesh)


def _match_dimensions(notation: Any, tree: Any) -> list[Dimensions]:
    """The dimensions of each array of a tree."""
    if tree is None:
        return []
    if isinstance(notation, str):
        return [dimensions(notation)]
    children = tree if isinstance(tree, (tuple, list)) else jax.tree.leaves(tree)
    return [dims for text, child in zip(notation, children, strict=True) for dims in _match_dimensions(text, child)]


def _partitioned_call(
    name: str,
    function: Callable[..., Sequence[Array]],
    notation: Notation,
    batch_depth: int,
    out_spec: Sequence[Any] | None,
    is_kernel: bool,
) -> Callable:
    def call(*arrays: Array) -> tuple[Array, ...]:
        if any(jax.typeof(x).sharding.mesh.explicit_axes for x in arrays):
            return _call_on_explicit_axes(function, notation, arrays, out_spec)
        return _call_on_auto_axes(function, notation, arrays)

    call.__name__ = name

    @jax.custom_batching.custom_vmap
    def mapped(*arrays: Array) -> tuple[Array, ...]:
        # Under jit, because an eager call is not partitioned.
        return jax.jit(call)(*arrays)

    @mapped.def_vmap
    def rule(size: int, batched: Sequence[bool], *arrays: Array) -> Any:
        def batched_function(sharding: DimSharding, *shards: Array) -> Sequence[Array]:
            if not is_kernel:
                axes = [0 if b else None for b in batched]
                return jax.vmap(functools.partial(function, sharding), axes)(*shards)  # type: ignore[no-any-return]

            def call_row(rows: tuple[Array, ...]) -> tuple[Array, ...]:
                mapped_rows = iter(rows)
                return tuple(
                    function(sharding, *(next(mapped_rows) if b else x for x, b in zip(shards, batched, strict=True)))
                )

            return lax.map(call_row, tuple(x for x, b in zip(shards, batched, strict=True) if b))

        batched_key = "".join(str(int(b)) for b in batched)
        batched_notation = notation.with_batch_dim(f"batch{batch_depth}", batched)
        spec = out_spec and (None, *out_spec)
        results = _partitioned_call(
            f"{name}_{batched_key}", batched_function, batched_notation, batch_depth + 1, spec, is_kernel
        )(*arrays)
        return results, (True,) * len(results)

    return mapped


def _call_on_auto_axes(function: Callable, notation: Notation, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    lengths, count = notation.lengths([x.shape for x in arrays]), len(arrays)
    closed_jaxpr = jax.make_jaxpr(lambda *shards: tuple(function(UNSHARDED, *shards)))(*arrays)
    call_mesh = jax.sharding.get_abstract_mesh()
    # So that XLA numbers the devices of a group in the mesh's order; see `Placement`.
    order_anchor = (np.int8(0),) if AxisType.Manual in call_mesh.axis_types else ()
    # What is partitioned takes its constants, such as tables, as operands.
    ins = (*notation.ins, *((Dimension(None),) * jnp.ndim(x) for x in closed_jaxpr.consts))
    full_notation = notation._replace(ins=ins, outs=(*((),) * len(order_anchor), *notation.outs))

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        """XLA's partitioner calls it once for each call of a compiled program."""
        call_placement = Placement.from_operand(mesh, call_mesh, arguments[0])
        operand_specs = [call_placement.spec(x) for x in arguments[:count]]
        out_spec = call_placement.spec(results[-1]) if notation.sum_dim else None
        sharding = notation.assign(lengths, operand_specs, dict(call_placement.group.shape), out_spec)
        ins, outs = (
            tuple(NamedSharding(call_placement.group, spec) for spec in side) for side in full_notation.specs(sharding)
        )

        def call_on_shards(*shards: Array) -> tuple[Array, ...]:
            with manual_mesh_context(call_placement.mesh):
                return (*order_anchor, *function(sharding, *shards[:count]))

        return call_placement.mesh, call_on_shards, outs, ins

    def rule(mesh: Any, *_: Any) -> tuple[str, dict[str, int]]:
        axis_sizes = auto_axis_sizes(call_mesh) if order_anchor else dict(mesh.shape)
        return full_notation.shardy_rule(lengths, math.lcm(*axis_sizes.values()) if axis_sizes else jax.device_count())

    def run(*operands: Array) -> tuple[Array, ...]:
        return (*order_anchor, *jax.core.eval_jaxpr(closed_jaxpr.jaxpr, operands[count:], *operands[:count]))

    call = custom_partitioning(run)
    call.def_partition(partition, sharding_rule=rule, decode_shardings=False)
    outputs: tuple[Array, ...] = call(*arrays, *closed_jaxpr.consts)
    return outputs[len(order_anchor) :]


def _call_on_explicit_axes(
    function: Callable, notation: Notation, arrays: tuple[Array, ...], out_spec: Sequence[Any] | None
) -> tuple[Array, ...]:
    shardings = [jax.typeof(x).sharding for x in arrays]
    mesh = next(kind.mesh for kind in shardings if kind.mesh.explicit_axes)
    sizes = {name: mesh.shape[name] for name in mesh.explicit_axes}
    sharding = notation.assign(
        notation.lengths([x.shape for x in arrays]), [k.spec for k in shardings], sizes, out_spec
    )
    ins, outs = notation.specs(sharding)
    resharded = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, ins, strict=True)]
    if auto_axis_sizes(mesh):  # XLA may cut each part further.
        out_shardings = tuple(NamedSharding(mesh, spec) for spec in outs)
        run = functools.partial(_call_on_auto_axes, function, notation)
        return jax.sharding.auto_axes(lambda *x: run(x), axes=tuple(sizes), out_sharding=out_shardings)(*resharded)
    run = functools.partial(function, sharding)
    # Without names all axes are mapped over but those that `jax.vmap` hides while it traces.
    names = set(sizes) if AxisType.Manual in mesh.axis_types else set()
    return jax.shard_map(
        lambda *shards: tuple(run(*shards)), mesh=mesh, in_specs=ins, out_specs=outs, axis_names=names, check_vma=False
    )(*resharded)
