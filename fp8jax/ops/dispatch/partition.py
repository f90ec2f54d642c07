"""Partitioning of kernels: turns a call on global arrays into calls on each device's shards.

XLA cannot partition a kernel. Each call therefore declares how its operands may be sharded, in a notation with one name
per dimension. `"m n"` is a matrix, `"n m"` its transpose. `"m n/128"` has an entry per block of 128 along n, which is
then sharded between blocks only. Dimensions of one name are sharded alike. `-` is never sharded, and `""` is a scalar.
If a mesh axis could shard several dimensions, the first name wins.

Arrays are gathered if their sharding is not supported, such as shards that end within a block.
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

from fp8jax.core import blocks, formats
from fp8jax.core.spec import SIZED_GRANULARITIES, QuantSpec


class Dimension(NamedTuple):
    """A dimension of an operand: its name (None if never sharded), and the length of a block."""

    name: str | None
    block: int = 1


Dimensions = tuple[Dimension, ...]


class DimSharding(NamedTuple):
    """The sharding of a call's dimensions.

    Attributes:
        axes: mesh axes of each sharded dimension.
        scatter_axes: mesh axes over which a sum is scattered, by dimension of the result (FSDP).
    """

    axes: dict[str, tuple[str, ...]]
    scatter_axes: dict[str, tuple[str, ...]] = {}  # noqa: RUF012  # never changed

    def pmax(self, x: Array, names: str) -> Array:
        """Return the maximum over the shards of some dimensions; NaN if any shard has NaN."""
        axes = self._mesh_axes(names)
        if not axes:
            return x
        bad = lax.pmax(jnp.isnan(x).astype(jnp.float32), axes)
        return jnp.where(bad > 0, jnp.nan, lax.pmax(jnp.where(jnp.isnan(x), -jnp.inf, x), axes)).astype(x.dtype)

    def psum(self, x: Array, names: str, scatter_dims: str = "") -> Array:
        """Return the sum over the shards of some dimensions, scattered along `scatter_dims` of `x`."""
        axes = self._mesh_axes(names)
        for i, name in enumerate(scatter_dims.split()):
            if scatter_axes := self.scatter_axes.get(name):
                x = lax.psum_scatter(x, scatter_axes, scatter_dimension=i, tiled=True)
                axes = tuple(axis for axis in axes if axis not in scatter_axes)
        return lax.psum(x, axes) if axes else x

    def shard_offset(self, name: str, length: int) -> Array | int:
        """Return the offset of the device's shard, of this length, in a dimension."""
        axes = self._mesh_axes(name)
        return lax.axis_index(axes) * length if axes else 0

    def num_shards(self, name: str) -> int | Array:
        """Return the number of shards of a dimension."""
        axes = self._mesh_axes(name)
        return lax.axis_size(axes) if axes else 1

    def rng_offset(self, global_shape: Sequence[int], shard_shape: Sequence[int]) -> Array:
        """Return the columns of the global matrix "m n" and the shard's position, in groups of four rows, uint32 (2,).

        Noise depends on an element's global position, not on the sharding.
        """
        first = self.shard_offset("m", shard_shape[0]) // 4 * global_shape[1] + self.shard_offset("n", shard_shape[1])
        return jnp.stack([jnp.asarray(value, jnp.uint32) for value in (global_shape[1], first)])

    def _mesh_axes(self, names: str) -> tuple[str, ...]:
        return tuple(axis for name in names.split() for axis in self.axes.get(name, ()))


UNSHARDED = DimSharding({})


class ShardingRule(NamedTuple):
    """How a call may be sharded.

    Attributes:
        ins, outs: dimensions of each operand and result.
        units: number that shards of a dimension must be multiples of, in addition to blocks.
        sum_dim: dimension that the only result is summed over. The sum may be scattered.
    """

    ins: tuple[Dimensions, ...]
    outs: tuple[Dimensions, ...]
    units: tuple[tuple[str, int], ...] = ()
    sum_dim: str | None = None

    def lengths(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Return the lengths of the named dimensions, from operands that have them unblocked or two in a byte."""
        lengths: dict[str, int] = {}
        for dimensions, shape in zip(self.ins, shapes, strict=True):
            if len(dimensions) != len(shape):
                raise ValueError(f"{dimensions} do not describe an operand of shape {tuple(shape)}")
            for dimension, length in zip(dimensions, shape, strict=True):
                name = dimension.name
                if name is not None and dimension.block == 1 and lengths.setdefault(name, length) != length:
                    raise ValueError(f"dimension {name} has lengths {lengths[name]} and {length}")
        for dimensions, shape in zip(self.ins, shapes, strict=True):
            for dimension, length in zip(dimensions, shape, strict=True):
                if dimension.name is not None and dimension.block == 2:
                    lengths.setdefault(dimension.name, 2 * length)
        return lengths

    def unit(self, name: str) -> int:
        """Return the smallest shard of a dimension."""
        sizes = [d.block for side in (self.ins, self.outs) for dims in side for d in dims if d.name == name]
        return math.lcm(*sizes, *(unit for unit_name, unit in self.units if unit_name == name))

    def with_batch_dim(self, name: str, is_mapped: Sequence[bool]) -> "ShardingRule":
        """Return the rule with a leading dimension of all results and of the mapped operands."""
        batch_dim = (Dimension(name),)
        ins = tuple(batch_dim + d if b else d for d, b in zip(self.ins, is_mapped, strict=True))
        return self._replace(ins=ins, outs=tuple(batch_dim + d for d in self.outs))

    def shardy_rule(self, lengths: dict[str, int], devices: int) -> tuple[str, dict[str, int]]:
        """Return the rule for XLA's partitioner (Shardy), and the sizes of factors that it cannot infer.

        Dimensions that are not multiples of `devices`, or of any mesh axis, get unrelated factors. Shardy would
        otherwise shard some over a part of a mesh axis, which JAX cannot express.
        """
        sizes: dict[str, int] = {}
        inferable: set[str] = set()
        free_ids = iter(range(10_000))

        def factors(dimension: Dimension) -> str:
            name, unit = dimension.name, 1 if dimension.name is None else self.unit(dimension.name)
            if name is None or lengths[name] % (unit * devices) or lengths[name] == 0:
                return f"free{next(free_ids)}"
            outer = f"{name}_"
            sizes[outer] = lengths[name] // unit
            if dimension.block == unit:
                inferable.add(outer)
                return outer
            inner = f"{name}_in{dimension.block}"
            sizes[inner] = unit // dimension.block
            return f"({outer} {inner})"

        ins, outs = (", ".join(" ".join(map(factors, d)) for d in side) for side in (self.ins, self.outs))
        return f"{ins} -> {outs}", {factor: size for factor, size in sizes.items() if factor not in inferable}

    def assign(
        self,
        lengths: dict[str, int],
        specs: Sequence[PartitionSpec],
        mesh: dict[str, int],
        out_spec: Any = None,
    ) -> DimSharding:
        """Return the mesh axes of each dimension, from the operands' shardings. An axis shards one dimension.

        Args:
            out_spec: sharding of the only result, if known.
        """
        axes: dict[str, tuple[str, ...]] = {}
        used_axes: set[str] = set()
        for name in dict.fromkeys(d.name for dims in self.ins for d in dims if d.name is not None):
            for dimensions, spec in zip(self.ins, specs, strict=True):
                for dimension, entry in zip(dimensions, spec, strict=False):
                    free_axes = tuple(a for a in blocks.spec_entry_axes(entry) if mesh[a] > 1 and a not in used_axes)
                    divisor = math.prod(mesh[a] for a in free_axes) * self.unit(name)
                    if dimension.name == name and name not in axes and free_axes and lengths[name] % divisor == 0:
                        axes[name] = free_axes
                        used_axes |= set(free_axes)
        scattered: dict[str, tuple[str, ...]] = {}
        summed = axes.get(self.sum_dim or "", ())
        for (result, _), entry in zip(self.outs[0], out_spec or (), strict=False):
            result_axes = tuple(a for a in blocks.spec_entry_axes(entry) if mesh[a] > 1)
            if result is None or result in axes or not result_axes or not set(result_axes) <= set(summed):
                continue
            if lengths[result] % (math.prod(mesh[a] for a in result_axes) * self.unit(result)) == 0:
                scattered[result] = result_axes
        return DimSharding(axes, scattered)

    def specs(self, sharding: DimSharding) -> tuple[tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]]:
        """Return the PartitionSpecs of operands and results under a sharding."""

        def spec(dimensions: Dimensions, axes: dict[str, tuple[str, ...]]) -> PartitionSpec:
            return PartitionSpec(*(axes.get(d.name) if d.name else None for d in dimensions))

        return tuple(spec(d, sharding.axes) for d in self.ins), tuple(
            spec(d, sharding.axes | sharding.scatter_axes) for d in self.outs
        )


def dimensions(text: str) -> Dimensions:
    """Parse the notation of one array."""
    entries = []
    for word in text.split():
        name, _, block = word.partition("/")
        entries.append(Dimension(None if name == "-" else name, int(block or 1)))
    return tuple(entries)


def notation(spec: QuantSpec, shape: Sequence[int], names: str) -> tuple[str, ...]:
    """Return the notation of each leaf of a QTensor of this shape, from the names of its axes."""

    def block_dims(block: Sequence[int]) -> str:
        return " ".join(_block_dim(name, b, spec) for name, b in zip(names.split(), block, strict=True))

    scale = block_dims(spec.block_shape(shape))
    exponents = [scale] if spec.expand else []
    micro_scales = [block_dims(spec.micro_shape(shape))] if spec.has_microscales else []
    codes = names.split()
    if formats.get(spec.format).is_fp4:  # two codes in a byte
        codes[spec.axis] += "/2"
    return " ".join(codes), *exponents, *micro_scales, scale


def _block_dim(name: str, block: int, spec: QuantSpec) -> str:
    """Return a dimension of scales: sharded between blocks, or never for a single scale."""
    if block == 1:
        return name
    return f"{name}/{block}" if spec.granularity in SIZED_GRANULARITIES and block == spec.group_size else "-"


class Placement(NamedTuple):
    """The devices of a call.

    Attributes:
        mesh: mesh of all devices with the axes for collectives.
        group: mesh of the devices that XLA numbers.
    """

    mesh: Any
    group: Any

    @classmethod
    def from_operand(cls, mesh: Any, call_mesh: Any, x: Any) -> "Placement":
        """Return the devices of a call.

        Args:
            mesh: mesh from JAX's partitioner; empty if unknown and inside `jax.shard_map`.
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
        """Return the PartitionSpec of an array; empty if no mesh axes produce its tiles."""
        hlo_sharding = x.sharding and x.sharding._to_xla_hlo_sharding(len(x.shape))
        if hlo_sharding is None or not hlo_sharding.is_tiled():
            return PartitionSpec()
        tiles = np.reshape(hlo_sharding.tile_assignment_devices(), hlo_sharding.tile_assignment_dimensions())
        first_devices = (np.moveaxis(tiles, i, 0).reshape(tiles.shape[i], -1)[:, 0] for i in range(len(x.shape)))
        axes_by_order = _axes_by_device_order(tuple(self.group.shape.items()))
        return PartitionSpec(*(axes_by_order.get(tuple(devices.tolist())) for devices in first_devices))


def auto_axis_sizes(mesh: Any) -> dict[str, int]:
    """Return the sizes of the mesh's Auto axes."""
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in kinds if kind == AxisType.Auto and size > 1}


def manual_mesh_context(mesh: Any) -> Any:
    """Return a context in which all mesh axes are Manual."""
    kinds = (AxisType.Manual,) * len(mesh.axis_names)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(tuple(mesh.axis_sizes), mesh.axis_names, kinds))


@functools.cache
def _axes_by_device_order(sizes: tuple[tuple[str, int], ...]) -> dict[tuple[int, ...], tuple[str, ...]]:
    """Return the mesh axes that shard a dimension, by the devices of its shards in order."""
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
    takes_stacks: bool = False,
) -> Any:
    """Run a function of shards on arrays that may be sharded, under `jit` and `jax.vmap`.

    On Auto mesh axes XLA's partitioner shards the arrays, on Explicit axes their types do. Inside `jax.shard_map` the
    arrays are shards already.

    Args:
        static: all other static inputs of `function`. Its `repr` is part of the key in JAX's persistent cache, so it
            must be complete.
        function: `function(sharding, *operands)`, which must not close over arrays. `sharding` reduces over devices.
        operands: arrays, trees of arrays, or None.
        ins: notation of each operand; for a tree, of each of its parts.
        outs: notation of the results.
        units: number that shards of a dimension must be multiples of, in addition to blocks.
        sum_dim: dimension that the only result is summed over. `function` must reduce it with `sharding.psum`.
        out_spec: sharding of the only result on Explicit mesh axes. On Auto axes XLA's partitioner decides.
        is_kernel: whether `function` is a kernel, which `jax.vmap` runs sequentially. Other functions are mapped.
        takes_stacks: whether a kernel also supports operands that all have one more leading dimension, and returns
            results with it. The first `jax.vmap` then is one call of it.
    """
    if on_one_device() and not is_kernel:
        return function(UNSHARDED, *operands)
    if on_one_device():
        return _mapped_kernel(functools.partial(function, UNSHARDED), takes_stacks)(*operands)
    leaves, structure = jax.tree.flatten(tuple(operands))

    def call_on_shards(sharding: DimSharding, *arrays: Array) -> Any:
        return function(sharding, *jax.tree.unflatten(structure, arrays))

    global_types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    results = jax.eval_shape(functools.partial(call_on_shards, UNSHARDED), *global_types)
    in_out_dims = tuple(_match_dimensions(ins, tuple(operands))), tuple(_match_dimensions(outs, results))
    rule = ShardingRule(*in_out_dims, tuple((units or {}).items()), sum_dim)
    digest = hashlib.sha256(repr((static, rule, _code_digest())).encode()).hexdigest()[:16]
    run_leaves = _partitioned_call(
        f"{name}_{digest}",
        lambda sharding, *x: jax.tree.leaves(call_on_shards(sharding, *x)),
        rule,
        0,
        out_spec,
        is_kernel,
        takes_stacks,
    )
    return jax.tree.unflatten(jax.tree.structure(results), run_leaves(*leaves))


def _mapped_kernel(function: Callable[..., Any], takes_stacks: bool) -> Callable[..., Any]:
    """Return a kernel that `jax.vmap` runs once for a stack of operands, or sequentially."""
    if not takes_stacks:
        return jax.custom_batching.sequential_vmap(function)
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def batching_rule(size: int, batched: Any, *operands: Any) -> Any:
        results = jax.custom_batching.sequential_vmap(function)(*_stacks(size, batched, operands))
        return results, jax.tree.map(lambda _: True, results)

    return mapped


def _stacks(size: int, batched: Any, operands: Any) -> Any:
    """Return operands that all have a leading dimension of `size`."""
    leaves, structure = jax.tree.flatten(operands)
    stacked = [
        x if b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in zip(leaves, jax.tree.leaves(batched), strict=True)
    ]
    return jax.tree.unflatten(structure, stacked)


@functools.cache
def _code_digest() -> str:
    """Return a digest of the code and packages that compile kernels.

    The kernel's code is no part of a program for the partitioner, so the call's name must identify it in JAX's
    persistent cache. The cache hits only with `jax_remove_custom_partitioning_ptr_from_cache_key`, since keys otherwise
    hold a pointer.
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
    """Return whether arrays are on one device: there is no other, or all mesh axes are Manual."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return AxisType.Manual in mesh.axis_types and not mesh.explicit_axes and not auto_axis_sizes(mesh)


def _match_dimensions(notation: Any, tree: Any) -> list[Dimensions]:
    """Return the dimensions of each array of a tree."""
    if tree is None:
        return []
    if isinstance(notation, str):
        return [dimensions(notation)]
    children = tree if isinstance(tree, (tuple, list)) else jax.tree.leaves(tree)
    return [dims for text, child in zip(notation, children, strict=True) for dims in _match_dimensions(text, child)]


def _partitioned_call(
    name: str,
    function: Callable[..., Sequence[Array]],
    rule: ShardingRule,
    batch_depth: int,
    out_spec: Sequence[Any] | None,
    is_kernel: bool,
    takes_stacks: bool,
) -> Callable:
    """Return a function of global arrays that runs `function(sharding, *shards)` on their shards.

    `jax.vmap` adds a dimension to the notation. `batch_depth` counts the `jax.vmap`s so far, and names that dimension.
    Other arguments are as of `run_partitioned`.
    """

    def call(*arrays: Array) -> tuple[Array, ...]:
        if any(jax.typeof(x).sharding.mesh.explicit_axes for x in arrays):
            return _call_on_explicit_axes(function, rule, arrays, out_spec)
        return _call_on_auto_axes(function, rule, arrays)

    call.__name__ = name

    @jax.custom_batching.custom_vmap
    def mapped(*arrays: Array) -> tuple[Array, ...]:
        # XLA partitions the call only within a jitted program.
        return jax.jit(call)(*arrays)

    @mapped.def_vmap
    def batching_rule(size: int, batched: Sequence[bool], *arrays: Array) -> Any:
        def batched_function(sharding: DimSharding, *shards: Array) -> Sequence[Array]:
            if not is_kernel:
                axes = [0 if b else None for b in batched]
                return jax.vmap(functools.partial(function, sharding), axes)(*shards)
            if takes_stacks:
                return function(sharding, *_stacks(size, batched, shards))

            # A kernel runs once for each row of the batch, one after the other.
            def call_row(rows: tuple[Array, ...]) -> tuple[Array, ...]:
                mapped_rows = iter(rows)
                return tuple(
                    function(sharding, *(next(mapped_rows) if b else x for x, b in zip(shards, batched, strict=True)))
                )

            return lax.map(call_row, tuple(x for x, b in zip(shards, batched, strict=True) if b))

        batched_key = "".join(str(int(b)) for b in batched)
        batched_rule = rule.with_batch_dim(f"batch{batch_depth}", batched)
        spec = out_spec and (None, *out_spec)
        results = _partitioned_call(
            f"{name}_{batched_key}", batched_function, batched_rule, batch_depth + 1, spec, is_kernel, False
        )(*arrays)
        return results, (True,) * len(results)

    return mapped


def _call_on_auto_axes(function: Callable, rule: ShardingRule, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    lengths, count = rule.lengths([x.shape for x in arrays]), len(arrays)
    closed_jaxpr = jax.make_jaxpr(lambda *shards: tuple(function(UNSHARDED, *shards)))(*arrays)
    call_mesh = jax.sharding.get_abstract_mesh()
    # This makes XLA number the devices of a group in the mesh's order; see `Placement`.
    order_anchor = (np.int8(0),) if AxisType.Manual in call_mesh.axis_types else ()
    # custom_partitioning needs constants, such as tables, as operands.
    ins = (*rule.ins, *((Dimension(None),) * jnp.ndim(x) for x in closed_jaxpr.consts))
    full_rule = rule._replace(ins=ins, outs=(*((),) * len(order_anchor), *rule.outs))

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        """Partition a call; XLA's partitioner calls this once per call in a program."""
        call_placement = Placement.from_operand(mesh, call_mesh, arguments[0])
        operand_specs = [call_placement.spec(x) for x in arguments[:count]]
        out_spec = call_placement.spec(results[-1]) if rule.sum_dim else None
        sharding = rule.assign(lengths, operand_specs, dict(call_placement.group.shape), out_spec)
        ins, outs = (
            tuple(NamedSharding(call_placement.group, spec) for spec in side) for side in full_rule.specs(sharding)
        )

        def call_on_shards(*shards: Array) -> tuple[Array, ...]:
            with manual_mesh_context(call_placement.mesh):
                return (*order_anchor, *function(sharding, *shards[:count]))

        return call_placement.mesh, call_on_shards, outs, ins

    def shardy_rule(mesh: Any, *_: Any) -> tuple[str, dict[str, int]]:
        axis_sizes = auto_axis_sizes(call_mesh) if order_anchor else dict(mesh.shape)
        return full_rule.shardy_rule(lengths, math.lcm(*axis_sizes.values()) if axis_sizes else jax.device_count())

    def run(*operands: Array) -> tuple[Array, ...]:
        return (*order_anchor, *jax.core.eval_jaxpr(closed_jaxpr.jaxpr, operands[count:], *operands[:count]))

    call = custom_partitioning(run)
    call.def_partition(partition, sharding_rule=shardy_rule, decode_shardings=False)
    outputs: tuple[Array, ...] = call(*arrays, *closed_jaxpr.consts)
    return outputs[len(order_anchor) :]


def _call_on_explicit_axes(
    function: Callable, rule: ShardingRule, arrays: tuple[Array, ...], out_spec: Sequence[Any] | None
) -> tuple[Array, ...]:
    """Reshard the operands as the notation allows, and run `function(sharding, *shards)` in `jax.shard_map`.

    The types of the operands determine their sharding. A mesh may also have Auto axes. XLA's partitioner then runs
    `function`, on the parts that the Explicit axes leave.
    """
    named_shardings = [jax.typeof(x).sharding for x in arrays]
    mesh = next(named.mesh for named in named_shardings if named.mesh.explicit_axes)
    sizes = {name: mesh.shape[name] for name in mesh.explicit_axes}
    sharding = rule.assign(
        rule.lengths([x.shape for x in arrays]), [named.spec for named in named_shardings], sizes, out_spec
    )
    ins, outs = rule.specs(sharding)
    resharded = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, ins, strict=True)]
    if auto_axis_sizes(mesh):  # XLA may shard each part further
        out_shardings = tuple(NamedSharding(mesh, spec) for spec in outs)
        run = functools.partial(_call_on_auto_axes, function, rule)
        return jax.sharding.auto_axes(lambda *x: run(x), axes=tuple(sizes), out_sharding=out_shardings)(*resharded)
    run = functools.partial(function, sharding)
    # `jax.shard_map` takes an empty set as all axes, except those that `jax.vmap` hides while it traces.
    names = set(sizes) if AxisType.Manual in mesh.axis_types else set()
    return jax.shard_map(
        lambda *shards: tuple(run(*shards)), mesh=mesh, in_specs=ins, out_specs=outs, axis_names=names, check_vma=False
    )(*resharded)
