"""The shared state of the warpgroups of a Hopper product: the tile, the ring of stages, and their synchronisation."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

K_STEP = 128
WARPGROUPS = 2  # compute warpgroups


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tiling of a product: tuning only, never the result.

    Attributes:
        rows, cols: output tile of one compute warpgroup; rows a multiple of 64, cols a multiple of 32 up to 256.
        split: the dimension along which two warpgroups divide a tile. None: they alternate between whole tiles, and one
            multiplies while the other writes.
        num_stages: depth of the shared-memory ring, at least 2.
        band_width: width along N of the band of tiles that blocks walk together, for locality in L2.
        cluster: dimension along which the two blocks of a cluster lie; they share the other operand by multicast.
        lead_slices: slices of K by which the first of two warpgroups that share a tile leads the second. The promotions
            and the epilogue of one then overlap products of the other.
        store_slots: pieces of a warpgroup's output, 64 rows of 128 bytes, that may wait for their store. A tile of no
            more pieces is stored at once.
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
            raise ValueError(
                f"lead is {self.lead_slices}; it requires two warpgroups that share a tile with more stages"
            )

    @property
    def block_rows(self) -> int:
        return self.rows * (WARPGROUPS if self.split == "M" else 1)

    @property
    def block_cols(self) -> int:
        return self.cols * (WARPGROUPS if self.split == "N" else 1)

    @property
    def warpgroups_per_tile(self) -> int:
        """The number of compute warpgroups that share one tile."""
        return 1 if self.split is None else WARPGROUPS


@dataclasses.dataclass(frozen=True)
class WarpgroupPipeline:
    """One warpgroup's part of a tile, and the ring of stages with its operands.

    Attributes:
        row, col: position of the part in the product. group: index of the warpgroup.
        first_slice: number of slices in the ring before this tile.
        k_steps: number of slices of this tile; a traced value if tiles differ. It may then be 0.
        needs_fence: whether reads of scales need a fence before the stage is released. Without a cluster, every thread
            releases the stage after its own reads; in a cluster, one thread per block does it for the warpgroup. The
            interpreter supports only fences between a read and a TMA write.
        lead_barrier: completes when the first warpgroup leads by `tile.lead_slices` slices; None without a lead.
        is_k_major: whether K is the last dimension of a stage's operands, otherwise the first.
        first_k_slice: first slice of K in the operands.
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
    is_k_major: bool = True
    first_k_slice: Any = 0

    def wait_for_lead(self) -> None:
        """Block the second warpgroup at the start of a tile until the first one leads."""
        if self.lead_barrier is not None:
            pl.when(self.group == 1)(lambda: plgpu.barrier_wait(self.lead_barrier))

    @property
    def first_stage(self) -> jax.Array:
        """The stage of the tile's first slice."""
        return lax.rem(self.first_slice, jnp.int32(self.tile.num_stages))

    def loop_over_k(
        self,
        body: Callable[[jax.Array, list[Any], Any], Any],
        init: Any = None,
        unroll: int = 1,
        with_next: bool = False,
    ) -> Any:
        """Return the last carry of `carry = body(i, slots, carry)` over the slices of K.

        `body` gets `unroll` slices, i, i + 1 and so on, and the stages (buffers) that hold them. Remaining slices are
        passed together, or one at a time if their number is traced.

        Args:
            body: the function.
            init: the first carry.
            unroll: number of slices in an iteration.
            with_next: append the stage of the following slice to `slots`, or None after the last slice.
        """
        # Stages are carried: computed from `i`, they would keep the addresses of all stages in registers.
        count = self.k_steps - with_next
        num_iterations: Any = count
        remaining_slices: Any = 0
        if isinstance(count, int):
            num_iterations, remaining_slices = divmod(count, unroll)
        elif unroll > 1:
            num_iterations = lax.div(count, jnp.int32(unroll))
            remaining_slices = count - num_iterations * unroll

        def run_slices(count: int, i: jax.Array, slot: jax.Array, carry: Any) -> tuple[jax.Array, Any]:
            slots = [slot]
            for _ in range(count):
                slots.append(lax.select(slots[-1] == self.tile.num_stages - 1, jnp.int32(0), slots[-1] + 1))
            return slots[count], body(i, slots[: count + with_next], carry)

        state = self.first_stage, init
        if not isinstance(num_iterations, int) or num_iterations:
            state = lax.fori_loop(0, num_iterations, lambda j, state: run_slices(unroll, j * unroll, *state), state)
        if isinstance(remaining_slices, int):
            if remaining_slices:
                state = run_slices(remaining_slices, jnp.int32(num_iterations * unroll), *state)
        else:
            state = lax.fori_loop(num_iterations * unroll, count, lambda i, state: run_slices(1, i, *state), state)
        slot, carry = state
        return body(jnp.asarray(self.k_steps - 1, jnp.int32), [slot, None], carry) if with_next else carry

    def wait(self, slot: Any) -> None:
        """Block until the slice of this stage has arrived."""
        base = 0 if self.tile.split is not None else self.group * self.tile.num_stages
        plgpu.barrier_wait(self.full.at[base + slot])

    def release(self, slot: Any, slice_count: jax.Array | int) -> None:
        """Return the stage of slice number `slice_count` to the memory warpgroup; it must not be read afterwards."""
        plgpu.barrier_arrive(self.empty.at[slot])
        if self.lead_barrier is not None:
            leads = (self.group == 0) & (slice_count == self.tile.lead_slices)
            pl.when(leads)(lambda: plgpu.barrier_arrive(self.lead_barrier))

    def load_scales(self, stream: int, slot: Any, start: Any, size: int, layout: Any) -> jax.Array:
        """Return values of a stream from this stage; call `fence_scale_reads` before the stage is released."""
        window = self.streams[stream].at[slot, 0, pl.ds(start, size)]
        return plgpu.load(window, layout=layout, optimized=False)

    def load_slice_scale(self, stream: int, slot: Any, row: Any, i: jax.Array) -> jax.Array:
        """Return a scale of a stream of rows for slice `i`; call `fence_scale_reads` before the stage is released."""
        return self.streams[stream][slot, row, lax.rem(i + self.first_k_slice, 4)]

    def loop_unless_empty(self, loop: Callable[[], Any], init: Any, may_be_empty: bool) -> Any:
        """Return the result of `loop`, which needs a slice; `init` for a tile that has none."""
        return lax.cond(self.k_steps > 0, loop, lambda: init) if may_be_empty else loop()

    def fence_scale_reads(self) -> None:
        """Order the reads of `load_scales` before the TMA write that follows the release of the stage."""
        if self.needs_fence:
            plgpu.commit_smem()

    def a(self, slot: Any, first_row: int = 0, rows: int | None = None) -> Any:
        """Return `rows` rows of a in shared memory, (rows, K), from `first_row` of the part on; by default all."""
        window = pl.ds(self.stage_row + first_row, rows or self.tile.rows)
        return self.a_ring.at[slot, window] if self.is_k_major else self.a_ring.at[slot, :, window].transpose((1, 0))

    def b(self, slot: Any, transposed: bool = True) -> Any:
        """Return the part's columns of b in shared memory, as (K, cols), or (cols, K) without `transposed`."""
        window = pl.ds(self.stage_col, self.tile.cols)
        columns = self.b_ring.at[slot, window] if self.is_k_major else self.b_ring.at[slot, :, window]
        return columns.transpose((1, 0)) if transposed == self.is_k_major else columns


@dataclasses.dataclass(frozen=True)
class Stream:
    """Scales that are loaded with each stage: a window of an array of 4-byte values.

    `start(i, position)` is the start of the window, for slice `i` of the tile at this position. The window's last side
    is a multiple of 32, at most that of the array. It must start at a multiple of 4: other starts end in an illegal
    instruction.
    """

    array: jax.Array
    window: tuple[int, int]
    start: Callable[[jax.Array, "TilePosition"], tuple[Any, Any]]

    @property
    def window_slices(self) -> Callable[[jax.Array, "TilePosition"], tuple[Any, ...]]:
        """A function from `i` and the position to the window's slices, without a reference to the array."""
        start, window = self.start, self.window
        return lambda i, position: tuple(map(pl.ds, start(i, position), window))

    @staticmethod
    def from_slices(scales: jax.Array, size: int, start: Callable[["TilePosition"], jax.Array]) -> "Stream":
        """Return a stream of `size` values per slice from scales (width, steps of K), which are stored transposed."""
        array = pad_axis(scales.T, 1, max(round_up(scales.shape[0], 4), size))
        return Stream(array, (1, size), lambda i, position: (i, start(position)))

    @staticmethod
    def from_blocks(scales: jax.Array, size: int, start: Callable[["TilePosition"], jax.Array]) -> "Stream":
        """Return a stream of the scales of all blocks that `size` values touch, from (blocks of 128, steps of K).

        Those of slice `i` are at column `i % 4`.
        """
        # Values that start inside of a block extend into one more.
        rows = ceil_div(size, 128) + (size % 128 > 0)
        array = pad_axis(pad_axis(scales, 1, max(round_up(scales.shape[1], 4), 32)), 0, rows)
        return Stream(array, (rows, 32), lambda i, position: (start(position), lax.div(i, 4) * 4))


class TilePosition(NamedTuple):
    """The position of a tile in the output and in the operands; int32.

    Attributes:
        row, col: first row and column of the output.
        a_row, b_row: first rows of the operands, in arrays whose last dimension is K.
        num_slices: number of slices of K; an int if all tiles have the same.
        matrix: index of the tile's matrix in a grouped product, otherwise 0. It selects `scale` and `column_scale`.
        row_range: first row of the output that the tile writes, and the row after its last. None: all of its rows.
    """

    row: Any
    col: Any
    a_row: Any
    b_row: Any
    num_slices: Any
    first_slice: Any = 0
    matrix: Any = 0
    row_range: tuple[Any, Any] | None = None


class Schedule(NamedTuple):
    """The tiles of a product with different tiles, such as a grouped product.

    Attributes:
        arrays: int32 arrays; the two functions get references to them.
        num_tiles: function of the references that returns the number of tiles.
        position: function of the references and a tile's number that returns its `TilePosition`. The position for other
            numbers is arbitrary.
        is_sorted: whether tiles with more slices come first. Every other round of the thread blocks then runs
            backwards.
        zero_rows: function of the references that returns ranges of rows, (first, end), which no tile writes and the
            kernel sets to 0; None without these rows.
    """

    out_shape: tuple[int, int]
    arrays: tuple[jax.Array, ...]
    num_tiles: Callable[[Sequence[Any]], jax.Array]
    position: Callable[[Sequence[Any], jax.Array], TilePosition]
    is_sorted: bool = False
    zero_rows: Callable[[Sequence[Any]], Sequence[tuple[Any, Any]]] | None = None


class SecondOperand(NamedTuple):
    """A second left operand, for which some slices are multiplied as well, each after that of the first.

    Rows of tiles have different numbers of slices, of both operands; they are those of a `Schedule`.

    Attributes:
        codes: array of the first operand's shape.
        scale: fp32 (rows of tiles, slices of K); non-zero if the slice of `codes` is multiplied.
    """

    codes: jax.Array
    scale: jax.Array


class SlicePosition(NamedTuple):
    """A position in the K loop: index of the slice, and 1 for the second operand, otherwise 0; int32."""

    k_index: jax.Array
    is_second: jax.Array

    def next_position(self, scale: jax.Array) -> "SlicePosition":
        """Return the next position; `scale` is the second operand's scale at this slice."""
        is_second_next = ((scale != 0) & (self.is_second == 0)).astype(jnp.int32)
        return SlicePosition(self.k_index + 1 - is_second_next, is_second_next)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def covered_size(size: int, block: int, clustered: bool) -> int:
    """Return the number of rows or columns in whole tiles that cover `size`."""
    return round_up(size, block * (2 if clustered else 1))


def choose_cluster(size: int, block: int, axis: Literal["M", "N"] = "M") -> Literal["M", "N"] | None:
    """Return `axis` if clusters along it leave no block idle, otherwise None."""
    return axis if ceil_div(size, block) % 2 == 0 else None


def pad_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    if x.shape[axis] >= size:
        return x
    return jnp.pad(x, [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)])
