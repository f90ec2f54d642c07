"""Checks that a collective is inside `jax.shard_map`, manual over the axes that it reduces."""

import math
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType

from fp8jax.ops.dispatch.choice import varying_axes

Axes = str | tuple[str, ...]


def axis_names(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


_GRADIENTS_ADVICE = (
    "Under jit alone, XLA has already summed the gradients, in their own dtype. Compute the loss and its gradient "
    "inside jax.shard_map(step, mesh=mesh, axis_names={names}, in_specs=(P(), P({axes})), out_specs=P())"
)


def check_manual_axes(caller: str, axes: Axes, tree: Any, advice: str = _GRADIENTS_ADVICE) -> int:
    """The number of devices along `axes`, after checking that the program is manual over them.

    Args:
        caller: name of the calling function.
        axes: name or names of the mesh axes.
        tree: arrays that must vary over the axes.
        advice: advice for the error message, with placeholders `names` and `axes`.

    Raises:
        ValueError: the program is not manual over the axes; or `jax.shard_map` tracks an array as equal on all devices.
    """
    mesh, requested = jax.sharding.get_abstract_mesh(), axis_names(axes)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    missing = [name for name in requested if kinds.get(name) != AxisType.Manual]
    if missing or not requested:
        raise ValueError(
            f"{caller} over {requested} must be called inside jax.shard_map that is manual over these mesh axes; "
            f"not manual: {', '.join(map(repr, missing)) or 'none'}. "
            f"{advice.format(names=set(requested), axes=requested)}"
        )
    if set(requested) <= varying_axes(lax.axis_index(requested)):
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            unvarying = [name for name in requested if name not in varying_axes(x)]
            if unvarying:
                raise ValueError(
                    f"{caller}: {jax.tree_util.keystr(path) or 'the gradient'} does not vary over {unvarying}: "
                    "jax.shard_map has already summed it, in its own dtype. Differentiate with respect to parameters "
                    f"that vary, jax.lax.pcast(params, {requested}, to='varying'), or pass check_vma=False to "
                    "jax.shard_map"
                )
    return math.prod(mesh.shape[name] for name in requested)
