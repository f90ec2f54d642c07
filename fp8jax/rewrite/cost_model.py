"""Estimated gain of matmuls in 8 bits on a GPU, from rates of `python -m experiments.bench rates`.

Matmuls are faster, but quantization moves bytes and launches kernels. For small layers, or inputs that no norm or
activation quantizes, that can outweigh the gain. Matmuls of one input share its codes and are decided together: they
stay in 16 bits if their recipe has `skip_unprofitable` and they lose time.
"""

import contextlib
import functools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from fp8jax.core.recipe import Linear
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.dispatch.choice import current_target, on_cuda, target
from fp8jax.rewrite import activations, biases, norms
from fp8jax.rewrite.entries import PlanEntry, WeightMatmul
from fp8jax.rewrite.graph import Node, Value
from fp8jax.rewrite.operations import ActivationOperation, NormOperation
from fp8jax.rewrite.rules import LayerChoice, rewrites_nonlinear

RATES_PATH = pathlib.Path(__file__).parents[1] / "core" / "rates.json"
# Bytes per element in addition to those of 16 bits. An fp32 weight: two passes and two codes instead of one pass and a
# bf16 copy, and three more passes over its fp32 gradient; plus a pass for its amax.
_WEIGHT, _WEIGHT_MAXIMUM = 8 + 2 - 6 + 6, 4
# The result's gradient: one read and two codes. The input: two codes, twice if recomputed.
_GRADIENT, _GRADIENT_MAXIMUM, _INPUT, _INPUT_MAXIMUM = 4, 2, 6, 2
# A norm or activation that quantizes its result moves 2.2. Its kernels save 16 and 5 of those that XLA's passes move,
# fitted to steps of Llama, GPT-2 and ViT on an H100. Bias gradients need no separate pass.
_PRODUCER_BYTES = {"norm": 2.2 - 16, "activation": 2.2 - 5}
_BIAS = 4
_LAUNCHES, _LAUNCHES_INPUT = 8, 2
_TIMED_GRANULARITIES, _TIMED_FORMATS = ("tensor", "token", "mx"), ("e4m3", "e5m2")  # operands of the measured products
_DEFAULT_DEVICE, _DEFAULT_CAPABILITY = "H100", 90  # for devices without rates


class Rates(NamedTuple):
    """Measured rates of a GPU.

    Attributes:
        device: part of its name, such as "H100".
        sixteen: bf16 operations per second.
        fast, promoted: 8-bit operations per second, with fast accumulation and with sums promoted to fp32.
        memory: bytes per second of a copy.
        launch: seconds of a small kernel among others.
    """

    device: str
    sixteen: float
    fast: float
    promoted: float
    memory: float
    launch: float


@functools.cache
def load_rates() -> tuple[Rates, ...]:
    """Return the rates of all measured GPUs."""
    return tuple(Rates(**{k: entry[k] for k in Rates._fields}) for entry in json.loads(RATES_PATH.read_text()))


def current_rates() -> tuple[Rates, bool]:
    """Return the rates of the target GPU, and whether they are an H100's because the GPU was not measured."""
    device_name = {_DEFAULT_CAPABILITY: _DEFAULT_DEVICE}.get(
        current_target().capability or 0, ""
    )  # ahead-of-time compilation
    if current_target().capability is None:
        device_name = jax.devices()[0].device_kind
    matches = [rates for rates in load_rates() if rates.device in device_name]
    return (matches or [rates for rates in load_rates() if rates.device == _DEFAULT_DEVICE])[0], not matches


def estimate_gain(
    tokens: int, inputs: int, outputs: int, recipe: Linear, rates: Rates, *, has_bias: bool = False
) -> float | None:
    """Return the seconds per step that a layer saves in 8 bits, without the cost of its input's codes.

    Returns:
        Seconds, forward and backward; None if products of these specs were not measured.
    """
    specs = {operand: recipe.spec(operand) for operand in ("x", "w", "dy")}
    if any(
        s is None or s.granularity not in _TIMED_GRANULARITIES or s.format not in _TIMED_FORMATS for s in specs.values()
    ):
        return None
    fast_share = len(recipe.fast_accumulation) / 3
    seconds_per_flop = fast_share / rates.fast + (1 - fast_share) / rates.promoted
    saved_by_products = 6 * tokens * inputs * outputs * (1 / rates.sixteen - seconds_per_flop)
    bytes_moved: float = (_WEIGHT + _WEIGHT_MAXIMUM * _needs_amax(specs["w"])) * inputs * outputs
    bytes_moved += (_GRADIENT + _GRADIENT_MAXIMUM * _needs_amax(specs["dy"]) - _BIAS * has_bias) * tokens * outputs
    return saved_by_products - bytes_moved / rates.memory - _LAUNCHES * rates.launch


def quantization_cost(tokens: int, inputs: int, recipe: Linear, rates: Rates, *, producer: str) -> float:
    """Return the seconds to quantize an input for all its layers; negative if it saves time.

    `producer` is "norm", "activation" or "".
    """
    bytes_per_element = (
        _PRODUCER_BYTES[producer] if producer else _INPUT + _INPUT_MAXIMUM * _needs_amax(recipe.spec("x"))
    )
    return bytes_per_element * tokens * inputs / rates.memory + _LAUNCHES_INPUT * rates.launch


def _needs_amax(spec: QuantSpec | None) -> bool:
    """Return whether a scale needs a pass over the tensor."""
    return spec is not None and spec.granularity == "tensor"


class _GroupGain(NamedTuple):
    """The estimated gain of matmuls that read one array.

    Attributes:
        seconds: the gain of each, without the cost of the array's codes.
        codes_seconds: the cost of quantizing the array once.
        tokens: rows of the array on one device.
        rates_device: the GPU of the rates, with an article.
    """

    paths: list[str]
    seconds: list[float]
    codes_seconds: float
    tokens: int
    rates_device: str

    @property
    def total(self) -> float:
        """Seconds per step that all of them gain."""
        return sum(self.seconds) - self.codes_seconds

    def note(self, index: int) -> str:
        """The magnitude of the total as text, with the paths of those other than `index`."""
        others = ", ".join(dict.fromkeys(path for i, path in enumerate(self.paths) if i != index))
        return f"{abs(1e6 * self.total):,.0f} us{f' with {others}' if others else ''}"


def drop_unprofitable(
    value: Value, group: Sequence[WeightMatmul], entries: dict[Node, PlanEntry], sole_readers: Mapping[Value, Node]
) -> bool:
    """Leave the matmuls of a group in 16 bits if 8 bits cost time and their recipe has `skip_unprofitable`.

    Args:
        value: the output of the operation that computes the group's input.
        entries: the plan's entries; reasons and choices are replaced.
        sole_readers: for each value that is read once, the node that reads it.

    Returns:
        Whether a recipe in the group has `skip_unprofitable`.
    """
    cost_selected = [p for p in group if p.choice.linear is not None and p.choice.linear.skip_unprofitable]
    quantized = [p for p in cost_selected if p.is_quantized]
    for p in cost_selected:
        if not p.is_quantized:
            reason = f"{p.choice.reason} has no 8-bit products for this device"
            entries[p.node] = entries[p.node]._replace(reason=reason)
    if not quantized:
        return False
    has_shared_codes = any(p.is_quantized and p not in quantized for p in group)
    gain = _estimate_group(quantized, sole_readers, _producer_kind(value, quantized[0]), has_shared_codes)
    for i, p in enumerate(quantized):
        if gain is None:
            entry = entries[p.node]._replace(reason=f"{p.choice.reason}; its gain is not known")
        elif gain.total > 0:
            entry = entries[p.node]._replace(reason=f"{p.choice.reason}; gains about {gain.note(i)}")
        else:
            reason = f"gains nothing at {gain.tokens:,} tokens: {gain.note(i)} slower in 8 bits"
            p.choice = LayerChoice(None, reason)
            entry = entries[p.node]._replace(reason=reason, choice=p.choice, rates_device=gain.rates_device)
        entries[p.node] = entry
    return True


def annotate_gains(
    value: Value, group: Sequence[WeightMatmul], entries: dict[Node, PlanEntry], sole_readers: Mapping[Value, Node]
) -> None:
    """Add the estimated gain to the entries of a group's quantized matmuls, and whether 16 bits would be faster."""
    quantized = [p for p in group if p.is_quantized]
    group_gain = _estimate_group(quantized, sole_readers, _producer_kind(value, quantized[0])) if quantized else None
    if group_gain is None:
        return
    for p, seconds in zip(quantized, group_gain.seconds, strict=True):
        entries[p.node] = entries[p.node]._replace(
            gain=seconds - group_gain.codes_seconds / len(quantized),
            is_slower=group_gain.total <= 0,
            rates_device=group_gain.rates_device,
            tokens=group_gain.tokens,
            runs_per_step=math.prod(node.num_runs(body) for node, body in p.enclosing),
        )


def _producer_kind(value: Value, reader: WeightMatmul) -> str:
    """The kind of operation that quantizes a matmul's input on a GPU: "norm", "activation" or ""."""
    if value.node is None:
        return ""
    if value.node.operation is not None:
        kinds = {NormOperation: "norm", ActivationOperation: "activation"}
        return next((name for kind, name in kinds.items() if isinstance(value.node.operation, kind)), "")
    with contextlib.nullcontext() if on_cuda() else target(capability=_DEFAULT_CAPABILITY):
        if not rewrites_nonlinear(reader.choice.recipe):
            return ""
    if norms.find(value) is not None:
        return "norm"
    return "activation" if activations.find(value) is not None else ""


def _estimate_group(
    products: list[WeightMatmul], sole_readers: Mapping[Value, Node], producer: str, has_shared_codes: bool = False
) -> _GroupGain | None:
    """The gain of matmuls that read one array; None if one has no estimate.

    `has_shared_codes`: whether other matmuls need the input's codes in any case.
    """
    (rates, is_assumed), seconds = current_rates(), list[float]()
    tokens = inputs = 1
    for p in products:
        if p.node.kind != "dot_general" or p.choice.linear is None:
            return None
        contract, batch = p.node.eqn.params["dimension_numbers"]
        data, weight = _local_shape(p.data), _local_shape(p.node.operands[p.side])
        if batch[0] or not all(isinstance(n, int) for n in data):  # a symbolic dimension
            return None
        inputs = math.prod(data[i] for i in contract[1 - p.side])
        tokens = max(math.prod(data) // max(inputs, 1) // _num_mesh_devices(), 1)
        has_bias = p.side == 1 and biases.find(
            p.node, len(weight) - len(contract[1]), sole_readers.get(p.node.results[0])
        )
        shape = tokens, inputs, math.prod(weight) // max(inputs, 1)
        gain = estimate_gain(*shape, p.choice.linear, rates, has_bias=bool(has_bias))
        if gain is None:
            return None
        seconds.append(gain)
    linear = products[0].choice.linear
    assert linear is not None
    codes_seconds = 0.0 if has_shared_codes else quantization_cost(tokens, inputs, linear, rates, producer=producer)
    device = f"an {rates.device}{' (no measurements for this device)' if is_assumed else ''}"
    return _GroupGain([p.path for p in products], seconds, codes_seconds, tokens, device)


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
