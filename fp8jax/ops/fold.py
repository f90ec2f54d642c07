"""Two-level microscaled codes folded into codes with one scale a row, which multiply at the speed of FP8 without it."""

import jax.numpy as jnp
from jax import Array

from fp8jax.core import blocks, formats
from fp8jax.core.qtensor import QTensor
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.choice import capability, choose_impl, missing_triton, record_choice, run
from fp8jax.ops.cuts import DimSharding
from fp8jax.ops.partition import run_partitioned

# Elements under one power of two, as the kernels take them.
GROUP_SIZE = 32


def is_foldable(q: QTensor) -> bool:
    """Whether `refold` takes a matrix: e4m3 codes microscaled by 32 of a row under a level 1 scale, not exact ones."""
    spec = q.spec
    rows = spec.axis in (-1, 1) and spec.group_size == GROUP_SIZE
    return spec.granularity == "mx" and spec.outer_scale != "none" and spec.format == "e4m3" and rows and not spec.exact


def fold_microscales(q: QTensor, *, impl: str = "auto") -> QTensor:
    """The powers of two of two-level codes folded into them, for the product of rows.

    As in `fp8jax.ops.microscaled.fold_rows`, the scale of a row takes up the largest of its powers, exactly, unless
    that would make it subnormal. A code that goes subnormal under what is left of its own power is rounded a second
    time.

    Args:
        q: (M, N), such that `foldable`.
        impl: "auto", "xla" or "triton".

    Returns:
        (M, N), of granularity "token".

    Raises:
        ValueError: `q` is another, `impl` is unknown, or it is "triton" and no kernel can run.
    """
    if not is_foldable(q):
        raise ValueError(f"refold takes e4m3 codes microscaled by 32 of a row under a level 1 scale, not {q.spec}")
    empty = f"shape {q.shape} is empty" if 0 in q.shape else None
    choice = choose_impl(impl, lambda: empty or missing_triton("fold_triton"))
    record_choice("refold", choice)
    assert q.microscale is not None
    operands = q.codes, q.microscale, q.scale.astype(jnp.float32)
    codes, scale = run(choice, impl, *operands, kernel=_fold_kernel, reference=_fold_reference)
    return QTensor(codes, scale, None, None, QuantSpec(q.spec.format, "token"))


def _fold_reference(codes: Array, powers: Array, outer_scale: Array) -> tuple[Array, Array]:
    largest = jnp.max(jnp.where(powers == 255, 0, powers), axis=-1, keepdims=True, initial=0)
    scale = outer_scale * formats.decode_e8m0(largest)
    is_normal = scale >= formats.TINY
    shift = jnp.where(is_normal, 127 - largest.astype(jnp.int32), 0)
    shifted_powers = jnp.where(powers == 255, 255, jnp.clip(powers + shift, 0, 254)).astype(jnp.uint8)
    power = blocks.broadcast_blocks(formats.decode_e8m0(shifted_powers), codes.shape, (1, GROUP_SIZE))
    folded = formats.decode_fp8(codes) * power
    return folded.astype(codes.dtype), jnp.where(is_normal, scale, outer_scale)


def _fold_kernel(codes: Array, powers: Array, outer_scale: Array) -> tuple[Array, Array]:
    from pallas_kernels.fold_triton import fold_codes

    def fold_shard(dim_sharding: DimSharding, *operands: Array) -> tuple[Array, Array]:
        return fold_codes(*operands, compute_capability=capability())

    scale = "m -" if outer_scale.shape[0] > 1 else "- -"
    folded: tuple[Array, Array] = run_partitioned(
        "refold", None, fold_shard, (codes, powers, outer_scale), ("m -", "m -", scale), ("m -", "m -"))  # fmt: skip
    return folded
