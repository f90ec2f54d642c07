"""Sum of squares of many arrays in few launches: each program reads a piece of one array.

In: fp32, bf16 and fp16 arrays of any shapes. Out: fp32 (). Hardware: Turing or newer. Reference: `_reference` in
fp8jax/ops/optimizers/global_norm.py.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.dispatch import call_triton
from pallas_kernels.quantization.quantize_triton import PLAIN_DTYPES

FP8_CAPABILITY = 89
ARRAYS_PER_LAUNCH = 32  # fixed by the kernel's parameters
PIECE_SIZE = 65_536


@triton.jit
def _squares(
    sums_ptr: tl.tensor, table_ptr: tl.tensor,
    x0: tl.tensor, x1: tl.tensor, x2: tl.tensor, x3: tl.tensor, x4: tl.tensor, x5: tl.tensor,
    x6: tl.tensor, x7: tl.tensor, x8: tl.tensor, x9: tl.tensor, x10: tl.tensor, x11: tl.tensor,
    x12: tl.tensor, x13: tl.tensor, x14: tl.tensor, x15: tl.tensor, x16: tl.tensor, x17: tl.tensor,
    x18: tl.tensor, x19: tl.tensor, x20: tl.tensor, x21: tl.tensor, x22: tl.tensor, x23: tl.tensor,
    x24: tl.tensor, x25: tl.tensor, x26: tl.tensor, x27: tl.tensor, x28: tl.tensor, x29: tl.tensor,
    x30: tl.tensor, x31: tl.tensor,
    unused: tl.tensor, PIECE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store the sum of a piece. The table has ends in programs, sizes of last pieces, the index of the first sum."""
    program = tl.program_id(0)
    ends = tl.load(table_ptr + tl.arange(0, 32))
    array_index = tl.sum((ends <= program).to(tl.int32), 0)
    start = tl.max(tl.where(ends <= program, ends, 0), 0)
    end, last_size, first = (
        tl.load(table_ptr + array_index),
        tl.load(table_ptr + 32 + array_index),
        tl.load(table_ptr + 64),
    )
    arrays = (
        x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15, x16, x17, x18, x19, x20, x21, x22, x23,
        x24, x25, x26, x27, x28, x29, x30, x31,
    )  # fmt: skip
    x = x0
    for j in tl.static_range(1, 32):
        if array_index == j:
            x = arrays[j]
    x += (program - start).to(tl.int64) * PIECE
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.where(program + 1 == end, last_size, PIECE)
    if count < PIECE:
        for i in range(0, PIECE, BLOCK):
            value = tl.load(x + i + lanes, mask=i + lanes < count, other=0.0).to(tl.float32)
            total += value * value
    else:
        for i in range(0, PIECE, BLOCK):
            value = tl.load(x + i + lanes).to(tl.float32)
            total += value * value
    tl.store(sums_ptr + first + program, tl.sum(total, 0))


def sum_of_squares(
    arrays: Sequence[Array], *, piece: int = PIECE_SIZE, block: int = 4096, compute_capability: int | None = None
) -> Array:
    """Return the sum of the squares of all elements, an fp32 scalar, in a fixed order of its own.

    Args:
        arrays: fp32, bf16 or fp16, of any shapes.
        piece, block: elements per program, and at once; `block` divides `piece`; tuning only.
        compute_capability: GPU architecture to compile for, such as 90; None for the present GPU.

    Raises:
        ValueError: an array has another dtype.
    """
    kinds: dict[np.dtype, list[Array]] = {}
    for x in arrays:
        if x.dtype not in PLAIN_DTYPES:
            raise ValueError(f"the kernel sums squares of fp32, bf16 and fp16, not {x.dtype}")
        if x.size:
            kinds.setdefault(np.dtype(x.dtype), []).append(x.reshape(-1))
    array_groups = [
        group[i : i + ARRAYS_PER_LAUNCH] for group in kinds.values() for i in range(0, len(group), ARRAYS_PER_LAUNCH)
    ]
    pieces = [[-(-x.size // piece) for x in own] for own in array_groups]
    count = sum(map(sum, pieces))
    sums, first = jnp.zeros((count,), jnp.float32), 0
    for own, programs in zip(array_groups, pieces, strict=True):
        num_padding = ARRAYS_PER_LAUNCH - len(own)
        ends = np.cumsum(programs)
        last_sizes = [x.size - (n - 1) * piece for x, n in zip(own, programs, strict=True)]
        table = np.array([*ends, *[ends[-1]] * num_padding, *last_sizes, *[0] * num_padding, first], np.int32)
        (sums,) = call_triton.call(
            sums, jnp.asarray(table), *own, *[own[0]] * num_padding, kernel=_squares,
            out_shapes=[jax.ShapeDtypeStruct((count,), jnp.float32)], num_programs=int(ends[-1]), num_warps=8,
            compute_capability=compute_capability, aliases={0: 0}, PIECE=piece, BLOCK=block,
        )  # fmt: skip
        first += int(ends[-1])
    return jnp.sum(sums)
