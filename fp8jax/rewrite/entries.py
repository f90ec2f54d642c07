"""The entries of a plan for each part of a program, and the products in it."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from fp8jax.core.recipe import Context, Linear
from fp8jax.rewrite.frozen_params import FrozenInfo
from fp8jax.rewrite.graph import Graph, Node, Value, Weight
from fp8jax.rewrite.losses import LossForm
from fp8jax.rewrite.rules import LayerChoice

_UNKNOWN = LayerChoice(None, "")
LOSS_KIND = "softmax cross-entropy"
CONVOLUTION_REASON = "convolutions are not quantized"


class PlanEntry(NamedTuple):
    """The decision for a product, a norm or an activation: a row of `explain`.

    Attributes:
        path: of the parameter; or, for an activation, of the product that reads it.
        kind: the primitive, "RMSNorm", "LayerNorm", an activation such as "silu(gate) * up", `LOSS_KIND` for a product
            that runs with its loss, or a layer's class.
        shape: of the parameter, or of the result; () if there is neither.
        choice: of the rules; None if it is left as written for another reason.
        reason: the rule, or why it is left as written.
        line: of the program; "" if it is not in the program.
        input_producer: the norm or activation of this plan that a product reads.
        recomputes_input: whether the backward pass of a product gets its input from `input_producer`.
        has_saved_input: whether a product's input is saved in any case, as attention's output is.
        is_rematerialized: whether a product runs again in the backward pass. No policy of a `jax.checkpoint` saves it.
        readers: the products that save the result of a norm or activation as an array: path and dtype of each.
        gain: seconds that one run of a product gains in 8 bits, by measured rates; None if there are none.
        rates_device: the device of these rates (`fp8jax.rewrite.cost_model`).
        is_slower: whether it is faster in 16 bits.
        tokens: of a product, on one device.
        runs_per_step: how often it runs in a step.
        frozen: what a product reads in place of a parameter.
        residual_bytes: bytes saved of its input for the backward pass; None if unknown.
        unquantized_residual_bytes: the same without a recipe, at least.
        flops: of a product in a forward pass, in all iterations of scans; 0 if unknown.
        is_unsupported: whether it is left as written although the rules ask for a recipe.
        is_grouped_candidate: whether it may be a product of experts that is left as written: a ragged product, one in a
            custom derivative or kernel, or one with a gathered matrix.
        concatenated: the layers of further parameters in a product's matrix.
        source_layers: the layers with parameters that an unquantized product reads, or is computed from.
        dtype: of the operands that are not quantized; None if the inputs decide.
        is_planned: whether the rules cover it. Everything else runs unchanged.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    choice: LayerChoice | None
    reason: str
    line: str
    input_producer: str = ""
    recomputes_input: bool = False
    is_product: bool = False
    has_saved_input: bool = False
    is_rematerialized: bool = False
    readers: tuple[tuple[str, str], ...] = ()
    gain: float | None = None
    rates_device: str = ""
    is_slower: bool = False
    tokens: int = 0
    runs_per_step: int = 1
    frozen: FrozenInfo | None = None
    residual_bytes: int | None = None
    unquantized_residual_bytes: int | None = None
    flops: float = 0
    is_unsupported: bool = False
    is_grouped_candidate: bool = False
    concatenated: tuple[str, ...] = ()
    source_layers: tuple[str, ...] = ()
    dtype: str | None = None
    is_planned: bool = True

    @property
    def is_quantized(self) -> bool:
        """Whether a recipe quantizes it."""
        linear = None if self.choice is None else self.choice.linear
        return linear is not None and (linear.is_quantized or not self.is_product)

    @property
    def linear(self) -> Linear | None:
        """The formats of a quantized product; None for all else."""
        return self.choice.linear if self.choice is not None and self.is_product and self.is_quantized else None

    @property
    def context(self) -> Context | None:
        """The residual of a norm or an activation with a recipe; None for all else."""
        context = None if self.choice is None or self.is_product else self.choice.context
        return None if context is None or context.residual is None else context

    @property
    def products(self) -> dict[str, str]:
        """The operands of the forward, dgrad and wgrad product; empty if nothing is quantized."""
        linear, unquantized = self.linear, self.dtype or "as written"
        if linear is None:
            return {}
        if self.frozen is not None:
            x, dy = (linear.spec(operand) or unquantized for operand in ("x", "dy"))
            weight = self.frozen.spec or unquantized
            return {"forward": f"{x} x {weight}", "dgrad": f"{dy} x {weight}", "wgrad": "-"}
        return {
            name: f"{left or unquantized} x {right or unquantized}" if left or right else unquantized
            for name, (left, right) in linear.matmul_operands().items()
        }

    @property
    def residual(self) -> str:
        """What is saved of the input for the backward pass, with its bytes an element."""
        linear, context = self.linear, self.context
        if context is not None and context.spec is not None:
            bound = "; scales from bounds" if context.amax == "bound" else ""
            readers = "".join(f"; {path} saves the result in {dtype}" for path, dtype in self.readers)
            return f"{context.spec}, {context.spec.bytes_per_element:.4g} B/element{bound}{readers}"
        if linear is None:
            return "as written"
        if self.kind == LOSS_KIND:
            return "its gradient, which the loss computes in the forward pass"
        if self.frozen is not None and not self.frozen.rank:
            return "nothing"
        if self.frozen is None and self.has_saved_input:
            return "nothing: its producer saves it"
        if self.frozen is None and self.recomputes_input:
            return f"nothing: {self.input_producer} recomputes it"
        spec = linear.residual_spec() if self.frozen is None else None
        if spec is not None:
            return f"{spec}, {spec.bytes_per_element:.4g} B/element"
        return f"{self.dtype}, {jnp.dtype(self.dtype).itemsize} B/element" if self.dtype else "as written"

    @property
    def token_spanning_spec(self) -> str | None:
        """The spec of the forward input if tokens share a scale; None if they do not."""
        spec = self.linear.spec("x") if self.linear else None
        spans = spec is not None and spec.outer_scale != "none" and spec.block_shape((2, 2))[0] > 1
        return str(spec) if spans else None


@dataclasses.dataclass(eq=False)
class WeightMatmul:
    """A product of data with a parameter."""

    graph: Graph
    node: Node
    side: int
    matrix: Value  # the operand that is a parameter, before an operation replaces the node
    weight: Weight
    path: str
    aliases: tuple[str, ...]
    enclosing: tuple[tuple[Node, Graph], ...]
    choice: LayerChoice = _UNKNOWN
    operation_node: Node | None = None  # the node that the operation replaces, if not the product's own
    is_unsupported: bool = False  # the rules ask for a recipe that this product cannot have
    is_stacked: bool = False  # the matrices of experts are side by side, along the first axis of the operand
    concatenated: tuple[str, ...] = ()  # the layers of further parameters in the matrix
    loss: LossForm | None = None  # the softmax cross-entropy of its result

    @property
    def data(self) -> Value:
        """The operand that is not a parameter."""
        return self.node.operands[1 - self.side]

    @property
    def is_quantized(self) -> bool:
        """Whether a recipe quantizes it."""
        return self.choice.linear is not None and self.choice.linear.is_quantized

    @property
    def quantizes_stored_weight(self) -> bool:
        """Whether all products quantize the parameter in its stored layout, without a transpose or reshape before."""
        linear = self.choice.linear
        quantized = linear is not None and linear.spec("w") is not None and linear.spec("w_dgrad") is not None
        return quantized and not self.weight.is_relayouted

    @property
    def saves_codes(self) -> bool:
        """Whether it saves codes of its data."""
        linear = self.choice.linear
        return linear is not None and linear.spec("x_residual") is not None and self.weight.frozen is None
