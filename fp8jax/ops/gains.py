"""What a linear layer gains in 8 bits on a GPU, by rates that `python -m experiments.bench rates` measures there.

Products are faster; what quantizes their operands moves bytes and costs launches. Of layers that are small, or whose
input no norm and no activation makes codes of, that is more than the products gain.
"""

import functools
import json
import pathlib
from typing import NamedTuple

import jax

from fp8jax.core.recipe import Linear
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.choice import aimed

TABLE = pathlib.Path(__file__).parents[1] / "core" / "rates.json"
# Bytes an element beyond those of 16 bits. The weight, fp32: two passes and two codes in place of one pass and a copy
# in bf16, and a gradient in fp32 that three more passes read or write; with a pass for its maximum.
_WEIGHT, _WEIGHT_MAXIMUM = 8 + 2 - 6 + 6, 4
# The result's gradient: read, and codes both ways. The input's: codes both ways, and those made again; or, where an
# operation makes its codes, no pass but that one.
_GRADIENT, _GRADIENT_MAXIMUM, _INPUT, _INPUT_MADE, _INPUT_MAXIMUM = 4, 2, 6, 2.2, 2
_LAUNCHES = 10
_TIMED = ("tensor", "token", "mx")  # what products of these rates have


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


def of_device() -> Rates | None:
    """Those of the GPU that programs are traced for; None where they are not known."""
    if aimed().capability is not None:
        names = {90: "H100"}.get(aimed().capability or 0, "")  # compiled ahead of time
    else:
        names = jax.devices()[0].device_kind
    return next((rates for rates in table() if names and rates.device in names), None)


def gain(
    tokens: int, inputs: int, outputs: int, recipe: Linear, *, made: bool, readers: int, rates: Rates
) -> float | None:
    """Seconds that a step gains by a layer in 8 bits, forward and backward; None where no rates say.

    Args:
        tokens, inputs, outputs: of the layer, on one device.
        recipe: its products.
        made: whether a norm or an activation makes its input's codes.
        readers: how many layers share them.
        rates: of the GPU.
    """
    specs = {operand: recipe.spec(operand) for operand in ("x", "w", "dy")}
    if any(spec is None or spec.granularity not in _TIMED for spec in specs.values()):
        return None
    maximum = {operand: _measured(spec) for operand, spec in specs.items()}
    fast = len(recipe.fast_accumulation) / 3
    eight = fast / rates.fast + (1 - fast) / rates.promoted
    products = 6 * tokens * inputs * outputs * (1 / rates.sixteen - eight)
    moved: float = (_WEIGHT + _WEIGHT_MAXIMUM * maximum["w"]) * inputs * outputs
    moved += (_GRADIENT + _GRADIENT_MAXIMUM * maximum["dy"]) * tokens * outputs
    own = _INPUT_MADE if made else _INPUT + _INPUT_MAXIMUM * maximum["x"]
    moved += own * tokens * inputs / readers
    return products - moved / rates.memory - _LAUNCHES * rates.launch


def _measured(spec: QuantSpec | None) -> bool:
    """Whether a scale needs a pass over the tensor."""
    return spec is not None and spec.granularity == "tensor"
