"""What linear layers gain in 8 bits on a GPU, by rates that `python -m experiments.bench rates` measures there.

Products are faster; what quantizes their operands moves bytes and costs launches. Of layers that are small, or whose
input no norm and no activation makes codes of, that is more than the products gain. Layers that read one array share
its codes, so that they are weighed together.
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
# Bytes an element beyond those of 16 bits. The weight, fp32: two passes and two codes in place of one pass and a copy
# in bf16, and a gradient in fp32 that three more passes read or write; with a pass for its maximum.
_WEIGHT, _WEIGHT_MAXIMUM = 8 + 2 - 6 + 6, 4
# The result's gradient: read, and codes both ways. The input's: codes both ways, and those made again.
_GRADIENT, _GRADIENT_MAXIMUM, _INPUT, _INPUT_MAXIMUM = 4, 2, 6, 2
# Where an operation makes its codes that costs 2.2, and its kernels save what XLA's passes move in 16 bits: of steps of
# Llama 1.1B, GPT-2 124M and 350M and ViT-L on an H100 the rest of this table explains all but 32 bytes for the two
# norms of a block, and 5 to 18 an element for its activation. Sums of columns, which XLA makes of a result's gradient
# for a bias in a pass of its own, are part of the pass for the codes: 2.75, or 5.4 with the residual's sum.
_PRODUCER_BYTES = {"norm": 2.2 - 16, "activation": 2.2 - 5}
_BIAS = 4
# Where a product beside stays in 16 bits, what a norm or an activation makes is written in these, too.
_COPY_BYTES = 2
_LAUNCHES, _LAUNCHES_INPUT = 8, 2
_TIMED_GRANULARITIES, _TIMED_FORMATS = ("tensor", "token", "mx"), ("e4m3", "e5m2")  # what products of these rates have
_DEFAULT_DEVICE = "H100"  # of a device that has no rates


class Rates(NamedTuple):
    """What a GPU does in a second.

    Attributes:
        device: part of its name, such as "H100".
        sixteen: operations of products in bf16; fast, promoted: in 8 bits, with the fewer bits that tensor cores keep
            of sums, and with all.
        memory: bytes of a copy.
        launch: seconds that a small kernel takes among others.
    """

    device: str
    sixteen: float
    fast: float
    promoted: float
    memory: float
    launch: float


@functools.cache
def load_rates() -> tuple[Rates, ...]:
    """The GPUs whose rates are known."""
    return tuple(Rates(**{k: entry[k] for k in Rates._fields}) for entry in json.loads(RATES_PATH.read_text()))


def current_rates() -> tuple[Rates, bool]:
    """Those of the GPU that programs are traced for, and whether they are an H100's because there are none of it."""
    kind = {90: _DEFAULT_DEVICE}.get(current_target().capability or 0, "")  # compiled ahead of time
    if current_target().capability is None:
        kind = jax.devices()[0].device_kind
    matches = [rates for rates in load_rates() if rates.device in kind]
    return (matches or [rates for rates in load_rates() if rates.device == _DEFAULT_DEVICE])[0], not matches


def estimate_gain(
    tokens: int, inputs: int, outputs: int, recipe: Linear, rates: Rates, *, has_bias: bool = False
) -> float | None:
    """Seconds that a step gains by a layer in 8 bits, forward and backward, but for its input's codes; None where no
    rates say.

    Args:
        tokens, inputs, outputs: of the layer, on one device.
        recipe: its products.
        rates: of the GPU.
        has_bias: whether a bias is added to its result.
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
    """Seconds that codes of an input cost, for all layers that read it; below 0 where more is saved.

    `producer` is what makes it: "norm", "activation" or "".
    """
    bytes_per_element = (
        _PRODUCER_BYTES[producer] if producer else _INPUT + _INPUT_MAXIMUM * _needs_amax(recipe.spec("x"))
    )
    return bytes_per_element * tokens * inputs / rates.memory + _LAUNCHES_INPUT * rates.launch


def copy_cost(tokens: int, inputs: int, rates: Rates, *, producer: str) -> float:
    """Seconds that the input costs in 16 bits, too, where some of the layers that read it are left in these."""
    return _COPY_BYTES * tokens * inputs / rates.memory if producer else 0.0


def select_layers(layer_gains: Sequence[float], codes_cost: float, copy_cost_16_bit: float) -> tuple[int, ...]:
    """Which of the layers that read one array are best in 8 bits, by their gains: all, none, or those that gain, at
    least one."""
    profitable = [i for i, seconds in enumerate(layer_gains) if seconds > 0] or [
        max(range(len(layer_gains)), key=layer_gains.__getitem__)
    ]
    candidates = {(): 0.0, tuple(range(len(layer_gains))): sum(layer_gains) - codes_cost}
    candidates.setdefault(tuple(profitable), sum(layer_gains[i] for i in profitable) - codes_cost - copy_cost_16_bit)
    return max(candidates, key=candidates.__getitem__)


def _needs_amax(spec: QuantSpec | None) -> bool:
    """Whether a scale needs a pass over the tensor."""
    return spec is not None and spec.granularity == "tensor"
