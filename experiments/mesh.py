"""How a training state and its batches lie on the devices of a host."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# Arrays with fewer elements are kept whole: gathering them takes longer than their memory is worth.
SMALLEST = 1 << 16


def make(data: int, fsdp: int, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A mesh of `data` x `fsdp` devices: both split batches, `fsdp` also parameters and what belongs to them.

    Raises:
        ValueError: there are not so many devices.
    """
    devices = jax.devices() if devices is None else devices
    if data < 1 or fsdp < 1 or data * fsdp > len(devices):
        raise ValueError(f"a mesh of data={data} x fsdp={fsdp} needs as many devices, found {len(devices)}")
    kinds = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, fsdp), ("data", "fsdp"), axis_types=kinds, devices=devices[: data * fsdp])


def batches(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Each device has some of the rows of a batch."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def state(mesh: jax.sharding.Mesh, tree: Any) -> Any:
    """The shardings of a state, by the shapes of its arrays: matrices are cut along the last axis but one."""

    def place(x: Any) -> NamedSharding:
        cut = x.ndim >= 2 and math.prod(x.shape) >= SMALLEST and x.shape[-2] % mesh.shape["fsdp"] == 0
        spec = PartitionSpec(*[None] * (x.ndim - 2), "fsdp") if cut and mesh.shape["fsdp"] > 1 else PartitionSpec()
        return NamedSharding(mesh, spec)

    return jax.tree.map(place, tree)
