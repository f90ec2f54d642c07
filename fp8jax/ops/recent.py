"""What was last made of an array, and what arrays were made from: by their identity, within one trace."""

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import jax
from jax import Array
from jax.extend.core import get_opaque_trace_state

Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True, eq=False)
class Same:
    """Stands for an object where objects are compared: equal if they are the same, and alive as long as this is."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Recent(threading.local, Generic[Made]):
    """Remembers one result, by the identity of the array it was made of, and how, until that array is gone.

    Results belong to the trace that made them: the body of a scan must not see those of the function around it.
    """

    def __init__(self) -> None:
        self._entry: tuple[Any, Any, Made] | None = None

    def get(self, source: Array, how: Hashable, make: Callable[[], Made]) -> Made:
        """The last result if it was made of `source` in the same way and trace; else `make()`, which is remembered."""
        # Arrays of NumPy may change under the same name; to the leak checker an entry that waits is a leak.
        if not isinstance(source, Array) or jax.config.jax_check_tracer_leaks:  # type: ignore[attr-defined]
            return make()
        use = (how, get_opaque_trace_state())
        if self._entry is not None and self._entry[0]() is source and self._entry[1] == use:
            return self._entry[2]
        made = make()
        self._remember(source, use, made)
        return made

    def put(self, source: Array, made: Made) -> None:
        """Remembers what was made of `source`, for `take`."""
        if isinstance(source, Array) and not jax.config.jax_check_tracer_leaks:  # type: ignore[attr-defined]
            self._remember(source, (None, get_opaque_trace_state()), made)

    def take(self, source: Array) -> Made | None:
        """What `put` remembers of `source`, in the same trace; forgotten then, as it may keep `source` alive."""
        entry, use = self._entry, (None, get_opaque_trace_state())
        if entry is None or entry[0]() is not source or entry[1] != use:
            return None
        self._entry = None
        return entry[2]

    def _remember(self, source: Array, use: Any, made: Made) -> None:
        self._entry = (weakref.ref(source, self._forget), use, made)

    def _forget(self, reference: Any) -> None:
        # While the interpreter shuts down, there may be no entry left to ask for.
        entry = getattr(self, "_entry", None)
        if entry is not None and entry[0] is reference:
            self._entry = None


class Origins(threading.local, Generic[Made]):
    """What arrays were made from, by the identity of each, while it lives.

    As for `Recent`, an entry belongs to the trace that made it: an array that enters another trace has no origin there.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Any, Any, Made]] = {}

    def note(self, array: Array, origin: Made) -> None:
        """Remembers what `array` was made from."""
        if not isinstance(array, Array) or jax.config.jax_check_tracer_leaks:  # type: ignore[attr-defined]
            return
        reference = weakref.ref(array, functools.partial(_drop, self._entries, id(array)))
        self._entries[id(array)] = (reference, get_opaque_trace_state(), origin)

    def find(self, array: Array) -> Made | None:
        """What `array` was made from; None where that is not known in this trace."""
        entry = self._entries.get(id(array))
        if entry is None or entry[0]() is not array or entry[1] != get_opaque_trace_state():
            return None
        return entry[2]

    def pass_on(self, source: Array, copy: Array) -> Array:
        """The same array in another dtype has the same origin."""
        origin = self.find(source)
        if origin is not None and copy is not source:
            self.note(copy, origin)
        return copy


def _drop(entries: dict[int, Any], key: int, reference: Any) -> None:
    # Another array may have taken the place in memory meanwhile.
    if key in entries and entries[key][0] is reference:
        del entries[key]
