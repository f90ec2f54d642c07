"""Estimated gain of linear layers in 8 bits on a GPU, from rates of `python -m experiments.bench rates`.

Products are faster, but quantization moves bytes and launches kernels. For small layers, or inputs that no norm or
activation quantizes, that can outweigh the gain. Layers with a common input share its codes and are decided together.
"""

import functools
import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax

from fp8jax.core.recipe import Linear
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.dispatch.choice import current_target

RATES_PATH = pathlib.Path(__file__).parents[2] / "core" / "rates.json"
# Bytes per element in addition to those of 16 bits. An fp32 weight: two passes and two codes instead of one pass and a
# bf16 copy, and three more passes over its fp32 gradient; plus a pass for its amax.
_WEIGHT, _WEIGHT_MAXIMUM = 8 + 2 - 6 + 6, 4
# The result's gradient: one read and two codes. The input: two codes, twice if recomputed.
_GRADIENT, _GRADIENT_MAXIMUM, _INPUT, _INPUT_MAXIMUM = 4, 2, 6, 2
# A norm or activation that quantizes its result moves 2.2. Its kernels save 16 and 5 of those that XLA's passes move,
# fitted to steps of Llama, GPT-2 and ViT on an H100. Bias gradients need no separate pass.
_PRODUCER_BYTES = {"norm": 2.2 - 16, "activation": 2.2 - 5}
_BIAS = 4
# If another consumer stays in 16 bits, the operation also writes its result in 16 bits.
_COPY_BYTES = 2
_LAUNCHES, _LAUNCHES_INPUT = 8, 2
_TIMED_GRANULARITIES, _TIMED_FORMATS = ("tensor", "token", "mx"), ("e4m3", "e5m2")  # operands of the measured products
_DEFAULT_DEVICE = "H100"  # for devices without rates


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
    kind = {90: _DEFAULT_DEVICE}.get(current_target().capability or 0, "")  # ahead-of-time compilation
    if current_target().capability is None:
        kind = jax.devices()[0].device_kind
    matches = [rates for rates in load_rates() if rates.device in kind]
    return (matches or [rates for rates in load_rates() if rates.device == _DEFAULT_DEVICE])[0], not matches


def estimate_gain(
    tokens: int, inputs: int, outputs: int, recipe: Linear, rates: Rates, *, has_bias: bool = False
) -> float | None:
    """Return the seconds per step that a layer saves in 8 bits, without the cost of its input's codes.

    Args:
        tokens, inputs, outputs: sizes of the layer on one device.
        recipe: recipe of its products.
        rates: rates of the GPU.
        has_bias: whether it has a bias.

    Returns:
        Seconds, forward and backward; None if products of these specs were not measured.
    """
    specs = {operand: recipe.spec(operand) for operand in ("x", "w", "dy")}
    if any(
        s is None or s.granularity not in _TIMED_GRANULARITIES or s.format not in _TIMED_FORMATS for s in specs.values()
    ):
        return None
    fast = len(recipe.fast_accumulation) / 3
    seconds_per_flop = fast / rates.fast + (1 - fast) / rates.promoted
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


def copy_cost(tokens: int, inputs: int, rates: Rates, *, producer: str) -> float:
    """Return the seconds to also write the input in 16 bits, for layers that stay in 16 bits."""
    return _COPY_BYTES * tokens * inputs / rates.memory if producer else 0.0


def select_layers(layer_gains: Sequence[float], codes_cost: float, copy_cost_16_bit: float) -> tuple[int, ...]:
    """Return which layers of a common input to run in 8 bits: all, none, or (at least one of) those that gain."""
    profitable = [i for i, seconds in enumerate(layer_gains) if seconds > 0] or [
        max(range(len(layer_gains)), key=layer_gains.__getitem__)
    ]
    candidates = {(): 0.0, tuple(range(len(layer_gains))): sum(layer_gains) - codes_cost}
    candidates.setdefault(tuple(profitable), sum(layer_gains[i] for i in profitable) - codes_cost - copy_cost_16_bit)
    return max(candidates, key=candidates.__getitem__)


def _needs_amax(spec: QuantSpec | None) -> bool:
    """Return whether a scale needs a pass over the tensor."""
    return spec is not None and spec.granularity == "tensor"
