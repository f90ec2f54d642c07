"""Where arrays lie, as XLA's partitioner tells those whom it asks to cut a call: in numbers of devices, not mesh axes.

Inside a `jax.shard_map` over some mesh axes it numbers only the devices that differ in the others. Their order is that
in which the call's first result lies on them, which it does not tell. A first result that cannot be cut, a scalar, lies
on them in the order of the mesh.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec


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
            around: the abstract mesh at the call.
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
