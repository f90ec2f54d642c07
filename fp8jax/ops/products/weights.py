"""Weights of a step: the codes of a weight in the two layouts that its products read.

A frozen weight has one copy of codes, a byte per parameter, for both products. It has no gradient: a product saves
neither its input nor a copy of the weight. The codes are those of the transposed matrix, (outputs, inputs), as the
forward product reads them. dgrad transposes them.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import formats
from fp8jax.core.qtensor import QTensor, from_bytes, to_bytes
from fp8jax.core.recipe import SAME, Linear, Recipe
from fp8jax.core.spec import TRANSPOSABLE, QuantSpec
from fp8jax.ops.autodiff.checkpointing import PRODUCT_AUX, with_checkpoint_name
from fp8jax.ops.autodiff.residuals import CotangentFacts
from fp8jax.ops.dispatch.choice import on_cuda
from fp8jax.ops.dispatch.partition import on_one_device
from fp8jax.ops.dispatch.sharding import merge
from fp8jax.ops.matmul.matmul import Operand
from fp8jax.ops.products.operands import ForwardOperand, Side, convert_scale_to_spec, encode, make_codes
from fp8jax.ops.quantization.quantize import quantize, transpose
from fp8jax.recipes import linear_part


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FrozenWeight:
    """A frozen weight as 8-bit codes, created by `freeze` and multiplied by `fp8jax.linear`.

    Attributes:
        codes: of the transposed matrix, (..., outputs, inputs), as bytes. Leading axes stack weights, such as those of
            a scanned model, each with its own scales.
        dtype: static; of the parameter that it replaces.
        inputs, outputs: static; the sizes of the parameter's axes, if it has several axes of inputs or outputs.
        transposed: static; whether it replaces the transposed matrix. Its codes are then (..., inputs, outputs).
    """

    codes: QTensor
    dtype: Any = dataclasses.field(default=jnp.dtype(jnp.bfloat16), metadata={"static": True})
    inputs: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    outputs: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., inputs, outputs), with all axes of the parameter."""
        *stacked, outputs, inputs = self.codes.shape
        if self.transposed:
            inputs, outputs = outputs, inputs
        return (*stacked, *(self.inputs or (inputs,)), *(self.outputs or (outputs,)))

    @property
    def matrix(self) -> "FrozenWeight":
        """The same weight as a matrix, or as a stack of matrices."""
        return dataclasses.replace(self, inputs=(), outputs=())

    @property
    def T(self) -> "FrozenWeight":
        """The transposed matrix, with the same codes.

        Raises:
            ValueError: the scales, such as those per group or per output, cannot be used for the transposed matrix.
        """
        spec = self.codes.spec
        if spec.granularity not in TRANSPOSABLE or spec.expand:
            raise ValueError(f"codes of {spec} cannot be used transposed; freeze as 'e4m3' or 'e4m3:block128'")
        return dataclasses.replace(self, inputs=self.outputs, outputs=self.inputs, transposed=not self.transposed)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Array:
        """The values, in the shape of the weight."""
        decode = lambda q: from_bytes(q).dequantize(dtype) if self.transposed else from_bytes(q).dequantize(dtype).T  # noqa: E731
        for _ in self.codes.shape[:-2]:
            decode = jax.vmap(decode)
        return decode(self.codes).reshape(self.shape)

    def __jax_array__(self, *_: Any) -> Any:
        raise TypeError(
            f"a frozen weight {self.shape} is not an array. Multiply it with fp8jax.linear, call the model through "
            "fp8jax.transform, fp8jax.nnx.quantize or fp8jax.linen.quantize, or call dequantize() for its values"
        )

    __getitem__ = __matmul__ = __rmatmul__ = __mul__ = __rmul__ = __jax_array__


def freeze(w: Array, spec: QuantSpec | str = "e4m3", axes: tuple[int, int] = (1, 1)) -> FrozenWeight:
    """A weight as 8-bit codes, rounded to nearest under its own scales.

    Args:
        w: (..., inputs, outputs), floating; leading axes stack weights.
        spec: of the transposed matrix: "e4m3", "e4m3:token" (one scale per output), "e4m3:block128", "e4m3:group128"
            (along the contraction), "e4m3:mx32", or the same with int8.
        axes: how many of the last axes are inputs and outputs, such as (1, 2) for (channels, heads, width).

    Raises:
        ValueError: the weight is not a matrix, or the spec does not have 8 bits or rounds stochastically.
    """
    spec, (ins, outs) = QuantSpec.parse(spec), axes
    if min(axes) < 1 or w.ndim < sum(axes):
        raise ValueError(
            f"freeze expects weights (..., inputs, outputs) with axes={axes}, got an array of shape {w.shape}"
        )
    if formats.get(spec.format).bits != 8 or spec.rounding != "nearest" or spec.layer_axes or spec.axis != -1:
        raise ValueError(f"a frozen weight needs an 8-bit spec along its last axis that rounds to nearest, got {spec}")

    def encode_matrix(w: Array) -> QTensor:
        return to_bytes(quantize(lax.stop_gradient(w), None, spec)[1])

    n_stacked = w.ndim - ins - outs
    inputs, outputs = w.shape[n_stacked : n_stacked + ins], w.shape[n_stacked + ins :]
    for _ in range(n_stacked):
        encode_matrix = jax.vmap(encode_matrix)
    codes = encode_matrix(merge(w, *[1] * n_stacked, ins, outs))
    return FrozenWeight(codes, w.dtype, inputs if ins > 1 else (), outputs if outs > 1 else ())


def check_same_kind(recipe: Linear, weight_spec: QuantSpec) -> None:
    """Raises ValueError if the codes of a recipe are integers and those of a weight are not, or the reverse."""
    for name in ("x", "dy"):
        operand_spec = recipe.spec(name)
        if (
            operand_spec is not None
            and formats.get(operand_spec.format).is_float != formats.get(weight_spec.format).is_float
        ):
            raise ValueError(
                f"linear.{name}={operand_spec} and a frozen weight of {weight_spec} mix floating-point and integer "
                "codes. Freeze the weight in a format of the recipe's kind, or use the recipe 'bf16', which "
                "dequantizes it"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FrozenSource:
    """The source of a frozen weight, and its residual.

    Attributes:
        codes: as bytes, (outputs, inputs), or a stack of such; (inputs, outputs) if `transposed`.
    """

    codes: QTensor
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})
    codes_scale = None

    def forward(self, matrix: Array | None, side: Side) -> ForwardOperand:
        return self._transpose_codes() if self.transposed else from_bytes(self.codes)

    def _transpose_codes(self) -> QTensor:
        q = self.codes
        if q.codes.ndim == 2:
            return transpose(from_bytes(q))
        # As bytes: XLA for CPUs without optimization returned wrong values for transposed FP8 constants.
        codes, scale = (jnp.swapaxes(x, 1, 2) for x in (q.codes, q.scale))
        return from_bytes(dataclasses.replace(q, codes=codes, scale=scale))

    def dgrad_codes(self) -> Operand:
        """Matrices (groups, inputs, outputs) of a stack. Codes that do not serve dgrad are decoded to 16 bits."""
        spec = self.codes.spec
        if spec.granularity in TRANSPOSABLE and not spec.expand:
            return from_bytes(self.codes) if self.transposed else self._transpose_codes()
        return jnp.swapaxes(jax.vmap(lambda q: from_bytes(q).dequantize(jnp.bfloat16))(self.codes), 1, 2)

    def residual(self, matrix: Array | None, operand: ForwardOperand, side: Side) -> "FrozenSource":
        return self

    def dgrad_operands(self, dy: Array, recipe: Linear, key: Array | None) -> tuple[Operand, Operand, Array]:
        """The operands of dgrad: dy (tokens, outputs) and the weight (inputs, outputs).

        The codes are transposed if their scales allow it: per tensor, per block, or per output. Scales per output are
        multiplied into dy. Other codes are decoded to 16 bits for this product.

        Returns:
            The operands, and the values of the first one before it is quantized.
        """
        w = from_bytes(self.codes)
        if w.spec.granularity == "token" and not w.spec.expand:
            dy = (dy.astype(jnp.float32) * w.scale.astype(jnp.float32).T).astype(dy.dtype)
            per_tensor = dataclasses.replace(w.spec, granularity="tensor", scale_format="fp32")
            w = dataclasses.replace(w, scale=jnp.ones((1, 1), jnp.float32), spec=per_tensor)
        if w.spec.granularity not in TRANSPOSABLE or w.spec.expand:
            return dy, w.dequantize(jnp.float32 if dy.dtype == jnp.float32 else jnp.bfloat16).T, dy
        rows = encode(dy, recipe.spec("dy"), recipe.stateless_strategy("dy"), key=key)
        return rows, w if self.transposed else transpose(w), dy


class QuantizedWeight(NamedTuple):
    """A weight quantized for its products by `quantize_weight`, once for all calls of a step.

    Codes are stored as bytes. A differentiated function cannot have FP8 inputs.

    Attributes:
        forward: (outputs, inputs).
        dgrad: (inputs, outputs).
    """

    forward: QTensor
    dgrad: QTensor


class LayoutPolicy(enum.Enum):
    """When a product makes the two layouts of its weight's codes: each when it is read, or both in one pass."""

    EACH_WHEN_READ = "each when read"  # the forward and the backward pass each quantize the weight
    BOTH_FOR_GRADIENT = "both for gradient"  # in the forward pass, if a backward pass follows
    BOTH_ALWAYS = "both always"  # in the forward pass


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["forward_codes", "dgrad_codes", "values", "scale"],
    meta_fields=["to_weight", "transposed", "is_scale_clamped", "layout_policy"],
)
@dataclasses.dataclass(frozen=True)
class StepWeight:
    """The weight of a product: its codes, or what they are made from. It is the weight's source and its residual.

    Attributes:
        forward_codes: (outputs, inputs), as bytes; None if the product makes them.
        dgrad_codes: (inputs, outputs), as bytes; None if the product makes them.
        values: what `to_weight` makes the weight from, saved in place of the weight; None for the weight itself.
        scale: fp32 scale of the codes that the product makes; None computes it from the weight.
        to_weight: makes the weight from `values`; None if `values` are the weight.
        transposed: whether the last step of `to_weight` transposes a matrix. The product then quantizes that matrix,
            and makes no transposed copy of the values.
        is_scale_clamped: whether codes were made under `scale` before.
    """

    forward_codes: QTensor | None = None
    dgrad_codes: QTensor | None = None
    values: Any = None
    scale: Array | None = None
    to_weight: Callable[[Any], Array] | None = None
    transposed: bool = False
    is_scale_clamped: bool = False
    layout_policy: LayoutPolicy = LayoutPolicy.EACH_WHEN_READ
    codes_scale = None

    @classmethod
    def from_codes(
        cls, quantized: QuantizedWeight | None, layout_policy: LayoutPolicy = LayoutPolicy.EACH_WHEN_READ
    ) -> "StepWeight":
        """A weight with these codes, if there are any."""
        forward_codes, dgrad_codes = (None, None) if quantized is None else quantized
        return cls(forward_codes=forward_codes, dgrad_codes=dgrad_codes, layout_policy=layout_policy)

    def with_step(
        self, step: Callable[[Array], Array], *, values: Any = None, transposed: bool | None = None
    ) -> "StepWeight":
        """A weight that is `step` of this one, made from the same values; from `values` if this one has none."""
        to_weight = self.to_weight
        return dataclasses.replace(
            self,
            values=values if self.values is None else self.values,
            to_weight=step if to_weight is None else lambda values: step(to_weight(values)),
            transposed=self.transposed if transposed is None else transposed,
        )

    def quantized_for_gradient(self, w: Array, recipe: Linear) -> "StepWeight":
        """The weight `w` of a forward pass that a backward pass follows.

        On one GPU it has both layouts, if its scale is its own. One byte per parameter is then saved, and the backward
        pass does not read the weight.
        """
        if self.layout_policy is LayoutPolicy.EACH_WHEN_READ or self.dgrad_codes is not None or self.scale is not None:
            return self
        if not on_cuda() or not on_one_device() or not w.size:
            return self
        quantized = quantize_in_one_pass(jnp.swapaxes(w, -1, -2) if self.transposed else w, recipe)
        if quantized is None:
            return self
        if self.transposed:
            quantized = QuantizedWeight(quantized.dgrad, quantized.forward)
        dgrad_codes = with_checkpoint_name(quantized.dgrad, PRODUCT_AUX)
        return StepWeight.from_codes(quantized._replace(dgrad=dgrad_codes), self.layout_policy)

    def forward(self, w: Array, side: Side) -> ForwardOperand:
        """The operand of the forward product."""
        if self.forward_codes is not None:
            return from_bytes(self.forward_codes)
        return encode(
            w, side.forward, side.strategy, scale=self.scale, transposed=True, x_is_transposed=self.transposed
        )

    def residual(self, w: Array, operand: ForwardOperand, side: Side) -> "StepWeight":
        """Return the residual: the codes of dgrad, or the values to compute them from."""
        if self.dgrad_codes is not None:
            return StepWeight(dgrad_codes=self.dgrad_codes, layout_policy=self.layout_policy)
        keeps_scale = side.is_per_tensor and isinstance(operand, QTensor)
        scale = operand.scale if keeps_scale else convert_scale_to_spec(self.scale, side.forward, side.backward)  # type: ignore[union-attr]
        return dataclasses.replace(
            self,
            values=w if self.values is None else self.values,
            scale=with_checkpoint_name(scale, PRODUCT_AUX),
            is_scale_clamped=keeps_scale,
        )

    def operand(self, side: Side, cotangent_facts: CotangentFacts | None) -> Operand:
        """The operand of dgrad, of a residual."""
        if self.dgrad_codes is not None:
            return from_bytes(self.dgrad_codes)
        return encode(
            self.values if self.to_weight is None else self.to_weight(self.values),
            side.backward,
            side.strategy,
            scale=self.scale,
            is_scale_clamped=self.is_scale_clamped,
            x_is_transposed=self.transposed,
        )


NO_CODES = StepWeight()


def weight_source(
    w: Array | FrozenWeight,
    recipe: Linear,
    *,
    step_weight: StepWeight,
    scale: Array | None = None,
) -> StepWeight | FrozenSource:
    """The source of a weight (inputs, outputs), which decides what the product saves of it.

    Args:
        step_weight: what is given of `w`: its codes, or what it is made from.
        scale: fp32 scalar, given for codes that the product makes; None computes it from `w`.

    Returns:
        A `FrozenSource` for a frozen weight, else a `StepWeight`. It has the given codes, or codes that are made here
        (`LayoutPolicy.BOTH_ALWAYS`), or none: `w` is then quantized when the product reads it.

    Raises:
        ValueError: the given codes are of another shape or recipe, or are given for a frozen weight. The codes of a
            frozen weight are integers and those of the recipe are not, or the reverse.
    """
    forward_codes, dgrad_codes = step_weight.forward_codes, step_weight.dgrad_codes
    if isinstance(w, FrozenWeight):
        if dgrad_codes is not None:
            raise ValueError("a frozen weight is already quantized; omit quantized=")
        check_same_kind(recipe, w.codes.spec)
        return FrozenSource(w.codes, w.transposed)
    if forward_codes is None or dgrad_codes is None:
        quantized = None
        if scale is None and step_weight.layout_policy is LayoutPolicy.BOTH_ALWAYS:
            quantized = quantize_in_one_pass(w, recipe)
        if quantized is None:
            return dataclasses.replace(step_weight, scale=scale)
        return StepWeight.from_codes(quantized, step_weight.layout_policy)
    shape, *specs = dgrad_codes.shape, forward_codes.spec, dgrad_codes.spec
    if shape != w.shape or specs != [recipe.spec("w"), recipe.spec("w_dgrad")]:
        expected = f"{w.shape} of specs {recipe.w} and {recipe.w_dgrad}"
        raise ValueError(
            f"a weight of shape {expected} was passed with a quantized weight of {shape}, {specs[0]} and {specs[1]}"
        )
    # Given codes need nothing that they could be made from.
    return dataclasses.replace(step_weight, values=None, to_weight=None)


def quantize_weight(w: Array, *, recipe: Recipe | Linear | str, scale: Array | None = None) -> QuantizedWeight:
    """Quantizes a weight for the products of a recipe, once for all calls of `fp8jax.linear` in a step.

    With gradient accumulation, the microbatches of a step share the scales and codes of the weight and of its
    transposed copy. Each copy needs one byte per parameter:

        quantized = fp8jax.quantize_weight(w, recipe=recipe)
        y = fp8jax.linear(x, w, recipe=recipe, quantized=quantized)

    Args:
        w: (inputs, outputs), any floating dtype. Leading axes stack weights, such as those of experts, each with its
            own scales. Gradients flow to the `w` that is passed to `linear`, not to this one.
        recipe: a `Recipe`, its part `Linear`, or a preset's name; it quantizes the weight in both products.
        scale: fp32 scalar (with leading axes: of their shape), for granularity "tensor" and the format of the forward
            product. None computes it from `w`.

    Returns:
        Codes with their scales, rounded to nearest. They are valid until `w` changes.

    Raises:
        ValueError: a product of the recipe reads the weight unquantized.
    """
    linear_recipe = linear_part(recipe)
    if w.ndim > 2:
        quantize_matrix = functools.partial(quantize_weight, recipe=linear_recipe)
        return jax.vmap(lambda w, scale: quantize_matrix(w, scale=scale))(w, scale)
    forward, dgrad = linear_recipe.spec("w"), linear_recipe.spec("w_dgrad")
    if forward is None or dgrad is None:
        raise ValueError(
            f"the recipe computes with w={linear_recipe.w!r}, w_dgrad={linear_recipe.w_dgrad!r}; both must be quantized"
        )
    strategy = linear_recipe.stateless_strategy("w")
    if one_pass_spec(linear_recipe) is not None:
        rows, transposed = quantize(lax.stop_gradient(w), dgrad, SAME, scale=scale, strategy=strategy)
        return QuantizedWeight(to_bytes(transposed), to_bytes(rows))
    dgrad_scale = convert_scale_to_spec(scale, forward, dgrad)
    return QuantizedWeight(
        make_codes(w, forward, strategy, transposed=True, scale=scale),
        make_codes(w, dgrad, strategy, scale=dgrad_scale),
    )


def quantize_in_one_pass(w: Array, recipe: Linear) -> QuantizedWeight | None:
    """`quantize_weight`; None if it needs more than one pass over the matrix."""
    return None if one_pass_spec(recipe) is None else quantize_weight(w, recipe=recipe)


def one_pass_spec(recipe: Linear) -> QuantSpec | None:
    """The spec of a weight's codes if both products read the same codes, one of them transposed; else None."""
    spec = recipe.spec("w")
    if spec is None or spec != recipe.spec("w_dgrad") or spec.rounding != "nearest":
        return None
    return spec if spec.granularity in TRANSPOSABLE else None
