"""Device code that encodes groups in 8 bits: statistics, exponents and rounding; see `codec_triton`."""

import numpy as np
import triton
import triton.language as tl

from pallas_kernels.quantization import codec_triton as codec

_TINY = tl.constexpr(float(np.finfo(np.float32).tiny))
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
# Added to the bits of a magnitude: makes Inf and NaN negative integers, and keeps the order of the finite ones.
_FINITE_TO_TOP = tl.constexpr(0x00800000)
_LARGEST_FINITE = tl.constexpr(0x7F7FFFFF)


@triton.jit
def amax_bits(x: tl.tensor, SIGNED: tl.constexpr, FAST_PATH: tl.constexpr) -> tl.tensor:
    """Return the bits of the largest finite magnitude of each group, 0 if there is none.

    The fast path treats Inf and NaN as values; a program that finds one repeats the reduction on the slow path.
    """
    magnitude = codec.float_bits(x) & _MAGNITUDE if SIGNED else codec.float_bits(x)
    if FAST_PATH:
        largest = tl.max(tl.max(magnitude, axis=1), axis=1)
        if tl.max(largest.to(tl.uint32, bitcast=True), axis=0) > _LARGEST_FINITE:
            largest = _max_finite_bits(magnitude)
    else:
        largest = _max_finite_bits(magnitude)
    return largest


@triton.jit
def _max_finite_bits(magnitude: tl.tensor) -> tl.tensor:
    largest = tl.max(tl.max(magnitude + _FINITE_TO_TOP, axis=1), axis=1)
    return tl.maximum(largest, _FINITE_TO_TOP) - _FINITE_TO_TOP


@triton.jit
def min_nonzero_bits_minus_one(magnitude: tl.tensor, FAST_PATH: tl.constexpr) -> tl.tensor:
    """Return the bits, minus one, of the smallest non-zero magnitude of each group; all ones for a group of zeros."""
    magnitude = codec.float_bits(magnitude)
    if FAST_PATH:
        smallest = (tl.min(tl.min(magnitude, axis=1), axis=1) - 1).to(tl.uint32, bitcast=True)
        if tl.max(smallest, axis=0) > _LARGEST_FINITE:
            smallest = _min_nonzero_bits_minus_one(magnitude)
    else:
        smallest = _min_nonzero_bits_minus_one(magnitude)
    return smallest


@triton.jit
def _min_nonzero_bits_minus_one(magnitude: tl.tensor) -> tl.tensor:
    smallest = (magnitude - 1).to(tl.uint32, bitcast=True)
    return tl.min(tl.min(smallest, axis=1), axis=1)


@triton.jit
def zero_dead_elements(m: tl.tensor, direction: tl.tensor, limit: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return m with zeros, and |m| with Inf, for elements whose direction is below the limit of their group."""
    is_dead = tl.abs(direction) < codec.broadcast_groups(limit)
    return tl.where(is_dead, 0.0, m), tl.where(is_dead, float("inf"), tl.abs(m))


@triton.jit
def min_magnitude_bits(magnitude: tl.tensor) -> tl.tensor:
    """Return the bits of the smallest magnitude of each group."""
    return tl.min(tl.min(codec.float_bits(magnitude), axis=1), axis=1)


@triton.jit
def fast_extremes(x: tl.tensor, SIGNED: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the bits of the largest and smallest magnitude of each group; NaN is larger than every value."""
    if SIGNED:
        # Floats compare magnitudes without an extra instruction; integers are compared three at a time.
        magnitude = tl.reshape(tl.abs(x), (x.shape[0], 2, x.shape[1] // 2, x.shape[2]))
        largest = codec.float_bits(tl.reduce(magnitude, 1, _larger_or_nan))
        smallest = codec.float_bits(tl.min(magnitude, axis=1))
    else:
        largest, smallest = codec.float_bits(x), codec.float_bits(x)
    return tl.max(tl.max(largest, axis=1), axis=1), tl.min(tl.min(smallest, axis=1), axis=1)


@triton.jit
def _larger_or_nan(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def group_exponents(
    log2_top: tl.tensor, smallest: tl.tensor, has_span: tl.tensor, previous: tl.tensor, STORAGE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return exponents of groups from log2 of the largest magnitude, the smallest one, and whether they differ.

    With stochastic rounding, groups keep the `previous` exponent if it still fits. The result is (stored exponent, fp32
    exponent, offset), with log2 of a code = exponent * log2 of the magnitude + offset.
    """
    octaves = log2_top - codec.log2_abs_approx(smallest)
    k = tl.minimum(tl.maximum(STORAGE.log2_ratio * codec.reciprocal_approx(octaves), STORAGE.lowest), STORAGE.highest)
    k = tl.where(has_span, k, 1.0)
    if STORAGE.dropped > 0:
        log2_ratio = previous.to(tl.float32) * octaves
        k = tl.where((log2_ratio >= STORAGE.fewest) & (log2_ratio <= STORAGE.most), previous.to(tl.float32), k)
    pair = codec.to_bf16_pair(k)
    k = codec.from_bits(pair & -0x10000)
    return (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), k, tl.fma(-k, log2_top, STORAGE.log2_max)


@triton.jit
def interpolate_codes(y: tl.tensor, k: tl.tensor, one_bits: tl.tensor, STORAGE: tl.constexpr) -> tl.tensor:
    """Return the bits of normal y, shifted so that adding noise and truncating rounds without bias.

    Decoding is not linear between two codes. Let t be the relative position of y between them, h their distance, c
    their middle, and s = 1 - 1 / k. The unbiased probability of the upper code is, up to terms in (h / c)^2,

        p = t + t * (1 - t) * s * h / (2 * c)

    Here 1 / c is approximated by a line in the significand of y.
    """
    WIDTH: tl.constexpr = 2.0 ** (STORAGE.dropped - 23)
    x = codec.float_bits(y)
    # Beyond 1 / k = 8, for groups of 2^120, the linear term overestimates p - t.
    s = 0.5 * tl.maximum(1.0 - codec.reciprocal_approx(k), -7.0)
    # A floating-point number this large has its integer part in its lowest bits.
    slope, start = codec.broadcast_groups(s * (-0.4706 * 8388608.0)), codec.broadcast_groups(s * (1.4118 * 8388608.0))
    position = codec.from_bits((x & ((1 << STORAGE.dropped) - 1)) | one_bits)  # from 1 at the code below to 1 + WIDTH
    significand = codec.from_bits((x & 0x007FFFFF) | one_bits)
    square = tl.fma(position, (2.0 + WIDTH) - position, -(1.0 + WIDTH))
    correction = tl.fma(square, tl.fma(significand, slope, start), 12582912.0)
    return x + codec.float_bits(correction) + ((1 << (STORAGE.dropped - 17)) - 0x4B400000)


@triton.jit
def add_noise(
    y: tl.tensor, k: tl.tensor, noise: tl.tensor, element: tl.tensor, one_bits: tl.tensor, PAIRED: tl.constexpr,
    STORAGE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return values of codes from fp32 magnitudes in units of the codes, rounded without bias; Inf and NaN stay."""
    # Noise added to BOUND stays a NaN; added to the hardware's own NaN, 0x7FFFFFFF, it overflows.
    BOUND: tl.constexpr = 0x7FFFFFFF - ((1 << STORAGE.dropped) - 1)
    if STORAGE.is_expanded:
        x = interpolate_codes(codec.from_bits(tl.minimum(codec.float_bits(y), BOUND)), k, one_bits, STORAGE)
    else:
        # Below the smallest normal number, codes have the same spacing as just above it.
        shift = tl.where(y < STORAGE.smallest_normal, STORAGE.smallest_normal, 0.0)
        x = tl.minimum(codec.float_bits(y + shift), BOUND) + (1 << (STORAGE.dropped - 17))
    if PAIRED:
        x = codec.add_scaled_noise_to_pairs(x, noise, 1 << (STORAGE.dropped - 16))
    else:
        half = tl.where((element & 1) == 0, noise & 0xFFFF, noise >> 16).to(tl.int32, bitcast=True)
        x = x + half * (1 << (STORAGE.dropped - 16))
    rounded = codec.from_bits(x & -(1 << STORAGE.dropped))
    if not STORAGE.is_expanded:
        rounded = rounded - shift
    return rounded


@triton.jit
def fast_exponents(
    largest: tl.tensor, smallest: tl.tensor, unit: tl.tensor, inverse_unit: tl.tensor, previous: tl.tensor,
    STORAGE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return fp32 exponents of groups with these `fast_extremes` in units of `unit`."""
    log2_top = codec.log2_abs_approx(
        codec.from_bits(largest) * (unit * (1 / STORAGE.max)) * (inverse_unit * STORAGE.max)
    )
    _, k, _ = group_exponents(log2_top, codec.from_bits(smallest), largest > smallest, previous, STORAGE)
    return k


@triton.jit
def encode_fast(
    x: tl.tensor, largest: tl.tensor, k: tl.tensor, unit: tl.tensor, inverse_unit: tl.tensor, noise: tl.tensor,
    one_bits: tl.tensor, CODE: tl.constexpr, STORAGE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return codes, scales and exponents as `encode` with range expansion, for values in units of `unit`.

    `inverse_unit` is 1 / `unit`. Values have no zeros, Inf or NaN, and no scale is subnormal. Neighbours are the pairs
    of `noise`.
    """
    scale = codec.from_bits(largest) * (unit * (1 / STORAGE.max))
    log2_top = codec.log2_abs_approx(scale * (inverse_unit * STORAGE.max))
    offset = tl.fma(-k, log2_top, STORAGE.log2_max)
    y = codec.exp2_approx(tl.fma(codec.log2_abs_approx(x), codec.broadcast_groups(k), codec.broadcast_groups(offset)))
    if STORAGE.dropped > 0:
        y = codec.from_bits(
            codec.add_scaled_noise_to_pairs(
                interpolate_codes(y, k, one_bits, STORAGE) - (1 << (STORAGE.dropped - 1)),
                noise,
                1 << (STORAGE.dropped - 16),
            )
        )
    codes = y.to(CODE)
    if STORAGE.is_signed:
        codes = codec.with_signs(codes.to(tl.int8, bitcast=True), x.to(CODE).to(tl.int8, bitcast=True))
        codes = codes.to(CODE, bitcast=True)
    return codes, scale, (codec.float_bits(k) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def encode(
    x: tl.tensor, code_magnitudes: tl.tensor, largest_bits: tl.tensor, previous: tl.tensor, noise: tl.tensor,
    element: tl.tensor, decay: tl.tensor, dither: tl.tensor, one_bits: tl.tensor,
    CODE: tl.constexpr, STORAGE: tl.constexpr, FAST_PATH: tl.constexpr, PAIRED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return the codes of a tile, and the scale and exponent of each group; without expansion, exponents are unused.

    `largest_bits` is `amax_bits` of each group; the smallest of `code_magnitudes` get non-zero codes. `previous`,
    `noise`, `element` and PAIRED are for stochastic rounding, as in `round_stochastically`. `decay` and `dither` are
    those of `codec.add_dither`.
    """
    largest = codec.from_bits(largest_bits)
    scale = tl.where(largest_bits > 0, tl.maximum(largest * (1 / STORAGE.max), _TINY), 1.0)
    if STORAGE.is_expanded:
        top = tl.maximum(largest, _TINY * STORAGE.max)
        smallest = min_nonzero_bits_minus_one(code_magnitudes, FAST_PATH)
        spans = (codec.float_bits(top) - 1).to(tl.uint32, bitcast=True) > smallest
        smallest = codec.from_bits((smallest + 1).to(tl.int32, bitcast=True))
        exponent, k, offset = group_exponents(
            codec.log2_abs_approx(scale * STORAGE.max), smallest, spans, previous, STORAGE
        )
        y = codec.exp2_approx(
            tl.fma(codec.log2_abs_approx(x), codec.broadcast_groups(k), codec.broadcast_groups(offset))
        )
        if STORAGE.mantissa > 0:
            code_decay = codec.broadcast_groups(
                codec.exp2_approx(codec.log2_abs_approx(decay) * k)
            )  # decay of the power
            y = codec.add_dither(y, code_decay, dither, STORAGE.smallest_normal, STORAGE.mantissa)
    else:
        exponent, k = scale.to(tl.bfloat16), scale
        y = tl.abs(x) * codec.broadcast_groups(tl.div_rn(1.0, scale))
        if STORAGE.smallest > 0:
            y = tl.where((x != 0) & (y < STORAGE.smallest), STORAGE.smallest, y)
        if STORAGE.mantissa > 0:
            y = codec.add_dither(y, decay, dither, STORAGE.smallest_normal, STORAGE.mantissa)
    if STORAGE.dropped > 0:
        y = add_noise(y, k, noise, element, one_bits, PAIRED, STORAGE)
    # The conversion saturates Inf to the largest value. The lowest bit turns Inf into NaN, and does not change finite
    # codes.
    if STORAGE.is_signed:
        # Use ~x, because the lowest bit of Inf is 0. Signs are then flipped in the codes, four at a time.
        codes = codec.from_bits(codec.or_inverted_end_bits(codec.float_bits(y), codec.float_bits(x))).to(CODE)
        codes = codec.flip_signs(codes.to(tl.int8, bitcast=True)).to(CODE, bitcast=True)
    else:
        codes = codec.from_bits(codec.float_bits(y) | 1).to(CODE)
    if tl.float8e5 == CODE:
        infinity = tl.where(x > 0, 0x7C, -4).to(tl.int8).to(CODE, bitcast=True)
        codes = tl.where(tl.abs(x) == float("inf"), infinity, codes)
    return codes, scale, exponent
