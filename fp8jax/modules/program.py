"""What a program multiplies: as JAX traced it, and as XLA compiled it."""

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.core.tables import sentence
from fp8jax.modules.compiled import Product as Product
from fp8jax.modules.compiled import describe_widened, parse_products
from fp8jax.ops.dispatch.choice import Choice, record_choices, record_residuals, summary
from fp8jax.rewrite.primitives import PRODUCTS


@dataclasses.dataclass(frozen=True)
class Program:
    """The products of a forward and backward pass.

    Attributes:
        backend: what it was compiled for, such as "cpu".
        traced: in the jaxpr.
        compiled: in the optimized program of XLA, its custom calls included.
        choices: the operations of fp8jax that were traced, and what computes each.
        residuals: what linears save for the backward pass, each kind once.
    """

    backend: str
    traced: tuple[Product, ...]
    compiled: tuple[Product, ...]
    choices: tuple[tuple[str, Choice], ...] = ()
    residuals: tuple[str, ...] = ()

    @property
    def widened_lines(self) -> tuple[str, ...]:
        """What was asked for in 8 bits and runs in more: in what, why, and what helps."""
        return describe_widened(self.compiled, self.choices, self.backend)

    def __str__(self) -> str:
        lines = [f"program of a forward and backward pass, compiled for {self.backend}"]
        for name, products in (("traced", self.traced), ("compiled", self.compiled)):
            lines += [f"  {name:<8}  {p}" for p in products]
        num_requested = sum(p.executions for p in self.compiled if p.requested_formats)
        num_8bit = sum(p.executions for p in self.compiled if p.requested_formats and p.is_8bit)
        lines.append(f"  fp8jax asked for {num_requested} products, {num_8bit} of them run on 8-bit operands")
        lines += [f"  WARNING: {line}" for line in self.widened_lines]
        lines += [f"  saved {line}" for line in self.residuals]
        lines += [f"  {line}" for line in summary(self.choices)]
        return "\n".join(sentence(line, indent=4) for line in lines)


def split(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays of a tree, and what puts others in their places; all else stays as it is."""
    leaves, structure = jax.tree.flatten(tree)
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def rebuild(arrays: list[Any]) -> Any:
        remaining = iter(arrays)
        all_leaves = [next(remaining) if a else leaf for leaf, a in zip(leaves, is_array, strict=True)]
        return jax.tree.unflatten(structure, all_leaves)

    return [leaf for leaf, a in zip(leaves, is_array, strict=True) if a], rebuild


def inspect_program(fn: Callable, *args: Any) -> Program:
    """The products of `fn`.

    Args:
        fn: a function of arrays, to be compiled for the default device.
        args: arrays or `jax.ShapeDtypeStruct`, in any structure.
    """
    with record_choices() as choices, record_residuals() as residuals:
        traced = jax.jit(fn).trace(*args)
    occurrences: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    executions: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    for eqn, times in _iter_products(traced.jaxpr.jaxpr, 1):
        key = (eqn.primitive.name, tuple(str(v.aval.dtype) for v in eqn.invars[:2]))
        occurrences[key] += 1
        executions[key] += times
    products = tuple(Product(*key, n, executions[key]) for key, n in occurrences.items())
    compiled_products = parse_products(traced.lower().compile().as_text() or "")
    return Program(jax.default_backend(), products, compiled_products, tuple(choices), tuple(residuals))


def _iter_products(jaxpr: Any, times: int) -> Iterator[tuple[Any, int]]:
    """The products of a jaxpr and how often each runs; loops without a known length count once."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in PRODUCTS:
            yield eqn, times
            continue
        inner_times = times * eqn.params["length"] if name == "scan" else times
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from _iter_products(inner, inner_times)


def split_abstract(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    arrays, rebuild = split(tree)
    return [abstract(x) for x in arrays], rebuild


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def mean_square(outputs: Any) -> jax.Array:
    floats = [y.astype(jnp.float32) for y in jax.tree.leaves(outputs) if jnp.issubdtype(y.dtype, jnp.floating)]
    return sum((jnp.mean(y * y) for y in floats), jnp.float32(0))
