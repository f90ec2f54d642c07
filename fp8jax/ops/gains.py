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
from fp8jax.ops.choice import aimed

TABLE = pathlib.Path(__file__).parents[1] / "core" / "rates.json"
# Bytes an element beyond those of 16 bits. The weight, fp32: two passes and two codes in place of one pass and a copy
# in bf16, and a gradient in fp32 that three more passes read or write; with a pass for its maximum.
_WEIGHT, _WEIGHT_MAXIMUM = 8 + 2 - 6 + 6, 4
# The result's gradient: read, and codes both ways. The input's: codes both ways, and those made again.
_GRADIENT, _GRADIENT_MAXIMUM, _INPUT, _INPUT_MAXIMUM = 4, 2, 6, 2
# Where an operation makes its codes that costs 2.2, and its kernels save what XLA's passes move in 16 bits: of steps of
# Llama 1.1B, GPT-2 124M and 350M and ViT-L on an H100 the rest of this table explains all but 32 bytes for the two
# norms of a block, and 5 to 18 an element for its activation. Sums of columns, which XLA makes of a result's gradient
# for a bias in a pass of its own, are part of the pass for the codes: 2.75, or 5.4 with the residual's sum.
_MADE = {"norm": 2.2 - 16, "activation": 2.2 - 5}
_BIAS = 4
# Where a product beside stays in 16 bits, what a norm or an activation makes is written in these, too.
_BESIDE = 2
_LAUNCHES, _LAUNCHES_INPUT = 8, 2
_TIMED, _FORMATS = ("tensor", "token", "mx"), ("e4m3", "e5m2")  # what products of these rates have
_ASSUMED = "H100"  # of a device that has no rates


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
def table() -> tuple[Rates, ...]:
    """The GPUs whose rates are known."""
    return tuple(Rates(**{k: entry[k] for k in Rates._fields}) for entry in json.loads(TABLE.read_text()))


def of_device() -> tuple[Rates, bool]:
    """Those of the GPU that programs are traced for, and whether they are an H100's because there are none of it."""
    kind = {90: _ASSUMED}.get(aimed().capability or 0, "")  # compiled ahead of time
    if aimed().capability is None:
        kind = jax.devices()[0].device_kind
    known = [rates for rates in table() if rates.device in kind]
    return (known or [rates for rates in table() if rates.device == _ASSUMED])[0], not known


def gain(tokens: int, inputs: int, outputs: int, recipe: Linear, rates: Rates, *, biased: bool = False) -> float | None:
    """Seconds that a step gains by a layer in 8 bits, forward and backward, but for its input's codes; None where no
    rates say.

    Args:
        tokens, inputs, outputs: of the layer, on one device.
        recipe: its products.
        rates: of the GPU.
        biased: whether a bias is added to its result.
    """
    specs = {operand: recipe.spec(operand) for operand in ("x", "w", "dy")}
    if any(s is None or s.granularity not in _TIMED or s.format not in _FORMATS for s in specs.values()):
        return None
    fast = len(recipe.fast_accumulation) / 3
    eight = fast / rates.fast + (1 - fast) / rates.promoted
    products = 6 * tokens * inputs * outputs * (1 / rates.sixteen - eight)
    moved: float = (_WEIGHT + _WEIGHT_MAXIMUM * _measured(specs["w"])) * inputs * outputs
    moved += (_GRADIENT + _GRADIENT_MAXIMUM * _measured(specs["dy"]) - _BIAS * biased) * tokens * outputs
    return products - moved / rates.memory - _LAUNCHES * rates.launch


def codes(tokens: int, inputs: int, recipe: Linear, rates: Rates, *, made: str) -> float:
    """Seconds that codes of an input cost, for all layers that read it, `made` by a "norm" or an "activation" or "";
    below 0 where more is saved."""
    own = _MADE[made] if made else _INPUT + _INPUT_MAXIMUM * _measured(recipe.spec("x"))
    return own * tokens * inputs / rates.memory + _LAUNCHES_INPUT * rates.launch


def beside(tokens: int, inputs: int, rates: Rates, *, made: str) -> float:
    """Seconds that the input costs in 16 bits, too, where some of the layers that read it are left in these."""
    return _BESIDE * tokens * inputs / rates.memory if made else 0.0


def best(each: Sequence[float], codes: float, beside: float) -> tuple[int, ...]:
    """Which of the layers that read one array are best in 8 bits, by their gains: all, none, or those that gain, at
    least one."""
    some = [i for i, seconds in enumerate(each) if seconds > 0] or [max(range(len(each)), key=each.__getitem__)]
    ways = {(): 0.0, tuple(range(len(each))): sum(each) - codes}
    ways.setdefault(tuple(some), sum(each[i] for i in some) - codes - beside)
    return max(ways, key=ways.__getitem__)


def _measured(spec: QuantSpec | None) -> bool:
    """Whether a scale needs a pass over the tensor."""
    return spec is not None and spec.granularity == "tensor"
