"""Device code of AdamW on 8-bit moments: the update of a tile of groups.

Hardware: Ada or newer. Reference: `reference` in fp8jax/ops/optimizers/adamw.py.

`update_tile_general` supports every tile. `update_tile_fast` supports whole groups of two moments in codes with range
expansion, in fewer instructions. It writes nothing if a value is zero, tiny, huge, Inf or NaN.
"""

import numpy as np
import triton
import triton.language as tl

from pallas_kernels.optimizers import masters_triton as masters
from pallas_kernels.quantization import codec_triton as codec
from pallas_kernels.quantization import encode_triton as encode

_TINY = tl.constexpr(float(np.finfo(np.float32).tiny))
# Below this bound, the ratio of a moment to its code may be subnormal.
_SMALL = tl.constexpr(float(np.finfo(np.float32).tiny) * 2**24)
# Bits of 2^50. Inf and NaN are larger; smaller values cause no Inf or NaN.
_HUGE_BITS = tl.constexpr(0x58800000)
# Groups are declared contiguous, which they are not: Triton 3.7 then spreads threads over groups before chunks, as 3.6
# does. A thread still reads a run of a chunk, which is longer.
_CONTIGUOUS_GROUPS = tl.constexpr(2)
# Positions of the limits of both kinds of tiles among the scalars, not counting the two of a gate.
_GENERAL_LIMIT, _FAST_LIMIT = tl.constexpr(21), tl.constexpr(22)
# Number of scalars without optional ones.
_NUM_SCALARS = tl.constexpr(21)


@triton.jit
def look_up_codes(codes: tl.tensor, table_ptr: tl.tensor) -> tl.tensor:
    """Return the codes' entries in a table of 256 fp32 numbers; `tl.load` would change the layout."""
    return tl.inline_asm_elementwise(
        """{.reg .b32 code<4>;
        .reg .b64 at<4>;
        bfe.u32 code0, $4, 0, 8;
        bfe.u32 code1, $4, 8, 8;
        bfe.u32 code2, $4, 16, 8;
        bfe.u32 code3, $4, 24, 8;
        mad.wide.u32 at0, code0, 4, $5;
        mad.wide.u32 at1, code1, 4, $5;
        mad.wide.u32 at2, code2, 4, $5;
        mad.wide.u32 at3, code3, 4, $5;
        ld.global.nc.f32 $0, [at0];
        ld.global.nc.f32 $1, [at1];
        ld.global.nc.f32 $2, [at2];
        ld.global.nc.f32 $3, [at3];}""",
        "=f,=f,=f,=f,r,l,l,l,l", [codes.to(tl.uint8, bitcast=True), table_ptr.to(tl.int64, bitcast=True)], tl.float32,
        is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _clip_change(change: tl.tensor, limit_ptr: tl.tensor) -> tl.tensor:
    return codec.clip_magnitude(change, tl.load(limit_ptr))


@triton.jit
def _group_noise(
    group: tl.tensor, element: tl.tensor, words_ptr: tl.tensor, salt_ptr: tl.tensor, run_length: tl.tensor,
    run_stride: tl.tensor, GROUP_SIZE: tl.constexpr, HAS_RUNS: tl.constexpr, WORDS_OFFSET: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return noise by the group's index in the whole array and the element's in the group; see `codec.pair_noise`."""
    number = group.to(tl.uint32)
    if HAS_RUNS:
        run = group // run_length
        number = (run * run_stride + (group - run * run_length)).to(tl.uint32)
    octets = codec.broadcast_groups(number) * (GROUP_SIZE // 8) + (element >> 3).to(tl.uint32)
    noise_ptr, salt = words_ptr + WORDS_OFFSET, tl.load(salt_ptr).to(tl.uint32, bitcast=True)
    word1 = tl.load(noise_ptr).to(tl.uint32, bitcast=True) + salt
    word2 = tl.load(noise_ptr + 1).to(tl.uint32, bitcast=True) ^ (salt * 0x85EBCA6B)
    return codec.pair_noise(octets, element, word1, word2)


@triton.jit
def _store_moment(
    x: tl.tensor, code_magnitudes: tl.tensor, max_bits: tl.tensor, pointer: tl.tensor, scale_ptr: tl.tensor,
    exponent_ptr: tl.tensor, offsets: tl.tensor, mask: tl.tensor, group: tl.tensor, group_mask: tl.tensor,
    previous: tl.tensor, noise: tl.tensor, element: tl.tensor, decay: tl.tensor, dither: tl.tensor, one_bits: tl.tensor,
    MASKED: tl.constexpr, STORAGE: tl.constexpr, FAST_PATH: tl.constexpr, PAIRED: tl.constexpr,
) -> None:  # fmt: skip
    stored = x
    if STORAGE.has_scale:
        code = pointer.dtype.element_ty
        stored, scale, exponent = encode.encode(
            x,
            code_magnitudes,
            max_bits,
            previous,
            noise,
            element,
            decay,
            dither,
            one_bits,
            code,
            STORAGE,
            FAST_PATH,
            PAIRED,
        )
        codec.store(scale_ptr, group, scale, group_mask, MASKED)
        if STORAGE.is_expanded:
            codec.store(exponent_ptr, group, exponent, group_mask, MASKED)
    elif STORAGE.dropped > 0:
        stored = codec.round_stochastically(x, noise, element, PAIRED)
    codec.store(pointer, offsets, stored, mask, MASKED)


@triton.jit
def _dead_v(v: tl.tensor, previous_v: tl.tensor, v_amax: tl.tensor, DEAD_ELEMENTS: tl.constexpr) -> tl.tensor:
    """Return second moments of dead elements without gradient, from their values before this step."""
    floored = tl.maximum(previous_v, v_amax * DEAD_ELEMENTS.lowest)
    dead_v = tl.where(previous_v < v_amax * DEAD_ELEMENTS.near, floored, v_amax * DEAD_ELEMENTS.raised)
    return tl.where(previous_v < v_amax * DEAD_ELEMENTS.raised, dead_v, v)


@triton.jit
def update_tile_general(
    tile: tl.tensor, grad_ptr: tl.tensor, weight_ptr: tl.tensor, mu_ptr: tl.tensor, mu_scale_ptr: tl.tensor,
    mu_exponent_ptr: tl.tensor, nu_ptr: tl.tensor, nu_scale_ptr: tl.tensor, nu_exponent_ptr: tl.tensor,
    scalars_ptr: tl.tensor, seed_ptr: tl.tensor, words_ptr: tl.tensor, remainder_ptr: tl.tensor, groups: tl.tensor,
    groups_of_row: tl.tensor, vectors_of_row: tl.tensor, salt_ptr: tl.tensor, run_length: tl.tensor,
    run_stride: tl.tensor, one_bits: tl.tensor, result_ptr: tl.tensor,
    GROUP_SIZE: tl.constexpr, LANES: tl.constexpr, TILE_GROUPS: tl.constexpr, PARTIAL_GROUPS: tl.constexpr,
    MASKED: tl.constexpr, ALIGNED: tl.constexpr, HAS_RUNS: tl.constexpr, VECTOR: tl.constexpr, IS_STEP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, STOCHASTIC: tl.constexpr, REMAINDER_BITS: tl.constexpr, GATED: tl.constexpr,
    CLIP: tl.constexpr, MU: tl.constexpr, NU: tl.constexpr, DEAD_ELEMENTS: tl.constexpr, FAST_PATH: tl.constexpr,
) -> None:  # fmt: skip
    """Update a tile of any groups. Moments, and with IS_STEP the weight, are updated in place."""
    group = tile * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    element = tl.arange(0, GROUP_SIZE // LANES)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    group_mask = group < groups
    if PARTIAL_GROUPS:
        length = vectors_of_row * VECTOR if ALIGNED else vectors_of_row
        row = group // groups_of_row
        column = (group - row * groups_of_row) * GROUP_SIZE
        start = row.to(tl.int64) * length + column
        if ALIGNED:
            start = tl.multiple_of(start, VECTOR)
        base = tile.to(tl.int64) * 0
        offsets = codec.broadcast_groups(start) + element
        mask = codec.broadcast_groups(group_mask) & (codec.broadcast_groups(column) + element < length)
    else:
        base = tile.to(tl.int64) * (TILE_GROUPS * GROUP_SIZE)
        offsets = tl.arange(0, TILE_GROUPS)[:, None, None] * GROUP_SIZE + element
        mask = codec.broadcast_groups(group_mask) & (element >= 0)
    tl.static_assert(VECTOR > _CONTIGUOUS_GROUPS, "a thread takes neighbours of a group")
    offsets = tl.max_contiguous(offsets, (_CONTIGUOUS_GROUPS, 1, VECTOR))

    g = codec.load(grad_ptr + base, offsets, mask, MASKED)
    w = codec.load(weight_ptr + base, offsets, mask, MASKED) if HAS_WEIGHT else 0.0
    remainder = codec.load(remainder_ptr + base, offsets, mask, MASKED) if REMAINDER_BITS > 0 else 0
    rate, weight_decay = tl.load(scalars_ptr), tl.load(scalars_ptr + 1)
    b1, one_minus_b1 = tl.load(scalars_ptr + 2), tl.load(scalars_ptr + 3)
    b2, one_minus_b2 = tl.load(scalars_ptr + 4), tl.load(scalars_ptr + 5)
    root_floor, negative_eps = tl.load(scalars_ptr + 6), tl.load(scalars_ptr + 7)
    word1 = tl.load(seed_ptr) if STOCHASTIC else 0
    word2 = tl.load(seed_ptr + 1) if STOCHASTIC else 0
    nu = codec.load(nu_ptr + base, offsets, mask, MASKED)
    mu = codec.load(mu_ptr + base, offsets, mask, MASKED)
    # The assembler delays loads until their values are used, but not past a barrier. Scales are used first.
    tl.debug_barrier()
    nu_scale = codec.load(nu_scale_ptr, group, group_mask, MASKED) if NU.has_scale else 1.0
    nu_exponent = codec.load(nu_exponent_ptr, group, group_mask, MASKED) if NU.is_expanded else 1.0
    mu_scale = codec.load(mu_scale_ptr, group, group_mask, MASKED) if MU.has_scale else 1.0
    mu_exponent = codec.load(mu_exponent_ptr, group, group_mask, MASKED) if MU.is_expanded else 1.0

    # The second moment comes first, here and below: this order needs the fewest registers.
    factor = tl.load(scalars_ptr + 21) if GATED else tl.full((), 1.0, tl.float32)
    g = codec.scale_and_clip_gradient(codec.to_fp32(g), factor, codec.LARGEST_GRADIENT)
    w = (
        masters.join_master(w, remainder, REMAINDER_BITS)
        if REMAINDER_BITS > 0
        else codec.to_fp32(w)
        if HAS_WEIGHT
        else 0.0
    )
    v = codec.multiply_add(g * g, one_minus_b2, codec.decode(nu, nu_scale, nu_exponent, b2, NU))
    m = codec.multiply_add(g, one_minus_b1, codec.decode(mu, mu_scale, mu_exponent, b1, MU))
    inverse_root = codec.rsqrt_approx(v + root_floor)
    change = m * codec.divide_negative_approx(inverse_root, tl.fma(inverse_root, negative_eps, -1.0))
    v_amax_bits, m_amax_bits, m_code_magnitudes = (
        encode.amax_bits(v, False, FAST_PATH),
        encode.amax_bits(m, True, FAST_PATH),
        m,
    )
    v_amax = codec.from_bits(v_amax_bits)
    inverse_root = codec.rsqrt_approx(v_amax + root_floor)
    direction = codec.divide_negative_approx(inverse_root, tl.fma(inverse_root, negative_eps, -1.0)) * codec.from_bits(
        m_amax_bits
    )
    if NU.is_expanded:
        limit = direction * DEAD_ELEMENTS.silent
        smallest = tl.min(tl.min(tl.abs(change), axis=1), axis=1)
        if tl.max((smallest < limit).to(tl.int32), axis=0) > 0:
            is_silent = (tl.abs(change) < codec.broadcast_groups(limit)) & (tl.abs(g) < _TINY) & (v > 0)
            previous_v = v * tl.load(scalars_ptr + 20)
            v = tl.where(is_silent, _dead_v(v, previous_v, codec.broadcast_groups(v_amax), DEAD_ELEMENTS), v)
    if MU.is_expanded:
        m, m_code_magnitudes = encode.zero_dead_elements(m, change, direction * DEAD_ELEMENTS.idle)
    if CLIP:
        change = tl.where(
            tl.abs(change) < float("inf"), _clip_change(change, scalars_ptr + _GENERAL_LIMIT + 2 * GATED), change
        )
    if HAS_WEIGHT:
        change = tl.fma(w, weight_decay, change)
    result = tl.fma(change, rate, w) if IS_STEP else change * rate
    if STOCHASTIC:
        octets = (base >> 3).to(tl.uint32) + (offsets >> 3).to(tl.uint32)
        noise = codec.pair_noise(octets, offsets, word1, word2)
        result = codec.round_stochastically(result, noise, offsets, ALIGNED)
    if REMAINDER_BITS > 0:
        result, remainder = masters.split_master(result, REMAINDER_BITS)
        codec.store(remainder_ptr + base, offsets, remainder, mask, MASKED)
    codec.store((weight_ptr if IS_STEP else result_ptr) + base, offsets, result, mask, MASKED)

    noise = offsets
    if NU.dropped > 0:
        noise = _group_noise(
            group,
            element,
            words_ptr,
            salt_ptr,
            run_length,
            run_stride,
            GROUP_SIZE,
            HAS_RUNS,
            _NUM_SCALARS + 2 * GATED + 2 * CLIP,
        )
    dither = (
        tl.load(scalars_ptr + _NUM_SCALARS + 2 * GATED + 2 * CLIP + 2 * (NU.dropped > 0)) if MU.mantissa > 0 else 0.0
    )
    _store_moment(
        v, v, v_amax_bits, nu_ptr + base, nu_scale_ptr, nu_exponent_ptr, offsets, mask, group, group_mask,
        nu_exponent, noise, element, b2, dither, one_bits, MASKED, NU, FAST_PATH, ALIGNED,
    )  # fmt: skip
    _store_moment(
        m, m_code_magnitudes, m_amax_bits, mu_ptr + base, mu_scale_ptr, mu_exponent_ptr, offsets, mask, group,
        group_mask, mu_exponent, noise, element, b1, dither, one_bits, MASKED, MU, FAST_PATH, ALIGNED,
    )  # fmt: skip


@triton.jit
def _store_moment_fast(
    x: tl.tensor, largest: tl.tensor, k: tl.tensor, unit: tl.tensor, inverse_unit: tl.tensor, pointer: tl.tensor,
    scale_ptr: tl.tensor, exponent_ptr: tl.tensor, offsets: tl.tensor, group: tl.tensor, noise: tl.tensor,
    one_bits: tl.tensor, STORAGE: tl.constexpr,
) -> None:  # fmt: skip
    code = pointer.dtype.element_ty
    codes, scale, exponent = encode.encode_fast(x, largest, k, unit, inverse_unit, noise, one_bits, code, STORAGE)
    tl.store(scale_ptr + group, scale)
    tl.store(exponent_ptr + group, exponent)
    tl.store(pointer + offsets, codes)


@triton.jit
def _store_result(
    change: tl.tensor, w: tl.tensor, rate: tl.tensor, decay: tl.tensor, pointer: tl.tensor, offsets: tl.tensor,
    octets: tl.tensor, seed_ptr: tl.tensor, remainder: tl.tensor, remainder_ptr: tl.tensor, IS_STEP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, STOCHASTIC: tl.constexpr, MAY_HAVE_NAN: tl.constexpr, REMAINDER_BITS: tl.constexpr,
) -> None:  # fmt: skip
    if HAS_WEIGHT:
        w = masters.join_master(w, remainder, REMAINDER_BITS) if REMAINDER_BITS > 0 else codec.to_fp32(w)
        change = tl.fma(w, decay, change)
    result = tl.fma(change, rate, w) if IS_STEP else change * rate
    if STOCHASTIC:
        element = tl.arange(0, offsets.shape[2])[None, None, :]
        noise = codec.pair_noise(octets, element, tl.load(seed_ptr), tl.load(seed_ptr + 1))
        result = codec.round_stochastically(result, noise, element, True, MAY_HAVE_NAN)
    if REMAINDER_BITS > 0:
        result, remainder = masters.split_master(result, REMAINDER_BITS)
        tl.store(remainder_ptr + offsets, remainder.to(remainder_ptr.dtype.element_ty))
    tl.store(pointer + offsets, result.to(pointer.dtype.element_ty))


@triton.jit
def update_tile_fast(
    tile: tl.tensor, grad_ptr: tl.tensor, weight_ptr: tl.tensor, mu_ptr: tl.tensor, mu_scale_ptr: tl.tensor,
    mu_exponent_ptr: tl.tensor, nu_ptr: tl.tensor, nu_scale_ptr: tl.tensor, nu_exponent_ptr: tl.tensor,
    scalars_ptr: tl.tensor, seed_ptr: tl.tensor, words_ptr: tl.tensor, table_ptr: tl.tensor, remainder_ptr: tl.tensor,
    salt_ptr: tl.tensor, run_length: tl.tensor, run_stride: tl.tensor, one_bits: tl.tensor, result_ptr: tl.tensor,
    GROUP_SIZE: tl.constexpr, LANES: tl.constexpr, TILE_GROUPS: tl.constexpr, HAS_RUNS: tl.constexpr,
    VECTOR: tl.constexpr, IS_STEP: tl.constexpr, HAS_WEIGHT: tl.constexpr, STOCHASTIC: tl.constexpr,
    REMAINDER_BITS: tl.constexpr, GATED: tl.constexpr, CLIP: tl.constexpr, MU: tl.constexpr, NU: tl.constexpr,
    DEAD_ELEMENTS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Update a tile of whole groups, and return 0; or return 1 and leave the tile unchanged.

    Moments are m / (1 - b1) and v / (1 - b2), so that gradients and their squares are added without a factor.
    """
    tl.static_assert(LANES % 8 == 0, "eight neighbours, which share a hash, lie in one chunk")
    group = tile * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    base = tile.to(tl.int64) * (TILE_GROUPS * GROUP_SIZE)
    chunk, lane = tl.arange(0, GROUP_SIZE // LANES)[None, :, None], tl.arange(0, LANES)[None, None, :]
    tl.static_assert(VECTOR > _CONTIGUOUS_GROUPS, "a thread takes neighbours of a group")
    offsets = codec.broadcast_groups(tl.arange(0, TILE_GROUPS)) * GROUP_SIZE + chunk * LANES + lane
    offsets = tl.max_contiguous(offsets, (_CONTIGUOUS_GROUPS, 1, VECTOR))
    octets = codec.broadcast_groups(tl.arange(0, TILE_GROUPS)) * (GROUP_SIZE // 8) + chunk * (LANES // 8) + (lane >> 3)
    octets = (base >> 3).to(tl.uint32) + octets.to(tl.uint32)

    g = tl.load(grad_ptr + base + offsets)
    w = tl.load(weight_ptr + base + offsets) if HAS_WEIGHT else 0.0
    remainder = tl.load(remainder_ptr + base + offsets) if REMAINDER_BITS > 0 else 0
    rate, decay, slope, eps = codec.load_float4(scalars_ptr + 8)
    one_minus_b1, one_minus_b2, b1_ratio, b2_ratio = codec.load_float4(scalars_ptr + 12)
    inverse_one_minus_b1, inverse_one_minus_b2, eps_root, eps_is_small_from = codec.load_float4(scalars_ptr + 16)
    nu = tl.load(nu_ptr + base + offsets)
    mu = tl.load(mu_ptr + base + offsets)
    tl.debug_barrier()
    nu_scale, nu_exponent = tl.load(nu_scale_ptr + group), tl.load(nu_exponent_ptr + group)
    mu_scale, mu_exponent = tl.load(mu_scale_ptr + group), tl.load(mu_exponent_ptr + group)

    # A non-finite weight sends its tile to `update_tile_general`, which adds noise to NaN correctly.
    MARKS_NONFINITE: tl.constexpr = STOCHASTIC and g.dtype == tl.bfloat16
    g = codec.to_fp32(codec.nan_where_not_finite(g, w) if MARKS_NONFINITE else g)
    # A table, because the unit for log2, exp2 and roots is nearly saturated.
    logarithms = look_up_codes(nu, table_ptr)
    v = codec.multiply_add(g, g, codec.decode_from_log2(logarithms, nu_scale, nu_exponent, b2_ratio, NU))
    m = codec.add_decoded(g, mu, mu_scale, mu_exponent, b1_ratio, MU)
    v_largest, v_smallest = encode.fast_extremes(v, False)
    m_largest, m_smallest = encode.fast_extremes(m, True)
    v_least, m_least = (
        codec.float_bits(inverse_one_minus_b2 * (_TINY * NU.max)),
        codec.float_bits(inverse_one_minus_b1 * (_SMALL * MU.max)),
    )
    needs_general_path = (
        (v_smallest < v_least) | (m_smallest < m_least) | (tl.maximum(v_largest, m_largest) > _HUGE_BITS)
    )
    # This first moment may be that of a dead element without gradient.
    needs_general_path |= m_smallest < codec.float_bits(codec.from_bits(m_largest) * DEAD_ELEMENTS.silent)
    case = tl.max(
        tl.where(needs_general_path, 2, tl.where(v_smallest < codec.float_bits(eps_is_small_from), 1, 0)), axis=0
    )
    v_k = encode.fast_exponents(v_largest, v_smallest, one_minus_b2, inverse_one_minus_b2, nu_exponent, NU)
    if case < 2:
        pointer = (weight_ptr if IS_STEP else result_ptr) + base
        root = codec.sqrt_approx(codec.from_bits(v_largest) + eps_root)
        dead_limit = codec.from_bits(m_largest) * codec.reciprocal_approx(root + eps) * DEAD_ELEMENTS.idle
        if case == 0:
            r = codec.rsqrt_approx(v)
            change = m * (r * tl.fma(r, slope, 1.0))
            m, m_code_magnitudes = encode.zero_dead_elements(m, change, dead_limit)
            m_smallest = encode.min_magnitude_bits(m_code_magnitudes)
            if CLIP:
                change = _clip_change(change, scalars_ptr + _FAST_LIMIT + 2 * GATED)
            _store_result(
                change, w, rate, decay, pointer, offsets, octets, seed_ptr, remainder, remainder_ptr + base, IS_STEP,
                HAS_WEIGHT, STOCHASTIC, not MARKS_NONFINITE, REMAINDER_BITS,
            )  # fmt: skip
        else:
            change = m * codec.reciprocal_approx(codec.sqrt_approx(v + eps_root) + eps)
            m, m_code_magnitudes = encode.zero_dead_elements(m, change, dead_limit)
            m_smallest = encode.min_magnitude_bits(m_code_magnitudes)
            if CLIP:
                change = _clip_change(change, scalars_ptr + _FAST_LIMIT + 2 * GATED)
            _store_result(
                change, w, rate, decay, pointer, offsets, octets, seed_ptr, remainder, remainder_ptr + base, IS_STEP,
                HAS_WEIGHT, STOCHASTIC, not MARKS_NONFINITE, REMAINDER_BITS,
            )  # fmt: skip
        m_k = encode.fast_exponents(m_largest, m_smallest, one_minus_b1, inverse_one_minus_b1, mu_exponent, MU)
        _store_moment_fast(
            m, m_largest, m_k, one_minus_b1, inverse_one_minus_b1,
            mu_ptr + base, mu_scale_ptr, mu_exponent_ptr, offsets, group, offsets, one_bits, MU,
        )  # fmt: skip
        noise = offsets
        if NU.dropped > 0:
            noise = _group_noise(
                group,
                chunk * LANES + lane,
                words_ptr,
                salt_ptr,
                run_length,
                run_stride,
                GROUP_SIZE,
                HAS_RUNS,
                _NUM_SCALARS + 2 * GATED + 2 * CLIP,
            )
        _store_moment_fast(
            v, v_largest, v_k, one_minus_b2, inverse_one_minus_b2,
            nu_ptr + base, nu_scale_ptr, nu_exponent_ptr, offsets, group, noise, one_bits, NU,
        )  # fmt: skip
    return case // 2
