"""Weights that are not trained, as 8-bit codes: one copy, a byte per parameter, for both products with the weight.

Such a weight has no gradient: a product saves neither its input nor a copy of the weight. The codes are those of the
transposed matrix, (outputs, inputs), as the forward product reads them. dgrad transposes them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import formats
from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import Linear
from fp8jax.core.spec import TRANSPOSABLE, QuantSpec
from fp8jax.ops.autodiff.residuals import from_bytes, to_bytes
from fp8jax.ops.dispatch.sharding import merge
from fp8jax.ops.matmul.matmul import Operand
from fp8jax.ops.products.operands import ForwardOperand, Side, encode
from fp8jax.ops.quantization.quantize import quantize, transpose


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FrozenWeight:
    """A weight that is not trained, as 8-bit codes. `freeze` makes it, and `fp8jax.linear` multiplies by it.

    Attributes:
        codes: of the transposed matrix, (..., outputs, inputs), as bytes. Leading axes stack weights, such as those of
            a scanned model, each with scales of its own.
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
            ValueError: the scales do not serve the transposed matrix, as scales per group or per output.
        """
        spec = self.codes.spec
        if spec.granularity not in TRANSPOSABLE or spec.expand:
            raise ValueError(f"codes of {spec} do not serve the transposed matrix; freeze as e4m3 or e4m3:block128")
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
        return decode(self.codes).reshape(self.shape)  # type: ignore[no-any-return]

    def __jax_array__(self, *_: Any) -> Any:
        raise TypeError(
            f"a frozen weight {self.shape} is no array: multiply it by fp8jax.linear, call the model through "
            "fp8jax.transform, fp8jax.nnx.quantize or fp8jax.linen.quantize, or take its values with dequantize()"
        )

    __getitem__ = __matmul__ = __rmatmul__ = __mul__ = __rmul__ = __jax_array__


def freeze(w: Array, spec: QuantSpec | str = "e4m3", axes: tuple[int, int] = (1, 1)) -> FrozenWeight:
    """A weight as 8-bit codes, rounded to nearest under scales of its own.

    Args:
        w: (..., inputs, outputs), floating; leading axes stack weights.
        spec: of the transposed matrix: "e4m3", "e4m3:token" (one scale per output), "e4m3:block128", "e4m3:group128"
            (along the contraction), "e4m3:mx32", or the same with int8.
        axes: how many of the last axes are inputs and outputs, such as (1, 2) for (channels, heads, width).

    Raises:
        ValueError: the weight is no matrix, or the spec does not have 8 bits or rounds stochastically.
    """
    spec, (ins, outs) = QuantSpec.parse(spec), axes
    if min(axes) < 1 or w.ndim < sum(axes):
        raise ValueError(
            f"freeze takes weights (..., inputs, outputs), with axes={axes}, not an array of shape {w.shape}"
        )
    if formats.get(spec.format).bits != 8 or spec.rounding != "nearest" or spec.layer_axes or spec.axis != -1:
        raise ValueError(f"a frozen weight has 8-bit codes rounded to nearest along its last axis, not {spec}")

    def encode_matrix(w: Array) -> QTensor:
        transposed = quantize(lax.stop_gradient(w), None, spec)[1]
        assert transposed is not None
        return to_bytes(transposed)

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
                f"linear.{name}={operand_spec} and a frozen weight of {weight_spec} are floating and integer codes: "
                f"freeze the weight in a format of the recipe's kind, or take recipe 'bf16', which decodes it"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FrozenSource:
    """The source of a frozen weight, and its residual.

    Attributes:
        codes: as bytes, (outputs, inputs); (inputs, outputs) if `transposed`.
    """

    codes: QTensor
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})
    token_scale = None

    def forward(self, matrix: Array | None, side: Side) -> ForwardOperand:
        return transpose(from_bytes(self.codes)) if self.transposed else from_bytes(self.codes)

    def residual(self, matrix: Array | None, operand: ForwardOperand, side: Side) -> "FrozenSource":
        return self

    def dgrad_operands(self, dy: Array, recipe: Linear, key: Array | None) -> tuple[Operand, Operand]:
        """The operands of dgrad: dy (tokens, outputs) and the weight (inputs, outputs).

        The codes are transposed if their scales allow it: per tensor, per block, or per output. Scales per output are
        multiplied into dy. Other codes are decoded to 16 bits for this product.
        """
        w = from_bytes(self.codes)
        if w.spec.granularity == "token" and not w.spec.expand:
            dy = (dy.astype(jnp.float32) * w.scale.astype(jnp.float32).T).astype(dy.dtype)
            plain = dataclasses.replace(w.spec, granularity="tensor", scale_format="fp32")
            w = dataclasses.replace(w, scale=jnp.ones((1, 1), jnp.float32), spec=plain)
        if w.spec.granularity not in TRANSPOSABLE or w.spec.expand:
            return dy, w.dequantize(jnp.float32 if dy.dtype == jnp.float32 else jnp.bfloat16).T
        rows = encode(dy, recipe.spec("dy"), recipe.stateless_scaling("dy"), key=key)
        return rows, w if self.transposed else transpose(w)
