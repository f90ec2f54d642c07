"""Device code of AdamW on 8-bit moments, in Triton: the update of a tile of groups.

`careful` takes every tile. `ordinary` takes whole groups of two moments in codes with range expansion, in 30 %
fewer instructions, and writes nothing where a value is zero, tiny, huge, Inf or NaN.
"""

import numpy as np
import triton
import triton.language as tl

from pallas_kernels import codec_triton as codec
from pallas_kernels import encode_triton as encode
from pallas_kernels import masters_triton as masters

_TINY = tl.constexpr(float(np.finfo(np.float32).tiny))
# So small a moment's ratio to its code may be subnormal.
_SMALL = tl.constexpr(float(np.finfo(np.float32).tiny) * 2**24)
# Bits of 2^50; Inf and NaN are larger, and what is smaller makes no change of Inf or NaN.
_HUGE = tl.constexpr(0x58800000)
# How many groups are said to be neighbours in memory, which they are not: so Triton 3.7 spreads threads over groups
# before chunks, as 3.6 does by itself. It is a run in a chunk that a thread takes, as long as that is the longer one.
_GROUPS = tl.constexpr(2)
# Where, after a gate of two if there is one, the limits of both kinds of tiles stand among the scalars.
_CAREFUL, _ORDINARY = tl.constexpr(21), tl.constexpr(22)
# Scalars of every step.
_END = tl.constexpr(21)


@triton.jit
def look_up(codes: tl.tensor, table_ptr: tl.tensor) -> tl.tensor:
    """The codes' entries in a table of 256 fp32 numbers, in the codes' own layout, which `tl.load` would change."""
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
def _cut(change: tl.tensor, limit_ptr: tl.tensor) -> tl.tensor:
    return codec.smaller(change, tl.load(limit_ptr))


@triton.jit
def _noise_of_groups(
    group: tl.tensor, inside: tl.tensor, words_ptr: tl.tensor, salt: tl.tensor, inner: tl.tensor, stride: tl.tensor,
    SIZE: tl.constexpr, RUNS: tl.constexpr, SCALARS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Noise by the group's number in the whole array and the place in the group; see `codec.noise_of_pairs`."""
    number = group.to(tl.uint32)
    if RUNS:
        run = group // inner
        number = (run * stride + (group - run * inner)).to(tl.uint32)
    eighths = codec.per_group(number) * (SIZE // 8) + (inside >> 3).to(tl.uint32)
    at = words_ptr + SCALARS
    word1 = tl.load(at).to(tl.uint32, bitcast=True) + salt.to(tl.uint32)
    word2 = tl.load(at + 1).to(tl.uint32, bitcast=True) ^ (salt.to(tl.uint32) * 0x85EBCA6B)
    return codec.noise_of_pairs(eighths, inside, word1, word2)


@triton.jit
def _store_moment(
    x: tl.tensor, ranged: tl.tensor, peak: tl.tensor, pointer: tl.tensor, scale_ptr: tl.tensor, exponent_ptr: tl.tensor,
    offsets: tl.tensor, mask: tl.tensor, group: tl.tensor, there: tl.tensor, previous: tl.tensor, noise: tl.tensor,
    inside: tl.tensor, decay: tl.tensor, drawn: tl.tensor, one: tl.tensor,
    MASKED: tl.constexpr, HOW: tl.constexpr, QUICK: tl.constexpr, PAIRED: tl.constexpr,
) -> None:  # fmt: skip
    stored = x
    if HOW.scaled:
        code = pointer.dtype.element_ty
        stored, scale, exponent = encode.encode(
            x, ranged, peak, previous, noise, inside, decay, drawn, one, code, HOW, QUICK, PAIRED
        )
        codec.store(scale_ptr, group, scale, there, MASKED)
        if HOW.expanded:
            codec.store(exponent_ptr, group, exponent, there, MASKED)
    elif HOW.dropped > 0:
        stored = codec.round_stochastically(x, noise, inside, PAIRED)
    codec.store(pointer, offsets, stored, mask, MASKED)


@triton.jit
def _rest(v: tl.tensor, before: tl.tensor, peak: tl.tensor, MEMBERS: tl.constexpr) -> tl.tensor:
    """What second moments of silent members become, given what they were before this step."""
    low = tl.maximum(before, peak * MEMBERS.lowest)
    rest = tl.where(before < peak * MEMBERS.near, low, peak * MEMBERS.raised)
    return tl.where(before < peak * MEMBERS.raised, rest, v)


@triton.jit
def careful(
    tile: tl.tensor, grad_ptr: tl.tensor, weight_ptr: tl.tensor, mu_ptr: tl.tensor, mu_scale_ptr: tl.tensor,
    mu_exponent_ptr: tl.tensor, nu_ptr: tl.tensor, nu_scale_ptr: tl.tensor, nu_exponent_ptr: tl.tensor,
    scalars_ptr: tl.tensor, seed_ptr: tl.tensor, words_ptr: tl.tensor, rest_ptr: tl.tensor, groups: tl.tensor,
    groups_of_row: tl.tensor, vectors_of_row: tl.tensor, salt: tl.tensor, inner: tl.tensor, stride: tl.tensor,
    one: tl.tensor, result_ptr: tl.tensor,
    SIZE: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, SHORT: tl.constexpr, MASKED: tl.constexpr,
    ALIGNED: tl.constexpr, RUNS: tl.constexpr, VECTOR: tl.constexpr, STEP: tl.constexpr, WEIGHT: tl.constexpr,
    STOCHASTIC: tl.constexpr, REST: tl.constexpr, GATED: tl.constexpr, CUT: tl.constexpr, MU: tl.constexpr,
    NU: tl.constexpr, MEMBERS: tl.constexpr, QUICK: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of any groups. Moments, and in a step the weight, are written where they were read."""
    group = tile * TILE + tl.arange(0, TILE)
    inside = tl.arange(0, SIZE // LANES)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    there = group < groups
    if SHORT:
        length = vectors_of_row * VECTOR if ALIGNED else vectors_of_row
        row = group // groups_of_row
        column = (group - row * groups_of_row) * SIZE
        start = row.to(tl.int64) * length + column
        if ALIGNED:
            start = tl.multiple_of(start, VECTOR)
        base = tile.to(tl.int64) * 0
        offsets = codec.per_group(start) + inside
        mask = codec.per_group(there) & (codec.per_group(column) + inside < length)
    else:
        base = tile.to(tl.int64) * (TILE * SIZE)
        offsets = tl.arange(0, TILE)[:, None, None] * SIZE + inside
        mask = codec.per_group(there) & (inside >= 0)
    tl.static_assert(VECTOR > _GROUPS, "a thread takes neighbours of a group")
    offsets = tl.max_contiguous(offsets, (_GROUPS, 1, VECTOR))

    g = codec.load(grad_ptr + base, offsets, mask, MASKED)
    w = codec.load(weight_ptr + base, offsets, mask, MASKED) if WEIGHT else 0.0
    rest = codec.load(rest_ptr + base, offsets, mask, MASKED) if REST > 0 else 0
    rate, weight_decay = tl.load(scalars_ptr), tl.load(scalars_ptr + 1)
    b1, b1_rest = tl.load(scalars_ptr + 2), tl.load(scalars_ptr + 3)
    b2, b2_rest = tl.load(scalars_ptr + 4), tl.load(scalars_ptr + 5)
    least, negative_eps = tl.load(scalars_ptr + 6), tl.load(scalars_ptr + 7)
    word1 = tl.load(seed_ptr) if STOCHASTIC else 0
    word2 = tl.load(seed_ptr + 1) if STOCHASTIC else 0
    nu = codec.load(nu_ptr + base, offsets, mask, MASKED)
    mu = codec.load(mu_ptr + base, offsets, mask, MASKED)
    # The assembler puts loads off to where their values are used, but not past a barrier; scales are used first.
    tl.debug_barrier()
    nu_scale = codec.load(nu_scale_ptr, group, there, MASKED) if NU.scaled else 1.0
    nu_exponent = codec.load(nu_exponent_ptr, group, there, MASKED) if NU.expanded else 1.0
    mu_scale = codec.load(mu_scale_ptr, group, there, MASKED) if MU.scaled else 1.0
    mu_exponent = codec.load(mu_exponent_ptr, group, there, MASKED) if MU.expanded else 1.0

    # The second moment comes first, here and below: the assembler then needs fewest registers.
    factor = tl.load(scalars_ptr + 21) if GATED else tl.full((), 1.0, tl.float32)
    g = codec.within(codec.fp32(g), factor, codec.LARGEST_GRADIENT)
    w = masters.joined(w, rest, REST) if REST > 0 else codec.fp32(w) if WEIGHT else 0.0
    v = codec.multiply_add(g * g, b2_rest, codec.decode(nu, nu_scale, nu_exponent, b2, NU))
    m = codec.multiply_add(g, b1_rest, codec.decode(mu, mu_scale, mu_exponent, b1, MU))
    inverse_root = codec.inverse_root(v + least)
    change = m * codec.over_negative(inverse_root, tl.fma(inverse_root, negative_eps, -1.0))
    v_peak, m_peak, m_ranged = encode.peak(v, False, QUICK), encode.peak(m, True, QUICK), m
    largest = codec.from_bits(v_peak)
    inverse_root = codec.inverse_root(largest + least)
    direction = codec.over_negative(inverse_root, tl.fma(inverse_root, negative_eps, -1.0)) * codec.from_bits(m_peak)
    if NU.expanded:
        limit = direction * MEMBERS.silent
        smallest = tl.min(tl.min(tl.abs(change), axis=1), axis=1)
        if tl.max((smallest < limit).to(tl.int32), axis=0) > 0:
            silent = (tl.abs(change) < codec.per_group(limit)) & (tl.abs(g) < _TINY) & (v > 0)
            before = v * tl.load(scalars_ptr + 20)
            v = tl.where(silent, _rest(v, before, codec.per_group(largest), MEMBERS), v)
    if MU.expanded:
        m, m_ranged = encode.without_idle(m, change, direction * MEMBERS.idle)
    if CUT:
        change = tl.where(tl.abs(change) < float("inf"), _cut(change, scalars_ptr + _CAREFUL + 2 * GATED), change)
    if WEIGHT:
        change = tl.fma(w, weight_decay, change)
    result = tl.fma(change, rate, w) if STEP else change * rate
    if STOCHASTIC:
        eighths = (base >> 3).to(tl.uint32) + (offsets >> 3).to(tl.uint32)
        noise = codec.noise_of_pairs(eighths, offsets, word1, word2)
        result = codec.round_stochastically(result, noise, offsets, ALIGNED)
    if REST > 0:
        result, rest = masters.split(result, REST)
        codec.store(rest_ptr + base, offsets, rest, mask, MASKED)
    codec.store((weight_ptr if STEP else result_ptr) + base, offsets, result, mask, MASKED)

    noise = offsets
    if NU.dropped > 0:
        noise = _noise_of_groups(group, inside, words_ptr, salt, inner, stride, SIZE, RUNS, _END + 2 * GATED + 2 * CUT)
    drawn = tl.load(scalars_ptr + _END + 2 * GATED + 2 * CUT + 2 * (NU.dropped > 0)) if MU.mantissa > 0 else 0.0
    _store_moment(
        v, v, v_peak, nu_ptr + base, nu_scale_ptr, nu_exponent_ptr, offsets, mask, group, there,
        nu_exponent, noise, inside, b2, drawn, one, MASKED, NU, QUICK, ALIGNED,
    )  # fmt: skip
    _store_moment(
        m, m_ranged, m_peak, mu_ptr + base, mu_scale_ptr, mu_exponent_ptr, offsets, mask, group, there,
        mu_exponent, noise, inside, b1, drawn, one, MASKED, MU, QUICK, ALIGNED,
    )  # fmt: skip


@triton.jit
def _store_ordinary(
    x: tl.tensor, largest: tl.tensor, k: tl.tensor, unit: tl.tensor, per_unit: tl.tensor, pointer: tl.tensor,
    scale_ptr: tl.tensor, exponent_ptr: tl.tensor, offsets: tl.tensor, group: tl.tensor, noise: tl.tensor,
    one: tl.tensor, HOW: tl.constexpr,
) -> None:  # fmt: skip
    code = pointer.dtype.element_ty
    codes, scale, exponent = encode.encode_ordinary(x, largest, k, unit, per_unit, noise, one, code, HOW)
    tl.store(scale_ptr + group, scale)
    tl.store(exponent_ptr + group, exponent)
    tl.store(pointer + offsets, codes)


@triton.jit
def _store_result(
    change: tl.tensor, w: tl.tensor, rate: tl.tensor, decay: tl.tensor, pointer: tl.tensor, offsets: tl.tensor,
    eighths: tl.tensor, seed_ptr: tl.tensor, rest: tl.tensor, rest_ptr: tl.tensor, STEP: tl.constexpr,
    WEIGHT: tl.constexpr, STOCHASTIC: tl.constexpr, NAN: tl.constexpr, REST: tl.constexpr,
) -> None:  # fmt: skip
    if WEIGHT:
        w = masters.joined(w, rest, REST) if REST > 0 else codec.fp32(w)
        change = tl.fma(w, decay, change)
    result = tl.fma(change, rate, w) if STEP else change * rate
    if STOCHASTIC:
        place = tl.arange(0, offsets.shape[2])[None, None, :]
        noise = codec.noise_of_pairs(eighths, place, tl.load(seed_ptr), tl.load(seed_ptr + 1))
        result = codec.round_stochastically(result, noise, place, True, NAN)
    if REST > 0:
        result, rest = masters.split(result, REST)
        tl.store(rest_ptr + offsets, rest.to(rest_ptr.dtype.element_ty))
    tl.store(pointer + offsets, result.to(pointer.dtype.element_ty))


@triton.jit
def ordinary(
    tile: tl.tensor, grad_ptr: tl.tensor, weight_ptr: tl.tensor, mu_ptr: tl.tensor, mu_scale_ptr: tl.tensor,
    mu_exponent_ptr: tl.tensor, nu_ptr: tl.tensor, nu_scale_ptr: tl.tensor, nu_exponent_ptr: tl.tensor,
    scalars_ptr: tl.tensor, seed_ptr: tl.tensor, words_ptr: tl.tensor, table_ptr: tl.tensor, rest_ptr: tl.tensor,
    salt: tl.tensor, inner: tl.tensor, stride: tl.tensor, one: tl.tensor, result_ptr: tl.tensor,
    SIZE: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, RUNS: tl.constexpr, VECTOR: tl.constexpr,
    STEP: tl.constexpr, WEIGHT: tl.constexpr, STOCHASTIC: tl.constexpr, REST: tl.constexpr, GATED: tl.constexpr,
    CUT: tl.constexpr, MU: tl.constexpr, NU: tl.constexpr, MEMBERS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A tile of whole groups; 0 where it was updated, 1 where it is left as it was.

    The moments here are m / (1 - b1) and v / (1 - b2), to which gradient and squared gradient are added as they are.
    """
    tl.static_assert(LANES % 8 == 0, "eight neighbours, which share a hash, lie in one chunk")
    group = tile * TILE + tl.arange(0, TILE)
    base = tile.to(tl.int64) * (TILE * SIZE)
    chunk, lane = tl.arange(0, SIZE // LANES)[None, :, None], tl.arange(0, LANES)[None, None, :]
    tl.static_assert(VECTOR > _GROUPS, "a thread takes neighbours of a group")
    offsets = codec.per_group(tl.arange(0, TILE)) * SIZE + chunk * LANES + lane
    offsets = tl.max_contiguous(offsets, (_GROUPS, 1, VECTOR))
    eighths = codec.per_group(tl.arange(0, TILE)) * (SIZE // 8) + chunk * (LANES // 8) + (lane >> 3)
    eighths = (base >> 3).to(tl.uint32) + eighths.to(tl.uint32)

    g = tl.load(grad_ptr + base + offsets)
    w = tl.load(weight_ptr + base + offsets) if WEIGHT else 0.0
    rest = tl.load(rest_ptr + base + offsets) if REST > 0 else 0
    rate, decay, slope, eps = codec.load_four(scalars_ptr + 8)
    b1_rest, b2_rest, b1_ratio, b2_ratio = codec.load_four(scalars_ptr + 12)
    b1_per_rest, b2_per_rest, eps_root, eps_is_small_from = codec.load_four(scalars_ptr + 16)
    nu = tl.load(nu_ptr + base + offsets)
    mu = tl.load(mu_ptr + base + offsets)
    tl.debug_barrier()
    nu_scale, nu_exponent = tl.load(nu_scale_ptr + group), tl.load(nu_exponent_ptr + group)
    mu_scale, mu_exponent = tl.load(mu_scale_ptr + group), tl.load(mu_exponent_ptr + group)

    # A weight that is not finite makes its tile one for `careful`, where noise is added to NaN with care.
    MARKED: tl.constexpr = STOCHASTIC and g.dtype == tl.bfloat16
    g = codec.fp32(codec.nan_where_not_finite(g, w) if MARKED else g)
    # Looked up, since the unit that computes log2, exp2 and roots is close to its limit.
    logarithms = look_up(nu, table_ptr)
    v = codec.multiply_add(g, g, codec.decode_logarithms(logarithms, nu_scale, nu_exponent, b2_ratio, NU))
    m = codec.add_decoded(g, mu, mu_scale, mu_exponent, b1_ratio, MU)
    v_largest, v_smallest = encode.ordinary_extremes(v, False)
    m_largest, m_smallest = encode.ordinary_extremes(m, True)
    v_least, m_least = codec.bits(b2_per_rest * (_TINY * NU.max)), codec.bits(b1_per_rest * (_SMALL * MU.max))
    special = (v_smallest < v_least) | (m_smallest < m_least) | (tl.maximum(v_largest, m_largest) > _HUGE)
    # A first moment so small may be that of a silent member.
    special |= m_smallest < codec.bits(codec.from_bits(m_largest) * MEMBERS.silent)
    case = tl.max(tl.where(special, 2, tl.where(v_smallest < codec.bits(eps_is_small_from), 1, 0)), axis=0)
    v_k = encode.ordinary_exponents(v_largest, v_smallest, b2_rest, b2_per_rest, nu_exponent, NU)
    if case < 2:
        pointer = (weight_ptr if STEP else result_ptr) + base
        root = codec.root(codec.from_bits(v_largest) + eps_root)
        idle = codec.from_bits(m_largest) * codec.reciprocal(root + eps) * MEMBERS.idle
        if case == 0:
            r = codec.inverse_root(v)
            change = m * (r * tl.fma(r, slope, 1.0))
            m, m_ranged = encode.without_idle(m, change, idle)
            m_smallest = encode.smallest(m_ranged)
            if CUT:
                change = _cut(change, scalars_ptr + _ORDINARY + 2 * GATED)
            _store_result(
                change, w, rate, decay, pointer, offsets, eighths, seed_ptr, rest, rest_ptr + base, STEP, WEIGHT,
                STOCHASTIC, not MARKED, REST,
            )  # fmt: skip
        else:
            change = m * codec.reciprocal(codec.root(v + eps_root) + eps)
            m, m_ranged = encode.without_idle(m, change, idle)
            m_smallest = encode.smallest(m_ranged)
            if CUT:
                change = _cut(change, scalars_ptr + _ORDINARY + 2 * GATED)
            _store_result(
                change, w, rate, decay, pointer, offsets, eighths, seed_ptr, rest, rest_ptr + base, STEP, WEIGHT,
                STOCHASTIC, not MARKED, REST,
            )  # fmt: skip
        m_k = encode.ordinary_exponents(m_largest, m_smallest, b1_rest, b1_per_rest, mu_exponent, MU)
        _store_ordinary(
            m, m_largest, m_k, b1_rest, b1_per_rest,
            mu_ptr + base, mu_scale_ptr, mu_exponent_ptr, offsets, group, offsets, one, MU,
        )  # fmt: skip
        noise = offsets
        if NU.dropped > 0:
            noise = _noise_of_groups(
                group, chunk * LANES + lane, words_ptr, salt, inner, stride, SIZE, RUNS, _END + 2 * GATED + 2 * CUT
            )
        _store_ordinary(
            v, v_largest, v_k, b2_rest, b2_per_rest,
            nu_ptr + base, nu_scale_ptr, nu_exponent_ptr, offsets, group, noise, one, NU,
        )  # fmt: skip
    return case // 2
