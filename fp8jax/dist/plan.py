"""What a training step holds on each device and sends between them, worked out before anything runs."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fp8jax.core import blocks, formats
from fp8jax.core.comm import Comm
from fp8jax.core.recipe import Recipe
from fp8jax.core.spec import QuantSpec
from fp8jax.core.weights import SCALED
from fp8jax.dist import chunks
from fp8jax.dist.chunks import Chunks
from fp8jax.dist.collectives import HLO_NAMES, Collective
from fp8jax.dist.reduce import MIN_SIZE
from fp8jax.recipes import resolve

# Rough estimates: what the allocator and the runtime take beside arrays (CUDA context, NCCL's buffers, workspaces of
# cuBLASLt), bytes a device. The figures of memory that tests compare plans with leave it out.
RUNTIME, NCCL = 0.6e9, 0.9e9


class Plan(NamedTuple):
    """A step on paper.

    Attributes:
        memory: bytes on each device, by what they are of, at the peak of the step.
        peak: where that is: "loss", "backward pass" or "reduction".
        collectives: what devices exchange in a step, in no order.
    """

    memory: dict[str, float]
    peak: str
    collectives: tuple[Collective, ...]

    @property
    def total(self) -> float:
        """Bytes on each device."""
        return sum(self.memory.values())

    @property
    def sent(self) -> float:
        """Bytes that a device sends in a step."""
        return sum(one.sent for one in self.collectives)

    def table(self) -> str:
        """Both as text: GB on each device, and what travels."""
        width = max(map(len, [*self.memory, "all"]))
        lines = [f"{name:{width}}  {size / 1e9:9.2f} GB" for name, size in [*self.memory.items(), ("all", self.total)]]
        lines.append(f"the peak is in the {self.peak}")
        if self.collectives:
            lines += ["", "between devices, a step"]
        for one in self.collectives:
            size = one.times * one.nbytes / 1e9
            lines.append(f"{one.kind:18} {one.dtype:9} {size:9.3f} GB of {one.devices}, sends {one.sent / 1e9:9.3f} GB")
        return "\n".join([*lines, *([f"{'all':56}{self.sent / 1e9:9.3f} GB"] if self.collectives else [])])


def plan(
    params: Any,
    recipe: Recipe | str,
    mesh: Mapping[str, int],
    *,
    stacked: Any = 0,
    shared: Any = -1,
    crossings: Sequence[Collective] = (),
    microbatches: int = 1,
    activations: float = 0.0,
    logits: float = 0.0,
    unsharded: float = 0.0,
    partition: str = "",
) -> Plan:
    """Memory and communication of a training step of a recipe on a mesh.

    Counted are the parameters, what is stored for each as `Recipe.plan` says it (groups as full ones, and no parameter
    too small for codes), and what lives at the largest of three moments: at the loss activations and logits; at the end
    of the backward pass gradients of all parameters; as gradients travel, these and their codes. Layers stand in the
    program one after the other: what one keeps is free when its backward pass is done. With several microbatches the
    fp32 sum of gradients is there all the time. The caller says what a model keeps of activations.

    These are the bytes of arrays that live at once, to which XLA adds what its arrangement of them in memory leaves
    empty: of the Llama of 1.1 B at 16,384 tokens on an H200 nothing to 1 % for recipes without a context, 6 % with one,
    and 17 % for bf16 that recomputes.

    Over "fsdp" all of these are cut. Matrices of stacked layers are gathered forward and backward, as codes where the
    recipe quantizes weights, others once; gradients are scattered to their owners, and over "data" they are summed, as
    `recipe.comm` says. Where that leaves it to XLA matrices and their gradients travel in what products compute in.
    Along "tensor" devices share sequences (`gather_sequence`, `scatter_sequence`). Parameters that `shared` cuts are
    used in parts; other matrices are in parts, too, but are gathered whole for a step, in what products compute in, and
    the gradients of all others are of a device's own tokens, and are summed.

    With a partition each device along "data" updates its part of the parameters, and new ones are gathered over "data",
    as they are held. XLA then scatters gradients of slices; those of whole tensors it sums.

    Left out are single numbers, largest magnitudes of tensors or of a few hundred parts of each, histories of delayed
    scaling, and what lookups in a table cost that XLA does not gather.

    Args:
        params: tree of arrays or `jax.ShapeDtypeStruct`s: the whole parameters.
        recipe: a recipe or its name.
        mesh: sizes of the axes "data", "fsdp" and "tensor"; others count as none of these.
        stacked: how many leading axes of a parameter stack layers; a tree of integers or one for all.
        shared: the dimension of each parameter that is cut over "tensor" where it is used, or -1; a tree, or one.
        crossings: of the activations of a step, over "tensor": see `crossings`.
        microbatches: parts that a batch is computed in.
        activations: bytes that one device keeps for the backward pass, from its own model and microbatch.
        logits: bytes of logits and what the loss makes of them.
        unsharded: bytes of parameters that are gathered at a time, in bf16: a layer's.
        partition: how devices along "data" share what the optimizer holds, as `--partition` of the training program:
            "tensors", each layer's on one device, or "slices" of all; of parameters outside of layers either way
            slices. "" for all on each.

    Returns:
        A `Plan`.

    Raises:
        ValueError: an axis of no devices; no partition has this name.
        TypeError: a part of a recipe is given for one.
    """
    recipe = resolve(recipe)
    if not isinstance(recipe, Recipe):
        raise TypeError(f"a plan is of a whole Recipe, not of {recipe!r}")
    data, fsdp, tensor = (mesh.get(name, 1) for name in ("data", "fsdp", "tensor"))
    if min(data, fsdp, tensor) < 1:
        raise ValueError(
            f"a mesh has at least one device along each axis, not data={data}, fsdp={fsdp}, tensor={tensor}"
        )
    if partition not in ("", "tensors", "slices"):
        raise ValueError(f"partition {partition!r} is not 'tensors' or 'slices'")
    leaves = jax.tree.leaves(params)
    count = sum(math.prod(x.shape) for x in leaves)
    cut = count / (fsdp * tensor)
    stored = {role: size for role, _, _, size in recipe.plan()}
    held = formats.get(recipe.weights.held)
    memory = {"parameters": cut * held.bytes_per_element}
    own = cut / data if partition else cut
    if recipe.weights.parts:
        memory["remainders of weights"] = own * (stored["master weight"] - held.bytes_per_element)
    elif recipe.weights.master == SCALED:
        memory["master weights"] = own * stored["master weight"]
    memory["first moments"] = own * stored["first moment"]
    memory["second moments"] = own * stored["second moment"]
    if microbatches > 1:
        memory["sums of gradients"] = cut * 4
    gradients = {"gradients": cut * held.bytes_per_element}
    sent = 2 * cut if recipe.comm.spec is not None and data * fsdp > 1 else 0.0  # codes, and those that are received
    moments = {
        "loss": {"activations": activations, "logits": logits},
        "backward pass": gradients,
        "reduction": {**gradients, "codes of gradients": sent},
    }
    peak = max(moments, key=lambda name: sum(moments[name].values()))
    memory |= {name: size for name, size in moments[peak].items() if size}
    if fsdp > 1:
        memory["gathered weights"] = unsharded
    memory["runtime"] = RUNTIME + (NCCL if data * fsdp * tensor > 1 else 0)
    depths = jax.tree.leaves(jax.tree.broadcast(stacked, params))
    sizes = [tuple(x.shape) for x in leaves]
    updated = _updated(sizes, depths, recipe, data, fsdp * tensor, partition) if data > 1 else []
    if tensor == 1:
        collectives = _exchanged(sizes, depths, recipe, data, fsdp, partition=partition)
        return Plan(memory, peak, (*collectives, *updated))
    if recipe.comm.gradients is None:
        plain = Comm("fp32" if recipe.weights.compute == "fp32" else "bf16")
        recipe = dataclasses.replace(recipe, comm=plain)
    dims = jax.tree.leaves(jax.tree.broadcast(shared, params))
    used = [
        tuple(n // tensor if i == dim else n for i, n in enumerate(shape))
        for shape, dim in zip(sizes, dims, strict=True)
    ]
    collectives = _summed(sizes, depths, dims, recipe, fsdp, tensor)
    collectives += _exchanged(used, depths, recipe, data, fsdp, [tensor if dim < 0 else 1 for dim in dims])
    return Plan(memory, peak, (*crossings, *collectives, *updated))


def _summed(
    shapes: Sequence[tuple[int, ...]],
    depths: Sequence[int],
    dims: Sequence[int],
    recipe: Recipe,
    fsdp: int,
    tensor: int,
) -> list[Collective]:
    """What devices along "tensor" exchange of parameters that each uses whole, and of their gradients."""
    computed, sent, vectors = recipe.weights.compute, 0, 0
    for shape, depth, dim in zip(shapes, depths, dims, strict=True):
        if dim < 0 and len(shape) - depth >= 2:
            sent += int(formats.get(computed).bytes_per_element) * math.prod(shape) // fsdp
        elif dim < 0:
            vectors += 4 * math.prod(shape)
    name = HLO_NAMES[computed]
    found = [
        Collective("all-gather", name, sent // tensor, tensor),
        Collective("reduce-scatter", name, sent, tensor),
        Collective("all-reduce", "f32", vectors, tensor),
    ]
    return [one for one in found if one.nbytes]


def _updated(
    shapes: Sequence[tuple[int, ...]], depths: Sequence[int], recipe: Recipe, data: int, cut: int, partition: str
) -> list[Collective]:
    """All-gathers of new parameters, of which each device along "data" has made a part: its own of what it holds."""
    if not partition:
        return []
    parts = list(zip(shapes, depths, strict=True))
    own = sum(math.prod(shape) // (cut * data) for shape, depth in parts if len(shape) - depth >= 2)
    if partition == "tensors":
        own += sum(math.prod(shape) // data for shape, depth in parts if len(shape) - depth < 2 and depth)
    held = recipe.weights.held
    return [Collective("all-gather", HLO_NAMES[held], int(formats.get(held).bytes_per_element) * own, data)]


def _exchanged(
    shapes: Sequence[tuple[int, ...]],
    depths: Sequence[int],
    recipe: Recipe,
    data: int,
    fsdp: int,
    kept: Sequence[int] = (),
    partition: str = "",
) -> list[Collective]:
    """What devices along "data" and "fsdp" exchange; `kept` says over how many others matrices are cut that are used
    whole, and so their gradients when they are summed over "data"."""
    parts = list(zip(shapes, depths, strict=True))
    matrices = [(shape, depth) for shape, depth in parts if len(shape) - depth >= 2]
    collectives = _gathered(matrices, recipe, fsdp) if fsdp > 1 else []
    cut = fsdp if fsdp > 1 else 1
    rows = [cut * n for n in kept] or [cut] * len(parts)
    own = [
        (*s[:-2], max(s[-2] // n, 1), s[-1]) if len(s) - depth >= 2 else s
        for (s, depth), n in zip(parts, rows, strict=True)
    ]
    if recipe.comm.gradients is not None:
        if fsdp > 1:
            collectives += _scattered(parts, recipe.comm, fsdp)
        if data > 1:
            collectives += reductions(
                own, recipe.comm, data, depths=depths, min_size=MIN_SIZE // (fsdp * max(kept, default=1))
            )
        return collectives
    computed = recipe.weights.compute
    itemsize = int(formats.get(computed).bytes_per_element)
    # Where devices along "data" update slices, XLA scatters over both axes what it would scatter and then sum.
    sliced = [data > 1 and (partition == "slices" or (partition == "tensors" and not depth)) for _, depth in matrices]
    both = itemsize * sum(math.prod(shape) for (shape, _), x in zip(matrices, sliced, strict=True) if x)
    alone = itemsize * sum(math.prod(shape) for shape, _ in matrices) - both
    collectives.append(Collective("reduce-scatter", HLO_NAMES[computed], both, data * cut))
    if fsdp > 1:
        collectives.append(Collective("reduce-scatter", HLO_NAMES[computed], alone, fsdp))
    if data > 1:
        collectives.append(Collective("all-reduce", HLO_NAMES[computed], alone // cut, data))
    rest = sum(math.prod(shape) for shape, depth in parts if len(shape) - depth < 2)
    if data * fsdp > 1:
        collectives.append(Collective("all-reduce", HLO_NAMES["fp32"], 4 * rest, data * fsdp))
    return [one for one in collectives if one.nbytes]


def _gathered(matrices: Sequence[tuple[tuple[int, ...], int]], recipe: Recipe, fsdp: int) -> list[Collective]:
    """All-gathers of parameters: of stacked layers forward and backward, of others once."""
    comm, linear, weights = recipe.comm, recipe.linear, recipe.weights
    spec, ours = linear.spec("w"), comm.gradients is not None
    observed = "w" in linear.states and linear.states["w"].observes
    collectives = []
    for shape, depth in matrices:
        size, times, layer = math.prod(shape) // fsdp, 2 if depth else 1, shape[depth:]
        blocked = spec is not None and spec.granularity == "block"
        block = spec.block_shape(layer) if spec is not None and blocked else (1, 1)
        dtype = weights.compute
        if comm.auto_scale:
            dtype, times, codes = weights.held, 1, False
        elif spec is not None and depth > 0:
            codes = not (ours and (observed or shape[-2] // fsdp % block[0]))
            dtype = dtype if codes else weights.held
        else:
            codes = False
        if not codes or spec is None:
            nbytes = int(formats.get(dtype).bytes_per_element) * size
            collectives.append(Collective("all-gather", HLO_NAMES[dtype], nbytes, fsdp, times))
            continue
        collectives.append(Collective("all-gather", "u8" if ours else HLO_NAMES[spec.format], size, fsdp, times))
        if blocked:
            scales = 4 * math.prod(shape[:depth]) * math.prod(blocks.counts(layer, block)) // fsdp
            collectives.append(Collective("all-gather", HLO_NAMES["fp32"], scales, fsdp, times))
    return collectives


def _scattered(parts: Sequence[tuple[tuple[int, ...], int]], comm: Comm, fsdp: int) -> list[Collective]:
    """Reductions over "fsdp": a layer at a time, in its backward pass, but those that have factors."""
    shapes: list[tuple[int, ...]] = []
    depths: list[int] = []
    dims: list[int | None] = []
    for shape, depth in parts:
        matrix = len(shape) - depth >= 2
        alone = depth if matrix and not comm.auto_scale else 0
        copies = math.prod(shape[:alone])
        shapes += [shape[alone:]] * copies
        depths += [depth - alone] * copies
        dims += [len(shape) - alone - 2 if matrix else None] * copies
    return reductions(shapes, comm, fsdp, depths=depths, dims=dims)


def reductions(
    shapes: Sequence[tuple[int, ...]],
    comm: Comm,
    replicas: int,
    *,
    depths: Sequence[int] | None = None,
    dims: Sequence[int | None] | None = None,
    min_size: int = MIN_SIZE,
) -> list[Collective]:
    """The collectives of `all_reduce_gradients` and `reduce_scatter_gradients`, one a kind and dtype.

    Args:
        shapes: of the gradients on a device.
        comm: what travels and how.
        replicas: devices.
        depths: leading axes that stack layers.
        dims: for each gradient the dimension that is scattered, or None.
        min_size: gradients of fewer elements are summed in fp32.
    """
    depths = [0] * len(shapes) if depths is None else depths
    dims = [None] * len(shapes) if dims is None else dims
    sent: dict[tuple[str, str], int] = {}

    def add(kind: str, dtype: str, nbytes: int) -> None:
        sent[kind, dtype] = sent.get((kind, dtype), 0) + nbytes

    coded: list[tuple[tuple[int, ...], QuantSpec, int | None]] = []
    for shape, depth, dim in zip(shapes, depths, dims, strict=True):
        size = math.prod(shape)
        if comm.spec is None or size < max(min_size, 1) or not shape:
            plain = comm.gradients if comm.gradients in ("bf16", "fp32") else "fp32"
            assert plain is not None
            kind = "all-reduce" if dim is None else "reduce-scatter"
            add(kind, HLO_NAMES[plain], size * int(formats.get(plain).bytes_per_element))
        else:
            coded.append((shape, dataclasses.replace(comm.spec, stacked=depth), dim))
    for bucket in chunks.buckets([math.prod(shape) for shape, _, _ in coded]):
        for shape, spec, dim in (coded[i] for i in bucket):
            cut = Chunks(shape, spec, replicas)
            add("all-reduce", "f32", 4 * math.prod(cut.counts))
            if comm.form == "one_phase":
                add("all-reduce" if dim is None else "reduce-scatter", HLO_NAMES[spec.format], math.prod(shape))
            elif dim is not None:
                add("all-to-all", "u8", math.prod(shape))
            else:
                add("all-to-all", "u8", replicas * cut.size)
                if not cut.whole_groups:
                    add("all-reduce", "f32", 4 * math.prod(cut.counts))
                add("all-gather", "u8", cut.size + (4 * cut.one[0] if cut.whole_groups else 0))
    return [Collective(kind, dtype, size, replicas) for (kind, dtype), size in sent.items() if size]
