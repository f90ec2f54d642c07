"""Notation for how a call's arrays may be sharded, with one name per dimension.

`"m n"` is a matrix, `"n m"` its transpose. `"m n/128"` has an entry per block of 128 along n, which is then sharded
between blocks only. Dimensions of one name are sharded alike. `-` is never sharded, and `""` is a scalar. If a mesh
axis could shard several dimensions, the first name wins.

Arrays that cannot be sharded as they are placed are gathered, such as shards that end within a block.
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


class Notation(NamedTuple):
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
        """Return the lengths of the named dimensions, from operands that have them unblocked."""
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
        """Return the smallest shard of a dimension."""
        sizes = [d.block for side in (self.ins, self.outs) for dims in side for d in dims if d.name == name]
        return math.lcm(*sizes, *(unit for unit_name, unit in self.units if unit_name == name))

    def with_batch_dim(self, name: str, is_mapped: Sequence[bool]) -> "Notation":
        """Return the notation with a leading dimension of all results and of the mapped operands."""
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
            lengths: length of each dimension.
            specs: PartitionSpec of each operand.
            mesh: size of each mesh axis.
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
    micro_scales = [block_dims(spec.micro_shape(shape))] if spec.granularity == "mx" else []
    return names, *exponents, *micro_scales, scale


def _block_dim(name: str, block: int, spec: QuantSpec) -> str:
    """Return a dimension of scales: sharded between blocks, or never for a single scale."""
    if block == 1:
        return name
    return f"{name}/{block}" if spec.granularity in ("group", "block", "mx") and block == spec.group_size else "-"
