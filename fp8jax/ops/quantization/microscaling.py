"""Microscaled operands of a linear layer's three products (MOSS, section 3.1). Each value is rounded once.

Forward and dgrad contract rows: powers of two are folded into the codes (`fold_rows`), and the row scale is applied
after the sum. Wgrad contracts tokens, where both operands have a scale per token:

- The gradient's codes are transposed unchanged. Both operands' token scales are applied to the input.
- If the input is saved as codes, they are shifted. The gradient's row scales are chosen such that the product of both
  scales is a power of two, so only exponents change.
- If the input is recomputed, it is multiplied by the gradient's scales before it is rounded.

A shifted e4m3 code is exact within 2^-14.8 of the largest. It loses a bit per octave below, and underflows under
2^-18.8. See results/pages/moss_snr.md.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core import blocks, formats, scaling
from fp8jax.core.qtensor import QTensor, quantize_with_scale
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.dispatch.choice import capability, choose_impl, missing_triton, record_choice, run
from fp8jax.ops.dispatch.partition import DimSharding, run_partitioned
from fp8jax.ops.quantization import fused_outputs
from fp8jax.ops.quantization.fused_reference import compute_row_amax
from fp8jax.ops.quantization.quantize import quantize, transpose

# Group size of the kernels.
GROUP_SIZE = 32


def is_foldable(q: QTensor) -> bool:
    """Return whether `fold_microscales` supports a matrix: e4m3, groups of 32 per row, an outer scale, not exact."""
    spec = q.spec
    rows = spec.axis in (-1, 1) and spec.group_size == GROUP_SIZE
    return (
        spec.granularity == "mx" and spec.outer_scale != "none" and spec.format == "e4m3" and rows and spec.fold_scales
    )


def fold_microscales(q: QTensor, *, impl: str = "auto") -> QTensor:
    """Fold the powers of two of microscaled codes into the codes.

    As in `fold_rows`, the row scale absorbs the largest power of the row, unless it would become subnormal. Codes that
    become subnormal are rounded a second time.

    Args:
        q: QTensor (M, N) for which `is_foldable` is True.

    Returns:
        QTensor (M, N) of granularity "token".

    Raises:
        ValueError: `q` or `impl` is unsupported, or `impl` is "triton" and the kernel cannot run.
    """
    if not is_foldable(q):
        raise ValueError(
            "fold_microscales expects e4m3 codes with a microscale per 32 elements of a row and an outer scale, got "
            f"{q.spec}"
        )
    empty = f"shape {q.shape} is empty" if 0 in q.shape else None
    choice = choose_impl(impl, lambda: empty or missing_triton("quantization.fold_triton"))
    record_choice("fold_microscales", choice)
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
    from pallas_kernels.quantization.fold_triton import fold_codes

    def fold_shard(dim_sharding: DimSharding, *operands: Array) -> tuple[Array, Array]:
        return fold_codes(*operands, compute_capability=capability())

    scale = "m -" if outer_scale.shape[0] > 1 else "- -"
    return run_partitioned(
        "fold_microscales", None, fold_shard, (codes, powers, outer_scale), ("m -", "m -", scale), ("m -", "m -")
    )


# Bound on the ratio of a recomputed input to the original, from rounding of the saved arrays.
RECOMPUTE_HEADROOM = 1.13
# The largest scale whose reciprocal is a normal number.
MAX_INVERTIBLE_SCALE = 2.0**125


def fold_rows(
    x: Array,
    spec: QuantSpec,
    outer_scale: Array | None = None,
    *,
    fused_output: fused_outputs.FusedOutput | None = None,
    impl: str = "auto",
) -> QTensor:
    """Quantize a matrix with microscaling, folded into a scale per row (MOSS, section 3).

    The row scale absorbs the largest power of two of its groups. The others are applied before rounding. The codes are
    those of microscaling until they become subnormal.

    Args:
        x: floating array (M, N).
        spec: of granularity "mx" with an outer scale.
        outer_scale: fp32 (M, 1), or None to compute it from `x`. A row's scale is the smallest power of two times its
            outer scale that fits the row. A row of zeros gets the smallest normal number.
        fused_output: describes how `x` is computed, if known.
        impl: "auto", "xla" or "triton", as in `fp8jax.ops.quantization.quantize.quantize`.

    Returns:
        QTensor (M, N) of granularity "token".
    """
    row_spec = QuantSpec(spec.format, "token")
    if outer_scale is None and (fused_rows := fused_outputs.cached_row_codes(fused_output, spec)) is not None:
        return fused_rows
    if (outer_scale is None and spec.outer_scale == "token") or 0 in x.shape:
        # The largest group of a row has power 1, so the codes are those of a scale per row.
        return quantize(x, row_spec, impl=impl)[0]
    choice = record_choice("fold", choose_impl(impl, lambda: _unsupported_reason(x, spec)))
    reference, kernel = (functools.partial(f, spec) for f in (_reference, _kernel))
    return run(choice, impl, x, outer_scale, kernel=kernel, reference=reference)


def _unsupported_reason(x: Array, spec: QuantSpec) -> str | None:
    if (reason := missing_triton("quantization.quantize_triton")) is not None:
        return reason
    from pallas_kernels.quantization import quantize_rows_triton

    return quantize_rows_triton.unsupported_reason(
        x.shape, x.dtype, fused_outputs.to_coding(QuantSpec(spec.format, "token"))
    )


def _reference(spec: QuantSpec, x: Array, outer_scale: Array | None) -> QTensor:
    fmt, row_amax = formats.get(spec.format), compute_row_amax(x)[:, None]
    if outer_scale is None:
        outer_scale = scaling.to_scale(jnp.max(row_amax, initial=0.0), fmt)
    return quantize_with_scale(x, QuantSpec(spec.format, "token"), scaling.pow2_scale(row_amax, outer_scale, fmt))


def _kernel(spec: QuantSpec, x: Array, outer_scale: Array | None) -> QTensor:
    from pallas_kernels.quantization import quantize_rows_triton

    fmt, row_spec = formats.get(spec.format), QuantSpec(spec.format, "token")

    def fold(dim_sharding: DimSharding, x: Array, shard_scale: Array | None) -> tuple[Array, Array]:
        if shard_scale is None:
            shard_scale = scaling.to_scale(dim_sharding.pmax(scaling.compute_amax(x), "m"), fmt)
        coding = fused_outputs.to_coding(row_spec)
        return quantize_rows_triton.quantize_rows(x, coding, outer_scale=shard_scale, compute_capability=capability())

    codes, scale = run_partitioned(
        "fold_rows", spec, fold, (x, outer_scale), ("m -", None if outer_scale is None else "m -"), ("m -", "m -")
    )
    return QTensor(codes, scale, None, None, row_spec)


def gradient_operands(
    dy: Array, spec: QuantSpec, scale: Array | None, fused_output: fused_outputs.FusedOutput | None = None
) -> tuple[QTensor, QTensor]:
    """Quantize the output's gradient for dgrad, as `fold_rows` does, and transpose its codes for wgrad.

    Args:
        dy: floating array (tokens, outputs).
        spec: of granularity "mx" with an outer scale.
        scale: scale of the input's codes, one or one per token, or None if the input is recomputed. It matters for an
            outer scale per token. Scales of `dy` are then powers of two divided by the significand of `scale`. The
            product of both scales is thus a power of two, as `rescale_rows_pow2` needs.
        fused_output: describes how `dy` is computed, if known.

    Returns:
        QTensor (tokens, outputs) of granularity "token"; QTensor (outputs, tokens) of "tensor" with scale
        `token_scale_unit(rows)`. The input, which is the other operand of wgrad, is multiplied by the
        `relative_token_scales` of the first result.
    """
    if spec.outer_scale == "tensor":
        rows = fold_rows(dy, spec)
        return rows, transpose_codes(rows)
    ones = jnp.ones((dy.shape[0], 1), jnp.float32)
    # Only the significand of `scale` matters. Its exponent could leave the range of fp32.
    outer_scale = None if scale is None else ones / formats.significand(scale.astype(jnp.float32))
    if (operands := fused_outputs.quantize_cotangent(fused_output, spec, outer_scale)) is not None:
        return operands[0], dataclasses.replace(operands[1], scale=token_scale_unit(operands[0]))
    rows = fold_rows(dy, spec, ones if outer_scale is None else outer_scale)
    return rows, transpose_codes(rows)


def transpose_codes(q: QTensor) -> QTensor:
    """Transpose codes (M, N) to (N, M), with scale `token_scale_unit(q)` if scales are per token."""
    if q.spec.granularity == "tensor":
        return transpose(q)
    return transpose(QTensor(q.codes, token_scale_unit(q), None, None, QuantSpec(q.spec.format)))


def rescale_rows_pow2(rows: QTensor, dy: QTensor) -> QTensor:
    """Return the input's codes as wgrad operand (inputs, tokens), multiplied by the token scales of both operands.

    Args:
        rows: input (tokens, inputs), with one scale or one per token.
        dy: gradient (tokens, outputs), likewise. Products of both scales must be powers of two times one number.

    Returns:
        QTensor of granularity "tensor".
    """
    scale = rows.scale.astype(jnp.float32) * relative_token_scales(dy)
    common_scale = jnp.max(scale, initial=formats.TINY).reshape(1, 1)
    # The product of the scales is a power of two up to its last bits.
    power = formats.decode_e8m0(formats.encode_e8m0(jnp.maximum(scale * (1 / common_scale), formats.TINY), "nearest"))
    power = jnp.where(jnp.isnan(scale), jnp.nan, power)
    factor = jnp.broadcast_to(power, (rows.codes.shape[0], 1))
    return transpose(QTensor(rows.codes, common_scale, None, None, QuantSpec(rows.spec.format)), factor=factor)


def requantize_recomputed(
    x: Array, scale: Array, dy: QTensor, spec: QuantSpec, fused_output: fused_outputs.FusedOutput | None = None
) -> QTensor:
    """Quantize a recomputed input as wgrad operand (inputs, tokens), multiplied by the token scales of `dy`.

    Args:
        x: floating array (tokens, inputs).
        scale: forward scale of the input's codes, one or one per token. It bounds the magnitude of `x`.
        dy: gradient with one scale or one per token.
        spec: its format is the format of the result.
        fused_output: describes how `x` is computed, if known.

    Returns:
        QTensor of granularity "tensor".
    """
    factor = relative_token_scales(dy)
    common_scale = jnp.max(RECOMPUTE_HEADROOM * scale.astype(jnp.float32) * factor, initial=formats.TINY)
    # Tokens without a gradient have scales beyond fp32. Under the largest scale their codes are 0, too.
    row_scales = jnp.minimum(common_scale / jnp.broadcast_to(factor, (x.shape[0], 1)), MAX_INVERTIBLE_SCALE)
    if (
        transposed := fused_outputs.quantize_columns(fused_output or fused_outputs.identity_output(x), spec, row_scales)
    ) is not None:
        return dataclasses.replace(transposed, scale=common_scale.reshape(1, 1))
    values = x.astype(jnp.float32) * factor
    return quantize(values, None, QuantSpec(spec.format), scale=common_scale)[1]


def token_scale_unit(dy: QTensor) -> Array:
    """Return the largest power of two below or equal to the largest token scale, fp32 (1, 1).

    Wgrad multiplies by it after the sum. A small factor would underflow in the token scales.
    """
    scale = lax.stop_gradient(dy.scale)
    max_scale = jnp.max(formats.where(jnp.isfinite(scale), scale, 0.0), initial=formats.TINY)
    return formats.decode_e8m0(formats.encode_e8m0(max_scale, "down")).reshape(1, 1)


def relative_token_scales(dy: QTensor) -> Array:
    """Return a gradient's token scales divided by `token_scale_unit(dy)`, fp32 (tokens, 1), or 1 for a single scale."""
    if dy.spec.granularity == "tensor":
        return jnp.ones((), jnp.float32)
    return lax.stop_gradient(dy.scale) / token_scale_unit(dy)
