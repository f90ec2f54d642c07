"""Memory and communication of a training step on each device, computed in advance."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fp8jax.core import blocks, formats
from fp8jax.core.recipe import SCALED_MASTER, Comm, Recipe
from fp8jax.core.spec import QuantSpec
from fp8jax.dist import chunks
from fp8jax.dist.chunks import Chunks
from fp8jax.dist.collectives import HLO_NAMES, Collective
from fp8jax.dist.reduce import MIN_SIZE
from fp8jax.recipes import resolve

# Rough estimates of memory other than arrays (CUDA context, NCCL's buffers, cuBLASLt's workspaces), bytes per device.
# The memory figures that tests compare with plans leave it out.
RUNTIME_BYTES, NCCL_BYTES = 0.6e9, 0.9e9


class Plan(NamedTuple):
    """Memory and communication of a training step.

    Attributes:
        memory: bytes on each device at the peak of the step, by kind.
        peak: stage of the peak: "loss", "backward pass" or "reduction".
        collectives: collectives of a step, in no order.
    """

    memory: dict[str, float]
    peak: str
    collectives: tuple[Collective, ...]

    @property
    def total(self) -> float:
        """Bytes on each device."""
        return sum(self.memory.values())

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in a step."""
        return sum(one.sent_bytes for one in self.collectives)

    def table(self) -> str:
        """Both as text: GB on each device, and collectives."""
        width = max(map(len, [*self.memory, "all"]))
        lines = [f"{name:{width}}  {size / 1e9:9.2f} GB" for name, size in [*self.memory.items(), ("all", self.total)]]
        lines.append(f"the peak is in the {self.peak}")
        if self.collectives:
            lines += ["", "between devices, a step"]
        for one in self.collectives:
            size = one.times * one.nbytes / 1e9
            lines.append(
                f"{one.kind:18} {one.dtype:9} {size:9.3f} GB of {one.devices}, sends {one.sent_bytes / 1e9:9.3f} GB"
            )
        return "\n".join([*lines, *([f"{'all':56}{self.sent_bytes / 1e9:9.3f} GB"] if self.collectives else [])])


def plan(
    params: Any,
    recipe: Recipe | str,
    mesh: Mapping[str, int],
    *,
    layer_axes: Any = 0,
    tensor_dims: Any = -1,
    expert_dims: Any = -1,
    activation_collectives: Sequence[Collective] = (),
    microbatches: int = 1,
    activations: float = 0.0,
    logits: float = 0.0,
    unsharded: float = 0.0,
    partition: str = "",
) -> Plan:
    """Memory and communication of a training step of a recipe on a mesh.

    Memory counts parameters, their stored state by `Recipe.plan` (as full groups, with all parameters quantized), and
    the largest of three stages. At the loss these are activations and logits. At the end of the backward pass they are
    all gradients. During the reduction they are gradients and their codes. The program is assumed to unroll its layers,
    so that residuals are free once a layer's backward pass is done. Several microbatches add a permanent fp32 sum of
    gradients. The caller supplies the model's activations. XLA's buffer assignment leaves gaps and needs more than
    these bytes.

    Over "fsdp" everything is sharded. Matrices of stacked layers are gathered in the forward and backward pass, as
    codes if the recipe quantizes weights; others are gathered once. Gradients are scattered to their owners, and summed
    over "data", as `recipe.comm` defines. If XLA reduces them, matrices and gradients are sent in the compute dtype.

    Along "tensor" devices share sequences (`gather_sequence`, `scatter_sequence`). Parameters with a `tensor_dims` are
    used as shards. Other matrices are stored as shards, and gathered once per step in the compute dtype. Gradients of
    all parameters without one cover a device's own tokens, and are summed.

    Over "expert" devices share experts, and everything else is replicated as over "data".

    With a partition each device along "data" updates its part of the parameters, and the new ones are gathered over
    "data" in their storage dtype. XLA then scatters gradients of slices, and sums those of whole tensors.

    Not counted: scalars, amax of tensors or of a few hundred parts of each, histories of delayed scaling, and table
    lookups that XLA does not gather.

    Args:
        params: tree of arrays or `jax.ShapeDtypeStruct`s: the whole parameters.
        recipe: a recipe or its name.
        mesh: sizes of the axes "data", "fsdp", "tensor" and "expert"; other axes are ignored.
        layer_axes: number of leading axes of a parameter that stack layers; a tree of integers, or one for all.
        tensor_dims: dimension of each parameter that is sharded over "tensor" in use, or -1; a tree, or one for all.
        expert_dims: the same for "expert".
        activation_collectives: collectives of a step's activations: see `sequence_collectives` and
            `expert_collectives`.
        microbatches: number of microbatches in a batch.
        activations: bytes of residuals on one device, from its own model and microbatch.
        logits: bytes of logits and of the loss's intermediates.
        unsharded: bytes of bf16 parameters that are gathered at a time: a layer's.
        partition: partition of the optimizer state along "data", as `--partition` of the training program. "tensors"
            puts each layer's tensors on one device, "slices" slices them; both slice parameters outside of layers. ""
            replicates the state.

    Returns:
        A `Plan`.

    Raises:
        ValueError: an axis has no devices, or no partition has this name.
        TypeError: `recipe` is a part of a recipe.
    """
    recipe = resolve(recipe)
    if not isinstance(recipe, Recipe):
        raise TypeError(f"plan expects a Recipe, got {recipe!r}")
    data, fsdp, tensor, expert = axes = [mesh.get(name, 1) for name in ("data", "fsdp", "tensor", "expert")]
    if min(axes) < 1:
        raise ValueError(
            f"every mesh axis needs at least one device, got data={data}, fsdp={fsdp}, tensor={tensor}, expert={expert}"
        )
    if partition not in ("", "tensors", "slices"):
        raise ValueError(f"partition {partition!r} is unknown; use 'tensors' or 'slices'")
    expert_dims, tensor_dims, depths = (
        jax.tree.leaves(jax.tree.broadcast(tree, params)) for tree in (expert_dims, tensor_dims, layer_axes)
    )
    sizes = _shard_shapes([x.shape for x in jax.tree.leaves(params)], expert_dims, expert)
    count = sum(map(math.prod, sizes))
    local_count = count / (fsdp * tensor)
    stored = {role: size for role, _, _, size in recipe.plan()}
    param_format = formats.get(recipe.weights.param_format)
    memory = {"parameters": local_count * param_format.bytes_per_element}
    owned_count = local_count / data if partition else local_count
    if recipe.weights.split_master:
        memory["remainders of weights"] = owned_count * (stored["master weight"] - param_format.bytes_per_element)
    elif recipe.weights.master == SCALED_MASTER:
        memory["master weights"] = owned_count * stored["master weight"]
    memory["first moments"] = owned_count * stored["first moment"]
    memory["second moments"] = owned_count * stored["second moment"]
    if microbatches > 1:
        memory["sums of gradients"] = local_count * 4
    gradients = {"gradients": local_count * param_format.bytes_per_element}
    sends_codes = recipe.comm.spec is not None and data * fsdp * expert > 1
    code_bytes = 2 * local_count if sends_codes else 0.0  # sent and received codes
    stages = {
        "loss": {"activations": activations, "logits": logits},
        "backward pass": gradients,
        "reduction": {**gradients, "codes of gradients": code_bytes},
    }
    peak = max(stages, key=lambda name: sum(stages[name].values()))
    memory |= {name: size for name, size in stages[peak].items() if size}
    if fsdp > 1:
        memory["gathered weights"] = unsharded
    memory["runtime"] = RUNTIME_BYTES + (NCCL_BYTES if math.prod(axes) > 1 else 0)
    param_gathers = _param_gathers(sizes, depths, recipe, data, fsdp * tensor, partition) if data > 1 else []
    if tensor * expert > 1 and recipe.comm.gradients is None:
        uncompressed = Comm("fp32" if recipe.weights.compute == "fp32" else "bf16")
        recipe = dataclasses.replace(recipe, comm=uncompressed)
    collectives = _tensor_parallel_collectives(sizes, depths, tensor_dims, recipe, fsdp, tensor) if tensor > 1 else []
    used_shapes = _shard_shapes(sizes, tensor_dims, tensor)
    # The gradient of an expert is summed on its device.
    for is_of_experts, replicas in ((False, data * expert), (True, data)):
        indices = [i for i, dim in enumerate(expert_dims) if (expert > 1 and dim >= 0) == is_of_experts]
        collectives += _data_parallel_collectives(
            [used_shapes[i] for i in indices],
            [depths[i] for i in indices],
            recipe,
            replicas,
            fsdp,
            [tensor if tensor_dims[i] < 0 else 1 for i in indices] if tensor > 1 else (),
            partition=partition if tensor == 1 else "",
        )
    return Plan(memory, peak, (*activation_collectives, *collectives, *param_gathers))


def _shard_shapes(shapes: Sequence[tuple[int, ...]], dims: Sequence[int], devices: int) -> list[tuple[int, ...]]:
    """Shapes of a device's shards along one dimension of each array, or along none (-1)."""
    return [
        tuple(n // devices if i == dim else n for i, n in enumerate(shape))
        for shape, dim in zip(shapes, dims, strict=True)
    ]


def _tensor_parallel_collectives(
    shapes: Sequence[tuple[int, ...]],
    depths: Sequence[int],
    dims: Sequence[int],
    recipe: Recipe,
    fsdp: int,
    tensor: int,
) -> list[Collective]:
    """Collectives along "tensor" for parameters that are used whole, and for their gradients."""
    compute_dtype, matrix_bytes, vector_bytes = recipe.weights.compute, 0, 0
    for shape, depth, dim in zip(shapes, depths, dims, strict=True):
        if dim < 0 and len(shape) - depth >= 2:
            matrix_bytes += int(formats.get(compute_dtype).bytes_per_element) * math.prod(shape) // fsdp
        elif dim < 0:
            vector_bytes += 4 * math.prod(shape)
    name = HLO_NAMES[compute_dtype]
    result = [
        Collective("all-gather", name, matrix_bytes // tensor, tensor),
        Collective("reduce-scatter", name, matrix_bytes, tensor),
        Collective("all-reduce", "f32", vector_bytes, tensor),
    ]
    return [one for one in result if one.nbytes]


def _param_gathers(
    shapes: Sequence[tuple[int, ...]], depths: Sequence[int], recipe: Recipe, data: int, shards: int, partition: str
) -> list[Collective]:
    """All-gathers over "data" of new parameters, after each device has updated its part."""
    if not partition:
        return []
    shapes_and_depths = list(zip(shapes, depths, strict=True))
    owned_count = sum(
        math.prod(shape) // (shards * data) for shape, depth in shapes_and_depths if len(shape) - depth >= 2
    )
    if partition == "tensors":
        owned_count += sum(
            math.prod(shape) // data for shape, depth in shapes_and_depths if len(shape) - depth < 2 and depth
        )
    param_format = recipe.weights.param_format
    return [
        Collective(
            "all-gather", HLO_NAMES[param_format], int(formats.get(param_format).bytes_per_element) * owned_count, data
        )
    ]


def _data_parallel_collectives(
    shapes: Sequence[tuple[int, ...]],
    depths: Sequence[int],
    recipe: Recipe,
    data: int,
    fsdp: int,
    shard_counts: Sequence[int] = (),
    partition: str = "",
) -> list[Collective]:
    """Collectives along "data" and "fsdp".

    `shard_counts`: number of devices along other axes that shard each matrix, and so the gradient summed over "data".
    """
    shapes_and_depths = list(zip(shapes, depths, strict=True))
    matrices = [(shape, depth) for shape, depth in shapes_and_depths if len(shape) - depth >= 2]
    collectives = _weight_gathers(matrices, recipe, fsdp) if fsdp > 1 else []
    shards = fsdp if fsdp > 1 else 1
    rows = [shards * n for n in shard_counts] or [shards] * len(shapes_and_depths)
    local_shapes = [
        (*s[:-2], max(s[-2] // n, 1), s[-1]) if len(s) - depth >= 2 else s
        for (s, depth), n in zip(shapes_and_depths, rows, strict=True)
    ]
    if recipe.comm.gradients is not None:
        if fsdp > 1:
            collectives += _gradient_scatters(shapes_and_depths, recipe.comm, fsdp)
        if data > 1:
            collectives += reductions(
                local_shapes,
                recipe.comm,
                data,
                depths=depths,
                min_size=MIN_SIZE // (fsdp * max(shard_counts, default=1)),
            )
        return collectives
    compute_dtype = recipe.weights.compute
    itemsize = int(formats.get(compute_dtype).bytes_per_element)
    # If devices along "data" update slices, XLA scatters over both axes instead of scattering and then summing.
    is_sliced = [
        data > 1 and (partition == "slices" or (partition == "tensors" and not depth)) for _, depth in matrices
    ]
    sliced_bytes = itemsize * sum(math.prod(shape) for (shape, _), x in zip(matrices, is_sliced, strict=True) if x)
    unsliced_bytes = itemsize * sum(math.prod(shape) for shape, _ in matrices) - sliced_bytes
    collectives.append(Collective("reduce-scatter", HLO_NAMES[compute_dtype], sliced_bytes, data * shards))
    if fsdp > 1:
        collectives.append(Collective("reduce-scatter", HLO_NAMES[compute_dtype], unsliced_bytes, fsdp))
    if data > 1:
        collectives.append(Collective("all-reduce", HLO_NAMES[compute_dtype], unsliced_bytes // shards, data))
    vector_size = sum(math.prod(shape) for shape, depth in shapes_and_depths if len(shape) - depth < 2)
    if data * fsdp > 1:
        collectives.append(Collective("all-reduce", HLO_NAMES["fp32"], 4 * vector_size, data * fsdp))
    return [one for one in collectives if one.nbytes]


def _weight_gathers(matrices: Sequence[tuple[tuple[int, ...], int]], recipe: Recipe, fsdp: int) -> list[Collective]:
    """All-gathers of parameters: twice for stacked layers (forward and backward), once for others."""
    comm, linear, weights = recipe.comm, recipe.linear, recipe.weights
    spec, has_explicit_comm = linear.spec("w"), comm.gradients is not None
    collects_w_stats = "w" in linear.stateful_strategies and linear.stateful_strategies["w"].collects_stats
    collectives = []
    for shape, depth in matrices:
        size, times, layer = math.prod(shape) // fsdp, 2 if depth else 1, shape[depth:]
        is_blocked = spec is not None and spec.granularity == "block"
        block = spec.block_shape(layer) if spec is not None and is_blocked else (1, 1)
        dtype = weights.compute
        if comm.auto_scale:
            dtype, times, sends_codes = weights.param_format, 1, False
        elif spec is not None and depth > 0:
            sends_codes = not (has_explicit_comm and (collects_w_stats or shape[-2] // fsdp % block[0]))
            dtype = dtype if sends_codes else weights.param_format
        else:
            sends_codes = False
        if not sends_codes or spec is None:
            nbytes = int(formats.get(dtype).bytes_per_element) * size
            collectives.append(Collective("all-gather", HLO_NAMES[dtype], nbytes, fsdp, times))
            continue
        collectives.append(
            Collective("all-gather", "u8" if has_explicit_comm else HLO_NAMES[spec.format], size, fsdp, times)
        )
        if is_blocked:
            scales = 4 * math.prod(shape[:depth]) * math.prod(blocks.counts(layer, block)) // fsdp
            collectives.append(Collective("all-gather", HLO_NAMES["fp32"], scales, fsdp, times))
    return collectives


def _gradient_scatters(
    shapes_and_depths: Sequence[tuple[tuple[int, ...], int]], comm: Comm, fsdp: int
) -> list[Collective]:
    """Reductions over "fsdp": per layer, in its backward pass, unless gradients have factors."""
    shapes: list[tuple[int, ...]] = []
    depths: list[int] = []
    dims: list[int | None] = []
    for shape, depth in shapes_and_depths:
        is_matrix = len(shape) - depth >= 2
        unrolled_axes = depth if is_matrix and not comm.auto_scale else 0
        copies = math.prod(shape[:unrolled_axes])
        shapes += [shape[unrolled_axes:]] * copies
        depths += [depth - unrolled_axes] * copies
        dims += [len(shape) - unrolled_axes - 2 if is_matrix else None] * copies
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
    """The collectives of `all_reduce_gradients` and `reduce_scatter_gradients`, one per kind and dtype.

    Args:
        shapes: shapes of the gradients on a device.
        comm: format and form of the reduction.
        replicas: number of devices.
        depths: number of leading axes of each that stack layers.
        dims: dimension of each that is scattered, or None.
        min_size: gradients of fewer elements are summed in fp32.
    """
    depths = [0] * len(shapes) if depths is None else depths
    dims = [None] * len(shapes) if dims is None else dims
    nbytes_by_kind: dict[tuple[str, str], int] = {}

    def add(kind: str, dtype: str, nbytes: int) -> None:
        nbytes_by_kind[kind, dtype] = nbytes_by_kind.get((kind, dtype), 0) + nbytes

    quantized: list[tuple[tuple[int, ...], QuantSpec, int | None]] = []
    for shape, depth, dim in zip(shapes, depths, dims, strict=True):
        size = math.prod(shape)
        if comm.spec is None or size < max(min_size, 1) or not shape:
            dtype_name = comm.gradients if comm.gradients in ("bf16", "fp32") else "fp32"
            assert dtype_name is not None
            kind = "all-reduce" if dim is None else "reduce-scatter"
            add(kind, HLO_NAMES[dtype_name], size * int(formats.get(dtype_name).bytes_per_element))
        else:
            quantized.append((shape, dataclasses.replace(comm.spec, layer_axes=depth), dim))
    for bucket in chunks.buckets([math.prod(shape) for shape, _, _ in quantized]):
        for shape, spec, dim in (quantized[i] for i in bucket):
            layout = Chunks(shape, spec, replicas)
            add("all-reduce", "f32", 4 * math.prod(layout.block_counts))
            if comm.form == "one_phase":
                add("all-reduce" if dim is None else "reduce-scatter", HLO_NAMES[spec.format], math.prod(shape))
            elif dim is not None:
                add("all-to-all", "u8", math.prod(shape))
            else:
                add("all-to-all", "u8", replicas * layout.chunk_size)
                if not layout.has_whole_groups:
                    add("all-reduce", "f32", 4 * math.prod(layout.block_counts))
                add(
                    "all-gather",
                    "u8",
                    layout.chunk_size + (4 * layout.chunk_shape[0] if layout.has_whole_groups else 0),
                )
    return [Collective(kind, dtype, size, replicas) for (kind, dtype), size in nbytes_by_kind.items() if size]
