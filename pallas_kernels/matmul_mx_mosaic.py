"""Two-level microscaled FP8 product for Hopper: the kernel applies the left operand's E8M0 exponents, per 32 of K."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels import hopper
from pallas_kernels.hopper_wgmma import finish_product, start_product, start_product_of_registers

GROUP = 32
GROUPS_PER_STEP = hopper.K_STEP // GROUP

# Four e4m3 codes in $1 times the half-precision pair in $2, rounded to nearest even and saturated.
SCALE_FOUR_CODES = """{ .reg .b16 low, high; .reg .b32 x, y;
 mov.b32 {low, high}, $1;
 cvt.rn.f16x2.e4m3x2 x, low;
 cvt.rn.f16x2.e4m3x2 y, high;
 mul.rn.f16x2 x, x, $2;
 mul.rn.f16x2 y, y, $2;
 cvt.rn.satfinite.e4m3x2.f16x2 low, x;
 cvt.rn.satfinite.e4m3x2.f16x2 high, y;
 mov.b32 $0, {low, high}; }"""


def matmul_mx(
    a: jax.Array,
    b: jax.Array,
    a_exponent: jax.Array,
    *,
    mode: Literal["registers", "exact"] = "registers",
    scale: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    column_scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype: Any = jnp.bfloat16,
    tile: hopper.Tile | None = None,
    unroll: int = 2,
    interpret: hopper.Interpret = None,
) -> jax.Array:
    """`(a * 2^(a_exponent - 127)) @ b.T`, then scales, bias and residual as in `matmul_mosaic.matmul`.

    The left operand is microscaled: an fp32 level-1 scale per tensor (`scale`) or per row (`row_scale`), and a power of
    two for every 32 of K (MOSS). Two contracts:

    - `registers`: each code is multiplied by its power of two in registers and rounded to e4m3 again, to nearest even
      and saturating: the same codes as a quantizer that folds, at the memory of the unfolded ones. Exact while the code
      stays normal, so for a code of 2^k down to powers of 2^(-6 - k); powers below 2^-17 count as 0, above 2^15 as NaN.
      Fast accumulation, as in `matmul`.
    - `exact`: partial sums of 32 enter an fp32 accumulator times their power of two. All E8M0 values; byte 0 counts as
      0 (a subnormal that XLA flushes), byte 255 (NaN) gives infinity or NaN.

    Works under jit, scan, vmap, shard_map and jax.export; has no derivative.

    Args:
        a: (M, K), float8_e4m3fn, or float8_e5m2 with mode `exact`. b: (N, K) float8_e4m3fn or float8_e5m2, K-major.
        a_exponent: (M, ceil(K / 32)) uint8, biased exponents (E8M0).
        mode: "registers" or "exact".
        scale, row_scale, column_scale, bias, residual, out_dtype, interpret: as in `matmul_mosaic.matmul`.
        tile, unroll: tuning.

    Returns:
        (M, N) in `out_dtype`.

    Raises:
        TypeError, ValueError: a dtype, shape or mode other than these. NotImplementedError: jax < 0.11, or a jax whose
            register layout this does not know.
    """
    epilogue = hopper.Epilogue(scale, row_scale, column_scale, bias, residual)
    hopper.check_operands(a, b, out_dtype)
    (m, k), n = a.shape, b.shape[0]
    hopper.check_epilogue(epilogue, m, n)
    hopper.check_array("a_exponent", a_exponent, (m, hopper.ceil_div(k, GROUP)), (jnp.uint8,))
    if mode not in ("registers", "exact"):
        raise ValueError(f"mode is {mode!r}; use 'registers' or 'exact' (folding in the quantizer needs only matmul)")
    if mode == "registers" and a.dtype != jnp.float8_e4m3fn:
        raise TypeError(f"a has dtype {a.dtype}; mode 'registers' rescales float8_e4m3fn codes only, use mode='exact'")
    if tile is None:
        exact_tile = hopper.Tile(64, 128, stages=5, cluster=hopper.pairing(m, 128))
        tile = hopper.Tile() if mode == "registers" else exact_tile
    words = _words(a_exponent if mode == "exact" else _half_bits(a_exponent), k)
    stream = hopper.Stream.of(words, tile.block_rows, lambda row, _: row)
    compute = _registers(tile, interpret) if mode == "registers" else _exact(tile, unroll, interpret)
    return hopper.product(
        compute, a, b, [stream], name=f"fp8_matmul_mx_{mode}", tile=tile, epilogue=epilogue, out_dtype=out_dtype,
        interpret=interpret,
    )  # fmt: skip


def _words(exponent: jax.Array, k: int) -> jax.Array:
    """(M, ceil(K / 32)) bytes -> (M, ceil(K / 128)) int32, four groups a word, the first in the lowest byte."""
    steps = hopper.ceil_div(k, hopper.K_STEP)
    exponent = hopper.pad_axis(exponent, 1, steps * GROUPS_PER_STEP)
    return lax.bitcast_convert_type(exponent.reshape(exponent.shape[0], steps, GROUPS_PER_STEP), jnp.int32)


def _half_bits(exponent: jax.Array) -> jax.Array:
    """E8M0 bytes -> bits 7 to 14 of 2^(byte - 127) in half precision: exact from 2^-17 to 2^15, then 0 or NaN."""
    field = exponent.astype(jnp.int32) - (127 - 15)
    subnormal = jnp.where(field >= -2, 4 >> jnp.clip(-field, 0, 2), 0)
    bits = jnp.where(field >= 1, field << 3, subnormal)
    return jnp.where(field > 30, 255, bits).astype(jnp.uint8)


def _load_words(share: hopper.Share, slot: Any, rows: int) -> jax.Array:
    return share.scales(0, slot, share.stage_row, rows, hopper.ROW)


def _registers(tile: hopper.Tile, interpret: hopper.Interpret) -> Any:
    def start(share: hopper.Share, slot: Any, acc: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        word = _load_words(share, slot, tile.rows)
        codes = plgpu.load(share.a(slot), layout=plgpu.Layout.WGMMA_8BIT, optimized=False)
        columns = share.b(slot, transposed=False)
        if interpret is None:
            return start_product_of_registers(acc, codes, word, columns, _fold_registers)
        left, right = (x.astype(jnp.float32) for x in (_fold_array(codes, word), columns[...]))
        return acc + lax.dot_general(left, right, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST), None

    def compute(share: hopper.Share, finish: Any) -> None:
        def body(i: jax.Array, slots: list[Any], acc: jax.Array) -> jax.Array:
            (slot,) = slots
            share.wait(slot)
            acc, left = start(share, slot, acc)
            share.scales_read()
            acc = acc if interpret is not None else finish_product(acc, 0, left)
            share.release(slot, i + 1)
            return acc

        zero = plgpu.layout_cast(jnp.zeros((tile.rows, tile.cols), jnp.float32), plgpu.Layout.WGMMA)
        finish([(0, share.loop(body, zero))])

    return compute


def _exact(tile: hopper.Tile, unroll: int, interpret: hopper.Interpret) -> Any:
    def start(share: hopper.Share, slot: Any, group: Any) -> jax.Array:
        if interpret is None:
            return start_product(share.a(slot), share.b(slot, transposed=False), group)
        return _product_array(share.a(slot), share.b(slot, transposed=False), group)

    def finish_one(sums: jax.Array, in_flight: int) -> jax.Array:
        return sums if interpret is not None else finish_product(sums, in_flight)

    def compute(share: hopper.Share, finish: Any) -> None:
        def promote(acc: jax.Array, in_flight: int, sums: jax.Array, word: jax.Array, group: int, *slice_: Any) -> Any:
            done = finish_one(sums, in_flight)
            if group == GROUPS_PER_STEP - 1:
                share.release(*slice_)
            byte = lax.shift_right_logical(word, jnp.int32(8 * group)) & jnp.int32(255)
            scale = lax.bitcast_convert_type(byte << jnp.int32(23), jnp.float32)
            return acc + done * lax.broadcast_in_dim(scale, acc.shape, [0])

        def body(i: jax.Array, slots: list[Any], acc: jax.Array) -> jax.Array:
            before: Any = None
            for step, slot in enumerate(slots):
                share.wait(slot)
                word = _load_words(share, slot, tile.rows)
                for group in range(GROUPS_PER_STEP):
                    sums = start(share, slot, group)
                    if group == 0:
                        share.scales_read()
                    # Each partial product is promoted while the next one is in flight.
                    acc = acc if before is None else promote(acc, 1, *before)
                    before = sums, word, group, slot, i + step + 1
            return promote(acc, 0, *before)

        zero = plgpu.layout_cast(jnp.zeros((tile.rows, tile.cols), jnp.float32), plgpu.Layout.WGMMA)
        finish([(0, share.loop(body, zero, unroll))])

    return compute


def _product_array(a: Any, b: Any, group: int) -> jax.Array:
    """What `start_product` and `finish_product` compute, in jnp, for the interpreter."""
    left, right = (x[...].astype(jnp.float32)[:, GROUP * group : GROUP * (group + 1)] for x in (a, b))
    plgpu.commit_smem()
    return lax.dot_general(left, right, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)


def _fold_array(codes: jax.Array, word: jax.Array) -> jax.Array:
    """What `_fold_registers` computes, in jnp, for the interpreter."""
    byte = jnp.stack([lax.shift_right_logical(word, jnp.int32(8 * g)) & 255 for g in range(GROUPS_PER_STEP)], 1)
    scale = lax.bitcast_convert_type((byte << 7).astype(jnp.uint16), jnp.float16).astype(jnp.float32)
    groups = codes.astype(jnp.float32).reshape(codes.shape[0], GROUPS_PER_STEP, GROUP)
    return jnp.clip(groups * scale[:, :, None], -448, 448).reshape(codes.shape).astype(codes.dtype)


def _fold_registers(codes: Any, words: Any, group: int) -> Any:
    """(rows, 32) e4m3 codes in wgmma's 8-bit layout times the `group`-th half-precision scales in (rows,) words.

    A register holds four neighbouring codes of a row, so that one scale serves all four.
    """
    i32 = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((1,), i32)
    zero = llvm.ConstantOp(i32, ir.IntegerAttr.get(i32, 0)).result

    def ptx(text: str, *args: Any) -> Any:
        constraints = ",".join(["=r"] + ["r"] * len(args))
        return llvm.inline_asm(i32, list(args), text, constraints, asm_dialect=0, has_side_effects=False)

    def scale(word: Any) -> Any:
        word = llvm.extractelement(word, zero) if isinstance(word.type, ir.VectorType) else word
        spread = ptx(f"prmt.b32 $0, $1, 0, {0x4040 | group | group << 8:#x};", word)
        return ptx("shl.b32 $0, $1, 7;", spread)

    registers = codes.registers.copy()
    if registers.shape[:2] != (codes.shape[0] // 64, 2) or registers.shape[4] != 2:
        raise NotImplementedError(f"unknown 8-bit wgmma layout {registers.shape} in jax {jax.__version__}")
    scales = {(i[0], i[2]): scale(words.registers[i]) for i in np.ndindex(words.registers.shape)}
    for i in np.ndindex(registers.shape):
        four = llvm.extractelement(vector.bitcast(pair, registers[i]), zero)
        four = ptx(SCALE_FOUR_CODES, four, scales[i[0], i[4]])
        registers[i] = vector.bitcast(registers[i].type, vector.broadcast(pair, four))
    return mgpu.FragmentedArray(_registers=registers, _layout=codes.layout, _is_signed=codes.is_signed)
