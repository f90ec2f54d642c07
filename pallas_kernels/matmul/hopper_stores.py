"""Stores of rows from the registers of a warpgroup, each under a predicate.

In: 64 rows of bf16 or fp32 in the wgmma layout. Out: those of a range, in device memory. Hardware: Hopper. TMA stores
whole pieces of 8 rows: it cannot write one row of a piece without the next one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

# PTX type and constraint of a register, which has two columns of one row, by the bytes of a column.
REGISTER_TYPES = {2: ("b32", "r", 32), 4: ("b64", "l", 64)}


def store_rows(out_ref: Any, value: jax.Array, row: Any, col: Any, begin: Any, end: Any) -> None:
    """Store the rows of `value` whose position in `out_ref` lies in [begin, end).

    Args:
        out_ref: (M, N) reference in device memory; N is even.
        value: (64, width) bfloat16 or float32, in the wgmma layout; columns from N on are dropped.
        row, col: int32 position of `value`; col is even.
        begin, end: int32 range of rows, within [0, M].
    """
    num_columns, itemsize = out_ref.shape[1], jnp.dtype(value.dtype).itemsize
    kind, letter, bits = REGISTER_TYPES[itemsize]
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, *[scalar] * 4))
    def store(_: Any, out: Any, value: Any, *numbers: Any) -> None:
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        row, col, begin, end = (x.registers.item() for x in numbers)
        base = llvm.ptrtoint(i64, utils.memref_ptr(out))

        def constant(number: int) -> Any:
            return llvm.ConstantOp(i64, ir.IntegerAttr.get(i64, number)).result

        lines = [
            "{ .reg .pred inside;",
            "setp.ge.s32 inside, $2, $4;",
            "setp.lt.and.s32 inside, $2, $5, inside;",
            f"setp.lt.and.s32 inside, $3, {num_columns}, inside;",
            f"@inside st.global.{kind} [$0], $1; }}",
        ]
        indices = value.layout.thread_idxs(value.shape)
        for index, register in zip(indices, value.registers.flat, strict=True):
            i, j = (arith.addi(arith.index_cast(i32, x), start) for x, start in zip(index, (row, col), strict=True))
            offset = arith.addi(arith.muli(arith.extsi(i64, i), constant(num_columns)), arith.extsi(i64, j))
            address = arith.addi(base, arith.muli(offset, constant(itemsize)))
            word = llvm.bitcast(ir.IntegerType.get_signless(bits), register)
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"), [address, word, i, j, begin, end], "\n".join(lines),
                f"l,{letter},r,r,r,r", has_side_effects=True,
            )  # fmt: skip

    store(out_ref, value, row, col, begin, end)
