"""Whole tensors for devices (FP8-LM, Algorithm 1), and slices of every tensor, of an optimizer's state."""

import heapq
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Partition(NamedTuple):
    """Who keeps which part of a tree.

    Attributes:
        owner: the tree with the number of the device that owns each leaf whole; None where every leaf is sliced.
        loads: bytes that each device holds.
    """

    owner: Any
    loads: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """The largest load over the mean."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0


def partition(tree: Any, devices: int, nbytes: Callable[[Any], int] | None = None) -> Partition:
    """Whole tensors for devices, the largest first and each to the one that has least (FP8-LM, Algorithm 1).

    A tensor with one scale stays with it, and nothing is shared between devices. The price: a device holds at most the
    largest tensor more than another, however many there are; parameters of layers that are stacked into one array,
    as under `jax.lax.scan`, are one tensor each.

    Args:
        tree: of arrays or `jax.ShapeDtypeStruct`s, or of anything that `nbytes` takes.
        devices: their number.
        nbytes: bytes of a leaf; None counts those of the array.

    Returns:
        A `Partition`; ties go to the leaf that comes first, and the device with the lower number.

    Raises:
        ValueError: there are no devices.

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
    """A slice of every tensor for each device, along any axis that the devices divide; the others whole on all.

    What `jax.sharding` does with FSDP: the loads are equal, and every scale is needed on every device.

    Args, Returns, Raises: as `partition`; no leaf has an owner.
    """
    leaves, _, sizes = _leaf_sizes(tree, devices, nbytes)
    is_divisible = [any(n % devices == 0 for n in x.shape) for x in leaves]
    load = sum(size // devices if divided else size for size, divided in zip(sizes, is_divisible, strict=True))
    return Partition(None, (load,) * devices)


def _leaf_sizes(tree: Any, devices: int, nbytes: Callable[[Any], int] | None) -> tuple[list[Any], Any, list[int]]:
    if devices < 1:
        raise ValueError(f"a partition needs at least one device, not {devices}")
    leaves, structure = jax.tree.flatten(tree)
    count = nbytes or (lambda x: math.prod(x.shape) * x.dtype.itemsize)
    return leaves, structure, [int(count(x)) for x in leaves]
