"""What the warpgroups of a Hopper product share: the tile they cut, the ring of stages, and the order among them."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

K_STEP = 128
WARPGROUPS = 2  # that multiply


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a product is cut: tuning only, never the result.

    Attributes:
        rows, cols: output tile of one compute warpgroup; rows a multiple of 64, cols a multiple of 32 up to 256.
        split: the dimension along which the warpgroups divide a block's tile. None: two take turns, each with a whole
            tile of its own, so that one multiplies while the other writes.
        num_stages: depth of the shared-memory ring, at least 2.
        band_width: width of the band of tiles, along N, that blocks walk together (locality in L2).
        cluster: dimension along which two blocks of a cluster lie; they share the other operand by multicast.
        lead_slices: slices of K by which the second of two warpgroups that share a tile starts it after the first, so
            that what one does beside its products (promotions, the epilogue) meets products of the other.
        store_slots: pieces of a warpgroup's output, 64 rows of 128 bytes, that can await their store in shared memory.
            A tile of no more pieces, without residual or groups, is stored at once.
    """

    rows: int = 64
    cols: int = 256
    split: Literal["M", "N"] | None = "M"
    num_stages: int = 4
    band_width: int = 8
    cluster: Literal["M", "N"] | None = None
    lead_slices: int = 0
    store_slots: int = 2

    def __post_init__(self) -> None:
        if self.rows % 64 or self.cols % 32 or not 32 <= self.cols <= 256:
            raise ValueError(f"tile {self.rows}x{self.cols}: rows must be a multiple of 64, cols of 32 up to 256")
        if self.num_stages < 2:
            raise ValueError(
                f"stages is {self.num_stages}; use at least 2: a slice is awaited before the last is released"
            )
        if self.lead_slices and (self.split is None or not 0 < self.lead_slices < self.num_stages):
            raise ValueError(f"lead is {self.lead_slices}; it takes two warpgroups that share a tile of more stages")

    @property
    def block_rows(self) -> int:
        return self.rows * (WARPGROUPS if self.split == "M" else 1)

    @property
    def block_cols(self) -> int:
        return self.cols * (WARPGROUPS if self.split == "N" else 1)

    @property
    def warpgroups_per_tile(self) -> int:
        """Compute warpgroups that work on one tile."""
        return 1 if self.split is None else WARPGROUPS


@dataclasses.dataclass(frozen=True)
class WarpgroupPipeline:
    """One warpgroup's part of a tile, and the ring of stages through which its operands pass.

    Attributes:
        row, col: where the part starts in the product. group: the warpgroup's index.
        first_slice: slices that passed through the ring before this tile. k_steps: slices of this tile, known to the
            compiler but where a walk says how many there are.
        needs_fence: whether reads of scales need a fence before the stage's release. Elsewhere every thread releases
            the stage itself, after its reads. In a cluster one thread for each block speaks for a warpgroup; and the
            interpreter knows only fences between a read and a write by TMA.
        lead_barrier: completes when the first warpgroup leads by `tile.lead_slices` slices; None where neither waits.
    """

    row: jax.Array
    col: jax.Array
    group: jax.Array
    first_slice: jax.Array
    stage_row: jax.Array | int
    stage_col: jax.Array | int
    k_steps: int | jax.Array
    tile: Tile
    a_ring: Any
    b_ring: Any
    full: Any
    empty: Any
    streams: list[Any]
    needs_fence: bool
    lead_barrier: Any = None

    def wait_for_lead(self) -> None:
        """Blocks the second warpgroup at the start of a tile until the first one leads."""
        if self.lead_barrier is not None:
            pl.when(self.group == 1)(lambda: plgpu.barrier_wait(self.lead_barrier))

    @property
    def first_stage(self) -> jax.Array:
        """Where the tile's first slice arrives."""
        return lax.rem(self.first_slice, jnp.int32(self.tile.num_stages))

    def loop_over_k(
        self,
        body: Callable[[jax.Array, list[Any], Any], Any],
        init: Any = None,
        unroll: int = 1,
        with_next: bool = False,
    ) -> Any:
        """Runs `carry = body(i, slots, carry)` over K, `unroll` slices at a time and then the rest.

        `slots` are the stages of slices i, i + 1, and so on; with `with_next` also that of the slice which follows
        them, or None after the last. They are carried from slice to slice: a stage derived from `i` makes the compiler
        keep every stage's addresses in registers, which an unrolled body does not have.
        """
        count = self.k_steps - with_next
        num_iterations, remaining_slices = divmod(count, unroll) if isinstance(count, int) else (count, 0)
        if not isinstance(count, int) and unroll > 1:
            raise ValueError(f"unroll is {unroll}: a walk has any number of slices, unroll none of them")

        def run_slices(count: int, i: jax.Array, slot: jax.Array, carry: Any) -> tuple[jax.Array, Any]:
            slots = [slot]
            for _ in range(count):
                slots.append(lax.select(slots[-1] == self.tile.num_stages - 1, jnp.int32(0), slots[-1] + 1))
            return slots[count], body(i, slots[: count + with_next], carry)

        state = self.first_stage, init
        if not isinstance(num_iterations, int) or num_iterations:
            state = lax.fori_loop(0, num_iterations, lambda j, state: run_slices(unroll, j * unroll, *state), state)
        if remaining_slices:
            state = run_slices(remaining_slices, jnp.int32(num_iterations * unroll), *state)
        slot, carry = state
        return body(jnp.asarray(self.k_steps - 1, jnp.int32), [slot, None], carry) if with_next else carry

    def wait(self, slot: Any) -> None:
        """Blocks until the slice of this stage has arrived."""
        base = 0 if self.tile.split is not None else self.group * self.tile.num_stages
        plgpu.barrier_wait(self.full.at[base + slot])

    def release(self, slot: Any, slice_count: jax.Array | int) -> None:
        """Hands the stage of slice number `slice_count` back to the memory warpgroup: nothing reads it any more."""
        plgpu.barrier_arrive(self.empty.at[slot])
        if self.lead_barrier is not None:
            leads = (self.group == 0) & (slice_count == self.tile.lead_slices)
            pl.when(leads)(lambda: plgpu.barrier_arrive(self.lead_barrier))

    def load_scales(self, stream: int, slot: Any, start: Any, size: int, layout: Any) -> jax.Array:
        """Values of a stream that came with this stage; call `fence_scale_reads` before the stage is released."""
        window = self.streams[stream].at[slot, 0, pl.ds(start, size)]
        return plgpu.load(window, layout=layout, optimized=False)

    def load_slice_scale(self, stream: int, slot: Any, row: Any, i: jax.Array) -> jax.Array:
        """The scale of a stream of rows for slice `i`; call `fence_scale_reads` before the stage is released."""
        return self.streams[stream][slot, row, lax.rem(i, 4)]

    def fence_scale_reads(self) -> None:
        """Orders the reads of `load_scales` before the TMA write that follows the stage's release."""
        if self.needs_fence:
            plgpu.commit_smem()

    def a(self, slot: Any, first_row: int = 0, rows: int | None = None) -> Any:
        """The part's rows of a, or `rows` of them from the `first_row` on, (rows, 128), in shared memory."""
        return self.a_ring.at[slot, pl.ds(self.stage_row + first_row, rows or self.tile.rows)]

    def b(self, slot: Any, transposed: bool = True) -> Any:
        """The part's columns of b, as (128, cols) or as they lie, in shared memory."""
        columns = self.b_ring.at[slot, pl.ds(self.stage_col, self.tile.cols)]
        return columns.transpose((1, 0)) if transposed else columns


@dataclasses.dataclass(frozen=True)
class Stream:
    """Scales loaded with each stage: a window of an array of 4-byte values.

    `start(i, row, col)` is where the window begins, for slice `i` of the tile at this row and column of the product.
    The window's last side is a multiple of 32, no longer than the array's, and starts at a multiple of 4: starts off
    the 16-byte grid ended in an illegal instruction on an H200.
    """

    array: jax.Array
    window: tuple[int, int]
    start: Callable[[jax.Array, jax.Array, jax.Array], tuple[Any, Any]]

    @property
    def window_slices(self) -> Callable[[jax.Array, jax.Array, jax.Array], tuple[Any, ...]]:
        """From `i`, `row` and `col` to the window's slices; it closes over no array."""
        start, window = self.start, self.window
        return lambda i, row, col: tuple(map(pl.ds, start(i, row, col), window))

    @staticmethod
    def from_slices(scales: jax.Array, size: int, start: Callable[[jax.Array, jax.Array], jax.Array]) -> "Stream":
        """`size` values for each slice, of scales (width, steps of K); the quantize kernel's already lie transposed."""
        array = pad_axis(scales.T, 1, max(round_up(scales.shape[0], 4), size))
        return Stream(array, (1, size), lambda i, row, col: (i, start(row, col)))

    @staticmethod
    def from_rows(scales: jax.Array, rows: int, start: Callable[[jax.Array, jax.Array], jax.Array]) -> "Stream":
        """Of `rows` rows of scales (rows, steps of K): the slice's are at `i % 4`, then come those of slices after."""
        array = pad_axis(pad_axis(scales, 1, max(round_up(scales.shape[1], 4), 32)), 0, rows)
        return Stream(array, (rows, 32), lambda i, row, col: (start(row, col), lax.div(i, 4) * 4))


class SecondOperand(NamedTuple):
    """A second left operand, some of whose slices are multiplied as well, each after that of the first.

    Rows of tiles are as high as a tile. Their slices differ in number, so that rows are dealt out by `row_order`, the
    longest first, and every other turn of the thread blocks takes them backwards.

    Attributes:
        codes: the operand, of the shape of the first.
        scale: fp32 (rows of tiles, slices of K): not zero where the slice of the second is multiplied.
        slice_counts: int32 (rows of tiles,): how many slices of both there are.
        row_order: int32 (rows of tiles,): the rows in the order in which they are computed.
    """

    codes: jax.Array
    scale: jax.Array
    slice_counts: jax.Array
    row_order: jax.Array


class SlicePosition(NamedTuple):
    """Where a walk is: a slice's place along K, and 1 where it is of the second operand, else 0; int32."""

    k_index: jax.Array
    is_second: jax.Array

    def next_position(self, scale: jax.Array) -> "SlicePosition":
        """The step after, where `scale` is this part's."""
        is_second_next = ((scale != 0) & (self.is_second == 0)).astype(jnp.int32)
        return SlicePosition(self.k_index + 1 - is_second_next, is_second_next)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def covered_size(size: int, block: int, clustered: bool) -> int:
    """Rows or columns that whole tiles cover, at least `size`."""
    return round_up(size, block * (2 if clustered else 1))


def choose_cluster(size: int, block: int, axis: Literal["M", "N"] = "M") -> Literal["M", "N"] | None:
    """Clusters along an axis of this size where that leaves no block idle."""
    return axis if ceil_div(size, block) % 2 == 0 else None


def pad_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    if x.shape[axis] >= size:
        return x
    return jnp.pad(x, [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)])
