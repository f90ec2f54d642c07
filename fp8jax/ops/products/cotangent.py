"""The gradient of a product's result, as the matmuls of its backward pass read it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import SAME, Linear
from fp8jax.ops.autodiff.residuals import ArrayFacts
from fp8jax.ops.matmul.matmul import Operand
from fp8jax.ops.products.operands import encode
from fp8jax.ops.quantization import microscaling, packed
from fp8jax.ops.quantization.fused_reference import column_sums
from fp8jax.ops.quantization.quantize import quantize_and_sum


class CotangentOperands(NamedTuple):
    """The operands made from a gradient (tokens, outputs).

    Attributes:
        rows: operand of dgrad, (tokens, outputs).
        columns: operand of wgrad, (outputs, tokens).
        sums: gradient of the bias, the sums over tokens, fp32 (outputs,); None if they are not asked for.
    """

    rows: Operand
    columns: Operand
    sums: Array | None


def encode_cotangent(
    dy: packed.PackedMatrix,
    recipe: Linear,
    *,
    key: Array | None,
    scale: Array | None,
    facts: ArrayFacts,
    shares_token_scales: bool,
    x_token_scale: Array | None,
    with_sums: bool,
) -> CotangentOperands:
    """The operands of dgrad and wgrad, in one pass over the gradient if the formats allow it.

    Args:
        dy: (tokens, outputs), or the matrices that it consists of, side by side.
        recipe: of the product.
        key: PRNG key for codes that are rounded stochastically.
        scale: given scale of the codes; None computes it from `dy`.
        facts: what is known about `dy`.
        shares_token_scales: whether its scales go with those of the input's tokens
            (`fp8jax.ops.quantization.microscaling`).
        x_token_scale: scale of the input's codes, one or one per token; None if it is unknown.
        with_sums: whether to compute the gradient of a bias.
    """
    fused_output = facts.fused_output
    row_spec, column_spec, strategy = recipe.spec("dy"), recipe.spec("dy_wgrad"), recipe.stateless_scaling("dy")
    operands: tuple[Operand, Operand]
    if row_spec is None or column_spec is None or row_spec.is_folded or column_spec.is_folded:
        dy = packed.concatenated(dy)
        if shares_token_scales and row_spec is not None and row_spec.is_folded:
            operands = microscaling.gradient_operands(dy, row_spec, x_token_scale, fused_output)
            return CotangentOperands(*operands, column_sums(dy) if with_sums else None)
        keys = (None, None) if key is None else jax.random.split(key)
        operands = (
            encode(dy, row_spec, strategy, key=keys[0], scale=scale, fused_output=fused_output),
            encode(dy, column_spec, strategy, key=keys[1], scale=scale, transposed=True, fused_output=fused_output),
        )
        return CotangentOperands(*operands, column_sums(dy) if with_sums else None)
    transposed = SAME if recipe.dy_wgrad == SAME else column_spec
    (row_codes, column_codes), sums_over_tokens = quantize_and_sum(
        dy,
        row_spec,
        transposed,
        sums=with_sums,
        scale=scale,
        strategy=strategy,
        key=key,
        fused_output=fused_output,
        amax=facts.amax,
    )
    assert row_codes is not None
    assert column_codes is not None
    return CotangentOperands(row_codes, column_codes, sums_over_tokens)


def row_bounds(a: Operand, b: Operand) -> Array:
    """An upper bound of |a @ b.T| in each row, rounded to 16 bits: fp32 (rows,)."""

    def norms(x: Operand) -> Array:
        if isinstance(x, QTensor) and x.spec.granularity == "tensor":
            return norms(x.codes) * jnp.max(x.scale, initial=0.0)
        values = x.dequantize() if isinstance(x, QTensor) else x.astype(jnp.float32)
        return jnp.sqrt(jnp.sum(jnp.square(values), -1))

    return 1.01 * (norms(a) * jnp.max(norms(b), initial=0.0))
