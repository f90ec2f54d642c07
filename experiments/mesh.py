"""Meshes, and shardings of training states and batches, for one or several processes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fp8jax

Meshes = jax.sharding.Mesh | jax.sharding.AbstractMesh
AXES = ("data", "fsdp", "tensor", "expert")
# Axes that split a batch; devices along "tensor" share sequences.
ROWS = ("data", "fsdp", "expert")
# Sharding of a Llama's layers over "tensor": input projections of attention and MLPs along outputs, output projections
# along inputs.
OUTPUTS, INPUTS = ("q", "k", "v", "gate", "up"), ("out", "down")
# The factor of an adapter that is sharded like the weight; the other factor lacks that axis.
ADAPTERS = {"outputs": "lora_b", "inputs": "lora_a"}
# Smaller arrays are not sharded: gathering them costs more time than their memory is worth.
SMALLEST = 1 << 16


def parse(text: str) -> dict[str, int]:
    """Returns the sizes in text such as "data=2,fsdp=4", by axis. Other axes have size 1.

    Raises:
        ValueError: the text is invalid; the message has the fix.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in AXES:
            raise ValueError(f"unknown axis {name!r}; use data, fsdp, tensor or expert, such as data=2,fsdp=1")
        if name in sizes:
            raise ValueError(f"axis {name} is repeated; use each axis once, such as data=2,fsdp=1")
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"{name}={size!r} is not a number of devices; use at least 1, such as {name}=2")
        sizes[name] = int(size)
    return dict.fromkeys(AXES, 1) | sizes


def choose(text: str, batch: int, microbatches: int, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Returns the mesh of a command line; if empty, data parallel over as many devices as the batch allows.

    Args:
        text: an argument of `parse`, or "".
        batch: sequences per step.
        microbatches: microbatches per batch; each is sharded over the devices.
        devices: available devices; None for those of all processes.

    Raises:
        ValueError: there are not so many devices, they do not divide a microbatch, or several processes would not use
            all of theirs.
    """
    devices = jax.devices() if devices is None else devices
    rows = batch // microbatches
    largest = max(n for n in range(1, len(devices) + 1) if rows % n == 0)
    sizes = parse(text or f"data={largest}")
    used = math.prod(sizes.values())
    if used < len(devices) and len({device.process_index for device in devices}) > 1:
        raise ValueError(
            f"{text or f'empty, with {rows} sequences of a microbatch,'} uses {used} of the {len(devices)} devices "
            f"of several processes, but must use all. Use sizes with product {len(devices)}, and a --batch that "
            "is a multiple of it"
        )
    mesh = make(sizes["data"], sizes["fsdp"], devices, tensor=sizes["tensor"], expert=sizes["expert"])
    shares = replicas(mesh)
    if rows % shares:  # impossible if text is empty
        part = f"{rows} sequences of a microbatch (--batch {batch}, --microbatches {microbatches})"
        raise ValueError(
            f"{text}: {shares} devices do not divide the {part if microbatches > 1 else f'{batch} of --batch'}; use "
            f"--batch {microbatches * shares * math.ceil(rows / shares)}, or a mesh whose sizes divide it"
        )
    return mesh


def make(
    data: int,
    fsdp: int,
    devices: Sequence[jax.Device] | None = None,
    *,
    tensor: int = 1,
    expert: int = 1,
    kind: AxisType = AxisType.Auto,
) -> jax.sharding.Mesh:
    """Returns a mesh of `data` x `fsdp` x `tensor` x `expert` devices.

    All axes except `tensor` split batches. `fsdp` also shards parameters and their state, `expert` those of experts.
    `tensor` shards the work on a sequence and the parameters (`experiments.train.tensor`). If axes are Explicit, the
    step must be traced and run within `jax.set_mesh`.

    Raises:
        ValueError: there are too few devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = (data, fsdp, tensor, expert)
    if min(sizes) < 1 or math.prod(sizes) > len(devices):
        requested = ",".join(
            f"{name}={size}" for name, size in zip(AXES, sizes, strict=True) if size != 1 or name in AXES[:2]
        )
        raise ValueError(
            f"{requested} needs {math.prod(sizes)} devices, but there are {len(devices)}; use sizes with product "
            f"{len(devices)}"
        )
    return jax.make_mesh(sizes, AXES, axis_types=(kind,) * len(AXES), devices=devices[: math.prod(sizes)])


def replicas(mesh: Meshes) -> int:
    """Returns the number of parts of a batch."""
    return math.prod(mesh.shape.get(name, 1) for name in ROWS)


def batches(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns the sharding of the rows of a batch."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def place(array: np.ndarray, rows: NamedSharding | None) -> Any:
    """Puts a batch on its devices. Rows are sharded if divisible, otherwise replicated."""
    if rows is None:
        return array
    sharding = replicated(rows.mesh) if len(array) % replicas(rows.mesh) else rows
    # Each process puts only its own rows on its devices.
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def replicated(mesh: Meshes) -> NamedSharding:
    """Returns the sharding of a replicated array."""
    return NamedSharding(mesh, PartitionSpec())


def state(mesh: Meshes, tree: Any, partition: str = "") -> Any:
    """Returns the shardings of a state, by the shapes and names of its arrays.

    Matrices are sharded over "fsdp" along the second-last axis, and over "tensor" by `OUTPUTS` and `INPUTS`; outside of
    layers along the axis of "fsdp". Experts are sharded over "expert" along the axis that stacks them. Scales are
    sharded like their codes if their number is divisible. An axis that stacks layers is not sharded, except by a
    partition.

    Args:
        mesh: the devices.
        tree: the state, or a part of it.
        partition: sharding of the optimizer state ("opt_state") over devices along "data": "tensors" for whole tensors,
            with each layer on one device; "slices" as over "fsdp"; "" for the sharding of the parameters. Tensors
            outside of layers are always in slices.
    """
    return _state_shardings(mesh, tree, partition, lambda path: getattr(path[0], "name", "") == "opt_state")


def optimizer_shardings(mesh: Meshes, params: Any, partition: str) -> Any:
    """Returns the shardings of the optimizer state of parameters; see `state`."""
    return _state_shardings(mesh, params, partition, lambda path: True)


def check_partition(partition: str, sizes: Mapping[str, int], layers: int) -> None:
    """Raises ValueError, with the fix, if a mesh of these sizes does not support a partition."""
    data = sizes["data"]
    if partition and data == 1:
        raise ValueError(f"{partition}: the optimizer state is sharded over the data axis; use --mesh data=2 or more")
    if partition == "tensors" and layers % data:
        raise ValueError(f"tensors: {data} devices along data do not divide {layers} layers; use slices")


def _state_shardings(mesh: Meshes, tree: Any, partition: str, shared: Callable[[Any], bool]) -> Any:
    def spec(x: Any, stacks: list[tuple[str, ...]], rows: tuple[str, ...], columns: tuple[str, ...]) -> NamedSharding:
        names_by_axis = ([()] * x.ndim + [rows, columns])[-x.ndim :] if x.ndim else []
        names_by_axis = (stacks + names_by_axis[len(stacks) :])[: x.ndim]
        axes = [_divide(mesh, n, names) for n, names in zip(x.shape, names_by_axis, strict=True)]
        while axes and not axes[-1]:
            axes.pop()
        return NamedSharding(mesh, PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in axes)))

    def leaf_shardings(path: Any, x: Any) -> Any:
        codes = x.codes if isinstance(x, fp8jax.QTensor) else x
        matrix = codes.ndim - stacked(path) >= 2
        large = matrix and math.prod(codes.shape) >= SMALLEST
        rows: tuple[str, ...] = ("fsdp",) if large else ()
        columns: tuple[str, ...] = ()
        dimension = _sharded_dimension(path, codes.dtype)
        if dimension == "outputs":
            columns = ("tensor",)
        elif dimension == "inputs" and matrix:
            rows = ("tensor", *rows)
        elif dimension == "outside" and large:
            rows = (*rows, "tensor")
        stacks: list[tuple[str, ...]] = [()] * stacked(path)
        if has_experts(path):
            stacks[-1] = ("expert",)
        if partition == "tensors" and shared(path) and stacked(path):
            stacks[0] = ("data",)
        elif partition and shared(path) and large:
            rows = (*rows, "data")
        if matrix:
            rows = _divide(mesh, codes.shape[-2], rows)
        return jax.tree.map(lambda part: spec(part, stacks, rows, columns), x)

    return jax.tree_util.tree_map_with_path(leaf_shardings, tree, is_leaf=lambda x: isinstance(x, fp8jax.QTensor))


def _divide(mesh: Meshes, length: int, names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the leading mesh axes of several devices whose product divides a length."""
    dividing: tuple[str, ...] = ()
    for name in names:
        size = mesh.shape.get(name, 1)
        if length % (size * math.prod(mesh.shape[other] for other in dividing)):
            break
        dividing += (name,) if size > 1 else ()
    return dividing


def _sharded_dimension(path: Any, dtype: Any) -> str:
    """Returns the sharding of a parameter, or of its state, over "tensor".

    "outputs" or "inputs"; "outside" for parameters outside of layers, sharded as over "fsdp"; or "" for none.
    """
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    if not stacked(path):
        return "outside"
    layer = names[-3 if names[-2:-1] == ["held"] else -2] if len(names) > 2 else ""
    dimension = "outputs" if layer in OUTPUTS else "inputs" if layer in INPUTS else ""
    if names[-1] in ("kernel", "bias") or names[-1] == ADAPTERS.get(dimension):
        return dimension
    if not dimension or names[-2] != "held":
        return ""
    # Codes (the first part) and scales of a frozen weight are those of the transposed matrix.
    is_transposed = names[-1] != "0" or jnp.dtype(dtype).itemsize == 1
    return ("inputs" if dimension == "outputs" else "outputs") if is_transposed else dimension


def dim_sharded_over(spec: PartitionSpec, name: str) -> int | None:
    """Returns the dimension that a spec shards over a mesh axis, alone or with others."""
    for dim, entry in enumerate(spec):
        if name == entry or (isinstance(entry, tuple) and name in entry):
            return dim
    return None


def with_shardings(tree: Any, placed: Any) -> Any:
    """Returns the shapes of arrays with their shardings."""
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, placed)


def stacked(path: Any) -> int:
    """Returns the number of leading axes of an array that stack layers or experts, by its path in a state."""
    return int("layers" in jax.tree_util.keystr(path)) + int(has_experts(path))


def has_experts(path: Any) -> bool:
    """Returns whether an array belongs to experts, by its path in a state."""
    return "experts" in jax.tree_util.keystr(path)


def describe(mesh: jax.sharding.Mesh, recipes: Iterable[fp8jax.Recipe] = ()) -> str:
    """Returns a description of a mesh, and of the gathers for recipes with auto-scaled gradient sums."""
    data, fsdp, tensor, expert = (mesh.shape.get(name, 1) for name in AXES)
    named = f"data={data},fsdp={fsdp}" + (f",tensor={tensor}" if tensor > 1 else "")
    named += f",expert={expert}" if expert > 1 else ""
    shared = f"{named}: each device takes 1 of {replicas(mesh)} parts of a batch"
    if tensor > 1:
        shared += f", with 1 of {tensor} parts of each layer's heads and channels, and of its tokens between layers"
    if expert > 1:
        shared += f", with 1 of {expert} parts of the experts, to which all devices along expert send their tokens"
    if fsdp * tensor == 1:
        others = "other " if expert > 1 else ""
        return f"{shared}, and has all {others}parameters and their moments"
    shared = f"{shared}, and has 1 of {fsdp * tensor} parts of each large matrix and its moments"
    replicated = [f"{each.name} in {each.weights.param_format}" for each in recipes if each.comm.auto_scale]
    gathers = fsdp > 1 and replicated
    return f"{shared}; each gathers all parameters before a step with {', '.join(replicated)}" if gathers else shared


def flatten(tree: Any) -> dict[str, Any]:
    """Returns leaves by path, such as `params.layers.mlp.up.kernel`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
