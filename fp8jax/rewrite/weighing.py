"""Which products of an array gain time in 8 bits, and what is told of it.

Where a recipe asks for it (`fp8jax.recipes.for_shapes`) those that lose are left in 16 bits; of others it is told.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from fp8jax.ops import gains
from fp8jax.ops.choice import on_cuda, target
from fp8jax.rewrite import activations, biases, norms
from fp8jax.rewrite.entries import Entry, ReadWeight
from fp8jax.rewrite.graph import Node, Value
from fp8jax.rewrite.operations import ActivationOperation, NormOperation
from fp8jax.rewrite.rules import LayerChoice, between


class _Weighed(NamedTuple):
    """Products that read one array, what each gains, what its codes cost them, and which are best in 8 bits, by rates
    of a device."""

    products: list[ReadWeight]
    each: list[float]
    codes: float
    best: tuple[int, ...]
    tokens: int
    rates: str


_HOPPER = 90  # what an H100 computes with


def choose(value: Value, group: Sequence[ReadWeight], entries: dict[Node, Entry], alone: Mapping[Value, Node]) -> bool:
    """Leaves those products of a value in 16 bits that lose time in 8, where the recipe asks for that.

    Args:
        value: what made the array that they read.
        group: the products.
        entries: of the plan; those of what is left, or of which nothing is known, are changed.
        alone: the only readers of values.

    Returns:
        Whether the recipe of any asks for it.
    """
    asked = [p for p in group if p.choice.linear is not None and p.choice.linear.select == "gains"]
    for p in asked:
        if not p.taken:
            reason = f"{p.choice.reason} has no 8-bit products for this device"
            entries[p.node] = entries[p.node]._replace(reason=reason)
    asked = [p for p in asked if p.taken]
    if not asked:
        return False
    known = _weigh(asked, alone, _made_by(value, asked[0]), any(p.taken and p not in asked for p in group))
    for p in asked if known is None else ():
        entries[p.node] = entries[p.node]._replace(reason=f"{p.choice.reason}; what it gains is not known")
    if known is None:
        return True
    for i, p in enumerate(asked):
        if i in known.best:
            gained = _told(known, known.best, i)
            entries[p.node] = entries[p.node]._replace(reason=f"{p.choice.reason}; gains about {gained}")
            continue
        together = range(len(asked)) if not known.best else (i,)
        reason = f"gains nothing at {known.tokens:,} tokens: {_told(known, together, i)} slower in 8 bits"
        p.choice = LayerChoice(None, reason)
        entries[p.node] = entries[p.node]._replace(reason=reason, choice=p.choice, rates=known.rates)
    return True


def tell(value: Value, group: Sequence[ReadWeight], entries: dict[Node, Entry], alone: Mapping[Value, Node]) -> None:
    """Notes what the products of a value gain that are taken, and which of them would be better left."""
    taken = [p for p in group if p.taken]
    known = _weigh(taken, alone, _made_by(value, taken[0]), False) if taken else None
    if known is None:
        return
    for i, (p, seconds) in enumerate(zip(taken, known.each, strict=True)):
        gain, loses = seconds - known.codes / len(taken), i not in known.best
        entry = entries[p.node]._replace(gain=gain, loses=loses, rates=known.rates)
        times = math.prod(node.eqn.params["length"] for node, _ in p.around if node.kind == "scan")
        entries[p.node] = entry._replace(tokens=known.tokens, times=times)


def _made_by(value: Value, reader: ReadWeight) -> str:
    """What makes the codes that a product reads, on a GPU: a "norm", an "activation", or ""."""
    if value.node is None:
        return ""
    if value.node.operation is not None:
        kinds = {NormOperation: "norm", ActivationOperation: "activation"}
        return kinds.get(type(value.node.operation), "")
    with contextlib.nullcontext() if on_cuda() else target(capability=_HOPPER):
        if not between(reader.choice.recipe):
            return ""
    if norms.find(value) is not None:
        return "norm"
    return "activation" if activations.find(value) is not None else ""


def _weigh(products: list[ReadWeight], alone: Mapping[Value, Node], made: str, others: bool) -> _Weighed | None:
    """What products of one array gain; None where that is not known of one. `others` make its codes in any case."""
    (rates, assumed), each = gains.of_device(), list[float]()
    tokens = inputs = 1
    for p in products:
        if p.node.kind != "dot_general" or p.choice.linear is None:
            return None
        contract, batch = p.node.eqn.params["dimension_numbers"]
        if batch[0]:
            return None
        data, weight = _shape_here(p.data), _shape_here(p.node.operands[p.side])
        if not all(isinstance(n, int) for n in data):  # a symbol, in a program for batches of any size
            return None
        inputs = math.prod(data[i] for i in contract[1 - p.side])
        tokens = max(math.prod(data) // max(inputs, 1) // _devices(), 1)
        biased = p.side == 1 and biases.find(p.node, len(weight) - len(contract[1]), alone.get(p.node.results[0]))
        shape = tokens, inputs, math.prod(weight) // max(inputs, 1)
        seconds = gains.gain(*shape, p.choice.linear, rates, biased=bool(biased))
        if seconds is None:
            return None
        each.append(seconds)
    linear = products[0].choice.linear
    assert linear is not None
    codes = 0.0 if others else gains.codes(tokens, inputs, linear, rates, made=made)
    best = gains.best(each, codes, gains.beside(tokens, inputs, rates, made=made))
    device = f"an {rates.device}{', assumed here' if assumed else ''}"
    return _Weighed(products, each, codes, best, tokens, device)


def _told(known: _Weighed, together: Sequence[int], of: int) -> str:
    """The time that products gain or lose together, and with which others one does."""
    seconds = sum(known.each[i] for i in together) - known.codes
    others = ", ".join(dict.fromkeys(known.products[i].path for i in together if i != of))
    return f"{abs(1e6 * seconds):,.0f} us{f' with {others}' if others else ''}"


def _shape_here(value: Value) -> tuple[int, ...]:
    """The shape of a device's part of an array, as far as its type says how it is cut."""
    sharding = getattr(value.aval, "sharding", None)
    if sharding is None or not sharding.mesh.explicit_axes:
        return value.shape
    return tuple(sharding.shard_shape(value.shape))


def _devices() -> int:
    """Over how many devices an automatic mesh that is set cuts a program."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in mesh.auto_axes) if not mesh.empty else 1
