"""Products of quantized matrices, both with the contraction along their last axis, as 8-bit matrix units want them."""

import math

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from fp8jax.core import blocks, formats
from fp8jax.core.qtensor import QTensor
from fp8jax.ops.quantize import transpose as transpose

Operand = QTensor | Array
_K_MAJOR = (((1,), (1,)), ((), ()))


def matmul(a: Operand, b: Operand, *, dtype: DTypeLike = jnp.float32) -> Array:
    """a @ b.T of matrices that may be quantized.

    Two quantized operands are multiplied as codes, with fp32 (for integers int32) accumulation, and their scales
    applied to the sum; scales that change along the contraction split it, and each part is promoted to fp32 under its
    own scales. Any other operand, and any whose codes matrix units do not take, is multiplied in bf16 (fp32 where the
    other operand is an fp32 array).

    Args:
        a: (M, K), quantized with any granularity but "channel", or a floating array.
        b: (N, K), likewise.
        dtype: of the result.

    Returns:
        (M, N) array.

    Raises:
        ValueError: shapes do not match, or an operand has a scale for each index of the contraction.
    """
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"matmul takes (M, K) and (N, K), not {a.shape} and {b.shape}")
    if not (isinstance(a, QTensor) and isinstance(b, QTensor) and multiplies(a) and multiplies(b)):
        wide = _plain_dtype(a, b)
        a, b = (x.dequantize(wide) if isinstance(x, QTensor) else x.astype(wide) for x in (a, b))
        return lax.dot_general(a, b, _K_MAJOR, preferred_element_type=jnp.float32).astype(dtype)
    size = math.gcd(*(_split(q) for q in (a, b)))
    if size == 0:
        sums = _codes_product(a.codes, b.codes)
        return (sums * _row_scales(a) * _row_scales(b).T).astype(dtype)
    return _promoted(a, b, size).astype(dtype)


def multiplies(q: QTensor) -> bool:
    """Whether matrix units take the codes of a quantized matrix as they are."""
    if q.spec.granularity == "channel":
        raise ValueError(f"{q.spec} has a scale for each index of the contraction, which no product of codes can apply")
    return formats.get(q.spec.format).multiplies and not q.spec.expand


def _plain_dtype(a: Operand, b: Operand) -> DTypeLike:
    plain = [x.dtype for x in (a, b) if not isinstance(x, QTensor)]
    return jnp.float32 if plain and all(d == jnp.float32 for d in plain) else jnp.bfloat16


def _codes_product(a: Array, b: Array) -> Array:
    integers = jnp.issubdtype(a.dtype, jnp.integer)
    sums = lax.dot_general(a, b, _K_MAJOR, preferred_element_type=jnp.int32 if integers else jnp.float32)
    return sums.astype(jnp.float32)


def _row_scales(q: QTensor) -> Array:
    """The scale of each row, (rows, 1), or (1, 1), of a matrix whose scales do not change along the contraction."""
    block_rows = q.spec.block_shape(q.shape)[0]
    return blocks.spread(q.scale.astype(jnp.float32), (q.shape[0], 1), (block_rows, 1))


def _split(q: QTensor) -> int:
    """Length along the contraction over which a scale holds; 0 where it holds over all."""
    length = q.shape[1]
    sized = q.spec.granularity in ("group", "block", "mx")
    size = q.spec.group_size if sized else 0
    assert size is not None
    return 0 if size >= length and q.spec.granularity != "mx" else size


def _promoted(a: QTensor, b: QTensor, size: int) -> Array:
    """Sums products over `size` long parts of the contraction, each under its own scales, in fp32."""
    parts = -(-a.shape[1] // size)

    def split(q: QTensor) -> tuple[Array, Array]:
        codes = jnp.pad(q.codes, ((0, 0), (0, parts * size - q.shape[1])))
        codes = codes.reshape(q.shape[0], parts, size).swapaxes(0, 1)
        return codes, _scales(q, size, parts).T[:, :, None]

    def add(sums: Array, part: tuple[tuple[Array, Array], tuple[Array, Array]]) -> tuple[Array, None]:
        (a_codes, a_scale), (b_codes, b_scale) = part
        return sums + _codes_product(a_codes, b_codes) * a_scale * b_scale.T, None

    zeros = jnp.zeros((a.shape[0], b.shape[0]), jnp.float32)
    return lax.scan(add, zeros, (split(a), split(b)))[0]


def _scales(q: QTensor, size: int, parts: int) -> Array:
    """The scale of each row in each part of the contraction, (rows, parts)."""
    shape = (q.shape[0], parts * size)
    scale = blocks.spread(q.scale.astype(jnp.float32), q.shape, q.spec.block_shape(q.shape))
    scale = jnp.broadcast_to(scale, q.shape)
    if q.microscale is not None:
        power = blocks.spread(formats.decode_e8m0(q.microscale), q.shape, q.spec.micro_shape(q.shape))
        scale = scale * power
    return jnp.pad(scale[:, ::size], ((0, 0), (0, parts - scale[:, ::size].shape[1])))[: shape[0]]
