"""Parameters in Flax NNX's Variables: state that `nnx.Optimizer` can update, and updates that look through them.

A Variable is a pytree of one array with metadata. `nnx.Optimizer` makes one of each leaf of a state, and exchanges its
array at each step: so Variables stand inside a `QTensor`, around its arrays, never around it. Flax is not imported
here: where nobody did, there are no Variables.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax.core.qtensor import QTensor

_SHARDINGS = ("out_sharding", "optimizer_sharding")


def looking_through(init: Callable, *updates: Callable) -> tuple[Callable, ...]:
    """`init` and forms of `update` of pure trees, made to take trees with Variables in them.

    Args:
        init: `init(params) -> state`, which maps over the leaves of `params`.
        updates: `update(grads, state, params=None, **extra) -> (result, state)` each.

    Returns:
        The same functions. The state of `init` has the Variables of the parameters around its arrays. The result of an
        update has those of the parameters, else of the gradients, and its state those of the state before.
    """

    @functools.wraps(init)
    def init_variables(params: Any) -> Any:
        return _inside_out(init(params))

    def update_variables(update: Callable) -> Callable:
        @functools.wraps(update)
        def through(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            given = (grads, state, params, extra)
            if not any(map(_is_variable, jax.tree.leaves(given, is_leaf=_is_variable))):
                return update(grads, state, params, **extra)
            *arrays, options = jax.tree.map(_value, given, is_leaf=_is_variable)
            result, new = update(*arrays, **options)
            return _structured(result, grads if params is None else params), _structured(new, state)

        return through

    return init_variables, *(update_variables(update) for update in updates)


def _structured(tree: Any, like: Any) -> Any:
    """The leaves of a pure tree in the Variables of one like it."""
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(tree))


def _inside_out(state: Any) -> Any:
    """The state with each Variable of a QTensor made a QTensor of Variables."""

    def turn(node: Any) -> Any:
        value = _value(node)
        if not (_is_variable(node) and isinstance(value, QTensor)):
            return node
        return jax.tree.map(lambda part: _variable_of(node, part, value.codes), value)

    return jax.tree.map(turn, state, is_leaf=_is_variable)


def _variable_of(variable: Any, part: Any, codes: Any) -> Any:
    """`variable` with a part of its QTensor, and names of sharded axes for the dimensions that keep them.

    The names may be of axes that no mesh has yet. A dimension of blocks keeps its own where it is sharded already, or
    has as many entries as the codes: others may not divide where the codes do.
    """
    treedef: Any = jax.tree.structure(variable, is_leaf=lambda x: x is not variable)
    made = treedef.unflatten([part])
    if part is codes:
        return made
    sharding = getattr(part, "sharding", None)
    actual = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    actual += (None,) * (part.ndim - len(actual))
    lengths = zip(part.shape, codes.shape, strict=True)
    kept = [cut is not None or n == whole for cut, (n, whole) in zip(actual, lengths, strict=True)]
    for key in _SHARDINGS:
        names = variable.get_metadata().get(key)
        if isinstance(names, (tuple, PartitionSpec)):
            made.set_metadata(key, tuple(n if keep else None for n, keep in zip(names, kept, strict=False)))
    return made


def _is_variable(node: Any) -> bool:
    variable = getattr(sys.modules.get("flax.nnx"), "Variable", None)
    return variable is not None and isinstance(node, variable)


def _value(node: Any) -> Any:
    """What a Variable holds; anything else as it is."""
    return node.get_raw_value() if _is_variable(node) else node
