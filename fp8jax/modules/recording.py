"""One run of a model aside, for all questions about it: what its modules read and return, by marks in its program.

A mark is a name of a value that nothing reads, so that the program computes what it computes without.
"""

import collections
import contextlib
import itertools
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.extend.core import get_opaque_trace_state

_MARK = "fp8jax aside "
# Of a module what it may read and what it returns; of its layers what they read, the same in their dtype, and return.
ROLES = ("argument", "output", "input", "promoted", "result")
_numbers = itertools.count()
# Whether a copy is run aside; part of the keys of JAX's caches, so that a jitted function is traced anew in the call.
ASIDE = jax.make_user_context(False)


class ModuleCall:
    """A call of a module in a run aside.

    Attributes:
        key: what its forms depend on.
        types: those of the input and the result of each of its layers that runs in its own trace.
        counts: how often each layer is called.
        elsewhere: what is marked in another trace, by its role.
    """

    def __init__(self, key: Any) -> None:
        try:
            hash(key)
        except TypeError:  # it is like no other
            key = object()
        self.key, self.number, self._trace = key, next(_numbers), get_opaque_trace_state()
        self.types: dict[str, tuple[Any, Any]] = {}
        self.elsewhere = set[str]()
        self.counts: collections.Counter[str] = collections.Counter()

    def layer(self, name: str, call: Callable[[], Array], x: Array) -> Array:
        """Calls a layer of the module, which reads `x`."""
        self.counts[name] += 1
        if inside := get_opaque_trace_state() == self._trace:
            self.mark("input", name, x)
        y = call()
        if inside:
            self.types[name] = jax.typeof(x), jax.typeof(y)
            self.mark("result", name, y)
        return y

    def mark(self, role: str, name: str, x: Any) -> None:
        """Marks a value of the module's own trace."""
        if get_opaque_trace_state() == self._trace:
            checkpoint_name(x, f"{_MARK}{self.number} {role} {name}")
        else:
            self.elsewhere.add(role)


class Section(NamedTuple):
    """The part of a program in which a module runs.

    Attributes:
        jaxpr: the program.
        call: that of the module.
        marks: for each role the values with it, by their names.
    """

    jaxpr: Any
    call: ModuleCall
    marks: dict[str, dict[str, Any]]

    def operations(self, values: Iterable[Any], ends: Container[Any]) -> list[Any]:
        """The operations, in their order, that values are computed with from others, `ends` among them."""
        makers = {v: i for i, eqn in enumerate(self.jaxpr.eqns) for v in eqn.outvars}
        needed, todo = set[int](), list(values)
        while todo:
            v = todo.pop()
            if not isinstance(v, core.Literal) and v not in ends and v in makers and makers[v] not in needed:
                needed.add(makers[v])
                todo += self.jaxpr.eqns[makers[v]].invars
        return [self.jaxpr.eqns[i] for i in sorted(needed)]


class Recording:
    """The calls of modules in a run aside."""

    def __init__(self) -> None:
        self._calls: dict[int, ModuleCall] = {}

    @contextlib.contextmanager
    def module(self, key: Any, leaves: Iterable[Any]) -> Iterator[ModuleCall]:
        """A call of a module.

        Args:
            key: what its forms depend on.
            leaves: the arrays that it may read, and all else.
        """
        call = ModuleCall(key)
        for i, x in enumerate(leaves):
            if isinstance(x, jax.core.Tracer):
                call.mark("argument", str(i), x)
        yield call
        # Where the trace maps or differentiates, the program has other shapes or operations than the module.
        if hasattr(getattr(call._trace, "_trace_ref", lambda: None)(), "frame"):
            self._calls[call.number] = call

    def sections(self, closed: Any) -> Iterator[Section]:
        """Where the modules run whose layers are called in the program of the run, and in those that it calls."""
        for jaxpr in programs(closed.jaxpr):
            marks: dict[int, dict[str, dict[str, Any]]] = {}
            for eqn in jaxpr.eqns:
                if eqn.primitive.name == "name" and eqn.params["name"].startswith(_MARK):
                    number, role, name = eqn.params["name"].removeprefix(_MARK).split(" ", 2)
                    roles = marks.setdefault(int(number), {role: {} for role in ROLES})
                    roles[role][name] = eqn.invars[0]
            for number, roles in marks.items():
                # A program from a cache of JAX may have marks of another run.
                if number in self._calls and self._calls[number].types.keys() == roles["result"].keys():
                    yield Section(jaxpr, self._calls[number], roles)

    def idle(self) -> list[Any]:
        """The keys of calls that call no layer in their own trace."""
        return [call.key for call in self._calls.values() if not call.types]


def programs(jaxpr: Any) -> Iterator[Any]:
    """A program, and those that its operations run."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        yield from programs_of(eqn)


def programs_of(eqn: Any) -> Iterator[Any]:
    """The programs that an operation runs, and that theirs do."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield from programs(inner)
