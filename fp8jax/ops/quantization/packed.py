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
from fp8jax.ops.dispatch.choice import missing_triton, on_cuda
from fp8jax.ops.dispatch.partition import on_one_device

# A matrix, or the matrices of as many rows that one is side by side.
PackedMatrix = Array | tuple[Array, ...]


def concatenated(x: PackedMatrix) -> Array:
    """The matrix in one array."""
    return jnp.concatenate(x, 1) if isinstance(x, tuple) else x


def packed_shape(x: PackedMatrix) -> tuple[int, ...]:
    """Of the whole matrix."""
    return (x[0].shape[0], sum(y.shape[1] for y in x)) if isinstance(x, tuple) else x.shape


def can_quantize_unpacked(x: tuple[Array, ...], specs: Sequence[QuantSpec | None]) -> bool:
    """Whether the kernel that quantizes reads matrices where each lies: on one GPU, under one scale for all."""
    if not on_cuda() or not on_one_device() or missing_triton("quantization.quantize_triton") is not None:
        return False
    from pallas_kernels.quantization import quantize_triton

    return _is_per_tensor(specs) and quantize_triton.unsupported_packed_reason(x) is None


def should_split_output(recipe: Linear, split_sizes: Sequence[int]) -> bool:
    """Whether the result of a recipe's product costs less in arrays of these widths than cut out of one: where its
    gradients, too, are quantized from several. Narrow ones would be as many products of few columns."""
    specs = [recipe.spec(operand) for operand in ("w", "dy", "dy_wgrad")]
    section_shapes: Any = tuple(jax.ShapeDtypeStruct((1, n), jnp.bfloat16) for n in split_sizes)
    return None not in specs and not recipe.states and can_quantize_unpacked(section_shapes, specs)


def _is_per_tensor(specs: Sequence[QuantSpec | None]) -> bool:
    return all(spec is None or spec.granularity == "tensor" for spec in specs)


def split_weight(
    w_operand: QTensor | Array, bias: Array | None, split_sizes: Sequence[int] | None
) -> Iterator[tuple[QTensor | Array, Array | None]]:
    """The weight, (outputs, inputs), and the bias of each of several results; of one as they are."""
    if split_sizes is None:
        yield w_operand, bias
    start = 0
    for n in split_sizes or ():
        section = slice(start, start + n)
        start += n
        w_section = (
            replace(w_operand, codes=w_operand.codes[section]) if isinstance(w_operand, QTensor) else w_operand[section]
        )
        yield w_section, None if bias is None else bias[section]
