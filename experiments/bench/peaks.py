"""The minimum time of the kernels of a compiled program, at the peak rates of an H100's or H200's data sheet.

Matmuls count by FLOPs, other kernels by bytes of operands and results, each array once per kernel. Attention is left
out, because the program's text lacks its FLOPs. Kernels that run conditionally ("requantize") or read a sample
("compute_amaxes") are left out, too.
"""

import collections
import math
import re

from fp8jax.core.program_text import Line, computations_of, runs_of

EIGHT, SIXTEEN, OURS, XLA = "8-bit products", "16-bit products", "our passes", "XLA's passes"
FLOPS = {EIGHT: 1979e12, SIXTEEN: 989.5e12}  # per second, dense
_ARRAY = re.compile(r"\b(pred|bf16|f8|[fsu](?=\d))(?:e\w+)?(\d*)\[([\d,]*)\]")
_TARGET, _OP_NAME = re.compile(r'custom_call_target="([^"]*)"'), re.compile(r'op_name="([^"]*)"')
_NAMES, _CALLS = re.compile(r"%([\w.$-]+)"), re.compile(r"calls=%?([\w.$-]+)")
_SELDOM = ("requantize", "compute_amaxes")
_PASSES = ("fusion", "copy", "convert", "reduce", "scatter", "gather", "transpose", "concatenate", "sort")


def bandwidth(device_kind: str) -> float:
    """Returns the bytes per second of a GPU's memory."""
    return 4.8e12 if "H200" in device_kind else 3.35e12


def least(text: str, bytes_per_second: float) -> dict[str, float]:
    """Returns seconds per run of each kind of kernel.

    Args:
        text: text of an executable, `jax.jit(f).lower(...).compile().as_text()`.
        bytes_per_second: the GPU's memory bandwidth.
    """
    computations, entry = computations_of(text)
    runs, spent = runs_of(computations, entry), dict.fromkeys((EIGHT, SIXTEEN, OURS, XLA), 0.0)
    fused = {name for lines in computations.values() for line in lines if line.op == "fusion"
             for name in _CALLS.findall(line.args)}  # fmt: skip
    wrapped_kernels = {name for name in fused if any(line.op == "custom-call" for line in computations[name])}
    for name, lines in computations.items():
        types = collections.defaultdict(str, {line.name: line.type for line in lines})
        for line in lines:
            if line.op == "custom-call":
                kind, seconds = _of_call(line, types, bytes_per_second)
            elif name in fused or line.op not in _PASSES or wrapped_kernels.intersection(_CALLS.findall(line.args)):
                continue  # instructions inside a fusion move no memory, except for a wrapped kernel
            else:
                kind, seconds = XLA, _moved(line, types) / bytes_per_second
            if kind is not None:
                spent[kind] += runs[name] * seconds
    return spent


def _of_call(line: Line, types: dict[str, str], bytes_per_second: float) -> tuple[str | None, float]:
    target, op_name = _TARGET.search(line.text), _OP_NAME.search(line.text)
    called = target[1] if target else ""
    if "matmul" in called or "gemm" in called or "mosaic" in called:
        (a, bits), (b, _) = (_arrays(types[name])[0] for name in _operands(line)[:2])
        result, _ = _arrays(line.type)[0]
        kind, batch_size = EIGHT if bits == 8 else SIXTEEN, math.prod(result[:-2])  # batch
        summed = math.sqrt(math.prod(a) * math.prod(b) / max(math.prod(result) * batch_size, 1))
        return kind, 2 * math.prod(result) * summed / FLOPS[kind]
    if "triton" not in called and "xla.gpu.ptx" not in called:
        return None, 0.0
    kernel = op_name[1].split("/")[-2] if op_name and "/" in op_name[1] else ""
    return (None, 0.0) if kernel in _SELDOM else (OURS, _moved(line, types) / bytes_per_second)


def _operands(line: Line) -> list[str]:
    return list(dict.fromkeys(_NAMES.findall(line.args.partition("), ")[0])))


def _moved(line: Line, types: dict[str, str]) -> float:
    """Returns bytes of the operands and results of an instruction."""
    types_ = (line.type, *(types[name] for name in _operands(line)))
    return sum(math.prod(shape) * bits / 8 for each in types_ for shape, bits in _arrays(each))


def _arrays(type_: str) -> list[tuple[tuple[int, ...], int]]:
    """Returns the shape of each array of a type, and its bits per element."""
    bits_by_prefix = {"pred": 8, "f8": 8, "bf16": 16}
    return [(tuple(int(n) for n in shape.split(",") if n), bits_by_prefix.get(kind) or int(bits))
            for kind, bits, shape in _ARRAY.findall(type_)]  # fmt: skip
