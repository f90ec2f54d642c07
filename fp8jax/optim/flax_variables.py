"""Parameters in boxes of Flax: NNX's `Variable` and Linen's `Partitioned`.

A box is a pytree of one array with metadata, such as names of sharded axes. `nnx.Optimizer` boxes each leaf of a state
and replaces its array at each step. The sharding of a parameter need not divide its scales. Boxes are therefore inside
a `QTensor`, one for each array. Flax is not imported here: if nothing has imported it, there are no boxes.
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


def with_unboxed_variables(init: Callable, *updates: Callable) -> tuple[Callable, ...]:
    """`init` and forms of `update` for pure trees, wrapped to accept trees with boxes.

    Args:
        init: `init(params) -> state`, which maps over the leaves of `params`.
        updates: `update(grads, state, params=None, **extra) -> (result, state)` each.

    Returns:
        The same functions. The state of `init` has the boxes of the parameters around its arrays. The result of an
        update has the boxes of the parameters, else of the gradients, and its state those of the old state.
    """

    @functools.wraps(init)
    def wrapped_init(params: Any) -> Any:
        return _push_boxes_inside(init(params))

    def wrap_update(update: Callable) -> Callable:
        @functools.wraps(update)
        def update_unboxed(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            arguments = (grads, state, params, extra)
            if not any(map(is_box, jax.tree.leaves(arguments, is_leaf=is_box))):
                return update(grads, state, params, **extra)
            *arrays, options = jax.tree.map(_unbox_node, arguments, is_leaf=is_box)
            result, new = update(*arrays, **options)
            return rebox(result, grads if params is None else params), rebox(new, state)

        return update_unboxed

    return wrapped_init, *(wrap_update(update) for update in updates)


def rebox(tree: Any, like: Any) -> Any:
    """The leaves of a pure tree in the boxes of `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(tree))


def _push_boxes_inside(state: Any) -> Any:
    """The state with each box of a `QTensor` turned into a `QTensor` of boxes."""

    def push_box(node: Any) -> Any:
        value = _unbox_node(node)
        if not (is_box(node) and isinstance(value, QTensor)):
            return node
        return jax.tree.map(lambda part: _box_array(part, value.codes, node), value)

    return jax.tree.map(push_box, state, is_leaf=is_box)


def _box_array(array: Any, codes: Any, box: Any) -> Any:
    """An array of a `QTensor` in a box like that of the whole, with names of sharded axes where they still apply.

    No mesh need have these axes yet. A dimension of blocks keeps its name if it is sharded already, or if it is as long
    as that of the codes; otherwise the axis may not divide it.
    """
    treedef: Any = jax.tree.structure(box, is_leaf=lambda x: x is not box)
    array_box = treedef.unflatten([array])
    if array is codes:
        return array_box
    sharding = getattr(array, "sharding", None)
    actual = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    actual += (None,) * (array.ndim - len(actual))
    lengths = zip(array.shape, codes.shape, strict=True)
    keeps_name = [
        sharded_axis is not None or n == codes_length
        for sharded_axis, (n, codes_length) in zip(actual, lengths, strict=True)
    ]

    def filter_names(names: Any) -> Any:
        if not isinstance(names, (tuple, PartitionSpec)):
            return names
        return tuple(name if is_named else None for name, is_named in zip(names, keeps_name, strict=False))

    if hasattr(array_box, "get_metadata"):
        for key in _SHARDINGS:
            if key in array_box.get_metadata():
                array_box.set_metadata(key, filter_names(array_box.get_metadata()[key]))
    elif hasattr(array_box, "names"):
        array_box = array_box.replace(names=filter_names(array_box.names))
    return array_box


def merge_boxes(state: Any) -> Any:
    """The state with each `QTensor` of boxes turned into one box, unless its boxes name sharded axes."""

    def merge(node: Any) -> Any:
        boxes = jax.tree.leaves(node, is_leaf=is_box)
        is_merged = isinstance(node, QTensor) and all(map(is_box, boxes))
        if not is_merged or any(key in box.get_metadata() for box in boxes for key in _SHARDINGS):
            return node
        return type(boxes[0])(unbox(node), **boxes[0].get_metadata())

    return jax.tree.map(merge, state, is_leaf=lambda node: isinstance(node, QTensor) or is_box(node))


def unbox(tree: Any) -> Any:
    """A tree with the content of its boxes."""
    return jax.tree.map(_unbox_node, tree, is_leaf=is_box)


def is_box(node: Any) -> bool:
    """Whether a node is an array in a box."""
    classes = (getattr(sys.modules.get(module), name, None) for module, name in _BOXES)
    return isinstance(node, tuple(kind for kind in classes if kind is not None))


def _unbox_node(node: Any) -> Any:
    """The content of a box; any other node itself."""
    return jax.tree.leaves(node, is_leaf=lambda x: x is not node)[0] if is_box(node) else node
