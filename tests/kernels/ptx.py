"""Runs the inline assembly of Triton kernels on NumPy arrays, so that Triton's interpreter runs the text of the GPU.

Instructions follow the PTX ISA 8.7, section 9.7. Approximate ones are exact here, with the zeros, Inf and NaN of the
ISA's tables. A register is an array of uint32, an address one of uint64.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from triton._C.libtriton import interpreter as memory

Array = np.ndarray
_TINY = np.finfo(np.float32).tiny
_NAN = np.uint32(0x7FFFFFFF)


def _number(x: Array) -> Array:
    return x.view(np.float32)


def _flushed(x: Array) -> Array:
    """fp32 with signed zeros instead of subnormal numbers."""
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x)


def register(x: Array) -> Array:
    """The bits of fp32; NaN has the bits of the hardware."""
    x = np.asarray(x, np.float32)
    return np.where(np.isnan(x), _NAN, x.view(np.uint32))


def _approximate(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    def run(a: Array) -> Array:
        return register(_flushed(function(_flushed(_number(a)).astype(np.float64)).astype(np.float32)))

    return run


def fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in fp32. The product is exact in fp64; the sum is rounded to fp64 and then to fp32."""
    with np.errstate(all="ignore"):
        return (a.astype(np.float64) * b + c).astype(np.float32)


def _multiply_add(a: Array, b: Array, c: Array) -> Array:
    return register(_flushed(fused(*(_flushed(_number(x)) for x in (a, b, c)))))


def _sum_down(a: Array, b: Array) -> Array:
    """a + b, rounded down, by the exact error of the fp64 sum."""
    x, y = (_number(part).astype(np.float64) for part in (a, b))
    total = x + y
    error = (x - (total - (total - x))) + (y - (total - x))
    rounded = total.astype(np.float32)
    high = (rounded > total) | ((rounded == total) & (error < 0))
    return register(np.where(high, np.nextafter(rounded, np.float32(-np.inf)), rounded))


def _smaller(a: Array, b: Array) -> Array:
    """fmin returns the number if the other operand is NaN, like min without .NaN."""
    return register(np.fmin(*(np.abs(_number(x)) for x in (a, b)))) | ((a ^ b) & 0x80000000)


def _halves(x: Array) -> tuple[Array, Array]:
    return _number(x << 16), _number(x & 0xFFFF0000)


def _pair(low: Array, high: Array) -> Array:
    low, high = (
        np.where(np.isnan(x), 0x7FFF, x.astype(ml_dtypes.bfloat16).view(np.uint16)).astype(np.uint32)
        for x in (low, high)
    )
    return high << 16 | low


def _multiply_add_pairs(a: Array, b: Array, c: Array) -> Array:
    return _pair(*(fused(*numbers) for numbers in zip(*map(_halves, (a, b, c)), strict=True)))


def _lookup_table(a: Array, b: Array, c: Array, table: Array) -> Array:
    """Returns bit 4 * a + 2 * b + c of a table, for each bit of three words."""
    y = np.zeros_like(a)
    for i in range(8):
        if int(table) >> i & 1:
            x = [word if i & place else ~word for word, place in ((a, 4), (b, 2), (c, 1))]
            y |= x[0] & x[1] & x[2]
    return y


def _permuted(a: Array, b: Array, selector: Array) -> Array:
    """Selects four of eight bytes. The high bit of a selector replicates the byte's sign."""
    both = b.astype(np.uint64) << np.uint64(32) | a
    y = np.zeros_like(a)
    for i in range(4):
        four = selector >> np.uint32(4 * i) & 0xF
        byte = (both >> (four & 7).astype(np.uint64) * np.uint64(8) & np.uint64(0xFF)).astype(np.uint32)
        y = y | np.where(four & 8, np.where(byte & 0x80, 0xFF, 0), byte).astype(np.uint32) << np.uint32(8 * i)
    return y


def _dot_of_halves(a: Array, b: Array, c: Array) -> Array:
    """Returns the dot product of the two halves of a word and the two lower bytes of another, plus a third."""
    return c + (a & 0xFFFF) * (b & 0xFF) + (a >> 16) * (b >> 8 & 0xFF)


def _field(a: Array, start: Array, length: Array) -> Array:
    return a >> start & ((np.uint32(1) << length) - np.uint32(1))


def _wide(a: Array, b: Array, c: Array) -> Array:
    return a.astype(np.uint64) * b.astype(np.uint64) + c


def _loaded(address: Array) -> Array:
    at = np.ascontiguousarray(address)
    return memory.load(at, np.ones(at.shape, bool), np.zeros(at.shape, np.uint32), np.dtype(np.uint32))


def _loaded_four(address: Array) -> list[Array]:
    if (address % np.uint64(16)).any():
        raise ValueError(f"four numbers at {address}, which is not aligned")
    return [_loaded(address + np.uint64(4 * i)) for i in range(4)]


_INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "abs.f32": lambda a: a & 0x7FFFFFFF,
    "lg2.approx.ftz.f32": _approximate(np.log2),
    "ex2.approx.ftz.f32": _approximate(np.exp2),
    "rcp.approx.ftz.f32": _approximate(lambda x: 1 / x),
    "rsqrt.approx.ftz.f32": _approximate(lambda x: 1 / np.sqrt(x)),
    "sqrt.approx.ftz.f32": _approximate(np.sqrt),
    "min.xorsign.abs.f32": _smaller,
    "fma.rn.ftz.f32": _multiply_add,
    "fma.rn.bf16x2": _multiply_add_pairs,
    "cvt.rn.bf16x2.f32": lambda a, b: _pair(_number(b), _number(a)),
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "add.rm.f32": _sum_down,
    "add.s32": lambda a, b: a + b,
    "lop3.b32": _lookup_table,
    "prmt.b32": _permuted,
    "bfe.u32": _field,
    "dp2a.lo.u32.u32": _dot_of_halves,
    "mad.wide.u32": _wide,
    "ld.global.nc.f32": _loaded,
    "ld.global.v4.f32": _loaded_four,
}


@functools.cache
def _program(text: str) -> list[tuple[Callable[..., Any], list[str], list[str]]]:
    """Parses instructions, with the names that they write and read."""
    statements = [statement.strip() for statement in re.sub(r"(?m)^\s*\{|\}\s*$|^\{", "", text).split(";")]
    results = []
    for statement in statements:
        if not statement or statement.startswith(".reg"):
            continue
        name, rest = statement.split(maxsplit=1)
        parts = [part.strip() for part in re.findall(r"\{[^}]*\}|[^,]+", rest) if part.strip()]
        to = [part.strip() for part in parts[0].strip("{}").split(",")]
        results.append((_INSTRUCTIONS[name], to, [part.strip("[]") for part in parts[1:]]))
    return results


def run(text: str, constraints: str, values: list[Array], dtypes: list[Any], pack: int) -> list[Array]:
    """Returns the results of an elementwise call, in the shape of the values, `pack` neighbours at a time."""
    shape, count, kinds = values[0].shape, values[0].size, constraints.split(",")
    registers: dict[str, Array] = {}
    outputs = sum(kind.startswith("=") for kind in kinds)
    place = outputs
    for value in values:
        flat = np.ascontiguousarray(value).reshape(-1)
        flat = np.concatenate([flat, np.zeros(-count % pack, flat.dtype)])
        words = flat.view(np.uint64 if flat.itemsize == 8 else np.uint32)
        words = words.reshape(-1, pack * flat.itemsize // words.itemsize)
        parts = [np.ascontiguousarray(words[:, i]) for i in range(words.shape[1])]
        for part in parts:
            if (part.itemsize == 8) != (kinds[place] == "l"):
                raise ValueError(f"operand {place} of {text!r} is no {kinds[place]!r}")
            registers[f"${place}"], place = part, place + 1
    if place != len(kinds):
        raise ValueError(f"{text!r} has {len(kinds)} operands, not {place}")
    with np.errstate(all="ignore"):
        for instruction, to, operands in _program(text):
            result = instruction(*(registers[x] if x in registers else np.uint32(int(x, 0)) for x in operands))
            registers.update(zip(to, result if isinstance(result, list) else [result], strict=True))
    results, place = [], 0
    words = -(-count // pack)
    for dtype in map(np.dtype, dtypes):
        number = pack * dtype.itemsize // 4
        parts = [np.broadcast_to(registers[f"${place + i}"].astype(np.uint32), (words,)) for i in range(number)]
        results.append(np.stack(parts, -1).reshape(-1).view(dtype)[:count].reshape(shape))
        place += number
    if place != outputs:
        raise ValueError(f"{text!r} has {outputs} results, not {place}")
    return results
