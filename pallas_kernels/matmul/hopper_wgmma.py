"""Tensor-core products with explicit accumulator registers, over parts of 32 of K.

In: FP8 or int8 stages in shared memory. Out: fp32 or int32 sums in registers. Hardware: Hopper. Pallas's own
`plgpu.wgmma` computes the same.

Pallas assigns fresh, zeroed registers to every product, and multiplies whole swizzles. Here a product reuses the
registers of sums that have been read: otherwise it cannot start before the previous sums are added.
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
# The upper half of a descriptor: groups of 8 rows, 1024 bytes apart, in swizzles of 128 bytes.
DESCRIPTOR_HIGH = 64 | 1 << 30
PTX_TYPES = {"f8E4M3FN": "e4m3", "f8E5M2": "e5m2", "i8": "s8"}
fragmented_array: Any = importlib.import_module("jax.experimental.mosaic.gpu.fragmented_array")


def start_product(
    a: Any, b: Any, k_parts: Sequence[int] = ALL_K_PARTS, reused_sums: jax.Array | None = None
) -> jax.Array:
    """Start `a[:, at] @ b[:, at].T` over `k_parts` of 32 of K, and return its unfinished sums.

    Args:
        a: (64, 128) 8-bit reference in shared memory, of a ring for `use_inline_wgmma`: FP8 or int8.
        b: (cols, 128), likewise; cols a multiple of 8 up to 256; int8 if a is int8.
        k_parts: which of the four parts of K to add.
        reused_sums: (64, cols) earlier sums that are no longer needed; their registers are reused.

    Returns:
        (64, cols) float32, or int32 for int8, in the wgmma layout. Only `finish_product` may read it.
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
        acc_layout = fragmented_array.WGMMA_LAYOUT_ACC_32BIT  # LLVM pairs the registers of the other layout
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
            lines.append(f"setp.ne.u32 more, {min(i, 1)}, 0;")  # the first part overwrites the sums
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
    """Return the address of a reference in shared memory in units of 16 bytes: the lower half of a descriptor."""
    i32 = ir.IntegerType.get_signless(32)
    four = llvm.ConstantOp(i32, ir.IntegerAttr.get(i32, 4)).result
    return llvm.lshr(llvm.ptrtoint(i32, utils.memref_ptr(reference)), four)


def finish_product(sums: jax.Array, in_flight: int = 0) -> jax.Array:
    """Return the sums of a started product, once at most `in_flight` later products are unfinished."""
    result = plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    def finish(_: Any, sums: Any) -> Any:
        text = f"wgmma.wait_group.sync.aligned {in_flight};"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)
        return mgpu.optimization_barrier(sums)  # keeps LLVM from reading the sums earlier

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
    """Return the product of 64 rows of a slice, (64, cols) sums, and the result of `run_meanwhile`, which overlaps it.

    Args:
        pipeline: the warpgroup's part of a tile.
        first_row: first of the rows, within the part.
        reused_sums: (64, cols) earlier sums that are no longer needed: registers and dtype of the result.
        run_meanwhile: called after the start of the product.
        is_interpreted: whether Pallas's interpreter runs, which has no registers.
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
