"""Device code of norms and activations on a tile: results and cotangents, from arrays or from codes of residuals.

Operands `p` are pointers with the names of `quantize_recomputed_triton.Operands`. Hardware and reference are those of
the kernels. Values are rounded to the dtype of the operation's result: their codes are those of the result. An
exception is the exact GELU below -5, because 1 + erf(x) cancels.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from pallas_kernels.quantization import codec_triton as codec
from pallas_kernels.quantization import scaling_triton as scaling
from pallas_kernels.quantization import storage_triton as storage

# `activation_and_slope` has a branch for each.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "identity")
IDENTITY = ACTIVATIONS.index("identity")
_SILU, _GELU, _GELU_TANH, _IDENTITY = map(tl.constexpr, range(len(ACTIVATIONS)))


class Operation(NamedTuple):
    """Static description of the operation of a tile.

    Attributes:
        activation: index into ACTIVATIONS.
        is_gated: whether the activated gate is multiplied by `up`.
        reads_arrays: whether operands are arrays, not codes.
        group: codes of a row per scale.
        format: code format, as in `scaling_triton.Coding`; "int10" is packed.
        dtype: dtype to which values are rounded, an index into `quantize_triton.PLAIN_DTYPES`.
        centered, has_scale, has_bias: whether a norm has `mean`, `weight` and `bias`.
        saves_activated: whether the activated gate is also a residual.
    """

    activation: int = 0
    is_gated: bool = True
    reads_arrays: bool = False
    group: int = 16
    format: str = "float8_e4m3fn"
    dtype: int = 1
    centered: bool = False
    has_scale: bool = False
    has_bias: bool = False
    saves_activated: bool = False


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """Return the sigmoid from the hardware's approximations: tl.sigmoid needs three times as many instructions."""
    return codec.reciprocal_approx(1 + codec.exp2_approx(x * -1.4426950408889634))


@triton.jit
def activation_and_slope(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Return the activation and its derivative."""
    if ACTIVATION == _SILU:
        s = sigmoid(x)
        value = x * s
        slope = tl.fma(value, 1 - s, s)
    elif ACTIVATION == _GELU:
        cdf = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        value = x * cdf
        slope = tl.fma(x, 0.3989422804014327 * codec.exp2_approx(x * x * -0.7213475204444817), cdf)
    elif ACTIVATION == _GELU_TANH:
        # (1 + tanh(z)) / 2 = sigmoid(2 z)
        cdf = sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        inner = 1.5957691216057308 * (1 + 0.134145 * x * x)
        value = x * cdf
        slope = tl.fma(value, (1 - cdf) * inner, cdf)
    else:
        tl.static_assert(ACTIVATION == _IDENTITY, "each name of ACTIVATIONS needs a branch here")
        value, slope = x, tl.full(x.shape, 1.0, tl.float32)
    return value, slope


@triton.jit
def load_values(
    codes_ptr: tl.tensor, scale_ptr: tl.tensor, first: tl.tensor, offsets: tl.tensor, m: tl.tensor, left: tl.tensor,
    n: tl.tensor, M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, OPERATION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return fp32 values of codes in groups along a row; `left` is the first of the columns `n`."""
    return decode_loaded(
        load_codes_and_scales(codes_ptr, scale_ptr, first, offsets, m, left, n, M, N, MASKED, OPERATION), OPERATION
    )


@triton.jit
def load_codes_and_scales(
    codes_ptr: tl.tensor, scale_ptr: tl.tensor, first: tl.tensor, offsets: tl.tensor, m: tl.tensor, left: tl.tensor,
    n: tl.tensor, M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, OPERATION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return codes as `storage_triton.load_codes`, and their scales; values in place of both if it reads arrays."""
    GROUP: tl.constexpr = OPERATION.group
    GROUPS: tl.constexpr = (N + GROUP - 1) // GROUP
    STEP: tl.constexpr = GROUP if n.shape[0] > GROUP else n.shape[0]  # a tile may be narrower than a group
    codes = storage.load_codes(codes_ptr, first, offsets, m, left, n, M, N, MASKED, OPERATION)
    scale = codes[0]
    if not OPERATION.reads_arrays:
        g = left // GROUP + tl.arange(0, n.shape[0] // STEP)
        scale_offsets = tl.multiple_of(m.to(tl.int64)[:, None] * GROUPS + g[None, :], (1, 1))
        scale = scaling.load_raw(scale_ptr, scale_offsets, scaling.tile_mask(m, g, M, GROUPS), MASKED)
    return codes, scale


@triton.jit
def decode_loaded(x: tl.tensor, OPERATION: tl.constexpr) -> tl.tensor:
    """Return fp32 values from the result of `load_codes_and_scales`."""
    if OPERATION.reads_arrays:
        y = x[0][0].to(tl.float32)
    else:
        y = storage.decode_codes(x[0], OPERATION) * scaling.repeat_columns(
            x[1].to(tl.float32), x[0][0].shape[1] // x[1].shape[1]
        )
    return y


@triton.jit
def round_to_dtype(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return fp32 values rounded to a dtype; in assembly, because Triton does not always convert bf16 in pairs."""
    if DTYPE == 1:
        x = tl.inline_asm_elementwise(
            "{.reg .b32 p; cvt.rn.bf16x2.f32 p, $3, $2; shl.b32 $0, p, 16; and.b32 $1, p, 0xffff0000;}",
            "=f,=f,f,f", [x], tl.float32, is_pure=True, pack=2)  # fmt: skip
    elif DTYPE == 2:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def normalize(
    x: tl.tensor, rstd: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, n: tl.tensor, N: tl.constexpr,
    MASKED: tl.constexpr, OPERATION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the result of a norm, not rounded."""
    # Broadcast to the tile's shape: each thread then reads its own values.
    offsets, mask = tl.broadcast_to(n[None, :], x.shape), tl.broadcast_to((n < N)[None, :], x.shape)
    factor = rstd[:, None]
    if OPERATION.has_scale:
        factor = factor * codec.to_fp32(scaling.load_raw(weight_ptr, offsets, mask, MASKED))
    y = x * factor
    if OPERATION.has_bias:
        y = y + codec.to_fp32(scaling.load_raw(bias_ptr, offsets, mask, MASKED))
    return y


@triton.jit
def compute_result(
    p: tl.tensor, first: tl.tensor, offsets: tl.tensor, m: tl.tensor, left: tl.tensor, n: tl.tensor, M: tl.constexpr,
    N: tl.constexpr, MASKED: tl.constexpr, OPERATION: tl.constexpr, NORM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return fp32 values of a tile of the result, rounded to the operation's dtype."""
    mask = scaling.tile_mask(m, n, M, N)
    if OPERATION.reads_arrays:
        x = scaling.load(p.first + first, offsets, mask, MASKED)
    else:
        x = load_values(p.first, p.first_scale, first, offsets, m, left, n, M, N, MASKED, OPERATION)
    if NORM:
        if OPERATION.reads_arrays and OPERATION.centered:
            x = x - tl.load(p.mean + m, mask=m < M, other=0.0)[:, None]
        y = normalize(x, tl.load(p.rstd + m, mask=m < M, other=0.0), p.weight, p.bias, n, N, MASKED, OPERATION)
    else:
        y, _ = activation_and_slope(x, OPERATION.activation)
        if OPERATION.is_gated:
            if OPERATION.reads_arrays:
                up = scaling.load(p.up + first, offsets, mask, MASKED)
            else:
                up = load_values(p.up, p.up_scale, first, offsets, m, left, n, M, N, MASKED, OPERATION)
            y = y * up
    return round_to_dtype(y, OPERATION.dtype)


@triton.jit
def load_cotangent_operands(
    p: tl.tensor, first: tl.tensor, offsets: tl.tensor, m: tl.tensor, left: tl.tensor, n: tl.tensor, M: tl.constexpr,
    N: tl.constexpr, MASKED: tl.constexpr, OPERATION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the operands of cotangents: gradient, and loaded gate, up and activated gate."""
    dy = scaling.load_raw(p.gradient + first, offsets, scaling.tile_mask(m, n, M, N), MASKED)
    gate = load_codes_and_scales(p.first, p.first_scale, first, offsets, m, left, n, M, N, MASKED, OPERATION)
    up, activated = gate, gate
    if OPERATION.is_gated:
        up = load_codes_and_scales(p.up, p.up_scale, first, offsets, m, left, n, M, N, MASKED, OPERATION)
    if OPERATION.saves_activated:
        activated = load_codes_and_scales(
            p.activated, p.activated_scale, first, offsets, m, left, n, M, N, MASKED, OPERATION
        )
    return dy, gate, up, activated


@triton.jit
def compute_cotangents(x: tl.tensor, OPERATION: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """Return the cotangents of gate and up (without up, of gate twice), rounded to DTYPE, and the recomputed result."""
    dy = x[0].to(tl.float32)
    activated, slope = activation_and_slope(decode_loaded(x[1], OPERATION), OPERATION.activation)
    if OPERATION.is_gated:
        up = decode_loaded(x[2], OPERATION)
        dgate = round_to_dtype(dy * up * slope, DTYPE)
        recomputed = activated * up
        if OPERATION.saves_activated:
            activated = decode_loaded(x[3], OPERATION)
        dup = round_to_dtype(dy * activated, DTYPE)
    else:
        dgate = round_to_dtype(dy * slope, DTYPE)
        dup, recomputed = dgate, activated
    return dgate, dup, round_to_dtype(recomputed, OPERATION.dtype)


@triton.jit
def masked_magnitude_key(
    y: tl.tensor, m: tl.tensor, n: tl.tensor, M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
    CODING: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return `scaling_triton.magnitude_key` of a tile, with 0 outside of the matrix."""
    if MASKED:
        y = tl.where(scaling.tile_mask(m, n, M, N), y, 0.0)
    return scaling.magnitude_key(y, CODING)


@triton.jit
def tile_amax(
    y: tl.tensor, m: tl.tensor, n: tl.tensor, M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
    CODING: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the largest finite magnitude of the tile inside of the matrix."""
    return scaling.magnitude_from_key(tl.max(tl.max(masked_magnitude_key(y, m, n, M, N, MASKED, CODING), 1), 0), CODING)


@triton.jit
def larger_or_nan(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def tile_amax_or_nonfinite(y: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return the largest magnitude of a tile, rounded to a dtype; Inf or NaN if a value is not finite."""
    amax = round_amax(tl.reduce(tl.reduce(tl.abs(y), 1, larger_or_nan), 0, larger_or_nan), DTYPE)
    return tl.where(amax < scaling.TINY, 0.0, amax)


@triton.jit
def round_amax(amax: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    if DTYPE == 1:
        amax = amax.to(tl.bfloat16).to(tl.float32)
    elif DTYPE == 2:
        amax = amax.to(tl.float16).to(tl.float32)
    return amax


@triton.jit
def row_amax_or_nonfinite(y: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return `tile_amax_or_nonfinite` of each row."""
    amax = round_amax(tl.reduce(tl.abs(y), 1, larger_or_nan), DTYPE)
    return tl.where(amax < scaling.TINY, 0.0, amax)


@triton.jit
def store_quantized(
    y: tl.tensor, scale_ptr: tl.tensor, codes_ptr: tl.tensor, offsets: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr,
    CODING: tl.constexpr, FINITE: tl.constexpr,
) -> None:  # fmt: skip
    """Store codes under a given scale, or the values themselves; FINITE values need fewer instructions."""
    if CODING.kind == "array":
        scaling.store(codes_ptr, offsets, y.to(codes_ptr.dtype.element_ty), mask, MASKED)
    else:
        codes = scaling.encode(
            y, scaling.apply_inverse_scale(y, scaling.reciprocal(tl.load(scale_ptr)), CODING, FINITE), 0, CODING, FINITE
        )
        scaling.store(codes_ptr, offsets, codes, mask, MASKED)


@triton.jit
def row_inverse_scales(scale_ptr: tl.tensor, m: tl.tensor, M: tl.constexpr, BY_ROW: tl.constexpr) -> tl.tensor:
    """Return the inverse of given scales, per row or for the tensor."""
    if BY_ROW:
        factor = scaling.reciprocal(tl.load(scale_ptr + m, mask=m < M, other=1.0))[:, None]
    else:
        factor = scaling.reciprocal(tl.load(scale_ptr))
    return factor


@triton.jit
def store_rows_quantized(
    y: tl.tensor, scale_ptr: tl.tensor, codes_ptr: tl.tensor, offsets: tl.tensor, m: tl.tensor, n: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, CODING: tl.constexpr, FINITE: tl.constexpr,
) -> None:  # fmt: skip
    """Store codes of whole rows with one scale per row, and the scales; FINITE values need fewer instructions."""
    if FINITE:
        row_amax = tl.max(tl.abs(y), 1)
        scale = tl.where(row_amax >= scaling.TINY, tl.maximum(row_amax * CODING.inverse_max, scaling.TINY), 1.0)
    else:
        scale = scaling.scale_from_key(
            tl.max(masked_magnitude_key(y, m, n, M, N, MASKED, CODING), 1), CODING, tl.float32
        )
    tl.store(scale_ptr + m, scale, mask=m < M)
    codes = scaling.encode(
        y, scaling.apply_inverse_scale(y, scaling.reciprocal(scale)[:, None], CODING, FINITE), 0, CODING, FINITE
    )
    scaling.store(codes_ptr, offsets, codes, scaling.tile_mask(m, n, M, N), MASKED)


@triton.jit
def store_group_quantized(
    x: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, first: tl.tensor, offsets: tl.tensor, m: tl.tensor,
    left: tl.tensor, n: tl.tensor, M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, CODING: tl.constexpr,
    FINITE: tl.constexpr,
) -> None:  # fmt: skip
    """Store codes in groups along the rows, and their scales, if any; FINITE values need fewer instructions."""
    if CODING.kind != "none":
        SIZE: tl.constexpr = CODING.size
        GROUPS: tl.constexpr = (N + SIZE - 1) // SIZE
        if FINITE:
            keys = scaling.magnitude_key(scaling.max_along_rows(tl.abs(x), SIZE), CODING)
        else:
            keys = scaling.max_along_rows(scaling.magnitude_key(x, CODING), SIZE)
        scale = scaling.scale_from_key(keys, CODING, scales_ptr.dtype.element_ty)
        g = left // SIZE + tl.arange(0, x.shape[1] // SIZE)
        # Each thread stores its own scales: aligned pairs would use shared memory.
        scale_offsets = tl.multiple_of(m.to(tl.int64)[:, None] * GROUPS + g[None, :], (1, 1))
        scaling.store(scales_ptr, scale_offsets, scale, scaling.tile_mask(m, g, M, GROUPS), MASKED)
        y = scaling.apply_inverse_scale(x, scaling.repeat_columns(scaling.reciprocal(scale), SIZE), CODING, FINITE)
        if CODING.format == "int10":
            storage.store_ten_bits(y, codes_ptr, m, left, n, M, N, MASKED, FINITE)
        else:
            scaling.store(
                codes_ptr + first,
                offsets,
                scaling.encode(x, y, 0, CODING, FINITE),
                scaling.tile_mask(m, n, M, N),
                MASKED,
            )
