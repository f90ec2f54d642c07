"""The gradient of a product's result, as the products of its backward pass read it, with what else one pass gives."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import SAME, Linear
from fp8jax.ops import beside, fused, microscaled
from fp8jax.ops.fused_reference import column_sums
from fp8jax.ops.matmul import Operand
from fp8jax.ops.operand import encode
from fp8jax.ops.quantize import quantize_and_sum
from fp8jax.ops.saved import Origin


class Cotangent(NamedTuple):
    """A gradient (tokens, outputs).

    Attributes:
        rows: for the input's gradient. columns: for the weight's, (outputs, tokens).
        sums: over tokens, fp32 (outputs,): the gradient of a bias; None where that is not wanted.
    """

    rows: Operand
    columns: Operand
    sums: Array | None


def quantized(
    dy: beside.Matrix,
    recipe: Linear,
    *,
    key: Array | None,
    scale: Array | None,
    origin: Origin,
    shared: bool,
    tokens: Array | None,
    sums: bool,
) -> Cotangent:
    """A gradient as a recipe has it.

    Args:
        dy: (tokens, outputs); or the matrices that it is side by side.
        recipe: of the product.
        key: for codes rounded stochastically.
        scale: given for its codes; None takes it from `dy`.
        origin: what is known of it.
        shared: whether its scales go with those of the input's tokens (`fp8jax.ops.microscaled`).
        tokens: the scale of the input's codes, one or one a token, if that is known.
        sums: whether its sums are wanted.
    """
    part = origin.part
    rows, columns, strategy = recipe.spec("dy"), recipe.spec("dy_wgrad"), recipe.own_strategy("dy")
    pair: tuple[Operand, Operand]
    if rows is None or columns is None or rows.folds or columns.folds:
        dy = beside.joined(dy)
        if shared and rows is not None and rows.folds:
            pair = microscaled.gradient_operands(dy, rows, tokens, part)
            return Cotangent(*pair, column_sums(dy) if sums else None)
        keys = (None, None) if key is None else jax.random.split(key)
        pair = (
            encode(dy, rows, strategy, key=keys[0], scale=scale, part=part),
            encode(dy, columns, strategy, key=keys[1], scale=scale, transposed=True, part=part),
        )
        return Cotangent(*pair, column_sums(dy) if sums else None)
    transposed = SAME if recipe.dy_wgrad == SAME else columns
    (first, second), total = quantize_and_sum(
        dy, rows, transposed, sums=sums, scale=scale, strategy=strategy, key=key, part=part, largest=origin.peak
    )
    assert first is not None
    assert second is not None
    return Cotangent(first, second, total)


def row_bounds(a: Operand, b: Operand, others: Array | None) -> Array:
    """An upper bound of the magnitudes in each row of a @ b.T + others, rounded to 16 bits: fp32 (rows,)."""

    def norms(x: Operand) -> Array:
        if isinstance(x, QTensor) and x.spec.granularity == "tensor":
            return norms(x.codes) * jnp.max(x.scale, initial=0.0)
        values = x.dequantize() if isinstance(x, QTensor) else x.astype(jnp.float32)
        return jnp.sqrt(jnp.sum(jnp.square(values), -1))

    bound = norms(a) * jnp.max(norms(b), initial=0.0)
    if others is not None:
        bound = bound + jnp.max(jnp.abs(fused.matrix(others)), -1, initial=0.0).astype(jnp.float32)
    return 1.01 * bound
