"""Which products of an array gain time in 8 bits, and what is told of it.

Where a recipe asks for it (`fp8jax.recipes.for_shapes`) those that lose are left in 16 bits; of others it is told.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from fp8jax.ops.dispatch.choice import on_cuda, target
from fp8jax.ops.products import cost_model
from fp8jax.rewrite import activations, biases, norms
from fp8jax.rewrite.entries import PlanEntry, WeightMatmul
from fp8jax.rewrite.graph import Node, Value
from fp8jax.rewrite.operations import ActivationOperation, NormOperation
from fp8jax.rewrite.rules import LayerChoice, rewrites_nonlinear


class _GroupGains(NamedTuple):
    """Products that read one array, what each gains, what its codes cost them, and which are best in 8 bits, by rates
    of a device."""

    products: list[WeightMatmul]
    seconds: list[float]
    codes_seconds: float
    best: tuple[int, ...]
    tokens: int
    rates_device: str


_HOPPER_CAPABILITY = 90  # what an H100 computes with


def drop_unprofitable(
    value: Value, group: Sequence[WeightMatmul], entries: dict[Node, PlanEntry], sole_readers: Mapping[Value, Node]
) -> bool:
    """Leaves those products of a value in 16 bits that lose time in 8, where the recipe asks for that.

    Args:
        value: what made the array that they read.
        group: the products.
        entries: of the plan; those of what is left, or of which nothing is known, are changed.
        sole_readers: the only readers of values.

    Returns:
        Whether the recipe of any asks for it.
    """
    cost_selected = [p for p in group if p.choice.linear is not None and p.choice.linear.skip_unprofitable]
    for p in cost_selected:
        if not p.is_quantized:
            reason = f"{p.choice.reason} has no 8-bit products for this device"
            entries[p.node] = entries[p.node]._replace(reason=reason)
    cost_selected = [p for p in cost_selected if p.is_quantized]
    if not cost_selected:
        return False
    group_gains = _estimate_gains(
        cost_selected,
        sole_readers,
        _producer_kind(value, cost_selected[0]),
        any(p.is_quantized and p not in cost_selected for p in group),
    )
    for p in cost_selected if group_gains is None else ():
        entries[p.node] = entries[p.node]._replace(reason=f"{p.choice.reason}; what it gains is not known")
    if group_gains is None:
        return True
    for i, p in enumerate(cost_selected):
        if i in group_gains.best:
            note = _gain_note(group_gains, group_gains.best, i)
            entries[p.node] = entries[p.node]._replace(reason=f"{p.choice.reason}; gains about {note}")
            continue
        products = range(len(cost_selected)) if not group_gains.best else (i,)
        reason = (
            f"gains nothing at {group_gains.tokens:,} tokens: {_gain_note(group_gains, products, i)} slower in 8 bits"
        )
        p.choice = LayerChoice(None, reason)
        entries[p.node] = entries[p.node]._replace(
            reason=reason, choice=p.choice, rates_device=group_gains.rates_device
        )
    return True


def annotate_gains(
    value: Value, group: Sequence[WeightMatmul], entries: dict[Node, PlanEntry], sole_readers: Mapping[Value, Node]
) -> None:
    """Notes what the products of a value gain that are taken, and which of them would be better left."""
    quantized = [p for p in group if p.is_quantized]
    group_gains = (
        _estimate_gains(quantized, sole_readers, _producer_kind(value, quantized[0]), False) if quantized else None
    )
    if group_gains is None:
        return
    for i, (p, seconds) in enumerate(zip(quantized, group_gains.seconds, strict=True)):
        gain, is_slower = seconds - group_gains.codes_seconds / len(quantized), i not in group_gains.best
        entry = entries[p.node]._replace(gain=gain, is_slower=is_slower, rates_device=group_gains.rates_device)
        runs_per_step = math.prod(node.eqn.params["length"] for node, _ in p.enclosing if node.kind == "scan")
        entries[p.node] = entry._replace(tokens=group_gains.tokens, runs_per_step=runs_per_step)


def _producer_kind(value: Value, reader: WeightMatmul) -> str:
    """What makes the codes that a product reads, on a GPU: a "norm", an "activation", or ""."""
    if value.node is None:
        return ""
    if value.node.operation is not None:
        kinds = {NormOperation: "norm", ActivationOperation: "activation"}
        return kinds.get(type(value.node.operation), "")
    with contextlib.nullcontext() if on_cuda() else target(capability=_HOPPER_CAPABILITY):
        if not rewrites_nonlinear(reader.choice.recipe):
            return ""
    if norms.find(value) is not None:
        return "norm"
    return "activation" if activations.find(value) is not None else ""


def _estimate_gains(
    products: list[WeightMatmul], sole_readers: Mapping[Value, Node], producer: str, has_shared_codes: bool
) -> _GroupGains | None:
    """What products of one array gain; None where that is not known of one.

    `has_shared_codes` says that others make its codes in any case.
    """
    (rates, is_assumed), all_seconds = cost_model.current_rates(), list[float]()
    tokens = inputs = 1
    for p in products:
        if p.node.kind != "dot_general" or p.choice.linear is None:
            return None
        contract, batch = p.node.eqn.params["dimension_numbers"]
        if batch[0]:
            return None
        data, weight = _local_shape(p.data), _local_shape(p.node.operands[p.side])
        if not all(isinstance(n, int) for n in data):  # a symbol, in a program for batches of any size
            return None
        inputs = math.prod(data[i] for i in contract[1 - p.side])
        tokens = max(math.prod(data) // max(inputs, 1) // _num_mesh_devices(), 1)
        has_bias = p.side == 1 and biases.find(
            p.node, len(weight) - len(contract[1]), sole_readers.get(p.node.results[0])
        )
        shape = tokens, inputs, math.prod(weight) // max(inputs, 1)
        seconds = cost_model.estimate_gain(*shape, p.choice.linear, rates, has_bias=bool(has_bias))
        if seconds is None:
            return None
        all_seconds.append(seconds)
    linear = products[0].choice.linear
    assert linear is not None
    codes_seconds = (
        0.0 if has_shared_codes else cost_model.quantization_cost(tokens, inputs, linear, rates, producer=producer)
    )
    best = cost_model.select_layers(
        all_seconds, codes_seconds, cost_model.copy_cost(tokens, inputs, rates, producer=producer)
    )
    device = f"an {rates.device}{', assumed here' if is_assumed else ''}"
    return _GroupGains(products, all_seconds, codes_seconds, best, tokens, device)


def _gain_note(group_gains: _GroupGains, products: Sequence[int], index: int) -> str:
    """The time that products gain or lose together, and with which others one does."""
    seconds = sum(group_gains.seconds[i] for i in products) - group_gains.codes_seconds
    other_paths = ", ".join(dict.fromkeys(group_gains.products[i].path for i in products if i != index))
    return f"{abs(1e6 * seconds):,.0f} us{f' with {other_paths}' if other_paths else ''}"


def _local_shape(value: Value) -> tuple[int, ...]:
    """The shape of a device's part of an array, as far as its type says how it is cut."""
    sharding = getattr(value.aval, "sharding", None)
    if sharding is None or not sharding.mesh.explicit_axes:
        return value.shape
    return tuple(sharding.shard_shape(value.shape))


def _num_mesh_devices() -> int:
    """Over how many devices an automatic mesh that is set cuts a program."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in mesh.auto_axes) if not mesh.empty else 1
