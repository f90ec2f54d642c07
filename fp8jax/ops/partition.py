"""Kernels on sharded arrays: one place that turns a call on whole arrays into calls on each device's own parts.

A kernel sees one device's arrays alone, and XLA cannot look into it. So a call says how its operands may be cut, in the
notation of `fp8jax.ops.cuts`.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding

from fp8jax.ops import placement
from fp8jax.ops.cuts import WHOLE, Cut, Dimension, Dimensions, Notation, dimensions


def partitioned(
    name: str,
    static: Any,
    function: Callable[..., Any],
    operands: Sequence[Any],
    ins: Sequence[Any],
    outs: Any,
    *,
    units: Mapping[str, int] | None = None,
    sums: str | None = None,
    wanted: Sequence[Any] | None = None,
    kernel: bool = True,
) -> Any:
    """Runs a function of a device's own arrays on arrays that may be sharded, under `jit` as well as `jax.vmap`.

    Arrays on Auto mesh axes are cut as XLA's partitioner places them, those on Explicit axes as their types say. Inside
    `jax.shard_map` the arrays are a device's own already.

    Args:
        name: of the program.
        static: all else that `function` is compiled for; with the name and the code it tells kernels apart in JAX's
            persistent cache, so its `repr` must say it all.
        function: `function(cut, *operands)`, which closes over no array; `cut` sums and compares over devices.
        operands: arrays, trees of them, or None.
        ins: for each operand how it may be cut, in the notation of this file; of a tree, for each of its parts.
        outs: the same of what `function` returns.
        units: what the parts of a dimension are multiples of, beside its blocks.
        sums: the dimension that the only result is summed over; `function` then gives that to `cut.total`.
        wanted: how the only result is to lie on Explicit mesh axes; on Auto ones XLA's partitioner says.
        kernel: False if `function` is of JAX's operations alone, which `jax.vmap` may map; kernels run one by one.

    Returns:
        What `function` returns for whole arrays.
    """
    if on_one_device() and not kernel:
        return function(WHOLE, *operands)
    if on_one_device():
        return jax.custom_batching.sequential_vmap(functools.partial(function, WHOLE))(*operands)
    leaves, structure = jax.tree.flatten(tuple(operands))

    def own(cut: Cut, *arrays: Array) -> Any:
        return function(cut, *jax.tree.unflatten(structure, arrays))

    whole = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    results = jax.eval_shape(functools.partial(own, WHOLE), *whole)
    sides = tuple(_match(ins, tuple(operands))), tuple(_match(outs, results))
    notation = Notation(*sides, tuple((units or {}).items()), sums)
    told = hashlib.sha256(repr((static, notation, _sources())).encode()).hexdigest()[:16]
    call = _partitioned(f"{name}_{told}", lambda cut, *x: jax.tree.leaves(own(cut, *x)), notation, 0, wanted, kernel)
    return jax.tree.unflatten(jax.tree.structure(results), call(*leaves))


@functools.cache
def _sources() -> str:
    """A digest of the code that kernels are made and called by, and of the packages that compile them.

    XLA sees nothing of a kernel in a program that it partitions. So the name of the call says all that there is to tell
    programs apart in JAX's persistent cache, which hits only where `jax_remove_custom_partitioning_ptr_from_cache_key`
    is set: keys otherwise hold the address of a function.
    """
    digest = hashlib.sha256()
    for package in ("pallas_kernels", "fp8jax.core", "fp8jax.ops"):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(pathlib.Path(folder).glob("*.py")):
                digest.update(path.name.encode() + path.read_bytes())
    for package in ("jax-triton", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{package} {importlib.metadata.version(package)}".encode())
    return digest.hexdigest()


def on_one_device() -> bool:
    """Whether arrays are a device's own: there is no other, or `jax.shard_map` has cut them over all mesh axes."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return AxisType.Manual in mesh.axis_types and not mesh.explicit_axes and not placement.auto_axes(mesh)


def _match(notation: Any, tree: Any) -> list[Dimensions]:
    """The dimensions of each array of a tree."""
    if tree is None:
        return []
    if isinstance(notation, str):
        return [dimensions(notation)]
    parts = tree if isinstance(tree, (tuple, list)) else jax.tree.leaves(tree)
    return [dims for text, part in zip(notation, parts, strict=True) for dims in _match(text, part)]


def _partitioned(
    name: str,
    function: Callable[..., Sequence[Array]],
    notation: Notation,
    depth: int,
    wanted: Sequence[Any] | None,
    kernel: bool,
) -> Callable:
    def call(*arrays: Array) -> tuple[Array, ...]:
        if any(jax.typeof(x).sharding.mesh.explicit_axes for x in arrays):
            return _explicit(function, notation, arrays, wanted)
        return _automatic(function, notation, arrays)

    call.__name__ = name

    @jax.custom_batching.custom_vmap
    def mapped(*arrays: Array) -> tuple[Array, ...]:
        # Under jit, because an eager call is not partitioned.
        return jax.jit(call)(*arrays)

    @mapped.def_vmap
    def rule(size: int, batched: Sequence[bool], *arrays: Array) -> Any:
        def each(cut: Cut, *own: Array) -> Sequence[Array]:
            if not kernel:
                axes = [0 if b else None for b in batched]
                return jax.vmap(functools.partial(function, cut), axes)(*own)  # type: ignore[no-any-return]

            def one(rows: tuple[Array, ...]) -> tuple[Array, ...]:
                rest = iter(rows)
                return tuple(function(cut, *(next(rest) if b else x for x, b in zip(own, batched, strict=True))))

            return lax.map(one, tuple(x for x, b in zip(own, batched, strict=True) if b))

        which = "".join(str(int(b)) for b in batched)
        wider = notation.batched(f"batch{depth}", batched)
        spec = wanted and (None, *wanted)
        results = _partitioned(f"{name}_{which}", each, wider, depth + 1, spec, kernel)(*arrays)
        return results, (True,) * len(results)

    return mapped


def _automatic(function: Callable, notation: Notation, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    lengths, count = notation.lengths([x.shape for x in arrays]), len(arrays)
    whole = jax.make_jaxpr(lambda *own: tuple(function(WHOLE, *own)))(*arrays)
    around = jax.sharding.get_abstract_mesh()
    # So that XLA numbers the devices of a group in the mesh's order; see `placement`.
    first = (np.int8(0),) if AxisType.Manual in around.axis_types else ()
    # What is partitioned takes its constants, such as tables, as operands.
    ins = (*notation.ins, *((Dimension(None),) * jnp.ndim(x) for x in whole.consts))
    parsed = notation._replace(ins=ins, outs=(*((),) * len(first), *notation.outs))

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        """XLA's partitioner calls it once for each call of a compiled program."""
        outputs = placement.Placement.of(mesh, around, arguments[0])
        placed = [outputs.spec(x) for x in arguments[:count]]
        wanted = outputs.spec(results[-1]) if notation.sums else None
        cut = notation.assign(lengths, placed, dict(outputs.group.shape), wanted)
        ins, outs = (tuple(NamedSharding(outputs.group, spec) for spec in side) for side in parsed.specs(cut))

        def local(*own: Array) -> tuple[Array, ...]:
            with placement.manual(outputs.mesh):
                return (*first, *function(cut, *own[:count]))

        return outputs.mesh, local, outs, ins

    def rule(mesh: Any, *_: Any) -> tuple[str, dict[str, int]]:
        known = placement.auto_axes(around) if first else dict(mesh.shape)
        return parsed.rule(lengths, math.lcm(*known.values()) if known else jax.device_count())

    def run(*own: Array) -> tuple[Array, ...]:
        return (*first, *jax.core.eval_jaxpr(whole.jaxpr, own[count:], *own[:count]))

    call = custom_partitioning(run)
    call.def_partition(partition, sharding_rule=rule, decode_shardings=False)
    outputs: tuple[Array, ...] = call(*arrays, *whole.consts)
    return outputs[len(first) :]


def _explicit(
    function: Callable, notation: Notation, arrays: tuple[Array, ...], wanted: Sequence[Any] | None
) -> tuple[Array, ...]:
    kinds = [jax.typeof(x).sharding for x in arrays]
    mesh = next(kind.mesh for kind in kinds if kind.mesh.explicit_axes)
    sizes = {name: mesh.shape[name] for name in mesh.explicit_axes}
    cut = notation.assign(notation.lengths([x.shape for x in arrays]), [k.spec for k in kinds], sizes, wanted)
    ins, outs = notation.specs(cut)
    moved = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, ins, strict=True)]
    if placement.auto_axes(mesh):  # XLA may cut each part further.
        placed = tuple(NamedSharding(mesh, spec) for spec in outs)
        run = functools.partial(_automatic, function, notation)
        return jax.sharding.auto_axes(lambda *x: run(x), axes=tuple(sizes), out_sharding=placed)(*moved)
    run = functools.partial(function, cut)
    # Without names all axes are mapped over but those that `jax.vmap` hides while it traces.
    names = set(sizes) if AxisType.Manual in mesh.axis_types else set()
    return jax.shard_map(
        lambda *own: tuple(run(*own)), mesh=mesh, in_specs=ins, out_specs=outs, axis_names=names, check_vma=False
    )(*moved)
