"""What operations are told of the arrays that they read, while a graph runs and in the backward passes that follow."""

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
from jax import Array
from jax.extend.core import get_opaque_trace_state

from fp8jax.ops.saved import NOTHING, Origin, Provenance

Shared = TypeVar("Shared")


class Cotangents(Provenance):
    """What operations of one run say of the gradients that they make, for the operation before.

    A gradient is known as long as it is the very array that was made, in the trace that made it: whatever adds to it or
    changes it makes another one. It is asked for once.
    """

    def __init__(self) -> None:
        self._noted: dict[int, tuple[Any, Any, Origin]] = {}

    def note(self, x: Array, origin: Origin) -> None:
        if isinstance(x, jax.core.Tracer) and origin != NOTHING:
            key = id(x)
            forget = lambda _: self._noted.pop(key, None)  # noqa: E731
            self._noted[key] = weakref.ref(x, forget), get_opaque_trace_state(), origin

    def find(self, x: Array) -> Origin:
        reference, trace, origin = self._noted.pop(id(x), (lambda: None, None, NOTHING))
        return origin if reference() is x and trace == get_opaque_trace_state() else NOTHING


def carry(origin: Origin) -> tuple[Any, Callable[[Any], Origin]]:
    """The arrays of what is known, and what makes it of the same arrays in another trace."""
    again, part, scale = origin.again, origin.part, origin.scale
    arrays = again and again[1], part and part.arrays, scale and scale[1]

    def rebuild(arrays: Any) -> Origin:
        saved, operands, number = arrays
        return Origin(
            None if again is None else (again[0], saved),
            None if part is None else part.of(*operands),
            None if scale is None else (scale[0], number),
        )

    return arrays, rebuild


class Known(Provenance):
    """What one operation is told.

    While the graph runs it knows of the array that the operation reads what that is made from, and shares what is made
    of it with other readers of the same value. Then it forgets both: JAX keeps it for the backward pass, in which it
    knows of gradients alone.

    Args:
        cotangents: of the run.
        x: the array. value: what it is made of.
        origin: what that is made from.
        shared: what readers have made, by the value and by how.
    """

    def __init__(self, cotangents: Cotangents, x: Any, value: Any, origin: Origin, shared: dict[Any, Any]) -> None:
        self._cotangents = cotangents
        self._x, self._value, self._origin, self._shared = x, value, origin, shared

    def find(self, x: Array) -> Origin:
        return self._origin if x is self._x and x is not None else self._cotangents.find(x)

    def note(self, x: Array, origin: Origin) -> None:
        self._cotangents.note(x, origin)

    def share(self, x: Array, use: Hashable, make: Callable[[], Shared], *others: Any) -> Shared:
        if self._value is None or x is not self._x:
            return make()
        key = self._value, use, x.dtype
        made = self._shared.get(key)
        if made is None or any(a is not b for a, b in zip(made[0], others, strict=True)):
            made = self._shared[key] = others, make()
        return made[1]  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Ends the forward pass."""
        self._x, self._value, self._origin, self._shared = None, None, NOTHING, {}
