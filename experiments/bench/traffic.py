"""Bytes that a compiled program's operations read and write: what memory-bound passes move, counted and not timed."""

import math
import re

# Operations that move nothing: names for what is there already.
FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}
# Bits of an element, the first number of its name (bf16, f8e4m3fn, s4; none of pred), and sides of an array.
SHAPE = re.compile(r"\b(?:[a-z]+(\d+)[a-z0-9]*|pred)\[([\d,]*)\]")
OPERATION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
TARGET = re.compile(r'custom_call_target="([^"]+)"')
NAME = re.compile(r'op_name="([^"]+)"')


def moved(program: str, without: tuple[str, ...] = ()) -> int:
    """Bytes of operands and results, whole, of all operations of a program.

    Args:
        program: text of a compiled program (`jax.stages.Compiled.as_text`). Operations that run others (loops,
            conditionals, command buffers) are refused: what they move is not told by their operands.
        without: operations do not count whose custom call's target contains one of these, or that come from such a
            `jax.named_scope`.

    Raises:
        ValueError: an operation that runs others.
    """
    lines = program[program.index("\nENTRY") :].splitlines()
    operations = [match.groups() for line in lines if (match := OPERATION.match(line))]
    results = {name: kind for name, kind, _, _ in operations}
    total = 0
    for name, kind, operation, rest in operations:
        if operation in ("while", "conditional", "call", "async-start"):
            raise ValueError(f"{name} is a {operation}: compile without loops and command buffers to count its bytes")
        target, origin = TARGET.search(rest), NAME.search(rest)
        scopes = origin[1].split("/") if origin else []
        if operation in FREE or any((target and part in target[1]) or part in scopes for part in without):
            continue
        operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
        total += size(kind) + sum(size(results.get(operand, "")) for operand in operands)
    return total


def size(kind: str) -> int:
    """Bytes of a type as programs spell it: one array's, such as `f32[8,128]{1,0}`, or a tuple's."""
    counts = ((bits, math.prod(int(d) for d in dims.split(",") if d)) for bits, dims in SHAPE.findall(kind))
    return sum(int(bits or 8) * count for bits, count in counts) // 8
