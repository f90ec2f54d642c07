"""Matrices side by side: one to the products that make or read it, and several arrays to the rest of a program.

So are q, k and v that one product computes, and their gradients. Cut out of one array they would be copied, and their
gradients put together again: two passes over memory more, by which a step of GPT-2 350M at 16,384 tokens moves 9.6 GB.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fp8jax.core.qtensor import QTensor
from fp8jax.core.recipe import Linear
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.choice import missing_triton, on_cuda
from fp8jax.ops.partition import on_one_device

# A matrix, or the matrices of as many rows that one is side by side.
Matrix = Array | tuple[Array, ...]


def joined(x: Matrix) -> Array:
    """The matrix in one array."""
    return jnp.concatenate(x, 1) if isinstance(x, tuple) else x


def shape_of(x: Matrix) -> tuple[int, ...]:
    """Of the whole matrix."""
    return (x[0].shape[0], sum(y.shape[1] for y in x)) if isinstance(x, tuple) else x.shape


def quantized_apart(x: tuple[Array, ...], specs: Sequence[QuantSpec | None]) -> bool:
    """Whether the kernel that quantizes reads matrices where each lies: on one GPU, under one scale for all."""
    if not on_cuda() or not on_one_device() or missing_triton("quantize_triton") is not None:
        return False
    from pallas_kernels import quantize_triton

    return _of_tensors(specs) and quantize_triton.unfit_beside(x) is None


def comes_apart(recipe: Linear, widths: Sequence[int]) -> bool:
    """Whether the result of a recipe's product costs less in arrays of these widths than cut out of one: where its
    gradients, too, are quantized from several. Narrow ones would be as many products of few columns."""
    specs = [recipe.spec(operand) for operand in ("w", "dy", "dy_wgrad")]
    each: Any = tuple(jax.ShapeDtypeStruct((1, n), jnp.bfloat16) for n in widths)
    return None not in specs and not recipe.states and quantized_apart(each, specs)


def _of_tensors(specs: Sequence[QuantSpec | None]) -> bool:
    return all(spec is None or spec.granularity == "tensor" for spec in specs)


def parts(
    columns: QTensor | Array, bias: Array | None, widths: Sequence[int] | None
) -> Iterator[tuple[QTensor | Array, Array | None]]:
    """The weight, (outputs, inputs), and the bias of each of several results; of one as they are."""
    if widths is None:
        yield columns, bias
    start = 0
    for n in widths or ():
        here = slice(start, start + n)
        start += n
        of = replace(columns, codes=columns.codes[here]) if isinstance(columns, QTensor) else columns[here]
        yield of, None if bias is None else bias[here]
