"""Kernels on sharded arrays: one place that turns a call on whole arrays into calls on each device's own parts.

A kernel sees one device's arrays alone, and XLA cannot look into it. So a call says how its operands may be cut, in a
small notation, one name a dimension: `"m n"` is a matrix, `"n m"` its transposed copy, `"m n/128"` has an entry for
each block of 128 along n, which then is cut between blocks only. Dimensions of one name are cut alike, `-` is never
cut, and `""` is a scalar. Names that stand first are cut first where one mesh axis could cut several.

What cannot be cut as it lies, such as a matrix in shards that do not end with a block, is gathered.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp8jax.core.spec import QuantSpec
from fp8jax.ops import placement


class Dimension(NamedTuple):
    """A dimension of an operand: the name it is cut by, None where it never is, and what a block of it counts."""

    name: str | None
    block: int = 1


Dimensions = tuple[Dimension, ...]


class Cut(NamedTuple):
    """How the arrays of a call are cut.

    Attributes:
        axes: the mesh axes of each dimension that is cut.
        kept: by dimension of the result, mesh axes that cut a sum: each device keeps its own part of that (FSDP).
    """

    axes: dict[str, tuple[str, ...]]
    kept: dict[str, tuple[str, ...]] = {}  # noqa: RUF012  # never changed

    def maximum(self, x: Array, names: str) -> Array:
        """The largest of what the devices found in their parts of some dimensions; NaN where one found it."""
        axes = self._over(names)
        if not axes:
            return x
        bad = lax.pmax(jnp.isnan(x).astype(jnp.float32), axes)
        return jnp.where(bad > 0, jnp.nan, lax.pmax(jnp.where(jnp.isnan(x), -jnp.inf, x), axes)).astype(x.dtype)

    def total(self, x: Array, names: str, dimensions: str = "") -> Array:
        """The sum of what the devices have of some dimensions; of the named dimensions of `x` the part they keep."""
        axes = self._over(names)
        for i, name in enumerate(dimensions.split()):
            if kept := self.kept.get(name):
                x = lax.psum_scatter(x, kept, scatter_dimension=i, tiled=True)
                axes = tuple(axis for axis in axes if axis not in kept)
        return lax.psum(x, axes) if axes else x

    def start(self, name: str, length: int) -> Array | int:
        """Where a device's part, of this length, begins in a dimension."""
        axes = self._over(name)
        return lax.axis_index(axes) * length if axes else 0

    def _over(self, names: str) -> tuple[str, ...]:
        return tuple(axis for name in names.split() for axis in self.axes.get(name, ()))


WHOLE = Cut({})


class Notation(NamedTuple):
    """How a call may be cut.

    Attributes:
        ins, outs: the dimensions of each operand and result.
        units: what parts of a dimension are multiples of, beside its blocks.
        sums: the dimension that the only result is summed over, of whose sum a device may keep a part.
    """

    ins: tuple[Dimensions, ...]
    outs: tuple[Dimensions, ...]
    units: tuple[tuple[str, int], ...] = ()
    sums: str | None = None

    def lengths(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Lengths of the named dimensions, from operands that hold each whole, not in blocks."""
        found: dict[str, int] = {}
        for dimensions, shape in zip(self.ins, shapes, strict=True):
            if len(dimensions) != len(shape):
                raise ValueError(f"{dimensions} do not describe an operand of shape {tuple(shape)}")
            for dimension, length in zip(dimensions, shape, strict=True):
                name = dimension.name
                if name is not None and dimension.block == 1 and found.setdefault(name, length) != length:
                    raise ValueError(f"dimension {name} has lengths {found[name]} and {length}")
        return found

    def unit(self, name: str) -> int:
        """The shortest part that a dimension may be cut into."""
        blocks = [d.block for side in (self.ins, self.outs) for part in side for d in part if d.name == name]
        return math.lcm(*blocks, *(unit for known, unit in self.units if known == name))

    def batched(self, name: str, operands: Sequence[bool]) -> "Notation":
        """With one more leading dimension of all results and of some operands."""
        lead = (Dimension(name),)
        ins = tuple(lead + d if b else d for d, b in zip(self.ins, operands, strict=True))
        return self._replace(ins=ins, outs=tuple(lead + d for d in self.outs))

    def rule(self, lengths: dict[str, int], devices: int) -> tuple[str, dict[str, int]]:
        """The notation of XLA's partitioner (Shardy), in factors, and the sizes of those that it cannot infer.

        Dimensions whose lengths are no multiples of `devices`, as of any mesh axis, are said to have nothing to do with
        each other: Shardy would cut some of them over a part of a mesh axis, which JAX cannot express.
        """
        sizes: dict[str, int] = {}
        alone: set[str] = set()
        fresh = iter(range(10_000))

        def factors(dimension: Dimension) -> str:
            name, unit = dimension.name, 1 if dimension.name is None else self.unit(dimension.name)
            if name is None or lengths[name] % (unit * devices) or lengths[name] == 0:
                return f"free{next(fresh)}"
            outer = f"{name}_"
            sizes[outer] = lengths[name] // unit
            if dimension.block == unit:
                alone.add(outer)
                return outer
            inner = f"{name}_in{dimension.block}"
            sizes[inner] = unit // dimension.block
            return f"({outer} {inner})"

        ins, outs = (", ".join(" ".join(map(factors, d)) for d in side) for side in (self.ins, self.outs))
        return f"{ins} -> {outs}", {factor: size for factor, size in sizes.items() if factor not in alone}

    def assign(
        self,
        lengths: dict[str, int],
        specs: Sequence[PartitionSpec],
        mesh: dict[str, int],
        wanted: Any = None,
    ) -> Cut:
        """Which mesh axes cut which dimension of operands that are sharded so. An axis cuts one dimension.

        Args:
            lengths: of the dimensions.
            specs: of the operands.
            mesh: sizes of its axes.
            wanted: how the only result is to lie, where that is known.
        """
        axes: dict[str, tuple[str, ...]] = {}
        used: set[str] = set()
        for name in dict.fromkeys(d.name for part in self.ins for d in part if d.name is not None):
            for dimensions, spec in zip(self.ins, specs, strict=True):
                for dimension, entry in zip(dimensions, spec, strict=False):
                    found = entry if isinstance(entry, tuple) else (entry,)
                    free = tuple(a for a in found if a is not None and mesh[a] > 1 and a not in used)
                    parts = math.prod(mesh[a] for a in free) * self.unit(name)
                    if dimension.name == name and name not in axes and free and lengths[name] % parts == 0:
                        axes[name] = free
                        used |= set(free)
        kept: dict[str, tuple[str, ...]] = {}
        summed = axes.get(self.sums or "", ())
        for (result, _), entry in zip(self.outs[0], wanted or (), strict=False):
            entries = entry if isinstance(entry, tuple) else (entry,)
            own = tuple(a for a in entries if a is not None and mesh[a] > 1)
            if result is None or result in axes or not own or not set(own) <= set(summed):
                continue
            if lengths[result] % (math.prod(mesh[a] for a in own) * self.unit(result)) == 0:
                kept[result] = own
        return Cut(axes, kept)

    def specs(self, cut: Cut) -> tuple[tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]]:
        """How operands and results lie where their dimensions are cut so."""

        def spec(dimensions: Dimensions, axes: dict[str, tuple[str, ...]]) -> PartitionSpec:
            return PartitionSpec(*(axes.get(d.name) if d.name else None for d in dimensions))

        return tuple(spec(d, cut.axes) for d in self.ins), tuple(spec(d, cut.axes | cut.kept) for d in self.outs)


def _dimensions(text: str) -> Dimensions:
    found = []
    for word in text.split():
        name, _, block = word.partition("/")
        found.append(Dimension(None if name == "-" else name, int(block or 1)))
    return tuple(found)


def partitioned(
    name: str,
    static: Any,
    function: Callable[..., Any],
    operands: Sequence[Any],
    ins: Sequence[Any],
    outs: Any,
    *,
    units: Mapping[str, int] | None = None,
    sums: str | None = None,
    wanted: Sequence[Any] | None = None,
) -> Any:
    """Runs a function of a device's own arrays on arrays that may be sharded, under `jit` as well as `jax.vmap`.

    Arrays on Auto mesh axes are cut as XLA's partitioner places them, those on Explicit axes as their types say. Inside
    `jax.shard_map` the arrays are a device's own already.

    Args:
        name: of the program.
        static: all else that `function` is compiled for; with the name and the code it tells kernels apart in JAX's
            persistent cache, so its `repr` must say it all.
        function: `function(cut, *operands)`, which closes over no array; `cut` sums and compares over devices.
        operands: arrays, trees of them, or None.
        ins: for each operand how it may be cut, in the notation of this file; of a tree, for each of its parts.
        outs: the same of what `function` returns.
        units: what the parts of a dimension are multiples of, beside its blocks.
        sums: the dimension that the only result is summed over; `function` then gives that to `cut.total`.
        wanted: how the only result is to lie on Explicit mesh axes; on Auto ones XLA's partitioner says.

    Returns:
        What `function` returns for whole arrays.
    """
    if _on_one_device():
        return jax.custom_batching.sequential_vmap(functools.partial(function, WHOLE))(*operands)
    leaves, structure = jax.tree.flatten(tuple(operands))

    def own(cut: Cut, *arrays: Array) -> Any:
        return function(cut, *jax.tree.unflatten(structure, arrays))

    whole = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    results = jax.eval_shape(functools.partial(own, WHOLE), *whole)
    sides = tuple(_match(ins, tuple(operands))), tuple(_match(outs, results))
    notation = Notation(*sides, tuple((units or {}).items()), sums)
    told = hashlib.sha256(repr((static, notation, _sources())).encode()).hexdigest()[:16]
    call = _partitioned(f"{name}_{told}", lambda cut, *x: jax.tree.leaves(own(cut, *x)), notation, 0, wanted)
    return jax.tree.unflatten(jax.tree.structure(results), call(*leaves))


@functools.cache
def _sources() -> str:
    """A digest of the code that kernels are made and called by, and of the packages that compile them.

    XLA sees nothing of a kernel in a program that it partitions. So the name of the call says all that there is to tell
    programs apart in JAX's persistent cache, which hits only where `jax_remove_custom_partitioning_ptr_from_cache_key`
    is set: keys otherwise hold the address of a function.
    """
    found = hashlib.sha256()
    for package in ("pallas_kernels", "fp8jax.core", "fp8jax.ops"):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(pathlib.Path(folder).glob("*.py")):
                found.update(path.name.encode() + path.read_bytes())
    for package in ("jax-triton", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.update(f"{package} {importlib.metadata.version(package)}".encode())
    return found.hexdigest()


def _on_one_device() -> bool:
    """Whether arrays are a device's own: there is no other, or `jax.shard_map` has cut them over all mesh axes."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return AxisType.Manual in mesh.axis_types and not mesh.explicit_axes and not placement.auto_axes(mesh)


def _match(notation: Any, tree: Any) -> list[Dimensions]:
    """The dimensions of each array of a tree."""
    if tree is None:
        return []
    if isinstance(notation, str):
        return [_dimensions(notation)]
    parts = tree if isinstance(tree, (tuple, list)) else jax.tree.leaves(tree)
    return [found for text, part in zip(notation, parts, strict=True) for found in _match(text, part)]


def _partitioned(
    name: str,
    function: Callable[..., Sequence[Array]],
    notation: Notation,
    depth: int,
    wanted: Sequence[Any] | None,
) -> Callable:
    def call(*arrays: Array) -> tuple[Array, ...]:
        if any(jax.typeof(x).sharding.mesh.explicit_axes for x in arrays):
            return _explicit(function, notation, arrays, wanted)
        return _automatic(function, notation, arrays)

    call.__name__ = name

    @jax.custom_batching.custom_vmap
    def mapped(*arrays: Array) -> tuple[Array, ...]:
        # Under jit, because an eager call is not partitioned.
        return jax.jit(call)(*arrays)

    @mapped.def_vmap
    def rule(size: int, batched: Sequence[bool], *arrays: Array) -> Any:
        def each(cut: Cut, *own: Array) -> Sequence[Array]:
            def one(rows: tuple[Array, ...]) -> tuple[Array, ...]:
                rest = iter(rows)
                return tuple(function(cut, *(next(rest) if b else x for x, b in zip(own, batched, strict=True))))

            return lax.map(one, tuple(x for x, b in zip(own, batched, strict=True) if b))

        which = "".join(str(int(b)) for b in batched)
        wider = notation.batched(f"batch{depth}", batched)
        results = _partitioned(f"{name}_{which}", each, wider, depth + 1, wanted and (None, *wanted))(*arrays)
        return results, (True,) * len(results)

    return mapped


def _automatic(function: Callable, notation: Notation, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    lengths, count = notation.lengths([x.shape for x in arrays]), len(arrays)
    whole = jax.make_jaxpr(lambda *own: tuple(function(WHOLE, *own)))(*arrays)
    around = jax.sharding.get_abstract_mesh()
    # So that XLA numbers the devices of a group in the mesh's order; see `placement`.
    first = (np.int8(0),) if AxisType.Manual in around.axis_types else ()
    # What is partitioned takes its constants, such as tables, as operands.
    ins = (*notation.ins, *((Dimension(None),) * jnp.ndim(x) for x in whole.consts))
    parsed = notation._replace(ins=ins, outs=(*((),) * len(first), *notation.outs))

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        """XLA's partitioner calls it once for each call of a compiled program."""
        found = placement.Placement.of(mesh, around, arguments[0])
        placed = [found.spec(x) for x in arguments[:count]]
        wanted = found.spec(results[-1]) if notation.sums else None
        cut = notation.assign(lengths, placed, dict(found.group.shape), wanted)
        ins, outs = (tuple(NamedSharding(found.group, spec) for spec in side) for side in parsed.specs(cut))

        def local(*own: Array) -> tuple[Array, ...]:
            with placement.manual(found.mesh):
                return (*first, *function(cut, *own[:count]))

        return found.mesh, local, outs, ins

    def rule(mesh: Any, *_: Any) -> tuple[str, dict[str, int]]:
        known = placement.auto_axes(around) if first else dict(mesh.shape)
        return parsed.rule(lengths, math.lcm(*known.values()) if known else jax.device_count())

    def run(*own: Array) -> tuple[Array, ...]:
        return (*first, *jax.core.eval_jaxpr(whole.jaxpr, own[count:], *own[:count]))

    call = custom_partitioning(run)
    call.def_partition(partition, sharding_rule=rule, decode_shardings=False)
    found: tuple[Array, ...] = call(*arrays, *whole.consts)
    return found[len(first) :]


def _explicit(
    function: Callable, notation: Notation, arrays: tuple[Array, ...], wanted: Sequence[Any] | None
) -> tuple[Array, ...]:
    kinds = [jax.typeof(x).sharding for x in arrays]
    mesh = next(kind.mesh for kind in kinds if kind.mesh.explicit_axes)
    sizes = {name: mesh.shape[name] for name in mesh.explicit_axes}
    cut = notation.assign(notation.lengths([x.shape for x in arrays]), [k.spec for k in kinds], sizes, wanted)
    ins, outs = notation.specs(cut)
    moved = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, ins, strict=True)]
    if placement.auto_axes(mesh):  # XLA may cut each part further.
        placed = tuple(NamedSharding(mesh, spec) for spec in outs)
        run = functools.partial(_automatic, function, notation)
        return jax.sharding.auto_axes(lambda *x: run(x), axes=tuple(sizes), out_sharding=placed)(*moved)
    run = functools.partial(function, cut)
    # Without names all axes are mapped over but those that `jax.vmap` hides while it traces.
    names = set(sizes) if AxisType.Manual in mesh.axis_types else set()
    return jax.shard_map(
        lambda *own: tuple(run(*own)), mesh=mesh, in_specs=ins, out_specs=outs, axis_names=names, check_vma=False
    )(*moved)


def notation(spec: QuantSpec, shape: Sequence[int], names: str) -> tuple[str, ...]:
    """How a quantized array of this shape may be cut, from the names of its axes: for each of its parts."""

    def of_blocks(block: Sequence[int]) -> str:
        return " ".join(_of_block(name, b, spec) for name, b in zip(names.split(), block, strict=True))

    parts = [names, of_blocks(spec.block_shape(shape))]
    parts += [parts[1]] if spec.expand else []
    parts += [of_blocks(spec.micro_shape(shape))] if spec.granularity == "mx" else []
    return tuple(parts)


def _of_block(name: str, block: int, spec: QuantSpec) -> str:
    """One scale for all of an axis is never cut; scales of blocks are cut between these."""
    if block == 1:
        return name
    return f"{name}/{block}" if spec.granularity in ("group", "block", "mx") and block == spec.group_size else "-"
