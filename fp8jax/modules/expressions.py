"""What functions compute: their programs as numbered terms, which are the same where these compute the same."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

_COMMUTATIVE = ("add", "mul")


def outputs(fn: Callable, args: Any, terms: dict[Any, int], first: int = 0) -> tuple[Any, list[int]]:
    """The structure of what a function of abstract arguments returns, and the number of each term in it.

    Terms have the same number where the same operations are applied to the same operands. Calls are looked into, and
    the operands of sums and products may stand in either order; nothing else is rewritten, so that terms that are equal
    for another reason count as different.

    Args:
        fn: the function.
        args: its arguments, in any structure.
        terms: the terms that have numbers so far, in their order; empty at first.
        first: the place of the first array of `args` among the arguments that terms are computed from.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    inputs = [_number(terms, "input", first + i) for i in range(len(closed.jaxpr.invars))]
    return jax.tree.structure(shapes), _evaluate(closed, inputs, terms)


def reached(number: int, terms: list[Any]) -> tuple[set[int], set[str]]:
    """The arguments, by their places, that the term with a number is computed from, and the names of the operations in
    between; `terms` in their order."""
    arguments, names, seen, todo = set[int](), set[str](), {number}, [number]
    while todo:
        term = terms[todo.pop()]
        if term[0] == "input":
            arguments.add(term[1])
        elif term[0] not in ("constant", "literal"):
            names.add(term[0])
            todo += {*term[2:-1]} - seen
            seen |= {*term[2:-1]}
    return arguments, names


def _evaluate(closed: Any, inputs: list[int], terms: dict[Any, int]) -> list[int]:
    """The numbers of the terms that a program returns; the same term has the same number."""
    jaxpr = closed.jaxpr
    consts = [_number(terms, "constant", id(c)) for c in closed.consts]
    numbers = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def read(atom: Any) -> int:
        if isinstance(atom, core.Literal):
            return _number(terms, "literal", str(atom.aval), repr(atom.val))
        return numbers[atom]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        name = eqn.primitive.name
        if name in ("jit", "pjit", "closed_call"):
            results = _evaluate(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"], operands, terms)
        else:
            operands = sorted(operands) if name in _COMMUTATIVE else operands
            term = (name, str(sorted(eqn.params.items())), *operands)
            results = [_number(terms, *term, i) for i in range(len(eqn.outvars))]
        numbers |= dict(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _number(terms: dict[Any, int], *term: Any) -> int:
    return terms.setdefault(term, len(terms))
