"""Parameters in Flax's boxes: state that Flax can update and shard array by array, and updates that look through them.

A box is a pytree of one array with metadata, such as names of sharded axes: NNX's `Variable`, Linen's `Partitioned`.
`nnx.Optimizer` makes a Variable of each leaf of a state, and exchanges its array at each step; and what shards an array
need not divide its scales. So boxes stand inside a `QTensor`, around its arrays, never around it. Flax is not imported
here: where nobody did, there are no boxes.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax.core.qtensor import QTensor

_BOXES = (("flax.nnx", "Variable"), ("flax.core.meta", "AxisMetadata"))
_SHARDINGS = ("out_sharding", "optimizer_sharding")


def looking_through(init: Callable, *updates: Callable) -> tuple[Callable, ...]:
    """`init` and forms of `update` of pure trees, made to take trees with boxes in them.

    Args:
        init: `init(params) -> state`, which maps over the leaves of `params`.
        updates: `update(grads, state, params=None, **extra) -> (result, state)` each.

    Returns:
        The same functions. The state of `init` has the boxes of the parameters around its arrays. The result of an
        update has those of the parameters, else of the gradients, and its state those of the state before.
    """

    @functools.wraps(init)
    def init_boxed(params: Any) -> Any:
        return _inside_out(init(params))

    def update_boxed(update: Callable) -> Callable:
        @functools.wraps(update)
        def through(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            arguments = (grads, state, params, extra)
            if not any(map(is_box, jax.tree.leaves(arguments, is_leaf=is_box))):
                return update(grads, state, params, **extra)
            *arrays, options = jax.tree.map(_unbox, arguments, is_leaf=is_box)
            result, new = update(*arrays, **options)
            return structured(result, grads if params is None else params), structured(new, state)

        return through

    return init_boxed, *(update_boxed(update) for update in updates)


def structured(tree: Any, like: Any) -> Any:
    """The leaves of a pure tree in the boxes of one like it."""
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(tree))


def _inside_out(state: Any) -> Any:
    """The state with each box of a QTensor made a QTensor of boxes."""

    def turn(node: Any) -> Any:
        value = _unbox(node)
        if not (is_box(node) and isinstance(value, QTensor)):
            return node
        return jax.tree.map(lambda part: _boxed(part, value.codes, node), value)

    return jax.tree.map(turn, state, is_leaf=is_box)


def _boxed(part: Any, codes: Any, box: Any) -> Any:
    """A part of a QTensor in a box like that of the whole, which names sharded axes for the dimensions that keep them.

    The names may be of axes that no mesh has yet. A dimension of blocks keeps its own where it is sharded already, or
    has as many entries as the codes: others may not divide where the codes do.
    """
    treedef: Any = jax.tree.structure(box, is_leaf=lambda x: x is not box)
    box_of_part = treedef.unflatten([part])
    if part is codes:
        return box_of_part
    sharding = getattr(part, "sharding", None)
    actual = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    actual += (None,) * (part.ndim - len(actual))
    lengths = zip(part.shape, codes.shape, strict=True)
    named = [cut is not None or n == whole for cut, (n, whole) in zip(actual, lengths, strict=True)]

    def keep(names: Any) -> Any:
        if not isinstance(names, (tuple, PartitionSpec)):
            return names
        return tuple(name if here else None for name, here in zip(names, named, strict=False))

    if hasattr(box_of_part, "get_metadata"):
        for key in _SHARDINGS:
            if key in box_of_part.get_metadata():
                box_of_part.set_metadata(key, keep(box_of_part.get_metadata()[key]))
    elif hasattr(box_of_part, "names"):
        box_of_part = box_of_part.replace(names=keep(box_of_part.names))
    return box_of_part


def bare(tree: Any) -> Any:
    """A tree with what its boxes hold in place of them."""
    return jax.tree.map(_unbox, tree, is_leaf=is_box)


def is_box(node: Any) -> bool:
    """Whether a node is an array in a box."""
    classes = (getattr(sys.modules.get(module), name, None) for module, name in _BOXES)
    return isinstance(node, tuple(kind for kind in classes if kind is not None))


def _unbox(node: Any) -> Any:
    """What a box holds; anything else as it is."""
    return jax.tree.leaves(node, is_leaf=lambda x: x is not node)[0] if is_box(node) else node
