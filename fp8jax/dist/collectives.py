"""The collectives of a compiled program, read from its text."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from fp8jax.core.program_text import computations_of, runs_of

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
# XLA's names of formats on the wire.
HLO_NAMES = {"e4m3": "f8e4m3fn", "e5m2": "f8e5m2", "int8": "s8", "bf16": "bf16", "fp16": "f16", "fp32": "f32"}
_OPERATION = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\((.*)")
_ARRAY = re.compile(r"\b([a-z]+(\d*)[a-z0-9]*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """A collective of a program.

    Attributes:
        kind: one of `KINDS`.
        dtype: dtype on the wire in XLA's spelling: "u8", "f8e4m3fn", "bf16", "f32".
        nbytes: bytes of the operands on a device. `collectives` finds those of the result of a ragged all-to-all,
            which is as long as what a device can receive.
        devices: number of devices in a group.
        times: number of runs, loops counted.
    """

    kind: str
    dtype: str
    nbytes: int
    devices: int
    times: int = 1

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in all runs, by a ring or directly.

        With n devices and S bytes of operands: 2 (n - 1) / n S for an all-reduce, (n - 1) / n S for a reduce-scatter or
        all-to-all, ragged or not, (n - 1) S for an all-gather.
        """
        n = self.devices
        share = {"all-reduce": 2 * (n - 1) / n, "all-gather": n - 1, "collective-permute": 1}.get(
            self.kind, (n - 1) / n
        )
        return self.times * share * self.nbytes


def collectives(program: str) -> list[Collective]:
    """The collectives of a compiled program, in the order of its text, one per dtype of an operation.

    Args:
        program: text of `jax.stages.Compiled.as_text`. A loop of unknown length counts once.
    """
    computations, entry = computations_of(program)
    runs = runs_of(computations, entry)
    return [
        one._replace(times=runs[name])
        for name, lines in computations.items()
        if runs[name]
        for line in lines
        for one in _parse_collective(line.text)
    ]


def _parse_collective(line: str) -> Iterator[Collective]:
    """The collectives of a line of a program, one per dtype; none for a line without a collective."""
    match = _OPERATION.search(line)
    if match is None:
        return
    result, kind, start_suffix, attributes = match.groups()
    devices = _count_devices(attributes)
    operand_ratio = {"all-gather": 1 / devices, "reduce-scatter": devices}.get(kind, 1.0)  # bytes per byte of result
    # The result of an asynchronous start is (operand, result), or ((operands), results) if there are several.
    nested = result.startswith("((")
    arrays = _ARRAY.findall(result[: result.index(")")] if nested else result)
    if nested or (start_suffix and kind in ("all-gather", "collective-permute")):
        arrays, operand_ratio = (arrays if nested else arrays[:1]), 1.0
    arrays = [
        (dtype, int(bits or 8) // 8 * math.prod(int(d) for d in shape.split(",") if d)) for dtype, bits, shape in arrays
    ]
    for dtype in dict.fromkeys(name for name, _ in arrays):
        total = sum(size for name, size in arrays if name == dtype)
        yield Collective(kind, dtype, round(total * operand_ratio), devices)


def _count_devices(attributes: str) -> int:
    """Number of devices in a group of a collective, in any of XLA's notations."""
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return match[1].count(",") + 1
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(match[2])
    if match := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", attributes):
        sizes = dict(re.findall(r"'?([\w]+)'?=(\d+)", match[1]))
        # XLA writes a divided axis as `name:(before)size`.
        parts = re.findall(r"'?(\w+)'?(?::\(\d+\)(\d+))?(?:,|$)", match[2].replace(" ", ""))
        return math.prod(int(part or sizes[name]) for name, part in parts)
    return 1
