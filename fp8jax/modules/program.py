"""What a program multiplies: as JAX traced it, and as XLA compiled it."""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

from fp8jax.ops.choice import Choice, listening, summary

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general", "scaled_dot", "pallas_call")
_EIGHT_BITS = re.compile(r"float8\w*|u?int8|f8\w+|[su]8")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.$-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w-]+)\((?P<args>.*)$")
_OPERAND = re.compile(r"(?:(?P<type>\w+)\[[^\]]*\]\S* )?%(?P<name>[\w.$-]+)")


@dataclasses.dataclass(frozen=True)
class Product:
    """Products of one kind in a program.

    Attributes:
        operation: primitive of JAX; or "dot", "convolution" or the target of a custom call of XLA.
        operands: dtypes of the two operands, in JAX's names or XLA's.
        written: how often it stands in the program.
        executed: how often it runs, where loops have a known length; as often as it is written in compiled programs.
    """

    operation: str
    operands: tuple[str, ...]
    written: int
    executed: int

    @property
    def eight_bit(self) -> bool:
        """Whether both operands have 8 bits."""
        return len(self.operands) == 2 and all(_EIGHT_BITS.fullmatch(name) for name in self.operands)


@dataclasses.dataclass(frozen=True)
class Program:
    """The products of a forward and backward pass.

    Attributes:
        backend: what it was compiled for, such as "cpu".
        traced: in the jaxpr.
        compiled: in the optimized program of XLA, its custom calls included.
        choices: the operations of fp8jax that were traced, and what computes each.
    """

    backend: str
    traced: tuple[Product, ...]
    compiled: tuple[Product, ...]
    choices: tuple[tuple[str, Choice], ...] = ()

    def __str__(self) -> str:
        lines = [f"program of a forward and backward pass, compiled for {self.backend}"]
        for name, products in (("traced", self.traced), ("compiled", self.compiled)):
            for p in products:
                times = f"{p.written}" if p.written == p.executed else f"{p.written}, run {p.executed} times"
                lines.append(f"  {name:<8}  {p.operation} of {' x '.join(p.operands)}: {times}")
        asked, done = (sum(p.written for p in ps if p.eight_bit) for ps in (self.traced, self.compiled))
        if asked and not done:
            lines.append(f"  XLA widens the operands of all 8-bit products on {self.backend}: only memory is saved")
        else:
            lines.append(f"  {asked} products of 8-bit operands were asked for, {done} stand in the compiled program")
        return "\n".join([*lines, *(f"  {line}" for line in summary(self.choices))])


def split(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays of a tree, and what puts others in their places; all else stays as it is."""
    leaves, structure = jax.tree.flatten(tree)
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def rebuild(arrays: list[Any]) -> Any:
        rest = iter(arrays)
        mixed = [next(rest) if a else leaf for leaf, a in zip(leaves, is_array, strict=True)]
        return jax.tree.unflatten(structure, mixed)

    return [leaf for leaf, a in zip(leaves, is_array, strict=True) if a], rebuild


def inspect(fn: Callable, *args: Any) -> Program:
    """The products of `fn`.

    Args:
        fn: a function of arrays, to be compiled for the default device.
        args: arrays or `jax.ShapeDtypeStruct`, in any structure.
    """
    with listening() as told:
        traced = jax.jit(fn).trace(*args)
    written: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    executed: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    for eqn, times in _walk(traced.jaxpr.jaxpr, 1):
        key = (eqn.primitive.name, tuple(str(v.aval.dtype) for v in eqn.invars[:2]))
        written[key] += 1
        executed[key] += times
    products = tuple(Product(*key, n, executed[key]) for key, n in written.items())
    compiled = collections.Counter(_compiled(traced.lower().compile().as_text() or ""))
    made = tuple(Product(*key, n, n) for key, n in compiled.items())
    return Program(jax.default_backend(), products, made, tuple(told))


def _walk(jaxpr: Any, times: int) -> Iterator[tuple[Any, int]]:
    """The products of a jaxpr and how often each runs; loops without a known length count once."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _PRODUCTS:
            yield eqn, times
            continue
        inner_times = times * eqn.params["length"] if name == "scan" else times
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from _walk(inner, inner_times)


def _compiled(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Operation and operand dtypes of each product and custom call in a program of XLA, in its text form."""
    types: dict[str, str] = {}
    for line in text.splitlines():
        if line.rstrip().endswith("{"):
            # Names are those of one computation.
            types = {}
            continue
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        types[match["name"]] = match["type"].lstrip("(").partition("[")[0]
        if match["op"] not in ("dot", "convolution", "custom-call", "scaled-dot"):
            continue
        operands = list(_OPERAND.finditer(match["args"].partition(")")[0]))[:2]
        dtypes = tuple(found["type"] or types.get(found["name"], "?") for found in operands)
        target = re.search(r'custom_call_target="([^"]*)"', line)
        yield target[1] if target else match["op"], dtypes
