"""How a training state and its batches lie on devices, of one process or of several."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fp8jax

AXES = ("data", "fsdp")
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
            raise ValueError(f"unknown axis {name!r}; an axis is {' or '.join(AXES)}, as in data=2,fsdp=1")
        if name in sizes:
            raise ValueError(f"names {name} twice; give each axis once, as in data=2,fsdp=1")
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"{name}={size!r} is no number of devices; give one from 1 on, as in {name}=2")
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
    sizes = parse(text) if text else {"data": largest, "fsdp": 1}
    used = math.prod(sizes.values())
    if used < len(devices) and len({device.process_index for device in devices}) > 1:
        raise ValueError(
            f"{text or f'empty, with {rows} sequences of a microbatch,'} takes {used} of the {len(devices)} "
            f"devices of several processes, which must all be used; give sizes whose product is {len(devices)}, and a "
            f"--batch that it divides"
        )
    mesh = make(sizes["data"], sizes["fsdp"], devices)
    if text and rows % mesh.size:
        part = f"{rows} sequences of a microbatch (--batch {batch}, --microbatches {microbatches})"
        raise ValueError(
            f"{text}: {mesh.size} devices do not divide the {part if microbatches > 1 else f'{batch} of --batch'}; "
            f"give --batch {microbatches * mesh.size * math.ceil(rows / mesh.size)}, or a mesh whose sizes divide it"
        )
    return mesh


def make(
    data: int, fsdp: int, devices: Sequence[jax.Device] | None = None, *, kind: AxisType = AxisType.Auto
) -> jax.sharding.Mesh:
    """A mesh of `data` x `fsdp` devices: both split batches, `fsdp` also parameters and what belongs to them.

    With Explicit axes the step is traced and run within `jax.set_mesh` of it.

    Raises:
        ValueError: there are not so many devices.
    """
    devices = jax.devices() if devices is None else devices
    if data < 1 or fsdp < 1 or data * fsdp > len(devices):
        raise ValueError(
            f"data={data},fsdp={fsdp} needs {data * fsdp} devices, and there are {len(devices)}; "
            f"give sizes whose product is {len(devices)}"
        )
    return jax.make_mesh((data, fsdp), AXES, axis_types=(kind, kind), devices=devices[: data * fsdp])


def batches(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Each device has some of the rows of a batch."""
    return NamedSharding(mesh, PartitionSpec(AXES))


def place(array: np.ndarray, rows: NamedSharding | None) -> Any:
    """A batch on the devices that share it: its rows split where they divide, else whole on each."""
    if rows is None:
        return array
    where = whole(rows.mesh) if len(array) % rows.mesh.size else rows
    # Each process puts only its own rows on its devices.
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def whole(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> NamedSharding:
    """Each device has all of an array."""
    return NamedSharding(mesh, PartitionSpec())


def state(mesh: jax.sharding.Mesh, tree: Any) -> Any:
    """The shardings of a state, by the shapes of its arrays: matrices are cut along the last axis but one.

    Scales are cut as their codes are, where their number divides. An axis that stacks layers is never cut.
    """
    devices = mesh.shape["fsdp"]

    def divides(x: Any) -> bool:
        return devices > 1 and x.shape[-2] % devices == 0

    def spec(x: Any, cut: bool) -> NamedSharding:
        axes = [None] * (x.ndim - 2) + ["fsdp"] if cut and divides(x) else []
        return NamedSharding(mesh, PartitionSpec(*axes))

    def of(path: Any, x: Any) -> Any:
        codes = x.codes if isinstance(x, fp8jax.QTensor) else x
        matrix = codes.ndim - stacked(path) >= 2
        cut = matrix and math.prod(codes.shape) >= SMALLEST and divides(codes)
        return jax.tree.map(lambda part: spec(part, cut), x)

    return jax.tree_util.tree_map_with_path(of, tree, is_leaf=lambda x: isinstance(x, fp8jax.QTensor))


def on(tree: Any, placed: Any) -> Any:
    """Shapes of arrays with the shardings that they have."""
    return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree, placed)


def stacked(path: Any) -> int:
    """How many leading axes of an array of a state stack layers, from its path: one in the layers of a Llama."""
    return int("layers" in jax.tree_util.keystr(path))


def told(mesh: jax.sharding.Mesh, recipes: Iterable[fp8jax.Recipe] = ()) -> str:
    """What a mesh means, in words; of recipes whose sums of gradients have factors, what each device gathers, too."""
    data, fsdp = (mesh.shape[name] for name in AXES)
    shared = f"data={data},fsdp={fsdp}: each device takes 1 of {mesh.size} parts of a batch"
    if fsdp == 1:
        return f"{shared}, and has all parameters and their moments"
    shared = f"{shared}, and has 1 of {fsdp} parts of each large matrix and its moments"
    whole = [f"{each.name} in {each.weights.held}" for each in recipes if each.comm.auto_scale]
    return f"{shared}; each gathers all parameters before a step with {', '.join(whole)}" if whole else shared
