"""What XLA compiled: the products and kernels of a program, read from its text, and which of them lost their 8 bits.

`fp8jax.ops` names its products in the program: `fp8jax:e4m3*e5m2` is one of codes of these formats. XLA keeps such
names through its passes, so that what was asked for can be compared with what became of it.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any

from fp8jax.core.program_text import Line, computations_of, runs_of
from fp8jax.ops.dispatch.choice import Choice

_EIGHT_BITS = re.compile(r"float8\w*|u?int8|f8\w+|[su]8")
_OPERAND = re.compile(r"(?:(?P<type>\w+)\[[^\]]*\]\S* )?%(?P<name>[\w.$-]+)")
_OP_NAME, _TARGET = re.compile(r'op_name="([^"]*)"'), re.compile(r'custom_call_target="([^"]*)"')
_REQUESTED = re.compile(r"fp8jax:(\w+)\*(\w+)")
_PRODUCTS = ("dot", "convolution", "scaled-dot", "ragged-dot", "custom-call")
# XLA's names of dtypes of more than 8 bits.
_WIDE_DTYPES = {"f64": "fp64", "f32": "fp32", "f16": "fp16", "bf16": "bf16", "s32": "int32"}


@dataclasses.dataclass(frozen=True)
class Product:
    """Products of one kind in a program.

    Attributes:
        operation: primitive of JAX; or "dot", "convolution" or the target of a custom call of XLA.
        operands: dtypes of the two operands, in JAX's names or XLA's.
        occurrences: how often it stands in the program.
        executions: how often it runs, where loops have a known length.
        requested_formats: in compiled programs the formats that fp8jax asked to have multiplied, such as "e4m3 x e5m2";
            "" where it is no product of fp8jax.
        kernel: name of a Mosaic or Triton kernel, or "".
    """

    operation: str
    operands: tuple[str, ...]
    occurrences: int
    executions: int
    requested_formats: str = ""
    kernel: str = ""

    @property
    def is_8bit(self) -> bool:
        """Whether both operands have 8 bits."""
        return len(self.operands) == 2 and all(_EIGHT_BITS.fullmatch(name) for name in self.operands)

    @property
    def widened_dtype(self) -> str | None:
        """What a product of two 8-bit operands runs in where it does not run on 8 bits, such as "bf16"; else None."""
        formats = self.requested_formats.split(" x ")
        if not self.requested_formats or self.is_8bit or any(name in ("bf16", "fp16", "fp32") for name in formats):
            return None
        return max((_WIDE_DTYPES.get(name, name) for name in self.operands), key=lambda name: name[-2:])

    def __str__(self) -> str:
        times = (
            f"{self.occurrences}"
            if self.occurrences == self.executions
            else f"{self.occurrences}, run {self.executions} times"
        )
        request_text = f" for {self.requested_formats}" if self.requested_formats else ""
        kernel = f" {self.kernel}" if self.kernel else ""
        return f"{self.operation}{kernel} of {' x '.join(self.operands)}{request_text}: {times}"


def parse_products(text: str) -> tuple[Product, ...]:
    """The products, kernels and other custom calls of a program.

    Args:
        text: of an executable, `jax.jit(f).lower(...).compile().as_text()`.
    """
    computations, entry = computations_of(text)
    occurrences: collections.Counter[tuple[str, tuple[str, ...], str, str]] = collections.Counter()
    executions: collections.Counter[tuple[str, tuple[str, ...], str, str]] = collections.Counter()
    run_counts = runs_of(computations, entry)
    for name, lines in computations.items():
        for key in _products(lines):
            occurrences[key] += 1
            executions[key] += run_counts.get(name, 1)
    return tuple(
        Product(
            operation,
            operands,
            n,
            executions[operation, operands, requested_formats, kernel],
            requested_formats,
            kernel,
        )
        for (operation, operands, requested_formats, kernel), n in occurrences.items()
    )


def _products(lines: Iterable[Line]) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """Operation, operand dtypes, what was asked for, and kernel of each product and custom call."""
    types: dict[str, str] = {}
    for line in lines:
        types[line.name] = line.type.lstrip("(").partition("[")[0]
        if line.op not in _PRODUCTS:
            continue
        operands = list(_OPERAND.finditer(line.args.partition(")")[0]))[:2]
        dtypes = tuple(operand["type"] or types.get(operand["name"], "?") for operand in operands)
        target, op_name = _TARGET.search(line.text), _OP_NAME.search(line.text)
        request = _REQUESTED.search(op_name[1]) if op_name else None
        formats = f"{request[1]} x {request[2]}" if request else ""
        operation = target[1] if target else line.op
        # A Mosaic or Triton kernel has the name of the place that its call stands in.
        is_custom_kernel = any(word in operation for word in ("mosaic", "triton", "xla.gpu.ptx"))
        places = op_name[1].split("/")[:-1] if op_name and is_custom_kernel else []
        # XLA merges what reads other operands than these two, such as scales, into the call.
        is_product = "matmul" in operation or "gemm" in operation or "mosaic" in operation or not target
        yield operation, dtypes, formats if is_product else "", places[-1] if places else ""


def describe_widened(
    products: Iterable[Product], choices: Iterable[tuple[str, Choice]] = (), backend: str = "cuda"
) -> tuple[str, ...]:
    """A line for each kind of product that was asked for in 8 bits and runs in more: in what, why, and what helps.

    Args:
        products: what `parse_products` found.
        choices: what was said of the choices while the program was traced
            (`fp8jax.ops.dispatch.choice.record_choices`).
        backend: what it was compiled for.
    """
    reasons = list(dict.fromkeys(c.reason for name, c in choices if name == "matmul" and c.impl == "xla"))
    counts: dict[tuple[str, str], int] = collections.defaultdict(int)
    for product in products:
        if (wide := product.widened_dtype) is not None:
            counts[product.requested_formats, wide] += product.executions
    lines = []
    for (requested_formats, wide), n in counts.items():
        reason, remedy = _explain_widening(reasons, backend)
        slow = ", slower than bf16" if wide in ("fp32", "fp64") and backend in ("cuda", "gpu") else ""
        lines.append(f"{n} products of {requested_formats} run in {wide}{slow}: {reason}; {remedy}")
    return tuple(lines)


_INT8_ROWS = "int8 codes with scales of tensors or rows are multiplied as they are on every GPU"
_REMEDY_BY_REASON = (
    ("switched off", "trace it without fp8jax.ops.dispatch.choice.target(kernels=False)"),
    ("asked for", "leave impl='xla' out"),
    ("XLA_FLAGS=", "set that before JAX starts"),
    ("no kernel for scales", "scales of tensors, rows, groups of 128 or blocks of 128x128 have kernels"),
    ("int8 kernels take", _INT8_ROWS),
    ("Ampere, Ada or Hopper", _INT8_ROWS),
    ("two int8 operands", "products take two operands of FP8 or two of int8"),
    ("jax >= 0.11", "on this GPU codes save memory, no time"),
)


def _explain_widening(reasons: list[str], backend: str) -> tuple[str, str]:
    """Why products are not of 8 bits, and what helps."""
    if backend not in ("cuda", "gpu"):
        return f"XLA has no such product for {backend}", "the codes save memory there, no time"
    decode_reasons = [reason for reason in reasons if "decoded" in reason]
    if not decode_reasons:
        reason = "XLA did not make cuBLASLt's FP8 product of what was written for it"
        return reason, "set XLA_FLAGS=--xla_gpu_enable_triton_gemm=false before JAX starts"
    text = " and ".join(decode_reasons)
    return text, next(
        (remedy for sign, remedy in _REMEDY_BY_REASON if sign in text), "see fp8jax.ops.matmul.matmul.matmul"
    )


def describe(compiled: Any, choices: Iterable[tuple[str, Choice]] = (), backend: str = "cuda") -> list[str]:
    """Lines on an executable, for a log: its products and kernels, and those that lost their 8 bits, with the remedy.

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` gives.
        choices, backend: as of `describe_widened`.
    """
    products = parse_products(compiled.as_text() or "")
    lines = [f"compiled: {product}" for product in sorted(products, key=lambda p: -p.executions)]
    return [*lines, *(f"WARNING: {line}" for line in describe_widened(products, choices, backend))]
