"""Products and kernels of a program as JAX traced it and as XLA compiled it, and those that run in more bits.

`fp8jax.ops` names its products in the program: `fp8jax:e4m3*e5m2` multiplies codes of these formats. XLA keeps names.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from fp8jax.core.program_text import Line, computations_of, runs_of
from fp8jax.core.tables import sentence
from fp8jax.ops.dispatch.choice import Choice, record_choices, record_residuals, summary
from fp8jax.rewrite.primitives import PRODUCTS

_CODE_DTYPES = re.compile(r"float[48]\w*|u?int8|f[48]\w+|[su]8")
_OPERAND = re.compile(r"(?:(?P<type>\w+)\[[^\]]*\]\S* )?%(?P<name>[\w.$-]+)")
_OP_NAME, _TARGET = re.compile(r'op_name="([^"]*)"'), re.compile(r'custom_call_target="([^"]*)"')
_REQUESTED = re.compile(r"fp8jax:(\w+)\*(\w+)")
_XLA_PRODUCTS = ("dot", "convolution", "scaled-dot", "ragged-dot", "custom-call")
# XLA's names of dtypes of more than 8 bits.
_WIDE_DTYPES = {"f64": "fp64", "f32": "fp32", "f16": "fp16", "bf16": "bf16", "s32": "int32"}


@dataclasses.dataclass(frozen=True)
class Product:
    """Products of one kind in a program.

    Attributes:
        operation: a primitive of JAX; or "dot", "convolution" or the target of a custom call of XLA.
        operands: dtypes of the two operands, by JAX's names or XLA's.
        occurrences: how often it stands in the program.
        executions: how often it runs; loops of unknown length count once.
        requested_formats: in compiled programs the formats that fp8jax requested, such as "e4m3 x e5m2"; "" if it is
            not a product of fp8jax.
        kernel: name of a Mosaic or Triton kernel, or "".
    """

    operation: str
    operands: tuple[str, ...]
    occurrences: int
    executions: int
    requested_formats: str = ""
    kernel: str = ""

    @property
    def has_codes(self) -> bool:
        """Whether both operands have 8 or 4 bits."""
        return len(self.operands) == 2 and all(_CODE_DTYPES.fullmatch(name) for name in self.operands)

    @property
    def widened_dtype(self) -> str | None:
        """The wider dtype in which a product of codes runs, such as "bf16"; None if it is not widened."""
        formats = self.requested_formats.split(" x ")
        if not self.requested_formats or self.has_codes or any(name in ("bf16", "fp16", "fp32") for name in formats):
            return None
        return max((_WIDE_DTYPES.get(name, name) for name in self.operands), key=lambda name: name[-2:])

    def __str__(self) -> str:
        runs = "" if self.occurrences == self.executions else f", run {self.executions} times"
        request_text = f" for {self.requested_formats}" if self.requested_formats else ""
        kernel = f" {self.kernel}" if self.kernel else ""
        return f"{self.operation}{kernel} of {' x '.join(self.operands)}{request_text}: {self.occurrences}{runs}"


@dataclasses.dataclass(frozen=True)
class Program:
    """The products of a forward and backward pass.

    Attributes:
        backend: what it was compiled for, such as "cpu".
        traced: in the jaxpr.
        compiled: in the optimized program of XLA, with its custom calls.
        choices: the traced operations of fp8jax and their implementations.
        residuals: what linear layers save for the backward pass, each kind once.
    """

    backend: str
    traced: tuple[Product, ...]
    compiled: tuple[Product, ...]
    choices: tuple[tuple[str, Choice], ...] = ()
    residuals: tuple[str, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line for each kind of product that was requested in 8 or 4 bits and runs in more."""
        return describe_widened(self.compiled, self.choices, self.backend)

    def __str__(self) -> str:
        lines = [f"program of a forward and backward pass, compiled for {self.backend}"]
        for name, products in (("traced", self.traced), ("compiled", self.compiled)):
            lines += [f"  {name:<8}  {p}" for p in products]
        num_requested = sum(p.executions for p in self.compiled if p.requested_formats)
        num_codes = sum(p.executions for p in self.compiled if p.requested_formats and p.has_codes)
        lines.append(f"  fp8jax asked for {num_requested} products, {num_codes} of them multiply codes of 8 or 4 bits")
        lines += [f"  WARNING: {line}" for line in self.warnings]
        lines += [f"  saved {line}" for line in self.residuals]
        lines += [f"  {line}" for line in summary(self.choices)]
        return "\n".join(sentence(line, indent=4) for line in lines)


def inspect_program(fn: Callable, *args: Any) -> Program:
    """The products of a function, compiled for the default device."""
    with record_choices() as choices, record_residuals() as residuals:
        traced = jax.jit(fn).trace(*args)
    products = _count_products(
        ((eqn.primitive.name, tuple(str(v.aval.dtype) for v in eqn.invars[:2]), "", ""), runs)
        for eqn, runs in _iter_products(traced.jaxpr.jaxpr, 1)
    )
    compiled = parse_products(traced.lower().compile().as_text() or "")
    return Program(jax.default_backend(), products, compiled, tuple(choices), tuple(residuals))


def _iter_products(jaxpr: Any, runs: int) -> Iterator[tuple[Any, int]]:
    """The products of a jaxpr and how often each runs; loops of unknown length count once."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in PRODUCTS:
            yield eqn, runs
            continue
        inner_runs = runs * eqn.params["length"] if name == "scan" else runs
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from _iter_products(inner, inner_runs)


# Operation, operand dtypes, requested formats, kernel.
_ProductKind = tuple[str, tuple[str, ...], str, str]


def _count_products(kinds_and_runs: Iterable[tuple[_ProductKind, int]]) -> tuple[Product, ...]:
    """A product for each kind, of occurrences with the number of runs of each."""
    occurrences: collections.Counter[_ProductKind] = collections.Counter()
    executions: collections.Counter[_ProductKind] = collections.Counter()
    for kind, runs in kinds_and_runs:
        occurrences[kind] += 1
        executions[kind] += runs
    return tuple(Product(*kind[:2], n, executions[kind], *kind[2:]) for kind, n in occurrences.items())


def parse_products(text: str) -> tuple[Product, ...]:
    """The products, kernels and other custom calls of a compiled program.

    Args:
        text: of an executable, `jax.jit(f).lower(...).compile().as_text()`.
    """
    computations, entry = computations_of(text)
    run_counts = runs_of(computations, entry)
    return _count_products(
        (kind, run_counts.get(name, 1)) for name, lines in computations.items() for kind in _parse_kinds(lines)
    )


def _parse_kinds(lines: Iterable[Line]) -> Iterator[_ProductKind]:
    """The kind of each product and custom call in a computation."""
    types: dict[str, str] = {}
    for line in lines:
        types[line.name] = line.type.lstrip("(").partition("[")[0]
        if line.op not in _XLA_PRODUCTS:
            continue
        operands = list(_OPERAND.finditer(line.args.partition(")")[0]))[:2]
        dtypes = tuple(operand["type"] or types.get(operand["name"], "?") for operand in operands)
        target, op_name = _TARGET.search(line.text), _OP_NAME.search(line.text)
        request = _REQUESTED.search(op_name[1]) if op_name else None
        formats = f"{request[1]} x {request[2]}" if request else ""
        operation = target[1] if target else line.op
        # A Mosaic or Triton kernel has the name of the scope around its call.
        is_custom_kernel = any(word in operation for word in ("mosaic", "triton", "xla.gpu.ptx"))
        scopes = op_name[1].split("/")[:-1] if op_name and is_custom_kernel else []
        # XLA merges what reads other operands than these two, such as scales, into the call.
        is_product = not target or any(word in operation for word in ("matmul", "gemm", "mosaic", "blockScaledDot"))
        yield operation, dtypes, formats if is_product else "", scopes[-1] if scopes else ""


def describe_widened(
    products: Iterable[Product], choices: Iterable[tuple[str, Choice]] = (), backend: str = "cuda"
) -> tuple[str, ...]:
    """A line for each kind of product of codes that runs in more bits: the dtype, why, and the remedy.

    Args:
        choices: recorded while the program was traced (`fp8jax.ops.dispatch.choice.record_choices`).
    """
    is_wide = lambda choice: choice.impl == "xla" or "decoded" in choice.reason  # noqa: E731
    reasons = list(dict.fromkeys(c.reason for name, c in choices if "matmul" in name and is_wide(c)))
    counts: dict[tuple[str, str], int] = collections.defaultdict(int)
    for product in products:
        if (dtype := product.widened_dtype) is not None:
            counts[product.requested_formats, dtype] += product.executions
    reason, remedy = _explain_widening(reasons, backend)
    lines = []
    for (requested_formats, dtype), n in counts.items():
        warning = ", slower than bf16" if dtype in ("fp32", "fp64") and backend in ("cuda", "gpu") else ""
        lines.append(f"{n} products of {requested_formats} run in {dtype}{warning}: {reason}; {remedy}")
    return tuple(lines)


_INT8_ROWS = "int8 codes with scales of tensors or rows are multiplied as they are on every GPU"
_REMEDY_BY_REASON = (
    ("switched off", "trace it without fp8jax.ops.dispatch.choice.target(kernels=False)"),
    ("asked for", "leave impl='xla' out"),
    ("XLA_FLAGS=", "set that before JAX starts"),
    ("needs a Blackwell GPU", "fp8jax.recipes.for_device() is a recipe for this GPU"),
    ("no kernel for scales", "scales of tensors, rows, groups of 128 or blocks of 128x128 have kernels"),
    ("int8 kernels take", _INT8_ROWS),
    ("Ampere, Ada or Hopper", _INT8_ROWS),
    ("two int8 operands", "products need two FP8 or two int8 operands"),
    ("jax >= 0.11", "on this GPU codes save memory, no time"),
)


def _explain_widening(reasons: list[str], backend: str) -> tuple[str, str]:
    """Why products run in more bits than their codes, and the remedy."""
    if backend not in ("cuda", "gpu"):
        return f"XLA has no such product for {backend}", "the codes save memory there, no time"
    decode_reasons = [reason for reason in reasons if "decoded" in reason]
    if not decode_reasons:
        reason = "XLA did not match the pattern of cuBLASLt's FP8 matmul"
        return reason, "set XLA_FLAGS=--xla_gpu_enable_triton_gemm=false before JAX starts"
    text = " and ".join(decode_reasons)
    return text, next(
        (remedy for sign, remedy in _REMEDY_BY_REASON if sign in text), "see fp8jax.ops.matmul.matmul.matmul"
    )


def describe(compiled: Any, choices: Iterable[tuple[str, Choice]] = (), backend: str = "cuda") -> list[str]:
    """Lines on an executable, for a log: its products and kernels, and those that run in more bits, with the remedy.

    Args:
        compiled: `jax.jit(f).lower(...).compile()`.
        choices, backend: as in `describe_widened`.
    """
    products = parse_products(compiled.as_text() or "")
    lines = [f"compiled: {product}" for product in sorted(products, key=lambda p: -p.executions)]
    return [*lines, *(f"WARNING: {line}" for line in describe_widened(products, choices, backend))]
