"""Tensor-core products that know the registers of their sums, and of 32 of K out of a 128-deep stage.

Pallas gives every product fresh registers, set to zero, and multiplies whole swizzles. Where the sums of the product
before are given, which have been read by then, the assembler has no other registers for the new ones: it cannot start a
product before it has added the sums of the one before, for which 232 registers a thread were too few. And the hardware
reads 32 of K from a 128-byte swizzle as well; products of 32 took 8 % fewer cycles so on an H200.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.matmul.hopper_epilogue import swizzle_transforms
from pallas_kernels.matmul.hopper_pipeline import K_STEP, WarpgroupPipeline

K_PART = 32
ALL_K_PARTS = tuple(range(K_STEP // K_PART))
# The upper half of a descriptor: groups of 8 rows lie 1024 bytes apart, in swizzles of 128 bytes.
DESCRIPTOR_HIGH = 64 | 1 << 30
PTX_TYPES = {"f8E4M3FN": "e4m3", "f8E5M2": "e5m2", "i8": "s8"}
fragmented_array: Any = importlib.import_module("jax.experimental.mosaic.gpu.fragmented_array")


def start_product(
    a: Any, b: Any, k_parts: Sequence[int] = ALL_K_PARTS, reused_sums: jax.Array | None = None
) -> jax.Array:
    """Starts `a[:, at] @ b[:, at].T` over `k_parts` of 32 of K, and returns the sums before they are there.

    Args:
        a: (64, 128) 8-bit reference in shared memory, of a ring for `use_inline_wgmma`: FP8 or int8.
        b: (cols, 128), likewise; cols a multiple of 8 up to 256; int8 where a is.
        k_parts: which of the four parts of K to add.
        reused_sums: (64, cols) as returned, of any values, not needed any more: gives its registers.

    Returns:
        (64, cols) float32, of int8 int32, in the wgmma layout: only `finish_product` may read it.
    """
    shape = (a.shape[0], b.shape[0])
    if shape[0] != 64:
        raise ValueError(f"a has {shape[0]} rows; a product has 64")
    stage, layout = plgpu.RefType(swizzle_transforms(K_STEP)), plgpu.Layout.WGMMA
    is_int8 = a.dtype == jnp.int8
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.int32 if is_int8 else jnp.float32), layout=layout)

    @plgpu.inline_mgpu(arg_types=(stage, stage, *([layout] if reused_sums is not None else [])), return_type=result)
    def start(_: Any, a: Any, b: Any, *reused: Any) -> Any:
        kinds = ".".join(PTX_TYPES[str(ir.MemRefType(x.type).element_type)] for x in (a, b))
        acc_layout = fragmented_array.WGMMA_LAYOUT_ACC_32BIT  # LLVM keeps the registers of the other layout in pairs
        accumulators = [r for x in reused for r in x.to_layout(acc_layout).registers.flat]
        grid = acc_layout.registers_shape(shape)
        kind = ir.IntegerType.get_signless(32) if is_int8 else ir.F32Type.get()
        count, register = int(np.prod(grid)), ir.VectorType.get((1,), kind)
        sum_type, signs, letter = ("s32", "", "r") if is_int8 else ("f32", ", 1, 1", "f")
        sums = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
        addresses = [f"${count + len(accumulators) + i}" for i in range(2)]
        lines = ["{ .reg .pred more; .reg .b32 low; .reg .b64 da, db;", "wgmma.fence.sync.aligned;"]
        for i, part in enumerate(k_parts):
            for descriptor, address in zip(("da", "db"), addresses, strict=True):
                lines.append(
                    f"add.u32 low, {address}, {part * K_PART >> 4}; mov.b64 {descriptor}, {{low, {DESCRIPTOR_HIGH}}};"
                )
            lines.append(f"setp.ne.u32 more, {min(i, 1)}, 0;")  # the first adds to nothing
            product = f"wgmma.mma_async.sync.aligned.m64n{shape[1]}k{K_PART}.{sum_type}.{kinds}"
            lines.append(f"{product} {sums}, da, db, more{signs};")
        lines.append("wgmma.commit_group.sync.aligned; }")
        constraints = [f"={letter}"] * count + [str(i) for i in range(len(accumulators))] + ["r", "r"]
        out = llvm.inline_asm(
            llvm.StructType.get_literal([register] * count), [*accumulators, _address(a), _address(b)],
            "\n".join(lines), ",".join(constraints), asm_dialect=0, has_side_effects=True,
        )  # fmt: skip
        registers = np.array([llvm.extractvalue(register, out, [i]) for i in range(count)], object).reshape(grid)
        started = mgpu.FragmentedArray(_registers=registers, _layout=acc_layout, _is_signed=True if is_int8 else None)
        return started.to_layout(mgpu.WGMMA_LAYOUT)

    return start(a, b, *([reused_sums] if reused_sums is not None else []))


def _address(reference: Any) -> Any:
    """Where a reference begins in shared memory, in 16 bytes, as a descriptor's lower half has it."""
    i32 = ir.IntegerType.get_signless(32)
    four = llvm.ConstantOp(i32, ir.IntegerAttr.get(i32, 4)).result
    return llvm.lshr(llvm.ptrtoint(i32, utils.memref_ptr(reference)), four)


def finish_product(sums: jax.Array, in_flight: int = 0) -> jax.Array:
    """The sums of a started product, when no more than `in_flight` products that were started later are unfinished."""
    result = plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    def finish(_: Any, sums: Any) -> Any:
        text = f"wgmma.wait_group.sync.aligned {in_flight};"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)
        return mgpu.optimization_barrier(sums)  # or LLVM might read the sums before

    return finish(sums)


def multiply_rows(
    pipeline: WarpgroupPipeline,
    slot: Any,
    first_row: int,
    reused_sums: jax.Array,
    run_meanwhile: Callable[[], Any],
    *,
    is_interpreted: bool,
) -> tuple[jax.Array, Any]:
    """Products of 64 rows of a slice, and what `run_meanwhile` returns, called while they are computed.

    Args:
        pipeline: the warpgroup's part of a tile.
        slot: the stage where the slice lies.
        first_row: the first of the rows, within the part.
        reused_sums: (64, cols) sums of earlier products, which have been read: gives its registers and its dtype.
        run_meanwhile: what is read and awaited meanwhile.
        is_interpreted: whether Pallas's interpreter runs, which knows no registers.

    Returns:
        (64, cols) sums of 128 products, and what `run_meanwhile` returned.
    """
    a = pipeline.a(slot, first_row, 64)
    if not is_interpreted:
        sums = start_product(a, pipeline.b(slot, transposed=False), reused_sums=reused_sums)
        result = run_meanwhile()
        return finish_product(sums), result

    def scoped(sums: Any) -> Any:
        plgpu.wgmma(sums, a, pipeline.b(slot))
        result = run_meanwhile()
        return plgpu.wgmma_accumulator_load(sums, wait_n=0), result

    rows, cols = reused_sums.shape
    product: tuple[jax.Array, Any] = pl.run_scoped(scoped, plgpu.ACC((rows, cols), reused_sums.dtype))
    return product
