"""Partitions of an optimizer's state: whole tensors for devices (FP8-LM, Algorithm 1), or slices of every tensor."""

import heapq
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Partition(NamedTuple):
    """The devices that own the leaves of a tree.

    Attributes:
        owner: tree of the number of the device that owns each whole leaf; None if every leaf is sliced.
        loads: bytes on each device.
    """

    owner: Any
    loads: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """The largest load over the mean."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0


def partition(tree: Any, devices: int, nbytes: Callable[[Any], int] | None = None) -> Partition:
    """Whole tensors for devices, greedily: the largest first, each to the least loaded device (FP8-LM, Algorithm 1).

    A per-tensor scale stays with its tensor, and devices share nothing. A device holds at most the largest tensor more
    than another. Parameters of layers that are stacked into one array, as under `jax.lax.scan`, count as one tensor.

    Args:
        tree: tree of arrays or `jax.ShapeDtypeStruct`s, or of any leaves that `nbytes` accepts.
        devices: number of devices.
        nbytes: function that returns the bytes of a leaf; None counts those of the array.

    Returns:
        A `Partition`; ties go to the first leaf and the device with the lowest number.

    Raises:
        ValueError: `devices` is less than 1.

    Examples:
        >>> import fp8jax, jax.numpy as jnp
        >>> fp8jax.dist.partition({"a": jnp.ones(6), "b": jnp.ones(5), "c": jnp.ones(4)}, 2).loads
        (24, 36)
    """
    leaves, structure, sizes = _leaf_sizes(tree, devices, nbytes)
    loads = [(0, device) for device in range(devices)]
    owner = [0] * len(leaves)
    for i in sorted(range(len(leaves)), key=lambda i: -sizes[i]):
        load, device = heapq.heappop(loads)
        owner[i] = device
        heapq.heappush(loads, (load + sizes[i], device))
    return Partition(structure.unflatten(owner), tuple(load for load, _ in sorted(loads, key=lambda x: x[1])))


def slices(tree: Any, devices: int, nbytes: Callable[[Any], int] | None = None) -> Partition:
    """A slice of every tensor for each device, along any axis that the devices divide; other tensors whole on all.

    This is the FSDP sharding of `jax.sharding`: loads are equal, and every device needs every scale.

    Args, Returns, Raises: as for `partition`; no leaf has an owner.
    """
    leaves, _, sizes = _leaf_sizes(tree, devices, nbytes)
    is_divisible = [any(n % devices == 0 for n in x.shape) for x in leaves]
    load = sum(size // devices if divided else size for size, divided in zip(sizes, is_divisible, strict=True))
    return Partition(None, (load,) * devices)


def _leaf_sizes(tree: Any, devices: int, nbytes: Callable[[Any], int] | None) -> tuple[list[Any], Any, list[int]]:
    if devices < 1:
        raise ValueError(f"a partition needs at least one device, got {devices}")
    leaves, structure = jax.tree.flatten(tree)
    count = nbytes or (lambda x: math.prod(x.shape) * x.dtype.itemsize)
    return leaves, structure, [int(count(x)) for x in leaves]
