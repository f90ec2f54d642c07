"""Packed matrices: one operand of a product as several arrays, such as q, k and v.

Slicing and concatenating them would each cost a pass over memory.
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

# A matrix, or a tuple of matrices that are concatenated along columns.
PackedMatrix = Array | tuple[Array, ...]


def concatenated(x: PackedMatrix) -> Array:
    """Return the matrix as one array."""
    return jnp.concatenate(x, 1) if isinstance(x, tuple) else x


def packed_shape(x: PackedMatrix) -> tuple[int, ...]:
    """Return the shape of the concatenated matrix."""
    return (x[0].shape[0], sum(y.shape[1] for y in x)) if isinstance(x, tuple) else x.shape


def can_quantize_unpacked(x: tuple[Array, ...], specs: Sequence[QuantSpec | None]) -> bool:
    """Return whether the kernel can quantize the matrices in place: on one GPU, under one scale."""
    if not on_cuda() or not on_one_device() or missing_triton("quantization.quantize_triton") is not None:
        return False
    from pallas_kernels.quantization import quantize_triton

    return _is_per_tensor(specs) and quantize_triton.unsupported_packed_reason(x) is None


def should_split_output(recipe: Linear, split_sizes: Sequence[int]) -> bool:
    """Return whether to compute a product's result as several arrays of these widths.

    This needs gradients that can be quantized without concatenation. Narrow arrays would be inefficient products.
    """
    specs = [recipe.spec(operand) for operand in ("w", "dy", "dy_wgrad")]
    section_shapes: Any = tuple(jax.ShapeDtypeStruct((1, n), jnp.bfloat16) for n in split_sizes)
    return None not in specs and not recipe.states and can_quantize_unpacked(section_shapes, specs)


def _is_per_tensor(specs: Sequence[QuantSpec | None]) -> bool:
    return all(spec is None or spec.granularity == "tensor" for spec in specs)


def split_weight(
    w_operand: QTensor | Array, bias: Array | None, split_sizes: Sequence[int] | None
) -> Iterator[tuple[QTensor | Array, Array | None]]:
    """Yield the weight (outputs, inputs) and bias of each section, or the inputs unchanged without `split_sizes`."""
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
