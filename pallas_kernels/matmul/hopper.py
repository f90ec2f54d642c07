"""The driver of every Hopper matrix product: tiles, loads, K loop and epilogue.

In: a (M, K) and b (N, K), FP8 or int8, K-major. Out: (M, N) bf16 or fp32. Hardware: Hopper. The references are those of
the products `matmul_*_mosaic.py`, which differ only in their `compute` function, and of `grouped_*_mosaic.py`, whose
tiles have their own matrices.

One thread block per multiprocessor walks over output tiles. One warp streams 128-byte slices of both operands into a
ring of shared-memory stages by TMA; two compute warpgroups multiply them and write the tile. The ring continues across
tiles: the loads of the next tile overlap the epilogue of this one. M, N and K are arbitrary: TMA pads loads with zeros
and drops stores outside of the output.
"""

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import call_mosaic
from pallas_kernels.dispatch.multiprocessors import available_sms
from pallas_kernels.matmul.hopper_epilogue import COLUMN_LAYOUT as COLUMN_LAYOUT
from pallas_kernels.matmul.hopper_epilogue import (
    NO_SCALES,
    OUT_DTYPES,
    Epilogue,
    MatrixOutput,
    OutputRefs,
    swizzle_transforms,
    tiling_transforms,
)
from pallas_kernels.matmul.hopper_epilogue import ROW_LAYOUT as ROW_LAYOUT
from pallas_kernels.matmul.hopper_epilogue import check_array as check_array
from pallas_kernels.matmul.hopper_epilogue import check_epilogue as check_epilogue
from pallas_kernels.matmul.hopper_pipeline import K_STEP as K_STEP
from pallas_kernels.matmul.hopper_pipeline import WARPGROUPS, WarpgroupPipeline, ceil_div, pad_axis, round_up
from pallas_kernels.matmul.hopper_pipeline import Schedule as Schedule
from pallas_kernels.matmul.hopper_pipeline import SecondOperand as SecondOperand
from pallas_kernels.matmul.hopper_pipeline import SlicePosition as SlicePosition
from pallas_kernels.matmul.hopper_pipeline import Stream as Stream
from pallas_kernels.matmul.hopper_pipeline import Tile as Tile
from pallas_kernels.matmul.hopper_pipeline import TilePosition as TilePosition
from pallas_kernels.matmul.hopper_pipeline import choose_cluster as choose_cluster
from pallas_kernels.matmul.hopper_pipeline import covered_size as covered_size

# Registers per thread of the memory warpgroup and of the compute warpgroups; a multiprocessor has 65536.
MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232
FP8_DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)

Interpret = plgpu.InterpretGPUParams | None


def mean_tiles_per_sm(m: int, n: int, tile: Tile) -> float:
    """Return the mean number of tiles of an (M, N) output per multiprocessor."""
    return ceil_div(m, tile.block_rows) * ceil_div(n, tile.block_cols) / available_sms()


def num_waves(m: int, n: int, tile: Tile) -> int:
    """Return the number of tiles of an (M, N) output on the busiest multiprocessor."""
    return math.ceil(mean_tiles_per_sm(m, n, tile))


def check_operands(
    a: jax.Array,
    b: jax.Array,
    out_dtype: Any,
    dtypes: Sequence[Any] = FP8_DTYPES,
    *,
    b_ndim: int = 2,
    is_k_major: bool = True,
) -> None:
    """Raise TypeError or ValueError unless a (M, K) and b (N, K) can be multiplied; the message has the fix.

    With three dimensions, b is (groups, N, K). Without `is_k_major`, K is the first dimension of both.
    """
    if jax.__version_info__ < (0, 11):
        raise NotImplementedError(f"Mosaic GPU kernels need jax >= 0.11, found {jax.__version__}; use impl='xla'")
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in dtypes:
            expected = " or ".join(str(jnp.dtype(d)) for d in dtypes)
            raise TypeError(f"{name} has dtype {x.dtype}; quantize it to {expected}")
        if x.ndim != (b_ndim if name == "b" else 2):
            expected = "three dimensions, (groups, N, K)" if name == "b" and b_ndim == 3 else "two dimensions"
            raise ValueError(f"{name} has shape {x.shape}; expected {expected}, use vmap for batches")
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}; every dimension must be positive")
    k_axis, layout = (-1, "K-major with the same K in the last") if is_k_major else (0, "of the same K in the first")
    if a.shape[k_axis] != b.shape[k_axis]:
        raise ValueError(
            f"a has shape {a.shape} and b {b.shape}: both must be {layout} dimension"
            + ("; transpose b" if is_k_major and a.shape[1] == b.shape[-2] else "")
        )
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype {jnp.dtype(out_dtype)} is not supported; use bfloat16 or float32")


def pipelined_matmul(
    compute: Callable[..., None],
    a: jax.Array,
    b: jax.Array,
    streams: Sequence["Stream"] = (),
    *,
    name: str,
    tile: Tile,
    out_dtype: Any,
    epilogue: Epilogue = NO_SCALES,
    use_inline_wgmma: bool = False,
    second_operand: SecondOperand | None = None,
    schedule: Schedule | None = None,
    is_k_major: bool = True,
    static_key: Hashable = (),
    interpret: Interpret = None,
) -> Any:
    """Return the product of a (M, K) and b (N, K) transposed, (M, N) in `out_dtype`.

    Args:
        compute: called by each compute warpgroup for each of its tiles, as `compute(pipeline, finish)`. It must wait
            for and release each 128-deep slice of K once, in order. It then calls `finish(parts)` with accumulators
            (first row, first column, fp32 or int32 array). They cover its part of the tile, from left to right in each
            row. Tiles of no slices get zeros.
        streams: scales that are loaded with the operands; `WarpgroupPipeline.load_scales` reads them.
        use_inline_wgmma: whether `compute` uses `hopper_wgmma`. TMA then needs maps of two dimensions, not Pallas's
            four.
        second_operand: a second left operand, for which some slices are multiplied as well; it requires a schedule.
        schedule: tiles that differ in their slices or matrices. In a grouped product, scales are (matrices,), and
            column scales (matrices, N). Other rows that no tile writes are not initialized.
        is_k_major: whether K is the last dimension of both operands, otherwise the first; 16-bit operands only.
        static_key: static arguments of `compute`, `streams` and `schedule`, apart from name, tile and shapes.
    """
    if schedule is not None and tile.cluster:
        raise ValueError(f"{tile}: a schedule does not support clusters")
    if second_operand is not None and (schedule is None or tile.split is None or tile.lead_slices):
        raise ValueError(
            f"{tile}: a second operand requires a schedule, and tiles that warpgroups share without a lead"
        )
    if use_inline_wgmma and max(tile.block_rows, tile.block_cols) > 256:
        raise ValueError(f"{tile}: TMA fetches at most 256 rows of an operand at once; use a smaller tile or split")
    k_axis = 1 if is_k_major else 0
    k, m, n = a.shape[k_axis], a.shape[1 - k_axis], b.shape[1 - k_axis]
    if schedule is not None:
        m, n = schedule.out_shape
    k_step = K_STEP // a.dtype.itemsize
    rows, cols = (
        covered_size(m, tile.block_rows, tile.cluster == "M"),
        covered_size(n, tile.block_cols, tile.cluster == "N"),
    )
    tiles_m = rows // tile.block_rows // (1 + (tile.cluster == "M"))
    tiles_n = cols // tile.block_cols // (1 + (tile.cluster == "N"))
    k_steps = ceil_div(k, k_step)
    needs_fence = tile.cluster is not None or interpret is not None
    num_blocks = 2 if interpret is not None else available_sms() // (1 + (tile.cluster is not None))

    # TMA maps of four dimensions need whole tiles of 8 rows and one swizzle of columns.
    padded_k = k_steps * k_step
    row_multiple = 8 if is_k_major else k_step

    def pad_operand(x: jax.Array, block: int) -> jax.Array:
        rows = max(round_up(x.shape[1 - k_axis], row_multiple), block)
        return pad_axis(pad_axis(x, k_axis, padded_k), 1 - k_axis, rows)

    a, b = pad_operand(a, tile.block_rows), pad_operand(b, tile.block_cols)
    second_operand_arrays: list[jax.Array] = []
    if second_operand is not None:
        padded_second = pad_axis(pad_axis(second_operand.codes, 1, padded_k), 0, a.shape[0])
        second_operand_arrays = [padded_second, second_operand.scale]
    output, output_operands = MatrixOutput.prepare(
        epilogue, (m, n), tile, out_dtype, rows=rows + (tile.block_rows if schedule else 0), cols=cols
    )
    ring_transforms = swizzle_transforms(K_STEP) if use_inline_wgmma else tiling_transforms(K_STEP, a.dtype.itemsize)

    def stage_shape(rows: int) -> tuple[int, int]:
        return (rows, k_step) if is_k_major else (k_step, rows)

    shared: dict[str, Any] = {
        "a_ring": plgpu.SMEM((tile.num_stages, *stage_shape(tile.block_rows)), a.dtype, transforms=ring_transforms),
        "b_ring": plgpu.SMEM((tile.num_stages, *stage_shape(tile.block_cols)), b.dtype, transforms=ring_transforms),
        "full": plgpu.Barrier(
            num_arrivals=2 + len(streams), num_barriers=tile.num_stages * (WARPGROUPS // tile.warpgroups_per_tile)
        ),
        "empty": _empty_barrier(tile),
    }
    for n_stream, stream in enumerate(streams):
        shared[f"stream_{n_stream}"] = plgpu.SMEM((tile.num_stages, *stream.window), stream.array.dtype)
    if tile.lead_slices and k_steps > tile.num_stages:
        shared["advance_barrier"] = plgpu.Barrier()

    operands = [a, b, *(stream.array for stream in streams), *output_operands]
    num_plain_operands = len(operands)
    operands += second_operand_arrays
    num_dense_operands = len(operands)
    operands += [] if schedule is None else schedule.arrays
    num_operands = len(operands)
    # The kernel must not close over arrays: the cache of `call_mosaic` would keep them alive.
    has_second_operand, stream_windows = second_operand is not None, [x.window_slices for x in streams]
    num_scheduled_tiles, scheduled_position, is_sorted, zero_rows = (
        (None, None, False, None) if schedule is None else schedule[2:]
    )

    def kernel(*all_refs: Any, **scratch_refs: Any) -> None:
        refs, out_refs = all_refs[:num_operands], all_refs[num_operands:]
        schedule_refs = refs[num_dense_operands:]
        second_operand_refs: Any = refs[num_plain_operands:num_dense_operands] or (None, None)
        second_ref, second_scale_ref = second_operand_refs
        a_ref, b_ref, *other_refs = refs[:num_plain_operands]
        stream_refs, output_operand_refs = other_refs[: len(stream_windows)], other_refs[len(stream_windows) :]
        lead_barrier = scratch_refs.get("advance_barrier")
        stream_rings = [scratch_refs[f"stream_{i}"] for i in range(len(stream_windows))]
        a_ring, b_ring, full, empty = (scratch_refs[key] for key in ("a_ring", "b_ring", "full", "empty"))
        output_refs = OutputRefs(out_refs, output_operand_refs, scratch_refs, interpret is not None)
        group, block = lax.axis_index("group"), lax.axis_index("block")
        alternation = WARPGROUPS // tile.warpgroups_per_tile
        whole_rounds: Any
        tiles_in_last_round: Any
        whole_rounds, tiles_in_last_round = divmod(tiles_m * tiles_n, num_blocks)
        if num_scheduled_tiles is not None:
            total = num_scheduled_tiles(schedule_refs)
            whole_rounds, tiles_in_last_round = (f(total, jnp.int32(num_blocks)) for f in (lax.div, lax.rem))

        def block_position(round_index: Any) -> jax.Array:
            """Return the tile of a round for this block; if tiles are sorted, odd rounds run backwards."""
            return lax.select(lax.rem(round_index, 2) == 0, block, num_blocks - 1 - block) if is_sorted else block

        num_tiles = whole_rounds + (block_position(jnp.int32(whole_rounds)) < tiles_in_last_round).astype(jnp.int32)

        def tile_position(round_index: jax.Array) -> TilePosition:
            tile_index = round_index * num_blocks + block_position(round_index)
            if scheduled_position is not None:
                return scheduled_position(schedule_refs, tile_index)
            tile_m, tile_n = plgpu.planar_snake(tile_index, (tiles_m, tiles_n), 1, tile.band_width)
            if tile.cluster == "M":
                tile_m = tile_m * 2 + lax.axis_index("cluster")
            if tile.cluster == "N":
                tile_n = tile_n * 2 + lax.axis_index("cluster")
            row, col = tile_m * tile.block_rows, tile_n * tile.block_cols
            return TilePosition(row, col, row, col, k_steps)

        def get_second_scale(row: jax.Array, k_index: jax.Array) -> jax.Array:
            slice_index = jnp.minimum(k_index, k_steps - 1)
            return (
                second_scale_ref[lax.div(row, tile.block_rows), slice_index] if has_second_operand else jnp.float32(0)
            )

        def load() -> None:
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

            def fetch(round_index: jax.Array, slot: jax.Array) -> jax.Array:
                position = tile_position(round_index)
                barrier_base = 0 if alternation == 1 else lax.rem(round_index, alternation) * tile.num_stages

                def fetch_slice(_: jax.Array, state: Any) -> Any:
                    slot, slice_position, second_scale = state
                    next_slice = slice_position.next_position(second_scale)
                    # Read one slice ahead: the wait below hides the latency.
                    second_scale = get_second_scale(position.a_row, next_slice.k_index)
                    full_barrier = full.at[barrier_base + slot]
                    k_window = pl.ds(slice_position.k_index * k_step, k_step)
                    plgpu.barrier_wait(empty.at[slot])

                    def copy(ref: Any, target: Any, start: jax.Array, size: int, shared_along: str) -> None:
                        multicast = "cluster" if tile.cluster == shared_along else None
                        rows = pl.ds(start, size)
                        plgpu.copy_gmem_to_smem(
                            ref.at[(rows, k_window) if is_k_major else (k_window, rows)],
                            target.at[slot],
                            full_barrier,
                            collective_axes=multicast,
                        )

                    def copy_a(ref: Any) -> None:
                        copy(ref, a_ring, position.a_row, tile.block_rows, "N")

                    if has_second_operand:
                        lax.cond(slice_position.is_second == 1, lambda: copy_a(second_ref), lambda: copy_a(a_ref))
                    else:
                        copy_a(a_ref)
                    copy(b_ref, b_ring, position.b_row, tile.block_cols, "M")
                    for offsets, ref, target in zip(stream_windows, stream_refs, stream_rings, strict=True):
                        plgpu.copy_gmem_to_smem(
                            ref.at[offsets(slice_position.k_index, position)], target.at[slot], full_barrier
                        )
                    slot = lax.select(slot == tile.num_stages - 1, jnp.int32(0), slot + 1)
                    return slot, next_slice, second_scale

                start = SlicePosition(jnp.int32(position.first_slice), jnp.int32(0))
                second_scale = get_second_scale(position.a_row, start.k_index)
                return lax.fori_loop(0, position.num_slices, fetch_slice, (slot, start, second_scale))[0]

            def fetch_all() -> None:
                lax.fori_loop(0, num_tiles, fetch, jnp.int32(0))
                # A block must not exit before its last stages are released: its peer may still multicast into it.
                for slot in range(tile.num_stages):
                    plgpu.barrier_wait(empty.at[slot])

            # Four warps would synchronise before each copy, too late to hide its latency.
            if use_one_warp:
                plgpu.warp_map(lambda warp: pl.when(warp == 0)(fetch_all))
            else:
                fetch_all()

        def multiply() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")

            @pl.when(group < tile.warpgroups_per_tile)
            def _all_stages_are_free() -> None:
                for slot in range(tile.num_stages):
                    plgpu.barrier_arrive(empty.at[slot])

            def compute_tile(tile_number: jax.Array, slices_before: jax.Array) -> jax.Array:
                round_index = tile_number if alternation == 1 else tile_number * alternation + group
                position = tile_position(round_index)
                stage_row = group * tile.rows if tile.split == "M" else 0
                stage_col = group * tile.cols if tile.split == "N" else 0
                first_slice, slices_after = round_index * k_steps, slices_before
                if not isinstance(position.num_slices, int):
                    round_slices = [position.num_slices]
                    if alternation > 1:  # the slices of the other warpgroup's tile pass through the ring, too
                        round_slices = [
                            tile_position(tile_number * alternation + i).num_slices for i in range(alternation)
                        ]
                    first_slice = slices_before
                    if alternation > 1:
                        first_slice += lax.select(group == 0, jnp.int32(0), round_slices[0])
                    slices_after = slices_before + sum(round_slices)
                pipeline = WarpgroupPipeline(
                    position.row + stage_row, position.col + stage_col, group, first_slice, stage_row, stage_col,
                    position.num_slices, tile, a_ring, b_ring, full, empty, stream_rings, needs_fence, lead_barrier,
                    is_k_major, position.first_slice,
                )  # fmt: skip
                writer = output.writer(output_refs, group, pipeline, position)
                factors = writer.prefetch()
                pipeline.wait_for_lead()
                compute(pipeline, functools.partial(writer.write, factors))
                return slices_after

            num_group_tiles = (
                num_tiles if alternation == 1 else lax.div(num_tiles - group + alternation - 1, alternation)
            )
            lax.fori_loop(0, num_group_tiles, compute_tile, jnp.int32(0))
            if zero_rows is not None:
                for first, end in zero_rows(schedule_refs):
                    write_zeros(first, end)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def write_zeros(first: jax.Array, end: jax.Array) -> None:
            """Set rows of the output to 0: each compute warpgroup of each block stores its share of the pieces."""
            height, width = output.piece_shape
            columns, aligned_first = ceil_div(output.shape[1], width), lax.div(first, 8) * 8
            count = jnp.where(end > first, lax.div(end - aligned_first + height - 1, height), 0) * columns
            worker, num_workers = block * WARPGROUPS + group, num_blocks * WARPGROUPS

            def write_piece(i: jax.Array, _: None) -> None:
                piece = worker + i * num_workers
                row, col = aligned_first + lax.div(piece, columns) * height, lax.rem(piece, columns) * width
                position = TilePosition(row, col, row, col, 0, row_range=(first, end))
                output.write_zeros(output_refs, group, position)

            lax.fori_loop(0, lax.div(count - worker + num_workers - 1, num_workers), write_piece, None)

        lax.cond(group == WARPGROUPS, load, multiply)

    kernel.__name__ = name
    clustered: dict[str, Any] = {"cluster": (2,), "cluster_names": ("cluster",)} if tile.cluster else {}
    # `warp_map` fails in a shard_map that checks varying axes, and does not exist in every jax 0.11.
    use_one_warp = hasattr(plgpu, "warp_map") and not any(_varies_over_devices(x) for x in operands)
    run = plgpu.kernel(
        kernel,
        out_type=output.types,
        scratch_types=shared | output.scratch,
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        **clustered,
    )
    if interpret is None and use_one_warp:
        compiled_for = (
            static_key,
            (m, n, k),
            tile,
            use_inline_wgmma,
            is_k_major,
            output,
            second_operand is not None,
            num_blocks,
            jax.config.jax_enable_x64,
        )
        (out,) = call_mosaic.call(name, run, operands, output.types, compiled_for)
    else:
        (out,) = run(*operands)
    return out if output.shape == (m, n) else out[:m, :n]


def _varies_over_devices(x: jax.Array) -> bool:
    """Return whether an array varies over a manual mesh axis of an enclosing `jax.shard_map`."""
    kind = jax.typeof(x)
    return bool(getattr(getattr(kind, "manual_axis_type", kind), "varying", None) or getattr(kind, "vma", None))


def _empty_barrier(tile: Tile) -> Any:
    arguments: dict[str, Any] = {"num_arrivals": tile.warpgroups_per_tile, "num_barriers": tile.num_stages}
    return (
        plgpu.ClusterBarrier(collective_axes=("cluster",), **arguments) if tile.cluster else plgpu.Barrier(**arguments)
    )
