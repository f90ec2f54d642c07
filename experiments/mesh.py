"""How a training state and its batches lie on devices, of one process or of several."""

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
# Those that split a batch; the devices along "tensor" share sequences.
ROWS = ("data", "fsdp", "expert")
# How "tensor" cuts the layers of a Llama: products before what is computed head by head or channel by channel along
# their outputs, those after it along their inputs.
OUTPUTS, INPUTS = ("q", "k", "v", "gate", "up"), ("out", "down")
# Of an adapter the factor that is cut as the weight is; the other has no such axis.
ADAPTERS = {"outputs": "lora_b", "inputs": "lora_a"}
# Arrays with fewer elements are kept whole: gathering them takes longer than their memory is worth.
SMALLEST = 1 << 16


def parse(text: str) -> dict[str, int]:
    """The sizes in "data=2,fsdp=4", by axis; an axis that is not named has size 1.

    Raises:
        ValueError: the text is something else; the message names what, and the fix.
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
    """The mesh that a command line asks for; of an empty one, data parallel over as many devices as the batch allows.

    Args:
        text: as `parse` takes it, or "".
        batch: sequences of a step.
        microbatches: parts that a batch is computed in; each is spread over the devices.
        devices: those there are; None takes those of all processes.

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
    if rows % shares:  # never of an empty text
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
    """A mesh of `data` x `fsdp` x `tensor` x `expert` devices.

    All but `tensor` split batches. `fsdp` also shards parameters and their state; `expert` shards those of experts.
    `tensor` splits the work on a sequence and the parameters (`experiments.train.tensor`). With Explicit axes the step
    is traced and run within `jax.set_mesh` of it.

    Raises:
        ValueError: there are too few devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = (data, fsdp, tensor, expert)
    if min(sizes) < 1 or math.prod(sizes) > len(devices):
        asked = ",".join(
            f"{name}={size}" for name, size in zip(AXES, sizes, strict=True) if size != 1 or name in AXES[:2]
        )
        raise ValueError(
            f"{asked} needs {math.prod(sizes)} devices, but there are {len(devices)}; use sizes with product "
            f"{len(devices)}"
        )
    return jax.make_mesh(sizes, AXES, axis_types=(kind,) * len(AXES), devices=devices[: math.prod(sizes)])


def replicas(mesh: Meshes) -> int:
    """How many parts a batch has."""
    return math.prod(mesh.shape.get(name, 1) for name in ROWS)


def batches(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Each device has some of the rows of a batch."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def place(array: np.ndarray, rows: NamedSharding | None) -> Any:
    """A batch on the devices that share it: its rows split where they divide, else whole on each."""
    if rows is None:
        return array
    sharding = replicated(rows.mesh) if len(array) % replicas(rows.mesh) else rows
    # Each process puts only its own rows on its devices.
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def replicated(mesh: Meshes) -> NamedSharding:
    """Each device has all of an array."""
    return NamedSharding(mesh, PartitionSpec())


def state(mesh: Meshes, tree: Any, partition: str = "") -> Any:
    """The shardings of a state, by the shapes and names of its arrays.

    Matrices are cut along the last axis but one over "fsdp", and over "tensor" as `OUTPUTS` and `INPUTS` say; those
    outside of layers as over "fsdp". Those of experts are cut over "expert" along the axis that stacks them. Scales are
    sharded like their codes if their number is divisible. An axis that stacks layers is not sharded, except by a
    partition.

    Args:
        mesh: the devices.
        tree: the state, or a part of it.
        partition: how what an optimizer holds, under "opt_state", is shared by the devices along "data", which have the
            same parameters: "tensors", whole ones, each layer's on one device; or in "slices", as over "fsdp"; those
            outside of layers are always in slices. "" leaves it where its parameters are.
    """
    return _places(mesh, tree, partition, lambda path: getattr(path[0], "name", "") == "opt_state")


def optimizer_shardings(mesh: Meshes, params: Any, partition: str) -> Any:
    """The shardings of the optimizer state of parameters; see `state`."""
    return _places(mesh, params, partition, lambda path: True)


def check_partition(partition: str, sizes: Mapping[str, int], layers: int) -> None:
    """Raises ValueError that says why a partition is none of a mesh of these sizes, and the fix."""
    data = sizes["data"]
    if partition and data == 1:
        raise ValueError(f"{partition}: the optimizer state is sharded over the data axis; use --mesh data=2 or more")
    if partition == "tensors" and layers % data:
        raise ValueError(f"tensors: {data} devices along data do not divide {layers} layers; use slices")


def _places(mesh: Meshes, tree: Any, partition: str, shared: Callable[[Any], bool]) -> Any:
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
        kind = _kind(path, codes.dtype)
        if kind == "outputs":
            columns = ("tensor",)
        elif kind == "inputs" and matrix:
            rows = ("tensor", *rows)
        elif kind == "outside" and large:
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
    """The first of the mesh axes of several devices that divide a length together."""
    dividing: tuple[str, ...] = ()
    for name in names:
        size = mesh.shape.get(name, 1)
        if length % (size * math.prod(mesh.shape[other] for other in dividing)):
            break
        dividing += (name,) if size > 1 else ()
    return dividing


def _kind(path: Any, dtype: Any) -> str:
    """What "tensor" cuts of a parameter, or of what belongs to it: "outputs", "inputs", of one "outside" of layers what
    "fsdp" cuts, or "" for nothing."""
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    if not stacked(path):
        return "outside"
    layer = names[-3 if names[-2:-1] == ["held"] else -2] if len(names) > 2 else ""
    cut = "outputs" if layer in OUTPUTS else "inputs" if layer in INPUTS else ""
    if names[-1] in ("kernel", "bias") or names[-1] == ADAPTERS.get(cut):
        return cut
    if not cut or names[-2] != "held":
        return ""
    # Of a weight that is not trained: codes, the first part, and their scales are of the transposed matrix.
    is_transposed = names[-1] != "0" or jnp.dtype(dtype).itemsize == 1
    return ("inputs" if cut == "outputs" else "outputs") if is_transposed else cut


def over(spec: PartitionSpec, name: str) -> int | None:
    """The dimension that a spec cuts over a mesh axis, alone or with others."""
    for dim, entry in enumerate(spec):
        if name == entry or (isinstance(entry, tuple) and name in entry):
            return dim
    return None


def on(tree: Any, placed: Any) -> Any:
    """Shapes of arrays with the shardings that they have."""
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, placed)


def stacked(path: Any) -> int:
    """How many leading axes of an array of a state stack layers, and in these experts, from its path."""
    return int("layers" in jax.tree_util.keystr(path)) + int(has_experts(path))


def has_experts(path: Any) -> bool:
    """Whether an array of a state is of experts, from its path."""
    return "experts" in jax.tree_util.keystr(path)


def describe(mesh: jax.sharding.Mesh, recipes: Iterable[fp8jax.Recipe] = ()) -> str:
    """What a mesh means, in words; of recipes whose sums of gradients have factors, what each device gathers, too."""
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
    """Leaves by path, such as `params.layers.mlp.up.kernel`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
