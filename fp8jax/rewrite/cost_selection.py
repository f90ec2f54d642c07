"""Estimates which matmuls gain time in 8 bits, and leaves the others in 16 if the recipe has `skip_unprofitable`."""

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
    """The estimated gains in seconds of matmuls that read one array.

    `codes_seconds` is the cost of quantizing that array once. `best` are indices of those to compute in 8 bits.
    """

    products: list[WeightMatmul]
    seconds: list[float]
    codes_seconds: float
    best: tuple[int, ...]
    tokens: int
    rates_device: str


_HOPPER_CAPABILITY = 90  # the compute capability of an H100


def drop_unprofitable(
    value: Value, group: Sequence[WeightMatmul], entries: dict[Node, PlanEntry], sole_readers: Mapping[Value, Node]
) -> bool:
    """Leave matmuls of a group in 16 bits if 8 bits cost time and their recipe has `skip_unprofitable`.

    Args:
        value: the output of the operation that computes the group's input.
        group: the matmuls that read one array.
        entries: the plan's entries; reasons and choices are replaced.
        sole_readers: for each value that is read once, the node that reads it.

    Returns:
        Whether a recipe in the group has `skip_unprofitable`.
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
    """Add the estimated gain to the entries of a group's quantized matmuls, and whether 16 bits would be faster."""
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
    """The kind of operation that quantizes a matmul's input on a GPU: "norm", "activation" or ""."""
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
    """The gains of matmuls that read one array; None if one has no estimate.

    `has_shared_codes`: whether other matmuls need the input's codes in any case.
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
        if not all(isinstance(n, int) for n in data):  # a symbolic dimension
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
    """The joint gain or loss of matmuls as text, with the paths of those other than `index`."""
    seconds = sum(group_gains.seconds[i] for i in products) - group_gains.codes_seconds
    other_paths = ", ".join(dict.fromkeys(group_gains.products[i].path for i in products if i != index))
    return f"{abs(1e6 * seconds):,.0f} us{f' with {other_paths}' if other_paths else ''}"


def _local_shape(value: Value) -> tuple[int, ...]:
    """The shape of one device's shard of an array, as far as its type has the sharding."""
    sharding = getattr(value.aval, "sharding", None)
    if sharding is None or not sharding.mesh.explicit_axes:
        return value.shape
    return tuple(sharding.shard_shape(value.shape))


def _num_mesh_devices() -> int:
    """The number of devices of the current mesh's Auto axes; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in mesh.auto_axes) if not mesh.empty else 1
