"""Device code of norms and activations on a tile: results and cotangents from arrays or from the codes that are kept.

The operands `p` are pointers, named as in `remake_triton.Operands`. Values are rounded to the dtype that the
operation would write, so that codes of them are those of what it writes, but for the tail of the exact GELU: below -5
1 + erf(x) cancels, to an absolute error of 2e-7 times the gate.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from pallas_kernels import codec_triton as codec
from pallas_kernels import scaling_triton as device
from pallas_kernels import storage_triton as storage

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "identity")
IDENTITY = ACTIVATIONS.index("identity")


class Operation(NamedTuple):
    """What computes a tile; static.

    Attributes:
        activation: index into ACTIVATIONS.
        gated: whether the activated gate is multiplied by `up`.
        exact: operands are arrays, not codes.
        group: how many codes of a row share a scale.
        format: of codes, as of `scaling_triton.Coding`; "int10" are packed.
        dtype: that values are rounded to, an index into `quantize_triton.PLAIN_DTYPES`.
        centered, scaled, biased: of a norm: whether `mean`, `weight` and `bias` are given.
        activated: whether the activated gate is given as codes, too.
    """

    activation: int = 0
    gated: bool = True
    exact: bool = False
    group: int = 16
    format: str = "float8_e4m3fn"
    dtype: int = 1
    centered: bool = False
    scaled: bool = False
    biased: bool = False
    activated: bool = False


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """By the hardware's approximations, relative error 2^-21: tl.sigmoid takes three times as many instructions."""
    return codec.reciprocal(1 + codec.exp2(x * -1.4426950408889634))


@triton.jit
def activate(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """The activation and its derivative."""
    if KIND == 0:
        s = sigmoid(x)
        value = x * s
        slope = tl.fma(value, 1 - s, s)
    elif KIND == 1:
        below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        value = x * below
        slope = tl.fma(x, 0.3989422804014327 * codec.exp2(x * x * -0.7213475204444817), below)
    elif KIND == 3:
        value, slope = x, tl.full(x.shape, 1.0, tl.float32)
    else:
        # (1 + tanh(z)) / 2 = sigmoid(2 z)
        below = sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        inner = 1.5957691216057308 * (1 + 0.134145 * x * x)
        value = x * below
        slope = tl.fma(value, (1 - below) * inner, below)
    return value, slope


@triton.jit
def decoded(
    codes_ptr: tl.tensor, scale_ptr: tl.tensor, first: tl.tensor, at: tl.tensor, m: tl.tensor, left: tl.tensor,
    n: tl.tensor, M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, OPERATION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """fp32 values of codes in groups along a row; the first of the columns `n` is `left`."""
    return decode(fetch(codes_ptr, scale_ptr, first, at, m, left, n, M, N, MASKED, OPERATION), OPERATION)


@triton.jit
def fetch(
    codes_ptr: tl.tensor, scale_ptr: tl.tensor, first: tl.tensor, at: tl.tensor, m: tl.tensor, left: tl.tensor,
    n: tl.tensor, M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, OPERATION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Codes as `storage_triton.load_codes` has them, and their scales; of an exact operation values in their places."""
    GROUP: tl.constexpr = OPERATION.group
    WIDTH: tl.constexpr = (N + GROUP - 1) // GROUP
    STEP: tl.constexpr = GROUP if n.shape[0] > GROUP else n.shape[0]  # a tile may be narrower than a group
    codes = storage.load_codes(codes_ptr, first, at, m, left, n, M, N, MASKED, OPERATION)
    scale = codes[0]
    if not OPERATION.exact:
        g = left // GROUP + tl.arange(0, n.shape[0] // STEP)
        place = tl.multiple_of(m.to(tl.int64)[:, None] * WIDTH + g[None, :], (1, 1))
        scale = device.load_plain(scale_ptr, place, device.inside(m, g, M, WIDTH), MASKED)
    return codes, scale


@triton.jit
def decode(x: tl.tensor, OPERATION: tl.constexpr) -> tl.tensor:
    """fp32 values of what was fetched."""
    if OPERATION.exact:
        y = x[0][0].to(tl.float32)
    else:
        y = storage.values(x[0], OPERATION) * device.over_columns(
            x[1].to(tl.float32), x[0][0].shape[1] // x[1].shape[1]
        )
    return y


@triton.jit
def narrowed(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """fp32 values rounded to a dtype; to bf16 two at a time, which Triton does not wherever it could."""
    if DTYPE == 1:
        x = tl.inline_asm_elementwise(
            "{.reg .b32 p; cvt.rn.bf16x2.f32 p, $3, $2; shl.b32 $0, p, 16; and.b32 $1, p, 0xffff0000;}",
            "=f,=f,f,f", [x], tl.float32, is_pure=True, pack=2)  # fmt: skip
    elif DTYPE == 2:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def normalized(
    x: tl.tensor, inverse: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, n: tl.tensor, N: tl.constexpr,
    MASKED: tl.constexpr, OPERATION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A norm's result, not rounded."""
    # Of the tile's shape, so that each thread reads what it needs.
    at, here = tl.broadcast_to(n[None, :], x.shape), tl.broadcast_to((n < N)[None, :], x.shape)
    factor = inverse[:, None]
    if OPERATION.scaled:
        factor = factor * codec.fp32(device.load_plain(weight_ptr, at, here, MASKED))
    y = x * factor
    if OPERATION.biased:
        y = y + codec.fp32(device.load_plain(bias_ptr, at, here, MASKED))
    return y


@triton.jit
def result(
    p: tl.tensor, first: tl.tensor, at: tl.tensor, m: tl.tensor, left: tl.tensor, n: tl.tensor, M: tl.constexpr,
    N: tl.constexpr, MASKED: tl.constexpr, OPERATION: tl.constexpr, NORM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """fp32 values of a tile of the result, rounded to the dtype that the operation would write."""
    here = device.inside(m, n, M, N)
    if OPERATION.exact:
        x = device.load(p.first + first, at, here, MASKED)
    else:
        x = decoded(p.first, p.first_scale, first, at, m, left, n, M, N, MASKED, OPERATION)
    if NORM:
        if OPERATION.exact and OPERATION.centered:
            x = x - tl.load(p.mean + m, mask=m < M, other=0.0)[:, None]
        y = normalized(x, tl.load(p.inverse + m, mask=m < M, other=0.0), p.weight, p.bias, n, N, MASKED, OPERATION)
    else:
        y, _ = activate(x, OPERATION.activation)
        if OPERATION.gated:
            if OPERATION.exact:
                up = device.load(p.up + first, at, here, MASKED)
            else:
                up = decoded(p.up, p.up_scale, first, at, m, left, n, M, N, MASKED, OPERATION)
            y = y * up
    return narrowed(y, OPERATION.dtype)


@triton.jit
def operands(
    p: tl.tensor, first: tl.tensor, at: tl.tensor, m: tl.tensor, left: tl.tensor, n: tl.tensor, M: tl.constexpr,
    N: tl.constexpr, MASKED: tl.constexpr, OPERATION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What cotangents are computed from: the gradient, and what was fetched of gate, up and the activated gate."""
    dy = device.load_plain(p.gradient + first, at, device.inside(m, n, M, N), MASKED)
    gate = fetch(p.first, p.first_scale, first, at, m, left, n, M, N, MASKED, OPERATION)
    up, activated = gate, gate
    if OPERATION.gated:
        up = fetch(p.up, p.up_scale, first, at, m, left, n, M, N, MASKED, OPERATION)
    if OPERATION.activated:
        activated = fetch(p.activated, p.activated_scale, first, at, m, left, n, M, N, MASKED, OPERATION)
    return dy, gate, up, activated


@triton.jit
def cotangents(x: tl.tensor, OPERATION: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """Those of an activation's gate and up from `operands`, rounded to DTYPE, and its result as `result` has it.

    Where there is no up, the gate's twice.
    """
    dy = x[0].to(tl.float32)
    activated, slope = activate(decode(x[1], OPERATION), OPERATION.activation)
    if OPERATION.gated:
        up = decode(x[2], OPERATION)
        dgate = narrowed(dy * up * slope, DTYPE)
        again = activated * up
        if OPERATION.activated:
            activated = decode(x[3], OPERATION)
        dup = narrowed(dy * activated, DTYPE)
    else:
        dgate = narrowed(dy * slope, DTYPE)
        dup, again = dgate, activated
    return dgate, dup, narrowed(again, OPERATION.dtype)


@triton.jit
def ordered(
    y: tl.tensor, m: tl.tensor, n: tl.tensor, M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
    HOW: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`scaling_triton.ordered` of the tile's part inside the matrix, of 0 outside."""
    if MASKED:
        y = tl.where(device.inside(m, n, M, N), y, 0.0)
    return device.ordered(y, HOW)


@triton.jit
def peak(
    y: tl.tensor, m: tl.tensor, n: tl.tensor, M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
    HOW: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The largest finite magnitude of the tile's part inside the matrix."""
    return device.largest(tl.max(tl.max(ordered(y, m, n, M, N, MASKED, HOW), 1), 0), HOW)


@triton.jit
def larger_or_nan(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def peak_of_finite(y: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """The largest magnitude of a tile, rounded to a dtype as all of them are; Inf or NaN where one is not finite."""
    top = narrowed_peak(tl.reduce(tl.reduce(tl.abs(y), 1, larger_or_nan), 0, larger_or_nan), DTYPE)
    return tl.where(top < device.TINY, 0.0, top)


@triton.jit
def narrowed_peak(top: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    if DTYPE == 1:
        top = top.to(tl.bfloat16).to(tl.float32)
    elif DTYPE == 2:
        top = top.to(tl.float16).to(tl.float32)
    return top


@triton.jit
def row_peaks_of_finite(y: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """`peak_of_finite` of each row."""
    top = narrowed_peak(tl.reduce(tl.abs(y), 1, larger_or_nan), DTYPE)
    return tl.where(top < device.TINY, 0.0, top)


@triton.jit
def put(
    y: tl.tensor, scale_ptr: tl.tensor, codes_ptr: tl.tensor, at: tl.tensor, here: tl.tensor, MASKED: tl.constexpr,
    HOW: tl.constexpr, FINITE: tl.constexpr,
) -> None:  # fmt: skip
    """Writes codes under a given scale, of FINITE values in fewer instructions, or the values themselves."""
    if HOW.kind == "array":
        device.store(codes_ptr, at, y.to(codes_ptr.dtype.element_ty), here, MASKED)
    else:
        codes = device.encode(y, device.scaled(y, device.inverse(tl.load(scale_ptr)), HOW, FINITE), 0, HOW, FINITE)
        device.store(codes_ptr, at, codes, here, MASKED)


@triton.jit
def row_factors(scale_ptr: tl.tensor, m: tl.tensor, M: tl.constexpr, BY_ROW: tl.constexpr) -> tl.tensor:
    """What rows are multiplied by under given scales, one a row or one for all."""
    if BY_ROW:
        factor = device.inverse(tl.load(scale_ptr + m, mask=m < M, other=1.0))[:, None]
    else:
        factor = device.inverse(tl.load(scale_ptr))
    return factor


@triton.jit
def put_rows(
    y: tl.tensor, scale_ptr: tl.tensor, codes_ptr: tl.tensor, at: tl.tensor, m: tl.tensor, n: tl.tensor,
    M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, HOW: tl.constexpr, FINITE: tl.constexpr,
) -> None:  # fmt: skip
    """Writes codes of whole rows, each under its own scale, and these; of FINITE values in fewer instructions."""
    if FINITE:
        top = tl.max(tl.abs(y), 1)
        scale = tl.where(top >= device.TINY, tl.maximum(top * HOW.inverse_max, device.TINY), 1.0)
    else:
        scale = device.to_scale(tl.max(ordered(y, m, n, M, N, MASKED, HOW), 1), HOW, tl.float32)
    tl.store(scale_ptr + m, scale, mask=m < M)
    codes = device.encode(y, device.scaled(y, device.inverse(scale)[:, None], HOW, FINITE), 0, HOW, FINITE)
    device.store(codes_ptr, at, codes, device.inside(m, n, M, N), MASKED)


@triton.jit
def keep(
    x: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, first: tl.tensor, at: tl.tensor, m: tl.tensor,
    left: tl.tensor, n: tl.tensor, M: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, HOW: tl.constexpr,
    FINITE: tl.constexpr,
) -> None:  # fmt: skip
    """Writes codes in groups along the rows, and their scales, if any; of FINITE values in fewer instructions."""
    if HOW.kind != "none":
        SIZE: tl.constexpr = HOW.size
        WIDTH: tl.constexpr = (N + SIZE - 1) // SIZE
        if FINITE:
            largest = device.ordered(device.along_rows(tl.abs(x), SIZE), HOW)
        else:
            largest = device.along_rows(device.ordered(x, HOW), SIZE)
        scale = device.to_scale(largest, HOW, scales_ptr.dtype.element_ty)
        g = left // SIZE + tl.arange(0, x.shape[1] // SIZE)
        # Each thread writes the scales that it has made: aligned pairs of them would go through shared memory.
        place = tl.multiple_of(m.to(tl.int64)[:, None] * WIDTH + g[None, :], (1, 1))
        device.store(scales_ptr, place, scale, device.inside(m, g, M, WIDTH), MASKED)
        y = device.scaled(x, device.over_columns(device.inverse(scale), SIZE), HOW, FINITE)
        if HOW.format == "int10":
            storage.pack(y, codes_ptr, m, left, n, M, N, MASKED, FINITE)
        else:
            device.store(codes_ptr + first, at, device.encode(x, y, 0, HOW, FINITE), device.inside(m, n, M, N), MASKED)
