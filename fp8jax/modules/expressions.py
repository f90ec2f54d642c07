"""What functions compute: their programs as numbered terms, which are the same where these compute the same."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import Array
from jax.extend import core

from fp8jax.modules.provenance import JITS, lossless
from fp8jax.modules.reading import PRODUCTS
from fp8jax.modules.recording import Section, programs_of

_COMMUTATIVE = ("add", "mul")
# What says something of a value, and is none of it.
_MARKS = ("name", "sharding_constraint", "layout_constraint", "reshard", "optimization_barrier")
_LAYOUTS = ("convert_element_type", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy")

Marks = tuple[tuple[Any, dict[str, Any]], ...]


def marked(x: Array, marks: Marks) -> Array:
    """An array under the marks of another one: its constraints and names."""
    for primitive, params in marks:
        x = primitive.bind(x, **params)
    return x


def _multiplies(eqn: Any) -> bool:
    inner = (e.primitive.name for jaxpr in programs_of(eqn) for e in jaxpr.eqns)
    return eqn.primitive.name in PRODUCTS or any(name in PRODUCTS for name in inner)


class Terms:
    """The terms of programs by their numbers.

    Terms have the same number where the same operations are applied to the same operands. Calls are looked into, the
    operands of sums and products may stand in either order, constraints, names and barriers are no operations, and
    layouts and casts that lead back to where they began are none; nothing else is rewritten, so that terms that are
    equal for another reason count as different.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._marks: dict[int, Marks] = {}
        self._sources: dict[int, tuple[int, Any]] = {}

    def outputs(self, fn: Callable, args: Any, names: Sequence[str] | None = None) -> tuple[Any, list[int]]:
        """The structure of what a function of abstract arguments returns, and the number of each term in it.

        Args:
            fn: the function.
            args: its arguments, in any structure.
            names: the results that its arguments are; None where they are arguments.
        """
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        count = len(closed.jaxpr.invars)
        terms = [("input", i) for i in range(count)] if names is None else [("result", name) for name in names]
        return jax.tree.structure(shapes), self._evaluate(closed, [self._number(*term) for term in terms])

    def inputs(self, section: Section) -> tuple[dict[str, int], list[Any]]:
        """The number of each term that a layer reads in a call of a module, and the types of its arguments,
        which the results of products that are no layers of it count as."""
        jaxpr, marks, types = section.jaxpr, section.marks, list[Any]()
        numbers: dict[Any, int] = {}

        def add(values: Iterable[Any]) -> None:
            for v in values:
                if not isinstance(v, core.Literal) and v not in numbers:
                    numbers[v] = self._number("input", len(types))
                    types.append(v.aval)

        numbers |= {v: self._number("constant", id(v)) for v in jaxpr.constvars}
        add(marks["argument"].values())
        numbers |= {v: self.of_result(name) for name, v in marks["result"].items()}
        add(jaxpr.invars)
        # No activation has a product in it: what one returns is as good as an argument.
        add(v for eqn in jaxpr.eqns if eqn.primitive.name not in JITS and _multiplies(eqn) for v in eqn.outvars)
        self._run(section.operations(marks["input"].values(), numbers), numbers)
        return {name: self._read(v, numbers) for name, v in marks["input"].items()}, types

    def reached(self, number: int) -> tuple[set[int], set[str], set[str]]:
        """The arguments, by their places, and the results that a term is computed from, and the names of the operations
        in between; functions with a derivative of their own, as `jax.nn.relu`, are named "relu()"."""
        listed, arguments, results, names = list(self._numbers), set[int](), set[str](), set[str]()
        seen, todo = {number}, [number]
        while todo:
            term = listed[todo.pop()]
            if term[0] in ("input", "result"):
                (arguments if term[0] == "input" else results).add(term[1])
            elif term[0] not in ("constant", "literal"):
                names.add(term[0])
                todo += {*term[2:-1]} - seen
                seen |= {*term[2:-1]}
        return arguments, results, names

    def marks(self, number: int) -> Marks:
        """The constraints and names of a term."""
        return self._marks.get(number, ())

    def of_result(self, name: str) -> int:
        """The number of a result."""
        return self._number("result", name)

    def _evaluate(self, closed: Any, inputs: list[int]) -> list[int]:
        """The numbers of the terms that a program returns."""
        jaxpr = closed.jaxpr
        consts = [self._number("constant", id(c)) for c in closed.consts]
        numbers = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

        self._run(jaxpr.eqns, numbers)
        return [self._read(v, numbers) for v in jaxpr.outvars]

    def _run(self, eqns: Iterable[Any], numbers: dict[Any, int]) -> None:
        for eqn in eqns:
            results = self._results(eqn, [self._read(v, numbers) for v in eqn.invars])
            # What is a term of its own, as the result of a layer, stays one.
            numbers |= {v: n for v, n in zip(eqn.outvars, results, strict=True) if v not in numbers}

    def _read(self, atom: Any, numbers: dict[Any, int]) -> int:
        if isinstance(atom, core.Literal):
            return self._number("literal", str(atom.aval), repr(atom.val))
        return numbers[atom]

    def _results(self, eqn: Any, operands: list[int]) -> list[int]:
        name, params = eqn.primitive.name, eqn.params
        if name in JITS:
            return self._evaluate(params.get("jaxpr") or params["call_jaxpr"], operands)
        if name in _MARKS:
            if name != "optimization_barrier":
                self._marks[operands[0]] = (*self.marks(operands[0]), (eqn.primitive, params))
            return operands
        operands = sorted(operands) if name in _COMMUTATIVE else operands
        if name.startswith("custom_") and "call_jaxpr" in params:
            name = f"{params['call_jaxpr'].jaxpr.debug_info.func_name}()"
        term = (name, str(sorted(params.items())), *operands)
        numbers = [self._number(*term, i) for i in range(len(eqn.outvars))]
        if name in _LAYOUTS and eqn.invars[0].aval.size == eqn.outvars[0].aval.size:
            self._sources[numbers[0]] = operands[0], eqn.invars[0].aval
            return [self._origin(numbers[0], eqn.outvars[0].aval)]
        return numbers

    def _origin(self, number: int, kind: Any) -> int:
        """The term that a layout or cast leads back to, or itself."""
        before, dtypes = number, list[Any]()
        while before in self._sources:
            before, source = self._sources[before]
            if source.shape == kind.shape and source.dtype == kind.dtype:
                return before if lossless([source.dtype, *dtypes], kind.dtype) else number
            dtypes.append(source.dtype)
        return number

    def _number(self, *term: Any) -> int:
        return self._numbers.setdefault(term, len(self._numbers))
