"""How the arrays of a kernel's call may be cut over devices, in a small notation, one name a dimension.

`"m n"` is a matrix, `"n m"` its transposed copy, `"m n/128"` has an entry for each block of 128 along n, which then is
cut between blocks only. Dimensions of one name are cut alike, `-` is never cut, and `""` is a scalar. Names that stand
first are cut first where one mesh axis could cut several.

What cannot be cut as it lies, such as a matrix in shards that do not end with a block, is gathered.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from fp8jax.core import blocks
from fp8jax.core.spec import QuantSpec


class Dimension(NamedTuple):
    """A dimension of an operand: the name it is cut by, None where it never is, and what a block of it counts."""

    name: str | None
    block: int = 1


Dimensions = tuple[Dimension, ...]


class DimSharding(NamedTuple):
    """How the arrays of a call are cut.

    Attributes:
        axes: the mesh axes of each dimension that is cut.
        scatter_axes: by dimension of the result, mesh axes that cut a sum: each device keeps its own part of that
            (FSDP).
    """

    axes: dict[str, tuple[str, ...]]
    scatter_axes: dict[str, tuple[str, ...]] = {}  # noqa: RUF012  # never changed

    def pmax(self, x: Array, names: str) -> Array:
        """The largest of what the devices found in their parts of some dimensions; NaN where one found it."""
        axes = self._mesh_axes(names)
        if not axes:
            return x
        bad = lax.pmax(jnp.isnan(x).astype(jnp.float32), axes)
        return jnp.where(bad > 0, jnp.nan, lax.pmax(jnp.where(jnp.isnan(x), -jnp.inf, x), axes)).astype(x.dtype)

    def psum(self, x: Array, names: str, scatter_dims: str = "") -> Array:
        """The sum of what the devices have of some dimensions; of the named dimensions of `x` the part they keep."""
        axes = self._mesh_axes(names)
        for i, name in enumerate(scatter_dims.split()):
            if scatter_axes := self.scatter_axes.get(name):
                x = lax.psum_scatter(x, scatter_axes, scatter_dimension=i, tiled=True)
                axes = tuple(axis for axis in axes if axis not in scatter_axes)
        return lax.psum(x, axes) if axes else x

    def shard_offset(self, name: str, length: int) -> Array | int:
        """Where a device's part, of this length, begins in a dimension."""
        axes = self._mesh_axes(name)
        return lax.axis_index(axes) * length if axes else 0

    def num_shards(self, name: str) -> int | Array:
        """How many parts a dimension is cut into."""
        axes = self._mesh_axes(name)
        return lax.axis_size(axes) if axes else 1

    def rng_offset(self, global_shape: Sequence[int], shard_shape: Sequence[int]) -> Array:
        """Columns of a whole matrix "m n", and the place in it, in fours of rows, of a device's part; uint32 (2,).

        The noise of an element goes by its place in the whole, whoever quantizes it.
        """
        first = self.shard_offset("m", shard_shape[0]) // 4 * global_shape[1] + self.shard_offset("n", shard_shape[1])
        return jnp.stack([jnp.asarray(value, jnp.uint32) for value in (global_shape[1], first)])

    def _mesh_axes(self, names: str) -> tuple[str, ...]:
        return tuple(axis for name in names.split() for axis in self.axes.get(name, ()))


UNSHARDED = DimSharding({})


class Notation(NamedTuple):
    """How a call may be cut.

    Attributes:
        ins, outs: the dimensions of each operand and result.
        units: what parts of a dimension are multiples of, beside its blocks.
        sum_dim: the dimension that the only result is summed over, of whose sum a device may keep a part.
    """

    ins: tuple[Dimensions, ...]
    outs: tuple[Dimensions, ...]
    units: tuple[tuple[str, int], ...] = ()
    sum_dim: str | None = None

    def lengths(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Lengths of the named dimensions, from operands that hold each whole, not in blocks."""
        lengths: dict[str, int] = {}
        for dimensions, shape in zip(self.ins, shapes, strict=True):
            if len(dimensions) != len(shape):
                raise ValueError(f"{dimensions} do not describe an operand of shape {tuple(shape)}")
            for dimension, length in zip(dimensions, shape, strict=True):
                name = dimension.name
                if name is not None and dimension.block == 1 and lengths.setdefault(name, length) != length:
                    raise ValueError(f"dimension {name} has lengths {lengths[name]} and {length}")
        return lengths

    def unit(self, name: str) -> int:
        """The shortest part that a dimension may be cut into."""
        sizes = [d.block for side in (self.ins, self.outs) for dims in side for d in dims if d.name == name]
        return math.lcm(*sizes, *(unit for unit_name, unit in self.units if unit_name == name))

    def with_batch_dim(self, name: str, is_mapped: Sequence[bool]) -> "Notation":
        """With one more leading dimension of all results and of some operands."""
        batch_dim = (Dimension(name),)
        ins = tuple(batch_dim + d if b else d for d, b in zip(self.ins, is_mapped, strict=True))
        return self._replace(ins=ins, outs=tuple(batch_dim + d for d in self.outs))

    def shardy_rule(self, lengths: dict[str, int], devices: int) -> tuple[str, dict[str, int]]:
        """The notation of XLA's partitioner (Shardy), in factors, and the sizes of those that it cannot infer.

        Dimensions whose lengths are no multiples of `devices`, as of any mesh axis, are said to have nothing to do with
        each other: Shardy would cut some of them over a part of a mesh axis, which JAX cannot express.
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
        """Which mesh axes cut which dimension of operands that are sharded so. An axis cuts one dimension.

        Args:
            lengths: of the dimensions.
            specs: of the operands.
            mesh: sizes of its axes.
            out_spec: how the only result is to lie, where that is known.
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
        """How operands and results lie where their dimensions are cut so."""

        def spec(dimensions: Dimensions, axes: dict[str, tuple[str, ...]]) -> PartitionSpec:
            return PartitionSpec(*(axes.get(d.name) if d.name else None for d in dimensions))

        return tuple(spec(d, sharding.axes) for d in self.ins), tuple(
            spec(d, sharding.axes | sharding.scatter_axes) for d in self.outs
        )


def dimensions(text: str) -> Dimensions:
    """A description of one array."""
    entries = []
    for word in text.split():
        name, _, block = word.partition("/")
        entries.append(Dimension(None if name == "-" else name, int(block or 1)))
    return tuple(entries)


def notation(spec: QuantSpec, shape: Sequence[int], names: str) -> tuple[str, ...]:
    """How a quantized array of this shape may be cut, from the names of its axes: for each of its leaves in order."""

    def block_dims(block: Sequence[int]) -> str:
        return " ".join(_block_dim(name, b, spec) for name, b in zip(names.split(), block, strict=True))

    scale = block_dims(spec.block_shape(shape))
    exponents = [scale] if spec.expand else []
    micro_scales = [block_dims(spec.micro_shape(shape))] if spec.granularity == "mx" else []
    return names, *exponents, *micro_scales, scale


def _block_dim(name: str, block: int, spec: QuantSpec) -> str:
    """One scale for all of an axis is never cut; scales of blocks are cut between these."""
    if block == 1:
        return name
    return f"{name}/{block}" if spec.granularity in ("group", "block", "mx") and block == spec.group_size else "-"
