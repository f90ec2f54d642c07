"""What arrays are made from, in models that were not written for this library: one registry for all operations.

A model calls a norm, casts its result, and gives it to three layers. Each operation notes here what its result is made
from, and each layer finds it here by the array that it is given: by identity, within the trace that noted it. In a
traced program the registry looks through what changes no value: casts, reshapes, sharding constraints, checkpoint
names, barriers, and nested jits that do nothing else. It holds no array alive but what an operation saves anyway, and
that no longer than to the next operation outside of the program that is traced: a trace that fails may stay till then.

Functions that hold both ends (`fp8jax.norm_linear`, `fp8jax.glu_linear`) pass what they know and need no registry.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
from jax import Array
from jax.extend import core
from jax.extend.core import get_opaque_trace_state

from fp8jax.ops.choice import Choice, tell
from fp8jax.ops.saved import NOTHING, Origin
from fp8jax.rewrite.graph import lossless
from fp8jax.rewrite.operations import as_read

Shared = TypeVar("Shared")
# What changes no value, but for the rounding of casts.
_SAME = frozenset((
    *("convert_element_type", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "name"),
    *("optimization_barrier", "sharding_constraint", "layout_constraint", "reshard", "mesh_cast"),
))  # fmt: skip
JITS = ("jit", "pjit", "closed_call")


class _Noted(NamedTuple):
    """What is noted of an array: a weak reference to it, the traced program, the trace, and what it is made from."""

    array: Any
    program: Any
    trace: Any
    origin: Origin


class _Entry(NamedTuple):
    """What was made of an array for a reader: references to its leaves, and to what it was made with.

    In a trace an array that is made of another one keeps it alive, so there they are weak.
    """

    trace: Any
    others: tuple[Any, ...]
    leaves: tuple[Any, ...]
    structure: Any


class _Readers(NamedTuple):
    """A weak reference to an array, the traced program, and what was made of the array, by how."""

    array: Any
    program: Any
    entries: dict[Hashable, _Entry]


class Registry(threading.local):
    """`fp8jax.ops.saved.Provenance` of a thread.

    An entry belongs to the trace that made it: an array that enters another one is not known there, for the body of a
    scan must not see what the function around it has made.
    """

    def __init__(self) -> None:
        self._noted: dict[int, _Noted] = {}
        self._readers: dict[int, _Readers] = {}
        self._program: Any = None

    def note(self, x: Array, origin: Origin) -> None:
        """Says what an array is made from."""
        if isinstance(x, Array) and origin != NOTHING:
            x = _plain(x)
            forget = functools.partial(_drop, self._noted, id(x))
            trace = self._enter()
            self._noted[id(x)] = _Noted(weakref.ref(x, forget), self._program, trace, origin)

    def find(self, x: Array) -> Origin:
        """What an array is made from; `NOTHING` if that is not known in this trace."""
        if not isinstance(x, Array) or not self._noted:
            return NOTHING
        before, trace = None, self._enter()
        for before in _before(x):
            noted = self._noted.get(id(before))
            if noted is not None and noted.array() is before and noted.trace == trace:
                if noted.origin.foreseen is not None:
                    # It may be made of the gradient itself, which an entry would then keep alive. One reader asks.
                    del self._noted[id(before)]
                return _as(noted.origin, before, x)
        self._miss(before)
        return NOTHING

    def follow(self, source: Array, copy: Array) -> None:
        """Says that an array is another one in another dtype, which outside of traces no one can see."""
        origin = self.find(source)
        if copy is not source and origin != NOTHING and lossless([source.dtype], copy.dtype):
            self.note(copy, _as(origin, source, copy))

    def share(self, x: Array, use: Hashable, make: Callable[[], Shared], *others: Any) -> Shared:
        """What was made of an array in this way, with the same other arrays, if anything still uses it; or `make()`.

        All readers share it that read the array through what changes no value, in one dtype.
        """
        # Arrays of NumPy may change under the same name.
        if not isinstance(x, Array):
            return make()
        use, trace = (use, x.dtype), self._enter()
        *_, first = _before(x)
        readers = self._readers.get(id(first))
        if readers is None or readers.array() is not first:
            forget = functools.partial(_drop, self._readers, id(first))
            readers = self._readers[id(first)] = _Readers(weakref.ref(first, forget), self._program, {})
        entry = readers.entries.get(use)
        if entry is not None and entry.trace == trace:
            leaves, references = [ref() for ref in entry.leaves], [ref and ref() for ref in entry.others]
            if all(leaf is not None for leaf in leaves) and all(
                a is b for a, b in zip(references, others, strict=True)
            ):
                return jax.tree.unflatten(entry.structure, leaves)  # type: ignore[no-any-return]
        shared = make()
        parts, structure = jax.tree.flatten(shared)
        references = [o if o is None else _reference(o) for o in others]
        readers.entries[use] = _Entry(trace, tuple(references), tuple(map(_reference, parts)), structure)
        return shared

    def _enter(self) -> Any:
        """The trace of an operation; drops what is known of traced programs other than the one that it is in."""
        trace = get_opaque_trace_state()
        program = program_of(trace)
        if program is not _UNKNOWN and program != self._program:
            self._program = program
            for entries in (self._noted, self._readers):
                for key in [key for key, entry in entries.items() if entry.program not in (None, program)]:
                    del entries[key]
        return trace

    def _miss(self, last: Any) -> None:
        """Tells whoever listens that something known was changed on its way to a reader."""
        parent: Any = getattr(last, "parent", None)
        for x in getattr(parent, "in_tracers", ()):
            for before in _before(x):
                noted = self._noted.get(id(before))
                if noted is not None and noted.array() is before and noted.origin.again is not None:
                    name = parent.primitive.name
                    reason = f"what is saved before {name} is not seen through it; the reader saves codes of its own"
                    tell("saved input", Choice("xla", reason))
                    return


REGISTRY = Registry()


_UNKNOWN = object()


def program_of(state: Any) -> Any:
    """A weak reference to the outermost trace of a program that a trace is in; None if it is in none."""
    # As with JAX's record of a trace: where it has other names, no program is told from another.
    trace: Any = getattr(state, "_trace_ref", lambda: None)()
    outermost = None
    while hasattr(trace, "parent_trace"):
        outermost = weakref.ref(trace) if hasattr(trace, "frame") else outermost
        trace = trace.parent_trace
    return _UNKNOWN if trace is None else outermost


def _reference(x: Any) -> Callable[[], Any]:
    """What gives an array if anything still uses it. Outside of traces an array keeps no other one alive."""
    return weakref.ref(x) if isinstance(x, jax.core.Tracer) else lambda: x


def _drop(entries: dict[int, Any], key: int, reference: Any) -> None:
    # Another array may have taken the place in memory meanwhile. While the interpreter shuts down, nothing is left.
    if key in entries and entries[key].array is reference:
        del entries[key]


def _as(origin: Origin, source: Any, x: Array) -> Origin:
    """What is known of an array that is another one in another shape or dtype."""
    same = source.shape == x.shape and source.dtype == x.dtype
    return as_read(origin, source, x)._replace(foreseen=origin.foreseen if same else None)


def _plain(x: Any) -> Any:
    """What stands for the value of an array while it is differentiated."""
    while isinstance(x, jax.core.Tracer) and isinstance(primal := getattr(x, "primal", None), Array):
        x = primal
    return x


def _before(x: Any) -> Iterator[Any]:
    """An array, and those that it is, up to casts that lose nothing that it has, and layouts; the nearest first."""
    wanted, dtypes = x.dtype, []
    x = _plain(x)
    while x is not None:
        yield x
        dtypes.append(x.dtype)
        x = _operand(x)
        if x is not None and not lossless([x.dtype, *dtypes[1:]], wanted):
            return


def _operand(x: Any) -> Any:
    """What an array was made of by an operation that changes no value; None for any other, or where it is not known."""
    # JAX's own record of a trace, which has no public name: where it is another one, nothing is seen through.
    parent: Any = getattr(x, "parent", None)
    variable, outputs = getattr(x, "val", None), getattr(parent, "outvars", ())
    place = next((i for i, v in enumerate(outputs) if v is variable), None)
    source = None if place is None else _source(parent.primitive.name, parent.params, place)
    before = None if source is None else parent.in_tracers[source]
    # Of what is broadcast, only axes of one element are another layout.
    return before if before is not None and before.size == x.size else None


def _source(name: str, params: Any, place: int) -> int | None:
    """The operand whose value a result of an operation has, by its place; None if no operand."""
    if name in _SAME:
        return place if name == "optimization_barrier" else 0
    if name not in JITS:
        return None
    jaxpr = (params.get("jaxpr") or params["call_jaxpr"]).jaxpr
    makers = {v: (eqn, i) for eqn in jaxpr.eqns for i, v in enumerate(eqn.outvars)}
    value, dtypes = jaxpr.outvars[place], []
    while not isinstance(value, core.Literal) and value in makers:
        eqn, i = makers[value]
        source = _source(eqn.primitive.name, eqn.params, i)
        if source is None or eqn.invars[source].aval.size != value.aval.size:
            return None
        dtypes.append(value.aval.dtype)
        value = eqn.invars[source]
    if isinstance(value, core.Literal) or value not in jaxpr.invars:
        return None
    return (
        jaxpr.invars.index(value)
        if lossless([value.aval.dtype, *dtypes[1:]], jaxpr.outvars[place].aval.dtype)
        else None
    )
