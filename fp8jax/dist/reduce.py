"""Means of gradients over data-parallel devices, reduced in 8 bits (FP8-LM, section 2.1)."""

import dataclasses
import math
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from fp8jax.core import blocks, formats
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import Comm, Recipe
from fp8jax.core.spec import QuantSpec
from fp8jax.dist import chunks, manual, shared_scales
from fp8jax.dist.chunks import Chunks
from fp8jax.ops.autodiff.observations import Observation, current_layer_scope, observe
from fp8jax.ops.dispatch import choice
from fp8jax.ops.dispatch.partition import auto_axis_sizes

MAX_SATURATED_FRACTION = 1e-5
STEPS_TO_DOUBLE = 1000


class Factors(NamedTuple):
    """The state of one-phase reductions, a tree of arrays; save it in checkpoints with the optimizer's state.

    Attributes:
        mu: factor of each parameter, an fp32 scalar. Codes use this fraction of the format's range, so that their sums
            stay in it.
        saturated: fraction of each parameter's last sum at the end of the range, an fp32 scalar.
    """

    mu: Any
    saturated: Any


def init_factors(params: Any, replicas: int) -> Factors:
    """Factors before the first step: 1 / sqrt(replicas), the growth of sums of independent gradients.

    Args:
        params: tree of parameters or gradients, concrete or abstract.
        replicas: number of devices that gradients are summed over.
    """
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1, not {replicas}")
    return Factors(
        jax.tree.map(lambda _: jnp.full((), 1 / math.sqrt(replicas), jnp.float32), params),
        jax.tree.map(lambda _: jnp.zeros((), jnp.float32), params),
    )


def next_factor(mu: Array, saturated: Array, finite: Array, replicas: int) -> Array:
    """The next factor: half if more than 0.001 % saturated, else larger by 2^(1/1000).

    It stays between 1 / replicas, where no sum can saturate, and 1, where one device's amax is the largest code. A
    non-finite gradient leaves it unchanged.
    """
    new = jnp.where(saturated > MAX_SATURATED_FRACTION, mu / 2, mu * np.float32(2 ** (1 / STEPS_TO_DOUBLE)))
    return jnp.where(finite, jnp.clip(new, 1 / replicas, 1), mu)


MIN_SIZE = 4096
SUM_CAPABILITY = 90


def all_reduce_gradients(
    grads: Any,
    axes: manual.Axes,
    comm: Comm | Recipe | str = "e4m3",
    *,
    factors: Factors | None = None,
    layer_axes: Any = 0,
    min_size: int = MIN_SIZE,
    dequantize: bool = True,
) -> Any:
    """The mean of each gradient over data-parallel devices, reduced in 8 bits.

    Call it inside `jax.shard_map`, on the gradients of each device's own part of the batch, after microbatches have
    been accumulated. Clip and compute norms after it, on the decoded gradients.

    All devices quantize with one scale, from the largest amax of any device. In two phases, each device receives its
    chunk of all codes, sums it exactly, and quantizes the mean with a new scale. All devices then gather these codes.
    Sums cannot saturate. For e4m3 and int8 the bits do not depend on the order of devices. In one phase, NCCL adds the
    codes. Each addition rounds to 8 bits and saturates at the largest code. Off CUDA, codes are added in fp32 and
    rounded once; for two devices the bits are the same. `Factors.saturated` has the fraction at the largest code, which
    controls `Factors.mu`.

    A NaN or Inf on any device makes all values under the same scale NaN on every device: the tensor or the group.

    Args:
        grads: tree of gradients of floating dtypes and any shapes, different on each device; zeros for unused
            parameters.
        axes: name or names of the mesh axes that shard the batch.
        comm: format and form of the reduction: a `Comm`, a recipe for its own, or the string for `Comm.gradients`.
        factors: state of auto-scaling, from `init_factors`, for form "one_phase". None limits codes to `1 / replicas`
            of the range, so that sums never saturate.
        layer_axes: number of leading axes of a gradient that stack layers, each with its own scale; an integer, or a
            tree of integers that is a prefix of `grads`.
        min_size: gradients of fewer elements are summed in fp32.
        dequantize: return arrays of the original dtypes. If False, gradients reduced in 8 bits are `QTensor`s, which
            `fp8lm_adamw`, `fp8jax.clip_by_global_norm` and `with_clipping` accept, and Optax's clipping does not.

    Returns:
        The tree of means, the same on all devices; with `factors`, a pair of it and the new factors.

    Raises:
        ValueError: outside of `jax.shard_map`, for gradients that are already summed, or for a `comm` without a format;
            or form "one_phase" on a GPU below compute capability 9.0.
        TypeError: a gradient is not of a floating dtype.

    Warns:
        UserWarning: `jax.shard_map` leaves Auto mesh axes to XLA, which gathers gradients that are sharded over them.

    Examples:
        >>> import fp8jax, jax, jax.numpy as jnp
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> def step(w, x):
        ...     grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        ...     return fp8jax.dist.all_reduce_gradients(grad, "data")
        >>> whole, rows = jax.P(), jax.P("data")
        >>> step = jax.shard_map(step, mesh=mesh, in_specs=(whole, rows), out_specs=whole, check_vma=False)
        >>> jax.jit(step)(jnp.ones((64, 64)), jnp.ones((8, 64))).shape
        (64, 64)
    """
    reduction = _Reduction.create("all_reduce_gradients", grads, axes, comm, factors, layer_axes, min_size)
    return reduction.run([None] * len(reduction.leaves), dequantize)


def reduce_scatter_gradients(
    grads: Any,
    axes: manual.Axes,
    comm: Comm | Recipe | str = "e4m3",
    *,
    specs: Any,
    factors: Factors | None = None,
    layer_axes: Any = 0,
    min_size: int = MIN_SIZE,
) -> Any:
    """The means of `all_reduce_gradients`, with only each device's own shard of gradients of sharded parameters.

    It needs one phase: codes are sent once, and the means stay in fp32 precision. Gradients of parameters that are not
    sharded over `axes` are reduced as by `all_reduce_gradients`.

    Args:
        grads, axes, comm, factors, layer_axes, min_size: as for `all_reduce_gradients`. Gradients have the whole
            shapes.
        specs: tree, or a prefix of `grads`, of the parameters' `PartitionSpec`s: the dimension that they shard over all
            of `axes` is scattered. Other mesh axes in them are ignored.

    Returns:
        The tree of means, in the shapes of each device's own shards; with `factors`, a pair of it and the new factors.

    Raises:
        ValueError, TypeError: as for `all_reduce_gradients`; or a spec shards over only some of `axes`, or the devices
            do not divide a dimension or its groups.
    """
    reduction = _Reduction.create("reduce_scatter_gradients", grads, axes, comm, factors, layer_axes, min_size)
    dims = [_scatter_dim(reduction, i, spec) for i, spec in enumerate(broadcast_specs(specs, grads))]
    return reduction.run(dims, True)


def resolve(comm: Comm | Recipe | str) -> Comm:
    """The `Comm` of a recipe, of a string, or itself.

    Raises:
        ValueError: it leaves gradients to XLA.
        TypeError: it is none of these.
    """
    settings = Comm(comm) if isinstance(comm, str) else comm.comm if isinstance(comm, Recipe) else comm
    if not isinstance(settings, Comm):
        raise TypeError(f"comm must be a fp8jax.recipes.Comm, a recipe or a string such as 'e4m3', got {comm!r}")
    if settings.gradients is None:
        raise ValueError(
            "comm.gradients is None, which leaves the reduction to XLA; pass a format, such as 'e4m3' or 'bf16'"
        )
    return settings


@dataclasses.dataclass(frozen=True)
class _Reduction:
    """A reduction of a tree, with checked arguments."""

    caller: str
    paths: list[str]
    leaves: list[Array]
    treedef: Any
    axes: tuple[str, ...]
    replicas: int
    comm: Comm
    factors: Factors | None
    specs: list[QuantSpec | None]

    @classmethod
    def create(
        cls,
        caller: str,
        grads: Any,
        axes: manual.Axes,
        comm: Any,
        factors: Factors | None,
        layer_axes: Any,
        min_size: int,
    ) -> "_Reduction":
        comm = resolve(comm)
        replicas = manual.check_manual_axes(caller, axes, grads)
        if auto_mesh_axes := auto_axis_sizes(jax.sharding.get_abstract_mesh()):
            names = ", ".join(map(repr, auto_mesh_axes))
            warnings.warn(
                f"{caller}: XLA gathers the gradients that are sharded over the Auto mesh axes {names}, in their own "
                "dtype, before they are packed. Make these axes Explicit, or add them to axis_names of jax.shard_map",
                stacklevel=3,
            )
        if factors is not None and comm.form != "one_phase":
            raise ValueError(
                f"factors apply only to form 'one_phase', whose sums can saturate, not to {comm.form!r}; omit them"
            )
        if comm.form == "one_phase" and choice.on_cuda() and choice.capability() < SUM_CAPABILITY:
            raise ValueError(
                "comm.form 'one_phase' needs compute capability 9.0 or newer, where NCCL sums FP8, but this GPU has "
                f"{choice.capability() / 10}; use 'two_phase'"
            )
        flat: Any = jax.tree_util.tree_flatten_with_path(grads)
        paths, leaves = [jax.tree_util.keystr(p) or "the gradient" for p, _ in flat[0]], [x for _, x in flat[0]]
        depths = jax.tree.leaves(jax.tree.broadcast(layer_axes, grads))
        specs: list[QuantSpec | None] = []
        for path, x, depth in zip(paths, leaves, depths, strict=True):
            if not jnp.issubdtype(x.dtype, jnp.floating):
                raise TypeError(f"{caller}: {path} has dtype {x.dtype}, which is not a gradient dtype")
            is_small = comm.spec is None or x.size < max(min_size, 1) or x.ndim == 0
            specs.append(None if is_small else dataclasses.replace(comm.spec, layer_axes=depth))
        return cls(caller, paths, leaves, flat[1], manual.axis_names(axes), replicas, comm, factors, specs)

    def run(self, dims: list[int | None], dequantize: bool) -> Any:
        """Reduces every gradient, scattered along its dimension in `dims` if that is not None."""
        mus: list[Any] = [None] * len(self.leaves)
        if self.factors is not None:
            mus = self.treedef.flatten_up_to(self.factors.mu)
        results: list[Any] = [None] * len(self.leaves)
        stats: dict[int, tuple[Array, Array]] = {}
        quantized = [i for i, spec in enumerate(self.specs) if spec is not None]
        for i in set(range(len(self.leaves))) - set(quantized):
            results[i] = self._reduce_plain(self.leaves[i], dims[i])
        for bucket in chunks.buckets([self.leaves[i].size for i in quantized]):
            indices = [quantized[k] for k in bucket]
            arrays, specs = [self.leaves[i] for i in indices], [self.specs[i] for i in indices]
            scales = shared_scales.shared_scales(arrays, specs, self.axes)  # type: ignore[arg-type]
            unscattered = []
            for i, x, spec, scale in zip(indices, arrays, specs, scales, strict=True):
                assert spec is not None
                if self.comm.form == "one_phase":
                    results[i], saturated = self._reduce_one_phase(x, spec, scale, mus[i], dims[i])
                    stats[i] = saturated, jnp.all(jnp.isfinite(scale))
                elif dims[i] is not None:
                    results[i] = self._reduce_scatter(x, spec, scale, dims[i])  # type: ignore[arg-type]
                else:
                    unscattered.append((i, QTensor(shared_scales.encode(x, spec, scale), scale, None, None, spec)))
            for (i, _), mean in zip(unscattered, self._reduce_two_phase([q for _, q in unscattered]), strict=True):
                results[i] = mean
        if dequantize:
            results = [
                q.dequantize(x.dtype) if isinstance(q, QTensor) else q
                for q, x in zip(results, self.leaves, strict=True)
            ]
        tree = self.treedef.unflatten(results)
        if dequantize and stats:
            flat: Any = jax.tree_util.tree_leaves_with_path(tree)
            for i, (saturated, _) in stats.items():
                layer_scope = current_layer_scope(jax.tree_util.keystr(flat[i][0], simple=True, separator="/"))
                scalars = {"saturated": saturated, "size": jnp.ones_like(saturated)}
                scalars |= {} if mus[i] is None else {"factor": mus[i]}
                results[i] = observe(results[i], layer_scope, "gradient", Observation.from_scalars(scalars))
            tree = self.treedef.unflatten(results)
        if self.factors is None:
            return tree
        zero, true = jnp.zeros((), jnp.float32), jnp.array(True)
        statistics = [stats.get(i, (zero, true)) for i in range(len(results))]
        new = [next_factor(mu, *leaf_stats, self.replicas) for mu, leaf_stats in zip(mus, statistics, strict=True)]
        return tree, Factors(self.treedef.unflatten(new), self.treedef.unflatten([s for s, _ in statistics]))

    def _reduce_plain(self, x: Array, dim: int | None) -> Array:
        """The mean, summed in the plain dtype of `comm`; of small gradients in fp32."""
        if not x.size:  # XLA on CPUs (jaxlib 0.11) crashes if it combines an empty sum with another
            return jnp.zeros([n // self.replicas if i == dim else n for i, n in enumerate(x.shape)], x.dtype)
        dtype = jnp.bfloat16 if self.comm.gradients == "bf16" else jnp.float32
        operand = x.astype(dtype)
        return (self._sum(operand, dim).astype(jnp.float32) * (1 / self.replicas)).astype(x.dtype)

    def _sum(self, x: Array, dim: int | None) -> Array:
        """The sum over the devices, or a device's part of it along a dimension."""
        if dim is None:
            return lax.psum(x, self.axes)
        return lax.psum_scatter(x, self.axes, scatter_dimension=dim, tiled=True)

    def _reduce_two_phase(self, quantized: list[QTensor]) -> list[QTensor]:
        """Means of codes under shared scales, quantized again: all-to-all, exact sums, all-gather."""
        if not quantized:
            return []
        fmt = formats.get(quantized[0].spec.format)
        layouts = [Chunks(q.shape, q.spec, self.replicas) for q in quantized]
        sizes = [layout.chunk_size for layout in layouts]
        sent = jnp.concatenate(
            [chunks.to_bytes(layout.split(q.codes)) for layout, q in zip(layouts, quantized, strict=True)], 1
        )
        received = lax.all_to_all(sent, self.axes, 0, 0, tiled=True)
        index = lax.axis_index(self.axes)
        means = []
        for q, layout, raw in zip(quantized, layouts, chunks.split(received, sizes), strict=True):
            codes = chunks.to_codes(raw, fmt).reshape(self.replicas, *layout.chunk_shape)
            scale = layout.chunk_scales(q.scale, index)
            means.append(shared_scales.sum_codes(codes, fmt) * (scale * (1 / self.replicas)))
        amax = [jnp.max(shared_scales.abs_with_nan_as_inf(mean), axis=1) for mean in means]
        if not layouts[0].has_whole_groups:
            amax = shared_scales.pmax_arrays(amax, self.axes)
        scales = [shared_scales.to_scale(x, fmt) for x in amax]
        mean_codes = [fmt.encode(mean * (1 / scale)[:, None]) for mean, scale in zip(means, scales, strict=True)]
        payload = [chunks.to_bytes(codes.reshape(-1)) for codes in mean_codes]
        if layouts[0].has_whole_groups:
            payload += [chunks.to_bytes(scale) for scale in scales]
        gathered = _gather(jnp.concatenate(payload), self.axes)
        gathered_parts = chunks.split(gathered, [x.size for x in payload])
        if layouts[0].has_whole_groups:
            scales = [chunks.to_fp32(raw) for raw in gathered_parts[len(layouts) :]]
        return [
            QTensor(layout.join(chunks.to_codes(raw, fmt)), layout.join_scales(scale), None, None, layout.spec)
            for layout, raw, scale in zip(layouts, gathered_parts, scales, strict=False)
        ]

    def _reduce_scatter(self, x: Array, spec: QuantSpec, scale: Array, dim: int) -> Array:
        """A device's shard of the mean: codes are sent to the shard's device, and summed there."""
        return shared_scales.reduce_scatter_codes(x, spec, scale, self.axes, dim, 1 / self.replicas).astype(x.dtype)

    def _reduce_one_phase(
        self, x: Array, spec: QuantSpec, scale: Array, mu: Array | None, dim: int | None
    ) -> tuple[Any, Array]:
        """The mean by a sum of codes, and its fraction at the end of the range."""
        fmt = formats.get(spec.format)
        factor = jnp.float32(1 / self.replicas) if mu is None else mu
        # Its reciprocal must be a normal number.
        scale = jnp.minimum(scale * (1 / factor), 2.0**126)
        codes = shared_scales.encode(x, spec, scale)
        # NCCL's FP8 sums saturate; XLA's on other devices return NaN or Inf.
        operand = codes if choice.on_cuda() else fmt.decode(codes)
        total = self._sum(operand, dim)
        if dim is not None:
            scale = shared_scales.shard_scales(scale, self.axes, dim)
        total = total if choice.on_cuda() else fmt.encode(total)
        values = fmt.decode(total)
        saturated_fraction = jnp.mean((jnp.abs(values) >= fmt.max) | jnp.isnan(values), dtype=jnp.float32)
        if dim is not None:
            saturated_fraction = lax.pmean(saturated_fraction, self.axes)
        mean = QTensor(total, scale * (1 / self.replicas), None, None, spec)
        return mean if dim is None else mean.dequantize(x.dtype), saturated_fraction


def _gather(x: Array, axes: tuple[str, ...]) -> Array:
    """(devices, n) from the (n,) of each device, the same on all."""
    return lax.all_gather(x, axes, axis=0, to="invarying")


def _scatter_dim(reduction: _Reduction, i: int, spec: PartitionSpec) -> int | None:
    """The dimension of a gradient that its parameter's spec shards over all axes of the reduction."""
    shape, path = reduction.leaves[i].shape, reduction.paths[i]
    for dim, entry in enumerate(spec):
        common = [name for name in blocks.spec_entry_axes(entry) if name in reduction.axes]
        if not common:
            continue
        if tuple(common) != reduction.axes:
            raise ValueError(
                f"{reduction.caller}: {path} is sharded over {common} of {reduction.axes}; reduce over {common} "
                "alone, and then over the other axes"
            )
        quantized = reduction.specs[i]
        unit = (quantized.group_size or 1) if quantized is not None and dim == len(shape) - 1 else 1
        if shape[dim] % (reduction.replicas * unit):
            groups = f" in groups of {unit}" if unit > 1 else ""
            raise ValueError(
                f"{reduction.caller}: {reduction.replicas} devices do not divide dimension {dim} of {path}, "
                f"{shape}{groups}; shard another dimension, or none"
            )
        return dim
    return None


def broadcast_specs(specs: Any, tree: Any) -> list[PartitionSpec]:
    """The spec of each leaf of a tree, from a tree or prefix of `PartitionSpec`s."""

    def is_spec(node: Any) -> bool:
        return isinstance(node, PartitionSpec)

    return jax.tree.leaves(jax.tree.broadcast(specs, tree, is_leaf=is_spec), is_leaf=is_spec)
