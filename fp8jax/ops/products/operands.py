"""Operand sources, which provide the codes of a product's input and weight, and the residuals that it saves.

A product y = x @ w reads both matrices twice: in the forward pass, and in the gradient of the other one. All sources
have one contract:

    operand = source.forward(matrix, side)              # codes for the forward product, or the matrix itself
    residual = source.residual(matrix, operand, side)   # what is saved for the backward pass
    operand = residual.operand(side, cotangent_facts)   # codes for the backward product, from the residual alone

`cotangent_facts` are the facts about the gradient of an input. `residual.codes_scale` is the scale of its codes, one or
one per token, if the scales of the gradient may be chosen to go with it, else None.

| source | its codes | its residual |
|---|---|---|
| `QuantizeHere` | of an input, made in the product | `ArrayResidual`: the input |
| `PrequantizedInput` | of an input, made before, shared by its products | `CodesResidual`: these codes |
| `RecomputableInput` | likewise | `RecomputeResidual`: what the operation before saves, and one scale |
| `FallbackBlocks` | of an input in blocks, some with a residual, made before | `CodesResidual`: codes given for that |
| `StepWeight` (`weights`) | of a weight, made in the product or before | itself: codes of dgrad, or the weight |
| `FrozenSource` (`frozen_weights`) | of a weight that is not trained | itself; nothing of the input |

Sources and residuals are pytrees without gradients. FP8 codes are in them as bytes, because an FP8 array may not enter
a differentiated function. `input_source` and `fp8jax.ops.products.weights.weight_source` choose the source, and
with it what a product saves.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import formats, scaling
from fp8jax.core.qtensor import QTensor, from_bytes, to_bytes
from fp8jax.core.recipe import Linear
from fp8jax.core.scaling import Scaling
from fp8jax.core.spec import TRANSPOSABLE, QuantSpec
from fp8jax.ops.autodiff.checkpointing import INPUT, PRODUCT_AUX, with_checkpoint_name
from fp8jax.ops.autodiff.residuals import (
    ALREADY_SAVED,
    NO_INPUT_FACTS,
    CotangentFacts,
    InputFacts,
    Recomputable,
    derive_key,
)
from fp8jax.ops.dispatch.choice import on_cuda
from fp8jax.ops.dispatch.sharding import reshape_to_matrix
from fp8jax.ops.matmul.grouped_hopper import DeferredMatrices
from fp8jax.ops.matmul.matmul import Operand
from fp8jax.ops.quantization import fallback, fused_outputs, microscaling
from fp8jax.ops.quantization.fallback import FallbackTensor
from fp8jax.ops.quantization.quantize import quantize, transpose

# Operands of a forward product.
ForwardOperand = Operand | FallbackTensor


class Side(NamedTuple):
    """How a recipe quantizes one of the two matrices of a product.

    Attributes:
        forward: spec in the forward product; None reads the matrix itself.
        residual: spec of the codes that are saved, or None.
        transposed: whether the forward product reads the transposed matrix, and the backward product the matrix. If
            not, it is the other way round.
        strategy: of per-tensor scales, as of `fp8jax.ops.quantization.quantize.quantize`.
        shares_token_scales: whether the operand of the backward product has the scales per token of both operands
            (`fp8jax.ops.quantization.microscaling`).
        rotation: length of the transformation of the operand of the backward product along its contraction
            (`fp8jax.ops.quantization.rotation`), or None.
    """

    forward: QuantSpec | None
    backward: QuantSpec | None
    residual: QuantSpec | None
    transposed: bool
    strategy: Scaling
    shares_token_scales: bool = False
    rotation: int | None = None

    @property
    def is_per_tensor(self) -> bool:
        """Whether both products use one scale per tensor, which is saved."""
        spec = self.forward
        is_same = spec is not None and spec == self.backward and self.rotation is None
        return is_same and spec.granularity == "tensor"  # type: ignore[union-attr]


def input_side(recipe: Linear) -> Side:
    """The side of the input x (tokens, inputs), which wgrad reads transposed."""
    specs = recipe.spec("x"), recipe.spec("x_wgrad"), recipe.spec("x_residual")
    return Side(
        *specs,
        transposed=False,
        strategy=recipe.stateless_strategy("x"),
        shares_token_scales=recipe.shares_token_scales,
        rotation=recipe.rotation,
    )


def weight_side(recipe: Linear) -> Side:
    """The side of the weight w (inputs, outputs), which the forward product reads transposed."""
    return Side(
        recipe.spec("w"), recipe.spec("w_dgrad"), None, transposed=True, strategy=recipe.stateless_strategy("w")
    )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scale"],
    meta_fields=["is_scale_clamped"],
)
@dataclasses.dataclass(frozen=True)
class ArrayResidual:
    """The matrix itself, and the scale of its codes if both products use one.

    `is_scale_clamped` says whether codes were made under that scale before.
    """

    values: Array
    scale: Array | None
    is_scale_clamped: bool
    codes_scale = None

    def __str__(self) -> str:
        return f"the input itself in {self.values.dtype}, since the recipe saves no codes"

    def operand(self, side: Side, cotangent_facts: CotangentFacts | None) -> Operand:
        return encode(
            self.values,
            side.backward,
            side.strategy,
            scale=None if side.rotation else self.scale,
            is_scale_clamped=self.is_scale_clamped,
            transposed=True,
            rotation=side.rotation,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CodesResidual:
    """Codes of the input as bytes, (tokens, inputs)."""

    codes: QTensor

    def __str__(self) -> str:
        return f"codes, {self.codes.spec}"

    @property
    def codes_scale(self) -> Array:
        return self.codes.scale

    def operand(self, side: Side, cotangent_facts: CotangentFacts | None) -> Operand:
        codes, spec = from_bytes(self.codes), side.backward
        if side.shares_token_scales:
            assert cotangent_facts is not None
            assert cotangent_facts.codes is not None
            return microscaling.rescale_rows_pow2(codes, cotangent_facts.codes)
        if spec is None:
            return codes.dequantize(jnp.bfloat16).T
        if spec == codes.spec and spec.granularity in TRANSPOSABLE and side.rotation is None:
            return transpose(codes)
        # Without the barrier XLA decodes the codes once for both products, and keeps the fp32 values.
        codes = from_bytes(lax.optimization_barrier(self.codes))
        return encode(codes.dequantize(), spec, side.strategy, transposed=True, rotation=side.rotation)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["residuals", "scale"], meta_fields=["operation", "shape", "dtype"]
)
@dataclasses.dataclass(frozen=True)
class RecomputeResidual:
    """The residuals of the operation that made the input, and the scale of the input's codes: one, or one per token."""

    operation: Recomputable
    residuals: Any
    scale: Array | None
    shape: tuple[int, int]
    dtype: DTypeLike
    codes_scale = None

    def __str__(self) -> str:
        return "nothing; the operation before makes it again"

    def operand(self, side: Side, cotangent_facts: CotangentFacts | None) -> Operand:
        assert cotangent_facts is not None
        array, fused_output, cotangent_facts.predicted = self.operation.recompute(self.residuals, cotangent_facts)
        matrix = reshape_to_matrix(array.astype(self.dtype), *self.shape)
        scale = self.scale if side.backward == side.residual and side.rotation is None else None
        fused_output = (
            None
            if fused_output is None or array.shape[-1] != matrix.shape[-1] or side.rotation
            else fused_output.cast(self.dtype)
        )
        operand: Operand
        if side.shares_token_scales:
            assert self.scale is not None
            assert side.backward is not None
            assert cotangent_facts.codes is not None
            operand = microscaling.requantize_recomputed(
                matrix, self.scale, cotangent_facts.codes, side.backward, fused_output
            )
        else:
            operand = encode(
                matrix,
                side.backward,
                side.strategy,
                scale=scale,
                is_scale_clamped=True,
                transposed=True,
                fused_output=fused_output,
                rotation=side.rotation,
            )
        if fused_output is not None and fused_output.group.predicted is not None:
            cotangent_facts.predicted = fused_output.group.predicted
        return operand


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizeHere:
    """An input that the product quantizes, under a given fp32 scale if there is one. The product saves `values`.

    Products of one input save the same array.
    """

    scale: Array | None
    values: Array

    def forward(self, matrix: Array, side: Side) -> ForwardOperand:
        return encode(matrix, side.forward, side.strategy, scale=self.scale)

    def residual(self, matrix: Array, operand: ForwardOperand, side: Side) -> ArrayResidual:
        keeps_scale = side.is_per_tensor and isinstance(operand, QTensor)
        scale = operand.scale if keeps_scale else convert_scale_to_spec(self.scale, side.forward, side.backward)  # type: ignore[union-attr]
        return ArrayResidual(self.values, with_checkpoint_name(scale, PRODUCT_AUX), keeps_scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrequantizedInput:
    """Codes of an input that were made before, as bytes, (tokens, inputs), as the recipe saves them.

    The forward product reads them if the recipe saves the codes that it multiplies.
    """

    codes: QTensor
    scale: Array | None = None

    def forward(self, matrix: Array, side: Side) -> ForwardOperand:
        if side.residual == side.forward:
            return from_bytes(self.codes)
        return encode(matrix, side.forward, side.strategy, scale=self.scale)

    def residual(self, matrix: Array, operand: ForwardOperand, side: Side) -> CodesResidual:
        return CodesResidual(self.codes)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["residuals", "forward_source"], meta_fields=["operation"]
)
@dataclasses.dataclass(frozen=True)
class RecomputableInput:
    """An input that the operation before recomputes from its residuals.

    `forward_source` is its source in the forward pass.
    """

    operation: Recomputable
    residuals: Any
    forward_source: "QuantizeHere | PrequantizedInput"

    def forward(self, matrix: Array, side: Side) -> ForwardOperand:
        return self.forward_source.forward(matrix, side)

    def residual(self, matrix: Array, operand: ForwardOperand, side: Side) -> RecomputeResidual:
        codes, scale = getattr(self.forward_source, "codes", None), None
        # One scale is cheaper to save than to recompute (COAT, section D).
        if codes is not None and (codes.spec.granularity == "tensor" or side.shares_token_scales):
            scale = codes.scale
        return RecomputeResidual(self.operation, self.residuals, scale, matrix.shape, matrix.dtype)  # type: ignore[arg-type]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FallbackBlocks:
    """An input in int8 blocks, where some blocks fall back to 16 bits, and the saved codes, as bytes."""

    fallback_tensor: FallbackTensor
    codes: QTensor

    def forward(self, matrix: Array, side: Side) -> FallbackTensor:
        return self.fallback_tensor

    def residual(self, matrix: Array, operand: ForwardOperand, side: Side) -> CodesResidual:
        return CodesResidual(self.codes)


Source = QuantizeHere | PrequantizedInput | RecomputableInput | FallbackBlocks
Residual = ArrayResidual | CodesResidual | RecomputeResidual


def convert_scale_to_spec(scale: Array | None, forward: QuantSpec | None, spec: QuantSpec | None) -> Array | None:
    """The scale given for the codes of the forward product, converted for codes of another format."""
    if scale is None or forward is None or spec is None:
        return scale
    return scaling.convert_scale(scale, formats.get(forward.format), formats.get(spec.format))


def make_codes(
    x: Array,
    spec: QuantSpec,
    strategy: Scaling,
    *,
    key: Array | None = None,
    scale: Array | None = None,
    transposed: bool = False,
    fused_output: fused_outputs.FusedOutput | None = None,
) -> QTensor:
    """Codes of a matrix, or of its transposed copy, as bytes and without a gradient; arguments as of `encode`."""
    q = encode(
        lax.stop_gradient(x), spec, strategy, key=key, scale=scale, transposed=transposed, fused_output=fused_output
    )
    assert isinstance(q, QTensor)
    return to_bytes(q)


def encode(
    x: Array,
    spec: QuantSpec | None,
    strategy: Scaling,
    *,
    key: Array | None = None,
    scale: Array | None = None,
    is_scale_clamped: bool = False,
    transposed: bool = False,
    fused_output: fused_outputs.FusedOutput | None = None,
    x_is_transposed: bool = False,
    rotation: int | None = None,
) -> Operand:
    """A matrix as an operand, or its transposed copy if `transposed`; unquantized if `spec` is None.

    Args:
        x: the matrix; or a stack of matrices, which returns an operand of `fp8jax.ops.matmul.grouped.grouped_matmul`.
        is_scale_clamped: whether codes were made under `scale` before.
        x_is_transposed: whether `x` is the transpose of an array. That array is then quantized.
        rotation: length of the transformation of the rows of a quantized matrix before its transposed copy, or None.
    """
    if x.ndim > 2:
        return _encode_stack(
            jnp.swapaxes(x, -1, -2) if x_is_transposed else x,
            spec,
            strategy,
            scale=scale,
            is_scale_clamped=is_scale_clamped,
            transposed=transposed != x_is_transposed,
        )
    if x_is_transposed and spec is not None:
        x, transposed = x.T, not transposed
    if spec is None:
        return x.T if transposed else x
    if spec.is_folded:
        return microscaling.fold_rows(x.T if transposed else x, spec, fused_output=None if transposed else fused_output)
    specs = (None, spec) if transposed else (spec, None)
    key = key if spec.rounding == "stochastic" else None
    return quantize(
        x,
        *specs,
        scale=scale,
        is_scale_clamped=is_scale_clamped,
        strategy=strategy,
        key=key,
        fused_output=fused_output,
        rotation=rotation,
    )[int(transposed)]


@dataclasses.dataclass(frozen=True)
class MatrixEncoder:
    """`encode` of a matrix, rounded to nearest. Attributes as of `encode`."""

    spec: QuantSpec
    strategy: Scaling
    transposed: bool
    is_scale_clamped: bool

    def __call__(self, *parts: Any) -> QTensor:
        x, scale = parts
        operand = encode(
            x,
            self.spec,
            self.strategy,
            scale=scale,
            is_scale_clamped=self.is_scale_clamped,
            transposed=self.transposed,
        )
        assert isinstance(operand, QTensor)
        return operand


def _encode_stack(
    x: Array,
    spec: QuantSpec | None,
    strategy: Scaling,
    *,
    scale: Array | None,
    is_scale_clamped: bool,
    transposed: bool,
) -> Any:
    """The operands of a stack of matrices."""
    if spec is None:
        return jnp.swapaxes(x, -1, -2) if transposed else x
    encoder = MatrixEncoder(spec, strategy, transposed, is_scale_clamped)
    if on_cuda():
        return jax.vmap(encoder)(x, scale)
    # XLA on CPUs computes codes of all matrices at the start of a program, by way of fp32 copies of them.
    return DeferredMatrices(x, scale, encoder)


class Input(NamedTuple):
    """The input of a product, and facts about it.

    Attributes:
        matrix: (tokens, inputs). If it is not a view of `source`, it may have several axes of tokens.
        source: the user's array from which it is made; None for itself. Products that read one source share its codes.
        differentiates_source: whether `source` is (..., inputs), so that gradients flow to it.
    """

    matrix: Array
    source: Array | None = None
    differentiates_source: bool = True
    input_facts: InputFacts = NO_INPUT_FACTS

    @property
    def source_or_matrix(self) -> Array:
        """The user's array."""
        return self.matrix if self.source is None else self.source

    @property
    def value(self) -> Array:
        """The array that gradients flow to."""
        return self.source_or_matrix if self.differentiates_source else self.matrix


def input_source(x: Input, recipe: Linear, key: Array | None, scale: Array | None = None) -> Source:
    """The source of an input, which decides what `recipe_dot` saves of it.

    Arguments are as of `recipe_dot`; `scale` is `scales.x`.
    """
    side, source, matrix = input_side(recipe), x.source_or_matrix, fused_outputs.to_matrix(x.matrix)
    facts = x.input_facts.facts
    if facts.recompute_rule is not None and facts.recompute_rule[0] == ALREADY_SAVED:
        facts = facts._replace(recompute_rule=(ALREADY_SAVED, source))
    fused_output = facts.fused_output if x.differentiates_source and source.shape[-1] == matrix.shape[-1] else None
    facts = facts._replace(fused_output=fused_output and fused_output.cast(matrix.dtype))
    # Layers with separate scaling states share the codes made under the scale of the first layer.
    strategy, given_scale = side.strategy if scale is None else recipe.strategy("x"), scale
    scale = facts.scale_for(recipe) if scale is None else scale
    subkey = None if side.residual is None else derive_key(key, side.residual, "x_residual")

    def get_or_compute(make: Callable[[], Any]) -> Any:
        dependencies = scale if given_scale is None else None, None if subkey is None else key
        return x.input_facts.get_or_compute((side.residual, strategy, matrix.shape), make, *dependencies)

    def make_residual() -> QTensor:
        assert side.residual is not None
        if facts.codes is not None and facts.codes[0] == side.residual:
            codes = facts.codes[1]
        else:
            residual_scale = convert_scale_to_spec(scale, side.forward, side.residual)
            codes = make_codes(
                *(matrix, side.residual, side.strategy),
                key=subkey,
                scale=residual_scale,
                fused_output=facts.fused_output,
            )
        q = with_checkpoint_name(codes, INPUT)
        if facts.recompute_rule is None:
            return q
        return dataclasses.replace(q, scale=with_checkpoint_name(q.scale, PRODUCT_AUX))

    forward_source: QuantizeHere | PrequantizedInput
    if side.residual is None:
        forward_source = QuantizeHere(scale, get_or_compute(lambda: lax.stop_gradient(matrix)))
    else:
        forward_source = PrequantizedInput(get_or_compute(make_residual), scale)
    # Codes that are rounded stochastically cannot be recomputed without their key.
    if facts.recompute_rule is None or (side.residual is not None and side.residual.rounding == "stochastic"):
        return forward_source
    return RecomputableInput(*facts.recompute_rule, forward_source)


def gradient_key(recipe: Linear, key: Array | None, uses: Sequence[str] = ("dy", "dy_wgrad")) -> Array | None:
    """The key for codes of the output's gradient in these uses; None if they are rounded to nearest.

    Raises:
        ValueError: they are rounded stochastically, and `key` is None.
    """
    stochastic_specs = [s for use in uses if (s := recipe.spec(use)) is not None and s.rounding == "stochastic"]
    return derive_key(key, stochastic_specs[0], "dy") if stochastic_specs else None


def fallback_input_source(
    x: Array,
    recipe: Linear,
    key: Array | None,
    threshold: Array,
    input_facts: InputFacts = NO_INPUT_FACTS,
) -> FallbackBlocks:
    """As `input_source`, of an input in blocks. Blocks above `threshold`, an fp32 scalar, fall back to 16 bits.

    Raises:
        ValueError: the recipe rounds saved codes stochastically, and `key` is None.
    """
    side = input_side(recipe)
    spec, residual_spec = recipe.quantized_spec("x"), recipe.quantized_spec("x_residual")
    subkey = derive_key(key, residual_spec, "x_residual")
    quantizer = functools.partial(fallback.quantize, *lax.stop_gradient((x,)), spec, lax.stop_gradient(threshold))
    fallback_tensors: list[FallbackTensor] = []

    def make_residual() -> QTensor:
        pair, codes = quantizer(key=subkey if residual_spec == fallback.with_stochastic_rounding(spec) else None)
        fallback_tensors.append(pair)
        if residual_spec == spec:
            return to_bytes(pair.base)
        return make_codes(x, residual_spec, side.strategy, key=subkey) if codes is None else to_bytes(codes)

    use = side.residual, side.strategy, x.shape
    codes = input_facts.get_or_compute(
        use, lambda: with_checkpoint_name(make_residual(), INPUT), None, None if subkey is None else key
    )
    # Another product may have made the saved codes. Each layer has its own threshold.
    return FallbackBlocks(fallback_tensors[0] if fallback_tensors else quantizer()[0], codes)
