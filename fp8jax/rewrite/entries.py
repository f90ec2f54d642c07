"""What a plan says of each part of a program, and the products that it finds there."""

import dataclasses
from typing import NamedTuple

from fp8jax.rewrite.frozen_params import FrozenInfo
from fp8jax.rewrite.graph import Graph, Node, Value, Weight
from fp8jax.rewrite.rules import LayerChoice

_UNKNOWN = LayerChoice(None, "")


class PlanEntry(NamedTuple):
    """What becomes of a product, a norm or an activation.

    Attributes:
        path: of the parameter, or of the product that reads the result.
        kind: the primitive, "RMSNorm", "LayerNorm", or an activation such as "silu(gate) * up".
        shape: of the parameter, or of the result.
        choice: what the rules say; None where it is left as written for another reason.
        reason: the rule, or why it is left as written.
        line: where it stands.
        input_producer: the norm or activation of this plan that a product reads, or what is kept in any case.
        is_product: whether it is a product.
        has_saved_input: whether what a product reads is kept in any case, as attention's output is.
        is_rematerialized: whether a product is computed again in the backward pass: no policy of the checkpoints
            around keeps it.
        readers: of a norm or an activation, the products that read it and save no codes of it, each with the dtype.
        has_only_listed_readers: there are no others.
        gain: seconds that a product gains each time in 8 bits, by rates; None where none say, or it is left.
        rates_device: the device of these rates (`fp8jax.ops.products.cost_model`).
        is_slower: it would be better left in 16 bits.
        tokens: of it, on a device. runs_per_step: how often it runs in a step.
        frozen: what a product has in the place of a parameter.
        residual_bytes: that it keeps of what it reads for the backward pass; None where that is not known.
        flops: FLOPs of a product in a forward pass, in all turns of scans; 0 if unknown.
        is_unsupported: it is left as written although the rules ask for a recipe.
        concatenated: the layers of further parameters in a product's matrix.
        source_layers: the layers of the parameters that a product left as written reads, or is computed from.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    choice: LayerChoice | None
    reason: str
    line: str
    input_producer: str = ""
    is_product: bool = False
    has_saved_input: bool = False
    is_rematerialized: bool = False
    readers: tuple[tuple[str, str], ...] = ()
    has_only_listed_readers: bool = False
    gain: float | None = None
    rates_device: str = ""
    is_slower: bool = False
    tokens: int = 0
    runs_per_step: int = 1
    frozen: FrozenInfo | None = None
    residual_bytes: int | None = None
    flops: float = 0
    is_unsupported: bool = False
    concatenated: tuple[str, ...] = ()
    source_layers: tuple[str, ...] = ()

    @property
    def is_quantized(self) -> bool:
        linear = None if self.choice is None else self.choice.linear
        return linear is not None and (linear.is_quantized or not self.is_product)


@dataclasses.dataclass(eq=False)
class WeightMatmul:
    """A product of data with a parameter."""

    graph: Graph
    node: Node
    side: int
    weight: Weight
    path: str
    aliases: tuple[str, ...]
    enclosing: tuple[tuple[Node, Graph], ...]
    choice: LayerChoice = _UNKNOWN
    operation_node: Node | None = None  # where the operation stands, if not in the product's own place
    has_unsupported_precision: bool = False  # it asks for a precision that a quantized product cannot give
    concatenated: tuple[str, ...] = ()  # the layers of further parameters in the matrix

    @property
    def data(self) -> Value:
        return self.node.operands[1 - self.side]

    @property
    def is_quantized(self) -> bool:
        return self.choice.linear is not None and self.choice.linear.is_quantized

    @property
    def quantizes_stored_weight(self) -> bool:
        """Whether the parameter is quantized as it is stored: all products quantize it, and nothing moves it."""
        linear = self.choice.linear
        quantized = linear is not None and linear.spec("w") is not None and linear.spec("w_dgrad") is not None
        return quantized and not self.weight.is_relayouted

    @property
    def saves_codes(self) -> bool:
        """Whether it saves codes of its data."""
        linear = self.choice.linear
        return linear is not None and linear.spec("x_residual") is not None and self.weight.frozen is None
