"""Reads the collectives of a program from its text."""

import re
from typing import Any

import jax

KINDS = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "collective_permute")
_ELEMENTS = {"f8E4M3FN": 1, "f8E5M2": 1, "ui8": 1, "i8": 1, "bf16": 2, "f16": 2, "f32": 4, "i32": 4, "i1": 1}


def asked_for(function: Any, *args: Any) -> list[tuple[str, str, int]]:
    """Returns (kind, dtype, operand bytes per device) of each collective in the StableHLO of a program, in order."""
    text = jax.jit(function).lower(*args).as_text()
    results = []
    for kind, rest in re.findall(rf'"stablehlo\.({"|".join(KINDS)})"(.*?\) -> [^\n]*)', text, re.DOTALL):
        operand = re.findall(r": \((?:tensor<([^>]*)>)", rest)[-1]
        *dims, dtype = operand.split("x")
        size = _ELEMENTS[dtype]
        for dim in dims:
            size *= int(dim)
        results.append((kind, dtype, size))
    return results


def compiled(function: Any, *args: Any) -> list[tuple[str, str]]:
    """Returns (kind, dtype) of each collective of the compiled program, in order."""
    text = jax.jit(function).lower(*args).compile().as_text()
    return re.findall(r"= \(?(\w+)\[.* (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(", text)
