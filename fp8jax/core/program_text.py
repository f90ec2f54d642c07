"""The instructions of a compiled program's text by computation, and how often each computation runs."""

import collections
import re
from collections.abc import Mapping
from typing import NamedTuple

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.$-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w-]+)\((?P<args>.*)$")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.$-]+) ")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.$-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?[:=]\s*\{"?n"?[:=]"?(\d+)')


class Line(NamedTuple):
    """An instruction of a computation: its parts, and its text."""

    name: str
    type: str
    op: str
    args: str
    text: str


def computations_of(text: str) -> tuple[dict[str, list[Line]], str]:
    """The instructions of each computation, and the name of the entry computation.

    Args:
        text: text of an executable, `jax.jit(f).lower(...).compile().as_text()`.
    """
    computations: dict[str, list[Line]] = {}
    entry, lines = "", list[Line]()
    for line in text.splitlines():
        if line.endswith("{") and (head := _COMPUTATION.match(line)):
            lines = computations.setdefault(head["name"], [])
            entry = head["name"] if head["entry"] else entry
        elif match := _INSTRUCTION.match(line):
            lines.append(Line(match["name"], match["type"], match["op"], match["args"], line))
    return computations, entry


def runs_of(computations: Mapping[str, list[Line]], entry: str) -> collections.Counter[str]:
    """How often each computation runs; a loop of unknown length counts once."""
    calls: dict[str, collections.Counter[str]] = {}
    for name, lines in computations.items():
        calls[name] = collections.Counter()
        for line in lines:
            if "=" not in line.args:
                continue
            trips = _TRIPS.search(line.text) if line.op == "while" else None
            listed = [name.strip().lstrip("%") for names in _BRANCHES.findall(line.args) for name in names.split(",")]
            for called in {*_CALLED.findall(line.args), *listed} & computations.keys():
                calls[name][called] += int(trips[1]) if trips else 1
    runs: collections.Counter[str] = collections.Counter()

    def visit(name: str, times: int) -> None:
        runs[name] += times
        for called, count in calls.get(name, {}).items():
            visit(called, times * count)

    visit(entry, 1)
    return runs
