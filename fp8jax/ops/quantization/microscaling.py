"""Microscaled operands of the three products of a linear layer (MOSS, section 3.1), each rounded once.

Forward and for the input's gradient a row of an operand is contracted, so its powers of two go into its codes
(`fold_rows`) and its scale comes after the sum. The weight's gradient sums over tokens, where each row of both operands
has a scale of its own. Neither is quantized a second time for it: the gradient's codes are transposed as they are, and
its scales, together with the input's, go into the input's operand. Where the input is kept as codes these are shifted:
a row's scale of the gradient is chosen as a power of two over the input's, so that the product of both is a power of
two, and a code changes by its exponent alone. Where the input is made again its values take the gradient's scales
before they are rounded. Either way the operands of the weight's gradient have one scale each, which no sum needs
inside.

A shifted code stays exact while it is normal. In e4m3 those lie within 2^-14.8 of the largest that any token adds;
below, codes lose a bit each octave, and are zero under 2^-18.8: what such a token adds to the sum is as much smaller.
The reasons, in figures of real activations and gradients: `experiments.tables.moss_snr`.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import Array, lax

from fp8jax.core import blocks, formats, scaling
from fp8jax.core.qtensor import QTensor, quantize_with_scale
from fp8jax.core.spec import QuantSpec
from fp8jax.ops.dispatch.choice import capability, choose_impl, missing_triton, record_choice, run
from fp8jax.ops.dispatch.partition import run_partitioned
from fp8jax.ops.dispatch.shard_notation import DimSharding
from fp8jax.ops.quantization import fused_codes, fused_outputs
from fp8jax.ops.quantization.fused_reference import row_peaks
from fp8jax.ops.quantization.quantize import quantize, transpose

# Elements under one power of two, as the kernels take them.
GROUP_SIZE = 32


def is_foldable(q: QTensor) -> bool:
    """Whether `fold_microscales` takes a matrix: e4m3 codes microscaled by 32 of a row under a level 1 scale, no exact
    ones."""
    spec = q.spec
    rows = spec.axis in (-1, 1) and spec.group_size == GROUP_SIZE
    return spec.granularity == "mx" and spec.outer_scale != "none" and spec.format == "e4m3" and rows and not spec.exact


def fold_microscales(q: QTensor, *, impl: str = "auto") -> QTensor:
    """The powers of two of two-level codes folded into them, for the product of rows.

    As in `fp8jax.ops.quantization.microscaling.fold_rows`, the scale of a row takes up the largest of its powers,
    exactly, unless that would make it subnormal. A code that goes subnormal under what is left of its own power is
    rounded a second time.

    Args:
        q: (M, N), such that `is_foldable`.
        impl: "auto", "xla" or "triton".

    Returns:
        (M, N), of granularity "token".

    Raises:
        ValueError: `q` is another, `impl` is unknown, or it is "triton" and no kernel can run.
    """
    if not is_foldable(q):
        raise ValueError(
            f"fold_microscales takes e4m3 codes microscaled by 32 of a row under a level 1 scale, not {q.spec}"
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
    folded: tuple[Array, Array] = run_partitioned(
        "fold_microscales", None, fold_shard, (codes, powers, outer_scale), ("m -", "m -", scale), ("m -", "m -")
    )
    return folded


# How far an input that is made again may lie above what it was: the rounding of what it is made from.
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
    """A matrix microscaled and folded (MOSS, section 3): codes with one scale a row.

    The scale of a row takes up the largest power of two of its groups, exactly; what is left of the others is applied
    before rounding. Codes are the two-level ones until they go subnormal.

    Args:
        x: (M, N), floating.
        spec: of granularity "mx" with a level 1.
        outer_scale: fp32 (M, 1): scales of level 1; the scale of a row is the smallest power of two times its own that
            holds it, the smallest normal number for a row of zeros. None takes them from `x`, as the spec says.
        fused_output: what the matrix is computed from, where that is known.
        impl: "auto", "xla" or "triton", as of `fp8jax.ops.quantization.quantize.quantize`.

    Returns:
        (M, N), of granularity "token".
    """
    row_spec = QuantSpec(spec.format, "token")
    if outer_scale is None and (fused_rows := fused_codes.cached_row_codes(fused_output, spec)) is not None:
        return fused_rows
    if (outer_scale is None and spec.outer_scale == "token") or 0 in x.shape:
        # The largest power of two of a row is that of its largest group: 1. It is folded into codes of the row's own.
        q, _ = quantize(x, row_spec, impl=impl)
        assert q is not None
        return q
    choice = record_choice("fold", choose_impl(impl, lambda: _unsupported_reason(x, spec)))
    reference, kernel = (functools.partial(f, spec) for f in (_reference, _kernel))
    folded: QTensor = run(choice, impl, x, outer_scale, kernel=kernel, reference=reference)
    return folded


def _unsupported_reason(x: Array, spec: QuantSpec) -> str | None:
    if (reason := missing_triton("quantization.quantize_triton")) is not None:
        return reason
    from pallas_kernels.quantization import quantize_rows_triton

    return quantize_rows_triton.unsupported_reason(
        x.shape, x.dtype, fused_outputs.to_coding(QuantSpec(spec.format, "token"))
    )


def _reference(spec: QuantSpec, x: Array, outer_scale: Array | None) -> QTensor:
    fmt, row_amax = formats.get(spec.format), row_peaks(x)[:, None]
    if outer_scale is None:
        outer_scale = scaling.to_scale(jnp.max(row_amax, initial=0.0), fmt)
    return quantize_with_scale(x, QuantSpec(spec.format, "token"), scaling.pow2_scale(row_amax, outer_scale, fmt))


def _kernel(spec: QuantSpec, x: Array, outer_scale: Array | None) -> QTensor:
    from pallas_kernels.quantization import amax_triton, quantize_rows_triton

    fmt, row_spec = formats.get(spec.format), QuantSpec(spec.format, "token")

    def fold(dim_sharding: DimSharding, x: Array, shard_scale: Array | None) -> tuple[Array, Array]:
        if shard_scale is None:
            amax = amax_triton.compute_amax(x, tensor=True, compute_capability=capability())[0]
            assert amax is not None
            shard_scale = scaling.to_scale(dim_sharding.pmax(amax, "m"), fmt)
        coding = fused_outputs.to_coding(row_spec)
        return quantize_rows_triton.quantize_rows(x, coding, outer_scale=shard_scale, compute_capability=capability())

    codes, scale = run_partitioned(
        "fold_rows", spec, fold, (x, outer_scale), ("m -", None if outer_scale is None else "m -"), ("m -", "m -")
    )
    return QTensor(codes, scale, None, None, row_spec)


def gradient_operands(
    dy: Array, spec: QuantSpec, scale: Array | None, fused_output: fused_outputs.FusedOutput | None = None
) -> tuple[QTensor, QTensor]:
    """The output's gradient (tokens, outputs), microscaled and folded, and its codes transposed.

    Args:
        dy: (tokens, outputs).
        spec: of granularity "mx" with a level 1.
        scale: of the input's codes, one or one a token, which the scales of `dy` divide; None if it is made again.
            Under a level 1 of the tensor the scales are what they are: powers of two times one.
        fused_output: what `dy` is computed from, where that is known.

    Returns:
        Of granularity "token"; and (outputs, tokens) of "tensor" with scale `token_scale_unit(rows)`: another operand
        takes the scales over that.
    """
    if spec.outer_scale == "tensor":
        rows = fold_rows(dy, spec)
        return rows, transpose_codes(rows)
    ones = jnp.ones((dy.shape[0], 1), jnp.float32)
    # The exponents of the input's scales only move the powers of two, out of the range of fp32 where they are extreme.
    outer_scale = None if scale is None else ones / formats.significand(scale.astype(jnp.float32))
    if (operands := fused_codes.quantize_cotangent(fused_output, spec, outer_scale)) is not None:
        return operands[0], dataclasses.replace(operands[1], scale=token_scale_unit(operands[0]))
    rows = fold_rows(dy, spec, ones if outer_scale is None else outer_scale)
    return rows, transpose_codes(rows)


def transpose_codes(q: QTensor) -> QTensor:
    """Codes of rows transposed as they are, (N, M), with scale `token_scale_unit(q)`; of one scale with that."""
    if q.spec.granularity == "tensor":
        return transpose(q)
    return transpose(QTensor(q.codes, token_scale_unit(q), None, None, QuantSpec(q.spec.format)))


def rescale_rows_pow2(rows: QTensor, dy: QTensor) -> QTensor:
    """Codes of the input (tokens, inputs) as the operand (inputs, tokens) with the scales of tokens, its own and dy's.

    Args:
        rows: of one scale or one a token.
        dy: likewise; products of both scales are powers of two times one number.

    Returns:
        Of granularity "tensor".
    """
    scale = rows.scale.astype(jnp.float32) * relative_token_scales(dy)
    common_scale = jnp.max(scale, initial=formats.TINY).reshape(1, 1)
    # A power of two but for the last bits of the scales' product, which rounding to the nearest one takes away.
    power = formats.decode_e8m0(formats.encode_e8m0(jnp.maximum(scale * (1 / common_scale), formats.TINY), "nearest"))
    power = jnp.where(jnp.isnan(scale), jnp.nan, power)
    factor = jnp.broadcast_to(power, (rows.codes.shape[0], 1))
    return transpose(QTensor(rows.codes, common_scale, None, None, QuantSpec(rows.spec.format)), factor=factor)


def requantize_recomputed(
    x: Array, scale: Array, dy: QTensor, spec: QuantSpec, fused_output: fused_outputs.FusedOutput | None = None
) -> QTensor:
    """An input that was made again (tokens, inputs), as the operand (inputs, tokens) with the scales of tokens of dy.

    Args:
        x: (tokens, inputs).
        scale: that of the input's codes forward, one or one a token: it tells how large `x` is.
        dy: of one scale or one a token.
        spec: gives the format.
        fused_output: what `x` is computed from, where that is known.

    Returns:
        Of granularity "tensor".
    """
    factor = relative_token_scales(dy)
    common_scale = jnp.max(RECOMPUTE_HEADROOM * scale.astype(jnp.float32) * factor, initial=formats.TINY)
    # Scales beyond fp32, of tokens without a gradient, are as good as the largest: their codes are 0.
    row_scales = jnp.minimum(common_scale / jnp.broadcast_to(factor, (x.shape[0], 1)), MAX_INVERTIBLE_SCALE)
    if (
        transposed := fused_codes.quantize_columns(fused_output or fused_outputs.identity_output(x), spec, row_scales)
    ) is not None:
        return dataclasses.replace(transposed, scale=common_scale.reshape(1, 1))
    values = x.astype(jnp.float32) * factor
    _, columns = quantize(values, None, QuantSpec(spec.format), scale=common_scale)
    assert columns is not None
    return columns


def token_scale_unit(dy: QTensor) -> Array:
    """The largest power of two that is no more than the largest scale of a token, fp32 (1, 1).

    The weight's gradient multiplies by it after the sum. In the scales of tokens a small one would underflow.
    """
    scale = lax.stop_gradient(dy.scale)
    max_scale = jnp.max(formats.where(jnp.isfinite(scale), scale, 0.0), initial=formats.TINY)
    return formats.decode_e8m0(formats.encode_e8m0(max_scale, "down")).reshape(1, 1)


def relative_token_scales(dy: QTensor) -> Array:
    """The scales of tokens of a gradient over `token_scale_unit(dy)`, fp32 (tokens, 1); 1 of one scale for all."""
    return (
        jnp.ones((), jnp.float32)
        if dy.spec.granularity == "tensor"
        else lax.stop_gradient(dy.scale) / token_scale_unit(dy)
    )
