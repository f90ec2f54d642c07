"""What a program multiplies: as JAX traced it, and as XLA compiled it."""

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.core.tables import sentence
from fp8jax.modules.compiled import Product as Product
from fp8jax.modules.compiled import read, widened
from fp8jax.ops.choice import Choice, listening, saving, summary
from fp8jax.rewrite.primitives import PRODUCTS


@dataclasses.dataclass(frozen=True)
class Program:
    """The products of a forward and backward pass.

    Attributes:
        backend: what it was compiled for, such as "cpu".
        traced: in the jaxpr.
        compiled: in the optimized program of XLA, its custom calls included.
        choices: the operations of fp8jax that were traced, and what computes each.
        saved: what linears save for the backward pass, each kind once.
    """

    backend: str
    traced: tuple[Product, ...]
    compiled: tuple[Product, ...]
    choices: tuple[tuple[str, Choice], ...] = ()
    saved: tuple[str, ...] = ()

    @property
    def widened(self) -> tuple[str, ...]:
        """What was asked for in 8 bits and runs in more: in what, why, and what helps."""
        return widened(self.compiled, self.choices, self.backend)

    def __str__(self) -> str:
        lines = [f"program of a forward and backward pass, compiled for {self.backend}"]
        for name, products in (("traced", self.traced), ("compiled", self.compiled)):
            lines += [f"  {name:<8}  {p}" for p in products]
        asked = sum(p.executed for p in self.compiled if p.asked)
        done = sum(p.executed for p in self.compiled if p.asked and p.eight_bit)
        lines.append(f"  fp8jax asked for {asked} products, {done} of them run on 8-bit operands")
        lines += [f"  WARNING: {line}" for line in self.widened]
        lines += [f"  saved {line}" for line in self.saved]
        lines += [f"  {line}" for line in summary(self.choices)]
        return "\n".join(sentence(line, indent=4) for line in lines)


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
    with listening() as told, saving() as saved:
        traced = jax.jit(fn).trace(*args)
    written: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    executed: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    for eqn, times in _walk(traced.jaxpr.jaxpr, 1):
        key = (eqn.primitive.name, tuple(str(v.aval.dtype) for v in eqn.invars[:2]))
        written[key] += 1
        executed[key] += times
    products = tuple(Product(*key, n, executed[key]) for key, n in written.items())
    counts = read(traced.lower().compile().as_text() or "")
    return Program(jax.default_backend(), products, counts, tuple(told), tuple(saved))


def _walk(jaxpr: Any, times: int) -> Iterator[tuple[Any, int]]:
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
                    yield from _walk(inner, inner_times)


def split_abstract(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    arrays, rebuild = split(tree)
    return [abstract(x) for x in arrays], rebuild


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def mean_square(outputs: Any) -> jax.Array:
    floats = [y.astype(jnp.float32) for y in jax.tree.leaves(outputs) if jnp.issubdtype(y.dtype, jnp.floating)]
    return sum((jnp.mean(y * y) for y in floats), jnp.float32(0))
