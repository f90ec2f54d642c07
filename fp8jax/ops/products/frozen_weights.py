"""Weights that are not trained: one copy of their codes serves both products with them, a byte a parameter.

Nothing is kept for the gradient of such a weight, neither of the weight nor of the input, and there is no copy of it in
a wider format (`FrozenSource`). Codes are those of the transposed matrix, (outputs, inputs), as 8-bit
matrix units read them in the forward product; under recomputation that runs twice, and the backward product, which
reads them transposed, once.
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
    """A weight that is not trained, as codes: `freeze` makes it, `fp8jax.linear` multiplies it.

    Attributes:
        codes: of the transposed matrix, (..., outputs, inputs), as bytes, which may enter differentiated functions.
            Leading axes stack weights, as of the layers of a scanned model, with scales of their own.
        dtype: static; of the array that it stands for, to a model that reads it as a parameter.
        inputs, outputs: static; the sizes of the parameter's own axes, where it has several for either.
        transposed: static; it stands for the transposed matrix, of which these are the codes, (..., inputs, outputs).
    """

    codes: QTensor
    dtype: Any = dataclasses.field(default=jnp.dtype(jnp.bfloat16), metadata={"static": True})
    inputs: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    outputs: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., inputs, outputs); of the parameter with its own axes, where these are several."""
        *stacked, outputs, inputs = self.codes.shape
        if self.transposed:
            inputs, outputs = outputs, inputs
        return (*stacked, *(self.inputs or (inputs,)), *(self.outputs or (outputs,)))

    @property
    def matrix(self) -> "FrozenWeight":
        """The same as a matrix, or a stack of such."""
        return dataclasses.replace(self, inputs=(), outputs=())

    @property
    def T(self) -> "FrozenWeight":
        """The transposed matrix, by the same codes.

        Raises:
            ValueError: the codes' scales are not those of a transposed matrix, as those of groups or outputs.
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
    """A weight as codes of 8 bits, rounded to nearest under scales of its own.

    Args:
        w: (..., inputs, outputs), floating; leading axes stack weights.
        spec: of the transposed matrix: "e4m3", "e4m3:token" (a scale an output), "e4m3:block128", "e4m3:group128"
            (along the contraction), "e4m3:mx32", or the same of int8.
        axes: how many of the last axes are inputs and outputs: (1, 2) for a projection (channels, heads, width).

    Raises:
        ValueError: the weight is no matrix, or the spec has other than 8 bits or rounds stochastically.
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
    """Raises ValueError where a recipe's codes are integers and a weight's are not, or the reverse."""
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
    """The codes of a weight that is not trained as bytes, (outputs, inputs); where `transposed`, (inputs, outputs)."""

    codes: QTensor
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})
    token_scale = None

    def forward(self, matrix: Array | None, side: Side) -> ForwardOperand:
        return transpose(from_bytes(self.codes)) if self.transposed else from_bytes(self.codes)

    def residual(self, matrix: Array | None, operand: ForwardOperand, side: Side) -> "FrozenSource":
        return self

    def dgrad_operands(self, dy: Array, recipe: Linear, key: Array | None) -> tuple[Operand, Operand]:
        """The operands of the input's gradient: dy (tokens, outputs) and the weight (inputs, outputs).

        The codes are transposed where their scales serve that (a tensor, blocks, or an output's, which then are part of
        the gradient that is quantized), else decoded to 16 bits for the time of the product.
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
